"""Dependency graph of a step of a production job: edges, and groups that start together.

The graph is built once, from data rank 0 in one step, and applies to all data ranks and steps.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from fastcomm.errors import FastcommError
from fastcomm.graph import acyclic_order
from fastcomm.stragglers.operations import POINT_TO_POINT, Op, OperationTable
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.graph import index
from fastcomm_kernels.replay import ALONE

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
