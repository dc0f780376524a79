"""Test the search for lighter placements against all placements."""

from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm_kernels import placement


def heaviest(load, slots):
    """The definition: the heaviest GPU, if replicas share the load of their expert."""
    every = [expert for own in slots for expert in own]
    return max(sum(load[e] / every.count(e) for e in own) for own in slots)


def lightest(load, gpus, room):
    """The heaviest GPU of the best of all placements without two replicas on a GPU."""
    own = list(combinations(range(len(load)), room))
    return min(
        heaviest(load, slots)
        for slots in combinations_with_replacement(own, gpus)
        if len({expert for part in slots for expert in part}) == len(load)
    )


def start(experts, gpus, room):
    """A placement of all experts, with the last ones replicated."""
    order = [*range(experts), *range(experts)][: gpus * room]
    slots = np.array(order).reshape(room, gpus).T
    assert all(len(set(own)) == room for own in slots.tolist())
    return np.ascontiguousarray(slots)


@pytest.mark.parametrize(("experts", "gpus", "room"), [(4, 3, 2), (6, 3, 2), (5, 2, 3)])
def test_the_search_finds_the_best_of_all_placements(experts, gpus, room):
    for seed in range(12):
        load = np.random.default_rng(seed).gamma(0.7, 1, experts)
        slots = start(experts, gpus, room)
        with np.errstate(over="ignore"):
            found = placement.lightened(load, slots, load.sum() / gpus, 20_000, 0.0)
        best = lightest(load.tolist(), gpus, room)
        assert heaviest(load, found.tolist()) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("experts", "gpus", "room"), [(4, 3, 2), (6, 3, 2), (5, 2, 3)])
def test_a_search_from_random_starts_finds_the_best_of_all_placements(experts, gpus, room):
    for seed in range(12):
        load = np.random.default_rng(seed).lognormal(0, 1, experts)
        slots = start(experts, gpus, room)
        most = heaviest(load.tolist(), slots.tolist())
        with np.errstate(over="ignore"):
            found = placement.restarted(load, slots, (0.1 * most, most), 0.0, 20_000)
        assert {expert for own in found.tolist() for expert in own} == set(range(experts))
        assert all(len(set(own)) == room for own in found.tolist())
        best = lightest(load.tolist(), gpus, room)
        assert heaviest(load, found.tolist()) == pytest.approx(best, rel=1e-9)


@given(st.integers(0, 1 << 20), st.sampled_from([(9, 4, 3), (12, 4, 3), (7, 2, 5)]))
def test_the_search_keeps_every_expert_and_makes_no_gpu_heavier(seed, shape):
    load = np.random.default_rng(seed).gamma(0.7, 1, shape[0])
    slots = start(*shape)
    with np.errstate(over="ignore"):
        found = placement.lightened(load, slots, 0.0, 2000, 0.0).tolist()
    assert {expert for own in found for expert in own} == set(range(shape[0]))
    assert all(len(set(own)) == shape[2] for own in found)
    assert heaviest(load, found) <= heaviest(load, slots.tolist()) * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(9, 4, 3), (12, 4, 3), (7, 2, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_does_not_tell_light_slots_apart_keeps_every_expert(shape, seed):
    load = np.random.default_rng(seed).lognormal(0, 2, shape[0])
    slots = start(*shape)
    with np.errstate(over="ignore"):
        found = placement.lightened(load, slots, 0.0, 2000, np.median(load))
    assert set(found.ravel().tolist()) == set(range(shape[0]))
    assert all(len(set(own)) == shape[2] for own in found.tolist())
    assert heaviest(load, found.tolist()) <= heaviest(load, slots.tolist()) * (1 + 1e-9)


def test_experts_are_divided_so_that_their_replicas_fill_gpus():
    load = np.array([8.0, 4.0, 4.0, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    weights, packings = placement.divided(load, np.zeros((4, 3), np.int64), (2.0, 9.0), 8)
    assert weights.min() == pytest.approx(4, rel=1e-3)
    for weight, slots in zip(weights, packings, strict=True):
        assert set(slots.ravel().tolist()) == set(range(8))
        assert all(len(set(own)) == 3 for own in slots.tolist())
        assert heaviest(load, slots.tolist()) == pytest.approx(weight)


def test_no_packing_has_more_replicas_of_an_expert_than_gpus():
    weights, _ = placement.divided(np.ones(2), np.zeros((2, 3), np.int64), (0.5, 1.0), 3)
    assert np.isinf(weights).all()


def test_replicas_may_not_fit_on_gpus_that_lack_the_expert():
    load, slots = np.array([3.0, 2.0]), np.zeros((2, 2), np.int64)
    assert placement.packed_apart(load, np.array([1, 3]), slots, np.inf) == np.inf
    assert placement.packed_apart(load, np.array([2, 2]), slots, np.inf) == 2.5
    assert placement.packed_apart(load, np.array([2, 2]), slots, 2.5) == np.inf


def test_a_target_that_is_reached_ends_the_search():
    load = np.array([3.0, 1.0, 1.0, 3.0])
    slots = np.array([[0, 3], [1, 2]])
    found = placement.lightened(load, slots, 4.0, 10_000, 0.0)
    assert heaviest(load, found.tolist()) == 4.0
    assert (placement.lightened(load, slots, 6.0, 10_000, 0.0) == slots).all()


def moves(slots, was):
    """How many experts GPUs have that they did not have."""
    _, on = placement.counted(slots, len(was))
    return int(np.maximum(on - was, 0).sum())


@pytest.mark.parametrize("width", [2, 4])
@given(st.integers(0, 1 << 20))
def test_settled_experts_move_less_and_make_no_gpu_heavier(width, seed):
    random = np.random.default_rng(seed)
    load = random.integers(1, 4, 9).astype(float)
    before, after = (start(9, 4, 3)[random.permutation(4)] for _ in range(2))
    after = placement.lightened(load, after, 0.0, 500, 0.0)
    _, was = placement.counted(before, 9)
    most = heaviest(load, after.tolist())
    found = placement.settled(load, after, was, width, most)
    assert moves(found, was) <= moves(after, was)
    assert heaviest(load, found.tolist()) <= most * (1 + 1e-12)
    for first in range(0, 4, width):
        part = slice(first, first + width)
        assert sorted(found[part].ravel()) == sorted(after[part].ravel())


def test_an_expert_returns_to_its_gpu():
    load = np.array([1.0, 2.0, 1.0, 2.0])
    _, was = placement.counted(np.array([[0, 1], [2, 3]]), 4)
    found = placement.settled(load, np.array([[2, 1], [0, 3]]), was, 2, 3.0)
    assert found.tolist() == [[0, 1], [2, 3]]
