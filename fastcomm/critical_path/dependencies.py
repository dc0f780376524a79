"""The result of `data_dependencies`: operators of a step with the data that they wait for."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, kw_only=True)
class DataDependencies:
    """Data dependencies between the operators of a step."""

    operators: pa.Table  # of OPERATORS: operators that call no other
    subgraphs: pa.Table  # of SUBGRAPHS: outermost operators that call several
    matched: int  # operators of both the window and the execution trace
    in_window: int  # operators of the window
    traced: int  # operators of the execution trace
    joined_by: str  # how they were matched
    span_ns: int  # measured time from the first start to the last end
    bound_ns: int  # this time with unlimited threads and streams

    def movable(self, count: int = 10) -> pa.Table:
        """Return operators on the path that could start earlier, largest difference first."""
        table = self.operators
        readers = pc.and_(table["on_path"], pc.greater(table["producers"], 0))
        order = [("earlier_ns", "descending"), ("event", "ascending")]
        return table.filter(readers).sort_by(order).slice(0, count)

    def shortening(self, count: int = 10) -> pa.Table:
        """Return operators whose reordering shortens the step, largest effect first."""
        table = self.operators.filter(pc.greater(self.operators["shortens_ns"], 0))
        order = [("shortens_ns", "descending"), ("event", "ascending")]
        return table.sort_by(order).slice(0, count)

    def movable_subgraphs(self, count: int = 10) -> pa.Table:
        """Return outermost operators with leaves on the path, largest effect first."""
        return self.subgraphs.slice(0, count)

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `data` in the JSON document of a critical path."""
        return {
            "joined": {
                "by": self.joined_by,
                "operators": self.matched,
                "of_window": self.in_window,
                "of_execution_trace": self.traced,
            },
            "span_ns": self.span_ns,
            "bound_ns": self.bound_ns,
            "operators": self.movable().to_pylist(),
            "shortening": self.shortening().to_pylist(),
            "subgraphs": self.movable_subgraphs().to_pylist(),
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the tables `operators` and `subgraphs`."""
        return {"operators": self.operators, "subgraphs": self.subgraphs}
