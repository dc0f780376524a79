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


def pair(rank, last, size):
    """A message of rank 0 to rank 1, of another size on each side."""
    if rank > 1:
        return []
    op = "send 0->1" if rank == 0 else "recv 1<-0"
    shape = [[64 if rank == 0 else size]]
    return [call(last, op, input_sizes=shape, output_sizes=shape)]


@pytest.mark.parametrize("size", [64, 128])
def test_sides_of_a_message_with_other_sizes_are_both_named(tmp_path, size):
    hang = diagnose_hang(write(tmp_path, lambda rank, last: pair(rank, last, size)))
    kind = "stalled" if size == 64 else "mismatch_size"
    assert (hang.kind, hang.culprits) == (kind, (0, 1))
    if size != 64:
        assert "The sides of send of ranks 0-1 have different sizes" in hang.headline
        text = "\n".join(hang.evidence)
        assert "rank 0 calls send with [[64]]" in text
        assert "rank 1 calls recv with [[128]]" in text


def test_sides_of_a_message_with_other_types_are_both_named(tmp_path):
    def typed(rank, last):
        more = {"input_dtypes": ["Half"], "output_dtypes": ["Half"]} if rank else {}
        return [{**one, **more} for one in pair(rank, last, 64)]

    hang = diagnose_hang(write(tmp_path, typed))
    assert (hang.kind, hang.culprits) == ("mismatch_dtype", (0, 1))


@pytest.mark.parametrize("op", ["all_gather", "all_gather_v", "reduce_scatter"])
def test_parts_of_other_sizes_that_make_up_the_whole_are_no_mismatch(tmp_path, op):
    def uneven(sizes):
        def calls(rank, last):
            part, whole = [[sizes[rank]]], [[sum(range(1, 9))]]
            first, second = (whole, part) if "scatter" in op else (part, whole)
            return [call(last, op, input_sizes=first, output_sizes=second)]

        return calls

    hang = diagnose_hang(write(tmp_path, uneven([*range(1, 9)])))
    assert hang.kind == "stalled"
    hang = diagnose_hang(write(tmp_path, uneven([1, 2, 3, 4, 5, 6, 7, 99])))
    assert hang.kind == "mismatch_size"
    assert hang.confidence == "low"


def batch(last, rank, messages):
    """A batch of messages, open, with the entry that closes it."""
    own = [call(last, one, p2p_seq_id=1) for one in messages]
    own.append(call(last, "coalesced", p2p_seq_id=1, is_p2p=True))
    for at, one in enumerate(own):
        one["record_id"] = last["record_id"] + 1 + at
    return own


@pytest.mark.parametrize("steps", [3, 30])
@pytest.mark.parametrize("form", ["next", "both", "far"])
def test_a_ring_of_batches_is_one_of_all_its_ranks(tmp_path, form, steps):
    def ring(rank, last):
        after, before = (rank + 1) % 4, (rank - 1) % 4
        messages = {
            "next": [f"send {rank}->{after}", f"recv {rank}<-{after}"],
            "both": [f"send {rank}->{after}", f"send {rank}->{before}"],
            "far": [f"send {rank}->{after}", f"recv {rank}<-{(rank + 2) % 4}"],
        }
        return batch(last, rank, messages[form])

    hang = diagnose_hang(write(tmp_path, ring, 4, steps))
    assert (hang.kind, hang.culprits) == ("p2p_order", (0, 1, 2, 3))
    assert hang.confidence == "low"
