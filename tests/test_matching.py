"""Which collective is which: by number, by order, and after events were lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.trace.matching import NONE, UNKNOWN, Calls, match
from fastcomm_kernels import alignment

CODES = st.sampled_from([(0, 100), (0, 200), (1, 100), (2, UNKNOWN)])


def calls(rows):
    """Rows (rank, group, op, size, seq, stop)."""
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    rank, group, op, size, seq, stop = columns
    return Calls(rank=rank, group=group, op=op, size=size, seq=seq, stop=stop)


def partners(rows, instance):
    """The sets of rows that are one collective."""
    found = {}
    for row, number in zip(rows, instance, strict=True):
        if number != NONE:
            found.setdefault(number, set()).add(row)
    return sorted(map(sorted, found.values()))


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
        ahead = draw(st.integers(-(10**12), 10**12))
        most = max(0, min(8, (length - 8) // 2))
        lost = draw(st.sets(st.integers(0, length - 1), max_size=most))
        for number in sorted(set(range(length)) - lost):
            late = int(numbers.integers(0, 20_001))  # ends agree to 20 us
            op, size = codes[number]
            seen.append(((rank, 7, op, size, UNKNOWN, at[number] + ahead + late), number))
    return seen


@given(lossy())
def test_a_rank_that_lost_events_is_matched_in_all_that_it_has(seen):
    rows = [row for row, _ in seen]
    found = match(calls(rows))
    true = {}
    for row, number in seen:
        true.setdefault(number, set()).add(row)
    wanted = sorted(sorted(each) for each in true.values() if len(each) > 1)
    assert partners(rows, found.instance) == wanted
    assert (found.count, found.dropped) == (len(wanted), 0)


@given(lossy(), st.randoms())
def test_numbers_tell_where_every_event_has_one(seen, random):
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


def test_a_number_that_one_rank_has_twice_tells_nothing_of_the_group():
    rows = [(0, 7, 0, 1, 5, 10), (0, 7, 0, 2, 5, 20), (1, 7, 0, 1, 1, 10), (1, 7, 0, 2, 2, 20)]
    assert partners(rows, match(calls(rows)).instance) == [
        [rows[0], rows[2]],
        [rows[1], rows[3]],
    ]


def test_a_rank_that_cannot_be_brought_in_line_is_dropped_whole():
    rows = [(0, 7, 0, 1, UNKNOWN, 10 * k**3) for k in range(1, 400)]
    rows += [(1, 7, 0, 1, UNKNOWN, 10 * k**3) for k in range(1, 200)]
    rows += [(2, 7, 1, 1, UNKNOWN, 10 * k**3) for k in range(1, 400)]
    found = match(calls(rows))
    assert (found.count, found.dropped) == (0, 199 + 399)
    assert set(found.instance.tolist()) == {NONE}


def test_nothing_is_matched_in_nothing():
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


@given(ITEMS, ITEMS, st.integers(0, 20))
def test_alignment_is_the_best_there_is(a, b, apart):
    columns = [
        np.array([item[k] for item in side], np.int64) for side in (a, b) for k in (0, 1)
    ]
    found = alignment.align(*columns, np.int64(8), np.int64(apart))
    pairs = [(int(i), j) for j, i in enumerate(found) if i >= 0]
    assert [i for i, _ in pairs] == sorted({i for i, _ in pairs})
    assert all(a[i][0] == b[j][0] and abs(a[i][1] - b[j][1]) <= apart for i, j in pairs)
    assert score(a, b, pairs, apart) == best_score(a, b, apart)


@pytest.mark.parametrize("lost", [3, 5])
def test_alignment_goes_no_farther_than_it_is_told(lost):
    a = np.arange(10, dtype=np.int64)
    b = np.delete(a, range(2, 2 + lost))
    b = np.append(b, np.arange(90, 90 + lost))  # as many that a has not
    found = alignment.align(a, a, b, b, np.int64(4), np.int64(0))
    assert (found == np.where(b < 10, b, NONE)).all() == (lost <= 4)
