"""Read one Kineto file into the trace of a rank."""

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
from fastcomm.readers.kineto import head
from fastcomm.readers.kineto.categories import (
    SCANNED,
    keep,
    scan,
    why_no_device_work,
    why_strange,
)
from fastcomm.readers.kineto.chrome import Scanned, Selection
from fastcomm.readers.kineto.collectives import find_collectives, known_groups
from fastcomm.readers.kineto.sizes import PREFIXES
from fastcomm.trace.columns import first_seen
from fastcomm.trace.events import Events
from fastcomm.trace.run import SkippedRank, Source
from fastcomm.trace.schema import KIND, KINDS
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.json_scan import WORD
from fastcomm_kernels.words import KEEP_ALL, KEEP_NAMED, KEEP_NONE

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
    "other": KEEP_NONE,  # known to be no device work
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

# For `metrics`: device work, its launches, the marks of the iterations, the collective calls.
METRICS = Selection(
    kinds=SCANNED,
    # Unknown categories may be device work.
    keep=keep([_KEEP[kind] for kind in KIND], KEEP_ALL),
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

# For whatever else may be asked of a run.
EVERYTHING = replace(
    METRICS,
    keep=keep([KEEP_ALL for _ in KIND], KEEP_ALL),
    positions=True,
    row_args=(*METRICS.row_args, *(name for name in ARG_NAMES if name not in METRICS.row_args)),
)


SUFFIXES = head.SUFFIXES
# A relative time is less than the three months between two base times; since 1970 is more.
_MOST_DEVICES = 1 << 16
_LATEST = 1 << 62  # ns: differences of two such times fit 64 bits
_ABSOLUTE = 1_600_000_000_000_000_000


def read(path: Path, options: TraceOptions, rank: int | None = None) -> Trace:
    """Read the trace of one rank; `rank` is the rank that the run expects, if it knows.

    Raises
    ------
    TraceFileError
        If the file is not a trace, or names another rank.

    """
    scanned, strange = scan(
        path, EVERYTHING if options.whole else METRICS, allow_truncated=options.allow_truncated
    )
    info = scanned.envelope.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    _check_sign(path, info.get("rank"))
    own, world = (info[key] if head.is_count(info.get(key)) else None for key in head.RANK_KEYS)
    for value, what in ((own, "rank"), (world, "world size")):
        check_count(value or 0, path, what)
    if own is not None and rank is not None and own != rank:
        raise TraceFileError(f"{path}: distributedInfo says rank {own}, taken for rank {rank}")
    events, lanes, origin, notes = _events(scanned)
    lacks: tuple[str, ...] = ()
    if not len(events.rows(*DEVICE_KINDS)):
        word, reason = why_no_device_work(
            path, len(events.rows("runtime")), is_truncated=scanned.is_truncated
        )
        lacks, notes = (word,), [*notes, reason]
    elif strange.events:
        lacks, reason = why_strange(path, strange)
        notes = [*notes, reason]
    found = find_collectives(events, known_groups(info), options.patterns)
    meta = Meta(
        rank=own if own is not None else rank or 0,
        world_size=world,
        format="kineto",
        path=str(path),
        base=origin[0],
        clock=origin[1],
        warnings=(*scanned.warnings, *notes),
        lacks=lacks,
        is_truncated=scanned.is_truncated,
    )
    return assemble(events, lanes, found, options, meta)


def _check_sign(path: Path, rank: object) -> None:
    """TraceFileError where a file says that its rank is negative."""
    if isinstance(rank, int) and rank < 0:
        raise TraceFileError(
            f"{path}: distributedInfo says rank {rank}; expected a number from 0 on. Correct "
            "it, or remove it to take the rank from the name of the file"
        )


def claims(path: Path) -> bool:
    """Whether the file is a rank's trace, or would be if it could be read.

    A file is one if its beginning is that of a trace, if PyTorch's name for traces is its name,
    or if it cannot be read and is named after a rank, or cannot be opened at all.
    """
    if not _may_be_trace(path):
        return False
    if head.is_trace_name(path.name):
        return True
    found = head.peek(path)
    if found.kind == "damaged":
        return found.is_closed or head.is_rank_name(path.name)
    return found.is_trace


def is_damaged(path: Path) -> bool:
    """Whether a file that is named like a trace cannot be read, or holds no whole JSON."""
    return _may_be_trace(path) and head.peek(path).kind == "damaged"


def _may_be_trace(path: Path) -> bool:
    """Whether the name allows it, and no directory has it."""
    return (
        path.name.lower().endswith(SUFFIXES)
        and not path.name.startswith(head.EXECUTION_TRACES)
        and not path.is_dir()
    )


def find(paths: Sequence[Path], options: OpenOptions) -> RankSources:
    """Find the rank of each file: what it says, else what its name says, else 0 if alone.

    Raises `TraceFileError` where a rank cannot be told; with `options.keep_going` that file is
    among `skipped`.
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
    # The rank of a file that is alone may stand behind its events: reading it tells.
    is_untold = len(paths) == 1 and _rank(paths[0]) is None
    said = {path: head.peek(path).world_size for path in ranks.values()}
    world = agreed_world(said, ranks)
    reading = options.reading(world, ranks)
    sources = tuple(
        Source(
            rank=rank,
            path=path,
            size=_size(path),
            read=partial(read, path, reading, None if is_untold else rank),
        )
        for rank, path in sorted(ranks.items())
    )
    return RankSources(sources=sources, world_size=world, skipped=tuple(skipped))


def _checked_rank(path: Path, *, is_alone: bool) -> int:
    """The rank of a file; TraceFileError where it holds no trace, or the rank is not told."""
    found = head.peek(path)
    if found.kind == "uniform" or (found.kind == "foreign" and found.is_whole):
        what = found.error or "no event of the PyTorch profiler in its beginning"
        raise TraceFileError(f"{path}: {what}; expected a trace of the PyTorch profiler")
    if found.kind == "damaged" and not is_alone:
        raise TraceFileError(f"{path}: cannot be read: {found.error}")
    rank = _rank(path)
    if rank is not None or is_alone:
        return rank or 0
    raise TraceFileError(
        f"{path}: of which rank is it? No distributedInfo.rank before the events, and "
        f"the name holds none of {', '.join(NAME_PATTERNS)}"
    )


def _size(path: Path) -> int:
    """The size of a file in bytes; 0 where it is not there: reading it says so."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _rank(path: Path) -> int | None:
    """The rank that the beginning of a file says, else its name."""
    rank = head.peek(path).rank
    return rank if rank is not None else rank_from_name(path.name)


def _events(scanned: Scanned) -> tuple[Events, pa.Table, tuple[int, str | None], list[str]]:
    """The events sorted by start, their lanes, base and name of their clock, what is odd."""
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
    """What to add to the times, the clock they are then on, and what is odd about it."""
    base = envelope.get("baseTimeNanoseconds")
    if isinstance(base, int):
        least, most = (int(start[0]), int(stop.max())) if len(start) else (0, 0)
        if base + least >= -_LATEST and base + most <= _LATEST:
            return base, "unix", []
        return 0, None, ["baseTimeNanoseconds is no time: absolute times are unknown"]
    if not len(start) or int(start[-1]) >= _ABSOLUTE:
        return 0, "unix", []
    return 0, None, ["no baseTimeNanoseconds: the absolute time of the events is unknown"]


_ON_DEVICE = np.isin(KINDS, (*DEVICE_KINDS, "gpu_annotation"))  # by kind


def _lanes(columns: dict[str, Any], texts: Sequence[str]) -> tuple[NDArray[np.int32], pa.Table]:
    """The lane of each event, and the lanes in the order of their first event."""
    # A row about waiting stands on a stream if it has a device.
    is_device = _ON_DEVICE[columns["kind"]]
    is_device |= (columns["kind"] == KIND["sync"]) & (columns["device"] != NULL)
    process, thread = columns.pop("process"), columns.pop("thread")
    first, lane = first_seen(process, thread, is_device)

    device = columns["device"][first]
    device = np.where(is_device[first] & (device == NULL), process[first], device)
    no_device = ~is_device[first] | (device < 0) | (device > _MOST_DEVICES)
    lanes = pa.table(
        {
            "process": pa.array(_lane_words(process[first], texts), pa.string()),
            "thread": pa.array(_lane_words(thread[first], texts), pa.string()),
            "device": pa.array(device, mask=no_device),
            "is_device": is_device[first],
        }
    )
    return lane.astype(np.int32), lanes


def _lane_words(column: Ints, texts: Sequence[str]) -> pa.Array | list[str]:
    """Processes or threads in words: a number, the word that stood for it, or nothing."""
    if (column > WORD).all():  # of millions no object is made
        return pa.array(column).cast(pa.string())
    return [
        "" if value == NULL else texts[WORD - value] if value <= WORD else str(value)
        for value in column.tolist()
    ]
