"""Test the search for lighter placements with few moves."""

import numpy as np
import pytest
from oracles import dispatch as oracle

from fastcomm_kernels import moves

EXPERTS, GPUS = 9, 4
EMPTY = EXPERTS


def a_load(seed):
    """Loads of experts whose mean of a GPU is 1, and that of an empty slot."""
    load = np.random.default_rng(seed).lognormal(0, 1, EXPERTS)
    return np.append(load * GPUS / load.sum(), 0.0)


def start(seed, replicas=12):
    """Experts in order, then three on other GPUs of three slots; the others are empty."""
    order = np.concatenate([np.arange(EXPERTS), [[0, 3, 2], [4, 7, 6]][seed % 2]])
    order[replicas:] = EMPTY
    return np.ascontiguousarray(order.reshape(3, GPUS).T)


def heaviest(load, slots):
    count = np.bincount(slots.ravel(), minlength=len(load))
    return (load / np.maximum(count, 1))[slots].sum(axis=1).max()


def changed(load, slots, width, most, work=20_000, suffices=0.0):
    with np.errstate(over="ignore"):
        return moves.changed(load, slots, (width, most, suffices), work)


@pytest.mark.parametrize("score", [0, 1])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_changes_are_no_worse_than_greedy_replacements(seed, most, score):
    load, before = a_load(seed), start(seed)
    scores = (lambda weights: weights[:2]), (lambda weights: sum(own * own for own in weights))
    greedy = oracle.greedily_replaced(load[:-1].tolist(), before.tolist(), most, scores[score])
    after = changed(load, before, GPUS, most)
    assert oracle.moved(before.tolist(), after.tolist()) <= most
    assert set(after.ravel().tolist()) == set(range(EXPERTS))
    assert heaviest(load, after) <= heaviest(load, np.array(greedy)) * (1 + 1e-9)


@pytest.mark.parametrize("replicas", [9, 11, 12])
@pytest.mark.parametrize("width", [2, 4])
def test_experts_stay_in_their_domain_and_empty_slots_are_filled(width, replicas):
    load, before = a_load(7), start(7, replicas)
    after = changed(load, before, width, 3)
    kept = np.where(before == EMPTY, -1, before)
    assert oracle.moved(kept.tolist(), after.tolist()) <= 3 + 12 - replicas
    assert EMPTY not in after
    assert all(len(set(own)) == 3 for own in after.tolist())
    for first in range(0, GPUS, width):
        part = slice(first, first + width)
        assert set(after[part].ravel()) == set(kept[part].ravel()) - {-1}


def test_a_heaviest_gpu_that_suffices_ends_the_changes():
    load, before = a_load(1), start(1)
    assert (changed(load, before, GPUS, 9, suffices=heaviest(load, before)) == before).all()
    assert (changed(load, before, GPUS, 0) == before).all()


def test_an_expert_that_every_gpu_has_gets_a_second_replica_on_one():
    load, before = np.array([2.0, 0.0]), np.array([[0, 1]])
    assert changed(load, before, 1, 0).tolist() == [[0, 0]]
    assert changed(load, np.array([[0, 0]]), 1, 5, 1).tolist() == [[0, 0]]


def test_a_second_replica_on_a_gpu_makes_room():
    load, before = np.array([2.0, 0.5, 0.25, 0.0]), np.array([[0, 0], [1, 2]])
    assert sorted(changed(load, before, 2, 2).tolist()) == [[0, 2], [1, 0]]
