"""The critical path of a run: of one rank, through all, or whichever a report shows."""

from pathlib import Path

from fastcomm.critical_path.analysis import analyse
from fastcomm.critical_path.ranks import Joined, join_ranks
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.window import Wanted
from fastcomm.engine.engine import Engine
from fastcomm.engine.joined import join
from fastcomm.errors import FastcommError
from fastcomm.readers.runs import OpenOptions, open_run
from fastcomm.trace.run import Run

MOST_RANKS = 16
_MOST_BYTES = 256 << 20  # of all files: whole traces of all ranks are in memory at once


def find_critical_path(
    run: Run | str | Path,
    rank: int | None = None,
    window: Wanted | None = None,
    *,
    workers: int | Engine = 1,
) -> CriticalPath:
    """The path of a window: of one rank, or without `rank` through all of them.

    `run` is a path, or a run opened with `OpenOptions(whole=True)`; the window is by default
    the second iteration. `workers` as in `compute_metrics`; one rank is one worker's work.
    """
    if not isinstance(run, Run):
        run = open_run(run, options=OpenOptions(whole=True))
    if rank is None and len(run.ranks) > 1:
        joined, _ = join(run, window, workers=workers)
        return joined.path
    return analyse(run.read(run.ranks[0] if rank is None else rank), window)


def search(run: Run, rank: int) -> tuple[CriticalPath, Joined | None]:
    """The path, and the join of all ranks if it is through all; `rank` is taken otherwise.

    Raises `FastcommError` where there is no path.
    """
    size = sum(source.size for source in run.sources)
    if 1 < len(run.ranks) <= MOST_RANKS and size <= _MOST_BYTES:
        try:
            joined = join_ranks(run)
        except FastcommError:  # ranks with no common communication: each has a path of its own
            pass
        else:
            return joined.path, joined
    path = analyse(run.read(rank))
    if path.path is None:
        raise FastcommError(f"{path.about.path}: the graph has a cycle")
    return path, None
