"""``fastcomm report``."""

from functools import partial
from pathlib import Path

import click

from fastcomm.cli.commands import OptionsCommand, options_of
from fastcomm.cli.messages import say
from fastcomm.cli.results import (
    exit_if_skipped,
    html_option,
    json_option,
    output_option,
    print_written,
)
from fastcomm.cli.run_options import (
    ExecutionOptions,
    measure_options,
    opened_run,
    throughput_options,
    with_options,
)
from fastcomm.options import ReadOptions
from fastcomm.report.options import ReportOptions

_PAGE = ("no_data", "no_path", "no_timeline", "timeline_ranks", "timeline_steps")
_EXAMPLES = """\b
Examples:
  fastcomm report traces/ --link-bandwidth 400Gbit/s
  fastcomm report traces/ --tp 8 --pp 4 --workers 16 --html monday.html
"""


@click.command("report", cls=OptionsCommand, epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@html_option(default="report.html")
@output_option("Files: all tables as Parquet. Default: report-data/ beside the page")
@with_options(options_of(ReportOptions, *_PAGE))
@throughput_options
@json_option
@partial(measure_options, kind=ReportOptions)
def run(
    *,
    paths: tuple[str, ...],
    html: Path,
    output: Path | None,
    as_json: bool,
    metrics: ReportOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Write an HTML page of a run: what communication costs, and what to do next.

    The page is one file that needs no network: the most important findings with the next
    command to run, a timeline of all ranks in three steps, then charts and tables of all
    metrics and of the critical path. PATH is as for fastcomm metrics. The critical path goes
    through all ranks of a small run, otherwise through the rank that computes the longest.
    """
    if metrics.no_data and output is not None:
        raise click.UsageError("--output has no effect with --no-data")
    from fastcomm.metrics.findings.suggestions import reading_arguments
    from fastcomm.report.analysis import results_for_page
    from fastcomm.report.page import write_report

    with opened_run(paths, reading, execution) as run:
        results = results_for_page(run, metrics)
    write_report(
        results,
        html,
        paths=paths,
        options=reading_arguments(reading),
        with_data=not metrics.no_data,
        folder=output,
    )
    measured = results.metrics
    say(f"wrote {html}")
    if as_json:
        data = output or html.with_name(f"{html.stem}-data")
        written = [html] if metrics.no_data else [html, data]
        ranks = len(measured.ranks)
        print_written("html", written, ranks=ranks, skipped=measured.skipped)
    exit_if_skipped(measured.skipped)
