"""Test that what-ifs predict the step of a job that is generated with the change."""

import pytest

from docs import what_if_accuracy as accuracy
from fastcomm.graph.edits import parse_edits, validation

# Changes by number of stages; the time of a test grows with both.
CHECKED = {
    2: ("TP x 0.25", "compute x 1.5", "links at 200 Gbit/s"),
    4: ("no straggler", "no slow link"),
}


@pytest.mark.parametrize("depth", CHECKED)
def test_predicted_steps_of_a_pipeline_are_within_2_percent_and_on_the_page(depth):
    checked, column = CHECKED[depth], accuracy.DEPTHS.index(depth) + 1
    changes = tuple(change for change in accuracy.CHANGES if change.name in checked)
    assert len(changes) == len(checked)
    page = accuracy.PAGE.read_text("utf-8")
    errors = validation()
    for change, cell in zip(
        changes, accuracy.cells(accuracy.job_of(depth), changes), strict=True
    ):
        assert abs(cell.error) <= accuracy.BAR == 0.02
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {change.name} |"))
        assert row.split(" | ")[column].strip(" |") == str(cell)
        (edit,) = parse_edits(change.options(accuracy.job_of(depth))).edits
        assert abs(cell.error) <= errors[edit.kind]


def test_waits_that_do_not_show_are_part_of_a_what_if():
    """The weight gradients cover all-to-alls, which determine the step once they are slower."""
    (change,) = (change for change in accuracy.CHANGES if change.name == "EP x 2")
    (cell,) = accuracy.cells(accuracy.job_of(1), (change,))
    assert cell.error == pytest.approx(0, abs=0.005)
