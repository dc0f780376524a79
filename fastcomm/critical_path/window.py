"""Which part of a trace is looked at."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow.compute as pc

from fastcomm.errors import FastcommError
from fastcomm.options import Window
from fastcomm.trace.run import ranges
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace

_ALL = 1 << 62


class WindowError(FastcommError):
    """There is no such window in the trace."""

    @classmethod
    def no_instance(cls, annotation: str, wanted: int, count: int) -> Self:
        """The trace has fewer instances than were asked for."""
        return cls(
            f"no instance {wanted} of {annotation!r}: the trace has {count}, 0 to {count - 1}"
        )

    @classmethod
    def no_annotation(cls, annotation: str) -> Self:
        """Nothing in the trace is called so."""
        return cls(f"no event's name contains {annotation!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """From when to when, in ns."""

    start: int
    stop: int


def instances(instance: object) -> tuple[int, int]:
    """The first and last instance that is meant: of None, a number or an inclusive pair."""
    pair = instance if isinstance(instance, tuple) else (instance, instance)
    if instance is None:
        pair = (0, 0)
    if len(pair) != 2 or not all(isinstance(k, int) and k >= 0 for k in pair):  # noqa: PLR2004
        raise WindowError(
            f"instance {instance!r}; wanted a number from 0 on, or an inclusive pair of them"
        )
    first, last = pair
    if last < first:
        raise WindowError(f"instance {instance!r}: the last comes before the first")
    return first, last


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Errors about windows say of which trace they are."""
    try:
        yield
    except WindowError as error:
        if str(error).startswith(path):
            raise
        raise WindowError(f"{path}: {error}") from error


def find(trace: Trace, wanted: Window) -> TimeRange:
    """The window in a trace; without any words the second iteration, or the only one."""
    if wanted.annotation == "":
        return TimeRange(start=-_ALL, stop=_ALL)
    if wanted.annotation is not None:
        return _annotated(trace, wanted)
    numbers = trace.iterations["number"].to_pylist()
    if not numbers:
        raise WindowError(
            f"{trace.meta.path}: truncated, and no step is known to be whole; name another "
            "part of it with --annotation"
        )
    # The first profiled step lacks what was launched before it.
    number = wanted.step
    if number is None:
        number = numbers[min(1, len(numbers) - 1)]
    if number not in numbers:
        raise WindowError(
            f"{trace.meta.path}: no iteration {number}; it has {ranges(sorted(numbers))}"
        )
    row = trace.iterations.slice(numbers.index(number), 1).to_pylist()[0]
    return TimeRange(start=row["start"], stop=row["stop"])


def _annotated(trace: Trace, wanted: Window) -> TimeRange:
    """From the start of the first wanted instance on the host to the end of the last."""
    names = trace.events["name"].combine_chunks()
    text = wanted.annotation or ""
    asked = (
        pc.equal(names.dictionary, text)
        if wanted.exact
        else pc.match_substring(names.dictionary, text)
    )
    named = asked.to_numpy(zero_copy_only=False)[names.indices.to_numpy()]
    kind = trace.events["kind"].to_numpy()
    marks = np.flatnonzero(named & np.isin(kind, [KIND[name] for name in _ON_HOST]))
    if not len(marks):
        raise WindowError.no_annotation(text)
    first, last = instances(wanted.instance)
    if first >= len(marks):
        raise WindowError.no_instance(text, first, len(marks))
    start, stop = (
        trace.events[name].to_numpy()[marks[first : last + 1]] for name in ("start", "stop")
    )
    return TimeRange(start=int(start.min()), stop=int(stop.max()))


_ON_HOST = ("annotation", "cpu_op", "runtime", "python", "other")
