"""A workload before and after its experts are placed anew."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.dispatch.placement import Loads, Placement, place, placed_layers
from fastcomm.dispatch.schedules import STRATEGIES, Terms
from fastcomm.dispatch.simulation import Simulation, simulate
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Both simulations, and the placement of each layer."""

    before: Simulation
    after: Simulation
    placements: tuple[Placement, ...]
    rule: str

    @property
    def imbalance(self) -> tuple[float, float]:
        """The most loaded GPU by the mean, in token copies: before and after."""
        before = _per_gpu(self.before)
        after = np.bincount(
            self.placements[0].home,
            weights=self.after.expert_load.sum(axis=0),
            minlength=self.placements[0].gpus,
        )
        return _most_by_mean(before), _most_by_mean(np.asarray(after, np.float64))

    def rows(self) -> list[dict[str, Any]]:
        """One row a strategy."""
        return [
            {
                "strategy": name,
                "before_s": each.total_s,
                "after_s": self.after.strategies[name].total_s,
                "before_inter_node_bytes": each.inter_bytes,
                "after_inter_node_bytes": self.after.strategies[name].inter_bytes,
            }
            for name, each in self.before.strategies.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        before, after = self.imbalance
        return {
            "rule": self.rule,
            "imbalance": {"before": before, "after": after},
            "layers": [placement.to_dict() for placement in self.placements],
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }


def placing(
    workload: Workload,
    strategies: Sequence[str],
    terms: Terms,
    *,
    rule: str,
    replicas: int,
    groups: int = 1,
    loads: NDArray[np.float64] | None = None,
) -> Placing:
    """Place the experts of each layer by their load, the workload's own or `loads`."""
    if compat := [
        name for name in strategies if name in STRATEGIES and STRATEGIES[name].compat
    ]:
        raise ConfigError(f"strategy: {', '.join(compat)}: the original places no experts")
    recipe = workload.recipe
    before = simulate(workload, strategies, terms)
    if loads is None:
        loads = before.expert_load.astype(np.float64)
    if loads.shape[1] != recipe.experts or (loads < 0).any():
        raise ConfigError(
            f"load: found {loads.shape[1]} numbers a layer, wanted one from 0 for each of "
            f"{recipe.experts} experts"
        )
    placements = tuple(
        place(each, replicas, groups, recipe.num_nodes, recipe.gpus) for each in loads
    )
    layers = placed_layers(workload, placements, rule)
    return Placing(
        before=before,
        after=simulate(workload, strategies, terms, layers=layers),
        placements=placements,
        rule=rule,
    )


def _per_gpu(found: Simulation) -> Loads:
    each = found.recipe.experts_per_gpu
    return np.asarray(found.expert_load.sum(axis=0).reshape(-1, each).sum(axis=1), np.float64)


def _most_by_mean(load: Loads) -> float:
    return float(load.max() / load.mean()) if load.sum() else 1.0
