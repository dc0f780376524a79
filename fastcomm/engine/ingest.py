"""A run into a store: each rank into its file, then the tables and the manifest of all.

What was begun is finished by the same call again: a rank whose source and options have not
changed since its file was written is not read again.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastcomm import __version__
from fastcomm.aside import aside, left_behind
from fastcomm.engine.ingest_plan import Plan, plan
from fastcomm.engine.local import Outcome, map_ranks
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.readers import store, store_said
from fastcomm.readers.assembly import ReadOptions
from fastcomm.readers.store_layout import MANIFEST, file_name
from fastcomm.readers.store_manifest import (
    ClockNote,
    Left,
    Manifest,
    to_json,
)
from fastcomm.store import rank_file
from fastcomm.store.fingerprint import fingerprint
from fastcomm.store.part import Part, write_tables
from fastcomm.trace.clocks import clock_offsets
from fastcomm.trace.run import Run, Source
from fastcomm.trace.trace import Trace

__all__ = ["Ingested", "Plan", "ingest", "plan"]

Progress = Callable[[Outcome[Part]], None]


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
    workers: int = 1,
    keep_going: bool = False,
    progress: Progress | None = None,
) -> Ingested:
    """Write the store.

    Raises the first rank's error, and the store stays unfinished; or, with `keep_going`, the
    manifest lists it, and it is raised only if no rank is left.
    """
    run, folder = planned.run, planned.folder
    begun = Manifest(
        version=__version__, complete=False, world_size=run.world_size, expected=run.ranks
    )
    _write_manifest(folder, begun)
    tasks = replace(run, sources=_storing(run, folder, store_said.as_json(planned.reading)))
    parts: list[Part] = []
    failed: list[Left] = []
    for outcome in map_ranks(tasks, partial(Part.of, folder=folder), workers):
        if outcome.partial is not None:
            parts.append(outcome.partial)
        elif outcome.error is not None:
            if not keep_going:
                raise outcome.error
            failed.append(_left(outcome.source, outcome.error, folder))
        if progress is not None:
            progress(outcome)
    if not parts:
        raise FastcommError(f"no rank could be read: {failed[0].error}")
    return _finished(planned, begun, parts, failed)


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


def _left(source: Source, error: FastcommError, folder: Path) -> Left:
    # What an earlier source of the rank left is not of this run.
    (folder / file_name(source.rank)).unlink(missing_ok=True)
    return Left(rank=source.rank, source=str(source.path), error=str(error))


def _finished(
    planned: Plan, begun: Manifest, parts: list[Part], failed: list[Left]
) -> Ingested:
    """The tables, and last the manifest: a store is whole once that says so."""
    folder = planned.folder
    parts.sort(key=lambda part: part.entry.rank)
    failed.sort(key=lambda left: left.rank)
    notes = _clock_notes(parts)
    manifest = replace(
        begun,
        complete=True,
        expected=tuple(sorted({part.entry.rank for part in parts} | {e.rank for e in failed})),
        link_bandwidth=planned.run.link_bandwidth,
        warnings=planned.warnings,
        ranks=tuple(
            replace(part.entry, clock_note=notes.get(part.entry.rank)) for part in parts
        ),
        failed=tuple(failed),
        reading=store_said.as_json(planned.reading),
    )
    try:
        write_tables(folder, parts, notes)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    for path in left_behind(folder):
        path.unlink(missing_ok=True)
    _write_manifest(folder, manifest)
    return Ingested(
        folder=folder,
        manifest=manifest,
        written=tuple(part.entry.rank for part in parts if part.fresh),
        kept=tuple(part.entry.rank for part in parts if not part.fresh),
    )


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


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with aside(folder / MANIFEST) as path:
            path.write_text(to_json(manifest), "utf-8")
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
