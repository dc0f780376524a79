"""What a layer of experts costs: attention, GEMMs, element-wise work, host, and routing."""

import json
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
from builders.commands import invoke
from builders.plan_inputs import HEAD, PLAN, schema, table

from fastcomm.errors import ConfigError
from fastcomm.hardware.gpus import gpu
from fastcomm.models import load
from fastcomm.planning.attention import attention_times, is_fused
from fastcomm.planning.constants import Constants
from fastcomm.planning.expected import expected_error
from fastcomm.planning.experts import (
    expert_elementwise,
    expert_gemms,
    fullest_range,
    fullest_share,
    host_times,
    launch_time,
    waiting_time,
)
from fastcomm.planning.job import Plan, with_strategy
from fastcomm.planning.launch import launch
from fastcomm.planning.measured_runs import load_runs
from fastcomm.planning.price import layer_times, price_plan
from fastcomm.planning.result import shortcuts, strategy_text
from fastcomm.planning.search import rank

QWEN = load("qwen3-30b-a3b")
DEEPSEEK = load("deepseek-v3")
LLAMA = load("llama3-8b")
LAYER = replace(PLAN, model=QWEN, seq_len=4096, ep=8)  # H100, 32768 rows of 16 experts
RACK = {"domain": 72, "node_bytes_per_s": 3.6e12, "year": 2026.5}


def oss():
    """A model with biases, clamps and sinks, as GPT-OSS."""
    experts = replace(QWEN.experts, has_bias=True)
    return replace(QWEN, experts=experts, has_sinks=True, window=128)


@pytest.mark.parametrize(
    ("name", "model", "milliseconds"),
    [
        # cudnn-frontend 3929da2, benchmark/sdpa_benchmark_training: causal, 4096 tokens.
        ("gb200", "deepseek-v3", (0.49, 1.69)),
        ("gb300", "deepseek-v3", (0.43, 1.56)),
        ("gb200", "llama3-70b", (0.20, 0.60)),
        ("gb300", "llama3-70b", (0.16, 0.55)),
    ],
)
def test_attention_on_blackwell_takes_what_was_measured(name, model, milliseconds):
    plan = replace(PLAN, gpu=name, model=load(model), seq_len=4096, **RACK)
    assert [1e3 * time for time in attention_times(plan)] == pytest.approx(milliseconds)
    # DeepSeek-V3 takes 3.6 to 3.7 times as long for twice the tokens.
    if model == "deepseek-v3":
        longer = attention_times(replace(plan, seq_len=8192))
        assert sum(longer) / sum(attention_times(plan)) == pytest.approx(3.65, rel=0.05)


def test_attention_in_fp8_is_faster_for_wide_heads_only():
    plan = replace(PLAN, gpu="gb300", model=DEEPSEEK, seq_len=4096, **RACK)
    narrow = replace(plan, model=load("llama3-70b"))
    wide = sum(attention_times(replace(plan, fp8_attention=True)))
    assert wide == pytest.approx(1.45e-3)  # measured
    assert attention_times(replace(narrow, fp8_attention=True)) == attention_times(narrow)


def test_attention_without_a_fused_kernel_moves_all_scores():
    plan = replace(PLAN, gpu="b200", model=oss(), seq_len=4096, micro_batch=4, year=2025.9)
    assert not is_fused(plan)
    assert is_fused(replace(plan, year=2026.1))
    assert is_fused(replace(plan, gpu="h100"))
    heads, seq, width = 32, 4096, 128
    scores = 4 * heads * seq**2
    # 3 x 2 b a S^2 (d_qk + d_v) FLOPs at 0.45 of the peak, and 26 b a S^2 bytes.
    seconds = 6 * scores * 2 * width / (0.45 * 2.25e15) + 26 * scores / gpu("b200").hbm
    assert sum(attention_times(plan)) == pytest.approx(seconds)


def test_the_backward_pass_in_fp8_ignores_the_window():
    plan = replace(PLAN, gpu="b200", model=replace(oss(), has_sinks=False), **RACK)
    plain, eight = (attention_times(replace(plan, fp8_attention=fp8)) for fp8 in (False, True))
    assert eight[0] == plain[0]
    assert eight[1] == pytest.approx(plain[1] * 2 / (1 + 256 / plan.seq_len))


def test_grouped_gemms_lose_speed_with_few_rows_of_an_expert():
    # Fused layers of experts, NVIDIA AIConfigurator (Apache-2.0): over one GEMM of all rows,
    # 1.2 times at 1024 to 2047 rows of an expert, 2.5 at 128 to 255, on H100 and B200.
    constants, times = Constants(), []
    for number in (8, 128):  # rows of an expert: 4096 and 256
        experts = replace(QWEN.experts, number=number)
        times.append(expert_gemms(replace(LAYER, ep=1), constants, experts)[0])
    assert times[1] / times[0] == pytest.approx((1 + 200 / 256) / (1 + 200 / 4096))


def test_gradients_of_experts_are_accumulated_each_micro_batch():
    constants, experts = Constants(), DEEPSEEK.experts
    plan = replace(LAYER, model=DEEPSEEK, gpu="b200", ep=8, trainer="nemo")
    narrow, wide = (
        expert_gemms(replace(plan, gradients=width), constants, experts)[1]
        for width in ("bf16", "fp32")
    )
    weights = 32 * 3 * 7168 * 2048
    assert wide - narrow == pytest.approx(2 * (4 - 2) * weights / gpu("b200").hbm)


def test_element_wise_work_of_experts_is_counted_by_the_byte():
    constants = Constants()
    rows, hidden, inner = 32768, 2048, 768
    wide = 1 / (constants.copy_share * gpu("h100").hbm)
    slow = 1 / (constants.activation_share * gpu("h100").hbm)
    plain = expert_elementwise(LAYER, constants, QWEN.experts)
    assert plain == pytest.approx(
        [rows * (8 * hidden * wide + moved * inner * slow) for moved in (6, 12)]
    )
    biased = expert_elementwise(LAYER, constants, oss().experts)
    more = [rows * (b * hidden * wide + c * inner * slow) for b, c in ((24, 22), (40, 34))]
    assert biased == pytest.approx([a + b for a, b in zip(plain, more, strict=True)])


def test_fused_experts_leave_the_permutation():
    constants, experts = Constants(), oss().experts
    plan = replace(LAYER, model=oss(), gpu="b200", precision="mxfp8", fused_experts=True)
    times = expert_elementwise(plan, constants, experts)
    moved = 8 * 32768 * 2048 / (constants.copy_share * gpu("b200").hbm)
    assert times == pytest.approx((moved, moved))
    apart = replace(plan, fused_experts=False)
    assert sum(expert_gemms(plan, constants, experts)) < sum(
        expert_gemms(apart, constants, experts)
    )


def test_the_host_has_two_halves_that_graphs_remove():
    constants, experts = Constants(), QWEN.experts
    once = constants.host_layer_s
    usual = constants.host_experts * once
    before, after = 0.75 * usual, usual / 4 + constants.host_expert * 16 * once
    assert host_times(LAYER, constants, experts) == pytest.approx((before, after))
    for graphs, left in {"attn": (usual / 4, after), "attn+moe_router": (0, after)}.items():
        plan = replace(LAYER, graphs=graphs)
        assert host_times(plan, constants, experts) == pytest.approx(left)
    assert host_times(replace(LAYER, graphs="full"), constants, experts) == (0, 0)
    rack = replace(LAYER, gpu="gb300", dispatch="hybridep overlapped")
    assert host_times(rack, constants, experts)[1] == pytest.approx(1.4 * after)


def test_token_counts_stop_the_host_in_each_layer():
    constants, experts = Constants(), QWEN.experts
    plan = replace(LAYER, graphs="attn")
    before, after = host_times(plan, constants, experts)
    work = (2 * before, after / 2)
    assert waiting_time(plan, constants, experts, work) == pytest.approx(after / 2)
    # Padded experts, or two micro-batches at once, let it run ahead.
    for dispatch in ("alltoall capacity", "deepep overlapped"):
        ahead = replace(plan, dispatch=dispatch)
        enough = tuple(sum(host_times(ahead, constants, experts)) / 2 for _ in work)
        assert waiting_time(ahead, constants, experts, enough) == 0


def activations(plan):
    """Bytes of the activations of a plan."""
    terms = price_plan(plan, Constants()).memory
    return next(term.value for term in terms if term.name == "activations")


@pytest.mark.parametrize("sizes", [(1, 1), (4, 3), (4, 12)])
def test_an_exchange_under_another_micro_batch_holds_one_layer_more(sizes):
    pp, vp = sizes
    plan = replace(LAYER, gpus=8 * pp, pp=pp, vp=vp, global_batch=64, dispatch="deepep")
    layers, flight = plan.model.layers / pp, pp + (pp - 1) / vp
    more = activations(replace(plan, dispatch="deepep overlapped")) / activations(plan) - 1
    assert more == pytest.approx(1 / (layers * flight))


def test_natural_routing_costs_the_rows_of_the_fullest_rank():
    experts = QWEN.experts
    natural = replace(LAYER, routing="natural")
    share = fullest_share(natural, experts)
    assert share == pytest.approx(1.55, abs=0.02)  # 1.5 to 1.7: Qwen3-235B on H100, EP 8
    assert fullest_share(LAYER, experts) == 1
    assert fullest_share(replace(natural, ep=1), experts) == 1
    assert fullest_share(replace(natural, dispatch="alltoall capacity"), experts) == 1
    assert fullest_share(replace(natural, ep=32), experts) > share
    even, fullest = (layer_times(plan, Constants()) for plan in (LAYER, natural))
    assert fullest.parts["attention"] == even.parts["attention"]
    # The start of an exchange takes no longer.
    for name, off in (("experts, element-wise", 1e-6), ("expert exchange", 0.05)):
        assert sum(fullest.parts[name]) == pytest.approx(share * sum(even.parts[name]), rel=off)
    assert price_plan(natural, Constants()).step_s > price_plan(LAYER, Constants()).step_s


def test_recompute_of_experts_runs_them_again_and_saves_their_activations():
    plans = [replace(LAYER, recompute=text) for text in ("none", "moe_act", "moe")]
    none, unit, whole = (layer_times(plan, Constants()).parts for plan in plans)
    for name in ("experts", "experts, element-wise", "expert exchange"):
        forward, backward = none[name]
        assert whole[name] == pytest.approx((forward, backward + forward))
    assert unit["experts"] == none["experts"]
    assert none["experts, element-wise"][1] < unit["experts, element-wise"][1]
    saved = [
        term.value
        for plan in plans
        for term in price_plan(plan, Constants()).memory
        if term.name == "activations"
    ]
    tokens = 4096 * QWEN.layers
    rows = QWEN.experts.top_k * QWEN.experts.ffn
    assert saved[0] - saved[1] == pytest.approx(tokens * rows * 2)
    copies = QWEN.experts.top_k * (2 * QWEN.hidden + 6 * QWEN.experts.ffn)
    assert saved[0] - saved[2] == pytest.approx(tokens * copies)


def test_up_projections_of_latent_attention_are_recomputed_alone():
    plan = replace(PLAN, model=DEEPSEEK, seq_len=4096, ep=64)
    plain, again = (
        layer_times(replace(plan, recompute=text), Constants()).parts["GEMM"]
        for text in ("none", "mla_up_proj")
    )
    assert again[0] == plain[0]
    assert plain[1] < again[1] < plain[1] + plain[0]


@pytest.mark.parametrize(
    ("change", "modules"),
    [
        ({"model": DEEPSEEK, "ep": 64}, "layernorm+mla_up_proj"),
        ({"model": LLAMA}, "layernorm"),
        ({"model": LLAMA, "year": 2022.0}, "core_attn"),
        ({"model": oss(), "ep": 8, "gpu": "b200", "year": 2025.9}, "core_attn"),
        ({"model": DEEPSEEK, "ep": 64, "gpu": "b200", "year": 2025.2}, "core_attn"),
    ],
)
def test_selective_recompute_is_priced_by_the_modules_that_are_launched(change, modules):
    plan = replace(PLAN, seq_len=4096, **change)
    prices = [
        price_plan(replace(plan, recompute=text), Constants())
        for text in ("selective", modules)
    ]
    assert prices[0].time == prices[1].time
    assert prices[0].memory_bytes == prices[1].memory_bytes
    for text in ("selective", modules):
        arguments = launch("megatron", replace(plan, recompute=text)).split(" \\\n")
        assert f"--recompute-modules {modules.replace('+', ' ')}" in arguments


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("graphs=some", "invalid graphs 'some': expected some of full, attn"),
        ("routing=even", "invalid routing 'even': expected one of forced, natural"),
        ("recompute=moe+all", "invalid recompute 'moe+all'"),
        ("fused-experts=maybe", "invalid fused_experts 'maybe'"),
    ],
)
def test_an_unknown_switch_is_refused(strategy, message):
    with pytest.raises(Exception, match="invalid") as caught:
        with_strategy(LAYER, strategy)
    assert message in str(caught.value)


def test_a_table_says_what_is_fused_graphed_and_routed(tmp_path):
    head = f"{HEAD},ep,moe_dispatch,recompute,recompute_detail,comment,precision,date"
    first = "qwen3-30b-a3b,b200,8,64,4096,8"
    rows = (
        f'{first},hybridep,selective,"layernorm,moe_act, CUDA graphs: attn,moe_router",'
        "natural routing,bf16,2026-05",
        f"{first},hybridep overlapped,none,CUDA graphs: full_iteration,,mxfp8,2026-06",
        f"{first},alltoall,none,,tokendrop; attention in FP8,mxfp8,2025-09",
    )
    one, two, three = (
        run.plans[0] for run in load_runs(table(tmp_path, *rows, head=head), {}).runs
    )
    assert (one.recompute, one.graphs) == ("layernorm+moe_act", "attn+moe_router")
    assert (one.routing, one.fused_experts) == ("natural", False)
    assert (two.graphs, two.fused_experts) == ("full", True)
    assert (three.is_padded, three.fp8_attention, three.fused_experts) == (True, True, False)


def test_a_strategy_is_printed_as_it_is_read():
    plan = replace(LAYER, gpus=64, global_batch=64, gpu="gb200", precision="mxfp8", **RACK)
    changes = (
        *({"dispatch": f"hybridep{more}"} for more in ("", " overlapped", " capacity")),
        *({"graphs": "attn+moe_router"}, {"routing": "natural"}, {"moments": "bf16"}),
        *({"fused_experts": True}, {"fp8_attention": True}, {"overlap": False}),
        *({"gradients": "bf16"}, {"trainer": "nemo"}, {"etp": 2, "tp": 2}),
        *({"year": 2024.5}, {"year": 2025 + 6.5 / 12}, {"pp": 2, "vp": 2}),
    )
    # What no strategy has stays: the job, and the hardware.
    job = {
        "memory",
        "exchange_costs",
        "power_share",
        *(f.name for f in fields(Plan) if f.default is MISSING),
    }
    usual = {field.name: field.default for field in fields(Plan) if field.name not in job}
    for change in changes:
        changed = replace(plan, **change)
        assert with_strategy(replace(plan, **usual), strategy_text(changed)) == changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fused_experts": True}, "fused-experts takes precision mxfp8"),
        ({"fp8_attention": True}, "fp8-attention takes a precision in FP8"),
        ({"recompute": "mla_up_proj"}, "mla_up_proj takes latent attention"),
        ({"graphs": "moe_preprocess"}, "moe_preprocess takes moe_router"),
        ({"dispatch": "deepep overlapped", "pp": 2, "gpus": 16}, "takes virtual stages"),
        ({"dispatch": "deepep overlapped", "ep": 1}, "takes ep above 1"),
        ({"dispatch": "hybridep overlapped capacity", "pp": 2, "gpus": 16}, "takes virtual"),
        ({"dispatch": "deepep capacity"}, "DeepEP pads no experts to a capacity"),
        ({"gpu": "a100", "dispatch": "deepep"}, "DeepEP V1, normal needs compute capability"),
        ({"gpu": "a100-40", "dispatch": "hybridep"}, "HybridEP needs compute capability 9.0"),
        ({"graphs": "attn", "recompute": "full"}, "exclude recompute of whole layers"),
        ({"graphs": "full", "recompute": "2"}, "exclude recompute of whole layers"),
        ({"graphs": "moe_router", "recompute": "moe"}, "exclude recompute of moe"),
        ({"graphs": "full"}, "take hybridep or capacity"),
        ({"graphs": "full", "dispatch": "deepep"}, "take hybridep or capacity"),
        ({"graphs": "attn+mlp"}, "graph of mlp takes layers without experts"),
        ({"graphs": "moe_router", "model": LLAMA, "ep": 1}, "of moe_router takes experts"),
        ({"dispatch": "deepep overlapped", "recompute": "full"}, "excludes recompute"),
        ({"dispatch": "deepep overlapped", "recompute": "moe"}, "excludes recompute"),
    ],
)
def test_a_switch_without_what_it_takes_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(LAYER, **change).check()


def test_the_fullest_rank_holds_the_activations_of_its_rows():
    natural = replace(LAYER, routing="natural")
    share = fullest_share(natural, QWEN.experts)
    rows = LAYER.tokens * QWEN.layers * QWEN.experts.top_k
    # Inputs of both GEMMs, and the two halves of the gated unit, in bf16.
    routed = rows * (2 * QWEN.hidden + 6 * QWEN.experts.ffn)
    assert activations(natural) - activations(LAYER) == pytest.approx((share - 1) * routed)
    same = {"dispatch": "alltoall capacity"}
    assert activations(replace(natural, **same)) == activations(replace(LAYER, **same))
    job = replace(LAYER, global_batch=512)
    even, fullest = (
        rank(replace(job, routing=routing), {"pp": "1"}, Constants())
        for routing in ("forced", "natural")
    )
    assert even.candidates == fullest.candidates
    assert len(even.plans) > len(fullest.plans)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ep": 256}, "dispatch deepep: 256 ranks; DeepEP takes one of 2, .* 160"),
        ({"ep": 128, "tp": 2, "etp": 2}, "deepep: 256 ranks"),
        ({"ep": 16, "domain": 72}, "16 ranks in an NVLink domain of many nodes; take hybridep"),
    ],
)
def test_deepep_takes_the_ranks_that_it_has_kernels_for(change, message):
    wide = replace(QWEN, experts=replace(QWEN.experts, number=256))
    plan = replace(LAYER, model=wide, gpus=1024, global_batch=2048, dispatch="deepep")
    with pytest.raises(ConfigError, match=message):
        replace(plan, **change).check()
    replace(plan, **(change | {"dispatch": "hybridep"})).check()
    for ranks in (8, 128):
        replace(plan, ep=ranks).check()
    replace(plan, ep=8, domain=72).check()


def test_natural_routing_has_no_narrower_interval_and_says_the_range_of_the_fullest_rank():
    for change in ({}, {"precision": "fp8_cs", "year": 2025.5}, {"year": 2025.5}):
        forced, natural = (
            expected_error(price_plan(replace(LAYER, routing=routing, **change), Constants()))
            for routing in ("forced", "natural")
        )
        assert natural.most >= forced.most
    low, high = fullest_range(replace(LAYER, routing="natural"), QWEN.experts)
    assert low < fullest_share(replace(LAYER, routing="natural"), QWEN.experts) < high
    # The same by draws of normal loads.
    loads = 1 + np.random.default_rng(1).normal(0, 1.08 / 4, (20_000, 8)).max(axis=1)
    assert [low, high] == pytest.approx(np.quantile(loads, [0.05, 0.95]), abs=0.01)
    assert fullest_range(LAYER, QWEN.experts) is None
    words = ("plan", "price", "--model", "qwen3-30b-a3b", "--world-size", "8")
    more = ("--global-batch", "64", "--strategy", "ep=8,routing=natural")
    assert "fullest rank of experts: 1.55 times" in invoke(*words, *more).stdout


def test_recompute_of_the_layer_of_experts_launches_it_again():
    usual, again = (
        host_times(replace(LAYER, recompute=text), Constants(), QWEN.experts)
        for text in ("none", "moe")
    )
    assert again[1] == pytest.approx(4 / 3 * usual[1])
    assert usual[0] < again[0] < 4 / 3 * usual[0]


def test_columns_of_a_table_set_the_switches(tmp_path):
    head = f"{HEAD},ep,routing,graphs,fused_experts,precision"
    rows = (
        f"qwen3-30b-a3b,b200,8,64,4096,8,natural,{end},mxfp8" for end in ("attn,yes", "full,no")
    )
    path = table(tmp_path, *rows, head=head)
    run, apart = load_runs(path, {}).runs
    assert not apart.plans[0].fused_experts  # though a graph of the whole step implies it
    plan = run.plans[0]
    assert (plan.routing, plan.graphs, plan.fused_experts) == ("natural", "attn", True)


@pytest.mark.parametrize(("domain", "share"), [(8, 0.33), (4, 0.63)])
def test_another_micro_batch_hides_a_part_of_the_exchange(domain, share):
    plan = replace(LAYER, domain=domain)
    alone, under = (
        layer_times(replace(plan, dispatch=text), Constants()).parts["expert exchange"]
        for text in ("deepep", "deepep overlapped")
    )
    assert under == pytest.approx([share * time for time in alone])
    # No more than the other micro-batch's work.
    slow = replace(plan, domain=4, node_bytes_per_s=1e8)
    parts = layer_times(replace(slow, dispatch="deepep overlapped"), Constants()).parts
    whole = layer_times(replace(slow, dispatch="deepep"), Constants()).parts
    work = sum(pair[0] for name, pair in parts.items() if name != "expert exchange")
    assert parts["expert exchange"][0] == pytest.approx(whole["expert exchange"][0] - work)


def test_an_explanation_has_host_and_gpu_and_what_would_shorten_the_step():
    words = ("plan", "price", "--model", "qwen3-30b-a3b", "--world-size", "16")
    words = (*words, "--global-batch", "256", "--cluster", "b200", "--strategy")
    document = json.loads(invoke(*words, "ep=8,precision=mxfp8", "--json").stdout)
    schema("price").validate(document)
    before, after = document["layer"]
    assert after["host_ns"] > after["gpu_ns"] > 0
    names = [row["name"] for row in document["what_ifs"]]
    assert "CUDA graphs of attention and router" in names
    steps = [row["step_ns"] for row in document["what_ifs"]]
    assert steps == sorted(steps)
    assert steps[-1] < document["step_ns"]
    graphs = "ep=8,precision=mxfp8,graphs=attn+moe_router+moe_preprocess"
    changed = json.loads(invoke(*words, graphs, "--json").stdout)
    place = names.index("CUDA graphs of attention and router")
    assert changed["step_ns"] == pytest.approx(steps[place])
    assert before["host_ns"] > changed["layer"][0]["host_ns"] == 0
    shown = invoke(*words, "ep=8,precision=mxfp8").stdout
    assert "what if" in shown
    assert "dispatch, experts and combine" in shown


def test_what_would_shorten_a_step_fits_if_the_step_does():
    plan = replace(LAYER, gpu="b200", dispatch="hybridep", micro_batch=2)
    price = price_plan(plan, Constants())
    name = "CUDA graph of the whole step"
    assert name in {row.name for row in shortcuts(price, Constants())}
    tight = price_plan(replace(plan, memory=1.01 * price.memory_bytes), Constants())
    assert tight.fits
    assert name not in {row.name for row in shortcuts(tight, Constants())}


def test_no_change_is_offered_that_the_trainer_refuses():
    def names(**change):
        plan = replace(LAYER, gpu="b200", precision="mxfp8", **change)
        return {row.name for row in shortcuts(price_plan(plan, Constants()), Constants())}

    parts, step = "CUDA graphs of attention and router", "CUDA graph of the whole step"
    assert {parts, step} <= names(dispatch="hybridep")
    assert not {parts, step} & names(dispatch="hybridep", recompute="full")
    for dispatch in ("alltoall", "deepep", "deepep overlapped"):
        assert step not in names(dispatch=dispatch)
    assert step in names(dispatch="alltoall capacity")
    assert parts not in names(recompute="moe")
    assert names(trainer="deepspeed") <= {"half as many experts a rank"}


def test_a_what_if_is_typed_as_it_is_printed_and_has_that_step_and_memory():
    words = ("plan", "price", "--model", "qwen3-30b-a3b", "--world-size", "16")
    words = (*words, "--global-batch", "256", "--cluster", "b200", "--strategy")
    usual = "ep=8,precision=mxfp8,dispatch=hybridep"
    document = json.loads(invoke(*words, usual, "--json").stdout)
    text = " ".join(invoke(*words, usual).stdout.split())
    assert len(document["what_ifs"]) > 1
    for row in document["what_ifs"]:
        again = json.loads(invoke(*words, row["strategy"], "--json").stdout)
        for key in ("step_ns", "memory_bytes", "strategy"):
            assert again[key] == row[key]
        own = dict(part.split("=") for part in usual.split(","))
        own |= dict(part.split("=") for part in row["change"].split(","))
        typed = ",".join(f"{key}={value}" for key, value in own.items())
        assert json.loads(invoke(*words, typed, "--json").stdout)["step_ns"] == row["step_ns"]
        assert row["change"] in text


def test_a_what_if_that_saves_nothing_is_left_out():
    plan = replace(LAYER, pp=2, vp=12, ep=8, gpus=128, global_batch=512)
    price = price_plan(plan, Constants())
    other = price_plan(replace(plan, dispatch="deepep"), Constants())
    assert 0.9995 * price.step_s < other.step_s < price.step_s
    rows = shortcuts(price, Constants())
    assert rows
    assert "DeepEP as dispatcher" not in {row.name for row in rows}


def test_launches_on_grace_took_longer_before_the_host_called_less_often():
    old, new = (replace(LAYER, gpu="gb200", **RACK | {"year": y}) for y in (2025.4, 2026.4))
    usual = Constants().host_layer_s
    assert launch_time(new, Constants()) == usual
    assert launch_time(old, Constants()) == pytest.approx(2.7 * usual)
    assert launch_time(replace(old, gpu="b200"), Constants()) == usual
    host = [sum(host_times(plan, Constants(), QWEN.experts)) for plan in (old, new)]
    assert host[0] == pytest.approx(2.7 * host[1])


def test_graphs_of_a_whole_step_hold_memory_of_their_own():
    plan = replace(LAYER, gpu="gb300", domain=72, dispatch="hybridep")
    whole, parts, none = (
        {term.name: term.value for term in price_plan(p, Constants()).memory}
        for p in (replace(plan, graphs=text) for text in ("full", "attn", ""))
    )
    assert "CUDA graphs" not in none
    assert whole["CUDA graphs"] > parts["CUDA graphs"] > 0


@pytest.mark.parametrize("name", ["gb200", "b200", "gb300"])
def test_llama_8b_in_mxfp8_is_a_little_slower_than_with_current_scaling(name):
    # 1.02 to 1.06 times the step: one layout of Megatron Bridge 25.09 and 25.11.
    rack = {"domain": 72, "node_bytes_per_s": 3.6e12, "year": 2025.9}
    plan = replace(PLAN, gpu=name, gpus=8, micro_batch=2, **rack)
    scaled, blocks = (
        price_plan(replace(plan, precision=precision), Constants()).step_s
        for precision in ("fp8_cs", "mxfp8")
    )
    assert 1 < blocks / scaled < 1.06


@pytest.mark.parametrize("name", ["gb200", "b200", "gb300"])
@pytest.mark.parametrize("model", [LLAMA, QWEN, DEEPSEEK])
def test_blocks_of_scales_are_no_faster_than_the_mx_formats_that_emulate_them(name, model):
    ep = 8 if model.experts else 1
    plan = replace(PLAN, gpu=name, model=model, ep=ep, seq_len=4096)
    for dispatch in ("alltoall", "deepep") if model.experts else ("alltoall",):
        blocks, mx = (
            price_plan(replace(plan, precision=precision, dispatch=dispatch), Constants())
            for precision in ("fp8_block", "mxfp8")
        )
        assert blocks.step_s == pytest.approx(mx.step_s)
        assert blocks.memory_bytes == mx.memory_bytes
    # Hopper has kernels for them.
    hopper = replace(plan, gpu="h100", precision="fp8_block")
    assert not hopper.is_mx


def test_gb300_trains_faster_in_fp8_than_gb200():
    # 1.19 times for Llama 8B in FP8, 1.21 in MXFP8: one layout of Megatron Bridge 25.11.
    rack = {"domain": 72, "node_bytes_per_s": 3.6e12, "year": 2025.9, "graphs": "full"}
    plan = replace(PLAN, gpus=8, micro_batch=2, **rack)
    for precision, ratio in (("fp8_cs", 1.19), ("mxfp8", 1.21)):
        steps = [
            price_plan(replace(plan, gpu=name, precision=precision), Constants()).step_s
            for name in ("gb200", "gb300")
        ]
        assert steps[0] / steps[1] == pytest.approx(ratio, rel=0.04)


@pytest.mark.parametrize("ep", [2, 4, 16, 64])
def test_a_fullest_rank_that_no_run_has_is_not_measured(ep):
    plan = replace(LAYER, gpus=64, global_batch=512, ep=ep, routing="natural")
    assert fullest_share(plan, QWEN.experts) > 1
    assert fullest_range(plan, QWEN.experts) is None
    expected = expected_error(price_plan(plan, Constants()))
    assert expected.low is None
    assert "published runs have 8 of 16" in expected.reason
    words = (
        "plan",
        "price",
        "--model",
        "qwen3-30b-a3b",
        "--world-size",
        "64",
        "--seq-len",
        "4096",
    )
    more = ("--global-batch", "512", "--strategy", f"ep={ep},routing=natural")
    assert "times the mean rows; not measured for these ranks" in invoke(*words, *more).stdout
    document = json.loads(invoke(*words, *more, "--json").stdout)
    schema("price").validate(document)
    assert document["fullest_rank"]["low"] is document["fullest_rank"]["high"] is None
    padded = replace(plan, dispatch="alltoall capacity")
    assert "routing" not in expected_error(price_plan(padded, Constants())).reason
