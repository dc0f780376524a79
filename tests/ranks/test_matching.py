"""Test matching of collectives by number and by order, also with lost events."""

from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import matching as oracle

from fastcomm.ranks.matching import CollectiveCalls, match
from fastcomm.ranks.sequences import Items, Repeats, align_by_order
from fastcomm.trace import schema
from fastcomm.trace.schema import OP, OPS
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NONE, NULL

CODES = st.sampled_from([(0, 100), (0, 200), (1, 100), (2, NULL)])


def calls(rows):
    """Rows (rank, group, op, size, seq, stop)."""
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    rank, group, op, size, seq, stop = columns
    return CollectiveCalls(
        rank=rank,
        group=group,
        op=op,
        size=size,
        seq=seq,
        stop=stop,
        step=np.full_like(rank, NULL),
    )


def partners(rows, instance):
    """The sets of rows that are one collective."""
    found = {}
    for row, number in zip(rows, instance, strict=True):
        if number != NONE:
            found.setdefault(number, set()).add(row)
    return sorted(map(sorted, found.values()))


def clock(draw, length, rank):
    """How far a clock is ahead, and how far ends are apart at most, in ns.

    Few collectives match neither on clocks a little apart, nor where ends agree loosely: the
    clocks of any two ranks are less than a millisecond apart, or many times their recordings.
    """
    if length >= 24:
        return draw(st.integers(-(10**12), 10**12)), 20_000
    far = draw(st.sampled_from([-1, 0, 1])) * (rank + 1) * 10**11
    return far + draw(st.integers(-450_000, 450_000)), 8_000


@st.composite
def lossy(draw):
    """What ranks saw of one sequence of collectives: (row, true number) each."""
    length, ranks = draw(st.integers(1, 60)), draw(st.integers(2, 4))
    codes = draw(st.lists(CODES, min_size=length, max_size=length))
    # Gaps as irregular as those of a step: of equal ones nobody could tell which one lacks.
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    at = np.cumsum(numbers.integers(300_000, 40_000_000, length)).tolist()
    seen = []
    for rank in range(ranks):
        ahead, apart = clock(draw, length, rank)
        most = max(0, min(8, (length - 8) // 2))
        lost = draw(st.sets(st.integers(0, length - 1), max_size=most))
        for number in sorted(set(range(length)) - lost):
            late = int(numbers.integers(0, apart + 1))
            op, size = codes[number]
            seen.append(((rank, 7, op, size, NULL, at[number] + ahead + late), number))
    return seen


@given(lossy())
def test_remaining_events_of_a_rank_with_losses_are_matched(seen):
    rows = [row for row, _ in seen]
    found = match(calls(rows))
    true = {}
    for row, number in seen:
        true.setdefault(number, set()).add(row)
    wanted = sorted(sorted(each) for each in true.values() if len(each) > 1)
    assert partners(rows, found.instance) == wanted
    assert (found.count, found.dropped) == (len(wanted), 0)


@given(lossy(), st.randoms())
def test_events_are_matched_by_number_if_all_have_one(seen, random):
    rows = [
        (rank, group, op, 0, number, stop) for (rank, group, op, _, _, stop), number in seen
    ]
    random.shuffle(rows)
    found = match(calls(rows))
    by_number = {}
    for row in rows:
        by_number.setdefault(row[4], set()).add(row)
    wanted = sorted(sorted(each) for each in by_number.values() if len(each) > 1)
    assert partners(rows, found.instance) == wanted


def test_a_number_of_another_operation_or_group_is_another_collective():
    rows = [(0, 7, 0, 1, 5, 10), (1, 7, 1, 1, 5, 10), (2, 8, 0, 1, 5, 10), (3, 7, 0, 1, 5, 10)]
    assert partners(rows, match(calls(rows)).instance) == [[rows[0], rows[3]]]


def test_duplicate_sequence_numbers_disable_matching_by_number():
    rows = [(0, 7, 0, 1, 5, 10), (0, 7, 0, 2, 5, 20), (1, 7, 0, 1, 1, 10), (1, 7, 0, 2, 2, 20)]
    assert partners(rows, match(calls(rows)).instance) == [
        [rows[0], rows[2]],
        [rows[1], rows[3]],
    ]


def test_a_rank_that_cannot_be_aligned_is_dropped():
    rows = [(0, 7, 0, 1, NULL, 10 * k**3) for k in range(1, 400)]
    rows += [(1, 7, 0, 1, NULL, 10 * k**3) for k in range(1, 400) if k % 3 == 0]
    rows += [(2, 7, 1, 1, NULL, 10 * k**3) for k in range(1, 400)]
    found = match(calls(rows))
    assert (found.count, found.dropped) == (0, 133 + 399)
    assert set(found.instance.tolist()) == {NONE}


def test_a_rank_that_was_recorded_shorter_is_matched_where_ends_agree():
    ends = [10 * k**3 for k in range(1, 400)]
    part = ends[100:300]
    rows = [(rank, 7, 0, 1, NULL, stop + rank * 10**12) for rank in (0, 1) for stop in ends]
    found = match(calls([row for row in rows if row[0] == 0 or row[5] - 10**12 in part]))
    assert (found.count, found.dropped) == (len(part), 0)


ROOTED = ("Broadcast", "Reduce", "Gather", "Scatter")
ENDS_TOGETHER = tuple(OPS[op] for op in schema.ENDS_TOGETHER)


@st.composite
def mixed(draw, *, whole=False, numbered=False):
    """What a group did, some of it with a root, as its ranks saw it; rank 0 saw all."""
    length, ranks = draw(st.integers(1, 40)), draw(st.integers(2, 3))
    ops = draw(
        st.lists(st.sampled_from(ENDS_TOGETHER + ROOTED), min_size=length, max_size=length)
    )
    roots = [draw(st.integers(0, ranks - 1)) if op in ROOTED else None for op in ops]
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    # So far apart that those with a root are nearer to themselves than to their neighbors.
    at = np.cumsum(numbers.integers(3_000_000, 40_000_000, length)).tolist()
    events = []
    for rank in range(ranks):
        # Of clocks that nothing sets all that is known is that they should agree.
        is_aligned = set(ops[:9]) & set(ENDS_TOGETHER)
        ahead, apart = clock(draw, sum(op in ENDS_TOGETHER for op in ops), rank)
        ahead *= bool(is_aligned)
        lost = set() if whole or not rank else _lost(draw, ops)
        for number in sorted(set(range(length)) - lost):
            rooted = ops[number] in ROOTED
            late = int(numbers.integers(0, 500_001 if rooted else apart + 1))
            said = {"op": ops[number], "root": roots[number], "true": number}
            seq = number if numbered else None
            stop = at[number] + ahead + late
            size = draw(st.sampled_from([64, None])) if numbered else 64
            said |= {"seq": seq, "size": size, "stop": stop}
            events.append(SimpleNamespace(rank=rank, group=7, **said))
    return events


def _lost(draw, ops):
    """Some of each series, but at most a fourth: of a few nobody could tell which one lacks."""
    lost = set()
    for series in (ENDS_TOGETHER, *((op,) for op in ROOTED)):
        places = [k for k, op in enumerate(ops) if op in series and k > 8]
        if places:
            lost |= draw(st.sets(st.sampled_from(places), max_size=len(places) // 4))
    return lost


def calls_of(events):
    """The events as columns."""

    def column(name):
        values = [getattr(event, name) for event in events]
        return np.array([NULL if v is None else v for v in values], np.int64)

    op = np.array([OP[event.op] for event in events], np.int64)
    names = ("rank", "group", "seq", "size", "stop", "root")
    unknown = np.full_like(op, NULL)
    return CollectiveCalls(op=op, step=unknown, **{name: column(name) for name in names})


def identities(sets):
    """Sets of events, to be compared."""
    return sorted(sorted(map(id, each)) for each in sets)


def found_sets(events, instance):
    found = {}
    for event, number in zip(events, instance.tolist(), strict=True):
        if number != NONE:
            found.setdefault(number, []).append(event)
    return found.values()


def check(events):
    """What is matched is what is one."""
    found = match(calls_of(events))
    wanted, refused = oracle.collectives(events)
    assert identities(found_sets(events, found.instance)) == identities(wanted)
    assert found.count == len(wanted)
    assert len(set(found.refused.tolist()) - {NONE}) == refused
    assert found.dropped == 0


@given(mixed(), st.randoms())
def test_operations_with_a_root_are_matched_where_some_are_lost(events, random):
    random.shuffle(events)
    check(events)


@given(mixed(numbered=True), st.randoms())
def test_operations_with_a_root_are_matched_by_number_wherever_they_end(events, random):
    for event in events:
        event.stop += random.randrange(10**12)
    check(events)


@given(mixed(whole=True), st.integers(0, 2**32))
def test_a_root_may_finish_long_before_the_others(events, seed):
    late, last = np.random.default_rng(seed), {}
    for event in sorted(events, key=lambda event: event.stop):
        if event.op in ROOTED and event.rank != event.root:
            event.stop += int(late.integers(0, 200_000_000))
            series = event.rank, event.op
            event.stop = last[series] = max(event.stop, last.get(series, -(10**15)) + 1)
    check(oracle.in_place(events))


@pytest.mark.parametrize(
    ("ends", "places"),
    [
        pytest.param(
            [
                (20.6, 42.6, 115.9, 323.1, 337.2, 382.5),
                (181.6, 181.7, 208.0, 295.1, 431.8, 545.9),
                (110.8, 110.9, 116.8, 358.3, 380.9, 454.3),
            ],
            [range(6), range(6), range(6)],
            id="complete",
        ),
        pytest.param(
            [
                (34.3, 65.8, 88.5, 109.7, 144.3, 166.9, 197.1, 229.3, 251.0),
                (65.66, 109.39, 144.13, 166.69, 197.32, 229.34, 250.95),
            ],
            [range(9), (1, 3, 4, 5, 6, 7, 8)],
            id="lost",
        ),
    ],
)
def test_three_ends_that_agree_elsewhere_are_chance(ends, places):
    """Each has three in a row that are within 1 ms of three others, so many ms later."""
    stop = (np.concatenate(ends) * 1e6).astype(np.int64)
    same, unknown = np.zeros(len(stop), np.int64), np.full(len(stop), NULL)
    first = np.cumsum([0, *map(len, ends[:-1])])
    place, missing = align_by_order(Items(same, stop, unknown), first)
    assert place.tolist() == [number for rank in places for number in rank]
    assert missing == 0


def test_ends_that_agree_in_one_burst_are_chance():
    """Any three that end at once agree with any others that do."""
    ends = [0, 50, 100, 150, 300, 300, 300], [80, 80, 80, 160, 260, 400, 500]
    stop = (np.concatenate(ends) * 1_000_000).astype(np.int64)
    items = Items(np.zeros(14, np.int64), stop, np.full(14, NULL))
    place, missing = align_by_order(items, np.array([0, 7]))
    assert (place.tolist(), missing) == ([*range(7)] * 2, 0)


def test_without_agreeing_ends_events_are_matched_by_order_if_steps_are_equal():
    numbers = np.random.default_rng(2)
    ends = np.cumsum(numbers.integers(10_000_000, 20_000_000, (3, 50)), axis=1)
    rows = [
        (rank, 7, place % 2, 100, NULL, end)
        for rank in range(3)
        for place, end in enumerate(ends[rank].tolist())
    ]
    unknown = match(calls(rows))
    assert (unknown.count, unknown.dropped) == (0, 100)
    numbered = replace(calls(rows), step=np.tile(np.arange(50) // 10, 3))
    assert match(numbered).instance.tolist() == list(range(50)) * 3


@pytest.mark.parametrize(("times", "is_only"), [(2, False), (20, True)])
def test_the_ends_of_few_repetitions_agree_by_chance(times, is_only):
    period, number = 10_000_000, np.arange(4 * times)
    late = np.random.default_rng(0).integers(0, 2_000_000, len(number))
    items = Items(number % 4, 2_500_000 * number + late, np.full_like(number, NULL))
    assert Repeats(items).exclude(0, 10 * period) == is_only
    assert Repeats(items).exclude(0, period // 8)  # clocks agree


@pytest.mark.parametrize("seed", range(12))
def test_equal_clocks_decide_where_gaps_repeat_themselves(seed):
    """Four gaps repeat, three operations do; one rank has 10 to 30, the other one 1 to 18."""
    numbers = np.random.default_rng(seed)
    gaps = (1_000_000 * (numbers.exponential(1, 4) + 0.05)).astype(np.int64)
    ends = np.cumsum(np.tile(gaps, 8))
    recorded = [range(10, 31), range(1, 19)]
    rows = [
        (rank, 7, call % 3, 100, NULL, int(ends[call] + numbers.integers(0, 3000)))
        for rank, own in enumerate(recorded)
        for call in own
    ]
    places = [call for own in recorded for call in own]
    assert all(len(own) == 1 for own in partners(places, match(calls(rows)).instance))


@pytest.mark.parametrize("marks", [2, 1, 0])
@pytest.mark.parametrize("count", [2, 5, 100])
def test_clocks_are_compared_however_far_they_are_apart(count, marks):
    """Products of such differences do not fit into 64 bits."""
    numbers = np.random.default_rng(0)
    ends = np.cumsum(numbers.integers(500_000, 1_500_000, count)).tolist()
    step = np.append(np.arange(count), np.where(marks > 1, np.arange(count), NULL))

    def matched(ahead):
        rows = [(rank, 7, 0, 100, NULL, end + ahead[rank]) for rank in range(2) for end in ends]
        matches = match(replace(calls(rows), step=step if marks else np.full_like(step, NULL)))
        return matches.count, matches.dropped, matches.instance.tolist()

    some = matched((0, 10**15))
    for apart in (17 * 10**17, 9 * 10**18):
        assert matched((0, apart)) == some
        assert matched((apart, 0)) == some


@pytest.mark.parametrize("seed", range(4))
def test_missing_events_hide_no_place_on_clocks_that_are_far_apart(seed):
    numbers = np.random.default_rng(seed)
    ends = np.cumsum(numbers.integers(200_000, 3_000_000, 400))
    rows = [
        (rank, 7, place % 3, 100, NULL, int(end + jitter) + 10**9 * rank)
        for rank in range(8)
        for place, (end, jitter) in enumerate(
            zip(ends, numbers.integers(0, 20_000, len(ends)), strict=True)
        )
    ]
    lost = set(numbers.choice(len(rows), 12, replace=False).tolist())
    result = match(calls([row for n, row in enumerate(rows) if n not in lost]))
    places = [n % 400 for n in range(len(rows)) if n not in lost]
    assert result.dropped == 0
    assert len(set(zip(places, result.instance.tolist(), strict=True))) == 400


@given(mixed(numbered=True), st.sampled_from(oracle.WORDS), st.randoms())
def test_contradictory_members_are_not_matched(events, name, random):
    for event in random.sample(events, min(3, len(events))):
        if event.op in ROOTED or name == "size":
            setattr(event, name, 5)
    check(events)


def test_rows_of_refused_collectives_are_reported():
    rows = [
        SimpleNamespace(rank=r, group=7, op="Broadcast", seq=n, size=None, stop=n, root=root)
        for r, n, root in ((0, 1, 0), (1, 1, 1), (0, 2, 0), (1, 2, 0))
    ]
    found = match(calls_of(rows))
    assert found.refused.tolist() == [0, 0, NONE, NONE]
    assert found.instance.tolist() == [NONE, NONE, 0, 0]


def test_messages_without_numbers_do_not_affect_collectives():
    rows = [
        SimpleNamespace(rank=r, group=7, op=op, seq=seq, size=None, stop=stop, root=None)
        for r, op, seq, stop in (
            *((0, "AllReduce", 1, 0), (0, "AllReduce", 2, 50), (0, "SendRecv", None, 99)),
            *((1, "AllReduce", 2, 10**9), (1, "SendRecv", None, 99)),
        )
    ]
    assert match(calls_of(rows)).instance.tolist() == [NONE, 0, 1, 0, 1]


def test_sizes_unknown_to_one_rank_are_ignored():
    sizes = [64, 32, 64, None, None, None]
    rows = [
        SimpleNamespace(
            rank=k // 3, group=7, op="AllReduce", seq=None, size=size, stop=k % 3, root=None
        )
        for k, size in enumerate(sizes)
    ]
    assert match(calls_of(rows)).instance.tolist() == [0, 1, 2, 0, 1, 2]


FEW = st.sampled_from([0, 1, NULL])


@given(
    st.lists(
        st.tuples(
            *(st.integers(0, 2), st.integers(0, 1), st.sampled_from(sorted(OP))),
            *(FEW, FEW, FEW, st.integers(0, 3_000_000)),
        ),
        max_size=40,
    )
)
def test_a_collective_never_has_two_events_of_one_rank(said):
    names = ("rank", "group", "op", "seq", "size", "root", "stop")
    events = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in said]
    found = match(calls_of(events))
    members = found_sets(events, found.instance)
    assert len(members) == found.count
    for each in members:
        assert len({(event.group, event.op) for event in each}) == 1
        assert len({event.rank for event in each}) == len(each) > 1
        for name in oracle.WORDS:
            assert len({getattr(event, name) for event in each} - {NULL}) <= 1
    assert not set(np.flatnonzero(found.instance != NONE)) & set(
        np.flatnonzero(found.refused != NONE)
    )


def test_empty_input_has_no_matches():
    found = match(calls([]))
    assert (found.count, found.dropped, len(found.instance)) == (0, 0, 0)


# -- the kernel


def score(a, b, pairs, apart):
    """What the kernel makes as large as it can."""
    return sum(2 * apart + 1 - abs(a[i][1] - b[j][1]) for i, j in pairs)


def best_score(a, b, apart):
    """The same by trying everything."""
    if not a or not b:
        return 0
    found = max(best_score(a[:-1], b, apart), best_score(a, b[:-1], apart))
    gap = abs(a[-1][1] - b[-1][1])
    if a[-1][0] == b[-1][0] and gap <= apart:
        found = max(found, best_score(a[:-1], b[:-1], apart) + 2 * apart + 1 - gap)
    return found


ITEMS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=6)


def assert_optimal(align, a, b, apart):
    columns = [
        np.array([item[k] for item in side], np.int64) for side in (a, b) for k in (0, 1)
    ]
    matched = align(*columns, np.int64(8), np.int64(apart))
    pairs = [(int(i), j) for j, i in enumerate(matched) if i != NONE]
    assert [i for i, _ in pairs] == sorted({i for i, _ in pairs})
    assert all(a[i][0] == b[j][0] and abs(a[i][1] - b[j][1]) <= apart for i, j in pairs)
    assert score(a, b, pairs, apart) == best_score(a, b, apart)


@given(ITEMS, ITEMS, st.integers(0, 20))
def test_alignment_is_optimal(a, b, apart):
    assert_optimal(matching.align, a, b, apart)


@given(ITEMS, ITEMS, st.integers(0, 6))
def test_alignment_in_pieces_is_optimal(a, b, apart):
    a, b = (sorted(side, key=itemgetter(1)) for side in (a, b))
    assert_optimal(matching.align_pieces, a, b, apart)


@pytest.mark.parametrize("lost", [3, 5])
def test_alignment_respects_its_maximum_shift(lost):
    a = np.arange(10, dtype=np.int64)
    b = np.delete(a, range(2, 2 + lost))
    b = np.append(b, np.arange(90, 90 + lost))  # as many that a has not
    found = matching.align(a, a, b, b, np.int64(4), np.int64(0))
    assert (found == np.where(b < 10, b, NONE)).all() == (lost <= 4)


def with_ids(rows, ids):
    return replace(calls(rows), call_id=np.array(ids, np.int64))


@given(lossy(), st.integers(0, 2**62), st.randoms())
def test_calls_without_numbers_are_matched_by_their_ids(seen, factor, random):
    random.shuffle(seen)
    rows = [row for row, _ in seen]
    ids = [hash((factor, number)) for _, number in seen]
    true = {}
    for row, number in seen:
        true.setdefault(number, set()).add(row)
    wanted = sorted(sorted(each) for each in true.values() if len(each) > 1)
    # An operation and a number are one collective; the same id never is of two operations.
    found = match(with_ids(rows, ids))
    assert partners(rows, found.instance) == wanted
    assert (found.dropped, found.unlike) == (0, 0)


THRICE = [(rank, 7, 0, 1, number, 10 * number) for rank in range(3) for number in range(4)]


def test_a_collective_whose_ids_differ_is_refused_if_others_have_one_id():
    ids = [number + 50 for _, _, _, _, number, _ in THRICE]
    ids[6] = 99  # rank 1's call 2
    found = match(with_ids(THRICE, ids))
    assert [row[4] for row in THRICE if found.instance[THRICE.index(row)] == NONE] == [2] * 3
    assert (found.count, found.unlike) == (3, 0)
    assert np.flatnonzero(found.refused != NONE).tolist() == [2, 6, 10]
    # An unknown id contradicts none.
    ids[6] = NULL
    assert match(with_ids(THRICE, ids)).count == 4


def test_ids_that_never_agree_tell_nothing_but_that():
    """Ranks of different builds, or groups with a name on each rank."""
    ids = [100 * rank + number for rank, _, _, _, number, _ in THRICE]
    found = match(with_ids(THRICE, ids))
    assert found.instance.tolist() == [0, 1, 2, 3] * 3
    assert found.unlike == 4


def test_ids_of_messages_are_not_compared():
    columns = {
        "rank": [0, 1, 0, 1],
        "group": [7] * 4,
        "op": [OP["SendRecv"]] * 2 + [OP["AllReduce"]] * 2,
        "seq": [1, 1, 2, 2],
        "payload": [NULL] * 4,
        "stop": [10, 10, 20, 20],
        "step": [NULL] * 4,
        "root": [NULL] * 4,
        "call_id": [5, 6, 8, 8],
    }
    columns = {name: np.array(values, np.int64) for name, values in columns.items()}
    own = CollectiveCalls.of(columns, np.arange(4))
    assert own.call_id.tolist() == [NULL, NULL, 8, 8]
    assert match(own).instance.tolist() == [0, 0, 1, 1]
