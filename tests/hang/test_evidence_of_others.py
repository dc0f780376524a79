"""Test that evidence of other times and other jobs decides nothing."""

import gzip
import json
import os
import time
from datetime import datetime

import pytest
from builders.hang_files import communicator, ras_json, write_dumps

from fastcomm.hang import logs
from fastcomm.hang.analysis import diagnose_hang
from fastcomm.hang.dates import dates_of, first_second, without_old
from fastcomm.hang.texts import FileText

START = 1_700_000_000  # second of the first call of `write_dumps`
OPENED = START + 6  # of the first open one, with a timeout of 600 s
DAY = 86_400


def local(second, form="%Y-%m-%d_%H:%M:%S"):
    return datetime.fromtimestamp(second).strftime(form)


def torchrun(rank, code, second):
    return (
        f"[0]:\n  time      : {local(second)}\n  host      : a1\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 4711)\n"
    )


def srun(rank, _code, second):
    head = local(second, "%Y-%m-%dT%H:%M:%S.000")
    return f"[{head}] error: x\nsrun: error: n: task {rank}: Killed\n"


def glog(rank, code, second):
    head = f"[default0]:E{local(second, '%m%d %H:%M:%S.123000')} 140 api.py:882]"
    return f"{head} rank {rank} exited with code {code}\n"


def mpirun(rank, _code, second):
    head = local(second, "%b %d %H:%M:%S")
    return f"{head} n1: process rank {rank} with PID 0 on node n exited on signal 9\n"


LAUNCHERS = (torchrun, srun, glog, mpirun)


def job(tmp_path, **more):
    """A job in which rank 5 never comes to a call, and the dump of rank 2 is lost."""
    return write_dumps(tmp_path / "job", 8, absent=5, without=[2], age=650, **more)


def verdict(folder):
    hang = diagnose_hang(folder)
    return hang.kind, hang.culprits, hang.confidence


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("age", [DAY, 3_000])
def test_an_end_before_the_first_call_is_of_another_job(tmp_path, launcher, age):
    folder = job(tmp_path)
    (folder / "launcher.log").write_text(launcher(2, -9, START - age))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "high")
    line = next(one for one in hang.evidence if "older than the first call" in one)
    assert "launcher.log:" in line


# Clocks of hosts may be 2 s apart.
@pytest.mark.parametrize("age", [3, 597])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_end_between_the_first_call_and_the_timeout_decides(tmp_path, launcher, age):
    folder = job(tmp_path)
    (folder / "launcher.log").write_text(launcher(2, -9, OPENED + age))
    assert verdict(folder) == ("missing_rank", (2,), "high")


@pytest.mark.parametrize("age", [598, 602])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_end_behind_the_timeout_is_an_effect(tmp_path, launcher, age):
    folder = job(tmp_path)
    (folder / "launcher.log").write_text(launcher(2, 1, OPENED + age))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "high")
    assert any("an effect" in line for line in hang.evidence)
    alone = write_dumps(tmp_path / "alone", 8, absent=2, without=[2], age=650)
    (alone / "launcher.log").write_text(launcher(2, 1, OPENED + age))
    assert verdict(alone) == ("missing_rank", (2,), "low")


CAUGHT = (
    "[rank2]:[E ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000)"
    " ran for 600017 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    "text",
    [
        f"{CAUGHT}rank 2 exited on signal 6\n",
        "srun: error: n1: tasks 0-1,3-4,6-7: Aborted (core dumped)\n"
        "srun: error: n1: task 2: Killed\nsrun: error: n1: task 5: Killed\n",
    ],
    ids=["watchdog", "aborts"],
)
def test_an_end_behind_a_watchdog_or_aborts_of_others_is_an_effect(tmp_path, text):
    folder = job(tmp_path)
    (folder / "launcher.log").write_text(text)
    assert verdict(folder) == ("not_arrived", (5,), "high")


def test_an_end_without_a_date_is_weaker_than_a_rank_that_never_came(tmp_path):
    folder = job(tmp_path)
    (folder / "launcher.log").write_text("rank 2 was killed by signal 9\n")
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "low")
    assert any("rank 2 was killed by signal 9" in line for line in hang.evidence)


@pytest.mark.parametrize(
    "text",
    ["rank 2 was killed by signal 9\n", "srun: error: n: task 2: Killed\n", CAUGHT],
)
def test_a_log_that_was_written_before_the_first_call_says_nothing(tmp_path, text):
    folder = job(tmp_path)
    (folder / "launcher.log").write_text(text)
    os.utime(folder / "launcher.log", (START - DAY, START - DAY))
    assert verdict(folder) == ("not_arrived", (5,), "high")


def test_what_stands_before_a_restart_of_the_ranks_is_of_another_attempt(tmp_path):
    folder = job(tmp_path)
    restart = "[default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    (folder / "launcher.log").write_text(f"rank 2 was killed by signal 9\nI1114 x] {restart}")
    assert verdict(folder) == ("not_arrived", (5,), "high")
    # The attempt of the dumps, by its date: the launcher has begun another since.
    (folder / "launcher.log").write_text(torchrun(2, -9, OPENED + 3) + restart)
    assert verdict(folder) == ("missing_rank", (2,), "high")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_the_groups_exclude_are_of_another_job(tmp_path, launcher):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=650)
    for rank in (12, 4_000_000):
        (folder / "launcher.log").write_text(launcher(rank, -9, OPENED + 3))
        hang = diagnose_hang(folder)
        assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "high")
        assert (hang.world_size, hang.missing) == (8, ())
        assert any("of another job" in line for line in hang.evidence)


def test_a_log_that_names_ranks_of_a_larger_job_is_of_that_one(tmp_path):
    folder = job(tmp_path)
    text = torchrun(12, -9, OPENED + 3) + torchrun(2, -9, OPENED + 3)
    (folder / "launcher.log").write_text(text)
    assert verdict(folder) == ("not_arrived", (5,), "high")


def test_names_of_ranks_beyond_the_job_do_not_extend_it(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=650)
    (folder / "rank_40.log").write_text("RuntimeError: Connection closed by peer\n")
    (folder / "stack_40.txt").write_text(
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in b\n'
    )
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.world_size, hang.missing) == ((5,), 8, ())


@pytest.mark.parametrize("name", ["node2.log", "launcher2.log", "host-2.txt"])
def test_numbers_of_nodes_in_names_are_no_ranks(tmp_path, name):
    folder = write_dumps(tmp_path / "job", 8, absent=2, without=[2], age=650)
    (folder / name).write_text("the last line\n")
    assert not any("the log of rank 2" in line for line in diagnose_hang(folder).evidence)
    (folder / "node2.log").write_text("[rank2]: Traceback\n[rank2]: OSError\n")
    assert any("the log of rank 2" in line for line in diagnose_hang(folder).evidence)


def test_gloo_states_no_ranks_of_the_job(tmp_path):
    folder = write_dumps(tmp_path / "job", 4, absent=3, without=[3], age=650)
    for path in folder.glob("*.gz"):
        dump = json.loads(gzip.decompress(path.read_bytes()))
        dump["pg_config"] = {"": {"name": "", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
        for call in dump["entries"]:
            call["profiling_name"] = "gloo:all_reduce"
        path.write_bytes(gzip.compress(json.dumps(dump).encode(), mtime=START + 650))
    (folder / "launcher.log").write_text("rank 3 was killed by signal 9\n")
    assert verdict(folder) == ("missing_rank", (3,), "high")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_many_ends_take_linear_time(tmp_path, launcher):
    folder = write_dumps(tmp_path / "job", 64, absent=5, age=650)
    text = "".join(launcher(rank % 64, -9, OPENED + 650) for rank in range(5_000))
    (folder / "launcher.log").write_text(text)
    begin = time.perf_counter()
    assert verdict(folder) == ("not_arrived", (5,), "high")
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("age", "kind", "culprits"),
    [
        (3_600, "not_arrived", (5,)),
        (3, "not_arrived", (5,)),
        (2, "missing_rank", (2,)),  # clocks of hosts may be so far apart
    ],
)
@pytest.mark.parametrize("count", [3, 900])
def test_a_report_of_ras_that_states_an_earlier_time_says_nothing(
    tmp_path, count, age, kind, culprits
):
    folder = job(tmp_path)
    text = ras_json(communicator("0xa", range(8), count, gone={2: "dead"}))
    written = local(START - age, "%Y-%m-%d %H:%M:%S")
    (folder / "ras.json").write_text(text.replace("2026-06-19 06:56:24", written))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == (kind, culprits, "high")
    is_old = any("before the first call in the dumps" in line for line in hang.evidence)
    assert is_old == (kind == "not_arrived")


def test_a_rank_that_died_before_the_first_call_of_all_is_the_culprit(tmp_path):
    folder = write_dumps(tmp_path / "job", 4, absent=2, without=[2], steps=0, age=650)
    (folder / "launcher.log").write_text(torchrun(2, 1, START - 60))
    assert verdict(folder) == ("missing_rank", (2,), "high")


@pytest.mark.parametrize("lines", [1, 3_000])
def test_huge_ranges_of_tasks_are_not_listed(tmp_path, lines):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=650)
    text = "".join(
        f"srun: error: h{at}: tasks {at}-9999999999: Killed\n" for at in range(lines)
    )
    (folder / "job.out").write_text(text)
    begin = time.perf_counter()
    assert verdict(folder) == ("not_arrived", (5,), "high")
    assert time.perf_counter() - begin < 5


def test_ranges_of_tasks_within_the_job_are_ranks(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[2, 4, 5], age=650)
    (folder / "job.out").write_text("srun: error: n1: tasks 2,4-5: Killed\n" * 100)
    assert verdict(folder) == ("missing_rank", (2, 4, 5), "high")
    lines = logs.DeathLines()
    text = "srun: error: n1: tasks 7,9-9999999999: Killed\n"
    lines.add(FileText(path=folder / "a", text=text), None)
    assert [(first, last) for first, last, _ in lines.tasks] == [(7, 7), (9, 9_999_999_999)]


def test_dates_of_lines():
    zoned = "2023-11-14T22:13:20"
    assert first_second(f"{zoned}Z text", START) == START
    assert first_second(f"[{zoned}.123+00:00] text", START) == START
    assert first_second("2023-11-15 00:13:20,5+02:00 text", START) == START
    for form in ("E%m%d %H:%M:%S.5", "[%a %b %d %H:%M:%S %Y]", "0: %Y/%m/%d %H:%M:%S"):
        assert first_second(local(START, form), START + DAY) == START
    for text in ("2023-13-40 99:00:00", "E9999 10:00:00", "loaded of 2023-11-14 10:00:00"):
        assert first_second(text, START) is None
    assert dates_of("text\n" * 3, START) == []


def test_the_old_part_of_a_text_keeps_its_lines(tmp_path):
    old, new = local(START - 10), local(START + 10)
    text = f"{old} one\ntwo\n{new} three\nfour\n{old} five\n"
    recent, before = without_old(FileText(path=tmp_path, text=text), START)
    assert recent.text.split() == [new, "three", "four"]
    assert before.text.split() == [old, "one", "two", old, "five"]
    assert len(recent.text) == len(before.text) == len(text)
    assert recent.text.count("\n") == 5
