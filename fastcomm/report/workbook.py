"""Tables as one Excel workbook, a sheet each. Needs the extra `xlsx`."""

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fastcomm.errors import FastcommError

if TYPE_CHECKING:
    from xlsxwriter import Workbook
    from xlsxwriter.worksheet import Worksheet

_MOST_ROWS = (1 << 20) - 1  # of a sheet, below the header
_MOST_NAME = 31  # characters of a sheet's name
_MOST_TEXT = 32_767  # characters of a cell
_EXACT = 1 << 53  # beyond, Excel's numbers round
_WIDTHS = 8, 40  # characters of a column


def write(tables: Mapping[str, pa.Table], path: Path) -> None:
    """Write a sheet a table; FastcommError where the extra is missing or a table does not fit.

    A text is never a formula or a link, whatever it begins with; null is an empty cell; a whole
    number that Excel would round is text.
    """
    try:
        from xlsxwriter import Workbook
    except ImportError as error:
        raise FastcommError(
            f"{path}: Excel needs XlsxWriter: pip install 'fastcomm[xlsx]'"
        ) from error
    for name, table in tables.items():
        if table.num_rows > _MOST_ROWS:
            raise FastcommError(
                f"{path}: {name} has {table.num_rows} rows, a sheet holds {_MOST_ROWS}; "
                "--output writes it as Parquet and CSV"
            )
    with Workbook(str(path), _OPTIONS) as book:
        for name, table in tables.items():
            _sheet(book, name[:_MOST_NAME], table)


# Rows go to disk as they come.
_OPTIONS = {"constant_memory": True}


def _sheet(book: "Workbook", name: str, table: pa.Table) -> None:
    # The same tables give the same bytes: no date of today.
    book.set_properties({"created": datetime(1980, 1, 1, tzinfo=UTC)})
    sheet = book.add_worksheet(name)
    bold = book.add_format({"bold": True, "bottom": 1})
    for column, field in enumerate(table.schema):
        sheet.set_column(column, column, min(max(len(field.name) + 2, _WIDTHS[0]), _WIDTHS[1]))
        sheet.write_string(0, column, field.name, bold)
    for place, row in enumerate(_rows(table), 1):
        for column, value in enumerate(row):
            _cell(sheet, place, column, value)
    sheet.freeze_panes(1, 0)
    if table.num_columns:
        sheet.autofilter(0, 0, table.num_rows, table.num_columns - 1)


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in table.to_batches():
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _cell(sheet: "Worksheet", row: int, column: int, value: Any) -> None:
    """One value as what it is; nothing for null and for what is no number."""
    if isinstance(value, bool):
        sheet.write_boolean(row, column, value)
    elif isinstance(value, int | float) and abs(value) <= _EXACT:
        sheet.write_number(row, column, value)
    elif isinstance(value, float) and not math.isfinite(value):
        return
    elif value is not None:
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        sheet.write_string(row, column, text[:_MOST_TEXT])
