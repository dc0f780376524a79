"""Edges between the slices of a collective that ranks send along NCCL's rings or trees."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from fastcomm.errors import FastcommError
from fastcomm.readers.dpro import IN, OUT
from fastcomm.readers.dpro.communication import COUNTS
from fastcomm.readers.dpro.job import Edge
from fastcomm.readers.dpro.topology import TREE, Topology, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankGroup:
    """One rank that communicates the tensors of one group."""

    rank: int
    head: str  # name of the group's communication
    pid_of: Mapping[int, str]  # by rank

    def at(self, sub_op: str, rank: int | None = None) -> str:
        """Return the long name of an operation of the group, by default of this rank."""
        return f"{self.pid_of[self.rank if rank is None else rank]}->{self.head}.{sub_op}"


def peers(pid: str, topology: Topology) -> tuple[int, ...]:
    """Return all ranks that share a channel with a rank, sorted, itself included.

    Empty for a rank without channels.
    """
    rank = topology.rank_of.get(pid)
    channels = topology.tree if topology.algorithm == TREE else topology.ring
    shared = [set(channel) for channel in channels.values() if rank in channel]
    return tuple(sorted(set().union(*shared)))


def slice_edges(
    pid: str, head: str, counts: Mapping[str, int], topology: Topology
) -> Iterator[Edge]:
    """Yield the edges between the slices that a rank sends and receives for a group.

    Parameters
    ----------
    pid
        Process of the rank.
    head
        Name of the group's communication.
    counts
        Numbers of loops, channels, chunks and slices, by the names in `COUNTS`.
    topology
        Rings or trees of NCCL.

    Raises
    ------
    FastcommError
        If a channel includes a rank without files.

    """
    members = peers(pid, topology)
    if missing := [rank for rank in members if rank not in topology.pid_of]:
        raise FastcommError(
            f"{pid} shares a channel with rank {missing[0]} of NCCL, which has no files. Add "
            "the directory of this rank"
        )
    if not members:
        return
    place = _RankGroup(rank=topology.rank_of[pid], head=head, pid_of=topology.pid_of)
    loops, channels, chunks, parts = (counts.get(name, 0) for name in COUNTS)
    size = loops or 1, parts or 1
    if topology.algorithm == TREE:
        trees = {h: tree for h, tree in topology.tree.items() if place.rank in tree}
        for loop, c, part, h in product(
            range(size[0]), range(chunks or 1), range(size[1]), _used_channels(trees, channels)
        ):
            yield from _tree_edges(place, trees[h][place.rank], f"{loop}_{h}_{c}_{part}")
        return
    rings = {h: ring for h, ring in topology.ring.items() if place.rank in ring}
    used = _used_channels(rings, channels)
    turns = chunks or max((2 * (len(rings[h]) - 1) for h in used), default=0)
    for loop, c, part, h in product(range(size[0]), range(turns), range(size[1]), used):
        suffix = f"{loop}_{h}_{c}_{part}", f"{loop}_{h}_{c - 1}_{part}"
        yield from _ring_edges(place, rings[h][place.rank], suffix, c, turns)
        if c >= 2 * (len(rings[h]) - 1) - 1:
            other = rings[h][place.rank]
            yield place.at(f"RECV~>{suffix[0]}", other), place.at(OUT, other)


def _used_channels(channels: Mapping[int, object], count: int) -> list[int]:
    """Return the first `count` channels, which the group uses; all if the count is 0."""
    return [h for h in sorted(channels) if not count or h < count]


def _ring_edges(
    place: _RankGroup, after: int, suffix: tuple[str, str], turn: int, turns: int
) -> Iterator[Edge]:
    """Yield the edges into and out of a rank's SEND in one turn of a ring.

    `after` is the next rank of the ring; `suffix` names the slice of this turn and the last.
    """
    send = place.at(f"SEND~>{suffix[0]}")
    yield place.at(IN), send
    if turn < turns - 1 or turn == 0:
        yield place.at(IN), place.at(f"RECV~>{suffix[0]}")
    if turn > 0:
        yield place.at(f"RECV~>{suffix[1]}"), send
    yield send, place.at(f"RECV~>{suffix[0]}", after)


def _tree_edges(place: _RankGroup, own: Tree, slice_: str) -> Iterator[Edge]:
    """Yield the edges of a rank in a tree.

    A rank sends its sum up after it received the sums from below, and forwards the total down
    as soon as it arrives from above.
    """

    def hop(sub_op: str, source: int, target: int) -> str:
        at = source if sub_op == "SEND" else target
        return place.at(f"{sub_op}~>{slice_}_{source}_{target}", at)

    rank = place.rank
    received = [hop("RECV", below, rank) for below in own.down]
    for receive in received:
        yield place.at(IN), receive
    if own.up is not None:
        up = hop("SEND", rank, own.up)
        yield place.at(IN), up
        for receive in received:
            yield receive, up
        yield up, hop("RECV", rank, own.up)
        received = [hop("RECV", own.up, rank)]
    for below in own.down:
        down = hop("SEND", rank, below)
        for receive in received:
            yield receive, down
        yield down, hop("RECV", rank, below)
    for receive in received:
        yield receive, place.at(OUT)
