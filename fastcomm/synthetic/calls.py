"""A collective call: what the host asks for, how many bytes that is, how long it takes."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from fastcomm.synthetic.groups import Group
from fastcomm.synthetic.job import Job

_STORAGE = "(ncclDevKernelArgsStorage<4096ul>)"
ROOT = 0  # place in the group, of every rooted operation
ELEMENT = {"BFloat16": 2, "Float": 4, "Long": 8}


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of call, under the four names it has in a trace."""

    op: str  # as every table of ours calls it
    collective: str  # "Collective name"
    host: str  # the operator
    annotation: str
    kernel: str
    turns: int  # factor (n - 1) / n of the bytes on the bus, so often; 0: all bytes, once


OPERATIONS = {
    "AllReduce": Operation(
        "AllReduce",
        "allreduce",
        "c10d::allreduce_",
        "nccl:all_reduce",
        f"ncclDevKernel_AllReduce_Sum_{{dtype}}_RING_LL{_STORAGE}",
        2,
    ),
    "AllGather": Operation(
        "AllGather",
        "_allgather_base",
        "c10d::_allgather_base_",
        "nccl:_all_gather_base",
        f"ncclDevKernel_AllGather_RING_LL{_STORAGE}",
        1,
    ),
    "ReduceScatter": Operation(
        "ReduceScatter",
        "_reduce_scatter_base",
        "c10d::_reduce_scatter_base_",
        "nccl:_reduce_scatter_base",
        f"ncclDevKernel_ReduceScatter_Sum_{{dtype}}_RING_LL{_STORAGE}",
        1,
    ),
    "AllToAll": Operation(
        "AllToAll",
        "all_to_allv",
        "c10d::alltoall_base_",
        "nccl:all_to_all",
        f"ncclDevKernel_SendRecv{_STORAGE}",
        1,
    ),
    "Broadcast": Operation(
        "Broadcast",
        "broadcast",
        "c10d::broadcast_",
        "nccl:broadcast",
        f"ncclDevKernel_Broadcast_RING_LL{_STORAGE}",
        0,
    ),
    "Send": Operation(
        "SendRecv",
        "send",
        "c10d::send",
        "nccl:send {src}->{dst}",
        f"ncclDevKernel_SendRecv{_STORAGE}",
        0,
    ),
    "Recv": Operation(
        "SendRecv",
        "recv",
        "c10d::recv_",
        "nccl:recv {dst}<-{src}",
        f"ncclDevKernel_SendRecv{_STORAGE}",
        0,
    ),
}
_SHORT = {"BFloat16": "bf16", "Float": "f32", "Long": "u64"}


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as one of its members makes it; counts are elements."""

    operation: Operation
    group: Group
    dtype: str
    sent: int
    received: int
    seq: int
    send_splits: tuple[int, ...] = ()  # rows, as every split of PyTorch
    receive_splits: tuple[int, ...] = ()
    peers: tuple[int, int] | None = None  # source and destination of a message, global ranks

    @property
    def payload(self) -> int:
        """nccl-tests' S, in bytes."""
        return max(self.sent, self.received) * ELEMENT[self.dtype]

    @property
    def bus(self) -> int:
        """Bytes that a perfect algorithm moves over each link."""
        return bus_bytes(self.operation, self.payload, self.group.size)

    @property
    def kernel(self) -> str:
        """The name on the device."""
        return self.operation.kernel.format(dtype=_SHORT[self.dtype])

    @property
    def annotation(self) -> str:
        """The name of the range around the launch."""
        src, dst = self.peers or (0, 0)
        return self.operation.annotation.format(src=src, dst=dst)


@lru_cache(maxsize=4096)
def bus_bytes(operation: Operation, payload: int, size: int) -> int:
    """`payload` times the factor of the operation, to the nearest integer, half to even."""
    if operation.turns == 0:
        return payload if size > 1 else 0
    return round(Fraction(payload * operation.turns * (size - 1), size))


def transfer_ns(job: Job, operation: Operation, payload: int, size: int) -> int:
    """How long the call takes from the moment when its last member is there."""
    return job.latency_ns + bus_bytes(operation, payload, size) * 10**9 // job.link_speed
