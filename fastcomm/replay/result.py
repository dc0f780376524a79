"""The result of a replay: the step beside the measured one, and what-ifs and predictions."""

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from fastcomm.readers.dpro.steps import StepTime
from fastcomm.replay.predictions import Predictions
from fastcomm.replay.replayer import Replayed
from fastcomm.result import Result
from fastcomm.trace.run import ReadRanks
from fastcomm.units import format_ns, signed_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPath:
    """Nodes of the path with what each adds to it, in ns; the last adds nothing."""

    nodes: tuple[int, ...]
    cost: tuple[float, ...]
    edges: int

    @property
    def length_ns(self) -> float:
        """Length of the path."""
        return sum(self.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """How much sooner the step ends, in the mean over ranks, if a node took no time."""

    node: str
    saved_ns: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Session(Result):
    """The measured step time, the replayed step, its critical path, and what else was asked."""

    measured: StepTime
    replayed: Replayed
    path: ReplayPath
    read: ReadRanks | None = None  # of a run; null for a trial
    changed: Replayed | None = None  # with changed durations
    removed: tuple[Removed, ...] | None = None  # the bottlenecks
    alone: Replayed | None = None  # the communication of some tensors
    predictions: Predictions = field(default_factory=Predictions)

    @property
    def error(self) -> float:
        """The replayed step time beside the measured, as a share of that."""
        return self.replayed.mean_ns / self.measured.time_ns - 1

    def error_of(self, pid: str) -> float | None:
        """The same of one rank; None where it was not measured."""
        rank = self.measured.ranks.get(pid)
        if rank is None or not rank.time:
            return None
        mean = sum(rank.time) / len(rank.time)
        return self.replayed.by_pid()[pid] / mean - 1

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        replayed = self.replayed
        graph = replayed.replayer.graph
        pairs = zip(self.path.nodes, self.path.cost, strict=True)
        read = {"ranks": list(self.read.ranks), **self.read.to_dict()} if self.read else {}
        return {
            "nodes": len(graph.nodes),
            "edges": len(graph.source),
            "step_end_ns": replayed.by_pid(),
            "mean_step_ns": replayed.mean_ns,
            "measured_ns": self.measured.time_ns,
            "error": self.error,
            "error_by_rank": {pid: self.error_of(pid) for pid in replayed.by_pid()},
            "critical_path_ns": self.path.length_ns,
            "critical_path": [
                {"node": graph.nodes[node], "cost_ns": cost} for node, cost in pairs
            ],
            **read,
            **self._what_if(),
            **self.predictions.to_dict(),
        }

    def _what_if(self) -> dict[str, Any]:
        """Return the part of the JSON document about changes that were asked for."""
        found: dict[str, Any] = {}
        if (changed := self.changed) is not None:
            found["what_if"] = {
                "step_end_ns": changed.by_pid(),
                "mean_step_ns": changed.mean_ns,
                "speedup": self.replayed.mean_ns / changed.mean_ns if changed.mean_ns else None,
            }
        if self.removed is not None:
            found["bottlenecks"] = [
                {"name": each.node, "saved_ns": each.saved_ns} for each in self.removed
            ]
        if (alone := self.alone) is not None:
            groups = alone.replayer.graph.groups
            found["tensors_alone"] = {
                "tensors": sorted(tensor for group in groups for tensor in group),
                "end_ns": float(alone.end.max()),
            }
        return found

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the operations and the dependencies of the step that was replayed last."""
        replayed = self.changed or self.replayed
        made = replayed.replayer
        nodes = {
            "name": pa.array(made.graph.nodes, pa.string()),
            "category": pa.array(made.categories, pa.string()),
            "device": pa.array(
                [made.devices[d] for d in made.operations.device.tolist()], pa.string()
            ),
            "duration_ns": replayed.duration,
            "gap_ns": made.measured.gap,
            "comm_gap_ns": made.measured.comm_gap,
            "start_ns": replayed.start,
            "end_ns": replayed.end,
        }
        return {"nodes": pa.table(nodes), "edges": made.graph.table()}

    def figures(self) -> dict[str, str]:
        """Return the replayed and the measured step, the error, and the changed step."""
        changed = {} if self.changed is None else {"what if": format_ns(self.changed.mean_ns)}
        return {
            "replayed": format_ns(self.replayed.mean_ns),
            "measured": format_ns(self.measured.time_ns),
            "error": signed_percent(self.error),
            **changed,
        }
