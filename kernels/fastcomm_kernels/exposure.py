"""How long each event is alone at its end: nothing else runs.

By so much a step can be shorter if the event is: what comes next waits for it.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.intervals import place

Column = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).min


@kernel
def alone(start: Column, stop: Column, other_start: Column, other_stop: Column) -> Column:
    """Return of each event the time before its stop in which it is the only one that runs.

    Two sets of half-open intervals ``[start, stop)``, each sorted by start; an empty one runs
    at no time. O(n log n).
    """
    # Of the first i events: the latest stop, whose it is, and the latest of the others.
    latest, besides = np.full(len(start) + 1, _NEVER), np.full(len(start) + 1, _NEVER)
    whose = np.full(len(start) + 1, -1)
    for i in range(len(start)):
        end = stop[i] if start[i] < stop[i] else _NEVER
        is_later = end > latest[i]
        latest[i + 1] = end if is_later else latest[i]
        besides[i + 1] = latest[i] if is_later else max(besides[i], end)
        whose[i + 1] = i if is_later else whose[i]
    other_latest = np.full(len(other_start) + 1, _NEVER)
    for i in range(len(other_start)):
        end = other_stop[i] if other_start[i] < other_stop[i] else _NEVER
        other_latest[i + 1] = max(other_latest[i], end)
    out = np.empty(len(start), np.int64)
    for i in range(len(start)):
        begun = place(start, stop[i])
        until = besides[begun] if whose[begun] == i else latest[begun]
        until = max(until, other_latest[place(other_start, stop[i])])
        out[i] = stop[i] - max(start[i], min(until, stop[i]))
    return out
