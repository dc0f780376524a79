"""Feasible strategies as columns, each made when it is asked for.

A block's fields keep the axes they depend on; a column of all blocks is what a file needs, and
a row is what a person reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Column = NDArray[Any]
Fields = Mapping[str, ArrayLike]


@dataclass(frozen=True)
class Part:
    """The kept cells of a block: their places, row by row, and the block's fields."""

    shape: tuple[int, int]
    cells: NDArray[np.int64]
    fields: Fields

    @cached_property
    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and column of each cell."""
        rows = np.repeat(np.arange(self.shape[0]), self._widths)
        return rows, self.cells - rows * self.shape[1]

    @property
    def _widths(self) -> NDArray[np.int64]:
        edges = np.arange(self.shape[0] + 1) * self.shape[1]
        return np.diff(np.searchsorted(self.cells, edges))

    def axis(self, name: str) -> str:
        """What a field depends on: the part, its rows, its columns, or each cell."""
        value = np.asarray(self.fields[name])
        if value.size == 1:
            return "part"
        if value.ndim == 1 or value.shape[0] == 1:
            return "column"
        return "row" if value.shape[1] == 1 else "cell"

    def along(self, name: str, axis: str) -> Column:
        """One field, once for each value of an axis that it depends on at most."""
        if axis == "cell":
            return self.column(name)
        lengths = {"part": 1, "row": self.shape[0], "column": self.shape[1]}
        return np.broadcast_to(np.asarray(self.fields[name]).reshape(-1), lengths[axis])

    def column(self, name: str) -> Column:
        """One field of all kept cells."""
        value, axis = np.asarray(self.fields[name]), self.axis(name)
        if axis == "part":
            return np.full(len(self.cells), value.reshape(-1)[0])
        if axis == "cell":
            return value.reshape(-1).take(self.cells)
        rows, columns = self.places
        return value.reshape(-1).take(rows if axis == "row" else columns)

    def value(self, name: str, place: int) -> Any:
        """One field of one kept cell."""
        row, column = divmod(int(self.cells[place]), self.shape[1])
        return np.broadcast_to(np.asarray(self.fields[name]), self.shape)[row, column].item()


def kept(shape: tuple[int, int], mask: NDArray[np.bool_], fields: Fields) -> Part:
    """The part of a block that fits."""
    return Part(shape, np.flatnonzero(mask.reshape(-1)), fields)


@dataclass(frozen=True, slots=True)
class Records:
    """All feasible strategies by TGS, highest first; equals in the order of enumeration."""

    parts: tuple[Part, ...]
    # For each place of the ranking, the cell among all parts' cells.
    ranking: NDArray[np.int64]
    _made: dict[str, Column] = field(default_factory=dict)
    # For each place of the ranking, which value of an axis is its own, among all parts' values.
    _indices: dict[str, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: list[Part]) -> "Records":
        """Rank them."""
        if not parts:
            return cls((), np.zeros(0, np.int64))
        tgs, *order = (
            np.concatenate([part.column(name) for part in parts])
            for name in ("tgs", "order")
            if name in parts[0].fields
        )
        ranking = np.lexsort((*order, -tgs)) if order else np.argsort(-tgs, kind="stable")
        return cls(tuple(parts), ranking)

    def __len__(self) -> int:
        return len(self.ranking)

    def __iter__(self) -> Iterator[str]:
        names = self.parts[0].fields if self.parts else ()
        return (name for name in names if name != "order")

    def __getitem__(self, name: str) -> Column:
        if not self.parts:
            return np.zeros(0)
        if name not in self._made:
            axis = self._axis(name)
            values = np.concatenate([part.along(name, axis) for part in self.parts])
            self._made[name] = values.take(self._index(axis))
        return self._made[name]

    def _axis(self, name: str) -> str:
        """What a field depends on in any part; rows here and columns there make it a cell's."""
        found = {part.axis(name) for part in self.parts} - {"part"}
        return "part" if not found else found.pop() if len(found) == 1 else "cell"

    def _index(self, axis: str) -> Column:
        if axis == "cell":
            return self.ranking
        if axis not in self._indices:
            found, begun = [], 0
            for part in self.parts:
                own = {"part": np.zeros(len(part.cells), np.int64)}
                own |= dict(zip(("row", "column"), part.places, strict=True))
                found.append(own[axis] + begun)
                begun += {"part": 1, "row": part.shape[0], "column": part.shape[1]}[axis]
            self._indices[axis] = np.concatenate(found)[self.ranking]
        return self._indices[axis]

    def row(self, place: int) -> dict[str, Any]:
        """One strategy, by its place in the ranking."""
        cell = int(self.ranking[place])
        for part in self.parts:
            if cell < len(part.cells):
                return {name: part.value(name, cell) for name in self}
            cell -= len(part.cells)
        raise IndexError(place)
