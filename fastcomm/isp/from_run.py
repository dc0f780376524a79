"""The timed messages and the timed arithmetic of a run, as calibration takes them."""

import numpy as np

from fastcomm.cluster.measurements import Message, of_events
from fastcomm.errors import FastcommError
from fastcomm.isp.timed import NAMES, Timed, timed
from fastcomm.readers import kineto
from fastcomm.readers.kineto_shapes import Call, calls
from fastcomm.trace.run import Run
from fastcomm.trace.schema import OPS

# A few ranks tell what the links do; a thousand say it again.
_RANKS = 8


def messages(run: Run, most_ranks: int = _RANKS) -> list[Message]:
    """Collectives of the first ranks: operation, group size, payload, duration."""
    found: list[Message] = []
    for rank in run.ranks[:most_ranks]:
        trace = run.read(rank)
        sizes = trace.groups["size"].to_pylist()
        comm = trace.comm.select(["op", "group", "payload_bytes", "start", "stop"]).to_pylist()
        found += of_events(
            (
                OPS[row["op"]],
                None if row["group"] is None else sizes[row["group"]],
                row["payload_bytes"],
                row["stop"] - row["start"],
            )
            for row in comm
        )
    if not found:
        raise FastcommError(
            f"{len(run.ranks)} ranks: no collective has both a size and a group to calibrate by"
        )
    return found


def work(run: Run, most_ranks: int = 1) -> Timed:
    """Products and attention of the first ranks, where their traces have shapes.

    Ranks do the same work on equal GPUs: one tells all.
    """
    found: list[Call] = []
    for source in run.sources[:most_ranks]:
        if kineto.claims(source.path):
            found += calls(source.path, NAMES)
    return timed(found)


def spread(messages: list[Message]) -> dict[str, int]:
    """How many sizes there are of each operation."""
    return {
        op: len(np.unique([m.volume for m in messages if m.op == op]))
        for op in sorted({m.op for m in messages})
    }
