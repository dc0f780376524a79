"""Arrow columns as NumPy arrays and back, lookups by key, small numbers for values and rows.

`NULL` of `fastcomm_kernels.arrays` stands for null in every array of whole numbers.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm_kernels.arrays import NULL, Ints
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
