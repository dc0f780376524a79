"""Test sizes from operator shapes, and the reasons of unknown sizes."""

from fractions import Fraction
from math import prod

import pytest
from builders import kineto_text as k
from builders.examples import fewer
from builders.opened import open_run
from hypothesis import given
from hypothesis import strategies as st
from oracles import kineto as oracle_kineto

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto.reader import read
from fastcomm.formats.kineto.sizes import OPERATORS, PREFIXES
from fastcomm.metrics.computation import compute_metrics
from fastcomm.trace.schema import OPS

STEP = k.mark("ProfilerStep#3", 0, 1000)
SENDRECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
TYPES = {"c10::BFloat16": 2, "float": 4, "long int": 8, "unsigned char": 1, "c10::Half": 2}
SINCE_2024 = 1_767_189_312_000_000_000
IN_2022 = 1_661_203_462_000_000_000


def operator(name, dims, types, ts=10, dur=20, cat="cpu_op"):
    said = {"Input_Dims": dims, "Input_type": types} if dims is not None else {}
    return k.event(name, cat, ts, dur, pid=100, tid=1, **said)


def traced(path, host, kernel=SENDRECV, groups=(), **envelope):
    """The trace of one communication kernel, launched at 15 inside of the host's events."""
    events = [STEP, *host, k.launch(15, 7), k.kernel(kernel, 50, 10, correlation=7)]
    world = max((each.get("pg_size", 1) for each in groups), default=1)
    return k.write(path / "rank0.json", events, groups=groups, world=world, **envelope)


def row_of(path, *host, **words):
    (row,) = read(traced(path, host, **words), TraceOptions()).comm.to_pylist()
    return {**row, "op": OPS[row["op"]]}


def sizes_of(row):
    return row["msg_bytes"], row["payload_bytes"], row["bus_bytes"]


def group(name, size):
    return {"pg_name": name, "pg_desc": "undefined", "pg_size": size, "ranks": [*range(size)]}


# ------------------------------------------------------------------ each operator's rule


def arguments(count, tensors):
    """Dimensions and types of `count` arguments, of which some are tensors."""
    dims, types = [[] for _ in range(count)], [""] * count
    for place, (shape, name) in tensors.items():
        dims[place], types[place] = shape, name
    return dims, types


@pytest.mark.parametrize("name", sorted(OPERATORS))
@fewer(3)
@given(
    shape=st.lists(st.integers(1, 5000), max_size=3),
    kind=st.sampled_from(sorted(TYPES)),
    size=st.integers(2, 9),
)
def test_operator_shapes_give_the_size_of_a_kernel(tmp_path_factory, name, shape, kind, size):
    """By the definition of nccl-tests: S is the whole buffer; n ranks; the factor of busbw."""
    rule, path = OPERATORS[name], tmp_path_factory.mktemp("trace")
    one = prod(shape) * TYPES[kind]
    part, whole = (shape, kind), ([*shape, size], kind)
    given_, got = {
        "AllGather": (part, whole),
        "ReduceScatter": (whole, part),
        "AllToAll": (whole, whole),
    }.get(rule.op, (part, part))
    tensors = {
        place: tensor
        for place, tensor in ((rule.output, got), (rule.input, given_))
        if place is not None
    }
    host = operator(name, *arguments(5, tensors))
    row = row_of(path, host, groups=[group("0", size), group("1", size), group("2", 1)])
    every = {"AllGather", "ReduceScatter", "AllToAll"}
    payload = one * size if rule.op in every else one
    factor = {
        "AllReduce": Fraction(2 * (size - 1), size),
        **dict.fromkeys(every, Fraction(size - 1, size)),
    }.get(rule.op, 1)
    wanted = one, payload, round(payload * factor)
    if rule.input is None:
        wanted = None, None, None  # the sizes are on the device
    assert (row["op"], sizes_of(row)) == (rule.op, wanted)
    ((event,),) = [oracle_kineto.comm_events(oracle_kineto.read(path / "rank0.json"))]
    said = [event[f"{which}_bytes"] for which in ("msg", "payload", "bus")]
    assert (event["op"], tuple(said)) == (row["op"], sizes_of(row))


def test_the_scanner_keeps_every_operator():
    kept = (*PREFIXES, b"c10d::")
    assert all(name.encode().startswith(kept) for name in OPERATORS)
    assert max(map(len, PREFIXES)) <= 8


def test_the_innermost_operator_gives_the_size(tmp_path):
    host = [
        operator("vllm::all_reduce", [[9], []], ["float", ""], 5, 40),
        operator("symm_mem::multimem_all_reduce_", [[6], [], []], ["c10::BFloat16", "", ""]),
    ]
    kernel = "void multimem_all_reduce_kernel<c10::BFloat16, 16>(x)"
    assert sizes_of(row_of(tmp_path, *host, kernel=kernel)) == (12, 12, None)


def test_shapes_of_unrelated_operators_are_ignored(tmp_path):
    host = operator("vllm::all_reduce", [[9], []], ["float", ""])
    row = row_of(tmp_path, host, kernel="ncclDevKernel_AllGather_RING_LL(x)")
    assert (row["op"], sizes_of(row)) == ("AllGather", (None, None, None))


def test_counts_on_the_kernel_take_precedence(tmp_path):
    host = operator("vllm::all_reduce", [[9], []], ["float", ""])
    events = [STEP, host, k.launch(15, 7), k.all_reduce(50, 10, nelems=100, correlation=7)]
    (row,) = read(k.write(tmp_path / "rank0.json", events), TraceOptions()).comm.to_pylist()
    assert row["payload_bytes"] == 400


def test_an_all_to_all_that_shows_its_input_has_that_payload(tmp_path):
    host = operator("nccl:all_to_all", [[8, 1024, 8816]], ["float"], cat="user_annotation")
    row = row_of(tmp_path, host, groups=[group("0", 8)])
    whole = 8 * 1024 * 8816 * 4
    # Its splits may be uneven: nothing is known of a message.
    assert (row["op"], sizes_of(row)) == ("AllToAll", (None, whole, whole * 7 // 8))


@pytest.mark.parametrize("mark", ["xccl:all_reduce", "hccl:all_reduce", "nccl:all_reduce"])
def test_ranges_of_every_library_give_the_input_size(tmp_path, mark):
    host = operator(mark, [[10]], ["float"], cat="user_annotation")
    row = row_of(tmp_path, host)
    assert (row["op"], row["payload_bytes"]) == ("AllReduce", 40)


def test_the_host_call_gives_the_input_size_without_a_range(tmp_path):
    dims, types = [[10], [], []], ["float", "Scalar", ""]
    row = row_of(
        tmp_path,
        operator("record_param_comms", dims, types),
        kernel="ncclKernel_AllReduce_RING_LL_Sum_float(x)",
    )
    assert sizes_of(row) == (40, 40, None)


@pytest.mark.parametrize(
    ("groups", "bus"),
    [
        ([group("0", 8), group("1", 1), group("2", 8)], 70),
        ([group("0", 8), group("1", 4)], None),
        ([group("0", 1)], None),
        ([], None),
        ([group("0", 8), {"pg_name": "1"}], None),
    ],
)
def test_the_groups_size_is_known_if_all_groups_have_it(tmp_path, groups, bus):
    host = operator("symm_mem::multimem_all_reduce_", [[10], [], []], ["float", "", ""])
    row = row_of(tmp_path, host, groups=groups, kernel="multimem_all_reduce_kernel")
    assert sizes_of(row) == (40, 40, bus)


# ------------------------------------------------------------------ real traces


def test_b200_all_reduces_have_the_size_of_their_operator(kineto):
    path = kineto / "b200_vllm" / "eager_trace.json.gz"
    found = [
        row
        for row in read(path, TraceOptions()).comm.to_pylist()
        if OPS[row["op"]] == "AllReduce"
    ]
    events = oracle_kineto.comm_events(oracle_kineto.read(path))
    wanted = sorted((e["start"], e["payload_bytes"], e["bus_bytes"]) for e in events)
    assert len(found) == 73
    assert found[0]["payload_bytes"] == 2_557_440 * 2
    assert [(r["start"], r["payload_bytes"], r["bus_bytes"]) for r in found] == [
        each for each in wanted if each[0] in {row["start"] for row in found}
    ]
    assert found[0]["bus_bytes"] == 2_557_440 * 2 * 2 * 7 // 8  # every group has 8 ranks


@pytest.mark.parametrize(("name", "events", "unknown"), [("control", 60, 0), ("test", 64, 4)])
def test_all_to_alls_of_2022_have_the_size_of_their_range(kineto, name, events, unknown):
    trace = read(kineto / "trace_diff" / f"{name}.json.gz", TraceOptions())
    sizes = trace.comm["payload_bytes"]
    assert (len(sizes), sizes.null_count) == (events, unknown)
    notes = [each for each in trace.meta.warnings if "no known size" in each]
    assert len(notes) == (unknown > 0)
    assert all("their launch is not recorded" in note for note in notes)


# ------------------------------------------------------------------ why a size is unknown


def note_of(path):
    """The one warning about sizes."""
    warnings = read(path, TraceOptions()).meta.warnings
    (note,) = [each for each in warnings if "no known size" in each]
    return note


SILENT = operator("nccl:all_reduce", None, None, cat="user_annotation")
GATHER = operator("nccl:all_gather", [[10]], ["float"], cat="user_annotation")
STRANGE = operator("nccl:all_reduce", [[10]], ["QInt4"], cat="user_annotation")
ON_DEVICE = operator("symm_mem::all_to_all_vdev", [[10], [10]], ["float", "float"])
COALESCED = k.event(
    "record_param_comms", "cpu_op", 10, 20, pid=100, tid=1, Collective_name="coalesced"
)


@pytest.mark.parametrize(
    ("host", "written", "why", "why_not"),
    [
        ([SILENT], SINCE_2024, "record with record_shapes=True", "2.4"),
        ([SILENT], IN_2022, "record_shapes=True, or with PyTorch 2.4 or newer", "setting"),
        ([GATHER], SINCE_2024, "how many ranks took part is unknown", "2.4"),
        ([GATHER], IN_2022, "is unknown: record with PyTorch 2.4 or newer", "shapes"),
        ([STRANGE], SINCE_2024, "is not understood", "record with"),
        ([ON_DEVICE], SINCE_2024, "takes the sizes from the device", "record with"),
        ([COALESCED], SINCE_2024, "whose calls are not recorded", "record with"),
        ([], SINCE_2024, "no setting records them", "record with"),
        ([], IN_2022, "record with PyTorch 2.4 or newer, with", "setting"),
    ],
)
def test_the_remedy_fits_the_trace(tmp_path, host, written, why, why_not):
    note = note_of(traced(tmp_path, host, baseTimeNanoseconds=written))
    assert note.startswith("1 of 1 communication events have no known size, and bandwidth")
    assert why in note
    assert why_not not in note


def test_kernels_of_a_graph_have_no_size_by_any_setting(tmp_path):
    launch = k.event("cudaGraphLaunch", "cuda_runtime", 15, 2, pid=100, tid=1, correlation=7)
    kernel = k.kernel(SENDRECV, 50, 10, correlation=7)
    note = note_of(k.write(tmp_path / "rank0.json", [STEP, launch, kernel]))
    assert "a CUDA graph replays them" in note


def test_an_overflowed_count_is_warned_of(tmp_path):
    assert "overflowed 32 bits" in note_of(
        k.write(tmp_path / "rank0.json", [STEP, k.all_reduce(10, 5, nelems=-5)])
    )


def test_kernels_without_launches_are_warned_of(tmp_path):
    path = k.write(tmp_path / "rank0.json", [STEP, k.kernel(SENDRECV, 50, 10)])
    assert "record with ProfilerActivity.CPU, too" in note_of(path)


def test_several_reasons_are_counted_the_most_frequent_first(tmp_path):
    events = [
        STEP,
        *(k.all_reduce(ts, 1, nelems=-5) for ts in (60, 62, 64)),
        *([SILENT, k.launch(15, 7), k.kernel(SENDRECV, 50, 5, correlation=7)]),
        k.kernel("deep_ep::intranode::dispatch", 90, 5, correlation=99),
    ]
    note = note_of(k.write(tmp_path / "rank0.json", events))
    assert note.startswith("5 of 5 communication events")
    assert [part.split(":")[0] for part in note.split("omit them: ")[1].split("; ")] == [
        "3",
        "1",
        "1",
    ]


@pytest.mark.parametrize(
    ("elements", "events", "total"),
    [
        (2 * 10**18, 1, None),
        (1 << 60, 1, None),
        ((1 << 63) - 1, 3, None),
        (1 << 45, 9, None),
        (1 << 48, 1, 1 << 50),
        (1 << 45, 8, 1 << 50),
    ],
)
def test_impossible_sizes_are_unknown_and_counted(tmp_path, elements, events, total):
    rows = [
        k.all_reduce(10 + 20 * n, 10, nelems=elements, Process_Group_Ranks="[0, 1]")
        for n in range(events)
    ]
    run = open_run(k.write(tmp_path / "rank0.json", [k.mark("ProfilerStep#0", 0, 999), *rows]))
    found = compute_metrics(run).to_dict()
    (volume,) = found["volume"].values()
    assert volume["comm_bytes"] == total
    said = [each for each in found["warnings"] if "no known size" in each]
    assert len(said) == (total is None)
    assert all(f"{events} of {events} communication events" in each for each in said)
