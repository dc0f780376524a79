"""Columns of the events of a timeline: of one rank, merged to fewer, and matched across ranks.

Times are int64 ns, intervals half-open; NULL is unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.metrics.matched_communication import Clocks, match_events
from fastcomm.metrics.rank_arrays import COMPUTE, COPY, MASKS, tag_bit
from fastcomm.metrics.result import Metrics
from fastcomm.ranks.arrivals import CommunicationEvents
from fastcomm.trace.columns import block_lengths, filled
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import KIND, WHOLE_GRAPH
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL, Ints

GRAPH = "whole graph"  # a CUDA graph without the kernels inside
KINDS = ("compute", "copy", GRAPH, *TAGS)
FIRST_TAG = KINDS.index(TAGS[0])
BIN_KINDS = (*KINDS, "mixed", "idle")
LEVELS = 8  # of the share of a bin
# Columns of events; NULL is unknown.
EVENTS = (
    "rank",
    "kind",  # index into KINDS
    "op",  # index into OPS; NULL unless it communicates
    "name",  # index into the names
    "start",
    "duration",
    "busy",  # sum of the durations of merged events
    "count",  # number of recorded events that it stands for
    "instance",  # row of INSTANCES; NULL where it is not matched, or is merged
    "wait",  # for other ranks, from its start
    "bytes",
    "bus_bytes",
)
# Of matched collectives and messages; `waits` is the sum over all members.
INSTANCES = ("members", "last_rank", "last_start", "waits")
Arrays = dict[str, Ints]
_MATCHED = ("instance", "wait", "bytes", "bus_bytes")  # unknown of merged events


def work(trace: Trace) -> Arrays:
    """Return compute and copies, then communication of a rank, each sorted by start.

    The columns are those of EVENTS that need no other rank, and `event`, the row of the trace's
    events; `name` is an index into the dictionary of the trace's names.
    """
    events, comm = trace.events, trace.comm
    names = events["name"].combine_chunks()
    name = names.indices.to_numpy()
    kind = _KIND_OF[events["kind"].to_numpy()]
    is_graph = pc.equal(names.dictionary, WHOLE_GRAPH).to_numpy(zero_copy_only=False)
    kind[(kind == _COMPUTE) & is_graph[name]] = _GRAPH
    at = comm["event"].to_numpy()
    kind[at] = NULL
    rows = np.flatnonzero(kind != NULL)
    start, stop = (
        np.concatenate([events[key].to_numpy()[rows], comm[key].to_numpy()])
        for key in ("start", "stop")
    )
    return {
        "event": np.concatenate([rows, at]),
        "start": start,
        "duration": stop - start,
        "kind": np.concatenate([kind[rows], comm["tag"].to_numpy() + np.int64(FIRST_TAG)]),
        "op": np.concatenate([np.full(len(rows), NULL), filled(comm["op"])]),
        "name": np.concatenate([name[rows], name[at]]).astype(np.int64),
        "busy": stop - start,
        "count": np.ones(len(start), np.int64),
    }


_KIND_OF = np.full(len(KIND), NULL)


_COMPUTE, _COPY, _GRAPH = map(KINDS.index, ("compute", "copy", GRAPH))
for _name, _kind in (
    *(("kernel", _COMPUTE), ("host_work", _COMPUTE)),
    *(("memcpy", _COPY), ("memset", _COPY)),
):
    _KIND_OF[KIND[_name]] = _kind


def take(columns: Arrays, rows: NDArray[np.bool_] | Ints) -> Arrays:
    """Return some rows of columns."""
    return {name: column[rows] for name, column in columns.items()}


def append(first: Arrays, second: Arrays, names: Sequence[str]) -> Arrays:
    """Return the rows of both, in some columns; NULL where one does not have a column."""
    return {
        name: np.concatenate(
            [
                part.get(name, np.full(len(part["start"]), NULL, np.int64))
                for part in (first, second)
            ]
        )
        for name in names
    }


def joined(pieces: Sequence[Arrays], names: Sequence[str]) -> Arrays:
    """Return the rows of all pieces, in some columns; no rows without pieces."""
    none = np.empty(0, np.int64)
    return {name: np.concatenate([none, *(piece[name] for piece in pieces)]) for name in names}


def merge_short(columns: Arrays, most: int, length: int) -> tuple[Arrays, int]:
    """Merge short neighbors of one kind until at most `most` events remain, if possible.

    Parameters
    ----------
    columns
        Events in any order.
    most
        Number of events, at most; every kind keeps at least one.
    length
        Length of the step, ns.

    Returns
    -------
    tuple of Arrays and int
        The events by kind and start, and the resolution in ns: merged events are shorter, and
        begin less than that after the end of the one before. 0 if none is merged.

    """
    columns = take(columns, np.lexsort((columns["start"], columns["kind"])))
    width = 0
    first = np.arange(len(columns["start"]))
    while len(first) > most and width <= length:
        width = max(2 * width, length >> 12, 1)
        first = _first_of_merged(columns, width)
    return (columns, 0) if not width else (_merged(columns, first), width)


def _first_of_merged(columns: Arrays, width: int) -> Ints:
    """Return the first row of each run of short neighbors, and each other row."""
    kind, start, duration = (columns[name] for name in ("kind", "start", "duration"))
    is_short, stop = duration < width, start + duration
    joins = (kind[1:] == kind[:-1]) & is_short[1:] & is_short[:-1]
    joins &= start[1:] - stop[:-1] < width
    return np.flatnonzero(np.append(True, ~joins))


def _merged(columns: Arrays, first: Ints) -> Arrays:
    """Return an event per run of rows, named after its longest."""
    start, duration = columns["start"], columns["duration"]
    run = np.repeat(np.arange(len(first)), block_lengths(first, len(start)))
    by_duration = np.lexsort((duration, run))
    longest = by_duration[np.append(first[1:], len(start)) - 1]
    runs = take(columns, longest)
    runs["start"] = start[first]
    runs["duration"] = np.maximum.reduceat(start + duration, first) - start[first]
    for name in ("busy", "count"):
        runs[name] = np.add.reduceat(columns[name], first)
    for name in _MATCHED:
        if name in runs:
            runs[name] = np.where(runs["count"] > 1, NULL, runs[name])
    return runs


_SETS = np.zeros((len(MASKS), len(BIN_KINDS)), np.int64)


def _kind_of_mask(mask: int) -> str:
    """Return what the time of a mask of `rank_arrays.MASKS` counts as."""
    tags = [tag for number, tag in enumerate(TAGS) if mask & tag_bit(number)]
    if mask & COMPUTE:
        return "compute"
    if tags:
        return tags[0] if len(tags) == 1 else "mixed"
    return "copy" if mask & COPY else "idle"


for _mask in MASKS.tolist():
    _SETS[_mask, BIN_KINDS.index(_kind_of_mask(_mask))] = 1


def _spans(columns: Arrays) -> tuple[Ints, Ints]:
    """Return the starts and ends of events, by start."""
    order = np.argsort(columns["start"], kind="stable")
    start = columns["start"][order]
    return start, start + columns["duration"][order]


def occupancy(columns: Arrays, edges: Ints) -> NDArray[np.uint8]:
    """Return what takes most of each bin, and its share.

    Compute that overlaps communication or copies counts as compute, communication that overlaps
    copies as communication, and what overlaps a whole graph as the graph.

    Parameters
    ----------
    columns
        Events of one rank, each kind sorted by start.
    edges
        Begin of each bin, ns, and the end of the last.

    Returns
    -------
    numpy.ndarray
        Per bin, LEVELS times the index of the kind in BIN_KINDS, plus the share of the kind in
        steps of 1 / LEVELS, rounded down, LEVELS - 1 for a full bin. Communication of several
        tags at once is "mixed"; time without work is "idle".

    """
    classes = []
    # The classes of `rank_arrays.MASKS`, in which a whole graph is compute.
    of_class = np.where(columns["kind"] == _GRAPH, _COMPUTE, columns["kind"])
    for kind in range(len(KINDS)):
        own = take(columns, of_class == kind)
        if kind != _GRAPH:
            classes.append(_spans(own))
    width = np.diff(edges)
    covered = intervals.coverage_by_class(classes, edges[:-1], edges[1:])
    # The kernel leaves out time in which nothing runs.
    covered[:, 0] += width - covered.sum(axis=1)
    by_kind = covered @ _SETS
    graphs = _spans(take(columns, columns["kind"] == _GRAPH))
    by_kind[:, _GRAPH] = intervals.coverage_by_class([graphs], edges[:-1], edges[1:])[:, 1]
    by_kind[:, _COMPUTE] -= by_kind[:, _GRAPH]
    level = np.minimum(by_kind.max(axis=1) * LEVELS // np.maximum(width, 1), LEVELS - 1)
    cells: NDArray[np.uint8] = (by_kind.argmax(axis=1) * LEVELS + level).astype(np.uint8)
    return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMatches:
    """Communication of some ranks in a step, matched with that of all ranks."""

    events: Arrays  # rank, start on the rank's clock, and instance, wait, bytes, bus bytes
    instances: Arrays  # INSTANCES; `last_start` on the clock of `last_rank`

    @classmethod
    def of(
        cls, metrics: Metrics, step: int, ranks: Sequence[int], unaligned: Sequence[int]
    ) -> Self:
        """Match the communication of some ranks.

        Parameters
        ----------
        metrics
            With the table of events.
        step
            Number of the step.
        ranks
            The ranks whose events are returned.
        unaligned
            Ranks whose clock cannot be compared: waits of their collectives are unknown.

        """
        events = _events(metrics, step, ranks)
        is_aligned = metrics.across.clock_alignment != "none"
        clocks = Clocks(
            known_offsets(metrics), is_aligned, metrics.across.unaligned, metrics.is_host_run
        )
        matched, _, _ = match_events(events, clocks)
        rank = events.rank[matched.row]
        is_doubtful = np.isin(rank, list(unaligned))
        if len(matched.size):
            is_doubtful = np.logical_or.reduceat(is_doubtful, matched.first)
        instance, wait = np.full((2, len(events.rank)), NULL)
        instance[matched.row] = np.repeat(np.arange(len(matched.size)), matched.size)
        wait[matched.row] = np.where(np.repeat(is_doubtful, matched.size), NULL, matched.wait)
        chosen = np.isin(events.rank, list(ranks))
        used = np.unique(instance[chosen & (instance != NULL)])
        place = np.append(np.full(len(matched.size), NULL), NULL)
        place[used] = np.arange(len(used))
        last = np.where(is_doubtful, NULL, rank[matched.last])[used]
        waits = np.where(is_doubtful, NULL, matched.total(matched.wait))
        return cls(
            events=take(
                {
                    "rank": events.rank,
                    "start": events.start,
                    "instance": place[np.where(instance == NULL, -1, instance)],
                    "wait": wait,
                    "bytes": events.bytes,
                    "bus_bytes": events.bus_bytes,
                },
                chosen,
            ),
            instances={
                "members": matched.size[used],
                "last_rank": last,
                "last_start": events.start[matched.row[matched.last]][used],
                "waits": waits[used],
            },
        )

    def of_rank(self, rank: int) -> Arrays:
        """Return the events of a rank, sorted by start."""
        return take(self.events, self.events["rank"] == rank)


def known_offsets(metrics: Metrics) -> dict[int, int]:
    """Return by how many ns the clock of each rank is ahead, without unknown ones."""
    return {
        offset.rank: offset.offset_ns
        for offset in metrics.across.offsets
        if offset.offset_ns is not None
    }


def _events(metrics: Metrics, step: int, ranks: Sequence[int]) -> CommunicationEvents:
    """Return the communication in a step of some ranks, and of the groups that they are in."""
    table = metrics.tables["events"]
    table = table.filter(pc.equal(table["iteration"], step))
    is_own = pc.is_in(table["rank"], value_set=pa.array(ranks, table["rank"].type))
    groups = table["group"].filter(is_own).drop_null().unique()
    table = table.filter(pc.or_(is_own, pc.is_in(table["group"], value_set=groups)))
    table = table.combine_chunks()
    for name in ("tag", "op"):
        column = table[name].combine_chunks()
        codes = column.indices.cast(pa.int8())
        table = table.set_column(table.column_names.index(name), name, codes)
    if metrics.bytes == "payload":  # other sizes may differ between members
        table = table.append_column("payload_bytes", table["bytes"])
    return CommunicationEvents.of(table)
