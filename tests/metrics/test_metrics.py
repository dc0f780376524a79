"""Test metrics of random runs against the oracle."""

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from builders import kineto_text as k
from builders.examples import in_gate
from builders.opened import open_run
from builders.same import same
from hypothesis import given
from hypothesis import strategies as st
from oracles import kineto as oracle_kineto
from oracles import metrics as oracle_metrics

from fastcomm.errors import ConfigError
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute, compute_metrics
from fastcomm.metrics.options import MetricsOptions
from fastcomm.metrics.partial import Partial, merge

DESCRIPTIONS = {
    "DATA_PARALLEL_GROUP": "DP",
    "TENSOR_MODEL_PARALLEL_GROUP": "TP",
    "PIPELINE_MODEL_PARALLEL_GROUP": "PP",
    "EXPERT_MODEL_PARALLEL_GROUP": "EP",
    "CONTEXT_PARALLEL_GROUP": "CP",
    None: "OTHER",
}
OPS = {
    "allreduce": "AllReduce",
    "_allgather_base": "AllGather",
    "all_to_all": "AllToAll",
    "send": "SendRecv",
    "broadcast": "Broadcast",
}
TIMES = st.tuples(st.integers(0, 300), st.integers(0, 60))


@st.composite
def communication(draw):
    ts, dur = draw(TIMES)
    said = {
        "Collective_name": draw(st.sampled_from(list(OPS))),
        "Group_size": draw(st.integers(1, 8)),
    }
    if draw(st.integers(0, 4)):
        said |= {
            "In_msg_nelems": draw(st.integers(0, 10**9)),
            "dtype": draw(st.sampled_from(["Float", "Byte"])),
        }
        said["Out_msg_nelems"] = said["In_msg_nelems"]
    if description := draw(st.sampled_from(list(DESCRIPTIONS))):
        said["Process_Group_Description"] = description
    return k.kernel("ncclDevKernel_Generic(x)", ts, dur, draw(st.integers(20, 22)), **said)


@st.composite
def work(draw):
    ts, dur = draw(TIMES)
    name, cat = draw(
        st.sampled_from(
            [("gemm", "kernel"), ("Memcpy HtoD", "gpu_memcpy"), ("Memset", "gpu_memset")]
        )
    )
    return k.event(name, cat, ts, dur, tid=7)


def launched(events, at):
    """The events with the calls that launched some of them, `at` these times or None."""
    found = []
    for number, (event, ts) in enumerate(zip(events, at, strict=True)):
        found.append({**event, "args": {**event["args"], "correlation": number}})
        if ts is not None:
            found.append(k.launch(ts, number))
    return found


@st.composite
def rank_events(draw):
    events = draw(st.lists(st.one_of(communication(), work()), max_size=25))
    at = st.sampled_from([st.none(), st.integers(0, 300), st.none() | st.integers(0, 300)])
    times = st.lists(draw(at), min_size=len(events), max_size=len(events))
    events = launched(events, draw(times))
    edges = sorted(draw(st.sets(st.integers(0, 300), min_size=2, max_size=4)))
    gap = draw(st.integers(0, 5))
    marks = [
        k.mark(f"ProfilerStep#{number}", start, max(stop - start - gap, 0))
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    return events + marks


def tag_of(event):
    return DESCRIPTIONS[event["description"]]


RUNS = st.lists(rank_events(), min_size=1, max_size=3)
CLOCKS = st.sampled_from(["auto", "host"])


@given(RUNS, st.sampled_from([None, 25e9]), CLOCKS)
def test_metrics_agree_with_the_definitions(ranks, link, clock):
    with TemporaryDirectory() as folder:
        paths = [
            k.write(Path(folder) / f"rank{rank}.json", events, rank=rank, world=len(ranks))
            for rank, events in enumerate(ranks)
        ]
        options = Config(clock=clock)
        asked = MetricsOptions(link_bandwidth=link and f"{link}B/s")
        found = compute_metrics(open_run(*paths, config=options), asked).to_dict()
        traces = [oracle_kineto.read(path) for path in paths]
    wanted = oracle_metrics.metrics(traces, tag_of, link, clock)
    same(found, wanted)
    assert set(found["volume"]) == set(wanted["volume"])


@in_gate(10)
@given(st.lists(rank_events(), min_size=1, max_size=3), st.randoms())
def test_partials_merge_to_the_same_in_any_order(ranks, random):
    with TemporaryDirectory() as folder:
        for rank, events in enumerate(ranks):
            k.write(Path(folder) / f"rank{rank}.json", events, rank=rank, world=len(ranks))
        run = open_run(folder)
        partials = [Partial.of(run.read(rank)) for rank in run.ranks]
    whole = compute(merge(partials), byte_kind="payload", link=1e9).to_dict()
    random.shuffle(partials)
    stepwise = partials[0]
    for part in partials[1:]:
        stepwise = merge([stepwise, part])
    assert compute(stepwise, byte_kind="payload", link=1e9).to_dict() == whole


def measure(tmp_path, events, **words):
    k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#0", 0, 100), *events])
    return compute_metrics(open_run(tmp_path), MetricsOptions(**words))


def test_the_exact_breakdown_sums_to_the_iteration_to_the_nanosecond(tmp_path):
    events = [k.kernel("gemm", 5, 20), k.all_reduce(20, 20), k.all_reduce(30, 40, stream=21)]
    row = measure(tmp_path, events).tables["iterations"].to_pylist()[0]
    parts = [value for name, value in row.items() if name.startswith("exact_")]
    assert sum(parts) == row["time_ns"] == 100_000


def test_overlapping_communication_makes_specification_idle_negative(tmp_path):
    events = [k.all_reduce(20, 20), k.all_reduce(30, 20, stream=21)]
    spec = measure(tmp_path, events).breakdown.spec
    assert spec["idle"] == pytest.approx(-0.1)
    assert spec["comm_OTHER"] == pytest.approx(0.4)


@pytest.mark.parametrize(("kind", "total"), [("payload", 4000), ("msg", 4000), ("bus", 6000)])
def test_bytes_are_of_the_selected_kind(tmp_path, kind, total):
    found = measure(tmp_path, [k.all_reduce(10, 5)], bytes=kind)
    assert found.volume["OTHER"].comm_bytes == total
    assert found.to_dict()["bytes"] == kind


def test_events_without_duration_or_bytes_are_excluded_and_counted(tmp_path):
    events = [k.all_reduce(10, 5), k.all_reduce(20, 0), k.all_reduce(30, 5, dtype="none")]
    speed = measure(tmp_path, events, link_bandwidth="8Gbit/s").bandwidth["OTHER"]
    assert (speed.events, speed.events_without_bytes, speed.events_without_duration) == (
        3,
        1,
        1,
    )
    assert speed.avg_bw == pytest.approx(4000 / 5e-6)
    assert speed.avg_util == pytest.approx(0.8)
    assert speed.total_bytes == 8000


def test_the_table_of_collectives_is_by_powers_of_two(tmp_path):
    events = [
        k.all_reduce(10 * i, 5, nelems=nelems) for i, nelems in enumerate([255, 256, 511, 512])
    ]
    rows = measure(tmp_path, events).tables["collectives"].to_pylist()
    assert [(row["op"], row["group_size"], row["size_from"], row["count"]) for row in rows] == [
        ("AllReduce", 4, 512, 1),
        ("AllReduce", 4, 1024, 2),
        ("AllReduce", 4, 2048, 1),
    ]
    assert rows[0]["p50_bus_bw"] == pytest.approx(255 * 4 * 1.5 / 5e-6)


def test_only_selected_iterations_count(tmp_path):
    events = [k.mark("ProfilerStep#1", 100, 100), k.all_reduce(110, 5), k.all_reduce(10, 5)]
    found = measure(tmp_path, events, steps=[1])
    assert (found.iterations, found.volume["OTHER"].comm_events) == (1, 1)
    with pytest.raises(ConfigError, match=r"no step 7; the run has 0-1$"):
        measure(tmp_path, events, steps=[7])
    with pytest.raises(ConfigError, match=r"no step 7; the run has 0-1$"):
        measure(tmp_path, events, steps=[1, 7])


def test_iteration_bandwidth_is_bytes_over_the_union(tmp_path):
    events = [k.all_reduce(10, 10), k.all_reduce(15, 10, stream=21)]
    row = measure(tmp_path, events, link_bandwidth="1GB/s").tables["iterations"].to_pylist()[0]
    assert row["iteration_bw"] == pytest.approx(8000 / 15e-6)
    assert row["iteration_util"] == pytest.approx(8000 / 15e-6 / 1e9)


def test_a_rank_without_marks_among_marked_ones_has_no_steps(tmp_path):
    """Rank 1 does half of rank 0's work; its whole trace is no step."""
    for rank in (0, 1):
        marks = [k.mark(f"ProfilerStep#{n}", 100 * n, 100) for n in range(4)]
        works = [k.kernel("gemm", 100 * n, 60 - 30 * rank) for n in range(4)]
        k.write(
            tmp_path / f"rank{rank}.json",
            works if rank else [*marks, *works],
            rank=rank,
            world=2,
        )
    run = open_run(tmp_path)
    metrics = compute_metrics(run, MetricsOptions())
    assert (metrics.iterations, metrics.iteration.mean_ns) == (4, 100_000)
    assert metrics.breakdown.exact["compute"] == 0.6
    assert [rank.rank for rank in metrics.by_rank] == [0]
    (warning,) = [text for text in metrics.warnings if "no iteration marks" in text]
    assert warning.startswith("rank 1: ")
    assert "other ranks have them, so times of its steps are n/a" in warning
    alone = compute_metrics(open_run(tmp_path / "rank1.json"), MetricsOptions())
    assert alone.iterations == 1
