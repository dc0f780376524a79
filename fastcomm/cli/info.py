"""``fastcomm info``."""

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from fastcomm.cli.commands import READING, OptionsCommand, option
from fastcomm.cli.options import ExecutionOptions, executor_for, open_traces, run_options
from fastcomm.cli.results import json_option, print_json
from fastcomm.options import ReadOptions

if TYPE_CHECKING:
    from fastcomm.analyses.info import Info
    from fastcomm.executors import Executor

_EXAMPLES = """\b
Examples:
  fastcomm info traces/
  fastcomm info traces/ --all --workers 8
  fastcomm info store/ --json | jq .groups
"""


@click.command("info", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@option(
    "--all",
    "all_ranks",
    is_flag=True,
    group=READING,
    is_common=True,
    help="Read every rank. Default: the first rank alone.",
)
@run_options
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    paths: tuple[str, ...],
    all_ranks: bool,
    as_json: bool,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Describe a run: format, ranks, steps, process groups, and missing data.

    PATH is as for fastcomm metrics. Reads the first rank alone, which takes seconds for a run
    of any size; of a store of fastcomm ingest, all ranks are known at once.
    """
    from fastcomm.cli import INCOMPLETE

    with executor_for(execution) as executor:
        details = _inspected(paths, reading, executor, all_ranks=all_ranks)
    if as_json:
        print_json(details)
    else:
        from fastcomm.report.info import show

        show(details, paths)
    if details.skipped:
        ctx.exit(INCOMPLETE)


def _inspected(
    paths: tuple[str, ...], reading: ReadOptions, executor: "Executor", *, all_ranks: bool
) -> "Info":
    """Describe the run at the paths; `all_ranks` reads every rank, not the first alone."""
    from fastcomm.analyses import preparation
    from fastcomm.analyses.info import info
    from fastcomm.report.console import progress

    found_run = open_traces(paths, reading, executor)
    if executor.is_here:
        preparation.compile_kernels()
    with progress(found_run) as advance:
        return info(
            found_run,
            all_ranks=all_ranks,
            anew=replace(reading, ranks=None, keep_going=False) != ReadOptions(),
            workers=executor,
            keep_going=reading.keep_going,
            progress=advance if all_ranks else None,
        )
