"""Find the workers that slow down a production job, from its table of operations.

The job is replayed with ideal durations for some of its operations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy as np

from fastcomm.stragglers.model import JobModel, JobTimes, chosen, joined
from fastcomm.stragglers.operations import Op, notes
from fastcomm_kernels.arrays import Flags, Floats, Ints

Way = Literal["alone", "without", "launched"]
Kind = Literal["all", "dp_rank", "stage", "optype", "rank"]
Scenario = Callable[[JobModel], JobTimes]

_MOST_RANKS = 64  # in one question: so many are replayed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Some:
    """Some operations as they were: alone, or all but them, or they alone with launch delays.

    `alone`: they as measured, the others ideal. `without`: they ideal, the others as measured.
    `launched`: all as measured, and they as long after what they waited for as recorded.
    """

    way: Way
    kind: Kind = "all"
    keys: tuple[int | str, ...] = ()

    def __call__(self, model: JobModel) -> JobTimes:
        """What the steps take."""
        return joined(self._replayed(part) for part in model.parts())

    def _replayed(self, model: JobModel) -> JobTimes:
        own = self._chosen(model)
        if self.way == "launched":
            return model.replay(model.measured, np.where(own, model.delays, 0.0))
        pair = (model.measured, model.ideal_times())
        return model.replay(np.where(own, *(pair if self.way == "alone" else pair[::-1])))

    def _chosen(self, model: JobModel) -> Flags:
        """Which operations are meant, of a shape that broadcasts to that of the times."""
        table = model.table
        stage = np.array([op.stage for op in table.ops])
        if self.kind == "dp_rank":
            return np.isin(np.arange(table.ranks), self.keys)[None, :, None]
        if self.kind == "stage":
            return np.isin(stage, self.keys)[:, None, None]
        if self.kind == "optype":
            names = optypes(table.ops, first_op=self.way == "launched")
            return np.array([name in self.keys for name in names])[:, None, None]
        if self.kind == "rank":
            return np.isin(table.rank_of, self.keys)[:, stage].T[:, :, None]
        return np.ones((1, 1, 1), np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class EachRank:
    """Each data rank of a range alone as measured, the others ideal: a row a rank.

    All that are ideal do the same, so that one of them stands for all: the ranks are replayed
    at once, each in steps of its own, at the cost of two ranks each.
    """

    first: int
    stop: int

    def __call__(self, model: JobModel) -> JobTimes:
        """What the steps take, ranks x steps."""
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


def each_rank(ranks: int) -> list[Scenario]:
    """Every data rank alone: few questions, and enough for many workers."""
    most = max(1, min(_MOST_RANKS, ranks // 2))
    return [
        EachRank(first=first, stop=min(first + most, ranks)) for first in range(0, ranks, most)
    ]


def optypes(ops: Sequence[Op], *, first_op: bool = False) -> list[str]:
    """The type of each operation, sends and receives of a pipeline in one.

    With `first_op` what a stage begins with is a type of its own.
    """
    return [
        "first-op"
        if first_op
        and op.seq == 0
        and op.optype == ("forward-recv" if op.stage else "forward-compute")
        else op.reported_type
        for op in ops
    ]


Parts = Literal["dp_rank", "stage", "optype"]
Replays = Callable[[Sequence[Scenario]], Sequence[JobTimes]]

THRESHOLD = 1.03
_WORST_PERCENT = 3
_MEASURED, _IDEAL = Some(way="alone"), Some(way="without")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """What the analysis has to know of a table besides what is replayed of it."""

    steps: tuple[int, ...]
    left_out: tuple[int, ...]
    rank_of: Ints  # data rank x stage
    base: Floats  # nanoseconds of each step, as recorded
    ideal_ns: Mapping[str, float]
    by_stage: tuple[int, ...]
    by_optype: tuple[str, ...]
    by_launch: tuple[str, ...]  # types, what a stage begins with apart

    @classmethod
    def of(cls, model: JobModel) -> "JobDescription":
        """What is known of a model."""
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
        """Data ranks."""
        return len(self.rank_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Mean step times with some operations made ideal, or alone as measured."""

    measured: float
    ideal: float
    removed: float
    added: float

    @property
    def rem(self) -> float | None:
        """Share of the slowdown that goes with them; None where there is none."""
        lost = self.measured - self.ideal
        return (self.measured - self.removed) / lost if lost else None

    @property
    def add(self) -> float | None:
        """Share of the slowdown that they alone bring."""
        lost = self.measured - self.ideal
        return (self.added - self.ideal) / lost if lost else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Slowdown by one kind of key, over all steps and in each."""

    mean: Mapping[str, float]
    steps: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """What the analysis of one table says; what blames somebody is None under the threshold.

    `workers` is the smaller of the slowdowns of data rank and stage, data rank x stage.
    """

    chosen: tuple[int, ...]
    left_out: tuple[int, ...]
    base: Floats
    nodelay: JobTimes
    ideal: JobTimes
    ideal_ns: Mapping[str, float]
    blocking: Mapping[str, Attribution] | None
    launch: Mapping[str, Attribution] | None
    last_stage: Effect
    worst: Effect | None
    worst_ranks: tuple[int, ...]
    workers: Floats | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What reading had to leave out."""
        return notes(self.left_out)

    @property
    def slowdown(self) -> float:
        """How much longer a step takes than with ideal operations."""
        return float(self.nodelay.whole.mean() / self.ideal.optimizer.mean())

    @property
    def launch_slowdown(self) -> float:
        """How much longer a step takes than its operations."""
        return float(self.base.mean() / self.nodelay.optimizer.mean())


def stragglers(
    model: JobModel, *, steps: list[int] | None = None, threshold: float = THRESHOLD
) -> Stragglers:
    """Analyse the chosen steps of a table."""
    asked = model if steps is None else chosen(model, steps)
    return analysis(
        JobDescription.of(asked), lambda many: [each(asked) for each in many], threshold
    )


def analysis(
    about: JobDescription, replays: Replays, threshold: float = THRESHOLD
) -> Stragglers:
    """The same of a model that is elsewhere: `replays` answers scenarios, in their order."""
    last = (about.rank_of.shape[1] - 1,)
    nodelay, ideal, *effects = replays([_MEASURED, _IDEAL, *_removed_added("stage", last)])
    known = nodelay, ideal
    blocking = launch = worst = workers = None
    worst_ranks: tuple[int, ...] = ()
    if nodelay.whole.mean() / ideal.optimizer.mean() >= threshold:
        blocking = _attributed(about, "alone", replays, ideal.optimizer)
        workers = _scores(about, blocking)
        worst_ranks = _worst(about, workers)
        worst = _effect(known, replays(_removed_added("rank", worst_ranks)))
    if about.base.mean() / nodelay.optimizer.mean() >= threshold:
        launch = _attributed(about, "launched", replays, nodelay.optimizer)
    return Stragglers(
        chosen=about.steps,
        left_out=about.left_out,
        base=about.base,
        nodelay=nodelay,
        ideal=ideal,
        ideal_ns=about.ideal_ns,
        blocking=blocking,
        launch=launch,
        last_stage=_effect(known, effects),
        worst=worst,
        worst_ranks=worst_ranks,
        workers=workers,
    )


def _removed_added(kind: Literal["stage", "rank"], keys: tuple[int, ...]) -> list[Scenario]:
    return [Some(way="without", kind=kind, keys=keys), Some(way="alone", kind=kind, keys=keys)]


def _effect(known: tuple[JobTimes, JobTimes], answers: Sequence[JobTimes]) -> Effect:
    measured, ideal, removed, added = (float(each.whole.mean()) for each in (*known, *answers))
    return Effect(measured=measured, ideal=ideal, removed=removed, added=added)


def _attributed(
    about: JobDescription, way: Way, replays: Replays, to: Floats
) -> dict[str, Attribution]:
    """The slowdown that each data rank, stage and type brings by itself, over steps of `to`."""
    asked = {kind: (keys, _asked(kind, keys, way)) for kind, keys in _keys(about, way).items()}
    answers = iter(replays([each for _, many in asked.values() for each in many]))
    attributions: dict[str, Attribution] = {}
    for kind, (keys, many) in asked.items():
        rows = np.vstack([next(answers).optimizer for _ in many])
        attributions[kind] = _ratios(dict(zip(map(str, keys), rows, strict=True)), to)
    return attributions


def _keys(about: JobDescription, way: Way) -> dict[Parts, Sequence[int | str]]:
    return {
        "dp_rank": range(about.ranks),
        "stage": about.by_stage,
        "optype": about.by_launch if way == "launched" else about.by_optype,
    }


def _asked(kind: Parts, keys: Sequence[int | str], way: Way) -> list[Scenario]:
    """A scenario a key, or a few that answer for many keys each."""
    if kind == "dp_rank" and way == "alone":
        return each_rank(len(keys))
    return [Some(way=way, kind=kind, keys=(key,)) for key in keys]


def _ratios(replayed: Mapping[str, Floats], to: Floats) -> Attribution:
    mean = {key: float(each.mean() / to.mean()) for key, each in replayed.items()}
    steps = tuple(
        _falling({key: float(each[i] / to[i]) for key, each in replayed.items()})
        for i in range(len(to))
    )
    return Attribution(mean=_falling(mean), steps=steps)


def _falling(values: Mapping[Any, float]) -> dict[Any, float]:
    """Largest first."""
    return dict(sorted(values.items(), key=lambda pair: -pair[1]))


def _scores(about: JobDescription, blocking: Mapping[str, Attribution]) -> Floats:
    """The smaller slowdown of those of data rank and stage."""
    by_rank, by_stage = blocking["dp_rank"].mean, blocking["stage"].mean
    ranks = np.array([by_rank[str(d)] for d in range(about.ranks)])
    stages = np.array([by_stage[str(s)] for s in range(about.rank_of.shape[1])])
    scores: Floats = np.minimum(ranks[:, None], stages[None, :])
    return scores


def _worst(about: JobDescription, scores: Floats) -> tuple[int, ...]:
    """The three percent of the ranks with the largest scores; a tie goes to the lower rank."""
    score, rank = scores.ravel(), about.rank_of.ravel()
    order = np.lexsort((rank, -score))
    return tuple(rank[order[: ceil(len(rank) * _WORST_PERCENT / 100)]].tolist())
