"""A collective of the job as the calls of NCCL that make it, with what their payloads say."""

from dataclasses import dataclass
from hashlib import blake2b

from fastcomm.synthetic.calls import ELEMENT, ROOT, SyntheticCall, SyntheticGroup, splits
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys import payloads

_NAMES = {
    "allreduce": "ncclAllReduce",
    "_allgather_base": "ncclAllGather",
    "_reduce_scatter_base": "ncclReduceScatter",
    "broadcast": "ncclBroadcast",
    "send": "ncclSend",
    "recv": "ncclRecv",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclFunction:
    """One function of NCCL, and the fields of its payload."""

    name: str
    values: dict[str, int]


def communicator(job: Job, group: SyntheticGroup) -> int:
    """The id of a group's communicator: a hash, the same on all members; the world's is big."""
    said = f"{job.seed} {group.name} {group.ranks}".encode()
    number = int.from_bytes(blake2b(said, digest_size=8).digest(), "little")
    return number | 1 << 63 if group.name == "0" else number


def operations(job: Job, rank: int, call: SyntheticCall, *, native: bool) -> list[NcclFunction]:
    """The calls behind one collective; `native`: an even all-to-all has a call of its own."""
    size = ELEMENT[call.dtype]
    comm = {payloads.COMM: communicator(job, call.group)}
    if call.operation.op == "AllToAll":
        if native and _is_even(job, call):
            each = {payloads.SIZE: call.send_splits[0] * job.hidden * size}
            return [NcclFunction(name="ncclAlltoAll", values=comm | each)]
        return _exchange(job, call, comm)
    name = _NAMES[call.operation.collective]
    # The one size that NCCL says of a gather is that of its smaller side.
    counts = {payloads.SIZE: min(call.sent, call.received) * size}
    more = {payloads.REDUCTION: 0, payloads.ROOT: ROOT}
    if call.peers:
        source, target = call.peers
        peer = target if rank == source else source
        more[payloads.PEER] = call.group.ranks.index(peer)
    return [NcclFunction(name=name, values=comm | counts | more)]


def _exchange(job: Job, call: SyntheticCall, comm: dict[str, int]) -> list[NcclFunction]:
    """A send and a receive for every peer, the own rank among them; nothing for no bytes."""
    found = []
    for peer in range(call.group.size):
        for name, rows in (("ncclSend", call.send_splits), ("ncclRecv", call.receive_splits)):
            count = rows[peer] * job.hidden * ELEMENT[call.dtype]
            if count:
                values = comm | {payloads.SIZE: count, payloads.PEER: peer}
                found.append(NcclFunction(name=name, values=values))
    return found


def _is_even(job: Job, call: SyntheticCall) -> bool:
    """Whether all members send the same to all: they have to agree on the call."""
    sent = (splits(job, call.group, place, call.seq)[0] for place in range(call.group.size))
    return len({rows for each in sent for rows in each}) == 1
