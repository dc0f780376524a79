"""The graph of a window by the corrected rules: every constraint that the times confirm."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.critical_path.corrected_rows import LOCKED, Selected, waits_of
from fastcomm.critical_path.window import TimeRange
from fastcomm.graph.graph import EDGE_KINDS, Graph
from fastcomm.trace.columns import filled, lookup
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import constraints as kernels
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NULL, Flags
from fastcomm_kernels.graph import NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """A graph whose edges are constraints, and how many the times contradict, by kind."""

    graph: Graph
    on_device: Flags  # by node
    left_out: dict[str, int]


def build(trace: Trace, window: TimeRange, data_load: Sequence[str] = ()) -> Constrained:
    """The graph of a window. Its events are rows of the trace."""
    found = Selected.of(trace, window, data_load)
    rows = found.rows
    n = len(rows)
    # Ends at one time: work first, then the call that began last.
    tie = np.where(found.is_device, np.arange(n), 2 * n - np.arange(n))
    ends = np.argsort(rows.stop, kind="stable")
    graphs.settle(ends, rows.stop, tie)
    nodes = kernels.nodes_of(rows.start, rows.stop, ends)
    del tie, ends
    lanes = _lanes(found, trace)
    waits, role, goal = waits_of(found)
    locked = rows.matching(LOCKED) & (rows.kind == KIND["runtime"])
    packed = kernels.ConstraintRows(
        rows.start, rows.stop, rows.lane, found.is_device, locked, found.call, role, goal
    )
    edges = graphs.room(_most_edges(nodes, packed, lanes, waits))
    count, left_out = kernels.constrain(nodes, packed, lanes, waits, edges)
    on_device = found.is_device[nodes.event]
    # Rows of the window become rows of the trace, in place; no row stays none.
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


def _most_edges(
    nodes: kernels.Nodes,
    rows: kernels.ConstraintRows,
    lanes: kernels.Lanes,
    waits: kernels.Waits,
) -> int:
    """No fewer edges than there can be, and not many more: room for them is most of the memory.

    A node of the host has one on its thread, and may have one from another; work has one for
    its time and others from the work before, its launch, other streams, and its own graph.
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


def _lanes(found: Selected, trace: Trace) -> kernels.Lanes:
    table = trace.lanes
    process = table["process"].combine_chunks().dictionary_encode().indices.to_numpy()
    device = filled(table["device"], NONE).astype(np.int32)
    is_device = table["is_device"].to_numpy()
    device = np.where(is_device, np.maximum(device, 0), NONE).astype(np.int32)
    forward = np.full(len(process), NONE, np.int32)
    backward = np.full(len(process), NONE, np.int32)
    for behind, before in _hand_overs(found, trace).items():
        forward[behind], backward[before] = before, behind
    return kernels.Lanes(process.astype(np.int32), device, forward, backward)


def _hand_overs(found: Selected, trace: Trace) -> dict[int, int]:
    """The threads that run backward, and those that wait for them: by names, or sequences."""
    rows = found.rows
    asked = rows.kind == KIND["cpu_op"]
    backward, forward = (
        set(rows.lane[asked & rows.containing(word)].tolist())
        for word in ("autograd", "forward")
    )
    if len(backward) == len(forward) == 1 and backward != forward:
        return {backward.pop(): forward.pop()}
    args = trace.args
    if args is None or not {"sequence", "forward_thread"} <= set(args.column_names):
        return {}
    thread = filled(args["forward_thread"], 0)[rows.row]
    sequence = filled(args["sequence"])[rows.row]
    known = asked & (sequence != NULL)
    first, again = np.flatnonzero(known & (thread == 0)), np.flatnonzero(known & (thread > 0))
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
