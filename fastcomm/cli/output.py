"""Standard output that is written whole, or is an error.

Python's own stream loses what a short write leaves over (`PYTHONUNBUFFERED`), and libraries
turn a closed pipe into exit codes of their own. So a command writes to a stream that keeps the
first error, and whether there was one is looked at once, at the end.
"""

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EPIPE

import click

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
        if self.error is not None:
            return len(data)
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            self.error = OutputError(error.errno, error.strerror)
            raise self.error from error


@contextmanager
def whole_output() -> Iterator[None]:
    """Write all that is printed to standard output, or end the program.

    A closed pipe, as behind `head`, ends it silently with the exit code of SIGPIPE (141), any
    other error with one line and exit code 1. A stream that somebody put in the place of
    standard output is left alone.
    """
    theirs = sys.stdout
    if theirs is not sys.__stdout__:
        yield
        return
    raw = _Descriptor(_CLOSED if theirs is None else theirs.fileno())
    ours = _stream(raw, theirs)
    sys.stdout = ours
    try:
        yield
    finally:
        with suppress(OutputError):
            ours.flush()
        sys.stdout = theirs
        if raw.error is not None:
            _end(raw.error)


def _stream(raw: _Descriptor, like: io.TextIOBase | None) -> io.TextIOWrapper:
    encoding, errors = (like.encoding, like.errors) if like else ("utf-8", "strict")
    buffer = io.BufferedWriter(raw)  # type: ignore[type-var]
    return io.TextIOWrapper(
        buffer, encoding=encoding, errors=errors, line_buffering=raw.isatty()
    )


def _end(error: OutputError) -> None:
    if error.errno == EPIPE:
        sys.exit(128 + signal.SIGPIPE)
    click.echo(f"Error: output: {error.strerror}", err=True)
    sys.exit(1)
