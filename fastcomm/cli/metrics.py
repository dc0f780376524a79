"""``fastcomm metrics``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.cli.commands import OUTPUT, OptionsCommand, option
from fastcomm.cli.options import ExecutionOptions, executor_for, open_traces
from fastcomm.cli.results import measure, measure_options, result_options, throughput_options
from fastcomm.options import MetricsOptions, ReadOptions

if TYPE_CHECKING:
    from fastcomm.metrics.result import Metrics


_EXAMPLES = """\b
Examples:
  fastcomm metrics traces/ --link-bandwidth 400Gbit/s
  fastcomm metrics traces/ --cluster dgx-h100
  fastcomm metrics traces/ --tp 2 --pp 4 --workers 8 --output report/
  fastcomm metrics traces/ --json | jq .breakdown.exact
"""


@click.command("metrics", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@option(
    "--full",
    is_flag=True,
    group=OUTPUT,
    is_common=True,
    not_with=("--json",),
    help="Print all tables: waits, collectives, windows, process groups.",
)
@option(
    "--spec",
    is_flag=True,
    group=OUTPUT,
    not_with=("--json",),
    help="Print the specification formulas, and utilization by --bytes.",
)
@throughput_options
@measure_options
@result_options("metrics.json, and every table as CSV and Parquet")
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
    """Measure where a step's time goes, and what communication costs, by parallelism.

    PATH is a directory, file or glob of traces: PyTorch profiler (.json, .json.gz), Nsight
    Systems exports (.sqlite, parquetdir, arrowdir), or a store of fastcomm ingest. Prints one
    screen: the largest part of the step, causes of lost time (stragglers, slow links, late
    hosts, imbalanced stages, hot experts) with their cost, and one line per parallelism.

    If the traces do not name their process groups, pass the run layout (--tp, --pp, ...).
    Exit codes: 0 done, 1 error, 2 wrong usage, 3 done without some ranks (--keep-going).
    """
    from fastcomm.cli import INCOMPLETE

    wants_tables = output is not None or html is not None
    with executor_for(execution) as executor:
        options = replace(metrics, with_tables=wants_tables)
        run = open_traces(paths, reading, executor)
        metrics_ = measure(run, reading, options, executor)
    if output is not None:
        from fastcomm.report import files

        files.write_metrics(metrics_, output, xlsx=xlsx)
    if html is not None:
        from fastcomm.report.commands import reading_arguments
        from fastcomm.report.html import run_page
        from fastcomm.report.html import write as write_page

        page = run_page.run_page(metrics_, paths, options=reading_arguments(reading))
        write_page(page, html)
    show(metrics_, as_json, full=full, spec=spec)
    if metrics_.skipped:
        ctx.exit(INCOMPLETE)


def show(metrics: "Metrics", as_json: bool, *, full: bool, spec: bool) -> None:
    """Print the result to stdout: as one JSON object, or for a person on one screen.

    Parameters
    ----------
    metrics
        The result.
    as_json
        Whether to print JSON, which is always complete.
    full, spec
        Whether the text has all tables, and the breakdown by the specification's formulas.

    """
    if as_json:
        from fastcomm import result

        click.echo(result.text(metrics.to_dict()))
        return

    from fastcomm.report import terminal

    terminal.show(metrics, full=full, spec=spec)
