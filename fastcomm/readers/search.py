"""Search for files that may be traces."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.files import is_local, is_url, matches, place
from fastcomm.trace.run import SkippedRank

_DEEPEST = 100  # nested directories


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for files that may be traces; directories that are traces are not searched.

    With `keep_going`, directories that cannot be listed are in `skipped` rather than errors.
    """

    is_trace: Callable[[Path], bool]  # whether a directory is a trace
    keep_going: bool = False
    skipped: list[SkippedRank] = field(default_factory=list)

    def candidates(self, paths: Sequence[str | Path]) -> list[tuple[Path, bool]]:
        """Return all paths that may be traces, once each, and whether the user named them.

        Raises `ConfigError` if a path does not exist, and for standard input.
        """
        named: dict[Path, None] = {}
        searched: dict[Path, None] = {}
        for text in paths:
            refuse_standard_input(text)
            path = place(text)
            if path.is_dir():
                searched |= dict.fromkeys(self._below(path))
            elif path.exists():
                named[path] = None
            elif matched := _matches(str(text)):
                for match in matched:
                    if match.is_dir():
                        searched |= dict.fromkeys(self._below(match))
                    else:
                        named[match] = None
            else:
                raise no_such_path(text)
        return [(path, path in named) for path in named | searched]

    def _below(
        self, directory: Path, above: frozenset[tuple[int, int]] = frozenset()
    ) -> Iterator[Path]:
        """Yield the directory if it is a trace or empty, else its files, recursively.

        Links to one of the directories `above` are not followed.
        """
        try:
            if self.is_trace(directory):
                yield directory
                return
            if not is_local(directory):
                yield from self._below_elsewhere(directory)
                return
            status = directory.stat()
            with os.scandir(directory) as entries:
                listing = sorted((entry.name, _is_directory(entry)) for entry in entries)
        except OSError as error:
            self._unlisted(directory, error)
            return
        if all(name.startswith(".") for name, _ in listing):
            yield directory  # empty, but its name may be that of a rank
        if len(above) == _DEEPEST:
            message = (
                f"more than {_DEEPEST} directories in one another; name the one of the traces"
            )
            self._unlisted(directory, OSError(errno.ELOOP, message))
            return
        above |= {(status.st_dev, status.st_ino)}
        for name, is_directory in listing:
            if name.startswith("."):
                continue
            if not is_directory:
                yield directory / name
            elif _identity(directory / name) not in above:
                yield from self._below(directory / name, above)

    def _below_elsewhere(self, directory: Path) -> Iterator[Path]:
        """Yield the files of a directory on a file system without links, recursively."""
        for path in sorted(directory.iterdir(), key=lambda path: path.name):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                yield from self._below(path)
            else:
                yield path

    def _unlisted(self, directory: Path, error: OSError) -> None:
        """Skip a directory that cannot be listed; TraceFileError unless `keep_going`."""
        message = f"{directory}: {error.strerror or error}"
        if not self.keep_going:
            raise TraceFileError(message) from error
        self.skipped.append(SkippedRank(rank=None, path=str(directory), error=message))


def no_such_path(path: str | Path) -> ConfigError:
    """Return the error for a path of the user that does not exist, and that matches no file."""
    is_pattern = any(mark in str(path) for mark in "*?[")
    return ConfigError(
        f"{path}: no such file or directory{', and no file matches it' * is_pattern}"
    )


def refuse_standard_input(path: str | Path) -> None:
    """Raise ConfigError if the path is empty or standard input, which is read only once."""
    if not str(path):
        raise ConfigError("an empty path; pass a trace, or a directory of traces")
    if str(path) in ("-", "/dev/stdin"):
        raise ConfigError(
            f"{path}: standard input cannot be read, since a trace is read more than once; "
            "write it to a file first"
        )


def _matches(pattern: str) -> list[Path]:
    """Return the paths that match a glob."""
    if is_url(pattern):
        return matches(pattern)
    return [Path(match) for match in sorted(glob(pattern, recursive=True))]  # noqa: PTH207


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory; False if it cannot be resolved."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(path: Path) -> tuple[int, int]:
    """Return the device and inode of a directory, which are equal for all paths to it."""
    status = path.stat()
    return status.st_dev, status.st_ino
