import numpy as np

from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL

N = 2_000_000
SEGMENTS, TAGS = 100, 6


def test_segment_of(bar):
    random = np.random.default_rng(0)
    start = np.cumsum(random.integers(1, 100_000, N))
    cuts = np.linspace(start[0], start[-1] + 1, SEGMENTS + 1).astype(np.int64)
    number, times = np.arange(SEGMENTS, dtype=np.int32), np.diff(np.searchsorted(start, cuts))
    bar(
        "segment_of",
        lambda: intervals.segment_of(start, cuts[:-1], cuts[1:]),
        lambda: np.repeat(number, times),
        count=N,
    )


def test_totals(bar):
    random = np.random.default_rng(0)
    start = np.cumsum(random.integers(1, 100_000, N))
    stop = start + random.integers(1, 200_000, N)
    value = random.integers(0, 1 << 30, N)
    value[random.random(N) < 0.1] = NULL
    segment = (np.arange(N) * SEGMENTS // N).astype(np.int32)
    tag = random.integers(0, TAGS, N).astype(np.int8)

    cell, known = segment.astype(np.int64) * TAGS + tag, value != NULL
    weights = [
        each.astype(np.float64) for each in (stop - start, np.where(known, value, 0), ~known)
    ]
    bar(
        "totals",
        lambda: intervals.totals(start, stop, value, segment, tag, (SEGMENTS, TAGS)),
        lambda: [np.bincount(cell, each, SEGMENTS * TAGS) for each in (None, *weights)],
        count=N,
    )
