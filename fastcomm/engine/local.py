"""The ranks of a run, one after another or on several processes of this machine.

Workers are processes: up to half of a rank's time holds Python's lock, so that more than two
threads gain little (docs/scale-out.md has the measurement).
"""

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from fastcomm.engine.engine import (
    Engine,
    Fold,
    Lost,
    Progress,
    Task,
    by_rank,
    died,
    lost,
    measured,
)
from fastcomm.engine.held import Held, Here
from fastcomm.engine.interrupts import held_back
from fastcomm.errors import FastcommError
from fastcomm.trace.run import Run, Source
from fastcomm.trace.trace import Trace

_LOG = logging.getLogger("fastcomm")

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")

# What a worker needs; the server that they are forked from imports it once.
_PRELOAD = ["fastcomm.engine.preload"]


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
        run: Run,
        task: Task[P, R],
        *,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> R:
        """Do a task with a run; see `engine.Engine`."""
        fold, left_out = Fold(task.merge), list[Lost]()
        with closing(map_ranks(run, task.measure, self.workers)) as outcomes:
            for outcome in outcomes:
                if outcome.error is None and outcome.partial is not None:
                    fold.add(outcome.partial)
                elif outcome.error is not None:
                    if not keep_going:
                        raise outcome.error
                    left_out.append(lost(outcome.source, outcome.error))
                if progress is not None:
                    progress(outcome.source)
        failed = by_rank(left_out, len(run.sources))
        _LOG.debug("%d ranks read by %d processes", len(run.sources), self.workers)
        answer = task.finish(fold.joined(), failed)
        _LOG.debug("merged and answered")
        return answer

    def call(self, function: Callable[[], T]) -> T:
        """Call it."""
        return function()

    def hold(self, make: Callable[[], T]) -> Held[T]:
        """Make it here, to be asked by this process alone."""
        return Here(made=make())


def engine_of(workers: int | Engine) -> Engine:
    """The engine that is meant: so many processes of this machine, or the one that is given."""
    return Local(workers=workers) if isinstance(workers, int) else workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[P]):
    """What became of one rank: a partial, or the error that cost it."""

    source: Source
    partial: P | None
    error: FastcommError | None = None


def start_early() -> None:
    """Start the server that workers are forked from, so that it imports while we do."""
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload(_PRELOAD)
    with held_back():
        forkserver.ensure_running()


def map_ranks(
    run: Run, measure: Callable[[Trace], P], workers: int = 1
) -> Generator[Outcome[P], None, None]:
    """The outcome of each rank, as they are done; a bug in `measure` is raised as it is.

    Where a worker dies, the ranks that were with workers are read again, one at a time: the
    one that is at fault is known then, and costs no other.
    """
    if workers <= 1 or len(run.sources) <= 1:
        yield from (_outcome(source, measure) for source in run.sources)
        return
    waiting: Sequence[Source] = run.sources
    while waiting:
        held, waiting = yield from _pooled(waiting, measure, min(workers, len(waiting)))
        for source in held:
            again, _ = yield from _pooled([source], measure, 1)
            if again:
                yield Outcome(source=source, partial=None, error=died(source))


_Left = tuple[list[Source], list[Source]]


def _pooled(
    sources: Sequence[Source], measure: Callable[[Trace], P], workers: int
) -> Generator[Outcome[P], None, _Left]:
    """The outcomes of a pool; it gives what it held when a worker died, and what was to come.

    It holds at most two ranks a worker at a time, as memory must not grow.
    """
    rest = iter(sources)
    waiting: dict[Future[Outcome[P]], Source] = {}
    with _pool(workers) as pool:
        while True:
            try:
                for source in islice(rest, 2 * workers - len(waiting)):
                    waiting[pool.submit(_outcome, source, measure)] = source
            except BrokenProcessPool:
                return [*waiting.values(), source], list(rest)
            if not waiting:
                return [], []
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                if isinstance(future.exception(), BrokenProcessPool):
                    return list(waiting.values()), list(rest)
                del waiting[future]
                yield future.result()


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end at once where the work is broken off, or where this process ends."""
    start_early()
    context = multiprocessing.get_context("forkserver")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_end_with, initargs=(theirs,)
    )
    try:
        yield pool
        pool.shutdown()
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        theirs.close()


def _end_with(line: Connection) -> None:
    """In a worker: end when the other end of a pipe is closed, by whatever."""

    def watch() -> None:
        multiprocessing.connection.wait([line])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _outcome(source: Source, measure: Callable[[Trace], P]) -> Outcome[P]:
    try:
        return Outcome(source=source, partial=measured(source, measure))
    except FastcommError as error:
        return Outcome(source=source, partial=None, error=error)
