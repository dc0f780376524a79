"""Find device work whose times contradict the rest of its trace.

Work of a stream begins when the work before it has ended. Programmatic dependent launches let
a successor begin some microseconds earlier, but not end earlier. Work that lasts beyond the end
of later work of its stream has a wrong duration. Nodes of CUDA graphs are left out: what is
recorded as their stream may be that of several branches.

Work that is far from its launch, and from all else, has a wrong start.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from fastcomm.trace.events import Events
from fastcomm.units import counted, format_ns
from fastcomm_kernels.arrays import NULL, Flags, Ints

# Ends of two events of a stream that are this far apart, in ns, are in the wrong order.
_APART_NS = 50_000
# If more of the work of a lane is out of order, by number and share, it is no serial stream.
_MOST = 0.1
_FEW = 3
_MOST_NAMED = 3
_LONGEST_NAME = 80


def warnings(events: Events, kinds: Sequence[str]) -> list[str]:
    """Return warnings that name work with an impossible duration or start.

    Parameters
    ----------
    events
        All events of a rank.
    kinds
        The kinds of device work.

    """
    work = events.rows(*kinds)
    return [*_wrong_durations(events, work), *_wrong_starts(events, work)]


# A pause in which nothing is recorded is this much longer than all that is, and this long, in
# ns, where a start is wrong.
_TIMES_LONGER = 10
_LEAST_PAUSE_NS = 1_000_000_000


def _wrong_starts(events: Events, work: Ints) -> list[str]:
    """Return a warning on work that a long pause, of everything, parts from its launch."""
    gaps = np.diff(events.start)
    if gaps.max(initial=0) < _LEAST_PAUSE_NS:  # no pause is longer
        return []
    at = int(np.argmax(gaps)) + 1
    before, end = int(events.stop[:at].max()), int(events.stop.max())
    pause = int(events.start[at]) - before
    recorded = before - int(events.start[0]) + end - int(events.start[at])
    if pause < max(_LEAST_PAUSE_NS, _TIMES_LONGER * recorded):
        return []
    launch = events.launch_of(work)
    parted = work[(launch >= 0) & ((launch < at) != (work < at))]
    if not len(parted):
        return []
    name = events.texts[int(events.name[parted[0]])][:_LONGEST_NAME]
    return [
        f"{counted(len(parted), 'event')} with an impossible start: {name!r} is "
        f"{format_ns(pause)} from its launch, and nothing else is recorded in between. "
        "The times of its step depend on it"
    ]


def _wrong_durations(events: Events, work: Ints) -> list[str]:
    """Return a warning that names work with impossible durations, if there is any."""
    pairs = list(_contradictions(events, work))
    if not pairs:
        return []
    rows, counts = np.unique(np.concatenate(pairs), return_counts=True)
    longest = rows[np.lexsort((rows, -counts))][:_MOST_NAMED]
    named = ", ".join(_described(events, row, counts[rows == row][0]) for row in longest)
    more = len(rows) - len(longest)
    return [
        f"{counted(len(rows), 'event')} with an impossible duration, since a stream is serial: "
        f"{named}{f', and {more} more' if more else ''}. Compute, idle time and all shares of "
        "the step depend on it"
    ]


def _described(events: Events, row: int, count: int) -> str:
    """Return the name of an event, and what is impossible about it."""
    name = events.texts[int(events.name[row])][:_LONGEST_NAME]
    lasts = format_ns(int(events.stop[row] - events.start[row]))
    return f"{name!r} lasts {lasts} and overlaps {counted(count, 'later event')} of its stream"


def _contradictions(events: Events, work: Ints) -> Iterator[Ints]:
    """Yield per stream the row of the work that lasts beyond each later work."""
    lane = events.lane[work]
    order = np.argsort(lane, kind="stable")  # events are sorted by start
    work, lane = work[order], lane[order]
    stop = events.stop[work]
    drops = np.flatnonzero((stop[1:] < stop[:-1]) & (lane[1:] == lane[:-1]))
    for own in np.unique(lane[drops]).tolist():
        first, end = np.searchsorted(lane, (own, own + 1)).tolist()
        latest = np.maximum.accumulate(stop[first:end])
        later = np.flatnonzero(stop[first + 1 : end] < latest[:-1] - _APART_NS) + 1
        if not len(later):
            continue
        rows = work[first:end]
        longer = rows[np.searchsorted(latest, latest[later - 1])]
        is_ordered = ~(_in_graph(events, rows, longer) | _in_graph(events, rows, rows[later]))
        if len(np.unique(longer)) <= max(_FEW, _MOST * len(rows)):
            yield longer[is_ordered]


def _in_graph(events: Events, work: Ints, rows: Ints) -> Flags:
    """Return which rows share their launch with other work of the stream."""
    correlation, count = np.unique(events.correlation[work], return_counts=True)
    own = events.correlation[rows]
    shared: Flags = (count[np.searchsorted(correlation, own)] > 1) & (own != NULL)
    return shared
