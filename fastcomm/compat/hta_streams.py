"""Reproduce the idle times and the queue lengths of HolisticTraceAnalysis, per stream.

The gap before a device event is its start minus the end of the event before it on its stream,
negative if the two overlap. It is `host_wait` if the event was launched after that end, else
`kernel_wait` if it is short, else `other`; the first event of a stream has no gap. HTA 0.5
documents the limit as ns and uses it as us. `fastcomm metrics` divides the idle time of the
whole device by its cause instead.

A queue becomes longer at the start of a launching call and shorter at the start of the work
on the device. Statistics are those of the points at which it changes, and not weighted by time:
`fastcomm kernels --by stream` has means over time, and keeps the streams of two devices apart.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from fastcomm.checks import check_type, invalid_value
from fastcomm.compat import hta_graph
from fastcomm.compat.hta_events import linked
from fastcomm.readers.runs import open_run
from fastcomm.trace.events import EventRows
from fastcomm.trace.run import RunTraces
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import Ints

CATEGORIES = ("host_wait", "kernel_wait", "other")
_IDLE = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("idle_category", pa.string()),
        ("idle_time", pa.float64()),  # us
        ("idle_time_ratio", pa.float64()),  # of the stream's idle time, rounded to 1 %
    ]
)
_FLOATS = ("mean", "std", "min", "25%", "50%", "75%", "max")
_SUMMARY = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("count", pa.int64()),  # of points
        *((name, pa.float64()) for name in _FLOATS),
    ]
)
_BLOCKED = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("duration_at_max_queue_length", pa.float64()),  # us
        ("relative_duration_at_max_queue_length", pa.float64()),  # of the trace
    ]
)


class ReadableRun(Protocol):
    """A run whose ranks can be read, as the `Run` that `fastcomm.open` returns."""

    def read(self, rank: int) -> Trace:
        """Read all events of one rank."""
        ...


AnyRun = ReadableRun | RunTraces | str | Path


def reader_of(run: AnyRun) -> Callable[[int], Trace]:
    """Return the function that reads all events of a rank of a run, or of a path's run."""
    if isinstance(run, str | Path):
        run = open_run(run)
    if isinstance(run, RunTraces):
        traces = run
        return lambda rank: traces.read(rank, "all")
    if not hasattr(run, "read"):
        raise invalid_value("run", run, 'a run, as in fastcomm.open("traces/"), or its path')
    return run.read


def get_idle_time_breakdown(
    run: AnyRun, rank: int = 0, *, consecutive_kernel_delay: int = 30
) -> pa.Table:
    """Return the idle time of each stream of a rank by HTA's categories.

    Parameters
    ----------
    run
        A run that `fastcomm.open` returned, or the path of its traces.
    rank
        The rank.
    consecutive_kernel_delay
        Gaps shorter than this, in us, are `kernel_wait`.

    Returns
    -------
    pyarrow.Table
        A row per stream and category: `rank`, `stream`, `idle_category`, `idle_time` (us),
        `idle_time_ratio` (null if the stream is never idle).

    Raises
    ------
    FastcommError
        If the rank cannot be read.

    """
    events = linked(reader_of(run)(rank))
    rows = events.rows
    work = np.flatnonzero(rows.of_kind("kernel", "memcpy", "memset") & (rows.stream != -1))
    launched = np.where(events.partner >= 0, rows.start[events.partner], np.iinfo(np.int64).min)
    check_type(consecutive_kernel_delay, Real, "consecutive_kernel_delay", "a number of us")
    limit = consecutive_kernel_delay * 1000
    entries = [
        {"rank": rank, "stream": stream, **entry}
        for stream in dict.fromkeys(rows.stream[work].tolist())
        for entry in _idle_times(rows, work[rows.stream[work] == stream], launched, limit)
    ]
    return pa.Table.from_pylist(entries, schema=_IDLE)


def _idle_times(
    rows: EventRows, work: Ints, launched: Ints, limit: int
) -> Iterator[dict[str, Any]]:
    """Yield the entry of each category of one stream; times are ns, `work` is sorted."""
    ends, following = rows.stop[work[:-1]], work[1:]
    gap = rows.start[following] - ends
    is_host_wait = launched[following] > ends
    category = np.where(is_host_wait, 0, np.where(gap < limit, 1, 2))
    total = int(gap.sum())
    # The first event counts as `other`, without a gap.
    for number in np.unique(np.append(category, 2)).tolist():
        time = int(gap[category == number].sum())
        yield {
            "idle_category": CATEGORIES[number],
            "idle_time": time / 1000,
            "idle_time_ratio": round(time / total, 2) if total else None,
        }


def get_queue_length_summary(run: AnyRun, ranks: Sequence[int] = (0,)) -> pa.Table:
    """Return statistics of the queue length of each stream.

    Parameters
    ----------
    run
        A run that `fastcomm.open` returned, or the path of its traces.
    ranks
        The ranks.

    Returns
    -------
    pyarrow.Table
        A row per rank and stream: `rank`, `stream`, `count` (of points), `mean`, `std` (of a
        sample; null for one point), `min`, `25%`, `50%`, `75%` and `max`.

    Raises
    ------
    FastcommError
        If a rank cannot be read.

    """
    entries = []
    for rank, stream, _, length, _ in _queues(run, ranks):
        values = (
            float(length.mean()),
            float(length.std(ddof=1)) if len(length) > 1 else None,
            *np.percentile(length, [0, 25, 50, 75, 100]).tolist(),
        )
        numbers = dict(zip(_FLOATS, values, strict=True))
        entries.append({"rank": rank, "stream": stream, "count": len(length), **numbers})
    return pa.Table.from_pylist(entries, schema=_SUMMARY)


def get_time_spent_blocked_on_full_queue(
    run: AnyRun, ranks: Sequence[int] = (0,), *, max_queue_length: int = 1024
) -> pa.Table:
    """Return how long the queue of each stream has at least some number of entries.

    HTA keeps the last such stream of a rank; here are all.

    Parameters
    ----------
    run, ranks
        As for `get_queue_length_summary`, whose errors are raised.
    max_queue_length
        Number of entries from which a queue counts as full.

    Returns
    -------
    pyarrow.Table
        A row per rank and stream that is ever full: `rank`, `stream`,
        `duration_at_max_queue_length` (us), `relative_duration_at_max_queue_length` (of the
        time from the first start of an event to the last).

    """
    check_type(max_queue_length, Real, "max_queue_length", "a number of entries")
    entries = []
    for rank, stream, time, length, whole in _queues(run, ranks):
        is_full = length >= max_queue_length
        if is_full.any():
            ns = int(np.diff(time, append=time[-1])[is_full].sum())
            values = (rank, stream, ns / 1000, ns / whole if whole else None)
            entries.append(dict(zip(_BLOCKED.names, values, strict=True)))
    return pa.Table.from_pylist(entries, schema=_BLOCKED)


def _queues(run: AnyRun, ranks: Sequence[int]) -> Iterator[tuple[int, int, Ints, Ints, int]]:
    """Yield rank, stream, times, queue lengths from each time on, and the trace's ns."""
    read = reader_of(run)
    check_type(ranks, Iterable, "ranks", "a list, as in [0, 1]")
    for rank in ranks:
        events = linked(read(rank))
        rows = events.rows
        launches = hta_graph.launch_rows(events)
        lengths = hta_graph.queue_lengths(events, launches)
        stream = rows.stream.copy()
        stream[launches] = rows.stream[events.partner[launches]]
        points = np.flatnonzero((lengths >= 0) | np.isin(np.arange(len(rows)), launches))
        # A launch precedes a start at the same time.
        is_start = rows.stream[points] != -1
        points = points[np.lexsort((is_start, rows.start[points]))]
        whole = int(rows.start.max() - rows.start.min()) if len(rows) else 0
        for number in np.unique(stream[points]).tolist():
            own = points[stream[points] == number]
            yield rank, number, rows.start[own], lengths[own].astype(np.int64), whole
