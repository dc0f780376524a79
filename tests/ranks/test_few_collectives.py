"""Test matching of short recordings without sequence numbers and numbered steps."""

import numpy as np
import pytest
from builders.matching_columns import matched_places

from fastcomm_kernels.arrays import NULL

STEP = 10_000_000  # ns, one call a step


def job(jitter, seed, gap=STEP, count=40):
    """Ends of the calls of a job whose gaps vary by `jitter`."""
    random = np.random.default_rng(seed)
    return np.cumsum(gap * (1 + jitter * random.uniform(-1, 1, count))).astype(np.int64)


def pairs(ends, first, second, ahead=0, noise=0, seed=0):
    """Pairs of calls that match, of two ranks that recorded some of the calls."""
    random = np.random.default_rng(seed)
    late = random.integers(0, noise + 1, len(second))
    own = [ends[first], ends[second] + ahead + late]
    found = matched_places(own, [np.full(len(stop), NULL) for stop in own])
    return [(first[a], second[b]) for a, b in found]


@pytest.mark.parametrize("jitter", [0.001, 0.01, 0.03, 0.1])
@pytest.mark.parametrize(("length", "later"), [(2, 3), (3, 1), (3, 2), (6, 3), (6, 5)])
def test_few_calls_on_equal_clocks_match_themselves_or_nothing(length, later, jitter):
    wrong = 0
    for seed in range(40):
        ends = job(jitter, seed)
        first = np.arange(10, 10 + length)
        wrong += any(one != other for one, other in pairs(ends, first, first + later))
    assert wrong == 0


@pytest.mark.parametrize("later", [0, 3])
def test_equal_clocks_are_preferred_to_a_place_with_more_calls(later):
    """Four ends agree within 12 us on clocks that are 2 ms apart, and three on equal ones."""
    ends = 1000 * np.array(
        [22205, 24180, 26168, 28172, 30169, 32179, 34196, 36420, 38437], np.int64
    )
    first = np.arange(3, 9)
    assert pairs(ends, first, first - later) == [(n, n) for n in range(3, 9 - later)]


@pytest.mark.parametrize("noise", [0, 500])
@pytest.mark.parametrize("ahead", [-28_413_347, 42_569_287, 10**12])
@pytest.mark.parametrize(("gap", "jitter"), [(500_000, 0.01), (27_000_000, 0.1)])
def test_irregular_calls_whose_ends_agree_closely_are_matched_on_any_clocks(
    gap, jitter, ahead, noise
):
    for seed in range(5):
        ends = job(jitter, seed, gap, 120)
        count = 120 if jitter == 0.01 else 12
        rows = np.arange(count)
        assert pairs(ends, rows, rows, ahead, noise, seed) == [(n, n) for n in range(count)]


@pytest.mark.parametrize("ahead", [-28_413_347, 10**12])
@pytest.mark.parametrize(("noise", "jitter"), [(0, 0), (5_000, 0.003)])
def test_regular_calls_match_nowhere_on_other_clocks(ahead, noise, jitter):
    for seed in range(5):
        ends = job(jitter, seed, 500_000, 120)
        for later in (0, 7):
            rows = np.arange(60)
            assert not pairs(ends, rows, rows + later, ahead, noise, seed)


def test_a_long_gap_that_one_rank_did_not_record_tells_nothing():
    """Elsewhere calls are regular, so that each place among them fits."""
    ends = 500_000 * np.arange(120)
    ends[110:] += 2_000_000
    assert not pairs(ends, np.arange(120), np.arange(5, 105), 10**12)
