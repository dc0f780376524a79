"""Page sections: communication volume, overlap, and windows between phases."""

import math

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.breakdown import PhaseWindows, overlap_ns
from fastcomm.metrics.result import Metrics
from fastcomm.report import html
from fastcomm.report.html import (
    Figure,
    FigureView,
    Missing,
    PageTable,
    Section,
    columns,
    number,
    text,
    unknown_section,
)
from fastcomm.report.html.charts import (
    Axis,
    BarChart,
    ChartLine,
    LineChart,
    Part,
    row_bars,
    tick,
)

_Lengths = NDArray[np.float64]  # ascending lengths of windows, in ns
_MB = 1e6


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
    title = "How many bytes are communicated?"
    if not by_tag:
        why = "no event has a known size" if metrics.volume else "there is no communication"
        return Section(
            name="volume",
            title=title,
            lead=("The volume is n/a: ", why, "."),
            blocks=(
                Missing(title=f"Bytes per step and {_unit(metrics)}", why=why),
                *([_table(metrics)] if metrics.volume else []),
            ),
        )
    most = max(by_tag, key=lambda tag: by_tag[tag])
    lead: html.Sentence = (
        most,
        " communicates the most: ",
        html.fact("volume.bytes_per_step_per_gpu", by_tag[most], html.size),
        f" of {metrics.bytes} bytes per step and {_unit(metrics)}.",
    )
    figure = Figure(
        name="volume-chart",
        title=f"Bytes per step and {_unit(metrics)}",
        alt="Bars: "
        + ", ".join(f"{tag} {html.size(count)}" for tag, count in by_tag.items())
        + ".",
        views=(FigureView(label="All", chart=_bars(by_tag, _unit(metrics))),),
        terms=("volume.bytes_per_step_per_gpu",),
    )
    return Section(
        name="volume",
        title=title,
        lead=lead,
        blocks=(figure, _table(metrics)),
        pitfall="A collective counts on each participating rank, and a message on both of its "
        "ranks. So the volume is the sum of the bytes that ranks pass to the library, not the "
        "traffic on links.",
    )


def _bars(by_tag: dict[str, float], unit: str) -> BarChart:
    """Return bars of bytes per step and rank, which is called `unit`, by parallelism."""
    values = [by_tag[tag] / _MB for tag in by_tag]
    labels = [html.size(count) for count in by_tag.values()]
    return row_bars(list(by_tag), values, labels, f"MB per step and {unit}", list(by_tag))


def _table(metrics: Metrics) -> PageTable:
    """Return the table of events and bytes by parallelism."""
    rows = []
    for tag, volume in metrics.volume.items():
        unsized = metrics.bandwidth[tag].events_without_bytes
        why = f"{html.many(unsized, 'event')} of unknown size"
        rows.append(
            (
                text(tag),
                number(volume.comm_events, html.whole),
                number(unsized, html.whole),
                number(volume.comm_bytes, html.size, why),
                number(volume.bytes_per_iteration, html.size, why),
                number(volume.bytes_per_step_per_gpu, html.size, why),
            )
        )
    return PageTable(
        name="volume-table",
        caption=f"Volume by parallelism, in {metrics.bytes} bytes",
        columns=columns(
            "by parallelism",
            ("events", "volume.comm_events"),
            ("unknown size", "bandwidth.events_without_bytes"),
            ("bytes", "volume.comm_bytes"),
            ("per iteration", "volume.bytes_per_iteration"),
            (f"per step and {_unit(metrics)}", "volume.bytes_per_step_per_gpu"),
        ),
        rows=tuple(rows),
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
    tags = [tag for tag, share in metrics.overlap.by_tag.items() if share is not None]
    overlapped, not_overlapped = zip(
        *(overlap_ns(metrics.tables["iterations"], tag) for tag in tags), strict=True
    )
    rows = tuple(
        (
            text(tag),
            number(
                metrics.overlap.by_tag[tag], html.percent, share=metrics.overlap.by_tag[tag]
            ),
            number(inside, html.ns),
            number(outside, html.ns),
        )
        for tag, inside, outside in zip(tags, overlapped, not_overlapped, strict=True)
    )
    heads = columns(
        "by parallelism",
        ("overlap", "overlap.by_tag"),
        ("overlapped", "overlap.overlapped_ns"),
        ("not overlapped", "overlap.not_overlapped_ns"),
    )
    spoken = ", ".join(f"{tag} {row[1].text}" for tag, row in zip(tags, rows, strict=True))
    return Figure(
        name="overlap-chart",
        title=_OVERLAP_TITLE,
        alt=f"Bars of overlapped and exposed communication. Overlap: {spoken}.",
        views=(FigureView(label="All", chart=_overlap_bars(tags, overlapped, not_overlapped)),),
        terms=("overlap.overlapped_ns", "overlap.not_overlapped_ns"),
        table=PageTable(
            name="overlap-table", caption="Overlap by parallelism", columns=heads, rows=rows
        ),
    )


def _overlap_bars(
    tags: list[str], overlapped: tuple[float, ...], not_overlapped: tuple[float, ...]
) -> BarChart:
    """Return stacked bars, one per tag; the times are in ns per step and rank."""
    parts = tuple(
        Part(
            name=name,
            look=look,
            values=[ns / _MS for ns in lengths],
            labels=[html.ns(ns) for ns in lengths],
            tips=[
                f"{tag}, {name}: {html.ns(ns)}" for tag, ns in zip(tags, lengths, strict=True)
            ],
        )
        for name, look, lengths in (
            ("overlapped by compute", "compute", overlapped),
            ("not overlapped", "open", not_overlapped),
        )
    )
    return BarChart(rows=tags, parts=parts, title="ms per step and rank")


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
    ends = [
        min(line.points[0][0] for line in lines),
        max(line.points[-1][0] for line in lines),
    ]
    x = Axis(
        title="length of the window", low=ends[0] - 0.2, high=ends[1] + 0.2, ticks=_ticks(ends)
    )
    y = Axis(
        title="share of windows up to this length", low=0.0, high=1.02,
        ticks=[(share / 100, html.percent(share / 100)) for share in (0, 25, 50, 75, 100)],
    )  # fmt: skip
    return Figure(
        name="windows-chart",
        title="Distribution of window lengths by pair",
        alt=f"Cumulative distributions of {len(drawn)} pairs; the table has their means.",
        views=(
            FigureView(
                label="All",
                chart=LineChart(
                    lines=lines,
                    x=x,
                    y=y,
                    chosen=drawn.index(longest) if longest in drawn else 0,
                ),
            ),
        ),
        terms=("windows.window_ns",),
        note=f"The {len(drawn)} pairs that take the most time; choose one to bring it out. The "
        "axis is linear up to 1 µs and logarithmic beyond.",
        table=_windows_table(metrics),
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


def _ticks(ends: list[float]) -> list[tuple[float, str]]:
    """Return ticks between two axis positions."""
    sizes = [0.0, *(10.0**power for power in range(3, 13))]
    signed = sorted({sign * size for size in sizes for sign in (-1, 1)})
    inside = [ns for ns in signed if ends[0] - 0.2 <= _axis_position(ns) <= ends[1] + 0.2]
    return [(_axis_position(ns), "0" if ns == 0 else tick(html.ns(ns))) for ns in inside]


def _windows_table(metrics: Metrics) -> PageTable:
    """Return the table of windows by pair of parallelisms, longest mean first."""
    rows = tuple(
        (
            text(f"{window.source} to {window.target}"),
            number(window.count, html.whole),
            *(number(ns, html.ns) for ns in (window.mean_ns, window.p50_ns, window.p95_ns)),
        )
        for window in sorted(metrics.windows or (), key=lambda window: -window.mean_ns)
    )
    return PageTable(
        name="windows-table",
        caption="Windows by pair of parallelisms",
        columns=columns(
            "windows",
            ("count", "windows.count"),
            ("mean", "windows.mean_ns"),
            ("median", "windows.p50_ns"),
            ("p95", "windows.p95_ns"),
        ),
        rows=rows,
    )
