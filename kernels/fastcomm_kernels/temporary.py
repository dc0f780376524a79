"""Choose the directories for temporary files and caches: no other place looks for them.

`tempfile` takes the working directory if it may write to no other. Traces of other people lie
there, so that a cache of compiled code in it would be code of other people. Here the directory
is none that the sender of traces, or another user, can write to. It is `tempfile.tempdir` if
the program has set that, else the first usable one of TMPDIR, /tmp and /var/tmp.

This module imports no numba: every command imports it when it starts.
"""

import errno
import logging
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOG = logging.getLogger("fastcomm")
_VARIABLE = "TMPDIR"
_SYSTEM = ("/tmp", "/var/tmp")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_warned: set[str] = set()


def root(longest: int | None = None) -> Path:
    """Return the directory for temporary files, an absolute path without links.

    Parameters
    ----------
    longest
        Most bytes of the path; by default any number.

    Raises
    ------
    OSError
        If there is none.

    """
    for name in _candidates():
        folder = Path(name)
        if reason := _reason_against(folder):
            _log_unused(name, reason)
        elif longest is None or len(os.fsencode(folder.resolve())) <= longest:
            return folder.resolve()
    raise OSError(
        errno.ENOENT,
        "no directory for temporary files: TMPDIR, /tmp and /var/tmp cannot be written to, "
        "lie in the working directory, or belong to other users",
    )


def _candidates() -> Iterator[str]:
    """Yield the directories to try, in order."""
    module = sys.modules.get("tempfile")  # its import takes longer than all else here
    chosen = getattr(module, "tempdir", None)
    yield from filter(None, (os.fsdecode(chosen or ""), os.environ.get(_VARIABLE)))
    yield from _SYSTEM


def _reason_against(folder: Path) -> str:
    """Return why a directory is not used; "" if it is."""
    if not folder.is_absolute():
        return "is a relative path"
    try:
        place = folder.resolve()
        status = place.stat()
    except (OSError, RuntimeError):
        return "does not exist"
    if is_in_working_directory(place):
        return "lies in the working directory"
    if status.st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    if status.st_mode & _OTHERS and not status.st_mode & stat.S_ISVTX:
        return "can be changed by other users (chmod +t protects the files in it)"
    if not stat.S_ISDIR(status.st_mode) or not _can_be_written(place):
        return "cannot be written to"
    return ""


def _can_be_written(folder: Path) -> bool:
    """Return whether files can be created in a directory, full or not.

    `os.access` permits root what a file system such as /sys does not.
    """
    probe = folder / f"fastcomm-{os.urandom(8).hex()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return error.errno not in (errno.EPERM, errno.EACCES, errno.EROFS)
    return True


def is_in_working_directory(place: Path) -> bool:
    """Return whether a path is the working directory or lies in it; all is in "/"."""
    try:
        here = Path.cwd().resolve()
    except OSError:  # removed meanwhile
        return False
    return here != Path(here.root) and place.is_relative_to(here)


def _log_unused(name: str, reason: str) -> None:
    """Log once, and only in the main process, that the directory of a user is not used."""
    if name != os.environ.get(_VARIABLE) or name in _warned:
        return
    from multiprocessing import parent_process  # slow import

    if parent_process() is None:
        _LOG.warning("warning: %s %s: %s; not used", _VARIABLE, name, reason)
    _warned.add(name)


def cache_home() -> Path | None:
    """Return the folder of the user's cache; None for a user without a home.

    A relative XDG_CACHE_HOME is invalid, and would run code from the working directory.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if folder.is_absolute():
        return folder / "fastcomm"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "fastcomm" if home.is_absolute() else None


@contextmanager
def used_by_libraries(longest: int | None = None) -> Iterator[None]:
    """Make `tempfile`, and so all libraries, use `root` in this block. Raises `OSError`."""
    import tempfile

    folder = root(longest)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def use(folder: Path) -> None:
    """Make `root` and all libraries of this process use a directory."""
    import tempfile

    tempfile.tempdir = str(folder)
