"""Run a function on every rank and merge the results: serial, in processes, or on Dask.

This module defines the interface of executors, and the executor that runs ranks one after
another, or in several processes of this machine.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, islice
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from fastcomm.checks import MOST_WORKERS, Range, invalid_value
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.executors.processes import CopiedObject, Processes
from fastcomm.process import make_folder, remove_folder
from fastcomm.trace.run_traces import (
    Content,
    ParallelMap,
    RunTraces,
    SkippedRank,
    Source,
    one_by_one,
)
from fastcomm.trace.trace import Trace

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")
P = TypeVar("P")
R = TypeVar("R")
Progress = Callable[[Source], None]  # called with each finished rank, also a failed one
_LOG = logging.getLogger("fastcomm")
_MERGED = 16  # partial results merged at once: small tables pin the memory between them
WIDTH = 128  # ranks of a batch, at most
_SMALL = 1 << 16  # events of small ranks that are measured together
_MOST_ATTEMPTS = 2  # for a rank alone: the first worker may have died for another reason
_BATCH_S = 1.0  # time of a batch
SHARES = 4  # batches of a worker, at least: all workers end at about the same time
_Done = tuple[int, P | None, FastcommError | None]
PRELOAD = "fastcomm.preload"  # has the kernels ready before workers need them
# Shows that ranks are read while its block runs, which gets the function that counts each.
ShowProgress = Callable[[RunTraces], AbstractContextManager[Progress | None]]


class SharedObject(Protocol[S_co]):
    """An object in the memory of an executor, which functions are applied to."""

    def apply(self, functions: Sequence[Callable[[S_co], T]]) -> list[T]:
        """Apply functions, and return their results in order. Raises the first error."""
        ...

    def close(self) -> None:
        """Release the object."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[P, R]):
    """The work on a run: measure each rank, merge the partial results, finish.

    A task is sent to workers and must be picklable.

    `measure` returns the partial result of one trace; with `takes_many` also of several traces,
    whose errors do not depend on each other. `merge` is associative and commutative. `finish`
    gets the merged partial result, the skipped ranks, and a function that spreads its work over
    workers. `spill` moves the large tables of a partial result to the file of a path, which is
    removed after `finish`; it is called for runs of many ranks. `content` is the part
    of a trace that `measure` needs.
    """

    measure: Callable[..., P]
    merge: Callable[[Sequence[P]], P]
    finish: Callable[[P, Sequence[SkippedRank], ParallelMap], R]
    spill: Callable[[P, Path], P] | None = None
    content: Content = "work"
    takes_many: bool = False

    def read(self, source: Source) -> Trace:
        """Read the part of a rank that `measure` needs."""
        return source.read(self.content)


class Executor(Protocol):
    """Runs tasks on the ranks of runs."""

    @property
    def is_local(self) -> bool:
        """Whether ranks are read on this machine, with its compiled kernels."""
        ...

    def gather(self, run: RunTraces, task: Task[P, R], progress: Progress | None = None) -> R:
        """Run a task on all ranks of a run, and return the result of `task.finish`.

        `progress` is called with the source of each finished rank, also of one that is skipped.
        Raises `FastcommError` for the first unreadable rank. Of a run that goes on, such ranks
        are passed to `task.finish`, as are those that the run itself skipped; then the error is
        raised only if no rank is readable. Other errors of the task are raised unchanged.
        """
        ...

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on a machine that can read the files."""
        ...

    def hold(self, make: Callable[[], T]) -> SharedObject[T]:
        """Create an object on a machine that can read the files."""
        ...


class TreeReducer(Generic[T]):
    """Merges items in a tree as they arrive, so that few are in memory at any time."""

    def __init__(self, merge: Callable[[Sequence[T]], T]) -> None:
        self.merge = merge
        self.levels: list[list[T]] = []

    def add(self, item: T) -> None:
        """Add one item, and merge each level that is full."""
        for level in self.levels:
            level.append(item)
            if len(level) < _MERGED:
                return
            item = self.merge(list(level))
            level.clear()
        self.levels.append([item])

    def result(self) -> T:
        """Merge all added items into one. Requires at least one item."""
        return self.merge([item for level in self.levels for item in level])


@contextmanager
def annotate_errors(source: Source) -> Iterator[None]:
    """Add the rank and the path to errors other than `FastcommError` that are raised inside."""
    try:
        yield
    except FastcommError:
        raise
    except MemoryError as error:
        raise TraceFileError(
            f"{source.path}: rank {source.rank} does not fit into memory. Use fewer workers, "
            "or a machine with more memory"
        ) from error
    except Exception as error:
        error.add_note(f"rank {source.rank}: {source.path}")
        raise


def died(source: Source) -> TraceFileError:
    """Return the error of a rank whose workers were killed."""
    return TraceFileError(
        f"{source.path}: the worker that read rank {source.rank} was killed, also in a second "
        "attempt without other work. Probably it ran out of memory: use fewer workers, or give "
        "each more memory"
    )


def skipped_rank(source: Source, error: Exception) -> SkippedRank:
    """Return the record of a rank that is skipped because of an error."""
    return SkippedRank(rank=source.rank, path=str(source.path), error=str(error))


def by_rank(
    unread: Sequence[SkippedRank], ranks: int, skipped: Sequence[SkippedRank] = ()
) -> tuple[SkippedRank, ...]:
    """Return all skipped ranks, sorted by rank; those of unknown rank are last.

    `unread` are unreadable ones of the `ranks` ranks of a run, `skipped` ranks whose files
    could not be opened. Raises `FastcommError` if no rank could be read.
    """
    if len(unread) == ranks:
        first = min(unread, key=_order)
        raise FastcommError(f"no rank could be read: {first.error}")
    return tuple(sorted([*unread, *skipped], key=_order))


def _order(skipped: SkippedRank) -> tuple[bool, int, str]:
    return skipped.rank is None, skipped.rank or 0, skipped.path


def both(
    merged: P, unread: Sequence[SkippedRank], _: ParallelMap
) -> tuple[P, Sequence[SkippedRank]]:
    """Return the merged partial result and the skipped ranks; a `Task.finish`."""
    return merged, unread


def of_each(
    measure: Callable[[Trace], T], content: Content = "work"
) -> Task[tuple[T, ...], tuple[tuple[T, ...], Sequence[SkippedRank]]]:
    """Return a task whose result is that of each rank, in any order, and the skipped ranks."""
    return Task(
        measure=partial(_alone, measure), merge=_concatenated, finish=both, content=content
    )


def _alone(measure: Callable[[Trace], T], trace: Trace) -> tuple[T, ...]:
    return (measure(trace),)


def _concatenated(parts: Sequence[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[P]):
    """Finished ranks: the partial result of the readable ones, and the error of the last."""

    sources: tuple[Source, ...]
    partial: P | None
    error: FastcommError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTask(Generic[P]):
    """A task on a batch of ranks, in one process."""

    task: Task[P, Any]
    spill: Callable[[int, P], P] | None = None
    has_limit: bool = True  # whether a batch ends after `_BATCH_S`

    def __call__(self, sources: Sequence[Source]) -> _Done[P]:
        """Measure ranks until the time of a batch is over, or one fails.

        Returns the number of finished ranks, their partial result, and the error of the last.
        """
        parts, small, error = list[P](), list[Trace](), None
        until, done = monotonic() + (_BATCH_S if self.has_limit else inf), 0
        while done < len(sources) and error is None and monotonic() < until:
            try:
                with annotate_errors(sources[done]):
                    self._measure(self.task.read(sources[done]), parts, small)
            except FastcommError as failure:
                error = failure
            done += 1
        if small:
            with annotate_errors(sources[done - 1]):
                parts.append(self.task.measure(*small))
        if not parts:
            return done, None, error
        whole = self.task.merge(parts)
        return done, self.spill(sources[0].rank, whole) if self.spill else whole, error

    def _measure(self, trace: Trace, parts: list[P], small: list[Trace]) -> None:
        """Measure a trace, or collect it to be measured with other small traces."""
        if not self.task.takes_many or trace.events.num_rows > _SMALL:
            parts.append(self.task.measure(trace))
            return
        if sum(other.events.num_rows for other in (trace, *small)) > _SMALL:
            parts.append(self.task.measure(*small))
            small.clear()
        small.append(trace)


def in_batches(
    sources: Sequence[Source], work: BatchTask[P], processes: Processes
) -> Generator[Batch[P], None, None]:
    """Measure ranks in processes, and yield the partial results of a batch when it is finished.

    If a worker is killed, the ranks of all workers are read again one at a time. This tells
    which rank is at fault, and other ranks are not affected. Bugs in the measuring function are
    raised unchanged.
    """
    width = max(1, min(WIDTH, len(sources) // (SHARES * processes.number)))
    most = 1 if processes.number == 1 else 2 * processes.number
    pending = deque(sources)
    while pending:
        suspects = yield from _until_death(pending, work, processes, width, most)
        for source in suspects:
            unread = [source]
            for _ in range(_MOST_ATTEMPTS):
                unread = yield from _until_death(deque(unread), work, processes, 1, 1)
            if unread:
                yield Batch(sources=(source,), partial=None, error=died(source))


def _until_death(
    pending: deque[Source], work: BatchTask[P], processes: Processes, width: int, most: int
) -> Generator[Batch[P], None, list[Source]]:
    """Yield batches of at most `width` ranks until all are done or a worker is killed.

    Returns the ranks that workers had when one was killed. At most `most` batches are submitted
    at a time, to bound the memory.
    """
    waiting: dict[Future[_Done[P]], list[Source]] = {}
    while pending or waiting:
        try:
            while pending and len(waiting) < most:
                batch = list(islice(pending, width))
                waiting[processes.submit(work, batch)] = batch
                for _ in batch:
                    pending.popleft()
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                done, partial, error = future.result()
                batch = waiting.pop(future)
                pending.extendleft(reversed(batch[done:]))
                yield Batch(sources=tuple(batch[:done]), partial=partial, error=error)
        except BrokenProcessPool as error:
            processes.replace(error)
            return [source for batch in waiting.values() for source in batch]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The executor of this machine: `workers` processes, or this process if 1.

    `preload` is a module that is imported once for all processes.
    """

    is_local: ClassVar[bool] = True
    workers: int = 1
    preload: str | None = None

    def gather(self, run: RunTraces, task: Task[P, R], progress: Progress | None = None) -> R:
        """Run a task on all ranks of a run; see `Executor.gather`."""
        reducer, unread = TreeReducer(task.merge), list[SkippedRank]()
        workers = min(self.workers, len(run.sources))
        with _spill_folder(run, task) as spill, Processes(workers, self.preload) as processes:
            work = BatchTask(task=task, spill=spill)
            with closing(in_batches(run.sources, work, processes)) as batches:
                for batch in batches:
                    if batch.error is not None:
                        if not run.keep_going:
                            raise batch.error
                        unread.append(skipped_rank(batch.sources[-1], batch.error))
                    if batch.partial is not None:
                        reducer.add(batch.partial)
                    if progress is not None:
                        for source in batch.sources:
                            progress(source)
            failed = by_rank(unread, len(run.sources), run.skipped)
            _LOG.debug("%d ranks read by %d processes", len(run.sources), workers)
            # Without spill files, sending the partial results to workers would take longer.
            parallel_map = processes.spread if spill else one_by_one
            result = task.finish(reducer.result(), failed, parallel_map)
        _LOG.debug("partial results merged and finished")
        return result

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in this process."""
        return function()

    def hold(self, make: Callable[[], T]) -> SharedObject[T]:
        """Create an object in this process; with several workers, also in each of them."""
        return CopiedObject(make, Processes(self.workers, self.preload))


@contextmanager
def _spill_folder(run: RunTraces, task: Task[P, R]) -> Iterator[Callable[[int, P], P] | None]:
    """Yield a function that spills a partial result to a numbered file; None for few ranks."""
    if task.spill is None or len(run.sources) <= WIDTH:
        yield None
        return
    try:
        folder = make_folder()
    except OSError as error:
        raise FastcommError(
            f"cannot make a temporary folder: {error.strerror}. Set TMPDIR to a writable folder"
        ) from error
    try:
        yield partial(_spill, task.spill, folder)
    finally:
        remove_folder(folder)


def _spill(spill: Callable[[P, Path], P], folder: Path, number: int, part: P) -> P:
    try:
        return spill(part, folder / str(number))
    except OSError as error:
        raise FastcommError(
            f"{folder}: cannot write spill files: {error.strerror or error}. Set TMPDIR to a "
            "folder with more space"
        ) from error


def executor_of(workers: int | Executor) -> Executor:
    """Return the executor for a number of local processes; executors are returned as is.

    Raises ConfigError for anything else.
    """
    if not isinstance(workers, int) and hasattr(workers, "gather"):
        return workers
    valid = Range(1, MOST_WORKERS)
    if not isinstance(workers, int) or not valid.holds(workers):
        raise invalid_value("workers", workers, f"{valid} (of processes), or an executor")
    return Local(workers=workers, preload=PRELOAD)


def unseen(_: RunTraces) -> AbstractContextManager[None]:
    """Show no progress."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun(RunTraces):
    """The traces of a run, and how an analysis reads them."""

    executor: Executor
    show_progress: ShowProgress = unseen

    @classmethod
    def of(cls, traces: RunTraces, executor: Executor, show: ShowProgress = unseen) -> Self:
        """Return traces together with their executor, and what shows the progress."""
        values: dict[str, Any] = {
            field.name: getattr(traces, field.name) for field in fields(RunTraces)
        }
        return cls(**values, executor=executor, show_progress=show)

    def gather(self, task: Task[P, R]) -> R:
        """Run a task on all ranks; see `Executor.gather`."""
        with self.show_progress(self) as progress:
            return self.executor.gather(self, task, progress)

    def compile(self, kernels: Callable[[], object]) -> None:
        """Compile kernels before they are needed, if this machine needs them."""
        if self.executor.is_local:
            kernels()
