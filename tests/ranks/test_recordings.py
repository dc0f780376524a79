"""Test matching of ranks that were recorded in different steps of a job."""

import numpy as np
import pytest
from builders.matching_columns import matched_places

from fastcomm.ranks.matching import Messages, match_messages
from fastcomm_kernels.arrays import NULL

STEP, CALLS = 10_000_000, 20  # ns, calls a step
SEEDS = (0, 3)  # calls at even times, and the least even


def job(jitter, seed, irregular=0.0):
    """Ends of all calls of 20 steps, which vary by `jitter`, and the step of each."""
    random = np.random.default_rng(seed)
    at = np.arange(CALLS) + irregular * random.uniform(-0.5, 0.5, CALLS)
    length = STEP * (1 + jitter * random.uniform(-1, 1, 20))
    begin = np.cumsum(length) - length
    ends = begin[:, None] + length[:, None] * at / CALLS
    return ends.astype(np.int64).ravel(), np.repeat(np.arange(20), CALLS)


def recorded(ends, step, first, last, ahead, noise, random):
    own = (step >= first) & (step <= last)
    late = random.integers(0, noise + 1, own.sum())
    return np.flatnonzero(own), ends[own] + ahead + late, step[own]


def both(ends, step, windows, ahead, noises, random):
    """What two ranks recorded, of which the second's clock is ahead."""
    ways = zip(windows, (0, ahead), noises, strict=True)
    return [recorded(ends, step, *window, *way, random) for window, *way in ways]


WINDOWS = [
    *(((10, 15), (12, 17)), ((10, 15), (10, 15)), ((8, 15), (11, 13)), ((2, 7), (9, 14))),
    *(((12, 15), (9, 19)), ((3, 5), (1, 19))),
]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("jitter", [0, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("ahead", [0, 3_000, -7_300_000, 10**12])
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("noise", [0, 5_000])
def test_no_call_is_matched_with_that_of_another_step(windows, jitter, ahead, marks, noise):
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        ends, step = job(jitter, seed, irregular=seed / 2)
        ranks = both(ends, step, windows, ahead, (noise, noise), random)
        known = [steps if marks else np.full(len(steps), NULL) for _, _, steps in ranks]
        found = matched_places([stop for _, stop, _ in ranks], known)
        pairs = [(ranks[0][0][a], ranks[1][0][b]) for a, b in found]
        assert all(one == other for one, other in pairs)
        common = len(set(ranks[0][0].tolist()) & set(ranks[1][0].tolist()))
        # Numbers of marks always tell, and so do equal clocks.
        if marks or abs(ahead) < 100_000 or (jitter == 0.1 and windows[0] == windows[1]):
            assert len(pairs) == common


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("jitter", [0, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("ahead", [0, 3_000])
@pytest.mark.parametrize("noise", [0, 5_000])
def test_numbers_that_ranks_count_from_their_own_start_are_no_evidence(
    shift, jitter, ahead, noise
):
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        ends, step = job(jitter, seed, irregular=seed / 2)
        windows = ((8, 13), (8 + shift, 13 + shift))
        ranks = both(ends, step, windows, ahead, (noise, noise), random)
        own = [steps - steps[0] for _, _, steps in ranks]
        found = matched_places([stop for _, stop, _ in ranks], own)
        pairs = [(ranks[0][0][a], ranks[1][0][b]) for a, b in found]
        assert all(one == other for one, other in pairs)
        assert len(pairs) == (6 - shift) * CALLS


@pytest.mark.parametrize("jitter", [0.01, 0.1])
@pytest.mark.parametrize("ahead", [-7_300_000, 10**12])
def test_with_other_clocks_they_are_refused_or_the_ends_decide(jitter, ahead):
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        ends, step = job(jitter, seed, irregular=seed / 2)
        ranks = both(ends, step, ((8, 13), (10, 15)), ahead, (0, 0), random)
        own = [steps - steps[0] for _, _, steps in ranks]
        found = matched_places([stop for _, stop, _ in ranks], own)
        assert all(ranks[0][0][a] == ranks[1][0][b] for a, b in found)


def sides(ranks, marks):
    """Messages of rank 0 to rank 1, from what either recorded."""
    call, stop, step = (np.concatenate(column) for column in zip(*ranks, strict=True))
    unknown = np.full(len(stop), NULL)
    rank = np.repeat([0, 1], [len(own[0]) for own in ranks])
    return call, Messages(
        rank=rank,
        peer=1 - rank,
        is_send=rank == 0,
        group=np.zeros(len(rank), np.int64),
        seq=unknown,
        size=unknown,
        stop=stop,
        step=step if marks else unknown,
    )


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("jitter", [0, 0.01, 0.1])
@pytest.mark.parametrize("ahead", [0, 3_000, -7_300_000, 10**12])
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("noise", [0, 20_000])
def test_no_message_is_matched_with_that_of_another_step(windows, jitter, ahead, marks, noise):
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        ends, step = job(jitter, seed, irregular=seed / 2)
        ends = np.sort(ends)  # messages keep their order
        ranks = both(ends, step, windows, ahead, (0, noise), random)
        np.maximum.accumulate(ranks[1][1], out=ranks[1][1])
        call, messages = sides(ranks, marks)
        found = match_messages(messages)
        sender, receiver = found.pairs(messages.is_send)
        assert (call[sender] == call[receiver]).all()
        if marks:
            assert found.count == len(set(ranks[0][0].tolist()) & set(ranks[1][0].tolist()))


@pytest.mark.parametrize("calls", [20, 50])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("ahead", [0, -7_300_000, 10**12])
def test_calls_close_to_each_other_are_matched_in_equal_steps(calls, windows, ahead):
    for seed in range(4):
        random = np.random.default_rng(seed)
        ends, step = job(0.01, seed, irregular=0.5)
        ends = ends // 10  # a call each 50 us, less than ends of one may differ by
        ranks = both(ends, step, windows, ahead, (2_000, 2_000), random)
        found = matched_places(
            [np.sort(stop) for _, stop, _ in ranks], [steps for *_, steps in ranks]
        )
        pairs = [(ranks[0][0][a], ranks[1][0][b]) for a, b in found]
        assert all(one == other for one, other in pairs)
        assert len(pairs) == len(set(ranks[0][0].tolist()) & set(ranks[1][0].tolist()))


@pytest.mark.parametrize("jitter", [0.005, 0.01, 0.02])
@pytest.mark.parametrize("ahead", [-7_300_000, 10**12])
@pytest.mark.parametrize("windows", [((8, 13), (10, 15)), ((2, 11), (3, 12))])
@pytest.mark.parametrize("scale", [1, 5, 0.1])
def test_ends_that_agree_better_elsewhere_contradict_numbers(jitter, ahead, windows, scale):
    for seed in range(6):
        random = np.random.default_rng(seed)
        ends, step = job(jitter, seed, irregular=seed / 5)
        noise = 1_000 if scale < 1 else 2_000
        ends = (ends / scale).astype(np.int64)
        ranks = both(ends, step, windows, ahead, (noise, noise), random)
        own = [steps - steps[0] for _, _, steps in ranks]
        found = matched_places([np.sort(stop) for _, stop, _ in ranks], own)
        assert all(ranks[0][0][a] == ranks[1][0][b] for a, b in found)


def test_noise_and_drift_of_clocks_do_not_contradict_numbers():
    for seed in range(20):
        random = np.random.default_rng(seed)
        ends, step = job(0.001, seed)
        ranks = both(ends, step, ((8, 13), (9, 14)), 10**12, (0, 0), random)
        late = random.exponential(2_000, len(ranks[1][1]))
        stop = np.sort((ranks[1][1] * (1 + 3e-5) + late).astype(np.int64))
        found = matched_places([ranks[0][1], stop], [steps for *_, steps in ranks])
        assert len(found) == 5 * CALLS
        assert all(ranks[0][0][a] == ranks[1][0][b] for a, b in found)


@pytest.mark.parametrize("jitter", [0.005, 0.01, 0.02])
@pytest.mark.parametrize("windows", [((3, 4), (9, 10)), ((2, 4), (15, 17))])
def test_ends_of_few_steps_that_agree_by_chance_are_no_match(jitter, windows):
    for seed in range(60):
        random = np.random.default_rng(seed)
        ends, step = job(jitter, seed)
        ranks = both(ends, step, windows, 10**12, (0, 0), random)
        unknown = [np.full(len(steps), NULL) for *_, steps in ranks]
        sizes = [call % CALLS + 1 for call, *_ in ranks]  # repeated in each step alone
        assert not matched_places([stop for _, stop, _ in ranks], unknown, sizes)


@pytest.mark.parametrize("windows", [((10, 15), (10, 15)), ((10, 15), (12, 17))])
@pytest.mark.parametrize("jitter", [0, 0.0001, 0.001])
@pytest.mark.parametrize("ahead", [2 * STEP, -2 * STEP, 2 * STEP + 3_000, 4 * STEP])
def test_clocks_that_agree_some_steps_away_do_not_contradict_numbers(windows, jitter, ahead):
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        ends, step = job(jitter, seed, irregular=seed / 2)
        ranks = both(ends, step, windows, ahead, (0, 0), random)
        found = matched_places([stop for _, stop, _ in ranks], [steps for *_, steps in ranks])
        assert all(ranks[0][0][a] == ranks[1][0][b] for a, b in found)
        assert len(found) == len(set(ranks[0][0].tolist()) & set(ranks[1][0].tolist()))


@pytest.mark.parametrize("windows", [((10, 15), (12, 17)), ((8, 13), (5, 10))])
def test_ends_decide_over_clocks_that_agree_without_marks(windows):
    decided = 0
    for seed in range(16):
        random = np.random.default_rng(seed)
        ends, step = job(0.01, seed)
        ends += random.integers(-5_000, 5_001, len(ends))  # no step is quite like another
        ahead = (windows[0][0] - windows[1][0]) * STEP  # as if both began in one step
        ranks = both(ends, step, windows, ahead, (0, 0), random)
        unknown = [np.full(len(steps), NULL) for *_, steps in ranks]
        found = matched_places([stop for _, stop, _ in ranks], unknown)
        assert all(ranks[0][0][a] == ranks[1][0][b] for a, b in found)
        decided += len(found) == len(set(ranks[0][0].tolist()) & set(ranks[1][0].tolist()))
    assert decided > 4
