"""Collectives and messages with all of their members that were read, on one clock.

Rows are events, sorted by what they met in and by arrival; `edges` says where each begins. A
message is a meeting of two. Who waits for whom: everybody for the last, but of operations with
a root the others for the root (Broadcast, Scatter), or the root for the others.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.calls import Events, Met
from fastcomm.trace.schema import FROM_ROOT, OP, TO_ROOT, numbers

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_FROM_ROOT, _TO_ROOT = numbers(FROM_ROOT), numbers(TO_ROOT)
_MESSAGE = OP["SendRecv"]


@dataclass(frozen=True, slots=True)
class Meetings:
    """What several ranks were matched in."""

    row: Ints  # of the events
    edges: Ints  # first row of each meeting, and one behind the last
    start: Ints  # of each row, on the one clock
    until: Ints  # of each row: when whom it waits for had come
    holds: Flags  # of each row: whether others wait for it
    arrived: Ints  # of each meeting: when the last had come
    # From then to the median of its ends, the lower of two; with a root, and of messages, where
    # some are done before, to the last end. Negative: the clocks do not agree so well.
    transfer: Ints

    @classmethod
    def of(cls, events: Events, met: Met, ahead: Ints) -> "Meetings":
        """The meetings of some rows of the events; `ahead` is what clocks are ahead by."""
        start, stop = (
            events.start[met.row] - ahead[met.row],
            events.stop[met.row] - ahead[met.row],
        )
        ends = stop[np.lexsort((stop, met.number))]
        order = np.lexsort((start, met.number))
        row, number, start = met.row[order], met.number[order], start[order]
        edges = np.searchsorted(number, np.arange(met.count + 1))
        arrived = start[edges[1:] - 1]
        op = events.op[row[edges[:-1]]]
        middle = (edges[:-1] + edges[1:] - 1) // 2
        end = ends[np.where(_ends_apart(op), edges[1:] - 1, middle)]
        until, holds = _waiting(events, row, start, np.diff(edges), arrived)
        return cls(
            row=row,
            edges=edges,
            start=start,
            until=until,
            holds=holds,
            arrived=arrived,
            transfer=end - arrived,
        )

    @property
    def size(self) -> Ints:
        """How many members each has."""
        return np.diff(self.edges)

    @property
    def first(self) -> Ints:
        """The row of the first to come."""
        return self.edges[:-1]

    @property
    def last(self) -> Ints:
        """The row of the last to come."""
        return self.edges[1:] - 1

    @property
    def wait(self) -> Ints:
        """Of each row: how long it was there before whom it waits for."""
        wait: Ints = np.maximum(self.until - self.start, 0)
        return wait

    @property
    def held_up(self) -> Ints:
        """Of each meeting: how much later the last came than the one before, if that waits."""
        late = self.arrived - self.start[self.last - 1]
        return np.where(self.holds[self.last], late, 0)

    @property
    def later(self) -> Ints:
        """Of each row: how much later it came than the lower median of the others."""
        size, place = np.repeat(self.size, self.size), self._place()
        middle = (size - 2) // 2
        middle += middle >= place  # a row is none of the others
        later: Ints = self.start - self.start[np.repeat(self.first, self.size) + middle]
        return later

    def largest(self, values: Ints) -> Ints:
        """Of each meeting the largest value of its members; `values` are by event."""
        return self._over(np.maximum, values[self.row])

    def smallest(self, values: Ints) -> Ints:
        """Of each meeting the smallest value of its members; `values` are by event."""
        return self._over(np.minimum, values[self.row])

    def total(self, values: Ints) -> Ints:
        """Of each meeting the sum over its rows."""
        return self._over(np.add, values)

    def _over(self, what: np.ufunc, values: Ints) -> Ints:
        if not len(self.size):
            return np.zeros(0, np.int64)
        found: Ints = what.reduceat(values, self.first)
        return found

    def _place(self) -> Ints:
        return np.arange(len(self.row)) - np.repeat(self.first, self.size)


def _ends_apart(op: NDArray[np.int8]) -> Flags:
    """Whether members may be done before others have come."""
    apart: Flags = np.isin(op, _FROM_ROOT) | np.isin(op, _TO_ROOT) | (op == _MESSAGE)
    return apart


def _waiting(
    events: Events, row: Ints, start: Ints, size: Ints, arrived: Ints
) -> tuple[Ints, Flags]:
    """Until when each row waits, and whether others wait for it."""
    until, op = np.repeat(arrived, size), events.op[row]
    holds = np.ones(len(row), np.bool_)
    from_root, to_root = np.isin(op, _FROM_ROOT), np.isin(op, _TO_ROOT)
    if from_root.any() or to_root.any():
        is_root = events.partner[row] == events.rank[row]
        meeting = np.repeat(np.arange(len(size)), size)
        begun = np.zeros(len(size), np.int64)
        begun[meeting[is_root]] = start[is_root]
        until = np.where(from_root, begun[meeting], until)
        until = np.where(to_root & ~is_root, start, until)
        holds = np.where(from_root, is_root, ~to_root | ~is_root)
    return until, holds
