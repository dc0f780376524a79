"""``fastcomm report``."""

from pathlib import Path
from typing import Any

import click

from fastcomm.cli.messages import say
from fastcomm.cli.options import OutputFile, engine_of, reading_words
from fastcomm.cli.results import compute, measure_options

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
    ctx: click.Context, /, paths: tuple[str, ...], output: Path, no_data: bool, **words: Any
) -> None:
    """Write one page that says what communication costs a run, and what to do next.

    The page is one HTML file that needs no network: what matters most with the next command to
    run, then charts and tables of all metrics and of the critical path. PATH is what `fastcomm
    metrics` takes. The critical path goes through all ranks where they are few, else through
    the one that computes the most.
    """
    from fastcomm.cli import INCOMPLETE
    from fastcomm.cli.windows import opened_whole
    from fastcomm.report.html.run_page import write_report

    with engine_of(words) as engine:
        found = compute(paths, words, engine, with_tables=True)
    whole = None if words["no_path"] else opened_whole(paths, words)
    write_report(
        found,
        output,
        run=whole,
        paths=paths,
        options=reading_words(words),
        with_data=not no_data,
    )
    say(f"wrote {output}")
    if found.failed:
        ctx.exit(INCOMPLETE)
