"""A file that is written under another name, and gets its own when it is whole."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastcomm.errors import FastcommError
from fastcomm.guard import check_no_input

# What a killed process leaves behind: hidden, and never taken for a part of a store.
_MARK = "unfinished"


def check_replaceable(path: Path) -> None:
    """Raise `FastcommError` where a file of this name must not be replaced.

    A device, a FIFO or a socket would be gone, and so would a symbolic link; following one
    would write to a place that whoever made it has chosen.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:  # not there; or writing to it fails, and says why
        return
    if stat.S_ISLNK(mode):
        raise FastcommError(
            f"{path}: not written, it is a symbolic link to {path.readlink()}; name that file, "
            "or remove the link"
        )
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise FastcommError(f"{path}: not written, it is no regular file; name another file")


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path to write to: renamed to `path` at the end, removed where that is not reached.

    Raises `FastcommError` where the system refuses, as a full disk does, and where `path` is
    no regular file, or an input of the command.
    """
    check_replaceable(path)
    check_no_input(path)
    # Of another machine that writes the same, the number of the process may be the same.
    name = f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{_MARK}"
    unfinished = path.with_name(name)
    try:
        yield unfinished
        check_replaceable(path)
        unfinished.replace(path)
    except OSError as error:
        raise FastcommError(f"{path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def left_behind(folder: Path) -> list[Path]:
    """What killed processes left in a folder."""
    return sorted(folder.glob(f".*.{_MARK}"))
