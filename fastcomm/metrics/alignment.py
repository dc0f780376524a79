"""Align the clocks of ranks by their collectives, and by messages where these connect none."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from fastcomm.exchange.arrivals import match_collectives, message_participants
from fastcomm.exchange.clocks import (
    ClockOffset,
    apart,
    matched_end_offsets,
    offset_by_row,
    offsets,
)
from fastcomm.exchange.ends import EndOffsets
from fastcomm.exchange.matching import CommunicationEvents
from fastcomm.metrics import pieces as pieces_
from fastcomm.metrics.pieces import Cells, Piece
from fastcomm.trace.run import Spread
from fastcomm_kernels.arrays import NONE, Flags, Ints

_END_COLUMNS = (
    *("rank", "tag", "op", "group", "group_size", "seq"),
    *("start_ns", "duration_ns", "payload_bytes"),
)
MESSAGE_COLUMNS = (*_END_COLUMNS, "partner", "sends")
_RANK_BITS = 32


class Clocks(NamedTuple):
    """Clock offsets by rank in ns, and whether times are corrected by them.

    Between unaligned ranks, no offset is known: their messages are not compared then.
    """

    offsets: Mapping[int, int]
    is_aligned: bool
    unaligned: frozenset[tuple[int, int]]  # pairs of ranks with messages, the lower first

    def are_known(self, rank: Ints, other: Ints) -> Flags:
        """Return which pairs of ranks can be compared."""
        codes = [low << _RANK_BITS | high for low, high in self.unaligned]
        pair = np.minimum(rank, other) << _RANK_BITS | np.maximum(rank, other)
        return ~(self.is_aligned & np.isin(pair, codes))


def clock_offsets(
    pieces: Sequence[Piece],
    spread: Spread,
    more_ends: EndOffsets | None,
    ranks: Sequence[int],
    *,
    is_host_run: bool,
) -> tuple[tuple[ClockOffset, ...], frozenset[tuple[int, int]]]:
    """Return clock offsets, and pairs of ranks with messages whose offset stays unknown.

    Messages count between ranks that no collective connects. `more_ends` are of collectives
    without a group.
    """
    shares = pieces_.shares(pieces)
    parts = spread(partial(_end_offsets, pieces, is_host_run), shares)
    ends = EndOffsets.concatenate([*parts, *([more_ends] if more_ends else [])])
    by_ends = offsets(ends)
    if (
        set(ranks) == {offset.rank for offset in by_ends}
        and len({offset.reference for offset in by_ends}) == 1
    ):
        return by_ends, frozenset()
    by_rank = {offset.rank: offset.offset_ns for offset in by_ends}
    limits = EndOffsets.concatenate(spread(partial(_message_limits, pieces, by_rank), shares))
    limits = apart(limits, by_ends)
    by_both = offsets(EndOffsets.concatenate([ends, limits]))
    unknown = apart(limits, by_both)
    return by_both, frozenset(zip(unknown.low.tolist(), unknown.rank.tolist(), strict=True))


def _message_limits(
    pieces: Sequence[Piece], by_rank: Mapping[int, int], cells: Cells
) -> EndOffsets:
    """Limit offsets by the messages of some cells; `by_rank` has offsets in ns."""
    events = CommunicationEvents.of(pieces_.read(pieces, cells, MESSAGE_COLUMNS))
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


def _end_offsets(pieces: Sequence[Piece], is_host_run: bool, cells: Cells) -> EndOffsets:
    """Compare the ends of the collectives of some cells."""
    events = CommunicationEvents.of(pieces_.read(pieces, cells, _END_COLUMNS))
    rows = events.synchronous
    matches = match_collectives(events, rows)
    matched = np.flatnonzero(matches.instance != NONE)
    row = rows[matched]
    return matched_end_offsets(
        events.rank[row],
        events.group[row],
        matches.instance[matched],
        events.stop[row],
        events.start[row] if is_host_run else None,
    )
