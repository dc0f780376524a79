"""Test communication in the graph: rings, trees, and one node per tensor without NCCL files."""

import json
from itertools import pairwise

import numpy as np
import pytest
from builders import made_trials as made
from hypothesis import given
from hypothesis import strategies as st
from oracles import trials as oracle

from fastcomm.compat.dpro import dependency, rules, trial
from fastcomm.compat.dpro.gaps import Measured
from fastcomm.compat.dpro.job import TREE, LocalGraph, Topology, Tree
from fastcomm.compat.dpro.replayed import Options, Replayer
from fastcomm.compat.dpro.result import session
from fastcomm.compat.dpro.uniform import Name
from fastcomm.errors import ConfigError, TraceFileError

COUNTS = {"Comm.0": {"loopNum": 2, "channelNum": 1, "chunkNum": 3, "sliceNum": 2}}
ONE_TENSOR = LocalGraph.of(
    ["BW.b", "Comm.0", "UPDATE_0"], [("BW.b", "Comm.0"), ("Comm.0", "UPDATE_0")]
)


def topology_of(parents):
    """A tree by the parent of each rank but 0."""
    down = {rank: [] for rank in range(len(parents) + 1)}
    for child, parent in enumerate(parents, 1):
        down[parent].append(child)
    tree = {
        rank: Tree(up=parents[rank - 1] if rank else None, down=tuple(below))
        for rank, below in down.items()
    }
    pids = {rank: f"host{rank}.rank0" for rank in tree}
    return Topology(ring={}, tree={0: tree}, pid_of=pids, algorithm=TREE)


def ring_of(size):
    ring = {rank: (rank + 1) % size for rank in range(size)}
    pids = {rank: f"host{rank}.rank0" for rank in ring}
    return Topology(ring={0: ring}, tree={}, pid_of=pids)


def graph_of(topology, counts=None):
    pids = topology.pid_of.values()
    slices = dependency.over_network(ONE_TENSOR, counts or {}, topology)
    return dependency.combined(pids, ONE_TENSOR, [(0,)], slices)


@st.composite
def parents(draw):
    size = draw(st.integers(1, 6))
    return [draw(st.integers(0, rank)) for rank in range(size)]


@given(parents())
def test_a_tree_passes_data_through_every_rank_without_spare_hops(drawn):
    topology = topology_of(drawn)
    graph = graph_of(topology, COUNTS)
    edges = list(graph.edges)
    before = oracle.reached(edges)
    world = len(drawn) + 1
    for pid in topology.pid_of.values():
        passed = before[f"{pid}->Comm.0.MEMCPY_OUT_FUSION_BUFFER"]
        for other in topology.pid_of.values():
            assert f"{other}->Comm.0.MEMCPY_IN_FUSION_BUFFER" in passed
    slices = 2 * 3 * 2
    for sub_op in ("SEND", "RECV"):
        found = [name for name in graph.parsed() if name.sub_op == sub_op]
        assert len(found) == 2 * (world - 1) * slices
        pairs = {name.suffix.rpartition("_")[2] for name in found}
        assert pairs <= set(map(str, range(world)))
    # A SEND has one RECV, under the same suffix, on the rank that its suffix ends with.
    for a, b in edges:
        if ".SEND~>" in a:
            assert Name.of(a).suffix == Name.of(b).suffix
            assert b.startswith(f"host{Name.of(a).suffix.rpartition('_')[2]}.")


@given(parents())
def test_a_slice_takes_twice_the_depth_of_its_tree(drawn):
    topology = topology_of(drawn)
    graph = graph_of(topology, {"Comm.0": {"chunkNum": 1}})
    depth = [0]
    for parent in drawn:
        depth.append(depth[parent] + 1)
    avg = np.array([float(name.sub_op == "RECV") for name in graph.parsed()])
    zero = np.zeros(len(avg))
    known = Measured(avg=avg, gap=zero, samples=zero.astype(np.int64), comm_gap=zero)
    found = Replayer.of(graph, known, Options()).replay()
    wide = max(drawn.count(rank) for rank in range(len(drawn) + 1)) > 1
    least = 2 * max(depth)
    assert found.end.max() >= least
    if not wide:
        assert found.end.max() == least


@given(st.integers(2, 6))
def test_a_ring_passes_data_through_every_rank(size):
    graph = graph_of(ring_of(size))
    before = oracle.reached(list(graph.edges))
    passed = before["host0.rank0->Comm.0.MEMCPY_OUT_FUSION_BUFFER"]
    for rank in range(size):
        assert f"host{rank}.rank0->Comm.0.MEMCPY_IN_FUSION_BUFFER" in passed
    # The size of a ring: per rank 4 + 2CK nodes, T + n + 1 + U + (4C - 1)K edges.
    turns = 2 * (size - 1)
    comm = [name for name in graph.parsed() if name.op_cat == "Comm"]
    assert len(comm) == size * (4 + 2 * turns)
    assert len(graph.source) == size * (1 + size + 1 + 1 + 4 * turns - 1)


def test_a_single_rank_replays_its_measured_time():
    alone = Topology(ring={}, tree={}, pid_of={})
    assert dependency.peers("host0.rank0", alone) == ()
    for topology in (topology_of([]), ring_of(1)):
        edges = list(graph_of(topology).edges)
        took = "host0.rank0->Comm.0.MEMCPY_IN_FUSION_BUFFER"
        assert (took, took.replace("_IN_", "_OUT_")) in edges


def test_a_trial_with_trees_alone_is_replayed_along_them(tmp_path):
    made.mxnet(tmp_path, shape=(5, 1), network="tree")
    read = trial.read(tmp_path)
    assert read.topology.algorithm == "tree"
    assert read.topology.tree[0][1] == Tree(up=0, down=(3, 4))
    graph = session(read).replayed.replayer.graph
    assert "host1.rank0->Comm.2.SEND~>0_0_0_0_1_3" in graph.nodes
    assert len(session(read, Options(rules=rules.RULES)).replayed.by_pid()) == 5


def test_slices_of_a_tree_take_the_traced_time_of_their_chunk(tmp_path):
    made.mxnet(tmp_path, shape=(3, 1))
    for rank in range(3):
        path = tmp_path / f"host{rank}" / "0" / "nccl_rank_graph.json"
        both = made.topology(rank, 3, "ring") | made.topology(rank, 3, "tree")
        path.write_text(json.dumps(both))
    assert trial.read(tmp_path).topology.algorithm == "ring"
    read = trial.read(tmp_path, algorithm="tree")
    replayer = session(read).replayed.replayer
    for name, avg in zip(replayer.names, replayer.measured.avg.tolist(), strict=True):
        if name.sub_op in {"SEND", "RECV"}:
            assert avg == 1000


def test_an_algorithm_missing_from_the_files_is_an_error(tmp_path):
    made.mxnet(tmp_path)
    with pytest.raises(ConfigError, match=r"no rank has a tree.*Use --nccl-algorithm ring"):
        trial.read(tmp_path, algorithm="tree")
    path = tmp_path / "host1" / "0" / "nccl_rank_graph.json"
    path.write_text("{}")
    with pytest.raises(TraceFileError, match=r"no RealRing.*and no Tree"):
        trial.read(tmp_path)


@pytest.mark.parametrize("write", [made.mxnet, made.tensorflow1])
def test_without_nccl_each_tensor_is_one_node_that_begins_when_all_are_ready(tmp_path, write):
    write(tmp_path, network="none")
    read = trial.read(tmp_path)
    found = session(read)
    graph = found.replayed.replayer.graph
    edges = set(graph.edges)
    for own in ("host0.rank0", "host1.rank0"):
        for other in ("host0.rank0", "host1.rank0"):
            assert (
                f"{own}->Comm.0.NEGOTIATE_ALLREDUCE",
                f"{other}->Comm.0.ALLREDUCE",
            ) in edges
    avg = dict(zip(graph.nodes, found.replayed.replayer.measured.avg.tolist(), strict=True))
    assert avg["host1.rank0->Comm.0.ALLREDUCE"] == 7000
    assert avg["host1.rank0->Comm.0.NEGOTIATE_ALLREDUCE"] == 0
    assert not any("QUEUE" in node or "SEND" in node for node in graph.nodes)


def test_nccl_files_are_ignored_on_request(tmp_path):
    made.mxnet(tmp_path)
    graph = session(trial.read(tmp_path, algorithm="none")).replayed.replayer.graph
    assert "host1.rank0->Comm.2.ALLREDUCE" in graph.nodes
    assert not any("SEND" in node for node in graph.nodes)


def test_with_compat_dpro_ranks_do_not_wait_for_each_other(tmp_path):
    made.tensorflow1(tmp_path, network="none")
    path = tmp_path / "host1" / "0" / "comm.json"
    rows = [row for row in json.loads(path.read_text()) if row["pid"] == 0]
    path.write_text(json.dumps(rows))
    read = trial.read(tmp_path)
    edges = set(session(read, Options(rules=rules.RULES)).replayed.replayer.graph.edges)
    backward, update = "BW.gradients/dense/MatMul_grad", "UPDATE_.Momentum/update/Apply"
    chain = [backward, "Comm.0.NEGOTIATE_ALLREDUCE", "Comm.0.ALLREDUCE", update]
    for a, b in pairwise(chain):
        assert (f"host0.rank0->{a}", f"host0.rank0->{b}") in edges
    assert (f"host1.rank0->{backward}", f"host1.rank0->{update}") in edges
    # By default both communicate, and the rank that does not log it takes what the other does.
    found = session(read).replayed.replayer
    avg = dict(zip(found.graph.nodes, found.measured.avg.tolist(), strict=True))
    assert avg["host1.rank0->Comm.0.ALLREDUCE"] == 7000


def test_one_rank_without_any_communication_goes_from_backward_to_updates(tmp_path):
    made.tensorflow1(tmp_path, network="none")
    for host in range(2):
        (tmp_path / f"host{host}" / "0" / "comm.json").unlink()
    found = session(trial.read(tmp_path / "host0", align="none"))
    assert found.replayed.replayer.graph.groups == ()
    edges = set(found.replayed.replayer.graph.edges)
    backward, update = "BW.gradients/dense/MatMul_grad", "UPDATE_.Momentum/update/Apply"
    assert (f"host0.rank0->{backward}", f"host0.rank0->{update}") in edges


def test_communication_of_non_gradients_is_ignored(tmp_path):
    made.tensorflow1(tmp_path)
    path = tmp_path / "host0" / "0" / "comm.json"
    path.write_text(
        path.read_text().replace('"Dist_Allreduce/HorovodAllreduce.0"', '"horovod.x"')
    )
    names = trial.read(tmp_path).trace.keys
    assert "host1.rank0->Comm.0.QUEUE" in names
    assert "host0.rank0->Comm.0.QUEUE" not in names
