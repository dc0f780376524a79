"""Test how near placements are to their bound, on a few cases of the page."""

import re
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from docs import placement_accuracy as accuracy
from fastcomm.dispatch import placement
from fastcomm.dispatch.placement import heaviest, least_load, place
from fastcomm_kernels import placement as kernels

CASES = list(accuracy.cases())


def test_half_of_the_cases_keep_groups_in_nodes():
    assert len(CASES) == 720
    assert sum(case.groups == accuracy.GROUPS for case in CASES) == 360
    assert {case.gpus for case in CASES} == {8, 16, 32, 64}
    assert min(len(case.load) for case in CASES) == 64


def test_placements_are_near_their_bound_and_never_worse_than_eplb():
    outcomes = [accuracy.measured(case) for case in CASES[::45]]
    ratios = [one.ratio for one in outcomes]
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) < 1.01
    assert max(one.ratio for one in outcomes if one.case.groups == 1) < 1.05
    assert not any(one.is_worse for one in outcomes)


def test_less_work_on_many_gpus_is_hardly_worse(monkeypatch):
    """256 experts and 32 more on 144 GPUs: as few slots as experts of a GPU allow."""
    random = np.random.default_rng(3)
    zipf = random.poisson(83_600 / np.arange(1, 257)).astype(float)
    loads = [zipf, *random.lognormal(0, 1, (4, 256))]
    compared = []
    search = kernels.restarted
    monkeypatch.setattr(
        kernels, "restarted", lambda *args: compared.append(args[-1]) or search(*args)
    )

    def ratios():
        compared.clear()
        return np.array(
            [
                heaviest(load, place(load, 288, 1, 18, 144).logical, 144)
                / least_load(load, 288, 144)
                for load in loads
            ]
        )

    little, work = ratios(), max(compared)
    monkeypatch.setattr(placement, "_MOST_GPUS", 144)
    much = ratios()
    assert work < max(compared) / 10
    assert (little <= much + 0.005).all()
    assert little.mean() <= much.mean() + 0.002


def test_every_division_of_groups_is_there_once():
    divisions = [frozenset(one) for one in accuracy._divisions(range(6), 2)]
    assert len(divisions) == len(set(divisions)) == 15
    assert all(sorted(sum(one, ())) == list(range(6)) for one in divisions)


@pytest.mark.parametrize("seed", range(4))
def test_the_provable_load_is_that_of_the_best_placement(seed):
    """All placements of 4 experts on 3 GPUs of 2 slots, two replicas of one on a GPU too."""
    load = np.random.default_rng(seed).gamma(0.5, 1, 4) + 0.05
    gpus = [*combinations_with_replacement(range(4), 2)]
    best = min(
        heaviest(load, np.ravel(slots), 3)
        for slots in product(gpus, repeat=3)
        if len(set(np.ravel(slots))) == 4
    )
    assert accuracy.relaxed(load, 6, 3) == pytest.approx(best, rel=1.1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_no_placement_is_lighter_than_the_provable_load(seed):
    """Twelve experts: four of them are a fluid."""
    load = np.random.default_rng(seed).gamma(0.3, 1, 12) + 0.01
    weight = heaviest(load, place(load, 16, 1, 1, 4).logical, 4)
    provable = accuracy.relaxed(load, 16, 4)
    assert least_load(load, 16, 4) <= provable * (1 + 1e-9)
    assert provable <= weight * (1 + 1e-9)


def test_the_bound_of_nodes_is_of_their_best_division():
    case = next(case for case in CASES if case.groups == 8 and case.nodes == 4)
    even = replace(case, load=np.ones(64))
    assert accuracy.bound(even) == 2.0  # of 64 experts on 32 GPUs
    hot = np.ones(64)
    hot[:16] = 9.0  # two groups, which the best division parts
    assert accuracy.bound(replace(case, load=hot)) == (8 * 9 + 8) / 8


def test_the_page_has_a_row_for_each_kind_of_load():
    page = accuracy.PAGE.read_text("utf-8")
    for kind in ("all", "all GPUs alike", *accuracy.KINDS):
        assert re.search(rf"^\| {re.escape(kind)} \| \d+ \| 1\.\d", page, re.MULTILINE)
