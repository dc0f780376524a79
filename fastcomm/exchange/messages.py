"""Which message that one rank sends is which that another receives.

Messages from one rank to another in a group are a route, and do not overtake each other on it:
the k-th that is sent is the k-th that is received. Where one side lacks some they are brought
in line, by number, by size and by their ends, so that a lost one does not shift what follows.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.exchange import sequences
from fastcomm.exchange.sequences import MOST_AGREE, NEAR_NS, NONE
from fastcomm_kernels.arrays import NULL, Flags, Ints

_RANK_BITS = 32


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

    def unmatched(self, messages: Messages) -> Flags:
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
        way = sender << _RANK_BITS | receiver
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
            place, lost = sequences.align_by_order(each, self.stop[rows], first)
            if not lost:
                break
        own, other = place[: len(ours)], place[len(ours) :]
        theirs, other = theirs[other != NONE], other[other != NONE]
        _, here, there = np.intersect1d(own, other, assume_unique=True, return_indices=True)
        return ours[here], theirs[there]
