"""Keep the machine code of kernels on disk, and check it before it is used.

Numba's own cache trusts its files, has an index that concurrent processes may overwrite, and
requires a writable folder even if nothing is left to compile. Here each file has the code of
one kernel for one signature, its key and its checksum. Unreadable code is compiled and written
again; code that cannot be written goes to a second folder, or stays in memory. Since the code
is run, folders and files that other users own or can write to are not read.
"""

import errno
import hashlib
import logging
import multiprocessing
import os
import pickle
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

_dumps: Any = dumps
_rebuild: Any = CompileResult._rebuild
_LOG = logging.getLogger("fastcomm")
_CHECKSUM = hashlib.sha256().digest_size  # bytes
_PRIVATE, _OWN_FOLDER, _OWN_FILE = 0o700, 0o755, 0o644  # permissions
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would wait for a writer
_VERSION = f"{numba.__version__}-{sys.version_info[0]}.{sys.version_info[1]}"


class UnsafeError(OSError):
    """A folder or file that another user owns or can write to."""


@contextmanager
def _opened(path: Path, flags: int, inside: int | None = None) -> Iterator[int]:
    """Open a folder or regular file; UnsafeError if another user may have written it."""
    try:
        number = os.open(path if inside is None else path.name, flags, dir_fd=inside)
    except OSError as error:
        if path.is_symlink():
            raise UnsafeError(errno.EPERM, "is a symbolic link", str(path)) from error
        raise
    try:
        status = os.fstat(number)
        is_plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
        is_writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not is_plain or is_writable or status.st_uid not in (0, os.geteuid()):
            raise UnsafeError(
                errno.EPERM, "belongs to another user, or others can write to it", str(path)
            )
        yield number
    finally:
        os.close(number)


@contextmanager
def _opened_folder(folder: Path) -> Iterator[int]:
    """Open the folder of this version, if it and the folder of all versions are safe."""
    with (
        _opened(folder.parent, _FOLDER) as parent,
        _opened(folder, _FOLDER, parent) as number,
    ):
        yield number


def _content(path: Path) -> bytes:
    """Return the contents of a safe file."""
    with (
        _opened_folder(path.parent) as inside,
        _opened(path, _FILE, inside) as number,
        os.fdopen(number, "rb", closefd=False) as file,
    ):
        return file.read()


def _is_safe(folder: Path) -> bool:
    """Return whether code in a folder may be run."""
    with suppress(OSError), _opened_folder(folder):
        return True
    return False


class Folders:
    """The folders for code: in the user's cache, else a temporary folder, else none."""

    def __init__(self, home: Path | None, name: str) -> None:
        self._first = None if home is None else home / name
        self._name = name
        self._is_first_writable, self._is_spare_writable = True, True
        self._has_warned = False

    def _readable(self) -> Iterator[Path]:
        """Yield the folders from which code may be read."""
        if self._first is not None:
            yield self._first
        if (spare := self._spare()) is not None and _is_safe(spare):
            yield spare

    def _spare(self, *, make: bool = False) -> Path | None:
        """Return the temporary folder. Others know its name, so another user may own it."""
        try:
            folder = Path(tempfile.gettempdir()) / f"fastcomm-{os.geteuid()}"
            if make:
                folder.mkdir(mode=_PRIVATE, exist_ok=True)
        except OSError:
            return None
        return folder / self._name

    def read(self, name: str) -> bytes | None:
        """Return the data of a safe file with a valid checksum, or None."""
        damaged: list[Path] = []
        for folder in self._readable():
            try:
                content = _content(folder / name)
            except UnsafeError as error:
                self.warn(
                    f"{error.filename}: {error.strerror}; compiled code there is not used: "
                    "remove it, or set XDG_CACHE_HOME to a folder of your own"
                )
                continue
            except OSError:
                continue
            checksum, data = content[:_CHECKSUM], content[_CHECKSUM:]
            if hashlib.sha256(data).digest() == checksum:
                for other in damaged:
                    _write(other, name, content)
                return data
            self.warn(f"{folder / name}: damaged compiled code; written again")
            damaged.append(folder)
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file with its checksum to the first writable folder."""
        content = hashlib.sha256(data).digest() + data
        if self._is_first_writable:
            failure = _write(self._first, name, content)
            if not failure:
                return
            self._is_first_writable = False
            where = "a temporary folder" if self._write_spare(name, content) else "memory"
            self.warn(
                f"{failure}; compiled code is kept in {where}: set XDG_CACHE_HOME to a folder "
                "that can be written to"
            )
        else:
            self._write_spare(name, content)

    def _write_spare(self, name: str, content: bytes) -> bool:
        """Write a file to the temporary folder; return whether that succeeded."""
        if self._is_spare_writable:
            self._is_spare_writable = not _write(self._spare(make=True), name, content)
        return self._is_spare_writable

    def warn(self, message: str) -> None:
        """Log a warning once, and only in the main process."""
        if not self._has_warned and multiprocessing.parent_process() is None:
            _LOG.warning("warning: %s", message)
        self._has_warned = True

    def has(self, mark: str) -> bool:
        """Return whether an earlier process left a mark."""
        return any(
            _is_safe(folder) and (folder / f"{mark}-{_VERSION}").exists()
            for folder in self._readable()
        )

    def mark(self, mark: str) -> None:
        """Leave a mark for later processes, unless code stays in memory."""
        spare = self._spare() if self._is_spare_writable else None
        folder = self._first if self._is_first_writable else spare
        if folder is not None and _is_safe(folder):
            with suppress(OSError):
                (folder / f"{mark}-{_VERSION}").touch()

    @property
    def writable(self) -> Path | None:
        """The folder in the user's cache; None if it is not writable."""
        return self._first if self._first is not None and _is_writable(self._first) else None


def _is_writable(folder: Path) -> bool:
    """Return whether files can be created in a safe folder, which is created if missing."""
    with suppress(OSError):
        _make(folder)
    return _is_safe(folder) and os.access(folder, os.W_OK)


def _make(folder: Path) -> None:
    """Create the folder of this version, writable only by this user, whatever the umask."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for part in (folder.parent, folder):
        with suppress(FileExistsError):
            part.mkdir(mode=_OWN_FOLDER)


def _write(folder: Path | None, name: str, content: bytes) -> str:
    """Write a file atomically, by renaming it when complete; return an error text, or ""."""
    if folder is None:
        return "no folder for compiled code"
    unfinished = folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _make(folder)
        with (
            _opened_folder(folder),
            os.fdopen(os.open(unfinished, _NEW, _OWN_FILE), "wb") as file,
        ):
            file.write(content)
        unfinished.replace(folder / name)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return ""


class KernelCache(FunctionCache):
    """The code of one kernel, with the interface of numba's caches."""

    def __init__(self, function: Any, folders: Folders) -> None:
        self._py_func, self._folders = function, folders
        module = function.__module__.rpartition(".")[2]
        self._name = f"{module}.{function.__qualname__}-{function.__code__.co_firstlineno}"

    @property
    def cache_path(self) -> str | None:
        return str(self._folders.writable)

    def flush(self) -> None:
        """Do nothing: code that is compiled again overwrites its file."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code for a signature; None if it must be compiled."""
        target_context.refresh()
        key = self._key(sig, target_context.codegen())
        data = self._folders.read(self._file(key))
        if data is None:
            return None
        try:
            stored_key, payload = pickle.loads(data)
            if stored_key == key:
                return _rebuild(target_context, *payload)
        except Exception as error:
            self._folders.warn(f"{self._file(key)}: {error!r}; compiled again")
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the code that was compiled for a signature."""
        if data.lifted or data.library.has_dynamic_globals:
            return  # numba cannot keep such code
        key = self._key(sig, data.codegen)
        self._folders.write(self._file(key), _dumps((key, data._reduce())))

    def _key(self, sig: Any, codegen: Any) -> Any:
        index_key: Any = self._index_key
        return index_key(sig, codegen)

    def _file(self, key: Any) -> str:
        text = repr((key, _VERSION)).encode()
        return f"{self._name}.{hashlib.sha256(text).hexdigest()[:24]}.nbc"
