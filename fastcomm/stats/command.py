"""``fastcomm stats``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.commands import OptionsCommand, option_of
from fastcomm.cli.messages import warn
from fastcomm.cli.parameter_types import RunArgument
from fastcomm.cli.results import (
    ResultFiles,
    exit_if_skipped,
    html_option,
    print_json,
    result_options,
    say_skipped,
    top_option,
)
from fastcomm.cli.runs import builds, open_traces, reading_options, with_options
from fastcomm.option_fields import OUTPUT, option_field
from fastcomm.options import ReadOptions

if TYPE_CHECKING:
    from fastcomm.formats.dpro.trial import Input
    from fastcomm.trace.run import SkippedRank

F = TypeVar("F", bound=Callable[..., Any])
_ROWS = 20  # of a printed table, unless --top says otherwise
_EXAMPLES = """\b
Examples:
  fastcomm stats traces/ --sort --top 40
  fastcomm stats monday/ --against tuesday/
  fastcomm stats traces/ --html stats.html
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Which operations are printed, and the path of a run to compare with."""

    sort: bool = option_field(
        "Sort operations by mean duration, longest first.",
        False,
        group=OUTPUT,
        is_common=True,
        not_with=("against",),
    )
    top: int | None = None
    against: Path | None = option_field(
        "Compare with OTHER: operations added, removed, faster or slower.",
        group=OUTPUT,
        metavar="OTHER",
        is_common=True,
    )


def list_options(path: click.ParamType[Any]) -> Callable[[F], F]:
    """Add the options of a list of operations; the command gets `shown` and `files`."""
    alone = ("--against",)
    options = [
        option_of(ListOptions, "sort"),
        top_option(_ROWS, all_in_json=True),
        option_of(ListOptions, "against", type=path),
        result_options(
            "stats.json, and all operations as CSV and Parquet", html=False, not_with=alone
        ),
        html_option(not_with=alone),
    ]
    return lambda command: with_options(options)(builds(shown=ListOptions)(command))


@click.command("stats", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("path", type=RunArgument("stats"))
@list_options(RunArgument("stats"))
@reading_options
def run(*, path: Path, shown: ListOptions, files: ResultFiles, reading: ReadOptions) -> None:
    """List the operations of a run: how often, how long, in which step, on which rank.

    PATH is a trace, or a directory of traces. Operations are work of the device and
    communication, named after their operators.
    """
    from fastcomm.formats.dpro import statistics

    read = partial(_read, reading=reading, is_one_of_two=shown.against is not None)
    describe(read, path, shown, files, statistics)


def _read(path: Path, *, reading: ReadOptions, is_one_of_two: bool) -> "Input":
    """Return the operations of the run at a path."""
    from fastcomm.formats.dpro import trial

    run = open_traces((path,), reading, is_one_of_two=is_one_of_two)
    return trial.of_run(run)


def describe(
    read: "Callable[[Path], Input]",
    path: Path,
    shown: ListOptions,
    files: ResultFiles,
    rules: Any,
) -> None:
    """Print the statistics of a path, or its comparison with another; end where ranks lack.

    Parameters
    ----------
    read
        Reads a path as a uniform trace.
    path
        The run or trial.
    shown
        What to list, and the path to compare with.
    files
        Where results go.
    rules
        Module that computes them: `formats.dpro.statistics`, or `compat.dpro`.

    """
    from fastcomm.formats.dpro import statistics
    from fastcomm.stats import tables
    from fastcomm.stats.analysis import RunStatistics, comparison

    source = _reported(read(path))
    measured = rules.statistics(source.trace, source.topology)
    if shown.against is not None:
        after = _reported(read(shown.against))
        changes = replace(
            comparison(measured, rules.statistics(after.trace, after.topology)),
            warnings=(*source.warnings, *after.warnings),
            skipped=(*_skipped(source), *_skipped(after)),
        )
        if files.as_json:
            print_json(replace(changes, changed=changes.changed[: shown.top]))
        else:
            tables.show_comparison(changes, shown.top or _ROWS)
        exit_if_skipped(changes.skipped)
        return
    described = RunStatistics(
        operations=measured,
        time=rules.step_time(source.trace),
        tensors=None if source.trial is None else source.trial.parameters,
        read=source.read,
        warnings=tuple(source.warnings),
        numbers=source.steps,
        is_dpro=rules is not statistics,
    )
    if files.html is not None:
        from fastcomm.show.pages import write as write_page
        from fastcomm.stats import page as pages

        write_page(pages.page(described, str(path)), files.html)
    if files.output is not None:
        from fastcomm.show.files import write_result

        write_result(described, files.output, "stats", "ops", xlsx=files.xlsx)
    head = shown.top or (None if files.as_json else _ROWS)
    rows = list(statistics.sort_rows(measured, by_avg=shown.sort, head=head))
    if files.as_json:
        print_json(replace(described, rows=tuple(rows)))
    else:
        tables.show(described, rows)
    exit_if_skipped(_skipped(source))


def _reported(source: "Input") -> "Input":
    """Print warnings and skipped ranks of what was read."""
    warn(source.warnings)
    say_skipped(_skipped(source))
    return source


def _skipped(source: "Input") -> "Sequence[SkippedRank]":
    """Return the skipped ranks of a run; none of a trial."""
    return source.read.skipped if source.read else ()
