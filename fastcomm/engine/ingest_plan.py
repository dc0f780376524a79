"""What goes into a store, and whether it may go where it should. Nothing is written here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastcomm.errors import ConfigError
from fastcomm.readers.assembly import ReadOptions
from fastcomm.readers.runs import OpenOptions, missing, open_run, with_card
from fastcomm.readers.store_layout import MANIFEST
from fastcomm.readers.store_manifest import read_manifest
from fastcomm.remote import is_local, place, refuse_output
from fastcomm.store.lock import LOCK
from fastcomm.trace.run import Run, named_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that may go into a directory: nothing is written yet."""

    run: Run
    folder: Path
    reading: ReadOptions
    warnings: tuple[str, ...]  # of the run, but those that opening the store finds again


def plan(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    options: OpenOptions | None = None,
    ranks: Iterable[int] | None = None,
) -> Plan:
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
    return Plan(
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


def _refuse_outside(run: Run, folder: Path) -> None:
    whole = folder.resolve()
    for source in run.sources:
        if is_local(source.path) and whole in source.path.resolve().parents:
            raise ConfigError(
                f"--output {folder}: {source.path} lies in it, which is read; wanted a "
                "directory of its own"
            )


def refuse_strange(run: Run, folder: Path) -> None:
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
