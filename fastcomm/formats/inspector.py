"""Read NCCL Inspector logs: one file per process, one line (a JSON object) per operation.

A log has sizes, groups and durations. It has no compute, and times only if it is verbose.
Times are integer nanoseconds here; the log has microseconds.

Since v4.1 `dump_stats` tells how many operations a communicator lost. Since v4.3 only its lines
have a header and metadata: the lines that it announces inherit them.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from fastcomm.errors import TraceFileError
from fastcomm.formats.assembly import TraceOptions, assemble
from fastcomm.formats.communication import CommunicationColumns, DeviceRows
from fastcomm.formats.config import Config
from fastcomm.formats.kernel_names import Named
from fastcomm.formats.sources import RankReader, RankSources, add_rank, check_count
from fastcomm.formats.stream import CutShortError, blocks
from fastcomm.trace.bytes import op_of_collective
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import ProcessGroup
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.arrays import NULL, Ints

SUFFIXES = (".log", ".log.gz", ".jsonl", ".jsonl.gz")
_VERSIONS = ("v4.0", "v4.1", "v4.2", "v4.3")
# Records that are no operations: what the network's proxies did.
_OTHER_RECORDS = frozenset({"dump_stats", "proxy_trace"})
_NO_CHOICES = (None, "", "unknown")  # an algorithm or protocol that is not told
_EPOCH = 1_000_000_000_000_000_000  # ns; smaller times are not since 1970
_NS = 1000  # ns per microsecond
_HEADER = re.compile(rb'"header"\s*:\s*(\{[^{}]*\})')
_NAMED_DROPS = 5
# Columns of a log: "start" is NULL unless it is verbose; "dumped" is when the line was written.
_COLUMNS = (
    *("communicator", "name", "operation", "op", "seq", "message"),
    *("duration", "start", "dumped", "offset"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedProcess:
    """What the whole run states about one process."""

    rank: int
    world_size: int | None
    groups: Mapping[str, ProcessGroup]  # by id of the communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class _Communicator:
    """One process in one communicator, as its log states it."""

    id: str
    name: str | None
    rank: int  # in the communicator
    size: int


@dataclass(slots=True)
class _Context:
    """Header and metadata that a number of lines inherit."""

    header: Any = None
    metadata: Any = None
    lines: int = 0


@dataclass(kw_only=True)
class _Log:
    """The contents of a log, in the order of its lines."""

    path: Path
    communicators: dict[str, int] = field(default_factory=dict)  # index in `columns` by id
    names: dict[str, int] = field(default_factory=dict)  # index: operation, algorithm, protocol
    operations: dict[str, int] = field(default_factory=dict)  # index of each operation
    context: _Context = field(default_factory=_Context)
    losses: dict[str, int] = field(default_factory=dict)  # by communicator, of `dump_stats`
    unknown: Counter[str] = field(default_factory=Counter)  # lines by unknown type of record
    versions: set[str] = field(default_factory=set)
    rows: list[tuple[int, ...]] = field(default_factory=list)  # values of _COLUMNS
    has_newer: bool = False  # whether NCCL 2.30 or newer wrote it
    dropped: list[int] = field(default_factory=list)  # numbers of damaged lines
    lines: int = 0
    is_truncated: bool = False  # whether the last line is incomplete

    @cached_property
    def columns(self) -> dict[str, Ints]:
        """Return the rows as columns, the keys of `_COLUMNS`; times are ns, NULL is unknown."""
        table = np.array(self.rows, np.int64).reshape(-1, len(_COLUMNS)).T
        return dict(zip(_COLUMNS, np.ascontiguousarray(table), strict=True))

    def work(self, start: Ints, stop: Ints) -> DeviceRows:
        """Return the operations as kernels with these times, in a lane per communicator."""
        columns = self.columns
        return DeviceRows(
            start=start,
            stop=stop,
            kind=np.full(len(start), KIND["kernel"], np.int8),
            name=columns["name"],
            texts=list(self.names),
            lane=columns["communicator"],
            lanes=list(self.communicators),
            offset=columns["offset"],
        )

    def calls(self, groups: Mapping[str, ProcessGroup]) -> CommunicationColumns:
        """Return operation, group, sequence number and bytes of each operation."""
        columns = self.columns
        return CommunicationColumns(
            op=columns["op"],
            seq=columns["seq"],
            group=columns["communicator"],
            groups=tuple(groups.get(key, ProcessGroup(name=key)) for key in self.communicators),
            message=columns["message"],
            name=np.zeros(len(self.rows), np.int64),
            named=(Named(library="NCCL", op="OTHER"),),
        )


def claims(path: Path) -> bool:
    """Return whether the first record of a file is from NCCL Inspector."""
    if not path.name.lower().endswith(SUFFIXES) or not path.is_file():
        return False
    head = _head(path)
    return head.lstrip()[:1] == b"{" and (
        b'"inspector_output_format_version"' in head or b'"coll_perf"' in head
    )


def is_damaged(path: Path) -> bool:
    """Return whether a file named like a log is empty or unreadable."""
    return path.name.lower().endswith(SUFFIXES) and not path.is_dir() and not _head(path)


def _head(path: Path) -> bytes:
    """Return the beginning of the text; empty if it is unreadable."""
    try:
        return next(blocks(path), b"")[:4096]
    except (CutShortError, TraceFileError):
        return b""


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Find the rank of each process, and the members of each communicator.

    Ranks are those in the communicator of all processes, unless the configuration states them.
    Raises `TraceFileError` for unreadable files, and for ranks that are missing or occur twice.
    """
    logs = {path: _communicators(path) for path in paths}
    for path, members in logs.items():
        if not members and is_damaged(path):
            raise TraceFileError(f"{path}: cannot be read: the file is empty or truncated")
    ranks, world, warnings = _ranks(logs, config)
    owner: dict[int, Path] = {}
    for path, rank in ranks.items():
        add_rank(owner, rank, path)
    groups = _groups(logs, ranks, world)
    reading = config.reading(world, owner)
    sources = []
    for rank, path in sorted(owner.items()):
        own = {member.id: groups[member.id] for member in logs[path]}
        process = LoggedProcess(rank=rank, world_size=world, groups=own)
        sources.append(RankReader(read, path, reading, (process,)).source(rank))
    return RankSources(sources=tuple(sources), world_size=world, warnings=warnings)


_Logs = Mapping[Path, Sequence[_Communicator]]


def _ranks(logs: _Logs, config: Config) -> tuple[dict[Path, int], int | None, tuple[str, ...]]:
    """Return the rank of each file, the world size, and warnings."""
    explicit = config.ranks
    if explicit:
        stated = {p: explicit.get(str(p), explicit.get(p.name)) for p in logs}
        ranks = {path: rank for path, rank in stated.items() if rank is not None}
        if missing := [str(path) for path in logs if path not in ranks]:
            raise TraceFileError(
                f"{missing[0]}: [ranks] in the configuration lacks this file; add its rank"
            )
        return ranks, config.world, ()
    if world := _world(logs):
        ranks = {p: member.rank for p in logs for member in logs[p] if member.id == world.id}
        return ranks, world.size, ()
    ranks = {path: number for number, path in enumerate(sorted(logs))}
    warning = (
        "no communicator has all processes: ranks are numbered in the order of the files; "
        "state them in [ranks] in the configuration"
    )
    return ranks, config.world, (warning,) if len(logs) > 1 else ()


def _world(logs: _Logs) -> _Communicator | None:
    """Return the largest communicator that every log has; of several, the first by its id.

    None if no process has a communicator, or some log lacks the largest.
    """
    counts = Counter(member.id for log in logs.values() for member in log)
    largest = max((member.size for log in logs.values() for member in log), default=0)
    check_count(largest, next(iter(logs)), "size of a communicator")
    shared = {
        member.id: member
        for log in logs.values()
        for member in log
        if member.size == largest and counts[member.id] == len(logs)
    }
    return shared[min(shared)] if shared else None


def _groups(
    logs: _Logs, ranks: Mapping[Path, int], world: int | None
) -> dict[str, ProcessGroup]:
    """Return the process group of each communicator by its identifier.

    The ranks of a group are known if the logs of all its ranks are given, or if it has as many
    ranks as the job, `world`; otherwise they are None. `ranks` has the rank of each log.
    """
    users: dict[str, dict[int, _Communicator]] = {}  # by communicator and rank
    for path, log in logs.items():
        for member in log:
            users.setdefault(member.id, {})[ranks[path]] = member
    groups = {}
    for key, by_rank in users.items():
        communicator = next(iter(by_rank.values()))
        size = communicator.size
        members = tuple(range(size)) if size == world else tuple(sorted(by_rank))
        groups[key] = ProcessGroup(
            name=communicator.name or key,
            ranks=members if len(members) == size else None,
            size=size,
            communicator=_number(key),
        )
    return groups


def _number(communicator: str) -> int | None:
    """Return a communicator's id as a number, or None."""
    try:
        return int(communicator, 0)
    except ValueError:
        return None


def read(path: Path, options: TraceOptions, process: LoggedProcess) -> Trace:
    """Read the log of one process as a trace.

    Parameters
    ----------
    path
        The log.
    options
        What to read, and the rules for iterations and tags.
    process
        Rank and groups of the process.

    Raises
    ------
    TraceFileError
        If the file is not a log, or is damaged.

    """
    log = _read_log(path, allow_truncated=options.allow_truncated)
    columns = log.columns
    is_timed = bool((columns["start"] != NULL).all())
    stop = columns["dumped"]
    start = columns["start"] if is_timed else stop - columns["duration"]
    stop = start + columns["duration"] if is_timed else stop
    events, lanes, order = log.work(start, stop).events()
    if not is_timed:
        # Without times, positions of durations mean nothing: one iteration has them all.
        whole = (0, int(start.min()), int(stop.max()) + 1)
        options = replace(options, iterations=IterationRule(ranges=(whole,)))
    meta = Meta(
        rank=process.rank,
        world_size=process.world_size,
        format="inspector",
        path=str(path),
        clock="unix" if int(start.min()) >= _EPOCH else None,
        warnings=tuple(_notes(log)),
        missing_data=("compute",) if is_timed else ("compute", "times"),
    )
    collectives = log.calls(process.groups).collectives(order)
    trace = assemble(events, lanes, collectives, options, meta)
    if is_timed:
        return trace
    return replace(trace, meta=replace(trace.meta, found_by="no times in the log"))


def _notes(log: _Log) -> list[str]:
    """Return warnings about the few damaged lines of a log, and about what it omits."""
    notes = [_dropped_text(log)] if log.dropped else []
    if log.is_truncated:
        notes.append(f"line {log.lines}, the last one, is truncated and was left out")
    if unknown := sorted(log.versions.difference(_VERSIONS)):
        notes.append(
            f"inspector_output_format_version {', '.join(unknown)} is unknown; read as "
            f"{_VERSIONS[-1]}"
        )
    if log.unknown:
        types = ", ".join(sorted(log.unknown)[:_NAMED_DROPS])
        notes.append(f"{log.unknown.total()} lines of unknown types ({types}) were left out")
    if log.has_newer:
        notes.append(
            "NCCL 2.30's inspector leaves out messages under 8192 bytes and operations without "
            "times of the GPU: volume is a lower bound"
        )
    gaps = _missing_counts(log)
    names = gaps.keys() | log.losses.keys()
    if missing := sum(max(gaps.get(name, 0), log.losses.get(name, 0)) for name in names):
        total = len(log.rows) + missing
        notes.append(
            f"{missing} of {total} operations have no line ({_LOSSES[bool(log.losses)]}): "
            "volume is a lower bound"
        )
    return notes


# Whether the log itself tells the losses.
_LOSSES = {
    False: "their sequence numbers are missing",
    True: "NCCL's buffer dropped them before they were written, or their sequence numbers are "
    "missing",
}


def _missing_counts(log: _Log) -> dict[str, int]:
    """Return the number of missing sequence numbers of each communicator."""
    columns, counts = log.columns, {}
    for communicator, place in log.communicators.items():
        own = columns["communicator"] == place
        seq, ops = columns["seq"][own], columns["operation"][own]
        if len(np.unique(seq)) == len(seq):
            parts = [seq]
        else:
            parts = [np.unique(seq[ops == op]) for op in np.unique(ops).tolist()]
        counts[communicator] = sum(
            int(part.max() - part.min()) + 1 - len(part) for part in parts
        )
    return counts


def _read_log(path: Path, *, allow_truncated: bool = False) -> _Log:
    """Read all lines of a log.

    Raises `TraceFileError` if it has no operation, more than one line in a thousand is damaged,
    or the compressed file is truncated (unless `allow_truncated`).
    """
    log = _Log(path=path)
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


def _add(log: _Log, line: bytes, offset: int, *, is_whole: bool) -> None:
    """Parse a line; count it as damaged if that fails."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        # It may be one of the announced lines.
        log.context.lines = max(0, log.context.lines - 1)
        record = None
    try:
        row = _row(log, record, offset)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        if is_whole:
            log.dropped.append(log.lines)
        else:
            log.is_truncated = True
        return
    if row is not None:
        log.rows.append(row)


def _row(log: _Log, record: Any, offset: int) -> tuple[int, ...] | None:
    """Return the values of _COLUMNS; None for a line about something else."""
    header, metadata = _own_or_inherited(log, record)
    kind = next((kind for kind in ("coll", "p2p") if f"{kind}_perf" in record), None)
    log.versions.add(str(metadata.get("inspector_output_format_version", "none")))
    log.has_newer |= kind == "p2p" or "comm_name" in header
    communicator = header["id"]
    if not isinstance(communicator, str):
        raise TypeError
    if kind is None:
        if "dump_stats" in record:
            _add_stats(log, communicator, record["dump_stats"], header, metadata)
        elif types := record.keys() - {"header", "metadata"} - _OTHER_RECORDS:
            log.unknown[min(types)] += 1
        return None
    perf = record[f"{kind}_perf"]
    operation = perf[kind]
    if not isinstance(operation, str):
        raise TypeError
    choices = (perf.get(f"{kind}_{key}") for key in ("algo", "proto"))
    name = " ".join((operation, *(str(text) for text in choices if text not in _NO_CHOICES)))
    op = op_of_collective(operation)
    return (
        log.communicators.setdefault(communicator, len(log.communicators)),
        log.names.setdefault(name, len(log.names)),
        log.operations.setdefault(operation, len(log.operations)),
        OP["OTHER"] if op is None else op,
        _count(perf[f"{kind}_sn"]),
        _count(perf[f"{kind}_msg_size_bytes"]),
        _count(perf[f"{kind}_exec_time_us"], _NS),
        _started(perf.get("event_trace_ts"), kind),
        _count(metadata["dump_timestamp_us"], _NS),
        offset,
    )


def _own_or_inherited(log: _Log, record: Any) -> tuple[Any, Any]:
    """Return header and metadata of a line; KeyError if it has and inherits none."""
    if "header" in record or "metadata" in record:
        return record["header"], record["metadata"]
    if not log.context.lines:
        raise KeyError("header")
    log.context.lines -= 1
    return log.context.header, log.context.metadata


def _add_stats(log: _Log, communicator: str, stats: Any, header: Any, metadata: Any) -> None:
    """Keep the losses that a dump states, and what the lines that it announces inherit."""
    lines = sum(_count(stats.get(f"{kind}_records", 0)) for kind in ("coll", "p2p", "proxy"))
    losses = sum(_count(stats.get(f"{kind}_dropped_total", 0)) for kind in ("coll", "p2p"))
    log.losses[communicator] = max(losses, log.losses.get(communicator, 0))
    log.context = _Context(header, metadata, lines)


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


def _check(log: _Log) -> None:
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


def _dropped_text(log: _Log) -> str:
    """Return the text about damaged lines."""
    named = ", ".join(map(str, log.dropped[:_NAMED_DROPS]))
    more = ", ..." if len(log.dropped) > _NAMED_DROPS else ""
    return (
        f"{len(log.dropped)} of {log.lines} lines are not complete records of NCCL Inspector "
        f"(header, metadata, coll_perf) and were left out: line {named}{more}"
    )


def _communicators(path: Path) -> list[_Communicator]:
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


def _communicator(text: bytes) -> _Communicator | None:
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
    return _Communicator(id=header["id"], name=name, rank=rank, size=size)
