"""Align the sequences of several ranks, each of which may miss some items.

An item has a code, equal for equal items, and an end in ns. Its place is its index in the
common sequence, from 0; NONE if its rank cannot be aligned. In case of doubt nothing is
matched: a wrong match is worse than none. Each rank has its own clock.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.trace.columns import block_lengths
from fastcomm_kernels import matching
from fastcomm_kernels.arrays import NONE, NULL, Flags, Floats, Ints

# Number of items that a rank may miss; with more missing, it is not aligned.
MAX_MISSING = 64
# Maximum difference between the ends of one collective on aligned clocks.
APART_NS = 250_000
# Tolerance of clock offsets, and the number of items used to estimate an offset.
_AGREE_NS, _LEAST_AGREE_NS = 200_000, 10_000
_SAMPLE = 256
# For operations that may end at different times: ends within NEAR_NS agree; a share of
# MOST_AGREE agreeing ends is not by chance.
NEAR_NS = 1_000_000
MOST_AGREE = 0.75
# If fewer than half agree, the nearest item is taken, at most this far away.
_FAR_NS = 100_000_000
# A sequence that repeats itself looks alike a few steps later. A place is the only one if ends
# agree better there than a shifted sequence agrees with itself, by this factor.
_BETTER = 4
_BY_CHANCE = 1_000  # of so many places, one fits by chance
_LEAST_REPEATED = 3  # items
_ALIKE = 0.95  # share of equal codes
# Ends of one collective differ by about this much: agreement below says nothing.
_NOISE_NS = 5_000
# Clocks of hosts that something sets are not further apart.
NEAR_CLOCKS_NS = 1_000_000
_HARDLY = 25  # times as far are other places apart
# A few steps of different lengths may look alike by chance, but not that much.
SURE_NS = 20_000
# Ends of more different steps are compared with those of others, whatever their numbers are.
_SAME_NS = 50_000
# Where other items are compared, nine of ten ends deviate more: by this factor from so many
# items on. Below the resolution of times no deviation is smaller than another.
_CLEARER = ((64, 1.6), (16, 2.5), (6, 4.0))
_CLEARER_THAN_CLOCKS = 2  # times as much, where clocks agree
_RESOLUTION_NS = 1_000
_MOST_DRIFT = 1e-4  # of two clocks, ns per ns
_FEW, _COMPARED = 16, 64  # items of a shift
_MOST_ITEMS = 4096  # of a sequence, in which its period is searched
_MOST_NEAR = 16  # pairs of ends near each other, per item
_MOST_OTHERS = 16  # places that are compared with one, the likely ones


class Items(NamedTuple):
    """Items of a rank or of all ranks, sorted by end."""

    code: Ints
    stop: Ints  # ns
    step: Ints  # number of the mark that each is in, the same on all ranks; NULL if unknown

    def of(self, rows: Ints) -> "Items":
        """Select rows."""
        return Items(*(column[rows] for column in self))

    def earlier(self, ns: int) -> "Items":
        """Return the items with ends that much earlier."""
        return self._replace(stop=self.stop - ns)


# Places of a rank's items in the common sequence, and their ends on its clock; None if the rank
# cannot be aligned.
_Alignment = tuple[Ints, Ints] | None
# Takes the common sequence, that of the rank, and where the common sequence repeats itself.
_Search = Callable[[Items, Items, "Repeats"], _Alignment]


def item_codes(op: Ints, size: Ints) -> Ints:
    """Return a number per pair of operation and size; per operation if a size is unknown."""
    unsized = np.isin(op, op[size == NULL])
    sizes, code = np.unique(np.where(unsized, NULL, size), return_inverse=True)
    return op * len(sizes) + code


def align_by_end(items: Items, first: Ints) -> tuple[Ints, int]:
    """Align items that end on all ranks at the same time.

    A sequence that repeats itself is aligned where the numbers of steps say; without numbers,
    where ends agree much better than elsewhere, or else clocks do; or nowhere.

    Parameters
    ----------
    items
        Of all ranks, sorted by rank and end; ends on the rank's clock.
    first
        Index of the first item of each rank.

    Returns
    -------
    tuple of ndarray and int
        Place of each item, and the number of items without a place.

    """
    sizes = block_lengths(first, len(items.code))
    if len(first) > 1 and (sizes == sizes[0]).all():
        shape = (len(first), int(sizes[0]))
        if _in_line(Items(*(column.reshape(shape) for column in items))):
            return np.tile(np.arange(shape[1]), shape[0]), 0
    return _aligned_ranks(items, first, _by_ends)


def align_by_order(items: Items, first: Ints) -> tuple[Ints, int]:
    """Align items that may end on one rank before another, such as broadcasts and messages.

    Items that all ranks have in equal order are aligned by order, unless most ends or the
    numbers of steps disagree; else by ends.

    Parameters
    ----------
    items
        Of all ranks, sorted by rank and end; ends on aligned clocks.
    first
        Index of the first item of each rank.

    Returns
    -------
    tuple of ndarray and int
        Place of each item in the common sequence, and the number of items without a place.

    """
    return _aligned_ranks(items, first, _by_place_or_ends)


def _in_line(rows: Items) -> bool:
    """Whether rows are one sequence: equal codes and steps, and ends at a constant offset."""
    if (rows.code != rows.code[0]).any():
        return False
    late = rows.stop - rows.stop[0]
    ahead = np.median(late, axis=1, keepdims=True).astype(np.int64)
    deviation = np.abs(late - ahead)
    if (deviation > _AGREE_NS).any():
        return False
    spread = int(spread_of(deviation).max())
    most = int(np.abs(ahead).max())
    repeats = Repeats(Items(*(column[0] for column in rows)))
    if (rows.step != NULL).all():
        is_equal = 2 * (rows.step == rows.step[0]).sum(axis=1) > rows.step.shape[1]
        is_near = most <= NEAR_CLOCKS_NS or repeats.exclude_by_clock(most)
        return is_near and spread <= _SAME_NS and bool(is_equal.all())
    is_clear = most <= NEAR_CLOCKS_NS or rows.code.shape[1] >= _FEW
    return is_clear and spread <= SURE_NS and repeats.exclude(spread, most)


class Repeats:
    """The places in which a sequence looks like itself, found when they are needed first."""

    def __init__(self, items: Items) -> None:
        """Prepare to look for them."""
        self._items = items

    @cached_property
    def _others(self) -> tuple[Ints, Ints]:
        """How much later each other place is, and how far ends deviate there, ns."""
        shifts = _shifted(self._items, self._items)
        is_other = shifts.ahead != 0
        return shifts.ahead[is_other], shifts.spread[is_other]

    def exclude(self, spread: int, ahead: int) -> bool:
        """Return whether a rank fits where it was aligned, and in none of these places.

        Parameters
        ----------
        spread
            Of the rank's ends minus the sequence's at that place, see `spread_of`, ns.
        ahead
            How far the rank's clock is ahead of the sequence's at that place, ns.

        """
        later, others = self._others
        if not len(later):
            return True
        alike = np.abs(later[others <= 2 * int(others.min())])
        duration = int(self._items.stop[-1] - self._items.stop[0])
        times = round(duration / max(int(alike.min()), 1))
        return _is_better(spread, others, times) or _is_near(ahead, later)

    def exclude_by_clock(self, ahead: int) -> bool:
        """Return whether clocks so far apart agree better than in any of these places."""
        later, _ = self._others
        return not len(later) or _is_near(ahead, later)


def spread_of(deviation: Ints) -> Ints:
    """Return what nine of ten deviations do not exceed, along the last axis, in ns."""
    if not deviation.shape[-1]:
        return np.zeros(deviation.shape[:-1], np.int64)
    return np.quantile(np.abs(deviation), 0.9, axis=-1).astype(np.int64)


def _is_better(spread: int, others: Ints, times: int = _MOST_ITEMS) -> bool:
    """Whether ends deviate little, and by much less than elsewhere.

    The fewer `times` a sequence repeats itself, the more do they by chance.
    """
    factor = max(_BETTER, _BY_CHANCE ** (1 / max(times - 1, 1)))
    return spread <= SURE_NS and factor * max(spread, _NOISE_NS) <= int(others.min())


def _is_near(ahead: int, others: Ints) -> bool:
    """Whether clocks nearly agree, compared with how far they would be apart elsewhere."""
    return _BETTER * abs(ahead) <= int(np.abs(others).min())


class _Shifts(NamedTuple):
    """Shifts of two sequences at which their codes are equal; an element per shift."""

    ahead: Ints  # of the second clock, ns
    spread: Ints  # usual deviation from that, see `spread_of`, ns
    overlap: Ints  # number of items in common
    places: Ints  # place in the first sequence of the second one's first item


def _shifted(
    common: Items, own: Items, least: int | None = None, apart: int | None = None
) -> _Shifts:
    """Compare two sequences at each shift by some items at which their codes are equal.

    At least half of the shorter sequence has to overlap, or `least` items. With `apart`, only
    shifts count at which some ends are at most that many ns apart.
    """
    (code, stop, _), (own_code, own_stop, _) = (
        Items(*(column[:_MOST_ITEMS] for column in items)) for items in (common, own)
    )
    shift = np.arange(1 - len(own_code), len(code))
    if apart is not None:
        shift = _near_shifts(stop, own_stop, apart, shift)
    first, last = np.maximum(shift, 0), np.minimum(shift + len(own_code), len(code))
    half = _least_common(len(code), len(own_code))
    is_long = last - first >= (half if least is None else min(half, least))
    shift, first, last = shift[is_long], first[is_long], last[is_long]
    for count in (_FEW, min(_COMPARED, len(own_code))):  # few comparisons exclude most shifts
        share = np.linspace(0, 1, count)
        place = first[:, None] + (share[None, :] * (last - first - 1)[:, None]).astype(np.int64)
        row = place - shift[:, None]
        is_alike = (code[place] == own_code[row]).mean(axis=1) >= _ALIKE - (
            count == _FEW
        ) / _FEW
        shift, first, last = shift[is_alike], first[is_alike], last[is_alike]
    late = own_stop[row[is_alike]] - stop[place[is_alike]]
    middle = np.median(late, axis=1).astype(np.int64) if len(late) else np.empty(0, np.int64)
    return _Shifts(middle, spread_of(late - middle[:, None]), last - first, shift)


def _near_shifts(stop: Ints, own: Ints, apart: int, shift: Ints) -> Ints:
    """Return shifts at which some ends are so few ns apart, or all if these are many."""
    first = np.searchsorted(stop, own - apart, "left")
    last = np.searchsorted(stop, own + apart, "right")
    count = last - first
    if count.sum() > _MOST_NEAR * len(own):
        return shift
    row = np.repeat(np.arange(len(own)), count)
    place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first, count)
    return np.unique(place - row)


def are_clearer(common: Items, own: Items, place: Ints, other: Ints, factor: float = 1) -> bool:
    """Return whether ends agree clearly better at the other places of a rank's items.

    They do if the ends of both the rank's items and the common items that have a match in
    either way deviate clearly less from a clock with constant drift.

    Parameters
    ----------
    common, own
        Items of the common sequence, and of the rank.
    place, other
        Places of the rank's items in the common sequence in two ways, or NONE.
    factor
        Times as much as usual do ends have to deviate less.

    """
    one, two = (at != NONE for at in (place, other))
    rows = np.flatnonzero(one & two)
    _, first, second = np.intersect1d(place[one], other[two], return_indices=True)
    pairs = (rows, rows), (np.flatnonzero(one)[first], np.flatnonzero(two)[second])
    for own_rows, other_rows in pairs:
        least = next((times for count, times in _CLEARER if len(own_rows) >= count), None)
        if least is None:
            return False
        here, there = (
            np.abs(without_drift(own.stop[row] - common.stop[at[row]], own.stop[row]))
            for row, at in ((own_rows, place), (other_rows, other))
        )
        larger, smaller = (np.quantile(deviation, (0.9, 0.5)) for deviation in (here, there))
        if (
            factor * least * max(smaller[0], _RESOLUTION_NS) > larger[0]
            or smaller[1] > larger[1]
        ):
            return False
    return True


def without_drift(late: Ints, time: Ints) -> Floats:
    """Return how far each end is from a line of clock offsets over time, in ns."""
    offsets, times = ((values - values[0]).astype(np.float64) for values in (late, time))
    times -= float(times.mean())
    offsets -= float(np.median(offsets))
    slope = float(offsets @ times) / max(float(times @ times), 1.0)
    result: Floats = offsets - min(max(slope, -_MOST_DRIFT), _MOST_DRIFT) * times
    result -= float(np.median(result))
    return result


def _aheads(common: Items, own: Items) -> list[int]:
    """Return how far a rank's clock may be ahead, in ns, the most likely first.

    Empty if a rank without numbers of steps fits in several places, and clocks do not tell.
    """
    if _share_steps(common, own):
        return [offset(common, own)]
    later, spread, _, places = _shifted(common, own)
    if not len(later):  # items are missing in between
        return [offset(common, own), 0]
    best, near = int(np.argmin(spread)), int(np.argmin(np.abs(later)))
    if len(later) == 1 or _is_better(int(spread[best]), np.delete(spread, best)):
        return [int(later[best])]
    if _is_only_place(common, own, _at_shift(common, own, int(places[best]))):
        return [int(later[best])]
    is_possible = not _is_better(int(spread[best]), spread[near : near + 1])
    at_near, at_best = (_at_shift(common, own, int(places[at])) for at in (near, best))
    is_possible &= not are_clearer(common, own, at_near, at_best)
    is_near = _is_near(int(later[near]), np.delete(later, near))
    return [int(later[near])] if is_possible and is_near else []


def are_contradictory(common: Items, own: Items, ahead: int) -> bool:
    """Whether ends agree elsewhere much better than where numbers of steps say.

    Profilers that start in different steps may number these from their own start; then clocks
    that agree elsewhere contradict the numbers as well. Clocks that nearly agree where the
    numbers say are no such case; there a clock is `ahead`, ns.
    """
    if not _share_steps(common, own):
        return False
    later, spread, _, places = _shifted(common, own, _FEW)
    if len(later) < 2:  # noqa: PLR2004
        return False
    here = int(np.argmin(np.abs(later - ahead)))
    at = _at_shift(common, own, int(places[here]))
    if abs(ahead) <= NEAR_CLOCKS_NS:
        return _are_places_clearer(common, own, at, (places, spread), _CLEARER_THAN_CLOCKS)
    if count_anew(common, own) and _are_clocks_closer(later, spread, here):
        return True
    return _are_places_clearer(common, own, at, (places, spread))


def count_anew(common: Items, own: Items) -> bool:
    """Return whether both may number steps from the start of their recordings.

    Some step of both has to have a number.
    """
    return all(steps[steps != NULL].min() <= 1 for steps in (common.step, own.step))


def _are_clocks_closer(later: Ints, spread: Ints, here: int) -> bool:
    """Whether clocks agree much better at some shift than `here`, and ends not worse.

    `later` is how far the second clock is ahead at each shift, `spread` the usual deviation,
    both in ns.
    """
    is_better = (2 * spread <= spread[here]) & (spread[here] > _NOISE_NS)
    is_near = np.abs(later) <= abs(int(later[here])) // _BETTER
    # Where ends agree everywhere, nearly equal clocks are hardly by chance.
    is_equal = np.abs(later) <= np.diff(np.sort(later)).min() // _HARDLY
    is_alike = (spread <= max(spread[here], _NOISE_NS)) & is_equal
    return bool((is_better & is_near).any() or is_alike.any())


def clearer_places(common: Items, own: Items, place: Ints, factor: float = 1) -> bool:
    """Return whether ends agree clearly better at other places of a rank's items.

    `place` and `factor` are as in `are_clearer`.
    """
    _, spread, _, places = _shifted(common, own, _FEW)
    return _are_places_clearer(common, own, place, (places, spread), factor)


def _are_places_clearer(
    common: Items, own: Items, place: Ints, others: tuple[Ints, Ints], factor: float = 1
) -> bool:
    """Whether ends agree clearly better at one of some shifts than at certain places.

    `others` are the shifts, and the usual deviation at each, ns.
    """
    places, spread = others
    likely = places[np.argsort(spread, kind="stable")[:_MOST_OTHERS]].tolist()
    return any(
        are_clearer(common, own, place, _at_shift(common, own, shift), factor)
        for shift in likely
    )


def _at_shift(common: Items, own: Items, shift: int) -> Ints:
    """Return the places of a rank's items, of which the first is at `shift`; else NONE."""
    place = shift + np.arange(len(own.code))
    return np.where((place >= 0) & (place < len(common.code)), place, NONE)


def _aligned_ranks(items: Items, first: Ints, search: _Search) -> tuple[Ints, int]:
    """Align all ranks; the common sequence begins as the longest rank's, and grows."""
    split = np.split(np.arange(len(items.code)), first[1:])
    ranks = sorted(split, key=lambda own: (-len(own), own[:1].tolist()))
    places = np.full(len(items.code), NONE, np.int64)
    longest = ranks[0]
    places[longest] = np.arange(len(longest))
    common, number = items.of(longest), np.arange(len(longest))
    repeats = Repeats(common)  # what is added to it is no more than is missing
    skipped = 0
    for own in ranks[1:]:
        result = search(common, items.of(own), repeats)
        if result is None:
            skipped += len(own)
            continue
        place, shifted = result
        has_place = place != NONE
        places[own[has_place]] = number[place[has_place]]
        fresh = len(number) + np.arange(int((~has_place).sum()))
        places[own[~has_place]] = fresh
        added = items.of(own[~has_place])._replace(stop=shifted[~has_place])
        order = np.argsort(np.append(common.stop, added.stop), kind="stable")
        common = Items(*(np.append(*both)[order] for both in zip(common, added, strict=True)))
        number = np.append(number, fresh)[order]
    return places, skipped


def _by_ends(common: Items, own: Items, repeats: Repeats) -> _Alignment:
    """Align by ends; by order if ends disagree but all codes are equal."""
    first = offset(common, own)
    if are_contradictory(common, own, first):
        result = _by_ends(common, _without_numbers(own), repeats)
        has_place = result is not None and _have_equal_bounds(common, own, result[0])
        return result if has_place else None
    if (result := _at(common, own, first, repeats)) is not None:
        return result
    aheads = _aheads(common, own)
    for ahead in dict.fromkeys(aheads):
        if ahead != first and (result := _at(common, own, ahead, repeats)) is not None:
            return result
    place = np.arange(len(own.code))
    has_order = bool(aheads) and np.array_equal(own.code, common.code)
    if has_order and _is_right(common, own, place, repeats):
        return place, own.stop - aheads[0]
    return None


def _without_numbers(own: Items) -> Items:
    """Return items of unknown steps."""
    return own._replace(step=np.full_like(own.step, NULL))


def _have_equal_bounds(common: Items, own: Items, place: Ints) -> bool:
    """Whether steps of a rank are steps of the others, maybe with other numbers."""
    rows = np.flatnonzero(place != NONE)
    rows = rows[(own.step[rows] != NULL) & (common.step[place[rows]] != NULL)]
    _, counts = np.unique(own.step[rows] - common.step[place[rows]], return_counts=True)
    return bool(counts.max(initial=0) >= _ALIKE * len(rows))


def _at(common: Items, own: Items, ahead: int, repeats: Repeats) -> _Alignment:
    """Align a rank whose clock is so far ahead; None if it does not fit there alone."""
    place = _aligned_parts(common, own.earlier(ahead), APART_NS)
    if place is None or not _is_right(common, own, place, repeats):
        return None
    return place, own.stop - ahead


def _is_right(common: Items, own: Items, place: Ints, repeats: Repeats) -> bool:
    """Whether numbers of steps confirm places, or, without numbers, no other place fits."""
    rows = np.flatnonzero(place != NONE)
    steps = common.step[place[rows]], own.step[rows]
    if len(rows) and all((step != NULL).all() for step in steps):
        return bool(2 * (steps[0] == steps[1]).sum() > len(rows))
    late = own.stop[rows] - common.stop[place[rows]]
    ahead = int(np.median(late)) if len(rows) else 0
    spread = int(spread_of(late - ahead))
    if spread > SURE_NS and clearer_places(common, own, place, _CLEARER_THAN_CLOCKS):
        return False
    if abs(ahead) > NEAR_CLOCKS_NS and not _are_equal(ahead, common):
        if len(rows) < _FEW and _repeats_itself(common):
            duration = int(common.stop[-1] - common.stop[0])
            if abs(ahead) <= _HARDLY * duration:  # or clocks are equal, and steps differ
                return _is_only_place(common, own, place)
            if spread > SURE_NS:
                return False
        if _fit_on_equal_clocks(common, own, max(spread, _NOISE_NS)):
            return False
    return repeats.exclude(spread, ahead) or _is_only_place(common, own, place)


def _repeats_itself(items: Items) -> bool:
    """Whether half of the items, or more, have equal codes at another place among them."""
    half = max(len(items.code) // 2, 1)
    return len(_shifted(items, items, half).ahead) > 1


def _fit_on_equal_clocks(common: Items, own: Items, most: int) -> bool:
    """Whether ends agree within `most` ns at a shift on which clocks are as good as equal."""
    # Of nine ends in ten, no other difference is larger.
    shifts = _shifted(common, own, apart=_equal_ns(common) + most + 1)
    return bool((_are_equal(shifts.ahead, common) & (shifts.spread <= most)).any())


def _are_equal(ahead: ArrayLike, items: Items) -> Flags:
    """Whether clocks that differ so much are equal beside the time between two items."""
    is_equal: Flags = np.abs(ahead) <= _equal_ns(items)
    return is_equal


def _equal_ns(items: Items) -> int:
    """Return how far clocks are apart at most that are equal beside the time between items."""
    gap = int(np.median(np.diff(items.stop))) if len(items.stop) > 1 else 0
    return gap // _HARDLY


def _is_only_place(common: Items, own: Items, place: Ints) -> bool:
    """Whether ends agree so closely at places as they do by chance at no other shift.

    A gap between two ends agrees by chance as often as the largest deviation is smaller than
    the difference of gaps at the other shift. What changes from gap to gap is independent: all
    gaps of a step may be longer together.
    """
    rows = np.flatnonzero(place != NONE)
    shifts = np.unique(place[rows] - rows)
    if len(rows) < _LEAST_REPEATED or len(shifts) > 1:
        return False
    apart = without_drift(own.stop[rows] - common.stop[place[rows]], own.stop[rows])
    most = max(float(np.abs(apart).max()), _RESOLUTION_NS)
    _, spread, _, places = _shifted(common, own)
    likely = places[np.argsort(spread, kind="stable")[: _MOST_OTHERS + 1]]
    others = np.setdiff1d(likely, shifts).tolist()
    for shift in others:
        other = _at_shift(common, own, shift)
        own_rows = np.flatnonzero(other != NONE)
        changes = np.diff(own.stop[own_rows] - common.stop[other[own_rows]], n=2)
        chance = np.minimum(1, 2 * most / np.maximum(np.abs(changes), 1))
        if np.log(chance).mean() * (len(rows) - 2) > -np.log(_BY_CHANCE * len(others)):
            return False
    return bool(others)


def _by_place_or_ends(common: Items, own: Items, _: Repeats) -> _Alignment:
    """Align by numbers of steps, else where ends agree, else by order of equal codes."""
    is_numbered = _share_steps(common, own)
    if not is_numbered and not (NULL in own.step or NULL in common.step):
        return None  # no step in common
    if is_numbered:
        ahead = offset(common, own)
        if not are_contradictory(common, own, ahead):
            return _by_steps(common, own, ahead)
        own = _without_numbers(own)
    return _by_ends_or_place(common, own)


def _by_steps(common: Items, own: Items, ahead: int) -> _Alignment:
    """Align by order if most steps are equal, else by ends in equal steps.

    By these steps the clock of the rank is `ahead`, ns.
    """
    if np.array_equal(own.code, common.code) and _have_equal_steps(common, own):
        return np.arange(len(own.code)), own.stop
    ways = (NEAR_NS, ahead), (_FAR_NS, 0)
    return _in_ways(common, own, ways, _aligned_parts)


def _by_ends_or_place(common: Items, own: Items) -> _Alignment:
    """Align where ends agree, else by order of equal codes, else by the nearest ends."""
    if (place := _at_once(common, own)) is not None:
        return _filled(place, common.code, own.code), own.stop
    if (aheads := _aheads_by_ends(common, own)) is not None:
        return _in_ways(common, own, [(NEAR_NS, ahead) for ahead in aheads], _aligned_parts)
    if np.array_equal(own.code, common.code):
        return _by_place(common, own), own.stop
    ways = (NEAR_NS, 0), (NEAR_NS, offset(common, own)), (_FAR_NS, 0)
    return _in_ways(common, own, ways, _aligned)


def _in_ways(
    common: Items,
    own: Items,
    ways: Sequence[tuple[int, int]],
    align: Callable[[Items, Items, int], Ints | None],
) -> _Alignment:
    """Align in the first way that fits: ends so far apart, on a clock so far ahead, in ns."""
    for apart, ahead in ways:
        shifted = own.earlier(ahead)
        place = align(common, shifted, apart)
        if place is not None and _are_in_equal_steps(common, own, place):
            return _filled(place, common.code, own.code), shifted.stop
    return None


def _share_steps(common: Items, own: Items) -> bool:
    """Whether any numbered step has items of both."""
    is_known = own.step != NULL
    return bool(is_known.any() and np.isin(own.step[is_known], common.step).any())


def _at_once(common: Items, own: Items) -> Ints | None:
    """Return the places of a rank most of whose ends agree on this clock; else None.

    None as well where ends agree much better elsewhere, unless they agree closely here.
    """
    place = _aligned(common, own, NEAR_NS)
    if place is None:
        return None
    rows = np.flatnonzero(place != NONE)
    if len(rows) < MOST_AGREE * len(place):
        return None
    apart = int(spread_of(own.stop[rows] - common.stop[place[rows]]))
    if apart <= SURE_NS:
        return place
    elsewhere = _shifted(common, own).spread
    return None if (_BETTER * elsewhere <= apart).any() else place


def _aheads_by_ends(common: Items, own: Items) -> list[int] | None:
    """Return how far a clock is ahead, in ns, where ends agree that may differ by `NEAR_NS`.

    None if they agree nowhere, or too few for that not to be by chance, as in one burst; empty
    if they agree in several places, and clocks do not tell.
    """
    shifts = _shifted(common, own)
    first = np.maximum(shifts.places, 0)
    duration = common.stop[first + shifts.overlap - 1] - common.stop[first]
    is_long = duration >= _HARDLY * np.maximum(shifts.spread, _NOISE_NS)
    later, spread, count, _ = (column[is_long] for column in shifts)
    if not (spread <= np.where(count < _FEW, SURE_NS, NEAR_NS)).any():
        return None
    best, near = int(np.argmin(spread)), int(np.argmin(np.abs(later)))
    least = _BETTER * max(int(spread[best]), _NOISE_NS)
    if len(later) == 1 or least <= int(np.delete(spread, best).min()):
        return [int(later[best])]
    is_near = spread[near] < least and _is_near(int(later[near]), np.delete(later, near))
    return [int(later[near])] if is_near else []


def _are_in_equal_steps(common: Items, own: Items, place: Ints) -> bool:
    """Whether most items at these places have the same step, as far as steps are known."""
    rows = np.flatnonzero(place != NONE)
    return _have_equal_steps(common.of(place[rows]), own.of(rows))


def _have_equal_steps(common: Items, own: Items) -> bool:
    """Whether most items in the same place have the same step, as far as steps are known."""
    is_known = (common.step != NULL) & (own.step != NULL)
    return bool(2 * (common.step == own.step)[is_known].sum() >= is_known.sum())


def _by_place(common: Items, own: Items) -> Ints:
    """Align by order, unless nearly all ends agree in another way, and fewer in this one."""
    agreed_in_order = int((np.abs(common.stop - own.stop) <= NEAR_NS).sum())
    if agreed_in_order < len(own.code):
        place = _aligned(common, own, NEAR_NS)
        agreed = 0 if place is None else int((place != NONE).sum())
        if (
            place is not None
            and agreed > agreed_in_order
            and agreed >= MOST_AGREE * len(own.code)
        ):
            return _filled(place, own.code, own.code)
    return np.arange(len(own.code))


def _aligned(common: Items, own: Items, apart: int) -> Ints | None:
    """Return places by code and end, at most `apart` ns apart; None if too many are missing.

    Items of steps that the common sequence lacks are not missing.
    """
    if abs(len(common.code) - len(own.code)) > 2 * MAX_MISSING:
        return None
    is_expected = (own.step == NULL) | np.isin(own.step, common.step)
    return _with_few_missing(common, own, apart, is_expected)


def _aligned_parts(common: Items, own: Items, apart: int) -> Ints | None:
    """Return places as `_aligned` does, of sequences that may have only a part in common.

    Without numbers of steps, what lies before or behind the other sequence is not missing.
    """
    is_numbered = bool((own.step != NULL).all())
    is_expected = np.isin(own.step, common.step) if is_numbered else _inside(own, common, apart)
    expected, others = int(is_expected.sum()), int(_inside(common, own, apart).sum())
    least = 1 if is_numbered else _least_common(len(common.code), len(own.code))
    if expected < least or others - expected > 2 * MAX_MISSING:
        return None
    return _with_few_missing(common, own, apart, is_expected)


def _with_few_missing(
    common: Items, own: Items, apart: int, is_expected: NDArray[np.bool_]
) -> Ints | None:
    """Return places by code and end; None if too many of the expected items have none.

    Items of numbered steps that only one of the two has are no candidates: of dense sequences,
    more items would match with each one moved.
    """
    if (own.step != NULL).all() and (common.step != NULL).all():
        rows = np.flatnonzero(is_expected)
        others = np.flatnonzero(np.isin(common.step, own.step))
        within = nearest(common.of(others)[:2], own.of(rows)[:2], apart)
        place = np.full(len(own.code), NONE, np.int64)
        place[rows] = np.where(within == NONE, NONE, np.append(others, NONE)[within])
    else:
        place = nearest(common[:2], own[:2], apart)
    missing, expected = int((place[is_expected] == NONE).sum()), int(is_expected.sum())
    return None if missing > min(MAX_MISSING, expected // 2) else place


def _inside(items: Items, others: Items, apart: int) -> NDArray[np.bool_]:
    """Return which items end while the others do, or at most `apart` ns before or after."""
    first, last = (int(others.stop[k]) for k in (0, -1))
    return (items.stop >= first - apart) & (items.stop <= last + apart)


def _least_common(count: int, other: int) -> int:
    """Return how many common items of sequences of these lengths tell anything."""
    return max(_LEAST_REPEATED, min(count, other) // 2)


def nearest(all_: tuple[Ints, Ints], own: tuple[Ints, Ints], apart: int) -> Ints:
    """Match items of equal code: as many as possible, as near as possible.

    Parameters
    ----------
    all_, own
        Codes, and ends in ns, of the common sequence and of a rank; sorted by end.
    apart
        Maximum distance of matched ends in ns.

    Returns
    -------
    ndarray
        Place per item of `own`; NONE without a match.

    """
    return matching.align_pieces(*all_, *own, MAX_MISSING, apart)


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


def offset(common: Items, own: Items) -> int:
    """Estimate how far the clock of a rank is ahead of that of the common sequence, in ns.

    It is the difference on which most pairs of ends that could be one item agree; the smallest
    of several such differences; 0 without a pair. Up to `MAX_MISSING` items may be missing;
    of numbered steps, in each.
    """
    own_row, place = _pairs_by_step(common, own)
    if not len(place):
        own_row, place = _pairs_by_place(len(common.code), len(own.code))
    same = common.code[place] == own.code[own_row]
    ahead = np.sort(own.stop[own_row[same]] - common.stop[place[same]])
    if not len(ahead):
        return 0
    near = min(_agreement_ns(common), _agreement_ns(own))
    agree = np.searchsorted(ahead, ahead + near, side="right") - np.arange(len(ahead))
    best = np.flatnonzero(agree == agree.max())
    middle = ahead[best + (agree.max() - 1) // 2]
    return int(middle[np.argmin(np.abs(middle))])


def _agreement_ns(items: Items) -> int:
    """Return how far offsets by equal items may differ: less than ends of successive items."""
    if len(items.stop) < 2:  # noqa: PLR2004 - no gap
        return _AGREE_NS
    gap = float(np.median(np.diff(items.stop)))
    return int(np.clip(gap / 2, _LEAST_AGREE_NS, _AGREE_NS))


def places_by_step(common: Items, own: Items) -> Ints | None:
    """Return places by numbers of steps where clocks nearly agree; None if they do not."""
    ahead = offset(common, own)
    if not _share_steps(common, own) or abs(ahead) > NEAR_CLOCKS_NS:
        return None
    return _aligned_parts(common, own.earlier(ahead), APART_NS)


def _pairs_by_step(common: Items, own: Items) -> tuple[Ints, Ints]:
    """Return rows of a rank, and rows of the common sequence about as far into the step."""
    order, rows = (np.argsort(items.step, kind="stable") for items in (common, own))
    rows = rows[(own.step[rows] != NULL) & np.isin(own.step[rows], common.step)]
    step = own.step[rows]
    begin, own_begin = np.searchsorted(common.step[order], step), np.searchsorted(step, step)
    place = begin + np.arange(len(rows)) - own_begin
    chosen = sampled(len(rows))
    near = place[chosen, None] + np.arange(-MAX_MISSING, MAX_MISSING + 1)
    row = order[np.clip(near, 0, len(order) - 1)]
    is_inside = (near >= 0) & (near < len(order)) & (common.step[row] == step[chosen, None])
    return np.broadcast_to(rows[chosen, None], near.shape)[is_inside], row[is_inside]


def _pairs_by_place(common: int, own: int) -> tuple[Ints, Ints]:
    """Return rows of a rank, and the rows up to `MAX_MISSING` places away of so many others."""
    chosen = sampled(own)
    shift = np.arange(-MAX_MISSING, MAX_MISSING + 1)
    # Items may be missing at the beginning, at the end, or between.
    shift = np.union1d(shift, shift + common - own)
    place = chosen[:, None] + shift[None, :]
    inside = (place >= 0) & (place < common)
    return np.broadcast_to(chosen[:, None], place.shape)[inside], place[inside]


def sampled(count: int, most: int = _SAMPLE) -> Ints:
    """Return at most so many evenly spread indices, below `count`."""
    return np.linspace(0, count - 1, min(most, count)).astype(np.int64)
