"""Model of a production job: replays its steps with measured, ideal or changed durations.

The graph is built once, from data rank 0 in one step, and applies to all data ranks and steps.

Times are float64 ns, and arrays of them are ops x data ranks x steps. Replayed steps can be
written as a Chrome trace.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.edits import Edit, Replacement, durations_after, select
from fastcomm.graph.graph import acyclic_order
from fastcomm.stragglers.operations import POINT_TO_POINT, Op, OperationTable
from fastcomm.trace.run_traces import ranges
from fastcomm_kernels.arrays import Flags, Floats, Ints
from fastcomm_kernels.graph import index
from fastcomm_kernels.replay import ALONE, simulate

_EPSILON_NS = 5e4  # tolerance for the clocks of transfers and computations
_COMPUTE = ("forward-compute", "backward-compute")
_GATHER, _SCATTER, _SEPARATE = (
    "params-all-gather",
    "grads-reduce-scatter",
    "separate-grads-all-reduce",
)
_EMBEDDING, _CLIP = "embedding-grads-all-reduce", "optimizer-clip-main-grad"
_LAYERNORM, _OPTIMIZER, _GC = "layernorm-grads-all-reduce", "optimizer", "gc"
_TOWARDS = {"forward-send": 1, "backward-recv": 1, "forward-recv": -1, "backward-send": -1}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationGraph:
    """Dependencies between operations, which are numbered as in the table.

    A group is a set of operations that transfer nothing until all of them have started.
    """

    edges: tuple[tuple[int, int], ...]  # (operation, one that waits for its end)
    groups: tuple[tuple[int, ...], ...]
    common: tuple[bool, ...]  # by group, whether all data ranks belong to it
    group_of: Ints  # by operation, or ALONE
    order: Ints  # operations, in an order in which they can be replayed
    before: tuple[Ints, Ints]  # by operation the first position of its predecessors, and these
    closes: Ints  # by position in `order`, see `_order`
    members: tuple[Ints, Ints, Ints]  # `groups` and `common` in the form of the kernel


@dataclass(slots=True)
class _Builder:
    """A graph under construction, to which rules add edges and groups."""

    ops: tuple[Op, ...]
    use_dp: bool  # whether parameters and gradients are exchanged
    overlap: bool  # whether gradients are exchanged during the backward pass
    stages: int
    chunks: int  # of the model on each stage
    edges: dict[tuple[int, int], None] = field(default_factory=dict)
    no_op: set[int] = field(default_factory=set)  # sends and receives that carry nothing
    groups: list[tuple[int, ...]] = field(default_factory=list)
    common: list[bool] = field(default_factory=list)
    of: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def chain(self, ops: Sequence[int]) -> None:
        """Make each operation wait for the one before it."""
        self.edges.update(dict.fromkeys(pairwise(ops)))

    def edge(self, before: int, after: int) -> None:
        """Make operation `after` wait for `before`."""
        self.edges[before, after] = None

    def get(self, stage: int, optype: str) -> list[int]:
        """Return the operations of a type on a stage, by start."""
        return self.of.get((stage, optype), [])

    def ordered(self, stage: int, *optypes: str) -> list[int]:
        """Return the operations of several types on a stage, by start."""
        operations = [op for optype in optypes for op in self.get(stage, optype)]
        return sorted(operations, key=lambda i: _key(self.ops[i]))


def _key(op: Op) -> tuple[float, int, str]:
    return op.start, op.seq, op.optype


def graph(table: OperationTable, *, shards: int = 1) -> OperationGraph:
    """Build the dependency graph of a table.

    Parameters
    ----------
    table
        The operations; their times in the step of `Op` tell their order.
    shards
        `dsp_size` of the job's description.

    Raises
    ------
    FastcommError
        If operations are missing that every step has, sends and receives do not match, or the
        dependencies have a cycle.

    """
    ops = table.ops
    builder = _Builder(
        ops=ops,
        use_dp=table.ranks * shards > 1,
        overlap=any(op.optype == _SEPARATE for op in ops),
        stages=table.stages,
        chunks=max(op.mc for op in ops) + 1,
    )
    for i in sorted(range(len(ops)), key=lambda i: _key(ops[i])):
        builder.of[ops[i].stage, ops[i].optype].append(i)
    if not any(op.optype == _OPTIMIZER for op in ops):
        raise FastcommError(
            f"the table has no operation {_OPTIMIZER!r}, with which a step ends. Record it"
        )
    for stage in range(table.stages):
        _stage(builder, stage)
    _pairs(builder)
    _collectives(builder)
    return _finished(builder)


def _stage(builder: _Builder, stage: int) -> None:
    """Add all edges between operations of one stage."""
    compute = builder.ordered(stage, *_COMPUTE)
    if not compute:
        raise FastcommError(
            f"stage {stage} has no operation forward-compute or backward-compute"
        )
    for optype in POINT_TO_POINT:
        _match(builder, stage, optype)
        builder.chain(builder.get(stage, optype))
    builder.chain(compute)
    _first_backward(builder, stage, compute)
    if builder.use_dp:
        builder.chain(builder.ordered(stage, _GATHER, _SCATTER))
        _chunks(builder, stage)
    _tail(builder, stage, max(compute, key=lambda i: builder.ops[i].end))


def _match(builder: _Builder, stage: int, optype: str) -> None:
    """Connect sends and receives with the computations whose data they carry.

    Sends and receives that carry nothing become no-ops.
    """
    ops, direction = builder.ops, optype.partition("-")[0]
    compute = sorted(builder.get(stage, f"{direction}-compute"), key=lambda i: ops[i].seq)
    candidates = builder.get(stage, optype)
    receives = optype.endswith("recv")
    if not candidates:
        return
    latest = max((ops[i].start for i in compute), default=-np.inf) + _EPSILON_NS
    earliest = min((ops[i].end for i in compute), default=np.inf) - _EPSILON_NS
    transfers = [
        i
        for i in candidates
        if (ops[i].start <= latest if receives else ops[i].end >= earliest)
    ]
    builder.no_op |= set(candidates) - set(transfers)
    skipped = _skipped(builder, stage, optype, len(transfers), len(compute))
    for i, op in enumerate(transfers):
        k = i + (skipped if receives else 0)
        reached = ops[compute[k]].gmc + _TOWARDS[optype]
        if not 0 <= reached < builder.chunks * builder.stages:
            builder.no_op.add(op)
        if not receives:
            builder.edge(compute[k], op)
            continue
        builder.edge(op, compute[k])
        if k > 0:
            builder.edge(compute[k - 1], op)


def _skipped(builder: _Builder, stage: int, optype: str, transfers: int, compute: int) -> int:
    """Return the number of computations at the beginning that have no such transfer: 0 or 1."""
    is_end = stage in {0, builder.stages - 1}
    if transfers == compute or (is_end and transfers == 0):
        return 0
    if is_end and transfers == compute - 1:
        return 1
    raise FastcommError(
        f"stage {stage}: {transfers} {optype} for {compute} computations of the same direction"
    )


def _first_backward(builder: _Builder, stage: int, compute: list[int]) -> None:
    """Make the first backward transfers wait for a forward computation.

    That is the one before the last forward computation before the first backward computation.
    """
    kinds = [builder.ops[i].optype for i in compute]
    first = kinds.index(_COMPUTE[1]) if _COMPUTE[1] in kinds else 0
    if first >= 2:  # noqa: PLR2004
        for optype in ("backward-recv", "backward-send"):
            for op in builder.get(stage, optype):
                if builder.ops[op].seq == 0:
                    builder.edge(compute[first - 2], op)


def _chunks(builder: _Builder, stage: int) -> None:
    """Add the edges of gathered parameters and scattered gradients of a stage, per chunk.

    The first forward pass of a chunk waits for its last gather; with overlap, the first scatter
    waits for its last backward pass.
    """
    ops = builder.ops
    for chunk in {ops[i].mc for i in builder.ordered(stage, *_COMPUTE)}:

        def of(optype: str, chunk: int = chunk) -> list[int]:
            return [i for i in builder.get(stage, optype) if ops[i].mc == chunk]

        gathers, forwards = of(_GATHER), of(_COMPUTE[0])
        if gathers and forwards:
            last = max(gathers, key=lambda i: ops[i].seq)
            builder.edge(last, min(forwards, key=lambda i: ops[i].start))
        scatters, backwards = of(_SCATTER), of(_COMPUTE[1])
        if builder.overlap and scatters and backwards:
            first = min(scatters, key=lambda i: ops[i].seq)
            builder.edge(max(backwards, key=lambda i: ops[i].end), first)


def _tail(builder: _Builder, stage: int, last: int) -> None:
    """Chain the operations of a stage after `last`, its last computation."""
    scatters = sorted(builder.get(stage, _SCATTER), key=lambda i: builder.ops[i].seq)
    ends = builder.get(stage, _EMBEDDING)[:1] if stage in {0, builder.stages - 1} else []
    middle = [*builder.get(stage, _LAYERNORM)[:1], *ends]
    if builder.use_dp and builder.overlap:
        middle += builder.get(stage, _SEPARATE)
    elif builder.use_dp:
        middle += scatters
    closing = [*builder.get(stage, _CLIP)[:1], *builder.get(stage, _OPTIMIZER)[:1]]
    builder.chain([last, *builder.get(stage, _GC)[:1], *middle, *closing])
    if builder.use_dp and builder.overlap and scatters and (middle or closing):
        builder.edge(scatters[-1], (middle or closing)[0])


def _pairs(builder: _Builder) -> None:
    """Group the j-th send of a stage with the j-th receive of the next stage."""
    for direction, towards in (("forward", 1), ("backward", -1)):
        for stage in range(builder.stages):
            other = (stage + towards) % builder.stages
            sends, receives = (
                [i for i in builder.get(at, f"{direction}-{end}") if i not in builder.no_op]
                for at, end in ((stage, "send"), (other, "recv"))
            )
            if len(sends) != len(receives):
                raise FastcommError(
                    f"stage {stage} has {len(sends)} {direction}-send that reach stage "
                    f"{other}, which has {len(receives)} {direction}-recv"
                )
            builder.groups += list(zip(sends, receives, strict=True))
    builder.groups += [(i,) for i in sorted(builder.no_op)]
    builder.common += [False] * len(builder.groups)


def _collectives(builder: _Builder) -> None:
    """Group the collectives in which more than one rank participates."""
    for i, op in enumerate(builder.ops):
        if builder.use_dp and op.optype in {_GATHER, _SCATTER, _SEPARATE}:
            builder.groups.append((i,))
            builder.common.append(True)
    ends = sorted({0, builder.stages - 1})
    embedding = [i for stage in ends for i in builder.get(stage, _EMBEDDING)[:1]]
    clip = [i for stage in range(builder.stages) for i in builder.get(stage, _CLIP)[:1]]
    for members, common in ((embedding, False), (clip, True)):
        if members:
            builder.groups.append(tuple(members))
            builder.common.append(common)


def _finished(builder: _Builder) -> OperationGraph:
    """Return the finished graph: edges (operation, later operation), groups, and their order.

    Operations are positions in `builder.ops`. Those of a group transfer nothing until all have
    started. Raises `FastcommError` if the edges have a cycle.
    """
    size = len(builder.ops)
    group_of = np.full(size, ALONE, np.int64)
    for g, members in enumerate(builder.groups):
        group_of[list(members)] = g
    order, closes = _order(builder, group_of)
    sources, targets = np.array(list(builder.edges), np.int32).reshape(-1, 2).T
    first, edge = index(targets, size)
    bounds = np.cumsum([0, *map(len, builder.groups)])
    flat = [op for members in builder.groups for op in members]
    return OperationGraph(
        edges=tuple(builder.edges),
        groups=tuple(builder.groups),
        common=tuple(builder.common),
        group_of=group_of,
        order=order,
        before=(first.astype(np.int64), sources[edge].astype(np.int64)),
        closes=closes,
        members=(bounds, np.array(flat, np.int64), np.array(builder.common, np.int64)),
    )


def _order(builder: _Builder, group_of: Ints) -> tuple[Ints, Ints]:
    """Return the operations in topological order, and the group that each closes.

    The last member of a group in this order closes the group. Operations in no group close
    `ALONE`, all other members ``ALONE - 1``. Operations that wait for a member of a group wait
    for all its members to start: a group is a node of its own, after its members.
    """
    size, groups = len(builder.ops), len(builder.groups)
    ends = np.where(group_of != ALONE, size + group_of, np.arange(size))
    before, after = np.array(list(builder.edges), np.int64).reshape(-1, 2).T
    members = np.flatnonzero(group_of != ALONE)
    names = [op.name for op in builder.ops] + [f"group {g}" for g in range(groups)]
    source = np.concatenate((ends[before], members))
    target = np.concatenate((after, ends[members]))
    order = acyclic_order(source, target, names).astype(np.int64)
    order = order[order < size]
    group = group_of[order]
    last = np.full(groups + 1, -1)  # by group, the place of its last member in the order
    np.maximum.at(last, group, np.arange(size))
    closes = np.where((group != ALONE) & (np.arange(size) != last[group]), ALONE - 1, group)
    return order, closes.astype(np.int64)


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
