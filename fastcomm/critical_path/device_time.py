"""What the device does along a critical path, and notes that reconcile it with the path."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.critical_path.window import TimeRange
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm.units import format_ns, percent
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.graph import Numbers

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
