"""Events and iterations of ranks that metrics across ranks compare."""

import numpy as np
import pyarrow as pa

from fastcomm.idle.causes import CAUSES
from fastcomm.metrics import outliers, traffic
from fastcomm.metrics.across_ranks import Material, measure_across_ranks
from fastcomm.metrics.spill_files import cut
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.run_traces import one_by_one
from fastcomm.trace.schema import OP

STEPS = 2

# Labels are hashes: these are of three cells.
GROUPS = {-(2**62) + 1: (0, 1), 2: (0, 1, 2), 2**62 + 3: (3, 4)}
ONE, TWO, THREE = GROUPS


def iterations(ranks):
    """Two iterations of each rank; what is not asked for is 0."""
    names = sorted({name for parts in outliers.JUDGED.values() for name in parts})
    names += [f"idle_{cause}_ns" for cause in CAUSES]
    table = {
        "rank": np.repeat(np.array(ranks, np.int64), STEPS),
        "iteration": np.tile(np.arange(STEPS), len(ranks)),
    }
    return pa.table(table | {name: np.zeros(len(ranks) * STEPS, np.int64) for name in names})


def groups():
    return pa.table(
        {
            "rank": [ranks[0] for ranks in GROUPS.values()],
            "group": list(GROUPS),
            "description": [f"group {label}" for label in GROUPS],
            "tag": ["DP", "TP", "EP"],
            "size": [len(ranks) for ranks in GROUPS.values()],
            "ranks": list(GROUPS.values()),
        }
    )


def ask(ranks, events, clocks):
    """What is seen across ranks, and the tables behind it."""
    material = Material(
        ranks=ranks,
        iterations=iterations(ranks),
        batches=[cut(events)],
        sums=traffic.sums_by_rank(events),
        groups=groups(),
        members=groups().select(["group", "ranks"]),
    )
    return measure_across_ranks(material, clocks, one_by_one)


def table(events):
    """Events as dictionaries, as the table that ranks hand in."""
    whole = [
        "rank",
        "iteration",
        "step",
        "group",
        "seq",
        "call_id",
        "group_size",
        "start_ns",
        "duration_ns",
        "alone_ns",
        "exposed_ns",
        "exposed_at_start_ns",
        "exposed_at_end_ns",
        "bytes",
        "bus_bytes",
        "partner",
        "stream",
    ]
    columns = {name: pa.array([e.get(name) for e in events], pa.int64()) for name in whole}
    sizes = [e.get("payload_bytes", e.get("bytes")) for e in events]
    columns["payload_bytes"] = pa.array(sizes, pa.int64())
    columns["sends"] = pa.array([e.get("sends", False) for e in events], pa.bool_())
    columns["tag"] = pa.array([TAG[e["tag"]] for e in events], pa.int8())
    columns["op"] = pa.array([OP[e["op"]] for e in events], pa.int8())
    return pa.table(columns)


def by_rank(events):
    return sorted(events, key=lambda event: (event["rank"], event["start"]))
