"""Infer members of NCCL communicators over all reports, and the bytes of their operations.

Operations that NCCL fused into one kernel add up. A group of messages is an all-to-all if a
range around it says so, or if it includes the own rank or at least three other ranks: uneven
splits skip empty peers. Sizes are bytes; NULL is unknown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastcomm.formats.communication import Partners
from fastcomm.formats.nsys.nccl_operations import KernelParts, NcclOperations
from fastcomm.formats.nsys.nvtx import NcclRanges
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.schema import OP, ROOTED
from fastcomm_kernels.arrays import NULL, Ints

_BITS = (1 << 64) - 1
_CREATING_CALLS = ("ncclCommInit", "ncclCommSplit", "ncclCommShrink", "ncclCommGrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The place of one process in one communicator, as the creating call states it."""

    size: int | None
    rank: int | None  # in the communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A communicator as seen by one of its members."""

    size: int | None
    rank: int | None  # of the process itself, in the communicator
    ranks: tuple[int, ...] | None  # global ranks of all members, by rank in the communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorRecords:
    """The communicators in the NCCL ranges of one process, by unsigned id."""

    memberships: dict[int, Membership] = field(default_factory=dict)  # from creating calls
    used: frozenset[int] = frozenset()  # by operations

    @property
    def largest(self) -> tuple[int, Membership] | None:
        """The id and membership of the largest communicator; None without any."""
        if not self.memberships:
            return None
        _, key = max((member.size or 0, key) for key, member in self.memberships.items())
        return key, self.memberships[key]


def unsigned(bits: int) -> int:
    """Return the unsigned 64-bit id whose bits an int64 column holds."""
    return bits & _BITS


def records_of_process(nccl: NcclRanges) -> CommunicatorRecords:
    """Collect the communicators that one process creates and uses, from its NCCL ranges."""
    is_creating = np.array(
        [name.startswith(_CREATING_CALLS) for name in nccl.calls.names], np.bool_
    )
    creates = is_creating[nccl.calls.code] if len(nccl.calls.code) else np.zeros(0, np.bool_)
    has_id = nccl.communicator != NULL
    rows = np.flatnonzero(creates & has_id & (nccl.ranks != NULL))
    columns = (nccl.communicator[rows], nccl.ranks[rows], nccl.rank[rows])
    memberships = {
        unsigned(key): Membership(size=size, rank=None if rank == NULL else rank)
        for key, size, rank in zip(*(column.tolist() for column in columns), strict=True)
    }
    used = np.unique(nccl.communicator[~creates & has_id])
    return CommunicatorRecords(
        memberships=memberships, used=frozenset(unsigned(key) for key in used.tolist())
    )


def global_ranks(records: Mapping[int, CommunicatorRecords]) -> dict[int, int] | None:
    """Return the global rank of each process from the world's communicator.

    The world is the largest communicator, if every process is in it: processes of a part of a
    job may share a smaller one.

    Parameters
    ----------
    records
        Communicators by the caller's number of the process.

    Returns
    -------
    dict of int to int or None
        Rank by number of the process; None if no such communicator tells all ranks.

    """
    if not records:
        return None
    everywhere = frozenset.intersection(
        *(frozenset(record.memberships) for record in records.values())
    )
    first = next(iter(records.values())).memberships
    largest = world_size(records.values())
    worlds = [key for key in sorted(everywhere) if first[key].size == largest]
    if largest is None or not worlds:
        return None
    places = {number: record.memberships[worlds[0]].rank for number, record in records.items()}
    ranks = {number: rank for number, rank in places.items() if rank is not None}
    return ranks if len(ranks) == len(records) else None


def world_size(records: Iterable[CommunicatorRecords]) -> int | None:
    """Return the size of the largest communicator of all processes; None without any."""
    sizes = [largest[1].size for record in records if (largest := record.largest) is not None]
    return max((size for size in sizes if size is not None), default=None)


def join(
    records: Mapping[int, CommunicatorRecords], rank_of: Mapping[int, int], world: int | None
) -> dict[int, dict[int, Communicator]]:
    """Join what all processes state about communicators.

    Without its creating call, a communicator's users are its members if all ranks of the world
    are present; otherwise its members are unknown.

    Parameters
    ----------
    records
        Communicators by the caller's number of the process.
    rank_of
        Global rank by number of the process.
    world
        Number of ranks of the job; None if unknown.

    Returns
    -------
    dict
        For each process its communicators by unsigned id, with the global ranks of all members.

    """
    members: dict[int, dict[int, int]] = {}
    users: dict[int, list[int]] = {}
    for process, record in records.items():
        for key, membership in record.memberships.items():
            if membership.rank is not None:
                members.setdefault(key, {})[membership.rank] = rank_of[process]
        for key in record.used | record.memberships.keys():
            users.setdefault(key, []).append(rank_of[process])
    is_complete = world is not None and len(records) == world
    joined: dict[int, dict[int, Communicator]] = {}
    for process, record in records.items():
        communicators = {}
        for key in record.used | record.memberships.keys():
            membership = record.memberships.get(key, Membership(size=None, rank=None))
            communicators[key] = _communicator(
                membership, members.get(key, {}), users[key], is_complete
            )
        joined[process] = communicators
    return joined


def _communicator(
    own: Membership, members: Mapping[int, int], users: list[int], has_all_ranks: bool
) -> Communicator:
    """Return a communicator from its members' ranks, or from all its users."""
    if own.size is not None:
        is_complete = len(members) == own.size
        ranks = tuple(members[place] for place in sorted(members)) if is_complete else None
        return Communicator(size=own.size, rank=own.rank, ranks=ranks)
    ranks = tuple(sorted(users)) if has_all_ranks else None
    return Communicator(size=len(ranks) if ranks else None, rank=None, ranks=ranks)


def find_partners(
    operations: NcclOperations,
    matched: KernelParts,
    op: NDArray[np.int8],
    communicators: Mapping[int, Communicator],
) -> Partners:
    """Return root and peers of each communication kernel, from the operations that it runs.

    A kernel that does several parts, or exceeds the operations of its part, has unknown
    partners.

    Parameters
    ----------
    operations
        NCCL operations of the process.
    matched
        The operations of each kernel.
    op
        Operation of each kernel, an index into OPS.
    communicators
        Communicators of the process, by unsigned id.

    """
    partners = Partners.unknown(len(op))
    sends_to, receives_from = list(partners.sends_to), list(partners.receives_from)
    root, peer = (
        _global_ranks(operations, places, communicators)
        for places in (operations.root, operations.peer)
    )
    order = np.argsort(operations.part, kind="stable")
    parts = operations.part[order]
    unknown = matched.extra.copy()
    unknown[list(matched.fused)] = True
    is_matched = (matched.part >= 0) & ~unknown
    for k in np.flatnonzero(is_matched & np.isin(op, (*ROOTED, OP["SendRecv"]))).tolist():
        first, last = np.searchsorted(parts, (matched.part[k], matched.part[k] + 1))
        single = matched.operation[k]
        members = order[first:last] if single < 0 else np.array([single])
        if op[k] != OP["SendRecv"]:
            partners.root[k] = root[members[0]]
        elif (peer[members] != NULL).all():
            sends_to[k] = tuple(peer[members[operations.is_send[members]]].tolist())
            receives_from[k] = tuple(peer[members[operations.is_receive[members]]].tolist())
    return Partners(root=partners.root, sends_to=sends_to, receives_from=receives_from)


def _global_ranks(
    operations: NcclOperations, places: Ints, communicators: Mapping[int, Communicator]
) -> Ints:
    """Return the global rank at each operation's place in its communicator, or NULL."""
    ranks = np.full(len(places), NULL, np.int64)
    for key in np.unique(operations.communicator).tolist():
        communicator = communicators.get(unsigned(key))
        if communicator is None or communicator.ranks is None:
            continue
        rows = np.flatnonzero((operations.communicator == key) & (places >= 0))
        rows = rows[places[rows] < len(communicator.ranks)]
        ranks[rows] = np.array(communicator.ranks, np.int64)[places[rows]]
    return ranks


_PEERS = 3  # fewest other ranks of an all-to-all
_IN = [OP[name] for name in ("AllReduce", "Broadcast", "Reduce", "AllGather")]
_OF_MESSAGES = [OP["Gather"], OP["Scatter"], OP["AllToAll"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The operation and sizes of parts, or of single operations; NULL is unknown."""

    op: NDArray[np.int8]
    communicator: Ints
    sizes: byte_rules.Sizes


def sizes_of_operations(
    operations: NcclOperations, communicators: Mapping[int, Communicator]
) -> Parts:
    """Return the sizes of each operation alone; a send or a receive is a `SendRecv`."""
    n = _member_counts(operations.communicator, communicators)
    op, size = operations.op, operations.size
    sent = np.where(np.isin(op, _IN) | operations.is_send | (op == OP["Gather"]), size, NULL)
    received = np.where(
        (op == OP["ReduceScatter"]) | operations.is_receive | (op == OP["Scatter"]), size, NULL
    )
    is_per_peer, whole = op == OP["AllToAll"], byte_rules.byte_counts(size, n)
    sent = np.where(is_per_peer, whole, sent)
    received = np.where(is_per_peer, whole, received)
    return Parts(
        op=op,
        communicator=operations.communicator,
        sizes=byte_rules.sizes(op, sent, received, n),
    )


def sizes_of_parts(
    operations: NcclOperations,
    alone: Parts,
    communicators: Mapping[int, Communicator],
    marked: NDArray[np.int8],
) -> Parts:
    """Return operation and sizes of each part as a whole.

    Parameters
    ----------
    operations
        NCCL operations of the process.
    alone
        Sizes of each operation (`sizes_of_operations`).
    communicators
        Communicators of the process, by unsigned id.
    marked
        The operation that a PyTorch range around each operation names, or -1.

    """
    part, count = operations.part, operations.parts
    first = np.full(count, -1, np.int64)
    first[part[::-1]] = np.arange(len(part))[::-1]
    op = _common(part, operations.op, first)
    totals = byte_rules.Sizes(*(_sum(part, column, count) for column in alone.sizes))
    communicator = operations.communicator[first]
    is_messages = np.bincount(
        part, operations.is_send | operations.is_receive, minlength=count
    ) == np.bincount(part, minlength=count)
    if not is_messages.any():
        return Parts(op=op, communicator=communicator, sizes=totals)
    n = _member_counts(communicator, communicators)
    message_op = _message_ops(operations, marked[first], is_messages, communicators)
    op = np.where(is_messages, message_op, op).astype(np.int8)
    messages = _message_sizes(operations, op, n)
    unknown = _any(part, operations.size == NULL, count)
    chosen = (
        np.where(is_messages, np.where(unknown, NULL, message), collective)
        for message, collective in zip(messages, totals, strict=True)
    )
    return Parts(op=op, communicator=communicator, sizes=byte_rules.Sizes(*chosen))


def _message_sizes(
    operations: NcclOperations, op: NDArray[np.int8], n: Ints
) -> byte_rules.Sizes:
    """Return the sizes of each part as messages; `op` and `n`, its ranks, are by part."""
    part, count = operations.part, len(op)
    sends, receives = operations.is_send, operations.is_receive
    sent = _sum(part[sends], operations.size[sends], count)
    received = _sum(part[receives], operations.size[receives], count)
    largest = np.full(count, NULL, np.int64)
    np.maximum.at(largest, part, operations.size)
    sent = np.where(op == OP["Gather"], largest, sent)
    received = np.where(op == OP["Scatter"], largest, received)
    sizes = byte_rules.sizes(op, sent, received, n, _uneven(operations, count, n))
    # Several messages of one event: the message size is the largest that the API was given.
    return sizes._replace(msg=np.where(op == OP["SendRecv"], largest, sizes.msg))


def _member_counts(communicator: Ints, communicators: Mapping[int, Communicator]) -> Ints:
    """Return the number of ranks in each communicator, or NULL."""
    different, index = np.unique(communicator, return_inverse=True)
    entries = (communicators.get(unsigned(key)) for key in different.tolist())
    sizes = [entry.size if entry and entry.size else NULL for entry in entries]
    return np.array(sizes, np.int64)[index.reshape(-1)]


def _common(part: Ints, op: NDArray[np.int8], first: Ints) -> NDArray[np.int8]:
    """Return the operation that all operations of a part share, or OTHER."""
    common = op[first]
    common[part[op != common[part]]] = OP["OTHER"]
    return common


def _sum(part: Ints, values: Ints, count: int) -> Ints:
    """Return the sum of the values of each of `count` parts.

    `part` is the number of the part of each value. NULL for a part with a NULL value, or with
    none.
    """
    total = np.zeros(count, np.int64)
    np.add.at(total, part, np.where(values == NULL, 0, values))
    has_values = _any(part, np.ones(len(part), np.bool_), count)
    return np.where(has_values & ~_any(part, values == NULL, count), total, NULL)


def _any(part: Ints, mask: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """Return for each of `count` parts whether the mask is true in any of its rows."""
    result = np.zeros(count, np.bool_)
    result[part[mask]] = True
    return result


def _message_ops(
    operations: NcclOperations,
    marked: NDArray[np.int8],
    is_messages: NDArray[np.bool_],
    communicators: Mapping[int, Communicator],
) -> NDArray[np.int8]:
    """Return the operation of each message group, by its range or else by its peers."""
    count = len(marked)
    own = {key: communicator.rank for key, communicator in communicators.items()}
    peers: list[set[int]] = [set() for _ in range(count)]
    rows = np.flatnonzero(is_messages[operations.part] & (operations.peer != NULL))
    first: dict[int, int] = {}
    columns = operations.part, operations.peer, operations.communicator
    for part, peer, key in zip(*(column[rows].tolist() for column in columns), strict=True):
        peers[part].add(peer)
        first.setdefault(part, unsigned(key))
    op = np.full(count, OP["SendRecv"], np.int8)
    for part, ranks in enumerate(peers):
        own_rank = own.get(first.get(part, -1))
        if own_rank in ranks or len(ranks) >= _PEERS:
            op[part] = OP["AllToAll"]
    is_message_op = np.isin(marked, [*_OF_MESSAGES, OP["SendRecv"]])
    return np.where(is_message_op, marked, op).astype(np.int8)


def _uneven(operations: NcclOperations, count: int, n: Ints) -> NDArray[np.bool_]:
    """Return whether the messages of a part differ in size, or skip ranks of the group."""
    uneven = np.zeros(count, np.bool_)
    for side in (operations.is_send, operations.is_receive):
        part, size = operations.part[side], operations.size[side]
        low = np.full(count, np.iinfo(np.int64).max, np.int64)
        high = np.full(count, NULL, np.int64)
        np.minimum.at(low, part, size)
        np.maximum.at(high, part, size)
        messages = np.bincount(part, minlength=count)
        uneven |= (messages > 0) & ((low != high) | ((n != NULL) & (messages != n)))
    return uneven
