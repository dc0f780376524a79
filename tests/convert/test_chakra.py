"""Test Chakra execution traces with an independent protobuf decoder."""

import json
import sys
from collections import Counter, defaultdict
from dataclasses import replace

import pyarrow as pa
import pytest
from builders.opened import open_run
from click.testing import CliRunner

import fastcomm
from fastcomm.cli.main import main
from fastcomm.convert.chakra import Written, convert, group_number, write_groups
from fastcomm.convert.chakra import write as chakra_rank
from fastcomm.errors import FastcommError
from fastcomm.formats import execution_traces
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.trace.schema import OP
from fastcomm.trace.trace import Meta

# Fields of MLCommons Chakra's et_def.proto, by number.
NODE = {1: "id", 2: "name", 3: "type", 5: "data_deps", 6: "start", 7: "duration", 10: "attr"}
ALL_REDUCE, ALL_GATHER, BROADCAST, ALL_TO_ALL, REDUCE_SCATTER = 0, 2, 5, 6, 7
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
JOB = Job.of(4, steps=2, layers=2, micro_batches=2)


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(data):
    """Number and value of each field: a number, or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        else:
            assert key & 7 == 2
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def packed(data):
    at = 0
    while at < len(data):
        value, at = varint(data, at)
        yield value


def attribute(data):
    found = dict(fields(data))
    (kind,) = set(found) - {1}
    value = found[kind]
    return found[1].decode(), value.decode() if kind == 29 else value


def node(data):
    found = {"data_deps": [], "duration": 0, "start": 0, "id": 0, "attr": {}}
    for number, value in fields(data):
        name = NODE[number]
        if name == "attr":
            found["attr"] |= dict([attribute(value)])
        elif name == "data_deps":
            found[name] += packed(value)
        else:
            found[name] = value.decode() if name == "name" else value
    return found


def messages(path):
    data, at = path.read_bytes(), 0
    while at < len(data):
        size, at = varint(data, at)
        yield data[at : at + size]
        at += size


def nodes(path):
    head, *rest = messages(path)
    assert dict(fields(head)) == {1: b"0.0.4"}
    return [node(each) for each in rest]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chakra")
    write(JOB, folder / "traces")
    done = CliRunner().invoke(
        main, ["convert", str(folder / "traces"), str(folder / "et"), "--to", "chakra"]
    )
    assert done.exit_code == 0, done.output
    assert f"nodes of {JOB.ranks} ranks (chakra)" in done.stdout
    return folder


@pytest.fixture(scope="module")
def ranks(run):
    return [nodes(run / f"et/trace.{rank}.et") for rank in range(JOB.ranks)]


def test_ids_count_from_zero_and_nodes_depend_only_on_earlier_nodes(ranks):
    for each in ranks:
        assert [one["id"] for one in each] == list(range(len(each)))
        assert all(max(one["data_deps"], default=-1) < one["id"] for one in each)
        assert {one["attr"]["is_cpu_op"] for one in each if one["type"] != COMPUTE} == {0}


def test_a_replay_with_measured_durations_ends_when_the_device_did(run, ranks):
    """What is waited for, and for how long, explains every start: to the us of rounding."""
    whole = open_run(run / "traces")
    for rank, each in enumerate(ranks):
        ends, works = [], 0
        for one in each:
            start = max((ends[before] for before in one["data_deps"]), default=0)
            assert abs(start - one["start"]) <= 1
            ends.append(start + one["duration"])
            works += not one["attr"]["is_cpu_op"]
        trace = whole.read(rank, "all")
        device = [kind <= 2 for kind in trace.events["kind"].to_pylist()]
        assert works == sum(device)
        rows = [place for place, is_device in enumerate(device) if is_device]
        start, stop = (trace.events.take(rows)[name].to_numpy() for name in ("start", "stop"))
        assert abs(max(ends) - (stop.max() - start.min()) / 1000) <= 2


def test_members_of_a_group_call_the_same_collectives_with_the_same_sizes(run, ranks):
    groups = json.loads((run / "et/trace.groups.json").read_text())
    calls = defaultdict(dict)
    for rank, each in enumerate(ranks):
        mine = defaultdict(list)
        for one in each:
            if one["type"] == COLLECTIVE:
                said = one["attr"]
                mine[said.get("pg_name", "")].append((said["comm_type"], said["comm_size"]))
        for name, found in mine.items():
            calls[name][rank] = found
    for name, found in calls.items():
        members = groups[name] if name else list(range(JOB.ranks))
        assert sorted(found) == members
        types = {tuple(kind for kind, _ in one) for one in found.values()}
        assert len(types) == 1, "another order on another rank"
        fixed = {tuple(size for k, size in one if k != ALL_TO_ALL) for one in found.values()}
        assert len(fixed) == 1
    seen = Counter(
        kind for found in calls.values() for one in found.values() for kind, _ in one
    )
    assert set(seen) == {ALL_REDUCE, ALL_GATHER, BROADCAST, ALL_TO_ALL, REDUCE_SCATTER}


def test_an_all_gather_has_the_size_of_one_part_and_a_reduce_scatter_of_all(run, ranks):
    trace = open_run(run / "traces").read(0)
    wanted = Counter()
    for row in trace.comm.to_pylist():
        members = trace.groups["size"][row["group"]].as_py()
        if row["op"] in (1, 2):
            part = row["payload_bytes"] // (members if row["op"] == 1 else 1)
            wanted[ALL_GATHER if row["op"] == 1 else REDUCE_SCATTER, part] += 1
    found = Counter(
        (one["attr"]["comm_type"], one["attr"]["comm_size"])
        for one in ranks[0]
        if one["type"] == COLLECTIVE
        and one["attr"]["comm_type"] in (ALL_GATHER, REDUCE_SCATTER)
    )
    assert found == wanted


def test_groups_of_one_number_are_an_error_and_ranks_agree_on_numbers(tmp_path):
    parts = [
        Written(
            path=tmp_path,
            meta=Meta(rank=0, format="kineto", path=""),
            nodes=0,
            groups={7: ranks},
            replayed={},
        )
        for ranks in ((0, 1), (2, 3))
    ]
    with pytest.raises(
        FastcommError, match=r"groups \(0, 1\) and \(2, 3\) have the same number, 7"
    ):
        write_groups(parts, tmp_path)
    assert group_number([0, 2]) == group_number((0, 2)) != group_number((0, 3))
    assert 0 < group_number(range(4096)) < 1 << 31


def test_the_same_run_gives_the_same_bytes_with_any_number_of_workers(run, tmp_path):
    words = ["convert", str(run / "traces"), "--to", "chakra", "--workers", "2"]
    assert CliRunner().invoke(main, [*words, str(tmp_path / "et")]).exit_code == 0
    names = sorted(path.name for path in (run / "et").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "et").iterdir())
    for name in names:
        assert (tmp_path / "et" / name).read_bytes() == (run / "et" / name).read_bytes()


def test_a_missing_extra_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    execution_traces.messages.cache_clear()
    with pytest.raises(FastcommError, match=r"pip install 'fastcomm\[chakra\]'"):
        execution_traces.messages()
    execution_traces.messages.cache_clear()


def test_a_message_is_sent_and_received_with_equal_sizes_and_tags(tmp_path):
    write(Job.of(4, pp=2, steps=2, layers=2, micro_batches=2), tmp_path / "traces")
    convert(open_run(tmp_path / "traces"), tmp_path / "et")
    ends = {SEND: Counter(), RECEIVE: Counter()}
    for rank in range(4):
        for one in nodes(tmp_path / f"et/trace.{rank}.et"):
            if one["type"] in ends:
                ends[one["type"]][tuple(sorted(one["attr"].items()))] += 1
    assert ends[SEND] == ends[RECEIVE]
    assert ends[SEND].total() > 0
    assert max(ends[SEND].values()) == 1


def test_each_of_several_messages_of_an_event_has_its_part_of_the_size(run, tmp_path):
    """One kernel does all sends and receives of a batch; its size is that of all sends."""
    trace = fastcomm.open(run / "traces").read(0)
    comm, count = trace.comm, trace.comm.num_rows
    values = {"op": OP["SendRecv"], "payload_bytes": 300, "sends_to": [1, 2, 3]}
    for name, value in (values | {"receives_from": [2]}).items():
        place, kind = comm.column_names.index(name), comm.schema.field(name).type
        comm = comm.set_column(place, comm.schema.field(name), pa.array([value] * count, kind))
    chakra_rank(replace(trace, comm=comm), tmp_path, 4)
    attributes = [
        (one["type"], one["attr"]["comm_size"])
        for one in nodes(tmp_path / "trace.0.et")
        if one["type"] in (SEND, RECEIVE)
    ]
    assert Counter(attributes) == {(SEND, 100): 3 * count, (RECEIVE, 100): count}
