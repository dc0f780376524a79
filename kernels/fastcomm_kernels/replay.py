"""Replay a graph of operations: on devices that do one at a time, or on many lanes at once.

For `by_device` and `by_time`: nodes are numbered from 0. `graph` holds their successors: where
those of each node begin, the successors, the lag between node and successor, and 1 if the
successor waits only for the node's start. `work` holds, for each node, device, priority (least
first), duration, how long the device stays busy after it, group, and 1 if it releases the
device. `kind` of a device is 0 if it does one operation at a time, 1 for any number, 2 for one
at a time and of one group until the group releases the device. No time is negative.

For `simulate`, a lane is one instance of the graph, `data rank * steps + step`. An operation
starts when all its predecessors have ended. A member of a group ends its own duration after all
members have started; some groups are common to all data ranks of a step.
"""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Floats, Ints
from fastcomm_kernels.queues import (
    BEFORE,
    NEVER,
    Heaps,
    arrive,
    chosen,
    heaps_for,
    pop_choice,
    promise,
    push_choice,
    queues_of,
    soon_of,
)

ReplayGraph = tuple[Ints, Ints, Floats, Ints]
ReplayWork = tuple[Ints, Ints, Floats, Floats, Ints, Ints]

UNLIMITED = 1
EXCLUSIVE = 2
_NOBODY = -1


@kernel
def waits_of(after: Ints, size: np.int64) -> Ints:
    """Return the number of nodes that each node waits for.

    `after` has the node behind each edge; `size` is the number of nodes.
    """
    waits = np.zeros(size, np.int64)
    for e in range(len(after)):
        waits[after[e]] += 1
    return waits


@kernel
def _sources(waits: Ints, news: Ints) -> int:
    """Write the nodes that wait for nothing into `news`, and return their number."""
    count = 0
    for i in range(len(waits)):
        if waits[i] == 0:
            news[count] = i
            count += 1
    return count


@kernel
def by_device(
    graph: ReplayGraph, work: ReplayWork, kind: Ints, ready: Floats, free: Floats
) -> tuple[Floats, Floats, Ints]:
    """Replay a graph of operations; the device that is free first goes next.

    Nodes that wait for an exclusive device return to its queue one by one. Times have one unit.

    Parameters
    ----------
    graph, work, kind
        Successors, work of the nodes, kind of each device, see the module.
    ready, free
        Times from which nodes and devices may begin; written.

    Returns
    -------
    tuple of Floats, Floats and Ints
        Start and end of each node; the nodes in the order in which they started.

    """
    return _in_turn(graph, work, kind, ready, free, heaps_for(work[0], len(kind)))


@kernel
def by_time(
    graph: ReplayGraph, work: ReplayWork, kind: Ints, ready: Floats, free: Floats
) -> tuple[Floats, Floats, Ints]:
    """Replay a graph of operations; the earliest possible start goes next.

    A device starts the node with the least priority, then the one that is ready first.

    Parameters
    ----------
    graph, work, kind
        Successors, work of the nodes, kind of each device, see the module.
    ready, free
        Times from which nodes and devices may begin; written.

    Returns
    -------
    tuple of Floats, Floats and Ints
        Start and end of each node; the nodes in the order in which they started.

    """
    return _in_time(graph, work, kind, ready, free, heaps_for(work[0], len(kind)))


@kernel
def _in_turn(
    graph: ReplayGraph, work: ReplayWork, kind: Ints, ready: Floats, free: Floats, heaps: Heaps
) -> tuple[Floats, Floats, Ints]:
    """Replay `by_device`."""
    first, after, lag, at_start = graph
    device, priority, duration, busy, group, releases = work
    n, devices = len(device), len(kind)
    waits, queues, frees = (
        waits_of(after, np.int64(n)),
        queues_of(heaps, priority, ready),
        free.view(np.int64),
    )
    arrival, choices, soon, tree = heaps[5], heaps[4], heaps[6], heaps[7]
    start, end, order, finished = np.zeros(n), np.zeros(n), np.empty(n, np.int64), 0
    owner = np.full(devices, _NOBODY, np.int64)
    head, tail, follows = owner.copy(), owner.copy(), np.full(n, _NOBODY, np.int64)
    news, arrived = np.empty(n + 1, np.int64), 0
    count = _sources(waits, news)
    while True:
        for k in range(count):
            node = news[k]
            arrival[node] = arrived
            arrived += 1
            push_choice(queues, device[node], node)
            promise(queues, device[node], frees[device[node]])
        d = tree[1]
        if soon[d] == NEVER:
            return start, end, order[:finished]
        count, node = 0, pop_choice(queues, d)
        if kind[d] == EXCLUSIVE and owner[d] != _NOBODY and owner[d] != group[node]:
            if head[d] == _NOBODY:
                head[d] = node
            else:
                follows[tail[d]] = node
            tail[d], follows[node] = node, _NOBODY
        else:
            start[node] = ready[node] if kind[d] == UNLIMITED else max(ready[node], free[d])
            end[node] = start[node] + duration[node]
            free[d] = end[node] + busy[node]
            order[finished] = node
            finished += 1
            for e in range(first[node], first[node + 1]):
                other = after[e]
                begin = (start[node] if at_start[e] else end[node]) + lag[e]
                ready[other] = max(ready[other], begin)
                waits[other] -= 1
                if waits[other] == 0:
                    news[count] = other
                    count += 1
            if kind[d] == EXCLUSIVE:
                owner[d] = _NOBODY if releases[node] else group[node]
                if releases[node] and head[d] != _NOBODY:
                    news[count] = head[d]
                    count += 1
                    head[d] = follows[head[d]]
        promise(queues, d, frees[d] if choices[d] > 0 else NEVER)


@kernel
def _in_time(
    graph: ReplayGraph, work: ReplayWork, kind: Ints, ready: Floats, free: Floats, heaps: Heaps
) -> tuple[Floats, Floats, Ints]:
    """Replay `by_time`."""
    first, after, lag, at_start = graph
    device, priority, duration, busy, group, releases = work
    n, devices = len(device), len(kind)
    waits, queues, frees = (
        waits_of(after, np.int64(n)),
        queues_of(heaps, priority, ready),
        free.view(np.int64),
    )
    room, arrival, soon, tree = heaps[0], heaps[5], heaps[6], heaps[7]
    start, end, order, finished = np.zeros(n), np.zeros(n), np.empty(n, np.int64), 0
    blocked, blocked_count = np.empty(n, np.int64), np.zeros(devices, np.int64)
    owner = np.full(devices, _NOBODY, np.int64)
    news, arrived = np.empty(n + 1, np.int64), 0
    count = _sources(waits, news)
    while True:
        for k in range(count):
            node = news[k]
            d = device[node]
            arrival[node] = arrived
            arrived += 1
            limit = BEFORE if kind[d] == UNLIMITED else frees[d]
            arrive(queues, d, node, limit)
            promise(queues, d, soon_of(queues, d, frees[d], limit))
        d = tree[1]
        if soon[d] == NEVER:
            return start, end, order[:finished]
        count, node = 0, chosen(queues, d, soon[d])
        # No node starts in the past, on any device.
        frees[d] = soon[d]
        if owner[d] != _NOBODY and owner[d] != group[node]:
            blocked[room[d] + blocked_count[d]] = node
            blocked_count[d] += 1
        else:
            start[node] = free[d]
            end[node] = start[node] + duration[node]
            if kind[d] != UNLIMITED:
                free[d] = end[node] + busy[node]
            order[finished] = node
            finished += 1
            for e in range(first[node], first[node + 1]):
                other = after[e]
                begin = (start[node] if at_start[e] else end[node]) + lag[e]
                ready[other] = max(ready[other], begin)
                waits[other] -= 1
                if waits[other] == 0:
                    news[count] = other
                    count += 1
            if kind[d] == EXCLUSIVE:
                owner[d] = _NOBODY if releases[node] else group[node]
                while owner[d] == _NOBODY and blocked_count[d] > 0:
                    blocked_count[d] -= 1
                    push_choice(queues, d, blocked[room[d] + blocked_count[d]])
        limit = BEFORE if kind[d] == UNLIMITED else frees[d]
        promise(queues, d, soon_of(queues, d, frees[d], limit))


ALONE = -1


@kernel
def _together(last: Floats, ranks: np.int64) -> None:
    """Set each lane to the largest value of its step over all data ranks, in place."""
    steps = len(last) // ranks
    for d in range(1, ranks):
        for s in range(steps):
            last[s] = max(last[s], last[d * steps + s])
    for d in range(1, ranks):
        for s in range(steps):
            last[d * steps + s] = last[s]


@kernel
def simulate(
    order: Ints,
    before: tuple[Ints, Ints],
    closes: Ints,
    members: tuple[Ints, Ints, Ints],
    time: Floats,
    delay: Floats,
    ranks: np.int64,
) -> tuple[Floats, Floats]:
    """Return start and end of every operation on every lane, shape (operations, lanes).

    Parameters
    ----------
    order
        Operations, each after its predecessors.
    before
        Predecessors: where those of each operation begin, and the operations.
    closes
        The group whose last member is `order[i]`; `ALONE` for an operation in no group; a
        smaller number for members that are not the last.
    members
        Where the operations of each group begin, the operations, and 1 for a group that is
        common to all data ranks.
    time, delay
        Duration of each operation on each lane, and delay before its start.
    ranks
        Number of data ranks.

    """
    first, earlier = before
    bounds, grouped, common = members
    lanes = time.shape[1]
    start, end = np.zeros(time.shape, np.float64), np.zeros(time.shape, np.float64)
    last = np.empty(lanes, np.float64)
    for i in range(len(order)):
        op = order[i]
        for k in range(first[op], first[op + 1]):
            other = earlier[k]
            for lane in range(lanes):
                start[op, lane] = max(start[op, lane], end[other, lane])
        for lane in range(lanes):
            start[op, lane] += delay[op, lane]
        group = closes[i]
        if group == ALONE:
            for lane in range(lanes):
                end[op, lane] = start[op, lane] + time[op, lane]
        if group < 0:
            continue
        for lane in range(lanes):
            last[lane] = start[op, lane]
        for m in range(bounds[group], bounds[group + 1]):
            member = grouped[m]
            for lane in range(lanes):
                last[lane] = max(last[lane], start[member, lane])
        if common[group]:
            _together(last, ranks)
        for m in range(bounds[group], bounds[group + 1]):
            member = grouped[m]
            for lane in range(lanes):
                end[member, lane] = last[lane] + time[member, lane]
    return start, end
