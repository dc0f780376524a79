import numpy as np

from fastcomm_kernels import intervals

N = 200_000


def numpy_windows(start, stop, tag, segment):
    """Find where tag or segment changes, and subtract the latest stop before."""
    inside = np.flatnonzero(segment >= 0)
    start, stop, tag, segment = (column[inside] for column in (start, stop, tag, segment))
    changes = (np.diff(tag) != 0) | (np.diff(segment) != 0)
    first = np.flatnonzero(np.append(True, changes))
    latest = np.maximum.reduceat(stop, first)
    start, tag, segment = start[first], tag[first], segment[first]
    k = np.flatnonzero(segment[1:] == segment[:-1])
    return start[k + 1] - latest[k], tag[k], tag[k + 1], segment[k]


def test_phases_and_windows(bar):
    """A rank's communication: a run of one tag is three events long on average."""
    random = np.random.default_rng(0)
    start = 1_753_000_000_000_000_000 + np.cumsum(random.integers(1, 100_000, N))
    stop = start + random.integers(1, 200_000, N)
    tag = (np.cumsum(random.random(N) < 1 / 3) % 5).astype(np.int8)
    segment = np.arange(N, dtype=np.int32) // 2_000
    segment[random.random(N) < 0.01] = -1
    columns = start, stop, tag, segment
    found = intervals.windows(*intervals.phases(*columns))
    for ours, theirs in zip(found, numpy_windows(*columns), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    cell, length = tag.astype(np.int64), (stop - start).astype(np.float64)
    bar(
        "phases_and_windows",
        lambda: intervals.windows(*intervals.phases(*columns)),
        lambda: np.bincount(cell, length),
        count=N,
    )
