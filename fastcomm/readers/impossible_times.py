"""Find device work whose times contradict the rest of its trace.

Work of a stream begins when the work before it has ended. Programmatic dependent launches let
a successor begin some microseconds earlier, but not end earlier. Work that lasts beyond the end
of later work of its stream has a wrong duration. Nodes of CUDA graphs are left out: what is
recorded as their stream may be that of several branches.

Work that is far from its launch, and from all else, has a wrong start. A lane on which work
often begins while other work runs is no stream, but several that were merged.
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
    if np.diff(events.start).max(initial=0) < _LEAST_PAUSE_NS:  # no pause is longer
        return []
    part = _parts(events)
    launch = events.launch_of(work)
    is_parted = (launch >= 0) & (part[launch] != part[work])
    rows, launch = work[is_parted], launch[is_parted]
    if not len(rows):
        return []
    distance = np.abs(events.start[rows] - events.start[launch])
    farthest = np.argsort(-distance, kind="stable")[:_MOST_NAMED]
    named = ", ".join(
        f"{_name(events, rows[k])!r} is {format_ns(int(distance[k]))} from its launch"
        for k in farthest.tolist()
    )
    return [
        f"{counted(len(rows), 'event')} with an impossible start: {named}{_more(rows)}, and "
        "for most of that time nothing is recorded. The times of their steps depend on it"
    ]


def _parts(events: Events) -> Ints:
    """Return by event how many long pauses of everything lie before it."""
    stop = np.maximum.accumulate(events.stop)
    gap = np.append(0, events.start[1:] - stop[:-1])
    recorded = stop[-1:].sum() - events.start[:1].sum() - gap[gap >= _LEAST_PAUSE_NS].sum()
    return np.cumsum(gap >= max(_LEAST_PAUSE_NS, _TIMES_LONGER * recorded))


def _more(rows: Ints) -> str:
    """Return how many rows are not named, if any."""
    return f", and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""


def _name(events: Events, row: int) -> str:
    """Return the name of an event, cut where it is long."""
    return events.texts[int(events.name[row])][:_LONGEST_NAME]


def _wrong_durations(events: Events, work: Ints) -> list[str]:
    """Return a warning that names work with impossible durations, if there is any."""
    pairs = list(_contradictions(events, work))
    if not pairs:
        return []
    rows, counts = np.unique(np.concatenate(pairs), return_counts=True)
    longest = rows[np.lexsort((rows, -counts))][:_MOST_NAMED]
    named = ", ".join(_described(events, row, counts[rows == row][0]) for row in longest)
    return [
        f"{counted(len(rows), 'event')} with an impossible duration, since a stream is serial: "
        f"{named}{_more(rows)}. Compute, idle time and all shares of the step depend on it"
    ]


def _described(events: Events, row: int, count: int) -> str:
    """Return the name of an event, and what is impossible about it."""
    lasts = format_ns(int(events.stop[row] - events.start[row]))
    overlapped = counted(count, "later event")
    return f"{_name(events, row)!r} lasts {lasts} and overlaps {overlapped} of its stream"


def merged_work(events: Events, work: Ints) -> tuple[int, int]:
    """Return how much work begins while other work of its stream runs, and of how much.

    Only of streams in which this is common, as where tools merge traces of several devices.
    """
    merged = total = 0
    for rows, longer, later in _overlaps(events, work, events.start):
        if len(np.unique(longer)) > max(_FEW, _MOST * len(rows)):
            merged, total = merged + len(later), total + len(rows)
    return merged, total


def _contradictions(events: Events, work: Ints) -> Iterator[Ints]:
    """Yield per stream the row of the work that lasts beyond each later work."""
    for rows, longer, _ in _overlaps(events, work, events.stop):
        if len(np.unique(longer)) <= max(_FEW, _MOST * len(rows)):
            yield longer


def _overlaps(events: Events, work: Ints, moment: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield per stream its work, and pairs of which the first ends long after the second.

    Rather, after a moment of the second: its start, or its end. Nodes of graphs are no pairs.
    """
    lane = events.lane[work]
    order = np.argsort(lane, kind="stable")  # events are sorted by start
    work, lane = work[order], lane[order]
    stop, moment = events.stop[work], moment[work]
    drops = np.flatnonzero((moment[1:] < stop[:-1]) & (lane[1:] == lane[:-1]))
    for own in np.unique(lane[drops]).tolist():
        first, end = np.searchsorted(lane, (own, own + 1)).tolist()
        latest = np.maximum.accumulate(stop[first:end])
        later = np.flatnonzero(moment[first + 1 : end] < latest[:-1] - _APART_NS) + 1
        if not len(later):
            continue
        rows = work[first:end]
        longer = rows[np.searchsorted(latest, latest[later - 1])]
        is_pair = ~(_in_graph(events, rows, longer) | _in_graph(events, rows, rows[later]))
        yield rows, longer[is_pair], rows[later[is_pair]]


def _in_graph(events: Events, work: Ints, rows: Ints) -> Flags:
    """Return which rows share their launch with other work of the stream.

    Where several calls have one number, traces were merged.
    """
    correlation, count = np.unique(events.correlation[work], return_counts=True)
    own = events.correlation[rows]
    calls = np.sort(events.correlation[events.rows("runtime")])
    is_repeated = np.isin(own, calls[1:][calls[1:] == calls[:-1]])
    is_shared = (count[np.searchsorted(correlation, own)] > 1) & (own != NULL)
    in_graph: Flags = is_shared & ~is_repeated
    return in_graph
