"""Write a run into a store: plan, one Parquet file a rank, tables of the run, manifest."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastcomm.errors import ClusterError, ConfigError, FastcommError, TraceFileError
from fastcomm.exchange.clocks import clock_offsets
from fastcomm.executors import Executor, Progress, Task, both, executor_of
from fastcomm.files import aside, is_local, left_behind, place, refuse_output
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.runs import OpenOptions, missing, open_run, with_card
from fastcomm.store import (
    MANIFEST,
    ClockNote,
    Manifest,
    UnstoredRank,
    file_name,
    files,
    read_manifest,
    reader,
    to_json,
    writer,
)
from fastcomm.store.files import LOCK, footer_sha256, locked
from fastcomm.store.writer import StoredRank, fingerprint, write_tables
from fastcomm.trace.run import RunTraces, SkippedRank, Source, agreed_size, named_ranks
from fastcomm.trace.trace import Trace
from fastcomm.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestPlan:
    """A run that may go into a directory: nothing is written yet."""

    run: RunTraces
    folder: Path
    reading: TraceOptions
    warnings: tuple[str, ...]  # of the run, but those that opening the store finds again


def plan(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    options: OpenOptions | None = None,
    ranks: Iterable[int] | None = None,
) -> IngestPlan:
    """Open the run of `paths` for a store in `folder`, with every event.

    Raises `ConfigError` where the directory is of something else, or holds the run itself.
    """
    refuse_output("--output", folder)
    folder = Path(folder)
    _refuse_inside(paths, folder)
    options = options or OpenOptions()
    config, _ = with_card(options.config, paths)
    options = replace(options, config=config, whole=True)
    run = open_run(*paths, options=options)
    found_again = missing(run.expected, run.world_size)
    reading = options.reading(run.world_size, run.ranks)
    run = run if ranks is None else run.only(ranks)
    _refuse_outside(run, folder)
    refuse_strange(run, folder)
    return IngestPlan(
        run=run,
        folder=folder,
        reading=reading,
        warnings=tuple(note for note in run.warnings if note not in found_again),
    )


def _refuse_inside(paths: Sequence[str | Path], folder: Path) -> None:
    """A store among the traces would make them a run of two formats."""
    whole = folder.resolve()
    for path in filter(is_local, map(place, paths)):
        if path.resolve() == whole:
            raise ConfigError(f"--output {folder}: is what is read; wanted another directory")
        if path.is_dir() and path.resolve() in whole.parents:
            raise ConfigError(
                f"--output {folder}: lies in {path}, which is read; wanted a directory beside"
            )


def _refuse_outside(run: RunTraces, folder: Path) -> None:
    whole = folder.resolve()
    for source in run.sources:
        if is_local(source.path) and whole in source.path.resolve().parents:
            raise ConfigError(
                f"--output {folder}: {source.path} lies in it, which is read; wanted a "
                "directory of its own"
            )


def refuse_strange(run: RunTraces, folder: Path) -> None:
    """ConfigError for a directory that is neither absent, nor empty, nor a store of the run."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"--output {folder}: a file; wanted a directory")
    if not (folder / MANIFEST).exists():
        # An ingest that was killed before it wrote the manifest may have left its lock.
        if any(each.name != LOCK for each in folder.iterdir()):
            raise ConfigError(
                f"--output {folder}: has files and no {MANIFEST}; wanted a store, or an empty "
                "or new directory"
            )
        return
    manifest = read_manifest(folder)
    known = {*manifest.expected, *(entry.rank for entry in manifest.ranks)}
    if len(known) == len(run.ranks) == 1:
        return  # a file that is alone says its rank when it is read
    if others := sorted(known - set(run.ranks)):
        raise ConfigError(
            f"--output {folder}: a store with {named_ranks(others)}, which this run does not "
            "have; wanted another directory, or remove that one"
        )


__all__ = ["IngestPlan", "Ingested", "ingest", "plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """A store, and what was done for it."""

    folder: Path
    manifest: Manifest
    written: tuple[int, ...]  # ranks
    kept: tuple[int, ...]  # ranks that were there and have not changed


def ingest(
    planned: IngestPlan,
    *,
    workers: int | Executor = 1,
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
        tasks = replace(run, sources=_storing(run, folder, files.as_json(planned.reading)))
        task = Task(measure=partial(_part, folder=folder), merge=_all, finish=both)
        engine = executor_of(workers)
        parts, left_out = engine.gather(tasks, task, keep_going=keep_going, progress=progress)
        _check_there(folder, parts)
        if not is_alone:
            _check_ours(folder, begun, parts)
        return _finished(planned, begun, sorted(parts, key=_rank_of), left_out)


def _part(trace: Trace, folder: Path) -> tuple[StoredRank, ...]:
    return (StoredRank.of(trace, folder),)


def _all(parts: Sequence[tuple[StoredRank, ...]]) -> tuple[StoredRank, ...]:
    return tuple(chain.from_iterable(parts))


def _rank_of(part: StoredRank) -> int:
    return part.entry.rank


@contextmanager
def _clean(folder: Path, *, is_alone: bool) -> Iterator[None]:
    """Leave no half file, however the work ends, unless it may be one of another ingest."""
    try:
        yield
    finally:
        for path in left_behind(folder) if is_alone else ():
            path.unlink(missing_ok=True)


def _check_there(folder: Path, parts: Sequence[StoredRank]) -> None:
    """Workers of other machines may write to a directory of the same name there."""
    for part in parts:
        path = folder / part.entry.file
        if not path.exists() or path.stat().st_size != part.entry.size:
            raise ClusterError(
                f"{path}: a worker wrote rank {part.entry.rank} there, and here it is not; "
                "wanted an --output in a file system that all machines share"
            )


def _check_ours(folder: Path, begun: Manifest, parts: Sequence[StoredRank]) -> None:
    """FastcommError where another ingest has written to the store since this one began."""
    is_ours = read_manifest(folder).writer == begun.writer
    if not is_ours or any(
        footer_sha256(folder / part.entry.file) != part.entry.footer for part in parts
    ):
        raise FastcommError(
            f"{folder}: another ingest wrote to this store at the same time; the store is not "
            "whole: run one ingest alone, or choose another --output"
        )


def _storing(run: RunTraces, folder: Path, said: dict[str, Any]) -> tuple[Source, ...]:
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
        writer.write(trace, path, {**wanted, "source": str(source.path)})
    except OSError as error:
        raise FastcommError(f"{path}: {error.strerror or error}") from error
    return trace


def _kept(path: Path, wanted: dict[str, Any]) -> Trace | None:
    """The trace in a file that was made so of the same source; None where there is none."""
    if not path.exists():
        return None
    try:
        found = reader.about(path)
        if any(found.get(key) != value for key, value in wanted.items()):
            return None
        return reader.read(path, TraceOptions(whole=True))
    except TraceFileError:
        return None  # damaged: it is written again


def _left(each: SkippedRank, folder: Path) -> UnstoredRank:
    if each.rank is not None:
        # What an earlier source of the rank left is not of this run.
        (folder / file_name(each.rank)).unlink(missing_ok=True)
    return UnstoredRank(rank=each.rank, source=each.path, error=each.error)


def _finished(
    planned: IngestPlan,
    begun: Manifest,
    parts: Sequence[StoredRank],
    left_out: Sequence[SkippedRank],
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
        reading=files.as_json(planned.reading),
    )
    _write_manifest(folder, manifest)
    return Ingested(
        folder=folder,
        manifest=manifest,
        written=tuple(part.entry.rank for part in parts if part.fresh),
        kept=tuple(part.entry.rank for part in parts if not part.fresh),
    )


def _world_size(parts: Sequence[StoredRank]) -> int | None:
    """Return the world size that the traces say behind their events, if it has all ranks."""
    size = agreed_size((part.entry.rank, part.world_size) for part in parts)
    return size if size is None or parts[-1].entry.rank < size else None


def _clock_notes(parts: Sequence[StoredRank]) -> dict[int, ClockNote]:
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
