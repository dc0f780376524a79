"""Find what each event had to wait for: constraints that the measured times confirm.

Rows are events sorted by (start, host before device, longer first). Nodes are their starts and
stops in order of time. Every edge goes from a node to a later one, so that the order of the
nodes is topological, and edges are in the order of their targets.
"""

from typing import NamedTuple

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import NONE, Flags, Ints, Numbers
from fastcomm_kernels.graph import Edges, put

OPERATOR, DEPENDENCY, LAUNCH, KERNEL, SYNC, INFERRED, UNEXPLAINED, JOIN = range(8)

# What a call waits for besides `Waits`: nothing, the end of a stream, the end of a device, or
# the last work that was launched before the call and ends inside of it. A mark of a step is no
# call, and what is inside of it not a part of it.
NO_ROLE, FOR_STREAM, FOR_DEVICE, FOR_SOMETHING, MARK = range(5)

# Launches take less: work that starts later waited for something else.
LAUNCH_NS = 20_000
_LOOK_BACK = 64  # most ends of work that are searched

# Number of kinds of edges, for counts of constraints that the times contradict.
CONTRADICTIONS = 8


class ConstraintRows(NamedTuple):
    """Columns of the events; times in ns, `lane` is a stream or thread."""

    start: Ints
    stop: Ints
    lane: Numbers
    is_device: Flags
    is_locked: Flags  # whether the call takes the lock of its process
    call: Numbers  # of device work: row of the call that launched it, or NONE
    role: Numbers  # of a call: NO_ROLE, one of FOR_..., or MARK
    goal: Numbers  # of a call with a role: lane or device that it waits for, or NONE
    # Of device work: whether `Waits` has all that it waits for besides its stream and its
    # launch; and whether its lane tells no order among such work.
    is_known: Flags
    is_unordered: Flags


class Lanes(NamedTuple):
    """Columns of the lanes."""

    process: Numbers
    device: Numbers  # NONE on the host
    forward: Numbers  # of a thread that runs backward: the thread that waits for it, or NONE
    backward: Numbers  # the other way round


class Waits(NamedTuple):
    """Rows that wait for the end of work: row r for `source[first[r]:first[r + 1]]`."""

    first: Numbers
    source: Numbers
    kind: Numbers
    are_known: bool  # whether the trace records waits among streams


class Nodes(NamedTuple):
    """Row, time (ns) and side of each node; the first and the last node of each row."""

    event: Numbers
    time: Ints
    is_end: Flags
    first: Numbers
    last: Numbers


@kernel
def nodes_of(start: Ints, stop: Ints, ends: Ints) -> Nodes:
    """Return the nodes of events: their starts and stops, merged in order of time.

    Stops precede starts at the same time; the nodes of an event without length are adjacent.

    Parameters
    ----------
    start, stop
        Times of the events in ns; rows are sorted by start.
    ends
        Row numbers of all events, sorted by stop.

    """
    n = len(start)
    nodes = Nodes(
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
                nodes.event[node], nodes.is_end[node] = row, is_end == 1
                nodes.time[node] = stop[row] if is_end else start[row]
                if is_end:
                    nodes.last[row] = node
                else:
                    nodes.first[row] = node
                node += 1
    return nodes


class ConstraintState(NamedTuple):
    """The latest events at a point of the scan; nodes or rows, NONE before the first."""

    latest: Numbers  # by lane: the latest node
    ended: Numbers  # by lane: the node of the latest end of work
    top: Numbers  # by lane: the latest row that may still be open
    joined: Numbers  # by lane: the node of the latest end of a call that waited for a device
    below: Numbers  # by row: the row that was open when it started
    closed: Flags  # by row: whether it has ended
    holder: Numbers  # by process: the node of the latest end of a call with the lock
    ends: Numbers  # the nodes of all ends of work
    left_out: Ints  # by kind: number of constraints that the times contradict


@kernel
def no_state(rows: int, lanes: int) -> ConstraintState:
    """Return the state before the first of `rows` events on `lanes` streams and threads."""
    by_lane = np.full((5, lanes), NONE, np.int32)
    return ConstraintState(
        by_lane[0],
        by_lane[1],
        by_lane[2],
        by_lane[3],
        np.full(rows, NONE, np.int32),
        np.zeros(rows, np.bool_),
        by_lane[4],
        np.empty(rows, np.int32),
        np.zeros(CONTRADICTIONS, np.int64),
    )


@kernel
def add(
    edges: Edges,
    at: int,
    ends: tuple[int, int],
    kind: int,
    owner: int,
    time: Ints,
    left_out: Ints,
) -> int:
    """Write an edge to row `at` if its source is before its target; return the next row.

    Other edges are counted in `left_out[kind]`. `ends` are source and target. The weight is
    their difference in `time`, ns by node.
    """
    source, target = ends
    if source >= target:
        left_out[kind] += 1
        return at
    return put(edges, at, ends, kind, time[target] - time[source], owner)


@kernel
def open_row(top: Numbers, below: Numbers, closed: Flags, lane: int) -> int:
    """Return the innermost row that is open on thread `lane`, or NONE.

    `top` (by lane; written) and `below` (by row) are the stacks of `ConstraintState`.
    """
    row = top[lane]
    while row >= 0 and closed[row]:
        row = below[row]
    top[lane] = row
    return int(row)


@kernel
def handed_over(
    node: int, lane: int, may_begin: bool, lanes: Lanes, state: ConstraintState
) -> int:
    """Return the node of the forward or backward thread that precedes a node, or NONE.

    It is the latest node of the other thread, if that is later than the latest node of `lane`.
    The forward thread counts only if `may_begin`, the backward thread only while it has no open
    row.
    """
    other, before = NONE, state.latest[lane]
    if may_begin:
        other = lanes.forward[lane]
    behind = lanes.backward[lane]
    if behind >= 0 and open_row(state.top, state.below, state.closed, behind) < 0:
        other = behind
    return int(state.latest[other]) if other >= 0 and state.latest[other] > before else NONE


@kernel
def synchronize(
    node: int,
    rows: ConstraintRows,
    lanes: Lanes,
    nodes: Nodes,
    state: ConstraintState,
    edges: Edges,
    at: int,
) -> int:
    """Add edges to `node`, the end of a call that waited for a stream or a device.

    They come from the latest ends of work there. Return the row of `edges` behind the last one.
    """
    row = nodes.event[node]
    goal, lane, time = rows.goal[row], rows.lane[row], nodes.time
    if rows.role[row] == FOR_STREAM and goal >= 0 and state.ended[goal] >= 0:
        at = add(edges, at, (state.ended[goal], node), SYNC, NONE, time, state.left_out)
    elif rows.role[row] == FOR_DEVICE:
        for stream in range(len(lanes.device)):
            # Earlier waits of the thread bind it already.
            is_new = state.ended[stream] > state.joined[lane]
            if is_new and (goal < 0 or lanes.device[stream] == goal):
                at = add(
                    edges, at, (state.ended[stream], node), SYNC, NONE, time, state.left_out
                )
        state.joined[lane] = node
    return at


@kernel
def latest_end_inside(
    node: int, ended: int, rows: ConstraintRows, nodes: Nodes, ends: Numbers
) -> int:
    """Return the node of the latest end of work inside a call that was launched before it.

    `node` is the end of the call; `ends[:ended]` are the nodes of all ends of work so far. NONE
    if no such work ended between start and end of the call.
    """
    begin = nodes.first[nodes.event[node]]
    for k in range(ended - 1, -1, -1):
        if ends[k] < begin:
            return NONE
        call = rows.call[nodes.event[ends[k]]]
        if call >= 0 and nodes.first[call] < begin:
            return int(ends[k])
    return NONE


@kernel
def other_stream(
    node: int,
    ended: int,
    rows: ConstraintRows,
    lanes: Lanes,
    nodes: Nodes,
    ends: Numbers,
    own: int,
) -> int:
    """Return the latest end on another stream that a delayed start may wait for, or NONE.

    `node` is the start of work, `ends[:ended]` the nodes of all ends of work so far. A start is
    delayed if it is `LAUNCH_NS` or more after the start of its launch. The end is later than
    `own`, the node of the latest end on the same stream. Its work was launched before, and is
    on the same device. Only the last 64 ends are searched.
    """
    row = nodes.event[node]
    call = rows.call[row]
    if call < 0 or nodes.time[node] - rows.start[call] < LAUNCH_NS:
        return NONE
    bound = max(own, nodes.first[call])
    for k in range(ended - 1, max(ended - 1 - _LOOK_BACK, -1), -1):
        if ends[k] <= bound:
            return NONE
        other = nodes.event[ends[k]]
        first = rows.call[other]
        if (
            first >= 0
            and nodes.first[first] < nodes.first[call]
            and lanes.device[rows.lane[other]] == lanes.device[rows.lane[row]]
        ):
            return int(ends[k])
    return NONE


@kernel
def lock(
    node: int,
    rows: ConstraintRows,
    lanes: Lanes,
    nodes: Nodes,
    holder: Numbers,
    edges: Edges,
    at: int,
) -> int:
    """Add an edge to `node`, the end of a call that had to wait for the lock of its process.

    The edge comes from the previous end of a call with the lock (`holder`, by process;
    written), if that is on another thread and after the start of this call. Return the row
    behind the last edge.
    """
    row = nodes.event[node]
    lane = rows.lane[row]
    before = holder[lanes.process[lane]]
    if before > nodes.first[row] and rows.lane[nodes.event[before]] != lane:
        wait = nodes.time[node] - nodes.time[before]
        at = put(edges, at, (before, node), DEPENDENCY, wait, row)
    holder[lanes.process[lane]] = node
    return at


@kernel
def switches(event: Numbers, lane: Numbers, lanes: Lanes) -> int:
    """Return how often the thread changes from node to node, among threads that hand over.

    `event` is the row of each node, `lane` the lane of each row. Nodes of threads without a
    forward or backward thread in `lanes` are passed over; the first of the others counts as a
    change.
    """
    total, last = 0, NONE
    for node in range(len(event)):
        own = lane[event[node]]
        if lanes.forward[own] >= 0 or lanes.backward[own] >= 0:
            total += own != last
            last = own
    return total


@kernel
def constrain(
    nodes: Nodes, rows: ConstraintRows, lanes: Lanes, waits: Waits, edges: Edges
) -> tuple[int, Ints]:
    """Fill `edges`, which has enough rows, with the constraints of all nodes.

    A node without an explanation gets an edge from the latest node of its lane, or else of all
    lanes. Return the number of edges, and by kind the number that the times contradict.
    """
    state = no_state(len(rows.start), len(lanes.process))
    latest, top, below, closed = state.latest, state.top, state.below, state.closed
    ahead = np.full(
        len(lanes.process), NONE, np.int32
    )  # by lane: the row of the work that started last
    end_of = np.full(len(rows.start), NONE, np.int32)  # by call: the latest end of its work
    time, left_out, at, ended = nodes.time, state.left_out, 0, 0
    hands_over = (lanes.forward >= 0).any()
    for node in range(len(nodes.event)):
        row, is_end, before = nodes.event[node], nodes.is_end[node], at
        lane = rows.lane[row]
        last = latest[lane]
        waiting = waits.first[row + 1] > waits.first[row] and is_end != rows.is_device[row]
        if not rows.is_device[row]:
            around = open_row(top, below, closed, lane)
            if last >= 0:
                kind = OPERATOR if around >= 0 else DEPENDENCY
                at = put(edges, at, (last, node), kind, time[node] - time[last], around)
            if hands_over:
                source = handed_over(node, lane, around < 0 and not is_end, lanes, state)
                if source >= 0:
                    at = add(edges, at, (source, node), DEPENDENCY, NONE, time, left_out)
            closed[row] = is_end or rows.role[row] == MARK
            if not is_end:
                below[row], top[lane] = around, row
            elif rows.role[row] == FOR_SOMETHING:
                source = latest_end_inside(node, ended, rows, nodes, state.ends)
                if source >= 0:
                    at = add(edges, at, (source, node), INFERRED, NONE, time, left_out)
            elif rows.role[row] != NO_ROLE:
                at = synchronize(node, rows, lanes, nodes, state, edges, at)
            if is_end and rows.is_locked[row]:
                at = lock(node, rows, lanes, nodes, state.holder, edges, at)
        elif is_end:
            source, call = nodes.first[row], rows.call[row]
            at = put(edges, at, (source, node), OPERATOR, time[node] - time[source], row)
            closed[row] = True
            state.ended[lane] = state.ends[ended] = node
            ended += 1
            if call >= 0:
                end_of[call] = node
        else:
            call, other = rows.call[row], ahead[lane]
            if rows.is_unordered[row] and other >= 0 and rows.is_unordered[other]:
                other = NONE
            if other >= 0 and closed[other]:
                source = nodes.last[other]
                at = put(edges, at, (source, node), KERNEL, time[node] - time[source], other)
            elif other >= 0:
                left_out[KERNEL] += 1
            # Of a CUDA graph, only the first work on each stream is bound by the launch.
            if call >= 0 and (other < 0 or rows.call[other] != call):
                at = add(edges, at, (nodes.first[call], node), LAUNCH, row, time, left_out)
                if end_of[call] >= 0 and not rows.is_known[row]:
                    at = add(edges, at, (end_of[call], node), INFERRED, NONE, time, left_out)
            if not waits.are_known and not rows.is_known[row]:
                own = state.ended[lane]
                source = other_stream(node, ended, rows, lanes, nodes, state.ends, own)
                if source >= 0:
                    at = add(edges, at, (source, node), INFERRED, NONE, time, left_out)
            ahead[lane] = row
        if waiting:
            for k in range(waits.first[row], waits.first[row + 1]):
                source = nodes.last[waits.source[k]]
                at = add(edges, at, (source, node), waits.kind[k], NONE, time, left_out)
        latest[lane] = node
        if at == before and node > 0:
            source = last if last >= 0 else node - 1
            at = add(edges, at, (source, node), UNEXPLAINED, NONE, time, left_out)
    return at, left_out
