"""Test edits of the graph of a critical path: events, constraints, weights."""

import json

import networkx
import pytest
from builders import kineto_text as k
from builders.critical_path_traces import documents
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.compat import hta
from fastcomm.critical_path import saved
from fastcomm.critical_path.graph_edit import EventNode
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.search import analyze
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.options import Window
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

US = 1000
# The host launches four kernels on two streams, and waits until 113.
EVENTS = [
    k.event("aten::mm", "cpu_op", 0, 9, pid=100, tid=1),
    k.launch(2, 1),
    k.launch(4, 2),
    k.launch(6, 3),
    k.launch(8, 4),
    k.kernel("gemm", 10, 40, device=0, correlation=1),
    k.kernel("relu", 52, 28, device=0, correlation=2),
    k.kernel("copy", 20, 20, device=0, stream=9, correlation=3),
    k.kernel("norm", 82, 18, device=0, correlation=4),
    k.event("cudaDeviceSynchronize", "cuda_runtime", 10, 103, pid=100, tid=1),
]
GEMM, RELU, COPY, NORM, SYNC = 5, 6, 7, 8, 9


def found_in(path):
    return analyze(reader.read(path, TraceOptions(whole=True)), Window(annotation=""))


@pytest.fixture
def path(tmp_path):
    return found_in(k.write(tmp_path / "rank0.json", EVENTS))


def times(path):
    """Start and stop of each event in us, by name and id."""
    graph = path.graph
    table = path.events.describe(graph.event)
    result = {}
    for name, number, is_end, time in zip(
        table["name"].to_pylist(),
        table["id"].to_pylist(),
        graph.is_end.tolist(),
        ((graph.time - graph.time.min(initial=1 << 62)) / US).tolist(),
        strict=True,
    ):
        result[name, number, is_end] = time
    return result


def span(path, number):
    shown = {(n, is_end): time for (_, n, is_end), time in times(path).items()}
    return shown[number, False], shown[number, True]


def test_without_a_change_times_are_those_measured(path):
    again = path.edit().recompute()
    assert times(again) == times(path)
    assert again.length_ns == path.length_ns
    assert again.event_ids == path.event_ids


def test_a_removed_event_lets_its_successor_follow_its_predecessor(path):
    after = path.edit().remove(RELU).recompute()
    # The gaps of 2 us before and after it remain.
    assert span(after, NORM) == (54, 72)
    assert RELU not in [number for _, number, _ in times(after)]
    assert after.wall_ns == (113 - 28) * US


def test_a_new_edge_delays_its_target(path):
    after = path.edit().add_edge(RELU, COPY, 5 * US).recompute()
    assert span(after, COPY) == (85, 105)
    begins = path.edit().add_edge(EventNode(RELU, is_end=False), COPY).recompute()
    assert span(begins, COPY) == (52, 72)


def test_without_its_edges_an_event_begins_as_its_launch_allows(path):
    after = path.edit().remove_edge(GEMM, RELU).recompute()
    start, stop = span(after, RELU)
    assert start < 52
    assert stop - start == 28
    assert span(after, NORM)[0] < 82


def test_weights_and_durations_are_set(path):
    assert span(path.edit().set_weight(GEMM, RELU, 7 * US).recompute(), RELU) == (57, 85)
    after = path.edit().set_duration(GEMM, 10 * US).recompute()
    assert span(after, GEMM) == (10, 20)
    assert span(after, RELU) == (22, 50)


def test_a_delay_is_inserted_before_an_event(path):
    after = path.edit().delay(NORM, 3 * US).recompute()
    assert span(after, NORM) == (85, 103)
    assert span(after, SYNC)[1] == span(path, SYNC)[1] + 3


def test_a_new_event_takes_its_time(path):
    edit = path.edit().add_event("check", 50 * US, after=[COPY], before=[NORM])
    after = edit.recompute()
    shown = {(name, is_end): time for (name, _, is_end), time in times(after).items()}
    assert (shown["check", False], shown["check", True]) == (40, 90)
    assert span(after, NORM) == (90, 108)
    assert "check" in after.breakdown["name"].to_pylist()
    # It can be named in further changes.
    assert span(edit.set_duration("check", 0).recompute(), NORM) == (82, 100)


def test_work_moves_to_another_stream(path):
    after = path.edit().move(RELU, 9).recompute()
    # The norm follows the gemm with the gap that was before it, the relu the copy at once.
    assert span(after, NORM) == (52, 70)
    assert span(after, RELU) == (40, 68)
    table = after.events.describe(after.graph.event)
    (streams,) = (
        {
            stream
            for stream, number in zip(
                table["stream"].to_pylist(), table["id"].to_pylist(), strict=True
            )
            if number == RELU
        },
    )
    assert streams == {9}
    alone = path.edit().move(RELU, 11).recompute()
    assert span(alone, RELU)[0] < 20
    back = path.edit().move(COPY, 7).recompute()
    # Between the gemm and the relu, with their gap around it.
    assert span(back, COPY) == (52, 72)
    assert span(back, RELU) == (74, 102)


def test_an_edited_path_is_saved_and_edited_again(path, tmp_path):
    after = path.edit().delay(NORM, 3 * US).recompute()
    again = saved.load(after.save(str(tmp_path / "edited")))
    assert times(again) == times(after)
    loaded = CriticalPath.of(again)
    assert times(loaded.edit().recompute()) == times(after)
    assert loaded.edit().remove(NORM).recompute().wall_ns < after.wall_ns


def longest(graph):
    """When each node is reached, by networkx."""
    reached = {}
    for node in networkx.topological_sort(graph):
        arrivals = [
            reached[before] + graph[before][node]["weight"]
            for before in graph.predecessors(node)
        ]
        reached[node] = max(arrivals, default=0)
    return reached


@given(documents(), st.data())
def test_times_are_those_of_networkx_after_any_changes(folder, document, data):
    file = folder / "rank0.json"
    file.write_text(json.dumps(document))
    try:
        found = found_in(file)
    except FastcommError:
        return
    edit = found.edit()
    ids = sorted({number for _, number, _ in times(found)})
    for number in data.draw(st.sets(st.sampled_from(ids), max_size=4)) if ids else ():
        if data.draw(st.booleans()):
            edit.remove(number)
        else:
            edit.add_event(f"new {number}", data.draw(st.integers(0, 9000)), after=[number])
    graph = edit.to_networkx()
    after = edit.recompute().graph
    expected = sorted(longest(graph).values())
    first = min(after.time.tolist(), default=0)
    assert sorted((after.time - first).tolist()) == expected
    assert times(found.edit().from_networkx(found.edit().to_networkx()).recompute()) == (
        times(found.edit().recompute())
    )


@given(documents(), st.randoms())
def test_a_removed_event_is_one_without_time(folder, document, random):
    file = folder / "rank0.json"
    file.write_text(json.dumps(document))
    try:
        found = found_in(file)
    except FastcommError:
        return
    ids = sorted({number for _, number, _ in times(found)})
    if not ids:
        return
    number = random.choice(ids)
    graph = found.edit().to_networkx()
    if any(row["event"] == number and not graph.in_degree(n) for n, row in graph.nodes.items()):
        return  # what waited for the first event alone waits for nothing then
    try:
        empty = found.edit().set_duration(number, 0).recompute()
    except ConfigError:  # its time is that of others
        return
    removed = found.edit().remove(number).recompute()
    if not len(removed.graph.time):
        return
    graph, other = removed.graph, empty.graph
    rest = empty.events.ids(other.event) != number
    begin = graph.time.min() - other.time[rest].min()
    assert sorted(graph.time.tolist()) == sorted((other.time[rest] + begin).tolist())


def test_a_graph_changed_by_networkx_comes_back(path):
    edit = path.edit()
    graph = edit.to_networkx()
    (end,) = (n for n, row in graph.nodes.items() if row["event"] == GEMM and row["is_end"])
    (start,) = (
        n for n, row in graph.nodes.items() if row["event"] == RELU and not row["is_end"]
    )
    graph[end][start]["weight"] = 12 * US
    assert span(edit.from_networkx(graph).recompute(), RELU) == (62, 90)
    graph.remove_nodes_from([n for n, row in graph.nodes.items() if row["event"] == NORM])
    assert NORM not in [number for _, number, _ in times(edit.from_networkx(graph).recompute())]
    graph.add_node("other")
    with pytest.raises((ConfigError, ValueError)):
        edit.from_networkx(graph)


def test_several_ranks_are_edited_together(tmp_path):
    write(Job.of(2, steps=2, layers=1, micro_batches=1), tmp_path)
    joined = fastcomm.open(tmp_path).critical_path()
    assert joined.is_joined
    plain = joined.edit().recompute()
    assert plain.wall_ns == joined.wall_ns
    longest_rows = joined.breakdown.to_pylist()
    row = max(
        (row for row in longest_rows if row["bound_by"] == "gpu_compute_bound"),
        key=lambda row: row["duration_ns"],
    )
    name = (row["rank"], row["event"])
    slower = joined.edit().delay(name, 10**6).recompute()
    assert slower.wall_ns == joined.wall_ns + 10**6
    assert joined.edit().remove(name).recompute().wall_ns < joined.wall_ns
    assert slower.ranks == joined.ranks


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda edit: edit.remove(99), "no start of an event 99"),
        (lambda edit: edit.remove(RELU).remove(RELU), "no start of an event 6"),
        (lambda edit: edit.add_edge(RELU, COPY, -1), "a weight is negative"),
        (lambda edit: edit.add_edge(RELU, COPY, 1 << 62), "no time fits it"),
        (lambda edit: edit.delay(RELU, -(10**9)), "a weight is negative"),
        (lambda edit: edit.add_edge(RELU, COPY, kind="wish"), "unknown kind 'wish'"),
        (lambda edit: edit.remove_edge(COPY, RELU), "no edge from 'copy' to 'relu'"),
        (lambda edit: edit.move(0, 9), "event 0 is not on a device"),
        (lambda edit: edit.delay(0, 1), "event 0 waits for nothing"),
        (lambda edit: edit.add_event("lost", 1), "neither after nor before"),
        (
            lambda edit: edit.add_event("a", 1, after=[0]).add_event("a", 1, after=[0]),
            "there is an event 'a' already",
        ),
        (lambda edit: edit.add_edge(NORM, GEMM).recompute(), "cyclic dependencies"),
    ],
)
def test_an_impossible_change_is_an_error(path, change, said):
    with pytest.raises(FastcommError, match=said):
        change(path.edit())


def test_graphs_by_the_rules_of_hta_are_refused(tmp_path):
    trace = reader.read(k.write(tmp_path / "rank0.json", EVENTS), TraceOptions(whole=True))
    with pytest.raises(FastcommError, match="find the path without compat"):
        hta.find_path(trace, Window(annotation="")).edit()


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joined")
    write(Job.of(4, steps=2, layers=1, micro_batches=2), folder)
    return fastcomm.open(folder).critical_path(step=11)


def works(path):
    """Rank, id, kind, operation and duration of each event of several ranks."""
    starts = ~path.graph.is_end
    ranks = [path.ranks[k] for k in path.across.rank_of[starts].tolist()]
    rows = path.events.describe(path.graph.event[starts]).to_pylist()
    return {(rank, row["id"]): row for rank, row in zip(ranks, rows, strict=True)}


def test_a_scaled_kernel_is_a_shorter_event(joined):
    """A what-if changes the weights that an edit of every event changes one by one."""
    edit = joined.edit()
    for event, row in works(joined).items():
        if row["kind"] == "kernel" and row["op"] is None:
            edit.set_duration(event, round((row["stop"] - row["start"]) * 0.5))
    after = edit.recompute()
    assert after.wall_ns == joined.what_if(scale=["compute=0.5"]).after_ns < joined.wall_ns


def test_removed_gaps_are_edges_without_weight(joined):
    graph, edit = joined.edit().to_networkx(), joined.edit()
    for _, _, edge in graph.edges(data=True):
        if edge["kind"] == "kernel_kernel":
            edge["weight"] = 0
    after = edit.from_networkx(graph).recompute()
    assert after.wall_ns == joined.what_if(remove=["gaps"]).after_ns


def test_an_edited_path_lists_the_skipped_ranks(tmp_path):
    write(Job.of(4, steps=2, layers=1, micro_batches=1), tmp_path)
    (tmp_path / "rank3.pt.trace.json.gz").write_bytes(b"")
    joined = fastcomm.open(tmp_path, keep_going=True).critical_path()
    assert joined.edit().recompute().skipped == joined.skipped != ()
