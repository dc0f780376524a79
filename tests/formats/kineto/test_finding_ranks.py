"""Test ranks that stand behind the events, and traces of processes that are no rank."""

import gzip
import json
import shlex

import pyarrow as pa
import pytest
from builders import kineto_text as k

from fastcomm.errors import TraceFileError
from fastcomm.formats.config import Config
from fastcomm.formats.opening import open_run

WORK = [
    k.mark("ProfilerStep#1", 0, 100),
    k.launch(1, 5),
    k.kernel("gemm", 5, 50, correlation=5),
]
HOST = [k.event("loop", "python_function", 0, 50, pid=9), k.mark("step", 0, 10)]


def pack(path, text):
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(data)
        return
    path.write_bytes(data)


def write_behind(path, rank, world, events=WORK, groups=(), filler=0):
    """A trace with `distributedInfo` behind the events."""
    document = k.document(events, rank=rank, world=world, groups=groups, filler="x" * filler)
    info = document.pop("distributedInfo")
    pack(path, json.dumps({**document, "distributedInfo": info, "traceName": "x"}))


def write_without(path, events):
    """A trace without `distributedInfo`."""
    document = k.document(events)
    del document["distributedInfo"]
    pack(path, json.dumps(document))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("filler", [0, 3 << 20])
def test_ranks_behind_the_events_are_found(tmp_path, suffix, filler):
    groups = [{"pg_name": str(n), "ranks": [*range(600)]} for n in range(100)]
    for rank, name in ((1, "a"), (0, "b")):
        path = tmp_path / f"libkineto_{name}.json{suffix}"
        write_behind(path, rank, 2, groups=groups, filler=filler)
    run = open_run(tmp_path)
    assert [source.path.name[10] for source in run.sources] == ["b", "a"]
    assert (run.ranks, run.world_size, run.warnings) == ((0, 1), 2, ())
    assert [source.reader("metrics").meta.rank for source in run.sources] == [0, 1]


def test_a_text_in_an_event_is_no_rank(tmp_path):
    name = 'x "distributedInfo": {"rank": 7, "world_size": 9}'
    for rank in range(2):
        write_behind(tmp_path / f"t{rank}.json", rank, 2, [*WORK, k.kernel(name, 60, 5)])
    assert open_run(tmp_path).ranks == (0, 1)


def test_a_truncated_file_of_unknown_rank_is_an_error(tmp_path):
    for name, rank in (("a", 0), ("b", 1)):
        write_behind(tmp_path / f"{name}.json.gz", rank, 3)
    path = tmp_path / "b.json.gz"
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(TraceFileError, match=r"b\.json\.gz: cannot determine the rank"):
        open_run(tmp_path)


@pytest.mark.parametrize("events", [HOST, WORK])
def test_with_all_ranks_there_a_trace_without_a_rank_is_no_rank(tmp_path, events):
    for rank in range(2):
        k.write(tmp_path / f"rank{rank}.json", WORK, rank=rank, world=2)
    write_without(tmp_path / "node_1.async_llm.17.pt.trace.json", events)
    run = open_run(tmp_path)
    assert (run.ranks, run.world_size) == ((0, 1), 2)
    (warning,) = run.warnings
    assert "node_1.async_llm.17.pt.trace.json: not read: it is of no rank" in warning
    assert "every rank has another trace" in warning


@pytest.mark.parametrize("world", [4, None])
def test_a_trace_without_work_of_a_device_is_no_rank(tmp_path, world):
    for rank in range(2):
        path = tmp_path / f"rank{rank}.json"
        if world is None:
            write_without(path, WORK)
        else:
            k.write(path, WORK, rank=rank, world=world)
    write_without(tmp_path / "scheduler.pt.trace.json.gz", HOST)
    run = open_run(tmp_path)
    assert run.ranks == (0, 1)
    assert any("scheduler.pt.trace.json.gz: not read: it " in text for text in run.warnings)


@pytest.mark.parametrize("work", [[k.launch(1, 2)], [k.kernel("gemm", 1, 4)]])
def test_a_trace_with_work_may_be_a_missing_rank_and_is_an_error(tmp_path, work):
    for rank in range(2):
        k.write(tmp_path / f"rank{rank}.json", WORK, rank=rank, world=3)
    write_without(tmp_path / "host_17.pt.trace.json", [*HOST, *work])
    with pytest.raises(TraceFileError, match="cannot determine the rank"):
        open_run(tmp_path)
    run = open_run(tmp_path, config=Config(keep_going=True))
    assert (run.ranks, run.skipped[0].rank) == ((0, 1), 2)
    assert "of no rank" not in str(run.warnings)


def test_a_single_trace_beside_that_of_a_coordinator_is_rank_0(tmp_path):
    write_without(tmp_path / "host_1.2.pt.trace.json", WORK)
    write_without(tmp_path / "host_3.4.pt.trace.json", HOST)
    run = open_run(tmp_path)
    assert [source.path.name for source in run.sources] == ["host_1.2.pt.trace.json"]
    assert "host_3.4.pt.trace.json: not read: it is of no rank" in run.warnings[0]


@pytest.mark.parametrize("name", ["rank0_scheduler.json", "dataloader_worker_3.json"])
def test_a_coordinator_that_is_named_after_a_rank_is_no_rank(tmp_path, name):
    for rank in range(2):
        k.write(tmp_path / f"rank{rank}.json", WORK, rank=rank, world=2)
    write_without(tmp_path / name, HOST)
    run = open_run(tmp_path)
    assert [source.path.name for source in run.sources] == ["rank0.json", "rank1.json"]
    assert f"{name}: not read: it is of no rank" in run.warnings[0]


def test_a_coordinator_that_states_a_job_of_its_own_is_no_rank(tmp_path):
    for rank in range(2):
        k.write(tmp_path / f"rank{rank}.json", WORK, rank=rank, world=2)
    k.write(tmp_path / "host_17.pt.trace.json", HOST, rank=0, world=1)
    run = open_run(tmp_path)
    assert [source.path.name for source in run.sources] == ["rank0.json", "rank1.json"]
    assert "host_17.pt.trace.json: not read: it is of no rank" in run.warnings[0]


def test_two_files_that_state_a_rank_of_one_job_are_an_error(tmp_path):
    for name, events in (("a", WORK), ("b", HOST)):
        k.write(tmp_path / f"{name}.pt.trace.json", events, rank=0, world=2)
    with pytest.raises(TraceFileError, match="two files of rank 0"):
        open_run(tmp_path)


def test_folders_name_ranks_where_their_files_do_not(tmp_path):
    for rank in (1, 0):
        (tmp_path / f"rank_{rank}").mkdir()
        write_without(tmp_path / f"rank_{rank}" / "trace.json", WORK)
    run = open_run(tmp_path)
    assert [source.path.parent.name for source in run.sources] == ["rank_0", "rank_1"]
    assert run.ranks == (0, 1)


def test_a_rank_with_work_beyond_the_world_is_an_error(tmp_path):
    for rank in range(2):
        k.write(tmp_path / f"rank{rank}.json", WORK, rank=rank, world=2)
    write_without(tmp_path / "worker_3.json", WORK)
    with pytest.raises(TraceFileError, match="rank 3 of a world of 2"):
        open_run(tmp_path)


def test_two_traces_without_ranks_are_an_error(tmp_path):
    for name in "ab":
        write_without(tmp_path / f"{name}.json", WORK)
    with pytest.raises(TraceFileError, match=r"a\.json: cannot determine the rank"):
        open_run(tmp_path)


def windows(folder, ranks, times, **words):
    for rank in range(ranks):
        for time in times:
            path = folder / f"host_{100 + rank}.{time}{rank}.pt.trace.json"
            k.write(path, WORK, rank=rank, world=ranks, **words)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_files_of_two_windows_are_an_error_whose_remedy_works(tmp_path, ranks):
    windows(tmp_path, ranks, [99, 1700])
    with pytest.raises(TraceFileError, match="two files of rank 0: ") as error:
        open_run(tmp_path)
    remedy = str(error.value).partition("pass those of one window: ")[2]
    paths = shlex.split(remedy)
    assert all(".99" in path for path in paths)
    assert open_run(*paths).ranks == tuple(range(ranks))


def test_an_uneven_number_of_windows_is_an_error(tmp_path):
    windows(tmp_path, 2, [1, 2])
    windows(tmp_path, 1, [3])
    with pytest.raises(TraceFileError, match=r"schedule \(repeat\), pass one file per rank"):
        open_run(tmp_path)


def test_two_windows_of_a_process_without_a_rank_are_an_error_with_a_remedy(tmp_path):
    for time in (1, 2):
        write_without(tmp_path / f"host_7.{time}.pt.trace.json", WORK)
    with pytest.raises(TraceFileError, match="windows of one process"):
        open_run(tmp_path)
    assert open_run(tmp_path / "host_7.2.pt.trace.json").ranks == (0,)
