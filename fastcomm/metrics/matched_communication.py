"""Match the communication of all ranks, and compare the ranks by it, some groups at a time.

First the ends of collectives are matched, which give clock offsets, and messages where no
collectives connect ranks; then waits and transfers are measured on aligned clocks. Functions
work on the cells of a few groups (see `spill_files`) so that memory stays bounded; results are
small, and are merged over cells.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from fastcomm.metrics import spill_files, ungrouped
from fastcomm.metrics.skew import NO_PAIR, MatchedCollectives, Skews, Transfers, WaitSums, skews
from fastcomm.metrics.spill_files import Cells, EventBatch
from fastcomm.metrics.step_counts import MatchedSteps
from fastcomm.metrics.ungrouped import ExpectedMembers, Ungrouped
from fastcomm.ranks.arrivals import (
    CommunicationEvents,
    Completeness,
    MatchedEvents,
    Participants,
    collective_participants,
    concatenate,
    match_collectives,
    message_participants,
)
from fastcomm.ranks.clocks import (
    ClockOffset,
    EndOffsets,
    matched_end_offsets,
    offset_by_row,
    offsets_with_limits,
)
from fastcomm.trace.columns import alike
from fastcomm.trace.run_traces import ParallelMap
from fastcomm.trace.schema import FROM_ROOT, OP, ROOTED, TO_ROOT
from fastcomm.units import counted
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

_END_COLUMNS = (
    *("rank", "tag", "op", "group", "group_size", "seq", "call_id", "step"),
    *("start_ns", "duration_ns", "payload_bytes"),
)

MESSAGE_COLUMNS = (*_END_COLUMNS, "partner", "sends")

_RANK_BITS = 32
_COLUMNS = (
    *(*MESSAGE_COLUMNS, "bytes", "bus_bytes", "stream"),
    *("alone_ns", "exposed_ns", "exposed_at_start_ns", "exposed_at_end_ns"),
)


class Clocks(NamedTuple):
    """Clock offsets by rank in ns, and whether times are corrected by them.

    Between unaligned ranks, no offset is known: times of what they do together are not
    compared.
    """

    offsets: Mapping[int, int]
    is_aligned: bool
    unaligned: frozenset[tuple[int, int]]  # pairs of ranks, the lower first
    is_host_run: bool = False  # whether operations may end before the communication
    has_loose: bool = False  # whether some group of unknown members is several

    def are_known(self, rank: Ints, other: Ints) -> Flags:
        """Return which pairs of ranks can be compared."""
        codes = [low << _RANK_BITS | high for low, high in self.unaligned]
        pair = np.minimum(rank, other) << _RANK_BITS | np.maximum(rank, other)
        return ~(self.is_aligned & np.isin(pair, codes))


class MatchCounts(NamedTuple):
    """Numbers of events, and of matched events, collectives and messages."""

    events: int  # that can be matched
    sides: int  # of these: sides of messages
    matched: int
    collectives: int
    messages: int
    dropped: int
    loose: int  # of groups of unknown members, which may be several groups
    by_number: int  # matched by the sequence number in the group
    by_order: int  # matched by the order in the group, and ends
    by_partner: int  # sides of messages, matched by their partners
    by_ends: int  # without a group: matched by order and ends on all ranks
    incomplete: int  # collectives that some member lacks
    apart: int  # collectives and messages left out as their members do not run at once
    refused: int  # collectives left out as sizes, roots or ids of members differ
    unlike: int  # matched by number though ids differ in all of the group
    alone: int  # sides of messages whose other side has a rank that was read, but no match
    unshared: int  # events of collectives of groups with several ranks, without a match


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTransfer:
    """Expected transfer time of a group's collectives: `ns`, plus `ns_per_byte` per byte."""

    group: int  # label
    tag: int
    op: int
    power: int | None = None  # of two, below the size; null: all sizes
    pair: tuple[int, int] = NO_PAIR  # ranks of a message, the lower first
    ns: float = 0.0
    ns_per_byte: float = 0.0  # per bus byte


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """Ranks compared by the matched collectives and messages of all groups."""

    batches: Sequence[EventBatch]
    parallel_map: ParallelMap
    offsets: tuple[ClockOffset, ...]
    clocks: Clocks
    matched: MatchCounts
    lacking_ranks: frozenset[int]  # that have no event of some incomplete collective
    ungrouped: Ungrouped
    skews: Sequence[Skews]
    transfers: Transfers
    waits: WaitSums
    matched_steps: MatchedSteps | None = None  # null if all ranks have the same steps

    def excess(self, expected: Sequence[ExpectedTransfer]) -> list[dict[int, float]]:
        """Return by how much exposed transfers took longer than expected.

        Returns
        -------
        list of dict
            Per element of `expected`: ns by rank, counting only time in which the rank ran
            neither compute nor other communication.

        """
        return self.parallel_map(partial(_exposed_excess, self.batches, self.clocks), expected)

    def clock_error(self, ranks: Collection[int]) -> int:
        """Return how wrong the difference of two clocks of some ranks may be, in ns."""
        if not self.clocks.is_aligned:
            return 0
        spreads = [offset.spread_ns for offset in self.offsets if offset.rank in ranks]
        return sum(sorted(spreads)[-2:])


class Share(NamedTuple):
    """Some communication that fits into memory, with all events of each collective."""

    rows: range  # cells, or numbers of collectives without a group
    has_groups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedEvents:
    """The communication of all ranks on aligned clocks, which is matched share by share."""

    batches: Sequence[EventBatch]
    offsets: tuple[ClockOffset, ...]
    clocks: Clocks
    ungrouped: Ungrouped
    size: int  # of the group of all ranks, for collectives without a group
    is_even: bool = True  # whether all ranks have the same steps

    @classmethod
    def of(
        cls,
        batches: Sequence[EventBatch],
        parallel_map: ParallelMap,
        *,
        is_aligned: bool = True,
        is_host_run: bool = False,
        job: ExpectedMembers | None = None,
        is_even: bool = True,
    ) -> Self:
        """Align the clocks of ranks.

        Parameters
        ----------
        batches
            Communication events of all ranks.
        parallel_map
            Maps a function over arguments, maybe in other processes.
        is_aligned
            Whether times of ranks are compared on aligned clocks, or as recorded.
        is_host_run
            Whether the host communicates, where collectives do not end at the same time.
        job
            Expected members of collectives of unknown groups; None: these are not matched.
        is_even
            Whether all ranks have the same steps.

        """
        ungrouped_ = (
            Ungrouped(events=0) if job is None else ungrouped.find(batches, job, parallel_map)
        )
        ranks = job.ranks if job else ()
        offsets, unaligned, has_loose = clock_offsets(
            batches, parallel_map, ungrouped_.ends, ranks, is_host_run=is_host_run
        )
        by_rank = {offset.rank: offset.offset_ns for offset in offsets}
        return cls(
            batches=batches,
            offsets=offsets,
            clocks=Clocks(by_rank, is_aligned, unaligned, is_host_run, has_loose),
            ungrouped=ungrouped_,
            size=len(ranks),
            is_even=is_even,
        )

    def shares(self) -> list[Share]:
        """Divide the communication."""
        spans = self.ungrouped.spans()
        return [
            *(Share(cells) for cells in spill_files.shares(self.batches)),
            *(Share(span, has_groups=False) for span in spans),
        ]

    def read(self, share: Share, names: Sequence[str] = _COLUMNS) -> pa.Table:
        """Return columns of the events of a share; collectives without a group have one."""
        if share.has_groups:
            return spill_files.read(self.batches, share.rows, names)
        table = self.ungrouped.read(self.batches, share.rows, names)
        sizes = pa.array(np.full(table.num_rows, self.size))
        return table.set_column(table.column_names.index("group_size"), "group_size", sizes)

    def match(self, events: CommunicationEvents) -> tuple[MatchedEvents, MatchCounts]:
        """Match the events of a share."""
        matched, counts, _ = match_events(events, self.clocks)
        return matched, counts


def compare_all(aligned: AlignedEvents, parallel_map: ParallelMap) -> RankComparison:
    """Match and compare all ranks; `parallel_map` maps a function, maybe in other processes."""
    parts = parallel_map(partial(_compare, aligned), aligned.shares())
    skewed, transfers, waits, matched, lacking, steps = zip(*parts, strict=True)
    return RankComparison(
        batches=aligned.batches,
        parallel_map=parallel_map,
        offsets=aligned.offsets,
        clocks=aligned.clocks,
        matched=MatchCounts(*map(sum, zip(*matched, strict=True))),
        lacking_ranks=frozenset().union(*lacking),
        ungrouped=aligned.ungrouped,
        skews=skewed,
        transfers=Transfers.merge(transfers),
        waits=WaitSums.merge(waits),
        matched_steps=None if aligned.is_even else MatchedSteps.merge(steps),
    )


_Part = tuple[Skews, Transfers, WaitSums, MatchCounts, frozenset[int], MatchedSteps | None]


def _compare(aligned: AlignedEvents, share: Share) -> _Part:
    """Compare the ranks by a share of their communication."""
    columns = _COLUMNS if aligned.is_even else (*_COLUMNS, "iteration")
    events = CommunicationEvents.of(aligned.read(share, columns))
    matched, counts, lacking = match_events(events, aligned.clocks)
    if not share.has_groups:
        counts = counts._replace(by_number=0, by_ends=counts.by_number)
    collectives = MatchedCollectives.of(events, matched)
    waits = WaitSums.of(events, matched)
    steps = None if aligned.is_even else MatchedSteps.of(events, matched)
    return skews(collectives), Transfers.of(collectives), waits, counts, lacking, steps


def _exposed_excess(
    batches: Sequence[EventBatch], clocks: Clocks, expected: ExpectedTransfer
) -> dict[int, float]:
    """Return by how many ns exposed transfers took longer than expected, by rank."""
    (cell,) = spill_files.cell_of(np.array([expected.group])).tolist()
    table = spill_files.read(batches, Cells(cell, cell + 1), _COLUMNS)
    events = CommunicationEvents.of(
        table.filter(pa.array(table["group"].to_numpy() == expected.group))
    )
    matched, _, _ = match_events(events, clocks)
    collectives = MatchedCollectives.of(events, matched)
    is_expected = (collectives.tag == expected.tag) & (collectives.op == expected.op)
    low, high = expected.pair
    is_expected &= (collectives.low == low) & (collectives.high == high)
    if expected.power is not None:
        is_expected &= collectives.power == expected.power
    bus = np.where(is_expected & (collectives.bus_bytes != NULL), collectives.bus_bytes, 0)
    excess = collectives.transfer - expected.ns - bus * expected.ns_per_byte
    longer, rows = np.repeat(excess, matched.size), matched.row
    alone = events.alone[rows]
    cost = np.clip(np.where(alone == NULL, longer, np.minimum(longer, alone)), 0, None)
    is_counted = np.repeat(is_expected, matched.size)
    ranks, place = np.unique(events.rank[rows][is_counted], return_inverse=True)
    sums = np.bincount(place, cost[is_counted], len(ranks))
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))


def match_events(
    events: CommunicationEvents, clocks: Clocks
) -> tuple[MatchedEvents, MatchCounts, frozenset[int]]:
    """Match the collectives and messages of several ranks.

    The last value is the ranks that have no event of some collective of their group.
    """
    row_offsets = offset_by_row(events.rank, clocks.offsets)
    rows, sides = events.collectives, events.messages
    matches = match_collectives(
        events, rows, is_host_run=clocks.is_host_run, has_loose=clocks.has_loose
    )
    completeness = Completeness.of(events, rows, matches)
    collectives = collective_participants(events, rows, matches, completeness)
    comparable = _comparable(events, collectives, clocks)
    messages = message_participants(events, sides, row_offsets)
    is_known = clocks.are_known(events.rank[messages.row], events.partner[messages.row])
    together = concatenate(comparable, messages.of_rows(is_known))
    applied = row_offsets if clocks.is_aligned else np.zeros_like(row_offsets)
    # Clocks as recorded are compared as they are.
    is_checked = clocks.is_aligned and not clocks.is_host_run
    participants = _at_once(events, together, applied) if is_checked else together
    matched = MatchedEvents.of(events, participants, applied)
    if is_checked and (is_negative := _take_negative_time(events, matched)).any():
        participants = participants.of_rows(~is_negative[participants.number])
        matched = MatchedEvents.of(events, participants, applied)
    is_numbered = np.zeros(len(events.rank), np.bool_)
    is_numbered[rows[matches.numbered]] = True
    by_number = int(is_numbered[collectives.row].sum())
    counts = MatchCounts(
        events=len(rows) + len(sides),
        sides=len(sides),
        matched=len(collectives.row) + len(messages.row),
        collectives=collectives.count,
        messages=messages.count,
        dropped=matches.dropped,
        loose=matches.loose,
        by_number=by_number,
        by_order=len(collectives.row) - by_number,
        by_partner=len(messages.row),
        by_ends=0,
        incomplete=int((~completeness.is_complete).sum()),
        apart=together.count - participants.count,
        refused=int(matches.refused.max(initial=NONE)) + 1,
        unlike=matches.unlike,
        alone=int(np.isin(events.partner[sides], events.rank).sum()) - len(messages.row),
        unshared=_unshared(events, rows[matches.instance == NONE], rows),
    )
    return matched, counts, completeness.ranks


def _unshared(events: CommunicationEvents, unmatched: Ints, rows: Ints) -> int:
    """Return how many collectives without a match are of groups with several ranks.

    `unmatched` are some of the `rows` of collectives.
    """
    if not len(unmatched):
        return 0
    first, _ = alike(events.group[rows], events.rank[rows])
    groups, ranks = np.unique(events.group[rows][first], return_counts=True)
    return int(np.isin(events.group[unmatched], groups[ranks > 1]).sum())


def _comparable(
    events: CommunicationEvents, collectives: Participants, clocks: Clocks
) -> Participants:
    """Return the collectives whose members' clocks can be compared."""
    if not clocks.unaligned:
        return collectives
    rank = events.rank[collectives.row]
    lowest = np.full(collectives.count, np.iinfo(np.int64).max)
    np.minimum.at(lowest, collectives.number, rank)
    is_known = clocks.are_known(rank, lowest[collectives.number])
    is_unlike = np.bincount(collectives.number, ~is_known, collectives.count) > 0
    return collectives.of_rows(~is_unlike[collectives.number])


# On a device, nobody who waits for a member ends before that one starts, but for errors of
# clocks up to this, in ns. A group of which a larger share does so is not compared at all.
_CLOCK_ERROR_NS = 20_000
_MOST_APART = 0.1


def _at_once(events: CommunicationEvents, together: Participants, ahead: Ints) -> Participants:
    """Return the collectives and messages in which none ends before those it waits for start.

    `ahead` is, for every event, how far the clock of its rank is ahead, ns.
    """
    row, number, count = together.row, together.number, together.count
    start, stop = events.start[row] - ahead[row], events.stop[row] - ahead[row]
    is_needed, waits = _dependence(events, row)
    latest, earliest = np.full(count, NULL), np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(latest, number[is_needed], start[is_needed])
    np.minimum.at(earliest, number[waits], stop[waits])
    is_apart = (latest - _CLOCK_ERROR_NS > earliest)[number]
    if not is_apart.any():
        return together
    groups, group = np.unique(events.group[row], return_inverse=True)
    share = np.bincount(group, is_apart, len(groups)) / np.bincount(group)
    return together.of_rows(~is_apart & (share <= _MOST_APART)[group])


def _take_negative_time(events: CommunicationEvents, matched: MatchedEvents) -> Flags:
    """Return the collectives of each group and operation whose mean transfer time is below 0.

    Then they are no such collectives, or clocks are not aligned.
    """
    is_negative = matched.transfer < 0
    if not is_negative.any():
        return is_negative
    first = matched.row[matched.first]
    kinds = np.stack([events.group[first], events.op[first]])
    _, kind = np.unique(kinds, axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    flags: Flags = (np.bincount(kind, matched.transfer) < 0)[kind]
    return flags


def _dependence(events: CommunicationEvents, row: Ints) -> tuple[Flags, Flags]:
    """Return which members others wait for, and which wait for others."""
    op, is_root = events.op[row], events.partner[row] == events.rank[row]
    is_sent = (op == OP["SendRecv"]) & events.sends[row]
    from_root, to_root = np.isin(op, FROM_ROOT), np.isin(op, TO_ROOT)
    is_needed = np.where(from_root, is_root, ~(to_root & is_root))
    waits = np.where(to_root, is_root, ~(from_root & is_root) & ~is_sent)
    return is_needed, waits


BY_NUMBER = "group and sequence number"
BY_ORDER = "group and order"
BY_PARTNER = "named partners"
BY_ENDS = "order and ends of operations, no group metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """How much of the communication was matched across ranks; stands in the JSON document."""

    events: int  # that can be matched: of known groups, with known partners, or matched by ends
    matched: int  # events
    share: float | None
    by: dict[str, int]  # matched events by rule
    collectives: int  # matched across ranks
    messages: int  # with both sides matched
    incomplete: int  # collectives that some member lacks, which are left out
    lacking_ranks: tuple[int, ...]  # members that lack some
    apart: int  # left out as their members do not run at the same time
    dropped: int  # events of ranks or groups that could not be aligned
    without_partner: int  # SendRecv without a single known partner, or of unknown group
    ungrouped: int  # collective events of unknown group that were not matched
    ends_agree_ns: float | None  # largest difference of ends among collectives matched by ends
    note: str | None  # why communication is not matched


def matching(comparison: RankComparison, sums: pa.Table) -> Matching:
    """Sum up how the communication of ranks was matched.

    Parameters
    ----------
    comparison
        Counts of events and matches over all cells.
    sums
        Table of `traffic.sums_by_rank`; its `messages` tells how many have no known partner.

    """
    matched, ungrouped_ = comparison.matched, comparison.ungrouped
    return Matching(
        events=matched.events,
        matched=matched.matched,
        share=matched.matched / matched.events if matched.events else None,
        by={
            BY_NUMBER: matched.by_number,
            BY_ORDER: matched.by_order,
            BY_PARTNER: matched.by_partner,
            BY_ENDS: matched.by_ends,
        },
        collectives=matched.collectives,
        messages=matched.messages,
        incomplete=matched.incomplete,
        lacking_ranks=tuple(sorted(comparison.lacking_ranks)),
        apart=matched.apart,
        dropped=matched.dropped + matched.loose,
        without_partner=int(sums["messages"].to_numpy().sum()) - matched.sides,
        ungrouped=ungrouped_.events - ungrouped_.matched,
        ends_agree_ns=ungrouped_.agree_ns if ungrouped_.matched else None,
        note=_note(matched, ungrouped_),
    )


def _note(counts: MatchCounts, ungrouped_: Ungrouped) -> str | None:
    """Return why communication is not matched; None if all is that can be."""
    notes = [ungrouped.note(ungrouped_)]
    if counts.refused:
        notes.append(
            f"{counted(counts.refused, 'collective')} not matched across ranks: sizes, roots "
            "or `Comms Id` of members differ."
        )
    if counts.unlike:
        notes.append(
            f"{counted(counts.unlike, 'collective')} matched by sequence number have another "
            "`Comms Id` on each rank: the ranks run different builds of PyTorch, or name the "
            "group differently."
        )
    if counts.dropped:
        notes.append(
            f"{counted(counts.dropped, 'event')} of known groups not matched across ranks: the "
            "ranks recorded no step in common, or their sequences contradict each other in "
            "steps, ends or sequence numbers, or repeat themselves, so that several places "
            "fit; sequence numbers or steps that all ranks count alike would tell"
        )
    elif counts.unshared > counts.loose and not (counts.refused or counts.unlike):
        notes.append(
            f"{counted(counts.unshared - counts.loose, 'event')} of {counts.events} not "
            "matched across ranks: other ranks did not record the operations, as in other "
            "steps or runs. Waits and transfers are those of matched events alone."
        )
    if counts.loose:
        notes.append(
            f"{counted(counts.loose, 'event')} not matched across ranks: the members of their "
            "groups are unknown, and ends do not agree, as of several groups, or are too few."
        )
    if counts.alone:
        notes.append(
            f"{counted(counts.alone, 'side')} of messages not matched with the other side: the "
            "ranks recorded different steps, events are lost, or messages repeat themselves, "
            "so that several places fit."
        )
    return " ".join(note for note in notes if note) or None


def clock_offsets(
    batches: Sequence[EventBatch],
    parallel_map: ParallelMap,
    more_ends: EndOffsets | None,
    ranks: Sequence[int],
    *,
    is_host_run: bool,
) -> tuple[tuple[ClockOffset, ...], frozenset[tuple[int, int]], bool]:
    """Return clock offsets, pairs of ranks whose offset stays unknown, and `Clocks.has_loose`.

    Messages count between ranks that no collective connects, and collectives with a root
    between ranks that neither does. `more_ends` are of collectives without a group.
    """
    shares = spill_files.shares(batches)
    parts, loose = zip(
        *parallel_map(partial(_end_offsets, batches, is_host_run, False), shares), strict=True
    )
    if any(loose) and len(shares) > 1:
        again = parallel_map(partial(_end_offsets, batches, is_host_run, True), shares)
        parts, _ = zip(*again, strict=True)
    ends = EndOffsets.concatenate([*parts, *([more_ends] if more_ends else [])])

    def limits(by_rank: Mapping[int, int]) -> EndOffsets:
        function = partial(_message_limits, batches, by_rank)
        return EndOffsets.concatenate(parallel_map(function, shares))

    def rooted(_: Mapping[int, int]) -> EndOffsets:
        return EndOffsets.concatenate(parallel_map(partial(_rooted_limits, batches), shares))

    offsets, unknown = offsets_with_limits(ends, (limits, rooted), ranks)
    pairs = frozenset(zip(unknown.low.tolist(), unknown.rank.tolist(), strict=True))
    return offsets, pairs, any(loose)


def _message_limits(
    batches: Sequence[EventBatch], by_rank: Mapping[int, int], cells: Cells
) -> EndOffsets:
    """Limit offsets by the messages of some cells; `by_rank` has offsets in ns."""
    events = CommunicationEvents.of(spill_files.read(batches, cells, MESSAGE_COLUMNS))
    ahead = offset_by_row(events.rank, by_rank)
    messages = message_participants(events, events.messages, ahead)
    is_receive = ~events.sends[messages.row]
    row = messages.row[np.lexsort((is_receive, messages.number))]
    sender, receiver = row[::2], row[1::2]
    return EndOffsets.of_messages(
        events.rank[sender],
        events.start[sender],
        events.rank[receiver],
        events.stop[receiver],
    )


def _rooted_limits(batches: Sequence[EventBatch], cells: Cells) -> EndOffsets:
    """Tell by the collectives with a root of some cells whether clocks can be equal.

    Equal clocks show all members at work at once at some time; else the root may be early, or
    clocks differ.
    """
    events = CommunicationEvents.of(spill_files.read(batches, cells, MESSAGE_COLUMNS))
    rows = events.collectives
    matches = match_collectives(events, rows)
    matched = (matches.instance != NONE) & np.isin(events.op[rows], ROOTED)
    row = rows[matched]
    limits = EndOffsets.of(
        events.rank[row], events.stop[row], matches.instance[matched], start=events.start[row]
    )
    return limits.of_equal_clocks()


def _end_offsets(
    batches: Sequence[EventBatch], is_host_run: bool, has_loose: bool, cells: Cells
) -> tuple[EndOffsets, bool]:
    """Compare the ends of the collectives of some cells.

    The second value is whether they show that a group of unknown members is several.
    """
    events = CommunicationEvents.of(spill_files.read(batches, cells, _END_COLUMNS))
    rows = events.synchronous
    matches = match_collectives(events, rows, is_host_run=is_host_run, has_loose=has_loose)
    matched = np.flatnonzero(matches.instance != NONE)
    row = rows[matched]
    ends = matched_end_offsets(
        events.rank[row],
        events.group[row],
        matches.instance[matched],
        events.stop[row],
        events.start[row] if is_host_run else None,
    )
    return ends, matches.has_loose
