"""The timeline of a run or of a replay: the events of all ranks in a few steps, on one clock.

Ranks without detail have occupancy instead of events: what takes most of each bin of a step.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fastcomm.analyses.timeline_events import (
    EVENTS,
    FIRST_TAG,
    INSTANCES,
    KINDS,
    Arrays,
    append,
    joined,
    merge_short,
    take,
)
from fastcomm.analyses.timeline_steps import PATH, StepPlan, TimelineStep, together
from fastcomm.critical_path import CriticalPath
from fastcomm.errors import ConfigError
from fastcomm.executors import Task, both
from fastcomm.executors.opened import OpenedRun
from fastcomm.metrics import gaps
from fastcomm.metrics.breakdown import RankMeans
from fastcomm.metrics.findings.finding import Finding, ShownEvents
from fastcomm.metrics.result import Metrics
from fastcomm.trace.parallelisms import TAG, TAGS
from fastcomm.trace.run import named_ranks
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Ints

if TYPE_CHECKING:  # slow imports, and a report of a run has no replay
    from fastcomm.replay import Replayed
    from fastcomm.replay.result import Session

MOST_DETAILED = 96  # ranks
_MOST_NAMES = 2000
_OTHER_NAMES = "(a name that is left out: the run has too many)"
_MOST_EVENTS = 150_000  # of all ranks and schedules of a replay
_RANK = re.compile(r"rank(\d+)$")
_TAG = re.compile(rf"({'|'.join(tag for tag in TAGS if tag != 'OTHER')})\b")


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
    if finding.moment is None:
        return None
    events, caused = step.events, _wait_caused(step)
    cost, duration = _costs(step, finding.moment, caused), events["duration"]
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


def _costs(step: TimelineStep, shown: ShownEvents, caused: Ints) -> Ints:
    """Return what each event costs by which a finding shows; `caused` are the waits, in ns."""
    events = step.events
    kind, duration = events["kind"], events["duration"]
    if shown.events == "copies":
        return np.where(kind == KINDS.index("copy"), duration, 0)
    if shown.events == "communication":
        return np.where(kind >= FIRST_TAG, duration, 0)
    if shown.events == "transfers":
        tags = [KINDS.index(tag) for tag in shown.tags]
        is_own = np.isin(kind, tags) if tags else kind >= FIRST_TAG
        return np.where(is_own, duration - np.maximum(events["wait"], 0), 0)
    collectives = np.where(events["op"] == OP["SendRecv"], 0, caused)
    return collectives if collectives.any() else caused


def _wait_caused(step: TimelineStep) -> Ints:
    """Return how long the others wait for each event on average, if its rank is last, in ns."""
    instance = step.events["instance"]
    place = np.where(instance == NULL, -1, instance)
    last, members, waits = (
        np.append(step.instances[name], 1)[place] for name in ("last_rank", "members", "waits")
    )
    is_last = (last == step.events["rank"]) & (instance != NULL)
    return np.where(is_last, waits // np.maximum(members - 1, 1), 0)


def find_timeline(
    run: OpenedRun,
    metrics: Metrics,
    *,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] = (),
    critical: CriticalPath | str | None = None,
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
    parts, _ = run.only(plan.ranks).gather(task)
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


def replay_timeline(session: "Session") -> Timeline | str:
    """Return the timeline of a replayed step, and of the step with the edits, if any.

    Of more than 96 ranks it has the 96 whose step is the longest. A text is the reason why
    there is no timeline.
    """
    schedules = [("replayed", session.replayed)]
    if session.changed is not None:
        schedules.append(("with the edits", session.changed))
    by_pid = session.replayed.by_pid()
    longest = sorted(by_pid, key=lambda pid: -by_pid[pid])[:MOST_DETAILED]
    pids = [pid for pid in session.replayed.replayer.pids if pid in set(longest)]
    if not pids:
        return "no rank was replayed"
    rank_of = _ranks(pids)
    names: dict[str, int] = {}
    most = _MOST_EVENTS // (len(pids) * len(schedules))
    steps = [
        _step(label, schedule, session, rank_of, names, most) for label, schedule in schedules
    ]
    ranks = tuple(sorted(rank_of.values()))
    return Timeline(
        ranks=ranks,
        detailed=ranks,
        names=tuple(names),
        steps=tuple(steps),
        unaligned=(),
        is_host_run=session.is_host_run,
    )


def _ranks(pids: Sequence[str]) -> dict[str, int]:
    """Return the number of each process: that in its name, or its place."""
    numbers = [int(match[1]) if (match := _RANK.search(pid)) else -1 for pid in pids]
    if min(numbers) < 0 or len(set(numbers)) < len(pids):
        numbers = list(range(len(pids)))
    return dict(zip(pids, numbers, strict=True))


def _step(
    label: str,
    replayed: "Replayed",
    session: "Session",
    rank_of: dict[str, int],
    names: dict[str, int],
    most: int,
) -> TimelineStep:
    """Return one schedule with `most` events a rank; its names are added to `names`."""
    columns = _operations(replayed, rank_of, names)
    length = int(replayed.end.max(initial=0))
    pieces, resolution = list[Arrays](), 0
    for rank in sorted(rank_of.values()):
        own = take(columns, columns["rank"] == rank)
        for is_comm in (False, True):
            part = take(own, (own["op"] != NULL) == is_comm)
            merged, width = merge_short(part, most // 2, length)
            merged = append(merged, {"start": merged["start"][:0]}, EVENTS)
            pieces.append({**merged, "rank": np.full(len(merged["start"]), rank)})
            resolution = max(resolution, width)
    pid_of, pids = replayed.replayer.pid, replayed.replayer.pids
    ends = {
        rank: replayed.end[pid_of == pids.index(pid)].max(initial=0)
        for pid, rank in rank_of.items()
    }
    on_path = session.path.nodes if replayed is session.replayed else ()
    is_on_path = np.isin(columns["node"], np.array(on_path, np.int64))
    return TimelineStep(
        number=session.step or 0,
        label=label,
        length=length,
        spans={
            "begin": np.zeros(len(rank_of), np.int64),
            "stop": np.array([ends[rank] for rank in sorted(ends)], np.int64),
        },
        events=joined(pieces, EVENTS),
        instances=joined([], INSTANCES),
        path=joined([take(columns, is_on_path)], PATH),
        bins=np.zeros((0, 16), np.uint8),
        resolution=resolution,
    )


def _operations(replayed: "Replayed", rank_of: dict[str, int], names: dict[str, int]) -> Arrays:
    """Return the operations of devices and communication by start, and `node`, their number."""
    replayer = replayed.replayer
    ranks = np.array([rank_of.get(pid, NULL) for pid in replayer.pids], np.int64)[replayer.pid]
    kinds, ops, labels = [], [], []
    for name, category in zip(replayer.names, replayer.categories, strict=True):
        group, _, op = category.partition(".")
        kind = NULL
        if group == "operator":
            kind = KINDS.index("compute")
        elif group == "Comm":
            tag = _TAG.match(name.op_name or "")
            kind = FIRST_TAG + TAG[tag[1] if tag else "OTHER"]
        kinds.append(kind)
        ops.append(OP.get(op, OP["SendRecv"]) if group == "Comm" else NULL)
        labels.append(names.setdefault(name.standard, len(names)) if kind != NULL else NULL)
    start, end = (np.rint(times).astype(np.int64) for times in (replayed.start, replayed.end))
    columns = {
        "node": np.arange(len(kinds)),
        "rank": ranks,
        "kind": np.array(kinds, np.int64),
        "op": np.array(ops, np.int64),
        "name": np.array(labels, np.int64),
        "start": start,
        "duration": end - start,
        "busy": end - start,
        "count": np.ones(len(kinds), np.int64),
    }
    shown = np.flatnonzero((columns["kind"] != NULL) & (ranks != NULL) & (end > start))
    return take(columns, shown[np.argsort(start[shown], kind="stable")])
