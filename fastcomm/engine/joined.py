"""The critical path through all ranks: each rank's window by itself, then all in one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastcomm.critical_path.analysis import analyse
from fastcomm.critical_path.ranks import Joined, joined
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.trimmed import trimmed
from fastcomm.critical_path.window import Wanted
from fastcomm.engine.engine import Engine, Progress, Task
from fastcomm.engine.local import engine_of
from fastcomm.spread import Spread
from fastcomm.trace.run import Run, SkippedRank, expected_ranks
from fastcomm.trace.trace import Trace

_Parts = dict[int, tuple[Trace, CriticalPath]]  # by rank


def join(
    run: Run,
    wanted: Wanted | None = None,
    data_load: Sequence[str] = (),
    *,
    workers: int | Engine = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> tuple[Joined, Sequence[SkippedRank]]:
    """The path of a window, and the ranks that were left out.

    Raises `FastcommError` where no communication is the same on two ranks, and as
    `Engine.gather` does.
    """
    window = _Window(wanted=wanted, data_load=tuple(data_load), world_size=run.world_size)
    task = Task(measure=window.part, merge=_together, finish=window.join)
    return engine_of(workers).gather(run, task, keep_going=keep_going, progress=progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What is looked for on every rank."""

    wanted: Wanted | None
    data_load: tuple[str, ...]
    world_size: int | None

    def part(self, trace: Trace) -> _Parts:
        """One rank's window and its path."""
        found = analyse(trace, self.wanted, data_load=self.data_load)
        return {trace.meta.rank: trimmed(trace, found)}

    def join(
        self, parts: _Parts, left_out: Sequence[SkippedRank], _: Spread
    ) -> tuple[Joined, Sequence[SkippedRank]]:
        """The path through all of them."""
        ordered = sorted(parts)
        traces = {rank: parts[rank][0] for rank in ordered}
        found = {rank: parts[rank][1] for rank in ordered}
        whole = joined(traces, self.wanted, self.data_load, found)
        expected = expected_ranks(ordered, self.world_size, left_out)
        return replace(whole, expected_ranks=expected), left_out


def _together(parts: Sequence[_Parts]) -> _Parts:
    whole: dict[int, Any] = {}
    for part in parts:
        whole |= part
    return whole
