"""Test the oracle on published numbers and on cases computed by hand."""

import json
import random
from collections import Counter
from decimal import Decimal
from functools import cache

import pytest
from oracles.kineto import comm_events, is_compute, iterations, nanoseconds, read, table_row
from oracles.metrics import metrics, percentile, phases_of, segments
from oracles.sizes import bus_bytes, element_size, message_and_payload, operation

read_once = cache(read)


def everything_is_dp(_event):
    return "DP"


def covered(intervals, *others):
    """Length of what `intervals` cover, and each of `others` too, in all of time."""
    sets = (intervals, *others)
    labeled = [(*pair, i) for i, pairs in enumerate(sets) for pair in pairs]
    times = [t for start, stop, _ in labeled for t in (start, stop)]
    parts = segments(labeled, min(times), max(times))
    return sum(span for span, active in parts if len(active) == len(sets))


def pairs(events, start=None, stop=None):
    found = [(e["start"], e["stop"]) for e in events]
    if start is None:
        return found
    return [(max(a, start), min(b, stop)) for a, b in found if max(a, start) < min(b, stop)]


def starting_in(events, step):
    return [e for e in events if step["start"] <= e["start"] < step["stop"]]


# ---------------------------------------------------------------- formats.md 9


@pytest.fixture(scope="module")
def nccl(kineto):
    return read_once(kineto / "nccl_2rank_rank0.json.gz")


@pytest.fixture(scope="module")
def dlrm(kineto):
    return [read_once(path) for path in sorted((kineto / "dlrm_8rank").glob("*.json.gz"))]


@pytest.fixture(scope="module")
def sampled(kineto):
    return [read_once(path) for path in sorted((kineto / "sampled_2of128").glob("*.json.gz"))]


@pytest.fixture(scope="module")
def gloo(kineto):
    return [read_once(path) for path in sorted((kineto / "gloo_4rank").glob("*.json.gz"))]


def test_nccl_2rank_has_its_known_metadata(nccl):
    kinds = Counter(e["cat"] for e in nccl["events"])
    assert nccl["count"] == 40_573
    assert (kinds["kernel"], kinds["gpu_memcpy"], kinds["gpu_memset"]) == (2_700, 960, 114)
    assert (nccl["rank"], nccl["world_size"]) == (0, 2)
    kernels = [e for e in nccl["events"] if e["cat"] == "kernel"]
    assert min(e["start"] for e in kernels) == 1_716_423_322_422_880_181
    assert max(e["stop"] for e in kernels) == 1_716_423_323_083_431_186


def test_nccl_2rank_has_its_known_communication(nccl):
    events = comm_events(nccl)
    assert Counter(e["op"] for e in events) == {"AllReduce": 15, "Broadcast": 6}
    payload = Counter()
    for event in events:
        payload[event["op"]] += event["payload_bytes"]
        assert event["bus_bytes"] == event["msg_bytes"] == event["payload_bytes"]
        assert (event["group_ranks"], event["group_size"]) == ([0, 1], 2)
        assert event["description"] == "default_pg"
        assert event["stream"] == 40
    assert payload == {"AllReduce": 306_684_384, "Broadcast": 638_712}


def test_nccl_2rank_has_its_known_steps(nccl):
    steps = iterations(nccl)
    assert [step["number"] for step in steps] == [4, 5, 6]
    assert {step["source"] for step in steps} == {"ProfilerStep"}
    lengths = [step["stop"] - step["start"] for step in steps]
    assert lengths == [222_442_191, 219_726_905, 224_936_243]
    comm = comm_events(nccl)
    compute = [e for e in nccl["events"] if is_compute(e)]
    found = []
    for step in steps:
        a = pairs(comm, step["start"], step["stop"])
        b = pairs(compute, step["start"], step["stop"])
        found.append((len(starting_in(comm, step)), covered(a), covered(b), covered(a, b)))
    assert found == [
        (7, 11_989_021, 38_506_406, 1_825_259),
        (7, 12_300_029, 38_429_422, 1_760_420),
        (7, 22_587_443, 38_720_019, 3_731_346),
    ]


def test_nccl_2rank_has_its_known_metrics(nccl):
    found = metrics([nccl], everything_is_dp, 50e9, "host")
    whole = 222_442_191 + 219_726_905 + 224_936_243
    comm = 11_989_021 + 12_300_029 + 22_587_443
    compute = 38_506_406 + 38_429_422 + 38_720_019
    hidden = 1_825_259 + 1_760_420 + 3_731_346
    assert found["iterations"] == 3
    assert found["iteration"]["mean_ns"] == pytest.approx(whole / 3, rel=1e-15)
    assert found["breakdown"]["spec"]["compute"] == pytest.approx(1 - comm / whole, rel=1e-12)
    assert found["breakdown"]["exact"]["compute"] == pytest.approx(compute / whole, rel=1e-12)
    exposed = found["breakdown"]["exact"]["exposed_DP"]
    assert exposed == pytest.approx((comm - hidden) / whole, rel=1e-12)
    ratios = (1_825_259 / 11_989_021, 1_760_420 / 12_300_029, 3_731_346 / 22_587_443)
    average = found["overlap"]["average_overlap_ratio"]
    assert average == pytest.approx(sum(ratios) / 3, rel=1e-12)
    assert found["volume"]["DP"]["comm_bytes"] == 306_684_384 + 638_712
    assert found["volume"]["DP"]["comm_events"] == 21
    assert found["windows"] == []


def test_dlrm_is_eight_ranks_of_one_step(dlrm):
    assert [trace["rank"] for trace in dlrm] == list(range(8))
    for trace in dlrm:
        assert f"worker{trace['rank']}_" in trace["path"]
        (step,) = iterations(trace)
        assert step["source"] == "ProfilerStep"
        assert len(starting_in(comm_events(trace), step)) == 8


def test_the_bytes_of_dlrm_come_from_the_host(dlrm):
    uneven = []
    for trace in dlrm:
        events = comm_events(trace)
        assert Counter(e["op"] for e in events) == {"AllToAll": 5, "AllReduce": 3}
        reduced = [e["payload_bytes"] for e in events if e["op"] == "AllReduce"]
        assert sum(reduced) == 2_485_252
        exchanged = [e for e in events if e["op"] == "AllToAll"]
        exchanged.sort(key=lambda e: e["start"])
        assert [e["sent_bytes"] for e in exchanged] == [24_576, 192, 1_536, 13_568, 24_576]
        uneven.append(exchanged[3])
        for event in events:
            assert event["group_ranks"] is event["group_size"] is event["bus_bytes"] is None
    received = [3_072, 7_168, 9_216, 53_248, 18_944, 3_072, 6_144, 7_680]
    assert [e["received_bytes"] for e in uneven] == received
    assert [e["payload_bytes"] for e in uneven] == [max(13_568, r) for r in received]
    assert sum(e["sent_bytes"] for e in uneven) == sum(received) == 108_544


def test_dlrm_has_its_known_communication_time(dlrm):
    unions = [covered(pairs(comm_events(trace))) for trace in dlrm]
    assert unions == [
        5_798_000,
        11_336_000,
        3_492_000,
        9_774_000,
        6_587_000,
        6_251_000,
        3_558_000,
        1_746_000,
    ]


def test_the_host_names_the_operations_of_sampled(sampled):
    assert [(trace["rank"], trace["world_size"]) for trace in sampled] == [(0, 128), (1, 128)]
    for trace in sampled:
        steps, events = iterations(trace), comm_events(trace)
        assert [step["number"] for step in steps] == [551, 552]
        assert [len(starting_in(events, step)) for step in steps] == [5, 5]
        counts = Counter(e["op"] for e in events)
        assert counts == {"AllToAll": 4, "AllReduce": 4, "AllGather": 2}
        assert all("SendRecv" in e["name"] for e in events)
        gathers = [e for e in events if e["op"] == "AllGather"]
        sizes = {(e["msg_bytes"], e["payload_bytes"], e["bus_bytes"]) for e in gathers}
        assert sizes == {(16_777_216, 1_073_741_824, None)}


def test_sampled_has_no_flows_and_no_external_ids_of_its_own(sampled):
    for trace in sampled:
        assert not any(cat == "ac2g" for _, cat in trace["phases"])
        kernels = [e["args"] for e in trace["events"] if e["cat"] == "kernel"]
        assert all(args["External id"] == args["correlation"] for args in kernels)


def test_gloo_has_groups_and_steps_and_no_communication_on_a_gpu(gloo):
    for rank, trace in enumerate(gloo):
        assert (trace["rank"], trace["world_size"], trace["count"]) == (rank, 4, 3_356)
        assert [step["number"] for step in iterations(trace)] == [2, 3, 4]
        groups = {g["pg_desc"]: g["ranks"] for g in trace["groups"]}
        assert groups["TENSOR_MODEL_PARALLEL_GROUP"] == ([0, 1], [2, 3])[rank // 2]
        assert groups["DATA_PARALLEL_GROUP"] == ([0, 2], [1, 3])[rank % 2]
        names = Counter(e["name"] for e in trace["events"] if e["name"].startswith("gloo:"))
        assert names == {
            "gloo:all_reduce": 36,
            "gloo:all_gather": 6,
            "gloo:all_to_all": 6,
            "gloo:broadcast": 3,
            "gloo:barrier": 3,
            "gloo:send": 3,
            "gloo:recv": 3,
        }
        assert comm_events(trace) == []


def test_metrics_without_communication_are_null_not_zero(gloo):
    found = metrics(gloo, everything_is_dp)
    assert (found["ranks"], found["iterations"]) == ([0, 1, 2, 3], 3)
    assert found["overlap"] == {"average_overlap_ratio": None, "by_tag": {}}
    assert found["bandwidth"] == found["volume"] == {}
    assert set(found["breakdown"]["exact"].values()) == {None}
    assert set(found["breakdown"]["spec"].values()) == {None}


@pytest.mark.parametrize("files", ["nccl", "dlrm", "sampled"])
def test_the_exact_breakdown_is_a_partition(files, request):
    traces = request.getfixturevalue(files)
    traces = traces if isinstance(traces, list) else [traces]
    exact = metrics(traces, lambda e: "EP" if e["op"] == "AllToAll" else "DP")["breakdown"]
    assert sum(exact["exact"].values()) == pytest.approx(1, abs=1e-12)
    assert sum(exact["spec"].values()) == pytest.approx(1, abs=1e-12)


# ------------------------------------------------------------------- by hand


def gpu(name, start, stop, cat="kernel", **args):
    times = {"ts": Decimal(start) / 1000, "dur": Decimal(stop - start) / 1000}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, **times, "args": args}


def host(name, start, stop, cat="user_annotation", **args):
    return {**gpu(name, start, stop, cat, **args), "pid": 100, "tid": 100}


def trace_of(folder, *rows, **info):
    path = folder / "rank0.json"
    whole = {"distributedInfo": info, "traceEvents": rows}
    path.write_text(json.dumps(whole, default=float))
    return read(path)


NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_the_oracle_agrees_with_a_small_run_computed_by_hand(tmp_path):
    trace = trace_of(
        tmp_path,
        host("ProfilerStep#1", 0, 100),
        gpu("gemm", 0, 30),
        gpu("a" + NCCL, 20, 25),  # not at the start of the name: compute
        gpu(NCCL, 20, 50, tag="tp"),
        gpu(NCCL, 40, 60, tag="dp"),
        gpu("Memcpy HtoD", 55, 70, "gpu_memcpy"),
        gpu("Memcpy PtoP (Device -> Device)", 80, 90, "gpu_memcpy", bytes=640),
        gpu(NCCL, 95, 115, tag="tp"),
        gpu(NCCL, 120, 130, tag="tp"),
    )
    labels = {20: "tp", 40: "dp", 95: "tp", 120: "tp", 80: None}
    found = metrics([trace], lambda e: labels[e["start"]], 1e9)
    assert found["breakdown"]["exact"] == pytest.approx(
        {
            "compute": 0.30,
            "exposed_TP": 0.10 + 0.05,
            "exposed_mixed": 0.10,
            "exposed_DP": 0.10,
            "exposed_OTHER": 0.10,
            "memcpy": 0.10,
            "idle": 0.15,
            "exposed_PP": 0,
            "exposed_EP": 0,
            "exposed_CP": 0,
        }
    )
    spec = {tag: value for tag, value in found["breakdown"]["spec"].items() if value}
    assert spec == pytest.approx(
        {"comm_TP": 0.5, "comm_DP": 0.2, "comm_OTHER": 0.1, "compute": 0.45, "idle": -0.25}
    )
    assert found["overlap"]["average_overlap_ratio"] == pytest.approx(10 / 55)
    assert found["overlap"]["by_tag"] == pytest.approx({"DP": 0, "OTHER": 0, "TP": 10 / 35})
    spans = {(w["from"], w["to"]): w["mean_ns"] for w in found["windows"]}
    assert spans == {("TP", "DP"): -10, ("DP", "OTHER"): 20, ("OTHER", "TP"): 5}
    assert found["volume"]["TP"]["comm_events"] == 2
    assert found["volume"]["TP"]["comm_bytes"] is None
    assert found["bandwidth"]["TP"]["events_without_bytes"] == 2
    assert found["bandwidth"]["OTHER"]["avg_bw"] == 64e9
    assert found["bandwidth"]["OTHER"]["global_avg_util"] == 64


def test_metadata_of_the_kernel_wins_over_the_host(tmp_path):
    said = {"In msg nelems": 8, "Out msg nelems": 32, "dtype": "Half", "Group size": 4}
    trace = trace_of(
        tmp_path,
        host("record_param_comms", 0, 50, "cpu_op", **{"Collective name": "broadcast"}),
        host("cudaLaunchKernel", 10, 11, "cuda_runtime", correlation=5),
        gpu(NCCL, 20, 30, correlation=5, **{**said, "Collective name": "_allgather_base"}),
        gpu(NCCL, 30, 40, correlation=5, **said),
        gpu(NCCL, 40, 50, correlation=6, **{**said, "In msg nelems": -8}),
    )
    own, host_named, overflow = comm_events(trace)
    assert (own["op"], own["msg_bytes"], own["payload_bytes"]) == ("AllGather", 16, 64)
    assert own["bus_bytes"] == 48
    assert (host_named["op"], host_named["payload_bytes"]) == ("Broadcast", 64)
    assert (overflow["op"], overflow["payload_bytes"]) == ("AllReduce", None)


def test_a_cut_rank_list_is_completed_from_the_groups(tmp_path):
    groups = [{"pg_name": "3", "pg_desc": "mesh_dp", "pg_size": 4, "ranks": [6, 0, 2, 4]}]
    said = {"Process Group Name": "3", "Process Group Ranks": "[0, 2, ...]", "Group size": 4}
    trace = trace_of(tmp_path, gpu(NCCL, 0, 1, **said), pg_config=groups, world_size=8)
    (event,) = comm_events(trace)
    assert event["group_ranks"] == [0, 2, 4, 6]
    assert event["description"] == "mesh_dp"


def test_iterations_are_found_by_the_first_rule_that_applies(tmp_path):
    steps = [host("Optimizer.step#SGD.step", 10, 20), host("Optimizer.step#SGD.step", 50, 70)]
    others = [host("Optimizer.step#EMA.step", 21, 22), gpu("gemm", 5, 90)]
    trace = trace_of(tmp_path, *others, *steps)
    assert [(s["start"], s["stop"]) for s in iterations(trace)] == [(5, 20), (20, 70)]
    trace = trace_of(tmp_path, *others, *steps, host("Iteration: 3", 1, 2))
    assert [(s["number"], s["start"]) for s in iterations(trace)] == [(3, 1)]
    trace = trace_of(tmp_path, host("ProfilerStep#8", 3, 4), host("iter 3", 1, 2))
    assert [(s["number"], s["start"]) for s in iterations(trace)] == [(8, 3)]
    trace = trace_of(tmp_path, gpu("gemm", 5, 90), host("aten::mm", 2, 9, "cpu_op"))
    assert [(s["source"], s["start"], s["stop"]) for s in iterations(trace)] == [
        ("whole", 2, 90)
    ]


@pytest.mark.parametrize(
    ("op", "sent", "received", "n", "expected"),
    [
        ("AllReduce", 100, 100, 4, (100, 100, 150)),
        ("AllGather", 25, 100, 4, (25, 100, 75)),
        ("AllGather", 25, None, None, (25, None, None)),
        ("ReduceScatter", 100, 25, 4, (25, 100, 75)),
        ("AllToAll", 100, 100, 4, (25, 100, 75)),
        ("AllToAll", 100, None, 4, (None, 100, 75)),
        ("Broadcast", 100, 100, None, (100, 100, 100)),
        ("AllReduce", 100, 100, 1, (100, 100, 0)),
        ("AllReduce", 5, 5, 4, (5, 5, 8)),  # 7.5
        ("AllToAll", 6, 6, 4, (None, 6, 4)),  # 4.5: half to even, too
        ("Barrier", None, None, None, (0, 0, 0)),
    ],
)
def test_bytes_follow_the_specification_table(op, sent, received, n, expected):
    msg, payload = message_and_payload(op, sent, received, n, True)
    assert (msg, payload, bus_bytes(op, payload, n)) == expected


def test_names_types_and_times_are_parsed():
    assert table_row("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)") == ("SendRecv", None)
    assert table_row("ncclDevKernel_Generic(x)") == ("OTHER", None)
    assert table_row("ncclSymkDevKernel_AllGather_LL(x)") == ("AllGather", None)
    assert table_row("void deep_ep::intranode::dispatch<4>(x)") == ("AllToAll", "EP")
    assert table_row("void deep_ep::layout::get_dispatch_layout<4>(x)") is None
    assert table_row("void vllm::cross_device_reduce_1stage<half>") == ("AllReduce", "TP")
    assert table_row("userbuffers_fp16_sum_inplace_gpu_rr_rs") == ("ReduceScatter", "TP")
    assert table_row("ampere_sgemm_nccl") is None
    assert (operation("all_to_allv"), operation("coalesced")) == ("AllToAll", None)
    assert operation("something new") == "OTHER"
    names = ("Float8_e4m3fn", "c10::BFloat16", "long int", "ComplexDouble", "TensorList", "")
    assert [element_size(name) for name in names] == [1, 2, 8, 16, None, None]
    assert nanoseconds(Decimal("1694128201426674.1235")) == 1_694_128_201_426_674_124


def test_percentiles_equal_numpy():
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([40, 10, 20, 30], 95) == pytest.approx(38.5)
    assert (percentile([7], 99), percentile([], 99)) == (7, None)


@pytest.mark.parametrize("seed", range(20))
def test_segments_mark_what_is_active_at_every_point(seed):
    draw = random.Random(seed)
    spans = [(draw.randrange(-5, 30), draw.randrange(12), draw.choice("abc")) for _ in range(9)]
    labeled = [(start, start + size, label) for start, size, label in spans]
    points = [active for size, active in segments(labeled, 0, 25) for _ in range(size)]
    assert points == [{x for start, stop, x in labeled if start <= t < stop} for t in range(25)]


def test_a_phase_ends_with_its_latest_end():
    events = [
        {"tag": "TP", "start": 0, "stop": 9},
        {"tag": "TP", "start": 1, "stop": 3},
        {"tag": "DP", "start": 5, "stop": 6},
    ]
    assert [(p["start"], p["stop"]) for p in phases_of(events)] == [(0, 9), (5, 6)]
