"""Measure the ranks of a run alike: on one clock, and with one parallelism for each group.

A rank alone cannot know whether all others have launches recorded, and what they call a group.
Most often they do, and call it the same; where not, the ranks are measured once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self, TypeVar

from fastcomm.executors.executor import OpenedRun, Task
from fastcomm.metrics.partial import (
    Partial,
    divided_tags,
    merge,
    spill,
    without_device_clock,
)
from fastcomm.ranks.group_tags import GroupTags
from fastcomm.trace.run_traces import ParallelMap, SkippedRank
from fastcomm.trace.trace import Trace

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Clock and parallelisms that only all ranks together tell, and all are measured by."""

    by_host: tuple[int, ...] = ()  # ranks that force all iterations to be by the host's marks
    group_tags: GroupTags = field(default_factory=dict)  # where ranks alone would differ

    @classmethod
    def of(cls, whole: Partial) -> Self:
        """Return what the ranks of a run agree on where they differ; all of them are merged."""
        return cls(by_host=without_device_clock(whole.notes), group_tags=divided_tags(whole))

    @property
    def differs(self) -> bool:
        """Whether ranks measured alone have other clocks or parallelisms."""
        return bool(self.by_host or self.group_tags)


class MeasureRanks(Protocol):
    """Measures some ranks; with `Partial.of`, or more than that."""

    def __call__(self, *traces: Trace, by_host: bool, group_tags: GroupTags) -> Partial:
        """Return the partial result of the ranks."""
        ...


FinishRun = Callable[[Partial, Sequence[SkippedRank], ParallelMap, Agreement], R]


def gather_alike(run: OpenedRun, measure: MeasureRanks, finish: FinishRun[R]) -> R:
    """Measure a run, and once more where clocks or parallelisms of its ranks differ.

    Parameters
    ----------
    run
        The ranks.
    measure
        Measures ranks by the clock and the parallelisms on which all agree.
    finish
        Computes the result from the partial results of all ranks and what they agree on.

    Raises
    ------
    FastcommError
        If a rank cannot be read; of a run that goes on, if none can.

    """
    first = run.gather(_task(measure, finish, None))
    if not isinstance(first, Agreement):
        return first
    second = run.gather(_task(measure, finish, first))
    assert not isinstance(second, Agreement)
    return second


def _task(
    measure: MeasureRanks, finish: FinishRun[R], agreement: Agreement | None
) -> Task[Partial, R | Agreement]:
    common = agreement or Agreement()
    return Task(
        measure=partial(measure, by_host=bool(common.by_host), group_tags=common.group_tags),
        merge=merge,
        finish=partial(_finished, finish=finish, agreement=agreement),
        spill=spill,
        content="metrics",
        takes_many=True,
    )


def _finished(
    whole: Partial,
    skipped: Sequence[SkippedRank],
    parallel_map: ParallelMap,
    *,
    finish: FinishRun[R],
    agreement: Agreement | None,
) -> R | Agreement:
    """Return the result; what the ranks agree on if they were measured without, and differ."""
    if agreement is None:
        agreement = Agreement.of(whole)
        if agreement.differs:
            return agreement
    return finish(whole, skipped, parallel_map, agreement)
