"""Which launch belongs to which device work: events that share a correlation."""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.graph import NONE, Column, Flags, Numbers


@kernel
def partners(code: Numbers, codes: int, is_device: Flags, position: Column) -> Numbers:
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
    launches: Column, works: Column, stream: Numbers, start: Column, streams: int
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
def launched(launches: Column, i: int, stream: Numbers, length: Numbers, found: Numbers) -> int:
    """Count the launch `i` in `length` and `found`; the next launch."""
    row = launches[i]
    length[stream[row]] += 1
    found[row] = length[stream[row]]
    return i + 1


@kernel
def launches_before(
    launches: Column, lane: Numbers, marks: Column, mark_lane: Numbers, start: Column
) -> Numbers:
    """For each mark the last launch on its lane at or before it, or NONE.

    Rows are in order of time; `lane` is that of each launch, both less than `len(lane)`.
    """
    last = np.full(len(lane) + len(mark_lane) + 1, NONE, np.int32)
    found = np.full(len(marks), NONE, np.int32)
    i = 0
    for k in range(len(marks)):
        while i < len(launches) and start[launches[i]] <= start[marks[k]]:
            last[lane[i]] = launches[i]
            i += 1
        found[k] = last[mark_lane[k]]
    return found


@kernel
def launches_behind(
    launches: Column, lane: Numbers, marks: Column, mark_lane: Numbers, start: Column
) -> Numbers:
    """For each mark the first launch on its lane that is later, or NONE."""
    following = np.full(len(lane) + len(mark_lane) + 1, NONE, np.int32)
    found = np.full(len(marks), NONE, np.int32)
    i = len(launches) - 1
    for k in range(len(marks) - 1, -1, -1):
        while i >= 0 and start[launches[i]] > start[marks[k]]:
            following[lane[i]] = launches[i]
            i -= 1
        found[k] = following[mark_lane[k]]
    return found
