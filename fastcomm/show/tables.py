"""Tables of results, whose columns are stated once: label, value, unit, definition.

`console.shown` prints a table on a terminal, `markdown` writes it as Markdown, and `html.shown`
puts it on a page. `tables.py` of a question has its tables.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from fastcomm import units
from fastcomm.errors import inert

NA = "n/a"
_BAR = 24  # letters of a whole bar
# What a value is, which decides its format: times in ns, shares and changes where 1 is all.
ColumnUnit = Literal[
    "text",
    "count",
    "number",
    "decimal",  # a number with one decimal
    "factor",
    "multiple",  # a factor with its sign: "1.240x"
    "ns",
    "change_ns",
    "bytes",
    "bytes_per_s",
    "share",
    "change",
    "bar",  # a length from 0 to 1
]
Medium = Literal["terminal", "page"]


def _factor(value: float, digits: int = 2) -> str:
    """Format a multiple: "1.24"."""
    return f"{value:.{digits}f}"


def _number(value: float, digits: int = units.DIGITS) -> str:
    """Format a number without a unit: "485"."""
    return f"{value:.{digits}g}"


_FORMS: dict[ColumnUnit, Callable[..., str]] = {
    "text": str,
    "count": "{:.0f}".format,
    "number": _number,
    "decimal": "{:.1f}".format,
    "factor": _factor,
    "multiple": "{:.3f}x".format,
    "ns": units.format_ns,
    "change_ns": units.format_signed_ns,
    "bytes": units.format_bytes,
    "bytes_per_s": units.format_bandwidth,
    "share": units.percent,
    "change": units.signed_percent,
    "bar": lambda value: "█" * round(max(value, 0) * _BAR),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """A value that is not shown as others of its column."""

    value: float | str | None  # by which a page sorts
    text: str | None = None  # in place of the formatted value
    unit: ColumnUnit | None = None  # in place of that of the column
    why: str = ""  # reason why it is unknown
    bar: float | None = None  # length from 0 to 1 of the bar behind it on a page


def _value(row: Any, value: str | int | Callable[[Any], object]) -> Any:
    """Return the value of a column in a row; see `TableColumn.value`."""
    if callable(value):
        return value(row)
    if isinstance(value, int) or isinstance(row, Mapping):
        return row[value]
    return getattr(row, value)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: its label, the value in a row, what the value is, and its definition."""

    label: str
    # Key, attribute or place in a row, or a function of the row. None is an unknown value.
    value: str | int | Callable[[Any], object]
    unit: ColumnUnit = "text"
    key: str = ""  # of the definition
    why: str = field(default="", kw_only=True)  # reason why values are unknown
    drop: int = field(default=0, kw_only=True)  # 1: the first to leave out on narrow terminals
    digits: int | None = field(default=None, kw_only=True)  # on terminals, if not as usual
    only: Medium | None = field(default=None, kw_only=True)  # where it is shown
    is_sentence: bool = field(default=False, kw_only=True)  # breaks into lines on terminals

    def cell(self, row: Any) -> TableCell:
        """Return the cell of a row."""
        value = _value(row, self.value)
        return value if isinstance(value, TableCell) else TableCell(value=value, why=self.why)

    def text(self, row: Any) -> str:
        """Return the plain text of the cell of a row: "1.24 ms"; "n/a" if it is unknown."""
        cell = self.cell(row)
        if cell.text is not None:
            return cell.text
        if cell.value is None:
            return NA
        digits = () if self.digits is None else (self.digits,)
        return _FORMS[cell.unit or self.unit](cell.value, *digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultTable:
    """Rows of a result, and the columns that show them."""

    name: str  # id on a page
    caption: str  # above it on a page
    columns: tuple[TableColumn, ...]
    rows: Sequence[Any]
    heading: str = ""  # in place of the first label on terminals, which have no caption

    def top(self, count: int) -> Self:
        """Return the table with its first `count` rows."""
        return replace(self, rows=self.rows[:count])

    def on(self, medium: Medium) -> Self:
        """Return the table with the columns that are shown on a medium."""
        columns = [column for column in self.columns if column.only in {None, medium}]
        if medium == "terminal" and self.heading:
            columns[0] = replace(columns[0], label=self.heading)
        return replace(self, columns=tuple(columns))

    def without_unknown(self) -> Self:
        """Return the table without columns that are unknown in all rows."""
        columns = [
            column
            for column in self.columns
            if any(column.cell(row).value is not None for row in self.rows)
        ]
        return replace(self, columns=tuple(columns))


def markdown(table: ResultTable) -> list[str]:
    """Return the lines of a table of Markdown, whose first column is code."""
    shown = table.on("terminal")
    rules = ["---" if column.unit == "text" else "---:" for column in shown.columns]
    lines = [
        f"| {' | '.join(column.label for column in shown.columns)} |",
        f"| {' | '.join(rules)} |",
    ]
    for row in shown.rows:
        first, *others = (markdown_text(column.text(row)) for column in shown.columns)
        lines.append(f"| {' | '.join([f'`{first}`', *others])} |")
    return lines


def markdown_text(text: str) -> str:
    """Return a text that cannot end a cell or a code span of Markdown."""
    return inert(text).replace("|", "\\|").replace("`", "'")
