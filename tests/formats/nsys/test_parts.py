"""Test the steps from an NCCL range to a communication event against definitions."""

import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.formats.nsys import nccl_operations, nvtx, schema
from fastcomm.formats.nsys.communicators import (
    Communicator,
    CommunicatorRecords,
    Membership,
    global_ranks,
    join,
    sizes_of_operations,
    sizes_of_parts,
    world_size,
)
from fastcomm.formats.nsys.events import read_waits
from fastcomm.formats.nsys.export import ExportRows
from fastcomm.formats.nsys.nccl_operations import ANY, COLLECTIVE, MESSAGES
from fastcomm.formats.nsys.nvtx import FIELDS, NcclCalls, NcclRanges
from fastcomm.trace.schema import OP, OPS
from fastcomm_kernels.arrays import NULL

NAMES = (
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclAllReduce",
    "ncclAllGather",
    "ncclSend",
    "ncclRecv",
)
START, END = NAMES[:2]


def nccl(*rows, threads=None, open_rows=()):
    """Calls one after another: (name, communicator, size, peer)."""
    filled = [(*row, *(None,) * (4 - len(row))) for row in rows]
    count = len(filled)
    column = [
        np.array([NULL if row[k] is None else row[k] for row in filled], np.int64)
        for k in (1, 2, 3)
    ]
    start = np.arange(count, dtype=np.int64) * 10
    unknown = np.full(count, NULL, np.int64)
    return NcclRanges(
        calls=NcclCalls(
            names=NAMES,
            code=np.array([NAMES.index(row[0]) for row in filled], np.int64),
            start=start,
            stop=start + 8,
            thread=np.array(threads or [1] * count, np.int64),
        ),
        open=np.isin(np.arange(count), list(open_rows)),
        communicator=column[0],
        size=column[1],
        peer=column[2],
        root=unknown,
        ranks=unknown,
        rank=unknown,
    )


def owners(names, threads):
    """By the rule, call for call: which range launches each operation; None: nobody knows."""
    found = {}
    for thread in set(threads):
        depth, waiting = 0, []
        for row, name in enumerate(names):
            if threads[row] != thread:
                continue
            if name == START:
                depth += 1
            elif name == END:
                depth = max(0, depth - 1)
                if depth == 0:
                    found |= dict.fromkeys(waiting, row)
                    waiting = []
            elif depth == 0:
                found[row] = row
            else:
                waiting.append(row)
        found |= dict.fromkeys(waiting)
    return found


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 2)), max_size=25))
def test_the_outermost_end_of_a_group_launches_what_is_in_it(calls):
    names, threads = [name for name, _ in calls], [thread for _, thread in calls]
    made = nccl(*[(name, 5, 8) for name in names], threads=threads)
    found = nccl_operations.find_operations(made)
    wanted = owners(names, threads)
    assert found.row.tolist() == sorted(wanted)
    for row, owner in zip(found.row.tolist(), found.owner.tolist(), strict=True):
        assert owner == (-1 if wanted[row] is None else wanted[row])


def test_an_operation_that_never_ends_is_in_no_group():
    made = nccl((START,), ("ncclSend", 5, 8, 1), ("ncclSend", 5, 8, 2), (END,), open_rows=[1])
    found = nccl_operations.find_operations(made)
    assert found.owner.tolist() == [-1, 3]


def matched(made, kernels, owner, launch=None):
    """Kernels by kind, all launched by the range `owner`."""
    count = len(kernels)
    found = nccl_operations.find_operations(made)
    return nccl_operations.match(
        found,
        np.full(count, owner, np.int64),
        np.array(kernels, np.int64),
        np.arange(count, dtype=np.int64) if launch is None else np.array(launch, np.int64),
        np.full(count, -1, np.int64),
    )


def test_parts_and_kernels_are_paired_by_kind_then_by_order():
    made = nccl(
        (START,), ("ncclSend", 5, 8, 1), ("ncclAllReduce", 6, 4), ("ncclRecv", 5, 8, 1),
        ("ncclAllReduce", 7, 4), (END,),
    )  # fmt: skip
    # parts in the order of their first operations: messages of 5, sums of 6, sums of 7
    assert matched(made, [COLLECTIVE, MESSAGES, COLLECTIVE], 5).part.tolist() == [1, 0, 2]
    assert matched(made, [COLLECTIVE, COLLECTIVE, ANY], 5).part.tolist() == [1, 2, 0]


def test_fused_operations_belong_to_one_kernel():
    made = nccl((START,), ("ncclAllReduce", 5, 4), ("ncclAllReduce", 6, 4), (END,))
    found = matched(made, [COLLECTIVE], 3)
    assert found.fused == {0: (0, 1)}
    assert not found.extra.any()


def test_surplus_kernels_have_no_bytes():
    made = nccl(
        (START,), ("ncclSend", 5, 4, 1), ("ncclRecv", 5, 4, 1), ("ncclSend", 5, 4, 2), (END,)
    )
    found = matched(made, [MESSAGES, MESSAGES], 4)
    assert found.part.tolist() == [0, 0]
    assert found.extra.tolist() == [False, True]


def test_equally_many_kernels_and_operations_are_paired():
    made = nccl((START,), ("ncclAllGather", 5, 4), ("ncclAllGather", 5, 8), (END,))
    found = matched(made, [COLLECTIVE, COLLECTIVE], 3)
    assert found.operation.tolist() == [0, 1]
    assert not found.extra.any()


def test_launches_of_another_thread_are_matched_only_if_complete():
    made = nccl(("ncclAllReduce", 5, 4), ("ncclAllReduce", 6, 4))
    found = matched(made, [COLLECTIVE, COLLECTIVE], -1, launch=[20, 10])
    assert found.part.tolist() == [1, 0]
    assert found.by_order == 2
    assert matched(made, [COLLECTIVE], -1, launch=[20]).part.tolist() == [-1]
    assert matched(made, [COLLECTIVE] * 2, -1, launch=[20, NULL]).part.tolist() == [-1, -1]


def parts_of(made, communicators=None, marked=None):
    found = nccl_operations.find_operations(made)
    known = communicators or {5: Communicator(size=4, rank=1, ranks=(0, 1, 2, 3))}
    alone = sizes_of_operations(found, known)
    marks = np.full(len(found.row), -1 if marked is None else OP[marked], np.int8)
    parts = sizes_of_parts(found, alone, known, marks)
    return [
        (OPS[op], *(None if value == NULL else value for value in row))
        for op, *row in zip(
            parts.op.tolist(), *(column.tolist() for column in parts.sizes), strict=True
        )
    ]


def test_sizes_follow_the_definition_of_each_nccl_call():
    assert parts_of(nccl(("ncclAllReduce", 5, 100))) == [("AllReduce", 100, 100, 150)]
    assert parts_of(nccl(("ncclAllGather", 5, 100))) == [("AllGather", 100, 400, 300)]
    assert parts_of(nccl(("ncclSend", 5, 100, 0))) == [("SendRecv", 100, 100, 100)]
    assert parts_of(nccl(("ncclAllReduce", 9, 100))) == [("AllReduce", 100, 100, None)]
    assert parts_of(nccl(("ncclAllReduce", 5))) == [("AllReduce", None, None, None)]


def group(*rows):
    return nccl((START,), *rows, (END,))


def test_messages_that_include_the_own_rank_or_three_others_are_an_all_to_all():
    even = [(name, 5, 10, peer) for peer in range(4) for name in ("ncclSend", "ncclRecv")]
    assert parts_of(group(*even)) == [("AllToAll", 10, 40, 30)]
    others = [row for row in even if row[3] != 1]
    assert parts_of(group(*others)) == [("AllToAll", None, 30, 22)]  # 22.5, half to even
    two = [row for row in even if row[3] in {0, 2}]
    assert parts_of(group(*two)) == [("SendRecv", 10, 20, 20)]
    assert parts_of(group(*two), marked="AllToAll") == [("AllToAll", None, 20, 15)]
    assert parts_of(group(*even), marked="SendRecv") == [("SendRecv", 10, 40, 40)]


def test_a_message_of_unknown_size_makes_the_total_unknown():
    rows = [("ncclSend", 5, None, 0), ("ncclRecv", 5, 10, 0), ("ncclSend", 5, 10, 2)]
    assert parts_of(group(*rows)) == [("SendRecv", None, None, None)]


def test_messages_inside_a_gather_range_are_one_gather():
    rows = [("ncclRecv", 5, 10, peer) for peer in range(4)]
    assert parts_of(group(*rows), marked="Gather") == [("Gather", 10, 40, 30)]


def test_operations_of_different_kinds_in_one_kernel_add_up():
    rows = [("ncclAllReduce", 5, 100), ("ncclAllGather", 5, 100)]
    assert parts_of(group(*rows)) == [("OTHER", 200, 500, 450)]


BLOB = bytes.fromhex(
    "0100000000000000" "0500000100000000" "1800000000000000" "2000000000000000"
    "0100000000000080" "0000900100000000" "0400000000000000"
)  # fmt: skip


class NoTables:
    path = "made up"

    def rows(self, table, columns, **_):
        return ExportRows(0, {})


def decoded(name, blob=b"", text=""):
    calls = NcclCalls(
        names=(name,),
        code=np.zeros(1, np.int64),
        start=np.zeros(1, np.int64),
        stop=np.ones(1, np.int64),
        thread=np.ones(1, np.int64),
    )
    found = nvtx.decode(NoTables(), calls, pa.chunked_array([[blob]], pa.binary()), [text])
    return {key: value for key in FIELDS if (value := int(found[key][0])) != NULL}


@pytest.mark.parametrize("fourth", [32, 56])
def test_the_example_of_the_specification_is_read(fourth):
    blob = BLOB[:24] + fourth.to_bytes(8, "little") + BLOB[32:]
    wanted = {"communicator": -(2**63) + 1, "size": 26_214_400}
    assert decoded("ncclAllReduce", blob) == wanted


@pytest.mark.parametrize(
    "id_", [9223372036854775809, "9,223,372,036,854,775,809", "0x8000000000000001"]
)
@pytest.mark.parametrize("size", [26_214_400, "26,214,400"])
def test_json_is_read_in_every_spelling(id_, size):
    import json

    text = json.dumps({"NCCL communicator ID": id_, "Message size [bytes]": size, "x": None})
    wanted = {"communicator": -(2**63) + 1, "size": 26_214_400}
    assert decoded("ncclAllReduce", text=text) == wanted


@pytest.mark.parametrize("text", ["", "nothing", "[]", '{"Bytes": "many"}', '{"Bytes": 1e3}'])
def test_empty_json_payloads_give_nothing(text):
    assert decoded("ncclAllReduce", text=text) == {}


def test_binary_payloads_take_precedence_over_json():
    text = '{"NCCL communicator ID": 7, "Message size [bytes]": 8}'
    assert decoded("ncclAllReduce", BLOB, text)["size"] == 26_214_400


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("ncclAllGather", [(8, 7), (8, 9)], {"communicator": 7, "size": 9}),
        ("ncclAllGather", [(8, 9)], {"size": 9}),
        ("ncclSend", [(8, 7), (8, 9), (4, 3), (4, 0)],
         {"communicator": 7, "size": 9, "peer": 3}),
        ("ncclSend", [(8, 9), (4, 3), (4, 0)], {"size": 9, "peer": 3}),
        ("ncclCommInitRank", [(8, 7), (4, 8), (4, 2), (4, 0), (4, 0)],
         {"communicator": 7, "ranks": 8, "rank": 2}),
        ("ncclCommSplit", [(8, 7), (8, 1), (4, 8), (4, 2), (4, 0), (4, 0), (4, 0), (4, 0)],
         {"communicator": 7, "ranks": 8, "rank": 2}),
    ],
)  # fmt: skip
def test_without_schemas_the_layout_follows_from_call_and_size(name, values, wanted):
    payload = b"".join(value.to_bytes(size, "little") for size, value in values)
    header = b"".join(each.to_bytes(8, "little") for each in (1, 1, len(payload), 32))
    assert decoded(name, header + payload) == wanted


MEMBERS = {0: (3, 2), 1: (3, 0), 2: (3, 1)}


def everybody():
    """Three processes in a world of 3 (id 100); two of them in a group (id 7)."""
    said = {}
    for process, (size, rank) in MEMBERS.items():
        memberships = {100: Membership(size=size, rank=rank)}
        if process:
            memberships[7] = Membership(size=2, rank=process - 1)
        said[process] = CommunicatorRecords(
            memberships=memberships, used=frozenset({100, 7} & {*memberships})
        )
    return said


def test_ranks_come_from_the_largest_communicator_with_all_processes():
    assert global_ranks(everybody()) == {0: 2, 1: 0, 2: 1}
    assert world_size(everybody().values()) == 3
    assert global_ranks({0: CommunicatorRecords(), 1: CommunicatorRecords()}) is None


def test_members_are_the_global_ranks_in_the_order_of_the_communicator():
    ranks = {0: 2, 1: 0, 2: 1}
    joined = join(everybody(), ranks, 3)
    assert joined[1][7] == Communicator(size=2, rank=0, ranks=(0, 1))
    assert joined[0][100].ranks == (0, 1, 2)


@given(st.integers(1, 2))
def test_a_missing_member_makes_the_member_list_unknown(absent):
    said = {key: each for key, each in everybody().items() if key != absent}
    joined = join(said, {0: 2, 1: 0, 2: 1}, 3)
    assert joined[3 - absent][7] == Communicator(size=2, rank=2 - absent, ranks=None)


def test_users_of_a_communicator_are_its_members_only_if_all_ranks_are_present():
    said = {process: CommunicatorRecords(used=frozenset({9})) for process in range(2)}
    ranks = {0: 4, 1: 5}
    assert join(said, ranks, 2)[0][9] == Communicator(size=2, rank=None, ranks=(4, 5))
    assert join(said, ranks, 8)[0][9] == Communicator(size=None, rank=None, ranks=None)


def test_parts_are_numbered_in_their_communicator_and_kind():
    from fastcomm.formats.nsys.communication_launches import numbers

    rows = [("ncclAllReduce", c, 1) for c in (5, 6, 5, 5)] + [("ncclSend", 5, 1, 0)]
    found = nccl_operations.find_operations(nccl(*rows))
    created = Communicator(size=2, rank=0, ranks=None)
    assert numbers(found, {5: created, 6: created}).tolist() == [0, 0, 1, 2, 0]
    # Of one that was created before the capture, the first ones may not be in it.
    earlier = replace(created, rank=None)
    assert numbers(found, {5: earlier, 6: created}).tolist() == [NULL, 0, *[NULL] * 3]
    assert list(itertools.chain(found.part.tolist())) == [0, 1, 2, 3, 4]


class SomeTables:
    """Waits and records of CUDA events: (event, recording, call, stream)."""

    def __init__(self, waits, records):
        self.tables = {schema.SYNC: waits, schema.CUDA_EVENT: records}

    def rows(self, table, columns, **_):
        names = ("eventId", "eventSyncId", "correlationId", "streamId", "syncType")
        rows = self.tables[table]
        made = {
            name: pa.chunked_array([pa.array([row[k] for row in rows], pa.int64())])
            for k, name in enumerate(names[: len(rows[0])])
        }
        return ExportRows(len(rows), made)


def test_a_wait_finds_the_last_record_of_its_event_and_of_no_other():
    records = [(1, NULL, 10, 7), (1, NULL, 30, 8), (2, NULL, 35, 9)]
    waits = [
        (1, NULL, 40, 20, 2), (2, NULL, 34, 20, 2), (3, NULL, 50, 20, 2), (1, NULL, 20, 20, 1),
        (1, NULL, 45, 20, 3),
    ]  # fmt: skip
    found = read_waits(SomeTables(waits, records), 0).columns
    assert found["wait_correlation"].tolist() == [30, NULL, NULL, 10, NULL]
    assert found["wait_stream"].tolist() == [8, NULL, NULL, 7, NULL]


def test_a_communicator_smaller_than_the_job_is_not_the_world():
    pair = {7: Membership(size=2, rank=0)}, {7: Membership(size=2, rank=1)}
    lines = {8: Membership(size=4, rank=2)}, {9: Membership(size=4, rank=2)}
    said = {n: CommunicatorRecords(memberships={**pair[n], **lines[n]}) for n in range(2)}
    assert global_ranks(said) is None
    assert global_ranks({n: CommunicatorRecords(memberships=pair[n]) for n in range(2)}) == {
        0: 0,
        1: 1,
    }
