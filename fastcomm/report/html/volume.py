"""Page sections: communication volume, overlap, and windows between phases."""

import math

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.breakdown import overlap_ns
from fastcomm.metrics.result import Metrics
from fastcomm.report import html
from fastcomm.report.html import (
    Figure,
    FigureView,
    Missing,
    PageTable,
    Section,
    Spec,
    columns,
    number,
    text,
    unknown_section,
)
from fastcomm.report.html.drawing import (
    DASHES,
    QUIET_LEGEND,
    axis,
    bars,
    fill,
    height_of,
    rounded,
    rows_axis,
    series_color,
    spec,
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
        views=(FigureView(label="All", spec=_spec(by_tag, _unit(metrics))),),
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


def _spec(by_tag: dict[str, float], unit: str) -> Spec:
    """Return bars of bytes per step and rank, which is called `unit`, by parallelism."""
    values = [by_tag[tag] / _MB for tag in by_tag]
    labels = [html.size(count) for count in by_tag.values()]
    return bars(list(by_tag), values, labels, f"MB per step and {unit}", looks=list(by_tag))


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
        views=(FigureView(label="All", spec=_overlap_spec(tags, overlapped, not_overlapped)),),
        terms=("overlap.overlapped_ns", "overlap.not_overlapped_ns"),
        legend=(("compute", "overlapped by compute"), ("open", "not overlapped")),
        table=PageTable(
            name="overlap-table", caption="Overlap by parallelism", columns=heads, rows=rows
        ),
    )


def _overlap_spec(
    tags: list[str], overlapped: tuple[float, ...], not_overlapped: tuple[float, ...]
) -> Spec:
    """Return stacked bars, one per tag; the times are in ns per step and rank."""
    bars: list[Spec] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": tags,
            "x": [round(ns / _MS, 4) for ns in lengths],
            "text": [html.ns(ns) for ns in lengths],
            "textposition": "auto",
            "textangle": 0,
            "insidetextfont": {"color": f"var(--on-{look})"},
            "marker": fill(look),
            "hovertemplate": f"%{{y}}, {name}: %{{x:.3f}} ms<extra></extra>",
        }
        for name, look, lengths in (
            ("overlapped by compute", "compute", overlapped),
            ("not overlapped", "open", not_overlapped),
        )
    ]
    return spec(
        bars,
        height_of(len(tags), 150, 34),
        barmode="stack",
        bargap=0.3,
        xaxis=axis("ms per step and rank", rangemode="tozero"),
        yaxis=rows_axis(tags),
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
        blocks=(_windows_figure(metrics),),
        pitfall="A positive window is time without communication, not time without work: "
        "compute may fill it. A negative window means that the phases overlap.",
    )


def _windows_figure(metrics: Metrics) -> Figure:
    """Return the cumulative distributions of the pairs whose windows take the most time."""
    windows = sorted(
        metrics.windows or (), key=lambda window: -abs(window.mean_ns) * window.count
    )
    drawn = windows[:_MOST_PAIRS]
    by_pair = _windows_lengths(metrics)
    lines = [
        _line(
            place, f"{window.source} to {window.target}", by_pair[window.source, window.target]
        )
        for place, window in enumerate(drawn)
    ]
    ends = [min(line["x"][0] for line in lines), max(line["x"][-1] for line in lines)]
    shown = spec(
        lines,
        380,
        showlegend=True,
        legend=QUIET_LEGEND,
        xaxis=axis(
            "length of the window", **_ticks(ends), range=[ends[0] - 0.2, ends[1] + 0.2]
        ),
        yaxis=axis("share of windows up to this length", tickformat=".0%", range=[-0.02, 1.02]),
    )
    return Figure(
        name="windows-chart",
        title="Distribution of window lengths by pair",
        alt=f"Cumulative distributions of {len(drawn)} pairs; the table has their means.",
        views=(FigureView(label="All", spec=shown),),
        terms=("windows.window_ns",),
        note=f"The {len(drawn)} pairs that take the most time. The axis is linear up to 1 µs "
        "and logarithmic beyond.",
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


def _line(place: int, name: str, lengths: _Lengths) -> Spec:
    """Return the cumulative distribution of `lengths` (ns), at limited resolution.

    `place`, the number of the line from 0, determines its look.
    """
    count = len(lengths)
    share = np.unique(np.linspace(1, count, min(count, _POINTS)).astype(np.int64))
    at = lengths[share - 1]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [rounded(_axis_position(ns)) for ns in [at[0], *at]],
        "y": [rounded(part / count) for part in [0, *share]],
        "text": [html.ns(ns) for ns in [at[0], *at]],
        "hovertemplate": f"{name}: %{{y:.0%}} are at most %{{text}}<extra></extra>",
        "line": {
            "color": series_color(place),
            "width": 2.25,
            "dash": DASHES[place % len(DASHES)],
            "shape": "hv",
        },
    }


def _axis_position(ns: float) -> float:
    """Return the position of a window on an axis that is logarithmic on both sides of 0."""
    size = abs(ns) / _FLAT_NS
    return math.copysign(size if size <= 1 else 1 + math.log10(size), ns)


def _ticks(ends: list[float]) -> dict[str, list[float] | list[str]]:
    """Return ticks between two axis positions."""
    sizes = [0.0, *(10.0**power for power in range(3, 13))]
    signed = sorted({sign * size for size in sizes for sign in (-1, 1)})
    inside = [ns for ns in signed if ends[0] - 0.5 <= _axis_position(ns) <= ends[1] + 0.5]
    return {
        "tickvals": [_axis_position(ns) for ns in inside],
        "ticktext": ["0" if ns == 0 else tick(html.ns(ns)) for ns in inside],
    }


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
