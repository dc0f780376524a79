"""``fastcomm critical-path`` and ``fastcomm what-if``."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.checks import option_name
from fastcomm.cli.commands import OptionsCommand, option, options_of
from fastcomm.cli.messages import warn
from fastcomm.cli.results import (
    ResultFiles,
    exit_if_skipped,
    give,
    overlay_option,
    result_options,
    say_skipped,
    trace_option,
)
from fastcomm.cli.run_options import (
    ExecutionOptions,
    builds,
    opened_run,
    path_options,
    run_options,
    with_options,
)
from fastcomm.critical_path.options import PathOptions, WhatIfOptions
from fastcomm.errors import ConfigError
from fastcomm.option_fields import OUTPUT, RULES, option_field
from fastcomm.options import ReadOptions

if TYPE_CHECKING:
    from fastcomm.critical_path.result import CriticalPath
    from fastcomm.trace.run_traces import RunTraces

_EXAMPLES = """\b
Examples:
  fastcomm critical-path traces/ --step 12
  fastcomm critical-path traces/ --rank 3
  fastcomm critical-path trace.json.gz --annotation ProfilerStep --compat hta
  fastcomm critical-path traces/ --rank 3 --overlay path.json.gz --save path
  fastcomm critical-path traces/ --rank 3 --times simulated.csv
  fastcomm critical-path astra/trace.0.et
"""
_WHAT_IF_EXAMPLES = """\b
Examples:
  fastcomm what-if traces/
  fastcomm what-if traces/ --scale comm:DP=0.5 --scale 'kernel:/flash_fwd/=0.8'
  fastcomm what-if traces/ --set link:TP=200:800:200Gbit/s --json
  fastcomm what-if traces/ --heal rank:5 --overlap DP --remove launches
  fastcomm what-if traces/ --step 12 --bottleneck
  fastcomm what-if traces/ --scale compute=0.5 --trace after.json.gz
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFiles:
    """Files of the path of one rank: the trace with the path drawn into it, and the graph."""

    overlay: Path | None = None
    all_events: bool = option_field(
        "Keep every event in the file of --overlay.", False, group=OUTPUT, needs=("overlay",)
    )
    all_edges: bool = option_field(
        "Draw every edge in the file of --overlay.", False, group=OUTPUT, needs=("overlay",)
    )
    save: str | None = option_field(
        "Write the graph and its path to DIR.zip.", group=OUTPUT, metavar="DIR", path="new"
    )


@click.command("critical-path", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@path_options
@overlay_option(not_with=("--dask",))
@with_options(options_of(PathFiles, "all_events", "all_edges", "save"))
@with_options(
    options_of(PathOptions, "deps", "execution_trace", "compat", "zero_weight_launches")
)
@option(
    "--times",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    group=RULES,
    not_with=("--compat", "--deps", "--overlay"),
    help="Use the times of FILE (Parquet or CSV), such as a simulator's, instead of the "
    "measured ones.",
)
@run_options
@result_options("critical_path.json, and the path edge by edge as CSV and Parquet")
@builds(path_files=PathFiles)
def run(
    *,
    paths: tuple[str, ...],
    files: ResultFiles,
    path_files: PathFiles,
    path_options: PathOptions,
    times: Path | None,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Find the chain of work that determines the step time.

    PATH is a trace, or a directory of traces; also execution traces of Chakra (trace.0.et) or
    PyTorch (torch_et_0.json), whose recorded dependencies are then replayed. The path goes
    through all ranks, joined by their collectives, or through the first rank where they cannot
    be joined. Prints the time on the path by class (host, compute, communication, launch delay,
    gaps) and the operators with the most time on it. --compat, --overlay, --save and --deps
    analyze one rank, by default the first.
    """
    from fastcomm.critical_path import tables

    alone = path_files.overlay is not None or path_files.save is not None
    critical = find_path(paths, path_options, reading, execution, alone=alone)
    if times is not None:
        from fastcomm.critical_path.analysis import with_times_of

        critical = with_times_of(critical, times)
    _write_path_files(critical, path_files)
    if files.html is not None:
        _write_page(critical, paths, path_options, reading, files.html)
    give(critical, files, "critical_path", tables.show)
    exit_if_skipped(critical.skipped)


def _write_path_files(critical: "CriticalPath", files: PathFiles) -> None:
    """Write --overlay and --save."""
    if files.overlay is not None:
        from fastcomm.critical_path.analysis import draw

        draw(critical, files.overlay, all_events=files.all_events, all_edges=files.all_edges)
    if files.save is not None:
        critical.save(files.save)


def _write_page(
    critical: "CriticalPath",
    paths: tuple[str, ...],
    window: PathOptions,
    reading: ReadOptions,
    html: Path,
) -> None:
    """Write the page of a path to `html`; its commands repeat the options of this one."""
    from fastcomm.critical_path import page as pages
    from fastcomm.metrics.findings.suggestions import reading_arguments, window_arguments
    from fastcomm.show.pages import write as write_page

    options = [*reading_arguments(reading), *window_arguments(window)]
    if critical.is_joined and reading.keep_going:
        options.append("--keep-going")
    write_page(pages.page(critical, paths, options), html)


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
    from fastcomm.critical_path.analysis import execution_trace_path, is_execution_trace

    if is_execution_trace(paths):
        _refuse(options, replace(PathOptions(), rank=options.rank))
        _refuse(reading, replace(ReadOptions(), keep_going=reading.keep_going))
        _refuse(execution, ExecutionOptions())
        path = execution_trace_path(
            *paths, rank=options.rank, alone=alone, keep_going=reading.keep_going
        )
    else:
        path = _path_of_run(paths, options, reading, execution, alone=alone)
    say_skipped(path.skipped)
    return path


def _path_of_run(
    paths: tuple[str, ...],
    options: PathOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
    *,
    alone: bool,
) -> "CriticalPath":
    """Return the critical path of a window of a run."""
    from fastcomm.critical_path.analysis import critical_path

    if alone or options.is_of_one_rank:
        execution = replace(execution, workers=1)
    with opened_run(paths, reading, execution) as run:
        warn((*_without_effect(options.rank, run), *run.warnings))
        path = critical_path(run, options, alone=alone)
    warn(path.warnings[len(run.warnings) :])
    return path


def _refuse(options: Any, allowed: Any) -> None:
    """Raise ConfigError for an option that is not as in `allowed`."""
    for field in fields(options):
        if getattr(options, field.name) != getattr(allowed, field.name):
            raise ConfigError(
                f"{option_name(field.name)} has no effect on execution traces: leave it out"
            )


def _without_effect(rank: int | None, run: "RunTraces") -> list[str]:
    """Return a warning if --keep-going has no effect, since only the rank of --rank is read."""
    if not run.keep_going or rank is None or run.skipped:
        return []
    return ["--keep-going changes nothing: only the rank of --rank is read"]


@click.command("what-if", cls=OptionsCommand, has_tables=True, epilog=_WHAT_IF_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@path_options
@with_options(options_of(WhatIfOptions))
@trace_option
@run_options
@result_options("what_if.json; path, ranks, sweeps, candidates as CSV and Parquet")
@builds(edits=WhatIfOptions)
def what_if(
    *,
    paths: tuple[str, ...],
    edits: WhatIfOptions,
    files: ResultFiles,
    path_options: PathOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Predict the step time after changes; without edits, try what would shorten it most.

    Replays the events of the window with the edits: each event starts as soon as the events
    that it waited for allow. All ranks are replayed where they can be joined. WHAT is comm,
    comm:TP, op:AllReduce, compute, copy, host, kernel:NAME, kernel:/REGEX/, name:NAME, rank:5,
    link:TP, stream:7 or thread:1; + combines them. VALUE is a time, a time to add as in +5us,
    or the bandwidth of a link. FROM:TO:STEP tries several values.
    """
    from fastcomm.critical_path import tables
    from fastcomm.graph.edits import parse_edits

    planned = parse_edits(edits)
    path = find_path(paths, path_options, reading, execution)
    answer = path.predict(planned, bottleneck=edits.bottleneck)
    if files.trace_path is not None:
        from fastcomm.critical_path.overlay import write_what_if

        write_what_if(answer, files.trace_path)
    if files.html is not None:
        from fastcomm.critical_path import page
        from fastcomm.show.pages import write as write_page

        write_page(page.what_if(answer, paths), files.html)
    give(answer, files, "what_if", tables.show_what_if)
    exit_if_skipped(path.skipped)
