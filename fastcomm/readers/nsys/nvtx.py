"""The NVTX ranges of one process: those of NCCL with their payloads, and everybody's."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.readers.nsys import layout, payloads
from fastcomm.readers.nsys.export import Export, ExportRows
from fastcomm.readers.nsys.layout import DOMAIN, NVTX, PUSH_POP, START_END
from fastcomm.readers.nsys.payloads import OPERATIONS, NcclCalls
from fastcomm_kernels.arrays import NULL, Ints

# What `emit_nvtx` adds to an operator's name makes every name unique.
_ADDED = r", (?:seq|op_id|sizes|stack) = .*$"
_OPERATOR = r", (?:seq|op_id) = "
# Ranges of collectives, that metrics need; operators are dropped unless everything is wanted.
COLLECTIVE = r"^(?:nccl:|c10d::|record_param_comms|gloo:)"
_OPERATOR_SQL = (
    "text IS NULL OR (text NOT LIKE '%, op_id = %' AND text NOT LIKE '%, seq = %') "
    "OR text GLOB 'nccl:*' OR text GLOB 'c10d::*' OR text GLOB 'record_param_comms*'"
)

_NCCL = r"^nccl[A-Z]"
_NCCL_PREFIX, _NCCL_GLOB = "nccl", "nccl[A-Z]*"
_COLUMNS = ("start", "end", "eventType", "globalTid", "endGlobalTid", "domainId", "textId")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Complete ranges in no order; their names without what makes each unique."""

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
    """The ranges of a process; `ends` are times at which the capture ended.

    Unless all `operators` that `emit_nvtx` shows are wanted, only collectives are read of them;
    the number that it gives each is kept only if `numbered`.
    """
    where = [f"eventType IN ({PUSH_POP}, {START_END})"]
    if not operators:
        where.append(_OPERATOR_SQL)
    rows = export.rows(NVTX, (*_COLUMNS, "text"), process=process, where=where)
    kind = rows["eventType"]
    rows = rows.where((kind == PUSH_POP) | (kind == START_END))
    rows = rows.where(~_is_open(rows, ends))
    name = _names(export, rows)
    is_operator = _each(name, pc.match_substring_regex(name.dictionary, _OPERATOR))
    if not operators:
        is_collective = _each(name, pc.match_substring_regex(name.dictionary, COLLECTIVE))
        kept = ~is_operator | is_collective
        rows, name, is_operator = (
            rows.where(kept),
            name.filter(pa.array(kept)),
            is_operator[kept],
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
    end = rows["end"]
    is_open: NDArray[np.bool_] = np.isin(end, np.array([NULL, *sorted(ends)], np.int64))
    is_open[end < rows["start"]] = True
    return is_open


def _names(export: Export, rows: ExportRows) -> pa.DictionaryArray:
    """The text of each range, or the string that it refers to."""
    text = rows.texts("text").combine_chunks()
    ids = rows["textId"]
    ids = np.where(pc.equal(text, "").to_numpy(zero_copy_only=False), ids, NULL)
    registered = export.strings(ids)
    if registered:
        keys, code = np.unique(ids, return_inverse=True)
        words = pa.array([registered.get(key, "") for key in keys.tolist()], pa.string())
        text = pc.if_else(pa.array(ids == NULL), text, words.take(pa.array(code)))
    return text.dictionary_encode()


def _each(name: pa.DictionaryArray, answer: pa.Array) -> NDArray[np.bool_]:
    """The answer to each name, asked once a word."""
    of_word: NDArray[np.bool_] = answer.to_numpy(zero_copy_only=False).astype(np.bool_)
    index = name.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    of_each: NDArray[np.bool_] = np.append(of_word, False)[index]
    return of_each


def _without_numbers(name: pa.DictionaryArray) -> pa.DictionaryArray:
    cut = pc.replace_substring_regex(name.dictionary, _ADDED, "").dictionary_encode()
    codes = cut.indices.take(name.indices)
    return pa.DictionaryArray.from_arrays(codes.cast(pa.int32()), cut.dictionary)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRanges:
    """The calls of NCCL's API in one process, with what their payloads say (NULL: nothing)."""

    calls: NcclCalls
    open: NDArray[np.bool_]  # never ended: no range encloses by it
    communicator: Ints  # 64 bits without a sign, as the bits of an int64
    size: Ints
    peer: Ints  # place in the communicator, as is the root
    root: Ints
    ranks: Ints  # of the communicator that the call makes
    rank: Ints  # in that communicator
    has_domain: bool = False  # the process made the domain NCCL

    @property
    def is_operation(self) -> NDArray[np.bool_]:
        """Whether a call moves data."""
        return np.array([name in OPERATIONS for name in self.calls.names], np.bool_)[
            self.calls.code
        ]

    def of(self, process: int) -> "NcclRanges":
        """The calls of one process."""
        rows = np.flatnonzero(self.calls.thread >> layout.THREAD_BITS == process)
        calls = self.calls
        return NcclRanges(
            calls=NcclCalls(
                names=calls.names,
                code=calls.code[rows],
                start=calls.start[rows],
                stop=calls.stop[rows],
                thread=calls.thread[rows],
            ),
            open=self.open[rows],
            communicator=self.communicator[rows],
            size=self.size[rows],
            peer=self.peer[rows],
            root=self.root[rows],
            ranks=self.ranks[rows],
            rank=self.rank[rows],
            has_domain=self.has_domain,
        )


def read_nccl(export: Export, process: int | None, ends: frozenset[int]) -> NcclRanges:
    """The ranges of the domain NCCL of one process, or of all; payloads decoded."""
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
    kept = _each(name, pc.match_substring_regex(name.dictionary, _NCCL))
    owner = rows["globalTid"] >> layout.THREAD_BITS
    known = np.isin(owner, list(domains))
    is_nccl = np.zeros(len(owner), np.bool_)
    for one, its_domains in domains.items():
        is_nccl |= (owner == one) & np.isin(rows["domainId"], list(its_domains))
    # Cut-out files lack the rows of the domains: there the name alone tells.
    kept &= is_nccl | ~known
    rows, name = rows.where(kept), name.filter(pa.array(kept))
    calls = NcclCalls(
        names=tuple(name.dictionary.to_pylist()),
        code=name.indices.to_numpy().astype(np.int64),
        start=rows["start"],
        stop=rows["end"],
        thread=rows["globalTid"],
    )
    said = payloads.decode(export, calls, rows.texts("binaryData"), _json(export, rows))
    return NcclRanges(calls=calls, open=_is_open(rows, ends), has_domain=bool(domains), **said)


def _domains(export: Export, rows: ExportRows) -> dict[int, set[int]]:
    """The numbers of the domain NCCL in each process that made it."""
    made = rows.where(rows["eventType"] == DOMAIN)
    owner = (made["globalTid"] >> layout.THREAD_BITS).tolist()
    names = _names(export, made).to_pylist()
    found: dict[int, set[int]] = {}
    for process, domain, name in zip(owner, made["domainId"].tolist(), names, strict=True):
        if name == "NCCL":
            found.setdefault(process, set()).add(domain)
    return found


def _json(export: Export, rows: ExportRows) -> list[str]:
    texts: list[str] = rows.texts("jsonText").to_pylist()
    ids = rows["jsonTextId"]
    strings = export.strings(ids)
    if strings:
        by_id = [strings.get(key, "") for key in ids.tolist()]
        return [text or other for text, other in zip(texts, by_id, strict=True)]
    return texts
