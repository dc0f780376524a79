"""What the numbers of a run do not cover, and the warnings about it.

Numbers are null where the input is missing what they need; device work may lie in no step; of
some ranks fewer steps may count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.metrics.breakdown import RankTime
from fastcomm.metrics.view import Stack
from fastcomm.trace.run import named_ranks, ranges
from fastcomm.trace.schema import KIND, KINDS
from fastcomm.trace.trace import LACKS, NO_DEVICE, Trace
from fastcomm.units import counted, percent, plural
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import Ints

# Columns of the iterations that need what is lacking, by their beginnings and endings.
_COMPUTE = (("exact_",), ("_overlapped_ns",))
_DEVICE = (("spec_", "exact_", "comm_bytes"), ("_union_ns", "_overlapped_ns"))
_TIMES = (
    ("iteration", "start_ns", "stop_ns", "time_ns", "spec_", "exact_"),
    ("_union_ns", "_overlapped_ns"),
)
_UNKNOWN = {
    **dict.fromkeys(NO_DEVICE, _DEVICE),
    "compute": _COMPUTE,
    "times": _TIMES,
}


def in_iterations(table: pa.Table, lacks: Sequence[str]) -> pa.Table:
    """Return the table of iterations with null for what is unknown."""
    for word, (begins, ends) in _UNKNOWN.items():
        if word in lacks:
            names = [n for n in table.column_names if n.startswith(begins) or n.endswith(ends)]
            table = _without(table, names)
    return table


def in_events(table: pa.Table, lacks: Sequence[str]) -> pa.Table:
    """The table of communication events; durations are known in any case."""
    alone = ["alone_ns"]
    unknown = {
        "compute": alone,
        "device_kinds": alone,
        "times": ["iteration", "start_ns", *alone],
    }
    return _without(table, [name for word in lacks for name in unknown.get(word, ())])


def in_windows(table: pa.Table, lacks: Sequence[str]) -> pa.Table:
    """The table of windows: none where times are not known."""
    return table.slice(0, 0) if "times" in lacks else table


def _without(table: pa.Table, names: Sequence[str]) -> pa.Table:
    for name in names:
        place, column = table.column_names.index(name), table[name]
        table = table.set_column(place, name, pa.nulls(len(column), column.type))
    return table


def sentences(lacks: Mapping[str, Sequence[int]], ranks: int) -> list[str]:
    """Return warnings: which of the `ranks` ranks lack what, and what is therefore n/a.

    That a rank has no device work is a warning of the rank, which knows more about it.
    """
    return [
        f"the input has {LACKS[word]} are n/a"
        if len(lacking) == ranks
        else f"{len(lacking)} of {ranks} ranks ({ranges(lacking)}) "
        f"{plural(len(lacking), 'has')} {LACKS[word]} are "
        "those of the other ranks"
        for word, lacking in lacks.items()
        if word not in NO_DEVICE
    ]


def unknown(lacks: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return what is unknown, for which ranks and for what reason, as `--json` prints it."""
    return [
        {"what": what, "reason": reason, "ranks": list(ranks)}
        for word, ranks in lacks.items()
        for reason, _, what in (LACKS[word].partition(": "),)
    ]


def reason(lacks: Mapping[str, Sequence[int]]) -> str:
    """Return why the times of a run are unknown, as a clause."""
    reasons = [
        LACKS[word].partition(":")[0]
        for word in (*NO_DEVICE, "times", "compute")
        if word in lacks
    ]
    return f"the input has {' and '.join(reasons)}" if reasons else "there is no iteration"


_IS_DEVICE = np.isin(np.arange(len(KINDS)), [KIND[k] for k in ("kernel", "memcpy", "memset")])
_WARN_ABOVE = 0.01  # of the device time


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutside:
    """One rank's device time: all that is recorded, and the part in no iteration."""

    recorded_ns: int
    outside_ns: int
    comm_events: int  # that start in no iteration
    inside_events: int  # communication that starts in an iteration
    early_events: int = 0  # of these by the host's marks: launched before the first of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Device work in no iteration, over all ranks. Null where no device work is recorded."""

    device_ns: int | None
    share: float | None  # of all recorded device time
    comm_events: int | None


def outside_by_rank(stack: Stack) -> list[RankOutside]:
    """Measure each rank of a stack, by all of its iterations.

    Device time is the sum of durations of kernels, copies and communication. An event that
    reaches over the edge of an iteration is outside with the part beyond the edge.
    """
    is_device = _IS_DEVICE[stack.events["kind"].to_numpy()]
    is_device[stack.comm["event"].to_numpy()] = True
    start, stop = (stack.events[name].to_numpy() for name in ("start", "stop"))
    windows = tuple(stack.iterations[name].to_numpy() for name in ("start", "stop"))
    length = np.where(is_device, stop - start, 0)
    # Few events reach beyond the window in which they begin: only those need a closer look.
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
    """Count the communication inside of host windows that was launched before the first.

    It starts before all device work that is launched inside of a mark.
    """
    begin = trace.on_host_clock().device_begin
    if begin is None:
        return 0
    start = trace.comm["start"].to_numpy()
    windows = (trace.iterations[name].to_numpy() for name in ("start", "stop"))
    return int((intervals.segment_of(start[start < begin], *windows) >= 0).sum())


def _time_before(moment: Ints, start: Ints, stop: Ints) -> Ints:
    """Return how much of the disjoint windows lies before each moment."""
    if not len(start):
        return np.zeros(len(moment), np.int64)
    length = stop - start
    before = np.cumsum(length) - length
    at = np.searchsorted(start, moment, side="right") - 1
    found: Ints = np.where(at < 0, 0, before[at] + np.minimum(moment - start[at], length[at]))
    return found


def _sums(values: Ints, edges: Ints) -> Ints:
    """Return the sum of the values between each two edges."""
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    found: Ints = np.diff(total[edges])
    return found


def outside(ranks: Iterable[RankOutside | None]) -> Outside:
    """Add up the ranks whose device time is known."""
    known = [rank for rank in ranks if rank is not None and rank.recorded_ns]
    if not known:
        return Outside(device_ns=None, share=None, comm_events=None)
    device_ns = sum(rank.outside_ns for rank in known)
    return Outside(
        device_ns=device_ns,
        share=device_ns / sum(rank.recorded_ns for rank in known),
        comm_events=sum(rank.comm_events for rank in known),
    )


def outside_sentence(found: Outside) -> str | None:
    """Return what lies outside as a sentence, or None where no device work is recorded."""
    if found.share is None:
        return None
    events = found.comm_events or 0
    return (
        f"Outside every step: {percent(found.share)} of the device time, "
        f"{counted(events, 'communication event')}"
    )


def early_warning(ranks: Iterable[RankOutside | None]) -> str | None:
    """Return the warning about communication of the time before the first step, or None."""
    known = [rank for rank in ranks if rank is not None]
    early = sum(rank.early_events for rank in known)
    if not early:
        return None
    return (
        f"{early} of {sum(rank.inside_events for rank in known)} communication events in steps "
        "were launched before the first step (by a warm-up, most likely): steps are by the "
        "host's marks, which the device may run behind"
    )


def outside_warning(found: Outside, clock: str) -> str | None:
    """Return the warning about device time above 1 % outside, or None."""
    if found.share is None or found.share <= _WARN_ABOVE:
        return None
    why = (
        "steps are by the host's marks, which the device may run behind"
        if clock == "host"
        else "it was launched before the first recorded step, or after the last"
    )
    return f"{outside_sentence(found)}, in no metric: {why}"


def fewer_steps(times: Sequence[RankTime], ranks: Sequence[int], steps: int) -> list[str]:
    """Return a warning of the ranks of which fewer steps count than of others."""
    if not times:
        return []
    count = {each.rank: each.iterations for each in times}
    none = [rank for rank in ranks if rank not in count]
    few = [rank for rank in ranks if 0 < count.get(rank, 0) < steps]
    found = [f"no step of {named_ranks(none)} counts"] if none else []
    if few:
        counts = sorted({count[rank] for rank in few})
        found.append(
            f"{' or '.join(map(str, counts))} of {steps} steps count of "
            f"{named_ranks(few)}: where these take part, waits, skew and findings per step are "
            "too small"
        )
    return found
