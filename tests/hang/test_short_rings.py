"""Test rings that are shorter than what a host has called ahead of its device."""

import gzip
import json

from builders.hang_files import dump_of

from fastcomm.hang.analysis import diagnose_hang

START = 1_700_000_000
PIPELINE = ("9", "mesh_pp")


def called(like, record, name, group, number, **more):
    """An open call."""
    return {
        **like, "record_id": record, "profiling_name": name, "process_group": [*group],
        "collective_seq_id": number, "state": "scheduled", "retired": False, **more,
        "time_created_ns": (START + 40) * 1_000_000_000 + record,
    }  # fmt: skip


def write(folder, entries_of):
    """Dumps of 8 ranks, the calls of each changed."""
    folder.mkdir()
    for rank in range(8):
        dump = dump_of(rank, 8, 4)
        dump["entries"] = entries_of(rank, dump["entries"])
        dump["pg_config"]["9"] = {
            "name": "9",
            "desc": "mesh_pp",
            "ranks": str([rank % 4, 4 + rank % 4]),
        }
        packed = gzip.compress(json.dumps(dump).encode(), mtime=START + 650)
        (folder / f"rank_{rank}.json.gz").write_bytes(packed)
    return diagnose_hang(folder)


def test_a_rank_whose_ring_begins_within_a_batch_does_not_stand_in_nothing(tmp_path):
    def entries(rank, done):
        like = done[-1]
        done = done[:-2]
        if rank < 4:
            send = called(like, 40, "nccl:send 0->1", PIPELINE, 1, is_p2p=True, p2p_seq_id=1)
            return [*done, send]
        own = ("2", "mesh_tp")
        batch = called(like, 50, "nccl:coalesced", PIPELINE, 1, is_p2p=True, p2p_seq_id=1)
        more = [called(like, 50 + at, "nccl:all_reduce", own, 9 + at) for at in range(1, 5)]
        return [batch, *more]

    hang = write(tmp_path / "job", entries)
    assert hang.hang
    assert hang.confidence == "low"
    assert not any("has nothing open" in line for line in hang.evidence)
    assert any("the ring may have overwritten" in line for line in hang.evidence)


def test_old_calls_that_only_overwritten_ones_explain_are_a_hang(tmp_path):
    def entries(_rank, done):
        like = done[-1]
        return [
            called(like, 50 + at, "nccl:all_reduce", ("0", "default_pg"), 20 + at)
            for at in range(5)
        ]

    hang = write(tmp_path / "job", entries)
    assert (hang.kind, hang.confidence) == ("stalled", "low")
    assert hang.culprits == (*range(8),)
    assert any("TORCH_FR_BUFFER_SIZE" in line for line in hang.evidence)
