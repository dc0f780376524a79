"""Which kernels an operation of NCCL launched, where operations come in groups.

`ncclGroupStart` and `ncclGroupEnd` are short sibling ranges. An operation outside of any group
launches inside its own range; those inside are launched by the outermost `ncclGroupEnd`. What a
range launches is its *parts*, one a communicator and kind: those are matched with its kernels.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.nsys.nvtx import NcclRanges
from fastcomm.readers.nsys.payloads import OPERATIONS
from fastcomm.trace.columns import alike
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Ints

GROUP_START, GROUP_END = "ncclGroupStart", "ncclGroupEnd"
SEND, RECEIVE = "ncclSend", "ncclRecv"

COLLECTIVE, MESSAGES, ANY = 0, 1, -1
# Collectives that NCCL makes of messages.
_OF_MESSAGES = [OP["AllToAll"], OP["Gather"], OP["Scatter"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclOperations:
    """Operations of a process in the order of their starts; `row` is a row of `NcclRanges`."""

    row: Ints
    op: NDArray[np.int8]  # index into OPS
    is_send: NDArray[np.bool_]
    is_receive: NDArray[np.bool_]
    communicator: Ints
    size: Ints
    peer: Ints  # place in the communicator, as is the root
    root: Ints
    owner: Ints  # row of the range that launches it, -1 where the capture has none
    part: Ints  # number of its part

    @property
    def kind(self) -> Ints:
        """What kernel it runs in: COLLECTIVE or MESSAGES."""
        return _kind(self.op, self.is_send | self.is_receive)


def find_operations(nccl: NcclRanges) -> NcclOperations:
    """The operations of a process, each with the range that launches it."""
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
    of_messages: Ints = (is_message | np.isin(op, _OF_MESSAGES)).astype(np.int64)
    return of_messages


def _is(nccl: NcclRanges, name: str) -> NDArray[np.bool_]:
    code = nccl.calls.names.index(name) if name in nccl.calls.names else -1
    found: NDArray[np.bool_] = nccl.calls.code == code
    return found


def _owners(nccl: NcclRanges, is_operation: NDArray[np.bool_]) -> Ints:
    """For each call the row of the range that launches it, thread by thread."""
    starts, ends = _is(nccl, GROUP_START), _is(nccl, GROUP_END)
    owner = np.full(len(starts), -1, np.int64)
    thread = nccl.calls.thread
    for one in np.unique(thread).tolist():
        rows = np.flatnonzero((thread == one) & (is_operation | starts | ends) & ~nccl.open)
        rows = rows[np.argsort(nccl.calls.start[rows], kind="stable")]
        owner[rows] = _owners_of_thread(rows, starts[rows], ends[rows])
    return owner


def _owners_of_thread(rows: Ints, starts: NDArray[np.bool_], ends: NDArray[np.bool_]) -> Ints:
    """Groups nest; the end of the outermost launches. An end without a start ends nothing."""
    level = np.cumsum(starts.astype(np.int64) - ends.astype(np.int64))
    level -= np.minimum.accumulate(np.minimum(level, 0))
    closing = np.flatnonzero(ends & (level == 0))
    following = np.searchsorted(closing, np.arange(len(rows)))
    last = np.append(rows[closing], -1)
    return np.where(level == 0, rows, last[following])


def _parts(owner: Ints, row: Ints, communicator: Ints, kind: Ints) -> Ints:
    """A number for each (owner, communicator, kind), in the order of their first operations."""
    alone = np.where(owner >= 0, owner, -1 - row)
    first, part = alike(alone, communicator, kind)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    numbers: Ints = rank[part]
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelParts:
    """For each communication kernel its part and, of that, one operation; -1: none or all."""

    part: Ints
    operation: Ints  # index into `Operations`, where a part has as many kernels as operations
    extra: NDArray[np.bool_]  # the kernel is one more than its part accounts for: no bytes
    fused: dict[int, tuple[int, ...]]  # kernel -> parts, where it does several
    by_order: int  # kernels that only their order gave a part


def match(
    operations: NcclOperations, owner: Ints, kind: Ints, launch: Ints, replay: Ints
) -> KernelParts:
    """Match the kernels of each owner with the owner's parts, by kind, then by order.

    For each kernel, in the order of their starts: the range that launched it (-1: none), its
    kind as far as its name says it (or ANY), the time of its launch (NULL: unknown), and the
    number of the graph's launch it is of, since a graph repeats what its capture launched.
    """
    matching = _Matching(operations, kind, len(owner))
    keys = np.stack([owner, replay], axis=1)
    owned = np.flatnonzero(owner >= 0)
    order = owned[np.lexsort((owned, keys[owned, 1], keys[owned, 0]))]
    if len(order):
        changes = np.flatnonzero((np.diff(keys[order], axis=0) != 0).any(axis=1)) + 1
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
    def __init__(self, operations: NcclOperations, kind: Ints, count: int) -> None:
        self.operations, self.kind = operations, kind
        self.part = np.full(count, -1, np.int64)
        self.operation = np.full(count, -1, np.int64)
        self.extra = np.zeros(count, np.bool_)
        self.fused: dict[int, tuple[int, ...]] = {}
        order = np.argsort(operations.part, kind="stable")
        ends = np.searchsorted(operations.part[order], np.arange(_count(operations) + 1))
        self.members = [order[a:b] for a, b in pairwise(ends.tolist())]
        self.parts_of: dict[int, list[int]] = {}
        for part, members in enumerate(self.members):
            owner = int(operations.owner[members[0]])
            self.parts_of.setdefault(owner, []).append(part)

    def add(self, owner: int, kernels: Ints) -> None:
        """Match the kernels of one owner, in their order, with its parts."""
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
        # Kernels whose names do not say their kind get what is left.
        self._pair(parts, kernels[self.kind[kernels] == ANY])

    def _pair(self, parts: list[int], kernels: Ints) -> None:
        """Match parts and kernels one to one as far as both go."""
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
        """Kernels that no range launched: non-blocking communicators use another thread.

        By order and kind, and only where there are as many as parts without any kernel.
        """
        done = np.zeros(len(self.members), np.bool_)
        done[self.part[self.part >= 0]] = True
        for parts in self.fused.values():
            done[list(parts)] = True
        kernels = kernels[launch[kernels] != NULL]
        kernels = kernels[np.argsort(launch[kernels], kind="stable")]
        kinds = self.operations.kind
        total = 0
        for kind in (COLLECTIVE, MESSAGES):
            open_ = [
                part
                for part, members in enumerate(self.members)
                if not done[part] and kinds[members[0]] == kind
            ]
            chosen = kernels[self.kind[kernels] == kind]
            if len(open_) == len(chosen):
                self.part[chosen] = open_
                total += len(open_)
        return total


def _count(operations: NcclOperations) -> int:
    return int(operations.part.max()) + 1 if len(operations.part) else 0
