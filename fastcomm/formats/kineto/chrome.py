"""Turn the text of Chrome-trace JSON into columns, block by block.

Memory is the kept columns and a block or two, whatever the size of the file. Offsets are bytes
of the decompressed text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.formats.kineto import envelope
from fastcomm.formats.kineto.envelope import unescaped
from fastcomm.formats.sources import described, unpack
from fastcomm.formats.stream import NOTHING, TextWindow, begins_document, blocks, find
from fastcomm_kernels import json_events, json_scan, string_tables
from fastcomm_kernels.arrays import NULL, Flags, Ints

_CHUNK = 1 << 12
_RESUMES = 8
_EVENT_LIMIT = 1 << 26
# The types of columns that are narrower than int64.
_NARROW = {"kind": np.int8, "name": np.int32, "detail": np.int32}
_COLUMNS = (
    *("kind", "name", "process", "thread", "start", "stop", "offset", "detail"),
    "position",
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which events of a trace and which of their args to keep."""

    kinds: dict[bytes, int]  # value of `cat` -> number of the kind
    keep: Sequence[int]  # a KEEP_* constant by kind; the last is for unknown kinds
    prefixes: Sequence[bytes]  # of names, at most eight bytes each; see `json_events.keeps`
    row_args: Sequence[str]  # args that are integers, a column each
    detail_args: Sequence[str]  # args that are integers and that few events have
    detail_texts: Sequence[str]  # args that are texts and that few events have
    positions: bool = False  # whether to keep the index of each event among all in the file
    flows: bool = False  # flow events rather than complete ones, with the args of `json_flows`
    halves: bool = False  # begins and ends of events, too; `pairs` makes whole ones of them

    @cached_property
    def scan_columns(self) -> json_events.ScanColumns:
        """The selection as the scanner takes it."""
        return json_events.ScanColumns(
            kinds=self.kinds,
            keep=list(self.keep),
            prefixes=list(self.prefixes),
            numbers=[name.encode() for name in self.row_args],
            detail_numbers=[name.encode() for name in self.detail_args],
            detail_texts=[name.encode() for name in self.detail_texts],
            flows=self.flows,
            halves=self.halves,
        )

    @cached_property
    def plan(self) -> Ints:
        """The selection as one array for the kernel, built once for all files."""
        return self.scan_columns.plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """The kept events of one file. NULL stands for a value that an event lacks."""

    columns: dict[str, NDArray[Any]]  # one entry per event, in the order of the file
    details: dict[str, Ints]  # indexed by `columns["detail"]`; the last entry (NONE) is NULL
    texts: list[str]  # by code: the value of "name" and of text columns
    envelope: dict[str, Any]  # members of the outer object, without the events
    event_count: int  # complete events, kept or not
    warnings: tuple[str, ...]
    is_truncated: bool = False  # whether the text ends inside the events
    begins: int = 0  # begins of events that were not read, as they were not selected

    def name(self, row: int) -> str:
        """Return the name of the event in a row."""
        return self.texts[int(self.columns["name"][row])]

    def are_named(self, rows: Ints, test: Callable[[str], Any]) -> Flags:
        """Return which rows have a name that passes a test, which is called once per name."""
        codes, place = np.unique(self.columns["name"][rows], return_inverse=True)
        passes = [code != NULL and bool(test(self.texts[code])) for code in codes.tolist()]
        result: Flags = np.array(passes, np.bool_)[place]
        return result

    def detail(self, name: str, row: int) -> str:
        """Return the text of the arg `name` of the event in a row; "" without one.

        A `row` of NONE is no event.
        """
        code = NULL if row < 0 else int(self.details[name][int(self.columns["detail"][row])])
        return "" if code == NULL else self.texts[code]


def scan_file(path: Path, selection: Selection, *, allow_truncated: bool = False) -> Scanned:
    """Read the selected events of a Chrome-trace file, compressed or not.

    Parameters
    ----------
    path
        The file.
    selection
        Which events and args to keep.
    allow_truncated
        Whether to accept a file that ends early, up to its last complete event.

    Raises
    ------
    TraceFileError
        If the file is not such a trace, is truncated, or more than one event and more than one
        in a thousand do not parse. The message names the byte of the decompressed text.

    """
    return _Reader(path, selection).read(allow_truncated)


class _Reader:
    """The scan of one file, from its text to columns."""

    def __init__(self, path: Path, selection: Selection) -> None:
        """Prepare to scan a file for the columns and details of a selection."""
        self.path = path
        self.selection = selection
        self.names = (*_COLUMNS, *selection.row_args)
        self.kept_names = [
            name for name in self.names if selection.positions or name != "position"
        ]
        self.detail_names = (*selection.detail_args, *selection.detail_texts)
        self.window = TextWindow(blocks(path))
        self.strings = string_tables.no_strings()
        self.chunks: list[dict[str, NDArray[Any]]] = []
        self.detail_chunks: list[Ints] = []
        self.detail_count = 0
        self.is_truncated = False
        self.state = np.zeros(json_scan.STATE_SIZE, np.int64)
        self.warnings: list[str] = []

    def read(self, allow_truncated: bool) -> Scanned:
        """Scan the file; raise `TraceFileError` if truncated, unless that is allowed."""
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
        except envelope.NestedError as error:
            raise self._error(str(error)) from error
        if behind := self.window.behind:
            self._warn(
                f"{behind.count} bytes behind the end of the gzip data, from byte {behind.at} "
                "of the file on, are not read"
            )
        return self._scanned(members)

    def _error(self, text: str) -> TraceFileError:
        """Return an error about the file."""
        return TraceFileError(f"{self.path}: {text}")

    def _warn(self, text: str) -> None:
        """Add a warning about the file."""
        self.warnings.append(f"{self.path}: {text}")

    def _head(self) -> bytes:
        """Return the text before the first event."""
        window, at = self.window, ~0
        while window.more(0):
            head = window.bytes()
            if (at := envelope.events_begin(head, ~at)) >= 0:
                self.state[json_scan.AT] = at
                return head[:at]
            if not envelope.begins(head):
                problem = (
                    unpack(head, self.path) or f"found {described(head)}, expected {{ or ["
                )
                raise self._error(f"no JSON trace: {problem}")
            if window.n > envelope.LIMIT:
                break
        # If the text before the events is damaged, its braces are unreliable.
        head = window.bytes()
        if (at := envelope.events_begin(head, 0, nested=True)) >= 0:
            self.state[json_scan.AT] = at
            return head[:at]
        if not window.n and not window.cut:
            raise self._error("empty; expected a JSON trace")
        problem = "the compressed file is cut short, and" if window.cut else "the file has"
        raise self._error(
            f'{problem} no "traceEvents": [ in its first {window.n} bytes; expected a trace of '
            "the PyTorch profiler"
        )

    def _scan(self) -> bool:
        """Scan all events; return False if the text ends inside them."""
        state, window = self.state, self.window
        plan = self.selection.plan
        rows = np.empty((_CHUNK, self.selection.scan_columns.width()), np.int64)
        while True:
            state[json_scan.BASE] = window.base
            status = json_scan.scan(window.text, window.n, state, plan, self.strings, rows)
            if status == json_scan.STRINGS_FULL:
                self.strings = string_tables.grown(self.strings)
            elif status == json_scan.HOPELESS:
                self._check_dropped()
            elif status == json_scan.MORE and not state[json_scan.LAST]:
                self._more()
            else:
                self._keep(rows)
                if status != json_scan.ROWS_FULL:
                    return bool(status == json_scan.DONE)

    def _more(self) -> None:
        """Load the next block of the text."""
        window, position = self.window, int(self.state[json_scan.AT])
        if window.n - position > _EVENT_LIMIT:
            raise self._error(
                f"the event at byte {window.base + position} is longer than "
                f"{_EVENT_LIMIT >> 20} MiB"
            )
        self.state[json_scan.LAST] = not window.more(position)
        self.state[json_scan.AT] = 0

    def _keep(self, rows: Ints) -> None:
        """Move the filled rows to columns."""
        filled = rows[: self.state[json_scan.ROWS]]
        self.state[json_scan.ROWS] = 0
        has_details, first = filled[:, json_events.DETAIL] > 0, len(self.names)
        details = filled[has_details, first : first + len(self.detail_names)]
        filled[:, json_events.DETAIL] = -1
        filled[has_details, json_events.DETAIL] = self.detail_count + np.arange(len(details))
        self.detail_count += len(details)
        self.detail_chunks.append(details)
        self.chunks.append(
            {
                name: filled[:, column].astype(_NARROW.get(name, np.int64))
                for column, name in enumerate(self.names)
                if name in self.kept_names
            }
        )

    def _tail(self, head: bytes) -> bytes | None:
        """Return the text behind the events; None if the text ends inside them."""
        for _ in range(_RESUMES):
            tail = self._remaining_text(head)
            try:
                envelope.members(head, tail)
            except envelope.NestedError:
                self._check_one_list(tail)
                raise
            except (envelope.CutError, envelope.DamagedError):
                own = self._first_document(head, tail)
                if not envelope.holds_events(own):
                    return own
            else:
                return tail
            # The bracket ended an inner list of a broken event, so the scan goes on.
            self._count_dropped(self.window.base - 1)
            if not self._scan():
                return self._tail_behind_damage(head)
        self._check_dropped()
        return tail

    def _first_document(self, head: bytes, tail: bytes) -> bytes:
        """Return `tail` up to the end of the trace, if more text follows.

        Raises `TraceFileError` if that text is another document.
        """
        self._check_first(head)
        end = envelope.document_end(head, tail)
        behind = b"" if end is None else tail[end:].lstrip(NOTHING)
        if not behind:
            self._check_one_list(tail)
            return tail
        offset = self.window.base + len(tail) - len(behind)
        if begins_document(behind):
            raise self._second_document(offset)
        if envelope.holds_events(behind):
            return tail
        self._warn(
            f"{len(behind)} bytes behind the end of the trace, from byte {offset} on, are not "
            "read"
        )
        return tail[:end]

    def _check_damaged(self, head: bytes) -> None:
        """Raise TraceFileError if another document begins inside the events."""
        self._check_first(head)
        is_bare = head.strip(NOTHING) == b"["
        pattern = envelope.BARE_LIST if is_bare else envelope.EVENTS_LIST
        offset = find(self.path, pattern, len(head))
        if offset is not None:
            raise self._second_document(offset) if is_bare else self._two_lists(offset)

    def _check_first(self, head: bytes) -> None:
        """Raise TraceFileError if a second document begins before the events."""
        offset = envelope.second_begin(head)
        if offset is not None:
            raise self._second_document(offset)

    def _second_document(self, offset: int) -> TraceFileError:
        """Return the error of a second JSON document; `offset` in bytes of the text."""
        return self._error(
            f"a second document begins at byte {offset} of the text. Split the file into one "
            "file per rank"
        )

    def _check_one_list(self, tail: bytes) -> None:
        """Raise TraceFileError if a second list of events follows."""
        offset = envelope.second_list(tail)
        if offset is not None:
            raise self._two_lists(self.window.base + offset)

    def _two_lists(self, offset: int) -> TraceFileError:
        """Return the error of a second list of events; `offset` in bytes of the text."""
        return self._error(
            f"two lists of traceEvents, the second at byte {offset}; expected one"
            f"{self._first_broken(offset)}"
        )

    def _first_broken(self, before: int) -> str:
        """Return the end of a message about the first event that does not parse, or ""."""
        offset = int(self.state[json_scan.DROPS])
        if not 0 < offset < before:
            return ""
        return f"; an event before it, at byte {offset}, does not parse"

    def _remaining_text(self, head: bytes) -> bytes:
        """Return all text from the scan position on."""
        window, start = self.window, int(self.state[json_scan.AT])
        while window.more(start):
            start = 0
            if window.n > envelope.LIMIT:
                self._first_document(head, window.bytes())
                raise self._error(
                    f"more than {envelope.LIMIT >> 20} MiB behind the events, from byte "
                    f"{window.base} on"
                )
        self.state[json_scan.AT], self.state[json_scan.LAST] = 0, 1
        return window.bytes()

    def _tail_behind_damage(self, head: bytes) -> bytes | None:
        """Return the text of the file behind a broken event that ends the list of events.

        `head` is the text before the list. None if the event is only cut off, if the list has
        no such event, or if the text is longer than `envelope.LIMIT`.
        """
        state = self.state
        if not state[json_scan.SEARCHING]:
            return None
        if state[json_scan.CUT] or self.window.cut:
            # The last event is incomplete, not broken.
            state[json_scan.DROPPED] -= 1
            return None
        offset, start, parts = int(state[json_scan.BROKEN]), 0, []
        for block in blocks(self.path):
            parts.append(block[max(0, offset - start) :])
            start += len(block)
            if start - offset > envelope.LIMIT:
                return None
        return envelope.tail_in(head, b"".join(parts))

    def _truncated(self, allowed: bool, where: str) -> None:
        """Warn that the text ends early, or raise TraceFileError unless that is allowed.

        `where` completes "the file ends".
        """
        if self.window.behind:
            raise self.window.behind
        state, end = self.state, self.window.base + self.window.n
        progress = f"after {state[json_scan.EVENTS]} whole events"
        if self.window.cut or not state[json_scan.SEARCHING] or state[json_scan.CUT]:
            place = "of the decompressed text " if self.window.cut else ""
            message = f"truncated: the file ends {where} at byte {end} {place}{progress}"
            reason = " (was the profiler killed, or the disk full?)"
        else:
            message = f"damaged: the events have no end at byte {state[json_scan.BROKEN]}, "
            message += progress
            reason = "; expected the ] of traceEvents and the members behind it"
        if not allowed:
            raise self._error(
                f"{message}{reason}. Pass --allow-truncated to read the whole events"
            )
        self._warn(f"{message}; these were read")

    def _count_dropped(self, offset: int) -> None:
        """Note an event that does not parse."""
        state, first = self.state, json_scan.DROPS
        last = json_scan.STATE_SIZE - 1
        state[min(first + int(state[json_scan.DROPPED]), last)] = offset
        state[json_scan.DROPPED] += 1
        state[json_scan.BROKEN], state[json_scan.SEARCHING] = offset, 1

    def _check_dropped(self) -> None:
        """Warn of events that do not parse; TraceFileError if they are too many."""
        dropped, complete = (
            int(self.state[place]) for place in (json_scan.DROPPED, json_scan.EVENTS)
        )
        if not dropped:
            return
        shown = self.state[json_scan.DROPS :][:dropped]
        offsets = ", ".join(map(str, shown)) + (", ..." if dropped > len(shown) else "")
        message = (
            f"{dropped} of {complete + dropped} events do not parse and were left out, at byte "
            f"{offsets}"
        )
        if complete == 0 or dropped > max(1, (complete + dropped) // 1000):
            raise self._error(f"{message}: too many to trust the remaining events")
        self._warn(message)

    def _members(self, head: bytes, tail: bytes | None, allowed: bool) -> dict[str, Any]:
        """Return the members of the outer object, or the main ones if it is not valid JSON."""
        if tail is None:
            return envelope.recovered_members(head)
        self._check_one_list(tail)
        text = head + b"]" + tail
        try:
            if self.window.cut:
                raise envelope.CutError
            return envelope.members(head, tail)
        except envelope.CutError:
            self._truncated(allowed, "behind the events, inside the envelope")
        except envelope.DamagedError as error:
            self._warn(
                f"the text around the events is not valid JSON ({error}); read key by key"
            )
        return envelope.recovered_members(text)

    def _scanned(self, members: dict[str, Any]) -> Scanned:
        """Return the result of the scan; frees the chunks."""
        no_detail = np.full((1, len(self.detail_names)), NULL)
        details = np.concatenate([*self.detail_chunks, no_detail])
        return Scanned(
            columns={
                name: np.concatenate([chunk.pop(name) for chunk in self.chunks])
                for name in self.kept_names
            },
            details={name: details[:, k] for k, name in enumerate(self.detail_names)},
            texts=[unescaped(text) for text in string_tables.texts_of(self.strings)],
            envelope=envelope.with_numbers(members),
            event_count=int(self.state[json_scan.EVENTS]),
            warnings=tuple(self.warnings),
            is_truncated=self.is_truncated,
            begins=int(self.state[json_scan.BEGINS]),
        )
