"""Arrival skew and transfer apart: who waits in a collective for how long, and who is last.

Of a collective that several ranks were matched in, with times on one clock:

    wait(r)  = last arrival - own arrival        skew = last arrival - first arrival
    transfer = end - last arrival, where the end is the median of its members' ends
    held up  = last arrival - the one before it, which the last rank costs the others

Without clocks that agree none of this can be told.
"""

from dataclasses import dataclass


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
    held_up_ns: float  # what the others would have come earlier by, had it not been last
    later_ns: float  # how much later than the median of the others it comes; drift cancels out


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """How much of the communication was matched across ranks."""

    events: int  # that can be matched: of known groups of several ranks, and no messages
    matched: int
    share: float | None
    dropped: int  # of a group whose events could not be brought in line
    messages: int  # SendRecv: the traces do not say which two belong together
