"""Test that a Dask cluster gives the results of one process, and clear errors."""

import asyncio
import concurrent.futures
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import dask_cluster as c
from builders import kineto_text as k
from builders.commands import contents, invoke
from builders.places import DOCS, TESTS

import fastcomm
from fastcomm.errors import ClusterError, FastcommError
from fastcomm.executors import dask, processes
from fastcomm.executors.executor import Task
from fastcomm.formats.opening import open_run

TP = {"Process_Group_Description": "mesh_tp", "Process_Group_Ranks": "[0, 1, 2, 3]"}
RANKS = 20


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "traces"
    folder.mkdir()
    for rank in range(RANKS):
        step = [k.mark("ProfilerStep#0", 0, 100), k.kernel("gemm", 5, 30 + rank)]
        step += [k.all_reduce(20 + 10 * n, 5, **TP) for n in range(3)]
        k.write(folder / f"rank{rank}.json", step, rank=rank, world=RANKS)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A scheduler and two workers."""
    made = c.Cluster(tmp_path_factory.mktemp("cluster"))
    made.worker("first")
    made.worker("second")
    yield made
    made.close()


@pytest.fixture
def look_often(monkeypatch):
    """Look for lost workers ten times a second."""
    monkeypatch.setattr("fastcomm.executors.dask._LOOK_S", 0.1)


@pytest.fixture(scope="module")
def engine(cluster):
    with dask.connected(cluster.address, wait_s=30) as found:
        found.client.wait_for_workers(2, timeout=30)
        yield found


def test_results_equal_the_results_of_one_process(traces, engine, cluster, tmp_path):
    here = invoke("metrics", traces, "--json", "--output", tmp_path / "here").stdout
    there = invoke(
        "metrics", traces, "--json", "--output", tmp_path / "there", "--dask", cluster.address
    ).stdout
    assert json.loads(there)["ranks"] == list(range(RANKS))
    assert there == here
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_a_store_equals_the_store_of_one_process(traces, engine, cluster, tmp_path):
    invoke("ingest", traces, "-o", tmp_path / "here")
    invoke("ingest", traces, "-o", tmp_path / "there", "--dask", cluster.address)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_workers_list_and_read_urls(traces, engine, cluster, tmp_path):
    url = f"file://{traces}"
    here = invoke("metrics", url, "--json").stdout
    assert invoke("metrics", url, "--json", "--dask", cluster.address).stdout == here
    invoke("ingest", url, "-o", tmp_path / "store", "--dask", cluster.address)
    assert open_run(tmp_path / "store").ranks == tuple(range(RANKS))


def test_the_task_on_the_page_runs(traces, engine):
    page = DOCS / "scale-out.md"
    text = page.read_text().rpartition("```python\n")[2].partition("```")[0]
    functions, _, rest = text.partition('if __name__ == "__main__":')
    assert "Task(measure=kinds, merge=merge, finish=finish)" in rest
    names = {}
    exec(functions, names)
    task = Task(measure=names["kinds"], merge=names["merge"], finish=names["finish"])
    counts, skipped = engine.gather(open_run(traces), task)
    assert sum(counts.values()) >= 4 * RANKS
    assert skipped == []


def test_relative_paths_are_resolved_by_the_client(traces, engine, cluster, monkeypatch):
    monkeypatch.chdir(traces.parent)
    found = invoke("info", traces.name, "--all", "--json", "--dask", cluster.address).stdout
    assert found == invoke("info", traces, "--all", "--json").stdout


def test_unreadable_ranks_are_skipped_on_a_cluster(engine, tmp_path):
    run = c.run_of(c.fine, c.bad, c.fine, c.too_large, c.fine)
    seen = []
    merged, lost = engine.gather(c.going_on(run), c.COUNT, progress=seen.append)
    assert merged == {0: 1, 2: 1, 4: 1}
    assert [each.rank for each in lost] == [1, 3]
    assert "rank1.json: damaged" in lost[0].error
    assert "rank3.json: rank 3 does not fit into memory" in lost[1].error
    assert sorted(source.rank for source in seen) == [0, 1, 2, 3, 4]
    with pytest.raises(FastcommError, match=r"rank1\.json: damaged"):
        engine.gather(c.run_of(c.fine, c.bad), c.COUNT)
    with pytest.raises(FastcommError, match=r"no rank could be read: rank0\.json: damaged"):
        engine.gather(c.going_on(c.run_of(c.bad, c.bad)), c.COUNT)


def test_ranks_that_fail_inside_a_batch_cost_no_other(engine):
    """Of 64 ranks on two workers, a batch has 8: also one whose ranks all fail."""
    bad = {3, 4, 17, *range(32, 40), 63}
    run = c.run_of(*(c.bad if rank in bad else c.fine for rank in range(64)))
    seen = []
    merged, lost = engine.gather(c.going_on(run), c.COUNT, progress=seen.append)
    assert merged == {rank: 1 for rank in range(64) if rank not in bad}
    assert [each.rank for each in lost] == sorted(bad)
    assert all(f"rank{each.rank}.json: damaged" in each.error for each in lost)
    assert sorted(source.rank for source in seen) == list(range(64))


def test_batches_are_of_small_ranks():
    def widths(sizes, threads):
        run = c.run_of(*[c.fine] * len(sizes))
        sources = [
            replace(one, size=size) for one, size in zip(run.sources, sizes, strict=True)
        ]
        batches = list(dask._batches(sources, threads))
        assert [one for batch in batches for one in batch] == sources
        return [len(batch) for batch in batches]

    assert widths([1000] * 64, 2) == [8] * 8
    assert widths([1000] * 5, 2) == [1] * 5
    assert widths([30 << 20] * 32, 1) == [2] * 16
    assert widths([1 << 30, 1000, 1000, 1 << 30] * 4, 1) == [1, 2, 1] * 4
    assert widths([1000] * 10, 0) == [2] * 5
    assert widths([], 2) == []


def test_a_bug_is_raised_as_it_is_with_the_rank(engine):
    with pytest.raises(ZeroDivisionError, match="a bug") as raised:
        engine.gather(c.going_on(c.run_of(c.fine, c.buggy)), c.COUNT)
    assert raised.value.__notes__ == ["rank 1: rank1.json"]


def test_ranks_of_a_killed_worker_are_read_again(engine, cluster, tmp_path):
    engine.client.wait_for_workers(2, timeout=30)
    reads = [c.slow] * 24
    reads[7] = partial(c.deadly_once, tmp_path / "killed")
    merged, lost = engine.gather(c.run_of(*reads), c.COUNT)
    assert (tmp_path / "killed").exists()
    assert merged == dict.fromkeys(range(24), 1)
    assert lost == ()


def test_ranks_that_kill_every_worker_are_skipped_alone(engine, cluster):
    """With a nanny, which starts a killed worker again; one rank needs too much memory."""
    cluster.kill("first")
    cluster.kill("second")
    cluster.nanny("third")
    c.wait_for_nanny(engine.client)
    run = c.run_of(c.fine, c.fine, c.deadly, c.hungry, c.fine, c.fine)
    merged, lost = engine.gather(c.going_on(run), c.COUNT)
    assert merged == dict.fromkeys([0, 1, 4, 5], 1)
    assert [each.rank for each in lost] == [2, 3]
    for each in lost:
        assert f"rank{each.rank}.json: the worker that read rank {each.rank} was" in each.error
    cluster.kill("third")


def test_a_worker_that_is_not_restarted_does_not_affect_others(cluster, tmp_path, look_often):
    late = tmp_path / "late.py"
    late.write_text(c.LATE_NANNY)
    with dask.connected(cluster.address, wait_s=2) as engine:
        cluster.nanny("late", "--preload-nanny", str(late))
        engine.client.wait_for_workers(1, timeout=30)
        gone = pytest.raises(ClusterError, match=r"no worker for 2 s; .* were killed and not")
        with gone:
            engine.gather(c.going_on(c.run_of(c.deadly, c.fine)), c.COUNT)
    cluster.kill("late")
    with dask.connected(cluster.address, wait_s=30) as engine:
        cluster.nanny("late", "--preload-nanny", str(late))
        engine.client.wait_for_workers(1, timeout=30)
        cluster.worker("other")
        run = c.run_of(partial(c.deadly_once, tmp_path / "killed"), *[c.slow] * 8)
        merged, lost = engine.gather(c.going_on(run), c.COUNT)
        assert merged == dict.fromkeys(range(9), 1)
        assert lost == ()
    cluster.kill("late")
    cluster.kill("other")


def test_a_cluster_without_workers_is_an_error_within_a_time_limit(cluster, look_often):
    late = pytest.raises(ClusterError, match=r"no worker for 0.5 s; .* start workers")
    with dask.connected(cluster.address, wait_s=0.5) as engine, late:
        engine.gather(c.run_of(c.fine), c.COUNT)


def test_another_fastcomm_on_a_worker_is_an_error(cluster, tmp_path):
    root = Path(fastcomm.__file__).parents[1]
    for package in ("fastcomm", "kernels/fastcomm_kernels"):
        shutil.copytree(
            root / package, tmp_path / package, ignore=shutil.ignore_patterns("*.pyc")
        )
    with (tmp_path / "fastcomm" / "units.py").open("a") as file:
        file.write("# another\n")
    path = f"{tmp_path}:{tmp_path / 'kernels'}:{TESTS}"
    for name in ("first", "second"):  # other tests need them no more
        cluster.kill_once(name)
    late = pytest.raises(
        ClusterError, match=r"a worker runs fastcomm .*, but the caller's code is"
    )
    with dask.connected(cluster.address, wait_s=30) as engine, late:
        strange = cluster.python(
            *("-m", "distributed.cli.dask_worker", "--no-nanny", "--no-dashboard"),
            *("--nthreads", "1", "--scheduler-file", str(cluster.file)),
            environment={"PYTHONPATH": path},
            stderr=subprocess.DEVNULL,
        )
        engine.gather(c.going_on(c.run_of(c.fine)), c.COUNT)
    at_once = pytest.raises(
        ClusterError, match=r"tcp://.*: fastcomm .*, but this process runs .* install"
    )
    with at_once, dask.connected(cluster.address):
        pass
    strange.kill()
    strange.wait()


_INTERRUPTED = """
import sys
import distributed.client as module
from fastcomm.executors import dask

sync = module.sync

def interrupted(*args, **kwargs):
    module.sync = sync
    raise KeyboardInterrupt

try:
    with dask.connected(sys.argv[1]) as engine:
        kept = [engine.client]  # in a cycle: it lives until Python ends
        kept.append(kept)
        module.sync = interrupted
except KeyboardInterrupt:
    print("interrupted")
"""


def test_python_ends_though_closing_the_client_was_interrupted(cluster):
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, cluster.address],
        check=True,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_a_lost_scheduler_is_an_error_within_a_time_limit(cluster):
    cluster.worker("last")
    with dask.connected(cluster.address, wait_s=10) as engine:
        engine.client.wait_for_workers(1, timeout=30)
        run = c.run_of(*[c.slow] * 40)
        with pytest.raises(ClusterError, match=r"the scheduler is gone, .* start it and run"):
            engine.gather(run, c.COUNT, progress=lambda _: cluster.kill_once("scheduler"))


@pytest.mark.parametrize("kind", [asyncio.CancelledError, concurrent.futures.CancelledError])
def test_a_result_that_is_canceled_means_that_the_scheduler_is_gone(kind):
    class Client:
        """Loses its connection after the result is there, and before it is here."""

        def gather(self, *_, **__):
            raise kind("scheduler-connection-lost")

    engine = dask.Dask(client=Client(), address="tcp://head:8786", wait_s=1)
    result = SimpleNamespace(status="finished", add_done_callback=lambda put: put(result))
    with pytest.raises(ClusterError, match=r"the scheduler is gone, .*connection-lost"):
        engine.answer(result)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere", r"invalid --dask 'nowhere': expected file:"),
        ("http://x", r"invalid --dask 'http://x': expected file:.*unknown address scheme"),
        ("inproc://x", r"invalid --dask 'inproc://x': expected file:.*of another process"),
        ("tcp://x", r"invalid --dask 'tcp://x': expected file:.*missing port"),
        ("tcp://:", r"invalid --dask 'tcp://:': expected file:"),
        ("host:port", r"invalid --dask 'host:port': expected file:"),
        ("tcp://host:99999", r"invalid --dask 'tcp://host:99999': expected file:"),
        ("file:no/such.json", "no such file for 0.1 s"),
        ("tcp://127.0.0.1:1", "no scheduler answers"),
    ],
)
def test_an_unreachable_address_is_an_error(address, message):
    with pytest.raises(FastcommError, match=message), dask.connected(address, wait_s=0.1):
        pass


def test_workers_and_a_cluster_contradict_each_other(traces):
    result = invoke("metrics", traces, "--workers", 2, "--dask", "tcp://x:1", code=2)
    assert "--workers has no effect with --dask" in result.stderr


_WITHOUT = """
import sys
from fastcomm.__main__ import main

for missing in ("dask", "distributed"):
    sys.modules[missing] = None
    try:
        main()
    except SystemExit as end:
        print(missing, end.code)
    del sys.modules[missing]
"""


def test_without_the_extra_the_error_names_it(traces):
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, "metrics", traces, "--dask", "tcp://x:1"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "dask 2\ndistributed 2\n"
    for line, missing in zip(done.stderr.splitlines(), ("dask", "distributed"), strict=True):
        assert line.startswith("Error: --dask ")
        assert missing in line
        assert "needs the extra: pip install 'fastcomm[dask]'" in line


def test_other_versions_are_warned_of_by_place():
    ours = processes.versions()
    found = {"a": ours, "b": {**ours, "numpy": "1.0"}, "c": {**ours, "numpy": "1.0"}}
    assert processes.check_same(found) == [
        f"b and 1 more: numpy 1.0, but this process runs {ours['numpy']}: results may differ"
    ]
    with pytest.raises(ClusterError, match="c: fastcomm 9, but this process runs"):
        processes.check_same({"c": {**ours, "fastcomm": "9"}})
