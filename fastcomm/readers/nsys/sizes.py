"""What a part of a range's operations is: its operation and its bytes, three ways.

Operations that NCCL fused into one kernel add up. Messages of one group are an all-to-all where
a range around them says so, or where they include the own rank or three others and more: uneven
splits skip empty peers (formats.md 2.7).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.nsys.communicators import Communicator, unsigned
from fastcomm.readers.nsys.operations import NcclOperations
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Ints

_PEERS = 3  # others, from which on messages are taken for an all-to-all
_IN = [OP[name] for name in ("AllReduce", "Broadcast", "Reduce", "AllGather")]
_PER_PEER = [OP[name] for name in ("AllToAll",)]
_OF_MESSAGES = [OP["Gather"], OP["Scatter"], OP["AllToAll"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One entry a part, or an operation; NULL is unknown."""

    op: NDArray[np.int8]
    communicator: Ints
    sizes: byte_rules.Sizes


def of_operations(
    operations: NcclOperations, communicators: Mapping[int, Communicator]
) -> Parts:
    """Each operation alone; a send or a receive is a `SendRecv`."""
    n = _members(operations.communicator, communicators)
    op, size = operations.op, operations.size
    given = np.where(np.isin(op, _IN) | operations.is_send | (op == OP["Gather"]), size, NULL)
    got = np.where(
        (op == OP["ReduceScatter"]) | operations.is_receive | (op == OP["Scatter"]), size, NULL
    )
    whole = byte_rules.byte_counts(size, n)
    given = np.where(np.isin(op, _PER_PEER), whole, given)
    got = np.where(np.isin(op, _PER_PEER), whole, got)
    return Parts(
        op=op,
        communicator=operations.communicator,
        sizes=byte_rules.sizes(op, given, got, n),
    )


def of_parts(
    operations: NcclOperations,
    alone: Parts,
    communicators: Mapping[int, Communicator],
    marked: NDArray[np.int8],
) -> Parts:
    """Each part as a whole; `marked` is what a range around each operation names it, or -1."""
    part = operations.part
    count = int(part.max()) + 1 if len(part) else 0
    first = np.full(count, -1, np.int64)
    first[part[::-1]] = np.arange(len(part))[::-1]
    op = _common(part, operations.op, first)
    added = byte_rules.Sizes(*(_sum(part, column, count) for column in alone.sizes))
    communicator = operations.communicator[first]
    is_messages = np.bincount(
        part, operations.is_send | operations.is_receive, minlength=count
    ) == np.bincount(part, minlength=count)
    if not is_messages.any():
        return Parts(op=op, communicator=communicator, sizes=added)
    n = _members(communicator, communicators)
    named = _named(operations, marked[first], is_messages, communicators)
    op = np.where(is_messages, named, op).astype(np.int8)
    given, got = (
        _sum(part[side], operations.size[side], count)
        for side in (operations.is_send, operations.is_receive)
    )
    largest = np.full(count, NULL, np.int64)
    np.maximum.at(largest, part, operations.size)
    given = np.where(op == OP["Gather"], largest, given)
    got = np.where(op == OP["Scatter"], largest, got)
    uneven = _uneven(operations, count, n)
    messages = byte_rules.sizes(op, given, got, n, uneven)
    # Several messages of one event: the largest is what the API was told at most.
    messages = messages._replace(msg=np.where(op == OP["SendRecv"], largest, messages.msg))
    unknown = _any(part, operations.size == NULL, count)
    chosen = (
        np.where(is_messages, np.where(unknown, NULL, message), collective)
        for message, collective in zip(messages, added, strict=True)
    )
    return Parts(op=op, communicator=communicator, sizes=byte_rules.Sizes(*chosen))


def _members(communicator: Ints, communicators: Mapping[int, Communicator]) -> Ints:
    """How many ranks are in each communicator, or NULL."""
    different, index = np.unique(communicator, return_inverse=True)
    sizes = [
        known.size if (known := communicators.get(unsigned(key))) and known.size else NULL
        for key in different.tolist()
    ]
    return np.array(sizes, np.int64)[index.reshape(-1)]


def _common(part: Ints, op: NDArray[np.int8], first: Ints) -> NDArray[np.int8]:
    """The operation of all in a part, or OTHER where they differ."""
    common = op[first]
    common[part[op != common[part]]] = OP["OTHER"]
    return common


def _sum(part: Ints, values: Ints, count: int) -> Ints:
    """The sum over each part; NULL where a value is, or where there is none."""
    total = np.zeros(count, np.int64)
    np.add.at(total, part, np.where(values == NULL, 0, values))
    known = _any(part, np.ones(len(part), np.bool_), count)
    return np.where(known & ~_any(part, values == NULL, count), total, NULL)


def _any(part: Ints, holds: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    found = np.zeros(count, np.bool_)
    found[part[holds]] = True
    return found


def _named(
    operations: NcclOperations,
    marked: NDArray[np.int8],
    is_messages: NDArray[np.bool_],
    communicators: Mapping[int, Communicator],
) -> NDArray[np.int8]:
    """What a group of messages is: what a range around it says, else by its peers."""
    count = len(marked)
    own = {key: each.rank for key, each in communicators.items()}
    peers: list[set[int]] = [set() for _ in range(count)]
    rows = np.flatnonzero(is_messages[operations.part] & (operations.peer != NULL))
    for part, peer in zip(
        operations.part[rows].tolist(), operations.peer[rows].tolist(), strict=True
    ):
        peers[part].add(peer)
    first: dict[int, int] = {}
    for row in rows.tolist():
        first.setdefault(int(operations.part[row]), unsigned(int(operations.communicator[row])))
    named = np.full(count, OP["SendRecv"], np.int8)
    for part, seen in enumerate(peers):
        me = own.get(first.get(part, -1))
        if me in seen or len(seen) >= _PEERS:
            named[part] = OP["AllToAll"]
    believed = np.isin(marked, [*_OF_MESSAGES, OP["SendRecv"]])
    return np.where(believed, marked, named).astype(np.int8)


def _uneven(operations: NcclOperations, count: int, n: Ints) -> NDArray[np.bool_]:
    """Whether the messages of a part differ, or go to some of the group only."""
    uneven = np.zeros(count, np.bool_)
    for side in (operations.is_send, operations.is_receive):
        part, size = operations.part[side], operations.size[side]
        low = np.full(count, np.iinfo(np.int64).max, np.int64)
        high = np.full(count, NULL, np.int64)
        np.minimum.at(low, part, size)
        np.maximum.at(high, part, size)
        number = np.bincount(part, minlength=count)
        uneven |= (number > 0) & ((low != high) | ((n != NULL) & (number != n)))
    return uneven
