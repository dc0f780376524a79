"""What each rank of a job called, in the same words for all recorders.

A call is done when its work is, as far as the recorder tells: with gloo when it is retired.
Calls of a batch are as far as the entry that closes it. Times are ns of the rank's host.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from fastcomm.formats.flight_recorder import STATES, Calls, Dump, DumpedGroup, read
from fastcomm_kernels.arrays import NULL, Flags, Ints

_MESSAGE = re.compile(r"(send|recv)\s*(\d+)\s*(?:->|<-)\s*(\d+)$")
_HOOK = "c10d"  # records any backend from the dispatcher, and retires what has only returned
_CLOSING = "coalesced"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """One call of one rank."""

    rank: int
    place: int  # among the calls of the rank
    group: DumpedGroup
    number: int  # in its group; of a message, none
    op: str
    peer: int | None  # rank of the other side of a message
    is_message: bool
    created: int
    arguments: tuple[int, int, int, int]  # hashes: shapes, then types, of input and output
    elements: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RankCalls:
    """The calls of one rank, the oldest first: the last ones of a long dump."""

    rank: int
    path: Path
    written: int | None  # second in which the dump was written
    keys: tuple[DumpedGroup, ...]  # of the groups of the calls
    world: int  # ranks that the dump names, at least
    library: str
    calls: Calls
    row: Ints  # of each call in the dump
    number: Ints  # in its group
    done: Flags
    begun: Flags
    last: Mapping[DumpedGroup, int]  # number of the last collective of each group
    is_whole: bool = True

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """Operation of each name, without library and ranks."""
        return tuple(_op_of(name) for name in self.calls.names)

    def op(self, at: int) -> str:
        """Return the operation of a call."""
        return self.ops[int(self.calls.name[at])]

    def key(self, at: int) -> DumpedGroup:
        """Return the group of a call."""
        return self.keys[int(self.calls.group[at])]

    def call(self, at: int) -> RankCall:
        """Return a call by its place."""
        calls, key = self.calls, self.key(at)
        one, two = (int(hashes[at]) for hashes in calls.shapes)
        three, four = (int(hashes[at]) for hashes in calls.types)
        return RankCall(
            rank=self.rank,
            place=at,
            group=key,
            number=int(self.number[at]),
            op=self.op(at),
            peer=self._peer(at, key),
            is_message=bool(self.is_message[at]),
            created=int(calls.created[at]),
            arguments=(one, two, three, four),
            elements=(int(calls.elements[0][at]), int(calls.elements[1][at])),
        )

    def _peer(self, at: int, key: DumpedGroup) -> int | None:
        """Return the rank of a message's other side: names have places in the group."""
        match = _MESSAGE.search(self.calls.names[self.calls.name[at]])
        if match is None:
            return None
        place = int(match[3])
        return key.ranks[place] if place < len(key.ranks) else place if not key.ranks else None

    @cached_property
    def is_message(self) -> Flags:
        """Whether each call is a message."""
        return _are_messages(self.calls)

    @cached_property
    def places(self) -> dict[tuple[DumpedGroup, int], int]:
        """Place of each collective by its group and number, the first of a batch."""
        places: dict[tuple[DumpedGroup, int], int] = {}
        numbers = zip(
            self.calls.group.tolist(),
            self.number.tolist(),
            self.is_message.tolist(),
            strict=True,
        )
        for at, (place, number, is_message) in enumerate(numbers):
            if not is_message:
                places.setdefault((self.keys[place], number), at)
        return places

    @cached_property
    def open(self) -> Ints:
        """Places of the calls that are not done."""
        return np.flatnonzero(~self.done)

    def shortened(self, most: int) -> "RankCalls":
        """Return the last calls alone, and at least all that are open but for the oldest."""
        begin = len(self.row) - most
        if begin <= 0:
            return self
        if len(self.open):
            begin = min(begin, max(int(self.open[0]) - most, len(self.row) - 4 * most, 0))
        rows = np.arange(begin, len(self.row))
        return replace(
            self,
            calls=self.calls.take(rows),
            row=self.row[rows],
            number=self.number[rows],
            done=self.done[rows],
            begun=self.begun[rows],
            is_whole=False,
        )

    def whole(self) -> "RankCalls":
        """Return all calls of the dump; reads it again if some were left out."""
        return self if self.is_whole else of_dump(read(self.path))


def _are_messages(calls: Calls) -> Flags:
    named = np.array([_MESSAGE.search(name) is not None for name in calls.names], bool)
    by_name = named[calls.name] if len(named) else np.zeros(0, bool)
    is_message: Flags = (calls.is_message == 1) | by_name
    return is_message


def _op_of(name: str) -> str:
    """Return the operation of a profiling name."""
    op = name.rpartition(":")[2]
    match = _MESSAGE.search(op)
    return match[1] if match else op


def library_of(names: Sequence[str]) -> str:
    """Return the library that most names begin with; empty without any."""
    prefixes = [name.partition(":")[0] for name in names if ":" in name]
    own = [prefix for prefix in prefixes if prefix != _HOOK]
    return max(own or prefixes, key=(own or prefixes).count, default="")


def of_dump(dump: Dump) -> RankCalls:
    """Return the calls of a dump: doubles left out, batches as far as they are closed."""
    rows = np.flatnonzero(~_doubles(dump.calls))
    calls = dump.calls.take(rows)
    library = library_of(calls.names)
    done = (calls.state == STATES.index("completed")) | (calls.retired == 1)
    begun = (calls.state >= STATES.index("started")) | (calls.started != NULL)
    _close_batches(calls, done, begun)
    number, keys = _numbers(calls, library), _keys(dump)
    is_collective = ~_are_messages(calls)
    of_group = {
        key: number[is_collective & (calls.group == place)] for place, key in enumerate(keys)
    }
    return RankCalls(
        rank=dump.rank,
        path=dump.path,
        written=dump.written,
        keys=keys,
        world=1 + max((max(group.ranks, default=-1) for group in dump.config), default=-1),
        library=library,
        calls=calls,
        row=rows,
        number=number,
        done=done,
        begun=begun & ~done,
        last={key: int(own.max()) for key, own in of_group.items() if len(own)},
    )


def _doubles(calls: Calls) -> Flags:
    """Return which calls a hook recorded that the library recorded, too."""
    is_hook = np.array([name.startswith(f"{_HOOK}:") for name in calls.names], bool)
    is_message = np.array([_op_of(name) in ("send", "recv") for name in calls.names], bool)
    if not len(calls) or is_hook.all():
        return np.zeros(len(calls), bool)
    doubles: Flags = (is_hook & ~is_message)[calls.name]
    return doubles


def _keys(dump: Dump) -> tuple[DumpedGroup, ...]:
    """Return the group of each of a dump, with the ranks that its own list states."""
    stated: dict[tuple[str, str], tuple[int, ...]] = {}
    for group in dump.config:
        if group.ranks and group.name:
            stated[group.name, group.desc] = group.ranks
    by_name = {name: ranks for (name, _), ranks in stated.items()}
    return tuple(
        replace(group, ranks=stated.get((group.name, group.desc), by_name.get(group.name, ())))
        for group in dump.groups
    )


def _close_batches(calls: Calls, done: Flags, begun: Flags) -> None:
    """Let the calls of a batch be as far as the entry that closes it."""
    closes = np.array([_op_of(name) == _CLOSING for name in calls.names], bool)
    if not closes.any():
        return
    counter = np.where(calls.is_message == 1, calls.message, calls.sequence)
    is_closing = closes[calls.name]
    for at in np.flatnonzero(is_closing).tolist():
        k = at - 1
        while k >= 0 and not is_closing[k]:
            if (calls.group[k], counter[k]) != (calls.group[at], counter[at]):
                break
            done[k], begun[k] = done[at], begun[at]
            k -= 1


def _numbers(calls: Calls, library: str) -> Ints:
    """Return the number of each call in its group.

    torchcomms counts all operations of the process: calls are counted anew by their groups.
    """
    number = calls.sequence
    counts_all = library.startswith("ncclx") and len(np.unique(number)) == len(number)
    if not counts_all and (number != NULL).all():
        return number
    own = np.zeros(len(calls), np.int64)
    for place in np.unique(calls.group).tolist():
        at = np.flatnonzero(calls.group == place)
        own[at] = np.arange(len(at)) + 1
    return own


@dataclass(frozen=True, kw_only=True)
class DumpedJob:
    """The ranks of a job that have a dump, and the groups among them."""

    ranks: dict[int, RankCalls]
    world: int
    members: dict[DumpedGroup, tuple[int, ...]] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which there is no dump."""
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)


def job_of(ranks: Iterable[RankCalls], world: int = 0) -> DumpedJob:
    """Return the job of the calls of some ranks; `world` is the least size that is known."""
    by_rank = {calls.rank: calls for calls in ranks}
    members: dict[DumpedGroup, set[int]] = {}
    for rank, calls in by_rank.items():
        for key in calls.keys:
            members.setdefault(key, set(key.ranks)).add(rank)
    stated = (calls.world for calls in by_rank.values())
    return DumpedJob(
        ranks=by_rank,
        world=max(world, 1 + max(by_rank, default=-1), *stated),
        members={key: tuple(sorted(own)) for key, own in members.items()},
    )
