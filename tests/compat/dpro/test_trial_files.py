"""Test the files of dPRO trials, and errors of damaged ones."""

import json
import shutil
from decimal import Decimal

import pytest
from builders import made_trials
from builders.replay_data import TRIAL, document, needed
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.compat.dpro import communication, job, rules, tensorflow, trial, uniform
from fastcomm.compat.dpro.job import Tree, read_topology
from fastcomm.compat.dpro.statistics import statistics
from fastcomm.compat.dpro.uniform import Event, of_events
from fastcomm.errors import TraceFileError


@pytest.fixture(scope="module")
def read():
    return trial.read(TRIAL)


@needed
def test_the_trial_becomes_the_reference_events(read):
    wanted = document("trial/expected/events.json.gz")
    rows = json.loads(uniform.to_bytes(rules.statistics(read.trace, read.topology).trace))
    assert rows["all_prefix"] == ["host0.rank0", "host0.rank1", "host1.rank0", "host1.rank1"]
    assert rows["traceEvents"] == wanted


@needed
def test_metadata_of_the_trial_is_read(read):
    summary = document("trial/expected/summary.json")
    edges = document("trial/expected/local_dfg_edges.json")
    assert sorted(map(list, read.graph.edges)) == sorted(edges)
    assert {str(k): v for k, v in read.parameters.bytes_of.items()} == summary["tensor_bytes"]
    assert read.counts == summary["nccl"]["id_counts"]
    assert read.topology.pid_of == {int(k): v for k, v in summary["nccl"]["rank2pid"].items()}
    for channel, ring in summary["nccl"]["ring"].items():
        for rank, each in ring.items():
            assert read.topology.ring[int(channel)][int(rank)] == each["next"]
    for host, shift in summary["alignment_us"].items():
        assert read.shifts[f"{host}.rank0"] == shift * 1000
    assert read.topology.tree[0][0] == Tree(up=None, down=(1,))


@needed
def test_a_uniform_trace_round_trips(read, tmp_path):
    path = tmp_path / "all.json.gz"
    path.write_bytes(uniform.compressed(uniform.to_bytes(read.trace)))
    again = trial.read_input(path).trace
    assert uniform.to_bytes(again) == uniform.to_bytes(read.trace)
    assert again.keys == read.trace.keys


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["FW.a", "BW.b", "UPDATE_CAL", "Comm.0+1.SEND", "I/O", "END"]),
            st.integers(0, 10**19 // 10**3),
            st.integers(0, 10**9),
            st.sampled_from([None, "0_1_2_3"]),
            st.sampled_from(["X", "i"]),
            st.sampled_from([None, 0, 7]),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_any_uniform_trace_round_trips_to_the_nanosecond(tmp_path_factory, rows):
    made = [
        Event(
            name=name,
            pid="p",
            start=start % 2**62,
            dur=dur,
            lane="l",
            cat="c",
            suffix=suffix,
            phase=phase,
            step=step,
        )
        for name, start, dur, suffix, phase, step in rows
    ]
    written = of_events(made)
    path = tmp_path_factory.mktemp("uniform") / "t.json"
    path.write_bytes(uniform.to_bytes(written))
    again = uniform.read(path)
    assert again.start.tolist() == written.start.tolist()
    assert uniform.to_bytes(again) == uniform.to_bytes(written)


def test_a_bare_list_is_a_trace_and_ids_make_the_suffix(tmp_path):
    ids = {"loopId": 0, "channelId": 1, "chunkId": 2, "sliceId": 3}
    path = tmp_path / "t.json"
    row = {"name": "Comm.0.SEND", "ts": 1, "dur": 2, "pid": "p", "tid": "t", "args": ids}
    path.write_text(json.dumps([row]))
    assert uniform.read(path).keys == ("p->Comm.0.SEND~>0_1_2_3",)


def test_microseconds_become_exact_nanoseconds():
    assert uniform.ns(Decimal("1600000000001000.123")) == 1600000000001000123
    assert uniform.ns(1.5) == 1500
    with pytest.raises(OverflowError, match="too large for a time"):
        uniform.ns(1e19)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no traceEvents"),
        ("[{]", "line 1"),
        ('[{"name": "FW.a"}]', "event 0: KeyError.*expected name, pid, ts and dur"),
        ('[{"name": "FW.a", "pid": "p", "ts": "x"}]', "event 0"),
        ('["FW.a"]', "event 0"),
        ("[]", "no events"),
    ],
)
def test_a_damaged_uniform_trace_is_explained(tmp_path, text, message):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceFileError, match=message):
        trial.read_input(path)


def test_an_absent_file_and_a_folder_without_ranks_are_errors(tmp_path):
    with pytest.raises(TraceFileError, match="no such file"):
        trial.read_input(tmp_path / "none")
    with pytest.raises(TraceFileError, match=r"no <host>/<gpu>/trace\.json\.gz"):
        trial.read_input(tmp_path)


@pytest.mark.parametrize(
    ("raw", "label"),
    [
        ("FW.done", "FW.done"),
        ("^x/y", "FW.x/y"),
        ("x/_3", "FW.x"),
        ("BytePSPushPull_3_4", "Comm.3+4"),
        ("input_barrier/x", "FW.input_barrier/x"),
        ("H/HorovodAllreduce.12_0", "Comm.12"),
        ("H/HorovodAllreduce.12_Switch", "BW.12_Switch"),
        ("H/cond_allreduce", "BW.H/cond_allreduce"),
        ("gradients/x", "BW.gradients/x"),
        ("gradient_tape/x/ShapeN", "FW.gradient_tape/x/ShapeN"),
        ("gradient_tape/LayoutOptimizer", "FW.gradient_tape/LayoutOptimizer"),
        ("a.b", "FW.a_b"),
    ],
)
def test_tensorflow_names_become_standard_names(raw, label):
    assert tensorflow.relabel(raw) == label


def test_operations_after_backward_are_updates(tmp_path):
    path = tmp_path / "dag.gml"
    chain = ["a", "gradients/b", "c", "HorovodAllreduce.0", "Assign_d", "alone"]
    inner = 'graphics [ id 9 label "x" w 1 ]'
    nodes = "".join(f'node [ id {i} label "{n}" {inner} ]' for i, n in enumerate(chain))
    edges = "".join(f"edge [ source {i} target {i + 1} ]" for i in range(4))
    path.write_text(f"graph [ directed 1 {nodes} {edges} ]")
    graph = tensorflow.graph_of(path)
    assert graph.nodes == ("FW.a", "BW.gradients/b", "BW.c", "Comm.0", "UPDATE_.Assign_d")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("graph [ ]", "no node"),
        ("graph [ node [ id 0 ] edge [ source 0 target 9 ] ]", "names node 9"),
    ],
)
def test_a_damaged_graph_is_explained(tmp_path, text, message):
    path = tmp_path / "dag.gml"
    path.write_text(text)
    with pytest.raises(TraceFileError, match=message):
        job.read_graph(path)


def timeline(tmp_path, rows, tail="]"):
    path = tmp_path / "comm.json"
    path.write_text("[" + ",".join(map(json.dumps, rows)) + tail)
    return communication.timeline(path, "host0.rank0", (0, 10**9), {"w:0": 7})


def begin(name, ts, pid=1):
    return {"ph": "B", "name": name, "ts": ts, "pid": pid}


def end(ts, pid=1):
    return {"ph": "E", "ts": ts, "pid": pid}


def process(name, pid=1):
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


@pytest.mark.parametrize("tail", ["]", "", ","])
def test_a_timeline_without_its_end_is_read(tmp_path, tail):
    rows = [process("Sync"), begin("3", 1), end(5)]
    found, last = timeline(tmp_path, rows, tail)
    assert [(e.name, e.start, e.dur) for e in found] == [("Comm.3.Sync", 1000, 4000)]
    assert last == 5000


def test_syncs_of_one_start_are_one_and_names_of_tensors_are_ids(tmp_path):
    rows = [
        process("Sync"),
        process("Horovod.5_x", 2),
        begin("none", 0),
        end(1),
        end(1),
        begin("w:0", 2),
        begin("p.11", 2),
        end(4),
        end(6),
        begin("QUEUE", 7, 2),
        begin("WHAT", 8, 2),
        end(9, 2),
        end(10, 2),
        begin("3", 2_000_000),
    ]
    found, last = timeline(tmp_path, rows)
    assert [e.name for e in found] == ["Comm.7+11.Sync", "Comm.5.QUEUE"]
    assert last == 6000


def test_a_timeline_of_another_tool_is_an_error(tmp_path):
    with pytest.raises(TraceFileError, match="expected Sync or <Horovod"):
        timeline(tmp_path, [process("else"), begin("QUEUE", 1)])
    with pytest.raises(TraceFileError, match=r"comm\.json: "):
        timeline(tmp_path, [], "{")


def test_rings_that_disagree_and_bad_trees_are_errors(tmp_path):
    def topology(**said):
        files = {}
        for pid, content in said.items():
            files[pid] = tmp_path / f"{pid}.json"
            files[pid].write_text(json.dumps(content))
        return read_topology(files)

    ring = "1[a] -> 0[b] [receive],0[b] -> 1[a] [send]"
    other = "0[b] -> 1[a] [receive],1[a] -> 2[c] [send]"
    with pytest.raises(TraceFileError, match="rank 1 sends to 2, and to 0"):
        topology(a={"RealRing": {"0": ring}}, b={"RealRing": {"0": other}})
    with pytest.raises(TraceFileError, match="rank 0 is also the rank of a"):
        topology(a={"RealRing": {"0": ring}}, b={"RealRing": {"0": ring}})
    with pytest.raises(TraceFileError, match="no RealRing"):
        topology(a={})
    with pytest.raises(TraceFileError, match="has no hop"):
        topology(a={"RealRing": {}})
    for odd in ("what", 3):
        with pytest.raises(TraceFileError, match="expected 3"):
            topology(a={"RealRing": {"0": odd}})
    with pytest.raises(TraceFileError, match=r"a\.json: "):
        topology(a={"RealRing": {"x": ring}})
    tree = "[12] 1/-1/-1->0->-1|-1->0->2/-1/-1"
    with pytest.raises(TraceFileError, match="halves of tree 12 disagree"):
        topology(a={"RealRing": {"0": ring}, "Tree": {"-1": tree}})


@needed
@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("host0/0/dag.gml", r"no dag\.gml, and none in any other rank"),
        ("host0/1/nccl_rank_graph.json", None),
        ("host1/0/comm.json", None),
        ("host0/0/metadata.json", None),
        ("host0/0/gradient_name_list.json", None),
    ],
)
def test_a_missing_file_is_an_error_or_omits_its_data(tmp_path, victim, message):
    folder = shutil.copytree(TRIAL, tmp_path / "trial", copy_function=shutil.copyfile)
    for each in (folder, *folder.rglob("*/")):
        each.chmod(0o755)
    (folder / victim).unlink()
    if message:
        with pytest.raises(TraceFileError, match=message):
            trial.read(folder)
        return
    found = trial.read(folder)
    assert len(statistics(found.trace, found.topology).names) > 300
    assert bool(found.warnings) == (victim == "host1/0/comm.json")


@needed
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("comm.json", [{"ph": "M", "name": "process_name", "args": {"name": "Sync"}}]),
        ("comm.json", [3]),
        ("comm_detail.json", [{"name": "Comm.0.SEND", "ts": None}]),
        ("comm_detail.json", [{"name": "Comm.0.SEND"}]),
        ("io.json", [{"ts": "now", "dur": 3}]),
        ("trace.json.gz", {"traceEvents": [7]}),
        ("trace.json.gz", {"traceEvents": []}),
        ("nccl_rank_graph.json", {"RealRing": 3}),
    ],
)
def test_an_invalid_event_is_an_error_with_its_path(tmp_path, name, content):
    folder = shutil.copytree(TRIAL, tmp_path / "trial", copy_function=shutil.copyfile)
    for each in (folder, *folder.rglob("*/")):
        each.chmod(0o755)
    (folder / "host0" / "1" / name).write_text(json.dumps(content))
    with pytest.raises(TraceFileError, match=name):
        trial.read(folder)


@pytest.mark.parametrize("group", [1 << 70, -(1 << 63), str(10**30), "one"])
def test_an_impossible_number_of_a_step_is_an_error_with_its_path(tmp_path, group):
    made_trials.tensorflow1(tmp_path / "trial")
    path = tmp_path / "trial" / "host1" / "0" / "temp.json"
    document = json.loads(path.read_text())
    for row in document["traceEvents"]:
        row["args"]["group_id"] = group
    path.write_text(json.dumps(document))
    with pytest.raises(TraceFileError, match=str(path)):
        trial.read(tmp_path / "trial")
