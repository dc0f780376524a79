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
    launches: tuple[Column, Numbers], marks: tuple[Column, Numbers], start: Column, lanes: int
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
    launches: tuple[Column, Numbers], marks: tuple[Column, Numbers], start: Column, lanes: int
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
