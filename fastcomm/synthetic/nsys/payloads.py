"""NVTX payloads of NCCL calls: layouts by release, binary data, JSON, schema rows.

Layouts follow C: a field is aligned to its size, a struct is padded to its widest field. A
collective of the job is one call or several.
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

COMM, PARENT = "NCCL communicator ID", "Parent NCCL communicator ID"
SIZE = "Message size [bytes]"
RANKS, RANK, DEVICE = "No. of ranks", "Rank", "CUDA device"
REDUCTION, ROOT, PEER = "Reduction operation", "Root", "Peer rank"
FIRST_SCHEMA = 1 << 24  # smaller ids are types of NVTX
HEADER = 32
REDUCTIONS = ("Sum", "Product", "Max", "Min", "Avg")

_INT, _UINT64, _SIZE_T = 5, 18, 22  # ids of NVTX types
_WIDE = {COMM: _UINT64, PARENT: _UINT64, SIZE: _SIZE_T, "Bytes": _SIZE_T}
_ENUM = {"2.22": 11, "2.24": 14, "2.27": 16, "2.28": 20}
_INIT = (COMM, RANKS, RANK, DEVICE)
# By call: number of the schema, labels of the fields.
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
_BYTES = {"ncclBroadcast", "ncclSend", "ncclRecv"}  # calls whose size was once labeled "Bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadField:
    """A field of a payload."""

    label: str
    type: int  # id of the NVTX type or schema
    offset: int  # in bytes

    @property
    def format(self) -> str:
        """Format of the field for `struct`."""
        return "<Q" if self.label in _WIDE else "<i"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of the payload of a call."""

    schema: int
    fields: tuple[PayloadField, ...]
    size: int  # in bytes

    def pack(self, values: dict[str, int]) -> bytes:
        """Return the payload of values by label, as bytes."""
        packed = bytearray(self.size)
        for field in self.fields:
            label = SIZE if field.label == "Bytes" else field.label
            struct.pack_into(field.format, packed, field.offset, values[label])
        return bytes(packed)


@cache
def layout(call: str, release: Release) -> Layout | None:
    """Return the layout of a call's payload; None if the release has none for the call."""
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
    """Return the fields before 2.25, where the rank precedes the number of ranks."""
    if labels == _INIT:
        return RANK, RANKS, DEVICE
    remaining = tuple(label for label in labels if label not in {COMM, PARENT})
    return tuple("Bytes" if label == SIZE and call in _BYTES else label for label in remaining)


def blob(layout: Layout, domain: int, values: dict[str, int], *, total: bool) -> bytes:
    """Return header and payload; with `total` the header's last field counts the header too."""
    last = HEADER + layout.size if total else HEADER
    return struct.pack("<4Q", domain, layout.schema, layout.size, last) + layout.pack(values)


def text(layout: Layout, values: dict[str, int], *, strings: bool) -> str:
    """Return the payload as JSON; with `strings` all values are formatted as strings."""
    values_by_label: dict[str, object] = {}
    for field in layout.fields:
        value = values[SIZE if field.label == "Bytes" else field.label]
        values_by_label[field.label] = _formatted(field.label, value) if strings else value
    return json.dumps(values_by_label)


def _formatted(label: str, value: int) -> str:
    if label == REDUCTION:
        return REDUCTIONS[value]
    return f"{value:,}" if label in {COMM, PARENT} else str(value)


def add_schemas(
    tables: ReportTables, variant: NsysVariant, domain: int, calls: set[str]
) -> None:
    """Add the schema rows of one process, for the calls that it has made."""
    layouts = [layout(call, variant.nccl) for call in sorted(calls)]
    present = sorted(filter(None, layouts), key=lambda schema: schema.schema)
    for schema in present:
        place = {"domainId": domain, "schemaId": schema.schema}
        sizes = {"numEntries": len(schema.fields), "payloadSize": schema.size}
        tables.add("NVTX_PAYLOAD_SCHEMAS", **place, **sizes, type=1)
        for number, field in enumerate(schema.fields):
            kind = {"type": field.type, "offset": field.offset or None}  # the first is null
            name = field.label
            tables.add("NVTX_PAYLOAD_SCHEMA_ENTRIES", **place, idx=number, name=name, **kind)
    if any(field.label == REDUCTION for schema in present for field in schema.fields):
        _add_enum(tables, domain, FIRST_SCHEMA + _ENUM[variant.nccl])


def _add_enum(tables: ReportTables, domain: int, schema: int) -> None:
    """Add the enum of reduction operations as schema number `schema` of a domain."""
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
    """A call of NCCL, with the values of its payload."""

    name: str
    values: dict[str, int]


def communicator(job: Job, group: SyntheticGroup) -> int:
    """Return the id of a group's communicator, above 2**63 for the world group."""
    identity = f"{job.seed} {group.name} {group.ranks}".encode()
    number = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little")
    return number | 1 << 63 if group.name == "0" else number


def operations(job: Job, rank: int, call: SyntheticCall, *, native: bool) -> list[NcclFunction]:
    """Return the NCCL calls of a collective; with `native` an even all-to-all is one call."""
    size = ELEMENT[call.dtype]
    comm = {COMM: communicator(job, call.group)}
    if call.operation.op == "AllToAll":
        if native and _is_even(job, call):
            payload = {SIZE: call.send_splits[0] * job.hidden * size}
            return [NcclFunction(name="ncclAlltoAll", values=comm | payload)]
        return _exchange(job, call, comm)
    name = _NAMES[call.operation.collective]
    # NCCL reports the size of the smaller side of a gather or scatter.
    counts = {SIZE: min(call.sent, call.received) * size}
    extra = {REDUCTION: 0, ROOT: ROOT_PLACE}
    if call.peers:
        source, target = call.peers
        peer = target if rank == source else source
        extra[PEER] = call.group.ranks.index(peer)
    return [NcclFunction(name=name, values=comm | counts | extra)]


def _exchange(job: Job, call: SyntheticCall, comm: dict[str, int]) -> list[NcclFunction]:
    """Return a send and a receive for each peer, the own rank included, if it has bytes."""
    calls = []
    for peer in range(call.group.size):
        for name, rows in (("ncclSend", call.send_splits), ("ncclRecv", call.receive_splits)):
            count = rows[peer] * job.hidden * ELEMENT[call.dtype]
            if count:
                values = comm | {SIZE: count, PEER: peer}
                calls.append(NcclFunction(name=name, values=values))
    return calls


def _is_even(job: Job, call: SyntheticCall) -> bool:
    """Whether all members send equally many rows to all members."""
    sent = (splits(job, call.group, place, call.seq)[0] for place in range(call.group.size))
    return len({rows for member in sent for rows in member}) == 1
