"""Something that is made once, where its files can be seen, and asked many questions.

What is held may be large, and stays where it is; a question pickles, and its answer is small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")


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
