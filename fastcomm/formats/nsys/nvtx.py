"""Read the NVTX ranges of one process: NCCL ranges with payloads, and ranges of others.

A blob is a header of four little-endian u64 (domain, schema, payload size, and a fourth that
depends on the version) and the payload; the schema tables name the payload's fields. A
communicator's id is an unsigned 64-bit number: a column holds its bits as int64.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.formats.nsys import schema
from fastcomm.formats.nsys.export import ArrayColumns, Export, ExportRows, Points
from fastcomm.formats.nsys.schema import DOMAIN, ENTRIES, NVTX, PUSH_POP, SCHEMAS, START_END
from fastcomm.idle.host_activity import LEAST_RANGE_NS
from fastcomm.trace.columns import alike
from fastcomm.trace.host_names import COLLECTIVE_PREFIXES
from fastcomm_kernels.arrays import NULL, Ints

# The operation of each call; sends and receives are the two sides of one.
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
# The labels of NCCL's fields, and their names in FIELDS.
LABELS = {
    "NCCL communicator ID": "communicator",
    "Message size [bytes]": "size",
    "Bytes": "size",  # broadcasts, sends and receives until 2.24
    "Peer rank": "peer",
    "Root": "root",
    "No. of ranks": "ranks",
    "Rank": "rank",
}
FIELDS = ("communicator", "size", "peer", "root", "ranks", "rank")
_HEADER = 32
# NumPy type of each NVTX entry type.
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
# NCCL's layouts since 2.25 and before, told apart by payload size, for missing schema tables.
_NEW_SIZES = {"ncclAllGather": 16, "ncclAlltoAll": 16}
# `emit_nvtx` adds these to operator names, which makes every name unique.
_ADDED = r", (?:seq|op_id|sizes|stack) = .*$"
_OPERATOR = r", (?:seq|op_id) = "
# Collectives, which metrics need; other short operators are read only for whole traces.
_COLLECTIVE = rf"^(?:{'|'.join(COLLECTIVE_PREFIXES)})"
_OPERATOR_SQL = (
    "text IS NULL OR (text NOT LIKE '%, op_id = %' AND text NOT LIKE '%, seq = %') "
    + "".join(f"OR text GLOB '{name}*' " for name in COLLECTIVE_PREFIXES)
    + f"OR end - start >= {LEAST_RANGE_NS}"
)
_NCCL = r"^nccl[A-Z]"
_NCCL_PREFIX, _NCCL_GLOB = "nccl", "nccl[A-Z]*"
_COLUMNS = ("start", "end", "eventType", "globalTid", "endGlobalTid", "domainId", "textId")


@dataclass(frozen=True, slots=True)
class Field:
    """The place of one value in a payload."""

    name: str  # one of FIELDS
    offset: int  # bytes
    type: str  # NumPy type, little-endian


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclCalls(Points):
    """Calls of NCCL's API, in no order; call i is of the function `names[code[i]]`."""

    names: tuple[str, ...]
    code: Ints

    def name_of(self, row: int) -> str:
        """Return the name of the function that a row calls."""
        return self.names[int(self.code[row])]


@dataclass(frozen=True, slots=True)
class Schema:
    """The layout of a payload: its fields that FIELDS names, and its size in bytes."""

    size: int
    fields: tuple[Field, ...]


def decode(
    export: Export,
    calls: NcclCalls,
    blobs: pa.ChunkedArray,
    texts: Sequence[str],
) -> dict[str, Ints]:
    """Return an int64 column for each of FIELDS, decoded from the payload of each call.

    Parameters
    ----------
    export
        Export with the schema tables.
    calls
        The calls, one per payload.
    blobs, texts
        Binary payloads, and payloads as JSON, which are read for calls without a blob; both may
        be empty.

    Returns
    -------
    dict of str to ndarray
        By name of the field; NULL where the payload lacks it.

    Raises
    ------
    TraceFileError
        If a blob is too short for its schema.

    """
    columns = {name: np.full(len(calls.start), NULL, np.int64) for name in FIELDS}
    _add_texts(columns, texts)
    blob = blobs.combine_chunks()
    blob = blob.chunk(0) if isinstance(blob, pa.ChunkedArray) else blob
    lengths = pa.compute.binary_length(blob).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(lengths > 0)
    if len(rows):
        _add_blobs(columns, _Blobs(export, calls, blob, lengths), rows)
    return columns


class _Blobs:
    """Blobs as one array of bytes."""

    def __init__(self, export: Export, calls: NcclCalls, blob: pa.Array, lengths: Ints) -> None:
        """View the blobs of calls without a copy; `lengths` are in bytes."""
        self.path: Path = export.path
        self.schemas = _schemas(export)
        self.calls = calls
        self.lengths = lengths
        _, offsets, data = blob.buffers()
        self.bytes = np.frombuffer(data, np.uint8)
        starts = np.frombuffer(offsets, np.int32)[blob.offset : blob.offset + len(blob)]
        self.first = starts.astype(np.int64)

    def values(self, rows: Ints, offset: int, type_: str) -> Ints:
        """Return the values at an offset of the blobs of some rows, which are long enough."""
        width = int(type_[1])
        cells = self.first[rows][:, None] + offset + np.arange(width)
        values: Ints = self.bytes[cells].reshape(-1).view(f"<{type_}").astype(np.int64)
        return values

    def check(self, rows: Ints, size: int) -> None:
        """Raise TraceFileError if the blob of a row has fewer than `size` bytes."""
        short = rows[self.lengths[rows] < size]
        if len(short):
            row = int(short[0])
            raise TraceFileError(
                f"{self.path}: {NVTX}.binaryData of {self.calls.name_of(row)} (start = "
                f"{self.calls.start[row]}): {self.lengths[row]} bytes, expected {size} or "
                f"more; {len(short)} such rows"
            )


def _add_blobs(columns: dict[str, Ints], blobs: _Blobs, rows: Ints) -> None:
    """Add the values of the blobs of some rows to the columns."""
    blobs.check(rows, _HEADER)
    domain, schema = blobs.values(rows, 0, "i8"), blobs.values(rows, 8, "i8")
    keys = (domain, schema, blobs.calls.code[rows], blobs.lengths[rows])
    first, kind = alike(*keys)
    different = np.stack(keys, axis=1)[first]
    for number, (domain_id, schema_id, code, length) in enumerate(different.tolist()):
        selected = rows[kind == number]
        listed = blobs.schemas.get((domain_id, schema_id))
        payload = listed or _by_name(blobs.calls.names[code], length - _HEADER)
        blobs.check(selected, _HEADER + payload.size)
        for field in payload.fields:
            values = blobs.values(selected, _HEADER + field.offset, field.type)
            columns[field.name][selected] = values


def _by_name(call: str, size: int) -> Schema:
    """Return the layout of a call's payload of a size in bytes, without a schema table."""
    if call.startswith(("ncclCommInitRank", "ncclCommShrink")):
        return Schema(24, tuple(Field(*entry) for entry in (_ID, *_MEMBER)))
    if call.startswith(("ncclCommSplit", "ncclCommGrow")):
        return Schema(32, tuple(Field(*entry) for entry in _SPLIT))
    if call.startswith("ncclComm"):
        return Schema(8, (Field(*_ID),))
    # The size is followed by the peer or the root.
    partner = "peer" if call in _MESSAGES else "root" if call in _ROOTED else None
    if size >= _NEW_SIZES.get(call, 24):
        fields = (_ID, _SIZE, (partner, 16, "i4")) if partner else (_ID, _SIZE)
        return Schema(24 if partner else 16, tuple(Field(*entry) for entry in fields))
    old = (_OLD_SIZE, (partner, 8, "i4")) if partner else (_OLD_SIZE,)
    return Schema(12 if partner else 8, tuple(Field(*entry) for entry in old))


def _schemas(export: Export) -> dict[tuple[int, int], Schema]:
    """Return the schemas by domain and id. The tables repeat them for each process."""
    rows = export.rows(SCHEMAS, ("domainId", "schemaId", "payloadSize"))
    sizes = {
        (domain, layout): size
        for domain, layout, size in zip(
            *(rows[name].tolist() for name in ("domainId", "schemaId", "payloadSize")),
            strict=True,
        )
        if size != NULL
    }
    entries = export.rows(ENTRIES, ("domainId", "schemaId", "idx", "type", "name", "offset"))
    fields: dict[tuple[int, int], dict[int, Field]] = {}
    columns = [entries[name].tolist() for name in ("domainId", "schemaId", "idx", "type")]
    offsets, labels = entries["offset"].tolist(), entries.texts("name").to_pylist()
    for domain, layout, index, type_, offset, label in zip(
        *columns, offsets, labels, strict=True
    ):
        name, width = LABELS.get(label), _TYPES.get(type_)
        if name is not None and width is not None:
            # The first field's offset is null.
            field = Field(name, 0 if offset == NULL else offset, width)
            fields.setdefault((domain, layout), {})[index] = field
    return {
        key: Schema(
            max(sizes.get(key, 0), *map(_end, members.values())), tuple(members.values())
        )
        for key, members in fields.items()
    }


def _end(field: Field) -> int:
    """Return the byte at which a field ends."""
    return field.offset + int(field.type[1])


def _add_texts(columns: dict[str, Ints], texts: Sequence[str]) -> None:
    """Add the values of the JSON payloads to the columns."""
    for row, text in enumerate(texts):
        if text:
            for label, value in _object(text).items():
                if (name := LABELS.get(label)) is not None:
                    columns[name][row] = _whole(value)


def _object(text: str) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for any other text."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int:
    """Return an integer, or the number in a text, as the bits of an int64; else NULL."""
    if isinstance(value, str):
        digits = re.sub(r"[,\s'_]", "", value)
        value = int(digits, 0) if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", digits) else None
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        return NULL
    return value if value < 2**63 else value - 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Ranges that ended, in no order; names without the numbers that make them unique."""

    start: Ints
    stop: Ints
    thread: Ints  # globalTid
    kind: Ints  # PUSH_POP or START_END
    domain: Ints
    name: pa.DictionaryArray
    is_operator: NDArray[np.bool_]  # made by `emit_nvtx` for an operator of PyTorch


def read_ranges(
    export: Export,
    process: int | None,
    ends: frozenset[int],
    *,
    operators: bool,
    numbered: bool = False,
) -> Ranges:
    """Read the NVTX ranges of a process.

    Parameters
    ----------
    export, process
        The export, and the process (`g >> 24`); None reads all.
    ends
        Times at which the capture ended, ns: ranges that end there were still open, and are
        left out.
    operators
        Whether to read all operators of `emit_nvtx`, or only collectives, and those that are
        long enough to be a cause of idle time.
    numbered
        Whether names keep the sequence numbers that `emit_nvtx` adds.

    Returns
    -------
    Ranges
        Ranges with names, threads and times in ns.

    """
    where = [f"eventType IN ({PUSH_POP}, {START_END})"]
    if not operators:
        where.append(_OPERATOR_SQL)
    rows = export.rows(NVTX, (*_COLUMNS, "text"), process=process, where=where)
    kind = rows["eventType"]
    rows = rows.where((kind == PUSH_POP) | (kind == START_END))
    rows = rows.where(~_is_open(rows, ends))
    export.check_spans(NVTX, rows)
    name = _names(export, rows)
    is_operator = _rows_of(name, pc.match_substring_regex(name.dictionary, _OPERATOR))
    if not operators:
        is_collective = _rows_of(name, pc.match_substring_regex(name.dictionary, _COLLECTIVE))
        mask = ~is_operator | is_collective | (rows["end"] - rows["start"] >= LEAST_RANGE_NS)
        rows, name, is_operator = (
            rows.where(mask),
            name.filter(pa.array(mask)),
            is_operator[mask],
        )
    return Ranges(
        start=rows["start"],
        stop=rows["end"],
        thread=rows["globalTid"],
        kind=rows["eventType"],
        domain=rows["domainId"],
        name=name if numbered else _without_numbers(name),
        is_operator=is_operator,
    )


def _is_open(rows: ExportRows, ends: frozenset[int]) -> NDArray[np.bool_]:
    """Return whether each range was still open when the capture ended."""
    end = rows["end"]
    is_open: NDArray[np.bool_] = np.isin(end, np.array([NULL, *sorted(ends)], np.int64))
    is_open[end < rows["start"]] = True
    return is_open


def _names(export: Export, rows: ExportRows) -> pa.DictionaryArray:
    """Return the text of each range, or the registered string that it refers to."""
    text = rows.texts("text").combine_chunks()
    ids = rows["textId"]
    ids = np.where(pc.equal(text, "").to_numpy(zero_copy_only=False), ids, NULL)
    registered = export.strings(ids)
    if registered:
        keys, code = np.unique(ids, return_inverse=True)
        texts = pa.array([registered.get(key, "") for key in keys.tolist()], pa.string())
        text = pc.if_else(pa.array(ids == NULL), text, texts.take(pa.array(code)))
    return text.dictionary_encode()


def _rows_of(name: pa.DictionaryArray, by_name: pa.Array) -> NDArray[np.bool_]:
    """Return a Boolean per row from one per different name."""
    values: NDArray[np.bool_] = by_name.to_numpy(zero_copy_only=False).astype(np.bool_)
    index = name.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    result: NDArray[np.bool_] = np.append(values, False)[index]
    return result


def _without_numbers(name: pa.DictionaryArray) -> pa.DictionaryArray:
    """Return names without the numbers that `emit_nvtx` adds."""
    cut = pc.replace_substring_regex(name.dictionary, _ADDED, "").dictionary_encode()
    codes = cut.indices.take(name.indices)
    return pa.DictionaryArray.from_arrays(codes.cast(pa.int32()), cut.dictionary)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRanges(ArrayColumns):
    """The NCCL API calls of a process, with values from their payloads; NULL is unknown."""

    calls: NcclCalls
    open: NDArray[np.bool_]  # still open at the end of the capture
    communicator: Ints  # unsigned 64-bit id, as the bits of an int64
    size: Ints  # bytes
    peer: Ints  # rank in the communicator
    root: Ints  # rank in the communicator
    ranks: Ints  # number of ranks of the communicator that the call creates
    rank: Ints  # own rank in that communicator
    has_domain: bool = False  # whether a process has the NVTX domain "NCCL"

    @property
    def is_operation(self) -> NDArray[np.bool_]:
        """Whether each call moves data, in contrast to calls such as ncclGroupStart."""
        return np.array([name in OPERATIONS for name in self.calls.names], np.bool_)[
            self.calls.code
        ]

    def of_process(self, process: int) -> "NcclRanges":
        """Return the NCCL ranges of one process; `process` is its number, `g >> 24`."""
        rows = np.flatnonzero(self.calls.thread >> schema.THREAD_BITS == process)
        return replace(self.at(rows), calls=self.calls.at(rows))


def read_nccl(export: Export, process: int | None, ends: frozenset[int]) -> NcclRanges:
    """Read the ranges of the NVTX domain "NCCL" and decode their payloads.

    Parameters
    ----------
    export, process
        The export, and the process (`g >> 24`); None reads all.
    ends
        Times at which the capture ended.

    Raises
    ------
    TraceFileError
        If a payload is shorter than its schema.

    """
    ids = export.ids_of(_NCCL_GLOB, _NCCL_PREFIX)
    by_id = f" OR textId IN ({', '.join(map(str, ids.tolist()))})" if len(ids) else ""
    rows = export.rows(
        NVTX,
        (*_COLUMNS, "text", "binaryData", "jsonText", "jsonTextId"),
        process=process,
        where=[
            f"eventType IN ({PUSH_POP}, {DOMAIN})",
            f"eventType = {DOMAIN} OR text GLOB '{_NCCL_GLOB}'{by_id}",
        ],
    )
    domains = _domains(export, rows)
    rows = rows.where(rows["eventType"] == PUSH_POP)
    name = _names(export, rows)
    mask = _rows_of(name, pc.match_substring_regex(name.dictionary, _NCCL))
    owner = rows["globalTid"] >> schema.THREAD_BITS
    has_domain = np.isin(owner, list(domains))
    is_nccl = np.zeros(len(owner), np.bool_)
    for nccl_process, numbers in domains.items():
        is_nccl |= (owner == nccl_process) & np.isin(rows["domainId"], list(numbers))
    # Excerpts of exports may lack the domain rows: there the name alone decides.
    mask &= is_nccl | ~has_domain
    rows, name = rows.where(mask), name.filter(pa.array(mask))
    calls = NcclCalls(
        names=tuple(name.dictionary.to_pylist()),
        code=name.indices.to_numpy().astype(np.int64),
        start=rows["start"],
        stop=rows["end"],
        thread=rows["globalTid"],
    )
    values = decode(export, calls, rows.texts("binaryData"), _json(export, rows))
    return NcclRanges(
        calls=calls, open=_is_open(rows, ends), has_domain=bool(domains), **values
    )


def _domains(export: Export, rows: ExportRows) -> dict[int, set[int]]:
    """Return the numbers of the domain "NCCL" in each process that has it."""
    creations = rows.where(rows["eventType"] == DOMAIN)
    owner = (creations["globalTid"] >> schema.THREAD_BITS).tolist()
    names = _names(export, creations).to_pylist()
    domains: dict[int, set[int]] = {}
    for process, domain, name in zip(owner, creations["domainId"].tolist(), names, strict=True):
        if name == "NCCL":
            domains.setdefault(process, set()).add(domain)
    return domains


def _json(export: Export, rows: ExportRows) -> list[str]:
    """Return the JSON payload of each row, or an empty text."""
    texts: list[str] = rows.texts("jsonText").to_pylist()
    ids = rows["jsonTextId"]
    strings = export.strings(ids)
    if strings:
        by_id = [strings.get(key, "") for key in ids.tolist()]
        return [text or other for text, other in zip(texts, by_id, strict=True)]
    return texts
