"""Test moves between placements: counted, bounded, and whether they pay."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.cli.main import main
from fastcomm.dispatch.moves import (
    MoveCosts,
    bounded,
    drift,
    moves_to,
    read_placements,
    relabeled,
    settled,
)
from fastcomm.dispatch.placement import Placement, heaviest, place
from fastcomm.errors import ConfigError

GPUS, NODES, EXPERTS = 8, 2, 32


def per_gpu(placement):
    """The experts of each GPU."""
    return [Counter(row) for row in placement.logical.reshape(placement.gpus, -1).tolist()]


def moved(before, after):
    """The definition: what a GPU has more than before."""
    pairs = zip(per_gpu(before), per_gpu(after), strict=True)
    return [sum((new - old).values()) for old, new in pairs]


def in_order():
    return Placement(logical=np.arange(EXPERTS), experts=EXPERTS, gpus=GPUS)


def a_load(seed):
    return np.random.default_rng(seed).gamma(0.5, 1, EXPERTS)


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_moves_are_what_a_gpu_did_not_have(first, second):
    old, new = (place(a_load(seed), 48, 1, NODES, GPUS) for seed in (first, second))
    assert moves_to(old, new).tolist() == moved(old, new)
    assert moves_to(old, old).sum() == 0


@given(st.integers(0, 1 << 20))
def test_renamed_gpus_have_the_same_experts_and_no_more_moves(seed):
    old, new = in_order(), place(a_load(seed), 48, 1, NODES, GPUS)
    renamed = relabeled(old, new, GPUS // NODES)
    assert sorted(map(sorted, per_gpu(renamed))) == sorted(map(sorted, per_gpu(new)))
    assert moves_to(old, renamed).sum() <= moves_to(old, new).sum()
    nodes = [sorted(Counter(row).items()) for row in new.logical.reshape(NODES, -1).tolist()]
    assert all(
        sorted(Counter(row).items()) in nodes
        for row in renamed.logical.reshape(NODES, -1).tolist()
    )


@pytest.mark.parametrize("groups", [1, 8])
@given(st.integers(0, 1 << 20), st.integers(0, 80))
def test_a_bounded_placement_keeps_the_bound_and_is_no_heavier(groups, seed, most):
    load = a_load(seed)
    before = place(a_load(seed + 1), 48, groups, NODES, GPUS)
    after = bounded(load, before, 48, groups, (NODES, GPUS), most)
    assert sum(moved(before, after)) <= most
    assert set(after.logical.tolist()) == set(range(EXPERTS))
    assert heaviest(load, after.logical, GPUS) <= heaviest(load, before.logical, GPUS) * (
        1 + 1e-9
    )


def test_more_moves_make_the_heaviest_gpu_lighter():
    load, before = a_load(3), place(a_load(4), 48, 1, NODES, GPUS)
    weights = [
        heaviest(load, bounded(load, before, 48, 1, (NODES, GPUS), most).logical, GPUS)
        for most in (0, 4, 12, 200)
    ]
    assert weights[0] == heaviest(load, before.logical, GPUS)
    assert weights[0] > weights[1] >= weights[2] >= weights[3]
    best = place(load, 48, 1, NODES, GPUS)
    assert weights[3] == pytest.approx(heaviest(load, best.logical, GPUS))


def test_new_replicas_are_moves():
    load = a_load(5)
    after = bounded(load, in_order(), 48, 1, (NODES, GPUS), 16)
    assert sum(moved(in_order(), after)) <= 16
    with pytest.raises(ConfigError, match="16 new replicas are more moves"):
        bounded(load, in_order(), 48, 1, (NODES, GPUS), 15)
    with pytest.raises(ConfigError, match="more than 32"):
        bounded(load, place(load, 48, 1, NODES, GPUS), 32, 1, (NODES, GPUS), 0)


def test_groups_of_experts_stay_in_their_node():
    load = a_load(6)
    before = place(load, 48, 8, NODES, GPUS)
    after = bounded(a_load(7), before, 48, 8, (NODES, GPUS), 10)
    for old, new in zip(
        before.logical.reshape(NODES, -1), after.logical.reshape(NODES, -1), strict=True
    ):
        assert set(new.tolist()) == set(old.tolist())


@pytest.mark.parametrize("groups", [1, 8])
@given(st.integers(0, 1 << 20), st.sampled_from([32, 48]))
def test_a_settled_placement_moves_few_experts_and_is_no_heavier(groups, seed, replicas):
    load, cluster = a_load(seed), (NODES, GPUS)
    before = place(a_load(seed + 1), replicas, groups, *cluster)
    best = place(load, replicas, groups, *cluster)
    after = settled(load, before, best, groups, cluster)
    width = GPUS if groups == 1 else GPUS // NODES
    assert sum(moved(before, after)) <= sum(moved(before, relabeled(before, best, width)))
    assert heaviest(load, after.logical, GPUS) <= heaviest(load, best.logical, GPUS) * (
        1 + 1e-9
    )
    assert (settled(load, after, best, groups, cluster).logical == after.logical).all()
    # What stays on its GPU stays in its slot.
    for old, new in zip(
        before.logical.reshape(GPUS, -1), after.logical.reshape(GPUS, -1), strict=True
    ):
        both = Counter(old.tolist()) & Counter(new.tolist())
        assert int((old == new).sum()) == both.total()


def test_experts_in_order_stay_where_a_load_is_even():
    load, cluster = np.ones(EXPERTS), (NODES, GPUS)
    after = settled(load, in_order(), place(load, EXPERTS, 1, *cluster), 1, cluster)
    assert (after.logical == in_order().logical).all()


COSTS = MoveCosts(expert_bytes=10**6, bytes_per_s=1e9, layer_s=np.array([2e-3, 1e-3]))


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
    assert rows[2].pays_after == pytest.approx(rows[2].move_s / rows[2].saved_s)
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


def test_drift_needs_a_step_that_no_placement_is_made_from():
    loads = drifting([a_load(8) + 0.2] * 2)
    assert drift(loads, None, 48, 1, (NODES, GPUS), COSTS) == ()
    (row,) = drift(loads, [in_order()] * 2, 48, 1, (NODES, GPUS), COSTS)
    assert row.step == 1
    one_layer = replace(COSTS, layer_s=np.array([1e-3]))
    (row,) = drift(loads[:, :1], [in_order()], 48, 1, (NODES, GPUS), one_layer)
    assert row.error_s is row.is_saving is row.pays_after is None


WORDS = "--num-nodes 2 --gpus-per-node 2 --seq-len 200 --batch-size 1 --iter-num 1 --topk 2"


def run(*words, code=0):
    done = CliRunner().invoke(main, ["dispatch", *words])
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moves") / "w"
    run("generate", *WORDS.split(), "-o", str(folder))
    return str(folder)


def test_place_counts_and_bounds_moves(workload, tmp_path):
    first = json.loads(run("place", workload, "--json", "--expert-bytes", "1000"))
    assert first["moves"]["bytes"] == 1000 * sum(first["moves"]["by_layer"]) > 0
    assert first["moves"]["latency_ns"] > 0
    path = tmp_path / "before.json"
    path.write_text(json.dumps(first))
    again = json.loads(run("place", workload, "--before", str(path), "--json"))
    assert again["moves"]["by_layer"] == [0]
    assert again["imbalance"]["before"] == again["imbalance"]["after"]
    assert again["moves"]["bytes"] is None
    bound = json.loads(run("place", workload, "--max-moves", "5", "--json"))
    assert sum(bound["moves"]["by_layer"]) <= 5


def load_table(path, steps):
    """A table of loads: in each step, the expert of its number is hot."""
    rows = ["step,layer,expert,tokens"]
    rows += [f"{at},0,{e},{1 + 9 * (e == at)}" for at in steps for e in range(8)]
    path.write_text("\n".join(rows))
    return str(path)


def test_place_prints_the_drift_of_several_steps(workload, tmp_path):
    path = load_table(tmp_path / "loads.csv", (3, 7, 6, 5))
    words = ["place", workload, "--load", path, "--expert-bytes", "1000"]
    text = run(*words)
    assert "pays after" in text
    assert "does not pay" in text
    steps = json.loads(run(*words, "--json"))["drift"]
    assert [step["step"] for step in steps] == [2, 3]
    page = tmp_path / "page.html"
    run(*words, "--html", str(page))
    assert "drift-table" in page.read_text()


def test_two_steps_are_too_few_to_measure_drift(workload, tmp_path):
    path = load_table(tmp_path / "loads.csv", (3, 7))
    assert "Drift: n/a (a third step" in run("place", workload, "--load", path)


def test_the_balance_of_a_load_is_that_of_the_load(workload, tmp_path):
    path = load_table(tmp_path / "loads.csv", (2,))
    words = "place", workload, "--load", path, "--replicas", "1"
    text, found = run(*words), json.loads(run(*words, "--json"))
    # Experts 2 and 3 share a GPU of four: 11 of 17 tokens.
    assert found["imbalance"]["of"] == "load"
    assert found["imbalance"]["before"] == pytest.approx(11 / 17 * 4)
    assert found["imbalance"]["after"] == pytest.approx(11 / 17 * 4)
    assert "times the mean of the measured load" in text
    assert json.loads(run("place", workload, "--json"))["imbalance"]["of"] == "workload"


@pytest.mark.parametrize(("text", "error"), [
    ("[]", "no layers with physical_to_logical"),
    ('{"layers": [3]}', "0 layers, but the workload has 1"),
    ('{"layers": [{"physical_to_logical": [0, 1]}]}', "2 replicas; expected all 8 experts"),
    ('{"physical_to_logical_map": [[0,1,2,3,4,5,6,"a"]]}', "is not an expert"),
    ('{"physical_to_logical_map": [[0,1,2,3,4,5,6,8]]}', "8 is not an expert"),
    ('{"physical_to_logical_map": 7}', "no layers"),
    ("{", "not JSON"),
])  # fmt: skip
def test_a_file_without_placements_is_an_error(tmp_path, text, error):
    path = tmp_path / "before.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_placements(path, 1, 8, 4)


def test_the_maps_of_sglang_are_placements(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[1, 0, 3, 2, 5, 4, 7, 6]]}))
    (placement,) = read_placements(path, 1, 8, 4)
    assert placement.logical.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
