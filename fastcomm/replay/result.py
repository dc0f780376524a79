"""The result of a replay: the replayed and the measured step, what-ifs and predictions.

Other tools read the graph as GraphML or with networkx. A node has its category, device,
duration, start and end; an edge has its lag, and whether it begins at the start of its source.
Times are ms. Two nodes may have two edges.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

import pyarrow as pa

from fastcomm.checks import invalid_value
from fastcomm.formats.dpro.statistics import StepTime
from fastcomm.formats.dpro.trial import Trial
from fastcomm.graph.edits import Edit, Interval, not_validated
from fastcomm.graph.graph import networkx_for
from fastcomm.replay.dependency import dependencies
from fastcomm.replay.gaps import measured
from fastcomm.replay.predictions import Predictions, Removed
from fastcomm.replay.replayed import Options, Replayed, Replayer, ReplayPath, critical_path
from fastcomm.result import Result
from fastcomm.trace.run import ReadRanks, SkippedRank
from fastcomm.units import format_ns, signed_percent

if TYPE_CHECKING:
    import networkx

_MS = 1e6
_NODE_KEYS = {
    "category": "string",
    "device": "string",
    "avg": "double",
    "start": "double",
    "end": "double",
}
_EDGE_KEYS = {"lag": "double", "at_start": "int"}


def to_networkx(replayed: Replayed) -> "networkx.MultiDiGraph[str]":
    """Return the replayed graph for networkx; raise FastcommError if it is not installed."""
    graph: networkx.MultiDiGraph[str] = networkx_for("to_networkx").MultiDiGraph()
    graph.add_nodes_from(_nodes(replayed))
    graph.add_edges_from(_edges(replayed))
    return graph


def graphml(replayed: Replayed) -> str:
    """Return the replayed graph as GraphML, which yEd and Gephi read."""
    lines = ['<graphml xmlns="http://graphml.graphdrawing.org/xmlns">']
    for element, keys in (("node", _NODE_KEYS), ("edge", _EDGE_KEYS)):
        lines += [
            f'<key id="{key}" for="{element}" attr.name="{key}" attr.type="{type_}"/>'
            for key, type_ in keys.items()
        ]
    lines.append('<graph edgedefault="directed">')
    lines += [
        f"<node id={quoteattr(name)}>{_data(attributes)}</node>"
        for name, attributes in _nodes(replayed)
    ]
    lines += [
        f"<edge source={quoteattr(a)} target={quoteattr(b)}>{_data(attributes)}</edge>"
        for a, b, attributes in _edges(replayed)
    ]
    return "\n".join([*lines, "</graph>", "</graphml>", ""])


def _data(attributes: dict[str, Any]) -> str:
    """Return the GraphML of the attributes of a node or an edge."""
    texts = (
        (key, str(v).lower() if isinstance(v, bool) else str(v))
        for key, v in attributes.items()
    )
    return "".join(f'<data key="{key}">{escape(text)}</data>' for key, text in texts)


def _nodes(replayed: Replayed) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the attributes of each node."""
    replayer = replayed.replayer
    device = [replayer.devices[number] for number in replayer.operations.device.tolist()]
    times = [replayed.duration / _MS, replayed.start / _MS, replayed.end / _MS]
    columns = (replayer.categories, device, *(column.tolist() for column in times))
    for name, *values in zip(replayer.graph.nodes, *columns, strict=True):
        yield str(name), dict(zip(_NODE_KEYS, values, strict=True))


def _edges(replayed: Replayed) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield source, target and attributes of each edge."""
    operations = replayed.replayer.operations
    lag, at_start = (operations.lag / _MS).tolist(), operations.at_start.tolist()
    for (a, b), *values in zip(replayed.replayer.graph.edges, lag, at_start, strict=True):
        yield a, b, dict(zip(_EDGE_KEYS, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Session(Result):
    """A replayed step with its critical path, and the what-ifs that were requested."""

    measured: StepTime
    replayed: Replayed
    path: ReplayPath
    step: int | None = None  # its number in the trace or trial; None for another part
    read: ReadRanks | None = None  # of a run; None for a trial
    is_host_run: bool = False  # whether ranks compute and communicate without a device
    notes: tuple[str, ...] = ()  # what the replay leaves out or guesses, a sentence each
    warnings: tuple[str, ...] = ()  # of the traces
    edits: tuple[Edit, ...] = ()
    changed: Replayed | None = None  # with the edits
    removed: tuple[Removed, ...] | None = None  # the bottlenecks
    alone: Replayed | None = None  # with the communication of some tensors only
    predictions: Predictions = field(default_factory=Predictions)

    @property
    def skipped(self) -> tuple[SkippedRank, ...]:
        """Ranks that could not be read, and are left out."""
        return self.read.skipped if self.read else ()

    @property
    def error(self) -> float:
        """Relative error of the replayed step time, as a share of the measured one."""
        return self.replayed.mean_ns / self.measured.time_ns - 1

    @property
    def interval(self) -> Interval | None:
        """Interval of the mean step time after the edits; None without edits."""
        if self.changed is None:
            return None
        error = abs(self.replayed.mean_ns - self.measured.time_ns)
        reason = None
        if self.read is None:
            reason = "the validated steps are those of runs, and this is a trial of dPRO"
        else:
            one_rank = len(self.read.ranks) == 1
            reason = not_validated(
                is_host_run=self.is_host_run, is_replay=False, one_rank=one_rank
            )
        return Interval.of(self.changed.mean_ns, error, self.edits, reason)

    def error_of(self, pid: str) -> float | None:
        """Return the relative error of one rank; None if its step was not measured, or is 0.

        Parameters
        ----------
        pid
            One of the keys of `replayed.by_pid()`, such as "host0.rank3".

        Raises
        ------
        ConfigError
            If the replay has no such rank.

        """
        if pid not in (ranks := self.replayed.by_pid()):
            raise invalid_value("error_of: pid", pid, f"one of {', '.join(ranks)}")
        rank = self.measured.ranks.get(pid)
        if rank is None or not rank.time:
            return None
        mean = sum(rank.time) / len(rank.time)
        return self.replayed.by_pid()[pid] / mean - 1 if mean else None

    def path_times(self) -> list[tuple[str, float]]:
        """Return operations of the critical path and waits after them in ns, longest first."""
        nodes, path = self.replayed.replayer.graph.nodes, self.path
        rows = zip(path.nodes, path.cost, path.wait, strict=True)
        times = []
        for node, cost, wait in rows:
            times.append((nodes[node], cost - wait))
            if wait:
                times.append((f"wait after {nodes[node]}", wait))
        return sorted(times, key=lambda row: (row[1], row[0]), reverse=True)

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        replayed = self.replayed
        graph = replayed.replayer.graph
        rows = zip(self.path.nodes, self.path.cost, self.path.wait, strict=True)
        ranks = {"ranks": list(self.read.ranks), **self.read.to_dict()} if self.read else {}
        return {
            "step": self.step,
            "nodes": len(graph.nodes),
            "edges": len(graph.source),
            "step_end_ns": replayed.by_pid(),
            "mean_step_ns": replayed.mean_ns,
            "measured_ns": self.measured.time_ns,
            "error": self.error,
            "error_by_rank": {pid: self.error_of(pid) for pid in replayed.by_pid()},
            "critical_path_ns": self.path.length_ns,
            "critical_path": [
                {"node": graph.nodes[node], "cost_ns": cost, "wait_ns": wait}
                for node, cost, wait in rows
            ],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            **ranks,
            **self._what_if(),
            **self.predictions.to_dict(),
        }

    def _what_if(self) -> dict[str, Any]:
        """Return the part of the JSON document about the what-ifs that were requested.

        Its keys are `what_if` (step times after edits), `bottlenecks` (time saved without each)
        and `tensors_alone` (end of tensors sent alone); those not requested are absent.
        """
        document: dict[str, Any] = {}
        if (changed := self.changed) is not None:
            interval = self.interval
            document["what_if"] = {
                "edits": [edit.text for edit in self.edits],
                "interval": None if interval is None else interval.to_dict(),
                "step_end_ns": changed.by_pid(),
                "mean_step_ns": changed.mean_ns,
                "speedup": self.replayed.mean_ns / changed.mean_ns if changed.mean_ns else None,
            }
        if self.removed is not None:
            document["bottlenecks"] = [
                {"name": removed.node, "saved_ns": removed.saved_ns} for removed in self.removed
            ]
        if (alone := self.alone) is not None:
            groups = alone.replayer.graph.groups
            document["tensors_alone"] = {
                "tensors": sorted(tensor for group in groups for tensor in group),
                "end_ns": float(alone.end.max()),
            }
        return document

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return tables of the replayed step: `nodes` (operations), `edges` (dependencies).

        With a what-if, they are those of the changed step.
        """
        replayed = self.changed or self.replayed
        replayer = replayed.replayer
        nodes = {
            "name": pa.array(replayer.graph.nodes, pa.string()),
            "category": pa.array(replayer.categories, pa.string()),
            "device": pa.array(
                [replayer.devices[d] for d in replayer.operations.device.tolist()], pa.string()
            ),
            "duration_ns": replayed.duration,
            "gap_ns": replayer.measured.gap,
            "comm_gap_ns": replayer.measured.comm_gap,
            "start_ns": replayed.start,
            "end_ns": replayed.end,
        }
        return {"nodes": pa.table(nodes), "edges": replayer.graph.table()}

    def figures(self) -> dict[str, str]:
        """Return the step, its replayed and measured time, the error, and the changed time."""
        changed = {} if self.changed is None else {"what if": format_ns(self.changed.mean_ns)}
        step = {} if self.step is None else {"step": str(self.step)}
        return {
            **step,
            "replayed": format_ns(self.replayed.mean_ns),
            "measured": format_ns(self.measured.time_ns),
            "error": signed_percent(self.error),
            **changed,
        }


def session(trial: Trial, options: Options | None = None) -> Session:
    """Measure a step of a trial, and replay it on its devices.

    Raises FastcommError if the trial lacks what its replay needs.
    """
    options = options or Options()
    rules = options.rules
    time = rules.step_time(trial.trace)
    graph = dependencies(trial, time.opt_step, joins_ranks=rules.gaps.joins_ranks)
    statistics = rules.statistics(trial.trace, trial.topology)
    times = measured(graph, statistics, trial.trace, time.opt_step, rules.gaps)
    replayed = Replayer.of(graph, times, options).run()
    return Session(
        measured=time, replayed=replayed, path=critical_path(replayed), step=time.opt_step
    )
