"""What each rank of a job called, in the same words for all recorders.

A call is done when its work is, as far as the recorder tells: with gloo when it is retired.
Calls of a batch are as far as the entry that closes it. Times are ns of the rank's host.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fastcomm.formats.flight_recorder import STATES, Dump
from fastcomm_kernels.arrays import NULL, Flags, Ints

_MESSAGE = re.compile(r"(send|recv)\s*(\d+)\s*(?:->|<-)\s*(\d+)$")
_HOOK = "c10d"  # records any backend from the dispatcher, and retires what has only returned
_RETIRES = ("gloo", "mpi", "ucc")  # libraries whose calls have no start and no end
_CLOSING = "coalesced"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GroupKey:
    """A process group of a job; `ranks` are empty where no dump states them."""

    name: str
    desc: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """One call of one rank."""

    rank: int
    row: int
    group: GroupKey
    number: int  # in its group; of a message, none
    op: str
    peer: int | None  # rank of the other side of a message
    is_message: bool
    created: int
    arguments: tuple[int, int, int, int]  # hashes: shapes, then types, of input and output
    elements: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RankCalls:
    """The calls of one rank, the oldest first."""

    dump: Dump
    keys: tuple[GroupKey, ...]  # of the groups of the dump
    library: str
    rows: Ints  # of the dump, without doubles of a hook
    number: Ints
    done: Flags
    begun: Flags

    @property
    def rank(self) -> int:
        """The rank."""
        return self.dump.rank

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """Operation of each name of the dump, without library and ranks."""
        return tuple(_op_of(name) for name in self.dump.calls.names)

    def op(self, at: int) -> str:
        """Return the operation at a place of `rows`."""
        return self.ops[int(self.dump.calls.name[self.rows[at]])]

    def key(self, at: int) -> GroupKey:
        """Return the group at a place of `rows`."""
        return self.keys[int(self.dump.calls.group[self.rows[at]])]

    def call(self, at: int) -> RankCall:
        """Return the call at a place of `rows`."""
        row, calls = int(self.rows[at]), self.dump.calls
        key = self.key(at)
        return RankCall(
            rank=self.rank,
            row=at,
            group=key,
            number=int(self.number[at]),
            op=self.op(at),
            peer=self._peer(row, key),
            is_message=bool(self.is_message[at]),
            created=int(calls.created[row]),
            arguments=tuple(int(hashes[row]) for hashes in (*calls.shapes, *calls.types)),  # type: ignore[arg-type]
            elements=(int(calls.elements[0][row]), int(calls.elements[1][row])),
        )

    def _peer(self, row: int, key: GroupKey) -> int | None:
        """Return the rank of a message's other side: names have places in the group."""
        match = _MESSAGE.search(self.dump.calls.names[self.dump.calls.name[row]])
        if match is None:
            return None
        place = int(match[3])
        return key.ranks[place] if place < len(key.ranks) else place if not key.ranks else None

    @cached_property
    def is_message(self) -> Flags:
        """Whether each call is a message."""
        calls = self.dump.calls
        named = np.array([_MESSAGE.search(name) is not None for name in calls.names], bool)
        by_name = named[calls.name[self.rows]] if len(named) else np.zeros(0, bool)
        is_message: Flags = (calls.is_message[self.rows] == 1) | by_name
        return is_message

    @cached_property
    def created(self) -> Ints:
        """When each call was made, in ns; NULL is unknown."""
        return self.dump.calls.created[self.rows]

    @cached_property
    def last(self) -> dict[GroupKey, int]:
        """Number of the last collective of each group that this rank called."""
        return self._extreme(np.maximum)

    @cached_property
    def first(self) -> dict[GroupKey, int]:
        """Number of the first collective of each group that the dump still has."""
        return self._extreme(np.minimum)

    def _extreme(self, of: np.ufunc) -> dict[GroupKey, int]:
        group = self.dump.calls.group[self.rows]
        extremes: dict[GroupKey, int] = {}
        for place, key in enumerate(self.keys):
            numbers = self.number[(group == place) & ~self.is_message]
            if len(numbers):
                extremes[key] = int(of.reduce(numbers))
        return extremes

    @cached_property
    def places(self) -> dict[tuple[GroupKey, int], int]:
        """Place of each collective by its group and number, the first of a batch."""
        places: dict[tuple[GroupKey, int], int] = {}
        group = self.dump.calls.group[self.rows].tolist()
        numbers = zip(group, self.number.tolist(), self.is_message.tolist(), strict=True)
        for at, (place, number, is_message) in enumerate(numbers):
            if not is_message:
                places.setdefault((self.keys[place], number), at)
        return places

    @cached_property
    def open(self) -> Ints:
        """Places of the calls that are not done."""
        return np.flatnonzero(~self.done)


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
    calls = dump.calls
    library = library_of(calls.names)
    is_hook = np.array([name.startswith(f"{_HOOK}:") for name in calls.names], bool)
    is_message = np.array([_op_of(name) in ("send", "recv") for name in calls.names], bool)
    double = (is_hook & ~is_message)[calls.name] if len(calls) else np.zeros(0, bool)
    if is_hook.all():
        double[:] = False
    rows = np.flatnonzero(~double)
    keys = _keys(dump)
    state = calls.state[rows]
    done = (state == STATES.index("completed")) | (calls.retired[rows] == 1)
    begun = (state >= STATES.index("started")) | (calls.started[rows] != NULL)
    _close_batches(dump, rows, done, begun)
    return RankCalls(
        dump=dump,
        keys=keys,
        library=library,
        rows=rows,
        number=_numbers(dump, rows, library),
        done=done,
        begun=begun & ~done,
    )


def _keys(dump: Dump) -> tuple[GroupKey, ...]:
    """Return the group of each of a dump, with the ranks that its own list states."""
    stated: dict[tuple[str, str], tuple[int, ...]] = {}
    for group in dump.config:
        if group.ranks and group.name:
            stated[group.name, group.desc] = group.ranks
    by_name = {name: ranks for (name, _), ranks in stated.items()}
    return tuple(
        GroupKey(
            name=group.name,
            desc=group.desc,
            ranks=stated.get((group.name, group.desc), by_name.get(group.name, ())),
        )
        for group in dump.groups
    )


def _close_batches(dump: Dump, rows: Ints, done: Flags, begun: Flags) -> None:
    """Let the calls of a batch be as far as the entry that closes it."""
    calls = dump.calls
    closes = np.array([_op_of(name) == _CLOSING for name in calls.names], bool)
    if not closes.any():
        return
    counter = np.where(calls.is_message == 1, calls.message, calls.sequence)
    for at in np.flatnonzero(closes[calls.name[rows]]).tolist():
        row = rows[at]
        k = at - 1
        while (
            k >= 0
            and calls.group[rows[k]] == calls.group[row]
            and counter[rows[k]] == counter[row]
            and not closes[calls.name[rows[k]]]
        ):
            done[k], begun[k] = done[at], begun[at]
            k -= 1


def _numbers(dump: Dump, rows: Ints, library: str) -> Ints:
    """Return the number of each call in its group.

    torchcomms counts all operations of the process: calls are counted anew by their groups.
    """
    calls = dump.calls
    number = calls.sequence[rows]
    counts_all = (
        len(dump.groups) > 1
        and library.startswith("ncclx")
        and len(np.unique(number)) == len(number)
    )
    if not counts_all and (number != NULL).all():
        return number
    group = calls.group[rows]
    own = np.zeros(len(rows), np.int64)
    for place in range(len(dump.groups)):
        at = np.flatnonzero(group == place)
        own[at] = np.arange(len(at)) + 1
    return own


@dataclass(frozen=True, kw_only=True)
class DumpedJob:
    """The ranks of a job that have a dump, and the groups among them."""

    ranks: dict[int, RankCalls]
    world: int
    members: dict[GroupKey, tuple[int, ...]] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which there is no dump."""
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)


def job_of(dumps: Iterable[Dump], world: int = 0) -> DumpedJob:
    """Return the job of some dumps, one a rank; `world` is the least size that is known."""
    ranks = {dump.rank: of_dump(dump) for dump in dumps}
    members: dict[GroupKey, set[int]] = {}
    for rank, calls in ranks.items():
        for key in calls.keys:
            members.setdefault(key, set(key.ranks)).add(rank)
        for group in calls.dump.config:
            world = max(world, 1 + max(group.ranks, default=-1))
    world = max(world, 1 + max(ranks, default=-1))
    return DumpedJob(
        ranks=ranks,
        world=world,
        members={key: tuple(sorted(own)) for key, own in members.items()},
    )
