"""Replay of a graph of operations on devices that do one at a time.

Nodes are numbered from 0, `graph` is their successors: where each node's begin, which they
are, what comes between the node and the successor, and 1 where the successor waits for the
node's start alone. `work` is of each node: device, priority (least first), duration, how long
the device stays busy after it, group, and 1 where it releases the device. `kind` is of each
device: 0 does one operation at a time, 1 any number, 2 one at a time and of one group until
that releases it.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel

Column = NDArray[np.int64]
Floats = NDArray[np.float64]
Keys = NDArray[np.float64]
Graph = tuple[Column, Column, Floats, Column]
Work = tuple[Column, Column, Floats, Floats, Column, Column]

UNLIMITED = 1
EXCLUSIVE = 2
_NOBODY = -1
_SAME = 1e-3


@kernel
def _less(keys: Keys, a: np.int64, b: np.int64) -> bool:
    """Whether the key of `a` comes before that of `b`."""
    if keys[a, 0] != keys[b, 0]:
        return bool(keys[a, 0] < keys[b, 0])
    if keys[a, 1] != keys[b, 1]:
        return bool(keys[a, 1] < keys[b, 1])
    return bool(keys[a, 2] < keys[b, 2])


@kernel
def _push(heap: Column, base: np.int64, size: np.int64, item: np.int64, keys: Keys) -> None:
    """Add an item to the heap of `size` items from `base` on; writes into `heap`."""
    at = size
    while at > 0 and _less(keys, item, heap[base + (at - 1) // 2]):
        heap[base + at] = heap[base + (at - 1) // 2]
        at = (at - 1) // 2
    heap[base + at] = item


@kernel
def _pop(heap: Column, base: np.int64, size: np.int64, keys: Keys) -> np.int64:
    """Take the least item of the heap of `size` items from `base` on; writes into `heap`."""
    least, item = np.int64(heap[base]), heap[base + size - 1]
    at, below = np.int64(0), np.int64(1)
    while below < size - 1:
        if below + 1 < size - 1 and _less(keys, heap[base + below + 1], heap[base + below]):
            below += 1
        if not _less(keys, heap[base + below], item):
            break
        heap[base + at] = heap[base + below]
        at, below = below, 2 * below + 1
    heap[base + at] = item
    return least


@kernel
def waits_of(after: Column, size: np.int64) -> Column:
    """Return how many nodes each node waits for."""
    waits = np.zeros(size, np.int64)
    for e in range(len(after)):
        waits[after[e]] += 1
    return waits


@kernel
def _rooms(device: Column, devices: np.int64) -> Column:
    """Return where each device's part of a common array of nodes begins."""
    first = np.zeros(devices + 1, np.int64)
    for i in range(len(device)):
        first[device[i] + 1] += 1
    for d in range(devices):
        first[d + 1] += first[d]
    return first


@kernel
def by_device(
    graph: Graph, work: Work, kind: Column, ready: Floats, free: Floats
) -> tuple[Floats, Floats, Column]:
    """Return start, end and order of the nodes; the device that is free first runs next.

    `ready` and `free`, when nodes and devices may begin, are written into. What waits for an
    exclusive device comes back one by one.
    """
    first, after, lag, at_start = graph
    device, priority, duration, busy, group, releases = work
    n, devices = len(device), len(kind)
    waits, room = waits_of(after, np.int64(n)), _rooms(device, np.int64(devices))
    queue, queued = np.empty(n, np.int64), np.zeros(devices, np.int64)
    keys, order = np.zeros((n, 3)), np.empty(n, np.int64)
    start, end = np.zeros(n), np.zeros(n)
    heap, turn, waiting = np.empty(devices, np.int64), np.zeros((devices, 3)), np.int64(0)
    held = np.full(devices, _NOBODY, np.int64)
    head, tail = held.copy(), held.copy()
    follows = np.full(n, _NOBODY, np.int64)
    arrived = done = np.int64(0)
    stack, depth = np.empty(n, np.int64), np.int64(0)
    for i in range(n - 1, -1, -1):
        if waits[i] == 0:
            stack[depth] = i
            depth += 1
    running = np.int64(_NOBODY)
    while True:
        for k in range(depth - 1, -1, -1):
            node = stack[k]
            d = device[node]
            keys[node, 0], keys[node, 1], keys[node, 2] = priority[node], ready[node], arrived
            arrived += 1
            _push(queue, room[d], queued[d], node, keys)
            queued[d] += 1
            if queued[d] == 1 and d != running:
                turn[d, 0], turn[d, 1] = free[d], d
                _push(heap, np.int64(0), waiting, d, turn)
                waiting += 1
        depth = np.int64(0)
        if running != _NOBODY and queued[running] > 0:
            turn[running, 0], turn[running, 1] = free[running], running
            _push(heap, np.int64(0), waiting, running, turn)
            waiting += 1
        if waiting == 0:
            break
        running = _pop(heap, np.int64(0), waiting, turn)
        waiting -= 1
        node = _pop(queue, room[running], queued[running], keys)
        queued[running] -= 1
        if kind[running] == EXCLUSIVE and held[running] not in (_NOBODY, group[node]):
            if head[running] == _NOBODY:
                head[running] = node
            else:
                follows[tail[running]] = node
            tail[running] = node
            continue
        start[node] = ready[node]
        if kind[running] != UNLIMITED:
            start[node] = max(ready[node], free[running])
        end[node] = start[node] + duration[node]
        free[running] = end[node] + busy[node]
        order[done] = node
        done += 1
        if kind[running] == EXCLUSIVE:
            held[running] = _NOBODY if releases[node] else group[node]
            if releases[node] and head[running] != _NOBODY:
                stack[depth] = head[running]
                depth += 1
                head[running] = follows[head[running]]
                follows[stack[depth - 1]] = _NOBODY
        for e in range(first[node + 1] - 1, first[node] - 1, -1):
            other = after[e]
            ready[other] = max(
                ready[other], (start[node] if at_start[e] else end[node]) + lag[e]
            )
            waits[other] -= 1
            if waits[other] == 0:
                stack[depth] = other
                depth += 1
    return start, end, order[:done]


@kernel
def by_time(
    graph: Graph, work: Work, kind: Column, ready: Floats, free: Floats
) -> tuple[Floats, Floats, Column]:
    """Return start, end and order of the nodes; the earliest possible start runs next.

    Of what a device could start then, priority decides, then who was ready first. `ready` and
    `free`, when nodes and devices may begin, are written into.
    """
    first, after, lag, at_start = graph
    device, priority, duration, busy, group, releases = work
    n, devices = len(device), len(kind)
    waits, room = waits_of(after, np.int64(n)), _rooms(device, np.int64(devices))
    future, futures = np.empty(n, np.int64), np.zeros(devices, np.int64)
    choice, choices = np.empty(n, np.int64), np.zeros(devices, np.int64)
    shut, shuts = np.empty(n, np.int64), np.zeros(devices, np.int64)
    by_ready, by_priority = np.zeros((n, 3)), np.zeros((n, 3))
    order, start, end = np.empty(n, np.int64), np.zeros(n), np.zeros(n)
    # A device is in the heap as often as its next start came down; only the last one counts.
    # Places in `turn` are used again, so that what is searched stays small.
    size = 2 * n + devices
    heap, turn, waiting = np.empty(size, np.int64), np.zeros((size, 3)), np.int64(0)
    spare, spares = np.empty(size, np.int64), np.int64(0)
    turns, promised = np.int64(0), np.full(devices, np.inf)
    held = np.full(devices, _NOBODY, np.int64)
    touched, news = np.empty(n + 1, np.int64), np.int64(0)
    for i in range(n):
        if waits[i] == 0:
            touched[news] = i
            news += 1
    arrived = done = np.int64(0)
    d = np.int64(_NOBODY)
    while True:
        for k in range(news):
            node = touched[k]
            by_ready[node, 0], by_ready[node, 1] = ready[node], arrived
            by_priority[node, 0] = priority[node]
            by_priority[node, 1], by_priority[node, 2] = ready[node], arrived
            arrived += 1
            at = device[node]
            # Whatever the device does next, it does not do before it is free.
            if ready[node] <= free[at] and kind[at] != UNLIMITED:
                _push(choice, room[at], choices[at], node, by_priority)
                choices[at] += 1
            else:
                _push(future, room[at], futures[at], node, by_ready)
                futures[at] += 1
        for k in range(news + 1):
            # The devices of what is new, and the one that has just run.
            at = d if k == news else device[touched[k]]
            if at == _NOBODY or futures[at] + choices[at] == 0:
                continue
            soon = free[at]
            if choices[at] == 0:
                soon = max(ready[future[room[at]]], -np.inf if kind[at] == UNLIMITED else soon)
            if soon < promised[at]:
                promised[at] = soon
                slot = turns
                if spares > 0:
                    spares -= 1
                    slot = spare[spares]
                else:
                    turns += 1
                turn[slot, 0], turn[slot, 1] = soon, at
                _push(heap, np.int64(0), waiting, slot, turn)
                waiting += 1
        if waiting == 0:
            break
        news, entry = np.int64(0), _pop(heap, np.int64(0), waiting, turn)
        waiting -= 1
        spare[spares] = entry
        spares += 1
        d = np.int64(turn[entry, 1])
        if turn[entry, 0] != promised[d]:
            d = np.int64(_NOBODY)
            continue
        now, promised[d] = promised[d], np.inf
        while futures[d] > 0 and ready[future[room[d]]] <= now:
            node = _pop(future, room[d], futures[d], by_ready)
            futures[d] -= 1
            _push(choice, room[d], choices[d], node, by_priority)
            choices[d] += 1
        node = _pop(choice, room[d], choices[d], by_priority)
        choices[d] -= 1
        # Nothing starts in the past, on whatever device.
        free[d] = now
        if held[d] not in (_NOBODY, group[node]):
            shut[room[d] + shuts[d]] = node
            shuts[d] += 1
            continue
        start[node], end[node] = now, now + duration[node]
        if kind[d] != UNLIMITED:
            free[d] = end[node] + busy[node]
        order[done] = node
        done += 1
        if kind[d] == EXCLUSIVE:
            held[d] = _NOBODY if releases[node] else group[node]
            while held[d] == _NOBODY and shuts[d] > 0:
                shuts[d] -= 1
                _push(choice, room[d], choices[d], shut[room[d] + shuts[d]], by_priority)
                choices[d] += 1
        for e in range(first[node], first[node + 1]):
            other = after[e]
            ready[other] = max(
                ready[other], (start[node] if at_start[e] else end[node]) + lag[e]
            )
            waits[other] -= 1
            if waits[other] == 0:
                touched[news] = other
                news += 1
    return start, end, order[:done]


@kernel
def longest(
    first: Column, after: Column, cost: Floats, rank: Column, order: Column
) -> tuple[Floats, Column]:
    """Return the length of the longest path to each node, and the edge by which it comes there.

    `order` has every node behind those it waits for. Of paths that differ by less than a
    thousandth the one by the edge of the least `rank` stays. Without an edge it is -1.
    """
    far = np.zeros(len(first) - 1)
    by = np.full(len(first) - 1, _NOBODY, np.int64)
    for i in range(len(order)):
        node = order[i]
        for e in range(first[node], first[node + 1]):
            other = after[e]
            more = far[node] + cost[e] - far[other]
            fits = more > -_SAME and by[other] != _NOBODY and rank[e] < rank[by[other]]
            if more > _SAME or by[other] == _NOBODY or fits:
                far[other] = max(far[node] + cost[e], far[other])
                by[other] = e
    return far, by
