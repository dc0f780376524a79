"""Costs of findings: what one costs, and what several share."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastcomm.metrics.findings import stragglers
from fastcomm.metrics.findings.detection import own_work
from fastcomm.metrics.findings.suspects import Measurements, Suspect, sharing
from fastcomm.metrics.outliers import HeatArrays

RANKS, MS = 8, 10**6


def known_of(excess, stage=None, received=None, idle=None, steps=2, caused=None, together=None):
    """Eight ranks whose compute is some ms above 50, in two steps of 100 ms."""
    compute = np.full((RANKS, steps), 50 * MS)
    for rank, more in excess.items():
        compute[rank] += (np.array(more) * MS).astype(np.int64)
    idles = compute // 10
    for rank, more in (idle or {}).items():
        idles[rank] = (5 + more) * MS
    values = {
        "compute_ns": compute,
        "idle_ns": idles,
        "copies_ns": 0 * compute,
        "time_ns": 0 * compute + 100 * MS,
    }
    excess = excess | (idle or {})
    late = max(np.max(more) for more in excess.values()) * MS
    return Measurements(
        grid=HeatArrays(np.arange(RANKS), np.arange(steps), values),
        stage=stage or {},
        received=received or {},
        waits={rank: 0.0 if rank in excess else late for rank in range(RANKS)},
        caused=caused or {},
        common_wait_caused=lambda ranks: {
            rank: (together or {}).get(rank, 0.0) for rank in ranks
        },
        longer=lambda _: None,
    )


def told(findings):
    return [(each.ranks, each.cost_ns / MS) for each in findings]


def test_the_cost_of_a_straggler_is_limited_by_waits_for_it_alone():
    (found,) = own_work(known_of({3: 4}, caused={3: 1.5 * MS, 5: 1 * MS}))
    assert told([found]) == [((3,), pytest.approx(1.5))]
    assert "+4.00 ms compute per step; others delay the same steps, its share is 1.50" in (
        found.text
    )
    for caused in (9, 0.5):  # of delays that are handed on, and of those by messages
        (found,) = own_work(known_of({3: 4}, caused={3: caused * MS}))
        assert told([found]) == [((3,), 4)]


def test_ranks_with_equal_delays_are_one_finding_that_costs_the_delay_once():
    (found,) = own_work(known_of({3: 4, 5: 4}))
    assert told([found]) == [((3, 5), 4)]
    text = (
        "Ranks 3, 5 are stragglers: same work as their peers, +4.00 ms compute per step (4.0 %"
    )
    assert found.text.startswith(text)
    (found,) = (
        each for each in own_work(known_of({3: 40, 5: 40})) if each.kind == "jittery_host"
    )
    assert found.text.startswith(
        "The hosts of ranks 3, 5 launch late: the device is idle longer"
    )


def test_costs_of_ranks_that_delay_the_same_steps_add_up_to_the_delay():
    worst, second = own_work(known_of({3: 4, 5: 3}))
    assert told([worst, second]) == [((3,), 2.5), ((5,), 1.5)]
    assert "+4.00 ms compute per step; others delay the same steps, its share is 2.50 ms" in (
        worst.text
    )


def test_ranks_that_delay_different_steps_share_nothing():
    found = own_work(known_of({3: (8, 0), 5: (0, 6)}))
    assert told(found) == [((3,), 4), ((5,), 3)]


def fixed(late):
    """What each of some ranks adds to the steps: the mean over all orders of fixing them.

    `late` is a row a rank with how late it comes to each collective; those who are there
    wait for the last.
    """
    shares, orders = np.zeros(len(late)), list(permutations(range(len(late))))
    for order in orders:
        left = np.array(late, float)
        for rank in order:
            before = left.max(axis=0).sum()
            left[rank] = 0
            shares[rank] += before - left.max(axis=0).sum()
    return shares / len(orders)


def alone(late):
    """How long others wait for each of some ranks alone."""
    beyond = [row - np.delete(late, rank, axis=0).max(axis=0) for rank, row in enumerate(late)]
    return np.maximum(beyond, 0).sum(axis=1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3))
def test_the_share_of_two_ranks_counts_the_collectives_that_they_are_late_at(pairs):
    late = np.array(pairs).T
    assume(late.sum(axis=1).min() > 0)
    cost = late.sum(axis=1)
    assume(cost.min() < 0.9 * cost.max())  # else they tie
    excess = dict(zip((3, 5), cost.tolist(), strict=True))
    together = dict(zip((3, 5), alone(late) * MS, strict=True))
    found = own_work(known_of(excess, together=together))
    wanted = zip(((3,), (5,)), fixed(late), strict=True)
    assert sorted(told(found)) == [(ranks, pytest.approx(part)) for ranks, part in wanted]


def test_equally_late_ranks_at_different_collectives_cost_the_sum():
    (found,) = own_work(known_of({3: 4, 5: 4}, together={3: 4 * MS, 5: 4 * MS}))
    assert told([found]) == [((3, 5), 8)]
    assert "+4.00 ms compute per step each, in turns: together 8.00 ms (8.0 % of" in found.text
    (found,) = own_work(known_of({3: 4, 5: 4}, together={3: 1 * MS, 5: 1 * MS}))
    assert told([found]) == [((3, 5), 5)]
    late = np.array([[4, 0], [2, 2], [0, 4]])  # at two collectives of a step
    together = dict(zip((1, 3, 5), alone(late) * MS, strict=True))
    (found,) = own_work(known_of({1: 4, 3: 4, 5: 4}, together=together))
    assert told([found]) == [((1, 3, 5), late.max(axis=0).sum())]


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=3))
def test_no_rank_of_several_has_a_larger_share_than_its_fix_gains(rows):
    late = np.array(rows).T
    cost = late.sum(axis=1)
    assume(cost.min() > 0)
    steps = len(rows)  # each of one collective: nothing is known but the sums
    known = known_of(
        {2 * place: tuple(row) for place, row in enumerate(late)},
        steps=steps,
        together=dict(zip(range(0, 8, 2), alone(late) / steps * MS, strict=True)),
    )
    by_ranks = {each.ranks: each.cost_ns / MS * steps for each in own_work(known)}
    for ranks, part in by_ranks.items():
        if len(ranks) == 1 and len(by_ranks) == 4:
            assert part == pytest.approx(fixed(late)[ranks[0] // 2])


def test_a_straggler_and_a_late_host_share_the_delay_of_the_same_steps():
    found = own_work(known_of({2: 5}, idle={5: 4}))
    assert {each.kind: told([each])[0] for each in found} == {
        "straggler": ((2,), 3),
        "jittery_host": ((5,), 2),
    }
    assert all("others delay the same steps" in each.text for each in found)


def test_a_stage_and_a_late_host_of_another_stage_share_the_delay_of_the_same_steps():
    stage = {rank: rank // 4 for rank in range(RANKS)}
    found = own_work(known_of(dict.fromkeys(range(4, 8), 5), stage=stage, idle={1: 4}))
    assert {each.kind: told([each])[0] for each in found} == {
        "imbalanced_stage": ((4, 5, 6, 7), 3),
        "jittery_host": ((1,), 2),
    }


def test_delays_of_one_rank_add_up_and_are_not_shared():
    found = own_work(known_of({2: 5}, idle={2: 4}))
    assert {each.kind: told([each])[0] for each in found} == {
        "straggler": ((2,), 5),
        "jittery_host": ((2,), 4),
    }


def test_stragglers_that_take_turns_cost_the_sum_of_their_delays():
    turns = np.kron(np.eye(4), [[5]])
    excess = {2 * number: tuple(row) for number, row in enumerate(turns)}
    (found,) = own_work(known_of(excess, steps=4))
    assert told([found]) == [((0, 2, 4, 6), 5)]
    assert found.confidence == "high"  # each step is 5 ms late


def test_a_straggler_does_not_tie_with_a_hot_expert():
    received = dict.fromkeys(range(RANKS), 100.0) | {5: 150.0}
    found = own_work(known_of({3: 4, 5: 4}, received=received))
    assert sorted((each.kind, *told([each])[0]) for each in found) == [
        ("hot_expert", (5,), 2),
        ("straggler", (3,), 2),
    ]


@pytest.mark.parametrize(
    ("stages", "ranks", "cost"),
    [
        ([0, 10, 20, 34], (6, 7), 14),  # a ramp: without the last stage the third one limits
        ([0, 0, 20, 20], (4, 5, 6, 7), 20),
        ([20, 0, 0, 21], (0, 1, 6, 7), 20),
        ([0, 20, 20, 20], None, None),  # one stage has less to do than the others
        ([0, 1, 1, 2], None, None),
    ],
)
def test_the_stages_above_the_widest_gap_are_one_finding(stages, ranks, cost):
    excess = {rank: stages[rank // 2] for rank in range(RANKS)}
    found = own_work(known_of(excess, stage={rank: rank // 2 for rank in excess}))
    assert told(found) == ([(ranks, cost)] if ranks else [])


def test_a_suspect_that_costs_nothing_in_the_mean_has_a_share_of_its_steps():
    def suspect(rank, mean, excess):
        return Suspect(
            work=stragglers.WORK,
            rows=np.array([rank]),
            rank=rank,
            others=np.array([0]),
            mean=mean,
            middle=50.0 * MS,
            excess=np.array(excess, float) * MS,
        )

    uneven, steady = suspect(3, 50.0 * MS, [4, 0]), suspect(5, 52.0 * MS, [2, 2])
    shares = [each.share for each in sharing([uneven, steady], lambda _: {})]
    assert shares == [pytest.approx(3 / 4), pytest.approx(3 / 4)]
