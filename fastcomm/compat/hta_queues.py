"""Reproduce the queue lengths of HolisticTraceAnalysis, per stream.

A queue becomes longer at the start of a launching call and shorter at the start of the work
on the device. Statistics are those of the points at which it changes, and not weighted by time:
`fastcomm kernels --by stream` has means over time, and keeps the streams of two devices apart.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from fastcomm.compat import hta_graph
from fastcomm.compat.hta_events import linked
from fastcomm.readers.runs import open_run
from fastcomm.trace.run import RunTraces
from fastcomm_kernels.arrays import Ints

_FLOATS = ("mean", "std", "min", "25%", "50%", "75%", "max")
SUMMARY = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("count", pa.int64()),  # of points
        *((name, pa.float64()) for name in _FLOATS),
    ]
)
BLOCKED = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("duration_at_max_queue_length", pa.float64()),  # us
        ("relative_duration_at_max_queue_length", pa.float64()),  # of the trace
    ]
)


def get_queue_length_summary(
    run: RunTraces | str | Path, ranks: Sequence[int] = (0,)
) -> pa.Table:
    """Return statistics of the queue length of each stream.

    Parameters
    ----------
    run
        A run with all its events, or the path of its traces.
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
        If a rank cannot be read, or only the columns for metrics were read.

    """
    entries = []
    for rank, stream, _, length, _ in _series(run, ranks):
        quartiles = np.percentile(length, [25, 50, 75]).tolist()
        values = (
            float(length.mean()),
            float(length.std(ddof=1)) if len(length) > 1 else None,
            *(float(length.min()), *quartiles, float(length.max())),
        )
        numbers = dict(zip(_FLOATS, values, strict=True))
        entries.append({"rank": rank, "stream": stream, "count": len(length), **numbers})
    return pa.Table.from_pylist(entries, schema=SUMMARY)


def get_time_spent_blocked_on_full_queue(
    run: RunTraces | str | Path, ranks: Sequence[int] = (0,), *, max_queue_length: int = 1024
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
    entries = []
    for rank, stream, time, length, whole in _series(run, ranks):
        is_full = length >= max_queue_length
        if is_full.any():
            ns = int(np.diff(time, append=time[-1])[is_full].sum())
            values = (rank, stream, ns / 1000, ns / whole if whole else None)
            entries.append(dict(zip(BLOCKED.names, values, strict=True)))
    return pa.Table.from_pylist(entries, schema=BLOCKED)


def _series(
    run: RunTraces | str | Path, ranks: Sequence[int]
) -> Iterator[tuple[int, int, Ints, Ints, int]]:
    """Yield rank, stream, times, queue lengths from each time on, and the trace's ns."""
    if not isinstance(run, RunTraces):
        run = open_run(run)
    for rank in ranks:
        events = linked(run.read(rank, "all"))
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
