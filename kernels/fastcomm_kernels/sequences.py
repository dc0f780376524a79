"""Two records of what should be one sequence, where each may lack some of its items."""

import numpy as np

from fastcomm_kernels._jit import kernel
from fastcomm_kernels.arrays import Ints

_MATCH, _SKIP_A, _SKIP_B = 0, 1, 2
_NEVER = -(1 << 62)


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
