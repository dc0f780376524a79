"""Model of a production job: replays its steps with measured, ideal or changed durations.

Times are float64 ns, and arrays of them are ops x data ranks x steps. Replayed steps can be
written as a Chrome trace.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.graph.edits import Edit
from fastcomm.graph.selection import Replacement, durations_after, select
from fastcomm.stragglers.operation_graph import OperationGraph, graph
from fastcomm.stragglers.operations import POINT_TO_POINT, OperationTable
from fastcomm.trace.run import ranges
from fastcomm_kernels.arrays import Flags, Floats
from fastcomm_kernels.replay import ALONE, simulate

_CLAMP_NS = -1e7  # shorter times are errors of clocks, and become 0
_BATCH = 1 << 16  # durations in one call of the kernel
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
    """Step times in ns: until the end of the last operation, and of the last optimizer."""

    whole: Floats
    optimizer: Floats


def joined(parts: Iterable[JobTimes]) -> JobTimes:
    """Concatenate step times of consecutive parts of a job."""
    times = list(parts)
    return JobTimes(
        whole=np.concatenate([part.whole for part in times]),
        optimizer=np.concatenate([part.optimizer for part in times]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """A table of operations with its dependency graph, which replays any durations."""

    table: OperationTable
    graph: OperationGraph
    measured: Floats  # durations, of collectives and messages without the wait for others
    delays: Floats  # from the end of the last predecessor to the start
    ideal_ns: Mapping[str, float]  # by type: the median of transfers, the mean of computation

    @classmethod
    def of(cls, table: OperationTable, *, shards: int = 1) -> "JobModel":
        """Build the model of a table; `shards` is the `dsp_size` of the job's description."""
        operations = graph(table, shards=shards)
        measured = _measured(table, operations)
        return cls(
            table=table,
            graph=operations,
            measured=measured,
            delays=_delays(table, operations),
            ideal_ns=_ideal(table, measured),
        )

    def only(self, at: list[int]) -> "JobModel":
        """Return the model of the steps at some positions, with ideal times of their own."""
        part = self._at(at, tuple(self.table.steps[i] for i in at))
        return replace(part, ideal_ns=_ideal(part.table, part.measured))

    def parts(self) -> "Iterator[JobModel]":
        """Yield models of a few steps at a time, with the ideal times of the whole table."""
        for at in _batches(self.measured.shape):
            yield self._at(at, self.table.steps[at])

    def _at(self, at: list[int] | slice, steps: tuple[int, ...]) -> "JobModel":
        """Return the model of some steps, with unchanged ideal times.

        `at` are their positions in this model, `steps` their numbers.
        """
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
        """Return which operations have a type, one value per operation."""
        return _of_type(self.table, optype)

    def ideal_times(self) -> Floats:
        """Return the ideal duration of every operation in ns, ops x data ranks x steps."""
        column = np.array([self.ideal_ns[op.optype] for op in self.table.ops])
        return np.broadcast_to(column[:, None, None], self.measured.shape)

    def times(self, times: Floats, delays: Floats | None = None) -> tuple[Floats, Floats]:
        """Replay all operations with durations `times` and launch delays, 0 by default.

        Returns start and end of each operation, in the shape of `times`.
        """
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
        """Replay all steps with some durations.

        Parameters
        ----------
        times, delays
            Durations and launch delays in ns, ops x data ranks x steps; without `delays` 0.

        """
        return joined(
            self._replay(times[:, :, at], None if delays is None else delays[:, :, at])
            for at in _batches(times.shape)
        )

    def _replay(self, times: Floats, delays: Floats | None) -> JobTimes:
        """Replay durations in ns, with launch delays or none, and return the step times."""
        start, end = self.times(times, delays)
        last, first = end.max(axis=1), start.min(axis=(0, 1))
        optimizer = self.of_type("optimizer")
        return JobTimes(whole=last.max(axis=0) - first, optimizer=last[optimizer].max(axis=0))


def _batches(shape: tuple[int, ...]) -> list[slice]:
    """Split the steps into batches for one call of the kernel; steps are independent.

    The memory of a small batch is reused. Memory for all steps at once would be cleared by the
    operating system in each call, which takes longer than the replay.
    """
    width = max(1, _BATCH // (shape[0] * shape[1]))
    return [slice(at, at + width) for at in range(0, shape[2], width)]


def _of_type(table: OperationTable, optype: str) -> Flags:
    # Not compared as a NumPy array of strings, which drops NUL characters at their ends.
    return np.array([op.optype == optype for op in table.ops], np.bool_)


def _ideal(table: OperationTable, measured: Floats) -> dict[str, float]:
    """Return the ideal duration of each type of operation."""
    return {
        optype: float(
            (np.median if optype in _MEDIAN else np.mean)(measured[_of_type(table, optype)])
        )
        for optype in sorted({op.optype for op in table.ops})
    }


def _measured(table: OperationTable, graph: OperationGraph) -> Floats:
    """Return durations; operations of a group count from the start of its last member."""
    times = table.duration.copy()
    for members, common in zip(graph.groups, graph.common, strict=True):
        own = list(members)
        last = table.start[own].max(axis=0)
        if common:
            last = np.broadcast_to(last.max(axis=0), last.shape)
        times[own] = table.end[own] - last
    waited = graph.group_of != ALONE
    times[waited] = np.where(times[waited] <= _CLAMP_NS, 0, times[waited])
    return times


def _delays(table: OperationTable, graph: OperationGraph) -> Floats:
    """Return the time from the end of the last predecessor to the start of each operation."""
    ready = np.broadcast_to(table.start.min(axis=(0, 1)), table.start.shape).copy()
    first, before = graph.before
    for op in range(len(table.ops)):
        own = before[first[op] : first[op + 1]]
        if len(own):
            ready[op] = table.end[own].max(axis=0)
    delays = table.start - ready
    return np.where(delays <= _CLAMP_NS, 0, delays)


def chosen(model: JobModel, steps: list[int]) -> JobModel:
    """Return the model of some steps; raise ConfigError if the table does not have one."""
    absent = sorted(set(steps) - set(model.table.steps))
    if absent:
        present = ranges(list(model.table.steps))
        raise ConfigError(
            f"step {absent[0]} is not in the table, or incomplete. Complete steps: {present}"
        )
    return model.only([model.table.steps.index(step) for step in sorted(set(steps))])


class TableOperations:
    """The operations of a job's table, as edits select them."""

    def __init__(self, model: JobModel) -> None:
        """Take the model of the table."""
        self.model, table = model, model.table
        types = dict.fromkeys(
            name for op in table.ops for name in (op.optype, op.reported_type)
        )
        has_compute = any(_kind(op.optype) == "compute" for op in table.ops)
        stages = sorted({op.stage for op in table.ops})
        self.targets: dict[str, Sequence[str]] = {
            "all": ("all",),
            **({"compute": ("compute",)} if has_compute else {}),
            "comm": ("comm",),
            "op": (*types, *(name for op in table.ops if (name := op.name) not in types)),
            "rank": tuple(map(str, np.unique(table.rank_of).tolist())),
            "dp_rank": tuple(map(str, range(table.ranks))),
            "stage": tuple(map(str, stages)),
            "step": tuple(map(str, table.steps)),
        }

    def rows(self, key: str, values: Collection[str] | None) -> Flags:
        """Return the operations whose `key` has one of the values; None is every value.

        The shape broadcasts to (operations, data ranks, steps).
        """
        table = self.model.table
        if key in ("all", "compute", "comm"):
            kinds = [key in ("all", _kind(op.optype)) for op in table.ops]
            return np.array(kinds, np.bool_)[:, None, None]
        chosen = set(self.targets[key] if values is None else values)
        if key == "op":
            named = [bool({op.optype, op.reported_type, op.name} & chosen) for op in table.ops]
            return np.array(named, np.bool_)[:, None, None]
        return table.rows(key, [int(value) for value in chosen])


def _kind(optype: str) -> str:
    """Return "compute" or "comm", as the study divides types of operations."""
    return "comm" if optype in _MEDIAN else "compute"


def changed_times(model: JobModel, edits: Sequence[Edit]) -> Floats:
    """Return the measured durations after edits, which apply in their order.

    ``heal rank:6`` gives operations the median duration of their like on other data ranks, and
    ``set stage:3=ideal`` the ideal duration of their type.

    Parameters
    ----------
    model
        The job.
    edits
        The edits.

    Returns
    -------
    ndarray
        ops x data ranks x steps, ns.

    Raises
    ------
    ConfigError
        If an edit is not possible, or selects no operation, or sends without receives.

    """
    operations, ideal = TableOperations(model), model.ideal_times()
    replacements: dict[str, Replacement] = {
        "ideal": lambda _, __: ideal,
        "heal": partial(_as_peers, model),
    }
    durations = durations_after(edits, operations, model.measured, replacements)
    is_send = np.array([op.optype.endswith("-send") for op in model.table.ops])[:, None, None]
    targets = {edit.target for edit in edits}
    for edit in edits:
        if (select(operations, edit.target) & ~is_send).any():
            continue
        # Sends that change with their receives are half of a change, and harmless.
        if edit.target.replace("-send", "-recv") not in targets:
            raise ConfigError(
                f"{edit}: changes nothing: operations wait for receives, not for sends; name "
                "the receives, or both, as in op:forward-pp-comm"
            )
    return durations


def _as_peers(model: JobModel, durations: Floats, mask: Flags) -> Floats:
    """Return the median duration of each operation on the data ranks that are not selected."""
    whole = np.broadcast_to(mask, durations.shape)
    if whole.all(axis=1).any():
        raise ConfigError(
            "heal: no peers: every data rank is selected at some stage; name single ranks, as "
            f"in rank:{int(model.table.rank_of.max())}"
        )
    others = np.where(whole, np.nan, durations)
    return np.broadcast_to(np.nanmedian(others, axis=1, keepdims=True), durations.shape)


_US = 1e3
_SPACE = 1.1  # distance between the starts of steps in a trace, in lengths of a step
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
    """Return a Chrome trace of all steps, replayed with other durations.

    Parameters
    ----------
    model
        The job.
    changed_times
        ops x data ranks x steps, ns.

    """
    start, end = model.times(changed_times)
    is_grouped = (model.graph.group_of != ALONE)[:, None, None]
    # Operations of a group are drawn without their wait for each other.
    begin = np.where(is_grouped, end - np.maximum(changed_times, 0), start)
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
    """Return the metadata events that name processes and threads."""
    rows: list[dict[str, Any]] = []
    for rank in range(model.table.ranks):
        metadata: dict[str, Any] = {"ph": "M", "pid": rank}
        rows.append({**metadata, "name": "process_name", "args": {"name": f"data rank {rank}"}})
        for stage in range(model.table.stages):
            for kind, label in enumerate(_CLASSES):
                name = f"rank {int(model.table.rank_of[rank, stage])} {label}"
                tid = _thread(model, rank, stage, kind)
                rows.append(
                    {**metadata, "name": "thread_name", "tid": tid, "args": {"name": name}}
                )
    return rows
