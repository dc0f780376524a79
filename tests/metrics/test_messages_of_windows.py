"""Test that messages are matched between equal steps of ranks, or not at all."""

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.opened import open_run

from fastcomm.metrics.computation import compute_metrics

GROUP = {"pg_name": "3", "pg_desc": "pp", "ranks": [0, 1], "pg_size": 2}
WINDOWS = (range(10, 16), range(12, 18))
STEP, MESSAGES = 10_000, 8  # us, of a step


@pytest.mark.parametrize(("marks", "matched"), [(True, 64), (False, 0)])
def test_equal_steps_on_other_clocks_need_numbers(tmp_path, marks, matched):
    for rank, steps in enumerate(WINDOWS):
        partner = {"Src_Rank": 0} if rank else {"Dst_Rank": 1}
        events = []
        for step in steps:
            at = STEP * step + 7_000_000 * rank
            events += [k.mark(f"ProfilerStep#{step}", at, STEP)] * marks
            events += [
                k.all_reduce(
                    at + 1_000 * n + 300,
                    100,
                    Collective_name="recv" if rank else "send",
                    Group_size=2,
                    Process_Group_Name="3",
                    Process_Group_Ranks="[0, 1]",
                    **partner,
                )
                for n in range(MESSAGES)
            ]
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2, groups=[GROUP])
    found = compute_metrics(open_run(tmp_path)).across.matching
    assert (found.events, found.matched) == (96, matched)
    assert f"{96 - matched} sides of messages not matched with the other side" in found.note


def recorded(folder, windows):
    """Two ranks with two numbered sums in each step; rank 0 computes longer."""
    for rank, steps in enumerate(windows):
        events = []
        for step in steps:
            at = STEP * step
            events.append(k.mark(f"ProfilerStep#{step}", at, STEP))
            events.append(k.kernel("gemm", at + 100, 3_000 + 1_000 * (rank == 0)))
            for n in range(2):
                more = {"Process_Group_Name": "3", "Process_Group_Ranks": "[0, 1]"}
                start = at + 6_000 + 1_000 * n
                events.append(k.all_reduce(start, 500, Group_size=2, Seq=2 * step + n, **more))
        k.write(folder / f"rank{rank}.json", events, rank=rank, world=2, groups=[GROUP])
    return compute_metrics(open_run(folder))


def test_ranks_of_two_jobs_are_not_compared(tmp_path):
    metrics = recorded(tmp_path, (range(4), range(100, 104)))
    matching = metrics.across.matching
    assert (matching.events, matching.matched) == (16, 0)
    assert "16 events of 16 not matched across ranks" in matching.note
    assert "other steps or runs" in matching.note
    shown = " ".join(invoke("metrics", tmp_path).output.split())
    assert "16 events of 16 not matched" in shown
    assert "unequal times" not in shown


def test_a_part_in_common_is_compared_and_the_rest_is_told(tmp_path):
    matching = recorded(tmp_path, WINDOWS).across.matching
    assert (matching.events, matching.matched) == (24, 16)
    assert "8 events of 24 not matched across ranks" in matching.note


def test_equal_windows_need_no_note(tmp_path):
    matching = recorded(tmp_path, (range(4), range(4))).across.matching
    assert (matching.share, matching.note) == (1.0, None)
