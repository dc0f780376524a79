"""Test spilling to a directory shared by workers."""

from dataclasses import replace
from functools import partial
from time import monotonic, sleep

import pytest
from builders import dask_cluster as c
from builders.commands import contents, invoke

from fastcomm.errors import FastcommError
from fastcomm.executors import dask
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

RANKS = 16


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "traces"
    write(Job.of(RANKS, steps=2, layers=1, micro_batches=1), folder)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # As Dask is by itself: what a worker had that died is done again by others.
        patch.setitem(c.SETTINGS, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "3")
        made = c.Cluster(tmp_path_factory.mktemp("cluster"))
        for name in ("first", "second"):
            made.worker(name)
        yield made
        made.close()


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """A directory that is used from a few ranks on."""
    monkeypatch.setattr(dask, "WIDTH", 4)
    return tmp_path / "scratch"


def test_results_equal_the_results_of_one_process(traces, cluster, scratch, tmp_path):
    here = invoke("metrics", traces, "--json", "--output", tmp_path / "here").stdout
    there = invoke(
        *("metrics", traces, "--json", "--output", tmp_path / "there"),
        *("--dask", cluster.address, "--dask-scratch", scratch),
    ).stdout
    assert there == here
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert list(scratch.iterdir()) == []


def into_files(part, path):
    ranks = [each for each in part if isinstance(each, int)]
    path.write_text(" ".join(map(str, ranks)))
    return {path: 1, **{each: 1 for each in part if not isinstance(each, int)}}


def numbers(path):
    return [int(each) for each in path.read_text().split()]


def ranks_of(whole, left_out, spread):
    """The ranks that are in files, read by all workers; and how many files there were."""
    return sorted(rank for found in spread(numbers, sorted(whole)) for rank in found)


def test_each_rank_has_one_scratch_file_that_is_removed(cluster, scratch):
    task = replace(c.COUNT, spill=into_files, finish=ranks_of)
    with dask.connected(cluster.address, scratch=scratch) as engine:
        assert engine.gather(c.run_of(*[c.fine] * 40), task) == list(range(40))
        assert list(scratch.iterdir()) == []
        # Few ranks stay in memory.
        found = engine.gather(c.run_of(*[c.fine] * 4), replace(task, finish=c.both))
        assert found[0] == dict.fromkeys(range(4), 1)


def ask_deadly(marker, whole, left_out, spread):
    return spread(partial(c.deadly_once, marker), [0, 1, 2])


def test_a_worker_that_dies_while_comparing_is_replaced(cluster, scratch, tmp_path):
    finish = partial(ask_deadly, tmp_path / "killed")
    task = replace(c.COUNT, spill=into_files, finish=finish)
    with dask.connected(cluster.address, scratch=scratch) as engine:
        engine.client.wait_for_workers(2, timeout=30)
        found = engine.gather(c.run_of(*[c.fine] * 8), task)
    assert found == [{0: 1}, {1: 1}, {2: 1}]
    assert (tmp_path / "killed").exists()
    assert list(scratch.iterdir()) == []


def test_a_missing_scratch_directory_is_an_error(cluster, scratch, tmp_path):
    scratch.write_text("a file")
    task = replace(c.COUNT, spill=into_files, finish=ranks_of)
    words = r"scratch/fastcomm-.*: Not a directory; expected a directory that all workers share"
    with (
        dask.connected(cluster.address, scratch=scratch) as engine,
        pytest.raises(FastcommError, match=words),
    ):
        engine.gather(c.run_of(*[c.fine] * 8), task)


def test_a_failed_rank_leaves_no_scratch_files(cluster, scratch):
    task = replace(c.COUNT, spill=into_files, finish=ranks_of)
    with (
        pytest.raises(FastcommError, match=r"rank39\.json: damaged"),
        dask.connected(cluster.address, scratch=scratch) as engine,
    ):
        engine.gather(c.run_of(*[c.fine] * 39, c.bad), task)
    # Nobody waits for it, and what comes too late finds no directory.
    until = monotonic() + 20
    while list(scratch.iterdir()) and monotonic() < until:
        sleep(0.05)
    assert list(scratch.iterdir()) == []


def test_a_scratch_directory_without_a_cluster_is_an_error(traces, tmp_path):
    said = invoke("metrics", traces, "--dask-scratch", tmp_path, code=2)
    assert "--dask-scratch needs --dask." in said.stderr
