"""Arrival, wait and transfer times of matched collectives and point-to-point messages.

Times are integers in ns. At a *synchronization point*, the events that wait can end only after
all events that it needs have started. Most collectives have one; a collective in which members
wait for the root alone has one per such member.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.ranks.matching import (
    FACTOR,
    CollectiveCalls,
    Matches,
    Messages,
    match,
    match_messages,
)
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import ENDS_TOGETHER, FROM_ROOT, OP, ROOTED, TO_ROOT
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

_MESSAGE = OP["SendRecv"]
# Columns of events that a table may lack, by attribute.
_OPTIONAL = {
    **{name: name for name in ("rank", "group", "group_size", "seq", "call_id", "step")},
    "iteration": "iteration",
    **{name: name for name in ("partner", "stream", "bytes", "payload_bytes", "bus_bytes")},
    **{name: f"{name}_ns" for name in ("alone", "exposed")},
    **{name: f"{name}_ns" for name in ("exposed_at_start", "exposed_at_end")},
}


@dataclass(frozen=True, slots=True)
class CommunicationEvents:
    """Communication events of ranks whose times are known, one array per column.

    NULL, or False, stands for null and for columns that the table does not have.
    """

    rank: Ints
    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    group: Ints
    group_size: Ints
    seq: Ints
    call_id: Ints
    step: Ints
    iteration: Ints
    bytes: Ints
    payload_bytes: Ints
    bus_bytes: Ints
    partner: Ints
    stream: Ints
    sends: Flags
    start: Ints
    stop: Ints
    alone: Ints
    exposed: Ints
    exposed_at_start: Ints
    exposed_at_end: Ints

    @classmethod
    def of(cls, table: pa.Table) -> "CommunicationEvents":
        """Convert a table with the columns of `traffic.rows`, or with some of them.

        Rows without a start time are dropped.
        """
        if table["start_ns"].null_count:
            table = table.filter(table["start_ns"].is_valid())
        rows, present = table.num_rows, set(table.column_names)
        nulls, all_false = np.broadcast_to(NULL, rows), np.broadcast_to(False, rows)
        start = filled(table["start_ns"])
        return cls(
            tag=table["tag"].to_numpy(),
            op=table["op"].to_numpy(),
            sends=table["sends"].to_numpy() if "sends" in present else all_false,
            start=start,
            stop=start + table["duration_ns"].to_numpy(),
            **{
                name: filled(table[column]) if column in present else nulls
                for name, column in _OPTIONAL.items()
            },
        )

    def since_free(self, rows: Ints) -> Ints:
        """Return the time in ns from the end of the event before to the start of some events.

        That is the previous one of the rank, group and stream; without one, the time has no
        bound.
        """
        # One number for rank, group and stream: a sort by each takes twice as long.
        lane = (self.group * FACTOR + self.rank) * FACTOR + self.stream
        order = np.lexsort((self.start, lane))
        is_next = (lane[order[1:]] == lane[order[:-1]]) & (self.stream[order[1:]] != NULL)
        since = np.full(len(order), np.iinfo(np.int64).max)
        before, own = order[:-1][is_next], order[1:][is_next]
        since[own] = np.maximum(self.start[own] - self.stop[before], 0)
        return since[rows]

    def exposed_until(self, rows: Ints, elapsed: Ints) -> tuple[Ints, Ints]:
        """Return the exposed time of some events before and after a moment in them, in ns.

        `elapsed` is the time from the start of each to the moment, at most its duration. From
        the first gap of the exposed time to the last, its share is taken as constant.
        """
        whole, head, tail = (
            np.maximum(column[rows], 0)
            for column in (self.exposed, self.exposed_at_start, self.exposed_at_end)
        )
        duration = self.stop[rows] - self.start[rows]
        between, gaps = whole - head - tail, np.maximum(duration - head - tail, 1)
        # As floats: the product of two times may exceed an int64.
        within = np.rint(between * ((elapsed - head) / gaps)).astype(np.int64)
        before = np.where(
            elapsed <= head,
            np.minimum(elapsed, whole),
            np.where(duration - elapsed <= tail, whole - duration + elapsed, head + within),
        )
        return before, whole - before

    @property
    def synchronous(self) -> Ints:
        """Ascending rows of collectives that end on all members at the same time.

        Only of process groups that can be matched across ranks. Point-to-point messages and
        operations with a root are left out.
        """
        return np.flatnonzero(self._is_shared & np.isin(self.op, ENDS_TOGETHER))

    @property
    def collectives(self) -> Ints:
        """Ascending rows of collectives that can be matched: `synchronous`, or known root."""
        rooted = np.isin(self.op, ROOTED) & (self.partner != NULL)
        return np.flatnonzero(self._is_shared & (rooted | np.isin(self.op, ENDS_TOGETHER)))

    @property
    def messages(self) -> Ints:
        """Ascending rows of point-to-point messages to or from a known other rank."""
        is_message = (self.op == _MESSAGE) & (self.partner != NULL)
        return np.flatnonzero(self._is_shared & is_message & (self.partner != self.rank))

    @property
    def _is_shared(self) -> Flags:
        is_shared: Flags = (self.group != NULL) & (self.group_size != 1)
        return is_shared


@dataclass(frozen=True, slots=True)
class Participants:
    """Events that were matched with events of other ranks: a row per event."""

    row: Ints  # of the events
    number: Ints  # of the collective or message, from 0
    count: int  # of collectives or messages

    def of_rows(self, chosen: Flags) -> "Participants":
        """Select whole collectives or messages by their rows, and number them anew."""
        numbers_, number = np.unique(self.number[chosen], return_inverse=True)
        return Participants(self.row[chosen], number, len(numbers_))


def match_collectives(
    events: CommunicationEvents,
    rows: Ints,
    *,
    is_host_run: bool = False,
    has_loose: bool = False,
) -> Matches:
    """Match collectives across ranks.

    Parameters
    ----------
    events
        Communication events of several ranks.
    rows
        Rows of `events` that are collectives, see `CommunicationEvents.collectives`.
    is_host_run
        Whether the host communicates, where collectives do not end at the same time.
    has_loose
        Whether ends of other events showed that a group of unknown members is several.

    Returns
    -------
    Matches
        A value per element of `rows`.

    """
    names = ("rank", "group", "op", "seq", "call_id", "stop", "step")
    columns = {name: getattr(events, name) for name in names}
    columns |= {"payload": events.payload_bytes, "root": events.partner}
    is_checked = (events.group_size == NULL) & (not is_host_run)
    columns["start"] = np.where(is_checked, events.start, NULL)
    return match(CollectiveCalls.of(columns, rows), has_loose=has_loose)


@dataclass(frozen=True, slots=True)
class Completeness:
    """Which matched collectives all members of their group have, as far as these are read.

    Members are the ranks with any event of the group.
    """

    is_complete: Flags  # per collective
    ranks: frozenset[int]  # that have no event of some collective of their group

    @classmethod
    def of(cls, events: CommunicationEvents, rows: Ints, matches: Matches) -> Self:
        """Compare the members of collectives, see `collective_participants`."""
        rank, group = events.rank[rows], events.group[rows]
        _, first, member = np.unique(
            group * FACTOR + rank, return_index=True, return_inverse=True
        )
        groups, place, members = np.unique(
            group[first], return_inverse=True, return_counts=True
        )
        matched = np.flatnonzero(matches.instance != NONE)
        number = matches.instance[matched]
        of_collective = np.zeros(matches.count, np.int64)
        of_collective[number] = np.searchsorted(groups, group[matched])
        size = np.bincount(number, minlength=matches.count)
        is_complete = size == members[of_collective]
        total = np.bincount(of_collective, minlength=len(groups))
        own = np.bincount(member[matched], minlength=len(first))
        return cls(is_complete, frozenset(rank[first][own < total[place]].tolist()))


def collective_participants(
    events: CommunicationEvents, rows: Ints, matches: Matches, completeness: Completeness
) -> Participants:
    """Return the events of matched collectives, and the number of the collective of each.

    Collectives with a root count only if the event of the root is among `rows`, and all only
    if they are complete: without the events of a member, arrivals and transfers of the others
    mean little.

    Parameters
    ----------
    events
        Communication of all ranks.
    rows
        Rows of the collectives.
    matches
        The collective of each of these rows, or NONE.
    completeness
        Which collectives are complete.

    """
    matched = np.flatnonzero(matches.instance != NONE)
    row, number = rows[matched], matches.instance[matched]
    is_complete = np.zeros(matches.count, np.bool_)
    rooted = np.isin(events.op[row], ROOTED)
    is_complete[number[~rooted | (events.partner[row] == events.rank[row])]] = True
    is_complete &= completeness.is_complete
    is_chosen = is_complete[number]
    renumbered = np.cumsum(is_complete) - 1
    return Participants(row[is_chosen], renumbered[number[is_chosen]], int(is_complete.sum()))


def message_participants(events: CommunicationEvents, rows: Ints, ahead: Ints) -> Participants:
    """Match messages across ranks, and return the events of those whose two sides are present.

    Parameters
    ----------
    events
        Communication of all ranks.
    rows
        Rows of the messages.
    ahead
        For every event, how far the clock of its rank is ahead, ns.

    """
    matches = match_messages(
        Messages(
            rank=events.rank[rows],
            peer=events.partner[rows],
            is_send=events.sends[rows],
            group=events.group[rows],
            seq=events.seq[rows],
            size=events.payload_bytes[rows],
            stop=events.stop[rows] - ahead[rows],
            step=events.step[rows],
        )
    )
    matched = np.flatnonzero(matches.instance != NONE)
    return Participants(rows[matched], matches.instance[matched], matches.count)


def concatenate(collectives: Participants, messages: Participants) -> Participants:
    """Return the events of both; messages are numbered after the collectives.

    `row` of both are rows of one `CommunicationEvents`.
    """
    return Participants(
        np.concatenate([collectives.row, messages.row]),
        np.concatenate([collectives.number, messages.number + collectives.count]),
        collectives.count + messages.count,
    )


@dataclass(frozen=True, slots=True)
class MatchedEvents:
    """Events of matched collectives and messages, sorted by collective and then by start.

    Properties are arrays with a value per row, or per collective (or message).
    """

    row: Ints  # of the events
    edges: Ints  # per collective its first row, then the number of rows
    start: Ints  # per row, ns on the common clock
    wait_until: Ints  # per row: when the members that it waits for have arrived
    is_awaited: Flags  # per row: whether other members wait for it
    last_arrival: Ints  # per collective: when all members that others wait for have arrived
    # Per collective: from the last arrival to the lower median of its ends. Of rooted
    # collectives, which some members finish early, to the last end; of messages to the end
    # of the receive. Negative where clocks are not aligned well enough.
    transfer: Ints

    @classmethod
    def of(
        cls, events: CommunicationEvents, participants: Participants, ahead: Ints
    ) -> "MatchedEvents":
        """Compute the wait and the transfer of each matched event.

        Parameters
        ----------
        events
            Communication of all ranks.
        participants
            The matched events.
        ahead
            For every event, how far the clock of its rank is ahead, ns.

        """
        row, number = participants.row, participants.number
        start, stop = (times[row] - ahead[row] for times in (events.start, events.stop))
        # The operation that sends may end long after the message has arrived.
        is_sent = (events.op[row] == _MESSAGE) & events.sends[row]
        ended = np.where(is_sent, np.iinfo(np.int64).min, stop)
        ends = stop[np.lexsort((ended, number))]
        order = np.lexsort((start, number))
        row, number, start = row[order], number[order], start[order]
        edges = np.searchsorted(number, np.arange(participants.count + 1))
        last_arrival = start[edges[1:] - 1]
        op = events.op[row[edges[:-1]]]
        middle = (edges[:-1] + edges[1:] - 1) // 2
        end = ends[np.where(np.isin(op, (*ROOTED, _MESSAGE)), edges[1:] - 1, middle)]
        wait_until, is_awaited = _waiting(events, row, start, np.diff(edges), last_arrival)
        return cls(
            row=row,
            edges=edges,
            start=start,
            wait_until=wait_until,
            is_awaited=is_awaited,
            last_arrival=last_arrival,
            transfer=end - last_arrival,
        )

    @property
    def size(self) -> Ints:
        """Number of members of each collective, as int64."""
        return np.diff(self.edges)

    @property
    def first(self) -> Ints:
        """Row of this table that arrives first, per collective."""
        return self.edges[:-1]

    @property
    def last(self) -> Ints:
        """Row of this table that arrives last, per collective."""
        return self.edges[1:] - 1

    @property
    def wait(self) -> Ints:
        """Wait time of each row in ns: from its start to `wait_until`; 0 if that is earlier."""
        wait: Ints = np.maximum(self.wait_until - self.start, 0)
        return wait

    @property
    def wait_caused(self) -> Ints:
        """Wait that the last arrival causes, per collective, in ns.

        It is the time between the last two arrivals; 0 where no member waits for the last.
        """
        late = self.last_arrival - self.start[self.last - 1]
        return np.where(self.is_awaited[self.last], late, 0)

    @property
    def lateness(self) -> Ints:
        """Start of each row minus the lower median of the other members' starts, in ns."""
        size, first = (np.repeat(column, self.size) for column in (self.size, self.first))
        middle = first + (size - 2) // 2
        middle += middle >= np.arange(len(first))  # leave the row itself out
        lateness: Ints = self.start - self.start[middle]
        return lateness

    def largest(self, values: Ints) -> Ints:
        """Return the largest value of the members of each collective.

        Parameters
        ----------
        values
            A value per event of the `CommunicationEvents`, in any unit: not per row.

        """
        return self._reduce(np.maximum, values[self.row])

    def smallest(self, values: Ints) -> Ints:
        """Return the smallest value of the members of each collective.

        Parameters
        ----------
        values
            A value per event of the `CommunicationEvents`, in any unit: not per row.

        """
        return self._reduce(np.minimum, values[self.row])

    def total(self, values: Ints) -> Ints:
        """Return the sum over the members of each collective.

        Parameters
        ----------
        values
            A value per row of this table, such as `wait`: not per event.

        """
        return self._reduce(np.add, values)

    def _reduce(self, operation: np.ufunc, values: Ints) -> Ints:
        """Reduce values per row to one value per collective."""
        reduced: Ints = operation.reduceat(values, self.first)
        return reduced


def _waiting(
    events: CommunicationEvents, row: Ints, start: Ints, size: Ints, last_arrival: Ints
) -> tuple[Ints, Flags]:
    """Return until when each row waits, in ns, and whether others wait for it."""
    wait_until, op = np.repeat(last_arrival, size), events.op[row]
    is_awaited = np.ones(len(row), np.bool_)
    from_root, to_root = np.isin(op, FROM_ROOT), np.isin(op, TO_ROOT)
    if from_root.any() or to_root.any():
        is_root = events.partner[row] == events.rank[row]
        collective = np.repeat(np.arange(len(size)), size)
        root_start = np.zeros(len(size), np.int64)
        root_start[collective[is_root]] = start[is_root]
        wait_until = np.where(from_root, root_start[collective], wait_until)
        wait_until = np.where(to_root & ~is_root, start, wait_until)
        is_awaited = np.where(from_root, is_root, ~to_root | ~is_root)
    return wait_until, is_awaited
