"""What a cluster holds: made by one worker, handed on by workers to those that are asked.

A worker that goes away takes along what it held and the questions that it had; others make
and answer them again.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastcomm.engine.versions import check_code, code
from fastcomm.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Future

    from fastcomm.engine.dask import Dask

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
