"""Test that an answer is no more certain than what the dumps can tell."""

import gzip
import json

import pytest
from builders.hang_files import dump_of

from fastcomm.hang.analysis import diagnose_hang

WORLD = 8
GROUP = """\
Thread 0x00007f (most recent call first):
  File "site-packages/torch/distributed/distributed_c10d.py", line 10 in new_group
  File "train.py", line 48 in <module>
"""


def write(folder, calls_of, world=WORLD, steps=3):
    """Write packed dumps of a job; `calls_of` returns the open calls of a rank, by its last."""
    for rank in range(world):
        document = dump_of(rank, world, steps, absent=rank)
        last = document["entries"][-1]
        document["entries"] += calls_of(rank, last)
        path = folder / f"rank_{rank}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=1_700_000_500))
    return folder


def call(last, op, **more):
    """A call after the last one of a rank, which does not end."""
    return last | {
        "record_id": last["record_id"] + 1,
        "profiling_name": f"nccl:{op}",
        "collective_seq_id": last["collective_seq_id"] + 1,
        "state": "scheduled",
        "retired": False,
        "is_p2p": "->" in op or "<-" in op,
        **more,
    }


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize(("op", "arrow"), [("send", "->"), ("recv", "<-")])
def test_a_ring_in_which_each_side_sends_first_is_one_of_all_its_ranks(
    tmp_path, world, op, arrow
):
    def ring(rank, last):
        return [call(last, f"{op} {rank}{arrow}{(rank + 1) % world}")]

    hang = diagnose_hang(write(tmp_path, ring, world))
    assert (hang.kind, hang.culprits) == ("p2p_order", (*range(world),))
    assert hang.confidence == "low"
    assert "or one left out a message" in hang.headline


def test_who_does_not_join_a_new_group_is_not_certain_where_no_rank_stands_out(tmp_path):
    write(tmp_path, lambda rank, last: [])
    for rank in range(WORLD):
        (tmp_path / f"stack_{rank}.txt").write_text(GROUP)
    hang = diagnose_hang(tmp_path)
    assert (hang.kind, hang.culprits) == ("group_creation", (*range(WORLD),))
    assert hang.confidence == "low"
    assert "ranks 0-7 stand in it, or hold it up" in hang.headline


def test_two_ranks_that_cross_each_other_have_no_others(tmp_path):
    groups = {str(at): {"name": str(at), "desc": "d", "ranks": "[0, 1]"} for at in (0, 1)}
    for rank in range(2):
        first = dump_of(rank, 2, 1)["entries"][0]
        entry = call(first, "all_reduce", process_group=[str(rank), "d"])
        content = json.dumps({"version": "2.10", "pg_config": groups, "entries": [entry]})
        (tmp_path / f"rank_{rank}.json").write_text(content)
    hang = diagnose_hang(tmp_path)
    assert (hang.kind, hang.culprits, hang.waiting) == ("order", (0, 1), ())
    assert "Ranks 0-1 make calls in different orders" in hang.headline


def test_the_chain_of_waiting_has_a_row_for_each_operation(tmp_path):
    def other(rank, last):
        return [call(last, "broadcast" if rank == 3 else "all_reduce")]

    hang = diagnose_hang(write(tmp_path, other))
    assert (hang.kind, hang.culprits) == ("mismatch_op", (3,))
    rows = {link.call.split()[0]: link.ranks for link in hang.links}
    assert rows == {"all_reduce": (0, 1, 2, 4, 5, 6, 7), "broadcast": (3,)}


def test_dumps_without_calls_tell_nothing(tmp_path):
    for rank in range(4):
        document = dump_of(rank, 4, 3) | {"entries": []}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(document))
    hang = diagnose_hang(tmp_path)
    assert (hang.kind, hang.confidence) == ("none", "low")
    assert "No hang is seen" in hang.headline
    assert "no call is recorded in the dumps of ranks 0-3" in hang.evidence[0]
    assert "TORCH_FR_BUFFER_SIZE" in hang.next[0]
