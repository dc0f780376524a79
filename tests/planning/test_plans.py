"""Test `fastcomm plan price` and `evaluate`: fixed strategies and tables of runs."""

import json
import re
from dataclasses import replace

import pytest
from builders.commands import invoke
from builders.plan_inputs import HEAD, PLAN, PRICE, schema, table
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.errors import ConfigError
from fastcomm.models import load
from fastcomm.planning.constants import Constants
from fastcomm.planning.job import with_strategy
from fastcomm.planning.kernels import plan_collective
from fastcomm.planning.measured_runs import load_runs, price_run
from fastcomm.planning.price import causal_flops, layer_times, price_plan


@given(
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    sharding=st.sampled_from(["ddp", "zero1", "zero2", "zero3", "hsdp4"]),
    recompute=st.sampled_from(["none", "selective", "partial", "full"]),
    precision=st.sampled_from(["bf16", "fp8_cs", "mxfp8"]),
    name=st.sampled_from(["h100", "b200", "gb200", "h200", "h800"]),
    overlap=st.booleans(),
)
def test_the_terms_add_up_to_the_step_and_to_the_memory(name, **strategy):
    price = price_plan(replace(PLAN, gpu=name, **strategy), Constants())
    for terms in (price.time, price.memory):
        assert terms[0].value == pytest.approx(sum(term.value for term in terms[1:]))
        assert all(term.value >= 0 for term in terms)
    assert 0 < price.mfu < 1
    tokens = price.tokens_per_s_per_gpu * price.step_s * 64
    assert tokens == pytest.approx(128 * 8192)


def test_recompute_takes_time_and_saves_memory():
    modes = ["none", "selective", "partial", "full"]
    prices = [price_plan(replace(PLAN, recompute=mode), Constants()) for mode in modes]
    assert prices[0].step_s < prices[3].step_s
    assert prices[0].memory_bytes > prices[2].memory_bytes > prices[3].memory_bytes


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"gpu": "a100"}, {"gpu": "h100"}),
        ({"precision": "bf16"}, {"precision": "fp8_cs"}),
        ({"sharding": "zero3", "overlap": False}, {"sharding": "zero3", "overlap": True}),
        ({"node_bytes_per_s": 50e9}, {"node_bytes_per_s": 400e9}),
        ({"pp": 4, "vp": 1}, {"pp": 4, "vp": 4}),
        ({"year": 2023.0}, {"year": 2025.0}),
        ({"power_share": 0.7}, {"power_share": 1.0}),
    ],
)
def test_what_should_be_faster_is(slower, faster):
    prices = [price_plan(replace(PLAN, **each), Constants()) for each in (slower, faster)]
    assert prices[0].step_s > prices[1].step_s


def test_a_collective_between_nodes_is_no_faster_than_its_links():
    size, ranks = 2**30, 64
    time = plan_collective(PLAN, Constants(), "all_gather", size, ranks)
    assert time > size * 63 / 64 / 400e9
    alone = plan_collective(PLAN, Constants(), "all_gather", size, 8)
    sharing = plan_collective(PLAN, Constants(), "all_gather", size, 8, stride=8)
    assert alone < time < sharing
    assert plan_collective(PLAN, Constants(), "all_gather", size, 1) == 0


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 2)])
def test_the_ring_carries_keys_and_values_ahead_and_also_their_gradients_back(cp, tp):
    plan = replace(PLAN, cp=cp, tp=tp, micro_batch=2)
    whole = replace(Constants(), overlap_loss=1.0)  # nothing is hidden
    model = plan.model
    size = 2 * plan.seq_len * 2 * (model.kv_heads / tp) * model.rotary * 2  # in bf16
    once = plan_collective(plan, whole, "all_gather", size, cp, tp)
    shown = layer_times(plan, whole).parts["context parallelism"]
    assert shown == pytest.approx((once, 2 * once))


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_a_ring_of_pytorch_waits_for_the_rank_with_most_of_the_causal_work(cp):
    # Of 8 blocks of the sequence, each attends to those before it and to half of itself.
    work = [number + 0.5 for number in range(8)]
    last, mean = sum(work[-8 // cp :]), sum(work) / cp
    for trainer, share in (("fsdp2", last / sum(work)), ("megatron", mean / sum(work))):
        plans = [replace(PLAN, trainer=trainer, cp=each) for each in (1, cp)]
        one, part = (layer_times(plan, Constants()).parts["attention"] for plan in plans)
        assert part == pytest.approx([share * time for time in one])


def test_the_gate_of_a_model_bounds_nodes_much_and_ranks_little():
    model = load("deepseek-v3")
    free = replace(model, experts=replace(model.experts, node_limit=0))
    nodes = replace(PLAN, model=model, seq_len=4096, ep=64, dispatch="deepep")
    rack = replace(nodes, gpu="gb200", domain=72, node_bytes_per_s=3.6e12)
    # Of 64 ranks, a token has 7.47 with the gate, and 7.68 without.
    for plan, least, most in ((rack, 0.96, 0.99), (nodes, 0.6, 0.85)):
        limited, anywhere = (
            layer_times(replace(plan, model=each), Constants()).exchange[0]
            for each in (model, free)
        )
        assert least * anywhere <= limited <= most * anywhere


@pytest.mark.parametrize(("name", "link"), [("gb200", 450e9), ("b200", 64e9), ("h100", 64e9)])
def test_activations_move_to_the_host_under_other_layers(name, link):
    plan = replace(PLAN, gpu=name, sharding="zero3", trainer="nemo-fsdp", micro_batch=2)
    constants, layers = Constants(), 20
    kept, moved = (price_plan(replace(plan, offloaded=n), constants) for n in (0, layers))
    (offload,) = [term.value for term in moved.time if term.name == "activation offload"]
    sizes = [
        next(term.value for term in price.memory if term.name == "activations")
        for price in (kept, moved)
    ]
    once = (sizes[0] - sizes[1]) / link  # of all these layers of a micro-batch, one way
    work = [layers * layer_times(plan, constants).total(way) for way in (0, 1)]
    hidden = [min(once, own) * (1 - constants.overlap_loss) for own in work]
    assert offload == pytest.approx(plan.micro_batches * (2 * once - sum(hidden)))
    assert "activation offload" not in {term.name for term in kept.time}
    assert moved.memory_bytes < kept.memory_bytes


def test_causal_flops_are_those_of_the_definition():
    model = PLAN.model
    parameters = model.parameters - model.embedding
    scores = 6 * model.layers * model.hidden * PLAN.seq_len
    assert causal_flops(PLAN) == pytest.approx(6 * parameters + scores, rel=1e-3)


def test_price_explains_a_strategy_that_does_not_fit():
    words = (*PRICE, "--strategy", "tp=2,pp=1,dp=32,sharding=ddp,recompute=none")
    shown = invoke(*words).stdout
    assert "(does not fit)" in shown
    assert re.search(r"error to expect: \d+ % \(median of \d+ published runs: dense", shown)
    assert "links between nodes and backward attention are not measured" in shown
    document = json.loads(invoke(*words, "--json").stdout)
    schema("price").validate(document)
    assert document["fits"] is False
    assert {"GEMM", "attention", "gradient reduction", "activations"} <= {
        term["name"] for term in document["terms"]
    }


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("tp=3", "tp x pp x cp is 3, which does not divide 64 GPUs"),
        ("tp=8,dp=4", "dp 4 contradicts gpus / (tp x pp x cp), which is 8"),
        ("size=8", "--strategy: invalid 'size=8': expected KEY=VALUE with tp, pp"),
        ("tp", "--strategy: invalid 'tp': expected KEY=VALUE"),
        ("tp=x", "--strategy: invalid tp 'x'"),
        ("tp=0", "expected"),
        ("ep=8", "ep 8: llama3-70b has no experts"),
        ("sharding=zero4", "invalid sharding 'zero4': expected ddp, zero1"),
        ("sharding=hsdp0", "invalid sharding 'hsdp0'"),
        ("recompute=some", "invalid recompute 'some': expected one of none, selective"),
        ("precision=int4", "invalid precision 'int4': expected one of bf16"),
        ("pp=64,vp=4", "pp x vp is 256: more stages than the 80 layers"),
        ("micro-batch=1000", "fewer sequences than dp x micro-batch"),
        ("pp=2,micro-batch=3,tp=8", "128 sequences are no multiple of dp x micro-batch, 4 x 3"),
        ("tp=4,tp=8", "--strategy: tp is given twice"),
        ("tp=4,vp=2", "vp 2 takes a pipeline: pp is 1"),
        ("etp=2", "etp 2: llama3-70b has no experts"),
        ("dispatch=deepep", "dispatch deepep: llama3-70b has no experts"),
        ("dispatch=foo", "invalid dispatch 'foo': expected one of alltoall, deepep, hybridep"),
        ("overlap=maybe", "invalid overlap 'maybe': expected yes or no"),
        ("precision=mxfp8", "precision mxfp8: H100-SXM has no MX formats"),
        ("sharding=hsdp3", "sharding hsdp3: 3 does not divide dp x cp, 64"),
        ("sharding=hsdp128", "128 does not divide dp x cp, 64"),
        ("year=3000", "invalid year '3000': expected a year or a month"),
        ("gradients=fp8", "invalid gradients 'fp8': expected one of bf16, fp32"),
    ],
)
def test_an_invalid_strategy_is_refused(strategy, message):
    result = invoke(*PRICE, "--strategy", strategy, code=2)
    assert message in " ".join(result.stderr.split())


def test_a_cluster_without_a_measured_gpu_is_refused():
    result = invoke(*PRICE, "--cluster", "a800", code=2)
    assert "no measured GPU; take dgx-a100, dgx-a100-40, dgx-b200" in " ".join(
        result.stderr.split()
    )
    missing = invoke("plan", "price", code=2)
    assert "missing --model, --world-size, --global-batch" in missing.stderr


def test_the_memory_that_is_given_decides_what_fits():
    asked = (*PRICE, "--strategy", "tp=8,pp=4", "--json")
    default, small = (
        json.loads(invoke(*asked, *words).stdout) for words in ((), ("--memory", "40GiB"))
    )
    assert default["fits"]
    assert small == {**default, "fits": False}


def test_a_price_has_the_vocabulary_that_is_given():
    asked = (*PRICE, "--strategy", "tp=8,pp=4", "--json")
    few, many = (
        json.loads(invoke(*asked, "--vocab", size).stdout)["step_ns"] for size in (32000, "1Mi")
    )
    assert few < many


def test_small_nodes_have_small_nvlink_domains(tmp_path):
    head = f"{HEAD},tp,node_gbps,gpus_per_node,micro_batch,recompute,sharding"
    rows = [f"llama3-8b,h100,8,64,8192,8,100,{n},1,full,zero1" for n in (1, 2, 4, 8)]
    runs = load_runs(table(tmp_path, *rows, head=head), {}).runs
    rates = [price_run(run, Constants()).price.tokens_per_s_per_gpu for run in runs]
    assert rates == sorted(set(rates))


@pytest.mark.parametrize(("name", "nic"), [("gb200", 400e9 / 8), ("gb300", 800e9 / 8)])
def test_racks_have_the_nvlink_domain_that_is_given(tmp_path, name, nic):
    # A tray has 4 GPUs or less, and 72 are a rack; NVL36 is another rack.
    domains = {"": 72, "2": 72, "4": 72, "36": 36, "72": 72, "144": 144}
    rows = [f"llama3-8b,{name},144,144,8192,{number},{{}}" for number in domains]
    for gbps, share in (("", nic), ("1600", 1600e9 / 8)):
        head = f"{HEAD},gpus_per_node,node_gbps"
        path = table(tmp_path, *(row.format(gbps) for row in rows), head=head)
        plans = [run.plans[0] for run in load_runs(path, {}).runs]
        assert [plan.domain for plan in plans] == [*domains.values()]
        for plan, number in zip(plans, domains, strict=True):
            nodes = plan.domain / int(number or 4) if gbps else plan.domain
            assert plan.node_bytes_per_s == pytest.approx(share * nodes)


def test_the_fullest_stage_is_the_one_that_memory_counts():
    plan = replace(PLAN, model=load("llama3-405b"), gpus=8192, global_batch=2048, tp=8, pp=16)
    steps = [price_plan(replace(plan, vp=vp), Constants()).step_s for vp in (1, 4, 7, 8)]
    assert steps == sorted(steps, reverse=True)
    uneven = [
        term.value
        for term in price_plan(replace(plan, vp=7), Constants()).time
        if term.name == "uneven stages"
    ]
    assert sum(uneven) < 0.03 * steps[2]  # 8 layers over 126 / 16


def test_unknown_virtual_stages_count_embedding_and_head_as_layers(tmp_path):
    row = "llama3-405b,h100,1024,512,8192,8,16,unknown,full,zero1,1"
    head = f"{HEAD},tp,pp,vp,recompute,sharding,micro_batch"
    (run,) = load_runs(table(tmp_path, row, head=head), {}).runs
    assert [plan.vp for plan in run.plans] == [1, 2, 4, 8]
    assert price_run(run, Constants()).price.plan.vp > 1


@pytest.mark.parametrize(("recompute", "scores"), [("none", 1), ("selective", 0)])
def test_activations_follow_the_published_formula(recompute, scores):
    # Korthikanti et al., arXiv 2205.05198: s b h (34 + 5 a s / h) / t bytes with sequence
    # parallelism, with the masks of dropout; selective recompute saves the second term.
    model = replace(load("llama3-8b"), hidden=12288, heads=96, kv_heads=96, ffn=49152, layers=8)
    model = replace(model, mlp="gelu")
    plan = replace(PLAN, model=model, gpu="a100", tp=8, seq_len=2048, year=2022.3)
    price = price_plan(replace(plan, recompute=recompute), Constants())
    (saved,) = [term.value for term in price.memory if term.name == "activations"]
    expected = 8 * 2048 * 12288 / 8 * (34 + scores * 5 * 96 * 2048 / 12288)
    assert saved == pytest.approx(expected, rel=0.01)


def test_gradients_have_the_width_that_is_asked_for():
    sizes = []
    for text in (
        "year=2025,trainer=nemo",
        "year=2025",
        "year=2025,trainer=nemo,gradients=fp32",
        "year=2023",
        "year=2023,gradients=bf16",
    ):
        price = price_plan(with_strategy(PLAN, text), Constants())
        sizes += [term.value for term in price.memory if term.name == "gradients"]
    assert sizes[1] == sizes[2] == sizes[3] == 2 * sizes[0] == 2 * sizes[4]
    for sharding in ("ddp", "zero1", "zero3", "hsdp8"):
        plan = replace(PLAN, sharding=sharding, overlap=False)
        narrow, wide = (
            price_plan(replace(plan, gradients=width), Constants()).step_s
            for width in ("bf16", "fp32")
        )
        assert narrow < wide


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("trainer=deepspeed,pp=4,vp=4", "vp 4: Megatron-DeepSpeed with ZeRO has only vp 1"),
        ("trainer=deepspeed,cp=2", "cp 2: Megatron-DeepSpeed with ZeRO has only cp 1"),
        ("trainer=deepspeed,pp=4,sharding=zero3", "zero3: .* has none in a pipeline; pp is 4"),
        ("trainer=fsdp,tp=2", "tp 2: PyTorch FSDP of 2023 has only tp 1"),
        ("trainer=nemo-fsdp,pp=2", "pp 2: NeMo with Megatron FSDP has only pp 1"),
    ],
)
def test_what_a_trainer_lacks_is_refused_by_prices_and_searches(strategy, message):
    with pytest.raises(ConfigError, match=message):
        with_strategy(PLAN, strategy)
    trainer, *fixed = strategy.removeprefix("trainer=").split(",")
    job = ("--model", "llama3-8b", "--gpus", "64", "--global-batch", "128")
    words = ("plan", *job, "--trainer", trainer, "--fix", ",".join(fixed))
    shown = " ".join(invoke(*words, code=2).stderr.split())
    assert re.search(message, shown)
    assert "no layout divides" not in shown


def test_a_measured_run_of_what_a_trainer_lacks_is_priced_with_a_note(tmp_path):
    head = f"{HEAD},tp,pp,vp,recompute,sharding,trainer,tokens_per_s_per_gpu"
    rows = ("llama3-8b,h100,64,128,8192,1,4,4,none,zero1,deepspeed,{}",)
    rows += ("llama3-8b,h100,64,128,8192,1,4,unknown,none,zero1,deepspeed,{}",)
    measured = load_runs(table(tmp_path, *(row.format(9000) for row in rows), head=head), {})
    odd, usual = measured.runs
    assert odd.note == "measured, although vp 4: Megatron-DeepSpeed with ZeRO has only vp 1"
    assert price_run(odd, Constants()).price.plan.vp == 4
    assert (usual.note, {plan.vp for plan in usual.plans}) == ("", {1})
    planned = load_runs(table(tmp_path, rows[0].format(""), head=head), {})
    assert "has only vp 1" in planned.failed[0].error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--routing", "natural"), "Error: routing natural: llama3-8b has no experts"),
        (("--fix", "ep=2"), "Error: ep 2: llama3-8b has no experts"),
        (("--fix", "fused-experts=yes"), "Error: fused-experts takes precision mxfp8"),
    ],
)
def test_a_search_of_what_the_model_lacks_gives_the_reason_alone(words, message):
    job = ("--model", "llama3-8b", "--gpus", "8", "--global-batch", "64")
    shown = invoke("plan", *job, *words, code=2).stderr
    assert " ".join(shown.split()) == message
