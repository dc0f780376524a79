"""``fastcomm replay``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli import INCOMPLETE, stats
from fastcomm.cli.messages import say, warn
from fastcomm.cli.options import (
    OutputFile,
    TracePath,
    cluster_options,
    keep_going_option,
    reading_options,
)
from fastcomm.cli.ranges import STEPS, WORKERS, NumberList, numbers
from fastcomm.cli.results import print_json, result_options
from fastcomm.cli.windows import window_options

if TYPE_CHECKING:
    from fastcomm.replay.result import Session

_EXAMPLES = """\b
Examples:
  fastcomm replay trial/ --bottleneck --trace replayed.json
  fastcomm replay trial/ --what-if faster-network.json
  fastcomm replay trial/ --compat dpro --json | jq .step_end_ns
  fastcomm replay traces/ --iteration 12 --bottleneck
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
@stats.trial_options
@window_options
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
    path: Path,
    changes: Path | None,
    as_json: bool,
    output: Path | None,
    trace_path: Path | None,
    **words: Any,
) -> None:
    """Replay a step on its devices, and what it would be if things changed.

    PATH is a dPRO trial with its data-flow graph (dag.gml) and NCCL's topology, or a trace or
    a directory of traces of a profiler. Printed are the step time of each rank beside the
    measured one, and the critical path. A change is of a name, tensor:ID, link:RANK->RANK,
    device:NAME, rank:RANK, category:NAME, DELAY_ALL_CMP, DELAY_ALL_COMM or DELAY_ALL; the most
    exact wins.
    """
    from dataclasses import replace

    from fastcomm.replay import inputs, what_if
    from fastcomm.replay.partial import partial
    from fastcomm.report import replay as report

    of_run = inputs.is_run(path)
    found = _of_run(path, words) if of_run else _of_trial(path, words)
    if changes is not None:
        made = found.replayed.replayer
        found = replace(found, changed=made.run(what_if.durations(made, what_if.read(changes))))
    if words["bottleneck"]:
        removed = what_if.bottlenecks(
            found.replayed, found.path, workers=words["workers"], by_name=of_run
        )
        found = replace(found, removed=removed)
    if words["tensors"]:
        alone = partial(found.replayed.replayer, numbers("--tensors", words["tensors"]))
        found = replace(found, alone=alone)
    if output is not None:
        report.write(found, output)
    if trace_path is not None:
        report.write_trace(found.changed or found.replayed, trace_path)
    if words["html"] is not None:
        from fastcomm.report.html import render, replayed

        render.write(replayed.page(found, str(path)), words["html"])
    if as_json:
        print_json(found)
    else:
        report.show(found)
    if found.read and found.read.failed:
        ctx.exit(INCOMPLETE)


_OF_TRIALS = (
    *("compat", "tensors", "unlimited_updates", "algorithm", "clip_updates", "barrier"),
    *("with_daydream", "hosts", "fuse"),
)
_OF_RUNS = ("iteration", "annotation", "ranks", "config_path", "dask", "keep_going")


def _of_trial(path: Path, words: dict[str, Any]) -> "Session":
    """A trial replayed as it was, and what else is predicted of its step."""
    from dataclasses import replace

    from fastcomm.errors import ConfigError
    from fastcomm.replay.replayer import Options
    from fastcomm.replay.session import session

    if refused := [name for name in _OF_RUNS if words[name] not in (None, False)]:
        raise ConfigError(f"{path} is a dPRO trial: --{_option(refused[0])} is for traces")
    read = stats.opened(path, words)
    options = Options(
        compat=words["compat"] is not None,
        steps=words["steps"],
        unlimited_updates=words["unlimited_updates"],
    )
    found = session(read, options)
    return replace(found, predictions=stats.predicted(read, found.replayed.replayer, words))


def _of_run(path: Path, words: dict[str, Any]) -> "Session":
    """A step of a run replayed as it was; nothing else is predicted of it."""
    from fastcomm.analyses.replay import session_of, step_of
    from fastcomm.cli.options import engine_of
    from fastcomm.cli.windows import opened_whole, wanted_window
    from fastcomm.errors import ConfigError
    from fastcomm.executors import warm
    from fastcomm.report.console import progress

    refused = [name for name in _OF_TRIALS if words[name]]
    if refused or words["steps"] != 1 or words["align"] != "auto":
        name = _option(refused[0] if refused else "steps" if words["steps"] != 1 else "align")
        raise ConfigError(f"--{name} is for dPRO trials; {path} is none")
    # --workers are threads, of the search for the bottleneck.
    with engine_of({**words, "workers": 1}) as engine:
        warm.compile_critical_path()
        run = opened_whole((str(path),), words, engine)
        warn(run.warnings)
        loads = words["data_load_events"]
        with progress(run) as advance:
            step = step_of(
                run,
                wanted_window(words),
                loads,
                workers=engine,
                keep_going=words["keep_going"],
                progress=advance,
            )
    say(*(f"skipped: {each}" for each in (step.read.failed if step.read else ())))
    return session_of(step)


def _option(name: str) -> str:
    """The option of a parameter."""
    return name.removeprefix("with_").removesuffix("_path").replace("_", "-")
