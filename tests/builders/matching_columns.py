"""Calls of two ranks as columns, and which of them are matched."""

import numpy as np

from fastcomm.ranks.matching import CollectiveCalls, match
from fastcomm_kernels.arrays import NONE, NULL


def matched_places(stops, steps, sizes=None):
    """Pairs of calls, one of each rank, that are one collective; without sequence numbers."""
    counts = [len(stop) for stop in stops]
    rows = sum(counts)
    calls = CollectiveCalls(
        rank=np.repeat([0, 1], counts),
        group=np.zeros(rows, np.int64),
        op=np.zeros(rows, np.int64),
        seq=np.full(rows, NULL),
        size=np.full(rows, 4096) if sizes is None else np.concatenate(sizes),
        stop=np.concatenate(stops),
        step=np.concatenate(steps),
    )
    instance = match(calls).instance
    one, other = np.split(instance, counts[:1])
    place = {number: at for at, number in enumerate(one.tolist()) if number != NONE}
    return [(place[number], at) for at, number in enumerate(other.tolist()) if number in place]
