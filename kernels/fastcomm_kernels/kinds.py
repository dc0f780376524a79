"""Rows of several columns, numbered so that equal rows have one number, their kind.

A hash finds the kind of a row and the values of the kind's first row prove it. Columns are the
rows of a matrix of 64-bit integers.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels._llvm import mix
from fastcomm_kernels.arrays import Ints

Matrix = NDArray[np.int64]

_SLOTS = 64  # to begin with; a power of two


@kernel
def slot_of(columns: Matrix, row: int, slots: Ints, first: Ints) -> int:
    """The slot that holds the kind of a row, or the empty one (-1) where it belongs."""
    key, last = 0, len(slots) - 1
    for c in range(len(columns)):
        key = mix(key, columns[c, row])
    slot = key & last
    while slots[slot] >= 0 and not equal(columns, row, first[slots[slot]]):
        slot = (slot + 1) & last
    return slot


@kernel
def equal(columns: Matrix, a: int, b: int) -> bool:
    """Whether two rows agree in every column."""
    c = 0
    while c < len(columns) and columns[c, a] == columns[c, b]:
        c += 1
    return c == len(columns)


@kernel
def kinds(columns: Matrix) -> tuple[Ints, Ints]:
    """Return the kind of each row, in the order of their appearance; each kind's first row."""
    rows, count = columns.shape[1], 0
    kind, first = np.empty(rows, np.int64), np.empty(rows, np.int64)
    slots = np.full(_SLOTS, -1, np.int64)
    for row in range(rows):
        # What follows each other is often alike, and then no hash is needed.
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
            for each in range(count):
                slots[slot_of(columns, first[each], slots, first)] = each
    return kind, first[:count].copy()
