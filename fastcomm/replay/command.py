"""``fastcomm replay``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastcomm.cli.commands import OptionsCommand, option_of, options_of
from fastcomm.cli.messages import warn
from fastcomm.cli.parameter_types import RunArgument
from fastcomm.cli.results import (
    ResultFiles,
    exit_if_skipped,
    print_json,
    result_options,
    say_skipped,
    trace_option,
)
from fastcomm.cli.runs import ExecutionOptions, builds, opened_run, run_options, with_options
from fastcomm.options import EditOptions, ReadOptions, Window
from fastcomm.replay.options import RunReplayOptions, ScenarioOptions

if TYPE_CHECKING:
    from fastcomm.replay.result import Session

F = TypeVar("F", bound=Callable[..., Any])
_EXAMPLES = """\b
Examples:
  fastcomm replay traces/ --step 12 --bottleneck
  fastcomm replay traces/ --set link:DP=400Gbit/s --trace replayed.json
"""


def session_options(command: F, kind: type[ScenarioOptions]) -> F:
    """Add the options that every replay has; the command gets them as `options` and `files`."""
    options = [
        *options_of(EditOptions),
        option_of(ScenarioOptions, "bottleneck"),
        trace_option,
        result_options(
            "replay.json, nodes and edges as Parquet, and the graph as GraphML", xlsx=False
        ),
    ]
    return with_options(options)(builds(options=kind)(command))


@click.command("replay", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("path", type=RunArgument("replay"))
@partial(session_options, kind=RunReplayOptions)
@with_options(options_of(Window))
@run_options
def run(
    *,
    path: Path,
    options: RunReplayOptions,
    files: ResultFiles,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Replay a step on its devices, as measured or changed.

    PATH is a trace, or a directory of traces. Prints the step time of each rank beside the
    measured one, and the critical path. Edits are those of fastcomm what-if.
    """
    from fastcomm.replay.analysis import session_of, step_of

    with opened_run((path,), reading, execution) as opened:
        warn(opened.warnings)
        step = step_of(opened, options)
    warn(step.warnings[len(opened.warnings) :])
    say_skipped(step.constraints.read.skipped if step.constraints.read else ())
    give_session(session_of(step, options, workers=execution.workers), path, files)


def give_session(session: "Session", path: Path, files: ResultFiles) -> None:
    """Print and write a replay, and end the command where ranks were skipped.

    Parameters
    ----------
    session
        The result.
    path
        Path of the run or trial, for the page's title.
    files
        Where results go.

    """
    from fastcomm.replay import tables

    if files.output is not None:
        tables.write(session, files.output)
    if files.trace_path is not None:
        tables.write_trace(session.changed or session.replayed, files.trace_path)
    if files.html is not None:
        from fastcomm.replay import page
        from fastcomm.show.pages import write as write_page
        from fastcomm.timeline.timeline import replay_timeline

        write_page(page.page(session, str(path), replay_timeline(session)), files.html)
    if files.as_json:
        print_json(session)
    else:
        tables.show(session)
    exit_if_skipped(session.skipped)
