"""`open` a run, and ask it: the object that users of the API hold."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcomm.analyses.preparation import open_traces
from fastcomm.checks import build, check_path, check_type, non_default, shows, takes
from fastcomm.errors import ConfigError, python_names
from fastcomm.executors import executor_of
from fastcomm.options import MetricsOptions, PathOptions, ReadOptions, ReportOptions, Window
from fastcomm.trace.run import named_ranks

if TYPE_CHECKING:
    from fastcomm.analyses.info import Info
    from fastcomm.critical_path import CriticalPath
    from fastcomm.executors import Executor
    from fastcomm.metrics.result import Metrics
    from fastcomm.replay.result import Session
    from fastcomm.trace.run import RunTraces, SkippedRank
    from fastcomm.trace.trace import Trace


class Run:
    """The traces of a training run, made by `fastcomm.open`.

    Only what tells the ranks is read at first; an analysis reads what it needs.
    """

    @python_names()
    def __init__(
        self,
        paths: tuple[str | Path, ...],
        options: ReadOptions,
        workers: "int | Executor" = 1,
    ) -> None:
        self.paths = paths
        self.options = options
        self._executor = executor_of(workers)
        self._traces = open_traces(paths, options, self._executor)

    def __repr__(self) -> str:
        """Return the paths and the ranks."""
        return f"<Run {' '.join(map(str, self.paths))}: {named_ranks(self.ranks)}>"

    @cached_property
    def _whole(self) -> "RunTraces":
        """The traces with every event."""
        return open_traces(self.paths, self.options, self._executor, whole=True)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have a trace."""
        return self._traces.ranks

    @property
    def world_size(self) -> int | None:
        """The number of ranks of the job, as far as the traces or the options say it."""
        return self._traces.world_size

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is doubtful about the run as a whole."""
        return self._traces.warnings

    @property
    def skipped(self) -> "tuple[SkippedRank, ...]":
        """The ranks whose files could not be opened, with `keep_going`."""
        return self._traces.skipped

    @python_names()
    def read(self, rank: int) -> "Trace":
        """Read all events of one rank; ConfigError where it has no trace."""
        check_type(rank, int, "read: rank", "the number of a rank, as in read(0)")
        return self._whole.read(rank)

    @python_names()
    def info(self, *, all_ranks: bool = False) -> "Info":
        """Describe the run as `fastcomm info` does, by its first rank or by all."""
        from fastcomm.analyses.info import info

        check_type(all_ranks, bool, "info: all_ranks", "True or False")
        user_options = set(non_default(self.options)) - {"ranks", "keep_going"}
        return info(
            self._traces,
            all_ranks=all_ranks,
            anew=bool(user_options),
            workers=self._executor,
            keep_going=self.options.keep_going,
        )

    @takes(MetricsOptions)
    def metrics(self, options: MetricsOptions) -> "Metrics":
        """Measure the run as `fastcomm metrics` does.

        Raises
        ------
        FastcommError
            If a rank cannot be read; with `keep_going`, if none can.

        """
        return self._measured(options)

    def _measured(self, options: MetricsOptions) -> "Metrics":
        """Measure the run; `options` may be those of a report."""
        from fastcomm.analyses.measure import compute_metrics

        return compute_metrics(
            self._traces,
            options,
            workers=self._executor,
            keep_going=self.options.keep_going,
        )

    @takes(PathOptions)
    def critical_path(self, options: PathOptions) -> "CriticalPath":
        """Find the critical path of a window as `fastcomm critical-path` does.

        It goes through all ranks, which collectives join, or is that of `rank`. Where ranks
        cannot be joined it is that of the first one, and the first of its `notes` says why.

        Raises
        ------
        FastcommError
            If there is no such window, or a rank cannot be read.

        """
        from fastcomm.analyses.critical_path import critical_path

        return critical_path(
            self._whole,
            options,
            workers=self._executor,
            keep_going=self.options.keep_going,
        )

    @takes(Window)
    def replay(self, options: Window) -> "Session":
        """Replay a window of all ranks on their devices as `fastcomm replay` does.

        Raises
        ------
        FastcommError
            If there is no such window, or ranks share no communication that would join them.

        """
        from fastcomm.analyses.replay import session_of, step_of

        step = step_of(
            self._whole,
            options,
            workers=self._executor,
            keep_going=self.options.keep_going,
        )
        return session_of(step)

    @shows(ReportOptions)
    @python_names()
    def report(self, html: str | Path = "report.html", **options: Any) -> None:
        """Write the page of the run as `fastcomm report` does, with `ReportOptions`."""
        from fastcomm.analyses.report import run_path
        from fastcomm.report.commands import reading_arguments
        from fastcomm.report.html.run_page import write_report

        check_path(html, "report: path", 'report("report.html")')
        chosen = build(ReportOptions, options, "report")
        metrics = self._measured(chosen)
        write_report(
            metrics,
            html,
            critical=None if chosen.no_path else run_path(metrics, self._whole),
            paths=[str(path) for path in self.paths],
            options=reading_arguments(self.options),
            with_data=not chosen.no_data,
        )


@shows(ReadOptions)
def open(*paths: str | Path, workers: "int | Executor" = 1, **options: Any) -> Run:  # noqa: A001
    """Find the traces of a run, and the rank of each.

    Parameters
    ----------
    *paths
        One or more directories, files, globs or URLs: `open("traces/")`.
    workers
        A number of processes of this machine, or an executor such as
        `fastcomm.executors.dask.connected` yields. With several processes, a script needs
        `if __name__ == "__main__":`.
    **options
        The fields of `ReadOptions`.

    Raises
    ------
    FastcommError
        If there is no trace, a rank cannot be told or read, two files have one rank, or files
        contradict the world size. With `keep_going`, files that cannot be read are in
        `Run.skipped`.

    """
    if not paths:
        raise ConfigError('open: no path; pass the traces of a run, as in open("traces/")')
    for path in paths:
        check_path(path, "open: path", 'open("traces/") or open("rank0.json", "rank1.json")')
    return Run(paths, build(ReadOptions, options, "open"), workers)
