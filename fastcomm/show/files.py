"""Write results to files: JSON, CSV, Parquet and Excel."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from fastcomm import arrow_files
from fastcomm.errors import FastcommError, inert
from fastcomm.files import aside, check_no_input, check_replaceable, refuse_output
from fastcomm.result import Result, json_text

if TYPE_CHECKING:
    from xlsxwriter import Workbook
    from xlsxwriter.worksheet import Worksheet

_ROWS = 1 << 17  # written at once as CSV
# What `inert` may change: control and format characters, and the separators of lines.
_ACTIVE = r"[\pC\p{Zl}\p{Zp}]"
# Start of a text that spreadsheets read as a formula unless it is a number: a sign, also a
# full-width one of East Asian keyboards, also after spaces.
_FORMULA = r"^[\s\p{Zs}]*[=+\-@\x{ff1d}\x{ff0b}\x{ff0d}\x{ff20}]"
# Such a sign after a semicolon: in many countries it separates cells.
_INNER_FORMULA = r";([\s\p{Zs}\"']*[=+\-@\x{ff1d}\x{ff0b}\x{ff0d}\x{ff20}])"
_NUMBER = r"^[+-]?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?$"


def write_csv(table: pa.Table, path: Path) -> None:
    r"""Write a table as CSV whose texts have no effect in a spreadsheet.

    Lists are joined by spaces. Line breaks and control characters are spelled out (`\n`), so
    that each row is a line. Texts that would be a formula get a leading ', also after a
    semicolon. Raises OSError.
    """
    with pa.OSFile(os.fsencode(path), "wb") as file:
        _write_rows(table, file)


def csv_text(table: pa.Table) -> str:
    """Return a table as the text that `write_csv` writes, with a header line."""
    buffer = pa.BufferOutputStream()
    _write_rows(table, buffer)
    return bytes(buffer.getvalue()).decode()


def _write_rows(table: pa.Table, file: pa.NativeFile) -> None:
    """Write a header and all rows, a part at a time: texts take more memory than numbers."""
    schema = _plain_table(table.schema.empty_table()).schema
    with pa_csv.CSVWriter(file, schema) as writer:
        for begin in range(0, table.num_rows, _ROWS):
            writer.write_table(_plain_table(table.slice(begin, _ROWS)).cast(schema))


def _plain_table(table: pa.Table) -> pa.Table:
    """Return a table whose columns are fit for CSV."""
    for place, field in enumerate(table.schema):
        table = table.set_column(place, field.name, _plain(table[field.name]))
    return table


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column for CSV: lists joined, no control characters, and no formulas."""
    if pa.types.is_list(column.type):
        texts = [
            None if value is None else " ".join(map(str, value)) for value in column.to_pylist()
        ]
        column = pa.chunked_array([pa.array(texts, pa.string())])
    elif pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    if pc.any(pc.match_substring_regex(column, _ACTIVE)).as_py():
        texts = [text and inert(text) for text in column.to_pylist()]
        column = pa.chunked_array([pa.array(texts, column.type)])
    column = pc.replace_substring_regex(column, _INNER_FORMULA, r";'\1")
    is_formula = pc.and_not(
        pc.match_substring_regex(column, _FORMULA), pc.match_substring_regex(column, _NUMBER)
    )
    quoted = pc.binary_join_element_wise("'", column, "")
    return pc.if_else(is_formula, quoted.cast(column.type), column)


_MOST_ROWS = (1 << 20) - 1  # of a sheet, below the header
_MOST_NAME = 31  # characters of a sheet's name
_MOST_TEXT = 32_767  # characters of a cell
_EXACT = 1 << 53  # beyond, Excel's numbers round
_WIDTHS = 8, 40  # characters of a column


def write_workbook(tables: Mapping[str, pa.Table], path: Path) -> None:
    """Write a workbook with a sheet per table.

    Texts are never formulas or links; null is an empty cell; integers that Excel would round
    are texts.

    Raises
    ------
    FastcommError
        If XlsxWriter is not installed, or a table has too many rows.

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


# Write rows to disk at once, to save memory.
_OPTIONS = {"constant_memory": True}


def _sheet(book: "Workbook", name: str, table: pa.Table) -> None:
    """Add a sheet with a table to a workbook: frozen headings, filters, one row per row."""
    # A fixed date, so that equal tables give equal bytes.
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
    """Yield the rows of a table as tuples of Python values."""
    for batch in table.to_batches():
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _cell(sheet: "Worksheet", row: int, column: int, value: Any) -> None:
    """Write a value with its type at `row` and `column`, from 0; nothing for null, NaN, inf."""
    if isinstance(value, bool):
        sheet.write_boolean(row, column, value)
    elif isinstance(value, int | float) and abs(value) <= _EXACT:
        sheet.write_number(row, column, value)
    elif isinstance(value, float) and not math.isfinite(value):
        return
    elif value is not None:
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        sheet.write_string(row, column, text[:_MOST_TEXT])


Writer = Callable[[Path], object]


def write(folder: str | Path, writers: Mapping[str, Writer]) -> list[Path]:
    """Write files by name into a directory, which is created; return their paths.

    An existing file is replaced when the new one is complete. Raises FastcommError.
    """
    refuse_output("--output", folder)
    folder = Path(folder)
    for name in writers:
        check_replaceable(folder / name)
        check_no_input(folder / name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, writer in writers.items():
            with aside(folder / name) as unfinished:
                writer(unfinished)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    return [folder / name for name in writers]


def write_tables(
    folder: str | Path,
    texts: Mapping[str, str],
    tables: Mapping[str, pa.Table],
    book: str | None = None,
) -> list[Path]:
    """Write every table as CSV and Parquet, and last the texts.

    So an existing JSON file shows that the tables are complete.

    Parameters
    ----------
    folder
        Made if it does not exist.
    texts, tables
        Texts by file name; tables by name without suffix.
    book
        Name of an Excel workbook of all tables, without suffix; None writes none.

    Returns
    -------
    list of Path
        All files.

    """
    writers: dict[str, Writer] = {}
    for name, table in tables.items():
        writers[f"{name}.parquet"] = partial(arrow_files.write, table)
        writers[f"{name}.csv"] = partial(write_csv, table)
    if book is not None:
        writers[f"{book}.xlsx"] = partial(write_workbook, tables)
    writers.update((name, text(content)) for name, content in texts.items())
    return write(folder, writers)


def text(content: str) -> Writer:
    """Return a writer of `content` in UTF-8."""
    return partial(Path.write_text, data=content, encoding="utf-8")


def write_result(
    result: Result,
    folder: str | Path,
    name: str,
    table: str | None = None,
    *,
    xlsx: bool = False,
) -> list[Path]:
    """Write the JSON document of a result, and its tables as CSV and Parquet, into a folder.

    Parameters
    ----------
    result
        The result.
    folder
        Made if it does not exist.
    name
        Name of the document and of the workbook, without suffix.
    table
        Name of the result's only table, `name` by default.
    xlsx
        Whether to write a workbook as well.

    Returns
    -------
    list of Path
        All files.

    """
    content = result.to_arrow()
    tables = content if isinstance(content, dict) else {table or name: content}
    book = name if xlsx else None
    return write_tables(folder, {f"{name}.json": json_text(result)}, tables, book)
