"""Slices of a rank as packets of Perfetto, beside the same as text of Chrome's format."""

import numpy as np

from fastcomm.trace.perfetto_trace import PerfettoTimeline
from fastcomm.trace.timelines import ChromeTimeline, Slices

SLICES = 100_000
HEADS = 200


def test_packets(bar):
    draw = np.random.default_rng(7)
    start, stop = np.cumsum(draw.integers(1, 20_000, 2 * SLICES)).reshape(-1, 2).T
    heads = [
        {
            "name": f"a_kernel_of_usual_length_{number}",
            "cat": "compute",
            "pid": 3,
            "tid": 2 + number % 8,
            "args": {"operation": "AllReduce", "bytes": number << 10},
        }
        for number in range(HEADS)
    ]
    slices = Slices(heads=heads, head=draw.integers(0, HEADS, SLICES), start=start, stop=stop)
    text, packets = (
        (lambda form=form: form.rank(3, "rank 3", {}, slices))
        for form in (ChromeTimeline(), PerfettoTimeline(10**18, 3))
    )
    bar("packets", packets, text, count=SLICES)
