"""``fastcomm info``."""

import click

from fastcomm.cli.commands import OptionsCommand, option
from fastcomm.cli.results import exit_if_skipped, json_option, print_json
from fastcomm.cli.runs import ExecutionOptions, opened_run
from fastcomm.cli.shared_options import run_options
from fastcomm.option_fields import READING
from fastcomm.options import ReadOptions

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
def run(
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
    from fastcomm.analyses.info import info

    with opened_run(paths, reading, execution) as opened:
        details = info(opened, all_ranks=all_ranks, anew=not reading.is_plain)
    if as_json:
        print_json(details)
    else:
        from fastcomm.report.info import show

        show(details, paths)
    exit_if_skipped(details.skipped)
