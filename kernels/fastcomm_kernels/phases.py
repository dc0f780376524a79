"""Phases: maximal runs of one tag among the communication events of one iteration.

Events are sorted by start; `segment` is the row of the iteration that holds the event, or -1,
and an event of no iteration is passed over. The loops write always and advance conditionally.
"""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Ints

Tag = NDArray[np.int8]
Segment = NDArray[np.int32]

_NEVER = np.iinfo(np.int64).min


@kernel
def phases(
    start: Ints, stop: Ints, tag: Tag, segment: Segment
) -> tuple[Ints, Ints, Tag, Segment]:
    """Return first start, latest stop, tag and segment of each phase."""
    size = len(start) + 1
    first_start, last_stop = np.empty(size, np.int64), np.empty(size, np.int64)
    out_tag, out_segment = np.empty(size, np.int8), np.empty(size, np.int32)
    n = 0
    run = end = _NEVER
    for i in range(len(start)):
        counts = segment[i] >= 0
        # Tag and segment as one number: two comparisons would compile to a branch.
        key = 256 * np.int64(segment[i]) + tag[i] if counts else run
        opens = key != run
        run = key
        # The next phase's row, kept if it opens here; then its stop, a row further on.
        first_start[n], out_tag[n], out_segment[n] = start[i], tag[i], segment[i]
        n += int(opens)
        end = max(_NEVER if opens else end, stop[i] if counts else _NEVER)
        last_stop[n] = end
    return first_start[:n], last_stop[1 : n + 1], out_tag[:n], out_segment[:n]


@kernel
def windows(
    first_start: Ints, last_stop: Ints, tag: Tag, segment: Segment
) -> tuple[Ints, Tag, Tag, Segment]:
    """Return length, tag before, tag after and segment of each window between two phases.

    A window lies between consecutive phases of one segment. Where they overlap it is negative.
    """
    size = len(tag)
    length, out_segment = np.empty(size, np.int64), np.empty(size, np.int32)
    before, after = np.empty(size, np.int8), np.empty(size, np.int8)
    n = 0
    for k in range(1, size):
        length[n] = first_start[k] - last_stop[k - 1]
        before[n], after[n], out_segment[n] = tag[k - 1], tag[k], segment[k]
        n += int(segment[k] == segment[k - 1])
    return length[:n], before[:n], after[:n], out_segment[:n]
