"""Ranks compared, some groups at a time: each function is asked of the cells of a few groups.

First the ends of collectives, which tell how far clocks are apart; then, on one clock, who
comes when. What a function gives is small, and adds up to that of all groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.metrics import pieces as pieces_
from fastcomm.metrics.collectives import Collectives
from fastcomm.metrics.meetings import Events, Meetings, ahead_of, matches_of, sample_of
from fastcomm.metrics.pieces import Cells, Piece
from fastcomm.metrics.skew import WaitSums
from fastcomm.metrics.view import UNKNOWN
from fastcomm.spread import Spread
from fastcomm.trace.clocks import ENDS, ClockOffset, clock_offsets
from fastcomm.trace.matching import NONE, Matches

Ints = NDArray[np.int64]

_MATCHED_BY = (
    *("rank", "tag", "op", "group", "group_size", "seq", "start_ns", "duration_ns"),
    *("alone_ns", "bytes", "bus_bytes"),
)


class Matched(NamedTuple):
    """How many events were matched across ranks."""

    events: int  # that can be matched
    joined: int
    collectives: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How long the transfers of a group's collectives should take."""

    group: int  # label
    tag: int
    op: int
    power: int | None  # of the size; null: all sizes
    ns: float
    ns_per_byte: float  # of the bus


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What the collectives of all groups say."""

    pieces: Sequence[Piece]
    spread: Spread
    offsets: tuple[ClockOffset, ...]
    ahead: Mapping[int, int]  # ns by rank, that times were corrected by
    matched: Matched
    collectives: Collectives
    waits: WaitSums

    def excess(self, expected: Sequence[Expected]) -> list[dict[int, float]]:
        """Of each, by rank: ns that transfers took longer while nothing else went on."""
        return self.spread(partial(_alone_excess, self.pieces, self.ahead), expected)


def compare_all(pieces: Sequence[Piece], spread: Spread, *, is_aligned: bool) -> Compared:
    """Compare all ranks, on clocks that are aligned by ends of collectives, or as they are."""
    shares = pieces_.shares(pieces)
    offsets, matched = _clocks(spread(partial(_ends, pieces), shares))
    ahead = {each.rank: each.offset_ns for each in offsets} if is_aligned else {}
    parts = spread(partial(_compare, pieces, ahead), shares)
    return Compared(
        pieces=pieces,
        spread=spread,
        offsets=offsets,
        ahead=ahead,
        matched=matched,
        collectives=Collectives.joined([collectives for collectives, _ in parts]),
        waits=WaitSums.joined([waits for _, waits in parts]),
    )


_Ends = tuple[pa.Table, Matched]  # `clocks.ENDS` of a sample, where a group is a collective


def _ends(pieces: Sequence[Piece], cells: Cells) -> _Ends:
    """Match the collectives of some cells."""
    events, rows, matches = _matched(_events(pieces, cells))
    matched = Matched(
        events=len(rows),
        joined=int((matches.instance != NONE).sum()),
        collectives=matches.count,
        dropped=matches.dropped,
    )
    return sample_of(events, rows, matches), matched


def _clocks(ends: Sequence[_Ends]) -> tuple[tuple[ClockOffset, ...], Matched]:
    """The clocks' offsets, by collectives that are numbered through; what was matched."""
    tables, done = [], 0
    for table, matched in ends:
        number = pc.add(table["group"], done)
        place = table.schema.get_field_index("group")
        tables.append(table.set_column(place, ENDS.field("group"), number))
        done += matched.collectives
    sums = (sum(each) for each in zip(*(matched for _, matched in ends), strict=True))
    return clock_offsets(pa.concat_tables(tables)), Matched(*sums)


def _compare(
    pieces: Sequence[Piece], ahead: Mapping[int, int], cells: Cells
) -> tuple[Collectives, WaitSums]:
    """Who comes when, in the collectives of some cells."""
    events, meetings = _met(_events(pieces, cells), ahead)
    return Collectives.of(events, meetings), WaitSums.of(events, meetings)


def _alone_excess(
    pieces: Sequence[Piece], ahead: Mapping[int, int], expected: Expected
) -> dict[int, float]:
    """By rank: what transfers took longer than expected while nothing else went on."""
    (cell,) = pieces_.cell_of(np.array([expected.group])).tolist()
    table = _events(pieces, Cells(cell, cell + 1))
    events, met = _met(table.filter(pa.array(_is_of(table, expected.group))), ahead)
    found = Collectives.of(events, met)
    own = (found.tag == expected.tag) & (found.op == expected.op)
    if expected.power is not None:
        own &= found.power == expected.power
    bus = np.where(own & (found.bus_bytes != UNKNOWN), found.bus_bytes, 0)
    excess = found.transfer - expected.ns - bus * expected.ns_per_byte
    longer, rows = np.repeat(excess, met.size), met.row
    alone = events.alone[rows]
    cost = np.clip(np.where(alone == UNKNOWN, longer, np.minimum(longer, alone)), 0, None)
    counts = np.repeat(own, met.size)
    ranks, place = np.unique(events.rank[rows][counts], return_inverse=True)
    sums = np.bincount(place, cost[counts], len(ranks))
    return dict(zip(ranks.tolist(), sums.tolist(), strict=True))


def _events(pieces: Sequence[Piece], cells: Cells) -> pa.Table:
    return pieces_.read(pieces, cells, _MATCHED_BY)


def _is_of(table: pa.Table, group: int) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = table["group"].to_numpy() == group
    return found


def _matched(table: pa.Table) -> tuple[Events, Ints, Matches]:
    events = Events.of(table)
    rows = np.flatnonzero(events.joins)
    return events, rows, matches_of(events, rows)


def _met(table: pa.Table, ahead: Mapping[int, int]) -> tuple[Events, Meetings]:
    events, rows, matches = _matched(table)
    return events, Meetings.of(events, rows, matches, ahead_of(events, ahead))
