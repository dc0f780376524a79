"""Test statistics of rows by key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import metrics as oracle

from fastcomm.trace.columns import Groups, percentile

ROWS = st.lists(st.tuples(st.integers(-2, 3), st.integers(-(2**40), 2**40), st.booleans()))


@given(ROWS, st.sampled_from([0, 50, 95, 99, 100]))
def test_statistics_of_a_key_use_only_its_rows(rows, percent):
    key, value, chosen = np.array(rows, np.int64).reshape(-1, 3).T
    chosen = chosen.astype(bool)
    groups = Groups.of(key).only(chosen)
    assert groups.keys.tolist() == sorted(set(key.tolist()))
    for place, each in enumerate(groups.keys):
        own = value[(key == each) & chosen]
        assert groups.counts[place] == len(own)
        assert groups.sums(value)[place] == sum(own.tolist())
        total = groups.totals(value.astype(float))[place]
        found = groups.percentiles(value, percent)[place]
        if len(own):
            assert total == sum(own.astype(float).tolist())
            assert found == pytest.approx(np.percentile(own, percent), rel=1e-12)
        else:
            assert total == 0
            assert np.isnan(found)


def test_a_single_row_is_its_sum_and_all_percentiles():
    groups = Groups.of(np.array([7]))
    assert groups.totals(np.array([3.0])) == groups.percentiles(np.array([3.0]), 95) == [3.0]


@given(
    st.lists(st.integers(-(2**60), 2**60), min_size=1), st.sampled_from([0, 50, 95, 99, 100])
)
def test_a_percentile_of_whole_numbers_is_exact(values, percent):
    assert percentile(np.array(values), percent) == oracle.percentile(values, percent)


def test_a_percentile_of_zero_between_other_numbers_is_zero():
    assert percentile(np.array([-57, 3]), 95) == 0
