"""The graph of a window by the rules of HolisticTraceAnalysis, edge by edge in its order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.compat.hta_window import Clipped, Linked
from fastcomm.graph.graph import Graph
from fastcomm.trace.columns import codes, codes_in_order, pair_codes
from fastcomm.trace.schema import KIND
from fastcomm_kernels import attribution
from fastcomm_kernels import graph as graphs
from fastcomm_kernels import hta as kernels
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.graph import NONE, Numbers

LOCKED = ("cudaHostAlloc", "cudaLaunchKernel", "cudaMemcpyAsync")
BLOCKING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpyAsync",
)
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipMemsetAsync",
    "hipMemcpyAsync",
    "hipMemcpyWithStream",
    "runFunction - job_prep_and_submit_for_execution",
)
_ROLES = {
    "Stream Wait Event": kernels.WAIT_EVENT,
    "Event Sync": kernels.EVENT_SYNC,
    "Stream Sync": kernels.STREAM_SYNC,
    "Context Sync": kernels.CONTEXT_SYNC,
}


def build(
    clipped: Clipped, data_load: Sequence[str] = (), *, zero_launches: bool = False
) -> Graph:
    """The graph of a window. Its events are rows of the trace."""
    linked = clipped.linked
    rows = linked.rows
    nodes = _nodes(clipped, data_load)
    first, last = kernels.places(nodes, len(rows))
    flags = np.where(rows.named(LOCKED), kernels.LOCKED, 0)
    flags = flags + np.where(rows.named(BLOCKING), kernels.BLOCKING, 0)
    packed = kernels.HtaRows(rows.start, rows.stop, flags.astype(np.int32), first, last)
    device = _device(clipped)._replace(zero_launches=zero_launches)
    contexts = int((device.role == kernels.CONTEXT_SYNC).sum())
    streams = int(device.stream.max(initial=-1)) + 1
    locked = int((flags[nodes.event] & kernels.LOCKED).sum())
    room = 2 * locked + len(nodes.event) + 4 * len(device.row) + contexts * streams
    edges = graphs.room(room)
    count = kernels.lock_edges(packed, nodes, edges, 0)
    starts, stops = _stacks(clipped)
    count = kernels.stack_edges(starts, stops, packed, nodes, edges, count)
    count = kernels.device_edges(device, packed, nodes, edges, count)
    return _of_trace(Graph.of(nodes, edges, count), rows.row)


def _of_trace(graph: Graph, row: Ints) -> Graph:
    """The same graph with rows of the trace for rows of the window's table."""
    numbers = row.astype(np.int32)
    return graph.owned_by(
        numbers[graph.event], np.where(graph.owner == NONE, NONE, numbers[graph.owner])
    )


def _nodes(clipped: Clipped, data_load: Sequence[str]) -> kernels.HtaNodes:
    """Two nodes of every operator, call, loading of data, and launched work."""
    linked = clipped.linked
    rows = linked.rows
    has = rows.of_kind("cpu_op", "runtime")
    for text in data_load:
        has |= rows.containing(text)
    has |= (rows.stream != -1) & ((rows.correlation >= 0) | (linked.partner >= 0))
    having = clipped.rows[has[clipped.rows]]
    return kernels.nodes_of(
        having, _by_stop(rows.stop, rows.position, having), rows.start, rows.stop, rows.position
    )


def _by_stop(stop: Ints, tie: Ints, rows: Ints) -> Ints:
    """The rows in order of (stop, tie)."""
    order: Ints = rows[np.argsort(stop[rows], kind="stable")]
    graphs.settle(order, stop, tie)
    return order


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rows by thread; -1 for rows of no host thread."""

    group: Numbers  # of each row of the window
    count: int


def _threads(clipped: Clipped) -> _Groups:
    """The host threads, in order of process and thread; backward may run on that of forward."""
    rows = clipped.linked.rows
    inside = np.zeros(len(rows), np.bool_)
    inside[clipped.rows] = True
    pairs = list(
        zip(*(rows.lanes[key].to_pylist() for key in ("process", "thread")), strict=True)
    )
    lane = rows.lane[clipped.rows]
    in_window = np.flatnonzero(np.bincount(lane, minlength=len(pairs))).tolist()
    asked = rows.of_kind("cpu_op", "annotation") & inside
    words = [
        {pairs[lane][1] for lane in set(rows.lane[asked & rows.containing(word)].tolist())}
        for word in ("forward", "autograd")
    ]
    if all(len(threads) == 1 and threads != {"0"} for threads in words):
        (forward,), (backward,) = words
        pairs = [(p, forward if t == backward else t) for p, t in pairs]
    order = sorted(
        {pairs[lane] for lane in in_window}, key=lambda pair: [*map(_sortable, pair)]
    )
    number = {pair: place for place, pair in enumerate(order)}
    of_lane = np.array([number.get(pair, -1) for pair in pairs], np.int32)
    group = of_lane[lane]
    is_device = np.zeros(len(order), np.bool_)
    is_device[group[rows.stream[clipped.rows] >= 0]] = True
    return _Groups(np.where(is_device[group], np.int32(-1), group), len(order))


def _sortable(word: str) -> tuple[bool, int, str]:
    """Numbers before words."""
    is_number = word.lstrip("-").isdecimal()
    return not is_number, int(word) if is_number else 0, word


def _stacks(clipped: Clipped) -> tuple[tuple[Numbers, Ints], tuple[Numbers, Ints]]:
    """The rows of every host thread by start, the longer first, and by stop."""
    rows, window = clipped.linked.rows, clipped.rows
    threads = _threads(clipped)
    group = np.full(len(rows), -1, np.int32)
    group[window] = threads.group
    starts = window.copy()
    graphs.settle(starts, rows.start, -rows.stop)
    stops = window[np.argsort(rows.stop[window], kind="stable")]
    by_start = graphs.index(group[starts], threads.count)
    by_stop = graphs.index(group[stops], threads.count)
    return (by_start[0], starts[by_start[1]]), (by_stop[0], stops[by_stop[1]])


def _device(clipped: Clipped) -> kernels.Device:
    """The rows of the device pass, in its order, with what was launched and recorded before."""
    linked = clipped.linked
    rows, window = linked.rows, clipped.rows
    is_sync = rows.kind == KIND["sync"]
    role = np.zeros(len(rows), np.int32)
    for name, number in _ROLES.items():
        role[is_sync & rows.named((name,))] = number
    on_device = (rows.stream != -1) | rows.named(("Event Sync", "Context Sync"))
    linked_to = (rows.correlation >= 0) | (linked.partner >= 0)
    row = window[(on_device & linked_to)[window]]
    time = np.where(role > 0, rows.stop, rows.start)
    row = _by_stop(time, rows.position, row)
    launches = _launches(linked)
    queue = _queue(linked, launches)
    waited, behind = _recorded(linked, launches)
    call = linked.partner[row]
    of_call = np.append(behind, np.int32(NONE))[call]
    is_first = (call >= 0) & (np.append(queue, NONE)[call] == 1) & (queue[row] == 0)
    stream = _stream_codes(rows.stream[row], role[row])
    return kernels.Device(row, role[row], stream, call, waited[row], of_call, is_first, False)


def _stream_codes(stream: Ints, role: Numbers) -> Numbers:
    """Streams by number, those with work first, as the work comes."""
    (_, code), _ = codes_in_order(stream[role == kernels.WORK], stream)
    return code


def _launches(linked: Linked) -> Ints:
    """Rows of the calls that HTA knows as launches, in order of time."""
    found: Ints = np.flatnonzero(linked.has_partner & linked.rows.named(LAUNCHES))
    return found


def _queue(linked: Linked, launches: Ints) -> Numbers:
    """The queue length at each launch and each start of its work."""
    rows = linked.rows
    (code,), count = codes(rows.correlation)
    known = np.zeros(count, np.bool_)
    known[code[launches]] = True
    works = np.flatnonzero((rows.stream != -1) & known[code])
    stream = rows.stream.copy()
    stream[launches] = rows.stream[linked.partner[launches]]
    (numbers,), streams = codes(stream)
    return attribution.queue_lengths(launches, works, numbers, rows.start, streams)


def _recorded(linked: Linked, launches: Ints) -> tuple[Numbers, Numbers]:
    """The work behind which each waiting row's record comes; the work that a wait holds up.

    Both are by row, NONE where there is none.
    """
    rows = linked.rows
    nothing = np.full(len(rows), NONE, np.int32)
    records = np.flatnonzero(rows.named(("cudaEventRecord",)))
    if not len(records):
        return nothing, nothing
    launches = launches[linked.has_partner[linked.partner[launches]]]
    work = linked.partner[launches]
    return (
        _work_before(linked, launches, work, records),
        _work_behind(linked, launches, work),
    )


def _work_before(linked: Linked, launches: Ints, work: Numbers, records: Ints) -> Numbers:
    """For each row that waits for a record: the work launched last before that record."""
    rows, process = linked.rows, _processes(linked)
    waits = np.flatnonzero(rows.wait_stream > -1)
    (of_wait, of_record, of_row), count = codes(
        rows.wait_record[waits], rows.correlation[records], rows.wait_record
    )
    target = np.full((count + 1, 2), NULL, np.int64)
    target[of_wait] = np.stack([process[waits], rows.wait_stream[waits]], axis=1)
    goal = target[of_record]
    known = goal[:, 1] != NULL
    records, goal, of_record = records[known], goal[known], of_record[known]
    lane, mark_lane, lanes = pair_codes(
        (process[work], rows.stream[work]), (goal[:, 0], goal[:, 1])
    )
    before = attribution.launches_before(
        (launches, lane), (records, mark_lane), rows.start, lanes
    )
    by_record = np.full(count + 1, NONE, np.int32)
    by_record[of_record] = np.where(before >= 0, linked.partner[before], NONE)
    return by_record[of_row]


def _work_behind(linked: Linked, launches: Ints, work: Numbers) -> Numbers:
    """For each wait: the work of the next launch of its thread on the stream that waits."""
    rows = linked.rows
    marks = np.flatnonzero(rows.named(("cudaStreamWaitEvent",)) & linked.has_partner)
    lane, mark_lane, lanes = pair_codes(
        (rows.lane[launches], rows.stream[work]),
        (rows.lane[marks], rows.stream[linked.partner[marks]]),
    )
    behind = attribution.launches_behind(
        (launches, lane), (marks, mark_lane), rows.start, lanes
    )
    found = np.full(len(rows), NONE, np.int32)
    found[marks] = np.where(behind >= 0, linked.partner[behind], NONE)
    return found


def _processes(linked: Linked) -> Ints:
    """The process of each row, as a number."""
    words = linked.rows.lanes["process"].combine_chunks().dictionary_encode()
    found: Ints = words.indices.to_numpy().astype(np.int64)[linked.rows.lane]
    return found
