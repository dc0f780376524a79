"""``fastcomm compare``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli.messages import warn
from fastcomm.cli.options import engine_of
from fastcomm.cli.results import compute, measure_options, print_json, result_options
from fastcomm.errors import FastcommError

if TYPE_CHECKING:
    from fastcomm.executors.executor import Executor

_EXAMPLES = """\b
Examples:
  fastcomm compare monday/ tuesday/
  fastcomm metrics monday/ --output baseline/; fastcomm compare baseline/ tuesday/
  fastcomm compare baseline/ traces/ --fail-if 'iteration.mean_ns > +3%' \\
    --fail-if 'overlap.average_overlap_ratio < 50%'
"""


@click.command("compare", epilog=_EXAMPLES)
@click.argument("before")
@click.argument("after")
@click.option(
    "--fail-if",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Exit with 4 if this holds: 'iteration.mean_ns > +3%' is of the change, "
    "'breakdown.exact.idle > 20%' and 'iteration.mean_ns > 80ms' are of the value after. "
    "Repeatable; --json lists the names.",
)
@measure_options
@result_options("Write compare.json, and parts and values as CSV and Parquet.", html=False)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    before: str,
    after: str,
    conditions: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    **words: Any,
) -> None:
    """Say what changed between two runs, ranked by its effect on the step.

    BEFORE and AFTER are directories of traces (or URLs), stored runs, or metrics that were
    kept: a file of fastcomm metrics --json, or a folder of its --output. The change of the step
    is split exactly into the parts of the time breakdown. Options on reading hold for both.

    Exit codes: 0 done, 1 an error, 2 wrong usage, 3 done without some ranks (--keep-going),
    4 a condition of --fail-if holds.
    """
    from dataclasses import replace

    from fastcomm.analyses.compare import common_ranks, compare
    from fastcomm.analyses.conditions import Condition
    from fastcomm.cli import INCOMPLETE, REGRESSED
    from fastcomm.report import compare as report

    parsed = [Condition.parsed(text) for text in conditions]
    with engine_of(words) as engine:
        paths = (("BEFORE", before), ("AFTER", after))
        metrics = [_metrics(name, path, words, engine) for name, path in paths]
        same = metrics
        if (ranks := common_ranks(*metrics)) is not None:
            same = [
                _of_ranks(ranks, each, place, words, engine)
                for each, place in zip(metrics, paths, strict=True)
            ]
    found = compare(*same, whole=(metrics[0], metrics[1]))
    warn(_warnings(*(_unsaid(each, is_said=not as_json) for each in metrics)))
    warn(filter(None, (each.doubt(found) for each in parsed)))
    holding = tuple(each.text for each in parsed if each.holds(found))
    found = replace(found, conditions_that_hold=holding)
    if output is not None:
        report.write(found, output, xlsx=words["xlsx"])
    if as_json:
        print_json(found)
    else:
        report.show(found, [each.text for each in parsed])
    if holding:
        ctx.exit(REGRESSED)
    if any(each["failed"] for each in metrics):
        ctx.exit(INCOMPLETE)


_MOST_WARNINGS = 8


def _unsaid(metrics: dict[str, Any], *, is_said: bool) -> list[str]:
    """Return the warnings of a run, without missing ranks where these are said elsewhere."""
    warnings = metrics.get("warnings") or []
    return [each for each in warnings if not (is_said and " no trace here: " in each)]


def _of_ranks(
    ranks: tuple[int, ...],
    metrics: dict[str, Any],
    place: tuple[str, str],
    words: dict[str, Any],
    engine: "Executor",
) -> dict[str, Any]:
    """Measure a run again by these ranks alone, if it has others and its traces are there."""
    if set(metrics["ranks"]) <= set(ranks):
        return metrics
    return _metrics(*place, {**words, "ranks": ",".join(map(str, ranks))}, engine)


def _warnings(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the warnings of both runs; those that both have once."""
    return [
        *_first([text for text in before if text in after]),
        *(f"before: {text}" for text in _first([t for t in before if t not in after])),
        *(f"after: {text}" for text in _first([t for t in after if t not in before])),
    ]


def _first(warnings: Sequence[str]) -> list[str]:
    """Return the first warnings of a run, and how many more there are."""
    lines = list(warnings[:_MOST_WARNINGS])
    more = len(warnings) - len(lines)
    return [*lines, f"and {more} more, which `fastcomm metrics` prints"] if more else lines


def _metrics(name: str, path: str, words: dict[str, Any], engine: "Executor") -> dict[str, Any]:
    """Read the metrics of a run from where they were kept, or measure them now.

    Errors say which of the two runs they are of.
    """
    from fastcomm.analyses import compare as analyses_compare
    from fastcomm.remote import is_local, place

    try:
        where = place(path)
        if is_local(where) and (kept := analyses_compare.read(where)) is not None:
            return kept
        return compute((path,), words, engine).to_dict()
    except FastcommError as error:
        raise type(error)(f"{name} ({path}): {error}") from error
