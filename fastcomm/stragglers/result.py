"""Find the workers that slow down a production job, from its table of operations.

The steps are replayed with ideal durations for some operations, and the differences in step
time are attributed to data ranks, stages and types of operations. Times are float64 ns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy as np

from fastcomm.stragglers.model import JobModel, JobTimes, chosen, joined
from fastcomm.stragglers.operations import Op, notes
from fastcomm.stragglers.options import THRESHOLD
from fastcomm_kernels.arrays import Flags, Floats, Ints

Way = Literal["alone", "without", "launched"]
ScenarioKind = Literal["all", "dp_rank", "stage", "optype", "rank"]
Scenario = Callable[[JobModel], JobTimes]
_MAX_RANKS = 64  # that one scenario replays at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetScenario:
    """A replay in which a subset of the operations has other times than all others.

    `way` says which: "alone" keeps the measured durations of the subset and makes all others
    ideal; "without" makes the subset ideal and keeps the others; "launched" keeps all measured
    durations, and adds the recorded launch delays of the subset.
    """

    way: Way
    kind: ScenarioKind = "all"  # what the keys name
    keys: tuple[int | str, ...] = ()

    def __call__(self, model: JobModel) -> JobTimes:
        """Replay the scenario, and return the step times."""
        return joined(self._replayed(part) for part in model.parts())

    def _replayed(self, model: JobModel) -> JobTimes:
        """Replay all steps of `model`, a part of the job's steps; times are in ns.

        The operations of the subset have other durations or launch delays than all others.
        """
        own = self._mask(model)
        if self.way == "launched":
            return model.replay(model.measured, np.where(own, model.delays, 0.0))
        pair = (model.measured, model.ideal_times())
        return model.replay(np.where(own, *(pair if self.way == "alone" else pair[::-1])))

    def _mask(self, model: JobModel) -> Flags:
        """Return the subset, in a shape that broadcasts to ops x data ranks x steps."""
        if self.kind == "all":
            return np.ones((1, 1, 1), np.bool_)
        if self.kind == "optype":
            names = optypes(model.table.ops, first_op=self.way == "launched")
            return np.array([name in self.keys for name in names])[:, None, None]
        return model.table.rows(self.kind, self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScenarios:
    """One replay for each data rank of a range: this rank as measured, all others ideal.

    Ideal ranks all behave alike, so that one of them represents all. The ranks of the range are
    replayed at once, each in steps of its own, at the cost of two ranks each.
    """

    first: int
    stop: int

    def __call__(self, model: JobModel) -> JobTimes:
        """Replay the scenarios, and return the step times, ranks x steps."""
        own = model.measured[:, self.first : self.stop, :]
        ops, ranks, steps = own.shape
        times = own.reshape(ops, 1, ranks * steps)
        if model.table.ranks > 1:
            ideal = np.broadcast_to(model.ideal_times()[:, :1, :1], times.shape)
            times = np.concatenate([times, ideal], axis=1)
        replayed = model.replay(times)
        return JobTimes(
            whole=replayed.whole.reshape(ranks, steps),
            optimizer=replayed.optimizer.reshape(ranks, steps),
        )


def rank_scenarios(ranks: int) -> list[Scenario]:
    """Return scenarios that replay every data rank alone, in ranges of at most 64 ranks.

    There are at least two ranges if possible, so that several workers share them.
    """
    most = max(1, min(_MAX_RANKS, ranks // 2))
    return [
        RankScenarios(first=first, stop=min(first + most, ranks))
        for first in range(0, ranks, most)
    ]


def optypes(ops: Sequence[Op], *, first_op: bool = False) -> list[str]:
    """Return the type of each operation, as results name it.

    Pipeline sends and receives of a direction have one type, such as "forward-pp-comm". With
    `first_op` the first operation of a stage has the type "first-op".
    """
    return [
        "first-op"
        if first_op
        and op.seq == 0
        and op.optype == ("forward-recv" if op.stage else "forward-compute")
        else op.reported_type
        for op in ops
    ]


Partition = Literal["dp_rank", "stage", "optype"]
Replays = Callable[[Sequence[Scenario]], Sequence[JobTimes]]
_WORST_PERCENT = 3
_MEASURED, _IDEAL = SubsetScenario(way="alone"), SubsetScenario(way="without")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """Facts about a job that the analysis needs besides replayed step times."""

    steps: tuple[int, ...]
    left_out: tuple[int, ...]  # steps
    rank_of: Ints  # data rank x stage
    base: Floats  # recorded duration of each step, ns
    ideal_ns: Mapping[str, float]  # by type of operation
    by_stage: tuple[int, ...]  # stages
    by_optype: tuple[str, ...]  # types, see `optypes`
    by_launch: tuple[str, ...]  # types, with "first-op"

    @classmethod
    def of(cls, model: JobModel) -> "JobDescription":
        """Describe a model."""
        table = model.table
        return cls(
            steps=table.steps,
            left_out=table.left_out,
            rank_of=table.rank_of,
            base=table.end.max(axis=(0, 1)) - table.start.min(axis=(0, 1)),
            ideal_ns=model.ideal_ns,
            by_stage=tuple(dict.fromkeys(op.stage for op in table.ops)),
            by_optype=tuple(dict.fromkeys(optypes(table.ops))),
            by_launch=tuple(dict.fromkeys(optypes(table.ops, first_op=True))),
        )

    @property
    def ranks(self) -> int:
        """Number of data ranks."""
        return len(self.rank_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Effect of a subset of operations on the mean step time, in ns."""

    measured: float
    ideal: float  # all operations ideal
    removed: float  # the subset ideal
    added: float  # all but the subset ideal

    @property
    def rem(self) -> float | None:
        """Share of the slowdown that an ideal subset removes; None without a slowdown."""
        slowdown = self.measured - self.ideal
        return (self.measured - self.removed) / slowdown if slowdown else None

    @property
    def add(self) -> float | None:
        """Share of the slowdown that the subset causes alone; None without a slowdown."""
        slowdown = self.measured - self.ideal
        return (self.added - self.ideal) / slowdown if slowdown else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Slowdown that each key of one kind causes, such as each stage: ratios of step times."""

    mean: Mapping[str, float]
    steps: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Result of the analysis of one table.

    The fields that blame workers or operations are None if the slowdown is below the threshold.
    """

    chosen: tuple[int, ...]  # the steps that were analyzed
    left_out: tuple[int, ...]  # steps that the table does not cover completely
    base: Floats  # recorded duration of each step, ns
    nodelay: JobTimes  # measured durations, without launch delays
    ideal: JobTimes  # ideal durations
    ideal_ns: Mapping[str, float]  # by type of operation
    blocking: Mapping[str, Attribution] | None  # of `slowdown`, by kind of key
    launch: Mapping[str, Attribution] | None  # of `launch_slowdown`, by kind of key
    last_stage: Effect
    worst: Effect | None  # of `worst_ranks`
    worst_ranks: tuple[int, ...]  # the 3 % of the ranks with the largest slowdown
    workers: Floats | None  # slowdown, data rank x stage: the smaller one of rank and stage

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of the reader, about steps that it left out."""
        return notes(self.left_out)

    @property
    def step_ns(self) -> float:
        """Mean step time with measured operations, without launch delays."""
        return float(self.nodelay.whole.mean())

    @property
    def ideal_step_ns(self) -> float:
        """Mean step time in ns if every operation took the ideal time of its type."""
        return float(self.ideal.whole.mean())

    @property
    def slowdown(self) -> float:
        """Ratio of the step time without launch delays to the ideal step time."""
        return float(self.nodelay.whole.mean() / self.ideal.optimizer.mean())

    @property
    def launch_slowdown(self) -> float:
        """Ratio of the recorded step time to the step time without launch delays."""
        return float(self.base.mean() / self.nodelay.optimizer.mean())


def stragglers(
    model: JobModel, *, steps: list[int] | None = None, threshold: float = THRESHOLD
) -> Stragglers:
    """Find the workers and operations that slow down a job.

    Parameters
    ----------
    model
        The job.
    steps
        Steps to analyze; by default all.
    threshold
        Slowdown, as a ratio, from which it is attributed.

    Raises
    ------
    FastcommError
        If a step is not in the table.

    """
    part = model if steps is None else chosen(model, steps)
    return analysis(
        JobDescription.of(part),
        lambda scenarios: [scenario(part) for scenario in scenarios],
        threshold,
    )


def analysis(job: JobDescription, replays: Replays, threshold: float = THRESHOLD) -> Stragglers:
    """Find the workers that slow down a job whose model may be in another process.

    Parameters
    ----------
    job
        Description of the model.
    replays
        Replays scenarios with the model, and returns the step times of each, in order.
    threshold
        Slowdown, as a ratio, from which it is attributed.

    """
    last = (job.rank_of.shape[1] - 1,)
    nodelay, ideal, *effects = replays([_MEASURED, _IDEAL, *_removed_added("stage", last)])
    bounds = nodelay, ideal
    blocking = launch = worst = workers = None
    worst_ranks: tuple[int, ...] = ()
    if nodelay.whole.mean() / ideal.optimizer.mean() >= threshold:
        blocking = _attributed(job, "alone", replays, ideal.optimizer)
        workers = _scores(job, blocking)
        worst_ranks = _worst(job, workers)
        worst = _effect(bounds, replays(_removed_added("rank", worst_ranks)))
    if job.base.mean() / nodelay.optimizer.mean() >= threshold:
        launch = _attributed(job, "launched", replays, nodelay.optimizer)
    return Stragglers(
        chosen=job.steps,
        left_out=job.left_out,
        base=job.base,
        nodelay=nodelay,
        ideal=ideal,
        ideal_ns=job.ideal_ns,
        blocking=blocking,
        launch=launch,
        last_stage=_effect(bounds, effects),
        worst=worst,
        worst_ranks=worst_ranks,
        workers=workers,
    )


def _removed_added(kind: Literal["stage", "rank"], keys: tuple[int, ...]) -> list[Scenario]:
    """Return two scenarios of a subset: made ideal, and measured while others are ideal."""
    return [
        SubsetScenario(way="without", kind=kind, keys=keys),
        SubsetScenario(way="alone", kind=kind, keys=keys),
    ]


def _effect(bounds: tuple[JobTimes, JobTimes], replayed: Sequence[JobTimes]) -> Effect:
    """Return how much of the slowdown some operations cause.

    `bounds` are the measured and the ideal replay; `replayed` are the replays in which only
    these operations are ideal, and in which only these are as measured.
    """
    measured, ideal, removed, added = (
        float(times.whole.mean()) for times in (*bounds, *replayed)
    )
    return Effect(measured=measured, ideal=ideal, removed=removed, added=added)


def _attributed(
    job: JobDescription, way: Way, replays: Replays, reference: Floats
) -> dict[str, Attribution]:
    """Attribute the slowdown to data ranks, stages and types, each replayed by itself.

    `reference` has the step times, in ns, that the replayed ones are divided by.
    """
    scenarios = {
        kind: (keys, _scenarios(kind, keys, way)) for kind, keys in _keys(job, way).items()
    }
    replayed = iter(replays([one for _, many in scenarios.values() for one in many]))
    attributions: dict[str, Attribution] = {}
    for kind, (keys, many) in scenarios.items():
        rows = np.vstack([next(replayed).optimizer for _ in many])
        attributions[kind] = _ratios(dict(zip(map(str, keys), rows, strict=True)), reference)
    return attributions


def _keys(job: JobDescription, way: Way) -> dict[Partition, Sequence[int | str]]:
    """Return the data ranks, stages and types that a slowdown is attributed to."""
    return {
        "dp_rank": range(job.ranks),
        "stage": job.by_stage,
        "optype": job.by_launch if way == "launched" else job.by_optype,
    }


def _scenarios(kind: Partition, keys: Sequence[int | str], way: Way) -> list[Scenario]:
    """Return scenarios that replay each key by itself; those of data ranks share replays."""
    if kind == "dp_rank" and way == "alone":
        return rank_scenarios(len(keys))
    return [SubsetScenario(way=way, kind=kind, keys=(key,)) for key in keys]


def _ratios(replayed: Mapping[str, Floats], reference: Floats) -> Attribution:
    """Divide the step times of each key by the reference, on average and step by step."""
    mean = {key: float(times.mean() / reference.mean()) for key, times in replayed.items()}
    steps = tuple(
        _descending({key: float(times[i] / reference[i]) for key, times in replayed.items()})
        for i in range(len(reference))
    )
    return Attribution(mean=_descending(mean), steps=steps)


def _descending(values: Mapping[Any, float]) -> dict[Any, float]:
    """Sort by value, largest first."""
    return dict(sorted(values.items(), key=lambda pair: -pair[1]))


def _scores(job: JobDescription, blocking: Mapping[str, Attribution]) -> Floats:
    """Return the slowdown per data rank x stage: the smaller of the two, as a ratio."""
    by_rank, by_stage = blocking["dp_rank"].mean, blocking["stage"].mean
    ranks = np.array([by_rank[str(d)] for d in range(job.ranks)])
    stages = np.array([by_stage[str(s)] for s in range(job.rank_of.shape[1])])
    scores: Floats = np.minimum(ranks[:, None], stages[None, :])
    return scores


def _worst(job: JobDescription, scores: Floats) -> tuple[int, ...]:
    """Return the 3 % of the ranks with the largest scores; of equal scores the lower rank."""
    score, rank = scores.ravel(), job.rank_of.ravel()
    order = np.lexsort((rank, -score))
    return tuple(rank[order[: ceil(len(rank) * _WORST_PERCENT / 100)]].tolist())
