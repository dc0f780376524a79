"""Edges of communication in the graph of a step: rings, trees, parameter servers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from fastcomm.errors import FastcommError
from fastcomm.readers.dpro.names import IN, OUT, REQUESTS, Name, long_name
from fastcomm.readers.dpro.nccl import TREE, Topology, Tree
from fastcomm.readers.dpro.uniform import UniformTrace

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


_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Who pushes what where, and what servers do, as the keys of a trace tell it.

    Both are by tensor and part: `pushed` the pairs (worker, server), the earliest push first,
    `done` the names of what a server does, in order.
    """

    pushed: Mapping[tuple[int, str], tuple[tuple[str, str], ...]]
    done: Mapping[tuple[int, str], tuple[str, ...]]

    @classmethod
    def of(cls, trace: UniformTrace) -> "Servers":
        """Collect them."""
        ends: dict[tuple[int, str], list[tuple[float, str, str]]] = {}
        done: dict[tuple[int, str], list[tuple[int, str]]] = {}
        size = len(trace.keys)
        totals = np.bincount(trace.key, trace.start - trace.start.min() + trace.dur, size)
        means = totals / np.maximum(np.bincount(trace.key, minlength=size), 1)
        for key, text in enumerate(trace.keys):
            name = Name.of(text)
            if name.sub_op == REQUESTS[0]:
                worker, server, part = (name.suffix or "").split("::")
                pair = (float(means[key]), worker, server)
                ends.setdefault((name.tensors[0], part), []).append(pair)
            elif name.sub_op in {"COPY_FIRST", "SUM", "COPY_MERGED"}:
                part = (name.suffix or "").rpartition("~PART")[2]
                done.setdefault((name.tensors[0], part), []).append((_place(name), text))
        return cls(
            pushed={
                key: tuple((worker, server) for _, worker, server in sorted(each))
                for key, each in ends.items()
            },
            done={key: tuple(text for _, text in sorted(each)) for key, each in done.items()},
        )

    @property
    def tensors(self) -> tuple[int, ...]:
        """All tensors that are pushed."""
        return tuple(sorted({tensor for tensor, _ in self.pushed}))

    def edges(
        self, pid: str, tensor: int, befores: Sequence[str], afters: Sequence[str]
    ) -> Iterator[Edge]:
        """What the worker of a rank does with a tensor between its backward op and updates."""
        found = _NUMBER.search(pid.partition(".")[0])
        own = f"worker_{int(found[0])}" if found else ""
        for (sent, part), pairs in self.pushed.items():
            for place, (worker, server) in enumerate(pairs if sent == tensor else ()):
                if worker != own:
                    continue
                chain = [_request(worker, server, tensor, part, each) for each in REQUESTS]
                yield from ((before, chain[0]) for before in befores)
                yield from pairwise(chain)
                yield from ((chain[-1], after) for after in afters)
                yield from self._served(self.done.get((tensor, part), ()), place, chain)

    def _served(self, done: Sequence[str], place: int, chain: Sequence[str]) -> Iterator[Edge]:
        """What a server does with it: the push feeds its place, the whole comes back."""
        if not done:
            return
        yield chain[0], done[min(place, len(done) - 1)]
        yield from pairwise(done)
        yield done[-1], chain[-1]


def _place(name: Name) -> int:
    """Where an operation stands among those of a server: copy, sums, copy."""
    if name.sub_op == "SUM":
        return 1 + int((name.suffix or "").split("::")[1])
    return 0 if name.sub_op == "COPY_FIRST" else 1 << 30


def _request(worker: str, server: str, tensor: int, part: str, sub_op: str) -> str:
    """The long name of one request or its answer; what an answer's link is the sender's."""
    ends = (worker, server) if sub_op.endswith("REQ") else (server, worker)
    link = "::".join(ends)
    return long_name(link, f"Comm.{tensor}.{sub_op}", f"{link}::{part}")
