"""What NCCL says in the payloads of its NVTX ranges: fields by name, from blobs or from JSON.

A blob is a header of four little-endian u64 (domain, schema, payload size, and a fourth that
depends on the version) and the payload; the schema tables name the payload's fields. A
communicator's id is 64 bits without a sign: a column holds its bits as int64.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from fastcomm.errors import TraceFileError
from fastcomm.readers.nsys import layout
from fastcomm.readers.nsys.export import Export
from fastcomm.trace.columns import alike
from fastcomm_kernels.arrays import NULL, Ints

# The operation of each call; a send and a receive are one of two sides.
OPERATIONS = {
    "ncclAllReduce": "AllReduce",
    "ncclAllGather": "AllGather",
    "ncclReduceScatter": "ReduceScatter",
    "ncclAlltoAll": "AllToAll",
    "ncclBroadcast": "Broadcast",
    "ncclBcast": "Broadcast",
    "ncclReduce": "Reduce",
    "ncclGather": "Gather",
    "ncclScatter": "Scatter",
    "ncclSend": "SendRecv",
    "ncclRecv": "SendRecv",
    "ncclPutSignal": "OTHER",
}
# The labels of NCCL's fields, and what they are called here.
LABELS = {
    "NCCL communicator ID": "communicator",
    "Message size [bytes]": "size",
    "Bytes": "size",  # of broadcasts, sends and receives until 2.24
    "Peer rank": "peer",
    "Root": "root",
    "No. of ranks": "ranks",
    "Rank": "rank",
}
FIELDS = ("communicator", "size", "peer", "root", "ranks", "rank")

_HEADER = 32
# Bytes of an NVTX entry type, and whether it has a sign.
_TYPES = {
    5: "i4", 6: "u4", 7: "i8", 8: "u8", 9: "i8", 10: "u8",
    15: "i4", 16: "u4", 17: "i8", 18: "u8", 22: "u8", 23: "u8",
}  # fmt: skip

_ID, _SIZE = ("communicator", 0, "u8"), ("size", 8, "u8")
_MEMBER = (("ranks", 8, "i4"), ("rank", 12, "i4"))
_SPLIT = (_ID, ("ranks", 16, "i4"), ("rank", 20, "i4"))
_OLD_SIZE = ("size", 0, "u8")
_MESSAGES = ("ncclSend", "ncclRecv")
_ROOTED = ("ncclBroadcast", "ncclBcast", "ncclReduce", "ncclGather", "ncclScatter")
# Where the schema tables are missing: NCCL's layouts since 2.25, and before, by payload size.
_NEW_SIZES = {"ncclAllGather": 16, "ncclAlltoAll": 16}


@dataclass(frozen=True, slots=True)
class Field:
    """One value in a payload."""

    name: str  # one of FIELDS
    offset: int
    type: str  # of NumPy, little-endian


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclCalls:
    """Calls of NCCL's API: `names[code]` each, sorted by nothing."""

    names: tuple[str, ...]
    code: Ints
    start: Ints
    stop: Ints
    thread: Ints  # globalTid

    def name_of(self, row: int) -> str:
        """The name of the function."""
        return self.names[int(self.code[row])]


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a payload that count, and the size of the whole."""

    size: int
    fields: tuple[Field, ...]


def decode(
    export: Export,
    calls: NcclCalls,
    blobs: pa.ChunkedArray,
    texts: Sequence[str],
) -> dict[str, Ints]:
    """A column for each of FIELDS: what the payload of each call says, or NULL.

    A blob goes before a text. Raises `TraceFileError` where a blob is too short.
    """
    found = {name: np.full(len(calls.start), NULL, np.int64) for name in FIELDS}
    _add_texts(found, texts)
    blob = blobs.combine_chunks()
    blob = blob.chunk(0) if isinstance(blob, pa.ChunkedArray) else blob
    lengths = pa.compute.binary_length(blob).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(lengths > 0)
    if len(rows):
        _add_blobs(found, _Blobs(export, calls, blob, lengths), rows)
    return found


class _Blobs:
    """Blobs as one run of bytes."""

    def __init__(self, export: Export, calls: NcclCalls, blob: pa.Array, lengths: Ints) -> None:
        self.path: Path = export.path
        self.schemas = _schemas(export)
        self.calls = calls
        self.lengths = lengths
        _, offsets, data = blob.buffers()
        self.bytes = np.frombuffer(data, np.uint8)
        at = np.frombuffer(offsets, np.int32)[blob.offset : blob.offset + len(blob)]
        self.first = at.astype(np.int64)

    def values(self, rows: Ints, offset: int, type_: str) -> Ints:
        """The values at `offset` of the blobs of these rows, which are long enough."""
        width = int(type_[1])
        cells = self.first[rows][:, None] + offset + np.arange(width)
        values: Ints = self.bytes[cells].reshape(-1).view(f"<{type_}").astype(np.int64)
        return values

    def check(self, rows: Ints, wanted: int) -> None:
        """TraceFileError where one of the rows has a blob of fewer bytes."""
        short = rows[self.lengths[rows] < wanted]
        if len(short):
            row = int(short[0])
            raise TraceFileError(
                f"{self.path}: {layout.NVTX}.binaryData of {self.calls.name_of(row)} (start = "
                f"{self.calls.start[row]}): {self.lengths[row]} bytes, wanted {wanted} or "
                f"more; {len(short)} such rows"
            )


def _add_blobs(found: dict[str, Ints], blobs: _Blobs, rows: Ints) -> None:
    blobs.check(rows, _HEADER)
    domain, schema = blobs.values(rows, 0, "i8"), blobs.values(rows, 8, "i8")
    said = (domain, schema, blobs.calls.code[rows], blobs.lengths[rows])
    first, kind = alike(*said)
    different = np.stack(said, axis=1)[first]
    for number, (domain_id, schema_id, code, length) in enumerate(different.tolist()):
        same = rows[kind == number]
        known = blobs.schemas.get((domain_id, schema_id))
        known = known or _by_name(blobs.calls.names[code], length - _HEADER)
        blobs.check(same, _HEADER + known.size)
        for field in known.fields:
            found[field.name][same] = blobs.values(same, _HEADER + field.offset, field.type)


def _by_name(call: str, size: int) -> Schema:
    """The layout of a call's payload of so many bytes, where no table describes it."""
    if call.startswith(("ncclCommInitRank", "ncclCommShrink")):
        return Schema(24, tuple(Field(*each) for each in (_ID, *_MEMBER)))
    if call.startswith(("ncclCommSplit", "ncclCommGrow")):
        return Schema(32, tuple(Field(*each) for each in _SPLIT))
    if call.startswith("ncclComm"):
        return Schema(8, (Field(*_ID),))
    # Behind the size is who it goes to, or comes from.
    who = "peer" if call in _MESSAGES else "root" if call in _ROOTED else None
    if size >= _NEW_SIZES.get(call, 24):
        fields = (_ID, _SIZE, (who, 16, "i4")) if who else (_ID, _SIZE)
        return Schema(24 if who else 16, tuple(Field(*each) for each in fields))
    old = (_OLD_SIZE, (who, 8, "i4")) if who else (_OLD_SIZE,)
    return Schema(12 if who else 8, tuple(Field(*each) for each in old))


def _schemas(export: Export) -> dict[tuple[int, int], Schema]:
    """The schemas by domain and id. The tables repeat them for each process."""
    rows = export.rows(layout.SCHEMAS, ("domainId", "schemaId", "payloadSize"))
    sizes = {
        (domain, schema): size
        for domain, schema, size in zip(
            *(rows[name].tolist() for name in ("domainId", "schemaId", "payloadSize")),
            strict=True,
        )
        if size != NULL
    }
    entries = export.rows(
        layout.ENTRIES, ("domainId", "schemaId", "idx", "type", "name", "offset")
    )
    fields: dict[tuple[int, int], dict[int, Field]] = {}
    columns = [entries[name].tolist() for name in ("domainId", "schemaId", "idx", "type")]
    offsets, labels = entries["offset"].tolist(), entries.texts("name").to_pylist()
    for domain, schema, index, type_, offset, label in zip(
        *columns, offsets, labels, strict=True
    ):
        name, width = LABELS.get(label), _TYPES.get(type_)
        if name is not None and width is not None:
            # The first field's offset is null.
            field = Field(name, 0 if offset == NULL else offset, width)
            fields.setdefault((domain, schema), {})[index] = field
    return {
        key: Schema(max([sizes.get(key, 0), *map(_end, found.values())]), tuple(found.values()))
        for key, found in fields.items()
    }


def _end(field: Field) -> int:
    return field.offset + int(field.type[1])


def _add_texts(found: dict[str, Ints], texts: Sequence[str]) -> None:
    for row, text in enumerate(texts):
        if text:
            for label, value in _object(text).items():
                if (name := LABELS.get(label)) is not None:
                    found[name][row] = _whole(value)


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _whole(value: object) -> int:
    """A number, or a text of digits and separators of thousands, as the bits of an int64."""
    if isinstance(value, str):
        digits = re.sub(r"[,\s'_]", "", value)
        value = int(digits, 0) if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", digits) else None
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        return NULL
    return value if value < 2**63 else value - 2**64
