"""Write the pages of `fastcomm dispatch`: schedules with their bounds, and loads of GPUs."""

from collections.abc import Sequence

import numpy as np

from fastcomm.dispatch import tables
from fastcomm.dispatch.evaluation import ExchangeError, ExchangeEvaluation, FittedConstant
from fastcomm.dispatch.model_exchange import KernelTime, ModelExchange
from fastcomm.dispatch.placement_gain import PlacementResult
from fastcomm.dispatch.run_exchange import RunExchange
from fastcomm.dispatch.schedules import LOAD_NAMES
from fastcomm.dispatch.simulation import NS, Simulation, StrategyResult, in_ns
from fastcomm.dispatch.sweep import DispatchSweep
from fastcomm.dispatch.tables import NO_TIME
from fastcomm.hardware.expert_exchange import FAMILIES, PHASES
from fastcomm.show import pages
from fastcomm.show.charts import (
    BarChart,
    HeatChart,
    Part,
    RowMarks,
    coarsened,
    line_look,
    row_bars,
    row_tips,
)
from fastcomm.show.pages import Figure, FigureView, Page, PageTable, Section, figure, table
from fastcomm.units import counted
from fastcomm_kernels.arrays import Matrix

_MS = 1e3
_MB = 1e6
_PERCENT = 100.0
_MOST_BINS = 96
_MOST_ROWS = 24
_BAR = 15  # px
_EQUAL = 1.01


def page(
    result: Simulation | PlacementResult | DispatchSweep | ModelExchange | RunExchange,
) -> Page:
    """Return the page of a result of `fastcomm dispatch`."""
    if isinstance(result, ModelExchange):
        return kernels(result)
    if isinstance(result, RunExchange):
        return recorded(result)
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


def _headline(ranked: list[StrategyResult]) -> pages.Sentence:
    """Return the sentence on the fastest schedule; `ranked` is sorted by total time."""
    if not ranked:
        return ("No schedule can handle this workload.",)
    best = ranked[0]
    return (
        f"{best.name} is the fastest: ",
        _time("dispatch-simulate.strategies.total_latency_ns", best.total_s),
        ", ",
        pages.fact(
            "dispatch-simulate.strategies.times_optimal",
            best.times_optimal,
            pages.times,
            why=NO_TIME,
        ),
        " the best possible time.",
    )


def _facts(result: Simulation, ranked: list[StrategyResult]) -> tuple[pages.Fact, ...]:
    """Return the best possible time and the NIC bandwidth; `ranked` has the fastest first."""
    optimal = ranked[0].optimal_s if ranked else None
    inter = float(result.terms.links.inter)
    return (
        _time("dispatch-simulate.strategies.optimal_ns", optimal, label="best possible"),
        pages.fact(
            "dispatch-simulate.terms.inter_bytes_per_s", inter, pages.rate, label="NIC of a GPU"
        ),
    )


def _times(ranked: list[StrategyResult]) -> Section:
    """Return the section on the dispatch time of each schedule, the fastest first."""
    names = [strategy.name for strategy in ranked]
    optimal = [strategy.optimal_s for strategy in ranked]
    bound = [strategy.bound_s for strategy in ranked]
    bars = row_bars(
        names,
        [strategy.total_s for strategy in ranked],
        _seconds,
        "dispatch, ms",
        1 / _MS,
        marks=(
            _marks(names, "best possible", optimal, "diamond"),
            _marks(names, "bound of its class", bound, "bar"),
        ),
    )
    drawn = figure(
        "times-chart",
        "Dispatch of all layers",
        "Bars of the schedules, with their bounds as marks; the table has all numbers.",
        bars,
        *(
            "dispatch-simulate.strategies.total_latency_ns",
            "dispatch-simulate.strategies.optimal_ns",
            "dispatch-simulate.strategies.times_lower_bound",
        ),
    )
    return Section(
        name="times",
        title="How long does each schedule take?",
        lead=(f"{pages.many(len(ranked), 'schedule')}, the fastest first, with their bounds.",),
        blocks=(drawn, pages.shown(tables.schedules(ranked))),
    )


def _seconds(value: float) -> str:
    """Format seconds in a suitable unit."""
    return pages.ns(value * NS)


def _time(key: str, seconds: float | None, **texts: str) -> pages.Fact:
    """Return a time in seconds as a fact; `texts` are those of `pages.fact`."""
    return pages.fact(key, in_ns(seconds), pages.ns, **texts)


def _part(place: int, name: str, seconds: list[float], tips: list[str]) -> Part:
    """Return one of several bars in each row; `place` among them gives its look."""
    return Part(
        name=name,
        look=line_look(place)[0],
        values=[value * _MS for value in seconds],
        labels=list(map(_seconds, seconds)),
        tips=tips,
    )


def _marks(names: list[str], label: str, seconds: list[float], symbol: str) -> RowMarks:
    """Return a mark at `seconds` for each schedule; `label` is the entry of the legend."""
    return RowMarks(
        name=label,
        symbol=symbol,
        values=[value * _MS for value in seconds],
        tips=row_tips(names, label, seconds, _seconds),
    )


def _loads(ranked: list[StrategyResult]) -> Section:
    """Return the section on the tokens of each GPU and kind of link, a view per schedule."""
    drawn = Figure(
        name="loads-chart",
        title="Tokens of each GPU and link",
        alt="Heat map of GPUs and kinds of links; the table has "
        "the largest load over the mean.",
        views=tuple(_load(strategy) for strategy in ranked),
        terms=("dispatch-simulate.strategies.gpu_load_tokens",),
        choice="Schedule",
    )
    by_link = ((link, "pages.most_by_mean", pages.times, NO_TIME) for link in LOAD_NAMES)
    most = table(
        "loads-table",
        "Load of the most loaded GPU over the mean",
        ["schedule", *by_link],
        [(strategy.name, *map(_most_by_mean, strategy.loads.T)) for strategy in ranked],
    )
    return Section(
        name="loads",
        title="Which links carry the load?",
        lead=("A schedule is as fast as its most loaded link.",),
        blocks=(drawn, most),
    )


def _most_by_mean(loads: np.ndarray) -> float | None:
    """Return the largest load of a GPU over the mean; None where there is no load."""
    return float(loads.max() / loads.mean()) if loads.any() else None


def _load(strategy: StrategyResult) -> FigureView:
    """Return the heat map of tokens by kind of link (down) and GPU (across)."""
    grid, share = coarsened(strategy.loads, _MOST_BINS)
    chart = HeatChart(
        grid=grid.T.tolist(),
        rows=LOAD_NAMES,
        columns=[str(gpu) for gpu in range(0, strategy.gpus, share)],
        unit="tokens",
        tip="GPU {column}, {row}: {value}",
        x="GPU",
    )
    note = f"A cell shows the largest of {share} GPUs." if share > 1 else ""
    return FigureView(label=strategy.name, chart=chart, note=note)


def kernels(result: ModelExchange) -> Page:
    """Return the page of kernel families and schedules for the exchange of a model."""
    schedules, layer = simulation(result.simulation), result.layer
    return Page(
        title=f"Expert dispatch of {layer.model}",
        source=f"{pages.many(layer.ranks, 'GPU')} of {layer.cluster}, "
        f"{pages.many(layer.tokens_per_gpu, 'token')} per GPU, "
        f"top {layer.topk} of {pages.many(layer.experts, 'expert')}",
        headline=_fastest_kernels(result.fastest),
        facts=(
            pages.fact(
                "dispatch-compare.fullest_rank",
                result.fullest,
                pages.times,
                label="fullest rank over the mean",
            ),
            *schedules.facts[1:],
        ),
        sections=(
            *([_kernels(result)] if result.kernels else ()),
            _pairs(result.copies),
            *schedules.sections,
        ),
        warnings=(*result.extrapolated(), *result.unpriced.values(), *schedules.warnings),
    )


def _fastest_kernels(fastest: KernelTime | None) -> pages.Sentence:
    """Return the sentence on the fastest kernels."""
    if fastest is None:
        return ("No kernels are priced.",)
    return (
        f"{FAMILIES[fastest.family].title} is the fastest: a layer takes ",
        _time("dispatch-compare.kernels.layer_ns", fastest.layer_s),
        ", ",
        pages.fact(
            "dispatch-compare.kernels.times_optimal", fastest.times_optimal, pages.times
        ),
        " the best possible time.",
    )


def _kernels(result: ModelExchange) -> Section:
    """Return the section on the time of each kernel family, the fastest first."""
    names = [one.family for one in result.kernels]
    parts = []
    bars: dict[str, list[float]] = {
        phase: [one.phases[phase].seconds for one in result.kernels] for phase in PHASES
    }
    bars["waits"] = [
        sum(phase.notify_s for phase in one.phases.values()) for one in result.kernels
    ]
    for place, (name, times) in enumerate(bars.items()):
        parts.append(_part(place, name, times, row_tips(names, name, times, _seconds)))
    bound = [sum(p.bound_s for p in one.phases.values()) for one in result.kernels]
    marks = (_marks(names, "best possible for its bytes", bound, "diamond"),)
    drawn = figure(
        "kernels-chart",
        "Dispatch and combine of one layer",
        "Bars of the kernel families: dispatch, combine, and the waits for the counts of "
        "tokens; the lower bound as a mark. The table has all numbers.",
        BarChart(rows=names, parts=parts, title="a layer, ms", marks=marks),
        "dispatch-compare.kernels.layer_ns",
        "dispatch-compare.kernels.times_optimal",
    )
    return Section(
        name="kernels",
        title="How long do kernels take?",
        lead=(
            "Kernel families, the fastest first, with times predicted from measurements. The "
            f"best possible time is limited by the {result.bound_limit}.",
        ),
        blocks=(drawn, pages.shown(tables.kernel_times(result))),
    )


def _pairs(copies: Matrix) -> Section:
    """Return the section on the tokens between ranks; `copies` is from ranks to ranks."""
    received = copies.sum(axis=0)
    drawn = pages.pairs_figure(
        copies,
        list(range(len(copies))),
        unit="tokens",
        noun="GPU",
        title="Tokens from GPU to GPU",
        term="dispatch-compare.rank_pair_tokens",
    )
    return Section(
        name="pairs",
        title="Which ranks have the most tokens?",
        lead=(
            f"GPU {int(received.argmax())} receives the most: ",
            pages.fact(
                "dispatch-compare.fullest_rank",
                _most_by_mean(received),
                pages.times,
                why=NO_TIME,
            ),
            " the mean.",
        ),
        blocks=(drawn,),
    )


def recorded(result: RunExchange) -> Page:
    """Return the page of what schedules would save of the all-to-alls of a run."""
    run, why = result.run, result.no_savings or ""
    schedules = Section(
        name="recorded",
        title="What would other schedules take?",
        lead=(
            f"{pages.many(run.exchanges, 'all-to-all')} of {pages.many(run.steps, 'step')}, at "
            "the efficiency of the run.",
        ),
        blocks=(_recorded_schedules(result),),
    )
    return Page(
        title="All-to-alls of a run",
        source=run.path,
        headline=(
            "All-to-alls take ",
            _time("dispatch-run.measured_ns", result.measured_s),
            " of a step.",
        ),
        facts=(_time("dispatch-run.bound_ns", result.bound_s, label="bound", why=why),),
        sections=(schedules, _recorded_pairs(result)),
        warnings=tuple(filter(None, (result.no_savings, *result.unanswered.values()))),
    )


def _recorded_pairs(result: RunExchange) -> Section:
    """Return the section on the bytes between the ranks of a run."""
    fullest = pages.fact("dispatch-run.fullest_rank", result.fullest, pages.times)
    drawn = pages.pairs_figure(
        result.sent / _MB,
        result.ranks,
        unit="MB",
        noun="GPU",
        title="Bytes of a step from GPU to GPU",
        term="dispatch-run.rank_pair_bytes",
    )
    return Section(
        name="pairs",
        title="Which ranks exchange the most?",
        lead=("In the slowest group, the fullest rank has ", fullest, " the mean bytes."),
        blocks=(drawn,),
    )


def _recorded_schedules(result: RunExchange) -> Figure | PageTable:
    """Return the chart of schedules in a run; only their table if they have no times."""
    rows = pages.shown(tables.recorded_schedules(result))
    timed = [
        (one.name, one.seconds, one.even_s)
        for one in result.schedules
        if one.seconds is not None and one.even_s is not None
    ]
    if not timed:
        return rows
    names = [name for name, _, _ in timed]
    bars = row_bars(
        names,
        [seconds for _, seconds, _ in timed],
        _seconds,
        "of a step, ms",
        1 / _MS,
        marks=(
            _marks(names, "measured", [result.measured_s] * len(names), "bar"),
            _marks(names, "with even load", [even_s for _, _, even_s in timed], "diamond"),
        ),
    )
    return figure(
        "recorded-chart",
        "All-to-alls of a step",
        "Bars of the schedules, with the measured time and that of an even load as marks; the "
        "table has all numbers.",
        bars,
        "dispatch-run.schedules.latency_ns",
        "dispatch-run.schedules.even_latency_ns",
        table=rows,
    )


def placement(result: PlacementResult) -> Page:
    """Return the page of schedules before and after a placement of the experts."""
    before, after = result.imbalance
    first = simulation(result.after)
    of_load = "" if result.loads is None else " of the measured load"
    section = Section(
        name="placing",
        title="What does the placement change?",
        lead=(
            "The most loaded GPU has ",
            pages.fact("dispatch-place.imbalance", after, pages.times),
            f" the mean{of_load}; before it had ",
            pages.fact("dispatch-place.imbalance", before, pages.times),
            f". {tables.moves(result, _seconds)}",
        ),
        blocks=(pages.shown(tables.placing(result)),),
    )
    sections = [section]
    if result.steps > 1:
        drift = (pages.shown(tables.drift(result)),) if result.drift else ()
        lead = (f"{tables.drift_verdict(result)}.",)
        title = "Does it pay to place experts anew?"
        sections.append(Section(name="drift", title=title, lead=lead, blocks=drift))
    return Page(
        title="Placement of experts",
        source=first.source,
        headline=(f"{tables.gain(result, _seconds)}. ", *section.lead),
        facts=first.facts,
        sections=(*sections, *first.sections),
    )


def evaluation(result: ExchangeEvaluation) -> Page:
    """Return the page of measured expert all-to-alls beside predictions."""
    errors, calibration = result.errors, result.calibration
    lines = [*tables.worst_group(result), *tables.extrapolated_rows(result)]
    notes = [f" {line}." for line in lines]
    predicted = Section(
        name="evaluation",
        title="How far off are predictions?" if errors else "What is predicted?",
        lead=(f"{pages.many(len(result.rows), 'row')} on {result.cluster}.", *notes),
        blocks=(_errors_figure(errors), pages.shown(tables.exchange_errors(errors)))
        if errors
        else (pages.shown(tables.exchange_times(result.rows)),),
    )
    return Page(
        title="Measured expert all-to-alls",
        source=result.cluster,
        headline=(_evaluated(errors),),
        facts=(),
        sections=(predicted,)
        if calibration is None
        else (predicted, _calibration(result, calibration)),
    )


def _errors_figure(errors: Sequence[ExchangeError]) -> Figure:
    """Return the chart of the median error of each kind of row."""
    bars = row_bars(
        [
            f"{one.gpu} {one.family}, {counted(one.nodes, 'node')}, {one.phase}"
            for one in errors
        ],
        [one.median_error for one in errors],
        pages.percent,
        "median error, %",
        1 / _PERCENT,
    )
    return figure(
        "errors-chart",
        "Median error of predictions",
        "Bars of the median error by GPU, kernels, nodes and phase; the table has all.",
        bars,
        "dispatch-evaluate.errors.median_error",
    )


def _calibration(result: ExchangeEvaluation, constants: Sequence[FittedConstant]) -> Section:
    """Return the section on constants fitted to the rows, and their errors on other rows."""
    shown = [tables.fitted_constants(constants)]
    if result.held_out:
        shown.insert(0, tables.held_out(result.held_out))
    return Section(
        name="calibration",
        title="What do the constants fit?",
        lead=(" ".join(f"{line}." for line in tables.calibration_notes(result)),),
        blocks=tuple(map(pages.shown, shown)),
    )


def _evaluated(errors: Sequence[ExchangeError]) -> str:
    """Return the sentence on the smallest and the largest median error."""
    if not errors:
        return "Predictions, without measured times to compare with."
    ordered = sorted(one.median_error for one in errors)
    return (
        f"Predictions are off by {pages.percent(ordered[0])} to {pages.percent(ordered[-1])}, "
        "the median of each kind of row."
    )


def sweep(grid: DispatchSweep) -> Page:
    """Return the page of schedules over a grid of workloads."""
    labels = [
        ", ".join(f"{name} {getattr(point.recipe, name)}" for name in grid.axes)
        for point in grid.points
    ]
    shown = labels[:_MOST_ROWS]
    rest = len(labels) - len(shown)
    drawn = figure(
        "sweep-chart",
        "Dispatch at each point of the grid",
        f"Bars of the schedules for {len(shown)} workloads; the table has all numbers.",
        _sweep_bars(grid, shown),
        "dispatch-sweep.rows.latency_ns",
        chart_note=f"{rest} more workloads are in the table." if rest else "",
        table=_points(grid, labels),
    )
    lead = (f"{pages.many(len(labels), 'workload')} of {' and '.join(grid.axes)}.",)
    section = Section(
        name="sweep", title="Which schedule is the fastest?", lead=lead, blocks=(drawn,)
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
    of = pages.many(len(grid.points), "workload")
    return f"{first} is the fastest, or within 1 % of it, at {count} of {of}{rest}."


def _sweep_bars(grid: DispatchSweep, labels: list[str]) -> BarChart:
    """Return bars of dispatch times, one per schedule in the row of each labeled workload."""
    parts = []
    for place, name in enumerate(grid.points[0].strategies):
        times = [point.strategies[name].total_s for point in grid.points[: len(labels)]]
        tips = [
            f"{name}, {label}: {_seconds(time)}"
            for label, time in zip(labels, times, strict=True)
        ]
        parts.append(_part(place, name, times, tips))
    height = _BAR * len(parts) + _BAR
    return BarChart(
        rows=labels, parts=parts, title="dispatch, ms", is_stacked=False, row_height=height
    )


def _points(grid: DispatchSweep, labels: list[str]) -> PageTable:
    """Return the table of all points and schedules; `labels` name the points of the grid."""
    return table(
        "sweep-table",
        "All points",
        [
            *("workload", "schedule"),
            ("dispatch", "dispatch-sweep.rows.latency_ns", pages.ns),
            ("of the best", "dispatch-simulate.strategies.times_optimal", pages.times, NO_TIME),
        ],
        [
            (label, name, strategy.total_s * NS, strategy.times_optimal)
            for label, point in zip(labels, grid.points, strict=True)
            for name, strategy in point.strategies.items()
        ],
    )
