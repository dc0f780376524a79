"""Match ranges with launches, launches with device events, and items of two sequences."""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import NONE, Flags, Ints, Numbers

LaneIntervals = tuple[Numbers, Ints, Ints]  # lane, start, stop
_MATCH, _SKIP_A, _SKIP_B = 0, 1, 2
_NEVER = -(1 << 62)


@kernel
def row_of_lane(lanes: Numbers, row: int, lane: int) -> int:
    """Return the first row, from `row` on, whose lane is at least `lane`.

    Parameters
    ----------
    lanes
        Lane of each row, ascending.
    row, lane
        Where to begin, and the lane. The result is the number of rows if there is no such row.

    """
    while row < len(lanes) and lanes[row] < lane:
        row += 1
    return row


@kernel
def enclosing(
    range_lane: Numbers,
    range_start: Ints,
    range_stop: Ints,
    lane: Numbers,
    start: Ints,
    stop: Ints,
) -> Ints:
    """Return the row of the innermost range that encloses each launch on its lane, or -1.

    Parameters
    ----------
    range_lane, range_start, range_stop
        Ranges, sorted by lane, then by start; a range comes before one that it encloses.
    lane, start, stop
        Launches, sorted by lane, then by start. Times are ns.

    """
    rows = np.empty(len(lane), np.int64)
    # Open ranges, innermost on top; each stops before the one below it. A range that outlives
    # an earlier one replaces it: it encloses all later launches that the earlier one could.
    stack = np.empty(len(range_lane), np.int64)
    depth = r = 0
    current = -1
    for q in range(len(lane)):
        if lane[q] != current:
            current, depth = lane[q], 0
            r = row_of_lane(range_lane, r, current)
        while r < len(range_lane) and range_lane[r] == current and range_start[r] <= start[q]:
            while depth and range_stop[stack[depth - 1]] <= range_stop[r]:
                depth -= 1
            stack[depth] = r
            depth += 1
            r += 1
        while depth and range_stop[stack[depth - 1]] < start[q]:
            depth -= 1
        top = depth
        # Ranges usually nest, and this loop ends at once.
        while top and range_stop[stack[top - 1]] < stop[q]:
            top -= 1
        rows[q] = stack[top - 1] if top else -1
    return rows


@kernel
def owners(
    start: Ints, stop: Ints, layer_start: Ints, layer_stop: Ints, edges: Ints
) -> tuple[Ints, Ints, Ints]:
    """Divide intervals by the first of several layers that covers each instant.

    Parameters
    ----------
    start, stop
        Disjoint sorted intervals.
    layer_start, layer_stop
        Intervals of all layers, one layer after another; those of a layer are disjoint, sorted,
        and not empty.
    edges
        First row of each layer, then the number of rows.

    Returns
    -------
    tuple of ndarray
        Int64 columns, sorted by time: interval of each piece, its stop, and the row that covers
        it, or -1. A piece starts where the one before it stops, or where its interval starts.

    """
    size = len(start) + 2 * len(layer_start)
    interval, end = np.empty(size, np.int64), np.empty(size, np.int64)
    owner = np.empty(size, np.int64)
    at, n = edges.copy(), 0
    for i in range(len(start)):
        now = start[i]
        while now < stop[i]:
            until, row = stop[i], -1
            for layer in range(len(edges) - 1):
                while at[layer] < edges[layer + 1] and layer_stop[at[layer]] <= now:
                    at[layer] += 1
                if at[layer] == edges[layer + 1]:
                    continue
                if layer_start[at[layer]] <= now:
                    row, until = at[layer], min(until, layer_stop[at[layer]])
                    break
                until = min(until, layer_start[at[layer]])
            interval[n], end[n], owner[n] = i, until, row
            n += 1
            now = until
    return interval[:n], end[:n], owner[:n]


@kernel
def projected(
    ranges: LaneIntervals, launches: LaneIntervals, work: tuple[Ints, Ints]
) -> tuple[Ints, Ints, Ints]:
    """Return first start, last stop and number of the device events launched in each range.

    Parameters
    ----------
    ranges, launches
        Lane, start and stop; sorted by lane, then by start.
    work
        Start and stop of the device event of each launch; a launch with several events has
        several rows.

    Returns
    -------
    tuple of ndarray
        Three int64 columns, one entry per range; 0 for a range without device events.

    """
    range_lane, range_start, range_stop = ranges
    lane, start, stop = launches
    work_start, work_stop = work
    first = np.zeros(len(range_lane), np.int64)
    last = np.zeros(len(range_lane), np.int64)
    count = np.zeros(len(range_lane), np.int64)
    # Ranges that may still enclose a launch, in no order. Unlike in `enclosing`, ranges that
    # another one outlives count as well.
    open_ = np.empty(len(range_lane), np.int64)
    depth = r = 0
    current = -1
    for q in range(len(lane)):
        if lane[q] != current:
            current, depth = lane[q], 0
            r = row_of_lane(range_lane, r, current)
        while r < len(range_lane) and range_lane[r] == current and range_start[r] <= start[q]:
            open_[depth] = r
            depth += 1
            r += 1
        remaining = 0
        for k in range(depth):
            row = open_[k]
            if range_stop[row] < start[q]:
                continue
            open_[remaining] = row
            remaining += 1
            if range_stop[row] >= stop[q]:
                first[row] = min(first[row], work_start[q]) if count[row] else work_start[q]
                last[row] = max(last[row], work_stop[q]) if count[row] else work_stop[q]
                count[row] += 1
        depth = remaining
    return first, last, count


@kernel
def partners(code: Numbers, codes: int, is_device: Flags, position: Ints) -> Numbers:
    """Return the row that each row is linked to, or NONE.

    This is the row of the other side (device or host) with the same code and the last position.

    Parameters
    ----------
    code, codes
        Code of each row, or NONE without partner; all are less than `codes`.
    is_device
        Side of each row.
    position
        Place of each row in its file: of rows with one code and side the largest counts.

    """
    last = np.full((2, codes), NONE, np.int32)
    for row in range(len(code)):
        if code[row] >= 0:
            side = int(is_device[row])
            other = last[side, code[row]]
            if other < 0 or position[other] < position[row]:
                last[side, code[row]] = row
    partner = np.full(len(code), NONE, np.int32)
    for row in range(len(code)):
        if code[row] >= 0:
            partner[row] = last[1 - int(is_device[row]), code[row]]
    return partner


@kernel
def queue_lengths(
    launches: Ints, works: Ints, stream: Numbers, start: Ints, streams: int
) -> Numbers:
    """Return the length of a stream's queue after each launch and each start, else -1.

    Parameters
    ----------
    launches, works
        Rows of launches and of device events, in order of time.
    stream
        Stream of each row, less than `streams`.
    start
        Start of each row. A launch precedes a start at the same time.
    streams
        Number of streams.

    """
    length = np.zeros(streams, np.int32)
    result = np.full(len(start), NONE, np.int32)
    i = 0
    for k in range(len(works)):
        work = works[k]
        while i < len(launches) and start[launches[i]] <= start[work]:
            i = launched(launches, i, stream, length, result)
        length[stream[work]] -= 1
        result[work] = length[stream[work]]
    while i < len(launches):
        i = launched(launches, i, stream, length, result)
    return result


@kernel
def launched(launches: Ints, i: int, stream: Numbers, length: Numbers, result: Numbers) -> int:
    """Count a launch in the queue of its stream, and return ``i + 1``.

    Parameters
    ----------
    launches, i
        Rows of the launches, and the index of this one.
    stream
        Stream of each row.
    length
        Queue length by stream; one entry is increased.
    result
        Queue length by row, after its launch; one entry is written.

    """
    row = launches[i]
    length[stream[row]] += 1
    result[row] = length[stream[row]]
    return i + 1


@kernel
def launches_before(
    launches: tuple[Ints, Numbers], marks: tuple[Ints, Numbers], start: Ints, lanes: int
) -> Numbers:
    """Return the row of the last launch on each mark's lane that is not later, or NONE.

    Parameters
    ----------
    launches, marks
        Pairs: rows in order of time, and the lane of each, less than `lanes`.
    start
        Time of each row in ns.
    lanes
        Number of lanes.

    """
    last = np.full(lanes, NONE, np.int32)
    result = np.full(len(marks[0]), NONE, np.int32)
    i = 0
    for k in range(len(result)):
        while i < len(launches[0]) and start[launches[0][i]] <= start[marks[0][k]]:
            last[launches[1][i]] = launches[0][i]
            i += 1
        result[k] = last[marks[1][k]]
    return result


@kernel
def launches_behind(
    launches: tuple[Ints, Numbers], marks: tuple[Ints, Numbers], start: Ints, lanes: int
) -> Numbers:
    """Return the row of the first launch on each mark's lane that is later, or NONE.

    Parameters
    ----------
    launches, marks
        Pairs: rows in order of time, and the lane of each, less than `lanes`.
    start
        Time of each row in ns.
    lanes
        Number of lanes.

    """
    following = np.full(lanes, NONE, np.int32)
    result = np.full(len(marks[0]), NONE, np.int32)
    i = len(launches[0]) - 1
    for k in range(len(result) - 1, -1, -1):
        while i >= 0 and start[launches[0][i]] > start[marks[0][k]]:
            following[launches[1][i]] = launches[0][i]
            i -= 1
        result[k] = following[marks[1][k]]
    return result


@kernel
def align(
    a_code: Ints, a_time: Ints, b_code: Ints, b_time: Ints, widest: int, apart: int
) -> Ints:
    """Return the index in a of the item that matches each item of b, or -1.

    Order is kept, and the matching has as many items as possible, as close in time as possible.

    Parameters
    ----------
    a_code, b_code
        Codes of the items of both sequences; only items of equal code match.
    a_time, b_time
        Times of the items.
    widest
        Most items by which, at any place, one sequence may lack more than the other, beyond the
        difference of their lengths.
    apart
        Largest difference of the times of matched items.

    """
    n, m = len(a_code), len(b_code)
    low = max(min(0, n - m) - widest, -m)
    width = min(max(0, n - m) + widest, n) - low + 1
    # Score so far, by how many more items of a than of b were used.
    best = np.full(width + 1, _NEVER, np.int64)
    steps = np.zeros((m + 1, width), np.uint8)
    for c in range(width):
        if 0 <= c + low <= n:
            best[c] = 0
            steps[0, c] = _SKIP_A
    for j in range(1, m + 1):
        for c in range(width):
            i = j + low + c
            if i < 0 or i > n:
                best[c] = _NEVER
                continue
            # One array for all rows: the entry at c is still that of the previous item of b.
            score, step = _NEVER, _SKIP_B
            if i > 0 and a_code[i - 1] == b_code[j - 1]:
                gap = abs(a_time[i - 1] - b_time[j - 1])
                if gap <= apart and best[c] > _NEVER:
                    score, step = best[c] + 2 * apart - gap + 1, _MATCH
            if c > 0 and best[c - 1] > score:
                score, step = best[c - 1], _SKIP_A
            if best[c + 1] > score:
                score, step = best[c + 1], _SKIP_B
            best[c] = score
            steps[j, c] = step
    match_of = np.full(m, -1, np.int64)
    i, j = n, m
    while j > 0:
        step = steps[j, i - j - low]
        if step == _MATCH:
            i, j = i - 1, j - 1
            match_of[j] = i
        elif step == _SKIP_A:
            i -= 1
        else:
            j -= 1
    return match_of


@kernel
def align_pieces(
    a_code: Ints, a_time: Ints, b_code: Ints, b_time: Ints, widest: int, apart: int
) -> Ints:
    """Return the index in a of the item that matches each item of b, or -1.

    Each piece is aligned as `align` does. Gaps longer than `apart`, in which neither sequence
    has an item, are between two pieces.

    Parameters
    ----------
    a_code, b_code, a_time, b_time, widest, apart
        As for `align`; times ascend.

    """
    match_of = np.full(len(b_code), NONE, np.int64)
    i = j = 0
    while i < len(a_code) and j < len(b_code):
        a, b, last, before = i, j, min(a_time[i], b_time[j]), -1
        while before < i + j:
            before = i + j
            while i < len(a_time) and a_time[i] - last <= apart:
                last, i = max(last, a_time[i]), i + 1
            while j < len(b_time) and b_time[j] - last <= apart:
                last, j = max(last, b_time[j]), j + 1
        if i - a == 1 and j - b == 1:  # as most pieces; `align` allocates memory
            match_of[b] = a if a_code[a] == b_code[b] else NONE
            continue
        piece = align(a_code[a:i], a_time[a:i], b_code[b:j], b_time[b:j], widest, apart)
        for k in range(len(piece)):
            if piece[k] != NONE:
                match_of[b + k] = a + piece[k]
    return match_of
