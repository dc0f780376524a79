"""Chrome-trace JSON: a stream of text becomes columns, block by block.

Memory is the kept columns and a block or two, whatever the size of the file.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers.blocks import CutShortError, blocks
from fastcomm_kernels import json_scan, words
from fastcomm_kernels._llvm import STEP

_EVENTS = re.compile(rb'^(?:\xef\xbb\xbf)?\s*\[|"traceEvents"\s*:\s*\[')
_PHASE = re.compile(rb'[{,]\s*"ph"\s*:\s*"[A-Za-z]"')
_ENVELOPE_LIMIT = 1 << 26
_CHUNK = 1 << 15
_TEXT_LIMIT = 1 << 30

# The type of each column of a row once it is kept.
_NARROW = {"kind": np.int8, "name": np.int32, "detail": np.int32}
_COLUMNS = ("kind", "name", "process", "thread", "start", "stop", "offset", "detail")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which events and which of their args are kept."""

    kinds: dict[bytes, int]  # value of `cat` -> number of the kind
    keep: Sequence[int]  # by kind; the last is for unknown kinds
    prefixes: Sequence[bytes]  # names of kinds under KEEP_NAMED, at most eight bytes of them
    row_args: Sequence[str]  # whole numbers wanted of every kept event
    detail_args: Sequence[str]  # whole numbers that few events have
    detail_texts: Sequence[str]  # texts that few events have

    def wanted(self) -> json_scan.Wanted:
        """The same, as the scanner takes it."""
        places: dict[bytes, int] = {}
        for names, place, first in (
            (self.row_args, json_scan.IN_ROW, json_scan.ARGS),
            (self.detail_args, json_scan.IN_DETAIL, 0),
            (self.detail_texts, json_scan.TEXT_IN_DETAIL, len(self.detail_args)),
        ):
            for column, name in enumerate(names, first):
                places[name.encode()] = json_scan.placed(place, column)
        masks = [(word.ljust(8, b"\0"), b"\xff" * len(word)) for word in self.prefixes]
        pairs = b"".join(word + mask.ljust(8, b"\0") for word, mask in masks)
        return json_scan.Wanted(
            kinds=words.word_table(self.kinds),
            args=words.word_table(places),
            keep=np.array(self.keep, np.int64),
            prefixes=np.frombuffer(pairs, np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """What is kept of one file. NULL of `json_scan` stands for what an event lacks."""

    columns: dict[str, NDArray[Any]]  # one entry an event, in the order of the file
    details: dict[str, Ints]  # one entry a detail; `columns["detail"]` points here, -1 at none
    texts: list[str]  # names and texts by code
    envelope: dict[str, Any]  # everything around the events
    seen: int  # whole events, kept or not
    warnings: tuple[str, ...]


def scan_file(path: Path, selection: Selection, *, allow_truncated: bool = False) -> Scanned:
    """Read the wanted events of a Chrome-trace file, gzipped or not.

    Raises `TraceFileError`, with the byte of the (decompressed) text, where the file is no such
    trace, is cut short (unless `allow_truncated`), or more than one event and more than one in
    a thousand do not parse.
    """
    return _Reader(path, selection).read(allow_truncated)


@dataclass(slots=True)
class _Window:
    """The part of the text that is at hand: `n` bytes, and NULs that a kernel may look at."""

    path: Path
    source: Iterator[bytes]
    text: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1 << 21, np.uint8))
    n: int = 0
    base: int = 0  # where in the file the window begins
    cut: bool = False  # a compressed file ended early

    def more(self, keep_from: int) -> bool:
        """Forget what is before `keep_from` and append a block; False at the end."""
        rest = self.text[keep_from : self.n].copy()
        self.base += keep_from
        try:
            block = next(self.source, b"")
        except CutShortError:
            block, self.cut = b"", True
        size = len(rest) + len(block)
        if size + STEP > len(self.text):
            self._widen(size)
        self.text[: len(rest)] = rest
        self.text[len(rest) : size] = np.frombuffer(block, np.uint8)
        self.text[size : size + STEP] = 0
        self.n = size
        return bool(block)

    def _widen(self, size: int) -> None:
        if size > _TEXT_LIMIT:
            raise TraceFileError(
                f"{self.path}: one event or value at byte {self.base} is longer than "
                f"{_TEXT_LIMIT >> 20} MiB"
            )
        self.text = np.zeros(2 * size + STEP, np.uint8)

    def bytes(self, start: int = 0) -> bytes:
        return self.text[start : self.n].tobytes()


class _Reader:
    """One file on its way into columns."""

    def __init__(self, path: Path, selection: Selection) -> None:
        self.path = path
        self.selection = selection
        self.window = _Window(path, blocks(path))
        self.strings = words.no_strings()
        self.chunks: list[dict[str, NDArray[Any]]] = []
        self.detail_chunks: list[Ints] = []
        self.state = np.zeros(json_scan.STATE_SIZE, np.int64)
        self.warnings: list[str] = []

    def read(self, allow_truncated: bool) -> Scanned:
        head, at = self._head()
        self.state[json_scan.AT] = at
        whole = self._scan()
        tail = self._tail() if whole else b""
        if not whole or self.window.cut or not _closed(head, tail):
            self._truncated(allow_truncated, inside=not whole)
            tail = _close(head)
        self._check_dropped()
        return self._scanned(self._envelope(head, tail))

    def _head(self) -> tuple[bytes, int]:
        """The text before the first event, and where in the window that is."""
        window = self.window
        while window.more(0):
            head = window.bytes()
            if found := _EVENTS.search(head):
                return head[: found.end()], found.end()
            if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
                raise TraceFileError(
                    f"{self.path}: no JSON trace: begins with {head[:16]!r}, wanted {{ or ["
                )
            if window.n > _ENVELOPE_LIMIT:
                break
        if not window.n:
            raise TraceFileError(f"{self.path}: empty; wanted a JSON trace")
        what = "the compressed file is cut short, and" if window.cut else "the file has"
        raise TraceFileError(
            f'{self.path}: {what} no "traceEvents": [ in its first {window.n} bytes; '
            "wanted a trace of the PyTorch profiler"
        )

    def _scan(self) -> bool:
        """Scan all events; False where the text ends before they do."""
        wanted, state, window = self.selection.wanted(), self.state, self.window
        details = len(self.selection.detail_args) + len(self.selection.detail_texts)
        row_count = json_scan.ARGS + len(self.selection.row_args)
        rows = np.empty((_CHUNK, row_count), np.int64)
        detail_rows = np.empty((_CHUNK, details), np.int64)
        while True:
            state[json_scan.BASE] = window.base
            why = json_scan.scan(
                window.text, window.n, state, wanted, self.strings, rows, detail_rows
            )
            if why == json_scan.STRINGS_FULL:
                self.strings = words.grown(self.strings)
                continue
            if why in (json_scan.ROWS_FULL, json_scan.DONE):
                self._keep(rows, detail_rows)
            if why == json_scan.DONE:
                return True
            if why == json_scan.MORE:
                at, state[json_scan.AT] = int(state[json_scan.AT]), 0
                if window.more(at):
                    continue
                if state[json_scan.LAST]:
                    self._keep(rows, detail_rows)
                    return False
                state[json_scan.LAST] = 1

    def _keep(self, rows: Ints, details: Ints) -> None:
        """Move the filled rows to columns."""
        count, detail_count = self.state[json_scan.ROWS], self.state[json_scan.DETAILS]
        names = (*_COLUMNS, *self.selection.row_args)
        first = sum(len(chunk) for chunk in self.detail_chunks)
        kept = rows[:count]
        detail = kept[:, json_scan.DETAIL]
        detail[detail >= 0] += first
        self.chunks.append(
            {
                name: kept[:, column].astype(_NARROW.get(name, np.int64))
                for column, name in enumerate(names)
            }
        )
        self.detail_chunks.append(details[:detail_count].copy())
        self.state[json_scan.ROWS] = self.state[json_scan.DETAILS] = 0

    def _tail(self) -> bytes:
        """The text behind the last event."""
        window = self.window
        start = int(self.state[json_scan.AT])
        while window.more(start):
            start = 0
            if window.n > _ENVELOPE_LIMIT:
                raise TraceFileError(
                    f"{self.path}: more than {_ENVELOPE_LIMIT >> 20} MiB behind the events, "
                    f"from byte {window.base} on"
                )
        return window.bytes()

    def _truncated(self, allowed: bool, *, inside: bool) -> None:
        end = self.window.base + self.window.n
        where = "inside traceEvents" if inside else "behind the events, inside the envelope"
        place = "of the decompressed text " if self.window.cut else ""
        message = (
            f"{self.path}: truncated: the file ends {where} at byte {end} {place}"
            f"after {self.state[json_scan.SEEN]} whole events"
        )
        if not allowed:
            raise TraceFileError(
                f"{message}; wanted its end (was the profiler killed, or the disk full?). "
                "--allow-truncated reads the whole events"
            )
        self.warnings.append(f"{message}; those were read")

    def _check_dropped(self) -> None:
        dropped, seen = int(self.state[json_scan.DROPPED]), int(self.state[json_scan.SEEN])
        if not dropped:
            return
        known = json_scan.STATE_SIZE - json_scan.DROPS
        offsets = ", ".join(map(str, self.state[json_scan.DROPS :][:dropped]))
        message = (
            f"{self.path}: {dropped} of {seen + dropped} events do not parse and were left "
            f"out, at byte {offsets}{', ...' if dropped > known else ''}"
        )
        if seen == 0 or dropped > max(1, (seen + dropped) // 1000):
            raise TraceFileError(f"{message}: too many to trust the rest")
        self.warnings.append(message)

    def _envelope(self, head: bytes, tail: bytes) -> dict[str, Any]:
        if b'"traceEvents"' in tail:
            raise TraceFileError(f"{self.path}: two lists of traceEvents; wanted one")
        if found := _PHASE.search(tail):
            end = self.window.base + self.window.n - len(tail)
            raise TraceFileError(
                f"{self.path}: the list of events ends at byte {end}, and an event follows at "
                f"byte {end + found.start()}"
            )
        text = head.removeprefix(b"\xef\xbb\xbf") + b"]" + tail
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            self.warnings.append(
                f"{self.path}: what is around the events is no valid JSON ({error}); "
                "read key by key"
            )
            return _known_members(text)
        if isinstance(found, list):
            return {}
        if found.get("traceEvents") != []:
            raise TraceFileError(f'{self.path}: "traceEvents" is not a key of the outer object')
        return dict(found)

    def _scanned(self, envelope: dict[str, Any]) -> Scanned:
        names = (*_COLUMNS, *self.selection.row_args)
        details = np.concatenate(self.detail_chunks)
        detail_names = (*self.selection.detail_args, *self.selection.detail_texts)
        return Scanned(
            columns={
                name: np.concatenate([chunk.pop(name) for chunk in self.chunks])
                for name in names
            },
            details={name: details[:, column] for column, name in enumerate(detail_names)},
            texts=[_unescaped(word) for word in words.texts_of(self.strings)],
            envelope=envelope,
            seen=int(self.state[json_scan.SEEN]),
            warnings=tuple(self.warnings),
        )


def _closed(head: bytes, tail: bytes) -> bool:
    """Whether the text behind the events ends as the text before them began."""
    return tail.rstrip().endswith(b"}") if b"{" in head else not tail.strip()


def _close(head: bytes) -> bytes:
    return b"}" if b"{" in head else b""


def _unescaped(word: bytes) -> str:
    """The text of a JSON string's inside."""
    text = word.decode(errors="replace")
    if "\\" not in text:
        return text
    try:
        text = str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text
    # Half a surrogate pair is no character: nothing could write it.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _known_members(text: bytes) -> dict[str, Any]:
    """The members of an invalid envelope that a trace cannot do without."""
    members: dict[str, Any] = {}
    if base := re.search(rb'"baseTimeNanoseconds"\s*:\s*(-?\d+)', text):
        members["baseTimeNanoseconds"] = int(base[1])
    if info := re.search(rb'"distributedInfo"\s*:\s*(?=\{)', text):
        inside = re.sub(rb":\s*(?=[,}])", b": null", text[info.end() :])
        try:
            members["distributedInfo"] = json.JSONDecoder().raw_decode(
                inside.decode(errors="replace")
            )[0]
        except ValueError:
            return members
    return members
