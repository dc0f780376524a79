import numpy as np

from fastcomm_kernels import matching

LANES, STEPS, OPS, LAUNCHES = 4, 100, 200, 5


def traced():
    """On some threads steps around layers around ops, with launches in each and between."""
    random = np.random.default_rng(0)
    shape = LANES, STEPS, OPS, LAUNCHES
    start = np.cumsum(random.integers(1_000, 20_000, shape).ravel()).reshape(shape)
    stop = start + random.integers(100, 900, shape)
    lane = np.broadcast_to(np.arange(LANES).reshape(-1, 1, 1, 1), shape)
    nested = [
        (lane[..., :1, :1], start[..., :1, :1] - 90, stop[..., -1:, -1:] + 90),
        (lane[..., ::20, :1], start[..., ::20, :1] - 80, stop[..., 19::20, -1:] + 80),
        (lane[..., :1], start[..., :1] - 70, stop[..., -2:-1] + 70),
        (lane[..., :1], start[..., :1] - 60, stop[..., 1:2] + 60),
    ]
    ranges = [np.concatenate([level[k].ravel() for level in nested]) for k in range(3)]
    order = np.lexsort((-ranges[2], ranges[1], ranges[0]))
    (range_lane, *times), (lane, *launch) = (
        [column[order] for column in ranges],
        [lane.ravel(), start.ravel(), stop.ravel()],
    )
    return range_lane.astype(np.int32), *times, lane.astype(np.int32), *launch


def test_enclosing(bar):
    columns = traced()
    _, range_start, _, _, start, _ = columns
    assert (matching.enclosing(*columns) >= 0).all()
    bar(
        "enclosing",
        lambda: matching.enclosing(*columns),
        lambda: np.searchsorted(range_start, start, side="right"),
        count=len(start),
    )
