"""What NCCL says of a call in its NVTX payload: layouts by release, blobs, JSON, schema rows.

Layouts are those of C: a field stands at a multiple of its size, the whole is padded to its
widest field. A collective of the job is one call or several.
"""

import json
import struct
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

from fastcomm.synthetic.catalog import (
    ELEMENT,
    ROOT_PLACE,
    SyntheticCall,
    SyntheticGroup,
    splits,
)
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.nsys.tables import NsysVariant, Release, ReportTables

COMM, PARENT, SIZE = (
    "NCCL communicator ID",
    "Parent NCCL communicator ID",
    "Message size [bytes]",
)
RANKS, RANK, DEVICE = "No. of ranks", "Rank", "CUDA device"
REDUCTION, ROOT, PEER = "Reduction operation", "Root", "Peer rank"
FIRST_SCHEMA = 1 << 24  # the ids below are NVTX's own types
HEADER = 32
REDUCTIONS = ("Sum", "Product", "Max", "Min", "Avg")

_INT, _UINT64, _SIZE_T = 5, 18, 22  # NVTX's numbers of the types
_WIDE = {COMM: _UINT64, PARENT: _UINT64, SIZE: _SIZE_T, "Bytes": _SIZE_T}
_ENUM = {"2.22": 11, "2.24": 14, "2.27": 16, "2.28": 20}
_INIT = (COMM, RANKS, RANK, DEVICE)
# Number of the schema, labels of the fields.
_CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ncclCommInitRank": (0, _INIT),
    "ncclCommDestroy": (2, _INIT),
    "ncclAllGather": (4, (COMM, SIZE)),
    "ncclAllReduce": (5, (COMM, SIZE, REDUCTION)),
    "ncclBroadcast": (6, (COMM, SIZE, ROOT)),
    "ncclReduceScatter": (7, (COMM, SIZE, REDUCTION)),
    "ncclReduce": (8, (COMM, SIZE, ROOT, REDUCTION)),
    "ncclSend": (9, (COMM, SIZE, PEER)),
    "ncclRecv": (10, (COMM, SIZE, PEER)),
    "ncclCommInitRankConfig": (11, _INIT),
    "ncclCommSplit": (13, (COMM, PARENT, RANKS, RANK, DEVICE, "Color", "Key")),
    "ncclAlltoAll": (16, (COMM, SIZE)),
}
_NEWEST = {"2.22": 10, "2.24": 13, "2.27": 15, "2.28": 19}  # number of the last schema
_BYTES = {"ncclBroadcast", "ncclSend", "ncclRecv"}  # whose size was once called so


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadField:
    """One field of a payload."""

    label: str
    type: int
    offset: int

    @property
    def format(self) -> str:
        """The field's letter in `struct`."""
        return "<Q" if self.label in _WIDE else "<i"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The payload of one call."""

    schema: int
    fields: tuple[PayloadField, ...]
    size: int

    def pack(self, values: dict[str, int]) -> bytes:
        """The payload's bytes."""
        packed = bytearray(self.size)
        for field in self.fields:
            label = SIZE if field.label == "Bytes" else field.label
            struct.pack_into(field.format, packed, field.offset, values[label])
        return bytes(packed)


@cache
def layout(call: str, release: Release) -> Layout | None:
    """What a call's payload looks like; none where the release sends none with it."""
    number, labels = _CALLS.get(call, (99, ()))
    if number > _NEWEST[release]:
        return None
    if release in {"2.22", "2.24"}:
        labels = _without_communicator(call, labels)
    fields = []
    end = 0
    for label in labels:
        width = 8 if label in _WIDE else 4
        offset = -(-end // width) * width
        enum = FIRST_SCHEMA + _ENUM[release]
        type_ = enum if label == REDUCTION else _WIDE.get(label, _INT)
        fields.append(PayloadField(label=label, type=type_, offset=offset))
        end = offset + width
    widest = 8 if any(label in _WIDE for label in labels) else 4
    size = -(-end // widest) * widest
    return Layout(schema=FIRST_SCHEMA + number, fields=tuple(fields), size=size)


def _without_communicator(call: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """The fields before 2.25; those releases put the rank before the number of ranks."""
    if labels == _INIT:
        return RANK, RANKS, DEVICE
    kept = tuple(label for label in labels if label not in {COMM, PARENT})
    return tuple("Bytes" if label == SIZE and call in _BYTES else label for label in kept)


def blob(layout: Layout, domain: int, values: dict[str, int], *, total: bool) -> bytes:
    """Header and payload; `total`: the last field of the header counts the header too."""
    last = HEADER + layout.size if total else HEADER
    return struct.pack("<4Q", domain, layout.schema, layout.size, last) + layout.pack(values)


def text(layout: Layout, values: dict[str, int], *, strings: bool) -> str:
    """The payload as JSON; `strings`: ids as a person reads them, and no number at all."""
    found: dict[str, object] = {}
    for field in layout.fields:
        value = values[SIZE if field.label == "Bytes" else field.label]
        found[field.label] = _said(field.label, value) if strings else value
    return json.dumps(found)


def _said(label: str, value: int) -> str:
    if label == REDUCTION:
        return REDUCTIONS[value]
    return f"{value:,}" if label in {COMM, PARENT} else str(value)


def add_schemas(
    tables: ReportTables, variant: NsysVariant, domain: int, calls: set[str]
) -> None:
    """The schema rows of one process: of the calls it has made, as NCCL registers them then."""
    layouts = [layout(call, variant.nccl) for call in sorted(calls)]
    found = sorted((one for one in layouts if one is not None), key=lambda one: one.schema)
    for one in found:
        tables.add(
            "NVTX_PAYLOAD_SCHEMAS",
            domainId=domain,
            schemaId=one.schema,
            type=1,
            numEntries=len(one.fields),
            payloadSize=one.size,
        )
        for number, field in enumerate(one.fields):
            tables.add(
                "NVTX_PAYLOAD_SCHEMA_ENTRIES",
                domainId=domain,
                schemaId=one.schema,
                idx=number,
                type=field.type,
                name=field.label,
                offset=field.offset or None,  # the first is null
            )
    if any(field.label == REDUCTION for one in found for field in one.fields):
        _add_enum(tables, domain, FIRST_SCHEMA + _ENUM[variant.nccl])


def _add_enum(tables: ReportTables, domain: int, schema: int) -> None:
    place = {"domainId": domain, "schemaId": schema}
    tables.add("NVTX_PAYLOAD_ENUMS", **place, numEntries=len(REDUCTIONS), size=4)
    for number, name in enumerate(REDUCTIONS):
        more: dict[str, object] = {"idx": number, "name": name, "value": number}
        tables.add("NVTX_PAYLOAD_ENUM_ENTRIES", **place, **more)


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
    comm = {COMM: communicator(job, call.group)}
    if call.operation.op == "AllToAll":
        if native and _is_even(job, call):
            each = {SIZE: call.send_splits[0] * job.hidden * size}
            return [NcclFunction(name="ncclAlltoAll", values=comm | each)]
        return _exchange(job, call, comm)
    name = _NAMES[call.operation.collective]
    # The one size that NCCL says of a gather is that of its smaller side.
    counts = {SIZE: min(call.sent, call.received) * size}
    more = {REDUCTION: 0, ROOT: ROOT_PLACE}
    if call.peers:
        source, target = call.peers
        peer = target if rank == source else source
        more[PEER] = call.group.ranks.index(peer)
    return [NcclFunction(name=name, values=comm | counts | more)]


def _exchange(job: Job, call: SyntheticCall, comm: dict[str, int]) -> list[NcclFunction]:
    """A send and a receive for every peer, the own rank among them; nothing for no bytes."""
    found = []
    for peer in range(call.group.size):
        for name, rows in (("ncclSend", call.send_splits), ("ncclRecv", call.receive_splits)):
            count = rows[peer] * job.hidden * ELEMENT[call.dtype]
            if count:
                values = comm | {SIZE: count, PEER: peer}
                found.append(NcclFunction(name=name, values=values))
    return found


def _is_even(job: Job, call: SyntheticCall) -> bool:
    """Whether all members send the same to all: they have to agree on the call."""
    sent = (splits(job, call.group, place, call.seq)[0] for place in range(call.group.size))
    return len({rows for each in sent for rows in each}) == 1
