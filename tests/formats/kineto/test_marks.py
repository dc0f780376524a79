"""Test marks of iterations that have the category of operators, as until PyTorch 1.11."""

import numpy as np
import pytest
from builders import kineto_text as k
from builders.fault_tools import in_time
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.trace.iterations import IterationRule, Marks, find_iterations
from fastcomm.trace.schema import KIND


def steps(name, category, count=3):
    """Steps of 10 ms, each with a kernel of 4 ms."""
    for step in range(count):
        start = 10_000 * step
        yield k.event(name.format(step + 5), category, start, 10_000, pid=100, tid=1)
        yield k.event("aten::step", "cpu_op", start + 10, 5_000, pid=100, tid=1)
        yield k.launch(start + 20, step + 1)
        yield k.kernel("gemm", start + 100, 4_000, correlation=step + 1)


def read(tmp_path, events, regex=None, whole=False):
    path = k.write(tmp_path / "rank0.json", [*events])
    rule = IterationRule(regex=regex)
    return reader.read(path, TraceOptions(iterations=rule, whole=whole))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("category", ["Operator", "cpu_op"])
@pytest.mark.parametrize(
    ("name", "regex", "numbers"),
    [
        ("ProfilerStep#{}", None, [5, 6, 7]),
        ("iteration {}", None, [5, 6, 7]),
        ("ProfilerStep#{}", r"ProfilerStep#(\d+)", [5, 6, 7]),
        ("train::step {}", r"step (\d+)", [5, 6, 7]),
        ("my loop", "loop", [0, 1, 2]),
        ("Optimizer.step#SGD.step", None, [0, 1, 2]),
    ],
)
def test_operators_named_like_marks_are_marks(tmp_path, name, category, regex, numbers, whole):
    trace = read(tmp_path, steps(name, category), regex, whole)
    assert trace.iterations["number"].to_pylist() == numbers
    length = trace.iterations["stop"].to_numpy() - trace.iterations["start"].to_numpy()
    assert length.tolist() == [10_000_000] * 3
    events = trace.events.to_pylist()
    annotations = [row["name"] for row in events if row["kind"] == KIND["annotation"]]
    assert annotations == [name.format(step) for step in (5, 6, 7)]


def marks(*rows):
    """Marks of (name, start, duration), and a kernel of 2 us at the end of each."""
    for number, (name, start, length) in enumerate(rows, 1):
        yield k.mark(name, start, length)
        yield k.launch(start + length - 6, number)
        yield k.kernel("gemm", start + length - 3, 2, correlation=number)


def iterations(trace):
    return [tuple(value // 1000 for value in row) for row in rows_of(trace)]


def rows_of(trace):
    names = ("number", "start", "stop")
    rows = zip(*(trace.iterations[name].to_pylist() for name in names), strict=True)
    return [(1000 * number, start, stop) for number, start, stop in rows]


EPOCH = [(f"iteration {n}", 10 * n, 10) for n in range(3)]


def test_numbers_that_restart_are_counted_on(tmp_path):
    """As in each epoch; what follows after a pause leaves a number out."""
    again = [(name, start + 30, length) for name, start, length in EPOCH]
    trace = read(tmp_path, marks(*EPOCH, *again, ("iteration 3", 60, 10)))
    assert iterations(trace) == [(n, 10 * n, 10 * n + 10) for n in range(7)]
    assert any("restart, and are counted on up to 6" in text for text in trace.meta.warnings)
    later = [(name, start + 100, length) for name, start, length in EPOCH]
    trace = read(tmp_path, marks(*EPOCH, *later))
    assert [number for number, *_ in iterations(trace)] == [0, 1, 2, 4, 5, 6]
    pause = "70.0 us between 2 and 4 are in no step"
    assert any(pause in text for text in trace.device_notes)


def test_a_mark_behind_a_restart_takes_the_number_of_no_other(tmp_path):
    """After 2, 3, 2 a 1 would be counted on to 3."""
    first = marks(("step 2", 0, 10), ("step 3", 10, 40), ("step 2", 50, 20))
    trace = read(tmp_path, [*first, k.mark("step 1", 60, 20, tid=2)])
    assert iterations(trace) == [(2, 0, 10), (3, 10, 50), (4, 50, 60), (5, 60, 80)]


def test_marks_of_one_number_on_several_threads_are_one_iteration(tmp_path):
    other = [k.mark(f"iteration {n}", 10 * n + 2, 9, tid=2) for n in range(3)]
    trace = read(tmp_path, [*marks(*EPOCH), *other])
    assert [number for number, *_ in iterations(trace)] == [0, 1, 2]
    assert not any("restart" in text for text in trace.meta.warnings)


def test_marks_inside_of_others_are_parts(tmp_path):
    inner = [(f"step {n % 2}", 5 * n, 5) for n in range(6)]
    trace = read(tmp_path, marks(*EPOCH, *inner))
    assert iterations(trace) == [(n, 10 * n, 10 * n + 10) for n in range(3)]
    said = (
        "marks 'iteration' (3) are the steps, as they cover most time; those named 'step' (6)"
    )
    assert any(said in text for text in trace.meta.warnings)


def test_marks_whose_number_stays_are_counted_on(tmp_path):
    trace = read(tmp_path, marks(*(("step 7", 10 * n, 10) for n in range(5))))
    assert iterations(trace) == [(n + 7, 10 * n, 10 * n + 10) for n in range(5)]
    assert any("marks stay, and are counted on up to 11" in t for t in trace.meta.warnings)


def test_marks_of_a_kind_inside_of_others_are_parts(tmp_path):
    """Outer steps with parts that are called like them, numbered from 0 in each."""
    outer = [(f"step {n}", 40 * n, 40) for n in range(5, 8)]
    inner = [(f"step {n}", start + 10 * n, 10) for _, start, _ in outer for n in range(4)]
    trace = read(tmp_path, marks(*outer, *inner))
    assert iterations(trace) == [(n, 40 * n, 40 * n + 40) for n in range(5, 8)]
    said = "12 marks inside of others of the same kind are parts of steps"
    assert any(said in text for text in trace.meta.warnings)


def test_of_a_number_with_many_digits_the_last_ones_count(tmp_path):
    """As of the time in ns, with the number of the step behind it."""
    names = [(f"step 1764320000123456789{n}", 10 * n, 10) for n in range(3)]
    assert iterations(read(tmp_path, marks(*names))) == [
        (64320000123456789 * 10 + n, 10 * n, 10 * n + 10) for n in range(3)
    ]


def lies_inside(row, place, rows):
    """Whether a row lies inside of another one; of equal ones, inside of the first."""
    return any(
        start <= row[0] and row[1] <= stop and ((start, stop) != row[:2] or other < place)
        for other, (start, stop, _) in enumerate(rows)
        if other != place
    )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 9)), max_size=12)
)
def test_a_number_restarts_behind_a_whole_mark_of_another_one(rows):
    """The definition: spans of a number grow, unless a whole mark lies in between.

    What lies inside of another mark is none. Marks that all have one number grow where they
    overlap.
    """
    rows = sorted((start, start + length, number) for number, start, length in rows)
    outer = [row for place, row in enumerate(rows) if not lies_inside(row, place, rows)]
    is_single = len({number for *_, number in outer}) == 1
    spans = []  # of number, start, stop
    for place, (start, stop, number) in enumerate(outer):
        own = [span for span in spans if span[0] == number]
        end = own[-1][2] if own else start + 1
        between = [(a, b) for a, b, _ in outer[:place] if end <= a and b <= start]
        is_apart = start >= end if is_single else between
        if own and not is_apart:
            own[-1][2] = max(end, stop)
        else:
            spans.append([number, start, stop])
    columns = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
    names = [f"step {number}" for *_, number in rows]
    marks_ = Marks(
        names=names,
        start=columns[:, 0],
        stop=columns[:, 1],
        span=(0, 100),
        comm_start=columns[:0, 0],
        comm_key=columns[:0, 0],
    )
    if rows:
        found = find_iterations(marks_, IterationRule())
        assert sorted(found.start.tolist()) == sorted(span[1] for span in spans)
        assert len(set(found.number.tolist())) == len(spans)


def test_operators_are_no_marks_where_annotations_are(tmp_path):
    events = [*steps("ProfilerStep#{}", "user_annotation"), *steps("iteration {}0", "cpu_op")]
    trace = read(tmp_path, events)
    assert trace.iterations["number"].to_pylist() == [5, 6, 7]
    trace = read(tmp_path, events, r"iteration (\d+)")
    assert trace.iterations["number"].to_pylist() == [50, 60, 70]


def test_operators_of_pytorch_are_no_marks(tmp_path):
    with pytest.raises(TraceFileError, match="no annotation matches 'step'"):
        read(tmp_path, steps("forward", "cpu_op"), "step")


def test_an_invalid_expression_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(TraceFileError, match=r"rank0\.json: iterations: "):
        read(tmp_path, steps("forward", "cpu_op"), "(")


def test_operators_are_searched_in_time_that_grows_with_their_names(tmp_path):
    operator = k.event("a" * 60 + " b", "cpu_op", 50, 100, pid=100, tid=1)
    events = [*steps("iteration {}", "user_annotation"), operator]
    with in_time(20), pytest.raises(FastcommError, match="no annotation matches"):
        read(tmp_path, events, regex="(a|aa)+!$")


def threads(name, drives, others=(), shift=3):
    """Marks of two threads, the second's later, of steps of 10 ms with a kernel of each."""
    for tid, launches in enumerate(drives, 1):
        for step in range(4):
            start = 10_000 * step + shift * 100 * (tid - 1)
            yield k.mark(name.format(step), start, 10_000, tid=tid)
            if launches:
                yield k.launch(start + 100, 10 * step + tid, tid=tid)
                yield k.kernel(
                    "gemm", start + 200, 300, stream=tid, correlation=10 * step + tid
                )
    yield from others


BEHIND = [(0, 300, 10_300), (1, 10_300, 20_300), (2, 20_300, 30_300), (3, 30_300, 40_300)]
BEFORE = [(n, start - 300, stop - 300) for n, start, stop in BEHIND]


@pytest.mark.parametrize(
    ("drives", "expected"), [((True, False), BEFORE), ((False, True), BEHIND)]
)
@pytest.mark.parametrize(
    ("name", "regex"),
    [("ProfilerStep#{}", None), ("iteration {}", None), ("my loop {}", r"loop (\d+)")],
)
def test_steps_are_marked_by_the_thread_that_launches(tmp_path, name, regex, drives, expected):
    trace = read(tmp_path, threads(name, drives), regex)
    assert "devices" not in trace.meta.missing_data
    for table in (trace.iterations, trace.device_iterations):
        rows = [(r["number"], r["start"], r["stop"]) for r in table.to_pylist()]
        assert rows == [(n, 1000 * start, 1000 * stop) for n, start, stop in expected]


def test_steps_span_the_marks_of_several_threads_that_launch(tmp_path):
    trace = read(tmp_path, threads("iteration {}", (True, True)))
    assert trace.iterations.to_pylist()[-1] == {
        "number": 3,
        "start": 30_000_000,
        "stop": 40_300_000,
    }
    assert (
        "devices" in read(tmp_path, threads("ProfilerStep#{}", (True, True))).meta.missing_data
    )


def test_marks_that_no_launching_thread_has_are_steps(tmp_path):
    """As where threads do steps in turns, of which some launch nothing."""
    others = [k.mark(f"iteration {n}", 10_000 * n, 10_000, tid=2) for n in (4, 5)]
    trace = read(tmp_path, threads("iteration {}", (True,), others))
    assert trace.iterations["number"].to_pylist() == [0, 1, 2, 3, 4, 5]
