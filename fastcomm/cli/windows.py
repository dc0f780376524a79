"""Options that select a window of a run, and how commands read that window."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.checks import invalid, option_name, shortened
from fastcomm.cli.commands import OUTPUT, WINDOW, option
from fastcomm.cli.options import (
    ExecutionOptions,
    builds,
    executor_for,
    open_traces,
    with_options,
)
from fastcomm.cli.values import NUMBER, RANK, OutputFile, whole
from fastcomm.errors import ConfigError
from fastcomm.options import PathOptions, ReadOptions, Window

if TYPE_CHECKING:
    from fastcomm.critical_path import CriticalPath
    from fastcomm.trace.run import RunTraces

F = TypeVar("F", bound=Callable[..., Any])


class InstanceRange(click.ParamType[int | tuple[int, int]]):
    """A number, or an inclusive pair as in 0:3."""

    name = "instance"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | tuple[int, int]:
        """Return the number, or the first and last number of "0:3"; ConfigError for others."""
        first, colon, last = str(value).partition(":")
        begin, end = whole(first), whole(last if colon else first)
        if begin is None or end is None:
            raise invalid("--instance", repr(shortened(value)), "a number, or two as in 0:3")
        return (begin, end) if colon else begin


def window_options(command: F) -> F:
    """Add the options that select a window; the command gets them as `window`."""
    return with_options(_WINDOW)(builds(window=Window)(command))


def path_options(command: F) -> F:
    """Add the options of a window and a rank; the command gets them as `path_options`."""
    return with_options([*_WINDOW, _RANK])(builds(path_options=PathOptions)(command))


_RANK = option(
    "--rank",
    type=RANK,
    group=WINDOW,
    is_common=True,
    help="Analyze this rank alone. Default: all ranks, joined by collectives.",
)
_WINDOW: list[Callable[[Any], Any]] = [
    option(
        "--step",
        type=NUMBER,
        group=WINDOW,
        is_common=True,
        help="Number of the step. Default: the second, or the only one.",
    ),
    option(
        "--annotation",
        metavar="TEXT",
        group=WINDOW,
        is_common=True,
        help='Use the events with TEXT in their name as window; "" is the whole trace.',
    ),
    option(
        "--instance",
        type=InstanceRange(),
        metavar="I[:J]",
        group=WINDOW,
        needs=("--annotation",),
        not_with=('--annotation ""',),
        help="Which of the --annotation events, from 0; I:J spans I to J inclusive.",
    ),
    option(
        "--exact",
        is_flag=True,
        group=WINDOW,
        needs=("--annotation",),
        not_with=('--annotation ""',),
        help="Match the whole name with --annotation.",
    ),
    option(
        "--data-load-events",
        multiple=True,
        metavar="REGEX",
        group=WINDOW,
        help="Names of the events that load data. Repeatable.",
    ),
]


def overlay_option(**attrs: Any) -> Callable[[F], F]:
    """Return the option of a trace with the path drawn into it."""
    return option(
        "--overlay",
        type=OutputFile(),
        metavar="FILE",
        group=OUTPUT,
        is_common=True,
        help="Write a trace with the path marked (.json, .json.gz); of a what-if both steps.",
        **attrs,
    )


def find_path(
    paths: tuple[str, ...],
    options: PathOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
    *,
    alone: bool = False,
) -> "CriticalPath":
    """Return the critical path of a window.

    Warnings of the run and the skipped ranks are printed to stderr.

    Parameters
    ----------
    paths
        Files and directories of the run.
    options
        The window, the rank and the rules.
    reading, execution
        How to read the run, and with which workers.
    alone
        Whether to use one rank alone, rather than all.

    """
    from fastcomm.analyses import execution_traces, preparation
    from fastcomm.analyses.critical_path import critical_path
    from fastcomm.cli.messages import say, warn
    from fastcomm.report.console import progress

    if execution_traces.is_execution_trace(paths):
        return _of_execution_traces(paths, options, reading, execution, alone=alone)
    is_of_one_rank = alone or options.is_of_one_rank
    if is_of_one_rank:
        execution = replace(execution, workers=1)
    with executor_for(execution) as executor:
        if executor.is_here:
            preparation.compile_critical_path(options.compat)
        run = open_traces(paths, reading, executor)
        warn((*_without_effect(options.rank, reading, run), *run.warnings))
        with nullcontext() if is_of_one_rank else progress(run) as advance:
            path = critical_path(
                run,
                options,
                workers=executor,
                keep_going=reading.keep_going,
                progress=advance,
                alone=alone,
            )
    warn(path.warnings)
    say(*(f"skipped: {rank}" for rank in path.skipped))
    return path


def _of_execution_traces(
    paths: tuple[str, ...],
    options: PathOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
    *,
    alone: bool,
) -> "CriticalPath":
    """Return the path of execution traces; raise ConfigError for options that they lack.

    Skipped ranks are printed to stderr.
    """
    from fastcomm.analyses.execution_traces import execution_trace_path
    from fastcomm.cli.messages import say

    _refuse(options, replace(PathOptions(), rank=options.rank))
    _refuse(reading, replace(ReadOptions(), keep_going=reading.keep_going))
    _refuse(execution, ExecutionOptions())
    path = execution_trace_path(
        *paths, rank=options.rank, alone=alone, keep_going=reading.keep_going
    )
    say(*(f"skipped: {rank}" for rank in path.skipped))
    return path


def _refuse(options: Any, allowed: Any) -> None:
    """Raise ConfigError for an option that is not as in `allowed`."""
    for field in fields(options):
        if getattr(options, field.name) != getattr(allowed, field.name):
            raise ConfigError(
                f"{option_name(field.name)} has no effect on execution traces: leave it out"
            )


def _without_effect(rank: int | None, reading: ReadOptions, run: "RunTraces") -> list[str]:
    """Return a warning if --keep-going has no effect, since only the rank of --rank is read."""
    if not reading.keep_going or rank is None or run.skipped:
        return []
    return ["--keep-going changes nothing: only the rank of --rank is read"]
