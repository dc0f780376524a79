"""Test stores that two ingests write at the same time."""

import errno
import fcntl
import json
import signal
import subprocess
import sys

import pytest
from builders import kineto_text as k
from builders.commands import contents, invoke
from builders.fault_tools import agree
from builders.opened import open_run

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats.store import writer
from fastcomm.formats.store.files import LOCK, locked
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics

STEP = [
    k.mark("ProfilerStep#0", 0, 100),
    k.kernel("gemm", 5, 30),
    k.all_reduce(20, 5, Process_Group_Ranks="[0, 1, 2]"),
]


def traces(folder, ranks, name="gemm", world=3):
    folder.mkdir()
    events = [*STEP, k.kernel(name, 40, 5)]
    for rank in ranks:
        k.write(folder / f"rank{rank}.json", events, rank=rank, world=world)
    return folder


@pytest.fixture
def one(tmp_path):
    return traces(tmp_path / "one", (0, 1, 2), "one")


@pytest.fixture
def other(tmp_path):
    return traces(tmp_path / "other", (0, 1, 2), "another")


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks."""

    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_link_in_the_place_of_the_lock_is_refused(one, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(FastcommError, match=f"{LOCK}: Too many levels of symbolic links"):
        ingest(plan([one], tmp_path / "store"))
    assert not (tmp_path / "target").exists()


def test_a_second_ingest_is_an_error(one, tmp_path):
    store = tmp_path / "store"
    ingest(plan([one], store))
    with locked(store):
        (store / ".rank-00000.parquet.1-aa.unfinished").write_bytes(b"of the first")
        before = contents(store)
        said = invoke("ingest", one, "-o", store, code=1).stderr.splitlines()[-1]
        assert (
            f"Error: {store}: another ingest writes this store; wait until it ends, or" in said
        )
        assert contents(store) == before
    invoke("ingest", one, "-o", store)
    assert LOCK not in contents(store)
    assert not list(store.glob(".*"))


def test_a_lock_of_a_killed_ingest_blocks_nobody(one, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    code = (
        "import sys, time; from pathlib import Path\n"
        "from fastcomm.formats.store.files import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(20)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, store], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(FastcommError, match="another ingest writes this store"):
            ingest(plan([one], store))
        holder.send_signal(signal.SIGKILL)
    assert (store / LOCK).exists()
    assert ingest(plan([one], store)).written == (0, 1, 2)
    assert not (store / LOCK).exists()


def test_a_store_that_was_written_since_it_was_planned_is_refused(one, tmp_path):
    store = tmp_path / "store"
    planned = plan([traces(tmp_path / "more", (3, 4), world=5)], store)
    ingest(plan([one], store))
    before = contents(store)
    with pytest.raises(FastcommError, match="a store with ranks 0-2, which this run does not"):
        ingest(planned)
    assert contents(store) == before
    assert open_run(store).ranks == (0, 1, 2)


def test_two_concurrent_ingests_leave_one_complete_store(tmp_path):
    runs = [traces(tmp_path / name, range(4), name * 9, world=4) for name in "ab"]
    store = tmp_path / "store"
    words = [sys.executable, "-m", "fastcomm", "ingest", "-o", str(store)]
    for run in runs:
        invoke("ingest", "-o", f"{run}.alone", run)
    both = [subprocess.Popen([*words, run], stderr=subprocess.PIPE, text=True) for run in runs]
    said = [each.communicate()[1] for each in both]
    codes = [each.returncode for each in both]
    assert 0 in codes, said
    # One that begins when the other has ended finds the store of another run.
    expected = {0: "4 ranks", 1: "another ingest", 2: "which is another run"}
    assert all(expected[code] in text for text, code in zip(said, codes, strict=True)), said
    alone = [contents(tmp_path / f"{name}.alone") for name in "ab"]
    assert contents(store) in alone


def test_without_locks_ingest_warns_and_detects_another_writer(
    one, other, tmp_path, monkeypatch, no_locks, caplog
):
    store, written = tmp_path / "store", writer.write

    def interrupted(trace, path, provenance):
        monkeypatch.setattr(writer, "write", written)
        ingest(plan([other], store))
        (store / ".rank-00001.parquet.1-aa.unfinished").write_bytes(b"of the other")
        written(trace, path, provenance)

    monkeypatch.setattr(writer, "write", interrupted)
    with pytest.raises(FastcommError, match="another ingest wrote to this store at the same"):
        ingest(plan([one], store))
    assert f"{store}: this file system has no locks (Operation not supported)" in caplog.text
    assert (store / ".rank-00001.parquet.1-aa.unfinished").exists()
    with pytest.raises(TraceFileError, match=r"rank-0000.*written by another ingest"):
        compute_metrics(open_run(store))


def test_a_file_of_another_size_is_an_error_when_the_store_is_opened(one, other, tmp_path):
    ingest(plan([one], tmp_path / "store"))
    ingest(plan([other], tmp_path / "others"))
    path = tmp_path / "store" / "rank-00001.parquet"
    path.write_bytes((tmp_path / "others" / path.name).read_bytes())
    with pytest.raises(TraceFileError, match=r"rank-00001.*in the manifest: damaged, or writ"):
        open_run(tmp_path / "store")
    assert "rank-00001.parquet" in invoke("info", tmp_path / "store", code=1).stderr
    said = json.loads(
        invoke("metrics", tmp_path / "store", "--keep-going", "--json", code=3).stdout
    )
    assert said["ranks"] == [0, 2]
    assert [each["rank"] for each in said["failed"]] == [1]


@pytest.mark.parametrize("options", [["--tp", "3"], []], ids=["options", "source"])
def test_a_file_of_another_ingest_is_an_error_with_any_size(one, other, tmp_path, options):
    ingest(plan([one], tmp_path / "store"))
    source = one if options else other
    invoke("ingest", source, "-o", tmp_path / "others", *options)
    path = tmp_path / "store" / "rank-00001.parquet"
    path.write_bytes((tmp_path / "others" / path.name).read_bytes())
    agree(tmp_path / "store")
    with pytest.raises(
        TraceFileError, match=r"rank-00001.*has another source or other options"
    ):
        compute_metrics(open_run(tmp_path / "store"))


def test_a_store_without_a_valid_rank_is_an_error_with_keep_going(one, tmp_path):
    store = tmp_path / "store"
    ingest(plan([one], store))
    for path in store.glob("rank-*"):
        path.write_bytes(b"PAR1")
    assert "4 bytes" in invoke("metrics", store, "--keep-going", code=1).stderr
