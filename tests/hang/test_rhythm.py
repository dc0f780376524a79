"""Test the rhythm of calls: the longest repetition, and where a rank leaves it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.repetition import repeats

from fastcomm.hang.rhythm import contexts, left_at
from fastcomm_kernels.repetitions import longest_repetition


@given(st.lists(st.integers(0, 2), max_size=18), st.integers(0, 3))
def test_the_longest_repetition_is_that_of_the_definition(token, shortest):
    got = longest_repetition(np.array(token, np.int64), shortest)
    assert tuple(map(int, got)) == repeats(token, shortest)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ([1, 2, 3, 4] * 4, None),
        ([1, 2, 3, 4] * 4 + [9], (16, 12)),
        ([1, 2, 3, 4] * 4 + [1, 2, 4, 1], (18, 14)),  # the third is left out
        ([1, 2, 3], None),
        ([], None),
    ],
)
def test_a_rhythm_is_left_where_a_call_differs_from_that_a_period_before(token, expected):
    assert left_at(np.array(token, np.int64)) == expected


def test_contexts_are_equal_for_equal_calls_in_a_row():
    context = contexts(np.array([1, 2, 3, 1, 2, 3, 2, 3]), 2).tolist()
    assert context[1] == context[4]
    assert context[2] == context[5] == context[7]
    assert len({*context}) == 5
