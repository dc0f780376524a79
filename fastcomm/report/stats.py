"""Statistics of a uniform trace: on a terminal, as JSON, and in files."""

from rich.markup import escape

from fastcomm.analyses.stats import OperationComparison, RunStatistics
from fastcomm.readers.dpro.statistics import MS, Statistics, StepTime
from fastcomm.report.console import STEP_DIGITS, TerminalTable, plain_console, say, table
from fastcomm.trace.run import ranges
from fastcomm.units import counted, format_ns, format_signed_ns, signed_percent

_MOST_NAMES = 10


def show(statistics: RunStatistics, chosen: list[int]) -> None:
    """Print steps, ranks, categories and the chosen operations.

    `chosen` are the indices of the operations to print, in this order.
    """
    operations, time, read = statistics.operations, statistics.time, statistics.read
    console = plain_console()
    say(
        console,
        f"[bold]{read or counted(len(time.ranks), 'rank')}, "
        f"{counted(len(statistics.steps), 'step')} ({ranges(sorted(statistics.steps))}):[/] "
        f"{format_ns(time.time_ns, STEP_DIGITS)} a step on average, from its first operator "
        f"to its last; closest: step {statistics.typical_step}",
    )
    console.print(_ranks(time), _categories(operations), _operations(operations, chosen))
    more = len(operations.names) - len(chosen)
    if more:
        hint = counted(more, "more operation")
        say(console, f"{hint}; --top N prints N, --output writes all")


def _ranks(time: StepTime) -> TerminalTable:
    """Return the table of the mean step time of each rank, and its parts."""
    rows = table("rank", "step", "forward", "backward", "update")
    for pid, rank in time.ranks.items():
        mean = sum(rank.time) / len(rank.time)
        parts = (format_ns(rank.mean_ns(part)) for part in rank.parts)
        rows.add_row(escape(pid), format_ns(mean), *parts)
    return rows


def _categories(statistics: Statistics) -> TerminalTable:
    """Return the table of operations, events and times by category."""
    rows = table(
        *("category", "ops", "events", "time", "mean", "longest operation (mean)"),
        drop=("ops",),
    )
    for name, category in statistics.categories.items():
        times = (format_ns(category[key] * MS) for key in ("time", "avg", "max_t"))
        rows.add_row(escape(name), str(category["op_cnt"]), str(category["cnt"]), *times)
    return rows


def _operations(statistics: Statistics, chosen: list[int]) -> TerminalTable:
    """Return the table of the operations at the indices `chosen`, in this order."""
    rows = table(
        *("operation", "events", "mean", "median", "min", "max", "deviation"),
        drop=("deviation", "min", "median"),
    )
    for k in chosen:
        times = (
            statistics.avg[k],
            statistics.median[k],
            statistics.least[k],
            statistics.most[k],
        )
        cells = (format_ns(float(time)) for time in times)
        deviation = format_ns(float(statistics.variance[k]) ** 0.5)
        rows.add_row(escape(statistics.names[k]), str(statistics.count[k]), *cells, deviation)
    return rows


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
