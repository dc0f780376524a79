"""The rows of a query, the views and their columns on the terminal."""

from functools import partial
from typing import Any

from rich.markup import escape

from fastcomm.show import console, tables
from fastcomm.show.console import plain_console, say, shortened, shown
from fastcomm.show.tables import ResultTable, TableColumn
from fastcomm.sql.result import QueryResult
from fastcomm.sql.views import VIEWS, RunView
from fastcomm.units import counted

_LONGEST = 120  # letters of a text, unless --wide is given
_DIGITS = 6
_WHOLE, _EXACT = 1e5, 1e15  # between these, numbers are printed without decimals


def show(result: QueryResult) -> None:
    """Print the rows that are kept, and how many there are."""
    terminal = plain_console()
    terminal.print(shown(_rows(result)))
    rows, shown_rows = result.row_count, result.table.num_rows
    if rows > shown_rows:
        more = counted(rows - shown_rows, "more row")
        say(terminal, f"{more}; --top N prints N, --format csv prints all")
    else:
        say(terminal, counted(rows, "row"))


def _rows(result: QueryResult) -> ResultTable:
    """Return the rows as a table; texts may break into lines."""
    columns = (
        TableColumn(name, partial(_cell, name), is_sentence=str(field.type) == "string")
        for name, field in zip(result.table.column_names, result.table.schema, strict=True)
    )
    return ResultTable(name="query", caption="", columns=tuple(columns), rows=result.rows())


def _cell(name: str, row: dict[str, Any]) -> str | None:
    """Return a value as text; None is unknown."""
    value = row[name]
    if value is None:
        return None
    if isinstance(value, float):
        is_large = _WHOLE <= abs(value) < _EXACT
        return f"{value:.0f}" if is_large else f"{value:.{_DIGITS}g}"
    text = str(value)
    return text if console.WIDE.get() else shortened(text, _LONGEST)


def markdown(result: QueryResult) -> str:
    """Return the rows that are kept as a table of Markdown."""
    return "\n".join(tables.markdown(_rows(result)))


def show_views() -> None:
    """Print the name and the rows of each view."""
    terminal = plain_console()
    table = console.table("view", "rows", texts=("rows",))
    for view in VIEWS:
        table.add_row(view.name, escape(view.text))
    terminal.print(table)


def show_schema(view: RunView) -> None:
    """Print the columns of a view: type, unit and meaning."""
    terminal = plain_console()
    say(terminal, f"[bold]{view.name}[/]: {escape(view.text)}")
    table = console.table(
        "column", "type", "unit", "meaning", texts=("type", "unit", "meaning")
    )
    for column in view.columns:
        table.add_row(column.name, escape(column.type), column.unit, escape(column.text))
    terminal.print(table)
