"""Test collectives of the host beside those of a device, against the definition."""

import json

import pytest
from builders import kineto_text as kt
from builders.commands import invoke
from hypothesis import given
from hypothesis import strategies as st

import fastcomm

STEP_US = 100
TIMES = st.lists(
    st.tuples(st.integers(0, 2 * STEP_US - 30), st.integers(0, 30)), min_size=1, max_size=6
)


def run_of(folder, on_host, on_device, library="gloo"):
    """A trace of two steps; the times are (start, duration) pairs in us from the first step."""
    events = [
        kt.event("ProfilerStep#0", "user_annotation", 0, STEP_US, pid=100, tid=1),
        kt.event("ProfilerStep#1", "user_annotation", STEP_US, STEP_US, pid=100, tid=1),
        *(
            kt.event(f"{library}:barrier", "user_annotation", *time, pid=100, tid=9)
            for time in on_host
        ),
        *(kt.kernel("gemm", *time) for time in on_device),
    ]
    events.sort(key=lambda event: event["ts"])
    return kt.write(folder / "rank0.json", events)


def covered(times, start, stop):
    """The ns in [start, stop) at which something runs, one microsecond at a time."""
    ran = {at for begin, length in times for at in range(begin, begin + length)}
    return {at for at in ran if start <= at < stop}


@given(TIMES, TIMES)
def test_times_of_the_host_are_those_of_the_definition(tmp_path_factory, on_host, on_device):
    path = run_of(tmp_path_factory.mktemp("run"), on_host, on_device)
    run = fastcomm.open(path, step_boundary="host")
    rows = run.metrics().to_arrow()["iterations"].to_pylist()
    assert [row["iteration"] for row in rows] == [0, 1]
    for row, start in zip(rows, (0, STEP_US), strict=True):
        stop = start + STEP_US
        host, device = covered(on_host, start, stop), covered(on_device, start, stop)
        assert row["host_comm_ns"] == 1000 * len(host)
        assert row["host_comm_alone_ns"] == 1000 * len(host - device)
        assert row["host_comm_events"] == sum(start <= begin < stop for begin, _ in on_host)


@pytest.mark.parametrize("library", ["gloo", "mpi", "ucc"])
def test_the_terminal_has_a_row_of_the_host_and_the_document_its_times(tmp_path, library):
    path = run_of(tmp_path, [(10, 20), (40, 20)], [(50, 30), (150, 30)], library)
    shown = invoke("metrics", path, "--step-boundary", "host").stdout
    (row,) = (line for line in shown.splitlines() if line.startswith("host +  "))
    assert row.split()[2:] == ["15.0", "us", "15.0", "%", "n/a", "n/a", "2"]
    found = json.loads(invoke("metrics", path, "--step-boundary", "host", "--json").stdout)
    expected = {"events": 2, "ns_per_step": 20_000, "alone_ns_per_step": 15_000}
    assert found["host_communication"] == expected
    assert "no communication of the device was recorded" in found["headline"]
    page = tmp_path / "page.html"
    invoke("report", path, "--step-boundary", "host", "--html", page, "--no-data")
    assert "host&#39;s collectives, part of idle" in page.read_text()


def test_a_run_without_collectives_of_the_host_has_no_such_row(tmp_path):
    path = run_of(tmp_path, [], [(50, 30), (150, 30)])
    assert "host +" not in invoke("metrics", path).stdout
    assert json.loads(invoke("metrics", path, "--json").stdout)["host_communication"] is None


def test_a_store_has_the_same_times(tmp_path):
    path = run_of(tmp_path, [(10, 20), (40, 20)], [(50, 30), (150, 30)])
    invoke("ingest", path, "-o", tmp_path / "store")
    direct, stored = (
        json.loads(invoke("metrics", source, "--json").stdout)["host_communication"]
        for source in (path, tmp_path / "store")
    )
    assert direct is not None  # null in both would prove nothing
    assert direct == stored
