"""Test the synthetic job as an nsys export: device, host, NCCL and payloads."""

import re
from collections import Counter, defaultdict

import pytest
from builders.nsys_report import (
    COMM,
    COPY,
    ELEMENT,
    KERNEL,
    MEMSET,
    NVTX,
    PEER,
    RUNTIME,
    SIZE,
    SMALL,
    calls,
    nests,
    of_ranks,
    owned,
    written,
)

from fastcomm.synthetic import play
from fastcomm.synthetic.nsys import payloads
from fastcomm.synthetic.nsys.tables import NsysVariant


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All ranks of the small job, four in a report."""
    return written(tmp_path_factory.mktemp("nsys"), per_report=4)


def check(call, rank, owner, operations):
    """What NCCL was told is what the job has moved."""
    size = ELEMENT[call.dtype]
    sums = Counter()
    for name, fields in operations:
        sums[name] += fields[SIZE]
    if call.operation.op == "AllToAll":
        assert owner == "ncclGroupEnd"
        assert sums == {"ncclSend": call.sent * size, "ncclRecv": call.received * size}
        members = set(range(call.group.size))
        assert {fields[PEER] for _, fields in operations} == members
    elif call.peers:
        assert owner == "ncclGroupEnd"
        ((name, fields),) = operations
        assert (
            name == {"Send": "ncclSend", "Recv": "ncclRecv"}[call.operation.collective.title()]
        )
        assert fields[SIZE] == call.sent * size
        assert {call.group.ranks[fields[PEER]], rank} == set(call.peers)
    else:
        count = {"AllGather": call.sent, "ReduceScatter": call.received}
        said = count.get(call.operation.op, call.sent) * size
        assert sums == {owner: said}
        assert owner == f"nccl{call.operation.op}"


def test_device_rows_have_the_times_and_streams_of_the_job(whole):
    tables = {"compute": KERNEL, "comm": KERNEL, "memcpy": COPY, "memset": MEMSET}
    for rank, report, process in of_ranks(whole):
        wanted = Counter(
            (tables[work.kind], work.start, work.stop, work.stream)
            for step in play.steps(SMALL, rank)
            for work in step.works
        )
        found = Counter(
            (table, row["start"] + report.utc, row["end"] + report.utc, row["streamId"])
            for table in (KERNEL, COPY, MEMSET)
            for row in report.rows(table, process)
        )
        assert found == wanted


def test_steps_are_ranges_with_the_marks_of_the_job(whole):
    for rank, report, process in of_ranks(whole):
        wanted = [
            (f"iteration {step.number}", step.start, step.stop)
            for step in play.steps(SMALL, rank)
        ]
        rows = [row for rows in report.ranges(process).values() for row in rows]
        found = [
            (report.name(row), row["start"] + report.utc, row["end"] + report.utc)
            for row in rows
            if report.name(row).startswith("iteration")
        ]
        assert found == wanted


def test_every_collective_is_named_on_the_device_as_the_job_names_it(whole):
    for rank, report, process in of_ranks(whole):
        wanted = Counter(work.call.kernel for work in calls(SMALL, rank))
        names = [report.strings[row["demangledName"]] for row in report.rows(KERNEL, process)]
        assert Counter(name for name in names if "nccl" in name) == wanted


def test_correlations_are_unique_in_a_process_and_collide_between_two(whole):
    report = whole[0]
    alone = [
        {row["correlationId"] for row in report.rows(RUNTIME, process)}
        for process in report.processes
    ]
    for process, numbers in zip(report.processes, alone, strict=True):
        assert len(numbers) == len(report.rows(RUNTIME, process))
        devices = {row["correlationId"] for row in report.rows(KERNEL, process)}
        assert devices < numbers
    assert len(set.intersection(*alone)) > 100


def test_ids_of_threads_and_processes_are_packed_as_nsys_packs_them(whole):
    for report in whole:
        assert len(report.processes) == 4
        pids = {row["globalPid"]: row["pid"] for row in report.rows("PROCESSES")}
        for identity, pid in pids.items():
            assert (identity >> 24) & 0xFFFFFF == pid
            assert identity & 0xFFFFFF == 0
            assert identity >> 48 == 1
        threads = {row["globalTid"] for row in report.rows(RUNTIME)}
        assert {thread >> 24 for thread in threads} == {pid >> 24 for pid in pids}
        assert all(thread & 0xFFFFFF for thread in threads)


def test_ranges_of_a_thread_nest(whole):
    for _, report, process in of_ranks(whole):
        for rows in report.ranges(process).values():
            assert nests(rows)


def test_the_domain_of_nccl_differs_by_process_and_has_a_row(whole):
    domains = [report.nccl_domain(process) for _, report, process in of_ranks(whole)]
    assert domains == [1, 2, 3, 1, 2, 3, 1, 2]
    for _, report, process in of_ranks(whole):
        names = {report.name(row) for row in report.nccl(process)}
        assert "ncclGroupEnd" in names
        assert all(re.match("nccl[A-Z]", name) for name in names)


def test_payloads_add_up_to_the_bytes_of_the_calls(whole):
    for rank, report, process in of_ranks(whole):
        found = owned(report, process)
        wanted = sorted(calls(SMALL, rank), key=lambda work: work.start)
        assert len(found) == len(wanted)
        by_time = {(row["start"] + report.utc, row["streamId"]): rest for row, *rest in found}
        for work in wanted:
            owner, operations = by_time[work.start, work.stream]
            check(work.call, rank, owner, operations)


def test_a_communicator_has_one_id_on_all_its_members_and_another_has_another(whole):
    users = defaultdict(set)
    groups = defaultdict(set)
    for rank, report, process in of_ranks(whole):
        by_time = {}
        for row, _, operations in owned(report, process):
            (identity,) = {fields[COMM] for _, fields in operations}
            by_time[row["start"] + report.utc, row["streamId"]] = identity
            users[identity].add(rank)
        for work in calls(SMALL, rank):
            groups[by_time[work.start, work.stream]].add(
                (work.call.group.name, work.call.group.ranks)
            )
    assert all(len(names) == 1 for names in groups.values())
    for identity, ((_, ranks),) in groups.items():
        assert users[identity] == set(ranks)
    assert any(identity >= 1 << 63 for identity in groups)
    assert len(groups) == len({name for ((name, _),) in groups.values()})


def test_communicators_are_made_with_the_rank_of_each_member(whole):
    made = defaultdict(dict)
    for rank, report, process in of_ranks(whole):
        for row in report.nccl(process):
            if report.name(row) in {"ncclCommInitRankConfig", "ncclCommSplit"}:
                fields = report.decode(row)
                made[fields[COMM]][rank] = fields
                if report.name(row) == "ncclCommSplit":
                    assert len(made[fields["Parent NCCL communicator ID"]]) == rank + 1
    (world,) = [members for members in made.values() if len(members) == 8]
    assert [world[rank]["Rank"] for rank in range(8)] == list(range(8))
    for members in made.values():
        assert {fields["No. of ranks"] for fields in members.values()} == {len(members)}
        places = [members[rank]["Rank"] for rank in sorted(members)]
        assert places == list(range(len(members)))


def test_the_blob_is_that_of_the_specification():
    layout = payloads.layout("ncclAllReduce", "2.27")
    values = {COMM: 0x8000000000000001, SIZE: 25 << 20, "Reduction operation": 4}
    said = """
        01000000 00000000 05000001 00000000 18000000 00000000 20000000 00000000
        01000000 00000080 00009001 00000000 04000000 00000000"""
    assert payloads.blob(layout, 1, values, total=False) == bytes.fromhex(said)
    other = said.replace("20000000 00000000\n", "38000000 00000000\n")
    assert payloads.blob(layout, 1, values, total=True) == bytes.fromhex(other)


@pytest.mark.parametrize(
    ("call", "release", "schema", "size", "fields"),
    [
        ("ncclAllGather", "2.27", 4, 16, [(COMM, 18, 0), (SIZE, 22, 8)]),
        ("ncclSend", "2.27", 9, 24, [(COMM, 18, 0), (SIZE, 22, 8), (PEER, 5, 16)]),
        ("ncclRecv", "2.24", 10, 16, [("Bytes", 22, 0), (PEER, 5, 8)]),
        ("ncclBroadcast", "2.22", 6, 16, [("Bytes", 22, 0), ("Root", 5, 8)]),
        ("ncclReduceScatter", "2.24", 7, 16, [(SIZE, 22, 0), (None, 16777230, 8)]),
        ("ncclAllReduce", "2.22", 5, 16, [(SIZE, 22, 0), (None, 16777227, 8)]),
        ("ncclAllReduce", "2.27", 5, 24, [(COMM, 18, 0), (SIZE, 22, 8), (None, 16777232, 16)]),
        ("ncclAllReduce", "2.28", 5, 24, [(COMM, 18, 0), (SIZE, 22, 8), (None, 16777236, 16)]),
        ("ncclAllGather", "2.22", 4, 8, [(SIZE, 22, 0)]),
        ("ncclAlltoAll", "2.28", 16, 16, [(COMM, 18, 0), (SIZE, 22, 8)]),
    ],
)
def test_a_payload_is_laid_out_as_its_release_lays_it_out(call, release, schema, size, fields):
    layout = payloads.layout(call, release)
    assert (layout.schema, layout.size) == (16777216 + schema, size)
    said = [(name or "Reduction operation", *rest) for name, *rest in fields]
    assert [(field.label, field.type, field.offset) for field in layout.fields] == said


def test_what_a_release_does_not_know_has_no_payload():
    assert payloads.layout("ncclCommSplit", "2.22") is None
    assert payloads.layout("ncclAlltoAll", "2.27") is None
    assert payloads.layout("ncclGroupEnd", "2.28") is None
    assert payloads.layout("ncclCommSplit", "2.27").size == 40
    assert payloads.layout("ncclCommInitRankConfig", "2.27").size == 24


def test_schema_rows_repeat_by_process_and_their_first_offset_is_null(tmp_path):
    (report,) = written(tmp_path, ranks=(0, 1, 2, 3), per_report=4)
    schemas = Counter(
        (row["domainId"], row["schemaId"]) for row in report.rows("NVTX_PAYLOAD_SCHEMAS")
    )
    assert set(schemas.values()) == {1, 2}  # ranks 0 and 3 have the same number of a domain
    sizes = {row["schemaId"]: row["payloadSize"] for row in report.rows("NVTX_PAYLOAD_SCHEMAS")}
    assert sizes[16777221] == 24
    for row in report.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES"):
        assert (row["offset"] is None) == (row["idx"] == 0)
    enums = report.rows("NVTX_PAYLOAD_ENUM_ENTRIES")
    assert {(row["schemaId"], row["value"], row["name"]) for row in enums} == {
        (16777232, number, name)
        for number, name in enumerate(("Sum", "Product", "Max", "Min", "Avg"))
    }
    (bare,) = written(tmp_path, ranks=[0], variant=NsysVariant(schema_rows=False))
    assert not any(name.startswith("NVTX_PAYLOAD") for name in bare.tables)


def test_rows_are_in_no_order(whole):
    for table in (KERNEL, RUNTIME, NVTX):
        starts = [row["start"] for row in whole[0].rows(table)]
        assert starts != sorted(starts)


def test_groups_nest(whole):
    deepest = 0
    for _, report, process in of_ranks(whole):
        for rows in report.ranges(process).values():
            depth = 0
            for row in rows:
                depth += {"ncclGroupStart": 1, "ncclGroupEnd": -1}.get(report.name(row), 0)
                deepest = max(deepest, depth)
                assert depth >= 0
            assert depth == 0
    assert deepest == 2


def test_there_are_open_ranges_marks_and_ranges_across_threads(whole):
    kinds = Counter(row["eventType"] for row in whole[0].rows(NVTX))
    assert kinds[34] == kinds[39] == kinds[60] == 4
    assert kinds[75] == 1 + 2 + 3 + 1
    (one, *_) = [row for row in whole[0].rows(NVTX) if row["eventType"] == 60]
    assert one["globalTid"] != one["endGlobalTid"]
    opened = [row for row in whole[0].rows(NVTX) if row["end"] is None]
    assert Counter(row["eventType"] for row in opened)[59] == 4
    (details,) = whole[0].rows("ANALYSIS_DETAILS")
    last = [row for row in whole[0].rows(NVTX) if row["end"] == details["duration"]]
    assert [whole[0].name(row) for row in last] == ["epoch"] * 4
    ends = [row["end"] for table in (KERNEL, RUNTIME, NVTX) for row in whole[0].rows(table)]
    assert max(end for end in ends if end is not None) == details["duration"]


def test_a_process_without_work_shares_correlations_with_the_ranks(whole):
    for report in whole:
        (row,) = [row for row in report.rows("PROCESSES") if row["name"] == "torchrun"]
        process = row["globalPid"] >> 24
        assert process not in report.processes
        (call,) = report.rows(RUNTIME, process)
        assert len(report.rows(NVTX, process)) == 1
        works = [row for table in (KERNEL, MEMSET) for row in report.rows(table)]
        assert call["correlationId"] in {row["correlationId"] for row in works}


def test_products_of_matrices_are_launched_by_the_driver(whole):
    report, process = whole[0], whole[0].processes[0]
    calls = {
        row["correlationId"]: report.strings[row["nameId"]]
        for row in report.rows(RUNTIME, process)
    }
    found = defaultdict(set)
    for row in report.rows(KERNEL, process):
        found[calls[row["correlationId"]]].add(report.strings[row["shortName"]])
    assert found.keys() == {
        "cuLaunchKernelEx",
        "cudaLaunchKernelExC_v11060",
        "cudaLaunchKernel_v7000",
    }
    assert all(name.startswith("nvjet") for name in found["cuLaunchKernelEx"])
    assert "vectorized_elementwise_kernel" in found["cudaLaunchKernel_v7000"]


def test_another_library_has_ranges_in_a_domain_of_its_own(whole):
    for _, report, process in of_ranks(whole):
        domain = report.nccl_domain(process)
        others = {
            report.name(row)
            for row in report.rows(NVTX, process)
            if row["eventType"] == 59 and row["domainId"] not in {0, domain}
        }
        assert others == (set() if domain == 1 else {"cub::DeviceFor"})
