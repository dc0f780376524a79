"""Statistics of a uniform trace: on a terminal, as JSON, and in files."""

import json
from pathlib import Path
from typing import Any

from rich.markup import escape

from fastcomm.analyses.stats import OperationComparison
from fastcomm.readers.dpro.parameters import ParameterDict
from fastcomm.readers.dpro.statistics import MS, Statistics
from fastcomm.readers.dpro.steps import StepTime
from fastcomm.report import files
from fastcomm.report.console import plain_console, say
from fastcomm.report.rows import TerminalTable, table
from fastcomm.trace.run import ReadRanks
from fastcomm.units import counted, format_ns, format_signed_ns, signed_percent

_MOST_NAMES = 10
_STEP_DIGITS = 4


def to_dict(
    found: Statistics,
    time: StepTime,
    tensors: ParameterDict | None = None,
    read: ReadRanks | None = None,
) -> dict[str, Any]:
    """Return the whole result, in ms; `tensors` are those of a trial, `read` of a run."""
    said = {} if tensors is None else {"tensors": _tensors(tensors)}
    return {
        "iteration_time_ms": time.time_ns / MS,
        "opt_step": time.opt_step,
        "step_time_ms": [each / MS for each in time.steps],
        "ranks": {
            pid: {
                "step_time_ms": [each / MS for each in rank.time],
                **{f"{part}_ms": rank.mean_ns(part) / MS for part in rank.parts},
            }
            for pid, rank in time.ranks.items()
        },
        "categories": found.categories,
        **(read.to_dict() if read else {}),
        **said,
        "ops": found.ops(),
    }


def _tensors(known: ParameterDict) -> list[dict[str, Any]]:
    """What is known of each tensor; null where the trial does not say it."""
    return [
        {
            "id": each.index,
            "name": each.name,
            "shape": each.shape,
            "dtype": each.dtype,
            "bytes": each.size,
            "updates": known.update_of.get(each.index, ()),
        }
        for each in known.parameters
    ]


def write(
    found: Statistics,
    time: StepTime,
    folder: Path,
    tensors: ParameterDict | None = None,
    read: ReadRanks | None = None,
    *,
    xlsx: bool = False,
) -> list[Path]:
    """Write stats.json, ops.parquet and ops.csv; give their paths."""
    text = json.dumps(to_dict(found, time, tensors, read), indent=2)
    tables = {"ops": found.table()}
    return files.write_tables(folder, {"stats.json": text}, tables, "stats" if xlsx else None)


def show(
    found: Statistics, time: StepTime, rows: list[int], read: ReadRanks | None = None
) -> None:
    """Print steps, ranks, categories and the chosen operations."""
    console = plain_console()
    say(
        console,
        f"[bold]{read or counted(len(time.ranks), 'rank')}, "
        f"{counted(len(time.steps), 'step')}:[/] "
        f"{format_ns(time.time_ns, _STEP_DIGITS)} a step; step {time.opt_step} is closest "
        "to it",
    )
    console.print(_ranks(time), _categories(found), _operations(found, rows))
    left = len(found.names) - len(rows)
    if left:
        words = counted(left, "more operation")
        say(console, f"{words}; --head N shows N, --output writes all")


def _ranks(time: StepTime) -> TerminalTable:
    rows = table("rank", "step", "forward", "backward", "update")
    for pid, rank in time.ranks.items():
        mean = sum(rank.time) / len(rank.time)
        parts = (format_ns(rank.mean_ns(part)) for part in rank.parts)
        rows.add_row(escape(pid), format_ns(mean), *parts)
    return rows


def _categories(found: Statistics) -> TerminalTable:
    rows = table(
        *("category", "ops", "events", "time", "mean", "longest op, mean"), drop=("ops",)
    )
    for name, each in found.categories.items():
        times = (format_ns(each[key] * MS) for key in ("time", "avg", "max_t"))
        rows.add_row(escape(name), str(each["op_cnt"]), str(each["cnt"]), *times)
    return rows


def _operations(found: Statistics, chosen: list[int]) -> TerminalTable:
    rows = table(
        *("operation", "events", "mean", "median", "min", "max", "deviation"),
        drop=("deviation", "min", "median"),
    )
    for k in chosen:
        times = (found.avg[k], found.median[k], found.least[k], found.most[k])
        words = (format_ns(float(each)) for each in times)
        deviation = format_ns(float(found.variance[k]) ** 0.5)
        rows.add_row(escape(found.names[k]), str(found.count[k]), *words, deviation)
    return rows


def comparison_to_dict(found: OperationComparison) -> dict[str, Any]:
    """Means in ms, differences absolute and relative."""
    return {
        "added": list(found.added),
        "removed": list(found.removed),
        "changed": {
            each.name: {
                "before_ms": each.before_ns / MS,
                "after_ms": each.after_ns / MS,
                "absolute_ms": each.absolute_ns / MS,
                "relative": each.relative,
            }
            for each in found.changed
        },
    }


def show_comparison(found: OperationComparison, head: int) -> None:
    """Print the largest changes, and what came and went."""
    console = plain_console()
    rows = table(
        *("operation", "before", "after", "difference", "relative"), drop=("before", "after")
    )
    for each in found.changed[:head]:
        relative = "n/a" if each.relative is None else signed_percent(each.relative)
        change = format_signed_ns(each.absolute_ns)
        times = (format_ns(ns) for ns in (each.before_ns, each.after_ns))
        rows.add_row(escape(each.name), *times, change, relative)
    say(
        console,
        f"{counted(len(found.changed), 'operation')} changed, {len(found.added)} added, "
        f"{len(found.removed)} removed",
    )
    console.print(rows)
    for word, names in (("added", found.added), ("removed", found.removed)):
        for name in names[:_MOST_NAMES]:
            say(console, f"{word}: {escape(name)}", hanging=2)
