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
    item_codes,
    places_by_step,
    spread_of,
)
from fastcomm.trace.columns import block_starts
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

_MOVED = 4  # places
_LEAST = 3  # calls in common
_BETTER = 4  # times
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
    return bool((np.abs(one[number] - stop) > NEAR_CLOCKS_NS).any())


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
    if not here.unequal_steps and here.worst <= SURE_NS:
        return "right"
    is_far = here.ahead > NEAR_CLOCKS_NS
    items, others = _items(calls, reference, own)
    place = np.full(len(own), NONE, np.int64)
    place[common] = both_own
    if _is_moved(items, others, place, here):
        return "wrong"
    # Numbers that are one off differ in the steps of the first or last collective of each.
    if not here.unequal_steps and (not is_far or here.spread <= SURE_NS):
        return "right"
    differs = is_far and 2 * here.unequal_steps > len(both)
    return _verdict_by_ends(items, others, place, differs=differs)


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


def _is_moved(items: Items, own: Items, place: Ints, here: "_Fit") -> bool:
    """Return whether calls fit better a few places from where their numbers say.

    `here` is how they fit where those say. Some count from 0, others from 1. Either ends agree
    clearly better there, or steps do, and clocks, and ends not worse.
    """
    for by in (*range(-_MOVED, 0), *range(1, _MOVED + 1)):
        rows = np.flatnonzero(place != NONE)
        rows = rows[(place[rows] + by >= 0) & (place[rows] + by < len(items.code))]
        other = np.full_like(place, NONE)
        other[rows] = place[rows] + by
        if len(rows) < _LEAST or (items.code[other[rows]] != own.code[rows]).any():
            continue
        to = other[rows]
        there = _fit(own.stop[rows] - items.stop[to], items.step[to], own.step[rows])
        if _BETTER * there.ahead > here.ahead:
            continue
        is_in_step = _BETTER * there.unequal_steps < here.unequal_steps
        is_closer = there.worst <= SURE_NS and _BETTER * _above_noise(there.worst) <= here.worst
        is_in_step &= there.spread <= _above_noise(here.spread)
        if is_in_step or is_closer or are_clearer(items, own, place, other):
            return True
    return False


def _above_noise(ns: int) -> int:
    return max(ns, _NOISE_NS)


class _Fit(NamedTuple):
    """How well the calls of two ranks fit."""

    ahead: int  # absolute difference of the clocks, ns
    apart: Ints  # deviations of ends from that, ns
    unequal_steps: int  # number of calls

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
    return _Fit(abs(ahead), np.abs(late - ahead), unequal)


def _items(calls: NumberedCalls, reference: Ints, own: Ints) -> tuple[Items, Items]:
    """Return the calls of two ranks as sequences."""
    rows = np.append(reference, own)
    code = np.split(item_codes(calls.op[rows], calls.size[rows]), [len(reference)])
    one, other = (
        Items(codes, calls.stop[part], calls.step[part])
        for codes, part in zip(code, (reference, own), strict=True)
    )
    return one, other
