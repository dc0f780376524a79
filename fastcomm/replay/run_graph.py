"""The graph of a run's step for the replayer: its constraints as operations on devices.

A piece of an event's own time is an operation on its thread or stream, and starts when all
that binds it has come. What only waits, such as a collective's kernel until the last rank has
come, takes no time and no device. What binds a node today keeps its measured delay; so a replay
without changes has the measured times, and what the replay is off by is shown beside them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.graph import EDGE_KIND, DeviceGraph, Graph, measured_delays
from fastcomm.readers.dpro import HOST, Name, category
from fastcomm.readers.dpro.inputs import Naming, pid, plain
from fastcomm.readers.dpro.statistics import RankSteps, StepTime
from fastcomm.replay import Options, Replayer
from fastcomm.replay.dependency import Dependencies
from fastcomm.replay.gaps import Measured
from fastcomm.trace.run import ReadRanks
from fastcomm.trace.trace import Trace
from fastcomm_kernels import replay as kernels
from fastcomm_kernels.arrays import Flags, Floats, Ints
from fastcomm_kernels.graph import NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstraints:
    """A step of one or several ranks as constraints between the starts and ends of events.

    Rows of rank k's events are those of its trace, behind `first[k]`.
    """

    graph: Graph
    on_device: Flags  # by node
    rank_of: Ints  # by node: place in `traces`
    first: Ints
    traces: Sequence[Trace]
    read: ReadRanks | None = None  # null where a step was put together in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNodes:
    """The nodes of the replay: edges of the graph that are time, nodes that only wait."""

    edge: Ints  # of the graph, or -1
    event: Ints  # row
    rank: Ints  # place in the traces
    begin: Floats  # as measured, ns from the step's start
    duration: Floats
    source: Ints
    target: Ints
    lag: Floats
    at_start: Ints


def replayer(step: StepConstraints) -> Replayer:
    """A step ready to be replayed."""
    nodes = operations(step)
    names = _names(step, nodes)
    device, devices, kind = _devices(step, nodes)
    n = len(nodes.edge)
    free = np.ones(n, bool)
    free[nodes.target] = False
    zeros = np.zeros(n, np.int64)
    nothing = np.zeros(n)
    return Replayer(
        graph=Dependencies(
            nodes=tuple(map(str, names)), source=nodes.source, target=nodes.target, groups=()
        ),
        names=names,
        categories=tuple(_categories(names)),
        measured=Measured(avg=nodes.duration, gap=nothing, samples=zeros, comm_gap=nothing),
        options=Options(),
        devices=devices,
        operations=DeviceGraph(
            source=nodes.source,
            target=nodes.target,
            lag=nodes.lag,
            at_start=nodes.at_start,
            device=device,
            priority=zeros,
            busy=nothing,
            group=zeros,
            releases=zeros,
            kind=kind,
        ),
        pid=nodes.rank,
        pids=tuple(pid(trace.meta.rank) for trace in step.traces),
        release=np.where(free, nodes.begin, 0.0),
    )


def measured(step: StepConstraints) -> StepTime:
    """When each rank's step ended, from the first event of all ranks on."""
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
    """Take a graph whose edges are time for one whose nodes are."""
    graph = step.graph
    weight = measured_delays(graph, step.on_device)
    own = (graph.kind == EDGE_KIND["operator"]) & (graph.owner != NONE) & (weight > 0)
    edges = np.flatnonzero(own).astype(np.int64)
    number = np.full(len(graph.source) + 1, -1, np.int64)  # of an edge as an operation
    number[edges] = np.arange(len(edges))
    into = np.bincount(graph.target, minlength=len(graph.time))
    place = _Places.of(graph, edges, into)
    return _joined(step, weight, number, edges, place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Which operation stands for each node of the graph, and whether by its start."""

    operation: Ints
    at_start: Flags
    alone: Ints  # nodes that are operations of their own, behind the others

    @classmethod
    def of(cls, graph: Graph, edges: Ints, into: Ints) -> "_Places":
        """The end of the operation that alone leads to a node, or the start of its only one."""
        size = len(graph.time)
        operation, at_start = np.full(size, -1, np.int64), np.zeros(size, bool)
        source, target = graph.source[edges], graph.target[edges]
        begins = np.bincount(source, minlength=size)
        starting = np.flatnonzero(begins[source] == 1)
        operation[source[starting]], at_start[source[starting]] = starting, True
        ending = np.flatnonzero(into[target] == 1)
        operation[target[ending]], at_start[target[ending]] = ending, False
        alone = np.flatnonzero(operation < 0)
        operation[alone] = len(edges) + np.arange(len(alone))
        return cls(operation=operation, at_start=at_start, alone=alone)


def _joined(
    step: StepConstraints, weight: Ints, number: Ints, edges: Ints, place: _Places
) -> StepNodes:
    """The operations, and what comes between them."""
    graph = step.graph
    origin = int(graph.time[0])
    strange = graph.kind == EDGE_KIND["unexplained"]
    strange &= step.rank_of[graph.source] != step.rank_of[graph.target]
    kept = np.flatnonzero(~strange)
    op = number[kept]
    # Before a node comes what its edge is, or stands for the edge's source.
    source = np.where(op >= 0, op, place.operation[graph.source[kept]])
    at_start = (op < 0) & place.at_start[graph.source[kept]]
    target = place.operation[graph.target[kept]]
    lag = np.where(op >= 0, 0, weight[kept])
    # An operation follows what stands for its own source.
    before = place.operation[graph.source[edges]]
    source = np.concatenate((source, before))
    target = np.concatenate((target, np.arange(len(edges))))
    at_start = np.concatenate((at_start, place.at_start[graph.source[edges]]))
    lag = np.concatenate((lag, np.zeros(len(edges), np.int64)))
    real = _longest(source, target, at_start, lag)
    nodes = np.concatenate((graph.source[edges], place.alone))
    events = np.concatenate((graph.owner[edges], graph.event[place.alone]))
    return StepNodes(
        edge=np.concatenate((edges, np.full(len(place.alone), -1))),
        event=events.astype(np.int64),
        rank=np.searchsorted(step.first, events, side="right") - 1,
        begin=(graph.time[nodes] - origin).astype(np.float64),
        duration=np.concatenate((weight[edges], np.zeros(len(place.alone)))).astype(float),
        source=source[real].astype(np.int64),
        target=target[real].astype(np.int64),
        lag=lag[real].astype(np.float64),
        at_start=at_start[real].astype(np.int64),
    )


def _longest(source: Ints, target: Ints, at_start: Flags, lag: Ints) -> Ints:
    """The edges between different operations; of several of the same kind the longest."""
    order = np.lexsort((-lag, at_start, target, source))
    order = order[source[order] != target[order]]
    same = np.zeros(len(order), bool)
    same[1:] = (np.diff(source[order]) == 0) & (np.diff(target[order]) == 0)
    same[1:] &= at_start[order][1:] == at_start[order][:-1]
    return np.sort(order[~same])


def _names(step: StepConstraints, nodes: StepNodes) -> tuple[Name, ...]:
    """Long names: the how-manieth piece of a name on a rank is its suffix."""
    named = [Naming(trace) for trace in step.traces]
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
            standard = of_row[k, row] = _name(named[k], row)
            if standard not in parts:
                one = Name.of(standard)
                parts[standard] = one.op_cat, one.op_name, one.sub_op
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


def _name(named: Naming, row: int) -> str:
    """The standard name of work or communication; of the host what it called."""
    if named.is_work[row] or row in named.communication:
        return named.standard(row)
    return f"{HOST}.{plain(named.word(row))}"


def _categories(names: Sequence[Name]) -> list[str]:
    known = {standard: category(standard) for standard in {name.standard for name in names}}
    return [known[name.standard] for name in names]


def _devices(step: StepConstraints, nodes: StepNodes) -> tuple[Ints, tuple[str, ...], Ints]:
    """By operation its thread or stream, or what takes none; their names; how they run.

    One at a time, unless the step was measured to do otherwise.
    """
    lanes = np.cumsum([0, *(trace.lanes.num_rows for trace in step.traces)])
    lane = np.empty(len(nodes.event), np.int64)
    words = []
    for k, trace in enumerate(step.traces):
        rows = nodes.rank == k
        lane[rows] = (
            trace.events["lane"].to_numpy()[nodes.event[rows] - step.first[k]] + lanes[k]
        )
        words += _lane_words(trace)
    lane[nodes.edge < 0] = lanes[-1]
    kind = np.zeros(int(lanes[-1]) + 1, np.int64)
    kind[-1] = kernels.UNLIMITED
    order = np.lexsort((nodes.begin, lane))
    begin, end, of = nodes.begin[order], (nodes.begin + nodes.duration)[order], lane[order]
    kind[of[1:][(of[1:] == of[:-1]) & (begin[1:] < end[:-1])]] = kernels.UNLIMITED
    return lane, (*words, "waiting"), kind


def _lane_words(trace: Trace) -> list[str]:
    """What the threads and streams of a rank are called."""
    own = pid(trace.meta.rank)
    return [
        f"{own}->stream {row['thread']} of {row['device']}"
        if row["is_device"]
        else f"{own}->thread {row['thread']}"
        for row in trace.lanes.to_pylist()
    ]
