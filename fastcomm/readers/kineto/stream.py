"""Read a Kineto file as decompressed blocks of text, and the members around its events.

A `TextWindow` is the part of a text that is at hand while a kernel scans it.
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
_OVERLAP = 64  # bytes of a block in which what is looked for may begin

_BROKEN: tuple[type[Exception], ...] = (zlib.error, _engine.error)
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK = 1 << 16  # what is lost of the text of a file that is cut short, at most

# Most of it is never touched; but an allocator that has seen it freed once keeps as much at
# hand, and the next of thousands of files finds its pages there.
_WINDOW = 1 << 23


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

    That is where the last group of the pattern begins, or the pattern, if it has none.

    Raises `TraceFileError` as `blocks`, but not where the file only ends early or goes on.
    """
    start, text = 0, b""
    with suppress(CutShortError, UnreadBytesError):
        for block in blocks(path):
            text += block
            if found := pattern.search(text, max(0, begin - start)):
                return start + found.start(pattern.groups)
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

    Raises `UnreadBytesError` where something else follows, and `TraceFileError` where that is
    another document.
    """
    data = data.lstrip(b"\0")
    while len(data) < len(_GZIP) and (more := file.read(size)):
        data = (data + more).lstrip(b"\0")
    if not _GZIP.startswith(data[: len(_GZIP)]):
        at = file.tell() - len(data)
        if begins_document(data.lstrip(NOTHING)):
            raise TraceFileError(
                f"{path}: a second document begins at byte {at} of the file, behind the gzip "
                "data; wanted one trace in a file. Split it into a file a rank"
            )
        rest = sum(map(len, iter(lambda: file.read(size), b"")))
        raise UnreadBytesError(path, at, len(data) + rest)
    return data


def begins_document(text: bytes) -> bool:
    """Whether what stands behind a document begins another one, compressed or not."""
    return _DOCUMENT.match(text) is not None


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


LIMIT = 1 << 26

_MOST_LISTS = 64  # each costs a look at the text before it

_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
NOTHING = _BOM + _BLANKS + b"\0"  # between documents
_BEFORE = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*")
_KEY = b'"traceEvents"'
# A list of events may follow another one as a part of it would, or behind a stray bracket.
_DOCUMENT = re.compile(rb"[{\[]|[\s,;\]]*\[\s*\{|" + re.escape(_GZIP) + b"|" + re.escape(_ZSTD))
_LIST = re.compile(rb"\s*(?::\s*(\[)?)?")
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(-?\d{1,19})\b')
_INFO = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_MISSING = re.compile(rb":\s*(?=[,}])")
_MAYBE_END = re.compile(rb"\](?=\s*(?:[\"}]|,\s*\"|\0*$))")
# Where neither a value nor another event can begin: a list behind a trace that is a bare list.
BARE_LIST = re.compile(rb"(?:\][\s,;]*|[^:,\[\s]\s*)(\[)\s*\{")
EVENTS_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_BEGIN = re.compile(rb'\{\s*"schemaVersion"\s*:')
# It matches an unfinished string, too: so it never looks at a byte twice.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_EVENT = re.compile(rb'"ph"\s*:\s*"X"')


class CutError(Exception):
    """The outer object ends before its end."""


class DamagedError(Exception):
    """The outer object is no valid JSON."""


class NestedError(Exception):
    """The list is not that of the outer object."""


def begins(text: bytes) -> bool:
    """Whether a text may be the beginning of a trace."""
    start = _start(text)
    return text[start : start + 1] in (b"", b"{", b"[") or _BOM.startswith(text)


def _start(text: bytes) -> int:
    """Where the first character is; the text, which may be long, is copied nowhere."""
    return _BEFORE.match(text).end()  # type: ignore[union-attr]


def events_begin(text: bytes, look_from: int, *, nested: bool = False) -> int:
    """Where the list of events begins; else ``~index`` of where to look in a longer text.

    A list inside an inner object counts only if `nested`.
    """
    start = _start(text)
    if text.startswith(b"[", start):
        return start + 1
    for _ in range(_MOST_LISTS):
        key = text.find(_KEY, look_from)
        if key < 0:
            break
        found = _LIST.match(text, key + len(_KEY))
        look_from = found.end() if found else key + len(_KEY)
        if found and found[1] and (nested or not is_inner(text[start:key])):
            return look_from
        if look_from == len(text):
            return ~key
    return ~max(look_from, len(text) - len(_KEY), 0)


def is_inner(before: bytes) -> bool:
    """Whether a key behind this text belongs to an object inside the outer one."""
    with suppress(orjson.JSONDecodeError):  # most texts are settled so, fast
        return not isinstance(orjson.loads(before + b'"":0}'), dict)
    outside = _STRING.sub(b"", before)
    return outside.count(b"{") - outside.count(b"}") > 1


def members(head: bytes, tail: bytes) -> dict[str, Any]:
    """The members of the outer object; none where the list is all there is.

    Raises `CutError`, `DamagedError` or `NestedError` where there is no such object.
    """
    return _parsed(head.removeprefix(_BOM) + b"]" + tail.rstrip(_BLANKS + b"\0"))


def _parsed(text: bytes | memoryview) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        cut = text[-1:] not in (b"}", b"]") or "unexpected end" in str(error)
        if cut and bytes(text[:64]).lstrip(_BLANKS).startswith(b"{"):
            raise CutError from error
        raise DamagedError(str(error)) from error
    if isinstance(found, list):
        return {}
    if found.get("traceEvents") != []:
        raise NestedError('"traceEvents" is not a key of the outer object')
    return dict(found)


def document_end(head: bytes, tail: bytes) -> int | None:
    """Where in `tail` the outer value ends; None where JSON does not say."""
    text = (head.removeprefix(_BOM) + b"]" + tail).decode("latin-1")  # a character a byte
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return None
    return end - len(text.lstrip()) + len(tail)


def second_begin(head: bytes) -> int | None:
    """Where in `head` another outer object begins; None where none does."""
    end = document_end(head, b"")
    if end is not None and end < 0:
        behind = head[end + 1 :].lstrip(NOTHING)
        return len(head) - len(behind)
    begins = [found.start() for found in _BEGIN.finditer(head)]
    return begins[1] if len(begins) > 1 else None


def second_list(tail: bytes) -> int | None:
    """Where in `tail` another list of events begins; None where there is none."""
    found = EVENTS_LIST.search(tail)
    return found and found.start()


def holds_events(tail: bytes) -> bool:
    """Whether there are events in what should be behind them."""
    return _EVENT.search(tail) is not None


def tail_in(head: bytes, rest: bytes) -> bytes | None:
    """What is behind the list if that ends somewhere in `rest`, which begins with damage."""
    before = head.removeprefix(_BOM) + b"]"
    text = bytearray(len(before)) + rest.rstrip(_BLANKS + b"\0")
    for place, _ in zip(_MAYBE_END.finditer(rest), range(256), strict=False):
        # What is overwritten is behind us; the rest, which may be long, is copied nowhere.
        text[place.end() : place.end() + len(before)] = before
        with suppress(CutError, DamagedError):
            _parsed(memoryview(text)[place.end() :])
            return rest[place.end() :]
    return None


def known_members(text: bytes) -> dict[str, Any]:
    """The members of an invalid outer object, or of its beginning, that matter most."""
    known: dict[str, Any] = {}
    if base := _BASE.search(text):
        known["baseTimeNanoseconds"] = int(base[1])
    if info := _INFO.search(text):
        inside = text[info.end() :]
        for attempt in (inside, _MISSING.sub(b": null", inside)):
            try:
                known["distributedInfo"], _ = json.JSONDecoder().raw_decode(
                    attempt.decode(errors="replace")
                )
                break
            except (ValueError, RecursionError):
                continue
    return known


@dataclass(slots=True)
class TextWindow:
    """The part of the text that is at hand: `n` bytes, and NULs that a kernel may look at."""

    source: Iterator[bytes]
    text: NDArray[np.uint8] = field(default_factory=lambda: np.empty(_WINDOW, np.uint8))
    n: int = 0
    base: int = 0  # where in the file the window begins
    cut: bool = False  # a compressed file ended early
    behind: UnreadBytesError | None = None  # what follows the end of the gzip data

    def more(self, keep_from: int) -> bool:
        """Forget what is before `keep_from` and append a block; False at the end.

        At least as much comes as is left: what is long is not read over and over.
        """
        rest = self.n - keep_from
        self.text[:rest] = self.text[keep_from : self.n].copy()
        self.base += keep_from
        self.n = rest
        while self.n < max(1, 2 * rest) and (block := self._next()):
            self._append(block)
        self.text[self.n : self.n + PADDING] = 0
        return self.n > rest

    def _next(self) -> bytes:
        try:
            return next(self.source, b"")
        except CutShortError:
            self.cut = True
        except UnreadBytesError as error:
            self.behind = error
        return b""

    def _append(self, block: bytes) -> None:
        size = self.n + len(block)
        if size + PADDING > len(self.text):
            wider = np.empty(2 * size + PADDING, np.uint8)
            wider[: self.n] = self.text[: self.n]
            self.text = wider
        self.text[self.n : size] = np.frombuffer(block, np.uint8)
        self.n = size

    def bytes(self) -> bytes:
        """Return a copy of the text at hand."""
        return self.text[: self.n].tobytes()
