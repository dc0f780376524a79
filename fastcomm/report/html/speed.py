"""Page section on bandwidth: by parallelism and by message size, compared with the link."""

import math
from itertools import groupby
from typing import Any

from fastcomm.metrics.result import Metrics
from fastcomm.report import html
from fastcomm.report.html import (
    Block,
    Fact,
    Figure,
    Missing,
    PageTable,
    Section,
    Sentence,
    figure,
    number,
    table,
)
from fastcomm.report.html.charts import (
    Axis,
    ChartLine,
    Level,
    LineChart,
    linear,
    row_bars,
    tick,
)

_GB = 1e9
NO_LINK = "the link's bandwidth is unknown: pass --link-bandwidth"
_NO_BYTES = "no event has a known size"
_NO_GROUP = "bus bytes depend on the number of ranks, which no event has"
_MOST_LINES = 10


def section(metrics: Metrics) -> Section:
    """Return the section on bus bandwidth by tag and by size, with the link as a line."""
    by_tag = {
        tag: speed.avg_bus_bw for tag, speed in metrics.bandwidth.items() if speed.avg_bus_bw
    }
    why = _why(metrics)
    blocks: list[Block] = []
    if by_tag:
        blocks += [_by_tag(metrics, by_tag), _by_size(metrics)]
    else:
        blocks.append(Missing(title="Bus bandwidth", why=why))
    if metrics.bandwidth:
        blocks.append(_table(metrics))
    noun = "collective" if metrics.is_host_run else "communication kernel"
    return Section(
        name="bandwidth",
        title="How well are the links used?",
        lead=_lead(metrics, by_tag) if by_tag else ("Bus bandwidth is n/a: ", why, "."),
        blocks=tuple(blocks),
        pitfall=f"The duration of a {noun} includes its wait for the other ranks: a low "
        "bandwidth is a slow link or a late rank. Only bus bytes can be compared with the "
        "speed of a link.",
    )


def _why(metrics: Metrics) -> str:
    """Return why bus bandwidth is unknown."""
    if not metrics.bandwidth:
        return "there is no communication"
    has_bytes = any(speed.avg_bw is not None for speed in metrics.bandwidth.values())
    return _NO_GROUP if has_bytes else _NO_BYTES


def _lead(metrics: Metrics, by_tag: dict[str, float]) -> Sentence:
    """Return the sentence on the slowest parallelism; `by_tag` has bus bytes per second."""
    slowest = min(by_tag, key=lambda tag: by_tag[tag])
    speed = metrics.bandwidth[slowest]
    text_: list[str | Fact] = [
        slowest,
        " is the slowest, with ",
        html.fact("bandwidth.avg_bus_bw", speed.avg_bus_bw, html.rate),
        " of bus bandwidth on average",
    ]
    if metrics.link_bandwidth is None:
        return (*text_, "; how much of the link that is, is n/a: ", NO_LINK, ".")
    use = html.fact("bandwidth.avg_bus_util", speed.avg_bus_util, html.percent)
    link = html.fact("link_bandwidth", metrics.link_bandwidth, html.rate)
    return (*text_, ": ", use, " of the link's ", link, ".")


def _by_tag(metrics: Metrics, by_tag: dict[str, float]) -> Figure:
    """Return bars of the mean bus bandwidth; `by_tag` has it in bytes per second."""
    tags, link = list(by_tag), metrics.link_bandwidth

    def label(rate: float) -> str:
        return html.percent(rate / link) if link else html.rate(rate)

    bars = row_bars(
        tags,
        list(by_tag.values()),
        label,
        "mean bus bandwidth, GB/s",
        _GB,
        looks=tags,
        level=_link_line(link),
    )
    spoken = ", ".join(f"{tag} {html.rate(value)}" for tag, value in by_tag.items())
    line = f" The link has {html.rate(link)}." if link else ""
    return figure(
        "bandwidth-chart",
        "Bus bandwidth by parallelism",
        f"Bars: {spoken}.{line}",
        bars,
        *("bandwidth.avg_bus_bw", "bandwidth.avg_bus_util", "link_bandwidth"),
        note="" if link else f"No share of the link: {NO_LINK}.",
    )


def _link_line(link: float | None) -> Level | None:
    """Return the line at the bandwidth of the link in bytes per second; None: no line."""
    return Level(value=link / _GB, label=f"link {html.rate(link)}") if link else None


def _by_size(metrics: Metrics) -> Block:
    """Return lines of the median bus bandwidth over message size, or why there are none."""
    rows = [row for row in metrics.tables["collectives"].to_pylist() if row["p50_bus_bw"]]
    title = "Bus bandwidth by size of the message"
    if not rows:
        return Missing(title=title, why="no event has a known size and a known group size")
    kinds = groupby(rows, key=lambda row: (row["op"], row["group_size"]))
    by_kind = [(kind, list(own)) for kind, own in kinds]
    by_kind.sort(key=lambda pair: -sum(row["count"] for row in pair[1]))
    lines = [_line(*pair) for pair in by_kind[:_MOST_LINES]]
    heights = [y for line in lines for _, y in line.points]
    link = _link_line(metrics.link_bandwidth)
    chart = LineChart(
        lines=lines,
        x=_sizes_axis(rows),
        y=linear("median bus bandwidth, GB/s", [*heights, *([link.value] if link else [])]),
        level=link,
    )
    more = len(by_kind) - len(lines)
    left_out = f"The {len(lines)} kinds with most events; {more} more are in the table."
    return figure(
        "sizes-chart",
        title,
        f"Lines of the median bus bandwidth over the size, one for each of {len(lines)} "
        "operations and group sizes; the table has the numbers.",
        chart,
        *("collectives.p50_bus_bw", "collectives.size_from"),
        note=left_out if more else "",
        table=_collectives(metrics),
    )


def _line(kind: tuple[str, int | None], rows: list[dict[str, Any]]) -> ChartLine:
    """Return the line of one kind of collectives: operation and group size.

    A row has one message size.
    """
    op, size = kind
    name = op if size is None else f"{op}, {size} ranks"
    return ChartLine(
        name=name,
        points=[(math.log10(row["size_from"] or 1), row["p50_bus_bw"] / _GB) for row in rows],
        tips=[
            f"{name}, {html.size(row['size_from'])} to {html.size(2 * row['size_from'])}, "
            f"{html.many(row['count'], 'event')}: {html.rate(row['p50_bus_bw'])}"
            for row in rows
        ],
    )


def _sizes_axis(rows: list[dict[str, Any]]) -> Axis:
    """Return a logarithmic axis with ticks at powers of ten."""
    sizes = [math.log10(row["size_from"] or 1) for row in rows]
    low, high = min(sizes) - 0.15, max(sizes) + 0.15
    powers = [power for power in range(16) if low <= power <= high]
    if not powers:
        low, high = math.floor(low), math.ceil(high)
        powers = list(range(low, high + 1))
    ticks = [(float(power), tick(html.size(10**power))) for power in powers]
    return Axis(title="size of the message", low=low, high=high, ticks=ticks)


def _collectives(metrics: Metrics) -> PageTable:
    """Return the table of median bus bandwidth by operation, group and message size."""
    no_size = "no group size is known"
    numbers = (
        ("ranks", "group_size", html.whole, no_size),
        ("size from", "size_from", html.size, ""),
        ("events", "count", html.whole, ""),
        ("bus bandwidth", "p50_bus_bw", html.rate, no_size),
    )
    return table(
        "collectives-table",
        "Median bus bandwidth by operation, group and size",
        [
            "operation",
            *((label, f"collectives.{name}", form, why) for label, name, form, why in numbers),
        ],
        [
            (row["op"], *(row[name] for _, name, _, _ in numbers))
            for row in metrics.tables["collectives"].to_pylist()
        ],
    )


def _table(metrics: Metrics) -> PageTable:
    """Return the table of bandwidth and utilization by parallelism."""
    rows = []
    for tag, speed in metrics.bandwidth.items():
        no_share = _NO_BYTES if speed.avg_bw is None else NO_LINK
        no_bus_rate = _NO_BYTES if speed.avg_bw is None else _NO_GROUP
        no_bus = no_bus_rate if speed.avg_bus_bw is None else NO_LINK
        rows.append(
            (
                *(tag, speed.avg_bw, number(speed.avg_bus_bw, html.rate, no_bus_rate)),
                number(speed.global_avg_util, html.percent, no_share),
                number(speed.avg_bus_util, html.percent, no_bus, share=speed.avg_bus_util),
                number(speed.p95_util, html.percent, no_share),
            )
        )
    return table(
        "bandwidth-table",
        f"Bandwidth by parallelism, in {metrics.bytes} bytes",
        [
            "by parallelism",
            ("bandwidth", "bandwidth.avg_bw", html.rate, _NO_BYTES),
            ("bus bandwidth", "bandwidth.avg_bus_bw", html.rate),
            ("utilization", "bandwidth.global_avg_util", html.percent),
            ("bus utilization", "bandwidth.avg_bus_util", html.percent),
            ("p95", "bandwidth.p95_util", html.percent),
        ],
        rows,
    )
