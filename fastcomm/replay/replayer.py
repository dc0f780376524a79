"""Replay of a step on its devices: when every operation starts and ends, and what it waits for.

Times are float64 nanoseconds. `compat` is dPRO's replayer: SEND and RECV share a device, RECV
follows the end of its SEND, the device that is free first runs next. The default runs what can
start first, gives both directions of a link their own device, and lets a RECV overlap its SEND.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.graph.devices import DeviceGraph, DeviceSchedule
from fastcomm.graph.graph import acyclic_order
from fastcomm.readers.dpro.names import OUT, REQUESTS, SERVER, STAGES, Name, is_rank
from fastcomm.replay.dependency import Dependencies, is_operator, kinds
from fastcomm.replay.gaps import Measured
from fastcomm_kernels import replay as kernels
from fastcomm_kernels.arrays import Flags, Floats, Ints

_PRIORITY = (("FW", 0), ("OUTPUT", 1), ("BW", 2), ("UPDATE_", 3))
_REST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to replay."""

    compat: bool = False
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
        cats = kinds(names)
        devices: dict[str, int] = {}
        device = [devices.setdefault(_device(n, options), len(devices)) for n in names]
        groups: dict[str, int] = {}
        pids: dict[str, int] = {}
        operator = is_operator(cats)
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
        free, begin = np.zeros(len(self.devices)), np.zeros(len(self.pids))
        ends, passes = begin, []
        for _ in range(self.options.steps):
            ready = ends[self.pid] + self.release
            found = self.operations.replay(duration, ready, free, by_device=self.options.compat)
            ends = self._step_ends(found.end, found.order)
            passes.append(found)
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
        return is_operator(self.categories)

    def _step_ends(self, end: Floats, order: Ints) -> Floats:
        """Where each pid's step ends: its largest end, or the end of what ran last."""
        ends = np.zeros(len(self.pids))
        if self.options.compat:
            ends[self.pid[order]] = end[order]
        else:
            np.maximum.at(ends, self.pid, end)
        return ends


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
            return f"{pid}->Comm" + ("" if options.compat else f"~>{name.sub_op}")
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
    overlaps = send[graph.source] & receive[graph.target] & (not options.compat)
    found: Ints = overlaps.astype(np.int64)
    return found
