"""Operate on directed graphs as columns: edge i goes from ``source[i]`` to ``target[i]``.

An *index* of edges by one end is a pair of columns ``first`` and ``edge``:
``edge[first[n]:first[n + 1]]`` are the edges of node n, in their order.
"""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import NONE, Flags, Floats, Ints, Numbers

Column = TypeVar("Column", Ints, Floats)


class Edges(NamedTuple):
    """Columns of edges, allocated before they are filled; weights are ns."""

    source: Numbers
    target: Numbers
    kind: NDArray[np.int8]
    weight: Ints
    owner: Numbers  # row of the event that the edge's time belongs to, or NONE


def selected(edges: Edges, rows: Flags | slice) -> Edges:
    """Return some of the edges: a flag per edge, or a slice."""
    source, target, kind, weight, owner = edges
    return Edges(source[rows], target[rows], kind[rows], weight[rows], owner[rows])


def room(count: int) -> Edges:
    """Allocate columns for `count` edges, not initialized."""
    ends = [np.empty(count, np.int32) for _ in range(3)]
    weight = np.empty(count, np.int64)
    return Edges(ends[0], ends[1], np.empty(count, np.int8), weight, ends[2])


@kernel
def put(
    edges: Edges, at: int, ends: tuple[int, int], kind: int, weight: int, owner: int
) -> int:
    """Write one edge to row `at` of the columns `edges`, and return the next row.

    `ends` are its source and target node; kind, weight and owner are as in `Edges`.
    """
    edges.source[at], edges.target[at] = ends
    edges.kind[at] = kind
    edges.weight[at] = weight
    edges.owner[at] = owner
    return at + 1


@kernel
def index(key: Numbers, groups: int) -> tuple[Numbers, Numbers]:
    """Return the index of rows by their key, see the module: ``(first, rows)``.

    Keys are less than `groups`; rows with the key NONE are in no group.
    """
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
    """Sort runs of equal keys in `order` by `tie`, stably and in place.

    Parameters
    ----------
    order
        Row numbers sorted by `key`; written.
    key, tie
        Values by row: first and second sort key.

    """
    i, n = 0, len(order)
    while i < n:
        j = i + 1
        while j < n and key[order[j]] == key[order[i]]:
            j += 1
        if j - i > 16:
            # Loops, because slices and index arrays would take seconds to compile.
            run, ties = order[i:j].copy(), np.empty(j - i, np.int64)
            for k in range(j - i):
                ties[k] = tie[run[k]]
            by = np.argsort(ties, kind="mergesort")
            for k in range(j - i):
                order[i + k] = run[by[k]]
        else:
            for k in range(i + 1, j):
                row, position = order[k], k
                while position > i and tie[order[position - 1]] > tie[row]:
                    order[position] = order[position - 1]
                    position -= 1
                order[position] = row
        i = j


@kernel
def originals(into: tuple[Numbers, Numbers], source: Numbers, nodes: int) -> Numbers:
    """Return, for each edge, the number of the first edge with equal ends: its own if none.

    `into` is the index of the edges by target, `source` the source of each edge, and `nodes`
    the number of nodes.
    """
    first, edge = into
    target_of = np.full(nodes, NONE, np.int32)
    edge_of = np.empty(nodes, np.int32)
    original = np.empty(len(source), np.int32)
    for target in range(nodes):
        for k in range(first[target], first[target + 1]):
            e = edge[k]
            u = source[e]
            if target_of[u] != target:
                target_of[u], edge_of[u] = target, e
            original[e] = edge_of[u]
    return original


@kernel
def topological(
    source: Numbers, target: Numbers, out: tuple[Numbers, Numbers], nodes: int
) -> Numbers:
    """Return nodes with edges, each after its predecessors, without those behind a cycle.

    Nodes without predecessors come first, in the order of the edges, then each node when its
    last predecessor is done, as in networkx.

    Parameters
    ----------
    source, target
        Ends of each edge.
    out
        Index of the edges by source, see the module.
    nodes
        Number of nodes.

    """
    first, edge = out
    open_edges = np.zeros(nodes, np.int32)
    for e in range(len(target)):
        open_edges[target[e]] += 1
    order = np.empty(nodes, np.int32)
    size = 0
    for e in range(len(source)):
        if open_edges[source[e]] == 0:
            order[size] = source[e]
            size += 1
            open_edges[source[e]] = NONE
    next_node = 0
    while next_node < size:
        node = order[next_node]
        next_node += 1
        for k in range(first[node], first[node + 1]):
            to = target[edge[k]]
            open_edges[to] -= 1
            if open_edges[to] == 0:
                order[size] = to
                size += 1
    return order[:size]


@kernel
def longest_path(
    order: Numbers, into: tuple[Numbers, Numbers], source: Numbers, weight: Column, least: float
) -> tuple[Column, Numbers]:
    """Return the length of the longest path to each node, and its last edge, or NONE.

    Parameters
    ----------
    order
        Nodes, each after its predecessors.
    into
        Index of edges by target.
    source, weight
        Source and weight of each edge.
    least
        An edge replaces an earlier one only if its path is longer by more than this.

    Returns
    -------
    ndarray
        Lengths, in the type of the weights; negative ones become 0, without an edge.
    ndarray
        The last edge of each path.

    """
    first, edge = into
    nodes = len(first) - 1
    length = np.zeros(nodes, weight.dtype)
    through = np.full(nodes, NONE, np.int32)
    for k in range(len(order)):
        node = order[k]
        best, best_edge = length[node], NONE
        for j in range(first[node], first[node + 1]):
            e = edge[j]
            reached = length[source[e]] + weight[e]
            if best_edge == NONE or reached > best + least:
                best, best_edge = reached, e
        if best >= 0:
            length[node], through[node] = best, best_edge
    return length, through


@kernel
def path_to(last: int, through: Numbers, source: Numbers) -> Numbers:
    """Return the edges of the path that ends at node `last`, in order from its beginning.

    `through` has, by node, the edge by which the path reaches it, or NONE where a path begins;
    `source` has the source of each edge.
    """
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
    """Return whether source `a` binds rather than `b`: the later, then a device, the last."""
    if time[a] != time[b]:
        return bool(time[a] > time[b])
    if is_device[a] != is_device[b]:
        return bool(is_device[a])
    return a > b


@kernel
def binding(
    last: int, first: Numbers, source: Numbers, time: Ints, is_device: Flags
) -> tuple[Numbers, Ints]:
    """Return the edges that bound node `last`, in order, and the slack of each.

    Of the edges into a node the one with the latest source binds; of equal ones, one on a
    device, then the last.

    Parameters
    ----------
    last
        Node at which the path ends.
    first, source
        Edges in order of their targets: those of node v are `first[v]` to `first[v + 1]`.
    time, is_device
        By node: time in ns, and whether it is on a device.

    Returns
    -------
    tuple of ndarray of int32 and of int64
        Numbers of the edges; slack in ns, the time by which the second-latest source is
        earlier, or -1 without a second one.

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
    """Return when each node is reached if every edge takes its weight, and the binding edges.

    Parameters
    ----------
    first, source
        Edges in order of their targets, each from an earlier node: those of node v are
        `first[v]` to `first[v + 1]`.
    weight
        Time of each edge in ns.
    begin
        Time in ns of nodes without edges.

    Returns
    -------
    tuple of ndarray of int64 and of int32
        Time of each node in ns; its binding edge, or NONE for a node without edges.

    """
    time = np.empty(len(first) - 1, np.int64)
    through = np.full(len(first) - 1, NONE, np.int32)
    for node in range(len(time)):
        reached = np.int64(begin)
        for e in range(first[node], first[node + 1]):
            arrival = time[source[e]] + weight[e]
            if through[node] == NONE or arrival > reached:
                reached, through[node] = arrival, e
        time[node] = reached
    return time, through


@kernel
def latest(first: Numbers, source: Numbers, weight: Ints, end: np.int64) -> Ints:
    """Return the latest time of each node at which all nodes can still be reached by `end`.

    Parameters
    ----------
    first, source
        Edges in order of their targets, each from an earlier node: those of node v are
        `first[v]` to `first[v + 1]`.
    weight
        Time of each edge in ns.
    end
        Latest time of every node, ns.

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
    """Return the weight of every edge for a replay of the measured times.

    The edge that binds a node gets the measured delay, so that the replay is exact. Other edges
    get the least delay of their kind, as far as the measured times allow.

    Parameters
    ----------
    nodes
        By node: time in ns, and whether it is on a device.
    first, source
        Edges in order of their targets: those of node v are `first[v]` to `first[v + 1]`.
    kind
        Kind of each edge.
    least
        Least delay by kind of edge, ns.

    Returns
    -------
    Ints
        Weight of each edge, ns.

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
