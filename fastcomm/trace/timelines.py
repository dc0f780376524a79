"""What timelines have in every format: slices on threads, waits, and arrows.

Times are int64 ns from 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fastcomm.trace.columns import alike
from fastcomm_kernels.arrays import Ints

LAST_ARRIVAL = "last arrival"  # name of the arrows to waits
_ID_BITS = 32  # of the arrows of a share


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
    edges = np.flatnonzero(np.diff(lane[order])) + 1
    for rows in np.split(order, edges) if len(order) else ():
        latest = np.maximum.accumulate(stop[rows])
        begins = np.flatnonzero(start[rows[1:]] >= latest[:-1]) + 1
        sizes = np.diff(np.concatenate([[0], begins, [len(rows)]]))
        for first in np.flatnonzero(sizes > 1).tolist():
            begin = 0 if not first else int(begins[first - 1])
            yield rows[begin : begin + int(sizes[first])]
