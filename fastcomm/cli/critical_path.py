"""``fastcomm critical-path``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.checks import literals
from fastcomm.cli import INCOMPLETE
from fastcomm.cli.commands import COMPAT, OUTPUT, RULES, OptionsCommand, of_field, option
from fastcomm.cli.options import ExecutionOptions, builds, run_options
from fastcomm.cli.results import (
    PathFiles,
    ResultFiles,
    compat_option,
    print_json,
    result_options,
)
from fastcomm.cli.values import Output
from fastcomm.cli.windows import find_path, overlay_option, path_options
from fastcomm.options import PathOptions, ReadOptions

if TYPE_CHECKING:
    from fastcomm.critical_path import CriticalPath

_EXAMPLES = """\b
Examples:
  fastcomm critical-path traces/ --step 12
  fastcomm critical-path traces/ --rank 3
  fastcomm critical-path trace.json.gz --annotation ProfilerStep --compat hta
  fastcomm critical-path traces/ --rank 3 --overlay path.json.gz --save path
  fastcomm critical-path traces/ --rank 3 --times simulated.csv
  fastcomm critical-path astra/trace.0.et
"""


@click.command("critical-path", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@path_options
@overlay_option(not_with=("--dask",))
@option(
    "--all-events",
    is_flag=True,
    group=OUTPUT,
    needs=("--overlay",),
    help="Keep every event in the file of --overlay.",
)
@option(
    "--all-edges",
    is_flag=True,
    group=OUTPUT,
    needs=("--overlay",),
    help="Draw every edge in the file of --overlay.",
)
@option(
    "--save",
    type=Output(),
    metavar="DIR",
    group=OUTPUT,
    help="Write the graph and its path to DIR.zip.",
)
@option(
    "--deps",
    **of_field(PathOptions, "deps"),
    metavar="data",
    group=RULES,
    help="Also report operators that could start earlier if they waited only for their data.",
)
@option(
    "--execution-trace",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    group=RULES,
    needs=("--deps",),
    help="Execution trace for --deps. Default: torch_et_RANK.json or pytorch_et_RANK.json.",
)
@option(
    "--times",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    group=RULES,
    not_with=("--compat", "--deps", "--overlay"),
    help="Use the times of FILE (Parquet or CSV), such as a simulator's, instead of the "
    "measured ones.",
)
@compat_option(*literals(PathOptions, "compat"), of="HTA, with the first step by default")
@option(
    "--zero-weight-launches",
    is_flag=True,
    group=COMPAT,
    needs=("--compat hta",),
    help="Add HTA's edges of weight 0 from every launch (with --compat hta).",
)
@run_options
@result_options("critical_path.json, and the path edge by edge as CSV and Parquet")
@builds(files=ResultFiles, path_files=PathFiles)
@click.pass_context
def run(
    ctx: click.Context,
    /,
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
    alone = path_files.overlay is not None or path_files.save is not None
    critical = find_path(paths, path_options, reading, execution, alone=alone)
    if times is not None:
        from fastcomm.analyses.critical_path import with_times_of

        critical = with_times_of(critical, times)
    _write_path_files(critical, path_files)
    if files.html is not None:
        _write_page(critical, paths, path_options, reading, files.html)
    _show(critical, files)
    if critical.skipped:
        ctx.exit(INCOMPLETE)


def _write_path_files(critical: "CriticalPath", files: PathFiles) -> None:
    """Write --overlay and --save."""
    if files.overlay is not None:
        from fastcomm.analyses.critical_path import draw

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
    from fastcomm.report.commands import reading_arguments, window_arguments
    from fastcomm.report.html import critical as pages
    from fastcomm.report.html import write as write_page

    options = [*reading_arguments(reading), *window_arguments(window)]
    if critical.is_joined and reading.keep_going:
        options.append("--keep-going")
    write_page(pages.page(critical, paths, options), html)


def _show(path: "CriticalPath", files: ResultFiles) -> None:
    """Print the path, and write its files if --output names a directory."""
    from fastcomm.report import critical_path as report

    if files.output is not None:
        report.write(path, files.output, xlsx=files.xlsx)
    if files.as_json:
        print_json(path)
    else:
        report.show(path)
