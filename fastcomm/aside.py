"""A file that is written under another name, and gets its own when it is whole."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastcomm.errors import FastcommError

# What a killed process leaves behind: hidden, and never taken for a part of a store.
_MARK = "unfinished"


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path to write to: renamed to `path` at the end, removed where that is not reached.

    Raises `FastcommError` where the system refuses, as a full disk does.
    """
    # Of another machine that writes the same, the number of the process may be the same.
    name = f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{_MARK}"
    unfinished = path.with_name(name)
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise FastcommError(f"{path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def left_behind(folder: Path) -> list[Path]:
    """What killed processes left in a folder."""
    return sorted(folder.glob(f".*.{_MARK}"))
