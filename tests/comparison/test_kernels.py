"""Test kernels against other tools and real traces, and between two runs."""

import csv
import gzip
import json
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.kernel_events import rank_events, totals, write_run
from builders.places import RECORDED
from builders.shared_data import needs, path_of

import fastcomm
from fastcomm.comparison.kernel_changes import kernel_changes
from fastcomm.device_work.result import Kernels
from fastcomm.device_work.totals import WorkQuestion, WorkTotals, merge
from fastcomm.errors import FastcommError
from fastcomm.trace import schema
from fastcomm.trace.run_traces import ReadRanks

HOST_RUN = RECORDED / "gloo_2x2"
KINETO = path_of("kineto")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("kernels"))


def test_a_host_run_has_operators_and_communication():
    found = fastcomm.open(HOST_RUN).kernels()
    assert found.is_host_run
    assert found.by_category.keys() == {"communication", "host"}
    names = totals(found)
    assert "gloo:all_reduce" in names
    assert "aten::linear" in names
    assert "A run without a device" in invoke("kernels", HOST_RUN, "-q").stdout


@needs("kineto")
def test_kernels_by_operator_agree_with_tracelens():
    with (KINETO / "h100_qwen" / "tracelens_kernels.csv").open() as file:
        expected = Counter()
        for row in csv.DictReader(file):
            expected[row["parent_operator"]] += float(row["us_sum"])
    found = totals(fastcomm.open(KINETO / "h100_qwen").kernels(by="operator"))
    # TraceLens also counts work outside of the step, which these operators do not have.
    for name in ("aten::mul", "aten::_flash_attention_forward"):
        assert found[name] / 1000 == pytest.approx(expected[name])


@needs("nsys")
def test_kernels_of_a_whole_trace_are_those_of_nsys(tmp_path):
    folder = path_of("nsys")
    report = tmp_path / "report.sqlite"
    report.write_bytes(gzip.decompress((folder / "mfu_2gpu.sqlite.gz").read_bytes()))
    run = fastcomm.open(report)
    whole = pa.table({"number": [0], "start": [-(2**61)], "stop": [2**61]}, schema.ITERATIONS)
    traces = [
        replace(run.read(rank), device_iterations=None, iterations=whole) for rank in run.ranks
    ]
    question = WorkQuestion(by=("name",), full_names=True)
    totals = merge([WorkTotals.of(trace, question) for trace in traces])
    kernels = Kernels(by="name", totals=totals, read=ReadRanks(ranks=run.ranks, expected=2))
    found = {row["name"]: row for row in kernels.to_arrow().to_pylist()}
    columns = {"Instances": "count", "Total Time (ns)": "total_ns", "Avg (ns)": "mean_ns"}
    columns |= {"Med (ns)": "median_ns", "Min (ns)": "min_ns", "Max (ns)": "max_ns"}
    text = (folder / "mfu_2gpu_oracle" / "cuda_gpu_kern_sum.csv.gz").read_bytes()
    rows = list(csv.DictReader(gzip.decompress(text).decode().strip().splitlines()))
    assert len(rows) == 27
    for row in rows:
        expected = {ours: float(row[theirs]) for theirs, ours in columns.items()}
        own = {name: found[row["Name"]][name] for name in expected}
        assert own == pytest.approx(expected, rel=5e-4)


@needs("kineto")
def test_the_slower_step_of_trace_diff_is_explained():
    before, after = (
        fastcomm.open(KINETO / "trace_diff" / f"{name}.json.gz") for name in ("control", "test")
    )
    keys = ("name", "operator", "annotation")
    changes = kernel_changes([(before.kernels(by=key), after.kernels(by=key)) for key in keys])
    new = {one.name: one.effect_ns for one in changes["operator"] if one.state == "new"}
    assert new["CompiledFunctionBackward"] > 25e6
    assert new["CompiledFunction"] > 15e6
    effects = [sum(one.effect_ns for one in own) for own in changes.values()]
    assert effects == pytest.approx([effects[0]] * 3)
    sizes = [abs(one.effect_ns) for one in changes["annotation"]]
    assert sizes == sorted(sizes, reverse=True)


def test_compare_lists_changed_new_and_vanished_kernels(run, tmp_path):
    (tmp_path / "after").mkdir()
    for rank in range(3):
        events = [e for e in rank_events(slow=4) if "gemm<2" not in e["name"]]
        events.append(k.kernel("fill", 50, 3))
        k.write(tmp_path / "after" / f"rank{rank}.json", events, rank=rank, world=3)
    words = ("compare", run / "traces", tmp_path / "after", "-q")
    document = json.loads(invoke(*words, "--json").stdout)
    rows = {row["name"]: row for row in document["kernels"]["name"]}
    assert rows["fill"]["state"] == "new"
    assert rows["fill"]["effect_ns"] == 3000
    assert rows["gemm<…>"]["effect_ns"] == -5000
    assert (rows["gemm<…>"]["before_count"], rows["gemm<…>"]["after_count"]) == (2, 1)
    full = rows["gemm_wgrad"]
    assert full["effect_ns"] == pytest.approx(14000 - 32000 / 3)
    text = invoke(*words).stdout
    assert "new kernels: fill (+3.00 us)" in text
    without = json.loads(invoke(*words, "--json", "--no-kernels").stdout)
    assert without["kernels"] is None


def test_work_outside_of_annotations_is_neither_new_nor_vanished(tmp_path):
    k.write(tmp_path / "rank0.json", rank_events())
    before = fastcomm.open(tmp_path).kernels(by="annotation")
    k.write(tmp_path / "rank0.json", [*rank_events(), k.kernel("fill", 50, 3)])
    after = fastcomm.open(tmp_path).kernels(by="annotation")
    for pair, effect in (((before, after), 3000), ((after, before), -3000)):
        (change,) = (
            one for one in kernel_changes([pair])["annotation"] if one.name == "(no annotation)"
        )
        assert (change.state, change.effect_ns) == ("changed", effect)


def test_compare_of_saved_metrics_says_that_kernels_are_not_compared(run, tmp_path):
    invoke("metrics", run / "traces", "-q", "--output", tmp_path / "saved")
    (tmp_path / "after").mkdir()
    for rank in range(3):
        k.write(
            tmp_path / "after" / f"rank{rank}.json", rank_events(slow=4), rank=rank, world=3
        )
    text = invoke("compare", tmp_path / "saved", tmp_path / "after", "-q").stdout
    assert "kernels are not compared: BEFORE has saved metrics alone" in text.replace("\n", " ")


def test_compare_takes_pairs_of_kernels_with_equal_keys(run):
    traces = fastcomm.open(run / "traces")
    kernels = traces.kernels()
    same = fastcomm.compare(traces.metrics(), traces.metrics(), kernels=[(kernels, kernels)])
    assert {one.effect_ns for one in same.kernels["name"]} == {0}
    assert same.to_arrow()["kernels"].num_rows == 3
    with pytest.raises(FastcommError, match="by name before, and by stream after"):
        kernel_changes([(kernels, traces.kernels(by="stream"))])
