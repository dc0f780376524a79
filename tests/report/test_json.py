"""Test large results as JSON: round trips, and one row per line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm import result

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=5))
def test_json_round_trips(found):
    assert json.loads(result.text(found)) == found


def test_rows_of_tables_are_one_line_each():
    rows = [{"rank": rank, "heat": [1, [2, 3]]} for rank in range(3)]
    text = result.text({"rows": rows, "about": {"ranks": [0, 1, 2], "none": {}}, "a": 1})
    assert text.splitlines() == [
        "{",
        '  "rows": [',
        '    {"rank": 0, "heat": [1, [2, 3]]},',
        '    {"rank": 1, "heat": [1, [2, 3]]},',
        '    {"rank": 2, "heat": [1, [2, 3]]}',
        "  ],",
        '  "about": {',
        '    "ranks": [0, 1, 2],',
        '    "none": {}',
        "  },",
        '  "a": 1',
        "}",
    ]


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}, [{"a": float("nan")}]])
def test_numbers_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        result.text({"value": value})
