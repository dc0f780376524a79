"""The console that reports are printed to, wrapped text, and progress on stderr."""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.text import Text

from fastcomm.inert import inert
from fastcomm.trace.run import RunTraces, Source

# Print every column, however wide the lines get (`--wide`).
WIDE: ContextVar[bool] = ContextVar("WIDE", default=False)

_PERCENT = re.compile(r"(?<=\d) (?=%)")
_NO_BREAK = "\ue000"  # of private use: for rich all of Unicode's spaces end a word
_PIPE_WIDTH = 110
_LEAST_WIDTH = 40
_WIDE_WIDTH = 10_000
COMMAND = "    "  # a line that begins so is a command to copy, and stays one line


class _InertConsole(Console):
    """A console on which control characters in names of a trace have no effect."""

    def render_str(self, text: str, **style: Any) -> Text:
        """Render markup like rich, with control characters and escape sequences spelled out."""
        return super().render_str(inert(text), **style)


def plain_console(console: Console | None = None) -> Console:
    """Return the console to print to; without colors where it is no terminal.

    Its width is that of the terminal, or of the environment's COLUMNS.
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
    """Print a text of one or more lines, broken at words to fit the console.

    Parameters
    ----------
    console
        The console to print to.
    markup
        The text, with rich's markup. A line that begins with four spaces is a command to
        copy: it is printed as it is.
    indent
        Spaces before the first line of each.
    hanging
        Spaces before the lines that continue one; `indent` where it is None.
    style
        Style of the whole text.

    """
    after = indent if hanging is None else hanging
    for line in markup.split("\n"):
        text = console.render_str(line, style=style, highlight=False)
        if text.plain.startswith(COMMAND):
            console.print(text, soft_wrap=True)
            continue
        width = max(console.width - max(indent, after), 1)
        text.plain = _PERCENT.sub(_NO_BREAK, text.plain)
        for number, part in enumerate(text.wrap(console, width)):
            part.rstrip()
            part.plain = part.plain.replace(_NO_BREAK, " ")
            console.print(Text(" " * (after if number else indent)).append_text(part))


_LOG = logging.getLogger("fastcomm")


@contextmanager
def progress(run: RunTraces) -> Iterator[Callable[[Source], None] | None]:
    """A bar of the bytes read; it gives the function that counts one rank done."""
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

        def advance(source: Source) -> None:
            done = bar.tasks[0].fields["done"] + 1
            bar.update(task, advance=source.size, done=done)

        yield advance
