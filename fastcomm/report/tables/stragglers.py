"""Tables of the slowdown that each data rank, stage or operation of a job causes."""

from typing import Final

from fastcomm.report.columns import ResultTable, TableColumn
from fastcomm.stragglers import Stragglers

# Kinds of parts, and the name of one.
KINDS: Final = (("dp_rank", "data rank"), ("stage", "stage"), ("optype", "operation"))


def parts(stragglers: Stragglers) -> list[ResultTable]:
    """Return a table per kind of parts; none where the slowdown is not attributed."""
    if stragglers.blocking is None:
        return []
    return [
        ResultTable(
            name=f"{kind}-table",
            caption=f"By {name}",
            columns=(
                TableColumn(name, lambda pair: pair[0]),
                TableColumn(
                    "slowdown caused alone",
                    lambda pair: pair[1],
                    "factor",
                    "stragglers.alone",
                    digits=4,
                ),
            ),
            rows=list(stragglers.blocking[kind].mean.items()),
        )
        for kind, name in KINDS
    ]
