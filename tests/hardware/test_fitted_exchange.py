"""Test that constants which `dispatch evaluate` has fitted price other exchanges."""

import json

import pytest
from builders.exchanges import EXCHANGES
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.dispatch.evaluation import evaluate_exchanges
from fastcomm.dispatch.model_exchange import compare_kernels
from fastcomm.dispatch.options import DispatchOptions, ModelOptions, WorkloadOptions
from fastcomm.errors import ConfigError
from fastcomm.hardware.expert_exchange import PHASES, ExchangeShape, exchange_time
from fastcomm.hardware.fitted_exchange import read_fitted
from fastcomm.planning.constants import Constants
from fastcomm.planning.options import PriceOptions
from fastcomm.planning.price import price_plan
from fastcomm.planning.result import plan_of

SHAPE = ExchangeShape(tokens=4096, hidden=7168, topk=8, experts=256, ranks=8, domain=8, sms=20)
ENDS = {"share": (1e-3, 10.0), "us": (1e-12, 1e6), "ns": (1e-12, 1e3)}
COMPARE = ("--model", "deepseek-v3", "--ep", "8", "--schedules", "deepep")


def fitted_file(tmp_path, factor):
    """The JSON of a fit to times that are `factor` times the predicted ones of H100."""
    head = "mode,nodes,ranks,hidden,topk,experts,tokens,sms,dispatch_us,combine_us\n"
    time = exchange_time("h100", "deepep", SHAPE, nic=50e9)
    us = [getattr(time, phase).seconds * factor * 1e6 for phase in PHASES]
    table = tmp_path / "table.csv"
    table.write_text(f"{head}normal,1,8,7168,8,256,4096,20,{us[0]},{us[1]}\n")
    path = tmp_path / "fitted.json"
    path.write_text(run("evaluate", str(table), "--calibrate", "--json"))
    return path


def run(*words):
    done = CliRunner().invoke(main, ["dispatch", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def compared(costs=None, cluster="h100"):
    options = ModelOptions(model="deepseek-v3", ep=8, sms=20, exchange_costs=costs)
    network = DispatchOptions(cluster=cluster)
    result = compare_kernels(options, WorkloadOptions(), network, ("deepep",))
    return {one.family: one for one in result.kernels}


def planned(costs=None, dispatch="deepep", model="qwen3-30b-a3b", size=8, strategy=""):
    options = PriceOptions(
        model=model, world_size=size, global_batch=size, exchange_costs=costs,
        strategy=strategy or f"ep=8,dispatch={dispatch}",
    )  # fmt: skip
    return plan_of(options, {})


def priced(*words, **sizes):
    return price_plan(planned(*words, **sizes)[0], Constants()).step_s


def test_compare_has_the_times_that_a_fit_has(tmp_path):
    path = fitted_file(tmp_path, 1.25)
    own, shipped = compared(path), compared()
    for phase in PHASES:
        ratio = own["deepep"].phases[phase].seconds / shipped["deepep"].phases[phase].seconds
        assert ratio == pytest.approx(1.25, rel=1e-6)
    assert own["nccl"].layer_s == shipped["nccl"].layer_s
    assert [one.family for one in own.values() if one.is_calibrated] == ["deepep"]
    assert "deepep: constants of --exchange-costs" in run(
        "compare", *COMPARE, "--cluster", "h100", "--exchange-costs", str(path)
    )


def test_a_file_of_output_is_a_file_of_constants(tmp_path):
    path = fitted_file(tmp_path, 1.25)
    table = str(tmp_path / "table.csv")
    run("evaluate", table, "--calibrate", "-o", str(tmp_path / "out"))
    assert read_fitted(tmp_path / "out" / "evaluation.json").costs == read_fitted(path).costs


def test_the_fit_to_a_large_table_is_read(tmp_path):
    path = fitted_file(tmp_path, 1.25)
    document = json.loads(path.read_text())
    document["rows"] *= 4000
    large = tmp_path / "large.json"
    large.write_text(json.dumps(document))
    assert large.stat().st_size > 2 << 20
    assert read_fitted(large).costs == read_fitted(path).costs


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_the_least_and_the_most_constants_price_an_exchange(tmp_path, places):
    path = fitted_file(tmp_path, 1.25)
    document = json.loads(path.read_text())
    for number, row in enumerate(document["calibration"]):
        row["fitted"] = ENDS[row["constant"].rpartition("_")[2]][places[number % len(places)]]
    path.write_text(json.dumps(document))
    for phase in compared(path)["deepep"].phases.values():
        assert 0 < phase.seconds < 1e12


def test_plan_has_the_times_that_a_fit_has(tmp_path):
    path = fitted_file(tmp_path, 2.0)
    assert priced(path) > 1.01 * priced()
    assert f"exchange of experts by deepep: constants of {path}" in planned(path)[1]
    assert priced(path, "alltoall") == priced(None, "alltoall")
    note = f"constants of {path} have no effect: none are of nccl inside NVLink domains"
    assert note in planned(path, "alltoall")[1]
    with pytest.raises(ConfigError, match="exchange-costs has no effect"):
        planned(path, model="llama3-8b")


def test_a_plan_across_domains_says_that_a_fit_inside_of_them_has_no_effect(tmp_path):
    path, strategy = fitted_file(tmp_path, 2.0), "ep=16,dispatch=deepep"
    assert priced(path, size=16, strategy=strategy) == priced(size=16, strategy=strategy)
    note = planned(path, size=16, strategy=strategy)[1]
    assert f"constants of {path} have no effect: none are of deepep across NVLink" in note
    assert "exchange of experts by" not in note
    note = planned(path, strategy="dp=8")[1]
    assert f"constants of {path} have no effect: ranks exchange no tokens" in note


def test_constants_of_another_gpu_are_refused(tmp_path):
    path = fitted_file(tmp_path, 1.25)
    with pytest.raises(ConfigError, match="no constants for b200; it has those of h100"):
        compared(path, "dgx-b200")


def test_an_evaluation_without_a_fit_has_no_constants(tmp_path):
    table, path = tmp_path / "table.csv", tmp_path / "plain.json"
    table.write_text(EXCHANGES)
    path.write_text(json.dumps(evaluate_exchanges(table).contents()))
    with pytest.raises(ConfigError, match="no fitted constants; write it with"):
        read_fitted(path)


@pytest.mark.parametrize(("change", "message"), [
    ({"gpu": "h900"}, "constant 1: invalid gpu 'h900'"),
    ({"gpu": ["h100"]}, "constant 1: invalid gpu"),
    ({"family": "mpi"}, "constant 1: invalid family 'mpi'"),
    ({"scope": "around"}, "constant 1: invalid scope 'around'"),
    ({"phase": "prepare"}, "constant 1: invalid phase 'prepare'"),
    ({"constant": "far_rows"}, "constant 1: invalid constant 'far_rows'"),
    ({"fitted": 0}, "constant 1: invalid start_us 0: expected a number from 1e-12 to 1000000"),
    ({"fitted": None}, "constant 1: invalid start_us"),
    ({"fitted": float("nan")}, "constant 1: invalid start_us"),
    ({"fitted": 1e-300}, "constant 1: invalid start_us 1e-300"),
    ({"fitted": 2e6}, "constant 1: invalid start_us"),
    ({"constant": "nic_share", "fitted": 1e-4}, "constant 1: invalid nic_share 0.0001"),
    ({"constant": "nvlink_share", "fitted": 11}, "constant 1: invalid nvlink_share 11"),
    ({"constant": "token_ns", "fitted": 2e6}, "constant 1: invalid token_ns"),
    ({"constant": "row_byte_ns", "fitted": 2e3}, "constant 1: invalid row_byte_ns"),
    ({"constant": "pass_ns", "fitted": 2e3}, "constant 1: invalid pass_ns"),
    ({"family": "trtllm", "gpu": "gb200", "scope": "across"}, "has no constants across"),
    ({"constant": "row_ns"}, "is there twice"),
])  # fmt: skip
def test_a_wrong_constant_is_refused(tmp_path, change, message):
    path = fitted_file(tmp_path, 1.25)
    document = json.loads(path.read_text())
    document["calibration"][0] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=message):
        read_fitted(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no fitted"),
        ('{"calibration": [3]}', "schema_version None: expected 1"),
        ('{"schema_version": 99, "calibration": [3]}', "schema_version 99: expected 1"),
        ('{"schema_version": 1, "calibration": [3]}', "an object"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    path = tmp_path / "fitted.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_fitted(path)
