"""Build the graph of a window by the rules of HolisticTraceAnalysis.

`build` adds the edges in the order of HTA.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.critical_path.rules import EventDescriptions, EventFact, PathRules, short_name
from fastcomm.critical_path.window import TimeRange, WindowError, chosen, instances
from fastcomm.files import place
from fastcomm.formats.stream import find
from fastcomm.graph.graph import EDGE_KIND, Graph, LongestPath, longest_path
from fastcomm.regexes import is_match
from fastcomm.trace.columns import codes, codes_in_order, pair_codes, text_codes
from fastcomm.trace.events import EventRows
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import graph as graphs
from fastcomm_kernels import hta as kernels
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints, Numbers

_STEP = r"^ProfilerStep#(\d+)"
# Processes of the events in which the profiler describes itself, of category "Trace".
_SPANS = ("Spans", "Traces")
_FLOAT = re.compile(rb'"ts"\s*:\s*-?\d+[.eE]')
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
SEARCHED_FROM_NS = -1000  # weights up to this count as 0 in HTA's search
_COMM = re.compile(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """The events of a rank, rounded and trimmed, with links between launches and work."""

    rows: EventRows
    linking: Flags  # device work and waits, which calls link to
    partner: Numbers  # row of the linked event, or NONE
    has_partner: Flags  # False if the partner is the first event of the file, as in HTA
    origin: int  # ns of the time 0
    has_steps: bool  # several steps; HTA's table then begins with the `linking` rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """The events of a window."""

    linked: Linked
    rows: Ints  # of `linked`
    window: TimeRange


def linked(trace: Trace, *, keep_last: bool = False) -> Linked:
    """Prepare the events of a rank as HTA does.

    Parameters
    ----------
    trace
        The rank, with all events.
    keep_last
        Keep the last profiled step.

    """
    rows = EventRows.whole(trace)
    spans = np.isin(np.array(trace.lanes["process"].to_pylist(), object), _SPANS)
    if spans.any():
        rows = rows.take((rows.kind != KIND["other"]) | ~spans[rows.lane])
    rows = replace(
        rows,
        start=rows.start - trace.meta.base,
        stream=np.where(rows.stream == NULL, -1, rows.stream),
        correlation=np.where(rows.correlation == NULL, -1, rows.correlation),
        # Writable like the others: kernels are compiled anew for columns that are not.
        position=rows.position.copy(),
    )
    rows = _rounded(rows, trace)
    order = np.arange(len(rows))
    graphs.settle(order, rows.start, rows.position)
    if (np.diff(order) < 0).any():
        rows = rows.take(order)
    linking = (rows.stream >= 0) & (rows.correlation >= 0)
    linking |= rows.named(("Event Sync", "Context Sync"))
    partner = _partners(rows, linking)
    origin = int(rows.start[0]) if len(rows) else 0
    rows = replace(rows, start=rows.start - origin, stop=rows.stop - origin)
    whole = Linked(
        rows=rows,
        linking=linking,
        partner=partner,
        has_partner=(partner >= 0) & (rows.position[partner] > 0),
        origin=origin + trace.meta.base,
        has_steps=len(np.unique(rows.name[rows.matching(_STEP)])) > 1,
    )
    return _trimmed(whole) if whole.has_steps and not keep_last else whole


def _rounded(rows: EventRows, trace: Trace) -> EventRows:
    """Return the rows with their ends on the clock of the file, where their starts are already.

    Times are ns. If the file has fractions of us, starts are rounded up and ends down to whole
    us, computed as float64 as HTA does after it has parsed the JSON text.
    """
    stop = rows.stop - trace.meta.base
    if not _is_fractional(rows.start, stop, trace):
        return replace(rows, stop=stop)
    start, length = _doubles(rows.start), _doubles(stop - rows.start)
    return replace(
        rows,
        start=np.ceil(start).astype(np.int64) * 1000,
        stop=np.floor(start + length).astype(np.int64) * 1000,
    )


def _is_fractional(start: Ints, stop: Ints, trace: Trace) -> bool:
    """Return whether the file has a start with a decimal point; HTA then rounds all times."""
    if (start % 1000).any():
        return True
    # A start with a decimal point may be of an event that was not read; this matters only for
    # ends with fractions.
    return bool((stop % 1000).any()) and find(place(trace.meta.path), _FLOAT) is not None


def _doubles(ns: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return nanoseconds as microseconds, each the float64 nearest to its decimal text."""
    integer, fraction = np.divmod(ns, 1000)
    return integer.astype(np.float64) + fraction / 1000.0


def _partners(rows: EventRows, linking: Flags) -> Numbers:
    """Return the row with the same correlation id (launch or work) of each row, or NONE.

    A row whose correlation id is unique is linked to the first event of the file, as in HTA.
    """
    (code,), count = codes(np.where(rows.correlation == -1, NULL, rows.correlation))
    partner = matching.partners(code, count, linking, rows.position)
    zero = np.flatnonzero(rows.position == 0)
    if len(zero):
        partner[(partner == NONE) & (rows.correlation >= 0)] = zero[0]
    return partner


def _trimmed(whole: Linked) -> Linked:
    """Drop the last profiled step, and the work that it launched."""
    rows = whole.rows
    marks = rows.matching(_STEP) & ~whole.linking
    if not marks.any():
        return whole
    keep = ~whole.linking & (rows.start < rows.start[marks].max())
    (code,), count = codes(rows.correlation)
    launched = np.zeros(count + 1, np.bool_)
    launched[code[keep]] = True
    keep |= whole.linking & launched[code]
    place = np.cumsum(keep, dtype=np.int32) - 1
    partner = whole.partner[keep]
    partner = np.where((partner >= 0) & keep[partner], place[partner], NONE).astype(np.int32)
    return replace(
        whole,
        rows=rows.take(keep),
        linking=whole.linking[keep],
        partner=partner,
        has_partner=whole.has_partner[keep] & (partner >= 0),
    )


def clip(linked: Linked, annotation: str, instance: object, *, exact: bool = False) -> Clipped:
    """Select the rows of a window.

    Parameters
    ----------
    linked
        The rank.
    annotation
        Name of the annotation, or a part of it; "" for the whole trace.
    instance
        Number of the annotation, or the first and the last number.
    exact
        Whether the annotation is a whole name.

    Raises
    ------
    WindowError
        If there is no such window.

    """
    rows = linked.rows
    window = TimeRange(start=0, stop=int(rows.stop.max(initial=0)))
    inside = np.ones(len(rows), np.bool_)
    if annotation:
        marks = _marks(linked, annotation, instances(instance), exact)
        window = TimeRange(start=int(rows.start[marks].min()), stop=int(rows.stop[marks].max()))
        inside = (rows.start >= window.start) & (rows.start <= window.stop)
    host = inside & (rows.stream == -1) & (rows.stop > rows.start)
    reached = np.zeros(len(rows), np.bool_)
    reached[linked.partner[host & (linked.partner >= 0)]] = True
    selected = host | (reached & (rows.stream != -1)) | rows.named(("Stream Wait Event",))
    return Clipped(linked=linked, rows=np.flatnonzero(selected), window=window)


def _marks(linked: Linked, annotation: str, numbers: tuple[int, int], exact: bool) -> Ints:
    """Return the rows of an annotation, from a first to a last instance.

    HTA numbers the matching rows in the order of its table, not by time.
    """
    rows = linked.rows
    is_match = rows.named((annotation,)) if exact else rows.containing(annotation)
    marks = np.flatnonzero(is_match)
    if not len(marks):
        raise WindowError.no_annotation(annotation)
    comes_later = linked.has_steps & ~linked.linking[marks]
    marks = marks[np.lexsort((rows.position[marks], comes_later))]
    return chosen(marks, annotation, numbers)


def build(
    clipped: Clipped, data_load: Sequence[str] = (), *, zero_launches: bool = False
) -> Graph:
    """Build the graph of a window; its events are rows of the trace.

    Parameters
    ----------
    clipped
        The events of the window.
    data_load
        Texts in the names of events that load data.
    zero_launches
        Add an edge of weight 0 for each launch.

    """
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
    return Graph.of(nodes, edges, count).renumbered(np.append(rows.row, NONE).astype(np.int32))


def _nodes(clipped: Clipped, data_load: Sequence[str]) -> kernels.HtaNodes:
    """Return the two nodes of each operator, call, data loader event and launched work."""
    linked = clipped.linked
    rows = linked.rows
    is_node = rows.of_kind("cpu_op", "runtime")
    for text in data_load:
        is_node |= rows.containing(text)
    is_node |= (rows.stream != -1) & ((rows.correlation >= 0) | (linked.partner >= 0))
    used = clipped.rows[is_node[clipped.rows]]
    return kernels.nodes_of(
        used, _by_stop(rows.stop, rows.position, used), rows.start, rows.stop, rows.position
    )


def _by_stop(stop: Ints, tie: Ints, rows: Ints) -> Ints:
    """Sort rows by (stop, tie)."""
    order: Ints = rows[np.argsort(stop[rows], kind="stable")]
    graphs.settle(order, stop, tie)
    return order


@dataclass(frozen=True, slots=True)
class _Groups:
    """Number of the host thread of each row of a window; -1 for other rows."""

    group: Numbers
    count: int  # threads


def _threads(clipped: Clipped) -> _Groups:
    """Number the host threads by process and thread.

    If forward and backward have one thread each, backward counts as part of the forward thread.
    """
    rows = clipped.linked.rows
    inside = np.zeros(len(rows), np.bool_)
    inside[clipped.rows] = True
    pairs = list(
        zip(*(rows.lanes[key].to_pylist() for key in ("process", "thread")), strict=True)
    )
    lane = rows.lane[clipped.rows]
    in_window = np.flatnonzero(np.bincount(lane, minlength=len(pairs))).tolist()
    is_named = rows.of_kind("cpu_op", "annotation") & inside
    threads = [
        {pairs[lane][1] for lane in set(rows.lane[is_named & rows.containing(text)].tolist())}
        for text in ("forward", "autograd")
    ]
    if all(len(names) == 1 and names != {"0"} for names in threads):
        (forward,), (backward,) = threads
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


def _sortable(label: str) -> tuple[bool, int, str]:
    """Return a key that sorts numbers before texts."""
    is_number = label.lstrip("-").isdecimal()
    return not is_number, int(label) if is_number else 0, label


def _stacks(clipped: Clipped) -> tuple[tuple[Numbers, Ints], tuple[Numbers, Ints]]:
    """Index the rows of each host thread, by start (the longer first) and by stop."""
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
    """Return the device events in the order of HTA's device pass, with their launches."""
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
    launches = launch_rows(linked)
    queue = queue_lengths(linked, launches)
    waited, behind = _recorded(linked, launches)
    call = linked.partner[row]
    of_call = np.append(behind, np.int32(NONE))[call]
    is_first = (call >= 0) & (np.append(queue, NONE)[call] == 1) & (queue[row] == 0)
    stream = _stream_codes(rows.stream[row], role[row])
    return kernels.Device(row, role[row], stream, call, waited[row], of_call, is_first, False)


def _stream_codes(stream: Ints, role: Numbers) -> Numbers:
    """Number the streams: those with work first, in the order of their first work."""
    (_, code), _ = codes_in_order(stream[role == kernels.WORK], stream)
    return code


def launch_rows(linked: Linked) -> Ints:
    """Return the rows of calls that are launches in HTA, by start."""
    rows: Ints = np.flatnonzero(linked.has_partner & linked.rows.named(LAUNCHES))
    return rows


def queue_lengths(linked: Linked, launches: Ints) -> Numbers:
    """Return the queue length of its stream at each launch and each start of work."""
    rows = linked.rows
    (code,), count = codes(rows.correlation)
    is_launched = np.zeros(count, np.bool_)
    is_launched[code[launches]] = True
    works = np.flatnonzero((rows.stream != -1) & is_launched[code])
    stream = rows.stream.copy()
    stream[launches] = rows.stream[linked.partner[launches]]
    (numbers,), streams = codes(stream)
    return matching.queue_lengths(launches, works, numbers, rows.start, streams)


def _recorded(linked: Linked, launches: Ints) -> tuple[Numbers, Numbers]:
    """Return the work before and the work behind each recorded event of CUDA.

    `launches` are rows of launching calls. Both results have a value per row of `linked`: the
    row of the work before the call to `cudaEventRecord`, and the row of the work that a wait
    for the event delays; NONE elsewhere.
    """
    rows = linked.rows
    no_work = np.full(len(rows), NONE, np.int32)
    records = np.flatnonzero(rows.named(("cudaEventRecord",)))
    if not len(records):
        return no_work, no_work
    launches = launches[linked.has_partner[linked.partner[launches]]]
    work = linked.partner[launches]
    return (
        _work_before(linked, launches, work, records),
        _work_behind(linked, launches, work),
    )


def _work_before(linked: Linked, launches: Ints, work: Numbers, records: Ints) -> Numbers:
    """Return for each row that waits for a record the last work launched before the record."""
    rows, process = linked.rows, _processes(linked)
    waits = np.flatnonzero(rows.wait_stream > -1)
    (of_wait, of_record, of_row), count = codes(
        rows.wait_record[waits], rows.correlation[records], rows.wait_record
    )
    target = np.full((count + 1, 2), NULL, np.int64)
    target[of_wait] = np.stack([process[waits], rows.wait_stream[waits]], axis=1)
    goal = target[of_record]
    is_awaited = goal[:, 1] != NULL
    records, goal, of_record = records[is_awaited], goal[is_awaited], of_record[is_awaited]
    lane, mark_lane, lanes = pair_codes(
        (process[work], rows.stream[work]), (goal[:, 0], goal[:, 1])
    )
    before = matching.launches_before((launches, lane), (records, mark_lane), rows.start, lanes)
    by_record = np.full(count + 1, NONE, np.int32)
    by_record[of_record] = np.where(before >= 0, linked.partner[before], NONE)
    return by_record[of_row]


def _work_behind(linked: Linked, launches: Ints, work: Numbers) -> Numbers:
    """Return, for each row of `linked`, the work that a wait for an event delays.

    The work is a row of the next launch of the thread of a `cudaStreamWaitEvent` on the stream
    that waits; NONE for other rows and without such a launch. `launches` and `work` have the
    rows of launches and of what each launches.
    """
    rows = linked.rows
    marks = np.flatnonzero(rows.named(("cudaStreamWaitEvent",)) & linked.has_partner)
    lane, mark_lane, lanes = pair_codes(
        (rows.lane[launches], rows.stream[work]),
        (rows.lane[marks], rows.stream[linked.partner[marks]]),
    )
    behind = matching.launches_behind((launches, lane), (marks, mark_lane), rows.start, lanes)
    work_behind = np.full(len(rows), NONE, np.int32)
    work_behind[marks] = np.where(behind >= 0, linked.partner[behind], NONE)
    return work_behind


def _processes(linked: Linked) -> Ints:
    """Return the number of each row's process."""
    return text_codes(linked.rows.lanes["process"])[linked.rows.lane]


def _edge_class(kind: str, _on_device: bool, owner: EventFact, loads: Sequence[str]) -> str:
    """Return HTA's class of an edge's time; "" for kinds of edges without one."""
    if kind == "kernel_kernel":
        return "gpu_kernel_kernel_overhead"
    if kind == "launch":
        return "gpu_kernel_launch_overhead"
    if kind != "operator":
        return ""
    name, _, stream, _, _ = owner
    short = short_name(str(name or ""))
    if stream is None or stream == -1:
        is_load = any(is_match(text, short) for text in loads)
        return "data_loading" if is_load else "cpu_bound"
    return "gpu_communication_bound" if _COMM.match(short) else "gpu_compute_bound"


def _search(
    graph: Graph, events: EventDescriptions, _: Flags
) -> tuple[LongestPath | None, None]:
    """Search for the longest path; None if there is a cycle, or a stream waits for itself."""
    searched = np.where(graph.weight <= SEARCHED_FROM_NS, 0, graph.weight)
    return longest(graph, events, searched), None


def longest(graph: Graph, events: EventDescriptions, weight: Ints) -> LongestPath | None:
    """Return the longest path; None if there is a cycle, or a stream waits for itself.

    Parameters
    ----------
    graph
        Nodes and edges.
    events
        Tells the stream of each event.
    weight
        Length of each edge, ns.

    """
    sync = np.flatnonzero(graph.kind == EDGE_KIND["sync"])
    source, target = (
        events.describe(graph.event[side[sync]], ["stream"])["stream"].fill_null(-1).to_numpy()
        for side in (graph.source, graph.target)
    )
    if ((source == target) & (source != -1)).any():
        return None
    return longest_path(graph, weight)


RULES = PathRules(
    name="hta",
    search=_search,
    edge_class=_edge_class,
    edge_kinds=("operator", "dependency", "launch", "kernel_kernel", "sync"),
    is_exact=False,
)
