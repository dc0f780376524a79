"""Page sections: volume of communication, overlap, windows, and bandwidth beside the link."""

import math
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics import tables
from fastcomm.metrics.breakdown import PhaseWindows
from fastcomm.metrics.result import Metrics
from fastcomm.show import pages
from fastcomm.show.charts import (
    Axis,
    BarChart,
    ChartLine,
    Level,
    LineChart,
    Part,
    linear,
    row_bars,
    row_tips,
    tick,
)
from fastcomm.show.pages import (
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
    unknown_section,
)

_Lengths = NDArray[np.float64]  # ascending lengths of windows, in ns
_MB = 1e6
_BYTES_KEY = "metrics.volume.bytes_per_step_per_gpu"
_MS = 1e6
_OVERLAP_TITLE = "Overlapped and not overlapped communication"
_MOST_PAIRS = 8
_POINTS = 160
_FLAT_NS = 1000.0  # the axis is linear up to this, then logarithmic
_GB = 1e9
_MOST_LINES = 10


def _unit(metrics: Metrics) -> str:
    """Return what a rank is."""
    return "rank" if metrics.is_host_run else "GPU"


def volume_section(metrics: Metrics) -> Section:
    """Return the section on communicated bytes by parallelism."""
    by_tag = {
        tag: volume.bytes_per_step_per_gpu
        for tag, volume in metrics.volume.items()
        if volume.bytes_per_step_per_gpu is not None
    }
    name, title, key = "volume", "How many bytes are communicated?", _BYTES_KEY
    unit = f"per step and {_unit(metrics)}"
    if not by_tag:
        why = "no event has a known size" if metrics.volume else "there is no communication"
        section = unknown_section(name, title, "The volume is", f"Bytes {unit}", why)
        numbers = (pages.shown(tables.volume(metrics)),) if metrics.volume else ()
        return replace(section, blocks=(*section.blocks, *numbers))
    tags, most = list(by_tag), max(by_tag, key=lambda tag: by_tag[tag])
    spoken = ", ".join(f"{tag} {pages.size(count)}" for tag, count in by_tag.items())
    bars = row_bars(tags, list(by_tag.values()), pages.size, f"MB {unit}", _MB, looks=tags)
    return Section(
        name=name,
        title=title,
        lead=(
            most,
            " communicates the most: ",
            pages.fact(key, by_tag[most], pages.size),
            f" of {metrics.bytes} bytes {unit}.",
        ),
        blocks=(
            figure("volume-chart", f"Bytes {unit}", f"Bars: {spoken}.", bars, key),
            pages.shown(tables.volume(metrics)),
        ),
        pitfall="A collective counts on each participating rank, and a message on both of its "
        "ranks. So the volume is the sum of the bytes that ranks pass to the library, not the "
        "traffic on links.",
    )


def pairs_section(metrics: Metrics) -> Section | None:
    """Return the section on bytes of pairs of ranks; None without all-to-alls."""
    pairs, unit = metrics.rank_pairs, _unit(metrics)
    if not pairs.events:
        return None
    name, title = "pairs", "Which ranks exchange the most?"
    chart_title = f"All-to-alls: bytes from {unit} to {unit}"
    if pairs.unknown is not None:
        return unknown_section(name, title, "Bytes of pairs are", chart_title, pairs.unknown)
    grid, ranks = metrics.pair_matrix
    lead: Sentence = (
        f"{unit[0].upper()}{unit[1:]} {pairs.fullest_rank} receives the most in all-to-alls: ",
        pages.fact(
            "metrics.rank_pairs.fullest_over_mean",
            pairs.fullest_over_mean,
            pages.times,
            why="no byte is sent",
        ),
        " the mean.",
    )
    without = pairs.events_without_splits
    note = f"{pages.many(without, 'all-to-all')} without splits are not in it."
    drawn = pages.pairs_figure(
        grid / _MB,
        ranks,
        unit="MB",
        noun=unit,
        title=chart_title,
        term="metrics.rank_pairs.pairs.bytes_per_step",
        note=note if without else "",
    )
    return Section(
        name=name,
        title=title,
        lead=lead,
        blocks=(drawn,),
        pitfall="These are the bytes that calls of all-to-alls pass to the library, by their "
        "recorded splits; what a rank sends to itself stays there. The load of single experts "
        "is in no trace: what a rank receives is that of all its experts together.",
    )


def overlap_section(metrics: Metrics, why: str) -> Section:
    """Return the section on overlap with compute; `why` explains unknown values."""
    ratio = metrics.overlap.average_overlap_ratio
    title = "How much communication overlaps compute?"
    if ratio is None:
        why = why if metrics.volume else "there is no communication"
        return unknown_section("overlap", title, "The overlap is", _OVERLAP_TITLE, why)
    lead = (
        pages.fact("metrics.overlap.average_overlap_ratio", ratio, pages.percent),
        " of the communication overlaps compute",
        *_least(metrics),
        ".",
    )
    return Section(
        name="overlap",
        title=title,
        lead=lead,
        blocks=(_figure(metrics),),
        pitfall="The average is a mean of ratios: iterations with little and with much "
        "communication have equal weight. Communication of one tag that runs beside "
        "communication of another is not overlapped.",
    )


def _least(metrics: Metrics) -> pages.Sentence:
    """Name the tag with the least overlap, if there are several."""
    by_tag = {tag: share for tag, share in metrics.overlap.by_tag.items() if share is not None}
    if len(by_tag) == 1:
        return ()
    worst = min(by_tag, key=lambda tag: by_tag[tag])
    least = pages.fact("metrics.overlap.by_tag", by_tag[worst], pages.percent)
    return ("; ", worst, " has the least overlap, ", least)


def _figure(metrics: Metrics) -> Figure:
    """Return the chart of overlapped and not overlapped communication by parallelism."""
    shares = {tag: share for tag, share in metrics.overlap.by_tag.items() if share is not None}
    tags = list(shares)
    times = [metrics.overlap_ns(tag) for tag in tags]
    overlapped, exposed = zip(*times, strict=True)
    parts = [
        Part(
            name=name,
            look=look,
            values=[ns / _MS for ns in lengths],
            labels=[pages.ns(ns) for ns in lengths],
            tips=row_tips(tags, name, lengths, pages.ns),
        )
        for name, look, lengths in (
            ("overlapped by compute", "compute", overlapped),
            ("not overlapped", "open", exposed),
        )
    ]
    heads: list[pages.Head] = [
        "by parallelism",
        ("overlap", "metrics.overlap.by_tag", pages.percent),
        ("overlapped", "pages.overlapped", pages.ns),
        ("not overlapped", "pages.not_overlapped", pages.ns),
    ]
    rows = [
        (tag, number(share, pages.percent, share=share), *lengths)
        for (tag, share), lengths in zip(shares.items(), times, strict=True)
    ]
    spoken = ", ".join(f"{tag} {pages.percent(share)}" for tag, share in shares.items())
    return figure(
        "overlap-chart",
        _OVERLAP_TITLE,
        f"Bars of overlapped and exposed communication. Overlap: {spoken}.",
        BarChart(rows=tags, parts=parts, title="ms per step and rank"),
        "pages.overlapped",
        "pages.not_overlapped",
        table=table("overlap-table", "Overlap by parallelism", heads, rows),
    )


def windows_section(metrics: Metrics, why: str) -> Section:
    """Return the section on windows between phases; `why` explains unknown values."""
    title = "How long are the gaps between phases of communication?"
    if not metrics.windows:
        why = why if metrics.windows is None else "no two phases follow each other"
        return unknown_section("windows", title, "Windows are", "Windows by pair", why)
    longest = max(metrics.windows, key=lambda window: window.mean_ns)
    lead = (
        f"The longest windows are from {longest.source} to {longest.target}: ",
        pages.fact("metrics.windows.mean_ns", longest.mean_ns, pages.ns),
        " on average, ",
        pages.fact("metrics.windows.p95_ns", longest.p95_ns, pages.ns),
        " at the 95th percentile.",
    )
    return Section(
        name="windows",
        title=title,
        lead=lead,
        blocks=(_windows_figure(metrics, longest),),
        pitfall="A positive window is time without communication, not time without work: "
        "compute may fill it. A negative window means that the phases overlap.",
    )


def _windows_figure(metrics: Metrics, longest: PhaseWindows) -> Figure:
    """Return the distributions of the pairs whose windows take the most time.

    `longest` is in color at first.
    """
    windows = sorted(
        metrics.windows or (), key=lambda window: -abs(window.mean_ns) * window.count
    )
    drawn = windows[:_MOST_PAIRS]
    by_pair = _windows_lengths(metrics)
    lines = [_volume_line(window, by_pair[window.source, window.target]) for window in drawn]
    low = min(line.points[0][0] for line in lines) - 0.2
    high = max(line.points[-1][0] for line in lines) + 0.2
    x = Axis(title="length of the window", low=low, high=high, ticks=_ticks(low, high))
    y = Axis(
        title="share of windows up to this length", low=0.0, high=1.02,
        ticks=[(share / 100, pages.percent(share / 100)) for share in (0, 25, 50, 75, 100)],
    )  # fmt: skip
    chosen = drawn.index(longest) if longest in drawn else 0
    return figure(
        "windows-chart",
        "Distribution of window lengths by pair",
        f"Cumulative distributions of {len(drawn)} pairs; the table has their means.",
        LineChart(lines=lines, x=x, y=y, chosen=chosen),
        "metrics.windows",
        note=f"The {len(drawn)} pairs that take the most time; choose one to bring it out. The "
        "axis is linear up to 1 µs and logarithmic beyond.",
        table=pages.shown(tables.windows(metrics)),
    )


def _windows_lengths(metrics: Metrics) -> dict[tuple[str, str], _Lengths]:
    """Return the lengths of windows in ns, ascending, by the tags before and after."""
    table = metrics.tables["windows_cdf"]
    source, target = (np.array(table[name].to_pylist(), object) for name in ("from", "to"))
    length = table["window_ns"].to_numpy().astype(np.float64)
    return {
        (window.source, window.target): length[
            (source == window.source) & (target == window.target)
        ]
        for window in metrics.windows or ()
    }


def _volume_line(window: PhaseWindows, lengths: _Lengths) -> ChartLine:
    """Return the cumulative distribution of `lengths` (ns), at limited resolution."""
    count = len(lengths)
    share = np.unique(np.linspace(1, count, min(count, _POINTS)).astype(np.int64))
    points = [(_axis_position(lengths[0]), 0.0)]
    for part, ns in zip(share.tolist(), lengths[share - 1].tolist(), strict=True):
        at = _axis_position(ns)
        points += [(at, points[-1][1]), (at, part / count)]
    name = f"{window.source} to {window.target}"
    return ChartLine(
        name=name,
        points=points,
        has_marks=False,
        tip=f"{name}: half of {pages.many(window.count, 'window')} are at most "
        f"{pages.ns(window.p50_ns)}, 95 % at most {pages.ns(window.p95_ns)}",
    )


def _axis_position(ns: float) -> float:
    """Return the position of a window on an axis that is logarithmic on both sides of 0."""
    size = abs(ns) / _FLAT_NS
    return math.copysign(size if size <= 1 else 1 + math.log10(size), ns)


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return ticks between two axis positions."""
    sizes = [0.0, *(10.0**power for power in range(3, 13))]
    signed = sorted({sign * size for size in sizes for sign in (-1, 1)})
    inside = [ns for ns in signed if low <= _axis_position(ns) <= high]
    return [(_axis_position(ns), "0" if ns == 0 else tick(pages.ns(ns))) for ns in inside]


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
        blocks.append(pages.shown(tables.bandwidth(metrics)))
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
    return tables.NO_GROUP if has_bytes else tables.NO_BYTES


def _lead(metrics: Metrics, by_tag: dict[str, float]) -> Sentence:
    """Return the sentence on the slowest parallelism; `by_tag` has bus bytes per second."""
    slowest = min(by_tag, key=lambda tag: by_tag[tag])
    speed = metrics.bandwidth[slowest]
    text_: list[str | Fact] = [
        slowest,
        " is the slowest, with ",
        pages.fact("metrics.bandwidth.avg_bus_bw", speed.avg_bus_bw, pages.rate),
        " of bus bandwidth on average",
    ]
    if metrics.link_bandwidth is None:
        return (*text_, "; how much of the link that is, is n/a: ", tables.NO_LINK, ".")
    use = pages.fact("metrics.bandwidth.avg_bus_util", speed.avg_bus_util, pages.percent)
    link = pages.fact("metrics.link_bandwidth", metrics.link_bandwidth, pages.rate)
    return (*text_, ": ", use, " of the link's ", link, ".")


def _by_tag(metrics: Metrics, by_tag: dict[str, float]) -> Figure:
    """Return bars of the mean bus bandwidth; `by_tag` has it in bytes per second."""
    tags, link = list(by_tag), metrics.link_bandwidth

    def label(rate: float) -> str:
        return pages.percent(rate / link) if link else pages.rate(rate)

    bars = row_bars(
        tags,
        list(by_tag.values()),
        label,
        "mean bus bandwidth, GB/s",
        _GB,
        looks=tags,
        level=_link_line(link),
    )
    spoken = ", ".join(f"{tag} {pages.rate(value)}" for tag, value in by_tag.items())
    line = f" The link has {pages.rate(link)}." if link else ""
    return figure(
        "bandwidth-chart",
        "Bus bandwidth by parallelism",
        f"Bars: {spoken}.{line}",
        bars,
        *(
            "metrics.bandwidth.avg_bus_bw",
            "metrics.bandwidth.avg_bus_util",
            "metrics.link_bandwidth",
        ),
        note="" if link else f"No share of the link: {tables.NO_LINK}.",
    )


def _link_line(link: float | None) -> Level | None:
    """Return the line at the bandwidth of the link in bytes per second; None: no line."""
    return Level(value=link / _GB, label=f"link {pages.rate(link)}") if link else None


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
        *("metrics.collectives.p50_bus_bw", "metrics.collectives.size_from"),
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
            f"{name}, {pages.size(row['size_from'])} to {pages.size(2 * row['size_from'])}, "
            f"{pages.many(row['count'], 'event')}: {pages.rate(row['p50_bus_bw'])}"
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
    ticks = [(float(power), tick(pages.size(10**power))) for power in powers]
    return Axis(title="size of the message", low=low, high=high, ticks=ticks)


def _collectives(metrics: Metrics) -> PageTable:
    """Return the table of median bus bandwidth by operation, group and message size."""
    no_size = "no group size is known"
    numbers = (
        ("ranks", "group_size", pages.count, no_size),
        ("size from", "size_from", pages.size, ""),
        ("events", "count", pages.count, ""),
        ("bus bandwidth", "p50_bus_bw", pages.rate, no_size),
    )
    return table(
        "collectives-table",
        "Median bus bandwidth by operation, group and size",
        [
            "operation",
            *(
                (label, f"metrics.collectives.{name}", form, why)
                for label, name, form, why in numbers
            ),
        ],
        [
            (row["op"], *(row[name] for _, name, _, _ in numbers))
            for row in metrics.tables["collectives"].to_pylist()
        ],
    )
