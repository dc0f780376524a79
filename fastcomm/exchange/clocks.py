"""How far the clocks of ranks are apart: all members leave a collective at the same time.

An offset is that of a rank's clock less that of its reference: taken from the rank's times, it
makes them the reference's. Ranks that no collective joins, directly or through others, have
nothing to be compared by.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.trace.columns import filled
from fastcomm.trace.schema import ENDS_TOGETHER, numbers
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints

# Of one operation in one group and iteration: more of them say nothing new.
_MOST = 8
# And of matched ones so many of one group.
_SPREAD = 32
# An offset applies from so many matches on, and if it is so many times its spread.
LEAST_MATCHES = 3
FAR = 10
# Below this the ends of a collective differ by themselves.
LEAST_NS = 100_000

# The ends of collectives, a row a collective and rank. Equal in all but `rank` and `stop`: one
# collective.
ENDS = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),  # stands for its ranks, else its name
        pa.field("op", pa.int8(), nullable=False),
        pa.field("iteration", pa.int64(), nullable=False),  # its number; -1: `place` is a seq
        pa.field("place", pa.int64(), nullable=False),  # seq, or the how-manieth of its op
        pa.field("stop", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a rank's clock is ahead of that of `reference`, and what says so."""

    rank: int
    reference: int
    offset_ns: int
    spread_ns: int  # median deviation of the matches, summed on the way to the reference
    matches: int  # the fewest on the way

    @property
    def applies(self) -> bool:
        """Whether the offset is so far above its spread that times are better with it."""
        far = abs(self.offset_ns) > max(FAR * self.spread_ns, LEAST_NS)
        return far and self.matches >= LEAST_MATCHES


def ends(trace: Trace) -> pa.Table:
    """The ends of one rank's collectives whose group is known, inside of iterations."""
    if "times" in trace.meta.lacks:
        return ENDS.empty_table()
    comm = trace.comm.combine_chunks()
    label = pa.array(labels(trace.groups), pa.int64())
    group = label.take(comm["group"].combine_chunks())
    iteration = intervals.segment_of(
        comm["start"].to_numpy(),
        trace.iterations["start"].to_numpy(),
        trace.iterations["stop"].to_numpy(),
    )
    together = np.isin(comm["op"].to_numpy(), numbers(ENDS_TOGETHER))
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
        }
    )
    return table.filter(pa.array(place < _MOST)).cast(ENDS)


@dataclass(frozen=True, slots=True)
class Apart:
    """A member of a collective a row, beside the lowest rank that is in it."""

    low: NDArray[np.int32]
    rank: NDArray[np.int32]
    ahead: Ints  # ns that its end is behind that of the lowest

    @classmethod
    def of(cls, rank: Ints, stop: Ints, *key: NDArray[np.integer]) -> Self:
        """Compare ends; those of one collective have the same key."""
        order = np.lexsort((rank, *key))
        first = _firsts(np.stack(key)[:, order])
        ranks, stop = rank[order].astype(np.int32), stop[order]
        others = np.flatnonzero(ranks != ranks[first])
        lowest = first[others]
        return cls(ranks[lowest], ranks[others], stop[others] - stop[lowest])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of several."""
        return cls(
            np.concatenate([part.low for part in parts]),
            np.concatenate([part.rank for part in parts]),
            np.concatenate([part.ahead for part in parts]),
        )


def offsets_of(rank: Ints, group: Ints, instance: Ints, stop: Ints) -> tuple[ClockOffset, ...]:
    """The offsets that collectives tell which are matched: a row an end, `instance` whose."""
    return offsets(matched_apart(rank, group, instance, stop))


def matched_apart(rank: Ints, group: Ints, instance: Ints, stop: Ints) -> Apart:
    """The ends of collectives that are matched, a row an end, `instance` whose.

    Only operations of ENDS_TOGETHER tell of clocks. Of those of a group a few are enough.
    """
    chosen = _sample(group, instance)
    return Apart.of(rank[chosen], stop[chosen], instance[chosen])


def _sample(group: Ints, instance: Ints) -> Ints:
    """The rows of some of the instances of each group, evenly spread."""
    number, first, place = np.unique(instance, return_index=True, return_inverse=True)
    of_each = group[first]
    order = np.argsort(of_each, kind="stable")
    _, begin, size = np.unique(of_each[order], return_index=True, return_counts=True)
    within = np.arange(len(number)) - np.repeat(begin, size)
    chosen = np.zeros(len(number), np.bool_)
    chosen[order] = within % np.repeat(-(-size // _SPREAD), size) == 0
    return np.flatnonzero(chosen[place])


def by_rank(rank: Ints, offsets: Mapping[int, int]) -> Ints:
    """Of each row the offset of its rank's clock; 0 where nothing tells."""
    ranks, place = np.unique(rank, return_inverse=True)
    return np.array([offsets.get(each, 0) for each in ranks.tolist()], np.int64)[place]


def labels(groups: pa.Table, *, described: bool = False) -> Iterator[int | None]:
    """A number for each group, the same on every rank; None for a group of one.

    Groups of the same ranks have the same, unless it counts how they are `described`, too.
    """
    for row in groups.select(["name", "ranks", "size", "description"]).to_pylist():
        said = row["ranks"] or (row["name"] and (row["name"], row["size"]))
        if said and described:
            said = (said, row["description"])
        if not said or row["size"] == 1:
            yield None
        else:
            digest = blake2b(repr(said).encode(), digest_size=8).digest()
            yield int.from_bytes(digest, "big", signed=True)


def _places(group: Ints, op: NDArray[np.int8], iteration: NDArray[np.int32]) -> Ints:
    """The how-manieth each row is of those of its group, operation and iteration."""
    keys = np.lexsort((iteration, op, group))
    parts = np.stack([group[keys], op[keys], iteration[keys]])
    place = np.empty(len(keys), np.int64)
    place[keys] = np.arange(len(keys)) - _firsts(parts)
    return place


def _firsts(parts: Ints) -> Ints:
    """For each column of sorted keys the place of the first that is equal to it."""
    count = parts.shape[1]
    new = np.ones(count, np.bool_)
    new[1:] = (parts[:, 1:] != parts[:, :-1]).any(axis=0)
    return np.maximum.accumulate(np.where(new, np.arange(count), 0))


def clock_offsets(table: pa.Table) -> tuple[ClockOffset, ...]:
    """The same of ENDS of all ranks."""
    key = (table[name].to_numpy() for name in ("op", "iteration", "place", "group"))
    return offsets(Apart.of(table["rank"].to_numpy(), table["stop"].to_numpy(), *key))


def offsets(apart: Apart) -> tuple[ClockOffset, ...]:
    """The offset of each rank that others can be compared with, by rank.

    The lowest rank of those that are joined is their reference. From rank to rank leads the way
    of the least spread.
    """
    neighbours: dict[int, list[tuple[int, _Pair]]] = {}
    for pair in _pairs(apart):
        neighbours.setdefault(pair.low, []).append((1, pair))
        neighbours.setdefault(pair.high, []).append((-1, pair))
    found: dict[int, ClockOffset] = {}
    for rank in sorted(neighbours):
        if rank not in found:
            found |= _reached(rank, neighbours)
    return tuple(found[rank] for rank in sorted(found))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two ranks that met: how far the clock of `high` is ahead of that of `low`."""

    low: int
    high: int
    offset: int
    spread: int
    matches: int


def _pairs(apart: Apart) -> Iterator[_Pair]:
    """Each two ranks, over all their collectives."""
    order = np.lexsort((apart.ahead, apart.rank, apart.low))
    low, rank, ahead = apart.low[order], apart.rank[order], apart.ahead[order]
    begin = np.flatnonzero(_firsts(np.stack([low, rank])) == np.arange(len(order)))
    size = np.diff(np.append(begin, len(order)))
    # Medians, the lower of two: whole numbers, however large.
    middle = begin + (size - 1) // 2
    offset, pair = ahead[middle], np.repeat(np.arange(len(begin)), size)
    off = np.abs(ahead - offset[pair])
    spread = off[np.lexsort((off, pair))][middle]
    found = (low[begin], rank[begin], offset, spread, size)
    yield from map(_Pair, *(column.tolist() for column in found))


def _reached(
    reference: int, neighbours: dict[int, list[tuple[int, _Pair]]]
) -> dict[int, ClockOffset]:
    """The offsets of all ranks that a way leads to."""
    found: dict[int, ClockOffset] = {}
    start = ClockOffset(
        rank=reference, reference=reference, offset_ns=0, spread_ns=0, matches=1 << 62
    )
    waiting = [(0, 0, reference)]
    best = {reference: start}
    while waiting:
        _, steps, rank = heappop(waiting)
        if rank in found:
            continue
        here = found[rank] = best[rank]
        for sign, pair in neighbours[rank]:
            other = pair.high if sign > 0 else pair.low
            spread = here.spread_ns + pair.spread
            if other not in best or spread < best[other].spread_ns:
                best[other] = ClockOffset(
                    rank=other,
                    reference=reference,
                    offset_ns=here.offset_ns + sign * pair.offset,
                    spread_ns=spread,
                    matches=min(here.matches, pair.matches),
                )
                heappush(waiting, (spread, steps + 1, other))
    most = max(each.matches for each in found.values() if each is not start)
    return {**found, reference: replace(start, matches=most)}
