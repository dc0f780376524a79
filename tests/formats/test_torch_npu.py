"""Test directories that the profiler of torch_npu (Ascend) writes."""

import json
import sqlite3
from contextlib import closing

import pytest
from builders.commands import invoke

HEADER = (
    "Step Id,Device_id,Model ID,Task ID,Stream ID,Name,Type,OP State,Accelerator Core,"
    "Start Time(us),Duration(us),Wait Time(us),Block Num,Input Shapes"
)
BASE = 1_757_000_000_000_000  # us


def row(step, device, stream, name, kind, start, duration):
    at = f'"{BASE + start}.125\t"'
    return f"{step},{device},4294967295,1,{stream},{name},{kind},N/A,X,{at},{duration},0,24,N/A"


def rows(device):
    yield row("", device, 2, "aclnnCast", "Cast", 0, 50.0)
    for step in (1, 2, 3):
        at = 1_000 * step
        yield row(step, device, 2, "aclnnMatmul_MatMulV2", "MatMulV2", at, 500.0)
        yield row(step, device, 3, "hcom_allReduce__1", "hcom_allReduce_", at + 600, 300.0)
        yield row(step, device, 2, "aclnnAdd", "Add", at + 900, 100.0)


def written(folder, device, *, text=True, steps=True):
    own = folder / f"host_{device}_2026_ascend_pt"
    output = own / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    (own / f"profiler_info_{device}.json").write_text(json.dumps({"rank_id": device}))
    if text:
        lines = [HEADER, *rows(device)]
        if not steps:
            lines = [line.partition(",")[2] for line in lines]
        (output / "kernel_details.csv").write_text("\n".join(lines) + "\n")
        (output / "op_statistic.csv").write_text("Device_id,OP Type\n0,Add\n")
        events = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "Ascend Hardware"}},
            {"ph": "X", "cat": "cpu_op", "name": "ProfilerStep#1", "pid": 2, "tid": 2,
             "ts": "1757000000000000.5", "dur": 5, "args": {}},
            {"ph": "X", "name": "MatMul", "pid": 1, "tid": 2, "ts": "1757000000000001.5",
             "dur": 2, "args": {}},
        ]  # fmt: skip
        (output / "trace_view.json").write_text(json.dumps(events))
        (output / "communication.json").write_text(json.dumps({"step1": {}}))
    for name, table in ((f"ascend_pytorch_profiler_{device}.db", "STRING_IDS"),
                        ("analysis.db", "StepTraceTime")):  # fmt: skip
        with closing(sqlite3.connect(output / name)) as database:
            database.execute(f"CREATE TABLE {table} (id INTEGER, value TEXT)")
    return own


@pytest.mark.parametrize("depth", ["run", "rank", "table"])
def test_the_table_of_kernels_of_a_directory_is_measured(tmp_path, depth):
    own = written(tmp_path, 0)
    table = own / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv"
    path = {"run": tmp_path, "rank": own, "table": table}[depth]
    data = json.loads(invoke("metrics", path, "--json").stdout)
    assert data["iterations"] == 3
    exact = data["breakdown"]["exact"]
    assert exact["compute"] == pytest.approx(0.6, abs=0.001)
    assert exact["exposed_OTHER"] == pytest.approx(0.3, abs=0.001)


def test_devices_of_one_host_are_ranks(tmp_path):
    for device in (0, 1):
        written(tmp_path, device)
    data = json.loads(invoke("metrics", tmp_path, "--json").stdout)
    assert data["ranks"] == [0, 1]


def test_tables_without_steps_are_measured(tmp_path):
    written(tmp_path, 0, steps=False)
    data = json.loads(invoke("metrics", tmp_path, "--json").stdout)
    assert data["breakdown"]["exact"]["compute"] > 0


def test_a_directory_with_databases_alone_says_what_to_do(tmp_path):
    own = written(tmp_path, 0, text=False)
    database = own / "ASCEND_PROFILER_OUTPUT" / "ascend_pytorch_profiler_0.db"
    for path in (tmp_path, database):
        error = invoke("metrics", path, code=1).stderr
        assert "torch_npu (Ascend)" in error
        assert "kernel_details.csv" in error
        assert "nsys" not in error


def test_the_timeline_alone_says_what_to_do(tmp_path):
    own = written(tmp_path, 0)
    path = own / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    error = invoke("metrics", path, code=1).stderr
    assert "torch_npu (Ascend)" in error
    assert "kernel_details.csv" in error
