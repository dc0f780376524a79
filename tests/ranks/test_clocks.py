"""Test that clock offsets are recovered from collectives, and unknown without any."""

import numpy as np
import pyarrow as pa
import pytest
from builders import kineto_text as k
from hypothesis import given
from hypothesis import strategies as st
from oracles.clocks import least_spread, pair_offsets

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.formats.kineto.host_groups import Recording, on_one_clock
from fastcomm.ranks.clocks import (
    ENDS,
    ClockOffset,
    EndOffsets,
    clock_offsets,
    ends,
    matched_end_offsets,
    offset_by_row,
    offsets,
    offsets_with_limits,
)
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

GROUPS = [(0, 1), (1, 2), (0, 2, 3), (4, 5), (6,)]


def table(rows):
    """Rows (rank, (group, op, iteration, place), stop) as the ends of collectives."""
    columns = list(zip(*((r, g, o, i, p, t) for r, (g, o, i, p), t in rows), strict=True))
    columns = [list(c) for c in columns] or [[]] * 6
    return pa.table([*columns, pa.nulls(len(rows))], ENDS.names).cast(ENDS)


@st.composite
def jobs(draw, jitter):
    """Offsets of the clocks, and the ends of collectives on them."""
    offsets = draw(st.lists(st.integers(-(10**15), 10**15), min_size=7, max_size=7))
    rows = []
    for group, ranks in enumerate(GROUPS):
        for place in range(draw(st.integers(0, 6))):
            at = draw(st.integers(0, 10**18))
            for rank in ranks:
                late = draw(st.integers(0, jitter))
                rows.append(
                    (rank, (group, place % 3, place % 2, place), at + late + offsets[rank])
                )
    return offsets, draw(st.permutations(rows))


@given(jobs(jitter=5_000))
def test_offsets_are_recovered_within_the_jitter(job):
    offsets, rows = job
    for found in clock_offsets(table(rows)):
        true = offsets[found.rank] - offsets[found.reference]
        # A way to the reference is at most two pairs long, and each errs by the jitter.
        assert abs(found.offset_ns - true) <= 2 * 5_000


@given(jobs(jitter=0))
def test_offsets_are_exact_where_ends_coincide(job):
    offsets, rows = job
    for found in clock_offsets(table(rows)):
        assert found.offset_ns == offsets[found.rank] - offsets[found.reference]
        assert found.spread_ns == 0


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_a_sample_of_many_matches_is_used(count, seed):
    numbers, ahead = np.random.default_rng(seed), {0: 0, 1: 10**9, 2: -7}
    instance, rank = np.repeat(np.arange(count), 3), np.tile(np.arange(3), count)
    stop = numbers.integers(0, 10**12, count)[instance] + offset_by_row(rank, ahead)
    rows = numbers.permutation(len(rank))
    found = offsets(
        matched_end_offsets(rank[rows], instance[rows] % 2, instance[rows], stop[rows])
    )
    assert {each.rank: each.offset_ns for each in found} == ahead
    per_group = [-(-count // 2), count // 2]
    used = sum(-(-size // -(-size // 32)) for size in per_group if size)
    assert {each.matches for each in found} == {used}
    assert used <= 2 * 32


@st.composite
def host_jobs(draw):
    """Offsets of clocks, and collectives whose members end when they get to it."""
    ahead = draw(st.lists(st.integers(-(10**9), 10**9), min_size=3, max_size=3))
    begin = draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=6))
    delays = st.tuples(st.integers(0, 10**7), st.integers(0, 10**7))
    rows = []
    for number, at in enumerate(begin):
        late = draw(st.lists(delays, min_size=3, max_size=3))
        last = at + max(arrival for arrival, _ in late)
        for rank, (arrival, more) in enumerate(late):
            start, stop = at + arrival + ahead[rank], last + more + ahead[rank]
            rows.append((rank, number, start, stop))
    return ahead, rows


@given(host_jobs())
def test_offsets_of_host_runs_are_within_what_overlaps_permit(job):
    """No member of a collective ends before another starts: try all that is possible."""
    ahead, rows = job
    rank, number, start, stop = (np.array(column) for column in zip(*rows, strict=True))
    found = offsets(matched_end_offsets(rank, np.zeros(len(rank), int), number, stop, start))
    for each in found[1:]:
        own, low = (
            {n: (a, b) for r, n, a, b in rows if r == wanted}
            for wanted in (each.rank, each.reference)
        )
        least = max(own[n][0] - low[n][1] for n in own)
        most = min(own[n][1] - low[n][0] for n in own)
        true = ahead[each.rank] - ahead[each.reference]
        assert least <= true <= most
        assert each.offset_ns == (0 if least <= 0 <= most else (least + most) // 2)
        assert each.spread_ns == max(each.offset_ns - least, most - each.offset_ns)
        assert abs(each.offset_ns - true) <= each.spread_ns
        assert each.is_limited


@st.composite
def messages(draw):
    """Offsets of two clocks, and messages: sender, start of the send, end of the receive."""
    ahead = draw(st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=2))
    rows = []
    for _ in range(draw(st.integers(1, 8))):
        sender, at = draw(st.integers(0, 1)), draw(st.integers(0, 10**10))
        took = draw(st.integers(0, 10**7))
        rows.append((sender, at + ahead[sender], at + took + ahead[1 - sender]))
    return ahead, rows


@given(messages())
def test_messages_in_both_directions_limit_the_offset_and_others_tell_nothing(job):
    """A receive cannot end before its send starts: try all that is possible."""
    ahead, rows = job
    sender, start, stop = (np.array(column) for column in zip(*rows, strict=True))
    found = offsets(EndOffsets.of_messages(sender, start, 1 - sender, stop))
    most = [end - begin for rank, begin, end in rows if rank == 0]
    least = [begin - end for rank, begin, end in rows if rank == 1]
    if not (most and least):
        assert found == ()
        return
    low, high = max(least), min(most)
    _, own = found
    assert low <= ahead[1] - ahead[0] <= high
    assert own.offset_ns == (0 if low <= 0 <= high else (low + high) // 2)
    assert own.spread_ns == max(own.offset_ns - low, high - own.offset_ns)
    assert own.matches == len(rows)


def test_messages_that_contradict_one_another_tell_nothing():
    sender, start, stop = np.array([0, 1]), np.array([100, 100]), np.array([50, 50])
    assert offsets(EndOffsets.of_messages(sender, start, 1 - sender, stop)) == ()


def message_limits(ahead, routes):
    """Limits by a message of 1 us over each route, between clocks that are so far ahead."""
    sender, receiver = np.array(routes).T
    at = 10**9 * np.arange(len(routes))
    start, stop = at + np.take(ahead, sender), at + 1_000 + np.take(ahead, receiver)
    return EndOffsets.of_messages(sender, start, receiver, stop)


def test_messages_connect_clocks_that_no_collective_connects():
    ahead, sent_by = [0, 30_000, 10**9, 10**9 - 5, 7 * 10**9], {}
    rank, instance = np.array([0, 1, 0, 1, 2, 3]), np.array([0, 0, 1, 1, 2, 2])
    stop = 10**6 * instance + np.take(ahead, rank)
    by_ends = matched_end_offsets(rank, instance // 2, instance, stop)

    def limits(offset_of_rank):
        sent_by.update(offset_of_rank)
        return message_limits(ahead, [(1, 2), (2, 1), (0, 1), (1, 0), (3, 4)])

    found, unknown = offsets_with_limits(by_ends, (limits,), range(5))
    assert sent_by == {0: 0, 1: 30_000, 2: 0, 3: -5}, "clocks of either part"
    assert {each.rank: each.reference for each in found} == dict.fromkeys(range(4), 0)
    for each in found:
        assert abs(each.offset_ns - ahead[each.rank]) <= 1_000
    # A message in one direction limits no clock.
    assert [*zip(unknown.low, unknown.rank, strict=True)] == [(3, 4)]


def test_messages_are_not_read_where_collectives_connect_all_clocks():
    by_ends = matched_end_offsets(*np.array([[0, 1], [0, 0], [0, 0], [5, 8]]))
    found, unknown = offsets_with_limits(by_ends, (None,), [0, 1])
    assert [each.offset_ns for each in found] == [0, 3]
    assert len(unknown.low) == 0


def test_the_clock_of_a_rank_without_shared_collectives_is_unknown():
    assert offset_by_row(np.array([3, 4, 3]), {3: 5}).tolist() == [5, 0, 5]
    assert offsets(matched_end_offsets(*np.zeros((4, 0), np.int64))) == ()


@given(jobs(jitter=1_000_000))
def test_offsets_are_chained_along_the_path_with_the_least_spread(job):
    _, rows = job
    found = {each.rank: (each.reference, each.spread_ns) for each in clock_offsets(table(rows))}
    assert found == least_spread(rows)


@given(jobs(jitter=1_000_000))
def test_the_offset_of_a_pair_is_the_median_over_its_collectives(job):
    _, rows = job
    rows = [row for row in rows if row[1][0] == 0]
    found = {each.rank: each for each in clock_offsets(table(rows))}
    wanted = pair_offsets(rows)
    assert len(found) == 2 * len(wanted)
    for (low, high), (offset, spread, matches) in wanted.items():
        assert found[high] == ClockOffset(
            rank=high, reference=low, offset_ns=offset, spread_ns=spread, matches=matches
        )


def test_offsets_of_unconnected_ranks_are_unknown():
    rows = [(rank, (1, 0, 0, 0), 0) for rank in (0, 1)] + [(7, (2, 0, 0, 0), 0)]
    assert [each.rank for each in clock_offsets(table(rows))] == [0, 1]
    assert clock_offsets(table([])) == ()


@pytest.mark.parametrize(
    ("offset", "spread", "matches", "applies"),
    [
        (10**9, 1_000, 5, True),
        (-(10**9), 1_000, 5, True),
        (10**9, 10**8, 5, False),  # not far above the spread
        (10**9, 1_000, 2, False),  # too few to have a spread
        (50_000, 0, 50, False),  # ends of one collective differ by as much
    ],
)
def test_an_offset_applies_only_far_above_its_spread(offset, spread, matches, applies):
    found = ClockOffset(
        rank=1, reference=0, offset_ns=offset, spread_ns=spread, matches=matches
    )
    assert found.applies is applies


def test_ranks_of_a_synthetic_job_have_equal_clocks(tmp_path):
    traces = [
        reader.read(path, TraceOptions()) for path in write(Job.of(ranks=4, steps=2), tmp_path)
    ]
    found = clock_offsets(pa.concat_tables([ends(trace) for trace in traces]))
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert max(abs(each.offset_ns) for each in found) < 100_000
    assert not any(each.applies for each in found)


def test_a_clock_that_is_ahead_is_found_with_its_evidence(tmp_path):
    traces = []
    for rank, ahead in enumerate((0, 5_000_000)):  # microseconds
        events = [k.mark("ProfilerStep#1", ahead, 1000)]
        events += [
            k.all_reduce(ahead + 10 + 100 * n, 20 + n % 2, Process_Group_Ranks="[0, 1]")
            for n in range(5)
        ]
        path = k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2)
        traces.append(reader.read(path, TraceOptions()))
    zero, one = clock_offsets(pa.concat_tables([ends(trace) for trace in traces]))
    assert (zero.offset_ns, zero.reference) == (0, 0)
    assert one.offset_ns == 5_000_000_000
    assert (one.matches, one.spread_ns, one.applies) == (5, 0, True)


def test_collectives_are_matched_by_their_sequence_number_where_there_is_one(tmp_path):
    tables = []
    for rank, first in enumerate((7, 8)):  # the second rank's trace begins one later
        events = [k.mark("ProfilerStep#1", 0, 1000)]
        events += [
            k.all_reduce(100 * n, 20, Process_Group_Ranks="[0, 1]", Seq=n)
            for n in range(first, first + 2)
        ]
        path = k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2)
        tables.append(ends(reader.read(path, TraceOptions())))
    assert tables[0]["place"].to_pylist() == [7, 8]
    assert tables[0]["iteration"].to_pylist() == [-1, -1]
    assert clock_offsets(pa.concat_tables(tables))[1].matches == 1


def test_broadcasts_and_groups_of_one_are_not_used_for_clocks(tmp_path):
    said = {"Process_Group_Ranks": "[0, 1]"}
    events = [
        k.mark("ProfilerStep#1", 0, 1000),
        k.all_reduce(10, 5, Collective_name="broadcast", **said),
        k.all_reduce(30, 5, Process_Group_Ranks="[0]"),
        k.all_reduce(50, 5, **said),
        k.all_reduce(2000, 5, **said),  # outside of the iteration
    ]
    path = k.write(tmp_path / "rank0.json", events, world=2)
    assert ends(reader.read(path, TraceOptions()))["stop"].to_pylist() == [55_000]


@pytest.mark.parametrize("size", [2, 5, 40])
def test_clocks_of_many_hosts_are_compared_along_their_groups(size):
    """Every two neighbors end an operation of their own together, in each of 20 steps."""
    ahead = {rank: (rank * 7919 % 101 - 50) * 10**9 for rank in range(size)}
    neighbors = {rank: {rank - 1, rank + 1} & set(range(size)) for rank in range(size)}
    recordings = {}
    for rank in range(size):
        ends = [(step, min(rank, other)) for step in range(20) for other in neighbors[rank]]
        step, code = np.array(ends, np.int64).T
        stop = 10**8 * step + 10**6 * code + ahead[rank]
        by_code = {value: np.sort(stop[code == value]) for value in set(code.tolist())}
        recordings[rank] = Recording(stop, code, code, by_code, step)
    placed = on_one_clock(recordings, neighbors)
    for rank, own in placed.items():
        assert (recordings[rank].stop - own.stop == ahead[rank] - ahead[0]).all()
    assert on_one_clock(placed, neighbors) is placed
