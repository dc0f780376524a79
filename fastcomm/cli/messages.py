"""Messages of commands on stderr, and suggestions for mistyped commands."""

import logging
import os
import shlex
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
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


class SuggestingGroup(click.Group):
    """A group that names the command that was probably meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the arguments; a usage error names the nearest one."""
        name = args[0]
        is_option = name.startswith("-") or ctx.resilient_parsing
        if not is_option and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}.{self._suggestion(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: click.Context, name: str) -> str:
        known = self.list_commands(ctx)
        near = [each for each in known if each.startswith(name.lower())]
        near = near or get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        if near:
            return f" Did you mean {near[0]!r}?"
        if "metrics" in known and Path(name).exists():
            return f" To measure {name}: {ctx.command_path} metrics {shlex.quote(name)}"
        return ""
