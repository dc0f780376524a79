"""Numbers of steps by which sums of ranks are divided, also where ranks recorded others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from fastcomm.metrics.skew import WaitSums
from fastcomm.ranks.arrivals import CommunicationEvents, MatchedEvents
from fastcomm.trace.columns import alike
from fastcomm_kernels.arrays import Flags, Floats, Ints


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Numbers of steps of a run, and of each rank that has some."""

    steps: int  # distinct numbers over all ranks
    ranks: Ints  # with steps, ascending
    own: Ints  # steps of each of `ranks`

    @classmethod
    def of(cls, iterations: pa.Table) -> Self:
        """Count the numbered steps in the table of iterations."""
        iterations = iterations.filter(iterations["iteration"].is_valid())
        ranks, own = np.unique(iterations["rank"].to_numpy(), return_counts=True)
        return cls(len(np.unique(iterations["iteration"].to_numpy())), ranks, own)

    @property
    def is_even(self) -> bool:
        """Whether every rank with steps has all of them."""
        return bool((self.own == self.steps).all())

    def of_ranks(self, rank: Ints) -> Ints:
        """Return the number of steps of each of some ranks; of all for one without steps."""
        if not len(self.ranks):
            return np.full(len(rank), max(1, self.steps))
        place = np.searchsorted(self.ranks, rank).clip(max=len(self.ranks) - 1)
        return np.where(self.ranks[place] == rank, self.own[place], max(1, self.steps))

    def per_step(self, rank: Ints, total: Ints | Floats) -> Floats:
        """Return sums of ranks per step of each."""
        per_step: Floats = total / self.of_ranks(rank)
        return per_step


class MatchedSteps(NamedTuple):
    """Steps in which communication can be matched across ranks, and whether some of it is."""

    keys: Ints  # rows: rank, tag, number of the step
    is_matched: Flags

    @classmethod
    def of(cls, events: CommunicationEvents, matched: MatchedEvents) -> Self:
        """Collect the steps of some communication."""
        rows = np.concatenate([events.collectives, events.messages])
        columns = (events.rank, events.tag, events.iteration)
        keys = np.stack([column[rows] for column in columns]).astype(np.int64)
        is_matched = np.zeros(len(events.rank), np.bool_)
        is_matched[matched.row] = True
        return cls.merge([cls(keys, is_matched[rows])])

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Unite the steps of all communication; requires at least one part."""
        keys = np.concatenate([part.keys for part in parts], axis=1)
        is_matched = np.concatenate([part.is_matched for part in parts])
        first, place = alike(*keys)
        return cls(keys[:, first], np.bincount(place, is_matched, len(first)) > 0)


@dataclass(frozen=True, slots=True)
class ComparedSteps:
    """Numbers of steps that times of matched communication refer to.

    If ranks have different steps, only those count that can be compared: of the steps of a
    rank, the share with matched communication of a parallelism among those that have any.
    """

    steps: int
    by_key: Mapping[tuple[int, int], float] = field(default_factory=dict)  # by rank and tag

    @classmethod
    def of(cls, counts: StepCounts, matched: MatchedSteps | None) -> Self:
        """Return the numbers; `matched` is None if all ranks have the same steps."""
        steps = max(1, counts.steps)
        if matched is None:
            return cls(steps)
        rank, tag, _ = matched.keys
        first, place = alike(rank, tag)
        share = np.bincount(place, matched.is_matched, len(first)) / np.bincount(place)
        compared = share * counts.of_ranks(rank[first])
        keys = zip(rank[first].tolist(), tag[first].tolist(), strict=True)
        return cls(steps, {key: n for key, n in zip(keys, compared.tolist(), strict=True) if n})

    def of_rank(self, rank: int, tag: int) -> float:
        """Return the number of steps of a rank that count for a tag."""
        return self.by_key.get((rank, tag), self.steps)

    def of_ranks(self, ranks: Iterable[int], tag: int) -> float:
        """Return the mean number of steps of some ranks, at least one."""
        return float(np.mean([self.of_rank(rank, tag) for rank in ranks]))

    def by_tag(self, totals: WaitSums) -> dict[int, float]:
        """Return the divisor of a sum of waits over ranks, by tag; `totals` are by rank."""
        if not self.by_key:
            return dict.fromkeys(totals.keys[1].tolist(), self.steps)
        sums: dict[int, tuple[float, float]] = {}
        waits = totals.by_name("wait_ns").tolist()
        for rank, tag, wait in zip(*totals.keys.tolist(), waits, strict=True):
            whole, mean = sums.get(tag, (0.0, 0.0))
            sums[tag] = whole + wait, mean + wait / self.of_rank(rank, tag)
        return {tag: whole / mean if mean else 1.0 for tag, (whole, mean) in sums.items()}
