"""Test trials of MXNet and TensorFlow 1, and their tensors."""

import json
import random

import pytest
from builders import made_trials as made
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from oracles import trials as oracle

from fastcomm.cli.main import main
from fastcomm.compat.dpro import job, mxnet, tensorflow, trial, uniform
from fastcomm.compat.dpro.job import Parameter, ParameterDict, parse_parameters
from fastcomm.compat.dpro.result import session
from fastcomm.compat.dpro.statistics import statistics, step_time
from fastcomm.compat.dpro.uniform import Event
from fastcomm.errors import FastcommError, TraceFileError


def operators(read, pid):
    """Name, start and duration in us of the operators of a rank, in time order."""
    trace = read.trace
    return [
        [trace.names[key], start / 1000, dur / 1000]
        for key, start, dur, lane in zip(
            trace.key.tolist(),
            trace.start.tolist(),
            trace.dur.tolist(),
            trace.lane.tolist(),
            strict=True,
        )
        if trace.key_pid[key] == pid and trace.lanes[lane].startswith("operator")
    ]


@pytest.mark.parametrize("pairs", [True, False])
def test_mxnet_operations_equal_the_generated_ones(tmp_path, pairs):
    wanted = made.mxnet(tmp_path, pairs=pairs)
    found = trial.read(tmp_path)
    for pid, rank in wanted.items():
        assert operators(found, pid) == rank.events
    steps = step_time(found.trace)
    # Not the begin of a fourth.
    assert [len(each.time) for each in steps.ranks.values()] == [3, 3]


def test_communication_of_mxnet_counts_within_its_updates_and_inputs_after_its_begin(tmp_path):
    made.mxnet(tmp_path)
    found = trial.read(tmp_path)
    by_name = dict(zip(found.trace.keys, range(99), strict=False))
    inputs = found.trace.start[found.trace.key == by_name["host0.rank0->I/O"]]
    assert inputs.tolist() == [1_400_000]
    assert "host1.rank0->Comm.2.SEND~>0_0_1_0" in by_name
    assert found.counts["Comm.2"]["chunkNum"] == 2


def test_the_graph_of_a_symbol_is_that_of_its_operations(tmp_path):
    made.mxnet(tmp_path)
    graph = trial.read(tmp_path).graph
    comm = {("BW.fc1", "Comm.0"), ("BW.fc1", "Comm.1"), ("BW.fc2", "Comm.2")}
    late = {(f"Comm.{t}", "UPDATE_CAL") for t in range(3)}
    updates = {("UPDATE_CAL", f"UPDATE_{i}") for i in range(3)}
    ends = {(f"UPDATE_{i}", "END") for i in range(3)}
    assert set(graph.edges) == made.LOCAL | comm | late | updates | ends


def test_a_drawn_graph_of_mxnet_is_the_same_graph_and_its_placeholder_is_dropped(tmp_path):
    made.mxnet(tmp_path)
    wanted = set(trial.read(tmp_path).graph.edges)
    edges = [(a, b) for a, b in wanted if not b.startswith(("UPDATE", "END", "Comm"))]
    names = ("fc1_weight", "fc1_bias", "fc2_weight")
    for name, op in zip(names, ("fc1", "fc1", "fc2"), strict=True):
        edges += [(f"BW.{op}_fwd", f"Comm.{name}"), (f"Comm.{name}", "UPDATE")]
    nodes = list(dict.fromkeys(end for edge in edges for end in edge))
    text = "".join(f'node [ id {i} label "{n}" ]' for i, n in enumerate(nodes))
    text += "".join(
        f"edge [ source {nodes.index(a)} target {nodes.index(b)} ]" for a, b in edges
    )
    (tmp_path / "host1" / "0" / "dag.gml").write_text(f"graph [ {text} ]")
    assert set(trial.read(tmp_path).graph.edges) == wanted


NAMES = {"FW.a": "a_fwd", "FW.b": "b_fwd", "BW.b": "b_fwd_backward", "BW.a": "a_fwd_backward"}
RAW = st.sampled_from([*NAMES.values(), "x", "dot", "add_n", "sgd_update", "SGD_Update"])


@given(st.lists(st.tuples(RAW, st.integers(1, 4), st.integers(0, 3)), max_size=40))
def test_any_mxnet_trace_follows_the_documented_rules(tmp_path_factory, drawn):
    rows, ops, at = [], [], 0
    begin = [("a_fwd", 1, 0), ("b_fwd", 1, 0), ("b_fwd_backward", 1, 0), ("a_fwd", 1, 0)]
    for raw, dur, gap in [*begin, *drawn]:
        rows.append({"name": raw, "ph": "X", "ts": at, "dur": dur, "pid": 0, "tid": 0})
        ops.append((raw, mxnet.name_of(raw), at * 1000, (at + dur) * 1000))
        at += dur + gap
    path = tmp_path_factory.mktemp("mxnet") / "temp.json"
    path.write_text(json.dumps(rows))
    known = ParameterDict(parameters=(), update_of={})
    symbol = path.with_name("symbol.txt")
    symbol.write_text("Op:x, Name=a\nOp:x, Name=b\n\targ[0]=a(0)\n\toutput[0]=b(0)\n")
    graph = mxnet.graph_of(symbol, known)
    found = mxnet.events_of(path, "p", graph)
    wanted = oracle.mxnet(ops, set(NAMES))
    assert [(e.name, e.start, e.start + e.dur) for e in found] == wanted


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("Convolution{name=conv0_fwd;kernel=3}", "FW.conv0"),
        ("name=conv0_fwd_backward;", "BW.conv0"),
        ("a.b_fwd", "FW.a_b"),
        ("plain", "FW.plain"),
    ],
)
def test_mxnet_names_become_standard_names(raw, name):
    assert mxnet.name_of(raw) == name


def test_tensors_of_mxnet_have_sizes_and_updates(tmp_path):
    made.mxnet(tmp_path)
    found = trial.read(tmp_path).parameters
    assert list(found.ids) == ["fc1_weight", "fc1_bias", "fc2_weight"]
    assert found.bytes_of == {0: 48, 1: 8, 2: 32}
    assert found.update_of == {2: ("UPDATE_0",), 1: ("UPDATE_1",), 0: ("UPDATE_2",)}
    assert (found.ids["fc1_bias"], found.parameters[2].name) == (1, "fc2_weight")


def test_tensors_are_updated_together_where_the_optimizer_says_so(tmp_path):
    made.mxnet(tmp_path, aggregate=2)
    read = trial.read(tmp_path)
    assert read.parameters.update_of == {2: ("UPDATE_0",), 1: ("UPDATE_0",), 0: ("UPDATE_1",)}
    assert "UPDATE_2" not in read.graph.nodes


def test_updates_follow_the_specification():
    def updates(aggregate):
        return mxnet.parameters_of(parse_parameters("a;b;c"), aggregate).update_of

    assert updates(0) == {2: ("UPDATE_0",), 1: ("UPDATE_1",), 0: ("UPDATE_2",)}
    assert updates(2) == {2: ("UPDATE_0",), 1: ("UPDATE_0",), 0: ("UPDATE_1",)}


def test_gradient_lists_are_read_in_all_forms():
    assert [each.name for each in parse_parameters("a;b")] == ["a", "b"]
    one = Parameter.of(0, ["w", "shape=(2, 3)", "dtype=float64"])
    assert (one.shape, one.size) == ((2, 3), 48)
    assert Parameter.of(0, "w;shape=();dtype=string").size == 1
    assert Parameter.of(0, "w;shape=(2,);dtype=complex64;odd=1").size is None
    assert Parameter.of(0, "w").size is None
    known = ParameterDict(
        parameters=parse_parameters(["a;shape=(2,);dtype=int16", "b"]), update_of={}
    )
    assert (known.group_bytes((0, 0)), known.group_bytes((0, 1))) == (8, None)


def test_a_replay_of_mxnet_ends_with_its_updates_and_is_close(tmp_path):
    made.mxnet(tmp_path)
    found = session(trial.read(tmp_path))
    edges = set(found.replayed.replayer.graph.edges)
    assert ("host0.rank0->UPDATE_1", "END") in edges
    assert ("host0.rank0->Comm.0.MEMCPY_OUT_FUSION_BUFFER", "host0.rank0->UPDATE_CAL") in edges
    names = found.replayed.replayer.graph.nodes
    last = max(range(len(names)), key=lambda i: found.replayed.end[i])
    assert names[last] == "END" or "UPDATE" in names[last]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temp.json": '{"traceEvents": 3}'}, "no traceEvents"),
        (
            {"temp.json": '[{"ph": "X", "ts": 1, "dur": 2}]'},
            r"temp\.json: invalid event",
        ),
        ({"temp.json": "[]"}, "no backward operation"),
        (
            {
                "temp.json": '[{"ph":"X","ts":1,"dur":1,"name":"fc1_fwd"},'
                '{"ph":"X","ts":3,"dur":1,"name":"fc1_backward"}]'
            },
            "has only one step.*Profile two steps",
        ),
        ({"metadata.json": '{"opt_aggregate_num": 0}'}, "no gradient_name_list"),
        (
            {"metadata.json": '{"opt_aggregate_num": "x", "gradient_name_list": ["a"]}'},
            r"metadata\.json: invalid event",
        ),
        ({"symbol_debug_str.txt": None}, r"no dag\.gml and no symbol_debug_str\.txt"),
        ({"symbol_debug_str.txt": "what"}, "no forward operation with an edge"),
        ({"symbol_debug_str.txt": b"\xff\xfe"}, r"symbol_debug_str\.txt: "),
    ],
)
def test_a_damaged_mxnet_trial_is_explained(tmp_path, change, message):
    made.mxnet(tmp_path)
    for name, content in change.items():
        path = tmp_path / "host0" / "0" / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceFileError, match=message):
        trial.read(tmp_path)


def test_pieces_of_tensorflow_1_are_one_operation_and_the_host_side_does_not_count(tmp_path):
    wanted = made.tensorflow1(tmp_path)
    found = trial.read(tmp_path)
    assert operators(found, "host1.rank0") == wanted
    assert step_time(found.trace).time_ns == 101_000
    assert len(operators(trial.read(tmp_path, merge=False), "host1.rank0")) == 2 * len(wanted)
    assert found.parameters.bytes_of == {0: 60}
    assert found.parameters.update_of == {0: ("UPDATE_.Momentum/update/Apply",)}
    assert found.counts["Comm.0"]["chunkNum"] == 2
    replayed = session(found).replayed
    assert replayed.replayer.graph.groups == ((0,),)


def test_without_streams_device_processes_are_used(tmp_path):
    made.tensorflow1(tmp_path)
    path = tmp_path / "host0" / "0" / "temp.json"
    path.write_text(path.read_text().replace("/stream:all", "/memcpy"))
    graph = tensorflow.graph_of(tmp_path / "host0" / "0" / "dag.gml")
    assert len(tensorflow.events_of(path, "p", graph)) == 24


def event(name, start, dur, step=0):
    return Event(name=name, pid="p", start=start, dur=dur, lane="l", cat="operator", step=step)


def test_pieces_are_joined_only_within_a_step():
    found = job.merged(
        [event("FW.a", 0, 9), event("FW.a", 2, 3), event("FW.b", 9, 1), event("FW.b", 11, 1, 1)]
    )
    assert [(e.name, e.start, e.dur) for e in found] == [
        ("FW.a", 0, 9),
        ("FW.b", 9, 1),
        ("FW.b", 11, 1),
    ]


def test_sequential_updates_begin_after_the_previous_update():
    found = job.sequential_updates(
        [event("UPDATE_.a", 0, 9), event("FW.x", 1, 2), event("UPDATE_.b", 2, 3)]
    )
    assert [(e.name, e.start, e.dur) for e in found] == [
        ("FW.x", 1, 2),
        ("UPDATE_.b", 2, 3),
        ("UPDATE_.a", 5, 4),
    ]


def test_a_barrier_puts_all_updates_after_all_communication(tmp_path):
    made.tensorflow1(tmp_path)
    graph = trial.read(tmp_path).graph.with_barrier()
    assert ("Comm.0", "UPDATE_CAL") in graph.edges
    assert ("UPDATE_CAL", "UPDATE_.Momentum/update/Apply") in graph.edges
    assert ("Comm.0", "UPDATE_.Momentum/update/Apply") not in graph.edges


def test_a_rank_with_fewer_steps_counts_with_those_that_it_has(tmp_path):
    made.mxnet(tmp_path / "long", steps=3)
    made.mxnet(tmp_path / "short", steps=2)
    short = (tmp_path / "short" / "host1" / "0").rename(tmp_path / "short" / "moved")
    target = tmp_path / "long" / "host1" / "0"
    for path in short.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    found = session(trial.read(tmp_path / "long"))
    ranks = found.measured.ranks
    assert [len(ranks[f"host{i}.rank0"].time) for i in range(2)] == [3, 2]
    assert len(found.measured.steps) == 2
    assert abs(found.error) < 0.5


def test_a_graph_in_a_cycle_is_an_error_that_names_an_operation(tmp_path):
    made.tensorflow1(tmp_path)
    path = tmp_path / "host0" / "0" / "dag.gml"
    path.write_text(path.read_text().rstrip(" ]") + " edge [ source 2 target 1 ] ]")
    with pytest.raises(FastcommError, match=r"host0\.rank0->\S+ waits for itself"):
        session(trial.read(tmp_path))


def test_tensors_without_communication_delay_nothing(tmp_path):
    made.mxnet(tmp_path)
    for host in range(2):
        for name in ("comm.json", "comm_detail.json"):
            path = tmp_path / f"host{host}" / "0" / name
            path.write_text(
                path.read_text().replace("mxnet.1", "frameworks.x").replace(".1.", ".2.")
            )
    found = session(trial.read(tmp_path))
    assert found.replayed.replayer.graph.groups == ((0,), (2,))
    assert "host0.rank0->UPDATE_1" in found.replayed.replayer.graph.nodes


def test_unknown_sub_operations_are_left_out_of_a_trial_and_have_a_category_of_their_own(
    tmp_path,
):
    made.mxnet(tmp_path)
    path = tmp_path / "host1" / "0" / "comm_detail.json"
    path.write_text(path.read_text().replace("Comm.0.SEND", "Comm.0.BCAST"))
    wanted = {
        key for key in trial.read(tmp_path).trace.keys if key.startswith("host1.rank0->Comm.0.")
    }
    assert not any("BCAST" in key or "SEND" in key for key in wanted)
    whole = tmp_path / "whole.json"
    row = {"name": "Comm.0.BCAST", "ts": 1, "dur": 2, "pid": "host0.rank0", "tid": "t"}
    whole.write_text(json.dumps([row]))
    assert statistics(uniform.read(whole)).category == ("Comm.other",)


@pytest.mark.parametrize(
    "victim", ["io.json", "comm.json", "comm_detail.json", "nccl_rank_graph.json"]
)
def test_operations_missing_on_one_rank_are_excluded_or_an_error(tmp_path, victim):
    made.mxnet(tmp_path)
    (tmp_path / "host1" / "0" / victim).unlink()
    read = trial.read(tmp_path)
    if victim == "nccl_rank_graph.json":
        with pytest.raises(FastcommError, match="rank 1 of NCCL, which has no files"):
            session(read)
        return
    assert session(read).replayed.mean_ns > 0
    assert bool(read.warnings) == (victim == "comm.json")


def test_the_command_lists_the_tensors_of_a_trial(tmp_path):
    made.mxnet(tmp_path / "trial")
    words = [
        "dpro",
        "stats",
        str(tmp_path / "trial"),
        "--json",
        "--output",
        str(tmp_path / "o"),
    ]
    said = json.loads(CliRunner().invoke(main, words).stdout)
    assert said["tensors"][1] == {
        "id": 1,
        "name": "fc1_bias",
        "shape": [4],
        "dtype": "float16",
        "bytes": 8,
        "updates": ["UPDATE_1"],
    }
    assert json.loads((tmp_path / "o" / "stats.json").read_text()) == said


FILES = {
    "mxnet": ["temp.json", "io.json", "comm.json", "comm_detail.json", "nccl_rank_graph.json"],
    "tensorflow1": ["temp.json", "comm.json", "dag.gml", "metadata.json"],
    "byteps": ["../../comm_timeline.json", "../../server_timeline.json"],
}


@pytest.mark.parametrize(
    ("kind", "name"), [(k, n) for k, names in FILES.items() for n in names]
)
def test_random_damage_gives_numbers_or_a_fastcomm_error(tmp_path, kind, name):
    getattr(made, kind)(tmp_path)
    host = "traces_0" if kind == "byteps" else "host0"
    path = (tmp_path / host / "0" / name).resolve()
    good = path.read_bytes()
    chance = random.Random(name)
    errors = 0
    for _ in range(25):
        bad = bytearray(good)
        for _ in range(chance.choice([1, 1, 3])):
            bad[chance.randrange(len(bad))] = chance.choice(b'0123456789-+.eE"{}[],:abcX \xff')
        path.write_bytes(bytes(bad[: chance.choice([len(bad), len(bad), len(bad) // 2])]))
        try:
            found = session(trial.read(tmp_path))
        except FastcommError:
            errors += 1
        else:
            assert found.replayed.mean_ns >= 0
    assert errors
