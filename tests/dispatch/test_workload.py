"""Test workloads: drawing, storing, reading and errors."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastcomm.dispatch import routing, workload
from fastcomm.dispatch.options import WorkloadOptions
from fastcomm.dispatch.recipe import Recipe
from fastcomm.errors import FastcommError

SMALL = {
    "num_nodes": 2,
    "gpus_per_node": 2,
    "experts_per_gpu": 2,
    "seq_len": 10,
    "batch_size": 3,
    "topk": 2,
    "iter_num": 2,
    "num_layers": 2,
}
EACH = ("seed", "zipf", "bounded", "uniform", "gate", "bimodal")


def small(**words):
    return Recipe.of(**{**SMALL, **words})


@pytest.mark.parametrize("law", EACH)
def test_a_stored_workload_equals_the_drawn_one(tmp_path, law):
    recipe = small(law=law)
    files = workload.write(recipe, tmp_path / "w")
    assert [path.name for path in files] == [f"iter_{n}_requests.parquet" for n in (0, 1)]
    opened = workload.open_workload(tmp_path / "w", WorkloadOptions(num_nodes=2))
    assert opened.recipe == recipe
    stored, drawn = list(opened.layers()), list(workload.Workload.of(recipe).layers())
    assert len(stored) == len(drawn) == 4
    for ours, theirs in zip(stored, drawn, strict=True):
        assert np.array_equal(ours.src, theirs.src)
        assert np.array_equal(ours.expert, theirs.expert)
        assert all(len(set(row)) == 2 for row in ours.expert.tolist())
        assert ours.home.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_layers_with_few_or_no_tokens_are_stored(tmp_path, tokens):
    workload.write(small(seq_len=tokens, batch_size=1), tmp_path)
    layers = list(workload.open_workload(tmp_path).layers())
    assert [len(layer.src) for layer in layers] == [tokens] * 4
    assert [layer.expert.shape for layer in layers] == [(tokens, 2)] * 4


@pytest.mark.parametrize("law", ["zipf", "gate"])
def test_tokens_do_not_depend_on_the_number_of_threads(law):
    recipe = Recipe.of(iter_num=1, seq_len=40_000, law=law, shuffle=law == "zipf")
    one, three = (next(routing.draw(recipe, threads=count)) for count in (1, 3))
    assert np.array_equal(one[1], three[1])


def test_iterations_layers_and_seeds_differ():
    drawn = [tuple(map(tuple, expert)) for _, expert in routing.draw(small())]
    drawn += [tuple(map(tuple, expert)) for _, expert in routing.draw(small(seed=1))]
    assert len(set(drawn)) == len(drawn)


def test_the_shares_of_the_default_law_are_those_of_the_original_without_its_artefact():
    law = routing.folded_zipf(1.2, 64)
    assert law[[0, 1, 63]] == pytest.approx([0.1856, 0.0846, 0.0068], abs=5e-5)
    assert routing.folded_zipf(3.0, 64)[[0, 1]] == pytest.approx([0.8319, 0.1040], abs=5e-5)
    recipe = Recipe.of(seq_len=200_000, iter_num=1)
    _, expert = next(routing.draw(recipe))
    shares = np.bincount(expert.ravel(), minlength=64) / expert.size
    wanted = [0.140, 0.075, 0.051, 0.039, 0.032, 0.0080]
    assert shares[[0, 1, 2, 3, 4, 63]] == pytest.approx(wanted, abs=1e-3)


def test_resampled_experts_follow_the_law_and_given_weights_too():
    weights = [5.0, 3, 1, 1, 0, 0, 0, 0]
    recipe = small(law="popularity", distinct="resample", seq_len=50_000, topk=1)
    _, expert = next(routing.draw(recipe, popularity=weights))
    shares = np.bincount(expert.ravel(), minlength=8) / expert.size
    assert shares == pytest.approx(np.array(weights) / 10, abs=0.01)


def test_an_alias_table_has_the_shares_of_its_law():
    law = np.array([0.5, 0.25, 0.125, 0.125, 0.0])
    threshold, alias = routing.alias_table(law, np.int16)
    keep = threshold.astype(float) / 2**32
    found = keep.copy()
    np.add.at(found, alias, 1 - keep)
    assert found / 5 == pytest.approx(law)


def test_source_gpus_are_even_or_follow_hot_ranks():
    recipe = small(seq_len=5, batch_size=2)
    assert routing.source_gpus(recipe).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert routing.source_gpus(recipe, [7, 0, 1, 2]).tolist() == [0] * 7 + [2, 3, 3]
    with pytest.raises(FastcommError, match="expected 4 counts, one per GPU, of 10 tokens"):
        routing.source_gpus(recipe, [1, 2, 3, 3])


def test_hot_ranks_send_mostly_away():
    recipe = small(gpus_per_node=4, seq_len=400, batch_size=4, law="bimodal", iter_num=1)
    src, expert = next(routing.draw(recipe))
    away = (expert // 8 != (src // 4)[:, None]).any(axis=1)
    hot = src % 4 < 2
    assert 0.8 < away[hot].mean() < 1.0
    assert 0.0 < away[~hot].mean() < 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_nodes": 0}, "invalid num_nodes 0: expected a number from 1 to 65536"),
        (
            {"iter_num": 2000, "num_layers": 2000},
            "4000000 layers, more than the maximum of 1048576",
        ),
        ({"topk": 9}, "invalid topk 9: a token needs distinct experts, and there are only 8"),
        (
            {"zipf_alpha": 1.0},
            "invalid zipf_alpha 1.0: an unbounded Zipf law needs more than 1",
        ),
        (
            {"zipf_alpha": 0.9, "law": "seed"},
            "invalid zipf_alpha 0.9: an unbounded Zipf law needs more than 1",
        ),
        ({"zipf_alpha": float("nan")}, "invalid zipf_alpha nan"),
        ({"dtype": "int3"}, "invalid dtype 'int3': expected one of float16"),
        ({"law": "lottery"}, "invalid law 'lottery'"),
        ({"law": "gate", "expert_groups": 3}, "invalid expert_groups 3: the 8 experts"),
        ({"law": "gate", "top_groups": 5}, "invalid top_groups 5: there are 2 groups"),
        ({"law": "uniform", "top_groups": 2}, "top_groups needs law gate"),
        ({"distinct": "never"}, "invalid distinct 'never'"),
    ],
)
def test_an_invalid_recipe_is_refused(words, message):
    with pytest.raises(FastcommError, match=message):
        small(**words)


def test_any_exponent_from_0_has_a_bounded_law():
    law = routing.shares(small(law="bounded", zipf_alpha=0.0))
    assert law.tolist() == [1 / 8] * 8


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        ({"zipf_alpha": 30.0, "distinct": "resample"}, {}, "distinct `resample` would not end"),
        (
            {"law": "popularity"},
            {},
            "popularity has no numbers: expected one for each of 8",
        ),
        (
            {"law": "popularity"},
            {"popularity": [1] * 7},
            "popularity has 7 numbers: expected one",
        ),
        ({"law": "popularity"}, {"popularity": [-1] * 8}, "expected numbers from 0"),
        ({"law": "bimodal", "topk": 5}, {}, "a token can reach only 4 experts"),
        ({"law": "table"}, {}, "choose another to draw"),
    ],
)
def test_a_law_that_cannot_be_drawn_is_refused(words, more, message):
    with pytest.raises(FastcommError, match=message):
        next(workload.draw(small(**words), **more))


def test_a_shape_that_contradicts_the_file_is_an_error(tmp_path):
    workload.write(small(), tmp_path)
    with pytest.raises(FastcommError, match="num_layers is 2, but the option says 3"):
        workload.open_workload(tmp_path, WorkloadOptions(num_layers=3))
    with pytest.raises(FastcommError, match="already has a workload"):
        workload.write(small(), tmp_path)


def test_a_workload_with_a_lost_or_foreign_file_is_an_error(tmp_path):
    workload.write(small(), tmp_path / "a")
    workload.write(small(seed=5), tmp_path / "b")
    second = tmp_path / "a" / "iter_1_requests.parquet"
    second.write_bytes((tmp_path / "b" / second.name).read_bytes())
    with pytest.raises(FastcommError, match="belongs to another workload than iter_0"):
        workload.open_workload(tmp_path / "a")
    second.unlink()
    with pytest.raises(FastcommError, match="1 iterations, but its recipe has 2"):
        workload.open_workload(tmp_path / "a")
    (tmp_path / "a" / "iter_0_requests.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(FastcommError, match=r"iter_0_requests\.parquet"):
        workload.open_workload(tmp_path / "a")
    with pytest.raises(FastcommError, match="no workload; expected"):
        workload.open_workload(tmp_path / "nothing")


def test_a_file_with_other_rows_than_its_recipe_says_is_an_error(tmp_path):
    workload.write(small(), tmp_path)
    path = tmp_path / "iter_0_requests.parquet"
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(
        FastcommError, match="59 rows of 2 experts, but its recipe has 60 rows of 2"
    ):
        list(workload.open_workload(tmp_path).layers())


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


SHAPE = WorkloadOptions(num_nodes=2, gpus_per_node=2, experts_per_gpu=2)


def test_a_table_of_a_job_is_read_from_numpy_and_parquet(tmp_path):
    src, expert = np.array([0, 3, 1]), np.array([[0, 7], [1, 1], [2, 3]])
    path = npz(tmp_path / "a.npz", src_gpu=src, target_experts=expert)
    lists = pa.array(expert.tolist())
    pq.write_table(pa.table({"src": src, "topk_idx": lists}), tmp_path / "a.parquet")
    for each in (path, tmp_path / "a.parquet"):
        (layer,) = workload.open_workload(each, SHAPE).layers()
        assert layer.src.tolist() == src.tolist()
        assert layer.expert.tolist() == expert.tolist()
    deep = npz(tmp_path / "b.npz", src=src, expert=np.stack([expert, expert[::-1]]))
    opened = workload.open_workload(deep, SHAPE)
    assert opened.recipe.num_layers == 2
    assert [layer.expert[0].tolist() for layer in opened.layers()] == [[0, 7], [2, 3]]


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.parquet"])
def test_a_table_without_the_shape_of_the_cluster_is_refused(tmp_path, name):
    path, expert = tmp_path / name, np.array([[0], [1]])
    if name == "a.npz":
        npz(path, src_gpu=np.array([0, 1]), target_experts=expert)
    elif name == "a.npy":
        np.save(path, expert)
    else:
        pq.write_table(pa.table({"src": [0, 1], "expert": pa.array(expert.tolist())}), path)
    with pytest.raises(FastcommError, match=r"shape of the cluster; add --num-nodes, --gpus-"):
        workload.open_workload(path)
    with pytest.raises(FastcommError, match=r"add --experts-per-gpu$"):
        workload.open_workload(path, replace(SHAPE, experts_per_gpu=None))


def test_tokens_without_sources_are_distributed_evenly(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[0], [7], [3], [1]]))
    (layer,) = workload.open_workload(tmp_path / "a.npy", SHAPE).layers()
    assert layer.src.tolist() == [0, 1, 2, 3]
    assert layer.expert.tolist() == [[0], [7], [3], [1]]
    np.save(tmp_path / "b.npy", np.array([0.5]))
    with pytest.raises(FastcommError, match=r"b\.npy: .*not float64 \(1,\)"):
        workload.open_workload(tmp_path / "b.npy", SHAPE)


@pytest.mark.parametrize(
    ("src", "expert", "message"),
    [
        ([0, 4], [[0], [1]], "row 1: GPU 4 is not in 0 to 3"),
        ([0, 1], [[0, 1], [8, 1]], "row 1: expert 8 is not in 0 to 7"),
        ([0, 1], [[0, 1], [2, -1]], "row 1: expert -1 is not in 0 to 7"),
        ([0], [[0], [1]], r"sources \(1,\) and experts \(1, 2, 1\)"),
        ([0, 1], [0, 1], "expected"),
        ([0.5, 1], [[0], [1]], "expected whole numbers"),
    ],
)
def test_a_table_with_a_wrong_number_is_refused(tmp_path, src, expert, message):
    path = npz(tmp_path / "a.npz", src_gpu=np.array(src), target_experts=np.array(expert))
    with pytest.raises(FastcommError, match=message):
        workload.open_workload(path, SHAPE)


def test_a_table_that_is_damaged_or_pickled_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 no zip")
    pickled = np.array([None, []], object)
    npz(tmp_path / "b.npz", src_gpu=pickled, target_experts=pickled)
    npz(tmp_path / "c.npz", tokens=np.arange(3))
    for name in "abc":
        with pytest.raises(FastcommError, match=rf"{name}\.npz: "):
            workload.open_workload(tmp_path / f"{name}.npz", SHAPE)
    path = npz(tmp_path / "d.npz", src_gpu=np.array([0]), target_experts=np.array([[1, 2]]))
    with pytest.raises(FastcommError, match="topk is 2, but the option says 3"):
        workload.open_workload(path, replace(SHAPE, topk=3))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"src": [0]}, "it has columns src; expected"),
        ({"src": ["a"], "expert": [[1]]}, "column src is string; expected whole numbers"),
        ({"src": [0], "expert": [1]}, "column expert is int64; expected lists"),
        (
            {"src": [0, 1], "expert": [[1], [1, 2]]},
            "expected the same number of experts in every row",
        ),
        ({"src": [0, None], "expert": [[1], [1]]}, "column src"),
    ],
)
def test_a_parquet_table_of_another_form_is_refused(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(FastcommError, match=message):
        workload.open_workload(tmp_path / "a.parquet", SHAPE)
