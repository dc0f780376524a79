"""Operations, replayed steps and predictions as tables, on the terminal, and as a trace."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape

from fastcomm import arrow_files, result
from fastcomm.compat.dpro.predictions import Predictions
from fastcomm.compat.dpro.replayed import Replayed
from fastcomm.compat.dpro.result import (
    OperationComparison,
    Session,
    TrialStatistics,
    graphml,
)
from fastcomm.compat.dpro.statistics import MS, Statistics, StepTime
from fastcomm.show import files
from fastcomm.show.console import (
    STEP_DIGITS,
    plain_console,
    say,
    show_edits,
    shown,
    table,
    what_if_line,
)
from fastcomm.show.tables import ResultTable, TableColumn
from fastcomm.trace.run_traces import ranges
from fastcomm.units import counted, format_ns, format_signed_ns, signed_percent

_RANKS = (
    TableColumn("rank", 0),
    TableColumn("replayed", 1, "ns", "dpro-replay.step_end_ns"),
    TableColumn(
        *("error", 2, "change", "dpro-replay.error_by_rank"),
        why="the rank was not measured",
        digits=2,
    ),
    TableColumn("what if", 3, "ns", "dpro-replay.what_if.step_end_ns"),
)
_MOST = 8
_US = 1e3
_MOST_NAMES = 10
_PARTS = {"fw": "forward", "bw": "backward", "update": "update"}
_OPERATIONS = (
    TableColumn("operation", 0),
    TableColumn("category", 1, only="page"),
    TableColumn("events", 2, "count", "dpro-stats.ops.cnt"),
    TableColumn("total", 3, "ns", "pages.operation_total", only="page"),
    TableColumn("mean", 4, "ns", "dpro-stats.ops.avg_ns"),
    TableColumn("median", 5, "ns", "dpro-stats.ops.median_ns", drop=3),
    TableColumn("shortest", 6, "ns", "dpro-stats.ops.min_ns", drop=2),
    TableColumn("longest", 7, "ns", "dpro-stats.ops.max_ns"),
    TableColumn("deviation", 8, "ns", "pages.deviation", drop=1),
)
_REPLAY_MOST = 12
_NAMES = (
    "Names of operations: RANK->KIND.NAME~>NUMBER. NUMBER counts "
    "operations of one name on a rank, from 0; for NCCL it is loop_channel_chunk_slice."
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
            TableColumn("shorter by", "saved_ns", "ns", "dpro-replay.bottlenecks.saved_ns"),
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
    if changed is not None:
        say(console, what_if_line(changed.mean_ns, replayed.mean_ns))
        show_edits(console, session.edits, session.interval)
    step_time = format_ns(replayed.mean_ns, STEP_DIGITS)
    say(
        console,
        f"[bold]step {session.step}: replayed {step_time},[/] measured "
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
    writers: dict[str, files.Writer] = {
        **{
            f"{name}.parquet": partial(arrow_files.write, rows)
            for name, rows in session.to_arrow().items()
        },
        "graph.graphml": files.text(graphml(session.changed or session.replayed)),
        "replay.json": files.text(result.dumps(session.to_dict())),
    }
    files.write(folder, writers)


def rank_steps(time: StepTime) -> ResultTable:
    """Return the mean step time of each rank, and the sums of its operators."""
    return ResultTable(
        name="ranks-table",
        caption="Mean step of each rank, and the sums of its operators",
        columns=(
            TableColumn("rank", 0),
            TableColumn("step", 1, "ns", "pages.rank_step"),
            *(
                TableColumn(name, place, "ns", f"dpro-stats.ranks.{part}_ns")
                for place, (part, name) in enumerate(_PARTS.items(), 2)
            ),
        ),
        rows=[
            (pid, sum(rank.time) / len(rank.time), *(rank.mean_ns(part) for part in _PARTS))
            for pid, rank in time.ranks.items()
        ],
    )


def categories(statistics: Statistics) -> ResultTable:
    """Return the operations, events and times of each category, the longest first."""
    rows = [
        (name, own["op_cnt"], own["cnt"], *(own[key] * MS for key in ("time", "avg", "max_t")))
        for name, own in statistics.categories.items()
    ]
    return ResultTable(
        name="categories-table",
        caption="Categories, the longest first",
        columns=(
            TableColumn("category", 0),
            TableColumn("operations", 1, "count", "dpro-stats.categories.op_cnt", drop=1),
            TableColumn("events", 2, "count", "dpro-stats.categories.cnt"),
            TableColumn("time", 3, "ns", "dpro-stats.categories.time_ns"),
            TableColumn("mean", 4, "ns", "dpro-stats.categories.avg_ns"),
            TableColumn("longest operation", 5, "ns", "dpro-stats.categories.max_ns"),
        ),
        rows=sorted(rows, key=lambda row: -row[3]),
    )


def operations_table(statistics: Statistics, chosen: Sequence[int]) -> ResultTable:
    """Return the operations at the indices `chosen`, in this order."""
    columns = (statistics.names, statistics.category, statistics.count, statistics.total)
    rows = [
        (
            *(column[k] for column in columns),
            *(statistics.avg[k], statistics.median[k], statistics.least[k]),
            *(statistics.most[k], statistics.variance[k] ** 0.5),
        )
        for k in chosen
    ]
    return ResultTable(
        name="operations-table",
        caption="Operations, the most time first",
        columns=_OPERATIONS,
        rows=rows,
    )


def show_statistics(statistics: TrialStatistics, chosen: Sequence[int]) -> None:
    """Print steps, ranks, categories and the chosen operations.

    `chosen` are the indices of the operations to print, in this order.
    """
    operations, time = statistics.operations, statistics.time
    last = len(time.steps) - 1
    console = plain_console()
    say(
        console,
        f"[bold]{counted(len(time.ranks), 'rank')}, "
        f"{counted(last + 1, 'step')} ({ranges(range(last + 1))}):[/] "
        f"{format_ns(time.time_ns, STEP_DIGITS)} a step on average, from its first operator "
        f"to its last; closest: step {time.opt_step}",
    )
    for one in (
        rank_steps(time),
        categories(operations),
        operations_table(operations, chosen),
    ):
        console.print(shown(one))
    more = len(operations.names) - len(chosen)
    if more:
        hint = counted(more, "more operation")
        say(console, f"{hint}; --top N prints N, --output writes all")


def show_comparison(comparison: OperationComparison, head: int) -> None:
    """Print the `head` largest changes, and the operations that were added or removed."""
    console = plain_console()
    rows = table(
        *("operation", "before", "after", "difference", "relative"), drop=("before", "after")
    )
    for change in comparison.changed[:head]:
        relative = "n/a" if change.relative is None else signed_percent(change.relative)
        difference = format_signed_ns(change.absolute_ns)
        times = (format_ns(ns) for ns in (change.before_ns, change.after_ns))
        rows.add_row(escape(change.name), *times, difference, relative)
    say(
        console,
        f"{counted(len(comparison.changed), 'operation')} changed, "
        f"{len(comparison.added)} added, {len(comparison.removed)} removed",
    )
    console.print(rows)
    for word, names in (("added", comparison.added), ("removed", comparison.removed)):
        for name in names[:_MOST_NAMES]:
            say(console, f"{word}: {escape(name)}", hanging=2)
