"""Test the expert all-to-all of a model: kernel families beside schedules."""

import json
from functools import cache
from importlib import resources

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from oracles import exchange as oracle

from fastcomm.cli.main import main
from fastcomm.dispatch import page
from fastcomm.dispatch.analysis import terms_for
from fastcomm.dispatch.model_exchange import compare_kernels
from fastcomm.dispatch.options import DispatchOptions, ModelOptions, WorkloadOptions
from fastcomm.dispatch.recipe import Recipe
from fastcomm.errors import ConfigError
from fastcomm.hardware.clusters import load
from fastcomm.hardware.expert_exchange import FAMILIES
from fastcomm.hardware.gpus import gpu

# DeepEP's README: GB/s of dispatch and combine, 4096 tokens, hidden 7168, top 8 of 256.
PUBLISHED = {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}


def compared(ep, *, schedules=("deepep",), network=None, shape=None, **options):
    options = {"model": "deepseek-v3", "ep": ep, **options}
    network = DispatchOptions(cluster="dgx-h800") if network is None else network
    shape = WorkloadOptions() if shape is None else shape
    return compare_kernels(ModelOptions(**options), shape, network, schedules)


def of(result, family):
    return next(one for one in result.kernels if one.family == family)


@pytest.mark.parametrize("ep", PUBLISHED)
def test_deepep_has_the_bandwidths_that_its_authors_publish(ep):
    nodes = ep // 8  # its benchmark has a group of experts on each node
    routed = WorkloadOptions(law="gate", expert_groups=nodes, top_groups=min(nodes, 4))
    deepep = of(compared(ep, shape=routed), "deepep")
    for phase, published in zip(deepep.phases.values(), PUBLISHED[ep], strict=True):
        assert phase.bytes_per_s / 1e9 == pytest.approx(published, rel=0.1)


def test_a_step_is_both_passes_of_all_layers_with_experts():
    deepep = of(compared(16, tokens_per_gpu=256), "deepep")
    assert deepep.step_s == pytest.approx(2 * 58 * deepep.layer_s)
    assert deepep.forward_s == pytest.approx(58 * deepep.layer_s)
    assert deepep.layer_s == sum(
        phase.seconds + phase.notify_s for phase in deepep.phases.values()
    )
    assert of(compared(16, tokens_per_gpu=256), "deepep-ll").step_s is None


def test_no_kernel_is_faster_than_the_bound_of_its_bytes():
    for ep, tokens in ((8, 4096), (32, 512)):
        result = compared(ep, tokens_per_gpu=tokens)
        assert all(one.times_optimal > 0.95 for one in result.kernels)
        assert [one.layer_s for one in result.kernels] == sorted(
            one.layer_s for one in result.kernels
        )


def test_kernels_that_a_gpu_cannot_run_are_not_priced():
    old = compared(8, tokens_per_gpu=256, network=DispatchOptions(cluster="dgx-a100"))
    assert [one.family for one in old.kernels] == ["nccl"]
    assert old.unpriced["deepep-v2"] == (
        "deepep-v2: needs compute capability 9.0, and A100-SXM4-80GB has 8.0"
    )
    assert old.unpriced["trtllm"] == "trtllm: runs on GB200 and GB300 only"
    fp8 = compared(8, network=DispatchOptions(cluster="dgx-a100"), dispatch_precision="fp8")
    assert fp8.fastest is None
    assert fp8.unpriced["nccl"] == "nccl: A100-SXM4-80GB has no fp8"
    assert "trtllm" in compared(8, tokens_per_gpu=256).unpriced


def test_constants_of_an_unrelated_gpu_are_an_extrapolation():
    old = compared(8, tokens_per_gpu=4096, network=DispatchOptions(cluster="dgx-a100"))
    nccl = of(old, "nccl")
    assert nccl.measured_on == "h100"
    assert nccl.extrapolated == "constants of H100-SXM"
    related = compared(8, tokens_per_gpu=4096, network=DispatchOptions(cluster="dgx-h200"))
    assert of(related, "deepep").extrapolated == ""


def test_one_rank_sends_nothing(tmp_path):
    words = ("--model", "deepseek-v3", "--ep", "1", "--cluster", "h100")
    words = (*words, "--tokens-per-gpu", "16", "--schedules", "deepep,fast")
    text = run(*words, "--html", str(tmp_path / "page.html"))
    assert text.startswith("Fastest kernels: n/a\n")
    assert "nothing is sent; the fullest rank" in text
    assert "nccl: n/a (nothing is sent)" in text
    assert "GPU 0" not in text
    assert "No kernels are priced." in (tmp_path / "page.html").read_text()
    document = json.loads(run(*words, "--json"))
    assert document["kernels"] == []
    assert document["bound_limit"] is None


def test_a_skewed_routing_makes_all_kernels_slower():
    even = compared(16, tokens_per_gpu=1024)
    skewed = compared(
        16, tokens_per_gpu=1024, shape=WorkloadOptions(law="zipf", zipf_alpha=1.2)
    )
    assert skewed.fullest > 2 > even.fullest
    for family in ("deepep", "hybridep", "nccl"):
        assert of(skewed, family).layer_s > of(even, family).layer_s


@pytest.mark.parametrize("routing", [
    {"law": "zipf", "zipf_alpha": 1.2},
    {"law": "bounded", "zipf_alpha": 0.5},
    {"law": "bimodal"},
])  # fmt: skip
def test_a_nic_receives_a_token_of_another_node_once_however_skewed_the_routing(routing):
    result = compared(64, tokens_per_gpu=512, shape=WorkloadOptions(**routing))
    simulated = result.simulation.strategies["deepep"].total_s
    most = 56 * 512 / 8 * 7392 / 50e9  # all tokens of the other nodes, by eight NICs
    for family in ("deepep-v2", "hybridep"):
        phase = of(result, family).phases["dispatch"]
        size = 1 if family == "deepep-v2" else 14336 / 7392  # hybridep sends bf16
        assert phase.limit == "NVLink" or phase.seconds < 50e-6 + 1.15 * most * size
    assert of(result, "deepep").phases["dispatch"].seconds > 0.9 * simulated


@pytest.mark.parametrize("cluster", ["dgx-h800", "dgx-h100", "dgx-b200"])
def test_no_kernel_is_faster_with_more_ranks_or_domains(cluster):
    network = DispatchOptions(cluster=cluster)
    layers = {ep: compared(ep, tokens_per_gpu=1024, network=network) for ep in (4, 8, 16, 32)}
    for family in FAMILIES.keys() - {"trtllm"}:
        times = [of(result, family).layer_s for result in layers.values()]
        assert times == sorted(times), family


def test_a_shape_outside_of_the_measurements_is_extrapolated():
    rack = compared(64, tokens_per_gpu=2048, network=DispatchOptions(cluster="gb200-nvl72"))
    assert of(rack, "deepep").extrapolated == "64 ranks, measured: 4"
    assert of(rack, "deepep-ll").extrapolated == (
        "64 ranks, measured: 4; 2048 tokens, measured: 1 to 1024"
    )
    assert of(rack, "trtllm").extrapolated == ""
    node = compared(16, tokens_per_gpu=4096, network=DispatchOptions(cluster="dgx-h100"))
    assert of(node, "deepep").extrapolated == of(node, "hybridep").extrapolated == ""
    assert of(node, "deepep").to_dict()["extrapolated"] is None
    assert node.extrapolated() == [
        "deepep-v2: extrapolated (4096 tokens, measured: 8192; 24 SMs, measured: 6 to 12)",
        "deepep-ll: extrapolated (4096 tokens, measured: 2 to 256)",
    ]


@pytest.mark.parametrize(
    ("sms", "is_outside"), [(2, True), (4, False), (24, False), (25, True)]
)
def test_sms_outside_of_the_measurements_are_extrapolated(sms, is_outside):
    node = compared(8, tokens_per_gpu=4096, sms=sms)
    reason = f"{sms} SMs, measured: 4 to 24" if is_outside else ""
    assert of(node, "deepep").extrapolated == reason
    assert of(node, "hybridep").extrapolated == ""  # without a number of SMs


@pytest.mark.parametrize("law", ["uniform", "gate"])
def test_kernels_have_the_routing_of_the_bound(law):
    result = compared(64, tokens_per_gpu=512, shape=WorkloadOptions(law=law))
    assert all(one.times_optimal > 1 for one in result.kernels)
    phase = of(result, "deepep").phases["dispatch"]
    nodes = phase.bytes_per_s * phase.seconds / (512 * 7392)
    assert nodes == pytest.approx({"uniform": 8 * (1 - (7 / 8) ** 8), "gate": 4}[law], rel=0.02)


GATE = {"n_group": 8, "topk_group": 4}
H100 = DispatchOptions(cluster="h100")


def config(path, **keys):
    """A configuration of DeepSeek-V3's shape with other keys."""
    values = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    path.write_text(json.dumps({**values, **GATE, **keys}))
    return path


@cache
def draws_of(*gate):
    rng = np.random.default_rng(0)
    orders = [rng.permutation(256).tolist() for _ in range(2000)]
    return list(oracle.gate_draws(256, *gate, 8, orders=orders))


@pytest.mark.parametrize("ep", [16, 32, 64, 128])
@pytest.mark.parametrize("gate", [(8, 4), (8, 2), (16, 3)])
def test_nodes_of_a_token_are_those_of_the_gate_of_the_model(tmp_path, ep, gate):
    path = config(tmp_path / "config.json", n_group=gate[0], topk_group=gate[1])
    result = compared(ep, model=path, tokens_per_gpu=512, network=H100)
    nodes = ep // 8
    far = oracle.mean_places(draws_of(*gate), 256, nodes) * (1 - 1 / nodes)
    size = result.simulation.terms.token_bytes
    sent = result.simulation.strategies["deepep"].to_dict()["inter_node_bytes"]
    assert sent / (512 * ep * size) == pytest.approx(far, rel=0.02)
    phase = of(result, "hybridep").phases["dispatch"]
    counted = phase.bytes_per_s * phase.seconds / (512 * 14336)
    assert counted * (1 - 1 / nodes) == pytest.approx(far, rel=0.02)


def test_the_tokens_between_ranks_are_all_copies():
    result = compared(8, tokens_per_gpu=128)
    assert (result.copies.sum(axis=1) == 128 * 8).all()
    by_rank = result.copies.sum(axis=0)
    assert result.fullest == pytest.approx(by_rank.max() / by_rank.mean())


def test_precision_and_sms_are_options():
    usual = of(compared(8, tokens_per_gpu=2048), "deepep").phases["dispatch"]
    whole = of(compared(8, tokens_per_gpu=2048, dispatch_precision="bf16"), "deepep")
    assert whole.phases["dispatch"].seconds > 1.2 * usual.seconds
    more = of(compared(8, tokens_per_gpu=2048, sms=64), "deepep")
    assert more.phases["dispatch"].seconds < usual.seconds


def test_ranks_of_one_nvlink_domain_use_no_nic():
    result = compared(64, tokens_per_gpu=512, network=DispatchOptions(cluster="gb200-nvl72"))
    assert result.layer.domains == 1
    assert {one.family for one in result.kernels} == set(FAMILIES)
    assert {phase.limit for one in result.kernels for phase in one.phases.values()} <= {
        "SMs", "NVLink"
    }  # fmt: skip
    assert not result.unpriced


@pytest.mark.parametrize(("options", "error"), [
    ({"model": "llama3-8b"}, "has no experts"),
    ({"ep": None}, "--model needs --ep"),
    ({"ep": 48}, "cannot be spread evenly"),
    ({"model": "unheard-of"}, "unknown model"),
    ({"sms": 133}, "sms: 133 SMs, but H800-SXM has 132"),
])  # fmt: skip
def test_a_model_that_cannot_be_spread_is_an_error(options, error):
    with pytest.raises(ConfigError, match=error):
        compared(**{"ep": 8, **options})


def test_ranks_that_fill_no_nodes_are_an_error():
    with pytest.raises(ConfigError, match="expected a multiple of the 72 GPUs"):
        compared(128, network=DispatchOptions(cluster="gb200-nvl72"))
    with pytest.raises(ConfigError, match="no key gpu"):
        compared(8, network=DispatchOptions(cluster="a800"))


def run(*words, code=0):
    done = CliRunner().invoke(main, ["dispatch", "compare", *words])
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


SMALL = ("--model", "deepseek-v3", "--ep", "16", "--tokens-per-gpu", "64", "--cluster", "h100")


def test_the_command_prints_kernels_and_the_schedules_that_are_chosen(tmp_path):
    out = run(*SMALL, "--schedules", "deepep,fast", "-o", str(tmp_path))
    assert out.startswith("Fastest kernels: ")
    assert "trtllm: n/a (no measured constants across NVLink domains)" in out
    assert "multicast-balanced" not in out
    rows = pq.read_table(tmp_path / "dispatch.parquet").to_pylist()
    document = json.loads((tmp_path / "dispatch.json").read_text())
    simulated = pq.read_table(tmp_path / "schedules.parquet").to_pylist()
    assert [row["strategy"] for row in simulated] == ["deepep", "fast"]
    assert len(rows) == 2 * len(document["kernels"])
    assert set(document["schedules"]["strategies"]) == {"deepep", "fast"}
    assert np.array(document["rank_pair_tokens"]).sum() == 16 * 64 * 8


def test_a_row_has_the_precision_that_it_was_measured_in():
    rows = [line.split()[:2] for line in run(*SMALL).splitlines() if "GB/s" in line]
    by_family = dict(rows)
    assert by_family["deepep"] == "fp8"
    assert by_family["nccl"] == "bf16"
    same = run(*SMALL, "--dispatch-precision", "bf16")
    assert " fp8 " not in same


def test_bars_of_the_page_are_the_times_of_its_table():
    result = compared(64, tokens_per_gpu=512)
    chart = page.kernels(result).sections[0].blocks[0].views[0].chart
    bars = {part.name: np.array(part.values) for part in chart.parts}
    assert list(bars) == ["dispatch", "combine", "waits"]
    for name in ("dispatch", "combine"):
        times = [one.phases[name].seconds * 1e3 for one in result.kernels]
        assert bars[name].tolist() == pytest.approx(times)
    assert bars["waits"].max() > 0
    layers = [one.layer_s * 1e3 for one in result.kernels]
    assert sum(bars.values()).tolist() == pytest.approx(layers)


def test_schedules_are_an_option_of_compare_without_a_model():
    out = run("--num-nodes", "1", "--seq-len", "8", "--iter-num", "1", "--schedules", "direct")
    assert "direct" in out
    assert "spreadout" not in out


@pytest.mark.parametrize(("words", "error"), [
    ((*SMALL, "--num-nodes", "2"), "--model has no effect with --num-nodes"),
    ((*SMALL, "."), "--model has no effect with WORKLOAD"),
    (("--ep", "4"), "--ep needs --model"),
])  # fmt: skip
def test_options_that_contradict_a_model_are_errors(words, error):
    assert error in run(*words, code=2)


@pytest.mark.parametrize("cluster", ["h100", "dgx-b200", "dgx-a100"])
def test_a_cluster_has_one_bandwidth_inside_a_node(cluster):
    network = DispatchOptions(cluster=cluster)
    of_model = compared(8, tokens_per_gpu=16, network=network).simulation.terms
    recipe = Recipe.of(num_nodes=1, gpus_per_node=8)
    of_workload = terms_for(recipe, network)
    assert of_model.links == of_workload.links
    assert of_workload.links.intra == gpu(load(cluster).gpu).nvlink


def test_the_bandwidths_of_a_file_are_those_of_its_text(tmp_path):
    path = tmp_path / "mine.toml"
    source = resources.files("fastcomm.hardware") / "data" / "dgx-h100.toml"
    path.write_text(source.read_text("utf-8").replace("336GB/s", "300GB/s"))
    network = DispatchOptions(cluster=path)
    assert compared(8, tokens_per_gpu=16, network=network).simulation.terms.links.intra == 300e9
