"""Tables of training runs: what is read, tried, refused and listed."""

import json
import re
from dataclasses import replace

import pytest
from builders.commands import invoke
from builders.plan_inputs import GOOD, HEAD, PLAN, schema, table
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.errors import ConfigError
from fastcomm.models import load
from fastcomm.planning.constants import Constants
from fastcomm.planning.job import with_strategy
from fastcomm.planning.measured_runs import load_runs, price_run
from fastcomm.planning.price import price_plan


def test_a_table_with_five_columns_is_priced(tmp_path):
    path = table(tmp_path, "llama3-8b,h100,8,64,8192", "llama3-70b,gb200,64,128,8192")
    document = json.loads(invoke("plan", "evaluate", path, "--json").stdout)
    schema("evaluate").validate(document)
    assert [row["id"] for row in document["rows"]] == ["1", "2"]
    assert all(row["error"] is None for row in document["rows"])
    assert all(row["predicted_tokens_per_s_per_gpu"] > 0 for row in document["rows"])
    assert document["summary"] == []
    shown = invoke("plan", "evaluate", path).stdout
    assert "strategy" in shown
    assert "sharding=zero" in shown


def test_unknown_values_are_tried_and_the_fastest_that_fits_counts(tmp_path):
    head = f"{HEAD},micro_batch,recompute,sharding"
    row = "llama3-8b,h100,8,64,8192"
    path = table(tmp_path, f"{row},unknown,unknown,zero3", head=head)
    (run,) = load_runs(path, {}).runs
    assert len(run.plans) == 12
    best = price_run(run, Constants()).price
    rates = [price_plan(plan, Constants()) for plan in run.plans]
    assert best.fits
    assert best.tokens_per_s_per_gpu == max(p.tokens_per_s_per_gpu for p in rates if p.fits)


@pytest.mark.parametrize(
    ("model", "strategy", "message"),
    [
        (
            "mixtral-8x7b",
            "ep=8,etp=16",
            "ep x etp is 128, which does not divide dp x cp x tp, 64",
        ),
        ("mixtral-8x7b", "ep=8,etp=3", "etp 3 does not divide the width of an expert, 14336"),
        ("mixtral-8x7b", "ep=3", "ep 3 does not divide the 8 experts"),
        ("deepseek-v3", "ep=64,pp=8", "ep x etp is 64, which does not divide dp x cp x tp, 8"),
        ("deepseek-v3", "tp=64,cp=3", "tp x pp x cp is 192, which does not divide 64 GPUs"),
        ("llama3-70b", "cp=64", "cp 64 does not divide 100 tokens"),
        ("internlm-13b", "tp=64", "tp 64 does not divide the heads of internlm-13b, 40"),
    ],
)
def test_a_strategy_that_no_trainer_could_run_is_refused(model, strategy, message):
    plan = replace(PLAN, model=load(model), seq_len=100 if "cp=64" in strategy else 4096)
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_strategy(plan, strategy)


def test_key_and_value_heads_and_tensor_parallelism_divide_each_other():
    model = replace(load("llama3-8b"), heads=48, kv_heads=6, head_dim=128)
    with pytest.raises(ConfigError, match="tp 4 neither divides the 6 key and value heads"):
        with_strategy(replace(PLAN, model=model), "tp=4")


def test_fp8_takes_a_gpu_that_has_it():
    with pytest.raises(ConfigError, match="precision fp8_cs: A100-SXM4-80GB has no FP8"):
        with_strategy(replace(PLAN, gpu="a100"), "precision=fp8_cs")
    assert with_strategy(replace(PLAN, gpu="gb300"), "precision=mxfp8").precision == "mxfp8"


@given(st.integers(1, 4096), st.integers(1, 16))
def test_no_sequence_is_priced_without_its_time(batch, micro_batch):
    plan = replace(PLAN, global_batch=batch, micro_batch=micro_batch)
    assert plan.micro_batches * plan.dp * micro_batch >= batch
    if batch % (plan.dp * micro_batch):
        with pytest.raises(ConfigError, match="dp x micro-batch"):
            plan.check()


def test_a_fuller_batch_takes_longer():
    steps = [
        price_plan(replace(PLAN, gpus=8, global_batch=batch), Constants()).step_s
        for batch in (8, 15, 16)
    ]
    assert steps[0] < 0.6 * steps[1]
    assert steps[1] == steps[2]


@pytest.mark.parametrize(
    ("rows", "head", "message"),
    [
        ((), HEAD, "no rows"),
        (("a",), "model", "missing column gpu, gpus, global_batch, seq_len"),
        (("a,a",), f"{HEAD},gpu", "repeated column gpu"),
    ],
)
def test_a_table_without_runs_or_columns_is_refused(tmp_path, rows, head, message):
    result = invoke("plan", "evaluate", table(tmp_path, *rows, head=head), code=2)
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("row", "head", "message"),
    [
        ("llama3-8b,h100,8,64", HEAD, "expected 5 fields, as the header has, found 4"),
        (f"{GOOD},1", HEAD, "expected 5 fields, as the header has, found 6"),
        ("llama3-8b,v100,8,64,8192", HEAD, "unknown GPU 'v100'"),
        ("nothing,h100,8,64,8192", HEAD, "unknown model nothing: expected"),
        ("mixtral-8x7b,h100,8,64,8192,16", f"{HEAD},ep", "ep 16 does not divide the 8"),
        ("mixtral-8x7b,h100,8,64,8192,16", f"{HEAD},etp", "ep x etp is 16"),
        ("llama3-8b,h100,x,64,8192", HEAD, "invalid gpus 'x'"),
        (f"{GOOD},3", f"{HEAD},tp", "tp x pp x cp is 3"),
        (f"{GOOD},unknown", f"{HEAD},tp", "invalid tp 'unknown'"),
        (
            f"{GOOD},3",
            f"{HEAD},micro_batch",
            "64 sequences are no multiple of dp x micro-batch",
        ),
        (f"{GOOD},x", f"{HEAD},node_gbps", "invalid node_gbps x"),
        (f"{GOOD},-1", f"{HEAD},tokens_per_s_per_gpu", "expected a number above 0"),
        (f"{GOOD},0", f"{HEAD},tokens_per_s_per_gpu", "expected a number above 0"),
        (f"{GOOD},nan", f"{HEAD},memory_gib", "expected a number above 0"),
        (f"{GOOD},1e-308", f"{HEAD},memory_gib", "expected a number above 0"),
        (f"{GOOD},foo", f"{HEAD},date", "invalid date 'foo': expected a year or a month"),
        (f"{GOOD},2024-13", f"{HEAD},date", "invalid date '2024-13'"),
        (f"{GOOD},01/02/2024", f"{HEAD},date", "invalid date '01/02/2024'"),
        (f"{GOOD},3000", f"{HEAD},date", "invalid date '3000'"),
        (f"{GOOD},PCIe", f"{HEAD},gpu_variant", "invalid gpu_variant 'PCIe': expected memory"),
        (f"{GOOD},0 W", f"{HEAD},gpu_variant", "invalid power 0"),
        (f"{GOOD},maybe", f"{HEAD},overlap", "invalid overlap 'maybe'"),
    ],
)
def test_a_broken_row_is_listed_and_others_are_priced(tmp_path, row, head, message):
    good = GOOD + "," * head[len(HEAD) :].count(",")
    result = invoke("plan", "evaluate", table(tmp_path, row, good, head=head), "--json", code=3)
    document = json.loads(result.stdout)
    schema("evaluate").validate(document)
    assert [each["id"] for each in document["rows"]] == ["2"]
    (failed,) = document["failed"]
    assert failed["line"] == 2
    assert message in failed["error"]
    shown = invoke("plan", "evaluate", table(tmp_path, row, good, head=head), code=3).stdout
    assert "not priced: line 2: " in shown


def test_a_measured_run_is_priced_with_a_note_on_the_rule_that_it_breaks(tmp_path):
    head = f"{HEAD},ep,etp,tokens_per_s_per_gpu"
    row = "mixtral-8x7b,h100,8,64,8192,8,8"
    path = table(tmp_path, f"{row},1000", f"{row},", head=head)
    document = json.loads(invoke("plan", "evaluate", path, "--json", code=3).stdout)
    (priced,) = document["rows"]
    assert priced["note"].startswith("measured, although ep x etp is 64, which does not divide")
    assert priced["predicted_tokens_per_s_per_gpu"] > 0
    assert [failed["line"] for failed in document["failed"]] == [3]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("vp", [1, 2, 4])
def test_the_pipeline_takes_as_long_as_its_chunks_in_turn(count, vp):
    pp, chunk = 4, 1.0 / vp
    # Rank by rank, the time at which each chunk of each micro-batch ends; a chunk waits for the
    # one before it, and for the rank, which takes min(count, pp) micro-batches a chunk in turn.
    group = min(count, pp)
    order = [
        (first + k, v)
        for first in range(0, count, group)
        for v in range(vp)
        for k in range(min(group, count - first))
    ]
    ends, free = {}, [0.0] * pp
    for _ in range(pp * vp):
        for rank in range(pp):
            for batch, v in order:
                before = ends.get((batch, v, rank - 1) if rank else (batch, v - 1, pp - 1), 0.0)
                is_first = rank == 0 and v == 0
                if (batch, v, rank) in ends or (not is_first and not before):
                    continue
                ends[batch, v, rank] = free[rank] = max(free[rank], before) + chunk
    plan = replace(
        PLAN, gpus=pp, pp=pp, vp=vp, global_batch=count, micro_batch=1, sharding="zero1"
    )
    terms = {term.name: term.value for term in price_plan(plan, Constants()).time}
    bubble = max(ends.values()) - count
    stage = terms["pipeline bubble"] / bubble if bubble else 0.0
    one = price_plan(replace(plan, vp=1, global_batch=pp), Constants())
    whole = {term.name: term.value for term in one.time}["pipeline bubble"] / (pp - 1)
    assert stage == pytest.approx(whole, rel=0.02)


def test_runs_of_a_quality_that_does_not_count_are_named(tmp_path):
    head = f"{HEAD},source,quality,tokens_per_s_per_gpu"
    rows = (f"{GOOD},lab,{quality},9000" for quality in ("ok", "traced", "traced"))
    shown = invoke("plan", "evaluate", table(tmp_path, *rows, head=head)).stdout
    assert "not counted, by quality: lab 2 (traced)" in shown


def test_a_repeated_id_is_listed(tmp_path):
    path = table(tmp_path, f"{GOOD},a", "", ",,,,,", f"{GOOD},a", head=f"{HEAD},id")
    runs = load_runs(path, {})
    assert [run.id for run in runs.runs] == ["a"]
    assert [(row.line, row.error) for row in runs.failed] == [(5, "id a is that of line 2")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_of_spreadsheets_are_read(tmp_path, delimiter, encoding):
    head = [" Model ", "GPU", "gpus", "Global Batch", "seq-len"]
    text = delimiter.join(head) + "\r\n" + delimiter.join(["llama3-8b", "H100", *["8", "64"]])
    path = tmp_path / "runs.csv"
    path.write_bytes(f'{text}{delimiter}"8,192"\r\n'.encode(encoding))
    (run,) = load_runs(path, {}).runs
    assert (run.gpu, run.plans[0].gpus, run.plans[0].seq_len) == ("h100", 8, 8192)


@pytest.mark.parametrize(
    ("variant", "memory", "share"),
    [
        ("", None, 1),
        ("96GB", 96, 1),
        ("HBM2e 96 GiB", 96, 1),
        ("96 GB HBM2e 2.4 TB/s, 350 W", 96, 0.5),
        ("1000 W", None, 1),
    ],
)
def test_a_variant_has_memory_and_power(tmp_path, variant, memory, share):
    path = table(tmp_path, f'{GOOD},"{variant}"', head=f"{HEAD},gpu_variant")
    plan = load_runs(path, {}).runs[0].plans[0]
    assert (plan.memory, plan.power_share) == (memory and memory * 2**30, share)
