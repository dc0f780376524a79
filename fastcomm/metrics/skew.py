"""Arrival skew, wait and transfer times of matched collectives and messages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.ranks.arrivals import CommunicationEvents, MatchedEvents
from fastcomm.trace.columns import alike, members, percentile, sums
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import OP, OPS
from fastcomm_kernels.arrays import NULL, Flags, Ints

NO_PAIR = (-1, -1)  # of collectives, which are no messages


@dataclass(frozen=True, slots=True)
class MatchedCollectives:
    """Matched collectives and messages: arrays with a value for each; times in ns."""

    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    power: NDArray[np.int8]  # of two, below the size of the largest member; -1 if unknown
    group: Ints  # label
    group_size: Ints
    bus_bytes: Ints  # of the member that moves the most; NULL if unknown
    members: NDArray[np.int32]  # number of matched members
    skew: Ints  # from the first to the last arrival
    transfer: Ints
    wait: Ints  # sum over members
    low: NDArray[np.int32]  # lower rank of a message; else as in NO_PAIR
    high: NDArray[np.int32]  # higher rank of a message

    @classmethod
    def of(cls, events: CommunicationEvents, matched: MatchedEvents) -> Self:
        """Compute the columns of matched collectives from the events of their members.

        Times are ns; a size is that of the largest member.
        """
        one = matched.row[matched.first]  # members agree in tag, operation and group
        is_message = events.op[one] == OP["SendRecv"]
        low, high = matched.smallest(events.rank), matched.largest(events.rank)
        return cls(
            tag=events.tag[one],
            op=events.op[one],
            power=_power(matched.largest(events.bytes)),
            group=events.group[one],
            group_size=events.group_size[one],
            bus_bytes=matched.largest(events.bus_bytes),
            members=matched.size.astype(np.int32),
            skew=matched.last_arrival - matched.start[matched.first],
            transfer=matched.transfer,
            wait=matched.total(matched.wait),
            low=np.where(is_message, low, NO_PAIR[0]).astype(np.int32),
            high=np.where(is_message, high, NO_PAIR[1]).astype(np.int32),
        )


def _power(count: Ints) -> NDArray[np.int8]:
    """Return the exponent of the power of two at or below each count; 0 for 0, -1 for NULL."""
    power = np.frexp(np.maximum(count, 1).astype(np.float64))[1] - 1
    return np.where(count == NULL, -1, power).astype(np.int8)


LABEL = 4  # row of `Transfers.keys` with the labels of groups


@dataclass(frozen=True, slots=True)
class Transfers:
    """Sums of transfers by class and group, which can be merged.

    Arrays have a value per class and group; *rated* are collectives of known sizes that move
    bytes.
    """

    keys: Ints  # rows: tag, op, power of two of the size, ranks of the group, label, pair
    counts: Ints
    took: Ints  # transfer time, ns
    rated: Ints  # number of rated collectives
    rated_moved: Ints  # bus bytes of the member that moves the most
    rated_took: Ints  # ns

    @classmethod
    def of(cls, collectives: MatchedCollectives) -> Self:
        """Sum up collectives by class and process group."""
        names = ("tag", "op", "power", "group_size", "group", "low", "high")
        columns = np.stack([getattr(collectives, name) for name in names])
        first, place = alike(*columns)
        is_rated = ((collectives.bus_bytes > 0) & (collectives.power >= 0)).astype(np.int64)
        rows = (
            np.ones(len(place), np.int64),
            collectives.transfer,
            is_rated,
            collectives.bus_bytes * is_rated,
            collectives.transfer * is_rated,
        )
        return cls(columns[:, first], *(sums(place, row, len(first)) for row in rows))

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Add up sums with equal keys; requires at least one part."""
        keys = np.concatenate([part.keys for part in parts], axis=1)
        first, place = alike(*keys)
        names = ("counts", "took", "rated", "rated_moved", "rated_took")
        rows = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(keys[:, first], *(sums(place, row, len(first)) for row in rows))

    def of_kind(self, tag: int, op: int) -> Flags:
        """Return which columns are of a tag and operation."""
        chosen: Flags = (self.keys[0] == tag) & (self.keys[1] == op)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """Arrival skew of matched collectives of one class; times in ns."""

    op: str
    tag: str
    size_from: int | None  # bytes, a power of two; sizes are below the next. Null if unknown
    count: int
    skew_mean_ns: float
    skew_p50_ns: float
    skew_p95_ns: float
    transfer_mean_ns: float
    transfer_p50_ns: float
    transfer_p95_ns: float
    wait_ns: float  # per step, sum over ranks
    wait_share: float | None  # of the time in these collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Waits of one rank in collectives of one tag; times in ns per step."""

    rank: int
    tag: str
    collectives: int  # matched, over all steps
    wait_ns: float
    transfer_ns: float
    last: int  # number of collectives at which this rank alone arrived last
    last_share: float  # of its collectives
    wait_caused_ns: float  # by arriving last in collectives, without messages
    later_ns: float  # lateness against the median of the others; clock drift cancels out
    # Time in which no compute runs, counted for the communication that ends first:
    exposed_wait_ns: float  # before the last arrival
    exposed_transfer_ns: float  # after it


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """Waits of one rank in collectives of all tags; times in ns per step."""

    rank: int
    wait_ns: float  # for others
    transfer_ns: float
    caused_ns: float  # between the last two arrivals, where this rank is the last
    later_ns: float  # lateness against the median of the others
    last: int  # number of collectives at which this rank alone arrived last
    collectives: int  # matched, over all steps

    @property
    def last_share(self) -> float:
        """Share of its collectives at which this rank alone was the last to arrive."""
        return self.last / self.collectives


@dataclass(frozen=True, slots=True)
class _Class:
    """Collectives of one class; times in ns."""

    skew: Ints  # per collective
    transfer: Ints  # per collective
    wait: int  # sum over members
    total: int  # waits and transfers, sum over members


Skews = Mapping[tuple[int, int, int], _Class]  # by tag, operation and power of two of the size


def skews(collectives: MatchedCollectives) -> Skews:
    """Group collectives by tag, operation and power of two of the size, for `skew`."""
    keys = np.stack([collectives.tag, collectives.op, collectives.power])
    first, place = alike(*keys)
    total = collectives.wait + collectives.transfer * collectives.members
    return {
        (tag, op, power): _Class(
            skew=collectives.skew[own],
            transfer=collectives.transfer[own],
            wait=int(collectives.wait[own].sum()),
            total=int(total[own].sum()),
        )
        for (tag, op, power), own in zip(
            keys[:, first].T.tolist(), members(place, len(first)), strict=True
        )
    }


def skew(parts: Sequence[Skews], steps: Mapping[int, float]) -> tuple[Skew, ...]:
    """Return a row per class of collectives, most wait time first.

    `steps` is the number of steps by tag; wait times are ns per step, all others ns per
    collective.
    """
    rows = []
    for tag, op, power in sorted(set().union(*parts)):
        own = [part[tag, op, power] for part in parts if (tag, op, power) in part]
        wait, total = sum(part.wait for part in own), sum(part.total for part in own)
        rows.append(
            Skew(
                op=OPS[op],
                tag=TAGS[tag],
                size_from=1 << power if power >= 0 else None,
                count=sum(len(part.skew) for part in own),
                **_spread("skew", np.concatenate([part.skew for part in own])),
                **_spread("transfer", np.concatenate([part.transfer for part in own])),
                wait_ns=wait / steps[tag],
                wait_share=wait / total if total > 0 else None,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.wait_ns, row.tag, row.op)))


_COUNTS = ("collectives", "last")
_SUMS = (
    *("collectives", "wait_ns", "transfer_ns", "last", "wait_caused_ns", "later_ns"),
    *("exposed_wait_ns", "exposed_transfer_ns"),
)


@dataclass(frozen=True, slots=True)
class WaitSums:
    """Sums over collectives by rank and tag, which can be merged."""

    keys: Ints  # rows: rank and tag
    sums: Ints  # rows: names of `_SUMS`

    @classmethod
    def of(cls, events: CommunicationEvents, matched: MatchedEvents) -> Self:
        """Sum up the waits of matched events by rank and tag, in ns."""
        keys = np.stack([events.rank[matched.row], events.tag[matched.row]])
        first, place = alike(*keys)
        is_last, caused = np.zeros((2, len(place)), np.int64)
        # Nobody causes a wait if several members arrive last at once.
        # Nor does the last one for the time in which its stream was busy: what it did before
        # passes a delay on.
        late = np.minimum(matched.wait_caused, events.since_free(matched.row[matched.last]))
        is_last[matched.last] = late > 0
        # Pipeline messages pass delays on: a rank may send late because it received late.
        is_message = events.op[matched.row[matched.last]] == OP["SendRecv"]
        caused[matched.last] = np.where(is_message, 0, late)
        wait, transfer = matched.wait, np.repeat(matched.transfer, matched.size)
        duration = events.stop[matched.row] - events.start[matched.row]
        columns = (
            np.ones(len(place), np.int64),
            wait,
            transfer,
            is_last,
            caused,
            matched.lateness,
            *events.exposed_until(matched.row, np.minimum(wait, duration)),
        )
        return cls(
            keys[:, first], np.stack([sums(place, column, len(first)) for column in columns])
        )

    def by_name(self, name: str) -> Ints:
        """Return one of the sums, by rank and tag."""
        own: Ints = self.sums[_SUMS.index(name)]
        return own

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Add up sums with equal keys; requires at least one part."""
        keys = np.concatenate([part.keys for part in parts], axis=1)
        first, place = alike(*keys)
        rows = np.concatenate([part.sums for part in parts], axis=1)
        return cls(keys[:, first], np.stack([sums(place, row, len(first)) for row in rows]))


def waits(totals: WaitSums, steps: Callable[[int, int], float]) -> tuple[Wait, ...]:
    """Return a row per rank and tag, sorted; times are ns, means over steps.

    `steps` returns the number of steps of a rank and tag.
    """
    rows = []
    for (rank, tag), row in zip(totals.keys.T.tolist(), totals.sums.T.tolist(), strict=True):
        sums_ = dict(zip(_SUMS, row, strict=True))
        count = steps(rank, tag)
        means = {name: sums_[name] / count for name in _SUMS if name not in _COUNTS}
        counts = {name: sums_[name] for name in _COUNTS}
        share = sums_["last"] / sums_["collectives"]
        rows.append(Wait(rank=rank, tag=TAGS[tag], last_share=share, **counts, **means))
    return tuple(rows)


def over_tags(waits: Iterable[Wait]) -> tuple[RankWaits, ...]:
    """Sum up waits by rank; the rank that causes the longest wait comes first."""
    by_rank: dict[int, list[Wait]] = {}
    for row in waits:
        by_rank.setdefault(row.rank, []).append(row)
    rank_waits = (
        RankWaits(
            rank=rank,
            wait_ns=sum(row.wait_ns for row in rows),
            transfer_ns=sum(row.transfer_ns for row in rows),
            caused_ns=sum(row.wait_caused_ns for row in rows),
            later_ns=sum(row.later_ns for row in rows),
            last=sum(row.last for row in rows),
            collectives=sum(row.collectives for row in rows),
        )
        for rank, rows in by_rank.items()
    )
    return tuple(sorted(rank_waits, key=lambda row: (-row.caused_ns, row.rank)))


def _spread(name: str, values: Ints) -> dict[str, float]:
    """Return mean, median and 95th percentile of times in ns, in columns NAME_*_ns."""
    return {
        f"{name}_mean_ns": int(values.sum()) / len(values),
        f"{name}_p50_ns": percentile(values, 50),
        f"{name}_p95_ns": percentile(values, 95),
    }
