"""Replay of a step on its devices: a dPRO trial's or a run's, measured or changed.

It tells when every operation starts and ends, and its critical path. Times are float64
nanoseconds. What can start first runs first, both directions of a link have their own device,
and a RECV may overlap its SEND, unless `ReplayRules` say otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastcomm.graph import DeviceGraph, DeviceSchedule, LongestPath, acyclic_order
from fastcomm.readers.dpro import (
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
from fastcomm.readers.dpro.job import Topology
from fastcomm.readers.dpro.statistics import Statistics, StepTime, statistics, step_time
from fastcomm.replay.dependency import Dependencies
from fastcomm.replay.gaps import GapRules, Measured
from fastcomm_kernels import graph as graphs
from fastcomm_kernels import replay as kernels
from fastcomm_kernels.arrays import Flags, Floats, Ints

_PRIORITY = (("FW", 0), ("OUTPUT", 1), ("BW", 2), ("UPDATE_", 3))
_REST = 100


def last_ends(pid: Ints, schedule: DeviceSchedule, pids: int) -> Floats:
    """Return the largest end of each of `pids`; `pid` is by node."""
    ends = np.zeros(pids)
    np.maximum.at(ends, pid, schedule.end)
    return ends


def edge_costs(replayed: "Replayed") -> Floats:
    """Return what each edge adds to a path, in ns: its node and the gap behind that."""
    made = replayed.replayer
    source = made.graph.source
    duration = np.where(made.operations.at_start == 1, 0.0, replayed.duration[source])
    between = made.operators[source] & made.operators[made.graph.target]
    gap = np.where(between, made.measured.gap[source], 0.0)
    return np.asarray(duration + (gap + made.operations.lag))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRules:
    """How a trial is measured and replayed; another tool brings rules of its own."""

    statistics: Callable[[UniformTrace, Topology | None], Statistics] = statistics
    step_time: Callable[[UniformTrace], StepTime] = step_time
    gaps: GapRules = field(default_factory=GapRules)
    has_duplex_links: bool = True  # SEND and RECV have a device each, and may overlap
    by_device: bool = False  # the device that is free first runs next
    step_ends: Callable[[Ints, DeviceSchedule, int], Floats] = last_ends
    edge_costs: Callable[["Replayed"], Floats] = edge_costs


RULES = ReplayRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to replay: by which rules, how many steps, and whether all updates run at once."""

    rules: ReplayRules = RULES
    steps: int = 1
    unlimited_updates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayer:
    """A graph with all that a replay of it needs; `run` takes durations."""

    graph: Dependencies
    names: tuple[Name, ...]
    categories: tuple[str, ...]
    measured: Measured
    options: Options
    devices: tuple[str, ...]
    operations: DeviceGraph
    pid: Ints
    pids: tuple[str, ...]
    release: Floats | float = 0.0  # when a node may begin at the earliest

    @classmethod
    def of(
        cls, graph: Dependencies, measured: Measured, options: Options | None = None
    ) -> "Replayer":
        """Give every node its device, and every edge its delay."""
        options = options or Options()
        names = graph.parsed()
        cats = _kinds(names)
        devices: dict[str, int] = {}
        device = [devices.setdefault(_device(n, options), len(devices)) for n in names]
        groups: dict[str, int] = {}
        pids: dict[str, int] = {}
        operator = _is_operator(cats)
        operations = DeviceGraph(
            source=graph.source,
            target=graph.target,
            lag=_lags(graph, names, operator, measured),
            at_start=_from_start(graph, names, options),
            device=np.array(device, np.int64),
            priority=np.array([_priority(each.standard) for each in names], np.int64),
            busy=np.where(operator, measured.gap, 0.0),
            group=np.array(
                [groups.setdefault(n.op_name, len(groups)) for n in names], np.int64
            ),
            releases=np.array([n.sub_op == OUT for n in names], np.int64),
            kind=np.array([_kind(each) for each in devices], np.int64),
        )
        acyclic_order(graph.source, graph.target, graph.nodes)
        return cls(
            graph=graph,
            names=tuple(names),
            categories=tuple(cats),
            measured=measured,
            options=options,
            devices=tuple(devices),
            operations=operations,
            pid=np.array([pids.setdefault(n.pid or "", len(pids)) for n in names], np.int64),
            pids=tuple(pids),
        )

    def run(self, duration: Floats | None = None) -> "Replayed":
        """Replay with the measured durations, or others."""
        duration = self.measured.avg if duration is None else duration
        rules = self.options.rules
        free, ends, passes = np.zeros(len(self.devices)), np.zeros(len(self.pids)), []
        for _ in range(self.options.steps):
            ready = ends[self.pid] + self.release
            schedule = self.operations.replay(duration, ready, free, by_device=rules.by_device)
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
        """Which nodes are operators."""
        return _is_operator(self.categories)

    def is_of(self, op_cat: str) -> Flags:
        """Which nodes are of a category of operations, such as BW or Comm."""
        return np.array([name.op_cat == op_cat for name in self.names], bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """When every node started and ended in the first step; `step_end` is by pid."""

    replayer: Replayer
    duration: Floats
    start: Floats
    end: Floats
    order: Ints
    step_end: Floats
    passes: tuple[DeviceSchedule, ...]

    @property
    def mean_ns(self) -> float:
        """Mean over ranks of the step's end."""
        own = [i for i, pid in enumerate(self.replayer.pids) if is_rank(pid)]
        return float(self.step_end[own].mean())

    def by_pid(self) -> dict[str, float]:
        """Ends of the step in ns, without those of nodes of no rank."""
        pairs = zip(self.replayer.pids, self.step_end.tolist(), strict=True)
        return {pid: end for pid, end in pairs if is_rank(pid)}


def _device(name: Name, options: Options) -> str:
    """Where a node runs."""
    pid = name.pid or "END"
    if name.sub_op in SERVER:
        return f"{pid}->ServerOp"
    if name.sub_op in REQUESTS:
        return f"{pid}->Comm"
    if name.op_cat == "Comm":
        if name.sub_op in {"SEND", "RECV"}:
            way = f"~>{name.sub_op}" if options.rules.has_duplex_links else ""
            return f"{pid}->Comm{way}"
        return f"{pid}->Comm~>{'Kernel' if name.sub_op in STAGES else 'Sync'}"
    if name.op_cat.startswith("UPDATE") and options.unlimited_updates:
        return f"{pid}->operator~>INFI_PARA_UPDATE"
    return f"{pid}->{'I/O' if name.op_cat.startswith('I/O') else 'operator'}"


def _kind(device: str) -> int:
    """Whether a device runs one at a time, any number, or one group at a time."""
    if device.endswith("~>INFI_PARA_UPDATE"):
        return kernels.UNLIMITED
    return kernels.EXCLUSIVE if device.endswith("~>Kernel") else 0


def _priority(standard: str) -> int:
    return next((number for word, number in _PRIORITY if word in standard), _REST)


def _lags(
    graph: Dependencies, names: Sequence[Name], operator: Flags, measured: Measured
) -> Floats:
    """What comes between a node and its successor: the gap from a Sync to communication."""
    comm = np.array([name.op_cat == "Comm" for name in names])
    sync = np.array([name.sub_op == "Sync" for name in names])
    applies = comm[graph.target] & (operator | sync)[graph.source]
    return np.where(applies, measured.comm_gap[graph.source], 0.0)


def _from_start(graph: Dependencies, names: Sequence[Name], options: Options) -> Ints:
    """1 where a RECV may begin with its SEND."""
    send = np.array([name.sub_op == "SEND" for name in names])
    receive = np.array([name.sub_op == "RECV" for name in names])
    overlaps = send[graph.source] & receive[graph.target] & options.rules.has_duplex_links
    return np.asarray(overlaps, np.int64)


def _kinds(nodes: Sequence[Name]) -> list[str]:
    """The fine category of each node."""
    known: dict[str, str] = {}
    return [known.setdefault(each.standard, category(each.standard)) for each in nodes]


def _is_operator(kinds_: Sequence[str]) -> NDArray[np.bool_]:
    """Which nodes are operators of a framework."""
    return np.array([coarse(each) == "operator" for each in kinds_], bool)


_SAME_NS = 1e-3  # paths that differ by less are equally long


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPath:
    """Nodes of the path, what each adds to it, and the part of that which is waiting, in ns.

    A wait begins with the end of the node and ends with the start of the next node. The last
    node adds nothing.
    """

    nodes: tuple[int, ...]
    cost: tuple[float, ...]
    wait: tuple[float, ...]
    edges: int

    @property
    def length_ns(self) -> float:
        """Length of the path."""
        return sum(self.cost)


def critical_path(replayed: Replayed) -> ReplayPath:
    """Find it: a dependency costs its node and the gap behind it, a device what has passed."""
    made = replayed.replayer
    source, target, cost = execution_graph(replayed)
    into = graphs.index(target.astype(np.int32), len(made.names))
    order, ends = replayed.order.astype(np.int32), source.astype(np.int32)
    far, through = graphs.longest_path(order, into, ends, cost, _SAME_NS)
    path = LongestPath.to(int(np.argmax(far)), through, ends).nodes
    steps = np.diff(far[path], append=far[path[-1]])
    wait = np.maximum(steps - replayed.duration[path], 0.0)
    return ReplayPath(
        nodes=tuple(path.tolist()),
        cost=tuple(steps.tolist()),
        wait=tuple(wait.tolist()),
        edges=len(source),
    )


def execution_graph(replayed: Replayed) -> tuple[Ints, Ints, Floats]:
    """Edges of dependencies, then of devices, and what each costs."""
    made = replayed.replayer
    source, target = made.graph.source, made.graph.target
    cost = made.options.rules.edge_costs(replayed)
    earlier, later = _on_devices(replayed, source, target)
    return (
        np.concatenate((source, earlier)),
        np.concatenate((target, later)),
        np.concatenate((cost, replayed.start[later] - replayed.start[earlier])),
    )


def _on_devices(replayed: Replayed, source: Ints, target: Ints) -> tuple[Ints, Ints]:
    """Edges between what ran on a device one after the other."""
    made = replayed.replayer
    a, b = made.operations.consecutive(replayed.order)
    size = len(made.names)
    known = np.isin(a * size + b, source * size + target)
    update = np.array([name.op_cat.startswith("UPDATE") for name in made.names])
    kept = ~known & ~(made.is_of("BW")[a] & update[b])
    return a[kept], b[kept]
