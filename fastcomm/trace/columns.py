"""Arrow columns as NumPy arrays and back, lookups, kinds of rows, groups, tables of records.

`NULL` of `fastcomm_kernels.arrays` stands for null in arrays of whole numbers, and `NONE` in
arrays of rows or codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args, get_type_hints

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm_kernels.arrays import NONE, NULL, Floats, Ints, Numbers
from fastcomm_kernels.grouping import kinds

Integers = NDArray[np.signedinteger[Any]]


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


def text_codes(column: pa.ChunkedArray) -> Ints:
    """Number the values of a column, such as texts, by first appearance; null is NONE."""
    return filled(column.combine_chunks().dictionary_encode().indices, NONE)


def nullable(values: Integers) -> pa.Array:
    """Convert to an Arrow array of equal type, with null for NULL."""
    return pa.array(values, mask=values == NULL)


def lookup(keys: Integers, values: Integers) -> Ints:
    """Return the index of the first key equal to each value; NONE if there is none.

    `keys` are sorted. NULL values have no match.
    """
    if not len(keys):
        return np.full(len(values), NONE, np.int64)
    place = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
    return np.where((keys[place] == values) & (values != NULL), place, NONE)


def codes(*columns: Integers) -> tuple[list[Numbers], int]:
    """Replace values by small numbers, equal for equal values in all columns, and NULL by NONE.

    Returns
    -------
    tuple of list and int
        The columns, and an upper bound: all numbers are below it.

    """
    present = [column[column != NULL] for column in columns]
    low = min((int(column.min()) for column in present if len(column)), default=0)
    high = max((int(column.max()) for column in present if len(column)), default=0)
    if high - low > _DENSE + 4 * sum(map(len, columns)):
        return codes_in_order(*columns)
    dense = [np.where(c == NULL, NONE, c - low).astype(np.int32) for c in columns]
    return dense, high - low + 1


# Values in a range up to this width need no dictionary.
_DENSE = 1 << 10


def codes_in_order(*columns: Integers) -> tuple[list[Numbers], int]:
    """Number the values of several columns together, by first appearance; NULL becomes NONE.

    Returns
    -------
    tuple of list and int
        The columns, int32, and the count of distinct values.

    """
    joined = np.concatenate(columns)
    encoded = pa.array(joined, mask=joined == NULL).dictionary_encode()
    code = encoded.indices.fill_null(NONE).to_numpy().astype(np.int32)
    return np.split(code, np.cumsum([len(column) for column in columns])[:-1]), len(
        encoded.dictionary
    )


def pair_codes(
    first: tuple[Integers, Integers], second: tuple[Integers, Integers]
) -> tuple[Numbers, Numbers, int]:
    """Number pairs of values so that equal pairs have equal numbers in two tables.

    Parameters
    ----------
    first, second
        Two columns of each table.

    Returns
    -------
    tuple
        The number of each row of the first table, and of the second, and a bound above all
        numbers.

    """
    firsts, count = codes(first[0], second[0])
    seconds, _ = codes(first[1], second[1])
    keys = [b.astype(np.int64) * (count + 1) + a for a, b in zip(firsts, seconds, strict=True)]
    (a, b), pairs = codes(*keys)
    return a, b, pairs


def alike(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """Number the distinct rows of columns.

    Like `np.unique` of the stacked columns with `axis=1`, but only distinct rows are sorted.

    Returns
    -------
    tuple of ndarray
        First row of each distinct row, sorted by value; and the number of each row.

    """
    first, kind = first_seen(*columns)
    order = np.lexsort([column[first] for column in reversed(columns)])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return first[order], place[kind]


def first_seen(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """Number the distinct rows like `alike`, but in order of first appearance.

    Parameters
    ----------
    *columns
        Whole numbers, columns of equal length.

    Returns
    -------
    tuple of two Ints
        First row of each number; number of each row.

    """
    whole = np.empty((len(columns), len(columns[0])), np.int64)
    for place, column in enumerate(columns):
        whole[place] = column
    kind, first = kinds(whole)
    return first, kind


def block_starts(*columns: NDArray[np.integer]) -> Ints:
    """Return the index at which each block of equal rows begins, ascending.

    Parameters
    ----------
    *columns
        At least one, of equal length; equal rows are adjacent.

    """
    new = np.zeros(len(columns[0]), np.bool_)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def block_lengths(first: Ints, count: int) -> Ints:
    """Return the length of each block, which begin at `first` and have `count` rows in all."""
    return np.diff(np.append(first, count))


def sums(place: Ints, values: Ints, count: int) -> Ints:
    """Return the sum of the values of each class.

    Parameters
    ----------
    place
        Class of each value, 0 to `count` - 1.
    values
        The values, none NULL.
    count
        Number of classes.

    """
    total = np.zeros(count, np.int64)
    np.add.at(total, place, values)
    return total


def members(place: Ints, count: int) -> list[Ints]:
    """Return the rows of each class, ascending.

    Parameters
    ----------
    place
        Class of each row, 0 to `count` - 1.
    count
        Number of classes; a class without rows has an empty array.

    """
    order = np.argsort(place, kind="stable")
    edges = np.searchsorted(place[order], np.arange(1, count))
    return np.split(order, edges) if count else []


_HALF = 0.5
_NARROW = 1 << 15


def percentile(values: Ints, percent: int) -> float:
    """Return a percentile (0 to 100) of one whole number or more, as NumPy interpolates.

    It is computed in whole numbers and rounded once. NumPy rounds several times, which leaves
    -2.7e-12 where the percentile is 0.
    """
    below, share = divmod((len(values) - 1) * percent, 100)
    above = min(below + 1, len(values) - 1)
    ordered = np.partition(values, (below, above))
    low, high = int(ordered[below]), int(ordered[above])
    return (low * 100 + (high - low) * share) / 100


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows grouped by an integer key; a key may have no row."""

    keys: Ints  # distinct, sorted
    group: Ints  # index into `keys`, per element of `rows`
    rows: Ints | slice  # selected rows

    @classmethod
    def of(cls, key: NDArray[Any]) -> Self:
        """Group all rows by `key`, any integers; `keys` are the distinct ones, ascending."""
        # Hashing is linear; only distinct keys are sorted.
        encoded = pa.array(key.astype(np.int64, copy=False)).dictionary_encode()
        keys: Ints = encoded.dictionary.to_numpy()
        order = np.argsort(keys)
        rank = np.empty(len(keys), np.int64)
        rank[order] = np.arange(len(keys))
        return cls(keys[order], rank[encoded.indices.to_numpy()], slice(None))

    def only(self, selected: NDArray[np.bool_]) -> "Groups":
        """Return groups with all keys, but only the selected rows (a flag per row)."""
        return Groups(self.keys, self.group[selected], np.flatnonzero(selected))

    @property
    def counts(self) -> Ints:
        """Number of rows per key, in the order of `keys`."""
        return np.bincount(self.group, minlength=len(self.keys))

    def sums(self, values: Ints) -> Ints:
        """Return the exact sum per key; `values` are by row of the whole column."""
        return sums(self.group, values[self.rows], len(self.keys))

    def totals(self, values: Floats) -> Floats:
        """Return the sum per key, added in the order of rows; `values` are by row."""
        total = np.bincount(self.group, values[self.rows], len(self.keys))
        return total.astype(np.float64, copy=False)

    def percentiles(self, values: NDArray[Any], percent: float) -> Floats:
        """Return a percentile per key, interpolated linearly as NumPy does; NaN without rows.

        Parameters
        ----------
        values
            A value per row of the whole column, none NULL.
        percent
            0 to 100.

        """
        count = self.counts
        if not len(self.group):
            return np.full(len(count), np.nan)
        # int16 keys are sorted in linear time.
        narrow = self.group.astype(np.int16) if len(count) < _NARROW else self.group
        own = values[self.rows].astype(np.float64)[np.argsort(narrow, kind="stable")]
        place = (percent / 100) * np.maximum(count - 1, 0)
        down, up = np.floor(place).astype(np.int64), np.ceil(place).astype(np.int64)
        stop = np.cumsum(count)
        first = stop - count
        for key in np.flatnonzero(count).tolist():
            own[first[key] : stop[key]].partition((down[key], up[key]))
        has_rows = count > 0
        below = own[(first + down)[has_rows]]
        gap, share = own[(first + up)[has_rows]] - below, (place - down)[has_rows]
        values_ = np.full(len(count), np.nan)
        # Interpolate from the nearer end, as NumPy does, for equal rounding.
        values_[has_rows] = np.where(
            share < _HALF, below + gap * share, below + gap - gap * (1 - share)
        )
        return values_


_TYPES: dict[object, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: pa.string(),
    tuple[int, ...]: pa.list_(pa.int64()),
}


def table_of(cls: type, rows: Sequence[Any]) -> pa.Table:
    """Return a table with a row per dataclass instance.

    Parameters
    ----------
    cls
        Dataclass with flat fields, which are the columns; types other than numbers, Booleans
        and text become text. A field that may be None is a column with nulls.
    rows
        Instances of `cls`; without any, the table still has the columns.

    """
    fields = []
    for name, hint in get_type_hints(cls).items():
        options = [option for option in get_args(hint) if option is not type(None)]
        kind = options[0] if options and len(options) < len(get_args(hint)) else hint
        fields.append((name, _TYPES.get(kind, pa.string())))
    schema = pa.schema(fields)
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    return pa.table(columns, schema=schema)
