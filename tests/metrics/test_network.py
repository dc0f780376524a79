"""Test traffic by level of the network, inside and between nodes."""

import math
from dataclasses import asdict

import pyarrow as pa
import pytest
from builders.made_traces import table
from hypothesis import given
from hypothesis import strategies as st
from oracles import network as oracle_network

from fastcomm.metrics.computation import compute
from fastcomm.metrics.network import NodeFacts, find_nodes, network
from fastcomm.metrics.partial import Partial, merge
from fastcomm.metrics.step_counts import StepCounts
from fastcomm.trace import schema
from fastcomm.trace.parallelisms import TAG, TAGS
from fastcomm.trace.trace import Meta, Trace

OPS = ("AllReduce", "AllGather", "AllToAll", "SendRecv", "Broadcast", "Barrier", "Gather")


def trace(rank, host, groups, rows, world=None):
    """A rank with these process groups, whose events are `rows`; each lasts `ns` from 10 i."""
    start = [10 * place for place in range(len(rows))]
    stop = [begin + row["ns"] for begin, row in zip(start, rows, strict=True)]
    sent = [
        [row["partner"]] if row["partner"] is not None and row["sends"] else [] for row in rows
    ]
    received = [
        [row["partner"]] if row["partner"] is not None and not row["sends"] else []
        for row in rows
    ]
    names = sorted(groups)
    return Trace.of(
        events=table(
            {
                "start": start,
                "stop": stop,
                "kind": [schema.KIND["kernel"]] * len(rows),
                "name": pa.array(["nccl"] * len(rows), pa.string()).dictionary_encode(),
                "lane": [0] * len(rows),
                "correlation": [None] * len(rows),
                "offset": [None] * len(rows),
            },
            schema.EVENTS,
        ),
        lanes=table(
            {"process": ["0"], "thread": ["7"], "device": [0], "is_device": [True]},
            schema.LANES,
        ),
        comm=table(
            {
                "op": [schema.OP[row["op"]] for row in rows],
                "start": start,
                "stop": stop,
                "stream": [20] * len(rows),
                "group": [
                    None if row["group"] is None else names.index(row["group"]) for row in rows
                ],
                "seq": [None] * len(rows),
                "tag": [TAG[row["tag"]] for row in rows],
                "tag_source": [0] * len(rows),
                **{
                    f"{name}_bytes": [row["bytes"] for row in rows]
                    for name in ("msg", "payload", "bus")
                },
                "event": list(range(len(rows))),
                "root": [None] * len(rows),
                "sends_to": sent,
                "receives_from": received,
            },
            schema.COMM,
        ),
        groups=table(
            {
                "name": names,
                "description": names,
                "ranks": [groups[name] for name in names],
                "size": [len(groups[name]) for name in names],
                "tag": [0] * len(names),
                "tag_source": [0] * len(names),
                "candidates": [[]] * len(names),
            },
            schema.GROUPS,
        ),
        iterations=table(
            {"number": [1], "start": [0], "stop": [max([*stop, 0]) + 1]}, schema.ITERATIONS
        ),
        meta=Meta(rank=rank, world_size=world, format="made", path=f"{rank}", host=host),
    )


def event(rank, op, count, **others):
    said = {"ns": 100, "group": None, "partner": None, "sends": True, "tag": "DP", "size": 2}
    return {"rank": rank, "op": op, "bytes": count, **said, **others}


@st.composite
def jobs(draw):
    """Nodes of ranks, groups, and events of every kind, some of them unknown."""
    ranks = draw(st.integers(2, 7))
    node_of = {rank: draw(st.integers(0, 2)) for rank in range(ranks)}
    # Ranks 8 and 9 are members that were not read.
    members = st.lists(
        st.sampled_from([*range(ranks), 8, 9]), min_size=1, max_size=5, unique=True
    )
    groups = {
        f"group{place}": sorted(draw(members)) for place in range(draw(st.integers(0, 4)))
    }
    events = []
    for rank in range(ranks):
        own = [name for name in groups if rank in groups[name]]
        for _ in range(draw(st.integers(1, 4))):
            group = draw(st.sampled_from([None, *own]))
            op = draw(st.sampled_from(OPS))
            partner = draw(st.sampled_from([None, 9, *range(ranks)]))
            events.append(
                event(
                    rank,
                    op,
                    draw(st.none() | st.integers(0, 10**9)),
                    ns=draw(st.integers(0, 1000)),
                    group=group,
                    partner=partner if op == "SendRecv" else None,
                    sends=draw(st.booleans()),
                    tag=draw(st.sampled_from(TAGS)),
                    size=None if group is None else len(groups[group]),
                )
            )
    return node_of, groups, events


def merged(node_of, groups, events, *, stacked=False, world=None):
    """What is kept of the ranks of a job, read each by itself or all at once."""
    traces = [
        trace(
            rank,
            f"host{node}" if node is not None else None,
            {name: own for name, own in groups.items() if rank in own},
            [row for row in events if row["rank"] == rank],
            world,
        )
        for rank, node in node_of.items()
    ]
    return merge([Partial.of(*traces)] if stacked else [Partial.of(each) for each in traces])


def measured(*job, world=None, facts=None):
    """The metrics of a job."""
    return compute(merged(*job, world=world), byte_kind="payload", link=None, node_facts=facts)


def close(found, wanted):
    return math.isclose(found, float(wanted), rel_tol=1e-9, abs_tol=1e-9)


@given(jobs(), st.booleans())
def test_every_byte_is_followed_to_the_node_that_receives_it(job, stacked):
    node_of, groups, events = job
    numbers = {}
    for rank in sorted(node_of):
        numbers.setdefault(node_of[rank], len(numbers))
    numbered = {rank: numbers[node] for rank, node in node_of.items()}
    levels, pairs, unknown = oracle_network.network(events, groups, numbered)
    facts = NodeFacts(limits={"node": 4e9, "network": 1e9})
    part = merged(node_of, groups, events, stacked=stacked, world=99)
    nodes = find_nodes({note.rank: note.host for note in part.notes}, facts, 99)
    counts = StepCounts.of(part.iterations)
    found, table = network(part.sent, part.members, nodes, facts, counts=counts)
    assert table.to_pylist() == [asdict(pair) for pair in found.pairs]
    assert (found.unknown, found.nodes_by) == (None, "hosts")
    uses = {(use.level, use.tag): use for use in found.levels if use.events}
    assert uses.keys() == levels.keys()
    for key, row in levels.items():
        use = uses[key]
        assert use.events == row["events"]
        assert close(use.bytes_per_step_per_gpu, row["bytes"] / len(node_of))
        if not row["ns"]:
            assert use.bandwidth is use.utilization is None
            continue
        assert close(use.bandwidth, row["rated"] * 10**9 / row["ns"])
        assert close(use.utilization, use.bandwidth / facts.limits[use.level])
    assert {(pair.source, pair.target) for pair in found.pairs} == pairs.keys()
    for pair in found.pairs:
        row = pairs[pair.source, pair.target]
        assert pair.events == row["events"]
        assert close(pair.bytes_per_step, row["bytes"])
        assert (pair.bandwidth is None) == (not row["ns"])
        assert not row["ns"] or close(pair.bandwidth, row["rated"] * 10**9 / row["ns"])
    assert found.undivided_events == unknown["events"]
    assert close(found.undivided_bytes_per_step_per_gpu, unknown["bytes"] / len(node_of))


GROUPS = {"tp0": [0, 1], "tp1": [2, 3], "dp": [0, 2], "all": [0, 1, 2, 3]}
TWO_NODES = {0: 0, 1: 0, 2: 1, 3: 1}
# Each rank sends 1200 bytes in each event, for 100 ns.
EVENTS = [
    *(event(rank, "AllGather", 1200, group=f"tp{rank // 2}", tag="TP") for rank in range(4)),
    *(event(rank, "ReduceScatter", 1200, group="dp") for rank in (0, 2)),
    *(event(rank, "AllReduce", 1200, group="all", size=4) for rank in range(4)),
    *(event(rank, "AllToAll", 1200, group="all", tag="EP", size=4) for rank in range(4)),
    event(1, "SendRecv", 1200, group="all", partner=3, tag="PP", size=4),
    event(3, "SendRecv", 1200, group="all", partner=1, sends=False, tag="PP", size=4),
]


def test_a_job_on_two_nodes_has_exact_traffic():
    facts = NodeFacts(limits={"node": 120e9, "network": 24e9})
    metrics = measured(TWO_NODES, GROUPS, EVENTS, facts=facts)
    found = metrics.network
    assert [(use.level, use.tag, use.events) for use in found.levels] == [
        *(("node", None, 12), ("node", "DP", 4), ("node", "TP", 4), ("node", "EP", 4)),
        *(("network", None, 11), ("network", "DP", 6)),
        *(("network", "PP", 1), ("network", "EP", 4)),
    ]
    per_gpu = {(use.level, use.tag): use.bytes_per_step_per_gpu for use in found.levels}
    # Of an all-reduce half leaves the node, of an all-to-all two parts of three.
    assert per_gpu == pytest.approx(
        {
            ("node", "TP"): 1200,
            ("node", "DP"): 600,
            ("node", "EP"): 400,
            ("node", None): 2200,
            ("network", "DP"): 600 + 600,
            ("network", "EP"): 800,
            ("network", "PP"): 300,
            ("network", None): 2300,
        }
    )
    of_all = {use.level: use for use in found.levels if use.tag is None}
    assert of_all["node"].bandwidth == pytest.approx(4 * 2200 / (12 * 100) * 1e9)
    assert of_all["network"].utilization == pytest.approx(4 * 2300 / (11 * 100) / 24)
    assert [(pair.source, pair.target, pair.bytes_per_step) for pair in found.pairs] == [
        (0, 1, pytest.approx(1200 + 1200 + 1600 + 1200)),
        (1, 0, pytest.approx(1200 + 1200 + 1600)),
    ]
    by_name = {row["description"]: row["level"] for row in metrics.to_dict()["groups"]}
    assert by_name == {"tp0": "node", "tp1": "node", "dp": "network", "all": "both"}


def test_without_names_of_hosts_levels_are_unknown_and_the_reason_is_given():
    found = measured(dict.fromkeys(range(4)), GROUPS, EVENTS)
    document = found.network.to_dict()
    assert "no trace names its host: pass --gpus-per-node, or --cluster" in document["unknown"]
    assert (document["levels"], document["node_pairs"], document["nodes"]) == ([], [], [])
    assert document["undivided_events"] is None
    assert {row["level"] for row in found.to_dict()["groups"]} == {None}


def test_a_rank_that_names_no_host_is_named():
    found = measured({0: 0, 1: 0, 2: None, 3: 1}, GROUPS, EVENTS).network
    assert found.unknown == "rank 2 names no host: pass --cluster or --gpus-per-node"


def test_ranks_fill_nodes_in_order_where_the_user_says_so():
    nodes = measured(TWO_NODES, GROUPS, EVENTS).network
    stated = measured(dict.fromkeys(range(4)), GROUPS, EVENTS, facts=NodeFacts(gpus_per_node=2))
    by_cluster = measured(
        dict.fromkeys(range(4)), GROUPS, EVENTS, facts=NodeFacts(cluster_gpus=2)
    )
    assert nodes.levels == stated.network.levels == by_cluster.network.levels
    assert nodes.pairs == stated.network.pairs
    by = [each.nodes_by for each in (nodes, stated.network, by_cluster.network)]
    assert by == ["hosts", "gpus_per_node", "cluster"]
    assert not any("host" in warning for warning in stated.warnings)


@pytest.mark.parametrize(
    ("hosts", "facts", "by", "warning"),
    [
        (
            [0, 0, 0, 0],
            NodeFacts(cluster_gpus=2),
            "cluster",
            "one host for 4 ranks, but a node",
        ),
        (
            [0, 0, 0, 0],
            NodeFacts(gpus_per_node=2),
            "gpus_per_node",
            "for ranks of several nodes",
        ),
        ([0, 0, 1, 1], NodeFacts(cluster_gpus=72), "hosts", "pass --gpus-per-node 72"),
        ([0, 0, 1, 1], NodeFacts(cluster_gpus=8), "hosts", None),
        ([0, 0, 1, 1], NodeFacts(gpus_per_node=4), "gpus_per_node", None),
    ],
)
def test_names_of_hosts_that_contradict_what_is_stated_are_a_warning(hosts, facts, by, warning):
    found = measured(dict(enumerate(hosts)), GROUPS, EVENTS, facts=facts)
    assert found.network.nodes_by == by
    about = [text for text in found.warnings if "host" in text]
    assert len(about) == (warning is not None)
    assert warning is None or warning in about[0]


def test_on_one_node_all_traffic_is_inside_whatever_is_unknown():
    events = [
        event(0, "AllReduce", 100, tag="OTHER", size=None),
        event(1, "SendRecv", 100, size=None),
    ]
    found = measured({0: 0, 1: 0}, {}, events, world=2).network
    assert found.undivided_events == 0
    assert [(use.level, use.events) for use in found.levels if use.tag is None] == [
        ("node", 2),
        ("network", 0),
    ]
    alone = measured({0: 0, 1: 0}, {}, events, world=4).network
    assert (alone.undivided_events, alone.undivided_bytes_per_step_per_gpu) == (2, 100.0)
