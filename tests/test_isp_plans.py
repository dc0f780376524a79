"""Test `fastcomm isp price` and `evaluate`: fixed strategies and tables of runs."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import invoke
from conftest import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from docs import isp_runs
from fastcomm.errors import ConfigError
from fastcomm.isp.evaluation import EXPECTED
from fastcomm.isp.plan import Plan, with_strategy
from fastcomm.isp.plan_cost import Constants, collective
from fastcomm.isp.plan_step import causal_flops, price_plan
from fastcomm.isp.presets import load
from fastcomm.isp.run_calibration import calibrate
from fastcomm.isp.runs import errors, load_models, load_runs, price_run

ROOT = Path(__file__).parents[1]

PRICE = (
    *("isp", "price", "--model", "llama3-70b", "--world-size", "64"),
    *("--seq-len", "8Ki", "--global-batch", "1Mi"),
)
PLAN = Plan(
    model=load("llama3-8b"),
    gpu="h100",
    gpus=64,
    global_batch=128,
    seq_len=8192,
    node_bytes_per_s=400e9,
    domain=8,
)
HEAD = "model,gpu,gpus,global_batch,seq_len"


def schema(name):
    path = ROOT / "docs" / "schemas" / f"isp-{name}.json"
    return Draft202012Validator(json.loads(path.read_text("utf-8")))


def table(tmp_path, *rows, head=HEAD):
    """A CSV file of runs."""
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def published():
    """The folder of published training runs."""
    folder = SHARED / "data" / "training_runs"
    if not folder.is_dir():
        pytest.skip(f"no published training runs at {folder}")
    return folder


@settings(max_examples=60)
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
    time = collective(PLAN, Constants(), "all_gather", size, ranks)
    assert time > size * 63 / 64 / 400e9
    alone = collective(PLAN, Constants(), "all_gather", size, 8)
    sharing = collective(PLAN, Constants(), "all_gather", size, 8, stride=8)
    assert alone < time < sharing
    assert collective(PLAN, Constants(), "all_gather", size, 1) == 0


def test_causal_flops_are_those_of_the_definition():
    model = PLAN.model
    parameters = model.parameters - model.embedding
    scores = 6 * model.layers * model.hidden * PLAN.seq_len
    assert causal_flops(PLAN) == pytest.approx(6 * parameters + scores, rel=1e-3)


def test_price_explains_a_strategy_that_does_not_fit():
    words = (*PRICE, "--strategy", "tp=2,pp=1,dp=32,sharding=ddp,recompute=none")
    shown = invoke(*words).stdout
    assert "(does not fit)" in shown
    assert "error to expect: 5 %" in shown
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
    ],
)
def test_an_invalid_strategy_is_refused(strategy, message):
    result = invoke(*PRICE, "--strategy", strategy, code=2)
    assert message in " ".join(result.stderr.split())


def test_a_cluster_without_a_measured_gpu_is_refused():
    result = invoke(*PRICE, "--cluster", "a800", code=2)
    assert "no measured GPU; take dgx-a100, dgx-h100" in " ".join(result.stderr.split())
    missing = invoke("isp", "price", code=2)
    assert "Missing option --model." in missing.stderr


def test_a_table_with_five_columns_is_priced(tmp_path):
    path = table(tmp_path, "llama3-8b,h100,8,64,8192", "llama3-70b,gb200,64,128,8192")
    document = json.loads(invoke("isp", "evaluate", path, "--json").stdout)
    schema("evaluate").validate(document)
    assert [row["id"] for row in document["rows"]] == ["1", "2"]
    assert all(row["error"] is None for row in document["rows"])
    assert all(row["predicted_tokens_per_s_per_gpu"] > 0 for row in document["rows"])
    assert document["summary"] == []
    shown = invoke("isp", "evaluate", path).stdout
    assert "strategy" in shown
    assert "sharding=zero" in shown


def test_unknown_values_are_tried_and_the_fastest_that_fits_counts(tmp_path):
    head = f"{HEAD},micro_batch,recompute,sharding"
    row = "llama3-8b,h100,8,64,8192"
    path = table(tmp_path, f"{row},unknown,unknown,zero3", head=head)
    (run,) = load_runs(path, {})
    assert len(run.plans) == 12
    best = price_run(run, Constants()).price
    rates = [price_plan(plan, Constants()) for plan in run.plans]
    assert best.fits
    assert best.tokens_per_s_per_gpu == max(p.tokens_per_s_per_gpu for p in rates if p.fits)


@pytest.mark.parametrize(
    ("rows", "head", "message"),
    [
        ((), HEAD, "no rows"),
        (("a",), "model", "missing column gpu, gpus, global_batch, seq_len"),
        (("llama3-8b,h100,8,64",), HEAD, "line 2: expected 5 fields"),
        (("llama3-8b,h100,8,64,1,1",), HEAD, "line 2: expected 5 fields"),
        (("llama3-8b,v100,8,64,8192",), HEAD, "row 1: unknown GPU 'v100'"),
        (("nothing,h100,8,64,8192",), HEAD, "row 1: unknown model nothing: expected"),
        (("mixtral-8x7b,h100,8,64,8192,16",), f"{HEAD},ep", "ep 16 does not divide the 8"),
        (("llama3-8b,h100,x,64,8192",), HEAD, "gpus"),
        (("llama3-8b,h100,8,64,8192,3",), f"{HEAD},tp", "row 1: tp x pp x cp is 3"),
        (("llama3-8b,h100,8,64,8192,x",), f"{HEAD},node_gbps", "row 1: invalid node_gbps"),
        (
            ("llama3-8b,h100,8,64,8192,-1",),
            f"{HEAD},tokens_per_s_per_gpu",
            "invalid tokens_per_s_per_gpu -1: expected a number above 0",
        ),
    ],
)
def test_a_broken_table_is_refused_with_its_place(tmp_path, rows, head, message):
    result = invoke("isp", "evaluate", table(tmp_path, *rows, head=head), code=2)
    assert message in " ".join(result.stderr.split())


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "runs.csv"
    path.write_bytes(HEAD.encode() + b"\n" + content)
    for read in (lambda: load_runs(path, {}), lambda: load_models(path)):
        with suppress(ConfigError):
            read()


def test_models_of_a_table_come_with_the_runs(tmp_path):
    models = tmp_path / "models.csv"
    models.write_text(
        "name,layers,hidden,heads,kv_heads,ffn,vocab,mlp,experts,topk,expert_ffn\n"
        "mine,24,2048,16,4,8192,32000,gelu,0,0,0\n"
        "sparse,24,2048,16,4,8192,32000,swiglu,64,8,1024\n"
    )
    shapes = load_models(models)
    assert shapes["mine"].experts is None
    assert shapes["sparse"].experts.number == 64
    path = table(tmp_path, "mine,a100,8,64,2048", "sparse,b200,8,64,2048")
    document = json.loads(invoke("isp", "evaluate", path, "--json").stdout)
    assert [row["model"] for row in document["rows"]] == ["mine", "sparse"]


def test_calibration_finds_a_slower_gemm_again(tmp_path):
    truth = replace(Constants(), gemm_slowdown=1.3)
    plans = [replace(PLAN, gpus=gpus, tp=tp) for gpus in (8, 64) for tp in (1, 2, 8)]
    rates = [price_plan(plan, truth).tokens_per_s_per_gpu for plan in plans]
    head = f"{HEAD},tp,micro_batch,recompute,sharding,source,tokens_per_s_per_gpu"
    rows = [
        f"llama3-8b,h100,{p.gpus},128,8192,{p.tp},1,none,zero1,s{p.gpus},{rate}"
        for p, rate in zip(plans, rates, strict=True)
    ]
    path = table(tmp_path, *rows, head=head)
    fit = calibrate(load_runs(path, {}), Constants())
    assert fit.fitted < 0.02 < fit.before
    assert fit.held_out < 0.03
    assert fit.constants.gemm_slowdown == pytest.approx(1.3, rel=0.05)
    shown = invoke("isp", "evaluate", path, "--calibrate-from", path).stdout
    assert re.search(r"gemm_slowdown +1\.1 +1\.[23]", shown)
    priced = invoke(*PRICE, "--calibrate-from", path, "--json").stdout
    assert json.loads(priced)["calibration"]["runs"] == 6


def test_calibration_needs_measurements(tmp_path):
    path = table(tmp_path, "llama3-8b,h100,8,64,8192")
    result = invoke("isp", "evaluate", path, "--calibrate-from", path, code=2)
    assert "no run has tokens_per_s_per_gpu" in " ".join(result.stderr.split())


def test_output_has_the_document_and_the_table(tmp_path):
    path = table(tmp_path, "llama3-8b,h100,8,64,8192")
    invoke("isp", "evaluate", path, "--output", tmp_path / "out")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        *("evaluation.json", "runs.csv", "runs.parquet")
    }
    invoke(*PRICE, "--output", tmp_path / "price")
    assert (tmp_path / "price" / "terms.parquet").exists()


def test_strategies_are_read_with_any_spacing():
    plan = with_strategy(PLAN, " tp = 8, sharding=ZeRO3 ,overlap=no,")
    assert (plan.tp, plan.sharding, plan.overlap, plan.dp) == (8, "zero3", False, 8)


BARS = {"all": 0.07, "dense": 0.06, "experts": 0.25, "a100": 0.06, "h100": 0.08}


def test_median_errors_on_published_runs_are_within_their_bars(published):
    rows = [price_run(run, Constants()) for run in isp_runs.load(published)]
    assert len(rows) == 305
    found = {group.name: group.median for group in errors(rows)}
    for name, bar in BARS.items():
        assert found[name] < bar, name


def test_the_page_of_runs_is_current(published):
    page = isp_runs.PAGE.read_text("utf-8")
    assert isp_runs.groups(isp_runs.load(published)) in page
    assert isp_runs.constants() in page


def test_the_error_to_expect_is_that_of_the_page():
    page = isp_runs.PAGE.read_text("utf-8")
    rows = re.findall(r"^\| (?:dense|experts), .*? \| \d+ \| ([\d.]+) % \| (\d+) %", page, re.M)
    shown = [(float(median) / 100, float(most) / 100) for median, most in rows]
    assert np.allclose(shown, list(EXPECTED.values()))


def test_settings_have_a_table_for_each_inner_command(tmp_path, monkeypatch):
    settings_file = tmp_path / "settings.toml"
    settings_file.write_text('[isp]\ncluster = "a100"\n[isp.price]\nstrategy = "tp=2"\n')
    monkeypatch.setenv("FASTCOMM_SETTINGS", str(settings_file))
    assert "tp=2,dp=32" in json.loads(invoke(*PRICE, "--json").stdout)["strategy"]
    monkeypatch.setenv("FASTCOMM_ISP_PRICE_STRATEGY", "tp=4")
    assert "tp=4,dp=16" in json.loads(invoke(*PRICE, "--json").stdout)["strategy"]
    settings_file.write_text("[isp.price]\nnothing = 1\n")
    refused = invoke(*PRICE, code=2)
    assert "[isp.price]: the command has no option 'nothing'" in refused.stderr
