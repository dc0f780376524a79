"""Who arrives when at matched collectives and messages, and who waits for whom.

At a meeting events wait for each other: until all that it needs have started, none that waits
in it can end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.exchange.matching import (
    NONE,
    ROOTED,
    CollectiveCalls,
    Matches,
    Messages,
    match,
    match_messages,
)
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import ENDS_TOGETHER, FROM_ROOT, OP, TO_ROOT, numbers
from fastcomm_kernels.arrays import NULL, Flags, Ints

_TOGETHER = numbers(ENDS_TOGETHER)

_WHOLE = (
    "rank",
    "group",
    "group_size",
    "seq",
    "bytes",
    "payload_bytes",
    "bus_bytes",
    "partner",
)


@dataclass(frozen=True, slots=True)
class CommunicationEvents:
    """Columns of the table of events, of ranks whose times are known.

    NULL, or false, stands for null and for what is not in the table.
    """

    rank: Ints
    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    group: Ints
    group_size: Ints
    seq: Ints
    bytes: Ints
    payload_bytes: Ints
    bus_bytes: Ints
    partner: Ints
    sends: Flags
    start: Ints
    stop: Ints
    alone: Ints

    @classmethod
    def of(cls, table: pa.Table) -> "CommunicationEvents":
        """Take the columns."""
        if table["start_ns"].null_count:
            table = table.filter(table["start_ns"].is_valid())
        rows, given = table.num_rows, set(table.column_names)
        nothing, never = np.broadcast_to(NULL, rows), np.broadcast_to(False, rows)
        names = {name: name for name in _WHOLE} | {"alone": "alone_ns"}
        start = filled(table["start_ns"])
        return cls(
            tag=table["tag"].to_numpy(),
            op=table["op"].to_numpy(),
            sends=table["sends"].to_numpy() if "sends" in given else never,
            start=start,
            stop=start + table["duration_ns"].to_numpy(),
            **{
                name: filled(table[said]) if said in given else nothing
                for name, said in names.items()
            },
        )

    @property
    def together(self) -> Ints:
        """The rows of collectives that end on all members at the same time."""
        return np.flatnonzero(self._of_several & np.isin(self.op, _TOGETHER))

    @property
    def collectives(self) -> Ints:
        """The rows of these, and of those whose root is known."""
        rooted = np.isin(self.op, ROOTED) & (self.partner != NULL)
        return np.flatnonzero(self._of_several & (rooted | np.isin(self.op, _TOGETHER)))

    @property
    def messages(self) -> Ints:
        """The rows of events that are one message with a rank that is known."""
        is_message = (self.op == OP["SendRecv"]) & (self.partner != NULL)
        return np.flatnonzero(self._of_several & is_message & (self.partner != self.rank))

    @property
    def _of_several(self) -> Flags:
        several: Flags = (self.group != NULL) & (self.group_size != 1)
        return several


@dataclass(frozen=True, slots=True)
class Met:
    """Rows of events that met with others: in what, numbered from 0."""

    row: Ints
    number: Ints
    count: int


def matches_of(events: CommunicationEvents, rows: Ints) -> Matches:
    """Match the collectives among some rows."""
    columns = {name: getattr(events, name) for name in ("rank", "group", "op", "seq", "stop")}
    columns |= {"payload": events.payload_bytes, "root": events.partner}
    return match(CollectiveCalls.of(columns, rows))


def met_in_collectives(events: CommunicationEvents, rows: Ints, matches: Matches) -> Met:
    """Those that were matched; of a rooted one, where the root is among them."""
    matched = np.flatnonzero(matches.instance != NONE)
    row, number = rows[matched], matches.instance[matched]
    counts = np.zeros(matches.count, np.bool_)
    rooted = np.isin(events.op[row], ROOTED)
    counts[number[~rooted | (events.partner[row] == events.rank[row])]] = True
    kept = counts[number]
    again = np.cumsum(counts) - 1
    return Met(row[kept], again[number[kept]], int(counts.sum()))


def met_in_messages(events: CommunicationEvents, rows: Ints, ahead: Ints) -> Met:
    """The messages of which both sides are there; `ahead` is what each event's clock is."""
    found = match_messages(
        Messages(
            rank=events.rank[rows],
            peer=events.partner[rows],
            is_send=events.sends[rows],
            group=events.group[rows],
            seq=events.seq[rows],
            size=events.payload_bytes[rows],
            stop=events.stop[rows] - ahead[rows],
        )
    )
    matched = np.flatnonzero(found.instance != NONE)
    return Met(rows[matched], found.instance[matched], found.count)


def joined(collectives: Met, messages: Met) -> Met:
    """Both, messages numbered behind the collectives."""
    return Met(
        np.concatenate([collectives.row, messages.row]),
        np.concatenate([collectives.number, messages.number + collectives.count]),
        collectives.count + messages.count,
    )


_FROM_ROOT, _TO_ROOT = numbers(FROM_ROOT), numbers(TO_ROOT)
_MESSAGE = OP["SendRecv"]


@dataclass(frozen=True, slots=True)
class MatchedEvents:
    """What several ranks were matched in."""

    row: Ints  # of the events
    edges: Ints  # first row of each meeting, and one behind the last
    start: Ints  # of each row, on the one clock
    until: Ints  # of each row: when whom it waits for had come
    holds: Flags  # of each row: whether others wait for it
    arrived: Ints  # of each meeting: when the last had come
    # From then to the median of its ends, the lower of two; with a root, and of messages, where
    # some are done before, to the last end. Negative: the clocks do not agree so well.
    transfer: Ints

    @classmethod
    def of(cls, events: CommunicationEvents, met: Met, ahead: Ints) -> "MatchedEvents":
        """The meetings of some rows of the events; `ahead` is what clocks are ahead by."""
        start, stop = (
            events.start[met.row] - ahead[met.row],
            events.stop[met.row] - ahead[met.row],
        )
        ends = stop[np.lexsort((stop, met.number))]
        order = np.lexsort((start, met.number))
        row, number, start = met.row[order], met.number[order], start[order]
        edges = np.searchsorted(number, np.arange(met.count + 1))
        arrived = start[edges[1:] - 1]
        op = events.op[row[edges[:-1]]]
        middle = (edges[:-1] + edges[1:] - 1) // 2
        end = ends[np.where(_ends_apart(op), edges[1:] - 1, middle)]
        until, holds = _waiting(events, row, start, np.diff(edges), arrived)
        return cls(
            row=row,
            edges=edges,
            start=start,
            until=until,
            holds=holds,
            arrived=arrived,
            transfer=end - arrived,
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
        """Of each row: how long it was there before whom it waits for."""
        wait: Ints = np.maximum(self.until - self.start, 0)
        return wait

    @property
    def held_up(self) -> Ints:
        """Of each meeting: how much later the last came than the one before, if that waits."""
        late = self.arrived - self.start[self.last - 1]
        return np.where(self.holds[self.last], late, 0)

    @property
    def later(self) -> Ints:
        """Of each row: how much later it came than the lower median of the others."""
        size, place = np.repeat(self.size, self.size), self._place()
        middle = (size - 2) // 2
        middle += middle >= place  # a row is none of the others
        later: Ints = self.start - self.start[np.repeat(self.first, self.size) + middle]
        return later

    def largest(self, values: Ints) -> Ints:
        """Of each meeting the largest value of its members; `values` are by event."""
        return self._over(np.maximum, values[self.row])

    def smallest(self, values: Ints) -> Ints:
        """Of each meeting the smallest value of its members; `values` are by event."""
        return self._over(np.minimum, values[self.row])

    def total(self, values: Ints) -> Ints:
        """Of each meeting the sum over its rows."""
        return self._over(np.add, values)

    def _over(self, what: np.ufunc, values: Ints) -> Ints:
        if not len(self.size):
            return np.zeros(0, np.int64)
        found: Ints = what.reduceat(values, self.first)
        return found

    def _place(self) -> Ints:
        return np.arange(len(self.row)) - np.repeat(self.first, self.size)


def _ends_apart(op: NDArray[np.int8]) -> Flags:
    """Whether members may be done before others have come."""
    apart: Flags = np.isin(op, _FROM_ROOT) | np.isin(op, _TO_ROOT) | (op == _MESSAGE)
    return apart


def _waiting(
    events: CommunicationEvents, row: Ints, start: Ints, size: Ints, arrived: Ints
) -> tuple[Ints, Flags]:
    """Until when each row waits, and whether others wait for it."""
    until, op = np.repeat(arrived, size), events.op[row]
    holds = np.ones(len(row), np.bool_)
    from_root, to_root = np.isin(op, _FROM_ROOT), np.isin(op, _TO_ROOT)
    if from_root.any() or to_root.any():
        is_root = events.partner[row] == events.rank[row]
        meeting = np.repeat(np.arange(len(size)), size)
        begun = np.zeros(len(size), np.int64)
        begun[meeting[is_root]] = start[is_root]
        until = np.where(from_root, begun[meeting], until)
        until = np.where(to_root & ~is_root, start, until)
        holds = np.where(from_root, is_root, ~to_root | ~is_root)
    return until, holds


class MeetingPairs(NamedTuple):
    """Parts and meetings, one pair a row, sorted by meeting and then by part."""

    part: Ints
    meeting: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Collectives and exchanges in order of time; a row a part, those of an instance together.

    Times are ns on the first rank's clock.
    """

    instance: Ints
    rank: Ints
    row: Ints  # of the rank's events
    op: NDArray[np.int8]
    tag: NDArray[np.int8]
    group: tuple[str, ...]
    start: Ints
    stop: Ints
    is_whole: Flags  # by instance: no participant is missing
    needed: MeetingPairs  # two parts or more of each meeting have to start
    waiting: (
        MeetingPairs  # before one part or more can end; a part waits in one meeting at most
    )

    def __len__(self) -> int:
        return len(self.row)

    @property
    def arrived(self) -> Ints:
        """When the last part of each meeting started."""
        begin = _begins(self.needed.meeting)
        latest: Ints = np.maximum.reduceat(self.start[self.needed.part], begin)
        return latest

    @property
    def last(self) -> Ints:
        """The part of each meeting that started last, the first of several."""
        part, meeting = self.needed
        order = np.lexsort((-part, self.start[part], meeting))
        last: Ints = part[order[_ends(meeting)]]
        return last

    @property
    def until(self) -> Ints:
        """Until when each part waits; its own start where it waits for nobody."""
        until = self.start.copy()
        until[self.waiting.part] = self.arrived[self.waiting.meeting]
        return until

    def wait_caused(self) -> tuple[Ints, Flags]:
        """Return how much later each part is than the one before it, and whether it is last.

        Last is a part for which the others of its meetings wait longest. Where it is not, it
        causes 0 ns.
        """
        part, meeting = self.needed
        start = self.start[part]
        ordered = start[np.lexsort((start, meeting))]
        ends = _ends(meeting)
        late = ordered[ends] - ordered[ends - 1]
        # A part that alone waits for the others holds up nobody.
        alone = np.full(len(late), NONE)
        sole = np.flatnonzero(np.bincount(self.waiting.meeting) == 1)
        alone[sole] = self.waiting.part[_begins(self.waiting.meeting)[sole]]
        counts = alone[meeting] != part
        is_late = counts & (start == ordered[ends][meeting])
        caused = np.full(len(self), np.iinfo(np.int64).max)
        np.minimum.at(caused, part[is_late], late[meeting[is_late]])
        is_last = np.zeros(len(self), np.bool_)
        is_last[part[is_late]] = True
        is_last[part[counts & ~is_late]] = False
        return np.where(is_last, caused, 0), is_last


def _begins(sorted_: Ints) -> Ints:
    return np.flatnonzero(np.diff(sorted_, prepend=-1))


def _ends(sorted_: Ints) -> Ints:
    """Return the last row of each of the sorted numbers."""
    return np.append(_begins(sorted_)[1:], len(sorted_)) - 1
