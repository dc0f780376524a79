"""One ingest at a time for a store: a lock on a file in its directory."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastcomm.errors import FastcommError

LOCK = ".ingest.lock"
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
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
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
