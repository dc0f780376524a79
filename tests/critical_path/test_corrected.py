"""Test the corrected rules: decisive constraints, and differences from HTA."""

import json
from dataclasses import replace

import numpy as np
import pytest
from builders import kineto_text as k
from builders.critical_path_traces import documents
from builders.path_events import US, WHOLE, call, op, read, steps, sync, work
from hypothesis import assume, given

from fastcomm.compat import hta
from fastcomm.critical_path.search import analyze
from fastcomm.errors import FastcommError


@given(documents())
def test_the_steps_of_a_path_tile_the_span(folder, document):
    path = folder / "rank0.json"
    path.write_text(json.dumps(document))
    try:
        found = analyze(read(path), replace(WHOLE, data_load_events=["data_load"]))
    except FastcommError:
        return  # an empty trace
    graph = found.graph
    assert (np.diff(graph.time) >= 0).all()
    assert (graph.source < graph.target).all()
    assert (np.diff(graph.target) >= 0).all()
    assert (graph.weight == graph.time[graph.target] - graph.time[graph.source]).all()
    assert set(range(1, len(graph.event))) == set(graph.target.tolist())
    if len(graph.event):
        assert found.valid_path.nodes[0] == 0
        assert found.valid_path.nodes[-1] == len(graph.event) - 1
        assert sum(found.summary_ns().values()) == graph.time[-1] - graph.time[0]
        assert found.length_ns == found.wall_ns
    for edge, slack in zip(found.valid_path.edges.tolist(), found.slack.tolist(), strict=True):
        rivals = np.flatnonzero(graph.target == graph.target[edge])
        times = sorted(graph.time[graph.source[rivals]].tolist())
        assert graph.time[graph.source[edge]] == times[-1]
        assert slack == (times[-1] - times[-2] if len(times) > 1 else -1)


@given(documents())
def test_every_operator_call_load_and_launched_work_has_two_nodes(folder, document):
    path = folder / "rank0.json"
    path.write_text(json.dumps(document))
    try:
        found = analyze(read(path), WHOLE)
    except FastcommError:
        return
    rows = document["traceEvents"]
    # Work on a second device, and the calls that launch it, are another rank's.
    assume(len({row["pid"] for row in rows if row.get("cat") in ("kernel", "gpu_memcpy")}) < 2)
    host = ("cpu_op", "cuda_runtime")
    threads = {(row["pid"], row["tid"]) for row in rows if row.get("cat") in host}
    expected = {
        position
        for position, row in enumerate(rows)
        if row.get("cat") in (*host, "kernel", "gpu_memcpy")
        or (row["name"] == "data_load" and (row["pid"], row["tid"]) in threads)
    }
    ids = found.events.ids(found.graph.event)
    assert sorted(ids.tolist()) == sorted([*expected, *expected])


def test_events_shorter_than_a_microsecond_are_kept(path_of):
    events = [
        op("a", 0.25, 10.5),
        call("cudaLaunchKernel", 1.1, 0.3, 1),
        work("gemm", 20.125, 5, 1),
    ]
    assert path_of(*events, by=hta.find_path).about.clipped == 1
    found = path_of(*events)
    assert found.about.clipped == 3
    assert steps(found) == [
        ("cpu_bound", 0.85, "a"),
        ("gpu_kernel_launch_overhead", 19.025, "gemm"),
        ("gpu_compute_bound", 5, "gemm"),
    ]


def test_all_kernels_of_a_graph_belong_to_its_launch(path_of):
    events = [
        call("cudaGraphLaunch", 0, 5, 1),
        *(work(f"kernel{n}", 10 + 10 * n, 9, 1, stream=7) for n in range(3)),
        work("other", 21, 30, 1, stream=8),
    ]
    assert path_of(*events, by=hta.find_path).about.clipped == 2
    found = path_of(*events)
    assert found.about.clipped == 5
    assert found.graph.counts()["launch"] == 2
    assert steps(found) == [
        ("gpu_kernel_launch_overhead", 10, "kernel0"),
        ("gpu_compute_bound", 9, "kernel0"),
        ("gpu_kernel_kernel_overhead", 2, None),
        ("gpu_compute_bound", 30, "other"),
    ]
    assert found.graph.counts()["inferred"] == 1


def replay(*arrows):
    """Nodes a and c on a stream, b beside them, and a callback; arrows by their names."""
    rows = {
        "a": node("a", 10, 20, 8),
        "b": node("b", 12, 26, 9),
        "c": node("c", 40, 10, 8),
        "HostNode: log": node("HostNode: log", 55, 30, 9, "graph_host_node"),
        "d": node("d", 86, 4, 8),
    }
    halves = []
    for number, (source, target) in enumerate(arrows):
        begin, end = rows[source], rows[target]
        common = {"id": (1 << 40) + number, "cat": "ac2g", "name": "ac2g", "pid": 0}
        halves += [
            {"ph": "s", **common, "tid": begin["tid"], "ts": begin["ts"] + begin["dur"]},
            {"ph": "f", **common, "tid": end["tid"], "ts": end["ts"]},
        ]
    return [call("cudaGraphLaunch", 0, 5, 1), *rows.values(), *halves]


def node(name, ts, dur, stream, cat="kernel"):
    row = work(name, ts, dur, 1, stream, cat=cat)
    row["args"] |= {"graph id": 3, "graph node id": ts}
    return row


CHAIN = [("c", "HostNode: log"), ("HostNode: log", "d")]


@pytest.mark.parametrize(
    ("arrows", "before_c"),
    [
        (
            [("a", "c")],
            [("gpu_compute_bound", 20, "a"), ("gpu_kernel_kernel_overhead", 10, "a")],
        ),
        (
            [("b", "c")],
            [("gpu_compute_bound", 26, "b"), ("gpu_kernel_kernel_overhead", 2, None)],
        ),
    ],
)
def test_nodes_of_a_graph_wait_for_what_their_arrows_say(path_of, arrows, before_c):
    found = path_of(*replay(*arrows, *CHAIN))
    launch = before_c[0][2], 10 if before_c[0][2] == "a" else 12
    assert steps(found) == [
        ("gpu_kernel_launch_overhead", launch[1], launch[0]),
        *before_c,
        ("gpu_compute_bound", 10, "c"),
        ("gpu_kernel_kernel_overhead", 5, None),
        ("cpu_bound", 30, "HostNode: log"),
        ("gpu_kernel_kernel_overhead", 1, None),
        ("gpu_compute_bound", 4, "d"),
    ]
    assert found.graph.counts()["inferred"] == 0


def test_nodes_without_arrows_follow_their_stream(path_of):
    assert steps(path_of(*replay())) == [
        ("gpu_kernel_launch_overhead", 10, "a"),
        ("gpu_compute_bound", 20, "a"),
        ("gpu_kernel_kernel_overhead", 10, "a"),
        ("gpu_compute_bound", 10, "c"),
        ("gpu_kernel_kernel_overhead", 36, "c"),
        ("gpu_compute_bound", 4, "d"),
    ]


def test_lanes_that_hide_streams_tell_no_order(path_of):
    rows = [node("a", 10, 20, 7), node("b", 12, 26, 8), node("c", 40, 10, 7)]
    found = path_of(call("cudaGraphLaunch", 0, 5, 1), *rows)
    assert found.graph.counts()["kernel_kernel"] == 0
    assert ("gpu_compute_bound", 26, "b") in steps(found)


def test_events_that_overlap_on_a_thread_are_closed_by_identity(path_of):
    events = [
        op("A", 10, 50),
        op("B", 40, 50),
        call("cudaLaunchKernel", 70, 5, 1),
    ]
    assert path_of(*events, by=hta.find_path).graph.weight.min() < 0
    assert steps(path_of(*events)) == [
        ("cpu_bound", 30, "A"),
        ("cpu_bound", 20, "B"),
        ("cpu_bound", 10, "B"),
        ("cpu_bound", 5, "cudaLaunchKernel"),
        ("cpu_bound", 15, "B"),
    ]


def test_a_call_that_waits_for_a_lock_is_bound_by_its_holder(path_of):
    events = [
        call("cudaLaunchKernel", 20, 40, tid=1),
        call("cudaLaunchKernel", 30, 50, tid=2),
    ]
    assert steps(path_of(*events)) == [
        ("cpu_bound", 40, "cudaLaunchKernel"),
        ("cpu_bound", 20, "cudaLaunchKernel"),
    ]


def test_any_call_with_device_work_is_a_launch(path_of):
    for name in ("hipModuleLaunchKernel", "cudaLaunchCooperativeKernel", "anything"):
        events = [call(name, 0, 5, 1), work("gemm", 12, 5, 1)]
        assert path_of(*events).summary_ns()["gpu_kernel_launch_overhead"] == 12 * US
        assert (
            "gpu_kernel_launch_overhead" not in path_of(*events, by=hta.find_path).summary_ns()
        )


def test_a_copy_that_its_call_waits_for_binds_the_call(path_of):
    events = [
        call("cudaMemcpy", 0, 50, 1),
        work("Memcpy DtoH", 5, 40, 1, cat="gpu_memcpy"),
        op("next", 55, 5),
    ]
    assert path_of(*events).summary_ns() == {
        "cpu_bound": 5 * US,
        "gpu_kernel_launch_overhead": 5 * US,
        "gpu_memory_bound": 40 * US,
        "host_gap": 5 * US,
        "sync_wait": 5 * US,
    }
    pageable = [
        call("cudaMemcpyAsync", 0, 50, 1),
        work("Memcpy DtoH (Device -> Pageable)", 5, 40, 1, cat="gpu_memcpy"),
    ]
    found = path_of(*pageable)
    assert found.graph.counts()["inferred"] == 1
    assert found.summary_ns()["gpu_memory_bound"] == 40 * US


@pytest.mark.parametrize(
    "name", ["cudaDeviceSynchronize", "hipStreamSynchronize", "cudaEventSynchronize"]
)
def test_without_sync_events_a_blocking_call_waits_for_what_ends_inside_it(path_of, name):
    events = [
        call("cudaLaunchKernel", 0, 5, 1),
        work("gemm", 10, 40, 1),
        call(name, 8, 45),
    ]
    found = path_of(*events)
    assert found.graph.counts()["inferred"] == 1
    assert found.summary_ns() == {
        "gpu_compute_bound": 40 * US,
        "gpu_kernel_launch_overhead": 10 * US,
        "sync_wait": 3 * US,
    }
    assert "no cuda_sync events" in found.about.notes[-1]
    too_late = path_of(*events[:2], call(name, 51, 45))
    assert too_late.graph.counts()["inferred"] == 0


def test_a_call_does_not_wait_for_work_that_another_thread_launches_meanwhile(path_of):
    events = [
        call("cudaLaunchKernel", 0, 5, 1),
        work("awaited", 10, 30, 1),
        call("cudaDeviceSynchronize", 6, 60),
        call("cudaLaunchKernel", 20, 5, 2, tid=2),
        work("other", 36, 19, 2, stream=8),
        op("after", 66, 10),
    ]
    found = path_of(*events)
    assert found.graph.counts()["inferred"] == 1
    assert steps(found)[-3:] == [
        ("gpu_compute_bound", 30, "awaited"),
        ("sync_wait", 26, None),
        ("cpu_bound", 10, "after"),
    ]


def test_equal_stream_numbers_of_two_devices_are_different_streams(path_of):
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        call("cudaLaunchKernel", 3, 2, 2),
        work("a", 10, 90, 1, device=0),
        work("b", 40, 70, 2, device=1),
    ]
    assert path_of(*events, by=hta.find_path).graph.weight.min() == -60 * US
    found = path_of(*events)
    assert found.graph.counts()["kernel_kernel"] == 0
    assert steps(found)[-2:] == [
        ("gpu_kernel_launch_overhead", 37, "b"),
        ("gpu_compute_bound", 70, "b"),
    ]


def test_a_kernel_keeps_all_its_waits(path_of):
    events = []
    for n, stream in ((1, 7), (2, 8)):
        events += [
            call("cudaLaunchKernel", 10 * n, 2, n),
            work(f"k{n}", 10 * n + 5, 50 * n, n, stream=stream),
            call("cudaEventRecord", 10 * n + 4, 1, 10 + n),
            call("cudaStreamWaitEvent", 30 + n, 0.5, 20 + n),
            sync(
                "Stream Wait Event",
                40 + n,
                1,
                20 + n,
                stream=9,
                wait_on_stream=stream,
                wait_on_cuda_event_record_corr_id=10 + n,
            ),
        ]
    events += [call("cudaLaunchKernel", 50, 2, 3), work("joined", 130, 5, 3, stream=9)]
    found = path_of(*events)
    assert found.graph.counts()["sync"] == 2
    assert path_of(*events, by=hta.find_path).graph.counts()["sync"] == 1
    assert steps(found)[-3:] == [
        ("gpu_compute_bound", 100, "k2"),
        ("gpu_kernel_kernel_overhead", 5, None),
        ("gpu_compute_bound", 5, "joined"),
    ]
    assert found.breakdown["slack_ns"].to_pylist()[-2] == (125 - 65) * US


def test_a_stream_and_a_device_that_are_waited_for_bind_the_call(path_of):
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        work("a", 5, 20, 1, stream=7),
        call("cudaLaunchKernel", 3, 2, 2),
        work("b", 6, 30, 2, stream=8),
        call("cudaStreamSynchronize", 8, 20, 3),
        sync("Stream Sync", 9, 18, 3, stream=7),
        call("cudaDeviceSynchronize", 29, 10, 4),
        sync("Context Sync", 30, 8, 4, stream=-1),
        call("cudaDeviceSynchronize", 40, 2, 5),
        sync("Context Sync", 40, 1, 5, stream=-1),
    ]
    found = path_of(*events)
    assert found.graph.counts()["sync"] == 3
    assert found.graph.counts()["inferred"] == 0
    assert found.summary_ns()["gpu_compute_bound"] == 30 * US


def test_a_kernel_follows_the_previous_one_after_any_gap(path_of):
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        call("cudaLaunchKernel", 3, 2, 2),
        work("a", 5, 10, 1),
        work("b", 4000, 10, 2),
    ]
    assert path_of(*events, by=hta.find_path).length_ns < 20 * US
    found = path_of(*events)
    assert found.length_ns == found.wall_ns == 4010 * US


def test_contradictory_constraints_are_dropped_and_counted(path_of):
    events = [
        call("cudaLaunchKernel", 10, 2, 1),
        call("cudaLaunchKernel", 13, 2, 2),
        work("early", 5, 20, 1),
        work("overlapping", 15, 20, 2),
    ]
    found = path_of(*events)
    assert found.about.notes[:2] == (
        "1 constraint ignored, which the measured times contradict: work starts after its "
        "launch",
        "1 constraint ignored, which the measured times contradict: work of a stream runs one "
        "after the other",
    )
    assert found.length_ns == found.wall_ns


def test_waits_without_a_known_cause_are_unexplained(path_of):
    found = path_of(op("a", 0, 10), op("b", 20, 10, tid=2))
    assert steps(found) == [
        ("cpu_bound", 10, "a"),
        ("unexplained", 10, None),
        ("cpu_bound", 10, "b"),
    ]


def hand_over(**words):
    forward = op("aten::linear", 0, 10, **words.get("forward", {}))
    return [
        forward,
        op(words.get("name", "LinearBackward"), 15, 20, tid=2, **words.get("backward", {})),
        op("step", 40, 10),
    ]


@pytest.mark.parametrize(
    "words",
    [
        {
            "forward": {"Sequence_number": 4},
            "backward": {"Sequence_number": 4, "Fwd_thread_id": 1},
        },
        {"name": "autograd::engine"},
    ],
)
def test_a_backward_thread_waits_for_the_thread_that_started_it(path_of, words):
    events = hand_over(**words)
    if "name" in words:
        events[0]["name"] = "forward"
    found = path_of(*events)
    assert [step[0] for step in steps(found)] == [
        "cpu_bound",
        "host_gap",
        "cpu_bound",
        "host_gap",
        "cpu_bound",
    ]
    assert steps(found)[2][1] == 20
    assert found.graph.counts()["unexplained"] == 0


def test_communication_events_follow_the_kernel_table_and_have_tags(path_of):
    events = [
        call("cudaLaunchKernel", 0, 2, 1),
        k.all_reduce(
            5, 10, correlation=1, device=0, stream=20, Process_Group_Description="TP_GROUP"
        ),
        call("cudaLaunchKernel", 3, 2, 2),
        work("void cross_device_reduce_1stage<4>(int)", 20, 10, 2, stream=20),
    ]
    events[1]["pid"] = 0
    found = path_of(*events)
    assert found.summary_ns()["gpu_communication_bound"] == 20 * US
    assert sum(found.by_tag_ns().values()) == 20 * US


def test_data_loading_is_found_by_regular_expression(path_of):
    found = path_of(
        op("enumerate(DataLoader)#next", 0, 10),
        wanted=replace(WHOLE, data_load_events=[r"DataLoader.*next"]),
    )
    assert found.summary_ns() == {"data_loading": 10 * US}
    assert not any("to load data" in note for note in found.about.notes)
    wanted = replace(WHOLE, data_load_events=["zzz"])
    without = path_of(op("enumerate(DataLoader)#next", 0, 10), wanted=wanted)
    assert any("matches 'zzz', to load data" in note for note in without.about.notes)
