"""``fastcomm dpro`` and its commands: statistics, replay and conversion of dPRO trials."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from fastcomm.cli.commands import CommandGroup, option, option_of, options_of, typed_options
from fastcomm.cli.messages import warn
from fastcomm.cli.parameter_types import TrialPath
from fastcomm.cli.results import (
    ResultFiles,
    give,
    html_option,
    json_option,
    result_options,
    top_option,
    trace_option,
)
from fastcomm.cli.run_options import builds, with_options, workers_option
from fastcomm.compat.dpro.options import (
    ListOptions,
    StepRule,
    TrialOptions,
    TrialReplayOptions,
)
from fastcomm.convert.command import destination_argument, refuse_directory, write_uniform
from fastcomm.errors import ConfigError
from fastcomm.option_fields import WINDOW
from fastcomm.options import EditOptions

if TYPE_CHECKING:
    from fastcomm.compat.dpro.result import TrialStatistics

_ROWS = 20  # of a printed table, unless --top says otherwise
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
@click.argument("path", metavar="TRIAL", type=TrialPath("kernels"))
@option_of(ListOptions, "sort")
@top_option(_ROWS, all_in_json=True)
@option_of(ListOptions, "against", type=TrialPath("kernels"))
@result_options(
    "stats.json, and all operations as CSV and Parquet", html=False, not_with=("--against",)
)
@html_option(not_with=("--against",))
@_step_rule
@_host_clocks
@option_of(TrialReplayOptions, "compat")
@builds(shown=ListOptions)
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
    from fastcomm.compat.dpro import rules, statistics, tables, trial
    from fastcomm.compat.dpro.result import TrialStatistics, comparison

    _check_uniform(path, *([shown.against] if shown.against else []))
    measures = statistics if compat is None else rules

    source, *others = (
        trial.read_input(at, rule=step_rule, align=host_clocks, whole=False)
        for at in (path, shown.against)
        if at is not None
    )
    warn(warning for one in (source, *others) for warning in one.warnings)
    measured = measures.statistics(source.trace, source.topology)
    for other in others:
        changes = comparison(measured, measures.statistics(other.trace, other.topology))
        changes = replace(changes, warnings=(*source.warnings, *other.warnings))
        if files.as_json:
            changes = replace(changes, changed=changes.changed[: shown.top])
        give(changes, files, "stats", partial(tables.show_comparison, head=shown.top or _ROWS))
        return
    described = TrialStatistics(
        operations=measured,
        time=measures.step_time(source.trace),
        tensors=None if source.trial is None else source.trial.parameters,
        warnings=tuple(source.warnings),
        is_dpro=compat is not None,
    )
    _list(described, path, shown, files)


def _list(
    described: "TrialStatistics", path: Path, shown: ListOptions, files: ResultFiles
) -> None:
    """Write the files of a list of operations, and print its first rows."""
    from fastcomm.compat.dpro import statistics, tables

    if files.html is not None:
        from fastcomm.compat.dpro import page
        from fastcomm.show.pages import write as write_page

        write_page(page.operations_page(described, str(path)), files.html)
    if files.output is not None:
        from fastcomm.show.files import write_result

        write_result(described, files.output, "stats", "ops", xlsx=files.xlsx)
    head = shown.top or (None if files.as_json else _ROWS)
    rows = tuple(statistics.sort_rows(described.operations, by_avg=shown.sort, head=head))
    show = partial(tables.show_statistics, chosen=rows)
    give(replace(described, rows=rows), replace(files, output=None), "stats", show)


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
    from fastcomm.compat.dpro import trial
    from fastcomm.files import refuse_inputs

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
    *options_of(EditOptions),
    option_of(TrialReplayOptions, "bottleneck"),
    trace_option,
    *options_of(
        TrialReplayOptions,
        *("repeat", "unlimited_updates", "compat", "host_clocks", "nccl_algorithm"),
        *("clip_updates", "barrier", "daydream", "hosts", "fuse", "tensors"),
    ),
    workers_option("threads", needs=("--bottleneck",)),
]


@run.command("replay", has_tables=True, epilog=_example("replay trial/ --scale comm=0.5"))
@click.argument("path", metavar="TRIAL", type=TrialPath("what-if"))
@with_options(_REPLAY)
@result_options("replay.json, nodes and edges as Parquet, and the graph as GraphML", xlsx=False)
@builds(options=TrialReplayOptions)
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
    from fastcomm.compat.dpro import tables
    from fastcomm.compat.dpro.analysis import read_trial, session_of_trial
    from fastcomm.errors import TraceFileError

    if not path.is_dir():
        raise TraceFileError(
            f"{path}: a uniform trace has no dependencies to replay; give a dPRO trial (a "
            "directory), or traces of a profiler to fastcomm what-if"
        )
    trial = read_trial(path, options)
    warn(trial.warnings)
    session = session_of_trial(trial, options, workers=workers)
    if files.output is not None:
        tables.write(session, files.output)
    if files.trace_path is not None:
        tables.write_trace(session.changed or session.replayed, files.trace_path)
    if files.html is not None:
        from fastcomm.compat.dpro import page
        from fastcomm.compat.dpro.schedule import replay_timeline
        from fastcomm.show.pages import write as write_page

        write_page(page.page(session, str(path), replay_timeline(session)), files.html)
    give(session, replace(files, output=None), "replay", tables.show)
