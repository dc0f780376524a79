"""Test the search of a trainer's strategies, and the arguments that it prints."""

import argparse
import itertools
import json
import re
from contextlib import suppress
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from builders.commands import invoke
from builders.places import DOCS, SCHEMAS
from jsonschema import Draft202012Validator

from fastcomm.errors import ConfigError
from fastcomm.hardware.clusters import load as load_cluster
from fastcomm.hardware.clusters import shipped
from fastcomm.models import Model, load
from fastcomm.option_fields import literals
from fastcomm.planning import launch
from fastcomm.planning.constants import Constants
from fastcomm.planning.job import GRADIENTS, GRAPHS, Plan, has_even_layout, stage_units
from fastcomm.planning.options import PlanOptions
from fastcomm.planning.price import head_time, layer_times, price_plan
from fastcomm.planning.search import bottleneck, candidates, rank, search_plans
from fastcomm.planning.trainers import TRAINERS

ASKED = ("--model", "llama3-70b", "--gpus", "256", "--cluster", "h100", "--global-batch", "512")
SMALL = Plan(
    model=load("llama3-8b"),
    gpu="h100",
    gpus=8,
    global_batch=16,
    seq_len=8192,
    node_bytes_per_s=400e9,
    domain=8,
)
SCHEMA = SCHEMAS / "plan.json"
ENDS = (0, 1, 2)  # embedding and head as layers


def is_even(layers, pp, vp):
    """Whether layers, with the embedding before and the loss after them, spread evenly."""
    cuts = [(layers + 2) * n // (pp * vp) for n in range(pp * vp + 1)]
    sizes = [end - start for start, end in itertools.pairwise(cuts)]
    sizes[0] -= 1
    sizes[-1] -= 1
    fullest = max(sum(sizes[rank::pp]) for rank in range(pp))
    return fullest <= -(-layers // pp) and max(sizes) * pp * vp <= 1.1 * layers


def strategies():
    """Every strategy of Megatron-Core for `SMALL`, by trying all combinations."""
    sizes = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), range(1, 13), (1, 2), (1, 2, 4, 8))
    for tp, pp, vp, cp, micro in sizes:
        stage = -(-32 // pp)
        counts = {str(round(stage / vp / part) * vp) for part in (4, 2)}
        own = counts - {"0", *map(str, range(stage, 99))}
        for recompute in ("none", "full", *own):
            plan = replace(SMALL, tp=tp, pp=pp, vp=vp, cp=cp, micro_batch=micro)
            plan = replace(plan, recompute=recompute)
            with suppress(ConfigError):
                plan.check()
                exact = [n for n in range(1, 13) if any((32 + e) % (pp * n) == 0 for e in ENDS)]
                divides = vp in exact or (vp > max(exact) and is_even(32, pp, vp))
                full = plan.micro_batches >= pp and (vp == 1 or plan.micro_batches % pp == 0)
                if full and (vp == 1 or divides):
                    yield plan


def test_the_search_finds_every_strategy_and_ranks_those_that_fit():
    found = rank(SMALL, {}, Constants())
    expected = set(strategies())
    assert set(candidates(SMALL, {})) == expected
    assert found.candidates == len(expected) > 100
    prices = [price_plan(plan, Constants()) for plan in expected]
    fits = sorted(price.step_s for price in prices if price.fits)
    assert [row.step_s for row in found.plans] == pytest.approx(fits)
    best = found.layouts[0]
    assert best.step_s == pytest.approx(fits[0])
    assert best.memory_bytes == pytest.approx(price_plan(best.plan, Constants()).memory_bytes)


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_a_trainer_gets_what_it_knows(trainer, model):
    knows = TRAINERS[trainer]
    job = replace(SMALL, model=load(model), gpus=16, trainer=trainer)
    plans = list(candidates(job, {}))
    assert plans
    for plan in plans:
        plan.check()
        assert plan.sharding.removesuffix("8") in {*knows.sharding, "hsdp"}
        assert {getattr(plan, size) for size in knows.unsupported} <= {1}


def test_the_page_has_the_bytes_of_each_trainer():
    page = (DOCS / "plan.md").read_text("utf-8")
    for name, knows in TRAINERS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        # Weight, gradient, and the fp32 weight with both moments of Adam.
        assert f"| {knows.weight_bytes + GRADIENTS[knows.gradients] + 12}" in row
        assert not knows.transient or f"and {knows.transient} in the optimizer's step" in row


def test_fixed_values_and_the_limit_of_memory_hold():
    options = PlanOptions(
        model="llama3-70b",
        world_size=64,
        global_batch=128,
        cluster="h100",
        memory="60GiB",
        fix="tp=8, pp=4,recompute=none",
        precision="fp8",
    )
    found = search_plans(options)
    assert found.plans
    for row in found.plans:
        assert (row.plan.tp, row.plan.pp, row.plan.recompute) == (8, 4, "none")
        assert row.plan.precision == "fp8_cs"
        assert row.memory_bytes <= 60 * 2**30


def test_pipelines_whose_stages_do_not_divide_the_layers_are_searched():
    # 61 layers on 4 stages of 4 virtual ones: measured on 256 GB200, and the fastest there.
    job = replace(SMALL, model=load("deepseek-v3"), gpu="gb200", gpus=256, domain=72)
    job = replace(job, global_batch=2048, seq_len=4096, precision="mxfp8")
    few = {"micro_batch": "1", "ep": "64", "cp": "1"}
    fixed = {"tp": "1", "pp": "4", "vp": "4"}
    own = rank(job, few | fixed, Constants()).layouts[0]
    rows = rank(job, few, Constants()).plans
    assert own.plan in [row.plan for row in rows]
    assert rows[0].step_s <= own.step_s
    splits = {(plan.pp, plan.vp) for plan in candidates(job, few | {"ep": "8"})}
    assert splits >= {(4, 2), (4, 4), (4, 8), (8, 2), (8, 4), (16, 2), (32, 1)}
    assert (4, 3) not in splits  # 5 or 6 layers a virtual stage


@pytest.mark.parametrize(("pp", "vp"), [(4, 4), (8, 4), (32, 1)])
def test_a_layout_that_is_searched_is_launched(pp, vp):
    job = replace(SMALL, model=load("deepseek-v3"), gpu="gb200", gpus=256, domain=72)
    job = replace(job, global_batch=2048, seq_len=4096)
    fixed = {"tp": "1", "cp": "1", "pp": str(pp), "vp": str(vp), "ep": "8"}
    plan = next(candidates(job, fixed))
    units = "|".join(stage_units(plan.model, pp, vp))
    text = launch.launch("megatron", plan)
    assert f"--pipeline-model-parallel-layout '{units}'" in text
    titan = replace(job, trainer="fsdp2")
    assert (pp == 32) is not bool(list(candidates(titan, fixed | {"vp": "1"})))


@pytest.mark.parametrize(
    ("sizes", "first", "last"),
    [((4, 4), 4, "tmL"), ((2, 8), 4, "tmL"), ((4, 2), 8, "tttttmL"), ((16, 1), 4, "tmL")],
)
def test_the_stages_of_deepseek_are_those_of_its_recipes(sizes, first, last):
    # Megatron Bridge, recipes/deepseek/deepseek_v3.py: Et*4|(t*4|)*14tmL and the like.
    pp, vp = sizes
    model = replace(load("deepseek-v3"), mtp_layers=1)
    full = ["t" * first] * (pp * vp - 2)
    assert [*stage_units(model, pp, vp)] == ["E" + "t" * first, *full, last]
    plan = replace(SMALL, model=model, gpus=pp * 8, pp=pp, vp=vp, ep=8)
    ends = (first * vp, first * (vp - 1) + last.count("t") + 1)
    assert plan.rank_layers == ends
    assert plan.stage_layers == first * vp
    # PyTorch has no such layouts.
    titan = replace(plan, trainer="fsdp2")
    assert titan.rank_layers == (-(-62 // pp), 62 - (pp - 1) * -(-62 // pp))


@pytest.mark.parametrize("pp", [2, 4, 16])
def test_the_slowest_rank_has_no_dense_layers_or_the_output_head(pp):
    plan = replace(SMALL, model=load("deepseek-v3"), gpus=8 * pp, pp=pp, ep=8, seq_len=4096)
    plan = replace(plan, dispatch="hybridep", graphs="full", global_batch=8 * pp)
    usual, dense = (
        sum(layer_times(plan, Constants(), dense=kind).total(way) for way in (0, 1))
        for kind in (False, True)
    )
    assert dense < usual
    head = head_time(plan, Constants())
    most, last = -(-61 // pp), 61 - (pp - 1) * -(-61 // pp)
    ranks = [most * usual - 3 * (usual - dense), last * usual + head]
    ranks += [most * usual] if pp > 2 else []
    mean = (58 * usual + 3 * dense + head) / pp
    uneven = [t.value for t in price_plan(plan, Constants()).time if t.name == "uneven stages"]
    assert uneven == pytest.approx([plan.micro_batches * (max(ranks) - mean)])


def test_equal_strategies_are_one_row():
    found = rank(replace(SMALL, gpus=1, global_batch=2), {}, Constants())
    assert len({row.plan for row in found.plans}) == len(found.plans)
    assert len(found.layouts) <= 1
    job = replace(SMALL, model=load("mixtral-8x7b"), gpus=16, global_batch=32)
    layouts = rank(job, {}, Constants()).layouts
    assert len({row.layout for row in layouts}) == len(layouts) > 5


def test_published_strategies_are_among_the_first_twenty_of_their_search():
    # Llama 3 (arXiv 2407.21783, table 4): TP 8, PP 16, about 400 TFLOPS a GPU, BF16.
    job = replace(SMALL, model=load("llama3-405b"), gpus=16384, global_batch=2048)
    rows = rank(job, {}, Constants()).layouts
    place, own = next((n, row) for n, row in enumerate(rows, 1) if row.layout == (8, 16, 1, 1))
    assert place <= 20
    rate = 2048 * 8192 / 16384 / own.step_s * job.model.flops(8192) / 1e12
    assert rate == pytest.approx(400, rel=0.15)
    # DeepSeek-V3 (arXiv 2412.19437) trains without tensor parallelism: PP 16, EP 64.
    model = replace(load("deepseek-v3"), mtp_layers=1)
    job = replace(job, model=model, gpu="h800", gpus=2048, global_batch=15360, seq_len=4096)
    job = replace(job, trainer="nemo")
    fixed = {"tp": "1", "precision": "fp8_block", "dispatch": "deepep overlapped (dualpipe)"}
    rows = rank(job, fixed, Constants()).layouts
    place, own = next((n, row) for n, row in enumerate(rows, 1) if row.layout == (1, 16, 1, 64))
    assert place <= 20
    # Megatron-Core refuses recompute of whole layers beside overlapped exchanges.
    assert {row.plan.recomputed for row in rows} == {0.0}
    assert 15360 * 4096 / 2048 / own.step_s == pytest.approx(1550, rel=0.15)
    # As Megatron-Core trains, which has no DualPipe.
    with pytest.raises(ConfigError, match="Megatron-Core has no dualpipe"):
        launch.launch("megatron", own.plan)
    words = {"model": "deepseek-v3", "world_size": 2048, "global_batch": 15360, "seq_len": 4096}
    own_search = PlanOptions(**words, cluster="dgx-h800", precision="fp8_block")
    places = {
        fix: [row.layout for row in search_plans(replace(own_search, fix=fix)).layouts]
        for fix in ("dispatch=deepep+overlapped+(dualpipe)", "tp=1")
    }
    # With the schedule that ran; Megatron-Core overlaps exchanges in other layouts.
    assert places["dispatch=deepep+overlapped+(dualpipe)"].index((1, 16, 1, 64)) < 20
    assert places["tp=1"].index((1, 16, 1, 64)) < 5


def test_every_trainer_is_a_choice():
    assert literals(PlanOptions, "trainer") == (*TRAINERS,)


def test_the_table_has_the_error_to_expect_and_the_bottleneck(tmp_path):
    text = invoke("plan", *ASKED, "--output", tmp_path).stdout
    assert "as Megatron-Core trains" in text
    assert "tensor  pipeline" in text
    assert re.search(r" \d+ \(\d+-\d+\) ", text)
    assert re.search(r"first \d+ layouts may be equally fast", text)
    assert "tensor parallelism" in text
    document = json.loads((tmp_path / "plan.json").read_text())
    Draft202012Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(document)
    assert document["seq_len"] == 8192
    assert len(document["layouts"]) == 6
    rows = pq.read_table(tmp_path / "strategies.parquet").to_pylist()
    assert len(rows) == document["feasible"]
    best = document["layouts"][0]
    assert rows[0]["tokens_per_s_per_gpu"] == pytest.approx(best["tokens_per_s_per_gpu"])
    shown = json.loads(invoke("plan", *ASKED, "--json", "--top", "2").stdout)
    assert [row["strategy"] for row in shown["layouts"]] == [
        row["strategy"] for row in document["layouts"][:2]
    ]
    explained = invoke("plan", *ASKED, "--explain", "2").stdout
    assert shown["layouts"][1]["strategy"] in explained.replace("\n  ", "")
    assert "optimizer states" in explained


def test_the_bottleneck_is_the_longest_term_besides_products():
    price = price_plan(replace(SMALL, tp=8, node_bytes_per_s=1e9), Constants())
    name, share = bottleneck(price)
    assert name == "tensor parallelism"
    assert share == pytest.approx(
        next(term.value for term in price.time if term.name == name) / price.step_s
    )


def test_a_batch_counts_sequences():
    asked = {"model": "llama3-8b", "world_size": 8, "seq_len": "8Ki", "cluster": "h100"}
    batches = [
        search_plans(PlanOptions(**asked, global_batch=batch)).job.global_batch
        for batch in (64, "64", "1Ki")
    ]
    assert batches == [64, 64, 1024]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sp-sizes", "2"), "No such option '--sp-sizes'"),
        (("--seq-len", "4Ki,8Ki"), "invalid --seq-len '4Ki,8Ki'"),
        (("--world-size", "128,256"), "invalid --world-size '128,256'"),
        (("--cluster", "a800"), "a800: no measured GPU; take dgx-a100"),
        (("--trainer", "internevo"), "'internevo' is not one of 'megatron'"),
        (("--fix", "tp=x"), "--fix: invalid tp 'x'"),
        (("--fix", "size=8"), "--fix: invalid 'size=8': expected KEY=VALUE"),
        (("--fix", "dp=8"), "it follows from the GPUs"),
        (("--fix", "recompute=some"), "invalid recompute 'some'"),
        (("--routing", "natural", "--fix", "routing=forced"), "--routing says natural"),
        (("--trainer", "nemo", "--fix", "trainer=fsdp2"), "--trainer says nemo"),
        (("--precision", "fp8", "--fix", "precision=bf16"), "--precision says fp8"),
        (("--fix", "dispatch=some"), "invalid dispatch 'some'"),
        (("--precision", "fp4"), "invalid precision 'fp4'"),
        (("--precision", "mxfp8"), "H100-SXM has no MX formats"),
        (("--global-batch", "4Mi"), "at most 1048576 sequences; tokens are not counted"),
        (("--explain", "9999"), "the layouts"),
        (("--sensitivity",), "No such option '--sensitivity'"),
        (("--explain", "1", "--launch", "megatron"), "--explain has no effect with --launch"),
        (("--top", "2", "--launch", "megatron"), "--top has no effect with --launch"),
        (("--launch", "torchtitan"), "add --trainer fsdp2"),
        (("--trainer", "fsdp2", "--launch", "megatron"), "add --trainer megatron"),
        (("--max-memory", "20GiB", "--fix", "tp=1,pp=1"), "the smallest needs"),
        (("--fix", "micro-batch=3"), "try another number of sequences or GPUs, or fix less"),
    ],
)
def test_an_impossible_search_is_an_error_with_a_suggestion(options, message):
    words = [*ASKED]
    for name, value in itertools.pairwise(options):
        if name in words:
            words[words.index(name) + 1] = value
            options = tuple(word for word in options if word not in {name, value})
    code = 1 if message.startswith(("the smallest", "try another")) else 2
    assert message in " ".join(invoke("plan", *words, *options, code=code).stderr.split())


def test_a_value_may_be_fixed_if_no_option_contradicts_it():
    words = ("--model", "mixtral-8x7b", "--gpus", "16", "--global-batch", "64")
    for more in ((), ("--routing", "natural")):
        shown = invoke("plan", *words, *more, "--fix", "routing=natural,tp=1", "--json").stdout
        assert "routing=natural" in json.loads(shown)["layouts"][0]["strategy"]
    shown = invoke("plan", *words, "--fix", "trainer=nemo,tp=1", "--json").stdout
    assert json.loads(shown)["trainer"] == "nemo"


@pytest.mark.parametrize("cluster", [name for name in shipped() if load_cluster(name).gpu])
def test_each_sentence_of_a_note_is_there_once(cluster):
    words = ("--model", "llama3-8b", "--gpus", "16", "--global-batch", "64", "--json")
    for command in (("plan",), ("plan", "price")):
        note = json.loads(invoke(*command, *words, "--cluster", cluster).stdout)["note"]
        sentences = note.split("; ")
        assert len(sentences) == len(set(sentences)) >= 1


def test_missing_options_are_named():
    said = invoke("plan", "--cluster", "h100", code=2).stderr
    assert "missing --model, --world-size, --global-batch" in " ".join(said.split())


# Types of the arguments of Megatron-LM (megatron/training/arguments.py of core 0.14).
NUMBERS = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length"),
    *("max-position-embeddings", "vocab-size", "num-query-groups", "kv-channels"),
    *("micro-batch-size", "global-batch-size", "tensor-model-parallel-size"),
    *("pipeline-model-parallel-size", "context-parallel-size", "mtp-num-layers"),
    *("num-virtual-stages-per-pipeline-rank", "decoder-last-pipeline-num-layers"),
    *("recompute-num-layers", "num-experts", "moe-router-topk", "moe-ffn-hidden-size"),
    *("expert-model-parallel-size", "expert-tensor-parallel-size", "q-lora-rank"),
    *("kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"),
    *("moe-shared-expert-intermediate-size", "num-distributed-optimizer-instances"),
    *("moe-mlp-glu-interleave-size", "moe-router-num-groups", "moe-router-group-topk"),
    "window-attn-skip-freq",
)
SWITCHES = (
    *("group-query-attention", "swiglu", "disable-bias-linear", "bf16", "fp16"),
    *("untie-embeddings-and-output-weights", "sequence-parallel", "overlap-grad-reduce"),
    *("overlap-param-gather", "use-distributed-optimizer", "multi-latent-attention"),
    *("moe-grouped-gemm", "moe-enable-deepep", "overlap-moe-expert-parallel-comm"),
    *("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"),
    *("grad-reduce-in-bf16", "use-megatron-fsdp", "no-gradient-accumulation-fusion"),
    *("moe-pad-expert-input-to-capacity", "te-rng-tracker", "fp8-dot-product-attention"),
    *("moe-permute-fusion", "moe-router-fusion", "use-transformer-engine-op-fuser"),
    *("use-precision-aware-optimizer", "no-check-for-nan-in-loss-and-grad"),
    *("qk-layernorm", "quick-geglu", "moe-paged-stash"),
    "moe-pad-experts-for-cuda-graph-inference",
)
CHOICES = {
    "normalization": ["LayerNorm", "RMSNorm"],
    "position-embedding-type": ["learned_absolute", "rope", "mrope", "relative", "none"],
    "transformer-impl": ["local", "transformer_engine"],
    "attention-backend": ["flash", "fused", "unfused", "local", "auto"],
    "recompute-granularity": ["full", "selective"],
    "recompute-method": ["uniform", "block"],
    "fp8-format": ["e4m3", "hybrid"],
    "fp8-recipe": ["tensorwise", "delayed", "mxfp8", "blockwise"],
    "cuda-graph-impl": ["none", "local", "transformer_engine"],
    "moe-token-dispatcher-type": ["allgather", "alltoall", "flex"],
    "moe-flex-dispatcher-backend": ["deepep", "hybridep"],
    "data-parallel-sharding-strategy": [
        *("no_shard", "optim", "optim_grads", "optim_grads_params"),
    ],
    "tokenizer-type": ["NullTokenizer"],
    "softmax-type": ["learnable", "vanilla", "off-by-one"],
    "exp-avg-dtype": ["fp32", "fp16", "bf16", "fp8"],
    "exp-avg-sq-dtype": ["fp32", "fp16", "bf16", "fp8"],
    "ckpt-format": ["torch", "torch_dist", "fsdp_dtensor"],
}
MODULES = ["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


def megatron_parser():
    """A parser of Megatron-LM's arguments, as far as they are printed."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, values in CHOICES.items():
        parser.add_argument(f"--{name}", choices=values)
    floats = ("attention-dropout", "hidden-dropout", "moe-expert-capacity-factor")
    for name in (*floats, "glu-linear-offset", "activation-func-clamp-value"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--window-size", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--recompute-modules", nargs="*", choices=MODULES)
    parser.add_argument(
        "--cuda-graph-scope", nargs="*", choices=["full_iteration", *GRAPHS[1:]]
    )
    parser.add_argument("--moe-layer-freq")
    parser.add_argument("--pipeline-model-parallel-layout")
    return parser


@pytest.mark.parametrize("trainer", ["megatron", "nemo", "nemo-fsdp"])
@pytest.mark.parametrize(
    ("name", "gpus"),
    [("llama3-8b", 128), ("mixtral-8x7b", 16), ("deepseek-v3", 128), ("gpt", 128)],
)
def test_megatron_accepts_the_arguments_of_every_layout(trainer, name, gpus):
    gpt = Model(name="gpt", hidden=4096, heads=32, kv_heads=32, layers=30, ffn=16384)
    model = replace(gpt, mlp="gelu", tied=True) if name == "gpt" else load(name)
    job = replace(SMALL, model=model, gpus=gpus, global_batch=gpus, trainer=trainer)
    job = replace(job, gpu="gb200" if name == "deepseek-v3" else "h100")
    # The layouts of many experts are divided among the trainers.
    fixed = {"megatron": {"cp": 1}, "nemo": {"cp": 2}} if name == "deepseek-v3" else {}
    layouts = rank(job, fixed.get(trainer, {}), Constants()).layouts
    assert layouts
    parser = megatron_parser()
    for row in layouts:
        text = launch.launch("megatron", row.plan).replace(" \\\n", " ").replace("'", "")
        read = parser.parse_args(text.split())
        ranks = read.tensor_model_parallel_size * read.pipeline_model_parallel_size
        assert gpus % (ranks * (read.context_parallel_size or 1)) == 0
        assert read.num_layers == model.layers
        assert read.swiglu is read.disable_bias_linear is (model.mlp == "swiglu")
        assert bool(read.num_experts) is (model.experts is not None)
        assert read.sequence_parallel is (row.plan.tp > 1)


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({"--sequence-parallel": "", "--tensor-model-parallel-size": "1"}, 1),
        ({"--sequence-parallel": "", "--tensor-model-parallel-size": "2"}, 0),
        ({"--overlap-param-gather": "", "--overlap-grad-reduce": ""}, 1),
        ({"--recompute-modules": "layernorm", "--recompute-granularity": "full"}, 2),
        ({"--fp8-recipe": "mxfp8", "--fp8-format": "e4m3", "--bf16": ""}, 1),
        ({"--moe-enable-deepep": "", "--moe-token-dispatcher-type": "alltoall"}, 1),
        ({"--cuda-graph-scope": "attn"}, 1),
        ({"--cuda-graph-impl": "local", "--recompute-granularity": "full"}, 2),
        ({"--multi-latent-attention": "", "--group-query-attention": ""}, 1),
        ({"--moe-paged-stash": ""}, 1),
    ],
)
def test_options_that_exclude_or_need_each_other_are_found(change, rules):
    assert len(launch.violations(change, launch.MEGATRON_RULES)) == rules


def test_the_shape_of_attention_and_router_is_an_argument():
    def arguments(model):
        text = launch.launch("megatron", replace(SMALL, model=model, gpus=128))
        return megatron_parser().parse_args(text.replace(" \\\n", " ").replace("'", "").split())

    deepseek = arguments(load("deepseek-v3"))
    assert (deepseek.moe_router_num_groups, deepseek.moe_router_group_topk) == (8, 4)
    assert deepseek.qk_layernorm
    assert deepseek.swiglu
    qwen = load("qwen3-30b-a3b")
    assert arguments(qwen).qk_layernorm
    assert arguments(qwen).moe_router_num_groups is None
    # GPT-OSS 20B, as Megatron-Core's example has it: windows on every second layer, sinks, and
    # a clamped unit with biases.
    experts = replace(qwen.experts, number=32, top_k=4, has_bias=True)
    oss = replace(qwen, experts=experts, window=128, has_sinks=True, has_qk_norm=False)
    read = arguments(oss)
    assert (read.window_size, read.window_attn_skip_freq) == ((128, 0), 2)
    assert read.softmax_type == "learnable"
    assert (read.glu_linear_offset, read.activation_func_clamp_value) == (1, 7)
    assert read.quick_geglu
    assert not any((read.swiglu, read.disable_bias_linear, read.qk_layernorm))
    llama = arguments(load("llama3-8b"))
    assert not llama.qk_layernorm
    assert (llama.softmax_type, llama.window_size) == (None, None)


def test_every_switch_of_a_strategy_is_an_argument():
    plan = replace(SMALL, model=load("qwen3-30b-a3b"), ep=8, gpu="gb200", precision="mxfp8")
    usual = launch.launch("megatron", plan).split(" \\\n")
    switches = {
        "fused_experts": (True, "--use-transformer-engine-op-fuser"),
        "fp8_attention": (True, "--fp8-dot-product-attention"),
        "moments": ("bf16", "--exp-avg-sq-dtype bf16"),
        "graphs": ("full", "--no-check-for-nan-in-loss-and-grad"),
        "dispatch": ("alltoall capacity", "--moe-expert-capacity-factor 1"),
    }
    for name, (value, argument) in switches.items():
        changed = launch.launch("megatron", replace(plan, **{name: value})).split(" \\\n")
        assert argument in changed
        assert argument not in usual
    with pytest.raises(ConfigError, match="precision-aware-optimizer needs --use-distributed"):
        launch.launch("megatron", replace(plan, moments="bf16", sharding="ddp"))


EXPERTS = replace(SMALL, model=load("qwen3-30b-a3b"), ep=8, gpu="gb200", domain=72)
FUSED = {"precision": "mxfp8", "fused_experts": True, "dispatch": "hybridep"}


@pytest.mark.parametrize(
    ("change", "newer"),
    [
        ({}, []),
        ({"graphs": "attn+moe_router", "dispatch": "hybridep overlapped"}, []),
        ({"graphs": "full", "dispatch": "alltoall capacity"}, []),
        (FUSED, ["--moe-mlp-glu-interleave-size", "--use-transformer-engine-op-fuser"]),
        (
            {**FUSED, "graphs": "full"},
            ["--moe-expert-rank-capacity-factor", "--moe-paged-stash"],
        ),
        (
            {"graphs": "full", "dispatch": "alltoall overlapped capacity"},
            ["--cuda-graph-impl local with --overlap-moe-expert-parallel-comm"],
        ),
    ],
)
def test_arguments_that_core_0_16_rejects_say_so(change, newer):
    text = launch.launch("megatron", replace(EXPERTS, **change))
    needs = launch.needs_newer(text)
    assert bool(needs) is bool(newer)
    for option in newer:
        assert option in needs
        assert option.split()[0] in text


def test_a_graph_of_dropless_experts_has_buffers_and_only_fused_experts_take_them():
    whole = replace(EXPERTS, graphs="full", **FUSED)
    text = launch.launch("megatron", whole)
    assert "--moe-expert-rank-capacity-factor 1.5" in text
    assert "--moe-pad-experts-for-cuda-graph-inference" in text
    padded = launch.launch("megatron", replace(whole, dispatch="hybridep capacity"))
    assert "--moe-expert-rank-capacity-factor" not in padded
    with pytest.raises(ConfigError, match="graphs=full with hybridep takes fused"):
        launch.launch("megatron", replace(whole, fused_experts=False))


def test_deepep_pads_no_experts_to_a_capacity():
    plan = replace(EXPERTS, dispatch="deepep capacity")
    message = "DeepEP pads no experts to a capacity; take alltoall or hybridep"
    for refuses in (plan.check, lambda: launch.launch("megatron", plan)):
        with pytest.raises(ConfigError, match=message):
            refuses()
    words = ("--model", "mixtral-8x7b", "--gpus", "64", "--global-batch", "512")
    shown = invoke("plan", *words, "--fix", "dispatch=deepep+capacity", code=2).stderr
    assert message in " ".join(shown.split())


@pytest.mark.parametrize("dispatch", ["deepep", "hybridep", "deepep+overlapped"])
def test_dispatchers_of_hopper_are_refused_on_older_gpus(dispatch):
    words = ("--model", "mixtral-8x7b", "--gpus", "64", "--global-batch", "512")
    words = (*words, "--cluster", "dgx-a100")
    for command, option in ((("plan",), "--fix"), (("plan", "price"), "--strategy")):
        shown = invoke(*command, *words, option, f"ep=8,dispatch={dispatch}", code=2).stderr
        assert "needs compute capability 9.0, and A100" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("change", "ep"), [({"gpu": "a100"}, "8"), ({"domain": 4}, "12"), ({}, "40")]
)
def test_all_to_alls_overlap_where_deepep_is_refused(change, ep):
    model = load("qwen3-30b-a3b")
    model = replace(model, experts=replace(model.experts, number=120))
    job = replace(SMALL, model=model, gpus=int(ep), global_batch=240, **change)
    plans = list(candidates(job, {"ep": ep, "tp": "1", "pp": "1", "cp": "1"}))
    assert {plan.dispatch for plan in plans} == {"alltoall", "alltoall overlapped"}
    for plan in plans:
        plan.check()


def test_the_command_warns_of_arguments_that_take_a_newer_core():
    words = ("--model", "qwen3-30b-a3b", "--gpus", "8", "--global-batch", "64")
    more = ("--cluster", "gb200", "--precision", "fp8", "--launch", "megatron", "--fix", "tp=1")
    result = invoke("plan", *words, *more)
    assert "--moe-mlp-glu-interleave-size" in result.stdout
    assert "take a core after 0.16" in " ".join(result.stderr.split())
    document = json.loads(invoke("plan", *words, *more, "--json").stdout)
    Draft202012Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(document)
    assert "--moe-mlp-glu-interleave-size" in document["launch_needs"][0]


def test_a_search_tries_the_dispatcher_of_the_machine_and_fused_experts():
    model = load("qwen3-30b-a3b")
    rack = replace(SMALL, model=model, gpu="gb200", domain=72, precision="mxfp8")
    for job, kind in ((replace(SMALL, model=model), "deepep"), (rack, "hybridep")):
        plans = [row.plan for row in rank(job, {"tp": "1", "pp": "1"}, Constants()).plans]
        kinds = {plan.dispatch.split()[0] for plan in plans}
        assert kinds == {"alltoall", kind}
        assert {plan.fused_experts for plan in plans} == {job.precision == "mxfp8"}


def test_the_printed_strategy_of_a_search_has_its_price():
    words = ("--model", "qwen3-30b-a3b", "--world-size", "8", "--global-batch", "64")
    more = (*words, "--cluster", "gb200", "--precision", "fp8", "--json")
    for row in json.loads(invoke("plan", *more).stdout)["layouts"]:
        price = invoke("plan", "price", *more[:-3], "--json", "--strategy", row["strategy"])
        again = json.loads(price.stdout)
        assert again["strategy"] == row["strategy"]
        assert again["step_ns"] == row["step_ns"]


def test_graphs_and_recompute_of_parts_are_printed():
    plan = replace(SMALL, model=load("deepseek-v3"), ep=8, recompute="mla_up_proj+moe_act")
    text = launch.launch("megatron", replace(plan, graphs="attn+moe_router"))
    assert "--recompute-modules mla_up_proj moe_act" in text
    # As published runs of DeepSeek-V3 on H100 do.
    latent = [plan.recompute for plan in candidates(replace(plan, recompute="none"), {})]
    assert "layernorm+mla_up_proj+moe_act" in latent
    assert "--cuda-graph-scope attn moe_router" in text
    assert "--cuda-graph-impl transformer_engine" in text
    whole = launch.launch("megatron", replace(plan, graphs="full"))
    assert "--cuda-graph-scope full_iteration" in whole


def test_a_graph_of_a_step_that_has_no_options_says_what_to_fix():
    fix = "ep=8,graphs=full"
    words = ("plan", "--model", "qwen3-30b-a3b", "--gpus", "8", "--global-batch", "64")
    more = (*words, "--cluster", "gb200-nvl72", "--launch", "megatron", "--fix")
    refused = " ".join(invoke(*more, fix, code=2).stderr.split())
    assert "graphs=full with hybridep takes fused experts" in refused
    assert "--moe-" not in refused
    assert "--cuda-graph-scope full_iteration" in invoke(*more, f"{fix},precision=mxfp8").stdout


def test_experts_are_searched_with_graphs_and_overlap():
    job = replace(SMALL, model=load("mixtral-8x7b"), gpus=32, global_batch=64)
    plans = list(candidates(job, {}))
    assert {plan.graphs for plan in plans} == {"", "attn+moe_router+moe_preprocess"}
    assert {plan.dispatch for plan in plans} == {"alltoall", "deepep", "deepep overlapped"}
    able = {"none", "moe_act", "layernorm+moe_act", "full"}
    assert {plan.recompute for plan in plans} >= able
    for plan in plans:
        assert not (plan.graphs and plan.recomputed)
        assert "overlapped" not in plan.dispatch or plan.pp == 1 or plan.vp > 1
    assert {plan.graphs for plan in candidates(job, {"graphs": "full"})} == {"full"}
    dense = candidates(SMALL, {})
    assert {(plan.graphs, plan.dispatch) for plan in dense} == {("", "alltoall")}


@pytest.mark.parametrize(
    "fixed",
    [
        {},
        {"graphs": "attn+moe_router"},
        {"graphs": "full"},
        {"recompute": "moe"},
        {"recompute": "full"},
        {"dispatch": "alltoall capacity", "graphs": "full"},
    ],
)
@pytest.mark.parametrize("trainer", ["megatron", "nemo-fsdp"])
def test_every_strategy_of_a_search_can_be_launched(trainer, fixed):
    job = replace(SMALL, model=load("mixtral-8x7b"), gpus=8, global_batch=16, trainer=trainer)
    job = replace(job, gpu="gb200", domain=72, precision="mxfp8")
    plans = list(candidates(job, fixed))
    assert bool(plans) is (trainer == "megatron" or "graphs" not in fixed)
    for plan in plans:
        plan.check()
        launch.launch("megatron", plan)


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        ("graphs=attn,recompute=full", "CUDA graphs exclude recompute of whole layers"),
        ("graphs=full,dispatch=deepep", "token counts stop the host"),
    ],
)
def test_a_search_without_strategies_says_what_is_refused(fixed, reason):
    words = ("--model", "mixtral-8x7b", "--gpus", "64", "--cluster", "h100")
    shown = invoke("plan", *words, "--global-batch", "512", "--fix", fixed, code=1).stderr
    assert reason in " ".join(shown.split())


def test_only_what_a_trainer_has_exchanges_tokens():
    experts = replace(SMALL, model=load("mixtral-8x7b"), ep=8)
    for trainer, kinds in (("deepspeed", {"alltoall"}), ("fsdp2", {"alltoall", "deepep"})):
        plans = candidates(replace(experts, trainer=trainer), {})
        assert {plan.dispatch for plan in plans} == kinds
    with pytest.raises(ConfigError, match="deepep: Megatron-DeepSpeed with ZeRO has none"):
        replace(experts, trainer="deepspeed", dispatch="deepep").check()
    with pytest.raises(ConfigError, match="overlapped dispatch takes Megatron-Core"):
        replace(experts, trainer="fsdp2", dispatch="deepep overlapped").check()


def test_the_fastest_strategy_that_can_be_launched_is_printed():
    refused = replace(SMALL, trainer="fsdp2", sharding="hsdp1", cp=2)
    able = replace(refused, sharding="zero3")
    plans = (refused, replace(refused, micro_batch=2), able)
    arguments, (refusal,) = launch.launch_fastest("torchtitan", plans)
    assert arguments == launch.launch("torchtitan", able)
    assert (refusal.plan, refusal.strategies) == (refused, 2)
    assert refusal.reason == "cp 2 does not divide hsdp1"
    with pytest.raises(ConfigError, match="--launch torchtitan: cp 2 does not divide hsdp1"):
        launch.launch_fastest("torchtitan", plans[:2])


def test_strategies_that_are_passed_over_are_named():
    words = ("--model", "llama3-8b", "--gpus", "144", "--cluster", "gb200", "--trainer")
    words = (*words, "fsdp2", "--global-batch", "144", "--seq-len", "64Ki", "--fix")
    more = ("cp=16,sharding=hsdp72", "--launch", "torchtitan")
    shown = invoke("plan", *words, *more, code=2).stderr
    assert "--launch torchtitan: cp 16 does not divide hsdp72" in " ".join(shown.split())
    result = invoke("plan", *words, "cp=16", "--launch", "torchtitan")
    assert "--parallelism.context_parallel_degree 16" in result.stdout
    warned = " ".join(result.stderr.split())
    assert re.search(r"\d+ faster strateg\w+ cannot be launched, first cp=16,", warned)
    document = json.loads(
        invoke("plan", *words, "cp=16", "--launch", "torchtitan", "--json").stdout
    )
    Draft202012Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(document)
    assert "cp 16 does not divide hsdp72" in document["passed_over"][0]
    assert document["launch"].rstrip() == result.stdout.rstrip()


def test_torchtitan_gets_the_dispatcher():
    plan = replace(SMALL, model=load("deepseek-v3"), gpus=128, ep=8, trainer="fsdp2")
    plan = replace(plan, sharding="zero3")
    option = "--parallelism.expert_parallel_comm_backend"
    assert option not in launch.launch("torchtitan", plan)
    assert f"{option} deepep" in launch.launch("torchtitan", replace(plan, dispatch="deepep"))


def test_a_strategy_that_breaks_a_rule_is_not_printed():
    plan = replace(SMALL, model=load("mixtral-8x7b"), ep=8, recompute="full")
    plan = replace(plan, dispatch="deepep overlapped")
    with pytest.raises(ConfigError, match="excludes --overlap-moe-expert-parallel-comm"):
        launch.launch("megatron", plan)


@pytest.mark.parametrize("precision", ["bf16", "fp8_titan"])
def test_torchtitan_gets_degrees_that_multiply_to_the_gpus(precision):
    job = replace(SMALL, gpus=64, global_batch=256, trainer="fsdp2", precision=precision)
    for row in rank(job, {}, Constants()).layouts:
        words = launch.launch("torchtitan", row.plan).replace(" \\\n", " ").split()
        values = dict(itertools.pairwise(words))
        product = 1
        for name in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel"):
            product *= int(values[f"--parallelism.{name}_degree"])
        for name in ("context_parallel", "pipeline_parallel"):
            product *= int(values[f"--parallelism.{name}_degree"])
        assert product == 64
        assert (values["--model.name"], values["--model.flavor"]) == ("llama3", "8B")
        assert ("--model.converters" in values) is (precision != "bf16")
        local = int(values["--training.local_batch_size"])
        assert 256 % (local * row.plan.dp) == 0


@pytest.mark.parametrize(
    ("model", "pp", "vp", "stage"),
    [
        ("llama3-8b", 4, 1, (8, 0, 0)),
        ("llama3-8b", 4, 4, (2, 0, 0)),
        ("deepseek-v3", 8, 1, None),  # 61 layers
        ("deepseek-v3", 31, 2, (1, 0, 1)),
        ("deepseek-v3", 7, 3, (3, 1, 1)),
    ],
)
def test_torchtitan_gets_the_stages_that_are_priced(model, pp, vp, stage):
    plan = replace(SMALL, model=load(model), gpus=2 * pp, pp=pp, vp=vp, trainer="fsdp2")
    plan = replace(plan, sharding="zero3", global_batch=4 * pp)
    plan.check()
    words = launch.launch("torchtitan", plan).replace(" \\\n", " ").split()
    values = dict(itertools.pairwise(words))
    pipeline = "--parallelism.pipeline_parallel"
    assert values[f"{pipeline}_schedule"] == ("Interleaved1F1B" if vp > 1 else "1F1B")
    names = ("layers_per_stage", "first_stage_less_layers", "last_stage_less_layers")
    options = [values.get(f"{pipeline}_{name}") for name in names]
    if stage is None:
        assert options == [None, None, None]
        return
    assert options == [str(number) for number in stage]
    # As torchtitan counts virtual stages (torchtitan/distributed/pipeline_parallel.py).
    own, first, last = stage
    assert -(-(plan.model.layers + first + last) // own) == pp * vp


def test_fsdp2_is_searched_with_virtual_stages():
    job = replace(SMALL, gpus=16, global_batch=64, trainer="fsdp2")
    plans = list(candidates(job, {"tp": "1", "cp": "1", "pp": "4"}))
    assert {plan.vp for plan in plans} == {1, 2, 4, 8}
    for plan in plans:
        plan.check()
        launch.launch("torchtitan", plan)
    steps = [price_plan(replace(plans[0], vp=vp), Constants()).step_s for vp in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": load("llama2-7b")}, "no flavor of llama2-7b"),
        ({"recompute": "8"}, "no recompute 8"),
        (
            {"precision": "fp8_te"},
            "fp8_te: no recipe of PyTorch FSDP2, as in torchtitan; take one of",
        ),
        ({"cp": 2, "sharding": "hsdp1"}, "cp 2 does not divide hsdp1"),
    ],
)
def test_torchtitan_refuses_what_it_lacks(change, message):
    with pytest.raises(ConfigError, match=message):
        launch.launch(
            "torchtitan", replace(SMALL, **{"trainer": "fsdp2", "sharding": "zero3", **change})
        )


@pytest.mark.parametrize(("pp", "vp", "mtp"), [(8, 4, 0), (4, 4, 1), (16, 4, 1), (6, 5, 0)])
def test_stages_that_no_count_of_layers_fills_are_laid_out(pp, vp, mtp):
    model = replace(load("deepseek-v3"), mtp_layers=mtp)
    plan = replace(SMALL, model=model, gpus=pp * 8, pp=pp, vp=vp, ep=8)
    text = launch.launch("megatron", plan).replace(" \\\n", " ")
    layout = re.search(r"--pipeline-model-parallel-layout '(\S+)'", text)[1]
    assert layout.replace("|", "") == "E" + "t" * 61 + "m" * mtp + "L"
    stages = layout.split("|")
    sizes = [len(stage) for stage in stages]
    assert len(sizes) == pp * vp
    # Even, or full of layers but for the last stage.
    layers = {stage.count("t") for stage in stages[:-1]}
    assert max(sizes) - min(sizes) <= 1 or layers == {-(-61 // (pp * vp))}
    assert "--num-virtual-stages-per-pipeline-rank" not in text


@pytest.mark.parametrize("mtp_layers", [0, 1])
@pytest.mark.parametrize("layers", [1, 5, 23, 32, 61])
def test_a_layout_is_even_if_its_units_are(layers, mtp_layers):
    model = replace(SMALL.model, layers=layers, mtp_layers=mtp_layers)
    units = "E" + "l" * (layers + mtp_layers) + "L"
    for pp, vp in itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 5)):
        parts = pp * vp
        ends = [len(units) * part // parts for part in range(parts + 1)]
        counts = [units[ends[k] : ends[k + 1]].count("l") for k in range(parts)]
        of_rank = [sum(counts[rank::pp]) for rank in range(pp)]
        is_even = max(of_rank) * pp < layers + mtp_layers + pp
        is_even &= max(counts) * parts <= 1.1 * (layers + mtp_layers)
        assert has_even_layout(replace(SMALL, model=model, pp=pp, vp=vp)) == is_even
