"""Test kernels that pair begins and ends of slices against nested lists in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm_kernels import slices
from fastcomm_kernels.arrays import NULL


def columns(marks):
    """Columns of marks: whether it begins a slice, track, time."""
    begins, track, time = zip(*marks, strict=True) if marks else ((), (), ())
    return np.array(begins, np.bool_), np.array(track, np.int64), np.array(time, np.int64)


def by_number(marks):
    begins, track, time = columns(marks)
    stop, done = np.full(len(marks), NULL), np.zeros(len(marks), np.bool_)
    left = slices.stops_by_number(begins, track, time, stop, done)
    assert left == (~done).sum()
    return stop.tolist()


def by_nesting(marks):
    begins, track, time = columns(marks)
    stop = np.full(len(marks), NULL)
    order = np.argsort(track, kind="stable")
    slices.stops_by_nesting(begins, track, time, order, stop)
    return stop.tolist()


def nested(marks):
    """Each end closes the last open slice of its track."""
    open_, stop = {}, [NULL] * len(marks)
    for row, (begins, track, time) in enumerate(marks):
        stack = open_.setdefault(track, [])
        if begins:
            stack.append(row)
        elif stack:
            begin = stack.pop()
            stop[begin] = max(time, marks[begin][2])
    return stop


MARKS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 9)), max_size=30)


@given(MARKS)
def test_an_end_closes_the_innermost_slice_of_its_track(marks):
    assert by_nesting(marks) == nested(marks)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(0, 99))))
def test_a_group_out_of_order_is_paired_by_number(spans):
    """Of an outer slice and others, all begins come first, and ends in the order of begins."""
    spans = sorted(((9, 0, 1000), *spans), key=lambda span: span[1])
    marks = [(True, track, start) for track, start, _ in spans]
    marks += [(False, track, start + length) for track, start, length in spans]
    expected = [start + length for _, start, length in spans]
    assert by_number(marks) == [*expected, *[NULL] * len(spans)]


B, E = True, False


@pytest.mark.parametrize(
    ("marks", "stops"),
    [
        ([], []),
        ([(B, 1, 0), (E, 1, 5), (B, 1, 7), (E, 1, 7)], [5, NULL, 7, NULL]),
        # In the order of time, an end closes the innermost slice.
        ([(B, 1, 0), (B, 1, 1), (E, 1, 5), (E, 1, 9)], [NULL] * 4),
        # Out of order, the n-th end is that of the n-th begin.
        ([(B, 1, 0), (B, 1, 1), (E, 1, 9), (E, 1, 5)], [9, 5, NULL, NULL]),
        ([(B, 1, 0), (B, 1, 6), (E, 1, 5), (E, 1, 9)], [5, 9, NULL, NULL]),
        ([(B, 1, 5), (B, 1, 1), (E, 1, 9), (E, 1, 9)], [9, 9, NULL, NULL]),
        # Other tracks, other numbers, ends before their begins.
        ([(B, 1, 0), (B, 2, 1), (E, 2, 5), (E, 1, 4)], [NULL] * 4),
        ([(B, 1, 0), (E, 1, 5), (E, 1, 6)], [NULL] * 3),
        ([(E, 1, 5), (B, 1, 6)], [NULL] * 2),
        ([(B, 1, 6), (E, 1, 5)], [NULL] * 2),
    ],
)
def test_runs_of_begins_and_ends_are_paired_by_number_where_that_is_sure(marks, stops):
    assert by_number(marks) == stops


@given(MARKS)
def test_times_of_each_track_are_in_order_if_none_goes_back(marks):
    _, track, time = columns(marks)
    order = np.argsort(track, kind="stable")
    by_track = [[each[2] for each in marks if each[1] == number] for number in range(3)]
    is_sorted = all(times == sorted(times) for times in by_track)
    assert slices.is_in_order(track, time, order) == is_sorted
