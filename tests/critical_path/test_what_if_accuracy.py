"""Test that what-ifs predict the step of a job that is generated with the change."""

import pytest

from docs import what_if_accuracy as accuracy
from fastcomm.graph.edits import parse_edits, validation

DEPTH = 4
CHECKED = ("TP x 0.25", "compute x 1.5", "links at 200 Gbit/s", "no straggler", "no slow link")


def test_predicted_steps_of_a_deep_pipeline_are_within_2_percent_and_on_the_page():
    changes = tuple(change for change in accuracy.CHANGES if change.name in CHECKED)
    assert len(changes) == len(CHECKED)
    page = accuracy.PAGE.read_text("utf-8")
    errors = validation()
    for change, cell in zip(
        changes, accuracy.cells(accuracy.job_of(DEPTH), changes), strict=True
    ):
        assert abs(cell.error) <= accuracy.BAR == 0.02
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {change.name} |"))
        assert row.endswith(f"| {cell} |")
        (edit,) = parse_edits(change.options(accuracy.job_of(DEPTH))).edits
        assert abs(cell.error) <= errors[edit.kind]


def test_waits_that_do_not_show_are_part_of_a_what_if():
    """The weight gradients cover all-to-alls, which determine the step once they are slower."""
    (change,) = (change for change in accuracy.CHANGES if change.name == "EP x 2")
    (cell,) = accuracy.cells(accuracy.job_of(1), (change,))
    assert cell.error == pytest.approx(0, abs=0.005)
