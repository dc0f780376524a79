"""Device work outside of the iterations of a run, and the warnings about it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fastcomm.metrics.rank_arrays import ON_DEVICE, Stack
from fastcomm.trace.schema import KINDS
from fastcomm.trace.trace import Trace
from fastcomm.units import counted, percent
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints

_IS_DEVICE = np.isin(KINDS, ON_DEVICE)
_WARN_ABOVE = 0.01  # of the device time


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutside:
    """Device time and communication of one rank, inside and outside iterations."""

    recorded_ns: int  # all device time
    outside_ns: int  # device time outside iterations
    comm_events: int  # communication events that start outside iterations
    inside_events: int  # communication events that start in an iteration
    early_events: int = 0  # of these, with host marks: launched before the first iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Device work outside iterations, over all ranks; null if none is recorded."""

    device_ns: int | None
    share: float | None  # of all recorded device time
    comm_events: int | None


def outside_by_rank(stack: Stack) -> list[RankOutside]:
    """Measure the device time of each rank, inside and outside iterations.

    Device time is the sum of durations of kernels, copies and communication. Events that cross
    the edge of an iteration count on both sides in part.

    Returns
    -------
    list of RankOutside
        In the order of the stack.

    """
    is_device = _IS_DEVICE[stack.events["kind"].to_numpy()]
    is_device[stack.comm["event"].to_numpy()] = True
    start, stop = (stack.events[name].to_numpy() for name in ("start", "stop"))
    windows = tuple(stack.iterations[name].to_numpy() for name in ("start", "stop"))
    length = np.where(is_device, stop - start, 0)
    # Only the few events that end after the iteration in which they begin are clipped.
    ends = np.append(windows[1], np.iinfo(np.int64).min)[intervals.segment_of(start, *windows)]
    rows = np.flatnonzero(is_device & (stop > ends))
    inside = _time_before(stop[rows], *windows) - _time_before(start[rows], *windows)
    in_none = intervals.segment_of(stack.comm["start"].to_numpy(), *windows) < 0
    columns = {
        "recorded_ns": _sums(length, stack.event_edges),
        "outside_ns": _sums(length[rows] - inside, np.searchsorted(rows, stack.event_edges)),
        "comm_events": _sums(in_none.astype(np.int64), stack.comm_edges),
        "inside_events": _sums((~in_none).astype(np.int64), stack.comm_edges),
    }
    of_ranks = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [RankOutside(**dict(zip(columns, row, strict=True))) for row in of_ranks]


def early_events(trace: Trace) -> int:
    """Count the communication events in host iterations that were launched before the first.

    These start before all device work that is launched inside an iteration.
    """
    begin = trace.on_host_clock().device_begin
    if begin is None:
        return 0
    start = trace.comm["start"].to_numpy()
    windows = (trace.iterations[name].to_numpy() for name in ("start", "stop"))
    return int((intervals.segment_of(start[start < begin], *windows) >= 0).sum())


def _time_before(moment: Ints, start: Ints, stop: Ints) -> Ints:
    """Return the total length of disjoint windows before each moment."""
    if not len(start):
        return np.zeros(len(moment), np.int64)
    length = stop - start
    before = np.cumsum(length) - length
    at = np.searchsorted(start, moment, side="right") - 1
    lengths: Ints = np.where(at < 0, 0, before[at] + np.minimum(moment - start[at], length[at]))
    return lengths


def _sums(values: Ints, edges: Ints) -> Ints:
    """Return the sum of the values between every two consecutive edges."""
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    sums: Ints = np.diff(total[edges])
    return sums


def outside(ranks: Iterable[RankOutside | None]) -> Outside:
    """Add up ranks; ranks without recorded device time are left out."""
    measured = [rank for rank in ranks if rank is not None and rank.recorded_ns]
    if not measured:
        return Outside(device_ns=None, share=None, comm_events=None)
    device_ns = sum(rank.outside_ns for rank in measured)
    return Outside(
        device_ns=device_ns,
        share=device_ns / sum(rank.recorded_ns for rank in measured),
        comm_events=sum(rank.comm_events for rank in measured),
    )


def outside_sentence(result: Outside, *, is_host_run: bool) -> str | None:
    """Return the share of device time outside steps as a sentence; None if unknown."""
    if result.share is None:
        return None
    events = result.comm_events or 0
    time = "time of operators and communication" if is_host_run else "device time"
    return (
        f"Outside every step: {percent(result.share)} of the {time}, "
        f"{counted(events, 'communication event')}"
    )


def early_warning(ranks: Iterable[RankOutside | None]) -> str | None:
    """Return the warning about communication launched before the first step, or None."""
    measured = [rank for rank in ranks if rank is not None]
    early = sum(rank.early_events for rank in measured)
    if not early:
        return None
    return (
        f"{early} of {sum(rank.inside_events for rank in measured)} communication events in "
        "steps were launched before the first step (by a warm-up, most likely): steps are by "
        "the host's marks, which the device may run behind"
    )


def outside_warning(result: Outside, clock: str, *, is_host_run: bool) -> str | None:
    """Return a warning if over 1 % of device time is outside steps, which are by `clock`."""
    if result.share is None or result.share <= _WARN_ABOVE:
        return None
    reason = (
        "steps are by the host's marks, which the device may run behind"
        if clock == "host" and not is_host_run
        else "it was launched outside of the steps that count, or its launch is not recorded"
    )
    sentence = outside_sentence(result, is_host_run=is_host_run)
    return f"{sentence}, in no metric: {reason}"
