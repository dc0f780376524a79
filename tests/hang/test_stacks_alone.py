"""Test what stacks tell where dumps do not, and files that cannot be read."""

import errno
import gzip
import json
import os

import pytest
from builders.hang_files import dump_of, write_dumps

from fastcomm.hang.analysis import diagnose_hang

HEAD = "Thread 0x00007f0001 (most recent call first):\n"
MODULE = '  File "train.py", line 48 in <module>\n'
BARRIER = (
    '  File "lib/torch/distributed/distributed_c10d.py", line 5 in monitored_barrier\n'
    '  File "lib/torch/distributed/c10d_logger.py", line 83 in wrapper\n'
)


def quiet(folder, stacks):
    """Dumps of a job in which nothing is open, and the stacks of ranks."""
    folder.mkdir()
    for rank in range(4):
        dump = dump_of(rank, 4, 8)
        dump["entries"].pop()
        packed = gzip.compress(json.dumps(dump).encode(), mtime=1_700_000_100)
        (folder / f"rank_{rank}.json.gz").write_bytes(packed)
    for rank, frames in stacks.items():
        (folder / f"stack_{rank}.txt").write_text(f"{HEAD}{frames}{MODULE}")
    return diagnose_hang(folder)


CODE = '  File "train.py", line 30 in write_index\n'
REDUCE = '  File "lib/torch/distributed/distributed_c10d.py", line 5 in all_reduce\n'


def test_a_rank_that_misses_a_barrier_without_entries_is_named(tmp_path):
    hang = quiet(tmp_path / "job", {rank: CODE if rank == 2 else BARRIER for rank in range(4)})
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (2,), "low")
    assert hang.waiting == (0, 1, 3)
    assert hang.place == "write_index (train.py:30)"
    assert any("rank 0 is in monitored_barrier" in line for line in hang.evidence)


@pytest.mark.parametrize("frames", [BARRIER, REDUCE])
def test_stacks_in_a_collective_that_no_dump_has_make_no_hang_uncertain(tmp_path, frames):
    hang = quiet(tmp_path / "job", {0: frames, 1: frames})
    assert (hang.kind, hang.confidence) == ("none", "low")
    assert any("rank 0 is in" in line for line in hang.evidence)
    assert quiet(tmp_path / "code", {0: CODE, 1: CODE}).confidence == "high"


SPY = """\
Process 4711: python train.py
Python v3.11 (/usr/bin/python)

Thread 4711 (idle): "MainThread"
    wait (threading.py:320)
    get (queue.py:171)
    __next__ (dataloader.py:630)
    train (train.py:33)
    <module> (train.py:48)
"""


def test_the_place_of_a_stack_of_py_spy_is_of_the_code_of_the_job(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=650)
    (folder / "stack_5.txt").write_text(SPY)
    assert diagnose_hang(folder).place == "train (train.py:33)"
    (folder / "stack_5.txt").write_text(SPY.replace("__next__", "load"))
    assert diagnose_hang(folder).place == "load (dataloader.py:630)"
    (folder / "stack_5.txt").write_text(SPY.replace("train (train.py:33)", "run (queue.py:9)"))
    assert diagnose_hang(folder).place == "<module> (train.py:48)"


def test_a_pipe_and_a_broken_link_are_named(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[3], age=650)
    os.mkfifo(folder / "rank_3.pickle")
    (folder / "stack_3.txt").symlink_to(folder / "absent")
    hang = diagnose_hang(folder)
    assert hang.culprits == (5,)
    for name in ("rank_3.pickle", "stack_3.txt"):
        assert any(name in line and "no regular file" in line for line in hang.warnings)


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[3], age=650)
    closed = folder / "host_3"
    closed.mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, "Permission denied", str(closed))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    hang = diagnose_hang(folder)
    assert hang.culprits == (5,)
    assert any("host_3: Permission denied" in line for line in hang.warnings)
