"""Ranks in batches, so that what is small does not cost a message and a merge each.

A batch ends with the first rank that fails, and after a moment: large ranks are batches of
their own, and whoever waits sees that it goes on.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any, Generic, TypeVar

from fastcomm.engine.engine import Task, died, of_rank
from fastcomm.engine.processes import Processes
from fastcomm.errors import FastcommError
from fastcomm.trace.run import Source
from fastcomm.trace.trace import Trace

P = TypeVar("P")

WIDTH = 128  # ranks of a batch, at most
_TAKES_S = 1.0
_SMALL = 1 << 16  # events of ranks that are measured together
_ALONE = 2  # workers that a rank may cost alone: one may have died of something else
_SHARES = 4  # of a worker, at least: so that all are done at about the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[P]):
    """Ranks that are done: those that are well in one partial, and the error of the last."""

    sources: tuple[Source, ...]
    partial: P | None
    error: FastcommError | None = None


_Done = tuple[int, P | None, FastcommError | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Generic[P]):
    """What is done with some ranks at a time, by one process."""

    task: Task[P, Any]
    put_away: Callable[[int, P], P] | None = None

    def __call__(self, sources: Sequence[Source]) -> _Done[P]:
        """How many are done, their partial, and the error of the last."""
        parts, small, error = list[P](), list[Trace](), None
        until, done = monotonic() + _TAKES_S, 0
        while done < len(sources) and error is None and monotonic() < until:
            try:
                with of_rank(sources[done]):
                    self._measure(self.task.read(sources[done]), parts, small)
            except FastcommError as found:
                error = found
            done += 1
        if small:
            with of_rank(sources[done - 1]):
                parts.append(self.task.measure(*small))
        if not parts:
            return done, None, error
        whole = self.task.merge(parts)
        return done, self.put_away(sources[0].rank, whole) if self.put_away else whole, error

    def _measure(self, trace: Trace, parts: list[P], small: list[Trace]) -> None:
        """Measure a rank, or keep it to be measured with others that are small."""
        if not self.task.of_many or trace.events.num_rows > _SMALL:
            parts.append(self.task.measure(trace))
            return
        if sum(each.events.num_rows for each in (trace, *small)) > _SMALL:
            parts.append(self.task.measure(*small))
            small.clear()
        small.append(trace)


def in_batches(
    sources: Sequence[Source], work: Work[P], processes: Processes
) -> Generator[Batch[P], None, None]:
    """All ranks, as they are done; a bug in `measure` is raised as it is.

    Where a worker dies, the ranks that were with workers are read again, one at a time: the
    one that is at fault is known then, and costs no other.
    """
    width = max(1, min(WIDTH, len(sources) // (_SHARES * processes.number)))
    most = 1 if processes.number == 1 else 2 * processes.number
    rest = deque(sources)
    while rest:
        held = yield from _while_well(rest, work, processes, width, most)
        for source in held:
            again = [source]
            for _ in range(_ALONE):
                again = yield from _while_well(deque(again), work, processes, 1, 1)
            if again:
                yield Batch(sources=(source,), partial=None, error=died(source))


def _while_well(
    rest: deque[Source], work: Work[P], processes: Processes, width: int, most: int
) -> Generator[Batch[P], None, list[Source]]:
    """The batches until none is left, or a worker dies: then it gives what workers had.

    Workers have at most so many batches at a time, as memory must not grow.
    """
    waiting: dict[Future[_Done[P]], list[Source]] = {}
    while rest or waiting:
        try:
            while rest and len(waiting) < most:
                batch = list(islice(rest, width))
                waiting[processes.submit(work, batch)] = batch
                for _ in batch:
                    rest.popleft()
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                done, partial, error = future.result()
                batch = waiting.pop(future)
                rest.extendleft(reversed(batch[done:]))
                yield Batch(sources=tuple(batch[:done]), partial=partial, error=error)
        except BrokenProcessPool as error:
            processes.replace(error)
            return [source for batch in waiting.values() for source in batch]
    return []
