"""What trains, and what other threads call beside it: checkpoints, checks of health.

One thread makes its calls in one order on all ranks; calls of two threads may mix. A thread
that stands in a call keeps its own calls from going on, and no others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise

import numpy as np

from fastcomm.formats.flight_recorder import DumpedGroup
from fastcomm.hang.calls import DumpedJob, RankCall, RankCalls
from fastcomm.hang.waits import is_for_all
from fastcomm_kernels.arrays import NULL, Flags, Ints

_SECOND = 1_000_000_000
_MOST_RANKS = 16  # that are compared where no dump tells threads apart
_MOST_CALLS = 4  # of a group
NamedCall = tuple[str, str]  # description of the group, and operation
_UNNAMED = ("", "undefined")  # descriptions of groups that nobody described


def training(job: DumpedJob) -> DumpedJob:
    """Return the job without the calls of threads that do not train; itself without any."""
    apart = _apart(job)
    if not apart and not any(calls.beside.any() for calls in job.ranks.values()):
        return job
    ranks = {rank: calls.training(apart) for rank, calls in job.ranks.items()}
    return replace(job, ranks=ranks)


def _apart(job: DumpedJob) -> frozenset[DumpedGroup]:
    """Return the groups of other threads where dumps do not tell threads apart.

    Ranks of such a group called it between other calls of another group each, and went on: one
    thread makes calls of both in one order, or stands in them. Or several ranks called it, as
    never before, behind other open calls each, or seconds later each: a fault makes one rank
    leave its order.
    """
    some = (
        calls.whole()
        for calls in islice(job.ranks.values(), _MOST_RANKS)
        if len(calls.row) and (calls.calls.thread == NULL).all()
    )
    members: dict[DumpedGroup, dict[int, _GroupCalls]] = {}
    before: dict[DumpedGroup, set[tuple[NamedCall, int]]] = {}
    for calls in some:
        for key, own in _by_group(calls):
            members.setdefault(key, {})[calls.rank] = own
        for key, call in _unusual(calls):
            before.setdefault(key, set()).add(call)
    apart = {key for key, calls in before.items() if len(calls) > 1}
    apart |= _fewest_that_cross(members)
    descs = {key.desc for key in apart} - {*_UNNAMED}
    return frozenset(key for key in members if key in apart or key.desc in descs)


def _fewest_that_cross(
    members: Mapping[DumpedGroup, Mapping[int, "_GroupCalls"]],
) -> set[DumpedGroup]:
    """Return groups without which no two groups cross: those that cross most others.

    Of equal ones, it is the one with fewer calls.
    """
    crossing = {
        pair for pair in combinations(members, 2) if _cross(members[pair[0]], members[pair[1]])
    }
    apart: set[DumpedGroup] = set()
    while crossing:
        keys = [key for pair in crossing for key in pair]
        calls = {key: max(own.last for own in members[key].values()) for key in keys}
        odd = max(calls, key=lambda key: (keys.count(key), -calls[key]))
        apart.add(odd)
        crossing = {pair for pair in crossing if odd not in pair}
    return apart


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupCalls:
    """The collectives of a rank in a group that need all members, by their numbers."""

    number: Ints
    place: Ints
    done: Flags

    @property
    def last(self) -> int:
        """Number of the last one."""
        return int(self.number.max(initial=0))


def _by_group(calls: RankCalls) -> Iterator[tuple[DumpedGroup, _GroupCalls]]:
    is_for_all_of = np.array([is_for_all(op) for op in calls.ops], bool)
    rows = np.flatnonzero(is_for_all_of[calls.calls.name] & ~calls.is_message)
    for place, key in enumerate(calls.keys):
        own = rows[calls.calls.group[rows] == place]
        if len(own):
            number, first = np.unique(calls.number[own], return_index=True)
            yield key, _GroupCalls(number=number, place=own[first], done=calls.done[own[first]])


def _cross(one: Mapping[int, _GroupCalls], two: Mapping[int, _GroupCalls]) -> bool:
    """Return whether neighbors among the ranks called two groups in different orders.

    They went on, so that they stood in neither.
    """
    ranks = [rank for rank in one if rank in two]
    return any(
        _is_between((one[a], one[b]), (two[a], two[b]))
        or _is_between((two[a], two[b]), (one[a], one[b]))
        for a, b in pairwise(ranks)
    )


def _is_between(own: tuple[_GroupCalls, _GroupCalls], others: tuple[_GroupCalls, ...]) -> bool:
    """Return whether two ranks made late calls of a group between other done ones each."""
    first, second = own
    _, at, to = np.intersect1d(first.number, second.number, return_indices=True)
    one, two = others
    _, a, b = np.intersect1d(one.number, two.number, return_indices=True)
    are_done = one.done[a] & two.done[b]
    before = np.sort(one.place[a][are_done]).searchsorted(first.place[at[-_MOST_CALLS:]])
    after = np.sort(two.place[b][are_done]).searchsorted(second.place[to[-_MOST_CALLS:]])
    return bool((before != after).any())


def _unusual(calls: RankCalls) -> Iterator[tuple[DumpedGroup, tuple[NamedCall, int]]]:
    """Yield the groups of open calls, with the open call before and how many s it is earlier.

    Only where the rank has called the latter before, and never the former right behind it.
    """
    rows = range(len(calls.row))
    names = [(calls.key(at).desc or calls.key(at).name, calls.op(at)) for at in rows]
    for at in calls.open.tolist():
        if at == 0 or calls.done[at - 1] or calls.key(at) is calls.key(at - 1):
            continue
        usual = [*pairwise(names[:at])]
        if names[at - 1] in names[: at - 1] and (names[at - 1], names[at]) not in usual:
            later = int(calls.calls.created[at] - calls.calls.created[at - 1])
            yield calls.key(at), (names[at - 1], later // _SECOND)


def beside(job: DumpedJob, trains: DumpedJob) -> Iterator[RankCall]:
    """Yield the calls that threads stand in that do not train, the first of each rank."""
    for rank, calls in job.ranks.items():
        own = {*trains.ranks[rank].row.tolist()}
        if len(own) < len(calls.row):
            places = [at for at in calls.open.tolist() if calls.row.item(at) not in own]
            yield from (calls.call(at) for at in places[:1])
