"""Where and when time goes: a row a rank, a column an iteration."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.view import UNKNOWN
from fastcomm.trace.schema import TAGS

Ints = NDArray[np.int64]
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
class Grid:
    """The same as arrays, UNKNOWN for null: what other questions work on."""

    ranks: Ints
    iterations: Ints
    values: dict[str, Ints]  # by measure: a row a rank, a column an iteration

    @classmethod
    def of(cls, table: pa.Table) -> "Grid":
        """Lay the table of iterations out; rows without a number are left out."""
        table = table.filter(table["iteration"].is_valid())
        ranks, row = np.unique(table["rank"].to_numpy(), return_inverse=True)
        numbers, column = np.unique(table["iteration"].to_numpy(), return_inverse=True)
        values = {}
        for name, parts in MEASURES.items():
            grid = np.full((len(ranks), len(numbers)), UNKNOWN, np.int64)
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
        columns = (column[column != UNKNOWN] for column in self.values[name][rows].T)
        return np.array([np.median(each) if len(each) else np.nan for each in columns])

    def median_by_iteration(self, name: str) -> NDArray[np.float64]:
        """Return the median of all ranks in each iteration; NaN where none is known."""
        return self.middle(name, np.arange(len(self.ranks)))

    @property
    def step_ns(self) -> float | None:
        """The mean iteration time, over all (rank, iteration)."""
        known = self.values["time_ns"][self.values["time_ns"] != UNKNOWN]
        return int(known.sum()) / len(known) if len(known) else None


def table(grid: Grid) -> pa.Table:
    """A row a (rank, iteration) that has a time."""
    shape = (len(grid.ranks), len(grid.iterations))
    there = (grid.values["time_ns"] != UNKNOWN).reshape(-1)
    columns = {
        "rank": np.repeat(grid.ranks, shape[1])[there],
        "iteration": np.tile(grid.iterations, shape[0])[there],
    }
    for name, values in grid.values.items():
        chosen = values.reshape(-1)[there]
        columns[name] = pa.array(chosen, mask=chosen == UNKNOWN)
    return pa.table(columns)


def _sum(table: pa.Table, parts: tuple[str, ...]) -> Ints:
    """Row by row, UNKNOWN where one part is null."""
    columns = [table[part].fill_null(UNKNOWN).to_numpy() for part in parts]
    unknown = np.any([column == UNKNOWN for column in columns], axis=0)
    known = [np.where(unknown, 0, column) for column in columns]
    return np.where(unknown, UNKNOWN, np.sum(known, axis=0))


def _rows(values: Ints) -> Rows:
    return tuple(
        tuple(None if value == UNKNOWN else value for value in row) for row in values.tolist()
    )


def _known_mean(values: Ints, axis: int) -> NDArray[np.float64]:
    known = values != UNKNOWN
    how_many = known.sum(axis=axis)
    total = np.where(known, values, 0).sum(axis=axis)
    return np.where(how_many > 0, total / np.maximum(how_many, 1), np.nan)
