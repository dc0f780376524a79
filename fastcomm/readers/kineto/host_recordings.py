"""Compare recordings of collectives on the host: their order, their ends, and the clocks."""

import math
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.readers.kineto.host import HostCollectives
from fastcomm_kernels.arrays import NULL, Ints

NOISE_MS = 0.05  # by which ends differ without a reason
# Most collectives that the recording of a rank may begin later than that of another.
MOST_SHIFTED = 64
_LEAST_EQUAL = 0.9  # share of equal collectives in two sequences of one group
_MARGIN_NS = 5_000_000  # around the recording of another rank
_NONE_NS = 1_000_000_000  # distance where another rank has no equal collective
_DENSEST = 0.3  # share of the differences of two clocks that agree


@dataclass(frozen=True, slots=True)
class Recording:
    """The collectives of a rank as numbers: equal codes are equal operations on any rank."""

    stop: Ints  # ns, on the clock of the rank
    code: Ints
    partner: Ints  # code of the other side: of a send, that of a receive
    ends: dict[int, Ints]  # stops of a code, sorted
    step: Ints  # number; NULL if unknown

    @classmethod
    def of(
        cls,
        collectives: HostCollectives,
        base: int,
        step: Ints,
        codes: dict[tuple[str, ...], int],
    ) -> "Recording":
        """Number the operations of a rank.

        Parameters
        ----------
        collectives
            Its collectives.
        base
            ns to add to their times.
        step
            Number of the step in which each was called; NULL if unknown.
        codes
            Codes of operations of ranks before; those of this rank are added.

        """
        keys = collectives.key
        code, partner = (
            np.array([codes.setdefault(key(entry), len(codes)) for entry in keys], np.int64)
            for key in (_key, _partner_key)
        )
        stop = collectives.stop + base
        ends = {value: np.sort(stop[code == value]) for value in np.unique(code).tolist()}
        return cls(stop, code, partner, ends, step)

    def earlier(self, offset: int) -> "Recording":
        """Return the recording on a clock that is `offset` ns behind."""
        ends = {code: stops - offset for code, stops in self.ends.items()}
        return replace(self, stop=self.stop - offset, ends=ends)

    def numbered(self, code: Ints) -> list[tuple[int, int, int]]:
        """Return step, code and number among equal codes of the step, of each collective."""
        count: defaultdict[tuple[int, int], int] = defaultdict(int)
        result = []
        for key in zip(self.step.tolist(), code.tolist(), strict=True):
            result.append((*key, count[key]))
            count[key] += 1
        return result

    def distances(self, places: Ints, other: "Recording") -> Ints:
        """Return the ns from the ends of collectives to the nearest equal one of another."""
        distance = np.full(len(places), _NONE_NS)
        partner, stops = self.partner[places], self.stop[places]
        for code in np.unique(partner).tolist():
            ends, rows = other.ends.get(code), np.flatnonzero(partner == code)
            if ends is not None:
                stop = stops[rows]
                at = np.searchsorted(ends, stop)
                before, behind = (
                    ends[np.maximum(at - 1, 0)],
                    ends[np.minimum(at, len(ends) - 1)],
                )
                near = np.minimum(np.abs(before - stop), np.abs(behind - stop))
                distance[rows] = np.minimum(near, _NONE_NS)
        return distance

    def at(self, places: Ints) -> tuple[Ints, Ints, Ints]:
        """Return codes, stops and steps of some collectives."""
        return self.code[places], self.stop[places], self.step[places]


# The ranks with which each rank is compared.
Neighbors = Mapping[int, Set[int]]


def on_one_clock(
    recordings: dict[int, Recording], neighbors: Neighbors
) -> dict[int, Recording]:
    """Return the recordings on one clock, if they fit together only then.

    Clocks of several hosts may differ by more than collectives lie apart. The offset of two
    ranks is the most frequent difference of the ends of equal operations in equal steps; ranks
    are placed one by one, beside the placed neighbor to which the differences agree best. The
    clock is that of the first rank, and of the first of ranks that are no neighbors of these.
    """
    apart = _misfit(recordings, neighbors)
    if apart <= 2 * NOISE_MS:
        return recordings
    best: dict[int, tuple[int, int]] = {}
    shifted: dict[int, Recording] = {}
    while unplaced := [rank for rank in recordings if rank not in shifted]:
        near = [rank for rank in unplaced if rank in best]
        latest = min(near, key=lambda rank: (best[rank], rank)) if near else unplaced[0]
        _, offset = best.get(latest, (0, 0))
        shifted[latest] = recordings[latest].earlier(offset)
        for rank in neighbors[latest] - shifted.keys():
            difference = _difference(recordings[rank], shifted[latest])
            best[rank] = min(best.get(rank, difference), difference)
    return shifted if 2 * _misfit(shifted, neighbors) < apart else recordings


def _difference(own: Recording, other: Recording) -> tuple[int, int]:
    """Return the width of the densest part of the differences of ends, and its middle, in ns.

    Compared are the k-th operations of a kind in a step. The width is that of the shortest
    interval that has a certain share of the differences.
    """
    there = {key: row for row, key in enumerate(other.numbered(other.code))}
    pairs = [
        (row, there[key])
        for row, key in enumerate(own.numbered(own.partner))
        if key in there and key[0] != NULL
    ]
    if not pairs:
        return _NONE_NS, 0
    rows, others = np.array(pairs).T
    apart = np.sort(own.stop[rows] - other.stop[others])
    count = math.ceil(_DENSEST * len(apart))
    width = apart[count - 1 :] - apart[: len(apart) - count + 1]
    at = int(width.argmin())
    return int(width[at]), int(apart[at + count // 2])


def _misfit(recordings: Mapping[int, Recording], neighbors: Neighbors) -> float:
    """Return how many ms the ends of operations are apart from equal ones of neighbors."""
    medians = []
    for rank, own in recordings.items():
        places = np.arange(len(own.stop))
        distances = [own.distances(places, recordings[other]) for other in neighbors[rank]]
        if distances and len(places):
            medians.append(float(np.median(np.min(distances, axis=0))))
    return sum(medians) * 1e-6 + NOISE_MS


def shift_between(
    longest: tuple[Ints, Ints, Ints], other: tuple[Ints, Ints, Ints]
) -> int | None:
    """Return how many collectives later a recording begins than another; None if unclear.

    Both are codes, stops and steps of the collectives of one group, in the order of calls.
    Stops decide only among shifts that agree equally well in operations and steps: clocks may
    differ by more than a step.
    """
    (first, stops, steps), (second, own_stops, own_steps) = longest, other
    best: tuple[float, float, int] | None = None
    for shift in range(-MOST_SHIFTED, MOST_SHIFTED + 1):
        low, high = max(0, -shift), min(len(second), len(first) - shift)
        if high - low < max(_LEAST_EQUAL * len(second), 1):
            continue
        there = slice(low + shift, high + shift)
        equal = float(np.mean(second[low:high] == first[there]))
        is_known = (own_steps[low:high] != NULL) & (steps[there] != NULL)
        in_step = float(np.mean(is_known & (own_steps[low:high] == steps[there])))
        apart = float(np.median(np.abs(own_stops[low:high] - stops[there])))
        score = -round(equal + in_step, 6)
        if equal >= _LEAST_EQUAL and (best is None or (score, apart) < best[:2]):
            best = score, apart, shift
    return None if best is None else best[2]


def ms_apart(own: Recording, places: Ints, other: Recording) -> float | None:
    """Return the median ms from the end of collectives to equal ones of another rank.

    Where the other rank has none that is equal, a second counts; None if it recorded at no
    time of these.
    """
    if not len(other.stop):
        return None
    stop = own.stop[places]
    is_recorded = stop >= other.stop.min() - _MARGIN_NS
    is_recorded &= stop <= other.stop.max() + _MARGIN_NS
    distance = own.distances(places[is_recorded], other)
    return float(np.median(distance)) * 1e-6 if len(distance) else None


def _key(entry: tuple[str, str, str]) -> tuple[str, ...]:
    """Return the part of an operation's description in which all members of a group agree.

    Parts of an all-to-all may differ in their sizes.
    """
    return entry[:1] if entry[0].startswith("all_to_all") else entry


def _partner_key(entry: tuple[str, str, str]) -> tuple[str, ...]:
    """Return the key of the other side of a collective: of a send, that of a receive."""
    sides = {"send": "recv", "recv": "send"}
    return _key((sides.get(entry[0], entry[0]), *entry[1:]))
