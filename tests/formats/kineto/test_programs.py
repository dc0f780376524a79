"""Test JSON files of other programs, and values in quotes."""

import json

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.shared_data import shared

from fastcomm.compat.dpro import uniform
from fastcomm.errors import TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import envelope, reader
from fastcomm.formats.kineto.ranks import peek


def process(name, pid):
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def event(name, pid, cat=None, phase="X", **args):
    row = {"name": name, "ph": phase, "ts": 1.5, "dur": 2.0, "pid": pid, "tid": 1, "args": args}
    return row if cat is None else {**row, "cat": cat}


FOREIGN = {
    "JAX": [event("fusion.1", 3, hlo_op="fusion.1"), event("x", 3)],
    "TensorFlow": [
        process("/device:TPU:0", 7),
        event("dot", 7),
    ],
    "autograd profiler": [event("mul", "CPU functions"), event("mul", "CUDA functions")],
    "plug-in of NCCL": [event("AllGather", 1, "COLL", phase="b", SeqNum=3)],
    "torch_npu": [
        process("Ascend Hardware", 7),
        event("MatMul", 7),
    ],
    "unknown program.*'blink', 'v8'": [event("a", 1, "v8"), event("b", 1, "blink")],
    "unknown program.*its events have none": [event("a", 1)],
}


@pytest.mark.parametrize("form", ["list", "object"])
@pytest.mark.parametrize(("words", "events"), FOREIGN.items())
def test_a_trace_of_another_program_is_named(tmp_path, words, events, form):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(events if form == "list" else {"traceEvents": events}))
    for place in (path, tmp_path):
        for command in ("metrics", "info", "kernels"):
            error = invoke(command, place, code=1).stderr
            assert error.startswith(f"Error: {path}: a ")
            assert "uniform" not in error
            with pytest.raises(TraceFileError, match=words):
                raise TraceFileError(error)


def test_a_trace_of_another_program_beside_ranks_is_ignored_with_a_warning(tmp_path):
    k.write(tmp_path / "rank0.json", [k.mark("step 1", 0, 10), k.kernel("gemm", 1, 4)])
    (tmp_path / "host.trace.json").write_text(json.dumps(FOREIGN["JAX"]))
    data = json.loads(invoke("metrics", tmp_path, "--json").stdout)
    assert data["ranks"] == [0]
    assert any("host.trace.json" in text for text in data["warnings"])


def test_only_names_of_dpro_make_a_uniform_trace(tmp_path):
    path = tmp_path / "all.json"
    for name in ("FW.conv", "host0.rank1->BW.conv", "Comm.1+2.SEND", "UPDATE_0", "FW+BW.x"):
        path.write_text(json.dumps({"traceEvents": [event(name, "host0.rank1", "operator")]}))
        assert peek(path).kind == "uniform"
    path.write_text(json.dumps({"traceEvents": [event("FORWARD", "rank1", "operator")]}))
    assert peek(path).kind == "foreign"
    path.write_text(json.dumps({"traceEvents": [event("gemm", "a")], "all_prefix": ["a"]}))
    assert peek(path).kind == "uniform"


@pytest.mark.parametrize("at", [0, 500, (1 << 20) - 12, (1 << 20) - 5, 1 << 20, 3 << 20])
def test_a_trace_of_torch_npu_is_named_wherever_its_sign_is(tmp_path, at):
    path = tmp_path / "rank0.json"
    text = json.dumps([event("ProfilerStep#1", 1, "cpu_op"), event("MatMul", 2)])
    sign = json.dumps(process("Ascend Hardware", 2))
    filler = " " * max(0, at - len(text) - sign.index('"Ascend'))
    path.write_text(f"{text[:-1]}, {filler}{sign}]")
    for command in ("metrics", "info"):
        assert "torch_npu (Ascend)" in invoke(command, path, code=1).stderr


def test_a_trace_that_begins_with_metadata_alone_is_named(tmp_path):
    path = tmp_path / "host.trace.json"
    filler = [{**process(f"/host:CPU {n}", n), "pad": "x" * 200} for n in range(9000)]
    path.write_text(json.dumps({"traceEvents": [*filler, *FOREIGN["JAX"]]}))
    assert peek(path).kind == "events"
    assert "JAX or TensorFlow" in invoke("metrics", path, code=1).stderr


def test_kernels_of_ascend_with_a_category_are_read(tmp_path):
    sign = process("Ascend Hardware", 2)
    path = k.write(tmp_path / "rank0.json", [sign, k.kernel("MatMul", 0, 5), event("x", 2)])
    assert len(reader.read(path, TraceOptions()).events) == 1


@pytest.mark.parametrize("name", ["dead.json", "running.json", "monitor.jsonl"])
def test_the_state_of_ncclras_is_no_trace(name):
    path = shared(f"formats_2026/ras/{name}")
    assert "NCCL RAS (ncclras" in invoke("metrics", path, code=1).stderr


def test_answers_of_ncclras_are_named_in_a_directory_and_as_text(tmp_path):
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"nccl_version": "2.29.7", "communicators_count": 0}))
    assert f"{path}: the state of a job's communicators" in programs_error(tmp_path)
    path.unlink()
    path = tmp_path / "monitor.jsonl"
    event = {"timestamp": "x", "group": "LIFECYCLE", "event": "PEER_DEAD", "peer": {}}
    path.write_text(f"{json.dumps(event)}\n" * 3)
    assert f"{path}: events of NCCL RAS" in programs_error(tmp_path)
    for name in ("ras.txt", "ras.log", "rank0.json"):
        path = tmp_path / name
        path.write_text("NCCL version 2.29.7 compiled with CUDA 13.1\n\nJob summary\n====\n")
        assert "the answer of NCCL RAS (ncclras)" in programs_error(path)


def programs_error(path):
    return invoke("metrics", path, code=1).stderr


def quoted(value):
    """A JSON value with all its numbers in quotes, but those of phases and names."""
    if isinstance(value, dict):
        return {key: quoted(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [quoted(entry) for entry in value]
    return value if isinstance(value, bool) or value is None else str(value)


def test_numbers_in_quotes_are_numbers(tmp_path):
    events = [
        *(k.mark("ProfilerStep#5", 0, 10_000.5), k.launch(1.25, 11), k.launch(2, 12)),
        *(k.kernel("gemm", 30.125, 5, correlation=11), k.all_reduce(50, 5.0, correlation=12)),
    ]
    plain = k.document(events, rank=1, world=2)
    plain["baseTimeNanoseconds"] = 1_757_000_000_000_000_000
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, document in zip(paths, (plain, quoted(plain)), strict=True):
        path.write_text(json.dumps(document))
    assert [peek(path).rank for path in paths] == [1, 1]
    one, other = (reader.read(path, TraceOptions(whole=True)) for path in paths)
    assert (one.meta.rank, one.meta.world_size) == (1, 2)
    assert (one.meta.rank, one.meta.base) == (other.meta.rank, other.meta.base)
    for name in ("events", "lanes", "comm", "iterations", "args"):
        left, right = getattr(one, name), getattr(other, name)
        drop = [c for c in ("offset",) if c in left.column_names]
        assert left.drop_columns(drop).equals(right.drop_columns(drop)), name


def test_times_in_quotes_are_read_in_uniform_traces_too(tmp_path):
    path = tmp_path / "all.json"
    row = {**event("FW.a", "p"), "ts": "1.5", "dur": "2.25"}
    path.write_text(json.dumps({"traceEvents": [row]}))
    for read in (uniform.read, uniform.scan):
        trace = read(path)
        assert (trace.start.tolist(), trace.dur.tolist()) == ([1500], [2250])
    path.write_text(json.dumps({"traceEvents": [{**row, "ts": "1e999999999"}]}))
    with pytest.raises(TraceFileError, match="too large"):
        uniform.read(path)


def test_signs_of_programs_are_found_in_no_trace_of_the_profiler(tmp_path):
    path = k.write(tmp_path / "rank0.json", [k.kernel('fusion "hlo_op"', 0, 5)])
    assert peek(path).kind == "profiler"
    assert envelope.other(path.read_bytes()) is None
