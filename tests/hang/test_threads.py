"""Test jobs whose threads call beside the training, and calls that are slow every time."""

import gzip
import json
from dataclasses import replace

import pytest
from builders.hang_files import dump_of

from fastcomm.formats.flight_recorder import AUTOGRAD, read
from fastcomm.hang.analysis import diagnose_hang
from fastcomm.hang.calls import of_dump
from fastcomm.synthetic.hangs.dumps import DumpForm, drawn_form, write_dumps
from fastcomm.synthetic.hangs.faults import HEALTHY_BESIDE, THREAD_FAULTS, planted

SEEDS = range(6)
SECOND = 1_000_000_000
WORLD = 4
WRITTEN = 1_700_000_400


def verdict(folder, fault, seed, form):
    # Where no dump tells threads apart, more ranks than are compared with each other.
    hang = planted(fault, seed, 16 if form.has_threads else 32)
    write_dumps(hang, folder / str(seed), form, seed)
    return hang, diagnose_hang(folder / str(seed))


@pytest.mark.parametrize("fault", THREAD_FAULTS)
def test_threads_that_write_checkpoints_hide_no_culprit(tmp_path, fault):
    for seed in SEEDS:
        planned, hang = verdict(tmp_path, fault, seed, drawn_form(seed))
        assert (hang.kind, hang.culprits) in planned.accept


@pytest.mark.parametrize("fault", HEALTHY_BESIDE)
@pytest.mark.parametrize("has_threads", [True, False])
def test_what_goes_on_beside_the_training_is_no_hang(tmp_path, fault, has_threads):
    for seed in SEEDS:
        _, hang = verdict(tmp_path, fault, seed, DumpForm(has_threads=has_threads))
        assert (hang.kind, hang.culprits) == ("none", ())


def test_the_evidence_tells_what_a_thread_is_in(tmp_path):
    lines = []
    for seed in SEEDS:
        _, hang = verdict(tmp_path, "checkpoint", seed, drawn_form(seed))
        lines += [line for line in hang.evidence if "beside the one that trains" in line]
        assert hang.confidence == ("low" if hang.evidence else "high")
    assert any("all_reduce #2 of the group checkpoint" in line for line in lines)


def job(folder, change, *, absent=None, steps=60):
    """Write dumps of a job whose entries `change` alters, and return the answer."""
    folder.mkdir()
    for rank in range(WORLD):
        document = dump_of(rank, WORLD, steps, absent)
        group = {"name": "9", "desc": "checkpoint", "ranks": str([*range(WORLD)])}
        document["pg_config"]["9"] = group
        for call in document["entries"]:
            call["thread_id"], call["thread_name"] = "7", "pt_main_thread"
        change(rank, document["entries"])
        entries = sorted(document["entries"], key=lambda call: call["time_created_ns"])
        document["entries"] = [call | {"record_id": at} for at, call in enumerate(entries)]
        text = json.dumps(document).encode()
        (folder / f"rank_{rank}.json.gz").write_bytes(gzip.compress(text, mtime=WRITTEN))
    return diagnose_hang(folder)


def beside(entries, number, age, **more):
    """A call of another thread, so many seconds before the dump."""
    entries.append(
        entries[0]
        | {"process_group": ["9", "checkpoint"], "profiling_name": "gloo:barrier"}
        | {"collective_seq_id": number, "time_created_ns": (WRITTEN - age) * SECOND}
        | {"thread_id": "8", "state": "scheduled", "retired": False, **more}
    )


def test_a_thread_of_checks_that_goes_on_does_not_hide_that_the_training_does_not(tmp_path):
    def check(rank, entries):
        for number in range(1, 100):
            beside(entries, number, 100 - number, state="completed", retired=True)

    hang = job(tmp_path / "job", check, absent=2)
    assert (hang.kind, hang.culprits) == ("not_arrived", (2,))


def test_a_thread_that_never_comes_is_the_culprit_once_the_training_has_stopped(tmp_path):
    def checkpoint(rank, entries):
        entries[-1] |= {"state": "completed", "retired": True}
        if rank != 1:
            beside(entries, 1, 250)

    hang = job(tmp_path / "job", checkpoint)
    assert (hang.kind, hang.culprits) == ("not_arrived", (1,))
    assert hang.group.desc == "checkpoint"


def test_calls_of_backward_passes_are_of_the_thread_that_trains(tmp_path):
    def backward(rank, entries):
        for call in entries[::2]:
            call["thread_id"], call["thread_name"] = "9", "pt_autograd_0"

    hang = job(tmp_path / "job", backward, absent=2)
    assert (hang.kind, hang.culprits) == ("not_arrived", (2,))
    calls = of_dump(read(tmp_path / "job" / "rank_0.json.gz"))
    assert {*calls.calls.thread.tolist()} == {AUTOGRAD, 7}
    assert not calls.beside.any()


@pytest.mark.parametrize("age", [30, 500])
def test_a_call_that_is_slow_every_time_hangs_once_it_is_slower(tmp_path, age):
    def outer(rank, entries):
        del entries[8:]  # a step
        begin = WRITTEN - age - 400
        for at, call in enumerate(entries):
            call["time_created_ns"] = begin * SECOND + at
        step = [*entries]
        for number in range(1, 6):
            created = begin + 100 * (number - 1)
            done = {"state": "completed", "retired": True} if number < 5 else {}
            ended = {"time_discovered_completed_ns": (created + 25) * SECOND} if done else {}
            beside(entries, number, WRITTEN - created, thread_id="7", **done, **ended)
            entries += [
                call | {"time_created_ns": created * SECOND + at}
                for at, call in enumerate(step[: 8 * bool(done)])
            ]

    hang = job(tmp_path / "job", outer)
    assert hang.kind == ("none" if age == 30 else "stalled")


def test_dumps_without_threads_tell_a_group_that_ranks_call_at_other_places(tmp_path):
    for seed in range(3):
        form = replace(drawn_form(seed), has_threads=False, ring=2000)
        planned, hang = verdict(tmp_path, "beside_missing", seed, form)
        assert (hang.kind, hang.culprits) in planned.accept


@pytest.mark.parametrize("late", [0, 7])
def test_dumps_without_threads_tell_a_group_by_done_calls_around_its_own(tmp_path, late):
    """Each rank is `late` s later than the one before, and so at another place of its steps."""

    def checkpoint(rank, entries):
        begin = min(call["time_created_ns"] for call in entries) // SECOND + late * rank
        for number in range(1, 4):
            age = WRITTEN - begin - 60 * number
            beside(entries, number, age, state="completed", retired=True)
        if rank != 3:
            beside(entries, 4, WRITTEN - begin - 240)
        for call in entries:
            del call["thread_id"], call["thread_name"]

    hang = job(tmp_path / "job", checkpoint, absent=2)
    assert (hang.kind, hang.culprits) == ("not_arrived", (2,))
