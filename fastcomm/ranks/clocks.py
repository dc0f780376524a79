"""Clock offsets between ranks, from collectives that end on all members at the same time.

On the host they do not: threads wait for a core. But no member ends before the last one starts,
so that each collective limits the offsets. So do messages: a receive cannot end before its send
starts, which matters where ranks have no collectives in common, as in pipelines. Broadcasts and
other collectives with a root end apart: they tell at most whether clocks can be equal.

The offset of a rank is its clock minus the clock of its reference rank, in ns: subtract it from
the rank's times to convert them. Ranks without a chain of common collectives to a reference
have no offset.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.trace.columns import block_lengths, block_starts, filled
from fastcomm.trace.schema import ENDS_TOGETHER
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL, Flags, Ints

# Collectives used per operation, group and iteration; more do not improve the estimate.
_MOST = 8
# Matched collectives used per group.
_SPREAD = 32
# An offset is applied from this number of matches on, if it exceeds FAR times its spread.
LEAST_MATCHES = 3
FAR = 10
# Ends of one collective differ by up to this, even on one clock.
LEAST_NS = 100_000
_NO_LIMIT = np.iinfo(np.int64)
_PAIR_BITS = 32
# Ends of collectives, a row per collective and rank. Rows that are equal in all columns but
# `rank` and `stop` are of one collective.
ENDS = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),  # hash of its ranks, else of its name
        pa.field("op", pa.int8(), nullable=False),
        pa.field("iteration", pa.int64(), nullable=False),  # its number; -1 if `place` is a seq
        # Its seq, or its index in its op, group and iteration.
        pa.field("place", pa.int64(), nullable=False),
        pa.field("stop", pa.int64(), nullable=False),
        pa.field("start", pa.int64()),  # of host runs; else null
    ]
)


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
        begin = block_starts(*(column[order] for column in key))
        first = np.repeat(begin, block_lengths(begin, len(order)))
        ranks, stop = rank[order].astype(np.int32), stop[order]
        others = np.flatnonzero(ranks != ranks[first])
        lowest = first[others]
        start = np.full(len(rank), NULL) if start is None else start[order]
        is_limited = (start[others] != NULL) & (start[lowest] != NULL)
        return cls(
            low=ranks[lowest],
            rank=ranks[others],
            ahead=stop[others] - stop[lowest],
            least=np.where(is_limited, start[others] - stop[lowest], _NO_LIMIT.min),
            most=np.where(is_limited, stop[others] - start[lowest], _NO_LIMIT.max),
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
        begin = block_starts(low, high)
        late = (stop - start)[order]
        return cls(
            low=low[begin].astype(np.int32),
            rank=high[begin].astype(np.int32),
            ahead=np.full(len(begin), NULL),
            least=np.maximum.reduceat(np.where(is_up, _NO_LIMIT.min, -late), begin),
            most=np.minimum.reduceat(np.where(is_up, late, _NO_LIMIT.max), begin),
            matches=block_lengths(begin, len(order)),
        )

    def of_equal_clocks(self) -> Self:
        """Return the rows as limits that equal clocks keep, or that nothing does.

        They have no differences of ends.
        """
        is_possible = (self.least <= 0) & (self.most >= 0)
        return replace(
            self,
            ahead=np.full(len(self.low), NULL),
            least=np.where(is_possible, self.least, 1),
            most=np.where(is_possible, self.most, -1),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts; requires at least one part."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def of_rows(self, chosen: Sequence[bool] | Flags) -> Self:
        """Select rows; `chosen` has a value for each."""
        rows = np.flatnonzero(chosen)
        return type(self)(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """Offset between the clock of a rank and the clock of its reference rank."""

    rank: int
    reference: int
    offset_ns: int
    spread_ns: int  # median deviation of the matches, summed over the chain to the reference
    matches: int  # number of matched collectives, the fewest along the chain
    is_limited: bool = False  # whether the offset is wrong by `spread_ns` at most

    @property
    def applies(self) -> bool:
        """Whether times are corrected by the offset.

        It must have `LEAST_MATCHES` matches, and exceed `LEAST_NS` and `FAR` times its spread
        (once its spread if it is limited).
        """
        least = self.spread_ns if self.is_limited else FAR * self.spread_ns
        is_far = abs(self.offset_ns) > max(least, LEAST_NS)
        return is_far and self.matches >= LEAST_MATCHES


def ends(trace: Trace) -> pa.Table:
    """Return the ends of one rank's collectives of known groups, inside iterations.

    Returns
    -------
    pyarrow.Table
        Schema `ENDS`, times in ns of the rank's clock; the first eight collectives of each
        operation, group and iteration. Empty if the trace has no times.

    """
    if "times" in trace.meta.missing_data:
        return ENDS.empty_table()
    comm = trace.comm.combine_chunks()
    label = pa.array(labels(trace.groups), pa.int64())
    group = label.take(comm["group"].combine_chunks())
    iteration = intervals.segment_of(
        comm["start"].to_numpy(),
        trace.iterations["start"].to_numpy(),
        trace.iterations["stop"].to_numpy(),
    )
    together = np.isin(comm["op"].to_numpy(), ENDS_TOGETHER)
    rows = np.flatnonzero(together & (iteration >= 0) & group.is_valid().to_numpy(False))
    group, comm, within = group.take(pa.array(rows)), comm.take(pa.array(rows)), iteration[rows]
    place = _places(group.to_numpy(), comm["op"].to_numpy(), within)
    seq = comm["seq"].combine_chunks()
    counted = seq.is_valid().to_numpy(False)
    number = trace.iterations["number"].to_numpy()[within]
    table = pa.table(
        {
            "rank": pa.array(np.full(len(rows), trace.meta.rank, np.int32)),
            "group": group,
            "op": comm["op"],
            "iteration": np.where(counted, -1, number),
            "place": np.where(counted, filled(seq, 0), place),
            "stop": comm["stop"],
            "start": comm["start"] if trace.meta.is_host_run else pa.nulls(len(rows)),
        }
    )
    return table.filter(pa.array(place < _MOST)).cast(ENDS)


def matched_end_offsets(
    rank: Ints, group: Ints, instance: Ints, stop: Ints, start: Ints | None = None
) -> EndOffsets:
    """Compare the ends of a sample of the matched collectives of each group.

    Each row is a member of a collective whose members end together (`schema.ENDS_TOGETHER`).

    Parameters
    ----------
    rank, group, instance
        Its rank, label of the group, and number of the collective.
    stop
        Its end, ns.
    start
        Its start, ns, of host runs only.

    """
    chosen = _sample(group, instance)
    began = None if start is None else start[chosen]
    return EndOffsets.of(rank[chosen], stop[chosen], instance[chosen], start=began)


def _sample(group: Ints, instance: Ints) -> Ints:
    """Return the rows of some collectives of each group, evenly spread."""
    number, first, place = np.unique(instance, return_index=True, return_inverse=True)
    groups = group[first]
    order = np.argsort(groups, kind="stable")
    _, begin, size = np.unique(groups[order], return_index=True, return_counts=True)
    within = np.arange(len(number)) - np.repeat(begin, size)
    chosen = np.zeros(len(number), np.bool_)
    chosen[order] = within % np.repeat(-(-size // _SPREAD), size) == 0
    return np.flatnonzero(chosen[place])


def offset_by_row(rank: Ints, offsets: Mapping[int, int]) -> Ints:
    """Return the clock offset of each row's rank in ns; `offsets` are by rank.

    Ranks that `offsets` does not have get 0.
    """
    ranks, place = np.unique(rank, return_inverse=True)
    return np.array([offsets.get(number, 0) for number in ranks.tolist()], np.int64)[place]


def labels(groups: pa.Table, *, by_description: bool = False) -> Iterator[int | None]:
    """Yield the label of each process group: a hash that is equal on all ranks.

    Groups with equal ranks (or, without ranks, equal name and size) have equal labels.

    Parameters
    ----------
    groups
        Schema `schema.GROUPS`.
    by_description
        Whether groups of equal ranks but different descriptions have different labels.

    Yields
    ------
    int or None
        64 bit, signed. None for a group of one rank, or without ranks and name.

    """
    for row in groups.select(["name", "ranks", "size", "description"]).to_pylist():
        identity = row["ranks"] or (row["name"] and (row["name"], row["size"]))
        if identity and by_description:
            identity = (identity, row["description"])
        if not identity or row["size"] == 1:
            yield None
        else:
            digest = blake2b(repr(identity).encode(), digest_size=8).digest()
            yield int.from_bytes(digest, "big", signed=True)


def _places(*key: NDArray[np.integer]) -> Ints:
    """Return the index of each row among the rows of equal keys."""
    order = np.lexsort(key[::-1])
    begin = block_starts(*(column[order] for column in key))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.repeat(begin, block_lengths(begin, len(order)))
    return place


def apart(ends: EndOffsets, offsets: Sequence[ClockOffset]) -> EndOffsets:
    """Return the rows of ranks whose offsets have no reference in common."""
    reference = {offset.rank: offset.reference for offset in offsets}
    return ends.of_rows(
        [
            low not in reference or reference[low] != reference.get(rank)
            for low, rank in zip(ends.low.tolist(), ends.rank.tolist(), strict=True)
        ]
    )


def clock_offsets(table: pa.Table) -> tuple[ClockOffset, ...]:
    """Return the clock offsets of ranks by the ends of their collectives, see `offsets`.

    `table` has the ends on all ranks, in any order, with schema `ENDS` (times in ns).
    """
    key = (table[name].to_numpy() for name in ("op", "iteration", "place", "group"))
    rank, stop = table["rank"].to_numpy(), table["stop"].to_numpy()
    return offsets(EndOffsets.of(rank, stop, *key, start=filled(table["start"])))


def offsets(ends: EndOffsets) -> tuple[ClockOffset, ...]:
    """Return the clock offset of each rank that shares collectives with other ranks.

    The reference of connected ranks is the lowest of them. Offsets are added up along the chain
    of ranks with the smallest sum of spreads.

    Returns
    -------
    tuple of ClockOffset
        Sorted by rank.

    """
    neighbors: dict[int, list[tuple[int, _Pair]]] = {}
    for pair in _pairs(ends):
        neighbors.setdefault(pair.low, []).append((1, pair))
        neighbors.setdefault(pair.high, []).append((-1, pair))
    by_rank: dict[int, ClockOffset] = {}
    for rank in sorted(neighbors):
        if rank not in by_rank:
            by_rank |= _offsets_from(rank, neighbors)
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def offsets_with_limits(
    ends: EndOffsets,
    limits: Sequence[Callable[[Mapping[int, int]], EndOffsets]],
    ranks: Collection[int],
) -> tuple[tuple[ClockOffset, ...], EndOffsets]:
    """Return clock offsets by collectives, and by limits where no collective connects ranks.

    Parameters
    ----------
    ends
        Ends of collectives.
    limits
        Each is called if those before do not connect all ranks, with offsets in ns by rank:
        returns what messages, or collectives with a root, say about offsets between ranks.
    ranks
        All ranks of the run.

    Returns
    -------
    offsets : tuple of ClockOffset
        Sorted by rank.
    unknown : EndOffsets
        Limits of ranks whose offset to each other remains unknown.

    """
    result, rows = offsets(ends), ends
    unknown = ends.of_rows(np.zeros(len(ends.low), np.bool_))
    for more in limits:
        is_connected = {offset.rank for offset in result} == set(ranks)
        if is_connected and len({offset.reference for offset in result}) == 1:
            break
        needed = apart(more({offset.rank: offset.offset_ns for offset in result}), result)
        rows, unknown = (EndOffsets.concatenate([old, needed]) for old in (rows, unknown))
        result = offsets(rows)
        unknown = apart(unknown, result)
    return result, unknown


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two ranks with common collectives: the clock of `high` minus that of `low`, in ns."""

    low: int
    high: int
    offset: int
    spread: int
    matches: int
    is_limited: bool


def _pairs(ends: EndOffsets) -> Iterator[_Pair]:
    """Yield every two ranks that have collectives in common, or messages in both directions.

    Of messages, the middle between their limits counts: the fastest of each direction take
    equally long, as far as known (the rule of NTP, RFC 5905).
    """
    order = np.lexsort((ends.ahead, ends.rank, ends.low))
    low, rank, ahead = ends.low[order], ends.rank[order], ends.ahead[order]
    begin = block_starts(low, rank)
    size = block_lengths(begin, len(order))
    # Medians, the lower of two: whole numbers, however large.
    middle = begin + (size - 1) // 2
    offset, pair = ahead[middle], np.repeat(np.arange(len(begin)), size)
    deviation = np.abs(ahead - offset[pair])
    spread = deviation[np.lexsort((deviation, pair))][middle]
    least = np.maximum.reduceat(ends.least[order], begin)
    most = np.minimum.reduceat(ends.most[order], begin)
    is_limited = (least > _NO_LIMIT.min) & (most < _NO_LIMIT.max) & (least <= most)
    least, most = np.where(is_limited, (least, most), 0)
    # Where equal clocks are possible, nothing speaks for others.
    within = np.where((least <= 0) & (most >= 0), 0, (least + most) // 2)
    offset = np.where(is_limited, within, offset)
    spread = np.where(is_limited, np.maximum(offset - least, most - offset), spread)
    matches = np.add.reduceat(ends.matches[order], begin)
    columns = (low[begin], rank[begin], offset, spread, matches, is_limited)
    is_known = (ahead[middle] != NULL) | is_limited
    yield from map(_Pair, *(column[is_known].tolist() for column in columns))


def _offsets_from(
    reference: int, neighbors: dict[int, list[tuple[int, _Pair]]]
) -> dict[int, ClockOffset]:
    """Return the clock offsets of the ranks connected to `reference`, by Dijkstra.

    `neighbors` has, by rank, the ranks with common collectives and the offset between each
    pair, in ns.

    SciPy's returns distances and predecessors alone: the sums along paths would follow in a
    second pass, and its import takes longer than this search of usual runs.
    """
    done: dict[int, ClockOffset] = {}
    start = ClockOffset(
        rank=reference,
        reference=reference,
        offset_ns=0,
        spread_ns=0,
        matches=1 << 62,
        is_limited=True,
    )
    waiting, best = [(0, 0, reference)], {reference: start}
    while waiting:
        _, steps, rank = heappop(waiting)
        if rank in done:
            continue
        current = done[rank] = best[rank]
        for sign, pair in neighbors[rank]:
            other = pair.high if sign > 0 else pair.low
            spread = current.spread_ns + pair.spread
            if other not in best or spread < best[other].spread_ns:
                best[other] = replace(
                    current,
                    rank=other,
                    offset_ns=current.offset_ns + sign * pair.offset,
                    spread_ns=spread,
                    matches=min(current.matches, pair.matches),
                    is_limited=current.is_limited and pair.is_limited,
                )
                heappush(waiting, (spread, steps + 1, other))
    most = max(offset.matches for offset in done.values() if offset is not start)
    return {**done, reference: replace(start, matches=most, is_limited=False)}
