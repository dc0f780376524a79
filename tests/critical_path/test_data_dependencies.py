"""Test data dependencies of operators from execution traces."""

import gzip
import json

import pytest
from builders import kineto_text as k
from builders.places import SCHEMAS
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from fastcomm.cli.main import main
from fastcomm.critical_path.data_dependencies import data_dependencies
from fastcomm.critical_path.search import analyze
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats import execution_traces
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.options import Window

US = 1000
MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
ADD = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
VIEW = "aten::view(Tensor(a) self, SymInt[] size) -> Tensor(a)"
COPY = "aten::copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)"
OUT = "aten::mul.out(Tensor self, Tensor other, *, Tensor(a!) out) -> Tensor(a!)"


def tensor(storage, id_=None, device="cpu"):
    return [id_ or storage, storage, 0, 64, 4, device]


def node(number, name, inputs, outputs, schema="", new=True):
    parent, facts = 1, {"rf_id": number, "tid": 1, "op_schema": schema}
    if not new:
        return {
            "id": 10 + number,
            "name": name,
            "parent": parent,
            "inputs": inputs,
            "outputs": outputs,
            **facts,
        }
    return {
        "id": 10 + number,
        "name": name,
        "ctrl_deps": parent,
        "inputs": {"values": inputs},
        "outputs": {"values": outputs},
        "attrs": [{"name": key, "value": value} for key, value in facts.items()],
    }


# Two independent products; a view of the first that is changed in place, and read.
CALLS = [
    ("aten::mm", [tensor(1), tensor(2)], [tensor(3)], MM, 0, 10),
    ("aten::mm", [tensor(1), tensor(4)], [tensor(5)], MM, 10, 20),
    ("aten::view", [tensor(3), [64]], [tensor(3, 30)], VIEW, 30, 2),
    ("aten::add_", [tensor(3, 30), tensor(1), 1], [tensor(3, 30)], ADD, 32, 8),
    ("aten::mm", [tensor(3), tensor(2)], [tensor(6)], MM, 40, 10),
    ("aten::mul", [tensor(5), tensor(1), tensor(7)], [tensor(7)], OUT, 50, 5),
    ("aten::mm", [[tensor(7), tensor(6)]], [tensor(8)], MM, 55, 5),
]


def written(folder, calls=CALLS, new=True, ids=True, rank=0):
    nodes, events = [], []
    for number, (name, inputs, outputs, schema, ts, dur) in enumerate(calls, 1):
        nodes.append(node(number, name, inputs, outputs, schema, new=new))
        event = k.event(name, "cpu_op", ts, dur, pid=100, tid=1)
        if ids:
            event["args"]["Record function id"] = number
        events.append(event)
    path = k.write(folder / f"rank{rank}.json", events)
    beside = folder / f"torch_et_{rank}.json"
    beside.write_text(json.dumps({"schema": "1.1", "nodes": nodes[::-1]}))
    return path, beside


def answer(path, beside):
    trace = reader.read(path, TraceOptions(whole=True))
    found = analyze(trace, Window(annotation=""))
    return data_dependencies(trace, found, execution_traces.read_operators(beside))


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("ids", [True, False])
def test_an_operator_waits_for_the_last_writers_of_what_it_reads(tmp_path, new, ids):
    found = answer(*written(tmp_path, new=new, ids=ids))
    rows = found.operators.to_pylist()
    assert [row["producers"] for row in rows] == [0, 0, 1, 1, 1, 1, 2]
    earlier = [row["earlier_ns"] / US for row in rows]
    # The view reads the first product; what follows reads the view's change of it.
    assert earlier == [0, 10, 20, 22, 0, 20, 0]
    assert (found.matched, found.in_window, found.traced) == (7, 7, 7)
    assert found.span_ns == 60 * US
    # mm, add_, mm, mm: a view writes nothing.
    assert found.bound_ns == (10 + 8 + 10 + 5) * US
    assert ("record function ids" in found.joined_by) == ids
    assert [row["event"] for row in found.movable(2).to_pylist()] == [3, 2]


def test_device_work_waits_for_the_device_work_of_its_producers(tmp_path):
    gpu = "cuda:0"
    calls = [
        ("aten::mm", [tensor(1, device=gpu)], [tensor(3, device=gpu)], MM, 0, 10),
        ("aten::mm", [tensor(3, device=gpu)], [tensor(5, device=gpu)], MM, 10, 10),
        ("aten::mm", [tensor(1, device=gpu)], [tensor(6, device=gpu)], MM, 20, 10),
        ("aten::copy_", [tensor(7), tensor(5, device=gpu)], [tensor(7)], COPY, 30, 200),
    ]
    path, beside = written(tmp_path, calls)
    document = json.loads(path.read_text())
    document["traceEvents"] += [k.launch(10 * n + 2, n + 1) for n in range(3)] + [
        k.kernel("gemm", 30 + 50 * n, 50, device=0, correlation=n + 1) for n in range(3)
    ]
    path.write_text(json.dumps(document))
    found = answer(path, beside)
    assert found.operators["device_ns"].to_pylist() == [50 * US, 50 * US, 50 * US, 0]
    # The launch, two kernels one behind the other, and the copy that waits for them.
    assert found.bound_ns == (0 + 50 + 50 + 200) * US


def test_operators_that_call_others_are_subgraphs(tmp_path):
    path, beside = written(tmp_path)
    document = json.loads(beside.read_text())
    outer = node(20, "Linear", [], [])
    outer["id"] = 99
    for each in document["nodes"]:
        each["ctrl_deps"] = 99
    document["nodes"].append(outer)
    beside.write_text(json.dumps(document))
    (row,) = answer(path, beside).movable_subgraphs().to_pylist()
    shorter = row.pop("shortens_ns")
    assert row == {"part_of": "Linear (20)", "earlier_ns": 0, "operators": 7}
    assert shorter == 27_000


def test_written_tables_follow_their_schemas():
    nodes = [
        node(1, "a", [tensor(1)], [], "f(Tensor a, *, int[2] b=[0, 0], Tensor(x!) c) -> ()"),
        node(2, "b_", [tensor(1)], []),
        node(3, "c", [tensor(1), 1, tensor(2)], [], "f(Tensor a, int b, Tensor(x!) c) -> ()"),
    ]
    found = [execution_traces._operator(each) for each in nodes]
    assert [sorted(each.writes) for each in found] == [[], [(1, "cpu")], [(2, "cpu")]]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": [{}]}', '{"nodes": 3}'])
def test_an_invalid_execution_trace_is_an_error(tmp_path, text):
    path = tmp_path / "torch_et_0.json"
    path.write_text(text)
    with pytest.raises(TraceFileError, match="not an execution trace of PyTorch"):
        execution_traces.read_operators(path)


def test_an_execution_trace_of_another_run_is_an_error(tmp_path):
    path, beside = written(tmp_path)
    beside.write_text(json.dumps({"nodes": [node(77, "other", [tensor(1)], [])]}))
    with pytest.raises(
        FastcommError, match="no operator of the execution trace is in the window"
    ):
        answer(path, beside)
    beside.write_text(json.dumps({"nodes": [node(1, "aten::mm", [], [])]}))
    with pytest.raises(FastcommError, match="has no tensors"):
        answer(path, beside)


@pytest.mark.parametrize(
    ("trace", "beside", "by", "share"),
    [
        (
            "gloo_2x2/kineto_trace_0.json.gz",
            "gloo_2x2/torch_et_0.json.gz",
            "ids",
            0.9,
        ),
        (
            "gloo_4rank_et/kineto_trace_0.json.gz",
            "gloo_4rank_et/torch_et_0.json.gz",
            "ids",
            0.97,
        ),
        (
            "dlrm_8rank/worker0_step_12.1694128201545.pt.trace.json.gz",
            "dlrm_8rank_et/dlrm_eg_0.json.gz",
            "order",
            0.97,
        ),
    ],
)
def test_real_execution_traces_join(real, trace, beside, by, share):
    found = answer(real(trace), real(beside))
    assert by in found.joined_by
    assert found.matched / found.traced > share
    assert 0 < found.bound_ns < found.span_ns
    assert found.operators.num_rows > 150


def test_the_command_prints_and_writes_data_dependencies(tmp_path):
    path, beside = written(tmp_path)
    words = ["critical-path", str(path), "--annotation", "", "--deps", "data"]
    text = " ".join(CliRunner().invoke(main, words, catch_exceptions=False).stdout.split())
    assert "7 of the window's 7 operators are in the execution trace, which has 7" in text
    assert "60.0 us; if each waited only for its data, 33.0 us" in text
    out = tmp_path / "out"
    done = CliRunner().invoke(main, [*words, "--json", "--output", str(out)])
    document = json.loads(done.stdout)
    assert document["data"]["bound_ns"] == 33 * US
    schema = SCHEMAS / "critical-path.json"
    Draft202012Validator(json.loads(schema.read_text("utf-8"))).validate(document)
    assert (out / "operators.parquet").exists()
    packed = tmp_path / "other.json.gz"
    packed.write_bytes(gzip.compress(beside.read_bytes()))
    beside.unlink()
    refused = CliRunner().invoke(main, words)
    assert "--deps data: no torch_et_0.json and no pytorch_et_0.json beside" in refused.stderr
    done = CliRunner().invoke(main, [*words, "--execution-trace", str(packed)])
    assert done.exit_code == 0


def test_moving_an_operator_off_its_thread_saves_its_own_time(tmp_path):
    path, beside = written(tmp_path)
    found = answer(path, beside)
    # The second product is read 20 us after it is done: all of its 20 us can be elsewhere.
    first, *_ = found.shortening().to_pylist()
    assert (first["event"], first["shortens_ns"]) == (1, 20 * US)
    by_event = {row["event"]: row["shortens_ns"] for row in found.operators.to_pylist()}
    # The last product waits for the one before it, beside which only 5 us can run.
    assert by_event[4] == 5 * US
