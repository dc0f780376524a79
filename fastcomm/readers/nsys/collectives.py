"""The communication of one process: kernel, launch, call of NCCL, payload, communicator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.communication import Collectives, communication
from fastcomm.readers.nsys import operations as operations_
from fastcomm.readers.nsys.communicators import (
    Communicator,
    Parts,
    find_partners,
    sizes_of_operations,
    sizes_of_parts,
    unsigned,
)
from fastcomm.readers.nsys.events import Creations, ProcessEvents
from fastcomm.readers.nsys.nvtx import NcclRanges, Ranges
from fastcomm.readers.nsys.operations import (
    ANY,
    COLLECTIVE,
    MESSAGES,
    KernelParts,
    NcclOperations,
)
from fastcomm.readers.patterns import Named
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace import events
from fastcomm.trace.columns import alike, lookup
from fastcomm.trace.events import Events
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NULL, Ints

_MESSAGE_KERNELS = ("SendRecv", "AllToAll")


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Where on the host something was launched: the thread's globalTid, or NULL, and when."""

    thread: Ints
    start: Ints
    stop: Ints


def find_collectives(
    events: Events,
    launches: Points,
    replay: Ints,
    ranges: Ranges,
    nccl: NcclRanges,
    communicators: Mapping[int, Communicator],
    options: TraceOptions,
) -> tuple[Collectives, KernelParts]:
    """All communication of a process, with its roots and peers.

    `launches` and `replay` have an entry an event: where it was launched, and the number of the
    graph's launch that it is of, or -1.
    """
    rows, name, names = communication(events, options.patterns)
    points = Points(
        thread=launches.thread[rows], start=launches.start[rows], stop=launches.stop[rows]
    )
    operations = operations_.find_operations(nccl)
    matched = operations_.match(
        operations,
        _owner(nccl, operations, points),
        _kinds(names)[name],
        points.start,
        replay[rows],
    )
    marks = _Marks.of(ranges)
    alone = sizes_of_operations(operations, communicators)
    marked = marks.around(_points_of(nccl, operations.row))
    parts = sizes_of_parts(operations, alone, communicators, marked)
    found = _Found.of(matched, alone, parts, numbers(operations))
    is_copy = events.kind[rows] != KIND["kernel"]
    op = _operations(found.op, marks.around(points), name, names)
    group, groups = _groups(found.communicator, events.more["stream"][rows], communicators)
    copied = events.more["bytes"][rows]
    sizes = byte_rules.Sizes(*(np.where(is_copy, copied, column) for column in found.sizes))
    collectives = Collectives(
        row=rows,
        op=op,
        seq=found.seq,
        group=group,
        groups=groups,
        sizes=sizes,
        named=names,
        name=name,
        partners=find_partners(operations, matched, op, communicators),
    )
    return collectives, matched


def launch_points(found: ProcessEvents, made: Creations) -> Points:
    """Where each event was launched; what a graph replays, where its node was made."""
    launch = found.events.launch_of(np.arange(len(found.node)))
    thread, start, stop = (
        np.where(launch >= 0, column[launch], NULL)
        for column in (found.thread, found.events.start, found.events.stop)
    )
    creation = made.of(found.node)
    captured = creation >= 0
    thread[captured] = made.thread[creation[captured]]
    start[captured] = made.start[creation[captured]]
    stop[captured] = made.stop[creation[captured]]
    return Points(thread=thread, start=start, stop=stop)


def enclosing(ranges: Points, points: Points) -> Ints:
    """The innermost range around each point on its thread, or -1."""
    threads, range_lane = np.unique(ranges.thread, return_inverse=True)
    lane = lookup(threads, points.thread)
    known = np.flatnonzero(lane >= 0)
    inner = np.full(len(lane), -1, np.int64)
    inner[known] = events.enclosing(
        (range_lane.astype(np.int32), ranges.start, ranges.stop),
        (lane[known].astype(np.int32), points.start[known], points.stop[known]),
    )
    return inner


def _points_of(nccl: NcclRanges, rows: Ints) -> Points:
    calls = nccl.calls
    return Points(thread=calls.thread[rows], start=calls.start[rows], stop=calls.stop[rows])


def _owner(nccl: NcclRanges, operations: NcclOperations, points: Points) -> Ints:
    """The range that launched each kernel: an operation outside of groups, or a group's end."""
    owners = np.unique(operations.owner[operations.owner >= 0])
    inner = enclosing(_points_of(nccl, owners), points)
    return np.where(inner >= 0, owners[inner] if len(owners) else -1, -1)


def _kinds(names: Sequence[Named]) -> Ints:
    """What kind of operations a kernel does, as far as its name says it."""

    def kind(said: Named) -> int:
        if said.op == "OTHER":
            return ANY
        return MESSAGES if said.op in _MESSAGE_KERNELS else COLLECTIVE

    return np.array([kind(said) for said in names], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """Ranges of PyTorch that name a collective."""

    points: Points
    op: NDArray[np.int8]

    @classmethod
    def of(cls, ranges: Ranges) -> "_Marks":
        words = ranges.name.dictionary.to_pylist()
        ops = [byte_rules.op_of_annotation(word) for word in words]
        known = np.array([-1 if op is None else op for op in ops], np.int8)
        op = known[ranges.name.indices.to_numpy()] if len(ranges.name) else known
        rows = np.flatnonzero(op >= 0)
        points = Points(
            thread=ranges.thread[rows], start=ranges.start[rows], stop=ranges.stop[rows]
        )
        return cls(points=points, op=op[rows])

    def around(self, points: Points) -> NDArray[np.int8]:
        """What the innermost range around each point names, or -1."""
        inner = enclosing(self.points, points)
        return np.where(inner >= 0, np.append(self.op, np.int8(-1))[inner], -1).astype(np.int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What is known of each kernel through its part; NULL, or -1 for `op`, where nothing is."""

    op: NDArray[np.int8]
    communicator: Ints
    seq: Ints
    sizes: byte_rules.Sizes

    @classmethod
    def of(cls, matched: KernelParts, alone: Parts, parts: Parts, seq: Ints) -> "_Found":
        part, single = matched.part, matched.operation

        def pick(of_part: NDArray, of_one: NDArray, nothing: int) -> NDArray:  # type: ignore[type-arg]
            whole = np.append(of_part, of_part.dtype.type(nothing))[part]
            return np.where(single >= 0, np.append(of_one, of_one.dtype.type(0))[single], whole)

        sizes = byte_rules.Sizes(
            *(pick(a, b, NULL) for a, b in zip(parts.sizes, alone.sizes, strict=True))
        )
        for column in sizes:
            column[matched.extra] = NULL
        found = cls(
            op=pick(parts.op, alone.op, -1),
            communicator=pick(parts.communicator, alone.communicator, NULL),
            seq=np.append(seq, NULL)[part],
            sizes=sizes,
        )
        for kernel, several in matched.fused.items():
            found._fuse(kernel, parts, list(several))
        return found

    def _fuse(self, kernel: int, parts: Parts, several: list[int]) -> None:
        """A kernel that does several parts: their sum, on no one communicator."""
        for column, of_part in zip(self.sizes, parts.sizes, strict=True):
            values = of_part[several]
            column[kernel] = NULL if (values == NULL).any() else values.sum()
        ops = np.unique(parts.op[several])
        self.op[kernel] = ops[0] if len(ops) == 1 else OP["OTHER"]
        self.communicator[kernel] = self.seq[kernel] = NULL


def numbers(operations: NcclOperations) -> Ints:
    """The number of each part among those of its communicator and kind, from 0."""
    count = int(operations.part.max()) + 1 if len(operations.part) else 0
    _, first = np.unique(operations.part, return_index=True)
    numbers = np.zeros(count, np.int64)
    if count:
        _, group = alike(operations.communicator[first], operations.kind[first])
        order = np.argsort(group, kind="stable")
        sorted_group = group[order]
        begins = np.searchsorted(sorted_group, sorted_group)
        numbers[order] = np.arange(count) - begins
    unknown = operations.communicator[first] == NULL
    return np.where(unknown, NULL, numbers)


def _operations(
    op: NDArray[np.int8], marked: NDArray[np.int8], name: Ints, names: Sequence[Named]
) -> NDArray[np.int8]:
    """The operation: the call's, else that of PyTorch's range, else the kernel's name's."""
    by_name = np.array([OP[said.op] for said in names] + [OP["OTHER"]], np.int8)
    return np.where(op >= 0, op, np.where(marked >= 0, marked, by_name[name])).astype(np.int8)


def _groups(
    communicator: Ints, stream: Ints, communicators: Mapping[int, Communicator]
) -> tuple[NDArray[np.int32], tuple[ProcessGroup, ...]]:
    """The group of each event: its communicator, as it is known by its members.

    Where nothing says a communicator, all that a stream carries is a group: PyTorch has a
    stream for each, so that a user can tag by it.
    """
    unknown = communicator == NULL
    label = np.where(unknown, stream, communicator)
    first, index = alike(label, unknown)
    groups = []
    for key, is_stream in zip(label[first].tolist(), unknown[first].tolist(), strict=True):
        if is_stream:
            groups.append(ProcessGroup(name=f"stream {key}", streams=(key,)))
            continue
        id_ = unsigned(key)
        known = communicators.get(id_, Communicator(size=None, rank=None, ranks=None))
        ranks = None if known.ranks is None else tuple(sorted(known.ranks))
        name = f"{id_:#018x}"
        groups.append(ProcessGroup(name=name, ranks=ranks, size=known.size, communicator=id_))
    return index.astype(np.int32), tuple(groups)
