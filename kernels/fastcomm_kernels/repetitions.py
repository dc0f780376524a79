"""Sequences that repeat themselves."""

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Ints


@kernel
def longest_repetition(token: Ints, shortest: int) -> tuple[int, int, int]:
    """Return the period by which a sequence repeats itself longest, and that run's bounds.

    The run is the longest of places `k` with ``token[k] == token[k - period]``, the last of
    equal ones for the smallest period; period 0 without one longer than `shortest`. Every
    period is tried, so time grows with the square of the length.
    """
    best, best_begin, best_end = 0, 0, 0
    longest = shortest
    for period in range(1, len(token) - shortest):
        begin = period
        for k in range(period, len(token) + 1):
            if k < len(token) and token[k] == token[k - period]:
                continue
            if k - begin > longest or (best == period and k - begin == longest):
                longest, best, best_begin, best_end = k - begin, period, begin, k
            begin = k + 1
    return best, best_begin, best_end
