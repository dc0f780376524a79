"""Test what each rank called: equal in another process, and batches as their closing entry."""

import gc
import pickle
from dataclasses import fields

import numpy as np
import pytest
from builders.hang_files import calls_of, dump_of, write_dumps

from fastcomm.errors import FastcommError
from fastcomm.formats.flight_recorder import Calls, read
from fastcomm.hang.analysis import diagnose_hang
from fastcomm.hang.calls import RankCalls, job_of, of_dump

CALL = dump_of(0, 4, 1)["entries"][0]


def read_calls(folder, calls):
    path = folder / "rank_0"
    path.write_bytes(pickle.dumps({"version": "2.10", "entries": calls}, 2))
    return of_dump(read(path))


def columns_of(calls):
    own = {one.name: getattr(calls, one.name) for one in fields(RankCalls)}
    inner = own.pop("calls")
    own |= {f"calls.{one.name}": getattr(inner, one.name) for one in fields(Calls)}
    return own


@pytest.mark.parametrize("steps", [0, 3, 200])
def test_the_calls_of_a_rank_are_the_same_in_another_process(tmp_path, steps):
    entries = dump_of(0, 8, steps, absent=1)["entries"] if steps else []
    message = {**CALL, "profiling_name": "nccl:send 0->1", "is_p2p": True}
    own = read_calls(tmp_path, [*entries, message] if steps else []).shortened(64)
    again = columns_of(pickle.loads(pickle.dumps(own)))
    for name, column in columns_of(own).items():
        np.testing.assert_equal(again[name], column, err_msg=name)
        assert getattr(again[name], "dtype", None) == getattr(column, "dtype", None), name


def batch(number, *, is_closed, state="completed", group="0"):
    own = {**CALL, "process_group": [group, "pp"], "is_p2p": True, "p2p_seq_id": number}
    own |= {"retired": False, "state": "scheduled"}
    messages = [
        {**own, "profiling_name": f"nccl:{side}"} for side in ("send 0->1", "recv 0<-1")
    ]
    closing = {**own, "profiling_name": "nccl:coalesced", "state": state}
    return [*messages, closing] if is_closed else messages


def test_messages_are_as_far_as_the_entry_that_closes_their_batch(tmp_path):
    calls = [
        *batch(1, is_closed=True),
        *batch(2, is_closed=False),
        *batch(3, is_closed=True, state="started"),
        *batch(4, is_closed=True)[2:],
        *batch(4, is_closed=False, group="1"),
        *batch(4, is_closed=True),
        *batch(5, is_closed=False),
    ]
    own = read_calls(tmp_path, calls)
    assert own.done.tolist() == [
        *(True, True, True),
        *(False, False),
        *(False, False, False),
        True,
        *(False, False),
        *(True, True, True),
        *(False, False),
    ]
    assert np.flatnonzero(own.begun).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("without", "members"),
    [
        ((6,), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((4, 5), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((2, 6), [(0, 1, 3), (4, 5, 7)]),  # one of each group, or both of one that is larger
    ],
)
def test_ranks_without_a_dump_are_members_of_the_one_group_that_lacks_as_many(
    tmp_path, without, members
):
    ranks = [
        calls_of(tmp_path, rank, dump_of(rank, 8, 2) | {"pg_config": {}})
        for rank in range(8)
        if rank not in without
    ]
    groups = job_of(ranks, world=8).members
    assert [groups[key] for key in groups if key.desc == "mesh_tp"] == members


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_of_cycles_is_afterwards_what_it_was_before(tmp_path, is_enabled):
    write_dumps(tmp_path / "dumps", 8, absent=5, age=600)
    (tmp_path / "none").mkdir()
    before = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        assert diagnose_hang(tmp_path / "dumps").culprits == (5,)
        assert gc.isenabled() == is_enabled
        with pytest.raises(FastcommError):
            diagnose_hang(tmp_path / "none")
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()
