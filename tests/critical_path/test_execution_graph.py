"""Test critical paths of Chakra and PyTorch execution traces against a recursive definition."""

import gzip
import json
from pathlib import Path

import pytest
from builders.shared_data import needs, path_of
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.cli.main import main
from fastcomm.errors import FastcommError
from fastcomm.formats import execution_traces
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7


def run(*arguments, code=0):
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def varint(number):
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def numeric(field, number):
    return varint(field << 3) + varint(number)


def lengthy(field, data):
    return varint(field << 3 | 2) + varint(len(data)) + data


def message(node):
    """Protobuf bytes of a node, by the numbers of MLCommons' et_def.proto."""
    data = numeric(1, node["id"]) + lengthy(2, node["name"].encode()) + numeric(3, node["type"])
    data += lengthy(5, b"".join(map(varint, node["deps"]))) if node["deps"] else b""
    data += lengthy(4, b"".join(map(varint, node["ctrl"]))) if node.get("ctrl") else b""
    data += numeric(6, node.get("start", 0)) + numeric(7, node["us"])
    for name, (field, value) in node.get("attr", {}).items():
        coded = lengthy(field, value.encode()) if field == 29 else numeric(field, value)
        data += lengthy(10, lengthy(1, name.encode()) + coded)
    return data


def encoded(nodes):
    parts = [lengthy(1, b"0.0.4"), *map(message, nodes)]
    return b"".join(varint(len(part)) + part for part in parts)


def operation(id_, us, deps=(), *, name="work", is_host=False, **more):
    attr = {"is_cpu_op": (27, int(is_host))}
    return {
        "id": id_,
        "name": name,
        "type": COMPUTE,
        "us": us,
        "deps": deps,
        "attr": attr,
    } | more


def collective(id_, us, deps=(), group="7", kind=0):
    attr = {"is_cpu_op": (27, 0), "comm_type": (9, kind), "pg_name": (29, group)}
    return operation(id_, us, deps) | {"type": COLLECTIVE, "name": "reduce", "attr": attr}


def message_node(id_, us, source, target, deps=(), tag=0):
    """A receive from `source`, or with `source` None a send to `target`."""
    sends = source is None
    name, other = ("comm_dst", target) if sends else ("comm_src", source)
    attr = {"comm_tag": (7, tag), name: (7, other)}
    return operation(id_, us, deps) | {"type": SEND if sends else RECEIVE, "attr": attr}


def write_ranks(folder, ranks):
    folder.mkdir(parents=True, exist_ok=True)
    for rank, nodes in enumerate(ranks):
        (folder / f"trace.{rank}.et").write_bytes(encoded(nodes))
    return folder


def expected_times(ranks):
    """Start and end of every operation, by rank and id, by the definition; us."""
    nodes = {(rank, node["id"]): node for rank, own in enumerate(ranks) for node in own}
    calls = {}
    for key in sorted(nodes):
        if nodes[key]["type"] == COLLECTIVE:
            calls.setdefault(key[0], []).append(key)
    together = {}
    for number in range(max(map(len, calls.values()), default=0)):
        members = [own[number] for own in calls.values() if number < len(own)]
        together |= dict.fromkeys(members, members)
    times = {}

    def start(key):
        return max((end((key[0], before)) for before in nodes[key]["deps"]), default=0)

    def end(key):
        if key not in times:
            members = together.get(key, [key])
            begin = max(map(start, members))
            times[key] = begin + min(nodes[one]["us"] for one in members)
        return times[key]

    return {key: (start(key), end(key)) for key in nodes}


@st.composite
def jobs(draw):
    count = draw(st.integers(1, 3))
    calls = draw(st.integers(0, 3))
    ranks = []
    for _ in range(count):
        is_call = [True] * calls + [False] * draw(st.integers(1, 6))
        is_call = draw(st.permutations(is_call))
        nodes = []
        last = None
        for id_, call in enumerate(is_call):
            deps = (
                draw(st.lists(st.integers(0, id_ - 1), unique=True, max_size=3)) if id_ else []
            )
            us = draw(st.integers(0, 50))
            if call:
                deps = [*{*deps, *([] if last is None else [last])}]
                nodes.append(collective(id_, us, deps))
                last = id_
            else:
                nodes.append(operation(id_, us, deps, is_host=draw(st.booleans())))
        ranks.append(draw(st.permutations(nodes)))
    return ranks


@given(jobs())
def test_times_and_path_agree_with_the_definition(tmp_path_factory, ranks):
    folder = write_ranks(tmp_path_factory.mktemp("job"), ranks)
    path = fastcomm.execution_trace_path(folder)
    has_calls = any(node["type"] == COLLECTIVE for node in ranks[0])
    expected = expected_times(ranks if has_calls else ranks[:1])
    last = max(stop for _, stop in expected.values())
    assert path.length_ns == path.wall_ns == 1000 * last
    assert (path.about.window.start, path.about.window.stop) == (0, 1000 * last)
    assert sum(path.summary_ns().values()) == path.length_ns
    rows = path.times().to_pylist()
    found = {
        (row["rank"], row["event"]): (row["start_ns"], row["start_ns"] + row["duration_ns"])
        for row in rows
    }
    assert found == {key: (a * 1000, b * 1000) for key, (a, b) in expected.items()}
    edited = path.edit().recompute()
    assert edited.length_ns == path.length_ns


def test_a_receive_waits_for_its_send_and_a_send_for_nobody(tmp_path):
    ranks = [
        [operation(0, 30), message_node(1, 9, None, 1, [0])],
        [message_node(0, 50, 0, None), operation(1, 5, [0])],
    ]
    path = fastcomm.execution_trace_path(write_ranks(tmp_path, ranks))
    assert path.length_ns == (30 + 9 + 5) * 1000
    waits = {row["rank"]: row["wait_ns"] for row in path.by_rank().to_pylist()}
    assert waits == {0: 0, 1: 30_000}


def test_what_no_dependency_explains_stays_as_a_delay(tmp_path):
    nodes = [operation(0, 10, start=100), operation(1, 5, [0], start=130)]
    path = fastcomm.execution_trace_path(write_ranks(tmp_path, [nodes]))
    assert path.length_ns == 35_000


def test_control_dependencies_of_a_profiler_name_the_caller(tmp_path):
    plain = [operation(0, 10), operation(1, 5, ctrl=[0])]
    path = fastcomm.execution_trace_path(write_ranks(tmp_path / "plain", [plain]))
    assert path.length_ns == 15_000
    for node in plain:
        node["attr"]["rf_id"] = (9, 1)
    path = fastcomm.execution_trace_path(write_ranks(tmp_path / "recorded", [plain]))
    assert path.length_ns == 10_000
    assert "ignored: control dependencies, which name the caller" in path.notes


def test_ranks_that_call_different_collectives_are_not_joined_there(tmp_path):
    ranks = [
        [collective(0, 10, group="8"), collective(1, 10, [0], kind=0)],
        [collective(0, 20, group="8"), operation(1, 20, [0]), collective(2, 10, [1], kind=2)],
    ]
    path = fastcomm.execution_trace_path(write_ranks(tmp_path, ranks))
    assert path.length_ns == 40_000
    assert any("1 collective not joined" in note for note in path.notes)


def test_groups_of_the_groups_file_are_joined_among_their_members(tmp_path):
    """Two groups of one name: only members meet, and a missing rank is noted."""
    ranks = [[collective(0, 10)], [operation(0, 30), collective(1, 10, [0])]]
    folder = write_ranks(tmp_path, ranks)
    assert fastcomm.execution_trace_path(folder).across.collectives.num_rows == 2
    (folder / "trace.groups.json").write_text('{"7": [0, 1, 2]}')
    path = fastcomm.execution_trace_path(folder)
    assert "1 collective without all ranks" in path.notes
    (folder / "trace.groups.json").write_text('{"7": [0]}')
    assert fastcomm.execution_trace_path(folder).across.collectives.num_rows == 0
    (folder / "trace.groups.json").write_text('{"7": [-1]}')
    with pytest.raises(FastcommError, match=r"groups\.json: expected groups"):
        fastcomm.execution_trace_path(folder)


def test_json_and_gzip_say_the_same_as_protobuf(tmp_path):
    nodes = [operation(3, 10, is_host=True), operation(5, 7, [3])]
    (tmp_path / "a.0.et").write_bytes(encoded(nodes))
    (tmp_path / "b.0.et.gz").write_bytes(gzip.compress(encoded(nodes)))
    graph = [
        {
            "Id": node["id"],
            "Name": node["name"],
            "NodeType": node["type"],
            "data_deps": list(node["deps"]),
            "runtime": node["us"],
            "is_cpu_op": bool(node["attr"]["is_cpu_op"][1]),
        }
        for node in nodes
    ]
    (tmp_path / "c.0.json").write_text(json.dumps({"workload_graph": graph}))
    documents = []
    for name in ("a.0.et", "b.0.et.gz", "c.0.json"):
        document = fastcomm.execution_trace_path(tmp_path / name).to_dict()
        documents.append({**document, "path_of_trace": None})
    assert documents[0] == documents[1] == documents[2]
    assert documents[0]["summary_ns"] == {
        "cpu_bound": 10_000,
        "gpu_compute_bound": 7_000,
        "gpu_kernel_launch_overhead": 0,
    }
    with pytest.raises(FastcommError, match="two traces of rank 0"):
        fastcomm.execution_trace_path(tmp_path)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    write(Job.of(4, steps=2, layers=2, micro_batches=2), folder / "traces")
    run("convert", folder / "traces", folder / "et", "--to", "chakra")
    return folder


def test_a_run_has_the_same_path_after_it_was_converted(converted):
    """The whole run: equal length, but for the rounding to us of the events on the path.

    What the host does before the first launch is not in execution traces.
    """
    traces = json.loads(
        run("critical-path", converted / "traces", "--annotation", "", "--json").stdout
    )
    et = json.loads(run("critical-path", converted / "et", "--json").stdout)
    assert et["expected_ranks"] == traces["expected_ranks"] == 4
    path = (
        fastcomm.open(converted / "traces").critical_path(annotation="").breakdown.to_pylist()
    )
    begin = next(part["start_ns"] for part in path if part["bound_by"] == "cpu_bound")
    length = traces["path"]["length_ns"] - (begin - path[0]["start_ns"])
    assert abs(et["path"]["length_ns"] - length) < 0.005 * length
    for name in ("gpu_compute_bound", "gpu_communication_bound"):
        assert abs(et["summary"][name] - traces["summary"][name]) < 0.02


def test_the_path_of_a_rank_can_be_saved_edited_and_asked(converted, tmp_path):
    run("critical-path", converted / "et", "--rank", 2, "--save", tmp_path / "path")
    assert (tmp_path / "path.zip").is_file()
    answer = json.loads(
        run("what-if", converted / "et", "--scale", "compute=0.5", "--json").stdout
    )
    assert answer["after_ns"] < 0.8 * answer["before_ns"]
    assert (
        answer["interval"]["edit_error_of"] == "what-ifs are not validated on execution traces"
    )
    page = tmp_path / "page.html"
    run("critical-path", converted / "et", "--html", page)
    assert "device: compute" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "1"], "--step has no effect"),
        (["--tp", "2"], "--tp has no effect"),
        (["--compat", "hta"], "--compat has no effect"),
        (["--dask", "tcp://x:1"], "--dask has no effect"),
        (["--overlay", "x.json"], "needs the path of one rank by a profiler's trace"),
        (["--rank", "9"], "rank 9: not among the execution traces of ranks 0, 1, 2, 3"),
    ],
)
def test_options_of_profiles_are_refused(converted, options, said):
    assert said in run("critical-path", converted / "et", *options, code=2).stderr


def test_profiles_and_execution_traces_do_not_mix(converted):
    done = run("critical-path", converted / "et", converted / "traces", code=2)
    assert "not a Chakra execution trace" in done.stderr


WHOLE = encoded([operation(0, 10), operation(1, 5, [0])])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (WHOLE[:-3], "ends behind the file"),
        (b"\xff" * 64, "offset 0: no length of a message"),
        (WHOLE[:8] + b"\x05\xff\xff\xff\xff\xff", "offset 8"),
        (encoded([operation(0, 1), operation(0, 1)]), "1 nodes have the id of another"),
        (encoded([operation(0, 1 << 50)]), "no whole number from 0"),
        (encoded([operation(0, 1, [1]), operation(1, 1, [0])]), "cyclic dependencies"),
        (encoded([]), "no operation"),
        (b'{"workload_graph": 5}', "not a Chakra execution trace"),
        (b'{"workload_graph": [{"Id": -1, "NodeType": 4, "Name": "x"}]}', "'-1'"),
        (b'{"workload_graph": [{"Id": 1, "NodeType": 4.5, "Name": "x"}]}', "'4.5'"),
        (b'{"nodes": []}', "not a Chakra execution trace"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, data, said):
    path = tmp_path / "trace.0.et"
    path.write_bytes(data)
    done = run("critical-path", path, code=1)
    assert str(path) in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.output


def test_damaged_ranks_are_skipped_on_request(tmp_path):
    write_ranks(tmp_path, [[operation(0, 10)], [operation(0, 20)]])
    (tmp_path / "trace.2.et").write_bytes(b"")
    run("critical-path", tmp_path, code=1)
    done = run("critical-path", tmp_path, "--keep-going", "--json", code=3)
    failed = json.loads(done.stdout)["failed"]
    assert [rank["rank"] for rank in failed] == [2]


@needs("chakra")
def test_real_files_of_chakra_are_read():
    """A ring all-reduce of ASTRA-sim's examples, as messages and reductions."""
    path = fastcomm.execution_trace_path(path_of("chakra/astra_ring_allreduce_8"))
    # Seven reductions of 7 us in a row; messages have no duration in the files.
    assert path.length_ns == 49_000
    assert len(path.ranks) == 8
    assert path.across.collectives.num_rows == 2 * 8 * 14
    assert "operations whose recorded duration is 0: 224 of communication" in path.notes


@needs("kineto")
def test_the_path_of_a_pytorch_file_is_its_data_dependencies():
    folder = path_of("kineto/gloo_4rank_et")
    path = fastcomm.execution_trace_path(folder / "torch_et_0.json.gz")
    arguments = ["--rank", "0", "--annotation", "", "--deps", "data", "--json"]
    document = json.loads(run("critical-path", folder, *arguments).stdout)
    assert path.length_ns == document["data"]["bound_ns"]


def test_a_pytorch_file_without_times_says_what_to_give(tmp_path):
    text = '{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}'
    path = Path(tmp_path / "torch_et_0.json")
    path.write_text(text)
    done = run("critical-path", path, code=2)
    assert "has no times" in done.stderr
    assert "--deps data --execution-trace" in done.stderr


def test_a_rank_is_known_by_its_name(tmp_path):
    for name in ("left.et", "right.et"):
        (tmp_path / name).write_bytes(WHOLE)
    assert execution_traces.find_chakra([tmp_path / "left.et"]) == {0: tmp_path / "left.et"}
    with pytest.raises(FastcommError, match="its name has no rank, as in trace"):
        execution_traces.find_chakra([tmp_path])
