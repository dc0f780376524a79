"""Test variants of nsys exports: payloads, NCCL releases, clocks, graphs, threads."""

import json
import struct
from collections import Counter, defaultdict

import pytest
from builders.nsys_report import (
    COMM,
    COPY,
    ELEMENT,
    GRAPH_TRACE,
    KERNEL,
    MEMSET,
    NVTX,
    PEER,
    RUNTIME,
    SIZE,
    SMALL,
    calls,
    of_ranks,
    owned,
    written,
)

from fastcomm.synthetic import play
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.tables import NsysVariant


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All ranks of the small job, four in a report."""
    return written(tmp_path_factory.mktemp("nsys"), per_report=4)


def by_place(report, process):
    """The NCCL rows of a process, in order."""
    return sorted(report.nccl(process), key=lambda row: (row["start"], row["globalTid"]))


@pytest.mark.parametrize("payload", ["blob-total", "json", "json-strings", "json-ids", "none"])
def test_every_way_to_export_a_payload_says_the_same(tmp_path, whole, payload):
    variant = NsysVariant(payload=payload)
    (report,) = written(tmp_path, ranks=[4], variant=variant)
    base, process = whole[1], whole[1].processes[0]
    pairs = zip(by_place(base, process), by_place(report, report.processes[0]), strict=True)
    seen = 0
    for blob, row in pairs:
        assert base.name(blob) == report.name(row)
        if blob["binaryData"] is None or payload == "none":
            assert row["binaryData"] is row["jsonText"] is row["jsonTextId"] is None
            continue
        seen += 1
        if payload == "blob-total":
            assert struct.unpack_from("<4Q", row["binaryData"])[3] == len(row["binaryData"])
            assert row["binaryData"][32:] == blob["binaryData"][32:]
            continue
        assert row["binaryData"] is None
        assert (row["jsonText"] is None) == (payload == "json-ids")
        text = row["jsonText"] or report.strings[row["jsonTextId"]]
        said, fields = json.loads(text), base.decode(blob)
        if payload == "json-strings":
            assert said[COMM] == f"{fields[COMM]:,}"
            assert all(isinstance(value, str) for value in said.values())
            said = {
                key: 0 if value == "Sum" else int(value.replace(",", ""))
                for key, value in said.items()
            }
        assert said == fields
    assert seen > 50 or payload == "none"
    flags = {row["name"]: row["value"] for row in report.rows("META_DATA_EXPORT")}
    assert flags["EXPORT_PARAM_INCLUDE_BLOBS"] == str(payload == "blob-total").lower()
    assert flags["EXPORT_PARAM_INCLUDE_JSON"] == str(payload.startswith("json")).lower()


def test_old_releases_say_sizes_and_no_communicator(tmp_path):
    for release in ("2.22", "2.24"):
        variant = NsysVariant(nccl=release)
        (report,) = written(tmp_path, ranks=[0], variant=variant)
        labels = {row["name"] for row in report.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES")}
        assert not any("communicator" in label for label in labels)
        assert {"Bytes", SIZE, PEER} < labels
        assert ("Color" in labels) == (release == "2.24")
        (process,) = report.processes
        sent = [
            report.decode(row)["Bytes"]
            for row in report.nccl(process)
            if report.name(row) == "ncclSend"
        ]
        wanted = sum(
            work.call.sent * ELEMENT[work.call.dtype]
            for work in calls(SMALL, 0)
            if work.call.operation.collective in {"send", "all_to_allv"}
        )
        assert sum(sent) == wanted


def test_a_new_release_has_a_call_for_an_even_all_to_all(tmp_path):
    job = Job.of(4, tp=1, dp=4, ep=2, pp=1, steps=2, tokens=16, layers=2)
    reports = written(tmp_path, job, NsysVariant(nccl="2.28"), per_report=2)
    native = []
    for rank, report, process in of_ranks(reports):
        even = [
            work.call
            for work in calls(job, rank)
            if work.call.operation.op == "AllToAll"
            and len({*work.call.send_splits, *work.call.receive_splits}) == 1
        ]
        found = [row for row in report.nccl(process) if report.name(row) == "ncclAlltoAll"]
        assert found
        sizes = Counter(report.decode(row)[SIZE] for row in found)
        assert sizes == Counter(call.sent * 2 // call.group.size for call in even)
        native.append(len(found))
    assert len(set(native)) == 1  # all members agree


def test_a_late_capture_has_no_init_and_cut_off_launches(tmp_path):
    (report,) = written(tmp_path, ranks=[0], variant=NsysVariant(init=False))
    (process,) = report.processes
    assert {report.name(row) for row in report.nccl(process)}.isdisjoint(
        {"ncclCommInitRankConfig", "ncclCommSplit", "ncclCommDestroy"}
    )
    launched = {row["correlationId"] for row in report.rows(RUNTIME, process)}
    works = [row for table in (KERNEL, COPY, MEMSET) for row in report.rows(table)]
    assert len([row for row in works if row["correlationId"] not in launched]) == 2
    assert len({row["correlationId"] for row in works}) == len(works)


def test_the_clock_of_a_report_can_be_wrong_or_missing(tmp_path):
    skew = {1: -7_000_001}
    good = written(tmp_path / "good", per_report=4)
    bad = written(tmp_path / "bad", per_report=4, variant=NsysVariant(clock_skew_ns=skew))
    assert [one.utc - other.utc for one, other in zip(bad, good, strict=True)] == [0, skew[1]]
    assert good[0].utc != good[1].utc
    assert bad[1].rows(KERNEL) == good[1].rows(KERNEL)
    variant = NsysVariant(normalized=True, clock_skew_ns=skew)
    utc = written(tmp_path / "utc", per_report=4, variant=variant)
    for number, (one, other) in enumerate(zip(utc, good, strict=True)):
        shift = {row["start"] for row in one.rows(KERNEL)}
        wrong = skew.get(number, 0)
        assert shift == {row["start"] + other.utc + wrong for row in other.rows(KERNEL)}
        flags = {row["name"]: row["value"] for row in one.rows("META_DATA_EXPORT")}
        assert flags["EXPORT_PARAM_TIME_NORMALIZE"] == "true"
    (none,) = written(tmp_path, ranks=[0], variant=NsysVariant(session_start=False))
    assert "TARGET_INFO_SESSION_START_TIME" not in none.tables


def test_ranks_of_mpi_are_those_of_the_processes(tmp_path):
    reports = written(tmp_path, per_report=4, variant=NsysVariant(mpi_ranks=True))
    found = [
        {row["globalTid"] >> 24: row["rank"] for row in report.rows("MPI_RANKS")}
        for report in reports
    ]
    assert [sorted(ranks.values()) for ranks in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_file_that_was_cut_out_has_no_domains(tmp_path):
    (report,) = written(tmp_path, ranks=[0], variant=NsysVariant(domain_rows=False))
    assert not [row for row in report.rows(NVTX) if row["eventType"] == 75]
    assert {row["domainId"] for row in report.rows(NVTX)} == {0, 1}


def test_a_graph_hides_the_kernels_of_a_step(tmp_path):
    (report,) = written(tmp_path, ranks=[0], variant=NsysVariant(graph="graph"))
    first, second = play.steps(SMALL, 0)
    assert len(report.rows(KERNEL)) == sum(
        work.kind in {"compute", "comm"} for work in first.works
    )
    (row,) = report.rows(GRAPH_TRACE)
    stop = max(work.stop for work in second.works)
    assert (row["start"] + report.utc, row["end"] + report.utc) == (
        second.works[0].start,
        stop,
    )
    (launch,) = [
        one for one in report.rows(RUNTIME) if one["correlationId"] == row["correlationId"]
    ]
    assert report.strings[launch["nameId"]] == "cudaGraphLaunch_v10000"
    assert "CUDA_GRAPH_NODE_EVENTS" not in report.tables


def test_nodes_of_a_graph_lead_back_to_the_ranges_of_its_capture(tmp_path):
    (report,) = written(tmp_path, ranks=[0], variant=NsysVariant(graph="node"))
    (process,) = report.processes
    first, second = play.steps(SMALL, 0)
    wanted = Counter((work.start, work.stop) for work in [*first.works, *second.works])
    works = [row for table in (KERNEL, COPY, MEMSET) for row in report.rows(table)]
    assert (
        Counter((row["start"] + report.utc, row["end"] + report.utc) for row in works) == wanted
    )
    replayed = [row for row in works if row["graphNodeId"] is not None]
    assert len(replayed) == len(second.works)
    assert len({row["correlationId"] for row in replayed}) == 1
    nodes = {row["graphNodeId"]: row for row in report.rows("CUDA_GRAPH_NODE_EVENTS")}
    ends = [
        row
        for rows in report.ranges(process).values()
        for row in rows
        if row["binaryData"] or report.name(row) == "ncclGroupEnd"
    ]
    depths = set()
    for row in replayed:
        original = nodes[row["graphNodeId"]]
        steps = 0
        while original["originalGraphNodeId"] is not None:
            original = nodes[original["originalGraphNodeId"]]
            steps += 1
        depths.add(steps)
        assert original["end"] + report.utc < first.start
        around = [
            one
            for one in ends
            if one["globalTid"] == original["globalTid"]
            and one["start"] <= original["start"]
            and original["end"] <= one["end"]
        ]
        name = report.strings.get(row.get("demangledName"), "")
        assert len(around) == ("nccl" in name)
    assert depths == {1, 2}


def test_a_lone_message_can_launch_inside_its_own_range(tmp_path):
    (report,) = written(tmp_path, ranks=[0], variant=NsysVariant(groups=False))
    owners = Counter(owner for _, owner, _ in owned(report, report.processes[0]))
    wanted = Counter(work.call.operation.collective for work in calls(SMALL, 0))
    assert owners["ncclSend"] == wanted["send"]
    assert owners["ncclRecv"] == wanted["recv"]
    assert owners["ncclGroupEnd"] == wanted["all_to_allv"]


def test_communicators_that_do_not_block_launch_from_another_thread(tmp_path):
    (report,) = written(tmp_path, ranks=[0], variant=NsysVariant(other_thread=True))
    threads = defaultdict(set)
    for row in report.rows(RUNTIME):
        threads[report.strings[row["nameId"]]].add(row["globalTid"])
    (launcher,) = threads["cudaLaunchKernelExC_v11060"]
    assert launcher not in {row["globalTid"] for row in report.rows(NVTX)}
    assert launcher not in threads["cudaLaunchKernel_v7000"]


def test_a_process_can_call_its_only_device_zero(tmp_path):
    variant = NsysVariant(one_device=True)
    (report,) = written(tmp_path, ranks=(2, 3), per_report=2, variant=variant)
    assert {row["deviceId"] for row in report.rows(KERNEL)} == {0}
    (report,) = written(tmp_path, ranks=(2, 3), per_report=2)
    assert {row["deviceId"] for row in report.rows(KERNEL)} == {2, 3}


def test_more_processes_than_a_machine_has_devices_have_different_ids(tmp_path):
    job = Job.of(16, steps=1, micro_batches=1, layers=1)
    (report,) = written(tmp_path, job, per_report=16)
    assert len(report.processes) == 16


def test_all_names_of_ranges_can_be_registered(tmp_path, whole):
    variant = NsysVariant(registered_names=True)
    (report,) = written(tmp_path, ranks=(0, 1, 2, 3), per_report=4, variant=variant)
    ranges = [row for row in report.rows(NVTX) if row["eventType"] == 59]
    assert {row["text"] for row in ranges} == {None, "rendezvous"}
    assert len(report.strings) > 2 * len(whole[0].strings)
    names = Counter(report.name(row) for row in ranges)
    base = [row for row in whole[0].rows(NVTX) if row["eventType"] == 59]
    assert names == Counter(whole[0].name(row) for row in base)
