"""The results on the page of a run: metrics, the critical path with answers, a timeline."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fastcomm import preparation
from fastcomm.critical_path.analysis import critical_path, through_ranks
from fastcomm.critical_path.candidates import Candidate, try_each
from fastcomm.critical_path.options import PathOptions
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.what_if import Replay
from fastcomm.errors import FastcommError
from fastcomm.executors.executor import Local, OpenedRun, unseen
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.findings.finding import Finding
from fastcomm.metrics.result import Metrics
from fastcomm.options import EditOptions, Window
from fastcomm.report.options import ReportOptions
from fastcomm.timeline.timeline import Timeline, find_timeline

_MOST_RANKS = 16
_MOST_BYTES = 256 << 20  # of all files: a page should not take long


@dataclass(frozen=True, slots=True, kw_only=True)
class PageResults:
    """What a page shows: a text is the reason why there is no path or timeline.

    `answers` are what the fix of each finding saves in the step of the path, or None. A path
    or a timeline that is None is left out without a word.
    """

    metrics: Metrics
    path: CriticalPath | str | None = None
    answers: tuple[Candidate | None, ...] = ()
    timeline: Timeline | str | None = None


def results_for_page(run: OpenedRun, options: ReportOptions) -> PageResults:
    """Measure a run, and find its path and its timeline.

    Parameters
    ----------
    run
        The traces.
    options
        What is measured, which of the others to leave out, and further ranks and steps of the
        timeline.

    Raises
    ------
    ConfigError
        If the run does not have a rank or a step of the options.
    FastcommError
        If a rank cannot be read, or its file has changed since it was measured.

    """
    metrics = compute_metrics(run, options)
    path = None if options.no_path else _path(run, metrics.busiest_rank)
    timeline = None
    if not options.no_timeline:
        timeline = find_timeline(
            run,
            metrics,
            ranks=options.timeline_ranks,
            steps=options.timeline_steps or (),
            critical=path,
        )
    answers = _answers(path, metrics.findings)
    return PageResults(metrics=metrics, path=path, answers=answers, timeline=timeline)


def _path(run: OpenedRun, rank: int) -> CriticalPath | str:
    """Return the path through all ranks of a small run that can be joined, else of `rank`.

    If there is none, return the reason.
    """
    run = replace(run, executor=Local(), show_progress=unseen, keep_going=False)
    run.compile(preparation.compile_critical_path)
    size = sum(source.size for source in run.sources)
    if 1 < len(run.ranks) <= _MOST_RANKS and size <= _MOST_BYTES:
        with suppress(FastcommError):
            path, _ = through_ranks(run, Window())
            if not isinstance(path, str):
                return path
    try:
        return critical_path(run, PathOptions(rank=rank))
    except FastcommError as error:
        return f"No critical path: {error}"


def _answers(
    critical: CriticalPath | str | None, findings: Sequence[Finding]
) -> tuple[Candidate | None, ...]:
    """Return for each finding what its fix saves in the step of a path; None where unknown.

    A fix is the rank or the link as its peers, a parallelism in half the time, or no launch
    delays or gaps. Ranks and links need a path through all ranks.
    """
    if not isinstance(critical, CriticalPath) or not critical.about.rules.is_exact:
        return (None,) * len(findings)
    edits = [finding.fix.edit if finding.fix else EditOptions() for finding in findings]
    return try_each(Replay(critical), edits)
