"""A file as a stream of blocks of its text, decompressed on the way."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fastcomm.errors import TraceFileError

_engine: Any
try:
    from isal import isal_zlib
except ImportError:  # no wheel for this platform: the standard library is half as fast
    _engine = zlib
else:
    _engine = isal_zlib

BLOCK = 1 << 20

_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31


class CutShortError(Exception):
    """A compressed file ends before its end; what came before is whole."""


def blocks(path: Path) -> Iterator[bytes]:
    """Blocks of the text of `path`, gzipped or not, by its first bytes and not by its name.

    Raises `TraceFileError` where the file cannot be opened or its compression is corrupt, and
    `CutShortError`, after all that is there, where the compressed file is cut short.
    """
    try:
        with path.open("rb", buffering=0) as file:
            first = file.read(BLOCK)
            if first[:2] == _GZIP:
                yield from _gunzipped(file, first, path)
                return
            while first:
                yield first
                first = file.read(BLOCK)
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error


def _gunzipped(file: BinaryIO | Any, data: bytes, path: Path) -> Iterator[bytes]:
    """The members of a gzip file, one after another."""
    member, read = _engine.decompressobj(_GZIP_WINDOW), len(data)
    while True:
        if member.eof:
            data = (member.unused_data + file.read(BLOCK)).lstrip(b"\0")
            if not data:
                return
            member = _engine.decompressobj(_GZIP_WINDOW)
        try:
            text = member.decompress(data, BLOCK)
        except (zlib.error, _engine.error) as error:
            raise TraceFileError(
                f"{path}: the gzip data is corrupt before byte {read} of the file ({error})"
            ) from error
        if text:
            yield text
        data = member.unconsumed_tail
        if not data and not member.eof:
            data = file.read(BLOCK)
            read += len(data)
            if not data and not text:
                raise CutShortError
