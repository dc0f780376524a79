"""How a function is called with each of several things: here, or beside each other."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Spread(Protocol):
    """What calls a function with each of several things, which do not depend on each other."""

    def __call__(self, function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
        """The answers, in the order of the things."""
        ...


def one_by_one(function: Callable[[A], B], things: Sequence[A], /) -> list[B]:
    """The `Spread` of one process."""
    return [function(thing) for thing in things]
