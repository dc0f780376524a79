"""A workload under several schedules: layer by layer, and in all.

Times of layers are added one by one from the left, as the original adds them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastcomm.dispatch.bounds import Bounds, bounds
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import STRATEGIES, Bottleneck, Terms, Timing
from fastcomm.dispatch.traffic import Layer, Matrix, Traffic
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError

_LINK_LOADS = ("inter_tx", "inter_rx", "intra_tx", "intra_rx")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """One layer under one schedule; loads are kept for the whole run, not here."""

    seconds: float
    phases: dict[str, float]
    inter_bytes: int
    bottleneck: Bottleneck
    bound_s: float  # of the schedule's class
    optimal_s: float  # of all classes
    combine_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        bottleneck = self.bottleneck
        return {
            "latency_s": self.seconds,
            "phases": self.phases,
            "combine_latency_s": self.combine_s,
            "inter_node_bytes": self.inter_bytes,
            "lower_bound_s": self.bound_s,
            "optimal_s": self.optimal_s,
            "bottleneck": {
                "gpu": bottleneck.gpu,
                "link": bottleneck.link,
                "direction": bottleneck.direction,
                "tokens": bottleneck.tokens,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """A workload under one schedule."""

    name: str
    layers: tuple[LayerResult, ...]
    loads: Matrix  # GPU by inter_tx, inter_rx, intra_tx, intra_rx: tokens of all layers
    payload_bytes: int
    gpus: int
    compat: bool

    @property
    def total_s(self) -> float:
        """All layers, one after the other."""
        return _added(layer.seconds for layer in self.layers)

    @property
    def combine_s(self) -> float | None:
        """The way back of all layers; None where the original has none."""
        times = [layer.combine_s for layer in self.layers]
        return None if None in times else _added(time for time in times if time is not None)

    @property
    def mean_layer_s(self) -> float:
        """Total by layers."""
        return self.total_s / len(self.layers) if self.layers else 0.0

    @property
    def inter_bytes(self) -> int:
        """Bytes between nodes."""
        return sum(layer.inter_bytes for layer in self.layers)

    @property
    def bound_s(self) -> float:
        """What no schedule of its class beats."""
        return _added(layer.bound_s for layer in self.layers)

    @property
    def optimal_s(self) -> float:
        """What no schedule beats."""
        return _added(layer.optimal_s for layer in self.layers)

    @property
    def algo_bytes_per_s(self) -> float | None:
        """Bytes of all token-expert pairs by time and GPU; None where no time passes."""
        total = self.total_s
        return self.payload_bytes / (total * self.gpus) if total else None

    @property
    def times_optimal(self) -> float | None:
        """Total as a multiple of what no schedule beats; None where that is nothing."""
        return self.total_s / self.optimal_s if self.optimal_s else None

    @property
    def times_bound(self) -> float | None:
        """Total as a multiple of the bound of its class; None where that is nothing."""
        return self.total_s / self.bound_s if self.bound_s else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "total_latency_s": self.total_s,
            "avg_layer_latency_s": self.mean_layer_s,
            "combine_latency_s": self.combine_s,
            "inter_node_bytes": self.inter_bytes,
            "algo_bw_bytes_per_s": self.algo_bytes_per_s,
            "lower_bound_s": self.bound_s,
            "optimal_s": self.optimal_s,
            "times_lower_bound": self.times_bound,
            "times_optimal": self.times_optimal,
            "gpu_load_tokens": {
                name: self.loads[:, at].tolist() for at, name in enumerate(_LINK_LOADS)
            },
            "layers": [layer.to_dict() for layer in self.layers],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A workload under several schedules, and the load of its experts."""

    recipe: Recipe
    terms: Terms
    strategies: dict[str, StrategyResult]
    expert_load: Matrix

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        cluster = self.terms.cluster
        return {
            "workload": self.recipe.to_dict(),
            "terms": {
                "token_bytes": self.terms.token_bytes,
                "combine_bytes": self.terms.combine_bytes,
                "demand": self.terms.demand,
                "decomposition": self.terms.decomposition,
                "inter_bytes_per_s": cluster.inter_bytes_per_s,
                "intra_bytes_per_s": cluster.intra_bytes_per_s,
                "inter_efficiency": cluster.inter_efficiency,
                "intra_efficiency": cluster.intra_efficiency,
                "inter_start_s": cluster.inter_start_s,
                "intra_start_s": cluster.intra_start_s,
                "incast": cluster.incast,
            },
            "strategies": {name: each.to_dict() for name, each in self.strategies.items()},
        }


def simulate(
    workload: Workload,
    strategies: Sequence[str] = tuple(STRATEGIES),
    terms: Terms | None = None,
    layers: Iterable[Layer] | None = None,
) -> Simulation:
    """Run a workload under the schedules of these names.

    `layers` are given where the experts have been placed anew.
    """
    check_names(strategies)
    recipe = workload.recipe
    terms = terms or terms_of(recipe)
    found: dict[str, list[LayerResult]] = {name: [] for name in strategies}
    loads = {name: np.zeros((recipe.gpus, 4), np.int64) for name in strategies}
    experts = np.zeros(0, np.int64)
    for layer in workload.layers() if layers is None else layers:
        traffic = Traffic.of(layer)
        limits = bounds(traffic, terms.cluster, terms.token_bytes, terms.demand)
        all_copies = bounds(traffic, terms.cluster, terms.token_bytes)
        experts = traffic.expert_load + (experts if len(experts) else 0)
        for name in strategies:
            strategy = STRATEGIES[name]
            timing = strategy.run(traffic, terms)
            limit = all_copies if strategy.compat or strategy.copies_only else limits
            found[name].append(_layer(timing, limit, strategy.bound, terms.token_bytes))
            loads[name] += timing.loads
    payload = recipe.tokens * recipe.num_layers * recipe.iter_num * recipe.topk
    results = {
        name: StrategyResult(
            name=name,
            layers=tuple(found[name]),
            loads=loads[name],
            payload_bytes=payload * terms.token_bytes,
            gpus=recipe.gpus,
            compat=STRATEGIES[name].compat,
        )
        for name in strategies
    }
    return Simulation(recipe=recipe, terms=terms, strategies=results, expert_load=experts)


def terms_of(recipe: Recipe, **words: Any) -> Terms:
    """Terms with the bytes of the workload, and `words` over them."""
    size = recipe.token_bytes
    return replace(Terms(token_bytes=size, combine_bytes=size), **words)


def check_names(strategies: Sequence[str]) -> None:
    """Every name is a strategy's, and there is one."""
    if unknown := [name for name in strategies if name not in STRATEGIES] or (
        [] if strategies else ["none"]
    ):
        raise ConfigError(
            f"strategy: found {', '.join(unknown)}, wanted of {', '.join(STRATEGIES)}"
        )


def _layer(timing: Timing, limits: Bounds, kind: str, size: int) -> LayerResult:
    return LayerResult(
        seconds=timing.seconds,
        phases=timing.phases,
        inter_bytes=timing.inter_tokens * size,
        bottleneck=timing.bottleneck,
        bound_s=limits.of(kind),
        optimal_s=limits.optimal_s,
        combine_s=timing.combine_s,
    )


def _added(times: Iterable[float]) -> float:
    # Not sum(): from Python 3.12 on it compensates, and the original does not.
    total = 0.0
    for time in times:
        total += time
    return total
