"""A file as a stream of blocks of its text, decompressed on the way: gzip and Zstandard."""

import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fastcomm.errors import TraceFileError
from fastcomm.inputs import Limits, opened

_engine: Any
try:
    from isal import isal_zlib as _engine
except ImportError:  # no wheel for this platform: the standard library is half as fast
    _engine = zlib

BLOCK = 1 << 20
_OVERLAP = 64  # bytes of a block in which what is looked for may begin

_BROKEN: tuple[type[Exception], ...] = (zlib.error, _engine.error)
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK = 1 << 16  # what is lost of the text of a file that is cut short, at most


class CutShortError(Exception):
    """A compressed file ends before its end; what came before is whole."""


class UnreadBytesError(TraceFileError):
    """Bytes that are no gzip data follow the gzip data of a file."""

    def __init__(self, path: Path, at: int, count: int) -> None:
        super().__init__(
            f"{path}: the gzip data is corrupt from byte {at} of the file on: {count} bytes "
            "that are no gzip data"
        )
        self.at = at
        self.count = count


def blocks(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield blocks of the text of `path`; its first bytes tell whether it is compressed.

    A block is of `size` bytes at most, by default `BLOCK`.

    Raises `TraceFileError` where the file cannot be opened, its compression is corrupt or makes
    more of it than `Limits` allows, and `CutShortError`, after all that is there, where the
    compressed file is cut short; `UnreadBytesError`, after all of the text, where other bytes
    follow it in a gzip file.
    """
    size = size or BLOCK
    try:
        with opened(path) as file:
            first = file.read(max(size, len(_GZIP)))
            if first.startswith(_GZIP):
                yield from _gunzipped(file, first, path, size)
                return
            if first.startswith(_ZSTD):
                file.seek(0)
                yield from _unzstd(file, path, size)
                return
            while first:
                yield first
                first = file.read(size)
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error


def document(path: Path) -> bytes:
    """The whole text of `path`; raises as `blocks`, and where it is too large to be at once."""
    limits, parts, size = Limits.of_environment(), [], 0
    for block in blocks(path):
        size += len(block)
        limits.check_document(size, path)
        parts.append(block)
    return b"".join(parts)


def find(path: Path, pattern: re.Pattern[bytes], begin: int = 0) -> int | None:
    """Where in the text of `path`, from `begin` on, a pattern of few bytes is; None if nowhere.

    Raises `TraceFileError` as `blocks`, but not where the file only ends early or goes on.
    """
    start, text = 0, b""
    with suppress(CutShortError, UnreadBytesError):
        for block in blocks(path):
            text += block
            if found := pattern.search(text, max(0, begin - start)):
                return start + found.start()
            start += max(0, len(text) - _OVERLAP)
            text = text[-_OVERLAP:]
    return None


def _gunzipped(file: BinaryIO, data: bytes, path: Path, size: int) -> Iterator[bytes]:
    """The members of a gzip file, one after another; zeros may stand behind each."""
    member = _engine.decompressobj(_GZIP_WINDOW)
    limits, made = Limits.of_environment(), 0
    while True:
        try:
            text = member.decompress(data, size)
        except _BROKEN as error:
            raise TraceFileError(
                f"{path}: the gzip data is corrupt before byte {file.tell()} of the file "
                f"({error})"
            ) from error
        if text:
            made += len(text)
            limits.check(made, file.tell(), path)
            yield text
        data = member.unconsumed_tail
        if member.eof:
            data = _next_member(file, member.unused_data, path, size)
            if not data:
                return
            member = _engine.decompressobj(_GZIP_WINDOW)
        elif not data:
            data = file.read(size)
            if not data and not text:
                raise CutShortError


def _next_member(file: BinaryIO, data: bytes, path: Path, size: int) -> bytes:
    """Return the beginning of the next member of a gzip file; nothing where there is none.

    Raises `UnreadBytesError` where something else follows.
    """
    data = data.lstrip(b"\0")
    while len(data) < len(_GZIP) and (more := file.read(size)):
        data = (data + more).lstrip(b"\0")
    if not _GZIP.startswith(data[: len(_GZIP)]):
        at = file.tell() - len(data)
        rest = sum(map(len, iter(lambda: file.read(size), b"")))
        raise UnreadBytesError(path, at, len(data) + rest)
    return data


def _unzstd(file: BinaryIO, path: Path, size: int) -> Iterator[bytes]:
    """Yield the text of a Zstandard file."""
    import pyarrow as pa  # most traces are gzipped, and need it later or never

    limits, made = Limits.of_environment(), 0
    source = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
    while True:
        try:
            text = source.read(min(size, _ZSTD_BLOCK))
        except OSError as error:
            if "runcated" in str(error):
                raise CutShortError from error
            raise TraceFileError(
                f"{path}: the Zstandard data is corrupt before byte {file.tell()} of the file "
                f"({error})"
            ) from error
        if not text:
            return
        made += len(text)
        limits.check(made, file.tell(), path)
        yield text
