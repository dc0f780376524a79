"""The dependency graph of a step: operations of all ranks, and communication between them.

Nodes are long names, edges are as columns. NCCL_ALLREDUCE is no node: its SEND and RECV are.
Without files of NCCL the communication of a tensor is one node of each rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.readers.dpro.dataflow import LocalGraph
from fastcomm.readers.dpro.names import (
    COARSE,
    STAGES,
    Name,
    category,
    coarse,
    is_rank,
    long_name,
)
from fastcomm.readers.dpro.nccl import Topology
from fastcomm.readers.dpro.trial import Trial
from fastcomm.readers.dpro.uniform import UniformTrace
from fastcomm.replay import communication
from fastcomm.replay.communication import Servers
from fastcomm_kernels.arrays import NULL, Ints

Group = tuple[int, ...]
Communicate = Callable[[str, Group], Iterable[tuple[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Nodes in the order of their first edge; edge k goes from `source[k]` to `target[k]`."""

    nodes: tuple[str, ...]
    source: Ints
    target: Ints
    groups: tuple[Group, ...]

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
    silent = [(tensor,) for tensor in _tensors(graph) if (tensor,) not in groups]
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
    number = {name: i for i, name in enumerate(nodes)}
    return Dependencies(
        nodes=tuple(nodes),
        source=np.fromiter((number[a] for a, _ in edges), np.int64, len(edges)),
        target=np.fromiter((number[b] for _, b in edges), np.int64, len(edges)),
        groups=tuple(groups),
    )


def _tensors(graph: LocalGraph) -> list[int]:
    """All tensors that the local graph communicates."""
    return [each for name in graph.nodes for each in Name.of(name).tensors]


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
    peers = [
        topology.pid_of[each]
        for each in communication.peers(pid, topology)
        if each in topology.pid_of
    ]
    for peer in peers or [pid]:
        yield long_name(peer, f"{head}.Sync"), queue
    yield queue, taken
    if len(peers) < 2:  # noqa: PLR2004
        yield taken, given
    yield from communication.slices(pid, head, counts.get(head, {}), topology)
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


def kinds(nodes: Sequence[Name]) -> list[str]:
    """The fine category of each node."""
    known: dict[str, str] = {}
    return [known.setdefault(each.standard, category(each.standard)) for each in nodes]


def is_operator(kinds_: Sequence[str]) -> NDArray[np.bool_]:
    """Which nodes are operators of a framework."""
    return np.array([coarse(each) == "operator" for each in kinds_], bool)
