"""Arrival skew and transfer apart: who waits in a collective for how long, and who is last.

Of a collective that several ranks were matched in, with times on one clock:

    wait(r)  = last arrival - own arrival        skew = last arrival - first arrival
    transfer = end - last arrival, where the end is the median of its members' ends
    wait caused by the last rank = last arrival - the arrival before it

Without clocks that agree none of this can be told.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.calls import Events
from fastcomm.metrics.classes import classes, members, sums
from fastcomm.metrics.collectives import Collectives
from fastcomm.metrics.meetings import Meetings
from fastcomm.trace.schema import OP, OPS, TAGS

Ints = NDArray[np.int64]


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
class WaitCaused:
    """One rank over all parallelisms: how long others wait for it; times in ns, a step."""

    rank: int
    caused_ns: float  # last arrival - the one before it, where this rank is the last
    last: int  # how often this rank alone was the last to arrive
    collectives: int  # matched, in all
    wait_ns: float  # that this rank waits for others


@dataclass(frozen=True, slots=True)
class _Class:
    """Some collectives of one class; times in ns."""

    skew: Ints  # of each
    transfer: Ints
    wait: int  # of all members of all
    there: int  # the same, and the transfers


Skews = Mapping[tuple[int, int, int], _Class]  # by tag, operation and power of two of the size


def skews(collectives: Collectives) -> Skews:
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


@dataclass(frozen=True, slots=True)
class WaitSums:
    """Sums over the collectives of a rank and tag, which add up over groups of collectives."""

    keys: Ints  # rank and tag
    # A row each: collectives, wait, transfer, last, wait caused, later, exposed wait, exposed
    # transfer.
    sums: Ints

    @classmethod
    def of(cls, events: Events, meetings: Meetings) -> Self:
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
    """A row a rank and tag, in their order."""
    return tuple(
        Wait(
            rank=rank_,
            tag=TAGS[tag_],
            collectives=count,
            wait_ns=wait / steps,
            transfer_ns=transfer / steps,
            last=last,
            last_share=last / count,
            wait_caused_ns=caused / steps,
            later_ns=later / steps,
            exposed_wait_ns=exposed_wait / steps,
            exposed_transfer_ns=exposed_transfer / steps,
        )
        for (
            (rank_, tag_),
            count,
            wait,
            transfer,
            last,
            caused,
            later,
            exposed_wait,
            exposed_transfer,
        ) in zip(summed.keys.T.tolist(), *summed.sums.tolist(), strict=True)
    )


def over_tags(waits: Iterable[Wait]) -> tuple[WaitCaused, ...]:
    """Sum up waits by rank, in the order of ranks."""
    by_rank: dict[int, list[Wait]] = {}
    for each in waits:
        by_rank.setdefault(each.rank, []).append(each)
    return tuple(
        WaitCaused(
            rank=rank,
            caused_ns=sum(each.wait_caused_ns for each in own),
            last=sum(each.last for each in own),
            collectives=sum(each.collectives for each in own),
            wait_ns=sum(each.wait_ns for each in own),
        )
        for rank, own in sorted(by_rank.items())
    )


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
