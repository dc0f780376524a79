"""Test that ambiguous collectives without process groups are not matched."""

from types import SimpleNamespace

import numpy as np
from builders.ungrouped_events import MS, US, cut_up, matched
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.metrics import ungrouped
from fastcomm.metrics.ungrouped import Doubt, ExpectedMembers, Ungrouped, find
from fastcomm.ranks.matching import Sample, Stream, places
from fastcomm.trace.run_traces import one_by_one


def regular(ranks=4, count=8, late=None, skew=MS):
    """Ranks with the same sequence; `late(rank, number)` is what an end is late by."""
    noise = np.random.default_rng(0)
    found = []
    for number in range(count):
        end = number * 10 * MS + int(noise.integers(0, 5 * MS))
        for rank in range(ranks):
            stop = end + (late(rank, number) if late else 0)
            start = end - 30 * US - int(noise.integers(0, skew)) if skew else end - 30 * US
            event = {"rank": rank, "group": 0, "op": "AllReduce", "true": number, "size": 64}
            found.append(SimpleNamespace(**event, start=start, stop=stop))
    return found


def why(events, **words):
    _, found = matched(events, **words)
    return [each.why for each in found.doubts], found.matched


def test_agreeing_streams_are_matched():
    assert why(regular()) == ([], 32)


def test_with_missing_ranks_nothing_is_matched():
    lossy = [e for e in regular() if (e.rank, e.true) != (2, 0)]
    assert why(lossy) == ([], 31)
    assert why(lossy, world_size=4) == ([], 31)
    for events in (regular(), lossy):
        _, found = matched(events, world_size=8)
        assert (found.matched, found.missing, found.doubts) == (0, 4, ())
    assert "4 ranks of the job are missing, and the ranks read" in ungrouped.note(found)
    _, found = matched(regular(), world_size=5)
    assert "1 rank of the job is missing" in ungrouped.note(found)


def test_a_step_that_is_shifted_is_not_matched():
    events = regular()
    for event in events:
        event.iteration = event.true // 4 + (event.rank == 1)
    assert why(events) == (["ends"], 0)


def test_windows_of_numbered_steps_are_compared_where_both_have_steps():
    """Rank 0 records steps 0 to 5, rank 1 steps 4 to 9: a third of each is common."""
    events = regular(ranks=2, count=40)
    for event in events:
        event.iteration = event.true // 4
    windows = [e for e in events if e.iteration in range(4 * e.rank, 4 * e.rank + 6)]
    assert why(windows) == ([], 16)
    for event in windows:
        event.iteration -= 4 * event.rank
    assert why(windows)[1] == 0


def test_ends_that_differ_are_not_matched():
    noise = np.random.default_rng(1)
    assert why(regular(late=lambda *_: int(noise.integers(0, 2 * MS))))[0] == ["ends"]


def test_ends_that_differ_as_much_as_starts_are_not_matched():
    noise = np.random.default_rng(1)
    events = regular(late=lambda *_: int(noise.integers(0, 90 * US)), skew=100 * US)
    for event in events:
        event.start -= MS
    assert why(events) == (["loose"], 0)


def test_a_collective_that_ends_before_another_rank_begins_is_not_matched():
    events = regular()
    events[5].start = events[5].stop
    events[5].stop += 80 * US
    events[5].start += 60 * US
    assert why(events) == (["impossible"], 0)


def test_groups_that_end_separately_are_not_matched():
    noise = np.random.default_rng(1)
    late = noise.integers(0, 60 * US, (2, 40))
    apart = regular(count=40, late=lambda rank, n: int(late[rank // 2, n]), skew=2 * MS)
    assert why(apart) == (["separate"], 0)


def test_a_stream_of_one_rank_leaves_a_doubt_on_all():
    events = regular()
    for event in regular(ranks=2):
        events.append(SimpleNamespace(**{**vars(event), "stream": 9}))
        event.stream = 9
    whys, count = why(events)
    assert (whys, count) == (["absent"], 0)


def test_a_stream_that_the_reference_rank_lacks_leaves_a_doubt_on_all():
    events = regular(count=4)
    one = next(event for event in events if event.rank == 3)
    one.stream = 9
    assert why(events) == (["absent"], 0)


def test_a_stream_of_few_collectives_does_not_affect_others():
    events = regular()
    for event in regular(count=2):
        event.stream = 9
        events.append(event)
    assert why(events) == (["few"], 32)
    _, found = matched(events)
    assert "32 of 40 collective events" in ungrouped.note(found)
    assert "fewer than 3 on stream 9" in ungrouped.note(found)


def test_a_doubt_on_all_comes_before_a_stream_of_few_collectives():
    events = regular()
    for stream, ranks, count in ((8, 4, 2), (9, 2, 8)):
        for event in regular(ranks=ranks, count=count):
            event.stream = stream
            events.append(event)
    assert why(events) == (["absent", "few"], 0)


def test_a_rank_without_collectives_leaves_a_doubt():
    parts = cut_up(regular(ranks=3))
    found = find(parts, ExpectedMembers(ranks=[0, 1, 2, 3], world_size=4), one_by_one)
    assert found.doubts == (Doubt("absent", ungrouped.NULL, 3),)
    assert "rank 3 has none" in ungrouped.note(found)


def test_one_rank_or_no_collective_has_no_matches():
    parts = cut_up(regular(ranks=1))
    found = find(parts, ExpectedMembers(ranks=[0], world_size=1), one_by_one)
    assert (found.events, found.matched, found.spans()) == (8, 0, [])
    assert ungrouped.note(found) is None
    assert find([], ExpectedMembers(ranks=[0, 1], world_size=2), one_by_one).events == 0


def test_many_doubts_are_counted():
    doubts = tuple(Doubt("few", stream) for stream in range(5))
    said = ungrouped.note(Ungrouped(events=9, reference=0, doubts=doubts))
    assert said.count("fewer than 3 on stream") == 2
    assert "likewise 3 more streams" in said


EVER = st.integers(-(2**62), 2**62)


LONG = st.integers(0, 2**40)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), EVER, LONG, st.integers(7, 8)),
        max_size=20,
    )
)
def test_any_times_give_a_result(rows):
    events = [
        SimpleNamespace(
            rank=rank,
            op="AllReduce",
            size=None,
            start=start,
            stop=start + length,
            stream=number,
        )
        for rank, start, length, number in rows
    ]
    _, found = matched(events)
    assert 0 <= found.matched <= len(events)
    assert ungrouped.note(found) is not None or len({e.rank for e in events}) < 2


def stream(rows):
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return Stream(*columns)


def test_a_reference_of_one_collective_is_too_few():
    one = stream([(0, 1, 0, 0, 10)])
    assert (places(one, one), one.tolerance_ns) == ("few", 20_000)


def test_a_rank_of_which_no_sampled_collective_is_there_is_too_few():
    unknown = np.iinfo(np.int64).min
    stop = np.array([[5, 9, 12], [unknown] * 3])
    assert Sample.of(stop, stop, stop[0]).refusal() == "few"
