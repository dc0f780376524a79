import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracles import intervals as oracles

from fastcomm_kernels import intervals

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 99), st.integers(0, 40), st.sampled_from([0, 1, 2]), st.integers(-1, 3)
    ),
    max_size=24,
).map(
    # Sorted by start, the segments in order, with events of no segment anywhere between.
    lambda events: [
        (start, start + length, tag, segment)
        for start, (_, length, tag, _), segment in zip(
            sorted(event[0] for event in events),
            events,
            in_order([event[3] for event in events]),
            strict=True,
        )
    ]
)


def in_order(segments):
    held = iter(sorted(segment for segment in segments if segment >= 0))
    return [next(held) if segment >= 0 else -1 for segment in segments]


def columns(events):
    table = zip(*events, strict=True) if events else [()] * 4
    types = np.int64, np.int64, np.int8, np.int32
    made = [np.array(column, dtype) for column, dtype in zip(table, types, strict=True)]
    for column in made:
        column.flags.writeable = False
    return made


def rows(table):
    return list(zip(*(column.tolist() for column in table), strict=True))


@given(EVENTS)
def test_a_phase_is_a_run_of_one_tag_in_one_segment(events):
    assert rows(intervals.phases(*columns(events))) == oracles.phases(events)


@given(EVENTS)
def test_a_window_lies_between_neighbouring_phases_of_one_segment(events):
    found = intervals.windows(*intervals.phases(*columns(events)))
    assert rows(found) == oracles.windows(events)


def test_a_phase_ends_with_its_latest_stop_and_a_window_may_be_negative():
    found = intervals.phases(*columns([(0, 90, 1, 0), (10, 20, 1, 0), (50, 60, 2, 0)]))
    assert rows(found) == [(0, 90, 1, 0), (50, 60, 2, 0)]
    assert rows(intervals.windows(*found)) == [(-40, 1, 2, 0)]


def test_the_columns_keep_their_types():
    found = intervals.phases(*columns([(0, 1, 1, 0)]))
    assert [column.dtype for column in found] == ["i8", "i8", "i1", "i4"]
    assert [column.dtype for column in intervals.windows(*found)] == ["i8", "i1", "i1", "i4"]
