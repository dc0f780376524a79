"""NCCL Inspector logs: a file a process, a rank a process, a line an operation.

A log knows sizes, groups and durations. It knows no compute, and times only if it is verbose.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fastcomm.errors import TraceFileError
from fastcomm.readers import OpenOptions, RankSources, check_count
from fastcomm.readers.assembly import TraceOptions, assemble
from fastcomm.readers.communication import CommunicationColumns, DeviceRows
from fastcomm.readers.inspector_log import (
    InspectorCommunicator,
    Log,
    communicators,
    damage,
    read_log,
)
from fastcomm.readers.kineto.stream import CutShortError, blocks
from fastcomm.readers.patterns import Named
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.run import Source
from fastcomm.trace.schema import KIND
from fastcomm.trace.tags import ProcessGroup
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.arrays import NULL, Ints

SUFFIXES = (".log", ".log.gz", ".jsonl", ".jsonl.gz")
_VERSIONS = frozenset({"v4.0"})
_EPOCH = 1_000_000_000_000_000_000  # ns: less is no time since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedProcess:
    """What the run knows of a process."""

    rank: int
    world_size: int | None
    groups: Mapping[str, ProcessGroup]  # by id of the communicator


def claims(path: Path) -> bool:
    """Whether the first record of the file is NCCL Inspector's."""
    if not path.name.lower().endswith(SUFFIXES) or not path.is_file():
        return False
    head = _head(path)
    return head.lstrip()[:1] == b"{" and (
        b'"inspector_output_format_version"' in head or b'"coll_perf"' in head
    )


def is_damaged(path: Path) -> bool:
    """Whether a file named like a log is empty, or cannot be read."""
    return path.name.lower().endswith(SUFFIXES) and not path.is_dir() and not _head(path)


def _head(path: Path) -> bytes:
    """The beginning of the text; nothing where there is none."""
    try:
        return next(blocks(path), b"")[:4096]
    except (CutShortError, TraceFileError):
        return b""


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """The rank of each process by the communicator of all, and who is in which group."""
    said = {path: communicators(path) for path in paths}
    for path, found in said.items():
        if not found and is_damaged(path):
            raise TraceFileError(f"{path}: cannot be read: the file is empty, or not whole")
    ranks, world, warnings = _ranks(said, options)
    groups = _groups(said, ranks, world)
    reading = options.reading(world, ranks.values())
    sources = []
    for path in sorted(paths, key=lambda each: ranks[each]):
        own = {each.id: groups[each.id] for each in said[path]}
        process = LoggedProcess(rank=ranks[path], world_size=world, groups=own)
        sources.append(
            Source(
                rank=ranks[path],
                path=path,
                size=path.stat().st_size,
                read=partial(read, path, reading, process),
            )
        )
    return RankSources(sources=tuple(sources), world_size=world, warnings=warnings)


_Said = Mapping[Path, Sequence[InspectorCommunicator]]


def _ranks(
    said: _Said, options: OpenOptions
) -> tuple[dict[Path, int], int | None, tuple[str, ...]]:
    """The rank of each file, the size of the world, and what to warn of."""
    explicit = options.config.ranks
    if explicit:
        told = {p: explicit.get(str(p), explicit.get(p.name)) for p in said}
        ranks = {path: rank for path, rank in told.items() if rank is not None}
        if missing := [str(path) for path in said if path not in ranks]:
            raise TraceFileError(f"{missing[0]}: [ranks] names no rank of this file")
        _check_different(ranks)
        return ranks, options.world, ()
    if world := _world(said):
        ranks = {path: each.rank for path in said for each in said[path] if each.id == world.id}
        _check_different(ranks)
        return ranks, world.size, ()
    ranks = {path: number for number, path in enumerate(sorted(said))}
    warning = (
        "no communicator has all processes: ranks are numbered in the order of the files; "
        "[ranks] in the configuration names them"
    )
    return ranks, options.world, (warning,) if len(said) > 1 else ()


def _world(said: _Said) -> InspectorCommunicator | None:
    """The largest communicator, if every process is in it; of several, that of the first id."""
    everywhere = Counter(each.id for found in said.values() for each in found)
    largest = max((each.size for found in said.values() for each in found), default=0)
    check_count(largest, next(iter(said)), "size of a communicator")
    shared = {
        each.id: each
        for found in said.values()
        for each in found
        if each.size == largest and everywhere[each.id] == len(said)
    }
    return shared[min(shared)] if shared else None


def _check_different(ranks: Mapping[Path, int]) -> None:
    taken: dict[int, Path] = {}
    for path, rank in ranks.items():
        if rank in taken:
            raise TraceFileError(f"two files of rank {rank}: {taken[rank]} and {path}")
        taken[rank] = path


def _groups(
    said: _Said, ranks: Mapping[Path, int], world: int | None
) -> dict[str, ProcessGroup]:
    """Each communicator's ranks in the job, where the logs of all its members are there."""
    members: dict[str, set[int]] = {}
    by_id: dict[str, InspectorCommunicator] = {}
    for path, found in said.items():
        for each in found:
            by_id.setdefault(each.id, each)
            members.setdefault(each.id, set()).add(ranks[path])
    groups = {}
    for key, each in by_id.items():
        known = members[key]
        if each.size == world:
            known = set(range(each.size))
        groups[key] = ProcessGroup(
            name=each.name or key,
            ranks=tuple(sorted(known)) if len(known) == each.size else None,
            size=each.size,
            communicator=_number(key),
        )
    return groups


def _number(communicator: str) -> int | None:
    try:
        return int(communicator, 0)
    except ValueError:
        return None


def read(path: Path, options: TraceOptions, process: LoggedProcess) -> Trace:
    """Read one process's log; TraceFileError where it is none."""
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
    calls = CommunicationColumns(
        op=columns["op"],
        seq=columns["seq"],
        group=columns["communicator"],
        groups=groups,
        message=columns["message"],
        name=np.zeros(len(start), np.int64),
        named=(Named(library="NCCL", op="OTHER", tag=None, fused=False),),
    )
    if not is_timed:
        # Where durations were put says nothing: one iteration holds them all.
        whole = (0, int(start.min()), int(stop.max()) + 1)
        options = replace(options, iterations=IterationRule(ranges=(whole,)))
    meta = Meta(
        rank=process.rank,
        world_size=process.world_size,
        format="inspector",
        path=str(path),
        clock="unix" if int(start.min()) >= _EPOCH else None,
        warnings=(*damage(log), *_notes(log, columns)),
        lacks=("compute",) if is_timed else ("compute", "times"),
    )
    trace = assemble(events, lanes, calls.collectives(order), options, meta)
    if is_timed:
        return trace
    return replace(trace, meta=replace(trace.meta, found_by="no times in the log"))


def _notes(log: Log, columns: Mapping[str, Ints]) -> list[str]:
    """What the log leaves out."""
    notes = []
    if strange := sorted(log.versions - _VERSIONS):
        notes.append(
            f"inspector_output_format_version {', '.join(strange)}: found an unknown version, "
            f"wanted {', '.join(sorted(_VERSIONS))}; read as that"
        )
    if log.has_newer:
        notes.append(
            "NCCL 2.30's inspector leaves out messages under 8192 bytes and operations without "
            "times of the GPU: volume is a lower bound"
        )
    if lost := _lost(columns):
        seen = len(columns["seq"])
        notes.append(
            f"{lost} of {seen + lost} operations have no line (their sequence numbers are "
            "missing): volume is a lower bound"
        )
    return notes


def _lost(columns: Mapping[str, Ints]) -> int:
    """How many sequence numbers are missing between the first and the last.

    A version may count a communicator's operations together, or each kind of them.
    """
    lost = 0
    for communicator in np.unique(columns["communicator"]).tolist():
        own = columns["communicator"] == communicator
        seq, ops = columns["seq"][own], columns["name"][own]
        if len(np.unique(seq)) == len(seq):
            lost += _gaps(seq)
        else:
            lost += sum(_gaps(np.unique(seq[ops == each])) for each in np.unique(ops).tolist())
    return lost


def _gaps(seq: Ints) -> int:
    return int(seq.max() - seq.min()) + 1 - len(seq)
