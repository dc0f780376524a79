"""The files of a store: those that its manifest lists, and the lock of whoever writes them."""

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
