"""Test sizes against exact fractions, and every operation name of profilers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcomm.trace.bytes import (
    NULL,
    byte_counts,
    element_size,
    op_of_annotation,
    op_of_collective,
    sizes,
)
from fastcomm.trace.schema import OP, OPS


def one(op, given, got, n, uneven=None):
    """The three sizes of one event; None stands for unknown on both sides."""
    columns = [np.array([NULL if count is None else count]) for count in (given, got, n)]
    flags = None if uneven is None else np.array([uneven])
    found = sizes(np.array([OP[op]], np.int8), *columns, flags)
    assert all(column.dtype == np.int64 for column in found)
    return tuple(None if column[0] == NULL else int(column[0]) for column in found)


@pytest.mark.parametrize(
    ("op", "given", "got", "msg", "payload", "bus"),
    [
        ("AllReduce", 1000, 1000, 1000, 1000, 1500),
        ("AllGather", 1000, 4000, 1000, 4000, 3000),
        ("ReduceScatter", 4000, 1000, 1000, 4000, 3000),
        ("AllToAll", 4000, 4000, 1000, 4000, 3000),
        ("Gather", 1000, 4000, 1000, 4000, 3000),
        ("Scatter", 4000, 1000, 1000, 4000, 3000),
        ("Broadcast", 1000, 1000, 1000, 1000, 1000),
        ("Reduce", 1000, 1000, 1000, 1000, 1000),
        ("SendRecv", 1000, 3000, 3000, 3000, 3000),
        ("Barrier", 0, 0, 0, 0, 0),
        ("OTHER", 1000, 3000, None, 3000, None),
    ],
)
def test_each_row_of_the_table_for_four_ranks(op, given, got, msg, payload, bus):
    assert one(op, given, got, 4) == (msg, payload, bus)
    if op != "OTHER":
        assert one(op, given, got, 1)[2] == 0
    once = {"Broadcast": 1000, "Reduce": 1000, "SendRecv": 3000, "Barrier": 0}
    assert one(op, given, got, None)[2] == once.get(op)


@pytest.mark.parametrize(
    ("op", "given", "got", "n", "wanted"),
    [
        ("AllReduce", 8, None, 2, (8, 8, 8)),
        ("AllReduce", None, 8, 2, (8, 8, 8)),
        ("AllGather", 8, None, 2, (8, 16, 8)),
        ("AllGather", None, 16, 2, (8, 16, 8)),
        ("AllGather", None, 17, 2, (None, 17, 8)),
        ("AllGather", None, 16, None, (None, 16, None)),
        ("AllGather", 8, None, None, (8, None, None)),
        ("ReduceScatter", None, 8, 2, (8, 16, 8)),
        ("ReduceScatter", 16, None, 2, (8, 16, 8)),
        ("Scatter", None, 8, 3, (8, 24, 16)),
        ("Gather", 8, None, 3, (8, 24, 16)),
        ("AllToAll", 24576, None, 8, (3072, 24576, 21504)),
        ("AllToAll", 13, 13, 2, (None, 13, 6)),  # 6.5, half to even
        ("AllToAll", 15, 15, 2, (None, 15, 8)),  # 7.5
        ("AllToAll", 13568, 53248, 8, (None, 53248, 46592)),  # uneven: the sides differ
        ("AllToAll", 16, 16, 0, (None, 16, None)),
        ("SendRecv", 5, None, 2, (5, 5, 5)),
        ("Broadcast", None, None, 4, (None, None, None)),
        ("Barrier", None, None, None, (0, 0, 0)),
        ("AllReduce", -4, -4, 2, (None, None, None)),  # an overflowed count
        ("AllReduce", 2**62 + 1, 2**62 + 1, 4, (2**62 + 1, 2**62 + 1, None)),
        ("AllGather", 2**62, None, 4, (2**62, None, None)),
    ],
)
def test_unknown_sizes_stay_unknown_or_follow_from_the_others(op, given, got, n, wanted):
    assert one(op, given, got, n) == wanted


def test_an_uneven_all_to_all_has_no_message_size():
    assert one("AllToAll", 16, 16, 4, uneven=True) == (None, 16, 12)
    assert one("AllToAll", 16, 16, 4, uneven=False) == (4, 16, 12)
    assert one("AllGather", 16, 64, 4, uneven=True) == (16, 64, 48)


def test_no_events_have_no_sizes():
    empty = np.array([], np.int64)
    assert [len(column) for column in sizes(empty.astype(np.int8), empty, empty, empty)] == [
        0
    ] * 3


FACTOR = {
    "AllReduce": lambda n: Fraction(2 * (n - 1), n),
    "AllGather": lambda n: Fraction(n - 1, n),
    "ReduceScatter": lambda n: Fraction(n - 1, n),
    "AllToAll": lambda n: Fraction(n - 1, n),
    "Gather": lambda n: Fraction(n - 1, n),
    "Scatter": lambda n: Fraction(n - 1, n),
    "Broadcast": lambda n: Fraction(1) if n > 1 else Fraction(0),
    "Reduce": lambda n: Fraction(1) if n > 1 else Fraction(0),
    "SendRecv": lambda n: Fraction(1) if n > 1 else Fraction(0),
}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(FACTOR)), st.integers(0, 2**62 - 1), st.integers(1, 20_000)
        ),
        min_size=1,
    )
)
def test_bus_bytes_are_exact(events):
    op = np.array([OP[name] for name, _, _ in events], np.int8)
    total, n = (np.array([event[at] for event in events]) for at in (1, 2))
    found = sizes(op, total, total, n)
    # round() of a Fraction is exact and goes half to even.
    assert found.bus.tolist() == [round(size * FACTOR[name](n)) for name, size, n in events]
    assert found.payload.tolist() == total.tolist()


@given(
    st.sampled_from(OPS),
    *[st.none() | st.integers(-5, 2**40)] * 2,
    st.none() | st.integers(-1, 9),
)
def test_sizes_are_never_negative(op, given, got, n):
    assert all(count is None or count >= 0 for count in one(op, given, got, n))


def test_byte_counts():
    elements = np.array([3, NULL, 5, -7, 2**61, 0])
    widths = np.array([4, 4, NULL, 2, 8, 2])
    assert byte_counts(elements, widths).tolist() == [12, NULL, NULL, NULL, NULL, 0]


@pytest.mark.parametrize(
    ("names", "size"),
    [
        ("Byte Char Bool bool Float8_e5m2 Float8_e4m3fn c10::Float8_e4m3fnuz", 1),
        ("Short Half BFloat16 c10::Half c10::BFloat16 short", 2),
        ("Int Float ComplexHalf float int", 4),
        ("Long Double ComplexFloat double long c10::complex<float>", 8),
        ("ComplexDouble c10::complex<double>", 16),
    ],
)
def test_elements_have_the_size_of_their_type(names, size):
    assert {element_size(name) for name in names.split()} == {size}


def test_types_of_several_words():
    assert element_size("long int") == 8
    assert element_size("unsigned char") == element_size("signed char") == 1
    assert [element_size(name) for name in ("", "half", "Tensor", "(null)", "Float16")] == [
        None
    ] * 5


@pytest.mark.parametrize(
    ("op", "names"),
    [
        ("AllReduce", "allreduce allreduce_coalesced"),
        ("AllGather", "allgather _allgather_base all_gather_into_tensor_coalesced"),
        (
            "ReduceScatter",
            "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced",
        ),
        ("Broadcast", "broadcast"),
        ("Reduce", "reduce"),
        ("Gather", "gather"),
        ("Scatter", "scatter"),
        ("AllToAll", "all_to_all all_to_allv"),
        ("SendRecv", "send recv pointToPoint"),
        ("Barrier", "barrier"),
        # torchcomms
        ("AllReduce", "sharded_relay_multi_group_all_reduce"),
        ("AllGather", "all_gather_single all_gather_v all_gather_p_exec"),
        ("ReduceScatter", "reduce_scatter_single reduce_scatter_quantized"),
        ("AllToAll", "all_to_all_v_single device_alltoallv_single"),
        ("SendRecv", "batch_op_issue"),
        ("OTHER", "reduce_max allreducex all x2gather"),
    ],
)
def test_collective_names(op, names):
    assert {op_of_collective(name) for name in names.split()} == {OP[op]}


def test_waits_and_ends_of_groups_are_no_communication():
    for name in [
        "wait",
        "coalesced",
        "startCoalescing",
        "endCoalescing",
        "init",
        "reconfigure",
        "split",
        "abort",
    ]:
        assert op_of_collective(name) is None
    assert op_of_annotation("nccl:coalesced") is None
    assert op_of_annotation("c10d_functional::wait_tensor") is None
    assert op_of_collective("") == OP["OTHER"]


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (
            "AllReduce",
            "nccl:all_reduce gloo:all_reduce c10d::allreduce_ c10d::allreduce_coalesced_",
        ),
        (
            "AllGather",
            "nccl:_all_gather_base nccl:all_gather c10d::_allgather_base_ c10d::allgather_",
        ),
        ("AllGather", "c10d::allgather_into_tensor_coalesced_ gloo:all_gather"),
        (
            "ReduceScatter",
            "nccl:reduce_scatter nccl:_reduce_scatter_base c10d::_reduce_scatter_base_",
        ),
        ("AllToAll", "nccl:all_to_all c10d::alltoall_base_ c10d::alltoall_ gloo:all_to_all"),
        (
            "SendRecv",
            "nccl:send nccl:recv c10d::send c10d::recv_ c10d::recv_any_source_ gloo:send",
        ),
        ("Broadcast", "nccl:broadcast nccl:_broadcast_oop c10d::broadcast_ gloo:broadcast"),
        ("Reduce", "nccl:reduce nccl:_reduce_oop c10d::reduce_"),
        ("Gather", "nccl:gather c10d::gather_"),
        ("Scatter", "nccl:scatter c10d::scatter_"),
        (
            "Barrier",
            "gloo:barrier c10d::barrier c10d::monitored_barrier_ nccl:all_reduce_barrier",
        ),
        ("AllToAll", "_c10d_functional::all_to_all_single"),
        ("OTHER", "gloo:something"),
    ],
)
def test_annotation_names(op, names):
    assert {op_of_annotation(name) for name in names.split()} == {OP[op]}


def test_annotations_may_have_text_after_the_operation():
    assert (
        op_of_annotation("nccl:send 0->1")
        == op_of_annotation("nccl:recv 1<-0")
        == OP["SendRecv"]
    )
    assert op_of_annotation("nccl:all_reduce, op_id = 7") == OP["AllReduce"]


@pytest.mark.parametrize(
    "name", ["aten::mm", "all_reduce", "ProfilerStep#3", "", "nccl:", "xnccl:send"]
)
def test_other_ranges_are_no_communication(name):
    assert op_of_annotation(name) is None
