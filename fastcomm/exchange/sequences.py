"""Align the sequences of several ranks, each of which may miss some items.

An item has a code, equal for equal items, and an end in ns. Its place is its index in the
common sequence, from 0; NONE if its rank cannot be aligned. In case of doubt nothing is
matched: a wrong match is worse than none. Each rank has its own clock.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NONE, NULL, Ints

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


def edges(*columns: NDArray[np.integer]) -> Ints:
    """Return the index at which each run of equal rows begins, ascending.

    Parameters
    ----------
    *columns
        At least one; equal rows are adjacent.

    """
    new = np.zeros(len(columns[0]), np.bool_)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def lengths(first: Ints, count: int) -> Ints:
    """Return the length of each run; runs begin at `first`, and have `count` rows in all."""
    return np.diff(np.append(first, count))


def item_codes(op: Ints, size: Ints) -> Ints:
    """Return a number per pair of operation and size; per operation if a size is unknown."""
    unsized = np.isin(op, op[size == NULL])
    sizes, code = np.unique(np.where(unsized, NULL, size), return_inverse=True)
    return op * len(sizes) + code


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
    sizes = lengths(first, len(code))
    if len(first) > 1 and (sizes == sizes[0]).all():
        shape = (len(first), int(sizes[0]))
        if _in_line(code.reshape(shape), stop.reshape(shape)):
            return np.tile(np.arange(shape[1]), shape[0]), 0
    return _aligned_ranks(code, stop, first, _by_ends)


def align_by_order(code: Ints, stop: Ints, first: Ints) -> tuple[Ints, int]:
    """Align items that may end on one rank before another, such as broadcasts and messages.

    Items that all ranks have in equal order are aligned by order, unless most ends disagree;
    else by ends.

    Parameters
    ----------
    code, stop
        Code, and end in ns on aligned clocks, per item; sorted by rank and end.
    first
        Index of the first item of each rank.

    Returns
    -------
    tuple of ndarray and int
        Place of each item in the common sequence, and the number of items without a place.

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
    # The items of piece k are from bound k to bound k + 1.
    a, b = (
        np.append(0, np.cumsum(np.bincount(of, minlength=count)))
        for of in np.split(piece, [len(all_[1])])
    )
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

    Parameters
    ----------
    a_code, a_stop
        Code and end (ns) of each item of rank a, sorted by end.
    b_code, b_stop
        Code and end (ns) of each item of rank b, sorted by end.

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
