"""Test that the critical path of a synthetic job is found in every format."""

import json
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pytest
from builders.opened import open_run
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.critical_path.search import joined
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.options import Window
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.export import write_nsys
from fastcomm.synthetic.traces import write
from fastcomm.trace.schema import KIND

# Four stages: messages go between two of a group of four.
JOB = Job.of(8, pp=4, steps=2, micro_batches=2, layers=2)
FORMATS = ("kineto", "nsys", "store", "store of nsys")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The job in each format, by name: where it lies."""
    folder = tmp_path_factory.mktemp("formats")
    found = {name: folder / name for name in FORMATS}
    for name in ("kineto", "nsys"):
        found[name].mkdir()
    write(JOB, found["kineto"])
    write_nsys(JOB, found["nsys"], per_report=4)
    for name, source in (("store", "kineto"), ("store of nsys", "nsys")):
        ingest(plan([found[source]], found[name]))
    return found


@pytest.fixture(scope="module")
def traces(runs):
    opened = {name: open_run(folder) for name, folder in runs.items()}
    return {
        name: {rank: run.read(rank, "all") for rank in run.ranks}
        for name, run in opened.items()
    }


def without_waits(trace):
    """The trace without the rows about waiting: the profiler of PyTorch writes none."""
    events, sync = trace.events, KIND["sync"]
    kinds = [KIND["other"] if kind == sync else kind for kind in events["kind"].to_pylist()]
    place = events.column_names.index("kind")
    column = pa.array(kinds, pa.int8())
    return replace(trace, events=events.set_column(place, events.field(place), column))


def on_device(found):
    """The steps of the path on the device; the formats show different calls of the host."""
    return [
        (row["rank"], row["bound_by"], row["start_ns"], row["stop_ns"], row["name"])
        for row in found.breakdown.to_pylist()
        if row["duration_ns"] and row["bound_by"].startswith("gpu")
    ]


def test_formats_with_equal_information_give_equal_paths(traces):
    paths = {
        name: on_device(
            joined(
                {rank: without_waits(each) for rank, each in of.items()}, Window(annotation="")
            )
        )
        for name, of in traces.items()
    }
    assert len(paths["kineto"]) > 100
    assert all(path == paths["kineto"] for path in paths.values())


def test_all_formats_give_the_waits_between_ranks(traces):
    found = {name: joined(of, Window(annotation="")) for name, of in traces.items()}
    tables = [
        each.across.collectives.drop_columns(
            ["instance", "slack_ns", "tag", "group"]
        ).to_pylist()
        for each in found.values()
    ]
    rows = [sorted(table, key=lambda row: (row["rank"], row["start"])) for table in tables]
    assert all(each == rows[0] for each in rows)
    ops = Counter(row["op"] for row in rows[0])
    # Two messages a micro-batch and boundary, from and to each of two ranks a stage, and steps.
    assert ops["SendRecv"] == 2 * (2 * JOB.micro_batches * (JOB.pp - 1) * 2) * JOB.steps
    assert ops["Broadcast"] == 8 * JOB.steps
    assert all(each.across.violations == 0 for each in found.values())
    worst = [each.waits_caused().slice(0, 1)["rank"].to_pylist() for each in found.values()]
    assert worst == [[JOB.straggler]] * len(FORMATS)


def test_a_receive_does_not_end_before_its_send_starts(traces):
    found = joined(traces["kineto"], Window(annotation=""))
    messages = [row for row in found.across.collectives.to_pylist() if row["op"] == "SendRecv"]
    by_instance = {}
    for row in messages:
        by_instance.setdefault(row["instance"], []).append(row)
    for pair in by_instance.values():
        ranks = sorted(row["rank"] for row in pair)
        assert ranks[1] - ranks[0] == JOB.tp * JOB.dp
        assert {row["arrived"] for row in pair} == {max(row["start"] for row in pair)}


@pytest.mark.parametrize("name", ["nsys", "store", "store of nsys"])
def test_path_commands_read_every_format(runs, name):
    def answer(*words):
        words = [words[0], str(runs[name]), *words[1:], "--rank", "3", "--json"]
        done = CliRunner().invoke(main, words, catch_exceptions=False)
        return json.loads(done.stdout)

    window = ("--step", str(JOB.first_step + 1))
    found = answer("critical-path", *window)
    assert found["path"]["length_ns"] == found["path"]["wall_ns"] > 0
    assert found["summary"]["gpu_compute_bound"] > 0.1
    edited = answer("what-if", *window, "--scale", "compute=0.5")
    assert edited["interval"]["replay_error_ns"] == 0
    assert edited["after_ns"] < edited["before_ns"] == found["path"]["wall_ns"]
