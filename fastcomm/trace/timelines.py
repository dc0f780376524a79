"""Timelines for Perfetto: slices on threads, waits, arrows; the Chrome trace format.

Times are int64 ns from 0.

An event is a line of JSON with a comma. Lines of equal length are written as one matrix of
characters: numbers have spaces before them, which JSON allows. Times are int64 ns from 0; the
format has µs, with three decimals here.

A *piece* is a file with the bytes of some events, maybe deflated.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastcomm.files import aside, fast_zlib
from fastcomm.trace.columns import alike, block_starts
from fastcomm_kernels.arrays import Ints

LAST_ARRIVAL = "last arrival"  # name of the arrows to waits
_ID_BITS = 32  # of the arrows of a share
Characters = NDArray[np.void]  # of equal length, a number each
_DIGITS = 4  # of a number that one look-up formats
_BASE = 10**_DIGITS
_DECIMALS = np.array([f".{number:03}".encode() for number in range(1000)]).view(np.uint32)
_zlib = fast_zlib()
# Of a gzip file: deflate, no name, no time, unknown system; and its empty last block.
_GZIP_HEAD, _DEFLATE_END = b"\x1f\x8b\x08\0\0\0\0\0\0\xff", b"\x03\0"
_CRC = 0xEDB88320  # polynomial of gzip's checksum, reversed
_CRC_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Events with a length, none of which begins in another one of its thread."""

    heads: Sequence[Mapping[str, Any]]  # `name`, `cat`, `pid`, `tid`, and maybe `args`
    head: Ints  # index into `heads` of each event
    start: Ints  # ns from 0
    stop: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where events are drawn: process, thread, and time of each."""

    pid: Ints
    tid: Ints
    time: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnWaits:
    """Waits inside of collectives and messages, and what each waits for."""

    place: Place  # where each begins
    length: Ints  # ns, at least 1
    awaited: Place  # where that begins which each waits for
    arrival: Ints  # when all have begun: inside of what waits, at its last ns at the latest

    def ids(self, share: int) -> Ints:
        """Return a number for the arrow to each wait, unique among all shares."""
        return np.arange(len(self.length)) + (share << _ID_BITS)


# Stands in each timeline: it has not all that the traces have, and is none of them.
PROGRAM = "fastcomm timeline"
DRAWN = (
    "a timeline that fastcomm wrote to be looked at; it is not read, as it lacks what the "
    "traces have: give the traces that it was made of"
)


class TimelineFormat(Protocol):
    """A format that timelines are written in."""

    @property
    def begin(self) -> bytes:
        """What a file begins with."""

    def rank(
        self, rank: int, name: str, threads: Mapping[int, str], slices: Slices
    ) -> Sequence[bytes]:
        """Return a rank with the titles of its threads, and its events."""

    def waits(self, share: int, waits: DrawnWaits) -> Sequence[bytes]:
        """Return waits and arrows to them, of a share of the communication."""

    def end(self, pid: int) -> bytes:
        """Return what a file ends with; `pid` is a process of it."""


def free_levels(lane: Ints, start: Ints, stop: Ints, *, nests: bool = False) -> Ints:
    """Return for each event the first level of its lane that is free when it starts.

    Slices of one thread must not overlap: Perfetto drops them. With `nests`, an event may be
    inside another one, as calls are.
    """
    level = np.zeros(len(lane), np.int64)
    order = np.lexsort((-stop if nests else stop, start, lane))
    for rows in _overlapping(order, lane, start, stop):
        running: list[list[int]] = []  # by level: ends of the events that are open, outer first
        for row in rows.tolist():
            begin, end = int(start[row]), int(stop[row])
            for ends in running:
                while ends and ends[-1] <= begin:
                    ends.pop()
            fits = (not ends or (nests and end <= ends[-1]) for ends in running)
            place = next((k for k, fit in enumerate(fits) if fit), len(running))
            if place == len(running):
                running.append([])
            running[place].append(end)
            level[row] = place
    return level


def threads(
    first: int,
    lane: Ints,
    times: tuple[Ints, Ints],
    title: Callable[[int], str],
    *,
    nests: bool = False,
) -> tuple[Ints, dict[int, str]]:
    """Return the thread of each event, and the titles of threads: one per lane and level.

    Parameters
    ----------
    first
        Number of the first thread.
    lane
        Lane of each event.
    times
        Start and stop of each event.
    title
        Returns the title of the lane of an event.
    nests
        As in `free_levels`.

    """
    level = free_levels(lane, *times, nests=nests)
    rows, number = alike(lane, level)
    titles = {}
    for thread, row in enumerate(rows.tolist(), first):
        titles[thread] = title(row) + (f" ({level[row] + 1})" if level[row] else "")
    return number + first, titles


def _overlapping(order: Ints, lane: Ints, start: Ints, stop: Ints) -> Iterator[Ints]:
    """Yield the rows of each run of overlapping events of a lane; `order` is by lane."""
    edges = block_starts(lane[order])[1:]
    for rows in np.split(order, edges) if len(order) else ():
        latest = np.maximum.accumulate(stop[rows])
        begins = np.flatnonzero(start[rows[1:]] >= latest[:-1]) + 1
        sizes = np.diff(np.concatenate([[0], begins, [len(rows)]]))
        for first in np.flatnonzero(sizes > 1).tolist():
            begin = 0 if not first else int(begins[first - 1])
            yield rows[begin : begin + int(sizes[first])]


def _table(fill: str) -> NDArray[np.uint32]:
    texts = [str(number).rjust(_DIGITS, fill).encode() for number in range(_BASE)]
    return np.array(texts).view(np.uint32)


@cache  # most commands need no text of numbers
def _tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return text of the digits below others, then of the first digits of a number.

    The first table is of the last digits, the second of those above them.
    """
    lowest = np.concatenate([_table("0"), _table(" ")])
    higher = lowest.copy()
    higher[_BASE] = np.frombuffer(b"    ", np.uint32)[0]  # nothing is above the first digit
    return lowest, higher


def integers(values: Ints, digits: int = 12) -> Characters:
    """Return whole numbers from 0 as text of `digits` characters, a multiple of four."""
    return _text(_blocks(values, digits))


def microseconds(ns: Ints) -> Characters:
    """Return times in ns from 0 as text in µs with three decimals."""
    whole = ns // 1000
    return _text([*_blocks(whole, 12), _DECIMALS[ns - whole * 1000]])


def _blocks(values: Ints, digits: int) -> list[NDArray[np.uint32]]:
    """Return four characters of each number after the other."""
    table, higher = _tables()
    blocks: list[NDArray[np.uint32]] = []
    for _ in range(digits // _DIGITS):
        rest = values // _BASE
        blocks.insert(0, table[values - rest * _BASE + np.where(rest > 0, 0, _BASE)])
        values, table = rest, higher
    return blocks


def _text(blocks: Sequence[NDArray[np.uint32]]) -> Characters:
    return np.stack(blocks, axis=1).view(f"V{_DIGITS * len(blocks)}")[:, 0]


def lines(*parts: bytes | Characters) -> bytes:
    """Return the text of lines: bytes are in each line, characters have a number per line."""
    arrays = [np.void(part) if isinstance(part, bytes) else part for part in parts]
    count = max((len(part) for part in parts if not isinstance(part, bytes)), default=1)
    text = np.empty(count, [(str(k), array.dtype) for k, array in enumerate(arrays)])
    for k, array in enumerate(arrays):
        text[str(k)] = array
    return text.tobytes()


def slice_lines(slices: Slices) -> bytes:
    """Return the lines of events."""
    order = np.argsort(slices.head, kind="stable")
    length = slices.stop - slices.start
    times = microseconds(slices.start[order]), microseconds(length[order])
    heads = range(len(slices.heads) + 1)
    edges = np.searchsorted(slices.head[order], heads).tolist()
    return b"".join(
        lines(
            _line({"ph": "X", **common})[: -len(b"},\n")] + b',"ts":',
            times[0][begin:end],
            b',"dur":',
            times[1][begin:end],
            b"},\n",
        )
        for common, begin, end in zip(slices.heads, edges, edges[1:], strict=False)
        if end > begin
    )


def _parts(place: Place) -> tuple[bytes | Characters, ...]:
    """Return the parts of lines that tell where events are drawn."""
    numbers = integers(place.pid, 8), b',"tid":', integers(place.tid, 8)
    return b'"pid":', *numbers, b',"ts":', microseconds(place.time)


def arrows(name: str, ids: Ints, begin: Place, end: Place) -> bytes:
    """Return the lines of arrows between the events at two places; `ids` are unique."""
    head = f'{{"name":{json.dumps(name)},"cat":{json.dumps(name)},"id":'.encode()
    number = integers(ids, 16)
    return lines(head, number, b',"ph":"s",', *_parts(begin), b"},\n") + lines(
        head, number, b',"ph":"f","bp":"e",', *_parts(end), b"},\n"
    )


def titles(pid: int, name: str, order: int, threads: Mapping[int, str]) -> bytes:
    """Return the lines that name a process and its threads, and place it by `order`."""
    rows: list[tuple[str, dict[str, int], dict[str, Any]]] = [
        ("process_name", {}, {"name": name})
    ]
    for place, (tid, thread) in enumerate(threads.items()):
        rows.append(("thread_name", {"tid": tid}, {"name": thread}))
        rows.append(("thread_sort_index", {"tid": tid}, {"sort_index": place}))
    return order_line(pid, order) + b"".join(
        _line({"ph": "M", "name": kind, "pid": pid, **thread, "args": args})
        for kind, thread, args in rows
    )


def order_line(pid: int, order: int) -> bytes:
    """Return the line that places a process by `order`."""
    args = {"sort_index": order}
    return _line({"ph": "M", "name": "process_sort_index", "pid": pid, "args": args})


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b",\n"


class ChromeTimeline:
    """A timeline as text of the Chrome trace format."""

    @property
    def begin(self) -> bytes:
        """What a file begins with."""
        head = f'{{"displayTimeUnit":"ns","otherData":{{"program":"{PROGRAM}"}},"traceEvents":['
        return f"{head}\n".encode()

    def rank(
        self, rank: int, name: str, threads: Mapping[int, str], slices: Slices
    ) -> tuple[bytes, ...]:
        """Return a rank with the titles of its threads, and its events."""
        return titles(rank, name, rank, threads), slice_lines(slices)

    def waits(self, share: int, waits: DrawnWaits) -> tuple[bytes, ...]:
        """Return waits and arrows to them, of a share of the communication."""
        place, awaited = waits.place, waits.awaited
        slices = lines(
            b'{"ph":"X","name":"wait","cat":"wait","args":{"for rank":',
            integers(awaited.pid, 8),
            b"},",
            *_parts(place),
            b',"dur":',
            microseconds(waits.length),
            b"},\n",
        )
        inside = replace(place, time=waits.arrival)
        return slices, arrows(LAST_ARRIVAL, waits.ids(share), awaited, inside)

    def end(self, pid: int) -> bytes:
        """Return what a file ends with: a line of a process, without a comma."""
        return order_line(pid, pid).rstrip(b",\n") + b"\n]}\n"


def is_compressed(target: Path) -> bool:
    """Return whether a file is gzipped, which its name says."""
    return target.name.endswith(".gz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A file with the bytes of some events."""

    path: Path
    length: int  # bytes, inflated
    crc: int  # of the inflated bytes, for gzip

    @classmethod
    def write(cls, path: Path, texts: Iterable[bytes], *, compressed: bool) -> "Piece":
        """Write bytes to a new file, deflated if the joined file is `compressed`."""
        length = crc = 0
        deflate = _zlib.compressobj(1, _zlib.DEFLATED, -15)
        with path.open("wb") as file:
            for text in texts:
                length += len(text)
                if compressed:
                    crc = _zlib.crc32(text, crc)
                    file.write(deflate.compress(text))
                else:
                    file.write(text)
            if compressed:
                file.write(deflate.flush(_zlib.Z_SYNC_FLUSH))
        return cls(path=path, length=length, crc=crc)


def join(begin: bytes, pieces: Iterable[Piece], end: bytes, target: Path, folder: Path) -> None:
    """Write a file of pieces, which are removed; gzipped if its name ends in ``.gz``.

    Parameters
    ----------
    begin, end
        What stands before and behind the pieces.
    pieces
        In the order in which they are written.
    target
        File to write.
    folder
        Directory for the begin and the end.

    Raises
    ------
    FastcommError
        If the file cannot be written.

    """
    is_gzip = is_compressed(target)
    head = Piece.write(folder / "head", [begin], compressed=is_gzip)
    tail = Piece.write(folder / "tail", [end], compressed=is_gzip)
    length = crc = 0
    with aside(target) as unfinished, unfinished.open("wb") as file:
        file.write(_GZIP_HEAD if is_gzip else b"")
        for piece in (head, *pieces, tail):
            with piece.path.open("rb") as part:
                shutil.copyfileobj(part, file, 1 << 20)
            piece.path.unlink()
            crc = _joined_crc(crc, piece.crc, piece.length) if is_gzip else 0
            length += piece.length
        if is_gzip:
            file.write(_DEFLATE_END + struct.pack("<II", crc, length & 0xFFFFFFFF))


def _joined_crc(first: int, second: int, length: int) -> int:
    """Return the checksum of two texts from theirs; `length` is the second's, in bytes."""
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            first = _applied(_zeros(bit), first)
    return first ^ second


@cache
def _zeros(power: int) -> list[int]:
    """Return what 2^power zero bytes do to a checksum: a linear map of 32 bits."""
    if power:
        half = _zeros(power - 1)
        return [_applied(half, column) for column in half]
    matrix = [_CRC, *(1 << bit for bit in range(_CRC_BITS - 1))]  # of a zero bit
    for _ in range(3):
        matrix = [_applied(matrix, column) for column in matrix]
    return matrix


def _applied(matrix: Sequence[int], bits: int) -> int:
    """Return a matrix times a vector, modulo 2; `matrix` has columns."""
    chosen = (column for place, column in enumerate(matrix) if bits >> place & 1)
    return reduce(int.__xor__, chosen, 0)
