"""Test `fastcomm dispatch` and its options."""

import json
import shlex

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders.commands import quoted
from builders.shared_data import shared
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.dispatch.analysis import terms_for
from fastcomm.dispatch.options import DispatchOptions
from fastcomm.dispatch.recipe import Recipe
from fastcomm.errors import ConfigError
from fastcomm_kernels import _jit

SMALL = "--num-nodes 2 --gpus-per-node 2 --seq-len 20 --batch-size 2 --iter-num 2 --topk 2"
KEYS = {
    "total_latency_ns", "avg_layer_latency_ns", "inter_node_bytes", "algo_bw_bytes_per_s",
    "lower_bound_ns", "layers",
}  # fmt: skip


def said(arguments, code=0):
    done = CliRunner().invoke(main, ["dispatch", *shlex.split(arguments)])
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "w"
    out = said(f"generate {SMALL} --seed 3 -o {quoted(folder)}")
    assert "2 iterations of 1 layer, 40 tokens of 2 experts on 4 GPUs" in out
    return folder


@pytest.mark.parametrize(("name", "options"), [
    ("n4g8_default", "--num_nodes 4"),
    ("n8g8", "--num-nodes 8 --iter-num 4"),
])  # fmt: skip
def test_the_original_report_is_reproduced_exactly(tmp_path, name, options):
    reference = json.loads(shared(f"dispatch/{name}.json").read_text())
    said(f"generate {options} --compat seed --seed {reference['seed']} -o {quoted(tmp_path)}/w")
    out = said(f"simulate --schedules deepep-compat,fast-compat {quoted(tmp_path)}/w")
    assert reference["deepep_stdout"] in out
    assert reference["fast_stdout"] in out
    found = json.loads(said(f"simulate --schedules deepep-compat {quoted(tmp_path)}/w --json"))
    assert (
        found["strategies"]["deepep-compat"]["total_latency_ns"]
        == reference["total_deepep"] * 1e9
    )


def test_a_first_run_says_that_it_compiles(made, monkeypatch):
    marks = set()
    monkeypatch.setattr(_jit, "is_compiled", marks.__contains__)
    monkeypatch.setattr(_jit, "mark_compiled", marks.add)
    commands = [
        (f"simulate {quoted(made)} --schedules deepep,direct", {"deepep", "direct"}),
        (f"place {quoted(made)} --schedules deepep", {"placement"}),
        (f"compare {SMALL} --schedules deepep", {"workload"}),
    ]
    for command, new in commands:
        before = set(marks)
        first, second = (
            CliRunner().invoke(main, ["dispatch", *shlex.split(command)]) for _ in range(2)
        )
        assert "compiling its kernels" in first.stderr
        assert "compiling its kernels" not in second.stderr
        assert marks - before == {f"dispatch-{part}" for part in new}
    done = CliRunner().invoke(main, ["dispatch", "simulate", str(made), "--schedules", "../x"])
    assert "compiling" not in done.output


def test_the_stages_of_fast_are_written(made, tmp_path):
    document = json.loads(
        said(
            f"simulate {quoted(made)} --schedules deepep,fast,fast-published --json "
            f"-o {quoted(tmp_path)}"
        )
    )
    rows = pq.read_table(tmp_path / "stages.parquet").to_pylist()
    assert (tmp_path / "stages.csv").exists()
    assert {row["strategy"] for row in rows} <= {"fast", "fast-published"}
    for row in rows:
        layer = document["strategies"][row["strategy"]]["layers"][row["iteration"]]
        assert 0 <= row["start_ns"] < row["stop_ns"] <= layer["latency_ns"] * (1 + 1e-9)
        assert row["node"] != row["destination"]
        assert row["bytes"] > 0
    said(f"simulate {quoted(made)} --schedules deepep -o {quoted(tmp_path)}/none")
    assert not (tmp_path / "none" / "stages.parquet").exists()


def test_a_simulation_is_one_json_object(made):
    found = json.loads(said(f"simulate {quoted(made)} --schedules deepep,fast,direct --json"))
    assert list(found["strategies"]) == ["deepep", "fast", "direct"]
    for each in found["strategies"].values():
        assert set(each) >= KEYS
        assert len(each["layers"]) == 2
        assert all(layer["phases_ns"] for layer in each["layers"])
        loads = [layer["gpu_load_tokens"]["inter_rx"] for layer in each["layers"]]
        assert [sum(gpu) for gpu in zip(*loads, strict=True)] == each["gpu_load_tokens"][
            "inter_rx"
        ]
        assert each["total_latency_ns"] >= each["lower_bound_ns"] * (1 - 1e-12)
    assert found["workload"]["seed"] == 3


def test_the_report_names_the_bottleneck_and_shows_the_load(made):
    out = said(f"simulate {quoted(made)} --schedules deepep,fast")
    assert "deepep: dispatch " in out
    assert "NVLink receive" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("simulate {made} --schedules deepep,fast-compat", "Fastest: deepep, dispatch in "),
        ("compare {made}", "Fastest: "),
        ("place {made} --replicas 1.5", "Placed anew, the dispatch is "),
        ("sweep --num-nodes 1 --seq-len 4 --iter-num 1 --over topk=1,2", "Fastest"),
    ],
)
def test_the_first_line_is_the_answer(made, arguments, answer):
    assert said(arguments.format(made=quoted(made))).startswith(answer)


def test_compare_prints_one_row_per_strategy(made):
    out = said(f"compare {quoted(made)}")
    assert "multicast-balanced" in out
    assert "fast-compat" in said("compare --num-nodes 1 --seq-len 4 --iter-num 1")


def test_results_are_written_to_files(made, tmp_path):
    said(f"compare {quoted(made)} -o {quoted(tmp_path)}/out")
    found = json.loads((tmp_path / "out" / "dispatch.json").read_text())
    rows = pq.read_table(tmp_path / "out" / "dispatch.parquet").to_pylist()
    assert len(rows) == 2 * len(found["strategies"])
    assert (tmp_path / "out" / "dispatch.csv").read_text().startswith('"strategy"')


def test_placement_is_shown_before_and_after(made, tmp_path):
    assert "12 copies of 8 experts" in said(f"place {quoted(made)} --replicas 1.5")
    load = tmp_path / "load.txt"
    load.write_text("9 1 1 1 1 1 1 1\n")
    found = json.loads(
        said(f"place {quoted(made)} --replicas 1.5 --load {quoted(load)} --json")
    )
    assert found["layers"][0]["replicas"] == [4, 2, 1, 1, 1, 1, 1, 1]
    assert set(found["imbalance"]) == {"before", "after", "of"}
    assert found["imbalance"]["of"] == "load"


def test_a_sweep_is_a_table(tmp_path):
    shape = SMALL.removesuffix(" --topk 2")
    arguments = f"sweep {shape} --over topk=1,2 --over zipf_alpha=1.5,2.5 --schedules deepep"
    assert said(arguments).count("us") >= 4
    found = json.loads(said(f"{arguments} --json -o {quoted(tmp_path)}"))
    assert [row["topk"] for row in found["rows"]] == [1, 1, 2, 2]


def test_a_sweep_has_a_page_with_bars_of_each_workload(tmp_path):
    shape = SMALL.removesuffix(" --topk 2")
    page = tmp_path / "page.html"
    said(f"sweep {shape} --over topk=1,2 --schedules deepep,fast --html {quoted(page)}")
    text = page.read_text()
    assert "is the fastest, or within 1 % of it, at " in text
    assert all(f"{name}, topk {k}: " in text for name in ("deepep", "fast") for k in (1, 2))


def test_the_routing_table_of_a_job_is_simulated(tmp_path):
    random = np.random.default_rng(0)
    path = tmp_path / "job.npz"
    np.savez(
        path, src_gpu=random.integers(0, 4, 50), target_experts=random.integers(0, 8, (50, 3))
    )
    shape = "--num-nodes 2 --gpus-per-node 2 --experts-per-gpu 2"
    found = json.loads(said(f"simulate {quoted(path)} {shape} --schedules fast --json"))
    assert found["workload"]["law"] == "table"
    assert "GPU 3 is not in 0 to 1" in said(
        f"simulate {quoted(path)} --num-nodes 1 --gpus-per-node 2 --experts-per-gpu 4", 1
    )


def test_popularity_and_hot_ranks_shape_a_workload(tmp_path):
    weights = tmp_path / "weights.txt"
    weights.write_text("0, 0, 1, 1\n1 1 0 0")
    said(f"generate {SMALL} --law popularity --popularity {quoted(weights)} --hot-ranks 1:3 "
         f"--distinct resample -o {quoted(tmp_path)}/w")  # fmt: skip
    table = pq.read_table(tmp_path / "w" / "iter_0_requests.parquet")
    assert set(np.concatenate(table["expert"].to_numpy()).tolist()) == {2, 3, 4, 5}
    assert np.bincount(table["src"]).tolist() == [7, 20, 6, 7]


def test_each_kind_of_link_has_its_own_start_up_time(made):
    starts = "--inter-start 2us --intra-start 5us"
    simulate = f"simulate {quoted(made)} --schedules deepep {starts} --json"
    terms = json.loads(said(simulate))["terms"]
    assert terms["inter_start_ns"] == pytest.approx(2000)
    assert terms["intra_start_ns"] == pytest.approx(5000)


CLUSTER = 'gpus_per_node = 2\nbw_intra = "150GiB/s"\nbw_node = "50GB/s"\n'


def test_a_cluster_file_gives_the_bandwidths(made, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    simulate = f"simulate {quoted(made)} --schedules deepep --cluster {quoted(path)} --json"
    terms = json.loads(said(simulate))["terms"]
    assert terms["inter_bytes_per_s"] == 25e9
    assert terms["intra_bytes_per_s"] == 150 * 2**30
    assert json.loads(said(f"{simulate} --bw-inter 1GB/s"))["terms"]["inter_bytes_per_s"] == 1e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CLUSTER.replace("= 2", "= 8"), "gpus_per_node is 8, but the workload has 2"),
        (CLUSTER.replace("= 2", "= true2"), "cluster.toml: "),
        (CLUSTER.replace("= 2", "= 0"), "invalid gpus_per_node 0"),
        (CLUSTER.replace("bw_node", "nic"), "unknown key 'nic'"),
        (CLUSTER.replace("bw_node", "# "), "missing key bw_node"),
        (CLUSTER.replace('"50GB/s"', "50"), "bw_node: invalid bandwidth '50': no unit"),
        (CLUSTER.replace("50GB/s", "much"), "bandwidth 'much'"),
        (None, "no such file, and not one of"),
    ],
)
def test_a_cluster_file_that_is_wrong_is_one_line(made, tmp_path, text, message):
    path = tmp_path / "cluster.toml"
    if text:
        path.write_text(text)
    out = said(f"simulate {quoted(made)} --schedules deepep --cluster {quoted(path)}", 2)
    assert message in out
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate {made} --num-nodes 3", "num_nodes is 2, but the option says 3"),
        ("simulate {made} --schedules magic", "unknown strategy magic"),
        ("simulate {made} --bw-inter slow", "bandwidth 'slow'"),
        ("simulate {made} --bw-inter 50", "bw_inter: invalid bandwidth '50': no unit"),
        ("generate --topk 65 -o {made}/x", "invalid topk 65"),
        ("generate --zipf-alpha 1 -o {made}/x", "invalid zipf_alpha 1.0"),
        ("generate --hot-ranks 99:2 -o {made}/x", "invalid --hot-ranks '99:2': expected GPU"),
        ("generate --hot-ranks 0:-2 -o {made}/x", "a number from 0 to 1000000"),
        (
            "generate --law popularity --popularity {made}/iter_0_requests.parquet -o {made}/x",
            "expected text",
        ),
        ("compare {made} --law gate", "law is zipf, but the option says gate"),
        ("compare {made} --compat seed", "law is zipf, but the option says seed"),
        ("place {made} --replicas 1.1", "invalid replicas 9"),
        ("sweep --over color=1", "invalid --over 'color=1'"),
        ("sweep --over num-nodes=2,4 --over num_nodes=8", "--over num_nodes: given 2 times"),
        ("sweep --over topk=1,2 --topk 2", "--topk has no effect with --over topk"),
        ("sweep --over zipf_alpha=1,2 --law gate", "zipf_alpha has no effect with law gate"),
    ],
)
def test_a_user_error_is_one_line(made, arguments, message):
    out = said(arguments.format(made=quoted(made)), 2)
    assert message in out
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize("bandwidth", ["50", 50, "50.", "1e1"])
def test_bandwidths_without_a_unit_are_only_for_the_original(bandwidth):
    options = DispatchOptions(bw_inter=bandwidth, bw_intra="50GB/s")
    with pytest.raises(
        ConfigError, match=r"bw_inter: invalid bandwidth '.*': no unit; expected a number"
    ):
        terms_for(Recipe(), options)
    links = terms_for(Recipe(law="seed"), options).links
    assert links.inter_bytes_per_s == float(bandwidth) * 2**30
    assert links.intra_bytes_per_s == 50e9


@pytest.mark.parametrize("bandwidth", ["-1", "nan", "0", "fast"])
def test_invalid_bandwidths_are_refused_for_the_original_too(bandwidth):
    with pytest.raises(ConfigError, match="bw_inter: invalid bandwidth"):
        terms_for(Recipe(law="seed"), DispatchOptions(bw_inter=bandwidth))


EXCHANGES = """\
mode,nodes,ranks,hidden,topk,experts,tokens,sms,dispatch_us,combine_us,dispatch_notify_us
normal,1,8,7168,8,256,4096,24,498,961,
normal,2,16,7168,8,256,4096,24,749,1777,56
low_latency,1,8,7168,8,256,128,,,,
"""


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory):
    path = tmp_path_factory.mktemp("exchanges") / "exchanges.csv"
    path.write_text(EXCHANGES)
    return path


def test_measured_exchanges_are_priced_row_by_row(exchanges):
    found = json.loads(said(f"evaluate {quoted(exchanges)} --cluster h100 --json"))
    assert [row["family"] for row in found["rows"]] == ["deepep", "deepep", "deepep-ll"]
    assert [row["nodes"] for row in found["rows"]] == [1, 2, 1]
    times = [row["measured_dispatch_ns"] for row in found["rows"]]
    assert times == [pytest.approx(498e3), pytest.approx(749e3), None]
    waits = [row["measured_dispatch_notify_ns"] for row in found["rows"]]
    assert waits == [None, pytest.approx(56e3), None]
    assert found["rows"][0]["predicted_dispatch_ns"] == pytest.approx(498e3, rel=0.1)
    assert found["rows"][2]["predicted_combine_ns"] > found["rows"][2]["predicted_dispatch_ns"]
    assert [(each["nodes"], each["phase"], each["rows"]) for each in found["errors"]] == [
        (1, "dispatch", 1), (1, "combine", 1), (2, "dispatch", 1), (2, "combine", 1),
    ]  # fmt: skip
    first = found["rows"][0]
    off = first["predicted_combine_ns"] / first["measured_combine_ns"] - 1
    assert found["errors"][1]["median_bias"] == pytest.approx(off)
    assert found["calibration"] is None


def test_a_table_without_times_gets_predictions(tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text("family,ranks,hidden,topk,experts,tokens\nhybridep,32,7168,8,256,4096\n")
    out = said(f"evaluate {quoted(path)} --cluster gb200")
    assert "gb200  hybridep      1     32    4096" in out
    assert "1 row on GB200, without measured times." in out


def test_calibration_moves_predictions_to_the_table(tmp_path):
    rows = [f"normal,1,8,7168,8,256,{n},24,{100 + n / 4},{100 + n / 2}" for n in (8, 512, 8192)]
    path = tmp_path / "slow.csv"
    path.write_text("\n".join([EXCHANGES.splitlines()[0].rpartition(",")[0], *rows]))
    before, after = (
        json.loads(said(f"evaluate {quoted(path)} {option} --json"))
        for option in ("", "--calibrate")
    )
    for shipped, fitted in zip(before["errors"], after["errors"], strict=True):
        assert fitted["median_error"] < 0.5 * shipped["median_error"]
    starts = [one for one in after["calibration"] if one["constant"] == "start_us"]
    assert [one["fitted"] > one["shipped"] for one in starts] == [True, True]
    assert "start_us" in said(f"evaluate {quoted(path)} --calibrate")


def test_kernels_without_constants_are_an_error(tmp_path):
    path = tmp_path / "across.csv"
    path.write_text("family,ranks,hidden,topk,experts,tokens\ntrtllm,144,7168,8,288,64\n")
    out = said(f"evaluate {quoted(path)} --cluster gb200", 2)
    assert "trtllm: no constants across NVLink domains (row 1)" in out


def test_a_cluster_without_a_gpu_is_an_error(exchanges):
    assert "a800: no key gpu" in said(f"evaluate {quoted(exchanges)} --cluster a800", 2)
