"""The dependency graph of a step: operations of all ranks, and communication between them.

Nodes are long names, edges are as columns. NCCL_ALLREDUCE is no node: its SEND and RECV are,
along rings or trees; so are pushes to servers and pulls. Without files of NCCL communication
of a tensor is one node a rank.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pyarrow as pa

from fastcomm.errors import FastcommError
from fastcomm.readers.dpro import (
    COARSE,
    IN,
    OUT,
    REQUESTS,
    STAGES,
    Name,
    UniformTrace,
    is_rank,
    long_name,
)
from fastcomm.readers.dpro.communication import COUNTS
from fastcomm.readers.dpro.job import TREE, LocalGraph, Topology, Tree
from fastcomm.readers.dpro.trial import Trial
from fastcomm_kernels.arrays import NULL, Ints

Edge = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankGroup:
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
    place = _RankGroup(rank=topology.rank_of[pid], head=head, pid_of=topology.pid_of)
    loops, channels, chunks, parts = (counts.get(name, 0) for name in COUNTS)
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
    place: _RankGroup, after: int, suffix: tuple[str, str], turn: int, turns: int
) -> Iterator[Edge]:
    """What a rank waits for to send in a turn of the ring, and who waits for it."""
    send = place.at(f"SEND~>{suffix[0]}")
    yield place.at(IN), send
    if turn < turns - 1 or turn == 0:
        yield place.at(IN), place.at(f"RECV~>{suffix[0]}")
    if turn > 0:
        yield place.at(f"RECV~>{suffix[1]}"), send
    yield send, place.at(f"RECV~>{suffix[0]}", after)


def _branch(place: _RankGroup, own: Tree, slice_: str) -> Iterator[Edge]:
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
                done.setdefault((name.tensors[0], part), []).append((_server_place(name), text))
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
        number = _NUMBER.search(pid.partition(".")[0])
        own = f"worker_{int(number[0])}" if number else ""
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


def _server_place(name: Name) -> int:
    """Where an operation stands among those of a server: copy, sums, copy."""
    if name.sub_op == "SUM":
        return 1 + int((name.suffix or "").split("::")[1])
    return 0 if name.sub_op == "COPY_FIRST" else 1 << 30


def _request(worker: str, server: str, tensor: int, part: str, sub_op: str) -> str:
    """The long name of one request or its answer; what an answer's link is the sender's."""
    ends = (worker, server) if sub_op.endswith("REQ") else (server, worker)
    link = "::".join(ends)
    return long_name(link, f"Comm.{tensor}.{sub_op}", f"{link}::{part}")


Group = tuple[int, ...]
Communicate = Callable[[str, Group], Iterable[tuple[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Nodes in the order of their first edge; edge k goes from `source[k]` to `target[k]`."""

    nodes: tuple[str, ...]
    source: Ints
    target: Ints
    groups: tuple[Group, ...]

    @classmethod
    def of(
        cls, nodes: Iterable[str], edges: Collection[Edge], groups: Iterable[Group]
    ) -> "Dependencies":
        """Number the nodes of edges that are given by name."""
        names = tuple(nodes)
        number = {name: i for i, name in enumerate(names)}
        return cls(
            nodes=names,
            source=np.fromiter((number[a] for a, _ in edges), np.int64, len(edges)),
            target=np.fromiter((number[b] for _, b in edges), np.int64, len(edges)),
            groups=tuple(groups),
        )

    @property
    def edges(self) -> Iterator[tuple[str, str]]:
        """The edges by name."""
        for a, b in zip(self.source.tolist(), self.target.tolist(), strict=True):
            yield self.nodes[a], self.nodes[b]

    def parsed(self) -> list[Name]:
        """The nodes in their parts."""
        return [Name.of(node) for node in self.nodes]

    def table(self) -> pa.Table:
        """One row an edge."""
        return pa.table({"source": self.source, "target": self.target})


def dependencies(trial: Trial, step: int, *, joins_ranks: bool = True) -> Dependencies:
    """Return the graph of a trial; `step` tells which tensors were sent together.

    With `joins_ranks` communication that is one node of each rank begins when all are ready.
    """
    groups = tensor_groups(trial.trace, step)
    topology, graph, counts = trial.topology, trial.graph, trial.counts
    if topology is not None:
        return joined(
            trial.trace.pids,
            graph,
            groups,
            lambda pid, group: through_network(pid, group, graph, counts, topology),
        )
    servers = Servers.of(trial.trace)
    pids = [pid for pid in trial.trace.pids if is_rank(pid)]
    if servers.tensors:
        groups = tuple((tensor,) for tensor in servers.tensors)
        return joined(pids, graph, groups, _through_servers(servers, graph))
    one = _as_one(trial, joins_ranks=joins_ranks)
    tensors = [tensor for name in graph.nodes for tensor in Name.of(name).tensors]
    silent = [(tensor,) for tensor in tensors if (tensor,) not in groups]
    return replace(joined(pids, graph, (*groups, *silent), one), groups=groups)


def joined(
    pids: Iterable[str], graph: LocalGraph, groups: Sequence[Group], communicate: Communicate
) -> Dependencies:
    """The same local graph of every rank, with the edges of each group of tensors."""
    edges: dict[tuple[str, str], None] = {}
    nodes: dict[str, None] = {}
    for pid in pids:
        nodes.update((_node(pid, n), None) for n in graph.nodes if n[:5] != "Comm.")
        edges.update(dict.fromkeys(_local(pid, graph)))
        for group in groups:
            edges.update(dict.fromkeys(communicate(pid, group)))
    for edge in edges:
        nodes.update(dict.fromkeys(edge))
    return Dependencies.of(nodes, edges, groups)


def tensor_groups(trace: UniformTrace, step: int) -> tuple[Group, ...]:
    """Tensors that are sent together; a later group takes over tensors of an earlier one."""
    rows = np.flatnonzero(trace.counts & (trace.step == step) & (trace.step != NULL))
    parsed = {name: Name.of(name) for name in dict.fromkeys(trace.names)}
    groups: dict[Group, None] = {}
    owner: dict[int, Group] = {}
    for key in dict.fromkeys(trace.key[rows].tolist()):
        name = parsed[trace.names[key]]
        if name.op_cat == "Comm" and name.sub_op != "Sync" and name.tensors not in groups:
            groups[name.tensors] = None
            owner.update(dict.fromkeys(name.tensors, name.tensors))
    return tuple(group for group in groups if group in owner.values())


def _local(pid: str, graph: LocalGraph) -> Iterator[tuple[str, str]]:
    """What one rank computes; an update of this step does not hold up its forward ops."""
    for a, b in graph.edges:
        closing = a.startswith("UPDATE_") and b.startswith("FW.")
        if not (closing or a.startswith("Comm.") or b.startswith("Comm.")):
            yield _node(pid, a), _node(pid, b)


def _node(pid: str, name: str) -> str:
    """The long name of a node of one rank; the end is that of all."""
    return name if name == "END" else f"{pid}->{name}"


def through_network(
    pid: str,
    group: Group,
    graph: LocalGraph,
    counts: Mapping[str, Mapping[str, int]],
    topology: Topology,
) -> Iterator[tuple[str, str]]:
    """What one rank does to send a group of tensors in slices."""
    head = head_of(group)
    sync, queue, taken, given = (f"{pid}->{head}.{each}" for each in ("Sync", *STAGES))
    for backward in _backwards(group, graph):
        yield f"{pid}->{backward}", sync
    ranks = peers(pid, topology)
    pids = [topology.pid_of[rank] for rank in ranks if rank in topology.pid_of]
    for peer in pids or [pid]:
        yield long_name(peer, f"{head}.Sync"), queue
    yield queue, taken
    if len(pids) < 2:  # noqa: PLR2004
        yield taken, given
    yield from slices(pid, head, counts.get(head, {}), topology)
    for after in _afters(group, graph):
        yield given, f"{pid}->{after}"


def head_of(group: Group) -> str:
    """The name of the communication of a group of tensors."""
    return f"Comm.{'+'.join(map(str, group))}"


def _backwards(group: Group, graph: LocalGraph) -> Iterator[str]:
    """The first backward operation before each tensor."""
    for tensor in group:
        before = graph.predecessors.get(f"Comm.{tensor}", ())
        yield from [each for each in before if each.startswith("BW.")][:1]


def _afters(group: Group, graph: LocalGraph) -> Iterator[str]:
    """What waits for each tensor."""
    for tensor in group:
        yield from graph.successors.get(f"Comm.{tensor}", ())


def _through_servers(servers: Servers, graph: LocalGraph) -> Communicate:
    """Communication by pushes to servers and pulls from them."""

    def communicate(pid: str, group: Group) -> Iterator[tuple[str, str]]:
        for tensor in group:
            befores = [f"{pid}->{each}" for each in _backwards((tensor,), graph)]
            afters = [f"{pid}->{each}" for each in _afters((tensor,), graph)]
            yield from servers.edges(pid, tensor, befores, afters)

    return communicate


def _as_one(trial: Trial, *, joins_ranks: bool) -> Communicate:
    """Communication as one node of each rank; without `joins_ranks` of those that log it."""
    pids, graph, known = trial.trace.pids, trial.graph, set(trial.trace.keys)

    def communicate(pid: str, group: Group) -> Iterator[tuple[str, str]]:
        head = head_of(group)
        logs = pids if joins_ranks else [pid]
        stages = [each for each in COARSE if any(f"{p}->{head}.{each}" in known for p in logs)]
        chain = [f"{pid}->{head}.{each}" for each in stages]
        joins = joins_ranks and len(chain) == len(COARSE)
        befores = [f"{pid}->{each}" for each in _backwards(group, graph)]
        for node in chain:
            meeting = joins and node == chain[-1]
            ready = (f"{peer}->{head}.{COARSE[0]}" for peer in pids) if meeting else befores
            yield from ((before, node) for before in ready)
            befores = [node]
        for after in _afters(group, graph):
            yield from ((before, f"{pid}->{after}") for before in befores)

    return communicate
