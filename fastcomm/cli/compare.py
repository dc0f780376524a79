"""``fastcomm compare``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli.measuring import compute, measure_options
from fastcomm.cli.options import engine_of
from fastcomm.cli.results import result_options

if TYPE_CHECKING:
    from fastcomm.engine.engine import Engine

_EXAMPLES = """\b
Examples:
  fastcomm compare monday/ tuesday/
  fastcomm metrics monday/ --output baseline/; fastcomm compare baseline/ tuesday/
  fastcomm compare baseline/ traces/ --fail-if 'iteration.mean_ns > +3%' \\
    --fail-if 'overlap.average_overlap_ratio < 50%'
"""


@click.command("compare", epilog=_EXAMPLES)
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--fail-if",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Exit with 4 if this holds: 'iteration.mean_ns > +3%' is of the change, "
    "'breakdown.exact.idle > 20%' of the value after. Repeatable; --json lists the names.",
)
@measure_options
@result_options("Write compare.json, and parts and values as CSV and Parquet.", html=False)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    before: Path,
    after: Path,
    conditions: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    **words: Any,
) -> None:
    """Say what changed between two runs, ranked by its effect on the step.

    BEFORE and AFTER are directories of traces, stored runs, or metrics that were kept: a file
    of fastcomm metrics --json, or a folder of its --output. The change of the step is split
    exactly into the parts of the time breakdown. Options on reading hold for both runs.

    Exit codes: 0 done, 1 an error, 2 wrong usage, 3 done without some ranks (--keep-going),
    4 a condition of --fail-if holds.
    """
    from fastcomm.cli import INCOMPLETE, REGRESSED
    from fastcomm.metrics.comparison import compare
    from fastcomm.metrics.conditions import Condition
    from fastcomm.report import compare as report

    parsed = [Condition.parsed(text) for text in conditions]
    with engine_of(words) as engine:
        metrics = [_metrics(path, words, engine) for path in (before, after)]
    found = compare(*metrics)
    holding = [each.text for each in parsed if each.holds(found)]
    if output is not None:
        report.write(found, holding, output, xlsx=words["xlsx"])
    if as_json:
        click.echo(report.json_text(found, holding))
    else:
        report.show(found, [each.text for each in parsed], holding)
    if holding:
        ctx.exit(REGRESSED)
    if any(each["failed"] for each in metrics):
        ctx.exit(INCOMPLETE)


def _metrics(path: Path, words: dict[str, Any], engine: "Engine") -> dict[str, Any]:
    """The metrics of a run, read from where they were kept or measured now."""
    from fastcomm.metrics import saved

    if (kept := saved.read(path)) is not None:
        return kept
    return compute((str(path),), words, engine).to_dict()
