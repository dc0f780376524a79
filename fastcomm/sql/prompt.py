"""The prompt of `fastcomm sql`: statements over several lines, and commands with a dot."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from fastcomm.errors import ConfigError, FastcommError, inert_lines
from fastcomm.sql import tables
from fastcomm.sql.views import BY_NAME

_PROMPTS = ("sql> ", "...> ")
_MOST_LINES = 1000  # of the history
HELP = """\
.tables         the views of the run
.schema VIEW    its columns, with types and units; without VIEW those of all
.quit           end, as Ctrl-D does
A statement ends with ; and may have several lines. Ctrl-C ends a query."""


def dot_command(text: str) -> bool:
    """Carry out a command such as `.tables`; return False for `.quit`.

    Raises `ConfigError` for an unknown command or view.
    """
    name, *arguments = text.split()
    if name in (".quit", ".exit"):
        return False
    if name == ".help":
        click.echo(HELP)
    elif name == ".tables":
        tables.show_views()
    elif name == ".schema":
        if unknown := [view for view in arguments if view not in BY_NAME]:
            raise ConfigError(f"sql: no view {unknown[0]!r}; views: {', '.join(BY_NAME)}")
        for view in arguments or BY_NAME:
            tables.show_schema(BY_NAME[view])
    else:
        raise ConfigError(f"sql: no command {name!r}; .help lists them")
    return True


def parts(lines: Iterator[str]) -> Iterator[str]:
    """Yield the commands and the statements of lines; a statement ends with a semicolon."""
    pending: list[str] = []
    for line in lines:
        if not pending and line.lstrip().startswith("."):
            yield line.strip()
            continue
        if pending or line.strip():
            pending.append(line)
        if line.rstrip().endswith(";"):
            yield "\n".join(pending)
            pending = []
    if pending:
        yield "\n".join(pending)


def converse(answer: Callable[[str], None]) -> None:
    """Answer what is typed until `.quit` or the end of the input; errors do not end it.

    Parameters
    ----------
    answer
        Answers the statements of a text.

    """
    click.echo("SQL over the run; .tables lists the views, .help more.", err=True)
    with _history():
        pending: list[str] = []
        while True:
            try:
                line = input(_PROMPTS[bool(pending)])
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo()
                pending = []
                continue
            pending.append(line)
            if not _is_whole(pending):
                continue
            text, pending = "\n".join(pending), []
            if not _answered(text, answer):
                return


def _is_whole(lines: list[str]) -> bool:
    """Whether lines are a command, a whole statement, or nothing."""
    text = "\n".join(lines).strip()
    return not text or text.startswith(".") or text.endswith(";")


def _answered(text: str, answer: Callable[[str], None]) -> bool:
    """Answer a command or statements, and print an error; return False for `.quit`."""
    try:
        if text.lstrip().startswith("."):
            return dot_command(text)
        answer(text)
    except FastcommError as error:
        click.echo(f"Error: {inert_lines(str(error))}", err=True)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
    return True


def history_file() -> Path | None:
    """Return the file of the history, outside of the working directory; None without a home."""
    folder = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".local" / "state"
        except RuntimeError:
            return None
    file = folder / "fastcomm" / "sql_history"
    try:
        is_inside = file.resolve().is_relative_to(Path.cwd()) and Path.cwd() != Path.home()
    except OSError:
        return None
    return file if file.is_absolute() and not is_inside else None


@contextmanager
def _history() -> Iterator[None]:
    """Let the user edit lines, with those of earlier sessions; keep the lines of this one."""
    try:
        import readline
    except ImportError:  # Python without it
        yield
        return
    file = history_file()
    if file is None or not sys.stdin.isatty():
        yield
        return
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_MOST_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(file)
            file.chmod(0o600)
