"""The graph of a window by the corrected rules: every constraint that the times confirm."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.critical_path import names
from fastcomm.critical_path.corrected_rows import Selected
from fastcomm.critical_path.rows import Integers, Rows, codes, pair_codes
from fastcomm.critical_path.window import Window
from fastcomm.graph.graph import EDGE_KINDS, Graph
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels import constraints as kernels
from fastcomm_kernels import graph as graphs
from fastcomm_kernels import links
from fastcomm_kernels.graph import NONE, Column, Flags, Numbers
from fastcomm_kernels.json_numbers import NULL

Pairs = tuple[Integers, Integers, int]  # waiting rows, rows of the work, kind of the edges


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """A graph whose edges are constraints, and how many the times contradict, by kind."""

    graph: Graph
    on_device: Flags  # by node
    left_out: dict[str, int]


def build(trace: Trace, window: Window, data_load: Sequence[str] = ()) -> Constrained:
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
    waits, role, goal = _waits(found)
    locked = rows.matching(names.LOCKED) & (rows.kind == KIND["runtime"])
    packed = kernels.Rows(
        rows.start, rows.stop, rows.lane, found.is_device, locked, found.call, role, goal
    )
    edges = graphs.room(_most_edges(packed, lanes, waits))
    count, left_out = kernels.constrain(nodes, packed, lanes, waits, edges)
    number = rows.row.astype(np.int32)
    owner = edges.owner[:count]
    graph = Graph(
        event=number[nodes.event],
        time=nodes.time,
        is_end=nodes.is_end,
        source=edges.source[:count],
        target=edges.target[:count],
        kind=edges.kind[:count],
        weight=edges.weight[:count],
        owner=np.where(owner == NONE, np.int32(NONE), number[owner]) if n else owner,
    )
    return Constrained(
        graph=graph,
        on_device=found.is_device[nodes.event],
        left_out={name: int(k) for name, k in zip(EDGE_KINDS, left_out, strict=True) if k},
    )


def _most_edges(rows: kernels.Rows, lanes: kernels.Lanes, waits: kernels.Waits) -> int:
    """More edges than there can be."""
    work = int(rows.is_device.sum())
    host = len(rows.start) - work
    handed = 2 * host if (lanes.forward >= 0).any() else 0
    streams = int((lanes.device >= 0).sum())
    for_device = int((rows.role == kernels.FOR_DEVICE).sum()) * streams
    calls = int(rows.is_locked.sum() + (rows.role != kernels.NO_ROLE).sum())
    return 2 * host + handed + calls + for_device + 5 * work + len(waits.source)


def _lanes(found: Selected, trace: Trace) -> kernels.Lanes:
    table = trace.lanes
    process = table["process"].combine_chunks().dictionary_encode().indices.to_numpy()
    device = table["device"].fill_null(NONE).to_numpy().astype(np.int32)
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
    thread = args["forward_thread"].fill_null(0).to_numpy()[rows.row]
    sequence = args["sequence"].fill_null(NULL).to_numpy()[rows.row]
    known = asked & (sequence != NULL)
    first, again = np.flatnonzero(known & (thread == 0)), np.flatnonzero(known & (thread > 0))
    if not len(first) or not len(again):
        return {}
    first = first[np.argsort(sequence[first], kind="stable")]
    at = np.minimum(np.searchsorted(sequence[first], sequence[again]), len(first) - 1)
    joined = sequence[first[at]] == sequence[again]
    lanes = rows.lanes.num_rows
    key = rows.lane[again[joined]].astype(np.int64) * lanes + rows.lane[first[at[joined]]]
    counts = np.bincount(key, minlength=lanes * lanes)
    often = np.argsort(counts, kind="stable")
    pairs = [divmod(k, lanes) for k in often[counts[often] > 0].tolist()]
    return {behind: before for behind, before in pairs if behind != before}


def _waits(found: Selected) -> tuple[kernels.Waits, Numbers, Numbers]:
    """Which rows wait for the end of which work; the role and goal of every call."""
    rows, syncs = found.rows, found.syncs
    role = np.full(len(rows), kernels.NO_ROLE, np.int32)
    goal = np.full(len(rows), NONE, np.int32)
    call = rows.kind == KIND["runtime"]
    waiting = (names.WAITS_FOR_DEVICE, names.WAITS_FOR_STREAM, names.WAITS_FOR_EVENT)
    for regex in waiting:
        role[call & rows.matching(regex)] = kernels.FOR_SOMETHING
    lane_of = {
        (d, t): lane
        for lane, (d, t, on) in enumerate(
            zip(
                *(rows.lanes[k].to_pylist() for k in ("device", "thread", "is_device")),
                strict=True,
            )
        )
        if on
    }
    devices = rows.lanes["device"].to_pylist()
    for name, kind in (
        ("Stream Sync", kernels.FOR_STREAM),
        ("Context Sync", kernels.FOR_DEVICE),
    ):
        for k in np.flatnonzero(syncs.named((name,)) & (found.sync_call >= 0)).tolist():
            device, at = devices[syncs.lane[k]], found.sync_call[k]
            role[at] = kind
            stream = lane_of.get((device, str(syncs.stream[k])), NONE)
            goal[at] = (
                stream if kind == kernels.FOR_STREAM else NONE if device is None else device
            )
    pairs = [*_copies(found), *_events(found, role)]
    return _indexed(pairs, len(rows), len(syncs) > 0), role, goal


def _indexed(pairs: Sequence[Pairs], rows: int, are_known: bool) -> kernels.Waits:
    """The pairs by the row that waits."""
    waiting = np.concatenate([np.empty(0, np.int32), *(pair[0] for pair in pairs)])
    source = np.concatenate([np.empty(0, np.int32), *(pair[1] for pair in pairs)])
    kind = np.concatenate([np.full(len(pair[0]), pair[2], np.int32) for pair in pairs])
    first, order = graphs.index(waiting.astype(np.int32), rows)
    return kernels.Waits(first, source[order].astype(np.int32), kind[order], are_known)


def _copies(found: Selected) -> list[Pairs]:
    """Calls that wait for their own copies: those named so, and those of pageable memory."""
    rows = found.rows
    work = np.flatnonzero(found.is_device & (found.call >= 0))
    call = found.call[work]
    waits = rows.matching(names.COPIES)[call]
    guessed = ~waits & rows.matching(names.WAITED_FOR)[work]
    guessed &= rows.stop[work] <= rows.stop[call]
    return [
        (call[waits], work[waits], kernels.SYNC),
        (call[guessed], work[guessed], kernels.INFERRED),
    ]


def _events(found: Selected, role: Numbers) -> list[Pairs]:
    """Who waits for an event, and the work behind which the event was recorded."""
    rows, syncs = found.rows, found.syncs
    none = np.full(0, NONE, np.int32)
    records = np.flatnonzero(rows.matching(names.RECORDS))
    on_event = syncs.named(("Stream Wait Event", "Event Sync")) & (found.sync_call >= 0)
    if not len(records) or not on_event.any():
        return [(none, none, kernels.SYNC)]
    work = np.flatnonzero(found.is_device & (found.call >= 0))
    # Launches in order of time, with the lane of their work: of a graph, once a work.
    work = work[np.argsort(found.call[work], kind="stable")]
    waits = np.flatnonzero(on_event)
    source = _recorded(found, work, records, waits)
    call = found.sync_call[waits]
    is_host = syncs.named(("Event Sync",))[waits]
    role[call[is_host]] = kernels.NO_ROLE
    waiting = np.where(is_host, call, _held_up(found, work, waits))
    known = (source >= 0) & (waiting >= 0)
    return [(waiting[known], source[known], kernels.SYNC)]


def _recorded(found: Selected, work: Column, records: Column, waits: Column) -> Numbers:
    """For each wait the work that was launched last before its record, or NONE."""
    rows, syncs = found.rows, found.syncs
    (of_wait, of_record), count = codes(syncs.wait_record[waits], rows.correlation[records])
    device = rows.lanes["device"].fill_null(0).to_numpy().astype(np.int64)
    goal = np.full((count + 1, 2), NULL, np.int64)
    goal[of_wait, 0] = device[syncs.lane[waits]]
    goal[of_wait, 1] = syncs.wait_stream[waits]
    goal[-1] = NULL
    marks = np.flatnonzero(goal[of_record, 1] != NULL)
    streams = _streams(rows)
    wanted = goal[of_record[marks]]
    lane, mark_lane, lanes = pair_codes(
        (device[rows.lane[work]], streams[rows.lane[work]]), (wanted[:, 0], wanted[:, 1])
    )
    before = _last_launched(found, (work, lane), (records[marks], mark_lane), lanes)
    by_record = np.full(count + 1, NONE, np.int32)
    by_record[of_record[marks]] = before
    by_record[-1] = NONE
    return by_record[of_wait]


def _last_launched(
    found: Selected, works: tuple[Column, Numbers], marks: tuple[Column, Numbers], lanes: int
) -> Numbers:
    """For each mark the work on its lane that was launched last before it."""
    work, lane = works
    # Places in `work` instead of rows, so that a launch of several works keeps them apart.
    start = np.concatenate([found.rows.start[found.call[work]], found.rows.start[marks[0]]])
    behind = len(work) + np.arange(len(marks[0]))
    at = links.launches_before((np.arange(len(work)), lane), (behind, marks[1]), start, lanes)
    found_work: Numbers = np.append(work, NONE)[at].astype(np.int32)
    return found_work


def _held_up(found: Selected, work: Column, waits: Column) -> Numbers:
    """For each stream wait the first work that its thread launches on that stream behind it."""
    rows, syncs = found.rows, found.syncs
    call = found.sync_call[waits]
    order = np.argsort(call, kind="stable")
    streams = _streams(rows)
    launch = found.call[work]
    lane, mark_lane, lanes = pair_codes(
        (rows.lane[launch], streams[rows.lane[work]]),
        (rows.lane[call[order]], syncs.stream[waits[order]]),
    )
    start = np.concatenate([rows.start[launch], rows.start[call[order]]])
    marks = len(work) + np.arange(len(order))
    at = links.launches_behind((np.arange(len(work)), lane), (marks, mark_lane), start, lanes)
    held = np.full(len(waits), NONE, np.int32)
    held[order] = np.append(work, NONE)[at]
    return held


def _streams(rows: Rows) -> Column:
    """The stream of each lane, NULL where it has none."""
    threads = rows.lanes["thread"].to_pylist()
    found = [int(t) if re.fullmatch(r"-?\d{1,18}", t) else NULL for t in threads]
    return np.array(found, np.int64)
