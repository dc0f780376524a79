"""Test moves between placements: counted, bounded, and whether they pay."""

import json
from collections import Counter

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


def test_drift_says_when_a_new_placement_pays():
    first, second = a_load(8), a_load(9)
    placements = [place(first, 48, 1, NODES, GPUS)]
    costs = MoveCosts(expert_bytes=10**6, bytes_per_s=1e9, token_s=1e-6, copies=8000)
    loads = np.stack([first, second])[:, None]
    same, other = drift(loads, placements, 48, 1, (NODES, GPUS), costs)
    assert same.moves == 0
    assert same.saved_s == 0
    assert same.pays_after is None
    assert same.imbalance_kept == same.imbalance_anew
    old = heaviest(second, placements[0].logical, GPUS)
    anew = place(second, 48, 1, NODES, GPUS)
    new = heaviest(second, anew.logical, GPUS)
    assert other.imbalance_kept == pytest.approx(old / second.sum() * GPUS)
    assert other.saved_s == pytest.approx((old - new) / second.sum() * 8000 * 1e-6)
    most = moves_to(placements[0], relabeled(placements[0], anew, GPUS // NODES)).max()
    assert other.move_s == pytest.approx(most * 1e-3)
    assert other.pays_after == pytest.approx(other.move_s / other.saved_s)


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


def test_place_prints_the_drift_of_several_steps(workload, tmp_path):
    rows = ["step,layer,expert,tokens"]
    rows += [f"{step},0,{e},{1 + 9 * (e == step)}" for step in (3, 7) for e in range(8)]
    path = tmp_path / "loads.csv"
    path.write_text("\n".join(rows))
    words = ["place", workload, "--load", str(path), "--expert-bytes", "1000"]
    assert "pays after" in run(*words)
    steps = json.loads(run(*words, "--json"))["drift"]
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["imbalance_kept"] >= step["imbalance_anew"] - 1e-9 for step in steps)
    page = tmp_path / "page.html"
    run(*words, "--html", str(page))
    assert "drift-table" in page.read_text()


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
