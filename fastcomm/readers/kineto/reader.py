"""Read one Kineto file as the trace of a rank, and find the ranks of files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers import (
    NAME_PATTERNS,
    OpenOptions,
    RankReader,
    RankSources,
    add_rank,
    agreed_world,
    check_count,
    rank_from_name,
)
from fastcomm.readers.assembly import DEVICE_KINDS, TraceOptions, assemble
from fastcomm.readers.kineto import head
from fastcomm.readers.kineto.categories import (
    UnknownWork,
    explain_no_device_work,
    explain_unknown_work,
    scan,
)
from fastcomm.readers.kineto.chrome import Scanned
from fastcomm.readers.kineto.collectives import find_collectives, groups_of_rank
from fastcomm.readers.kineto.host import is_host_run, with_host_collectives
from fastcomm.readers.kineto.host_groups import Assigned, as_device, assign, distributed_info
from fastcomm.readers.kineto.selection import (
    ARG_NAMES,
    EVERYTHING,
    EVERYTHING_ON_HOST,
    METRICS,
    ON_HOST,
    OPERAND_NAMES,
)
from fastcomm.trace.columns import first_seen
from fastcomm.trace.events import Events
from fastcomm.trace.run import SkippedRank
from fastcomm.trace.schema import KIND, KINDS
from fastcomm.trace.trace import Meta, Trace, gpu_name, host_digest
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.json_events import TEXT_LANE

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
    scanned, unknown_work, is_host_run = _scan(path, options, assigned)
    info = distributed_info(scanned)
    own, world = _stated(path, info, rank)
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
        gpu=_gpu(scanned.envelope.get("deviceProperties")),
        host=host_digest(scanned.envelope.get("host_name")),
    )
    return assemble(events, lanes, collectives, options, meta)


def _scan(
    path: Path, options: TraceOptions, assigned: Assigned | None
) -> tuple[Scanned, UnknownWork, bool]:
    """Read the columns of a rank's file that the options select.

    A run without an accelerator needs other events, and its work is returned as that of a
    device. `assigned` are the groups of its collectives, if they were determined across ranks.

    Returns the columns, the work of unknown kind, and whether it is such a run.
    """
    # Only ranks of such runs are compared before they are read.
    scanned, unknown_work = _selected(path, options, on_host=assigned is not None)
    on_host = is_host_run(scanned)
    if on_host != (assigned is not None):
        scanned, unknown_work = _selected(path, options, on_host=on_host)
    if on_host:
        scanned = as_device(scanned, assigned, with_waits=options.whole)
    else:
        scanned = with_host_collectives(scanned)
    return scanned, unknown_work, on_host


def _selected(
    path: Path, options: TraceOptions, *, on_host: bool
) -> tuple[Scanned, UnknownWork]:
    """Scan the events that the options need, of a run with or without an accelerator."""
    if options.whole:
        selection = EVERYTHING_ON_HOST if on_host else EVERYTHING
    else:
        selection = ON_HOST if on_host else METRICS
    return scan(path, selection, allow_truncated=options.allow_truncated)


def _gpu(devices: object) -> str | None:
    """Return the name that all devices of a file have; None without one."""
    devices = devices if isinstance(devices, list) else []
    return gpu_name([device.get("name") for device in devices if isinstance(device, dict)])


def _stated(
    path: Path, info: Mapping[str, Any], rank: int | None
) -> tuple[int | None, int | None]:
    """Return the rank and the world size that a file states; None if it does not.

    Raises TraceFileError if they are invalid, or the rank is not the expected one.
    """
    _check_sign(path, info.get("rank"))
    own, world = (info[key] if head.is_count(info.get(key)) else None for key in head.RANK_KEYS)
    for value, name in ((own, "rank"), (world, "world size")):
        check_count(value or 0, path, name)
    if own is not None and rank is not None and own != rank:
        raise TraceFileError(
            f"{path}: distributedInfo says rank {own}, but the file stands for rank {rank}"
        )
    return own, world


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
        add_rank(ranks, rank, path)
    if not ranks:
        raise TraceFileError(f"no rank could be read: {skipped[0].error}")
    # A single file may state its rank behind the events, which only reading it tells.
    is_unknown = len(paths) == 1 and _rank(paths[0]) is None
    world_sizes = {path: head.peek(path).world_size for path in ranks.values()}
    world = agreed_world(world_sizes, ranks)
    reading = options.reading(world, ranks)
    assigned = assign(ranks, reading)
    sources = []
    for rank, path in sorted(ranks.items()):
        details = None if is_unknown else rank, assigned.get(rank)
        reader = RankReader(read, path, reading, details, may_have_shapes=True)
        sources.append(reader.source(rank))
    return RankSources(sources=tuple(sources), world_size=world, skipped=tuple(skipped))


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
    if "position" in columns:  # all events were read
        columns |= _operands(columns, scanned.details)
    events = Events(
        **{name: columns.pop(name) for name in _EVENT},
        lane=lane,
        texts=scanned.texts,
        more=columns,
        details=scanned.details,
    )
    return events, lanes, (base, clock), notes


def _operands(columns: dict[str, Any], details: Mapping[str, Ints]) -> dict[str, Ints]:
    """Return the codes of the texts of operators' inputs by column; NULL without any."""
    is_operator = np.isin(columns["kind"], (KIND["cpu_op"], KIND["host_work"]))
    place = np.where(is_operator, columns["detail"], np.int32(-1))
    return {name: details[key][place] for key, name in OPERAND_NAMES.items() if key in details}


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
    """Return the index of the thread or stream of each event, and the table of all of them.

    The table has process, thread and device, in the order of their first events. `texts` are
    the names to which codes of processes and threads refer.
    """
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
