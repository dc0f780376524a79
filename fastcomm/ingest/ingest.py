"""Write a run into a store: plan, one Parquet file a rank, tables of the run, manifest."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastcomm import preparation
from fastcomm.errors import ClusterError, ConfigError, FastcommError, TraceFileError
from fastcomm.executors.executor import (
    Executor,
    OpenedRun,
    ShowProgress,
    executor_of,
    of_each,
    unseen,
)
from fastcomm.files import aside, is_local, is_url, left_behind, place, refuse_output
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.config import Config
from fastcomm.formats.opening import missing, open_run
from fastcomm.formats.store import files, reader, writer
from fastcomm.formats.store.files import LOCK, footer_sha256, locked
from fastcomm.formats.store.layout import (
    MANIFEST,
    ClockNote,
    Manifest,
    UnstoredRank,
    file_name,
    read_manifest,
    to_json,
)
from fastcomm.formats.store.writer import StoredRank, fingerprint, write_tables
from fastcomm.formats.workload_cards import with_card
from fastcomm.ranks.clocks import clock_offsets
from fastcomm.trace.run_traces import (
    Content,
    RunTraces,
    SkippedRank,
    Source,
    agreed_size,
    named_ranks,
)
from fastcomm.trace.tags import without_effect
from fastcomm.trace.trace import Trace
from fastcomm.version import __version__

_COMPARED = 8  # ranks by whose contents a run that moved is known again


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestPlan:
    """A run and the directory that it will be stored in; nothing is written yet."""

    run: RunTraces
    folder: Path
    reading: TraceOptions
    warnings: tuple[str, ...]  # of the run, but those that opening the store finds again


def plan(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    config: Config | None = None,
    ranks: Iterable[int] | None = None,
) -> IngestPlan:
    """Open a run to be stored in `folder`, with every event; by default of all ranks.

    A card beside the traces adds to `config`.

    Raises
    ------
    ConfigError
        If the directory contains other files, or the traces.
    FastcommError
        If the traces cannot be opened.

    """
    refuse_output("--output", folder)
    folder = Path(folder)
    _refuse_inside(paths, folder)
    config, _ = with_card(config or Config(), paths)
    run = open_run(*paths, config=config)
    found_again = missing(run.expected, run.world_size)
    reading = replace(config.reading(run.world_size, run.ranks), whole=True)
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
    """Raise `ConfigError` if a store would be written into a directory that is to be ingested.

    That directory would then hold a run in two formats. `paths` are the traces, `folder` the
    store.
    """
    whole = folder.resolve()
    for path in filter(is_local, map(place, paths)):
        if path.resolve() == whole:
            raise ConfigError(f"--output {folder}: is the input; name another directory")
        if path.is_dir() and path.resolve() in whole.parents:
            raise ConfigError(
                f"--output {folder}: lies in {path}, which is read; name another directory"
            )


def _refuse_outside(run: RunTraces, folder: Path) -> None:
    whole = folder.resolve()
    for source in run.sources:
        if is_local(source.path) and whole in source.path.resolve().parents:
            raise ConfigError(
                f"--output {folder}: {source.path} lies in it, which is read; name "
                "another directory"
            )


def refuse_strange(run: RunTraces, folder: Path) -> None:
    """Raise `ConfigError` unless the directory is absent, empty, or a store of the run."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"--output {folder}: a file; name a directory")
    if not (folder / MANIFEST).exists():
        # An ingest that was killed before it wrote the manifest may have left its lock.
        if any(path.name != LOCK for path in folder.iterdir()):
            raise ConfigError(
                f"--output {folder}: has files and no {MANIFEST}; name a store, or an empty "
                "or new directory"
            )
        return
    manifest = read_manifest(folder)
    stored = {*manifest.expected, *(entry.rank for entry in manifest.ranks)}
    if len(stored) == len(run.ranks) == 1:
        return  # a file that is alone says its rank when it is read
    if others := sorted(stored - set(run.ranks)):
        raise ConfigError(
            f"--output {folder}: a store with {named_ranks(others)}, which this run does not "
            "have; name another directory, or remove that one"
        )
    if manifest.ranks and not _has_same_source(manifest, run):
        raise ConfigError(
            f"--output {folder}: a store of {manifest.ranks[0].source}, which is another run; "
            "name another directory, or remove that one"
        )


def _has_same_source(manifest: Manifest, run: RunTraces) -> bool:
    """Whether a stored rank was read from a file of the run, or from one with its contents."""
    sources = {_absolute(str(source.path)) for source in run.sources}
    if any(_absolute(entry.source) in sources for entry in manifest.ranks):
        return True
    path_of = {source.rank: source.path for source in run.sources}
    return any(
        entry.rank in path_of
        and fingerprint(path_of[entry.rank]).sha256 == entry.fingerprint.sha256
        for entry in manifest.ranks[:_COMPARED]
    )


def _absolute(name: str) -> str:
    """Return a path as an absolute one, without looking at files; a URL unchanged.

    A store may state any URL as its source, and opening it would make a connection.
    """
    return name if is_url(name) else str(Path(name).absolute())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """A written store: which ranks were written, and which were unchanged."""

    folder: Path
    manifest: Manifest
    written: tuple[int, ...]  # ranks
    kept: tuple[int, ...]  # ranks that were there and have not changed
    unused: tuple[str, ...]  # rules and options without effect on any rank, and why


def ingest(
    planned: IngestPlan, workers: int | Executor = 1, show: ShowProgress = unseen
) -> Ingested:
    """Write the store of a planned ingest.

    Parameters
    ----------
    planned
        The run and the directory.
    workers
        Number of processes, or an executor.
    show
        Shows the progress.

    Raises
    ------
    FastcommError
        If a rank cannot be read, and then the store stays unfinished (of a run that goes on,
        only if no rank can); or if another ingest writes the store; nothing of it is removed.

    """
    run, folder = planned.run, planned.folder
    reading = files.as_json(planned.reading)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
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
        storing = replace(run, sources=_storing(run, folder, reading))
        task = of_each(partial(StoredRank.of, folder=folder))
        opened = OpenedRun.of(storing, executor_of(workers), show)
        opened.compile(preparation.compile_kernels)
        parts, unread = opened.gather(task)
        _check_written(folder, parts)
        if not is_alone:
            _check_unshared(folder, begun, parts)
        in_order = sorted(parts, key=lambda part: part.entry.rank)
        return _finished(planned, begun, in_order, unread)


@contextmanager
def _clean(folder: Path, *, is_alone: bool) -> Iterator[None]:
    """Remove unfinished files at the end, unless another ingest may be writing them."""
    try:
        yield
    finally:
        for path in left_behind(folder) if is_alone else ():
            path.unlink(missing_ok=True)


def _check_written(folder: Path, parts: Sequence[StoredRank]) -> None:
    """Raise `ClusterError` if a worker wrote to a directory of its own machine."""
    for part in parts:
        path = folder / part.entry.file
        if not path.exists() or path.stat().st_size != part.entry.size:
            raise ClusterError(
                f"{path}: a worker wrote rank {part.entry.rank} there, and here it is not; "
                "name an --output in a file system that all machines share"
            )


def _check_unshared(folder: Path, begun: Manifest, parts: Sequence[StoredRank]) -> None:
    """Raise `FastcommError` if another ingest wrote to the store in the meantime."""
    is_ours = read_manifest(folder).writer == begun.writer
    if not is_ours or any(
        footer_sha256(folder / part.entry.file) != part.entry.footer for part in parts
    ):
        raise FastcommError(
            f"{folder}: another ingest wrote to this store at the same time; the store is not "
            "whole: run one ingest alone, or choose another --output"
        )


def _storing(run: RunTraces, folder: Path, reading: dict[str, Any]) -> tuple[Source, ...]:
    """Return a source per rank that, when it is read, also writes the trace to the store.

    `folder` is the directory of the store, `reading` the options that the store records.
    """
    beside: dict[Path, list[int]] = {}
    for source in run.sources:
        beside.setdefault(source.path, []).append(source.rank)
    return tuple(
        replace(source, reader=partial(_stored, source, folder, beside[source.path], reading))
        for source in run.sources
    )


def _stored(
    source: Source, folder: Path, beside: list[int], reading: dict[str, Any], _: Content
) -> Trace:
    """Return the trace of a rank from its stored file if unchanged, else read and store it."""
    path = folder / file_name(source.rank)
    origin = {
        "version": __version__,
        "fingerprint": asdict(fingerprint(source.path)),
        "beside": beside,  # the ranks in one source: that of a process may be another's now
        "reading": reading,
    }
    if (stored := _unchanged(path, origin)) is not None:
        return stored
    trace = source.read("all")
    # A file that is alone may say its rank behind its events, when it is read.
    path = folder / file_name(trace.meta.rank)
    try:
        writer.write(trace, path, {**origin, "source": str(source.path)})
    except OSError as error:
        raise FastcommError(f"{path}: {error.strerror or error}") from error
    return trace


def _unchanged(path: Path, origin: dict[str, Any]) -> Trace | None:
    """Return the trace of a stored file if it has this origin, else None."""
    if not path.exists():
        return None
    try:
        about = reader.about(path)
        if any(about.get(key) != value for key, value in origin.items()):
            return None
        return reader.read(path, TraceOptions(whole=True))
    except TraceFileError:
        return None  # damaged: it is written again


def _unstored(skipped: SkippedRank, folder: Path) -> UnstoredRank:
    """Return the entry of a rank that could not be read, and remove its earlier file."""
    if skipped.rank is not None:
        # A file from an earlier source of the rank is not part of this run.
        (folder / file_name(skipped.rank)).unlink(missing_ok=True)
    return UnstoredRank(rank=skipped.rank, source=skipped.path, error=skipped.error)


def _finished(
    planned: IngestPlan,
    begun: Manifest,
    parts: Sequence[StoredRank],
    unread: Sequence[SkippedRank],
) -> Ingested:
    """Write the tables and last the manifest, which marks the store as complete."""
    folder = planned.folder
    failed = tuple(_unstored(skipped, folder) for skipped in unread)
    notes = _clock_notes(parts)
    try:
        tables = write_tables(folder, parts, notes)
    except OSError as error:
        raise FastcommError(f"{folder}: {error.strerror or error}") from error
    ranks = {part.entry.rank for part in parts}
    ranks |= {rank.rank for rank in failed if rank.rank is not None}
    manifest = replace(
        begun,
        complete=True,
        tables=tables,
        world_size=begun.world_size or _world_size(parts),
        writer=None,
        expected=tuple(sorted(ranks)),
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
        unused=tuple(without_effect([part.unused for part in parts])),
    )


def _world_size(parts: Sequence[StoredRank]) -> int | None:
    """Return the world size stated after the events of traces, if it covers all ranks."""
    size = agreed_size((part.entry.rank, part.world_size) for part in parts)
    return size if size is None or parts[-1].entry.rank < size else None


def _clock_notes(parts: Sequence[StoredRank]) -> dict[int, ClockNote]:
    """Return notes on the clock offset of each rank, by rank."""
    offsets = clock_offsets(pa.concat_tables([part.ends for part in parts]))
    return {
        offset.rank: ClockNote(
            **{field.name: getattr(offset, field.name) for field in fields(ClockNote)}
        )
        for offset in offsets
    }


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    with aside(folder / MANIFEST) as path:
        path.write_text(to_json(manifest), "utf-8")
