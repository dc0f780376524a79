"""Run ranks one after another or in several processes of this machine."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

from fastcomm.errors import FastcommError
from fastcomm.executors import (
    Executor,
    Fold,
    Held,
    Here,
    Progress,
    Task,
    by_rank,
    died,
    lost,
    of_rank,
)
from fastcomm.executors.processes import Processes
from fastcomm.process import make_folder, remove_folder
from fastcomm.trace.run import RunTraces, SkippedRank, Source, one_by_one
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
class BatchTask(Generic[P]):
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
    sources: Sequence[Source], work: BatchTask[P], processes: Processes
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
    rest: deque[Source], work: BatchTask[P], processes: Processes, width: int, most: int
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


_LOG = logging.getLogger("fastcomm")


R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The engine of this machine, with so many processes; one is the caller's own."""

    workers: int = 1

    @property
    def is_here(self) -> bool:
        """True."""
        return True

    def gather(
        self,
        run: RunTraces,
        task: Task[P, R],
        *,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> R:
        """Do a task with a run; see `executor.Executor`."""
        fold, left_out = Fold(task.merge), list[SkippedRank]()
        workers = min(self.workers, len(run.sources))
        with _put_away(run, task) as put_away, Processes(workers) as processes:
            work = BatchTask(task=task, put_away=put_away)
            with closing(in_batches(run.sources, work, processes)) as batches:
                for batch in batches:
                    if batch.error is not None:
                        if not keep_going:
                            raise batch.error
                        left_out.append(lost(batch.sources[-1], batch.error))
                    if batch.partial is not None:
                        fold.add(batch.partial)
                    if progress is not None:
                        for source in batch.sources:
                            progress(source)
            failed = by_rank(left_out, len(run.sources), run.skipped)
            _LOG.debug("%d ranks read by %d processes", len(run.sources), workers)
            # What is in memory here would have to travel: it is asked here.
            spread = processes.spread if put_away else one_by_one
            answer = task.finish(fold.joined(), failed, spread)
        _LOG.debug("merged and answered")
        return answer

    def call(self, function: Callable[[], T]) -> T:
        """Call it."""
        return function()

    def hold(self, make: Callable[[], T]) -> Held[T]:
        """Make it here, to be asked by this process alone."""
        return Here(made=make())


def executor_of(workers: int | Executor) -> Executor:
    """The engine that is meant: so many processes of this machine, or the one that is given."""
    return Local(workers=workers) if isinstance(workers, int) else workers


@contextmanager
def _put_away(run: RunTraces, task: Task[P, R]) -> Iterator[Callable[[int, P], P] | None]:
    """What puts a partial away into the file of a number, where ranks are many."""
    if task.put_away is None or len(run.sources) <= WIDTH:
        yield None
        return
    try:
        folder = make_folder()
    except OSError as error:
        raise FastcommError(
            f"no temporary folder: {error.strerror}; wanted one that can be written, as TMPDIR"
        ) from error
    try:
        yield partial(_into, task.put_away, folder)
    finally:
        remove_folder(folder)


def _into(put_away: Callable[[P, Path], P], folder: Path, number: int, part: P) -> P:
    try:
        return put_away(part, folder / str(number))
    except OSError as error:
        raise FastcommError(
            f"{folder}: {error.strerror or error}; wanted room for what is measured of the "
            "ranks: a folder that has more, as TMPDIR"
        ) from error
