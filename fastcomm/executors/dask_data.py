"""Data that stays on a Dask cluster: held by workers, or in a shared directory."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4

from fastcomm.errors import ClusterError, FastcommError
from fastcomm.executors.executor import Task
from fastcomm.executors.local import WIDTH
from fastcomm.executors.versions import check_code, code
from fastcomm.trace.run import Spread, one_by_one

if TYPE_CHECKING:
    from distributed import Future

    from fastcomm.executors.dask import Dask

S = TypeVar("S")
T = TypeVar("T")


class There(Generic[S]):
    """What the workers of a cluster hold."""

    def __init__(self, engine: "Dask", make: Callable[[], S]) -> None:
        self.engine, self.make = engine, make
        self.made = self._made()

    def ask(self, questions: Sequence[Callable[[S], T]]) -> list[T]:
        """Ask all at once; those that a worker died of are asked again, one at a time."""
        from distributed import KilledWorker

        futures = [self._asked(each) for each in questions]
        answers: list[Any] = []
        again: list[int] = []
        try:
            for place, future in enumerate(futures):
                try:
                    answers.append(self.engine.answer(future))
                except KilledWorker:
                    answers.append(None)
                    again.append(place)
        finally:
            with suppress(Exception):
                self.engine.client.cancel(futures)
        for place in again:
            answers[place] = self._once_more(questions[place])
        return answers

    def close(self) -> None:
        """Let the workers forget it."""
        with suppress(Exception):
            self.made.release()

    def _once_more(self, question: Callable[[S], T]) -> T:
        """The answer of a question that has the cluster for itself."""
        from distributed import KilledWorker

        if self.made.status == "error":
            self.made = self._made()
        try:
            return self.engine.answer(self._asked(question))
        except KilledWorker as error:
            raise ClusterError(
                f"--dask {self.engine.address}: a worker died, and so did the next that had "
                "nothing else to do; out of memory, most likely: wanted more for each worker"
            ) from error

    def _made(self) -> "Future[S]":
        return self.engine.client.submit(_made, self.make, code(), pure=False)

    def _asked(self, question: Callable[[S], T]) -> "Future[T]":
        return self.engine.client.submit(_asked, self.made, question, code(), pure=False)


def _made(make: Callable[[], S], wanted: str) -> S:
    """On a worker: what is held, by the same fastcomm as the caller's."""
    check_code(wanted)
    return make()


def _asked(made: S, question: Callable[[S], T], wanted: str) -> T:
    """On a worker: one answer."""
    check_code(wanted)
    return question(made)


A = TypeVar("A")
B = TypeVar("B")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Scratch(Generic[P]):
    """How the ranks of a task come together on the workers; it goes to them."""

    task: Task[P, Any]
    folder: Path | None  # of this run alone; None: in memory

    @classmethod
    def of(cls, shared: Path | None, task: Task[P, Any], ranks: int) -> "Scratch[P]":
        """In a shared directory where there is one, and where ranks are many."""
        if shared is None or task.put_away is None or ranks <= WIDTH:
            return cls(task, None)
        return cls(task, shared / f"fastcomm-{uuid4().hex}")

    @property
    def spread(self) -> Spread:
        """How questions of the answer are asked: what is in memory would have to travel."""
        return one_by_one if self.folder is None else _spread

    def merge(self, parts: Sequence[P]) -> P:
        """On a worker: some ranks in one, and what is large of them in a file."""
        whole = self.task.merge(parts)
        if self.folder is None or self.task.put_away is None:
            return whole
        with _wanted(self.folder):
            # A worker that is lost may have written the same before: no name comes twice.
            return self.task.put_away(whole, self.folder / uuid4().hex)


def make(folder: Path) -> None:
    """On a worker, once: who writes too late, when all is over, finds no directory."""
    with _wanted(folder):
        folder.mkdir(parents=True, exist_ok=True)


def remove(folder: Path) -> None:
    """On a worker: the directory is gone."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _wanted(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FastcommError(
            f"{folder}: {error.strerror or error}; wanted a directory that all workers share "
            "and can write, with room for what is measured of the ranks"
        ) from error


def _spread(function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
    """On a worker: a `Spread` over all workers; this one does other work meanwhile."""
    from distributed import worker_client

    with worker_client() as client:
        # It knows all pieces: it travels once to a worker, not with each question.
        held = client.scatter(function, hash=False)
        asked = [
            client.submit(_scratch_dask_asked, held, thing, code(), pure=False)
            for thing in things
        ]
        answers: list[B] = client.gather(asked)
        return answers


def _scratch_dask_asked(function: Callable[[A], B], thing: A, wanted: str) -> B:
    check_code(wanted)
    return function(thing)
