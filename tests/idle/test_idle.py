"""Test why a device is idle: random traces against the oracle, and single cases."""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from builders import kineto_text as k
from builders.idle_host import faulty
from builders.opened import open_run
from builders.places import JOBS
from builders.shared_data import needs, path_of
from hypothesis import given
from hypothesis import strategies as st
from oracles import idle as oracle_idle
from oracles import kineto as oracle_kineto
from oracles.metrics import device_events

from fastcomm.compat.hta import get_idle_time_breakdown
from fastcomm.idle.causes import BY_CAUSE, CAUSES, GARBAGE, LOADING
from fastcomm.idle.intervals import idle_times
from fastcomm.idle.totals import cause_of_longer
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.metrics.partial import Partial
from fastcomm.trace.events import EventColumns

HTA = path_of("critical_path/hta_metrics.json")

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
GROUPS = ({}, {"Process_Group_Description": "mesh_pp", "Process_Group_Name": "1"})


@st.composite
def traces(draw):
    """Events of a rank: work with and without launches, and what two threads do."""
    events, group = [], draw(st.sampled_from(GROUPS))
    for number in range(draw(st.integers(1, 8))):
        ts, dur = draw(TIMES), draw(st.sampled_from([0, 3, 20, 90]))
        kernel = draw(st.sampled_from([k.kernel, k.kernel, None]))
        made = (
            k.all_reduce(ts, dur, **group)
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
    for _ in range(draw(st.integers(0, 2))):
        node = k.event(
            "HostNode: log", "graph_host_node", draw(TIMES), draw(st.integers(0, 60)), 0, 9
        )
        events.append(node)
    edges = sorted(draw(st.sets(st.integers(0, 900), min_size=2, max_size=3)))
    marks = [
        k.mark(f"ProfilerStep#{number}", start, stop - start)
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    return draw(st.permutations(events + marks))


def is_nested(events):
    """Whether calls of a thread are nested or apart; profilers write nothing else."""
    calls = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == 100]
    return not any(
        one[0] == two[0] and one[1] < two[1] < one[2] < two[2] for one in calls for two in calls
    )


@given(traces(), st.booleans())
def test_causes_agree_with_the_definition(events, whole):
    with TemporaryDirectory() as folder:
        path = k.write(Path(folder) / "rank0.json", events)
        trace = open_run(path).read(0, "all" if whole else "work")
        said = oracle_kineto.read(path)
    for table in (trace.iterations, trace.on_device_clock().iterations):
        found = idle_times(trace, table)
        windows = [(row["start"], row["stop"]) for row in table.to_pylist()]
        ns, names = oracle_idle.causes(said, windows)
        expected = [[ns[step, cause] for cause in CAUSES] for step in range(len(windows))]
        assert found.ns.tolist() == expected
        for key, of_key in names.items() if is_nested(events) else ():
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


@pytest.mark.parametrize(
    "fault", ["launch_bound", "synchronization", "kernel_gaps", "data_loading"]
)
def test_planted_idle_time_is_named_with_its_cost(fault, tmp_path):
    events, planted = faulty(fault)
    k.write(tmp_path / "rank0.json", events)
    metrics = compute_metrics(open_run(tmp_path), MetricsOptions())
    table = metrics.tables["iterations"]
    named = sum(table[f"idle_{fault}_ns"].to_pylist())
    assert named == pytest.approx(1000 * planted, rel=0.1)
    assert named >= 0.9 * sum(table["exact_idle_ns"].to_pylist())
    assert sum(metrics.idle.values()) == pytest.approx(metrics.breakdown.exact["idle"])
    (finding,) = (each for each in metrics.findings if each.kind == "idle")
    assert finding.value("idle_cause") == fault


def test_a_finding_names_the_loader_and_what_to_try(tmp_path):
    k.write(tmp_path / "rank0.json", faulty("data_loading")[0])
    text = compute_metrics(open_run(tmp_path), MetricsOptions()).findings[0].text
    assert "for the data loader (mostly in enumerate(DataLoader)#_Iter.__next__); try" in text


def test_the_operator_around_a_synchronizing_call_is_its_evidence(tmp_path):
    k.write(tmp_path / "rank0.json", faulty("synchronization")[0])
    metrics = compute_metrics(open_run(tmp_path), MetricsOptions())
    names = {entry.name for entry in metrics.idle_names if entry.cause == "synchronization"}
    assert names == {"aten::item"}


def test_work_without_a_recorded_launch_is_why_a_cause_is_unknown(tmp_path):
    events, _ = faulty("kernel_gaps")
    for event in events:
        if event["cat"] == "kernel":
            event["args"]["correlation"] += 1000
    k.write(tmp_path / "rank0.json", events)
    metrics = compute_metrics(open_run(tmp_path), MetricsOptions())
    names = [(entry.cause, entry.name) for entry in metrics.idle_names]
    assert names == [("unknown", "gemm")]
    (text,) = (each.text for each in metrics.findings if each.kind == "idle")
    assert "for an unknown reason (launches of gemm are not recorded); try" in text


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("b200_vllm", "host_work"),
        ("dlrm_8rank", "launch_bound"),  # one rank is late, too
        ("sampled_2of128", "kernel_gaps"),
    ],
)
def test_the_first_finding_of_a_mostly_idle_run_names_the_cause(real, name, cause):
    found = compute_metrics(open_run(real(name)))
    assert found.breakdown.exact["idle"] > 0.5
    assert found.findings[0].kind == "idle"
    assert found.findings[0].value("idle_cause") == cause


REAL = [
    *("b200_vllm", "dlrm_8rank", "gloo_4rank", "h100_qwen", "mi300_resnet", "mtia"),
    *("nccl_2rank_rank0.json.gz", "sampled_2of128", "trace_diff/control.json.gz"),
    "trace_diff/test.json.gz",
]


@pytest.mark.parametrize("name", REAL)
def test_causes_of_real_idle_time_sum_to_it_exactly(real, name):
    found = compute_metrics(open_run(real(name)))
    rows = found.tables["iterations"].to_pylist()
    assert rows
    for row in rows:
        assert sum(row[f"idle_{cause}_ns"] for cause in CAUSES) == row["exact_idle_ns"]
    assert sum(found.idle.values()) == pytest.approx(found.breakdown.exact["idle"], rel=1e-12)


def test_busy_and_idle_time_are_those_of_tracelens(real):
    path = real("h100_qwen")
    with (path / "tracelens_timeline.csv").open() as file:
        expected = {row["type"]: float(row["h100::time ms"]) for row in csv.DictReader(file)}
    (row,) = compute_metrics(open_run(path)).tables["iterations"].to_pylist()
    trace = oracle_kineto.read(next(path.glob("*.json.gz")))
    (mark,) = oracle_kineto.iterations(trace)
    work = [(start, at) for start, _, at in device_events(trace) if at is not None]
    first = min(start for start, at in work if at >= mark["start"])
    # TraceLens looks from the first work of the step, with floating-point microseconds since
    # the epoch; the step begins where the work before it ends, and waits for its own.
    waited = (first - row["start_ns"]) / 1e6
    assert waited > 0.2
    assert row["time_ns"] / 1e6 == pytest.approx(expected["total_time"] + waited, rel=1e-5)
    assert row["exact_idle_ns"] / 1e6 == pytest.approx(expected["idle_time"] + waited, rel=1e-5)
    # TraceLens counts sets of memory as computation.
    busy = row["exact_compute_ns"] + row["exact_memcpy_ns"]
    assert busy / 1e6 == pytest.approx(expected["busy_time"], rel=1e-5)


@pytest.mark.parametrize("steps", [None, (1,)])
def test_metrics_of_a_store_have_the_same_causes(steps, tmp_path):
    (tmp_path / "traces").mkdir()
    k.write(tmp_path / "traces" / "rank0.json", faulty("synchronization")[0])
    ingest(plan([tmp_path / "traces"], tmp_path / "store"))
    options = MetricsOptions(steps=steps)
    found, stored = (
        compute_metrics(open_run(tmp_path / name), options) for name in ("traces", "store")
    )
    assert stored.to_dict() == found.to_dict()
    assert stored.tables["idle_evidence"].equals(found.tables["idle_evidence"])


@pytest.mark.parametrize(
    ("job", "cause", "ranks"), [("ddp-loader", "data_loading", [2]), ("ddp-gc", "python", None)]
)
def test_planted_idle_time_of_a_real_job_is_named(job, cause, ranks):
    def mean_ns(part, column):
        run = open_run(JOBS / job / part)
        table = compute_metrics(run, MetricsOptions()).tables["iterations"].to_pylist()
        return np.mean([row[column] for row in table if ranks is None or row["rank"] in ranks])

    longer, named = (
        mean_ns("faulty", column) - mean_ns("clean", column)
        for column in ("exact_idle_ns", f"idle_{cause}_ns")
    )
    assert named >= 0.9 * longer > 0


@needs("critical_path", "kineto")
@pytest.mark.parametrize("name", ["simple_add", "alexnet", "cuda_event_sync", "nccl_data"])
def test_idle_times_are_those_of_hta(name):
    case = json.loads(HTA.read_text())[name]
    folder = HTA.parents[1] / "kineto" if name == "nccl_data" else HTA.parent
    path = folder / Path(case["trace"]).name
    found = get_idle_time_breakdown(path, case["idle_time_breakdown"][0]["rank"]).to_pylist()
    assert sorted(map(str, found)) == sorted(map(str, case["idle_time_breakdown"]))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", LOADING),
        ("torch/utils/data/dataloader.py(701): __next__", LOADING),
        ("train.py(3): load_data", LOADING),
        ("get_batch", LOADING),
        ("/home/me/dataloader_project/train.py(10): forward", None),
        ("offload_batch", None),
        ("load_batch_norm", None),
        ("gc_collect", GARBAGE),
        ("<built-in function collect> gc.collect", GARBAGE),
    ],
)
def test_names_of_ranges_tell_loading_and_garbage_collection(name, rule):
    rules = [own for own in (LOADING, GARBAGE) if re.search(own.pattern, name)]
    assert rules == ([] if rule is None else [rule])


def test_every_cause_is_described():
    assert tuple(BY_CAUSE) == CAUSES


def launched_by(threads):
    """Kernels with pauses between, each launched by a thread of its own."""
    yield k.mark("ProfilerStep#0", 0, 20 * threads + 40)
    for at in range(threads):
        yield k.launch(10 + 20 * at, 1 + at, dur=5, tid=100 + at)
        yield k.kernel("gemm", 20 + 20 * at, 10, correlation=1 + at)


def test_the_rows_considered_grow_with_the_threads_that_launch(tmp_path, monkeypatch):
    considered = []
    of_kind = EventColumns.of_kind

    def counted(self, *kinds, rows=None):
        considered.append(len(self) if rows is None else len(rows))
        return of_kind(self, *kinds, rows=rows)

    totals = []
    for threads in (50, 200):
        path = k.write(tmp_path / f"{threads}.json", [*launched_by(threads)])
        monkeypatch.setattr(EventColumns, "of_kind", counted)
        compute_metrics(open_run(path), MetricsOptions())
        monkeypatch.undo()
        totals.append(sum(considered))
        considered.clear()
    assert totals[1] < 5 * totals[0]


@pytest.mark.parametrize(("longer", "cause"), [(60, "a"), (61, None)])
def test_a_cause_explains_at_least_half_of_a_longer_idle_time(longer, cause):
    by_rank = {0: {"a": 50.0, "b": 30.0}, 1: {"a": 20.0, "b": 10.0}, 2: {"a": 20.0, "b": 10.0}}
    ns = None if cause is None else 50.0
    assert cause_of_longer(by_rank, 0, (1, 2), longer) == (cause, ns)
    assert cause_of_longer(by_rank, 3, (1, 2), longer) == (None, None)
