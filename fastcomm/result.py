"""What all results share: a JSON document, Arrow tables, and short texts for people.

A result stores what was measured and derives the rest. In JSON, times are nanoseconds, sizes
bytes and rates per second, as the ends of keys say; null is unknown.
"""

from abc import ABC, abstractmethod
from html import escape
from typing import TYPE_CHECKING, Any

from fastcomm.inert import inert

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1  # of all JSON documents; a new one says that keys have changed


class Result(ABC):
    """The result of an analysis; `docs/schemas` has the JSON Schema of each document."""

    __slots__ = ()

    @abstractmethod
    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version: dicts, lists, texts and numbers."""

    @abstractmethod
    def to_arrow(self) -> "pa.Table | dict[str, pa.Table]":
        """Return what `--output` writes: a table, or tables by name."""

    @abstractmethod
    def figures(self) -> dict[str, str]:
        """Return the key figures, formatted with their units, by name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of the command: what `--json` prints."""
        return {"schema_version": SCHEMA_VERSION, **self.contents()}

    def __repr__(self) -> str:
        """Return the key figures on one line."""
        words = ", ".join(f"{name} {figure}" for name, figure in self.figures().items())
        return inert(f"<{type(self).__name__}: {words}>")

    def _repr_html_(self) -> str:
        """Return the key figures as a table, for notebooks."""
        rows = "".join(
            f"<tr><th>{escape(inert(name))}</th><td>{escape(inert(figure))}</td></tr>"
            for name, figure in self.figures().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


class TableResult(Result):
    """A result with one table, which pandas, Polars and DuckDB take as it is."""

    __slots__ = ()

    @abstractmethod
    def to_arrow(self) -> "pa.Table":
        """Return the table that `--output` writes."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return `to_arrow` as a capsule of Arrow's C stream interface."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)
