"""How fast communication is, beside the link: by parallelism, and by the size of a message."""

from itertools import groupby
from typing import Any

from fastcomm.metrics.result import Metrics
from fastcomm.report import html
from fastcomm.report.html import (
    Block,
    Fact,
    Figure,
    FigureView,
    Missing,
    PageTable,
    Section,
    Spec,
    Words,
    columns,
    number,
    text,
)
from fastcomm.report.html.drawing import (
    DASHES,
    INK,
    QUIET_LEGEND,
    SYMBOLS,
    axis,
    bars,
    room,
    rounded,
    series_color,
    spec,
)

_GB = 1e9
NO_LINK = "the link's bandwidth is not given: --link-bandwidth"
_NO_BYTES = "no event tells its size"
_NO_GROUP = "no event tells how many ranks take part, which bus bytes depend on"
_MOST_LINES = 10


def section(found: Metrics) -> Section:
    """Bus bandwidth of each tag, and by size, with the link as a line."""
    known = {t: each.avg_bus_bw for t, each in found.bandwidth.items() if each.avg_bus_bw}
    why = _why(found)
    blocks: list[Block] = []
    if known:
        blocks += [_by_tag(found, known), _by_size(found)]
    else:
        blocks.append(Missing(title="Bus bandwidth", why=why))
    if found.bandwidth:
        blocks.append(_table(found))
    return Section(
        name="bandwidth",
        title="How well are the links used?",
        lead=_lead(found, known) if known else ("Bus bandwidth is n/a: ", why, "."),
        blocks=tuple(blocks),
        pitfall="The duration of a communication kernel includes its wait for the other ranks: "
        "a low bandwidth is a slow link or a late rank. Only bus bytes can be compared with "
        "the speed of a link.",
    )


def _why(found: Metrics) -> str:
    """Why there is no bus bandwidth, where there is none."""
    if not found.bandwidth:
        return "there is no communication"
    has_bytes = any(each.avg_bw is not None for each in found.bandwidth.values())
    return _NO_GROUP if has_bytes else _NO_BYTES


def _lead(found: Metrics, known: dict[str, float]) -> Words:
    slowest = min(known, key=lambda tag: known[tag])
    speed = found.bandwidth[slowest]
    words_: list[str | Fact] = [
        slowest,
        " is the slowest, with ",
        html.fact("bandwidth.avg_bus_bw", speed.avg_bus_bw, html.rate),
        " of bus bandwidth on average",
    ]
    if found.link_bandwidth is None:
        return (*words_, "; how much of the link that is, is n/a: ", NO_LINK, ".")
    use = html.fact("bandwidth.avg_bus_util", speed.avg_bus_util, html.percent)
    link = html.fact("link_bandwidth", found.link_bandwidth, html.rate)
    return (*words_, ": ", use, " of the link's ", link, ".")


def _by_tag(found: Metrics, known: dict[str, float]) -> Figure:
    tags, link = list(known), found.link_bandwidth
    most = max([*known.values(), link or 0.0]) / _GB
    drawn = bars(
        tags,
        [known[tag] / _GB for tag in tags],
        [_said(found, tag) for tag in tags],
        "mean bus bandwidth, GB/s",
        looks=tags,
        **_link_line(link, "x"),
    )
    drawn["layout"]["xaxis"]["range"] = room(most)
    spoken = ", ".join(f"{tag} {html.rate(each)}" for tag, each in known.items())
    line = f" The link has {html.rate(link)}." if link else ""
    return Figure(
        name="bandwidth-chart",
        title="Bus bandwidth by parallelism",
        alt=f"Bars: {spoken}.{line}",
        views=(FigureView(label="All", spec=drawn),),
        terms=("bandwidth.avg_bus_bw", "bandwidth.avg_bus_util", "link_bandwidth"),
        note="" if link else f"No share of the link: {NO_LINK}.",
    )


def _said(found: Metrics, tag: str) -> str:
    speed = found.bandwidth[tag]
    if speed.avg_bus_util is None:
        return html.rate(speed.avg_bus_bw or 0)
    return html.percent(speed.avg_bus_util)


def _link_line(link: float | None, side: str) -> dict[str, Any]:
    if not link:
        return {}
    at = link / _GB
    ends = (
        {"x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1}
        if side == "x"
        else {"y0": at, "y1": at, "xref": "paper", "x0": 0, "x1": 1}
    )
    place: dict[str, Any] = (
        {"x": at, "yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "right"}
        if side == "x"
        else {"y": at, "xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom"}
    )
    return {
        "shapes": [
            {"type": "line", **ends, "line": {"color": INK, "width": 1.5, "dash": "dash"}}
        ],
        "annotations": [
            {
                **place,
                "text": f"link {html.rate(link)}",
                "showarrow": False,
                "font": {"size": 12, "color": INK},
            }
        ],
        "margin": {"l": 8, "r": 16, "t": 24, "b": 40},
    }


def _by_size(found: Metrics) -> Block:
    rows = [row for row in found.tables["collectives"].to_pylist() if row["p50_bus_bw"]]
    title = "Bus bandwidth by size of the message"
    if not rows:
        return Missing(title=title, why="no event tells both its size and its group's")
    kinds = groupby(rows, key=lambda row: (row["op"], row["group_size"]))
    lines = [(key, list(own)) for key, own in kinds]
    chosen = sorted(lines, key=lambda pair: -sum(row["count"] for row in pair[1]))[:_MOST_LINES]
    left_out = len(lines) - len(chosen)
    drawn = spec(
        [_line(place, *each) for place, each in enumerate(chosen)],
        360,
        showlegend=True,
        legend=QUIET_LEGEND,
        xaxis=axis("size of the message", type="log", **_ticks(rows)),
        yaxis=axis("median bus bandwidth, GB/s", rangemode="tozero"),
        **_link_line(found.link_bandwidth, "y"),
    )
    return Figure(
        name="sizes-chart",
        title=title,
        alt=f"Lines of the median bus bandwidth over the size, one for each of {len(chosen)} "
        "operations and group sizes; the table has the numbers.",
        views=(FigureView(label="All", spec=drawn),),
        terms=("collectives.p50_bus_bw", "collectives.size_from"),
        note=f"The {len(chosen)} kinds with most events; {left_out} more are in the table."
        if left_out
        else "",
        table=_collectives(found),
    )


def _line(place: int, key: tuple[str, int | None], rows: list[dict[str, Any]]) -> Spec:
    op, size = key
    name = op if size is None else f"{op}, {size} ranks"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [row["size_from"] for row in rows],
        "y": [rounded(row["p50_bus_bw"] / _GB) for row in rows],
        "text": [
            f"{html.size(row['size_from'])} to {html.size(2 * row['size_from'])}, "
            f"{html.many(row['count'], 'event')}"
            for row in rows
        ],
        "hovertemplate": f"{name}<br>%{{text}}<br>%{{y:.2f}} GB/s<extra></extra>",
        "line": {
            "color": series_color(place),
            "width": 2,
            "dash": DASHES[place % len(DASHES)],
        },
        "marker": {"size": 9, "symbol": SYMBOLS[place % len(SYMBOLS)]},
    }


def _ticks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A tick every few powers of ten, in words."""
    sizes = [row["size_from"] for row in rows]
    powers = [10**power for power in range(16) if min(sizes) / 5 <= 10**power <= max(sizes) * 5]
    return {"tickvals": powers, "ticktext": [html.tick(html.size(power)) for power in powers]}


def _collectives(found: Metrics) -> PageTable:
    rows = tuple(
        (
            text(row["op"]),
            number(row["group_size"], html.whole, "no group size is known"),
            number(row["size_from"], html.size),
            number(row["count"], html.whole),
            number(row["p50_bus_bw"], html.rate, "no group size is known"),
        )
        for row in found.tables["collectives"].to_pylist()
    )
    return PageTable(
        name="collectives-table",
        caption="Median bus bandwidth by operation, group and size",
        columns=columns(
            "operation",
            ("ranks", "collectives.group_size"),
            ("size from", "collectives.size_from"),
            ("events", "collectives.count"),
            ("bus bandwidth", "collectives.p50_bus_bw"),
        ),
        rows=rows,
    )


def _table(found: Metrics) -> PageTable:
    rows = []
    for tag, each in found.bandwidth.items():
        lacks = _NO_BYTES if each.avg_bw is None else NO_LINK
        silent = _NO_BYTES if each.avg_bw is None else _NO_GROUP
        no_bus = silent if each.avg_bus_bw is None else NO_LINK
        rows.append(
            (
                text(tag),
                number(each.avg_bw, html.rate, _NO_BYTES),
                number(each.avg_bus_bw, html.rate, silent),
                number(each.global_avg_util, html.percent, lacks),
                number(each.avg_bus_util, html.percent, no_bus, share=each.avg_bus_util),
                number(each.p95_util, html.percent, lacks),
            )
        )
    return PageTable(
        name="bandwidth-table",
        caption=f"Bandwidth by parallelism, in {found.bytes} bytes",
        columns=columns(
            "by parallelism",
            ("bandwidth", "bandwidth.avg_bw"),
            ("bus bandwidth", "bandwidth.avg_bus_bw"),
            ("utilisation", "bandwidth.global_avg_util"),
            ("bus utilisation", "bandwidth.avg_bus_util"),
            ("p95", "bandwidth.p95_util"),
        ),
        rows=tuple(rows),
    )
