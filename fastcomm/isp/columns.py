"""Feasible strategies as columns, each made when it is asked for.

A block's fields keep the axes they depend on; a column of all blocks is what a file needs, and
a row is what a person reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Column = NDArray[Any]
Fields = Mapping[str, ArrayLike]


@dataclass(frozen=True, slots=True)
class Part:
    """The kept cells of a block: their places, row by row, and the block's fields."""

    shape: tuple[int, int]
    cells: NDArray[np.int64]
    fields: Fields

    def column(self, name: str, cells: NDArray[np.int64] | None = None) -> Column:
        """One field of some cells; of all that are kept if None."""
        cells = self.cells if cells is None else cells
        value = np.asarray(self.fields[name])
        if value.ndim == 0:
            return np.full(len(cells), value)
        if value.ndim == 1:
            return (
                value[cells % self.shape[1]] if len(value) > 1 else np.full(len(cells), value)
            )
        if value.shape == self.shape:
            return np.asarray(value.reshape(-1)[cells])
        if value.shape[0] == 1:
            place = cells % self.shape[1] if value.shape[1] > 1 else 0 * cells
            return np.asarray(value[0, place])
        return np.asarray(value[cells // self.shape[1], 0])


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
        if name not in self._made:
            whole = [part.column(name) for part in self.parts]
            self._made[name] = np.concatenate(whole)[self.ranking] if whole else np.zeros(0)
        return self._made[name]

    def row(self, place: int) -> dict[str, Any]:
        """One strategy, by its place in the ranking."""
        cell = int(self.ranking[place])
        for part in self.parts:
            if cell < len(part.cells):
                return {
                    name: part.column(name, part.cells[cell : cell + 1])[0].item()
                    for name in self
                }
            cell -= len(part.cells)
        raise IndexError(place)
