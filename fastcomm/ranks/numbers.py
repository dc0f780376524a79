"""Check sequence numbers of collectives against steps and clocks.

Numbers count the calls of a group from its creation, so that they are equal on all ranks. But
some tools count from the start of a recording, which may differ between ranks. Then marks of
steps or clocks contradict them, and the ends of collectives decide.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from fastcomm.ranks.sequences import (
    NEAR_CLOCKS_NS,
    SURE_NS,
    Items,
    are_clearer,
    clearer_places,
    count_anew,
    item_codes,
    places_by_step,
    spread_of,
)
from fastcomm.trace.columns import block_starts
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

_MOVED = 4  # places
_LEAST = 3  # calls in common
_BETTER = 4  # times
_HARDLY = 25  # times as far apart are clocks elsewhere
_NOISE_NS = 5_000  # ends of one collective differ by about this much


class NumberedCalls(Protocol):
    """Columns of `matching.CollectiveCalls`."""

    @property
    def rank(self) -> Ints: ...  # noqa: D102
    @property
    def group(self) -> Ints: ...  # noqa: D102
    @property
    def op(self) -> Ints: ...  # noqa: D102
    @property
    def size(self) -> Ints: ...  # noqa: D102
    @property
    def stop(self) -> Ints: ...  # noqa: D102
    @property
    def step(self) -> Ints: ...  # noqa: D102


class Doubts(NamedTuple):
    """Which calls have a number that cannot be right; a value per call."""

    is_wrong: Flags  # ends disprove it: the collective is to be found without it
    is_unclear: Flags  # steps and clocks contradict it, and nothing decides


def doubts(calls: NumberedCalls, instance: Ints, ends_apart: Flags) -> Doubts | None:
    """Return the calls with doubtful numbers; None without any.

    Parameters
    ----------
    calls
        Of all ranks.
    instance
        The collective of each call by its number, or NONE.
    ends_apart
        Which calls may end on one rank before another: their ends tell nothing.

    """
    rows = np.flatnonzero((instance != NONE) & ~ends_apart)
    if not len(rows) or not _may_be_wrong(calls, rows, instance[rows]):
        return None
    wrong, unclear = set[int](), set[tuple[int, int]]()
    for group, members in _groups(calls, rows):
        reference = max(members, key=lambda own: (len(own), -int(calls.rank[own[0]])))
        for own in members:
            if own is reference:
                continue
            verdict = _verdict(calls, instance, reference, own)
            if verdict == "wrong":
                wrong.add(group)
            elif verdict == "unclear":
                unclear.add((group, int(calls.rank[own[0]])))
    is_wrong = np.isin(calls.group, list(wrong))
    is_unclear = np.zeros(len(is_wrong), np.bool_)
    for group, rank in unclear:
        is_unclear |= (calls.group == group) & (calls.rank == rank) & ~is_wrong
    return Doubts(is_wrong, is_unclear) if wrong or unclear else None


def _may_be_wrong(calls: NumberedCalls, rows: Ints, number: Ints) -> bool:
    """Return whether members of a collective differ in steps, or their clocks much."""
    step, stop = calls.step[rows], calls.stop[rows]
    one = np.full(int(number.max()) + 1, NULL)
    one[number] = step
    other = one[number]
    if (other != step)[(step != NULL) & (other != NULL)].any():
        return True
    one[number] = stop
    most = NEAR_CLOCKS_NS if (step != NULL).any() else SURE_NS
    return bool((np.abs(one[number] - stop) > most).any())


def _groups(calls: NumberedCalls, rows: Ints) -> Iterator[tuple[int, list[Ints]]]:
    """Yield each group of several ranks, and the rows of each rank sorted by end."""
    rows = rows[np.lexsort((calls.stop[rows], calls.rank[rows], calls.group[rows]))]
    for of_group in np.split(rows, block_starts(calls.group[rows])[1:]):
        members = np.split(of_group, block_starts(calls.rank[of_group])[1:])
        if len(members) > 1:
            yield int(calls.group[of_group[0]]), members


def _verdict(calls: NumberedCalls, instance: Ints, reference: Ints, own: Ints) -> str:
    """Return "wrong", "unclear" or "right" for the numbers of a rank, compared with another's.

    `reference` and `own` are the rows of both ranks in one group, sorted by end.
    """
    both, both_own, common = np.intersect1d(
        instance[reference], instance[own], return_indices=True
    )
    if not len(both):
        return "right"
    rows, own_rows = reference[both_own], own[common]
    late = calls.stop[own_rows] - calls.stop[rows]
    here = _fit(late, calls.step[rows], calls.step[own_rows])
    has_steps = bool((calls.step[own] != NULL).any() and (calls.step[reference] != NULL).any())
    if has_steps and not here.unequal_steps and here.worst <= SURE_NS:
        return "right"
    is_far = here.ahead > NEAR_CLOCKS_NS
    items, others = _items(calls, reference, own)
    place = np.full(len(own), NONE, np.int64)
    place[common] = both_own
    by_moves = _verdict_by_moves(items, others, place, here)
    # Numbers that are one off differ in the steps of the first or last collective of each.
    is_plausible = not here.unequal_steps and (not is_far or here.spread <= SURE_NS)
    if by_moves == "wrong" or (is_plausible and by_moves == "right"):
        return by_moves
    is_contradicted = 2 * here.unequal_steps > len(both)
    by_ends = _verdict_by_ends(items, others, place, differs=is_far and is_contradicted)
    is_shared = np.isin(others.step, items.step) & (others.step != NULL)
    is_refused = is_contradicted and not is_shared.any() and here.ahead > SURE_NS
    if by_ends == "right" and is_refused and not count_anew(items, others):
        return "unclear"
    return by_moves if by_ends == "right" else by_ends


def _verdict_by_ends(items: Items, own: Items, place: Ints, *, differs: bool) -> str:
    """Return "wrong", "unclear" or "right" for places by numbers, by the ends of calls.

    `differs` is whether both steps and clocks contradict them.
    """
    if clearer_places(items, own, place):
        return "wrong"
    by_step = places_by_step(items, own) if differs else None
    if by_step is None or are_clearer(items, own, by_step, place):
        return "right"
    return "unclear"


def _verdict_by_moves(items: Items, own: Items, place: Ints, here: "_Fit") -> str:
    """Return "wrong", "unclear" or "right", by how calls fit where numbers do not say.

    `here` is how they fit where those say. Some count from 0, others from 1. Numbers are wrong
    if clocks fit better few places away, and ends agree clearly better, or steps do, and ends
    not worse. They are unclear if steps alone fit better, or, without steps, clocks are equal.
    """
    verdict, placed = "right", np.flatnonzero(place != NONE)
    for by in _moves(items, own, place):
        rows = placed[(place[placed] + by >= 0) & (place[placed] + by < len(items.code))]
        other = np.full_like(place, NONE)
        other[rows] = place[rows] + by
        if len(rows) < _LEAST or (items.code[other[rows]] != own.code[rows]).any():
            continue
        to = other[rows]
        there = _fit(own.stop[rows] - items.stop[to], items.step[to], own.step[rows])
        is_in_step = _BETTER * there.unequal_steps < here.unequal_steps
        is_in_step &= there.spread <= _above_noise(here.spread)
        if abs(by) <= _MOVED and _BETTER * there.ahead <= here.ahead:
            is_closer = there.worst <= SURE_NS
            is_closer &= _BETTER * _above_noise(there.worst) <= here.worst
            if is_in_step or is_closer or are_clearer(items, own, place, other):
                return "wrong"
        # One call of a step may begin before its mark on one rank alone.
        is_contradicted = is_in_step and abs(by) > 1 and here.ahead > SURE_NS
        if (is_contradicted and not count_anew(items, own)) or (
            not here.has_steps and _have_equal_clocks(here, there, items)
        ):
            verdict = "unclear"
    return verdict


def _moves(items: Items, own: Items, place: Ints) -> list[int]:
    """Return some places by which numbers may be off: few, or where clocks or steps agree."""
    rows = np.flatnonzero(place != NONE)
    moves = {*range(-_MOVED, 0), *range(1, _MOVED + 1)}
    after = np.clip(np.searchsorted(items.stop, own.stop[rows]), 1, len(items.stop) - 1)
    is_before = own.stop[rows] - items.stop[after - 1] < items.stop[after] - own.stop[rows]
    moves.add(int(np.median(after - is_before - place[rows])))
    own_step, steps = np.maximum.accumulate(own.step), np.maximum.accumulate(items.step)
    begin, own_begin = (np.searchsorted(of, own_step[rows]) for of in (steps, own_step))
    is_shared = np.isin(own_step[rows], steps) & (own_begin > 0) & (begin > 0)
    if is_shared.any():
        moves.add(int(np.median((begin + rows - own_begin - place[rows])[is_shared])))
    return sorted(moves - {0}, key=abs)


def _have_equal_clocks(here: "_Fit", there: "_Fit", items: Items) -> bool:
    """Return whether clocks agree there so closely as they hardly do by chance."""
    gap = int(np.median(np.diff(items.stop)))
    is_equal = _HARDLY * there.ahead <= min(here.ahead, gap) and there.ahead <= SURE_NS
    return is_equal and there.spread <= _above_noise(here.spread)


def _above_noise(ns: int) -> int:
    return max(ns, _NOISE_NS)


class _Fit(NamedTuple):
    """How well the calls of two ranks fit."""

    ahead: int  # absolute difference of the clocks, ns
    apart: Ints  # deviations of ends from that, ns
    unequal_steps: int  # number of calls
    has_steps: bool  # whether any call has one on both ranks

    @property
    def worst(self) -> int:
        """The largest deviation."""
        return int(self.apart.max())

    @property
    def spread(self) -> int:
        """The usual deviation."""
        return int(spread_of(self.apart))


def _fit(late: Ints, step: Ints, own_step: Ints) -> _Fit:
    """Return how well calls fit, by the differences of their ends and by their steps."""
    is_known = (step != NULL) & (own_step != NULL)
    unequal = int((step != own_step)[is_known].sum())
    ahead = int(np.median(late))
    return _Fit(abs(ahead), np.abs(late - ahead), unequal, bool(is_known.any()))


def _items(calls: NumberedCalls, reference: Ints, own: Ints) -> tuple[Items, Items]:
    """Return the calls of two ranks as sequences."""
    rows = np.append(reference, own)
    code = np.split(item_codes(calls.op[rows], calls.size[rows]), [len(reference)])
    one, other = (
        Items(codes, calls.stop[part], calls.step[part])
        for codes, part in zip(code, (reference, own), strict=True)
    )
    return one, other
