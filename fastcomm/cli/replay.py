"""``fastcomm replay``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli import INCOMPLETE
from fastcomm.cli.commands import OUTPUT, OptionsCommand, option
from fastcomm.cli.messages import say, warn
from fastcomm.cli.options import (
    ExecutionOptions,
    builds,
    executor_for,
    open_traces,
    run_options,
    with_options,
)
from fastcomm.cli.results import (
    ResultFiles,
    changes_option,
    print_json,
    result_options,
    trace_option,
)
from fastcomm.cli.values import RunArgument
from fastcomm.cli.windows import window_options
from fastcomm.options import ReadOptions, ScenarioOptions, Window

if TYPE_CHECKING:
    from fastcomm.replay.result import Session

F = TypeVar("F", bound=Callable[..., Any])

_EXAMPLES = """\b
Examples:
  fastcomm replay traces/ --step 12 --bottleneck
  fastcomm replay traces/ --changes faster-network.json --trace replayed.json
"""


def session_options(command: F) -> F:
    """Add the options that every replay has; the command gets `scenarios` and `files`."""
    options = [
        changes_option,
        option(
            "--bottleneck",
            is_flag=True,
            group=OUTPUT,
            is_common=True,
            help="Report how much each operation of the critical path costs the step.",
        ),
        trace_option,
        result_options(
            "replay.json, nodes and edges as Parquet, and the graph as GraphML", xlsx=False
        ),
    ]
    return with_options(options)(builds(scenarios=ScenarioOptions, files=ResultFiles)(command))


@click.command("replay", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("path", type=RunArgument("replay"))
@session_options
@window_options
@run_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    path: Path,
    scenarios: ScenarioOptions,
    files: ResultFiles,
    window: Window,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Replay a step on its devices, as measured or changed.

    PATH is a trace, or a directory of traces. Prints the step time of each rank beside the
    measured one, and the critical path. A KEY of --changes is an operation's name, link:DP,
    device:NAME, rank:5, category:NAME, DELAY_ALL_CMP, DELAY_ALL_COMM or DELAY_ALL; the most
    specific one wins: {"rank:5": {"ratio": 0.87}, "link:DP": {"ratio": 0.5}}.
    """
    from fastcomm.analyses.replay import with_scenarios

    replay_session = _replayed(path, window, reading, execution)
    ctx.exit(
        give_session(
            with_scenarios(replay_session, scenarios, workers=execution.workers, by_name=True),
            path,
            files,
        )
    )


def _replayed(
    path: Path, window: Window, reading: ReadOptions, execution: ExecutionOptions
) -> "Session":
    """Replay a step of a run as measured."""
    from fastcomm.analyses import preparation
    from fastcomm.analyses.replay import session_of, step_of
    from fastcomm.report.console import progress
    from fastcomm.trace.run import warnings_of_ranks

    with executor_for(execution) as executor:
        preparation.compile_critical_path()
        run = open_traces((path,), reading, executor)
        warn(run.warnings)
        with progress(run) as advance:
            step = step_of(
                run,
                window,
                workers=executor,
                keep_going=reading.keep_going,
                progress=advance,
            )
    warn(warnings_of_ranks(trace.meta for trace in step.traces))
    say(*(f"skipped: {rank}" for rank in (step.read.skipped if step.read else ())))
    return session_of(step)


def give_session(session: "Session", path: Path, files: ResultFiles) -> int:
    """Print and write a replay.

    Parameters
    ----------
    session
        The result.
    path
        Path of the run or trial, for the page's title.
    files
        Where results go.

    Returns
    -------
    int
        Exit code; `INCOMPLETE` if ranks were skipped.

    """
    from fastcomm.report import replay as report

    if files.output is not None:
        report.write(session, files.output)
    if files.trace_path is not None:
        report.write_trace(session.changed or session.replayed, files.trace_path)
    if files.html is not None:
        from fastcomm.report.html import replayed
        from fastcomm.report.html import write as write_page

        write_page(replayed.page(session, str(path)), files.html)
    if files.as_json:
        print_json(session)
    else:
        report.show(session)
    return INCOMPLETE if session.read and session.read.skipped else 0
