"""Reproduce the idle time breakdown of HolisticTraceAnalysis, per stream.

The gap before a device event is its start minus the end of the event before it on its stream,
negative if the two overlap. It is `host_wait` if the event was launched after that end, else
`kernel_wait` if it is short, else `other`; the first event of a stream has no gap. HTA 0.5
documents the limit as ns and uses it as us.

`fastcomm metrics` divides the idle time of the whole device by its cause instead.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.compat.hta_events import linked
from fastcomm.readers.runs import open_run
from fastcomm.trace.events import EventRows
from fastcomm.trace.run import RunTraces
from fastcomm_kernels.arrays import Ints

CATEGORIES = ("host_wait", "kernel_wait", "other")
_COLUMNS = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("idle_category", pa.string()),
        ("idle_time", pa.float64()),  # us
        ("idle_time_ratio", pa.float64()),  # of the stream's idle time, rounded to 1 %
    ]
)


def get_idle_time_breakdown(
    run: RunTraces | str | Path, rank: int = 0, *, consecutive_kernel_delay: int = 30
) -> pa.Table:
    """Return the idle time of each stream of a rank by HTA's categories.

    Parameters
    ----------
    run
        A run with all its events, or the path of its traces.
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
        If the rank cannot be read, or only the columns for metrics were read.

    """
    if not isinstance(run, RunTraces):
        run = open_run(run)
    events = linked(run.read(rank, "all"))
    rows = events.rows
    work = np.flatnonzero(rows.of_kind("kernel", "memcpy", "memset") & (rows.stream != -1))
    launched = np.where(events.partner >= 0, rows.start[events.partner], np.iinfo(np.int64).min)
    _, first = np.unique(rows.stream[work], return_index=True)
    streams = rows.stream[work][np.sort(first)].tolist()
    limit = consecutive_kernel_delay * 1000
    entries = [
        entry
        for stream in streams
        for entry in _of_stream(rows, work[rows.stream[work] == stream], launched, limit)
    ]
    return pa.Table.from_pylist([{"rank": rank, **entry} for entry in entries], schema=_COLUMNS)


def _of_stream(
    rows: EventRows, work: Ints, launched: Ints, limit: int
) -> Iterator[dict[str, Any]]:
    """Yield the entry of each category of one stream; times are ns, `work` is sorted."""
    ends, following = rows.stop[work[:-1]], work[1:]
    gap = rows.start[following] - ends
    is_host_wait = launched[following] > ends
    category = np.where(is_host_wait, 0, np.where(gap < limit, 1, 2))
    total = int(gap.sum())
    # The first event counts as `other`, without a gap.
    present = np.unique(np.append(category, 2)).tolist()
    for number in present:
        time = int(gap[category == number].sum())
        yield {
            "stream": int(rows.stream[work[0]]),
            "idle_category": CATEGORIES[number],
            "idle_time": time / 1000,
            "idle_time_ratio": round(time / total, 2) if total else None,
        }
