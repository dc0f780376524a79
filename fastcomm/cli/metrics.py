"""``fastcomm metrics``."""

from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli.html_option import html_option
from fastcomm.cli.options import engine_of, run_options

if TYPE_CHECKING:
    from fastcomm.engine.engine import Engine
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
    "--link-bandwidth",
    metavar="RATE",
    help='Bandwidth of one GPU\'s link, one direction: "400Gbit/s", "50GB/s".',
)
@click.option(
    "--bytes",
    "byte_kind",
    type=click.Choice(["payload", "bus", "msg"]),
    default="payload",
    show_default=True,
    help="Which bytes bandwidth and volume count.",
)
@click.option("--iterations", metavar="LIST", help="Only iterations of these numbers: 4-6.")
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--output",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Write every table as CSV and Parquet, and metrics.json.",
)
@html_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    paths: tuple[str, ...],
    as_json: bool,
    output: str | None,
    html: str | None,
    **words: Any,
) -> None:
    """Measure what communication costs a training run, by parallelism.

    PATH is a directory of traces, or files, or globs: of the PyTorch profiler (.json[.gz]),
    exports of Nsight Systems (.sqlite, parquetdir, arrowdir), or what fastcomm ingest wrote.
    Printed are: the time breakdown of an iteration, how much of the communication hides behind
    compute, the windows between phases, bandwidth and volume of DP, TP, PP, EP and CP.

    Where the traces do not name their process groups, say how ranks are laid out (--tp, --pp,
    --ep, --cp, --order). Exit codes: 0 done, 1 an error, 2 wrong usage, 3 done without some
    ranks (--keep-going).
    """
    from fastcomm.cli import INCOMPLETE

    with engine_of(words) as engine:
        found = compute(paths, words, engine)
    if output is not None:
        from fastcomm.report import tables

        tables.write(found, output)
    if html is not None:
        from fastcomm.report.html import measured, render

        render.write(measured.page(found, paths), html)
    show(found, as_json)
    if found.failed:
        ctx.exit(INCOMPLETE)


def compute(paths: tuple[str, ...], words: dict[str, Any], engine: "Engine") -> "Metrics":
    """Measure the run that the paths and the words of the options describe."""
    from fastcomm.cli.options import numbers, opened
    from fastcomm.engine import warm
    from fastcomm.engine.measure import compute_metrics
    from fastcomm.report.progress import progress

    found_run = opened(paths, words, engine)
    wanted = words["iterations"]
    if engine.is_here:
        warm.compile_kernels()
    with progress(found_run) as advance:
        return compute_metrics(
            found_run,
            link_bandwidth=words["link_bandwidth"],
            bytes=words["byte_kind"],
            iterations=numbers("--iterations", wanted) if wanted else None,
            workers=engine,
            keep_going=words["keep_going"],
            progress=advance,
        )


def show(found: "Metrics", as_json: bool) -> None:
    """Print the result to stdout, for a machine or for a person."""
    if as_json:
        import json

        click.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        return

    from fastcomm.report import terminal

    terminal.show(found)
