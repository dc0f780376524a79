"""Number rows so that equal rows have one number, their *kind*; compute statistics by key.

A hash finds the kind of a row, and the values of the kind's first row confirm it. Columns are
the rows of a matrix of 64-bit integers.
"""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import bit_length, mix
from fastcomm_kernels.arrays import Floats, Ints, Matrix, Numbers

BITS = 11  # significant bits of a number that tell its bucket

_SLOTS = 64  # initial number, a power of two


@kernel
def slot_of(columns: Matrix, row: int, slots: Ints, first: Ints) -> int:
    """Return the slot of a row's kind, or the empty slot (-1) that a new kind would take.

    Parameters
    ----------
    columns
        Values of shape (columns, rows).
    row
        Row to look up.
    slots
        Hash table of kinds, -1 where empty; the length is a power of two.
    first
        First row of each kind.

    """
    key, last = 0, len(slots) - 1
    for c in range(len(columns)):
        key = mix(key, columns[c, row])
    slot = key & last
    while slots[slot] >= 0 and not equal(columns, row, first[slots[slot]]):
        slot = (slot + 1) & last
    return slot


@kernel
def equal(columns: Matrix, a: int, b: int) -> bool:
    """Return whether rows `a` and `b` agree in all columns, of shape (columns, rows)."""
    c = 0
    while c < len(columns) and columns[c, a] == columns[c, b]:
        c += 1
    return c == len(columns)


@kernel
def kinds(columns: Matrix) -> tuple[Ints, Ints]:
    """Number the different rows of a matrix.

    Parameters
    ----------
    columns
        Values of shape (columns, rows), int64.

    Returns
    -------
    tuple of two Ints
        Kind of each row, numbered from 0 by first appearance; first row of each kind.

    """
    rows, count = columns.shape[1], 0
    kind, first = np.empty(rows, np.int64), np.empty(rows, np.int64)
    slots = np.full(_SLOTS, -1, np.int64)
    for row in range(rows):
        # Consecutive rows are often equal, and then need no hash.
        if row > 0 and equal(columns, row, row - 1):
            kind[row] = kind[row - 1]
            continue
        slot = slot_of(columns, row, slots, first)
        if slots[slot] < 0:
            first[count] = row
            slots[slot] = count
            count += 1
        kind[row] = slots[slot]
        if 2 * count > len(slots):
            slots = np.full(4 * len(slots), -1, np.int64)
            for k in range(count):
                slots[slot_of(columns, first[k], slots, first)] = k
    return kind, first[:count].copy()


@kernel
def grouped(key: Numbers, value: Ints, size: np.int64) -> tuple[Ints, Ints]:
    """Return the values by key, in their order.

    Parameters
    ----------
    key
        Key of each value, 0 to `size` - 1.
    value
        The values.
    size
        Number of keys.

    Returns
    -------
    tuple of two Ints
        ``(first, out)``: the values of key k are ``out[first[k]:first[k + 1]]``.

    """
    first = np.zeros(size + 1, np.int64)
    for i in range(len(key)):
        first[key[i] + 1] += 1
    for k in range(size):
        first[k + 1] += first[k]
    place = first.copy()
    out = np.empty(len(key), np.int64)
    for i in range(len(key)):
        out[place[key[i]]] = value[i]
        place[key[i]] += 1
    return first, out


@kernel
def described(first: Ints, value: Ints) -> tuple[Ints, Ints, Ints, Ints, Floats]:
    """Return sum, minimum, maximum, upper median and population variance of each group.

    The values of group k are ``value[first[k]:first[k + 1]]``; an empty group has zeros.
    """
    size = len(first) - 1
    total, least, most = (
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )
    median, variance = np.zeros(size, np.int64), np.zeros(size, np.float64)
    ordered = value.copy()
    for k in range(size):
        begin, end = first[k], first[k + 1]
        count = int(end - begin)
        if count == 0:
            continue
        for i in range(begin, end):
            total[k] += value[i]
        mean = total[k] / count
        for i in range(begin, end):
            variance[k] += (value[i] - mean) * (value[i] - mean)
        variance[k] /= count
        # Shell sort: groups are small, with a value per step of a run.
        gap = 1
        while gap < count:
            gap = 3 * gap + 1
        while gap > 1:
            gap //= 3
            for i in range(begin + gap, end):
                moved = ordered[i]
                at = i
                while at - gap >= begin and ordered[at - gap] > moved:
                    ordered[at] = ordered[at - gap]
                    at -= gap
                ordered[at] = moved
        least[k], most[k] = ordered[begin], ordered[end - 1]
        median[k] = ordered[begin + count // 2]
    return total, least, most, median, variance


@kernel
def sums(key: Numbers, value: Ints, size: np.int64) -> tuple[Ints, Ints, Ints, Ints]:
    """Return number, sum, minimum and maximum of the values of each key.

    Parameters
    ----------
    key
        Key of each value, 0 to `size` - 1.
    value
        Values, not negative: the maximum begins at 0.
    size
        Number of keys.

    Returns
    -------
    tuple of four Ints
        Each of length `size`; zeros for a key without values.

    """
    number, total = np.zeros(size, np.int64), np.zeros(size, np.int64)
    least, most = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for i in range(len(key)):
        k, v = key[i], value[i]
        if number[k] == 0 or v < least[k]:
            least[k] = v
        most[k] = max(most[k], v)
        number[k] += 1
        total[k] += v
    return number, total, least, most


@kernel
def bucket(value: int) -> int:
    """Return the bucket of a number that is not negative: ascending, one for 11 equal bits."""
    shift = max(bit_length(value) - BITS, 0)
    return (shift << (BITS - 1)) + (value >> shift)


@kernel
def buckets(value: Ints) -> Ints:
    """Return the bucket of a histogram for each value, as defined by `bucket`.

    Values are not negative.
    """
    out = np.empty(len(value), np.int64)
    for i in range(len(value)):
        out[i] = bucket(value[i])
    return out


@kernel
def histogram(key: Numbers, value: Ints, first: Ints, low: Ints) -> Numbers:
    """Count values by key and bucket.

    Parameters
    ----------
    key, value
        Key of each value, and the value, not negative.
    first
        First cell of each key, and at the end the number of cells.
    low
        Bucket of the first cell of each key; no value is below it.

    Returns
    -------
    ndarray
        Number of values per cell, int32. The cells of a key are consecutive buckets.

    """
    number = np.zeros(first[-1], np.int32)
    start = first[:-1] - low
    for i in range(len(key)):
        number[start[key[i]] + bucket(value[i])] += 1
    return number
