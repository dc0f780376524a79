"""What lies between phases of communication: the distribution of windows by pair of tags."""

import math

import numpy as np

from fastcomm.metrics.result import Metrics
from fastcomm.report.html import words
from fastcomm.report.html.by_rank import Floats
from fastcomm.report.html.drawing import (
    DASHES,
    QUIET_LEGEND,
    axis,
    rounded,
    series_color,
    spec,
)
from fastcomm.report.html.page import (
    Figure,
    Missing,
    Section,
    Spec,
    Table,
    View,
    columns,
    number,
    text,
)

_MOST_PAIRS = 8
_POINTS = 160
_FLAT_NS = 1000.0  # up to here the axis is linear, past it logarithmic


def section(found: Metrics, why: str) -> Section:
    """Cumulative distributions of the pairs that take the most time, and a table of all."""
    title = "What lies between phases of communication?"
    if not found.windows:
        why = why if found.windows is None else "no two phases follow each other"
        missing = Missing(title="Windows by pair", why=why)
        lead: words.Words = ("Windows are n/a: ", why, ".")
        return Section(name="windows", title=title, lead=lead, blocks=(missing,))
    widest = max(found.windows, key=lambda window: window.mean_ns)
    lead = (
        f"The widest window is that from {widest.source} to {widest.target}: ",
        words.fact("windows.mean_ns", widest.mean_ns, words.ns),
        " on average, ",
        words.fact("windows.p95_ns", widest.p95_ns, words.ns),
        " at the 95th percentile.",
    )
    return Section(
        name="windows",
        title=title,
        lead=lead,
        blocks=(_figure(found),),
        pitfall="A positive window is time without communication, not time without work: "
        "compute may fill it. A negative one means that the phases overlap.",
    )


def _figure(found: Metrics) -> Figure:
    windows = sorted(found.windows or (), key=lambda each: -abs(each.mean_ns) * each.count)
    drawn = windows[:_MOST_PAIRS]
    by_pair = _lengths(found)
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
        views=(View(label="All", spec=shown),),
        terms=("windows.window_ns",),
        note=f"The {len(drawn)} pairs that take the most time. The axis is linear up to 1 µs "
        "and logarithmic beyond.",
        table=_table(found),
    )


def _lengths(found: Metrics) -> dict[tuple[str, str], Floats]:
    table = found.tables["windows_cdf"]
    source, target = (np.array(table[name].to_pylist(), object) for name in ("from", "to"))
    length = table["window_ns"].to_numpy().astype(np.float64)
    return {
        (each.source, each.target): length[(source == each.source) & (target == each.target)]
        for each in found.windows or ()
    }


def _line(place: int, name: str, lengths: Floats) -> Spec:
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
        "text": [words.ns(ns) for ns in [at[0], *at]],
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
        "ticktext": ["0" if ns == 0 else words.tick(words.ns(ns)) for ns in inside],
    }


def _table(found: Metrics) -> Table:
    rows = tuple(
        (
            text(f"{each.source} to {each.target}"),
            number(each.count, words.whole),
            *(number(ns, words.ns) for ns in (each.mean_ns, each.p50_ns, each.p95_ns)),
        )
        for each in sorted(found.windows or (), key=lambda each: -each.mean_ns)
    )
    return Table(
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
