"""Test that lost events of one rank do not shift matches of others on the joined path."""

import gzip
import json

import pytest

from fastcomm.critical_path.search import joined
from fastcomm.formats.opening import open_run
from fastcomm.options import Window
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

WHOLE = Window(annotation="")
JOB = Job.of(4, pp=2, steps=2, micro_batches=2, layers=2)


def rewrite(path, rank_of_lost=None, which=None):
    """A trace without numbers, and without one of the events of a kind; the lost one."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    lost = None
    if document["distributedInfo"]["rank"] == rank_of_lost:
        *words, place = which
        named = [row for row in document["traceEvents"] if all(w in said(row) for w in words)]
        lost = named[place]
    for row in document["traceEvents"]:
        row.get("args", {}).pop("Seq", None)
    document["traceEvents"] = [row for row in document["traceEvents"] if row is not lost]
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return lost


def said(row):
    """The name of a communication kernel and of its group."""
    if row.get("cat") != "kernel" or "nccl" not in row["name"]:
        return ""
    return row["name"] + row["args"]["Process Group Description"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("lost")
    write(JOB, found)
    for path in found.iterdir():
        rewrite(path)
    return found


@pytest.fixture(scope="module")
def traces(folder):
    run = open_run(folder)
    return {rank: run.read(rank, "all") for rank in run.ranks}


@pytest.fixture(scope="module")
def whole(traces):
    return joined(traces, WHOLE)


def met(found):
    """The members of all collectives and messages, with what is said of each; by rank."""
    names = (
        "rank",
        "op",
        "start",
        "stop",
        "arrived",
        "wait_ns",
        "transfer_ns",
        "wait_caused_ns",
    )
    return {tuple(row[name] for name in names) for row in found.across.collectives.to_pylist()}


def aside(found, begin, end):
    """The steps of the path that are over before a time, or begin after another."""
    return [
        (row["rank"], row["bound_by"], row["start_ns"], row["stop_ns"], row["name"])
        for row in found.breakdown.to_pylist()
        if row["duration_ns"] and (row["stop_ns"] <= begin or row["start_ns"] >= end)
    ]


@pytest.mark.parametrize(
    ("rank", "which"),
    [
        (3, ("AllGather", "TENSOR", 5)),
        (1, ("ReduceScatter", "TENSOR", 9)),
        (3, ("Broadcast", "TENSOR", 0)),  # the path does not lead through its group
        (0, ("SendRecv", "PIPELINE", 1)),
        (2, ("SendRecv", "PIPELINE", 2)),
    ],
)
def test_a_lost_event_removes_only_itself_from_the_path(
    tmp_path, folder, traces, whole, rank, which
):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (lost,) = filter(None, [rewrite(path, rank, which) for path in tmp_path.iterdir()])
    lossy = open_run(tmp_path).read(rank, "all")
    found = joined(traces | {rank: lossy}, WHOLE)
    assert found.across.violations == 0
    ended = round((lost["ts"] + lost["dur"]) * 1000) + traces[rank].meta.base
    gone = met(whole) - met(found)
    assert met(found) < met(whole)
    # It is gone, and so is the one that it was with.
    assert len(gone) == 2
    assert all(abs(stop - ended) < 1_000 for _, _, _, stop, *_ in gone)
    begin = min(start for _, _, start, *_ in gone)
    assert aside(found, begin, ended) == aside(whole, begin, ended)
    assert found.wall_ns == whole.wall_ns
    kind = "messages lack" if "PIPELINE" in which else "collectives are on one rank alone"
    (note,) = (note for note in found.about.notes if kind in note)
    assert note.startswith("1 ")
