"""Test packets of events against fields that are written one by one."""

import numpy as np
from builders.perfetto_trace import message, one
from hypothesis import given
from hypothesis import strategies as st

from fastcomm_kernels.perfetto_text import Contents, packets

FIELDS = st.binary(max_size=20)
TIME, EVENT = 8, 11


def contents(strings):
    first = np.cumsum([0, *map(len, strings)])
    return Contents(first, np.frombuffer(b"".join(strings), np.uint8))


@given(
    st.lists(FIELDS, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2), FIELDS), max_size=6),
    FIELDS,
)
def test_each_packet_has_its_time_and_its_event(heads, events, prefix):
    events = [(time, head % len(heads), tail * 8) for time, head, tail in events]
    time, head = (np.array([event[k] for event in events], np.int64) for k in (0, 1))
    text = packets(
        time,
        np.frombuffer(prefix, np.uint8),
        head,
        contents(heads),
        contents([tail for *_, tail in events]),
    )
    assert text.tobytes() == b"".join(
        one(1, message((TIME, time)) + prefix + message((EVENT, heads[head] + tail)))
        for time, head, tail in events
    )
