"""Definitions, slow and obvious: sets of points, and loops over all pairs."""

from collections import Counter
from itertools import groupby, pairwise


def points(intervals):
    """The set of all integers that the intervals cover."""
    return {t for start, stop in intervals for t in range(start, stop)}


def merged(intervals):
    """The maximal runs of covered points."""
    covered = points(intervals)
    starts = sorted(t for t in covered if t - 1 not in covered)
    stops = sorted(t + 1 for t in covered if t + 1 not in covered)
    return list(zip(starts, stops, strict=True))


def mask_at(t, classes):
    """The set of classes that cover a point, as a bit mask."""
    return sum(1 << c for c, intervals in enumerate(classes) if t in points(intervals))


def coverage(classes, segments):
    """Of each segment, how many of its points each mask has."""
    return [Counter(mask_at(t, classes) for t in range(*segment)) for segment in segments]


def segment_of(t, segments):
    """The row of the segment that holds a point, or -1."""
    rows = [row for row, segment in enumerate(segments) if t in range(*segment)]
    return rows[0] if rows else -1


def phases(events):
    """Runs of consecutive (start, stop, tag, segment) with one tag and segment."""
    held = [event for event in events if event[3] >= 0]
    runs = [list(run) for _, run in groupby(held, key=lambda event: event[2:])]
    return [(run[0][0], max(stop for _, stop, _, _ in run), *run[0][2:]) for run in runs]


def windows(events):
    """From the end of a phase to the start of the next of the same segment."""
    return [
        (after[0] - before[1], before[2], after[2], after[3])
        for before, after in pairwise(phases(events))
        if before[3] == after[3]
    ]


def totals(events, segment, tag):
    """Events, length, known value and unknown values of one segment and tag."""
    cell = [event for event in events if event[3:] == (segment, tag)]
    values = [value for _, _, value, _, _ in cell]
    return (
        len(cell),
        sum(stop - start for start, stop, _, _, _ in cell),
        sum(value for value in values if value is not None),
        values.count(None),
    )


def enclosing(ranges, launch):
    """The row of the innermost (lane, start, stop) that holds a launch, or -1."""
    lane, start, stop = launch
    rows = [
        row
        for row, (its_lane, its_start, its_stop) in enumerate(ranges)
        if its_lane == lane and its_start <= start and stop <= its_stop
    ]
    return max(rows, key=lambda row: (ranges[row][1], -ranges[row][2], row), default=-1)


def projected(span, launches, work):
    """First start, last stop and number of the work whose launch the range holds."""
    lane, start, stop = span
    held = [
        each
        for each, (where, first, last) in zip(work, launches, strict=True)
        if where == lane and start <= first and last <= stop
    ]
    if not held:
        return 0, 0, 0
    return min(first for first, _ in held), max(last for _, last in held), len(held)
