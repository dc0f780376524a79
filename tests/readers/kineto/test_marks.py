"""Test marks of iterations that have the category of operators, as until PyTorch 1.11."""

import pytest
from builders import kineto_text as k
from builders.fault_tools import in_time

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.kineto import reader
from fastcomm.trace.iterations import IterationRule
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
