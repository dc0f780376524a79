"""Limits of a run's numbers, and the warnings about them.

Numbers are null where the input has no data for them. Device work may be outside all
iterations, and some ranks may have fewer complete iterations than others. `missing` has keys of
`trace.MISSING_DATA`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.metrics.breakdown import RankTime
from fastcomm.metrics.view import ON_DEVICE, Stack
from fastcomm.trace.run import named_ranks, ranges
from fastcomm.trace.schema import KINDS
from fastcomm.trace.trace import MISSING_DATA, NO_DEVICE, Trace
from fastcomm.units import counted, enumeration, percent, plural
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints

# Columns of iterations that are null where data is missing, by prefixes and suffixes.
_COMPUTE = (("exact_", "idle_", "host_comm_alone"), ("_overlapped_ns",))
_DEVICE = (
    ("spec_", "exact_", "idle_", "comm_bytes", "host_comm_alone"),
    ("_union_ns", "_overlapped_ns"),
)
_TIMES = (
    ("iteration", "start_ns", "stop_ns", "time_ns", "spec_", "exact_", "idle_", "host_comm_"),
    ("_union_ns", "_overlapped_ns"),
)
_UNKNOWN = {
    **dict.fromkeys(NO_DEVICE, _DEVICE),
    "compute": _COMPUTE,
    "times": _TIMES,
}


def in_iterations(table: pa.Table, missing: Sequence[str]) -> pa.Table:
    """Return the table of iterations with nulls in the columns for which data is missing.

    `missing` has keys of `trace.MISSING_DATA`, such as "compute" or "sizes".
    """
    for key, (prefixes, suffixes) in _UNKNOWN.items():
        if key in missing:
            names = [
                n for n in table.column_names if n.startswith(prefixes) or n.endswith(suffixes)
            ]
            table = _without(table, names)
    return table


def in_events(table: pa.Table, missing: Sequence[str]) -> pa.Table:
    """Return the table of communication events with nulls in columns for which data is missing.

    `missing` has keys of `trace.MISSING_DATA`. Durations are known in any case.
    """
    exposed = ["alone_ns", "exposed_ns"]  # durations are known in any case
    unknown = {
        "compute": exposed,
        "device_kinds": exposed,
        "graphs": exposed,
        "times": ["iteration", "start_ns", *exposed],
    }
    return _without(table, [name for key in missing for name in unknown.get(key, ())])


def in_windows(table: pa.Table, missing: Sequence[str]) -> pa.Table:
    """Return the table of windows, without rows if `missing` has "times"."""
    return table.slice(0, 0) if "times" in missing else table


def _without(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return a table with some columns replaced by nulls."""
    for name in names:
        place, column = table.column_names.index(name), table[name]
        table = table.set_column(place, name, pa.nulls(len(column), column.type))
    return table


def sentences(missing: Mapping[str, Sequence[int]], ranks: int) -> list[str]:
    """Return a warning per kind of missing data: what it is, on which ranks, and what is n/a.

    Missing device work is not among them: the ranks have warnings with more detail.

    Parameters
    ----------
    missing
        Ranks by key of `trace.MISSING_DATA`.
    ranks
        Number of all ranks.

    """
    return [
        f"the input has {MISSING_DATA[key]} are n/a"
        if len(affected) == ranks
        else f"{len(affected)} of {ranks} ranks ({ranges(affected)}) "
        f"{plural(len(affected), 'has')} {MISSING_DATA[key]} are "
        "those of the other ranks"
        for key, affected in missing.items()
        if key not in NO_DEVICE
    ]


def unknown(missing: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return missing data, ranks by key of `MISSING_DATA`, as objects of the JSON document."""
    return [
        {"what": metrics, "reason": reason, "ranks": list(ranks)}
        for key, ranks in missing.items()
        for reason, _, metrics in (MISSING_DATA[key].partition(": "),)
    ]


def reason(missing: Mapping[str, Sequence[int]]) -> str:
    """Return a clause on why times are unknown, from ranks by key of `MISSING_DATA`."""
    reasons = [
        MISSING_DATA[key].partition(":")[0]
        for key in (*NO_DEVICE, "times", "compute")
        if key in missing
    ]
    return f"the input has {enumeration(reasons)}" if reasons else "there is no iteration"


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
        else "it was launched before the first recorded step, or after the last"
    )
    sentence = outside_sentence(result, is_host_run=is_host_run)
    return f"{sentence}, in no metric: {reason}"


def fewer_steps(times: Sequence[RankTime], ranks: Sequence[int], steps: int) -> list[str]:
    """Return warnings about ranks with fewer complete steps than other ranks.

    Parameters
    ----------
    times
        Measured ranks, with the number of their complete steps; empty gives no warning.
    ranks
        Numbers of all ranks.
    steps
        Number of steps of the run.

    """
    if not times:
        return []
    count = {rank_time.rank: rank_time.iterations for rank_time in times}
    none = [rank for rank in ranks if rank not in count]
    few = [rank for rank in ranks if 0 < count.get(rank, 0) < steps]
    warnings = [f"no step of {named_ranks(none)} counts"] if none else []
    if few:
        counts = sorted({count[rank] for rank in few})
        warnings.append(
            f"{' or '.join(map(str, counts))} of {steps} steps count of "
            f"{named_ranks(few)}: where these take part, waits, skew and findings per step are "
            "too small"
        )
    return warnings
