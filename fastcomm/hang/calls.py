"""What each rank of a job called, in the same words for all recorders.

A call is done when its work is, as far as the recorder tells: with gloo when it is retired.
Calls of a batch are as far as the entry that closes it. Times are ns of the rank's host.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from fastcomm.formats.flight_recorder import (
    AUTOGRAD,
    STATES,
    Calls,
    Dump,
    DumpedGroup,
    group_of,
    read,
)
from fastcomm.trace.run_traces import MOST_RANKS
from fastcomm_kernels.arrays import NULL, Flags, Ints

_MESSAGE = re.compile(r"(send|recv)\s*(\d+)\s*(?:->|<-)\s*(\d+)$")
_HOOK = "c10d"  # records any backend from the dispatcher, and retires what has only returned
_CLOSING = "coalesced"
_GATHERS = ("all_gather", "allgather", "_all_gather_base", "_allgather_base")
_WORLD = "default_pg"  # description of the group of all ranks
OTHER_SIDE = {"send": "recv", "recv": "send"}
_MOST_OPEN = 4  # calls that are compared with earlier ones
_MOST_ANCHORS = 3  # of a group: ranks are some calls apart


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
    ordinal: int  # of a message, among those of its side and peer
    created: int
    arguments: tuple[int, int, int, int]  # hashes: shapes, then types, of input and output
    elements: tuple[int, int]


Side = tuple[str, int]  # send or recv, and the peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A collective that a rank has done, and how many messages it made before."""

    group: DumpedGroup
    number: int
    before: Mapping[Side, int]

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process have an anchor without a look at its fields."""
        return _anchor, (self.group, self.number, self.before)


def _anchor(group: DumpedGroup, number: int, before: Mapping[Side, int]) -> Anchor:
    return Anchor(group=group, number=number, before=before)


@dataclass(frozen=True, kw_only=True)
class RankCalls:
    """The calls of one rank, the oldest first: the last ones of a long dump."""

    rank: int
    path: Path
    written: int  # second in which the dump was written, or a later one
    has_time: bool  # whether the file has that time inside, which copies keep
    has_stacks: bool  # so that it may have been written seconds after its state
    keys: tuple[DumpedGroup, ...]  # of the groups of the calls
    world: int  # ranks that the dump names, at least
    library: str
    calls: Calls
    row: Ints  # of each call in the dump
    number: Ints  # in its group
    done: Flags
    begun: Flags
    is_message: Flags
    beside: Flags  # calls of threads that do not train, as those that write checkpoints
    usual: Ints  # ns that earlier calls like one of the first open ones took; else NULL
    last: Mapping[DumpedGroup, int]  # number of the last collective of each group
    sizes: Mapping[DumpedGroup, int]  # of groups, as the arguments of all-gathers tell
    ordinal: Ints  # of each message, among those of its side and peer, from 1
    messages: Mapping[Side, int]  # number of all
    anchors: tuple["Anchor", ...]  # last collectives that are done, of each group
    begins: bool  # whether the oldest call of the process is in the dump
    is_cut: bool  # whether the file is truncated, so that calls after the last are unknown
    is_overwritten: bool  # whether the ring may have overwritten open calls
    stated_world: int = 0  # ranks of the group of all; 0 where the dump does not state them
    status: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    is_whole: bool = True
    apart: frozenset[DumpedGroup] | None = None  # groups left out with the calls of threads

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process have all columns as one array, which is faster than many."""
        own = {name: getattr(self, name) for name in _FIELDS}
        columns = [*self.calls.columns, *(getattr(self, name) for name in _COLUMNS)]
        flat = np.concatenate(columns).reshape(len(columns), len(self.row))
        return _of_columns, (flat, self.calls.names, own)

    @cached_property
    def latest(self) -> int:
        """When the last call was made, in ns; NULL where no call has a time."""
        created = self.calls.created
        return int(created.max()) if len(created) else NULL

    @cached_property
    def ops(self) -> tuple[str, ...]:
        """Operation of each name, without library and ranks."""
        return tuple(_op_of(name) for name in self.calls.names)

    def direction(self, name: int) -> int:
        """Return whether a message of some name goes to a later place, 1, or an earlier, -1."""
        message = _message_of(self.calls.names[name])
        return (message[2] > message[1]) * 2 - 1 if message else 0

    def op(self, at: int) -> str:
        """Return the operation of a call."""
        return self.ops[self.calls.name.item(at)]

    def key(self, at: int) -> DumpedGroup:
        """Return the group of a call."""
        return self.keys[self.calls.group.item(at)]

    def call(self, at: int) -> RankCall:
        """Return a call by its place."""
        call = self._calls.get(at)
        if call is None:
            call = self._calls[at] = self._call(at)
        return call

    @cached_property
    def _calls(self) -> dict[int, RankCall]:
        return {}

    def _call(self, at: int) -> RankCall:
        calls, key = self.calls, self.key(at)
        name = calls.name.item(at)
        hashes = (column.item(at) for column in (*calls.shapes, *calls.types))
        elements = (column.item(at) for column in calls.elements)
        return RankCall(
            rank=self.rank,
            place=at,
            group=key,
            number=self.number.item(at),
            op=self.ops[name],
            peer=_peer(calls.names[name], key),
            is_message=self.is_message.item(at),
            ordinal=self.ordinal.item(at),
            created=calls.created.item(at),
            arguments=cast("tuple[int, int, int, int]", tuple(hashes)),
            elements=cast("tuple[int, int]", tuple(elements)),
        )

    def place(self, group: DumpedGroup, number: int) -> int | None:
        """Return the place of a collective, of a batch the first; None where it is absent."""
        for at in np.flatnonzero(self.number == number).tolist():
            if self.key(at) is group and not self.is_message[at]:
                return int(at)
        return None

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

    def has_done(self, side: Side, ordinal: int) -> bool:
        """Return whether a message is done; those that are left out are."""
        for at in np.flatnonzero(self.ordinal == ordinal).tolist():
            call = self.call(at)
            if (call.op, call.peer) == side:
                return bool(self.done[at])
        return ordinal <= self.messages.get(side, 0)

    @cached_property
    def open(self) -> Ints:
        """Places of the calls that are not done."""
        return np.flatnonzero(~self.done)

    def shortened(self, most: int) -> "RankCalls":
        """Return the last calls alone, and at least all that are open but for the oldest."""
        if len(self.row) <= most:
            return self
        rows = self._recent(np.flatnonzero(~self.beside), most)
        if self.beside.any():
            others = self._recent(np.flatnonzero(self.beside), most)
            rows = np.sort(np.concatenate([rows, others]))
        return replace(self._take(rows), is_whole=False)

    def _recent(self, rows: Ints, most: int) -> Ints:
        """Return the last of some rows, from before the first that is open if it is near."""
        begin = max(len(rows) - most, 0)
        is_open = np.flatnonzero(~self.done[rows])
        if len(is_open):
            begin = min(begin, max(int(is_open[0]) - most, len(rows) - 4 * most, 0))
        return rows[begin:]

    def _take(self, rows: Ints) -> "RankCalls":
        """Return some of the calls."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, calls=self.calls.take(rows), **columns)

    def training(self, apart: frozenset[DumpedGroup]) -> "RankCalls":
        """Return the calls of the training thread, without calls of some groups."""
        places = [place for place, key in enumerate(self.keys) if key in apart]
        is_apart = self.beside | np.isin(self.calls.group, places)
        own = self._take(np.flatnonzero(~is_apart)) if is_apart.any() else self
        anchors = tuple(anchor for anchor in self.anchors if anchor.group not in apart)
        return replace(own, apart=apart, anchors=anchors)

    def whole(self) -> "RankCalls":
        """Return all calls of the dump; reads it again if some were left out.

        Groups have the ranks of the job, also where only other dumps state them. Some of the
        dumps that are read again stay in memory.
        """
        if self.is_whole:
            return self
        state = self.path.stat()
        again = _read_again(self.path, state.st_mtime_ns, state.st_size)
        if len(again.keys) == len(self.keys):
            again = replace(again, keys=self.keys)
        return again if self.apart is None else again.training(self.apart)


# Fields of the calls of a rank that have a row a call, and the others.
_COLUMNS = ("row", "number", "ordinal", "usual", "done", "begun", "is_message", "beside")
_FIELDS = tuple(
    one.name for one in fields_of(RankCalls) if one.name not in (*_COLUMNS, "calls")
)


def _of_columns(columns: Ints, names: tuple[str, ...], own: Mapping[str, Any]) -> RankCalls:
    """Return the calls of a rank of the columns of its calls, and of its own."""
    *flat, row, number, ordinal, usual, done, begun, is_message, beside = columns
    return RankCalls(
        calls=Calls.of_columns(flat, names),
        row=row,
        number=number,
        ordinal=ordinal,
        done=done.astype(bool),
        begun=begun.astype(bool),
        usual=usual,
        is_message=is_message.astype(bool),
        beside=beside.astype(bool),
        **own,
    )


@lru_cache(maxsize=128)
def _read_again(path: Path, _changed: int, _size: int) -> RankCalls:
    return of_dump(read(path))


@lru_cache(maxsize=4096)
def _message_of(name: str) -> tuple[str, int, int] | None:
    """Return side, own place in the group and that of the peer, by a profiling name."""
    match = _MESSAGE.search(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def _are_messages(calls: Calls) -> Flags:
    named = np.array([_message_of(name) is not None for name in calls.names], bool)
    by_name = named[calls.name] if len(named) else np.zeros(0, bool)
    is_message: Flags = (calls.is_message == 1) | by_name
    return is_message


def _peer(name: str, key: DumpedGroup) -> int | None:
    """Return the rank of a message's other side: names have places in the group.

    None where the group has no such place.
    """
    message = _message_of(name)
    if message is None:
        return None
    place = message[2]
    if not key.ranks:
        return place if place < MOST_RANKS else None
    return key.ranks[place] if place < len(key.ranks) else None


@lru_cache(maxsize=4096)
def _op_of(name: str) -> str:
    """Return the operation of a profiling name."""
    op = name.rpartition(":")[2]
    message = _message_of(op)
    return message[0] if message else op


def is_all_to_all(op: str) -> bool:
    """Return whether an operation is an all-to-all, whose members have other sizes."""
    return op.replace("_", "").startswith("alltoall")


def library_of(names: Sequence[str]) -> str:
    """Return the library that most names begin with; empty without any."""
    prefixes = [name.partition(":")[0] for name in names if ":" in name]
    own = [prefix for prefix in prefixes if prefix != _HOOK]
    return max(own or prefixes, key=(own or prefixes).count, default="")


def of_dump(dump: Dump) -> RankCalls:
    """Return the calls of a dump: doubles left out, batches as far as they are closed."""
    doubles = _doubles(dump.calls)
    rows = np.flatnonzero(~doubles)
    calls = dump.calls.take(rows) if doubles.any() else dump.calls
    library = library_of(calls.names)
    done = (calls.state == STATES.index("completed")) | (calls.retired == 1)
    begun = (calls.state >= STATES.index("started")) | (calls.started != NULL)
    _close_batches(calls, done, begun)
    number, keys = _numbers(calls, library), _keys(dump)
    is_message = _are_messages(calls)
    is_collective = ~is_message
    of_group = {
        key: number[is_collective & (calls.group == place)] for place, key in enumerate(keys)
    }
    sizes = _sizes(calls, keys)
    ordinal, sides = _ordinals(calls, keys)
    is_full = bool(len(calls)) and int(calls.record[0]) > 0
    beside = _beside(calls, keys)
    first = int(beside.argmin()) if len(beside) else 0  # call of the training
    messages = {side: len(places) for side, places in sides.items()}
    return RankCalls(
        rank=dump.rank,
        path=dump.path,
        written=dump.written,
        has_time=dump.has_time,
        has_stacks=dump.has_stacks,
        keys=keys,
        world=max(
            *(0, 0),
            *map(_world_of, dump.config),
            *(size for key, size in sizes.items() if key.desc == _WORLD),
        ),
        library=library,
        is_cut=dump.is_cut,
        is_overwritten=is_full and not done[first] and not (begun & ~done).any(),
        calls=calls,
        row=rows,
        number=number,
        done=done,
        begun=begun & ~done,
        is_message=is_message,
        beside=beside,
        usual=_usual(calls, done, beside),
        last={key: int(own.max()) for key, own in of_group.items() if len(own)},
        sizes=sizes,
        begins=not is_full,
        ordinal=ordinal,
        messages=messages,
        stated_world=max(
            (len(group.ranks) for group in dump.config if group.desc == _WORLD), default=0
        ),
        status=dump.status,
        anchors=tuple(_anchors(calls, keys, number, is_collective & done & ~beside, sides))
        if messages
        else (),
    )


def _beside(calls: Calls, keys: Sequence[DumpedGroup]) -> Flags:
    """Return which calls are of threads that do not train.

    The thread that trains calls groups of most descriptions; of equal ones, it is that of the
    first call of the process, or with most calls. A thread that takes its place in most calls
    of a group trains, too.
    """
    thread, others = calls.thread, np.zeros(len(calls), bool)
    if not len(thread) or (thread == thread[0]).all():
        return others
    threads, counts = np.unique(thread[thread != NULL], return_counts=True)
    if sum(threads != AUTOGRAD) < 2:  # noqa: PLR2004 - one thread, with its backward passes
        return others
    is_begun = int(calls.record[0]) == 0

    def rank(place: int) -> tuple[int, bool, int]:
        """Return how likely a thread is the one that trains, to compare."""
        of = threads[place]
        groups = np.unique(calls.group[thread == of]).tolist()
        is_first = is_begun and bool(of == thread[0])
        return len({keys[group].desc for group in groups}), is_first, int(counts[place])

    own = [place for place, of in enumerate(threads) if of != AUTOGRAD]
    trains = threads[max(own, key=rank)]
    others = ~np.isin(thread, (trains, AUTOGRAD, NULL))
    size = len(keys)
    of_others = np.bincount(calls.group[others], minlength=size)
    many = 2 * of_others >= np.bincount(calls.group, minlength=size)
    beside: Flags = others & many[calls.group]
    return beside


def _usual(calls: Calls, done: Flags, beside: Flags) -> Ints:
    """Return how long earlier calls of the group, operation and size of open ones took.

    That is the longest of the later half; the first call of a group may have made its
    communicator. Where no end is recorded, as with gloo, a call has ended by the end of the
    longest interval before the next one like it. NULL where nothing tells.
    """
    usual = np.full(len(calls), NULL)
    for at in np.flatnonzero(~done)[:_MOST_OPEN].tolist():
        columns = (calls.group, calls.name, *calls.elements)
        alike = np.logical_and.reduce([column == column[at] for column in columns])
        alike[at + 1 :] = False
        places = np.flatnonzero(alike & (calls.created != NULL))
        times = [
            int(calls.completed[one] - calls.created[one])
            if calls.completed[one] != NULL
            else _longest(calls.created[one : after + 1][beside[one : after + 1] == beside[at]])
            for one, after in pairwise(places.tolist())
            if done[one]
        ]
        later = times[max(1, len(times) // 2) :] or times
        usual[at] = max(later, default=NULL)
    return usual


def _longest(created: Ints) -> int:
    """Return how long after the first of some calls the longest interval between them ends."""
    created = created[created != NULL]
    intervals = np.diff(created)
    if not len(intervals):
        return NULL
    return int(created[1 + int(intervals.argmax())] - created[0])


@lru_cache(maxsize=1024)
def _world_of(group: DumpedGroup) -> int:
    """Return how many ranks a job has at least, by a group: thousands of dumps state one."""
    return 1 + max(group.ranks, default=-1)


def _sizes(calls: Calls, keys: Sequence[DumpedGroup]) -> dict[DumpedGroup, int]:
    """Return how many parts an all-gather of a group has: its ranks."""
    gathers = np.array([_op_of(name).startswith(_GATHERS) for name in calls.names], bool)
    if not gathers.any() or all(key.ranks for key in keys):
        return {}
    inputs, outputs = calls.elements
    is_whole = gathers[calls.name] & (inputs > 0)
    is_whole[is_whole] &= outputs[is_whole] % inputs[is_whole] == 0
    return {
        key: int(np.median(outputs[own] // inputs[own]))
        for place, key in enumerate(keys)
        if not key.ranks and (own := np.flatnonzero(is_whole & (calls.group == place))).size
        if int(np.median(outputs[own] // inputs[own])) <= MOST_RANKS
    }


def _ordinals(calls: Calls, keys: Sequence[DumpedGroup]) -> tuple[Ints, dict[Side, Ints]]:
    """Return the number of each message of a side and peer, and the places of these."""
    ordinal = np.zeros(len(calls), np.int64)
    sides: dict[Side, list[Ints]] = {}
    for k, name in enumerate(calls.names):
        if _message_of(name) is None:
            continue
        of_name = np.flatnonzero(calls.name == k)
        for place in np.flatnonzero(np.bincount(calls.group[of_name])).tolist():
            peer = _peer(name, keys[place])
            if peer is not None:
                own = of_name[calls.group[of_name] == place]
                sides.setdefault((_op_of(name), peer), []).append(own)
    places = {side: np.sort(np.concatenate(own)) for side, own in sides.items()}
    for own in places.values():
        ordinal[own] = np.arange(1, len(own) + 1)
    return ordinal, places


def _anchors(
    calls: Calls,
    keys: Sequence[DumpedGroup],
    number: Ints,
    is_done: Flags,
    sides: Mapping[Side, Ints],
) -> Iterator[Anchor]:
    """Yield the last collectives of each group that are done."""
    for place, key in enumerate(keys):
        last = np.flatnonzero(is_done & (calls.group == place))[-_MOST_ANCHORS:]
        counts = zip(*(own.searchsorted(last).tolist() for own in sides.values()), strict=True)
        for own, before in zip(number[last].tolist(), counts, strict=True):
            yield Anchor(group=key, number=own, before=dict(zip(sides, before, strict=True)))


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
    stated = {(group.name, group.desc): group for group in dump.config if group.ranks}
    by_name = {name: group for (name, _), group in stated.items() if name}
    return tuple(_stated(group, stated, by_name) for group in dump.groups)


def _stated(
    group: DumpedGroup,
    stated: Mapping[tuple[str, str], DumpedGroup],
    by_name: Mapping[str, DumpedGroup],
) -> DumpedGroup:
    same = stated.get((group.name, group.desc)) or by_name.get(group.name)
    if same is None or not group.name:
        return group
    return same if same.desc == group.desc else group_of(group.name, group.desc, same.ranks)


def _close_batches(calls: Calls, done: Flags, begun: Flags) -> None:
    """Let the calls of a batch be as far as the entry that closes it."""
    closes = np.array([_op_of(name) == _CLOSING for name in calls.names], bool)
    if not closes.any():
        return
    counter = np.where(calls.is_message == 1, calls.message, calls.sequence)
    closing = np.flatnonzero(closes[calls.name])
    rows = np.arange(closing[-1]) if len(closing) else closing
    end = closing[np.searchsorted(closing, rows)]  # the entry that may close each call
    is_other = (calls.group[rows] != calls.group[end]) | (counter[rows] != counter[end])
    other = np.maximum.accumulate(np.where(is_other, rows, -1))
    of_batch = rows > other[end - 1]
    of_batch &= rows != end
    done[rows[of_batch]] = done[end[of_batch]]
    begun[rows[of_batch]] = begun[end[of_batch]]


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
    unreadable: tuple[int, ...] = ()  # ranks whose dump does not tell where they stand

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which there is no dump, not even an unreadable one."""
        unreadable = {*self.unreadable}
        return tuple(rank for rank in self.silent if rank not in unreadable)

    @cached_property
    def silent(self) -> tuple[int, ...]:
        """Ranks of which no dump tells where they stand."""
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)

    def ordinal(self, call: RankCall) -> int | None:
        """Return the number of a message since both sides were together last.

        That is the last collective that both have done, or the begin of two whole dumps; None
        where neither is in the dumps, or the peer has none.
        """
        before = self._together(call.rank, call.peer)
        if before is None or call.peer is None:
            return None
        return call.ordinal - before.get((call.op, call.peer), 0)

    def since_together(self, rank: int, peer: int, side: str) -> int:
        """Return how many messages of a side a rank has made since it was with a peer last."""
        calls, before = self.ranks[rank], self._together(rank, peer)
        if before is None:
            return 0
        return calls.messages.get((side, peer), 0) - before.get((side, peer), 0)

    def counterpart(self, call: RankCall) -> int | None:
        """Return the ordinal, in the peer's dump, of the other side of a message."""
        ordinal = self.ordinal(call)
        before = None if call.peer is None else self._together(call.peer, call.rank)
        if ordinal is None or before is None:
            return None
        return ordinal + before.get((OTHER_SIDE[call.op], call.rank), 0)

    def _together(self, rank: int, peer: int | None) -> Mapping[Side, int] | None:
        """Return how many messages a rank had made when it was together with a peer last."""
        own, other = self.ranks.get(rank), None if peer is None else self.ranks.get(peer)
        if own is None or other is None:
            return None
        among = {(anchor.group, anchor.number) for anchor in other.anchors}
        common = [one for one in own.anchors if (one.group, one.number) in among]
        if common:
            return max(common, key=lambda anchor: sum(anchor.before.values())).before
        return {} if own.begins and other.begins else None


def job_of(
    ranks: Iterable[RankCalls], world: int = 0, unreadable: Iterable[int] = ()
) -> DumpedJob:
    """Return the job of the calls of some ranks.

    `world` is the least size that is known, `unreadable` are ranks whose dump cannot be read.
    A truncated dump without an open call is no better: the last calls are not in it.
    """
    every = _with_ranks([*ranks])
    by_rank = {calls.rank: calls for calls in every if not calls.is_cut or len(calls.open)}
    blank = {*unreadable, *(calls.rank for calls in every)} - by_rank.keys()
    members: dict[DumpedGroup, set[int]] = {}
    sizes: dict[DumpedGroup, int] = {}
    for rank, calls in by_rank.items():
        for key in calls.keys:
            if key not in members:
                members[key] = set(key.ranks)
            members[key].add(rank)
            sizes[key] = max(sizes.get(key, 0), calls.sizes.get(key, 0))
    stated = (calls.world for calls in by_rank.values())
    whole = max(world, 1 + max((*by_rank, *blank), default=-1), *stated)
    _add_missing(members, sizes, {*range(whole)} - by_rank.keys())
    return DumpedJob(
        ranks=by_rank,
        world=whole,
        members={key: tuple(sorted(own)) for key, own in members.items()},
        unreadable=tuple(sorted(blank)),
    )


def _add_missing(
    members: Mapping[DumpedGroup, set[int]],
    sizes: Mapping[DumpedGroup, int],
    missing: Collection[int],
) -> None:
    """Add the ranks without a dump to the one group of a description that lacks as many.

    Groups of one description are of one size: the largest's, and at least what an all-gather
    of a group has.
    """
    of_desc: dict[str, list[DumpedGroup]] = {}
    for key in members:
        if not key.ranks and key.desc != _WORLD:
            of_desc.setdefault(key.desc, []).append(key)
    for keys in of_desc.values():
        size = max(2, *(max(len(members[key]), sizes[key]) for key in keys))
        short = [key for key in keys if len(members[key]) < size]
        if len(short) == 1 and len(members[short[0]]) + len(missing) == size:
            members[short[0]].update(missing)


def _with_ranks(ranks: Sequence[RankCalls]) -> list[RankCalls]:
    """Return the calls with the ranks of their groups, where another dump alone states them."""
    stated: dict[tuple[str, str], set[DumpedGroup]] = {}
    for group in {key for calls in ranks for key in calls.keys if key.ranks}:
        stated.setdefault((group.name, group.desc), set()).add(group)

    def whole(group: DumpedGroup, rank: int) -> DumpedGroup:
        others = stated.get((group.name, group.desc), set())
        own = [] if group.ranks else [other for other in others if rank in other.ranks]
        return own[0] if len(own) == 1 else group

    return [
        replace(
            calls,
            keys=tuple(whole(key, calls.rank) for key in calls.keys),
            last={whole(key, calls.rank): number for key, number in calls.last.items()},
            anchors=tuple(
                replace(anchor, group=whole(anchor.group, calls.rank))
                for anchor in calls.anchors
            ),
        )
        if not all(key.ranks for key in calls.keys)
        else calls
        for calls in ranks
    ]
