"""Records of several ranks that should be one sequence, though each may lack some items of it.

An item has a code, which is the same wherever it is the same item, and the time of its end. The
places found are numbers from 0, NONE for an item whose rank could not be brought in line.
"""

from collections.abc import Callable

import numpy as np

from fastcomm_kernels import matching
from fastcomm_kernels.arrays import Ints

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
