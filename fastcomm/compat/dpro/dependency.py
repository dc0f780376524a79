"""Dependency graph of a step: the operations of all ranks, and communication between them.

Nodes are long names of operations, such as ``host0.rank0->BW.layer1``. A collective of NCCL is
represented by its SEND and RECV operations along rings or trees, communication with parameter
servers by pushes and pulls. In trials without NCCL files, the communication of a tensor is one
node per rank.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pyarrow as pa

from fastcomm.compat.dpro.communication import COUNTS
from fastcomm.compat.dpro.job import TREE, LocalGraph, NamePair, Topology, Tree
from fastcomm.compat.dpro.trial import Trial
from fastcomm.compat.dpro.uniform import (
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
from fastcomm.errors import FastcommError
from fastcomm_kernels.arrays import NULL, Flags, Ints

_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Communication with parameter servers, by tensor and part of a tensor."""

    pushed: Mapping[tuple[int, str], tuple[tuple[str, str], ...]]  # (worker, server), by time
    done: Mapping[tuple[int, str], tuple[str, ...]]  # operations of the server, in order

    @classmethod
    def of(cls, trace: UniformTrace) -> "Servers":
        """Collect pushes and operations of servers from the keys of a trace."""
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
                done.setdefault((name.tensors[0], part), []).append((_server_order(name), text))
        return cls(
            pushed={
                key: tuple((worker, server) for _, worker, server in sorted(pushes))
                for key, pushes in ends.items()
            },
            done={key: tuple(text for _, text in sorted(ops)) for key, ops in done.items()},
        )

    @property
    def tensors(self) -> tuple[int, ...]:
        """All tensors that are pushed, sorted."""
        return tuple(sorted({tensor for tensor, _ in self.pushed}))

    def edges(
        self, pid: str, tensor: int, befores: Sequence[str], afters: Sequence[str]
    ) -> Iterator[NamePair]:
        """Yield the edges of a worker that pushes and pulls a tensor.

        Parameters
        ----------
        pid
            Process of the worker's rank.
        tensor
            The tensor.
        befores, afters
            Long names of the operations before the push, and after the pull.

        """
        number = _NUMBER.search(pid.partition(".")[0])
        own = f"worker_{int(number[0])}" if number else ""
        for (sent, part), pairs in self.pushed.items():
            for place, (worker, server) in enumerate(pairs if sent == tensor else ()):
                if worker != own:
                    continue
                chain = [_request(worker, server, tensor, part, op) for op in REQUESTS]
                yield from ((before, chain[0]) for before in befores)
                yield from pairwise(chain)
                yield from ((chain[-1], after) for after in afters)
                yield from self._served(self.done.get((tensor, part), ()), place, chain)

    def _served(
        self, done: Sequence[str], place: int, chain: Sequence[str]
    ) -> Iterator[NamePair]:
        """Yield the edges of a server: from a push, between its operations, and to the pull."""
        if not done:
            return
        yield chain[0], done[min(place, len(done) - 1)]
        yield from pairwise(done)
        yield done[-1], chain[-1]


def _server_order(name: Name) -> int:
    """Return a key that sorts the operations of a server: first copy, sums, last copy."""
    if name.sub_op == "SUM":
        return 1 + int((name.suffix or "").split("::")[1])
    return 0 if name.sub_op == "COPY_FIRST" else 1 << 30


def _request(worker: str, server: str, tensor: int, part: str, sub_op: str) -> str:
    """Return the long name of a request or response; its link begins with the sender."""
    ends = (worker, server) if sub_op.endswith("REQ") else (server, worker)
    link = "::".join(ends)
    return long_name(link, f"Comm.{tensor}.{sub_op}", f"{link}::{part}")


Group = tuple[int, ...]
Communicate = Callable[[str, Group], Iterable[NamePair]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Dependency graph: edge k goes from node `source[k]` to node `target[k]`."""

    nodes: tuple[str, ...]  # long names
    source: Ints
    target: Ints
    groups: tuple[Group, ...]  # tensors that are communicated together

    @classmethod
    def of(
        cls, nodes: Iterable[str], edges: Collection[NamePair], groups: Iterable[Group]
    ) -> "Dependencies":
        """Build a graph from names.

        Parameters
        ----------
        nodes
            Names of all nodes; a node's number is its place.
        edges
            Pairs of names, from a node to one that waits for it.
        groups
            Tensors that are communicated together.

        """
        names = tuple(nodes)
        number = {name: i for i, name in enumerate(names)}
        return cls(
            nodes=names,
            source=np.fromiter((number[a] for a, _ in edges), np.int64, len(edges)),
            target=np.fromiter((number[b] for _, b in edges), np.int64, len(edges)),
            groups=tuple(groups),
        )

    @property
    def edges(self) -> Iterator[NamePair]:
        """The edges as pairs of long names."""
        for a, b in zip(self.source.tolist(), self.target.tolist(), strict=True):
            yield self.nodes[a], self.nodes[b]

    def part(self, is_used: Flags, groups: tuple[Group, ...]) -> "Dependencies":
        """Return the graph of some nodes, with the edges between them."""
        number = np.cumsum(is_used) - 1
        inside = is_used[self.source] & is_used[self.target]
        return Dependencies(
            nodes=tuple(node for node, used in zip(self.nodes, is_used, strict=True) if used),
            source=number[self.source[inside]],
            target=number[self.target[inside]],
            groups=groups,
        )

    def parsed(self) -> list[Name]:
        """Return the names of the nodes, split into their parts."""
        return [Name.of(node) for node in self.nodes]

    def table(self) -> pa.Table:
        """Return the edges as a table; `source` and `target` are numbers of nodes."""
        return pa.table({"source": self.source, "target": self.target})


def dependencies(trial: Trial, step: int, *, joins_ranks: bool = True) -> Dependencies:
    """Build the dependency graph of a trial.

    Parameters
    ----------
    trial
        The trial.
    step
        Step whose trace tells which tensors were communicated together.
    joins_ranks
        Whether communication that is one node per rank begins when all ranks are ready.

    """
    groups = tensor_groups(trial.trace, step)
    topology, graph, counts = trial.topology, trial.graph, trial.counts
    if topology is not None:
        slices = over_network(graph, counts, topology)
        return combined(trial.trace.pids, graph, groups, slices)
    servers = Servers.of(trial.trace)
    pids = [pid for pid in trial.trace.pids if is_rank(pid)]
    if servers.tensors:
        groups = tuple((tensor,) for tensor in servers.tensors)
        return combined(pids, graph, groups, _server_edges(servers, graph))
    communicate = _single_nodes(trial, joins_ranks=joins_ranks)
    tensors = [tensor for name in graph.nodes for tensor in Name.of(name).tensors]
    silent = [(tensor,) for tensor in tensors if (tensor,) not in groups]
    return replace(combined(pids, graph, (*groups, *silent), communicate), groups=groups)


def combined(
    pids: Iterable[str], graph: LocalGraph, groups: Sequence[Group], communicate: Communicate
) -> Dependencies:
    """Combine copies of a local graph, one per rank, with edges of communication.

    Parameters
    ----------
    pids
        Process of each rank.
    graph
        Dependencies between the operations of one rank.
    groups
        Tensors that are communicated together.
    communicate
        Returns the edges of a process and a group.

    """
    edges: dict[NamePair, None] = {}
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
    """Return the groups of tensors that were communicated together in a step.

    A tensor of several groups belongs to the last; groups without tensors are left out.
    """
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


def _local(pid: str, graph: LocalGraph) -> Iterator[NamePair]:
    """Yield the edges between computations of a rank, without those into the next step.

    `graph` is the same for all ranks; names of the edges begin with `pid`.
    """
    for a, b in graph.edges:
        is_next_step = a.startswith("UPDATE_") and b.startswith("FW.")
        if not (is_next_step or a.startswith("Comm.") or b.startswith("Comm.")):
            yield _node(pid, a), _node(pid, b)


def _node(pid: str, name: str) -> str:
    """Return the long name of a node of one rank; all ranks share the node END."""
    return name if name == "END" else f"{pid}->{name}"


def over_network(
    graph: LocalGraph, counts: Mapping[str, Mapping[str, int]], topology: Topology
) -> Communicate:
    """Return a function that yields the edges of communication in slices.

    Slices go along the rings or trees of the topology. `counts` has the numbers of loops,
    channels, chunks and slices by name of the communication.
    """

    def communicate(pid: str, group: Group) -> Iterator[NamePair]:
        head = group_name(group)
        sync, queue, copy_in, copy_out = (
            f"{pid}->{head}.{stage}" for stage in ("Sync", *STAGES)
        )
        for backward in _backwards(group, graph):
            yield f"{pid}->{backward}", sync
        ranks = peers(pid, topology)
        pids = [topology.pid_of[rank] for rank in ranks if rank in topology.pid_of]
        for peer in pids or [pid]:
            yield long_name(peer, f"{head}.Sync"), queue
        yield queue, copy_in
        if len(pids) < 2:  # noqa: PLR2004
            yield copy_in, copy_out
        yield from slice_edges(pid, head, counts.get(head, {}), topology)
        for after in _successors(group, graph):
            yield copy_out, f"{pid}->{after}"

    return communicate


def group_name(group: Group) -> str:
    """Return the name of the communication of a group of tensors, such as "Comm.3+4"."""
    return f"Comm.{'+'.join(map(str, group))}"


def _backwards(group: Group, graph: LocalGraph) -> Iterator[str]:
    """Yield the first backward operation before the communication of each tensor."""
    for tensor in group:
        before = graph.predecessors.get(f"Comm.{tensor}", ())
        yield from [name for name in before if name.startswith("BW.")][:1]


def _successors(group: Group, graph: LocalGraph) -> Iterator[str]:
    """Yield the operations that wait for the communication of each tensor."""
    for tensor in group:
        yield from graph.successors.get(f"Comm.{tensor}", ())


def _server_edges(servers: Servers, graph: LocalGraph) -> Communicate:
    """Return a function that yields the edges of pushes to servers and pulls from them."""

    def communicate(pid: str, group: Group) -> Iterator[NamePair]:
        for tensor in group:
            befores = [f"{pid}->{name}" for name in _backwards((tensor,), graph)]
            afters = [f"{pid}->{name}" for name in _successors((tensor,), graph)]
            yield from servers.edges(pid, tensor, befores, afters)

    return communicate


def _single_nodes(trial: Trial, *, joins_ranks: bool) -> Communicate:
    """Return a function that yields the edges of communication as one node per rank.

    Without `joins_ranks`, ranks that do not log the communication have no node.
    """
    pids, graph, traced = trial.trace.pids, trial.graph, set(trial.trace.keys)

    def communicate(pid: str, group: Group) -> Iterator[NamePair]:
        head = group_name(group)
        logs = pids if joins_ranks else [pid]
        stages = [op for op in COARSE if any(f"{p}->{head}.{op}" in traced for p in logs)]
        chain = [f"{pid}->{head}.{op}" for op in stages]
        joins = joins_ranks and len(chain) == len(COARSE)
        befores = [f"{pid}->{name}" for name in _backwards(group, graph)]
        for node in chain:
            waits_for_all = joins and node == chain[-1]
            ready = (f"{p}->{head}.{COARSE[0]}" for p in pids) if waits_for_all else befores
            yield from ((before, node) for before in ready)
            befores = [node]
        for after in _successors(group, graph):
            yield from ((before, f"{pid}->{after}") for before in befores)

    return communicate


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
) -> Iterator[NamePair]:
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
) -> Iterator[NamePair]:
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


def _tree_edges(place: _RankGroup, own: Tree, slice_: str) -> Iterator[NamePair]:
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
