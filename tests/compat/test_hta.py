"""Test the rules of HolisticTraceAnalysis against its results and the oracle."""

import json

import numpy as np
import pytest
from builders import golden_critical_path as golden
from builders.critical_path_traces import documents, row
from hypothesis import assume, example, given
from hypothesis import strategies as st
from oracles import critical_path as oracle

from fastcomm.compat import hta_graph
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.graph.graph import LongestPath, longest_path

KINDS = ("OPERATOR_KERNEL", "DEPENDENCY", "KERNEL_LAUNCH_DELAY", "KERNEL_KERNEL_DELAY")
KINDS = (*KINDS, "SYNC_DEPENDENCY")
SIDE = ("start", "end")


def searched(weight):
    return np.where(weight <= -1000, 0, weight)


def lines(trace, linked, clipped, graph, path):
    """What the reference's hashes are made of."""
    position = trace.args["position"].to_numpy()
    ids = position[graph.event].tolist()
    side = graph.is_end.tolist()
    owner = [position[row] if row >= 0 else "-" for row in graph.owner.tolist()]
    edges = sorted(
        zip(
            graph.source.tolist(),
            graph.target.tolist(),
            graph.kind.tolist(),
            graph.weight.tolist(),
            owner,
            strict=True,
        )
    )
    return {
        "clipped": sorted(linked.rows.position[clipped.rows].tolist()),
        "nodes": [
            f"{id_} {SIDE[end]} {ts // 1000}"
            for id_, end, ts in zip(ids, side, graph.time.tolist(), strict=True)
        ],
        "edges": [f"{u} {v} {KINDS[k]} {w // 1000} {o}" for u, v, k, w, o in edges],
        "path": [f"{ids[n]} {SIDE[side[n]]}" for n in path.nodes.tolist()],
    }


@pytest.mark.compiled
@golden.each_case()
def test_graph_and_path_are_those_of_the_reference(case):
    trace = reader.read(golden.trace_of(case), TraceOptions(whole=True))
    linked = hta_graph.linked(trace)
    assert len(linked.rows) == case["rows_after_trimming"]
    clipped = hta_graph.clip(linked, case["annotation"], golden.instance_of(case))
    graph = hta_graph.build(
        clipped, case["data_load_events"] or (), zero_launches=case["zero_weight_launch_edges"]
    )
    path = longest_path(graph, searched(graph.weight))
    assert graph.connected_nodes == case["nodes_in_graph"]
    found = lines(trace, linked, clipped, graph, path)
    assert {key: golden.digest(text) for key, text in found.items()} == case["sha256"]


def oracle_lines(graph, path):
    """The oracle's graph in the same words."""
    nodes = [f"{id_} {SIDE[end]} {ts}" for ts, id_, end in graph.nodes]
    return {
        "clipped": [row.id for row in graph.clipped],
        "nodes": nodes,
        "edges": [
            f"{u} {v} {kind} {weight} {owner if owner not in (None, -1) else '-'}"
            for (u, v), (kind, weight) in sorted(graph.edges.items())
            for owner in [graph.attributed.get((u, v))]
        ],
        "path": None
        if path is None
        else [f"{graph.nodes[n][1]} {SIDE[graph.nodes[n][2]]}" for n in path],
    }


def synchronized():
    """Work behind which an event is recorded, and all that may wait for it."""
    lane, stream = (1, 100), (7, 0)
    rows = []
    for n, name in enumerate(("cudaLaunchKernel", "cudaLaunchKernel")):
        rows += [
            row("cuda_runtime", name, lane, (2 + 3 * n, 2), correlation=1 + n),
            row("kernel", "gemm", (7 + n, 0), (10 + n, 20), stream=7 + n, correlation=1 + n),
        ]
    rows.append(row("cuda_runtime", "cudaEventRecord", lane, (8, 1), correlation=3))
    waits = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 3}
    for n, (name, call) in enumerate(
        (
            ("Event Sync", "cudaEventSynchronize"),
            ("Stream Sync", "cudaStreamSynchronize"),
            ("Context Sync", "cudaDeviceSynchronize"),
            ("Stream Wait Event", "cudaStreamWaitEvent"),
        )
    ):
        args = {"stream": 8 if n == 3 else 7, "correlation": 4 + n, **waits}
        rows += [
            row("cuda_runtime", call, lane, (31 + 5 * n, 3), correlation=4 + n),
            row("cuda_sync", name, stream, (31 + 5 * n, 2), **args),
        ]
    rows += [
        row("cuda_runtime", "cudaLaunchKernel", lane, (55, 2), correlation=9),
        row("kernel", "late", (8, 0), (60, 5), stream=8, correlation=9),
        row("cuda_runtime", "cudaLaunchKernel", lane, (58, 2), correlation=10),
        row("kernel", "later", (8, 0), (2000, 5), stream=8, correlation=10),
    ]
    mark = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0}
    return {"traceEvents": [mark, *rows]}


def without_nodes():
    """The same, but that the calls are none, and what waits is no waiting row."""
    document = synchronized()
    rows = document["traceEvents"][1:]
    for each in rows:
        if each["cat"] == "cuda_runtime" and each["name"] != "cudaEventRecord":
            each["cat"] = "python_function"
    rows.append(row("overhead", "Event Sync", (1, 100), (70, 5), correlation=4))
    rows += [
        row("cuda_runtime", "cudaStreamWaitEvent", (1, 100), (49, 2), correlation=30),
        row("cuda_sync", "Stream Wait Event", (7, 0), (50, 1), stream=7, correlation=30),
    ]
    # A stream that nothing has run on, and a device that is waited for before all work.
    for n, name in enumerate(("Stream Sync", "Context Sync")):
        args = {"stream": 40, "correlation": 20 + n}
        rows.append(row("cuda_runtime", "cudaDeviceSynchronize", (2, 100), (1, 2), **args))
        del rows[-1]["args"]["stream"]
        rows.append(row("cuda_sync", name, (40, 0), (1, 1), **args))
    return document | {"traceEvents": [document["traceEvents"][0], *rows]}


@example(synchronized(), "", True)
@example(without_nodes(), "", True)
@example(without_nodes(), "", False)
@example(synchronized(), "", False)
@given(documents(), st.sampled_from(["", "ProfilerStep", "aten"]), st.booleans())
def test_any_trace_gives_the_graph_of_the_definition(folder, document, annotation, zero):
    instance = 0
    try:
        expected, path, _ = oracle.analyze(document, annotation, instance, ["data_load"], zero)
    except ValueError:
        return  # no such instance
    path_of = folder / "rank0.json"
    path_of.write_text(json.dumps(document))
    trace = reader.read(path_of, TraceOptions(whole=True))
    # A device with hardly any work is no rank, where HTA takes all devices for one.
    assume(not any("its work is left out" in text for text in trace.meta.warnings))
    linked = hta_graph.linked(trace)
    clipped = hta_graph.clip(linked, annotation, instance)
    graph = hta_graph.build(clipped, ["data_load"], zero_launches=zero)
    found = longest_path(graph, searched(graph.weight))
    if found is None:
        assert oracle.longest_path(expected) is None
        found = LongestPath(nodes=np.empty(0, np.int32), edges=np.empty(0, np.int32))
        path = []
    elif path is None:
        path = oracle.longest_path(expected)
    assert lines(trace, linked, clipped, graph, found) == oracle_lines(expected, path)
