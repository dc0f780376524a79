"""Test the dependency graph, its replay, the critical path and what-ifs."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from builders import made_trials
from builders.replay_data import TRIAL, assert_same, document, needed
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from oracles import replay as oracle

import fastcomm
from fastcomm.cli.main import main
from fastcomm.compat.dpro import dependency, gaps, predictions, rules, tensorflow, trial
from fastcomm.compat.dpro.job import Topology
from fastcomm.compat.dpro.replayed import Options, Replayer, execution_graph
from fastcomm.compat.dpro.result import session
from fastcomm.compat.dpro.statistics import statistics
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.edits import parse_edits
from fastcomm.options import EditOptions
from fastcomm_kernels import replay as kernels

OPT_STEP = 2


@pytest.fixture(scope="module")
def read():
    return trial.read(TRIAL)


@pytest.fixture(scope="module")
def summary():
    return document("trial/expected/summary.json")


@pytest.fixture(scope="module")
def compat(read):
    return session(read, Options(rules=rules.RULES))


def in_ms(ends):
    return {pid: end / 1e6 for pid, end in ends.items()}


@needed
def test_the_graph_equals_dpro(read):
    graph = dependency.dependencies(read, OPT_STEP)
    assert sorted(map(list, graph.edges)) == sorted(
        document("trial/expected/dag_edges.json.gz")
    )
    assert set(graph.nodes) == set(document("trial/expected/dag_nodes.json.gz"))
    assert graph.groups == ((0,), (1,), (2,))


@needed
def test_durations_and_gaps_equal_dpro(compat):
    made = compat.replayed.replayer
    known = made.measured
    for i, node in enumerate(made.graph.nodes):
        wanted = document_nodes()[node]
        assert known.avg[i] / 1e6 == pytest.approx(wanted["avg"], abs=1e-9)
        assert known.gap[i] / 1e3 == pytest.approx(wanted.get("operatorGAPoperator", 0))
        assert known.comm_gap[i] / 1e3 == pytest.approx(wanted.get("operatorGAPComm", 0))
        assert known.samples[i] == wanted.get("cnt", 0)


def document_nodes(known={}):  # noqa: B006
    """Read once."""
    if not known:
        known.update(document("trial/expected/dag_nodes.json.gz"))
    return known


@needed
def test_the_replay_ends_as_in_dpro(compat, summary):
    wanted = summary["replay"]
    assert_same(in_ms(compat.replayed.by_pid()), wanted["step_end"], 1e-6)
    assert sorted(compat.replayed.replayer.devices) == sorted(wanted["devices"])


@needed
def test_every_replayed_event_equals_dpro(compat):
    replayed = compat.replayed
    nodes = replayed.replayer.graph.nodes
    found = {
        nodes[i]: (replayed.start[i] / 1e3, replayed.duration[i] / 1e3)
        for i in replayed.order.tolist()
        if replayed.duration[i] > 0
    }
    wanted = {
        row["args"]["name"]: (row["ts"], row["dur"])
        for row in document("trial/expected/replay_events.json.gz")
    }
    assert found.keys() == wanted.keys()
    for name, times in wanted.items():
        assert found[name] == pytest.approx(times, abs=1e-3)


@needed
def test_the_critical_path_is_as_long_as_in_dpro(compat, summary):
    wanted = summary["replay"]
    assert compat.path.length_ns / 1e6 == pytest.approx(
        wanted["critical_path_length"], abs=1e-6
    )
    assert compat.path.edges == wanted["execution_graph_edges"]


@needed
def test_the_critical_path_of_dpro_is_one_of_ours(compat, summary):
    source, target, cost = execution_graph(compat.replayed)
    number = {name: i for i, name in enumerate(compat.replayed.replayer.graph.nodes)}
    costs = dict(zip(zip(source.tolist(), target.tolist(), strict=True), cost, strict=True))
    path = summary["replay"]["critical_path"]
    for (name, wanted), (after, _) in pairwise(path):
        assert costs[number[name], number[after]] / 1e6 == pytest.approx(wanted, abs=1e-6)


@needed
@pytest.mark.parametrize(
    ("row", "option", "text"),
    [
        ("all computation x1.5", "scale", "compute=1.5"),
        ("all communication x1.5", "scale", "comm=1.5"),
        ("everything x1.1", "scale", "all=1.1"),
        (
            "host0.rank0->FW.net/dense1/MatMul +1 ms",
            "set",
            "name:host0.rank0->FW.net/dense1/MatMul=+1ms",
        ),
    ],
)
def test_what_ifs_end_as_in_dpro(compat, summary, row, option, text):
    found = edited(compat.replayed.replayer, **{option: [text]})
    assert_same(in_ms(found.by_pid()), summary["what_if"]["step_end"][row], 1e-6)


@needed
def test_unlimited_updates_end_as_in_dpro(read, summary):
    found = session(read, Options(rules=rules.RULES, unlimited_updates=True)).replayed
    wanted = summary["what_if"]["step_end"]["updates infinitely parallel"]
    assert_same(in_ms(found.by_pid()), wanted, 1e-6)


@needed
def test_the_default_replay_is_within_a_percent_of_what_was_measured(read):
    found = session(read)
    assert abs(found.error) < 0.01
    assert found.error_of("host0.rank0") == pytest.approx(-0.0013, abs=1e-3)
    assert found.path.length_ns <= found.replayed.end.max()
    two = session(read, Options(steps=2, unlimited_updates=True))
    assert two.replayed.mean_ns == pytest.approx(found.replayed.mean_ns, rel=0.02)


@needed
def test_a_slow_rank_delays_all_and_a_fast_link_helps(read):
    found = session(read).replayed
    made = found.replayer

    def mean(**options):
        return edited(made, **options).mean_ns

    slow = edited(made, scale=["rank:host0.rank1=2"])
    assert min(slow.by_pid().values()) > found.mean_ns * 1.2
    assert mean(scale=["link:host0.rank1->host1.rank0=0.5"]) < found.mean_ns
    assert mean(remove=["tensor:2"]) < found.mean_ns * 0.9
    assert mean(heal=["rank:host1.rank1"]) < found.mean_ns  # which computes slower
    for target in ("category:operator.BW", "device:host0.rank0->operator"):
        assert mean(scale=[f"{target}=3"]) > found.mean_ns
    for options in ({"overlap": ["DP"]}, {"set": ["all=ideal"]}, {"fuse_below": "5us"}):
        with pytest.raises(ConfigError, match="not possible here"):
            mean(**options)


@needed
def test_a_tensor_without_communication_is_no_group_and_its_update_waits_for_nothing(read):
    silent = np.array([".2." not in name for name in read.trace.names])
    quiet = replace(
        read, trace=replace(read.trace, counts=read.trace.counts & silent[read.trace.key])
    )
    found = session(quiet)
    graph = found.replayed.replayer.graph
    assert graph.groups == ((0,), (1,))
    targets = {b for _, b in graph.edges}
    update = "host0.rank0->UPDATE_.SGD/SGD/update_2/ResourceApplyGradientDescent"
    assert update in graph.nodes
    assert update not in targets
    assert found.replayed.mean_ns < session(read).replayed.mean_ns


def test_a_what_if_that_matches_nothing_is_an_error():
    made = Replayer.of(graph_of([("p->FW.a", "p->BW.b")]), measured_of(2))
    with pytest.raises(ConfigError, match=r"matches nothing: there is name:.*p->FW\.a"):
        edited(made, scale=["name:p->FW.c=2"])


def edited(made, **options):
    edits = parse_edits(EditOptions(**options)).edits
    return made.replay(predictions.durations(made, edits))


def graph_of(edges):
    nodes = tuple(dict.fromkeys(end for edge in edges for end in edge))
    ends = np.array([[nodes.index(end) for end in edge] for edge in edges], np.int64)
    return dependency.Dependencies(nodes=nodes, source=ends[:, 0], target=ends[:, 1], groups=())


def measured_of(size):
    zero = np.zeros(size)
    return gaps.Measured(
        avg=np.full(size, 10.0), gap=zero, samples=np.zeros(size, np.int64), comm_gap=zero
    )


def test_operations_in_a_cycle_are_an_error_that_names_one():
    with pytest.raises(FastcommError, match=r"p->FW\.a waits for itself"):
        Replayer.of(graph_of([("p->FW.a", "p->BW.b"), ("p->BW.b", "p->FW.a")]), measured_of(2))


def test_nodes_of_all_kinds_have_a_device_and_no_rank_of_its_own_has_no_step():
    edges = [("p->I/O", "p->FW.a"), ("p->FW.a", "p->UPDATE_0"), ("p->UPDATE_0", "END")]
    found = Replayer.of(graph_of(edges), measured_of(4)).replay()
    assert found.by_pid() == {"p": 30.0}
    assert found.replayer.devices == ("p->I/O", "p->operator", "END->operator")


@needed
def test_fused_tensors_are_one_group_with_the_mean_of_what_each_was_seen_to_take(read):
    keys = tuple(
        key.replace("Comm.0.S", "Comm.0+1.S").replace("Comm.0.R", "Comm.0+1.R")
        for key in read.trace.keys
    )
    names = tuple(
        n.replace("Comm.0.S", "Comm.0+1.S").replace("Comm.0.R", "Comm.0+1.R")
        for n in read.trace.names
    )
    fused = replace(
        read,
        trace=replace(read.trace, keys=keys, names=names),
        counts={"Comm.0+1": read.counts["Comm.0"], "Comm.2": read.counts["Comm.2"]},
    )
    graph = dependency.dependencies(fused, OPT_STEP)
    assert (2,) in graph.groups
    known = gaps.measured(graph, statistics(fused.trace, fused.topology), fused.trace, OPT_STEP)
    for group in graph.groups:
        if len(group) > 1:
            node = f"host0.rank0->Comm.{'+'.join(map(str, group))}.QUEUE"
            assert known.avg[graph.nodes.index(node)] == pytest.approx(20_000, rel=0.1)
    assert session(fused).replayed.mean_ns > 0


@needed
def test_a_neighbor_without_files_is_an_error(read):
    lonely = {rank: pid for rank, pid in read.topology.pid_of.items() if rank != 3}
    topology = Topology(ring=read.topology.ring, tree={}, pid_of=lonely)
    with pytest.raises(FastcommError, match="with rank 3 of NCCL, which has no files"):
        dependency.dependencies(replace(read, topology=topology), OPT_STEP)


def test_a_graph_without_communication_has_independent_ranks(tmp_path):
    path = tmp_path / "dag.gml"
    path.write_text(
        'graph [ node [ id 0 label "a" ] node [ id 1 label "gradients/b" ] '
        "edge [ source 0 target 1 ] ]"
    )
    assert tensorflow.graph_of(path).edges == [("FW.a", "BW.gradients/b")]


def test_a_worker_waits_for_10_us_at_most_before_it_pushes(tmp_path):
    made_trials.byteps(tmp_path)
    replayer = session(trial.read(tmp_path)).replayed.replayer
    waits = dict(zip(replayer.graph.nodes, replayer.measured.comm_gap.tolist(), strict=True))
    # Worker 0 pushes 9 us after its backward op has ended, worker 1, the late one, 11.
    backward = "rank0->BW.gradients/dense/MatMul_grad"
    assert [waits[f"traces_{worker}.{backward}"] for worker in (0, 1)] == [9000, 10_000]


@given(st.data())
def test_any_replay_agrees_with_the_definition(data):
    size = data.draw(st.integers(1, 9))
    devices = data.draw(st.integers(1, 3))
    kinds = np.array(data.draw(st.lists(st.integers(0, 2), min_size=devices, max_size=devices)))
    pairs = sorted(data.draw(st.sets(st.tuples(*[st.integers(0, size - 1)] * 2))))
    pairs = [(a, b) for a, b in pairs if a < b]
    edges = [
        (a, b, float(data.draw(st.integers(0, 3))), data.draw(st.booleans())) for a, b in pairs
    ]
    # The last node of each group on an exclusive device lets the next group in.
    row = st.tuples(
        st.integers(0, devices - 1), st.integers(0, 2), st.integers(0, 6), st.integers(0, 2)
    )
    work = [(*data.draw(row), i, 1) for i in range(size)]
    if data.draw(st.booleans()):
        # Pairs share a group, and its second member, which waits for the first, releases it.
        for i in range(0, size - 1, 2):
            d, p, t, b, _, _ = work[i]
            work[i] = (d, p, t, b, i, 0)
            work[i + 1] = (d, p, *work[i + 1][2:4], i, 1)
            if all(edge[:2] != (i, i + 1) for edge in edges):
                edges.append((i, i + 1, 0.0, False))
        edges.sort()
        edges = [e for e in edges if e[0] % 2 == 1 or e[1] == e[0] + 1 or kinds.max() < 2]
        edges = [e for e in edges if kinds.max() < 2 or (e[1] == e[0] + 1 and e[0] % 2 == 0)]
    ready = np.array([float(data.draw(st.integers(0, 4))) for _ in range(size)])
    counts = np.bincount([e[0] for e in edges], minlength=size)
    graph = (
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        np.array([e[1] for e in edges], np.int64),
        np.array([e[2] for e in edges], np.float64),
        np.array([e[3] for e in edges], np.int64),
    )
    columns = list(zip(*work, strict=True))
    types = (np.int64, np.int64, np.float64, np.float64, np.int64, np.int64)
    arrays = tuple(np.array(c, t) for c, t in zip(columns, types, strict=True))
    for run, by_time in ((kernels.by_time, True), (kernels.by_device, False)):
        wanted = oracle.played(size, edges, work, kinds.tolist(), ready.tolist(), by_time)
        start, end, order = run(graph, arrays, kinds, ready.copy(), np.zeros(devices))
        assert order.tolist() == wanted[2], by_time
        assert dict(enumerate(start.tolist())) == wanted[0], by_time
        assert dict(enumerate(end.tolist())) == wanted[1], by_time
        conserved(edges, work, kinds, start, end)


def conserved(edges, work, kinds, start, end):
    """No device does two things at once, and nothing starts before what it waits for."""
    for a, b, lag, at_start in edges:
        assert start[b] >= (start[a] if at_start else end[a]) + lag
    for d in np.flatnonzero(kinds != 1).tolist():
        own = sorted((start[i], end[i]) for i, row in enumerate(work) if row[0] == d)
        assert all(after[0] >= before[1] for before, after in pairwise(own))


@needed
def test_the_command_prints_and_writes_its_results(tmp_path):
    def run(*words):
        done = CliRunner().invoke(main, list(map(str, words)))
        assert done.exit_code == 0, done.output
        return done.stdout

    traced = tmp_path / "t.json"
    words = ("dpro", "replay", TRIAL, "--scale", "compute=0.5")
    words = (*words, "--bottleneck", "--tensors", "1-2")
    said = json.loads(run(*words, "--json", "--output", tmp_path / "o", "--trace", traced))
    assert (said["nodes"], said["edges"]) == (712, 1288)
    assert said["what_if"]["speedup"] > 1
    assert json.loads((tmp_path / "o" / "replay.json").read_text()) == said
    rows = json.loads(traced.read_text())["traceEvents"]
    assert sum(row["ph"] == "X" for row in rows) == 363
    assert (tmp_path / "o" / "graph.graphml").read_text().count("<edge ") == 1288
    text = run(*words)
    assert "step 2: replayed 11.17 ms, measured 11.25 ms, error -0.72 %" in text
    assert "What if:" in text
    assert "tensors 1, 2, replayed alone:" in text
    assert said["tensors_alone"]["tensors"] == [1, 2]
    assert "if it took no time" in text
    plain = json.loads(run("dpro", "replay", TRIAL, "--compat", "dpro", "--json"))
    assert plain["step_end_ns"]["host0.rank0"] == pytest.approx(11.332e6)


@needed
def test_replay_trial_takes_the_options_of_the_command():
    asked = ["--compat", "dpro", "--repeat", "2", "--tensors", "1", "--json"]
    result = fastcomm.replay_trial(TRIAL, compat="dpro", repeat=2, tensors=(1,))
    document = json.loads(
        CliRunner().invoke(main, ["dpro", "replay", str(TRIAL), *asked]).stdout
    )
    assert json.loads(json.dumps(result.to_dict())) == document
    with pytest.raises(ConfigError, match="dpro"):
        fastcomm.replay_trial(TRIAL, compat="hta")
    changed = ["--scale", "comm=0.5", "--bottleneck", "--hosts", "4", "--barrier", "--json"]
    result = fastcomm.replay_trial(
        TRIAL, scale={"comm": 0.5}, bottleneck=True, hosts=4, barrier=True
    )
    command = CliRunner().invoke(main, ["dpro", "replay", str(TRIAL), *changed])
    assert result.to_dict() == json.loads(command.stdout)


def chain_graph(size, edges):
    counts = np.bincount([a for a, _ in edges], minlength=size)
    return (
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        np.array([b for _, b in edges], np.int64),
        np.zeros(len(edges)),
        np.zeros(len(edges), np.int64),
    )


@pytest.mark.parametrize("run", [kernels.by_time, kernels.by_device])
def test_groups_wait_for_an_exclusive_device_in_order(run):
    # Groups of two, all ready at once: 0 and 1, 2 and 3, 4 and 5; the second releases.
    graph = chain_graph(6, [(0, 1), (2, 3), (4, 5)])
    ones, zeros = np.ones(6), np.zeros(6, np.int64)
    work = (zeros, zeros, ones, np.zeros(6), np.arange(6) // 2, np.arange(6) % 2)
    _, end, order = run(graph, work, np.array([2]), np.zeros(6), np.zeros(1))
    assert order.tolist() == [0, 1, 2, 3, 4, 5]
    assert end.tolist() == [1, 2, 3, 4, 5, 6]
