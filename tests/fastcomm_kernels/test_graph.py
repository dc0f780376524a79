"""Test graph kernels against networkx and definitions."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastcomm.errors import FastcommError
from fastcomm.graph.graph import EDGE_KINDS, Graph, acyclic_order, longest_path
from fastcomm_kernels import graph
from fastcomm_kernels.arrays import NONE

NODES = 8
# Edges that lead forward, so that there is no cycle; some come twice.
FORWARD = st.lists(
    st.tuples(st.integers(0, NODES - 2), st.integers(1, NODES - 1), st.integers(0, 9))
    .map(lambda e: (min(e[0], e[1] - 1), e[1], e[2]))
    .filter(lambda e: e[0] < e[1]),
    max_size=20,
)
ANY = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1), st.integers(0, 9)).filter(
        lambda e: e[0] != e[1]
    ),
    max_size=20,
)


def column(values, dtype=np.int32):
    return np.array(list(values), dtype)


def made(edges, nodes=NODES):
    count = len(edges)
    room = graph.room(count)
    for at, (source, target, weight) in enumerate(edges):
        graph.put(
            room, at, (source, target), weight % 3, weight, weight if weight % 2 else NONE
        )
    points = (column(range(nodes)), column(range(nodes), np.int64), np.zeros(nodes, np.bool_))
    return Graph.of(points, room, count)


def in_networkx(edges):
    networkx = pytest.importorskip("networkx")
    found = networkx.DiGraph()
    for source, target, weight in edges:
        found.add_edge(source, target, weight=weight)
    return networkx, found


@given(FORWARD)
def test_the_longest_path_equals_networkx(edges):
    networkx, expected = in_networkx(edges)
    path = longest_path(made(edges))
    assert path.nodes.tolist() == networkx.dag_longest_path(expected)


@given(ANY)
def test_the_topological_order_equals_networkx(edges):
    networkx, expected = in_networkx(edges)
    found = made(edges)
    order = graph.topological(found.source, found.target, found.outgoing, NODES)
    if networkx.is_directed_acyclic_graph(expected):
        assert order.tolist() == list(networkx.topological_sort(expected))
        assert longest_path(found) is not None
    else:
        assert len(order) < found.connected_nodes == len(expected)
        assert longest_path(found) is None


@given(ANY)
def test_a_repeated_pair_replaces_the_first_in_place(edges):
    expected = {}
    for source, target, weight in edges:
        owner = weight if weight % 2 else expected.get((source, target), (0, 0, NONE))[2]
        expected[source, target] = (weight % 3, weight, owner)
    found = made(edges)
    assert list(zip(found.source.tolist(), found.target.tolist(), strict=True)) == list(
        expected
    )
    columns = (found.kind, found.weight, found.owner)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == list(expected.values())
    assert sum(found.counts().values()) == len(expected)
    assert list(found.counts()) == list(EDGE_KINDS)


@given(st.lists(st.integers(-1, 4), max_size=20))
def test_an_index_has_the_rows_of_each_key_in_order(keys):
    first, row = graph.index(column(keys), 5)
    for key in range(5):
        expected = [place for place, each in enumerate(keys) if each == key]
        assert row[first[key] : first[key + 1]].tolist() == expected


@example([(1, k * 7 % 5) for k in range(40)])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_equal_keys_are_ordered_by_tie_and_then_by_position(pairs):
    key, tie = (column((pair[k] for pair in pairs), np.int64) for k in (0, 1))
    order = np.argsort(key, kind="stable")
    graph.settle(order, key, tie)
    assert order.tolist() == sorted(range(len(pairs)), key=lambda row: pairs[row])


@given(FORWARD)
def test_a_replay_starts_each_node_after_its_last_predecessor(edges):
    edges = sorted(edges, key=lambda edge: edge[1])
    source, target, weight = (column((e[k] for e in edges), np.int64) for k in range(3))
    first, _ = graph.index(target.astype(np.int32), NODES)
    time, through = graph.replay(first, source.astype(np.int32), weight, 100)
    for node in range(NODES):
        into = [(time[s] + w, e) for e, (s, t, w) in enumerate(edges) if t == node]
        best = max((at for at, _ in into), default=100)
        assert time[node] == best
        assert through[node] == next((e for at, e in into if at == best), NONE)


def test_of_paths_that_are_equal_but_for_rounding_the_first_edge_wins():
    source, target = column([0, 0, 1, 2]), column([1, 2, 3, 3])
    cost = np.array([1.0, 2.0, 2.0, 1.0 + 1e-9])
    into = graph.index(target, 4)
    length, through = graph.longest_path(column(range(4)), into, source, cost, 1e-3)
    assert length.tolist() == [0, 1, 2, 3]
    assert through.tolist() == [-1, 0, 1, 2]
    assert graph.path_to(3, through, source).tolist() == [0, 2]


def test_a_topological_order_includes_isolated_nodes_and_rejects_cycles():
    order = acyclic_order(column([2, 1], np.int64), column([1, 0], np.int64), "abcd")
    assert order.tolist() == [2, 1, 0, 3]
    with pytest.raises(FastcommError, match="b waits for itself"):
        acyclic_order(column([2, 1], np.int64), column([1, 2], np.int64), "abcd")


def test_a_path_that_costs_more_than_it_gains_starts_again_at_zero():
    source, target, weight = column([0, 1]), column([1, 2]), column([-5, 3], np.int64)
    into = graph.index(target, 3)
    length, through = graph.longest_path(column(range(3)), into, source, weight, 0)
    assert length.tolist() == [0, 0, 3]
    assert through.tolist() == [-1, -1, 1]


def test_of_constraints_met_at_one_time_work_on_a_device_binds_then_the_last():
    first, source = column([0, 0, 0, 0, 3]), column([0, 1, 2])
    time = column([5, 5, 5, 6], np.int64)
    for is_device, bound in (([1, 0, 0, 0], 0), ([1, 1, 0, 0], 1), ([0, 0, 0, 0], 2)):
        flags = np.array(is_device, np.bool_)
        path, slack = graph.binding(3, first, source, time, flags)
        assert path.tolist() == [bound]
        assert slack.tolist() == [0]
