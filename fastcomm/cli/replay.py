"""``fastcomm replay``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.checks import non_default
from fastcomm.cli import INCOMPLETE, stats
from fastcomm.cli.messages import say, warn
from fastcomm.cli.options import (
    STEPS,
    WORKERS,
    ExecutionOptions,
    NumberList,
    OutputFile,
    TracePath,
    builds,
    cluster_options,
    executor_for,
    keep_going_option,
    reading_options,
)
from fastcomm.cli.results import print_json, result_options
from fastcomm.cli.windows import window_options
from fastcomm.errors import ConfigError
from fastcomm.options import (
    PathOptions,
    PredictionOptions,
    ReadOptions,
    ReplayOptions,
    TrialOptions,
)

if TYPE_CHECKING:
    from fastcomm.replay.result import Session

_EXAMPLES = """\b
Examples:
  fastcomm replay trial/ --bottleneck --trace replayed.json
  fastcomm replay trial/ --what-if faster-network.json
  fastcomm replay trial/ --compat dpro --json | jq .step_end_ns
  fastcomm replay traces/ --step 12 --bottleneck
"""


@click.command("replay", epilog=_EXAMPLES)
@click.argument("path", type=TracePath())
@click.option(
    "--what-if",
    "changes",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help='JSON: {"<what>": {"delay": ms, "ratio": r}}.',
)
@click.option(
    "--bottleneck", is_flag=True, help="Replay without each operation of the critical path."
)
@click.option(
    "--tensors",
    type=NumberList(),
    metavar="LIST",
    help="Replay the communication of these tensors alone: 0-7,12.",
)
@click.option("--compat", type=click.Choice(["dpro"]), help="Replay as dPRO does.")
@click.option("--steps", type=STEPS, default=1, show_default=True, help="Steps to replay.")
@click.option("--unlimited-updates", is_flag=True, help="Let all updates run at once.")
@click.option(
    "--workers",
    type=WORKERS,
    default=1,
    show_default=True,
    help="Threads that search for the bottleneck.",
)
@builds(options=ReplayOptions)
@stats.trial_options
@window_options
@builds(reading=ReadOptions, execution=ExecutionOptions)
@reading_options
@keep_going_option
@cluster_options
@result_options(
    "Write replay.json, nodes and edges as Parquet, and the graph as GraphML.", xlsx=False
)
@click.option(
    "--trace",
    "trace_path",
    type=OutputFile(),
    metavar="FILE",
    help="Write the replayed step for Perfetto; with --what-if the changed one.",
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    path: Path,
    changes: Path | None,
    bottleneck: bool,
    as_json: bool,
    output: Path | None,
    html: Path | None,
    trace_path: Path | None,
    options: ReplayOptions,
    trial: TrialOptions,
    predicted: PredictionOptions,
    path_options: PathOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Replay a step on its devices, and what it would be if things changed.

    PATH is a dPRO trial with its data-flow graph (dag.gml) and NCCL's topology, or a trace or
    a directory of traces of a profiler. Printed are the step time of each rank beside the
    measured one, and the critical path. A change is of a name, tensor:ID, link:RANK->RANK,
    device:NAME, rank:RANK, category:NAME, DELAY_ALL_CMP, DELAY_ALL_COMM or DELAY_ALL; the most
    exact wins.
    """
    from fastcomm.readers.dpro import inputs
    from fastcomm.replay import predictions
    from fastcomm.report import replay as report

    if of_run := inputs.is_run(path):
        _refuse_for_run(path, options, trial, predicted)
        session = _of_run(path, path_options, reading, execution)
    else:
        _refuse_for_trial(path, path_options, reading, execution)
        session = _of_trial(path, options, trial, predicted)
    made = session.replayed.replayer
    if changes is not None:
        session = replace(session, changed=predictions.changed(made, changes))
    if bottleneck:
        removed = predictions.bottlenecks(
            session.replayed, session.path, workers=execution.workers, by_name=of_run
        )
        session = replace(session, removed=removed)
    if output is not None:
        report.write(session, output)
    if trace_path is not None:
        report.write_trace(session.changed or session.replayed, trace_path)
    _page(session, path, html)
    if as_json:
        print_json(session)
    else:
        report.show(session)
    if session.read and session.read.failed:
        ctx.exit(INCOMPLETE)


def _page(session: "Session", path: Path, html: Path | None) -> None:
    """Write the page, if it was asked for."""
    if html is None:
        return
    from fastcomm.report.html import replayed
    from fastcomm.report.html import write as write_page

    write_page(replayed.page(session, str(path)), html)


def _refuse_for_run(
    path: Path, *options: ReplayOptions | TrialOptions | PredictionOptions
) -> None:
    """Raise ConfigError for options of dPRO trials."""
    if refused := [name for each in options for name in non_default(each)]:
        raise ConfigError(f"--{_option(refused[0])} is for dPRO trials; {path} is none")


def _refuse_for_trial(
    path: Path, window: PathOptions, reading: ReadOptions, execution: ExecutionOptions
) -> None:
    """Raise ConfigError for options of traces."""
    names = [*non_default(window), *non_default(reading), *(["dask"] if execution.dask else [])]
    if names:
        raise ConfigError(f"{path} is a dPRO trial: --{_option(names[0])} is for traces")


def _of_trial(
    path: Path, options: ReplayOptions, trial: TrialOptions, predicted: PredictionOptions
) -> "Session":
    """Replay a trial as it was, and predict what else is asked for of its step."""
    from fastcomm.analyses.replay import session_of_trial

    return session_of_trial(stats.read_trial(path, trial), options, predicted)


def _of_run(
    path: Path, options: PathOptions, reading: ReadOptions, execution: ExecutionOptions
) -> "Session":
    """Replay a step of a run as it was."""
    from fastcomm.analyses import preparation
    from fastcomm.analyses.preparation import open_traces
    from fastcomm.analyses.replay import session_of, step_of
    from fastcomm.report.console import progress

    # --workers are threads, of the search for the bottleneck.
    with executor_for(replace(execution, workers=1)) as executor:
        preparation.compile_critical_path()
        run = open_traces((path,), reading, executor, whole=True)
        warn(run.warnings)
        with progress(run) as advance:
            step = step_of(
                run,
                options,
                workers=executor,
                keep_going=reading.keep_going,
                progress=advance,
            )
    say(*(f"skipped: {each}" for each in (step.read.failed if step.read else ())))
    return session_of(step)


def _option(name: str) -> str:
    """Return the name of a parameter's option, without dashes before it."""
    return name.removeprefix("with_").replace("_", "-")
