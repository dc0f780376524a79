"""Page section: where the time of a step goes, of the job and by rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa

from fastcomm.metrics.breakdown import EXACT
from fastcomm.metrics.result import Metrics
from fastcomm.report.html import words
from fastcomm.report.html.drawing import axis, fill, height_of, rows_axis, spec
from fastcomm.report.html.page import (
    Block,
    Figure,
    FigureView,
    Missing,
    PageTable,
    Section,
    Spec,
    columns,
    number,
    text,
)
from fastcomm.report.html.words import Fact
from fastcomm_kernels.arrays import Floats, Ints

MEASURES = {
    "time": "iteration time",
    "compute": "compute",
    "exposed": "exposed communication",
    "idle": "idle",
}


@dataclass(frozen=True, kw_only=True)
class ByRank:
    """A row a rank; `ns` has every category of the exact partition, and `MEASURES`."""

    ranks: Ints
    ns: dict[str, Floats]
    steps: Ints  # iterations of each rank

    @classmethod
    def of(cls, found: Metrics) -> Self:
        """Sum each rank's iterations and divide by how many they are."""
        table = found.tables["iterations"]
        rank = table["rank"].to_numpy()
        ranks, at = np.unique(rank, return_inverse=True)
        steps = np.bincount(at, minlength=len(ranks))
        sums = {
            name: np.bincount(at, weights=values, minlength=len(ranks)) / np.maximum(steps, 1)
            for name, values in measured(table).items()
        }
        return cls(ranks=ranks, ns=sums, steps=steps)

    @cached_property
    def known(self) -> bool:
        """Whether compute is known of every rank."""
        return len(self.ranks) > 0 and not bool(np.isnan(self.ns["compute"]).any())

    @cached_property
    def by_compute(self) -> Ints:
        """Rows from the rank that computes the least to that which computes the most."""
        return np.lexsort((-self.ranks, self.ns["compute"]))


def measured(table: pa.Table) -> dict[str, Floats]:
    """By iteration and rank: ns of each category and measure, NaN for null."""
    found = {name: _floats(table[f"exact_{name}_ns"]) for name in EXACT}
    exposed = [name for name in EXACT if name.startswith("exposed_")]
    found["exposed"] = np.sum([found[name] for name in exposed], axis=0)
    found["time"] = _floats(table["time_ns"])
    return found


def _floats(column: pa.ChunkedArray) -> Floats:
    values: Floats = column.cast(pa.float64()).fill_null(float("nan")).to_numpy()
    return values


def label(name: str) -> str:
    """A category in words: "exposed TP"."""
    return name.replace("_", " ")


def kind(name: str) -> str:
    """The colour of a category: that of its tag."""
    return name.removeprefix("exposed_")


_MS = 1e6
_ENDS = 12  # ranks at each end that are shown by themselves
_MOST_ROWS = 40
_LABELLED = 0.045  # of the bar; what is narrower has no room for a label


def section(found: Metrics, ranks: ByRank, why: str) -> Section:
    """The stacked bars, and exact shares beside the formula's; `why` is what is lacking."""
    exact = found.breakdown.exact
    title = "Where does the time go?"
    blocks: tuple[Block, ...]
    if exact["idle"] is None:
        lead: words.Words = ("The exact partition of a step is n/a: ", why, ".")
        blocks = (
            Missing(title="Time of a step by what runs in it", why=why),
            _table(found, why),
        )
    else:
        lead = _lead(found)
        blocks = (_figure(found, ranks), _table(found, why))
    return Section(
        name="time",
        title=title,
        lead=lead,
        blocks=blocks,
        pitfall="Exposed time is an upper bound of what faster communication could save: a "
        "collective that waits for a late rank is exposed, and no faster link helps it. "
        "Compute hides communication, and both hide copies.",
    )


def exposed(found: Metrics) -> float | None:
    """Return the share of a step in which communication runs and no compute does."""
    exact = found.breakdown.exact
    parts = [share for name, share in exact.items() if name.startswith("exposed_")]
    return None if None in parts else sum(part for part in parts if part is not None)


def _lead(found: Metrics) -> words.Words:
    exact = found.breakdown.exact
    return (
        "Of a step of ",
        words.fact("iteration.mean_ns", found.iteration.mean_ns, words.ns),
        ", ",
        words.fact("exact.compute", exact["compute"], words.percent),
        " is compute, ",
        words.fact("exact.exposed", exposed(found), words.percent),
        " exposed communication, ",
        words.fact("exact.memcpy", exact["memcpy"], words.percent),
        " copies, and ",
        words.fact("exact.idle", exact["idle"], words.percent),
        " idle time.",
    )


def _figure(found: Metrics, ranks: ByRank) -> Figure:
    exact = {name: share for name, share in found.breakdown.exact.items() if share}
    spoken = ", ".join(f"{label(name)} {words.percent(share)}" for name, share in exact.items())
    return Figure(
        name="breakdown",
        title="Time of a step by what runs in it",
        alt=f"Stacked bar of the job: {spoken}.",
        views=(
            FigureView(label="Job", spec=_job(exact, found.iteration.mean_ns or 0.0)),
            _by_rank(ranks, list(exact)),
            _by_iteration(found, list(exact)),
        ),
        terms=tuple(f"exact.{name}" for name in exact),
        legend=tuple((kind(name), label(name)) for name in exact),
    )


def _job(exact: dict[str, float], mean: float) -> Spec:
    bars = [
        _bar(
            name,
            ["all ranks"],
            [share * 100],
            text=[f"{label(name).removeprefix('exposed ')}<br>{share:.1%}"],
            hover=f"{label(name)}: %{{x:.2f}} %, {words.ns(share * mean)} a step"
            "<extra></extra>",
        )
        | ({} if share >= _LABELLED else {"text": None})
        for name, share in exact.items()
    ]
    return _stacked(bars, ["all ranks"], "share of the step, %", height=116, hide_rows=True)


def _by_rank(ranks: ByRank, names: Sequence[str]) -> FigureView:
    order = ranks.by_compute[::-1]
    count = len(order)
    if count <= _MOST_ROWS:
        rows = [(f"rank {ranks.ranks[at]}", np.array([at])) for at in np.sort(order)]
        note = ""
    else:
        rows = [(f"rank {ranks.ranks[at]}", np.array([at])) for at in order[:_ENDS]]
        rows.append((f"mean of all {count}", order))
        rows += [(f"rank {ranks.ranks[at]}", np.array([at])) for at in order[-_ENDS:]]
        note = (
            f"The {_ENDS} ranks that compute the most, the mean of all {count}, and the "
            f"{_ENDS} that compute the least."
        )
    values = {name: [float(ranks.ns[name][at].mean()) for _, at in rows] for name in names}
    return FigureView(label="Ranks", spec=_rows([row for row, _ in rows], values), note=note)


def _by_iteration(found: Metrics, names: Sequence[str]) -> FigureView:
    table = found.tables["iterations"]
    own = table["iteration"].is_valid().to_numpy(zero_copy_only=False)
    numbers, at = np.unique(table["iteration"].drop_null().to_numpy(), return_inverse=True)
    share = max(1, -(-len(numbers) // _MOST_ROWS))
    bins = at // share
    known = measured(table)
    values = {name: _means(known[name][own], bins) for name in names}
    firsts = numbers[::share]
    lasts = numbers[np.minimum(np.arange(len(firsts)) * share + share, len(numbers)) - 1]
    rows = [
        f"iteration {a}" if a == b else f"iterations {a}\u2013{b}"
        for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]
    note = (
        "Means over all ranks." if share == 1 else f"Means over ranks and {share} iterations."
    )
    return FigureView(label="Iterations", spec=_rows(rows, values), note=note)


def _means(values: Floats, bins: np.ndarray) -> list[float]:
    known = ~np.isnan(values)
    sums = np.bincount(bins[known], weights=values[known], minlength=bins.max(initial=-1) + 1)
    counts = np.bincount(bins[known], minlength=len(sums))
    return [float(value) for value in sums / np.maximum(counts, 1)]


def _rows(rows: list[str], values: dict[str, list[float]]) -> Spec:
    bars = [
        _bar(
            name,
            rows,
            [round(ns / _MS, 4) for ns in lengths],
            hover=f"{label(name)}: %{{x:.3f}} ms<extra>%{{y}}</extra>",
        )
        for name, lengths in values.items()
    ]
    return _stacked(bars, rows, "ms a step", height=height_of(len(rows), 200))


def _bar(
    name: str, rows: list[str], x: list[float], *, hover: str, text: list[str] | None = None
) -> Spec:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(name),
        "y": rows,
        "x": x,
        "marker": fill(kind(name)),
        "hovertemplate": hover,
        "text": text,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "none",
        "textfont": {"size": 12, "color": f"var(--on-{kind(name)})"},
    }


def _stacked(
    bars: list[Spec], rows: list[str], title: str, height: int, *, hide_rows: bool = False
) -> Spec:
    return spec(
        bars,
        height,
        barmode="stack",
        bargap=0.28,
        xaxis=axis(title, rangemode="tozero", **({"range": [0, 100]} if hide_rows else {})),
        yaxis=rows_axis(rows, visible=not hide_rows),
    )


def _table(found: Metrics, why: str) -> PageTable:
    exact, formula = found.breakdown.exact, found.breakdown.spec
    mean, rows = found.iteration.mean_ns, []
    for name in EXACT:
        said = formula.get(name, formula.get(f"comm_{kind(name)}"))
        if not exact[name] and not said and name != "idle":
            continue
        share = exact[name]
        step = None if share is None or mean is None else share * mean
        has_formula = name not in ("memcpy", "exposed_mixed")
        cell = number(said, words.percent, why) if has_formula else text("", "")
        rows.append(
            (
                text(label(name)),
                number(share, words.percent, why, share=share),
                number(step, words.ns, why),
                cell,
            )
        )
    return PageTable(
        name="breakdown-table",
        caption="Exact shares, and beside each what the specification's formula says",
        columns=columns(
            "time of a step", ("exact", "exact"), ("a step", "exact.ns"), ("formula", "spec")
        ),
        rows=tuple(rows),
    )


def facts(found: Metrics, why: str) -> tuple[Fact, ...]:
    """The numbers at the head of the page."""
    exact = found.breakdown.exact
    return (
        words.fact(
            "iteration.mean_ns", found.iteration.mean_ns, words.ns, label="a step", why=why
        ),
        words.fact(
            "exact.exposed",
            exposed(found),
            words.percent,
            label="exposed communication",
            why=why,
        ),
        words.fact(
            "overlap.average_overlap_ratio",
            found.overlap.average_overlap_ratio,
            words.percent,
            label="of communication hidden",
            why=why if found.volume else "no communication was recorded",
        ),
        words.fact("exact.idle", exact["idle"], words.percent, label="idle", why=why),
    )
