"""The manifest of a store: its ranks, where each comes from, and whether it is whole."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args

from fastcomm.errors import TraceFileError
from fastcomm.readers.blocks import CutShortError, document
from fastcomm.readers.store_layout import (
    MANIFEST,
    MANIFEST_LAYOUT,
    TABLES,
    Fingerprint,
    checked_layout,
    file_name,
)
from fastcomm.trace.run import SkippedRank


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

    name: str  # of `store_layout.TABLES`
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
