"""Page section on ranks: heat map of ranks and iterations, extreme ranks, quantiles."""

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.breakdown import RankMeans
from fastcomm.metrics.result import Metrics
from fastcomm.report import html
from fastcomm.report.html import (
    Block,
    Figure,
    FigureView,
    PageTable,
    Quantiles,
    Section,
    rank_cell,
    table,
    unknown_section,
)
from fastcomm.report.html.breakdown import MEASURES, label
from fastcomm.report.html.charts import HeatChart, coarsened
from fastcomm.units import counted

_Grid = NDArray[np.float64]  # shape (ranks, iterations); NaN if unknown

_MS = 1e6
_MOST_BINS = 96
_ENDS = 24
_LEVEL = 0.005  # of the median compute: smaller differences are ignored
_ALL = 64  # maximum number of ranks to list all
_PERCENTS = 100
_KEYS = {
    "time": "iteration.rank_ns",
    "compute": "exact.compute",
    "exposed": "exact.exposed",
    "idle": "exact.idle",
}
# Value shown if a cell has several ranks: the rank that computes the most waits the least.
_OUTLIER = {"time": "largest", "compute": "largest", "exposed": "smallest", "idle": "smallest"}


def section(metrics: Metrics, ranks: RankMeans, why: str) -> Section:
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
    blocks: list[Block] = [_heat_map(metrics, ranks), _table(ranks, why)]
    if ranks.is_known and len(ranks.ranks) > _ALL:
        blocks.insert(1, _quantiles(ranks))
    return Section(
        name="ranks",
        title=title,
        lead=_lead(metrics, ranks, why),
        blocks=tuple(blocks),
        pitfall="Ranks that wait for each other have equal iteration times, which do not "
        "show which rank is slow. The rank that causes the waits computes more, or waits less, "
        "than its peers; ranks of other pipeline stages or experts have other work.",
    )


def _lead(metrics: Metrics, ranks: RankMeans, why: str) -> html.Sentence:
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
        html.fact("exact.compute", compute[most], html.ns),
        " per step, ",
        html.fact("iteration.above", above, html.signed_percent),
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
        terms=tuple(_KEYS[name] for name in MEASURES if name in _KEYS),
        choice="Color by",
    )


def _view(name: str, grid: _Grid, ranks: np.ndarray, iterations: np.ndarray) -> FigureView:
    """Return the heat map of the measure `name`.

    `grid` has times in ns, a row for each of `ranks` and a column for each of
    `iterations`; NaN is unknown. In a large grid, a cell shows the outlier of several ranks
    and iterations.
    """
    measure, extreme = MEASURES[name], np.fmax if _OUTLIER[name] == "largest" else np.fmin
    small, down = coarsened(grid, _MOST_BINS, extreme)
    turned, across = coarsened(small.T, _MOST_BINS, extreme)
    rule = ""
    if down > 1 or across > 1:
        rule = (
            f"A cell stands for {html.many(down, 'rank')} and "
            f"{html.many(across, 'iteration')}, and shows the {_OUTLIER[name]} value."
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
    names = [name for name in ranks.ns if name not in MEASURES and ranks.ns[name].any()]
    shown = ["time", "compute", "exposed", "idle", *(n for n in names if "exposed" in n)]
    steps = []
    for percent in range(_PERCENTS + 1):
        at = order[round(percent / _PERCENTS * (len(order) - 1))]
        numbers = tuple(html.ns(ranks.ns[name][at]) for name in shown)
        steps.append((f"rank {ranks.ranks[at]}", numbers))
    return Quantiles(
        name="quantiles",
        title="Ranks by percentile of compute",
        note="Ranks are sorted by compute: 0 % is the rank with the least, 100 % the rank with "
        "the most. Times are means over the iterations of the rank.",
        rows=tuple((MEASURES.get(name, label(name)), _key(name)) for name in shown),
        steps=tuple(steps),
    )


def _key(name: str) -> str:
    """Return the key of the definition of a measure or category."""
    return _KEYS.get(name, f"exact.{name}")


def _table(ranks: RankMeans, why: str) -> PageTable:
    """Return the table of mean times of each rank; of many, only the extremes.

    `why` explains unknown times.
    """
    count = len(ranks.ranks)
    order, caption = np.arange(count), "Ranks, means over their iterations"
    if count > _ALL:
        chosen = ranks.by_compute[::-1] if ranks.is_known else np.argsort(-ranks.ns["time"])
        order = np.concatenate([chosen[:_ENDS], chosen[-_ENDS:]])
        most, least = ("most", "least") if ranks.is_known else ("longest", "shortest")
        measure = "compute" if ranks.is_known else "steps"
        ends = f"The {_ENDS} ranks with the {most} {measure} and the {_ENDS} with the {least}"
        caption = f"{ends}, of {html.whole(count)}"
    middle = ranks.median_compute
    rows = []
    for at in order.tolist():
        times = [float(ranks.ns[name][at]) for name in _KEYS]
        above = ranks.ns["compute"][at] / middle - 1 if middle else None
        cells = (None if np.isnan(ns) else ns for ns in times)
        rows.append((rank_cell(int(ranks.ranks[at])), *cells, above))
    heads: list[html.Head] = [
        "rank",
        *(
            ("iteration" if name == "time" else name, key, html.ns, why)
            for name, key in _KEYS.items()
        ),
        ("compute vs. median", "iteration.above", html.signed_percent, why),
    ]
    return table("ranks-table", caption, heads, rows)
