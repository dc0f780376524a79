"""Arrow columns as NumPy arrays and back, lookups by key, kinds of rows, statistics of groups.

`NULL` of `fastcomm_kernels.arrays` stands for null in every array of whole numbers.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm_kernels.arrays import NULL, Floats, Ints
from fastcomm_kernels.grouping import kinds

Integers = NDArray[np.signedinteger[Any]]
Codes = NDArray[np.int32]


def filled(column: pa.ChunkedArray | pa.Array, null: int = NULL) -> Ints:
    """Return a column of integers as int64, with `null` for null.

    It shares the memory of the column where that is int64 and has no nulls.
    """
    if column.type != pa.int64():
        column = column.cast(pa.int64())
    if column.null_count:
        column = column.fill_null(null)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    values: Ints = column.to_numpy()
    return values


def nullable(values: Integers) -> pa.Array:
    """Return an Arrow array with null for NULL."""
    return pa.array(values, mask=values == NULL)


def lookup(keys: Integers, wanted: Integers) -> Ints:
    """Return for each wanted key the place of the first equal one among sorted keys, or -1.

    NULL is nowhere.
    """
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((keys[place] == wanted) & (wanted != NULL), place, -1)


def codes(*columns: Integers) -> tuple[list[Codes], int]:
    """Small numbers instead of the columns' values, the same in all, and more than they are.

    NULL becomes -1.
    """
    known = [column[column != NULL] for column in columns]
    low = min((int(column.min()) for column in known if len(column)), default=0)
    high = max((int(column.max()) for column in known if len(column)), default=0)
    if high - low > _DENSE + 4 * sum(map(len, columns)):
        return codes_in_order(*columns)
    found = [np.where(c == NULL, -1, c - low).astype(np.int32) for c in columns]
    return found, high - low + 1


# Codes so close to each other are taken as they are.
_DENSE = 1 << 10


def codes_in_order(*columns: Integers) -> tuple[list[Codes], int]:
    """Small numbers in order of the values' first appearance, and how many; NULL becomes -1."""
    joined = np.concatenate(columns)
    encoded = pa.array(joined, mask=joined == NULL).dictionary_encode()
    code = encoded.indices.fill_null(-1).to_numpy().astype(np.int32)
    return np.split(code, np.cumsum([len(column) for column in columns])[:-1]), len(
        encoded.dictionary
    )


def pair_codes(
    left: tuple[Integers, Integers], right: tuple[Integers, Integers]
) -> tuple[Codes, Codes, int]:
    """Small numbers for pairs of numbers, the same on both sides, and more than they are."""
    firsts, count = codes(left[0], right[0])
    seconds, _ = codes(left[1], right[1])
    keys = [b.astype(np.int64) * (count + 1) + a for a, b in zip(firsts, seconds, strict=True)]
    (a, b), pairs = codes(*keys)
    return a, b, pairs


def alike(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """The first row of each kind of row, in the order of the columns' values; each row's kind.

    What `np.unique` says of the stacked columns of integers, but only the kinds are sorted.
    """
    first, kind = first_seen(*columns)
    order = np.lexsort([column[first] for column in reversed(columns)])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return first[order], place[kind]


def first_seen(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """The first row of each kind of row, in the order of the rows; each row's kind."""
    whole = np.empty((len(columns), len(columns[0])), np.int64)
    for place, column in enumerate(columns):
        whole[place] = column
    kind, first = kinds(whole)
    return first, kind


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
