"""Temporary directories, removed at the latest when the process ends, even if interrupted."""

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folders: dict[Path, int] = {}  # and the process that made each: a fork removes none of them


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A directory that only this user can read, removed afterwards. Raises `OSError`."""
    path = make_folder()
    try:
        yield path
    finally:
        remove_folder(path)


def make_folder() -> Path:
    """Make a temporary directory for `remove_folder`. Raises `OSError`."""
    path = Path(tempfile.gettempdir()) / f"fastcomm-{secrets.token_hex(8)}"
    # Noted first: a signal may come as soon as it exists.
    _folders[path] = os.getpid()
    path.mkdir(mode=0o700)
    return path


def remove_folder(path: Path) -> None:
    """Remove a directory of `make_folder` with everything in it; errors are ignored."""
    shutil.rmtree(path, ignore_errors=True)
    _folders.pop(path, None)


@atexit.register
def remove_all() -> None:
    """Remove the directories of this process that an interruption left."""
    for path, maker in list(_folders.items()):
        if maker == os.getpid():
            remove_folder(path)
