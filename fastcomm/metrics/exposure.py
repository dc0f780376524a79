"""How long each communication event is alone: no compute goes on, no other communication.

That is the time that a step would be shorter by, were the event shorter.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Intervals = tuple[Ints, Ints]

_COMPUTES = 1 << 32  # more than any number of events at once


def alone(events: Intervals, compute: Intervals) -> Ints:
    """Of each event the part in which it is the only one, and no compute kernel runs.

    Both sets are starts and stops, as they come.
    """
    moments = np.concatenate([*events, *compute])
    change = np.repeat(
        [1, -1, _COMPUTES, -_COMPUTES],
        [len(events[0]), len(events[0]), len(compute[0]), len(compute[0])],
    )
    order = np.argsort(moments, kind="stable")
    moments, active = moments[order], np.cumsum(change[order])
    single = np.append(np.where(active[:-1] == 1, np.diff(moments), 0), 0)
    before = np.append(0, np.cumsum(single))  # of each moment: how long one alone was active
    start, stop = (before[np.searchsorted(moments, each)] for each in events)
    found: Ints = stop - start
    return found
