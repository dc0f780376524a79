"""Test what files beside dumps add: NCCL RAS, watchdogs, launchers."""

import gzip
import json
import os
import re
from dataclasses import replace

import pytest
from builders.hang_files import (
    RAS_TEXT,
    TP,
    WATCHDOG,
    calls_of,
    communicator,
    dump_of,
    groups_of,
    ras_json,
    write_dumps,
)

from fastcomm.hang import ras, texts
from fastcomm.hang.analysis import diagnose_hang
from fastcomm.hang.calls import job_of

WORLD = 32
ALL = [*range(WORLD)]


def evidence_of(folder):
    return "\n".join(diagnose_hang(folder).evidence)


def ras_of(world, count, **more):
    """RAS of a job of `write_dumps`: a communicator a group."""
    return ras_json(
        *(
            communicator(f"0x{at:x}", ranks, count, **more)
            for at, (_, ranks) in enumerate(groups_of(world).values(), 10)
        )
    )


@pytest.mark.parametrize("state", ["dead", "unresponsive"])
def test_a_dead_or_silent_process_makes_a_missing_rank_certain(tmp_path, state):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, without=[22])
    assert diagnose_hang(folder).confidence == "low"
    (folder / "ras.json").write_text(ras_of(WORLD, 4, gone={22: state}))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (22,), "high")
    sentence = next(line for line in hang.evidence if "RAS" in line)
    assert "rank 22" in sentence
    assert "process 1022 on 10.0.0.2" in sentence
    line = int(re.search(r"ras\.json:(\d+)", sentence)[1])
    assert '"rank": 22,' in (folder / "ras.json").read_text().splitlines()[line - 1]


def test_json_without_the_comma_that_a_release_leaves_out_is_read(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, without=[22])
    text = ras_of(WORLD, 4, gone={22: "dead"})
    broken = re.sub(r'("nvml_dev": \d+),(\s+"status": \{\s+"unresponsive")', r"\1\2", text)
    assert broken != text
    (folder / "ras.json").write_text(broken)
    assert diagnose_hang(folder).confidence == "high"


def test_the_dead_of_the_text_form_are_certain_too(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=21, without=[21])
    (folder / "ras.txt").write_text(RAS_TEXT)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (21,), "high")
    text = "\n".join(hang.evidence)
    assert "rank 21, process 1021 on 10.0.0.2, is considered dead" in text
    line = RAS_TEXT.splitlines().index(
        "  Rank 21 -- GPU 5 managed by process 1021 on node 10.0.0.2"
    )
    assert f"ras.txt:{line + 1})" in text
    assert "rank 6 has launched 41 AllReduce, most ranks 42" in text
    assert "reports remote process error" in text


def test_a_rank_that_ras_calls_dead_and_that_has_a_dump_is_named_with_both(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22)
    (folder / "ras.json").write_text(ras_of(WORLD, 4, gone={5: "dead"}))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits) == ("not_arrived", (22,))
    line = next(line for line in hang.evidence if "there is a dump of rank 5" in line)
    assert "considered dead" in line
    assert str(folder / "rank_5.json") in line


def test_unequal_counts_confirm_who_is_behind(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22)
    (folder / "ras.json").write_text(ras_of(WORLD, 4, counts={22: 3}))
    text = evidence_of(folder)
    assert "rank 22 has launched 3 AllReduce, most ranks 4" in text
    assert "as the dumps say" in text


def test_counts_of_others_speak_against_the_dumps(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22)
    (folder / "ras.json").write_text(ras_of(WORLD, 4, counts={3: 1}))
    assert "rank 3 has launched 1 AllReduce" in evidence_of(folder)
    assert "by the dumps, others hold the job up" in evidence_of(folder)


def test_equal_counts_support_a_stalled_collective(tmp_path):
    folder = write_dumps(tmp_path / "job", 8)
    (folder / "ras.json").write_text(ras_of(8, 4))
    hang = diagnose_hang(folder)
    assert hang.kind == "stalled"
    assert any("none of them is behind" in line for line in hang.evidence)
    (folder / "ras.json").write_text(ras_of(8, 4, errors={3: 6}))
    text = evidence_of(folder)
    assert "none of them is behind" not in text
    assert "rank 3, process 1003 on 10.0.0.0, reports remote process error" in text


def test_a_communicator_that_may_be_several_groups_blames_nobody(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, without=[22])
    alone = communicator("0xf00", ALL[20:24], 999, gone={22: "dead"})
    (folder / "ras.json").write_text(ras_json(alone))
    hang = diagnose_hang(folder)
    assert hang.confidence == "low"
    text = "\n".join(hang.evidence)
    assert "rank 2 inside communicator 0xf00" in text
    assert f"may be any of {WORLD // TP} groups" in text


def test_processes_of_the_whole_job_tell_groups_of_one_size_apart(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, without=[22])
    whole = communicator("0xa", ALL, 4)
    part = communicator("0xf00", ALL[20:24], 999, gone={22: "unresponsive"})
    (folder / "ras.json").write_text(ras_json(part, whole))
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((22,), "high")


def test_watchdogs_say_who_called_and_completed_what(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    (folder / "job.log").write_text("a line\n" + WATCHDOG)
    text = evidence_of(folder)
    assert "rank 1 last enqueued #4 and completed #3 in group 0 (default_pg)" in text
    assert "ALLREDUCE #4 ran into its timeout after 600 s" in text
    assert "rank 2 last enqueued #8 and completed #6 in group number 1 of its process" in text
    other = next(line for line in text.splitlines() if "rank 5 last enqueued" in line)
    assert "#3 and completed #3" in other
    assert "timeout" not in other
    assert f"({folder / 'job.log'}:3)" in text


def test_a_report_of_torchrun_names_the_dead(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[5])
    report = (
        "{}:\n  time      : now\n  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: 7)\n"
    )
    (folder / "launcher.log").write_text(
        report.format("[0]", 3, 3, -15) + report.format("[1]", 5, 5, -9)
    )
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((5,), "high")
    text = "\n".join(hang.evidence)
    assert "launcher: rank 5 was killed by signal 9" in text
    assert "rank 3 was" not in text


def test_a_failure_of_hardware_in_a_log_is_evidence(tmp_path):
    folder = write_dumps(tmp_path / "job", 8)
    (folder / "dmesg.txt").write_text("x\nNVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off\n")
    assert "NVRM: Xid (PCI:0000:18:00): 79" in evidence_of(folder)
    assert "dmesg.txt:2" in evidence_of(folder)


def reported(communicators):
    return json.dumps({"nccl_version": "2.28", "communicators": communicators})


ODD_RANKS = [
    *({"rank": number} for number in (99, -1, True, None)),
    {"rank": 1, "status": 3, "collective_counts": [1]},
]
DAMAGED = {
    "no list": reported(7),
    "no communicators": reported([7, {"size": "x"}, {"size": 10**12}]),
    "odd ranks": reported([{"size": 8, "ranks": ODD_RANKS, "missing_ranks": {}}]),
    "cut": reported([{"size": 8}])[:-9],
    "text": "Job summary\nCommunicators...\n    0  1  1  8  8  8  OK\n#0-0 (ab) INCOMPLETE\n"
    "  Rank 999999999 --\n  The missing ranks: 77777777, 3\n",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_damaged_reports_of_ras_are_no_evidence_of_a_rank(tmp_path, text):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    (folder / "ras.json").write_text(text)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits) == ("not_arrived", (5,))
    assert hang.world_size == 8


def test_numbers_of_dates_and_processes_in_names_are_no_ranks(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    for name in ("train_20261127.log", "worker-31337.log", "rank_123456789012.json"):
        (folder / name).write_text("text\n")
    assert diagnose_hang(folder).world_size == 8


@pytest.fixture
def shorter(monkeypatch):
    """Read the last 64 KiB of a long file, not 4 MiB, and unpack less at once."""
    monkeypatch.setattr(texts, "_LARGEST", 1 << 16)
    monkeypatch.setattr(texts, "_BLOCK", 1 << 14)


def test_of_a_long_log_the_end_is_read(tmp_path, shorter):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    (folder / "job.log").write_text("a line of a step\n" * 10_000 + WATCHDOG)
    text = evidence_of(folder)
    assert "rank 1 last enqueued #4" in text
    assert "job.log, about byte" in text


def test_a_trace_of_a_profiler_beside_dumps_is_not_read(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5)
    (folder / "rank7.json").write_text('{"schemaVersion": 1, "traceEvents": [' + "[" * 100)
    assert diagnose_hang(folder).culprits == (5,)


BROKEN = (
    "RuntimeError('pair.cc:561] Connection closed by peer [127.0.0.1]:14014. See its log.')"
)


@pytest.mark.parametrize(
    "line",
    [BROKEN, "Read error: Connection reset by peer", "Timed out waiting 3000ms for send"],
)
def test_logs_of_broken_connections_speak_for_ranks_without_a_dump(tmp_path, line):
    folder = write_dumps(tmp_path / "job", 8, without=[1, 3], age=2)
    assert (diagnose_hang(folder).hang, diagnose_hang(folder).confidence) == (False, "low")
    (folder / "rank_0.log").write_text(f"step 4\n[rank0]: {line}\nbye\n")
    (folder / "rank_3.log").write_text(f"{line}\n")
    (folder / "out.txt").write_text(f"step 4\n[rank2]: {line}\n[rank9999999]: text\n")
    hang = diagnose_hang(folder)
    assert (hang.hang, hang.kind, hang.confidence) == (True, "missing_rank", "low")
    assert hang.culprits == (1,)  # rank 3 failed as others did
    assert hang.missing == (1, 3)
    quoted = [one for one in hang.evidence if "the log of rank" in one and line[-9:-2] in one]
    assert [one.split(" says")[0][-1] for one in quoted if " says" in one] == ["0", "2", "3"]
    assert f"{folder / 'rank_0.log'}:2" in "".join(quoted)
    assert "the end of the log of rank 1" in "".join(hang.next)


def test_with_all_dumps_a_log_of_a_broken_connection_blames_nobody(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, age=2)
    assert diagnose_hang(folder).confidence == "high"
    (folder / "rank_0.log").write_text(f"[rank0]: {BROKEN}\n")
    hang = diagnose_hang(folder)
    assert (hang.hang, hang.confidence) == (False, "low")
    assert "Connection closed by peer" in hang.evidence[0]


def test_a_rank_whose_watchdog_alone_saw_no_timeout_is_a_suspect(tmp_path):
    folder = write_dumps(tmp_path / "job", 4, age=2)
    for rank in (0, 1, 3):
        (folder / f"rank_{rank}.log").write_text(
            f"[rank{rank}]:[E] Watchdog caught collective operation timeout: WorkNCCL("
            "SeqNum=21, OpType=ALLREDUCE) ran for 600001 milliseconds\n"
        )
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (2,), "low")
    assert "SeqNum=21" in hang.evidence[0]


def test_nobody_is_sent_to_look_for_the_exit_code_that_is_quoted(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, without=[22])
    (folder / "launcher.log").write_text("rank 22 was killed by signal 9\n")
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((22,), "high")
    assert not any("exit code" in line for line in hang.next)


MODULE = '  File "train.py", line 48 in <module>\n'


def frame(name):
    return f'  File "train.py", line 9 in {name}\n'


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"{{0}}{frame('old')}{MODULE}\n{{0}}{frame('new')}{MODULE}", "new (train.py:9)"),
        (f"{{0}}{frame('deep') * 100}  ...\n", "deep (train.py:9)"),
        (f"{{0}}{frame('inner')}{MODULE}\n{{0}}{frame('loop')}  ...\n", "inner (train.py:9)"),
        (f"{{0}}{frame('pool')}{frame('_bootstrap')}", None),
    ],
)
@pytest.mark.parametrize("name", ["", " [MainThread]"])
def test_the_stack_of_a_rank_is_the_last_of_its_main_thread(tmp_path, text, place, name):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=60)
    heading = f"Thread 0x00007f{name} (most recent call first):\n"
    (folder / "stack_5.txt").write_text(text.format(heading))
    assert diagnose_hang(folder).place == place


def test_a_stack_in_a_collective_speaks_against_a_rank_that_never_called_it(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=600)
    assert diagnose_hang(folder).confidence == "high"
    inside = '  File "torch/distributed/distributed_c10d.py", line 3 in all_reduce\n'
    (folder / "stack_5.txt").write_text(
        f"Thread 0x00007f (most recent call first):\n{inside}{MODULE}"
    )
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "low")
    assert any("the stack of rank 5 speaks against it" in line for line in hang.evidence)


def test_a_watchdog_that_enqueued_the_call_speaks_against_that_it_never_came(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=600)
    (folder / "rank_5.log").write_text(
        "[rank5]: [PG ID 1 PG GUID 2(mesh_tp) Rank 1] last enqueued NCCL work: 4, "
        "last completed NCCL work: 3.\n"
    )
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "low")
    assert any("the watchdog of rank 5 speaks against it" in line for line in hang.evidence)


def test_what_says_that_a_rank_with_a_dump_is_dead_is_quoted_once(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=600)
    (folder / "launcher.log").write_text("rank 5 was killed by signal 9\n")
    lines = [one for one in diagnose_hang(folder).evidence if "killed by signal 9" in one]
    assert len(lines) == 1
    assert "yet there is a dump of rank 5" in lines[0]


def stack_of(folder, name, text, written):
    """Write a stack with a time of its file, in seconds after the last calls of the dumps."""
    (folder / name).write_text(f"Thread 0x00007f (most recent call first):\n{text}{MODULE}")
    moment = 1_700_000_006 + written
    os.utime(folder / name, (moment, moment))


def test_a_stack_that_is_older_than_the_calls_is_no_evidence(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=600)
    for written in (30, -3):  # 2 s before the last call of rank 5, as clocks may differ
        stack_of(folder, "stack_5.txt", frame("load"), written)
        assert diagnose_hang(folder).place == "load (train.py:9)"
    stack_of(folder, "stack_5.txt", frame("load"), -4)
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.place) == ((5,), None)
    line = next(one for one in hang.evidence if "the stack of rank 5" in one)
    assert "written 3.00 s before the last call of rank 5" in line
    assert "stack_5.txt" in line
    assert any("py-spy dump on rank 5" in one for one in hang.next)


def test_old_stacks_in_the_creation_of_a_group_make_no_hang(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, age=1)
    path = '  File "torch/distributed/distributed_c10d.py", line 3 in new_group\n'
    for rank in range(8):
        document = json.loads(gzip.decompress((folder / f"rank_{rank}.json.gz").read_bytes()))
        document["entries"].pop()
        content = gzip.compress(json.dumps(document).encode(), mtime=1_700_000_060)
        (folder / f"rank_{rank}.json.gz").write_bytes(content)
        stack_of(folder, f"stack_{rank}.txt", path, 30)
    assert diagnose_hang(folder).kind == "group_creation"
    for rank in range(8):
        stack_of(folder, f"stack_{rank}.txt", path, -30)
    assert diagnose_hang(folder).kind == "none"


@pytest.mark.parametrize(
    ("first", "second"),
    [(("stack_5.txt", 30), ("pyspy_5.txt", 300)), (("pyspy_5.txt", 300), ("stack_5.txt", 30))],
)
def test_of_two_stacks_the_newer_counts_not_the_longer(tmp_path, first, second):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=600)
    for (name, written), text in ((first, 3 * frame("one")), (second, frame("two"))):
        stack_of(folder, name, text if written == 300 else 5 * text, written)
    expected = "one (train.py:9)" if first[1] == 300 else "two (train.py:9)"
    assert diagnose_hang(folder).place == expected


def test_of_two_stacks_of_the_debug_server_the_later_name_counts(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, age=600)
    for second, name, count in ((18, "one", 5), (22, "two", 1)):
        text = "=== Rank 5: http://host ===\nThread 0x00007f (most recent call first):\n"
        text += f"{count * frame(name)}{MODULE}"
        (folder / f"stacks_20261127_0627{second}.txt").write_text(text)
    assert diagnose_hang(folder).place == "two (train.py:9)"


DEATHS = {
    "srun killed": "srun: error: node03: task 5: Killed",
    "srun exit": "srun: error: node03: task 5: Exited with exit code 1",
    "srun list": "srun: error: node[03-04]: tasks 5-5: Segmentation fault (core dumped)",
    "srun memory": "srun: error: node03: task 5: Out Of Memory",
    "mpirun": "mpirun noticed that process rank 5 with PID 0 on node n exited on signal 9",
    "other rank": "rank 2 waits for rank 5, which exited with code 1",
    "labels": "0: rank      : 5 (local_rank: 5)\n0:   exitcode  : -9 (pid: 77)",
    "before a guess": "rank 5 was killed by signal 9. This may be because of memory.",
}


@pytest.mark.parametrize("line", DEATHS.values(), ids=DEATHS)
def test_ends_that_launchers_report_make_a_missing_rank_certain(tmp_path, line):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[5])
    (folder / "job.out").write_text(f"step 4\n{line}\n")
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (5,), "high")
    assert any(f"{folder / 'job.out'}:2" in one for one in hang.evidence)


UNCERTAIN = {
    "if": "if rank 5 exited with code 1, look at its log",
    "may": "This may be because rank 5 was killed by signal 9",
    "comment": "# rank 5 exited with code 1",
    "not": "rank 5 was not killed by signal 9",
    "other": "rank 5 waits for rank 2",
    "future": "rank 5 will exit 5 minutes later",
    "terminated": "srun: error: node03: task 5: Terminated",
    "end": "srun: error: node03: task 5: Exited with exit code 143",
    "no fault": "srun: error: node03: task 5: Exited with exit code 0",
    "example": "for example, rank 5 exited with code 1",
    "guess": "Connection reset by peer: possibly rank 5 exited with code 1",
}


@pytest.mark.parametrize("line", UNCERTAIN.values(), ids=UNCERTAIN)
def test_sentences_that_report_no_end_are_no_evidence(tmp_path, line):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[5])
    (folder / "job.out").write_text(f"step 4\n{line}\n")
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (5,), "low")
    assert not any("job.out" in one for one in hang.evidence)


def test_a_page_of_documentation_beside_dumps_is_no_log(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[5])
    (folder / "README.md").write_text("rank 5 exited with code 1\n")
    assert diagnose_hang(folder).confidence == "low"


def test_tasks_are_no_ranks_where_they_start_them(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[4, 5])
    (folder / "job.out").write_text("srun: error: node03: task 5: Killed\n")
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (4, 5), "low")
    assert any("which ranks the tasks are, nothing tells" in one for one in hang.evidence)
    folder = write_dumps(tmp_path / "elastic", 8, absent=5, without=[5])
    (folder / "job.out").write_text("torchrun: start\nsrun: error: node03: task 5: Killed\n")
    assert diagnose_hang(folder).confidence == "low"


def test_a_task_is_a_rank_where_no_task_can_have_started_all_that_are_missing(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[2, 5])
    (folder / "job.out").write_text("srun: error: node03: task 5: Segmentation fault\n")
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (5,), "high")
    assert hang.missing == (2, 5)
    (folder / "job.out").write_text("srun: error: node03: task 3: Segmentation fault\n")
    assert diagnose_hang(folder).culprits == (2, 5)


MEMORY = "Memory cgroup out of memory: Killed process 4242 (python3) total-vm:9kB, anon-rss:8kB"


@pytest.mark.parametrize(
    "line",
    [
        MEMORY,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks "
        "have been OOM Killed.",
        "E1127 api.py:874] failed (exitcode: -9) local_rank: 5 (pid: 4242) of binary: python",
    ],
)
def test_an_end_of_a_process_is_named_and_is_of_no_certain_rank(tmp_path, line):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[5])
    (folder / "job.out").write_text(f"{line}\n")
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (5,), "low")
    assert any("job.out:1" in one for one in hang.evidence)
    quiet = write_dumps(tmp_path / "quiet", 8, without=[5], age=1)
    assert not diagnose_hang(quiet).hang
    (quiet / "job.out").write_text(f"{line}\n")
    hang = diagnose_hang(quiet)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (5,), "low")


@pytest.mark.parametrize("source", ["py-spy", "RAS"])
def test_the_number_of_a_process_tells_its_rank(tmp_path, source):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, without=[22])
    number = 1022 if source == "RAS" else 4242
    (folder / "dmesg.txt").write_text(MEMORY.replace("4242", str(number)))
    if source == "RAS":
        (folder / "ras.json").write_text(ras_of(WORLD, 4))
    else:
        (folder / "pyspy_22.txt").write_text("Process 4242: python train.py\n")
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (22,), "high")
    assert any(f"rank 22 was process {number}" in one for one in hang.evidence)


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_report_that_all_is_well_speaks_against_a_rank_that_never_came(tmp_path, form):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, age=600)
    assert diagnose_hang(folder).confidence == "high"
    fine = RAS_TEXT.replace("INCOMPLETE,MISMATCH", "OK").replace("ERROR\n", "OK\n", 1)
    fine = fine.partition("Errors\n======")[0]
    (folder / "ras.txt").write_text(ras_of(WORLD, 4) if form == "json" else fine)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (22,), "low")
    assert any("NCCL RAS speaks against it" in one for one in hang.evidence)
    os.utime(folder / "ras.txt", (1_700_000_001, 1_700_000_001))  # before the open calls
    assert diagnose_hang(folder).confidence == "high"


def test_a_report_that_is_about_an_earlier_call_speaks_against_nothing(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, age=600)
    (folder / "ras.json").write_text(ras_of(WORLD, 3))
    assert diagnose_hang(folder).confidence == "high"


def test_a_mismatch_of_another_rank_speaks_against_the_culprit(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, age=600)
    (folder / "ras.json").write_text(ras_of(WORLD, 4, counts={23: 3}))
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((22,), "low")
    (folder / "ras.json").write_text(ras_of(WORLD, 4, counts={22: 3}))
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((22,), "high")


def test_ranks_without_a_dump_that_launched_the_call_are_no_suspects(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22, without=[5, 22])
    assert diagnose_hang(folder).culprits == (5, 22)
    (folder / "ras.json").write_text(ras_of(WORLD, 4, counts={22: 3}))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("missing_rank", (22,), "low")
    assert hang.missing == (5, 22)


def test_a_call_that_all_missing_ranks_have_launched_is_stalled(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=5, without=[5])
    (folder / "ras.json").write_text(ras_of(WORLD, 4))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.confidence, hang.missing) == ("stalled", "low", (5,))
    assert 5 not in hang.culprits
    line = next(one for one in hang.evidence if "rank 5 left no dump, and is no suspect" in one)
    assert "NCCL RAS says" in line
    assert str(folder / "ras.json") in line


def test_a_missing_rank_whose_watchdog_enqueued_the_call_is_no_suspect(tmp_path):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[5])
    for path in folder.glob("rank_*.json"):
        dump = dump_of(int(path.stem[5:]), 8, 3)
        path.write_text(json.dumps(dump))
    line = (
        "[rank5]:[E1] [PG ID 0 PG GUID 0(default_pg) Rank 5] Exception detected by watchdog, "
        "last enqueued NCCL work: {}, last completed NCCL work: 3.\n"
    )
    (folder / "rank_5.log").write_text(line.format(3))
    assert diagnose_hang(folder).culprits == (5,)
    (folder / "rank_5.log").write_text(line.format(4))
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.confidence, hang.missing) == ("stalled", "low", (5,))
    line = next(one for one in hang.evidence if "rank 5 left no dump, and is no suspect" in one)
    assert "its watchdog says that it enqueued #4" in line


def test_nobody_is_advised_to_look_into_a_dead_process(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=22)
    assert any("py-spy dump on rank 22" in one for one in diagnose_hang(folder).next)
    (folder / "ras.json").write_text(ras_of(WORLD, 4, gone={22: "dead"}))
    hang = diagnose_hang(folder)
    assert hang.culprits == (22,)
    assert not any("py-spy" in one for one in hang.next)


def test_text_of_a_mismatch_names_who_is_behind(tmp_path):
    folder = write_dumps(tmp_path / "job", 32, absent=6, age=600)
    text = RAS_TEXT.replace("INCOMPLETE,MISMATCH", "MISMATCH").replace(
        "up to operation 42", "up to operation 4"
    )
    text = text.replace("up to operation 41", "up to operation 3")
    head, _, rest = text.partition("Errors\n======")
    (folder / "ras.txt").write_text(head + rest[rest.index("Warnings\n") :])
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((6,), "high")
    line = next(one for one in hang.evidence if "has launched 3 AllReduce" in one)
    assert "rank 6" in line
    assert "as the dumps say" in line
    folder = write_dumps(tmp_path / "other", 32, absent=7, age=600)
    (folder / "ras.txt").write_text(head + rest[rest.index("Warnings\n") :])
    assert "by the dumps, others hold the job up" in evidence_of(folder)


@pytest.mark.parametrize(("most", "fewer"), [(4, 3), (3, 4)])
def test_ranks_that_a_text_counts_and_does_not_name_may_be_any(tmp_path, most, fewer):
    folder = write_dumps(tmp_path / "job", 32, absent=6, age=600)
    named = f"  Rank 9 has launched up to operation {fewer} -- GPU 1 managed by process 1009 "
    lines = (
        f"  24 ranks have launched up to operation {most}\n"
        f"  7 ranks have launched up to operation {fewer}\n"
    )
    text = RAS_TEXT.replace("INCOMPLETE,MISMATCH", "MISMATCH")
    head, _, rest = text.partition("Errors\n======")
    rest = rest[rest.index("Warnings\n") :].partition("  30 ranks")[0]
    (folder / "ras.txt").write_text(f"{head}{rest}{lines}{named}on node 10.0.0.1\n")
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((6,), "high")
    line = next(one for one in hang.evidence if "it does not name them" in one)
    assert f"6 ranks have launched {fewer} AllReduce, most {most}" in line
    assert not any("speaks against" in one for one in hang.evidence)


def test_whoever_may_be_among_ranks_without_names_is_not_known_to_have_launched_a_call():
    named = ras.RasRank(number=2, counts={"AllReduce": 4})
    own = ras.RasCommunicator(
        name="a", size=4, ranks=(named,), usual={"AllReduce": 4}, place="ras.txt:9",
        is_complete=False, members=(0, 4, 8, 12),
    )  # fmt: skip
    assert own.arrived(4) == {0, 4, 8, 12}
    assert replace(own, unnamed=(("AllReduce", 1, 3),)).arrived(4) == {8}
    assert replace(own, unnamed=(("AllReduce", 1, 5),)).arrived(4) == set()


def test_groups_of_one_size_are_told_apart_by_the_numbers_of_their_calls(tmp_path):
    job = job_of(
        calls_of(tmp_path, rank, dump_of(rank, 8, 1 + rank // TP)) for rank in range(8)
    )
    # A dump has a call more than it has steps.
    counts = [(2, (0, 1, 2, 3)), (3, (4, 5, 6, 7)), (9, ())]
    communicators = []
    for count, _ in counts:
        ranks = tuple(ras.RasRank(number=at, counts={"AllReduce": count}) for at in range(TP))
        communicators.append(
            ras.RasCommunicator(name="a", size=TP, usual={}, place="ras.txt:9", ranks=ranks)
        )
    placed = ras.place(communicators, job, {})
    assert [own.members for own in placed] == [ranks for _, ranks in counts]


def test_packed_logs_and_stacks_count_as_others(tmp_path, shorter):
    folder = write_dumps(tmp_path / "job", 8, absent=5, without=[5], age=600)
    text = b"a line of a step\n" * 10_000 + b"rank 5 was killed by signal 9\n"
    (folder / "launcher.log.gz").write_bytes(gzip.compress(text, 1))
    stack = f"Thread 0x00007f (most recent call first):\n{frame('load')}{MODULE}".encode()
    (folder / "stack_5.txt.gz").write_bytes(gzip.compress(stack))
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence, hang.place) == ((5,), "high", "load (train.py:9)")
    assert any("launcher.log.gz, about byte" in one for one in hang.evidence)
    for cut in (gzip.compress(text)[:-9], b"\x1f\x8b\x08\0text"):
        (folder / "launcher.log.gz").write_bytes(cut)
        assert diagnose_hang(folder).confidence == "low"
