"""Test launches without correlation, as ROCm builds of 2024 write them."""

import json

import pytest
from builders import kineto_text as k
from builders.commands import invoke

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader


def renamed(row, name):
    """The event with `correlation` as another arg, or without it."""
    args = {key: value for key, value in row["args"].items() if key != "correlation"}
    number = row["args"].get("correlation")
    if name is not None and number is not None:
        args[name] = number
    return {**row, "args": args}


def flows(rows):
    for row in rows:
        if (number := row["args"].get("correlation")) is not None:
            place = {key: row[key] for key in ("pid", "tid", "ts")}
            phase = "f" if row["cat"] == "kernel" else "s"
            yield {"ph": phase, "cat": "ac2g", "name": "ac2g", "id": number, **place}


def job(name):
    """Four steps whose kernels begin in the middle of a step, after both launches of the step.

    Returns them with correlations, and with these under another name.
    """
    rows = []
    for step in range(4):
        start, number = 10_000 * step, 7000 + 2 * step
        operator = k.event(
            "record_param_comms", "cpu_op", start + 200, 50, pid=100, tid=1,
            Collective_name="allreduce", dtype="Float", In_msg_nelems=1000,
            Out_msg_nelems=1000, External_id=step,
        )  # fmt: skip
        rows += [
            k.mark(f"ProfilerStep#{step}", start, 10_000),
            k.launch(start + 110, number),
            {**operator, "args": {**operator["args"], "External id": step}},
            k.launch(start + 210, number + 1),
            k.kernel("Cijk_gemm", start + 4000, 5000, correlation=number),
            k.kernel("ncclDevKernel_Generic", start + 9100, 800, 1, correlation=number + 1),
        ]
    return rows, [*(renamed(row, name) for row in rows), *flows(rows)]


def read(path, events, whole=False):
    k.write(path, events)
    return reader.read(path, TraceOptions(whole=whole))


@pytest.mark.parametrize("whole", [False, True])
def test_an_external_id_joins_calls_and_kernels_without_correlation(tmp_path, whole):
    with_correlation, without = job("External id")
    wanted = read(tmp_path / "rank0.json", with_correlation, whole)
    trace = read(tmp_path / "rank1.json", without, whole)
    assert trace.comm.drop_columns(["event"]).equals(wanted.comm.drop_columns(["event"]))
    assert trace.comm["payload_bytes"].to_pylist() == [4000] * 4
    assert trace.device_iterations.equals(wanted.device_iterations)
    assert trace.iterations.equals(wanted.iterations)
    assert trace.meta.warnings == wanted.meta.warnings
    work = [row for row in trace.events.to_pylist() if row["correlation"] is not None]
    assert sorted(row["correlation"] for row in work) == sorted(2 * [*range(7000, 7008)])


def test_an_external_id_joins_nothing_where_correlations_are(tmp_path):
    events = [
        *(k.mark("ProfilerStep#1", 0, 100), k.launch(1, 5), k.launch(2, 6)),
        {
            **k.kernel("gemm", 10, 5, correlation=5),
            "args": {"correlation": 5, "External id": 6},
        },
    ]
    trace = read(tmp_path / "rank0.json", events)
    assert [row["correlation"] for row in trace.events.to_pylist()] == [None, 5, 6, 5]


def test_launches_that_nothing_joins_are_said_to_be_recorded(tmp_path):
    path = k.write(tmp_path / "rank0.json", job(None)[1])
    data = json.loads(invoke("metrics", path, "--json").stdout)
    texts = " ".join(data["warnings"])
    assert data["iterations"] == 4
    assert "8 launches are recorded, but no correlation joins one with its device work" in texts
    assert "launches are recorded, but no correlation joins them with kernels" in texts
    assert "no launch of device work is recorded" not in texts
    assert "their launch is not recorded" not in texts


def test_without_calls_no_launch_is_recorded(tmp_path):
    rows = [row for row in job(None)[1] if row["cat"] != "cuda_runtime"]
    path = k.write(tmp_path / "rank0.json", rows)
    texts = " ".join(json.loads(invoke("metrics", path, "--json").stdout)["warnings"])
    assert "no launch of device work is recorded" in texts


@pytest.mark.parametrize("name", ["correlation", "External id"])
@pytest.mark.parametrize("number", [0, -1])
def test_numbers_that_stand_for_none_join_nothing(tmp_path, name, number):
    rows, _ = job(None)
    plain = [renamed(row, None) for row in rows]
    numbered = [
        {**row, "args": {**row["args"], name: number}}
        if row["cat"] in ("kernel", "cuda_runtime")
        else row
        for row in plain
    ]
    found, expected = (
        read(tmp_path / f"{n}.json", events) for n, events in enumerate((numbered, plain))
    )
    assert found.iterations.equals(expected.iterations)
    assert found.events["correlation"].null_count == found.events.num_rows
