"""Test calibration of arithmetic from kernels of operators with shapes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from builders import kineto_text as text
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.cli.main import main
from fastcomm.formats.kineto.reader import ShapedCall, calls
from fastcomm.hardware.calibration import TimedAttention, TimedGemm, fit_attention, fit_gemm
from fastcomm.hardware.clusters import load
from fastcomm.isp.calibration import NAMES, attention, calibrated, classify, gemm

A800 = load("a800")
HALF = "c10::BFloat16"
ASKED = ("--model", "7B", "--world-size", "16", "--seq-len", "4Ki", "--global-batch", "1Mi")
SIZES = [(2**a, 2**b, 4096) for a in range(7, 14) for b in range(9, 14)]


def operator(name, ts, dims, seconds, kind=HALF, *, values=(), kernels=1, tid=1):  # noqa: PLR0913
    """An operator on the host, its launches, and its kernels a while later."""
    said = {"Input_Dims": dims, "Input_type": [kind] * len(dims)}
    if values:
        said["Concrete_Inputs"] = values
    rows = [text.event(name, "cpu_op", ts, 10, pid=100, tid=tid, **said)]
    for k in range(kernels):
        rows.append(text.launch(ts + 1 + k, int(ts) + k, tid=tid))
        rows.append(
            text.kernel("k", ts + 500, seconds * 1e6 / kernels, correlation=int(ts) + k)
        )
    return rows


def products_of(slower, kind=HALF):
    rows = []
    for place, (m, k, n) in enumerate(SIZES):
        seconds = slower * float(A800.gemm.seconds(2.0 * m * k * n))
        rows += operator("aten::mm", 1000 * (place + 1), [[m, k], [k, n]], seconds, kind)
    return rows


def flash(slower):
    rows = []
    for place, seq in enumerate((1024, 4096, 16384)):
        shape = [2, seq, 16, 128]
        for way, ask in enumerate((A800.attention.forward, A800.attention.backward)):
            start = A800.attention.start[way]
            seconds = start + slower * (float(ask(2, seq, 16 * 128)) - start)
            name = f"aten::_flash_attention_{'backward' if way else 'forward'}"
            dims = [shape] * (4 + way)
            values = [""] * (8 + 3 * way) + ["True"]
            rows += operator(
                name, 1e6 + 2000 * place + 1000 * way, dims, seconds, values=values
            )
    return rows


def test_fitted_curves_reproduce_slowed_kernels(tmp_path):
    path = text.write(tmp_path / "rank0.json", [*products_of(1.4), *flash(1.25)])
    found = calibrated(path, A800)
    work = np.array([2.0 * m * k * n for m, k, n in SIZES])
    ratio = found.cluster.gemm.seconds(work) / A800.gemm.seconds(work)
    assert ratio == pytest.approx(1.4, rel=0.1)
    far = found.cluster.gemm.seconds(1e15) / A800.gemm.seconds(1e15)
    assert far == pytest.approx(1.4, rel=0.01)
    assert found.cluster.attention.forward(1, 32768, 4096) == pytest.approx(
        1.25 * A800.attention.forward(1, 32768, 4096), rel=0.01
    )
    assert {line.kind for line in found.compute} == {
        *("GEMM", "attention forward", "attention backward")
    }
    assert max(line.worst_error for line in found.compute) < 0.1
    assert sum(line.calls for line in found.compute) == len(SIZES) + 6
    assert any("no collective" in words for words in found.skipped)


def test_a_single_slow_call_does_not_affect_the_fit():
    work = [TimedGemm(1e12, 5e-3)] * 9 + [TimedGemm(1e12, 1.0)]
    cluster, (line,) = fit_gemm(A800, work)
    assert float(cluster.gemm.seconds(1e12)) == pytest.approx(5e-3)
    assert (line.calls, line.median_error) == (10, pytest.approx(0))
    calls_ = [TimedAttention(False, 1, 8192, 4096, 6e-3)] * 3 + [
        TimedAttention(False, 1, 8192, 4096, 1.0)
    ]
    cluster, (line,) = fit_attention(A800, calls_)
    assert float(cluster.attention.forward(1, 8192, 4096)) == pytest.approx(6e-3)
    assert cluster.attention.rate[1] == A800.attention.rate[1]


@given(st.lists(st.tuples(st.floats(1e6, 1e14), st.floats(1e12, 1e15)), min_size=1, max_size=9))
def test_more_work_never_takes_less_time_on_a_fitted_curve(made):
    cluster, _ = fit_gemm(A800, [TimedGemm(flops, flops / rate) for flops, rate in made])
    assert list(cluster.gemm.flops) == sorted(set(cluster.gemm.flops))
    times = cluster.gemm.seconds(np.array(cluster.gemm.flops))
    assert np.all(np.diff(times) >= -1e-9 * times[1:])


def test_kernels_belong_to_the_innermost_operator_around_their_launch(tmp_path):
    rows = operator("aten::addmm", 100, [[8], [4, 2], [2, 8]], 6e-6, kernels=2)
    rows += operator("aten::bmm", 200, [[3, 4, 2], [3, 2, 8]], 5e-6, tid=2)
    rows += [text.launch(150, 7), text.kernel("outside", 700, 50, correlation=7)]
    rows += [text.kernel("unlaunched", 800, 50, correlation=99)]
    rows += [text.event("aten::mm", "cpu_op", 300, 10, pid=100, tid=1)]
    rows += [text.launch(301, 8), text.kernel("no shapes", 900, 5, correlation=8)]
    found = calls(text.write(tmp_path / "rank0.json", rows), NAMES)
    assert [(call.name, call.seconds) for call in found] == [
        ("aten::addmm", pytest.approx(6e-6)),
        ("aten::bmm", pytest.approx(5e-6)),
    ]
    assert [work.flops for work in classify(found).gemms] == [2 * 4 * 2 * 8, 2 * 3 * 4 * 2 * 8]


def test_kernels_launched_after_a_nested_operator_belong_to_the_outer_one(tmp_path):
    (inner, *_) = operator("aten::mm", 103, [[4, 2], [2, 8]], 0)
    rows = operator("aten::bmm", 100, [[3, 4, 2], [3, 2, 8]], 5e-6)
    rows += [inner | {"dur": 1}, text.launch(106, 7)]
    rows += [text.kernel("second", 700, 4, correlation=7)]
    (call,) = calls(text.write(tmp_path / "rank0.json", rows), NAMES)
    assert (call.name, call.seconds) == ("aten::bmm", pytest.approx(9e-6))


def test_launches_on_threads_without_operators_are_looked_for_on_all(tmp_path):
    rows = operator("aten::mm", 100, [[4, 2], [2, 8]], 6e-6, tid=1)
    rows = [row | {"tid": 77} if row["cat"] == "cuda_runtime" else row for row in rows]
    assert len(calls(text.write(tmp_path / "rank0.json", rows), NAMES)) == 1


def call_of(name, *dims, kind=HALF, values=()):
    shapes = tuple(map(tuple, dims))
    return ShapedCall(name, shapes, (kind,) * len(shapes), tuple(values), 1e-3)


FLASH = "aten::_flash_attention_forward"
CAUSAL = [""] * 8 + ["True"]
SHAPE = (1, 64, 2, 8)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (call_of("aten::mm", [4, 2]), "no shapes"),
        (call_of("aten::mm", [4, 2], [2, 8], kind="float"), "GEMM of float"),
        (call_of("aten::mm", [4, 2], [3, 8]), "shapes that do not multiply"),
        (call_of("aten::mm", [0, 2], [2, 8]), "empty GEMM"),
        (call_of(FLASH, SHAPE), "no shapes"),
        (call_of(FLASH, SHAPE, SHAPE, kind="float", values=CAUSAL), "attention of float"),
        (call_of(FLASH, (64, 2, 8), (64, 2, 8)), "attention of packed sequences"),
        (
            call_of(FLASH, SHAPE, (1, 32, 2, 8), values=CAUSAL),
            "attention between sequences of different lengths",
        ),
        (
            call_of(FLASH, SHAPE, SHAPE),
            "attention that is not recorded as causal",
        ),
    ],
)
def test_unusable_calls_are_excluded_with_the_reason(call, why):
    assert (gemm if call.name == "aten::mm" else attention)(call) == why
    assert classify([call]).left_out == {why: 1}


def test_cudnn_has_its_heads_before_the_sequence():
    shape = (1, 2, 64, 8)
    found = attention(
        call_of(
            "aten::_scaled_dot_product_cudnn_attention",
            *[shape] * 3,
            values=[""] * 6 + ["True"],
        )
    )
    assert found == TimedAttention(False, 1, 64, 16, 1e-3)


def test_the_command_prints_curves_and_a_note_falls_where_both_are_measured(tmp_path):
    path = text.write(tmp_path / "rank0.json", [*products_of(0.4), *flash(0.4)])
    done = CliRunner().invoke(
        main, ["isp", *ASKED, "--cluster", "h100", "--calibrate", str(path)]
    )
    assert done.exit_code == 0, done.output
    assert "attention backward" in done.output
    assert "of curve" in done.output
    assert "are not measured" not in done.output
    said = ["isp", *ASKED, "--calibrate", str(path), "--json"]
    found = json.loads(CliRunner().invoke(main, said).output)
    assert {line["what"] for line in found["calibration_compute"]} >= {"GEMM"}
    assert any("no collective" in note for note in found["notes"])


def test_fitting_only_links_keeps_the_curves_with_a_note(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("op,ngpu,bytes,lat_s\nall_gather,8,1e6,1e-4\nall_gather,8,1e9,1e-2\n")
    found = calibrated(path, A800)
    assert "only links were fitted" in found.skipped[-1]
    assert replace(found.cluster, fits={}) == A800
    reduce = text.all_reduce(0, 50, nelems=1 << 20)
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]}]
    rows = [
        reduce,
        text.all_reduce(100, 900, nelems=1 << 26),
        text.mark("ProfilerStep#1", 0, 2000),
    ]
    run = text.write(tmp_path / "rank0.json", rows, world=4, groups=groups)
    found = calibrated(run, A800)
    assert found.residuals
    assert any("record_shapes" in words for words in found.skipped)


def test_gemms_faster_than_the_peak_are_excluded(tmp_path):
    rows = [*products_of(1.0), *operator("aten::mm", 9e6, [[4096, 4096], [4096, 4096]], 1e-6)]
    found = calibrated(text.write(tmp_path / "rank0.json", rows), A800)
    assert "1 calls left out: GEMM faster than the peak of A800-80GB" in found.skipped
    assert max(line.efficiency for line in found.compute) < 1.2


def test_fitting_only_gemms_keeps_the_attention_curve(tmp_path):
    path = text.write(
        tmp_path / "rank0.json",
        [*products_of(1.1), *operator("aten::mm", 9e6, [[4, 2], [2, 8]], 1e-6, "float")],
    )
    found = calibrated(path, load("h100"))
    assert found.cluster.note
    assert "attention not fully measured: the curve of the cluster is used" in found.skipped
    assert "1 calls left out: GEMM of float" in found.skipped
