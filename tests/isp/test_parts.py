"""Test models, clusters, formulas and calibration of the strategy search."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from builders.opened import open_run

from fastcomm.errors import ConfigError
from fastcomm.hardware import calibration
from fastcomm.hardware.calibration import TimedMessage, calibrate, read_measurements
from fastcomm.hardware.clusters import load, parse, shipped
from fastcomm.isp.calibration import messages
from fastcomm.isp.layer import Correction, cluster_collective, two_gpus
from fastcomm.metrics.computation import compute_metrics
from fastcomm.models import internlm
from fastcomm.models import load as load_model

A800 = load("a800")


@pytest.mark.parametrize(
    ("algo", "sent", "kept"),
    [
        ("mtp", (4, 6), 23.7),
        ("msp", (4, 6), 21.7),
        ("fsp", (5, 7), 19.7),
        ("isp", (2, 3), 19.7),
    ],
)
def test_two_gpus_agree_with_the_worked_example(algo, sent, kept):
    found = two_gpus(algo)
    assert (found["sent"], found["sent_with_checkpoints"]) == sent
    assert round(found["kept"], 1) == kept


def test_models_have_the_known_number_of_parameters():
    assert internlm(7).parameters == 7_321_423_872
    assert internlm(13).parameters == 13_744_624_640
    assert load_model("llama3-8b").parameters == pytest.approx(8.03e9, rel=0.01)
    assert load_model("llama3-70b").parameters == pytest.approx(70.55e9, rel=0.01)
    flops = [internlm(7).flops(k * 1024) / 1e9 for k in (4, 16, 32, 64, 128, 256)]
    assert flops == pytest.approx([47.6, 67.0, 92.7, 144.3, 247.3, 453.5], abs=0.06)


def test_a_model_is_read_from_hugging_face_and_from_toml(tmp_path):
    path = tmp_path / "config.json"
    said = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "hidden_act": "silu",
    }
    path.write_text(json.dumps(said))
    llama = load_model("llama3-8b")
    assert replace(load_model(tmp_path), name=llama.name) == llama
    halves = ["sliding_attention", "full_attention"] * 16
    for more, window in (
        ({"sliding_window": 128, "layer_types": halves}, 128),
        ({"sliding_window": 128, "model_type": "gpt_oss"}, 128),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 32}, 0),
    ):
        path.write_text(json.dumps(said | more | {"num_nextn_predict_layers": 1}))
        assert (load_model(path).window, load_model(path).mtp_layers) == (window, 1)
    path.write_text(json.dumps(said))
    toml = tmp_path / "m.toml"
    toml.write_text('hidden = 1024\nheads = 8\nlayers = 4\nmlp = "gelu"\n')
    assert load_model(toml).layer_parameters == 12 * 1024**2
    for more, message in (
        # Of all layers: none has the price of a window.
        ({"sliding_window": 128}, "a sliding_window of 128 tokens is priced on every second"),
        ({"hidden_size": "x"}, "hidden_size or n_embd"),
        ({"num_local_experts": 8}, "experts"),
        ({"num_attention_heads": 30}, "not a multiple of 30 heads"),
        ({"num_key_value_heads": 5}, "not a multiple of 5 kv_heads"),
    ):
        path.write_text(json.dumps(said | more))
        with pytest.raises(ConfigError, match=message):
            load_model(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not list"):
        load_model(path)


@pytest.mark.parametrize("name", shipped())
def test_built_in_clusters_are_complete_and_name_their_sources(name):
    cluster = load(name)
    assert cluster.bw_intra > cluster.bw_node / cluster.gpus_per_node
    text = (load.__globals__["resources"].files("fastcomm.hardware") / "data").joinpath(
        f"{name}.toml"
    )
    lines = [line for line in text.read_text().splitlines() if line]
    for before, line in pairwise(lines):
        if line.startswith(("memory", "peak", "hbm", "bw_", "contention", "alpha", "gemm")):
            assert before.startswith("#"), line


def test_a_cluster_file_that_is_wrong_is_an_error_with_its_key(tmp_path):
    text = (
        load.__globals__["resources"].files("fastcomm.hardware") / "data/a800.toml"
    ).read_text()
    assert parse(text, "x") == A800
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('"A800-80GB"', '"mine"'))
    assert load(path).name == "mine"
    for old, new, message in (
        ("hbm =", "hbw =", "unknown key 'hbw'"),
        ('hbm = "1.6TB/s"', "", "missing key hbm"),
        ("1.6TB/s", "fast", "bandwidth 'fast'"),
        (
            "peak_tflops = 312",
            'peak_tflops = "x"',
            "invalid peak_tflops 'x': expected a number",
        ),
        (
            "peak_tflops = 312",
            "peak_tflops = 0",
            "invalid peak_tflops 0: expected a number from",
        ),
        ("[[16, 1.0], [32", "[[64, 1.0], [32", "contention must be sorted"),
        ("[2.5e+08, 7.19]", "[2.5e+18, 7.19]", "gemm must be sorted"),
        ("gpus_per_node = 8", "gpus_per_node = ", "x: "),
        ("start_us = [80.0, 77.0]", "", "KeyError"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(text.replace(old, new), "x")


def line(op, ranks, alpha, bus, sizes=(1e6, 4e6, 3e7, 2e8, 1e9)):
    factor = (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
    return [TimedMessage(op, ranks, size, alpha + size * factor / bus) for size in sizes]


def test_calibration_finds_the_lines_it_was_given():
    given = line("all_reduce", 8, 40e-6, 150e9) + line("all_to_all", 16, 1e-4, 20e9)
    outlier = TimedMessage("all_reduce", 8, 2e8, 0.5)
    found = calibrate(A800, [*given, outlier, *given, *given])
    fits = {(op, fit.ranks): fit for op, lines in found.cluster.fits.items() for fit in lines}
    assert fits["all_reduce", 8].alpha == pytest.approx(40e-6, rel=0.01)
    assert fits["all_reduce", 8].bus == pytest.approx(150e9, rel=0.01)
    assert fits["all_to_all", 16].bus == pytest.approx(20e9, rel=0.01)
    assert max(residual.worst_error for residual in found.residuals) < 0.01
    times = [cluster_collective(found.cluster, m.op, m.volume, m.ranks) for m in given]
    assert times == pytest.approx([m.seconds for m in given], rel=0.01)


def test_calibration_finds_a_second_line_for_small_messages():
    sizes = np.geomspace(1e5, 1e9, 12)
    given = [
        TimedMessage("all_gather", 64, s, min(2e-5 + s / 5e9, 4e-4 + s / 90e9)) for s in sizes
    ]
    (residual,) = calibrate(A800, given).residuals
    assert residual.worst_error < 0.03


def test_one_size_tells_a_bandwidth_and_nothing_is_an_error():
    found = calibrate(A800, line("all_gather", 8, 35e-6, 1e11, sizes=(1e8,)))
    assert found.residuals[0].worst_error < 1e-9
    near = line("all_gather", 8, 35e-6, 1e11, sizes=(1e8, 1.1e8, 1.2e8))
    assert calibrate(A800, near).residuals[0].sizes == 1
    small = calibrate(A800, line("broadcast", 8, 5e-6, 1e11, sizes=(1e4,)))
    assert "broadcast on 8" in small.skipped[0]
    assert small.cluster.fits == {}
    with pytest.raises(ConfigError, match="no collective"):
        calibrate(A800, [TimedMessage("p2p", 2, 1.0, 1.0)])


@pytest.mark.parametrize(("name", "seconds"), [("ring", 6.0783e-3), ("tree", 5.9383e-3)])
def test_a_search_can_price_collectives_by_the_design_note_s_formulas(name, seconds):
    cluster = replace(A800, comm_model=name)
    mine = float(cluster_collective(cluster, "all_gather", 2**30, 8))
    assert mine == pytest.approx(seconds, rel=1e-4)


def test_what_was_not_measured_keeps_the_constants_of_the_cluster():
    found = calibrate(A800, line("all_gather", 8, 20e-6, 1e11)).cluster
    for ranks, same in ((4, False), (8, False), (16, True), (64, True)):
        pair = [cluster_collective(each, "all_gather", 1e9, ranks) for each in (A800, found)]
        assert (pair[0] == pair[1]) == same


def test_measured_collectives_of_a800_come_back(isp_data):
    timed = read_measurements(isp_data / "a800_collectives_latency.csv")
    assert len(timed) == 350
    found = calibrate(A800, timed)
    assert len(found.residuals) == 35
    assert np.median([each.median_error for each in found.residuals]) < 0.03
    ours = cluster_collective(found.cluster, "all_gather", 2**30, 64)
    theirs = next(m.seconds for m in timed if m[:3] == ("all_gather", 64, 2**30))
    assert ours == pytest.approx(theirs, rel=0.1)


NCCL = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728
# Using devices
#  Rank  0 Group  0 Pid  1 on   host device  0 [0x07] NVIDIA A100
#  Rank  1 Group  0 Pid  1 on   host device  1 [0x0b] NVIDIA A100
#       size  count  type redop root  time algbw busbw #wrong time algbw busbw #wrong
     1048576 262144 float   sum   -1 20.15 52.04 52.04      0 20.1 52.1 52.1      0
   134217728 33554432 float sum   -1 751.2 178.7 178.7      0 750. 178. 178.      0
# Avg bus bandwidth    : 100
"""


def test_the_output_of_nccl_tests_is_read(tmp_path):
    path = tmp_path / "all_reduce.txt"
    path.write_text(NCCL)
    assert read_measurements(path) == [
        TimedMessage("all_reduce", 2, 1048576.0, pytest.approx(20.15e-6)),
        TimedMessage("all_reduce", 2, 134217728.0, pytest.approx(751.2e-6)),
    ]
    other = tmp_path / "out.txt"
    other.write_text(NCCL)
    with pytest.raises(ConfigError, match="no operation"):
        read_measurements(other)
    other.write_text("# Collective test starting: all_gather_perf\n" + NCCL)
    assert read_measurements(other)[0].op == "all_gather"
    path.write_text(NCCL.replace("Rank ", "Bank "))
    with pytest.raises(ConfigError, match="no list of ranks"):
        read_measurements(path)


def test_a_table_of_messages_that_is_wrong_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("op,ngpu,bytes,lat_s\nall_gather,2,10,x\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_measurements(path)
    path.write_text("op,ngpu,bytes,lat_s\n")
    with pytest.raises(ConfigError, match="no timed message"):
        read_measurements(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_measurements(tmp_path / "absent.csv")


def test_calibration_from_a_run_equals_calibration_from_its_metrics(tmp_path):
    from fastcomm.show.files import write_result
    from fastcomm.synthetic.job import Job
    from fastcomm.synthetic.traces import write

    write(Job.of(ranks=8, steps=2, layers=2), tmp_path / "run")
    run = open_run(tmp_path / "run")
    timed = messages(run)
    assert {message.op for message in timed} >= {"all_reduce", "all_gather"}
    found = calibrate(A800, timed, waits=True)
    assert all(fit.bus > 0 for lines in found.cluster.fits.values() for fit in lines)
    write_result(compute_metrics(run), tmp_path / "out", "metrics")
    again = calibrate(A800, read_measurements(tmp_path / "out"), waits=True)
    assert {(r.op, r.ranks) for r in again.residuals} == {
        (r.op, r.ranks) for r in found.residuals
    }


def test_an_attention_table_corrects_the_formula_and_is_exact_at_its_points(isp_data):
    table = calibration.read_attention(isp_data / "fa_a800.csv")
    key = (1, 8192, 4096)
    ahead, back = Correction.of(table, A800).at(8192.0, np.array([[4096.0]]))
    formula = float(A800.attention.forward(*key))
    assert ahead.item() * formula == pytest.approx(table[key][0], rel=0.05)
    assert 0.8 < back.item() < 1.2
    between, _ = Correction.of(table, A800).at(12000.0, np.array([[4096.0]]))
    assert 0.8 < between.item() < 1.2
