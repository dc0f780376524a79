"""Collectives with all of their members that were read, on clocks that agree as well as can be.

Rows are events, sorted by collective and arrival; `edges` says where each collective begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.metrics.rates import column
from fastcomm.metrics.view import UNKNOWN
from fastcomm.trace import clocks as clocks_
from fastcomm.trace.matching import NONE, Calls, Matches, match
from fastcomm.trace.schema import OP

Ints = NDArray[np.int64]

TOGETHER = np.array([OP[name] for name in clocks_.ENDS_TOGETHER], np.int8)
# Operations whose size is the same on every member.
_EVEN = np.array([OP[name] for name in ("AllReduce", "AllGather", "ReduceScatter")], np.int8)
# Collectives of one group that tell how far clocks are apart: more say nothing new.
_MOST = 32


@dataclass(frozen=True, slots=True)
class Events:
    """Columns of the table of events, of ranks whose times are known; UNKNOWN for null."""

    rank: Ints
    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    group: Ints
    group_size: Ints
    seq: Ints
    bytes: Ints
    bus_bytes: Ints
    start: Ints
    stop: Ints
    alone: Ints

    @classmethod
    def of(cls, table: pa.Table) -> "Events":
        """Take the columns."""
        if table["start_ns"].null_count:
            table = table.filter(table["start_ns"].is_valid())

        start = column(table, "start_ns")
        return cls(
            tag=table["tag"].to_numpy(),
            op=table["op"].to_numpy(),
            start=start,
            stop=start + table["duration_ns"].to_numpy(),
            alone=column(table, "alone_ns"),
            **{
                name: column(table, name)
                for name in ("rank", "group", "group_size", "seq", "bytes", "bus_bytes")
            },
        )

    @property
    def joins(self) -> NDArray[np.bool_]:
        """Which are collectives of several ranks that are known."""
        several = (self.group != UNKNOWN) & (self.group_size != 1)
        joins: NDArray[np.bool_] = several & np.isin(self.op, TOGETHER)
        return joins


@dataclass(frozen=True, slots=True)
class Meetings:
    """Collectives that several ranks were matched in."""

    row: Ints  # of the events
    edges: Ints  # first row of each collective, and one behind the last
    start: Ints  # of each row, on the one clock
    arrived: Ints  # of each collective: when the last had come
    # From then to the median of its ends, the lower of two. Negative: the clocks do not agree
    # so well.
    transfer: Ints

    @classmethod
    def of(cls, events: Events, rows: Ints, matches: Matches, ahead: Ints) -> "Meetings":
        """The collectives of some rows of the events; `ahead` is what clocks are ahead by."""
        matched = np.flatnonzero(matches.instance != NONE)
        number, row = matches.instance[matched], rows[matched]
        start, stop = events.start[row] - ahead[row], events.stop[row] - ahead[row]
        ends = stop[np.lexsort((stop, number))]
        order = np.lexsort((start, number))
        number, start = number[order], start[order]
        edges = np.searchsorted(number, np.arange(matches.count + 1))
        arrived = start[edges[1:] - 1]
        return cls(
            row=row[order],
            edges=edges,
            start=start,
            arrived=arrived,
            transfer=ends[(edges[:-1] + edges[1:] - 1) // 2] - arrived,
        )

    @property
    def size(self) -> Ints:
        """How many members each has."""
        return np.diff(self.edges)

    @property
    def first(self) -> Ints:
        """The row of the first to come."""
        return self.edges[:-1]

    @property
    def last(self) -> Ints:
        """The row of the last to come."""
        return self.edges[1:] - 1

    @property
    def wait(self) -> Ints:
        """Of each row: how long it was there before the last."""
        return np.repeat(self.arrived, self.size) - self.start

    @property
    def later(self) -> Ints:
        """Of each row: how much later it came than the lower median of the others."""
        size, place = np.repeat(self.size, self.size), self._place()
        middle = (size - 2) // 2
        middle += middle >= place  # a row is none of the others
        later: Ints = self.start - self.start[np.repeat(self.first, self.size) + middle]
        return later

    def largest(self, values: Ints) -> Ints:
        """Of each collective the largest value of its members; `values` are by event."""
        if not len(self.size):
            return np.zeros(0, np.int64)
        found: Ints = np.maximum.reduceat(values[self.row], self.first)
        return found

    def total(self, values: Ints) -> Ints:
        """Of each collective the sum over its rows."""
        if not len(self.size):
            return np.zeros(0, np.int64)
        found: Ints = np.add.reduceat(values, self.first)
        return found

    def _place(self) -> Ints:
        return np.arange(len(self.row)) - np.repeat(self.first, self.size)


def matches_of(events: Events, rows: Ints) -> Matches:
    """Match the collectives among some rows."""
    op = events.op[rows]
    return match(
        Calls(
            rank=events.rank[rows],
            group=events.group[rows],
            op=op.astype(np.int64),
            seq=events.seq[rows],
            size=np.where(np.isin(op, _EVEN), events.bytes[rows], UNKNOWN),
            stop=events.stop[rows],
        )
    )


def sample_of(events: Events, rows: Ints, matches: Matches) -> pa.Table:
    """The ends of a sample of the collectives of each group, numbered in place of groups."""
    matched = np.flatnonzero(matches.instance != NONE)
    number, row = matches.instance[matched], rows[matched]
    group = np.empty(matches.count, np.int64)
    group[number] = events.group[row]
    chosen = _sample(group)[number]
    number, row = number[chosen], row[chosen]
    zero = np.zeros(len(row), np.int64)
    table = pa.table(
        {
            "rank": events.rank[row],
            "group": number,
            "op": zero,
            "iteration": zero,
            "place": zero,
            "stop": events.stop[row],
        }
    )
    return table.cast(clocks_.ENDS)


def _sample(group: Ints) -> NDArray[np.bool_]:
    """Of the collectives of each group `_MOST`, evenly spread."""
    order = np.argsort(group, kind="stable")
    _, first, size = np.unique(group[order], return_index=True, return_counts=True)
    place = np.arange(len(group)) - np.repeat(first, size)
    each = np.repeat(-(-size // _MOST), size)
    found = np.zeros(len(group), np.bool_)
    found[order] = place % each == 0
    return found


def ahead_of(events: Events, offsets: Mapping[int, int]) -> Ints:
    """Of each event the offset of its rank's clock, by rank; 0 where nothing tells."""
    ranks, place = np.unique(events.rank, return_inverse=True)
    known = np.array([offsets.get(rank, 0) for rank in ranks.tolist()], np.int64)
    return known[place]
