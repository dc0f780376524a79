"""Events by segment: which iteration holds an event, and sums by (iteration, tag).

Segments are disjoint intervals ``[seg_start, seg_stop)`` sorted by start; an event belongs as a
whole to the one that holds its start, row -1 is none.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.intervals import place

Column = NDArray[np.int64]
Matrix = NDArray[np.int64]
Tag = NDArray[np.int8]
Segment = NDArray[np.int32]

UNKNOWN = np.iinfo(np.int64).min
"""The value of an event whose value is not known: what a null becomes on its way here."""


@kernel
def segment_of(start: Column, seg_start: Column, seg_stop: Column) -> Segment:
    """Return the row of the segment that holds each of the sorted starts, or -1."""
    out = np.full(len(start), -1, np.int32)
    for s in range(len(seg_start)):
        low, high = place(start, seg_start[s]), place(start, seg_stop[s])
        out[low:high] = s
    return out


@kernel
def totals(
    start: Column,
    stop: Column,
    value: Column,
    segment: Segment,
    tag: Tag,
    shape: tuple[int, int],
) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Return events, length, value and events of unknown value: four matrices, segment by tag.

    The length is the sum of the events' own, overlapping or not; the value that of the known.
    `shape` is how many segments and tags there are.
    """
    # Row 0 takes the events of no segment. The four of one cell share a cache line.
    cells = np.zeros((shape[0] + 1, shape[1], 4), np.int64)
    for i in range(len(start)):
        cell = cells[segment[i] + 1, tag[i]]
        known = value[i] != UNKNOWN
        cell[0] += 1
        cell[1] += stop[i] - start[i]
        cell[2] += value[i] if known else 0
        cell[3] += int(not known)
    return cells[1:, :, 0], cells[1:, :, 1], cells[1:, :, 2], cells[1:, :, 3]
