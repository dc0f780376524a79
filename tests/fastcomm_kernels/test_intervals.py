import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import intervals as oracles

from fastcomm_kernels import intervals

ORIGINS = st.sampled_from([0, 1_753_000_000_000_000_000])
SETS = st.lists(st.tuples(st.integers(-20, 60), st.integers(-1, 12)), max_size=16).map(
    lambda pairs: sorted((start, start + length) for start, length in pairs)
)
CLASSES = st.lists(SETS, min_size=1, max_size=8)
SEGMENTS = st.lists(st.integers(-25, 70), max_size=8).map(
    lambda cuts: list(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False))
)


def columns(pairs, origin=0):
    """Read-only, as the columns of a file are."""
    table = np.array(pairs, np.int64).reshape(-1, 2).T + origin
    start, stop = (np.ascontiguousarray(column) for column in table)
    start.flags.writeable = stop.flags.writeable = False
    return start, stop


def rows(*table):
    return list(zip(*(column.tolist() for column in table), strict=True))


def as_counts(matrix):
    return [{mask: int(row[mask]) for mask in np.flatnonzero(row)} for row in matrix]


def step_function(classes, since=-30):
    parts = [intervals.steps(*columns(c), 1 << i, since, since) for i, c in enumerate(classes)]
    while len(parts) > 1:
        parts.append(intervals.join(*parts.pop(0), *parts.pop(0)))
    return parts[0]


@given(SETS, ORIGINS)
def test_merge_gives_the_maximal_runs_of_covered_points(pairs, origin):
    start, stop = intervals.merge(*columns(pairs, origin))
    assert rows(start - origin, stop - origin) == oracles.merged(pairs)


@given(SETS, ORIGINS)
def test_union_length_counts_the_covered_points(pairs, origin):
    assert intervals.union_length(*columns(pairs, origin)) == len(oracles.points(pairs))


@given(SETS, SETS, ORIGINS)
def test_overlap_length_counts_the_points_of_both(a, b, origin):
    merged = *intervals.merge(*columns(a, origin)), *intervals.merge(*columns(b, origin))
    both = oracles.points(a) & oracles.points(b)
    assert intervals.overlap_length(*merged) == len(both)


@given(SETS, st.integers(-25, 65), st.integers(-25, 65))
def test_boundaries_mark_when_a_class_is_active(pairs, since, held):
    time, mask = intervals.steps(*columns(pairs), 4, since, held)
    active = {t for t in oracles.points([*pairs, (since, held)]) if t >= since}
    stops = [stop for start, stop in pairs if start < stop]
    assert time[0] == since
    assert time[-1] == max([since, held, *stops])
    assert sum(mask[:-1].astype(int) * np.diff(time)) == 4 * len(active)
    assert all(mask[np.searchsorted(time, t, "right") - 1] == 4 for t in active)


@given(CLASSES)
def test_join_marks_the_active_classes(classes):
    time, mask = step_function(classes)
    assert np.all(np.diff(time) >= 0)
    found = [mask[np.searchsorted(time, t, "right") - 1] for t in range(-30, 75)]
    assert found == [oracles.mask_at(t, classes) for t in range(-30, 75)]


@given(CLASSES, SEGMENTS)
def test_coverage_counts_the_points_of_each_set_of_classes(classes, segments):
    found = intervals.coverage(*step_function(classes), *columns(segments))
    assert as_counts(found) == oracles.coverage(classes, segments)


def test_coverage_finds_nothing_active_before_the_first_step():
    found = intervals.coverage(
        *step_function([[(0, 5)]], since=0), *columns([(-10, -5), (-2, 3)])
    )
    assert as_counts(found) == [{0: 5}, {0: 2, 1: 3}]


@given(CLASSES, SEGMENTS, ORIGINS, st.integers(1, 6))
def test_coverage_by_class_does_not_depend_on_the_number_of_blocks(
    classes, segments, origin, block
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_BLOCK", block)
        found = intervals.coverage_by_class(
            [columns(pairs, origin) for pairs in classes], *columns(segments, origin)
        )
    assert as_counts(found) == oracles.coverage(classes, segments)


@given(CLASSES, SEGMENTS)
def test_each_row_of_coverage_sums_to_the_length_of_its_segment(classes, segments):
    start, stop = columns(segments)
    found = intervals.coverage_by_class([columns(pairs) for pairs in classes], start, stop)
    assert found.sum(axis=1).tolist() == (stop - start).tolist()


def test_coverage_agrees_with_union_and_overlap_on_a_large_set():
    random = np.random.default_rng(0)
    sets = []
    for length in 30, 90:
        start = np.sort(random.integers(0, 100_000, 4_000))
        sets.append((start, start + random.integers(0, length, 4_000)))
    both = [intervals.merge(*columns) for columns in sets]
    whole = np.array([0]), np.array([200_000])
    row = intervals.coverage_by_class(sets, *whole)[0]
    assert row[1] + row[3] == intervals.union_length(*sets[0])
    assert row[2] + row[3] == intervals.union_length(*sets[1])
    assert row[3] == intervals.overlap_length(*both[0], *both[1])
