"""Match the communication of all ranks, and compare the ranks by it, some groups at a time.

First the ends of collectives are matched, which give clock offsets; then waits and transfers
are measured on aligned clocks. Functions work on the cells of a few groups (see `pieces`) so
that memory stays bounded; results are small, and are merged over cells.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from fastcomm.exchange.arrivals import (
    MatchedEvents,
    collective_participants,
    concatenate,
    match_collectives,
    message_participants,
)
from fastcomm.exchange.clocks import ClockOffset, offset_by_row
from fastcomm.exchange.matching import CommunicationEvents
from fastcomm.exchange.streams import LEAST
from fastcomm.metrics import pieces as pieces_
from fastcomm.metrics import ungrouped
from fastcomm.metrics.alignment import MESSAGE_COLUMNS, Clocks, clock_offsets
from fastcomm.metrics.pieces import Cells, Piece
from fastcomm.metrics.skew import MatchedCollectives, Skews, Transfers, WaitSums, skews
from fastcomm.metrics.ungrouped import Doubt, ExpectedMembers, Ungrouped
from fastcomm.trace.run import Spread
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_COLUMNS = (*MESSAGE_COLUMNS, "bytes", "alone_ns", "exposed_ns", "bus_bytes", "stream")


class MatchCounts(NamedTuple):
    """Numbers of events, and of matched events, collectives and messages."""

    events: int  # that can be matched
    sides: int  # of these: sides of messages
    matched: int
    collectives: int
    messages: int
    dropped: int
    by_number: int  # matched by the sequence number in the group
    by_order: int  # matched by the order in the group, and ends
    by_partner: int  # sides of messages, matched by their partners
    by_ends: int  # without a group: matched by order and ends on all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTransfer:
    """Expected transfer time of a group's collectives: `ns`, plus `ns_per_byte` per byte."""

    group: int  # label
    tag: int
    op: int
    power: int | None  # of two, below the size; null: all sizes
    pair: tuple[int, int]  # ranks of a message, the lower first; `NO_PAIR` for collectives
    ns: float
    ns_per_byte: float  # per bus byte


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """Ranks compared by the matched collectives and messages of all groups."""

    pieces: Sequence[Piece]
    spread: Spread
    offsets: tuple[ClockOffset, ...]
    clocks: Clocks
    matched: MatchCounts
    ungrouped: Ungrouped
    skews: Sequence[Skews]
    transfers: Transfers
    waits: WaitSums

    def excess(self, expected: Sequence[ExpectedTransfer]) -> list[dict[int, float]]:
        """Return by how much exposed transfers took longer than expected.

        Returns
        -------
        list of dict
            Per element of `expected`: ns by rank, counting only time in which the rank ran
            neither compute nor other communication.

        """
        return self.spread(partial(_exposed_excess, self.pieces, self.clocks), expected)

    def clock_error(self, ranks: Collection[int]) -> int:
        """Return how wrong the difference of two clocks of some ranks may be, in ns."""
        if not self.clocks.is_aligned:
            return 0
        spreads = [offset.spread_ns for offset in self.offsets if offset.rank in ranks]
        return sum(sorted(spreads)[-2:])


def compare_all(
    pieces: Sequence[Piece],
    spread: Spread,
    *,
    is_aligned: bool,
    is_host_run: bool = False,
    job: ExpectedMembers | None = None,
) -> RankComparison:
    """Match and compare all ranks.

    Parameters
    ----------
    pieces
        Communication events of all ranks.
    spread
        Maps a function over arguments, maybe in other processes.
    is_aligned
        Whether times of ranks are compared on aligned clocks, or as recorded.
    is_host_run
        Whether the host communicates, where collectives do not end at the same time.
    job
        Expected members of collectives of unknown groups; None: these are not matched.

    """
    aligned = AlignedEvents.of(
        pieces, spread, is_aligned=is_aligned, is_host_run=is_host_run, job=job
    )
    parts = spread(partial(_compare, aligned), aligned.shares())
    skewed, transfers, waits, matched = zip(*parts, strict=True)
    return RankComparison(
        pieces=pieces,
        spread=spread,
        offsets=aligned.offsets,
        clocks=aligned.clocks,
        matched=MatchCounts(*map(sum, zip(*matched, strict=True))),
        ungrouped=aligned.ungrouped,
        skews=skewed,
        transfers=Transfers.merge(transfers),
        waits=WaitSums.merge(waits),
    )


class Share(NamedTuple):
    """Some communication that fits into memory, with all events of each collective."""

    rows: range  # cells, or numbers of collectives without a group
    has_groups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedEvents:
    """The communication of all ranks on aligned clocks, which is matched share by share."""

    pieces: Sequence[Piece]
    offsets: tuple[ClockOffset, ...]
    clocks: Clocks
    ungrouped: Ungrouped
    size: int  # of the group of all ranks, for collectives without a group

    @classmethod
    def of(
        cls,
        pieces: Sequence[Piece],
        spread: Spread,
        *,
        is_aligned: bool = True,
        is_host_run: bool = False,
        job: ExpectedMembers | None = None,
    ) -> Self:
        """Align the clocks of ranks; the parameters are those of `compare_all`."""
        ungrouped_ = Ungrouped(events=0) if job is None else ungrouped.find(pieces, job, spread)
        ranks = job.ranks if job else ()
        offsets, unaligned = clock_offsets(
            pieces, spread, ungrouped_.ends, ranks, is_host_run=is_host_run
        )
        by_rank = {offset.rank: offset.offset_ns for offset in offsets}
        return cls(
            pieces=pieces,
            offsets=offsets,
            clocks=Clocks(by_rank, is_aligned, unaligned),
            ungrouped=ungrouped_,
            size=len(ranks),
        )

    def shares(self) -> list[Share]:
        """Divide the communication."""
        spans = self.ungrouped.spans()
        return [
            *(Share(cells) for cells in pieces_.shares(self.pieces)),
            *(Share(span, has_groups=False) for span in spans),
        ]

    def read(self, share: Share, names: Sequence[str] = _COLUMNS) -> pa.Table:
        """Return columns of the events of a share; collectives without a group have one."""
        if share.has_groups:
            return pieces_.read(self.pieces, share.rows, names)
        table = self.ungrouped.read(self.pieces, share.rows, names)
        sizes = pa.array(np.full(table.num_rows, self.size))
        return table.set_column(table.column_names.index("group_size"), "group_size", sizes)

    def match(self, events: CommunicationEvents) -> tuple[MatchedEvents, MatchCounts]:
        """Match the events of a share."""
        return match_events(events, self.clocks)


_Part = tuple[Skews, Transfers, WaitSums, MatchCounts]


def _compare(aligned: AlignedEvents, share: Share) -> _Part:
    """Compare the ranks by a share of their communication."""
    events = CommunicationEvents.of(aligned.read(share))
    matched, counts = aligned.match(events)
    if not share.has_groups:
        counts = counts._replace(by_number=0, by_ends=counts.by_number)
    collectives = MatchedCollectives.of(events, matched)
    return skews(collectives), Transfers.of(collectives), WaitSums.of(events, matched), counts


def _exposed_excess(
    pieces: Sequence[Piece], clocks: Clocks, expected: ExpectedTransfer
) -> dict[int, float]:
    """Return by how many ns exposed transfers took longer than expected, by rank."""
    (cell,) = pieces_.cell_of(np.array([expected.group])).tolist()
    table = _events(pieces, Cells(cell, cell + 1))
    events = CommunicationEvents.of(
        table.filter(pa.array(table["group"].to_numpy() == expected.group))
    )
    matched, _ = match_events(events, clocks)
    collectives = MatchedCollectives.of(events, matched)
    is_expected = (collectives.tag == expected.tag) & (collectives.op == expected.op)
    is_expected &= (collectives.low == expected.pair[0]) & (
        collectives.high == expected.pair[1]
    )
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


def _events(pieces: Sequence[Piece], cells: Cells) -> pa.Table:
    return pieces_.read(pieces, cells, _COLUMNS)


def match_events(
    events: CommunicationEvents, clocks: Clocks
) -> tuple[MatchedEvents, MatchCounts]:
    """Match the collectives and messages of several ranks."""
    row_offsets = offset_by_row(events.rank, clocks.offsets)
    rows, sides = events.collectives, events.messages
    matches = match_collectives(events, rows)
    collectives = collective_participants(events, rows, matches)
    messages = message_participants(events, sides, row_offsets)
    partner = events.partner[messages.row]
    comparable = messages.of_rows(clocks.are_known(events.rank[messages.row], partner))
    participants = concatenate(collectives, comparable)
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
        by_number=by_number,
        by_order=len(collectives.row) - by_number,
        by_partner=len(messages.row),
        by_ends=0,
    )
    applied = row_offsets if clocks.is_aligned else np.zeros_like(row_offsets)
    return MatchedEvents.of(events, participants, applied), counts


BY_NUMBER = "group and sequence number"
BY_ORDER = "group and order"
BY_PARTNER = "named partners"
BY_ENDS = "order and ends of operations, no group metadata"

_MAX_DOUBTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """How much of the communication was matched across ranks; stands in the JSON document."""

    events: int  # that can be matched: of known groups, with known partners, or matched by ends
    matched: int  # events
    share: float | None
    by: dict[str, int]  # matched events by rule
    collectives: int  # matched across ranks
    messages: int  # with both sides matched
    dropped: int  # events of ranks whose sequence could not be aligned with their group
    unsaid: int  # SendRecv without a single known partner, or of unknown group
    ungrouped: int  # collective events of unknown group that were not matched
    ends_agree_ns: float | None  # largest difference of ends among collectives matched by ends
    note: str | None  # on collectives of unknown group


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
        by=_by(matched),
        collectives=matched.collectives,
        messages=matched.messages,
        dropped=matched.dropped,
        unsaid=int(sums["messages"].to_numpy().sum()) - matched.sides,
        ungrouped=ungrouped_.events - ungrouped_.matched,
        ends_agree_ns=ungrouped_.agree_ns if ungrouped_.matched else None,
        note=note(ungrouped_),
    )


def _by(matched: MatchCounts) -> dict[str, int]:
    """Return the number of matched collectives by kind of evidence, under its JSON name."""
    return {
        BY_NUMBER: matched.by_number,
        BY_ORDER: matched.by_order,
        BY_PARTNER: matched.by_partner,
        BY_ENDS: matched.by_ends,
    }


def note(ungrouped_: Ungrouped) -> str | None:
    """Return how collectives of unknown groups were matched, or why not; None without any."""
    if not (ungrouped_.matched or ungrouped_.doubts or ungrouped_.missing):
        return None
    if not ungrouped_.matched:
        return (
            f"{ungrouped_.events} collective events name no process group and were not matched "
            f"across ranks: {_reasons(ungrouped_)}. Waiting and order of arrival are n/a for "
            "them."
        )
    how = (
        f"by their order on each stream and by their ends, which agree within "
        f"{format_ns(ungrouped_.agree_ns)} on aligned clocks"
    )
    if ungrouped_.matched == ungrouped_.events:
        return f"No process group is named: collectives were matched across all ranks {how}."
    reasons = f": {_reasons(ungrouped_)}" if ungrouped_.doubts else ""
    return (
        f"{ungrouped_.matched} of {ungrouped_.events} collective events that name no process "
        f"group were matched across all ranks {how}. The others were not{reasons}."
    )


def _reasons(ungrouped_: Ungrouped) -> str:
    """Return why collectives were not matched; names the first few streams."""
    reasons = [
        _reason(doubt, ungrouped_.reference) for doubt in ungrouped_.doubts[:_MAX_DOUBTS]
    ]
    if more := len(ungrouped_.doubts) - len(reasons):
        reasons.append(f"likewise {more} more streams")
    if ungrouped_.missing:
        ranks = "rank of the job is" if ungrouped_.missing == 1 else "ranks of the job are"
        reasons.append(
            f"{ungrouped_.missing} {ranks} missing, and the ranks read may share no collective"
        )
    return "; ".join(reasons)


def _reason(doubt: Doubt, reference: int | None) -> str:
    """Return why a stream's collectives were not matched with those of rank `reference`."""
    stream = "" if doubt.stream == NULL else f" on stream {doubt.stream}"
    pair = f"ranks {reference} and {doubt.rank}"
    return {
        "smaller groups": "other collectives are of groups of fewer ranks",
        "messages": "there are messages between ranks, so not all ranks do the same",
        "absent": f"rank {doubt.rank} has none{stream}",
        "few": f"there are fewer than {LEAST}{stream}",
        "order": f"{pair} differ in operations, sizes or their order{stream}",
        "ends": f"their ends{stream} do not agree between {pair}",
        "impossible": f"some{stream} end on one rank before they begin on another",
        "loose": f"their ends{stream} differ nearly as much as their starts",
        "separate": f"ranks{stream} fall into groups that end separately",
    }[doubt.why]
