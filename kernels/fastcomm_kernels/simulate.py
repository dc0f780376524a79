"""Replay of one graph of operations for many instances of it at once: data ranks and steps.

A lane is one instance, ``data rank * steps + step``. An operation starts when all before it
have ended. One of a group ends its own time after the whole group has started; some groups are
common to all data ranks of a step.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Ints

Lanes = NDArray[np.float64]

ALONE = -1


@kernel
def _together(last: Lanes, ranks: np.int64) -> None:
    """Make each lane the largest of its step over all data ranks; writes into `last`."""
    steps = len(last) // ranks
    for d in range(1, ranks):
        for s in range(steps):
            last[s] = max(last[s], last[d * steps + s])
    for d in range(1, ranks):
        for s in range(steps):
            last[d * steps + s] = last[s]


@kernel
def simulate(
    order: Ints,
    before: tuple[Ints, Ints],
    closes: Ints,
    members: tuple[Ints, Ints, Ints],
    time: Lanes,
    delay: Lanes,
    ranks: np.int64,
) -> tuple[Lanes, Lanes]:
    """Return start and end of every operation on every lane.

    `closes[i]` is the group whose last member is `order[i]`, `ALONE` of an operation in no
    group, and anything less of a member that is not the last. `members` are the groups' bounds,
    their operations, and 1 for a group common to all data ranks. `delay` precedes each start.
    """
    first, earlier = before
    bounds, grouped, common = members
    lanes = time.shape[1]
    start, end = np.zeros(time.shape, np.float64), np.zeros(time.shape, np.float64)
    last = np.empty(lanes, np.float64)
    for i in range(len(order)):
        op = order[i]
        for k in range(first[op], first[op + 1]):
            other = earlier[k]
            for lane in range(lanes):
                start[op, lane] = max(start[op, lane], end[other, lane])
        for lane in range(lanes):
            start[op, lane] += delay[op, lane]
        group = closes[i]
        if group == ALONE:
            for lane in range(lanes):
                end[op, lane] = start[op, lane] + time[op, lane]
        if group < 0:
            continue
        for lane in range(lanes):
            last[lane] = start[op, lane]
        for m in range(bounds[group], bounds[group + 1]):
            member = grouped[m]
            for lane in range(lanes):
                last[lane] = max(last[lane], start[member, lane])
        if common[group]:
            _together(last, ranks)
        for m in range(bounds[group], bounds[group + 1]):
            member = grouped[m]
            for lane in range(lanes):
                end[member, lane] = last[lane] + time[member, lane]
    return start, end
