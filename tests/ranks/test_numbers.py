"""Test sequence numbers that steps and clocks contradict."""

import numpy as np
import pytest

from fastcomm.ranks.matching import CollectiveCalls, match
from fastcomm_kernels.arrays import NONE, NULL

PER_STEP, STEP_NS = 10, 10_000_000


def calls(jitter, ahead, first, steps=(4, 6), known=True):
    """Calls of two ranks that recorded steps from these on, numbered from `first` on."""
    random = np.random.default_rng(7)
    length = STEP_NS + jitter * random.uniform(-1, 1, 20)
    begin = np.cumsum(length) - length
    ends = (begin[:, None] + length[:, None] * np.arange(PER_STEP) / PER_STEP).ravel()
    step = np.repeat(np.arange(20), PER_STEP)
    rows = [np.flatnonzero((step >= from_) & (step < from_ + 6)) for from_ in steps]
    count = len(rows[0])
    return np.concatenate(rows), CollectiveCalls(
        rank=np.repeat([0, 1], count),
        group=np.zeros(2 * count, np.int64),
        op=np.zeros(2 * count, np.int64),
        seq=np.concatenate([at + np.arange(count) for at in first]),
        size=np.full(2 * count, 4096),
        stop=np.concatenate([ends[rows[0]], ends[rows[1]] + ahead]).astype(np.int64),
        step=step[np.concatenate(rows)] if known else np.full(2 * count, NULL),
    )


def pairs(row, matches):
    members = {}
    for at, number in zip(row.tolist(), matches.instance.tolist(), strict=True):
        if number != NONE:
            members.setdefault(number, []).append(at)
    return list(members.values())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ahead", [0, 10**9])
def test_ends_disprove_numbers_that_count_from_the_start_of_a_recording(ahead, known):
    row, own = calls(100_000, ahead, first=(0, 0), known=known)
    found = pairs(row, match(own))
    assert all(one == other for one, other in found)
    assert len(found) == 4 * PER_STEP * (known or not ahead)


@pytest.mark.parametrize("first", [(0, 1), (1, 0), (0, 3)])
@pytest.mark.parametrize("ahead", [0, 10**9])
def test_ends_disprove_numbers_that_begin_elsewhere_on_a_rank(ahead, first):
    """Most members that equal numbers match are of one step."""
    row, own = calls(100_000, ahead, first=first, steps=(4, 4))
    found = pairs(row, match(own))
    assert all(one == other for one, other in found)
    assert len(found) == 6 * PER_STEP


def test_numbers_that_steps_and_clocks_contradict_match_nothing_without_jitter():
    _, own = calls(0, 0, first=(0, 0))
    matches = match(own)
    assert not matches.count
    assert matches.dropped == 6 * PER_STEP


@pytest.mark.parametrize("jitter", [0, 100_000])
@pytest.mark.parametrize("ahead", [0, 10**9])
@pytest.mark.parametrize("anew", [True, False])
def test_right_numbers_are_right_whatever_steps_say(jitter, ahead, anew):
    row, own = calls(jitter, ahead, first=(40, 60))
    if anew:  # each rank numbers its steps from 0 on
        steps = np.where(own.rank == 0, own.step - 4, own.step - 6)
        own = CollectiveCalls(**{n: getattr(own, n) for n in own.__slots__} | {"step": steps})
    found = [members for members in pairs(row, match(own)) if len(members) > 1]
    assert all(one == other for one, other in found)
    assert len(found) == 4 * PER_STEP


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("by", [1, -1, 2])
@pytest.mark.parametrize("gap_ns", [0, 3_000_000])
def test_a_rank_that_counts_from_another_number_is_matched_by_steps_and_ends(known, by, gap_ns):
    row, own = calls(0, 0, first=(40, 40 + by), steps=(4, 4), known=True)
    own = changed(own, stop=own.stop + own.step * gap_ns)
    if not known:
        own = changed(own, step=np.full_like(own.step, NULL))
    found = [members for members in pairs(row, match(own)) if len(members) > 1]
    if known or gap_ns:
        assert all(one == other for one, other in found)
        assert len(found) == 6 * PER_STEP


@pytest.mark.parametrize("ahead", [0, 1_000_000, 824_000, 10**9])
def test_one_call_at_a_boundary_of_steps_disproves_no_number(ahead):
    row, own = calls(0, ahead, first=(40, 40), steps=(4, 4))
    step = own.step.copy()
    step[6 * PER_STEP :: PER_STEP] -= 1  # the first of each step began before its mark
    matches = match(changed(own, step=step))
    found = [members for members in pairs(row, matches) if len(members) > 1]
    assert all(one == other for one, other in found)
    assert len(found) == 6 * PER_STEP


def changed(calls, **columns):
    return CollectiveCalls(**{n: getattr(calls, n) for n in calls.__slots__} | columns)


@pytest.mark.parametrize("by", [2, -3, 7, 20])
@pytest.mark.parametrize("ahead", [7_300_000, 10**12])
def test_numbers_of_which_the_marks_say_otherwise_match_nothing(by, ahead):
    _, own = calls(0, ahead, first=(40, 40 + by), steps=(4, 4))
    matches = match(own)
    assert not matches.count
    assert matches.dropped == 6 * PER_STEP


@pytest.mark.parametrize("ahead", [0, 10**9])
@pytest.mark.parametrize("jitter", [0, 100_000])
def test_numbers_that_join_recordings_without_a_common_step_match_nothing(ahead, jitter):
    _, own = calls(jitter, ahead, first=(40, 97), steps=(4, 10))
    assert not match(own).count


@pytest.mark.parametrize("by", [1, -1, 3, 7, 20])
def test_numbers_that_equal_clocks_contradict_match_nothing_without_marks(by):
    _, own = calls(0, 0, first=(40, 40 + by), steps=(4, 4), known=False)
    assert not match(own).count


@pytest.mark.parametrize("ahead", [420_000, 7_300_000, 10**12])
def test_numbers_are_right_without_marks_where_clocks_tell_nothing(ahead):
    row, own = calls(0, ahead, first=(40, 60), known=False)
    members = [of for of in pairs(row, match(own)) if len(of) > 1]
    assert all(one == other for one, other in members)
    assert len(members) == 4 * PER_STEP
