"""The part of a trace that is looked at, and what the device does in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.errors import FastcommError
from fastcomm.options import Window
from fastcomm.trace.run import ranges
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm.units import format_ns, percent
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.graph import Numbers

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


_WORK = [KIND[name] for name in ("kernel", "memcpy", "memset")]
_ON_DEVICE = ("gpu_compute_bound", "gpu_memory_bound", "gpu_communication_bound")
_WORTH_SAYING = 0.1  # of the path
_BUSY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Times in ns along the path of one rank."""

    path_ns: int
    elsewhere_ns: int  # of the path, on no device work
    busy_ns: int  # the device does anything
    earlier_ns: int  # of `elsewhere_ns`, it does work that the window did not launch

    @classmethod
    def of(cls, trace: Trace, table: pa.Table, own: Numbers) -> Self:
        """Measure a path by its breakdown; `own` are the rows of the events of its window."""
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
        """Return a sentence that reconciles the path with a busy device, if one is due."""
        least = _WORTH_SAYING * self.path_ns
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
    """The union of the chosen intervals."""
    first, last = (np.asarray(column)[chosen] for column in (start, stop))
    order = np.argsort(first, kind="stable")
    merged: tuple[Ints, Ints] = intervals.merge(first[order], last[order])
    return merged


def step_note(trace: Trace, window: TimeRange, wall_ns: int) -> str | None:
    """Return a sentence that reconciles the window with the step on the device's clock."""
    if trace.device_iterations is None:
        return None
    number = {row["stop"]: row["number"] for row in trace.iterations.to_pylist()}
    steps = {row["number"]: row for row in trace.device_iterations.to_pylist()}
    step = steps.get(number.get(window.stop))
    on_device = step["stop"] - step["start"] if step else wall_ns
    if abs(wall_ns - on_device) < _WORTH_SAYING * on_device:
        return None
    return (
        f"the window is the host's step of {format_ns(window.stop - window.start)}, which with "
        f"the device work that it launched lasts {format_ns(wall_ns)}; on the device's clock, "
        f"as in `fastcomm metrics`, this step takes {format_ns(on_device)}"
    )
