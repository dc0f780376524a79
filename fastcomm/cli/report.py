"""``fastcomm report``."""

from pathlib import Path

import click

from fastcomm.cli.messages import say
from fastcomm.cli.options import ExecutionOptions, OutputFile, executor_for
from fastcomm.cli.results import measure, measure_options
from fastcomm.options import MetricsOptions, ReadOptions

_EXAMPLES = """\b
Examples:
  fastcomm report traces/ --link-bandwidth 400Gbit/s
  fastcomm report traces/ --tp 8 --pp 4 --workers 16 -o monday.html
"""


@click.command("report", epilog=_EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="The page; the tables lie beside it, in a folder of its name with -data.",
)
@click.option("--no-data", is_flag=True, help="Write the page alone, without the tables.")
@click.option("--no-path", is_flag=True, help="Search no critical path.")
@measure_options
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    paths: tuple[str, ...],
    output: Path,
    no_data: bool,
    no_path: bool,
    metrics: MetricsOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Write one page that says what communication costs a run, and what to do next.

    The page is one HTML file that needs no network: what matters most with the next command to
    run, then charts and tables of all metrics and of the critical path. PATH is what `fastcomm
    metrics` takes. The critical path goes through all ranks where they are few, else through
    the one that computes the most.
    """
    from fastcomm.analyses.preparation import open_traces
    from fastcomm.analyses.report import run_path
    from fastcomm.cli import INCOMPLETE
    from fastcomm.report.commands import reading_arguments
    from fastcomm.report.html.run_page import write_report

    with executor_for(execution) as executor:
        found = measure(paths, reading, metrics, executor)
        whole = None if no_path else open_traces(paths, reading, executor, whole=True)
    write_report(
        found,
        output,
        critical=None if whole is None else run_path(found, whole),
        paths=paths,
        options=reading_arguments(reading),
        with_data=not no_data,
    )
    say(f"wrote {output}")
    if found.failed:
        ctx.exit(INCOMPLETE)
