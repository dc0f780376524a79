"""Test the critical path through all ranks."""

import json

import numpy as np
import pytest
from builders import kineto_text as k
from click.testing import CliRunner

import fastcomm
from fastcomm.cli.main import main
from fastcomm.critical_path.search import JoinError, joined
from fastcomm.critical_path.what_if import Replay
from fastcomm.errors import FastcommError
from fastcomm.formats.opening import open_run
from fastcomm.graph.edits import parse_edits
from fastcomm.options import EditOptions, Window
from fastcomm.synthetic import pipeline
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

US = 1000
WHOLE = Window(annotation="")
PAIR = {
    "Process_Group_Name": "0",
    "Process_Group_Ranks": "[0, 1]",
    "Process_Group_Description": "TENSOR_MODEL_PARALLEL_GROUP",
}


def rank_events(compute, ahead=0, transfer=10, after=5, nelems=1000, **group):
    """A gemm, an all-reduce that ends at 110 + `transfer`, and another kernel."""
    group = {**PAIR, "Group_size": 2, **group}
    end = 110 + transfer
    rows = [
        k.launch(0, 1),
        k.launch(2, 2),
        k.launch(4, 3),
        k.kernel("gemm", 10, compute, device=0, correlation=1),
        k.all_reduce(
            10 + compute, end - 10 - compute, 7, nelems, device=0, correlation=2, Seq=4, **group
        ),
        k.kernel("adam", end, after, device=0, correlation=3),
    ]
    for row in rows:
        row["ts"] += ahead
    return rows


def opened(folder, *ranks):
    groups = [{"pg_name": "0", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0, 1]}]
    for rank, events in enumerate(ranks):
        k.write(folder / f"rank{rank}.json", events, rank=rank, world=len(ranks), groups=groups)
    return open_run(folder)


def path_of(run, window):
    return joined({rank: run.read(rank, "all") for rank in run.ranks}, window)


def steps(found):
    rows = found.breakdown.to_pylist()
    return [(r["rank"], r["bound_by"], r["duration_ns"] / US) for r in rows if r["duration_ns"]]


def test_the_path_goes_through_the_last_rank_to_arrive(tmp_path):
    found = path_of(opened(tmp_path, rank_events(60), rank_events(100)), WHOLE)
    assert steps(found) == [
        (1, "gpu_kernel_launch_overhead", 10),
        (1, "gpu_compute_bound", 100),
        (1, "gpu_communication_bound", 10),
        (1, "gpu_compute_bound", 5),
    ]
    assert found.length_ns == found.wall_ns == 125 * US
    first, second = found.by_rank().to_pylist()
    assert first == {
        "rank": 0,
        "on_path_ns": 0,
        "wait_ns": 40 * US,
        "transfer_ns": 10 * US,
        "slack_ns": 0,
        "arrival_slack_ns": 40 * US,
        "arrived_last": 0,
        "wait_caused_ns": 0,
        "clock_offset_ns": 0,
    }
    assert (second["wait_caused_ns"], second["arrival_slack_ns"]) == (40 * US, 0)
    assert second["arrived_last"] == 1
    assert found.across.violations == 0


def test_the_path_crosses_where_another_rank_ends_last(tmp_path):
    found = path_of(
        opened(tmp_path, rank_events(60, after=50), rank_events(100, after=5)), WHOLE
    )
    assert found.crossings == 1
    assert steps(found)[-2:] == [
        (0, "gpu_communication_bound", 10),
        (0, "gpu_compute_bound", 50),
    ]
    assert steps(found)[1] == (1, "gpu_compute_bound", 100)


def test_a_faster_straggler_is_a_faster_step_until_another_rank_is_last(tmp_path):
    found = path_of(opened(tmp_path, rank_events(60), rank_events(100)), WHOLE)
    replay = Replay(found)
    assert replay.step_after([]).replay_error_ns == 0
    assert replay.span(parse_edits(EditOptions(scale=["name:gemm=0.5"])).edits) == 75 * US
    assert replay.span(parse_edits(EditOptions(scale=["comm=0"])).edits) == 115 * US


def test_clocks_are_aligned_before_ranks_are_joined(tmp_path):
    both = []
    for compute, ahead in ((60, 0), (100, 3000)):
        rows = rank_events(compute, ahead)
        # Three collectives at least have to agree.
        for n in range(3):
            at = ahead + 200 + 50 * n
            group = {**PAIR, "Group_size": 2}
            args = {"device": 0, "correlation": 10 + n, "Seq": 5 + n, **group}
            rows += [k.launch(at - 5, 10 + n), k.all_reduce(at, 10, 7, **args)]
        both.append(rows)
    found = path_of(opened(tmp_path, *both), WHOLE)
    assert found.across.offsets == {0: 0, 1: 3000 * US}
    assert found.length_ns == 310 * US
    assert found.by_rank().to_pylist()[0]["wait_ns"] == 40 * US


def test_an_end_before_the_last_arrival_is_a_violation(tmp_path):
    ranks = [[*rank_events(60), *late] for late in ([], [])]
    for n, rows in enumerate(ranks):
        for m in range(3):
            at = 1000 * (m + 1)
            start, length = (at, 20) if n or m else (at, 5)
            start += 10 if n and not m else 0
            rows += [
                k.launch(at - 50, 10 + m),
                k.all_reduce(
                    start,
                    length,
                    7,
                    device=0,
                    correlation=10 + m,
                    Seq=5 + m,
                    **{**PAIR, "Group_size": 2},
                ),
            ]
    found = path_of(opened(tmp_path, *ranks), WHOLE)
    assert found.across.violations == 1
    assert (
        "1 collective events end before the last arrival, although clocks are aligned"
        in found.about.notes
    )
    assert found.length_ns == found.wall_ns


def test_unmatched_collectives_are_not_joined(tmp_path):
    with pytest.raises(
        JoinError, match="no two of these ranks have communication of one group"
    ):
        path_of(opened(tmp_path, rank_events(60), rank_events(80, nelems=7)), WHOLE)


def test_missing_ranks_make_the_path_partial(tmp_path):
    group = {"Group_size": 3, "Process_Group_Ranks": "[0, 1, 2]", "Process_Group_Name": "9"}
    run = opened(tmp_path, rank_events(60, **group), rank_events(100, **group))
    found = path_of(run, WHOLE)
    assert "1 of 1 collectives lack ranks: the path is partial" in found.about.notes


def behind_attention(found, rank):
    """By how much a rank comes later than the others to the sums behind its attentions."""
    return sum(
        row["is_last"] * row["wait_caused_ns"] - row["wait_ns"]
        for row in found.across.collectives.to_pylist()
        if (row["rank"], row["tag"], row["op"]) == (rank, "TP", "ReduceScatter")
    )


def test_the_planted_straggler_causes_the_waits(tmp_path):
    # Little drift, so that what is planted shows.
    job = Job.of(ranks=8, steps=2, skew_ns=4_000)
    write(job, tmp_path)
    run = open_run(tmp_path)
    traces = {rank: run.read(rank, "all") for rank in run.ranks}
    found = joined(traces, WHOLE)
    by_rank = {row["rank"]: row for row in found.by_rank().to_pylist()}
    assert max(by_rank, key=lambda rank: by_rank[rank]["wait_caused_ns"]) == job.straggler
    assert min(by_rank, key=lambda rank: by_rank[rank]["wait_ns"]) == job.straggler
    assert found.across.violations == 0
    assert set(found.across.offsets.values()) == {0}
    graph = found.graph
    assert (graph.source < graph.target).all()
    assert (np.diff(graph.target) >= 0).all()
    assert sum(found.summary_ns().values()) == found.wall_ns
    worst = found.waits_caused().slice(0, 1).to_pylist()[0]
    assert (worst["rank"], worst["tag"]) == (job.straggler, "TP")
    # Its tensor-parallel peer waits at each of its attentions for what it is slower by.
    without = Job.of(ranks=8, steps=2, skew_ns=4_000, straggler=None)
    (tmp_path / "without").mkdir()
    write(without, tmp_path / "without")
    other = open_run(tmp_path / "without")
    even = joined({rank: other.read(rank, "all") for rank in other.ranks}, WHOLE)
    # What it is slower by: all its attentions, forward and backward. The start of its step
    # differs by microseconds.
    planted = sum(pipeline.slack(job, direction) for direction in ("forward", "backward"))
    slower = behind_attention(found, job.straggler) - behind_attention(even, job.straggler)
    assert slower == pytest.approx(job.steps * job.micro_batches * planted, rel=0.001)
    # A little comes on top: its peer's weight gradients are done before, and both wait after.
    assert slower <= worst["later_ns"] < 1.1 * slower
    caused = [row["wait_caused_ns"] for row in even.waits_caused().to_pylist()]
    assert worst["wait_caused_ns"] > 3 * max(caused)


def test_the_command_prints_the_path_through_all_ranks(tmp_path):
    opened(tmp_path, rank_events(60), rank_events(100))
    words = ["critical-path", str(tmp_path), "--annotation", ""]
    text = CliRunner().invoke(main, words, catch_exceptions=False).stdout
    assert text.startswith("all ranks: critical path of 125 us, ")
    assert "of 12 events" in text
    assert "The path goes from one rank to another 0 times. Clock corrections: none." in text
    out = tmp_path / "out"
    done = CliRunner().invoke(main, [*words, "--json", "--output", str(out)])
    found = json.loads(done.stdout)
    assert found["path"]["length_ns"] == 125 * US
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert found["edges"]["join"] == 2
    assert {path.name for path in out.iterdir()} >= {"ranks.csv", "collectives.parquet"}
    alone = CliRunner().invoke(main, [*words, "--json", "--rank", "1"]).stdout
    assert json.loads(alone)["rank"] == 1
    what_if = ["what-if", *words[1:], "--scale", "kernel:gemm=0.5", "--json"]
    assert json.loads(CliRunner().invoke(main, what_if).stdout)["after_ns"] == 75 * US


def answer(folder, *words):
    window = () if "--annotation" in words else ("--annotation", "")
    words = ("critical-path", str(folder), *window, "--json", *words)
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("ranks", "window", "why"),
    [
        (
            [rank_events(60), rank_events(80, nelems=7)],
            "",
            "no two of these ranks have communication",
        ),
        ([rank_events(60), rank_events(100, ahead=3000)], "", "(clocks disagree: most"),
        ([[*rank_events(60), k.mark("step", 0, 150)], rank_events(100)], "step", "rank1.json"),
    ],
    ids=["nothing in common", "clocks", "no such window"],
)
def test_if_ranks_cannot_be_joined_the_path_covers_the_first_rank(tmp_path, ranks, window, why):
    opened(tmp_path, *ranks)
    found = answer(tmp_path, "--annotation", window)
    note = found["notes"].pop(0)
    assert note.startswith("this is the path of rank 0 alone: ranks cannot be joined (")
    assert why in note
    assert found == answer(tmp_path, "--annotation", window, "--rank", "0")
    words = ["what-if", str(tmp_path), "--annotation", window, "--scale", "comm=0.5"]
    assert "note: this is the path of rank 0 alone" in CliRunner().invoke(main, words).stdout


@pytest.mark.parametrize("rank", [None, 1])
def test_the_command_and_the_api_find_the_same_path(tmp_path, rank):
    opened(tmp_path, rank_events(60), rank_events(100))
    path = fastcomm.open(tmp_path).critical_path(annotation="", rank=rank)
    assert path.ranks == ((0, 1) if rank is None else (1,))
    words = [] if rank is None else ["--rank", str(rank)]
    assert answer(tmp_path, *words) == path.to_dict()
    assert path.by_rank()["rank"].to_pylist() == list(path.ranks)
    assert path.what_if(scale=["comm=0.5"]).after.ranks == path.ranks


def test_a_path_through_several_ranks_is_not_saved(tmp_path):
    found = path_of(opened(tmp_path, rank_events(60), rank_events(100)), WHOLE)
    with pytest.raises(FastcommError, match="a path through several ranks cannot be saved"):
        found.save(str(tmp_path / "path"))
