"""Where the results of commands go: to the terminal, as JSON, and into files."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.commands import option
from fastcomm.cli.main import INCOMPLETE
from fastcomm.cli.messages import say
from fastcomm.cli.parameter_types import COUNT, OutputFile, OutputFolder
from fastcomm.cli.run_options import builds, with_options
from fastcomm.errors import FastcommError
from fastcomm.option_fields import OUTPUT
from fastcomm.result import SCHEMA_VERSION, Result, dumps, json_text

if TYPE_CHECKING:
    from fastcomm.trace.run_traces import SkippedRank

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """Where a result goes: the values of `result_options`, and of `trace_option`."""

    as_json: bool = False
    output: Path | None = None
    xlsx: bool = False
    html: Path | None = None
    trace_path: Path | None = None


_output = partial(option, group=OUTPUT, is_common=True)
json_option = _output(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON object."
)
trace_option = _output(
    "--trace",
    "trace_path",
    type=OutputFile(),
    help="Write the replayed steps for Perfetto (of what-if, also as measured).",
)

prometheus_option = option(
    "--prometheus",
    type=OutputFile(end=".prom"),
    group=OUTPUT,
    help="Write the numbers for Prometheus (.prom of a node exporter's textfile collector).",
)


def result_options(
    files: str, *, xlsx: bool = True, html: bool = True, **attrs: Any
) -> Callable[[F], F]:
    """Return a decorator that adds the options of output to a command, as `files`.

    Parameters
    ----------
    files
        Description of the files of `--output`, for its help.
    xlsx, html
        Whether the command has `--xlsx` and `--html`.
    **attrs
        Further attributes of `--output`.

    """
    options = [json_option, output_option(f"Files: {files}", **attrs)]
    if xlsx:
        options.append(_XLSX)
    if html:
        options.append(html_option())
    return lambda command: with_options(options)(builds(files=ResultFiles)(command))


def _check_xlsx(_ctx: click.Context, _option: click.Parameter, is_given: bool) -> bool:
    """Return the value of --xlsx; FastcommError without the package that writes workbooks."""
    if is_given and find_spec("xlsxwriter") is None:
        raise FastcommError("--xlsx needs XlsxWriter: pip install 'fastcomm[xlsx]'")
    return is_given


_XLSX = option(
    "--xlsx",
    is_flag=True,
    callback=_check_xlsx,
    group=OUTPUT,
    needs=("--output",),
    help="Write all tables into one Excel workbook, too (with --output).",
)


def output_option(content: str, **attrs: Any) -> Callable[[F], F]:
    """Return the option of a directory to write to; `content` is a sentence on its content."""
    attrs = {"type": OutputFolder(), "metavar": "DIR", **attrs}
    return _output("--output", "-o", help=f"Directory to write to. {content}.", **attrs)


def html_option(**attrs: Any) -> Callable[[F], F]:
    """Return the option of an HTML page."""
    text = "Write a self-contained HTML page."
    return _output("--html", type=OutputFile(), help=text, **attrs)


def top_option(default: int, *, all_in_json: bool = False, **attrs: Any) -> Callable[[F], F]:
    """Return the option of the number of rows to print.

    With `all_in_json`, the default is None, and the command prints `default` rows, or all as
    JSON.
    """
    return _output(
        "--top",
        type=COUNT,
        default=None if all_in_json else default,
        show_default=False,
        help="Number of rows to print, also with --json. "
        f"Default: {default}{', with --json all' if all_in_json else ''}.",
        **attrs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedRows:
    """How rows are printed: the values of `rows_options`."""

    top: int | None = None
    format_: str = "table"


_FORMAT = _output(
    "--format",
    "format_",
    type=click.Choice(["table", "csv", "json", "markdown"]),
    default="table",
    not_with=("--json",),
    help="Format to write. CSV and JSON have all rows, or those of --top.",
)


def rows_options(default: int) -> Callable[[F], F]:
    """Return a decorator that adds the options of printed rows to a command, as `shown`."""
    options = [top_option(default, all_in_json=True), _FORMAT]
    return lambda command: with_options(options)(builds(shown=PrintedRows)(command))


def overlay_option(**attrs: Any) -> Callable[[F], F]:
    """Return the option of a trace with the path drawn into it."""
    text = "Write a trace with the path marked (.json, .json.gz)."
    return _output("--overlay", type=OutputFile(), help=text, **attrs)


def give(
    result: R,
    files: ResultFiles,
    name: str,
    show: Callable[[R], object],
    *,
    table: str | None = None,
) -> None:
    """Write the files of --output, and print a result with `show` or as JSON.

    Parameters
    ----------
    result
        The result.
    files
        Where it goes.
    name
        Name of its files, without suffix.
    show
        Prints the result for people.
    table
        Name of the files of its only table, if it is another one.

    """
    if files.output is not None:
        from fastcomm.show.files import write_result

        write_result(result, files.output, name, table, xlsx=files.xlsx)
    if files.as_json:
        print_json(result)
    else:
        show(result)


def print_json(result: Result) -> None:
    """Print the JSON document of a result."""
    click.echo(json_text(result))


def print_written(
    format_: str,
    paths: Sequence[Path | str],
    *,
    ranks: int,
    skipped: "Sequence[SkippedRank]" = (),
    next_command: str | None = None,
    **counts: int,
) -> None:
    """Print the JSON document of a command that writes files: which, and of how much.

    Parameters
    ----------
    format_
        What the files are, such as "uniform".
    paths
        The files and directories, as the user named them.
    ranks
        Number of ranks in them.
    skipped
        Ranks that are not, since they could not be read.
    next_command
        The command that reads the files.
    **counts
        Numbers of what the files have, such as `events`.

    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "format": format_,
        "paths": [str(path) for path in paths],
        "ranks": ranks,
        "counts": counts,
        "failed": [asdict(rank) for rank in skipped],
        "next_command": next_command,
    }
    click.echo(dumps(document))


def say_skipped(skipped: "Sequence[SkippedRank]") -> None:
    """Print the skipped ranks to stderr, a line each."""
    say(*(f"skipped: {rank}" for rank in skipped))


def exit_if_skipped(skipped: Sequence[object]) -> None:
    """End the command with the exit code of an incomplete result if ranks were skipped."""
    if skipped:
        click.get_current_context().exit(INCOMPLETE)
