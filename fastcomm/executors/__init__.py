"""Run a function on every rank and merge the results: serial, in processes, or on Dask.

Here are the interface of executors, and the one that runs ranks one after another or in several
processes of this machine.
"""

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
from typing import Any, Generic, Protocol, TypeVar

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.executors.processes import Processes
from fastcomm.process import make_folder, remove_folder
from fastcomm.trace.run import RunTraces, SkippedRank, Source, Spread, one_by_one
from fastcomm.trace.trace import Trace

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")

WIDTH = 128  # ranks of a batch, at most
_TAKES_S = 1.0
_SMALL = 1 << 16  # events of ranks that are measured together
_ALONE = 2  # workers that a rank may cost alone: one may have died of something else
_SHARES = 4  # of a worker, at least: so that all are done at about the same time


class Held(Protocol[S_co]):
    """What an engine holds."""

    def ask(self, questions: Sequence[Callable[[S_co], T]]) -> list[T]:
        """The answers, in the order of the questions; the first error is raised."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Here(Generic[S]):
    """What this process holds."""

    made: S

    def ask(self, questions: Sequence[Callable[[S], T]]) -> list[T]:
        """Ask them, one after another."""
        return [each(self.made) for each in questions]

    def close(self) -> None:
        """It goes with this object."""


P = TypeVar("P")
R = TypeVar("R")


Progress = Callable[[Source], None]  # of a rank that is done with, well or not

_WIDTH = 16  # what is merged at once: many small tables would pin the memory between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[P, R]):
    """What is done with each rank and then with all; it goes to workers and must pickle.

    `is_narrow`: it asks a trace for no more than `trace.schema.NARROW`. `of_many`: `measure`
    takes several ranks, too, of which none fails for what another is.
    `finish` gets what is merged, the ranks that are left out, and what spreads its work.
    `put_away` moves what is large of some ranks into a file of a folder that is gone after
    `finish`; who has thousands of ranks calls it before they merge.
    """

    measure: Callable[..., P]
    merge: Callable[[Sequence[P]], P]  # of different ranks, in any order
    finish: Callable[[P, Sequence[SkippedRank], Spread], R]
    put_away: Callable[[P, Path], P] | None = None
    is_narrow: bool = False
    of_many: bool = False

    def read(self, source: Source) -> Trace:
        """Read as much of a rank as is measured."""
        return ((source.read_narrow if self.is_narrow else None) or source.read)()

    def of_source(self, source: Source) -> P:
        """Read a rank and measure it; whatever goes wrong says of which."""
        with of_rank(source):
            return self.measure(self.read(source))


class Executor(Protocol):
    """What reads ranks."""

    @property
    def is_here(self) -> bool:
        """Whether ranks are read on this machine, with the kernels that are compiled here."""
        ...

    def gather(
        self,
        run: RunTraces,
        task: Task[P, R],
        *,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> R:
        """Do a task with a run.

        Raises the first rank's error, or with `keep_going` skips the rank, and raises only if
        no rank is left. Ranks that the run itself skipped are among those that `finish` gets.
        A bug in the task is raised as it is.
        """
        ...

    def call(self, function: Callable[[], T]) -> T:
        """Call a function where the files can be seen."""
        ...

    def hold(self, make: Callable[[], T]) -> Held[T]:
        """Make something where the files can be seen, to ask it one question after another."""
        ...


class Fold(Generic[T]):
    """A tree of items that are joined as they come, so that few are held at any time."""

    def __init__(self, join: Callable[[Sequence[T]], T]) -> None:
        self.join = join
        self.levels: list[list[T]] = []

    def add(self, item: T) -> None:
        """Add one item."""
        for level in self.levels:
            level.append(item)
            if len(level) < _WIDTH:
                return
            item = self.join(list(level))
            level.clear()
        self.levels.append([item])

    def joined(self) -> T:
        """All of them in one; there is at least one."""
        return self.join([item for level in self.levels for item in level])


@contextmanager
def of_rank(source: Source) -> Iterator[None]:
    """Whatever goes wrong says with which rank."""
    try:
        yield
    except FastcommError:
        raise
    except MemoryError as error:
        raise TraceFileError(
            f"{source.path}: rank {source.rank} does not fit into memory; wanted more of it "
            "for each worker, or fewer workers"
        ) from error
    except Exception as error:
        error.add_note(f"rank {source.rank}: {source.path}")
        raise


def died(source: Source) -> TraceFileError:
    """The error of a rank that no worker survives."""
    return TraceFileError(
        f"{source.path}: the worker that read rank {source.rank} was killed, and so was the "
        "next that had nothing else to do; out of memory, most likely: wanted more for each "
        "worker, or fewer workers"
    )


def lost(source: Source, error: Exception) -> SkippedRank:
    """A rank that is left out."""
    return SkippedRank(rank=source.rank, path=str(source.path), error=str(error))


def by_rank(
    left_out: Sequence[SkippedRank], ranks: int, skipped: Sequence[SkippedRank] = ()
) -> tuple[SkippedRank, ...]:
    """Sort skipped ranks, those of unknown number last.

    `left_out` are some of the run's `ranks` sources, `skipped` ranks without a source.
    FastcommError where no rank is left.
    """
    if len(left_out) == ranks:
        first = min(left_out, key=_order)
        raise FastcommError(f"no rank could be read: {first.error}")
    return tuple(sorted([*left_out, *skipped], key=_order))


def _order(each: SkippedRank) -> tuple[bool, int, str]:
    return each.rank is None, each.rank or 0, each.path


def both(
    merged: P, left_out: Sequence[SkippedRank], _: Spread
) -> tuple[P, Sequence[SkippedRank]]:
    """A `Task.finish` that leaves the answer to the caller."""
    return merged, left_out


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
