"""``fastcomm dpro`` and its commands: statistics, replay and conversion of dPRO trials."""

from functools import partial
from pathlib import Path
from typing import get_args

import click

from fastcomm.cli.commands import CommandGroup, option, option_of, options_of, typed_options
from fastcomm.cli.messages import warn
from fastcomm.cli.parameter_types import TrialPath
from fastcomm.cli.results import ResultFiles, json_option
from fastcomm.cli.runs import with_options, workers_option
from fastcomm.convert.command import destination_argument, refuse_directory, write_uniform
from fastcomm.errors import ConfigError
from fastcomm.option_fields import WINDOW
from fastcomm.replay.command import give_session, session_options
from fastcomm.replay.options import StepRule, TrialOptions, TrialReplayOptions
from fastcomm.stats.command import ListOptions, describe, list_options

_EXAMPLES = """\b
Examples:
  fastcomm dpro stats trial/ --compat dpro --json | jq .iteration_time_ms
  fastcomm dpro replay trial/ --bottleneck --trace replayed.json
  fastcomm dpro replay trial/ --scale comm=0.5
  fastcomm dpro convert trial/ all.json.gz
"""
_example = "\b\nExample:\n  fastcomm dpro {}\n".format


@click.group("dpro", cls=CommandGroup, epilog=_EXAMPLES)
def run() -> None:
    """Read trials of dPRO: statistics, replay, conversion.

    TRIAL is a directory of hosts, which hold GPUs, which hold trace.json.gz, comm.json and the
    other files of dPRO. `stats` and `convert` read uniform traces (JSON, also gzipped), too.
    """


_step_rule = option(
    "--step-rule",
    type=click.Choice(get_args(StepRule)),
    default=get_args(StepRule)[0],
    group=WINDOW,
    is_common=True,
    help="Rule by which steps are found in traces without step numbers.",
)
_host_clocks = option_of(TrialOptions, "host_clocks")


@run.command("stats", has_tables=True, epilog=_example("stats trial/ --sort --top 20"))
@click.argument("path", metavar="TRIAL", type=TrialPath("stats"))
@list_options(TrialPath("stats"))
@_step_rule
@_host_clocks
@option_of(TrialReplayOptions, "compat")
def stats(
    *,
    path: Path,
    step_rule: str,
    host_clocks: str,
    compat: str | None,
    shown: ListOptions,
    files: ResultFiles,
) -> None:
    """List the operations of a trial.

    Shows how often each ran, how long, in which step, and on which rank.

    --step-rule applies where a trace has no step numbers. A step begins after an update
    (update), after anything but forward operations and input (seed, operator: the rules of two
    versions of dPRO), after a pause (gap), or never (none). --host-clocks shifts hosts so
    that the Sync operations of Horovod end together (sync), or no RECV ends before its SEND
    (causality; variance and drift choose other shifts). auto is sync, or else causality.
    """
    from fastcomm.compat import dpro
    from fastcomm.formats.dpro import statistics, trial

    _check_uniform(path, *([shown.against] if shown.against else []))
    read = partial(trial.read_input, rule=step_rule, align=host_clocks, whole=False)
    describe(read, path, shown, files, statistics if compat is None else dpro)


@run.command("convert", epilog=_example("convert trial/ all.json.gz"))
@click.argument("path", metavar="TRIAL", type=TrialPath("convert"))
@destination_argument
@_step_rule
@_host_clocks
@json_option
def convert(
    *, path: Path, destination: Path, step_rule: str, host_clocks: str, as_json: bool
) -> None:
    """Write a trial as one uniform trace.

    Clocks are aligned, and steps numbered. DESTINATION is the file to write; .gz compresses it.
    """
    from fastcomm.files import refuse_inputs
    from fastcomm.formats.dpro import trial

    _check_uniform(path)
    refuse_directory(destination)
    refuse_inputs(destination, [path] if path.is_file() else [])
    source = trial.read_input(path, rule=step_rule, align=host_clocks)
    warn(source.warnings)
    write_uniform(source.trace, destination).tell(as_json=as_json)


def _check_uniform(*paths: Path) -> None:
    """Raise `ConfigError` for --host-clocks if no path is a trial."""
    ctx = click.get_current_context()
    if not any(path.is_dir() for path in paths) and typed_options(ctx, TrialOptions):
        raise ConfigError(
            f"--host-clocks: no effect on {paths[0]}, a uniform trace, which has one "
            "clock; leave it out"
        )


_REPLAY = [
    *options_of(
        TrialReplayOptions,
        *("repeat", "unlimited_updates", "compat", "host_clocks", "nccl_algorithm"),
        *("clip_updates", "barrier", "daydream", "hosts", "fuse", "tensors"),
    ),
    workers_option("threads", needs=("--bottleneck",)),
]


@run.command("replay", has_tables=True, epilog=_example("replay trial/ --scale comm=0.5"))
@click.argument("path", metavar="TRIAL", type=TrialPath("replay"))
@partial(session_options, kind=TrialReplayOptions)
@with_options(_REPLAY)
def replay(
    *,
    path: Path,
    workers: int,
    options: TrialReplayOptions,
    files: ResultFiles,
) -> None:
    """Replay a step of a trial on its devices, as measured or changed.

    TRIAL has a data-flow graph (dag.gml) and NCCL's topology. Prints the step time of each rank
    beside the measured one, and the critical path. WHAT is all, compute, comm, name:NAME,
    name:/REGEX/, op:SEND, tensor:2, link:RANK->RANK, device:NAME, rank:host1.rank0 or
    category:NAME; + combines them. --overlap and --fuse-below need traces of a run.
    """
    from fastcomm.errors import TraceFileError
    from fastcomm.replay.analysis import read_trial, session_of_trial

    if not path.is_dir():
        raise TraceFileError(
            f"{path}: a uniform trace has no dependencies to replay; give a dPRO trial (a "
            "directory), or traces of a profiler to fastcomm replay"
        )
    trial = read_trial(path, options)
    warn(trial.warnings)
    give_session(session_of_trial(trial, options, workers=workers), path, files)
