"""Schedules of an expert all-to-all as tables, on the terminal and in files."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from fastcomm.dispatch.evaluation import (
    ExchangeError,
    ExchangeEvaluation,
    ExchangePrediction,
    FittedConstant,
    HeldOutError,
)
from fastcomm.dispatch.model_exchange import KernelTime, ModelExchange
from fastcomm.dispatch.placement_gain import PlacementResult
from fastcomm.dispatch.run_exchange import RunExchange
from fastcomm.dispatch.schedules import LOAD_NAMES
from fastcomm.dispatch.simulation import Simulation, StrategyResult, in_ns
from fastcomm.dispatch.sweep import DispatchSweep
from fastcomm.hardware.expert_exchange import FAMILIES, PHASES, ExchangePhase
from fastcomm.show.console import TerminalTable, na, plain_console, say, shown, table
from fastcomm.show.tables import NA, ResultTable, TableColumn
from fastcomm.units import GIB, counted, format_bandwidth, format_bytes, format_s, percent

_NO_COMBINE = "the original simulator has no combine"
NO_TIME = "the bound is 0"
_OTHER_PHASE = "a row of the other phase"
_FEW_ROWS = "too few rows"
_PLACING = (
    TableColumn("schedule", 0),
    TableColumn("before", 1, "ns", "dispatch-place.before.strategies.total_latency_ns"),
    TableColumn("after", 2, "ns", "dispatch-place.after.strategies.total_latency_ns"),
    TableColumn("speed-up", 3, "multiple", "pages.dispatch_speedup"),
    TableColumn("bytes between nodes", 4, "bytes", drop=2, only="terminal"),
    TableColumn("bytes after", 5, "bytes", drop=1, only="terminal"),
)
_MOST_LAYERS = 12
_MOST_DRIFT = 20  # steps
_NO_GAIN = 1e-3  # share of the measured time
_MOST_NODES = 32
_MOST_REASONS = 4
_SHADES = " ░▒▓█"
_RULE = "=" * 50
_BAR = 48
_BAR_START = 52  # cells before a bar
_LABEL = 25
_BINARY = "GB and GB/s of these totals are GiB and GiB/s, 2^30 bytes, as the original has them"
_TITLES = {"deepep-compat": "DeepEP", "fast-compat": "FAST"}


def schedules(ranked: Sequence[StrategyResult]) -> ResultTable:
    """Return times, multiples of the bounds, and bytes between nodes of schedules."""
    return ResultTable(name="times-table", caption="Schedules", columns=_SCHEDULES, rows=ranked)


def _bottleneck(schedule: StrategyResult) -> str:
    """Return the busiest link of the slowest layer."""
    slowest = max(schedule.layers, key=lambda layer: layer.seconds, default=None)
    return str(slowest.bottleneck) if slowest is not None and slowest.seconds else "none"


_SCHEDULES = (
    TableColumn("schedule", "name"),
    TableColumn(
        "dispatch",
        lambda one: in_ns(one.total_s),
        "ns",
        "dispatch-simulate.strategies.total_latency_ns",
    ),
    TableColumn(
        *(
            "combine",
            lambda one: in_ns(one.combine_s),
            "ns",
            "dispatch-simulate.strategies.combine_latency_ns",
        ),
        why=_NO_COMBINE,
    ),
    TableColumn(
        *(
            "of the best",
            "times_optimal",
            "multiple",
            "dispatch-simulate.strategies.times_optimal",
        ),
        why=NO_TIME,
    ),
    TableColumn(
        *(
            "of its class",
            "times_bound",
            "multiple",
            "dispatch-simulate.strategies.times_lower_bound",
        ),
        why=NO_TIME,
        drop=1,
    ),
    TableColumn(
        "between nodes",
        "inter_bytes",
        "bytes",
        "dispatch-simulate.strategies.inter_node_bytes",
        drop=2,
    ),
    TableColumn("bottleneck", _bottleneck, only="terminal", is_sentence=True),
)


def placing(result: PlacementResult) -> ResultTable:
    """Return the schedules before and after a placement of the experts."""
    rows = []
    for name, old in result.before.strategies.items():
        new = result.after.strategies[name]
        speedup = old.total_s / new.total_s if new.total_s else None
        times = in_ns(old.total_s), in_ns(new.total_s)
        rows.append((name, *times, speedup, old.inter_bytes, new.inter_bytes))
    return ResultTable(
        name="placing-table", caption="Before and after", columns=_PLACING, rows=rows
    )


def show(simulation: Simulation, console: Console | None = None) -> None:
    """Print the fastest strategy; of each its totals, phases, busiest links and load."""
    console = plain_console(console)
    _say(console, f"{_fastest(simulation)}\n{_title(simulation)}")
    for strategy in simulation.strategies.values():
        _say(
            console,
            _results(strategy, simulation.recipe.iter_num * simulation.recipe.num_layers),
        )
        console.print(_layers(strategy, simulation.recipe.num_layers))
        loads = _heat(strategy.loads, simulation.recipe.gpus_per_node, console.width)
        console.print(Text(loads), soft_wrap=True)


def compare(simulation: Simulation, console: Console | None = None) -> None:
    """Print the strategies side by side, the fastest first."""
    console = plain_console(console)
    _say(console, f"{_fastest(simulation)}\n{_title(simulation)}")
    console.print(shown(schedules(_ranked(simulation))))
    _say(
        console,
        f"dispatch, combine and bytes between nodes: {_sum_text(simulation)}. of the best, "
        "of its class: dispatch time over the lower bound of all schedules, and of its class.",
    )
    for reason in simulation.unanswered.values():
        _say(console, reason)


def kernels(result: ModelExchange, console: Console | None = None) -> None:
    """Print kernel families as measured, the fastest first, then simulated schedules."""
    console = plain_console(console)
    layer, limit = result.layer, result.bound_limit
    bound = f"the best possible time is limited by the {limit}" if limit else "nothing is sent"
    _say(
        console,
        f"{_fastest_kernels(result)}\n"
        f"{layer.model}: {counted(layer.layers, 'layer')} of {counted(layer.experts, 'expert')}"
        f", top {layer.topk}; {counted(layer.tokens_per_gpu, 'token')} per GPU; "
        f"{counted(layer.ranks, 'GPU')} of {layer.cluster} in "
        f"{counted(layer.domains, 'NVLink domain')}\n"
        f"{bound}; the fullest rank has {result.fullest:.3f} times the mean tokens",
    )
    if result.kernels:
        _say_kernels(result, console)
    if own := [one.family for one in result.kernels if one.is_calibrated]:
        _say(console, f"{', '.join(own)}: constants of --exchange-costs")
    for line in result.extrapolated():
        _say(console, line)
    for family, reason in result.unpriced.items():
        _say(console, f"{family}: {NA} ({reason.removeprefix(f'{family}: ')})")
    title = _title(result.simulation)
    _say(console, f"\nSimulated schedules, on links of data sheets:\n{title}")
    console.print(shown(schedules(_ranked(result.simulation))))
    for reason in result.simulation.unanswered.values():
        _say(console, reason)


def _fastest_kernels(result: ModelExchange) -> str:
    """Return the fastest kernels, and how close they are to the best possible time."""
    fastest = result.fastest
    if fastest is None:
        return f"Fastest kernels: {NA}"
    return (
        f"Fastest kernels: {FAMILIES[fastest.family].title}, {fastest.dispatch_precision} "
        f"dispatch, {format_s(fastest.layer_s)} a layer, "
        f"{_times(fastest.times_optimal)} the best possible time"
        f"{', extrapolated' * bool(fastest.extrapolated)}"
    )


def _say_kernels(result: ModelExchange, console: Console) -> None:
    """Print the table of kernel families, and what its columns are."""
    console.print(shown(kernel_times(result)))
    _say(
        console,
        "precision: of dispatched tokens; combine is bf16. Kernels of different precision do "
        "not send the same bytes: --dispatch-precision gives all the same. "
        "dispatch, combine: of a layer; rates as DeepEP counts them, with copies for the own "
        "node. layer: both, with waits. step: forward and backward pass of all layers, for "
        "the tokens of one micro-batch.",
    )


def recorded(result: RunExchange, console: Console | None = None) -> None:
    """Print what schedules and an even load would save of the all-to-alls of a run."""
    console = plain_console(console)
    run = result.run
    _say(console, _saving(result))
    _say(
        console,
        f"{run.path}: {counted(run.exchanges, 'all-to-all')} of "
        f"{counted(run.groups, 'group')} in {counted(run.steps, 'step')}; {run.cluster}, nodes "
        f"of {counted(run.gpus_per_node, 'GPU')}; in the slowest group, of "
        f"{_ranks_text(result.slowest)}, the fullest rank has {result.fullest:.3f} times the "
        "mean bytes",
    )
    console.print(shown(recorded_schedules(result)))
    _say(
        console,
        "times: of a step and its slowest group, without waits for late ranks. direct: as "
        "measured. even load: all ranks of a group have equally many bytes, which no placement "
        "of experts beats. Other times have the start and the efficiency of the run, "
        f"{na(result.efficiency, percent)} of the links.",
    )
    if run.incomplete or run.without_splits:
        _say(
            console,
            f"left out: {counted(run.incomplete, 'all-to-all')} with ranks that were not read, "
            f"{counted(run.without_splits, 'call')} without splits",
        )
    for reason in result.unanswered.values():
        _say(console, reason)


def _saving(result: RunExchange) -> str:
    """Return what the fastest schedule and an even load save of the measured time."""
    measured = format_s(result.measured_s)
    if result.no_savings:
        return f"All-to-alls take {measured} of a step; savings: {NA} ({result.no_savings})"
    times = [(one.seconds, one.name) for one in result.schedules if one.seconds is not None]
    evens = [one.even_s for one in result.schedules if one.even_s is not None]
    if not times or not evens:
        return f"All-to-alls take {measured} of a step; savings: {NA} (no schedule has a time)"
    seconds, name = min(times)
    saved, even = (max(0.0, result.measured_s - one) for one in (seconds, min(evens)))
    gain = f"{name} would save {format_s(saved)} ({percent(saved / result.measured_s)})"
    if saved < _NO_GAIN * result.measured_s:
        gain = "no schedule is faster"
    return (
        f"All-to-alls take {measured} of a step: {gain}, with an even load up to "
        f"{format_s(even)} less ({percent(even / result.measured_s)})"
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group, or the first and last of many."""
    if len(ranks) > _MANY_RANKS:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


_MANY_RANKS = 8


def recorded_schedules(result: RunExchange) -> ResultTable:
    """Return the times of schedules in a run, the fastest first."""
    return ResultTable(
        name="recorded-table", caption="Schedules", columns=_RECORDED, rows=result.rows()
    )


def kernel_times(result: ModelExchange) -> ResultTable:
    """Return the times of kernel families, the fastest first."""
    return ResultTable(
        name="kernels-table", caption="Kernels", columns=_KERNELS, rows=result.kernels
    )


def place(result: PlacementResult, console: Console | None = None) -> None:
    """Print the strategies before and after a placement of the experts."""
    console = plain_console(console)
    count = result.placements[0].replicas
    before, after = result.imbalance
    _say(
        console,
        f"{gain(result)}\n{_title(result.before)}\n"
        f"{count.sum()} copies of {len(count)} experts, at most {count.max()} of one; the most "
        f"loaded GPU has {after:.2f} times the mean {load_text(result)}, {before:.2f} before",
    )
    console.print(shown(placing(result)))
    _say(console, f"times and bytes: {_sum_text(result.before)}.\n{moves(result)}")
    if result.steps > 1:
        _say(console, drift_verdict(result))
    if result.drift:
        console.print(shown(drift(result)))
        _say(console, _DRIFT)


def load_text(result: PlacementResult) -> str:
    """Return of which load an imbalance is."""
    return "load" if result.loads is None else "of the measured load (times: of the workload)"


def drift_verdict(result: PlacementResult) -> str:
    """Return whether placing anew pays in the recorded steps."""
    rows = result.drift
    if not rows:
        return "Drift: n/a (a third step, or --before, is needed to measure a new placement)"
    count = sum(bool(one.is_saving) for one in rows)
    if not count:
        return "Drift: placing anew does not pay: what it saves is no more than noise"
    pays = f"placing anew saves time in {count} of {counted(len(rows), 'step')}"
    if all(one.move_s is None for one in rows):
        return f"Drift: {pays}; --expert-bytes says whether it pays for the moves"
    least = min(one.pays_after for one in rows if one.pays_after is not None)
    return f"Drift: {pays}, and pays for the moves after {counted(least, 'iteration')} or more"


def moves(result: PlacementResult, form: Callable[[float], str] = format_s) -> str:
    """Return how many experts move, and how long that takes; `form` formats seconds."""
    time = "" if result.move_s is None else f", {form(result.move_s)} at its link"
    return (
        f"{counted(sum(result.moves), 'expert')} of all layers move to a GPU without them, at "
        f"most {result.most_moves} to one GPU{time}."
    )


def drift(result: PlacementResult) -> ResultTable:
    """Return what a new placement would save in each recorded step, the first ones."""
    return ResultTable(
        name="drift-table", caption="Drift", columns=_DRIFTING, rows=result.drift[:_MOST_DRIFT]
    )


def evaluation(result: ExchangeEvaluation, console: Console | None = None) -> None:
    """Print the errors of predicted expert all-to-alls, or predictions without measurements."""
    console = plain_console(console)
    count = counted(len(result.rows), "row")
    if errors := result.errors:
        console.print(shown(exchange_errors(errors)))
        _say(
            console,
            f"{count} on {result.cluster}. error: predicted over measured time, minus 1; the "
            "median of its size, and the size that nine of ten rows stay below. bias: its "
            "median. Waits before data move are not counted.",
        )
        for line in worst_group(result):
            _say(console, line)
    else:
        console.print(shown(exchange_times(result.rows[:_MOST_LAYERS])))
        _say(console, f"{count} on {result.cluster}, without measured times.")
    for line in extrapolated_rows(result):
        _say(console, line)
    if result.calibration is not None:
        console.print(shown(fitted_constants(result.calibration)))
        if result.held_out:
            console.print(shown(held_out(result.held_out)))
        for line in calibration_notes(result):
            _say(console, line)


def extrapolated_rows(result: ExchangeEvaluation) -> list[str]:
    """Return lines on the rows whose sizes lie outside of the measurements."""
    counts = result.extrapolated
    lines = [
        f"extrapolated: {counted(count, 'row')} of {reason}"
        for reason, count in list(counts.items())[:_MOST_REASONS]
    ]
    if len(counts) > _MOST_REASONS:
        rest = sum(list(counts.values())[_MOST_REASONS:])
        lines.append(f"extrapolated: {counted(rest, 'more row')} (--json has all)")
    return lines


def worst_group(result: ExchangeEvaluation) -> list[str]:
    """Return a line on the ranks, top-k and hidden size with the largest median error."""
    one = result.worst
    if one is None:
        return []
    return [
        f"worst group: {one.family} {one.phase} on {one.gpu}, {counted(one.ranks, 'rank')}, "
        f"top {one.topk}, hidden {one.hidden}: error {percent(one.median_error)}, bias "
        f"{percent(one.median_bias)} ({counted(one.rows, 'row')})"
    ]


def calibration_notes(result: ExchangeEvaluation) -> list[str]:
    """Return which constants no machine has, and whether fitted ones hold for other rows."""
    lines = [
        f"fit: {one.family} {one.phase} on {one.gpu}: {one.constant} {one.fitted:.4g} is "
        f"{one.warning}"
        for one in result.calibration or ()
        if one.warning
    ]
    if not result.held_out:
        return [*lines, "fit: n/a on other rows (too few rows to hold every other one out)"]
    for one in result.held_out:
        start = f"fit: {one.family} {one.phase} on {one.gpu}: constants fitted to "
        if one.is_worse:
            lines.append(
                f"{start}every other row are worse on the rest ({percent(one.shipped_error)} "
                f"before, {percent(one.fitted_error)} after); use the shipped ones"
            )
        elif one.is_worse_beyond:
            before, after = map(percent, one.beyond_errors)
            lines.append(
                f"{start}rows of few tokens are worse on rows of more ({before} before, "
                f"{after} after); predict no more tokens with them than the table has"
            )
    return lines


def held_out(errors: Sequence[HeldOutError]) -> ResultTable:
    """Return the errors on rows that the constants were not fitted to, before and after."""
    return ResultTable(
        name="held-out", caption="Fit on rows held out", columns=_HELD_OUT, rows=errors
    )


def exchange_errors(errors: Sequence[ExchangeError]) -> ResultTable:
    """Return the table of errors of predictions, by GPU, kernels, nodes and phase."""
    return ResultTable(name="errors", caption="Errors", columns=_ERRORS, rows=errors)


def exchange_times(rows: Sequence[ExchangePrediction]) -> ResultTable:
    """Return the predicted times of rows without measurements."""
    return ResultTable(name="times", caption="Predictions", columns=_TIMES, rows=rows)


def fitted_constants(constants: Sequence[FittedConstant]) -> ResultTable:
    """Return the constants that were fitted to a table, beside the shipped ones."""
    return ResultTable(name="fit", caption="Fit", columns=_CONSTANTS, rows=constants)


def _predicted(phase: ExchangePhase) -> Callable[[ExchangePrediction], float | None]:
    """Return a function of a row: the predicted time of a phase in ns, None without one."""

    def time(row: ExchangePrediction) -> float | None:
        return in_ns(row.phases[phase].predicted_s) if phase in row.phases else None

    return time


def _phase(phase: ExchangePhase, field: str) -> Callable[[KernelTime], Any]:
    """Return a function of a kernel family: a field of one of its phases."""
    return lambda one: getattr(one.phases[phase], field)


def _phase_ns(phase: ExchangePhase) -> Callable[[KernelTime], float | None]:
    return lambda one: in_ns(one.phases[phase].seconds)


def _limit(one: KernelTime) -> str:
    """Return what limits dispatch and combine."""
    limits = [one.phases[phase].limit for phase in PHASES]
    return "/".join(dict.fromkeys(limits))


_NO_BYTES = "bytes do not limit the all-to-alls of the run"
_RECORDED = (
    TableColumn("schedule", "schedule"),
    TableColumn("time", "latency_ns", "ns", "dispatch-run.schedules.latency_ns", why=_NO_BYTES),
    TableColumn(
        "saved", "saved_ns", "change_ns", "dispatch-run.schedules.saved_ns", why=_NO_BYTES
    ),
    TableColumn(
        "with even load",
        "even_latency_ns",
        "ns",
        "dispatch-run.schedules.even_latency_ns",
        why=_NO_BYTES,
    ),
    TableColumn(
        "saved",
        "even_saved_ns",
        "change_ns",
        "dispatch-run.schedules.even_saved_ns",
        drop=1,
        why=_NO_BYTES,
    ),
)
_KERNELS = (
    TableColumn("kernels", "family"),
    TableColumn(
        "precision", "dispatch_precision", key="dispatch-compare.kernels.dispatch_precision"
    ),
    TableColumn(
        "dispatch", _phase_ns("dispatch"), "ns", "dispatch-compare.kernels.dispatch.latency_ns"
    ),
    TableColumn(
        *("dispatch rate", _phase("dispatch", "bytes_per_s"), "bytes_per_s"),
        "dispatch-compare.kernels.dispatch.bandwidth_bytes_per_s",
    ),
    TableColumn(
        "combine", _phase_ns("combine"), "ns", "dispatch-compare.kernels.combine.latency_ns"
    ),
    TableColumn(
        *("combine rate", _phase("combine", "bytes_per_s"), "bytes_per_s"),
        "dispatch-compare.kernels.combine.bandwidth_bytes_per_s",
    ),
    TableColumn(
        "layer", lambda one: in_ns(one.layer_s), "ns", "dispatch-compare.kernels.layer_ns"
    ),
    TableColumn(
        *("step", lambda one: in_ns(one.step_s), "ns", "dispatch-compare.kernels.step_ns"),
        why="kernels of inference",
    ),
    TableColumn(
        "of the best",
        "times_optimal",
        "multiple",
        "dispatch-compare.kernels.times_optimal",
        drop=1,
    ),
    TableColumn("limit", _limit),
    TableColumn("measured on", "measured_on", drop=2),
)
_DRIFT = (
    "kept, anew: the heaviest GPU over the mean with the placement of --before or of the first "
    "step, and with one made from the step before, on this and all later steps. saved: "
    "of dispatch and combine of an iteration with the placement that stays, if they take as "
    "long as the heaviest GPU, and its error. pays after: iterations whose savings are the "
    "time of the moves; n/a if savings are within their error, or without --expert-bytes."
)
_NO_SIZE = "savings are within their error, or no --expert-bytes"
_ONE_SAMPLE = "one step of one layer"
_DRIFTING = (
    TableColumn("step", "step", "count"),
    TableColumn("kept", "imbalance_kept", "multiple", "dispatch-place.drift.imbalance_kept"),
    TableColumn("anew", "imbalance_anew", "multiple", "dispatch-place.drift.imbalance_anew"),
    TableColumn("moves", "moves", "count", "dispatch-place.drift.moves"),
    TableColumn(
        "saved", lambda one: in_ns(one.saved_s), "change_ns", "dispatch-place.drift.saved_ns"
    ),
    TableColumn(
        *("error", lambda one: in_ns(one.error_s), "ns", "dispatch-place.drift.saved_error_ns"),
        why=_ONE_SAMPLE,
        drop=1,
    ),
    TableColumn(
        *("pays after", "pays_after", "count", "dispatch-place.drift.pays_after_iterations"),
        why=_NO_SIZE,
    ),
)
_ERRORS = (
    TableColumn("GPU", "gpu"),
    TableColumn("kernels", "family"),
    TableColumn("nodes", "nodes", "count", "dispatch-evaluate.errors.nodes"),
    TableColumn("phase", "phase"),
    TableColumn("error", "median_error", "share", "dispatch-evaluate.errors.median_error"),
    TableColumn("90 % below", "p90_error", "share", "dispatch-evaluate.errors.p90_error"),
    TableColumn("bias", "median_bias", "share", "dispatch-evaluate.errors.median_bias"),
    TableColumn("rows", "rows", "count", "dispatch-evaluate.errors.rows"),
)
_TIMES = (
    TableColumn("GPU", "gpu"),
    TableColumn("kernels", lambda row: row.row.family),
    TableColumn("nodes", "domains", "count", "dispatch-evaluate.rows.nodes"),
    TableColumn("ranks", lambda row: row.row.ranks, "count", "dispatch-evaluate.rows.ranks"),
    TableColumn("tokens", lambda row: row.row.tokens, "count", "dispatch-evaluate.rows.tokens"),
    TableColumn(
        "dispatch",
        _predicted("dispatch"),
        "ns",
        "dispatch-evaluate.rows.predicted_dispatch_ns",
        why=_OTHER_PHASE,
    ),
    TableColumn(
        "combine",
        _predicted("combine"),
        "ns",
        "dispatch-evaluate.rows.predicted_combine_ns",
        why=_OTHER_PHASE,
    ),
    TableColumn("extrapolated", lambda row: "yes" if row.extrapolated else "no", drop=1),
)
_HELD_OUT = (
    TableColumn("GPU", "gpu"),
    TableColumn("kernels", "family"),
    TableColumn("domains", "scope"),
    TableColumn("phase", "phase"),
    TableColumn(
        "shipped", "shipped_error", "share", "dispatch-evaluate.held_out.shipped_error"
    ),
    TableColumn("fitted", "fitted_error", "share", "dispatch-evaluate.held_out.fitted_error"),
    TableColumn("rows held out", "rows", "count", "dispatch-evaluate.held_out.rows"),
    TableColumn(
        *("shipped, beyond", "beyond_shipped_error", "share"),
        "dispatch-evaluate.held_out.beyond_shipped_error",
        why=_FEW_ROWS,
    ),
    TableColumn(
        *("fitted, beyond", "beyond_fitted_error", "share"),
        "dispatch-evaluate.held_out.beyond_fitted_error",
        why=_FEW_ROWS,
    ),
)
_CONSTANTS = (
    TableColumn("GPU", "gpu"),
    TableColumn("kernels", "family"),
    TableColumn("domains", "scope"),
    TableColumn("phase", "phase"),
    TableColumn("constant", "constant"),
    TableColumn("shipped", lambda one: f"{one.shipped:.4g}"),
    TableColumn("fitted", lambda one: f"{one.fitted:.4g}"),
)


def gain(result: PlacementResult, form: Callable[[float], str] = format_s) -> str:
    """Return what the placement saves of the fastest strategy; `form` formats seconds."""
    before, after = (_ranked(part)[0] for part in (result.before, result.after))
    factor = before.total_s / after.total_s if after.total_s else None
    return (
        f"Placed anew, the dispatch is {_times(factor)} as fast: "
        f"{form(before.total_s)} with {before.name} before, "
        f"{form(after.total_s)} with {after.name} after"
    )


def _fastest(simulation: Simulation) -> str:
    """Return the strategy with the shortest dispatch, and how close it is to the optimum."""
    if not simulation.strategies:
        return "No strategy can be simulated for this workload:"
    fastest = _ranked(simulation)[0]
    return (
        f"Fastest: {fastest.name}, dispatch in {format_s(fastest.total_s)}, "
        f"{_times(fastest.times_optimal)} the best possible time"
    )


def _ranked(simulation: Simulation) -> list[StrategyResult]:
    """Return the strategies, that with the shortest dispatch first."""
    return sorted(simulation.strategies.values(), key=lambda strategy: strategy.total_s)


def _sum_text(simulation: Simulation) -> str:
    """Return over what the times and bytes of a strategy are summed."""
    recipe = simulation.recipe
    iterations = counted(recipe.iter_num, "iteration")
    layers = counted(recipe.num_layers, "layer")
    if recipe.iter_num * recipe.num_layers == 1:
        return f"of {iterations} of {layers}"
    return f"sums over {iterations} of {layers} each"


def sweep(grid: DispatchSweep, console: Console | None = None) -> None:
    """Print which strategy wins, a row for each point with all strategies, then bars.

    A cell has the time of a strategy and its multiple of the best possible time, which is the
    last column. Bars compare the times of all points and strategies.

    Parameters
    ----------
    grid
        Simulated points.
    console
        Where to print; stdout by default.

    """
    console = plain_console(console)
    _say(console, _winners(grid))
    names = list(grid.points[0].strategies)
    rows = table(*grid.axes, *names, "best possible")
    for point in grid.points:
        best = next(iter(point.strategies.values())).optimal_s
        rows.add_row(
            *(str(getattr(point.recipe, axis)) for axis in grid.axes),
            *(
                f"{format_s(strategy.total_s)} ({_times(strategy.times_optimal)})"
                for strategy in point.strategies.values()
            ),
            format_s(best),
        )
    console.print(rows)
    bars = _bars(grid, max(1, min(_BAR, console.width - _BAR_START - 1)))
    console.print(Text(bars), soft_wrap=True)


def _winners(grid: DispatchSweep) -> str:
    """Return at how many points each strategy is the fastest."""
    wins = Counter(_ranked(point)[0].name for point in grid.points).most_common()
    if len(wins) == 1:
        return f"Fastest at all {counted(len(grid.points), 'point')}: {wins[0][0]}"
    first, *others = (f"{name} at {count}" for name, count in wins)
    return f"Fastest: {first} of {len(grid.points)} points, {', '.join(others)}"


def _bars(grid: DispatchSweep, width: int) -> str:
    """Return a bar for each point and strategy; that of the slowest has `width` cells."""
    slowest = max(
        strategy.total_s for point in grid.points for strategy in point.strategies.values()
    )
    lines = []
    for point in grid.points:
        label = ", ".join(f"{axis} {getattr(point.recipe, axis)}" for axis in grid.axes)
        for name, strategy in point.strategies.items():
            cells = strategy.total_s / slowest * width if slowest else 0.0
            lines.append(f"{label:<{_BAR_START - 20}} {name:<18} {'█' * round(cells)}")
            label = ""
    return "\n".join(lines)


def _say(console: Console, text: str) -> None:
    """Print lines of text without markup; continued ones are indented."""
    for line in text.split("\n"):
        say(console, escape(line), hanging=2)


def _title(simulation: Simulation) -> str:
    """Return the sizes of the workload and, on a second line, the bandwidth of its links."""
    recipe, links = simulation.recipe, simulation.terms.links
    return (
        f"{counted(recipe.num_nodes, 'node')} of {counted(recipe.gpus_per_node, 'GPU')}, "
        f"{counted(recipe.experts, 'expert')}, top {recipe.topk}; "
        f"{counted(recipe.iter_num, 'iteration')} of {counted(recipe.num_layers, 'layer')} of "
        f"{counted(recipe.tokens, 'token')} of {format_bytes(simulation.terms.token_bytes)}\n"
        f"NIC {format_bandwidth(links.inter)}/GPU, inside the node "
        f"{format_bandwidth(links.intra)}/GPU"
    )


def _results(strategy: StrategyResult, layers: int) -> str:
    """Return lines of text on the total times and loads of a strategy.

    `layers` is the number of layers of all iterations.
    """
    times_best = (
        f"{_times(strategy.times_optimal)} the best possible time, "
        f"{_times(strategy.times_bound)} the bound of its class"
    )
    if strategy.name in _TITLES:
        return "\n".join([*_original(strategy, layers), times_best])
    lines = [
        "",
        f"{strategy.name}: dispatch {format_s(strategy.total_s)}, "
        f"{format_s(strategy.total_s / max(1, layers))} a layer; {times_best}",
    ]
    if strategy.combine_s is not None:
        both = strategy.combine_s + strategy.total_s
        lines.append(f"combine {format_s(strategy.combine_s)}, both ways {format_s(both)}")
    traffic = format_bytes(strategy.inter_bytes)
    speed = na(strategy.algo_bytes_per_s, format_bandwidth)
    lines.append(f"{traffic} between nodes, algorithm bandwidth {speed}")
    return "\n".join(lines)


def _original(strategy: StrategyResult, layers: int) -> list[str]:
    """Return the totals of a compat schedule as the original prints them, in its units."""
    speed = strategy.algo_bytes_per_s
    numbers = {
        "Total Latency": f"{strategy.total_s:.6f} s",
        "Avg Layer Latency": f"{strategy.total_s / max(1, layers) * 1000:.4f} ms",
        "Total Inter-node Traffic": f"{strategy.inter_bytes / GIB:.4f} GB",
        "Algorithmic Bandwidth": NA if speed is None else f"{speed / GIB:.4f} GB/s",
    }
    return [
        _RULE,
        f"{_TITLES[strategy.name]} Final Results",
        _RULE,
        *(f"{name:<{_LABEL}}: {number}" for name, number in numbers.items()),
        _RULE,
        _BINARY,
    ]


def _layers(strategy: StrategyResult, per_iteration: int) -> TerminalTable:
    """Return the table of the first layers; an iteration has `per_iteration` layers."""
    phases = list(strategy.layers[0].phases) if strategy.layers else []
    rows = table(
        *("iteration, layer", "dispatch", *(name.replace("_", " ") for name in phases)),
        *("bound", "bottleneck"),
        drop=phases[::-1],
        texts=("bottleneck",),
    )
    for number, layer in enumerate(strategy.layers[:_MOST_LAYERS]):
        rows.add_row(
            f"{number // per_iteration}, {number % per_iteration}",
            format_s(layer.seconds),
            *(format_s(seconds) for seconds in layer.phases.values()),
            format_s(layer.bound_s),
            str(layer.bottleneck),
        )
    if len(strategy.layers) > _MOST_LAYERS:
        rows.add_row(f"and {len(strategy.layers) - _MOST_LAYERS} more")
    return rows


def _heat(loads: NDArray[np.int64], gpus: int, width: int) -> str:
    """Return a shade for each GPU, node after node, relative to the maximum of its link.

    `loads` has tokens in a row per GPU and a column per kind of link; `gpus` is the number of
    GPUs of a node; `width` is in cells.
    """
    lines = [f"{'load of each GPU':<17} (one shade per GPU, relative to max)"]
    for name, column in zip(LOAD_NAMES, loads.T, strict=True):
        most = int(column.max(initial=0))
        shades = [
            _SHADES[0 if not value else 1 + int(value * (len(_SHADES) - 2) // most)]
            for value in column.tolist()
        ]
        nodes = ["".join(shades[at : at + gpus]) for at in range(0, len(shades), gpus)]
        room = width - len(f"{'':<17}  ...  max {most} tokens")
        shown = max(1, min(_MOST_NODES, (room + 1) // (gpus + 1)))
        cut = " ..." if len(nodes) > shown else ""
        lines.append(f"{name:<17} {'|'.join(nodes[:shown])}{cut}  max {most} tokens")
    return "\n".join(lines)


def _times(value: float | None) -> str:
    """Format a multiple: "1.240x"; "n/a" for None."""
    return "n/a" if value is None else f"{value:.3f}x"
