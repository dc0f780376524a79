"""The critical path that a report shows: through all ranks where they are few, else of one."""

from fastcomm.critical_path.analysis import analyse
from fastcomm.critical_path.ranks import Joined, join_ranks
from fastcomm.critical_path.result import CriticalPath
from fastcomm.errors import FastcommError
from fastcomm.trace.run import Run

MOST_RANKS = 16
_MOST_BYTES = 256 << 20  # of all files: whole traces of all ranks are in memory at once


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
