"""Dependency graphs of events, and of operations on devices.

A `Graph` has two nodes per event (its start and its end) and typed edges, whose weights are
int64 ns; this module computes its longest paths, delays and slack. A `DeviceGraph` has one node
per operation, which takes time (float64 ns) on one device, and can be replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import FastcommError
from fastcomm.trace.columns import Integers
from fastcomm_kernels import graph as kernels
from fastcomm_kernels import replay as device_kernels
from fastcomm_kernels.arrays import NONE, Flags, Floats, Ints, Numbers
from fastcomm_kernels.graph import Edges, index

EDGE_KINDS = (
    "operator",  # from the start to the end of an event
    "dependency",  # between operators, or between calls that take the same lock
    "launch",  # from the start of a runtime call to the start of the work that it launched
    "kernel_kernel",  # between consecutive work on a stream
    "sync",  # from the end of work to the event that waited for it
    "inferred",  # a synchronization that only the times suggest
    "unexplained",  # from the latest node before, for a node without another predecessor
    "join",  # from the start of one participant to the arrival of the last
)
EDGE_KIND = {name: number for number, name in enumerate(EDGE_KINDS)}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Events as nodes, with typed and weighted edges.

    The first three fields have one value per node, the others one value per edge.
    """

    event: Numbers  # row of the table of events
    time: Ints  # ns
    is_end: Flags  # end of the event, rather than its start
    source: Numbers  # node
    target: Numbers  # node
    kind: NDArray[np.int8]  # position in EDGE_KINDS
    weight: Ints  # ns
    owner: Numbers  # row of the event that the edge's time belongs to, or NONE

    @classmethod
    def of(cls, nodes: tuple[Numbers, Ints, Flags], edges: Edges, count: int) -> Self:
        """Build a graph from columns.

        Parameters
        ----------
        nodes
            Columns `event`, `time` and `is_end`.
        edges
            Columns of the edges; a repeated pair of nodes replaces its first edge.
        count
            How many of the edges to use.

        """
        event, time, is_end = nodes
        merged = _merged(kernels.selected(edges, slice(count)), len(event))
        return cls(event=event, time=time, is_end=is_end, **merged._asdict())

    @classmethod
    def measured(
        cls,
        nodes: tuple[Numbers, Ints, Flags],
        ends: tuple[Integers, Integers],
        kind: NDArray[np.int8],
        owner: Integers,
    ) -> Self:
        """Build a graph whose edges take as long as the time between their nodes.

        `nodes` are the columns `event`, `time` and `is_end`, `ends` source and target of the
        edges, which it sorts by target.
        """
        event, time, is_end = nodes
        source, target, owner = (
            np.ascontiguousarray(column, np.int32) for column in (*ends, owner)
        )
        _, order = kernels.index(target, len(event))
        source, target = source[order], target[order]
        return cls(
            event=event,
            time=time,
            is_end=is_end,
            source=source,
            target=target,
            kind=kind[order],
            weight=time[target] - time[source],
            owner=owner[order],
        )

    @cached_property
    def incoming(self) -> tuple[Numbers, Numbers]:
        """Index of the edges by target: for each node its first position, then edges."""
        return kernels.index(self.target, len(self.event))

    @cached_property
    def outgoing(self) -> tuple[Numbers, Numbers]:
        """Index of the edges by source: for each node its first position, then edges."""
        return kernels.index(self.source, len(self.event))

    @cached_property
    def connected_nodes(self) -> int:
        """Number of nodes that have an edge."""
        marks = np.zeros(len(self.event), np.bool_)
        marks[self.source] = marks[self.target] = True
        return int(marks.sum())

    @cached_property
    def span_ns(self) -> int:
        """Time from the first node that has an edge to the last; of all nodes without edges."""
        used = np.concatenate([self.source, self.target])
        times = self.time[used] if len(used) else self.time
        return int(times.max() - times.min()) if len(times) else 0

    @cached_property
    def places(self) -> tuple[Numbers, Numbers]:
        """Start node and end node by row of the table of events; NONE for rows without."""
        size = int(self.event.max(initial=NONE)) + 1
        first, last = np.full(size, NONE, np.int32), np.full(size, NONE, np.int32)
        number = np.arange(len(self.event), dtype=np.int32)
        first[self.event[~self.is_end]] = number[~self.is_end]
        last[self.event[self.is_end]] = number[self.is_end]
        return first, last

    @cached_property
    def is_join(self) -> Flags:
        """By node: whether it is the arrival of the last participant, and no event's."""
        flags = np.zeros(len(self.event), np.bool_)
        flags[self.target[self.kind == EDGE_KIND["join"]]] = True
        return flags

    def renumbered(self, number: Numbers) -> Self:
        """Return a copy that refers to other rows of a table of events.

        `number` is the new row by row, and NONE at its end, for edges without an owner.
        """
        return replace(self, event=number[self.event], owner=number[self.owner])

    def compact(self) -> tuple[Numbers, Self]:
        """Return the rows of its events, ascending, and a copy that refers to these alone."""
        used = np.unique(np.append(self.event, self.owner[self.owner != NONE]))
        number = np.full(int(used.max(initial=0)) + 2, NONE, np.int32)
        number[used] = np.arange(len(used), dtype=np.int32)
        return used, self.renumbered(number)

    def counts(self) -> dict[str, int]:
        """Return the number of edges of each kind."""
        edges = np.bincount(self.kind, minlength=len(EDGE_KINDS))
        return {name: int(edges[number]) for number, name in enumerate(EDGE_KINDS)}


def _merged(edges: Edges, nodes: int) -> Edges:
    """Merge edges between the same two nodes into the first: the last kind and weight win.

    The last owner wins, too, except NONE.
    """
    first = kernels.originals(kernels.index(edges.target, nodes), edges.source, nodes)
    repeated = np.flatnonzero(first != np.arange(len(first)))
    if not len(repeated):
        return edges
    edges = kernels.selected(edges, np.ones(len(first), np.bool_))  # a copy, to write into
    original = first[repeated]
    edges.kind[original] = edges.kind[repeated]
    edges.weight[original] = edges.weight[repeated]
    owned = repeated[edges.owner[repeated] != NONE]
    edges.owner[first[owned]] = edges.owner[owned]
    is_first = np.ones(len(first), np.bool_)
    is_first[repeated] = False
    return kernels.selected(edges, is_first)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPath:
    """Nodes and edges of a path through a graph, in order."""

    nodes: Numbers
    edges: Numbers  # one fewer than nodes; empty for an empty path

    @classmethod
    def empty(cls) -> Self:
        """Return the path of a graph without nodes."""
        return cls(nodes=np.empty(0, np.int32), edges=np.empty(0, np.int32))

    @classmethod
    def to(cls, last: int, through: Numbers, source: Numbers) -> Self:
        """Return the path to node `last`.

        Parameters
        ----------
        last
            Node at which the path ends.
        through
            For each node the last edge of its longest path, or NONE.
        source
            Source node of each edge.

        """
        return cls.of(kernels.path_to(last, through, source), source, last)

    @classmethod
    def of(cls, edges: Numbers, source: Numbers, last: int) -> Self:
        """Return the path of some edges, in order, to node `last`; `source` is by edge."""
        return cls(nodes=np.append(source[edges], np.int32(last)), edges=edges)

    @classmethod
    def to_latest(cls, time: Ints, through: Numbers, source: Numbers) -> Self:
        """Return the path to the latest node, if any; see `to`. `time` is by node, ns."""
        return cls.to(int(np.argmax(time)), through, source) if len(time) else cls.empty()


def longest_path(graph: Graph, weight: Ints | None = None) -> LongestPath | None:
    """Return the path with the largest sum of weights, or None if the graph has a cycle.

    Parameters
    ----------
    graph
        Its own weights are used unless `weight` is given.
    weight
        Weight of each edge, ns.

    """
    order = kernels.topological(graph.source, graph.target, graph.outgoing, len(graph.event))
    if len(order) < graph.connected_nodes:
        return None
    weight = graph.weight if weight is None else weight
    if not len(order):
        return LongestPath.empty()
    length, through = kernels.longest_path(order, graph.incoming, graph.source, weight, 0)
    return LongestPath.to(int(order[np.argmax(length[order])]), through, graph.source)


def networkx_for(method: str) -> Any:
    """Return networkx for a method; raise FastcommError if it is not installed."""
    try:
        import networkx
    except ImportError as error:
        raise FastcommError(
            f'{method} needs networkx: pip install "fastcomm[graph]"'
        ) from error
    return networkx


def acyclic_order(source: Ints, target: Ints, names: Sequence[str]) -> Numbers:
    """Sort all nodes topologically, nodes without edges last.

    Parameters
    ----------
    source, target
        Nodes of each edge.
    names
        Name of each node, for the error.

    Raises
    ------
    FastcommError
        If the edges have a cycle.

    """
    nodes, before, after = len(names), source.astype(np.int32), target.astype(np.int32)
    order = kernels.topological(before, after, kernels.index(before, nodes), nodes)
    has_edges = np.zeros(nodes, np.bool_)
    has_edges[source] = has_edges[target] = True
    isolated = np.flatnonzero(~has_edges).astype(np.int32)
    has_edges[order] = False
    if has_edges.any():
        stuck = names[int(np.argmax(has_edges))]
        raise FastcommError(f"cyclic dependencies: {stuck} waits for itself or for a cycle")
    return np.append(order, isolated)


def measured_delays(graph: Graph, on_device: Flags) -> Ints:
    """Return the weight of each edge, in ns, with which a replay yields the measured times.

    The edge that determines when a node begins gets its measured delay. Other edges get the
    least delay of their kind: 0, and for launches the median of the determining ones.

    Parameters
    ----------
    graph
        The events of a step.
    on_device
        For each node, whether its event runs on the device.

    """
    least = np.zeros(len(EDGE_KINDS), np.int64)
    measured = _delays(graph, on_device, least)
    is_launch = (graph.kind == EDGE_KIND["launch"]) & (measured > 0)
    if not is_launch.any():
        return measured
    least[EDGE_KIND["launch"]] = int(np.median(measured[is_launch]))
    return _delays(graph, on_device, least)


def _delays(graph: Graph, on_device: Flags, least: Ints) -> Ints:
    nodes = graph.time, on_device
    return kernels.delays(nodes, graph.incoming[0], graph.source, graph.kind, least)


def slack(graph: Graph, on_device: Flags) -> Ints:
    """Return by how many ns each node could be delayed without delaying the last node.

    `on_device` says for each node whether its event runs on the device.
    """
    end = np.int64(graph.time.max(initial=0))
    weight = measured_delays(graph, on_device)
    return kernels.latest(graph.incoming[0], graph.source, weight, end) - graph.time


class DeviceSchedule(NamedTuple):
    """Result of a replay: times of each operation, and the order in which they ran."""

    start: Floats  # ns
    end: Floats  # ns
    order: Ints  # operations, by start


@dataclass(frozen=True, kw_only=True)
class DeviceGraph:
    """Operations that run on devices, and edges to the operations that wait for them."""

    # one value per edge
    source: Ints
    target: Ints
    lag: Floats  # ns from the source's end to the target's earliest start
    at_start: Ints  # 1 if the target waits for the source's start instead of its end
    # one value per operation
    device: Ints
    priority: Ints  # of operations ready at the same time, the smallest runs first
    busy: Floats  # ns for which the device stays occupied after the operation
    group: Ints  # holder of an exclusive device: operations of one group share it
    releases: Ints  # 1 if the operation releases an exclusive device
    # one value per device
    kind: Ints  # 0 for one operation at a time, or UNLIMITED, EXCLUSIVE

    @cached_property
    def _successors(self) -> tuple[Ints, Ints, Floats, Ints]:
        first, edge = index(self.source.astype(np.int32), len(self.device))
        target, lag, at_start = self.target[edge], self.lag[edge], self.at_start[edge]
        return first.astype(np.int64), target, lag, at_start

    def replay(
        self, duration: Floats, ready: Floats, free: Floats, *, by_device: bool = False
    ) -> DeviceSchedule:
        """Run every operation as early as its predecessors and its device allow.

        Parameters
        ----------
        duration
            Duration of each operation, ns.
        ready, free
            Earliest start of each operation and of each device, ns. Both are overwritten.
        by_device
            Choose the device that is free first, instead of the earliest possible start.

        """
        work = (
            self.device,
            self.priority,
            duration,
            self.busy,
            self.group,
            self.releases,
        )
        run = device_kernels.by_device if by_device else device_kernels.by_time
        return DeviceSchedule(*run(self._successors, work, self.kind, ready, free))

    def consecutive(self, order: Ints) -> tuple[Ints, Ints]:
        """Return pairs of operations that ran one after the other on a device.

        Devices of unlimited capacity have no such pairs. `order` is that of a schedule.
        """
        nodes = order[np.argsort(self.device[order], kind="stable")]
        device = self.device[nodes]
        follows = (device[1:] == device[:-1]) & (
            self.kind[device[1:]] != device_kernels.UNLIMITED
        )
        return nodes[:-1][follows], nodes[1:][follows]
