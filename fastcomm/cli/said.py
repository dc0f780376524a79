"""What a command says beside its result: on stderr, with names that do nothing.

All of it goes through the logger `fastcomm`, so that --quiet and --verbose hold for every
floor: notes are INFO, what a user should know before trusting a result WARNING, timings DEBUG.
"""

import logging
from collections.abc import Iterable

import click

from fastcomm.inert import inert_lines

_LOG = logging.getLogger("fastcomm")


class _Stderr(logging.Handler):
    """Prints to what stderr is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(inert_lines(self.format(record)), err=True)


class _Timed(logging.Formatter):
    """Timings begin with the seconds since the program's start."""

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno > logging.DEBUG:
            return record.getMessage()
        return f"{record.relativeCreated / 1000:7.2f} s  {super().format(record)}"


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
