"""Launch delays, and how many launched kernels wait on each stream for their turn."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.kernels.attribution import Work
from fastcomm_kernels.arrays import Flags, Ints

FULL = 1024  # entries of a queue of CUDA: the next launch waits for one to leave
# Sums of a rank and stream over the work whose launch was recorded.
QUEUES = pa.schema(
    [
        pa.field("rank", pa.int32()),
        pa.field("name", pa.string()),  # of the stream
        pa.field("launched", pa.int64()),
        pa.field("delay_ns", pa.int64()),
        pa.field("longest_delay_ns", pa.int64()),
        pa.field("queued_ns", pa.int64()),
        pa.field("longest_queue", pa.int64()),
        pa.field("full_ns", pa.int64()),
        pa.field("span_ns", pa.int64()),  # from the first launch to the last start
    ]
)
COLUMNS = pa.schema(
    [
        ("launched", pa.int64()),  # events whose launch was recorded
        ("launch_delay_mean_ns", pa.float64()),  # from the end of the call to the start
        ("launch_delay_max_ns", pa.int64()),
        ("queue_mean", pa.float64()),  # launched and not yet begun, over time
        ("queue_max", pa.int64()),
        ("queue_full_ns", pa.int64()),  # with FULL or more
    ]
)


def queues(work: Work, chosen: Ints) -> pa.Table:
    """Return launch delays and queue lengths of the streams of a rank.

    Parameters
    ----------
    work
        The work of a rank.
    chosen
        Indices of the work that counts.

    Returns
    -------
    pyarrow.Table
        A row per stream with a launch: QUEUES.

    """
    is_device = work.events.of_kind("kernel", "memcpy", "memset")[work.rows[chosen]]
    own = chosen[is_device & (work.launch[chosen] >= 0)]
    if not len(own) or work.trace.meta.is_host_run:
        return QUEUES.empty_table()
    code, texts = work.labels("stream", full_names=False)
    lane = code.astype(np.int64)
    call, row = work.launch[own], work.rows[own]
    order = np.argsort(lane[own], kind="stable")
    call, row, lane = call[order], row[order], lane[own][order]
    start, stop = work.events.start, work.events.stop
    begin = np.minimum(start[call], start[row])  # clocks of host and device may differ
    delay = np.maximum(start[row] - stop[call], 0)
    first = np.flatnonzero(np.diff(lane, prepend=-1))
    earliest = np.minimum.reduceat(begin, first)
    span = np.maximum.reduceat(start[row], first) - earliest
    longest, full = _lengths(begin, start[row], lane)
    columns = {
        "rank": np.full(len(first), work.trace.meta.rank),
        "name": [texts[k] for k in lane[first].tolist()],
        "launched": np.diff(first, append=len(lane)),
        "delay_ns": np.add.reduceat(delay, first),
        "longest_delay_ns": np.maximum.reduceat(delay, first),
        "queued_ns": np.add.reduceat(start[row] - begin, first),
        "longest_queue": longest,
        "full_ns": full,
        "span_ns": span,
    }
    return pa.table(columns).cast(QUEUES)


def _lengths(begin: Ints, start: Ints, lane: Ints) -> tuple[Ints, Ints]:
    """Return the longest queue of each lane, and the time in which it has FULL entries.

    Work joins the queue of its lane at `begin` and leaves it at `start`, which is no earlier;
    rows are sorted by lane.
    """
    time, lanes = np.concatenate([begin, start]), np.concatenate([lane, lane])
    leaves: Flags = np.repeat([False, True], len(begin))
    order = np.lexsort((leaves, time, lanes))
    # Every queue is empty after its last start, so that one sum serves all lanes.
    length = np.cumsum(np.where(leaves[order], -1, 1))
    lasts = np.diff(time[order], append=0)
    first = np.flatnonzero(np.diff(lanes[order], prepend=-1))
    full = np.add.reduceat(np.where(length >= FULL, lasts, 0), first)
    return np.maximum.reduceat(length, first), full


def queue_columns(table: pa.Table, names: Sequence[str]) -> dict[str, pa.Array]:
    """Return the columns COLUMNS for some streams of all ranks; null without any launch."""
    summed = ("launched", "delay_ns", "queued_ns", "full_ns", "span_ns")
    largest = ("longest_delay_ns", "longest_queue")
    sums = table.group_by("name").aggregate(
        [*((name, "sum") for name in summed), *((name, "max") for name in largest)]
    )
    sums = sums.take(pc.index_in(pa.array(names, pa.string()), sums["name"].combine_chunks()))
    ratio = {
        name: pc.divide(sums[f"{over}_sum"].cast(pa.float64()), sums[f"{under}_sum"])
        for name, over, under in (
            ("launch_delay_mean_ns", "delay_ns", "launched"),
            ("queue_mean", "queued_ns", "span_ns"),
        )
    }
    return {
        "launched": pc.fill_null(sums["launched_sum"], 0),
        "launch_delay_mean_ns": ratio["launch_delay_mean_ns"],
        "launch_delay_max_ns": sums["longest_delay_ns_max"],
        "queue_mean": _finite(ratio["queue_mean"]),
        "queue_max": sums["longest_queue_max"],
        "queue_full_ns": sums["full_ns_sum"],
    }


def _finite(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the values; null instead of those that divide by a span of 0."""
    return pc.if_else(pc.is_finite(values), values, None)
