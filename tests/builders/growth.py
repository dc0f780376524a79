"""How the processor time of a function grows with the size of its input."""

import time

MOST = 10  # times as long for four times the input: linear work takes 4, quadratic 16
_LEAST_S = 0.02  # shorter times tell nothing, and are counted as this


def seconds(work, *arguments, times=3):
    """The least processor time of some calls: other programs can only add to it."""
    taken = []
    for _ in range(times):
        begin = time.process_time()
        work(*arguments)
        taken.append(time.process_time() - begin)
    return min(taken)


def growth(work, make, size, times=3):
    """By which factor the time of `work(make(n))` grows from n = `size` to 4 * `size`.

    The larger input is measured once, and again only if it seems to take too long.
    """
    small = max(seconds(work, make(size), times=times), _LEAST_S)
    large = seconds(work, make(4 * size), times=1)
    if large >= MOST * small and times > 1:
        large = min(large, seconds(work, make(4 * size), times=times - 1))
    return max(large, _LEAST_S) / small
