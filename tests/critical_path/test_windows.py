"""Test windows, lookups, and incomplete traces of critical paths."""

import numpy as np
import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.path_events import US, call, op, read, steps, sync, work
from hypothesis import given
from hypothesis import strategies as st

import fastcomm
from fastcomm.compat import hta
from fastcomm.critical_path.search import analyze
from fastcomm.critical_path.window import WindowError, find
from fastcomm.errors import FastcommError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.graph.edits import parse_edits
from fastcomm.graph.graph import EDGE_KIND
from fastcomm.options import EditOptions, Window
from fastcomm_kernels.hta import SYNC


@given(st.data())
def test_windows_are_selected_by_annotation_and_instance(folder, data):
    marks = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=5))
    events = [k.mark(f"step {n}", ts, 10) for n, ts in enumerate(marks)]
    path = k.write(folder / "rank0.json", [op("a", 0, 1), *events])
    index = data.draw(st.integers(0, len(marks) - 1))
    start = sorted(marks)[index]
    found = analyze(read(path), Window(annotation="step", instance=index))
    # The operator and the mark.
    assert found.about.clipped == (2 if start == 0 else 0)


def test_missing_windows_are_errors(path_of, tmp_path):
    events = [k.mark("ProfilerStep#3", 0, 10), op("a", 0, 5), k.mark("ProfilerStep#30", 20, 10)]
    for rules in (hta.find_path, analyze):
        with pytest.raises(WindowError, match="no event's name contains 'nothing'"):
            path_of(*events, wanted=Window(annotation="nothing"), by=rules)
        with pytest.raises(
            WindowError, match=r"no instance 2 of 'Prof': the trace has \d, 0 to"
        ):
            path_of(*events, wanted=Window(annotation="Prof", instance=2), by=rules)
        for instance in (-1, (1, 0), (1,), "x"):
            with pytest.raises(WindowError, match="instance"):
                path_of(*events, wanted=Window(annotation="Prof", instance=instance), by=rules)
    with pytest.raises(WindowError, match="no step 4; the trace has 3, 30"):
        path_of(*events, wanted=Window(step=4))
    found = path_of(*events, wanted=Window(annotation="ProfilerStep#3", exact=True))
    assert found.about.clipped == 2
    assert path_of(*events, wanted=Window(step=3), by=hta.find_path).about.clipped == 2
    assert path_of(*events, wanted=Window(step=30)).about.clipped == 0
    metrics_only = reader.read(tmp_path / "rank0.json", TraceOptions())
    with pytest.raises(FastcommError, match="only the columns for metrics were read"):
        analyze(metrics_only)


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def kernel_at(begin, length, number=1, tid=1):
    """A launch of 5 us, and its kernel that starts 10 us after it."""
    return [
        call("cudaLaunchKernel", begin, 5, number, tid),
        work("gemm", begin + 10, length, number),
    ]


def of_step(path_of, *events):
    """The path of a step of 100 us that begins at 1000."""
    path = path_of(k.mark("ProfilerStep#3", 1000, 100), *events, wanted=Window(step=3))
    return steps(path)


def test_a_path_has_the_time_before_the_first_event_of_its_step(path_of):
    unrecorded = of_step(path_of, *kernel_at(1060, 30), call("cudaDeviceSynchronize", 1065, 35))
    assert unrecorded == [
        ("host_gap", 60, None),
        ("gpu_kernel_launch_overhead", 10, "gemm"),
        ("gpu_compute_bound", 30, "gemm"),
    ]
    load = k.event(LOADER, "user_annotation", 1002, 50, pid=100, tid=1)
    assert of_step(path_of, load, *kernel_at(1060, 40)) == [
        ("host_gap", 2, None),
        ("data_loading", 50, LOADER),
        ("host_gap", 8, None),
        ("gpu_kernel_launch_overhead", 10, "gemm"),
        ("gpu_compute_bound", 40, "gemm"),
    ]


def test_names_of_loads_that_are_given_stand_for_the_usual_ones(path_of):
    mark = k.mark("ProfilerStep#3", 1000, 100)
    loads = [
        k.event(name, "user_annotation", ts, 20, pid=100, tid=1)
        for name, ts in ((LOADER, 1000), ("my fetch", 1030))
    ]
    path = path_of(
        *(mark, *loads, *kernel_at(1060, 30)),
        wanted=Window(step=3, data_load_events=("fetch",)),
    )
    assert steps(path)[:3] == [
        ("host_gap", 30, None),
        ("data_loading", 20, "my fetch"),
        ("host_gap", 10, None),
    ]


def test_loading_on_a_thread_without_operators_is_not_on_a_path(path_of):
    ahead = k.event(LOADER, "user_annotation", 1002, 50, pid=100, tid=9)
    assert of_step(path_of, ahead, *kernel_at(1060, 30))[0] == ("host_gap", 60, None)


def test_a_path_has_the_time_after_the_last_event_of_its_step(path_of):
    waited = [*kernel_at(1000, 30), call("cudaDeviceSynchronize", 1005, 36)]
    assert of_step(path_of, *waited)[-2:] == [("sync_wait", 1, None), ("host_gap", 59, None)]
    # Without a call that waited, it is unknown what the host did.
    assert of_step(path_of, *kernel_at(1000, 30))[-2:] == [
        ("gpu_compute_bound", 30, "gemm"),
        ("unexplained", 60, None),
    ]
    other = [*kernel_at(1000, 5), op("late", 1050, 20, tid=2)]
    assert of_step(path_of, *other)[-2:] == [
        ("cpu_bound", 20, "late"),
        ("unexplained", 30, None),
    ]
    behind = [*kernel_at(1000, 300)]
    assert of_step(path_of, *behind) == [
        ("gpu_kernel_launch_overhead", 10, "gemm"),
        ("gpu_compute_bound", 300, "gemm"),
    ]


def test_marks_of_ranks_that_end_after_all_events_wait_for_the_last_of_them(tmp_path):
    """Rank 0 is done at 60, rank 1 at 90; both marks end at 100."""
    for rank, length in enumerate((50, 80)):
        events = [
            k.mark("ProfilerStep#0", 0, 100),
            call("cudaLaunchKernel", 0, 1, 1),
            k.all_reduce(
                *(1, 9, 7),
                correlation=1,
                Process_Group_Name="0",
                Process_Group_Ranks="[0, 1]",
                Group_size=2,
                Seq=1,
            ),
            *kernel_at(5, length - 5, 2),
            call("cudaDeviceSynchronize", 11, length),
        ]
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=2)
    path = fastcomm.open(tmp_path).critical_path()
    assert path.is_joined
    assert path.length_ns == 100 * US
    assert steps(path)[-1] == ("host_gap", 9, None)
    faster = path.predict(parse_edits(EditOptions(scale=("compute=0.5",))))
    # Of 75 us, 37.5 are left on rank 1, and nobody waits any longer than before.
    assert faster.after_ns == 100 * US - 37_500


def test_a_trace_without_device_work_has_a_path(path_of):
    for rules in (hta.find_path, analyze):
        found = path_of(op("a", 0, 10), op("b", 10, 5), by=rules)
        assert found.length_ns == 15 * US
        assert "no device work: the path is that of the host" in found.about.notes


def test_a_launch_without_a_correlation_has_no_work(path_of):
    events = [call("cudaLaunchKernel", 0, 5), k.kernel("gemm", 10, 5, stream=7)]
    found = path_of(*events)
    assert steps(found)[-2:] == [("unexplained", 5, None), ("gpu_compute_bound", 5, "gemm")]


def test_a_cycle_has_no_path_with_the_rules_of_hta(path_of):
    # One call ends as the other starts, and the later one stands first in the file.
    events = [call("cudaLaunchKernel", 1, 1, 1), call("cudaLaunchKernel", 0, 1, 2)]
    found = path_of(*events, by=hta.find_path)
    assert found.path is None
    assert not found.critical_path()
    assert found.get_critical_path_breakdown() is None
    assert found.critical_path_nodes == []
    with pytest.raises(FastcommError, match="has no critical path"):
        _ = found.breakdown
    assert path_of(*events).length_ns == 2 * US


def test_the_last_profiled_step_is_left_out_by_the_rules_of_hta(tmp_path):
    events = [k.mark("ProfilerStep#1", 0, 10), op("a", 1, 5)]
    events += [k.mark("ProfilerStep#2", 10, 10), op("b", 11, 5)]
    path = k.write(tmp_path / "rank0.json", events)
    found, _ = hta.critical_path_analysis(path, 0, "")
    assert found.about.clipped == 2
    assert found.about.notes[0] == "the last profiled step is left out, as HTA does"
    found, _ = hta.critical_path_analysis(path, 0, "", include_last_profiler_step=True)
    assert found.about.clipped == 4
    assert hta.critical_path_analysis(path, 0, "nothing") is None
    assert hta.critical_path_analysis(path, 0, "", (1, 2, 3)) is not None
    assert hta.critical_path_analysis(path, 0, "Step", (1, 2, 3)) is None
    with pytest.raises(WindowError, match="no instance 7"):
        hta.critical_path_analysis(path, 0, "Step", 7)


def test_negative_weights_are_refused_on_request(path_of):
    found = path_of(op("A", 10, 50), op("B", 40, 50), call("x", 70, 5), by=hta.find_path)
    assert found.critical_path()
    assert not found.critical_path(strict=True)
    assert path_of(op("A", 10, 50), by=hta.find_path).critical_path(strict=True)


def test_nodes_and_edges_can_be_looked_up(path_of):
    events = [op("a", 0, 20), call("cudaLaunchKernel", 5, 5, 1), work("gemm", 30, 6, 1)]
    found = hta.CPGraph.of(path_of(*events))
    assert found.get_nodes_for_event(0) == (0, 3)
    assert found.get_nodes_for_event(9) == (None, None)
    edges = {edge[:2]: edge for edge in found.edges(range(5))}
    assert found.get_events_for_edge(edges[0, 1]) == (0, 1)
    assert found.get_event_attribution_for_edge(edges[0, 1]) == 0
    assert found.get_event_attribution_for_edge(edges[1, 2]) == 1
    assert found.get_event_attribution_for_edge(edges[0, 1]._replace(begin=2)) is None
    assert [edge[:2] for edge in found.get_edges_attributed_to_event(0)] == [(0, 1), (2, 3)]
    assert found.critical_path_edges_set <= set(edges.values())
    assert found.top("event", 1).to_pylist() == [
        {"event": 2, "name": "gemm", "kind": "kernel", "self_ns": 6 * US, "edges": 1}
    ]


def test_the_graph_converts_to_networkx(path_of):
    pytest.importorskip("networkx")
    found = path_of(op("a", 0, 20), call("cudaLaunchKernel", 5, 5, 1), work("gemm", 30, 5, 1))
    graph = hta.CPGraph.of(found).to_networkx()
    assert graph.number_of_nodes() == 6
    assert graph.edges[0, 1]["weight"] == 5 * US
    assert graph.edges[0, 1]["object"].type == "critical_path_operator"


def test_a_stream_is_found_on_the_device_that_has_work_on_it(path_of):
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        work("a", 5, 20, 1, stream=7, device=1),
        call("cudaStreamSynchronize", 8, 20, 3),
        sync("Stream Sync", 9, 18, 3, stream=7),
    ]
    assert path_of(*events).graph.counts()["sync"] == 1
    both = [call("cudaLaunchKernel", 3, 2, 2), work("b", 6, 5, 2, stream=7, device=2)]
    assert path_of(*events, *both).graph.counts()["sync"] == 0


@pytest.mark.parametrize("says", [True, False])
def test_work_long_after_its_launch_waits_for_another_stream(path_of, says):
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        call("cudaLaunchKernel", 3, 2, 2),
        work("a", 5, 60, 1, stream=7),
        work("b", 66, 10, 2, stream=8),
    ]
    if says:
        events += [call("cudaDeviceSynchronize", 70, 12, 9), sync("Context Sync", 70, 8, 9)]
    found = path_of(*events)
    assert found.graph.counts()["inferred"] == (not says)
    assert found.summary_ns()["gpu_compute_bound"] == (10 if says else 70) * US
    soon = path_of(*events[:2], work("a", 5, 15, 1, stream=7), work("b", 21, 10, 2, stream=8))
    assert soon.graph.counts()["inferred"] == 0


def test_work_long_after_its_launch_waits_once_for_its_own_stream(path_of):
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        call("cudaLaunchKernel", 3, 2, 2),
        work("a", 5, 60, 1),
        work("b", 66, 10, 2),
    ]
    found = path_of(*events)
    assert found.graph.counts()["inferred"] == 0
    # From the launch of b to the end of a: without the latter the former is decisive.
    assert found.slack.tolist() == [-1, -1, 62 * US, -1]


def test_a_wait_that_other_work_hides_is_inferred_where_it_shows_later(path_of):
    """The first a ends before its b can start, the second one determines the start of its b."""
    events = [
        *(call("cudaLaunchKernel", 3 * n, 2, n) for n in (1, 2, 3)),
        *(call("cudaLaunchKernel", 80 + 3 * n, 2, n) for n in (4, 5)),
        work("before", 9, 56, 1, stream=8),
        work("a", 15, 35, 2, stream=7),
        work("b", 66, 10, 3, stream=8),
        work("a", 95, 7, 4, stream=7),
        work("b", 103, 10, 5, stream=8),
    ]
    found = path_of(*events)
    graph, names = found.graph, [row["name"] for row in events]
    edges = np.flatnonzero(graph.kind == EDGE_KIND["inferred"])
    nodes = np.concatenate([graph.source[edges], graph.target[edges]])
    rows = found.events.ids(graph.event[nodes]).tolist()
    assert rows == [names.index("a"), names.index("b")]


def test_waits_without_sync_events_are_inferred(path_of):
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        call("cudaStreamWaitEvent", 2, 1, 5),
        sync("Stream Wait Event", 2, 1, 5, stream=8),
        call("cudaLaunchKernel", 3, 2, 2),
        work("a", 5, 60, 1, stream=7),
        work("b", 66, 10, 2, stream=8),
    ]
    assert path_of(*events).graph.counts()["inferred"] == 1


@pytest.mark.parametrize("command", [["critical-path"], ["what-if", "--scale", "compute=0.5"]])
def test_a_window_without_events_is_an_error(tmp_path, command):
    events = [call("cudaLaunchKernel", 1, 2, 5), work("gemm", 4, 5, 5)]
    late = [k.mark("ProfilerStep#0", 0, 20), k.mark("ProfilerStep#9", 1000, 20)]
    path = k.write(tmp_path / "rank0.json", [*events, *late])
    error = invoke(*command, path, "--step", "9", code=2).stderr
    assert f"{path}: the window has no event that a path could go through" in error


@pytest.mark.parametrize(
    ("busy", "step"), [((0, 1, 2), 1), ((0, 2, 3), 2), ((0, 3), 3), ((0,), 0), ((), 1)]
)
def test_the_usual_step_is_the_second_or_the_next_with_work(tmp_path, busy, step):
    marks = [k.mark(f"ProfilerStep#{n}", 100 * n, 100) for n in range(4)]
    events = [
        event
        for n in busy
        for event in (
            call("cudaLaunchKernel", 100 * n + 1, 2, n),
            work("gemm", 100 * n + 4, 5, n),
        )
    ]
    path = k.write(tmp_path / "rank0.json", [*marks, *events])
    assert find(read(path), Window()).step == step


def test_a_trace_without_events_in_any_window_is_no_wrong_usage(tmp_path):
    path = k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#9", 1000, 20)])
    error = invoke("critical-path", path, code=1).stderr
    assert f"{path}: no event that a path could go through in any window" in error


@pytest.mark.parametrize(
    ("name", "api"),
    [("Event Sync", "cudaEventSynchronize"), ("Stream Sync", "cudaStreamSynchronize")],
)
def test_a_wait_for_unknown_work_adds_no_edge_with_the_rules_of_hta(path_of, name, api):
    waits = {"wait_on_cuda_event_record_corr_id": 77, "wait_on_stream": 9}
    events = [
        op("outer", 0, 30),
        *(call("cudaLaunchKernel", 1, 2, 5), work("gemm", 4, 5, 5)),
        *(call(api, 10, 10, 6), sync(name, 10, 9, 6, stream=9, **waits)),
    ]
    found = path_of(*events, by=hta.find_path)
    assert SYNC not in found.graph.kind.tolist()
