"""Schedules of the all-to-all on one screen."""

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastcomm.dispatch.cluster import GIB
from fastcomm.dispatch.placing import Placing
from fastcomm.dispatch.simulation import Simulation, StrategyResult
from fastcomm.dispatch.sweeping import Sweep
from fastcomm.report.console import plain_console
from fastcomm.units import format_bandwidth, format_bytes, format_ns

_MOST_LAYERS = 12
_MOST_NODES = 32
_LINKS = ("NIC send", "NIC receive", "NVLink send", "NVLink receive")
_SHADES = " ░▒▓█"
_RULE = "=" * 50
_BAR = 48
_TITLES = {"deepep-compat": "DeepEP", "fast-compat": "FAST"}


def show(found: Simulation, console: Console | None = None) -> None:
    """Print each strategy: the original's four numbers, phases, what binds, the load."""
    console = plain_console(console)
    _say(console, _title(found))
    for each in found.strategies.values():
        _say(console, _results(each, found.recipe.iter_num * found.recipe.num_layers))
        console.print(_layers(each, found.recipe.num_layers))
        _say(console, _heat(each.loads, found.recipe.gpus_per_node))


def compare(found: Simulation, console: Console | None = None) -> None:
    """Print the strategies side by side, the fastest first."""
    console = plain_console(console)
    _say(console, _title(found))
    table = _table(
        "strategy",
        "dispatch",
        "combine",
        "best possible",
        "its class",
        "between nodes",
        "binds",
    )
    for each in sorted(found.strategies.values(), key=lambda each: each.total_s):
        table.add_row(
            each.name,
            _time(each.total_s),
            "" if each.combine_s is None else _time(each.combine_s),
            _times(each.times_optimal),
            _times(each.times_bound),
            format_bytes(each.inter_bytes),
            _binds(each),
        )
    console.print(table)
    _say(console, "best possible, its class: multiples of the lower bounds of dispatch.")
    for why in found.unanswered.values():
        _say(console, why)


def place(found: Placing, console: Console | None = None) -> None:
    """Print strategies before and after."""
    console = plain_console(console)
    _say(console, _title(found.before))
    count = found.placements[0].replicas
    before, after = found.imbalance
    _say(
        console,
        f"{count.sum()} physical experts for {len(count)}, up to {count.max()} of one; the "
        f"most loaded GPU has {after:.2f} times the mean, {before:.2f} before",
    )
    table = _table("strategy", "before", "after", "speedup", "between nodes", "after")
    for name, each in found.before.strategies.items():
        then = found.after.strategies[name]
        table.add_row(
            name,
            _time(each.total_s),
            _time(then.total_s),
            _times(each.total_s / then.total_s if then.total_s else None),
            format_bytes(each.inter_bytes),
            format_bytes(then.inter_bytes),
        )
    console.print(table)


def sweep(found: Sweep, console: Console | None = None) -> None:
    """Print one row a point of the grid, the strategies beside each other."""
    console = plain_console(console)
    names = list(found.points[0].strategies)
    table = _table(*found.axes, *names, "best possible")
    for point in found.points:
        best = next(iter(point.strategies.values())).optimal_s
        table.add_row(
            *(str(getattr(point.recipe, axis)) for axis in found.axes),
            *(
                f"{_time(each.total_s)} ({_times(each.times_optimal)})"
                for each in point.strategies.values()
            ),
            _time(best),
        )
    console.print(table)
    _say(console, _bars(found))


def _bars(found: Sweep) -> str:
    """A bar a point and strategy, as long as its time by the slowest of all."""
    slowest = max(each.total_s for point in found.points for each in point.strategies.values())
    lines = []
    for point in found.points:
        at = ", ".join(f"{axis} {getattr(point.recipe, axis)}" for axis in found.axes)
        for name, each in point.strategies.items():
            cells = each.total_s / slowest * _BAR if slowest else 0.0
            lines.append(f"{at:<32} {name:<18} {'█' * round(cells)}")
            at = ""
    return "\n".join(lines)


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _title(found: Simulation) -> str:
    recipe, cluster = found.recipe, found.terms.cluster
    return (
        f"{recipe.num_nodes} nodes of {recipe.gpus_per_node} GPUs, {recipe.experts} experts, "
        f"top {recipe.topk}; {recipe.iter_num} x {recipe.num_layers} layers of {recipe.tokens} "
        f"tokens of {format_bytes(found.terms.token_bytes)}\n"
        f"NIC {format_bandwidth(cluster.inter)} a GPU, in the node "
        f"{format_bandwidth(cluster.intra)} a GPU"
    )


def _results(each: StrategyResult, layers: int) -> str:
    """The original's report, its GB of 2^30 bytes included."""
    speed = each.algo_bytes_per_s
    lines = [
        _RULE,
        f"{_TITLES.get(each.name, each.name)} Final Results",
        _RULE,
        f"Total Latency            : {each.total_s:.6f} s",
        f"Avg Layer Latency        : {each.total_s / max(1, layers) * 1000:.4f} ms",
        f"Total Inter-node Traffic : {each.inter_bytes / GIB:.4f} GB",
        f"Algorithmic Bandwidth    : {'n/a' if speed is None else f'{speed / GIB:.4f} GB/s'}",
        _RULE,
        f"{_times(each.times_optimal)} the best possible, {_times(each.times_bound)} the bound "
        "of its class",
    ]
    if each.combine_s is not None:
        both = each.combine_s + each.total_s
        lines.append(f"combine {_time(each.combine_s)}, both ways {_time(both)}")
    return "\n".join(lines)


def _layers(each: StrategyResult, per_iteration: int) -> Table:
    phases = list(each.layers[0].phases) if each.layers else []
    table = _table("iteration, layer", "dispatch", *phases, "bound", "binds")
    for number, layer in enumerate(each.layers[:_MOST_LAYERS]):
        table.add_row(
            f"{number // per_iteration}, {number % per_iteration}",
            _time(layer.seconds),
            *(_time(seconds) for seconds in layer.phases.values()),
            _time(layer.bound_s),
            str(layer.bottleneck),
        )
    if len(each.layers) > _MOST_LAYERS:
        table.add_row(f"and {len(each.layers) - _MOST_LAYERS} more")
    return table


def _heat(loads: NDArray[np.int64], width: int) -> str:
    """A shade a GPU, nodes beside each other: each kind of link by its own maximum."""
    lines = [
        f"{'load of each GPU':<17} a shade a GPU, a gap between nodes; the fullest is the max"
    ]
    for name, column in zip(_LINKS, loads.T, strict=True):
        most = int(column.max(initial=0))
        shades = [
            _SHADES[0 if not value else 1 + int(value * (len(_SHADES) - 2) // most)]
            for value in column.tolist()
        ]
        nodes = ["".join(shades[at : at + width]) for at in range(0, len(shades), width)]
        cut = " ..." if len(nodes) > _MOST_NODES else ""
        lines.append(f"{name:<17} {'|'.join(nodes[:_MOST_NODES])}{cut}  max {most}")
    return "\n".join(lines)


def _binds(each: StrategyResult) -> str:
    """The busiest link of the slowest layer."""
    slowest = max(each.layers, key=lambda layer: layer.seconds, default=None)
    return "nothing" if slowest is None else str(slowest.bottleneck)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, style="bold", no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    return table


def _time(seconds: float) -> str:
    return format_ns(seconds * 1e9)


def _times(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}x"
