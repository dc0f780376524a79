"""Test kernels that do the work of several calls, which end before the kernel is launched."""

import pytest
from builders import kineto_text as k
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto import reader
from fastcomm.trace.schema import OPS

KERNELS = {
    "AllGather": "ncclDevKernel_AllGather_RING_LL",
    "ReduceScatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    "SendRecv": "ncclDevKernel_SendRecv",
}
CALLS = {
    "AllGather": ["_allgather_base", "allgather_into_tensor_coalesced"],
    "ReduceScatter": ["_reduce_scatter_base"],
    "SendRecv": ["send", "recv"],
}
SIZE = 4  # ranks of a group
BYTES = {"Float": 4, "BFloat16": 2}


def call(ts, name, elements, group="0", dtype="Float", tid=1):
    """A call, whose larger side has four times the elements of an all-gather or scatter."""
    sizes = {"allgather": (1, SIZE), "reduce_scatter": (SIZE, 1)}
    less, more = next((sizes[part] for part in sizes if part in name), (1, 1))
    return k.event(
        "record_param_comms", "cpu_op", ts, 5, pid=100, tid=tid,
        Collective_name=name, dtype=dtype, In_msg_nelems=less * elements,
        Out_msg_nelems=more * elements, Group_size=SIZE, Process_Group_Name=group,
        Process_Group_Description=f"group {group}", Process_Group_Ranks="[0, 1, 2, 3]",
    )  # fmt: skip


def launched(ts, number, op, tid=1, **args):
    correlation = number + 1  # 0 stands for none
    kernel = k.kernel(KERNELS[op], ts + 3, 4, stream=20, correlation=correlation, **args)
    return [k.launch(ts, correlation, tid=tid), kernel]


def collectives(tmp_path, events):
    """Operation, bytes and group of each kernel."""
    path = k.write(tmp_path / "rank0.json", events, world=SIZE)
    trace = reader.read(path, TraceOptions())
    groups = [*trace.groups["name"].to_pylist(), None]
    rows = trace.comm.select(["op", "payload_bytes", "group"]).to_pylist()
    return [
        (
            OPS[row["op"]],
            row["payload_bytes"],
            groups[-1 if row["group"] is None else row["group"]],
        )
        for row in rows
    ]


STEPS = st.one_of(
    st.tuples(
        st.just("call"),
        st.sampled_from([(op, name) for op, names in CALLS.items() for name in names]),
        st.integers(1, 50),
        st.sampled_from("01"),
    ),
    # A call of its own around the launch, with a kernel of its own.
    st.tuples(st.just("whole"), st.sampled_from(sorted(CALLS)), st.integers(1, 50)),
    st.tuples(st.just("launch"), st.sampled_from(sorted(KERNELS))),
    st.tuples(st.sampled_from(["wait", "endCoalescing"])),
)


def expected(op, pending, others=()):
    """The definition: the last calls of one operation and group before a burst of launches.

    `others` are the operations of the burst's other kernels.
    """
    pending = [row for row in pending if row[0] == op or row[0] not in others]
    chosen = []
    for row in reversed(pending):
        is_right = row[0] == op if op != "SendRecv" else not chosen or row[0] == chosen[0][0]
        if not is_right or (chosen and row[3] != chosen[0][3]):
            break
        chosen.append(row)
    if not chosen or (op in others and len(chosen) < len(pending)):
        return op, None, None
    if op in others:
        return chosen[0][0], None, chosen[0][3]
    if chosen[0][0] == "SendRecv":
        sides = [
            sum(elements for _, name, elements, _ in chosen if name == side) * 4
            for side in ("send", "recv")
        ]
        return "SendRecv", max(sides), chosen[0][3]
    return chosen[0][0], sum(4 * SIZE * row[2] for row in chosen), chosen[0][3]


def of_burst(ops, pending):
    return [
        expected(op, pending, [*ops[:place], *ops[place + 1 :]]) for place, op in enumerate(ops)
    ]


@given(st.lists(STEPS, max_size=12))
def test_a_kernel_has_the_sum_of_the_calls_since_the_launch_before(tmp_path_factory, steps):
    events, wanted, pending, burst = [k.mark("ProfilerStep#1", 0, 10_000)], [], [], []
    for number, (kind, *words) in enumerate(steps):
        ts = 100 * number + 10
        if kind in {"call", "whole"} and burst:
            wanted += of_burst(burst, pending)
            pending, burst = [], []
        if kind == "call":
            (op, name), elements, group = words
            events.append(call(ts, name, elements, group))
            pending.append((op, name, elements, group))
        elif kind == "whole":
            op, elements = words
            around = call(ts, CALLS[op][0], elements)
            events += [{**around, "dur": 20}, *launched(ts + 5, number, op)]
            payload = elements * 4 * (1 if op == "SendRecv" else SIZE)
            wanted.append((op, payload, "0"))
            pending = []
        elif kind == "launch":
            events += launched(ts, number, *words)
            burst += words
        else:
            events.append(call(ts, kind, 7))
    wanted += of_burst(burst, pending)
    folder = tmp_path_factory.mktemp("calls")
    assert collectives(folder, events) == wanted


@pytest.mark.parametrize("is_reversed", [False, True])
def test_kernels_launched_together_have_the_calls_of_their_operation(tmp_path, is_reversed):
    calls = [("send", 10, "1"), ("_allgather_base", 20, "0")]
    kernels = ["SendRecv", "AllGather"]
    if is_reversed:
        calls.reverse()
    events = [call(10 + 10 * at, *words) for at, words in enumerate(calls)]
    events += [row for at, op in enumerate(kernels) for row in launched(50 + 10 * at, at, op)]
    assert collectives(tmp_path, events) == [("SendRecv", 40, "1"), ("AllGather", 320, "0")]


def test_kernels_that_share_calls_have_no_sizes_and_say_why(tmp_path):
    events = [
        k.mark("ProfilerStep#1", 0, 1000),
        call(10, "_allgather_base", 10),
        call(20, "_allgather_base", 20),
        k.event("nccl:coalesced", "user_annotation", 35, 40, pid=100, tid=1),
        *launched(40, 1, "AllGather"),
        *launched(50, 2, "AllGather"),
    ]
    assert collectives(tmp_path, events) == [("AllGather", None, "0")] * 2
    trace = reader.read(tmp_path / "rank0.json", TraceOptions())
    (text,) = [text for text in trace.meta.warnings if "no known size" in text]
    assert "which did what is not recorded" in text
    assert "record_shapes" not in text


def test_calls_of_other_threads_are_of_other_kernels(tmp_path):
    events = [
        call(10, "_allgather_base", 10),
        call(20, "_allgather_base", 20, tid=2),
        *launched(40, 1, "AllGather"),
        *launched(50, 2, "AllGather", tid=2),
    ]
    assert [row[1] for row in collectives(tmp_path, events)] == [160, 320]


def test_a_kernel_that_says_coalesced_has_the_sum_of_its_calls(tmp_path):
    events = [
        call(10, "_allgather_base", 10),
        call(20, "_allgather_base", 20),
        *launched(
            40, 1, "AllGather", Collective_name="coalesced", dtype="Float", In_msg_nelems=1,
            Out_msg_nelems=1, Process_Group_Name="1", Group_size=SIZE,
        ),
    ]  # fmt: skip
    assert collectives(tmp_path, events) == [("AllGather", 480, "1")]


@pytest.mark.parametrize("change", [{"dtype": "BFloat16"}, {"elements": -3}])
def test_sizes_of_calls_that_do_not_add_up_are_unknown(tmp_path, change):
    words = {"name": "_allgather_base", "elements": 20, **change}
    events = [
        call(10, "_allgather_base", 10),
        call(20, **words),
        *launched(40, 1, "AllGather"),
    ]
    assert collectives(tmp_path, events) == [("AllGather", None, "0")]
