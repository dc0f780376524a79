"""A source that is not what it was when its reading began is an error, not a mixture."""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastcomm.errors import SchemaError, TraceFileError
from fastcomm.remote import is_local
from fastcomm.trace.run import Source
from fastcomm.trace.trace import Trace

_State = tuple[tuple[str, int, int, int], ...]


def steady(source: Source) -> Source:
    """The same source, whose reading fails if somebody changes its file meanwhile."""
    narrow = source.read_narrow
    return replace(
        source,
        read=partial(_read, source.path, source.read),
        read_narrow=narrow and partial(_read, source.path, narrow),
    )


def _read(path: Path, read: Callable[[], Trace]) -> Trace:
    before = _state(path)
    try:
        trace = read()
    except TraceFileError as error:
        _check(path, before, error)
        raise
    except SchemaError as error:
        _check(path, before, error)
        raise TraceFileError(f"{path}: damaged: {error}") from error
    _check(path, before, None)
    return trace


def _check(path: Path, before: _State, error: Exception | None) -> None:
    """TraceFileError where the file is another one than before, or longer, or newer."""
    if before and _state(path) != before:
        raise TraceFileError(
            f"{path}: changed while it was read; wait until it is written, and read it again"
        ) from error


def _state(path: Path) -> _State:
    """Name, place, size and age of a file, or of the files of a directory; empty: none."""
    try:
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            return (_of(path.name, status),)
        if not is_local(path):
            return tuple(sorted(_of(each.name, each.stat()) for each in path.iterdir()))
        with os.scandir(path) as entries:
            return tuple(sorted(_of(entry.name, entry.stat()) for entry in entries))
    except OSError:
        return ()  # reading it says what is wrong


def _of(name: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return name, status.st_ino, status.st_size, status.st_mtime_ns
