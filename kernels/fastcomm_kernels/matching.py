"""A matrix of equal row and column sums as a sum of weighted permutations.

The matching of one stage is kept for the next: only the rows whose cell ran out are matched
again, each by one breadth-first path over the cells that may be used.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel

Matrix = NDArray[np.int64]
Rows = NDArray[np.int32]


@kernel
def augment(row: int, rest: Matrix, least: int, to: Rows, came: Rows) -> bool:
    """Match one more row over cells of at least `least`; say whether there is a way.

    Writes into `to`, the column of each row, and `came`, the row of each column; -1 is none.
    """
    size = len(rest)
    for c in range(size):
        if came[c] < 0 and rest[row, c] >= least:
            to[row] = c
            came[c] = row
            return True
    parent = np.full(size, -1, np.int32)
    queue = np.empty(size, np.int32)
    queue[0] = row
    head, tail = 0, 1
    while head < tail:
        r = queue[head]
        head += 1
        for c in range(size):
            if rest[r, c] < least or parent[c] >= 0:
                continue
            parent[c] = r
            if came[c] >= 0:
                queue[tail] = came[c]
                tail += 1
                continue
            last = c
            while True:
                r = parent[last]
                before = to[r]
                to[r] = last
                came[last] = r
                if r == row:
                    break
                last = before
            return True
    return False


@kernel
def stages(matrix: Matrix, first: int, shrink: int) -> tuple[Rows, Matrix]:
    """Return the permutations, a row a stage, and their weights.

    Cells of at least a threshold are used, `first` at the start; where they do not suffice it
    shrinks to ``shrink / 16`` of itself, down to 1. From 1 on this is the plain incremental
    way. A matrix of unequal sums gives stages that do not add up to it.
    """
    size = len(matrix)
    rest = matrix.copy()
    permutations = np.empty((size * size + 1, size), np.int32)
    weights = np.empty(size * size + 1, np.int64)
    to = np.full(size, -1, np.int32)
    came = np.full(size, -1, np.int32)
    least = first
    left = 0
    for c in range(size):
        left += rest[0, c]
    n = 0
    while left > 0:
        for row in range(size):
            while to[row] < 0 and not augment(row, rest, least, to, came):
                if least <= 1:
                    return permutations[:n], weights[:n]
                least = max(1, least * shrink // 16)
        weight = left
        for row in range(size):
            weight = min(weight, rest[row, to[row]])
        for row in range(size):
            c = to[row]
            permutations[n, row] = c
            rest[row, c] -= weight
            if rest[row, c] < least:
                to[row] = -1
                came[c] = -1
        weights[n] = weight
        n += 1
        left -= weight
    return permutations[:n], weights[:n]
