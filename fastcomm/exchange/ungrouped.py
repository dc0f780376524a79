"""Match the collectives of unknown process groups, stream by stream.

A stream runs them one after the other, and all members of a collective finish it at the same
time. So if all ranks have the same operations on a stream in the same order, and the ends agree
once a constant clock offset is removed, the k-th on one rank is the k-th on another. Times are
in ns. Each rank has its own clock.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fastcomm.exchange.sequences import (
    APART_NS,
    MAX_MISSING,
    Items,
    Repeats,
    item_codes,
    nearest,
    offset,
    spread_of,
)
from fastcomm_kernels.arrays import NONE, NULL, Floats, Ints

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


@dataclass(frozen=True, slots=True)
class Stream:
    """The collectives of one rank on one stream, sorted by end."""

    op: Ints  # index into OPS
    size: Ints  # bytes, where they are the same on all members; else NULL
    step: Ints  # number of its mark, the same on all ranks; NULL if unknown
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.op)

    @property
    def tolerance_ns(self) -> int:
        """Maximum difference in ns between the ends of one collective on two aligned ranks.

        It grows with the median gap between successive ends, within fixed limits.
        """
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
    code = item_codes(np.append(reference.op, own.op), np.append(reference.size, own.size))
    reference_code, own_code = np.split(code, [len(reference)])
    if np.array_equal(reference_code, own_code):
        place = np.arange(len(own))
        if _agree(reference, own, place):
            return place
    ahead = offset(
        Items(reference_code, reference.stop, reference.step),
        Items(own_code, own.stop, own.step),
    )
    apart = reference.tolerance_ns
    place = nearest((reference_code, reference.stop), (own_code, own.stop - ahead), apart)
    if not _is_one_sequence(place, _comparable(reference, own)):
        return "ends" if np.array_equal(np.sort(reference_code), np.sort(own_code)) else "order"
    return place if _agree(reference, own, place) else "ends"


def _comparable(first: Stream, second: Stream) -> tuple[int, int]:
    """Return how many collectives of each stream the other may have, by numbers of steps."""
    steps = first.step, second.step
    if any((step == NULL).any() for step in steps):
        return len(first), len(second)
    shared = np.intersect1d(*steps)
    return int(np.isin(first.step, shared).sum()), int(np.isin(second.step, shared).sum())


def _is_one_sequence(place: Ints, lengths: tuple[int, int]) -> bool:
    """Return whether two sequences of collectives may be parts of one.

    Enough has to be common, in equal order, and only one of the two may lack items in the
    common part. `place` is the index in the other sequence of each item, or NONE; `lengths` are
    the numbers of items of both that can be common.
    """
    common = np.flatnonzero(place != NONE)
    counts = zip(_LEAST_COMMON, sorted(lengths), strict=True)
    least = max(share * count for share, count in counts)
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
    """Whether ends agree, and most steps; without steps, whether no other place fits."""
    common = np.flatnonzero(place != NONE)
    other = place[common]
    late = own.stop[common] - reference.stop[other]
    deviation = np.abs(late - _lower_median(late))
    if deviation.max() > reference.tolerance_ns:
        return False
    steps = own.step[common], reference.step[other]
    if all((step != NULL).all() for step in steps):
        return bool(2 * (steps[0] == steps[1]).sum() > len(common))
    items = Items(item_codes(reference.op, reference.size), reference.stop, reference.step)
    return Repeats(items).exclude(int(spread_of(deviation)), int(_lower_median(late)))


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
        """Align the clocks of ranks by the ends of their collectives.

        The clock of each rank is moved by the median of its ends minus those of the reference
        rank. Results are start and stop minus the end on the reference rank, in ns; NaN where a
        rank misses a collective.

        Parameters
        ----------
        start, stop
            Shape (ranks, collectives), in ns on the clock of each rank; NULL where a rank
            misses one.
        end
            Ends on the reference rank in ns, one per collective.

        """
        is_missing = stop == NULL
        late = (own[~missing] for own, missing in zip(stop - end, is_missing, strict=True))
        common = end + np.array([_lower_median(own) for own in late])[:, None]
        return cls(*(np.where(is_missing, np.nan, times - common) for times in (start, stop)))

    @property
    def ends_ns(self) -> Floats:
        """Time in ns from the first to the last end of each collective, as float64.

        Clocks are taken as they are: subtract offsets from `stop` before.
        """
        span: Floats = np.nanmax(self.stop, axis=0) - np.nanmin(self.stop, axis=0)
        return span

    @property
    def arrivals_ns(self) -> Floats:
        """Time in ns from the first to the last start of each collective, as float64."""
        span: Floats = np.nanmax(self.start, axis=0) - np.nanmin(self.start, axis=0)
        return span

    def refusal(self) -> Refusal | None:
        """Return why these are not collectives of all ranks, a text code; None if they are."""
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
