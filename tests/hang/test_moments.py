"""Test which dumps count: of one job, of one moment, and of a rank the newest."""

import gzip
import json

import pytest
from builders.hang_files import dump_of, write_dumps

from fastcomm.hang.analysis import diagnose_hang

SECOND = 1_000_000_000
WORLD = 8


def rewrite(path, change):
    document = json.loads(gzip.decompress(path.read_bytes()))
    change(document)
    content = json.dumps(document).encode()
    path.write_bytes(
        gzip.compress(content, mtime=int.from_bytes(path.read_bytes()[4:8], "little"))
    )


def shifted(seconds):
    def shift(document):
        for call in document["entries"]:
            call["time_created_ns"] += seconds * SECOND

    return shift


def evidence_of(hang):
    return "\n".join(hang.evidence)


def test_dumps_of_two_jobs_of_other_sizes_are_never_mixed(tmp_path):
    write_dumps(tmp_path / "new", WORLD, absent=5, age=600)
    for path in write_dumps(tmp_path / "old", 16, absent=9, age=600).iterdir():
        rewrite(path, shifted(-3600))
    hang = diagnose_hang(tmp_path)
    assert (hang.kind, hang.culprits, hang.world_size) == ("not_arrived", (5,), WORLD)
    assert "dumps of two jobs: those of ranks 0-15 are of one of 16 ranks" in evidence_of(hang)
    for path in (tmp_path / "old").iterdir():
        rewrite(path, shifted(7200))
    hang = diagnose_hang(tmp_path)
    assert (hang.culprits, hang.world_size) == ((9,), 16)


def test_a_dump_of_an_earlier_job_under_the_name_of_a_rank_is_left_out(tmp_path):
    # All but rank 7 have made many calls since: it cannot be that it made none of them.
    folder = write_dumps(tmp_path, WORLD, absent=5, steps=90, age=600)
    document = dump_of(7, WORLD, 3)
    shifted(-30)(document)
    content = gzip.compress(json.dumps(document).encode(), mtime=1_700_000_000)
    (folder / "rank_7.json.gz").write_bytes(content)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.missing) == ("not_arrived", (5,), (7,))
    assert "the dump of rank 7 is of an earlier moment or job, and left out" in evidence_of(
        hang
    )
    assert "rank_7.json.gz" in evidence_of(hang)


def test_a_dump_of_a_longer_job_before_a_restart_is_left_out(tmp_path):
    folder = write_dumps(tmp_path, WORLD, absent=5, age=600)
    document = dump_of(7, WORLD, 300)
    shifted(-86_400)(document)
    content = gzip.compress(json.dumps(document).encode(), mtime=1_699_990_000)
    (folder / "rank_7.json.gz").write_bytes(content)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.missing) == ("not_arrived", (5,), (7,))
    assert "rank_7.json.gz" in evidence_of(hang)


def test_a_rank_that_has_been_stuck_for_long_is_no_old_dump(tmp_path):
    folder = write_dumps(tmp_path, WORLD, absent=5, age=900)
    for rank in (0, 4):  # they came to their call later
        rewrite(
            folder / f"rank_{rank}.json.gz",
            lambda document: document["entries"][-1].update(
                time_created_ns=document["entries"][-1]["time_created_ns"] + 400 * SECOND
            ),
        )
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.missing) == ("not_arrived", (5,), ())


def test_calls_that_failed_in_their_timeout_show_no_old_dump(tmp_path):
    # Two minutes after the last call of rank 5, others made one that it never made.
    folder = write_dumps(tmp_path, WORLD, absent=5, age=900)

    def fail(document):
        last = document["entries"][-1]
        last["time_created_ns"] += 120 * SECOND
        last["retired"] = True

    for rank in (4, 6, 7):
        rewrite(folder / f"rank_{rank}.json.gz", fail)
    assert diagnose_hang(folder).missing == ()


@pytest.mark.parametrize("name", ["rank_3.json.gz", "comm_lib_trace_rank_3.json.gz"])
def test_of_two_dumps_of_a_rank_the_newest_counts(tmp_path, name):
    folder = write_dumps(tmp_path, WORLD, absent=5, age=600)
    whole = (folder / "rank_3.json.gz").read_bytes()
    (folder / "rank_3.json.gz").unlink()
    other = "comm_lib_trace_rank_3.json.gz" if name[0] == "r" else "rank_3.json.gz"
    (folder / name).write_bytes(whole)
    document = json.loads(gzip.decompress(whole))
    document["entries"] = document["entries"][:2]
    earlier = gzip.compress(json.dumps(document).encode(), mtime=1_700_000_002)
    (folder / other).write_bytes(earlier)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits) == ("not_arrived", (5,))
    line = next(one for one in hang.evidence if "rank 3 has two dumps in one folder" in one)
    assert f"{folder / name} counts" in line


def test_two_forms_of_one_dump_are_no_two_dumps(tmp_path):
    folder = write_dumps(tmp_path, WORLD, absent=5, age=600)
    content = gzip.decompress((folder / "rank_3.json.gz").read_bytes())
    (folder / "rank_3.json").write_bytes(content)
    assert "two dumps" not in evidence_of(diagnose_hang(folder))


def test_dumps_of_a_rank_that_contradict_each_other_are_named(tmp_path):
    folder = write_dumps(tmp_path / "job", WORLD, absent=5, age=600)
    document = dump_of(5, WORLD, 40)  # a longer run before a restart
    shifted(-9_000)(document)
    (folder / "old_rank_5.json").write_text(json.dumps(document))
    hang = diagnose_hang(tmp_path)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "low")
    line = next(one for one in hang.evidence if "contradict each other" in one)
    assert "rank_5.json.gz has the latest call and counts" in line
    assert "old_rank_5.json does not" in line


def without_calls(folder, enqueued, age=0):
    """Write dumps without calls; `enqueued` has the last of the default group, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, number in enumerate(enqueued):
        document = dump_of(rank, len(enqueued), 3) | {
            "entries": [],
            "pg_status": {
                "0": {
                    "last_enqueued_collective": str(number),
                    "last_started_collective": "-1",
                    "last_completed_collective": str(min(enqueued)),
                }
            },
        }
        content = gzip.compress(json.dumps(document).encode(), mtime=1_700_000_000 + age)
        (folder / f"rank_{rank}.json.gz").write_bytes(content)
    return folder


def stack(name, file="train.py"):
    return (
        "Thread 0x00007f (most recent call first):\n"
        f'  File "{file}", line 3 in {name}\n  File "train.py", line 48 in <module>\n'
    )


def test_the_status_of_groups_alone_blames_nobody_and_is_quoted(tmp_path):
    hang = diagnose_hang(without_calls(tmp_path, [42, 42, 41, 42]))
    assert (hang.kind, hang.confidence) == ("none", "low")
    assert "by pg_status, rank 2 had enqueued less than #42" in hang.evidence[0]


def test_status_and_stacks_of_dumps_without_calls_name_a_suspect(tmp_path):
    folder = without_calls(tmp_path, [42, 42, 41, 42])
    inside = stack("all_reduce", "torch/distributed/distributed_c10d.py")
    for rank in range(4):
        (folder / f"stack_{rank}.txt").write_text(stack("load") if rank == 2 else inside)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (2,), "low")
    assert hang.place == "load (train.py:3)"
    (folder / "stack_2.txt").write_text(inside)
    assert diagnose_hang(folder).kind == "none"


def test_status_that_moves_between_dumps_without_calls_is_progress(tmp_path):
    without_calls(tmp_path / "one", [42, 42, 41, 42])
    without_calls(tmp_path / "two", [42, 42, 41, 42], age=30)
    hang = diagnose_hang(tmp_path)
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (2,), "low")
    without_calls(tmp_path / "two", [43, 43, 42, 43], age=30)
    hang = diagnose_hang(tmp_path)
    assert hang.kind == "none"
    assert "went on between two dumps" in hang.evidence[0]


def test_a_dump_without_calls_gives_its_rank_low_confidence(tmp_path):
    folder = write_dumps(tmp_path, WORLD, absent=5, age=600)
    assert diagnose_hang(folder).confidence == "high"
    rewrite(folder / "rank_5.json.gz", lambda document: document.update(entries=[]))
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((5,), "low")
    assert "no call of rank 5 is recorded" in evidence_of(hang)


def test_a_call_that_others_have_ended_waits_for_no_rank_without_a_dump(tmp_path):
    # Rank 4 has not seen yet that the call has ended, behind which the others are.
    folder = write_dumps(tmp_path, WORLD, without=[2], age=60)
    for rank in (0, 1, 3, 5, 6, 7):
        rewrite(folder / f"rank_{rank}.json.gz", end_and_go_on)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("stalled", (4,), "low")
    ended = next(link for link in hang.links if link.ranks == (4,))
    assert 2 not in ended.waits_for


def end_and_go_on(document):
    last = document["entries"][-1]
    more = {"record_id": last["record_id"] + 1, "collective_seq_id": 5}
    document["entries"].append({**last, **more})
    last["state"], last["retired"] = "completed", True
