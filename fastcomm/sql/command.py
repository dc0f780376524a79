"""``fastcomm sql``."""

import sys
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, TextIO

import click

from fastcomm.cli.commands import OptionsCommand, options_of
from fastcomm.cli.messages import say, warn
from fastcomm.cli.results import (
    PrintedRows,
    ResultFiles,
    exit_if_skipped,
    print_json,
    result_options,
    rows_options,
    say_skipped,
)
from fastcomm.cli.run_options import (
    ExecutionOptions,
    builds,
    opened_run,
    run_options,
    with_options,
)
from fastcomm.errors import ConfigError
from fastcomm.options import ReadOptions
from fastcomm.sql.options import SqlOptions

if TYPE_CHECKING:
    from fastcomm.sql.database import RunDatabase
    from fastcomm.sql.result import QueryResult

_EXAMPLES = """\b
Examples:
  fastcomm sql traces/ "select rank, wait_caused_ns from ranks order by 2 desc"
  fastcomm sql store/ "from events where rank = 3" --format csv > rank3.csv
  fastcomm sql traces/ .tables
  fastcomm sql traces/ < questions.sql
  fastcomm sql traces/
"""
_ROWS = 40  # of a printed table, unless --top says otherwise
_MOST_LETTERS = 1 << 20  # of standard input
_NO_QUERY = 'sql: no query; pass one, as in fastcomm sql PATH "from ranks"'


@click.command("sql", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("path", metavar="PATH")
@click.argument("query", required=False, metavar="[QUERY]")
@rows_options(_ROWS)
@with_options(options_of(SqlOptions))
@builds(limits=SqlOptions)
@run_options
@result_options("query.json, and all rows as CSV and Parquet", html=False)
def run(
    *,
    path: str,
    query: str | None,
    shown: PrintedRows,
    limits: SqlOptions,
    files: ResultFiles,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Answer SQL queries on a run, with DuckDB.

    PATH is a directory, file or glob of traces, or a store of fastcomm ingest. QUERY is one or
    several statements, or a command such as .tables or .schema VIEW. Without it, statements
    are typed at a prompt, or read from standard input.

    Only what a query touches is read: its columns, and the ranks that its conditions allow. A
    query changes nothing, and reads no other file. Needs the extra: pip install 'fastcomm[sql]'
    """
    from fastcomm.sql import prompt
    from fastcomm.sql.database import RunDatabase
    from fastcomm.sql.run_tables import RunTables

    if query is not None and not query.strip():
        raise ConfigError(_NO_QUERY)
    if query is not None and query.lstrip().startswith("."):
        prompt.dot_command(query)
        return
    with opened_run([path], reading, execution) as opened:
        tables = RunTables(opened)
        with RunDatabase(tables, limits) as database:
            printed: set[str] = set()

            def answer(text: str) -> None:
                _answer(database, text, shown, files, printed)

            if query is not None:
                answer(query)
            elif sys.stdin is not None and sys.stdin.isatty():
                prompt.converse(answer)
            else:
                _answer_all(sys.stdin, answer, _single(shown, files))
        exit_if_skipped(tables.skipped)


def _single(shown: PrintedRows, files: ResultFiles) -> str | None:
    """Return why only one statement can be answered; None if several can."""
    if files.output is not None:
        return "--output: writes the rows of one statement"
    if files.as_json or shown.format_ == "json":
        name = "--json" if files.as_json else "--format json"
        return f"{name}: prints one JSON document; pass one statement"
    return None


def _answer_all(
    lines: TextIO | None, answer: Callable[[str], None], single: str | None
) -> None:
    """Answer the statements and commands of standard input; an error ends it.

    `single` is why there can be only one statement; None if there can be several.
    """
    from fastcomm.sql import prompt

    text = "" if lines is None else lines.read(_MOST_LETTERS + 1)
    if len(text) > _MOST_LETTERS:
        raise ConfigError(f"sql: standard input has more than {_MOST_LETTERS} letters")
    if not text.strip():
        raise ConfigError(_NO_QUERY)
    parts = [*prompt.parts(iter(text.splitlines()))]
    if single and sum(not part.startswith(".") for part in parts) > 1:
        raise ConfigError(single)
    for part in parts:
        if not part.startswith("."):
            answer(part)
        elif not prompt.dot_command(part):
            return


def _answer(
    database: "RunDatabase",
    text: str,
    shown: PrintedRows,
    files: ResultFiles,
    printed: set[str],
) -> None:
    """Execute the statements of a text, and print the rows of each, and what is new to warn of.

    Warnings are added to `printed`.
    """
    statements = database.statements(text)
    single = _single(shown, files)
    if single and len(statements) > 1:
        raise ConfigError(single)
    for statement in statements:
        result = _printed(database, statement, shown, files, printed)
        printed.update(result.warnings)


def _printed(
    database: "RunDatabase",
    sql: str,
    shown: PrintedRows,
    files: ResultFiles,
    printed: Container[str],
) -> "QueryResult":
    """Execute a statement, print its rows and what was read for them, and return them."""
    from fastcomm.show.files import csv_text, write_result
    from fastcomm.sql import tables

    is_short = not files.as_json and shown.format_ in ("table", "markdown")
    default = _ROWS if is_short and files.output is None else None
    result = database.query(sql, most=default if shown.top is None else shown.top)
    warn([text for text in result.warnings if text not in printed])
    say_skipped(result.skipped)
    if result.reads:
        say(f"read: {'; '.join(map(str, result.reads))}")
    if files.output is not None:
        write_result(result, files.output, "query", xlsx=files.xlsx)
    if files.as_json or shown.format_ == "json":
        print_json(result)
    elif shown.format_ == "csv":
        click.echo(csv_text(result.table), nl=False)
    elif shown.format_ == "markdown":
        click.echo(tables.markdown(result.top(_ROWS) if shown.top is None else result))
    else:
        tables.show(result if shown.top is not None else result.top(_ROWS))
    return result
