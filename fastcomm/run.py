"""`open` returns a `Run`, whose methods run all analyses of a training run."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastcomm.checks import (
    check_path,
    check_type,
    invalid_value,
    non_default,
    plain_number,
    shortened,
)
from fastcomm.critical_path.options import PathOptions
from fastcomm.device_work.options import KernelOptions
from fastcomm.errors import ConfigError, FastcommError, python_names
from fastcomm.executors.executor import executor_of
from fastcomm.files import guarded, is_local, note_inputs, place, refuse_inputs
from fastcomm.metrics.options import MetricsOptions
from fastcomm.option_fields import build, shows, takes
from fastcomm.options import ReadOptions
from fastcomm.preparation import open_traces
from fastcomm.report.options import ReportOptions
from fastcomm.sql.options import SqlOptions
from fastcomm.stragglers.options import StragglerOptions
from fastcomm.trace.run_traces import named_ranks

if TYPE_CHECKING:
    from fastcomm.comparison.result import Comparison
    from fastcomm.comparison.two_runs import ComparedRun
    from fastcomm.critical_path.result import CriticalPath
    from fastcomm.device_work.result import Kernels
    from fastcomm.executors.executor import Executor
    from fastcomm.hang.result import Hang
    from fastcomm.info.info import Info
    from fastcomm.metrics.result import Metrics
    from fastcomm.sql.result import QueryResult
    from fastcomm.sql.run_tables import RunTables
    from fastcomm.stragglers.analysis import StragglerResult
    from fastcomm.trace.run_traces import SkippedRank
    from fastcomm.trace.trace import Trace


class Run:
    """The traces of a training run; `fastcomm.open` returns one.

    Opening reads only what is needed to determine the rank of each file. Every analysis reads
    the events that it needs.

    Attributes
    ----------
    paths
        The directories, files, globs or URLs that were opened.
    options
        The `ReadOptions` with which the traces are read.

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
        self._traces = open_traces(paths, options, executor_of(workers))
        self._tables: RunTables | None = None  # what queries have measured

    def __repr__(self) -> str:
        """Return a text with the paths and the ranks."""
        return f"<Run {' '.join(map(str, self.paths))}: {named_ranks(self.ranks)}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a trace, ascending."""
        return self._traces.ranks

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the job; None if neither the traces nor the options state it."""
        return self._traces.world_size

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the run as a whole, a sentence each, such as guessed ranks."""
        return self._traces.warnings

    @property
    def skipped(self) -> "tuple[SkippedRank, ...]":
        """Ranks left out because their files could not be opened, if `open` may leave any out.

        Each has `rank`, `path` and `error`.
        """
        return self._traces.skipped

    @python_names()
    def read(self, rank: int) -> "Trace":
        """Read all events of one rank.

        Parameters
        ----------
        rank
            Number of a rank among `ranks`.

        Returns
        -------
        Trace
            The events of the rank as Arrow tables, sorted by start; times are ns.

        Raises
        ------
        ConfigError
            If the rank has no trace.
        FastcommError
            If its file cannot be read.

        """
        rank = plain_number(rank)
        check_type(rank, int, "read: rank", "the number of a rank, as in read(0)")
        return self._traces.read(rank, "all")

    @python_names()
    def info(self, *, all_ranks: bool = False) -> "Info":
        """Describe the run as `fastcomm info` does: format, steps, groups, missing data.

        Parameters
        ----------
        all_ranks
            Read all ranks; by default only the first.

        Returns
        -------
        Info
            The description; `to_dict()` is the JSON document of `fastcomm info --json`.

        Raises
        ------
        FastcommError
            If a rank cannot be read, which `open` may allow.

        """
        from fastcomm.info.info import info

        check_type(all_ranks, bool, "info: all_ranks", "True or False")
        return info(self._traces, all_ranks=all_ranks, anew=not self.options.is_plain)

    @takes(MetricsOptions)
    def metrics(self, options: MetricsOptions) -> "Metrics":
        """Measure the run as `fastcomm metrics` does: where a step's time goes, and why.

        Parameters
        ----------
        options
            Fields of `MetricsOptions`, passed by name.

        Returns
        -------
        Metrics
            Metrics, findings and tables. Times are ns, sizes bytes, bandwidths bytes per
            second, shares fractions of 1; unknown values are None.

        Raises
        ------
        ConfigError
            If an option is invalid.
        FastcommError
            If a rank cannot be read, which `open` may allow.

        """
        from fastcomm.metrics.computation import compute_metrics

        return compute_metrics(self._traces, options)

    def _check_step_boundary(self, name: str) -> None:
        """Raise `ConfigError` if the steps of the run are cut on the device clock.

        `name` is the method that takes the steps of the host, and begins the message.
        """
        if self.options.step_boundary == "device":
            raise ConfigError(
                f"{name}: step_boundary 'device' has no effect: a path begins and ends with "
                "the step on the host; open the run without it"
            )

    @takes(KernelOptions)
    def kernels(self, options: KernelOptions) -> "Kernels":
        """List the device work of the run as `fastcomm kernels` does: how long, how often.

        Parameters
        ----------
        options
            Fields of `KernelOptions`, passed by name.

        Returns
        -------
        Kernels
            A row per name, the longest total first, by `to_arrow()`, and those of each rank by
            `by_rank()`. Times are ns, shares fractions of the step; unknown values are None.

        Raises
        ------
        ConfigError
            If an option is invalid, or the run does not have the rank or the step.
        FastcommError
            If a rank cannot be read, which `open` may allow.

        """
        from fastcomm.device_work.analysis import sum_kernels

        return sum_kernels(self._traces, options)

    @shows(SqlOptions)
    @python_names()
    def sql(self, query: str, **options: Any) -> "QueryResult":
        """Answer an SQL query on the run as `fastcomm sql` does, with DuckDB.

        What a query measures of all ranks is kept for the next one.

        Parameters
        ----------
        query
            One statement that reads, such as "select rank, idle_ns from ranks".
        **options
            Fields of `SqlOptions`.

        Returns
        -------
        QueryResult
            The rows by `to_arrow()`, and in `reads` what was read for them. Times are ns.

        Raises
        ------
        ConfigError
            If an option is invalid, or the query is no SQL, names no view or column, or would
            change something.
        FastcommError
            If DuckDB is missing, a limit is exceeded, or a rank cannot be read, which `open`
            may allow.

        """
        from fastcomm.sql.database import answered
        from fastcomm.sql.run_tables import RunTables

        check_type(query, str, "sql: query", 'a text, as in sql("from ranks")')
        limits = build(SqlOptions, options, "sql")
        if self._tables is None:
            self._tables = RunTables(self._traces)
        return answered(self._tables, query, limits)

    @takes(PathOptions)
    def critical_path(self, options: PathOptions) -> "CriticalPath":
        """Find the critical path of a step as `fastcomm critical-path` does.

        By default the path goes through all ranks, which collectives connect. If the ranks
        cannot be connected, it is the path of the first rank, and the first of its `notes`
        says why.

        Parameters
        ----------
        options
            Fields of `PathOptions`, passed by name. The part to analyze is a `step`, or an
            `annotation`, of which `instance` is the index or a pair (first, last). With
            `compat` or `deps` the path is of one rank.

        Returns
        -------
        CriticalPath
            The path: `length_ns`, `by_rank()`, `top()`, `what_if()`, and tables by
            `to_arrow()`. Times are ns.

        Raises
        ------
        ConfigError
            If an option is invalid.
        FastcommError
            If no rank has such a step or annotation, or a rank cannot be read.

        """
        from fastcomm.critical_path.analysis import critical_path

        self._check_step_boundary("critical_path")
        return critical_path(self._traces, options)

    @takes(StragglerOptions)
    def stragglers(self, options: StragglerOptions) -> "StragglerResult":
        """Find the stragglers of a table of operations as `fastcomm stragglers` does.

        Of a run that was opened from traces, `metrics` names the stragglers among its findings.

        Parameters
        ----------
        options
            Fields of `StragglerOptions`, passed by name.

        Raises
        ------
        ConfigError
            If an option is invalid, or the run has several files.
        FastcommError
            If the run is no table of operations, or a step is not in it.

        """
        from fastcomm.stragglers.analysis import analyse_stragglers

        if len(self.paths) > 1:
            raise ConfigError(
                "stragglers: several files; it reads one table of operations. Of traces, "
                "metrics().findings names the stragglers"
            )
        if ignored := non_default(self.options):
            names = ", ".join(ignored)
            raise ConfigError(f"stragglers: {names}: no effect on a table; open it without")
        return analyse_stragglers(self.paths[0], options, executor=self._traces.executor)

    def hang(self) -> "Hang":
        """Find why the run hangs as `fastcomm hang` does, from dumps beside its traces.

        Directories that were opened are searched to any depth, and those of opened files.

        Returns
        -------
        Hang
            `kind` is "none" where nothing hangs; `culprits` are the ranks that hold the others
            up, `waiting` those that wait for them. `fastcomm.diagnose_hang` needs no traces.

        Raises
        ------
        ConfigError
            If the run was opened by a URL.
        FastcommError
            If no dump of PyTorch's flight recorder lies there, or one is damaged, which `open`
            may allow.

        """
        from fastcomm.hang.analysis import diagnose_hang

        opened = [place(path) for path in self.paths]
        if remote := next((path for path in opened if not is_local(path)), None):
            raise ConfigError(f"hang: {remote}: dumps are read from local directories only")
        folders = [path for path in opened if path.is_dir()]
        if len(folders) < len(opened):
            folders += [place(source.path).parent for source in self._traces.sources]
        return diagnose_hang([*dict.fromkeys(folders)], keep_going=self.options.keep_going)

    @shows(ReportOptions)
    @python_names()
    def report(self, html: str | Path = "report.html", **options: Any) -> "Metrics":
        """Write a self-contained HTML page on the run as `fastcomm report` does.

        Parameters
        ----------
        html
            Path of the file to write.
        **options
            Fields of `ReportOptions`. By default the tables are in `report-data/` beside the
            page.

        Returns
        -------
        Metrics
            The metrics that the page shows, with their `skipped` ranks and `warnings`.

        Raises
        ------
        ConfigError
            If an option is invalid.
        FastcommError
            If a rank cannot be read, which `open` may allow, or the file cannot be written or
            is a trace of the run.

        """
        from fastcomm.metrics.findings.suggestions import reading_arguments
        from fastcomm.report.analysis import results_for_page
        from fastcomm.report.page import write_report

        check_path(html, "report: path", 'report("report.html")')
        if not Path(html).name:
            raise ConfigError(f"report: {html} is a directory; name a file, as in report.html")
        chosen = build(ReportOptions, options, "report")
        inputs = [source.path for source in self._traces.sources]
        refuse_inputs(Path(html), inputs)
        results = results_for_page(self._traces, chosen)
        with guarded():
            note_inputs(inputs)
            write_report(
                results,
                html,
                paths=[str(path) for path in self.paths],
                options=reading_arguments(self.options),
                with_data=not chosen.no_data,
            )
        return results.metrics


@shows(ReadOptions)
def open(*paths: str | Path, workers: "int | Executor" = 1, **options: Any) -> Run:  # noqa: A001
    """Open the traces of a training run.

    Finds the trace files, their format, and the rank of each.

    Parameters
    ----------
    *paths
        One or more directories, files, globs or URLs: `open("traces/")`.
    workers
        A number of processes of this machine, or an executor such as
        `fastcomm.executors.dask.connected` yields.
    **options
        Fields of `ReadOptions`. Critical paths and replays take the steps of the host, and
        refuse the `step_boundary` "device". `keep_going` leaves out ranks of all analyses: an
        error means that there is no other rank.

    Returns
    -------
    Run
        The run. Its methods measure it.

    Raises
    ------
    ConfigError
        If an option is invalid, or there is no path.
    FastcommError
        If there is no trace, the rank of a file cannot be determined or the file cannot be
        read, two files have the same rank, or files contradict the world size. Files
        that may be left out are in `Run.skipped` instead.

    """
    if not paths:
        raise ConfigError('open: no path; pass the traces of a run, as in open("traces/")')
    for path in paths:
        check_path(path, "open: path", 'open("traces/") or open("rank0.json", "rank1.json")')
    try:
        return Run(paths, build(ReadOptions, options, "open"), workers)
    except OSError as error:
        raise FastcommError(f"{shortened(paths[0])}: {error.strerror or error}") from error


@shows(MetricsOptions)
@python_names()
def compare(
    before: "Run | Metrics | Mapping[str, Any]",
    after: "Run | Metrics | Mapping[str, Any]",
    *,
    kernels: "Sequence[tuple[Kernels, Kernels]] | None" = None,
    **options: Any,
) -> "Comparison":
    """Compare two runs as `fastcomm compare` does: what changed, ranked by its effect.

    Of two `Run`s, metrics and kernels of the ranks that both have are compared.

    Parameters
    ----------
    before, after
        Each a `Run`, its `Metrics`, or the dictionary that their `to_dict` returns.
    kernels
        Pairs of `Run.kernels()` before and after, one pair for each key that is compared. By
        default those of two `Run`s by name, operator and annotation; `()` leaves them out.
    **options
        What is measured of a `Run`. Fields of `MetricsOptions`, passed by name.

    Returns
    -------
    Comparison
        The change of the step, of its parts, of every metric and of kernels. Times are ns.

    Raises
    ------
    ConfigError
        If an argument is no run and no metrics, an option is invalid or has no effect, or the
        runs count different bytes.
    FastcommError
        If a rank of a run cannot be read, which `open` may allow.

    """
    from fastcomm.comparison import two_runs

    if kernels is not None and not _are_pairs(kernels):
        expected = "pairs, as in [(before.kernels(), after.kernels())]"
        raise invalid_value("compare: kernels", kernels, expected)
    chosen = build(MetricsOptions, {"with_tables": False, **options}, "compare")
    runs = [run for run in (before, after) if isinstance(run, Run)]
    # Which steps measured metrics are of is not known.
    ignored = [name for name in options if not runs or (name == "steps" and len(runs) == 1)]
    if ignored:
        raise ConfigError(f"compare: {', '.join(ignored)}: no effect on metrics; pass two runs")
    both = _compared(before, "before", chosen), _compared(after, "after", chosen)
    comparison, _ = two_runs.compare_runs(*both, steps=chosen.steps, kernels=kernels)
    return comparison


def _are_pairs(kernels: object) -> bool:
    """Whether an argument is a list of pairs of `Kernels`."""
    from fastcomm.device_work.result import Kernels

    return isinstance(kernels, Sequence) and all(
        isinstance(pair, tuple | list)
        and [isinstance(one, Kernels) for one in pair] == [True, True]
        for pair in kernels
    )


def _compared(
    run: "Run | Metrics | Mapping[str, Any]", name: str, options: MetricsOptions
) -> "ComparedRun":
    """Return a run to be compared; a `Run` is measured.

    Raises `ConfigError`, which begins with the name of the argument, for what is no run.
    """
    from fastcomm.comparison.metrics_documents import metrics_document
    from fastcomm.comparison.two_runs import ComparedRun
    from fastcomm.metrics.computation import compute_metrics

    if not isinstance(run, Run):
        return ComparedRun(document=metrics_document(run, name))
    return ComparedRun.of_traces(run._traces, partial(compute_metrics, options=options))
