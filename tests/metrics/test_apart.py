"""Test that collectives are not compared whose members do not run at the same time."""

import pytest
from builders.across_events import ONE, TWO, ask, table
from builders.shared_data import shared
from hypothesis import given
from hypothesis import strategies as st

import fastcomm

JITTER = 20_000  # ns, that clocks may be wrong by
TIMES = st.tuples(st.integers(0, 90_000), st.integers(0, 60_000))


def events(group, times, op="AllReduce", first=0, **more):
    """A collective per row of `times`, which has start and duration of each member."""
    return [
        {
            "group": group,
            "group_size": len(row),
            "seq": number,
            "tag": "DP",
            "op": op,
            "alone_ns": 0,
            "exposed_ns": 0,
            "bytes": 8,
            "bus_bytes": 8,
            "rank": rank,
            "start_ns": start,
            "duration_ns": lasts,
            **more,
        }
        for number, row in enumerate(times, first)
        for rank, (start, lasts) in enumerate(row)
    ]


def are_apart(row):
    return max(start for start, _ in row) - min(start + lasts for start, lasts in row) > JITTER


@given(
    st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=14),
    st.lists(st.tuples(TIMES, TIMES), max_size=14),
)
def test_what_is_left_out_is_that_of_the_definition(threes, pairs):
    """Members that are apart; and of groups with more than a tenth of such, all."""
    found, _ = ask([0, 1, 2], table([*events(TWO, threes), *events(ONE, pairs)]), "none")
    left = 0
    for rows in (threes, pairs):
        bad = sum(map(are_apart, rows))
        left += len(rows) if 10 * bad > len(rows) else bad
    assert found.matching.apart == left
    assert found.matching.collectives == len(threes) + len(pairs)
    assert sum(skew.count for skew in found.skew) == len(threes) + len(pairs) - left


AT_ONCE = ((0, 50_000), (20_000, 30_000), (10_000, 40_000))
ONE_AFTER_ANOTHER = ((0, 10_000), (40_000, 10_000), (80_000, 10_000))


def test_one_collective_in_many_is_left_out_alone():
    rows = [AT_ONCE] * 19 + [ONE_AFTER_ANOTHER]
    found, _ = ask([0, 1, 2], table(events(TWO, rows)), "none")
    (skew,) = found.skew
    assert (found.matching.apart, skew.count, skew.transfer_mean_ns) == (1, 19, 30_000)


def test_members_of_operations_with_a_root_may_run_one_after_another():
    rows = events(TWO, [ONE_AFTER_ANOTHER] * 4, op="Broadcast", partner=0)
    found, _ = ask([0, 1, 2], table(rows), "none")
    assert (found.matching.apart, found.skew[0].count) == (0, 4)


@pytest.mark.parametrize(("late", "apart"), [(True, 0), (False, 5)])
def test_a_message_may_arrive_long_after_it_was_sent_but_not_before(late, apart):
    starts = (0, 90_000) if late else (90_000, 0)
    rows = events(ONE, [[(start, 10_000) for start in starts]] * 5, "SendRecv")
    rows = [
        row | {"partner": 1 - row["rank"], "sends": row["rank"] == 0, "step": None}
        for row in rows
    ]
    found, _ = ask([0, 1], table(rows), "none")
    assert (found.matching.messages, found.matching.apart) == (5, apart)


def test_kernels_that_do_not_wait_for_each_other_have_no_waits():
    """Of PyTorch's second profiler, with a stand-in for NCCL: members run one by one."""
    run = fastcomm.open(shared("formats_2026/cuspy_plain/json"))
    found = run.metrics().to_dict()
    matching = found["matching"]
    assert matching["apart"] == matching["collectives"] + matching["messages"] == 15
    assert (found["skew"], found["waits"]) == ([], [])
    assert any("members end before others start" in text for text in found["warnings"])
