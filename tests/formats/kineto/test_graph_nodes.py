"""Test the order of nodes of CUDA graphs: arrows between them, and lanes that hide streams."""

import json
from time import perf_counter

import pytest
from builders import kineto_text as k
from builders.path_events import call, read, work
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.formats.kineto import graph_nodes

FIRST_ID = 1 << 40
NODES = st.integers(2, 8)


def node(number, ts, dur, stream, cat="kernel", **args):
    row = work(f"node{number}", ts, dur, 1, stream, cat=cat)
    row["args"] |= {"graph id": 3, "graph node id": number, **args}
    return row


def arrow(number, source, target, text=False):
    """Begin and end of an arrow from the end of a node to the start of another one."""
    quoted = str if text else lambda value: value
    common = {"id": quoted(FIRST_ID + number), "cat": "ac2g", "name": "ac2g"}

    def half(phase, row, ts):
        return {
            "ph": phase,
            **common,
            **{key: quoted(row[key]) for key in ("pid", "tid")},
            **ts,
        }

    end = round(source["ts"] + source["dur"], 3)
    return [
        half("s", source, {"ts": quoted(end)}),
        half("f", target, {"ts": quoted(target["ts"]), "bp": "e"}),
    ]


def order_of(trace):
    """By name of a node: the names of those that it waits for, None if that is unknown."""
    args, names = trace.args, trace.events["name"].to_pylist()
    if "after" not in args.column_names:
        return dict.fromkeys(names)
    by_position = dict(zip(args["position"].to_pylist(), names, strict=True))
    return {
        name: None if text is None else {by_position[int(own)] for own in text.split()}
        for name, text in zip(names, args["after"].to_pylist(), strict=True)
    }


@st.composite
def replays(draw):
    """Nodes one after the other, some of them no work, and arrows to later ones."""
    rows, ts = [], 10.0
    for number in range(draw(NODES)):
        is_event = draw(st.integers(0, 3)) == 0
        dur = 0 if is_event else draw(st.sampled_from([0.75, 3.0, 7.123]))
        cat = "graph_event_node" if is_event else "kernel"
        rows.append(node(number, round(ts, 3), dur, draw(st.integers(20, 22)), cat))
        ts += dur + draw(st.sampled_from([0.004, 1.25]))
    later = st.integers(1, len(rows) - 1)
    pairs = draw(
        st.sets(later.flatmap(lambda to: st.tuples(st.integers(0, to - 1), st.just(to))))
    )
    return rows, sorted(pairs)


def waited_for(number, rows, pairs):
    """The definition: nodes that are work, reached backwards through nodes that are none."""
    result = set()
    for source, target in pairs:
        if target == number and rows[source]["cat"] == "kernel":
            result.add(rows[source]["name"])
        elif target == number:
            result |= waited_for(source, rows, pairs)
    return result


@given(replays(), st.sampled_from([40, 300, 10**6]), st.booleans())
def test_a_node_waits_for_the_work_before_its_arrows(tmp_path_factory, made, size, text):
    rows, pairs = made
    arrows = [
        half
        for number, (source, target) in enumerate(pairs)
        for half in arrow(number, rows[source], rows[target], text)
    ]
    path = k.write(
        tmp_path_factory.mktemp("nodes") / "rank0.json",
        [call("cudaGraphLaunch", 0, 5, 1), *rows, *arrows],
    )
    data = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        patch.setattr(graph_nodes, "blocks", lambda _: iter(parts))
        found = order_of(read(path))
    for number, row in enumerate(rows):
        is_known = pairs and row["cat"] == "kernel"
        assert found[row["name"]] == (waited_for(number, rows, pairs) if is_known else None)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "1099511627776x"},
        {"ts": "1e999"},
        {"ts": None},
        {"pid": "host"},
        {"cat": "fwdbwd"},
        {"id": 99},
        {"tid": [7]},
    ],
)
def test_what_is_no_arrow_between_nodes_is_left_out(tmp_path, change):
    rows = [node(0, 10, 5, 20), node(1, 20, 5, 21)]
    halves = [half | change for half in arrow(0, *rows)]
    path = k.write(tmp_path / "rank0.json", [call("cudaGraphLaunch", 0, 5, 1), *rows, *halves])
    assert order_of(read(path))["node1"] is None


def test_arrows_take_time_that_grows_with_the_file(tmp_path):
    """Ids without an event around them, and one long chain of nodes that are no work."""

    def seconds(count):
        rows = [node(n, 10 + n, 0, 20, "graph_event_node") for n in range(count)]
        last = node(count, 20 + count, 1, 20)
        halves = [half for n, row in enumerate(rows[1:]) for half in arrow(n, rows[n], row)]
        halves += arrow(count, rows[-1], last)
        loose = ', "id": 1099511627776' * count
        path = tmp_path / f"{count}.json"
        events = ",".join(json.dumps(row) for row in [*rows, last, *halves])
        path.write_text(f'{{"traceEvents": [{events}], "x": "{json.dumps(loose)[1:-1]}"}}')
        begun = perf_counter()
        scanned = read(path)
        assert order_of(scanned)[f"node{count}"] == set()
        return perf_counter() - begun

    seconds(100)
    assert seconds(16_000) < 30 * seconds(2_000)


def lanes_of(path):
    trace = read(path)
    marks = dict(
        zip(trace.events["name"].to_pylist(), trace.args["on_lane"].to_pylist(), strict=True)
    )
    return {name for name, mark in marks.items() if mark == 1}


def test_nodes_on_lanes_that_hide_their_streams_are_known(tmp_path):
    """A tool draws nodes on 7 and 8, and from 60 on those of process groups."""
    launch = call("cudaGraphLaunch", 0, 5, 1)
    drawn = [node(1, 10, 5, 7), node(2, 12, 5, 8), node(3, 20, 5, 60)]
    path = tmp_path / "rank0.json"
    assert lanes_of(k.write(path, [launch, *drawn])) == {"node1", "node2", "node3"}
    # On a single lane they are in order; streams of replays have large numbers.
    one = [node(1, 10, 5, 7), node(2, 15, 5, 7)]
    streams = [node(1, 10, 5, 26671), node(2, 12, 5, 26672)]
    kept = [row | {"args": row["args"] | {"original stream": 26671}} for row in drawn]
    for row in kept:
        row["args"]["original_stream"] = row["args"].pop("original stream")
    for rows in (one, streams, kept):
        assert lanes_of(k.write(path, [launch, *rows])) == set()
