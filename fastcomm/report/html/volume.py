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
)

_Lengths = NDArray[np.float64]  # of windows, ascending, in ns
_MB = 1e6
_TITLE = "Bytes a step and GPU"


def volume_section(found: Metrics) -> Section:
    """Bytes of each tag that has events."""
    known = {
        tag: each.bytes_per_step_per_gpu
        for tag, each in found.volume.items()
        if each.bytes_per_step_per_gpu is not None
    }
    title = "How much is moved?"
    if not known:
        why = "no event tells its size" if found.volume else "there is no communication"
        return Section(
            name="volume",
            title=title,
            lead=("How much is moved is n/a: ", why, "."),
            blocks=(Missing(title=_TITLE, why=why), *([_table(found)] if found.volume else [])),
        )
    most = max(known, key=lambda tag: known[tag])
    lead: html.Words = (
        most,
        " moves the most: ",
        html.fact("volume.bytes_per_step_per_gpu", known[most], html.size),
        f" of {found.bytes} bytes a step and GPU.",
    )
    figure = Figure(
        name="volume-chart",
        title=_TITLE,
        alt="Bars: "
        + ", ".join(f"{tag} {html.size(each)}" for tag, each in known.items())
        + ".",
        views=(FigureView(label="All", spec=_spec(known)),),
        terms=("volume.bytes_per_step_per_gpu",),
    )
    return Section(
        name="volume",
        title=title,
        lead=lead,
        blocks=(figure, _table(found)),
        pitfall="A collective counts on each rank that takes part, and a transfer between two "
        "ranks on both: this is what ranks hand to the library, not what links carry.",
    )


def _spec(known: dict[str, float]) -> Spec:
    values = [known[tag] / _MB for tag in known]
    said = [html.size(each) for each in known.values()]
    return bars(list(known), values, said, "MB a step and GPU", looks=list(known))


def _table(found: Metrics) -> PageTable:
    rows = []
    for tag, each in found.volume.items():
        silent = found.bandwidth[tag].events_without_bytes
        why = f"{html.many(silent, 'event')} of unknown size"
        rows.append(
            (
                text(tag),
                number(each.comm_events, html.whole),
                number(silent, html.whole),
                number(each.comm_bytes, html.size, why),
                number(each.bytes_per_iteration, html.size, why),
                number(each.bytes_per_step_per_gpu, html.size, why),
            )
        )
    return PageTable(
        name="volume-table",
        caption=f"Volume by parallelism, in {found.bytes} bytes",
        columns=columns(
            "by parallelism",
            ("events", "volume.comm_events"),
            ("unknown size", "bandwidth.events_without_bytes"),
            ("bytes", "volume.comm_bytes"),
            ("an iteration", "volume.bytes_per_iteration"),
            ("a step and GPU", "volume.bytes_per_step_per_gpu"),
        ),
        rows=tuple(rows),
    )


_MS = 1e6
_OVERLAP_TITLE = "Communication under compute and beside it"


def overlap_section(found: Metrics, why: str) -> Section:
    """Hidden and open communication of each tag, in a step of a rank."""
    ratio = found.overlap.average_overlap_ratio
    title = "How much communication hides behind compute?"
    if ratio is None:
        why = why if found.volume else "there is no communication"
        return unknown_section("overlap", title, "How much hides is", _OVERLAP_TITLE, why)
    lead = (
        html.fact("overlap.average_overlap_ratio", ratio, html.percent),
        " of the communication runs under compute",
        *_least(found),
        ".",
    )
    return Section(
        name="overlap",
        title=title,
        lead=lead,
        blocks=(_figure(found),),
        pitfall="A mean of ratios: an iteration with little communication weighs as much as "
        "one with a lot. Communication of one tag under that of another is not hidden.",
    )


def _least(found: Metrics) -> html.Words:
    """The tag of which the least is hidden, where there are several."""
    known = {tag: share for tag, share in found.overlap.by_tag.items() if share is not None}
    if len(known) == 1:
        return ()
    worst = min(known, key=lambda tag: known[tag])
    least = html.fact("overlap.by_tag", known[worst], html.percent)
    return ("; of ", worst, " only ", least)


def _figure(found: Metrics) -> Figure:
    tags = [tag for tag, share in found.overlap.by_tag.items() if share is not None]
    hidden, open_ = zip(
        *(overlap_ns(found.tables["iterations"], tag) for tag in tags), strict=True
    )
    rows = tuple(
        (
            text(tag),
            number(found.overlap.by_tag[tag], html.percent, share=found.overlap.by_tag[tag]),
            number(under, html.ns),
            number(beside, html.ns),
        )
        for tag, under, beside in zip(tags, hidden, open_, strict=True)
    )
    heads = columns(
        "by parallelism",
        ("overlap", "overlap.by_tag"),
        ("hidden", "overlap.hidden_ns"),
        ("not hidden", "overlap.open_ns"),
    )
    spoken = ", ".join(f"{tag} {row[1].text}" for tag, row in zip(tags, rows, strict=True))
    return Figure(
        name="overlap-chart",
        title=_OVERLAP_TITLE,
        alt=f"Bars of hidden and open communication. Hidden share: {spoken}.",
        views=(FigureView(label="All", spec=_overlap_spec(tags, hidden, open_)),),
        terms=("overlap.hidden_ns", "overlap.open_ns"),
        legend=(("compute", "hidden behind compute"), ("open", "not hidden")),
        table=PageTable(
            name="overlap-table", caption="Overlap by parallelism", columns=heads, rows=rows
        ),
    )


def _overlap_spec(tags: list[str], hidden: tuple[float, ...], open_: tuple[float, ...]) -> Spec:
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
            ("hidden behind compute", "compute", hidden),
            ("not hidden", "open", open_),
        )
    ]
    return spec(
        bars,
        height_of(len(tags), 150, 34),
        barmode="stack",
        bargap=0.3,
        xaxis=axis("ms of a step and rank", rangemode="tozero"),
        yaxis=rows_axis(tags),
    )


_MOST_PAIRS = 8
_POINTS = 160
_FLAT_NS = 1000.0  # up to here the axis is linear, past it logarithmic


def windows_section(found: Metrics, why: str) -> Section:
    """Cumulative distributions of the pairs that take the most time, and a table of all."""
    title = "What lies between phases of communication?"
    if not found.windows:
        why = why if found.windows is None else "no two phases follow each other"
        return unknown_section("windows", title, "Windows are", "Windows by pair", why)
    widest = max(found.windows, key=lambda window: window.mean_ns)
    lead = (
        f"The widest window is that from {widest.source} to {widest.target}: ",
        html.fact("windows.mean_ns", widest.mean_ns, html.ns),
        " on average, ",
        html.fact("windows.p95_ns", widest.p95_ns, html.ns),
        " at the 95th percentile.",
    )
    return Section(
        name="windows",
        title=title,
        lead=lead,
        blocks=(_windows_figure(found),),
        pitfall="A positive window is time without communication, not time without work: "
        "compute may fill it. A negative one means that the phases overlap.",
    )


def _windows_figure(found: Metrics) -> Figure:
    windows = sorted(found.windows or (), key=lambda each: -abs(each.mean_ns) * each.count)
    drawn = windows[:_MOST_PAIRS]
    by_pair = _windows_lengths(found)
    lines = [
        _line(place, f"{each.source} to {each.target}", by_pair[each.source, each.target])
        for place, each in enumerate(drawn)
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
        yaxis=axis("share that is no longer", tickformat=".0%", range=[-0.02, 1.02]),
    )
    return Figure(
        name="windows-chart",
        title="Windows by pair: how many are no longer than that",
        alt=f"Cumulative distributions of {len(drawn)} pairs; the table has their means.",
        views=(FigureView(label="All", spec=shown),),
        terms=("windows.window_ns",),
        note=f"The {len(drawn)} pairs that take the most time. The axis is linear up to 1 µs "
        "and logarithmic beyond.",
        table=_windows_table(found),
    )


def _windows_lengths(found: Metrics) -> dict[tuple[str, str], _Lengths]:
    table = found.tables["windows_cdf"]
    source, target = (np.array(table[name].to_pylist(), object) for name in ("from", "to"))
    length = table["window_ns"].to_numpy().astype(np.float64)
    return {
        (each.source, each.target): length[(source == each.source) & (target == each.target)]
        for each in found.windows or ()
    }


def _line(place: int, name: str, lengths: _Lengths) -> Spec:
    """The distribution at so many points as one sees; of few windows every one is a step."""
    count = len(lengths)
    share = np.unique(np.linspace(1, count, min(count, _POINTS)).astype(np.int64))
    at = lengths[share - 1]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [rounded(_bent(ns)) for ns in [at[0], *at]],
        "y": [rounded(part / count) for part in [0, *share]],
        "text": [html.ns(ns) for ns in [at[0], *at]],
        "hovertemplate": f"{name}: %{{y:.0%}} are no longer than %{{text}}<extra></extra>",
        "line": {
            "color": series_color(place),
            "width": 2.25,
            "dash": DASHES[place % len(DASHES)],
            "shape": "hv",
        },
    }


def _bent(ns: float) -> float:
    """Where a window lies on an axis that has both signs and many scales."""
    size = abs(ns) / _FLAT_NS
    return math.copysign(size if size <= 1 else 1 + math.log10(size), ns)


def _ticks(ends: list[float]) -> dict[str, list[float] | list[str]]:
    sizes = [0.0, *(10.0**power for power in range(3, 13))]
    both = sorted({sign * size for size in sizes for sign in (-1, 1)})
    inside = [ns for ns in both if ends[0] - 0.5 <= _bent(ns) <= ends[1] + 0.5]
    return {
        "tickvals": [_bent(ns) for ns in inside],
        "ticktext": ["0" if ns == 0 else html.tick(html.ns(ns)) for ns in inside],
    }


def _windows_table(found: Metrics) -> PageTable:
    rows = tuple(
        (
            text(f"{each.source} to {each.target}"),
            number(each.count, html.whole),
            *(number(ns, html.ns) for ns in (each.mean_ns, each.p50_ns, each.p95_ns)),
        )
        for each in sorted(found.windows or (), key=lambda each: -each.mean_ns)
    )
    return PageTable(
        name="windows-table",
        caption="Windows by pair of tags",
        columns=columns(
            "windows",
            ("count", "windows.count"),
            ("mean", "windows.mean_ns"),
            ("median", "windows.p50_ns"),
            ("p95", "windows.p95_ns"),
        ),
        rows=rows,
    )
