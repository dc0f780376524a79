"""What operators of a step wait for if only data counts: the result of `data_dependencies`."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, kw_only=True)
class DataDependencies:
    """What a step's operators really wait for."""

    operators: pa.Table  # of OPERATORS: the leaves of the window
    subgraphs: pa.Table  # of SUBGRAPHS: calls that hold several
    known: int  # operators that the window and the execution trace have in common
    asked: int  # operators of the window
    traced: int  # operators of the execution trace
    joined_by: str
    span_ns: int  # of these operators, as measured
    bound_ns: int  # the same with unlimited threads and streams

    def movable(self, count: int = 10) -> pa.Table:
        """The operators on the path, those first that could start earliest."""
        table = self.operators
        readers = pc.and_(table["on_path"], pc.greater(table["producers"], 0))
        order = [("earlier_ns", "descending"), ("event", "ascending")]
        return table.filter(readers).sort_by(order).slice(0, count)

    def shortening(self, count: int = 10) -> pa.Table:
        """The operators whose reordering shortens the step, those first that do so most."""
        table = self.operators.filter(pc.greater(self.operators["shortens_ns"], 0))
        order = [("shortens_ns", "descending"), ("event", "ascending")]
        return table.sort_by(order).slice(0, count)

    def movable_subgraphs(self, count: int = 10) -> pa.Table:
        """The calls that hold operators on the path, those first that shorten the step most."""
        return self.subgraphs.slice(0, count)

    def to_dict(self) -> dict[str, Any]:
        """Return the dependencies as they stand under `data` in the JSON of a critical path."""
        return {
            "joined": {
                "by": self.joined_by,
                "operators": self.known,
                "of_window": self.asked,
                "of_execution_trace": self.traced,
            },
            "span_ns": self.span_ns,
            "bound_ns": self.bound_ns,
            "operators": self.movable().to_pylist(),
            "shortening": self.shortening().to_pylist(),
            "subgraphs": self.movable_subgraphs().to_pylist(),
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the operators, and the calls that hold them."""
        return {"operators": self.operators, "subgraphs": self.subgraphs}
