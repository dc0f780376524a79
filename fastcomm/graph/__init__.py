"""Graphs of events, and of operations on devices: what has to wait for what.

A `Graph` has two nodes an event and typed, weighted edges: longest paths, delays, slack. A
`DeviceGraph` has nodes that take time (float64 ns), each on a device, and is replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import FastcommError
from fastcomm_kernels import graph as kernels
from fastcomm_kernels import replay as device_kernels
from fastcomm_kernels.arrays import Flags, Floats, Ints
from fastcomm_kernels.graph import NONE, Edges, Numbers, index

EDGE_KINDS = (
    "operator",  # an event's own time
    "dependency",  # between operators, or calls that take one lock
    "launch",  # from the start of the call to the start of its work
    "kernel_kernel",  # between one piece of work and the next on its stream
    "sync",  # from the end of work to what waited for it
    "inferred",  # the same, where only the times tell
    "unexplained",  # from the latest node before, where nothing else is known
    "join",  # from the start of one participant to when all have come
)
EDGE_KIND = {name: number for number, name in enumerate(EDGE_KINDS)}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes and edges; `event` and `owner` are rows of the table of events."""

    event: Numbers  # of each node
    time: Ints
    is_end: Flags
    source: Numbers  # of each edge
    target: Numbers
    kind: NDArray[np.int8]
    weight: Ints
    owner: Numbers

    @classmethod
    def of(cls, nodes: tuple[Numbers, Ints, Flags], edges: Edges, count: int) -> Self:
        """The graph of the first `count` edges; a pair that comes again replaces the first."""
        kept = kernels.selected(edges, slice(count))
        source, target, kind, weight, owner = _merged(kept, len(nodes[0]))
        return cls(
            event=nodes[0],
            time=nodes[1],
            is_end=nodes[2],
            source=source,
            target=target,
            kind=kind,
            weight=weight,
            owner=owner,
        )

    @cached_property
    def into(self) -> tuple[Numbers, Numbers]:
        """The edges by target."""
        return kernels.index(self.target, len(self.event))

    @cached_property
    def out(self) -> tuple[Numbers, Numbers]:
        """The edges by source."""
        return kernels.index(self.source, len(self.event))

    @cached_property
    def used(self) -> int:
        """How many nodes have an edge."""
        marks = np.zeros(len(self.event), np.bool_)
        marks[self.source] = marks[self.target] = True
        return int(marks.sum())

    @cached_property
    def places(self) -> tuple[Numbers, Numbers]:
        """The nodes of the start and the end of each row of the events; NONE without any."""
        size = int(self.event.max(initial=NONE)) + 1
        first, last = np.full(size, NONE, np.int32), np.full(size, NONE, np.int32)
        number = np.arange(len(self.event), dtype=np.int32)
        first[self.event[~self.is_end]] = number[~self.is_end]
        last[self.event[self.is_end]] = number[self.is_end]
        return first, last

    def weighing(self, weight: Ints) -> Self:
        """The same graph with other weights."""
        return replace(self, weight=weight)

    def owned_by(self, event: Numbers, owner: Numbers) -> Self:
        """The same graph with other numbers for its events."""
        return replace(self, event=event, owner=owner)

    def counts(self) -> dict[str, int]:
        """How many edges there are of each kind."""
        edges = np.bincount(self.kind, minlength=len(EDGE_KINDS))
        return {name: int(edges[number]) for number, name in enumerate(EDGE_KINDS)}


def _merged(edges: Edges, nodes: int) -> Edges:
    """The edges without repetitions: the last one's kind and weight at the first one's place.

    One without an owner leaves the owner before.
    """
    first = kernels.originals(kernels.index(edges.target, nodes), edges.source, nodes)
    again = np.flatnonzero(first != np.arange(len(first)))
    if not len(again):
        return edges
    edges = kernels.selected(edges, np.ones(len(first), np.bool_))
    place = first[again]
    edges.kind[place] = edges.kind[again]
    edges.weight[place] = edges.weight[again]
    owned = again[edges.owner[again] != NONE]
    edges.owner[first[owned]] = edges.owner[owned]
    keep = np.ones(len(first), np.bool_)
    keep[again] = False
    return kernels.selected(edges, keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPath:
    """A way through a graph, from its first node to its last."""

    nodes: Numbers
    edges: Numbers  # one fewer than nodes, none where there is no node

    @classmethod
    def empty(cls) -> Self:
        """Return the path of a graph without nodes."""
        return cls(nodes=np.empty(0, np.int32), edges=np.empty(0, np.int32))

    @classmethod
    def to(cls, last: int, through: Numbers, source: Numbers) -> Self:
        """Return the path to node `last`; `through` has the last edge of the way to each."""
        edges = kernels.path_to(last, through, source)
        return cls(nodes=np.append(source[edges], np.int32(last)), edges=edges)


def longest_path(graph: Graph, weight: Ints | None = None) -> LongestPath | None:
    """The path of the greatest weight; None where the graph has a cycle."""
    order = kernels.topological(graph.source, graph.target, graph.out, len(graph.event))
    if len(order) < graph.used:
        return None
    weight = graph.weight if weight is None else weight
    if not len(order):
        return LongestPath.empty()
    length, through = kernels.longest_path(order, graph.into, graph.source, weight, 0)
    return LongestPath.to(int(order[np.argmax(length[order])]), through, graph.source)


def acyclic_order(source: Ints, target: Ints, names: Sequence[str]) -> Numbers:
    """Return all nodes, each behind its predecessors.

    `names` has one name a node. Raises FastcommError where nodes wait for each other.
    """
    nodes, before, after = len(names), source.astype(np.int32), target.astype(np.int32)
    order = kernels.topological(before, after, kernels.index(before, nodes), nodes)
    has_edges = np.zeros(nodes, np.bool_)
    has_edges[source] = has_edges[target] = True
    alone = np.flatnonzero(~has_edges).astype(np.int32)
    has_edges[order] = False
    if has_edges.any():
        stuck = names[int(np.argmax(has_edges))]
        raise FastcommError(f"cyclic dependencies: {stuck} waits for itself or for a cycle")
    return np.append(order, alone)


def measured_delays(graph: Graph, on_device: Flags) -> Ints:
    """The measured delay of what binds a node; of all else the least of its kind.

    That is 0, but of a launch the median of those that bind: none is faster. `on_device` is by
    node. The replay of these weights has the measured times, to the nanosecond.
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
    return kernels.delays(nodes, graph.into[0], graph.source, graph.kind, least)


def slack(graph: Graph, on_device: Flags) -> Ints:
    """By how many ns each node could be reached later without the last one being so."""
    end = np.int64(graph.time.max(initial=0))
    weight = measured_delays(graph, on_device)
    return kernels.latest(graph.into[0], graph.source, weight, end) - graph.time


class DeviceSchedule(NamedTuple):
    """Start and end of each operation, and the operations in the order in which they ran."""

    start: Floats
    end: Floats
    order: Ints


@dataclass(frozen=True, kw_only=True)
class DeviceGraph:
    """Operations with the device of each, and edges from each to those that wait for it."""

    source: Ints  # of each edge
    target: Ints
    lag: Floats  # from the source's end to the target's earliest start
    at_start: Ints  # 1 where the target waits for the source's start instead
    device: Ints  # of each operation
    priority: Ints  # of those ready at once, the least runs first
    busy: Floats  # how long the device is taken after the operation
    group: Ints
    releases: Ints  # 1 where it releases an exclusive device
    kind: Ints  # of each device: 0 for one operation at a time, or UNLIMITED, EXCLUSIVE

    @cached_property
    def _successors(self) -> tuple[Ints, Ints, Floats, Ints]:
        first, edge = index(self.source.astype(np.int32), len(self.device))
        target, lag, at_start = self.target[edge], self.lag[edge], self.at_start[edge]
        return first.astype(np.int64), target, lag, at_start

    def replay(
        self, duration: Floats, ready: Floats, free: Floats, *, by_device: bool = False
    ) -> DeviceSchedule:
        """Run every operation as early as its predecessors and its device allow.

        `ready` and `free`, when operations and devices may begin, are written into. The
        earliest possible start runs next; with `by_device` the device that is free first.
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
        """Pairs of operations that ran one after the other on a device of limited capacity."""
        nodes = order[np.argsort(self.device[order], kind="stable")]
        device = self.device[nodes]
        follows = (device[1:] == device[:-1]) & (
            self.kind[device[1:]] != device_kernels.UNLIMITED
        )
        return nodes[:-1][follows], nodes[1:][follows]
