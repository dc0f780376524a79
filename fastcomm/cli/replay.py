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
    edit_options,
    executor_for,
    open_traces,
    run_options,
    with_options,
)
from fastcomm.cli.results import (
    ResultFiles,
    print_json,
    result_options,
    trace_option,
)
from fastcomm.cli.values import RunArgument
from fastcomm.cli.windows import window_options
from fastcomm.options import EditOptions, ReadOptions, ScenarioOptions, Window

if TYPE_CHECKING:
    from fastcomm.replay.result import Session

F = TypeVar("F", bound=Callable[..., Any])

_EXAMPLES = """\b
Examples:
  fastcomm replay traces/ --step 12 --bottleneck
  fastcomm replay traces/ --set link:DP=400Gbit/s --trace replayed.json
"""


def session_options(command: F) -> F:
    """Add the options that every replay has; the command gets `scenarios` and `files`."""
    options = [
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
    built = builds(scenarios=ScenarioOptions, files=ResultFiles)(command)
    return edit_options(with_options(options)(built))


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
    measured one, and the critical path. Edits are those of fastcomm what-if.
    """
    from fastcomm.analyses.replay import with_bottlenecks

    session = _replayed(path, window, reading, execution, scenarios)
    if scenarios.bottleneck:
        session = with_bottlenecks(session, workers=execution.workers, by_name=True)
    ctx.exit(give_session(session, path, files))


def _replayed(
    path: Path,
    window: Window,
    reading: ReadOptions,
    execution: ExecutionOptions,
    edits: EditOptions,
) -> "Session":
    """Replay a step of a run as measured, and with edits."""
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
    constraints = step.constraints
    warn(warnings_of_ranks(trace.meta for trace in constraints.traces))
    say(
        *(f"skipped: {rank}" for rank in (constraints.read.skipped if constraints.read else ()))
    )
    return session_of(step, edits)


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
        from fastcomm.analyses.timeline import replay_timeline
        from fastcomm.report.html import replayed
        from fastcomm.report.html import write as write_page

        write_page(replayed.page(session, str(path), replay_timeline(session)), files.html)
    if files.as_json:
        print_json(session)
    else:
        report.show(session)
    return INCOMPLETE if session.read and session.read.skipped else 0
