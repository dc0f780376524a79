"""The rhythm of a rank: a training step repeats, and the culprit of a hang leaves it."""

import numpy as np

from fastcomm.hang.calls import RankCalls
from fastcomm_kernels.arrays import Flags, Ints

_SHORTEST = 3  # calls that repeat: fewer are no rhythm


def tokens(calls: RankCalls) -> Ints:
    """Return a number of each call, equal for calls that a step would repeat."""
    own = calls.whole().calls
    columns = np.stack((own.group, own.name, own.shapes[0], own.types[0]), axis=1)
    if not len(columns):
        return np.zeros(0, np.int64)
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)


def left_at(calls: RankCalls) -> int | None:
    """Return the place of the first call that leaves the rank's rhythm; None without one.

    The period is the one by which the longest run of calls repeats those before, and at least
    half of it; the rhythm is left behind that run.
    """
    token = tokens(calls)
    longest, place = _SHORTEST, None
    for period in range(1, len(token) - longest):
        begin, end = _longest_run(token[period:] == token[:-period])
        if end - begin > longest and 2 * (end - begin) >= period:
            longest, place = end - begin, end + period
    return place if place is not None and place < len(token) else None


def _longest_run(equal: Flags) -> tuple[int, int]:
    """Return where the longest run of true values begins and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    longest = int(np.argmax(edges[1::2] - edges[::2]))
    return int(edges[2 * longest]), int(edges[2 * longest + 1])
