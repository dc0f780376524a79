"""Test waits across ranks against the definition, for every operation."""

from collections import Counter
from types import SimpleNamespace

import networkx
import pyarrow as pa
import pytest
from builders.examples import fewer
from builders.made_traces import table
from hypothesis import given
from hypothesis import strategies as st
from oracles import joined as oracle

from fastcomm.critical_path.search import joined
from fastcomm.graph.graph import measured_delays
from fastcomm.options import Window
from fastcomm.ranks import clocks
from fastcomm.trace import schema
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.trace import Meta, Trace

WHOLE = Window(annotation="")
RANKS = (0, 1, 2)
# Global ranks, so that a place in the group is another number.
NAMED = {0: 10, 1: 11, 2: 12}


class Clock:
    """Ranks that do one thing after the other, and how the times of all follow."""

    def __init__(self, ranks=RANKS):
        self.rows = [[] for _ in ranks]
        self.now = [0 for _ in ranks]

    def add(self, rank, start, stop, op=None, **said):
        row = {"group": RANKS, "root": None, "sends": (), "receives": (), **said}
        self.rows[rank].append(SimpleNamespace(start=start, stop=stop, op=op, **row))
        self.now[rank] = stop

    def compute(self, rank, length, gap=0):
        self.add(rank, self.now[rank] + gap, self.now[rank] + gap + length)

    def together(self, op, lengths, root=None):
        starts = list(self.now)
        for rank in RANKS:
            needed = {rank}
            if op in oracle.TOGETHER or (op == "Reduce" and rank == root):
                needed = set(RANKS)
            elif op == "Broadcast":
                needed |= {root}
            stop = max(starts[each] for each in needed) + lengths[rank]
            self.add(rank, starts[rank], stop, op, root=root)

    def exchange(self, moves, lengths):
        """Messages of several ranks at once: pairs of a sender and a receiver."""
        starts = list(self.now)
        for rank in sorted({each for move in moves for each in move}):
            sends = tuple(b for a, b in moves if a == rank)
            receives = tuple(a for a, b in moves if b == rank)
            stop = max(starts[each] for each in (rank, *receives)) + lengths[rank]
            self.add(rank, starts[rank], stop, "SendRecv", sends=sends, receives=receives)


# Ends of a collective that are further apart would move the clocks.
LONG = clocks.LEAST_NS // 4
LENGTHS = st.tuples(*(st.integers(1, LONG) for _ in RANKS))
PAIRS = st.tuples(st.sampled_from(RANKS), st.sampled_from(RANKS)).filter(
    lambda pair: pair[0] != pair[1]
)
STEPS = st.one_of(
    st.tuples(
        st.just("compute"), st.sampled_from(RANKS), st.integers(1, LONG), st.integers(0, 99)
    ),
    st.tuples(st.just("together"), st.sampled_from(["AllReduce", "AllGather"]), LENGTHS),
    st.tuples(
        st.just("together"),
        st.sampled_from(["Broadcast", "Reduce"]),
        LENGTHS,
        st.sampled_from(RANKS),
    ),
    st.tuples(st.just("exchange"), st.lists(PAIRS, min_size=1, max_size=4), LENGTHS),
)


@st.composite
def jobs(draw):
    clock = Clock()
    for rank in RANKS:
        clock.compute(rank, draw(st.integers(1, LONG)))
    for name, *words in draw(st.lists(STEPS, max_size=12)):
        getattr(clock, name)(*words)
    return clock.rows


def numbers(rows):
    """The place of each communication among those of its operation, and its row."""
    seen = Counter()
    for k, row in enumerate(rows):
        if row.op:
            yield seen[row.op], k
            seen[row.op] += 1


def trace(rank, rows):
    """The rows of a rank as a trace, all on one stream."""
    comm = [k for k, row in enumerate(rows) if row.op]
    starts, stops = [row.start for row in rows], [row.stop for row in rows]

    def ranks(name):
        return [
            [NAMED[each] for each in getattr(rows[k], name)]
            if rows[k].op == "SendRecv"
            else None
            for k in comm
        ]

    return Trace.of(
        events=table(
            {
                "start": starts,
                "stop": stops,
                "kind": [schema.KIND["kernel"]] * len(rows),
                "name": pa.array([f"k{k}" for k in range(len(rows))]).dictionary_encode(),
                "lane": [0] * len(rows),
                "correlation": [None] * len(rows),
                "offset": [None] * len(rows),
            },
            schema.EVENTS,
        ),
        comm=table(
            {
                "start": [starts[k] for k in comm],
                "stop": [stops[k] for k in comm],
                "op": [schema.OP[rows[k].op] for k in comm],
                "tag": [TAG["PP"]] * len(comm),
                "tag_source": [0] * len(comm),
                "group": [0] * len(comm),
                "event": comm,
                "root": [NAMED.get(rows[k].root) for k in comm],
                "sends_to": ranks("sends"),
                "receives_from": ranks("receives"),
                # Sequences of a few ns look alike everywhere: numbers tell what is one.
                "seq": [None if rows[k].op == "SendRecv" else n for n, k in numbers(rows)],
                **{
                    name: [None] * len(comm)
                    for name in ("stream", "msg_bytes", "payload_bytes", "bus_bytes")
                },
            },
            schema.COMM,
        ),
        lanes=table(
            {"process": ["0"], "thread": ["7"], "device": [0], "is_device": [True]},
            schema.LANES,
        ),
        groups=table(
            {
                "name": ["g"],
                "description": [None],
                "ranks": [sorted(NAMED.values())],
                "size": [len(NAMED)],
                "tag": [TAG["PP"]],
                "tag_source": [0],
                "candidates": [[]],
            },
            schema.GROUPS,
        ),
        iterations=table(
            {"number": [0], "start": [0], "stop": [max(stops)]}, schema.ITERATIONS
        ),
        args=pa.table({"bytes": pa.nulls(len(rows), pa.int64())}),
        meta=Meta(rank=NAMED[rank], world_size=3, format="made", path="nowhere"),
    )


def found_of(rows):
    return joined({NAMED[rank]: trace(rank, mine) for rank, mine in enumerate(rows)}, WHOLE)


def is_joined(rows):
    return any(row.op for mine in rows for row in mine)


@given(jobs())
def test_the_joined_path_agrees_with_the_definition(rows):
    if not is_joined(rows):
        return
    found = found_of(rows)
    assert found.across.violations == 0
    steps = [
        (row["rank"] - 10, row["start_ns"], row["stop_ns"])
        for row in found.breakdown.to_pylist()
        if row["duration_ns"]
    ]
    assert sum(stop - start for _, start, stop in steps) == found.wall_ns
    starts = [row.start for mine in rows for row in mine[1:]]
    if len(set(starts)) == len(starts):  # at ties several paths are right
        assert steps == oracle.path(rows)
    wanted = oracle.slack(rows)
    places = {
        (NAMED[rank], row.start): (rank, k)
        for rank, mine in enumerate(rows)
        for k, row in enumerate(mine)
    }
    for row in found.across.collectives.to_pylist():
        rank, k = places[row["rank"], row["start"]]
        assert row["arrived"] == oracle.arrived(rows, rank, k)
        assert row["wait_ns"] == row["arrived"] - row["start"]
        assert row["slack_ns"] == wanted[rank, k]


def chain(graph, source):
    """The longest chain of edges from a node on."""
    order = networkx.topological_sort(graph.reverse())
    far = {}
    for node in order:
        far[node] = max((far[n] + graph[node][n]["weight"] for n in graph[node]), default=0)
    return far[source]


@fewer(2)
@given(jobs())
def test_slack_is_the_step_minus_the_longest_chain_through_a_node(rows):
    if not is_joined(rows):
        return
    found = found_of(rows)
    path, graph = found, networkx.DiGraph()
    graph.add_nodes_from(range(len(path.graph.time)))
    edges = zip(
        path.graph.source,
        path.graph.target,
        measured_delays(path.graph, path.on_device),
        strict=True,
    )
    for source, target, weight in edges:
        graph.add_edge(int(source), int(target), weight=int(weight))
    end = int(path.graph.time.max())
    for node, ns in enumerate(found.across.slack.tolist()):
        assert ns == end - chain(graph, node) - int(path.graph.time[node])
    assert found.across.slack.min() == 0 <= found.across.slack[path.valid_path.nodes].max()
    assert (found.across.slack[path.valid_path.nodes] == 0).all()
    by_rank = found.by_rank().to_pylist()
    assert min(row["slack_ns"] for row in by_rank) == 0


def parts_of(found, op):
    return [row for row in found.across.collectives.to_pylist() if row["op"] == op]


def test_a_broadcast_waits_only_for_its_root():
    clock = Clock()
    for rank, length in ((0, 50), (1, 10), (2, 90)):
        clock.compute(rank, length)
    clock.together("Broadcast", (5, 5, 5), root=0)
    found = found_of(clock.rows)
    root, early, late = parts_of(found, "Broadcast")
    assert (root["wait_ns"], early["wait_ns"], late["wait_ns"]) == (0, 40, 0)
    # The root is not the last, since one of the receivers did not have to wait for it.
    assert [each["is_last"] for each in (root, early, late)] == [False, False, False]
    clock = Clock()
    for rank, length in ((0, 90), (1, 10), (2, 50)):
        clock.compute(rank, length)
    clock.together("Broadcast", (5, 5, 5), root=0)
    root = parts_of(found_of(clock.rows), "Broadcast")[0]
    assert (root["is_last"], root["wait_caused_ns"]) == (True, 40)


def test_in_a_reduce_only_the_root_waits():
    clock = Clock()
    for rank, length in ((0, 50), (1, 10), (2, 90)):
        clock.compute(rank, length)
    clock.together("Reduce", (6, 5, 5), root=0)
    found = found_of(clock.rows)
    root, early, late = parts_of(found, "Reduce")
    assert (root["wait_ns"], early["wait_ns"], late["wait_ns"]) == (40, 0, 0)
    assert (late["is_last"], late["wait_caused_ns"]) == (True, 40)
    assert [row["rank"] for row in found.breakdown.to_pylist()][-1] == 10


def test_a_send_that_ends_before_its_receive_does_not_wait():
    clock = Clock()
    for rank, length in ((0, 10), (1, 50), (2, 20)):
        clock.compute(rank, length)
    clock.exchange([(0, 1)], (5, 5, 5))
    found = found_of(clock.rows)
    sent, received = parts_of(found, "SendRecv")
    assert (sent["stop"], sent["wait_ns"], received["wait_ns"]) == (15, 0, 0)
    assert found.across.violations == 0


def test_a_receive_before_its_send_is_a_violation():
    clock = Clock()
    for rank, length in ((0, 50), (1, 10), (2, 20)):
        clock.compute(rank, length)
    clock.exchange([(0, 1)], (5, 5, 5))
    clock.rows[1][-1].stop = 40
    found = found_of(clock.rows)
    assert found.across.violations == 1
    assert (
        "1 collective events end before the last arrival, although clocks are aligned"
        in found.about.notes
    )


def test_an_unmatched_message_is_not_joined_and_shifts_no_other_message():
    clock = Clock()
    for rank, length in ((0, 50), (1, 10), (2, 20)):
        clock.compute(rank, length)
    clock.together("AllReduce", (5, 5, 5))
    for _ in range(3):
        clock.exchange([(0, 1)], (5, 5, 5))
    lost = clock.rows[1].pop(-2)
    found = found_of(clock.rows)
    messages = parts_of(found, "SendRecv")
    assert lost.stop not in {each["stop"] for each in messages}
    ends = {}
    for each in messages:
        ends.setdefault(each["instance"], []).append((each["rank"], each["stop"]))
    assert list(ends.values()) == [[(10, 60), (11, 60)], [(10, 70), (11, 70)]]
    (note,) = (note for note in found.about.notes if "messages" in note)
    assert note == "1 messages lack their other side and are not joined"


@pytest.mark.parametrize("said", [None, 7])
def test_a_broadcast_without_a_root_is_not_joined(said):
    clock = Clock()
    for rank in RANKS:
        clock.compute(rank, 10)
    clock.together("AllReduce", (5, 5, 5))
    clock.together("Broadcast", (5, 5, 5), root=0)
    for rows in clock.rows:
        rows[-1].root = said
    found = found_of(clock.rows)
    assert not parts_of(found, "Broadcast")
    assert any("root or peers are unknown" in note for note in found.about.notes)


def test_a_broadcast_with_two_roots_is_a_contradiction():
    clock = Clock()
    for rank in RANKS:
        clock.compute(rank, 10)
    clock.together("AllReduce", (5, 5, 5))
    clock.together("Broadcast", (5, 5, 5), root=0)
    clock.rows[2][-1].root = 2
    found = found_of(clock.rows)
    assert any("do not match in size, root or `Comms Id`" in note for note in found.about.notes)
