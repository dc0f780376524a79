"""What belongs to what: a range to a launch, a launch to an event, items of two sequences."""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Flags, Ints
from fastcomm_kernels.graph import NONE, Numbers

Lane = NDArray[np.int32]

Lanes = tuple[Lane, Ints, Ints]  # lane, start, stop
_MATCH, _SKIP_A, _SKIP_B = 0, 1, 2
_NEVER = -(1 << 62)


@kernel
def enclosing(
    range_lane: Lane,
    range_start: Ints,
    range_stop: Ints,
    lane: Lane,
    start: Ints,
    stop: Ints,
) -> Ints:
    """Return the row of the innermost range around each launch, or -1."""
    rows = np.empty(len(lane), np.int64)
    # Open ranges, innermost on top. Each stops before the one below it: a range that outlives
    # an earlier one encloses all that the earlier one could from here on, and is more inward.
    stack = np.empty(len(range_lane), np.int64)
    depth = r = 0
    here = -1
    for q in range(len(lane)):
        if lane[q] != here:
            here, depth = lane[q], 0
            while r < len(range_lane) and range_lane[r] < here:
                r += 1
        while r < len(range_lane) and range_lane[r] == here and range_start[r] <= start[q]:
            while depth and range_stop[stack[depth - 1]] <= range_stop[r]:
                depth -= 1
            stack[depth] = r
            depth += 1
            r += 1
        while depth and range_stop[stack[depth - 1]] < start[q]:
            depth -= 1
        top = depth
        # Real ranges nest, and this loop ends at once; where they overlap it walks down.
        while top and range_stop[stack[top - 1]] < stop[q]:
            top -= 1
        rows[q] = stack[top - 1] if top else -1
    return rows


@kernel
def projected(
    ranges: Lanes, launches: Lanes, work: tuple[Ints, Ints]
) -> tuple[Ints, Ints, Ints]:
    """For each range the first start and last stop of the work launched in it, and how much.

    `work` has the start and stop of what each launch led to; a launch that led to several
    pieces has several rows. Without any work: 0, 0, 0.
    """
    range_lane, range_start, range_stop = ranges
    lane, start, stop = launches
    work_start, work_stop = work
    first = np.zeros(len(range_lane), np.int64)
    last = np.zeros(len(range_lane), np.int64)
    count = np.zeros(len(range_lane), np.int64)
    # Ranges that may still enclose a launch, in no order: unlike in `enclosing`, those that
    # another outlives count, too.
    open_ = np.empty(len(range_lane), np.int64)
    depth = r = 0
    here = -1
    for q in range(len(lane)):
        if lane[q] != here:
            here, depth = lane[q], 0
            while r < len(range_lane) and range_lane[r] < here:
                r += 1
        while r < len(range_lane) and range_lane[r] == here and range_start[r] <= start[q]:
            open_[depth] = r
            depth += 1
            r += 1
        kept = 0
        for k in range(depth):
            row = open_[k]
            if range_stop[row] < start[q]:
                continue
            open_[kept] = row
            kept += 1
            if range_stop[row] >= stop[q]:
                first[row] = min(first[row], work_start[q]) if count[row] else work_start[q]
                last[row] = max(last[row], work_stop[q]) if count[row] else work_stop[q]
                count[row] += 1
        depth = kept
    return first, last, count


@kernel
def partners(code: Numbers, codes: int, is_device: Flags, position: Ints) -> Numbers:
    """The row that each row is linked to: the last of the other side with its code, or NONE.

    Codes are less than `codes`; a row of code NONE has no partner.
    """
    last = np.full((2, codes), NONE, np.int32)
    for row in range(len(code)):
        if code[row] >= 0:
            side = int(is_device[row])
            known = last[side, code[row]]
            if known < 0 or position[known] < position[row]:
                last[side, code[row]] = row
    found = np.full(len(code), NONE, np.int32)
    for row in range(len(code)):
        if code[row] >= 0:
            found[row] = last[1 - int(is_device[row]), code[row]]
    return found


@kernel
def queue_lengths(
    launches: Ints, works: Ints, stream: Numbers, start: Ints, streams: int
) -> Numbers:
    """How long a stream's queue is behind each launch and each start; -1 for other rows.

    `launches` and `works` are rows in order of time; `stream` is that of the work. A launch
    comes before a start at the same time.
    """
    length = np.zeros(streams, np.int32)
    found = np.full(len(start), NONE, np.int32)
    i = 0
    for k in range(len(works)):
        work = works[k]
        while i < len(launches) and start[launches[i]] <= start[work]:
            i = launched(launches, i, stream, length, found)
        length[stream[work]] -= 1
        found[work] = length[stream[work]]
    while i < len(launches):
        i = launched(launches, i, stream, length, found)
    return found


@kernel
def launched(launches: Ints, i: int, stream: Numbers, length: Numbers, found: Numbers) -> int:
    """Count the launch `i` in `length` and `found`; the next launch."""
    row = launches[i]
    length[stream[row]] += 1
    found[row] = length[stream[row]]
    return i + 1


@kernel
def launches_before(
    launches: tuple[Ints, Numbers], marks: tuple[Ints, Numbers], start: Ints, lanes: int
) -> Numbers:
    """For each mark the last launch on its lane at or before it, or NONE.

    Launches and marks are pairs: rows in order of time, and their lanes, less than `lanes`.
    """
    last = np.full(lanes, NONE, np.int32)
    found = np.full(len(marks[0]), NONE, np.int32)
    i = 0
    for k in range(len(found)):
        while i < len(launches[0]) and start[launches[0][i]] <= start[marks[0][k]]:
            last[launches[1][i]] = launches[0][i]
            i += 1
        found[k] = last[marks[1][k]]
    return found


@kernel
def launches_behind(
    launches: tuple[Ints, Numbers], marks: tuple[Ints, Numbers], start: Ints, lanes: int
) -> Numbers:
    """For each mark the first launch on its lane that is later, or NONE."""
    following = np.full(lanes, NONE, np.int32)
    found = np.full(len(marks[0]), NONE, np.int32)
    i = len(launches[0]) - 1
    for k in range(len(found) - 1, -1, -1):
        while i >= 0 and start[launches[0][i]] > start[marks[0][k]]:
            following[launches[1][i]] = launches[0][i]
            i -= 1
        found[k] = following[marks[1][k]]
    return found


@kernel
def align(
    a_code: Ints, a_time: Ints, b_code: Ints, b_time: Ints, widest: int, apart: int
) -> Ints:
    """Return for each item of b its place in a, or -1: as many as can be, as near as can be.

    Two items are the same only if their codes are and their times differ by `apart` at most.
    `widest` is how many more items of one than of the other may lack before any place.
    """
    n, m = len(a_code), len(b_code)
    low = min(0, n - m) - widest
    width = max(0, n - m) + widest - low + 1
    best = np.full(width + 1, _NEVER, np.int64)  # of items so far, by how far a is ahead of b
    way = np.zeros((m + 1, width), np.uint8)
    for c in range(width):
        if 0 <= c + low <= n:
            best[c] = 0
            way[0, c] = _SKIP_A
    for j in range(1, m + 1):
        for c in range(width):
            i = j + low + c
            if i < 0 or i > n:
                best[c] = _NEVER
                continue
            # Row by row in one array: what lies at c is still that of the item before.
            score, how = _NEVER, _SKIP_B
            if i > 0 and a_code[i - 1] == b_code[j - 1]:
                gap = abs(a_time[i - 1] - b_time[j - 1])
                if gap <= apart and best[c] > _NEVER:
                    score, how = best[c] + 2 * apart - gap + 1, _MATCH
            if c > 0 and best[c - 1] > score:
                score, how = best[c - 1], _SKIP_A
            if best[c + 1] > score:
                score, how = best[c + 1], _SKIP_B
            best[c] = score
            way[j, c] = how
    found = np.full(m, -1, np.int64)
    i, j = n, m
    while j > 0:
        how = way[j, i - j - low]
        if how == _MATCH:
            i, j = i - 1, j - 1
            found[j] = i
        elif how == _SKIP_A:
            i -= 1
        else:
            j -= 1
    return found
