"""Slices of a group of tensors on the network: who sends to whom, around rings and along trees.

A slice of a ring has the suffix loop_channel_chunk_slice, a chunk being a turn of the ring. In
a tree a rank sends a slice up and to each rank below, so that its suffix names the two ranks as
well: loop_channel_chunk_slice_from_to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from fastcomm.errors import FastcommError
from fastcomm.replay.names import IN, OUT
from fastcomm.replay.nccl import TREE, Topology, Tree

Edge = tuple[str, str]

_COUNTS = ("loopNum", "channelNum", "chunkNum", "sliceNum")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One rank and one group: `head` is the group's name."""

    rank: int
    head: str
    pid_of: Mapping[int, str]

    def at(self, sub_op: str, rank: int | None = None) -> str:
        """The long name of an operation of the group, of this rank or another."""
        return f"{self.pid_of[self.rank if rank is None else rank]}->{self.head}.{sub_op}"


def peers(pid: str, topology: Topology) -> tuple[int, ...]:
    """All ranks that share a channel with a rank, itself included; () of one in no channel."""
    rank = topology.rank_of.get(pid)
    channels = topology.tree if topology.algorithm == TREE else topology.ring
    shared = [set(channel) for channel in channels.values() if rank in channel]
    return tuple(sorted(set().union(*shared)))


def slices(
    pid: str, head: str, counts: Mapping[str, int], topology: Topology
) -> Iterator[Edge]:
    """Edges of what a rank sends and of what that waits for; `counts` are the trace's."""
    members = peers(pid, topology)
    if lost := [rank for rank in members if rank not in topology.pid_of]:
        raise FastcommError(
            f"{pid} shares a channel with rank {lost[0]} of NCCL, which has no files"
        )
    if not members:
        return
    place = _Place(rank=topology.rank_of[pid], head=head, pid_of=topology.pid_of)
    loops, channels, chunks, parts = (counts.get(each, 0) for each in _COUNTS)
    size = loops or 1, parts or 1
    if topology.algorithm == TREE:
        trees = {h: tree for h, tree in topology.tree.items() if place.rank in tree}
        for loop, c, part, h in product(
            range(size[0]), range(chunks or 1), range(size[1]), _used(trees, channels)
        ):
            yield from _branch(place, trees[h][place.rank], f"{loop}_{h}_{c}_{part}")
        return
    rings = {h: ring for h, ring in topology.ring.items() if place.rank in ring}
    used = _used(rings, channels)
    turns = chunks or max((2 * (len(rings[h]) - 1) for h in used), default=0)
    for loop, c, part, h in product(range(size[0]), range(turns), range(size[1]), used):
        suffix = f"{loop}_{h}_{c}_{part}", f"{loop}_{h}_{c - 1}_{part}"
        yield from _turn(place, rings[h][place.rank], suffix, c, turns)
        if c >= 2 * (len(rings[h]) - 1) - 1:
            other = rings[h][place.rank]
            yield place.at(f"RECV~>{suffix[0]}", other), place.at(OUT, other)


def _used(channels: Mapping[int, object], count: int) -> list[int]:
    """The channels that the group goes by; all where the trace does not say how many."""
    return [h for h in sorted(channels) if not count or h < count]


def _turn(
    place: _Place, after: int, suffix: tuple[str, str], turn: int, turns: int
) -> Iterator[Edge]:
    """What a rank waits for to send in a turn of the ring, and who waits for it."""
    send = place.at(f"SEND~>{suffix[0]}")
    yield place.at(IN), send
    if turn < turns - 1 or turn == 0:
        yield place.at(IN), place.at(f"RECV~>{suffix[0]}")
    if turn > 0:
        yield place.at(f"RECV~>{suffix[1]}"), send
    yield send, place.at(f"RECV~>{suffix[0]}", after)


def _branch(place: _Place, own: Tree, slice_: str) -> Iterator[Edge]:
    """Sums go up when those from below are there, the whole comes down and goes on at once."""

    def hop(sub_op: str, source: int, target: int) -> str:
        at = source if sub_op == "SEND" else target
        return place.at(f"{sub_op}~>{slice_}_{source}_{target}", at)

    rank = place.rank
    had = [hop("RECV", below, rank) for below in own.down]
    for receive in had:
        yield place.at(IN), receive
    if own.up is not None:
        up = hop("SEND", rank, own.up)
        yield place.at(IN), up
        for receive in had:
            yield receive, up
        yield up, hop("RECV", rank, own.up)
        had = [hop("RECV", own.up, rank)]
    for below in own.down:
        down = hop("SEND", rank, below)
        for receive in had:
            yield receive, down
        yield down, hop("RECV", rank, below)
    for receive in had:
        yield receive, place.at(OUT)
