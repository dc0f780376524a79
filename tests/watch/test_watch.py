"""Test `fastcomm watch`: a line a window, what changed, and how it ends."""

import dataclasses
import json
import os
import shutil
import threading
import time

import pytest
from builders import kineto_text as k
from builders.commands import quoted
from builders.opened import open_run
from builders.profiled_windows import JOB, write_window
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.metrics import partial_files
from fastcomm.metrics.computation import compute_metrics
from fastcomm.result import json_text
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.watch import command
from fastcomm.watch.windows import ProfiledWindow, windows_below

SLOW = dataclasses.replace(JOB, straggler=2, slowdown=40)
LINKS = dataclasses.replace(JOB, link_speed=22 * 10**9)


def watch(folder, *words):
    return CliRunner().invoke(main, ["watch", str(folder), *words])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Two runs: one whose third window has a straggler, and one with slower links."""
    folder = tmp_path_factory.mktemp("jobs") / "traces"
    for step, job in ((13, JOB), (513, JOB), (1013, SLOW), (1513, JOB)):
        write_window(job, folder / "first" / f"step-{step:06d}")
    write_window(JOB, folder / "second" / "step-000013")
    write_window(LINKS, folder / "second" / "step-000513")
    (folder / "other").mkdir()
    (folder / "second" / "step-000900").mkdir()  # nothing was written yet
    (folder / "notes.txt").write_text("")
    return folder


def test_a_window_is_a_line_and_what_changed_against_the_first_ones(directory):
    result = watch(directory, "--once")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert [line.split(":")[0] for line in lines] == [
        *(f"first/step-{step:06d}" for step in (13, 513, 1013, 1513)),
        *(f"second/step-{step:06d}" for step in (13, 513)),
    ]
    assert all(": 4 ranks, " in line for line in lines)
    blocks = result.stdout.split("first/step-001013")[1].split("first/step-001513")
    assert "new: Rank 2 is a straggler" in blocks[0]
    assert "since the first windows" in blocks[0]
    healed = " ".join(blocks[1].split("second")[0].split())
    assert "new:" not in healed
    assert "gone: Rank 2 is a straggler: same work as its peers" in healed
    slower = result.stdout.split("second/step-000513")[1]
    assert "slower: TP transfers of 2 of 2 groups, the slowest of ranks 0-1 reach" in slower
    assert "longer: exposed" in slower
    assert "straggler" not in slower


def lines_of(folder, *jobs):
    """The changes that `fastcomm watch` prints for each window of a run, as one text each."""
    for number, job in enumerate(jobs):
        write_window(job, folder / "run" / f"step-{100 * number + 13:06d}")
    blocks = watch(folder, "--once").stdout.split("run/step-")[1:]
    return [" ".join(block.split()) for block in blocks]


def test_a_cause_that_comes_and_goes_is_gone_once_also_in_later_windows(tmp_path):
    *_, new, still, gone, later = lines_of(tmp_path, JOB, JOB, JOB, SLOW, SLOW, JOB, JOB)
    assert "new: Rank 2 is a straggler" in new
    assert "gone:" not in still
    assert gone.count("gone: Rank 2 is a straggler") == 1
    assert "gone:" not in later


def test_a_cause_of_the_first_windows_is_gone_once_each_time_it_goes(tmp_path):
    jobs = (SLOW, SLOW, SLOW, JOB, JOB, JOB, SLOW, JOB)
    *_, first, second, third, back, again = lines_of(tmp_path, *jobs)
    assert first.count("gone: Rank 2 is a straggler") == 1
    assert "gone:" not in second + third + back
    assert again.count("gone: Rank 2 is a straggler") == 1


def test_ranks_of_which_only_the_trace_is_there_count_as_in_metrics(tmp_path):
    run = tmp_path / "run"
    write(JOB, run / "step-000513")
    write_window(JOB, run / "step-001013", ranks=(0, 2))
    write(JOB, run / "step-001013")
    for folder in run.iterdir():
        own = ProfiledWindow.of(folder).metrics()
        assert json_text(own) == json_text(compute_metrics(open_run(folder)))
    lines = watch(tmp_path, "--once")
    assert (lines.exit_code, lines.stdout.count(": 4 ranks, ")) == (0, 2), lines.output
    waited = watch(tmp_path, "--idle", "0.2", "--patience", "0")
    assert waited.stdout == lines.stdout


def test_a_window_without_a_whole_step_is_a_warning(tmp_path):
    one = Job.of(ranks=2, steps=1, layers=1)
    write(one, tmp_path / "run" / "step-000010")  # in which the profiler was stopped
    result = watch(tmp_path, "--once")
    assert (result.exit_code, result.stdout) == (3, "")
    text = " ".join(result.stderr.split())
    assert "no rank was measured: no trace has a whole step" in text


def test_a_trace_that_cannot_be_read_is_a_skipped_rank(tmp_path):
    window = write_window(JOB, tmp_path / "run" / "step-000513", ranks=(0, 1, 2))
    (window.folder / "rank3.host.json").write_text("damaged")
    result = watch(tmp_path, "--once")
    assert result.exit_code == 3
    assert "3 of 4 ranks" in result.stdout
    assert "rank 3: " in result.stderr


def test_a_slower_link_of_the_only_group_is_named_with_its_rates(tmp_path):
    alone = dataclasses.replace(JOB, tp=1, pp=1, dp=4, ep=1)
    slow = dataclasses.replace(alone, link_speed=alone.link_speed // 2)
    more = dataclasses.replace(alone, bucket=3 * alone.bucket)
    late = dataclasses.replace(alone, straggler=2, slowdown=60)
    _, slower, more_bytes, straggler = lines_of(tmp_path, alone, slow, more, late)
    assert "slower: DP transfers of ranks 0-3 reach 2" in slower
    assert "GB/s, in the first windows 4" in slower
    assert "longer: exposed DP" in more_bytes
    assert "slower:" not in more_bytes  # as many bytes a second as before
    assert "slower:" not in straggler


def test_a_link_that_is_slower_than_its_peers_is_a_cause_and_no_other_line(tmp_path):
    grid = dataclasses.replace(JOB, ranks=8, tp=2, pp=1, dp=4, ep=1, fault="slow_link")
    slow = dataclasses.replace(grid, straggler=3, slowdown=300)
    _, block = lines_of(tmp_path, grid, slow)
    assert "new: A link among ranks" in block
    assert "slower:" not in block


def test_a_window_waits_for_an_earlier_one_so_that_a_new_watch_prints_the_same(tmp_path):
    first = write_window(JOB, tmp_path / "run" / "step-000013", ranks=(0, 1))
    write_window(SLOW, tmp_path / "run" / "step-000513", ranks=(0, 1))
    write_window(JOB, tmp_path / "run2" / "step-000013")
    arrival = time.time() + 3
    for path in first.measured.values():
        os.utime(path, (arrival, arrival))
    lines = [
        watch(tmp_path, *words).stdout.splitlines()
        for words in (("--patience", "0", "--idle", "4"), ("--once",))
    ]
    names = [line.split(":")[0] for line in lines[0] if line.startswith("run")]
    assert sorted(names) == ["run/step-000013", "run/step-000513", "run2/step-000013"]
    assert names.index("run/step-000013") < names.index("run/step-000513")
    assert sorted(lines[0]) == sorted(lines[1])


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("iteration.mean_ns > +5%", 4),
        ("iteration.mean_ns > +5000%", 0),
        ("breakdown.exact.idle > 99%", 0),
    ],
)
def test_a_condition_that_holds_is_an_exit_code(directory, condition, code):
    result = watch(directory, "--once", "--fail-if", condition)
    assert result.exit_code == code, result.output
    assert ("FAIL iteration.mean_ns > +5%" in result.output) == (code == 4)


def test_a_condition_that_holds_in_an_incomplete_window_is_its_exit_code(tmp_path):
    write_window(JOB, tmp_path / "run" / "step-000013")
    write_window(SLOW, tmp_path / "run" / "step-000513", ranks=(0, 1, 2))
    result = watch(tmp_path / "run", "--once", "--fail-if", "iteration.mean_ns > +5%")
    assert result.exit_code == 4, result.output


def test_of_windows_of_two_runs_that_is_newer_whose_first_rank_came_later(tmp_path):
    late, early = (
        write_window(JOB, tmp_path / run / "step-000013", ranks=(0, 1)) for run in "ab"
    )
    for window, times in ((late, (20, 20)), (early, (10, 30))):
        for path, moment in zip(window.measured.values(), times, strict=True):
            os.utime(path, (moment, moment))
    late, early = (ProfiledWindow.of(window.folder) for window in (late, early))
    assert late.is_newer_than(early)
    assert not early.is_newer_than(late)


def test_an_invalid_condition_is_wrong_usage(directory):
    result = watch(directory, "--once", "--fail-if", "step_time > +5%")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no metric" in result.output


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("iteration.mean", "did you mean iteration.mean_ns"),
        ("bandwidth.XP.avg_bw", "did you mean bandwidth."),
        ("zzz", "expected a name such as iteration.mean_ns or breakdown.exact.idle"),
    ],
)
def test_a_condition_on_no_metric_is_wrong_usage_before_the_first_window(tmp_path, name, hint):
    result = watch(tmp_path / "absent", "--idle", "100", "--fail-if", f"{name} > +5%")
    assert (result.exit_code, result.stdout) == (2, "")
    text = " ".join(result.stderr.split())
    assert f"'{name}' is no metric; " in text
    assert hint in text


def test_the_numbers_of_the_newest_window_are_written_for_prometheus(directory, tmp_path):
    path = tmp_path / "job.prom"
    assert watch(directory / "first", "--once", "--prometheus", str(path)).exit_code == 0
    assert 'fastcomm_window_steps{run="first"} 1513.0' in path.read_text()


def test_a_window_without_some_ranks_is_incomplete(tmp_path):
    window = write_window(JOB, tmp_path / "run" / "step-000013", ranks=(0, 1))
    window.note_failure(3, "window: PyTorch wrote 5 bytes")
    result = watch(tmp_path / "run", "--once")
    assert result.exit_code == 3, result.output
    assert "run/step-000013: 2 of 4 ranks" in result.stdout


def test_a_window_in_which_every_rank_failed_is_a_warning(tmp_path):
    window = ProfiledWindow.of(tmp_path / "run" / "step-000013")
    window.note_failure(0, "PyTorch wrote no file; is the disk full?")
    result = watch(tmp_path, "--once")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no rank was measured: PyTorch wrote no file" in " ".join(result.stderr.split())
    assert watch(tmp_path, "--idle", "0.1", "--patience", "0").exit_code == 3


def test_a_damaged_window_is_a_warning_and_the_others_count(tmp_path):
    window = write_window(JOB, tmp_path / "run" / "step-000013", ranks=(0,))
    window.place_of(0).write_bytes(b"damaged")
    write_window(JOB, tmp_path / "run" / "step-000513")
    result = watch(tmp_path, "--once")
    assert result.exit_code == 3
    assert "step-000013: not measured" in " ".join(result.stderr.split())
    assert "run/step-000513: 4 ranks" in result.stdout


def test_watching_reports_windows_as_they_arrive_and_ends_when_idle(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_POLL_S", 0.05)
    write_window(JOB, tmp_path / "run" / "step-000013")
    ready = write_window(SLOW, tmp_path / "ready" / "run" / "step-000513")
    half = ProfiledWindow.of(tmp_path / "run" / "step-000513")

    def arrive():
        for rank, path in ready.measured.items():
            time.sleep(0.5)
            path.replace(half.place_of(rank))

    writer = threading.Thread(target=arrive)
    writer.start()
    result = watch(tmp_path, "--idle", "6")
    writer.join()
    assert result.exit_code == 0, result.output
    assert "run/step-000513: 4 ranks" in result.stdout
    assert "Rank 2 is a straggler" in result.stdout
    assert half.is_whole(4)


def test_other_ranks_are_waited_for_no_longer_than_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_POLL_S", 0.05)
    write_window(JOB, tmp_path / "run" / "step-000013", ranks=(0,))
    result = watch(tmp_path, "--idle", "0.5", "--patience", "0.2")
    assert result.exit_code == 3, result.output
    assert "1 of 4 ranks" in result.stdout
    waiting = watch(tmp_path, "--idle", "0.2")
    assert (waiting.stdout, waiting.exit_code) == ("", 3)
    text = " ".join(waiting.stderr.split())
    assert "step-000013: not reported, as ranks are not measured; `fastcomm watch" in text
    assert "--once` reports it" in text


def test_watching_ends_at_the_first_window_for_which_a_condition_holds(directory):
    result = watch(directory / "first", "--fail-if", "iteration.mean_ns > +5%")
    assert result.exit_code == 4, result.output
    assert "step-001013" in result.stdout
    assert "step-001513" not in result.stdout


def test_metrics_measure_a_window_whose_traces_were_not_kept(directory):
    window = directory / "first" / "step-001013"
    result = CliRunner().invoke(main, ["metrics", str(window)])
    assert result.exit_code == 0, result.output
    assert "Rank 2 is a straggler" in result.stdout
    for words in (["--tp", "2"], ["--flops"], ["--steps", "1"], ["--bytes", "bus"]):
        refused = CliRunner().invoke(main, ["metrics", str(window), *words])
        assert refused.exit_code == 2
        assert f"{words[0]}: no effect" in refused.stderr


def test_a_window_whose_traces_were_not_kept_is_a_baseline_of_others(tmp_path):
    before, after = (tmp_path / "run" / f"step-{step:06d}" for step in (999, 1999))
    write_window(JOB, before)
    write_window(SLOW, after)
    for words in (["baseline", "save", "first", str(before)],
                  ["metrics", str(after), "--baseline", "first"]):  # fmt: skip
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output
    assert "New: Rank 2 is a straggler" in result.stdout


def test_metrics_measure_ranks_without_traces_beside_those_with_traces(tmp_path):
    window = write_window(JOB, tmp_path / "run" / "step-000999", ranks=(0, 1, 3))
    traces = tmp_path / "traces of run step-000999"
    (trace,) = (source.path for source in open_run(traces).sources if source.rank == 2)
    trace.rename(window.folder / "rank2.host1.json.gz")
    result = CliRunner().invoke(main, ["metrics", str(window.folder), "--json"])
    assert json.loads(result.stdout)["ranks"] == [0, 1, 2, 3]
    assert (result.exit_code, "no trace here" in result.output) == (0, False)
    refused = CliRunner().invoke(main, ["metrics", str(window.folder), "--tp", "2"])
    assert "--tp: no effect on ranks 0-1, 3 of" in " ".join(refused.stderr.split())
    for rank in (0, 1, 3):
        window.place_of(rank).unlink()
    window.note_failure(3, "disk full")
    # Its only trace is read, as that of any run.
    measured = CliRunner().invoke(main, ["metrics", str(window.folder), "--tp", "2", "--json"])
    assert json.loads(measured.stdout)["ranks"] == [2], measured.output


def test_a_directory_that_is_a_window_is_watched_alone(directory):
    result = watch(directory / "first" / "step-000513", "--once")
    assert result.stdout.startswith("first/step-000513: 4 ranks")
    assert ProfiledWindow.of(directory) is None
    names = {window.folder.name for window in windows_below(directory / "second")}
    assert names == {"step-000013", "step-000513"}


def test_commands_that_need_traces_say_what_a_window_without_them_has(directory):
    window = directory / "first" / "step-000013"
    for name in ("kernels", "report", "info"):
        error = CliRunner().invoke(main, [name, str(window)]).stderr
        assert "partial results of a profiled window, without its traces" in error


@pytest.mark.parametrize("name", ["metrics", "report", "sql", "info"])
@pytest.mark.parametrize("has_traces", [True, False])
def test_several_windows_are_an_error_that_names_a_command_that_works(
    tmp_path, name, has_traces
):
    first, last = (tmp_path / "run" / f"step-{step:06d}" for step in (13, 1000013))
    for folder in (first, last):
        write_window(JOB, folder)
        shutil.rmtree(tmp_path / f"traces of run {folder.name}")
        (folder / "report.html").write_text("")
        if has_traces:
            write(JOB, folder)
    for directory in (tmp_path, tmp_path / "run"):
        result = CliRunner().invoke(main, [name, str(directory)])
        text = result.stderr.removeprefix(f"Error: {directory}: ").rstrip("\n")
        assert (result.exit_code, text.count("\n")) == (1, 0), result.output
        assert text.startswith(f"2 profiled windows, from {first} to {last}. Pass one")
        one, every = quoted(last), quoted(directory)
        assert f"`fastcomm metrics {one}`, or all with `fastcomm watch {every}`" in text
        assert ("Other commands need traces" in text) != has_traces
    assert CliRunner().invoke(main, ["metrics", str(last)]).exit_code == 0


def test_once_without_a_window_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "no profiled window"), ("absent", "No such file")):
        result = watch(tmp_path / name, "--once")
        assert result.exit_code == 1
        assert message in result.stderr


def test_a_directory_may_come_later(tmp_path):
    assert watch(tmp_path / "absent", "--idle", "0.01").exit_code == 0


def test_a_file_that_no_node_exporter_reads_is_refused(directory, tmp_path):
    result = watch(directory, "--once", "--prometheus", str(tmp_path / "job.txt"))
    assert result.exit_code == 2
    assert "must end in .prom" in result.stderr


def loading_window(folder, step, pause):
    """A window of two ranks whose devices wait `pause` us a step for the data loader."""
    window = ProfiledWindow.of(folder / "run" / f"step-{step:06d}")
    for rank in range(2):
        events = []
        for number in range(4):
            at = number * (10_000 + pause)
            events.append(k.mark(f"ProfilerStep#{number}", at, 10_000 + pause))
            name = "enumerate(DataLoader)#_Iter.__next__"
            events.append(k.event(name, "user_annotation", at, pause, pid=100, tid=1))
            events.append(k.launch(at + pause + 10, 2 * number + 1, 5))
            events.append(k.kernel("gemm", at + pause + 20, 8900, correlation=2 * number + 1))
            group = {"Process_Group_Ranks": "[0, 1]", "Group_size": 2}
            events.append(k.all_reduce(at + pause + 8930, 1060, 20, Seq=number, **group))
        trace = folder.parent / f"traces-{step}" / f"rank{rank}.json"
        trace.parent.mkdir(exist_ok=True)
        k.write(trace, events, rank=rank, world=2)
        (source,) = open_run(trace).sources
        partials = partial_files.RankPartials.of(source.read("metrics"))
        partial_files.write(partials, window.place_of(rank))


def test_idle_time_of_a_known_cause_comes_and_goes_like_other_causes(tmp_path):
    for number, pause in enumerate((100, 100, 100, 4000, 4100, 100)):
        loading_window(tmp_path / "jobs", 13 + 500 * number, pause)
    out = watch(tmp_path / "jobs", "--once").stdout
    blocks = [" ".join(block.split()) for block in out.split("run/step-")[1:]]
    named = "The device waits 4.00 ms per step (28.6 % of the step) for the data loader"
    assert f"new: {named}" in blocks[3]
    assert "new: The device waits 4.10 ms" in blocks[4]
    assert "gone: The device waits" in blocks[5]
    assert not any("data loader" in block for block in blocks[:3])


def test_idle_time_of_a_known_cause_is_named_for_the_first_window(tmp_path):
    loading_window(tmp_path / "jobs", 13, 4000)
    assert "for the data loader" in " ".join(watch(tmp_path / "jobs", "--once").stdout.split())


def test_an_older_window_never_replaces_the_numbers_of_a_newer_one(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_POLL_S", 0.05)
    path, jobs = tmp_path / "job.prom", tmp_path / "jobs"
    write_window(JOB, jobs / "run" / "step-002013")
    late = write_window(SLOW, tmp_path / "late" / "run" / "step-001513")

    def arrive():
        until = time.monotonic() + 60
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.05)
        late.folder.rename(jobs / "run" / "step-001513")

    writer = threading.Thread(target=arrive)
    writer.start()
    result = watch(jobs, "--idle", "4", "--prometheus", str(path))
    writer.join()
    assert result.stdout.index("step-002013") < result.stdout.index("step-001513")
    assert 'fastcomm_window_steps{run="run"} 2013.0' in path.read_text()
    write_window(JOB, jobs / "a newer run" / "step-000013")
    assert watch(jobs, "--once", "--prometheus", str(path)).exit_code == 0
    assert 'fastcomm_window_steps{run="a newer run"} 13.0' in path.read_text()


def test_a_damaged_rank_of_a_window_is_named(tmp_path):
    window = write_window(JOB, tmp_path / "run" / "step-000013")
    whole = window.place_of(3).read_bytes()
    window.place_of(3).write_bytes(whole[: len(whole) // 2])
    result = watch(tmp_path, "--once")
    assert result.exit_code == 3
    assert "3 of 4 ranks" in result.stdout
    text = " ".join(result.stderr.split())
    assert "rank 3: " in text
    assert "rank3.arrow: damaged" in text


def test_windows_of_another_number_of_ranks_are_compared_among_themselves(tmp_path):
    half = dataclasses.replace(JOB, ranks=2, dp=1, ep=1)
    *_, two, again, four = lines_of(tmp_path, JOB, JOB, half, half, JOB)
    assert "2 ranks" in two
    assert "note: the job has 2 ranks, in earlier windows 4: it is compared" in two
    assert "since the first windows" not in two
    assert "(+0.0 % since the first windows)" in again
    assert "(+0.0 % since the first windows)" in four
    assert "longer:" not in two + again + four
    assert "note:" not in again + four


@pytest.mark.parametrize(("slowdown", "is_named"), [(4, False), (40, True)])
def test_a_cause_that_costs_as_little_as_ranks_differ_is_not_named(
    tmp_path, slowdown, is_named
):
    late = dataclasses.replace(JOB, straggler=2, slowdown=slowdown)
    first, *_ = lines_of(tmp_path / "first", late)
    *_, later = lines_of(tmp_path / "later", JOB, JOB, late)
    assert ("Rank 2 is a straggler" in first) == is_named
    assert ("new: Rank 2 is a straggler" in later) == is_named
