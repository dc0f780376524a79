"""Test steps of which device work is not recorded, though its launches are."""

import pytest
from builders import kineto_text as k
from builders.opened import open_run

from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions

STEP = 1000


def copy_call(ts, correlation, name="cudaMemcpyAsync"):
    return k.event(name, "cuda_runtime", ts, 1, pid=100, tid=1, correlation=correlation)


def copied(ts, dur, correlation):
    return k.event(
        *("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", ts, dur),
        tid=7,
        stream=7,
        correlation=correlation,
        bytes=4096,
    )


def step(number, late=0):
    """Two kernels of 200 and a copy of 100, launched as the step begins."""
    at, first = STEP * number, 10 * number + 1
    return [
        k.mark(f"ProfilerStep#{number}", at, STEP),
        *(k.launch(at + 10, first), k.kernel("gemm", at + 50 + late, 200, correlation=first)),
        *(copy_call(at + 20, first + 1), copied(at + 300 + late, 100, first + 1)),
        *(
            k.launch(at + 30, first + 2),
            k.kernel("gemm", at + 400 + late, 200, correlation=first + 2),
        ),
    ]


def is_work(event):
    return event["cat"] in ("kernel", "gpu_memcpy")


def without_work(events, begin, end=1 << 60):
    return [event for event in events if not (is_work(event) and begin <= event["ts"] < end)]


def measured(tmp_path, events):
    k.write(tmp_path / "rank0.json", events)
    return compute_metrics(open_run(tmp_path / "rank0.json"), MetricsOptions())


def steps_of(metrics):
    return metrics.tables["iterations"]["iteration"].to_pylist()


def reasons(metrics):
    return [text for text in metrics.warnings if "is not recorded, as where" in text]


FIVE = [event for number in range(5) for event in step(number)]


def test_a_whole_recording_keeps_its_steps(tmp_path):
    metrics = measured(tmp_path, FIVE)
    assert steps_of(metrics) == [0, 1, 2, 3, 4]
    assert reasons(metrics) == []
    assert metrics.breakdown.exact["idle"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("begin", "end", "others", "text"),
    [
        (2000, 3000, [0, 1, 3, 4], "iteration 2 is left out: the work of 3 of 3 "),
        (2350, 3000, [0, 1, 3, 4], "iteration 2 is left out: the work of 1 of 3 "),
        (2350, 3250, [0, 1, 4], "iterations 2-3 are left out: the work of 2 of 6 "),
        (0, 1000, [1, 2, 3, 4], "iteration 0 is left out: the work of 3 of 3 "),
        (2250, 1 << 60, [0, 1], "iterations 2-4 are left out: the work of 8 of 9 "),
    ],
)
def test_a_step_without_some_of_its_work_is_left_out(tmp_path, begin, end, others, text):
    metrics = measured(tmp_path, without_work(FIVE, begin, end))
    assert steps_of(metrics) == others
    assert metrics.breakdown.exact["compute"] == pytest.approx(0.4)
    assert metrics.breakdown.exact["idle"] == pytest.approx(0.5)
    (reason,) = reasons(metrics)
    assert text in reason


def test_times_are_unknown_where_no_step_is_complete(tmp_path):
    events = [event for event in FIVE if not (is_work(event) and event["dur"] == 100)]
    events = [e for e in events if not (is_work(e) and e["ts"] % STEP == 400)]
    metrics = measured(tmp_path, events)
    assert steps_of(metrics) == []
    assert set(metrics.breakdown.exact.values()) == {None}
    assert "iterations 0-4 are left out" in reasons(metrics)[0]


def test_a_step_behind_work_that_is_not_recorded_begins_with_its_own(tmp_path):
    """Each step runs 700 late, behind the one before."""
    events = [event for number in range(5) for event in step(number, late=700)]
    metrics = measured(tmp_path, without_work(events, 2700, 3700))
    rows = metrics.tables["iterations"].to_pylist()
    starts = {row["iteration"]: row["start_ns"] // 1000 for row in rows}
    assert starts == {0: 0, 1: 1300, 3: 3750, 4: 4300}


def empty_copies(number):
    return copy_call(STEP * number + 25, 900 + number)


def recorded_events(number):
    at = STEP * number + 27
    return k.event("cudaEventRecord", "cuda_runtime", at, 1, pid=100, tid=1, correlation=0)


def host_functions(number):
    at = STEP * number + 28
    own = {"pid": 100, "tid": 1, "correlation": 800 + number}
    return k.event("cudaLaunchHostFunc", "cuda_runtime", at, 1, **own)


def empty_graphs(number):
    at = STEP * number + 28
    own = {"pid": 100, "tid": 1, "correlation": 800 + number}
    return k.event("cudaGraphLaunch", "cuda_runtime", at, 1, **own)


def nested_calls(number):
    """The driver's call inside of the runtime's, with a number of its own."""
    at = STEP * number + 10
    own = {"pid": 100, "tid": 1, "correlation": 700 + number}
    return k.event("cuLaunchKernel", "cuda_driver", at, 1, **own)


@pytest.mark.parametrize(
    "call",
    [empty_copies, recorded_events, host_functions, empty_graphs, nested_calls],
    ids=lambda call: call.__name__,
)
def test_calls_that_launch_no_work_are_no_reason(tmp_path, call):
    metrics = measured(tmp_path, [*FIVE, *map(call, range(5))])
    assert steps_of(metrics) == [0, 1, 2, 3, 4]
    assert reasons(metrics) == []


@pytest.mark.parametrize("has_begin", [True, False])
def test_kernels_that_a_graph_captures_are_no_reason(tmp_path, has_begin):
    ends = ["cudaStreamBeginCapture"] * has_begin + ["cudaStreamEndCapture"]
    times = [500] * has_begin + [540]
    own = {"pid": 100, "tid": 1}
    capture = [
        *(k.event(n, "cuda_runtime", t, 1, **own) for n, t in zip(ends, times, strict=True)),
        *(k.launch(510 + n, 600 + n, dur=0) for n in range(20)),
    ]
    metrics = measured(tmp_path, [*FIVE, *capture] if has_begin else [*capture, *FIVE])
    expected = [0, 1, 2, 3, 4]
    assert steps_of(metrics) == expected
    assert reasons(metrics) == []


def test_work_without_a_launch_may_be_that_of_the_calls(tmp_path):
    events = [
        {**e, "args": {"stream": 7}} if e["name"] == "gemm" and e["ts"] % STEP == 400 else e
        for e in FIVE
    ]
    assert reasons(measured(tmp_path, events)) == []


def graph_step(number):
    """A graph of two kernels, launched as the step begins."""
    at, call = STEP * number, number + 1
    launch = k.event(
        "cudaGraphLaunch", "cuda_runtime", at + 10, 5, pid=100, tid=1, correlation=call
    )
    kernels = [
        k.kernel("gemm", at + 50 + 450 * node, 400, correlation=call, graph_node_id=node + 1)
        for node in range(2)
    ]
    return [k.mark(f"ProfilerStep#{number}", at, STEP), launch, *kernels]


GRAPHS = [event for number in range(5) for event in graph_step(number)]


def test_a_step_whose_graph_has_no_recorded_work_is_left_out_and_not_idle(tmp_path):
    metrics = measured(tmp_path, without_work(GRAPHS, 2 * STEP, 3 * STEP))
    assert steps_of(metrics) == [0, 1, 3, 4]
    (reason,) = reasons(metrics)
    assert reason.startswith("iteration 2 is left out: the work of 1 of 1 launched")
    assert metrics.breakdown.exact["idle"] == pytest.approx(0.2)


def test_graphs_that_are_without_work_in_every_step_are_empty(tmp_path):
    empty = [
        k.event("cudaGraphLaunch", "cuda_runtime", at, 5, pid=100, tid=1, correlation=call)
        for at, call in ((STEP * number + 20, 100 + number) for number in range(5))
    ]
    metrics = measured(tmp_path, GRAPHS + empty)
    assert steps_of(metrics) == [0, 1, 2, 3, 4]
    assert reasons(metrics) == []
