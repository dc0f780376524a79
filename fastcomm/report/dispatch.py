"""Schedules of the all-to-all on one screen and in files."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from fastcomm import result
from fastcomm.dispatch.placement import Placing
from fastcomm.dispatch.schedules import LOAD_NAMES
from fastcomm.dispatch.simulation import DispatchSweep, Simulation, StrategyResult
from fastcomm.report import files
from fastcomm.report.console import NA, TerminalTable, na, plain_console, say, table
from fastcomm.result import TableResult
from fastcomm.units import GIB, counted, format_bandwidth, format_bytes, format_s

_MOST_LAYERS = 12
_MOST_NODES = 32
_SHADES = " ░▒▓█"
_RULE = "=" * 50
_BAR = 48
_AT = 52  # cells before a bar
_LABEL = 25
_DIGITS = 4
_BINARY = "GB and GB/s of these totals are GiB and GiB/s, 2^30 bytes, as the original has them"
_TITLES = {"deepep-compat": "DeepEP", "fast-compat": "FAST"}


def show(found: Simulation, console: Console | None = None) -> None:
    """Print each strategy: totals, phases, the busiest link of each layer, the load."""
    console = plain_console(console)
    _say(console, _title(found))
    for each in found.strategies.values():
        _say(console, _results(each, found.recipe.iter_num * found.recipe.num_layers))
        console.print(_layers(each, found.recipe.num_layers))
        loads = _heat(each.loads, found.recipe.gpus_per_node, console.width)
        console.print(Text(loads), soft_wrap=True)


def compare(found: Simulation, console: Console | None = None) -> None:
    """Print the strategies side by side, the fastest first."""
    console = plain_console(console)
    _say(console, _title(found))
    rows = table(
        *("strategy", "dispatch", "combine", "best possible", "its class", "between nodes"),
        "binds",
        drop=("its class", "between nodes"),
        texts=("binds",),
    )
    for each in sorted(found.strategies.values(), key=lambda each: each.total_s):
        rows.add_row(
            each.name,
            format_s(each.total_s),
            "" if each.combine_s is None else format_s(each.combine_s),
            _times(each.times_optimal),
            _times(each.times_bound),
            format_bytes(each.inter_bytes),
            _binds(each),
        )
    console.print(rows)
    _say(
        console,
        f"dispatch, combine and bytes between nodes: {_sum_words(found)}. best possible, its "
        "class: multiples of the lower bounds of dispatch.",
    )
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
    rows = table(
        *("strategy", "before", "after", "speedup", "bytes between nodes", "bytes after"),
        drop=("bytes after", "bytes between nodes"),
    )
    for name, each in found.before.strategies.items():
        then = found.after.strategies[name]
        rows.add_row(
            name,
            format_s(each.total_s),
            format_s(then.total_s),
            _times(each.total_s / then.total_s if then.total_s else None),
            format_bytes(each.inter_bytes),
            format_bytes(then.inter_bytes),
        )
    console.print(rows)
    _say(console, f"times and bytes: {_sum_words(found.before)}.")


def _sum_words(found: Simulation) -> str:
    """What the times and bytes of a strategy are sums over."""
    recipe = found.recipe
    iterations = counted(recipe.iter_num, "iteration")
    layers = counted(recipe.num_layers, "layer")
    if recipe.iter_num * recipe.num_layers == 1:
        return f"of {iterations} of {layers}"
    return f"sums over {iterations} of {layers} each"


def sweep(found: DispatchSweep, console: Console | None = None) -> None:
    """Print one row a point of the grid, the strategies beside each other."""
    console = plain_console(console)
    names = list(found.points[0].strategies)
    rows = table(*found.axes, *names, "best possible")
    for point in found.points:
        best = next(iter(point.strategies.values())).optimal_s
        rows.add_row(
            *(str(getattr(point.recipe, axis)) for axis in found.axes),
            *(
                f"{format_s(each.total_s)} ({_times(each.times_optimal)})"
                for each in point.strategies.values()
            ),
            format_s(best),
        )
    console.print(rows)
    bars = _bars(found, max(1, min(_BAR, console.width - _AT - 1)))
    console.print(Text(bars), soft_wrap=True)


def _bars(found: DispatchSweep, width: int) -> str:
    """Bars as long as the times, one for each point and strategy; the slowest has `width`."""
    slowest = max(each.total_s for point in found.points for each in point.strategies.values())
    lines = []
    for point in found.points:
        at = ", ".join(f"{axis} {getattr(point.recipe, axis)}" for axis in found.axes)
        for name, each in point.strategies.items():
            cells = each.total_s / slowest * width if slowest else 0.0
            lines.append(f"{at:<{_AT - 20}} {name:<18} {'█' * round(cells)}")
            at = ""
    return "\n".join(lines)


def _say(console: Console, text: str) -> None:
    say(console, escape(text), hanging=2)


def _title(found: Simulation) -> str:
    recipe, links = found.recipe, found.terms.links
    return (
        f"{counted(recipe.num_nodes, 'node')} of {counted(recipe.gpus_per_node, 'GPU')}, "
        f"{counted(recipe.experts, 'expert')}, top {recipe.topk}; "
        f"{counted(recipe.iter_num, 'iteration')} of {counted(recipe.num_layers, 'layer')} of "
        f"{counted(recipe.tokens, 'token')} of {format_bytes(found.terms.token_bytes)}\n"
        f"NIC {format_bandwidth(links.inter)} a GPU, in the node "
        f"{format_bandwidth(links.intra)} a GPU"
    )


def _results(each: StrategyResult, layers: int) -> str:
    """The four totals; those of the original's schedules to the letter as it prints them."""
    speed = each.algo_bytes_per_s
    if each.name in _TITLES:
        traffic = f"{each.inter_bytes / GIB:.4f} GB"
        rate = NA if speed is None else f"{speed / GIB:.4f} GB/s"
    else:
        traffic, rate = format_bytes(each.inter_bytes, _DIGITS), na(speed, _rate)
    numbers = {
        "Total Latency": f"{each.total_s:.6f} s",
        "Avg Layer Latency": f"{each.total_s / max(1, layers) * 1000:.4f} ms",
        "Total Inter-node Traffic": traffic,
        "Algorithmic Bandwidth": rate,
    }
    lines = [
        _RULE,
        f"{_TITLES.get(each.name, each.name)} Final Results",
        _RULE,
        *(f"{name:<{_LABEL}}: {number}" for name, number in numbers.items()),
        _RULE,
        *([_BINARY] if each.name in _TITLES else []),
        f"{_times(each.times_optimal)} the best possible, {_times(each.times_bound)} the bound "
        "of its class",
    ]
    if each.combine_s is not None:
        both = each.combine_s + each.total_s
        lines.append(f"combine {format_s(each.combine_s)}, both ways {format_s(both)}")
    return "\n".join(lines)


def _rate(bytes_per_s: float) -> str:
    return format_bandwidth(bytes_per_s, _DIGITS)


def _layers(each: StrategyResult, per_iteration: int) -> TerminalTable:
    phases = list(each.layers[0].phases) if each.layers else []
    rows = table(
        *("iteration, layer", "dispatch", *phases, "bound", "binds"),
        drop=phases[::-1],
        texts=("binds",),
    )
    for number, layer in enumerate(each.layers[:_MOST_LAYERS]):
        rows.add_row(
            f"{number // per_iteration}, {number % per_iteration}",
            format_s(layer.seconds),
            *(format_s(seconds) for seconds in layer.phases.values()),
            format_s(layer.bound_s),
            str(layer.bottleneck),
        )
    if len(each.layers) > _MOST_LAYERS:
        rows.add_row(f"and {len(each.layers) - _MOST_LAYERS} more")
    return rows


def _heat(loads: NDArray[np.int64], gpus: int, width: int) -> str:
    """A shade for each GPU, node after node: each kind of link by its own maximum."""
    lines = [f"{'load of each GPU':<17} (one shade each; the fullest is max)"]
    for name, column in zip(LOAD_NAMES, loads.T, strict=True):
        most = int(column.max(initial=0))
        shades = [
            _SHADES[0 if not value else 1 + int(value * (len(_SHADES) - 2) // most)]
            for value in column.tolist()
        ]
        nodes = ["".join(shades[at : at + gpus]) for at in range(0, len(shades), gpus)]
        room = width - len(f"{'':<17}  ...  max {most}")
        shown = max(1, min(_MOST_NODES, (room + 1) // (gpus + 1)))
        cut = " ..." if len(nodes) > shown else ""
        lines.append(f"{name:<17} {'|'.join(nodes[:shown])}{cut}  max {most}")
    return "\n".join(lines)


def _binds(each: StrategyResult) -> str:
    """The busiest link of the slowest layer."""
    slowest = max(each.layers, key=lambda layer: layer.seconds, default=None)
    return "nothing" if slowest is None else str(slowest.bottleneck)


def _times(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}x"


def write_dispatch(found: TableResult, folder: Path, *, xlsx: bool = False) -> list[Path]:
    """Write dispatch.json, dispatch.csv and dispatch.parquet; give their paths."""
    text = result.dumps(found.to_dict())
    tables = {"dispatch": found.to_arrow()}
    book = "dispatch" if xlsx else None
    return files.write_tables(folder, {"dispatch.json": text}, tables, book)
