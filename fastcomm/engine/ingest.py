"""A run into a store: each rank into its file, then the tables and the manifest of all.

What was begun is finished by the same call again: a rank whose source and options have not
changed since its file was written is not read again.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastcomm.aside import aside, left_behind
from fastcomm.engine.engine import Engine, Progress, Task, both
from fastcomm.engine.ingest_plan import Plan, plan, refuse_strange
from fastcomm.engine.local import engine_of
from fastcomm.errors import ClusterError, FastcommError, TraceFileError
from fastcomm.readers import store, store_said
from fastcomm.readers.assembly import ReadOptions
from fastcomm.readers.store_files import footer_sha256
from fastcomm.readers.store_layout import MANIFEST, file_name
from fastcomm.readers.store_manifest import (
    ClockNote,
    Left,
    Manifest,
    read_manifest,
    to_json,
)
from fastcomm.store import rank_file
from fastcomm.store.fingerprint import fingerprint
from fastcomm.store.lock import locked
from fastcomm.store.part import Part, write_tables
from fastcomm.trace.clocks import clock_offsets
from fastcomm.trace.run import Run, SkippedRank, Source, agreed_size
from fastcomm.trace.trace import Trace
from fastcomm.version import __version__

__all__ = ["Ingested", "Plan", "ingest", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """A store, and what was done for it."""

    folder: Path
    manifest: Manifest
    written: tuple[int, ...]  # ranks
    kept: tuple[int, ...]  # ranks that were there and have not changed


def ingest(
    planned: Plan,
    *,
    workers: int | Engine = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> Ingested:
    """Write the store.

    Raises the first rank's error, and the store stays unfinished; or, with `keep_going`, the
    manifest lists it, and it is raised only if no rank is left. FastcommError where another
    ingest writes the store; nothing of the other is removed.
    """
    run, folder = planned.run, planned.folder
    _make(folder)
    with locked(folder) as is_alone, _clean(folder, is_alone=is_alone):
        refuse_strange(run, folder)  # an ingest may have ended there since it was planned
        begun = Manifest(
            version=__version__,
            complete=False,
            world_size=run.world_size,
            expected=run.ranks,
            writer=secrets.token_hex(8),
        )
        _write_manifest(folder, begun)
        tasks = replace(run, sources=_storing(run, folder, store_said.as_json(planned.reading)))
        task = Task(measure=partial(_part, folder=folder), merge=_all, finish=both)
        engine = engine_of(workers)
        parts, left_out = engine.gather(tasks, task, keep_going=keep_going, progress=progress)
        _check_there(folder, parts)
        if not is_alone:
            _check_ours(folder, begun, parts)
        return _finished(planned, begun, sorted(parts, key=_rank_of), left_out)


def _part(trace: Trace, folder: Path) -> tuple[Part, ...]:
    return (Part.of(trace, folder),)


def _all(parts: Sequence[tuple[Part, ...]]) -> tuple[Part, ...]:
    return tuple(chain.from_iterable(parts))


def _rank_of(part: Part) -> int:
    return part.entry.rank


@contextmanager
def _clean(folder: Path, *, is_alone: bool) -> Iterator[None]:
    """Leave no half file, however the work ends, unless it may be one of another ingest."""
    try:
        yield
    finally:
        for path in left_behind(folder) if is_alone else ():
            path.unlink(missing_ok=True)


def _check_there(folder: Path, parts: Sequence[Part]) -> None:
    """Workers of other machines may write to a directory of the same name there."""
    for part in parts:
        path = folder / part.entry.file
        if not path.exists() or path.stat().st_size != part.entry.size:
            raise ClusterError(
                f"{path}: a worker wrote rank {part.entry.rank} there, and here it is not; "
                "wanted an --output in a file system that all machines share"
            )


def _check_ours(folder: Path, begun: Manifest, parts: Sequence[Part]) -> None:
    """FastcommError where another ingest has written to the store since this one began."""
    is_ours = read_manifest(folder).writer == begun.writer
    if not is_ours or any(
        footer_sha256(folder / part.entry.file) != part.entry.footer for part in parts
    ):
        raise FastcommError(
            f"{folder}: another ingest wrote to this store at the same time; the store is not "
            "whole: run one ingest alone, or choose another --output"
        )


def _storing(run: Run, folder: Path, said: dict[str, Any]) -> tuple[Source, ...]:
    """Sources that write what they read."""
    beside: dict[Path, list[int]] = {}
    for source in run.sources:
        beside.setdefault(source.path, []).append(source.rank)
    return tuple(
        replace(source, read=partial(_stored, source, folder, beside[source.path], said))
        for source in run.sources
    )


def _stored(source: Source, folder: Path, beside: list[int], said: dict[str, Any]) -> Trace:
    """The rank's trace, from its file if that is still what would be written, else into it."""
    path = folder / file_name(source.rank)
    wanted = {
        "version": __version__,
        "fingerprint": asdict(fingerprint(source.path)),
        "beside": beside,  # the ranks in one source: that of a process may be another's now
        "reading": said,
    }
    if (kept := _kept(path, wanted)) is not None:
        return kept
    trace = source.read()
    # A file that is alone may say its rank behind its events, when it is read.
    path = folder / file_name(trace.meta.rank)
    try:
        rank_file.write(trace, path, {**wanted, "source": str(source.path)})
    except OSError as error:
        raise FastcommError(f"{path}: {error.strerror or error}") from error
    return trace


def _kept(path: Path, wanted: dict[str, Any]) -> Trace | None:
    """The trace in a file that was made so of the same source; None where there is none."""
    if not path.exists():
        return None
    try:
        found = store.about(path)
        if any(found.get(key) != value for key, value in wanted.items()):
            return None
        return store.read(path, ReadOptions(whole=True))
    except TraceFileError:
        return None  # damaged: it is written again


def _left(each: SkippedRank, folder: Path) -> Left:
    if each.rank is not None:
        # What an earlier source of the rank left is not of this run.
        (folder / file_name(each.rank)).unlink(missing_ok=True)
    return Left(rank=each.rank, source=each.path, error=each.error)


def _finished(
    planned: Plan, begun: Manifest, parts: Sequence[Part], left_out: Sequence[SkippedRank]
) -> Ingested:
    """The tables, and last the manifest: a store is whole once that says so."""
    folder = planned.folder
    world = _world_size(parts)
    failed = tuple(_left(each, folder) for each in left_out)
    notes = _clock_notes(parts)
    try:
        tables = write_tables(folder, parts, notes)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    manifest = replace(
        begun,
        complete=True,
        tables=tables,
        world_size=begun.world_size or world,
        writer=None,
        expected=tuple(
            sorted(
                {part.entry.rank for part in parts}
                | {each.rank for each in failed if each.rank is not None}
            )
        ),
        link_bandwidth=planned.run.link_bandwidth,
        warnings=planned.warnings,
        ranks=tuple(
            replace(part.entry, clock_note=notes.get(part.entry.rank)) for part in parts
        ),
        failed=failed,
        reading=store_said.as_json(planned.reading),
    )
    _write_manifest(folder, manifest)
    return Ingested(
        folder=folder,
        manifest=manifest,
        written=tuple(part.entry.rank for part in parts if part.fresh),
        kept=tuple(part.entry.rank for part in parts if not part.fresh),
    )


def _world_size(parts: Sequence[Part]) -> int | None:
    """Return the world size that the traces say behind their events, if it has all ranks."""
    size = agreed_size((part.entry.rank, part.world_size) for part in parts)
    return size if size is None or parts[-1].entry.rank < size else None


def _clock_notes(parts: Sequence[Part]) -> dict[int, ClockNote]:
    found = clock_offsets(pa.concat_tables([part.ends for part in parts]))
    return {
        each.rank: ClockNote(
            offset_ns=each.offset_ns,
            spread_ns=each.spread_ns,
            matches=each.matches,
            reference=each.reference,
            applies=each.applies,
        )
        for each in found
    }


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    try:
        with aside(folder / MANIFEST) as path:
            path.write_text(to_json(manifest), "utf-8")
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
