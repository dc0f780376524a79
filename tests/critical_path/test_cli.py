"""Test `fastcomm critical-path`."""

import gzip
import json

import pyarrow.parquet as pq
import pytest
from builders import golden_critical_path as golden
from builders import kineto_text as k
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.compat import hta
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

EVENTS = [
    k.mark("ProfilerStep#0", 0, 100),
    k.mark("ProfilerStep#1", 100, 100),
    k.event("aten::mm", "cpu_op", 110, 20, pid=100, tid=1),
    k.launch(115, 1),
    k.kernel("gemm", 130, 60, device=0, correlation=1),
]


def invoke(*words, code=0):
    done = CliRunner().invoke(main, ["critical-path", *map(str, words)])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def trace(tmp_path):
    return k.write(tmp_path / "rank0.json", EVENTS)


def test_the_report_prints_the_path_and_its_shares(trace):
    text = invoke(trace).stdout
    assert text.startswith("step 1, rank 0: critical path of 100 us, ")
    assert "covers 100.0 % of the 100 us from first to last event" in text
    assert "device: compute" in text
    assert "aten::mm" in text


def test_json_has_the_path_and_its_shares(trace):
    found = json.loads(invoke(trace, "--json").stdout)
    assert found["window"] == {"start_ns": 100_000, "stop_ns": 200_000}
    assert found["edges"] == {
        "operator": 4,
        "dependency": 2,
        "launch": 1,
        "kernel_kernel": 0,
        "sync": 0,
        "inferred": 1,
        "unexplained": 0,
    }
    path = found["path"]
    assert (path["nodes"], path["events"], path["event_ids"]) == (6, 4, [1, 2, 3, 4])
    assert (path["length_ns"], path["wall_ns"], path["coverage"]) == (100_000, 100_000, 1)
    # The step begins 10 us before its operator, and ends 10 us after its kernel.
    assert found["summary"] == {
        "cpu_bound": 5 / 100,
        "gpu_compute_bound": 60 / 100,
        "gpu_kernel_launch_overhead": 15 / 100,
        "host_gap": 10 / 100,
        "unexplained": 10 / 100,
    }
    assert sum(found["summary"].values()) == pytest.approx(1)


@golden.each_case()
def test_compat_hta_gives_the_reference_output(case, tmp_path):
    instance = case["instance"]
    if isinstance(instance, list):
        instance = f"{instance[0]}:{instance[1]}"
    words = [golden.trace_of(case), "--compat", "hta", "--annotation", case["annotation"]]
    words += ["--instance", instance or 0] if case["annotation"] else []
    words += [f"--data-load-events={text}" for text in case["data_load_events"] or ()]
    words += ["--zero-weight-launches"] if case["zero_weight_launch_edges"] else []
    found = json.loads(invoke(*words, "--json").stdout)
    assert found["events"] == case["clipped_events"]
    assert found["nodes"] == case["nodes_in_graph"]
    names = ("OPERATOR_KERNEL", "KERNEL_LAUNCH_DELAY", "DEPENDENCY", "KERNEL_KERNEL_DELAY")
    counts = [case["edges"][name]["count"] for name in (*names, "SYNC_DEPENDENCY")]
    kinds = ("operator", "launch", "dependency", "kernel_kernel", "sync")
    assert found["edges"] == dict(zip(kinds, counts, strict=True))
    assert found["path"]["length_ns"] == case["critical"]["length_us"] * 1000
    assert found["path"]["nodes"] == case["critical"]["nodes"]
    assert len(found["path"]["event_ids"]) == case["critical"]["events"]
    percent = {name: 100 * share for name, share in found["summary"].items()}
    assert percent == pytest.approx(case["summary_percent"], abs=1e-8)


def test_the_output_directory_has_the_path_as_files(trace, tmp_path):
    overlay, saved, folder = tmp_path / "o.json.gz", tmp_path / "graph", tmp_path / "tables"
    invoke(trace, "--overlay", overlay, "--save", saved, "--output", folder)
    document = json.loads(gzip.decompress(overlay.read_bytes()))
    works = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [event["args"].get("critical") for event in works] == [None, 1, 1, 1, 1]
    assert hta.restore_cpgraph(f"{saved}.zip").length_ns == 100_000
    assert pq.read_table(folder / "critical_path.parquet").num_rows == 5
    written = json.loads((folder / "critical_path.json").read_text())
    assert written["path"]["length_ns"] == 100_000
    first = (folder / "critical_path.csv").read_text()
    assert first.startswith('"type","bound_by","start_ns"')
    invoke(trace, "--overlay", tmp_path / "all.json", "--all-edges")
    every = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert len(every) == len(EVENTS) + 2 * 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", 0, "--annotation", "x"], "--step and --annotation contradict"),
        (["--annotation", "x", "--instance", "a"], "invalid --instance 'a': expected a number"),
        (["--annotation", "nothing"], "no event's name contains 'nothing'"),
        (["--step", 7], "no step 7; the trace has 0-1"),
        (["--rank", 3], "rank 3: not in the run"),
        (["--annotation", "Step", "--instance", "2:5"], "no instance 2 of 'Step'"),
    ],
)
def test_a_missing_input_is_an_error_in_one_line(trace, words, said):
    done = invoke(trace, *words, code=2)
    assert said in done.stderr
    lines = done.stderr.splitlines()
    assert len([line for line in lines if "compiling" not in line]) == 1


def test_instances_can_be_a_number_or_a_range(trace):
    found = json.loads(
        invoke(trace, "--annotation", "ProfilerStep", "--instance", "0:1", "--json").stdout
    )
    # The first of the marks, and what is inside of both.
    assert found["events"] == 4
    whole = json.loads(invoke(trace, "--annotation", "", "--json").stdout)
    assert whole["path"]["length_ns"] == 80_000


@pytest.mark.parametrize("rules", [(), ("--compat", "hta")])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--annotation", "nothing"), "no event's name contains 'nothing'"),
        (("--annotation", "op", "--instance", "3"), "no instance 3 of 'op'"),
    ],
)
def test_a_missing_window_is_an_error_that_names_the_trace(tmp_path, rules, words, message):
    rows = [k.event("op", "cpu_op", 0, 10, pid=100, tid=1)]
    path = k.write(tmp_path / "rank0.json", rows)
    done = CliRunner().invoke(main, ["critical-path", str(path), *words, *rules])
    assert done.exit_code == 2
    assert f"Error: {path}: {message}" in done.stderr


@pytest.fixture
def two_ranks(tmp_path):
    """Traces of two ranks, of which the first cannot be read."""
    folder = tmp_path / "run"
    folder.mkdir()
    k.write(folder / "rank1.json", EVENTS, rank=1, world=2)
    cut = k.write(folder / "rank0.json", EVENTS, rank=0, world=2)
    cut.write_text(cut.read_text()[:-40])
    return folder


def test_keep_going_goes_on_to_the_next_rank_that_can_be_read(two_ranks):
    assert "rank0.json" in invoke(two_ranks, code=1).stderr
    done = invoke(two_ranks, "--keep-going", "--json", code=3)
    found = json.loads(done.stdout)
    assert found["rank"] == 1
    assert [(each["rank"], "truncated" in each["error"]) for each in found["failed"]] == [
        (0, True)
    ]
    assert "skipped: rank 0" in done.stderr
    assert "rank 1: critical path" in invoke(two_ranks, "--keep-going", code=3).stdout


def test_keep_going_with_a_single_rank_is_warned_of(two_ranks):
    done = invoke(two_ranks, "--keep-going", "--rank", 1)
    assert "warning: --keep-going changes nothing: only the rank of --rank is read" in (
        done.stderr
    )


def test_keep_going_with_no_good_rank_is_an_error(two_ranks):
    path = two_ranks / "rank1.json"
    path.write_text(path.read_text()[:-40])
    assert "truncated" in invoke(two_ranks, "--keep-going", code=1).stderr


def test_a_device_that_runs_behind_the_host_explains_gaps_on_the_path(tmp_path):
    """The work of the first step keeps the device busy while the second's path waits for it."""
    events = [
        k.mark("ProfilerStep#0", 0, 100),
        k.launch(5, 1),
        k.kernel("early", 10, 150, device=0, correlation=1),
        k.mark("ProfilerStep#1", 100, 100),
        k.launch(115, 2),
        k.kernel("late", 160, 40, device=0, correlation=2),
    ]
    path = k.write(tmp_path / "rank0.json", events)
    (note,) = [n for n in json.loads(invoke(path, "--json").stdout)["notes"] if "busy" in n]
    # From the mark at 100 to the work at 160: host time and delay, all of them busy.
    assert note.startswith("60.0 % of the path is host time, gaps and delays, but the device")
    assert "is busy for 100.0 % of the path (it runs behind the host: 60.0 % with work" in note
    assert "note: 60.0 % of the path" in invoke(path).stdout


def test_a_path_with_an_idle_device_has_no_note_on_gaps(trace):
    assert not any(
        "busy" in note for note in json.loads(invoke(trace, "--json").stdout)["notes"]
    )


def test_a_path_that_is_shorter_than_the_step_on_the_device_is_explained(tmp_path):
    """The next step's mark begins 50 us after the end of this one, which lasts until then."""
    events = [
        k.mark("ProfilerStep#0", 100, 50),
        k.launch(105, 1),
        k.kernel("gemm", 110, 30, device=0, correlation=1),
        k.mark("ProfilerStep#1", 200, 50),
        k.launch(205, 2),
        k.kernel("gemm", 210, 30, device=0, correlation=2),
    ]
    path = k.write(tmp_path / "rank0.json", events)
    notes = json.loads(invoke(path, "--step", 0, "--json").stdout)["notes"]
    (note,) = [note for note in notes if "on the device's clock" in note]
    assert note.startswith("the window is the host's step of 50.0 us, which")
    assert "lasts 50.0 us" in note
    assert note.endswith("this step takes 100 us")


def test_a_busy_device_is_reconciled_with_the_path_of_a_real_trace(kineto):
    found = json.loads(invoke(kineto / "mi300_resnet", "--json").stdout)
    (note,) = [note for note in found["notes"] if "busy" in note]
    assert note.startswith("59.2 % of the path is host time, gaps and delays")
    assert "busy for 99.6 % of the path (it runs behind the host: 40.9 %" in note
    (clocks,) = [note for note in found["notes"] if "on the device's clock" in note]
    assert clocks == (
        "the window is the host's step of 16.0 ms, which with the device work that it "
        "launched lasts 51.2 ms; on the device's clock, as in `fastcomm metrics`, this step "
        "takes 19.0 ms"
    )


def test_a_what_if_has_the_notes_of_its_path(kineto):
    words = [str(kineto / "mi300_resnet"), "--json"]
    path = json.loads(invoke(*words).stdout)
    done = CliRunner().invoke(main, ["what-if", *words, "--scale", "comm=0.5"])
    notes = json.loads(done.stdout)["notes"]
    assert notes == path["notes"]
    assert sum("busy" in note or "clock" in note for note in notes) == 2
    text = CliRunner().invoke(main, ["what-if", words[0], "--scale", "comm=0.5"]).stdout
    assert "note: 59.2 % of the path is host time" in text


@pytest.fixture
def one_unopened(two_ranks):
    """Traces of three ranks, of which the first is no JSON."""
    (two_ranks / "rank0.json").write_text("no trace")
    for rank in (1, 2):
        k.write(two_ranks / f"rank{rank}.json", EVENTS, rank=rank, world=3)
    return two_ranks


@pytest.mark.parametrize("command", [["critical-path"], ["what-if", "--scale", "compute=0.5"]])
@pytest.mark.parametrize(("rank", "words"), [(1, []), (2, ["--rank", "2"])])
def test_a_file_that_cannot_be_opened_is_listed_where_one_rank_is_read(
    one_unopened, command, rank, words
):
    bad = one_unopened / "rank0.json"
    line = [*command, str(one_unopened), *words]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 1
    assert str(bad) in done.stderr
    done = CliRunner().invoke(main, [*line, "--keep-going", "--json"])
    assert done.exit_code == 3, done.output
    found = json.loads(done.stdout)
    assert found["rank"] == rank
    assert [(each["rank"], each["path"]) for each in found["failed"]] == [(0, str(bad))]
    assert f"skipped: rank 0: {bad}: " in done.stderr
    assert "changes nothing" not in done.stderr


def test_files_that_cannot_be_opened_or_read_are_listed_together(one_unopened):
    path = one_unopened / "rank1.json"
    path.write_text(path.read_text()[:-40])
    found = json.loads(invoke(one_unopened, "--keep-going", "--json", code=3).stdout)
    assert found["rank"] == 2
    assert [each["rank"] for each in found["failed"]] == [0, 1]


def test_ranks_without_a_trace_and_foreign_files_are_named_in_warnings(one_unopened):
    (one_unopened / "rank0.json").unlink()
    (one_unopened / "config.json").write_text('{"model": "x"}')
    error = invoke(one_unopened).stderr
    assert f"warning: no traces, not read in {one_unopened}: config.json\n" in error
    assert "warning: 1 of 3 ranks has no trace here: 0\n" in error


def test_a_path_through_all_ranks_says_which_ranks_have_no_trace(tmp_path):
    write(Job.of(4, pp=2, steps=2, micro_batches=2, layers=2), tmp_path)
    words = (tmp_path,)
    done = invoke(*words)
    assert done.stdout.startswith("step 11, all ranks: critical path of ")
    assert "warning" not in done.stderr
    (third,) = tmp_path.glob("rank3.*")
    third.unlink()
    done = invoke(*words)
    assert done.stdout.startswith("step 11, 3 of 4 ranks: critical path of ")
    assert "warning: 1 of 4 ranks has no trace here: 3\n" in done.stderr
    found = json.loads(invoke(*words, "--json").stdout)
    assert (len(found["ranks"]), found["expected_ranks"]) == (3, 4)
    third.write_bytes(b"no trace")
    done = invoke(*words, "--keep-going", code=3)
    assert done.stdout.startswith("step 11, 3 of 4 ranks: critical path of ")
    assert "skipped: rank 3: " in done.stderr


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "rank 0: not readable"), (7, "rank 7: not in the run")]
)
def test_a_rank_that_cannot_be_read_is_refused_by_the_option_that_names_it(
    one_unopened, rank, words
):
    error = invoke(one_unopened, "--rank", rank, "--keep-going", code=2).stderr
    assert f"Error: {words}; its ranks: 1-2" in error


def test_the_warnings_of_the_trace_are_printed(tmp_path):
    events = [k.mark("ProfilerStep#0", 0, 100), k.event("aten::mm", "cpu_op", 1, 9)]
    path = k.write(tmp_path / "rank0.json", events)
    assert "warning: no device work" in invoke(path).stderr
