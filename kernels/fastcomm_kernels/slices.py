"""Find the end of each slice of a timeline, whose begins and ends are events of their own.

Columns have an event each, in the order of the file: whether it begins a slice, its track and
its time. A slice's stop is written to the row of its begin; NULL if it has no end.
"""

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Flags, Ints


@kernel
def pairs_by_number(
    begins: Flags, track: Ints, time: Ints, begin: int, end: int, stop: int
) -> bool:
    """Return whether the n-th of some begins belongs to the n-th of as many ends.

    It does if their tracks are equal, and a single begin is followed by its end or the events
    of a track are not in the order of time, since a writer in this order closes the innermost
    slice.

    Parameters
    ----------
    begins, track, time
        The columns.
    begin, end, stop
        Row of the first begin, of the first end behind it, and behind the last end.

    """
    count = end - begin
    if count != stop - end:
        return False
    ordered = True
    for k in range(count):
        if track[begin + k] != track[end + k] or time[begin + k] > time[end + k]:
            return False
        later = k > 0 and (
            time[begin + k] < time[begin + k - 1] or time[end + k] < time[end + k - 1]
        )
        # Only of one track: those of others are written in any order.
        ordered &= not later and time[begin + k] <= time[end] and track[begin] == track[end + k]
    return count == 1 or not ordered


@kernel
def stops_by_number(begins: Flags, track: Ints, time: Ints, stop: Ints, done: Flags) -> int:
    """Pair runs of begins with the runs of ends behind them; return the number of others.

    Parameters
    ----------
    begins, track, time
        The columns.
    stop, done
        Stops of the begins, and whether a row is paired; written.

    """
    rows, unpaired, i = len(begins), 0, 0
    while i < rows:
        begin = i
        while i < rows and begins[i]:
            i += 1
        end = i
        while i < rows and not begins[i]:
            i += 1
        if pairs_by_number(begins, track, time, begin, end, i):
            for k in range(end - begin):
                stop[begin + k] = time[end + k]
                done[begin + k] = done[end + k] = True
        else:
            unpaired += i - begin
    return unpaired


@kernel
def stops_by_nesting(begins: Flags, track: Ints, time: Ints, order: Ints, stop: Ints) -> None:
    """Pair each end with the innermost open slice on its track.

    Parameters
    ----------
    begins, track, time
        The columns.
    order
        Rows to pair, by track, then in the order in which slices open and close.
    stop
        Stops of the begins; written.

    """
    outer = order.copy()
    top = 0
    for k in range(len(order)):
        row = order[k]
        if k > 0 and track[row] != track[order[k - 1]]:
            top = 0
        if begins[row]:
            outer[top] = row
            top += 1
        elif top > 0:
            top -= 1
            stop[outer[top]] = max(time[row], time[outer[top]])


@kernel
def is_in_order(track: Ints, time: Ints, order: Ints) -> bool:
    """Return whether times of each track ascend; `order` has the rows by track."""
    for k in range(1, len(order)):
        one, other = order[k - 1], order[k]
        if track[one] == track[other] and time[other] < time[one]:
            return False
    return True
