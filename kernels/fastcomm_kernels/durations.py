"""Durations by key: their sums, extremes, medians and variances."""

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Floats, Ints

Codes = NDArray[np.int32]


@kernel
def grouped(key: Codes, value: Ints, size: np.int64) -> tuple[Ints, Ints]:
    """Return where each key's values begin, and the values by key, in their order."""
    first = np.zeros(size + 1, np.int64)
    for i in range(len(key)):
        first[key[i] + 1] += 1
    for k in range(size):
        first[k + 1] += first[k]
    place = first.copy()
    out = np.empty(len(key), np.int64)
    for i in range(len(key)):
        out[place[key[i]]] = value[i]
        place[key[i]] += 1
    return first, out


@kernel
def described(first: Ints, value: Ints) -> tuple[Ints, Ints, Ints, Ints, Floats]:
    """Return sum, least, most, upper median and population variance of each group's values."""
    size = len(first) - 1
    total, least, most = (
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
    )
    median, variance = np.zeros(size, np.int64), np.zeros(size, np.float64)
    ordered = value.copy()
    for k in range(size):
        begin, end = first[k], first[k + 1]
        count = int(end - begin)
        if count == 0:
            continue
        for i in range(begin, end):
            total[k] += value[i]
        mean = total[k] / count
        for i in range(begin, end):
            variance[k] += (value[i] - mean) * (value[i] - mean)
        variance[k] /= count
        # Shell's sort: groups are as many values as a run has steps.
        gap = 1
        while gap < count:
            gap = 3 * gap + 1
        while gap > 1:
            gap //= 3
            for i in range(begin + gap, end):
                moved = ordered[i]
                at = i
                while at - gap >= begin and ordered[at - gap] > moved:
                    ordered[at] = ordered[at - gap]
                    at -= gap
                ordered[at] = moved
        least[k], most[k] = ordered[begin], ordered[end - 1]
        median[k] = ordered[begin + count // 2]
    return total, least, most, median, variance
