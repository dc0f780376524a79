"""A table of operations with its graph: what its steps take with any times of operations.

Times are float64 nanoseconds, arrays are ops x data ranks x steps.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.errors import FastcommError
from fastcomm.stragglers.operation_graph import OperationGraph, graph
from fastcomm.stragglers.operations import OperationTable
from fastcomm_kernels.arrays import Flags, Floats
from fastcomm_kernels.simulate import ALONE, simulate

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
        """The same for some of the steps, by position."""
        table = replace(
            self.table,
            start=self.table.start[:, :, at],
            end=self.table.end[:, :, at],
            duration=self.table.duration[:, :, at],
            steps=tuple(self.table.steps[i] for i in at),
        )
        measured = self.measured[:, :, at]
        return replace(
            self,
            table=table,
            measured=measured,
            delays=self.delays[:, :, at],
            ideal_ns=_ideal(table, measured),
        )

    def parts(self) -> "Iterator[JobModel]":
        """A few steps at a time, with the ideal times of all; nothing is copied."""
        for at in _few(self.measured.shape):
            table = replace(
                self.table,
                start=self.table.start[:, :, at],
                end=self.table.end[:, :, at],
                duration=self.table.duration[:, :, at],
                steps=self.table.steps[at],
            )
            measured, delays = self.measured[:, :, at], self.delays[:, :, at]
            yield replace(self, table=table, measured=measured, delays=delays)

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
    found = table.start - ready
    return np.where(found <= _CLAMP_NS, 0, found)


def chosen(model: JobModel, steps: list[int]) -> JobModel:
    """The model of some steps; FastcommError where the table lacks one."""
    absent = sorted(set(steps) - set(model.table.steps))
    if absent:
        raise FastcommError(f"step {absent[0]} is not in the table, or lacks operations")
    return model.only([model.table.steps.index(step) for step in sorted(set(steps))])
