"""Test the path through all ranks with several workers."""

import json
import shutil

import pytest
from builders import dask_cluster as c
from builders.commands import contents, invoke
from builders.opened import open_run

from fastcomm.critical_path.analysis import critical_path, trimmed
from fastcomm.critical_path.search import analyze, joined
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.traces import write

JOB = Job.of(ranks=4, steps=2, layers=2, micro_batches=2)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kineto")
    write(JOB, folder)
    return folder


@pytest.fixture(scope="module", params=["kineto", "nsys"])
def run(request, traces, tmp_path_factory):
    if request.param == "kineto":
        return open_run(traces)
    folder = tmp_path_factory.mktemp("nsys")
    write_nsys(JOB, folder)
    return open_run(folder)


@pytest.fixture(scope="module")
def on_cluster(tmp_path_factory):
    """The options that make a command use a worker of a cluster."""
    cluster = c.Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.worker("only")
    yield "--dask", cluster.address
    cluster.close()


def test_omitting_unneeded_events_does_not_change_the_path(run):
    trace = run.read(1, "all")
    found = analyze(trace)
    small, path = trimmed(trace, found)
    assert small.events.num_rows < trace.events.num_rows
    assert small.comm.drop_columns(["event"]).equals(trace.comm.drop_columns(["event"]))
    assert path.event_ids == found.event_ids
    assert path.breakdown.equals(found.breakdown)
    assert path.summary_ns() == found.summary_ns()
    events, rows = small.events, small.comm["event"]
    assert events["start"].take(rows).equals(small.comm["start"])


def test_the_path_equals_the_path_of_whole_traces(run):
    whole = joined({rank: run.read(rank, "all") for rank in run.ranks})
    found = critical_path(run)
    assert found.skipped == ()
    assert found.to_dict() == whole.to_dict()
    assert found.breakdown.equals(whole.breakdown)
    assert found.across.collectives.equals(whole.across.collectives)
    assert found.event_ids == whole.event_ids


def test_results_equal_the_results_of_one_process(traces, on_cluster, tmp_path):
    command = ["critical-path", traces, "--json", "--output"]
    here = invoke(*command, tmp_path / "here").stdout
    for name, words in (("two", ("--workers", "2")), ("cluster", on_cluster)):
        assert invoke(*command, tmp_path / name, *words).stdout == here
        assert contents(tmp_path / name) == contents(tmp_path / "here")


def test_an_unreadable_rank_is_an_error_or_skipped(traces, tmp_path):
    shutil.copytree(traces, tmp_path, dirs_exist_ok=True)
    (_, bad, *_) = sorted(tmp_path.iterdir())
    bad.write_bytes(bad.read_bytes()[:-100])
    words = ("critical-path", tmp_path, "--json")
    assert (
        "cut short" in invoke(*words, code=1).stderr
        or bad.name in invoke(*words, code=1).stderr
    )
    result = invoke(*words, "--keep-going", code=3)
    (failed,) = json.loads(result.stdout)["failed"]
    assert failed["rank"] == 1
    assert bad.name in failed["error"]
    assert f"skipped: rank 1: {failed['error']}" in result.stderr
    answer = invoke("what-if", tmp_path, "--scale", "compute=0.5", "--keep-going", code=3)
    assert "skipped: rank 1" in answer.stderr


def test_one_rank_is_read_on_a_worker_unless_its_trace_is_needed_here(traces, on_cluster):
    command = ["critical-path", traces, "--rank", "1", "--json"]
    assert invoke(*command, *on_cluster).stdout == invoke(*command).stdout
    error = invoke(*command, *on_cluster, "--compat", "hta", code=2).stderr
    assert "--dask has no effect with --compat; leave one out." in error


def test_a_what_if_equals_that_of_one_process(traces, on_cluster, tmp_path):
    command = ["what-if", traces, "--bottleneck", "--json", "--output"]
    here = invoke(*command, tmp_path / "here").stdout
    assert invoke(*command, tmp_path / "there", *on_cluster).stdout == here
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
