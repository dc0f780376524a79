"""Rows that agree in every column."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.trace.alike import alike

NULL = np.iinfo(np.int64).min


@given(st.lists(st.tuples(*[st.sampled_from([NULL, -1, 0, 7, 2**62])] * 3), max_size=30))
def test_kinds_of_rows_are_those_of_the_sorted_different_rows(rows):
    first, kind = alike(*np.array(rows, np.int64).reshape(-1, 3).T)
    different = sorted(set(rows))
    assert [rows[place] for place in first] == different
    assert [rows.index(row) for row in different] == first.tolist()
    assert kind.tolist() == [different.index(row) for row in rows]
