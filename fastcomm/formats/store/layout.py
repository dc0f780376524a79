"""Define the files, columns, small tables and manifest of a store.

Every command opens a store like the traces that it was written from.

Their codes are numbers. A file has the names that its numbers stand for, which must be those
of this fastcomm.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args

import numpy as np
import pyarrow as pa

from fastcomm.errors import TraceFileError
from fastcomm.formats.stream import CutShortError, document
from fastcomm.idle.causes import CAUSES
from fastcomm.idle.intervals import idle_times
from fastcomm.trace import schema
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import SkippedRank
from fastcomm.trace.schema import ARGS, KINDS
from fastcomm.trace.trace import IdleTimes, Trace

LAYOUT = 2  # of the manifest and of the files of ranks; no other layout is read
MANIFEST = "fastcomm.json"
TABLES = ("ranks", "groups", "iterations")  # of the whole run, each a Parquet file
ABOUT = b"fastcomm"  # key of the JSON metadata in the file of a rank
ROW_GROUP = 1 << 18  # rows
COMPRESSION = "zstd"
LEVEL = 3  # of zstd: level 1 is not faster, and its files are larger
_MEASURED = ("kernel", "memcpy", "memset", "host_work", "host_comm")  # metrics need only these
# Sections in the order of the file, and the kinds of event in each. Communication is in the
# first, whatever its kind.
SECTIONS = {
    "device": _MEASURED,
    "marks": ("annotation", "runtime"),  # iterations are found by these
    "rest": tuple(kind for kind in KINDS if kind not in (*_MEASURED, "annotation", "runtime")),
}
_TEXT = pa.dictionary(pa.int32(), pa.string())
# The columns of a rank's file. For queries, texts replace the numbers of `trace.schema`, lanes
# are joined, and no name is a reserved word of SQL.
COLUMNS = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),  # the same in all rows
        pa.field("event", pa.int32(), nullable=False),  # index among all events, by start
        pa.field("start", pa.int64(), nullable=False),  # ns, on the rank's own clock
        pa.field("stop", pa.int64(), nullable=False),  # ns
        pa.field("kind", _TEXT, nullable=False),  # of KINDS
        pa.field("name", _TEXT, nullable=False),
        pa.field("lane", pa.int32(), nullable=False),  # a host thread or a stream, from 0
        pa.field("process", _TEXT, nullable=False),  # host process, or device number
        pa.field("thread", _TEXT, nullable=False),  # host thread, or stream number
        pa.field("device", pa.int32()),  # local device; null on the host
        pa.field("is_device", pa.bool_(), nullable=False),
        pa.field("correlation", pa.int64()),  # joins a launch and its device work
        pa.field("text_offset", pa.int64()),  # byte offset of the event in its source
        pa.field("op", _TEXT),  # of OPS; from here on null for events that do not communicate
        pa.field("stream", pa.int64()),
        pa.field("group_id", pa.int32()),  # index among the rank's groups
        pa.field("seq", pa.int64()),  # number of the collective in its group
        pa.field("call_id", pa.int64()),  # equal on its members
        pa.field("tag", _TEXT),  # of TAGS
        pa.field("tag_source", _TEXT),  # of TAG_SOURCES
        pa.field("msg_bytes", pa.int64()),
        pa.field("payload_bytes", pa.int64()),
        pa.field("bus_bytes", pa.int64()),
        pa.field("root", pa.int32()),  # from here on: global ranks
        pa.field("sends_to", pa.list_(pa.int32())),
        pa.field("receives_from", pa.list_(pa.int32())),
        pa.field("peer", pa.int32()),  # of events that are one message
        pa.field("sends", pa.bool_()),  # whether it sends that message
        pa.field("sent_bytes", pa.list_(pa.int64())),  # to each rank of its group
        pa.field("received_bytes", pa.list_(pa.int64())),
    ]
)
# Columns with another name than in `trace.schema`.
EVENT_NAMES = {"offset": "text_offset"}
COMM_NAMES = {"group": "group_id"}
# Numbers that grow from row to row; other columns repeat values and become dictionaries.
GROWING = (
    *("event", "start", "stop", "correlation", "text_offset", "seq"),
    *("position", "external_id", "sequence", "record_function", "wait_correlation"),
)
# Columns that metrics read and that zstd hardly compresses: Snappy decompresses them in almost
# no time, while zstd would double the time of reading them.
QUICK = (
    *("kind", "lane", "op", "stream", "group_id", "seq", "call_id"),
    *("tag", "tag_source", "msg_bytes", "payload_bytes", "bus_bytes"),
    *("root", "sends_to", "receives_from", "peer", "sends", "sent_bytes", "received_bytes"),
)
# Columns that queries filter by.
FILTER_COLUMNS = ("rank", "start", "stop", "kind", "is_device", "op", "tag")
FILE_NAME = re.compile(r"rank-[0-9]{5,}\.parquet")
T = TypeVar("T")
_PLAIN = (bool, int, float, str, type(None))
REMEDY = "remove the store and ingest the traces again"
_TABLES = {"lanes": schema.LANES, "groups": schema.GROUPS, "iterations": schema.ITERATIONS}
_NAMES = {"tag": TAGS, "tag_source": schema.TAG_SOURCES, "cause": CAUSES}


def file_name(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank-{rank:05d}.parquet"


def table_name(name: str) -> str:
    """Return the name of the file of a table of the whole run."""
    return f"{name}.parquet"


def stored_columns(args: pa.Schema) -> pa.Schema:
    """Return the schema of a rank's file: `COLUMNS`, and the `ARGS` that its events have.

    `args` is the schema of the trace's arguments.
    """
    return pa.schema([*COLUMNS, *(field for field in ARGS if field.name in args.names)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What identifies the contents of a source: equal fingerprints mean an unchanged file."""

    size: int  # bytes
    mtime_ns: int
    sha256: str  # of the first and the last 64 KiB


def check_layout(layout: Any, path: Path) -> None:
    """Raise TraceFileError unless a file, of path `path`, has the layout of this fastcomm."""
    if type(layout) is not int or layout != LAYOUT:
        raise TraceFileError(
            f"{path}: a store of layout {str(layout)[:40]}, this fastcomm reads "
            f"layout {LAYOUT}; {REMEDY}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockNote:
    """How far the clock of a rank is ahead of the reference clock, and the evidence."""

    offset_ns: int
    spread_ns: int  # scatter of the evidence
    matches: int  # collectives in which both ranks took part
    reference: int  # the rank with the reference clock
    applies: bool  # whether the offset is far above its spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The entry of one rank in the manifest."""

    rank: int
    file: str
    events: int
    start: int | None  # ns on its own clock, of the first event
    stop: int | None  # ns, of the last event to end
    size: int  # bytes of the file
    format: str
    clock: str | None
    found_by: str  # the rule that found the iterations
    iterations: int
    communication: int  # number of communication events
    without_bytes: int  # communication events of unknown size
    untagged: int  # communication events of unknown parallelism
    warnings: tuple[str, ...]
    missing_data: tuple[str, ...]  # keys of `trace.MISSING_DATA`
    source: str  # the path that it was read from
    fingerprint: Fingerprint
    footer: str  # SHA-256 of the footer of the file
    clock_note: ClockNote | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """A table of the whole run, as it was written."""

    name: str  # one of TABLES
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnstoredRank:
    """A rank that could not be stored."""

    rank: int | None  # None: unknown
    source: str
    error: str

    def skipped(self) -> SkippedRank:
        """Return this as a skipped rank of a run."""
        return SkippedRank(rank=self.rank, path=self.source, error=self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a store's manifest."""

    version: str  # of the fastcomm that wrote it
    complete: bool  # False while the store is being written
    world_size: int | None = None
    link_bandwidth: float | None = None  # bytes per second, if a configuration states it
    warnings: tuple[str, ...] = ()
    expected: tuple[int, ...] = ()  # ranks of the run
    ranks: tuple[Entry, ...] = ()
    failed: tuple[UnstoredRank, ...] = ()
    reading: Mapping[str, Any] | None = None  # options, as `rules.as_json` writes them
    tables: tuple[TableFile, ...] = ()
    writer: str | None = None  # random name of the ingest that is writing the store


def to_json(manifest: Manifest) -> str:
    """Return the text of the manifest's file."""
    return json.dumps({"layout": LAYOUT, **asdict(manifest)}, indent=1, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a store; TraceFileError if it is damaged, or of another layout."""
    path = folder / MANIFEST
    try:
        plain = json.loads(document(path), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError, CutShortError) as error:
        raise TraceFileError(f"{path}: damaged, not JSON ({error}); {REMEDY}") from error
    if not isinstance(plain, dict):
        raise TraceFileError(f"{path}: damaged, not a JSON object; {REMEDY}")
    check_layout(plain.pop("layout", None), path)
    try:
        return _manifest(plain)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceFileError(f"{path}: damaged ({error!r}); {REMEDY}") from error


def _finite(text: str) -> float:
    """Return a number in JSON; ValueError for NaN and infinity."""
    if not isfinite(number := float(text)):
        raise ValueError(f"found {text}, expected a finite number")
    return number


def _manifest(plain: dict[str, Any]) -> Manifest:
    """Return the manifest of a parsed document; raise TypeError or ValueError if invalid."""
    manifest = Manifest(**plain)
    _check_types(manifest)
    return replace(
        manifest,
        warnings=tuple(map(str, manifest.warnings)),
        expected=tuple(map(int, manifest.expected)),
        ranks=tuple(map(_entry, plain["ranks"])),
        failed=tuple(_check_types(UnstoredRank(**row)) for row in plain["failed"]),
        tables=tuple(map(_table, plain["tables"])),
    )


def _check_types(instance: T) -> T:
    """Return an instance; TypeError if the type of a field's value is wrong."""
    for field in fields(cast("Any", instance)):
        value = getattr(instance, field.name)
        union = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        types = list(union) if all(type_ in _PLAIN for type_ in union) else []
        types += [int] if float in types else []
        is_long = type(value) is int and abs(value) >= 1 << 63
        if types and (type(value) not in types or is_long):
            raise TypeError(f"{field.name} is {str(value)[:40]!r}")
    return instance


def _table(plain: dict[str, Any]) -> TableFile:
    """Return an entry of a table's file; raise ValueError if the name is not a table's."""
    table = _check_types(TableFile(**plain))
    # The name is from a file, and must not lead out of the store.
    if table.name not in TABLES:
        raise ValueError(f"table {table.name[:40]!r}")
    return table


def _entry(plain: dict[str, Any]) -> Entry:
    """Return the entry of a rank; raise ValueError if its file has another name."""
    note = plain["clock_note"]
    entry = Entry(
        **{
            **plain,
            "warnings": tuple(map(str, plain["warnings"])),
            "missing_data": tuple(map(str, plain["missing_data"])),
            "fingerprint": _check_types(Fingerprint(**plain["fingerprint"])),
            "clock_note": None if note is None else _check_types(ClockNote(**note)),
        }
    )
    _check_types(entry)
    # The name is from a file, and must not lead out of the store.
    if type(entry.rank) is not int or entry.file != file_name(entry.rank):
        raise ValueError(f"rank {entry.rank!r} in file {entry.file!r}")
    return entry


def of_trace(trace: Trace) -> dict[str, Any]:
    """Return the small tables of a trace and its idle time on each clock, as plain objects."""
    on_device = trace.device_iterations
    return {
        "names": _NAMES,
        **{name: getattr(trace, name).to_pydict() for name in _TABLES},
        "device_steps": None if on_device is None else on_device.to_pydict(),
        "device_notes": trace.device_notes,
        "idle": {
            clock: {"ns": times.ns.tolist(), "evidence": times.evidence.to_pydict()}
            for clock, table in _windows(trace)
            if (times := idle_times(trace, table)) is not None
        },
    }


def _windows(trace: Trace) -> Iterator[tuple[str, pa.Table]]:
    """Yield each clock by which a trace has iterations, and these."""
    yield "host", trace.iterations
    if trace.device_iterations is not None:
        yield "device", trace.device_iterations


def check_names(metadata: Mapping[str, Any], path: Path) -> None:
    """Raise TraceFileError if numbers of a file stand for other names than here."""
    if {name: tuple(texts) for name, texts in metadata["names"].items()} != _NAMES:
        raise TraceFileError(
            f"{path}: stored by a fastcomm with other parallelisms or causes of idle time; "
            f"{REMEDY}"
        )


def tables(metadata: Mapping[str, Any], *, with_lanes: bool) -> dict[str, pa.Table]:
    """Return the small tables of a file, by name.

    Raises errors of Python and Arrow for damaged tables.
    """
    return {
        name: pa.table(metadata[name], table_schema)
        for name, table_schema in _TABLES.items()
        if name != "lanes" or with_lanes
    }


def idle(trace: Trace, metadata: Mapping[str, Any]) -> dict[str, IdleTimes]:
    """Return the stored idle times of a trace by clock.

    Raises ValueError or IndexError if times do not fit the iterations.
    """
    stored = metadata["idle"]
    return {
        clock: _idle_times(stored[clock], len(table))
        for clock, table in _windows(trace)
        if clock in stored
    }


def _idle_times(stored: Mapping[str, Any], steps: int) -> IdleTimes:
    ns = np.array(stored["ns"], np.int64).reshape(-1, len(CAUSES))
    evidence = pa.table(stored["evidence"], schema.IDLE_EVIDENCE)
    has_null = any(column.null_count for column in evidence.columns)
    if len(ns) != steps or (ns < 0).any() or has_null:
        raise ValueError(f"idle times of {len(ns)} steps, of {steps}")
    for name, count in (("step", steps), ("cause", len(CAUSES))):
        places = evidence[name].to_numpy()
        if len(places) and not 0 <= places.min() <= places.max() < count:
            raise IndexError(f"{name} of idle time outside 0 to {count}")
    return IdleTimes(ns=ns, evidence=evidence)
