"""Arrival, wait and transfer times of matched collectives and point-to-point messages.

Times are integers in ns. At a *synchronization point*, the events that wait can end only after
all events that it needs have started. Most collectives have one; a collective in which members
wait for the root alone has one per such member.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.exchange.matching import (
    ROOTED,
    CollectiveCalls,
    CommunicationEvents,
    Matches,
    match,
)
from fastcomm.exchange.messages import Messages, match_messages
from fastcomm.trace.schema import FROM_ROOT, OP, TO_ROOT, numbers
from fastcomm_kernels.arrays import NONE, Flags, Ints


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


def match_collectives(events: CommunicationEvents, rows: Ints) -> Matches:
    """Match collectives across ranks.

    Parameters
    ----------
    events
        Communication events of several ranks.
    rows
        Rows of `events` that are collectives, see `CommunicationEvents.collectives`.

    Returns
    -------
    Matches
        A value per element of `rows`.

    """
    columns = {name: getattr(events, name) for name in ("rank", "group", "op", "seq", "stop")}
    columns |= {"payload": events.payload_bytes, "root": events.partner}
    return match(CollectiveCalls.of(columns, rows))


def collective_participants(
    events: CommunicationEvents, rows: Ints, matches: Matches
) -> Participants:
    """Return the events of matched collectives, and the number of the collective of each.

    Collectives with a root count only if the event of the root is among `rows`.

    Parameters
    ----------
    events
        Communication of all ranks.
    rows
        Rows of the collectives.
    matches
        The collective of each of these rows, or NONE.

    """
    matched = np.flatnonzero(matches.instance != NONE)
    row, number = rows[matched], matches.instance[matched]
    is_complete = np.zeros(matches.count, np.bool_)
    rooted = np.isin(events.op[row], ROOTED)
    is_complete[number[~rooted | (events.partner[row] == events.rank[row])]] = True
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


_FROM_ROOT, _TO_ROOT = numbers(FROM_ROOT), numbers(TO_ROOT)
_MESSAGE = OP["SendRecv"]


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
        start, stop = (
            events.start[participants.row] - ahead[participants.row],
            events.stop[participants.row] - ahead[participants.row],
        )
        op = events.op[participants.row]
        # The operation that sends may end long after the message has arrived.
        is_sent = (op == _MESSAGE) & events.sends[participants.row]
        ended = np.where(is_sent, np.iinfo(np.int64).min, stop)
        ends = stop[np.lexsort((ended, participants.number))]
        order = np.lexsort((start, participants.number))
        row, number, start = participants.row[order], participants.number[order], start[order]
        edges = np.searchsorted(number, np.arange(participants.count + 1))
        last_arrival = start[edges[1:] - 1]
        op = events.op[row[edges[:-1]]]
        middle = (edges[:-1] + edges[1:] - 1) // 2
        end = ends[np.where(_ends_apart(op), edges[1:] - 1, middle)]
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
        size, place = np.repeat(self.size, self.size), self._place()
        middle = (size - 2) // 2
        middle += middle >= place  # leave the row itself out
        lateness: Ints = self.start - self.start[np.repeat(self.first, self.size) + middle]
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
        if not len(self.size):
            return np.zeros(0, np.int64)
        reduced: Ints = operation.reduceat(values, self.first)
        return reduced

    def _place(self) -> Ints:
        return np.arange(len(self.row)) - np.repeat(self.first, self.size)


def _ends_apart(op: NDArray[np.int8]) -> Flags:
    """Return whether members of an operation may finish before others arrive."""
    apart: Flags = np.isin(op, _FROM_ROOT) | np.isin(op, _TO_ROOT) | (op == _MESSAGE)
    return apart


def _waiting(
    events: CommunicationEvents, row: Ints, start: Ints, size: Ints, last_arrival: Ints
) -> tuple[Ints, Flags]:
    """Return until when each row waits, in ns, and whether others wait for it."""
    wait_until, op = np.repeat(last_arrival, size), events.op[row]
    is_awaited = np.ones(len(row), np.bool_)
    from_root, to_root = np.isin(op, _FROM_ROOT), np.isin(op, _TO_ROOT)
    if from_root.any() or to_root.any():
        is_root = events.partner[row] == events.rank[row]
        collective = np.repeat(np.arange(len(size)), size)
        root_start = np.zeros(len(size), np.int64)
        root_start[collective[is_root]] = start[is_root]
        wait_until = np.where(from_root, root_start[collective], wait_until)
        wait_until = np.where(to_root & ~is_root, start, wait_until)
        is_awaited = np.where(from_root, is_root, ~to_root | ~is_root)
    return wait_until, is_awaited


class SyncPairs(NamedTuple):
    """Pairs of a part and a synchronization point, sorted by point, then by part."""

    part: Ints
    sync_point: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Matched collectives, and exchanges of messages, of several ranks, in order of time.

    A *part* is one rank's event in an instance, a row; parts of an instance are adjacent. Times
    are ns on the first rank's clock.
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
    needed: SyncPairs  # parts that have to start, two or more per synchronization point
    waiting: SyncPairs  # parts that can end only then; a part waits at one point at most

    def __len__(self) -> int:
        return len(self.row)

    @property
    def arrived(self) -> Ints:
        """Start of the last part of each synchronization point, in ns as `start`."""
        begin = _begins(self.needed.sync_point)
        latest: Ints = np.maximum.reduceat(self.start[self.needed.part], begin)
        return latest

    @property
    def last(self) -> Ints:
        """Part that arrives last at each synchronization point; the first of several."""
        part, sync_point = self.needed
        order = np.lexsort((-part, self.start[part], sync_point))
        last: Ints = part[order[_ends(sync_point)]]
        return last

    @property
    def until(self) -> Ints:
        """Time in ns until which each part waits; its own start where it waits for nobody.

        It precedes the part's start if the others arrive earlier.
        """
        until = self.start.copy()
        until[self.waiting.part] = self.arrived[self.waiting.sync_point]
        return until

    def wait_caused(self) -> tuple[Ints, Flags]:
        """Return the time in ns that others wait for each part, and whether the part is last.

        A part is last if it arrives last (others may tie) at every synchronization point where
        another part waits for it. It then causes the time since the second last arrival, the
        smallest over its points. Other parts cause 0.

        Returns
        -------
        tuple of Ints and Flags
            A value per part each.

        """
        part, sync_point = self.needed
        start = self.start[part]
        ordered = start[np.lexsort((start, sync_point))]
        ends = _ends(sync_point)
        late = ordered[ends] - ordered[ends - 1]
        # Nobody waits for a part that is the only one to wait.
        alone = np.full(len(late), NONE)
        sole = np.flatnonzero(np.bincount(self.waiting.sync_point) == 1)
        alone[sole] = self.waiting.part[_begins(self.waiting.sync_point)[sole]]
        counts = alone[sync_point] != part
        is_late = counts & (start == ordered[ends][sync_point])
        caused = np.full(len(self), np.iinfo(np.int64).max)
        np.minimum.at(caused, part[is_late], late[sync_point[is_late]])
        is_last = np.zeros(len(self), np.bool_)
        is_last[part[is_late]] = True
        is_last[part[counts & ~is_late]] = False
        return np.where(is_last, caused, 0), is_last


def _begins(sorted_: Ints) -> Ints:
    """Return the first row of each run of equal numbers."""
    return np.flatnonzero(np.diff(sorted_, prepend=-1))


def _ends(sorted_: Ints) -> Ints:
    """Return the last row of each run of equal numbers."""
    return np.append(_begins(sorted_)[1:], len(sorted_)) - 1
