"""The files of a store, the lock of whoever writes them, and what is found anew in a trace.

The manifest lists the files. Warnings are stored; steps and parallelism can be found by other
rules than those that the store was written with.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pyarrow as pa

from fastcomm.errors import ConfigError, FastcommError, TraceFileError
from fastcomm.files import opened
from fastcomm.options import StepClock
from fastcomm.readers.assembly import TraceOptions, assemble
from fastcomm.readers.communication import Collectives, Partners
from fastcomm.readers.patterns import PATTERNS, PEER_COPIES, Named, Pattern, named
from fastcomm.store import Entry, Manifest, TableFile, table_name
from fastcomm.trace import schema
from fastcomm.trace.bytes import Sizes
from fastcomm.trace.columns import filled
from fastcomm.trace.events import Events
from fastcomm.trace.iterations import IterationRule
from fastcomm.trace.parallel import Grid
from fastcomm.trace.run import SkippedRank
from fastcomm.trace.tags import ProcessGroup, TagRule, TagRules
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NULL, Ints

_TAIL = 8  # bytes at the end of a Parquet file: the length of the footer, and "PAR1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The file of a rank, and what its footer has to repeat."""

    rank: int
    path: Path
    size: int  # bytes; 0 where there is no file, which reading it reports
    provenance: dict[str, Any] | None = None


def listed(folder: Path, manifest: Manifest) -> Iterator[StoredFile | SkippedRank]:
    """Yield each rank of a store: its file, or why that is not the one that was written."""
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
            provenance = _provenance(entry, manifest)
            yield StoredFile(rank=entry.rank, path=path, size=size or 0, provenance=provenance)


def size_of(path: Path) -> int | None:
    """The size of a file in bytes; None where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def footer_sha256(path: Path) -> str:
    """Hash the footer of a Parquet file, which has the place of every page; OSError."""
    with path.open("rb") as file:
        file.seek(-_TAIL, os.SEEK_END)
        tail = file.read(_TAIL)
        file.seek(-_TAIL - int.from_bytes(tail[:4], "little"), os.SEEK_END)
        return hashlib.sha256(file.read()).hexdigest()


def table_file(folder: Path, name: str) -> TableFile:
    """Return size and hash of a table of the whole run; OSError."""
    with opened(folder / table_name(name)) as file:
        content = file.read()
    return TableFile(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


def _inside(folder: Path, name: str) -> Path:
    """A file of the store; TraceFileError where it is a link that leads out of it."""
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise TraceFileError(
            f"{path}: a link out of the store; wanted the file itself, or a link to the store"
        )
    return path


def _provenance(entry: Entry, manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = {"fingerprint": asdict(entry.fingerprint)}
    if manifest.reading is not None:
        found["reading"] = manifest.reading
    return found


def check_provenance(about: dict[str, Any], wanted: dict[str, Any] | None, path: Path) -> None:
    """TraceFileError where a file says that it is of another source than the manifest says."""
    if wanted and any(about.get(name) != value for name, value in wanted.items()):
        raise TraceFileError(
            f"{path}: of another source, or read with other options, than the manifest says: "
            "written by another ingest; ingest its trace again"
        )


LOCK = ".ingest.lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
_LOG = logging.getLogger("fastcomm")


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a store; False, with a warning, where the file system has no locks.

    The system releases the lock when the process ends, however it ends: the file may stay, and
    is no lock by itself. FastcommError where another process holds it.
    """
    path = folder / LOCK
    try:
        descriptor = _acquired(path)
    except OSError as error:
        raise FastcommError(f"{path}: {error.strerror or error}") from error
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _acquired(path: Path) -> int | None:
    """The open file with the lock; None where there are no locks."""
    while True:
        descriptor = os.open(path, _LOCK_FLAGS, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FastcommError(f"{path}: no regular file, and no lock; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(descriptor, path):
                _sign(descriptor)
                return descriptor
        except BlockingIOError as error:
            raise _held(descriptor, path) from error
        except OSError as error:
            _LOG.warning(
                "warning: %s: this file system has no locks (%s); let no other ingest write "
                "there at the same time",
                path.parent,
                error.strerror,
            )
            if not os.fstat(descriptor).st_size:  # nobody else's
                path.unlink(missing_ok=True)
            os.close(descriptor)
            return None
        os.close(descriptor)  # its holder has just removed it


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    with suppress(OSError):  # a full disk: nobody can read who holds the lock
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _held(descriptor: int, path: Path) -> FastcommError:
    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "a process"
    os.close(descriptor)
    return FastcommError(
        f"{path.parent}: another ingest ({holder}) writes this store; wait until it has ended, "
        "or choose another --output"
    )


def as_json(options: TraceOptions) -> dict[str, Any]:
    """The options as plain objects; equal options give equal ones."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    # Who said it, and how, changes nothing.
    del plain["tags"]["grid_words"], plain["tags"]["order_words"]
    for rule in plain["tags"]["explicit"]:
        del rule["is_given"]
    return plain


def restored(plain: Mapping[str, Any]) -> TraceOptions:
    """The options of `as_json`; KeyError, TypeError or ValueError where it is none."""
    tags, marks = plain["tags"], plain["iterations"]
    return TraceOptions(
        allow_truncated=bool(plain["allow_truncated"]),
        iterations=IterationRule(
            regex=marks["regex"],
            ranges=tuple((int(a), int(b), int(c)) for a, b, c in marks["ranges"]),
            clock=_clock(marks["clock"]),
        ),
        tags=TagRules(
            explicit=tuple(_rule(rule) for rule in tags["explicit"]),
            grid=None if tags["grid"] is None else Grid(**tags["grid"]),
            guess=bool(tags["guess"]),
        ),
        patterns=tuple(Pattern(**pattern) for pattern in plain["patterns"]),
        whole=bool(plain["whole"]),
    )


def _clock(word: str) -> StepClock:
    for clock in get_args(StepClock):
        if clock == word:
            return cast("StepClock", clock)
    raise ValueError(f"clock {word!r}")


def _rule(plain: Mapping[str, Any]) -> TagRule:
    value = plain["value"]
    value = tuple(value) if isinstance(value, list) else value
    return TagRule(field=plain["field"], value=value, tag=plain["tag"])


def over(said: TraceOptions, stored: TraceOptions) -> TraceOptions:
    """What holds when a store is opened with `said`; equal to `stored` where that adds nothing.

    The clock of iterations is left as it is stored: `store.reader.read` chooses it.

    ConfigError for patterns of kernels, which only the first reading can apply.
    """
    if strange := [each.regex for each in said.patterns if each not in stored.patterns]:
        raise ConfigError(
            f"[[kernels]]: {', '.join(strange)}: what is communication is decided when a run "
            "is stored; ingest the traces again with this configuration"
        )
    return replace(
        stored,
        iterations=_marks(said.iterations, stored.iterations),
        tags=_tags(said.tags, stored.tags),
    )


def _marks(said: IterationRule, stored: IterationRule) -> IterationRule:
    named = said if said.regex is not None or said.ranges else stored
    return replace(named, clock=stored.clock)


def _tags(said: TagRules, stored: TagRules) -> TagRules:
    """The rules of both, those said later first."""
    older = tuple(rule for rule in stored.explicit if rule not in said.explicit)
    return TagRules(
        explicit=(*said.explicit, *older),
        grid=said.grid or stored.grid,
        guess=said.guess or stored.guess,
        grid_words=said.grid_words,
        order_words=said.order_words,
    )


_SILENT = Named(library="", op="OTHER", tag=None, fused=False)


def reapplied(trace: Trace, wanted: TraceOptions, stored: TraceOptions) -> Trace:
    """The trace as the first reading would have made it of `wanted` instead of `stored`."""
    events = _events(trace)
    found = _collectives(trace, events, wanted.patterns)
    bare = replace(trace.meta, warnings=())
    whole = trace.args is not None
    # What the first reading warned of by its rules is no longer so.
    before = assemble(events, trace.lanes, found, replace(stored, whole=whole), bare)
    kept = tuple(note for note in trace.meta.warnings if note not in before.meta.warnings)
    meta = replace(trace.meta, warnings=kept)
    return assemble(events, trace.lanes, found, replace(wanted, whole=whole), meta)


def _events(trace: Trace) -> Events:
    name = trace.events["name"].combine_chunks()
    args = trace.args
    more = {} if args is None else {each: filled(args[each]) for each in args.column_names}
    stream = np.full(trace.events.num_rows, NULL, np.int64)
    stream[trace.comm["event"].to_numpy()] = filled(trace.comm["stream"])
    start, stop, correlation, offset = (
        filled(trace.events[each]) for each in ("start", "stop", "correlation", "offset")
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
    comm = trace.comm
    row = comm["event"].to_numpy().astype(np.int64)
    group = filled(comm["group"])
    names, name = _named(events, row, patterns)
    return Collectives(
        row=row,
        op=comm["op"].to_numpy(),
        seq=filled(comm["seq"]),
        group=np.where(group == NULL, -1, group).astype(np.int32),
        groups=_groups(trace),
        sizes=Sizes(*(filled(comm[f"{kind}_bytes"]) for kind in ("msg", "payload", "bus"))),
        named=names,
        name=name,
        partners=_partners(comm),
        unsized=None,
    )


def _partners(comm: pa.Table) -> Partners:
    return Partners(
        root=filled(comm["root"]),
        sends_to=comm["sends_to"].to_pylist(),
        receives_from=comm["receives_from"].to_pylist(),
    )


def _named(
    events: Events, row: Ints, patterns: Sequence[Pattern]
) -> tuple[tuple[Named, ...], Ints]:
    """What the names of the communication say, each once, and which is each event's."""
    names: list[Named] = []
    place: dict[tuple[int, bool], int] = {}
    copies = events.kind[row] == schema.KIND["memcpy"]
    answers = np.empty(len(row), np.int64)
    codes = events.name[row].tolist()
    for at, key in enumerate(zip(codes, copies.tolist(), strict=True)):
        if key not in place:
            table = PEER_COPIES if key[1] else (*patterns, *PATTERNS)
            place[key] = len(names)
            names.append(named(events.texts[key[0]], table) or _SILENT)
        answers[at] = place[key]
    return tuple(names), answers


def _groups(trace: Trace) -> tuple[ProcessGroup, ...]:
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
    """The number of a communicator, which is the name of its group where nothing else is."""
    return int(name, 16) if re.fullmatch("0x[0-9a-f]{16}", name) else None
