"""Test that messages are matched between equal steps of ranks, or not at all."""

import pytest
from builders import kineto_text as k
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
