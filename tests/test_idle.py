"""Test why a device is idle: random traces against the oracle, and single cases."""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import kineto_text as k
import numpy as np
import oracle_idle
import oracle_kineto
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.metrics import Partial
from fastcomm.readers.runs import OpenOptions, open_run
from fastcomm.trace.idle import idle_times
from fastcomm.trace.schema import CAUSES

HOST = (
    ("cudaStreamSynchronize", "cuda_runtime"),
    ("cudaMemcpy", "cuda_runtime"),
    ("cudaMalloc", "cuda_runtime"),
    ("cudaLaunchKernel", "cuda_runtime"),
    ("aten::mm", "cpu_op"),
    ("enumerate(DataLoader)#_Iter.__next__", "user_annotation"),
    ("forward", "user_annotation"),
    ("gc.collect", "user_annotation"),
    ("model.py(3): forward", "python_function"),
    ("barrier", "user_annotation"),
)
TIMES = st.integers(0, 800)


@st.composite
def traces(draw):
    """Events of a rank: work with and without launches, and what two threads do."""
    events = []
    for number in range(draw(st.integers(1, 8))):
        ts, dur = draw(TIMES), draw(st.sampled_from([0, 3, 20, 90]))
        kernel = draw(st.sampled_from([k.kernel, k.kernel, None]))
        made = (
            k.all_reduce(ts, dur)
            if kernel is None
            else kernel(f"gemm{number % 3}", ts, dur, draw(st.integers(7, 8)))
        )
        made["args"]["correlation"] = number
        events.append(made)
        if draw(st.integers(0, 5)):
            at = max(ts - draw(st.integers(-5, 250)), 0)
            events.append(
                k.launch(at, number, draw(st.integers(0, 30)), draw(st.integers(1, 2)))
            )
    for _ in range(draw(st.integers(0, 8))):
        name, cat = draw(st.sampled_from(HOST))
        dur = draw(st.sampled_from([0, 5, 30, 120, 300]))
        events.append(
            k.event(name, cat, draw(TIMES), dur, pid=100, tid=draw(st.integers(1, 2)))
        )
    edges = sorted(draw(st.sets(st.integers(0, 900), min_size=2, max_size=3)))
    marks = [
        k.mark(f"ProfilerStep#{number}", start, stop - start)
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    return draw(st.permutations(events + marks))


@given(traces(), st.booleans())
def test_causes_agree_with_the_definition(events, whole):
    with TemporaryDirectory() as folder:
        path = k.write(Path(folder) / "rank0.json", events)
        trace = open_run(path, options=OpenOptions(whole=whole)).read(0)
        said = oracle_kineto.read(path)
    for table in (trace.iterations, trace.on_device_clock().iterations):
        found = idle_times(trace, table)
        windows = [(row["start"], row["stop"]) for row in table.to_pylist()]
        ns, names = oracle_idle.causes(said, windows)
        expected = [[ns[step, cause] for cause in CAUSES] for step in range(len(windows))]
        assert found.ns.tolist() == expected
        for key, of_key in names.items():
            rows = [
                row
                for row in found.evidence.to_pylist()
                if (row["step"], CAUSES[row["cause"]]) == key
            ]
            assert all(of_key[row["name"]] == row["ns"] for row in rows)
            assert [row["ns"] for row in sorted(rows, key=lambda row: -row["ns"])] == sorted(
                of_key.values(), reverse=True
            )[:3]


@given(traces())
def test_causes_sum_to_the_idle_time_of_each_step(events):
    with TemporaryDirectory() as folder:
        trace = open_run(k.write(Path(folder) / "rank0.json", events)).read(0)
    for by_host in (True, False):
        windows = trace.iterations if by_host else trace.on_device_clock().iterations
        idle = Partial.of(trace, by_host=by_host).iterations["exact_idle_ns"].to_numpy()
        assert np.array_equal(idle_times(trace, windows).ns.sum(axis=1), idle)
