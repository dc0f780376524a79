"""The console that reports are printed to: wrapped text, tables that fit any width, progress.

Numbers are never cut. If a table is too wide, its headings are broken into lines, then names
are shortened in the middle, then columns are left out and named below the table.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from fastcomm import units
from fastcomm.errors import inert, inert_parts
from fastcomm.show.tables import NA, ResultTable

if TYPE_CHECKING:
    from fastcomm.trace.run_traces import RunTraces, Source

# Print every column, however wide the lines get (`--wide`).
WIDE: ContextVar[bool] = ContextVar("WIDE", default=False)
_PERCENT = re.compile(r"(?<=\d) (?=%)")
_NO_BREAK = "\ue000"  # private use: rich breaks lines at all of Unicode's spaces
_PIPE_WIDTH = 110
_LEAST_WIDTH = 40
_WIDE_WIDTH = 10_000
STEP_DIGITS = 4  # significant digits of a step time
COMMAND = "    "  # start of a line that is a command to copy, which is never wrapped


class _InertConsole(Console):
    """A console on which control characters in names of a trace have no effect."""

    def render_str(self, text: str, **style: Any) -> Text:
        """Render markup like rich, with control characters and escape sequences spelled out."""
        return super().render_str(inert(text), **style)


def what_if_line(changed_ns: float, before_ns: float) -> str:
    """Return the line on the mean step time with changes (ns), and its change from before."""
    difference = units.signed_percent(changed_ns / before_ns - 1, 2)
    return f"[bold]What if:[/] {units.format_ns(changed_ns, STEP_DIGITS)} a step, {difference}"


def show_edits(console: Console, edits: Sequence[object], interval: object | None) -> None:
    """Print the edits of a what-if, and the interval of its step time."""
    for line in (*edits, *([] if interval is None else [interval])):
        say(console, escape(str(line)), indent=2, hanging=4)


def plain_console(console: Console | None = None) -> Console:
    """Return the console to print to; without colors if it is no terminal.

    Its width is that of the terminal, or of the environment variable COLUMNS.
    """
    console = console or _InertConsole(emoji=False)
    if WIDE.get():
        width = _WIDE_WIDTH
    elif console.is_terminal:
        return console
    else:
        width = _pipe_width()
    if console.is_terminal:
        console.width = width
        return console
    return _InertConsole(file=console.file, width=width, no_color=True, emoji=False)


def _pipe_width() -> int:
    """Return the width of a pipe in cells: COLUMNS, but at least 40; without it 110."""
    columns = os.environ.get("COLUMNS", "")
    return max(int(columns), _LEAST_WIDTH) if columns.isdecimal() else _PIPE_WIDTH


def say(
    console: Console,
    markup: str,
    *,
    indent: int = 0,
    hanging: int | None = None,
    style: str = "",
) -> None:
    """Print a text, broken at words to fit the console.

    Parameters
    ----------
    console
        The console to print to.
    markup
        The text, with rich's markup. Line breaks in it are characters of names, and escaped. A
        text that begins with four spaces is a command to copy: it is printed as it is.
    indent
        Spaces before the text.
    hanging
        Spaces before its continuation, if it is broken; None means `indent`.
    style
        Style of the whole text.

    """
    after = indent if hanging is None else hanging
    text = console.render_str(inert(markup), style=style, highlight=False)
    if text.plain.startswith(COMMAND):
        console.print(text, soft_wrap=True)
        return
    width = max(console.width - max(indent, after), 1)
    text.plain = _PERCENT.sub(_NO_BREAK, text.plain)
    for number, part in enumerate(text.wrap(console, width)):
        part.rstrip()
        part.plain = part.plain.replace(_NO_BREAK, " ")
        console.print(Text(" " * (after if number else indent)).append_text(part))


def marked(mark: str, text: str) -> list[str]:
    """Return the markup of a text's lines, the first one after a mark; see `errors.Lines`."""
    first, *others = inert_parts(text)
    return [f"{mark} {escape(first)}", *map(escape, others)]


_LOG = logging.getLogger("fastcomm")


@contextmanager
def progress(run: "RunTraces") -> "Iterator[Callable[[Source], None] | None]":
    """Show a bar of the bytes read; yield a function that counts one rank as read, or None."""
    if not sys.stderr.isatty() or not _LOG.isEnabledFor(logging.INFO):
        yield None
        return

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("reading {task.fields[done]}/{task.fields[ranks]} ranks"),
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    total = sum(source.size for source in run.sources)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, done=0, ranks=len(run.sources))

        def advance(source: "Source") -> None:
            done = bar.tasks[0].fields["done"] + 1
            bar.update(task, advance=source.size, done=done)

        yield advance


T = TypeVar("T")
_GAP = 2
_FULL_NAME = 44  # minimum width of names before headings are broken
_LEAST_NAME = 24  # minimum width of names before columns are left out
_LEAST_TEXT = 16
_NARROWEST = 8  # of names and sentences, before columns of sentences are left out
_DOTS = "…"
_PARENTHESES = {"<": ">", "(": ")"}


@dataclass(slots=True)
class TerminalTable:
    """A table with names on the left and numbers on the right, which fits its console."""

    headings: tuple[str, ...]
    drop: tuple[str, ...] = ()  # headings of the columns to leave out first
    texts: tuple[str, ...] = ()  # headings of columns of sentences, which break into lines
    rows: list[tuple[str | Text, ...]] = field(default_factory=list)

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; strings may have rich's markup. Missing cells are empty."""
        self.rows.append((*cells, *[""] * (len(self.headings) - len(cells))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the columns that fit, and name those that do not."""
        cells = [[_text(console, cell) for cell in row] for row in self.rows]
        columns = [
            _Column.of(
                place, inert(heading), [row[place] for row in cells], heading in self.texts
            )
            for place, heading in enumerate(self.headings)
        ]
        shown = _fit(columns, self.drop, options.max_width)
        rendered = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for column in shown:
            column.add_to(rendered)
        for row in cells:
            rendered.add_row(*(column.fitted(row[column.place]) for column in shown))
        for line in console.render_lines(rendered, options, pad=False):
            yield from _without_trailing_blanks(line)
            yield Segment.line()
        left_out = [
            column.heading for column in columns if column not in shown and column.heading
        ]
        if left_out:
            note = f"not shown: {', '.join(left_out)} (--wide shows them)"
            yield Text(note, style="dim")


def _without_trailing_blanks(line: Sequence[Segment]) -> list[Segment]:
    """Return the segments of a line without the blanks at its end."""
    segments = list(line)
    while segments and not segments[-1].text.strip():
        segments.pop()
    if segments:
        segments[-1] = Segment(segments[-1].text.rstrip(), segments[-1].style)
    return segments


@dataclass(slots=True)
class _Column:
    """A column of a table whose width is being chosen."""

    place: int
    heading: str
    content: int  # width of its widest entry
    is_text: bool
    width: int = 0

    @classmethod
    def of(cls, place: int, heading: str, cells: Sequence[Text], is_text: bool) -> "_Column":
        """Return the column at `place` (from 0 on the left), as wide as its widest entry."""
        content = max((cell.cell_len for cell in cells), default=0)
        return cls(place, heading, content, is_text, max(content, cell_len(heading)))

    @property
    def least(self) -> int:
        """Minimum width in cells: that of the cells, with the heading broken into lines."""
        return max(self.content, *map(cell_len, _heading_parts(self.heading)), 0)

    @property
    def has_heading(self) -> bool:
        """Whether the chosen width has room for each word of the heading."""
        return self.width >= max(map(cell_len, _heading_parts(self.heading)), default=0)

    @property
    def is_flexible(self) -> bool:
        """Whether its entries can be shortened: names and sentences."""
        return self.is_text or self.place == 0

    def add_to(self, table: RichTable) -> None:
        """Add the column to a table of rich, with the chosen width."""
        is_left = self.is_flexible or not self.heading
        table.add_column(
            Text("\n".join(_broken(self.heading, self.width))),
            style="bold" if self.place == 0 else "",
            header_style="underline" if self.place == 0 else "dim",
            justify="left" if is_left else "right",
            vertical="top",
            width=self.width,
            no_wrap=not self.is_text,
            overflow="fold" if self.is_text else "ellipsis",
        )

    def fitted(self, cell: Text) -> Text:
        """Return the cell; a name that is wider than the column is shortened in the middle."""
        if self.is_text or not self.is_flexible or cell.cell_len <= self.width:
            return cell
        return Text(shortened(cell.plain, self.width))


def _text(console: Console, cell: str | Text) -> Text:
    """Return a cell as rich's text; strings may have markup."""
    return console.render_str(inert(cell), highlight=False) if isinstance(cell, str) else cell


def _fit(columns: Sequence[_Column], drop: Sequence[str], width: int) -> list[_Column]:
    """Choose the columns that fit into `width` cells, and set their widths.

    `drop` has the headings of the columns to leave out first.
    """
    shown = list(columns)
    while True:
        for column in shown:
            column.width = max(column.content, cell_len(column.heading))
        if _shorten(shown, width, _FULL_NAME, _LEAST_TEXT):
            return shown
        for column in shown:
            column.width = column.least
        if _shorten(shown, width, _LEAST_NAME, _LEAST_TEXT):
            return shown
        others = [column for column in shown[1:] if not column.is_text]
        if len(others) <= 1 and all(column.heading for column in others):
            texts = [column for column in shown[1:] if column.is_text]
            fits = _shorten(shown, width, _NARROWEST, _NARROWEST)
            if (fits and all(column.has_heading for column in shown)) or len(texts) <= 1:
                _shorten(shown, width, 1, 1)
                return shown
            others = texts
        shown.remove(_first_to_drop(others, drop))


def _first_to_drop(columns: Sequence[_Column], drop: Sequence[str]) -> _Column:
    """Return the column to leave out: the bar, else the first in `drop`, else the rightmost."""
    by_heading = {column.heading: column for column in columns}
    named = [by_heading[heading] for heading in ("", *drop) if heading in by_heading]
    return named[0] if named else columns[-1]


def _total(columns: Sequence[_Column]) -> int:
    """Return the width of a table of the columns, in cells."""
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _shorten(columns: Sequence[_Column], width: int, name: int, text: int) -> bool:
    """Narrow columns so that a table fits into `width` cells; return whether it does.

    Sentences keep at least `text` cells and names `name` cells.
    """
    for column in sorted(columns, key=lambda item: not item.is_text):
        if column.is_flexible and _total(columns) > width:
            least = min(column.width, text if column.is_text else name)
            column.width = max(least, column.width - (_total(columns) - width))
    return _total(columns) <= width


def _heading_parts(heading: str) -> list[str]:
    """Split a heading where a line may end: "payload/step/GPU" after each slash."""
    return re.findall(r"\S+?/|\S+", heading)


def _broken(heading: str, width: int) -> list[str]:
    """Break a heading into lines of at most `width` cells."""
    lines: list[str] = []
    for word in _heading_parts(heading):
        line = f"{lines[-1]}{'' if lines[-1].endswith('/') else ' '}{word}" if lines else word
        if lines and cell_len(line) <= width:
            lines[-1] = line
        else:
            lines.append(word)
    return lines


def table(
    first: str, *others: str, drop: Sequence[str] = (), texts: Sequence[str] = ()
) -> TerminalTable:
    """Return an empty table.

    Parameters
    ----------
    first
        Heading of the names on the left.
    *others
        Headings of the other columns; one without a heading is a bar.
    drop
        Headings of the columns to leave out first where the width does not suffice; the
        rightmost follow.
    texts
        Headings of columns of sentences.

    """
    return TerminalTable((first, *others), tuple(drop), tuple(texts))


def shown(table: ResultTable) -> TerminalTable:
    """Return a table of a result for the terminal."""
    own = table.on("terminal")
    dropped = sorted((c for c in own.columns if c.drop), key=lambda column: column.drop)
    shown_ = TerminalTable(
        tuple(column.label for column in own.columns),
        tuple(column.label for column in dropped),
        tuple(column.label for column in own.columns if column.is_sentence),
    )
    for row in own.rows:
        shown_.add_row(*(escape(column.text(row)) for column in own.columns))
    return shown_


def shortened(name: str, width: int) -> str:
    """Shorten a name in the middle to at most `width` cells: "void cut…_kernel<…>".

    Arguments of a function go first, then those of a template, then the middle of the name.
    """
    if cell_len(name) <= width:
        return name
    name = _without_last(name, "(")
    if cell_len(name) <= width:
        return name
    start, stop = name.find("<"), name.rfind(">")
    inside = width - cell_len(name[: start + 1] + name[stop:])
    if 0 < start < stop and inside >= 1:
        return name[: start + 1] + _middle(name[start + 1 : stop].strip(), inside) + name[stop:]
    if 0 < start < stop:
        name = f"{name[: start + 1]}{_DOTS}{name[stop:]}"
    return _middle(name, width)


def _without_last(name: str, opening: str) -> str:
    """Replace the content of the last outer pair of parentheses by dots.

    `opening` is the opening one of the pair: ( or <.
    """
    closing = _PARENTHESES[opening]
    if not name.endswith(closing):
        return name
    depth = 0
    for place in range(len(name) - 1, 0, -1):
        depth += (name[place] == closing) - (name[place] == opening)
        if depth == 0:
            return f"{name[: place + 1]}{_DOTS}{closing}"
    return name


def _middle(name: str, width: int) -> str:
    """Shorten a name in the middle to `width` cells."""
    if cell_len(name) <= width:
        return name
    head, tail = "", ""
    letters = list(name)
    while letters:
        from_head = cell_len(head) <= cell_len(tail)
        letter = letters.pop(0 if from_head else -1)
        if cell_len(head + tail + letter) + 1 > width:
            break
        head, tail = (head + letter, tail) if from_head else (head, letter + tail)
    return f"{head}{_DOTS}{tail}"


def percent(value: float | None) -> str:
    """Format a share in percent: "13.4 %"; "n/a" for None."""
    return na(value, units.percent)


def na(value: T | None, form: Callable[[T], str]) -> str:
    """Format a value with `form`; "n/a" for None."""
    return NA if value is None else form(value)
