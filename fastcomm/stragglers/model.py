"""A table of operations with its graph: what its steps take with any times of operations.

Times are float64 nanoseconds, arrays are ops x data ranks x steps. Changed steps can be written
as a Chrome trace.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.edits import DurationChange
from fastcomm.stragglers.operation_graph import OperationGraph, graph
from fastcomm.stragglers.operations import POINT_TO_POINT, OperationTable
from fastcomm_kernels.arrays import Flags, Floats
from fastcomm_kernels.replay import ALONE, simulate

_CLAMP_NS = -1e7
_AT_ONCE = 1 << 16  # times in one call of the kernel
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Nanoseconds of each step: to the end of the last operation, and of the last optimizer."""

    whole: Floats
    optimizer: Floats


def joined(parts: Iterable[JobTimes]) -> JobTimes:
    """The steps of all, one behind the other."""
    every = list(parts)
    return JobTimes(
        whole=np.concatenate([each.whole for each in every]),
        optimizer=np.concatenate([each.optimizer for each in every]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """A table with its graph: replays any times of its operations."""

    table: OperationTable
    graph: OperationGraph
    measured: Floats
    delays: Floats
    ideal_ns: Mapping[str, float]  # by type: the median of transfers, the mean of computation

    @classmethod
    def of(cls, table: OperationTable, *, shards: int = 1) -> "JobModel":
        """Make the graph and take transfers and launch delays from the whole table."""
        made = graph(table, shards=shards)
        measured = _measured(table, made)
        return cls(
            table=table,
            graph=made,
            measured=measured,
            delays=_delays(table, made),
            ideal_ns=_ideal(table, measured),
        )

    def only(self, at: list[int]) -> "JobModel":
        """Return the model of some of the steps, by position, with ideal times of their own."""
        chosen = self._at(at, tuple(self.table.steps[i] for i in at))
        return replace(chosen, ideal_ns=_ideal(chosen.table, chosen.measured))

    def parts(self) -> "Iterator[JobModel]":
        """Yield a few steps at a time, with the ideal times of all; nothing is copied."""
        for at in _few(self.measured.shape):
            yield self._at(at, self.table.steps[at])

    def _at(self, at: list[int] | slice, steps: tuple[int, ...]) -> "JobModel":
        """Return the model of steps at some places, with the ideal times of all."""
        table = replace(
            self.table,
            start=self.table.start[:, :, at],
            end=self.table.end[:, :, at],
            duration=self.table.duration[:, :, at],
            steps=steps,
        )
        measured, delays = self.measured[:, :, at], self.delays[:, :, at]
        return replace(self, table=table, measured=measured, delays=delays)

    def of_type(self, optype: str) -> Flags:
        """Which operations are of a type."""
        return _of_type(self.table, optype)

    def ideal_times(self) -> Floats:
        """The ideal of every operation, in the shape of what was measured."""
        column = np.array([self.ideal_ns[op.optype] for op in self.table.ops])
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

    def replay(self, times: Floats, delays: Floats | None = None) -> JobTimes:
        """Step times if the operations took `times`."""
        return joined(
            self._replay(times[:, :, at], None if delays is None else delays[:, :, at])
            for at in _few(times.shape)
        )

    def _replay(self, times: Floats, delays: Floats | None) -> JobTimes:
        start, end = self.times(times, delays)
        last, first = end.max(axis=1), start.min(axis=(0, 1))
        optimizer = self.of_type("optimizer")
        return JobTimes(whole=last.max(axis=0) - first, optimizer=last[optimizer].max(axis=0))


def _few(shape: tuple[int, ...]) -> list[slice]:
    """Steps that are replayed in one call: they know nothing of each other.

    What a few need is memory that is used again. That of all the system would have to clear
    each time, which takes longer than the replay.
    """
    width = max(1, _AT_ONCE // (shape[0] * shape[1]))
    return [slice(at, at + width) for at in range(0, shape[2], width)]


def _of_type(table: OperationTable, optype: str) -> Flags:
    # Not as an array of texts: it would cut off what is 0 at their ends.
    return np.array([op.optype == optype for op in table.ops], np.bool_)


def _ideal(table: OperationTable, measured: Floats) -> dict[str, float]:
    """One time for each type of operation."""
    return {
        each: float(
            (np.median if each in _MEDIAN else np.mean)(measured[_of_type(table, each)])
        )
        for each in sorted({op.optype for op in table.ops})
    }


def _measured(table: OperationTable, made: OperationGraph) -> Floats:
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


def _delays(table: OperationTable, made: OperationGraph) -> Floats:
    """How long after the last it waited for an operation started."""
    ready = np.broadcast_to(table.start.min(axis=(0, 1)), table.start.shape).copy()
    first, before = made.before
    for op in range(len(table.ops)):
        own = before[first[op] : first[op + 1]]
        if len(own):
            ready[op] = table.end[own].max(axis=0)
    delays = table.start - ready
    return np.where(delays <= _CLAMP_NS, 0, delays)


def chosen(model: JobModel, steps: list[int]) -> JobModel:
    """The model of some steps; FastcommError where the table lacks one."""
    absent = sorted(set(steps) - set(model.table.steps))
    if absent:
        raise FastcommError(f"step {absent[0]} is not in the table, or lacks operations")
    return model.only([model.table.steps.index(step) for step in sorted(set(steps))])


_NUMBERS = ("rank", "dp_rank", "stage", "step")


def changed_times(model: JobModel, changes: Mapping[str, DurationChange]) -> Floats:
    """Return the measured times with all changes, one after the other.

    Raises
    ------
    ConfigError
        If a change matches no operation, or changes sends without their receives.

    """
    out, ideal = model.measured.copy(), model.ideal_times()
    for way in ("forward", "backward"):
        if f"{way}-send" in changes and f"{way}-recv" not in changes:
            raise ConfigError(
                f"'{way}-send': operations wait for receives, not for sends; change "
                f"'{way}-pp-comm', which is both"
            )
    for key, change in changes.items():
        chosen = _selected(model, key)
        if not chosen.any():
            raise ConfigError(f"{key!r} matches no operation of the table")
        base = np.where(chosen & change.is_ideal, ideal, out)
        out = np.where(chosen, change.applied(base), out)
    return out


def _selected(model: JobModel, key: str) -> Flags:
    """Which operations a key means: ops x data ranks x steps."""
    chosen = np.ones(model.measured.shape, bool)
    for part in key.split("+"):
        chosen &= _selected_part(model, part.strip(), key)
    return chosen


def _selected_part(model: JobModel, part: str, key: str) -> Flags:
    table = model.table
    word, colon, value = part.partition(":")
    if part == "all":
        return np.ones((1, 1, 1), bool)
    types = {name for op in table.ops for name in (op.optype, op.reported_type)}
    if not colon and part in types:
        named = [part in (op.optype, op.reported_type) for op in table.ops]
        return np.array(named)[:, None, None]
    if word == "op" and value:
        return np.array([op.name == value for op in table.ops])[:, None, None]
    if word in _NUMBERS and value.isdecimal():
        return _numbered(model, word, int(value))
    known = ", ".join(sorted(types))
    raise ConfigError(
        f"{key!r}: found {part!r}, wanted all, a type ({known}), "
        "op:NAME, or rank:, dp_rank:, stage:, step: and a number"
    )


def _numbered(model: JobModel, word: str, number: int) -> Flags:
    """The operations of a rank, a data rank, a stage or a step."""
    table = model.table
    stage = np.array([op.stage for op in table.ops])
    chosen: Flags
    if word == "rank":
        chosen = (table.rank_of[:, stage] == number).T[:, :, None]
    elif word == "stage":
        chosen = (stage == number)[:, None, None]
    elif word == "dp_rank":
        chosen = (np.arange(table.ranks) == number)[None, :, None]
    else:
        chosen = (np.array(table.steps) == number)[None, None, :]
    return chosen


_US = 1e3
_SPACE = 1.1
_CLASSES = ("compute", "pp-comm", "tp-comm", "dp-comm", "misc")
_MISC = 4
_CLASS = {
    **dict.fromkeys(("forward-compute", "backward-compute"), 0),
    **dict.fromkeys((*POINT_TO_POINT, "embedding-grads-all-reduce"), 1),
    "layernorm-grads-all-reduce": 2,
    **dict.fromkeys(
        ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"), 3
    ),
}


def job_trace(model: JobModel, changed_times: Floats) -> dict[str, Any]:
    """All steps, if the operations took `changed_times`."""
    start, end = model.times(changed_times)
    waited = (model.graph.group_of != ALONE)[:, None, None]
    begin = np.where(waited, end - np.maximum(changed_times, 0), start)
    length = end.max(axis=(0, 1)) - start.min(axis=(0, 1))
    offset = np.concatenate(([0.0], np.cumsum(length * _SPACE)[:-1]))
    rows = list(_names(model))
    for step, number in enumerate(model.table.steps):
        ts, dur = begin[:, :, step] + offset[step], (end - begin)[:, :, step]
        rows += [
            {
                "ph": "X",
                "name": op.name,
                "cat": op.optype,
                "ts": float(ts[k, rank]) / _US,
                "dur": float(dur[k, rank]) / _US,
                "pid": rank,
                "tid": _thread(model, rank, op.stage, _CLASS.get(op.optype, _MISC)),
                "args": {"step": number, "stage": op.stage},
            }
            for k, op in enumerate(model.table.ops)
            for rank in range(model.table.ranks)
            if dur[k, rank] > 0
        ]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _thread(model: JobModel, rank: int, stage: int, kind: int) -> int:
    return int(model.table.rank_of[rank, stage]) * len(_CLASSES) + kind


def _names(model: JobModel) -> list[dict[str, Any]]:
    """What processes and threads are called."""
    rows: list[dict[str, Any]] = []
    for rank in range(model.table.ranks):
        labels: dict[str, Any] = {"ph": "M", "pid": rank}
        rows.append({**labels, "name": "process_name", "args": {"name": f"data rank {rank}"}})
        for stage in range(model.table.stages):
            for kind, word in enumerate(_CLASSES):
                name = f"rank {int(model.table.rank_of[rank, stage])} {word}"
                tid = _thread(model, rank, stage, kind)
                rows.append(
                    {**labels, "name": "thread_name", "tid": tid, "args": {"name": name}}
                )
    return rows
