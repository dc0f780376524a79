"""Match events of ranks: find those that are one collective, and the two sides of messages.

Collectives match if their groups have the same members and their sequence numbers are equal, or
without these, the ids that PyTorch gives to calls. In a group where some events have no unique
number, the sequences of its ranks are aligned instead: by operation and size, and by their
ends, which all members reach at the same time. So missing events of one rank do not shift all
later events.

Operations with a root, and messages in a group of two without a direction, may end at different
times. Each such operation is a sequence of its own. They are matched last, on clocks that are
aligned by the ends of the other collectives.

Messages from one rank to another in a group form a *route*. They keep their order: the k-th
sent is the k-th received. If one side misses some, both sides are aligned by number, by size
and by their ends.

A stream runs them one after the other, and all members of a collective finish it at the same
time. So if all ranks have the same operations on a stream in the same order, and the ends agree
once a constant clock offset is removed, the k-th on one rank is the k-th on another. A group of
which only a name is known, such as a stream, may be several: the collectives of such groups
match only if the ends of all of them agree. Times are in ns. Each rank has its own clock.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import pyarrow as pa

from fastcomm.ranks.clocks import matched_end_offsets, offset_by_row, offsets
from fastcomm.ranks.numbers import doubts
from fastcomm.ranks.sequences import (
    APART_NS,
    MAX_MISSING,
    MOST_AGREE,
    NEAR_NS,
    Items,
    Repeats,
    align_by_end,
    align_by_order,
    are_contradictory,
    item_codes,
    nearest,
    offset,
    sampled,
    spread_of,
    without_drift,
)
from fastcomm.trace.columns import block_lengths, block_starts, filled
from fastcomm.trace.schema import ENDS_TOGETHER, EVEN, OP, OPS, ROOTED
from fastcomm_kernels.arrays import NONE, NULL, Flags, Floats, Ints

_MEMBER_BITS = 40
_ROUTE_BITS = 32
_MESSAGE = OP["SendRecv"]
_ENDS_APART = np.array([op not in ENDS_TOGETHER for op in range(len(OPS))])
# Combines the number of a group with others. It is large, as groups are hashes.
FACTOR = 0x632BE59BD9B4E019
# Fewer matched collectives on a stream do not show whether their ends agree.
LEAST = 3
# Ends that differ by less than this agree in any case.
FLOOR_NS = 20_000
# Ends agree if they differ by less than this share of the gap between two collectives.
_SHARE_OF_GAP = 0.1
# Ends have to be closer to each other than arrivals are, by this factor.
_CLOSER = 4
# Minimum share of common collectives: of the shorter sequence, and of the longer.
_LEAST_COMMON = (0.75, 0.5)
# Ranks form separate groups if a rank's ends are closer to its nearest rank's than to its
# farthest rank's by this factor.
_SEPARATE = 4
_LEAST_RANKS_TO_SEPARATE = 4
_RANKS_AT_ONCE = 256
_COMPARED = 64  # collectives of a group of unknown members
Refusal = Literal[
    "smaller groups",
    "messages",
    "absent",
    "few",
    "order",
    "ends",
    "impossible",
    "loose",
    "separate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCalls:
    """Events that are one rank's part in a collective, in any order; a row per event.

    Operations of `schema.ENDS_TOGETHER`, operations with a root, and messages in a group of two
    whose direction is unknown.
    """

    rank: Ints
    group: Ints  # the label of its members
    op: Ints  # index into OPS
    seq: Ints  # NULL if unknown
    size: Ints  # bytes, of operations whose members have equal sizes; else NULL
    stop: Ints  # ns, on the rank's clock
    step: Ints  # number of its mark, the same on all ranks; NULL if unknown
    root: Ints | None = None  # global rank; NULL if none; None if all are unknown
    # ns, on the rank's clock, where ends have to show that a group is one, as its members are
    # unknown; NULL elsewhere; None if nowhere.
    start: Ints | None = None
    # Hash of group and number; NULL if unknown; None if all are. Not of messages, whose ends
    # may differ in it.
    call_id: Ints | None = None

    @classmethod
    def of(cls, columns: Mapping[str, Ints], rows: Ints) -> Self:
        """Select rows of columns, named as the fields but `payload` for the size.

        Payloads are used only of operations whose members have equal payloads, roots only of
        operations with a root.
        """
        selected = {name: column[rows] for name, column in columns.items()}
        op, payload, root = (selected.pop(name) for name in ("op", "payload", "root"))
        ids = selected.pop("call_id")
        return cls(
            **selected,
            call_id=None if (ids == NULL).all() else np.where(op == _MESSAGE, NULL, ids),
            op=op.astype(np.int64),
            size=np.where(np.isin(op, EVEN), payload, NULL),
            root=np.where(np.isin(op, ROOTED), root, NULL),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """The collective of each row, numbered from 0; NONE where no other rank has it."""

    instance: Ints
    count: int  # of collectives
    dropped: int  # rows of ranks that could not be aligned with their group
    refused: Ints  # as `instance`: collectives left out as sizes, roots or ids differ
    numbered: Flags  # per row: matched by its sequence number, not by order and end
    unlike: int = 0  # collectives of groups in which no call has one id on several ranks
    loose: int = 0  # rows of groups of unknown members that may be several groups, unmatched
    has_loose: bool = False  # whether ends of such a group do not agree


def match(calls: CollectiveCalls, *, has_loose: bool = False) -> Matches:
    """Match the collectives that several ranks have; results are per row of `calls`.

    Rows match by sequence number, else by order and end, see the module. `has_loose` is whether
    other calls showed that a group of unknown members is several groups.
    """
    apart = _ENDS_APART[calls.op]
    series = _series(_numbered_by_id(calls), apart)
    instance, unnumbered = _by_number(series)
    dropped = 0
    if doubt := doubts(calls, instance, apart):
        calls, series = (
            _without_numbers(columns, doubt.is_wrong) for columns in (calls, series)
        )
        instance, unnumbered = _by_number(series)
        is_unclear = doubt.is_unclear & (instance != NONE)
        instance[is_unclear] = NONE
        dropped = int(is_unclear.sum())
    numbered = instance != NONE
    done, skipped = _match_by_order(series, instance, unnumbered, apart)
    is_loose, ends_differ = _are_loose(calls, instance, numbered | apart)
    if has_loose:
        is_loose = _are_guessed(calls, instance)
    loose = int((np.bincount(instance[is_loose])[instance[is_loose]] > 1).sum())
    instance[is_loose] = NONE
    ids, unlike = _confirmed_ids(calls, instance, done)
    is_contradictory = _contradictory((calls.size, calls.root, ids), instance, done)
    matched, count = _of_several(instance, ~is_contradictory)
    refused = np.broadcast_to(np.int64(NONE), len(instance))
    if is_contradictory.any():
        refused, _ = _of_several(instance, is_contradictory)
    return Matches(
        instance=matched,
        count=count,
        dropped=dropped + skipped,
        refused=refused,
        numbered=numbered,
        unlike=unlike,
        loose=loose,
        has_loose=ends_differ,
    )


def _match_by_order(
    series: CollectiveCalls, instance: Ints, unnumbered: Ints, apart: Flags
) -> tuple[int, int]:
    """Match rows by order and end; write their collectives into `instance`.

    Parameters
    ----------
    series
        See `_series`.
    instance
        The collective of each row by its number, or NONE.
    unnumbered
        Rows to match.
    apart
        Which rows may end on one rank before another.

    Returns
    -------
    tuple of int
        Number of collectives, and of rows of ranks that could not be aligned.

    """
    done, skipped = int(instance.max(initial=NONE)) + 1, 0
    for ends_apart in (False, True):
        rows = unnumbered[apart[unnumbered] == ends_apart]
        if ends_apart and len(rows):
            series = replace(series, stop=series.stop - _ahead(series, instance, ~apart))
        align = align_by_order if ends_apart else align_by_end
        for own in _by_group(series, rows):
            code = item_codes(series.op[own], series.size[own])
            items = Items(code, series.stop[own], series.step[own])
            places, without_place = align(items, block_starts(series.rank[own]))
            skipped += without_place
            instance[own] = np.where(places == NONE, NONE, places + done)
            done += int(places.max(initial=NONE)) + 1
    return done, skipped


def _are_loose(calls: CollectiveCalls, instance: Ints, is_certain: Flags) -> tuple[Flags, bool]:
    """Return which matched calls of groups of unknown members may be of several groups.

    Those are all once the ends of one group do not agree: smaller groups exist, and ranks that
    these keep in step may end other collectives together as well. The second value is whether
    they do not. Calls flagged `is_certain` are no evidence.
    """
    is_guessed = _are_guessed(calls, instance)
    refusals = {
        int(calls.group[own[0]]): Sample.of_matches(calls, instance, own).refusal()
        for own in _by_group(calls, np.flatnonzero(is_guessed & ~is_certain))
    }
    if not set(refusals.values()) <= {None, "few"}:
        return is_guessed, True
    few = [group for group, refusal in refusals.items() if refusal]
    return is_guessed & np.isin(calls.group, few), False


def _are_guessed(calls: CollectiveCalls, instance: Ints) -> Flags:
    """Return which calls are matched in groups of unknown members."""
    start = NULL if calls.start is None else calls.start
    is_guessed: Flags = (instance != NONE) & (start != NULL)
    return is_guessed


def _without_numbers(calls: CollectiveCalls, is_wrong: Flags) -> CollectiveCalls:
    """Return the calls without some of their numbers, and the ids that have them."""
    ids = None if calls.call_id is None else np.where(is_wrong, NULL, calls.call_id)
    return replace(calls, seq=np.where(is_wrong, NULL, calls.seq), call_id=ids)


def _numbered_by_id(calls: CollectiveCalls) -> CollectiveCalls:
    """Return the calls with their ids in place of unknown sequence numbers."""
    if calls.call_id is None:
        return calls
    return replace(calls, seq=np.where(calls.seq == NULL, calls.call_id, calls.seq))


def _confirmed_ids(
    calls: CollectiveCalls, instance: Ints, count: int
) -> tuple[Ints | None, int]:
    """Return the ids of groups in which one is equal on several ranks; others are NULL.

    Elsewhere ids tell nothing: names of the group differ, or the builds that hash them. The
    second value is the number of collectives whose members' ids differ there.
    """
    ids = calls.call_id
    if ids is None:
        return None, 0
    rows = np.flatnonzero((instance != NONE) & (ids != NULL))
    number = instance[rows]
    last = np.full(count, NULL)
    last[number] = ids[rows]
    members = np.bincount(number, minlength=count)
    differs = np.zeros(count, np.bool_)
    differs[number[ids[rows] != last[number]]] = True
    group = np.zeros(count, np.int64)
    group[number] = calls.group[rows]
    confirmed = np.unique(group[(members > 1) & ~differs])
    is_confirmed = np.isin(calls.group, confirmed)
    unlike = int((differs & ~np.isin(group, confirmed)).sum())
    return np.where(is_confirmed, ids, NULL), unlike


def _series(calls: CollectiveCalls, apart: Flags) -> CollectiveCalls:
    """Return the calls with a separate group per operation with different ends."""
    if not apart.any():
        return calls
    group = calls.group.copy()
    group[apart] ^= calls.op[apart] * FACTOR
    return replace(calls, group=group)


def _by_number(calls: CollectiveCalls) -> tuple[Ints, Ints]:
    """Match rows by sequence number; return their collectives, and the rows left unmatched."""
    # Operation and rank are combined into one sort key.
    member = calls.op << _MEMBER_BITS | calls.rank
    order = np.lexsort((member, calls.seq, calls.group))
    group, seq, member = (column[order] for column in (calls.group, calls.seq, member))
    numbered = _are_numbered(group, seq, member)
    begins = np.zeros(len(order), np.bool_)
    begins[block_starts(group, seq, member >> _MEMBER_BITS)] = True
    instance = np.full(len(order), NONE, np.int64)
    number = np.cumsum(begins & numbered) - 1
    instance[order[numbered]] = number[numbered]
    return instance, order[~numbered]


def _are_numbered(group: Ints, seq: Ints, member: Ints) -> Flags:
    """Whether all events of the row's group have a unique number per rank and operation.

    Rows are sorted by group, number, and operation with rank.
    """
    is_unique = np.zeros(len(group), np.bool_)
    is_unique[block_starts(group, seq, member)] = True
    first = block_starts(group)
    numbered = np.logical_and.reduceat(is_unique & (seq != NULL), first)
    flags: Flags = np.repeat(numbered, block_lengths(first, len(group)))
    return flags


def _by_group(calls: CollectiveCalls, rows: Ints) -> Iterator[Ints]:
    """Yield the rows of each group, sorted by rank and end."""
    rows = rows[np.lexsort((calls.stop[rows], calls.rank[rows], calls.group[rows]))]
    yield from np.split(rows, block_starts(calls.group[rows])[1:]) if len(rows) else ()


def _ahead(calls: CollectiveCalls, instance: Ints, together: Flags) -> Ints:
    """Return the clock offset of each row's rank, in ns, by matched rows flagged `together`."""
    rows = np.flatnonzero((instance != NONE) & together)
    columns = (calls.rank[rows], calls.group[rows], instance[rows], calls.stop[rows])
    by_rank = {
        offset.rank: offset.offset_ns for offset in offsets(matched_end_offsets(*columns))
    }
    return offset_by_row(calls.rank, by_rank)


def _contradictory(columns: Sequence[Ints | None], instance: Ints, count: int) -> Flags:
    """Return, per collective, whether its members differ in a column; None has no values."""
    is_contradictory = np.zeros(count, np.bool_)
    for values in columns:
        if values is None:
            continue
        one = np.full(count + 1, NULL)  # one behind the last for NONE
        one[instance] = values
        if (one[instance] == values)[instance != NONE].all():
            continue
        rows = np.flatnonzero((instance != NONE) & (values != NULL))
        number, value = instance[rows], values[rows]
        one[number] = value
        is_contradictory[number[one[number] != value]] = True
    return is_contradictory


def _of_several(instance: Ints, counts: Flags) -> tuple[Ints, int]:
    """Renumber instances: only those that count and that several ranks have."""
    is_matched = instance != NONE
    several = (np.bincount(instance[is_matched], minlength=len(counts)) > 1) & counts
    if several.all():
        return instance, len(several)
    number = np.where(several, np.cumsum(several) - 1, NONE)
    renumbered = np.full(len(instance), NONE, np.int64)
    renumbered[is_matched] = number[instance[is_matched]]
    return renumbered, int(several.sum())


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
    step: Ints  # number of its mark, the same on all ranks; NULL if unknown


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
        lists = (sends_to, receives_from)
        sizes = [filled(ranks.value_lengths(), 0) for ranks in lists]
        event = np.concatenate([np.repeat(np.arange(len(size)), size) for size in sizes])
        peer = np.concatenate([filled(ranks.flatten()) for ranks in lists])
        is_send = np.repeat([True, False], [int(size.sum()) for size in sizes])
        order = np.argsort(event, kind="stable")
        of_event = sizes[0] + sizes[1]
        return cls(
            event=event[order],
            peer=peer[order],
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
    is_partial = (routes.sent > 0) & (routes.received > 0) & ~is_complete
    for route in np.flatnonzero(is_partial).tolist():
        sent, received = routes.aligned(route)
        number = done + np.arange(len(sent))
        instance[routes.row[sent]] = instance[routes.row[received]] = number
        done += len(sent)
    return MessageMatches(instance=instance, count=done)


@dataclass(frozen=True, slots=True)
class _Routes:
    """Rows by route: first those that send, then those that receive, each sorted by end."""

    row: Ints  # of the messages
    seq: Ints
    size: Ints
    stop: Ints
    step: Ints
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
        begin = block_starts(route[row], messages.group[row])
        sent = np.add.reduceat(is_send[row].astype(np.int64), begin)
        names = ("seq", "size", "stop", "step")
        columns = {name: getattr(messages, name)[row] for name in names}
        received = block_lengths(begin, len(row)) - sent
        return cls(row=row, **columns, begin=begin, sent=sent, received=received)

    def complete(self) -> tuple[Flags, Ints, Ints]:
        """Match the messages of each route whose two sides have equal messages.

        Sequence numbers and sizes of both sides have to be equal, as far as known, and ends
        near.

        Returns whether each route is such, and the rows of the sends and of the receives of all
        pairs.
        """
        is_even = self.sent == self.received
        pairs = np.where(is_even, self.sent, 0)
        route = np.repeat(np.arange(len(pairs)), pairs)
        first = np.cumsum(pairs) - pairs
        sent = self.begin[route] + np.arange(len(route)) - first[route]
        received = sent + self.sent[route]
        differs = np.abs(self.stop[sent] - self.stop[received]) > NEAR_NS
        for values in (self.seq, self.size):
            a, b = values[sent], values[received]
            differs |= (a != b) & (a != NULL) & (b != NULL)
        is_complete = is_even & (np.bincount(route[differs], minlength=len(self.begin)) == 0)
        return is_complete, sent[is_complete[route]], received[is_complete[route]]

    def aligned(self, route: int) -> tuple[Ints, Ints]:
        """Return the rows of a route's pairs, where its sides may miss some."""
        begin, sent = int(self.begin[route]), int(self.sent[route])
        sent_rows = np.arange(begin, begin + sent)
        received_rows = np.arange(begin + sent, begin + sent + int(self.received[route]))
        rows = sent_rows, received_rows
        return self._by_number(*rows) or self._by_order(*rows)

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
            items = Items(codes, self.stop[rows], self.step[rows])
            place, missing = align_by_order(items, first)
            if not missing:
                break
        is_sent = np.arange(len(rows)) < len(sent_rows)
        sent_rows, received_rows = (
            np.flatnonzero(side & (place != NONE)) for side in (is_sent, ~is_sent)
        )
        _, sent, received = np.intersect1d(
            place[sent_rows], place[received_rows], assume_unique=True, return_indices=True
        )
        return rows[sent_rows[sent]], rows[received_rows[received]]


@dataclass(frozen=True, slots=True)
class Stream:
    """The collectives of one rank on one stream, sorted by end."""

    op: Ints  # index into OPS
    size: Ints  # bytes, where they are the same on all members; else NULL
    step: Ints  # number of its mark, the same on all ranks; NULL if unknown
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.op)

    @property
    def tolerance_ns(self) -> int:
        """Maximum difference in ns between the ends of one collective on two aligned ranks.

        It grows with the median gap between successive ends, within fixed limits.
        """
        if len(self) < 2:  # noqa: PLR2004 - no gap
            return FLOOR_NS
        gap = float(np.median(np.diff(self.stop)))
        return int(np.clip(_SHARE_OF_GAP * gap, FLOOR_NS, APART_NS))


def places(reference: Stream, own: Stream) -> Ints | Refusal:
    """Match the collectives of a rank with those of the reference rank, on one stream.

    Either may miss some at its beginning and its end, but only one of them in between.

    Returns
    -------
    ndarray or Refusal
        Index on the reference rank per collective of the rank, or NONE; a refusal if the two do
        not have the same sequence.

    """
    if min(len(reference), len(own)) < LEAST:
        return "few"
    code = item_codes(np.append(reference.op, own.op), np.append(reference.size, own.size))
    codes = np.split(code, [len(reference)])
    items, own_items = (
        Items(part, stream.stop, stream.step)
        for part, stream in zip(codes, (reference, own), strict=True)
    )
    apart = reference.tolerance_ns
    if np.array_equal(codes[0], codes[1]):
        place = np.arange(len(own))
        if _agree(items, own_items, place, apart):
            return place
    ahead = offset(items, own_items)
    place = nearest(items[:2], own_items.earlier(ahead)[:2], apart)
    if not _is_one_sequence(place, _comparable(reference, own)):
        return "ends" if np.array_equal(np.sort(codes[0]), np.sort(codes[1])) else "order"
    return place if _agree(items, own_items, place, apart) else "ends"


def _comparable(first: Stream, second: Stream) -> tuple[int, int]:
    """Return how many collectives of each stream the other may have, by numbers of steps."""
    steps = first.step, second.step
    if any((step == NULL).any() for step in steps):
        return len(first), len(second)
    shared = np.intersect1d(*steps)
    return int(np.isin(first.step, shared).sum()), int(np.isin(second.step, shared).sum())


def _is_one_sequence(place: Ints, lengths: tuple[int, int]) -> bool:
    """Return whether two sequences of collectives may be parts of one.

    Enough has to be common, in equal order, and only one of the two may lack items in the
    common part. `place` is the index in the other sequence of each item, or NONE; `lengths` are
    the numbers of items of both that can be common.
    """
    common = np.flatnonzero(place != NONE)
    counts = zip(_LEAST_COMMON, sorted(lengths), strict=True)
    least = max(share * count for share, count in counts)
    if len(common) < max(LEAST, least):
        return False
    matched = place[common]
    own_alone = int(common[-1] - common[0]) + 1 - len(common)
    other_alone = int(matched[-1] - matched[0]) + 1 - len(common)
    is_ordered = bool((np.diff(matched) > 0).all())
    return (
        is_ordered
        and not min(own_alone, other_alone)
        and own_alone + other_alone <= (min(MAX_MISSING, len(common)))
    )


def _agree(items: Items, own: Items, place: Ints, apart: int) -> bool:
    """Whether ends agree, and most steps; without steps, whether no other place fits.

    Ends of one collective may be `apart` ns apart.
    """
    common = np.flatnonzero(place != NONE)
    other = place[common]
    late = own.stop[common] - items.stop[other]
    ahead = int(_lower_median(late))
    deviation = np.abs(late - ahead)
    if deviation.max() > apart:
        return False
    steps = own.step[common], items.step[other]
    if all((step != NULL).all() for step in steps):
        is_equal = bool(2 * (steps[0] == steps[1]).sum() > len(common))
        return is_equal and not are_contradictory(items, own, ahead)
    return Repeats(items).exclude(int(spread_of(deviation)), ahead)


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of all ranks in some collectives of a stream, minus the end on the reference rank.

    Both arrays have shape (ranks, collectives), in ns on one clock; NaN where a rank misses
    one.
    """

    start: Floats
    stop: Floats

    @classmethod
    def of(cls, start: Ints, stop: Ints, end: Ints) -> "Sample":
        """Align the clocks of ranks by the ends of their collectives.

        The clock of each rank is moved by the median of its ends minus those of the reference
        rank. Results are start and stop minus the end on the reference rank, in ns; NaN where a
        rank misses a collective.

        Parameters
        ----------
        start, stop
            Shape (ranks, collectives), in ns on the clock of each rank; NULL where a rank
            misses one.
        end
            Ends on the reference rank in ns, one per collective.

        """
        is_missing = stop == NULL
        late = (own[~missing] for own, missing in zip(stop - end, is_missing, strict=True))
        common = end + np.array([_lower_median(own) for own in late])[:, None]
        return cls(*(np.where(is_missing, np.nan, times - common) for times in (start, stop)))

    @classmethod
    def of_matches(cls, calls: CollectiveCalls, instance: Ints, rows: Ints) -> "Sample":
        """Compare some collectives of the rank that has most, on clocks of constant drift.

        `instance` has the collective of each call; `rows` are those of one group whose starts
        are known, sorted by rank and end. Ranks that share none with that rank are left out,
        and collectives of that rank alone.
        """
        members = np.split(rows, block_starts(calls.rank[rows])[1:])
        duration = calls.stop if calls.start is None else calls.stop - calls.start
        reference = max(members, key=len)
        chosen = reference[sampled(len(reference), _COMPARED)]
        starts, stops = (np.full((len(members), len(chosen)), np.nan) for _ in range(2))
        for at, own in enumerate(members):
            _, place, row = np.intersect1d(instance[chosen], instance[own], return_indices=True)
            if len(place):
                own_stop = calls.stop[own[row]]
                late = without_drift(own_stop - calls.stop[chosen[place]], own_stop)
                stops[at, place] = late
                starts[at, place] = late - duration[own[row]]
        counts = ~np.isnan(stops)
        used = np.ix_(counts.any(axis=1), counts.sum(axis=0) > 1)
        return cls(starts[used], stops[used])

    @property
    def ends_ns(self) -> Floats:
        """Time in ns from the first to the last end of each collective, as float64.

        Clocks are taken as they are: subtract offsets from `stop` before.
        """
        span: Floats = np.nanmax(self.stop, axis=0) - np.nanmin(self.stop, axis=0)
        return span

    @property
    def arrivals_ns(self) -> Floats:
        """Time in ns from the first to the last start of each collective, as float64."""
        span: Floats = np.nanmax(self.start, axis=0) - np.nanmin(self.start, axis=0)
        return span

    def refusal(self) -> Refusal | None:
        """Return why these are not collectives of all ranks, a text code; None if they are."""
        if self.stop.shape[1] < LEAST or np.isnan(self.stop).all(axis=1).any():
            return "few"
        last_arrival, first_end = np.nanmax(self.start, axis=0), np.nanmin(self.stop, axis=0)
        if (last_arrival > first_end + FLOOR_NS).any():
            return "impossible"
        agreed = max(FLOOR_NS, float(np.median(self.arrivals_ns)) / _CLOSER)
        if float(np.median(self.ends_ns)) > agreed:
            return "loose"
        return "separate" if self._falls_apart() else None

    def _falls_apart(self) -> bool:
        """Whether ranks form groups that end together, each apart from the others."""
        if len(self.stop) < _LEAST_RANKS_TO_SEPARATE:
            return False
        deviation = self.stop - np.nanmedian(self.stop, axis=0)
        parts = [
            _distances(deviation, first) for first in range(0, len(deviation), _RANKS_AT_ONCE)
        ]
        near, far = (np.concatenate(values) for values in zip(*parts, strict=True))
        nearest, farthest = float(np.median(near)), float(np.median(far))
        return farthest > max(FLOOR_NS / 2, _SEPARATE * nearest)


def _lower_median(values: Ints) -> np.int64:
    """Return the lower of two medians; 0 without values."""
    ordered = np.sort(values)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) else np.int64(0)


def _distances(deviation: Floats, first: int) -> tuple[Floats, Floats]:
    """Return distances of a block of ranks to their nearest and farthest other rank.

    A distance is the standard deviation of the difference of two ranks' ends, over collectives
    that both have: a constant difference is that of their clocks. NaN marks a missing end.
    """
    block = slice(first, first + _RANKS_AT_ONCE)
    has, value = (~np.isnan(deviation)).astype(np.float64), np.nan_to_num(deviation)
    square = value**2
    count = has[block] @ has.T
    total = value[block] @ has.T - has[block] @ value.T
    squares = square[block] @ has.T + has[block] @ square.T - 2 * value[block] @ value.T
    count[count == 0] = np.nan
    distance = np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0))
    farthest = np.nan_to_num(distance).max(axis=1)
    rows = np.arange(len(distance))
    distance[rows, rows + first] = np.inf
    return np.nan_to_num(distance, nan=np.inf, posinf=np.inf).min(axis=1), farthest
