"""Match the communication of all ranks, and compare the ranks by it, some groups at a time.

First the ends of collectives, which tell how far clocks are apart; then, on one clock, who
arrives when. Each function works on the cells of a few groups; its results are small and add
up to those of all groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fastcomm.exchange.arrivals import (
    CommunicationEvents,
    MatchedEvents,
    joined,
    matches_of,
    met_in_collectives,
    met_in_messages,
)
from fastcomm.exchange.clocks import Apart, ClockOffset, by_rank, matched_apart, offsets
from fastcomm.exchange.matching import NONE
from fastcomm.exchange.sequences import LEAST
from fastcomm.metrics import pieces as pieces_
from fastcomm.metrics import ungrouped
from fastcomm.metrics.pieces import Cells, Piece
from fastcomm.metrics.skew import MatchedCollectives, Skews, Transfers, WaitSums, skews
from fastcomm.metrics.ungrouped import Doubt, ExpectedMembers, Ungrouped
from fastcomm.trace.run import Spread
from fastcomm.units import format_ns
from fastcomm_kernels.arrays import NULL

_ENDS_BY = (
    *("rank", "tag", "op", "group", "group_size", "seq"),
    *("start_ns", "duration_ns", "payload_bytes"),
)
_COMPARED_BY = (*_ENDS_BY, "bytes", "alone_ns", "bus_bytes", "partner", "sends")


class MatchCounts(NamedTuple):
    """How many events were matched across ranks."""

    events: int  # that can be matched
    sides: int  # of messages, among these
    joined: int
    collectives: int
    messages: int
    dropped: int
    by_number: int  # of those joined: by the sequence number in the group
    by_order: int  # by the order in the group, and ends
    by_partner: int  # messages, by the partners that they name
    by_ends: int  # without a group, by order and ends on all ranks


class _Clocks(NamedTuple):
    """How far clocks are ahead, by rank in ns, and whether times are corrected by it."""

    offsets: Mapping[int, int]
    is_aligned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How long the transfers of a group's collectives should take."""

    group: int  # label
    tag: int
    op: int
    power: int | None  # of the size; null: all sizes
    pair: tuple[int, int]  # the ranks of a message, the lower first; `NO_PAIR`
    ns: float
    ns_per_byte: float  # of the bus


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What the collectives of all groups say."""

    pieces: Sequence[Piece]
    spread: Spread
    offsets: tuple[ClockOffset, ...]
    clocks: _Clocks
    matched: MatchCounts
    ungrouped: Ungrouped
    skews: Sequence[Skews]
    transfers: Transfers
    waits: WaitSums

    def excess(self, expected: Sequence[Expected]) -> list[dict[int, float]]:
        """Of each, by rank: ns that transfers took longer while nothing else went on."""
        return self.spread(partial(_alone_excess, self.pieces, self.clocks), expected)


def compare_all(
    pieces: Sequence[Piece],
    spread: Spread,
    *,
    is_aligned: bool,
    job: ExpectedMembers | None = None,
) -> Compared:
    """Compare all ranks, on clocks that are aligned by ends of collectives, or as they are.

    Collectives of no known group are compared if `job` says who should be in them.
    """
    shares = pieces_.shares(pieces)
    alone = Ungrouped(events=0) if job is None else ungrouped.find(pieces, job, spread)
    apart = spread(partial(_apart, pieces), shares)
    found = offsets(Apart.joined([*apart, *([alone.ends] if alone.ends else [])]))
    clocks = _Clocks({each.rank: each.offset_ns for each in found}, is_aligned)
    parts = spread(partial(_compare, pieces, clocks), shares)
    if spans := alone.spans():
        size = len(job.ranks) if job else 0
        parts += spread(partial(_compare_ungrouped, pieces, clocks, alone, size), spans)
    skewed, transfers, waits, matched = zip(*parts, strict=True)
    return Compared(
        pieces=pieces,
        spread=spread,
        offsets=found,
        clocks=clocks,
        matched=MatchCounts(*map(sum, zip(*matched, strict=True))),
        ungrouped=alone,
        skews=skewed,
        transfers=Transfers.joined(transfers),
        waits=WaitSums.joined(waits),
    )


def _apart(pieces: Sequence[Piece], cells: Cells) -> Apart:
    """How far the ends of collectives of some cells are apart."""
    events = CommunicationEvents.of(pieces_.read(pieces, cells, _ENDS_BY))
    rows = events.together
    matches = matches_of(events, rows)
    matched = np.flatnonzero(matches.instance != NONE)
    row = rows[matched]
    return matched_apart(
        events.rank[row], events.group[row], matches.instance[matched], events.stop[row]
    )


_Part = tuple[Skews, Transfers, WaitSums, MatchCounts]


def _compare(pieces: Sequence[Piece], clocks: _Clocks, cells: Cells) -> _Part:
    """Who comes when, in what those of some cells do together."""
    events = CommunicationEvents.of(_events(pieces, cells))
    meetings, matched = _met(events, clocks)
    return _part(events, meetings, matched)


def _compare_ungrouped(
    pieces: Sequence[Piece], clocks: _Clocks, found: Ungrouped, size: int, span: range
) -> _Part:
    """Compare some collectives of no known group, as those of a group of all ranks."""
    events = CommunicationEvents.of(found.read(pieces, span, _COMPARED_BY))
    events = replace(events, group_size=np.full(len(events.rank), size))
    meetings, matched = _met(events, clocks)
    matched = matched._replace(by_number=0, by_ends=matched.by_number)
    return _part(events, meetings, matched)


def _part(events: CommunicationEvents, meetings: MatchedEvents, matched: MatchCounts) -> _Part:
    met = MatchedCollectives.of(events, meetings)
    return skews(met), Transfers.of(met), WaitSums.of(events, meetings), matched


def _alone_excess(
    pieces: Sequence[Piece], clocks: _Clocks, expected: Expected
) -> dict[int, float]:
    """By rank: what transfers took longer than expected while nothing else went on."""
    (cell,) = pieces_.cell_of(np.array([expected.group])).tolist()
    table = _events(pieces, Cells(cell, cell + 1))
    events = CommunicationEvents.of(
        table.filter(pa.array(table["group"].to_numpy() == expected.group))
    )
    met, _ = _met(events, clocks)
    found = MatchedCollectives.of(events, met)
    own = (found.tag == expected.tag) & (found.op == expected.op)
    own &= (found.low == expected.pair[0]) & (found.high == expected.pair[1])
    if expected.power is not None:
        own &= found.power == expected.power
    bus = np.where(own & (found.bus_bytes != NULL), found.bus_bytes, 0)
    excess = found.transfer - expected.ns - bus * expected.ns_per_byte
    longer, rows = np.repeat(excess, met.size), met.row
    alone = events.alone[rows]
    cost = np.clip(np.where(alone == NULL, longer, np.minimum(longer, alone)), 0, None)
    counts = np.repeat(own, met.size)
    ranks, place = np.unique(events.rank[rows][counts], return_inverse=True)
    sums = np.bincount(place, cost[counts], len(ranks))
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))


def _events(pieces: Sequence[Piece], cells: Cells) -> pa.Table:
    return pieces_.read(pieces, cells, _COMPARED_BY)


def _met(events: CommunicationEvents, clocks: _Clocks) -> tuple[MatchedEvents, MatchCounts]:
    """All that several ranks met in."""
    known = by_rank(events.rank, clocks.offsets)
    rows, sides = events.collectives, events.messages
    matches = matches_of(events, rows)
    collectives = met_in_collectives(events, rows, matches)
    messages = met_in_messages(events, sides, known)
    met = joined(collectives, messages)
    numbered = np.zeros(len(events.rank), np.bool_)
    numbered[rows[matches.numbered]] = True
    by_number = int(numbered[collectives.row].sum())
    matched = MatchCounts(
        events=len(rows) + len(sides),
        sides=len(sides),
        joined=len(met.row),
        collectives=collectives.count,
        messages=messages.count,
        dropped=matches.dropped,
        by_number=by_number,
        by_order=len(collectives.row) - by_number,
        by_partner=len(messages.row),
        by_ends=0,
    )
    ahead = known if clocks.is_aligned else np.zeros_like(known)
    return MatchedEvents.of(events, met, ahead), matched


BY_NUMBER = "group and sequence number"
BY_ORDER = "group and order"
BY_PARTNER = "named partners"
BY_ENDS = "order and ends of operations, no group metadata"

_MOST_DOUBTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """How much of the communication was matched across ranks."""

    events: int  # of known groups of several ranks, with known partners; and those by ends
    matched: int
    share: float | None
    by: dict[str, int]  # events matched, by rule
    collectives: int  # that several ranks were matched in
    messages: int  # of which both sides were found
    dropped: int  # of a group whose events could not be brought in line
    unsaid: int  # SendRecv that do not say their one partner, or their group
    ungrouped: int  # collectives on a rank, of no known group, that were not matched
    ends_agree_ns: float | None  # of the ungrouped that were matched: the ends farthest apart
    note: str | None  # what a reader has to know of collectives of no known group


def matching(compared: Compared, sums: pa.Table) -> Matching:
    """Sum up how ranks were matched; `sums` is `traffic.sums_by_rank`."""
    matched, alone = compared.matched, compared.ungrouped
    return Matching(
        events=matched.events,
        matched=matched.joined,
        share=matched.joined / matched.events if matched.events else None,
        by=_by(matched),
        collectives=matched.collectives,
        messages=matched.messages,
        dropped=matched.dropped,
        unsaid=int(sums["messages"].to_numpy().sum()) - matched.sides,
        ungrouped=alone.events - alone.matched,
        ends_agree_ns=alone.agree_ns if alone.matched else None,
        note=note(alone),
    )


def _by(matched: MatchCounts) -> dict[str, int]:
    return {
        BY_NUMBER: matched.by_number,
        BY_ORDER: matched.by_order,
        BY_PARTNER: matched.by_partner,
        BY_ENDS: matched.by_ends,
    }


def note(found: Ungrouped) -> str | None:
    """Say how collectives of no known group were matched, or why not; None without any."""
    if not (found.matched or found.doubts or found.missing):
        return None
    if not found.matched:
        return (
            f"{found.events} collective events name no process group and were not matched "
            f"across ranks: {_reasons(found)}. Waiting and order of arrival are n/a for them."
        )
    how = (
        f"by their order on each stream and by their ends, which agree within "
        f"{format_ns(found.agree_ns)} on aligned clocks"
    )
    if found.matched == found.events:
        return f"No process group is named: collectives were matched across all ranks {how}."
    rest = f": {_reasons(found)}" if found.doubts else ""
    return (
        f"{found.matched} of {found.events} collective events that name no process group were "
        f"matched across all ranks {how}. The others were not{rest}."
    )


def _reasons(found: Ungrouped) -> str:
    """Why collectives were not matched, of the first streams."""
    reasons = [_reason(each, found.reference) for each in found.doubts[:_MOST_DOUBTS]]
    if more := len(found.doubts) - len(reasons):
        reasons.append(f"likewise {more} more streams")
    if found.missing:
        what = "rank of the job is" if found.missing == 1 else "ranks of the job are"
        reasons.append(
            f"{found.missing} {what} missing, and those at hand may share no collective"
        )
    return "; ".join(reasons)


def _reason(doubt: Doubt, reference: int | None) -> str:
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
