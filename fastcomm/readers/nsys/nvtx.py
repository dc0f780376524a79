"""Read the NVTX ranges of one process: NCCL ranges with payloads, and ranges of others."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.idle.host_activity import LEAST_RANGE_NS
from fastcomm.readers.nsys import payloads, schema
from fastcomm.readers.nsys.export import ArrayColumns, Export, ExportRows
from fastcomm.readers.nsys.payloads import OPERATIONS, NcclCalls
from fastcomm.readers.nsys.schema import DOMAIN, NVTX, PUSH_POP, START_END
from fastcomm.trace.host_names import COLLECTIVE_PREFIXES
from fastcomm_kernels.arrays import NULL, Ints

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
    values = payloads.decode(export, calls, rows.texts("binaryData"), _json(export, rows))
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
