"""Which collective of one rank is which of another.

Two are one if their groups have the same members and their sequence numbers are the same. In a
group where not every event has a number of its own they are brought in line: by operation and
size, and by their ends, which all members reach at the same time. So a rank that lost some
events, at the edge of its trace or between, does not shift all that follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels import alignment

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

UNKNOWN = np.iinfo(np.int64).min
NONE = -1
_RANK_BITS = 40

# So many events of one rank may lack before another rank's, or the rank is not matched.
MOST_LOST = 64
# Ends of one collective differ by less, but for the offset of the clocks.
APART_NS = 250_000
# Ends that agree agree within this; of so many events the offset of two clocks is estimated.
_AGREE_NS = 200_000
_SAMPLE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Events that are one rank's part in a collective each, in any order; a row an event."""

    rank: Ints
    group: Ints  # the label of its members
    op: Ints
    seq: Ints  # UNKNOWN where there is none
    size: Ints  # bytes that are the same on all members; UNKNOWN
    stop: Ints  # ns, on the rank's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """The collective of each row: numbers from 0, NONE where no other rank has it."""

    instance: Ints
    count: int  # of collectives
    dropped: int  # rows of ranks that could not be brought in line with their group


def match(calls: Calls) -> Matches:
    """Find the collectives that several ranks have."""
    # One sort tells it where there are numbers; a rank and an operation are one key.
    member = calls.op << _RANK_BITS | calls.rank
    order = np.lexsort((member, calls.seq, calls.group))
    sorted_ = _Sorted(*(column[order] for column in (calls.group, calls.seq, member)))
    numbered = sorted_.numbered()
    instance = np.full(len(order), NONE, np.int64)
    number = np.cumsum(sorted_.begins_another() & numbered) - 1
    instance[order[numbered]] = number[numbered]
    done, dropped = int(number[-1]) + 1 if len(number) else 0, 0
    for rows in _groups(calls, order[~numbered]):
        places, lost = _by_order(calls, rows)
        dropped += lost
        instance[rows] = np.where(places == NONE, NONE, places + done)
        done += int(places.max(initial=NONE)) + 1
    instance, count = _of_several(instance, done)
    return Matches(instance=instance, count=count, dropped=dropped)


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Rows by group, number, operation and rank."""

    group: Ints
    seq: Ints
    member: Ints

    def numbered(self) -> Flags:
        """Whether each event has its own, of a rank and an operation, all over its group."""
        bad: Flags = self.seq == UNKNOWN
        bad[1:] |= ~self._differ(self.group, self.seq, self.member)
        starts = _edges(self.group)
        if not len(starts):
            return bad
        spoilt = np.logical_or.reduceat(bad, starts)
        numbered: Flags = ~np.repeat(spoilt, np.diff(np.append(starts, len(bad))))
        return numbered

    def begins_another(self) -> Flags:
        """Whether a row is of another collective than the one before."""
        op = self.member >> _RANK_BITS
        return np.append(
            np.ones(min(1, len(op)), np.bool_), self._differ(self.group, self.seq, op)
        )

    def _differ(self, *columns: Ints) -> Flags:
        differ = np.zeros(max(0, len(self.group) - 1), np.bool_)
        for column in columns:
            differ |= column[1:] != column[:-1]
        return differ


def _edges(sorted_values: Ints) -> Ints:
    """Where each run of equal values begins."""
    new = np.ones(len(sorted_values), np.bool_)
    new[1:] = sorted_values[1:] != sorted_values[:-1]
    return np.flatnonzero(new)


def _groups(calls: Calls, rows: Ints) -> Iterator[Ints]:
    """The rows of each group, by rank and end."""
    rows = rows[np.lexsort((calls.stop[rows], calls.rank[rows], calls.group[rows]))]
    edges = _edges(calls.group[rows])
    yield from np.split(rows, edges[1:]) if len(rows) else ()


def _by_order(calls: Calls, rows: Ints) -> tuple[Ints, int]:
    """Places of a group's rows in the sequence that its ranks share; how many have none."""
    rank, stop = calls.rank[rows], calls.stop[rows]
    code = _codes(calls, rows)
    edges = _edges(rank)
    lengths = np.diff(np.append(edges, len(rows)))
    if len(edges) > 1 and (lengths == lengths[0]).all():
        shape = (len(edges), int(lengths[0]))
        if _in_line(code.reshape(shape), stop.reshape(shape)):
            return np.tile(np.arange(shape[1]), shape[0]), 0
    return _brought_in_line(code, stop, np.split(np.arange(len(rows)), edges[1:]))


def _codes(calls: Calls, rows: Ints) -> Ints:
    """One number for each pair of operation and size."""
    pairs = np.stack([calls.op[rows], calls.size[rows]])
    _, code = np.unique(pairs, axis=1, return_inverse=True)
    return code.reshape(-1).astype(np.int64)


def _in_line(code: Ints, stop: Ints) -> bool:
    """Whether rows of events are the same sequence: in codes, and in the gaps of their ends."""
    if (code != code[0]).any():
        return False
    ahead = stop - stop[0]
    off = np.abs(ahead - np.median(ahead, axis=1, keepdims=True).astype(np.int64))
    return bool((off <= _AGREE_NS).all())


def _brought_in_line(code: Ints, stop: Ints, ranks: list[Ints]) -> tuple[Ints, int]:
    """Places in the sequence of all, which begins as the longest rank's and grows."""
    ranks = sorted(ranks, key=lambda own: (-len(own), own[0]))
    found = np.full(len(code), NONE, np.int64)
    first = ranks[0]
    found[first] = np.arange(len(first))
    all_code, all_stop, number = code[first], stop[first], np.arange(len(first))
    lost = 0
    for own in ranks[1:]:
        shifted = stop[own] - offset(all_code, all_stop, code[own], stop[own])
        if abs(len(all_code) - len(own)) > 2 * MOST_LOST:
            lost += len(own)
            continue
        place = alignment.align(all_code, all_stop, code[own], shifted, MOST_LOST, APART_NS)
        known = place != NONE
        if (~known).sum() > min(MOST_LOST, len(own) // 2):
            lost += len(own)
            continue
        found[own[known]] = number[place[known]]
        fresh = len(number) + np.arange(int((~known).sum()))
        found[own[~known]] = fresh
        merged = np.append(all_stop, shifted[~known])
        order = np.argsort(merged, kind="stable")
        all_stop = merged[order]
        all_code = np.append(all_code, code[own[~known]])[order]
        number = np.append(number, fresh)[order]
    return found, lost


def offset(a_code: Ints, a_stop: Ints, b_code: Ints, b_stop: Ints) -> int:
    """How far b's clock is ahead of a's: what most pairs of ends that could be one agree on.

    Of several that equally many agree on it is the smallest.
    """
    chosen = np.linspace(0, len(b_stop) - 1, min(_SAMPLE, len(b_stop))).astype(np.int64)
    shift = np.arange(-MOST_LOST, MOST_LOST + 1)
    # Events may lack at the beginning of one, at its end, or between.
    place = chosen[:, None] + np.append(shift, shift + len(a_stop) - len(b_stop))[None, :]
    inside = (place >= 0) & (place < len(a_stop))
    own = np.broadcast_to(chosen[:, None], place.shape)[inside]
    place = place[inside]
    same = a_code[place] == b_code[own]
    pairs = np.unique(np.stack([own[same], place[same]]), axis=1)
    ahead = np.sort(b_stop[pairs[0]] - a_stop[pairs[1]])
    if not len(ahead):
        return 0
    agree = np.searchsorted(ahead, ahead + _AGREE_NS, side="right") - np.arange(len(ahead))
    best = np.flatnonzero(agree == agree.max())
    middle = ahead[best + (agree.max() - 1) // 2]
    return int(middle[np.argmin(np.abs(middle))])


def _of_several(instance: Ints, count: int) -> tuple[Ints, int]:
    """Instances numbered anew, those of one rank alone left out."""
    known = instance != NONE
    several = np.bincount(instance[known], minlength=count) > 1
    number = np.where(several, np.cumsum(several) - 1, NONE)
    found = np.full(len(instance), NONE, np.int64)
    found[known] = number[instance[known]]
    return found, int(several.sum())
