"""Directed graphs as columns: nodes are numbers, an edge is a row of `source` and `target`.

An *index* of edges by one of their ends is a pair of columns: edges `edge[first[n]:first[n+1]]`
are those of node n, in the order in which they stand.
"""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Flags, Floats, Ints

Numbers = NDArray[np.int32]
Column = TypeVar("Column", Ints, Floats)


NONE = -1


class Edges(NamedTuple):
    """Room for edges; the first so many rows are filled."""

    source: Numbers
    target: Numbers
    kind: NDArray[np.int8]
    weight: Ints
    owner: Numbers  # row of the event that the edge's time belongs to, or NONE


def selected(edges: Edges, rows: Flags | slice) -> Edges:
    """Some of the edges."""
    source, target, kind, weight, owner = edges
    return Edges(source[rows], target[rows], kind[rows], weight[rows], owner[rows])


def room(count: int) -> Edges:
    """Room for so many edges."""
    ends = [np.empty(count, np.int32) for _ in range(3)]
    weight = np.empty(count, np.int64)
    return Edges(ends[0], ends[1], np.empty(count, np.int8), weight, ends[2])


@kernel
def put(
    edges: Edges, at: int, ends: tuple[int, int], kind: int, weight: int, owner: int
) -> int:
    """Write one edge to row `at`; the row behind it."""
    edges.source[at], edges.target[at] = ends
    edges.kind[at] = kind
    edges.weight[at] = weight
    edges.owner[at] = owner
    return at + 1


@kernel
def index(key: Numbers, groups: int) -> tuple[Numbers, Numbers]:
    """Rows by their key, which is less than `groups`, in their order; NONE is left out."""
    first = np.zeros(groups + 2, np.int32)
    for k in range(len(key)):
        first[key[k] + 2] += key[k] >= 0
    for group in range(groups):
        first[group + 2] += first[group + 1]
    row = np.empty(first[groups + 1], np.int32)
    for k in range(len(key)):
        if key[k] >= 0:
            row[first[key[k] + 1]] = k
            first[key[k] + 1] += 1
    return first[:-1], row


@kernel
def settle(order: Ints, key: Ints, tie: Ints) -> None:
    """Sort equal keys, which `order` has side by side, by `tie`, stably; writes `order`."""
    i, n = 0, len(order)
    while i < n:
        j = i + 1
        while j < n and key[order[j]] == key[order[i]]:
            j += 1
        if j - i > 16:
            # Loops: slices and indices that are arrays would take seconds to compile.
            run, ties = order[i:j].copy(), np.empty(j - i, np.int64)
            for k in range(j - i):
                ties[k] = tie[run[k]]
            by = np.argsort(ties, kind="mergesort")
            for k in range(j - i):
                order[i + k] = run[by[k]]
        else:
            for k in range(i + 1, j):
                row, at = order[k], k
                while at > i and tie[order[at - 1]] > tie[row]:
                    order[at] = order[at - 1]
                    at -= 1
                order[at] = row
        i = j


@kernel
def originals(into: tuple[Numbers, Numbers], source: Numbers, nodes: int) -> Numbers:
    """The first edge with the same ends as each edge; `into` indexes edges by target."""
    first, edge = into
    target_of = np.full(nodes, NONE, np.int32)
    edge_of = np.empty(nodes, np.int32)
    found = np.empty(len(source), np.int32)
    for target in range(nodes):
        for k in range(first[target], first[target + 1]):
            e = edge[k]
            u = source[e]
            if target_of[u] != target:
                target_of[u], edge_of[u] = target, e
            found[e] = edge_of[u]
    return found


@kernel
def topological(
    source: Numbers, target: Numbers, out: tuple[Numbers, Numbers], nodes: int
) -> Numbers:
    """Nodes with edges, each behind its predecessors; those on or behind a cycle are missing.

    First come nodes without predecessors as the edges name them, then each as its last
    predecessor is done: the order of networkx.
    """
    first, edge = out
    missing = np.zeros(nodes, np.int32)
    for e in range(len(target)):
        missing[target[e]] += 1
    order = np.empty(nodes, np.int32)
    size = 0
    for e in range(len(source)):
        if missing[source[e]] == 0:
            order[size] = source[e]
            size += 1
            missing[source[e]] = NONE
    done = 0
    while done < size:
        node = order[done]
        done += 1
        for k in range(first[node], first[node + 1]):
            to = target[edge[k]]
            missing[to] -= 1
            if missing[to] == 0:
                order[size] = to
                size += 1
    return order[:size]


@kernel
def longest_path(
    order: Numbers, into: tuple[Numbers, Numbers], source: Numbers, weight: Column, least: float
) -> tuple[Column, Numbers]:
    """Return the length of the longest path to each node, and its last edge; NONE without any.

    Nodes come in `order`, each behind its predecessors; `into` indexes edges by target. An edge
    has to be longer by more than `least` than those before it. What is negative starts at 0.
    """
    first, edge = into
    nodes = len(first) - 1
    length = np.zeros(nodes, weight.dtype)
    through = np.full(nodes, NONE, np.int32)
    for k in range(len(order)):
        node = order[k]
        best, way = length[node], NONE
        for j in range(first[node], first[node + 1]):
            e = edge[j]
            reached = length[source[e]] + weight[e]
            if way == NONE or reached > best + least:
                best, way = reached, e
        if best >= 0:
            length[node], through[node] = best, way
    return length, through


@kernel
def path_to(last: int, through: Numbers, source: Numbers) -> Numbers:
    """Return the edges that lead to a node, from first to last; `through` is each node's."""
    steps, node = 0, last
    while node >= 0 and through[node] >= 0:
        node = source[through[node]]
        steps += 1
    path, node = np.empty(steps, np.int32), last
    while steps > 0:
        steps -= 1
        path[steps] = through[node]
        node = source[path[steps]]
    return path


@kernel
def _binds(a: int, b: int, time: Ints, is_device: Flags) -> bool:
    """Whether source `a` binds rather than `b`: the later, then one on a device, the last."""
    if time[a] != time[b]:
        return bool(time[a] > time[b])
    if is_device[a] != is_device[b]:
        return bool(is_device[a])
    return a > b


@kernel
def binding(
    last: int, first: Numbers, source: Numbers, time: Ints, is_device: Flags
) -> tuple[Numbers, Ints]:
    """The edges that bound node `last`, from first to last, and the slack of each.

    Edges are in order of their targets: node v's are `first[v]` to `first[v + 1]`. Of several
    that bind v, the latest source does; then one on a device, then the last. Slack is how much
    earlier the runner-up was, -1 where there is none.
    """
    path = np.empty(len(first), np.int32)
    slack = np.empty(len(first), np.int64)
    size, node = len(first), last
    while first[node + 1] > first[node]:
        best = first[node]
        for e in range(first[node] + 1, first[node + 1]):
            if _binds(source[e], source[best], time, is_device):
                best = e
        size -= 1
        path[size], slack[size] = best, -1
        for e in range(first[node], first[node + 1]):
            if e != best:
                spare = time[source[best]] - time[source[e]]
                if slack[size] < 0 or spare < slack[size]:
                    slack[size] = spare
        node = source[best]
    return path[size:], slack[size:]


@kernel
def replay(first: Numbers, source: Numbers, weight: Ints, begin: int) -> tuple[Ints, Numbers]:
    """When each node is reached if an edge takes its weight, and the edge that binds it.

    Edges are in order of their targets; nodes without any begin at `begin`.
    """
    time = np.empty(len(first) - 1, np.int64)
    through = np.full(len(first) - 1, NONE, np.int32)
    for node in range(len(time)):
        reached = np.int64(begin)
        for e in range(first[node], first[node + 1]):
            at = time[source[e]] + weight[e]
            if through[node] == NONE or at > reached:
                reached, through[node] = at, e
        time[node] = reached
    return time, through


@kernel
def latest(first: Numbers, source: Numbers, weight: Ints, end: np.int64) -> Ints:
    """When each node has to be reached at the latest, so that all are by `end`.

    Edges are in order of their targets, each from a node before.
    """
    time = np.full(len(first) - 1, end)
    for back in range(len(time)):
        node = len(time) - 1 - back
        for e in range(first[node], first[node + 1]):
            time[source[e]] = min(time[source[e]], time[node] - weight[e])
    return time


@kernel
def delays(
    nodes: tuple[Ints, Flags],
    first: Numbers,
    source: Numbers,
    kind: NDArray[np.int8],
    least: Ints,
) -> Ints:
    """What every edge weighs in a replay of the times that were measured.

    The edge that binds a node weighs the measured delay, so that the replay is exact. The
    others weigh the `least` of their kind, as far as the measured times allow. `nodes` are
    times, and whether they are on a device.
    """
    time, is_device = nodes
    weight = np.empty(len(source), np.int64)
    for node in range(len(time)):
        best = first[node]
        for e in range(first[node], first[node + 1]):
            weight[e] = min(least[kind[e]], time[node] - time[source[e]])
            if _binds(source[e], source[best], time, is_device):
                best = e
        if first[node + 1] > first[node]:
            weight[best] = time[node] - time[source[best]]
    return weight
