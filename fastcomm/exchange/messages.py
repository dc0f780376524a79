"""Match messages: find those of which both sides are present.

Messages from one rank to another in a group form a *route*. They keep their order: the k-th
sent is the k-th received. If one side misses some, both sides are aligned by number, by size
and by their ends.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.exchange import sequences
from fastcomm.exchange.sequences import MOST_AGREE, NEAR_NS
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

_ROUTE_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Sides of messages, in any order: a row per side.

    An event that sends to two ranks and receives from one is three rows.
    """

    rank: Ints  # rank of this side
    peer: Ints  # rank of the other side
    is_send: Flags
    group: Ints  # the label of its members
    seq: Ints  # NULL if unknown; may differ between the sides
    size: Ints  # bytes of this message; NULL if unknown
    stop: Ints  # ns, on aligned clocks as far as offsets are known


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMatches:
    """The message of each row, numbered from 0; NONE without its other side."""

    instance: Ints
    count: int  # of messages

    def unmatched(self, messages: Messages) -> Flags:
        """Return which rows have no other side, though the rank of that side has messages."""
        is_unmatched: Flags = (self.instance == NONE) & np.isin(messages.peer, messages.rank)
        return is_unmatched

    def pairs(self, is_send: Flags) -> tuple[Ints, Ints]:
        """Return the row that sends and the row that receives each matched message.

        Parameters
        ----------
        is_send
            Per row of the matched `Messages`: whether it is the sending side.

        Returns
        -------
        tuple of two Ints
            Rows of senders and of receivers; element m belongs to message m.

        """
        sender, receiver = (np.empty(self.count, np.int64) for _ in range(2))
        for is_side, row_of in ((is_send, sender), (~is_send, receiver)):
            rows = np.flatnonzero(is_side & (self.instance != NONE))
            row_of[self.instance[rows]] = rows
        return sender, receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Sides of messages, a row each."""

    event: Ints  # index of the event
    peer: Ints
    is_send: Flags
    is_only: Flags  # whether the event has one message

    @classmethod
    def of(cls, sends_to: pa.Array, receives_from: pa.Array) -> "Sides":
        """Convert two list columns of a trace's `comm` to a row per side of a message.

        Parameters
        ----------
        sends_to, receives_from
            Lists of int64 with the other ranks of each event; a null list is empty.

        Returns
        -------
        Sides
            Sorted by event; of one event, sends come first. Events without partners have no
            row.

        """
        count = len(sends_to)
        lists = (sends_to, receives_from)
        sizes = [
            ranks.value_lengths().fill_null(0).to_numpy(zero_copy_only=False) for ranks in lists
        ]
        event = np.concatenate([np.repeat(np.arange(count), size) for size in sizes])
        peer = np.concatenate(
            [ranks.flatten().to_numpy(zero_copy_only=False) for ranks in lists]
        )
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
    """Match messages of which both sides are present; the result has a value per row."""
    instance = np.full(len(messages.rank), NONE, np.int64)
    if not len(instance):
        return MessageMatches(instance=instance, count=0)
    routes = _Routes.of(messages)
    is_complete, sent, received = routes.complete()
    instance[routes.row[sent]] = instance[routes.row[received]] = np.arange(len(sent))
    done = len(sent)
    for route in np.flatnonzero(
        (routes.sent > 0) & (routes.received > 0) & ~is_complete
    ).tolist():
        sent_rows, received_rows = routes.aligned(route)
        instance[routes.row[sent_rows]] = instance[routes.row[received_rows]] = (
            done + np.arange(len(sent_rows))
        )
        done += len(sent_rows)
    return MessageMatches(instance=instance, count=done)


@dataclass(frozen=True, slots=True)
class _Routes:
    """Rows by route: first those that send, then those that receive, each sorted by end."""

    row: Ints  # of the messages
    seq: Ints
    size: Ints
    stop: Ints
    begin: Ints  # first row of each route
    sent: Ints  # number of sending rows per route
    received: Ints

    @classmethod
    def of(cls, messages: Messages) -> "_Routes":
        """Sort the rows of messages by route."""
        is_send = messages.is_send
        sender = np.where(is_send, messages.rank, messages.peer)
        receiver = np.where(is_send, messages.peer, messages.rank)
        route = sender << _ROUTE_BITS | receiver
        row = np.lexsort((messages.stop, ~is_send, route, messages.group))
        new = np.append(True, np.diff(route[row]) != 0)
        new[1:] |= messages.group[row[1:]] != messages.group[row[:-1]]
        begin = np.flatnonzero(new)
        sent = np.add.reduceat(is_send[row].astype(np.int64), begin)
        columns = (messages.seq[row], messages.size[row], messages.stop[row])
        return cls(row, *columns, begin, sent, np.diff(np.append(begin, len(row))) - sent)

    def complete(self) -> tuple[Flags, Ints, Ints]:
        """Match the messages of each route whose two sides have equal messages.

        Sequence numbers and sizes of both sides have to be equal, as far as known, and ends
        near.

        Returns whether each route is such, and the rows of the sends and of the receives of all
        pairs.
        """
        route = np.repeat(np.arange(len(self.begin)), np.where(self._even, self.sent, 0))
        first = np.cumsum(np.append(0, np.where(self._even, self.sent, 0)))[:-1]
        sent = self.begin[route] + np.arange(len(route)) - first[route]
        received = sent + self.sent[route]
        differs = np.abs(self.stop[sent] - self.stop[received]) > NEAR_NS
        for values in (self.seq, self.size):
            sent_values, received_values = values[sent], values[received]
            differs |= (
                (sent_values != received_values)
                & (sent_values != NULL)
                & (received_values != NULL)
            )
        is_complete = self._even & (np.bincount(route[differs], minlength=len(self.begin)) == 0)
        return is_complete, sent[is_complete[route]], received[is_complete[route]]

    @property
    def _even(self) -> Flags:
        even: Flags = self.sent == self.received
        return even

    def aligned(self, route: int) -> tuple[Ints, Ints]:
        """Return the rows of a route's pairs, where its sides may miss some."""
        begin, sent = int(self.begin[route]), int(self.sent[route])
        sent_rows = np.arange(begin, begin + sent)
        received_rows = np.arange(begin + sent, begin + sent + int(self.received[route]))
        return self._by_number(sent_rows, received_rows) or self._by_order(
            sent_rows, received_rows
        )

    def _by_number(self, sent_rows: Ints, received_rows: Ints) -> tuple[Ints, Ints] | None:
        """Match by number, if numbers are unique and ends agree; else None."""
        seqs = self.seq[sent_rows], self.seq[received_rows]
        fewer = min(len(sent_rows), len(received_rows))
        if any((seq == NULL).any() or len(np.unique(seq)) < len(seq) for seq in seqs):
            return None
        _, sent, received = np.intersect1d(*seqs, assume_unique=True, return_indices=True)
        if len(sent) < MOST_AGREE * fewer:
            return None
        late = self.stop[received_rows[received]] - self.stop[sent_rows[sent]]
        if np.median(np.abs(late - np.median(late))) > NEAR_NS:
            return None
        return sent_rows[sent], received_rows[received]

    def _by_order(self, sent_rows: Ints, received_rows: Ints) -> tuple[Ints, Ints]:
        """Match by order, sizes and ends; without sizes if they differ between the sides."""
        rows, first = np.append(sent_rows, received_rows), np.array([0, len(sent_rows)])
        size = self.size[rows]
        _, code = np.unique(size, return_inverse=True)
        no_code = np.zeros(len(rows), np.int64)
        for codes in (no_code if (size == NULL).any() else code, no_code):
            place, missing = sequences.align_by_order(codes, self.stop[rows], first)
            if not missing:
                break
        own, other = place[: len(sent_rows)], place[len(sent_rows) :]
        received_rows, other = received_rows[other != NONE], other[other != NONE]
        _, sent, received = np.intersect1d(own, other, assume_unique=True, return_indices=True)
        return sent_rows[sent], received_rows[received]
