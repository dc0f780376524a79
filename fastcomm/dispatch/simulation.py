"""Simulate a workload under several schedules, layer by layer.

Times are in seconds, in JSON and tables in nanoseconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import STRATEGIES, NoAnswerError, Strategy, Terms, Timing
from fastcomm.dispatch.traffic import Traffic, bounds
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError
from fastcomm.result import TableResult
from fastcomm.units import format_s
from fastcomm_kernels.arrays import Matrix

NS = 1e9  # nanoseconds per second
_STAGES = pa.schema(
    [
        ("strategy", pa.string()),
        ("iteration", pa.int64()),
        ("layer", pa.int64()),
        ("stage", pa.int64()),
        ("node", pa.int64()),
        ("destination", pa.int64()),
        ("bytes", pa.int64()),  # of the fullest GPU of the node
        ("start_ns", pa.float64()),  # of the stage, after the start of dispatch
        ("stop_ns", pa.float64()),
    ]
)
_LINK_LOADS = ("inter_tx", "inter_rx", "intra_tx", "intra_rx")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult(Timing):
    """Times and loads of one layer under one schedule, in bytes too, and their lower bounds."""

    inter_bytes: int  # bytes between nodes
    bound_s: float  # lower bound of the schedule's class
    optimal_s: float  # lower bound of all schedules

    def to_dict(self) -> dict[str, Any]:
        """Return the layer as a JSON object."""
        return {
            "latency_ns": self.seconds * NS,
            "phases_ns": {name: seconds * NS for name, seconds in self.phases.items()},
            "combine_latency_ns": in_ns(self.combine_s),
            "inter_node_bytes": self.inter_bytes,
            "lower_bound_ns": self.bound_s * NS,
            "optimal_ns": self.optimal_s * NS,
            "bottleneck": asdict(self.bottleneck),
            "gpu_load_tokens": _by_link(self.loads),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """Times and loads of all layers of a workload under one schedule."""

    name: str
    layers: tuple[LayerResult, ...]
    payload_bytes: int  # of all token-expert pairs
    gpus: int

    @property
    def total_s(self) -> float:
        """Seconds of dispatch of all layers, one after the other."""
        return _sum(layer.seconds for layer in self.layers)

    @property
    def loads(self) -> Matrix:
        """Tokens of all layers: GPU by inter_tx, inter_rx, intra_tx, intra_rx."""
        return np.asarray(np.sum([layer.loads for layer in self.layers], axis=0))

    @property
    def combine_s(self) -> float | None:
        """Seconds of combine of all layers; None if the schedule has no combine."""
        times = [layer.combine_s for layer in self.layers]
        return None if None in times else _sum(time for time in times if time is not None)

    @property
    def mean_layer_s(self) -> float:
        """Mean seconds of dispatch of a layer."""
        return self.total_s / len(self.layers) if self.layers else 0.0

    @property
    def inter_bytes(self) -> int:
        """Bytes between nodes, of all layers."""
        return sum(layer.inter_bytes for layer in self.layers)

    @property
    def bound_s(self) -> float:
        """Lower bound of dispatch for schedules of the same class, in seconds."""
        return _sum(layer.bound_s for layer in self.layers)

    @property
    def optimal_s(self) -> float:
        """Lower bound of dispatch for all schedules, in seconds."""
        return _sum(layer.optimal_s for layer in self.layers)

    @property
    def algo_bytes_per_s(self) -> float | None:
        """Algorithm bandwidth of a GPU in bytes/s; None if dispatch takes no time."""
        total = self.total_s
        return self.payload_bytes / (total * self.gpus) if total else None

    @property
    def times_optimal(self) -> float | None:
        """Dispatch time over `optimal_s`; None if that is 0."""
        return self.total_s / self.optimal_s if self.optimal_s else None

    @property
    def times_bound(self) -> float | None:
        """Dispatch time over `bound_s`; None if that is 0."""
        return self.total_s / self.bound_s if self.bound_s else None

    def to_dict(self) -> dict[str, Any]:
        """Return the strategy as a JSON object."""
        return {
            "total_latency_ns": self.total_s * NS,
            "avg_layer_latency_ns": self.mean_layer_s * NS,
            "combine_latency_ns": in_ns(self.combine_s),
            "inter_node_bytes": self.inter_bytes,
            "algo_bw_bytes_per_s": self.algo_bytes_per_s,
            "lower_bound_ns": self.bound_s * NS,
            "optimal_ns": self.optimal_s * NS,
            "times_lower_bound": self.times_bound,
            "times_optimal": self.times_optimal,
            "gpu_load_tokens": _by_link(self.loads),
            "layers": [layer.to_dict() for layer in self.layers],
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Simulation(TableResult):
    """Results of several schedules for one workload, and the load of its experts."""

    recipe: Recipe
    terms: Terms
    strategies: dict[str, StrategyResult]
    expert_load: Matrix  # layer by expert: token copies of all iterations
    unanswered: dict[str, str]  # strategies without a result, and the reason

    def to_arrow(self) -> pa.Table:
        """Return a row per strategy, iteration and layer; times in ns, sizes in bytes."""
        rows = [
            {
                "strategy": name,
                "iteration": number // self.recipe.num_layers,
                "layer": number % self.recipe.num_layers,
                "latency_ns": layer.seconds * NS,
                "combine_latency_ns": in_ns(layer.combine_s),
                "inter_node_bytes": layer.inter_bytes,
                "lower_bound_ns": layer.bound_s * NS,
                "optimal_ns": layer.optimal_s * NS,
                "bottleneck": str(layer.bottleneck),
            }
            for name, strategy in self.strategies.items()
            for number, layer in enumerate(strategy.layers)
        ]
        return pa.Table.from_pylist(rows)

    def stages(self) -> pa.Table:
        """Return what nodes send in the stages of `fast` and `fast-published`.

        A row per strategy, iteration, layer, stage and sending node: its destination, the bytes
        of its fullest GPU, and start and end of the stage in ns after the start of dispatch.
        """
        size, count = self.terms.token_bytes, self.recipe.num_layers
        tables = [_STAGES.empty_table()]
        for name, strategy in self.strategies.items():
            for number, layer in enumerate(strategy.layers):
                if (sends := layer.sends) is None:
                    continue
                columns = (
                    *([value] * len(sends.stage) for value in (name, *divmod(number, count))),
                    *(sends.stage, sends.node, sends.destination, sends.tokens * size),
                    *(sends.start_s * NS, sends.stop_s * NS),
                )
                arrays = map(pa.array, columns, _STAGES.types)
                tables.append(pa.Table.from_arrays(list(arrays), schema=_STAGES))
        return pa.concat_tables(tables)

    def figures(self) -> dict[str, str]:
        """Return the size of the cluster, and the time of each strategy, fastest first."""
        recipe = self.recipe
        gpus = {"GPUs": f"{recipe.num_nodes} x {recipe.gpus_per_node}"}
        ranked = sorted(self.strategies.values(), key=lambda strategy: strategy.total_s)
        return gpus | {strategy.name: format_s(strategy.total_s) for strategy in ranked}

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        links = self.terms.links
        return {
            "workload": self.recipe.to_dict(),
            "terms": {
                "token_bytes": self.terms.token_bytes,
                "combine_bytes": self.terms.combine_bytes,
                "demand": self.terms.demand,
                "decomposition": self.terms.decomposition,
                "inter_bytes_per_s": links.inter_bytes_per_s,
                "intra_bytes_per_s": links.intra_bytes_per_s,
                "inter_efficiency": links.inter_efficiency,
                "intra_efficiency": links.intra_efficiency,
                "inter_start_ns": links.inter_start_s * NS,
                "intra_start_ns": links.intra_start_s * NS,
                "incast": links.incast,
            },
            "strategies": {
                name: strategy.to_dict() for name, strategy in self.strategies.items()
            },
            "unanswered": self.unanswered,
        }


def simulate(
    workload: Workload,
    strategies: Sequence[str] = tuple(STRATEGIES),
    terms: Terms | None = None,
    *,
    available: Mapping[str, Strategy] = STRATEGIES,
    lenient: bool = False,
) -> Simulation:
    """Simulate a workload under several schedules.

    Parameters
    ----------
    workload
        Tokens and experts of every layer.
    strategies
        Names of schedules, keys of `available`.
    terms
        Links, sizes and rules; by default those of the recipe.
    available
        Schedules by name.
    lenient
        Whether a schedule without an answer for a layer is left out, with its reason in
        `Simulation.unanswered`.

    Raises
    ------
    ConfigError
        If a strategy is unknown.
    NoAnswerError
        If a schedule has no answer for a layer, unless `lenient`.

    """
    _check_names(strategies, available)
    recipe = workload.recipe
    terms = terms or terms_of(recipe)
    tally = _Tally(recipe, terms, {name: available[name] for name in strategies})
    for number, layer in enumerate(workload.layers()):
        traffic = Traffic.of(layer)
        tally.add_experts(number, traffic.expert_load)
        for name in tuple(tally.layers):
            try:
                tally.add(name, traffic)
            except NoAnswerError as error:
                if not lenient:
                    raise
                tally.drop(name, str(error))
    return tally.result()


class _Tally:
    """Accumulates the results of the layers."""

    def __init__(
        self, recipe: Recipe, terms: Terms, strategies: Mapping[str, Strategy]
    ) -> None:
        """Start without layers; `strategies` is by name."""
        self.recipe, self.terms, self.strategies = recipe, terms, strategies
        self.layers: dict[str, list[LayerResult]] = {name: [] for name in strategies}
        self.experts: list[Matrix] = []
        self.unanswered: dict[str, str] = {}

    def add_experts(self, number: int, load: Matrix) -> None:
        """Add the load of the experts of a layer, numbered over all iterations."""
        if number < self.recipe.num_layers:
            self.experts.append(load)
        else:
            self.experts[number % self.recipe.num_layers] += load

    def add(self, name: str, traffic: Traffic) -> None:
        """Simulate the next layer under a strategy."""
        strategy, terms = self.strategies[name], self.terms
        timing = strategy.run(traffic, terms)
        demand = "copies" if strategy.copies_only else terms.demand
        limits = bounds(traffic, terms.links, terms.token_bytes, demand)
        result = LayerResult(
            **{field.name: getattr(timing, field.name) for field in fields(timing)},
            inter_bytes=timing.inter_tokens * terms.token_bytes,
            bound_s=limits.of(strategy.bound),
            optimal_s=limits.optimal_s,
        )
        self.layers[name].append(result)

    def drop(self, name: str, reason: str) -> None:
        """Leave a strategy out of the result."""
        del self.layers[name]
        self.unanswered[name] = reason

    def result(self) -> Simulation:
        """Return the simulation of all layers added."""
        recipe = self.recipe
        copies = recipe.tokens * recipe.num_layers * recipe.iter_num * recipe.topk
        sizes = {"payload_bytes": copies * self.terms.token_bytes, "gpus": recipe.gpus}
        results = {
            name: StrategyResult(name=name, layers=tuple(layers), **sizes)
            for name, layers in self.layers.items()
        }
        return Simulation(
            recipe=recipe,
            terms=self.terms,
            strategies=results,
            expert_load=np.array(self.experts),
            unanswered=self.unanswered,
        )


def terms_of(recipe: Recipe, **values: Any) -> Terms:
    """Return the default terms of a workload, with `values` replacing fields."""
    size = recipe.token_bytes
    return replace(Terms(token_bytes=size, combine_bytes=size), **values)


def _check_names(
    strategies: Sequence[str], available: Mapping[str, Strategy] = STRATEGIES
) -> None:
    """Raise `ConfigError` unless there are names, all of them keys of `available`."""
    valid = ", ".join(available)
    if not strategies:
        raise ConfigError(f"missing strategy: expected one or more of {valid}")
    if unknown := [name for name in strategies if name not in available]:
        raise ConfigError(f"unknown strategy {', '.join(map(str, unknown))}: expected {valid}")


def in_ns(seconds: float | None) -> float | None:
    """Convert seconds to nanoseconds; None stays None."""
    return None if seconds is None else seconds * NS


def _by_link(loads: Matrix) -> dict[str, list[int]]:
    return {name: loads[:, column].tolist() for column, name in enumerate(_LINK_LOADS)}


def _sum(times: Iterable[float]) -> float:
    """Return the sum of times, added from left to right."""
    # sum() compensates rounding from Python 3.12 on; this gives equal bits in all versions.
    total = 0.0
    for time in times:
        total += time
    return total
