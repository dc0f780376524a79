"""Who waits for whom: where each rank stands, and which ranks it needs to go on.

The graph has a node for each rank and for each *stop*: the collective or message that a rank
stands in. A rank has edges to its stops, a stop to the ranks that hold it up.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fastcomm.formats.flight_recorder import DumpedGroup
from fastcomm.hang.calls import OTHER_SIDE, DumpedJob, RankCall, RankCalls

# Operations that end on no member before all have called; others may end on one side.
_FOR_ALL = (
    *("all_reduce", "allreduce", "all_gather", "allgather", "all_to_all", "alltoall"),
    *("reduce_scatter", "barrier"),
)
_CLOSING = "coalesced"  # ends a batch
_RETIRES = ("gloo", "mpi", "ucc", "c10d")  # libraries whose calls have no start


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A collective, or a message of a pair, in which ranks stand."""

    group: DumpedGroup
    number: int | None  # of the collective
    pair: tuple[int, int] = (-1, -1)  # sender and receiver, -1 for one that is unknown
    ordinal: int | None = None  # of the message, since both were together last


@dataclass(kw_only=True)
class WaitGraph:
    """Where the ranks of a job stand, and whom they wait for."""

    job: DumpedJob
    is_over: bool = False  # nothing is open on any rank, and all is old
    holds_silent: bool = True  # whether ranks that no dump tells of hold others up
    fronts: dict[int, tuple[RankCall, ...]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # ranks whose front has failed
    ended: dict[Stop, bool] = field(default_factory=dict)  # collectives that all have called

    def __post_init__(self) -> None:
        """Find the fronts: what is open first, else what failed since a member is absent."""
        for rank, calls in self.job.ranks.items():
            front = tuple(_front(calls))
            if not front and (failed := self._failed(calls)) is not None:
                self.failed.add(rank)
                front = (failed,)
            if front:
                self.fronts[rank] = front

    def _failed(self, calls: RankCalls) -> RankCall | None:
        """Return the oldest retired call that cannot have ended, as a member never made it.

        Once nothing goes on any more, that is so for operations that can end on one side, too.
        """
        if not retires(calls):
            return None
        least = {key: self._least(key, calls.rank) for key in calls.last}
        places = (
            at
            for (key, number), at in calls.places.items()
            if number > least[key] and (self.is_over or is_for_all(calls.op(at)))
        )
        at = min(places, default=None)
        return None if at is None else calls.call(at)

    def _least(self, key: DumpedGroup, rank: int) -> int:
        """Return the least of the last numbers of the other members of a group."""
        others = (self.job.ranks.get(member) for member in self.job.members[key])
        return min(
            (
                calls.last[key]
                for calls in others
                if calls is not None
                and calls.rank != rank
                and key in calls.last
                and not calls.is_cut
            ),
            default=1 << 62,
        )

    @cached_property
    def stops(self) -> dict[Stop, dict[int, RankCall]]:
        """The ranks that stand in each stop, with the first call of a rank that is in it.

        Messages of a batch that are done are none.
        """
        stops: dict[Stop, dict[int, RankCall]] = {}
        for rank, front in self.fronts.items():
            for call in front:
                if not (call.is_message and len(front) > 1 and self.is_done(call)):
                    stops.setdefault(self.stop_of(call), {}).setdefault(rank, call)
        return stops

    def stop_of(self, call: RankCall) -> Stop:
        """Return the stop of a call that a rank stands in."""
        if not call.is_message:
            return Stop(group=call.group, number=call.number)
        peer = -1 if call.peer is None else call.peer
        pair = (call.rank, peer) if call.op == "send" else (peer, call.rank)
        ordinal = self.job.ordinal(call)
        return Stop(group=call.group, number=None, pair=pair, ordinal=ordinal)

    def is_done(self, call: RankCall) -> bool:
        """Return whether the other side of a message has it done."""
        ordinal = self.job.counterpart(call)
        if ordinal is None or call.peer is None:
            return False
        side = (OTHER_SIDE[call.op], call.rank)
        return self.job.ranks[call.peer].has_done(side, ordinal)

    @cached_property
    def holders(self) -> dict[Stop, list[int]]:
        """The ranks that each stop waits for, also those without a dump."""
        return {stop: sorted(set(self._holders(stop))) for stop in self.stops}

    def _holders(self, stop: Stop) -> Iterator[int]:
        if stop.number is None:
            yield from self._missing_side(stop)
            return
        for member in self.job.members.get(stop.group, ()):
            calls = self.job.ranks.get(member)
            if calls is None:
                is_holder = self.holds_silent and not self.has_ended(stop)
            else:
                is_holder = member not in self.stops[stop]
                is_holder = is_holder and not self._has_passed(calls, stop)
            if is_holder:
                yield member

    def has_ended(self, stop: Stop) -> bool:
        """Return whether all members have called a collective, as some went on behind it.

        Those that are in it only learn later that it has ended.
        """
        if stop not in self.ended:
            op = next(iter(self.stops[stop].values())).op
            self.ended[stop] = is_for_all(op) and any(
                self._went_on(self.job.ranks[member], stop)
                for member in self.job.members.get(stop.group, ())
                if member in self.job.ranks and member not in self.stops[stop]
            )
        return self.ended[stop]

    def _went_on(self, calls: RankCalls, stop: Stop) -> bool:
        """Return whether a rank has a collective done, and made others of its group since."""
        assert stop.number is not None
        at = calls.place(stop.group, stop.number)
        is_done = at is not None and bool(calls.done[at])
        return (
            is_done and calls.last[stop.group] > stop.number and calls.rank not in self.failed
        )

    def _has_passed(self, calls: RankCalls, stop: Stop) -> bool:
        """Return whether a rank has done, or is in, a collective that is no stop of its own."""
        assert stop.number is not None
        at = calls.place(stop.group, stop.number)
        if at is None:  # never called, or so long ago that it is left out
            return stop.number <= calls.last.get(stop.group, 0)
        front = self.fronts.get(calls.rank)
        if calls.rank in self.failed:
            return front is None or at < front[0].place
        return bool(calls.done[at]) or front is None or at < front[0].place

    def _missing_side(self, stop: Stop) -> Iterator[int]:
        """Yield the other side of a message unless it stands in the same message."""
        sender, receiver = stop.pair
        for one, other in ((sender, receiver), (receiver, sender)):
            is_silent = other < 0 or (other not in self.job.ranks and not self.holds_silent)
            if one in self.stops[stop] and other not in self.stops[stop] and not is_silent:
                yield other

    @cached_property
    def roots(self) -> list[tuple[list[int], list[Stop]]]:
        """What waits for nothing else: ranks and stops that wait for each other, or one alone.

        A part is a strongly connected one of the graph without an edge to another.
        """
        stops = [*self.stops]
        ranks = sorted({*self.fronts, *(one for own in self.holders.values() for one in own)})
        place = {rank: k for k, rank in enumerate(ranks)}
        edges = []
        for k, stop in enumerate(stops, len(ranks)):
            edges += [(place[rank], k) for rank in self.stops[stop]]
            edges += [(k, place[rank]) for rank in self.holders[stop]]
        size = len(ranks) + len(stops)
        if not size:
            return []
        source, target = np.array(edges, np.int64).reshape(-1, 2).T
        graph = coo_array((np.ones(len(source), np.int8), (source, target)), shape=(size, size))
        count, part = connected_components(graph, directed=True, connection="strong")
        leaves = np.ones(count, bool)
        leaves[part[source[part[source] != part[target]]]] = False
        roots = []
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(count + 1)).tolist()
        for number in np.flatnonzero(leaves).tolist():
            nodes = order[bounds[number] : bounds[number + 1]].tolist()
            roots.append(
                (
                    [ranks[k] for k in nodes if k < len(ranks)],
                    [stops[k - len(ranks)] for k in nodes if k >= len(ranks)],
                )
            )
        return roots

    def holding(self, ranks: Iterable[int]) -> list[Stop]:
        """Return the stops that wait for some ranks."""
        some = {*ranks}
        return [stop for stop, own in self.holders.items() if some.intersection(own)]

    def waiting(self, culprits: set[int], stop: Stop | None = None) -> list[int]:
        """Return the ranks that wait for some, directly or through others.

        Others wait for them where they stand in the same stop, too.
        """
        together = self.stops.get(stop, {}) if stop is not None else {}
        reached = culprits | ({*together} if culprits.intersection(together) else set())
        pending = set(reached)
        while pending:
            waiting = (self.stops[other] for other in self.holding(pending))
            pending = {rank for own in waiting for rank in own} - reached
            reached |= pending
        return sorted(reached - culprits)


def is_for_all(op: str) -> bool:
    """Return whether an operation ends on no member before all have called it."""
    return any(name in op for name in _FOR_ALL)


def retires(calls: RankCalls) -> bool:
    """Return whether a recorder retires what has failed like what is done."""
    return calls.library.startswith(_RETIRES)


def _front(calls: RankCalls) -> Iterator[RankCall]:
    """Yield the calls that a rank stands in: those that have begun, else the first open one.

    A batch of messages counts as a whole. Where the ring has overwritten all of it but its end,
    the rank stands no later than in the next open call.
    """
    begun = np.flatnonzero(calls.begun & ~calls.done)
    first = begun if len(begun) else calls.open[:1]
    places = set(first.tolist())
    for at in first.tolist():
        places.update(_batch(calls, at))
    own = [at for at in sorted(places) if calls.op(at) != _CLOSING]
    if places and not own:
        own = [at for at in calls.open.tolist() if calls.op(at) != _CLOSING][:1]
    for at in own:
        yield calls.call(at)


def _batch(calls: RankCalls, at: int) -> Iterator[int]:
    """Yield the other messages of a batch."""
    if not calls.is_message[at]:
        return
    own = calls.calls
    for step in (1, -1):
        k = at + step
        while 0 <= k < len(own) and calls.is_message[k]:
            if (own.group[k], own.message[k]) != (own.group[at], own.message[at]):
                break
            yield k
            k += step
