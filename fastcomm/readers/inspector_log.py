"""The lines of a NCCL Inspector log: one JSON object a finished operation.

Times are whole nanoseconds here; the log has microseconds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from fastcomm.errors import TraceFileError
from fastcomm.readers.kineto.stream import CutShortError, blocks
from fastcomm.trace.bytes import op_of_collective
from fastcomm.trace.schema import OP
from fastcomm_kernels.arrays import NULL, Ints

_NS = 1000  # of a microsecond
_HEADER = re.compile(rb'"header"\s*:\s*(\{[^{}]*\})')
_NAMED_DROPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorCommunicator:
    """What a process says of a communicator that it is in."""

    id: str
    name: str | None
    rank: int  # in the communicator
    size: int


@dataclass(slots=True, kw_only=True)
class Log:
    """What stands in a log, a row an operation, in the order of the lines."""

    path: Path
    communicators: dict[str, int] = field(default_factory=dict)  # id: place in `columns`
    names: dict[str, int] = field(default_factory=dict)  # of operations, as the log has them
    versions: set[str] = field(default_factory=set)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    has_newer: bool = False  # what only NCCL 2.30 writes
    dropped: list[int] = field(default_factory=list)  # numbers of lines
    lines: int = 0
    cut: bool = False  # the last line is no whole one

    def columns(self) -> dict[str, Ints]:
        """The rows as columns; NULL is unknown."""
        table = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS)).T
        return dict(zip(COLUMNS, np.ascontiguousarray(table), strict=True))


# start is NULL where the log is not verbose; dumped is when the line was written.
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
    """Read all lines; TraceFileError where there is none, or too many are damaged."""
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
    """Each line, and whether its end is there."""
    rest = b""
    try:
        for block in blocks(path):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield line, True
    except CutShortError as error:
        if not allow_truncated:
            raise TraceFileError(
                f"{path}: the compressed file ends before its end; --keep-going leaves it out"
            ) from error
    if rest:
        yield rest, False


def _add(log: Log, line: bytes, offset: int, *, is_whole: bool) -> None:
    try:
        said = orjson.loads(line)
        row = _row(log, said, offset)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, OverflowError):
        if is_whole:
            log.dropped.append(log.lines)
        else:
            log.cut = True
        return
    if row is not None:
        log.rows.append(row)


def _row(log: Log, said: Any, offset: int) -> tuple[int, ...] | None:
    """The values of COLUMNS; None where the line is about something else."""
    header, about = said["header"], said["metadata"]
    kind = next((kind for kind in ("coll", "p2p") if f"{kind}_perf" in said), None)
    log.versions.add(str(about.get("inspector_output_format_version", "none")))
    log.has_newer |= kind == "p2p" or "comm_name" in header
    if kind is None:
        return None
    perf = said[f"{kind}_perf"]
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
        _count(about["dump_timestamp_us"], _NS),
        offset,
    )


def _count(value: Any, scale: int = 1) -> int:
    """A number of 0 or more, scaled; ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError
    scaled = value * scale if isinstance(value, int) else round(value * scale)
    if scaled >= 1 << 63:
        raise ValueError
    return scaled


def _started(trace: Any, kind: str) -> int:
    """When the first kernel of a verbose line started, else its call; NULL where none says."""
    if not isinstance(trace, dict):
        return NULL
    kernels = trace.get("kernel_events")
    starts = [
        each.get("kernel_start_ts")
        for each in (kernels if isinstance(kernels, list) else ())
        if isinstance(each, dict)
    ]
    # A channel without a kernel has 0.
    if known := [_count(start, _NS) for start in starts if start]:
        return min(known)
    called = trace.get(f"{kind}_start_ts")
    return _count(called, _NS) if called else NULL


def _check(log: Log) -> None:
    """TraceFileError where nothing is left, or more is damaged than happens by accident."""
    if not log.lines:
        raise TraceFileError(f"{log.path}: the file is empty; wanted NCCL Inspector's lines")
    damaged = len(log.dropped)
    if damaged == log.lines or damaged > max(1, log.lines // 1000):
        raise TraceFileError(f"{log.path}:{log.dropped[0]}: {_damage(log)}")
    if not log.rows:
        raise TraceFileError(
            f"{log.path}: {log.lines} lines and no operation (coll_perf, p2p_perf)"
        )


def damage(log: Log) -> list[str]:
    """What to warn of, if little is damaged."""
    notes = [_damage(log)] if log.dropped else []
    if log.cut:
        notes.append(f"line {log.lines}, the last one, is cut short and was left out")
    return notes


def _damage(log: Log) -> str:
    named = ", ".join(map(str, log.dropped[:_NAMED_DROPS]))
    more = ", ..." if len(log.dropped) > _NAMED_DROPS else ""
    return (
        f"{len(log.dropped)} of {log.lines} lines are no whole records of NCCL Inspector "
        f"(header, metadata, coll_perf) and were left out: line {named}{more}"
    )


def communicators(path: Path) -> list[InspectorCommunicator]:
    """The communicators that a log names, without parsing its lines."""
    texts: set[bytes] = set()
    rest = b""
    try:
        for block in blocks(path):
            whole, _, rest = (rest + block).rpartition(b"\n")
            texts.update(_HEADER.findall(whole))
    except CutShortError:
        pass  # reading it says so
    texts.update(_HEADER.findall(rest))
    found = {each.id: each for text in sorted(texts) if (each := _communicator(text))}
    return list(found.values())


def _communicator(text: bytes) -> InspectorCommunicator | None:
    try:
        said = orjson.loads(text)
        name = said.get("comm_name")
        rank, size = _count(said["rank"]), _count(said["n_ranks"])
        if not isinstance(said["id"], str) or rank >= size:
            return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return None
    name = name if isinstance(name, str) and name else None
    return InspectorCommunicator(id=said["id"], name=name, rank=rank, size=size)
