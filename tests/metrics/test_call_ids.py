"""Test that ids of calls confirm matches across ranks, refuse them, or stand for numbers."""

import pytest
from builders import kineto_text as k
from builders.opened import open_run

from fastcomm.metrics.computation import compute_metrics

CALLS = 6
GROUP = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1], "pg_size": 2}


@pytest.fixture
def matching(tmp_path):
    """Return a function that matches two ranks, by sequence number and id of a rank's call."""

    def match(told):
        for rank in range(2):
            events = [k.mark(f"ProfilerStep#{step}", 1000 * step, 1000) for step in range(2)]
            for call in range(CALLS):
                args = {
                    "Process_Group_Name": "0",
                    "Process_Group_Description": "default_pg",
                    "Process_Group_Ranks": "[0, 1]",
                    "Group_size": 2,
                    **told(rank, call),
                }
                events.append(k.kernel("gemm", 100 + 300 * call, 50))
                events.append(k.all_reduce(200 + 300 * call + 5 * rank, 60 - 5 * rank, **args))
            k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2, groups=[GROUP])
        return compute_metrics(open_run(tmp_path)).across.matching

    return match


def test_equal_ids_confirm(matching):
    found = matching(lambda _, call: {"Seq": call, "Comms_Id": 2**63 + call})
    assert (found.share, found.note) == (1.0, None)


def test_a_call_with_another_id_is_refused(matching):
    found = matching(lambda rank, call: {"Seq": call, "Comms_Id": call + (rank * call == 2)})
    assert found.matched == 2 * (CALLS - 1)
    assert "1 collective not matched across ranks" in found.note
    assert "`Comms Id` of members differ" in found.note


def test_ids_of_other_builds_are_a_note(matching):
    found = matching(lambda rank, call: {"Seq": call, "Comms_Id": 100 * rank + call})
    assert found.share == 1.0
    assert f"{CALLS} collectives matched by sequence number have another" in found.note


def test_ids_stand_for_numbers(matching):
    found = matching(lambda _, call: {"Comms_Id": 7 * call})
    assert (found.share, found.by["group and sequence number"]) == (1.0, 2 * CALLS)
