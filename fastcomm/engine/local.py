"""The ranks of a run, one after another or on several processes of this machine.

Workers are processes: up to half of a rank's time holds Python's lock, so that more than two
threads gain little (docs/scale-out.md has the measurement).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastcomm.engine.batches import WIDTH, Work, in_batches
from fastcomm.engine.engine import Engine, Fold, Progress, Task, by_rank, lost
from fastcomm.engine.held import Held, Here
from fastcomm.engine.processes import Processes
from fastcomm.errors import FastcommError
from fastcomm.spread import one_by_one
from fastcomm.temporary import make_folder, remove_folder
from fastcomm.trace.run import Run, SkippedRank

_LOG = logging.getLogger("fastcomm")

P = TypeVar("P")
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
        run: Run,
        task: Task[P, R],
        *,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> R:
        """Do a task with a run; see `engine.Engine`."""
        fold, left_out = Fold(task.merge), list[SkippedRank]()
        workers = min(self.workers, len(run.sources))
        with _put_away(run, task) as put_away, Processes(workers) as processes:
            work = Work(task=task, put_away=put_away)
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


def engine_of(workers: int | Engine) -> Engine:
    """The engine that is meant: so many processes of this machine, or the one that is given."""
    return Local(workers=workers) if isinstance(workers, int) else workers


@contextmanager
def _put_away(run: Run, task: Task[P, R]) -> Iterator[Callable[[int, P], P] | None]:
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
