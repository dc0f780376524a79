"""Read NCCL Inspector logs: one file per process, one line per operation.

A log has sizes, groups and durations. It has no compute, and times only if it is verbose.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastcomm.errors import TraceFileError
from fastcomm.readers import OpenOptions, RankReader, RankSources, add_rank, check_count
from fastcomm.readers.assembly import TraceOptions, assemble
from fastcomm.readers.communication import CommunicationColumns, DeviceRows
from fastcomm.readers.inspector_log import (
    InspectorCommunicator,
    Log,
    communicators,
    damage_warnings,
    read_log,
)
from fastcomm.readers.patterns import Named
from fastcomm.readers.stream import CutShortError, blocks
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.schema import KIND
from fastcomm.trace.tags import ProcessGroup
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.arrays import NULL, Ints

SUFFIXES = (".log", ".log.gz", ".jsonl", ".jsonl.gz")
_VERSIONS = frozenset({"v4.0"})
_EPOCH = 1_000_000_000_000_000_000  # ns; smaller times are not since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedProcess:
    """What the whole run states about one process."""

    rank: int
    world_size: int | None
    groups: Mapping[str, ProcessGroup]  # by id of the communicator


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


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """Find the rank of each process, and the members of each communicator.

    Ranks are those in the communicator of all processes, unless the configuration states them.
    Raises `TraceFileError` for unreadable files, and for ranks that are missing or occur twice.
    """
    logs = {path: communicators(path) for path in paths}
    for path, members in logs.items():
        if not members and is_damaged(path):
            raise TraceFileError(f"{path}: cannot be read: the file is empty or truncated")
    ranks, world, warnings = _ranks(logs, options)
    groups = _groups(logs, ranks, world)
    reading = options.reading(world, ranks.values())
    sources = []
    for path in sorted(paths, key=lambda path: ranks[path]):
        own = {member.id: groups[member.id] for member in logs[path]}
        process = LoggedProcess(rank=ranks[path], world_size=world, groups=own)
        sources.append(RankReader(read, path, reading, (process,)).source(ranks[path]))
    return RankSources(sources=tuple(sources), world_size=world, warnings=warnings)


_Logs = Mapping[Path, Sequence[InspectorCommunicator]]


def _ranks(
    logs: _Logs, options: OpenOptions
) -> tuple[dict[Path, int], int | None, tuple[str, ...]]:
    """Return the rank of each file, the world size, and warnings."""
    explicit = options.config.ranks
    if explicit:
        stated = {p: explicit.get(str(p), explicit.get(p.name)) for p in logs}
        ranks = {path: rank for path, rank in stated.items() if rank is not None}
        if missing := [str(path) for path in logs if path not in ranks]:
            raise TraceFileError(
                f"{missing[0]}: [ranks] in the configuration lacks this file; add its rank"
            )
        _check_different(ranks)
        return ranks, options.world, ()
    if world := _world(logs):
        ranks = {p: member.rank for p in logs for member in logs[p] if member.id == world.id}
        _check_different(ranks)
        return ranks, world.size, ()
    ranks = {path: number for number, path in enumerate(sorted(logs))}
    warning = (
        "no communicator has all processes: ranks are numbered in the order of the files; "
        "state them in [ranks] in the configuration"
    )
    return ranks, options.world, (warning,) if len(logs) > 1 else ()


def _world(logs: _Logs) -> InspectorCommunicator | None:
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


def _check_different(ranks: Mapping[Path, int]) -> None:
    """Raise `TraceFileError` if two files have one rank."""
    owner: dict[int, Path] = {}
    for path, rank in ranks.items():
        add_rank(owner, rank, path)


def _groups(
    logs: _Logs, ranks: Mapping[Path, int], world: int | None
) -> dict[str, ProcessGroup]:
    """Return the process group of each communicator by its identifier.

    The ranks of a group are known if the logs of all its ranks are given, or if it has as many
    ranks as the job, `world`; otherwise they are None. `ranks` has the rank of each log.
    """
    members: dict[str, set[int]] = {}
    by_id: dict[str, InspectorCommunicator] = {}
    for path, log in logs.items():
        for member in log:
            by_id.setdefault(member.id, member)
            members.setdefault(member.id, set()).add(ranks[path])
    groups = {}
    for key, communicator in by_id.items():
        group_ranks = members[key]
        if communicator.size == world:
            group_ranks = set(range(communicator.size))
        groups[key] = ProcessGroup(
            name=communicator.name or key,
            ranks=tuple(sorted(group_ranks)) if len(group_ranks) == communicator.size else None,
            size=communicator.size,
            communicator=_number(key),
        )
    return groups


def _number(communicator: str) -> int | None:
    """Return a communicator's id as a number, or None."""
    try:
        return int(communicator, 0)
    except ValueError:
        return None


def _calls(
    columns: Mapping[str, Ints], groups: tuple[ProcessGroup, ...]
) -> CommunicationColumns:
    """Return operation, group, sequence number and bytes of each operation of a log."""
    return CommunicationColumns(
        op=columns["op"],
        seq=columns["seq"],
        group=columns["communicator"],
        groups=groups,
        message=columns["message"],
        name=np.zeros(len(columns["op"]), np.int64),
        named=(Named(library="NCCL", op="OTHER", tag=None, fused=False),),
    )


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
    log = read_log(path, allow_truncated=options.allow_truncated)
    columns = log.columns()
    is_timed = bool((columns["start"] != NULL).all())
    stop = columns["dumped"]
    start = columns["start"] if is_timed else stop - columns["duration"]
    stop = start + columns["duration"] if is_timed else stop
    groups = tuple(process.groups.get(key, ProcessGroup(name=key)) for key in log.communicators)
    work = DeviceRows(
        start=start,
        stop=stop,
        kind=np.full(len(start), KIND["kernel"], np.int8),
        name=columns["name"],
        texts=list(log.names),
        lane=columns["communicator"],
        lanes=list(log.communicators),
        stream=np.full(len(start), NULL, np.int64),
        offset=columns["offset"],
    )
    events, lanes, order = work.events()
    calls = _calls(columns, groups)
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
        warnings=(*damage_warnings(log), *_notes(log, columns)),
        lacks=("compute",) if is_timed else ("compute", "times"),
    )
    trace = assemble(events, lanes, calls.collectives(order), options, meta)
    if is_timed:
        return trace
    return replace(trace, meta=replace(trace.meta, found_by="no times in the log"))


def _notes(log: Log, columns: Mapping[str, Ints]) -> list[str]:
    """Return warnings about what the log omits."""
    notes = []
    if unknown := sorted(log.versions - _VERSIONS):
        notes.append(
            f"inspector_output_format_version {', '.join(unknown)} is unknown; read as "
            f"{', '.join(sorted(_VERSIONS))}"
        )
    if log.has_newer:
        notes.append(
            "NCCL 2.30's inspector leaves out messages under 8192 bytes and operations without "
            "times of the GPU: volume is a lower bound"
        )
    if missing := _missing_count(columns):
        total = len(columns["seq"]) + missing
        notes.append(
            f"{missing} of {total} operations have no line (their sequence numbers are "
            "missing): volume is a lower bound"
        )
    return notes


def _missing_count(columns: Mapping[str, Ints]) -> int:
    """Return the number of missing sequence numbers, summed over all communicators."""
    count = 0
    for communicator in np.unique(columns["communicator"]).tolist():
        own = columns["communicator"] == communicator
        seq, ops = columns["seq"][own], columns["name"][own]
        if len(np.unique(seq)) == len(seq):
            count += _gaps(seq)
        else:
            count += sum(_gaps(np.unique(seq[ops == op])) for op in np.unique(ops).tolist())
    return count


def _gaps(seq: Ints) -> int:
    return int(seq.max() - seq.min()) + 1 - len(seq)
