"""``fastcomm watch``."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcomm.cli.commands import OptionsCommand, options_of
from fastcomm.cli.main import INCOMPLETE, REGRESSED
from fastcomm.cli.messages import warn
from fastcomm.cli.results import prometheus_option
from fastcomm.cli.run_options import builds, with_options
from fastcomm.comparison.command import Condition, fail_if_option
from fastcomm.errors import FastcommError, shell_quoted
from fastcomm.metrics.options import MetricsOptions
from fastcomm.watch.options import WatchOptions

if TYPE_CHECKING:
    from fastcomm.watch.changes import Watch, WindowReport
    from fastcomm.watch.windows import ProfiledWindow

_POLL_S = 1.0
_EXAMPLES = """\b
Examples:
  fastcomm watch traces/
  fastcomm watch traces/ --idle 3600 --fail-if 'iteration.mean_ns > +10%'
  fastcomm watch traces/ --once --prometheus /var/lib/node_exporter/job.prom
"""


@click.command("watch", cls=OptionsCommand, has_tables=True, epilog=_EXAMPLES)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@with_options([*options_of(WatchOptions)])
@fail_if_option
@prometheus_option
@with_options(options_of(MetricsOptions, "link_bandwidth", "cluster", "gpus_per_node"))
@builds(watching=WatchOptions, metrics=MetricsOptions)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    directory: Path,
    conditions: tuple[str, ...],
    prometheus: Path | None,
    watching: WatchOptions,
    metrics: MetricsOptions,
) -> None:
    """Report the profiled windows of running jobs as they arrive, and what changed.

    DIRECTORY is that of fastcomm.torch.trace_handler, and need not be there yet. A window is
    one line: its ranks, its mean step, and the change against the first three windows of its
    run, with causes that are new or gone and parts of the step that take longer.

    Ends at the first window for which a condition of --fail-if holds, with exit code 4; with
    --once after the last. Other exit codes: 0 done, 1 error, 2 wrong usage, 3 done, and ranks
    of a window are missing.
    """
    from fastcomm.comparison.metric_names import check_names
    from fastcomm.trace.run_traces import skipped_lines
    from fastcomm.watch.changes import Watch
    from fastcomm.watch.tables import show

    parsed = [Condition.parsed(text) for text in conditions]
    check_names(condition.name for condition in parsed)
    watch, is_whole, holding, unchecked = Watch(), True, False, parsed
    newest: ProfiledWindow | None = None
    for window in _arriving(directory, watch, watching):
        report = _report(watch, window, metrics)
        if report is None:
            is_whole = False
            continue
        if unchecked:
            _check_names(report, unchecked)
            unchecked = []
        show(report)
        for rank in skipped_lines(report.metrics.skipped):
            warn([f"{window.folder}: {rank}"])
        is_whole = is_whole and len(report.metrics.ranks) >= report.metrics.expected_ranks
        if prometheus is not None and (newest is None or window.is_newer_than(newest)):
            _write_prometheus(report, prometheus)
            newest = window
        holding = _check(report, parsed) or holding
        if holding and not watching.once:
            break
    is_whole = is_whole and not watch.waiting
    if holding or not is_whole:
        ctx.exit(REGRESSED if holding else INCOMPLETE)


def _arriving(
    directory: Path, watch: "Watch", options: WatchOptions
) -> "Iterator[ProfiledWindow]":
    """Yield new windows in the order of their steps, until watching ends."""
    from fastcomm.watch.windows import windows_below

    last = time.monotonic()
    while True:
        is_there = options.once or directory.exists()
        new = [*windows_below(directory, watch.reported)] if is_there else []
        ready = [*_ready(new, options)]
        yield from ready
        if options.once and not ready:
            raise FastcommError(
                f"{directory}: no profiled window of fastcomm.torch.trace_handler; a copy "
                "of one must have its hidden directory .partials"
            )
        if options.once:
            return
        if ready:
            last = time.monotonic()
        elif options.idle is not None and time.monotonic() - last >= options.idle:
            watch.waiting.update(window.folder for window in new)
            _warn_of_waiting(directory, new)
            return
        else:
            time.sleep(_POLL_S)


def _ready(
    windows: "Sequence[ProfiledWindow]", options: WatchOptions
) -> "Iterator[ProfiledWindow]":
    """Yield the windows to report, in order of their steps; later ones of a run wait.

    So a watch that is started anew prints the same lines, from the same first windows.
    """
    waiting = set[Path]()
    for window in sorted(windows, key=lambda one: (one.run_name, one.step, one.number)):
        run = window.folder.parent
        if options.once or (run not in waiting and _is_ready(window, options.patience)):
            yield window
        else:
            waiting.add(run)


def _is_ready(window: "ProfiledWindow", patience_s: float) -> bool:
    """Whether a window has all its ranks, or the others were waited for long enough."""
    from fastcomm.metrics.partial_files import read

    if time.time_ns() - window.arrival_ns >= patience_s * 1e9:
        return True
    for path in window.measured.values():
        with suppress(FastcommError):
            return window.is_whole(read(path).note.world_size or 1)
    return False


def _warn_of_waiting(directory: Path, windows: "Sequence[ProfiledWindow]") -> None:
    """Name the windows whose ranks are not all measured, and the command that reports them."""
    command = f"fastcomm watch {shell_quoted(str(directory))} --once"
    why = f"not reported, as ranks are not measured; `{command}` reports it"
    for window in windows:
        warn([f"{window.folder}: {why}"])


def _check_names(report: "WindowReport", conditions: Sequence[Condition]) -> None:
    """Raise `ConfigError` for a condition on a metric that windows do not have."""
    from fastcomm.comparison.analysis import compare

    document = report.metrics.to_dict()
    same = compare(document, document)
    for condition in conditions:
        same.value(condition.name)


def _report(
    watch: "Watch", window: "ProfiledWindow", options: MetricsOptions
) -> "WindowReport | None":
    """Measure a window and compare it; None with a warning if it cannot be measured."""
    try:
        metrics = window.metrics(options)
    except FastcommError as error:
        warn([watch.give_up(window, error)])
        return None
    return watch.report(window, metrics)


def _check(report: "WindowReport", conditions: Sequence[Condition]) -> bool:
    """Print the conditions that hold; those on a change need a window to compare with."""
    comparison = report.comparison
    if comparison is None:
        return False
    holding = [one.text for one in conditions if one.holds(comparison)]
    for text in holding:
        click.echo(f"  FAIL {text}")
    return bool(holding)


def _write_prometheus(report: "WindowReport", path: Path) -> None:
    """Write the numbers of the newest window."""
    from fastcomm.metrics.prometheus import Gauge, write

    last = Gauge(
        name="fastcomm_window_steps",
        text="Steps that the run had done when the window ended.",
        values=(({"run": report.window.run_name}, float(report.window.step)),),
    )
    write(report.metrics, path, [last])
