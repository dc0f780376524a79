"""Replayed steps and predictions as tables, on the terminal, as JSON, and as a trace."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from fastcomm import arrow_files, result
from fastcomm.replay.predictions import Predictions
from fastcomm.replay.replayed import Replayed
from fastcomm.replay.result import Session, graphml
from fastcomm.show import files
from fastcomm.show.console import (
    STEP_DIGITS,
    plain_console,
    say,
    show_edits,
    shown,
    what_if_line,
)
from fastcomm.show.tables import ResultTable, TableColumn
from fastcomm.units import counted, format_ns, signed_percent

_RANKS = (
    TableColumn("rank", 0),
    TableColumn("replayed", 1, "ns", "replay.step_end_ns"),
    TableColumn(
        *("error", 2, "change", "replay.error_by_rank"),
        why="the rank was not measured",
        digits=2,
    ),
    TableColumn("what if", 3, "ns", "replay.what_if.step_end_ns"),
)
_MOST = 8
_US = 1e3
_REPLAY_MOST = 12
_NAMES = (
    "Names of operations: RANK->KIND.NAME~>NUMBER. NUMBER counts "
    "operations of one name on a rank, from 0; for NCCL in dPRO trials, it is "
    "loop_channel_chunk_slice."
)


def ranks(session: Session) -> ResultTable:
    """Return the replayed and the changed time of each rank, and the error of the replay."""
    after = session.changed.by_pid() if session.changed is not None else {}
    rows = [
        (pid or "all", end, session.error_of(pid), after.get(pid))
        for pid, end in session.replayed.by_pid().items()
    ]
    return ResultTable(
        name="ranks-table",
        caption="Ranks",
        columns=_RANKS if after else _RANKS[:-1],
        rows=rows,
    )


def path(session: Session) -> ResultTable:
    """Return the operations of the critical path and their times on it, the longest first."""
    return ResultTable(
        name="path-table",
        caption="The critical path",
        heading=f"critical path, {format_ns(session.path.length_ns)}",
        columns=(
            TableColumn("operation", 0),
            TableColumn("on the path", 1, "ns", "pages.operation_on_path"),
        ),
        rows=session.path_times(),
    )


def bottlenecks(session: Session) -> ResultTable:
    """Return the time that the step would be shorter by without each operation."""
    return ResultTable(
        name="bottlenecks",
        caption="Operations of the path",
        columns=(
            TableColumn("if it took no time", "node"),
            TableColumn("shorter by", "saved_ns", "ns", "replay.bottlenecks.saved_ns"),
        ),
        rows=session.removed or (),
    )


def _show_predictions(predictions: Predictions) -> None:
    """Print a line of each prediction."""
    lines = []
    if predictions.daydream is not None:
        mean = format_ns(predictions.daydream.mean_ns)
        lines.append(
            f"by Daydream's method (one rank that waits for no other, tensors take bytes / "
            f"bandwidth): {mean} a step"
        )
    if predictions.hosts is not None:
        hosts = len(predictions.hosts.by_pid())
        lines.append(
            f"on {hosts} hosts with one GPU each: {format_ns(predictions.hosts.mean_ns)} a step"
        )
    if predictions.fusion is not None:
        groups = ["+".join(map(str, group)) for group in predictions.fusion.groups]
        more = f" and {len(groups) - _MOST} more" if len(groups) > _MOST else ""
        lines.append(
            f"with tensors sent together as {', '.join(groups[:_MOST])}{more}: "
            f"{format_ns(predictions.fusion.replayed.mean_ns)} a step, "
            f"{format_ns(predictions.fusion.before.mean_ns)} sent one by one (both by the cost "
            "model)"
        )
    for line in lines:
        say(plain_console(), line)


def _show_alone(alone: Replayed) -> None:
    """Print how long the communication of some tensors takes when nothing else runs."""
    groups = ", ".join("+".join(map(str, group)) for group in alone.replayer.graph.groups)
    end = format_ns(float(alone.end.max()))
    say(plain_console(), f"communication of tensors {groups}, replayed alone: {end}")


def show(session: Session) -> None:
    """Print the replayed and the measured step times, the critical path, and predictions."""
    console = plain_console()
    replayed, changed = session.replayed, session.changed
    graph = replayed.replayer.graph
    edges = len(graph.source)
    parts = (f"step {session.step}" if session.step is not None else "", session.read or "")
    subject = ", ".join(str(part) for part in parts if part)
    if changed is not None:
        say(console, what_if_line(changed.mean_ns, replayed.mean_ns))
        show_edits(console, session.edits, session.interval)
    title = f"{subject}: replayed" if subject else "replayed"
    step_time = format_ns(replayed.mean_ns, STEP_DIGITS)
    say(
        console,
        f"[bold]{title} {step_time},[/] measured "
        f"{format_ns(session.measured.time_ns, STEP_DIGITS)}, error "
        f"{signed_percent(session.error, 2)}; "
        f"{counted(len(graph.nodes), 'operation')}, "
        f"{edges} {'dependency' if edges == 1 else 'dependencies'}",
        hanging=2,
    )
    console.print(shown(ranks(session)))
    console.print(shown(path(session).top(_REPLAY_MOST)))
    if session.removed is not None:
        console.print(shown(bottlenecks(session).top(_REPLAY_MOST)))
    say(console, _NAMES, hanging=2, style="dim")
    for note in session.notes:
        say(console, f"[yellow]note:[/] {escape(note)}", hanging=2)
    if session.alone is not None:
        _show_alone(session.alone)
    _show_predictions(session.predictions)


def trace(replayed: Replayed) -> dict[str, Any]:
    """Return the replayed steps as a Chrome trace: a process per rank, a thread per device."""
    replayer = replayed.replayer
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": i, "args": {"name": pid or "all"}}
        for i, pid in enumerate(replayer.pids)
    ]
    places = dict(zip(replayer.operations.device.tolist(), replayer.pid.tolist(), strict=True))
    rows += [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": d,
            "args": {"name": replayer.devices[d]},
        }
        for d, pid in places.items()
    ]
    for count, (start, _, order) in enumerate(replayed.passes):
        for i in order.tolist():
            if replayed.duration[i] > 0:
                rows.append(
                    {
                        "name": replayer.names[i].standard,
                        "ph": "X",
                        "ts": float(start[i]) / _US,
                        "dur": float(replayed.duration[i]) / _US,
                        "pid": int(replayer.pid[i]),
                        "tid": int(replayer.operations.device[i]),
                        "cat": replayer.categories[i].partition(".")[0],
                        "args": {"name": replayer.graph.nodes[i], "cnt": count},
                    }
                )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_trace(replayed: Replayed, path: Path) -> None:
    """Write the replayed steps as a Chrome trace."""
    files.write(path.parent, {path.name: files.text(json.dumps(trace(replayed)))})


def write(session: Session, folder: Path) -> None:
    """Write nodes.parquet, edges.parquet, graph.graphml, and last replay.json."""
    tables = session.to_arrow()
    writers: dict[str, files.Writer] = {
        **{
            f"{name}.parquet": partial(arrow_files.write, table)
            for name, table in tables.items()
        },
        "graph.graphml": files.text(graphml(session.changed or session.replayed)),
        "replay.json": files.text(result.dumps(session.to_dict())),
    }
    files.write(folder, writers)
