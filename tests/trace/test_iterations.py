"""Test where steps begin and end."""

import pytest
from builders import kineto_text as k
from builders.iteration_traces import STEPS, WORK

from fastcomm.errors import TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.trace.iterations import IterationRule


def iterations(tmp_path, events, **rule):
    path = k.write(tmp_path / "rank0.json", events)
    options = TraceOptions(iterations=IterationRule(**rule))
    trace = reader.read(path, options)
    rows = [(r["number"], r["start"], r["stop"]) for r in trace.iterations.to_pylist()]
    return rows, trace.meta


def test_profiler_steps_come_before_all_other_names(tmp_path):
    marks = [
        k.mark("ProfilerStep#7", 1, 4),
        k.mark("ProfilerStep#8", 5, 4),
        k.mark("step 1", 0, 9),
    ]
    rows, meta = iterations(tmp_path, WORK + marks)
    assert rows == [(7, 1000, 5000), (8, 5000, 9000)]
    assert meta.found_by == "ProfilerStep#N"


@pytest.mark.parametrize("name", ["iteration 3", "Iter_3", "STEP:3", "step-3", "iter3"])
def test_common_names_mark_iterations_in_any_case(tmp_path, name):
    rows, _ = iterations(tmp_path, [*WORK, k.mark(name, 10, 20)])
    assert rows == [(3, 10_000, 30_000)]


@pytest.mark.parametrize("name", ["steps 3", "my step 3", "iteration"])
def test_names_similar_to_marks_are_not_marks(tmp_path, name):
    _, meta = iterations(tmp_path, [*WORK, k.mark(name, 10, 20)])
    assert meta.found_by == "whole trace"


def test_the_projection_of_a_mark_onto_a_stream_is_not_a_mark(tmp_path):
    projected = k.event("ProfilerStep#1", "gpu_user_annotation", 0, 9)
    _, meta = iterations(tmp_path, [*WORK, projected])
    assert meta.found_by == "whole trace"


def test_optimizer_steps_end_iterations_and_the_first_name_counts(tmp_path):
    marks = [
        k.mark("Optimizer.step#Adam.step", 10, 5),
        k.mark("Optimizer.step#EMA.step", 16, 2),
        k.mark("Optimizer.step#Adam.step", 50, 5),
    ]
    rows, meta = iterations(tmp_path, WORK + marks)
    assert rows == [(0, 0, 15_000), (1, 15_000, 55_000)]
    assert meta.found_by == "ends of Optimizer.step#Adam.step"


def test_a_regex_takes_precedence_and_its_group_is_the_number(tmp_path):
    marks = [k.mark("ProfilerStep#7", 1, 4), k.mark("train batch=12 x", 20, 5)]
    rows, _ = iterations(tmp_path, WORK + marks, regex=r"batch=(\d+)")
    assert rows == [(12, 20_000, 25_000)]


def test_iterations_of_a_regex_without_a_group_are_numbered(tmp_path):
    marks = [k.mark("train", 20, 5), k.mark("train", 40, 5)]
    rows, _ = iterations(tmp_path, WORK + marks, regex="^train$")
    assert rows == [(0, 20_000, 25_000), (1, 40_000, 45_000)]


def test_a_regex_without_a_match_is_an_error_that_lists_annotations(tmp_path):
    with pytest.raises(TraceFileError, match=r"no annotation matches 'nope'.*ProfilerStep#7"):
        iterations(tmp_path, [*WORK, k.mark("ProfilerStep#7", 1, 4)], regex="nope")


def test_an_invalid_regex_is_an_error(tmp_path):
    with pytest.raises(TraceFileError, match="invalid regular expression"):
        iterations(tmp_path, [*WORK, k.mark("a", 1, 4)], regex="(")


def test_marks_of_one_number_on_two_threads_are_one_iteration(tmp_path):
    marks = [k.mark("ProfilerStep#1", 1, 4, tid=1), k.mark("ProfilerStep#1", 2, 5, tid=2)]
    rows, _ = iterations(tmp_path, WORK + marks)
    assert rows == [(1, 1000, 7000)]


def test_overlapping_marks_end_where_the_next_begins_with_a_warning(tmp_path):
    marks = [k.mark("step 1", 0, 10), k.mark("step 2", 8, 10)]
    rows, meta = iterations(tmp_path, WORK + marks)
    assert rows == [(1, 0, 8000), (2, 8000, 18_000)]
    assert "1 iteration mark cut where the next begins" in meta.warnings[0]


def test_the_period_of_the_collectives_is_the_last_guess(tmp_path):
    comm = []
    for step in range(3):
        comm += [k.all_reduce(100 * step, 1), k.all_reduce(100 * step + 10, 1, nelems=7)]
    rows, meta = iterations(tmp_path, [*comm, k.kernel("gemm", 290, 10)])
    assert rows == [(0, 0, 100_000), (1, 100_000, 200_000), (2, 200_000, 300_000)]
    assert "repeat every 2 events" in meta.warnings[0]


def test_a_single_repeated_collective_is_not_a_period(tmp_path):
    _, meta = iterations(tmp_path, [k.all_reduce(10 * step, 1) for step in range(6)])
    assert meta.found_by == "whole trace"


def test_the_whole_trace_is_one_iteration_with_a_warning(tmp_path):
    rows, meta = iterations(tmp_path, WORK)
    assert rows == [(0, 0, 100_000)]
    assert "whole trace" in meta.warnings[0]


def test_given_ranges_take_precedence(tmp_path):
    marks = [k.mark("ProfilerStep#7", 1, 4)]
    rows, meta = iterations(tmp_path, WORK + marks, ranges=((2, 50, 60), (1, 10, 20)))
    assert rows == [(1, 10, 20), (2, 50, 60)]
    assert meta.found_by == "ranges"


def test_ranges_of_the_user_are_used_unchanged(tmp_path):
    events = [*STEPS, k.launch(1, 11), k.kernel("late", 30, 5, correlation=11)]
    path = k.write(tmp_path / "rank0.json", events)
    rule = IterationRule(ranges=((0, 0, 40_000),))
    assert reader.read(path, TraceOptions(iterations=rule)).device_iterations is None


@pytest.mark.parametrize(("length", "count"), [(12, 3), (99, 3), (101, 4), (10_000, 4)])
def test_a_mark_that_the_end_of_the_profiler_closes_is_no_step(tmp_path, length, count):
    lengths = (10_000, 10_000, 10_000, length)
    marks = [
        k.mark(f"ProfilerStep#{number}", 10_000 * place, dur)
        for place, (number, dur) in enumerate(zip(range(27, 31), lengths, strict=True))
    ]
    rows, meta = iterations(tmp_path, [*marks, k.kernel("gemm", 0, 100)])
    assert [row[0] for row in rows] == [27, 28, 29, 30][:count]
    warnings = [text for text in meta.warnings if text.startswith("iteration 30 is left out")]
    assert len(warnings) == 4 - count
