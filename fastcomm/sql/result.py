"""The rows of an SQL query, and what was read for them."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from typing import Any, Self

import numpy as np
import pyarrow as pa

from fastcomm.result import TableResult
from fastcomm.trace.run_traces import SkippedRank, named_ranks
from fastcomm.units import counted

_MOST_COLUMNS = 8  # that a sentence names
_LARGEST = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRead:
    """What was read of a view: columns, and the ranks whose traces that took."""

    view: str
    columns: tuple[str, ...]
    ranks: tuple[int, ...]
    of_ranks: int  # number of ranks of the run

    def __str__(self) -> str:
        """Return a text such as "events (kind, name) of rank 3 (of 512)"."""
        names = ", ".join(self.columns[:_MOST_COLUMNS])
        more = len(self.columns) - _MOST_COLUMNS
        columns = f"{self.view} ({names}{f' and {more} more' if more > 0 else ''})"
        if not self.ranks:
            return f"{columns} without a trace"
        if len(self.ranks) == self.of_ranks:
            return f"{columns} of all {counted(self.of_ranks, 'rank')}"
        return f"{columns} of {named_ranks(self.ranks)} (of {self.of_ranks})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class QueryResult(TableResult):
    """The rows of a query; `table` may have only the first of them."""

    has_long_tables = True

    sql: str
    table: pa.Table = field(compare=False)
    row_count: int
    reads: tuple[ViewRead, ...] = ()
    skipped: tuple[SkippedRank, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_arrow(self) -> pa.Table:
        """Return the rows: numbers, texts, Booleans, times and lists of these."""
        return self.table

    def top(self, count: int) -> Self:
        """Return the result with at most its first `count` rows."""
        return replace(self, table=self.table.slice(0, count))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as JSON has them, by name of the column."""
        names = self.table.column_names
        columns = [map(_as_json, column.to_pylist()) for column in self.table.columns]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        return {
            "sql": self.sql,
            "columns": [
                {"name": column.name, "type": str(column.type)} for column in self.table.schema
            ],
            "row_count": self.row_count,
            "rows": self.rows(),
            "read": [asdict(read) for read in self.reads],
            "warnings": list(self.warnings),
            "failed": [asdict(rank) for rank in self.skipped],
        }

    def figures(self) -> dict[str, str]:
        """Return the number of rows, the columns, and what was read."""
        return {
            "rows": str(self.row_count),
            "columns": ", ".join(self.table.column_names),
            "read": "; ".join(map(str, self.reads)) or "nothing",
        }


def plain_table(table: pa.Table) -> pa.Table:
    """Return a table with unique names of columns, and types that files and JSON have.

    Whole numbers of any size are int64, or else float64; what is neither number, text,
    Boolean, date, time nor a list becomes text.
    """
    names: list[str] = []
    for name in table.column_names:
        unique, number = name, 2
        while unique in names:
            unique, number = f"{name}_{number}", number + 1
        names.append(unique)
    return pa.table([_plain(column) for column in table.columns], names)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of a type that files and JSON have."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return column.cast(kind.value_type)
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    if pa.types.is_decimal(kind):
        return _numbers(column)
    own = kind.value_type if pa.types.is_list(kind) else kind
    if _is_plain(own) and not pa.types.is_temporal(own):
        return column
    try:
        values = column.to_pylist()
    except (OverflowError, ValueError):  # dates and times that Python does not have
        values = [_value(item) for item in column]
    else:
        if _is_plain(own):
            return column
    texts = [None if value is None else _text(value) for value in values]
    return pa.chunked_array([pa.array(texts, pa.string())])


def _value(item: pa.Scalar) -> Any:
    """Return a value of Python; of dates and times that Python does not have, the text."""
    if not item.is_valid:
        return None
    if isinstance(item, pa.MapScalar):
        return {_text(_value(row[0])): _value(row[1]) for row in item.values}
    if isinstance(item, pa.ListScalar):
        return [_value(row) for row in item.values]
    if isinstance(item, pa.StructScalar):
        return {name: _value(part) for name, part in item.items()}
    try:
        return item.as_py()
    except (OverflowError, ValueError):
        return _far(item)


def _far(item: pa.Scalar) -> str:
    """Return a date or time that Python does not have as text, such as "infinity"."""
    kind, value = item.type, item.value
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        if abs(value) == (1 << (kind.bit_width - 1)) - 1:
            return "infinity" if value > 0 else "-infinity"
        text = str(np.datetime64(value, getattr(kind, "unit", "D")))
        return f"{text}+00:00" if getattr(kind, "tz", None) else text
    return f"{value} {getattr(kind, 'unit', 'units')}"


def _is_plain(kind: pa.DataType) -> bool:
    """Whether files and JSON have values of a type."""
    tests = (
        *(pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string),
        *(pa.types.is_date, pa.types.is_time, pa.types.is_timestamp),
    )
    return any(test(kind) for test in tests)


def _numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return decimals as int64 where all are whole and fit, else as float64."""
    values = column.to_pylist()
    is_whole = column.type.scale == 0 and all(
        value is None or -_LARGEST <= value < _LARGEST for value in values
    )
    kind, form = (pa.int64(), int) if is_whole else (pa.float64(), float)
    numbers = [None if value is None else form(value) for value in values]
    return pa.chunked_array([pa.array(numbers, kind)])


def _as_json(value: Any) -> Any:
    """Return a value as JSON has it: times as texts, and no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_json(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return _text(value)


def _text(value: Any) -> str:
    """Return a value of any type as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, pa.MonthDayNano):
        months, days, nanoseconds = value
        value = f"{months} months {days} days {nanoseconds} ns"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
