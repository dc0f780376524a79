"""Replayed steps and predictions on a terminal, as JSON, and as a trace."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.markup import escape

from fastcomm import parquet
from fastcomm.replay.export import graphml
from fastcomm.replay.predictions import BANDWIDTH, Predictions
from fastcomm.replay.replayer import Replayed
from fastcomm.replay.session import Session
from fastcomm.replay.what_if import Removed
from fastcomm.report import files
from fastcomm.report.console import plain_console, say
from fastcomm.report.rows import table
from fastcomm.units import counted, format_ns, signed_percent

_MS = 1e6
_MOST = 8


def predictions_dict(found: Predictions) -> dict[str, Any]:
    """What was predicted, in ms; nothing of what was not asked for."""
    said: dict[str, Any] = {}
    if found.daydream is not None:
        said["daydream"] = {
            "step_end_ms": {pid: end / _MS for pid, end in found.daydream.by_pid().items()},
            "bandwidth_bytes_per_s": BANDWIDTH,
        }
    if found.hosts is not None:
        said["other_hosts"] = {
            "hosts": len(found.hosts.by_pid()),
            "mean_step_ms": found.hosts.mean_ns / _MS,
        }
    if found.fusion is not None:
        said["fusion"] = {
            "groups": [list(group) for group in found.fusion.groups],
            "mean_step_ms": found.fusion.replayed.mean_ns / _MS,
            "before_ms": found.fusion.before.mean_ns / _MS,
            "speedup": found.fusion.speedup,
            "tried": found.fusion.tried,
            "model_error": found.fusion.model.error,
        }
    return said


def show_predictions(found: Predictions) -> None:
    """Print a line of each prediction."""
    lines = []
    if found.daydream is not None:
        lines.append(f"Daydream: {format_ns(found.daydream.mean_ns)}, one rank and no waiting")
    if found.hosts is not None:
        hosts = len(found.hosts.by_pid())
        lines.append(f"on {hosts} hosts of one GPU: {format_ns(found.hosts.mean_ns)} a step")
    if found.fusion is not None:
        groups = ["+".join(map(str, group)) for group in found.fusion.groups]
        more = f" and {len(groups) - _MOST} more" if len(groups) > _MOST else ""
        lines.append(
            f"tensors sent as {', '.join(groups[:_MOST])}{more}: "
            f"{format_ns(found.fusion.replayed.mean_ns)} a step, "
            f"{format_ns(found.fusion.before.mean_ns)} as they were, by the cost model"
        )
    for line in lines:
        say(plain_console(), line)


_US = 1e3
_REPLAY_MOST = 12
_STEP_DIGITS = 4


def to_dict(
    found: Session,
    changed: Replayed | None = None,
    removed: Sequence[Removed] | None = None,
    alone: Replayed | None = None,
) -> dict[str, Any]:
    """The whole result, in ms."""
    replayed = found.replayed
    graph = replayed.replayer.graph
    pairs = zip(found.path.nodes, found.path.cost, strict=True)
    said: dict[str, Any] = {
        "nodes": len(graph.nodes),
        "edges": len(graph.source),
        "step_end_ms": {pid: end / _MS for pid, end in replayed.by_pid().items()},
        "mean_step_ms": replayed.mean_ns / _MS,
        "measured_ms": found.measured.time_ns / _MS,
        "error": found.error,
        "error_by_rank": {pid: found.error_of(pid) for pid in replayed.by_pid()},
        "critical_path_ms": found.path.length_ns / _MS,
        "critical_path": [[graph.nodes[node], cost / _MS] for node, cost in pairs],
    }
    if found.read is not None:
        said |= {"ranks": list(found.read.ranks), **found.read.to_dict()}
    if changed is not None:
        said["what_if"] = {
            "step_end_ms": {pid: end / _MS for pid, end in changed.by_pid().items()},
            "mean_step_ms": changed.mean_ns / _MS,
            "speedup": replayed.mean_ns / changed.mean_ns if changed.mean_ns else None,
        }
    if removed is not None:
        said["bottlenecks"] = [
            {"name": each.node, "saved_ms": each.saved_ns / _MS} for each in removed
        ]
    if alone is not None:
        groups = alone.replayer.graph.groups
        said["tensors_alone"] = {
            "tensors": sorted(tensor for group in groups for tensor in group),
            "end_ms": float(alone.end.max()) / _MS,
        }
    return said


def show(
    found: Session,
    changed: Replayed | None = None,
    removed: Sequence[Removed] | None = None,
    alone: Replayed | None = None,
) -> None:
    """Print step times beside the measured, what takes the time, and what would change it."""
    console = plain_console()
    replayed = found.replayed
    graph = replayed.replayer.graph
    edges = len(graph.source)
    say(
        console,
        f"[bold]replayed {format_ns(replayed.mean_ns, _STEP_DIGITS)} a step,[/] measured "
        f"{format_ns(found.measured.time_ns, _STEP_DIGITS)}: {signed_percent(found.error, 2)}; "
        f"{counted(len(graph.nodes), 'operation')}, "
        f"{edges} {'dependency' if edges == 1 else 'dependencies'}"
        + (f"; {found.read}" if found.read else ""),
        hanging=2,
    )
    rows = table("rank", "replayed", "error", *(["what if"] if changed else []))
    for pid, end in replayed.by_pid().items():
        error = found.error_of(pid)
        words = [format_ns(end), "n/a" if error is None else signed_percent(error, 2)]
        rows.add_row(
            escape(pid), *words, *([format_ns(changed.by_pid()[pid])] if changed else [])
        )
    console.print(rows)
    if changed is not None:
        say(
            console,
            f"[bold]what if:[/] {format_ns(changed.mean_ns, _STEP_DIGITS)} a step, "
            f"{signed_percent(changed.mean_ns / replayed.mean_ns - 1, 2)}",
        )
    path = table(f"critical path, {format_ns(found.path.length_ns)}", "share")
    pairs = sorted(zip(found.path.cost, found.path.nodes, strict=True), reverse=True)
    for cost, node in pairs[:_REPLAY_MOST]:
        path.add_row(escape(graph.nodes[node]), format_ns(cost))
    console.print(path)
    if removed is not None:
        saving = table("if it took no time", "a step is shorter by")
        for each in removed[:_REPLAY_MOST]:
            saving.add_row(escape(each.node), format_ns(each.saved_ns))
        console.print(saving)
    if alone is not None:
        groups = ", ".join("+".join(map(str, group)) for group in alone.replayer.graph.groups)
        say(console, f"tensors {groups} alone: {format_ns(float(alone.end.max()))}")


def trace(replayed: Replayed) -> dict[str, Any]:
    """The replayed steps as a Chrome trace: a process a rank, a thread a device."""
    made = replayed.replayer
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": i, "args": {"name": pid or "all"}}
        for i, pid in enumerate(made.pids)
    ]
    places = dict(zip(made.operations.device.tolist(), made.pid.tolist(), strict=True))
    rows += [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": d,
            "args": {"name": made.devices[d]},
        }
        for d, pid in places.items()
    ]
    for count, (start, _, order) in enumerate(replayed.passes):
        for i in order.tolist():
            if replayed.duration[i] > 0:
                rows.append(
                    {
                        "name": made.names[i].standard,
                        "ph": "X",
                        "ts": float(start[i]) / _US,
                        "dur": float(replayed.duration[i]) / _US,
                        "pid": int(made.pid[i]),
                        "tid": int(made.operations.device[i]),
                        "cat": made.categories[i].partition(".")[0],
                        "args": {"name": made.graph.nodes[i], "cnt": count},
                    }
                )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_trace(replayed: Replayed, path: Path) -> None:
    """Write the replayed steps as a Chrome trace."""
    files.write(path.parent, {path.name: files.text(json.dumps(trace(replayed)))})


def nodes(replayed: Replayed) -> pa.Table:
    """One row a node; times in ns."""
    made = replayed.replayer
    return pa.table(
        {
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
    )


def write(said: dict[str, Any], replayed: Replayed, folder: Path) -> None:
    """Write nodes.parquet, edges.parquet, graph.graphml, and last replay.json."""
    writers: dict[str, files.Writer] = {
        "nodes.parquet": partial(parquet.write, nodes(replayed)),
        "edges.parquet": partial(parquet.write, replayed.replayer.graph.table()),
        "graph.graphml": files.text(graphml(replayed)),
        "replay.json": files.text(json.dumps(said, indent=2)),
    }
    files.write(folder, writers)
