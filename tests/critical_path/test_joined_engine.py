"""Test the path through all ranks with several workers."""

import json

import pytest
from builders.commands import contents, invoke

from fastcomm.analyses.critical_path import critical_path, trimmed
from fastcomm.critical_path.analysis import analyze, joined
from fastcomm.readers.runs import open_run
from fastcomm.synthetic import Job, write, write_nsys


@pytest.fixture(scope="module", params=["kineto", "nsys"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    job = Job.of(ranks=4)
    (write if request.param == "kineto" else write_nsys)(job, folder)
    return open_run(folder)


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


@pytest.mark.parametrize("words", [["--workers", "2"], ["--dask", "local:1"]])
def test_results_equal_the_results_of_one_process(tmp_path, words):
    write(Job.of(ranks=4), tmp_path / "run")
    command = ["critical-path", tmp_path / "run", "--json", "--output"]
    here = invoke(*command, tmp_path / "here").stdout
    assert invoke(*command, tmp_path / "there", *words).stdout == here
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_an_unreadable_rank_is_an_error_or_skipped(tmp_path):
    (_, bad, *_) = sorted(write(Job.of(ranks=4), tmp_path))
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


def test_one_rank_is_read_on_a_worker_unless_its_trace_is_needed_here(tmp_path):
    write(Job.of(ranks=2), tmp_path)
    command = ["critical-path", tmp_path, "--rank", "1", "--json"]
    assert invoke(*command, "--dask", "local:1").stdout == invoke(*command).stdout
    error = invoke(*command, "--dask", "local:1", "--compat", "hta", code=2).stderr
    assert "--dask has no effect with --compat; leave one out." in error


def test_a_replay_equals_the_replay_of_one_process(tmp_path):
    write(Job.of(ranks=4), tmp_path / "run")
    command = ["replay", tmp_path / "run", "--json", "--output"]
    here = invoke(*command, tmp_path / "here").stdout
    assert invoke(*command, tmp_path / "there", "--dask", "local:1").stdout == here
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
