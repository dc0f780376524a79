"""Sums and percentiles of kernels beside their definitions; names and categories of kernels."""

from collections import defaultdict
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import kernels as oracle

from fastcomm.device_work.names import (
    CATEGORIES,
    Distribution,
    KeySums,
    duration_statistics,
    kernel_categories,
    short_label,
    short_name,
)
from fastcomm.device_work.result import Kernels
from fastcomm.device_work.totals import WorkQuestion, WorkTotals, merge
from fastcomm.errors import SchemaError
from fastcomm.trace import schema
from fastcomm.trace.run_traces import ReadRanks
from fastcomm.trace.trace import Meta, Trace

NAMES = ["gemm", "void reduce<4, f>(int)", "void reduce<8, g>(int)", "fill"]


OPS = ["aten::mm", "aten::add", "aten::sum"]


@st.composite
def ranges(draw, kind, names, low=0, high=64):
    """Properly nested ranges of a kind on two threads."""
    events = []
    for thread in (1, 2):
        pending = [(low, high)]
        while pending:
            first, last = pending.pop()
            if last - first < 6 or not draw(st.booleans()):
                continue
            middle = draw(st.integers(first + 2, last - 3))
            name = draw(st.sampled_from(names))
            events.append(
                {"kind": kind, "name": name, "thread": thread, "start": first, "stop": last - 1}
            )
            pending += [(first + 1, middle), (middle + 1, last - 2)]
    return events


@st.composite
def jobs(draw):
    """Events of up to three ranks, and one or two steps of each."""
    events, steps = [], []
    for rank in range(draw(st.integers(1, 3))):
        own = draw(ranges("cpu_op", OPS))
        for correlation in range(draw(st.integers(0, 12))):
            start = draw(st.integers(0, 70))
            own.append(
                {
                    "kind": draw(st.sampled_from(oracle.WORK)),
                    "name": draw(st.sampled_from(NAMES)),
                    "thread": 9,
                    "start": start,
                    "stop": start + draw(st.integers(0, 9)),
                    "correlation": correlation,
                }
            )
            if draw(st.booleans()):
                at, thread = draw(st.integers(0, 64)), draw(st.sampled_from([1, 2]))
                call = {"kind": "runtime", "name": "launch", "thread": thread}
                own.append({**call, "start": at, "stop": at, "correlation": correlation})
        events += [{"correlation": None, **event, "rank": rank} for event in own]
        edge = draw(st.integers(1, 60))
        steps += [(rank, 0, edge), (rank, edge, 65)]
    return events, steps


def trace_of(events, steps, rank):
    """The trace of one rank."""
    own = sorted((e for e in events if e["rank"] == rank), key=lambda event: event["start"])
    windows = [step for step in steps if step[0] == rank]
    threads = [1, 2, 9]
    table = {
        "start": [event["start"] for event in own],
        "stop": [event["stop"] for event in own],
        "kind": [schema.KIND[event["kind"]] for event in own],
        "name": pa.array([event["name"] for event in own], pa.string()).dictionary_encode(),
        "lane": [threads.index(event["thread"]) for event in own],
        "correlation": [event["correlation"] for event in own],
        "offset": [None] * len(own),
    }
    lanes = {
        "process": ["7", "7", "0"],
        "thread": ["1", "2", "9"],
        "device": [None, None, 0],
        "is_device": [False, False, True],
    }
    return Trace.of(
        events=pa.table(table, schema=schema.EVENTS),
        lanes=pa.table(lanes, schema=schema.LANES),
        comm=schema.COMM.empty_table(),
        groups=schema.GROUPS.empty_table(),
        iterations=pa.table(
            {
                "number": list(range(len(windows))),
                "start": [start for _, start, _ in windows],
                "stop": [stop for _, _, stop in windows],
            },
            schema=schema.ITERATIONS,
        ),
        args=pa.table({"sequence": pa.nulls(len(own), pa.int64())}),
        meta=Meta(rank=rank, format="kineto", path=f"rank{rank}.json"),
    )


def result_of(events, windows, by, **question):
    ranks = sorted({rank for rank, _, _ in windows})
    question = WorkQuestion(by=(by,), **question)
    totals = merge([WorkTotals.of(trace_of(events, windows, r), question) for r in ranks])
    return Kernels(
        by=by, totals=totals, read=ReadRanks(ranks=tuple(ranks), expected=len(ranks))
    )


def checked(result, expected):
    rows = {row["name"]: row for row in result.to_arrow().to_pylist()}
    assert rows.keys() == expected.keys()
    for name, row in expected.items():
        assert {key: rows[name][key] for key in row} == pytest.approx(row)
    totals = [row["total_ns"] for row in rows.values()]
    assert totals == sorted(totals, reverse=True)


@given(jobs())
def test_rows_by_name_are_those_of_the_definition(job):
    events, steps = job
    work = oracle.in_steps(events, steps)
    labels = {"gemm": "gemm", "fill": "fill"}
    expected = oracle.summed(work, lambda e: labels.get(e["name"], "reduce<…>"), steps)
    checked(result_of(events, steps, "name"), expected)
    full = oracle.summed(work, lambda e: e["name"], steps)
    checked(result_of(events, steps, "name", full_names=True), full)


@given(jobs())
def test_rows_by_operator_are_those_of_the_definition(job):
    events, steps = job
    work = oracle.in_steps(events, steps)

    def operator(event):
        return oracle.innermost(event, events, "cpu_op") or "(no operator)"

    checked(result_of(events, steps, "operator"), oracle.summed(work, operator, steps))


@given(jobs())
def test_a_step_counts_alone(job):
    events, steps = job
    firsts = [step for step in steps if step[1] == 0]
    work = oracle.in_steps(events, firsts)
    result = result_of(events, steps, "name", steps=(0,), full_names=True)
    checked(result, oracle.summed(work, lambda e: e["name"], firsts))


@given(jobs(), st.randoms())
def test_merging_does_not_depend_on_the_order(job, random):
    events, steps = job
    question = WorkQuestion(by=("name",))
    ranks = sorted({rank for rank, _, _ in steps})
    parts = [WorkTotals.of(trace_of(events, steps, rank), question) for rank in ranks]
    shuffled = random.sample(parts, len(parts))
    one_by_one = shuffled[0]
    for part in shuffled[1:]:
        one_by_one = merge([one_by_one, part])
    assert one_by_one == merge(parts)


@given(jobs())
def test_rows_of_ranks_add_up(job):
    events, steps = job
    result = result_of(events, steps, "name")
    sums = defaultdict(int)
    for row in result.by_rank().to_pylist():
        sums[row["name"]] += row["total_ns"]
    rows = result.to_arrow()
    assert sums == dict(
        zip(rows["name"].to_pylist(), rows["total_ns"].to_pylist(), strict=True)
    )
    assert sum(result.by_category.values()) == sum(sums.values())


@given(jobs())
def test_categories_run_while_any_of_their_events_does(job):
    events, steps = job
    result = result_of(events, steps, "name")
    work = oracle.in_steps(events, steps)

    def category_of(event):
        return kernel_categories((event["name"],))[0] if event["kind"] == "kernel" else "copy"

    assert result.running_ns == oracle.running(work, category_of)


DURATIONS = st.lists(st.integers(0, 2**11) | st.integers(0, 2**45), min_size=1, max_size=40)


@given(DURATIONS, st.sampled_from([0, 5, 50, 95, 99, 100]))
def test_percentiles_are_numpys_of_durations_of_eleven_bits(values, percent):
    key = np.zeros(len(values), np.int32)
    sums = KeySums.of(key, np.array(values), 1)
    durations = Distribution.of(key, np.array(values), sums)
    rounded = [oracle.rounded(value) for value in values]
    assert durations.percentile(percent)[0] == pytest.approx(np.percentile(rounded, percent))
    exact = np.percentile(values, percent)
    assert durations.percentile(percent)[0] == pytest.approx(exact, rel=5e-4)
    assert (sums.count[0], sums.total[0]) == (len(values), sum(values))
    assert (sums.least[0], sums.most[0]) == (min(values), max(values))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**45)), max_size=40))
def test_sparse_and_dense_distributions_are_equal(events):
    key = np.array([key for key, _ in events], np.int32)
    duration = np.array([duration for _, duration in events], np.int64)
    sums = KeySums.of(key, duration, 4)
    with mock.patch("fastcomm.device_work.names._CELLS", 1 << 20):
        dense = Distribution.of(key, duration, sums)
    with (
        mock.patch("fastcomm.device_work.names._FEW", -1),
        mock.patch("fastcomm.device_work.names._CELLS", 0),
    ):
        sparse = Distribution.of(key, duration, sums)
    for name in ("first", "bucket", "number"):
        np.testing.assert_array_equal(getattr(dense, name), getattr(sparse, name))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 99)), min_size=1))
def test_statistics_of_a_table_are_those_of_pandas(events):
    frame = pd.DataFrame(events, columns=["name", "duration_ns"])
    found = duration_statistics(pa.Table.from_pandas(frame, preserve_index=False)).to_pandas()
    groups = frame.groupby("name")["duration_ns"]
    expected = pd.DataFrame(
        {
            "count": groups.count(),
            "total_ns": groups.sum(),
            "mean_ns": groups.mean(),
            "p95_ns": groups.quantile(0.95),
        }
    )
    found = found.set_index("name").loc[expected.index, list(expected.columns)]
    np.testing.assert_allclose(found.to_numpy(float), expected.to_numpy(float))


def test_impossible_events_are_refused():
    for table, message in (
        ({"name": ["a"]}, "need a column duration_ns"),
        ({"name": [None], "duration_ns": [1]}, "need a column name without nulls"),
        ({"name": ["a"], "duration_ns": [-1]}, "negative"),
        ({"name": ["a", "a"], "duration_ns": [2**62, 2**62]}, "146 years"),
    ):
        with pytest.raises(SchemaError, match=message):
            duration_statistics(pa.table(table))


@pytest.mark.parametrize(
    ("name", "short", "kind"),
    [
        ("void at::native::reduce_kernel<512, 1, R<a<b>>>(R)", "at::native::reduce_kernel<…>",
         "reduction"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_Generic",
         "other"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 2>(float*)",
         "at::native::CatArrayBatchedCopy<…>", "elementwise"),
        ("std::enable_if<((8)>(0)), void>::type vllm::rms_norm_kernel<c10::BFloat16>(int)",
         None, "normalization"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 7>(int)",
         "internal::gemvx::kernel<…>", "GEMM"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(Params)",
         "cutlass_80_simt_sgemm_128x32_8x5_nn_align1", "GEMM"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<M> > >(P)",
         "flash::FlashAttnFwdSm90<…>", "attention"),
        ("void cutlass::device_kernel<cutlass::gemm::GemmGroupedUniversal<wgrad> >(Params)",
         "cutlass::gemm::GemmGroupedUniversal<…>", "GEMM"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32", "sm80_xmma_fprop_implicit_gemm_tf32f32",
         "convolution"),
        ("nvjet_tst_64x64_64x16_2x1", "nvjet_tst_64x64_64x16_2x1", "GEMM"),
        ("max_pool_forward_nchw<float>(int)", "max_pool_forward_nchw<…>", "pooling"),
        ("cudnn::pooling_fw_4d_kernel", "cudnn::pooling_fw_4d_kernel", "pooling"),
        ("pooled_emb_kernel", "pooled_emb_kernel", "embedding and indexing"),
        ("fbgemm_gpu::permute_indices_weights_kernel<true>(int)",
         "fbgemm_gpu::permute_indices_weights_kernel<…>", "embedding and indexing"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0", "fused"),
        ("operator<<(int", "operator<<(int", "other"),
        ("f<", "f<", "other"),
        ("()", "()", "other"),
        ("", "", "other"),
    ],
)  # fmt: skip
def test_a_name_is_shortened_and_has_a_category(name, short, kind):
    assert short_name(name) == short or short is None
    assert kernel_categories((name,)) == (kind,)


@given(st.text("<>()ab: ,*", max_size=30))
def test_any_name_has_a_short_one_and_a_category(name):
    assert len(short_name(name)) <= len(name) + 4
    assert short_name(name) or not name
    assert set(kernel_categories((name,))) <= set(CATEGORIES)


def test_the_number_of_an_annotation_is_folded():
    assert short_label("ProfilerStep#12") == "ProfilerStep#N"
    assert short_label("layer 3") == "layer 3"
