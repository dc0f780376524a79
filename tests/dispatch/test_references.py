"""Test schedules against every number of the original simulators."""

import json

import numpy as np
import pytest
from builders.shared_data import shared

from fastcomm.compat import dispatch as original
from fastcomm.dispatch.recipe import Recipe
from fastcomm.dispatch.routing import layers_of_seed
from fastcomm.dispatch.traffic import LayerTokens, Traffic, largest_sum

NAMES = ("n4g8_default", "n8g8", "n3g4_remainder", "n2g2_tiny", "n4g8_alpha3")


@pytest.fixture(scope="module", params=NAMES)
def reference(request):
    """What the original printed and saved, and our layers from its seed alone."""
    path = shared(f"dispatch/{request.param}.json")
    said = json.loads(path.read_text())
    config = dict(said["config"])
    bandwidths = {name: config.pop(name) for name in ("bw_inter", "bw_intra")}
    recipe = Recipe.of(topk=config.pop("top_k"), seed=said["seed"], law="seed", **config)
    links = original.Links(
        token_kb=recipe.token_bytes / 1024,
        inter_kb_per_s=bandwidths["bw_inter"] * 1024 * 1024,
        intra_kb_per_s=bandwidths["bw_intra"] * 1024 * 1024,
    )
    assert links.token_kb == said["token_size_kb"]
    home = (np.arange(recipe.experts) // recipe.experts_per_gpu).astype(np.int32)
    made = [
        Traffic.of(LayerTokens(src, expert, home, recipe.num_nodes, recipe.gpus_per_node))
        for src, expert in layers_of_seed(recipe)
    ]
    return said, made, links, np.load(path.with_suffix(".npz"), allow_pickle=False)


def test_the_seed_alone_gives_the_same_tokens(reference):
    said, made, _, arrays = reference
    for number in range(said["layers_saved"]):
        layer = made[number].layer
        assert np.array_equal(layer.src, arrays[f"src_gpu_{number}"])
        theirs = np.sort(arrays[f"target_experts_{number}"], axis=1)
        assert np.array_equal(np.sort(layer.expert, axis=1), theirs)


def test_deepep_is_equal_in_every_count_and_bit(reference):
    said, made, links, arrays = reference
    total = 0.0
    for number, (traffic, layer) in enumerate(zip(made, said["layers"], strict=True)):
        found = original.deepep(traffic, links)
        total += found.total_s
        assert {
            "layer_time": found.total_s,
            "inter_kb": found.inter_kb,
            "max_inter": found.counts[:, :2].max(),
            "max_intra": found.counts[:, 2:].max(),
        } == layer["deepep"]
        if number < said["layers_saved"]:
            assert np.array_equal(found.counts, arrays[f"deepep_counts_{number}"])
    assert total == said["total_deepep"]


def test_fast_is_equal_in_every_matrix_stage_and_bit(reference):
    said, made, links, arrays = reference
    total = 0.0
    for number, (traffic, layer) in enumerate(zip(made, said["layers"], strict=True)):
        found = original.fast(traffic, links)
        total += found.total_s
        assert {
            "total": found.total_s,
            "inter_traffic_kb": found.inter_kb,
            "inter_tokens": found.remote.sum(),
            "balance": found.balance_s,
            "inter": found.inter_s,
            "redist": found.redist_s,
            "max_balance": found.max_balance,
            "max_load": largest_sum(found.servers),
            "n_stages": len(found.weights),
            "last_idx": found.last,
            "last_max": found.last_max,
        } == layer["fast"]
        if number < said["layers_saved"]:
            for name, matrix in {
                "gpu_matrix": found.remote,
                "raw_send": found.raw_send,
                "node_matrix": found.servers,
                "padded": found.padded,
                "diff": found.padded - found.servers,
                "perms": found.permutations,
                "alphas": found.weights,
                "remaining_padding": found.remaining,
            }.items():
                assert np.array_equal(matrix, arrays[f"fast_{name}_{number}"]), name
    assert total == said["total_fast"]
