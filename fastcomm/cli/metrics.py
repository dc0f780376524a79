"""``fastcomm metrics``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli.measuring import compute, measure_options
from fastcomm.cli.options import engine_of, reading_words
from fastcomm.cli.results import result_options

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
@measure_options
@result_options("Write every table as CSV and Parquet, and metrics.json.")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    paths: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    html: str | None,
    **words: Any,
) -> None:
    """Measure what communication costs a training run, by parallelism.

    PATH is a directory of traces, or files, or globs: of the PyTorch profiler (.json[.gz]),
    exports of Nsight Systems (.sqlite, parquetdir, arrowdir), or what fastcomm ingest wrote.
    Printed are: the largest part of a step, the causes of lost time (stragglers, slow links,
    late hosts, imbalanced stages, hot experts) with their cost, the time breakdown of an
    iteration, how much of the communication overlaps compute, the windows between phases,
    bandwidth and volume of DP, TP, PP, EP and CP, and who waits for whom.

    Where the traces do not name their process groups, say how ranks are laid out (--tp, --pp,
    --ep, --cp, --order). Exit codes: 0 done, 1 an error, 2 wrong usage, 3 done without some
    ranks (--keep-going).
    """
    from fastcomm.cli import INCOMPLETE

    with engine_of(words) as engine:
        wants_tables = output is not None or html is not None
        found = compute(paths, words, engine, with_tables=wants_tables)
    if output is not None:
        from fastcomm.report import tables

        tables.write(found, output, xlsx=words["xlsx"])
    if html is not None:
        from fastcomm.report.html import measured, render

        page = measured.page(found, paths, options=reading_words(words))
        render.write(page, html)
    show(found, as_json)
    if found.failed:
        ctx.exit(INCOMPLETE)


def show(found: "Metrics", as_json: bool) -> None:
    """Print the result to stdout, for a machine or for a person."""
    if as_json:
        from fastcomm.report import json_text

        click.echo(json_text.text(found.to_dict()))
        return

    from fastcomm.report import terminal

    terminal.show(found)
