"""Tables of a replayed step: ranks, the critical path, and what would shorten it."""

from fastcomm.replay.result import Session
from fastcomm.report.columns import ResultTable, TableColumn
from fastcomm.units import format_ns


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


_RANKS = (
    TableColumn("rank", 0),
    TableColumn("replayed", 1, "ns", "replay.step_ns"),
    TableColumn(
        "error", 2, "change", "replay.error", why="the rank was not measured", digits=2
    ),
    TableColumn("what if", 3, "ns", "replay.what_if_ns"),
)


def path(session: Session) -> ResultTable:
    """Return the operations of the critical path and their times on it, the longest first."""
    return ResultTable(
        name="path-table",
        caption="The critical path",
        heading=f"critical path, {format_ns(session.path.length_ns)}",
        columns=(
            TableColumn("operation", 0),
            TableColumn("on the path", 1, "ns", "replay.cost_ns"),
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
            TableColumn("shorter by", "saved_ns", "ns", "replay.saved_ns"),
        ),
        rows=session.removed or (),
    )
