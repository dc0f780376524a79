"""Turn the packets of a Perfetto trace into columns, block by block.

Memory is the columns and a block or two, whatever the size of the file. Offsets are bytes of
the decompressed file.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import TraceFileError
from fastcomm.formats.kineto.chrome import Selection
from fastcomm.formats.sources import described, unpack
from fastcomm.formats.stream import TextWindow, blocks
from fastcomm_kernels import (
    json_events,
    perfetto_scan,
    perfetto_tables,
    protobuf,
    string_tables,
)
from fastcomm_kernels.arrays import NONE, NULL, Ints
from fastcomm_kernels.json_events import ScanColumns

SIGN = 0x0A  # the first byte of a trace, and of each packet
_TRACKS = 1 << 8
_ROOM = 1 << 6  # sequences and clocks
_PACKET_LIMIT = 1 << 26
_DEEPEST = 32  # values in one another
_PROBLEMS = {
    protobuf.PAST_END: "a value that ends behind its message",
    protobuf.LONG_VARINT: "a number of more than ten bytes",
    protobuf.BAD_TAG: "no field of protobuf",
}
# Names of args elsewhere, and their names in Kineto's traces: of stages, then of rocprofv3.
_ALIASES = (
    ("device id", "device"),
    ("stream id", "stream"),
    ("corr_id", "correlation"),
    ("copy_bytes", "bytes"),
    ("stream_ID", "stream"),
    ("agent", "device"),
)
# Further args: times of rocprofv3's events, and source and destination of its copies.
TIMES = ("begin_ns", "end_ns")
AGENTS = ("src_agent", "dst_agent")
# Of collectives; the ranks of their group by arithmetic.
RANK_START, RANK_STRIDE = "Global rank start", "Global rank stride"
HOST_FUNCTION = "host fn"
# Categories of rocprofv3, and those of Kineto that are alike.
_ROCPROF = {
    b"kernel_dispatch": b"kernel",
    b"memory_copy": b"gpu_memcpy",
    b"marker_api": b"user_annotation",
    **dict.fromkeys(
        (b"hip_api", b"hsa_api", b"rccl_api", b"rocdecode_api", b"rocjpeg_api"), b"cuda_runtime"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packets:
    """The events of a file in the order of their packets, and the tracks that they are on.

    A *mark* is the begin or end of a slice, or a stage of device work; all but ends are
    *starts*. `perfetto_tables` has their columns. Codes are those of `texts`, or NONE.
    """

    marks: dict[str, NDArray[Any]]  # type, time, place
    starts: dict[str, NDArray[Any]]  # kind, name, is_selected, offset, arg_row
    # Of the starts that are stages: length, queue; and, where all events are read, their id,
    # and the code in `order` of the ids that they wait for, or NULL.
    stages: dict[str, Ints]
    order: dict[int, tuple[int, ...]]
    args: dict[str, Ints]  # numbers; by `starts["arg_row"]`; the last entry (NONE) is NULL
    detail: NDArray[np.int32]  # index into `details` by arg row; the last is NONE
    details: dict[str, Ints]  # the last entry (NONE) is NULL
    tracks: Ints  # a row each: columns of `perfetto_tables`
    texts: list[str]
    epoch: int | None  # ns to add to have times since 1970; None if no clock tells
    packet_count: int
    warnings: tuple[str, ...] = ()
    is_truncated: bool = False


def read_packets(
    path: Path, selection: Selection, *, allow_truncated: bool = False, most: int | None = None
) -> Packets:
    """Read the events of a Perfetto trace, compressed or not.

    Parameters
    ----------
    path
        The file.
    selection
        Which args to keep, and of which events.
    allow_truncated
        Whether to accept a file that ends early or is damaged, up to its last whole packet.
    most
        Number of blocks to read; by default all. What follows is not missed.

    Raises
    ------
    TraceFileError
        If the file is no such trace, or is truncated or damaged. The message names the byte of
        the decompressed file.

    """
    return _PacketReader(path, selection, most).read(allow_truncated or most is not None)


def _columns(selection: Selection) -> ScanColumns:
    """Return a selection as the scanner takes it, with what only Perfetto traces have."""
    columns = selection.scan_columns
    kinds = columns.kinds
    return columns._replace(
        kinds=kinds | {name: kinds[like] for name, like in _ROCPROF.items() if like in kinds},
        numbers=[*columns.numbers, *(name.encode() for name in (*TIMES, *AGENTS))],
        detail_numbers=[*columns.detail_numbers, RANK_START.encode(), RANK_STRIDE.encode()],
        detail_texts=[*columns.detail_texts, HOST_FUNCTION.encode()],
        aliases=tuple((name.encode(), like.encode()) for name, like in _ALIASES),
    )


def _decoded(names: list[bytes]) -> list[str]:
    return [name.decode() for name in names]


@dataclass(slots=True)
class _Chunks:
    """Filled rows, as columns."""

    marks: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    starts: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    stages: list[Ints] = field(default_factory=list)
    args: list[Ints] = field(default_factory=list)
    details: list[Ints] = field(default_factory=list)
    has_details: list[NDArray[np.bool_]] = field(default_factory=list)
    tracks: list[Ints] = field(default_factory=list)
    arg_count: int = 0


class _Output(NamedTuple):
    """The tables that a scan fills, and that are emptied when one is full."""

    marks: Ints
    starts: Ints
    args: Ints
    tracks: Ints

    @classmethod
    def of(cls, width: int) -> "_Output":
        """Return empty tables; `width` is the number of columns of the args."""
        chunk = perfetto_tables.CHUNK
        return cls(
            np.empty((perfetto_tables.MARK_COLUMNS, chunk), np.int64),
            np.empty((perfetto_tables.START_COLUMNS, chunk), np.int64),
            np.empty((chunk, width), np.int64),
            np.empty((_TRACKS, perfetto_tables.TRACK_COLUMNS), np.int64),
        )

    def filled(self, state: Ints) -> "_Output":
        """Return the filled parts, and set their numbers in the state to 0."""
        counts = state[perfetto_tables.MARKS : perfetto_tables.PACKETS].tolist()
        state[perfetto_tables.MARKS : perfetto_tables.PACKETS] = 0
        marks, starts, args, tracks = counts
        return _Output(
            self.marks[:, :marks],
            self.starts[:, :starts],
            self.args[:args],
            self.tracks[:tracks],
        )


class _PacketReader:
    """The scan of one file."""

    def __init__(self, path: Path, selection: Selection, most: int | None) -> None:
        """Prepare to scan a file, or its first `most` blocks."""
        self.path = path
        self.columns = _columns(selection)
        self.plan = self.columns.plan()
        self.window = TextWindow(_some(blocks(path), most))
        self.strings = string_tables.no_strings()
        self.interned = perfetto_tables.no_interned()
        self.sequences = np.zeros((_ROOM, perfetto_tables.SEQUENCE_COLUMNS), np.int64)
        self.clocks = np.zeros((_ROOM, perfetto_tables.CLOCK_COLUMNS), np.int64)
        self.state = np.zeros(perfetto_tables.STATE_SIZE, np.int64)
        self.state[[perfetto_tables.ROOM, perfetto_tables.MOVED]] = _ROOM, NULL
        self.state[perfetto_tables.ORDERED] = selection.positions
        self.chunks = _Chunks()
        self.warnings: list[str] = []
        self.is_truncated = False

    def read(self, allow_truncated: bool) -> Packets:
        """Scan the file; raise TraceFileError if it is damaged, unless that is allowed."""
        self._check_begin()
        problem = self._scan()
        if self.window.behind:
            raise self.window.behind
        if problem:
            if not allow_truncated:
                raise self._error(
                    f"{problem}. Pass --allow-truncated to read the packets before"
                )
            self.warnings.append(f"{self.path}: {problem}; the packets before were read")
            self.is_truncated = True
        if count := int(self.state[perfetto_tables.COMPRESSED]):
            raise self._error(
                f"{count} packets are compressed, which is not read: write the trace without "
                "compressed packets, or unpack it with Perfetto's traceconv"
            )
        return self._packets()

    def _error(self, text: str) -> TraceFileError:
        """Return an error about the file."""
        return TraceFileError(f"{self.path}: {text}")

    def _check_begin(self) -> None:
        """Raise TraceFileError unless the file begins as a trace."""
        window = self.window
        if not window.more(0):
            cut = (
                f"the compressed file is cut short at byte {self.path.stat().st_size}, and has "
                "no text"
                if window.cut
                else "empty"
            )
            raise self._error(f"{cut}; expected a Perfetto trace")
        if window.text[0] != SIGN:
            head = window.bytes()[:512]
            problem = unpack(head, self.path) or (
                f"found {described(head)} at byte 0, expected a packet (byte 0x0A)"
            )
            raise self._error(f"no Perfetto trace: {problem}")

    def _scan(self) -> str:
        """Scan all packets; return what is wrong with the file, or ""."""
        state, window = self.state, self.window
        output = _Output.of(self.columns.width())
        while True:
            state[perfetto_tables.BASE] = window.base
            status = perfetto_scan.scan(
                window.text,
                window.n,
                state,
                self.plan,
                self.strings,
                (self.interned, self.sequences, self.clocks),
                output,
            )
            if status == perfetto_scan.STRINGS_FULL:
                self.strings = string_tables.grown(self.strings)
            elif status == perfetto_scan.TABLES_FULL:
                self._grow()
            elif status == perfetto_scan.MORE and not state[perfetto_tables.LAST]:
                self._more()
            else:
                self._keep(output)
                if status == perfetto_scan.DAMAGED:
                    return self._damage()
                if status == perfetto_scan.MORE:
                    return self._truncation() if window.cut else ""

    def _more(self) -> None:
        """Load the next block of the file."""
        window, at = self.window, int(self.state[perfetto_tables.AT])
        if window.n - at > _PACKET_LIMIT:
            raise self._error(
                f"the packet at byte {window.base + at} is longer than "
                f"{_PACKET_LIMIT >> 20} MiB"
            )
        self.state[perfetto_tables.LAST] = not window.more(at)
        self.state[perfetto_tables.AT] = 0

    def _grow(self) -> None:
        """Double the tables; any of them may be full."""
        self.state[perfetto_tables.FULL] = 0
        self.interned = perfetto_tables.grown_interned(self.interned)
        self.sequences = np.concatenate([self.sequences, np.zeros_like(self.sequences)])
        self.clocks = np.concatenate([self.clocks, np.zeros_like(self.clocks)])
        self.state[perfetto_tables.ROOM] = len(self.sequences)

    def _damage(self) -> str:
        """Return what is wrong with the packet at which the scan ended."""
        state = self.state
        packet = self.window.base + int(state[perfetto_tables.AT])
        offset, problem = (
            int(state[k]) for k in (perfetto_tables.PROBLEM_AT, perfetto_tables.PROBLEM)
        )
        if offset == packet and problem == protobuf.PAST_END:
            return self._truncation()
        return (
            f"damaged: {_PROBLEMS[problem]} at byte {offset}, in the packet at byte {packet}, "
            f"after {state[perfetto_tables.PACKETS]} whole packets; expected a Perfetto trace"
        )

    def _truncation(self) -> str:
        """Return where the file ends early."""
        window, place = self.window, self.window.base + int(self.state[perfetto_tables.AT])
        return (
            f"truncated: the {'decompressed ' * window.cut}file ends at byte "
            f"{window.base + window.n}, inside the packet at byte {place}, after "
            f"{self.state[perfetto_tables.PACKETS]} whole packets (was the profiler killed, or "
            "the disk full?)"
        )

    def _keep(self, output: "_Output") -> None:
        """Move what the scan has filled to columns."""
        state, chunks = self.state, self.chunks
        marks, starts, args, tracks = output.filled(state)
        type_ = marks[perfetto_tables.TYPE].astype(np.int8)
        chunks.marks.append(
            {
                "type": type_,
                "time": marks[perfetto_tables.TIME].copy(),
                "place": marks[perfetto_tables.PLACE].copy(),
            }
        )
        name, arg_row = starts[perfetto_tables.NAME], starts[perfetto_tables.ARG_ROW]
        is_stage = type_[type_ != perfetto_tables.END] == perfetto_tables.DEVICE
        chunks.starts.append(
            {
                "kind": _narrow(starts[perfetto_tables.KIND]),
                "name": _narrow(name >> 1),
                "is_selected": (name > 0) & (name & 1 > 0),
                "offset": starts[perfetto_tables.OFFSET].copy(),
                "arg_row": _narrow(np.where(arg_row < 0, NONE, arg_row + chunks.arg_count)),
            }
        )
        chunks.stages.append(
            starts[perfetto_tables.LENGTH : perfetto_tables.START_COLUMNS][:, is_stage]
        )
        chunks.arg_count += len(args)
        first = json_events.ARGS + len(self.columns.numbers)
        last = first + len(self.columns.detail_numbers) + len(self.columns.detail_texts)
        has_details = args[:, json_events.DETAIL] > 0
        chunks.args.append(np.ascontiguousarray(args[:, json_events.ARGS : first].T))
        chunks.has_details.append(has_details)
        chunks.details.append(args[has_details, first:last])
        chunks.tracks.append(tracks.copy())

    def _packets(self) -> Packets:
        """Return the result of the scan; frees the chunks."""
        chunks, columns = self.chunks, self.columns
        detail_names = _decoded([*columns.detail_numbers, *columns.detail_texts])
        strings = string_tables.texts_of(self.strings)
        texts = [text.decode(errors="replace") for text in strings]
        # Columns of one array: few events have most of them.
        no_details = np.full((1, len(detail_names)), NULL)
        details = list(np.concatenate([*chunks.details, no_details]).T)
        marks, starts = _joined_columns(chunks.marks), _joined_columns(chunks.starts)
        detail = _places(np.concatenate(chunks.has_details))
        for place in range(len(columns.detail_numbers), len(detail_names)):
            where = partial(_event_of_arg, starts, detail, details[place])
            _settle_texts(details[place], strings, texts, detail_names[place], self.path, where)
        stages = [column[:-1] for column in _joined(chunks.stages)]
        waits = np.unique(stages[-1][stages[-1] >= 0]).tolist()
        of_stages = partial(_event_of_stage, marks, starts, stages[-1])
        return Packets(
            marks=marks,
            starts=starts,
            stages=dict(zip(("length", "queue", "event", "waits"), stages, strict=True)),
            order={
                code: _waits(strings[code], self.path, partial(of_stages, code))
                for code in waits
            },
            args=dict(zip(_decoded(columns.numbers), _joined(chunks.args), strict=True)),
            detail=detail,
            details=dict(zip(detail_names, details, strict=True)),
            tracks=np.concatenate(chunks.tracks),
            texts=texts,
            epoch=self._epoch(),
            packet_count=int(self.state[perfetto_tables.PACKETS]),
            warnings=tuple(self.warnings),
            is_truncated=self.is_truncated,
        )

    def _epoch(self) -> int | None:
        """Return when the boot clock was 0, in ns since 1970; of PyTorch they are equal."""
        clocks = self.clocks[: self.state[perfetto_tables.CLOCKS]]
        real = clocks[(clocks[:, 0] == 0) & (clocks[:, 1] == perfetto_scan.REAL)]
        return -int(real[-1, perfetto_tables.SHIFT]) if len(real) else None


def _some(source: Iterator[bytes], most: int | None) -> Iterator[bytes]:
    return source if most is None else islice(source, most)


def _narrow(column: Ints) -> NDArray[np.int32]:
    """Return a column of codes as int32; NONE for NULL."""
    return np.maximum(column, NONE).astype(np.int32)


def _joined(chunks: list[Ints]) -> list[Ints]:
    """Return the columns of chunks, which have a row a column, each with NULL at the end."""
    null = np.full(1, NULL)
    columns = zip(*chunks, strict=True)
    return [np.concatenate([*parts, null]) for parts in columns]


def _joined_columns(chunks: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Return the columns of chunks; frees the chunks."""
    return {
        name: np.concatenate([chunk.pop(name) for chunk in chunks]) for name in list(chunks[0])
    }


def _places(has_details: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the place of each row's details; NONE without any, and as the last entry."""
    places = np.cumsum(has_details, dtype=np.int32) - 1
    return np.append(np.where(has_details, places, -1), -1).astype(np.int32)


def _event_of_arg(
    starts: dict[str, NDArray[Any]], detail: NDArray[np.int32], codes: Ints, code: int
) -> int:
    """Return the byte of the first start with a code in a column of details."""
    return int(starts["offset"][np.argmax(codes[detail[starts["arg_row"]]] == code)])


def _event_of_stage(
    marks: dict[str, NDArray[Any]], starts: dict[str, NDArray[Any]], codes: Ints, code: int
) -> int:
    """Return the byte of the first stage with a code in a column of stages."""
    type_ = marks["type"][marks["type"] != perfetto_tables.END]
    return int(starts["offset"][type_ == perfetto_tables.DEVICE][np.argmax(codes == code)])


def _settle_texts(
    codes: Ints,
    strings: list[bytes],
    texts: list[str],
    name: str,
    path: Path,
    event_of: Callable[[int], int],
) -> None:
    """Replace codes of values that are no plain text, in a column `codes` of the arg `name`.

    The texts of the values, as JSON, are added to `texts`. The text null is no value.
    """
    rows = np.flatnonzero((codes < NONE) & (codes != NULL))
    if len(rows):
        values = -2 - codes[rows]
        is_used = np.zeros(len(strings), np.bool_)
        is_used[values] = True
        text = np.full(len(strings), NULL)
        for code in np.flatnonzero(is_used).tolist():
            text[code] = len(texts)
            texts.append(_text_of(strings[code], name, path, partial(event_of, -2 - code)))
        codes[rows] = text[values]
    if b"null" in strings:
        codes[codes == strings.index(b"null")] = NULL


def _text_of(message: bytes, name: str, path: Path, event: Callable[[], int]) -> str:
    """Return the value of the annotation `name` as text, as PyTorch writes its JSON."""
    try:
        value = annotation_value(message)
    except ValueError as error:
        raise TraceFileError(
            f"{path}: the value of {name!r} in the event at byte {event()}: {error}"
        ) from error
    if name == "Comms Id" and type(value) is int:
        value %= 1 << 64
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# Fields of a debug annotation.
_BOOL, _UINT, _INT, _DOUBLE, _TEXT, _NAME, _ENTRY, _ITEM = 2, 3, 4, 5, 6, 10, 11, 12
_WORD = 1 << 64


def annotation_value(message: bytes, depth: int = 0) -> Any:
    """Return the value of a debug annotation as JSON has it; an empty list without a value.

    Raises ValueError if the message is damaged.
    """
    if depth > _DEEPEST:
        raise ValueError(f"more than {_DEEPEST} values in one another")
    value: Any = []
    entries: dict[str, Any] = {}
    items: list[Any] = []
    for number, content in _fields(message):
        if isinstance(content, int):
            if number == _BOOL:
                value = bool(content)
            elif number in (_UINT, _INT):
                is_negative = number == _INT and content >= _WORD // 2
                value = content - _WORD * is_negative
        elif number == _TEXT:
            value = content.decode(errors="replace")
        elif number == _DOUBLE and len(content) == struct.calcsize("<d"):
            (value,) = struct.unpack("<d", content)
        elif number == _ENTRY:
            entries[_name_of(content)] = annotation_value(content, depth + 1)
        elif number == _ITEM:
            items.append(annotation_value(content, depth + 1))
    return entries or items or value


def _name_of(message: bytes) -> str:
    """Return the name of an annotation, or ""."""
    names = [content for number, content in _fields(message) if number == _NAME]
    return names[-1].decode(errors="replace") if names and isinstance(names[-1], bytes) else ""


_WAIT = 18  # field of a stage: the id of one that it waits for


def _waits(message: bytes, path: Path, event: Callable[[], int]) -> tuple[int, ...]:
    """Return the ids that a stage waits for, from the part of its message that has them."""
    try:
        return tuple(_wait_ids(message))
    except ValueError as error:
        raise TraceFileError(
            f"{path}: event_wait_ids of a stage in the event at byte {event()}: {error}"
        ) from error


def _wait_ids(message: bytes) -> list[int]:
    """Return the ids in fields of their own, or packed; ValueError if they are damaged."""
    ids: list[int] = []
    for number, content in _fields(message):
        if number == _WAIT and isinstance(content, int):
            ids.append(content)
        elif number == _WAIT and isinstance(content, bytes):  # packed
            at = 0
            while at < len(content):
                own, at = _varint(content, at)
                ids.append(own)
    return ids


_SIZES = {protobuf.FIXED64: 8, protobuf.FIXED32: 4}


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message; ValueError if it is damaged."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire = tag & 7
        if wire == protobuf.VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if wire == protobuf.BYTES:
            size, at = _varint(message, at)
        elif wire in _SIZES:
            size = _SIZES[wire]
        else:
            raise ValueError(_PROBLEMS[protobuf.BAD_TAG])
        if at + size > len(message):
            raise ValueError(_PROBLEMS[protobuf.PAST_END])
        yield tag >> 3, message[at : at + size]
        at += size


_LONGEST = 10  # bytes of a varint
_MORE = 0x80  # the bit of a byte of a varint that others follow


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at an index, and the index behind it."""
    value = 0
    for k, part in enumerate(message[at : at + _LONGEST]):
        value |= (part & (_MORE - 1)) << 7 * k
        if part < _MORE:
            return value % _WORD, at + k + 1
    is_long = len(message) - at >= _LONGEST
    raise ValueError(_PROBLEMS[protobuf.LONG_VARINT if is_long else protobuf.PAST_END])
