"""Check the files of a store against its manifest, lock it, and apply other rules to traces.

Warnings are stored. Steps and parallelism can be found by other rules than those of the store.
"""

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from fastcomm import regexes
from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.files import opened
from fastcomm.formats.assembly import TraceOptions, assemble
from fastcomm.formats.communication import (
    PATTERNS,
    PEER_COPIES,
    Collectives,
    Partners,
    Pattern,
    Rule,
    match_name,
)
from fastcomm.formats.config import kernel_pattern, tag_rule
from fastcomm.formats.kernel_names import Named
from fastcomm.formats.store.layout import Manifest, TableFile, table_name
from fastcomm.options import StepBoundary
from fastcomm.trace import schema
from fastcomm.trace.bytes import Sizes
from fastcomm.trace.columns import filled
from fastcomm.trace.events import Events
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.rank_grid import Grid
from fastcomm.trace.run_traces import MOST_RANKS, SkippedRank
from fastcomm.trace.tags import ProcessGroup, TagRule, TagRules
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NULL, Ints

_LATEST = 1 << 62  # ns
_TAIL = 8  # bytes at the end of a Parquet file: the length of the footer, and "PAR1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The file of a rank, as the manifest lists it."""

    rank: int
    path: Path
    size: int  # bytes; 0 if the file is missing, which reading it reports
    provenance: dict[str, Any] | None = None  # entries that its footer must have


def listed(folder: Path, manifest: Manifest) -> Iterator[StoredFile | SkippedRank]:
    """Yield the file of each rank of a store, or why it is not the file that was written.

    Raises `TraceFileError` if a file is a link that leads out of the store.
    """
    for entry in manifest.ranks:
        path = _inside(folder, entry.file)
        size = size_of(path)
        if size is not None and size != entry.size:
            error = (
                f"{path}: {size} bytes, {entry.size} in the manifest: damaged, or written by "
                "another ingest; ingest its trace again"
            )
            yield SkippedRank(rank=entry.rank, path=str(path), error=error)
        else:
            provenance: dict[str, Any] = {"fingerprint": asdict(entry.fingerprint)}
            if manifest.reading is not None:
                provenance["reading"] = manifest.reading
            yield StoredFile(rank=entry.rank, path=path, size=size or 0, provenance=provenance)


def size_of(path: Path) -> int | None:
    """Return the bytes of a file; None if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def footer_sha256(path: Path) -> str:
    """Return the SHA-256 of a Parquet file's footer; OSError if it cannot be read."""
    # The footer locates every page.
    with path.open("rb") as file:
        file.seek(-_TAIL, os.SEEK_END)
        tail = file.read(_TAIL)
        file.seek(-_TAIL - int.from_bytes(tail[:4], "little"), os.SEEK_END)
        return hashlib.sha256(file.read()).hexdigest()


def table_file(folder: Path, name: str) -> TableFile:
    """Return size and hash of a table of the whole run; OSError if it cannot be read."""
    with opened(folder / table_name(name)) as file:
        content = file.read()
    return TableFile(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file; TraceFileError if it is a link out of the store."""
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise TraceFileError(
            f"{path}: a link out of the store. Copy the file into the store, or link the whole "
            "store"
        )
    return path


def check_provenance(
    about: dict[str, Any], expected: dict[str, Any] | None, path: Path
) -> None:
    """Raise TraceFileError if the metadata `about` differs from the manifest's, `expected`."""
    if expected and any(about.get(name) != value for name, value in expected.items()):
        raise TraceFileError(
            f"{path}: has another source or other options than the manifest states: "
            "written by another ingest; ingest its trace again"
        )


LOCK = ".ingest.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
_LOG = logging.getLogger("fastcomm")


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a store; yield False, after a warning, on file systems without locks.

    The system releases the lock when the process ends: the file alone is not a lock. Raises
    `FastcommError` if another process holds the lock, or it cannot be opened.
    """
    from filelock import FileLock, Timeout  # slow import, and only `ingest` locks

    path = folder / LOCK
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise FastcommError(
            f"{folder}: another ingest writes this store; wait until it ends, or choose "
            "another --output"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise FastcommError(f"{path}: {error.strerror or error}") from error
        _LOG.warning(
            "warning: %s: this file system has no locks (%s); let no other ingest write there "
            "at the same time",
            folder,
            error.strerror,
        )
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def as_json(options: TraceOptions) -> dict[str, Any]:
    """Return the options as plain JSON objects; equal options give equal ones.

    Raises `ConfigError` for a regular expression that no file may have.
    """
    if options.iterations.regex is not None:
        regexes.check_of_file("iterations", options.iterations.regex)
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    # The origin of sizes and rules does not change the result of reading.
    del plain["tags"]["grid_words"], plain["tags"]["order_words"]
    for rule in plain["tags"]["explicit"]:
        del rule["is_given"]
    return plain


def restored(plain: Mapping[str, Any]) -> TraceOptions:
    """Return the options from `as_json`.

    A file states them, so that they are checked like those of a user. Raises KeyError,
    TypeError, ValueError, AttributeError or `ConfigError` if they are invalid.
    """
    tags, marks = plain["tags"], plain["iterations"]
    if marks["regex"] is not None:
        regexes.check_of_file("iterations", _text(marks["regex"]))
    return TraceOptions(
        allow_truncated=bool(plain["allow_truncated"]),
        iterations=IterationRule(
            regex=marks["regex"],
            ranges=tuple(_range(*row) for row in marks["ranges"]),
            clock=_clock(marks["clock"]),
        ),
        tags=TagRules(
            explicit=tuple(_rule(rule) for rule in tags["explicit"]),
            grid=None if tags["grid"] is None else _grid(tags["grid"]),
            guess=bool(tags["guess"]),
        ),
        patterns=tuple(_pattern(row) for row in plain["patterns"]),
        whole=bool(plain["whole"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _range(number: Any, start: Any, stop: Any) -> tuple[int, int, int]:
    """Return the number and the times of an iteration; TypeError or ValueError if invalid."""
    row = number, start, stop
    if not all(type(value) is int and abs(value) < _LATEST for value in row) or stop < start:
        raise ValueError(f"iteration {str(row)[:80]}")
    return row


def _grid(plain: Mapping[str, Any]) -> Grid:
    """Return a grid; ValueError or `ConfigError` if it is none, or has too many ranks."""
    grid = Grid.of(**plain)
    if grid.world > MOST_RANKS:
        raise ValueError(f"a grid of {grid.world} ranks, at most {MOST_RANKS} are supported")
    return grid


def _pattern(plain: Mapping[str, Any]) -> Pattern:
    """Return the pattern of a configuration; ValueError or `ConfigError` if it is none."""
    row = {"pattern" if key == "regex" else key: value for key, value in plain.items()}
    if row.pop("fused") is not False:
        raise ValueError("a pattern that no configuration can have")
    present = {key: value for key, value in row.items() if value is not None}
    # Without an operation, the expression itself finds it.
    return replace(kernel_pattern({"op": "OTHER", **present}, "reading"), op=plain["op"])


def _clock(text: str) -> StepBoundary:
    """Return a text as the name of a clock; raise ValueError if there is none of that name."""
    if text not in get_args(StepBoundary):
        raise ValueError(f"clock {text!r}")
    return cast("StepBoundary", text)


def _rule(plain: Mapping[str, Any]) -> TagRule:
    return tag_rule({plain["field"]: plain["value"], "tag": plain["tag"]}, "reading")


def over(user: TraceOptions, stored: TraceOptions) -> TraceOptions:
    """Return the options that hold when a store is opened with `user` options.

    They equal `stored` if the user's options add nothing. The clock of iterations is the stored
    one: `store.reader.read` chooses it. Raises `ConfigError` for patterns of kernels, which
    only the first reading of traces can apply.
    """
    if new := [p.regex for p in user.patterns if p not in stored.patterns]:
        raise ConfigError(
            f"[[kernels]]: {', '.join(new)}: what is communication is decided when a run "
            "is stored; ingest the traces again with this configuration"
        )
    return replace(
        stored,
        iterations=_marks(user.iterations, stored.iterations),
        tags=_tags(user.tags, stored.tags),
    )


def _marks(user: IterationRule, stored: IterationRule) -> IterationRule:
    """Return the user's rule for iterations, if any, else the stored one."""
    chosen = user if user.regex is not None else stored
    return replace(chosen, clock=stored.clock)


def _tags(user: TagRules, stored: TagRules) -> TagRules:
    """Return the rules of both, the user's first."""
    older = tuple(rule for rule in stored.explicit if rule not in user.explicit)
    return TagRules(
        explicit=(*user.explicit, *older),
        grid=user.grid or stored.grid,
        guess=user.guess or stored.guess,
        grid_words=user.grid_words,
        order_words=user.order_words,
    )


_UNKNOWN_NAME = Named(library="", op="OTHER")


def reapplied(trace: Trace, options: TraceOptions, stored: TraceOptions) -> Trace:
    """Return a stored trace as if its source were read with `options` instead of `stored`."""
    events = _events(trace)
    collectives = _collectives(trace, events, options.patterns)
    bare = replace(trace.meta, warnings=())
    # Warnings that follow from the stored rules are dropped.
    before = assemble(
        events, trace.lanes, collectives, replace(stored, whole=trace.is_whole), bare
    )
    warnings = tuple(note for note in trace.meta.warnings if note not in before.meta.warnings)
    meta = replace(trace.meta, warnings=warnings)
    again = assemble(
        events, trace.lanes, collectives, replace(options, whole=trace.is_whole), meta
    )
    return replace(again, args=trace.args)  # with texts, which events do not have


def _events(trace: Trace) -> Events:
    """Return the stored events as a reader returns them."""
    name = trace.events["name"].combine_chunks()
    args = trace.arguments
    more = {n: filled(args[n]) for n in args.column_names if n not in schema.TEXT_ARGS}
    stream = np.full(trace.events.num_rows, NULL, np.int64)
    stream[trace.comm["event"].to_numpy()] = filled(trace.comm["stream"])
    start, stop, correlation, offset = (
        filled(trace.events[key]) for key in ("start", "stop", "correlation", "offset")
    )
    return Events(
        start=start,
        stop=stop,
        kind=trace.events["kind"].to_numpy(),
        name=name.indices.to_numpy(),
        lane=trace.events["lane"].to_numpy(),
        correlation=correlation,
        texts=name.dictionary.to_pylist(),
        more={**more, "stream": stream, "offset": offset},
    )


def _collectives(trace: Trace, events: Events, patterns: Sequence[Pattern]) -> Collectives:
    """Return the stored communication as a reader returns it."""
    comm = trace.comm
    row = comm["event"].to_numpy().astype(np.int64)
    group = filled(comm["group"])
    names, name = _named(events, row, patterns)
    return Collectives(
        row=row,
        op=comm["op"].to_numpy(),
        seq=filled(comm["seq"]),
        call_id=filled(comm["call_id"]),
        group=np.where(group == NULL, -1, group).astype(np.int32),
        groups=_groups(trace),
        sizes=Sizes(*(filled(comm[f"{kind}_bytes"]) for kind in ("msg", "payload", "bus"))),
        named=names,
        name=name,
        partners=Partners(
            root=filled(comm["root"]),
            sends_to=comm["sends_to"].to_pylist(),
            receives_from=comm["receives_from"].to_pylist(),
        ),
        splits={name: comm[name].combine_chunks() for name in schema.SPLITS},
        unsized=None,
    )


def _named(
    events: Events, row: Ints, patterns: Sequence[Pattern]
) -> tuple[tuple[Named, ...], Ints]:
    """Return the meaning of each distinct name by `patterns`, and the index of each row's."""
    names: list[Named] = []
    index_of: dict[tuple[int, bool], int] = {}
    kernels: tuple[Rule, ...] = (*patterns, *PATTERNS)
    copies = events.kind[row] == schema.KIND["memcpy"]
    index = np.empty(len(row), np.int64)
    codes = events.name[row].tolist()
    for k, key in enumerate(zip(codes, copies.tolist(), strict=True)):
        if key not in index_of:
            table = PEER_COPIES if key[1] else kernels
            index_of[key] = len(names)
            names.append(match_name(events.texts[key[0]], table) or _UNKNOWN_NAME)
        index[k] = index_of[key]
    return tuple(names), index


def _groups(trace: Trace) -> tuple[ProcessGroup, ...]:
    """Return the process groups of a trace; `ranks` is None if the members are unknown."""
    rows = trace.groups.select(["name", "description", "ranks", "size"]).to_pylist()
    return tuple(
        ProcessGroup(
            name=row["name"],
            description=row["description"],
            ranks=None if row["ranks"] is None else tuple(row["ranks"]),
            size=row["size"],
            communicator=_communicator(row["name"] or ""),
        )
        for row in rows
    )


def _communicator(name: str) -> int | None:
    """Return the id of a communicator from the name of its group, or None."""
    return int(name, 16) if re.fullmatch("0x[0-9a-f]{16}", name) else None
