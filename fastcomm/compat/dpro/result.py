"""Results on a dPRO trial: its operations and steps, and a replayed step with predictions.

Other tools read the graph as GraphML or with networkx. A node has its category, device,
duration, start and end; an edge has its lag, and whether it begins at the start of its source.
Times are ms. Two nodes may have two edges.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

import pyarrow as pa

from fastcomm.checks import invalid_value
from fastcomm.compat.dpro import rules
from fastcomm.compat.dpro.dependency import dependencies
from fastcomm.compat.dpro.gaps import measured
from fastcomm.compat.dpro.job import ParameterDict
from fastcomm.compat.dpro.predictions import Predictions, Removed
from fastcomm.compat.dpro.replayed import Options, Replayed, Replayer, ReplayPath, critical_path
from fastcomm.compat.dpro.statistics import MS, Statistics, StepTime
from fastcomm.compat.dpro.trial import Trial
from fastcomm.graph.edits import Edit, Interval
from fastcomm.graph.graph import networkx_for
from fastcomm.result import Result, TableResult
from fastcomm.units import format_ns, signed_percent

if TYPE_CHECKING:
    import networkx

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
    times = [replayed.duration / MS, replayed.start / MS, replayed.end / MS]
    columns = (replayer.categories, device, *(column.tolist() for column in times))
    for name, *values in zip(replayer.graph.nodes, *columns, strict=True):
        yield str(name), dict(zip(_NODE_KEYS, values, strict=True))


def _edges(replayed: Replayed) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield source, target and attributes of each edge."""
    operations = replayed.replayer.operations
    lag, at_start = (operations.lag / MS).tolist(), operations.at_start.tolist()
    for (a, b), *values in zip(replayed.replayer.graph.edges, lag, at_start, strict=True):
        yield a, b, dict(zip(_EDGE_KEYS, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Session(Result):
    """A replayed step with its critical path, and the what-ifs that were requested."""

    measured: StepTime
    replayed: Replayed
    path: ReplayPath
    step: int  # its position among those of the trial
    warnings: tuple[str, ...] = ()  # of the traces
    edits: tuple[Edit, ...] = ()
    changed: Replayed | None = None  # with the edits
    removed: tuple[Removed, ...] | None = None  # the bottlenecks
    alone: Replayed | None = None  # with the communication of some tensors only
    predictions: Predictions = field(default_factory=Predictions)

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
        reason = "the validated steps are those of runs, and this is a trial of dPRO"
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
            "warnings": list(self.warnings),
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
        return {
            "step": str(self.step),
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
    used = options.rules
    time = used.step_time(trial.trace)
    graph = dependencies(trial, time.opt_step, joins_ranks=used.gaps.joins_ranks)
    statistics = used.statistics(trial.trace, trial.topology)
    times = measured(graph, statistics, trial.trace, time.opt_step, used.gaps)
    replayed = Replayer.of(graph, times, options).replay()
    return Session(
        measured=time, replayed=replayed, path=critical_path(replayed), step=time.opt_step
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrialStatistics(TableResult):
    """The operations and step times of a trial, or of a uniform trace."""

    operations: Statistics
    time: StepTime
    tensors: ParameterDict | None = None  # of a trial
    is_dpro: bool = False  # whether the JSON has dPRO's keys, in ms
    warnings: tuple[str, ...] = ()  # of the traces
    rows: tuple[int, ...] | None = None  # indices of the operations in the JSON; None is all

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version; dPRO's keys are in ms."""
        statistics = self.operations
        tensors = {} if self.tensors is None else {"tensors": _tensors(self.tensors)}
        if self.is_dpro:
            steps = {"opt_step": self.time.opt_step, **self._steps("ms", MS)}
            categories = statistics.categories
            row: Callable[[Statistics, int], dict[str, Any]] = rules.operation
        else:
            steps = {
                "steps": list(range(len(self.time.steps))),
                "typical_step": self.time.opt_step,
                **self._steps("ns", 1),
            }
            categories = {key: _category(own) for key, own in statistics.categories.items()}
            row = _operation
        shown = range(len(statistics.names)) if self.rows is None else self.rows
        ops = {statistics.names[k]: row(statistics, k) for k in shown}
        warnings = {"warnings": list(self.warnings)}
        return {**steps, "categories": categories, **warnings, **tensors, "ops": ops}

    def _steps(self, unit: str, size: float) -> dict[str, Any]:
        """Return the step times of the run and of each rank, in a unit of `size` ns."""
        return {
            f"iteration_time_{unit}": self.time.time_ns / size,
            f"step_time_{unit}": [step_ns / size for step_ns in self.time.steps],
            "ranks": {
                pid: {
                    f"step_time_{unit}": [step_ns / size for step_ns in rank.time],
                    **{f"{part}_{unit}": rank.mean_ns(part) / size for part in rank.parts},
                }
                for pid, rank in self.time.ranks.items()
            },
        }

    def to_arrow(self) -> pa.Table:
        """Return a row per operation, with the columns of `Statistics.table`; times in ns."""
        return self.operations.table()

    def figures(self) -> dict[str, str]:
        """Return the ranks, the steps, the step time, and the number of operations."""
        return {
            "ranks": str(len(self.time.ranks)),
            "steps": str(len(self.time.steps)),
            "step": format_ns(self.time.time_ns),
            "operations": str(len(self.operations.names)),
        }


def _category(category: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dPRO's row of a category from ms to ns."""
    time_ns = round(category["time"] * MS)
    return {
        "max_ns": category["max_t"] * MS,
        "max_name": category["max_name"],
        "time_ns": time_ns,
        "cnt": category["cnt"],
        "op_cnt": category["op_cnt"],
        "avg_ns": time_ns / category["cnt"],
    }


def _operation(statistics: Statistics, k: int) -> dict[str, Any]:
    """Return the JSON row of the operation at index `k`, in ns."""
    return {
        "avg_ns": float(statistics.avg[k]),
        "cnt": int(statistics.count[k]),
        "time_ns": statistics.times[statistics.first[k] : statistics.first[k + 1]].tolist(),
        "min_ns": int(statistics.least[k]),
        "max_ns": int(statistics.most[k]),
        "median_ns": int(statistics.median[k]),
        "var_ns2": float(statistics.variance[k]),
        "id": k,
        "step_ids": [None if i < 0 else i for i in statistics.step_ids[k].tolist()],
        "cat": statistics.category[k],
    }


def _tensors(parameters: ParameterDict) -> list[dict[str, Any]]:
    """Return a row per tensor; null for fields that the trial does not have."""
    return [
        {
            "id": parameter.index,
            "name": parameter.name,
            "shape": parameter.shape,
            "dtype": parameter.dtype,
            "bytes": parameter.size,
            "updates": parameters.update_of.get(parameter.index, ()),
        }
        for parameter in parameters.parameters
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanChange:
    """Mean durations of one name in both runs."""

    name: str
    before_ns: float
    after_ns: float

    @property
    def absolute_ns(self) -> float:
        """Mean after minus mean before, in ns."""
        return self.after_ns - self.before_ns

    @property
    def relative(self) -> float | None:
        """The difference of the means divided by the mean before; None if that is 0."""
        return self.absolute_ns / self.before_ns if self.before_ns else None

    def to_dict(self) -> dict[str, float | None]:
        """Return the means and their difference as a row of the JSON document."""
        return {name: getattr(self, name) for name in _CHANGES.names[1:]}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OperationComparison(TableResult):
    """All names of two runs; changes with the largest first."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[MeanChange, ...]
    warnings: tuple[str, ...] = ()  # of the traces of both runs

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "added": list(self.added),
            "removed": list(self.removed),
            "changed": {change.name: change.to_dict() for change in self.changed},
            "warnings": list(self.warnings),
        }

    def to_arrow(self) -> pa.Table:
        """Return a row per operation whose mean has changed; times in ns."""
        rows = [{"name": change.name, **change.to_dict()} for change in self.changed]
        return pa.Table.from_pylist(rows, schema=_CHANGES)

    def figures(self) -> dict[str, str]:
        """Return the numbers of changed, added and removed operations."""
        return {
            "changed": str(len(self.changed)),
            "added": str(len(self.added)),
            "removed": str(len(self.removed)),
        }


_CHANGES = pa.schema(
    [("name", pa.string())]
    + [(name, pa.float64()) for name in ("before_ns", "after_ns", "absolute_ns", "relative")]
)


def comparison(before: Statistics, after: Statistics) -> OperationComparison:
    """Compare the mean duration of every operation in two runs, by its name.

    Returns the names that only one run has, and for each name in both the means, in ns, unless
    they are equal.
    """
    old = dict(zip(before.names, before.avg.tolist(), strict=True))
    new = dict(zip(after.names, after.avg.tolist(), strict=True))
    changed = [
        MeanChange(name=name, before_ns=old[name], after_ns=new[name])
        for name in old
        if name in new and new[name] != old[name]
    ]
    return OperationComparison(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(sorted(changed, key=lambda change: -abs(change.absolute_ns))),
    )
