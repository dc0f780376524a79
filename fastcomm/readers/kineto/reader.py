"""Read one Kineto file as the trace of a rank, and find the ranks of files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers import (
    NAME_PATTERNS,
    OpenOptions,
    RankSources,
    agreed_world,
    check_count,
    communication,
    rank_from_name,
)
from fastcomm.readers.assembly import DEVICE_KINDS, TraceOptions, assemble
from fastcomm.readers.kineto import head, host
from fastcomm.readers.kineto.categories import (
    SCANNED,
    explain_no_device_work,
    explain_unknown_work,
    keep_scanned,
    scan,
)
from fastcomm.readers.kineto.chrome import Scanned, Selection
from fastcomm.readers.kineto.collectives import find_collectives, groups_of_rank
from fastcomm.readers.kineto.host import HostCollectives
from fastcomm.readers.kineto.host_groups import (
    MOST_RANKS,
    Assigned,
    HostRank,
    assign_together,
    groups_of,
)
from fastcomm.readers.kineto.sizes import PREFIXES
from fastcomm.trace.columns import first_seen
from fastcomm.trace.events import Events
from fastcomm.trace.run import SkippedRank, Source
from fastcomm.trace.schema import KIND, KINDS
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.json_events import KEEP_ALL, KEEP_NAMED, KEEP_NONE, TEXT_LANE

# Names of the host's calls into the collective libraries.
COLLECTIVE_CALLS = (b"record_p", b"c10d::", b"nccl:", b"gloo:", *PREFIXES)

_KEEP = {
    "kernel": KEEP_ALL,
    "memcpy": KEEP_ALL,
    "memset": KEEP_ALL,
    "cpu_op": KEEP_NAMED,
    "runtime": KEEP_ALL,
    "annotation": KEEP_ALL,
    "gpu_annotation": KEEP_NONE,
    "sync": KEEP_NONE,
    "python": KEEP_NONE,
    "other": KEEP_NONE,  # not device work
    "host_work": KEEP_NONE,  # of this reader, not of a file
}

# The args of `schema.ARGS`, by their names in a trace.
ARG_NAMES = {
    "External id": "external_id",
    "stream": "on_stream",
    "bytes": "bytes",
    "wait_on_stream": "wait_stream",
    "wait_on_cuda_event_record_corr_id": "wait_correlation",
    "Sequence number": "sequence",
    "Fwd thread id": "forward_thread",
    "Record function id": "record_function",
}

# For metrics: device work, its launches, marks of iterations, and calls of collectives.
METRICS = Selection(
    kinds=SCANNED,
    # Unknown categories may be device work.
    keep=keep_scanned([_KEEP[kind] for kind in KIND], KEEP_ALL),
    prefixes=COLLECTIVE_CALLS,
    row_args=("correlation", "External id", "stream", "device", "bytes"),
    detail_args=(
        "In msg nelems",
        "Out msg nelems",
        "In msg size",  # the names of both until 2023-12
        "Out msg size",
        "Group size",
        "Seq",
        *communication.DETAILS,
    ),
    detail_texts=(
        "Collective name",
        "dtype",
        "In split size",
        "Out split size",
        "Process Group Name",
        "Process Group ID",  # its name until 2024-04
        "Process Group Description",
        "Process Group Ranks",
        "Input Dims",
        "Input type",
    ),
)

# For all other analyses.
EVERYTHING = replace(
    METRICS,
    keep=keep_scanned([KEEP_ALL for _ in KIND], KEEP_ALL),
    positions=True,
    row_args=(*METRICS.row_args, *(name for name in ARG_NAMES if name not in METRICS.row_args)),
)


# For runs without an accelerator: all operators, and what links them to annotations.
_LINKS = ("Record function id",)
ON_HOST = replace(
    METRICS,
    keep=keep_scanned(
        [KEEP_ALL if kind == "cpu_op" else _KEEP[kind] for kind in KIND], KEEP_ALL
    ),
    row_args=(*METRICS.row_args, *_LINKS),
    detail_texts=(*METRICS.detail_texts, "Concrete Inputs"),
)
EVERYTHING_ON_HOST = replace(
    EVERYTHING, detail_texts=(*EVERYTHING.detail_texts, "Concrete Inputs")
)
HOST_RUN = (
    "a run without an accelerator: compute is the time of operators on the host, communication "
    "that of its collectives"
)

SUFFIXES = head.SUFFIXES
_MOST_DEVICES = 1 << 16
_LATEST = 1 << 62  # ns: differences of two such times fit 64 bits
# Times relative to a base time span at most three months; times since 1970 are larger.
_ABSOLUTE = 1_600_000_000_000_000_000


def read(
    path: Path,
    options: TraceOptions,
    rank: int | None = None,
    assigned: Assigned | None = None,
) -> Trace:
    """Read the trace of one rank.

    Parameters
    ----------
    path
        The file.
    options
        What to read; with `whole`, all events rather than those that metrics need.
    rank
        The rank that the run expects; None if unknown.
    assigned
        Groups of collectives on the host, if all ranks were compared.

    Raises
    ------
    TraceFileError
        If the file is not a trace, or names another rank.

    """
    scanned, unknown_work = scan(
        path, EVERYTHING if options.whole else METRICS, allow_truncated=options.allow_truncated
    )
    info = _distributed_info(scanned)
    is_host_run = host.is_host_run(scanned)
    if is_host_run:
        scanned = _host_run(path, options, assigned)
    _check_sign(path, info.get("rank"))
    own, world = (info[key] if head.is_count(info.get(key)) else None for key in head.RANK_KEYS)
    for value, name in ((own, "rank"), (world, "world size")):
        check_count(value or 0, path, name)
    if own is not None and rank is not None and own != rank:
        raise TraceFileError(
            f"{path}: distributedInfo says rank {own}, but the file stands for rank {rank}"
        )
    events, lanes, origin, notes = _events(scanned)
    missing: tuple[str, ...] = ()
    if is_host_run:
        notes = [*notes, HOST_RUN]
    elif not len(events.rows(*DEVICE_KINDS)):
        key, reason = explain_no_device_work(
            path, len(events.rows("runtime")), is_truncated=scanned.is_truncated
        )
        missing, notes = (key,), [*notes, reason]
    elif unknown_work.events:
        missing, reason = explain_unknown_work(path, unknown_work)
        notes = [*notes, reason]
    collectives = find_collectives(events, groups_of_rank(info), options.patterns)
    meta = Meta(
        rank=own if own is not None else rank or 0,
        world_size=world,
        format="kineto",
        path=str(path),
        base=origin[0],
        clock=origin[1],
        warnings=(*scanned.warnings, *notes),
        lacks=missing,
        is_truncated=scanned.is_truncated,
        is_host_run=is_host_run,
    )
    return assemble(events, lanes, collectives, options, meta)


def _distributed_info(scanned: Scanned) -> dict[str, Any]:
    """Return what a trace states of its job."""
    info = scanned.envelope.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _host_run(path: Path, options: TraceOptions, assigned: Assigned | None) -> Scanned:
    """Return the events of one rank without an accelerator, with its work as that of a device.

    `path` is the file of the rank. `assigned` has the groups of its threads and the numbers of
    its collectives, from all ranks; None for this file alone.
    """
    selection = EVERYTHING_ON_HOST if options.whole else ON_HOST
    scanned, _ = scan(path, selection, allow_truncated=options.allow_truncated)
    rank = _host_rank(scanned, 0)
    if assigned is None or len(assigned.numbers) != len(rank.collectives.calls):
        groups, numbers = rank.assign({}), None
    else:
        groups, numbers = assigned.groups, assigned.numbers
    return host.with_host_work(
        scanned,
        rank.collectives,
        groups_of(rank.collectives, rank.groups, groups),
        numbers,
        with_waits=options.whole,
    )


def _host_rank(scanned: Scanned, rank: int) -> HostRank:
    """Return the collectives of a rank on the host."""
    base = scanned.envelope.get("baseTimeNanoseconds")
    return HostRank(
        rank=rank,
        groups=groups_of_rank(_distributed_info(scanned)),
        collectives=HostCollectives.of(scanned),
        base=base if isinstance(base, int) else 0,
    )


def _assigned(ranks: Mapping[int, Path], options: TraceOptions) -> dict[int, Assigned]:
    """Return the groups of collectives on the host of each rank, if the run has no other.

    Empty if a trace names another library, or cannot be read; then each rank stands alone.
    """
    paths = list(ranks.values())
    are_on_host = all(head.peek(path).is_on_host for path in paths)
    if not are_on_host or not 1 < len(paths) <= MOST_RANKS:
        return {}
    try:
        scans = [
            scan(path, ON_HOST, allow_truncated=options.allow_truncated)[0] for path in paths
        ]
    except TraceFileError:
        return {}
    hosts = [_host_rank(scanned, rank) for rank, scanned in zip(ranks, scans, strict=True)]
    return dict(zip(ranks, assign_together(hosts), strict=True))


def _check_sign(path: Path, rank: object) -> None:
    """Raise TraceFileError if a file states a negative rank."""
    if isinstance(rank, int) and rank < 0:
        raise TraceFileError(
            f"{path}: distributedInfo says rank {rank}; expected a number from 0 on. Correct "
            "it, or remove it to take the rank from the name of the file"
        )


def claims(path: Path) -> bool:
    """Return whether the file is the trace of a rank, or would be if it were readable.

    Only names with a suffix of `SUFFIXES` that are not those of execution traces can be. Of
    these, it is a file that begins like a trace, that has PyTorch's name for traces, that is
    named after a rank but unreadable, or that cannot be opened.
    """
    if not _may_be_trace(path):
        return False
    if head.is_trace_name(path.name):
        return True
    peek = head.peek(path)
    if peek.kind == "damaged":
        return peek.is_closed or head.is_rank_name(path.name)
    return peek.is_trace


def is_damaged(path: Path) -> bool:
    """Return whether a file named like a trace is unreadable, or is not complete JSON."""
    return _may_be_trace(path) and head.peek(path).kind == "damaged"


def _may_be_trace(path: Path) -> bool:
    """Return whether the name may be that of a trace, and is not a directory's."""
    return (
        path.name.lower().endswith(SUFFIXES)
        and not path.name.startswith(head.EXECUTION_TRACES)
        and not path.is_dir()
    )


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """Find the rank of each file: from its contents, else its name, else 0 for a single file.

    Parameters
    ----------
    paths
        Files of one run.
    options
        With `keep_going`, unreadable files are skipped.

    Raises
    ------
    TraceFileError
        If a rank is unknown, or two files have one rank; with `keep_going`, if no file is
        readable.

    """
    ranks: dict[int, Path] = {}
    skipped: list[SkippedRank] = []
    for path in paths:
        try:
            rank = _checked_rank(path, is_alone=len(paths) == 1)
        except TraceFileError as error:
            if not options.keep_going or len(paths) == 1:
                raise
            skipped.append(SkippedRank(rank=_rank(path), path=str(path), error=str(error)))
            continue
        if rank in ranks:
            raise TraceFileError(f"two files of rank {rank}: {ranks[rank]} and {path}")
        ranks[rank] = path
    if not ranks:
        raise TraceFileError(f"no rank could be read: {skipped[0].error}")
    # A single file may state its rank behind the events, which only reading it tells.
    is_unknown = len(paths) == 1 and _rank(paths[0]) is None
    world_sizes = {path: head.peek(path).world_size for path in ranks.values()}
    world = agreed_world(world_sizes, ranks)
    reading = options.reading(world, ranks)
    assigned = _assigned(ranks, reading)
    sources = tuple(
        Source(
            rank=rank,
            path=path,
            size=_size(path),
            read=partial(read, path, reading, None if is_unknown else rank, assigned.get(rank)),
        )
        for rank, path in sorted(ranks.items())
    )
    return RankSources(sources=sources, world_size=world, skipped=tuple(skipped))


def _checked_rank(path: Path, *, is_alone: bool) -> int:
    """Return the rank of a file; TraceFileError if it is no trace, or has no rank."""
    peek = head.peek(path)
    if peek.kind == "uniform" or (peek.kind == "foreign" and peek.is_whole):
        problem = peek.error or "no event of the PyTorch profiler in its beginning"
        raise TraceFileError(f"{path}: {problem}; expected a trace of the PyTorch profiler")
    if peek.kind == "damaged" and not is_alone:
        raise TraceFileError(f"{path}: cannot be read: {peek.error}")
    rank = _rank(path)
    if rank is not None or is_alone:
        return rank or 0
    raise TraceFileError(
        f"{path}: cannot determine the rank: no distributedInfo.rank before the events, and "
        f"the name has none of {', '.join(NAME_PATTERNS)}. Name it rank3.json, for example"
    )


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is missing, which reading it reports."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _rank(path: Path) -> int | None:
    """Return the rank that the beginning of a file states, else its name."""
    rank = head.peek(path).rank
    return rank if rank is not None else rank_from_name(path.name)


def _events(scanned: Scanned) -> tuple[Events, pa.Table, tuple[int, str | None], list[str]]:
    """Return the events sorted by start, their lanes, base and clock, and warnings."""
    columns = scanned.columns
    start = columns["start"]
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        columns = {name: column.take(order) for name, column in columns.items()}
    lane, lanes = _lanes(columns, scanned.texts)
    base, clock, notes = _base(columns["start"], columns["stop"], scanned.envelope)
    columns["start"] += base
    columns["stop"] += base
    columns |= {name: columns[key] for key, name in ARG_NAMES.items() if key in columns}
    events = Events(
        **{name: columns.pop(name) for name in _EVENT},
        lane=lane,
        texts=scanned.texts,
        more=columns,
        details=scanned.details,
    )
    return events, lanes, (base, clock), notes


_EVENT = ("start", "stop", "kind", "name", "correlation")


def _base(
    start: Ints, stop: Ints, envelope: Mapping[str, Any]
) -> tuple[int, str | None, list[str]]:
    """Return the ns to add to the times, the resulting clock (None: unknown), and warnings."""
    base = envelope.get("baseTimeNanoseconds")
    if isinstance(base, int):
        least, most = (int(start[0]), int(stop.max())) if len(start) else (0, 0)
        if base + least >= -_LATEST and base + most <= _LATEST:
            return base, "unix", []
        return 0, None, ["baseTimeNanoseconds is no valid time: absolute times are unknown"]
    if not len(start) or int(start[-1]) >= _ABSOLUTE:
        return 0, "unix", []
    return 0, None, ["no baseTimeNanoseconds: the absolute time of the events is unknown"]


_ON_DEVICE = np.isin(KINDS, (*DEVICE_KINDS, "gpu_annotation", "host_work"))  # by kind


def _lanes(columns: dict[str, Any], texts: Sequence[str]) -> tuple[NDArray[np.int32], pa.Table]:
    """Return the lane of each event, and the lanes in the order of their first events."""
    # A wait is on a stream if it has a device.
    is_device = _ON_DEVICE[columns["kind"]]
    is_device |= (columns["kind"] == KIND["sync"]) & (columns["device"] != NULL)
    process, thread = columns.pop("process"), columns.pop("thread")
    first, lane = first_seen(process, thread, is_device)

    device = columns["device"][first]
    device = np.where(is_device[first] & (device == NULL), process[first], device)
    no_device = ~is_device[first] | (device < 0) | (device > _MOST_DEVICES)
    lanes = pa.table(
        {
            "process": pa.array(_lane_names(process[first], texts), pa.string()),
            "thread": pa.array(_lane_names(thread[first], texts), pa.string()),
            "device": pa.array(device, mask=no_device),
            "is_device": is_device[first],
        }
    )
    return lane.astype(np.int32), lanes


def _lane_names(column: Ints, texts: Sequence[str]) -> pa.Array | list[str]:
    """Return processes or threads as texts: a number, a name from the trace, or ""."""
    if (column > TEXT_LANE).all():  # avoids millions of Python objects
        return pa.array(column).cast(pa.string())
    return [
        "" if value == NULL else texts[TEXT_LANE - value] if value <= TEXT_LANE else str(value)
        for value in column.tolist()
    ]
