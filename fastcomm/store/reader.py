"""Read a store: a directory of Parquet files, one per rank."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastcomm import store
from fastcomm.errors import TraceFileError
from fastcomm.readers import RankSources, add_rank, agreed_world
from fastcomm.readers.assembly import TraceOptions
from fastcomm.readers.config import Config
from fastcomm.store import Manifest, read_manifest
from fastcomm.store.files import StoredFile, listed
from fastcomm.store.rank_file import about, read
from fastcomm.trace.run import WITH_HOST, Content, SkippedRank, Source, ranges
from fastcomm.trace.trace import Trace


def claims(path: Path) -> bool:
    """Return whether the path is a store, or the file of one rank of a store."""
    if path.is_dir():
        return (path / store.MANIFEST).is_file()
    return store.FILE_NAME.fullmatch(path.name) is not None


def is_damaged(_: Path) -> bool:
    """Return False: the manifest lists the files of a store, damaged or not."""
    return False


def find(paths: Sequence[Path], config: Config) -> RankSources:
    """Find the ranks that manifests list, and those of single files.

    Raises `TraceFileError` if a store is unfinished or empty, a file is missing or changed
    (unless the run goes on), or two files have one rank.
    """
    manifests = {path: read_manifest(path) for path in paths if path.is_dir()}
    world_sizes: dict[Path, int | None] = {}
    files: list[StoredFile] = []
    changed: list[SkippedRank] = []
    for folder, manifest in manifests.items():
        _refuse_unfinished(folder, manifest)
        world_sizes[folder] = manifest.world_size
        for file in listed(folder, manifest):
            files.append(file) if isinstance(file, StoredFile) else changed.append(file)
    for path in paths:
        if path not in manifests:
            meta = about(path)["meta"]
            world_sizes[path] = meta["world_size"]
            files.append(StoredFile(rank=meta["rank"], path=path, size=path.stat().st_size))
    if changed and not (config.keep_going and files):
        raise TraceFileError(changed[0].error)
    ranks: dict[int, Path] = {}
    for file in files:
        add_rank(ranks, file.rank, file.path)
    world = agreed_world(world_sizes, ranks)
    reading = config.reading(world, ranks)
    return RankSources(
        sources=tuple(
            _source(file, reading) for file in sorted(files, key=lambda file: file.rank)
        ),
        world_size=world,
        warnings=tuple(note for manifest in manifests.values() for note in _notes(manifest)),
        link_bandwidth=next(
            (m.link_bandwidth for m in manifests.values() if m.link_bandwidth), None
        ),
        skipped=(
            *(rank.skipped() for manifest in manifests.values() for rank in manifest.failed),
            *changed,
        ),
    )


def _source(file: StoredFile, options: TraceOptions) -> Source:
    """Return a stored rank as an input, whose function reads it when it is called."""
    reader = partial(_read, file, options)
    return Source(rank=file.rank, path=file.path, size=file.size, reader=reader)


def _read(file: StoredFile, options: TraceOptions, content: Content) -> Trace:
    return read(
        file.path,
        replace(options, whole=content in WITH_HOST),
        file.rank,
        file.provenance,
        "all" if content == "work" else content,
    )


def _refuse_unfinished(folder: Path, manifest: Manifest) -> None:
    """Raise TraceFileError for a store that is being written, or has no rank."""
    if not manifest.complete:
        done = sum((folder / store.file_name(rank)).exists() for rank in manifest.expected)
        raise TraceFileError(
            f"{folder}: a store that is not whole: {done} of {len(manifest.expected)} ranks; "
            "the same `fastcomm ingest` again finishes it"
        )
    if not manifest.ranks:
        raise TraceFileError(f"{folder}: a store without a rank; ingest the traces again")


def _notes(manifest: Manifest) -> Iterator[str]:
    """Yield the warnings of a store, with the ranks that could not be stored."""
    yield from manifest.warnings
    if manifest.failed:
        numbers = sorted(failed.rank for failed in manifest.failed if failed.rank is not None)
        ranks = ranges(numbers) or "of unknown number"
        yield f"left out when the run was stored: rank {ranks}: {manifest.failed[0].error}"
