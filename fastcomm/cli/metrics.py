"""``fastcomm metrics``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.cli.options import ExecutionOptions, executor_for
from fastcomm.cli.results import measure, measure_options, result_options
from fastcomm.options import MetricsOptions, ReadOptions

if TYPE_CHECKING:
    from fastcomm.metrics.result import Metrics


_EXAMPLES = """\b
Examples:
  fastcomm metrics traces/ --link-bandwidth 400Gbit/s
  fastcomm metrics traces/ --tp 2 --pp 4 --workers 8 --output report/
  fastcomm metrics traces/ --json | jq .breakdown.exact
"""


@click.command("metrics", epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--full",
    is_flag=True,
    help="Print all tables: waits by parallelism, collectives, windows, process groups.",
)
@click.option(
    "--spec",
    is_flag=True,
    help="Print the specification's formulas, and utilization by the bytes of --bytes.",
)
@measure_options
@result_options("Write every table as CSV and Parquet, and metrics.json.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    paths: tuple[str, ...],
    full: bool,
    spec: bool,
    as_json: bool,
    output: Path | None,
    xlsx: bool,
    html: Path | None,
    metrics: MetricsOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Measure what communication costs a training run, by parallelism.

    PATH is a directory of traces, or files, or globs: of the PyTorch profiler (.json[.gz]),
    exports of Nsight Systems (.sqlite, parquetdir, arrowdir), or what fastcomm ingest wrote.
    Printed is one screen: the largest part of a step, the causes of lost time (stragglers, slow
    links, late hosts, imbalanced stages, hot experts) with their cost, where the time of a step
    goes, one line each for DP, TP, PP, EP and CP, and the ranks that make others wait. --full
    prints all tables.

    Where the traces do not name their process groups, say how ranks are laid out (--tp, --pp,
    --ep, --cp, --order). Exit codes: 0 done, 1 an error, 2 wrong usage, 3 done without some
    ranks (--keep-going).
    """
    from fastcomm.cli import INCOMPLETE

    wants_tables = output is not None or html is not None
    with executor_for(execution) as executor:
        options = replace(metrics, with_tables=wants_tables)
        found = measure(paths, reading, options, executor)
    if output is not None:
        from fastcomm.report import files

        files.write_metrics(found, output, xlsx=xlsx)
    if html is not None:
        from fastcomm.report.commands import reading_arguments
        from fastcomm.report.html import run_page
        from fastcomm.report.html import write as write_page

        page = run_page.run_page(found, paths, options=reading_arguments(reading))
        write_page(page, html)
    show(found, as_json, full=full, spec=spec)
    if found.failed:
        ctx.exit(INCOMPLETE)


def show(found: "Metrics", as_json: bool, *, full: bool, spec: bool) -> None:
    """Print the result to stdout: as JSON, or for a person on one screen."""
    if as_json:
        from fastcomm import result

        click.echo(result.text(found.to_dict()))
        return

    from fastcomm.report import terminal

    terminal.show(found, full=full, spec=spec)
