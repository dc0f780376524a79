import numpy as np

from fastcomm_kernels import intervals

N = 200_000


def test_phases_and_windows(bar):
    """A rank's communication: a run of one tag is three events long on average."""
    random = np.random.default_rng(0)
    start = 1_753_000_000_000_000_000 + np.cumsum(random.integers(1, 100_000, N))
    stop = start + random.integers(1, 200_000, N)
    tag = (np.cumsum(random.random(N) < 1 / 3) % 5).astype(np.int8)
    segment = np.arange(N, dtype=np.int32) // 2_000
    segment[random.random(N) < 0.01] = -1
    columns = start, stop, tag, segment
    furthest = np.empty_like(stop)
    bar(
        "phases_and_windows",
        lambda: intervals.windows(*intervals.phases(*columns)),
        lambda: np.maximum.accumulate(stop, out=furthest),
        count=N,
    )
