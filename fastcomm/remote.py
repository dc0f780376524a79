"""Files that lie elsewhere: a URL (s3://, gs://, memory://, ...) is a path like any other.

A path here is a `pathlib.Path`, or universal-pathlib's `UPath` of a file system of fsspec,
which has the same methods. Whoever needs a file of this machine asks `is_local`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from fastcomm.errors import ConfigError
from fastcomm.inert import is_utf8

# A `Path` of a URL has but one slash.
_LIKE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_EXTRA = "pip install 'fastcomm[remote]'"


def is_url(word: object) -> bool:
    """Whether a word of a user is a URL."""
    return "://" in str(word)


def is_local(path: Path) -> bool:
    """Whether a path is of this machine's file system."""
    return isinstance(path, Path)


def place(word: str | Path) -> Path:
    """The path that a user means; ConfigError where the package for its kind is missing."""
    if not isinstance(word, str) or not is_url(word):
        return word if not isinstance(word, str) else Path(word)
    try:
        from upath import UPath
    except ImportError as error:
        raise ConfigError(f"{word}: a URL needs the extra: {_EXTRA} ({error})") from error
    try:
        found = UPath(word)
        _ = found.fs  # imports what reads it
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{word}: {error}; wanted a URL of fsspec whose package is installed, such as s3fs "
            "for s3://, gcsfs for gs://"
        ) from error
    return cast("Path", found)


def matches(word: str) -> list[Path]:
    """What a glob among URLs matches, sorted; nothing where it is no glob."""
    if not any(mark in word for mark in "*?["):
        return []
    import fsspec

    place(word)
    system, pattern = fsspec.core.url_to_fs(word)
    return [place(system.unstrip_protocol(each)) for each in sorted(system.glob(pattern))]


def opened(path: Path) -> BinaryIO:
    """A file that lies elsewhere, to read; OSError where that fails, whatever its kind."""
    try:
        return cast("BinaryIO", path.open("rb"))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of the package of that kind of URL
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def named(path: Path) -> Iterator[Path | BinaryIO]:
    """What a library takes that opens files by name: the path, or an open file of elsewhere."""
    if is_local(path) and is_utf8(str(path)):
        yield path
        return
    with opened(path) as file:
        yield file


def refuse_output(option: str, word: object) -> None:
    """ConfigError for a URL, or an empty name, where something is to be written."""
    if not str(word):
        raise ConfigError(f"{option}: found an empty name, wanted a file or a directory")
    if _LIKE_URL.match(str(word)):
        raise ConfigError(
            f"{option} {word}: a URL can be read and not written; wanted a name on this "
            "machine, or of a file system that the workers share"
        )
