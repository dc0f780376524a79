"""Page sections: where the time of a step goes, for the job, by rank and by iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan

import numpy as np
from numpy.typing import NDArray

from fastcomm.idle import totals
from fastcomm.idle.causes import BY_CAUSE
from fastcomm.metrics import tables
from fastcomm.metrics.breakdown import RankMeans
from fastcomm.metrics.result import Metrics
from fastcomm.show import pages
from fastcomm.show.charts import BarChart, HeatChart, Part, coarsened, row_tips
from fastcomm.show.pages import (
    Block,
    Figure,
    FigureView,
    Missing,
    PageTable,
    Quantiles,
    Section,
    table,
    text,
    unknown_section,
)
from fastcomm.units import counted

_MEASURES = {
    "time": "iteration time",
    "compute": "compute",
    "exposed": "exposed communication",
    "idle": "idle",
}
_MS = 1e6
_ENDS = 12  # ranks shown at each end of the order
_MOST_ROWS = 40
_EVIDENCE = "Evidence: what the host did, or the work that the device waited for"
_Grid = NDArray[np.float64]  # shape (ranks, iterations); NaN if unknown
_MOST_BINS = 96
_LEVEL = 0.005  # of the median compute: smaller differences are ignored
_PERCENTS = 100
_KEYS = {"time": "metrics.iteration.by_rank.mean_ns", "exposed": "pages.exposed"}
# Value shown if a cell has several ranks: the rank that computes the most waits the least.
_OUTLIER = {"time": "largest", "compute": "largest", "exposed": "smallest", "idle": "smallest"}


def label(name: str) -> str:
    """Return the label of a category: "exposed TP"."""
    return name.replace("_", " ")


def kind(name: str) -> str:
    """Return the name of a category's color, such as "TP" for "exposed_TP"."""
    return name.removeprefix("exposed_")


def breakdown_section(metrics: Metrics, ranks: RankMeans, why: str) -> Section:
    """Return the section on where the time of a step goes.

    Parameters
    ----------
    metrics, ranks
        Metrics of the run, and mean times by rank.
    why
        Reason why times are unknown, if they are.

    """
    exact = metrics.breakdown.exact
    title = "Where does the time go?"
    blocks: tuple[Block, ...]
    if exact["idle"] is None:
        lead: pages.Sentence = ("The exact partition of a step is n/a: ", why, ".")
        blocks = (
            Missing(title="Time of a step by activity", why=why),
            _table(metrics, why),
        )
    else:
        lead = _lead(metrics)
        blocks = (_figure(metrics, ranks), _table(metrics, why))
    return Section(
        name="time",
        title=title,
        lead=lead,
        blocks=blocks,
        pitfall="Exposed time is an upper bound of what faster communication could save: a "
        "collective that waits for a late rank is exposed, and a faster link would not help. "
        "Time in which several categories run counts once: as compute, else as communication, "
        "else as copies.",
    )


def _lead(metrics: Metrics) -> pages.Sentence:
    """Return the sentence on the shares of compute, communication, copies and idle time."""
    parts = metrics.breakdown.parts or {}
    return (
        "Of a step of ",
        pages.fact("metrics.iteration.mean_ns", metrics.iteration.mean_ns, pages.ns),
        ", ",
        pages.fact("metrics.breakdown.exact.compute", parts.get("compute"), pages.percent),
        " is compute, ",
        pages.fact("pages.exposed", parts.get("exposed"), pages.percent),
        " exposed communication, ",
        pages.fact("metrics.breakdown.exact.memcpy", parts.get("memcpy"), pages.percent),
        " copies, and ",
        pages.fact("metrics.breakdown.exact.idle", parts.get("idle"), pages.percent),
        " idle time.",
    )


def _figure(metrics: Metrics, ranks: RankMeans) -> Figure:
    """Return the stacked bars of a step: of the job, by rank, and by iteration."""
    exact = {name: share for name, share in metrics.breakdown.exact.items() if share}
    spoken = ", ".join(f"{label(name)} {pages.percent(share)}" for name, share in exact.items())
    return Figure(
        name="breakdown",
        title="Time of a step by activity",
        alt=f"Stacked bar of the job: {spoken}.",
        views=(
            FigureView(label="Job", chart=_job(exact, metrics.iteration.mean_ns or 0.0)),
            _by_rank(ranks, list(exact)),
            _by_iteration(metrics, list(exact)),
        ),
        terms=tuple(map(key_of, exact)),
    )


def _job(exact: dict[str, float], mean_ns: float) -> BarChart:
    """Return one bar of the mean step; `exact` has the share (0 to 1) of each category."""
    parts = tuple(
        Part(
            name=label(name),
            look=kind(name),
            values=(share * 100,),
            labels=(f"{kind(name)} {pages.percent(share)}",),
            tips=(
                f"{label(name)}: {pages.percent(share)}, {pages.ns(share * mean_ns)} per step",
            ),
        )
        for name, share in exact.items()
    )
    return BarChart(
        rows=("",), parts=parts, title="share of the step, %", most=100, row_height=44
    )


def _by_rank(ranks: RankMeans, names: Sequence[str]) -> FigureView:
    """Return a bar of mean times for each rank; `names` are the categories.

    Of many ranks, only the mean and the ranks with the most and the least compute are drawn.
    """
    order = ranks.by_compute[::-1].tolist()
    count = len(order)
    rows: list[str | int] = sorted(order)
    note = ""
    if count > _MOST_ROWS:
        rows = [*order[:_ENDS], f"mean of all {count}", *order[-_ENDS:]]
        note = (
            f"The {_ENDS} ranks that compute the most, the mean of all {count}, and the "
            f"{_ENDS} that compute the least."
        )
    values = {
        name: [float(ns.mean() if isinstance(at, str) else ns[at]) for at in rows]
        for name, ns in ranks.ns.items()
        if name in names
    }
    labels = [at if isinstance(at, str) else f"rank {ranks.ranks[at]}" for at in rows]
    return FigureView(label="Ranks", chart=_rows(labels, values), note=note)


def _by_iteration(metrics: Metrics, names: Sequence[str]) -> FigureView:
    """Return a bar of mean times for each iteration, or for each range of iterations."""
    means = metrics.step_means(_MOST_ROWS)
    rows = [f"iteration {a}" if a == b else f"iterations {a}\u2013{b}" for a, b in means.steps]
    note = "Means over all ranks."
    if means.width > 1:
        note = f"Means over ranks and {means.width} iterations."
    values = {name: means.ns[name].tolist() for name in names}
    return FigureView(label="Iterations", chart=_rows(rows, values), note=note)


def _rows(labels: list[str], values: dict[str, list[float]]) -> BarChart:
    """Return a stacked bar for each label; `values` has times in ns by category and label.

    A label of unknown times (NaN) has no bar.
    """
    parts = [
        Part(
            name=label(name),
            look=kind(name),
            values=[None if isnan(ns) else ns / _MS for ns in lengths],
            tips=row_tips(labels, label(name), lengths, pages.ns),
        )
        for name, lengths in values.items()
    ]
    return BarChart(rows=labels, parts=parts, title="ms per step")


def _table(metrics: Metrics, why: str) -> PageTable:
    """Return the table of the parts of a step, whose formulas a switch shows."""
    return replace(pages.shown(tables.parts(metrics, why)), hidden="specification formulas")


def idle_section(metrics: Metrics, why: str) -> Section:
    """Return the section on the causes of idle time; `why` explains unknown times."""
    place = "rank" if metrics.is_host_run else "device"
    title, shares = f"Why are {place}s idle?", metrics.idle
    if any(share is None for share in shares.values()):
        chart = "Idle time by cause"
        return pages.unknown_section("idle", title, "The causes of idle time are", chart, why)
    cause = totals.largest(shares)
    if cause is None:
        return Section(name="idle", title=title, lead=(f"No {place} is ever idle.",))
    mean = metrics.iteration.mean_ns or 0.0
    ns = (shares[cause] or 0.0) * mean
    time = pages.fact(f"metrics.idle.{cause}", ns, pages.ns)
    names, about = totals.explained(cause, ns, metrics.idle_names), BY_CAUSE[cause]
    if metrics.is_host_run:
        before, after = "an operator", f" per step, is {about.text}{names}."
        lead: pages.Sentence = ("Most of the idle time, ", time, after)
    else:
        to_try = f"try {about.to_try}."
        before, after = "a launch", f" per step {about.awaited}{names}; {to_try}"
        lead = ("Devices wait ", time, after)
    return Section(
        name="idle",
        title=title,
        lead=lead,
        blocks=(
            _causes(metrics, shares),
            *([_idle_names(metrics)] if metrics.idle_names else []),
        ),
        pitfall=f"A cause is what happened before {before}, not what a fix saves: if the host "
        "did not load data, something else might hold it up.",
    )


def _causes(metrics: Metrics, shares: Mapping[str, float | None]) -> PageTable:
    """Return the idle time by cause of the job and of the ranks that are idle the longest."""
    causes = [name for name, share in shares.items() if share]
    by_rank = metrics.idle_by_rank
    order = sorted(by_rank, key=lambda rank: (-sum(by_rank[rank].values()), rank))
    shown = order if len(order) <= _MOST_ROWS else order[:_ENDS]
    most = (
        "" if len(shown) == len(order) else f", the {_ENDS} of {len(order)} ranks with the most"
    )
    mean = metrics.iteration.mean_ns or 0.0
    job = {name: (share or 0.0) * mean for name, share in shares.items()}
    rows = [(text("all ranks"), job), *((pages.rank_cell(r), by_rank[r]) for r in shown)]
    return table(
        "idle-table",
        f"Idle time per step by cause{most}",
        [
            *("rank", ("idle", "metrics.breakdown.exact.idle", pages.ns)),
            *((BY_CAUSE[name].text, f"metrics.idle.{name}", pages.ns) for name in causes),
        ],
        [
            (cell, sum(times.values()), *(times[name] for name in causes))
            for cell, times in rows
        ],
    )


def _idle_names(metrics: Metrics) -> PageTable:
    """Return the names behind idle time: what hosts did, or the work that was waited for."""
    return table(
        "idle-names-table",
        "Evidence: what ran before" if metrics.is_host_run else _EVIDENCE,
        [
            *("cause", "name"),
            ("per step", "metrics.idle_evidence.ns_per_step", pages.ns),
            ("ranks", "metrics.idle_evidence.ranks", pages.count),
        ],
        [
            (BY_CAUSE[entry.cause].text, entry.name, entry.ns_per_step, entry.ranks)
            for entry in metrics.idle_names
        ],
    )


def ranks_section(metrics: Metrics, ranks: RankMeans, why: str) -> Section:
    """Return the section that compares the ranks whose times are known.

    Parameters
    ----------
    metrics, ranks
        Metrics of the run, and mean times by rank.
    why
        Reason why times of ranks are unknown, if they are.

    """
    title = "Which ranks differ?"
    if not len(ranks.ranks) or np.isnan(ranks.ns["time"]).all():
        chart = "Ranks and iterations"
        return unknown_section("ranks", title, "How ranks differ is", chart, why)
    blocks: list[Block] = [_heat_map(metrics, ranks), pages.shown(tables.ranks(ranks, why))]
    if ranks.is_known and len(ranks.ranks) > tables.MOST_LISTED:
        blocks.insert(1, _quantiles(ranks))
    return Section(
        name="ranks",
        title=title,
        lead=_ranks_lead(metrics, ranks, why),
        blocks=tuple(blocks),
        pitfall="Ranks that wait for each other have equal iteration times, which do not "
        "show which rank is slow. The rank that causes the waits computes more, or waits less, "
        "than its peers; ranks of other pipeline stages or experts have other work.",
    )


def _ranks_lead(metrics: Metrics, ranks: RankMeans, why: str) -> pages.Sentence:
    """Return the sentence on the rank that computes the most, compared with the median."""
    if not ranks.is_known:
        # Step times do not show which rank is slow: ranks that wait have long steps, too.
        for row in metrics.across.by_wait_caused(1):
            return (f"Rank {row.rank} causes the most waiting in collectives.",)
        return ("The compute of ranks is n/a, and step times do not show which rank is slow.",)
    most, compute = ranks.by_compute[-1], ranks.ns["compute"]
    middle = ranks.median_compute
    if len(compute) == 1 or not middle:
        return ("Only one rank was read: there is nothing to compare it with.",)
    above = float(compute[most] / middle - 1)
    if above < _LEVEL:
        return (f"All {len(compute)} ranks compute equally long, within {_LEVEL:.1%}.",)
    return (
        f"Rank {ranks.ranks[most]} computes the most: ",
        pages.fact("metrics.breakdown.exact.compute", compute[most], pages.ns),
        " per step, ",
        pages.fact("pages.above_median", above, pages.signed_percent),
        " compared with the median of all ranks.",
    )


def _heat_map(metrics: Metrics, ranks: RankMeans) -> Figure:
    """Return the heat maps of ranks (down) and iterations (across), one per measure."""
    heat_, views = metrics.heat, []
    for name in ("compute", "idle", "exposed", "time"):
        grid = np.full((len(ranks.ranks), len(heat_.iterations)), np.nan)
        rows = np.array(getattr(heat_, f"{name}_ns"), np.float64)
        if not np.isnan(rows).all():
            grid[np.searchsorted(ranks.ranks, heat_.ranks)] = rows
            views.append(_view(name, grid, ranks.ranks, np.array(heat_.iterations)))
    return Figure(
        name="heat-map",
        title="Every rank and iteration",
        alt=f"Heat map of {counted(len(ranks.ranks), 'rank')} and "
        f"{counted(len(heat_.iterations), 'iteration')}; the table "
        "below has the means of the ranks.",
        views=tuple(views),
        terms=tuple(map(key_of, _MEASURES)),
        choice="Color by",
    )


def _view(name: str, grid: _Grid, ranks: np.ndarray, iterations: np.ndarray) -> FigureView:
    """Return the heat map of the measure `name`.

    `grid` has times in ns, a row for each of `ranks` and a column for each of
    `iterations`; NaN is unknown. In a large grid, a cell shows the outlier of several ranks
    and iterations.
    """
    measure, extreme = _MEASURES[name], np.fmax if _OUTLIER[name] == "largest" else np.fmin
    small, down = coarsened(grid, _MOST_BINS, extreme)
    turned, across = coarsened(small.T, _MOST_BINS, extreme)
    rule = ""
    if down > 1 or across > 1:
        rule = (
            f"A cell stands for {pages.many(down, 'rank')} and "
            f"{pages.many(across, 'iteration')}, and shows the {_OUTLIER[name]} value."
        )
    chart = HeatChart(
        grid=[[None if np.isnan(ns) else ns / _MS for ns in row] for row in turned.T.tolist()],
        rows=_bins(ranks, down),
        columns=_bins(iterations, across),
        unit="ms",
        tip=f"rank {{row}}, iteration {{column}}, {measure}: {{value}}",
        x="iteration",
        y="rank",
    )
    return FigureView(label=measure, chart=chart, note=rule)


def _bins(numbers: np.ndarray, share: int) -> list[str]:
    """Return a label for each `share` consecutive numbers: the first and the last of them."""
    parts = [numbers[at : at + share].tolist() for at in range(0, len(numbers), share)]
    return [str(p[0]) if len(p) == 1 else f"{p[0]}\u2013{p[-1]}" for p in parts]


def _quantiles(ranks: RankMeans) -> Quantiles:
    """Return the rank at each percent, from the least compute to the most."""
    order = ranks.by_compute
    names = [name for name in ranks.ns if name not in _MEASURES and ranks.ns[name].any()]
    shown = ["time", "compute", "exposed", "idle", *(n for n in names if "exposed" in n)]
    steps = []
    for percent in range(_PERCENTS + 1):
        at = order[round(percent / _PERCENTS * (len(order) - 1))]
        numbers = tuple(pages.ns(ranks.ns[name][at]) for name in shown)
        steps.append((f"rank {ranks.ranks[at]}", numbers))
    return Quantiles(
        name="quantiles",
        title="Ranks by percentile of compute",
        note="Ranks are sorted by compute: 0 % is the rank with the least, 100 % the rank with "
        "the most. Times are means over the iterations of the rank.",
        rows=tuple((_MEASURES.get(name, label(name)), key_of(name)) for name in shown),
        steps=tuple(steps),
    )


def key_of(name: str) -> str:
    """Return the key of the definition of a measure or category."""
    return _KEYS.get(name, f"metrics.breakdown.exact.{name}")
