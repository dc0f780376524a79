"""Test runs as operations: conversion to the uniform trace, and replay."""

import json
from dataclasses import replace

import networkx
import numpy as np
import pytest
from builders import kineto_text as k
from builders.examples import fewer
from builders.opened import open_run
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.cli.main import main
from fastcomm.compat import dpro
from fastcomm.critical_path.search import joined
from fastcomm.critical_path.what_if import Replay
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.formats.dpro import trial, uniform
from fastcomm.formats.dpro.statistics import statistics
from fastcomm.graph.edits import plan
from fastcomm.options import EditOptions, Window
from fastcomm.replay import predictions, result, run_graph
from fastcomm.replay.analysis import session_of, step_of
from fastcomm.replay.options import ScenarioOptions
from fastcomm.synthetic import pipeline
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
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
    direct = trial.of_run(open_run(tmp_path / "run"))
    wanted = dpro.operations(statistics(direct.trace))
    for whole in (True, False):
        read = trial.read_input(out, whole=whole)
        assert dpro.operations(statistics(read.trace)) == wanted
    rows = json.loads(uniform.to_bytes(direct.trace))["traceEvents"]
    assert [row["args"]["seq"] for row in rows if row["cat"] == "Comm"] == [4, 4]
    single = trial.of_run(open_run(tmp_path / "run" / "rank0.json"))
    assert single.trace.pids == ("host0.rank0",)


def test_a_replay_is_the_measured_step_and_an_earlier_rank_waits_for_the_last(tmp_path):
    found = session_of(step_of(opened(tmp_path, rank_events(60), rank_events(100)), WHOLE))
    assert found.error == 0
    assert found.measured.time_ns == 506 * US  # from the first operator on
    step = step_of(opened(tmp_path, rank_events(60), rank_events(100)), WHOLE)
    made = found.replayed.replayer
    faster = edited(step, scale=["name:gemm+rank:1=0.5"])
    ends = {
        each: end
        for node, end in zip(made.graph.nodes, faster.end.tolist(), strict=True)
        for each in [node]
    }
    # Rank 1 comes 50 us earlier, and rank 0 after 70: there the transfer of 10 begins.
    last = [node for node in ends if "AllReduce" in node]
    assert sorted({ends[node] for node in last})[-1] == 79 * US
    slower = edited(step, scale=["rank:0=1.1"])
    assert slower.mean_ns > found.replayed.mean_ns


def edited(step, **options):
    return session_of(step, ScenarioOptions(**options)).changed


def test_a_run_replays_with_edits_as_a_what_if_does(tmp_path):
    for rank, compute in enumerate((30, 60)):
        k.write(tmp_path / f"rank{rank}.json", rank_events(compute), rank=rank, world=2)
    run = fastcomm.open(tmp_path)
    session = run.replay(annotation="", scale=["compute=0.5"])
    step = step_of(open_run(tmp_path), WHOLE)
    assert session.changed.by_pid() == edited(step, scale=["compute=0.5"]).by_pid()
    assert [str(edit) for edit in session.edits] == ["scale compute=0.5"]
    assert run.replay(annotation="").changed is None
    assert run.replay(annotation="").removed is None
    removed = run.replay(annotation="", bottleneck=True).removed
    assert max(each.saved_ns for each in removed) == removed[0].saved_ns > 0
    with pytest.raises(ConfigError, match="there is no 'nothing'"):
        run.replay(annotation="", remove=["nothing"])
    with pytest.raises(ConfigError, match="FROM:TO:STEP"):
        run.replay(annotation="", scale=["compute=0:1:0.5"])


def test_the_path_takes_a_dependency_over_the_wait_for_a_stream(tmp_path):
    # Where ranks wait for each other, the path goes on at the rank that was awaited.
    write(Job.of(steps=2, layers=2), tmp_path)
    found = session_of(step_of(open_run(tmp_path), Window()))
    # The step ends 0.7 ms after its last event.
    assert sum(found.path.wait[:-2]) < 0.02 * found.path.length_ns


def test_edits_can_select_links_ranks_and_streams(tmp_path):
    step = step_of(opened(tmp_path, rank_events(60), rank_events(100)), WHOLE)
    found = session_of(step)
    made = found.replayed.replayer
    assert "host0.rank0->stream 7 of 0" in made.devices
    for target in ("comm", "host", "compute", "op:all_reduce", "link:TP", "link:0-1", "rank:0"):
        changed = edited(step, scale=[f"{target}=0.5"]).replayer
        assert changed.graph.nodes == made.graph.nodes
        assert (changed.measured.avg < made.measured.avg).any(), target
        assert not (changed.measured.avg > made.measured.avg).any(), target
    removed = predictions.bottlenecks(found.replayed, found.path, by_name=True)
    assert len({each.node for each in removed}) == len(removed)
    assert all("~>" not in each.node for each in removed)


def test_the_graph_is_the_same_for_networkx_and_as_graphml(tmp_path):
    found = session_of(step_of(opened(tmp_path, rank_events(60), rank_events(100)), WHOLE))
    graph = result.to_networkx(found.replayed)
    assert networkx.is_directed_acyclic_graph(graph)
    assert graph.number_of_nodes() == len(found.replayed.duration)
    node = graph.nodes["host0.rank1->FW.aten::mm~>0"]
    assert (node["avg"], node["device"]) == (0.1, "host0.rank1->stream 7 of 0")
    again = networkx.parse_graphml(result.graphml(found.replayed))
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert list(again.edges(data=True)) == list(graph.edges(data=True))


def test_of_ranks_without_a_shared_group_the_first_is_replayed_with_a_note(tmp_path):
    alone = [row for row in rank_events(60) if "nccl" not in row["name"]]
    run = opened(tmp_path, alone, alone)
    found = session_of(step_of(run, WHOLE))
    assert found.read.ranks == (0,)
    assert found.notes[0].startswith("this is the step of rank 0 alone: ranks cannot be joined")
    assert found.to_dict()["notes"] == list(found.notes)
    assert session_of(step_of(run.only([1]), WHOLE)).error == 0


def test_an_empty_window_is_an_error(tmp_path):
    run = opened(tmp_path, [k.mark("ProfilerStep#1", 0, 50), k.mark("nothing", 60, 5)])
    with pytest.raises(FastcommError, match="holds no work"):
        session_of(step_of(run, Window(annotation="nothing")))


@st.composite
def jobs(draw):
    """Two ranks with the same collectives, and kernels of any length between."""
    count = draw(st.integers(1, 4))
    ranks = []
    lengths = st.integers(1, 40)
    starts, stops = [[0] * count for _ in range(2)], []
    plans = [[draw(lengths) for _ in range(count)] for _ in range(2)]
    now = [20, 20]
    for c in range(count):
        for r in range(2):
            now[r] += plans[r][c]
            starts[r][c] = now[r]
        stop = max(now) + draw(lengths)
        stops.append(stop)
        now = [stop + draw(st.integers(0, 3)) for _ in range(2)]
    for r in range(2):
        events = []
        for c in range(count):
            begin = starts[r][c] - plans[r][c]
            events += [
                op(f"aten::op{c}", 1 + 8 * c % 16, 3),
                k.launch(2 + 4 * c, 2 * c),
                k.launch(4 + 4 * c, 2 * c + 1),
                k.kernel(f"gemm{c}", begin, plans[r][c], device=0, correlation=2 * c),
                k.all_reduce(
                    starts[r][c],
                    stops[c] - starts[r][c],
                    7,
                    device=0,
                    correlation=2 * c + 1,
                    Seq=c,
                    **PAIR,
                ),
            ]
        ranks.append(events)
    return ranks


@fewer(2)
@given(jobs(), st.integers(0, 3), st.sampled_from((0.0, 0.5, 2.0)))
def test_any_step_replays_as_measured_and_changes_as_the_critical_path_s_graph_does(
    tmp_path_factory, ranks, which, ratio
):
    run = opened(tmp_path_factory.mktemp("run"), *ranks)
    run_step = step_of(run, WHOLE)
    step, found = run_step.constraints, session_of(run_step)
    asked = run_graph.operations(step)
    assert found.replayed.start.tolist() == asked.begin.tolist()
    made = found.replayed.replayer
    which %= len(ranks[0]) // 5
    own = np.array([f"op{which}" in name.standard for name in made.names])
    own |= np.array([name.standard == f"FW.gemm{which}" for name in made.names])
    other = Replay(joined({rank: run.read(rank, "all") for rank in run.ranks}, WHOLE))
    text = f"name:/^(gemm|aten::op){which}$/={ratio}"
    options = EditOptions(scale=[text])
    kernels = np.array([name.op_cat == "FW" for name in made.names])
    rows = kernels & (made.measured.avg > 0)
    names = other.events["name"].to_pylist()
    scaled = {
        i for i in np.flatnonzero(rows).tolist() if _event(step, asked, i) == f"gemm{which}"
    }
    scaled |= {i for i in range(len(own)) if _event(step, asked, i) == f"aten::op{which}"}
    duration = made.measured.avg.copy()
    for i in scaled:
        duration[i] = np.rint(duration[i] * ratio)
    assert f"gemm{which}" in names
    assert made.run(duration).end.max() == other.span(plan(options).edits)
    assert edited(run_step, scale=[text]).end.max() == other.span(plan(options).edits)


def _event(step, asked, i):
    rank = int(asked.rank[i])
    row = int(asked.event[i] - step.first[rank])
    return step.traces[rank].events["name"][row].as_py()


def test_the_cost_of_the_planted_straggler_is_found(tmp_path):
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
    step = step_of(run)
    found = session_of(step)
    assert abs(found.error) < 1e-9
    gains = {
        rank: found.replayed.mean_ns - edited(step, scale=[f"rank:{rank}=0.95"]).mean_ns
        for rank in range(job.ranks)
    }
    assert max(gains, key=gains.__getitem__) == job.straggler
    healed = edited(step, heal=[f"rank:{job.straggler}"])
    write(replace(job, straggler=None), tmp_path / "healthy")
    truth = session_of(step_of(open_run(tmp_path / "healthy"))).replayed.mean_ns
    assert healed.mean_ns == pytest.approx(truth, rel=2e-3)


def test_every_format_of_the_made_up_job_is_replayed_as_measured(tmp_path):
    job = Job.of(ranks=2, steps=2, layers=2)
    write(job, tmp_path / "kineto")
    write_nsys(job, tmp_path / "nsys")
    done = CliRunner().invoke(
        main, ["ingest", str(tmp_path / "kineto"), "--output", str(tmp_path / "store")]
    )
    assert done.exit_code == 0, done.output
    found = {}
    for form in ("kineto", "nsys", "store"):
        trace = tmp_path / f"{form}.json"
        words = ["replay", str(tmp_path / form), "--json", "--trace", str(trace)]
        said = CliRunner().invoke(main, words)
        assert said.exit_code == 0, said.output
        found[form] = json.loads(said.stdout)
        assert abs(found[form]["error"]) < 1e-9
        assert any(row["ph"] == "X" for row in json.loads(trace.read_text())["traceEvents"])
    assert found["store"] == found["kineto"]
    assert found["nsys"]["measured_ns"] == pytest.approx(
        found["kineto"]["measured_ns"], rel=1e-3
    )


def test_a_run_is_replayed_by_the_command(tmp_path):
    opened(tmp_path, rank_events(60), rank_events(100))
    shown = CliRunner().invoke(
        main,
        ["replay", str(tmp_path), "--annotation", "", "--bottleneck"],
        catch_exceptions=False,
    )
    assert "replayed 506.0 us, measured 506.0 us, error +0.00 %" in shown.stdout


def test_a_wait_on_the_critical_path_is_named_as_one(tmp_path):
    found = session_of(step_of(opened(tmp_path, rank_events(60), rank_events(100)), WHOLE))
    times = found.path_times()
    assert sum(ns for _, ns in times) == pytest.approx(found.path.length_ns)
    duration = dict(
        zip(found.replayed.replayer.graph.nodes, found.replayed.duration.tolist(), strict=True)
    )
    for name, ns in times:
        if not name.startswith("wait after "):
            assert ns <= duration[name]
    assert any(name.startswith("wait after ") for name, _ in times)
