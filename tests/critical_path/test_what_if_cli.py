"""Test `fastcomm what-if`: what it prints, draws and refuses."""

import gzip
import json
from decimal import Decimal

import pytest
from builders import kineto_text as k
from builders.what_if_steps import EVENTS, US, found_in, invoke, two_ranks

import fastcomm
from fastcomm.critical_path import overlay
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write


@pytest.fixture
def step(tmp_path):
    return found_in(k.write(tmp_path / "rank0.json", EVENTS))


def test_a_sweep_prints_a_table_with_a_chart(tmp_path):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    page = tmp_path / "page.html"
    text = invoke(path, "--annotation", "", "--scale", "comm=0:1:0.5", "--html", page).stdout
    assert text.startswith("rank 0: 103.0 us; 75.00 us with scale comm=0\n")
    assert "before" not in text
    assert "of today" in text
    assert sorted(line.count("█") for line in text.splitlines() if "█" in line) == [17, 21, 24]
    assert "before-after" not in page.read_text("utf-8")


def test_the_command_prints_both_steps(tmp_path):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    words = [path, "--annotation", "", "--scale", "comm=0.5", "--scale", "compute=0:1:0.5"]
    text = invoke(*words).stdout
    assert "103.0 us before, 89.00 us after, 1.157 times as fast" in text
    assert "Interval: n/a, the validated steps are those of all ranks" in text
    assert "reproduces all measured times exactly" in text
    found = json.loads(invoke(*words, "--json", "--output", tmp_path / "out").stdout)
    assert found["after_ns"] == 89 * US
    assert found["sweeps"][0]["values"] == [0, 0.5, 1]
    assert found["sweeps"][0]["span_ns"] == sorted(found["sweeps"][0]["span_ns"])
    assert (tmp_path / "out" / "sweep.csv").read_text().startswith('"edit","value","span_ns"')
    assert json.loads((tmp_path / "out" / "what_if.json").read_text()) == found
    every = ["--set", "name:relu=1us", "--remove", "gaps", "--overlap", "TP"]
    every += ["--scale", "compute=0.5", "--fuse-below", "1us"]
    (tmp_path / "e.toml").write_text('remove = ["launches"]\n')
    found = json.loads(
        invoke(*words[:3], *every, "--edits", tmp_path / "e.toml", "--json").stdout
    )
    assert len(found["edits"]) == 6


def test_the_command_without_edits_prints_candidates(tmp_path):
    two_ranks(tmp_path, (30, 50), 30, (45, 20))
    page = tmp_path / "page.html"
    text = invoke(tmp_path, "--annotation", "", "--html", page).stdout
    assert text.startswith("all ranks: 135.0 us; overlap TP would save most, ")
    rows = [line.split()[:2] for line in text.splitlines()]
    assert rows[3] == ["overlap", "TP"]
    assert "What would shorten the step?" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scale", "comm"], "expected WHAT=VALUE, as in comm:DP=0.5"),
        (["--set", "comm"], "expected WHAT=VALUE, as in link:DP=800Gbit/s"),
        (["--scale", "comm=1:2"], "invalid factor '1:2'"),
        (["--scale", "comm=1:0:1"], "expected FROM:TO:STEP with 1 to 10000 values"),
        (["--scale", "comm=0:1:1e-9"], "expected FROM:TO:STEP with 1 to 10000 values"),
        (["--scale", "comm=0:1:0"], "expected FROM:TO:STEP with 1 to 10000 values"),
        (["--set", "comm=1"], "duration '1'"),
        (["--set", "comm=ideal"], "ideal times are those of fastcomm stragglers"),
        (["--set", "link:TP=fast"], "invalid bandwidth 'fast'"),
        (["--heal", "comm"], "expected rank:5, stage:2 or link:3-7"),
        (["--scale", "comm=1e18"], "'1e18': expected a number from 1e-06 to 1000000, or 0"),
        (["--scale", "comm=1e-7"], "factor '1e-7'"),
        (
            ["--set", "comm=1e300s"],
            "duration '1e300s': expected a number and a unit (ns, us, ms or s), as in 10us",
        ),
        (["--fuse-below", "1e99s"], "as in 10us, at most 1000000s"),
        (["--scale", "comm=1:1e18:1e17"], "invalid factor '1e+17'"),
    ],
)
def test_invalid_arguments_are_errors_in_one_line(tmp_path, words, said):
    path = k.write(tmp_path / "rank0.json", EVENTS)
    assert said in invoke(path, *words, code=2).stderr


def test_an_edit_without_effect_leaves_the_path_as_it_is(tmp_path):
    write(Job.of(ranks=4, steps=2, layers=2), tmp_path)
    path = fastcomm.open(tmp_path).critical_path()
    for options in ({}, {"scale": ["comm=1"]}, {"fuse_below": "1ns"}):
        found = path.what_if(**options)
        assert found.after_ns == found.before_ns
        assert found.after.summary_ns() == path.summary_ns()


def drawn(path, side):
    """The slices of one side of a drawn what-if, as (name, start, stop) in ns, sorted."""
    events = json.loads(path.read_text(), parse_float=Decimal)["traceEvents"]
    return sorted(
        (one["name"], int(one["ts"] * US), int((one["ts"] + one["dur"]) * US))
        for one in events
        if one["ph"] == "X" and one["pid"] % 2 == side
    )


def test_a_step_is_drawn_as_measured_and_as_predicted(step, tmp_path):
    answer = step.what_if(set=["kernel:gemm=10us"])
    overlay.write_what_if(answer, tmp_path / "both.json")
    begin = min(one["ts"] for one in EVENTS) * US
    assert drawn(tmp_path / "both.json", 0) == sorted(
        (one["name"], int(one["ts"] * US - begin), int((one["ts"] + one["dur"]) * US - begin))
        for one in EVENTS
    )
    # The gemm ends at 20; gaps of 2 us, the all-reduce of 28 us and the relu of 18 us follow.
    after = {name: (start, stop) for name, start, stop in drawn(tmp_path / "both.json", 1)}
    assert after["gemm"] == (10 * US, 20 * US)
    assert after["relu"] == (52 * US, 70 * US)
    assert max(stop for _, stop in after.values()) == answer.after_ns


def test_arrows_of_a_drawn_path_join_its_events(step, tmp_path):
    overlay.write_what_if(step.what_if(set=["kernel:gemm=10us"]), tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    marked = [one for one in events if one.get("args", {}).get("critical")]
    ends = [one for one in events if one["ph"] in "sf"]
    assert {one["name"] for one in marked} >= {"gemm", "relu"}
    assert ends
    for end in ends:
        assert any(
            one["pid"] == end["pid"]
            and one["tid"] == end["tid"]
            and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
            for one in marked
        )


def test_all_ranks_are_drawn(tmp_path):
    write(Job.of(2, steps=1, layers=1, micro_batches=1), tmp_path / "traces")
    target = tmp_path / "both.json.gz"
    invoke(tmp_path / "traces", "--scale", "compute=0.5", "--trace", target)
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert set(names) == {
        f"rank {rank}, {side}" for rank in (0, 1) for side in ("measured", "predicted")
    }
    lengths = {
        one["pid"] % 2: one["ts"] + one["dur"]
        for one in sorted(
            (one for one in events if one["ph"] == "X"), key=lambda one: one["ts"] + one["dur"]
        )
    }
    assert lengths[1] < lengths[0]
    # Slices of a thread are apart or nested.
    running = {}
    for one in sorted(
        (one for one in events if one["ph"] == "X"), key=lambda one: (one["ts"], -one["dur"])
    ):
        ends = running.setdefault((one["pid"], one["tid"]), [])
        while ends and ends[-1] <= one["ts"]:
            ends.pop()
        assert not ends or one["ts"] + one["dur"] <= ends[-1] + 1e-6
        ends.append(one["ts"] + one["dur"])


def test_a_host_that_launches_too_late_is_a_candidate(tmp_path):
    write(Job.of(1, steps=1, straggler=0, fault="launch_bound", slowdown=2_200), tmp_path)
    table = invoke(tmp_path).stdout
    assert "scale host=0.5" in table
    assert "remove host-gaps" in table
