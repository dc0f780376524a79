"""Files that a command writes, whole or not at all, and files of strangers, up to a limit.

None is written over one that the command reads. What is read has to be a file at all; the
limits come from the environment, so that workers have the same. A path is a `pathlib.Path`, or
universal-pathlib's `UPath` of a URL (s3://, gs://, memory://, ...), which has the same methods;
`is_local` tells them apart.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from fastcomm.errors import ConfigError, FastcommError, TraceFileError, is_utf8

# What a killed process leaves behind: hidden, and never taken for a part of a store.
_MARK = "unfinished"

RATIO, TEXT, DOCUMENT = (
    "FASTCOMM_MAX_RATIO",
    "FASTCOMM_MAX_TEXT_GIB",
    "FASTCOMM_MAX_DOCUMENT_GIB",
)
# Traces of profilers become 10 to 40 times as large; deflate makes at most a thousand of one.
USUAL = {RATIO: 200, TEXT: 64, DOCUMENT: 4}
# Below this many bytes nobody is harmed, whatever the ratio.
SMALL = 64 << 20
_GIB = 1 << 30
_LARGEST = 1 << 20  # bytes of a file that people write
_ALIASES, _DEPTH = 16, 32  # of YAML: a bomb needs more, a person fewer
# A `Path` of a URL has but one slash.
_LIKE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_EXTRA = "pip install 'fastcomm[remote]'"
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


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
    name = f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.{_MARK}"
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


_Identity = tuple[int, int]  # device and inode: links to a file have that of the file


@dataclass(slots=True)
class _Guard:
    """Files of the command that runs in this process."""

    inputs: dict[Path, None] = field(default_factory=dict)  # in order
    outputs: list[Path] = field(default_factory=list)


_guards: list[_Guard] = []  # the last one counts; a library call outside of a command has none


@contextmanager
def guarded() -> Iterator[None]:
    """Note inputs and outputs of one command; forget them at its end."""
    _guards.append(_Guard())
    try:
        yield
    finally:
        _guards.pop()


@contextmanager
def unguarded() -> Iterator[None]:
    """Note nothing, for what reads its own files and writes them again."""
    noted = _guards.copy()
    _guards.clear()
    try:
        yield
    finally:
        _guards[:] = noted


def note_inputs(paths: Iterable[Path]) -> None:
    """Note files that a command reads; FastcommError where one of its outputs is among them."""
    if not _guards:
        return
    guard, new = _guards[-1], list(paths)
    guard.inputs.update(dict.fromkeys(new))
    for output in guard.outputs:
        refuse_inputs(output, new)


def note_output(path: Path) -> None:
    """Note a file that a command will write; FastcommError where it is one of its inputs."""
    if _guards:
        _guards[-1].outputs.append(path)
        check_no_input(path)


def check_no_input(path: Path) -> None:
    """Raise `FastcommError` where a file is an input of the command, or lies in one."""
    if _guards:
        refuse_inputs(path, _guards[-1].inputs)


def refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Raise `FastcommError` where `output` is one of the inputs, or lies in one."""
    place = output.parent.resolve() / output.name
    folders = {*output.absolute().parents, *place.parents}
    same = _identity(output)  # without a file of that name, only a folder can be an input
    for each in inputs:
        if each.absolute() in folders or (same is not None and _identity(each) == same):
            raise FastcommError(
                f"{output}: not written, this command reads {each}; name another output"
            )


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a file may become in memory, or on its way through it."""

    ratio: float  # of the decompressed bytes to those of the file
    text: float  # decompressed bytes of one file
    document: float  # bytes of a file that is in memory as a whole

    @classmethod
    def of_environment(cls) -> Self:
        """The limits that hold here; ConfigError where one is no number."""
        ratio, text, document = map(_said, USUAL)
        return cls(ratio=ratio, text=text * _GIB, document=document * _GIB)

    def check(self, made: float, size: int, path: Path) -> None:
        """TraceFileError where `size` bytes of a file become more than they may."""
        if made > max(SMALL, self.ratio * size):
            raise TraceFileError(
                f"{path}: {size} bytes become more than {made:.0f}, {self.ratio:g} times as "
                f"many; wanted no bomb: {RATIO}=N allows N times as many"
            )
        if made > self.text:
            raise TraceFileError(
                f"{path}: becomes more than {self.text / _GIB:g} GiB; {TEXT}=N allows N GiB"
            )

    def check_document(self, size: int, path: Path) -> None:
        """TraceFileError where a file that is needed as a whole is larger than it may be."""
        if size > self.document:
            raise TraceFileError(
                f"{path}: larger than {self.document / _GIB:g} GiB, and needed as a whole; "
                f"{DOCUMENT}=N allows N GiB"
            )


def _said(name: str) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text or USUAL[name])
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"{name}: found {text[:40]!r}, wanted a number above 0")
    return value


def opened(path: Path) -> BinaryIO:
    """The file, to read; OSError where it is a pipe, a device or a directory.

    Opening a pipe would wait for a writer, and it could be read only once.
    """
    if not is_local(path):
        return open_remote(path)
    # O_NONBLOCK means nothing to a regular file; Windows knows neither it nor pipes of names.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "no file")
            raise OSError(errno.EINVAL, f"{kind}; wanted a file", str(path))
        note_inputs([path])
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def check(path: Path) -> None:
    """OSError where a library that opens a file by its name should not."""
    if is_local(path):
        opened(path).close()


def text(path: Path, most: int = _LARGEST) -> str:
    """The text of a small file that a person wrote; ConfigError where it is none."""
    try:
        with opened(path) as file:
            found = file.read(most + 1)
        if len(found) > most:
            raise ConfigError(f"{path}: larger than {most} bytes; wanted a configuration")
        return found.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; wanted text") from error


def toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError where it is none."""
    return parsed_toml(text(path), str(path))


def parsed_toml(text: str, where: str) -> dict[str, Any]:
    """Return the tables of a TOML text; raise ConfigError, which names `where`, if invalid."""
    from tomllib import loads

    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from error


def json(path: Path, most: int = _LARGEST) -> Any:
    """What a small JSON file holds; ConfigError where it is none."""
    from json import loads

    try:
        return loads(text(path, most))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error


def yaml(path: Path) -> Any:
    """What a small YAML file holds, parsed safely; ConfigError where it is none, or a bomb."""
    from yaml import YAMLError, safe_load

    words = text(path)
    try:
        _check_plain(words, path)
        return safe_load(words)
    except (YAMLError, ArithmeticError, AttributeError) as error:
        raise _malformed(path, error) from error
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise _malformed(path, error) from error


def _check_plain(words: str, path: Path) -> None:
    """ConfigError for nesting and aliases that cost more than such a file may."""
    from yaml import AliasEvent, CollectionEndEvent, CollectionStartEvent, SafeLoader, parse

    aliases = depth = 0
    for event in parse(words, Loader=SafeLoader):
        aliases += isinstance(event, AliasEvent)
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        if aliases > _ALIASES or depth > _DEPTH:
            raise ConfigError(
                f"{path}: more than {_ALIASES} YAML aliases or {_DEPTH} levels; wanted plain "
                "keys and values"
            )


def _malformed(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}")


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


def open_remote(path: Path) -> BinaryIO:
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
    with open_remote(path) as file:
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
