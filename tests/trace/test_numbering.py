"""Test numbering of rows that agree in every column."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.trace.columns import alike, first_seen

NULL = np.iinfo(np.int64).min
ROWS = st.lists(st.tuples(*[st.sampled_from([NULL, -1, 0, 7, 2**62])] * 3), max_size=30)


def columns(rows):
    return np.array(rows, np.int64).reshape(-1, 3).T


@given(ROWS)
def test_kinds_number_the_sorted_distinct_rows(rows):
    first, kind = alike(*columns(rows))
    different = sorted(set(rows))
    assert [rows[place] for place in first] == different
    assert [rows.index(row) for row in different] == first.tolist()
    assert kind.tolist() == [different.index(row) for row in rows]


@given(ROWS)
def test_kinds_can_be_numbered_in_the_order_of_the_rows(rows):
    first, kind = first_seen(*columns(rows))
    different = list(dict.fromkeys(rows))
    assert [rows[place] for place in first] == different
    assert [rows.index(row) for row in different] == first.tolist()
    assert kind.tolist() == [different.index(row) for row in rows]


def test_all_rows_may_be_of_different_kinds():
    rows = [(row % 400, row // 2 % 3, NULL) for row in range(1200)]
    first, kind = alike(*columns(rows))
    different = sorted(set(rows))
    assert [rows[place] for place in first] == different
    assert [different[number] for number in kind] == rows


def test_columns_of_several_types_are_compared_as_integers():
    first, kind = alike(
        np.array([True, False, True]), np.array([-1, 3, -1], np.int8), np.array([5, 5, 5])
    )
    assert first.tolist() == [1, 0]
    assert kind.tolist() == [1, 0, 1]
