"""Draw the edges of HolisticTraceAnalysis, in its order.

Rows are events sorted by (start, position); nodes are sorted by (time, position, end), two per
event. The kernels append to `edges` from row `at` on, and return the row behind the last edge.
"""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import NONE, Flags, Ints, Numbers
from fastcomm_kernels.graph import Edges, put

OPERATOR, DEPENDENCY, LAUNCH, KERNEL, SYNC = range(5)

# Flags of a row.
LOCKED, BLOCKING = 1, 2

# Roles of a row in the device pass.
WORK, WAIT_EVENT, EVENT_SYNC, STREAM_SYNC, CONTEXT_SYNC = range(5)

_NEAR_NS = 1_500_000  # longest gap between kernels that bind each other


class HtaRows(NamedTuple):
    """Columns of the events, times in ns; a row without nodes has NONE for both."""

    start: Ints
    stop: Ints
    flags: Numbers
    first: Numbers  # the node of its start
    last: Numbers  # the node of its end


class HtaNodes(NamedTuple):
    """Row, time (ns) and side of each node."""

    event: Numbers
    time: Ints
    is_end: Flags


@kernel
def nodes_of(rows: Ints, ends: Ints, start: Ints, stop: Ints, tie: Ints) -> HtaNodes:
    """Return the nodes: starts and stops of events, merged in order of (time, tie).

    Parameters
    ----------
    rows, ends
        Rows of the events sorted by (start, tie), and by (stop, tie).
    start, stop, tie
        By row: times in ns, and the order at equal times.

    """
    n = len(rows)
    nodes = HtaNodes(
        np.empty(2 * n, np.int32), np.empty(2 * n, np.int64), np.empty(2 * n, np.bool_)
    )
    i = j = 0
    for node in range(2 * n):
        takes_end = i == n
        if i < n and j < n:
            a, b = rows[i], ends[j]
            takes_end = stop[b] < start[a] or (stop[b] == start[a] and tie[b] < tie[a])
        row = ends[j] if takes_end else rows[i]
        nodes.event[node], nodes.is_end[node] = row, takes_end
        nodes.time[node] = stop[row] if takes_end else start[row]
        j += takes_end
        i += not takes_end
    return nodes


@kernel
def places(nodes: HtaNodes, rows: int) -> tuple[Numbers, Numbers]:
    """Return the start node and the end node of each of `rows` rows; NONE without nodes."""
    first, last = np.full(rows, NONE, np.int32), np.full(rows, NONE, np.int32)
    for node in range(len(nodes.event)):
        if nodes.is_end[node]:
            last[nodes.event[node]] = node
        else:
            first[nodes.event[node]] = node
    return first, last


@kernel
def lock_edges(rows: HtaRows, nodes: HtaNodes, edges: Edges, at: int) -> int:
    """Add edges among calls with the flag LOCKED, which take one lock, on all threads.

    Parameters
    ----------
    rows, nodes
        Events and their nodes.
    edges, at
        Columns of the edges, written from row `at` on.

    Returns
    -------
    int
        Row behind the last edge.

    """
    opened = np.empty(len(nodes.event), np.int32)
    depth, previous = 0, NONE
    for node in range(len(nodes.event)):
        row = nodes.event[node]
        if not rows.flags[row] & LOCKED:
            continue
        if not nodes.is_end[node]:
            opened[depth] = node
            depth += 1
        else:
            while depth > 0:
                depth -= 1
                source = opened[depth]
                weight = nodes.time[node] - nodes.time[source]
                if nodes.event[source] == row:
                    at = put(edges, at, (source, node), OPERATOR, weight, row)
                else:
                    at = put(edges, at, (source, node), DEPENDENCY, 0, NONE)
            if previous >= 0 and nodes.is_end[previous]:
                at = put(edges, at, (previous, node), DEPENDENCY, 0, NONE)
        previous = node
    return at


@kernel
def is_shared(rows: HtaRows, nodes: HtaNodes, a: int, b: int) -> bool:
    """Return whether `lock_edges` adds the edge between two successive nodes of a thread.

    Parameters
    ----------
    rows, nodes
        Events and their nodes.
    a, b
        The nodes, in order of time.

    """
    locked = rows.flags[nodes.event[a]] & rows.flags[nodes.event[b]] & LOCKED
    return locked != 0 and (not nodes.is_end[a] or nodes.is_end[b])


@kernel
def stack_edges(
    starts: tuple[Numbers, Ints],
    stops: tuple[Numbers, Ints],
    rows: HtaRows,
    nodes: HtaNodes,
    edges: Edges,
    at: int,
) -> int:
    """Add the edges along the call stack of each thread.

    An end closes the top of the stack, whichever row ends.

    Parameters
    ----------
    starts, stops
        Where the rows of each thread begin, with the total at the end; and the rows, by start
        (of `starts`) and by stop (of `stops`).
    rows, nodes
        Events and their nodes. Events without nodes (NONE) only take part in the stack.
    edges, at
        Columns of the edges, written from row `at` on.

    Returns
    -------
    int
        Row behind the last edge.

    """
    stack = np.empty(len(starts[1]), np.int32)
    for group in range(len(starts[0]) - 1):
        i, j = starts[0][group], stops[0][group]
        depth, node_depth, last, owner = 0, 0, NONE, NONE
        while j < stops[0][group + 1]:
            opens = i < starts[0][group + 1]
            opens = opens and rows.start[starts[1][i]] < rows.stop[stops[1][j]]
            if opens:
                row, parent = starts[1][i], stack[depth - 1] if depth > 0 else NONE
                stack[depth] = row
                depth, i, node = depth + 1, i + 1, rows.first[row]
            else:
                depth, j = depth - 1, j + 1
                row, parent = stack[depth], stack[depth - 1] if depth > 0 else NONE
                node = rows.last[row]
            if node < 0:
                continue
            if last >= 0 and not is_shared(rows, nodes, last, node):
                weight = nodes.time[node] - nodes.time[last]
                if opens and node_depth == 0:
                    at = put(edges, at, (last, node), DEPENDENCY, 0, NONE)
                else:
                    if not opens and rows.flags[row] & BLOCKING:
                        weight = 0
                    if not nodes.is_end[last]:
                        owner = nodes.event[last]
                    elif not opens:
                        owner = row
                    at = put(edges, at, (last, node), OPERATOR, weight, owner)
            last, owner = node, parent
            node_depth += 1 if opens else -1
    return at


class Device(NamedTuple):
    """Columns of the rows of the device pass, in its order."""

    row: Ints
    role: Numbers
    stream: Numbers
    call: Numbers  # row of the launching call, or NONE
    waited: Numbers  # row of the work before the event record that the row waits for, or NONE
    waiting: Numbers  # row of the work that is delayed by the row, or NONE
    is_first: Flags  # whether the queue was empty: the launch may bind the work
    zero_launches: bool  # whether launches that do not bind get an edge of weight 0


@kernel
def device_edges(device: Device, rows: HtaRows, nodes: HtaNodes, edges: Edges, at: int) -> int:
    """Add the edges of durations, launches, stream order, and waits.

    Parameters
    ----------
    device
        Device work and synchronizing calls, in order of time.
    rows, nodes
        Events and their nodes.
    edges, at
        Columns of the edges, written from row `at` on.

    Returns
    -------
    int
        Row behind the last edge.

    """
    last = np.full(len(device.row) + 1, NONE, np.int32)
    streams = 0
    waits_for = np.full(len(rows.start), NONE, np.int32)
    for k in range(len(device.row)):
        row, call = device.row[k], device.call[k]
        role, stream = device.role[k], device.stream[k]
        end = rows.last[call] if call >= 0 else NONE
        if role == WAIT_EVENT:
            if device.waited[k] >= 0 and device.waiting[k] >= 0:
                waits_for[device.waiting[k]] = device.waited[k]
        elif role == EVENT_SYNC:
            waited = device.waited[k]
            if waited >= 0 and rows.last[waited] >= 0 and end >= 0:
                at = put(edges, at, (rows.last[waited], end), SYNC, 0, NONE)
        elif role == STREAM_SYNC:
            if last[stream] >= 0 and end >= 0:
                at = put(edges, at, (last[stream], end), SYNC, 0, NONE)
        elif role == CONTEXT_SYNC:
            for other in range(streams):
                if last[other] >= 0 and end >= 0:
                    at = put(edges, at, (last[other], end), SYNC, 0, NONE)
        elif rows.first[row] >= 0:
            waited = waits_for[row]
            waited = rows.last[waited] if waited >= 0 else NONE
            waits_for[row] = NONE
            ends = (waited, last[stream])
            at = work_edges(device, k, ends, rows, nodes, edges, at)
            last[stream] = rows.last[row]
            streams = max(streams, stream + 1)
    return at


@kernel
def work_edges(
    device: Device,
    k: int,
    ends: tuple[int, int],
    rows: HtaRows,
    nodes: HtaNodes,
    edges: Edges,
    at: int,
) -> int:
    """Add the edges of a row of device work: its duration, and what it waits for.

    Parameters
    ----------
    device, k
        Device work, and the row of it.
    ends
        End node of the work that it waits for, and of the work before it on its stream, or
        NONE.
    rows, nodes
        Events and their nodes.
    edges, at
        Columns of the edges, written from row `at` on.

    Returns
    -------
    int
        Row behind the last edge.

    """
    waited, before = ends
    row, call, time = device.row[k], device.call[k], nodes.time
    start, end = rows.first[row], rows.last[row]
    at = put(edges, at, (start, end), OPERATOR, time[end] - time[start], row)
    if waited >= 0:
        at = put(edges, at, (waited, start), SYNC, 0, NONE)
    is_launched = (
        device.is_first[k]
        and (before < 0 or time[before] < rows.start[call])
        and (waited < 0 or time[waited] < rows.start[call])
    )
    if is_launched:
        source = rows.first[call]
        if source >= 0:
            at = put(edges, at, (source, start), LAUNCH, time[start] - time[source], NONE)
    elif (
        before >= 0
        and time[start] - time[before] < _NEAR_NS
        and (waited < 0 or time[waited] < time[before])
    ):
        gap = time[start] - time[before]
        at = put(edges, at, (before, start), KERNEL, gap, nodes.event[before])
    if device.zero_launches and not is_launched and call >= 0 and rows.first[call] >= 0:
        at = put(edges, at, (rows.first[call], start), LAUNCH, 0, NONE)
    return at
