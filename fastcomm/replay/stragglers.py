"""Who holds a production job up: step times if operations took their ideal time.

Times are float64 nanoseconds, arrays are ops x data ranks x steps. Rules and names are those of
"Understanding Stragglers in Large Model Training Using What-if Analysis".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import FastcommError
from fastcomm.replay.operation_graph import OperationGraph, graph
from fastcomm.replay.operations import Operations
from fastcomm_kernels.simulate import ALONE, simulate

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

THRESHOLD = 1.03
_CLAMP_NS = -1e7
_MEDIAN = frozenset(
    {
        "forward-send",
        "forward-recv",
        "backward-send",
        "backward-recv",
        "params-all-gather",
        "grads-reduce-scatter",
        "separate-grads-all-reduce",
        "embedding-grads-all-reduce",
        "optimizer-clip-main-grad",
        "layernorm-grads-all-reduce",
    }
)
_WORST_PERCENT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Nanoseconds of each step: to the end of the last operation, and of the last optimizer."""

    whole: Floats
    optimizer: Floats


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
    """What the analysis of one table says; attributions are None under the threshold."""

    table: Operations
    chosen: tuple[int, ...]
    base: Floats
    nodelay: Replayed
    ideal: Replayed
    ideal_ns: Mapping[str, float]
    blocking: Mapping[str, Attribution] | None
    launch: Mapping[str, Attribution] | None
    last_stage: Effect
    worst: Effect | None
    worst_ranks: tuple[int, ...]

    @property
    def slowdown(self) -> float:
        """How much longer a step takes than with ideal operations."""
        return float(self.nodelay.whole.mean() / self.ideal.optimizer.mean())

    @property
    def launch_slowdown(self) -> float:
        """How much longer a step takes than its operations."""
        return float(self.base.mean() / self.nodelay.optimizer.mean())

    @property
    def workers(self) -> Floats | None:
        """The smaller of the slowdowns of data rank and stage, data rank x stage."""
        return None if self.blocking is None else _scores(self.table, self.blocking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A table with its graph: replays any times of its operations."""

    table: Operations
    graph: OperationGraph
    measured: Floats
    delays: Floats

    @classmethod
    def of(cls, table: Operations, *, shards: int = 1) -> "Model":
        """Make the graph and take transfers and launch delays from the whole table."""
        made = graph(table, shards=shards)
        return cls(
            table=table,
            graph=made,
            measured=_measured(table, made),
            delays=_delays(table, made),
        )

    def only(self, at: list[int]) -> "Model":
        """The same for some of the steps, by position."""
        table = replace(
            self.table,
            start=self.table.start[:, :, at],
            end=self.table.end[:, :, at],
            duration=self.table.duration[:, :, at],
            steps=tuple(self.table.steps[i] for i in at),
        )
        return replace(
            self, table=table, measured=self.measured[:, :, at], delays=self.delays[:, :, at]
        )

    def optypes(self) -> NDArray[np.str_]:
        """The type of each operation."""
        return np.array([op.optype for op in self.table.ops])

    def ideal(self) -> dict[str, float]:
        """One time for each type: the median of transfers, the mean of computation."""
        types = self.optypes()
        return {
            str(each): float(
                (np.median if each in _MEDIAN else np.mean)(self.measured[types == each])
            )
            for each in np.unique(types)
        }

    def ideal_times(self) -> Floats:
        """The ideal of every operation, in the shape of what was measured."""
        value = self.ideal()
        column = np.array([value[op.optype] for op in self.table.ops])
        return np.broadcast_to(column[:, None, None], self.measured.shape)

    def times(self, times: Floats, delays: Floats | None = None) -> tuple[Floats, Floats]:
        """Start and end of every operation if they took `times`."""
        size, ranks, steps = times.shape
        flat = (size, ranks * steps)
        start, end = simulate(
            self.graph.order,
            self.graph.before,
            self.graph.closes,
            self.graph.members,
            np.ascontiguousarray(times).reshape(flat),
            np.zeros(flat) if delays is None else np.ascontiguousarray(delays).reshape(flat),
            np.int64(ranks),
        )
        return start.reshape(times.shape), end.reshape(times.shape)

    def replay(self, times: Floats, delays: Floats | None = None) -> Replayed:
        """Step times if the operations took `times`."""
        start, end = self.times(times, delays)
        last, first = end.max(axis=1), start.min(axis=(0, 1))
        optimizer = self.optypes() == "optimizer"
        return Replayed(whole=last.max(axis=0) - first, optimizer=last[optimizer].max(axis=0))


def _measured(table: Operations, made: OperationGraph) -> Floats:
    """Durations; of operations that wait for others, what is left when all have started."""
    times = table.duration.copy()
    for members, common in zip(made.groups, made.common, strict=True):
        own = list(members)
        last = table.start[own].max(axis=0)
        if common:
            last = np.broadcast_to(last.max(axis=0), last.shape)
        times[own] = table.end[own] - last
    waited = made.group_of != ALONE
    times[waited] = np.where(times[waited] <= _CLAMP_NS, 0, times[waited])
    return times


def _delays(table: Operations, made: OperationGraph) -> Floats:
    """How long after the last it waited for an operation started."""
    ready = np.broadcast_to(table.start.min(axis=(0, 1)), table.start.shape).copy()
    first, before = made.before
    for op in range(len(table.ops)):
        own = before[first[op] : first[op + 1]]
        if len(own):
            ready[op] = table.end[own].max(axis=0)
    found = table.start - ready
    return np.where(found <= _CLAMP_NS, 0, found)


def stragglers(
    model: Model, *, steps: list[int] | None = None, threshold: float = THRESHOLD
) -> Stragglers:
    """Analyse the chosen steps of a table."""
    model = model if steps is None else chosen(model, steps)
    measured, ideal = model.measured, model.ideal_times()
    nodelay, best = model.replay(measured), model.replay(ideal)
    base = model.table.end.max(axis=(0, 1)) - model.table.start.min(axis=(0, 1))
    blocking = launch = None
    if nodelay.whole.mean() / best.optimizer.mean() >= threshold:
        blocking = {
            kind: _attributed(model, sets, ideal, best) for kind, sets in _sets(model).items()
        }
    if base.mean() / nodelay.optimizer.mean() >= threshold:
        launch = {
            kind: _launched(model, sets, nodelay)
            for kind, sets in _sets(model, first_op=True).items()
        }
    table = model.table
    last = np.array([op.stage == table.stages - 1 for op in table.ops])
    whole = np.broadcast_to(last[:, None, None], measured.shape)
    worst: Effect | None = None
    worst_ranks: tuple[int, ...] = ()
    if blocking is not None:
        worst_ranks = _worst(table, blocking)
        worst = _effect(model, _of_ranks(table, worst_ranks), ideal, (nodelay, best))
    return Stragglers(
        table=table,
        chosen=table.steps,
        base=base,
        nodelay=nodelay,
        ideal=best,
        ideal_ns=model.ideal(),
        blocking=blocking,
        launch=launch,
        last_stage=_effect(model, whole, ideal, (nodelay, best)),
        worst=worst,
        worst_ranks=worst_ranks,
    )


def chosen(model: Model, steps: list[int]) -> Model:
    """The model of some steps; FastcommError where the table lacks one."""
    absent = sorted(set(steps) - set(model.table.steps))
    if absent:
        raise FastcommError(f"step {absent[0]} is not in the table, or lacks operations")
    return model.only([model.table.steps.index(step) for step in sorted(set(steps))])


def _sets(model: Model, *, first_op: bool = False) -> dict[str, dict[str, Bools]]:
    """Operations by data rank, stage and type, as masks in the shape of the times."""
    shape = model.measured.shape
    ops = model.table.ops
    merged = {
        f"{way}-{what}": f"{way}-pp-comm"
        for way in ("forward", "backward")
        for what in ("send", "recv")
    }
    kinds = [merged.get(op.optype, op.optype) for op in ops]
    if first_op:
        kinds = [
            "first-op"
            if op.seq == 0 and op.optype == ("forward-recv" if op.stage else "forward-compute")
            else kind
            for op, kind in zip(ops, kinds, strict=True)
        ]

    def by_op(keys: list[str]) -> dict[str, Bools]:
        column = np.array(keys)
        return {
            key: np.broadcast_to((column == key)[:, None, None], shape)
            for key in dict.fromkeys(keys)
        }

    ranks = np.arange(shape[1])
    return {
        "dp_rank": {
            str(d): np.broadcast_to((ranks == d)[None, :, None], shape) for d in ranks.tolist()
        },
        "stage": by_op([str(op.stage) for op in ops]),
        "optype": by_op(kinds),
    }


def _attributed(
    model: Model, sets: Mapping[str, Bools], ideal: Floats, best: Replayed
) -> Attribution:
    """The slowdown that each set alone brings."""
    replayed = {
        key: model.replay(np.where(own, model.measured, ideal)).optimizer
        for key, own in sets.items()
    }
    return _ratios(replayed, best.optimizer)


def _launched(model: Model, sets: Mapping[str, Bools], nodelay: Replayed) -> Attribution:
    """The slowdown that the launch delays of each set alone bring."""
    replayed = {
        key: model.replay(model.measured, np.where(own, model.delays, 0.0)).optimizer
        for key, own in sets.items()
    }
    return _ratios(replayed, nodelay.optimizer)


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


def _scores(table: Operations, blocking: Mapping[str, Attribution]) -> Floats:
    by_rank, by_stage = blocking["dp_rank"].mean, blocking["stage"].mean
    ranks = np.array([by_rank[str(d)] for d in range(table.ranks)])
    stages = np.array([by_stage[str(s)] for s in range(table.stages)])
    found: Floats = np.minimum(ranks[:, None], stages[None, :])
    return found


def _worst(table: Operations, blocking: Mapping[str, Attribution]) -> tuple[int, ...]:
    """The three percent of the ranks with the largest scores; a tie goes to the lower rank."""
    score, rank = _scores(table, blocking).ravel(), table.rank_of.ravel()
    order = np.lexsort((rank, -score))
    return tuple(rank[order[: ceil(len(rank) * _WORST_PERCENT / 100)]].tolist())


def _of_ranks(table: Operations, ranks: tuple[int, ...]) -> Bools:
    stage = np.array([op.stage for op in table.ops])
    own = np.isin(table.rank_of, ranks)[:, stage].T
    return np.broadcast_to(own[:, :, None], table.start.shape)


def _effect(
    model: Model, own: Bools, ideal: Floats, known: tuple[Replayed, Replayed]
) -> Effect:
    removed = model.replay(np.where(own, ideal, model.measured))
    added = model.replay(np.where(own, model.measured, ideal))
    return Effect(
        measured=float(known[0].whole.mean()),
        ideal=float(known[1].whole.mean()),
        removed=float(removed.whole.mean()),
        added=float(added.whole.mean()),
    )
