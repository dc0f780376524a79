"""Test the places of a token's experts: by all orders of scores, and by drawn scores."""

from itertools import permutations

import numpy as np
import pytest
from oracles import exchange as oracle

from fastcomm.hardware.expert_exchange import ExchangeShape
from fastcomm.hardware.expert_gate import places_of_token


@pytest.mark.parametrize(
    "gate",
    [(6, 3, 2, 2), (6, 3, 1, 2), (6, 2, 1, 3), (6, 3, 2, 4), (8, 4, 2, 3), (8, 2, 1, 2)],
)
def test_the_places_of_a_token_are_those_of_all_orders_of_scores(gate):
    experts = gate[0]
    draws = list(oracle.gate_draws(*gate, orders=permutations(range(experts))))
    for places in (count for count in range(1, experts + 1) if experts % count == 0):
        assert places_of_token(*gate, places) == pytest.approx(
            oracle.mean_places(draws, experts, places)
        )


@pytest.mark.parametrize("groups", [(8, 4), (8, 2), (4, 3)])
def test_groups_that_rank_by_two_scores_have_about_as_many_places(groups):
    rng = np.random.default_rng(0)
    orders = [rng.permutation(256).tolist() for _ in range(2000)]
    draws = list(oracle.gate_draws(256, *groups, 8, best=2, orders=orders))
    for places in (2, 4, 8, 16, 32, 64):
        expected = oracle.mean_places(draws, 256, places)
        assert places_of_token(256, *groups, 8, places) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (32, 3.13), (64, 3.98), (128, 5.69)])
def test_deepseek_v3_has_as_many_nodes_however_many_hold_its_groups(ranks, nodes):
    shape = ExchangeShape(
        tokens=1, hidden=1, topk=8, experts=256, ranks=ranks, domain=8, groups=8, top_groups=4
    )
    assert float(shape.domains_of_token()) == pytest.approx(nodes, rel=0.005)


def test_a_gate_without_a_limit_changes_nothing():
    free = ExchangeShape(tokens=1, hidden=1, topk=8, experts=256, ranks=64, domain=8)
    gated = ExchangeShape(
        **{name: getattr(free, name) for name in ("tokens", "hidden", "topk", "experts")},
        ranks=64,
        domain=8,
        groups=8,
        top_groups=8,
    )
    assert float(gated.ranks_of_token()) == float(free.ranks_of_token())
    assert places_of_token(256, 8, 8, 8, 8) == pytest.approx(float(free.domains_of_token()))


def test_groups_with_too_few_experts_are_more():
    assert places_of_token(8, 4, 1, 4, 4) == pytest.approx(2)


def test_groups_may_lie_across_places():
    orders = [np.random.default_rng(n).permutation(12).tolist() for n in range(20000)]
    for groups, places in ((4, 3), (3, 2), (6, 4)):
        draws = oracle.gate_draws(12, groups, 2, 3, orders=orders)
        expected = oracle.mean_places(draws, 12, places)
        assert places_of_token(12, groups, 2, 3, places) == pytest.approx(expected, rel=0.01)
