"""The critical path of a run: of one rank, or through all ranks where they can be joined."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from fastcomm.critical_path.analysis import analyse
from fastcomm.critical_path.descriptions import TraceEvents
from fastcomm.critical_path.ranks import Joined, join_ranks, joined
from fastcomm.critical_path.result import CriticalPath
from fastcomm.errors import FastcommError
from fastcomm.executors.executor import Executor, Progress, Task
from fastcomm.executors.local import executor_of
from fastcomm.options import Window
from fastcomm.spread import Spread
from fastcomm.trace.run import RunTraces, SkippedRank, expected_ranks
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import Ints


def trimmed(trace: Trace, found: CriticalPath) -> tuple[Trace, CriticalPath]:
    """A trace and its path without the rows that neither it nor another rank asks for.

    The rows that are left have new numbers. The ids of events stay.
    """
    graph, rows = found.graph, trace.events.num_rows
    wanted = np.zeros(rows + 1, np.bool_)  # one behind the last for -1, which is none
    for column in (graph.event, graph.owner, trace.comm["event"].to_numpy()):
        wanted[column] = True
    kept = np.flatnonzero(wanted[:rows])
    number = np.full(rows + 1, -1, np.int32)
    number[kept] = np.arange(len(kept), dtype=np.int32)
    small = _rows(trace, found, kept, number)
    path = CriticalPath(
        graph.owned_by(number[graph.event], number[graph.owner]),
        TraceEvents(small),
        found.about,
        found.on_device,
        found.path,
        found.slack,
    )
    return small, path


def _rows(trace: Trace, found: CriticalPath, kept: Ints, number: Ints) -> Trace:
    """The trace with these rows of its events."""
    at = pa.array(kept)
    comm = trace.comm
    event = pa.array(number[comm["event"].to_numpy()])
    ids = pa.array(found.events.ids(kept.astype(np.int32)))
    args = pa.table({"position": ids})
    if trace.args is not None:
        others = [name for name in trace.args.column_names if name != "position"]
        args = trace.args.select(others).take(at).append_column("position", ids)
    return replace(
        trace,
        events=trace.events.take(at).combine_chunks(),
        comm=comm.set_column(comm.column_names.index("event"), "event", event),
        args=args.combine_chunks(),
    )


Parts = dict[int, tuple[Trace, CriticalPath]]  # by rank


def join(
    run: RunTraces,
    wanted: Window | None = None,
    data_load: Sequence[str] = (),
    *,
    workers: int | Executor = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> tuple[Joined, Sequence[SkippedRank]]:
    """The path of a window, and the ranks that were left out.

    Raises `FastcommError` where no communication is the same on two ranks, and as
    `Executor.gather` does.
    """
    window = _RankWindow(wanted=wanted, data_load=tuple(data_load), world_size=run.world_size)
    task = Task(measure=window.part, merge=together, finish=window.join)
    return executor_of(workers).gather(run, task, keep_going=keep_going, progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankWindow:
    """What is looked for on every rank."""

    wanted: Window | None
    data_load: tuple[str, ...]
    world_size: int | None

    def part(self, trace: Trace) -> Parts:
        """One rank's window and its path."""
        found = analyse(trace, self.wanted, data_load=self.data_load)
        return {trace.meta.rank: trimmed(trace, found)}

    def join(
        self, parts: Parts, left_out: Sequence[SkippedRank], _: Spread
    ) -> tuple[Joined, Sequence[SkippedRank]]:
        """The path through all of them."""
        ordered = sorted(parts)
        traces = {rank: parts[rank][0] for rank in ordered}
        found = {rank: parts[rank][1] for rank in ordered}
        whole = joined(traces, self.wanted, self.data_load, found)
        expected = expected_ranks(ordered, self.world_size, left_out)
        return replace(whole, expected_ranks=expected, failed=tuple(left_out)), left_out


def together(parts: Sequence[Parts]) -> Parts:
    """Return what some workers found, as one."""
    return {rank: each for part in parts for rank, each in part.items()}


MOST_RANKS = 16
_MOST_BYTES = 256 << 20  # of all files: whole traces of all ranks are in memory at once


def search(run: RunTraces, rank: int) -> tuple[CriticalPath, Joined | None]:
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
