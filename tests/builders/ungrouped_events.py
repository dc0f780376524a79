"""Communication events of ranks without process groups."""

import pyarrow as pa

from fastcomm.metrics import spill_files, ungrouped
from fastcomm.metrics.ungrouped import ExpectedMembers, find
from fastcomm.trace.run_traces import one_by_one
from fastcomm.trace.schema import OP

US, MS = 1_000, 1_000_000


def cut_up(events):
    """Events as batches, one for the even ranks and one for the odd."""
    found = []
    for odd in (0, 1):
        own = sorted((e for e in events if e.rank % 2 == odd), key=lambda e: (e.rank, e.start))
        columns = {
            "rank": [e.rank for e in own],
            "group": [None] * len(own),
            "stream": [getattr(e, "stream", 7) for e in own],
            "step": [getattr(e, "iteration", 0) for e in own],
            "seq": [None] * len(own),
            "group_size": [None] * len(own),
            "start_ns": [e.start for e in own],
            "duration_ns": [e.stop - e.start for e in own],
            "payload_bytes": [e.size for e in own],
        }
        table = pa.table({name: pa.array(each, pa.int64()) for name, each in columns.items()})
        ops = pa.array([OP[e.op] for e in own], pa.int8())
        found.append((spill_files.cut(table.append_column("op", ops)), own))
    return [batch for batch, _ in found]


def matched(events, world_size=None):
    """The sets of events taken to be one collective, (rank, stop) each; and what was found."""
    ranks = sorted({event.rank for event in events})
    parts = cut_up(events)
    found = find(parts, ExpectedMembers(ranks=ranks, world_size=world_size), one_by_one)
    sets = {}
    for span in found.spans():
        table = found.read(parts, span, ["rank", "group", "seq", "start_ns", "duration_ns"])
        for row in table.to_pylist():
            assert row["group"] == ungrouped.GROUP
            stop = row["start_ns"] + row["duration_ns"]
            sets.setdefault(row["seq"], set()).add((row["rank"], stop))
    return sorted(sorted(each) for each in sets.values() if len(each) > 1), found
