"""A directory that all workers of a cluster share: what ranks leave is there, not in memory.

Without one, all that is measured of a run comes together in the memory of one worker. With one,
that worker spreads its questions over all: each reads what it needs of the files.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

from fastcomm.engine.batches import WIDTH
from fastcomm.engine.engine import Task
from fastcomm.engine.versions import check_code, code
from fastcomm.errors import FastcommError
from fastcomm.spread import Spread, one_by_one

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
        asked = [client.submit(_asked, held, thing, code(), pure=False) for thing in things]
        answers: list[B] = client.gather(asked)
        return answers


def _asked(function: Callable[[A], B], thing: A, wanted: str) -> B:
    check_code(wanted)
    return function(thing)
