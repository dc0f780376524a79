"""Text of the Chrome trace format, which Perfetto and chrome://tracing open.

An event is a line of JSON with a comma. Lines of equal length are written as one matrix of
characters: numbers have spaces before them, which JSON allows. Times are int64 ns from 0; the
format has µs, with three decimals here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.trace.timelines import LAST_ARRIVAL, DrawnWaits, Place, Slices
from fastcomm_kernels.arrays import Ints

Characters = NDArray[np.void]  # of equal length, a number each

_DIGITS = 4  # of a number that one look-up formats
_BASE = 10**_DIGITS


def _table(fill: str) -> NDArray[np.uint32]:
    texts = [str(number).rjust(_DIGITS, fill).encode() for number in range(_BASE)]
    return np.array(texts).view(np.uint32)


# Text of the digits below others, then of the first digits of a number.
_LOWEST = np.concatenate([_table("0"), _table(" ")])
_HIGHER = _LOWEST.copy()
_HIGHER[_BASE] = np.frombuffer(b"    ", np.uint32)[0]  # nothing is above the first digit
_DECIMALS = np.array([f".{number:03}".encode() for number in range(1000)]).view(np.uint32)


def integers(values: Ints, digits: int = 12) -> Characters:
    """Return whole numbers from 0 as text of `digits` characters, a multiple of four."""
    return _text(_blocks(values, digits))


def microseconds(ns: Ints) -> Characters:
    """Return times in ns from 0 as text in µs with three decimals."""
    whole = ns // 1000
    return _text([*_blocks(whole, 12), _DECIMALS[ns - whole * 1000]])


def _blocks(values: Ints, digits: int) -> list[NDArray[np.uint32]]:
    """Return four characters of each number after the other."""
    blocks, table = list[NDArray[np.uint32]](), _LOWEST
    for _ in range(digits // _DIGITS):
        rest = values // _BASE
        blocks.insert(0, table[values - rest * _BASE + np.where(rest > 0, 0, _BASE)])
        values, table = rest, _HIGHER
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
        return b'{"displayTimeUnit":"ns","traceEvents":[\n'

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
