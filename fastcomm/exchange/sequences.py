"""Align the sequences of several ranks, each of which may miss some items.

An item has a code, equal for equal items, and an end in ns. Its place is its index in the
common sequence, from 0; NONE if its rank cannot be aligned.

Collectives of unknown process groups are such items: a stream runs them one after the other,
and all members of a collective finish it at the same time. So if all ranks have the same
operations on a stream in the same order, and the ends agree once a constant clock offset is
removed, the k-th on one rank is the k-th on another. In case of doubt nothing is matched: a
wrong match is worse than none. Times are in ns. Each rank has its own clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NULL, Floats, Ints

NONE = -1

# Number of items that a rank may miss; with more missing, it is not aligned.
MAX_MISSING = 64
# Maximum difference between the ends of one collective on aligned clocks.
APART_NS = 250_000
# Tolerance of clock offsets, and the number of items used to estimate an offset.
_AGREE_NS = 200_000
_SAMPLE = 256
# For operations that may end at different times: ends within NEAR_NS agree; a share of
# MOST_AGREE agreeing ends is not by chance.
NEAR_NS = 1_000_000
MOST_AGREE = 0.75
# If fewer than half agree, the nearest item is taken, at most this far away.
_FAR_NS = 100_000_000

# Codes and ends.
_Items = tuple[Ints, Ints]
# Places of a rank's items in the common sequence, and their ends on its clock; None if the rank
# cannot be aligned.
_Alignment = tuple[Ints, Ints] | None
# Takes codes and ends of the common sequence, then codes and ends of the rank.
_Search = Callable[[Ints, Ints, Ints, Ints], _Alignment]

# Fewer matched collectives on a stream do not show whether their ends agree.
LEAST = 3
# Ends that differ by less than this agree in any case.
FLOOR_NS = 20_000
# Ends agree if they differ by less than this share of the gap between two collectives.
_SHARE_OF_GAP = 0.1
# Ends have to be closer to each other than arrivals are, by this factor.
_CLOSER = 4
# Minimum share of common collectives: of the shorter sequence, and of the longer.
_LEAST_COMMON = (0.75, 0.5)
# Ranks form separate groups if a rank's ends are closer to its nearest rank's than to its
# farthest rank's by this factor.
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
    """Return where each run of equal values begins."""
    new = np.ones(len(sorted_values), np.bool_)
    new[1:] = sorted_values[1:] != sorted_values[:-1]
    return np.flatnonzero(new)


def align_by_end(code: Ints, stop: Ints, first: Ints) -> tuple[Ints, int]:
    """Align items that end on all ranks at the same time.

    Parameters
    ----------
    code, stop
        Code, and end in ns on the rank's clock, per item; sorted by rank and end.
    first
        Index of the first item of each rank.

    Returns
    -------
    tuple of ndarray and int
        Place of each item, and the number of items without a place.

    """
    lengths = np.diff(np.append(first, len(code)))
    if len(first) > 1 and (lengths == lengths[0]).all():
        shape = (len(first), int(lengths[0]))
        if _in_line(code.reshape(shape), stop.reshape(shape)):
            return np.tile(np.arange(shape[1]), shape[0]), 0
    return _aligned_ranks(code, stop, first, _by_ends)


def align_by_order(code: Ints, stop: Ints, first: Ints) -> tuple[Ints, int]:
    """Align items that may end on one rank before another, such as broadcasts and messages.

    Parameters and results are those of `align_by_end`, but clocks should be aligned. Items that
    all ranks have in equal order are aligned by order, unless most ends disagree; else by ends.
    """
    return _aligned_ranks(code, stop, first, _by_place_or_ends)


def _in_line(code: Ints, stop: Ints) -> bool:
    """Whether rows are one sequence: with equal codes, and ends at a constant offset."""
    if (code != code[0]).any():
        return False
    ahead = stop - stop[0]
    deviation = np.abs(ahead - np.median(ahead, axis=1, keepdims=True).astype(np.int64))
    return bool((deviation <= _AGREE_NS).all())


def _aligned_ranks(code: Ints, stop: Ints, first: Ints, search: _Search) -> tuple[Ints, int]:
    """Align all ranks; the common sequence begins as the longest rank's, and grows."""
    split = np.split(np.arange(len(code)), first[1:])
    ranks = sorted(split, key=lambda own: (-len(own), own[:1].tolist()))
    places = np.full(len(code), NONE, np.int64)
    longest = ranks[0]
    places[longest] = np.arange(len(longest))
    all_code, all_stop, number = code[longest], stop[longest], np.arange(len(longest))
    skipped = 0
    for own in ranks[1:]:
        result = search(all_code, all_stop, code[own], stop[own])
        if result is None:
            skipped += len(own)
            continue
        place, shifted = result
        has_place = place != NONE
        places[own[has_place]] = number[place[has_place]]
        fresh = len(number) + np.arange(int((~has_place).sum()))
        places[own[~has_place]] = fresh
        merged = np.append(all_stop, shifted[~has_place])
        order = np.argsort(merged, kind="stable")
        all_stop = merged[order]
        all_code = np.append(all_code, code[own[~has_place]])[order]
        number = np.append(number, fresh)[order]
    return places, skipped


def _by_ends(all_code: Ints, all_stop: Ints, code: Ints, stop: Ints) -> _Alignment:
    """Align by ends; by order if ends disagree but all codes are equal."""
    shifted = stop - offset(all_code, all_stop, code, stop)
    place = _aligned((all_code, all_stop), (code, shifted), APART_NS)
    if place is None and np.array_equal(code, all_code):
        place = np.arange(len(code))
    return None if place is None else (place, shifted)


def _by_place_or_ends(all_code: Ints, all_stop: Ints, code: Ints, stop: Ints) -> _Alignment:
    """Align by order if all codes are equal, else by ends."""
    if np.array_equal(code, all_code):
        return _by_place(all_code, all_stop, stop), stop
    for apart, is_shifted in ((NEAR_NS, False), (NEAR_NS, True), (_FAR_NS, False)):
        ahead = offset(all_code, all_stop, code, stop) if is_shifted else 0
        place = _aligned((all_code, all_stop), (code, stop - ahead), apart)
        if place is not None:
            return _filled(place, all_code, code), stop - ahead
    return None


def _by_place(code: Ints, all_stop: Ints, stop: Ints) -> Ints:
    """Align by order, unless nearly all ends agree in another way, and fewer in this one."""
    agreed_in_order = int((np.abs(all_stop - stop) <= NEAR_NS).sum())
    if agreed_in_order < len(code):
        place = _aligned((code, all_stop), (code, stop), NEAR_NS)
        agreed = 0 if place is None else int((place != NONE).sum())
        if place is not None and agreed > agreed_in_order and agreed >= MOST_AGREE * len(code):
            return _filled(place, code, code)
    return np.arange(len(code))


def _aligned(all_: _Items, own: _Items, apart: int) -> Ints | None:
    """Return places by code and end, at most `apart` ns apart; None if too many are missing."""
    if abs(len(all_[0]) - len(own[0])) > 2 * MAX_MISSING:
        return None
    place = nearest(all_, own, apart)
    missing = int((place == NONE).sum())
    return None if missing > min(MAX_MISSING, len(place) // 2) else place


def nearest(all_: _Items, own: _Items, apart: int) -> Ints:
    """Match items of equal code: as many as possible, as near as possible.

    Parameters
    ----------
    all_, own
        Codes, and ends in ns, of the common sequence and of a rank; sorted by end.
    apart
        Maximum distance of matched ends in ns. Longer gaps divide the sequences into
        independent pieces.

    Returns
    -------
    ndarray
        Place per item of `own`; NONE without a match.

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
        common, rank_items = slice(a[k], a[k + 1]), slice(b[k], b[k + 1])
        columns = (all_[0][common], all_[1][common], own[0][rank_items], own[1][rank_items])
        matched = matching.align(*columns, MAX_MISSING, apart)
        place[rank_items] = np.where(matched == NONE, NONE, matched + a[k])
    return place


def _bounds(piece: Ints, count: int) -> Ints:
    """Return where each of the sorted pieces begins, then where the last ends."""
    return np.append(0, np.cumsum(np.bincount(piece, minlength=count)))


def _filled(place: Ints, all_code: Ints, code: Ints) -> Ints:
    """Add places of items between two matched ones, where both sequences have as many."""
    filled = place.copy()
    matched = np.flatnonzero(place != NONE)
    own = np.concatenate([[-1], matched, [len(code)]])
    other = np.concatenate([[-1], place[matched], [len(all_code)]])
    gap = np.diff(own)
    for k in np.flatnonzero((gap > 1) & (gap == np.diff(other))).tolist():
        inner = np.arange(other[k] + 1, other[k + 1])
        if np.array_equal(all_code[inner], code[own[k] + 1 : own[k + 1]]):
            filled[own[k] + 1 : own[k + 1]] = inner
    return filled


def offset(a_code: Ints, a_stop: Ints, b_code: Ints, b_stop: Ints) -> int:
    """Estimate how far clock b is ahead of clock a, in ns.

    It is the difference on which most pairs of ends that could be one item agree; the smallest
    of several such differences; 0 without a pair.
    """
    chosen = np.linspace(0, len(b_stop) - 1, min(_SAMPLE, len(b_stop))).astype(np.int64)
    shift = np.arange(-MAX_MISSING, MAX_MISSING + 1)
    # Items may be missing at the beginning, at the end, or between.
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
    iteration: Ints  # number of the iteration
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.op)

    @property
    def tolerance_ns(self) -> int:
        """Maximum difference between the ends of one collective on two aligned ranks."""
        if len(self) < 2:  # noqa: PLR2004 - no gap
            return FLOOR_NS
        gap = float(np.median(np.diff(self.stop)))
        return int(np.clip(_SHARE_OF_GAP * gap, FLOOR_NS, APART_NS))


def places(reference: Stream, own: Stream) -> Ints | Refusal:
    """Match the collectives of a rank with those of the reference rank, on one stream.

    Either may miss some at its beginning and its end, but only one of them in between.

    Returns
    -------
    ndarray or Refusal
        Index on the reference rank per collective of the rank, or NONE; a refusal if the two do
        not have the same sequence.

    """
    if min(len(reference), len(own)) < LEAST:
        return "few"
    reference_code, own_code = _codes(reference, own)
    if np.array_equal(reference_code, own_code):
        place = np.arange(len(own))
        if _agree(reference, own, place):
            return place
    ahead = offset(reference_code, reference.stop, own_code, own.stop)
    apart = reference.tolerance_ns
    place = nearest((reference_code, reference.stop), (own_code, own.stop - ahead), apart)
    if not _is_one_sequence(place, len(reference)):
        return "ends" if np.array_equal(np.sort(reference_code), np.sort(own_code)) else "order"
    return place if _agree(reference, own, place) else "ends"


def _codes(reference: Stream, own: Stream) -> tuple[Ints, Ints]:
    """Return a number per pair of operation and size; per operation if a size is unknown."""
    op, size = np.append(reference.op, own.op), np.append(reference.size, own.size)
    unsized = np.isin(op, op[size == NULL])
    sizes, code = np.unique(np.where(unsized, NULL, size), return_inverse=True)
    code = op * len(sizes) + code
    return code[: len(reference)], code[len(reference) :]


def _is_one_sequence(place: Ints, length: int) -> bool:
    """Whether enough is common, and only one of the two has gaps in the common part."""
    common, lengths = np.flatnonzero(place != NONE), sorted((len(place), length))
    least = max(share * count for share, count in zip(_LEAST_COMMON, lengths, strict=True))
    if len(common) < max(LEAST, least):
        return False
    matched = place[common]
    own_alone = int(common[-1] - common[0]) + 1 - len(common)
    other_alone = int(matched[-1] - matched[0]) + 1 - len(common)
    is_ordered = bool((np.diff(matched) > 0).all())
    return (
        is_ordered
        and not min(own_alone, other_alone)
        and own_alone + other_alone <= (min(MAX_MISSING, len(common)))
    )


def _agree(reference: Stream, own: Stream, place: Ints) -> bool:
    """Whether ends agree, and most collectives have equal iteration numbers."""
    common = np.flatnonzero(place != NONE)
    other = place[common]
    late = own.stop[common] - reference.stop[other]
    deviation = np.abs(late - _lower_median(late))
    same = own.iteration[common] == reference.iteration[other]
    return bool(deviation.max() <= reference.tolerance_ns and 2 * same.sum() > len(same))


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of all ranks in some collectives of a stream, minus the end on the reference rank.

    Both arrays have shape (ranks, collectives), in ns on one clock; NaN where a rank misses
    one.
    """

    start: Floats
    stop: Floats

    @classmethod
    def of(cls, start: Ints, stop: Ints, end: Ints) -> "Sample":
        """Align the clocks of ranks by ends.

        Parameters
        ----------
        start, stop
            Shape (ranks, collectives), on the clock of each rank; NULL where a rank misses one.
        end
            Ends on the reference rank, one per collective.

        """
        is_missing = stop == NULL
        ahead = np.array(
            [
                _lower_median((stops - end)[~missing])
                for stops, missing in zip(stop, is_missing, strict=True)
            ]
        )
        return cls(
            *(
                np.where(
                    is_missing, np.nan, np.where(is_missing, 0, times - end - ahead[:, None])
                )
                for times in (start, stop)
            )
        )

    @property
    def ends_ns(self) -> Floats:
        """Time from the first to the last end, per collective."""
        span: Floats = np.nanmax(self.stop, axis=0) - np.nanmin(self.stop, axis=0)
        return span

    @property
    def arrivals_ns(self) -> Floats:
        """Time from the first to the last arrival, per collective."""
        span: Floats = np.nanmax(self.start, axis=0) - np.nanmin(self.start, axis=0)
        return span

    def refusal(self) -> Refusal | None:
        """Return why these are not collectives of all ranks; None if they are."""
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
        """Whether ranks form groups that end together, each apart from the others."""
        if len(self.stop) < _LEAST_RANKS_TO_SEPARATE:
            return False
        deviation = self.stop - np.nanmedian(self.stop, axis=0)
        parts = [
            _distances(deviation, first) for first in range(0, len(deviation), _RANKS_AT_ONCE)
        ]
        near, far = (np.concatenate(values) for values in zip(*parts, strict=True))
        nearest, farthest = float(np.median(near)), float(np.median(far))
        return farthest > max(FLOOR_NS / 2, _SEPARATE * nearest)


def _lower_median(values: Ints) -> np.int64:
    """Return the lower of two medians; 0 without values."""
    ordered = np.sort(values)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) else np.int64(0)


def _distances(deviation: Floats, first: int) -> tuple[Floats, Floats]:
    """Return distances of a block of ranks to their nearest and farthest other rank.

    A distance is the standard deviation of the difference of two ranks' ends, over collectives
    that both have: a constant difference is that of their clocks. NaN marks a missing end.
    """
    block = slice(first, first + _RANKS_AT_ONCE)
    has, value = (~np.isnan(deviation)).astype(np.float64), np.nan_to_num(deviation)
    square = value**2
    count = has[block] @ has.T
    total = value[block] @ has.T - has[block] @ value.T
    squares = square[block] @ has.T + has[block] @ square.T - 2 * value[block] @ value.T
    count[count == 0] = np.nan
    distance = np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0))
    farthest = np.nan_to_num(distance).max(axis=1)
    rows = np.arange(len(distance))
    distance[rows, rows + first] = np.inf
    return np.nan_to_num(distance, nan=np.inf, posinf=np.inf).min(axis=1), farthest
