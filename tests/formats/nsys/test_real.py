"""Test real Nsight Systems exports against the specification of the formats."""

import collections
import csv
import gzip
import io
from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
from builders.opened import open_run
from builders.shared_data import shared

from fastcomm.formats.nsys import recognition as reader
from fastcomm.metrics.computation import compute_metrics
from fastcomm.trace.schema import KIND, OPS


def union(intervals):
    total, end = 0, None
    for start, stop in sorted(intervals):
        if end is None or start > end:
            total, end = total + stop - start, stop
        elif stop > end:
            total, end = total + stop - end, stop
    return total


def test_the_sample_profile_has_two_ranks_and_their_communication(nsys):
    run = open_run(nsys / "mfu_2gpu.sqlite")
    assert run.ranks == (0, 1)
    wanted = {0: (17_172_652, 253_690_832), 1: (8_229_100, 256_095_624)}
    kernels = 0
    for rank in run.ranks:
        trace = run.read(rank)
        ops = collections.Counter(OPS[op] for op in trace.comm["op"].to_pylist())
        assert ops == {"AllToAll": 32, "SendRecv": 1}  # one was launched before the window
        assert trace.comm["payload_bytes"].null_count == 33
        comm = set(trace.comm["event"].to_pylist())
        events = trace.events.select(["start", "stop", "kind"]).to_pylist()
        kernel = [row for row, event in enumerate(events) if event["kind"] == KIND["kernel"]]
        kernels += len(kernel)
        spans = [
            [(events[row]["start"], events[row]["stop"]) for row in rows]
            for rows in (comm, set(kernel) - comm)
        ]
        assert tuple(map(union, spans)) == wanted[rank]
        assert union(spans[0]) + union(spans[1]) == union(spans[0] + spans[1])
    assert kernels == 4010
    assert "mfu_h1002_nsys.nsys-rep" in " ".join(run.warnings)


def test_correlations_are_unique_only_within_a_process(nsys):
    run = open_run(nsys / "mfu_2gpu.sqlite")
    correlations = []
    without = 0
    for rank in run.ranks:
        events = run.read(rank).events
        kind = events["kind"].to_numpy()
        correlation = events["correlation"].to_numpy()
        own = correlation[kind == KIND["kernel"]]
        assert len(set(own)) == len(own)
        correlations.extend(own)
        without += int((~np.isin(own, correlation[kind == KIND["runtime"]])).sum())
    assert len(set(correlations)) < len(correlations)
    assert without == 24


def test_ranges_are_projected_onto_the_device_like_nsys_stats(nsys):
    packed = shared("nsys/mfu_2gpu_oracle/nvtx_gpu_proj_trace.csv.gz")
    text = io.StringIO(gzip.decompress(packed.read_bytes()).decode())
    wanted = collections.Counter(
        (
            row["Name"],
            int(row["PID"]),
            int(row["TID"]),
            int(row["Projected Start (ns)"]),
            int(row["Projected Duration (ns)"]),
            int(row["Orig Start (ns)"]),
            int(row["Orig Duration (ns)"]),
            int(row["NumGPUOps"]),
        )
        for row in csv.DictReader(text)
    )
    found = collections.Counter(
        (
            row["name"],
            row["process"],
            row["thread"],
            row["first"],
            row["last"] - row["first"],
            row["start"],
            row["stop"] - row["start"],
            row["count"],
        )
        for row in reader.project(nsys / "mfu_2gpu.sqlite").to_pylist()
    )
    assert found == wanted
    assert sum(wanted.values()) == 9621


@pytest.mark.parametrize("kind", ["sqlite", "parquetdir", "arrowdir"])
def test_three_export_types_give_equal_runs(nsys, kind):
    run = open_run(nsys / f"nccl_nvtx_4rank.{kind}")
    assert run.ranks == (0, 1, 2, 3)
    reference = open_run(nsys / "nccl_nvtx_4rank.sqlite")
    for rank in run.ranks:
        trace, other = run.read(rank), reference.read(rank)
        assert trace.iterations["number"].to_pylist() == [0, 1, 2]
        assert trace.events.equals(other.events)
        assert trace.lanes.equals(other.lanes)
        names = trace.events["name"].to_pylist()
        # Ranges that never ended, those of communicators being made, enclose nothing.
        assert not any(name.startswith("ncclComm") for name in names)
        assert "ncclAllGather" in names


@pytest.mark.parametrize("kind", ["sqlite", "parquetdir", "arrowdir"])
def test_a_run_without_gpu_rows_is_measured_as_far_as_possible(nsys, kind):
    found = compute_metrics(open_run(nsys / f"nccl_nvtx_4rank.{kind}"))
    assert found.iterations == 3
    assert found.volume == {}
    assert any("no device work" in text for text in found.warnings)


def test_the_whole_of_a_real_export_keeps_what_the_critical_path_needs(nsys):
    run = open_run(nsys / "mfu_2gpu.sqlite")
    trace = run.read(0, "all")
    names = collections.Counter(trace.events["name"].to_pylist())
    assert names["Stream Wait Event"] > 0
    assert names["ncclGroupEnd"] > 0


def test_a_wait_refers_to_its_event_record(nsys):
    run = open_run(nsys / "mfu_2gpu.sqlite")
    trace = run.read(0, "all")
    assert trace.is_whole
    waits = pc.equal(trace.events["name"], "Stream Wait Event")
    # The cut-out file has no row of CUPTI_ACTIVITY_KIND_CUDA_EVENT.
    assert trace.args.filter(waits)["wait_stream"].null_count == pc.sum(waits).as_py() > 0


def test_reading_all_events_gives_the_metrics_of_the_needed_events(nsys):
    path = nsys / "mfu_2gpu.sqlite"
    run = open_run(path)
    all_events = [
        replace(source, reader=lambda _, source=source: source.read("all"))
        for source in run.sources
    ]
    lean, whole = map(compute_metrics, (run, replace(run, sources=tuple(all_events))))
    assert lean.to_dict() == whole.to_dict()
