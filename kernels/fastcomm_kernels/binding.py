"""What bound each node of a graph of constraints, and when it is reached if edges change.

Nodes are in order of time, edges in order of their targets: node v's are `first[v]` to
`first[v + 1]`, and each comes from a node before.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Flags, Ints
from fastcomm_kernels.graph import NONE, Numbers


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
                room = time[source[best]] - time[source[e]]
                if slack[size] < 0 or room < slack[size]:
                    slack[size] = room
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
