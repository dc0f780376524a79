"""Which range encloses which launch: ranges (NVTX, profiler steps) and launches on host lanes.

A range encloses a launch of the same lane that neither starts before it nor stops after it.
The innermost is the one that starts last; of those, the shortest; of those, the last row.
Ranges are sorted by (lane, start, stop descending), launches by (lane, start).
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel

Column = NDArray[np.int64]
Lane = NDArray[np.int32]


@kernel
def enclosing(
    range_lane: Lane,
    range_start: Column,
    range_stop: Column,
    lane: Lane,
    start: Column,
    stop: Column,
) -> Column:
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


Lanes = tuple[Lane, Column, Column]  # lane, start, stop


@kernel
def projected(
    ranges: Lanes, launches: Lanes, work: tuple[Column, Column]
) -> tuple[Column, Column, Column]:
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
