"""The critical path that the report of a run shows beside its metrics."""

from dataclasses import dataclass

from fastcomm.analyses import preparation
from fastcomm.analyses.critical_path import path_for_page
from fastcomm.critical_path import CriticalPath
from fastcomm.errors import FastcommError
from fastcomm.metrics.result import Metrics
from fastcomm.trace.run import RunTraces


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPath:
    """The critical path of a run, or why there is none."""

    path: CriticalPath | None = None
    why: str = ""


def run_path(metrics: Metrics, run: RunTraces) -> RunPath:
    """Find the path through all ranks where they are few, else through the busiest one.

    `run` is opened with every event.
    """
    preparation.compile_critical_path()
    try:
        return RunPath(path=path_for_page(run, metrics.busiest_rank))
    except FastcommError as error:
        return RunPath(why=f"No critical path: {error}")
