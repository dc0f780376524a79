"""Find the window of a trace to analyze, and measure what the device does in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.errors import ConfigError, inert
from fastcomm.options import Window
from fastcomm.trace.run import ranges
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm.units import format_ns, percent
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints, Numbers

_ALL = 1 << 62


class WindowError(ConfigError):
    """The trace does not have the window."""

    @classmethod
    def no_annotation(cls, annotation: str) -> Self:
        """Return the error that no event has the annotation in its name."""
        return cls(f"no event's name contains {annotation!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """A part of a trace, ``[start, stop)`` in ns."""

    start: int
    stop: int
    step: int | None = None  # its number in the trace, if the part is a step


def instances(instance: object) -> tuple[int, int]:
    """Return the first and the last instance of an option `instance`.

    Parameters
    ----------
    instance
        A number, an inclusive pair of numbers, or None for the first instance.

    Raises
    ------
    WindowError
        For anything else.

    """
    pair = instance if isinstance(instance, tuple) else (instance, instance)
    if instance is None:
        pair = (0, 0)
    if len(pair) != 2 or not all(isinstance(k, int) and k >= 0 for k in pair):  # noqa: PLR2004
        raise WindowError(
            f"invalid instance {instance!r}: expected a number from 0, or an inclusive pair"
        )
    first, last = pair
    if last < first:
        raise WindowError(f"invalid instance {instance!r}: the last is before the first")
    return first, last


def chosen(marks: Ints, annotation: str, numbers: tuple[int, int]) -> Ints:
    """Return the rows of `marks` from a first to a last instance of an annotation.

    Raises WindowError if there are fewer.
    """
    first, last = numbers
    if first >= len(marks):
        raise WindowError(
            f"no instance {first} of {annotation!r}: the trace has {len(marks)}, 0 to "
            f"{len(marks) - 1}"
        )
    return marks[first : last + 1]


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Add the path of the trace to any WindowError raised inside."""
    try:
        yield
    except WindowError as error:
        if str(error).startswith(inert(path)):
            raise
        raise WindowError(f"{path}: {error}") from error


def find(trace: Trace, window: Window) -> TimeRange:
    """Find a window in a trace.

    Without options this is the second iteration, or the next one with work, or the only one:
    the first lacks the device work that was launched before the trace began. Raises WindowError
    if there is none.
    """
    if window.annotation == "":
        return TimeRange(start=-_ALL, stop=_ALL)
    if window.annotation is not None:
        return _annotated(trace, window)
    numbers = trace.iterations["number"].to_pylist()
    if not numbers:
        raise WindowError(
            f"{trace.meta.path}: truncated, without a complete step. Select another part with "
            "--annotation"
        )

    number = window.step
    if number is None:
        number = numbers[_default_place(trace)]
    if number not in numbers:
        raise WindowError(
            f"{trace.meta.path}: no step {number}; the trace has {ranges(sorted(numbers))}"
        )
    row = trace.iterations.slice(numbers.index(number), 1).to_pylist()[0]
    return TimeRange(start=row["start"], stop=row["stop"], step=number)


def _default_place(trace: Trace) -> int:
    """Return the place of the first iteration with work or calls, the very first one last."""
    is_active = np.isin(trace.events["kind"].to_numpy(), _ACTIVE)
    moment = np.sort(trace.events["start"].to_numpy()[is_active])
    low, high = (
        np.searchsorted(moment, trace.iterations[name].to_numpy()) for name in ("start", "stop")
    )
    count = trace.iterations.num_rows
    active: list[int] = np.flatnonzero(high > low).tolist()
    later = [place for place in active if place] or active
    return later[0] if later else min(1, count - 1)


def _annotated(trace: Trace, window: Window) -> TimeRange:
    """Return the range of the selected instances of an annotation on the host."""
    names = trace.events["name"].combine_chunks()
    text = window.annotation or ""
    is_match = (
        pc.equal(names.dictionary, text)
        if window.exact
        else pc.match_substring(names.dictionary, text)
    )
    is_named = is_match.to_numpy(zero_copy_only=False)[names.indices.to_numpy()]
    kind = trace.events["kind"].to_numpy()
    marks = np.flatnonzero(is_named & np.isin(kind, [KIND[name] for name in _ON_HOST]))
    if not len(marks):
        raise WindowError.no_annotation(text)
    rows = chosen(marks, text, instances(window.instance))
    start, stop = (trace.events[name].to_numpy()[rows] for name in ("start", "stop"))
    return TimeRange(start=int(start.min()), stop=int(stop.max()))


_ON_HOST = ("annotation", "cpu_op", "runtime", "python", "other")


_WORK = [KIND[name] for name in ("kernel", "memcpy", "memset")]
_ACTIVE = [*_WORK, KIND["cpu_op"], KIND["runtime"]]
_ON_DEVICE = ("gpu_compute_bound", "gpu_memory_bound", "gpu_communication_bound")
_NOTEWORTHY = 0.1  # share of the path from which a note is due
_BUSY = 0.9  # share of the path from which the device counts as busy


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """What the device does along the path of one rank."""

    path_ns: int
    elsewhere_ns: int  # part of the path that is no device work
    busy_ns: int  # part of the path during which the device is busy
    earlier_ns: int  # part of `elsewhere_ns` with device work launched outside of the window

    @classmethod
    def of(cls, trace: Trace, table: pa.Table, own: Numbers) -> Self:
        """Measure a path.

        Parameters
        ----------
        trace
            The rank.
        table
            `CriticalPath.breakdown`.
        own
            Rows of the events of the window.

        """
        events = trace.events
        edges, times = (table["start_ns"], table["stop_ns"]), (events["start"], events["stop"])
        is_gap = ~np.isin(table["bound_by"].to_pylist(), _ON_DEVICE)
        path, gaps = _merged(*edges, np.ones_like(is_gap)), _merged(*edges, is_gap)
        is_work = np.isin(events["kind"].to_numpy(), _WORK)
        is_own = np.zeros(events.num_rows, np.bool_)
        is_own[own] = True
        work, earlier = _merged(*times, is_work), _merged(*times, is_work & ~is_own)
        return cls(
            path_ns=int((path[1] - path[0]).sum()),
            elsewhere_ns=int((gaps[1] - gaps[0]).sum()),
            busy_ns=int(intervals.overlap_length(*path, *work)),
            earlier_ns=int(intervals.overlap_length(*gaps, *earlier)),
        )

    def note(self) -> str | None:
        """Return a note that explains a path on the host while the device is busy, or None."""
        least = _NOTEWORTHY * self.path_ns
        is_behind = self.earlier_ns >= max(least, 1)
        if not is_behind and (self.elsewhere_ns < least or self.busy_ns < _BUSY * self.path_ns):
            return None
        elsewhere, busy, earlier = (
            percent(ns / max(self.path_ns, 1))
            for ns in (self.elsewhere_ns, self.busy_ns, self.earlier_ns)
        )
        behind = (
            f" (it runs behind the host: {earlier} with work launched outside of the window, "
            "which the path does not have)"
        )
        return (
            f"{elsewhere} of the path is host time, gaps and delays, but the device is busy "
            f"for {busy} of the path{behind if is_behind else ''}; a faster host saves little "
            "more than the rest"
        )


def _merged(start: object, stop: object, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return the union of the chosen intervals, merged."""
    first, last = (np.asarray(column)[chosen] for column in (start, stop))
    order = np.argsort(first, kind="stable")
    merged: tuple[Ints, Ints] = intervals.merge(first[order], last[order])
    return merged


def step_note(trace: Trace, window: TimeRange, wall_ns: int) -> str | None:
    """Return a note that explains why the window differs from the step on the device, or None.

    Parameters
    ----------
    trace
        The rank.
    window
        An iteration of the host.
    wall_ns
        Length of the window with the device work that it launched.

    """
    if trace.device_iterations is None:
        return None
    steps = {row["number"]: row for row in trace.device_iterations.to_pylist()}
    step = steps.get(window.step)
    on_device = step["stop"] - step["start"] if step else wall_ns
    if abs(wall_ns - on_device) < _NOTEWORTHY * on_device:
        return None
    return (
        f"the window is the host's step of {format_ns(window.stop - window.start)}, which with "
        f"the device work that it launched lasts {format_ns(wall_ns)}; on the device's clock, "
        f"as in `fastcomm metrics`, this step takes {format_ns(on_device)}"
    )
