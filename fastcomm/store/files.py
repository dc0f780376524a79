"""Check the files of a store against its manifest, and lock the store for a writer."""

import fcntl
import hashlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.inputs import opened
from fastcomm.store.layout import Entry, Manifest, TableFile, table_name
from fastcomm.trace.run import SkippedRank

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
            provenance = _provenance(entry, manifest)
            yield StoredFile(rank=entry.rank, path=path, size=size or 0, provenance=provenance)


def size_of(path: Path) -> int | None:
    """Return the bytes of a file; None if it is missing."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def footer_sha256(path: Path) -> str:
    """Return the SHA-256 of the footer of a Parquet file, which locates every page.

    Raises `OSError` if the file cannot be read.
    """
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


def _provenance(entry: Entry, manifest: Manifest) -> dict[str, Any]:
    """Return the source and the options that the manifest states for a rank."""
    provenance: dict[str, Any] = {"fingerprint": asdict(entry.fingerprint)}
    if manifest.reading is not None:
        provenance["reading"] = manifest.reading
    return provenance


def check_provenance(
    about: dict[str, Any], expected: dict[str, Any] | None, path: Path
) -> None:
    """Raise TraceFileError if a file has another source or options than the manifest states.

    `about` is the metadata of the file, and `expected` the provenance in the manifest.
    """
    if expected and any(about.get(name) != value for name, value in expected.items()):
        raise TraceFileError(
            f"{path}: has another source or other options than the manifest states: "
            "written by another ingest; ingest its trace again"
        )


LOCK = ".ingest.lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
_LOG = logging.getLogger("fastcomm")


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a store; yield False, after a warning, on file systems without locks.

    The system releases the lock when the process ends: the file alone is not a lock. Raises
    `FastcommError` if another process holds the lock.
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
    """Return the open file with the lock; None on file systems without locks."""
    while True:
        descriptor = os.open(path, _LOCK_FLAGS, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FastcommError(
                f"{path}: not a regular file, so it cannot be a lock; remove it"
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, path):
                _sign(descriptor)
                return descriptor
        except BlockingIOError as error:
            raise _locked_error(descriptor, path) from error
        except OSError as error:
            _LOG.warning(
                "warning: %s: this file system has no locks (%s); let no other ingest write "
                "there at the same time",
                path.parent,
                error.strerror,
            )
            if not os.fstat(descriptor).st_size:  # no other process wrote to it
                path.unlink(missing_ok=True)
            os.close(descriptor)
            return None
        os.close(descriptor)  # its holder has just removed it, so try again


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one with this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Write process and host into the lock, for the messages of others."""
    with suppress(OSError):  # a full disk: messages cannot name the holder
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _locked_error(descriptor: int, path: Path) -> FastcommError:
    """Return the error about a lock that another process holds."""
    holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "a process"
    os.close(descriptor)
    return FastcommError(
        f"{path.parent}: another ingest ({holder}) writes this store; wait until it ends, "
        "or choose another --output"
    )
