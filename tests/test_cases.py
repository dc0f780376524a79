"""Files that are easily read wrongly: each is read truly, or refused with the reason."""

import pytest
from builders import cases


def params():
    """Every check; without the cases, one that is skipped."""
    checks = [*cases.checks()]
    for case, number in checks:
        yield pytest.param(case, number, id=f"{case}-{number}")
    if not checks:
        yield pytest.param("", 0, id="absent", marks=cases.needed)


@pytest.mark.parametrize(("case", "number"), [*params()])
def test_a_file_that_is_easily_read_wrongly_is_read_truly_or_refused(case, number, tmp_path):
    assert cases.problems(case, number, tmp_path / "tables") == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("a.b[1].c", 2),
        ("rows[op=Send].n", 5),
        ("rows[op=None].n", None),
        ("rows[7].n", None),
        ("missing.c", None),
        ("tags.*.n", 3),
        ("empty.*.n", None),
    ],
)
def test_a_path_of_a_check_names_a_value(path, value):
    data = {
        "a": {"b": [{}, {"c": 2}]},
        "rows": [{"op": "Recv", "n": 4}, {"op": "Send", "n": 5}],
        "tags": {"x": {"n": 1}, "y": {"n": None}, "z": {"n": 2}},
        "empty": {"x": {"n": None}},
    }
    assert cases.value_at(data, path) == value


@pytest.mark.parametrize(
    ("value", "wanted", "is_met"),
    [
        (0.505, 0.5, True),
        (0.52, 0.5, False),
        (10_050_000, 10_000_000, True),
        (None, None, True),
        (0, None, False),
        (None, 0, False),
        (None, {"near": 0, "within": 5, "or_null": True}, True),
        (None, {"near": 0, "within": 5}, False),
        (6, {"near": 0, "within": 5}, False),
        (0.7, {"min": 0.5, "max": 0.7}, True),
        ([[1, 2]], [[1, 2]], True),
        ([[1, 3]], [[1, 2]], False),
        ([1], [], False),
        (True, 1, False),
        ("x", "y", False),
    ],
)
def test_a_value_of_a_check_is_met_within_the_tolerance(value, wanted, is_met):
    assert cases.fits(value, wanted, 0.01) is is_met
