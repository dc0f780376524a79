"""Expected metrics of a synthetic job, derived from its construction instead of its events.

Sums and counts are over whole events, global ratios are quotients of sums, averages are over
(iteration, rank). Bandwidths are in bytes per second, times in ns.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fastcomm.synthetic import play
from fastcomm.synthetic.job import IDLE_FAULTS, Job
from fastcomm.synthetic.play import PlannedWork, RankStep, steps


@dataclass(slots=True)
class Tally:
    """Sums of the intervals of a step by kind, in ns; the first five partition the step."""

    compute: int = 0
    # By tag: exposed communication of this tag alone.
    exposed: dict[str, int] = field(default_factory=dict)
    mixed: int = 0  # exposed communication of several tags
    memcpy: int = 0  # only copies and memsets
    idle: int = 0
    busy: dict[str, int] = field(default_factory=dict)  # communication by tag
    overlapped: dict[str, int] = field(default_factory=dict)  # overlapped communication by tag
    any_busy: int = 0  # communication of any tag
    any_overlapped: int = 0

    def add(self, ns: int, computes: bool, copies: bool, tags: list[str]) -> None:
        """Add an interval of `ns` with communication of these tags."""
        if tags:
            self.any_busy += ns
            self.any_overlapped += ns if computes else 0
        for tag in tags:
            self.busy[tag] = self.busy.get(tag, 0) + ns
            self.overlapped[tag] = self.overlapped.get(tag, 0) + (ns if computes else 0)
        if computes:
            self.compute += ns
        elif len(tags) > 1:
            self.mixed += ns
        elif tags:
            self.exposed[tags[0]] = self.exposed.get(tags[0], 0) + ns
        elif copies:
            self.memcpy += ns
        else:
            self.idle += ns


@dataclass(frozen=True, slots=True)
class PhaseGap:
    """Signed time from the end of a run of one tag to the start of the next run."""

    before: str
    after: str
    ns: int


def tally(works: list[PlannedWork], start: int, stop: int) -> Tally:
    """Return how long each combination of compute, copies and communication runs.

    `works` is the work of a rank; only the time from `start` to `stop` (ns) counts.
    """
    total, open_ = Tally(), dict[str, int]()  # open work: its number by kind or tag
    now = start
    for moment, change, label in _changes(works, stop):
        tags = [name for name in open_ if name.isupper()]
        copies = "memcpy" in open_ or "memset" in open_
        total.add(moment - now, "compute" in open_, copies, tags)
        now = moment
        open_[label] = open_.get(label, 0) + change
        if not open_[label]:
            del open_[label]
    return total


def _changes(works: list[PlannedWork], stop: int) -> list[tuple[int, int, str]]:
    """Return (moment, 1 or -1, label) where work starts or stops, and the end of the step."""
    changes = [
        change
        for work in works
        for change in ((work.start, 1, _tag(work)), (work.stop, -1, _tag(work)))
    ]
    # Starts before stops: work may have no length.
    return sorted([*changes, (stop, 0, "")], key=lambda change: (change[0], -change[1]))


def windows(works: list[PlannedWork]) -> list[PhaseGap]:
    """Return the windows between runs of communication of one tag, in the order of starts."""
    phases: list[list[PlannedWork]] = []
    calls = [work for work in works if work.call]
    for work in sorted(calls, key=lambda work: work.start):
        if not phases or _tag(phases[-1][0]) != _tag(work):
            phases.append([])
        phases[-1].append(work)
    return [
        PhaseGap(_tag(one[0]), _tag(two[0]), two[0].start - max(work.stop for work in one))
        for one, two in pairwise(phases)
    ]


def _tag(work: PlannedWork) -> str:
    """Return the tag of a collective, or the kind of other work."""
    return work.call.group.tag if work.call else work.kind


def cost_ns(job: Job, number: int) -> int:
    """Return the time by which the fault makes a step longer."""
    if job.straggler is None:
        return 0
    usual = play.schedule_of(replace(job, slowdown=0), number)
    return play.schedule_of(job, number).length - usual.length


@dataclass(slots=True)
class _Traffic:
    """Payload, bus bytes and duration of the events of one tag."""

    payload: list[int] = field(default_factory=list)
    bus: list[int] = field(default_factory=list)
    ns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sums:
    lengths: list[int] = field(default_factory=list)  # of each (iteration, rank)
    tallies: list[Tally] = field(default_factory=list)
    traffic: dict[str, _Traffic] = field(default_factory=dict)
    windows: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    widest: dict[str, Any] | None = None
    by_rank: list[dict[str, Any]] = field(default_factory=list)


def truth(
    job: Job, link_bandwidth: float | None = None, *, ranks: Iterable[int] | None = None
) -> dict[str, Any]:
    """Return every expected metric of a job, or of some of its ranks, with the JSON keys.

    `link_bandwidth` is in bytes per second. A metric without a value is None.
    """
    chosen = list(range(job.ranks)) if ranks is None else sorted(ranks)
    sums = _Sums()
    for rank in chosen:
        _add_rank(sums, rank, list(steps(job, rank)))
    return {
        "ranks": chosen,
        "iterations": job.steps,
        "iteration": {"mean_ns": _mean(sums.lengths), "p99_ns": _percentile(sums.lengths, 99)},
        "breakdown": {"spec": _spec(sums), "exact": _exact(sums)},
        "windows": [_window(*item) for item in sorted(sums.windows.items())],
        "bandwidth": {tag: _bandwidth(traffic, link_bandwidth) for tag, traffic in _tags(sums)},
        "volume": {
            tag: _volume(traffic, job.steps, len(chosen)) for tag, traffic in _tags(sums)
        },
        "overlap": _overlap(sums),
        "by_rank": sums.by_rank,
        "longest_rank": max(sums.by_rank, key=lambda row: row["mean_ns"])["rank"],
        "widest_window": sums.widest,
    }


def planted(job: Job) -> dict[str, Any] | None:
    """Return kind, ranks, stage and mean cost per step of the job's fault, or None.

    A fault of all ranks has a cause of idle time, `idle_cause`; its cost is the additional idle
    time of a rank and step, in the mean.
    """
    if job.straggler is None:
        return None
    if job.fault in IDLE_FAULTS:
        cost = _idle_ns(job) - _idle_ns(replace(job, slowdown=0))
        cause = {"idle_cause": _IDLE_CAUSES.get(job.fault, job.fault), "cost_ns": cost}
        return {"kind": "idle", "ranks": list(range(job.ranks)), "stage": None} | cause
    stage = job.place(job.straggler)[2]
    size = job.tp * job.dp
    ranks = (
        range(stage * size, (stage + 1) * size)
        if job.fault == "imbalanced_stage"
        else (job.straggler,)
    )
    costs = [
        cost_ns(job, number) for number in range(job.first_step, job.first_step + job.steps)
    ]
    return {
        "kind": "straggler" if job.fault == "slow_gpu" else job.fault,
        "ranks": list(ranks),
        "stage": stage,
        "cost_ns": _mean(costs),
    }


_IDLE_CAUSES = {"garbage_collection": "python"}  # of faults with another name


def _idle_ns(job: Job) -> float:
    """Return the mean idle time of a step of a rank, in ns."""
    played = [
        tally(step.works, step.start, step.stop).idle
        for rank in range(job.ranks)
        for step in steps(job, rank)
    ]
    return sum(played) / len(played)


def exact_ns(tally: Tally) -> dict[str, int]:
    """Return the partition of a step, in ns by name."""
    exposed = {f"exposed_{tag}": ns for tag, ns in sorted(tally.exposed.items())}
    return {
        "compute": tally.compute,
        "idle": tally.idle,
        "memcpy": tally.memcpy,
        **exposed,
        "exposed_mixed": tally.mixed,
    }


def _add_rank(sums: _Sums, rank: int, played: list[RankStep]) -> None:
    """Add the steps of a rank to the sums."""
    lengths = [step.ns for step in played]
    sums.lengths += lengths
    tallies = [tally(step.works, step.start, step.stop) for step in played]
    sums.tallies += tallies
    for step in played:
        _add_traffic(sums, step)
        for window in windows(step.works):
            _add_window(sums, rank, step.number, window)
    parts = [exact_ns(of_step) for of_step in tallies]
    sums.by_rank.append(
        {
            "rank": rank,
            "iteration_ns": lengths,
            "mean_ns": _mean(lengths),
            "exact_ns": _total(parts),
        }
    )


def _add_traffic(sums: _Sums, step: RankStep) -> None:
    """Add bytes and times of a step's communication to the sums of each tag."""
    for work in step.works:
        if work.call:
            traffic = sums.traffic.setdefault(work.call.group.tag, _Traffic())
            traffic.payload.append(work.call.payload)
            traffic.bus.append(work.call.bus)
            traffic.ns.append(work.ns)


def _add_window(sums: _Sums, rank: int, iteration: int, window: PhaseGap) -> None:
    """Add a window to the lengths of its pair of tags, and keep the widest."""
    pair = (window.before, window.after)
    sums.windows.setdefault(pair, []).append(window.ns)
    if sums.widest is None or window.ns > sums.widest["ns"]:
        place = {"rank": rank, "iteration": iteration}
        sums.widest = {"from": pair[0], "to": pair[1], "ns": window.ns, **place}


def _tags(sums: _Sums) -> list[tuple[str, _Traffic]]:
    return sorted(sums.traffic.items())


def _total(parts: list[dict[str, int]]) -> dict[str, int]:
    names = sorted({name for part in parts for name in part})
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _exact(sums: _Sums) -> dict[str, float]:
    total = sum(sums.lengths)
    parts = _total([exact_ns(tally) for tally in sums.tallies])
    return {name: ns / total for name, ns in parts.items()}


def _spec(sums: _Sums) -> dict[str, float]:
    """Return the specification formula; its idle is negative if communication overlaps."""
    total = sum(sums.lengths)
    comm = {f"comm_{tag}": sum(traffic.ns) for tag, traffic in _tags(sums)}
    compute = total - sum(tally.any_busy for tally in sums.tallies)
    parts = {"compute": compute, "idle": total - compute - sum(comm.values()), **comm}
    return {name: ns / total for name, ns in parts.items()}


def _window(pair: tuple[str, str], spans: list[int]) -> dict[str, Any]:
    """Return the expected statistics of windows; `spans` are their lengths in ns."""
    return {
        "from": pair[0],
        "to": pair[1],
        "count": len(spans),
        "mean_ns": _mean(spans),
        "p50_ns": _percentile(spans, 50),
        "p95_ns": _percentile(spans, 95),
    }


def _bandwidth(traffic: _Traffic, link: float | None) -> dict[str, Any]:
    """Return the expected bandwidth of a tag in bytes/s; `link` is the link's, or None."""
    pairs = zip(traffic.payload, traffic.ns, strict=True)
    speeds = [count * 1e9 / ns for count, ns in pairs]
    bus = [count * 1e9 / ns for count, ns in zip(traffic.bus, traffic.ns, strict=True)]
    pooled = sum(traffic.payload) * 1e9 / sum(traffic.ns)
    return {
        "avg_bw": _mean(speeds),
        "avg_util": _per(_mean(speeds), link),
        "p95_util": _per(_percentile(speeds, 95), link),
        "global_avg_util": _per(pooled, link),
        "total_bytes": sum(traffic.payload),
        "avg_bus_bw": _mean(bus),
        "events_without_bytes": 0,
    }


def _volume(traffic: _Traffic, iterations: int, ranks: int) -> dict[str, Any]:
    """Return the expected volume of a tag, in bytes."""
    total = sum(traffic.payload)
    return {
        "comm_bytes": total,
        "comm_events": len(traffic.ns),
        "bytes_per_iteration": total / iterations,
        "bytes_per_step_per_gpu": total / (iterations * ranks),
    }


def _overlap(sums: _Sums) -> dict[str, Any]:
    """Return mean ratios over the (iteration, rank) with communication."""
    ratios = [tally.any_overlapped / tally.any_busy for tally in sums.tallies if tally.any_busy]
    by_tag = {
        tag: _mean(
            [
                tally.overlapped[tag] / tally.busy[tag]
                for tally in sums.tallies
                if tag in tally.busy
            ]
        )
        for tag in sorted(sums.traffic)
    }
    return {"average_overlap_ratio": _mean(ratios), "by_tag": by_tag}


def _mean(values: list[int] | list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentile(values: list[int] | list[float], q: int) -> float:
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def _per(speed: float | None, link: float | None) -> float | None:
    return None if speed is None or link is None else speed / link
