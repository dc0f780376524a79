"""Test that differences which completed calls had, too, are no cause of a hang."""

import gzip
import json

import pytest
from builders.hang_files import dump_of

from fastcomm.hang.analysis import diagnose_hang

WORLD, STEPS = 4, 12


def name(call, rank):
    call["profiling_name"] = f"nccl:all_reduce_of_rank_{rank}"


def step_name(call, rank):
    call["profiling_name"] = f"nccl:step_{call['record_id']}_of_rank_{rank}"


def size(call, _rank):
    call["input_sizes"] = call["output_sizes"] = []


def dtype(call, _rank):
    call["input_dtypes"] = call["output_dtypes"] = ["Half"]


def root(call, rank):
    call["profiling_name"] = "nccl:gather"
    call["output_sizes"] = [[64]] * 4 if rank == 3 else []


def write(folder, change, ranks, steps, absent):
    """Dumps in which the last calls of some ranks are changed, so many of them."""
    folder.mkdir()
    for rank in range(WORLD):
        dump = dump_of(rank, WORLD, STEPS, absent)
        if rank in ranks:
            for call in dump["entries"][-steps:]:
                change(call, rank)
        packed = gzip.compress(json.dumps(dump).encode(), mtime=1_700_000_650)
        (folder / f"rank_{rank}.json.gz").write_bytes(packed)
    hang = diagnose_hang(folder)
    return hang.kind, hang.culprits


CHANGES = {
    "mismatch_op": name,
    "mismatch_size": size,
    "mismatch_dtype": dtype,
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("ranks", [(3,), range(WORLD)])
def test_what_all_calls_had_is_not_why_one_hangs(tmp_path, kind, ranks):
    change = CHANGES[kind]
    assert write(tmp_path / "all", change, ranks, 3 * STEPS, 1) == ("not_arrived", (1,))
    if len(ranks) == 1:
        assert write(tmp_path / "new", change, ranks, 1, 1) == (kind, (3,))
        assert write(tmp_path / "rare", change, ranks, 4, 1) == (kind, (3,))


def test_names_that_differ_in_each_call_are_no_mismatch(tmp_path):
    verdict = write(tmp_path / "all", step_name, range(WORLD), 3 * STEPS, 1)
    assert verdict == ("not_arrived", (1,))


def test_roots_of_all_gathers_are_not_why_one_hangs(tmp_path):
    def of_two(call, rank):
        root(call, 3 if rank > 1 else rank)

    assert write(tmp_path / "all", of_two, range(WORLD), 3 * STEPS, 1) == ("not_arrived", (1,))
