"""Packets of a Perfetto trace (`.pftrace`), which ui.perfetto.dev opens.

Numbers of fields are those of Perfetto's public definitions. Each piece is a *sequence*: its
packets are sorted by time, each has the difference to the one before, and its texts are
numbers that its first packets explain. Where events of two sequences have one time, viewers
take them in the order of the file: waits, which begin with what waits, follow the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.trace.columns import alike
from fastcomm.trace.timelines import LAST_ARRIVAL, PROGRAM, DrawnWaits, Place, Slices
from fastcomm_kernels.arrays import NONE, Ints
from fastcomm_kernels.perfetto_text import Contents, packets

CellRows = NDArray[np.uint8]  # a row of ten bytes each
FieldValue = int | str | bytes

# Fields of a trace and of a packet.
_PACKET = 1
_SNAPSHOT, _TIME, _SEQUENCE, _TEXTS, _FLAGS = 6, 8, 10, 12, 13
_CONFIG, _CLOCK, _DEFAULTS, _TRACK = 33, 58, 59, 60
_SESSION_NAME = 22  # in the configuration of a trace
_RESET, _USES_TEXTS = 1, 2  # flags
_BOOT, _EPOCH, _INCREMENTAL = 6, 1, 64  # clocks
_EXPLICIT = 3  # order of the tracks of a process
# Fields of an event: its type is begin or end of a slice, or an instant; arrows are flows.
_CATEGORY, _ARG, _TYPE, _NAME, _ON_TRACK, _FLOW, _LAST_FLOW = 3, 4, 9, 10, 11, 47, 48
_BEGIN, _END, _INSTANT = 1, 2, 3
# Kinds of texts, and fields of an arg.
_CATEGORIES, _NAMES, _KEYS, _VALUES = 1, 2, 3, 29
_KEY, _NUMBER, _TEXT = 1, 4, 17

_CELL = 10  # bytes
_SEVEN_BITS = 127
_FIXED64 = 1  # wire type


def number(value: int) -> bytes:
    """Return a number from 0 on as protobuf has it: seven bits a byte, the lowest first."""
    parts = bytearray()
    while value > _SEVEN_BITS:
        parts.append(value & _SEVEN_BITS | 128)
        value >>= 7
    return bytes([*parts, value])


def message(*fields: tuple[int, FieldValue]) -> bytes:
    """Return a message of fields: numbers from 0 on, texts, and other messages."""
    parts = []
    for key, value in fields:
        if isinstance(value, int):
            parts += [number(key << 3), number(value)]
        else:
            content = value.encode() if isinstance(value, str) else value
            parts += [number(key << 3 | 2), number(len(content)), content]
    return b"".join(parts)


def _packet(*fields: tuple[int, FieldValue]) -> bytes:
    return message((_PACKET, message(*fields)))


class _Texts:
    """Numbers of the texts of a sequence, from 1 on, by kind of text."""

    def __init__(self) -> None:
        self._numbers = dict[tuple[int, str], int]()

    def number(self, kind: int, text: str) -> int:
        return self._numbers.setdefault((kind, text), len(self._numbers) + 1)

    def message(self) -> bytes:
        entries = sorted(self._numbers.items())
        return message(*((kind, message((1, own), (2, text))) for (kind, text), own in entries))

    def arg(self, key: str, value: int | str) -> bytes:
        own = (
            (_NUMBER, value) if isinstance(value, int) else (_TEXT, self.number(_VALUES, value))
        )
        return message((_KEY, self.number(_KEYS, key)), own)

    def number_prefix(self, key: str) -> bytes:
        """Return an arg up to its value, a number that fills a cell."""
        start = message((_KEY, self.number(_KEYS, key))) + number(_NUMBER << 3)
        prefix = number(_ARG << 3 | 2)
        return prefix + number(_CELL - len(prefix) - 1) + start

    def named(self, kind: int, name: str, category: str) -> bytes:
        """Return the fields of an event that its type, name and category are in."""
        return message(
            (_TYPE, kind),
            (_NAME, self.number(_NAMES, name)),
            (_CATEGORY, self.number(_CATEGORIES, category)),
        )

    def begin_of(self, head: Mapping[str, Any], track: int) -> bytes:
        """Return the fields that the begins of slices on a track have in common."""
        args = head.get("args", {})
        return self.named(_BEGIN, head["name"], head["cat"]) + message(
            (_ON_TRACK, track),
            *((_ARG, self.arg(key, value)) for key, value in args.items()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Events:
    """Events of a sequence, in any order."""

    time: Ints
    turn: Ints  # among those of one time
    head: Ints  # row of `heads` of each
    heads: Sequence[bytes]  # fields that several have in common
    owner: Ints  # event of each cell
    cells: CellRows  # further fields

    def packets(self, prefix: bytes) -> bytes:
        """Return the packets of the events by time; `prefix` is in each."""
        order = np.lexsort((self.turn, self.time))
        row = np.empty_like(order)
        row[order] = np.arange(len(order))
        cells = np.argsort(row[self.owner], kind="stable")
        counts = np.bincount(row[self.owner], minlength=len(order))
        sizes = np.array([len(head) for head in self.heads], np.int64)
        return packets(
            np.diff(self.time[order], prepend=0),
            np.frombuffer(prefix, np.uint8),
            self.head[order],
            Contents(_edges(sizes), np.frombuffer(b"".join(self.heads), np.uint8)),
            Contents(_edges(_CELL * counts), self.cells[cells].reshape(-1)),
        ).tobytes()


def _edges(sizes: Ints) -> Ints:
    """Return where strings begin, and the end of the last."""
    return np.concatenate([[0], np.cumsum(sizes)])


class PerfettoTimeline:
    """A timeline as packets."""

    def __init__(self, zero: int, last_rank: int) -> None:
        """Take the moment that is time 0, ns from 0, and the largest number of a rank."""
        self._zero = zero
        self._rank_bits = (last_rank + 1).bit_length()  # of the numbers of tracks

    @property
    def begin(self) -> bytes:
        """What a file begins with: the program, and the clock."""
        program = _packet((_CONFIG, message((_SESSION_NAME, PROGRAM))))
        clocks = (message((1, clock), (2, self._zero)) for clock in (_BOOT, _EPOCH))
        snapshot = message(*((1, clock) for clock in clocks))
        return program + _packet((_TIME, self._zero), (_SEQUENCE, 1), (_SNAPSHOT, snapshot))

    def rank(
        self, rank: int, name: str, threads: Mapping[int, str], slices: Slices
    ) -> tuple[bytes, ...]:
        """Return a rank with the titles of its threads, and its events."""
        texts = _Texts()
        own = [self._track(head["pid"], head["tid"]) for head in slices.heads]
        begins = [texts.begin_of(head, on) for head, on in zip(slices.heads, own, strict=True)]
        tracks, track = np.unique(own, return_inverse=True)
        ends = [message((_TYPE, _END), (_ON_TRACK, on)) for on in tracks.tolist()]
        events = _Events(
            time=np.concatenate([slices.start, slices.stop]),
            turn=_turns(slices.start, slices.stop),
            head=np.concatenate([slices.head, len(begins) + track[slices.head]]),
            heads=begins + ends,
            owner=np.empty(0, np.int64),
            cells=np.empty((0, _CELL), np.uint8),
        )
        titles = self._titles(rank, name, threads)
        return titles, *self._sequence(2 * rank + 2, texts, events)

    def waits(self, share: int, waits: DrawnWaits) -> tuple[bytes, ...]:
        """Return waits and arrows to them, of a share of the communication.

        An arrow begins in an instant on the thread of the last arrival.
        """
        texts, count = _Texts(), len(waits.length)
        awaited, arrow = waits.awaited, waits.ids(share) + 1
        first, source = alike(awaited.pid, awaited.tid, awaited.time)
        begin, instant = np.arange(count), 2 * count + np.arange(len(first))
        own = self._track_cells(waits.place)
        cells = {
            "begin": (begin, own),
            "rank": (begin, _cells(texts.number_prefix("for rank"), awaited.pid)),
            "arrow": (begin, _flow_cells(_LAST_FLOW, arrow)),
            "end": (begin + count, own),
            "instant": (instant, self._track_cells(awaited)[first]),
            "arrows": (instant[source], _flow_cells(_FLOW, arrow)),
        }
        turns = _turns(waits.place.time, waits.arrival)
        events = _Events(
            time=np.concatenate([waits.place.time, waits.arrival, awaited.time[first]]),
            turn=np.concatenate([turns, np.full(len(first), NONE)]),
            head=np.repeat(np.arange(3), [count, count, len(first)]),
            heads=[
                texts.named(_BEGIN, "wait", "wait"),
                message((_TYPE, _END)),
                texts.named(_INSTANT, LAST_ARRIVAL, LAST_ARRIVAL),
            ],
            owner=np.concatenate([owner for owner, _ in cells.values()]),
            cells=np.concatenate([cell for _, cell in cells.values()]),
        )
        return self._sequence(2 * share + 3, texts, events)

    def end(self, pid: int) -> bytes:
        """Return what a file ends with: nothing."""
        return b""

    def _sequence(self, own: int, texts: _Texts, events: _Events) -> tuple[bytes, ...]:
        """Return the packets of a sequence; `own` is its number."""
        boot = message((1, _BOOT), (2, self._zero))
        incremental = message((1, _INCREMENTAL), (2, self._zero), (3, 1))
        reset = _packet(
            (_TIME, self._zero),
            (_CLOCK, _BOOT),
            (_SEQUENCE, own),
            (_FLAGS, _RESET),
            (_SNAPSHOT, message((1, boot), (1, incremental))),
            (_DEFAULTS, message((_CLOCK, _INCREMENTAL))),
        )
        sequence = _SEQUENCE, own
        names = _packet(sequence, (_FLAGS, _USES_TEXTS), (_TEXTS, texts.message()))
        # Events say not that they use texts: it matters in buffers that lose packets.
        return reset, names, events.packets(message(sequence))

    def _titles(self, pid: int, name: str, threads: Mapping[int, str]) -> bytes:
        """Return packets that describe a process and its threads, placed as they come."""
        parent = self._track(pid, 0)
        process = message((1, pid), (6, name), (3, pid))
        rows = [message((1, parent), (3, process), (11, _EXPLICIT))]
        for place, (tid, title) in enumerate(threads.items()):
            own = self._track(pid, tid)
            rows.append(message((1, own), (5, parent), (2, title), (12, place)))
        return b"".join(_packet((_SEQUENCE, 1), (_TRACK, row)) for row in rows)

    def _track(self, pid: int, tid: int) -> int:
        """Return the number of the track of a thread; thread 0 is the process itself."""
        return tid << self._rank_bits | pid + 1

    def _track_cells(self, place: Place) -> CellRows:
        """Return fields with the tracks of events."""
        return _cells(bytes([_ON_TRACK << 3]), place.tid << self._rank_bits | place.pid + 1)


def _turns(start: Ints, stop: Ints) -> Ints:
    """Return the turns of begins, then ends, among those of one time.

    Of slices that do not overlap, each ends before the next begins.
    """
    turn = np.empty(len(start), np.int64)
    turn[np.lexsort((stop, start))] = np.arange(0, 2 * len(start), 2)
    return np.concatenate([turn, turn + 1])


def _cells(prefix: bytes, values: Ints) -> CellRows:
    """Return fields that end with a number, filled up to the size of a cell."""
    shifts = 7 * np.arange(_CELL - len(prefix))
    cells = np.empty((len(values), _CELL), np.uint8)
    cells[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    cells[:, len(prefix) :] = values[:, None] >> shifts & _SEVEN_BITS | 128
    cells[:, -1] &= _SEVEN_BITS
    return cells


def _flow_cells(key: int, ids: Ints) -> CellRows:
    """Return fields of eight bytes."""
    prefix = np.frombuffer(number(key << 3 | _FIXED64), np.uint8)
    return np.hstack(
        [np.tile(prefix, (len(ids), 1)), ids.astype("<i8").view(np.uint8).reshape(-1, 8)]
    )
