import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracles import intervals as oracles

from fastcomm.trace.events import outermost
from fastcomm_kernels import matching

LANES = st.integers(0, 3)
SPANS = st.tuples(LANES, st.integers(0, 30), st.integers(0, 20)).map(
    lambda span: (span[0], span[1], span[1] + span[2])
)
RANGES = st.lists(SPANS, max_size=16).map(
    lambda spans: sorted(spans, key=lambda span: (span[0], span[1], -span[2]))
)
LAUNCHES = st.lists(SPANS, max_size=16).map(lambda spans: sorted(spans, key=lambda s: s[:2]))


def columns(spans):
    table = zip(*spans, strict=True) if spans else [()] * 3
    types = np.int32, np.int64, np.int64
    made = [np.array(column, dtype) for column, dtype in zip(table, types, strict=True)]
    for column in made:
        column.flags.writeable = False
    return made


def nested(start, stop, depth):
    """A range, and in its middle the next."""
    return [(0, start + i, stop - i) for i in range(depth)]


@given(RANGES, LAUNCHES)
def test_a_launch_belongs_to_the_innermost_enclosing_range(ranges, launches):
    found = matching.enclosing(*columns(ranges), *columns(launches))
    assert found.tolist() == [oracles.enclosing(ranges, launch) for launch in launches]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=12))
def test_ranges_that_nest_are_popped_as_they_end(spans):
    ranges = nested(0, 30, 10)
    launches = sorted((0, start, stop) for start, stop in spans)
    found = matching.enclosing(*columns(ranges), *columns(launches))
    assert found.tolist() == [oracles.enclosing(ranges, launch) for launch in launches]


def test_of_two_equal_ranges_the_last_row_is_the_innermost():
    ranges = [(0, 0, 9), (0, 2, 8), (0, 2, 8), (0, 2, 5)]
    found = matching.enclosing(*columns(ranges), *columns([(0, 2, 7), (0, 3, 5), (0, 5, 9)]))
    assert found.tolist() == [2, 3, 0]


def test_a_launch_that_only_overlaps_a_range_is_not_in_it():
    ranges = [(0, 0, 10), (0, 2, 20)]
    found = matching.enclosing(*columns(ranges), *columns([(0, 1, 9), (0, 1, 15), (0, 3, 25)]))
    assert found.tolist() == [0, -1, -1]


WORK = st.tuples(st.integers(0, 99), st.integers(0, 9)).map(lambda w: (w[0], w[0] + w[1]))


@given(RANGES, LAUNCHES, st.data())
def test_a_range_is_projected_onto_all_work_launched_in_it(ranges, launches, data):
    work = [data.draw(WORK) for _ in launches]
    starts, stops = (np.array([each[k] for each in work], np.int64) for k in (0, 1))
    found = matching.projected(
        tuple(columns(ranges)), tuple(columns(launches)), (starts, stops)
    )
    rows = zip(*(column.tolist() for column in found), strict=True)
    assert list(rows) == [oracles.projected(each, launches, work) for each in ranges]


DISJOINT = st.lists(st.integers(0, 40), unique=True, max_size=12).map(
    lambda ends: list(zip(*[iter(sorted(ends))] * 2, strict=False))
)


@given(DISJOINT, st.lists(DISJOINT, min_size=1, max_size=3))
def test_an_instant_belongs_to_the_first_layer_that_covers_it(idle, layers):
    edges = np.cumsum([0, *map(len, layers)])
    spans = [span for layer in layers for span in layer]
    ends = [
        np.array([span[k] for span in some], np.int64) for some in (idle, spans) for k in (0, 1)
    ]
    found, before = {}, 0
    interval, stops, owner = (each.tolist() for each in matching.owners(*ends, edges))
    for i, until, row in zip(interval, stops, owner, strict=True):
        found |= dict.fromkeys(range(max(before, idle[i][0]), until), row)
        before = until
    covering = {
        time: [row for row, (start, stop) in enumerate(spans) if start <= time < stop]
        for start, stop in idle
        for time in range(start, stop)
    }
    assert found == {time: rows[0] if rows else -1 for time, rows in covering.items()}


def test_launches_after_the_last_work_lengthen_its_queue():
    launches, works = np.array([0, 2, 3]), np.array([1])
    start = np.array([0, 10, 20, 30])
    stream = np.array([0, 0, 0, 0], np.int32)
    found = matching.queue_lengths(launches, works, stream, start, 1)
    assert found.tolist() == [1, 0, 1, 2]


@given(st.lists(SPANS, max_size=16))
def test_outermost_ranges_start_inside_of_no_earlier_one_on_their_lane(ranges):
    order = sorted(range(len(ranges)), key=lambda k: (*ranges[k][:2], -ranges[k][2], k))
    expected = [
        one
        for place, one in enumerate(order)
        if not any(
            ranges[other][0] == ranges[one][0] and ranges[other][2] > ranges[one][1]
            for other in order[:place]
        )
    ]
    assert outermost(columns(ranges)).tolist() == expected
