"""Test that collectives are not compared whose members do not run at the same time."""

import pytest
from builders.across_events import ONE, TWO, table
from builders.shared_data import shared
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.metrics.matched_communication import Clocks, match_events
from fastcomm.ranks.arrivals import CommunicationEvents

JITTER = 20_000  # ns, that clocks may be wrong by
TIMES = st.tuples(st.integers(0, 90_000), st.integers(0, 60_000))


def events(group, times, op="AllReduce", first=0, **more):
    """A collective per row of `times`, which has start and duration of each member."""
    return [
        {
            "group": group,
            "group_size": len(row),
            "seq": number,
            "step": number,  # that numbers are right
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


def compare(rows):
    """Number of collectives and messages, number left out, and transfers of the others."""
    clocks = Clocks(offsets={}, is_aligned=True, unaligned=frozenset())
    matched, counts, _ = match_events(CommunicationEvents.of(table(rows)), clocks)
    return counts.collectives + counts.messages, counts.apart, matched.transfer.tolist()


def are_apart(row):
    return max(start for start, _ in row) - min(start + lasts for start, lasts in row) > JITTER


def transfer(row):
    ends = sorted(start + lasts for start, lasts in row)
    return ends[(len(row) - 1) // 2] - max(start for start, _ in row)


@given(
    st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=14),
    st.lists(st.tuples(TIMES, TIMES), max_size=14),
)
def test_what_is_left_out_is_that_of_the_definition(threes, pairs):
    """Members that are apart; and all of groups with many, or with a mean transfer below 0."""
    count, apart, transfers = compare([*events(TWO, threes), *events(ONE, pairs)])
    left = 0
    for rows in (threes, pairs):
        rest = [row for row in rows if not are_apart(row)]
        bad = len(rows) - len(rest)
        is_none = 10 * bad > len(rows) or sum(map(transfer, rest)) < 0
        left += len(rows) if is_none else bad
    assert (count, apart) == (len(threes) + len(pairs), left)
    assert len(transfers) == count - left


AT_ONCE = ((0, 50_000), (20_000, 30_000), (10_000, 40_000))
ONE_AFTER_ANOTHER = ((0, 10_000), (40_000, 10_000), (80_000, 10_000))


def test_one_collective_in_many_is_left_out_alone():
    rows = [AT_ONCE] * 19 + [ONE_AFTER_ANOTHER]
    assert compare(events(TWO, rows)) == (20, 1, [30_000] * 19)


ENDED_BEFORE = ((0, 10_000), (15_000, 5_000))


@pytest.mark.parametrize(("ended", "apart"), [(4, 0), (10, 20)])
def test_a_mean_transfer_is_never_below_0(ended, apart):
    """Each end is too early by less than clocks may be wrong."""
    at_once = ((0, 50_000), (47_000, 3_000))
    rows = [ENDED_BEFORE] * ended + [at_once] * (20 - ended)
    count, left, transfers = compare(events(ONE, rows))
    assert (count, left) == (20, apart)
    assert sum(transfers) >= 0


@pytest.mark.parametrize(
    ("op", "root", "apart"),
    [("Broadcast", 0, 0), ("Broadcast", 1, 4), ("Reduce", 2, 0), ("Reduce", 1, 4)],
)
def test_members_run_after_the_root_of_a_broadcast_and_before_that_of_a_reduction(
    op, root, apart
):
    rows = events(TWO, [ONE_AFTER_ANOTHER] * 4, op, partner=root)
    assert compare(rows)[:2] == (4, apart)


@pytest.mark.parametrize(("late", "apart"), [(True, 0), (False, 5)])
def test_a_message_may_arrive_long_after_it_was_sent_but_not_before(late, apart):
    starts = (0, 90_000) if late else (90_000, 0)
    rows = events(ONE, [[(start, 10_000) for start in starts]] * 5, "SendRecv")
    rows = [
        row | {"partner": 1 - row["rank"], "sends": row["rank"] == 0, "step": None}
        for row in rows
    ]
    assert compare(rows)[:2] == (5, apart)


def test_kernels_that_do_not_wait_for_each_other_have_no_waits():
    """Of PyTorch's second profiler, with a stand-in for NCCL: members run one by one."""
    run = fastcomm.open(shared("formats_2026/cuspy_plain/json"))
    found = run.metrics().to_dict()
    matching = found["matching"]
    assert matching["apart"] == matching["collectives"] + matching["messages"] == 15
    assert (found["skew"], found["waits"]) == ([], [])
    assert any("members end before others start" in text for text in found["warnings"])
