"""The timeline of a run: the events of all ranks in a few steps, on one clock.

Ranks without detail have occupancy instead of events: what takes most of each bin of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.analyses.timeline_events import FIRST_TAG, KINDS
from fastcomm.analyses.timeline_steps import StepPlan, TimelineStep, together
from fastcomm.critical_path import CriticalPath
from fastcomm.errors import ConfigError
from fastcomm.executors import Executor, Progress, Task, both, executor_of
from fastcomm.metrics import gaps
from fastcomm.metrics.breakdown import RankMeans
from fastcomm.metrics.findings import Finding
from fastcomm.metrics.result import Metrics
from fastcomm.trace.run import RunTraces, named_ranks
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Ints

MOST_DETAILED = 96  # ranks
_MOST_NAMES = 2000
_OTHER_NAMES = "(a name that is left out: the run has too many)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A part of a step on one rank that shows a finding best."""

    step: int
    rank: int
    at: int
    around: int  # time to show, with `at` in its middle


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Some steps of all ranks."""

    ranks: tuple[int, ...]
    detailed: tuple[int, ...]  # ranks with events
    names: tuple[str, ...]
    steps: tuple[TimelineStep, ...]
    unaligned: tuple[int, ...]  # ranks whose clock cannot be compared: they start at 0
    is_host_run: bool

    @property
    def binned(self) -> tuple[int, ...]:
        """Ranks with occupancy only."""
        return tuple(rank for rank in self.ranks if rank not in set(self.detailed))

    def moment(self, finding: Finding) -> Moment | None:
        """Return where a finding shows best: the costliest event of its ranks, or a step.

        That is the collective in which others wait the longest for one of the ranks, a message
        only without collectives; of a slow link the longest transfer, of a symptom the longest
        event of its kind. Without any it is the whole first step.
        """
        ranks = [rank for rank in finding.ranks if rank in set(self.ranks)]
        if not ranks or not self.steps:
            return None
        moments = [_costliest(step, ranks, finding) for step in self.steps]
        present = [item for item in moments if item is not None]
        if present:
            return max(present, key=lambda item: item[0])[1]
        first = self.steps[0]
        middle = first.length // 2
        return Moment(step=first.number, rank=ranks[0], at=middle, around=first.length)


def _costliest(
    step: TimelineStep, ranks: Sequence[int], finding: Finding
) -> tuple[int, Moment] | None:
    """Return the cost and the place of the costliest event of a finding in a step, if any."""
    events, caused = step.events, _wait_caused(step)
    duration, is_comm = events["duration"], events["kind"] >= FIRST_TAG
    if finding.kind == "copies":
        cost = np.where(events["kind"] == KINDS.index("copy"), duration, 0)
    elif finding.kind == "slow_link":
        tags = [KINDS.index(tag) for tag in (finding.evidence.tag or "").split("+") if tag]
        is_own = np.isin(events["kind"], tags) if tags else is_comm
        cost = np.where(is_own, duration - np.maximum(events["wait"], 0), 0)
    elif finding.kind == "exposed_communication":
        cost = np.where(is_comm, duration, 0)
    elif finding.is_symptom:
        return None
    else:
        collectives = np.where(events["op"] == OP["SendRecv"], 0, caused)
        cost = collectives if collectives.any() else caused
    cost = np.where(np.isin(events["rank"], ranks), cost, 0)
    if not cost.any():
        return None
    row = int(cost.argmax())
    length = int(duration[row])
    return int(cost[row]), Moment(
        step=step.number,
        rank=int(events["rank"][row]),
        at=int(events["start"][row]) + length // 2,
        around=3 * (length + int(caused[row])),
    )


def _wait_caused(step: TimelineStep) -> Ints:
    """Return how long the others wait for each event on average, if its rank is last, in ns."""
    instance = step.events["instance"]
    place = np.where(instance == NULL, -1, instance)
    last, members, waits = (
        np.append(step.instances[name], 1)[place] for name in ("last_rank", "members", "waits")
    )
    is_last = (last == step.events["rank"]) & (instance != NULL)
    return np.where(is_last, waits // np.maximum(members - 1, 1), 0)


def find_timeline(  # noqa: PLR0913 - one keyword per choice
    run: RunTraces,
    metrics: Metrics,
    *,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] = (),
    critical: CriticalPath | str | None = None,
    workers: int | Executor = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> Timeline | str:
    """Read the slowest, the median and a third step of all ranks, or say why there is none.

    The third step is that of the critical path, else the fastest. Up to 96 ranks, all have
    their events; of more ranks these are the suspects of findings, the ranks that share
    process groups with them, and the rank of median compute.

    Parameters
    ----------
    run
        The traces.
    metrics
        The metrics of the run, with all tables.
    ranks
        The ranks with events; by default as above.
    steps
        Numbers of further steps.
    critical
        The critical path, which is drawn over its step.
    workers
        Number of processes, or an executor.
    keep_going
        Whether to leave out ranks that cannot be read.
    progress
        Called with the source of each finished rank, also of one that was skipped.

    Raises
    ------
    ConfigError
        If the run does not have one of `ranks` or `steps`.
    FastcommError
        If a rank cannot be read, or its file has changed since it was measured.

    """
    iterations = metrics.tables["iterations"]
    if not iterations.num_rows or iterations["start_ns"].null_count:
        return gaps.reason(metrics.missing)
    if "events" not in metrics.tables:
        return "the metrics were computed without tables of events"
    detailed = _detailed(metrics, ranks)
    of_path = critical if isinstance(critical, CriticalPath) else None
    plan = StepPlan.of(metrics, detailed, of_path, steps)
    task = Task(measure=plan.measure, merge=together, finish=both, content="kernels")
    parts, _ = executor_of(workers).gather(
        run.only(plan.ranks), task, keep_going=keep_going, progress=progress
    )
    present = tuple(rank for rank in plan.ranks if rank in parts)
    names = tuple(dict.fromkeys(name for rank in present for name in parts[rank].names))
    drawn = [plan.step(k, parts, names, metrics) for k in range(len(plan.numbers))]
    if isinstance(critical, CriticalPath):
        drawn = [
            replace(step, path=plan.path(critical, k))
            if "critical path" in step.label
            else step
            for k, step in enumerate(drawn)
        ]
    return Timeline(
        ranks=present,
        detailed=tuple(rank for rank in present if rank in plan.detailed),
        names=names if len(names) <= _MOST_NAMES else _fewer_names(names, drawn),
        steps=tuple(drawn),
        unaligned=tuple(sorted(plan.unaligned.intersection(present))),
        is_host_run=any(part.is_host_run for part in parts.values()),
    )


def _fewer_names(names: Sequence[str], steps: Sequence[TimelineStep]) -> tuple[str, ...]:
    """Return the names of which most events have one, and renumber the events' names."""
    uses = sum(np.bincount(step.events["name"], minlength=len(names)) for step in steps)
    frequent = np.argsort(-np.asarray(uses), kind="stable")[: _MOST_NAMES - 1]
    place = np.full(len(names), len(frequent))
    place[frequent] = np.arange(len(frequent))
    for step in steps:
        step.events["name"] = place[step.events["name"]]
    return (*(names[k] for k in frequent.tolist()), _OTHER_NAMES)


def _detailed(metrics: Metrics, chosen: Sequence[int] | None) -> frozenset[int]:
    """Return the ranks with events. Raises ConfigError for ranks that the run lacks."""
    measured = metrics.measured_ranks
    if chosen is not None:
        if absent := sorted(set(chosen) - set(metrics.ranks)):
            raise ConfigError(f"timeline_ranks: {named_ranks(absent)}: not in the run")
        return frozenset(chosen)
    if len(measured) <= MOST_DETAILED:
        return frozenset(measured)
    suspects = [
        rank for finding in metrics.findings if not finding.is_symptom for rank in finding.ranks
    ]
    means = RankMeans.of(metrics.tables["iterations"])
    median = int(means.ranks[means.by_compute[(len(means.ranks) - 1) // 2]])
    groups = (set(item) for item in metrics.tables["group_members"]["ranks"].to_pylist())
    related = [members for members in groups if members.intersection(suspects)]
    in_order = [*suspects, median]
    for members in sorted(related, key=lambda members: (len(members), min(members))):
        in_order += sorted(members)
    present = set(measured)
    return frozenset(
        [rank for rank in dict.fromkeys(in_order) if rank in present][:MOST_DETAILED]
    )
