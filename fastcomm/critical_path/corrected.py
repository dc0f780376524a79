"""Build the graph of a window by the corrected rules, which use all constraints that hold.

A constraint that the measured times contradict is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.critical_path.streams import stream_waits
from fastcomm.critical_path.waits import Selected, are_known, waits_of
from fastcomm.critical_path.window import TimeRange
from fastcomm.graph import EDGE_KINDS, Graph
from fastcomm.trace.columns import filled, lookup
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import constraints as kernels
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NONE, NULL, Flags

# Calls that take the lock of the process. Nsight Systems appends a version to names.
_VERSION = r"(_v\d+)?(_ptsz|_ptds)?$"
_LOCKED = (
    r"^(cudaHostAlloc|hipHostMalloc|cudaLaunchKernel(ExC)?|cuLaunchKernel(Ex)?"
    r"|cudaLaunchCooperativeKernel|cudaGraphLaunch|cuGraphLaunch"
    r"|hip(Ext)?(Module)?LaunchKernel|hipGraphLaunch"
    r"|(cuda|hip)Mem(cpy|set)Async)" + _VERSION
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """A graph whose edges are constraints that the measured times satisfy."""

    graph: Graph
    on_device: Flags  # by node
    left_out: dict[str, int]  # number of contradicted constraints by kind


def build(trace: Trace, window: TimeRange, data_load: Sequence[str] = ()) -> Constrained:
    """Build the graph of a window; its events are rows of the trace.

    Parameters
    ----------
    trace
        The rank, with all events.
    window
        The window.
    data_load
        Regular expressions of names of events that load data.

    """
    selected = Selected.of(trace, window, data_load)
    rows = selected.rows
    nodes = _nodes(selected)
    lanes = _lanes(selected, trace)
    guessed = () if are_known(selected.syncs) else stream_waits(selected)
    waits, role, goal = waits_of(selected, guessed)
    locked = rows.matching(_LOCKED) & (rows.kind == KIND["runtime"])
    packed = kernels.ConstraintRows(
        rows.start, rows.stop, rows.lane, selected.is_device, locked, selected.call, role, goal
    )
    edges = graphs.room(_most_edges(nodes, packed, lanes, waits))
    count, left_out = kernels.constrain(nodes, packed, lanes, waits, edges)
    on_device = selected.is_device[nodes.event]
    # Convert rows of the window to rows of the trace, in place; NONE stays NONE.
    number = np.append(rows.row, NONE).astype(np.int32)
    for column in (nodes.event, edges.owner[:count]):
        np.take(number, column, out=column, mode="wrap")
    graph = Graph(
        event=nodes.event,
        time=nodes.time,
        is_end=nodes.is_end,
        source=edges.source[:count],
        target=edges.target[:count],
        kind=edges.kind[:count],
        weight=edges.weight[:count],
        owner=edges.owner[:count],
    )
    return Constrained(
        graph=graph,
        on_device=on_device,
        left_out={name: int(k) for name, k in zip(EDGE_KINDS, left_out, strict=True) if k},
    )


def _nodes(selected: Selected) -> kernels.Nodes:
    """Return the nodes of a window in the order of their times."""
    rows, n = selected.rows, len(selected.rows)
    # Order of ends at the same time: work first, then the call that began last.
    tie = np.where(selected.is_device, np.arange(n), 2 * n - np.arange(n))
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
    process = table["process"].combine_chunks().dictionary_encode().indices.to_numpy()
    device = filled(table["device"], NONE).astype(np.int32)
    is_device = table["is_device"].to_numpy()
    device = np.where(is_device, np.maximum(device, 0), NONE).astype(np.int32)
    forward = np.full(len(process), NONE, np.int32)
    backward = np.full(len(process), NONE, np.int32)
    for behind, before in _forward_threads(selected, trace).items():
        forward[behind], backward[before] = before, behind
    return kernels.Lanes(process.astype(np.int32), device, forward, backward)


def _forward_threads(selected: Selected, trace: Trace) -> dict[int, int]:
    """Return the forward lane of each backward lane, by names or by sequence numbers."""
    rows = selected.rows
    is_op = rows.kind == KIND["cpu_op"]
    backward, forward = (
        set(rows.lane[is_op & rows.containing(text)].tolist())
        for text in ("autograd", "forward")
    )
    if len(backward) == len(forward) == 1 and backward != forward:
        return {backward.pop(): forward.pop()}
    args = trace.args
    if args is None or not {"sequence", "forward_thread"} <= set(args.column_names):
        return {}
    thread = filled(args["forward_thread"], 0)[rows.row]
    sequence = filled(args["sequence"])[rows.row]
    has_number = is_op & (sequence != NULL)
    first = np.flatnonzero(has_number & (thread == 0))
    again = np.flatnonzero(has_number & (thread > 0))
    if not len(first) or not len(again):
        return {}
    first = first[np.argsort(sequence[first], kind="stable")]
    at = lookup(sequence[first], sequence[again])
    joined = at >= 0
    lanes = rows.lanes.num_rows
    key = rows.lane[again[joined]].astype(np.int64) * lanes + rows.lane[first[at[joined]]]
    counts = np.bincount(key, minlength=lanes * lanes)
    often = np.argsort(counts, kind="stable")
    pairs = [divmod(k, lanes) for k in often[counts[often] > 0].tolist()]
    return {behind: before for behind, before in pairs if behind != before}
