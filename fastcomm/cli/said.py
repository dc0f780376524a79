"""What a command says beside its result: on stderr, with names that do nothing.

All of it goes through the logger `fastcomm`, so that --quiet and --verbose hold for every
floor: notes are INFO, what a user should know before trusting a result WARNING, timings DEBUG.
"""

import logging
import os
import sys
from collections.abc import Iterable
from shutil import get_terminal_size
from textwrap import TextWrapper

import click

from fastcomm.inert import inert_lines

_LOG = logging.getLogger("fastcomm")
_LEAST_WIDTH = 40


class _Stderr(logging.Handler):
    """Prints to what stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(fitted(inert_lines(self.format(record))), err=True)


class _Timed(logging.Formatter):
    """Timings begin with the seconds since the program's start."""

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno > logging.DEBUG:
            return record.getMessage()
        return f"{record.relativeCreated / 1000:7.2f} s  {super().format(record)}"


def fitted(text: str, first: int = 0) -> str:
    """Break the lines of a text at words to fit stderr, if that is a terminal.

    `first` is how many columns of the first line are taken. Lines that begin with four spaces
    are commands to copy, and stay as they are.
    """
    if not sys.stderr.isatty():
        return text
    # Of stderr: stdout may be a file.
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        width = get_terminal_size().columns
    taken = [" " * first, *[""] * text.count("\n")]
    return "\n".join(
        line if line.startswith("    ") else _broken(line, max(width, _LEAST_WIDTH), before)
        for line, before in zip(text.split("\n"), taken, strict=True)
    )


def _broken(line: str, width: int, before: str) -> str:
    """Break one line at words, behind columns that are taken."""
    form = TextWrapper(
        width=width,
        initial_indent=before,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return form.fill(line)[len(before) :]


def talk(level: int) -> None:
    """From here on, say what is of this level or above."""
    if not any(isinstance(each, _Stderr) for each in _LOG.handlers):
        handler = _Stderr()
        handler.setFormatter(_Timed())
        _LOG.addHandler(handler)
    _LOG.setLevel(level)


def say(*lines: str) -> None:
    """Print notes."""
    for line in lines:
        _LOG.info("%s", line)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings."""
    for warning in warnings:
        _LOG.warning("warning: %s", warning)
