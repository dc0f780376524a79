"""Where the ranks of a job stand when it was dumped, and the verdict on it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastcomm.hang import rhythm
from fastcomm.hang.ages import Ages
from fastcomm.hang.calls import DumpedJob, RankCall
from fastcomm.hang.evidence import FileEvidence
from fastcomm.hang.waits import Stop, WaitGraph, retires
from fastcomm_kernels.arrays import NULL

MOST_QUOTED = 4  # lines of logs
ENQUEUED = "last_enqueued_collective"  # in the status of a group
DUMP_AGAIN = "so that a slow job may look like this: a second set of dumps decides"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One answer: `none`, or a kind of hang with its culprits."""

    kind: str
    culprits: tuple[int, ...] = ()
    stop: Stop | None = None
    waiting: tuple[int, ...] = ()
    confidence: str = "high"
    evidence: tuple[str, ...] = ()
    is_doubted: bool = False  # whether the ages that it stands on may be too long


@dataclass(kw_only=True)
class JobState:
    """Where the ranks of a job stand, for how long, and whom they wait for.

    `first_written` is the second of the first dump of any rank: all are of about one moment.
    `is_prompt` says whether some dump was written at once, as those without stacks are;
    `spread_s` by how many seconds some files are later behind the last calls than others;
    `has_stood` whether ranks were where they are in dumps long before, too;
    `holds_silent` whether ranks that no dump tells of hold others up.
    """

    job: DumpedJob
    evidence: FileEvidence
    first_written: int
    is_prompt: bool
    has_stood: bool = False
    spread_s: int = 0
    holds_silent: bool = True
    ages: Ages = field(init=False)
    waits: WaitGraph = field(init=False)

    def __post_init__(self) -> None:
        self.ages = Ages(
            job=self.job, first_written=self.first_written, is_prompt=self.is_prompt
        )
        ranks = self.job.ranks.values()
        is_over = not any(len(calls.open) for calls in ranks) and all(
            map(self.ages.is_old, ranks)
        )
        self.waits = WaitGraph(job=self.job, is_over=is_over, holds_silent=self.holds_silent)

    def goes_on(self, rank: int) -> bool:
        """Return whether a rank, or its training where threads are unknown, has just called.

        Then its training is the group that it calls most.
        """
        calls = self.job.ranks[rank]
        own = calls.calls
        if (own.thread != NULL).any():
            return not self.ages.is_old(calls)
        most = int(np.bincount(own.group).argmax())
        last = int(np.flatnonzero(own.group == most)[-1])
        return self.ages.is_young(calls.call(last))

    def passed(self) -> Iterator[RankCall]:
        """Yield the calls that are open for long, and that their ranks went on beside."""
        for rank, own in self.waits.fronts.items():
            old = [call for call in own if not self.ages.is_young(call)]
            if old and self.goes_on(rank):
                yield old[0]

    def is_dead(self) -> bool:
        """Return whether a rank died and left no dump: others died after theirs."""
        return any(rank in self.evidence.dead for rank in self.job.silent)

    @property
    def unrecorded(self) -> tuple[int, ...]:
        """Ranks whose dump has no call: their recorder was off."""
        return tuple(rank for rank, own in self.job.ranks.items() if not len(own.row))

    @property
    def first_open(self) -> int | None:
        """When the first call was made that a rank stands in; None where nothing tells."""
        fronts = self.waits.fronts.values()
        created = [call.created for own in fronts for call in own]
        return None if NULL in created else min(created, default=None)

    def age(self, rank: int) -> int | None:
        """Return for how many ns a rank has stood in its front; None where nothing tells."""
        front = self.waits.fronts.get(rank)
        return self.ages.age_of(front[0]) if front else None

    def calls_of(self, stop: Stop) -> dict[int, RankCall]:
        """Return the calls of a stop by the ranks that made it; of a message, by who waits."""
        if stop.number is None:
            return self.waits.stops.get(stop, {})
        calls = {}
        for rank in self.job.members.get(stop.group, ()):
            own = self.job.ranks.get(rank)
            at = own.place(stop.group, stop.number) if own else None
            if own is not None and at is not None:
                calls[rank] = own.call(at)
        return calls

    def stands_long(self, rank: int) -> bool:
        """Return whether a rank has nothing open, and made its last call long ago."""
        calls = self.job.ranks.get(rank)
        return rank not in self.waits.fronts and (calls is None or self.ages.is_old(calls))

    def old_collectives(self) -> Iterator[tuple[Stop, dict[int, RankCall]]]:
        """Yield the collectives in which some rank has stood for long, with their calls."""
        for stop, calls in self.waits.stops.items():
            is_old = any(not self.ages.is_young(call) for rank, call in calls.items())
            if stop.number is not None and is_old:
                yield stop, self.calls_of(stop)

    def held_up(self, *, has_dump: bool) -> list[int]:
        """Return the ranks that are waited for and stand in nothing, with or without a dump."""
        return sorted(
            {
                rank
                for own in self.waits.holders.values()
                for rank in own
                if (rank in self.job.ranks) == has_dump and rank not in self.waits.fronts
            }
        )

    def widest_held(self, rank: int) -> Stop | None:
        """Return a stop that waits for a rank: that with the most ranks in it."""
        stops = self.waits.holding([rank])
        return max(stops, key=lambda stop: len(self.waits.stops[stop]), default=None)

    def first_held(self, ranks: Sequence[int]) -> Stop | None:
        """Return the stop in which some ranks are waited for first: the cause of the others.

        It is what the first of them would call next, as far as its rhythm tells.
        """
        stops = self.waits.holding(ranks)
        calls = self.job.ranks.get(ranks[0])
        group = rhythm.next_group(calls) if calls else None
        own = [stop for stop in stops if stop.group is group and stop.number is not None]
        return min(own or stops, key=self.since, default=None)

    def since(self, stop: Stop) -> tuple[int, int]:
        """Return when the first rank came to a stop, and how many did not, to order stops."""
        calls = self.waits.stops[stop]
        created = (call.created for call in calls.values() if call.created != NULL)
        return min(created, default=1 << 62), -len(calls)

    def last_common(self) -> Stop | None:
        """Return the collective that most ranks called last, where they retire what failed."""
        last = Counter(
            Stop(group=call.group, number=call.number)
            for calls in self.job.ranks.values()
            if len(calls.row) and retires(calls)
            for call in [calls.call(len(calls.row) - 1)]
            if not call.is_message
        )
        return last.most_common(1)[0][0] if last else None

    def is_overwritten(self, stop: Stop) -> bool:
        """Return whether the ring of a rank may have overwritten the call that it stands in."""
        return any(self.job.ranks[rank].is_overwritten for rank in self.waits.stops[stop])

    def verdict(
        self,
        kind: str,
        culprits: Iterable[int],
        stop: Stop | None,
        *,
        confidence: str = "high",
    ) -> Verdict:
        """Return the verdict that some ranks hold others up, with those that wait for them."""
        ranks = tuple(sorted(culprits))
        waiting = self.waits.waiting(set(ranks), stop)
        is_open = any(rank in self.waits.fronts for rank in {*ranks} - self.waits.failed)
        if not waiting and not is_open:
            # Where nothing is open any more, all have failed for the same reason.
            waiting = sorted(self.job.ranks.keys() - set(ranks))
        return Verdict(
            kind=kind,
            culprits=ranks,
            stop=stop,
            waiting=tuple(waiting),
            confidence=confidence,
        )
