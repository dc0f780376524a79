"""Test how old a call has to be for a hang: files are written after the state of a dump."""

import gzip
import json
import os
import pickle

import pytest
from builders.hang_files import dump_of

from fastcomm.hang.analysis import diagnose_hang

WORLD = 8
SECOND = 1_000_000_000


def write(folder, lateness, *, age=0, frames=True, packed=True):
    """Write dumps of a job whose rank 5 has been on its way for `age` s; `lateness` by rank."""
    folder.mkdir(exist_ok=True)
    for rank in range(WORLD):
        document = dump_of(rank, WORLD, 30, absent=5)
        begin = min(call["time_created_ns"] for call in document["entries"])
        for call in document["entries"]:  # 10 ms apart
            call["time_created_ns"] = begin + (call["time_created_ns"] - begin) // 100
            if frames:
                call["frames"] = [{"name": "step", "filename": "train.py", "line": 7}]
        last = max(call["time_created_ns"] for call in document["entries"])
        written = (last + (age + lateness[rank]) * SECOND) // SECOND
        content = pickle.dumps(document, 2)
        path = folder / (f"rank_{rank}.pickle.gz" if packed else f"rank_{rank}")
        path.write_bytes(gzip.compress(content, mtime=int(written)) if packed else content)
        if not packed:
            os.utime(path, (written, written))
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_the_first_file_bounds_the_age_of_calls_in_all_others(tmp_path, packed):
    late = [7, 6, 5, 2, 7, 4, 6, 7]
    assert not diagnose_hang(write(tmp_path / "job", late, packed=packed)).hang


def test_dumps_with_stacks_alone_may_all_be_late(tmp_path):
    assert not diagnose_hang(write(tmp_path / "late", [4] * WORLD)).hang
    hang = diagnose_hang(write(tmp_path / "prompt", [4] * WORLD, frames=False))
    assert (hang.kind, hang.culprits) == ("not_arrived", (5,))


def test_a_hang_that_is_no_older_than_files_may_be_late_has_low_confidence(tmp_path):
    hang = diagnose_hang(write(tmp_path / "short", [1] * WORLD, age=5))
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "low")
    assert any("a second set of dumps decides" in line for line in hang.evidence)
    hang = diagnose_hang(write(tmp_path / "long", [1] * WORLD, age=580))
    assert (hang.culprits, hang.confidence) == ((5,), "high")


def test_the_clock_of_one_host_hides_no_hang(tmp_path):
    slow = [-3600, *[0] * (WORLD - 1)]
    assert diagnose_hang(write(tmp_path / "job", slow, age=20)).culprits == (5,)


def test_the_own_time_of_a_file_gives_low_confidence_however_old_it_looks(tmp_path):
    hang = diagnose_hang(write(tmp_path / "job", [30] * WORLD, frames=False, packed=False))
    assert (hang.culprits, hang.confidence) == ((5,), "low")
    assert any("the age is that of the file; copied files look old" in e for e in hang.evidence)
    assert "a second set of dumps" in hang.next[0]


def test_one_time_inside_a_file_is_enough_among_files_of_other_times(tmp_path):
    folder = write(tmp_path / "job", [580] * WORLD, frames=False, packed=False)
    content = (folder / "rank_0").read_bytes()
    written = int((folder / "rank_0").stat().st_mtime)
    (folder / "rank_0").unlink()
    (folder / "rank_0.gz").write_bytes(gzip.compress(content, mtime=written))
    hang = diagnose_hang(folder)
    assert (hang.culprits, hang.confidence) == ((5,), "high")


@pytest.mark.parametrize("packed", [True, False])
def test_no_call_is_open_for_longer_than_its_timeout(tmp_path, packed):
    hang = diagnose_hang(write(tmp_path / "job", [86_400] * WORLD, frames=False, packed=packed))
    assert (hang.culprits, hang.confidence) == ((5,), "low")
    assert {link.since_ns for link in hang.links} == {None}
    assert any("no time tells for how long" in line for line in hang.evidence)


def test_calls_without_a_time_are_not_known_to_be_old(tmp_path):
    for rank in range(WORLD):
        document = dump_of(rank, WORLD, 30, absent=5)
        for call in document["entries"]:
            del call["time_created_ns"]
        (tmp_path / f"rank_{rank}.gz").write_bytes(
            gzip.compress(pickle.dumps(document, 2), mtime=1_700_000_900)
        )
    hang = diagnose_hang(tmp_path)
    assert (hang.culprits, hang.confidence) == ((5,), "low")
    assert any("no time tells for how long" in line for line in hang.evidence)
    assert "a second set of dumps" in hang.next[0]


def cut(folder, written):
    """Leave of all dumps what was before their last step, as dumps of an earlier moment."""
    for path in folder.iterdir():
        document = pickle.loads(path.read_bytes())
        document["entries"] = document["entries"][:-6]
        path.write_bytes(pickle.dumps(document, 2))
        os.utime(path, (written, written))


def test_progress_before_the_open_calls_were_made_disproves_no_hang(tmp_path):
    write(tmp_path / "job", [30] * WORLD, frames=False, packed=False)
    first = write(tmp_path / "job" / "first", [0] * WORLD, frames=False, packed=False)
    written = int((first / "rank_0").stat().st_mtime)
    cut(first, written)
    hang = diagnose_hang(tmp_path / "job")
    assert (hang.kind, hang.culprits) == ("not_arrived", (5,))
    assert any("the calls that are open now were made after" in line for line in hang.evidence)
    cut(first, written + 3600)  # a copy: what went on is all that is certain
    hang = diagnose_hang(tmp_path / "job")
    assert (hang.kind, hang.confidence) == ("none", "low")


def test_progress_while_a_call_is_open_is_no_hang(tmp_path):
    write(tmp_path / "job", [30] * WORLD, frames=False)
    first = write(tmp_path / "job" / "first", [0] * WORLD, frames=False, packed=False)
    earlier, later = first / "rank_0", tmp_path / "job" / "rank_4.pickle.gz"
    document = pickle.loads(earlier.read_bytes())
    document["entries"].pop()
    earlier.write_bytes(pickle.dumps(document, 2))
    document = pickle.loads(gzip.decompress(later.read_bytes()))
    document["entries"][-1]["time_created_ns"] -= SECOND  # open before rank 0 went on
    later.write_bytes(gzip.compress(pickle.dumps(document, 2), mtime=1_700_000_090))
    assert not diagnose_hang(tmp_path / "job").hang


def test_a_rank_that_died_after_its_dump_blames_nobody_of_a_job_that_goes_on(tmp_path):
    folder = write(tmp_path / "job", [1] * WORLD, frames=False)
    (folder / "launcher.log").write_text("rank 3 was killed by signal 9\n")
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits, hang.confidence) == ("none", (), "low")
    assert any("yet there is a dump of rank 3" in line for line in hang.evidence)


def test_a_rank_that_may_be_late_for_the_first_time_has_low_confidence(tmp_path):
    hang = diagnose_hang(write(tmp_path / "job", [30] * WORLD, frames=False))
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "low")
    late = next(line for line in hang.evidence if "late for the first time" in line)
    assert "of a timeout of 600 s" in late
    assert "a second set of dumps" in hang.next[0]
    hang = diagnose_hang(write(tmp_path / "timeout", [580] * WORLD, frames=False))
    assert (hang.culprits, hang.confidence) == ((5,), "high")


def test_dumps_of_a_later_moment_without_progress_decide(tmp_path):
    write(tmp_path / "job", [30] * WORLD, frames=False)
    write(tmp_path / "job" / "second", [60] * WORLD, frames=False)
    hang = diagnose_hang(tmp_path / "job")
    assert (hang.kind, hang.culprits, hang.confidence) == ("not_arrived", (5,), "high")


def test_files_that_were_written_seconds_apart_may_all_be_late(tmp_path):
    late = [11, 12, 12, 10, 12, 11, 12, 12]
    hang = diagnose_hang(write(tmp_path / "job", late))
    assert (hang.kind, hang.confidence) == ("none", "low")
    assert any("written up to 2 s apart" in line for line in hang.evidence)
    assert "a second set of dumps" in hang.next[0]
    hang = diagnose_hang(write(tmp_path / "old", late, age=30))
    assert (hang.kind, hang.culprits) == ("not_arrived", (5,))
    hang = diagnose_hang(write(tmp_path / "text", late, frames=False))
    assert (hang.kind, hang.culprits) == ("not_arrived", (5,))


def test_a_pickle_beside_a_prompt_form_of_it_is_of_the_moment_of_that(tmp_path):
    folder = write(tmp_path / "job", [14, 15, 16, 13, 14, 15, 16, 13])
    for path in [*folder.iterdir()]:
        document = pickle.loads(gzip.decompress(path.read_bytes()))
        last = max(call["time_created_ns"] for call in document["entries"])
        for call in document["entries"]:
            del call["frames"]
        content = gzip.compress(json.dumps(document).encode(), mtime=last // SECOND)
        path.with_name(path.name.replace("pickle", "json")).write_bytes(content)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.culprits) == ("none", ())


def test_a_call_that_all_have_just_made_is_no_hang_where_all_files_are_late(tmp_path):
    late = [15, 10, 14, 15, 17, 16, 16, 16]
    folder = write(tmp_path / "job", late)
    for rank, lateness in enumerate(late):
        document = dump_of(rank, WORLD, 30)
        for at, call in enumerate(document["entries"]):
            call["time_created_ns"] = 1_700_000_000 * SECOND + at * SECOND // 100
            call["frames"] = [{"name": "step", "filename": "train.py", "line": 7}]
        content = gzip.compress(pickle.dumps(document, 2), mtime=1_700_000_000 + lateness)
        (folder / f"rank_{rank}.pickle.gz").write_bytes(content)
    hang = diagnose_hang(folder)
    assert (hang.kind, hang.confidence) == ("none", "low")


@pytest.mark.parametrize(("age", "kind"), [(60, "none"), (120, "not_arrived")])
def test_a_call_is_old_after_twice_the_time_that_calls_like_it_took(tmp_path, age, kind):
    """Calls are made 10 ms apart, and each took 40 s."""
    folder = write(tmp_path / "job", [0] * WORLD, age=age)
    for path in folder.iterdir():
        packed = path.read_bytes()
        document = pickle.loads(gzip.decompress(packed))
        for call in document["entries"]:
            if call["retired"]:
                end = call["time_created_ns"] + 40 * SECOND
                call["time_discovered_completed_ns"] = end
        written = int.from_bytes(packed[4:8], "little")
        path.write_bytes(gzip.compress(pickle.dumps(document, 2), mtime=written))
    assert diagnose_hang(folder).kind == kind
