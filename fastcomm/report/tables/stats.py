"""Tables of the operations of a run: ranks, categories and operations."""

from collections.abc import Sequence

from fastcomm.readers.dpro.statistics import MS, Statistics, StepTime
from fastcomm.report.columns import ResultTable, TableColumn

_PARTS = {"fw": "forward", "bw": "backward", "update": "update"}


def ranks(time: StepTime) -> ResultTable:
    """Return the mean step time of each rank, and the sums of its operators."""
    return ResultTable(
        name="ranks-table",
        caption="Mean step of each rank, and the sums of its operators",
        columns=(
            TableColumn("rank", 0),
            TableColumn("step", 1, "ns", "stats.rank"),
            *(
                TableColumn(name, place, "ns", "stats.part")
                for place, name in enumerate(_PARTS.values(), 2)
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
            TableColumn("operations", 1, "count", "stats.operations", drop=1),
            TableColumn("events", 2, "count", "stats.count"),
            TableColumn("time", 3, "ns", "stats.total"),
            TableColumn("mean", 4, "ns", "stats.mean"),
            TableColumn("longest operation", 5, "ns", "stats.longest"),
        ),
        rows=sorted(rows, key=lambda row: -row[3]),
    )


def operations(statistics: Statistics, chosen: Sequence[int]) -> ResultTable:
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


_OPERATIONS = (
    TableColumn("operation", 0),
    TableColumn("category", 1, only="page"),
    TableColumn("events", 2, "count", "stats.count"),
    TableColumn("total", 3, "ns", "stats.total", only="page"),
    TableColumn("mean", 4, "ns", "stats.mean"),
    TableColumn("median", 5, "ns", "stats.median", drop=3),
    TableColumn("shortest", 6, "ns", "stats.shortest", drop=2),
    TableColumn("longest", 7, "ns", "stats.longest_event"),
    TableColumn("deviation", 8, "ns", "stats.deviation", drop=1),
)
