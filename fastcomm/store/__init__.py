"""A run as a store, a directory of Parquet that every command opens: its files and manifest."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args

import pyarrow as pa

from fastcomm.errors import TraceFileError
from fastcomm.readers.kineto.stream import CutShortError, document
from fastcomm.trace.run import SkippedRank
from fastcomm.trace.schema import ARGS, KINDS

# A reader knows its own numbers and those below.
LAYOUT = 1  # of a rank's file
MANIFEST_LAYOUT = 2  # of the manifest: 2 adds hashes of footers and tables
MANIFEST = "fastcomm.json"
TABLES = ("ranks", "groups", "iterations")  # of the whole run, each a Parquet file
ABOUT = b"fastcomm"  # the key of what a rank's file says of itself, as JSON

ROW_GROUP = 1 << 18  # rows
COMPRESSION = "zstd"
LEVEL = 3  # of zstd: level 1 is no faster, and its files are larger

# Sections in the order of the file, and the kinds of event in each. Communication is in the
# first, whatever its kind.
SECTIONS = {
    "device": ("kernel", "memcpy", "memset"),  # what metrics ask for
    "marks": ("annotation", "runtime"),  # what iterations are found by
    "rest": tuple(
        kind
        for kind in KINDS
        if kind not in ("kernel", "memcpy", "memset", "annotation", "runtime")
    ),
}

_WORDS = pa.dictionary(pa.int32(), pa.string())

# The columns of a rank's file. Words stand for the numbers of `trace.schema`, and lanes are
# joined, so that a query needs neither; no name is a reserved word of SQL.
COLUMNS = pa.schema(
    [
        pa.field("rank", pa.int32(), nullable=False),  # the same in all rows
        pa.field("event", pa.int32(), nullable=False),  # place among all events, by start
        pa.field("start", pa.int64(), nullable=False),  # ns, on the rank's own clock
        pa.field("stop", pa.int64(), nullable=False),  # ns
        pa.field("kind", _WORDS, nullable=False),  # of KINDS
        pa.field("name", _WORDS, nullable=False),
        pa.field("lane", pa.int32(), nullable=False),  # a host thread or a stream, from 0
        pa.field("process", _WORDS, nullable=False),  # host process, or device number
        pa.field("thread", _WORDS, nullable=False),  # host thread, or stream number
        pa.field("device", pa.int32()),  # local device; null on the host
        pa.field("is_device", pa.bool_(), nullable=False),
        pa.field("correlation", pa.int64()),  # joins a launch and its device work
        pa.field("text_offset", pa.int64()),  # of the event in its source, in bytes
        pa.field("op", _WORDS),  # of OPS; from here on null where there is no communication
        pa.field("stream", pa.int64()),
        pa.field("group_id", pa.int32()),  # place among the rank's groups, from 0
        pa.field("seq", pa.int64()),  # number of the collective in its group
        pa.field("tag", _WORDS),  # of TAGS
        pa.field("tag_source", _WORDS),  # of TAG_SOURCES
        pa.field("msg_bytes", pa.int64()),
        pa.field("payload_bytes", pa.int64()),
        pa.field("bus_bytes", pa.int64()),
        pa.field("root", pa.int32()),  # from here on global ranks
        pa.field("sends_to", pa.list_(pa.int32())),
        pa.field("receives_from", pa.list_(pa.int32())),
        pa.field("peer", pa.int32()),  # of an event that is one message
        pa.field("sends", pa.bool_()),  # whether it sends that message
    ]
)

# Where a column of the file has another name than in `trace.schema`.
EVENT_NAMES = {"offset": "text_offset"}
COMM_NAMES = {"group": "group_id"}

# Numbers that grow from row to row; the others repeat, and are written as a dictionary.
GROWING = (
    *("event", "start", "stop", "correlation", "text_offset", "seq"),
    *("position", "external_id", "sequence", "record_function", "wait_correlation"),
)
# Columns that metrics read and that zstd hardly makes smaller: to unpack a page takes zstd as
# long as all else that is done for it, Snappy next to nothing.
QUICK = (
    *("kind", "lane", "op", "stream", "group_id", "seq"),
    *("tag", "tag_source", "msg_bytes", "payload_bytes", "bus_bytes"),
    *("root", "sends_to", "receives_from", "peer", "sends"),
)
# What queries choose rows by.
CHOSEN_BY = ("rank", "start", "stop", "kind", "is_device", "op", "tag")


FILE_NAME = re.compile(r"rank-[0-9]{5,}\.parquet")


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.parquet"


def table_name(name: str) -> str:
    """Return the file of a table of the whole run."""
    return f"{name}.parquet"


def stored_columns(args: pa.Schema | None) -> pa.Schema:
    """The columns of a file whose events have these columns of `ARGS`."""
    names = () if args is None else args.names
    return pa.schema([*COLUMNS, *(field for field in ARGS if field.name in names)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """By what a source is known again: a file whose three are the same has not changed."""

    size: int  # bytes
    mtime_ns: int
    sha256: str  # of the first and the last 64 KiB


def checked_layout(found: Any, where: str, known: int = LAYOUT) -> None:
    """TraceFileError where something was written in a layout that is not known here."""
    if not isinstance(found, int) or found < 1:
        raise TraceFileError(f"{where}: layout {found!r}, wanted a number from 1 to {known}")
    if found > known:
        raise TraceFileError(
            f"{where}: written in layout {found} by a newer fastcomm; this one reads layouts "
            f"up to {known}: update fastcomm, or ingest the traces again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockNote:
    """How far a rank's clock is ahead of another's, and what says so."""

    offset_ns: int
    spread_ns: int  # by so much the evidence scatters
    matches: int  # collectives that both took part in
    reference: int  # the rank whose clock counts
    applies: bool  # the offset is far above its spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One rank of a store."""

    rank: int
    file: str
    events: int
    start: int | None  # ns on its own clock, of the first event
    stop: int | None  # of the last to end
    size: int  # bytes of the file
    format: str
    clock: str | None
    found_by: str  # the rule that found the iterations
    iterations: int
    communication: int  # events
    without_bytes: int  # of the communication
    untagged: int  # of the communication: no parallelism is known
    warnings: tuple[str, ...]
    lacks: tuple[str, ...]  # of `trace.LACKS`
    source: str  # the path that it was read from
    fingerprint: Fingerprint
    clock_note: ClockNote | None = None
    footer: str | None = None  # SHA-256 of the footer of the file; None before layout 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """A table of the whole run, as it was written."""

    name: str  # of `TABLES`
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A rank that could not be stored; `rank` is None where nothing tells it."""

    rank: int | None
    source: str
    error: str

    def skipped(self) -> SkippedRank:
        """Return the same as a skipped rank of a run."""
        return SkippedRank(rank=self.rank, path=self.source, error=self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a store says of itself; `complete` is False while it is being made."""

    version: str  # of the fastcomm that wrote it
    complete: bool
    world_size: int | None = None
    link_bandwidth: float | None = None  # bytes per second, where a configuration said it
    warnings: tuple[str, ...] = ()
    expected: tuple[int, ...] = ()  # ranks of the run
    ranks: tuple[Entry, ...] = ()
    failed: tuple[Left, ...] = ()
    reading: Mapping[str, Any] | None = None  # what was said, as `store_said` writes it
    tables: tuple[TableFile, ...] | None = None  # None where an older fastcomm wrote it
    writer: str | None = None  # a random name of the ingest, while it is being made


def to_json(manifest: Manifest) -> str:
    """The text of the file."""
    return (
        json.dumps({"layout": MANIFEST_LAYOUT, **asdict(manifest)}, indent=1, allow_nan=False)
        + "\n"
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store; TraceFileError where it is none, or of a newer layout."""
    path = folder / MANIFEST
    try:
        plain = json.loads(document(path), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError, CutShortError) as error:
        raise TraceFileError(f"{path}: damaged, no JSON ({error}); {_REMEDY}") from error
    if not isinstance(plain, dict):
        raise TraceFileError(f"{path}: damaged, no object; {_REMEDY}")
    checked_layout(plain.pop("layout", None), str(path), MANIFEST_LAYOUT)
    try:
        return _manifest(plain)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TraceFileError(f"{path}: damaged ({error!r}); {_REMEDY}") from error


def _finite(text: str) -> float:
    """The number that a text spells; ValueError for NaN and what is infinite."""
    if not isfinite(number := float(text)):
        raise ValueError(f"found {text}, wanted a finite number")
    return number


T = TypeVar("T")
_PLAIN = (bool, int, float, str, type(None))
_REMEDY = "remove the store and ingest the traces again"


def _manifest(plain: dict[str, Any]) -> Manifest:
    manifest = Manifest(**plain)
    _check_kinds(manifest)
    return replace(
        manifest,
        warnings=tuple(map(str, manifest.warnings)),
        expected=tuple(map(int, manifest.expected)),
        ranks=tuple(map(_entry, plain["ranks"])),
        failed=tuple(_check_kinds(Left(**each)) for each in plain["failed"]),
        tables=None if manifest.tables is None else tuple(map(_table, plain["tables"])),
    )


def _check_kinds(found: T) -> T:
    """The same; TypeError where a field holds a value of another kind than it should."""
    for each in fields(cast("Any", found)):
        value = getattr(found, each.name)
        several = get_args(each.type) if isinstance(each.type, UnionType) else (each.type,)
        kinds = list(several) if all(kind in _PLAIN for kind in several) else []
        kinds += [int] if float in kinds else []
        is_long = type(value) is int and abs(value) >= 1 << 63
        if kinds and (type(value) not in kinds or is_long):
            raise TypeError(f"{each.name} is {str(value)[:40]!r}")
    return found


def _table(plain: dict[str, Any]) -> TableFile:
    table = _check_kinds(TableFile(**plain))
    # The name comes from a file: it must not lead out of the store.
    if table.name not in TABLES:
        raise ValueError(f"table {table.name[:40]!r}")
    return table


def _entry(plain: dict[str, Any]) -> Entry:
    note = plain["clock_note"]
    entry = Entry(
        **{
            **plain,
            "warnings": tuple(map(str, plain["warnings"])),
            "lacks": tuple(map(str, plain["lacks"])),
            "fingerprint": _check_kinds(Fingerprint(**plain["fingerprint"])),
            "clock_note": None if note is None else _check_kinds(ClockNote(**note)),
        }
    )
    _check_kinds(entry)
    # The name comes from a file: it must not lead out of the store.
    if type(entry.rank) is not int or entry.file != file_name(entry.rank):
        raise ValueError(f"rank {entry.rank!r} in file {entry.file!r}")
    return entry
