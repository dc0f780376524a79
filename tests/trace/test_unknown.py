"""Test that unknown values are null with the reason, and device work of all devices."""

import json

import pytest
from builders import kineto_text as k
from builders.opened import open_run
from builders.places import SCHEMAS
from builders.same import same

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto.categories import CATEGORIES, unknown_categories
from fastcomm.formats.kineto.reader import read
from fastcomm.ingest.ingest import ingest, plan
from fastcomm.metrics.computation import compute_metrics
from fastcomm.trace.run_traces import warnings_of_run
from fastcomm.trace.schema import KINDS

SCHEMA = SCHEMAS / "metrics.json"

STEP = k.mark("ProfilerStep#3", 0, 100)
HOST = [STEP, k.event("aten::mm", "cpu_op", 10, 50, pid=100, tid=1)]


def metrics_of(*paths):
    found = compute_metrics(open_run(*paths)).to_dict()
    return json.loads(json.dumps(found))


def breakdown_of(tmp_path, *events):
    return metrics_of(k.write(tmp_path / "rank0.json", [STEP, *events]))["breakdown"]["exact"]


# ------------------------------------------------------------------ warnings of many ranks


def test_counts_in_warnings_are_those_of_the_run(tmp_path):
    kernels = [k.kernel("ncclDevKernel_SendRecv", 5 + 10 * n, 8) for n in range(3)]
    for rank in range(4):
        events = [STEP, *kernels[: 2 if rank < 2 else 3]]
        k.write(tmp_path / f"rank{rank}.json", events, rank=rank, world=4)
    (text,) = [each for each in metrics_of(tmp_path)["warnings"] if "known size" in each]
    assert text.startswith("all 4 ranks together: 10 of 10 communication events have no known")


def test_warnings_of_ranks_are_summed_only_where_their_words_agree():
    unsized = "{} of {} communication events have no known size: {}: no launch; {}: old"
    texts = [
        (0, ["no marks", unsized.format(3, 5, 1, 2)]),
        (1, ["no marks", unsized.format(4, 6, 1, 3), "NCCL 2.25 or newer"]),
        (2, ["no marks", "4 of 4 communication events have no known size: NCCL 2.16"]),
    ]
    assert warnings_of_run(texts) == [
        "no marks",
        f"ranks 0-1 together: {unsized.format(7, 11, 2, 5)}",
        "rank 1: NCCL 2.25 or newer",
        "rank 2: 4 of 4 communication events have no known size: NCCL 2.16",
    ]
    assert warnings_of_run([(0, ["no marks"])], names_all=True) == ["rank 0: no marks"]
    assert warnings_of_run([(0, ["60 gloo: annotations"])]) == ["60 gloo: annotations"]
    assert warnings_of_run([]) == []


# ------------------------------------------------------------------ kinds of device work


@pytest.mark.parametrize(
    ("category", "name", "what"),
    [
        ("kernel", "gemm", "compute"),
        ("Kernel", "gemm", "compute"),
        ("gpu_memcpy", "Memcpy HtoD", "memcpy"),
        ("gpu_memset", "Memset", "memcpy"),
        ("mtia_ccp_events", "fc-dtype_Float", "compute"),
        ("mtia_ccp_events", "dma_request", "memcpy"),
        ("hpu_op", "TPC gelu", "compute"),
        ("hpu_op", "DMA transfer", "memcpy"),
        ("hpu_op", "memcpy_h2d", "memcpy"),
        ("xpu_kernel", "gemm", "compute"),
        ("XPU_MEMCPY", "Memcpy", "memcpy"),
        ("privateuse1_kernel", "MatMul", "compute"),
        ("privateuse1_memset", "Memset", "memcpy"),
        ("PrivateUse1", "aiu_matmul", "compute"),
        ("mlu_memcpy", "MemCpy DtoH", "memcpy"),
        ("GCU_MEMSET", "x", "memcpy"),
    ],
)
def test_work_of_every_device_counts(tmp_path, category, name, what):
    found = breakdown_of(tmp_path, k.event(name, category, 20, 30))
    assert found == {**dict.fromkeys(found, 0), what: 0.3, "idle": 0.7}


def test_a_kernel_named_like_a_copy_is_a_kernel(tmp_path):
    assert breakdown_of(tmp_path, k.event("dma_like_gemm", "kernel", 20, 30))["compute"] == 0.3


@pytest.mark.parametrize("backend", ["xpu", "mtia", "privateuse1", "mlu", "cuda", "hpu"])
def test_a_launch_of_any_runtime_leads_to_its_kernel(tmp_path, backend):
    events = [
        STEP,
        k.event("submit", f"{backend}_runtime", 5, 2, pid=100, tid=1, correlation=9),
        k.kernel("gemm", 20, 30, correlation=9),
    ]
    trace = read(k.write(tmp_path / "rank0.json", events), TraceOptions())
    kinds = [KINDS[kind] for kind in trace.events["kind"].to_pylist()]
    assert sorted(kinds) == ["annotation", "kernel", "runtime"]


def test_all_events_are_read_of_any_device_for_the_critical_path(tmp_path):
    path = k.write(
        tmp_path / "rank0.json",
        [*HOST, k.event("dma_request", "mtia_ccp_events", 20, 30), k.event("x", "foo", 1, 2)],
    )
    trace = read(path, TraceOptions(whole=True))
    kinds = [KINDS[kind] for kind in trace.events["kind"].to_pylist()]
    assert sorted(kinds) == ["annotation", "cpu_op", "memcpy", "other"]


def test_compute_share_on_mtia_equals_hta(kineto):
    found = metrics_of(kineto / "mtia" / "mtia_rank_0.json.gz")
    exact = found["breakdown"]["exact"]
    assert round(exact["compute"], 3) == 0.548
    # HTA: 7 305 596 us of compute in 13 328 347 us, which begin with the first kernel.
    assert exact["compute"] * found["iteration"]["mean_ns"] == pytest.approx(7.3056e9, rel=1e-3)
    assert 0 < exact["memcpy"] < 0.03
    assert found["unknown"] == []


# ------------------------------------------------------------------ none, or not understood


def test_without_device_work_compute_and_idle_time_are_unknown(tmp_path):
    found = metrics_of(k.write(tmp_path / "rank0.json", HOST))
    for shares in found["breakdown"].values():
        assert set(shares.values()) == {None}
    assert found["overlap"] == {"average_overlap_ratio": None, "by_tag": {}}
    assert found["iteration"]["mean_ns"] == 100_000
    for measure in ("compute_ns", "exposed_ns", "idle_ns"):
        assert found["heat"][measure] == [[None]]
    assert found["unknown"] == [
        {
            "what": "compute, communication, overlap and idle time",
            "reason": "no device work",
            "ranks": [0],
        }
    ]
    assert found["findings"] == []
    (warning,) = found["warnings"]
    assert warning.startswith("no device work, so that compute,")
    assert "supported_activities()" in warning


def test_work_of_an_unknown_kind_is_named(tmp_path):
    events = [*HOST, *(k.event("x", f"tpu_{n}", 20, 30) for n in range(7))]
    path = k.write(tmp_path / "rank0.json.gz", events)
    assert unknown_categories(path) == tuple(f"tpu_{n}" for n in range(7))
    found = metrics_of(path)
    assert found["breakdown"]["exact"]["idle"] is None
    assert found["unknown"][0]["reason"] == "device work of an unknown kind"
    assert (
        "'tpu_0', 'tpu_1', 'tpu_2', 'tpu_3', 'tpu_4' and 2 more are not understood"
        in (found["warnings"][0])
    )


def strange(count, dur, cat="xyz_device_op"):
    """Work of a device that no list knows, in place of its compute kernels."""
    return [
        k.event("gemm", cat, 10 + dur * n, dur, correlation=n, stream=7, device=0)
        for n in range(count)
    ]


def test_work_of_an_unknown_category_beside_known_work_makes_its_share_unknown(tmp_path):
    events = [STEP, k.all_reduce(80, 20), *strange(6, 10), k.event("x", "foo", 1, 2)]
    path = k.write(tmp_path / "rank0.json", events)
    found = metrics_of(path)
    assert set(found["breakdown"]["exact"].values()) == {None}
    assert found["heat"]["idle_ns"] == [[None]]
    assert found["unknown"][0]["reason"] == "device work of an unknown kind"
    (said,) = (each for each in found["warnings"] if "not understood" in each)
    assert "6 events that look like device work, 75.0 % of its time" in said
    assert "'xyz_device_op' (6)" in said
    assert "foo" not in said
    ingest(plan([path], tmp_path / "store"))
    same(metrics_of(tmp_path / "store"), found)


def test_a_little_work_of_an_unknown_category_is_a_warning(tmp_path):
    events = [STEP, k.kernel("gemm", 1, 98), *strange(2, 0.1), *strange(1, 0.1, "abc")]
    found = metrics_of(k.write(tmp_path / "rank0.json", events))
    assert found["breakdown"]["exact"]["compute"] == pytest.approx(0.98)
    assert found["unknown"] == []
    (said,) = (each for each in found["warnings"] if "not understood" in each)
    assert "3 events" in said
    assert "'xyz_device_op' (2), 'abc' (1), which" in said
    assert said.endswith("they count neither as compute nor as communication")


def test_work_of_a_category_of_any_length_is_counted(tmp_path):
    name = "a" * 41
    events = [STEP, k.kernel("gemm", 1, 50), *strange(2, 10, name), *strange(1, 10, "abc")]
    found = metrics_of(k.write(tmp_path / "rank0.json", events))
    assert found["breakdown"]["exact"]["compute"] is None
    (said,) = (each for each in found["warnings"] if "not understood" in each)
    assert "3 events" in said
    assert name not in said


def test_work_without_a_category_is_counted(tmp_path):
    events = [STEP, k.kernel("gemm", 1, 50), *strange(2, 10)]
    for each in events[2:]:
        del each["cat"]
    found = metrics_of(k.write(tmp_path / "rank0.json", events))
    assert found["breakdown"]["exact"]["compute"] is None
    assert any("2 events" in each and "without a name" in each for each in found["warnings"])


def test_events_of_an_unknown_category_that_say_no_stream_are_no_device_work(tmp_path):
    events = [STEP, k.kernel("gemm", 20, 30), k.event("x", "foo", 1, 2, correlation=3)]
    found = metrics_of(k.write(tmp_path / "rank0.json", events))
    assert found["breakdown"]["exact"]["idle"] == 0.7
    assert not any("understood" in each for each in found["warnings"])


def test_calls_of_the_runtime_whose_work_is_missing_are_counted(tmp_path):
    found = metrics_of(
        k.write(tmp_path / "rank0.json", [*HOST, k.launch(5, 9), k.launch(7, 8)])
    )
    assert found["breakdown"]["exact"]["compute"] is None
    assert (
        "2 calls of the device's runtime are recorded, and none of the work"
        in (found["warnings"][0])
    )


def test_a_truncated_file_without_device_work_is_warned_of(tmp_path):
    path = k.write(tmp_path / "rank0.json.gz", HOST)
    path.write_bytes(path.read_bytes()[:-6])
    assert unknown_categories(path) == ()


def test_one_rank_without_device_work_does_not_affect_others(tmp_path):
    k.write(tmp_path / "rank0.json", HOST, rank=0, world=2)
    k.write(tmp_path / "rank1.json", [STEP, k.kernel("gemm", 20, 30)], rank=1, world=2)
    found = metrics_of(tmp_path)
    assert found["breakdown"]["exact"]["compute"] == 0.3
    assert found["breakdown"]["spec"]["compute"] == 1
    assert [row["ranks"] for row in found["unknown"]] == [[0]]
    assert any(each.startswith("rank 0: no device work") for each in found["warnings"])


def test_the_schema_allows_unknown_values(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(metrics_of(k.write(tmp_path / "rank0.json", HOST)), schema)


def test_every_category_has_a_kind():
    assert set(CATEGORIES.values()) <= set(range(len(KINDS) + 1))
