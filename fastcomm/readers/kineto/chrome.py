"""Chrome-trace JSON: a stream of text becomes columns, block by block.

Memory is the kept columns and a block or two, whatever the size of the file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.readers import described, unpack
from fastcomm.readers.kineto import stream
from fastcomm.readers.kineto.stream import TextWindow, blocks, find
from fastcomm_kernels import json_scan, words
from fastcomm_kernels.arrays import NULL, Ints

_CHUNK = 1 << 12
_RESUMES = 8
_EVENT_LIMIT = 1 << 26

# The type of each column of a row once it is kept.
_NARROW = {"kind": np.int8, "name": np.int32, "detail": np.int32}
_COLUMNS = (
    *("kind", "name", "process", "thread", "start", "stop", "offset", "detail"),
    "position",
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which events and which of their args are kept."""

    kinds: dict[bytes, int]  # value of `cat` -> number of the kind
    keep: Sequence[int]  # by kind; the last is for unknown kinds
    prefixes: Sequence[bytes]  # names of kinds under KEEP_NAMED, at most eight bytes of them
    row_args: Sequence[str]  # whole numbers wanted of every kept event
    detail_args: Sequence[str]  # whole numbers that few events have
    detail_texts: Sequence[str]  # texts that few events have
    positions: bool = False  # the place of an event among all, kept or not

    @cached_property
    def wanted(self) -> words.ScanColumns:
        """The same, as the scanner takes it."""
        return words.ScanColumns(
            kinds=self.kinds,
            keep=list(self.keep),
            prefixes=list(self.prefixes),
            numbers=[name.encode() for name in self.row_args],
            detail_numbers=[name.encode() for name in self.detail_args],
            detail_texts=[name.encode() for name in self.detail_texts],
        )

    @cached_property
    def plan(self) -> Ints:
        """The same as one column, made once for all files."""
        return self.wanted.plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """What is kept of one file. NULL of `json_scan` stands for what an event lacks."""

    columns: dict[str, NDArray[Any]]  # one entry an event, in the order of the file
    details: dict[str, Ints]  # `columns["detail"]` points here, -1 to the end, which is NULL
    texts: list[str]  # names and texts by code
    envelope: dict[str, Any]  # everything around the events
    seen: int  # whole events, kept or not
    warnings: tuple[str, ...]
    is_truncated: bool = False  # the text ends before the events do


def scan_file(path: Path, selection: Selection, *, allow_truncated: bool = False) -> Scanned:
    """Read the wanted events of a Chrome-trace file, gzipped or not.

    Raises `TraceFileError`, with the byte of the (decompressed) text, where the file is no such
    trace, is cut short (unless `allow_truncated`), or more than one event and more than one in
    a thousand do not parse.
    """
    return _Reader(path, selection).read(allow_truncated)


class _Reader:
    """One file on its way into columns."""

    def __init__(self, path: Path, selection: Selection) -> None:
        self.path = path
        self.selection = selection
        self.names = (*_COLUMNS, *selection.row_args)
        self.kept = [name for name in self.names if selection.positions or name != "position"]
        self.detail_names = (*selection.detail_args, *selection.detail_texts)
        self.window = TextWindow(blocks(path))
        self.strings = words.no_strings()
        self.chunks: list[dict[str, NDArray[Any]]] = []
        self.detail_chunks: list[Ints] = []
        self.detail_count = 0
        self.is_truncated = False
        self.state = np.zeros(json_scan.STATE_SIZE, np.int64)
        self.warnings: list[str] = []

    def read(self, allow_truncated: bool) -> Scanned:
        head = self._head()
        try:
            tail = self._tail(head) if self._scan() else self._tail_behind_damage(head)
            if tail is None or self.state[json_scan.DROPPED]:
                self._check_damaged(head)
            if tail is None:
                self._truncated(allow_truncated, "inside traceEvents")
                self.is_truncated = True
            self._check_dropped()
            members = self._members(head, tail, allow_truncated)
        except stream.NestedError as error:
            raise TraceFileError(f"{self.path}: {error}") from error
        if behind := self.window.behind:
            self.warnings.append(
                f"{self.path}: {behind.count} bytes behind the end of the gzip data, from byte "
                f"{behind.at} of the file on, are not read"
            )
        return self._scanned(members)

    def _head(self) -> bytes:
        """The text up to the first event."""
        window, at = self.window, ~0
        while window.more(0):
            head = window.bytes()
            if (at := stream.events_begin(head, ~at)) >= 0:
                self.state[json_scan.AT] = at
                return head[:at]
            if not stream.begins(head):
                what = unpack(head, self.path) or f"found {described(head)}, expected {{ or ["
                raise TraceFileError(f"{self.path}: no JSON trace: {what}")
            if window.n > stream.LIMIT:
                break
        # Where the text in front of the events is damaged, its braces mislead.
        head = window.bytes()
        if (at := stream.events_begin(head, 0, nested=True)) >= 0:
            self.state[json_scan.AT] = at
            return head[:at]
        if not window.n and not window.cut:
            raise TraceFileError(f"{self.path}: empty; wanted a JSON trace")
        what = "the compressed file is cut short, and" if window.cut else "the file has"
        raise TraceFileError(
            f'{self.path}: {what} no "traceEvents": [ in its first {window.n} bytes; '
            "wanted a trace of the PyTorch profiler"
        )

    def _scan(self) -> bool:
        """Scan all events; False where the text ends before they do."""
        state, window = self.state, self.window
        plan = self.selection.plan
        rows = np.empty((_CHUNK, self.selection.wanted.width()), np.int64)
        while True:
            state[json_scan.BASE] = window.base
            why = json_scan.scan(window.text, window.n, state, plan, self.strings, rows)
            if why == json_scan.STRINGS_FULL:
                self.strings = words.grown(self.strings)
            elif why == json_scan.HOPELESS:
                self._check_dropped()
            elif why == json_scan.MORE and not state[json_scan.LAST]:
                self._more()
            else:
                self._keep(rows)
                if why != json_scan.ROWS_FULL:
                    return bool(why == json_scan.DONE)

    def _more(self) -> None:
        """Go on to the next block of the text."""
        window, at = self.window, int(self.state[json_scan.AT])
        if window.n - at > _EVENT_LIMIT:
            raise TraceFileError(
                f"{self.path}: the event at byte {window.base + at} is longer than "
                f"{_EVENT_LIMIT >> 20} MiB"
            )
        self.state[json_scan.LAST] = not window.more(at)
        self.state[json_scan.AT] = 0

    def _keep(self, rows: Ints) -> None:
        """Move the filled rows to columns."""
        kept = rows[: self.state[json_scan.ROWS]]
        self.state[json_scan.ROWS] = 0
        has_details, first = kept[:, words.DETAIL] > 0, len(self.names)
        details = kept[has_details, first : first + len(self.detail_names)]
        kept[:, words.DETAIL] = -1
        kept[has_details, words.DETAIL] = self.detail_count + np.arange(len(details))
        self.detail_count += len(details)
        self.detail_chunks.append(details)
        self.chunks.append(
            {
                name: kept[:, column].astype(_NARROW.get(name, np.int64))
                for column, name in enumerate(self.names)
                if name in self.kept
            }
        )

    def _tail(self, head: bytes) -> bytes | None:
        """The text behind the events; None where the text ends before they do."""
        for _ in range(_RESUMES):
            tail = self._rest(head)
            try:
                stream.members(head, tail)
            except stream.NestedError:
                self._check_one_list(tail)
                raise
            except (stream.CutError, stream.DamagedError):
                own = self._own(head, tail)
                if not stream.holds_events(own):
                    return own
            else:
                return tail
            # That bracket ended another list: a broken one, inside of which a scan went on.
            self._count_dropped(self.window.base - 1)
            if not self._scan():
                return self._tail_behind_damage(head)
        self._check_dropped()
        return tail

    def _own(self, head: bytes, tail: bytes) -> bytes:
        """The part of `tail` in front of what follows a whole trace, if anything does.

        Raises `TraceFileError` where that is another document.
        """
        self._check_first(head)
        end = stream.document_end(head, tail)
        behind = b"" if end is None else tail[end:].lstrip(stream.NOTHING)
        if not behind:
            self._check_one_list(tail)
            return tail
        at = self.window.base + len(tail) - len(behind)
        if stream.begins_document(behind):
            raise self._second_document(at)
        if stream.holds_events(behind):
            return tail
        self.warnings.append(
            f"{self.path}: {len(behind)} bytes behind the end of the trace, from byte {at} on, "
            "are not read"
        )
        return tail[:end]

    def _check_damaged(self, head: bytes) -> None:
        """Raise `TraceFileError` where events are cut by another document."""
        self._check_first(head)
        is_bare = head.strip(stream.NOTHING) == b"["
        pattern = stream.BARE_LIST if is_bare else stream.EVENTS_LIST
        at = find(self.path, pattern, len(head))
        if at is not None:
            raise self._second_document(at) if is_bare else self._two_lists(at)

    def _check_first(self, head: bytes) -> None:
        at = stream.second_begin(head)
        if at is not None:
            raise self._second_document(at)

    def _second_document(self, at: int) -> TraceFileError:
        return TraceFileError(
            f"{self.path}: a second document begins at byte {at} of the text; wanted one "
            "trace in a file. Split it into a file a rank"
        )

    def _check_one_list(self, tail: bytes) -> None:
        at = stream.second_list(tail)
        if at is not None:
            raise self._two_lists(self.window.base + at)

    def _two_lists(self, at: int) -> TraceFileError:
        return TraceFileError(
            f"{self.path}: two lists of traceEvents, the second at byte {at}; wanted one"
            f"{self._first_broken(at)}"
        )

    def _first_broken(self, before: int) -> str:
        """Where the first event that does not parse is, to go on with a message."""
        broken = int(self.state[json_scan.DROPS])
        if not 0 < broken < before:
            return ""
        return f"; an event before it, at byte {broken}, does not parse"

    def _rest(self, head: bytes) -> bytes:
        """All text from where the scan is."""
        window, start = self.window, int(self.state[json_scan.AT])
        while window.more(start):
            start = 0
            if window.n > stream.LIMIT:
                self._own(head, window.bytes())
                raise TraceFileError(
                    f"{self.path}: more than {stream.LIMIT >> 20} MiB behind the events, "
                    f"from byte {window.base} on"
                )
        self.state[json_scan.AT], self.state[json_scan.LAST] = 0, 1
        return window.bytes()

    def _tail_behind_damage(self, head: bytes) -> bytes | None:
        """The text behind the events, the last of which is broken; None where there is none."""
        state = self.state
        if not state[json_scan.LOST]:
            return None
        if state[json_scan.CUT] or self.window.cut:
            # The last event is not broken, it is only not all there.
            state[json_scan.DROPPED] -= 1
            return None
        broken, start, parts = int(state[json_scan.BROKEN]), 0, []
        for block in blocks(self.path):
            parts.append(block[max(0, broken - start) :])
            start += len(block)
            if start - broken > stream.LIMIT:
                return None
        return stream.tail_in(head, b"".join(parts))

    def _truncated(self, allowed: bool, where: str) -> None:
        if self.window.behind:
            raise self.window.behind
        state, end = self.state, self.window.base + self.window.n
        whole = f"after {state[json_scan.SEEN]} whole events"
        if self.window.cut or not state[json_scan.LOST] or state[json_scan.CUT]:
            place = "of the decompressed text " if self.window.cut else ""
            message = f"truncated: the file ends {where} at byte {end} {place}{whole}"
            why = "wanted its end (was the profiler killed, or the disk full?)"
        else:
            message = f"damaged: the events have no end at byte {state[json_scan.BROKEN]}, "
            message += whole
            why = "wanted the ] of traceEvents and the members behind it"
        message = f"{self.path}: {message}"
        if not allowed:
            raise TraceFileError(f"{message}; {why}. --allow-truncated reads the whole events")
        self.warnings.append(f"{message}; those were read")

    def _count_dropped(self, offset: int) -> None:
        state, first = self.state, json_scan.DROPS
        last = json_scan.STATE_SIZE - 1
        state[min(first + int(state[json_scan.DROPPED]), last)] = offset
        state[json_scan.DROPPED] += 1
        state[json_scan.BROKEN], state[json_scan.LOST] = offset, 1

    def _check_dropped(self) -> None:
        dropped, seen = int(self.state[json_scan.DROPPED]), int(self.state[json_scan.SEEN])
        if not dropped:
            return
        named = self.state[json_scan.DROPS :][:dropped]
        offsets = ", ".join(map(str, named)) + (", ..." if dropped > len(named) else "")
        message = (
            f"{self.path}: {dropped} of {seen + dropped} events do not parse and were left "
            f"out, at byte {offsets}"
        )
        if seen == 0 or dropped > max(1, (seen + dropped) // 1000):
            raise TraceFileError(f"{message}: too many to trust the rest")
        self.warnings.append(message)

    def _members(self, head: bytes, tail: bytes | None, allowed: bool) -> dict[str, Any]:
        if tail is None:
            return stream.known_members(head)
        self._check_one_list(tail)
        text = head + b"]" + tail
        try:
            if self.window.cut:
                raise stream.CutError
            return stream.members(head, tail)
        except stream.CutError:
            self._truncated(allowed, "behind the events, inside the envelope")
        except stream.DamagedError as error:
            self.warnings.append(
                f"{self.path}: what is around the events is no valid JSON ({error}); "
                "read key by key"
            )
        return stream.known_members(text)

    def _scanned(self, members: dict[str, Any]) -> Scanned:
        no_detail = np.full((1, len(self.detail_names)), NULL)
        details = np.concatenate([*self.detail_chunks, no_detail])
        return Scanned(
            columns={
                name: np.concatenate([chunk.pop(name) for chunk in self.chunks])
                for name in self.kept
            },
            details={name: details[:, k] for k, name in enumerate(self.detail_names)},
            texts=[_unescaped(word) for word in words.texts_of(self.strings)],
            envelope=members,
            seen=int(self.state[json_scan.SEEN]),
            warnings=tuple(self.warnings),
            is_truncated=self.is_truncated,
        )


def _unescaped(word: bytes) -> str:
    """The text of a JSON string's inside, fit for UTF-8: without half a surrogate pair."""
    text = word.decode(errors="replace")
    if "\\" not in text:
        return text
    try:
        found = str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
