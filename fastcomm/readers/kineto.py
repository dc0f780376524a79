"""Kineto traces of the PyTorch profiler: one file, one rank, one `Trace`."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers.assembly import DEVICE_KINDS, ReadOptions, assemble
from fastcomm.readers.blocks import CutShortError, blocks
from fastcomm.readers.chrome import Scanned
from fastcomm.readers.collectives import find_collectives, known_groups
from fastcomm.readers.events import Events
from fastcomm.readers.formats import Found, OpenOptions, agreed_world, check_count
from fastcomm.readers.kineto_categories import scan, why_no_device_work
from fastcomm.readers.kineto_layout import ARG_NAMES, EVERYTHING, METRICS
from fastcomm.readers.ranks import NAME_PATTERNS, rank_from_name
from fastcomm.trace.alike import first_seen
from fastcomm.trace.run import Source
from fastcomm.trace.schema import KIND, KINDS
from fastcomm.trace.trace import Meta, Trace
from fastcomm_kernels.json_numbers import NULL
from fastcomm_kernels.json_scan import WORD

Ints = NDArray[np.int64]

SUFFIXES = (".json", ".json.gz")
# Execution traces lie beside Kineto traces and are none.
_NO_TRACES = ("torch_et_", "pytorch_et_")
_HEAD = 1 << 15  # bytes; a job of thousands of ranks lists its groups in more
_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"
# A relative time is less than the three months between two base times; since 1970 is more.
_MOST_DEVICES = 1 << 16
_LATEST = 1 << 62  # ns: differences of two such times fit 64 bits
_ABSOLUTE = 1_600_000_000_000_000_000


def read(path: Path, options: ReadOptions, rank: int | None = None) -> Trace:
    """Read the trace of one rank; `rank` is the rank that the run expects, if it knows.

    Raises
    ------
    TraceFileError
        If the file is not a trace, or names another rank.

    """
    scanned = scan(
        path, EVERYTHING if options.whole else METRICS, allow_truncated=options.allow_truncated
    )
    info = scanned.envelope.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    own, world = (info[key] if _is_count(info.get(key)) else None for key in _RANK_KEYS)
    for value, what in ((own, "rank"), (world, "world size")):
        check_count(value or 0, path, what)
    if own is not None and rank is not None and own != rank:
        raise TraceFileError(f"{path}: distributedInfo says rank {own}, taken for rank {rank}")
    events, lanes, origin, notes = _events(scanned)
    lacks: tuple[str, ...] = ()
    if not len(events.rows(*DEVICE_KINDS)):
        word, reason = why_no_device_work(path, len(events.rows("runtime")))
        lacks, notes = (word,), [*notes, reason]
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


def claims(path: Path) -> bool:
    """Whether the file is a trace, or calls itself one: reading it then says what is wrong."""
    return (
        path.name.endswith(SUFFIXES)
        and not path.name.startswith(_NO_TRACES)
        and path.is_file()
        and peek(path).is_trace
    )


def find(paths: Sequence[Path], options: OpenOptions) -> Found:
    """The rank of each file: by what it says itself, else by its name, else if it is alone."""
    peeks = {path: peek(path) for path in paths}
    ranks: dict[int, Path] = {}
    for path, seen in peeks.items():
        rank = _told(path, seen)
        if rank is None and len(paths) == 1:
            rank = 0  # what stands behind the events may say otherwise
        if rank is None:
            raise TraceFileError(
                f"{path}: of which rank is it? No distributedInfo.rank before the events, and "
                f"the name holds none of {', '.join(NAME_PATTERNS)}"
            )
        if rank in ranks:
            raise TraceFileError(f"two files of rank {rank}: {ranks[rank]} and {path}")
        ranks[rank] = path
    alone = len(paths) == 1 and _told(paths[0], peeks[paths[0]]) is None
    world = agreed_world({path: seen.world_size for path, seen in peeks.items()}, ranks)
    reading = options.reading(world, ranks)
    sources = tuple(
        Source(
            rank=rank,
            path=path,
            size=path.stat().st_size,
            read=partial(read, path, reading, None if alone else rank),
        )
        for rank, path in sorted(ranks.items())
    )
    return Found(sources=sources, world_size=world)


def _told(path: Path, seen: "Peek") -> int | None:
    return seen.rank if seen.rank is not None else rank_from_name(path.name)


@dataclass(frozen=True, slots=True)
class Peek:
    """What the beginning of a file tells without reading on."""

    is_trace: bool
    rank: int | None = None
    world_size: int | None = None


def peek(path: Path) -> Peek:
    """Look at the beginning: whether it is a trace, and of which rank if it says so there.

    Little of it if that will do: of thousands of ranks every beginning is read.

    A file that is no JSON is one if its name has a rank: reading it says what is wrong.
    """
    status = path.stat()
    return _peek(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 14)
def _peek(path: Path, _size: int, _changed_ns: int) -> Peek:
    head = _first_block(path, _HEAD)
    if len(head) == _HEAD and b'"traceEvents"' not in head:
        head = _first_block(path, None)
    if head.lstrip(_BEFORE_JSON)[:1] not in (b"{", b"["):
        return Peek(is_trace=rank_from_name(path.name) is not None)
    at = head.find(b'"traceEvents"')
    is_trace = at >= 0 or head.lstrip()[:1] == b"[" or b'"schemaVersion"' in head
    info = _info(head[: max(at, 0)])
    return Peek(
        is_trace, *(info[key] if _is_count(info.get(key)) else None for key in _RANK_KEYS)
    )


def _first_block(path: Path, size: int | None) -> bytes:
    """The beginning of the text; nothing where there is none."""
    try:
        return next(blocks(path, size), b"")
    except (CutShortError, TraceFileError):
        return b""


_RANK_KEYS = ("rank", "world_size")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _info(head: bytes) -> dict[str, Any]:
    """The `distributedInfo` in the text before the events, if it is whole."""
    found = re.search(rb'"distributedInfo"\s*:\s*(?=\{)', head)
    try:
        text = head[found.end() :].decode(errors="replace") if found else "{}"
        return dict(json.JSONDecoder().raw_decode(text)[0])
    except (ValueError, RecursionError):
        return {}


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
    events = Events(columns=columns, details=scanned.details, texts=scanned.texts, lane=lane)
    return events, lanes, (base, clock), notes


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
