"""Read a file as decompressed blocks of text.

Offsets are bytes of the decompressed text, unless they are said to be of the file.
A `TextWindow` is the part of a text in memory that a kernel scans.
"""

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.files import Limits, fast_zlib, opened
from fastcomm_kernels._llvm import PADDING

_engine = fast_zlib()
BLOCK = 1 << 20
BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r\n"
NOTHING = BOM + BLANKS + b"\0"  # bytes without meaning between documents
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
# A second list of events may follow a comma or a stray bracket.
_DOCUMENT = re.compile(rb"[{\[]|[\s,;\]]*\[\s*\{|" + re.escape(_GZIP) + b"|" + re.escape(_ZSTD))
_OVERLAP = 64  # bytes of a block that are searched with the next one
_BROKEN: tuple[type[Exception], ...] = (zlib.error, _engine.error)
_GZIP_WINDOW = 31
_ZSTD_BLOCK = 1 << 16  # most bytes of text that a truncated file loses
# Larger than most files need: allocators reuse a buffer of this size, with its pages, for the
# next of thousands of files.
_WINDOW = 1 << 23


class CutShortError(Exception):
    """A compressed file is truncated; all blocks before are valid."""


class UnreadBytesError(TraceFileError):
    """Other bytes follow the gzip data of a file."""

    def __init__(self, path: Path, at: int, count: int) -> None:
        """Name `count` bytes that are no gzip data, from byte `at` of the file on."""
        super().__init__(
            f"{path}: the gzip data is corrupt from byte {at} of the file on: {count} bytes "
            "that are not gzip data"
        )
        self.at = at
        self.count = count


def begins_document(text: bytes) -> bool:
    """Return whether text behind a document begins another one, compressed or not."""
    return _DOCUMENT.match(text) is not None


def blocks(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield blocks of the text of a file, which may be compressed, whatever its name is.

    Parameters
    ----------
    path
        The file.
    size
        Most bytes of a block; by default `BLOCK`.

    Raises
    ------
    TraceFileError
        If the file cannot be opened, its compression is corrupt, or its text is longer than
        `Limits` allows.
    CutShortError
        After all readable text, if the compressed file is truncated.
    UnreadBytesError
        After all text, if other bytes follow the gzip data.

    """
    try:
        with opened(path) as file:
            yield from blocks_of(file, path, size)
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error


def blocks_of(file: BinaryIO, path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield what `blocks` does of a file that is open at its begin. Raises OSError, too."""
    size = size or BLOCK
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


def tail(path: Path, size: int) -> bytes:
    """Return the last `size` bytes of the text of a file, or all of a shorter one.

    A compressed file is decompressed for that; if it is truncated, its text may end anywhere.
    Raises `TraceFileError` as `blocks` does.
    """
    try:
        with opened(path) as file:
            if not file.read(len(_ZSTD)).startswith((_GZIP, _ZSTD)):
                file.seek(max(0, file.seek(0, os.SEEK_END) - size))
                return file.read()
    except OSError as error:
        raise TraceFileError(f"{path}: {error.strerror or error}") from error
    text = b""
    with suppress(CutShortError, UnreadBytesError):
        for block in blocks(path):
            text = (text + block)[-size:]
    return text


def document(path: Path) -> bytes:
    """Return the whole text of a file.

    Raises what `blocks` raises, and `TraceFileError` for a text that is too long for memory.
    """
    limits, parts, size = Limits.of_environment(), [], 0
    for block in blocks(path):
        size += len(block)
        limits.check_document(size, path)
        parts.append(block)
    return b"".join(parts)


def find(path: Path, pattern: re.Pattern[bytes], begin: int = 0) -> int | None:
    """Return the offset of the first match of a short pattern in the text of a file, or None.

    Parameters
    ----------
    path
        The file.
    pattern
        Pattern of a few bytes; if it has groups, the offset is that of the last group.
    begin
        Offset at which the search begins.

    Raises
    ------
    TraceFileError
        As `blocks`; truncated files and other bytes behind gzip data are not errors.

    """
    start, text = 0, b""
    with suppress(CutShortError, UnreadBytesError):
        for block in blocks(path):
            text += block
            if match := pattern.search(text, max(0, begin - start)):
                return start + match.start(pattern.groups)
            start += max(0, len(text) - _OVERLAP)
            text = text[-_OVERLAP:]
    return None


def _gunzipped(file: BinaryIO, data: bytes, path: Path, size: int) -> Iterator[bytes]:
    """Yield the text of the members of a gzip file; zeros may follow each member."""
    member = _engine.decompressobj(_GZIP_WINDOW)
    limits, total = Limits.of_environment(), 0
    while True:
        try:
            text = member.decompress(data, size)
        except _BROKEN as error:
            raise TraceFileError(
                f"{path}: the gzip data is corrupt before byte {file.tell()} of the file "
                f"({error})"
            ) from error
        if text:
            total += len(text)
            limits.check(total, file.tell(), path)
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
    """Return the beginning of the next member of a gzip file; empty if there is none.

    `data` is what was read behind the last member, `size` is the bytes of a read. Raises
    `UnreadBytesError` if other bytes follow, and `TraceFileError` if they are another document.
    """
    data = data.lstrip(b"\0")
    while len(data) < len(_GZIP) and (more := file.read(size)):
        data = (data + more).lstrip(b"\0")
    if not _GZIP.startswith(data[: len(_GZIP)]):
        offset = file.tell() - len(data)
        if begins_document(data.lstrip(NOTHING)):
            raise TraceFileError(
                f"{path}: a second document begins at byte {offset} of the file, behind the "
                "gzip data. Split the file into one file per rank"
            )
        unread = sum(map(len, iter(lambda: file.read(size), b"")))
        raise UnreadBytesError(path, offset, len(data) + unread)
    return data


def _unzstd(file: BinaryIO, path: Path, size: int) -> Iterator[bytes]:
    """Yield the decompressed text of a Zstandard file in blocks of at most `size` bytes.

    Raises `CutShortError` if the file is truncated, and `TraceFileError` if it is corrupt.
    """
    import pyarrow as pa  # slow import; most traces are gzipped

    limits, total = Limits.of_environment(), 0
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
        total += len(text)
        limits.check(total, file.tell(), path)
        yield text


@dataclass(slots=True)
class TextWindow:
    """A moving part of the text: `n` bytes, followed by NULs that kernels may read."""

    source: Iterator[bytes]
    text: NDArray[np.uint8] = field(default_factory=lambda: np.empty(_WINDOW, np.uint8))
    n: int = 0
    base: int = 0  # offset of the window in the text
    cut: bool = False  # whether a compressed file ended early
    behind: UnreadBytesError | None = None  # other bytes follow the gzip data

    def more(self, keep_from: int) -> bool:
        """Drop the text before `keep_from` and append blocks; return False at the end.

        At least as much text is appended as is kept, so that long events are not scanned
        repeatedly.
        """
        remaining = self.n - keep_from
        self.text[:remaining] = self.text[keep_from : self.n].copy()
        self.base += keep_from
        self.n = remaining
        while self.n < max(1, 2 * remaining) and (block := self._next()):
            self._append(block)
        self.text[self.n : self.n + PADDING] = 0
        return self.n > remaining

    def _next(self) -> bytes:
        """Return the next block; b"" at the end, where damage is recorded, not raised."""
        try:
            return next(self.source, b"")
        except CutShortError:
            self.cut = True
        except UnreadBytesError as error:
            self.behind = error
        return b""

    def _append(self, block: bytes) -> None:
        """Append a block to the text; double the array if it is too small."""
        size = self.n + len(block)
        if size + PADDING > len(self.text):
            wider = np.empty(2 * size + PADDING, np.uint8)
            wider[: self.n] = self.text[: self.n]
            self.text = wider
        self.text[self.n : size] = np.frombuffer(block, np.uint8)
        self.n = size

    def bytes(self) -> bytes:
        """Return a copy of the text in the window."""
        return self.text[: self.n].tobytes()
