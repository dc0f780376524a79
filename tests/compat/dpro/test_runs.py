"""Test the conversion of runs to uniform traces."""

import json

import pytest
from builders import kineto_text as k
from builders.opened import open_run
from click.testing import CliRunner

import fastcomm
from fastcomm.cli.main import main
from fastcomm.compat.dpro import rules, trial, uniform
from fastcomm.compat.dpro.statistics import statistics
from fastcomm.options import Window
from fastcomm.synthetic import pipeline
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

US = 1000
WHOLE = Window(annotation="")
GROUPS = [{"pg_name": "0", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1]}]
PAIR = {
    "Process_Group_Name": "0",
    "Process_Group_Ranks": "[0, 1]",
    "Process_Group_Description": "TENSOR_MODEL_PARALLEL_GROUP",
    "Group_size": 2,
}


def op(name, ts, dur, tid=1):
    return k.event(name, "cpu_op", ts, dur, pid=100, tid=tid)


def rank_events(compute, stop=120):
    """A step: a product, an all-reduce that ends at `stop`, its mirror, and an update."""
    engine = "autograd::engine::evaluate_function: MmBackward0"
    return [
        k.mark("ProfilerStep#3", 0, 400),
        op("aten::mm", 1, 4),
        k.launch(2, 1),
        k.launch(6, 2),
        op(engine, 8, 4, tid=2),
        k.launch(9, 3, tid=2),
        k.mark("Optimizer.step#SGD.step", 14, 5),
        op("aten::add_", 15, 3),
        k.launch(16, 4),
        k.kernel("gemm", 10, compute, device=0, correlation=1),
        k.all_reduce(
            10 + compute, stop - 10 - compute, 20, device=0, correlation=2, Seq=4, **PAIR
        ),
        k.kernel("gemm_back", 10 + compute, 30, device=0, correlation=3),
        k.kernel("sgd", 50 + compute, 7, device=0, correlation=4),
        k.kernel("late", 500, 7, device=0),
    ]


def opened(folder, *ranks):
    for rank, events in enumerate(ranks):
        path = folder / f"rank{rank}.json"
        k.write(path, events, rank=rank, world=len(ranks), groups=GROUPS)
    return open_run(folder)


def test_operations_are_named_after_launcher_and_pass(tmp_path):
    found = trial.converted(opened(tmp_path, rank_events(60), rank_events(100)))
    engine = "autograd::engine::evaluate_function: MmBackward0"
    names = ["FW.aten::mm", "Comm.TP-0-0.AllReduce", f"BW.{engine}", "UPDATE_.aten::add_"]
    wanted = {f"host0.rank{rank}->{name}" for rank in (0, 1) for name in names}
    assert set(found.trace.keys) == wanted
    assert found.left_out == 2
    assert "2 operations are in no iteration and are left out" in found.warnings
    rows = statistics(found.trace)
    about = dict(
        zip(rows.names, zip(rows.category, rows.total.tolist(), strict=True), strict=True)
    )
    assert about["host0.rank1->FW.aten::mm"] == ("operator.FW", 100 * US)
    assert about["host0.rank0->Comm.TP-0-0.AllReduce"] == ("Comm.AllReduce", 50 * US)
    assert about["host0.rank0->UPDATE_.aten::add_"] == ("operator.UPDATE", 7 * US)


def test_autograd_threads_belong_to_the_backward_pass(tmp_path):
    events = [
        op("autograd::engine::evaluate_function: A", 1, 2, tid=2),
        op("aten::mm", 5, 4, tid=2),
        k.launch(6, 1, tid=2),
        op("aten::mm", 1, 4),
        k.launch(2, 2),
        k.kernel("one.kernel()", 10, 5, device=0, correlation=1),
        k.kernel("two", 20, 5, device=0, correlation=2),
        k.mark("ProfilerStep#1", 0, 50),
        k.mark("forward and backward", 0, 50),
    ]
    found = trial.converted(opened(tmp_path, events))
    assert found.trace.names == ("BW.aten::mm", "FW.aten::mm")


def test_passes_of_kernels_are_those_of_the_names(tmp_path):
    run = opened(tmp_path, rank_events(60), rank_events(100))
    measured = statistics(trial.converted(run).trace)
    prefixes = {
        "FW.": "forward",
        "BW.": "backward",
        "UPDATE_": "update",
        "Comm.": "communication",
    }
    expected = {}
    for name, total in zip(measured.names, measured.total.tolist(), strict=True):
        operation = name.partition("->")[2]
        key = next(value for prefix, value in prefixes.items() if operation.startswith(prefix))
        expected[key] = expected.get(key, 0) + total
    rows = fastcomm.open(tmp_path).kernels(by="pass").to_arrow().to_pylist()
    assert {row["name"]: row["total_ns"] for row in rows} == expected
    assert len(expected) == 4


def test_work_without_a_launch_belongs_to_the_pass_that_its_name_tells(tmp_path):
    names = ("forward-compute", "backward-compute", "optimizer", "gc")
    events = [k.kernel(name, 10 * n + 1, 5, device=0) for n, name in enumerate(names)]
    events.append(k.mark("ProfilerStep#1", 0, 50))
    found = trial.converted(opened(tmp_path, events))
    assert set(found.trace.names) == {
        "FW.forward-compute",
        "BW.backward-compute",
        "UPDATE_.optimizer",
        "FW.gc",
    }


def test_without_device_work_outermost_operators_are_operations(tmp_path):
    events = [
        k.mark("ProfilerStep#1", 0, 50),
        op("outer", 1, 10),
        op("inner", 2, 3),
        op("inner", 12, 3),
    ]
    trace = trial.converted(opened(tmp_path, events)).trace
    assert trace.names == ("FW.outer", "FW.inner")
    assert trace.dur.tolist() == [10 * US, 3 * US]


def test_a_converted_run_has_equal_statistics(tmp_path):
    (tmp_path / "run").mkdir()
    opened(tmp_path / "run", rank_events(60), rank_events(100))
    out = tmp_path / "all.json.gz"
    words = ["convert", str(tmp_path / "run"), str(out)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert "8 events of 2 ranks (uniform)" in done.stdout
    assert "left out" in done.stderr
    direct = trial.converted(open_run(tmp_path / "run"))
    wanted = rules.operations(statistics(direct.trace))
    for whole in (True, False):
        read = trial.read_input(out, whole=whole)
        assert rules.operations(statistics(read.trace)) == wanted
    rows = json.loads(uniform.to_bytes(direct.trace))["traceEvents"]
    assert [row["args"]["seq"] for row in rows if row["cat"] == "Comm"] == [4, 4]
    single = trial.converted(open_run(tmp_path / "run" / "rank0.json"))
    assert single.trace.pids == ("host0.rank0",)


def test_the_sums_of_passes_have_the_planted_straggler(tmp_path):
    job = Job.of(ranks=8, steps=2, layers=2)
    write(job, tmp_path / "job")
    run = open_run(tmp_path / "job")
    rows = statistics(trial.converted(run).trace)
    sums = {}
    for name, category, total in zip(
        rows.names, rows.category, rows.total.tolist(), strict=True
    ):
        if category in {"operator.FW", "operator.BW"}:
            key = name.partition("->")[0], category
            sums[key] = sums.get(key, 0) + total
    for direction, category in (("forward", "operator.FW"), ("backward", "operator.BW")):
        slow, peer = (sums[f"host0.rank{r}", category] for r in (job.straggler, 4))
        planted = pipeline.slack(job, direction) * job.micro_batches * job.steps
        assert slow - peer == pytest.approx(planted, rel=0.1)
