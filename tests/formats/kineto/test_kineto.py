"""Test communication events of Kineto traces."""

import json

import pytest
from builders import kineto_text as k
from oracles import kineto as oracle_kineto

from fastcomm.errors import TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.communication import Pattern
from fastcomm.formats.kineto import reader as kineto_reader
from fastcomm.formats.opening import open_run
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import KINDS, OPS, TAG_SOURCES
from fastcomm.trace.tags import TagRule, TagRules

GROUPS = [
    {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 64, "ranks": list(range(64))},
    {
        "pg_name": "1",
        "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP",
        "pg_size": 4,
        "ranks": [3, 2, 1, 0],
    },
]


def read(tmp_path, events, options=None, **words):
    path = k.write(
        tmp_path / "rank0.json", [k.mark("ProfilerStep#0", 0, 1000), *events], **words
    )
    return kineto_reader.read(path, options or TraceOptions())


def comm(trace):
    groups = trace.groups.to_pylist()
    return [
        {
            **row,
            "op": OPS[row["op"]],
            "tag": TAGS[row["tag"]],
            "tag_source": TAG_SOURCES[row["tag_source"]],
            "ranks": None if row["group"] is None else groups[row["group"]]["ranks"],
        }
        for row in trace.comm.to_pylist()
    ]


@pytest.mark.parametrize(
    "name",
    [
        "nccl_2rank_rank0.json.gz",
        "dlrm_8rank/worker3_step_12.1694128201557.pt.trace.json.gz",
        "sampled_2of128/rank-1.json.gz",
    ],
)
def test_collectives_of_a_real_trace_agree_with_the_oracle(real, name):
    from fastcomm.formats.kineto import reader

    keys = ("start", "stop", "op", "msg_bytes", "payload_bytes", "bus_bytes")
    found = [
        tuple(row[key] for key in keys) for row in comm(reader.read(real(name), TraceOptions()))
    ]
    events = oracle_kineto.comm_events(oracle_kineto.read(real(name)))
    assert sorted(found, key=str) == sorted(
        (tuple(e[key] for key in keys) for e in events), key=str
    )


def test_the_nccl_trace_has_its_reference_metrics(kineto):
    from fastcomm.formats.kineto import reader

    trace = reader.read(kineto / "nccl_2rank_rank0.json.gz", TraceOptions())
    kinds = trace.events["kind"].to_numpy()
    assert [(kinds == kind).sum() for kind in range(3)] == [2700, 960, 114]
    kernels = trace.events.filter(kinds == 0)
    assert kernels["start"].to_pylist()[0] == 1_716_423_322_422_880_181
    assert max(kernels["stop"].to_pylist()) == 1_716_423_323_083_431_186
    assert trace.meta.rank == 0
    assert trace.meta.world_size == 2
    assert trace.groups.to_pylist()[0]["ranks"] == [0, 1]


def test_metadata_of_a_kernel_gives_operation_size_and_group(tmp_path):
    event = k.all_reduce(
        10,
        5,
        Process_Group_Name="1",
        Process_Group_Ranks="[0, 1, 2, ...]",
        Seq=9,
        correlation=3,
    )
    (row,) = comm(read(tmp_path, [event], groups=GROUPS))
    assert row["op"] == "AllReduce"
    assert (row["start"], row["stop"], row["stream"], row["seq"]) == (10_000, 15_000, 20, 9)
    assert (row["msg_bytes"], row["payload_bytes"], row["bus_bytes"]) == (4000, 4000, 6000)
    assert row["ranks"] == [0, 1, 2, 3], (
        "the list on the kernel is cut: the whole one is in pg_config"
    )
    assert (row["tag"], row["tag_source"]) == ("TP", "description")


def test_lists_of_ranks_may_be_json_or_text(tmp_path):
    events = [k.all_reduce(10, 5, Process_Group_Ranks=ranks) for ranks in ("[1, 0]", [0, 1])]
    assert [row["ranks"] for row in comm(read(tmp_path, events))] == [[0, 1], [0, 1]]


def test_host_calls_describe_kernels_without_metadata(tmp_path):
    events = [
        k.event(
            *("record_param_comms", "cpu_op", 10, 20, 100, 1),
            **{"External id": 55, "Collective name": "_allgather_base", "In msg nelems": 10},
            **{"Out msg nelems": 40, "Group size": 4, "dtype": "BFloat16"},
        ),
        k.launch(15, 5),
        k.kernel("ncclDevKernel_SendRecv(x)", 40, 5, correlation=5),
    ]
    (row,) = comm(read(tmp_path, events))
    assert row["op"] == "AllGather"
    assert (row["msg_bytes"], row["payload_bytes"], row["bus_bytes"]) == (20, 80, 60)


def described(name):
    """A kernel of any name with the metadata of an all-reduce, launched by its call."""
    return k.kernel(name, 40, 5, **{"Collective name": "allreduce", "Group size": 4})


@pytest.mark.parametrize(
    "name",
    [
        *("mine", "<>", "gemm", "cast_and_send", "fused_gemm_allreduce", "init_and_reduce"),
        *("triton_poi_fused_add_0", "void cutlass::Kernel2<gemm_rs>(x)", "nvjet_hsh_128x256"),
    ],
)
def test_metadata_makes_a_kernel_communication_whatever_its_name(tmp_path, name):
    (row,) = comm(read(tmp_path, [described(name)]))
    assert row["op"] == "AllReduce"


@pytest.mark.parametrize(
    "name",
    [
        "void c10d::checkForNaN<c10::BFloat16>(c10::BFloat16*, unsigned long)",
        "void (anonymous namespace)::oneRankReduce<FuncPreMulSum<float> >(void*)",
        "void at::native::vectorized_elementwise_kernel<4, x>(int)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<x>(y)",
    ],
)
def test_helpers_that_a_call_launches_besides_are_compute(tmp_path, name):
    assert comm(read(tmp_path, [described(name)])) == []


def by_external_id(folder, call_us):
    """A collective whose call, of so many us, is on another thread than its launch."""
    call = {
        "External id": 55,
        "Collective name": "allreduce",
        "In msg nelems": 10,
        "dtype": "Int",
    }
    events = [
        k.event("record_param_comms", "cpu_op", 10, call_us, 100, 1, **call),
        k.launch(15, 5, tid=2),
        k.kernel("ncclDevKernel_Generic(x)", 40, 5, correlation=5, External_id=55),
    ]
    (row,) = comm(read(folder, events))
    return row["op"], row["payload_bytes"]


def test_an_external_id_leads_to_a_call_on_another_thread(tmp_path):
    assert by_external_id(tmp_path, 20) == ("AllReduce", 40)


def test_an_external_id_of_a_call_at_another_time_is_ignored(tmp_path):
    assert by_external_id(tmp_path, 2) == ("OTHER", None)


def test_unrecorded_metadata_is_null(tmp_path):
    (row,) = comm(read(tmp_path, [k.kernel("ncclDevKernel_AllGather_RING_LL(x)", 40, 5)]))
    assert row["op"] == "AllGather"
    assert row["group"] is row["payload_bytes"] is row["msg_bytes"] is row["bus_bytes"] is None
    assert (row["tag"], row["tag_source"]) == ("OTHER", "none")


@pytest.mark.parametrize("nelems", [-5, "x", None])
def test_overflowed_and_missing_counts_give_no_bytes(tmp_path, nelems):
    event = k.all_reduce(10, 5, nelems=nelems)
    (row,) = comm(read(tmp_path, [event]))
    assert row["payload_bytes"] is None


def test_an_unknown_type_gives_no_bytes(tmp_path):
    (row,) = comm(read(tmp_path, [k.all_reduce(10, 5, dtype="QInt4")]))
    assert row["payload_bytes"] is None


@pytest.mark.parametrize(
    ("splits", "size"),
    [
        ("[250, 250, 250, 250]", 1000),
        ("[600, 400, 0, 0]", None),
        ("[250, 250, ..., 250]", None),  # those left out may be others
    ],
)
def test_the_message_size_is_known_only_for_a_complete_list_of_even_splits(
    tmp_path, splits, size
):
    split = {"Collective_name": "all_to_allv", "In_split_size": splits}
    (row,) = comm(read(tmp_path, [k.all_reduce(10, 5, **split)]))
    assert (row["op"], row["msg_bytes"], row["payload_bytes"]) == ("AllToAll", size, 4000)


@pytest.mark.parametrize(
    ("name", "op", "tag"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "AllReduce", "OTHER"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "OTHER", "OTHER"),
        ("ncclSymkDevKernel_AllGather_ST(x)", "AllGather", "OTHER"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "AllReduce", "OTHER"),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*)", "AllToAll", "EP"),
        ("void vllm::cross_device_reduce_2stage<half, 8>(x)", "AllReduce", "TP"),
        ("multimem_all_reduce_kernel<c10::BFloat16>", "AllReduce", "TP"),
        ("void nvshmemi_transfer(x)", "OTHER", "OTHER"),
    ],
)
def test_kernels_of_all_communication_libraries_are_recognized(tmp_path, name, op, tag):
    (row,) = comm(read(tmp_path, [k.kernel(name, 10, 5)]))
    assert (row["op"], row["tag"]) == (op, tag)
    assert row["tag_source"] == ("none" if tag == "OTHER" else "heuristic")


def test_kernels_that_compute_a_dispatch_layout_are_compute(tmp_path):
    trace = read(
        tmp_path, [k.kernel("void deep_ep::layout::get_dispatch_layout<256>(x)", 10, 5)]
    )
    assert trace.comm.num_rows == 0


def test_patterns_of_the_user_take_precedence(tmp_path):
    options = TraceOptions(
        patterns=(Pattern(regex="^my_", library="me", op="Broadcast", tag="CP"),)
    )
    (row,) = comm(read(tmp_path, [k.kernel("my_exchange", 10, 5)], options))
    assert (row["op"], row["tag"], row["tag_source"]) == ("Broadcast", "CP", "heuristic")


def test_tags_of_the_user_take_precedence(tmp_path):
    rule = TagRule(field="ranks", value=(0, 1, 2, 3), tag="CP")
    event = k.all_reduce(10, 5, Process_Group_Name="1")
    options = TraceOptions(tags=TagRules(explicit=(rule,)))
    (row,) = comm(read(tmp_path, [event], options, groups=GROUPS))
    assert (row["tag"], row["tag_source"]) == ("CP", "explicit")


def test_copies_between_devices_are_communication_and_others_are_not(tmp_path):
    events = [
        k.event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 10, 5, bytes=64, stream=9),
        k.event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 20, 5, bytes=64, stream=9),
    ]
    (row,) = comm(read(tmp_path, events))
    assert (row["op"], row["payload_bytes"], row["bus_bytes"], row["stream"]) == (
        "SendRecv",
        64,
        64,
        9,
    )


def test_lanes_distinguish_devices_and_hosts_with_equal_numbers(tmp_path):
    events = [
        k.kernel("gemm", 10, 5, device=0),
        k.event("cudaLaunchKernel", "cuda_runtime", 1, 1, pid=0, tid=7, correlation=1),
        k.event("PyTorch", "user_annotation", 1, 1, pid="Spans", tid="Trace"),
    ]
    lanes = read(tmp_path, events).lanes.to_pylist()
    assert {"process": "0", "thread": "7", "device": 0, "is_device": True} in lanes
    assert {"process": "0", "thread": "7", "device": None, "is_device": False} in lanes
    assert {"process": "Spans", "thread": "Trace", "device": None, "is_device": False} in lanes


@pytest.mark.parametrize(
    ("envelope", "ts", "clock", "start"),
    [
        ({"baseTimeNanoseconds": 7_000}, 2, "unix", 9_000),
        ({"baseTimeNanoseconds": None}, 2, None, 2_000),
        (
            {"baseTimeNanoseconds": None},
            1_712_500_000_000_000,
            "unix",
            1_712_500_000_000_000_000,
        ),
    ],
)
def test_times_are_relative_to_the_base_absolute_or_unknown(
    tmp_path, envelope, ts, clock, start
):
    path = k.write(tmp_path / "rank0.json", [k.kernel("gemm", ts, 1)], **envelope)
    trace = kineto_reader.read(path, TraceOptions())
    assert trace.meta.clock == clock
    assert trace.events["start"].to_pylist() == [start]


def test_a_file_of_another_rank_is_an_error(tmp_path):
    path = k.write(tmp_path / "rank0.json", [k.kernel("gemm", 1, 1)], rank=3)
    with pytest.raises(TraceFileError, match=r"says rank 3, but the file stands for rank 0"):
        kineto_reader.read(path, TraceOptions(), rank=0)


def test_a_negative_rank_is_an_error(tmp_path):
    path = k.write(tmp_path / "rank1.json", [k.kernel("gemm", 1, 1)], rank=-1)
    with pytest.raises(TraceFileError, match=r"rank1.json: distributedInfo says rank -1"):
        kineto_reader.read(path, TraceOptions(), rank=1)


def test_a_nested_list_of_events_is_not_the_trace(tmp_path):
    document = k.document([k.kernel("gemm", 1, 1)], rank=3, world=4)
    inner = {"traceEvents": [k.kernel("other", 5, 1)], "note": 'say "{" and \\'}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"metadata": inner, "more": {"traceEvents": []}, **document}))
    (source,) = open_run(path).sources
    assert source.rank == 3
    assert source.read().events["name"].to_pylist() == ["gemm"]


def test_a_file_without_anything_to_measure_is_an_error(tmp_path):
    path = k.write(tmp_path / "rank0.json", [k.event("aten::mm", "cpu_op", 1, 1)])
    with pytest.raises(TraceFileError, match="no device work"):
        kineto_reader.read(path, TraceOptions())


def test_fused_kernels_are_counted(tmp_path):
    trace = read(tmp_path, [k.kernel("allreduce_fusion_kernel_oneshot_lamport<x>", 1, 1)])
    assert any("1 communication kernels are fused" in note for note in trace.meta.warnings)


def test_reading_everything_keeps_every_event_and_column(tmp_path):
    wait = k.event("Stream Wait Event", "cuda_sync", 21, 1, tid=7, device=0, stream=7)
    wait["args"] |= {"wait_on_stream": 13, "wait_on_cuda_event_record_corr_id": 99}
    events = [
        k.event("aten::add", "cpu_op", 10, 5, pid=100, tid=1, External_id=7, Sequence_number=3),
        k.event("train.py(3): step", "python_function", 8, 20, pid=100, tid=1),
        k.event("loop", "gpu_user_annotation", 20, 5),
        wait,
        k.kernel("gemm", 30, 5, correlation=4),
    ]  # fmt: skip
    trace = read(tmp_path, events, TraceOptions(whole=True))
    assert trace.is_whole
    found = {
        name: (KINDS[kind], sequence, stream, record)
        for name, kind, sequence, stream, record in zip(
            trace.events["name"].to_pylist(),
            trace.events["kind"].to_pylist(),
            *(trace.args[key].to_pylist() for key in
              ("sequence", "wait_stream", "wait_correlation")),
            strict=True,
        )
    }  # fmt: skip
    assert found == {
        "ProfilerStep#0": ("annotation", None, None, None),
        "aten::add": ("cpu_op", 3, None, None),
        "train.py(3): step": ("python", None, None, None),
        "loop": ("gpu_annotation", None, None, None),
        "Stream Wait Event": ("sync", None, 13, 99),
        "gemm": ("kernel", None, None, None),
    }
    lanes = trace.lanes.to_pylist()
    sync = trace.events["name"].to_pylist().index("Stream Wait Event")
    assert lanes[trace.events["lane"][sync].as_py()]["is_device"]
    narrow = read(tmp_path, events)
    assert not narrow.is_whole
    assert narrow.arguments.column_names == []


@pytest.mark.parametrize(
    ("said", "number"),
    [
        (17297668046887139288, 17297668046887139288 - 2**64),
        ("17297668046887139288", 17297668046887139288 - 2**64),
        (7, 7),
        (2**64, None),
        (-1, None),
        ("seven", None),
        (None, None),
    ],
)
def test_ids_of_calls_have_64_bits(tmp_path, said, number):
    trace = read(tmp_path, [k.all_reduce(10, 5, Comms_Id=said)])
    assert trace.comm["call_id"].to_pylist() == [number]


def test_reading_everything_records_the_position_of_every_event(tmp_path):
    rows = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 1, "tid": 0, "args": {}},
        k.kernel("late", 20, 5, correlation=1),
        {"ph": "s", "cat": "ac2g", "id": 1, "name": "ac2g", "ts": 1, "pid": 1, "tid": 1},
        k.launch(10, 1),
    ]
    path = k.write(tmp_path / "rank0.json", rows, baseTimeNanoseconds=7_000)
    trace = kineto_reader.read(path, TraceOptions(whole=True))
    assert trace.is_whole
    assert trace.args["position"].to_pylist() == [3, 1]
    assert trace.args["on_stream"].to_pylist() == [None, 7]
    assert trace.meta.base == 7_000
    assert not kineto_reader.read(path, TraceOptions()).is_whole


def test_the_algorithm_and_protocol_of_a_kernel_are_in_its_name(tmp_path):
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    chosen = [
        k.kernel(name, at, 5, func="AllReduce", algo=algo, proto="LL128", count=8)
        for at, algo in ((10, "TREE"), (20, "RING"), (30, "TREE"))
    ]
    # A kernel with one of the two, and a range with both, keep their names.
    part = k.kernel(name, 40, 5, func="AllReduce", algo="TREE", count=8)
    range_ = k.event("load(x)", "user_annotation", 50, 5, algo="TREE", proto="LL128")
    trace = read(tmp_path, [*chosen, part, range_], TraceOptions(whole=True))
    tree, ring = (f"{name.partition('(')[0]} [{algo} LL128]" for algo in ("TREE", "RING"))
    names = trace.events["name"].to_pylist()
    assert names == ["ProfilerStep#0", tree, ring, tree, name, "load(x)"]
    assert [row["op"] for row in comm(trace)] == ["AllReduce"] * 4
