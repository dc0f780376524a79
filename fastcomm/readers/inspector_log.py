"""Parse the lines of an NCCL Inspector log: one JSON object per finished operation.

Times are integer nanoseconds; the log has microseconds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from fastcomm.errors import TraceFileError
from fastcomm.readers.stream import CutShortError, blocks
from fastcomm.trace.bytes import op_of_collective
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Ints

_NS = 1000  # ns per microsecond
_HEADER = re.compile(rb'"header"\s*:\s*(\{[^{}]*\})')
_NAMED_DROPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorCommunicator:
    """One process in one communicator, as its log states it."""

    id: str
    name: str | None
    rank: int  # in the communicator
    size: int


@dataclass(slots=True, kw_only=True)
class Log:
    """The contents of a log, in the order of its lines."""

    path: Path
    communicators: dict[str, int] = field(default_factory=dict)  # index in `columns` by id
    names: dict[str, int] = field(default_factory=dict)  # index of each name of an operation
    versions: set[str] = field(default_factory=set)
    rows: list[tuple[int, ...]] = field(default_factory=list)  # values of COLUMNS
    has_newer: bool = False  # whether NCCL 2.30 or newer wrote it
    dropped: list[int] = field(default_factory=list)  # numbers of damaged lines
    lines: int = 0
    is_truncated: bool = False  # whether the last line is incomplete

    def columns(self) -> dict[str, Ints]:
        """Return the rows as columns, the keys of `COLUMNS`; times are ns, NULL is unknown."""
        table = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS)).T
        return dict(zip(COLUMNS, np.ascontiguousarray(table), strict=True))


# "start" is NULL unless the log is verbose; "dumped" is when the line was written.
COLUMNS = (
    "communicator",
    "name",
    "op",
    "seq",
    "message",
    "duration",
    "start",
    "dumped",
    "offset",
)


def read_log(path: Path, *, allow_truncated: bool = False) -> Log:
    """Read all lines of a log.

    Raises `TraceFileError` if it has no operation, more than one line in a thousand is damaged,
    or the compressed file is truncated (unless `allow_truncated`).
    """
    log = Log(path=path)
    offset = 0
    for line, is_whole in _lines(path, allow_truncated=allow_truncated):
        log.lines += 1
        if line.strip():
            _add(log, line, offset, is_whole=is_whole)
        offset += len(line) + 1
    _check(log)
    return log


def _lines(path: Path, *, allow_truncated: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield each line, and whether it is complete."""
    tail = b""
    try:
        for block in blocks(path):
            *whole, tail = (tail + block).split(b"\n")
            for line in whole:
                yield line, True
    except CutShortError as error:
        if not allow_truncated:
            raise TraceFileError(
                f"{path}: the compressed file is truncated. Pass --allow-truncated to read its "
                "complete lines, or --keep-going to skip it"
            ) from error
    if tail:
        yield tail, False


def _add(log: Log, line: bytes, offset: int, *, is_whole: bool) -> None:
    """Parse a line; count it as damaged if that fails."""
    try:
        record = orjson.loads(line)
        row = _row(log, record, offset)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, OverflowError):
        if is_whole:
            log.dropped.append(log.lines)
        else:
            log.is_truncated = True
        return
    if row is not None:
        log.rows.append(row)


def _row(log: Log, record: Any, offset: int) -> tuple[int, ...] | None:
    """Return the values of COLUMNS; None for a line about something else."""
    header, metadata = record["header"], record["metadata"]
    kind = next((kind for kind in ("coll", "p2p") if f"{kind}_perf" in record), None)
    log.versions.add(str(metadata.get("inspector_output_format_version", "none")))
    log.has_newer |= kind == "p2p" or "comm_name" in header
    if kind is None:
        return None
    perf = record[f"{kind}_perf"]
    name, communicator = perf[kind], header["id"]
    if not isinstance(name, str) or not isinstance(communicator, str):
        raise TypeError
    op = op_of_collective(name)
    return (
        log.communicators.setdefault(communicator, len(log.communicators)),
        log.names.setdefault(name, len(log.names)),
        OP["OTHER"] if op is None else op,
        _count(perf[f"{kind}_sn"]),
        _count(perf[f"{kind}_msg_size_bytes"]),
        _count(perf[f"{kind}_exec_time_us"], _NS),
        _started(perf.get("event_trace_ts"), kind),
        _count(metadata["dump_timestamp_us"], _NS),
        offset,
    )


def _count(value: Any, scale: int = 1) -> int:
    """Return a number of 0 or more as a scaled integer; ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError
    scaled = value * scale if isinstance(value, int) else round(value * scale)
    if scaled >= 1 << 63:
        raise ValueError
    return scaled


def _started(trace: Any, kind: str) -> int:
    """Return the start of the first kernel of a verbose line, else of its call, or NULL."""
    if not isinstance(trace, dict):
        return NULL
    kernels = trace.get("kernel_events")
    starts = [
        kernel.get("kernel_start_ts")
        for kernel in (kernels if isinstance(kernels, list) else ())
        if isinstance(kernel, dict)
    ]
    # A channel without a kernel has 0.
    if times := [_count(start, _NS) for start in starts if start]:
        return min(times)
    called = trace.get(f"{kind}_start_ts")
    return _count(called, _NS) if called else NULL


def _check(log: Log) -> None:
    """Raise TraceFileError for a log without operations, or with too much damage."""
    if not log.lines:
        raise TraceFileError(f"{log.path}: the file is empty; expected lines of NCCL Inspector")
    damaged = len(log.dropped)
    if damaged == log.lines or damaged > max(1, log.lines // 1000):
        raise TraceFileError(f"{log.path}:{log.dropped[0]}: {_dropped_text(log)}")
    if not log.rows:
        raise TraceFileError(
            f"{log.path}: {log.lines} lines and no operation (coll_perf, p2p_perf)"
        )


def damage_warnings(log: Log) -> list[str]:
    """Return warnings about the few damaged lines of a log."""
    notes = [_dropped_text(log)] if log.dropped else []
    if log.is_truncated:
        notes.append(f"line {log.lines}, the last one, is truncated and was left out")
    return notes


def _dropped_text(log: Log) -> str:
    """Return the text about damaged lines."""
    named = ", ".join(map(str, log.dropped[:_NAMED_DROPS]))
    more = ", ..." if len(log.dropped) > _NAMED_DROPS else ""
    return (
        f"{len(log.dropped)} of {log.lines} lines are not complete records of NCCL Inspector "
        f"(header, metadata, coll_perf) and were left out: line {named}{more}"
    )


def communicators(path: Path) -> list[InspectorCommunicator]:
    """Return the communicators that a log names, without parsing its lines."""
    texts: set[bytes] = set()
    tail = b""
    try:
        for block in blocks(path):
            complete, _, tail = (tail + block).rpartition(b"\n")
            texts.update(_HEADER.findall(complete))
    except CutShortError:
        pass  # reading the log reports it
    texts.update(_HEADER.findall(tail))
    members = (_communicator(text) for text in sorted(texts))
    return list({member.id: member for member in members if member is not None}.values())


def _communicator(text: bytes) -> InspectorCommunicator | None:
    """Return the communicator of a record's JSON header; None if the header is invalid."""
    try:
        header = orjson.loads(text)
        name = header.get("comm_name")
        rank, size = _count(header["rank"]), _count(header["n_ranks"])
        if not isinstance(header["id"], str) or rank >= size:
            return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
    name = name if isinstance(name, str) and name else None
    return InspectorCommunicator(id=header["id"], name=name, rank=rank, size=size)
