"""Differences of the ends of collectives between two ranks, and limits of their clocks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels.arrays import NULL, Ints

NO_LIMIT = np.iinfo(np.int64)
_PAIR_BITS = 32


@dataclass(frozen=True, slots=True)
class EndOffsets:
    """Differences of ends: a row per member of a collective, compared with its lowest rank.

    The messages of two ranks are one row, without a difference of ends.
    """

    low: NDArray[np.int32]  # lowest rank of the collective
    rank: NDArray[np.int32]
    ahead: Ints  # end on `rank` minus end on `low`, ns; NULL of messages
    least: Ints  # limits of the offset in ns; those of int64 if there are none
    most: Ints
    matches: Ints  # number of collectives or messages

    @classmethod
    def of(
        cls, rank: Ints, stop: Ints, *key: NDArray[np.integer], start: Ints | None = None
    ) -> Self:
        """Compare ends within each collective.

        Parameters
        ----------
        rank, stop
            Rank, and end in ns on its clock, per row.
        *key
            Columns that are equal in rows of one collective, and in no others.
        start
            Start per row, ns; NULL or None if it is no limit of the offset.

        """
        order = np.lexsort((rank, *key))
        first = firsts(np.stack(key)[:, order])
        ranks, stop = rank[order].astype(np.int32), stop[order]
        others = np.flatnonzero(ranks != ranks[first])
        lowest = first[others]
        start = np.full(len(rank), NULL) if start is None else start[order]
        is_limited = (start[others] != NULL) & (start[lowest] != NULL)
        return cls(
            low=ranks[lowest],
            rank=ranks[others],
            ahead=stop[others] - stop[lowest],
            least=np.where(is_limited, start[others] - stop[lowest], NO_LIMIT.min),
            most=np.where(is_limited, stop[others] - start[lowest], NO_LIMIT.max),
            matches=np.ones(len(others), np.int64),
        )

    @classmethod
    def of_messages(cls, sender: Ints, start: Ints, receiver: Ints, stop: Ints) -> Self:
        """Limit the offsets of ranks by their messages: a row per pair of ranks.

        Parameters
        ----------
        sender, start
            Rank that sends, and start of its send in ns on its clock, per message.
        receiver, stop
            Rank that receives, and end of its receive in ns on its clock.

        """
        low, high = np.minimum(sender, receiver), np.maximum(sender, receiver)
        order = np.argsort(low << _PAIR_BITS | high, kind="stable")
        low, high, is_up = low[order], high[order], (sender < receiver)[order]
        begin = np.flatnonzero(firsts(np.stack([low, high])) == np.arange(len(order)))
        if not len(begin):
            nothing, no_rank = np.zeros(0, np.int64), np.zeros(0, np.int32)
            return cls(no_rank, no_rank, nothing, nothing, nothing, nothing)
        late = (stop - start)[order]
        return cls(
            low=low[begin].astype(np.int32),
            rank=high[begin].astype(np.int32),
            ahead=np.full(len(begin), NULL),
            least=np.maximum.reduceat(np.where(is_up, NO_LIMIT.min, -late), begin),
            most=np.minimum.reduceat(np.where(is_up, late, NO_LIMIT.max), begin),
            matches=np.diff(np.append(begin, len(order))),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts; requires at least one part."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def of_rows(self, chosen: Sequence[bool]) -> Self:
        """Select rows; `chosen` has a value for each."""
        rows = np.flatnonzero(chosen)
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))


def firsts(parts: Ints) -> Ints:
    """Return, for each column of sorted keys, the index of the first equal column."""
    count = parts.shape[1]
    new = np.ones(count, np.bool_)
    new[1:] = (parts[:, 1:] != parts[:, :-1]).any(axis=0)
    return np.maximum.accumulate(np.where(new, np.arange(count), 0))
