"""Predictions of published training runs, calibration, and the errors to expect."""

import json
import re
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from builders.commands import invoke
from builders.plan_inputs import GOOD, HEAD, PLAN, PRICE, load_run, schema, table
from builders.shared_data import shared
from hypothesis import given
from hypothesis import strategies as st

from docs import plan_runs
from fastcomm.errors import ConfigError
from fastcomm.models import load, load_models
from fastcomm.planning.constants import Constants
from fastcomm.planning.expected import (
    COVERED,
    EXPECTED,
    WIDER,
    classes_of,
    covered,
    equal_steps,
    expected_error,
    precision_of,
)
from fastcomm.planning.job import with_strategy
from fastcomm.planning.measured_runs import RunPrice, calibrate, errors, load_runs, price_run
from fastcomm.planning.price import price_plan
from fastcomm.planning.result import suspect


@pytest.fixture(scope="module")
def published():
    """The folder of published training runs."""
    return shared("training_runs")


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
    document = json.loads(invoke("plan", "evaluate", path, "--json").stdout)
    assert [row["model"] for row in document["rows"]] == ["mine", "sparse"]
    models.write_text(models.read_text().replace("64,8,1024", "64,65,1024"))
    with pytest.raises(ConfigError, match="line 3: sparse: top_k is 65"):
        load_models(models)


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
    fit = calibrate(load_runs(path, {}).runs, Constants())
    assert fit.fitted < 0.02 < fit.before
    assert fit.held_out < 0.03
    assert fit.constants.gemm_slowdown == pytest.approx(1.3, rel=0.05)
    shown = invoke("plan", "evaluate", path, "--calibrate-from", path).stdout
    assert re.search(r"gemm_slowdown +1\.115 +1\.[23]", shown)
    priced = invoke(*PRICE, "--calibrate-from", path, "--json").stdout
    assert json.loads(priced)["calibration"]["runs"] == 6


def test_calibration_needs_measurements(tmp_path):
    path = table(tmp_path, "llama3-8b,h100,8,64,8192")
    result = invoke("plan", "evaluate", path, "--calibrate-from", path, code=2)
    assert "no run has tokens_per_s_per_gpu" in " ".join(result.stderr.split())


def test_output_has_the_document_and_the_table(tmp_path):
    path = table(tmp_path, "llama3-8b,h100,8,64,8192")
    invoke("plan", "evaluate", path, "--output", tmp_path / "out")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        *("evaluation.json", "runs.csv", "runs.parquet")
    }
    invoke(*PRICE, "--output", tmp_path / "price")
    assert (tmp_path / "price" / "terms.parquet").exists()


def test_strategies_are_read_with_any_spacing():
    plan = with_strategy(PLAN, " tp = 8, sharding=ZeRO3 ,overlap=no,")
    assert (plan.tp, plan.sharding, plan.overlap, plan.dp) == (8, "zero3", False, 8)


BARS = {"all": 0.06, "dense": 0.05, "experts": 0.08, "a100": 0.06, "h100": 0.07}


def test_median_errors_on_published_runs_are_within_their_bars(published):
    table = plan_runs.load(published)
    rows = [price_run(run, Constants()) for run in table.runs]
    assert not table.failed
    notes = {row.run.id: row.run.note for row in rows if row.run.note and row.run.is_usable}
    # Graphs of a dropless step in 2025: its source does not say of which parts.
    graphs = [name for name, note in notes.items() if "token counts" in note]
    assert graphs == ["r422", "r423", "r424", "r501", "r502", "r503"]
    others = {name: note for name, note in notes.items() if name not in graphs}
    # Experts over 64 ranks of 32, which Megatron refuses.
    assert list(others) == ["r326"]
    assert len(rows) == 483
    found = {group.name: group.median for group in errors(rows)}
    for name, bar in BARS.items():
        assert found[name] < bar, name


def test_mean_errors_of_classes_are_within_their_bars(published):
    rows = plan_runs.vouched(plan_runs.load(published).runs)
    assert len(rows) == 445
    for name, (belongs, bar) in plan_runs.CLASSES.items():
        own = [row for row in rows if belongs(row)]
        assert len(own) >= 4
        assert plan_runs.mean_error(own) <= bar, name
    for has_experts in (False, True):
        own = [row for row in rows if row.run.has_experts == has_experts]
        assert plan_runs.order(own) >= 0.9
    assert sum(row.price.fits for row in rows) >= 0.98 * len(rows)


def test_nine_of_ten_published_runs_lie_in_the_interval_to_expect(published):
    rows = [price_run(run, Constants()) for run in plan_runs.load(published).runs]
    for group in errors(rows):
        if group.by in {"class", "layers", "all"} and group.runs >= plan_runs.LEAST:
            assert group.coverage is not None
            assert 0.88 <= group.coverage <= 0.97, group.name


def test_iterations_on_one_node_are_within_15_percent(isp_data):
    error, regret, jobs = plan_runs.single_node(
        plan_runs.node_jobs(isp_data / "vtrain_single.csv")
    )
    assert error <= 0.15
    assert regret <= 0.05
    assert jobs == 144


def test_the_page_of_runs_is_current(published):
    page = plan_runs.PAGE.read_text("utf-8")
    assert plan_runs.groups(plan_runs.load(published).runs) in page
    assert plan_runs.constants() in page


def test_the_error_to_expect_is_that_of_the_page():
    page = plan_runs.PAGE.read_text("utf-8")
    assert plan_runs.held_out(EXPECTED) in page


def test_a_class_with_few_runs_has_the_error_of_a_wider_one():
    plan = replace(PLAN, model=load("qwen3-30b-a3b"), ep=8, routing="natural")
    expected = expected_error(price_plan(plan, Constants()))
    assert expected.of == "experts"
    assert (expected.runs, expected.median, expected.most) == EXPECTED["experts"]
    narrow, *_, wide = classes_of(PLAN)
    assert narrow == "dense, 2024 on, bf16, measured GPU"
    assert wide == "dense"
    assert expected_error(price_plan(PLAN, Constants())).of == "dense, 2024 on"
    old = replace(PLAN, year=2023.5)
    assert classes_of(old)[0] == "dense, until 2023, bf16, measured GPU"
    assert expected_error(price_plan(old, Constants())).of == "dense, until 2023"
    scaled = replace(old, gpu="a100-40")
    assert expected_error(price_plan(scaled, Constants())).of == classes_of(scaled)[0]


@pytest.mark.parametrize("year", [2025.5, 2026.5])
def test_the_class_of_a_run_has_its_routing(year):
    plan = replace(PLAN, model=load("qwen3-30b-a3b"), ep=8, year=year)
    natural = price_plan(replace(plan, routing="natural"), Constants())
    forced = expected_error(price_plan(plan, Constants()))
    expected = expected_error(natural)
    assert "forced routing" in forced.of
    assert "forced" not in expected.of
    assert forced.wider == ""
    assert expected.most == max(forced.most, EXPECTED[expected.of][2])
    assert expected.wider == (forced.of if forced.most > EXPECTED[expected.of][2] else "")
    row = RunPrice(run=load_run(measured=1.0), price=natural)
    assert [group.name for group in errors([row]) if group.by == "class"] == [
        "experts, natural routing"
    ]


def test_a_wider_interval_names_its_class():
    words = ("plan", "price", "--model", "qwen3-30b-a3b", "--world-size", "8")
    strategy = "ep=8,routing=natural,year=2025"
    more = ("--global-batch", "64", "--strategy", strategy)
    shown = " ".join(invoke(*words, *more).stdout.split())
    wider = "experts, forced routing, until 2025, no graphs, measured GPU"
    assert f"(interval of the wider class {wider})" in shown


def test_a_precision_that_errs_more_than_its_class_has_a_wider_interval(published):
    plan = replace(PLAN, model=load("qwen3-30b-a3b"), ep=8, precision="fp8_cs")
    expected = expected_error(price_plan(plan, Constants()))
    usual = expected_error(price_plan(replace(plan, precision="bf16"), Constants()))
    assert expected.wider == "experts, fp8_cs"
    assert expected.most > usual.most
    assert expected.of == usual.of
    rows = [price_run(run, Constants()) for run in plan_runs.load(published).runs]
    for name, (runs, most) in WIDER.items():
        own = [row for row in rows if precision_of(row.price.plan) == name]
        own = [row for row in own if row.run.is_usable]
        assert len(own) == runs >= 10
        assert np.mean([expected_error(row.price).most >= most for row in own]) == 1
        assert np.mean([row.is_expected for row in own]) >= 0.88


def test_the_page_says_how_often_intervals_hold_as_its_table_does(published):
    page = " ".join(plan_runs.PAGE.read_text("utf-8").split())
    text = " ".join(plan_runs.in_band(plan_runs.load(published).runs).split())
    assert text in page
    shares = re.findall(
        r"^\| (.*?) \| (\d+) \|.*\| (\d+) % \|[^|]*\|[^|]*\|$", page_rows(), re.M
    )
    groups = {name: int(share) for name, runs, share in shares if int(runs) >= 20}
    assert f"Of {len(groups)} groups" in text
    for name, share in groups.items():
        assert (f"{name} ({share} %)" in text) == (not 88 <= share <= 95)


def page_rows():
    """The table of all runs."""
    return plan_runs.PAGE.read_text("utf-8").partition("## Classes of runs")[0]


def test_a_class_has_its_own_interval_if_that_tells_more():
    def grouped(*sizes):
        return {("s", str(n)): np.full(10, size) for n, size in enumerate(sizes)}

    small, large = grouped(0.01, 0.02, 0.01), grouped(0.2, 0.21, 0.2)
    wide = {("w", name): own for _, name in small for own in (small["s", name],)} | large
    assert plan_runs.tells_more(small, wide)
    assert not plan_runs.tells_more(small, small)
    # Half a width of 0.02, or of 0.01 and ten times the distance to 0.02.
    assert plan_runs.interval_score(small, small) == pytest.approx((0.02 + 0.11 + 0.02) / 3)
    one = {("s", "0"): np.full(10, 0.01)}
    assert plan_runs.interval_score(one, one) == float("inf")
    assert not plan_runs.tells_more(one, large)


def test_a_class_is_judged_by_the_runs_without_a_narrower_one():
    run = load_run(measured=1.0)
    old = replace(run, plans=(replace(PLAN, gpu="a100", year=2023.0),), group=("old", "x"))
    off = [(run, 0.1)] * plan_runs.LEAST + [(old, 0.3)] * plan_runs.LEAST
    names = ["dense", "dense, 2024 on"]
    apart = plan_runs.judged(off, names)
    assert {name: [*groups] for name, groups in apart.items()} == {
        "dense": [("old", "x")],
        "dense, 2024 on": [run.group],
    }
    # With too few of them, by all of the class.
    whole = plan_runs.judged(off[:-1], names)["dense"]
    assert sum(map(len, whole.values())) == 2 * plan_runs.LEAST - 1


def test_the_interval_is_a_factor_around_the_prediction():
    price = price_plan(PLAN, Constants())
    expected = expected_error(price)
    rate = price.tokens_per_s_per_gpu
    assert expected.high / rate == pytest.approx(rate / expected.low)
    for measured, inside in ((expected.low, True), (expected.high * 1.01, False)):
        assert expected.holds(measured) is inside
        row = RunPrice(run=load_run(measured=measured), price=price)
        assert row.is_expected is inside
        (group,) = (group for group in errors([row]) if group.by == "all")
        assert group.coverage == float(inside)
    assert equal_steps(PLAN, 2.0) > 2.0


def test_the_interval_of_a_class_holds_nine_of_ten_runs_left_out():
    # Ten errors of 1 to 10 % a run, from 20 runs: of 19 in 20 the 19th smallest.
    run = load_run(measured=1.0)
    off = [(replace(run, id=str(n)), float(np.expm1(n / 100))) for n in range(1, 21)]
    classes = plan_runs.expected(off)
    assert classes["dense"][0] == 20
    assert np.log1p(classes["dense"][2]) == pytest.approx(0.19, abs=1e-3)
    assert plan_runs.expected(off[:19]) == {}


def test_the_interval_is_wider_where_sources_and_models_err_alike():
    alike = [np.full(10, size) for size in (0.01, 0.02, 0.03, 0.2)]
    mixed = [np.array([0.01, 0.02, 0.03, 0.2] * 3)[n : n + 10] for n in range(3)]
    assert plan_runs.left_out_inside(alike, 0.9) == 0.75
    assert plan_runs.limit(alike, plan_runs.level(alike)) == 0.2
    one = [np.arange(1, 21) / 100]
    assert plan_runs.limit(one, plan_runs.level(one)) == 0.19
    assert plan_runs.left_out_inside(mixed, plan_runs.level(mixed)) >= 0.9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seq_len": 2**21, "global_batch": 64}, "2097152 tokens a sequence; published runs"),
        ({"gpus": 16384, "global_batch": 16384}, "16384 GPUs"),
        ({"global_batch": 64 * 2**13}, "tokens a step and GPU"),
    ],
)
def test_no_error_is_expected_where_no_run_was(change, reason):
    price = price_plan(replace(PLAN, **change), Constants())
    expected = expected_error(price)
    assert (expected.median, expected.most) == (None, None)
    assert reason in expected.reason
    usual = expected_error(price_plan(PLAN, Constants()))
    assert usual.median == EXPECTED[usual.of][1]
    assert usual.reason == ""


def test_published_runs_are_covered(published):
    rows = [price_run(run, Constants()) for run in plan_runs.load(published).runs]
    usual = [covered(row.price) for row in rows if row.run.is_usable]
    for name, (low, high) in COVERED.items():
        values = [each[name] for each in usual]
        assert low <= min(values)
        assert max(values) <= high


@pytest.mark.parametrize("cluster", ["dgx-h200", "dgx-h800", "dgx-a100-40", "gb300-nvl72"])
def test_a_gpu_without_measurements_is_priced_and_marked(cluster):
    words = (*PRICE, "--cluster", cluster, "--strategy", "sharding=zero3,year=2023-06")
    document = json.loads(invoke(*words, "--json").stdout)
    schema("price").validate(document)
    assert document["is_measured"] is False
    assert " is not measured: kernels " in document["note"]
    assert " is not measured: kernels " in " ".join(invoke(*words).stdout.split())
    measured = json.loads(invoke(*PRICE, "--json").stdout)
    assert measured["is_measured"] is True
    assert "is not measured: kernels" not in measured["note"]


def test_a_table_marks_gpus_and_groups_that_are_not_measured(tmp_path):
    path = table(tmp_path, "llama3-8b,h200,8,64,8192", "llama3-8b,gb200,64,64,8192")
    assert "8 H200 (not measured)" in invoke("plan", "evaluate", path).stdout
    rows = json.loads(invoke("plan", "evaluate", path, "--json").stdout)["rows"]
    assert [row["is_measured"] for row in rows] == [False, True]
    assert rows[0]["note"].startswith("H200 is not measured")
    assert "more than 4 GPUs of an NVLink domain are not measured" in rows[1]["note"]


def test_names_of_classes_are_whole(tmp_path):
    row = "qwen3-30b-a3b,gb200,16,64,4096,8,attn,5000"
    path = table(tmp_path, row, head=f"{HEAD},ep,graphs,tokens_per_s_per_gpu")
    shown = invoke("plan", "evaluate", path).stdout
    assert "…" not in shown.partition("largest errors")[0]
    assert "measured GPU" in shown


def test_top_limits_the_rows_of_the_document(tmp_path):
    rows = [f"{GOOD},{rate}" for rate in (9000, 5000, 10000)]
    path = table(tmp_path, *rows, head=f"{HEAD},tokens_per_s_per_gpu")
    document = json.loads(invoke("plan", "evaluate", path, "--json", "--top", 1).stdout)
    assert [row["id"] for row in document["rows"]] == ["2"]
    assert len(json.loads(invoke("plan", "evaluate", path, "--json").stdout)["rows"]) == 3


@given(st.floats(1e-3, 1e3))
def test_the_term_to_doubt_can_explain_the_error(factor):
    price = price_plan(PLAN, Constants())
    run = load_run(measured=price.tokens_per_s_per_gpu * factor)
    text = suspect(RunPrice(run=run, price=price))
    change = re.search(r"([+-][\d.]+) % to be exact", text)
    assert change is None or float(change[1]) >= -100
    assert change is not None or factor > 1


def test_one_run_moves_no_constant_far():
    slow = load_run(measured=price_plan(PLAN, Constants()).tokens_per_s_per_gpu / 2)
    for before, after in calibrate([slow], Constants()).changes().values():
        assert after == pytest.approx(before, rel=0.25)


def test_a_constant_at_the_end_of_its_range_is_named():
    truth = replace(Constants(), gemm_slowdown=2.5)
    sizes = [(n, tp) for n in range(1, 9) for tp in (1, 2)]
    plans = [replace(PLAN, gpus=8 * n, global_batch=128 * n, tp=tp) for n, tp in sizes]
    runs = [
        replace(load_run(measured=price_plan(plan, truth).tokens_per_s_per_gpu), plans=(plan,))
        for plan in plans
    ]
    runs = [replace(run, group=(str(k), "")) for k, run in enumerate(runs)]
    assert "gemm_slowdown" in calibrate(runs, Constants()).bounds_reached()


def test_settings_have_a_table_for_each_inner_command(tmp_path, monkeypatch):
    settings_file = tmp_path / "settings.toml"
    settings_file.write_text('[plan]\ncluster = "a100"\n[plan.price]\nstrategy = "tp=2"\n')
    monkeypatch.setenv("FASTCOMM_SETTINGS", str(settings_file))
    assert "tp=2,dp=32" in json.loads(invoke(*PRICE, "--json").stdout)["strategy"]
    monkeypatch.setenv("FASTCOMM_PLAN_PRICE_STRATEGY", "tp=4")
    assert "tp=4,dp=16" in json.loads(invoke(*PRICE, "--json").stdout)["strategy"]
    settings_file.write_text("[plan.price]\nnothing = 1\n")
    refused = invoke(*PRICE, code=2)
    assert "[plan.price]: the command has no option 'nothing'" in refused.stderr
