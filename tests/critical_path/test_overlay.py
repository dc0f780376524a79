"""Test overlays and saved graphs."""

import gzip
import io
import json
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import golden_critical_path as golden
from builders import kineto_text as k

from fastcomm.compat import hta, hta_graph
from fastcomm.critical_path.overlay import Drawing, write
from fastcomm.critical_path.saved import load
from fastcomm.critical_path.search import analyze
from fastcomm.errors import FastcommError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.formats.opening import open_run
from fastcomm.graph.graph import EDGE_KINDS
from fastcomm.options import Window
from fastcomm_kernels.arrays import NONE

ADD = golden.FOLDER / "simple_add.json.gz"
FORWARD = "[param|pytorch.model.alex_net|0|0|0|measure|forward]"


def loaded(path):
    data = Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def flows(document):
    found = [event for event in document["traceEvents"] if event.get("cat") == "critical_path"]
    pairs = {}
    for event in found:
        pairs.setdefault(event["id"], []).append(event)
    assert all([e["ph"] for e in pair] == ["s", "f"] for pair in pairs.values())
    return Counter(
        tuple(
            (e["pid"], e["tid"], e["ts"], json.dumps(e["args"], sort_keys=True)) for e in pair
        )
        for pair in pairs.values()
    )


def criticals(document):
    return [
        event
        for event in document["traceEvents"]
        if event["ph"] == "X" and event.get("args", {}).get("critical") == 1
    ]


@golden.needed
@pytest.mark.compiled
def test_the_overlay_equals_the_reference(tmp_path):
    found, success = hta.critical_path_analysis(ADD, 0, "", 0, ["data_load"])
    assert success
    written = hta.overlay_critical_path_analysis(ADD, 0, found, tmp_path, False)
    ours, theirs = loaded(written), loaded(golden.FOLDER / "simple_add_overlay.json.gz")
    plain = [e for e in ours["traceEvents"] if e.get("cat") != "critical_path"]
    expected = [e for e in theirs["traceEvents"] if e.get("cat") != "critical_path"]
    assert plain == expected
    assert flows(ours) == flows(theirs)
    assert len(criticals(ours)) == 624
    everything = loaded(
        hta.overlay_critical_path_analysis(ADD, 0, found, tmp_path, False, True)
    )
    assert len(everything["traceEvents"]) == 4250
    only = loaded(hta.overlay_critical_path_analysis(ADD, 0, found, tmp_path))
    assert len(only["traceEvents"]) == 1526
    assert sum(event["ph"] == "X" for event in only["traceEvents"]) == 632


@golden.needed
@pytest.mark.compiled
def test_an_overlay_can_be_limited_to_one_type_of_edges(tmp_path):
    found, _ = hta.critical_path_analysis(ADD, 0, FORWARD, 1, zero_weight_launches=True)
    everything = loaded(
        hta.overlay_critical_path_analysis(ADD, 0, found, tmp_path, False, True)
    )
    arrows = sum(
        event["args"]["critical"]
        for pair in [everything["traceEvents"]]
        for event in pair
        if event.get("cat") == "critical_path" and event["ph"] == "f"
    )
    assert (len(criticals(everything)), arrows) == (159, 314)
    some = loaded(hta.overlay_critical_path_analysis(ADD, 0, found, tmp_path, False))
    assert flows(some).total() == 21
    one = hta.overlay_critical_path_analysis(
        ADD, 0, found, tmp_path, False, edge_types_to_viz=["kernel_launch_delay"]
    )
    assert flows(loaded(one)).total() == 1
    with pytest.raises(
        FastcommError, match="unknown type of edges 'nothing': expected one of operator"
    ):
        hta.overlay_critical_path_analysis(
            ADD, 0, found, tmp_path, edge_types_to_viz=["nothing"]
        )


@pytest.mark.compiled
def test_arrows_of_the_corrected_rules_touch_their_slices(kineto, tmp_path):
    run = open_run(kineto / "nccl_2rank_rank0.json.gz")
    found = analyze(run.read(0, "all"))
    document = loaded(hta.overlay_critical_path_analysis(run, 0, found, tmp_path))
    lanes = {}
    for event in criticals(document):
        span = (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        lanes.setdefault((event["pid"], event["tid"]), []).append(span)
    drawn = [e for e in document["traceEvents"] if e.get("cat") == "critical_path"]
    assert drawn
    for event in drawn:
        at = round(event["ts"] * 1000)
        assert any(a - 1 <= at <= b + 1 for a, b in lanes[event["pid"], event["tid"]])


def read_whole(path):
    return reader.read(path, TraceOptions(whole=True))


def test_a_truncated_trace_has_no_overlay(tmp_path):

    events = [k.event("a", "cpu_op", 0, 5, pid=1, tid=1), k.event("b", "cpu_op", 6, 5)]
    path = k.write(tmp_path / "rank0.json", events)
    trace = read_whole(path)
    found = analyze(trace, Window(annotation=""))
    text = path.read_bytes()
    for broken, said in (
        (text[: text.rindex(b"]")], "traceEvents does not end"),
        (text[: text.rindex(b"]")] + b" 7", "traceEvents does not end"),
        (text[: text.rindex(b"]")] + b', {"ph": "i"', "traceEvents does not end"),
        (text[: text.rindex(b'"b"')], "no complete events"),
        (text[:20], "the events are not at the positions at which they were read"),
        (b" " + text, "the events are not at the positions at which they were read"),
    ):
        path.write_bytes(broken)
        with pytest.raises(FastcommError, match=said):
            write(trace, found, tmp_path / "overlay.json", Drawing())
    assert not (tmp_path / "overlay.json").exists()


def test_bytes_after_the_gzip_data_are_not_part_of_an_overlay(tmp_path):
    events = [k.event("a", "cpu_op", 0, 5, pid=1, tid=1), k.event("b", "cpu_op", 6, 5)]
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(k.document(events)).encode()) + b"garbage")
    trace = read_whole(path)
    write(trace, analyze(trace, Window(annotation="")), tmp_path / "overlay.json", Drawing())
    assert {"a", "b"} <= {
        row["name"] for row in loaded(tmp_path / "overlay.json")["traceEvents"]
    }


def test_events_other_than_work_are_kept_in_the_overlay(tmp_path):

    events = [k.event("a", "cpu_op", 0, 5, pid=1, tid="x"), {"ph": "i", "name": "b", "ts": 1}]
    events[0].pop("args")
    path = k.write(tmp_path / "rank0.json", events)
    trace = read_whole(path)
    found = analyze(trace, Window(annotation=""))
    write(trace, found, tmp_path / "overlay.json", Drawing(all_edges=True, only_critical=False))
    first, second, *flows_of = json.loads((tmp_path / "overlay.json").read_text())[
        "traceEvents"
    ]
    assert first == {**events[0], "args": {"critical": 1}}
    assert second == events[1]
    assert [(flow["ph"], flow["tid"], flow["ts"]) for flow in flows_of] == [
        ("s", "x", 0),
        ("f", "x", 4.999),
    ]


@golden.needed
@pytest.mark.compiled
def test_an_overlay_never_overwrites_its_trace(tmp_path):
    copy = tmp_path / "overlaid_critical_path_x.json.gz"
    copy.write_bytes(ADD.read_bytes())
    link = tmp_path / "x.json.gz"
    link.symlink_to(copy)
    found, _ = hta.critical_path_analysis(link, 0, FORWARD, 1)
    with pytest.raises(FastcommError, match="not written, this command reads"):
        hta.overlay_critical_path_analysis(link, 0, found, tmp_path)


@golden.needed
@pytest.mark.compiled
@pytest.mark.parametrize("find", [hta.find_path, analyze])
def test_a_saved_graph_is_restored_unchanged(tmp_path, find):

    run = open_run(ADD)
    found = hta.CPGraph.of(find(run.read(0, "all"), Window(annotation=FORWARD, instance=1)))
    again = hta.restore_cpgraph(found.save(str(tmp_path / "graph")))
    assert again.critical_path_nodes == found.critical_path_nodes
    assert again.breakdown.equals(found.breakdown)
    assert again.summary() == found.summary()
    assert again.about == found.about
    assert again.critical_path()
    assert again.critical_path_events_set == found.critical_path_events_set
    first = (tmp_path / "graph.zip").read_bytes()
    again.save(str(tmp_path / "graph"))
    assert (tmp_path / "graph.zip").read_bytes() == first


@golden.needed
@pytest.mark.compiled
def test_an_edited_graph_has_another_path(tmp_path):
    found, _ = hta.critical_path_analysis(ADD, 0, FORWARD, 1)
    saved = hta.restore_cpgraph(found.save(str(tmp_path / "graph")))
    before = saved.length_ns
    heavy = max(found.critical_path_edges_set, key=lambda edge: edge.weight)
    saved.set_weight(heavy.begin, heavy.end, 0)
    assert saved.critical_path()
    assert saved.length_ns == before - heavy.weight
    with pytest.raises(FastcommError, match="no edge from node 0 to node 0"):
        saved.set_weight(0, 0, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda archive: archive.writestr("../../evil", "x"), "expected only"),
        (lambda archive: archive.writestr("/etc/passwd", "x"), "expected only"),
        (lambda archive: archive.writestr("nodes.parquet", "x"), "expected only"),
        (lambda archive: archive.writestr("graph.pickle", b"\x80\x04."), "expected only"),
    ],
)
@golden.needed
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_zip_is_refused(tmp_path, change, said):
    found, _ = hta.critical_path_analysis(ADD, 0, FORWARD, 1)
    path = found.save(str(tmp_path / "graph"))
    with zipfile.ZipFile(path, "a") as archive:
        change(archive)
    with pytest.raises(FastcommError, match=said):
        hta.restore_cpgraph(path)


def test_a_member_that_is_longer_than_the_file_or_encrypted_is_refused(tmp_path):
    events = [k.event("a", "cpu_op", 0, 5, pid=1, tid=1), k.event("b", "cpu_op", 6, 5)]
    found = analyze(read_whole(k.write(tmp_path / "rank0.json", events)), Window(annotation=""))
    path = Path(found.save(str(tmp_path / "graph")))
    whole = path.read_bytes()
    last = whole.rindex(b"PK\1\2")  # of the directory: sizes from byte 20, flags at byte 8
    longer = whole[: last + 20] + (1 << 20).to_bytes(4, "little") * 2 + whole[last + 28 :]
    encrypted = whole[: last + 8] + b"\1" + whole[last + 9 :]
    # Python 3.13 says of the first that its entries overlap.
    for damaged, said in ((longer, "(ends early|Overlapped)"), (encrypted, "encrypted")):
        path.write_bytes(damaged)
        with pytest.raises(FastcommError, match=f"not a saved critical path: .*{said}"):
            hta.restore_cpgraph(path)


@pytest.mark.parametrize(
    ("name", "column", "value", "said"),
    [
        ("edges", "source", 1 << 30, "invalid source"),
        ("edges", "source", 3, "edges are not in order, or lead backward"),
        ("edges", "kind", 100, "invalid kind"),
        ("nodes", "event", -1, "invalid event"),
        ("nodes", "event", 2, "invalid event"),  # of 2 events, each of 2 nodes
        ("edges", "owner", 2, "invalid owner"),
        ("edges", "owner", NONE - 1, "invalid owner"),
        ("edges", "source", 4, "invalid source"),
        ("edges", "target", 4, "invalid target"),
        ("edges", "target", -1, "invalid target"),
        ("edges", "kind", len(EDGE_KINDS), "invalid kind"),
        ("path", "edge", 1 << 20, "the path has edges that do not exist"),
    ],
)
def test_references_outside_the_tables_are_refused(tmp_path, name, column, value, said):
    events = [k.event("a", "cpu_op", 0, 5, pid=1, tid=1), k.event("b", "cpu_op", 6, 5)]
    found = analyze(read_whole(k.write(tmp_path / "rank0.json", events)), Window(annotation=""))
    path = Path(found.save(str(tmp_path / "graph")))
    assert hta.restore_cpgraph(path).critical_path()
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    table = pq.read_table(io.BytesIO(members[f"{name}.parquet"]))
    values = [value, *table[column].to_pylist()[1:]]
    changed = pa.array(values, table[column].type)
    table = table.set_column(table.column_names.index(column), table.field(column), changed)
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    members[f"{name}.parquet"] = buffer.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    with pytest.raises(FastcommError, match=said):
        hta.restore_cpgraph(path)


def test_a_bomb_is_refused(tmp_path):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", " " * (1 << 22))
    with pytest.raises(FastcommError, match="compressed or larger than"):
        hta.restore_cpgraph(path)


@pytest.mark.parametrize(
    ("manifest", "said"),
    [("{}", "does not have version 2"), ("[", "not a saved critical path"), ("7", "version")],
)
def test_a_damaged_zip_is_refused(tmp_path, manifest, said):
    path = tmp_path / "graph.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", manifest)
    with pytest.raises(FastcommError, match=said):
        hta.restore_cpgraph(path)
    path.write_bytes(b"PK")
    with pytest.raises(FastcommError, match="not a saved critical path"):
        hta.restore_cpgraph(path)


def test_a_saved_graph_with_unknown_rules_is_refused(tmp_path):
    events = [k.event("a", "cpu_op", 0, 5, pid=1, tid=1), k.event("b", "cpu_op", 6, 5)]
    trace = read_whole(k.write(tmp_path / "rank0.json", events))
    path = hta.find_path(trace, Window(annotation="")).save(str(tmp_path / "graph"))
    assert hta.restore_cpgraph(path).about.rules is hta_graph.RULES
    with pytest.raises(FastcommError, match="unknown rules 'hta': expected corrected"):
        load(path)
