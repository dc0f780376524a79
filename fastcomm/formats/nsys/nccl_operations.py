"""Match NCCL operations with the kernels that they launched.

`ncclGroupStart` and `ncclGroupEnd` are short sibling ranges. An operation outside of any group
launches inside its own range; those inside a group are launched by the outermost
`ncclGroupEnd`. The launching range is the *owner*. The operations of an owner form *parts*, one
per communicator and kind, which are matched with the kernels of the owner.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fastcomm.formats.nsys.nvtx import OPERATIONS, NcclRanges
from fastcomm.trace.columns import alike, block_starts
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Ints

GROUP_START, GROUP_END = "ncclGroupStart", "ncclGroupEnd"
SEND, RECEIVE = "ncclSend", "ncclRecv"
COLLECTIVE, MESSAGES, ANY = 0, 1, -1
# Collectives that NCCL implements with messages.
_OF_MESSAGES = [OP["AllToAll"], OP["Gather"], OP["Scatter"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclOperations:
    """NCCL operations of a process, sorted by start."""

    row: Ints  # row of `NcclRanges`
    op: NDArray[np.int8]  # index into OPS
    is_send: NDArray[np.bool_]
    is_receive: NDArray[np.bool_]
    communicator: Ints
    size: Ints  # bytes
    peer: Ints  # rank in the communicator
    root: Ints  # rank in the communicator
    owner: Ints  # row of the range that launches it; -1 if the capture has none
    part: Ints  # index of its part

    @property
    def parts(self) -> int:
        """Number of parts."""
        return int(self.part.max()) + 1 if len(self.part) else 0

    @property
    def kind(self) -> Ints:
        """The kind of kernel that each operation runs in: COLLECTIVE or MESSAGES."""
        return _kind(self.op, self.is_send | self.is_receive)


def find_operations(nccl: NcclRanges) -> NcclOperations:
    """Return the operations of a process, each with the range that launches it."""
    calls = nccl.calls
    op_of = np.array(
        [OP[OPERATIONS[n]] if n in OPERATIONS else -1 for n in calls.names], np.int8
    )
    op = op_of[calls.code] if len(calls.code) else np.zeros(0, np.int8)
    owner = _owners(nccl, op >= 0)
    order = np.argsort(calls.start, kind="stable")
    row = order[op[order] >= 0]
    is_send, is_receive = (_is(nccl, name)[row] for name in (SEND, RECEIVE))
    communicator = nccl.communicator[row]
    return NcclOperations(
        row=row,
        op=op[row],
        is_send=is_send,
        is_receive=is_receive,
        communicator=communicator,
        size=nccl.size[row],
        peer=nccl.peer[row],
        root=nccl.root[row],
        owner=owner[row],
        part=_parts(owner[row], row, communicator, _kind(op[row], is_send | is_receive)),
    )


def _kind(op: NDArray[np.int8], is_message: NDArray[np.bool_]) -> Ints:
    """Return COLLECTIVE or MESSAGES for each operation."""
    kind: Ints = (is_message | np.isin(op, _OF_MESSAGES)).astype(np.int64)
    return kind


def _is(nccl: NcclRanges, name: str) -> NDArray[np.bool_]:
    """Return whether each call is of the named function."""
    code = nccl.calls.names.index(name) if name in nccl.calls.names else -1
    result: NDArray[np.bool_] = nccl.calls.code == code
    return result


def _owners(nccl: NcclRanges, is_operation: NDArray[np.bool_]) -> Ints:
    """Return the row of the range that launches each call, thread by thread, or -1."""
    starts, ends = _is(nccl, GROUP_START), _is(nccl, GROUP_END)
    owner = np.full(len(starts), -1, np.int64)
    thread = nccl.calls.thread
    for thread_id in np.unique(thread).tolist():
        rows = np.flatnonzero(
            (thread == thread_id) & (is_operation | starts | ends) & ~nccl.open
        )
        rows = rows[np.argsort(nccl.calls.start[rows], kind="stable")]
        owner[rows] = _owners_of_thread(rows, starts[rows], ends[rows])
    return owner


def _owners_of_thread(
    rows: Ints, is_start: NDArray[np.bool_], is_end: NDArray[np.bool_]
) -> Ints:
    """Return the launching row of each call of a thread, sorted by start.

    Groups nest, and the end of the outermost group launches. An end without a start ends
    nothing.
    """
    level = np.cumsum(is_start.astype(np.int64) - is_end.astype(np.int64))
    level -= np.minimum.accumulate(np.minimum(level, 0))
    closing = np.flatnonzero(is_end & (level == 0))
    following = np.searchsorted(closing, np.arange(len(rows)))
    last = np.append(rows[closing], -1)
    return np.where(level == 0, rows, last[following])


def _parts(owner: Ints, row: Ints, communicator: Ints, kind: Ints) -> Ints:
    """Number each (owner, communicator, kind), in the order of their first operations."""
    alone = np.where(owner >= 0, owner, -1 - row)
    first, part = alike(alone, communicator, kind)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    numbers: Ints = rank[part]
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelParts:
    """The part and operation of each communication kernel."""

    part: Ints  # -1: unknown
    operation: Ints  # index into `NcclOperations` if the kernel does one of its part, else -1
    extra: NDArray[np.bool_]  # whether the part accounts for fewer kernels: it gets no bytes
    fused: dict[int, tuple[int, ...]]  # parts of each kernel that does several
    by_order: int  # number of kernels that were matched by order alone


def match(
    operations: NcclOperations, owner: Ints, kind: Ints, launch: Ints, replay: Ints
) -> KernelParts:
    """Match the kernels of each owner with the parts of the owner, by kind, then by order.

    Parameters
    ----------
    operations
        NCCL operations of the process.
    owner
        Row of the range that launched each kernel, or -1. Kernels are sorted by start.
    kind
        COLLECTIVE, MESSAGES or ANY, as far as the name of each kernel tells.
    launch
        Host time of the launch of each kernel; NULL is unknown.
    replay
        Number of the graph launch of each kernel, or -1: a graph repeats its captured launches.

    """
    matching = _Matching(operations, kind, len(owner))
    keys = np.stack([owner, replay], axis=1)
    owned = np.flatnonzero(owner >= 0)
    order = owned[np.lexsort((owned, keys[owned, 1], keys[owned, 0]))]
    if len(order):
        changes = block_starts(*keys[order].T)[1:]
        for kernels in np.split(order, changes):
            matching.add(int(owner[kernels[0]]), kernels)
    by_order = matching.add_elsewhere(np.flatnonzero(owner < 0), launch)
    return KernelParts(
        part=matching.part,
        operation=matching.operation,
        extra=matching.extra,
        fused=matching.fused,
        by_order=by_order,
    )


class _Matching:
    """The matching in progress: kernels, and the members of each part."""

    def __init__(self, operations: NcclOperations, kind: Ints, count: int) -> None:
        """Start without matches; `kind` is per kernel, `count` is the number of kernels."""
        self.operations, self.kind = operations, kind
        self.part = np.full(count, -1, np.int64)
        self.operation = np.full(count, -1, np.int64)
        self.extra = np.zeros(count, np.bool_)
        self.fused: dict[int, tuple[int, ...]] = {}
        order = np.argsort(operations.part, kind="stable")
        ends = np.searchsorted(operations.part[order], np.arange(operations.parts + 1))
        self.members = [order[a:b] for a, b in pairwise(ends.tolist())]
        self.parts_of: dict[int, list[int]] = {}
        for part, members in enumerate(self.members):
            owner = int(operations.owner[members[0]])
            self.parts_of.setdefault(owner, []).append(part)

    def add(self, owner: int, kernels: Ints) -> None:
        """Match the kernels of a launching `owner`, in order, with its NCCL operations."""
        parts = self.parts_of.get(owner, [])
        if len(parts) == 1:
            self._pair(parts, kernels)
            return
        kinds = self.operations.kind
        for kind in (COLLECTIVE, MESSAGES):
            same = [part for part in parts if kinds[self.members[part][0]] == kind]
            chosen = kernels[self.kind[kernels] == kind]
            self._pair(same, chosen)
            if len(chosen):
                parts = [part for part in parts if part not in same]
        # Kernels whose names do not tell their kind get the remaining parts.
        self._pair(parts, kernels[self.kind[kernels] == ANY])

    def _pair(self, parts: list[int], kernels: Ints) -> None:
        """Match parts and kernels one to one; surplus parts fuse, surplus kernels are extra."""
        if not parts or not len(kernels):
            return
        if len(parts) == 1 and len(self.members[parts[0]]) == len(kernels) > 1:
            self.part[kernels] = parts[0]
            self.operation[kernels] = self.members[parts[0]]
            return
        both = min(len(parts), len(kernels))
        self.part[kernels[:both]] = parts[:both]
        if len(parts) > both:
            self.fused[int(kernels[both - 1])] = tuple(parts[both - 1 :])
        self.part[kernels[both:]] = parts[-1]
        self.extra[kernels[both:]] = True

    def add_elsewhere(self, kernels: Ints, launch: Ints) -> int:
        """Match kernels that no range launched, by order and kind, and return their number.

        Non-blocking communicators launch from another thread. Kernels of a kind are matched
        only if there are as many as parts without a kernel.
        """
        is_matched = np.zeros(len(self.members), np.bool_)
        is_matched[self.part[self.part >= 0]] = True
        for parts in self.fused.values():
            is_matched[list(parts)] = True
        kernels = kernels[launch[kernels] != NULL]
        kernels = kernels[np.argsort(launch[kernels], kind="stable")]
        kinds = self.operations.kind
        total = 0
        for kind in (COLLECTIVE, MESSAGES):
            unmatched = [
                part
                for part, members in enumerate(self.members)
                if not is_matched[part] and kinds[members[0]] == kind
            ]
            chosen = kernels[self.kind[kernels] == kind]
            if len(unmatched) == len(chosen):
                self.part[chosen] = unmatched
                total += len(unmatched)
        return total
