"""Build the replayer of a run's step from its graph of events.

The events of a run are nodes in a graph whose edges take time; here these edges become
operations on threads and streams. Waiting, such as that of a collective's kernel for the last
rank, takes no time and no device. The edge that determines when a node begins keeps its
measured delay, so that a replay without changes yields the measured times; its error is
reported.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.formats.dpro.statistics import RankSteps, StepTime
from fastcomm.formats.dpro.trial import Naming, pid, plain
from fastcomm.formats.dpro.uniform import HOST, Name
from fastcomm.graph.graph import EDGE_KIND, DeviceGraph, Graph, measured_delays
from fastcomm.replay.dependency import Dependencies
from fastcomm.replay.gaps import Measured
from fastcomm.replay.replayed import Options, Replayer, categories_of
from fastcomm.trace.run import ReadRanks
from fastcomm.trace.trace import Trace
from fastcomm_kernels import replay as kernels
from fastcomm_kernels.arrays import NONE, Flags, Floats, Ints, Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstraints:
    """A step of one or several ranks as a graph of the starts and ends of events."""

    graph: Graph
    on_device: Flags  # by node
    rank_of: Ints  # by node, position in `traces`
    first: Ints  # by trace, the row of its first event in the graph
    traces: Sequence[Trace]
    number: int | None = None  # of the step in the traces; None for another part
    edited: tuple[Numbers, Ints] | None = (
        None  # by edge, after edits: source node, weight in ns
    )
    read: ReadRanks | None = None  # None for a step that was assembled in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNodes:
    """Operations of a replay, and edges between them.

    An operation is an edge of the graph that takes time, or a node that only waits.
    """

    # one value per operation
    edge: Ints  # of the graph, or -1
    event: Ints  # row
    rank: Ints  # position in the traces
    begin: Floats  # measured start, ns since the start of the step
    duration: Floats  # ns
    # one value per edge
    source: Ints  # operation
    target: Ints
    lag: Floats  # ns
    at_start: Ints  # 1 if the target waits for the source's start only


def replayer(step: StepConstraints) -> Replayer:
    """Return a replayer of the step of a run, with its edits if it has any.

    Operations, their names and devices are those of the step as measured.
    """
    measured_nodes = operations(replace(step, edited=None))
    nodes = measured_nodes if step.edited is None else operations(step)
    names = _names(step, nodes)
    device, devices, kind = _devices(step, measured_nodes)
    n = len(nodes.edge)
    free = np.ones(n, bool)
    free[nodes.target] = False
    zeros = np.zeros(n, np.int64)
    no_time = np.zeros(n)
    return Replayer(
        graph=Dependencies(
            nodes=tuple(map(str, names)), source=nodes.source, target=nodes.target, groups=()
        ),
        names=names,
        categories=categories_of(names),
        measured=Measured(avg=nodes.duration, gap=no_time, samples=zeros, comm_gap=no_time),
        options=Options(),
        devices=devices,
        operations=DeviceGraph(
            source=nodes.source,
            target=nodes.target,
            lag=nodes.lag,
            at_start=nodes.at_start,
            device=device,
            priority=zeros,
            busy=no_time,
            group=zeros,
            releases=zeros,
            kind=kind,
        ),
        pid=nodes.rank,
        pids=tuple(pid(trace.meta.rank) for trace in step.traces),
        release=np.where(free, nodes.begin, 0.0),
    )


def measured(step: StepConstraints) -> StepTime:
    """Return the measured step time of each rank, from the first event of all ranks."""
    time = step.graph.time - step.graph.time[:1]
    ends = np.zeros(len(step.traces), np.int64)
    np.maximum.at(ends, step.rank_of, time)
    ranks = {
        pid(trace.meta.rank): RankSteps(time=(int(end),), parts={})
        for trace, end in zip(step.traces, ends, strict=True)
    }
    mean = float(ends.mean())
    return StepTime(ranks=ranks, steps=(mean,), time_ns=mean, opt_step=0)


def operations(step: StepConstraints) -> StepNodes:
    """Convert a graph whose edges take time into one whose nodes take time.

    An edge of an event that takes time becomes a node. All other edges remain edges, with their
    time as a lag.
    """
    graph = step.graph
    weight = measured_delays(graph, step.on_device)
    own = (graph.kind == EDGE_KIND["operator"]) & (graph.owner != NONE) & (weight > 0)
    edges = np.flatnonzero(own).astype(np.int64)
    number = np.full(len(graph.source) + 1, NONE, np.int64)  # of an edge as an operation
    number[edges] = np.arange(len(edges))
    indegree = np.bincount(graph.target, minlength=len(graph.time))
    place = _Representatives.of(graph, edges, indegree)
    if step.edited is not None:
        source, weight = step.edited
        step = replace(step, graph=replace(graph, source=source))
    return _nodes(step, weight, number, edges, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Representatives:
    """The operation whose start or end represents each node of the graph."""

    operation: Ints
    at_start: Flags
    alone: Ints  # nodes that are operations of their own, numbered after the others

    @classmethod
    def of(cls, graph: Graph, edges: Ints, indegree: Ints) -> "_Representatives":
        """Choose an operation for each node, and whether the node is its start or its end.

        `edges` are the edges that become operations, numbered by position; operations of nodes
        follow. `indegree` has the number of edges that end at each node. The choice is the
        operation that ends at the node if no other edge does, else the only one that starts
        there, else an operation of its own.
        """
        size = len(graph.time)
        operation, at_start = np.full(size, NONE, np.int64), np.zeros(size, bool)
        source, target = graph.source[edges], graph.target[edges]
        begins = np.bincount(source, minlength=size)
        starting = np.flatnonzero(begins[source] == 1)
        operation[source[starting]], at_start[source[starting]] = starting, True
        ending = np.flatnonzero(indegree[target] == 1)
        operation[target[ending]], at_start[target[ending]] = ending, False
        alone = np.flatnonzero(operation < 0)
        operation[alone] = len(edges) + np.arange(len(alone))
        return cls(operation=operation, at_start=at_start, alone=alone)


def _nodes(
    step: StepConstraints, weight: Ints, number: Ints, edges: Ints, place: _Representatives
) -> StepNodes:
    """Return the operations, and the edges between them."""
    graph = step.graph
    origin = int(graph.time[0])
    is_foreign = graph.kind == EDGE_KIND["unexplained"]
    is_foreign &= step.rank_of[graph.source] != step.rank_of[graph.target]
    used = np.flatnonzero(~is_foreign)
    op = number[used]
    # A node follows the operation of its edge, or the representative of the edge's source.
    source = np.where(op >= 0, op, place.operation[graph.source[used]])
    at_start = (op < 0) & place.at_start[graph.source[used]]
    target = place.operation[graph.target[used]]
    lag = np.where(op >= 0, 0, weight[used])
    # An operation follows the representative of its own source.
    before = place.operation[graph.source[edges]]
    source = np.concatenate((source, before))
    target = np.concatenate((target, np.arange(len(edges))))
    at_start = np.concatenate((at_start, place.at_start[graph.source[edges]]))
    lag = np.concatenate((lag, np.zeros(len(edges), np.int64)))
    selected = _longest(source, target, at_start, lag)
    nodes = np.concatenate((graph.source[edges], place.alone))
    events = np.concatenate((graph.owner[edges], graph.event[place.alone]))
    return StepNodes(
        edge=np.concatenate((edges, np.full(len(place.alone), -1))),
        event=events.astype(np.int64),
        rank=np.searchsorted(step.first, events, side="right") - 1,
        begin=(graph.time[nodes] - origin).astype(np.float64),
        duration=np.concatenate((weight[edges], np.zeros(len(place.alone)))).astype(float),
        source=source[selected].astype(np.int64),
        target=target[selected].astype(np.int64),
        lag=lag[selected].astype(np.float64),
        at_start=at_start[selected].astype(np.int64),
    )


def _longest(source: Ints, target: Ints, at_start: Flags, lag: Ints) -> Ints:
    """Return the edges between different operations; of parallel ones the longest.

    Edges are parallel if they also agree in `at_start`.
    """
    order = np.lexsort((-lag, at_start, target, source))
    order = order[source[order] != target[order]]
    same = np.zeros(len(order), bool)
    same[1:] = (np.diff(source[order]) == 0) & (np.diff(target[order]) == 0)
    same[1:] &= at_start[order][1:] == at_start[order][:-1]
    return np.sort(order[~same])


def _names(step: StepConstraints, nodes: StepNodes) -> tuple[Name, ...]:
    """Return the long name of each operation.

    Its suffix counts the operations with the same name on the rank, by start.
    """
    namings = [Naming(trace) for trace in step.traces]
    pids = [pid(trace.meta.rank) for trace in step.traces]
    rows = (nodes.event - step.first[nodes.rank]).tolist()
    ranks = nodes.rank.tolist()
    count: dict[tuple[int, str], int] = defaultdict(int)
    of_row: dict[tuple[int, int], str] = {}
    parts: dict[str, tuple[str, str, str | None]] = {}
    names: dict[int, Name] = {}
    for i in np.argsort(nodes.begin, kind="stable").tolist():
        k, row = ranks[i], rows[i]
        standard = of_row.get((k, row))
        if standard is None:
            standard = of_row[k, row] = _name(namings[k], row)
            if standard not in parts:
                name = Name.of(standard)
                parts[standard] = name.op_cat, name.op_name, name.sub_op
        op_cat, op_name, sub_op = parts[standard]
        suffix = count[k, standard]
        count[k, standard] += 1
        names[i] = Name(
            pid=pids[k],
            standard=standard,
            op_cat=op_cat,
            op_name=op_name,
            sub_op=sub_op,
            suffix=str(suffix),
        )
    return tuple(names[i] for i in range(len(names)))


def _name(naming: Naming, row: int) -> str:
    """Return the standard name of work or communication, or of a call on the host."""
    if naming.is_work[row] or row in naming.communication:
        return naming.standard(row)
    return f"{HOST}.{plain(naming.word(row))}"


def _devices(step: StepConstraints, nodes: StepNodes) -> tuple[Ints, tuple[str, ...], Ints]:
    """Return the device of each operation, the names of all devices, and their kinds.

    A device is a thread or stream, or "waiting". It runs one operation at a time, unless
    operations overlapped on it when they were measured.
    """
    lanes = np.cumsum([0, *(trace.lanes.num_rows for trace in step.traces)])
    lane = np.empty(len(nodes.event), np.int64)
    labels = []
    for k, trace in enumerate(step.traces):
        rows = nodes.rank == k
        lane[rows] = (
            trace.events["lane"].to_numpy()[nodes.event[rows] - step.first[k]] + lanes[k]
        )
        labels += _lane_labels(trace)
    lane[nodes.edge < 0] = lanes[-1]
    kind = np.zeros(int(lanes[-1]) + 1, np.int64)
    kind[-1] = kernels.UNLIMITED
    order = np.lexsort((nodes.begin, lane))
    begin, end, of = nodes.begin[order], (nodes.begin + nodes.duration)[order], lane[order]
    kind[of[1:][(of[1:] == of[:-1]) & (begin[1:] < end[:-1])]] = kernels.UNLIMITED
    return lane, (*labels, "waiting"), kind


def _lane_labels(trace: Trace) -> list[str]:
    """Return the labels of the threads and streams of a rank."""
    own = pid(trace.meta.rank)
    return [
        f"{own}->stream {row['thread']} of {row['device']}"
        if row["is_device"]
        else f"{own}->thread {row['thread']}"
        for row in trace.lanes.to_pylist()
    ]
