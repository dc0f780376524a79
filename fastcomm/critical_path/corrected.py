"""Build the graph of a window by the corrected rules, which use all constraints that hold.

A constraint that the measured times contradict is left out. Where the trace does not record
waits of streams for each other, they are guessed: work that starts right after the end of work
on another stream may wait for it. In other instances the same work starts later for another
reason, and the wait does not show. It matters for a replay: after an edit, the wait may be what
determines the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Self

import numpy as np

from fastcomm.critical_path.waits import Selected, are_known, waits_of
from fastcomm.critical_path.window import TimeRange
from fastcomm.graph import EDGE_KINDS, Graph
from fastcomm.trace.columns import alike, filled, lookup, text_codes
from fastcomm.trace.host_names import LOCKING_CALL
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import constraints as kernels
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints
from fastcomm_kernels.constraints import LAUNCH_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """A graph whose edges are constraints that the measured times satisfy."""

    graph: Graph
    on_device: Flags  # by node
    left_out: dict[str, int]  # number of contradicted constraints by kind
    rest: int | None  # node of the end of the step's mark


def build(trace: Trace, window: TimeRange, data_load: Sequence[str] = ()) -> Constrained:
    """Build the graph of a window; its events are rows of the trace.

    Parameters
    ----------
    trace
        The rank, with all events.
    window
        The window.
    data_load
        Regular expressions of names of events that load data, see `Selected`.

    """
    selected = Selected.of(trace, window, data_load)
    rows = selected.rows
    nodes = _nodes(selected)
    lanes = _lanes(selected, trace)
    guessed = () if are_known(selected.syncs) else stream_waits(selected)
    waits, role, goal = waits_of(selected, guessed)
    locked = rows.matching(LOCKING_CALL) & (rows.kind == KIND["runtime"])
    packed = kernels.ConstraintRows(
        rows.start,
        rows.stop,
        rows.lane,
        selected.is_device,
        locked,
        selected.call,
        role,
        goal,
        selected.nodes.is_known,
        selected.nodes.is_unordered,
    )
    edges = graphs.room(_most_edges(nodes, packed, lanes, waits))
    count, left_out = kernels.constrain(nodes, packed, lanes, waits, edges)
    on_device = selected.is_device[nodes.event]
    # Convert rows of the window to rows of the trace, in place; NONE stays NONE.
    number = np.append(rows.row, NONE).astype(np.int32)
    for column in (nodes.event, edges.owner[:count]):
        np.take(number, column, out=column, mode="wrap")
    used = graphs.selected(edges, slice(count))._asdict()
    return Constrained(
        graph=Graph(event=nodes.event, time=nodes.time, is_end=nodes.is_end, **used),
        on_device=on_device,
        rest=None if selected.mark is None else int(nodes.last[selected.mark]),
        left_out={name: int(k) for name, k in zip(EDGE_KINDS, left_out, strict=True) if k},
    )


def _nodes(selected: Selected) -> kernels.Nodes:
    """Return the nodes of a window in the order of their times."""
    rows, n = selected.rows, len(selected.rows)
    # Order of ends at the same time: work first, then the call that began last.
    tie = np.arange(2 * n, n, -1)
    tie[selected.is_device] = np.flatnonzero(selected.is_device)
    ends = np.argsort(rows.stop, kind="stable")
    graphs.settle(ends, rows.stop, tie)
    return kernels.nodes_of(rows.start, rows.stop, ends)


def _most_edges(
    nodes: kernels.Nodes,
    rows: kernels.ConstraintRows,
    lanes: kernels.Lanes,
    waits: kernels.Waits,
) -> int:
    """Return a close upper bound of the number of edges, which need most of the memory.

    A node of the host has an edge on its thread, and perhaps one from another thread. Work has
    an edge for its time, and others from the work before, its launch, other streams, and the
    other work of its CUDA graph.
    """
    work = int(rows.is_device.sum())
    host = len(rows.start) - work
    handed = int(kernels.switches(nodes.event, rows.lane, lanes))
    launched = np.bincount(rows.call[rows.is_device] + 1)[1:]
    of_graphs = int(launched[launched > 1].sum())
    streams = int((lanes.device >= 0).sum())
    for_device = int((rows.role == kernels.FOR_DEVICE).sum()) * streams
    calls = int(rows.is_locked.sum() + (rows.role != kernels.NO_ROLE).sum())
    guessed = 0 if waits.are_known else work
    of_work = 3 * work + guessed + of_graphs
    return 2 * host + handed + calls + for_device + of_work + len(waits.source)


def _lanes(selected: Selected, trace: Trace) -> kernels.Lanes:
    """Return process, device, and forward and backward thread of each lane."""
    table = trace.lanes
    process = text_codes(table["process"]).astype(np.int32)
    device = filled(table["device"], NONE).astype(np.int32)
    is_device = table["is_device"].to_numpy()
    device = np.where(is_device, np.maximum(device, 0), NONE).astype(np.int32)
    forward = np.full(len(process), NONE, np.int32)
    backward = np.full(len(process), NONE, np.int32)
    for behind, before in _forward_threads(selected, trace).items():
        forward[behind], backward[before] = before, behind
    return kernels.Lanes(process, device, forward, backward)


def _forward_threads(selected: Selected, trace: Trace) -> dict[int, int]:
    """Return the forward lane of each backward lane, by names or by sequence numbers."""
    rows = selected.rows
    is_op = rows.kind == KIND["cpu_op"]
    backward, forward = (
        np.unique(rows.lane[is_op & rows.containing(text)]).tolist()
        for text in ("autograd", "forward")
    )
    if len(backward) == len(forward) == 1 and backward != forward:
        return {backward[0]: forward[0]}
    args = trace.args
    if args is None or not {"sequence", "forward_thread"} <= set(args.column_names):
        return {}
    ops = np.flatnonzero(is_op)
    sequence = filled(args["sequence"])[rows.row[ops]]
    has_number = sequence != NULL
    ops, sequence = ops[has_number], sequence[has_number]
    thread, lane = filled(args["forward_thread"], 0)[rows.row[ops]], rows.lane[ops]
    first, again = np.flatnonzero(thread == 0), np.flatnonzero(thread > 0)
    if not len(first) or not len(again):
        return {}
    first = first[np.argsort(sequence[first], kind="stable")]
    at = lookup(sequence[first], sequence[again])
    joined = at >= 0
    lanes = rows.lanes.num_rows
    key = lane[again[joined]].astype(np.int64) * lanes + lane[first[at[joined]]]
    counts = np.bincount(key, minlength=lanes * lanes)
    often = np.argsort(counts, kind="stable")
    pairs = [divmod(k, lanes) for k in often[counts[often] > 0].tolist()]
    return {behind: before for behind, before in pairs if behind != before}


_MOST_STREAMS = 16  # with work on them; all pairs are compared
_NEAR = 4  # works of a stream that are candidates to wait for work launched before them
_PROMPT_NS = 10_000  # a start within this time after an end follows the end


@dataclass(frozen=True, slots=True)
class _Stream:
    """The work on a stream in the order of its launches, with one value per work."""

    row: Ints
    launch: Ints  # row of the call
    start: Ints  # ns
    stop: Ints
    before: Ints  # end of the work before on the stream
    name: Ints  # code

    @classmethod
    def of(cls, selected: Selected, work: Ints) -> Self:
        """Return the columns of `work`, rows of one stream."""
        rows, launch = selected.rows, selected.call[work].astype(np.int64)
        order = np.argsort(launch, kind="stable")
        row = work[order]
        stop = rows.stop[row]
        before = np.concatenate([np.full(1, np.iinfo(np.int64).min), stop])[:-1]
        return cls(
            row, launch[order], rows.start[row], stop, before, rows.name[row].astype(np.int64)
        )


def stream_waits(selected: Selected) -> tuple[Ints, Ints]:
    """Return pairs of rows: work, and work on another stream that it seems to wait for.

    A stream waits for another one if it continues right after most of the other's work. Then
    the first work on it that never begins before that end, in any of its instances, waits for
    it. Pairs are left out if the measured times already show the wait: there the end is what
    determines the start.
    """
    work = np.flatnonzero(selected.is_device & (selected.call >= 0))
    lanes = np.unique(selected.rows.lane[work])
    if len(lanes) > _MOST_STREAMS:
        return work[:0], work[:0]
    device = filled(selected.rows.lanes["device"], NONE)
    streams = {
        lane: _Stream.of(selected, work[selected.rows.lane[work] == lane])
        for lane in lanes.tolist()
    }
    pairs = [
        _pairs(streams[a], streams[b])
        for a, b in permutations(streams, 2)
        if device[a] == device[b]
    ]
    waiting, source, before = (
        (np.concatenate([work[:0], *columns]) for columns in zip(*pairs, strict=True))
        if pairs
        else (work[:0],) * 3
    )
    keep = _is_hidden(selected, waiting, source, before)
    return waiting[keep], source[keep]


def _is_hidden(selected: Selected, waiting: Ints, source: Ints, before: Ints) -> Flags:
    """Return which waits cannot have determined the start of the work that waited.

    `waiting` and `source` are the rows of each pair, `before` the end of the work before on the
    stream, ns.
    """
    rows = selected.rows
    stop = rows.stop[source]
    latest = np.zeros(len(rows), np.int64)
    np.maximum.at(latest, waiting, stop)
    delay = rows.start[waiting] - rows.start[selected.call[waiting]]
    hidden: Flags = (stop < before) | ((stop < latest[waiting]) & (delay >= LAUNCH_NS))
    return hidden


def _pairs(stream: _Stream, other: _Stream) -> tuple[Ints, Ints, Ints]:
    """Return the waits of a stream for another one, and the ends of the work before."""
    last = np.searchsorted(other.launch, stream.launch) - 1
    first = np.searchsorted(stream.launch, other.launch, "right")
    distance = np.arange(len(last)) - first[last]
    at = np.flatnonzero((last >= 0) & (distance < _NEAR))
    source, distance = last[at], distance[at]
    end, start = other.stop[source], stream.start[at]
    is_after = end <= start
    prompt = is_after & (end > stream.before[at]) & (start - end <= _PROMPT_NS)
    empty = at[:0]
    if not len(at) or 2 * len(np.unique(source[prompt])) < len(np.unique(source)):
        return empty, empty, empty
    _, kind = alike(stream.name[at], other.name[source], distance)
    is_regular = np.bincount(kind[~is_after], minlength=len(kind)) == 0
    at, source = at[is_regular[kind]], source[is_regular[kind]]
    # The first one that waits is enough: later work follows it.
    source, where = np.unique(source, return_index=True)
    at = at[where]
    return stream.row[at], other.row[source], stream.before[at]
