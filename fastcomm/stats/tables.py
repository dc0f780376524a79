"""Operations of a run or a uniform trace as tables, on the terminal and in files."""

from collections.abc import Sequence

from rich.markup import escape

from fastcomm.formats.dpro.statistics import MS, Statistics, StepTime
from fastcomm.show.console import STEP_DIGITS, plain_console, say, shown, table
from fastcomm.show.tables import ResultTable, TableColumn
from fastcomm.stats.analysis import OperationComparison, RunStatistics
from fastcomm.trace.run import ranges
from fastcomm.units import counted, format_ns, format_signed_ns, signed_percent

_PARTS = {"fw": "forward", "bw": "backward", "update": "update"}
_OPERATIONS = (
    TableColumn("operation", 0),
    TableColumn("category", 1, only="page"),
    TableColumn("events", 2, "count", "stats.ops.cnt"),
    TableColumn("total", 3, "ns", "pages.operation_total", only="page"),
    TableColumn("mean", 4, "ns", "stats.ops.avg_ns"),
    TableColumn("median", 5, "ns", "stats.ops.median_ns", drop=3),
    TableColumn("shortest", 6, "ns", "stats.ops.min_ns", drop=2),
    TableColumn("longest", 7, "ns", "stats.ops.max_ns"),
    TableColumn("deviation", 8, "ns", "pages.deviation", drop=1),
)
_MOST_NAMES = 10


def ranks(time: StepTime) -> ResultTable:
    """Return the mean step time of each rank, and the sums of its operators."""
    return ResultTable(
        name="ranks-table",
        caption="Mean step of each rank, and the sums of its operators",
        columns=(
            TableColumn("rank", 0),
            TableColumn("step", 1, "ns", "pages.rank_step"),
            *(
                TableColumn(name, place, "ns", f"stats.ranks.{part}_ns")
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
            TableColumn("operations", 1, "count", "stats.categories.op_cnt", drop=1),
            TableColumn("events", 2, "count", "stats.categories.cnt"),
            TableColumn("time", 3, "ns", "stats.categories.time_ns"),
            TableColumn("mean", 4, "ns", "stats.categories.avg_ns"),
            TableColumn("longest operation", 5, "ns", "stats.categories.max_ns"),
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
        ranks(time),
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
