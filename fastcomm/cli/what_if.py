"""``fastcomm what-if``."""

from pathlib import Path

import click

from fastcomm.cli.commands import OptionsCommand, options_of
from fastcomm.cli.critical_path import find_path
from fastcomm.cli.results import (
    ResultFiles,
    exit_if_skipped,
    give,
    overlay_option,
    result_options,
)
from fastcomm.cli.runs import ExecutionOptions
from fastcomm.cli.shared_options import builds, path_options, run_options, with_options
from fastcomm.options import EditOptions, PathOptions, ReadOptions

_EXAMPLES = """\b
Examples:
  fastcomm what-if traces/
  fastcomm what-if traces/ --scale comm:DP=0.5 --scale 'kernel:/flash_fwd/=0.8'
  fastcomm what-if traces/ --set link:TP=200:800:200Gbit/s --json
  fastcomm what-if traces/ --heal rank:5 --overlap DP --remove launches
  fastcomm what-if traces/ --scale compute=0.5 --overlay after.json.gz
"""


@click.command("what-if", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@path_options
@with_options(options_of(EditOptions))
@overlay_option()
@run_options
@result_options("what_if.json; path, sweeps, candidates as CSV and Parquet")
@builds(edits=EditOptions)
def run(
    *,
    paths: tuple[str, ...],
    edits: EditOptions,
    overlay: Path | None,
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
    from fastcomm.graph.edits import plan
    from fastcomm.report import critical_path as report

    planned = plan(edits)
    path = find_path(paths, path_options, reading, execution)
    answer = path.predict(planned)
    if overlay is not None:
        from fastcomm.critical_path.overlay import write_what_if

        write_what_if(answer, overlay)
    if files.html is not None:
        from fastcomm.report.html import critical
        from fastcomm.report.html.document import write as write_page

        write_page(critical.what_if(answer, paths), files.html)
    give(answer, files, "what_if", report.show_what_if)
    exit_if_skipped(path.skipped)
