"""Test models with experts: shapes, search and output."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from builders.isp_cases import A800, block_of, cases, ours, problem
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from oracles import isp as oracle

from fastcomm.cli.main import main
from fastcomm.errors import ConfigError
from fastcomm.isp import analysis as isp_search
from fastcomm.isp.explanation import time_terms
from fastcomm.isp.layer import by_node, cluster_collective, visited_nodes
from fastcomm.isp.price import evaluate
from fastcomm.isp.problem import MicroBatchRule
from fastcomm.isp.search import search
from fastcomm.isp.space import StrategyGrid, candidate_stages
from fastcomm.models import PRESETS, Experts, load

ASKED = ("--world-size", "64", "--seq-len", "4Ki", "--global-batch", "4Mi", "--cluster", "a100")
# What their makers say, in billions: all parameters, and those that a token meets.
SAID = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
}
CONFIGS = {
    "mixtral-8x7b": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "hidden_act": "silu",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "hidden_act": "silu",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_hidden_layers": 61,
        "intermediate_size": 18432,
        "vocab_size": 129280,
        "hidden_act": "silu",
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


def call(*arguments, code=0):
    done = CliRunner().invoke(main, ["isp", *arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("name", SAID)
def test_models_have_the_published_number_of_parameters(name):
    whole, active = SAID[name]
    assert PRESETS[name].parameters / 1e9 == pytest.approx(whole, rel=0.01)
    assert PRESETS[name].active / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_hugging_face_is_the_preset(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | {"name": name}))
    assert load(tmp_path) == PRESETS[name]


def test_a_mixture_of_a_toml_file_has_our_own_names(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text(
        "hidden = 1024\nheads = 8\nlayers = 6\nffn = 3072\nhead_dim = 64\ntied = true\n"
        "experts = 16\ntop_k = 2\nexpert_ffn = 512\nshared_ffn = 256\ndense_layers = 1\n"
    )
    model = load(path)
    assert model.experts == Experts(number=16, top_k=2, ffn=512, shared=256, dense_layers=1)
    attention = 1024 * 512 * 4
    dense = attention + 3 * 1024 * 3072 + 2 * 1024
    sparse = attention + 3 * 1024 * (256 + 16 * 512) + 16 * 1024 + 2 * 1024
    assert model.parameters == dense + 5 * sparse + 1024 * model.vocab + 1024


def test_a_group_alone_limits_no_nodes_and_one_expert_is_none(tmp_path):
    path = tmp_path / "config.json"
    said = CONFIGS["deepseek-v3"] | {"n_group": 1, "topk_group": 1}
    path.write_text(json.dumps(said))
    assert load(path).experts.node_limit == 0
    path.write_text(json.dumps(CONFIGS["mixtral-8x7b"] | {"num_local_experts": 1}))
    assert load(path).experts is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"decoder_sparse_step": 2}, "only the first layers may have no experts"),
        ({"mlp_only_layers": [3]}, "only the first layers may have no experts"),
        ({"num_experts_per_tok": 200}, "top_k is 200, but there are 128 experts"),
        ({"num_experts_per_tok": None}, "top_k or num_experts_per_tok"),
        ({"first_k_dense_replace": 48}, "at least one needs experts"),
        ({"hidden_act": "gelu"}, "a model with experts needs swiglu"),
        ({"moe_intermediate_size": -1}, "expected a whole number"),
        ({"num_experts": "many"}, "expected a whole number"),
    ],
)
def test_an_invalid_mixture_is_an_error(tmp_path, more, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3-30b-a3b"] | more))
    with pytest.raises(ConfigError, match=message):
        load(path)


NOT_PRICED = {
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 1,
    "moe_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 16384,
    "attn_layer_period": 8,
    "expert_layer_period": 2,
    "mamba_d_state": 16,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "attn_type_list": [0, 0, 1],
    "layers_block_type": ["mamba", "attention"],
    "index_topk": 2048,
    "parallel_attn_mlp_res": True,
    "ffn_config": {"moe_num_experts": 16},
}


@pytest.mark.parametrize("name", ["llama", "qwen3-30b-a3b"])
@pytest.mark.parametrize("key", NOT_PRICED)
def test_a_key_of_a_shape_that_is_not_priced_is_an_error_of_one_line(tmp_path, key, name):
    dense = {n: v for n, v in CONFIGS["mixtral-8x7b"].items() if "expert" not in n}
    base = CONFIGS.get(name, dense)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | {key: NOT_PRICED[key]}))
    with pytest.raises(ConfigError, match=rf"{key} .* is not understood") as error:
        load(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value).removeprefix(str(path))) < 200
    path.write_text(json.dumps(base | {key: None}))
    load(path)


def test_keys_that_leave_the_shape_alone_are_read(tmp_path):
    path = tmp_path / "config.json"
    more = {
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 8,
        "ep_size": 1,
        "interleave_moe_layer_step": 1,
        "norm_topk_prob": True,
        "layer_types": ["full_attention"] * 48,
        "attn_type_list": [1] * 48,  # MiniMax: 0 is linear attention
        "experts_per_token": 8,  # beside num_experts_per_tok, as in GPT-OSS
    }
    path.write_text(json.dumps(CONFIGS["qwen3-30b-a3b"] | more | {"name": "qwen3-30b-a3b"}))
    assert load(path) == PRESETS["qwen3-30b-a3b"]


def test_a_null_rank_of_queries_compresses_none(tmp_path):
    path = tmp_path / "config.json"
    lite = CONFIGS["deepseek-v3"] | {"q_lora_rank": None, "name": "lite"}
    path.write_text(json.dumps(lite))
    model = load(path)
    usual = PRESETS["deepseek-v3"]
    heads = usual.heads * (128 + 64)
    fewer = 1536 * 7168 + 1536 * heads - 7168 * heads
    assert model.latent.q_rank == 0
    assert usual.parameters - model.parameters == pytest.approx(61 * fewer)
    del lite["q_lora_rank"]
    path.write_text(json.dumps(lite))
    with pytest.raises(ConfigError, match="q_rank or q_lora_rank"):
        load(path)


def test_a_long_list_in_place_of_a_number_is_shortened(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3-30b-a3b"] | {"num_experts": [8] * 400}))
    with pytest.raises(ConfigError, match="expected a whole number") as error:
        load(path)
    assert len(str(error.value).removeprefix(str(path))) < 200


def test_a_token_visits_as_many_nodes_as_the_definition_says():
    for number, top_k, limit, nodes in ((256, 8, 4, 8), (64, 2, 0, 4)):
        mine = Experts(number=number, top_k=top_k, ffn=1, node_limit=limit)
        wanted = oracle.away({"E": number, "top": top_k, "limit": limit}, nodes)
        assert visited_nodes(mine, nodes) == pytest.approx(wanted)
    # A draw of the second: two experts of 64 on four nodes of 16.
    draws = np.random.default_rng(1).permuted(np.tile(np.arange(64), (4000, 1)), axis=1)[:, :2]
    nodes_seen = np.array([len(set(each)) for each in draws // 16])
    assert nodes_seen.mean() == pytest.approx(visited_nodes(mine, 4), rel=0.02)


@pytest.mark.parametrize("dense", [0, 1, 4, 5, 20])
def test_the_first_stage_of_each_composition_may_be_the_fullest(dense):
    # Of stages with equal layers the first has the most micro-batches in flight.
    for layers in range(max(8, dense + 1), 42):
        model = oracle.model(1024, 8, layers, experts=(8, 1, 512, 0, dense, 0))
        for pp in range(1, 9):
            first = {}
            for place in range(pp):
                composition = tuple(oracle.stage_layers(model, pp, place))
                first.setdefault(composition, place)
            assert set(first.values()) <= set(candidate_stages(pp, ours(model)))


@given(st.floats(1e5, 1e10), st.sampled_from([8, 16, 64]), st.floats(0.1, 1))
def test_once_a_node_is_never_slower_between_nodes_and_the_same_inside(volume, ranks, share):
    bare = cluster_collective(A800, "all_to_all", volume, ranks)
    once = by_node(A800, volume, ranks, share)
    assert once <= by_node(A800, volume, ranks, 1.0) * (1 + 1e-12)
    if ranks == 8:
        assert once == bare


# The smallest products of the curve were measured a little slower than somewhat larger ones.
LEVEL = replace(A800, gemm=replace(A800.gemm, rates=(8.6e12, *A800.gemm.rates[1:])))


def costs(made, **more):
    model, case, flash = made
    return evaluate(block_of(case), problem(ours(model), case[2], flash=flash, **more), LEVEL)


@given(cases(sparse=True), st.floats(1, 4))
def test_uneven_loads_are_never_faster_nor_smaller(made, imbalance):
    even, uneven = costs(made), costs(made, imbalance=imbalance)
    assert uneven["total_latency"] >= even["total_latency"] * (1 - 1e-12)
    assert uneven["total_mm_cost"] >= even["total_mm_cost"] * (1 - 1e-12)


@given(cases(sparse=True))
def test_overlapped_all_to_alls_are_never_slower(made):
    shown, hidden = costs(made), costs(made, overlap_experts=True)
    assert hidden["total_latency"] <= shown["total_latency"] * (1 + 1e-12)


@given(cases(sparse=True))
def test_memory_never_grows_with_the_spread_of_experts(made):
    model, (*rest, _, stages), flash = made
    spread = [n for n in (1, 2, 4, 8) if rest[1] // rest[3] % n == 0 and model["E"] % n == 0]
    used = [costs((model, (*rest, ep, stages), flash))["total_mm_cost"] for ep in spread]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(used))


@given(cases(sparse=True), st.sampled_from(["bw_intra", "bw_node", "hbm"]), st.floats(1.01, 8))
def test_more_bandwidth_is_never_slower_with_experts(made, link, times):
    model, case, flash = made
    asked = problem(ours(model), case[2], flash=flash)
    faster = replace(A800, **{link: getattr(A800, link) * times})
    before = evaluate(block_of(case), asked, A800)["total_latency"]
    assert evaluate(block_of(case), asked, faster)["total_latency"] <= before * (1 + 1e-12)


@given(cases(sparse=True))
def test_parts_of_a_step_add_up_to_it(made):
    model, case, flash = made
    asked = problem(ours(model), case[2], flash=flash)
    algo, _, seq_len, pp, sp, bsz, num, ck, (para, grads, os), ep, stages = case
    record = evaluate(block_of(case), asked, A800) | {
        "algo_type": algo,
        "seq_len": seq_len,
        "pp": pp,
        "sp": sp,
        "micro_bsz": bsz,
        "micro_num": num,
        "activation_ckpt": ck,
        "p_para": para,
        "p_grads": grads,
        "p_os": os,
        "ep": ep,
        "interleave": stages,
    }
    if "slowest_stage" in record:
        record["slowest_stage"] = int(record["slowest_stage"])
    step, *parts = time_terms(record, asked)
    assert sum(part.value for part in parts) == pytest.approx(step.value)


def test_one_gpu_with_experts_does_not_communicate():
    found = evaluate(
        StrategyGrid.one(world=1, algo="msp"), problem(PRESETS["mixtral-8x7b"]), A800
    )
    names = ("wp_comm_cost", "sp_comm_cost", "ep_comm_cost", "grad_sync", "param_sync", "p2p")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0)


def test_the_spread_is_searched_and_dense_records_have_it_too():
    said = {"world_size": 64, "seq_len": 4096, "global_batch": "4Mi", "cluster": "a100"}
    found = isp_search.search_strategies(model="mixtral-8x7b", **said)
    assert set(found.columns["ep"]) == {1, 2, 4, 8}
    assert found.best(1)[0]["ep"] == 8
    assert found.candidates == found.feasible + sum(found.rejected.values())
    assert found.rejected["experts"] > 0
    assert set(
        isp_search.search_strategies(model="mixtral-8x7b", ep_sizes="4", **said).columns["ep"]
    ) == {4}
    assert set(isp_search.search_strategies(model="7B", **said).columns["ep"]) == {1}
    with pytest.raises(ConfigError, match="has no experts"):
        isp_search.search_strategies(model="7B", ep_sizes="2", **said)
    with pytest.raises(ConfigError, match="nearest smaller degree is 4"):
        isp_search.search_strategies(model="mixtral-8x7b", ep_sizes="6", **said)
    with pytest.raises(ConfigError, match="imbalance"):
        isp_search.search_strategies(model="mixtral-8x7b", imbalance=0.5, **said)


def test_virtual_stages_are_searched_where_they_divide_a_stage():
    said = {"model": "7B", "world_size": 64, "seq_len": 4096, "global_batch": "1Mi"}
    found = isp_search.search_strategies(pp_sizes="4", sp_sizes="2", **said)
    assert set(found.columns["interleave"]) == {1, 2, 4, 8}
    plain = isp_search.search_strategies(pp_sizes="4", sp_sizes="2", interleave="1", **said)
    assert set(plain.columns["interleave"]) == {1}
    assert found.best(1)[0]["tgs"] > plain.best(1)[0]["tgs"]
    assert np.all(found.columns["micro_num"][found.columns["interleave"] > 1] % 4 == 0)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b"])
def test_the_winner_has_its_experts_in_a_trainer_s_arguments(name):
    asked = ("--model", name, *ASKED[2:], "--world-size", "256", "--memory", "200GiB")
    asked = (*asked, "--pp-sizes", "1,2", "--micro-bsz", "1", "--sp-sizes", "1")
    found = json.loads(call(*asked, "--json"))
    best = found["best"][0]
    assert found["chosen"]["ep_size"] == best["ep"]
    text = call(*asked, "--trainer-args", "megatron", "--dispatch", "nodes")
    assert "--moe-enable-deepep" in text
    megatron = call(*asked, "--trainer-args", "megatron")
    assert f"--expert-model-parallel-size {best['ep']} " in megatron
    assert "--moe-token-dispatcher-type alltoall" in megatron
    internevo = call(*asked, "--trainer-args", "internevo")
    assert f"expert=dict(size={best['ep']}, no_tp=True)" in internevo
    if name == "deepseek-v3":
        assert "--moe-layer-freq '([0]*3+[1]*58)'" in megatron
        assert "--multi-latent-attention --q-lora-rank 1536" in megatron
        assert "--moe-shared-expert-intermediate-size 2048" in megatron
    else:
        assert "--kv-channels 128" in megatron


def test_one_strategy_of_experts_is_explained():
    text = call("--model", "mixtral-8x7b", *ASKED, "--explain", "1")
    assert "exposed expert exchange" in text
    assert "On two GPUs" not in text
    assert "backward attention are not measured" in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--world-size", "12", "--pp-sizes", "8"), "pp 8 does not divide 12 (GPUs)"),
        (
            ("--world-size", "8", "--pp-sizes", "1,3"),
            "--pp-sizes: pp 3 does not divide 8 (GPUs",
        ),
        (("--world-size", "8,16", "--sp-sizes", "1,32"), "sp 32 does not divide 8 or 16 (GPUs"),
        (
            ("--world-size", "8", "--pp-sizes", "8", "--interleave", "8"),
            "does not divide 4 (layers",
        ),
        (("--world-size", "8", "--interleave", "3"), "it must divide the 32 layers"),
        (
            ("--world-size", "8", "--pp-sizes", "8", "--sp-sizes", "2"),
            "sp 2 does not divide 1 (GPUs of a",
        ),
        (("--world-size", "32", "--pp-sizes", "8", "--micro-num", "4"), "or --any-schedule"),
    ],
)
def test_invalid_degrees_are_errors_with_the_nearest_valid_ones(options, message):
    asked = ("--model", "7B", "--seq-len", "4Ki", "--global-batch", "1Mi", *options)
    # degrees that divide no world size are known before the search
    code = 2 if "it must divide" in message or "GPUs" in message else 1
    assert message in " ".join(call(*asked, code=code).split())


def test_a_layout_that_no_batch_suits_counts_as_if_one_did():
    batch = MicroBatchRule(least=1 << 20, most=1 << 20)
    found = search(problem(world=24, batch=batch), A800)
    assert found.rejected["batch"] > 0
    assert found.candidates == found.feasible + sum(found.rejected.values())
