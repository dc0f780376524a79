"""Simulate a grid of workloads under several schedules."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pyarrow as pa

from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.schedules import STRATEGIES, Strategy, Terms
from fastcomm.dispatch.simulation import NS, Simulation, in_ns, simulate
from fastcomm.dispatch.workload import Workload
from fastcomm.errors import ConfigError
from fastcomm.result import TableResult


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DispatchSweep(TableResult):
    """Simulations over a grid of workloads."""

    axes: tuple[str, ...]  # fields of the recipe
    points: tuple[Simulation, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per point and strategy, with the keys of JSON and the table."""
        return [
            {
                **{axis: getattr(point.recipe, axis) for axis in self.axes},
                "strategy": name,
                "latency_ns": strategy.total_s * NS,
                "combine_latency_ns": in_ns(strategy.combine_s),
                "lower_bound_ns": strategy.bound_s * NS,
                "optimal_ns": strategy.optimal_s * NS,
                "inter_node_bytes": strategy.inter_bytes,
                "algo_bw_bytes_per_s": strategy.algo_bytes_per_s,
            }
            for point in self.points
            for name, strategy in point.strategies.items()
        ]

    def to_arrow(self) -> pa.Table:
        """Return a row per point of the grid and strategy; times in ns."""
        return pa.Table.from_pylist(self.rows())

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {"axes": list(self.axes), "rows": self.rows()}

    def figures(self) -> dict[str, str]:
        """Return the axes of the grid, and the number of its points."""
        return {"axes": ", ".join(self.axes), "points": str(len(self.points))}


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Parse an axis of a grid, such as "zipf_alpha=1.1,2", into a field and its values.

    Raises
    ------
    ConfigError
        If the field is not of a recipe, or a value has the wrong type.

    """
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kinds = {field.name: type(getattr(Recipe(), field.name)) for field in fields(Recipe)}
    if name not in kinds or not values:
        raise ConfigError(
            f"invalid --over {text!r}: expected NAME=VALUE,... with one of {', '.join(kinds)}"
        )
    kind = kinds[name]
    try:
        return name, [kind(value.strip()) for value in values.split(",")]
    except ValueError as error:
        raise ConfigError(f"invalid --over {text!r}: {error}") from error


def simulate_grid(
    recipe: Recipe,
    grid: Mapping[str, Sequence[Any]],
    strategies: Sequence[str],
    terms: Callable[[Recipe], Terms],
    available: Mapping[str, Strategy] = STRATEGIES,
) -> DispatchSweep:
    """Simulate a workload for each combination of the values of a grid.

    Parameters
    ----------
    recipe
        Workload whose fields the grid replaces.
    grid
        Values by field of the recipe.
    strategies
        Names of schedules, keys of `available`.
    terms
        Returns the terms for a recipe.
    available
        Schedules by name.

    """
    points = []
    for values in itertools.product(*grid.values()):
        changed = replace(recipe, **dict(zip(grid, values, strict=True)))
        points.append(
            simulate(Workload.of(changed), strategies, terms(changed), available=available)
        )
    return DispatchSweep(axes=tuple(grid), points=tuple(points))
