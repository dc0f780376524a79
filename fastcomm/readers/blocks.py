"""A file as a stream of blocks of its text, decompressed on the way: gzip and Zstandard."""

import zlib
from collections.abc import Iterator
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

_BROKEN: tuple[type[Exception], ...] = (zlib.error, _engine.error)
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK = 1 << 16  # what is lost of the text of a file that is cut short, at most


class CutShortError(Exception):
    """A compressed file ends before its end; what came before is whole."""


def blocks(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield blocks of the text of `path`; its first bytes tell whether it is compressed.

    A block is of `size` bytes at most, by default `BLOCK`.

    Raises `TraceFileError` where the file cannot be opened, its compression is corrupt or makes
    more of it than `Limits` allows, and `CutShortError`, after all that is there, where the
    compressed file is cut short.
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
            data = member.unused_data.lstrip(b"\0")
            while not data:
                data = file.read(size)
                if not data:
                    return
                data = data.lstrip(b"\0")
            member = _engine.decompressobj(_GZIP_WINDOW)
        elif not data:
            data = file.read(size)
            if not data and not text:
                raise CutShortError


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
