"""Test whether placing experts anew pays."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from oracles import dispatch as oracle

from fastcomm.dispatch.drift import DriftStep, MoveCosts, drift, placed_by
from fastcomm.dispatch.moves import placed_anew
from fastcomm.dispatch.placement import Placement

GPUS, NODES, EXPERTS = 8, 2, 32
COSTS = MoveCosts(expert_bytes=10**6, bytes_per_s=1e9, layer_s=np.array([2e-3, 1e-3]))


def in_order():
    return Placement(logical=np.arange(EXPERTS), experts=EXPERTS, gpus=GPUS)


def a_load(seed):
    return np.random.default_rng(seed).gamma(0.5, 1, EXPERTS)


def drifting(means, seed=0):
    """Counts of steps and layers that scatter about the means of each step."""
    random = np.random.default_rng(seed)
    return np.stack([random.poisson(200 * mean, (2, EXPERTS)) for mean in means]).astype(float)


def test_a_new_placement_pays_once_the_load_has_changed():
    old, new = a_load(8) + 0.2, a_load(9) + 0.2
    rows = drift(drifting([old] * 3 + [new] * 6), None, 48, 1, (NODES, GPUS), COSTS)
    assert [row.step for row in rows] == [2, 3, 4, 5, 6, 7, 8]
    assert rows[2].is_saving
    assert rows[2].imbalance_kept > rows[2].imbalance_anew
    assert rows[2].pays_after == ceil(rows[2].move_s / rows[2].saved_s)
    assert rows[2].move_s == pytest.approx(1e-3 * round(rows[2].move_s * 1e3))
    # The placement of the third step was made before the load changed.
    assert not rows[1].is_saving
    assert rows[1].pays_after is None


@pytest.mark.parametrize("seed", range(4))
def test_noise_does_not_pay(seed):
    rows = drift(drifting([a_load(8) + 0.2] * 7, seed), None, 48, 1, (NODES, GPUS), COSTS)
    assert len(rows) == 5
    assert not any(row.is_saving for row in rows)
    assert all(row.pays_after is None for row in rows)


@pytest.mark.parametrize("seed", range(3))
def test_no_more_is_saved_than_the_exchange_takes(seed):
    loads = np.random.default_rng(seed).gamma(0.1, 1, (3, 2, EXPERTS)) + 1e-9
    rows = drift(loads, [in_order()] * 2, 48, 1, (NODES, GPUS), COSTS)
    assert all(row.saved_s < COSTS.layer_s.sum() for row in rows)


@pytest.mark.parametrize("has_today", [True, False])
def test_a_step_saves_what_all_later_steps_save(has_today):
    loads = drifting([a_load(8) + 0.2, a_load(9) + 0.2] * 4)
    today = [in_order()] * 2 if has_today else None
    shape = 48, 1, (NODES, GPUS)
    kept = today or placed_by(loads[0], *shape)
    rows = drift(loads, today, *shape, COSTS)
    assert len(rows) == 7 - (not has_today)
    for row in rows:
        pairs = zip(loads[row.step - 1], kept, strict=True)
        anew = [placed_anew(load, old, *shape, None) for load, old in pairs]
        logical = [[one.logical.tolist() for one in kind] for kind in (kept, anew)]
        truth = oracle.drift_of(loads.tolist(), row.step, *logical, GPUS, COSTS.layer_s)
        assert (row.imbalance_kept, row.imbalance_anew, row.saved_s) == pytest.approx(truth[:3])
        assert row.error_s >= truth[3] * (1 - 1e-9)


def test_drift_needs_a_step_that_no_placement_is_made_from():
    loads = drifting([a_load(8) + 0.2] * 2)
    assert drift(loads, None, 48, 1, (NODES, GPUS), COSTS) == ()
    (row,) = drift(loads, [in_order()] * 2, 48, 1, (NODES, GPUS), COSTS)
    assert row.step == 1
    one_layer = replace(COSTS, layer_s=np.array([1e-3]))
    (row,) = drift(loads[:, :1], [in_order()], 48, 1, (NODES, GPUS), one_layer)
    assert row.error_s is row.is_saving is row.pays_after is None


def test_whole_iterations_pay():
    row = DriftStep(step=2, imbalance_kept=2.0, imbalance_anew=1.0, moves=1,
                    move_s=3.1e-3, saved_s=1e-3, error_s=0.0)  # fmt: skip
    assert [replace(row, move_s=move_s).pays_after for move_s in (1e-6, 3e-3, 3.1e-3)] == [
        1,
        3,
        4,
    ]


@pytest.mark.parametrize("most", [0, 3, 1000])
def test_a_step_moves_no_more_than_its_bound(most):
    loads = drifting([a_load(8) + 0.2, a_load(9) + 0.2, a_load(10) + 0.2])
    costs = replace(COSTS, most_moves=most)
    rows = drift(loads, None, 48, 1, (NODES, GPUS), costs)
    free = drift(loads, None, 48, 1, (NODES, GPUS), COSTS)
    assert all(row.moves <= most * 2 for row in rows)  # of two layers
    assert most < 1000 or rows[0].imbalance_anew <= free[0].imbalance_anew
    assert most or rows[0].imbalance_anew == rows[0].imbalance_kept
