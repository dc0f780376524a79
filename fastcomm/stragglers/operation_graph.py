"""The graph of a step of a production job: which operation waits for which, and which meet.

It is made once, of data rank 0 in one step, and serves all data ranks and steps.
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

_EPSILON_NS = 5e4
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
    """Edges and groups by index of operation, and an order in which all can be replayed."""

    edges: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    common: tuple[bool, ...]
    group_of: Ints
    order: Ints
    before: tuple[Ints, Ints]
    closes: Ints
    members: tuple[Ints, Ints, Ints]


@dataclass(slots=True)
class _Making:
    """The graph while its rules are applied one after the other."""

    ops: tuple[Op, ...]
    use_dp: bool
    overlap: bool
    stages: int
    chunks: int
    edges: dict[tuple[int, int], None] = field(default_factory=dict)
    no_op: set[int] = field(default_factory=set)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    common: list[bool] = field(default_factory=list)
    of: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def chain(self, ops: Sequence[int]) -> None:
        """Each depends on the one before."""
        self.edges.update(dict.fromkeys(pairwise(ops)))

    def edge(self, before: int, after: int) -> None:
        """`after` waits for `before`."""
        self.edges[before, after] = None

    def get(self, stage: int, optype: str) -> list[int]:
        """Operations of a type on a stage, in order."""
        return self.of.get((stage, optype), [])

    def ordered(self, stage: int, *optypes: str) -> list[int]:
        """Operations of several types on a stage, by start."""
        operations = [op for optype in optypes for op in self.get(stage, optype)]
        return sorted(operations, key=lambda i: _key(self.ops[i]))


def _key(op: Op) -> tuple[float, int, str]:
    return op.start, op.seq, op.optype


def graph(table: OperationTable, *, shards: int = 1) -> OperationGraph:
    """Apply the rules; `shards` is the meta's dsp_size."""
    ops = table.ops
    making = _Making(
        ops=ops,
        use_dp=table.ranks * shards > 1,
        overlap=any(op.optype == _SEPARATE for op in ops),
        stages=table.stages,
        chunks=max(op.mc for op in ops) + 1,
    )
    for i in sorted(range(len(ops)), key=lambda i: _key(ops[i])):
        making.of[ops[i].stage, ops[i].optype].append(i)
    if not any(op.optype == _OPTIMIZER for op in ops):
        raise FastcommError(f"no {_OPTIMIZER} in the table: where does a step end?")
    for stage in range(table.stages):
        _stage(making, stage)
    _pairs(making)
    _collectives(making)
    return _finished(making)


def _stage(making: _Making, stage: int) -> None:
    """All edges between operations of one stage."""
    compute = making.ordered(stage, *_COMPUTE)
    if not compute:
        raise FastcommError(f"stage {stage}: no forward-compute and no backward-compute")
    for optype in POINT_TO_POINT:
        _match(making, stage, optype)
        making.chain(making.get(stage, optype))
    making.chain(compute)
    _first_backward(making, stage, compute)
    if making.use_dp:
        making.chain(making.ordered(stage, _GATHER, _SCATTER))
        _chunks(making, stage)
    _tail(making, stage, max(compute, key=lambda i: making.ops[i].end))


def _match(making: _Making, stage: int, optype: str) -> None:
    """Join sends and receives with what they carry; those that carry nothing are no-ops."""
    ops, way = making.ops, optype.partition("-")[0]
    compute = sorted(making.get(stage, f"{way}-compute"), key=lambda i: ops[i].seq)
    candidates = making.get(stage, optype)
    receives = optype.endswith("recv")
    if not candidates:
        return
    latest = max((ops[i].start for i in compute), default=-np.inf) + _EPSILON_NS
    earliest = min((ops[i].end for i in compute), default=np.inf) - _EPSILON_NS
    kept = [
        i
        for i in candidates
        if (ops[i].start <= latest if receives else ops[i].end >= earliest)
    ]
    making.no_op |= set(candidates) - set(kept)
    skipped = _skipped(making, stage, optype, len(kept), len(compute))
    for i, op in enumerate(kept):
        k = i + (skipped if receives else 0)
        reached = ops[compute[k]].gmc + _TOWARDS[optype]
        if not 0 <= reached < making.chunks * making.stages:
            making.no_op.add(op)
        if not receives:
            making.edge(compute[k], op)
            continue
        making.edge(op, compute[k])
        if k > 0:
            making.edge(compute[k - 1], op)


def _skipped(making: _Making, stage: int, optype: str, kept: int, compute: int) -> int:
    """How many computations at the begin have no such operation; an error if it is odd."""
    ends = stage in {0, making.stages - 1}
    if kept == compute or (ends and kept == 0):
        return 0
    if ends and kept == compute - 1:
        return 1
    raise FastcommError(
        f"stage {stage}: {kept} {optype} for {compute} computations of the same direction"
    )


def _first_backward(making: _Making, stage: int, compute: list[int]) -> None:
    """The first backward transfers wait for the forward but one before the first backward."""
    kinds = [making.ops[i].optype for i in compute]
    first = kinds.index(_COMPUTE[1]) if _COMPUTE[1] in kinds else 0
    if first >= 2:  # noqa: PLR2004
        for optype in ("backward-recv", "backward-send"):
            for op in making.get(stage, optype):
                if making.ops[op].seq == 0:
                    making.edge(compute[first - 2], op)


def _chunks(making: _Making, stage: int) -> None:
    """Parameters come before a chunk's first forward, gradients after its last backward."""
    ops = making.ops
    for chunk in {ops[i].mc for i in making.ordered(stage, *_COMPUTE)}:

        def of(optype: str, chunk: int = chunk) -> list[int]:
            return [i for i in making.get(stage, optype) if ops[i].mc == chunk]

        gathers, forwards = of(_GATHER), of(_COMPUTE[0])
        if gathers and forwards:
            last = max(gathers, key=lambda i: ops[i].seq)
            making.edge(last, min(forwards, key=lambda i: ops[i].start))
        scatters, backwards = of(_SCATTER), of(_COMPUTE[1])
        if making.overlap and scatters and backwards:
            first = min(scatters, key=lambda i: ops[i].seq)
            making.edge(max(backwards, key=lambda i: ops[i].end), first)


def _tail(making: _Making, stage: int, last: int) -> None:
    """What follows the last computation, one after the other."""
    scatters = sorted(making.get(stage, _SCATTER), key=lambda i: making.ops[i].seq)
    ends = making.get(stage, _EMBEDDING)[:1] if stage in {0, making.stages - 1} else []
    middle = [*making.get(stage, _LAYERNORM)[:1], *ends]
    if making.use_dp and making.overlap:
        middle += making.get(stage, _SEPARATE)
    elif making.use_dp:
        middle += scatters
    closing = [*making.get(stage, _CLIP)[:1], *making.get(stage, _OPTIMIZER)[:1]]
    making.chain([last, *making.get(stage, _GC)[:1], *middle, *closing])
    if making.use_dp and making.overlap and scatters and (middle or closing):
        making.edge(scatters[-1], (middle or closing)[0])


def _pairs(making: _Making) -> None:
    """The j-th send of a stage meets the j-th receive of the next."""
    for way, towards in (("forward", 1), ("backward", -1)):
        for stage in range(making.stages):
            other = (stage + towards) % making.stages
            sends, receives = (
                [i for i in making.get(at, f"{way}-{what}") if i not in making.no_op]
                for at, what in ((stage, "send"), (other, "recv"))
            )
            if len(sends) != len(receives):
                raise FastcommError(
                    f"stage {stage} has {len(sends)} {way}-send that reach stage {other}, "
                    f"which has {len(receives)} {way}-recv"
                )
            making.groups += list(zip(sends, receives, strict=True))
    making.groups += [(i,) for i in sorted(making.no_op)]
    making.common += [False] * len(making.groups)


def _collectives(making: _Making) -> None:
    """Collectives that more than one rank takes part in."""
    for i, op in enumerate(making.ops):
        if making.use_dp and op.optype in {_GATHER, _SCATTER, _SEPARATE}:
            making.groups.append((i,))
            making.common.append(True)
    ends = sorted({0, making.stages - 1})
    embedding = [i for stage in ends for i in making.get(stage, _EMBEDDING)[:1]]
    clip = [i for stage in range(making.stages) for i in making.get(stage, _CLIP)[:1]]
    for members, common in ((embedding, False), (clip, True)):
        if members:
            making.groups.append(tuple(members))
            making.common.append(common)


def _finished(making: _Making) -> OperationGraph:
    """The rules' edges and groups as arrays."""
    size = len(making.ops)
    group_of = np.full(size, ALONE, np.int64)
    for g, members in enumerate(making.groups):
        group_of[list(members)] = g
    order, closes = _order(making, group_of)
    sources, targets = np.array(list(making.edges), np.int32).reshape(-1, 2).T
    first, edge = index(targets, size)
    bounds = np.cumsum([0, *map(len, making.groups)])
    flat = [op for members in making.groups for op in members]
    return OperationGraph(
        edges=tuple(making.edges),
        groups=tuple(making.groups),
        common=tuple(making.common),
        group_of=group_of,
        order=order,
        before=(first.astype(np.int64), sources[edge].astype(np.int64)),
        closes=closes,
        members=(bounds, np.array(flat, np.int64), np.array(making.common, np.int64)),
    )


def _order(making: _Making, group_of: Ints) -> tuple[Ints, Ints]:
    """Return the operations, each behind those it waits for, and the group that each closes.

    The last of a group to start closes it; `ALONE` is in no group, others have one less. A
    group is a node behind its members: what waits for one of them waits for all to start.
    """
    size, groups = len(making.ops), len(making.groups)
    ends = np.where(group_of != ALONE, size + group_of, np.arange(size))
    before, after = np.array(list(making.edges), np.int64).reshape(-1, 2).T
    members = np.flatnonzero(group_of != ALONE)
    names = [op.name for op in making.ops] + [f"group {g}" for g in range(groups)]
    source = np.concatenate((ends[before], members))
    target = np.concatenate((after, ends[members]))
    order = acyclic_order(source, target, names).astype(np.int64)
    order = order[order < size]
    group = group_of[order]
    last = np.full(groups + 1, -1)  # by group, the place of its last member in the order
    np.maximum.at(last, group, np.arange(size))
    closes = np.where((group != ALONE) & (np.arange(size) != last[group]), ALONE - 1, group)
    return order, closes.astype(np.int64)
