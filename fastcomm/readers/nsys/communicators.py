"""NCCL communicators: their members over all reports, and what their operations move.

Operations that NCCL fused into one kernel add up. Messages of one group are an all-to-all where
a range around them says so, or where they include the own rank or three others and more: uneven
splits skip empty peers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.communication import ROOTED, Partners, Peers
from fastcomm.readers.nsys.nvtx import NcclRanges
from fastcomm.readers.nsys.operations import KernelParts, NcclOperations
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Ints

_BITS = (1 << 64) - 1
_MADE_BY = ("ncclCommInit", "ncclCommSplit", "ncclCommShrink", "ncclCommGrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One process in one communicator."""

    size: int | None
    rank: int | None  # in the communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A communicator as one of its members knows it."""

    size: int | None
    rank: int | None  # own, in the communicator
    ranks: tuple[int, ...] | None  # global ranks of all members, in their order in it


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorRecords:
    """What the ranges of one process say of communicators, by id."""

    memberships: dict[int, Membership] = field(default_factory=dict)
    used: frozenset[int] = frozenset()

    @property
    def largest(self) -> tuple[int, Membership] | None:
        """The largest communicator that the process is known to be in."""
        known = [(each.size or 0, key) for key, each in self.memberships.items()]
        if not known:
            return None
        key = max(known)[1]
        return key, self.memberships[key]


def unsigned(bits: int) -> int:
    """The id whose bits a column holds."""
    return bits & _BITS


def said_by(nccl: NcclRanges) -> CommunicatorRecords:
    """What one process says."""
    makes = np.array([name.startswith(_MADE_BY) for name in nccl.calls.names], np.bool_)
    is_made = makes[nccl.calls.code] if len(nccl.calls.code) else np.zeros(0, np.bool_)
    known = nccl.communicator != NULL
    rows = np.flatnonzero(is_made & known & (nccl.ranks != NULL))
    columns = (nccl.communicator[rows], nccl.ranks[rows], nccl.rank[rows])
    memberships = {
        unsigned(key): Membership(size=size, rank=None if rank == NULL else rank)
        for key, size, rank in zip(*(column.tolist() for column in columns), strict=True)
    }
    used = np.unique(nccl.communicator[~is_made & known])
    return CommunicatorRecords(
        memberships=memberships, used=frozenset(unsigned(key) for key in used.tolist())
    )


def global_ranks(said: Mapping[int, CommunicatorRecords]) -> dict[int, int] | None:
    """The rank of each process (numbered by the caller) in the world; None where it is unknown.

    The world is the communicator that every process is in, if none that is known is larger: a
    part of a job may have a smaller one in common.
    """
    everywhere = frozenset.intersection(
        *(frozenset(each.memberships) for each in said.values())
    )
    first = next(iter(said.values())).memberships
    largest = world_size(said.values())
    worlds = [key for key in sorted(everywhere) if first[key].size == largest]
    if largest is None or not worlds:
        return None
    ranks = {process: each.memberships[worlds[0]].rank for process, each in said.items()}
    known = {process: rank for process, rank in ranks.items() if rank is not None}
    return known if len(known) == len(said) else None


def world_size(said: Iterable[CommunicatorRecords]) -> int | None:
    """The size of the largest communicator of all; None where none is known."""
    sizes = [largest[1].size for each in said if (largest := each.largest) is not None]
    return max((size for size in sizes if size is not None), default=None)


def join(
    said: Mapping[int, CommunicatorRecords], rank_of: Mapping[int, int], world: int | None
) -> dict[int, dict[int, Communicator]]:
    """For each process its communicators, by id, with the global ranks of the members.

    Where no call that made it is known, the users of a communicator are its members if all of
    the `world` is here; else nobody knows whether they are all.
    """
    members: dict[int, dict[int, int]] = {}
    users: dict[int, list[int]] = {}
    for process, each in said.items():
        for key, membership in each.memberships.items():
            if membership.rank is not None:
                members.setdefault(key, {})[membership.rank] = rank_of[process]
        for key in each.used | each.memberships.keys():
            users.setdefault(key, []).append(rank_of[process])
    complete = world is not None and len(said) == world
    found: dict[int, dict[int, Communicator]] = {}
    for process, each in said.items():
        mine = {}
        for key in each.used | each.memberships.keys():
            membership = each.memberships.get(key, Membership(size=None, rank=None))
            mine[key] = _joined(membership, members.get(key, {}), users[key], complete)
        found[process] = mine
    return found


def _joined(
    own: Membership, members: Mapping[int, int], users: list[int], complete: bool
) -> Communicator:
    if own.size is not None:
        whole = len(members) == own.size
        ranks = tuple(members[place] for place in sorted(members)) if whole else None
        return Communicator(size=own.size, rank=own.rank, ranks=ranks)
    ranks = tuple(sorted(users)) if complete else None
    return Communicator(size=len(ranks) if ranks else None, rank=None, ranks=ranks)


def find_partners(
    operations: NcclOperations,
    matched: KernelParts,
    op: NDArray[np.int8],
    communicators: Mapping[int, Communicator],
) -> Partners:
    """The partners of each communication kernel, through the operations that it runs.

    A kernel that does several parts, or is one more than its part has, has none that is known.
    """
    found = Partners.unknown(len(op))
    sends_to, receives_from = list(found.sends_to), list(found.receives_from)
    root, peer = (
        _global(operations, places, communicators)
        for places in (operations.root, operations.peer)
    )
    order = np.argsort(operations.part, kind="stable")
    parts = operations.part[order]
    unknown = matched.extra.copy()
    unknown[list(matched.fused)] = True
    known = (matched.part >= 0) & ~unknown
    for k in np.flatnonzero(known & np.isin(op, (*ROOTED, OP["SendRecv"]))).tolist():
        first, last = np.searchsorted(parts, (matched.part[k], matched.part[k] + 1))
        single = matched.operation[k]
        members = order[first:last] if single < 0 else np.array([single])
        if op[k] != OP["SendRecv"]:
            found.root[k] = root[members[0]]
        elif (peer[members] != NULL).all():
            sends_to[k] = _chosen(peer, members[operations.is_send[members]])
            receives_from[k] = _chosen(peer, members[operations.is_receive[members]])
    return Partners(root=found.root, sends_to=sends_to, receives_from=receives_from)


def _chosen(peer: Ints, members: Ints) -> Peers:
    return tuple(peer[members].tolist())


def _global(
    operations: NcclOperations, places: Ints, communicators: Mapping[int, Communicator]
) -> Ints:
    """The global rank at each operation's place in its communicator, or NULL."""
    found = np.full(len(places), NULL, np.int64)
    for key in np.unique(operations.communicator).tolist():
        known = communicators.get(unsigned(key))
        if known is None or known.ranks is None:
            continue
        mine = np.flatnonzero((operations.communicator == key) & (places >= 0))
        mine = mine[places[mine] < len(known.ranks)]
        found[mine] = np.array(known.ranks, np.int64)[places[mine]]
    return found


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


def sizes_of_operations(
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


def sizes_of_parts(
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
