"""Write files atomically, and read foreign files up to a limit.

A command never overwrites its inputs, and reads regular files only. Limits come from the
environment, so that workers have them, too. A path is a `pathlib.Path`, or universal-pathlib's
`UPath` of a URL (s3://, gs://, memory://, ...), which has the same methods; `is_local` tells
them apart.
"""

import errno
import os
import re
import stat
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from fastcomm.errors import ConfigError, FastcommError, TraceFileError, is_utf8

# Suffix of unfinished files: hidden, and never mistaken for a part of a store.
_MARK = "unfinished"

RATIO, TEXT, DOCUMENT = (
    "FASTCOMM_MAX_RATIO",
    "FASTCOMM_MAX_TEXT_GIB",
    "FASTCOMM_MAX_DOCUMENT_GIB",
)
# Traces of profilers expand 10 to 40 times; deflate expands at most 1000 times.
USUAL = {RATIO: 200, TEXT: 64, DOCUMENT: 4}
# Fewer bytes are harmless, whatever the ratio.
SMALL = 64 << 20
_GIB = 1 << 30
_LARGEST = 1 << 20  # bytes of a configuration file
# Errors of PyYAML besides its own.
_NOT_YAML = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
_ALIASES, _DEPTH = 16, 32  # of YAML, and levels of TOML: people need fewer, a bomb more
# Numbers of YAML: no person writes more characters.
_MOST_DIGITS = 512
_NUMERIC = frozenset("0123456789abcdefABCDEFx+-_.:")
# Strings of TOML, finished or not, and keys joined by dots. Quantifiers give nothing back, so
# that the time is linear.
_QUOTED = re.compile(r"""\"(?:[^"\\]|\\.)*+"?|'[^']*+'?""")
_DEEP_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{_DEPTH}}}")
# A `Path` of a URL has only one slash.
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
    """Raise `FastcommError` if the path is a device, a FIFO, a socket or a symbolic link.

    Replacing it would remove it. Following a link would write where its maker chose.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:  # absent; or writing fails later, with the reason
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
    """Yield a temporary path that replaces `path` at the end of the block, or is removed.

    Raises `FastcommError` if the system refuses to write, `path` is no regular file, or it is
    an input of the command.
    """
    check_replaceable(path)
    check_no_input(path)
    # A process of another machine may have the same number.
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
    """Return the unfinished files of killed processes in a folder, sorted."""
    return sorted(folder.glob(f".*.{_MARK}"))


_Identity = tuple[int, int]  # device and inode, which a file shares with its links


@dataclass(slots=True)
class _Guard:
    """Inputs and outputs of the command that runs in this process."""

    inputs: dict[Path, None] = field(default_factory=dict)  # in order
    outputs: list[Path] = field(default_factory=list)


_guards: list[_Guard] = []  # the last is in use; a library call outside of a command has none


@contextmanager
def guarded() -> Iterator[None]:
    """Protect the inputs of one command against its outputs until the end of the block."""
    _guards.append(_Guard())
    try:
        yield
    finally:
        _guards.pop()


@contextmanager
def unguarded() -> Iterator[None]:
    """Suspend the protection for a command that reads and rewrites its own files."""
    noted = _guards.copy()
    _guards.clear()
    try:
        yield
    finally:
        _guards[:] = noted


def note_inputs(paths: Iterable[Path]) -> None:
    """Note files that a command reads. Raises `FastcommError` if one is an output."""
    if not _guards:
        return
    guard, new = _guards[-1], list(paths)
    guard.inputs.update(dict.fromkeys(new))
    for output in guard.outputs:
        refuse_inputs(output, new)


def note_output(path: Path) -> None:
    """Note a file that a command will write. Raises `FastcommError` if it is an input."""
    if _guards:
        _guards[-1].outputs.append(path)
        check_no_input(path)


def check_no_input(path: Path) -> None:
    """Raise `FastcommError` if the path is an input of the command, or lies in one."""
    if _guards:
        refuse_inputs(path, _guards[-1].inputs)


def refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Raise `FastcommError` if `output` is one of the inputs, or lies in one."""
    place = output.parent.resolve() / output.name
    folders = {*output.absolute().parents, *place.parents}
    same = _identity(output)  # None: without a file of that name, only a folder can be an input
    for path in inputs:
        if path.absolute() in folders or (same is not None and _identity(path) == same):
            raise FastcommError(
                f"{output}: not written, this command reads {path}; name another output"
            )


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of decompressed files and of documents that are read into memory."""

    ratio: float  # decompressed bytes by bytes of the file
    text: float  # decompressed bytes of one file
    document: float  # bytes of a file that is in memory as a whole

    @classmethod
    def of_environment(cls) -> Self:
        """Read the limits from the environment. Raises `ConfigError` if one is invalid."""
        ratio, text, document = map(_limit, USUAL)
        return cls(ratio=ratio, text=text * _GIB, document=document * _GIB)

    def check(self, expanded: float, size: int, path: Path) -> None:
        """Refuse a file of `size` bytes that expands too much, as a decompression bomb does.

        Raises `TraceFileError` if `expanded`, the decompressed bytes so far, exceeds the ratio
        or the size that is allowed.
        """
        if expanded > max(SMALL, self.ratio * size):
            raise TraceFileError(
                f"{path}: possibly a decompression bomb: {size} bytes expand to {expanded:.0f} "
                f"or more, over {self.ratio:g} times as many. Set {RATIO}=N to allow N times"
            )
        if expanded > self.text:
            raise TraceFileError(
                f"{path}: expands to more than {self.text / _GIB:g} GiB. Set {TEXT}=N to allow "
                "N GiB"
            )

    def check_document(self, size: int, path: Path) -> None:
        """Raise `TraceFileError` for a file of `size` bytes that does not fit into memory."""
        if size > self.document:
            raise TraceFileError(
                f"{path}: larger than {self.document / _GIB:g} GiB, and must be read as a "
                f"whole. Set {DOCUMENT}=N to allow N GiB"
            )


def _limit(name: str) -> float:
    """Return a limit from the environment variable `name`; its value in `USUAL` if unset.

    Raises `ConfigError` unless it is a number above 0.
    """
    text = os.environ.get(name, "")
    try:
        value = float(text or USUAL[name])
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"invalid {name} {text[:40]!r}: expected a number above 0")
    return value


def opened(path: Path) -> BinaryIO:
    """Open a regular file or a URL for reading.

    Raises `OSError` if it cannot be opened, or is a directory, a device or a pipe: opening a
    pipe would wait for a writer, and it could be read only once.
    """
    if not is_local(path):
        return open_remote(path)
    file = open(path, "rb", opener=_open_regular)  # noqa: SIM115 - the caller closes it
    try:
        note_inputs([path])
    except FastcommError:
        file.close()
        raise
    return file


def _open_regular(name: str, flags: int) -> int:
    """Return the descriptor of a regular file. Raises `OSError` for any other kind.

    Files of the system itself, as in /proc, count as another kind: some never end or answer.

    It is closed here or by the file object, never by both: Ctrl-C at any moment must not turn
    into the error that a descriptor is closed already.
    """
    # O_NONBLOCK means nothing to a regular file. Windows has neither it nor named pipes.
    number = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    status = os.fstat(number)
    mode = status.st_mode
    if not stat.S_ISREG(mode) or status.st_dev in _system_devices():
        os.close(number)
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a system file")
        raise OSError(errno.EINVAL, f"is {kind}: expected a regular file", str(name))
    return number


@cache
def _system_devices() -> frozenset[int]:
    """Return the devices of the file systems whose files the kernel makes up."""
    folders = (Path("/proc"), Path("/sys"))
    return frozenset(folder.stat().st_dev for folder in folders if folder.is_mount())


@cache
def fast_gzip() -> Any:
    """Return the module that writes gzip: isal's, or the standard library's without a wheel."""
    try:
        from isal import igzip
    except ImportError:
        import gzip

        return gzip
    return igzip


@cache
def fast_zlib() -> Any:
    """Return the module that inflates, deflates and sums up; see `fast_gzip`."""
    try:
        from isal import isal_zlib
    except ImportError:
        import zlib

        return zlib
    return isal_zlib


def check(path: Path) -> None:
    """Raise `OSError` for a local path that is no regular file, before a library opens it."""
    if is_local(path):
        opened(path).close()


def text(path: Path, most: int = _LARGEST) -> str:
    """Read a small UTF-8 file, such as a configuration, or UTF-16 with a byte order mark.

    Raises `ConfigError` if it cannot be read, is larger than `most` bytes, or is not such text.
    """
    try:
        with opened(path) as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ConfigError(f"{path}: larger than {most} bytes: expected a small text file")
        is_wide = content[:2] in {BOM_UTF16_LE, BOM_UTF16_BE}
        return content.decode("utf-16" if is_wide else "utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        name = "UTF-16" if error.encoding.startswith("utf-16") else "UTF-8"
        message = f"{path}: byte {error.start} is not {name}: expected text"
        raise ConfigError(message) from error


def toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file. Raises `ConfigError` if it is unreadable or invalid."""
    return parsed_toml(text(path), str(path))


def parsed_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML text. Raises `ConfigError`, which begins with `where`, if it is invalid."""
    from tomllib import loads

    if any(_has_deep_key(line) for line in text.split("\n")):
        raise ConfigError(f"{where}: a key of more than {_DEPTH} levels: expected plain tables")
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from error


def _has_deep_key(line: str) -> bool:
    """Whether a line of TOML has a key of many levels, which would take time with their square.

    The levels of a key stand on one line.
    """
    if line.count(".") < _DEPTH:
        return False
    plain = _QUOTED.sub("q", line).partition("#")[0]
    return _DEEP_KEY.search(plain) is not None


def json(path: Path, most: int = _LARGEST) -> Any:
    """Read a JSON file of at most `most` bytes. Raises `ConfigError` if it is invalid."""
    from json import loads

    try:
        return loads(text(path, most))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error


def yaml(path: Path) -> Any:
    """Read a small YAML file safely. Raises `ConfigError` if it is invalid or a bomb."""
    from yaml import YAMLError, safe_load

    content = text(path)
    try:
        _check_plain(content, path)
        return safe_load(content)
    except (YAMLError, *_NOT_YAML) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: not YAML: {reason}") from error


def _check_plain(content: str, path: Path) -> None:
    """Raise `ConfigError` for deep nesting or many aliases, as a YAML bomb has."""
    from yaml import (
        AliasEvent,
        CollectionEndEvent,
        CollectionStartEvent,
        SafeLoader,
        ScalarEvent,
        parse,
    )

    aliases = depth = 0
    for event in parse(content, Loader=SafeLoader):
        aliases += isinstance(event, AliasEvent)
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        if isinstance(event, ScalarEvent) and _is_long_number(event):
            raise ConfigError(f"{path}: a number of {len(event.value)} characters")
        if aliases > _ALIASES or depth > _DEPTH:
            raise ConfigError(
                f"{path}: more than {_ALIASES} YAML aliases or {_DEPTH} levels: expected plain "
                "keys and values"
            )


def is_special(path: Path) -> bool:
    """Whether a local path is a device, a pipe or a socket, also through a link."""
    try:
        mode = path.stat().st_mode if is_local(path) else 0
    except OSError:
        return False
    return bool(mode) and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _is_long_number(scalar: Any) -> bool:
    """Whether a scalar may be a number, in base 60 too, that takes long to convert."""
    is_plain = scalar.style is None and len(scalar.value) > _MOST_DIGITS
    return is_plain and not set(scalar.value) - _NUMERIC


def is_url(path: object) -> bool:
    """Whether a path of a user is a URL."""
    return "://" in str(path)


def is_local(path: Path) -> bool:
    """Whether a path is in the file system of this machine, not a URL."""
    return isinstance(path, Path)


def place(name: str | Path) -> Path:
    """Convert a name or URL of a user to a path.

    Raises `ConfigError` if a URL is invalid, or the package for its kind is not installed.
    """
    if not isinstance(name, str) or not is_url(name):
        return name if not isinstance(name, str) else Path(name)
    try:
        from upath import UPath
    except ImportError as error:
        raise ConfigError(f"{name}: URLs need an extra: {_EXTRA} ({error})") from error
    try:
        path = UPath(name)
        _ = path.fs  # imports the package that reads it
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{name}: {error}: expected a URL of fsspec whose package is installed, such as "
            "s3fs for s3://, gcsfs for gs://"
        ) from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # raised by the package for that kind of URL
        raise FastcommError(f"{name}: {type(error).__name__}: {error}") from error
    return cast("Path", path)


def matches(url: str) -> list[Path]:
    """Return the sorted paths that a URL with wildcards matches; none without wildcards."""
    if not any(mark in url for mark in "*?["):
        return []
    import fsspec

    place(url)
    system, pattern = fsspec.core.url_to_fs(url)
    return [place(system.unstrip_protocol(name)) for name in sorted(system.glob(pattern))]


def open_remote(path: Path) -> BinaryIO:
    """Open a remote file for reading. Raises `OSError` for any failure but `MemoryError`."""
    try:
        return cast("BinaryIO", path.open("rb"))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # raised by the package for that kind of URL
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def named(path: Path) -> Iterator[Path | BinaryIO]:
    """Yield the path if a library can open it by name, else an open file."""
    if is_local(path) and is_utf8(str(path)):
        yield path
        return
    with open_remote(path) as file:
        yield file


def refuse_output(option: str, name: object) -> None:
    """Raise `ConfigError` if the name of an output is empty or a URL."""
    if not str(name):
        raise ConfigError(f"invalid {option} '': expected a file or a directory")
    if _LIKE_URL.match(str(name)):
        raise ConfigError(
            f"{option} {name}: a URL can be read and not written. Name a path on this machine, "
            "or in a file system that the workers share"
        )
