"""Which collective, or which message, of one rank is which of another.

Two collectives are one if their groups have the same members and their sequence numbers are the
same. In a group where not every event has a number of its own they are brought in line: by
operation and size, and by their ends, which all members reach at the same time. So a rank that
lost some events, at the edge of its trace or between, does not shift all that follow.

Operations with a root, and messages of two that do not say who sends, end on one rank before
they end on another. They are series of their own, an operation each, and come after the others,
by whose ends the clocks are set.

Messages from one rank to another in a group are a route, and do not overtake each other on it:
the k-th that is sent is the k-th that is received. Where one side lacks some they are brought
in line, by number, by size and by their ends.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa

from fastcomm.exchange import sequences
from fastcomm.exchange.clocks import by_rank, offsets_of
from fastcomm.exchange.sequences import MOST_AGREE, NEAR_NS, NONE, edges
from fastcomm.trace.schema import ENDS_TOGETHER, EVEN, FROM_ROOT, OPS, TO_ROOT, numbers
from fastcomm_kernels.arrays import NULL, Flags, Ints

__all__ = ["NONE", "NULL", "CollectiveCalls", "Matches", "match"]


ROOTED = numbers(FROM_ROOT + TO_ROOT)
_EVEN = numbers(EVEN)
_RANK_BITS = 40
_ENDS_APART = np.array([name not in ENDS_TOGETHER for name in OPS])
# Groups are hashes; what an operation's own series adds to one has to be large, too.
_SERIES = 0x632BE59BD9B4E019

_ROUTE_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCalls:
    """Events that are one rank's part in a collective each, in any order; a row an event.

    That is whatever a group does together: operations of `schema.ENDS_TOGETHER`, operations
    with a root, and messages in a group of two whose direction is not known.
    """

    rank: Ints
    group: Ints  # the label of its members
    op: Ints  # index into OPS
    seq: Ints  # NULL where there is none
    size: Ints  # bytes, where they have to be the same on all members; else NULL
    stop: Ints  # ns, on the rank's clock
    root: Ints | None = None  # global rank; NULL where there is none. None: nowhere known

    @classmethod
    def of(cls, columns: Mapping[str, Ints], rows: Ints) -> Self:
        """Take some rows of columns `rank`, `group`, `op`, `seq`, `payload`, `stop`, `root`.

        A payload says which collective it is where all members have the same one; what stands
        under `root` for other operations is ignored.
        """
        taken = {name: column[rows] for name, column in columns.items()}
        op, payload, root = (taken.pop(name) for name in ("op", "payload", "root"))
        return cls(
            **taken,
            op=op.astype(np.int64),
            size=np.where(np.isin(op, _EVEN), payload, NULL),
            root=np.where(np.isin(op, ROOTED), root, NULL),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """The collective of each row: numbers from 0, NONE where no other rank has it."""

    instance: Ints
    count: int  # of collectives
    dropped: int  # rows of ranks that could not be brought in line with their group
    refused: Ints  # as `instance`: those left out, whose members disagree in size or root
    numbered: Flags  # of each row: it was matched by its sequence number, not by order and end


def match(calls: CollectiveCalls) -> Matches:
    """Find the collectives that several ranks have."""
    apart = _ENDS_APART[calls.op]
    series = _series(calls, apart)
    instance, rest = _by_number(series)
    done, dropped = int(instance.max(initial=NONE)) + 1, 0
    numbered = instance != NONE
    for ends_apart in (False, True):
        rows = rest[apart[rest] == ends_apart]
        if ends_apart and len(rows):
            series = replace(series, stop=calls.stop - _ahead(calls, instance, ~apart))
        for own in _groups(series, rows):
            places, lost = _by_order(series, own, ends_apart=ends_apart)
            dropped += lost
            instance[own] = np.where(places == NONE, NONE, places + done)
            done += int(places.max(initial=NONE)) + 1
    contradicts = _contradicts(calls, instance, done)
    found, count = _of_several(instance, ~contradicts)
    refused = np.broadcast_to(np.int64(NONE), len(instance))
    if contradicts.any():
        refused, _ = _of_several(instance, contradicts)
    return Matches(
        instance=found, count=count, dropped=dropped, refused=refused, numbered=numbered
    )


def _series(calls: CollectiveCalls, apart: Flags) -> CollectiveCalls:
    """The same calls with a group of its own for each operation that does not end together."""
    if not apart.any():
        return calls
    group = calls.group.copy()
    group[apart] ^= calls.op[apart] * _SERIES
    return replace(calls, group=group)


def _by_number(calls: CollectiveCalls) -> tuple[Ints, Ints]:
    """The collective of each row by its number; and the rows that numbers tell nothing of."""
    # One sort tells it where there are numbers; a rank and an operation are one key.
    member = calls.op << _RANK_BITS | calls.rank
    order = np.lexsort((member, calls.seq, calls.group))
    sorted_ = _Sorted(*(column[order] for column in (calls.group, calls.seq, member)))
    numbered = sorted_.numbered()
    instance = np.full(len(order), NONE, np.int64)
    number = np.cumsum(sorted_.begins_another() & numbered) - 1
    instance[order[numbered]] = number[numbered]
    return instance, order[~numbered]


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Rows by group, number, operation and rank."""

    group: Ints
    seq: Ints
    member: Ints

    def numbered(self) -> Flags:
        """Whether each event has its own, of a rank and an operation, all over its group."""
        bad: Flags = self.seq == NULL
        bad[1:] |= ~self._differ(self.group, self.seq, self.member)
        starts = edges(self.group)
        if not len(starts):
            return bad
        spoilt = np.logical_or.reduceat(bad, starts)
        numbered: Flags = ~np.repeat(spoilt, np.diff(np.append(starts, len(bad))))
        return numbered

    def begins_another(self) -> Flags:
        """Whether a row is of another collective than the one before."""
        op = self.member >> _RANK_BITS
        return np.append(
            np.ones(min(1, len(op)), np.bool_), self._differ(self.group, self.seq, op)
        )

    def _differ(self, *columns: Ints) -> Flags:
        differ = np.zeros(max(0, len(self.group) - 1), np.bool_)
        for column in columns:
            differ |= column[1:] != column[:-1]
        return differ


def _groups(calls: CollectiveCalls, rows: Ints) -> Iterator[Ints]:
    """The rows of each group, by rank and end."""
    rows = rows[np.lexsort((calls.stop[rows], calls.rank[rows], calls.group[rows]))]
    yield from np.split(rows, edges(calls.group[rows])[1:]) if len(rows) else ()


def _by_order(calls: CollectiveCalls, rows: Ints, *, ends_apart: bool) -> tuple[Ints, int]:
    """Places of a group's rows in the sequence that its ranks share; how many have none."""
    code, first = _codes(calls, rows), edges(calls.rank[rows])
    bring = sequences.of_ends_apart if ends_apart else sequences.of_one_end
    return bring(code, calls.stop[rows], first)


def _codes(calls: CollectiveCalls, rows: Ints) -> Ints:
    """One number for each pair of operation and size; for an operation where a size lacks."""
    op, size = calls.op[rows], calls.size[rows]
    unsized = np.isin(op, op[size == NULL])
    sizes, code = np.unique(np.where(unsized, NULL, size), return_inverse=True)
    return op * len(sizes) + code


def _ahead(calls: CollectiveCalls, instance: Ints, together: Flags) -> Ints:
    """What the clock of each row's rank is ahead by, as far as the collectives so far tell."""
    rows = np.flatnonzero((instance != NONE) & together)
    found = offsets_of(calls.rank[rows], calls.group[rows], instance[rows], calls.stop[rows])
    return by_rank(calls.rank, {each.rank: each.offset_ns for each in found})


def _contradicts(calls: CollectiveCalls, instance: Ints, count: int) -> Flags:
    """Of each collective whether two of its members say another size or root."""
    found = np.zeros(count, np.bool_)
    for said in (calls.size, calls.root):
        if said is None:
            continue
        one = np.full(count + 1, NULL)  # one behind the last for NONE
        one[instance] = said
        if (one[instance] == said)[instance != NONE].all():
            continue
        known = np.flatnonzero((instance != NONE) & (said != NULL))
        number, value = instance[known], said[known]
        one[number] = value
        found[number[one[number] != value]] = True
    return found


def _of_several(instance: Ints, counts: Flags) -> tuple[Ints, int]:
    """Instances numbered anew, without those of one rank alone and those that do not count."""
    known = instance != NONE
    several = (np.bincount(instance[known], minlength=len(counts)) > 1) & counts
    if several.all():
        return instance, len(several)
    number = np.where(several, np.cumsum(several) - 1, NONE)
    found = np.full(len(instance), NONE, np.int64)
    found[known] = number[instance[known]]
    return found, int(several.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """One side of a message a row, in any order; those of one rank and moment in their own.

    An event that sends to two ranks and receives from one is three rows.
    """

    rank: Ints  # whose side it is, from 0 on
    peer: Ints  # the rank of the other side
    is_send: Flags
    group: Ints  # the label of its members
    seq: Ints  # NULL where there is none; need not be the same on both sides
    size: Ints  # bytes of this message alone; NULL
    stop: Ints  # ns, on clocks that agree as well as is known


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMatches:
    """The message of each row: numbers from 0, each on two rows; NONE without other side."""

    instance: Ints
    count: int  # of messages

    def lacking(self, messages: Messages) -> Flags:
        """Which rows have no other side, though there are messages of that rank."""
        found: Flags = (self.instance == NONE) & np.isin(messages.peer, messages.rank)
        return found

    def pairs(self, is_send: Flags) -> tuple[Ints, Ints]:
        """For each message the row that sends it, and the row that receives it."""
        sender, receiver = (np.empty(self.count, np.int64) for _ in range(2))
        for side, found in ((is_send, sender), (~is_send, receiver)):
            rows = np.flatnonzero(side & (self.instance != NONE))
            found[self.instance[rows]] = rows
        return sender, receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The messages of events as rows: of which event, to or from whom."""

    event: Ints  # place among the events
    peer: Ints
    is_send: Flags
    is_only: Flags  # the event has no other message

    @classmethod
    def of(cls, sends_to: pa.Array, receives_from: pa.Array) -> "Sides":
        """Take them from the lists that COMM has of its events; null lists are empty."""
        count = len(sends_to)
        lists = (sends_to, receives_from)
        sizes = [
            each.value_lengths().fill_null(0).to_numpy(zero_copy_only=False) for each in lists
        ]
        event = np.concatenate([np.repeat(np.arange(count), size) for size in sizes])
        peer = np.concatenate([each.flatten().to_numpy(zero_copy_only=False) for each in lists])
        is_send = np.repeat([True, False], [int(size.sum()) for size in sizes])
        order = np.argsort(event, kind="stable")
        of_event = sizes[0] + sizes[1]
        return cls(
            event=event[order],
            peer=peer[order].astype(np.int64),
            is_send=is_send[order],
            is_only=of_event[event[order]] == 1,
        )


def match_messages(messages: Messages) -> MessageMatches:
    """Find the messages of which both sides are there."""
    instance = np.full(len(messages.rank), NONE, np.int64)
    if not len(instance):
        return MessageMatches(instance=instance, count=0)
    routes = _Routes.of(messages)
    alike, sent, received = routes.alike()
    instance[routes.row[sent]] = instance[routes.row[received]] = np.arange(len(sent))
    done = len(sent)
    for route in np.flatnonzero((routes.sent > 0) & (routes.received > 0) & ~alike).tolist():
        ours, theirs = routes.brought_in_line(route)
        instance[routes.row[ours]] = instance[routes.row[theirs]] = done + np.arange(len(ours))
        done += len(ours)
    return MessageMatches(instance=instance, count=done)


@dataclass(frozen=True, slots=True)
class _Routes:
    """Rows by route, what is sent before what is received, each in the order of its ends."""

    row: Ints  # of the messages
    seq: Ints
    size: Ints
    stop: Ints
    begin: Ints  # of each route its first place
    sent: Ints  # of each route how many
    received: Ints

    @classmethod
    def of(cls, messages: Messages) -> "_Routes":
        """Sort them."""
        is_send = messages.is_send
        sender = np.where(is_send, messages.rank, messages.peer)
        receiver = np.where(is_send, messages.peer, messages.rank)
        way = sender << _ROUTE_BITS | receiver
        row = np.lexsort((messages.stop, ~is_send, way, messages.group))
        new = np.append(True, np.diff(way[row]) != 0)
        new[1:] |= messages.group[row[1:]] != messages.group[row[:-1]]
        begin = np.flatnonzero(new)
        sent = np.add.reduceat(is_send[row].astype(np.int64), begin)
        columns = (messages.seq[row], messages.size[row], messages.stop[row])
        return cls(row, *columns, begin, sent, np.diff(np.append(begin, len(row))) - sent)

    def alike(self) -> tuple[Flags, Ints, Ints]:
        """The routes whose sides have the same messages, and the places of their pairs.

        Then numbers and sizes are the same as far as they are known, and ends are near.
        """
        route = np.repeat(np.arange(len(self.begin)), np.where(self._even, self.sent, 0))
        first = np.cumsum(np.append(0, np.where(self._even, self.sent, 0)))[:-1]
        sent = self.begin[route] + np.arange(len(route)) - first[route]
        received = sent + self.sent[route]
        other = np.abs(self.stop[sent] - self.stop[received]) > NEAR_NS
        for said in (self.seq, self.size):
            ours, theirs = said[sent], said[received]
            other |= (ours != theirs) & (ours != NULL) & (theirs != NULL)
        found = self._even & (np.bincount(route[other], minlength=len(self.begin)) == 0)
        return found, sent[found[route]], received[found[route]]

    @property
    def _even(self) -> Flags:
        even: Flags = self.sent == self.received
        return even

    def brought_in_line(self, route: int) -> tuple[Ints, Ints]:
        """The places of a route's pairs, where its sides may lack some."""
        begin, sent = int(self.begin[route]), int(self.sent[route])
        ours = np.arange(begin, begin + sent)
        theirs = np.arange(begin + sent, begin + sent + int(self.received[route]))
        return self._by_number(ours, theirs) or self._by_order(ours, theirs)

    def _by_number(self, ours: Ints, theirs: Ints) -> tuple[Ints, Ints] | None:
        """By the numbers, if these count the same on both sides: where ends agree with them."""
        seqs = self.seq[ours], self.seq[theirs]
        fewer = min(len(ours), len(theirs))
        if any((seq == NULL).any() or len(np.unique(seq)) < len(seq) for seq in seqs):
            return None
        _, here, there = np.intersect1d(*seqs, assume_unique=True, return_indices=True)
        if len(here) < MOST_AGREE * fewer:
            return None
        late = self.stop[theirs[there]] - self.stop[ours[here]]
        if np.median(np.abs(late - np.median(late))) > NEAR_NS:
            return None
        return ours[here], theirs[there]

    def _by_order(self, ours: Ints, theirs: Ints) -> tuple[Ints, Ints]:
        """By order, sizes and ends; by order and ends where the sides see sizes otherwise."""
        rows, first = np.append(ours, theirs), np.array([0, len(ours)])
        size = self.size[rows]
        _, code = np.unique(size, return_inverse=True)
        nothing = np.zeros(len(rows), np.int64)
        for each in (nothing if (size == NULL).any() else code, nothing):
            place, lost = sequences.of_ends_apart(each, self.stop[rows], first)
            if not lost:
                break
        own, other = place[: len(ours)], place[len(ours) :]
        theirs, other = theirs[other != NONE], other[other != NONE]
        _, here, there = np.intersect1d(own, other, assume_unique=True, return_indices=True)
        return ours[here], theirs[there]
