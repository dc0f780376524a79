"""Select the marks of steps of the threads that launch a device's work.

Threads of one process that drive a device each may mark steps of their own, with equal names.
The steps of a device are those of the threads that launch its work.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastcomm import regexes
from fastcomm.trace.events import Events
from fastcomm_kernels.arrays import Flags, Ints

_LEAST = 0.1  # share of the launches of the thread with most, from which on one drives a device
_ALIKE = 0.5  # share of the names of a thread's marks that others have, as copies have


def without_idle_threads(events: Events, rows: Ints, patterns: Sequence[str]) -> Ints:
    """Return annotations without the marks of threads that launch nothing.

    Marks stay that no launching thread has, or if no thread with marks launches anything.

    Parameters
    ----------
    events
        Events of the rank.
    rows
        Ascending rows of annotations.
    patterns
        Regular expressions of names of marks.

    """
    lane = events.lane[rows]
    if (lane == lane[:1]).all():
        return rows
    is_mark = _are_marks(events, rows, patterns)
    lanes, of_mark = np.unique(lane[is_mark], return_inverse=True)
    is_idle = _are_idle(events, lanes)
    if not is_idle.any():
        return rows
    name, is_idle_mark = events.name[rows[is_mark]], is_idle[of_mark]
    own, names = np.unique(np.stack([of_mark, name])[:, is_idle_mark], axis=1)
    is_shared = np.isin(names, name[~is_idle_mark])
    shared, count = (np.bincount(own, weight, len(lanes)) for weight in (is_shared, None))
    is_copy = is_idle & (shared >= _ALIKE * count)
    is_chosen = ~is_mark
    is_chosen[is_mark] = ~is_copy[of_mark]
    return rows[is_chosen]


def _are_idle(events: Events, lanes: NDArray[np.int32]) -> Flags:
    """Return which of some lanes launch little or none of what one of them launches."""
    call = events.launch_of(events.rows("kernel", "memcpy", "memset"))
    of_call = events.lane[call[call >= 0]]
    place = np.searchsorted(lanes, of_call).clip(max=max(0, len(lanes) - 1))
    is_own = lanes[place] == of_call if len(lanes) else np.zeros(len(place), np.bool_)
    launches = np.bincount(place[is_own], minlength=len(lanes))
    most = int(launches.max(initial=0))
    are_idle: Flags = (launches <= _LEAST * most) & (most > 0)
    return are_idle


def _are_marks(events: Events, rows: Ints, patterns: Sequence[str]) -> Flags:
    """Return which annotations have a name that one of `patterns` matches."""
    codes = np.unique(events.name[rows])
    names = [events.texts[code] for code in codes.tolist()]
    marks = set[str]().union(*(regexes.first_groups(regex, names) for regex in patterns))
    are_marks: Flags = np.isin(events.name[rows], codes[[name in marks for name in names]])
    return are_marks
