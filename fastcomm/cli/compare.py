"""``fastcomm compare``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcomm.cli.commands import OUTPUT, OptionsCommand, option
from fastcomm.cli.messages import warn
from fastcomm.cli.options import ExecutionOptions, executor_for
from fastcomm.cli.results import measure, measure_options, print_json, result_options
from fastcomm.errors import FastcommError
from fastcomm.options import MetricsOptions, ReadOptions

if TYPE_CHECKING:
    from fastcomm.metrics.result import Metrics

_EXAMPLES = """\b
Examples:
  fastcomm compare monday/ tuesday/
  fastcomm metrics monday/ --output baseline/; fastcomm compare baseline/ tuesday/
  fastcomm compare baseline/ traces/ --fail-if 'iteration.mean_ns > +3%' \\
    --fail-if 'overlap.average_overlap_ratio < 50%'
"""


@click.command("compare", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("before")
@click.argument("after")
@option(
    "--fail-if",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    group=OUTPUT,
    is_common=True,
    help="Exit with code 4 if the condition holds, as in 'iteration.mean_ns > +3%'. "
    "Repeatable.",
)
@measure_options
@result_options("compare.json, parts and values as CSV and Parquet", html=False)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    before: str,
    after: str,
    conditions: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    xlsx: bool,
    metrics: MetricsOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Compare two runs: what changed, ranked by its effect on the step time.

    BEFORE and AFTER are directories of traces, URLs, stores, or saved metrics: a file of
    fastcomm metrics --json, or a directory of its --output. The change of the step time is
    split exactly into the parts of the breakdown. Reading options apply to both runs.

    A condition of --fail-if is on the change ('iteration.mean_ns > +3%') or on the value after
    it ('breakdown.exact.idle > 20%', 'iteration.mean_ns > 80ms'); --json lists the names. Exit
    codes: 0 done, 1 error, 2 wrong usage, 3 done without some ranks, 4 a condition holds.
    """
    from fastcomm.analyses.compare import common_ranks, compare
    from fastcomm.analyses.conditions import Condition
    from fastcomm.cli import INCOMPLETE, REGRESSED
    from fastcomm.report import details as report

    parsed = [Condition.parsed(text) for text in conditions]
    options = replace(metrics, with_tables=False)
    paths = (("BEFORE", before), ("AFTER", after))
    with executor_for(execution) as executor:

        def measured(name: str, path: str, reading: ReadOptions) -> dict[str, Any]:
            return _metrics(name, path, lambda: measure((path,), reading, options, executor))

        both = [measured(name, path, reading) for name, path in paths]
        same = both
        if (ranks := common_ranks(*both)) is not None:
            # A run is measured again by these ranks alone, if it has others.
            of_ranks = replace(reading, ranks=ranks)
            same = [
                side if set(side["ranks"]) <= set(ranks) else measured(name, path, of_ranks)
                for side, (name, path) in zip(both, paths, strict=True)
            ]
    comparison = compare(*same, whole=(both[0], both[1]))
    warn(_warnings(*(_unsaid(side, is_said=not as_json) for side in both)))
    warn(filter(None, (condition.doubt(comparison) for condition in parsed)))
    holding = tuple(condition.text for condition in parsed if condition.holds(comparison))
    comparison = replace(comparison, conditions_that_hold=holding)
    if output is not None:
        report.write(comparison, output, xlsx=xlsx)
    if as_json:
        print_json(comparison)
    else:
        report.show(comparison, [condition.text for condition in parsed])
    if holding:
        ctx.exit(REGRESSED)
    if any(side["failed"] for side in both):
        ctx.exit(INCOMPLETE)


_MOST_WARNINGS = 8


def _unsaid(metrics: dict[str, Any], *, is_said: bool) -> list[str]:
    """Return the warnings of a run; `is_said` leaves out those about missing ranks."""
    warnings = metrics.get("warnings") or []
    return [warning for warning in warnings if not (is_said and " no trace here: " in warning)]


def _warnings(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the warnings of two runs; one that both have is listed once."""
    return [
        *_first([text for text in before if text in after]),
        *(f"before: {text}" for text in _first([t for t in before if t not in after])),
        *(f"after: {text}" for text in _first([t for t in after if t not in before])),
    ]


def _first(warnings: Sequence[str]) -> list[str]:
    """Return the first 8 warnings, and a line on how many more there are."""
    lines = list(warnings[:_MOST_WARNINGS])
    more = len(warnings) - len(lines)
    return [*lines, f"and {more} more, which `fastcomm metrics` prints"] if more else lines


def _metrics(name: str, path: str, measure_now: "Callable[[], Metrics]") -> dict[str, Any]:
    """Read the saved metrics at `path`, or measure the run there now.

    `name` is BEFORE or AFTER; errors begin with it.
    """
    from fastcomm.analyses import compare as analyses_compare
    from fastcomm.files import is_local, place

    try:
        where = place(path)
        if is_local(where) and (saved := analyses_compare.read(where)) is not None:
            return saved
        return measure_now().to_dict()
    except FastcommError as error:
        raise type(error)(f"{name} ({path}): {error}") from error
