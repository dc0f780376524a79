"""Statistics of a uniform trace: on a terminal, as JSON, and in files."""

from rich.markup import escape

from fastcomm.analyses.stats import OperationComparison, RunStatistics
from fastcomm.report.console import STEP_DIGITS, plain_console, say, shown, table
from fastcomm.report.tables import stats as tables
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
    for one in (
        tables.ranks(time),
        tables.categories(operations),
        tables.operations(operations, chosen),
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
