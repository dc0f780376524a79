"""``fastcomm compare``, and the conditions of its --fail-if."""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, Self

import click

from fastcomm.checks import shortened
from fastcomm.cli.commands import CommandGroup, OptionsCommand, option, typed_options
from fastcomm.cli.messages import warn
from fastcomm.cli.results import ResultFiles, exit_if_skipped, give, result_options
from fastcomm.cli.run_options import (
    ExecutionOptions,
    executor_for,
    measure_options,
    open_traces,
)
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import MEASUREMENT, OUTPUT
from fastcomm.options import ReadOptions
from fastcomm.units import TIME_UNITS, enumeration, format_ns

if TYPE_CHECKING:
    from fastcomm.comparison.result import Comparison
    from fastcomm.comparison.two_runs import ComparedRun
    from fastcomm.device_work.result import Kernels
    from fastcomm.executors.executor import Executor, OpenedRun
    from fastcomm.metrics.result import Metrics
    from fastcomm.timeline.timeline import Timeline

_TEXT = re.compile(
    r"\s*(\S+?)\s*(>=|<=|>|<)\s*([+-]?)(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(%|ns|us|ms|s)?\s*"
)
_COMPARE = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
_TINY_NS, _TINY = 1e6, 1e-3  # a bare number below these, in ns and of the value, is doubted
_SHARES = ("breakdown.", "overlap.")
Of = Literal["value", "difference", "relative"]
_EXAMPLES = """\b
Examples:
  fastcomm compare monday/ tuesday/
  fastcomm metrics monday/ --output baseline/
  fastcomm compare baseline/ tuesday/
  fastcomm compare monday/ tuesday/ --html change.html
  fastcomm compare tuesday/ --baseline monday
  fastcomm compare baseline/ traces/ --fail-if 'iteration.mean_ns > +3%' \\
    --fail-if 'overlap.average_overlap_ratio < 50%'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A threshold for the value or the change of a metric."""

    text: str
    name: str
    of: Of  # the value after, or the change: absolute, or as a share of before
    sign: str  # of _COMPARE
    threshold: float

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Parse a condition. Raises `ConfigError` if it is invalid.

        A number with a sign is a change, with "%" relative to before: "> +3%", "< -2ms".
        Without a sign it is the value after: "overlap.average_overlap_ratio < 50%".
        """
        match = _TEXT.fullmatch(text)
        if not match:
            raise ConfigError(
                f"invalid condition {shortened(text)!r}: expected NAME > +3%, NAME > +2ms or "
                "NAME < 0.5, with >, <, >= or <="
            )
        name, sign, plus, number, unit = match.groups()
        if unit not in (None, "%") and not name.endswith("_ns"):
            raise ConfigError(
                f"invalid condition {text!r}: {name} is not a time, so it has no unit {unit}"
            )
        if unit == "%" and not plus and not _is_share(name):
            change = f"{'+' if sign in ('>', '>=') else '-'}{number}%"
            raise ConfigError(
                f"condition {text!r}: {number}% of what? {name} is not a share. For a change "
                f"relative to BEFORE give it a sign: '{name} {sign} {change}'"
            )
        of: Of = "value" if not plus else "relative" if unit == "%" else "difference"
        threshold = float(plus + number) * (0.01 if unit == "%" else TIME_UNITS[unit or "ns"])
        if not isfinite(threshold):
            raise ConfigError(
                f"invalid condition {shortened(text)!r}: expected a finite number"
            )
        return cls(text=text.strip(), name=name, of=of, sign=sign, threshold=threshold)

    def holds(self, comparison: "Comparison") -> bool:
        """Whether the condition is true. Raises `ConfigError` if the metric is unknown."""
        value = comparison.value(self.name)
        measured = value.after if self.of == "value" else getattr(value, self.of)
        if measured is None:
            raise ConfigError(
                f"condition {self.text!r}: cannot be judged, {self.name} is "
                f"{_formatted(value.before)} before and {_formatted(value.after)} after"
            )
        return bool(_COMPARE[self.sign](measured, self.threshold))

    def doubt(self, comparison: "Comparison") -> str | None:
        """Return a warning if a bare number of ns is so small that another unit is meant."""
        value, number = comparison.value(self.name).after, abs(self.threshold)
        is_bare = self.name.endswith("_ns") and self.text[-1:].isdigit()
        if not is_bare or value is None or not 0 < number < min(_TINY_NS, value * _TINY):
            return None
        written = self.text.rpartition(self.sign)[2].strip()
        return (
            f"--fail-if {self.text!r}: {written} is {written} ns, and {self.name} is "
            f"{format_ns(value)}; write a unit, as in {written}ms"
        )


def _is_share(name: str) -> bool:
    """Whether a metric is a fraction, for which a percentage is a value."""
    last = name.rpartition(".")[2]
    return name.startswith(_SHARES) or any(word in last for word in ("share", "ratio", "util"))


def _formatted(value: float | None) -> str:
    return "n/a" if value is None else f"{value:g}"


fail_if_option = option(
    "--fail-if",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    group=OUTPUT,
    is_common=True,
    help="Exit with code 4 if the condition holds, as in 'iteration.mean_ns > +3%'. "
    "Repeatable.",
)


@click.command("compare", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("before")
@click.argument("after", required=False)
@option(
    "--baseline",
    metavar="NAME",
    group=MEASUREMENT,
    is_common=True,
    help="Compare with a baseline of `fastcomm baseline save`, beside the run.",
)
@fail_if_option
@option(
    "--no-kernels",
    is_flag=True,
    group=MEASUREMENT,
    help="Do not compare kernels, operators and annotations, for which all events are read.",
)
@measure_options
@result_options("compare.json, parts, values and kernels as CSV and Parquet")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    before: str,
    after: str | None,
    baseline: str | None,
    conditions: tuple[str, ...],
    no_kernels: bool,
    files: ResultFiles,
    metrics: MetricsOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Compare two runs: what changed, ranked by its effect on the step time.

    BEFORE and AFTER are directories of traces, URLs, stores, or saved metrics: a file of
    fastcomm metrics --json, or a directory of its --output. With --baseline, only one run is
    given: the one after. The change of the step time is
    split exactly into the parts of the breakdown. Of traces, kernels, operators and annotations
    are compared, too. Reading options apply to both runs.

    A condition of --fail-if is on the change ('iteration.mean_ns > +3%') or on the value after
    it ('breakdown.exact.idle > 20%', 'iteration.mean_ns > 80ms'); --json lists the names. Exit
    codes: 0 done, 1 error, 2 wrong usage, 3 done without some ranks, 4 a condition holds.
    """
    from fastcomm.cli.main import REGRESSED
    from fastcomm.comparison import two_runs
    from fastcomm.comparison.metrics_documents import skipped_of
    from fastcomm.comparison.tables import show

    parsed = [Condition.parsed(text) for text in conditions]
    sides = _sides(before, after, baseline)
    _check_inputs(ctx, sides, parsed)
    with_page = files.html is not None
    with executor_for(execution) as executor:
        how = replace(metrics, with_tables=with_page), reading, executor
        before_run, after_run = sides[0].compared(*how), sides[1].compared(*how)
        kernels: Sequence[tuple[Kernels, Kernels]] | None = [] if no_kernels else None
        comparison, same = two_runs.compare_runs(
            before_run, after_run, steps=metrics.steps, kernels=kernels
        )
        timelines = [_timeline(run) for run in same if with_page]
    both = [before_run.document, after_run.document]
    warn(_warnings(*(_own_warnings(side, is_said=not files.as_json) for side in both)))
    warn(filter(None, (condition.doubt(comparison) for condition in parsed)))
    holding = tuple(condition.text for condition in parsed if condition.holds(comparison))
    comparison = replace(comparison, conditions_that_hold=holding)
    if files.html is not None:
        from fastcomm.comparison import page as pages
        from fastcomm.show.pages import write as write_page

        write_page(
            pages.page(comparison, (sides[0].path, sides[1].path), timelines), files.html
        )
    shown = partial(show, conditions=[condition.text for condition in parsed])
    give(comparison, files, "compare", shown)
    if holding:
        ctx.exit(REGRESSED)
    exit_if_skipped([rank for side in both for rank in skipped_of(side)])


def _sides(before: str, after: str | None, baseline: str | None) -> "tuple[_Side, _Side]":
    """Return both runs; with a baseline, the only argument is the run after."""
    from fastcomm.comparison.baselines import baseline_path, load_baseline

    if baseline is None:
        if after is None:
            raise click.UsageError("Missing argument 'AFTER', or option '--baseline NAME'.")
        return _Side.of("BEFORE", before), _Side.of("AFTER", after)
    if after is not None:
        raise click.UsageError("--baseline takes the place of BEFORE: give one run.")
    path = str(baseline_path(baseline, before))
    saved = _Side(name="BEFORE", path=path, saved=dict(load_baseline(baseline, before)))
    return saved, _Side.of("AFTER", before)


_MOST_WARNINGS = 8


def _own_warnings(metrics: Mapping[str, Any], *, is_said: bool) -> list[str]:
    """Return the warnings of a run; `is_said` leaves out those about missing ranks."""
    from fastcomm.comparison.metrics_documents import warnings_of

    own = warnings_of(metrics)
    return [warning for warning in own if not (is_said and " no trace here: " in warning)]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of two runs: BEFORE or AFTER, its path, and its metrics where these are saved."""

    name: str
    path: str
    saved: dict[str, Any] | None

    @classmethod
    def of(cls, name: str, path: str) -> Self:
        """Read the metrics that may be saved at a path."""
        from fastcomm.comparison.metrics_documents import saved_metrics
        from fastcomm.files import is_local, place

        with _named(name, path):
            where = place(path)
            saved = saved_metrics(where) if is_local(where) else None
        return cls(name=name, path=path, saved=saved)

    def compared(
        self, options: MetricsOptions, reading: ReadOptions, executor: "Executor"
    ) -> "ComparedRun":
        """Return the metrics of the run, measured unless they are saved."""
        from fastcomm.comparison.two_runs import ComparedRun
        from fastcomm.metrics.computation import compute_metrics

        if self.saved is not None:
            return ComparedRun(document=self.saved)

        def measured(traces: "OpenedRun") -> "Metrics":
            with _named(self.name, self.path):
                return compute_metrics(traces, options)

        with _named(self.name, self.path):
            traces = open_traces((self.path,), reading, executor, is_one_of_two=True)
        return ComparedRun.of_traces(traces, measured)


def _check_inputs(
    ctx: click.Context, runs: Sequence[_Side], conditions: Sequence[Condition]
) -> None:
    """Raise `ConfigError` for conditions on no metric, and for options on saved metrics."""
    from fastcomm.comparison.metric_names import check_names

    if all(run.saved is None for run in runs):  # saved ones may be of another version
        check_names(condition.name for condition in conditions)
    names = [run.name for run in runs if run.saved is not None]
    typed = typed_options(ctx, MetricsOptions, ReadOptions, ExecutionOptions)
    if len(names) < len(runs):
        # Which steps the saved metrics are of is not known.
        typed = [option_name for option_name in typed if option_name == "--steps"]
    if names and typed:
        raise ConfigError(
            f"{', '.join(typed)}: no effect on saved metrics ({enumeration(names)}); pass "
            "traces, or leave it out"
        )


def _timeline(run: "ComparedRun") -> "Timeline | str":
    """Return the timeline of a run, or why there is none."""
    from fastcomm.timeline.timeline import find_timeline

    if run.traces is None or run.metrics is None:
        return "saved metrics have no events"
    return find_timeline(run.traces, run.metrics)


@contextmanager
def _named(name: str, path: str) -> Iterator[None]:
    """Begin errors of reading a run with its name, BEFORE or AFTER, and its path."""
    try:
        yield
    except FastcommError as error:
        raise type(error)(f"{name} ({path}): {error}") from error


_BASELINE_EXAMPLES = """\b
Examples:
  fastcomm baseline save monday traces/
  fastcomm metrics tuesday/ --baseline monday
  fastcomm compare tuesday/ --baseline monday
"""


@click.group("baseline", cls=CommandGroup, epilog=_BASELINE_EXAMPLES)
def baseline() -> None:
    """Save the metrics of a run under a name, to compare later runs with."""


@baseline.command("save", cls=OptionsCommand, epilog=_BASELINE_EXAMPLES)
@click.argument("name")
@click.argument("path", metavar="RUN")
@measure_options
def save(
    *,
    name: str,
    path: str,
    metrics: MetricsOptions,
    reading: ReadOptions,
    execution: ExecutionOptions,
) -> None:
    """Save the metrics of RUN as the baseline NAME.

    It is a file of some kilobytes, fastcomm-baselines/NAME.json in the directory that contains
    RUN, and replaces a baseline of that name when it is complete. `fastcomm metrics` and
    `fastcomm compare` take it by --baseline NAME for runs in the same directory.
    """
    from fastcomm.comparison.baselines import baseline_path, save_baseline
    from fastcomm.metrics.command import measure

    baseline_path(name, path)  # a wrong name is an error before minutes of reading
    measured = measure((path,), replace(metrics, with_tables=False), reading, execution)
    warn(measured.warnings)
    click.echo(f"saved {save_baseline(name, path, measured)}")
    exit_if_skipped(measured.skipped)
