"""What a placement of experts gains: schedules before and after it, and the moves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.dispatch.drift import DriftStep, MoveCosts, drift, placed_by
from fastcomm.dispatch.moves import moves_to, placed_anew
from fastcomm.dispatch.options import PlaceOptions
from fastcomm.dispatch.placement import Loads, Placement, heaviest
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import Terms
from fastcomm.dispatch.simulation import NS, Simulation, simulate
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError
from fastcomm.result import TableResult


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlacementResult(TableResult):
    """Simulations before and after a placement of the experts of each layer."""

    before: Simulation
    after: Simulation
    today: tuple[Placement, ...]  # of each layer, before
    placements: tuple[Placement, ...]
    rule: str
    moves: tuple[int, ...]  # of each layer: experts that GPUs get and did not have
    most_moves: int  # to one GPU, of all layers
    expert_bytes: int | None
    loads: Loads | None = None  # measured, layer by expert; None: those of the workload
    steps: int = 1  # of the measured loads
    drift: tuple[DriftStep, ...] = ()  # where loads of several steps were measured

    @property
    def move_s(self) -> float | None:
        """Seconds to move experts to the GPU that gets the most; None without their size."""
        if self.expert_bytes is None:
            return None
        return self.most_moves * self.expert_bytes / _link(self.before)

    @property
    def imbalance(self) -> tuple[float, float]:
        """Load of the most loaded GPU over the mean, before and after.

        It is that of the measured loads, by layer, or of the token copies of the workload.
        """
        if self.loads is not None:
            return _planned(self.loads, self.today), _planned(self.loads, self.placements)
        before, after = (
            _per_gpu(simulation, placements[0])
            for simulation, placements in (
                (self.before, self.today),
                (self.after, self.placements),
            )
        )
        return _most_over_mean(before), _most_over_mean(after)

    def to_arrow(self) -> pa.Table:
        """Return a row per strategy, before and after; times in ns, sizes in bytes."""
        rows = [
            {
                "strategy": name,
                "before_ns": strategy.total_s * NS,
                "after_ns": self.after.strategies[name].total_s * NS,
                "before_inter_node_bytes": strategy.inter_bytes,
                "after_inter_node_bytes": self.after.strategies[name].inter_bytes,
            }
            for name, strategy in self.before.strategies.items()
        ]
        return pa.Table.from_pylist(rows)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        before, after = self.imbalance
        return {
            "rule": self.rule,
            "imbalance": {
                "before": before,
                "after": after,
                "of": "workload" if self.loads is None else "load",
            },
            "moves": {
                "by_layer": list(self.moves),
                "most_to_a_gpu": self.most_moves,
                "bytes": None
                if self.expert_bytes is None
                else sum(self.moves) * self.expert_bytes,
                "latency_ns": None if self.move_s is None else self.move_s * NS,
            },
            "drift": [step.to_dict() for step in self.drift],
            "layers": [placement.to_dict() for placement in self.placements],
            "before": self.before.contents(),
            "after": self.after.contents(),
        }

    def figures(self) -> dict[str, str]:
        """Return the rule, and the imbalance of the GPUs before and after."""
        before, after = self.imbalance
        return {"rule": self.rule, "imbalance": f"{before:.2f} before, {after:.2f} after"}


def place_experts(
    workload: Workload,
    strategies: Sequence[str],
    terms: Terms,
    options: PlaceOptions,
    *,
    loads: NDArray[np.float64] | None = None,
    placed: Sequence[Placement] | None = None,
) -> PlacementResult:
    """Place the experts of each layer, and simulate the workload before and after.

    Parameters
    ----------
    workload
        Tokens and experts of every layer.
    strategies
        Names of schedules, keys of `STRATEGIES`.
    terms
        Links, sizes and rules.
    options
        Replicas, groups, rule, and the bound of moves.
    loads
        (steps, layers, experts): loads to place by, the sum over steps; by default those of the
        workload.
    placed
        The placement of each layer of today; by default the workload's, without replicas.

    Raises
    ------
    ConfigError
        If an argument does not suit the workload.

    """
    recipe, rule = workload.recipe, options.rule
    copies = round(options.replicas * recipe.experts), options.groups
    cluster = recipe.num_nodes, recipe.gpus
    if placed is None:
        start, today = workload, [_own(recipe)] * recipe.num_layers
    else:
        start, today = workload.placed(placed, rule), list(placed)
    before = simulate(start, strategies, terms)
    measured = None if loads is None else loads.sum(axis=0)
    loads = _loads(before, workload, placed) if loads is None else loads
    if loads.shape[2] != recipe.experts or (loads < 0).any():
        raise ConfigError(
            f"invalid load: {loads.shape[2]} numbers per layer; expected one from 0 for each "
            f"of {recipe.experts} experts"
        )
    placements = tuple(
        placed_anew(load, old, *copies, cluster, options.max_moves)
        for load, old in zip(loads.sum(axis=0), today, strict=True)
    )
    counts = np.array([moves_to(old, new) for old, new in zip(today, placements, strict=True)])
    after = simulate(workload.placed(placements, rule), strategies, terms)
    steps: tuple[DriftStep, ...] = ()
    if len(loads) > 1:
        stays = before
        if placed is None:
            first = placed_by(loads[0], *copies, cluster)
            stays = simulate(workload.placed(first, rule), strategies, terms)
        steps = drift(loads, placed, *copies, cluster, _costs(stays, options))
    return PlacementResult(
        before=before,
        after=after,
        placements=placements,
        rule=rule,
        moves=tuple(counts.sum(axis=1).tolist()),
        most_moves=int(counts.sum(axis=0).max()),
        today=tuple(today),
        expert_bytes=options.expert_bytes,
        loads=measured,
        steps=len(loads),
        drift=steps,
    )


def _own(recipe: Recipe) -> Placement:
    """Return the placement of a workload, in which expert e is on GPU e // experts_per_gpu."""
    logical = np.arange(recipe.experts)
    return Placement(logical=logical, experts=recipe.experts, gpus=recipe.gpus)


def _loads(
    before: Simulation, workload: Workload, placed: Sequence[Placement] | None
) -> NDArray[np.float64]:
    """Return the loads of a workload as one step; `before` has them if nothing is placed."""
    if placed is None:
        return before.expert_load.astype(np.float64)[None]
    recipe = workload.recipe
    loads = np.zeros((1, recipe.num_layers, recipe.experts))
    for number, layer in enumerate(workload.layers()):
        counts = np.bincount(layer.expert.ravel(), minlength=recipe.experts)
        loads[0, number % recipe.num_layers] += counts
    return loads


def _costs(simulation: Simulation, options: PlaceOptions) -> MoveCosts:
    """Return what moves cost, and the exchange of the fastest schedule, by layer."""
    recipe = simulation.recipe
    fastest = min(
        simulation.strategies.values(), key=lambda one: one.total_s + (one.combine_s or 0.0)
    )
    times = [layer.seconds + (layer.combine_s or 0.0) for layer in fastest.layers]
    return MoveCosts(
        expert_bytes=options.expert_bytes,
        bytes_per_s=_link(simulation),
        layer_s=np.reshape(times, (-1, recipe.num_layers)).mean(axis=0),
        most_moves=options.max_moves,
    )


def _link(simulation: Simulation) -> float:
    """Return the bytes/s of the link over which experts move, the slowest there is."""
    links = simulation.terms.links
    return links.inter if simulation.recipe.num_nodes > 1 else links.intra


def _planned(loads: Loads, placements: Sequence[Placement]) -> float:
    """Return the load of the heaviest GPU over the mean, of all layers together."""
    most = sum(
        heaviest(load, one.logical, one.gpus)
        for load, one in zip(loads, placements, strict=True)
    )
    return most * placements[0].gpus / float(loads.sum())


def _per_gpu(simulation: Simulation, placement: Placement) -> Loads:
    """Return the token copies of each GPU; `placement` is of any layer: homes are alike."""
    copies = simulation.expert_load.sum(axis=0)
    counts = np.bincount(placement.home, weights=copies, minlength=placement.gpus)
    return np.asarray(counts, np.float64)


def _most_over_mean(load: Loads) -> float:
    return float(load.max() / load.mean()) if load.sum() else 1.0
