"""Find the process group of collectives on the host, which no event names.

A trace lists the groups of its rank. A thread of gloo serves one of them, of which the tensors
may tell the size. Which of several, other ranks decide: the members of a group do the same
operations, and end them together. Without them, and among equals, frameworks decide: threads
start in the order of the groups (gloo has two a group), and pipelines send messages.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from fastcomm.errors import ConfigError, TraceFileError
from fastcomm.formats.assembly import TraceOptions
from fastcomm.formats.kineto.categories import ON_HOST, scan
from fastcomm.formats.kineto.chrome import Scanned
from fastcomm.formats.kineto.communication_records import groups_of_rank
from fastcomm.formats.kineto.host import HostCollectives, named_rows
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.iterations import PROFILER_STEP
from fastcomm.trace.schema import OP
from fastcomm.trace.tags import ProcessGroup, tag_of_description
from fastcomm_kernels.arrays import NULL, Ints

NOISE_MS = 0.05  # by which ends differ without a reason
# Most collectives that the recording of a rank may begin later than that of another.
MOST_SHIFTED = 64
_LEAST_EQUAL = 0.9  # share of equal collectives in two sequences of one group
_MARGIN_NS = 5_000_000  # around the recording of another rank
_NONE_NS = 1_000_000_000  # distance where another rank has no equal collective
_DENSEST = 0.3  # share of the differences of two clocks that agree
# The ranks with which each rank is compared.
Neighbors = Mapping[int, Set[int]]
_MESSAGES = -1  # key of messages, which run on the calling thread, in place of a thread
_MOST_RANKS = 64  # that are compared: each is read once more
_MOST_MEMBERS = 4  # of a group that a rank is compared with
_THREADS = 2  # of gloo, per group
_MOST_CHOICES = 1 << 14
_MOST_COST = 6.0
# Cost of a group that does what groups of its description do not: more than any time.
_UNLIKELY = 8.0
_STEP = re.compile(PROFILER_STEP)
# Groups by thread: index into the listed groups, by thread or _MESSAGES.
ByThread = dict[int, int]
# Parallelism whose groups rarely have these operations, or that others have.
_UNUSUAL = {
    "PP": ("AllGather", "ReduceScatter", "AllToAll"),
    "DP": ("SendRecv", "AllToAll"),
    "TP": ("SendRecv",),
    "EP": ("SendRecv",),
}
_Pairs = tuple[tuple[int, int], ...]  # threads, and the group of each


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


@dataclass(frozen=True, slots=True)
class Assigned:
    """What the comparison of all ranks tells of the collectives of one."""

    groups: ByThread
    numbers: Ints  # of each collective in its group, equal on all ranks; NULL if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRank:
    """The collectives of one rank, and the groups that its trace lists."""

    rank: int
    groups: tuple[ProcessGroup, ...]
    collectives: HostCollectives
    base: int  # ns to add to times of the file
    step: Ints  # number of the step in which each collective was called; NULL if unknown

    @classmethod
    def of(cls, scanned: Scanned, rank: int) -> "HostRank":
        """Return the collectives in a trace, and its groups."""
        collectives = HostCollectives.of(scanned)
        base = scanned.envelope.get("baseTimeNanoseconds")
        return cls(
            rank=rank,
            groups=groups_of_rank(distributed_info(scanned)),
            collectives=collectives,
            base=base if isinstance(base, int) else 0,
            step=_steps(scanned, collectives.called),
        )

    def keys(self) -> Ints:
        """Return the thread of each collective; _MESSAGES for a point-to-point message."""
        is_message = np.array([call.is_message for call in self.collectives.calls], np.bool_)
        return np.where(is_message, _MESSAGES, self.collectives.thread)

    def units(self) -> dict[int, Ints]:
        """Return the indices of the rank's collectives by thread, in the order of their starts.

        Messages are under the key _MESSAGES.
        """
        key = self.keys()
        return {thread: np.flatnonzero(key == thread) for thread in np.unique(key).tolist()}

    def groups_of_calls(self, assigned: ByThread) -> list[ProcessGroup | None]:
        """Return the group of each collective, given those of threads; None if unknown."""
        places = (assigned.get(key) for key in self.keys().tolist())
        return [None if place is None else self.groups[place] for place in places]

    def candidates(self, places: Ints) -> list[int]:
        """Return the groups that may have done some collectives, as indices into `groups`.

        A group of known size is one if the calls state no other size, and if the ranks that
        messages name are in it. A group of unknown size always is.

        Parameters
        ----------
        places
            Indices of the collectives.

        """
        calls = [self.collectives.calls[place] for place in places.tolist()]
        sizes = {call.size for call in calls if call.size not in (NULL, 1)}
        most = max((call.peer for call in calls), default=NULL)
        return [
            index
            for index, group in enumerate(self.groups)
            if group.members is None
            or (group.members > max(most, 1) and sizes <= {group.members})
        ]

    def assign(self, costs: Mapping[tuple[int, int], float]) -> ByThread:
        """Return the group of each thread; threads whose groups stay open are missing.

        Parameters
        ----------
        costs
            How far other members of a group are from ending a thread's collectives with it,
            by thread and group, as `_costs` has it; empty if no other rank was compared.

        """
        units = self.units()
        threads = sorted(units)
        equal = self._first_equal()
        # Equal groups count as several only if threads are too many for one each.
        served = len(units.keys() - {_MESSAGES})
        are_used = served > _THREADS * len(set(equal))
        copies = Counter(equal if are_used else set(equal))
        cost = _Cost(self, units, costs, copies)
        choices = [
            sorted({equal[index] for index in self.candidates(units[thread])})
            for thread in threads
        ]
        if math.prod(map(len, choices)) > _MOST_CHOICES:
            alone = [
                [((thread, group),) for group in choice]
                for thread, choice in zip(threads, choices, strict=True)
            ]
            choices = [[group for ((_, group),) in cost.least(pairs)] for pairs in alone]
        if not all(choices) or math.prod(map(len, choices)) > _MOST_CHOICES:
            return {
                thread: choice[0]
                for thread, choice in zip(threads, choices, strict=True)
                if len(choice) == 1
            }
        pairs = (tuple(zip(threads, choice, strict=True)) for choice in product(*choices))
        best = cost.least(pairs)
        return {
            thread: group
            for thread, group in best[0]
            if all((thread, group) in other for other in best)
        }

    def _first_equal(self) -> list[int]:
        """Return for each group the first of equal ranks and parallelism.

        A mesh that is made again has other groups of the same ranks.
        """
        keys = [
            (group.ranks, tag_of_description(group.description or "")) for group in self.groups
        ]
        return [
            keys.index(key) if group.ranks else index
            for index, (key, group) in enumerate(zip(keys, self.groups, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class _Cost:
    """How implausible it is that threads of a rank serve groups."""

    rank: HostRank
    units: Mapping[int, Ints]  # `HostRank.units`
    costs: Mapping[tuple[int, int], float]  # as for `HostRank.assign`
    copies: Mapping[int, int]  # number of equal groups, by the first of them

    def least(self, choices: Iterable[_Pairs]) -> list[_Pairs]:
        """Return all choices of the least cost."""
        by_cost: dict[float, list[_Pairs]] = {}
        for pairs in choices:
            by_cost.setdefault(self.of(pairs), []).append(pairs)
        return by_cost[min(by_cost)] if by_cost else []

    def of(self, pairs: _Pairs) -> float:
        """Return the cost of a choice of groups for some threads."""
        copies = self.copies
        served = [group for thread, group in pairs if thread != _MESSAGES]
        crowded = sum(
            max(0, served.count(group) - _THREADS * copies[group]) for group in set(served)
        )
        unusual = sum(self._is_unusual(self.units[thread], group) for thread, group in pairs)
        swapped = sum(
            first > second
            for first, second in pairwise(served)
            if copies[first] == copies[second] == 1
        )
        apart = sum(self.costs.get(pair, 0.0) for pair in pairs)
        return round(apart + 2 * swapped + 4 * crowded + _UNLIKELY * unusual, 3)

    def _is_unusual(self, places: Ints, group: int) -> bool:
        """Return whether a group, by its description, rarely does one of these operations."""
        tag = tag_of_description(self.rank.groups[group].description or "") or ""
        ops = {self.rank.collectives.calls[place].operation for place in places.tolist()}
        numbers = {byte_rules.op_of_collective(op) for op in ops}
        return any(OP[name] in numbers for name in _UNUSUAL.get(tag, ()))


def assign(ranks: Mapping[int, Path], options: TraceOptions) -> dict[int, Assigned]:
    """Return the groups of collectives on the host of each rank, if the run has no other.

    Empty if there are too many, or a trace cannot be read; then each rank stands alone.
    """
    paths = list(ranks.values())
    if not 1 < len(paths) <= _MOST_RANKS:
        return {}
    try:
        marks, allowed = options.iterations.regex, options.allow_truncated
        scans = [scan(path, ON_HOST, allow_truncated=allowed, marks=marks)[0] for path in paths]
    except (ConfigError, TraceFileError):
        return {}  # reading the ranks reports the error
    hosts = [HostRank.of(scanned, rank) for rank, scanned in zip(ranks, scans, strict=True)]
    return dict(zip(ranks, _assign_together(hosts), strict=True))


def distributed_info(scanned: Scanned) -> dict[str, Any]:
    """Return the object `distributedInfo` of a trace, with rank and groups, or an empty one."""
    info = scanned.envelope.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _steps(scanned: Scanned, times: Ints) -> Ints:
    """Return the number of the step of the profiler at each time; NULL outside all steps."""
    rows = named_rows(scanned, "annotation", _STEP.match)
    start, stop, name = (scanned.columns[key][rows] for key in ("start", "stop", "name"))
    matches = [_STEP.match(scanned.texts[code]) for code in name.tolist()]
    number = np.array([int(match[1]) for match in matches if match], np.int64)
    if not len(rows):
        return np.full(len(times), NULL, np.int64)
    at = np.searchsorted(start, times, side="right") - 1
    is_inside = (at >= 0) & (times < stop[at])
    return np.where(is_inside, number[at], NULL)


def _assign_together(ranks: Sequence[HostRank]) -> list[Assigned]:
    """Return the groups and numbers of the collectives of each rank, by comparing the ranks."""
    codes: dict[tuple[str, ...], int] = {}
    recordings = on_one_clock(
        {
            rank.rank: Recording.of(rank.collectives, rank.base, rank.step, codes)
            for rank in ranks
        },
        _neighbors(ranks),
    )
    chosen = [rank.assign(_costs(rank, recordings)) for rank in ranks]
    numbers = [np.full(len(rank.collectives.calls), NULL, np.int64) for rank in ranks]
    for members in _sequences(ranks, chosen).values():
        _, (longest, order) = max(members.items(), key=lambda item: len(item[1][1]))
        first = recordings[longest.rank].at(order)
        for place, (rank, own) in members.items():
            shift = shift_between(first, recordings[rank.rank].at(own))
            if shift is not None:
                numbers[place][own] = np.arange(len(own)) + shift + MOST_SHIFTED
    return [Assigned(groups, own) for groups, own in zip(chosen, numbers, strict=True)]


def _neighbors(ranks: Sequence[HostRank]) -> dict[int, set[int]]:
    """Return the ranks before and behind each rank in its groups, among some ranks."""
    neighbors: dict[int, set[int]] = {rank.rank: set() for rank in ranks}
    for members in {group.ranks or () for rank in ranks for group in rank.groups}:
        for rank, other in pairwise(member for member in members if member in neighbors):
            neighbors[rank].add(other)
            neighbors[other].add(rank)
    return neighbors


# The collectives of a group by the place of the rank: the rank, and places in calling order.
_Members = dict[int, tuple[HostRank, Ints]]


def _sequences(
    ranks: Sequence[HostRank], chosen: Sequence[ByThread]
) -> dict[tuple[int, ...], _Members]:
    """Return the collectives of each group, messages excepted, by the ranks of the group.

    `chosen` has the index of the group of each thread, one dictionary for each of `ranks`. For
    each group, the result has by position in `ranks` the rank and the indices of its
    collectives in calling order.
    """
    sequences: dict[tuple[int, ...], _Members] = {}
    for place, (rank, groups) in enumerate(zip(ranks, chosen, strict=True)):
        order = rank.collectives.calling_order()
        group = np.array([groups.get(thread, -1) for thread in rank.keys().tolist()], np.int64)
        for index in {index for thread, index in groups.items() if thread != _MESSAGES}:
            is_own = (group == index) & (rank.keys() != _MESSAGES)
            if members := rank.groups[index].ranks:
                sequences.setdefault(members, {})[place] = rank, order[is_own[order]]
    return sequences


def _costs(rank: HostRank, recordings: Mapping[int, Recording]) -> dict[tuple[int, int], float]:
    """Return how unlikely each thread serves each group, from the ends of its collectives.

    This is the logarithm (base 2) of their distance from those of the other members, relative
    to the best group of the thread.
    """
    costs: dict[tuple[int, int], float] = {}
    for thread, places in rank.units().items():
        apart = {}
        for index in rank.candidates(places):
            members = [m for m in rank.groups[index].ranks or () if m != rank.rank]
            others = [recordings[m] for m in members if m in recordings][:_MOST_MEMBERS]
            own = recordings[rank.rank]
            distances = [ms_apart(own, places, other) for other in others]
            compared = [distance for distance in distances if distance is not None]
            if compared:
                apart[thread, index] = max(compared) + NOISE_MS
        best = min(apart.values(), default=1.0)
        costs |= {
            pair: min(math.log2(distance / best), _MOST_COST)
            for pair, distance in apart.items()
        }
    return costs
