"""Heat maps of rank and step, and the cells that stand out in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.trace.columns import filled
from fastcomm.trace.schema import TAGS
from fastcomm_kernels.arrays import NULL, Floats, Ints

Rows = tuple[tuple[int | None, ...], ...]

EXPOSED = (*(f"exact_exposed_{tag}_ns" for tag in TAGS), "exact_exposed_mixed_ns")
# What is asked of each (rank, iteration): sums of columns of the iterations.
MEASURES = {
    "time_ns": ("time_ns",),
    "compute_ns": ("exact_compute_ns",),
    "exposed_ns": EXPOSED,
    "idle_ns": ("exact_idle_ns",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """Times of each (rank, iteration) in ns, null where nothing tells; rows as `ranks`."""

    ranks: tuple[int, ...]
    iterations: tuple[int, ...]  # numbers
    time_ns: Rows
    compute_ns: Rows  # in which compute kernels run
    exposed_ns: Rows  # in which communication runs and no compute kernel does
    idle_ns: Rows  # in which nothing runs on the device

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class HeatArrays:
    """The same as arrays, NULL for null: what other questions work on."""

    ranks: Ints
    iterations: Ints
    values: dict[str, Ints]  # by measure: a row a rank, a column an iteration

    @classmethod
    def of(cls, table: pa.Table) -> "HeatArrays":
        """Lay the table of iterations out; rows without a number are left out."""
        table = table.filter(table["iteration"].is_valid())
        ranks, row = np.unique(table["rank"].to_numpy(), return_inverse=True)
        numbers, column = np.unique(table["iteration"].to_numpy(), return_inverse=True)
        values = {}
        for name, parts in MEASURES.items():
            grid = np.full((len(ranks), len(numbers)), NULL, np.int64)
            grid[row, column] = _sum(table, parts)
            values[name] = grid
        return cls(ranks, numbers, values)

    def heat(self) -> Heat:
        """The typed result."""
        return Heat(
            ranks=tuple(self.ranks.tolist()),
            iterations=tuple(self.iterations.tolist()),
            **{name: _rows(values) for name, values in self.values.items()},
        )

    def mean_by_rank(self, name: str) -> NDArray[np.float64]:
        """The mean of each rank's known iterations; NaN where none is known."""
        return _known_mean(self.values[name], axis=1)

    def middle(self, name: str, rows: Ints) -> NDArray[np.float64]:
        """Return the median of some ranks in each iteration; NaN where none is known."""
        columns = (column[column != NULL] for column in self.values[name][rows].T)
        return np.array([np.median(each) if len(each) else np.nan for each in columns])

    def median_by_iteration(self, name: str) -> NDArray[np.float64]:
        """Return the median of all ranks in each iteration; NaN where none is known."""
        return self.middle(name, np.arange(len(self.ranks)))

    @property
    def step_ns(self) -> float | None:
        """The mean iteration time, over all (rank, iteration)."""
        known = self.values["time_ns"][self.values["time_ns"] != NULL]
        return int(known.sum()) / len(known) if len(known) else None


def table(grid: HeatArrays) -> pa.Table:
    """A row a (rank, iteration) that has a time."""
    shape = (len(grid.ranks), len(grid.iterations))
    there = (grid.values["time_ns"] != NULL).reshape(-1)
    columns = {
        "rank": np.repeat(grid.ranks, shape[1])[there],
        "iteration": np.tile(grid.iterations, shape[0])[there],
    }
    for name, values in grid.values.items():
        chosen = values.reshape(-1)[there]
        columns[name] = pa.array(chosen, mask=chosen == NULL)
    return pa.table(columns)


def _sum(table: pa.Table, parts: tuple[str, ...]) -> Ints:
    """Row by row, NULL where one part is null."""
    columns = [filled(table[part]) for part in parts]
    unknown = np.any([column == NULL for column in columns], axis=0)
    known = [np.where(unknown, 0, column) for column in columns]
    return np.where(unknown, NULL, np.sum(known, axis=0))


def _rows(values: Ints) -> Rows:
    return tuple(
        tuple(None if value == NULL else value for value in row) for row in values.tolist()
    )


def _known_mean(values: Ints, axis: int) -> NDArray[np.float64]:
    known = values != NULL
    how_many = known.sum(axis=axis)
    total = np.where(known, values, 0).sum(axis=axis)
    return np.where(how_many > 0, total / np.maximum(how_many, 1), np.nan)


SCORE = 5.0
LEAST_SHARE = 0.01
LEAST_LONGER = 0.05
NORMAL = 1.4826  # standard deviations of a normal distribution in its median deviation
# Candidates beyond so many are not looked at: where everything stands apart, nothing does.
_MOST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A rank (its mean over iterations) or an iteration (its median over ranks), in ns."""

    of: Literal["rank", "iteration"]
    number: int  # of the rank or the iteration
    measure: str  # as `Heat` calls it
    value_ns: float
    median_ns: float  # of its peers
    above_ns: float
    score: float | None  # deviations above; null where the peers do not deviate
    peers: int


def above_peers(values: Floats, least: float) -> list[tuple[int, float, float]]:
    """(index, median of the others, their deviation) of what stands apart, highest first.

    `least` is the smallest difference that counts. NaN is nobody's peer.
    """
    known = np.flatnonzero(~np.isnan(values))
    if len(known) < 2:  # noqa: PLR2004 - nobody to compare with
        return []
    near = float(np.median(values[known])) if len(known) > 2 else float(values[known].min())  # noqa: PLR2004
    candidates = known[values[known] > near + least / 2]
    candidates = candidates[np.argsort(-values[candidates], kind="stable")][:_MOST]
    found = []
    for index in candidates.tolist():
        others = values[known[known != index]]
        middle = float(np.median(others))
        deviation = NORMAL * float(np.median(np.abs(others - middle)))
        if values[index] - middle > max(SCORE * deviation, least):
            found.append((index, middle, deviation))
    return found


def outliers(grid: HeatArrays, stage: Mapping[int, int]) -> tuple[Outlier, ...]:
    """All that stand apart: ranks first, then iterations; by measure and number."""
    step = grid.step_ns
    if step is None:
        return ()
    found = [
        each
        for name in MEASURES
        for each in (*_ranks(grid, name, stage, step), *_iterations(grid, name, step))
    ]
    order = {name: place for place, name in enumerate(MEASURES)}
    return tuple(
        sorted(found, key=lambda each: (each.of != "rank", order[each.measure], each.number))
    )


def peers_of(grid: HeatArrays, stage: Mapping[int, int]) -> list[NDArray[np.int64]]:
    """The rows of the ranks of each stage."""
    stages = np.array([stage.get(rank, 0) for rank in grid.ranks.tolist()], np.int64)
    return [np.flatnonzero(stages == each) for each in np.unique(stages)]


def _ranks(grid: HeatArrays, name: str, stage: Mapping[int, int], step: float) -> list[Outlier]:
    means = grid.mean_by_rank(name)
    return [
        _outlier("rank", int(grid.ranks[rows[index]]), name, means[rows], index, about)
        for rows in peers_of(grid, stage)
        for index, *about in above_peers(means[rows], LEAST_SHARE * step)
    ]


def _iterations(grid: HeatArrays, name: str, step: float) -> list[Outlier]:
    medians = grid.median_by_iteration(name)
    return [
        _outlier("iteration", int(grid.iterations[index]), name, medians, index, about)
        for index, *about in above_peers(medians, LEAST_LONGER * step)
    ]


def _outlier(
    of: Literal["rank", "iteration"],
    number: int,
    measure: str,
    values: Floats,
    index: int,
    about: list[float],
) -> Outlier:
    middle, deviation = about
    above = float(values[index]) - middle
    return Outlier(
        of=of,
        number=number,
        measure=measure,
        value_ns=float(values[index]),
        median_ns=middle,
        above_ns=above,
        score=above / deviation if deviation else None,
        peers=int((~np.isnan(values)).sum()) - 1,
    )
