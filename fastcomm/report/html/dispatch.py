"""Write the pages of `fastcomm dispatch`: schedules with their bounds, and loads of GPUs."""

import numpy as np

from fastcomm.dispatch.placement import PlacementResult
from fastcomm.dispatch.schedules import LOAD_NAMES
from fastcomm.dispatch.simulation import NS, DispatchSweep, Simulation, StrategyResult, in_ns
from fastcomm.report import html
from fastcomm.report.html import (
    Figure,
    FigureView,
    Page,
    PageTable,
    Section,
    columns,
    number,
    text,
)
from fastcomm.report.html.charts import (
    BarChart,
    HeatChart,
    Part,
    RowMarks,
    line_look,
    row_bars,
)
from fastcomm.units import counted

_MS = 1e3
_MOST_BINS = 96
_MOST_ROWS = 24
_BAR = 15  # px
_EQUAL = 1.01
_NO_COMBINE = "the original simulator has no combine"
_NO_TIME = "the bound is 0"


def page(result: Simulation | PlacementResult | DispatchSweep) -> Page:
    """Return the page of a result of `fastcomm dispatch`."""
    if isinstance(result, Simulation):
        return simulation(result)
    return placement(result) if isinstance(result, PlacementResult) else sweep(result)


def simulation(result: Simulation) -> Page:
    """Return the page of several schedules of one workload."""
    ranked = sorted(result.strategies.values(), key=lambda strategy: strategy.total_s)
    return Page(
        title="Expert dispatch",
        source=_source(result),
        headline=_headline(ranked),
        facts=_facts(result, ranked),
        sections=(_times(ranked), _loads(ranked)) if ranked else (),
        warnings=tuple(result.unanswered.values()),
    )


def _source(result: Simulation) -> str:
    """Return the size of the workload: nodes, GPUs, experts and tokens."""
    recipe = result.recipe
    return (
        f"{counted(recipe.num_nodes, 'node')} of {counted(recipe.gpus_per_node, 'GPU')}, "
        f"{counted(recipe.experts, 'expert')}, top {recipe.topk}, "
        f"{counted(recipe.tokens, 'token')}"
    )


def _headline(ranked: list[StrategyResult]) -> html.Sentence:
    """Return the sentence on the fastest schedule; `ranked` is sorted by total time."""
    if not ranked:
        return ("No schedule can handle this workload.",)
    best = ranked[0]
    return (
        f"{best.name} is the fastest: ",
        html.fact("dispatch.total_s", best.total_s * NS, html.ns),
        ", ",
        html.fact("dispatch.times_optimal", best.times_optimal, html.times, why=_NO_TIME),
        " the best possible time.",
    )


def _facts(result: Simulation, ranked: list[StrategyResult]) -> tuple[html.Fact, ...]:
    """Return the best possible time and the NIC bandwidth; `ranked` has the fastest first."""
    optimal = ranked[0].optimal_s * NS if ranked else None
    links = result.terms.links
    link = html.fact("link_bandwidth", float(links.inter), html.rate, label="NIC of a GPU")
    return (
        html.fact("dispatch.optimal_s", optimal, html.ns, label="best possible"),
        link,
    )


def _times(ranked: list[StrategyResult]) -> Section:
    """Return the section on the dispatch time of each schedule, the fastest first."""
    figure = Figure(
        name="times-chart",
        title="Dispatch of all layers",
        alt="Bars of the schedules, with their bounds as marks; the table has all numbers.",
        views=(FigureView(label="All", chart=_bars(ranked)),),
        terms=("dispatch.total_s", "dispatch.optimal_s", "dispatch.times_bound"),
    )
    return Section(
        name="times",
        title="How long does each schedule take?",
        lead=(f"{html.many(len(ranked), 'schedule')}, the fastest first, with their bounds.",),
        blocks=(figure, _times_table(ranked)),
    )


def _bars(ranked: list[StrategyResult]) -> BarChart:
    """Return bars of the dispatch time of each schedule, with marks at its lower bounds."""
    return row_bars(
        [strategy.name for strategy in ranked],
        [strategy.total_s * _MS for strategy in ranked],
        [html.ns(strategy.total_s * NS) for strategy in ranked],
        "dispatch, ms",
        marks=(
            _marks(
                ranked, "best possible", [strategy.optimal_s for strategy in ranked], "diamond"
            ),
            _marks(
                ranked, "bound of its class", [strategy.bound_s for strategy in ranked], "bar"
            ),
        ),
    )


def _times_table(ranked: list[StrategyResult]) -> PageTable:
    """Return the table of times, multiples of the bounds, and bytes between nodes."""
    rows = tuple(
        (
            text(strategy.name),
            number(strategy.total_s * NS, html.ns),
            number(in_ns(strategy.combine_s), html.ns, _NO_COMBINE),
            number(strategy.times_optimal, html.times, _NO_TIME),
            number(strategy.times_bound, html.times, _NO_TIME),
            number(strategy.inter_bytes, html.size),
        )
        for strategy in ranked
    )
    heads = columns(
        "schedule",
        ("dispatch", "dispatch.total_s"),
        ("combine", "dispatch.combine_s"),
        ("of the best", "dispatch.times_optimal"),
        ("of its class", "dispatch.times_bound"),
        ("between nodes", "dispatch.inter_bytes"),
    )
    return PageTable(name="times-table", caption="Schedules", columns=heads, rows=rows)


def _marks(
    ranked: list[StrategyResult], name: str, seconds: list[float], symbol: str
) -> RowMarks:
    """Return a mark at `seconds` for each schedule; `name` is the entry of the legend."""
    return RowMarks(
        name=name,
        symbol=symbol,
        values=[value * _MS for value in seconds],
        tips=[
            f"{strategy.name}, {name}: {html.ns(value * NS)}"
            for strategy, value in zip(ranked, seconds, strict=True)
        ],
    )


def _loads(ranked: list[StrategyResult]) -> Section:
    """Return the section on the tokens of each GPU and kind of link, a view per schedule."""
    views = tuple(
        FigureView(label=strategy.name, chart=_load(strategy), note=_rule(strategy))
        for strategy in ranked
    )
    rows = tuple(
        (
            text(strategy.name),
            *(
                number(_most_over_mean(strategy, place), html.times, _NO_TIME)
                for place in range(4)
            ),
        )
        for strategy in ranked
    )
    heads = columns("schedule", *((link, "dispatch.most_by_mean") for link in LOAD_NAMES))
    return Section(
        name="loads",
        title="Which links carry the load?",
        lead=("A schedule is as fast as its most loaded link.",),
        blocks=(
            Figure(
                name="loads-chart",
                title="Tokens of each GPU and link",
                alt="Heat map of GPUs and kinds of links; the table has "
                "the largest load over the mean.",
                views=views,
                terms=("dispatch.load",),
                choice="Schedule",
            ),
            PageTable(
                name="loads-table",
                caption="Load of the most loaded GPU over the mean",
                columns=heads,
                rows=rows,
            ),
        ),
    )


def _most_over_mean(strategy: StrategyResult, place: int) -> float | None:
    """Return the largest load of a GPU over the mean; None where there is no load.

    `place` is the kind of link, as an index of `LOAD_NAMES`.
    """
    load = strategy.loads[:, place]
    return float(load.max() / load.mean()) if load.any() else None


def _share(strategy: StrategyResult) -> int:
    """Return the number of GPUs that share a cell of the heat map."""
    return max(1, -(-strategy.gpus // _MOST_BINS))


def _rule(strategy: StrategyResult) -> str:
    """Return the note on cells that show several GPUs; empty where each has its own."""
    share = _share(strategy)
    return f"A cell shows the largest of {share} GPUs." if share > 1 else ""


def _load(strategy: StrategyResult) -> HeatChart:
    """Return the heat map of tokens by kind of link (down) and GPU (across)."""
    share = _share(strategy)
    grid = np.maximum.reduceat(strategy.loads, np.arange(0, strategy.gpus, share), axis=0).T
    return HeatChart(
        grid=grid.tolist(),
        rows=LOAD_NAMES,
        columns=[str(gpu) for gpu in range(0, strategy.gpus, share)],
        unit="tokens",
        tip="GPU {column}, {row}: {value}",
        x="GPU",
    )


def placement(result: PlacementResult) -> Page:
    """Return the page of schedules before and after a placement of the experts."""
    before, after = result.imbalance
    first = simulation(result.after)
    rows = tuple(
        (
            text(name),
            number(strategy.total_s * NS, html.ns),
            number(result.after.strategies[name].total_s * NS, html.ns),
            number(_ratio(strategy.total_s, result.after.strategies[name].total_s), html.times),
        )
        for name, strategy in result.before.strategies.items()
    )
    heads = columns(
        "schedule",
        ("before", "dispatch.total_s"),
        ("after", "dispatch.after_s"),
        ("speed-up", "dispatch.speedup"),
    )
    section = Section(
        name="placing",
        title="What does the placement change?",
        lead=(
            "The most loaded GPU has ",
            html.fact("dispatch.imbalance", after, html.times),
            " the mean load; before it had ",
            html.fact("dispatch.imbalance", before, html.times),
            ".",
        ),
        blocks=(
            PageTable(
                name="placing-table", caption="Before and after", columns=heads, rows=rows
            ),
        ),
    )
    return Page(
        title="Placement of experts",
        source=first.source,
        headline=section.lead,
        facts=first.facts,
        sections=(section, *first.sections),
    )


def _ratio(before: float, after: float) -> float | None:
    """Return the speedup, before over after; None where after is 0."""
    return before / after if after else None


def sweep(grid: DispatchSweep) -> Page:
    """Return the page of schedules over a grid of workloads."""
    labels = [
        ", ".join(f"{name} {getattr(point.recipe, name)}" for name in grid.axes)
        for point in grid.points
    ]
    shown = labels[:_MOST_ROWS]
    rest = len(labels) - len(shown)
    figure = Figure(
        name="sweep-chart",
        title="Dispatch at each point of the grid",
        alt=f"Bars of the schedules for {len(shown)} workloads; the table has all numbers.",
        views=(
            FigureView(
                label="All",
                chart=_sweep_bars(grid, shown),
                note=f"{rest} more workloads are in the table." if rest else "",
            ),
        ),
        terms=("dispatch.total_s",),
        table=_points(grid, labels),
    )
    lead = (f"{html.many(len(labels), 'workload')} of {' and '.join(grid.axes)}.",)
    section = Section(
        name="sweep", title="Which schedule is the fastest?", lead=lead, blocks=(figure,)
    )
    return Page(
        title="Expert dispatch",
        source="a sweep",
        headline=(_fastest(grid),),
        facts=(),
        sections=(section,),
    )


def _fastest(grid: DispatchSweep) -> str:
    """Return at how many points each schedule is the fastest, give or take a hundredth."""
    wins = dict.fromkeys(grid.points[0].strategies, 0)
    for point in grid.points:
        least = min(strategy.total_s for strategy in point.strategies.values())
        for name, strategy in point.strategies.items():
            wins[name] += strategy.total_s <= least * _EQUAL
    (first, count), *others = sorted(wins.items(), key=lambda pair: -pair[1])
    rest = "".join(f", {name} at {times}" for name, times in others)
    of = html.many(len(grid.points), "workload")
    return f"{first} is the fastest, or within 1 % of it, at {count} of {of}{rest}."


def _sweep_bars(grid: DispatchSweep, labels: list[str]) -> BarChart:
    """Return bars of dispatch times, one per schedule in the row of each labeled workload."""
    parts = []
    for place, name in enumerate(grid.points[0].strategies):
        times = [point.strategies[name].total_s for point in grid.points[: len(labels)]]
        formatted = [html.ns(seconds * NS) for seconds in times]
        parts.append(
            Part(
                name=name,
                look=line_look(place)[0],
                values=[seconds * _MS for seconds in times],
                labels=formatted,
                tips=[
                    f"{name}, {label}: {time}"
                    for label, time in zip(labels, formatted, strict=True)
                ],
            )
        )
    height = _BAR * len(parts) + _BAR
    return BarChart(
        rows=labels, parts=parts, title="dispatch, ms", is_stacked=False, row_height=height
    )


def _points(grid: DispatchSweep, labels: list[str]) -> PageTable:
    """Return the table of all points and schedules; `labels` name the points of the grid."""
    rows = tuple(
        (
            text(label),
            text(name),
            number(strategy.total_s * NS, html.ns),
            number(strategy.times_optimal, html.times, _NO_TIME),
        )
        for label, point in zip(labels, grid.points, strict=True)
        for name, strategy in point.strategies.items()
    )
    heads = columns(
        "schedule", ("dispatch", "dispatch.total_s"), ("of the best", "dispatch.times_optimal")
    )
    return PageTable(
        name="sweep-table",
        caption="All points",
        columns=(*columns("workload"), *heads),
        rows=rows,
    )
