"""Read a Kineto file as decompressed blocks of text, and the members around its events.

Offsets are bytes of the decompressed text, unless they are said to be of the file.
A `TextWindow` is the part of a text in memory that a kernel scans.
"""

import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.files import Limits, opened
from fastcomm_kernels._llvm import PADDING

_engine: Any
try:
    from isal import isal_zlib as _engine
except ImportError:  # no wheel for this platform: the standard library is half as fast
    _engine = zlib

BLOCK = 1 << 20
_OVERLAP = 64  # bytes of a block that are searched with the next one

_BROKEN: tuple[type[Exception], ...] = (zlib.error, _engine.error)
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
_ZSTD = b"\x28\xb5\x2f\xfd"
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

    Raises `UnreadBytesError` if other bytes follow, and `TraceFileError` if they are another
    document.
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


def begins_document(text: bytes) -> bool:
    """Return whether text behind a document begins another one, compressed or not."""
    return _DOCUMENT.match(text) is not None


def _unzstd(file: BinaryIO, path: Path, size: int) -> Iterator[bytes]:
    """Yield the text of a Zstandard file."""
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


LIMIT = 1 << 26

_MOST_LISTS = 64  # each one costs a scan of the text before it

_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
NOTHING = _BOM + _BLANKS + b"\0"  # bytes without meaning between documents
_BEFORE = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*")
_KEY = b'"traceEvents"'
# A second list of events may follow a comma or a stray bracket.
_DOCUMENT = re.compile(rb"[{\[]|[\s,;\]]*\[\s*\{|" + re.escape(_GZIP) + b"|" + re.escape(_ZSTD))
_LIST = re.compile(rb"\s*(?::\s*(\[)?)?")
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(-?\d{1,19})\b')
_INFO = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_MISSING = re.compile(rb":\s*(?=[,}])")
_MAYBE_END = re.compile(rb"\](?=\s*(?:[\"}]|,\s*\"|\0*$))")
# A list behind a trace that is a bare list: no value or event can begin there.
BARE_LIST = re.compile(
    rb"(?:\][\s,;]*|[^:,\[\s]\s*)(\[)\s*\{\s*"
    rb'"(?:ph|name|cat|pid|tid|ts|dur|id|bp|s|args)"\s*:'
)
EVENTS_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BEGIN = re.compile(rb'\{\s*"schemaVersion"\s*:')
# Unfinished strings match as well, which keeps the time linear.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_EVENT = re.compile(rb'"ph"\s*:\s*"X"')


class CutError(Exception):
    """The outer object is truncated."""


class DamagedError(Exception):
    """The outer object is not valid JSON."""


class NestedError(Exception):
    """The list of events is not a member of the outer object."""


def begins(text: bytes) -> bool:
    """Return whether a text may be the beginning of a trace."""
    start = _start(text)
    return text[start : start + 1] in (b"", b"{", b"[") or _BOM.startswith(text)


def _start(text: bytes) -> int:
    """Return the offset of the first character, without copying the text."""
    return _BEFORE.match(text).end()  # type: ignore[union-attr]


def events_begin(text: bytes, look_from: int, *, nested: bool = False) -> int:
    """Return the offset of the list of events, or ``~offset`` where to search a longer text.

    Parameters
    ----------
    text
        The beginning of a trace.
    look_from
        Offset at which the search begins.
    nested
        Whether a list inside an inner object counts.

    """
    start = _start(text)
    if text.startswith(b"[", start):
        return start + 1
    for _ in range(_MOST_LISTS):
        key = text.find(_KEY, look_from)
        if key < 0:
            break
        match = _LIST.match(text, key + len(_KEY))
        look_from = match.end() if match else key + len(_KEY)
        if match and match[1] and (nested or not is_inner(text[start:key])):
            return look_from
        if look_from == len(text):
            return ~key
    return ~max(look_from, len(text) - len(_KEY), 0)


def is_inner(before: bytes) -> bool:
    """Return whether a key behind a text belongs to an object inside the outer one."""
    with suppress(orjson.JSONDecodeError):  # fast, and decides most texts
        return not isinstance(orjson.loads(before + b'"":0}'), dict)
    outside = _STRING.sub(b"", before)
    return outside.count(b"{") - outside.count(b"}") > 1


def members(head: bytes, tail: bytes) -> dict[str, Any]:
    """Return the members of the outer object, with an empty list of events.

    Parameters
    ----------
    head, tail
        The text before the first event, and the text behind the list's end.

    Returns
    -------
    dict
        Empty if the trace is a bare list.

    Raises
    ------
    CutError, DamagedError, NestedError
        If the text is truncated, is not JSON, or the list belongs to an inner object.

    """
    return _parsed(head.removeprefix(_BOM) + b"]" + tail.rstrip(_BLANKS + b"\0"))


def _parsed(text: bytes | memoryview) -> dict[str, Any]:
    """Parse a document whose list of events was cut out; {} if it is an array."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        cut = text[-1:] not in (b"}", b"]") or "unexpected end" in str(error)
        if cut and bytes(text[:64]).lstrip(_BLANKS).startswith(b"{"):
            raise CutError from error
        raise DamagedError(str(error)) from error
    if isinstance(value, list):
        return {}
    if value.get("traceEvents") != []:
        raise NestedError('"traceEvents" is not a key of the outer object')
    return dict(value)


def document_end(head: bytes, tail: bytes) -> int | None:
    """Return the offset in `tail` at which the outer value ends; None if it is not JSON."""
    text = (head.removeprefix(_BOM) + b"]" + tail).decode("latin-1")  # a character a byte
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return end - len(text.lstrip()) + len(tail)


def second_begin(head: bytes) -> int | None:
    """Return the offset in `head` at which another outer object begins, or None."""
    end = document_end(head, b"")
    if end is not None and end < 0:
        behind = head[end + 1 :].lstrip(NOTHING)
        return len(head) - len(behind)
    begins = [match.start() for match in _BEGIN.finditer(head)]
    return begins[1] if len(begins) > 1 else None


def second_list(tail: bytes) -> int | None:
    """Return the offset in `tail` of another list of events, or None."""
    match = EVENTS_LIST.search(tail)
    return match and match.start()


def holds_events(tail: bytes) -> bool:
    """Return whether the text that should follow the events has events."""
    return _EVENT.search(tail) is not None


def tail_in(head: bytes, text: bytes) -> bytes | None:
    """Return the text behind the list's end, if that is in `text`, which begins damaged."""
    before = head.removeprefix(_BOM) + b"]"
    buffer = bytearray(len(before)) + text.rstrip(_BLANKS + b"\0")
    for match, _ in zip(_MAYBE_END.finditer(text), range(256), strict=False):
        # The head is written over text that is done with, so that nothing long is copied.
        buffer[match.end() : match.end() + len(before)] = before
        with suppress(CutError, DamagedError):
            _parsed(memoryview(buffer)[match.end() :])
            return text[match.end() :]
    return None


def recovered_members(text: bytes) -> dict[str, Any]:
    """Return the main members of an outer object that is invalid or truncated."""
    recovered: dict[str, Any] = {}
    if base := _BASE.search(text):
        recovered["baseTimeNanoseconds"] = int(base[1])
    if info := _INFO.search(text):
        inside = text[info.end() :]
        for attempt in (inside, _MISSING.sub(b": null", inside)):
            try:
                recovered["distributedInfo"], _ = json.JSONDecoder().raw_decode(
                    attempt.decode(errors="replace")
                )
                break
            except (ValueError, RecursionError):
                continue
    return recovered


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
