"""Which part of a trace is looked at."""

from dataclasses import dataclass
from typing import Self

from fastcomm.errors import FastcommError


class WindowError(FastcommError):
    """There is no such window in the trace."""

    @classmethod
    def no_instance(cls, annotation: str, wanted: int, count: int) -> Self:
        """The trace has fewer instances than were asked for."""
        return cls(
            f"no instance {wanted} of {annotation!r}: the trace has {count}, "
            f"0 to {count - 1}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From when to when, in ns."""

    start: int
    stop: int


def instances(instance: object) -> tuple[int, int]:
    """The first and last instance that is meant: of None, a number or an inclusive pair."""
    pair = instance if isinstance(instance, tuple) else (instance, instance)
    if instance is None:
        pair = (0, 0)
    if len(pair) != 2 or not all(isinstance(k, int) and k >= 0 for k in pair):
        raise WindowError(
            f"instance {instance!r}; wanted a number from 0 on, or an inclusive pair of them"
        )
    first, last = pair
    if last < first:
        raise WindowError(f"instance {instance!r}: the last comes before the first")
    return first, last
