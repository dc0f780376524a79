"""Parts of the pages that the program writes: commands, options, and output of commands.

In a page, a block of the language `console` is a session: lines that begin with "$ " are
commands, the rest is what they print. They run in a folder of their own, where `demo/` holds
the traces of `fastcomm demo demo`. A block of the language `sql` is a query that DuckDB runs in
that folder, after the page's sessions; the block `text` behind it is the answer. Blocks of the
language `pycon` are one session of Python in that folder, after both. Run this file to write
everything anew, or with the names of pages to write those alone.
"""

import doctest
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click

from fastcomm.cli import main
from fastcomm.cli.commands import HELP_ALL, group_title, meaning

DOCS = Path(__file__).parent
PAGES = (
    DOCS.parent / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("metrics/*.md")),
)
CLI_PAGE = DOCS / "cli.md"
OPTIONS_PAGE = DOCS / "options.md"

_SESSION = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_QUERY = re.compile(r"(^```sql\n(.*?)^```\n+```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"(?<=^```pycon\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
_WIDTH = 90
# What a command says once, when it compiles.
_FIRST_RUN = "fastcomm: compiling its kernels"
# Commands that many pages begin with: they run once in a folder, and print the same each time.
_ONCE = re.compile(r"fastcomm metrics demo(?: --link-bandwidth 400Gbit/s)?(?= [|]|$)")
_CLI_HEAD = """\
# Command line

What each command prints with `--help-all`; `--help` shows the common options. Results go to
stdout, messages to stderr.
"""
_OPTIONS_HEAD = """\
# Options

An option has the same meaning in every command that has it. `fastcomm COMMAND --help` shows the
common options of a command, `--help-all` all of them. Choices and defaults are on [the page of
commands](cli.md).
"""


def cli_page() -> str:
    """Return the page of all commands: what each prints with `--help-all`."""
    parent = click.Context(
        main, info_name="fastcomm", terminal_width=_WIDTH, **main.context_settings
    )
    sections = [_CLI_HEAD, _help(parent)]
    for name in main.list_commands(parent):
        if (command := main.get_command(parent, name)) is not None:
            context = command.context_class(command, info_name=name, parent=parent)
            sections += [f"## `fastcomm {name}`\n", _help(context)]
            for inner, each in getattr(command, "commands", {}).items():
                below = each.context_class(each, info_name=inner, parent=context)
                sections += [f"### `fastcomm {name} {inner}`\n", _help(below)]
    return "\n".join(sections)


def commands() -> dict[str, click.Command]:
    """Return every command and subcommand that does something, by its words."""
    found = {}
    context = click.Context(main)
    for name in main.list_commands(context):
        if (command := main.get_command(context, name)) is not None:
            inner = command.commands if isinstance(command, click.Group) else {"": command}
            found |= {f"{name} {below}".strip(): each for below, each in inner.items()}
    return found


def options_page() -> str:
    """Return the page of all options: by group, with meaning and commands."""
    known = commands()
    users: dict[tuple[str, str, str], list[str]] = {}
    for name, command in known.items():
        for each in command.params:
            if isinstance(each, click.Option):
                key = group_title(each), max(each.opts, key=len), meaning(each)
                users.setdefault(key, []).append(name)
    sections = [_OPTIONS_HEAD]
    for title in sorted({title for title, _, _ in users}):
        rows = [
            f"| `{option}` | {text} | {_named(names, known)} |"
            for (group, option, text), names in sorted(users.items())
            if group == title
        ]
        head = "| option | meaning | commands |\n| --- | --- | --- |\n"
        sections.append(f"## {title}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(sections)


def _named(names: Sequence[str], known: Mapping[str, click.Command]) -> str:
    if len(names) == len(known):
        return "all"
    return ", ".join(f"`{name}`" for name in names)


def _help(context: click.Context) -> str:
    context.meta[HELP_ALL] = True
    return f"```text\n{context.get_help()}\n```\n"


def has_sessions(text: str) -> bool:
    """Whether a page shows what a command or a line of Python prints."""
    return any(kind.search(text) for kind in (_SESSION, _PYTHON))


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder with the traces of the demo, in which sessions run."""
    with tempfile.TemporaryDirectory() as folder:
        _output("fastcomm demo demo", Path(folder))
        yield Path(folder)


def current(text: str, folder: Path) -> str:
    """The page with what it says today: commands first, then queries, then Python."""
    return ran(answered(replayed(text, folder), folder), folder)


def replayed(text: str, folder: Path) -> str:
    """The page with what its commands print today."""

    def session(block: re.Match[str]) -> str:
        commands = [line[2:] for line in block[0].splitlines() if line.startswith("$ ")]
        return "".join(f"$ {command}\n{_output(command, folder)}" for command in commands)

    return _SESSION.sub(session, text)


def answered(text: str, folder: Path) -> str:
    """The page with what its queries answer today."""

    def answer(block: re.Match[str]) -> str:
        return block[1] + _answer(block[2], folder)

    return _QUERY.sub(answer, text)


def ran(text: str, folder: Path) -> str:
    """The page with what its lines of Python print today."""
    names: dict[str, Any] = {}
    parser = doctest.DocTestParser()

    def session(block: re.Match[str]) -> str:
        return "".join(_said(each, names) for each in parser.get_examples(block[0]))

    with chdir(folder):
        return _PYTHON.sub(session, text)


def _said(example: doctest.Example, names: dict[str, Any]) -> str:
    """One statement and what it prints; of an error that is expected, what the page has."""
    first, *more = example.source.splitlines()
    lines = [f">>> {first}", *(f"... {line}" for line in more)]
    with redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(example.source, "<page>", "single"), names)
        except Exception as error:
            if example.exc_msg is None or str(error) not in example.exc_msg:
                raise
            printed.write(example.want)
    said = [line.rstrip() for line in printed.getvalue().rstrip().splitlines()]
    return "".join(f"{line}\n" for line in [*lines, *said])


def _answer(query: str, folder: Path) -> str:
    """The rows that a query gives, in columns."""
    import duckdb  # no other page needs it

    with duckdb.connect() as connection, chdir(folder):
        found = connection.execute(query)
        names = [column[0] for column in found.description or ()]
        rows = [names, *([str(value) for value in row] for row in found.fetchall())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _output(command: str, folder: Path) -> str:
    """What a shell shows, stdout and stderr together, from the second run on."""
    if often := _ONCE.match(command):
        kept = folder / f".{hashlib.sha256(often[0].encode()).hexdigest()[:8]}.kept"
        if not kept.exists():
            kept.write_text(_run(often[0], folder), "utf-8")
        command = f"cat {kept.name}{command[often.end() :]}"
    return _run(command, folder)


def _run(command: str, folder: Path) -> str:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": programs, "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        check=False,
    )
    lines = (line.rstrip() for line in done.stdout.splitlines())
    return "".join(f"{line}\n" for line in lines if not line.startswith(_FIRST_RUN))


def refresh(pages: Sequence[Path] = PAGES) -> None:
    """Write pages anew."""
    CLI_PAGE.write_text(cli_page(), "utf-8")
    OPTIONS_PAGE.write_text(options_page(), "utf-8")
    with workplace() as folder:
        for page in pages:
            text = page.read_text("utf-8")
            if has_sessions(text):
                page.write_text(current(text, folder), "utf-8")


if __name__ == "__main__":
    refresh([Path(word) for word in sys.argv[1:]] or PAGES)
