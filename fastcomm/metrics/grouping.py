"""Group rows by the values of several columns, and compute statistics of each group."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm_kernels.arrays import Floats, Ints


def classes(*columns: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The distinct rows, sorted, a column each; and which of them each row is.

    By Arrow's hashes: who answers for all ranks compiles and loads no kernel.
    """
    rows = len(columns[0])
    kind = np.zeros(rows, np.int64)
    for column in columns:
        code, values = _numbered(np.asarray(column, np.int64))
        kind, kinds = _numbered(kind * np.int64(values) + code)
    first = np.empty(kinds, np.int64)
    first[kind[::-1]] = np.arange(rows)[::-1]
    keys = np.stack([column[first].astype(np.int64) for column in columns])
    order = np.lexsort(keys[::-1])
    place = np.empty(kinds, np.int64)
    place[order] = np.arange(kinds)
    return keys[:, order], place[kind]


def _numbered(values: Ints) -> tuple[Ints, int]:
    """Numbers from 0, the same for the same values; and how many."""
    found = pa.array(values).dictionary_encode()
    return found.indices.to_numpy().astype(np.int64), len(found.dictionary)


def sums(place: Ints, values: Ints, count: int) -> Ints:
    """The sum of the values of each class."""
    found = np.zeros(count, np.int64)
    np.add.at(found, place, values)
    return found


def members(place: Ints, count: int) -> list[Ints]:
    """The rows of each class."""
    order = np.argsort(place, kind="stable")
    edges = np.searchsorted(place[order], np.arange(1, count))
    return np.split(order, edges) if count else []


_HALF = 0.5
_NARROW = 1 << 15


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by their key; a key may have no row."""

    keys: Ints  # sorted, each once
    group: Ints  # of each row in `rows`: an index into `keys`
    rows: Ints | slice  # those that count

    @classmethod
    def of(cls, key: NDArray[Any]) -> Self:
        """Group all rows by an integer each."""
        # Hashing is linear; only the different keys are sorted.
        found = pa.array(key.astype(np.int64, copy=False)).dictionary_encode()
        keys: Ints = found.dictionary.to_numpy()
        order = np.argsort(keys)
        rank = np.empty(len(keys), np.int64)
        rank[order] = np.arange(len(keys))
        return cls(keys[order], rank[found.indices.to_numpy()], slice(None))

    def only(self, which: NDArray[np.bool_]) -> "Groups":
        """The same keys, of these rows alone."""
        return Groups(self.keys, self.group[which], np.flatnonzero(which))

    @property
    def counts(self) -> Ints:
        """How many rows a key has."""
        return np.bincount(self.group, minlength=len(self.keys))

    def sums(self, values: Ints) -> Ints:
        """The exact sum a key."""
        return sums(self.group, values[self.rows], len(self.keys))

    def totals(self, values: Floats) -> Floats:
        """The sum a key, added up in the order of the rows."""
        total = np.bincount(self.group, values[self.rows], len(self.keys))
        return total.astype(np.float64, copy=False)

    def percentiles(self, values: NDArray[Any], percent: float) -> Floats:
        """The percentile a key, by NumPy's linear rule; NaN where it has no row."""
        count = self.counts
        if not len(self.group):
            return np.full(len(count), np.nan)
        # Few keys are a narrow number, which sorts in linear time.
        narrow = self.group.astype(np.int16) if len(count) < _NARROW else self.group
        own = values[self.rows].astype(np.float64)[np.argsort(narrow, kind="stable")]
        place = (percent / 100) * np.maximum(count - 1, 0)
        down, up = np.floor(place).astype(np.int64), np.ceil(place).astype(np.int64)
        stop = np.cumsum(count)
        first = stop - count
        for key in np.flatnonzero(count).tolist():
            own[first[key] : stop[key]].partition((down[key], up[key]))
        known = count > 0
        below = own[(first + down)[known]]
        gap, share = own[(first + up)[known]] - below, (place - down)[known]
        found = np.full(len(count), np.nan)
        # From the nearer end, as NumPy does it, so that both round alike.
        found[known] = np.where(
            share < _HALF, below + gap * share, below + gap - gap * (1 - share)
        )
        return found
