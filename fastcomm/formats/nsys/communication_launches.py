"""Find the communication of a process: kernels, launches, NCCL calls, payloads, communicators.

A *part* is what one launch does on one communicator: one collective, or a group of messages.
Numbers that are unknown are NULL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.communication import Collectives, find_communication
from fastcomm.formats.kernel_names import Named
from fastcomm.formats.nsys import nccl_operations
from fastcomm.formats.nsys.communicators import (
    Communicator,
    Parts,
    find_partners,
    sizes_of_operations,
    sizes_of_parts,
    unsigned,
)
from fastcomm.formats.nsys.events import Creations, ProcessEvents
from fastcomm.formats.nsys.export import Points
from fastcomm.formats.nsys.nccl_operations import (
    ANY,
    COLLECTIVE,
    MESSAGES,
    KernelParts,
    NcclOperations,
)
from fastcomm.formats.nsys.nvtx import NcclRanges, Ranges
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace import events
from fastcomm.trace.columns import alike, lookup
from fastcomm.trace.events import Events
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NULL, Ints

_MESSAGE_KERNELS = ("SendRecv", "AllToAll")


def find_collectives(
    events: Events,
    launches: Points,
    replay: Ints,
    ranges: Ranges,
    nccl: NcclRanges,
    communicators: Mapping[int, Communicator],
    options: TraceOptions,
) -> tuple[Collectives, KernelParts]:
    """Return all communication of a process, with root and peers.

    Parameters
    ----------
    events
        Events of the process.
    launches
        Where each event was launched.
    replay
        Number of the graph launch that ran each event, or -1.
    ranges, nccl
        NVTX ranges of the process: of everybody, and of NCCL.
    communicators
        Communicators of the process, by unsigned id.
    options
        Patterns that tell communication kernels by name.

    Returns
    -------
    Collectives
        One entry per communication event.
    KernelParts
        How the communication events were matched with NCCL operations.

    """
    rows, name, names = find_communication(events, options.patterns)
    points = launches.at(rows)
    operations = nccl_operations.find_operations(nccl)
    matched = nccl_operations.match(
        operations,
        _owner(nccl, operations, points),
        _kinds(names)[name],
        points.start,
        replay[rows],
    )
    marks = _Marks.of(ranges)
    alone = sizes_of_operations(operations, communicators)
    marked = marks.around(nccl.calls.at(operations.row))
    parts = sizes_of_parts(operations, alone, communicators, marked)
    kernels = _KernelOperations.of(matched, alone, parts, numbers(operations, communicators))
    is_copy = events.kind[rows] != KIND["kernel"]
    op = _operations(kernels.op, marks.around(points), name, names)
    group, groups = _groups(kernels.communicator, events.more["stream"][rows], communicators)
    copied = events.more["bytes"][rows]
    sizes = byte_rules.Sizes(*(np.where(is_copy, copied, column) for column in kernels.sizes))
    collectives = Collectives(
        row=rows,
        op=op,
        seq=kernels.seq,
        group=group,
        groups=groups,
        sizes=sizes,
        named=names,
        name=name,
        partners=find_partners(operations, matched, op, communicators),
    )
    return collectives, matched


def launch_points(process_events: ProcessEvents, creations: Creations) -> Points:
    """Return where each event was launched, or, for nodes of a replayed graph, created."""
    events_ = process_events.events
    launch = events_.launch_of(np.arange(len(process_events.node)))
    creation = creations.find(process_events.node)
    captured = creation >= 0
    columns = {"thread": process_events.thread, "start": events_.start, "stop": events_.stop}
    for name, column in columns.items():
        columns[name] = np.where(launch >= 0, column[launch], NULL)
        columns[name][captured] = getattr(creations, name)[creation[captured]]
    return Points(**columns)


def enclosing(ranges: Points, points: Points) -> Ints:
    """Return the row of the innermost range around each point on its thread, or -1.

    Parameters
    ----------
    ranges, points
        Thread, start and stop of each, in any order; times are ns. A point may have a length.

    """
    threads, range_lane = np.unique(ranges.thread, return_inverse=True)
    lane = lookup(threads, points.thread)
    rows = np.flatnonzero(lane >= 0)
    inner = np.full(len(lane), -1, np.int64)
    inner[rows] = events.enclosing(
        (range_lane.astype(np.int32), ranges.start, ranges.stop),
        (lane[rows].astype(np.int32), points.start[rows], points.stop[rows]),
    )
    return inner


def _owner(nccl: NcclRanges, operations: NcclOperations, points: Points) -> Ints:
    """Return the launching NCCL range of each kernel: an ungrouped operation or a group end."""
    owners = np.unique(operations.owner[operations.owner >= 0])
    inner = enclosing(nccl.calls.at(owners), points)
    return np.where(inner >= 0, owners[inner] if len(owners) else -1, -1)


def _kinds(names: Sequence[Named]) -> Ints:
    """Return the kind of operations that each kernel name implies, or ANY."""

    def kind(kernel: Named) -> int:
        if kernel.op == "OTHER":
            return ANY
        return MESSAGES if kernel.op in _MESSAGE_KERNELS else COLLECTIVE

    return np.array([kind(kernel) for kernel in names], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marks:
    """PyTorch ranges that name a collective, and the operation of each."""

    points: Points
    op: NDArray[np.int8]

    @classmethod
    def of(cls, ranges: Ranges) -> "_Marks":
        """Select the ranges whose name is that of a collective."""
        names = ranges.name.dictionary.to_pylist()
        ops = [byte_rules.op_of_annotation(name) for name in names]
        code = np.array([-1 if op is None else op for op in ops], np.int8)
        op = code[ranges.name.indices.to_numpy()] if len(ranges.name) else code
        rows = np.flatnonzero(op >= 0)
        points = Points(thread=ranges.thread, start=ranges.start, stop=ranges.stop)
        return cls(points=points.at(rows), op=op[rows])

    def around(self, points: Points) -> NDArray[np.int8]:
        """Return the operation that the innermost range around each point names, or -1."""
        inner = enclosing(self.points, points)
        return np.where(inner >= 0, np.append(self.op, np.int8(-1))[inner], -1).astype(np.int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KernelOperations:
    """The operation of each communication kernel; NULL, or -1 for `op`, is unknown."""

    op: NDArray[np.int8]
    communicator: Ints
    seq: Ints
    sizes: byte_rules.Sizes

    @classmethod
    def of(
        cls, matched: KernelParts, alone: Parts, parts: Parts, seq: Ints
    ) -> "_KernelOperations":
        """Return the operation of each kernel: its part's, or a single one of the part.

        `alone` describes single operations, `parts` whole parts, and `seq` has the
        sequence number of each part.
        """
        part, single = matched.part, matched.operation

        def pick(by_part: NDArray, by_operation: NDArray, unknown: int) -> NDArray:  # type: ignore[type-arg]
            whole = np.append(by_part, by_part.dtype.type(unknown))[part]
            one = np.append(by_operation, by_operation.dtype.type(0))[single]
            return np.where(single >= 0, one, whole)

        sizes = byte_rules.Sizes(
            *(pick(a, b, NULL) for a, b in zip(parts.sizes, alone.sizes, strict=True))
        )
        for column in sizes:
            column[matched.extra] = NULL
        kernels = cls(
            op=pick(parts.op, alone.op, -1),
            communicator=pick(parts.communicator, alone.communicator, NULL),
            seq=np.append(seq, NULL)[part],
            sizes=sizes,
        )
        for kernel, fused in matched.fused.items():
            kernels._fuse(kernel, parts, list(fused))
        return kernels

    def _fuse(self, kernel: int, parts: Parts, fused: list[int]) -> None:
        """Give a kernel that does several parts the sum of their sizes, and no communicator."""
        for column, part_sizes in zip(self.sizes, parts.sizes, strict=True):
            values = part_sizes[fused]
            column[kernel] = NULL if (values == NULL).any() else values.sum()
        ops = np.unique(parts.op[fused])
        self.op[kernel] = ops[0] if len(ops) == 1 else OP["OTHER"]
        self.communicator[kernel] = self.seq[kernel] = NULL


def numbers(operations: NcclOperations, communicators: Mapping[int, Communicator]) -> Ints:
    """Return the number of each part among those of its communicator and operation.

    Parts are numbered from 0 in their order; NULL where the communicator is unknown, or was
    created before the capture: another rank's capture may have begun elsewhere. Parts are the
    runs of `operations.part`.
    """
    _, first = np.unique(operations.part, return_index=True)
    numbers = np.zeros(len(first), np.int64)
    if len(first):
        _, group = alike(operations.communicator[first], operations.kind[first])
        order = np.argsort(group, kind="stable")
        sorted_group = group[order]
        begins = np.searchsorted(sorted_group, sorted_group)
        numbers[order] = np.arange(len(order)) - begins
    communicator = operations.communicator[first]
    created = [
        bits
        for bits in np.unique(communicator).tolist()
        if (own := communicators.get(unsigned(bits))) is not None and own.rank is not None
    ]
    return np.where(np.isin(communicator, created), numbers, NULL)


def _operations(
    op: NDArray[np.int8], marked: NDArray[np.int8], name: Ints, names: Sequence[Named]
) -> NDArray[np.int8]:
    """Return each operation: from the NCCL call, else PyTorch's range, else the kernel name."""
    by_name = np.array([OP[kernel.op] for kernel in names] + [OP["OTHER"]], np.int8)
    return np.where(op >= 0, op, np.where(marked >= 0, marked, by_name[name])).astype(np.int8)


def _groups(
    communicator: Ints, stream: Ints, communicators: Mapping[int, Communicator]
) -> tuple[NDArray[np.int32], tuple[ProcessGroup, ...]]:
    """Return the index of each event's process group, and the groups.

    The group is the communicator. Without one, everything on a stream is a group: PyTorch uses
    one stream per communicator, so that users can tag the group by its stream.
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
        members = communicators.get(id_, Communicator(size=None, rank=None, ranks=None))
        ranks = None if members.ranks is None else tuple(sorted(members.ranks))
        name = f"{id_:#018x}"
        groups.append(ProcessGroup(name=name, ranks=ranks, size=members.size, communicator=id_))
    return index.astype(np.int32), tuple(groups)
