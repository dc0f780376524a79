"""Replay a step on its devices: start and end of every operation, and the critical path.

Times are float64 ns. The operation that can start first runs first, both directions of a link
have their own device, and a RECV may overlap its SEND, unless `ReplayRules` say otherwise.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fastcomm.compat.dpro.dependency import Dependencies
from fastcomm.compat.dpro.gaps import GapRules, Measured
from fastcomm.compat.dpro.job import Topology
from fastcomm.compat.dpro.statistics import Statistics, StepTime, statistics, step_time
from fastcomm.compat.dpro.uniform import (
    OUT,
    REQUESTS,
    SERVER,
    STAGES,
    Name,
    UniformTrace,
    category,
    coarse,
    is_rank,
)
from fastcomm.errors import FastcommError
from fastcomm.graph.graph import DeviceGraph, DeviceSchedule, LongestPath, acyclic_order
from fastcomm.trace.run_traces import ranges
from fastcomm.units import plural
from fastcomm_kernels import graph as graphs
from fastcomm_kernels import replay as kernels
from fastcomm_kernels.arrays import Flags, Floats, Ints

_PRIORITY = (("FW", 0), ("OUTPUT", 1), ("BW", 2), ("UPDATE_", 3))
_LOWEST_PRIORITY = 100


def last_ends(pid: Ints, schedule: DeviceSchedule, pids: int) -> Floats:
    """Return the last end of each process, ns.

    Parameters
    ----------
    pid
        Process of each node, by number.
    schedule
        The replayed step.
    pids
        Number of processes.

    """
    ends = np.zeros(pids)
    np.maximum.at(ends, pid, schedule.end)
    return ends


def edge_costs(replayed: "Replayed") -> Floats:
    """Return the length of each edge: the duration of its source, and the gap after it, ns."""
    replayer = replayed.replayer
    source = replayer.graph.source
    duration = np.where(replayer.operations.at_start == 1, 0.0, replayed.duration[source])
    between = replayer.operators[source] & replayer.operators[replayer.graph.target]
    gap = np.where(between, replayer.measured.gap[source], 0.0)
    return np.asarray(duration + (gap + replayer.operations.lag))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRules:
    """How a trial is measured and replayed. The default is fastcomm's, `compat` has others."""

    statistics: Callable[[UniformTrace, Topology | None], Statistics] = statistics
    step_time: Callable[[UniformTrace], StepTime] = step_time
    gaps: GapRules = field(default_factory=GapRules)
    has_duplex_links: bool = True  # SEND and RECV have a device each, and may overlap
    by_device: bool = False  # run the device that is free first, not the earliest start
    step_ends: Callable[[Ints, DeviceSchedule, int], Floats] = last_ends
    edge_costs: Callable[["Replayed"], Floats] = edge_costs


RULES = ReplayRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a replay."""

    rules: ReplayRules = RULES
    steps: int = 1  # repetitions of the step, one after the other
    unlimited_updates: bool = False  # run any number of updates at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayer:
    """A dependency graph with measured times and devices, which replays a step."""

    graph: Dependencies
    names: tuple[Name, ...]  # of each node
    categories: tuple[str, ...]  # of each node
    measured: Measured
    options: Options
    devices: tuple[str, ...]
    operations: DeviceGraph
    pid: Ints  # of each node, position in `pids`
    pids: tuple[str, ...]

    @classmethod
    def of(
        cls, graph: Dependencies, measured: Measured, options: Options | None = None
    ) -> "Replayer":
        """Return a replayer that runs each node of a graph on a device, as its name says.

        Parameters
        ----------
        graph
            Data-flow graph of a step of a trial.
        measured
            Durations and gaps of the nodes, ns.
        options
            Rules and repetitions.

        Raises
        ------
        FastcommError
            If the graph has a cycle.

        """
        options = options or Options()
        names = graph.parsed()
        categories = categories_of(names)
        device, devices = _numbered(_device(name, options) for name in names)
        group, _ = _numbered(name.op_name for name in names)
        pid, pids = _numbered(name.pid or "" for name in names)
        operator = _is_operator(categories)
        operations = DeviceGraph(
            source=graph.source,
            target=graph.target,
            lag=_lags(graph, names, operator, measured),
            at_start=_from_start(graph, names, options),
            device=device,
            priority=np.array([_priority(name.standard) for name in names], np.int64),
            busy=np.where(operator, measured.gap, 0.0),
            group=group,
            releases=np.array([name.sub_op == OUT for name in names], np.int64),
            kind=np.array([_device_kind(name) for name in devices], np.int64),
        )
        acyclic_order(graph.source, graph.target, graph.nodes)
        return cls(
            graph=graph,
            names=tuple(names),
            categories=categories,
            measured=measured,
            options=options,
            devices=devices,
            operations=operations,
            pid=pid,
            pids=pids,
        )

    def replay(self, duration: Floats | None = None) -> "Replayed":
        """Replay the step.

        Parameters
        ----------
        duration
            Duration of each node, ns; by default the measured ones.

        """
        duration = self.measured.avg if duration is None else duration
        rules = self.options.rules
        free, ends, passes = np.zeros(len(self.devices)), np.zeros(len(self.pids)), []
        for _ in range(self.options.steps):
            schedule = self.operations.replay(
                duration, ends[self.pid], free, by_device=rules.by_device
            )
            ends = rules.step_ends(self.pid, schedule, len(self.pids))
            passes.append(schedule)
        return Replayed(
            replayer=self,
            duration=duration,
            start=passes[0].start,
            end=passes[0].end,
            order=passes[0].order,
            step_end=ends / self.options.steps,
            passes=tuple(passes),
        )

    @property
    def operators(self) -> Flags:
        """For each node, whether it is an operator of a framework."""
        return _is_operator(self.categories)

    @property
    def updates(self) -> Flags:
        """For each node, whether it is an update of weights."""
        return np.array([name.op_cat.startswith("UPDATE") for name in self.names], bool)

    def is_of(self, op_cat: str) -> Flags:
        """Return for each node whether it belongs to a category such as BW or Comm."""
        return np.array([name.op_cat == op_cat for name in self.names], bool)

    def only(self, tensors: Collection[int]) -> "Replayed":
        """Replay only the communication of some tensors, with backward operations and updates.

        Groups are replayed if they have one of the tensors. Raises FastcommError for a tensor
        without communication.
        """
        chosen = set(tensors)
        self._check_tensors(chosen)
        comm = np.array([bool(chosen & set(name.tensors)) for name in self.names])
        is_used = comm.copy()
        graph = self.graph
        before, after = comm[graph.target], comm[graph.source]
        is_used[graph.source[before & self.is_of("BW")[graph.source]]] = True
        is_used[graph.target[after & self.updates[graph.target]]] = True
        groups = tuple(group for group in graph.groups if chosen & set(group))
        measured = self.measured.at(np.flatnonzero(is_used))
        return Replayer.of(graph.part(is_used, groups), measured, self.options).replay()

    def _check_tensors(self, chosen: Collection[int]) -> None:
        """Raise `FastcommError` if the step communicates none of some `chosen` tensors."""
        present = {tensor for name in self.names for tensor in name.tensors}
        if absent := sorted({*chosen} - present):
            raise FastcommError(
                f"--tensors: no communication of {plural(len(absent), 'tensor')} "
                f"{ranges(absent)}; the step has {ranges(sorted(present)) or 'none'}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Schedule of a replayed step, and mean step times."""

    replayer: Replayer
    duration: Floats  # of each node
    start: Floats  # of each node, in the first step
    end: Floats
    order: Ints  # nodes of the first step by start
    step_end: Floats  # by pid; mean length of a step
    passes: tuple[DeviceSchedule, ...]  # schedule of each repetition

    @property
    def mean_ns(self) -> float:
        """Mean step time over the ranks."""
        own = [i for i, pid in enumerate(self.replayer.pids) if is_rank(pid)]
        return float(self.step_end[own].mean())

    def by_pid(self) -> dict[str, float]:
        """Return the step time of each rank, in ns."""
        pairs = zip(self.replayer.pids, self.step_end.tolist(), strict=True)
        return {pid: end for pid, end in pairs if is_rank(pid)}

    def by_category(self) -> dict[str, dict[str, float]]:
        """Return the summed durations of operations by process and fine category, in ns."""
        sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        processes = (self.replayer.pids[number] for number in self.replayer.pid.tolist())
        rows = zip(processes, self.replayer.categories, self.duration.tolist(), strict=True)
        for pid, category_, ns in rows:
            sums[pid][category_] += ns
        return {pid: dict(by_category) for pid, by_category in sums.items()}


def _numbered(values: Iterable[str]) -> tuple[Ints, tuple[str, ...]]:
    """Number values by their first occurrence; return the number of each, and the values."""
    numbers: dict[str, int] = {}
    column = [numbers.setdefault(value, len(numbers)) for value in values]
    return np.array(column, np.int64), tuple(numbers)


def _device(name: Name, options: Options) -> str:
    """Return the name of the device on which a node runs."""
    pid = name.pid or "END"
    if name.sub_op in SERVER:
        return f"{pid}->ServerOp"
    if name.sub_op in REQUESTS:
        return f"{pid}->Comm"
    if name.op_cat == "Comm":
        if name.sub_op in {"SEND", "RECV"}:
            direction = f"~>{name.sub_op}" if options.rules.has_duplex_links else ""
            return f"{pid}->Comm{direction}"
        return f"{pid}->Comm~>{'Kernel' if name.sub_op in STAGES else 'Sync'}"
    if name.op_cat.startswith("UPDATE") and options.unlimited_updates:
        return f"{pid}->operator~>INFI_PARA_UPDATE"
    return f"{pid}->{'I/O' if name.op_cat.startswith('I/O') else 'operator'}"


def _device_kind(device: str) -> int:
    """Return the kind of a device: one operation at a time, unlimited or exclusive."""
    if device.endswith("~>INFI_PARA_UPDATE"):
        return kernels.UNLIMITED
    return kernels.EXCLUSIVE if device.endswith("~>Kernel") else 0


def _priority(standard: str) -> int:
    return next((number for part, number in _PRIORITY if part in standard), _LOWEST_PRIORITY)


def _lags(
    graph: Dependencies, names: Sequence[Name], operator: Flags, measured: Measured
) -> Floats:
    """Return the delay of each edge: the gap from a Sync or an operator to communication."""
    comm = np.array([name.op_cat == "Comm" for name in names])
    sync = np.array([name.sub_op == "Sync" for name in names])
    applies = comm[graph.target] & (operator | sync)[graph.source]
    return np.where(applies, measured.comm_gap[graph.source], 0.0)


def _from_start(graph: Dependencies, names: Sequence[Name], options: Options) -> Ints:
    """Return 1 for edges from a SEND to a RECV that may start at the same time, else 0."""
    send = np.array([name.sub_op == "SEND" for name in names])
    receive = np.array([name.sub_op == "RECV" for name in names])
    overlaps = send[graph.source] & receive[graph.target] & options.rules.has_duplex_links
    return np.asarray(overlaps, np.int64)


def categories_of(nodes: Sequence[Name]) -> tuple[str, ...]:
    """Return the category of each node with its pass or operation, such as "operator.BW"."""
    by_name = {standard: category(standard) for standard in {node.standard for node in nodes}}
    return tuple(by_name[node.standard] for node in nodes)


def _is_operator(categories: Sequence[str]) -> Flags:
    """Return for each category whether it is one of operators of a framework."""
    return np.array([coarse(name) == "operator" for name in categories], bool)


_SAME_NS = 1e-3  # paths that differ by less are equally long


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPath:
    """Critical path of a replayed step."""

    nodes: tuple[int, ...]
    cost: tuple[float, ...]  # what each node adds to the length, ns; 0 for the last
    wait: tuple[float, ...]  # of the cost: from the node's end to the next node's start
    edges: int  # of the execution graph

    @property
    def length_ns(self) -> float:
        """Length of the path, ns."""
        return sum(self.cost)


def critical_path(replayed: Replayed) -> ReplayPath:
    """Return the longest path through the execution graph of a replayed step.

    Where a dependency and the operation before on the device are on paths of equal length, the
    path goes through the dependency.
    """
    source, target, cost = execution_graph(replayed)
    incoming = graphs.index(target.astype(np.int32), len(replayed.replayer.names))
    order, ends = replayed.order.astype(np.int32), source.astype(np.int32)
    distance, through = graphs.longest_path(order, incoming, ends, cost, _SAME_NS)
    path = LongestPath.to(int(np.argmax(distance)), through, ends).nodes
    steps = np.diff(distance[path], append=distance[path[-1]])
    wait = np.maximum(steps - replayed.duration[path], 0.0)
    return ReplayPath(
        nodes=tuple(path.tolist()),
        cost=tuple(steps.tolist()),
        wait=tuple(wait.tolist()),
        edges=len(source),
    )


def execution_graph(replayed: Replayed) -> tuple[Ints, Ints, Floats]:
    """Return source, target and length in ns of all edges: dependencies, then devices.

    An edge of a device connects operations that ran one after the other on it; its length is
    the time between their starts.
    """
    replayer = replayed.replayer
    source, target = replayer.graph.source, replayer.graph.target
    cost = replayer.options.rules.edge_costs(replayed)
    earlier, later = _on_devices(replayed, source, target)
    return (
        np.concatenate((source, earlier)),
        np.concatenate((target, later)),
        np.concatenate((cost, replayed.start[later] - replayed.start[earlier])),
    )


def _on_devices(replayed: Replayed, source: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Return the edges between consecutive operations of a device that are no dependencies."""
    replayer = replayed.replayer
    a, b = replayer.operations.consecutive(replayed.order)
    size = len(replayer.names)
    is_dependency = np.isin(a * size + b, source * size + target)
    is_new = ~is_dependency & ~(replayer.is_of("BW")[a] & replayer.updates[b])
    return a[is_new], b[is_new]
