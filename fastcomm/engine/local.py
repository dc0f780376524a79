"""The ranks of a run, one after another or on several processes of this machine."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from fastcomm.errors import FastcommError
from fastcomm.trace.run import Run, Source
from fastcomm.trace.trace import Trace

P = TypeVar("P")

# What a worker needs; the server that they are forked from imports it once.
_PRELOAD = ["fastcomm.engine.preload"]


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
    forkserver.ensure_running()


def map_ranks(
    run: Run, measure: Callable[[Trace], P], workers: int = 1
) -> Iterator[Outcome[P]]:
    """The outcome of each rank, as they are done; a bug in `measure` is raised as it is."""
    if workers <= 1 or len(run.sources) <= 1:
        yield from (_outcome(source, measure) for source in run.sources)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with ProcessPoolExecutor(min(workers, len(run.sources)), mp_context=context) as pool:
        yield from _bounded(pool, run, measure, 2 * workers)


def _bounded(
    pool: ProcessPoolExecutor, run: Run, measure: Callable[[Trace], P], most: int
) -> Iterator[Outcome[P]]:
    """Results of a pool that holds at most so many ranks at a time, as memory must not grow."""
    sources = iter(run.sources)
    waiting: set[Future[Outcome[P]]] = set()
    while True:
        for source in islice(sources, most - len(waiting)):
            waiting.add(pool.submit(_outcome, source, measure))
        if not waiting:
            return
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


def _outcome(source: Source, measure: Callable[[Trace], P]) -> Outcome[P]:
    try:
        return Outcome(source=source, partial=measure(source.read()))
    except FastcommError as error:
        return Outcome(source=source, partial=None, error=error)
