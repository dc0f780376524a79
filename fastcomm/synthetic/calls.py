"""Collective calls of the made-up job: groups, bytes, and expert routing."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from fastcomm.synthetic.job import Job

# In the order in which they are made; the world comes first and is "0".
DESCRIPTIONS = {
    "dp": "DATA_PARALLEL_GROUP",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "edp": "EXPERT_DATA_PARALLEL_GROUP",
}
TAGS = {"dp": "DP", "tp": "TP", "pp": "PP", "ep": "EP", "edp": "DP", "world": "OTHER"}


@dataclass(frozen=True, slots=True)
class SyntheticGroup:
    """One process group of which a rank is a member."""

    tag: str
    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ranks are in it."""
        return len(self.ranks)


def groups(job: Job, rank: int) -> dict[str, SyntheticGroup]:
    """The groups this rank is in, by kind."""
    world = SyntheticGroup("OTHER", "0", "default_pg", tuple(range(job.ranks)))
    found = {"world": world}
    made = 1
    for kind, description in DESCRIPTIONS.items():
        first, stride, size, index = _progression(job, rank, kind)
        members = tuple(range(first, first + stride * size, stride))
        found[kind] = SyntheticGroup(TAGS[kind], str(made + index), description, members)
        made += job.ranks // size
    return found


def group_count(job: Job) -> int:
    """How many groups the whole job has, the world among them."""
    sizes = (job.dp, job.tp, job.pp, job.ep, job.expert_data)
    return 1 + sum(job.ranks // size for size in sizes)


def _progression(job: Job, rank: int, kind: str) -> tuple[int, int, int, int]:
    """First rank, stride and size of the rank's group of a kind, and its number in the kind."""
    tp, dp, pp = job.place(rank)
    stage = pp * job.tp * job.dp
    block, place = divmod(dp, job.ep)
    if kind == "tp":
        return rank - tp, 1, job.tp, rank // job.tp
    if kind == "pp":
        return rank - stage, job.tp * job.dp, job.pp, rank - stage
    if kind == "dp":
        return stage + tp, job.tp, job.dp, pp * job.tp + tp
    if kind == "ep":
        number = (pp * job.expert_data + block) * job.tp + tp
        return stage + tp + job.tp * job.ep * block, job.tp, job.ep, number
    number = (pp * job.ep + place) * job.tp + tp
    return stage + tp + job.tp * place, job.tp * job.ep, job.expert_data, number


_STORAGE = "(ncclDevKernelArgsStorage<4096ul>)"
ROOT = 0  # place in the group, of every rooted operation
ELEMENT = {"BFloat16": 2, "Float": 4, "Long": 8}


@dataclass(frozen=True, slots=True)
class CallKind:
    """One kind of call, under the four names it has in a trace."""

    op: str  # as every table of ours calls it
    collective: str  # "Collective name"
    host: str  # the operator
    annotation: str
    kernel: str
    turns: int  # factor (n - 1) / n of the bytes on the bus, so often; 0: all bytes, once


OPERATIONS = {
    "AllReduce": CallKind(
        "AllReduce",
        "allreduce",
        "c10d::allreduce_",
        "nccl:all_reduce",
        f"ncclDevKernel_AllReduce_Sum_{{dtype}}_RING_LL{_STORAGE}",
        2,
    ),
    "AllGather": CallKind(
        "AllGather",
        "_allgather_base",
        "c10d::_allgather_base_",
        "nccl:_all_gather_base",
        f"ncclDevKernel_AllGather_RING_LL{_STORAGE}",
        1,
    ),
    "ReduceScatter": CallKind(
        "ReduceScatter",
        "_reduce_scatter_base",
        "c10d::_reduce_scatter_base_",
        "nccl:_reduce_scatter_base",
        f"ncclDevKernel_ReduceScatter_Sum_{{dtype}}_RING_LL{_STORAGE}",
        1,
    ),
    "AllToAll": CallKind(
        "AllToAll",
        "all_to_allv",
        "c10d::alltoall_base_",
        "nccl:all_to_all",
        f"ncclDevKernel_SendRecv{_STORAGE}",
        1,
    ),
    "Broadcast": CallKind(
        "Broadcast",
        "broadcast",
        "c10d::broadcast_",
        "nccl:broadcast",
        f"ncclDevKernel_Broadcast_RING_LL{_STORAGE}",
        0,
    ),
    "Send": CallKind(
        "SendRecv",
        "send",
        "c10d::send",
        "nccl:send {src}->{dst}",
        f"ncclDevKernel_SendRecv{_STORAGE}",
        0,
    ),
    "Recv": CallKind(
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
class SyntheticCall:
    """One collective, as one of its members makes it; counts are elements."""

    operation: CallKind
    group: SyntheticGroup
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
def bus_bytes(operation: CallKind, payload: int, size: int) -> int:
    """`payload` times the factor of the operation, to the nearest integer, half to even."""
    if operation.turns == 0:
        return payload if size > 1 else 0
    return round(Fraction(payload * operation.turns * (size - 1), size))


def transfer_ns(job: Job, operation: CallKind, payload: int, size: int) -> int:
    """How long the call takes from the moment when its last member is there."""
    return job.latency_ns + bus_bytes(operation, payload, size) * 10**9 // job.link_speed


Rows = tuple[int, ...]


def splits(job: Job, group: SyntheticGroup, place: int, seq: int) -> tuple[Rows, Rows]:
    """Rows that a member sends to each and receives from each."""
    rows, limit = -(-job.tokens // job.ep), max(1, job.tokens // job.ep // 8)
    hot = _hot_member(job, group)

    def pair(source: int, target: int) -> int:
        more = rows * job.slowdown // 100 if target == hot else 0
        if source == target:
            return rows + more
        unequal = (source * 7 + target * 13 + source * target * 5 + seq * 11) % (2 * limit + 1)
        return rows + more + unequal - limit

    peers = range(job.ep)
    return tuple(pair(place, peer) for peer in peers), tuple(
        pair(peer, place) for peer in peers
    )


def _hot_member(job: Job, group: SyntheticGroup) -> int | None:
    """The member whose experts get more than their part."""
    if job.fault != "hot_expert" or job.straggler not in group.ranks:
        return None
    return group.ranks.index(job.straggler)
