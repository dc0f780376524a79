"""Arrival skew, wait and transfer times of matched collectives and messages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.exchange.arrivals import CommunicationEvents, MatchedEvents
from fastcomm.trace.columns import classes, members, sums
from fastcomm.trace.schema import OP, OPS, TAGS
from fastcomm_kernels.arrays import NULL, Flags, Ints

NO_PAIR = (-1, -1)  # of what is no message


@dataclass(frozen=True, slots=True)
class MatchedCollectives:
    """A row a collective or message that several ranks were matched in; times in ns."""

    tag: NDArray[np.int8]
    op: NDArray[np.int8]
    power: NDArray[np.int8]  # of two, below the size of the largest member; -1 if unknown
    group: Ints  # label
    group_size: Ints
    bus_bytes: Ints  # of the member that moves the most; NULL
    members: NDArray[np.int32]  # that were matched
    skew: Ints  # last arrival - first
    transfer: Ints
    wait: Ints  # of all members together
    low: NDArray[np.int32]  # the lower rank of a message; as in NO_PAIR
    high: NDArray[np.int32]  # the other

    @classmethod
    def of(cls, events: CommunicationEvents, meetings: MatchedEvents) -> Self:
        """Those that were met in."""
        one = meetings.row[meetings.first]  # stands for all of them
        is_message = events.op[one] == OP["SendRecv"]
        low, high = meetings.smallest(events.rank), meetings.largest(events.rank)
        return cls(
            tag=events.tag[one],
            op=events.op[one],
            power=_power(meetings.largest(events.bytes)),
            group=events.group[one],
            group_size=events.group_size[one],
            bus_bytes=meetings.largest(events.bus_bytes),
            members=meetings.size.astype(np.int32),
            skew=meetings.arrived - meetings.start[meetings.first],
            transfer=meetings.transfer,
            wait=meetings.total(meetings.wait),
            low=np.where(is_message, low, NO_PAIR[0]).astype(np.int32),
            high=np.where(is_message, high, NO_PAIR[1]).astype(np.int32),
        )


def _power(count: Ints) -> NDArray[np.int8]:
    power = np.frexp(np.maximum(count, 1).astype(np.float64))[1] - 1
    return np.where(count == NULL, -1, power).astype(np.int8)


LABEL = 4  # the row of `keys` that has the groups


@dataclass(frozen=True, slots=True)
class Transfers:
    """Sums by class and group, which add up over collectives; columns go together."""

    keys: Ints  # rows: tag, op, power of two of the size, ranks of the group, label, pair
    counts: Ints
    took: Ints  # ns
    rated: Ints  # how many are of known sizes, and move anything
    rated_moved: Ints  # bytes, of the member of each that moves the most
    rated_took: Ints

    @classmethod
    def of(cls, all_: MatchedCollectives) -> Self:
        """Those of some collectives."""
        columns = (all_.tag, all_.op, all_.power, all_.group_size, all_.group)
        keys, place = classes(*columns, all_.low, all_.high)
        is_rated = ((all_.bus_bytes > 0) & (all_.power >= 0)).astype(np.int64)
        rows = (
            np.ones(len(place), np.int64),
            all_.transfer,
            is_rated,
            all_.bus_bytes * is_rated,
            all_.transfer * is_rated,
        )
        return cls(keys, *(sums(place, row, keys.shape[1]) for row in rows))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of all, by their keys."""
        keys, place = classes(*np.concatenate([part.keys for part in parts], axis=1))
        names = ("counts", "took", "rated", "rated_moved", "rated_took")
        rows = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(keys, *(sums(place, row, keys.shape[1]) for row in rows))

    def of_kind(self, tag: int, op: int) -> Flags:
        """Which are of one tag and operation."""
        chosen: Flags = (self.keys[0] == tag) & (self.keys[1] == op)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """Collectives of one class, over those that several ranks were matched in; times in ns."""

    op: str
    tag: str
    size_from: int | None  # a power of two: bytes from it up to the next; null where unknown
    count: int
    skew_mean_ns: float
    skew_p50_ns: float
    skew_p95_ns: float
    transfer_mean_ns: float
    transfer_p50_ns: float
    transfer_p95_ns: float
    wait_ns: float  # of all ranks together, a step
    wait_share: float | None  # of the time in these collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One rank in the collectives of one tag; times in ns, a step."""

    rank: int
    tag: str
    collectives: int  # matched, in all
    wait_ns: float
    transfer_ns: float
    last: int  # how often this rank was the last to come
    last_share: float  # of its collectives
    wait_caused_ns: float  # by arriving last in collectives; messages are left out
    later_ns: float  # how much later than the median of the others it comes; drift cancels out
    # Of the time directly before the end in which neither compute nor other communication runs:
    exposed_wait_ns: float  # before the last arrival
    exposed_transfer_ns: float  # from there on


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """One rank in the collectives of all parallelisms; times in ns, a step."""

    rank: int
    wait_ns: float  # for others
    transfer_ns: float
    caused_ns: float  # last arrival - the one before it, where this rank is the last
    later_ns: float  # than the median of the others
    last: int  # how often this rank alone was the last to arrive
    collectives: int  # matched, in all

    @property
    def last_share(self) -> float:
        """Share of its collectives at which this rank alone was the last to arrive."""
        return self.last / self.collectives


@dataclass(frozen=True, slots=True)
class _Class:
    """Some collectives of one class; times in ns."""

    skew: Ints  # of each
    transfer: Ints
    wait: int  # of all members of all
    there: int  # the same, and the transfers


Skews = Mapping[tuple[int, int, int], _Class]  # by tag, operation and power of two of the size


def skews(collectives: MatchedCollectives) -> Skews:
    """What `skew` needs of some collectives."""
    keys, place = classes(collectives.tag, collectives.op, collectives.power)
    there = collectives.wait + collectives.transfer * collectives.members
    return {
        (tag, op, power): _Class(
            skew=collectives.skew[own],
            transfer=collectives.transfer[own],
            wait=int(collectives.wait[own].sum()),
            there=int(there[own].sum()),
        )
        for (tag, op, power), own in zip(
            keys.T.tolist(), members(place, keys.shape[1]), strict=True
        )
    }


def skew(parts: Sequence[Skews], steps: int) -> tuple[Skew, ...]:
    """A row a class of collectives, those that cost the most waiting first."""
    found = []
    for tag, op, power in sorted(set().union(*parts)):
        own = [part[tag, op, power] for part in parts if (tag, op, power) in part]
        wait, there = sum(each.wait for each in own), sum(each.there for each in own)
        found.append(
            Skew(
                op=OPS[op],
                tag=TAGS[tag],
                size_from=1 << power if power >= 0 else None,
                count=sum(len(each.skew) for each in own),
                **_spread("skew", np.concatenate([each.skew for each in own])),
                **_spread("transfer", np.concatenate([each.transfer for each in own])),
                wait_ns=wait / steps,
                wait_share=wait / there if there > 0 else None,
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.wait_ns, each.tag, each.op)))


_COUNTS = ("collectives", "last")
_SUMS = (
    *("collectives", "wait_ns", "transfer_ns", "last", "wait_caused_ns", "later_ns"),
    *("exposed_wait_ns", "exposed_transfer_ns"),
)


@dataclass(frozen=True, slots=True)
class WaitSums:
    """Sums over the collectives of a rank and tag, which add up over groups of collectives."""

    keys: Ints  # rank and tag
    sums: Ints  # a row a name of `_SUMS`

    @classmethod
    def of(cls, events: CommunicationEvents, meetings: MatchedEvents) -> Self:
        """Those of some collectives."""
        keys, place = classes(events.rank[meetings.row], events.tag[meetings.row])
        is_last, caused = np.zeros((2, len(place)), np.int64)
        # Where several arrive last at once, nobody causes a wait.
        late = meetings.held_up
        is_last[meetings.last] = late > 0
        # Messages of a pipeline hand lateness on: who sends late may have received late.
        is_message = events.op[meetings.row[meetings.last]] == OP["SendRecv"]
        caused[meetings.last] = np.where(is_message, 0, late)
        wait, transfer = meetings.wait, np.repeat(meetings.transfer, meetings.size)
        columns = (
            np.ones(len(place), np.int64),
            wait,
            transfer,
            is_last,
            caused,
            meetings.later,
            *_exposed(events.alone[meetings.row], wait, transfer),
        )
        return cls(keys, np.stack([sums(place, each, keys.shape[1]) for each in columns]))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Those of all collectives."""
        keys, place = classes(*np.concatenate([part.keys for part in parts], axis=1))
        rows = np.concatenate([part.sums for part in parts], axis=1)
        return cls(keys, np.stack([sums(place, row, keys.shape[1]) for row in rows]))


def waits(summed: WaitSums, steps: int) -> tuple[Wait, ...]:
    """Return a row a rank and tag, in their order."""
    found = []
    for (rank, tag), row in zip(summed.keys.T.tolist(), summed.sums.T.tolist(), strict=True):
        sums_ = dict(zip(_SUMS, row, strict=True))
        means = {name: sums_[name] / steps for name in _SUMS if name not in _COUNTS}
        counts = {name: sums_[name] for name in _COUNTS}
        share = sums_["last"] / sums_["collectives"]
        found.append(Wait(rank=rank, tag=TAGS[tag], last_share=share, **counts, **means))
    return tuple(found)


def over_tags(waits: Iterable[Wait]) -> tuple[RankWaits, ...]:
    """Sum up waits by rank; the rank that others wait for the longest comes first."""
    by_rank: dict[int, list[Wait]] = {}
    for each in waits:
        by_rank.setdefault(each.rank, []).append(each)
    found = (
        RankWaits(
            rank=rank,
            wait_ns=sum(each.wait_ns for each in own),
            transfer_ns=sum(each.transfer_ns for each in own),
            caused_ns=sum(each.wait_caused_ns for each in own),
            later_ns=sum(each.later_ns for each in own),
            last=sum(each.last for each in own),
            collectives=sum(each.collectives for each in own),
        )
        for rank, own in by_rank.items()
    )
    return tuple(sorted(found, key=lambda each: (-each.caused_ns, each.rank)))


def _exposed(alone: Ints, wait: Ints, transfer: Ints) -> tuple[Ints, Ints]:
    """Divide the exposed end of each event at the last arrival: waiting, and transfer."""
    alone, transfer = np.maximum(alone, 0), np.maximum(transfer, 0)
    return np.clip(alone - transfer, 0, wait), np.minimum(alone, transfer)


def _spread(name: str, values: Ints) -> dict[str, float]:
    return {
        f"{name}_mean_ns": int(values.sum()) / len(values),
        f"{name}_p50_ns": float(np.percentile(values, 50)),
        f"{name}_p95_ns": float(np.percentile(values, 95)),
    }
