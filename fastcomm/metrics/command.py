"""``fastcomm metrics``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.cli.commands import OptionsCommand, option
from fastcomm.cli.results import (
    ResultFiles,
    exit_if_skipped,
    give,
    prometheus_option,
    result_options,
)
from fastcomm.cli.run_options import (
    ExecutionOptions,
    measure_options,
    opened_run,
    throughput_options,
)
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import MEASUREMENT, OUTPUT
from fastcomm.options import ReadOptions

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
@option(
    "--baseline",
    metavar="NAME",
    group=MEASUREMENT,
    is_common=True,
    not_with=("--json",),
    help="Compare with a baseline of `fastcomm baseline save`, beside the run.",
)
@throughput_options
@measure_options
@prometheus_option
@result_options("metrics.json, and every table as CSV and Parquet")
def run(
    *,
    paths: tuple[str, ...],
    full: bool,
    spec: bool,
    prometheus: Path | None,
    baseline: str | None,
    files: ResultFiles,
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
    saved = None
    if baseline is not None:
        from fastcomm.comparison.baselines import load_baseline

        saved = load_baseline(baseline, paths[0])
    wants_tables = files.output is not None or files.html is not None
    measured = measure(paths, replace(metrics, with_tables=wants_tables), reading, execution)
    if files.html is not None:
        from fastcomm.metrics.findings.suggestions import reading_arguments
        from fastcomm.report.page import report_page
        from fastcomm.show.pages import write as write_page

        page = report_page(measured, paths, options=reading_arguments(reading))
        write_page(page, files.html)
    if prometheus is not None:
        from fastcomm.metrics.prometheus import write as write_prometheus

        write_prometheus(measured, prometheus)
    from fastcomm.metrics import tables

    give(measured, files, "metrics", partial(tables.show, full=full, spec=spec))
    if saved is not None:
        from fastcomm.comparison.analysis import compare
        from fastcomm.comparison.tables import show

        click.echo(f"\nAgainst the baseline {baseline}:")
        show(compare(saved, measured.contents()), ())
    exit_if_skipped(measured.skipped)


def measure(
    paths: tuple[str, ...],
    options: MetricsOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> "Metrics":
    """Measure traces, or a profiled window of which traces were not kept."""
    from fastcomm.metrics.computation import compute_metrics
    from fastcomm.watch.windows import ProfiledWindow

    if (window := ProfiledWindow.with_partials(paths)) is not None:
        window.check_options(options, reading)
        return window.metrics(options)
    with opened_run(paths, reading, execution) as run:
        return compute_metrics(run, options)
