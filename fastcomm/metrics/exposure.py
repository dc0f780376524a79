"""How long each communication event is alone at its end: no compute, no other communication.

By so much a step can be shorter if the event is: what comes next waits for it.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Intervals = tuple[Ints, Ints]

_COMPUTES = 1 << 32  # more than any number of events at once


def alone(events: Intervals, compute: Intervals) -> Ints:
    """Of each event the time before its end in which it is the only one that runs.

    Both sets are starts and stops, as they come.
    """
    moments = np.concatenate([*events, *compute])
    change = np.repeat(
        [1, -1, _COMPUTES, -_COMPUTES],
        [len(events[0]), len(events[0]), len(compute[0]), len(compute[0])],
    )
    order = np.argsort(moments, kind="stable")
    moments, active = moments[order], np.cumsum(change[order])
    # Where something else runs up to the next moment: so far it is not alone.
    busy = (active[:-1] != 1) & (moments[1:] > moments[:-1])
    first = moments[:1]
    until = np.maximum.accumulate(np.append(first, np.where(busy, moments[1:], first)))
    found: Ints = events[1] - np.maximum(events[0], until[np.searchsorted(moments, events[1])])
    return found
