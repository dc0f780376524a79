"""Test predictions of measured expert all-to-alls, and constants fitted to them."""

import json

import pytest
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.dispatch.evaluation import HeldOutError, evaluate_exchanges
from fastcomm.dispatch.model_exchange import compare_kernels
from fastcomm.dispatch.options import DispatchOptions, ModelOptions, WorkloadOptions
from fastcomm.errors import ConfigError

HYBRID = """\
family,nodes,ranks,hidden,topk,experts,tokens,sms,dispatch_us,combine_us{}
hybridep,4,32,7168,8,256,4096,,3064,3088{}
hybridep,8,64,7168,8,256,4096,,4626,4398{}
"""
HEAD = "mode,nodes,ranks,hidden,topk,experts,tokens,sms,dispatch_us,combine_us\n"
TOKENS = [512 * number for number in range(1, 9)]


def table(path, factors, tokens=TOKENS):
    """A table whose times are the predicted ones times factors, one per row."""
    rows = [f"normal,1,8,7168,8,256,{count},24,," for count in tokens]
    path.write_text(HEAD + "\n".join(rows) + "\n")
    times = [
        [row.phases[phase].predicted_s * 1e6 * factor for phase in ("dispatch", "combine")]
        for row, factor in zip(evaluate_exchanges(path).rows, factors, strict=True)
    ]
    rows = [f"{row[:-1]}{a:.3f},{b:.3f}" for row, (a, b) in zip(rows, times, strict=True)]
    path.write_text(HEAD + "\n".join(rows) + "\n")
    return str(path)


def evaluated(*words):
    done = CliRunner().invoke(main, ["dispatch", "evaluate", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_fit_is_measured_on_rows_held_out(tmp_path):
    path = table(tmp_path / "slow.csv", [1.3] * len(TOKENS))
    rows = json.loads(evaluated(path, "--calibrate", "--json"))["held_out"]
    assert [row["phase"] for row in rows] == ["dispatch", "combine"]
    for row in rows:
        assert row["rows"] == len(TOKENS) // 2
        assert row["shipped_error"] == pytest.approx(1 - 1 / 1.3, rel=1e-3)
        assert row["fitted_error"] < row["shipped_error"] / 2
    text = evaluated(path, "--calibrate")
    assert "rows held out" in text
    assert "use the shipped ones" not in text


def test_a_fit_is_measured_on_rows_of_more_tokens(tmp_path):
    path = table(tmp_path / "slow.csv", [1.3] * len(TOKENS))
    for row in json.loads(evaluated(path, "--calibrate", "--json"))["held_out"]:
        assert row["beyond_rows"] == len(TOKENS) // 2
        assert row["beyond_shipped_error"] == pytest.approx(1 - 1 / 1.3, rel=1e-3)
        assert row["beyond_fitted_error"] < 1e-3


def test_a_fit_that_fails_beyond_its_rows_is_warned_of(tmp_path):
    path = table(tmp_path / "bent.csv", [1.2] * 4 + [1.08] * 4)
    text = " ".join(evaluated(path, "--calibrate").split())
    assert "constants fitted to rows of few tokens are worse on rows of more" in text


def test_a_machine_of_another_speed_has_all_constants_scaled(tmp_path):
    path = table(tmp_path / "slow.csv", [1.2] * len(TOKENS))
    document = json.loads(evaluated(path, "--calibrate", "--json"))
    assert len(document["calibration"]) >= 10
    for one in document["calibration"]:
        factor = 1 / 1.2 if one["constant"].endswith("_share") else 1.2
        assert one["fitted"] == pytest.approx(factor * one["shipped"], rel=1e-4)
        assert one["warning"] is None
    assert all(one["p90_error"] < 1e-4 for one in document["errors"])


@pytest.mark.parametrize(("factor", "text"), [
    (0.3, "is above 1, more than the bandwidth of the links: check dispatch_us, and"),
    (20, "is less than 10.0 % of that of the shipped kernels: check combine_us, and"),
])  # fmt: skip
def test_a_share_that_no_machine_has_is_warned_of(tmp_path, factor, text):
    path = table(tmp_path / "odd.csv", [factor] * len(TOKENS))
    assert text in " ".join(evaluated(path, "--calibrate").split())
    rows = json.loads(evaluated(path, "--calibrate", "--json"))["calibration"]
    assert {one["constant"] for one in rows if one["warning"]} == {"nvlink_share"}


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_times_in_other_units_are_an_error(tmp_path, factor):
    path = table(tmp_path / "units.csv", [factor] * len(TOKENS))
    with pytest.raises(ConfigError, match=r"column dispatch_us: times of deepep .*expected us"):
        evaluate_exchanges(path)


def test_a_bandwidth_in_other_units_is_an_error(tmp_path):
    path = tmp_path / "rates.csv"
    path.write_text(
        "version,arch,kernel,ranks,nodes,tokens,hidden,topk,experts,phase,link,bandwidth_GBps\n"
        "V1,H800,normal,8,1,4096,7168,8,256,dispatch,NVLink,153e9\n"
    )
    with pytest.raises(ConfigError, match=r"column bandwidth_GBps: .*expected GB/s"):
        evaluate_exchanges(path)


def test_a_published_bandwidth_is_as_published(tmp_path):
    path = tmp_path / "rates.csv"
    path.write_text(
        "version,arch,kernel,ranks,nodes,tokens,hidden,topk,experts,phase,link,bandwidth_GBps,"
        "latency_us\nV1,H800,low_latency,8,1,128,7168,8,288,combine,NVLink,127,114\n"
    )
    (row,) = evaluate_exchanges(path).rows
    document = row.to_dict()
    assert document["measured_bandwidth_bytes_per_s"] == pytest.approx(127e9)
    ratio = document["predicted_combine_ns"] / 114e3
    assert document["predicted_bandwidth_bytes_per_s"] == pytest.approx(127e9 / ratio)


def test_a_fit_is_worse_only_by_what_is_printed():
    def is_worse(shipped, fitted):
        one = HeldOutError(
            gpu="h100", family="deepep", scope="inside", phase="dispatch", rows=8,
            shipped_error=shipped, fitted_error=fitted, beyond_rows=8,
            beyond_shipped_error=shipped, beyond_fitted_error=fitted,
        )  # fmt: skip
        assert one.is_worse == one.is_worse_beyond
        return one.is_worse

    assert not is_worse(0.0451, 0.0454)
    assert is_worse(0.0454, 0.0456)
    assert not is_worse(0.0456, 0.0454)


def test_the_worst_group_is_printed(tmp_path):
    path = table(tmp_path / "rows.csv", [1.1] * len(TOKENS))
    head, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    other = [line.replace("7168,8,256", "7168,4,256") for line in lines]
    (tmp_path / "rows.csv").write_text("\n".join([head, *lines, *other]) + "\n")
    worst = json.loads(evaluated(path, "--json"))["worst"]
    assert (worst["ranks"], worst["topk"], worst["hidden"]) == (8, 4, 7168)
    assert worst["rows"] == len(TOKENS)
    assert worst["median_error"] > 0.2
    text = " ".join(evaluated(path).split())
    assert f"worst group: deepep {worst['phase']} on h100, 8 ranks, top 4, hidden 7168:" in text


def test_a_fit_that_makes_other_rows_worse_is_warned_of(tmp_path):
    path = table(tmp_path / "uneven.csv", [1.5, 1.0] * (len(TOKENS) // 2))
    text = " ".join(evaluated(path, "--calibrate").split())
    assert "constants fitted to every other row are worse on the rest" in text
    assert "use the shipped ones" in text


def test_too_few_rows_are_not_held_out(tmp_path):
    path = table(tmp_path / "few.csv", [1.1, 1.1], TOKENS[:2])
    assert json.loads(evaluated(path, "--calibrate", "--json"))["held_out"] == []
    assert "n/a on other rows (too few rows" in evaluated(path, "--calibrate")
    assert json.loads(evaluated(path, "--json"))["held_out"] is None


def test_rows_outside_of_the_measurements_are_extrapolated(tmp_path):
    path = tmp_path / "sizes.csv"
    sizes = [(4096, 24), (1 << 20, 24), (4096, 100)]
    rows = [f"normal,1,8,7168,8,256,{tokens},{sms},," for tokens, sms in sizes]
    path.write_text(HEAD + "\n".join(rows) + "\n")
    measured, beyond, wide = json.loads(evaluated(str(path), "--json"))["rows"]
    assert measured["extrapolated"] is None
    assert wide["extrapolated"] == "100 SMs, measured: 4 to 24"
    assert beyond["extrapolated"].startswith("1048576 tokens, measured: ")
    text = evaluated(str(path))
    assert "extrapolated: 1 row of deepep: 1048576 tokens" in text
    page = tmp_path / "page.html"
    evaluated(str(path), "--html", str(page))
    assert "What is predicted?" in page.read_text()


def rows_of(path, *columns):
    path.write_text(HYBRID.format(*columns))
    return json.loads(evaluated(str(path), "--cluster", "h100", "--json"))["rows"]


def test_kernels_that_are_measured_with_a_gate_have_it_in_evaluate_and_compare(tmp_path):
    rows = rows_of(tmp_path / "rows.csv", "", "", "")
    for row in rows:
        assert (row["expert_groups"], row["groups"]) == (8, 4)
        for phase in ("dispatch", "combine"):
            measured = row[f"measured_{phase}_ns"]
            assert row[f"predicted_{phase}_ns"] == pytest.approx(measured, rel=0.06)
    options = ModelOptions(model="deepseek-v3", ep=32)
    compared = compare_kernels(
        options, WorkloadOptions(), DispatchOptions(cluster="h100"), ("deepep",)
    )
    (own,) = (one for one in compared.kernels if one.family == "hybridep")
    expected = own.phases["dispatch"].seconds * 1e9
    assert rows[0]["predicted_dispatch_ns"] == pytest.approx(expected, rel=0.02)


def test_a_table_may_have_the_groups_of_a_token(tmp_path):
    usual = rows_of(tmp_path / "usual.csv", "", "", "")
    same = rows_of(tmp_path / "same.csv", ",groups", ",4", ",4")
    assert same == usual
    fewer = rows_of(tmp_path / "fewer.csv", ",groups", ",2", ",2")
    assert [row["groups"] for row in fewer] == [2, 2]
    assert fewer[1]["predicted_dispatch_ns"] < 0.6 * usual[1]["predicted_dispatch_ns"]
    free = rows_of(tmp_path / "free.csv", ",expert_groups,groups", ",1,1", ",1,1")
    assert free[1]["predicted_dispatch_ns"] > 1.2 * usual[1]["predicted_dispatch_ns"]


@pytest.mark.parametrize(("row", "error"), [
    ("normal,1,64,7168,8,256,4096,24,,", "row 2: 64 ranks on 1 node; a node of H100-SXM has 8"),
    ("normal,2,32,7168,8,256,4096,24,,", "row 2: 32 ranks on 2 nodes; a node of H100"),
    ("normal,,12,7168,8,256,4096,24,,", "row 2: 12 ranks; a node of H100-SXM has 8"),
    ("normal,1,1,7168,8,256,4096,24,,", "row 2: 1 rank exchanges nothing"),
    ("normal,1,8,7168,2,4,4096,24,,", "row 2: 4 experts are fewer than the 8 ranks"),
    ("normal,1,8,7168,8,256,4096,1000,,", "row 2: 1000 SMs, but H100-SXM has 132"),
])  # fmt: skip
def test_a_row_that_the_cluster_cannot_run_is_an_error(tmp_path, row, error):
    path = tmp_path / "rows.csv"
    path.write_text(HEAD + "normal,1,8,7168,8,256,4096,132,,\n" + row + "\n")
    with pytest.raises(ConfigError, match=error):
        evaluate_exchanges(path, "dgx-h100")


def test_kernels_on_a_gpu_that_cannot_run_them_are_an_error(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(HEAD + "normal,1,8,7168,8,256,4096,24,,\n")
    with pytest.raises(ConfigError, match=r"deepep: needs compute capability 9.0, and A100"):
        evaluate_exchanges(path, "dgx-a100")
    path.write_text(HYBRID.format("", "", "").replace("hybridep", "trtllm"))
    with pytest.raises(ConfigError, match=r"trtllm: runs on GB200 and GB300 only \(row 1\)"):
        evaluate_exchanges(path, "dgx-h100")


def test_a_cluster_without_a_gpu_is_an_error_that_names_others(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(HEAD + "normal,1,8,7168,8,256,4096,24,,\n")
    with pytest.raises(ConfigError, match=r"no key gpu.*; clusters that have it: .*dgx-h100"):
        evaluate_exchanges(path, "a800")


def test_a_model_without_the_gate_has_no_limit(tmp_path):
    path = tmp_path / "qwen.csv"
    path.write_text(HYBRID.format("", "", "").replace("7168,8,256", "4096,8,128"))
    rows = json.loads(evaluated(str(path), "--cluster", "h100", "--json"))["rows"]
    assert [(row["expert_groups"], row["groups"]) for row in rows] == [(1, 1), (1, 1)]
