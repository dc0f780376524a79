"""Decompose traffic matrices into weighted permutations; the FAST schedule."""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Matrix, Numbers


@kernel
def augment(row: int, matrix: Matrix, least: int, column_of: Numbers, row_of: Numbers) -> bool:
    """Match one more row with a column, over cells of at least `least`, if that is possible.

    Parameters
    ----------
    row
        Row without a column.
    matrix
        Square matrix of weights.
    least
        Least weight of a usable cell.
    column_of, row_of
        The matching: column of each row, row of each column, -1 for none; written.

    Returns
    -------
    bool
        Whether the row was matched; if not, nothing was written.

    """
    size = len(matrix)
    for c in range(size):
        if row_of[c] < 0 and matrix[row, c] >= least:
            column_of[row] = c
            row_of[c] = row
            return True
    parent = np.full(size, -1, np.int32)
    queue = np.empty(size, np.int32)
    queue[0] = row
    head, tail = 0, 1
    while head < tail:
        r = queue[head]
        head += 1
        for c in range(size):
            if matrix[r, c] < least or parent[c] >= 0:
                continue
            parent[c] = r
            if row_of[c] >= 0:
                queue[tail] = row_of[c]
                tail += 1
                continue
            last = c
            while True:
                r = parent[last]
                before = column_of[r]
                column_of[r] = last
                row_of[last] = r
                if r == row:
                    break
                last = before
            return True
    return False


@kernel
def stages(matrix: Matrix, first: int, shrink: int) -> tuple[Numbers, Matrix]:
    """Decompose a matrix into weighted permutations, as in the FAST schedule.

    Only cells of at least a threshold are used; it shrinks when they do not suffice. The stages
    of a matrix with unequal sums do not add up to it.

    Parameters
    ----------
    matrix
        Square matrix of int64 that are not negative, with equal sums of all rows and columns.
    first
        First threshold; 1 gives the plain incremental decomposition.
    shrink
        The threshold shrinks to ``shrink / 16`` of itself, at least 1.

    Returns
    -------
    tuple of ndarray of int32 and of int64
        Column of each row, shape (stages, rows); weight of each stage.

    """
    size = len(matrix)
    remaining = matrix.copy()
    permutations = np.empty((size * size + 1, size), np.int32)
    weights = np.empty(size * size + 1, np.int64)
    column_of = np.full(size, -1, np.int32)
    row_of = np.full(size, -1, np.int32)
    least = first
    total = 0
    for c in range(size):
        total += remaining[0, c]
    n = 0
    while total > 0:
        for row in range(size):
            while column_of[row] < 0 and not augment(row, remaining, least, column_of, row_of):
                if least <= 1:
                    return permutations[:n], weights[:n]
                least = max(1, least * shrink // 16)
        weight = total
        for row in range(size):
            weight = min(weight, remaining[row, column_of[row]])
        for row in range(size):
            c = column_of[row]
            permutations[n, row] = c
            remaining[row, c] -= weight
            if remaining[row, c] < least:
                column_of[row] = -1
                row_of[c] = -1
        weights[n] = weight
        n += 1
        total -= weight
    return permutations[:n], weights[:n]


Blocks = NDArray[np.int64]

Times = NDArray[np.float64]
SendCost = tuple[float, float]


@kernel
def spread_time(moved: Matrix, cost: SendCost) -> float:
    """Return the time in s to move a square matrix shift by shift, without the diagonal.

    `cost` is the seconds per shift that is not empty, and per unit of its largest cell.
    """
    size = len(moved)
    total = 0.0
    for shift in range(1, size):
        most = np.int64(0)
        for j in range(size):
            k = j + shift
            most = max(most, moved[j, k - size if k >= size else k])
        if most > 0:
            total += cost[0] + cost[1] * most
    return total


@kernel
def balance(block: Blocks, cost: SendCost) -> tuple[Matrix, Blocks, float]:
    """Even out the rows of each block, in place, where that saves time.

    Parameters
    ----------
    block
        Traffic [source node, node, GPU, GPU]; written.
    cost
        Time per shift inside a node, and per unit.

    Returns
    -------
    ndarray
        Load of a NIC by pair of nodes.
    ndarray
        What moves inside the source node, [pair of nodes, GPU, GPU].
    float
        Time of these moves in the slowest node.

    """
    nodes, width = block.shape[0], block.shape[2]
    load = np.zeros((nodes, nodes), np.int64)
    moved = np.zeros((nodes * nodes, width, width), np.int64)
    row = np.empty(width, np.int64)
    slowest = 0.0
    for s in range(nodes):
        node_time = 0.0
        for d in range(nodes):
            if s == d:
                continue
            b = block[s, d]
            total, most = np.int64(0), np.int64(0)
            for i in range(width):
                row[i] = 0
                for j in range(width):
                    row[i] += b[i, j]
                total += row[i]
                most = max(most, row[i])
            load[s, d] = most
            if cost[0] > 0:
                used, longest = 0, np.int64(0)
                for shift in range(width):
                    largest = np.int64(0)
                    for j in range(width):
                        largest = max(largest, b[j, (j + shift) % width])
                    used += int(largest > 0)
                    longest += largest
                if cost[1] * (most + longest) < 2 * cost[0] * (1 + used):
                    continue
            target = (total + width - 1) // width
            load[s, d] = target
            pair = moved[s * nodes + d]
            level(b, row, target, pair)
            node_time += spread_time(pair, cost)
        slowest = max(slowest, node_time)
    return load, moved, slowest


@kernel
def level(b: Matrix, row: Matrix, target: int, moved: Matrix) -> None:
    """Move the surplus of rows above `target` to the rows below it, column by column.

    Parameters
    ----------
    b
        Square matrix of bytes; written.
    row
        Sums of its rows; written.
    target
        Sum that rows shall not exceed.
    moved
        Matrix to which the amount moved from row to row is added.

    """
    for i in range(len(row)):
        for k in range(len(row)):
            if row[i] <= target:
                break
            if row[k] >= target:
                continue
            for j in range(len(row)):
                m = min(row[i] - target, b[i, j], target - row[k])
                b[i, j] -= m
                b[k, j] += m
                row[i] -= m
                row[k] += m
                moved[i, k] += m


@kernel
def redistribution(
    block: Blocks, permutations: Numbers, weights: Matrix, cost: SendCost
) -> Times:
    """Return the time in which each stage's traffic is spread inside its target nodes.

    A stage takes the columns of each row in order, up to its weight.

    Parameters
    ----------
    block
        Traffic [source node, node, GPU, GPU].
    permutations, weights
        Stages of nodes (`stages`).
    cost
        Time per shift inside a node, and per unit.

    """
    nodes, width = block.shape[0], block.shape[2]
    remaining = block.copy()
    column = np.zeros((nodes, nodes, width), np.int64)
    most = np.zeros(width, np.int64)
    out = np.zeros(len(weights))
    for p in range(len(weights)):
        for s in range(nodes):
            d = permutations[p, s]
            if d == s:
                continue
            for shift in range(width):
                most[shift] = 0
            for i in range(width):
                budget = weights[p]
                j = column[s, d, i]
                while j < width and budget > 0:
                    part = min(budget, remaining[s, d, i, j])
                    remaining[s, d, i, j] -= part
                    budget -= part
                    shift = j - i if j >= i else j - i + width
                    most[shift] = max(most[shift], part)
                    j += int(remaining[s, d, i, j] == 0)
                column[s, d, i] = j
            stage_time = 0.0
            for shift in range(1, width):
                if most[shift] > 0:
                    stage_time += cost[0] + cost[1] * most[shift]
            out[p] = max(out[p], stage_time)
    return out
