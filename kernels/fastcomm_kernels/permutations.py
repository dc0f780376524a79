"""Decompose traffic matrices into permutations; the FAST schedule."""

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


Blocks = NDArray[np.int64]

Times = NDArray[np.float64]
Cost = tuple[float, float]


@kernel
def spread_time(moved: Matrix, cost: Cost) -> float:
    """Time to move a matrix shift by shift, the diagonal left out; empty shifts are free."""
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
def balance(block: Blocks, cost: Cost) -> tuple[Matrix, Blocks, float]:
    """Even out the rows of each block, in place where it pays.

    Return the load of a NIC by pair of nodes, what moves inside each source node, ``[s, GPU,
    GPU]`` one matrix a pair, and the time of it. Writes into `block`.
    """
    nodes, width = block.shape[0], block.shape[2]
    load = np.zeros((nodes, nodes), np.int64)
    moved = np.zeros((nodes * nodes, width, width), np.int64)
    row = np.empty(width, np.int64)
    slowest = 0.0
    for s in range(nodes):
        took = 0.0
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
            took += spread_time(pair, cost)
        slowest = max(slowest, took)
    return load, moved, slowest


@kernel
def level(b: Matrix, row: Matrix, target: int, moved: Matrix) -> None:
    """Move the surplus of each row above `target` to the rows below, column by column.

    Writes into `b`, its row sums `row`, and `moved`.
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
def redistribution(block: Blocks, permutations: Rows, weights: Matrix, cost: Cost) -> Times:
    """Return for each stage how long what it brought takes to reach its GPUs.

    A stage takes the columns of each row in order, up to its weight.
    """
    nodes, width = block.shape[0], block.shape[2]
    left = block.copy()
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
                    part = min(budget, left[s, d, i, j])
                    left[s, d, i, j] -= part
                    budget -= part
                    shift = j - i if j >= i else j - i + width
                    most[shift] = max(most[shift], part)
                    j += int(left[s, d, i, j] == 0)
                column[s, d, i] = j
            took = 0.0
            for shift in range(1, width):
                if most[shift] > 0:
                    took += cost[0] + cost[1] * most[shift]
            out[p] = max(out[p], took)
    return out
