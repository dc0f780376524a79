"""Test matching of messages by order and by number, also with lost events."""

import random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import matching as oracle

from fastcomm.ranks import arrivals
from fastcomm.ranks.matching import Messages, Sides, match_messages
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NONE, NULL

ROUTES = st.sampled_from([(0, 1), (1, 0), (0, 2), (2, 1)])


@st.composite
def sides(draw, *, lossy=True, seqs=None):
    """The sides of messages on some routes of two groups; one side of a route may lack some.

    `seqs` is how they are numbered: by "message", or by what a "rank" has done so far.
    """
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = []
    routes = draw(st.sets(st.tuples(st.sampled_from([7, 8]), ROUTES), min_size=1, max_size=4))
    for group, (sender, receiver) in sorted(routes):
        length = draw(st.integers(1, 40))
        at = np.cumsum(numbers.integers(3_000_000, 40_000_000, length)).tolist()
        size = draw(
            st.lists(st.sampled_from([64, 128, None]), min_size=length, max_size=length)
        )
        lost = (
            draw(st.sets(st.integers(0, length - 1), max_size=length // 2)) if lossy else set()
        )
        loser = draw(st.booleans())
        for is_send, rank, peer in ((True, sender, receiver), (False, receiver, sender)):
            for number in sorted(set(range(length)) - (lost if loser is is_send else set())):
                late = int(numbers.integers(0, 300_001))
                said = {"stop": at[number] + late, "size": size[number], "true": number}
                said |= {"seq": number if seqs == "message" else None, "peer": peer}
                found.append(SimpleNamespace(rank=rank, group=group, is_send=is_send, **said))
    if seqs == "rank":
        for k, side in enumerate(sorted(found, key=lambda side: side.stop)):
            side.seq = k
    return found


def messages_of(found):
    """The sides as columns."""

    def column(name):
        values = [getattr(side, name) for side in found]
        return np.array([NULL if v is None else v for v in values], np.int64)

    is_send = np.array([side.is_send for side in found], np.bool_)
    names = ("rank", "peer", "group", "seq", "size", "stop")
    unknown = np.full(len(found), NULL)
    return Messages(is_send=is_send, step=unknown, **{name: column(name) for name in names})


def check(found, order):
    """What is matched is what is one."""
    order.shuffle(found)
    columns = messages_of(found)
    matches = match_messages(columns)
    sender, receiver = matches.pairs(columns.is_send)
    wanted = oracle.messages(found)
    pairs = {(id(found[s]), id(found[r])) for s, r in zip(sender, receiver, strict=True)}
    assert pairs == {(id(sent), id(received)) for sent, received in wanted}
    assert matches.count == len(wanted)
    paired = {id(side) for pair in wanted for side in pair}
    ranks = {side.rank for side in found}
    lacking = [id(side) not in paired and side.peer in ranks for side in found]
    assert matches.unmatched(columns).tolist() == lacking


@pytest.mark.parametrize("seqs", [None, "message", "rank"])
def test_a_lost_message_shifts_no_other(seqs):
    @given(sides(seqs=seqs), st.randoms())
    def judged(found, order):
        check(found, order)

    judged()


@given(sides(lossy=False), st.randoms(), st.integers(0, 2**32), st.booleans())
def test_complete_sequences_are_matched_by_position(found, order, seed, by_size):
    late, last = np.random.default_rng(seed), {}
    for side in sorted(found, key=lambda side: side.stop):
        if not side.is_send:
            route = side.group, side.peer, side.rank
            side.stop += int(late.integers(0, 10**9))
            side.stop = last[route] = max(side.stop, last.get(route, 0) + 1)
        side.size = side.size if by_size else 100 + side.is_send
    check(found, order)


@given(sides(seqs="message"), st.sets(st.integers(0, 39), max_size=4), st.randoms())
def test_numbers_match_messages_if_both_sides_lack_some(found, lost, order):
    first = found[0]
    route = {first.rank, first.peer}
    left = [
        side
        for side in found
        if {side.rank, side.peer} != route or side.is_send or side.true not in lost
    ]
    # Of very few that both have nobody would believe the numbers.
    if all(2 * len(of_both) > 1.5 * len(each) for each, of_both in routes(left)):
        check(left, order)


def routes(found):
    """The sides of each route that have the fewer, and its messages."""
    of = {}
    for side in found:
        key = side.group, *((side.rank, side.peer)[:: 1 if side.is_send else -1])
        of.setdefault(key, ([], []))[side.is_send].append(side)
    for both in of.values():
        yield min(both, key=len), oracle.messages([*both[0], *both[1]])


def test_simultaneous_messages_keep_their_order():
    found = [
        SimpleNamespace(rank=r, peer=1 - r, group=7, is_send=not r, seq=None, size=None, stop=9)
        for r in (0, 0, 1, 1)
    ]
    assert match_messages(messages_of(found)).instance.tolist() == [0, 1, 0, 1]


def test_unaligned_clocks_are_compared_by_messages():
    ends = np.cumsum(np.random.default_rng(0).integers(10**7, 4 * 10**7, 60)).tolist()
    sent = [(0, 1, True, end) for end in ends]
    received = [(1, 0, False, end + 5 * 10**9) for end in [*ends[:20], *ends[21:]]]
    found = [
        SimpleNamespace(rank=r, peer=p, is_send=s, group=7, seq=None, size=None, stop=end)
        for r, p, s, end in (*sent, *received)
    ]
    instance = match_messages(messages_of(found)).instance
    assert instance[20] == NONE
    assert np.delete(instance[:60], 20).tolist() == instance[60:].tolist()


def route(sent, received):
    """The sides of one route: pairs of what a message is, and when its side ends."""
    return [
        SimpleNamespace(
            rank=rank,
            peer=1 - rank,
            is_send=not rank,
            group=7,
            size=None,
            true=true,
            stop=stop,
            seq=None,
        )
        for rank, side in enumerate((sent, received))
        for true, stop in side
    ]


ENDS = list(
    enumerate(np.cumsum(np.random.default_rng(1).integers(10**7, 4 * 10**7, 40)).tolist())
)


def test_equal_counts_with_disagreeing_ends_are_not_matched_by_order():
    check(route(ENDS[1:], ENDS[:-1]), random.Random(0))


def test_a_late_message_is_matched_between_its_neighbors():
    late = [(true, stop + 9 * 10**6 * (true == 20)) for true, stop in ENDS]
    check(route(ENDS, late[:3] + late[4:]), random.Random(0))


def test_a_side_that_lacks_most_messages_is_not_matched():
    many = [(k, 10**6 * k) for k in range(200)]
    found = route(many, many[::22])
    assert match_messages(messages_of(found)).count == 0


def test_a_side_that_was_recorded_for_a_shorter_time_is_matched_there():
    many = [(k, 10**6 * k) for k in range(200)]
    for part in (many[:9], many[90:120]):
        check(route(many, part), random.Random(0))


def test_numbers_shared_with_other_messages_are_ignored():
    found = route(ENDS, [(true, stop + 2 * 10**6) for true, stop in ENDS])
    for side in found:
        # The receiver has a message from somebody else after each three of these.
        side.seq = side.true + (0 if side.is_send else side.true // 3)
    check(found, random.Random(0))


FEW = st.sampled_from([0, 1, None])


@given(
    st.lists(
        st.tuples(
            *(st.integers(0, 2), st.integers(0, 3), st.booleans(), st.integers(0, 1)),
            *(FEW, FEW, st.integers(0, 5_000_000)),
        ),
        max_size=40,
    )
)
def test_a_message_always_has_two_sides_of_one_route(said):
    names = ("rank", "peer", "is_send", "group", "seq", "size", "stop")
    found = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in said]
    columns = messages_of(found)
    matches = match_messages(columns)
    assert sorted(matches.instance[matches.instance != NONE].tolist()) == sorted(
        [*range(matches.count)] * 2
    )
    for s, r in zip(*matches.pairs(columns.is_send), strict=True):
        sent, received = found[s], found[r]
        assert (sent.is_send, received.is_send) == (True, False)
        assert (sent.rank, sent.peer) == (received.peer, received.rank)
        assert sent.group == received.group


def test_empty_input_has_no_matches():
    found = match_messages(messages_of([]))
    assert (found.count, len(found.instance)) == (0, 0)


def test_an_event_is_a_row_for_each_of_its_messages():
    lists = pa.list_(pa.int32())
    found = Sides.of(
        pa.array([[1, 2], None, [], [0]], lists), pa.array([[3], None, [5], []], lists)
    )
    assert found.event.tolist() == [0, 0, 0, 2, 3]
    assert found.peer.tolist() == [1, 2, 3, 5, 0]
    assert found.is_send.tolist() == [True, True, False, False, True]
    assert found.is_only.tolist() == [False, False, False, True, True]


def test_the_transfer_of_a_message_ends_with_its_receive():
    """A send on the host ends when the sender waits for it, long after the message is there."""
    columns = {
        "op": [OP["SendRecv"]] * 2,
        "rank": [0, 1],
        "partner": [1, 0],
        "sends": [True, False],
        "start": [10, 30],
        "stop": [900, 55],
    }
    columns = {name: np.array(values) for name, values in columns.items()}
    events = SimpleNamespace(**columns)
    pair = arrivals.Participants(np.arange(2), np.zeros(2, np.int64), 1)
    matched = arrivals.MatchedEvents.of(events, pair, np.zeros(2, np.int64))
    assert matched.transfer.tolist() == [55 - 30]
    assert matched.wait.tolist() == [20, 0]
