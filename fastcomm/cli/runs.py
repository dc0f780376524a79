"""How commands read a run: the executor of its ranks, its traces, and progress on stderr."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from fastcomm.cli.messages import warn
from fastcomm.options import MetricsOptions, ReadOptions

if TYPE_CHECKING:
    from fastcomm.executors import Executor
    from fastcomm.metrics.result import Metrics
    from fastcomm.trace.run import RunTraces, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """Where the ranks of a run are read: in processes of this machine, or on a Dask cluster."""

    workers: int = 1
    dask: str | None = None
    dask_wait: float = 60
    dask_scratch: Path | None = None


@contextmanager
def executor_for(options: ExecutionOptions) -> "Iterator[Executor]":
    """Yield the executor of --workers or --dask; processes start during other imports."""
    if options.dask is None:
        from fastcomm.analyses.workers import PRELOAD, executor_of
        from fastcomm.executors import processes

        if options.workers > 1:
            processes.start_early(PRELOAD)
        yield executor_of(options.workers)
        return
    from fastcomm.executors import dask

    scratch = options.dask_scratch and options.dask_scratch.absolute()
    with dask.connected(options.dask, wait_s=options.dask_wait, scratch=scratch) as executor:
        warn(executor.warnings)
        yield executor


def standing_options() -> list[str]:
    """Return the names of the options of this command that its command line does not give."""
    ctx = click.get_current_context()
    is_typed = ParameterSource.COMMANDLINE
    return [name for name in ctx.params if ctx.get_parameter_source(name) is not is_typed]


def open_traces(
    paths: Sequence[str | Path],
    reading: ReadOptions,
    executor: "Executor | None" = None,
    *,
    is_one_of_two: bool = False,
) -> "RunTraces":
    """Find the traces of a run, with the options of the running command.

    Parameters
    ----------
    paths
        Files and directories.
    reading
        How to read them.
    executor
        Where ranks will be read; None reads here.
    is_one_of_two
        Whether the command opens two runs. An option that this run ignores is then a warning,
        since it may be meant for the other; otherwise it is an error.

    Raises
    ------
    FastcommError
        As of `preparation.open_traces`.

    """
    from fastcomm.analyses import preparation

    standing = click.get_current_context().params if is_one_of_two else standing_options()
    return preparation.open_traces(paths, reading, executor, standing=standing)


class OpenedRun(NamedTuple):
    """The traces of a run, where they are read, and what counts each rank that was read."""

    traces: "RunTraces"
    executor: "Executor"
    progress: "Callable[[Source], None] | None"


@contextmanager
def opened_run(
    paths: Sequence[str | Path],
    reading: ReadOptions,
    execution: ExecutionOptions,
    compile_kernels: Callable[[], None],
) -> Iterator[OpenedRun]:
    """Find the traces of a run, and show a progress bar while the block reads them.

    Parameters
    ----------
    paths
        Files and directories.
    reading, execution
        How to read the run, and with which workers.
    compile_kernels
        Compiles the kernels of the analysis, where ranks are read by this machine.

    """
    from fastcomm.report.console import progress

    with executor_for(execution) as executor:
        traces = open_traces(paths, reading, executor)
        if executor.is_local:
            compile_kernels()
        with progress(traces) as advance:
            yield OpenedRun(traces, executor, advance)


def measure(
    run: "RunTraces", reading: ReadOptions, options: MetricsOptions, executor: "Executor"
) -> "Metrics":
    """Measure a run, with a progress bar on stderr.

    Parameters
    ----------
    run
        Its ranks.
    reading, options
        Whether to skip unreadable ranks; what to measure.
    executor
        Where ranks are measured.

    Raises
    ------
    FastcommError
        As of `compute_metrics`.

    """
    from fastcomm.analyses import preparation
    from fastcomm.analyses.measure import compute_metrics
    from fastcomm.report.console import progress

    if executor.is_local:
        preparation.compile_kernels()
    with progress(run) as advance:
        return compute_metrics(
            run, options, workers=executor, keep_going=reading.keep_going, progress=advance
        )
