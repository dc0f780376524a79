import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracles import intervals as oracles

from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NULL

TAGS = 3
SEGMENTS = st.lists(st.integers(0, 50), max_size=10).map(
    lambda cuts: list(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False))
)
VALUES = st.none() | st.integers(-5, 2**40)
EVENTS = st.lists(
    st.tuples(
        st.integers(-5, 55),
        st.integers(0, 40),
        VALUES,
        st.integers(-1, 3),
        st.integers(0, TAGS - 1),
    ),
    max_size=24,
).map(
    lambda events: [
        (start, start + length, value, segment, tag)
        for start, length, value, segment, tag in events
    ]
)


def column(values, dtype=np.int64):
    made = np.array(list(values), dtype)
    made.flags.writeable = False
    return made


@given(st.lists(st.integers(-5, 55)).map(sorted), SEGMENTS)
def test_an_event_belongs_to_the_segment_of_its_start(start, pairs):
    seg_start, seg_stop = column(p[0] for p in pairs), column(p[1] for p in pairs)
    found = intervals.segment_of(column(start), seg_start, seg_stop)
    assert found.dtype == np.int32
    assert found.tolist() == [oracles.segment_of(t, pairs) for t in start]


@given(EVENTS)
def test_totals_add_up_the_events_of_each_segment_and_tag(events):
    start, stop, value, segment, tag = zip(*events, strict=True) if events else [()] * 5
    found = intervals.totals(
        column(start),
        column(stop),
        column(NULL if v is None else v for v in value),
        column(segment, np.int32),
        column(tag, np.int8),
        (4, TAGS),
    )
    assert {matrix.shape for matrix in found} == {(4, TAGS)}
    for s, t in np.ndindex(4, TAGS):
        assert tuple(matrix[s, t] for matrix in found) == oracles.totals(events, s, t)
