"""The files and directories of a run that may be traces: a search below what a user names."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.remote import is_local, is_url, matches, place
from fastcomm.trace.run import SkippedRank

_DEEPEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search for candidates; a directory that is a trace by itself is not searched.

    With `keep_going` a directory that cannot be listed is among `skipped`, and no error.
    """

    is_trace: Callable[[Path], bool]  # asked of directories
    keep_going: bool = False
    skipped: list[SkippedRank] = field(default_factory=list)

    def candidates(self, paths: Sequence[str | Path]) -> list[tuple[Path, bool]]:
        """Return all that may be a trace, once each, and whether a user named it."""
        named: dict[Path, None] = {}
        searched: dict[Path, None] = {}
        for word in paths:
            refuse_standard_input(word)
            path = place(word)
            if path.is_dir():
                searched |= dict.fromkeys(self._below(path))
            elif path.exists():
                named[path] = None
            elif found := _matches(str(word)):
                for match in found:
                    if match.is_dir():
                        searched |= dict.fromkeys(self._below(match))
                    else:
                        named[match] = None
            else:
                raise FastcommError(
                    f"{word}: no such file or directory, and no file matches it"
                )
        return [(path, path in named) for path in named | searched]

    def _below(
        self, directory: Path, above: frozenset[tuple[int, int]] = frozenset()
    ) -> Iterator[Path]:
        """Yield the directory if it is a trace or empty, else what is in it, to the bottom.

        A link to one of the directories `above` leads nowhere.
        """
        try:
            if self.is_trace(directory):
                yield directory
                return
            if not is_local(directory):
                yield from self._below_elsewhere(directory)
                return
            here = directory.stat()
            with os.scandir(directory) as entries:
                found = sorted((entry.name, _is_directory(entry)) for entry in entries)
        except OSError as error:
            self._unlisted(directory, error)
            return
        if all(name.startswith(".") for name, _ in found):
            yield directory  # empty: its name may be that of a rank
        if len(above) == _DEEPEST:
            words = (
                f"more than {_DEEPEST} directories in one another; name the one of the traces"
            )
            self._unlisted(directory, OSError(errno.ELOOP, words))
            return
        above |= {(here.st_dev, here.st_ino)}
        for name, is_directory in found:
            if name.startswith("."):
                continue
            if not is_directory:
                yield directory / name
            elif _identity(directory / name) not in above:
                yield from self._below(directory / name, above)

    def _below_elsewhere(self, directory: Path) -> Iterator[Path]:
        """Yield what is in a directory of a file system that has no links."""
        for path in sorted(directory.iterdir(), key=lambda path: path.name):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                yield from self._below(path)
            else:
                yield path

    def _unlisted(self, directory: Path, error: OSError) -> None:
        words = f"{directory}: {error.strerror or error}"
        if not self.keep_going:
            raise TraceFileError(words) from error
        self.skipped.append(SkippedRank(rank=None, path=str(directory), error=words))


def refuse_standard_input(word: str | Path) -> None:
    """Raise TraceFileError for standard input, which cannot be read twice, or for no name."""
    if not str(word):
        raise TraceFileError("an empty path; wanted a trace, or a directory of traces")
    if str(word) in ("-", "/dev/stdin"):
        raise TraceFileError(
            f"{word}: standard input cannot be read, since a trace is read more than once; "
            "write it to a file first"
        )


def _matches(word: str) -> list[Path]:
    """What a glob matches."""
    if is_url(word):
        return matches(word)
    return [Path(match) for match in sorted(glob(word, recursive=True))]  # noqa: PTH207


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
