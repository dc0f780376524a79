"""Ranks beside each other: collectives matched, waits and transfers told apart."""

import numpy as np
import pyarrow as pa

from fastcomm.metrics.matched_communication import AlignedEvents, compare_all
from fastcomm.metrics.skew import skew, waits
from fastcomm.metrics.spill_files import cut
from fastcomm.trace.run_traces import one_by_one

RANKS, CALLS, TP = 64, 2000, 8
STEPS = {0: 4, 1: 4}  # by tag


def events():
    """Collectives of tensor parallelism, every eighth one of data parallelism."""
    # Labels of groups are hashes.
    labels = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 2_000)
    call, rank = np.tile(np.arange(CALLS), RANKS), np.repeat(np.arange(RANKS), CALLS)
    within = call % 8 != 0
    start = call * 100_000 + np.random.default_rng(0).integers(0, 5_000, len(call))
    size = np.where(within, 1 << 20, 1 << 24)
    return pa.table(
        {
            "rank": rank,
            "tag": within.astype(np.int8),
            "op": within.astype(np.int8),
            "group": labels[np.where(within, rank // TP, 1_000 + rank % TP)],
            "seq": call,
            "call_id": pa.nulls(len(call), pa.int64()),
            "step": np.zeros(len(call), np.int64),
            "group_size": np.where(within, TP, RANKS // TP),
            "start_ns": start,
            "duration_ns": call * 100_000 + 50_000 - start,
            "alone_ns": np.zeros(len(call), np.int64),
            "exposed_ns": np.zeros(len(call), np.int64),
            "exposed_at_start_ns": np.zeros(len(call), np.int64),
            "exposed_at_end_ns": np.zeros(len(call), np.int64),
            "bytes": size,
            "payload_bytes": size,
            "bus_bytes": size,
            "partner": pa.nulls(len(call), pa.int64()),
            "sends": np.zeros(len(call), np.bool_),
            "stream": within.astype(np.int64),
        }
    )


def waits_by_hand(rank, group, seq, start, stop):
    """The waits and transfers of each rank in NumPy, on clocks that agree."""
    order = np.lexsort((rank, seq, group))
    begin = np.flatnonzero(np.diff(group[order], prepend=0) | np.diff(seq[order], prepend=-1))
    count = np.diff(begin, append=len(order))
    last = np.maximum.reduceat(start[order], begin)
    end = np.minimum.reduceat(stop[order], begin)
    wait = np.bincount(rank[order], np.repeat(last, count) - start[order])
    return wait, np.bincount(rank[order], np.repeat(end - last, count))


def test_matched_waits(bar):
    table = events()

    def measured():
        found = compare_all(AlignedEvents.of([cut(table)], one_by_one), one_by_one)
        return skew(found.skews, STEPS), waits(found.waits, lambda rank, tag: STEPS[tag])

    columns = [table[name].to_numpy() for name in ("rank", "group", "seq", "start_ns")]
    columns.append(columns[-1] + table["duration_ns"].to_numpy())
    rows = measured()[1]
    assert sum(row.collectives for row in rows) == len(table)
    by_rank = np.bincount([row.rank for row in rows], [row.wait_ns * 4 for row in rows])
    assert np.allclose(by_rank, waits_by_hand(*columns)[0])
    bar("matched_waits", measured, lambda: waits_by_hand(*columns), count=len(table))
