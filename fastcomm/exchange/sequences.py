"""Records of several ranks that should be one sequence, though each may lack some items.

An item has a code, which is the same wherever it is the same item, and the time of its end. The
places found are numbers from 0, NONE for an item whose rank could not be brought in line.

Collectives whose process group the trace does not name are such items: a stream runs them one
after the other, and all members of a collective finish it at the same time. If all ranks have
the same operations on a stream in the same order, and the ends agree once a constant clock
offset is removed, the k-th on one rank is the k-th on another. Whatever leaves a doubt is
refused. Times are in ns; each rank has its own clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NULL, Floats, Ints

NONE = -1

# So many items of one rank may lack before another rank's, or the rank is not brought in line.
MOST_LOST = 64
# Ends of one collective differ by less, but for the offset of the clocks.
APART_NS = 250_000
# Ends that agree agree within this; of so many items the offset of two clocks is estimated.
_AGREE_NS = 200_000
_SAMPLE = 256
# Where not all end together most still do, within this; and if so many agree, it is no chance.
NEAR_NS = 1_000_000
MOST_AGREE = 0.75
# Where less than half do, the nearest is taken that is not farther away.
_FAR_NS = 100_000_000

# Places of one rank's items (codes, ends) among those of all ranks before (codes, ends), and
# the ends on their clock; None where the rank cannot be brought in line.
_Items = tuple[Ints, Ints]
_Found = _Items | None
_Search = Callable[[Ints, Ints, Ints, Ints], _Found]

# Fewer matched collectives on a stream do not show whether their ends agree.
LEAST = 3
# Ends that differ by less agree, whatever else is known.
FLOOR_NS = 20_000
# Ends agree if they differ by less than this share of the gap between two collectives.
_SHARE_OF_GAP = 0.1
# Ends have to be closer to each other than arrivals are, by this factor.
_CLOSER = 4
# Shares of two sequences that have to be in both: of the shorter, and of the longer.
_LEAST_COMMON = (0.75, 0.5)
# Ranks form separate groups if a rank's ends are so many times closer to those of its
# neighbor than to those of the farthest rank.
_SEPARATE = 4
_LEAST_RANKS_TO_SEPARATE = 4
_RANKS_AT_ONCE = 256

Refusal = Literal[
    "smaller groups",
    "messages",
    "absent",
    "few",
    "order",
    "ends",
    "impossible",
    "loose",
    "separate",
]


def edges(sorted_values: Ints) -> Ints:
    """Where each run of equal values begins."""
    new = np.ones(len(sorted_values), np.bool_)
    new[1:] = sorted_values[1:] != sorted_values[:-1]
    return np.flatnonzero(new)


def of_one_end(code: Ints, stop: Ints, first: Ints) -> tuple[Ints, int]:
    """Places of items that end on all ranks at the same time; how many have none.

    Items are sorted by rank and end, `first` is where each rank begins; each has its own clock.
    """
    lengths = np.diff(np.append(first, len(code)))
    if len(first) > 1 and (lengths == lengths[0]).all():
        shape = (len(first), int(lengths[0]))
        if _in_line(code.reshape(shape), stop.reshape(shape)):
            return np.tile(np.arange(shape[1]), shape[0]), 0
    return _brought_in_line(code, stop, first, _by_ends)


def of_ends_apart(code: Ints, stop: Ints, first: Ints) -> tuple[Ints, int]:
    """The same of items of which one rank may be done before another: broadcasts, messages.

    Clocks should agree. What all ranks have in the same order goes by place, unless most ends
    agree otherwise; else by ends.
    """
    return _brought_in_line(code, stop, first, _by_place_or_ends)


def _in_line(code: Ints, stop: Ints) -> bool:
    """Whether rows of items are the same sequence: in codes, and in the gaps of their ends."""
    if (code != code[0]).any():
        return False
    ahead = stop - stop[0]
    off = np.abs(ahead - np.median(ahead, axis=1, keepdims=True).astype(np.int64))
    return bool((off <= _AGREE_NS).all())


def _brought_in_line(code: Ints, stop: Ints, first: Ints, search: _Search) -> tuple[Ints, int]:
    """Places in the sequence of all, which begins as the longest rank's and grows."""
    split = np.split(np.arange(len(code)), first[1:])
    ranks = sorted(split, key=lambda own: (-len(own), own[:1].tolist()))
    found = np.full(len(code), NONE, np.int64)
    longest = ranks[0]
    found[longest] = np.arange(len(longest))
    all_code, all_stop, number = code[longest], stop[longest], np.arange(len(longest))
    lost = 0
    for own in ranks[1:]:
        searched = search(all_code, all_stop, code[own], stop[own])
        if searched is None:
            lost += len(own)
            continue
        place, shifted = searched
        known = place != NONE
        found[own[known]] = number[place[known]]
        fresh = len(number) + np.arange(int((~known).sum()))
        found[own[~known]] = fresh
        merged = np.append(all_stop, shifted[~known])
        order = np.argsort(merged, kind="stable")
        all_stop = merged[order]
        all_code = np.append(all_code, code[own[~known]])[order]
        number = np.append(number, fresh)[order]
    return found, lost


def _by_ends(all_code: Ints, all_stop: Ints, code: Ints, stop: Ints) -> _Found:
    """By ends that agree; by place where they do not, but all codes do."""
    shifted = stop - offset(all_code, all_stop, code, stop)
    place = _aligned((all_code, all_stop), (code, shifted), APART_NS)
    if place is None and np.array_equal(code, all_code):
        place = np.arange(len(code))
    return None if place is None else (place, shifted)


def _by_place_or_ends(all_code: Ints, all_stop: Ints, code: Ints, stop: Ints) -> _Found:
    """By place where all codes agree, by ends where these are alike for more."""
    if np.array_equal(code, all_code):
        return _counted_off(all_code, all_stop, stop), stop
    for apart, is_shifted in ((NEAR_NS, False), (NEAR_NS, True), (_FAR_NS, False)):
        ahead = offset(all_code, all_stop, code, stop) if is_shifted else 0
        place = _aligned((all_code, all_stop), (code, stop - ahead), apart)
        if place is not None:
            return _filled(place, all_code, code), stop - ahead
    return None


def _counted_off(code: Ints, all_stop: Ints, stop: Ints) -> Ints:
    """Place by place, unless nearly all ends agree in another way and fewer in this one."""
    here = int((np.abs(all_stop - stop) <= NEAR_NS).sum())
    if here < len(code):
        place = _aligned((code, all_stop), (code, stop), NEAR_NS)
        agreed = 0 if place is None else int((place != NONE).sum())
        if place is not None and agreed > here and agreed >= MOST_AGREE * len(code):
            return _filled(place, code, code)
    return np.arange(len(code))


def _aligned(all_: _Items, own: _Items, apart: int) -> Ints | None:
    """Places by code and end; None where too many items have none."""
    if abs(len(all_[0]) - len(own[0])) > 2 * MOST_LOST:
        return None
    place = nearest(all_, own, apart)
    missing = int((place == NONE).sum())
    return None if missing > min(MOST_LOST, len(place) // 2) else place


def nearest(all_: _Items, own: _Items, apart: int) -> Ints:
    """Places of as many items as can be, as near as can be, and none farther than `apart`.

    Where longer than that nothing ends, in either, the sequences fall into pieces; most pieces
    are one item of each.
    """
    times = np.concatenate([all_[1], own[1]])
    order = np.argsort(times, kind="stable")
    piece = np.empty(len(times), np.int64)
    piece[order] = np.cumsum(np.append(0, np.diff(times[order]) > apart))
    count = int(piece.max()) + 1
    a, b = (_bounds(of, count) for of in (piece[: len(all_[1])], piece[len(all_[1]) :]))
    place = np.full(len(own[0]), NONE, np.int64)
    sizes = np.diff(a), np.diff(b)
    single = np.flatnonzero((sizes[0] == 1) & (sizes[1] == 1))
    alike = single[all_[0][a[single]] == own[0][b[single]]]
    place[b[alike]] = a[alike]
    several = (sizes[0] > 0) & (sizes[1] > 0) & (sizes[0] + sizes[1] > 2)  # noqa: PLR2004
    for k in np.flatnonzero(several).tolist():
        here, there = slice(a[k], a[k + 1]), slice(b[k], b[k + 1])
        columns = (all_[0][here], all_[1][here], own[0][there], own[1][there])
        found = matching.align(*columns, MOST_LOST, apart)
        place[there] = np.where(found == NONE, NONE, found + a[k])
    return place


def _bounds(piece: Ints, count: int) -> Ints:
    """Where each piece of sorted pieces begins, and the last ends."""
    return np.append(0, np.cumsum(np.bincount(piece, minlength=count)))


def _filled(place: Ints, all_code: Ints, code: Ints) -> Ints:
    """Places, with those of items between two that have one, if as many lack on both sides."""
    found = place.copy()
    known = np.flatnonzero(place != NONE)
    own = np.concatenate([[-1], known, [len(code)]])
    other = np.concatenate([[-1], place[known], [len(all_code)]])
    gap = np.diff(own)
    for k in np.flatnonzero((gap > 1) & (gap == np.diff(other))).tolist():
        inner = np.arange(other[k] + 1, other[k + 1])
        if np.array_equal(all_code[inner], code[own[k] + 1 : own[k + 1]]):
            found[own[k] + 1 : own[k + 1]] = inner
    return found


def offset(a_code: Ints, a_stop: Ints, b_code: Ints, b_stop: Ints) -> int:
    """How far b's clock is ahead of a's: what most pairs of ends that could be one agree on.

    Of several that equally many agree on it is the smallest.
    """
    chosen = np.linspace(0, len(b_stop) - 1, min(_SAMPLE, len(b_stop))).astype(np.int64)
    shift = np.arange(-MOST_LOST, MOST_LOST + 1)
    # Items may lack at the beginning of one, at its end, or between.
    shift = np.union1d(shift, shift + len(a_stop) - len(b_stop))
    place = chosen[:, None] + shift[None, :]
    inside = (place >= 0) & (place < len(a_stop))
    own = np.broadcast_to(chosen[:, None], place.shape)[inside]
    place = place[inside]
    same = a_code[place] == b_code[own]
    ahead = np.sort(b_stop[own[same]] - a_stop[place[same]])
    if not len(ahead):
        return 0
    agree = np.searchsorted(ahead, ahead + _AGREE_NS, side="right") - np.arange(len(ahead))
    best = np.flatnonzero(agree == agree.max())
    middle = ahead[best + (agree.max() - 1) // 2]
    return int(middle[np.argmin(np.abs(middle))])


@dataclass(frozen=True, slots=True)
class Stream:
    """The collectives of one rank on one stream, sorted by end."""

    op: Ints  # index into OPS
    size: Ints  # bytes, where they are the same on all members; else NULL
    iteration: Ints  # number
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.op)

    @property
    def tolerance_ns(self) -> int:
        """How far the ends of one collective may differ between this rank and another."""
        if len(self) < 2:  # noqa: PLR2004 - no gap
            return FLOOR_NS
        gap = float(np.median(np.diff(self.stop)))
        return int(np.clip(_SHARE_OF_GAP * gap, FLOOR_NS, APART_NS))


def places(reference: Stream, own: Stream) -> Ints | Refusal:
    """Return for each collective of a rank its place on the reference rank, or NONE.

    A refusal where the two do not have the same sequence. Either may lack some collectives at
    its beginning and its end; of those between only one of the two may.
    """
    if min(len(reference), len(own)) < LEAST:
        return "few"
    ours, theirs = _codes(reference, own)
    if np.array_equal(ours, theirs):
        place = np.arange(len(own))
        if _agree(reference, own, place):
            return place
    ahead = offset(ours, reference.stop, theirs, own.stop)
    apart = reference.tolerance_ns
    place = nearest((ours, reference.stop), (theirs, own.stop - ahead), apart)
    if not _is_one_sequence(place, len(reference)):
        return "ends" if np.array_equal(np.sort(ours), np.sort(theirs)) else "order"
    return place if _agree(reference, own, place) else "ends"


def _codes(reference: Stream, own: Stream) -> tuple[Ints, Ints]:
    """One number for each pair of operation and size; for an operation if a size is unknown."""
    op, size = np.append(reference.op, own.op), np.append(reference.size, own.size)
    unsized = np.isin(op, op[size == NULL])
    sizes, code = np.unique(np.where(unsized, NULL, size), return_inverse=True)
    code = op * len(sizes) + code
    return code[: len(reference)], code[len(reference) :]


def _is_one_sequence(place: Ints, length: int) -> bool:
    """Whether enough is common, and between the common ones only one of the two lacks some."""
    common, lengths = np.flatnonzero(place != NONE), sorted((len(place), length))
    least = max(share * each for share, each in zip(_LEAST_COMMON, lengths, strict=True))
    if len(common) < max(LEAST, least):
        return False
    found = place[common]
    own_alone = int(common[-1] - common[0]) + 1 - len(common)
    other_alone = int(found[-1] - found[0]) + 1 - len(common)
    is_ordered = bool((np.diff(found) > 0).all())
    return (
        is_ordered
        and not min(own_alone, other_alone)
        and own_alone + other_alone <= (min(MOST_LOST, len(common)))
    )


def _agree(reference: Stream, own: Stream, place: Ints) -> bool:
    """Whether ends agree, and most collectives are in iterations of the same number."""
    common = np.flatnonzero(place != NONE)
    other = place[common]
    late = own.stop[common] - reference.stop[other]
    off = np.abs(late - _lower_median(late))
    same = own.iteration[common] == reference.iteration[other]
    return bool(off.max() <= reference.tolerance_ns and 2 * same.sum() > len(same))


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of all ranks in some collectives of a stream, less the end on the reference rank.

    Both are shaped (ranks, collectives), on one clock; NaN where a rank lacks one.
    """

    start: Floats
    stop: Floats

    @classmethod
    def of(cls, start: Ints, stop: Ints, end: Ints) -> "Sample":
        """Align clocks by ends; NULL where a rank lacks one. `end`: of the reference."""
        lacks = stop == NULL
        ahead = np.array(
            [_lower_median((own - end)[~lack]) for own, lack in zip(stop, lacks, strict=True)]
        )
        return cls(
            *(
                np.where(lacks, np.nan, np.where(lacks, 0, times - end - ahead[:, None]))
                for times in (start, stop)
            )
        )

    @property
    def ends_ns(self) -> Floats:
        """From the first to the last end of each collective."""
        span: Floats = np.nanmax(self.stop, axis=0) - np.nanmin(self.stop, axis=0)
        return span

    @property
    def arrivals_ns(self) -> Floats:
        """From the first to the last arrival at each collective."""
        span: Floats = np.nanmax(self.start, axis=0) - np.nanmin(self.start, axis=0)
        return span

    def refusal(self) -> Refusal | None:
        """Why these are not one sequence of collectives of all ranks, if they are not."""
        if np.isnan(self.stop).all(axis=1).any():
            return "few"
        last_arrival, first_end = np.nanmax(self.start, axis=0), np.nanmin(self.stop, axis=0)
        if (last_arrival > first_end + FLOOR_NS).any():
            return "impossible"
        agreed = max(FLOOR_NS, float(np.median(self.arrivals_ns)) / _CLOSER)
        if float(np.median(self.ends_ns)) > agreed:
            return "loose"
        return "separate" if self._falls_apart() else None

    def _falls_apart(self) -> bool:
        """Whether ranks fall into groups that end together, each apart from the others."""
        if len(self.stop) < _LEAST_RANKS_TO_SEPARATE:
            return False
        off = np.nan_to_num(self.stop - np.nanmedian(self.stop, axis=0))
        parts = [_distances(off, first) for first in range(0, len(off), _RANKS_AT_ONCE)]
        near, far = (np.concatenate(each) for each in zip(*parts, strict=True))
        nearest, farthest = float(np.median(near)), float(np.median(far))
        return farthest > max(FLOOR_NS / 2, _SEPARATE * nearest)


def _lower_median(values: Ints) -> np.int64:
    """Return the lower of two medians; 0 of no values."""
    ordered = np.sort(values)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) else np.int64(0)


def _distances(off: Floats, first: int) -> tuple[Floats, Floats]:
    """Root mean square distances of some ranks to their nearest and farthest other rank."""
    own, square = off[first : first + _RANKS_AT_ONCE], (off**2).sum(axis=1)
    between = square[first : first + len(own), None] + square - 2 * own @ off.T
    distance = np.sqrt(np.maximum(between, 0) / off.shape[1])
    farthest = distance.max(axis=1)
    rows = np.arange(len(own))
    distance[rows, rows + first] = np.inf
    return distance.min(axis=1), farthest
