"""Strategies over a grid of workloads."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import Terms
from fastcomm.dispatch.simulation import Simulation, simulate
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One simulation for each point of a grid."""

    axes: tuple[str, ...]
    points: tuple[Simulation, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row a point and strategy."""
        return [
            {
                **{axis: getattr(point.recipe, axis) for axis in self.axes},
                "strategy": name,
                "latency_s": each.total_s,
                "combine_latency_s": each.combine_s,
                "lower_bound_s": each.bound_s,
                "optimal_s": each.optimal_s,
                "inter_node_bytes": each.inter_bytes,
                "algo_bw_bytes_per_s": each.algo_bytes_per_s,
            }
            for point in self.points
            for name, each in point.strategies.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"axes": list(self.axes), "rows": self.rows()}


def axis(text: str) -> tuple[str, list[Any]]:
    """The name and the values of "zipf_alpha=1.1,2"."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kinds = {field.name: type(getattr(Recipe(), field.name)) for field in fields(Recipe)}
    if name not in kinds or not values:
        raise ConfigError(f"--over: found {text!r}, wanted one of {', '.join(kinds)} = values")
    kind = kinds[name]
    try:
        return name, [kind(value.strip()) for value in values.split(",")]
    except ValueError as error:
        raise ConfigError(f"--over: {text!r}: {error}") from error


def sweep(
    recipe: Recipe,
    grid: Mapping[str, Sequence[Any]],
    strategies: Sequence[str],
    terms: Callable[[Recipe], Terms],
) -> Sweep:
    """Simulate a workload of each combination of the values of a grid."""
    points = []
    for values in itertools.product(*grid.values()):
        changed = recipe.changed(**dict(zip(grid, values, strict=True)))
        points.append(simulate(Workload.of(changed), strategies, terms(changed)))
    return Sweep(axes=tuple(grid), points=tuple(points))
