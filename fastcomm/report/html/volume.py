"""Page sections: communication volume, overlap, and windows between phases."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.breakdown import PhaseWindows
from fastcomm.metrics.result import Metrics
from fastcomm.report import html
from fastcomm.report.html import (
    Figure,
    PageTable,
    Section,
    figure,
    number,
    table,
    unknown_section,
)
from fastcomm.report.html.charts import (
    Axis,
    BarChart,
    ChartLine,
    LineChart,
    Part,
    row_bars,
    row_tips,
    tick,
)
from fastcomm.report.tables import metrics as tables

_Lengths = NDArray[np.float64]  # ascending lengths of windows, in ns
_MB = 1e6
_BYTES_KEY = "volume.bytes_per_step_per_gpu"


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
        numbers = (_table(metrics),) if metrics.volume else ()
        return replace(section, blocks=(*section.blocks, *numbers))
    tags, most = list(by_tag), max(by_tag, key=lambda tag: by_tag[tag])
    spoken = ", ".join(f"{tag} {html.size(count)}" for tag, count in by_tag.items())
    bars = row_bars(tags, list(by_tag.values()), html.size, f"MB {unit}", _MB, looks=tags)
    return Section(
        name=name,
        title=title,
        lead=(
            most,
            " communicates the most: ",
            html.fact(key, by_tag[most], html.size),
            f" of {metrics.bytes} bytes {unit}.",
        ),
        blocks=(
            figure("volume-chart", f"Bytes {unit}", f"Bars: {spoken}.", bars, key),
            _table(metrics),
        ),
        pitfall="A collective counts on each participating rank, and a message on both of its "
        "ranks. So the volume is the sum of the bytes that ranks pass to the library, not the "
        "traffic on links.",
    )


def _table(metrics: Metrics) -> PageTable:
    """Return the table of events and bytes by parallelism."""
    rows = []
    for tag, volume in metrics.volume.items():
        unsized = metrics.bandwidth[tag].events_without_bytes
        why = f"{html.many(unsized, 'event')} of unknown size"
        sizes = volume.comm_bytes, volume.bytes_per_iteration, volume.bytes_per_step_per_gpu
        cells = (number(size, html.size, why) for size in sizes)
        rows.append((tag, volume.comm_events, unsized, *cells))
    return table(
        "volume-table",
        f"Volume by parallelism, in {metrics.bytes} bytes",
        [
            "by parallelism",
            ("events", "volume.comm_events", html.whole),
            ("unknown size", "bandwidth.events_without_bytes", html.whole),
            ("bytes", "volume.comm_bytes", html.size),
            ("per iteration", "volume.bytes_per_iteration", html.size),
            (f"per step and {_unit(metrics)}", _BYTES_KEY, html.size),
        ],
        rows,
    )


_MS = 1e6
_OVERLAP_TITLE = "Overlapped and not overlapped communication"


def overlap_section(metrics: Metrics, why: str) -> Section:
    """Return the section on overlap with compute; `why` explains unknown values."""
    ratio = metrics.overlap.average_overlap_ratio
    title = "How much communication overlaps compute?"
    if ratio is None:
        why = why if metrics.volume else "there is no communication"
        return unknown_section("overlap", title, "The overlap is", _OVERLAP_TITLE, why)
    lead = (
        html.fact("overlap.average_overlap_ratio", ratio, html.percent),
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


def _least(metrics: Metrics) -> html.Sentence:
    """Name the tag with the least overlap, if there are several."""
    by_tag = {tag: share for tag, share in metrics.overlap.by_tag.items() if share is not None}
    if len(by_tag) == 1:
        return ()
    worst = min(by_tag, key=lambda tag: by_tag[tag])
    least = html.fact("overlap.by_tag", by_tag[worst], html.percent)
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
            labels=[html.ns(ns) for ns in lengths],
            tips=row_tips(tags, name, lengths, html.ns),
        )
        for name, look, lengths in (
            ("overlapped by compute", "compute", overlapped),
            ("not overlapped", "open", exposed),
        )
    ]
    heads: list[html.Head] = [
        "by parallelism",
        ("overlap", "overlap.by_tag", html.percent),
        ("overlapped", "overlap.overlapped_ns", html.ns),
        ("not overlapped", "overlap.not_overlapped_ns", html.ns),
    ]
    rows = [
        (tag, number(share, html.percent, share=share), *lengths)
        for (tag, share), lengths in zip(shares.items(), times, strict=True)
    ]
    spoken = ", ".join(f"{tag} {html.percent(share)}" for tag, share in shares.items())
    return figure(
        "overlap-chart",
        _OVERLAP_TITLE,
        f"Bars of overlapped and exposed communication. Overlap: {spoken}.",
        BarChart(rows=tags, parts=parts, title="ms per step and rank"),
        "overlap.overlapped_ns",
        "overlap.not_overlapped_ns",
        table=table("overlap-table", "Overlap by parallelism", heads, rows),
    )


_MOST_PAIRS = 8
_POINTS = 160
_FLAT_NS = 1000.0  # the axis is linear up to this, then logarithmic


def windows_section(metrics: Metrics, why: str) -> Section:
    """Return the section on windows between phases; `why` explains unknown values."""
    title = "How long are the gaps between phases of communication?"
    if not metrics.windows:
        why = why if metrics.windows is None else "no two phases follow each other"
        return unknown_section("windows", title, "Windows are", "Windows by pair", why)
    longest = max(metrics.windows, key=lambda window: window.mean_ns)
    lead = (
        f"The longest windows are from {longest.source} to {longest.target}: ",
        html.fact("windows.mean_ns", longest.mean_ns, html.ns),
        " on average, ",
        html.fact("windows.p95_ns", longest.p95_ns, html.ns),
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
    lines = [_line(window, by_pair[window.source, window.target]) for window in drawn]
    low = min(line.points[0][0] for line in lines) - 0.2
    high = max(line.points[-1][0] for line in lines) + 0.2
    x = Axis(title="length of the window", low=low, high=high, ticks=_ticks(low, high))
    y = Axis(
        title="share of windows up to this length", low=0.0, high=1.02,
        ticks=[(share / 100, html.percent(share / 100)) for share in (0, 25, 50, 75, 100)],
    )  # fmt: skip
    chosen = drawn.index(longest) if longest in drawn else 0
    return figure(
        "windows-chart",
        "Distribution of window lengths by pair",
        f"Cumulative distributions of {len(drawn)} pairs; the table has their means.",
        LineChart(lines=lines, x=x, y=y, chosen=chosen),
        "windows.window_ns",
        note=f"The {len(drawn)} pairs that take the most time; choose one to bring it out. The "
        "axis is linear up to 1 µs and logarithmic beyond.",
        table=html.shown(tables.windows(metrics)),
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


def _line(window: PhaseWindows, lengths: _Lengths) -> ChartLine:
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
        tip=f"{name}: half of {html.many(window.count, 'window')} are at most "
        f"{html.ns(window.p50_ns)}, 95 % at most {html.ns(window.p95_ns)}",
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
    return [(_axis_position(ns), "0" if ns == 0 else tick(html.ns(ns))) for ns in inside]
