"""Generate the pages of commands and options, and update the outputs shown on all pages.

Three kinds of code blocks have outputs. All blocks of a page run in one temporary directory,
in which `demo/` contains the traces of `fastcomm demo demo`, and `dumps/` those of a job that
hangs, in this order:

- `console`: lines that begin with "$ " are commands, the other lines are their output.
- `sql`: a query for DuckDB; the following `text` block is its result.
- `pycon`: a Python session; all blocks of a page share their variables.

The page of agents repeats the method of `fastcomm skill` between two marks.

Run this file to update all pages, or with paths of pages to update only these. It imports a
builder of `tests`, which has to be on the path.
"""

import doctest
import hashlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click
from builders.hang_files import write_example
from click.testing import CliRunner

from fastcomm.agents.guide import method
from fastcomm.cli.commands import HELP_ALL, group_title, meaning
from fastcomm.cli.main import main

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
_METHOD = re.compile(r"(?<=<!-- the method -->\n).*?(?=<!-- end -->)", re.DOTALL)
_WIDTH = 90
# A message that a command prints only when it compiles the kernels.
_COMPILING = "fastcomm: compiling its kernels"
# A command of fastcomm up to what is the shell's: a pipe, a file, the next command.
_OURS = re.compile(r"fastcomm (?:'[^']*'|\"[^\"]*\"|(?! 2>)[^'\"|;>])*")
_CLI_HEAD = """\
# Command line

What each command prints with `--help-all`; `--help` shows the common options. Results go to
stdout, messages to stderr.
"""
_OPTIONS_HEAD = """\
# Options

An option has the same meaning in every command that has it. `fastcomm COMMAND --help` shows the
common options of a command, `--help-all` all of them. Choices and defaults are on [the page of
commands](cli.md); defaults that differ by command are here, too. `--global-batch` counts tokens
for `isp`, and sequences for `plan`.
"""


def cli_page() -> str:
    """Return the page of all commands, with the help of each."""
    parent = click.Context(
        main, info_name="fastcomm", terminal_width=_WIDTH, **main.context_settings
    )
    sections = [_CLI_HEAD, _help(parent)]
    for name in main.list_commands(parent):
        if (command := main.get_command(parent, name)) is not None:
            context = command.context_class(command, info_name=name, parent=parent)
            sections += [f"## `fastcomm {name}`\n", _help(context)]
            for child_name, child in getattr(command, "commands", {}).items():
                inner = child.context_class(child, info_name=child_name, parent=context)
                sections += [f"### `fastcomm {name} {child_name}`\n", _help(inner)]
    return "\n".join(sections)


def commands() -> dict[str, click.Command]:
    """Return commands and subcommands by name, such as "plan" or "plan price"."""
    by_name = {}
    context = click.Context(main)
    for name in main.list_commands(context):
        if (command := main.get_command(context, name)) is not None:
            inner = getattr(command, "commands", {})
            inner = inner if isinstance(command, click.Group) else {"": command, **inner}
            by_name |= {f"{name} {child}".strip(): inner[child] for child in inner}
    return by_name


def options_page() -> str:
    """Return the page of all options by group, with the commands that have each."""
    all_commands = commands()
    users: dict[tuple[str, str, str], list[str]] = {}
    defaults: dict[str, dict[str, list[str]]] = {}
    for name, command in all_commands.items():
        for option in command.params:
            if isinstance(option, click.Option):
                key = group_title(option), max(option.opts, key=len), meaning(option)
                users.setdefault(key, []).append(name)
                defaults.setdefault(key[1], {}).setdefault(_default(option), []).append(name)
    sections = [_OPTIONS_HEAD]
    for title in sorted({title for title, _, _ in users}):
        rows = [
            f"| `{flag}` | {_cell(text)}{_cell(_defaults(defaults[flag]))} | "
            f"{_list(names, all_commands)} |"
            for (group, flag, text), names in sorted(users.items())
            if group == title
        ]
        head = "| option | meaning | commands |\n| --- | --- | --- |\n"
        sections.append(f"## {title}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(sections)


def _default(option: click.Option) -> str:
    """Return the default of an option: as its help says, or its value; "none" without one."""
    if stated := re.search(r"Default: (.+?)\.(?: |$)", option.help or ""):
        return stated[1]
    is_value = not option.is_flag and isinstance(option.default, str | int | float)
    return str(option.default) if is_value else "none"


def _defaults(commands_by_default: Mapping[str, list[str]]) -> str:
    """Return the defaults of an option that differ by command, with the commands of each."""
    if len(commands_by_default) == 1:
        return ""
    stated = {text: own for text, own in commands_by_default.items() if text != "none"}
    texts = (f"{text} ({', '.join(own)})" for text, own in stated.items())
    return f". Default: {'; '.join(texts)}"


def _cell(text: str) -> str:
    """Return a text for a cell of a table: a part in brackets is no tag of HTML."""
    return text.replace("<", "&lt;").replace("|", "\\|")


def _list(names: Sequence[str], all_commands: Mapping[str, click.Command]) -> str:
    """Return names of commands for a cell of a table."""
    if len(names) == len(all_commands):
        return "all"
    return ", ".join(f"`{name}`" for name in names)


def _help(context: click.Context) -> str:
    """Return a text block with the output of `--help-all`."""
    context.meta[HELP_ALL] = True
    return f"```text\n{context.get_help()}\n```\n"


def has_sessions(text: str) -> bool:
    """Return whether a page shows outputs of commands or of Python."""
    return any(kind.search(text) for kind in (_SESSION, _PYTHON))


@contextmanager
def demo_folder() -> Iterator[Path]:
    """Create a temporary directory with the demo and a hung job, to run sessions in."""
    with tempfile.TemporaryDirectory() as folder:
        write_example(Path(folder) / "dumps")
        _output("fastcomm demo demo", Path(folder))
        yield Path(folder)


def update(text: str, folder: Path) -> str:
    """Return a page with current outputs of its commands, queries and Python sessions."""
    text = _METHOD.sub(lambda _: method(), text)
    return update_python(_update_queries(_update_commands(text, folder), folder), folder)


def _update_commands(text: str, folder: Path) -> str:
    """Return a page with current outputs of its commands."""

    def session(block: re.Match[str]) -> str:
        commands = [line[2:] for line in block[0].splitlines() if line.startswith("$ ")]
        return "".join(f"$ {command}\n{_output(command, folder)}" for command in commands)

    return _SESSION.sub(session, text)


def _update_queries(text: str, folder: Path) -> str:
    """Return a page with current results of its SQL queries."""
    return _QUERY.sub(lambda block: block[1] + _query_result(block[2], folder), text)


def update_python(text: str, folder: Path) -> str:
    """Return a page with current outputs of its Python sessions."""
    variables: dict[str, Any] = {}
    parser = doctest.DocTestParser()

    def session(block: re.Match[str]) -> str:
        return "".join(
            _statement_and_output(example, variables)
            for example in parser.get_examples(block[0])
        )

    with chdir(folder):
        return _PYTHON.sub(session, text)


def _statement_and_output(example: doctest.Example, variables: dict[str, Any]) -> str:
    """Run a statement and return it with its output, or with the expected traceback."""
    first, *more = example.source.splitlines()
    lines = [f">>> {first}", *(f"... {line}" for line in more)]
    with redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(example.source, "<page>", "single"), variables)
        except Exception as error:
            if example.exc_msg is None or str(error) not in example.exc_msg:
                raise
            printed.write(example.want)
    output = [line.rstrip() for line in printed.getvalue().rstrip().splitlines()]
    return "".join(f"{line}\n" for line in [*lines, *output])


def _query_result(query: str, folder: Path) -> str:
    """Return the result of an SQL query as aligned columns of text."""
    import duckdb  # only for pages with queries

    with duckdb.connect() as connection, chdir(folder):
        result = connection.execute(query)
        names = [column[0] for column in result.description or ()]
        rows = [names, *([str(value) for value in row] for row in result.fetchall())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _output(command: str, folder: Path) -> str:
    """Return stdout and stderr of a shell command, without messages of a first run.

    What is ours runs in this process, before the shell, which gets its texts and exit code.
    """

    def texts_of(ours: re.Match[str]) -> str:
        name = _written(ours[0], folder)
        return f"{{ cat {name}.stderr >&2; cat {name}.stdout; (exit $(cat {name}.code)); }} "

    return _run(_OURS.sub(texts_of, command), folder)


def _written(command: str, folder: Path) -> str:
    """Return the name of the files with a command's texts and code; it runs once a folder."""
    name = f".{hashlib.sha256(command.strip().encode()).hexdigest()[:8]}"
    if not (folder / f"{name}.code").exists():
        with chdir(folder):
            result = CliRunner().invoke(main, shlex.split(command)[1:])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        for kind, text in (
            ("stdout", result.stdout),
            ("stderr", result.stderr),
            ("code", str(result.exit_code)),
        ):
            (folder / f"{name}.{kind}").write_text(text, "utf-8")
    return name


def _run(command: str, folder: Path) -> str:
    """Run a shell command in a directory and return its output."""
    completed = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        check=False,
    )
    lines = (line.rstrip() for line in completed.stdout.splitlines())
    return "".join(f"{line}\n" for line in lines if not line.startswith(_COMPILING))


def update_files(pages: Sequence[Path] = PAGES) -> None:
    """Write the generated pages, and update the outputs on the given pages."""
    CLI_PAGE.write_text(cli_page(), "utf-8")
    OPTIONS_PAGE.write_text(options_page(), "utf-8")
    with demo_folder() as folder:
        for page in pages:
            text = page.read_text("utf-8")
            if has_sessions(text):
                page.write_text(update(text, folder), "utf-8")


if __name__ == "__main__":
    update_files([Path(name) for name in sys.argv[1:]] or PAGES)
