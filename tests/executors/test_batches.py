"""Test batches of ranks: after a failure inside a batch, every other rank counts once."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from builders import dask_cluster as c

from fastcomm.errors import FastcommError
from fastcomm.executors import executor
from fastcomm.executors.executor import BatchTask, Local, in_batches
from fastcomm.executors.processes import Processes

MANY = 3 * executor.WIDTH


def done(sources, workers=1):
    """The batches of a run, as lists of ranks and errors."""
    work = BatchTask(task=c.COUNT)
    with Processes(workers) as processes:
        return [
            ([source.rank for source in each.sources], each.error)
            for each in in_batches(sources, work, processes)
        ]


def test_a_batch_ends_with_a_rank_that_fails_and_all_others_are_done():
    reads = [c.fine] * MANY
    for rank in (0, 70, 71, MANY - 1):
        reads[rank] = c.bad
    found = done(c.run_of(*reads).sources)
    assert [rank for ranks, _ in found for rank in ranks] == list(range(MANY))
    assert [ranks[-1] for ranks, error in found if error] == [0, 70, 71, MANY - 1]
    assert max(len(ranks) for ranks, _ in found) <= executor.WIDTH


def test_large_ranks_are_batches_of_their_own(monkeypatch):
    monkeypatch.setattr(executor, "_BATCH_S", 0.01)
    found = done(c.run_of(*[partial(c.slow, seconds=0.02)] * 5, *[c.fine] * 3).sources)
    assert [len(ranks) for ranks, _ in found[:5]] == [1] * 5


def test_workers_share_few_ranks(tmp_path):
    """No batch is so large that one worker has it all."""
    found = done(c.run_of(*[c.fine] * 16).sources, workers=2)
    assert {len(ranks) for ranks, _ in found} == {2}
    assert sorted(rank for ranks, _ in found for rank in ranks) == list(range(16))


def test_a_worker_that_dies_in_a_batch_loses_only_the_rank_at_fault(tmp_path):
    reads = [c.fine] * MANY
    reads[10] = partial(c.deadly_once, tmp_path / "killed")
    # Both may be on their way when the pool breaks: who kills one worker may be innocent.
    reads[-2], reads[-1] = c.deadly, c.bad
    merged, lost = Local(workers=2).gather(c.going_on(c.run_of(*reads)), c.COUNT)
    assert merged == dict.fromkeys(range(MANY - 2), 1)
    found = [(each.rank, "killed" in each.error) for each in lost]
    assert found == [(MANY - 2, True), (MANY - 1, False)]


def into_files(part, path):
    path.write_text(" ".join(map(str, part)))
    return {path: 1}


def put_together(whole, left_out, spread):
    """The ranks in each file, read where the work is spread; and where the files were."""
    paths = sorted(whole)
    return spread(read, paths), paths, left_out


def read(path):
    return [int(each) for each in path.read_text().split()]


@pytest.mark.parametrize("workers", [1, 2])
def test_spill_files_exist_until_the_result_is_computed(workers):
    task = replace(c.COUNT, spill=into_files, finish=put_together)
    ranks, paths, _ = Local(workers=workers).gather(c.run_of(*[c.fine] * MANY), task)
    assert sorted(rank for each in ranks for rank in each) == list(range(MANY))
    assert paths
    assert not any(path.parent.exists() for path in paths)
    # Few ranks stay in memory.
    whole, _ = Local(workers=workers).gather(
        c.run_of(*[c.fine] * 4), replace(task, finish=c.both)
    )
    assert whole == dict.fromkeys(range(4), 1)


def no_room(part, path):
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_spill_disk_is_an_error_with_path_and_remedy(workers, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    task = replace(c.COUNT, spill=no_room)
    words = rf"{tmp_path}.*: No space left on device\. Set TMPDIR"
    with pytest.raises(FastcommError, match=words):
        Local(workers=workers).gather(c.run_of(*[c.fine] * MANY), task)
    assert not list(Path(tmp_path).iterdir())


def killed_while_answering(_):
    c.deadly(0)


def spread_death(whole, left_out, spread):
    return spread(killed_while_answering, [1, 2, 3])


def test_a_worker_that_dies_while_ranks_are_compared_is_an_error():
    task = replace(c.COUNT, spill=into_files, finish=spread_death)
    with pytest.raises(FastcommError, match="a worker was killed while ranks were compared"):
        Local(workers=2).gather(c.run_of(*[c.fine] * MANY), task)
