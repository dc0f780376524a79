"""What a point in time had to wait for: constraints that the measured times confirm.

Rows are events sorted by (start, host before device, longer first). Nodes are their starts and
stops in order of time; every edge goes from a node to one behind it, so that the order of the
nodes is topological, and edges come in order of their targets.
"""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.graph import NONE, Column, Edges, Flags, Numbers, put

OPERATOR, DEPENDENCY, LAUNCH, KERNEL, SYNC, INFERRED, UNEXPLAINED = range(7)

# What a call waits for besides `Waits`: the end of a stream, of a device, of whatever was
# launched before and ends inside of it.
NO_ROLE, FOR_STREAM, FOR_DEVICE, FOR_SOMETHING = range(4)

# What is left out, because the times contradict it: by kind.
CONTRADICTIONS = 7


class Rows(NamedTuple):
    """Columns of the events."""

    start: Column
    stop: Column
    lane: Numbers
    is_device: Flags
    is_locked: Flags  # takes the lock of its process
    call: Numbers  # of work: row of the call that launched it, or NONE
    role: Numbers  # of a call
    goal: Numbers  # of a call with a role: the lane or device that it waits for, or NONE


class Lanes(NamedTuple):
    """Columns of the lanes."""

    process: Numbers
    device: Numbers  # NONE on the host
    forward: Numbers  # of a thread that runs backward: the thread that waits for it, or NONE
    backward: Numbers  # the other way round


class Waits(NamedTuple):
    """Rows that wait for the end of work: `source[first[row]:first[row + 1]]`."""

    first: Numbers
    source: Numbers
    kind: Numbers


class Nodes(NamedTuple):
    """Columns of the nodes, and the nodes of each row."""

    event: Numbers
    time: Column
    is_end: Flags
    first: Numbers
    last: Numbers


@kernel
def nodes_of(start: Column, stop: Column, ends: Column) -> Nodes:
    """All starts, and all stops in the order of `ends`, as one.

    What ends at a time comes before what starts then; an event without length stays whole.
    """
    n = len(start)
    found = Nodes(
        np.empty(2 * n, np.int32),
        np.empty(2 * n, np.int64),
        np.empty(2 * n, np.bool_),
        np.empty(n, np.int32),
        np.empty(n, np.int32),
    )
    i = j = node = 0
    while node < 2 * n:
        while j < n and stop[ends[j]] == start[ends[j]]:
            j += 1
        takes_end = j < n and (i == n or stop[ends[j]] <= start[i])
        row = ends[j] if takes_end else i
        j, i = j + takes_end, i + (not takes_end)
        for is_end in range(2):
            if takes_end == (is_end == 1) or (is_end == 1 and stop[row] == start[row]):
                found.event[node], found.is_end[node] = row, is_end == 1
                found.time[node] = stop[row] if is_end else start[row]
                if is_end:
                    found.last[row] = node
                else:
                    found.first[row] = node
                node += 1
    return found


class State(NamedTuple):
    """What has happened until now."""

    latest: Numbers  # by lane: its latest node
    ended: Numbers  # by lane: the latest end of work
    ahead: Numbers  # by lane: the row of the work that started last
    top: Numbers  # by lane: the latest row that may still be open
    below: Numbers  # by row: the one that was open when it started
    closed: Flags  # by row
    of_call: Numbers  # by row: the latest end of the work that it launched
    holder: Numbers  # by process: the latest end of a call that had its lock
    joined: Numbers  # by lane: the latest end of a call that waited for a whole device
    ends: Numbers  # nodes: all ends of work
    left_out: Column  # by kind: constraints that the times contradict
    counts: Column  # edges, ends


@kernel
def no_state(rows: int, lanes: int, processes: int) -> State:
    """Nothing has happened."""
    by_lane = np.full((5, lanes), NONE, np.int32)
    return State(
        by_lane[0],
        by_lane[1],
        by_lane[2],
        by_lane[3],
        np.full(rows, NONE, np.int32),
        np.zeros(rows, np.bool_),
        np.full(rows, NONE, np.int32),
        np.full(processes, NONE, np.int32),
        by_lane[4],
        np.empty(rows, np.int32),
        np.zeros(CONTRADICTIONS, np.int64),
        np.zeros(2, np.int64),
    )


@kernel
def add(
    state: State, edges: Edges, ends: tuple[int, int], kind: int, owner: int, nodes: Nodes
) -> None:
    """Append an edge, or count it as left out where its source is not before its target."""
    source, target = ends
    if source >= target:
        state.left_out[kind] += 1
    else:
        weight = nodes.time[target] - nodes.time[source]
        state.counts[0] = put(edges, state.counts[0], ends, kind, weight, owner)


@kernel
def open_row(state: State, lane: int) -> int:
    """The row that started last on a thread and has not ended, or NONE."""
    row = state.top[lane]
    while row >= 0 and state.closed[row]:
        row = state.below[row]
    state.top[lane] = row
    return row


@kernel
def hand_over(
    node: int, lane: int, inside: bool, lanes: Lanes, state: State, edges: Edges, nodes: Nodes
) -> None:
    """Forward and backward wait for each other: one begins where the other is."""
    other, before = lanes.forward[lane], state.latest[lane]
    if inside or nodes.is_end[node]:
        other = NONE
    if lanes.backward[lane] >= 0 and open_row(state, lanes.backward[lane]) < 0:
        other = lanes.backward[lane]
    if other >= 0 and state.latest[other] > before:
        add(state, edges, (state.latest[other], node), DEPENDENCY, NONE, nodes)


@kernel
def host_edges(
    node: int,
    rows: Rows,
    lanes: Lanes,
    waits: Waits,
    devices: Numbers,
    state: State,
    edges: Edges,
    nodes: Nodes,
) -> None:
    """A point on a thread: behind the one before it, and behind what its call waited for."""
    row = nodes.event[node]
    lane = rows.lane[row]
    around = open_row(state, lane)
    if state.latest[lane] >= 0:
        kind = OPERATOR if around >= 0 else DEPENDENCY
        add(state, edges, (state.latest[lane], node), kind, around, nodes)
    hand_over(node, lane, around >= 0, lanes, state, edges, nodes)
    state.latest[lane] = node
    if not nodes.is_end[node]:
        state.below[row], state.top[lane] = around, row
        return
    state.closed[row] = True
    for k in range(waits.first[row], waits.first[row + 1]):
        source = nodes.last[waits.source[k]]
        add(state, edges, (source, node), waits.kind[k], NONE, nodes)
    if rows.role[row] != NO_ROLE:
        synchronize(node, rows, lanes, devices, state, edges, nodes)
    if rows.is_locked[row]:
        process = lanes.process[lane]
        before = state.holder[process]
        if before > nodes.first[row] and rows.lane[nodes.event[before]] != lane:
            add(state, edges, (before, node), DEPENDENCY, row, nodes)
        state.holder[process] = node


@kernel
def synchronize(
    node: int,
    rows: Rows,
    lanes: Lanes,
    devices: Numbers,
    state: State,
    edges: Edges,
    nodes: Nodes,
) -> None:
    """The end of a call that waited for a stream, a device, or nobody says what."""
    row = nodes.event[node]
    goal, begin = rows.goal[row], nodes.first[row]
    if rows.role[row] == FOR_STREAM and goal >= 0 and state.ended[goal] >= 0:
        add(state, edges, (state.ended[goal], node), SYNC, NONE, nodes)
    elif rows.role[row] == FOR_DEVICE:
        lane = rows.lane[row]
        for k in range(len(devices)):
            stream = devices[k]
            # What the thread has waited for before binds it already.
            is_new = state.ended[stream] > state.joined[lane]
            if is_new and (goal < 0 or lanes.device[stream] == goal):
                add(state, edges, (state.ended[stream], node), SYNC, NONE, nodes)
        state.joined[lane] = node
    elif rows.role[row] == FOR_SOMETHING:
        k = state.counts[1] - 1
        while k >= 0 and state.ends[k] > begin:
            call = rows.call[nodes.event[state.ends[k]]]
            if call >= 0 and nodes.first[call] < begin:
                add(state, edges, (state.ends[k], node), INFERRED, NONE, nodes)
                break
            k -= 1


@kernel
def device_edges(
    node: int, rows: Rows, waits: Waits, state: State, edges: Edges, nodes: Nodes
) -> None:
    """A start or an end of work: behind its launch, the work before it, and what it waits for."""
    row = nodes.event[node]
    lane, call = rows.lane[row], rows.call[row]
    state.latest[lane] = node
    if nodes.is_end[node]:
        add(state, edges, (nodes.first[row], node), OPERATOR, row, nodes)
        state.closed[row] = True
        state.ended[lane] = node
        state.ends[state.counts[1]] = node
        state.counts[1] += 1
        if call >= 0:
            state.of_call[call] = node
        return
    ahead = state.ahead[lane]
    state.ahead[lane] = row
    if ahead >= 0 and not state.closed[ahead]:
        state.left_out[KERNEL] += 1
    elif ahead >= 0:
        add(state, edges, (nodes.last[ahead], node), KERNEL, ahead, nodes)
    # Of a graph, the first work on a stream is launched; the rest follows it.
    if call >= 0 and (ahead < 0 or rows.call[ahead] != call):
        add(state, edges, (nodes.first[call], node), LAUNCH, row, nodes)
        if state.of_call[call] >= 0:
            add(state, edges, (state.of_call[call], node), INFERRED, NONE, nodes)
    for k in range(waits.first[row], waits.first[row + 1]):
        add(state, edges, (nodes.last[waits.source[k]], node), waits.kind[k], NONE, nodes)


@kernel
def constrain(
    nodes: Nodes, rows: Rows, lanes: Lanes, waits: Waits, edges: Edges
) -> tuple[int, Column]:
    """Fill `edges`; how many there are, and how many were left out, by kind.

    A node that nothing explains is behind the latest of its lane, or else of all.
    """
    state = no_state(len(rows.start), len(lanes.process), len(lanes.process))
    devices = np.flatnonzero(lanes.device >= 0).astype(np.int32)
    for node in range(len(nodes.event)):
        row = nodes.event[node]
        before, latest = state.counts[0], state.latest[rows.lane[row]]
        if rows.is_device[row]:
            device_edges(node, rows, waits, state, edges, nodes)
        else:
            host_edges(node, rows, lanes, waits, devices, state, edges, nodes)
        if state.counts[0] == before and node > 0:
            source = latest if latest >= 0 else node - 1
            add(state, edges, (source, node), UNEXPLAINED, NONE, nodes)
    return state.counts[0], state.left_out


@kernel
def binding(
    last: int, first: Numbers, source: Numbers, time: Column, is_device: Flags
) -> tuple[Numbers, Column]:
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
            a, b = source[best], source[e]
            difference = time[b] - time[a]
            if difference == 0:
                difference = np.int64(is_device[b]) - np.int64(is_device[a])
            if difference > 0 or (difference == 0 and b > a):
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
def replay(first: Numbers, source: Numbers, weight: Column, begin: int) -> tuple[Column, Numbers]:
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
