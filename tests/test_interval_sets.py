"""Test the public interval sets against the points that they cover."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import intervals as oracles

import fastcomm
from fastcomm import FastcommError, intervals

# Some are empty, and some stop before they start.
SETS = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 25)), max_size=12)


def columns(pairs):
    return [start for start, _ in pairs], [stop for _, stop in pairs]


def covered(result):
    """The points of a merged set, which has to be one."""
    start, stop = result
    assert start.dtype == stop.dtype == np.int64
    assert (start < stop).all()
    assert (stop[:-1] < start[1:]).all()
    return oracles.points(zip(start.tolist(), stop.tolist(), strict=True))


@given(SETS, SETS, SETS)
def test_union_covers_the_points_of_any_set(a, b, c):
    points = oracles.points(a) | oracles.points(b) | oracles.points(c)
    assert covered(intervals.union(columns(a), columns(b), columns(c))) == points
    assert covered(intervals.union(columns(a))) == oracles.points(a)


@given(SETS, SETS)
def test_intersection_and_difference_partition_a_set(a, b):
    own, other = oracles.points(a), oracles.points(b)
    assert covered(intervals.intersection(columns(a), columns(b))) == own & other
    assert covered(intervals.difference(columns(a), columns(b))) == own - other


@given(SETS)
def test_length_counts_the_covered_points(pairs):
    assert intervals.length(columns(pairs)) == len(oracles.points(pairs))


def test_the_module_is_an_attribute_of_the_package_and_takes_no_sets():
    assert fastcomm.intervals is intervals
    assert [column.tolist() for column in intervals.union()] == [[], []]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([1], [2, 3]), "shape"),
        ((1, 2), "shape"),
        (([1.5], [2.5]), "float64"),
        (([-(2**62), 0], [2**62, 2**63 - 1]), "span"),
    ],
)
def test_invalid_sets_are_refused(pair, message):
    with pytest.raises(FastcommError, match=message):
        intervals.length(pair)
