"""Base classes of results: a JSON document, Arrow tables, and key figures for people.

A result stores measurements and derives other numbers. In JSON, times are nanoseconds, sizes
bytes and rates per second, as the ends of keys say; null is unknown. Large documents are
written so that a person can read them, too: a row a line.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from fastcomm.errors import inert, utf8

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1  # of all JSON documents; a new one says that keys have changed

_STEP = "  "
_ENCODER = json.JSONEncoder(allow_nan=False)
_SURROGATE = "\\ud"  # begins each surrogate that the encoder writes


class Result(ABC):
    """The result of an analysis; `fastcomm/schemas` has the JSON Schema of each document."""

    __slots__ = ()

    has_long_tables: ClassVar[bool] = False  # whether its JSON text has a line for each row

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
        """Return the JSON document of the command, as a parser reads what `--json` prints."""
        document: dict[str, Any] = _utf8(_versioned(self))
        return document

    def __repr__(self) -> str:
        """Return the key figures on one line."""
        figures = ", ".join(f"{name} {figure}" for name, figure in self.figures().items())
        return inert(f"<{type(self).__name__}: {figures}>")

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


def json_text(result: Result) -> str:
    """Return the JSON document of a result as text: what `--json` prints."""
    document = _versioned(result)
    return text(document) if result.has_long_tables else dumps(document)


def _versioned(result: Result) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **result.contents()}


def dumps(value: Any) -> str:
    r"""Return an indented JSON text that any parser reads; ValueError for NaN.

    Bytes of file names that are not UTF-8 are written as in messages: `\udcff`.
    """
    text = json.dumps(value, indent=2, allow_nan=False)
    return json.dumps(_utf8(value), indent=2, allow_nan=False) if _SURROGATE in text else text


def _utf8(value: Any) -> Any:
    """Return a value of a JSON document with all its texts, keys too, as valid UTF-8.

    Tuples become lists, and numbers that are keys texts.
    """
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, Mapping):
        return {utf8(str(key)): _utf8(item) for key, item in value.items()}
    return list(map(_utf8, value)) if isinstance(value, list | tuple) else value


def text(document: Mapping[str, Any]) -> str:
    """Return the JSON text of a document, with a line for each value and item of a value.

    Deeper values are not indented, which would take most of the time for thousands of ranks.

    Raises
    ------
    ValueError
        If a number is NaN or infinite.

    """
    values = (f"{_STEP}{_plain(str(key))}: {_value(value)}" for key, value in document.items())
    return _block("{", values, "", "}")


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        items = (
            f"{_STEP * 2}{_plain(str(key))}: {_plain(item)}" for key, item in value.items()
        )
        return _block("{", items, _STEP, "}")
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return _block("[", (f"{_STEP * 2}{_plain(row)}" for row in value), _STEP, "]")
    return _plain(value)


def _block(begin: str, lines: Iterable[str], indent: str, end: str) -> str:
    return "\n".join((begin, ",\n".join(lines), indent + end))


def _plain(value: Any) -> str:
    text = _ENCODER.encode(value)
    return _ENCODER.encode(_utf8(value)) if _SURROGATE in text else text
