"""Test steps on the device clock, also in truncated traces."""

import gzip
import json
import random
import re

import numpy as np
import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.iteration_traces import STEPS, WORK
from builders.opened import open_run
from builders.places import RECORDED

import fastcomm
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.config import Config
from fastcomm.formats.kineto import reader
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.trace.iterations import IterationRule


def device_iterations(tmp_path, events, clock="auto", **options):
    path = k.write(tmp_path / "rank0.json", events)
    rule = IterationRule(clock=clock)
    trace = reader.read(path, TraceOptions(iterations=rule, **options))
    table = trace.device_iterations
    rows = table and [(r["number"], r["start"], r["stop"]) for r in table.to_pylist()]
    return rows, trace


@pytest.mark.parametrize("clock", ["auto", "device"])
def test_on_the_device_clock_a_step_lasts_to_the_end_of_its_work(tmp_path, clock):
    events = [
        *STEPS,
        *(k.launch(1, 11), k.kernel("late", 30, 5, correlation=11)),
        *(k.launch(9, 12), k.kernel("later", 35, 5, correlation=12)),
        *(k.launch(12, 13), k.kernel("next", 41, 5, correlation=13)),
        *(k.launch(14, 14), k.kernel("last", 46, 9, correlation=14)),
    ]
    rows, trace = device_iterations(tmp_path, events, clock)
    assert rows == [(1, 0, 40_000), (2, 40_000, 55_000)]
    # Graphs of host and device events need the marks themselves.
    assert trace.iterations["start"].to_pylist() == [0, 10_000]
    assert trace.meta.found_by == "ProfilerStep#N"


@pytest.mark.parametrize("clock", ["auto", "device"])
def test_kernels_of_a_graph_belong_to_the_step_of_the_graphs_launch(tmp_path, clock):
    replayed = [k.kernel(f"node{n}", 30 + 3 * n, 2, correlation=7) for n in range(3)]
    graph = k.event("cudaGraphLaunch", "cuda_runtime", 12, 1, pid=100, tid=1, correlation=7)
    events = [*STEPS, k.launch(1, 5), k.kernel("gemm", 20, 5, correlation=5), graph, *replayed]
    rows, _ = device_iterations(tmp_path, events, clock)
    assert rows == [(1, 0, 25_000), (2, 25_000, 38_000)]


def test_a_step_without_device_work_among_others_is_idle(tmp_path):
    events = [
        *(k.mark(f"ProfilerStep#{n}", 10 * n, 10) for n in range(3)),
        *(k.launch(1, 11), k.kernel("first", 5, 10, correlation=11)),
        *(k.launch(21, 12), k.kernel("last", 50, 5, correlation=12)),
    ]
    rows, trace = device_iterations(tmp_path, events)
    assert rows == [(0, 0, 15_000), (1, 15_000, 20_000), (2, 20_000, 55_000)]
    assert trace.device_notes == ()


def test_a_step_during_which_the_device_works_for_others_counts_in_means(tmp_path):
    events = [
        *(k.mark(f"ProfilerStep#{n}", 10 * n, 10) for n in range(3)),
        *(k.launch(1, 11), k.kernel("long", 1, 25, correlation=11)),
        *(k.launch(11, 12), k.kernel("late", 26, 10, correlation=12)),
        *(k.launch(21, 13), k.kernel("copy", 22, 1, stream=9, correlation=13)),
    ]
    rows, trace = device_iterations(tmp_path, events)
    assert rows == [(0, 0, 26_000), (1, 26_000, 26_000), (2, 26_000, 36_000)]
    assert trace.device_notes[0].startswith("1 of 3 iterations have no time of their own")
    found = compute_metrics(open_run(tmp_path / "rank0.json")).to_dict()
    assert (found["iterations"], found["iteration"]["mean_ns"]) == (3, 12_000)
    assert found["breakdown"]["exact"]["compute"] == 35 / 36


def host_call(ts, name="cudaStreamSynchronize", dur=1):
    return k.event(name, "cuda_runtime", ts, dur, pid=100, tid=1, correlation=int(ts) + 500)


def steps_of_ten(*with_work, more=()):
    """Five steps of 10, some of which launch a kernel of 4, and wait for it."""
    events = [k.mark(f"ProfilerStep#{n}", 10 * n, 10) for n in range(5)]
    for n in with_work:
        at = 10 * n
        events += [k.launch(at + 5, n + 1), k.kernel("gemm", at + 6, 4, correlation=n + 1)]
    return [*events, *more]


@pytest.mark.parametrize("idle", [[0], [4], [0, 1], [0, 3, 4]])
@pytest.mark.parametrize("recorded", ["call", "range", "nothing"])
def test_first_and_last_steps_in_which_the_host_only_waits_count(tmp_path, idle, recorded):
    inside = [
        host_call(10 * n + 2) if recorded == "call" else k.mark("loading", 10 * n + 2, 5)
        for n in idle
        if recorded != "nothing"
    ]
    events = steps_of_ten(*({*range(5)} - {*idle}), more=inside)
    rows, trace = device_iterations(tmp_path, events)
    assert rows == [(n, 10_000 * n, 10_000 * (n + 1)) for n in range(5)]
    assert trace.device_notes == ()
    found = compute_metrics(open_run(tmp_path / "rank0.json")).to_dict()
    assert found["breakdown"]["exact"]["compute"] == (5 - len(idle)) * 4 / 50


@pytest.mark.parametrize(
    "more",
    [
        [k.event("aten::mm", "cpu_op", 41, 25)],  # calls may not be recorded any more
        [k.launch(41, 99), host_call(45)],  # whose work may be lost
        [k.event("cudaMemcpyAsync", "cuda_runtime", 41, 1, pid=100, tid=1, correlation=99)],
    ],
)
def test_a_last_step_whose_work_may_be_lost_is_left_out(tmp_path, more):
    rows, trace = device_iterations(tmp_path, steps_of_ten(0, 1, 2, 3, more=more))
    assert [number for number, *_ in rows] == [0, 1, 2, 3]
    (warning,) = [
        note for note in (*trace.device_notes, *trace.meta.warnings) if "left" in note
    ]
    assert re.search("left out: 4|iteration 4 is left out", warning)


def test_a_mark_in_which_the_host_waits_for_all_work_is_no_step(tmp_path):
    """The host runs ahead, and waits for the device when the loop is over."""
    events = [k.mark(f"ProfilerStep#{n}", 10 * n, 10) for n in range(4)]
    events += [k.mark("ProfilerStep#4", 40, 10.04), host_call(40, dur=10)]
    for n in range(4):
        own = k.kernel("gemm", 10 + 10 * n, 10, correlation=n + 1)
        events += [k.launch(10 * n + 1, n + 1), own]
    rows, trace = device_iterations(tmp_path, events)
    later = [(n, 10_000 * (n + 1), 10_000 * (n + 2)) for n in (1, 2, 3)]
    assert rows == [(0, 0, 20_000), *later]
    assert trace.device_notes == ("iterations without device work are left out: 4",)


@pytest.mark.parametrize(("took", "wanted"), [(3, ["60.0 %"]), (0, [])])
def test_work_of_an_earlier_launch_in_the_first_step_is_reported(tmp_path, took, wanted):
    events = [
        *STEPS,
        *(k.launch(1, 11), k.kernel("copy", 5, 2, correlation=11)),
        *(k.launch(12, 12), k.kernel("next", 40, 10, correlation=12)),
        k.kernel("queued", 8, took, correlation=99),
    ]
    rows, trace = device_iterations(tmp_path, events)
    assert rows == [(1, 0, 10_000), (2, 10_000, 50_000)]
    begin = "iteration 1: "
    found = [note for note in trace.device_notes if "launch (1 device event)" in note]
    assert [note.removeprefix(begin).partition(" of ")[0] for note in found] == wanted


def test_a_step_behind_all_device_work_is_left_out_on_the_device_clock(tmp_path):
    events = [*STEPS, k.launch(1, 11), k.kernel("late", 30, 5, correlation=11)]
    rows, trace = device_iterations(tmp_path, events)
    assert rows == [(1, 0, 35_000)]
    assert trace.device_notes == ("iterations without device work are left out: 2",)
    assert trace.meta.warnings == ("no communication on the device",)


def test_the_device_clock_of_a_run_on_the_host_is_an_error():
    run = fastcomm.open(RECORDED / "gloo_2x2", step_boundary="device")
    with pytest.raises(FastcommError, match="a run on the host has no work of a device"):
        run.metrics()


def test_the_device_clock_without_launches_is_an_error(tmp_path):
    with pytest.raises(
        TraceFileError, match="--step-boundary device: no recorded launch of device work"
    ):
        device_iterations(tmp_path, [*WORK, k.mark("ProfilerStep#1", 0, 10)], "device")


def test_without_launches_iterations_use_the_host_clock_with_a_warning(tmp_path):
    rows, trace = device_iterations(tmp_path, [*WORK, k.mark("ProfilerStep#1", 0, 10)])
    assert rows is None
    assert trace.device_notes[0].startswith("no launch of device work is recorded: iterations")


def test_with_few_launches_iterations_use_the_host_clock_with_a_warning(tmp_path):
    kernels = [k.kernel("gemm", 12 + n, 1) for n in range(3)]
    events = [*STEPS, k.launch(1, 11), k.kernel("known", 10, 1, correlation=11), *kernels]
    rows, trace = device_iterations(tmp_path, events)
    assert rows is None
    assert trace.device_notes[0].startswith("only 1 of 4 device events have a recorded launch")


def test_work_from_before_the_recording_does_not_count_as_without_launch(tmp_path):
    before = [k.kernel("warm-up", n, 1) for n in range(5)]
    events = [*STEPS, k.launch(1, 11), k.kernel("known", 10, 1, correlation=11), *before]
    assert device_iterations(tmp_path, events)[0][0] == (1, 5000, 11_000)


def test_a_whole_trace_lasts_on_the_device_clock_from_its_first_to_its_last_work(tmp_path):
    events = [
        k.kernel("before", 3, 1),
        *(k.launch(1, 11), k.kernel("known", 10, 30, correlation=11)),
        k.event("aten::mm", "user_annotation", 0, 90, pid=100, tid=1),
    ]
    assert device_iterations(tmp_path, events)[0] == [(0, 3000, 40_000)]


def test_windows_between_collectives_are_the_same_on_either_clock(tmp_path):
    comm = []
    for step in range(3):
        at = 100 * step
        comm += [k.launch(at, 2 * step), k.launch(at + 1, 2 * step + 1)]
        comm += [k.all_reduce(at + 50, 1, correlation=2 * step)]
        comm += [k.all_reduce(at + 60, 1, nelems=7, correlation=2 * step + 1)]
    rows, trace = device_iterations(tmp_path, comm)
    assert trace.meta.found_by == "period of the collectives"
    assert rows == [(r["number"], r["start"], r["stop"]) for r in trace.iterations.to_pylist()]


def cut(tmp_path, events, end):
    """A trace whose file ends inside an event."""
    path = k.write(tmp_path / "rank0.json", events)
    text = path.read_text()
    path.write_text(text[: text.index(end)])
    return path


MARKS = [k.mark(f"ProfilerStep#{n}", 10 * n, 10) for n in range(4)]


def read_cut(tmp_path, events, end, clock="auto"):
    rule = IterationRule(clock=clock)
    path = cut(tmp_path, events, end)
    return reader.read(path, TraceOptions(allow_truncated=True, iterations=rule))


def in_order(rows):
    return sorted(rows, key=lambda row: row["ts"])


@pytest.mark.parametrize("is_launched", [True, False])
def test_steps_without_device_work_at_a_cut_end_are_left_out_and_reported(
    tmp_path, is_launched
):
    whole = [0, 1]
    launches = [k.launch(10 * n + 1, n + 1) for n in range(4)]
    kernels = [k.kernel(f"step{n}", 10 * n + 5, 4, correlation=n + 1) for n in range(4)]
    rows = in_order([*MARKS, *(launches if is_launched else ()), *kernels])
    trace = read_cut(tmp_path, rows, "step3")
    assert trace.iterations["number"].to_pylist() == whole
    assert "iterations 2-3 are left out (2 of 4): the trace is truncated before the end" in str(
        trace.meta.warnings
    )
    if is_launched:
        assert trace.device_iterations["number"].to_pylist() == whole
        assert trace.device_notes == ()


def paired(events=4):
    """Four steps of some kernels, in order of time."""
    rows = list(MARKS)
    for step in range(4):
        for n in range(events):
            number = events * step + n + 1
            rows.append(k.launch(10 * step + 1 + n, number))
            rows.append(k.kernel(f"{step}.{n}.", 10 * step + 9 + n, 1, correlation=number))
    return in_order(rows)


@pytest.mark.parametrize("clock", ["auto", "host", "device"])
@pytest.mark.parametrize(
    # Where step 1 ends is known by the first work of step 2.
    ("end", "whole"),
    [("2.0.", [0]), ("2.1.", [0, 1]), ("2.3.", [0, 1]), ("3.3.", [0, 1, 2]), ("0.2.", [])],
)
def test_the_step_that_contains_the_cut_is_left_out_and_reported(tmp_path, end, whole, clock):
    trace = read_cut(tmp_path, paired(), f'"{end}', clock)
    assert trace.iterations["number"].to_pylist() == whole
    if clock != "host":
        assert trace.device_iterations["number"].to_pylist() == whole
    # Marks behind the cut are not known.
    first, out, known = re.search(
        r"iterations? (\d)[-\d]* (?:is|are) left out \((\d) of (\d)\): the trace is truncated",
        str(trace.meta.warnings),
    ).groups()
    assert (int(first), int(known) - int(out)) == (len(whole), len(whole))


def rows_of(trace):
    """The windows and the device work of each iteration."""
    events = trace.events.filter(trace.events["correlation"].is_valid()).to_pydict()
    start, stop = np.array(events["start"]), np.array(events["stop"])
    kind = np.array(events["kind"])
    windows = trace.iterations if trace.device_iterations is None else trace.device_iterations
    found = {}
    for row in windows.to_pylist():
        first, last = row["start"], row["stop"]
        length = np.minimum(stop, last) - np.maximum(start, first)
        work = [int(length[(length > 0) & (kind == which)].sum()) for which in range(3)]
        found[row["number"]] = (first, last, *work)
    return found


def check_cuts(folder, rows, places):
    """Compare the iterations that remain at each cut with those of the whole trace."""
    path = k.write(folder / "rank0.json", rows)
    whole, text = rows_of(reader.read(path, TraceOptions())), path.read_bytes()
    begin = text.index(b'"traceEvents"') + 20
    most = 0
    for place in places:
        path.write_bytes(text[: begin + int(place * (len(text) - begin - 20))])
        try:
            trace = reader.read(path, TraceOptions(allow_truncated=True))
        except TraceFileError as error:
            if "no device work, launch or annotation" not in str(error):
                raise
            continue
        found = rows_of(trace)
        assert found == {number: whole[number] for number in found}, place
        assert set(trace.iterations["number"].to_pylist()) == set(found)
        most = max(most, len(found))
    return most


def by_activity(rows):
    """The rows as profilers write them: marks, then launches and work in some order."""
    marks = [row for row in rows if row["cat"] == "user_annotation"]
    return marks + [row for row in rows if row["cat"] != "user_annotation"]


def buffered(rows):
    """The rows by activity, the later half of the launches and their work first."""
    rest = by_activity(rows)[4:]
    return MARKS + rest[len(rest) // 2 :] + rest[: len(rest) // 2]


def test_complete_steps_of_a_truncated_trace_equal_the_whole_trace(tmp_path):
    places = [n / 40 for n in range(40)]
    assert check_cuts(tmp_path, paired(), places) == 3
    assert check_cuts(tmp_path, by_activity(paired()), places) == 0
    assert check_cuts(tmp_path, buffered(paired()), places) == 0
    for seed in range(3):
        rows = random.Random(seed).sample(paired(), k=len(paired()))
        assert check_cuts(tmp_path, rows, places) == 0


def test_complete_steps_of_a_truncated_real_trace_are_unchanged(tmp_path, request):
    path = request.getfixturevalue("kineto") / "sampled_2of128/rank-0.json.gz"
    rows = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    rows = [row for row in rows if row["ph"] == "X"]
    places = [n / 16 for n in range(16)]
    assert check_cuts(tmp_path, rows, places) == 0
    assert check_cuts(tmp_path, in_order(rows), places) == 1


@pytest.mark.parametrize("end", ["1.2.", "0.0."])
def test_work_not_ordered_by_time_leaves_no_step_with_a_warning(tmp_path, end):
    warnings = str(read_cut(tmp_path, by_activity(paired()), f'"{end}').meta.warnings)
    assert "iterations 0-3 are left out (4 of 4)" in warnings
    assert ("not in order of time" if end == "1.2." else "before any device work") in warnings


@pytest.mark.parametrize("rows", [paired()[1:][:12], [k.all_reduce(n, 1) for n in range(9)]])
def test_a_cut_trace_without_marks_has_no_iteration(tmp_path, rows):
    rows = [row for row in rows if row["cat"] != "user_annotation"]
    trace = read_cut(tmp_path, [*rows, k.kernel("last", 99, 1)], "last")
    assert trace.iterations.num_rows == 0
    (warning,) = [note for note in trace.meta.warnings if "left out" in note]
    assert "has no marks that show which steps are whole" in warning
    assert "whole trace counts" not in str(trace.meta.warnings)


def test_a_step_with_missing_device_work_is_incomplete(tmp_path):
    rows = [row for row in paired() if row["name"] != "1.3."]  # written later: behind the cut
    assert read_cut(tmp_path, rows, '"3.2.').iterations["number"].to_pylist() == [0]


def test_a_truncated_trace_has_the_metrics_of_its_complete_steps(tmp_path):
    path = cut(tmp_path, paired(), '"2.2.')
    run = open_run(path, config=Config(allow_truncated=True))
    found = compute_metrics(run).to_dict()
    path = k.write(tmp_path / "rank0.json", paired())
    whole = compute_metrics(open_run(path), MetricsOptions(steps=[0, 1])).to_dict()
    assert found["iterations"] == 2
    assert found["breakdown"] == whole["breakdown"]
    # What lies in no step is of the steps that are left out: nothing is known of the rest.
    assert found["outside"] == {"device_ns": None, "share": None, "comm_events": None}
    assert "Outside every step" not in str(found["warnings"])


def test_a_trace_that_is_cut_inside_its_first_step_has_no_numbers(tmp_path):
    path = cut(tmp_path, paired(), '"0.2.')
    words = (path, "--allow-truncated")
    assert "n/a: there is no iteration" in invoke("metrics", *words).stdout
    error = invoke("critical-path", *words, code=2).stderr
    assert "truncated, without a complete step. Select another part with --annotation" in error


def test_steps_without_device_work_in_a_whole_trace_stay(tmp_path):
    marks = [k.mark(f"ProfilerStep#{n}", 10 * n, 10) for n in range(4)]
    path = k.write(tmp_path / "rank0.json", [*marks, k.kernel("gemm", 1, 1)])
    trace = reader.read(path, TraceOptions(allow_truncated=True))
    assert trace.iterations["number"].to_pylist() == [0, 1, 2, 3]


def test_a_cut_trace_without_any_device_work_has_no_step(tmp_path):
    marks = [k.mark(f"ProfilerStep#{n}", 10 * n, 10) for n in range(4)]
    path = cut(tmp_path, [*marks, k.kernel("gemm", 1, 1)], "gemm")
    trace = reader.read(path, TraceOptions(allow_truncated=True))
    assert trace.iterations["number"].to_pylist() == []
    warnings = str(trace.meta.warnings)
    assert "iterations 0-3 are left out (4 of 4)" in warnings
    assert "the trace is truncated before any" in warnings
    assert "activities=" not in warnings
    found = json.loads(invoke("metrics", path, "--allow-truncated", "--json").stdout)
    assert found["iterations"] == 0
    assert "the trace is truncated before any" in str(found["warnings"])
