"""What commands print: messages on stderr, and standard output that is whole or an error.

Python's own stream loses what a short write leaves over (`PYTHONUNBUFFERED`), and libraries
turn a closed pipe into exit codes of their own. So a command writes to a stream that keeps the
first error, and whether there was one is looked at once, at the end.
"""

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EPIPE
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import Any

import click

from fastcomm.checks import option_name
from fastcomm.errors import Lines, inert, inert_lines
from fastcomm.units import parse_quantity

_LOG = logging.getLogger("fastcomm")
_LEAST_WIDTH = 40


class _Stderr(logging.Handler):
    """Prints to what stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        text, arguments = self.format(record), record.args or ()
        is_own = bool(record.exc_info) or any(isinstance(item, Lines) for item in arguments)
        click.echo(fitted(inert_lines(Lines(text) if is_own else text)), err=True)


class _Timed(logging.Formatter):
    """Timings begin with the seconds since the program's start."""

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno > logging.DEBUG:
            return record.getMessage()
        return f"{record.relativeCreated / 1000:7.2f} s  {super().format(record)}"

    def formatException(self, ei: Any) -> str:  # noqa: N802 - a method of logging
        """Return a traceback with a bar before each line, as messages in it may have lines."""
        return "\n".join(f"| {inert(line)}" for line in super().formatException(ei).split("\n"))


def fitted(text: str, first: int = 0) -> str:
    """Break the lines of a text at words to fit stderr, if that is a terminal.

    `first` is the number of columns before the text on its first line. Lines that begin with
    four spaces are commands to copy, and stay as they are.
    """
    if not sys.stderr.isatty():
        return text
    # Of stderr: stdout may be a file.
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        width = get_terminal_size().columns
    indents = [" " * first, *[""] * text.count("\n")]
    return "\n".join(
        line if line.startswith("    ") else _broken(line, max(width, _LEAST_WIDTH), before)
        for line, before in zip(text.split("\n"), indents, strict=True)
    )


def _broken(line: str, width: int, before: str) -> str:
    """Break a line to fit `width` columns; `before` has as many spaces as precede it."""
    form = TextWrapper(
        width=width,
        initial_indent=before,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return form.fill(line)[len(before) :]


def talk(level: int) -> None:
    """Print messages of this level of `logging` or above to stderr from now on."""
    if not any(isinstance(handler, _Stderr) for handler in _LOG.handlers):
        handler = _Stderr()
        handler.setFormatter(_Timed())
        _LOG.addHandler(handler)
    _LOG.setLevel(level)


def say(*lines: str) -> None:
    """Log each line as a note, which --quiet suppresses."""
    for line in lines:
        _LOG.info("%s", line)


def warn(warnings: Iterable[str]) -> None:
    """Log each warning, which --quiet suppresses."""
    for warning in warnings:
        _LOG.warning("warning: %s", warning)


_DECIMAL = re.compile(r"([0-9.]+)\s*([kKmMgGtT])(?:[bB]|bytes)?")


def decimal_units(options: object, names: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each decimal unit: "8k" tokens are 8000, and 8Ki is usual.

    `names` are the fields of the options that count tokens.
    """
    for name in names:
        for part in map(str.strip, str(getattr(options, name)).split(",")):
            if not (match := _DECIMAL.fullmatch(part)):
                continue
            binary = f"{match[1]}{match[2].upper()}i"
            tokens = parse_quantity(part, name.replace("_", " "))
            yield (
                f"{option_name(name)} {part} is {tokens} tokens; {binary} is "
                f"{float(match[1]) * parse_quantity(f'1{match[2]}i', name):.0f}"
            )


_CLOSED = -1  # no file descriptor: writing to it fails


class OutputError(OSError):
    """Standard output does not take what is written to it."""


class _Descriptor(io.RawIOBase):
    """A file descriptor that keeps the first error of writing, and drops what follows it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: OutputError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: "bytes | memoryview", /) -> int:  # type: ignore[override]
        """Write data and return the number of bytes; after an error, drop the data."""
        if self.error is not None:
            return len(data)
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            self.error = OutputError(error.errno, error.strerror)
            raise self.error from error


@contextmanager
def exit_on_output_errors() -> Iterator[None]:
    """Write all that is printed to standard output, or end the program.

    A closed pipe, as behind `head`, ends it silently with the exit code of SIGPIPE (141), any
    other error with one line and exit code 1. A stream that somebody put in the place of
    standard output is left alone.
    """
    outer = sys.stdout
    if outer is not sys.__stdout__:
        yield
        return
    raw = _Descriptor(_CLOSED if outer is None else outer.fileno())
    stream = _stream(raw, outer)
    sys.stdout = stream
    try:
        yield
    finally:
        with suppress(OutputError):
            stream.flush()
        sys.stdout = outer
        if raw.error is not None:
            _end(raw.error)


def _stream(raw: _Descriptor, like: io.TextIOBase | None) -> io.TextIOWrapper:
    """Return a text stream that writes to `raw`, with the encoding of `like` (None: UTF-8)."""
    encoding, errors = (like.encoding, like.errors) if like else ("utf-8", "strict")
    buffer = io.BufferedWriter(raw)  # type: ignore[type-var]
    return io.TextIOWrapper(
        buffer, encoding=encoding, errors=errors, line_buffering=raw.isatty()
    )


def _end(error: OutputError) -> None:
    """End the program: with code 141 after a closed pipe, otherwise with a message and 1."""
    if error.errno == EPIPE:
        sys.exit(128 + signal.SIGPIPE)
    click.echo(f"Error: output: {error.strerror}", err=True)
    sys.exit(1)
