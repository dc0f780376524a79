"""Open a run for an analysis, by options of how it is opened."""

from pathlib import Path

from fastcomm.executors.executor import Executor, Local, OpenedRun, executor_of
from fastcomm.formats import opening
from fastcomm.formats.config import Config
from fastcomm.trace.run_traces import RunTraces


def open_run(
    *paths: str | Path, config: Config | None = None, workers: int | Executor = 1
) -> OpenedRun:
    """Return the run at paths, whose ranks processes or an executor read."""
    return OpenedRun.of(opening.open_run(*paths, config=config), executor_of(workers))


def read_here(traces: RunTraces) -> OpenedRun:
    """Return a run whose ranks this process reads."""
    return OpenedRun.of(traces, Local())
