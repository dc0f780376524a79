"""What several ranks did together, as columns: matched collectives, and exchanges of messages.

An event of a rank that belongs to an instance is a part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from fastcomm.exchange import clocks
from fastcomm.exchange.arrivals import Instances, MeetingPairs
from fastcomm.exchange.matching import (
    NONE,
    CollectiveCalls,
    Matches,
    Messages,
    Sides,
    match,
    match_messages,
)
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import ENDS_TOGETHER, FROM_ROOT, OP, TO_ROOT, numbers
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NULL, Flags, Ints

_COLUMNS = ("op", "tag", "start", "stop", "seq", "payload_bytes", "root", "event")
_PARTNERS = ("sends_to", "receives_from")
_PAIR = 2
_REFUSED = "collectives do not match in size or root and are not joined"


class _InstanceRows(NamedTuple):
    """Instances of some rows of the communication; pairs are of rows."""

    row: Ints  # ascending
    instance: Ints
    is_whole: Flags
    needed: MeetingPairs
    waiting: MeetingPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommunication:
    """The communication of several ranks, rank behind rank, and its matches; NULL for null."""

    ranks: tuple[int, ...]
    columns: Mapping[str, Ints]  # of `schema.COMM`; `rank`; `place` of the group in `labels`
    partners: pa.Table
    group: Ints  # a number that is the same on every rank; NULL where nothing tells one
    labels: tuple[str, ...]
    sizes: Ints  # of the groups
    directed: Ints  # rows of messages of which it is known who sends and who receives
    together: Ints  # rows that are matched as collectives
    matches: Matches  # of these

    @classmethod
    def of(cls, traces: Mapping[int, Trace]) -> Self:
        """Put the ranks one behind the other, and match their collectives."""
        comm = [trace.comm for trace in traces.values()]
        table = pa.concat_tables([each.select((*_COLUMNS, *_PARTNERS)) for each in comm])
        groups = [trace.groups for trace in traces.values()]
        first = np.cumsum([0, *(each.num_rows for each in groups)])
        columns = {name: filled(table[name]) for name in _COLUMNS}
        columns["rank"] = np.repeat(list(traces), [each.num_rows for each in comm])
        columns["place"] = np.concatenate(
            [filled(each["group"], 0) + at for each, at in zip(comm, first, strict=False)]
        )
        group = np.concatenate([_labels(trace) for trace in traces.values()])
        directed = table["sends_to"].is_valid().to_numpy() & (columns["op"] == OP["SendRecv"])
        together = np.flatnonzero((group != NULL) & ~directed)
        said = {name: columns[name] for name in ("rank", "op", "seq", "stop", "root")}
        said |= {"group": group, "payload": columns["payload_bytes"]}
        rows = [row for each in groups for row in each.to_pylist()]
        return cls(
            ranks=tuple(traces),
            columns=columns,
            partners=table.select(_PARTNERS).combine_chunks(),
            group=group,
            labels=tuple(_label(row) for row in rows),
            sizes=np.array([NULL if r["size"] is None else r["size"] for r in rows], np.int64),
            directed=np.flatnonzero((group != NULL) & directed),
            together=together,
            matches=match(CollectiveCalls.of(said, together)),
        )

    def ahead(self) -> dict[int, int]:
        """Return what each clock is ahead of its reference, where beyond doubt; else 0."""
        rank, op, stop = (self.columns[name] for name in ("rank", "op", "stop"))
        known = (self.matches.instance != NONE) & np.isin(
            op[self.together], numbers(ENDS_TOGETHER)
        )
        rows, number = self.together[known], self.matches.instance[known]
        offsets = clocks.offsets_of(rank[rows], self.group[rows], number, stop[rows])
        applied = {each.rank: each.offset_ns for each in offsets if each.applies}
        return {each: applied.get(each, 0) for each in self.ranks}

    def instances(
        self, inside: Mapping[int, Flags], ahead: Mapping[int, int]
    ) -> tuple[Instances, list[str]]:
        """Return the instances of several ranks, and notes on communication that is in none.

        `inside` says which rows of a rank's `comm` count, `ahead` by how much its clock is.
        """
        counts = np.concatenate([inside[rank] for rank in self.ranks])
        exchanged, lacking = self._exchanges(counts, ahead)
        together, silent = self._collectives(counts)
        notes = {
            "messages lack their other side and are not joined": lacking,
            "collectives are on one rank alone of those that were read": self._alone(counts),
            "collectives do not match in size or root and are not joined": self._refused(
                counts
            ),
            "collectives whose root or peers are unknown or not read are not joined": silent,
        }
        return self._in_order(exchanged, together, ahead), [
            f"{count} {words}" for words, count in notes.items() if count
        ]

    def _collectives(self, counts: Flags) -> tuple[_InstanceRows, int]:
        """Return the collectives of two ranks or more; and how many say too little."""
        own = (self.matches.instance != NONE) & counts[self.together]
        row, number = self.together[own], self.matches.instance[own]
        several = np.bincount(number, minlength=self.matches.count)[number] > 1
        row, number = row[several], _by_first(number[several])
        root, is_known = self._roots(row, number)
        silent = int((~is_known).sum())
        kept = is_known[number]
        row, number = row[kept], _by_first(number[kept])
        root = root[is_known]
        count = np.bincount(number, minlength=len(root))
        size = self.sizes[self.columns["place"][row[_first(number)]]]
        return _InstanceRows(
            row, number, (size == NULL) | (count == size), *self._meetings(row, number, root)
        ), silent

    def _roots(self, row: Ints, number: Ints) -> tuple[Ints, Flags]:
        """Return the row of each collective's root, or NONE; and whether who waits is known."""
        op, first = self.columns["op"][row], _first(number)
        said = np.full(len(first), NULL)
        known = np.flatnonzero(self.columns["root"][row] != NULL)[::-1]
        said[number[known]] = self.columns["root"][row[known]]
        root = np.full(len(first), NONE)
        is_root = np.flatnonzero(self.columns["rank"][row] == said[number])[::-1]
        root[number[is_root]] = row[is_root]
        is_pair = self.sizes[self.columns["place"][row[first]]] == _PAIR
        of_all = np.isin(op[first], numbers(ENDS_TOGETHER))
        of_all |= (op[first] == OP["SendRecv"]) & is_pair
        is_rooted = np.isin(op[first], numbers(FROM_ROOT + TO_ROOT)) & (root != NONE)
        return np.where(of_all, NONE, root), of_all | is_rooted

    def _meetings(
        self, row: Ints, number: Ints, root: Ints
    ) -> tuple[MeetingPairs, MeetingPairs]:
        """Return who has to come to which meeting, and who waits there: pairs of rows."""
        own_root, op = root[number], self.columns["op"][row]
        from_root = (own_root != NONE) & np.isin(op, numbers(FROM_ROOT))
        to_root = (own_root != NONE) & ~from_root
        # One meeting a collective; behind them, one for each who waits for its root alone.
        other = from_root & (row != own_root)
        single = len(root) + np.arange(int(other.sum()))
        needed = (row[~from_root], row[other], own_root[other])
        waits = ~from_root & ~(to_root & (row != own_root))
        return (
            MeetingPairs(
                np.concatenate(needed), np.concatenate([number[~from_root], single, single])
            ),
            MeetingPairs(np.append(row[waits], row[other]), np.append(number[waits], single)),
        )

    def _exchanges(self, counts: Flags, ahead: Mapping[int, int]) -> tuple[_InstanceRows, int]:
        """Return exchanges, joined by messages; and how many messages lack their other side.

        A receive waits for its send, and a send for its receive. But a send that fits a buffer
        is over before anybody receives: where it ended first, it did not wait.
        """
        side_row, messages = self._messages(ahead)
        matches = match_messages(messages)
        sender, receiver = (side_row[side] for side in matches.pairs(messages.is_send))
        inside = counts[sender] & counts[receiver]
        paired = matches.instance != NONE
        paired[paired] = inside[matches.instance[paired]]
        sender, receiver = sender[inside], receiver[inside]
        row, ends = np.unique(np.append(sender, receiver), return_inverse=True)
        number = _by_first(_components(ends.reshape(2, -1), len(row)))
        is_whole = np.ones(int(number.max(initial=-1)) + 1, np.bool_)
        is_whole[number[np.isin(row, side_row[~paired])]] = False
        offset = clocks.by_rank(self.columns["rank"], ahead)
        received = self.columns["start"][receiver] - offset[receiver]
        waits = received <= self.columns["stop"][sender] - offset[sender]
        pairs = _met(np.append(receiver, sender[waits]), np.append(sender, receiver[waits]))
        lacking = int((matches.lacking(messages) & counts[side_row]).sum())
        return _InstanceRows(row, number, is_whole, *pairs), lacking

    def _messages(self, ahead: Mapping[int, int]) -> tuple[Ints, Messages]:
        """Return the row of each side of a message, and the messages on clocks that agree."""
        partners = self.partners.take(self.directed)
        sides = Sides.of(*(partners[name].combine_chunks() for name in _PARTNERS))
        row = self.directed[sides.event]
        rank, seq, payload, stop = (
            self.columns[name][row] for name in ("rank", "seq", "payload_bytes", "stop")
        )
        return row, Messages(
            rank=rank,
            peer=sides.peer,
            is_send=sides.is_send,
            group=self.group[row],
            seq=seq,
            size=np.where(sides.is_only, payload, NULL),
            stop=stop - clocks.by_rank(rank, ahead),
        )

    def _in_order(
        self, exchanged: _InstanceRows, together: _InstanceRows, ahead: Mapping[int, int]
    ) -> Instances:
        """Put instances in order of their first start, and number their parts and meetings."""
        row = np.append(exchanged.row, together.row)
        instance = np.append(exchanged.instance, together.instance + len(exchanged.is_whole))
        is_whole = np.append(exchanged.is_whole, together.is_whole)
        start = self.columns["start"][row] - clocks.by_rank(self.columns["rank"][row], ahead)
        begin = np.full(len(is_whole), np.iinfo(np.int64).max)
        np.minimum.at(begin, instance, start)
        by_time = np.argsort(begin, kind="stable")
        place = np.argsort(by_time)
        order = np.lexsort((row, place[instance]))
        part = np.full(len(self.group), NONE)
        part[row[order]] = np.arange(len(order))
        meetings = int(exchanged.needed.meeting.max(initial=-1)) + 1
        needed, waiting = (
            MeetingPairs(
                part[np.append(a.part, b.part)], np.append(a.meeting, b.meeting + meetings)
            )
            for a, b in zip(exchanged[3:], together[3:], strict=True)
        )
        needed, waiting = _numbered(needed, waiting)
        columns = {name: column[row[order]] for name, column in self.columns.items()}
        return Instances(
            instance=place[instance][order],
            rank=columns["rank"],
            row=columns["event"],
            op=columns["op"].astype(np.int8),
            tag=columns["tag"].astype(np.int8),
            group=tuple(self.labels[at] for at in columns["place"].tolist()),
            start=start[order],
            stop=columns["stop"] - (columns["start"] - start[order]),
            is_whole=is_whole[by_time],
            needed=needed,
            waiting=waiting,
        )

    def _alone(self, counts: Flags) -> int:
        """Return how many collectives are on one rank alone of several of its group."""
        op, rank = self.columns["op"][self.together], self.columns["rank"][self.together]
        missing = (self.matches.instance == NONE) & (self.matches.refused == NONE)
        missing &= counts[self.together] & (op != OP["SendRecv"])
        group = self.group[self.together]
        known = np.unique(np.stack([group, rank]), axis=1)[0]
        several, times = np.unique(known, return_counts=True)
        return int((missing & np.isin(group, several[times > 1])).sum())

    def _refused(self, counts: Flags) -> int:
        """Return how many collectives have another size or root on one rank than on another."""
        refused = self.matches.refused[counts[self.together]]
        return len(np.unique(refused[refused != NONE]))


def _label(group: dict[str, object]) -> str:
    ranks = group["ranks"]
    members = tuple(ranks) if isinstance(ranks, list) else ()
    return str(group["description"] or group["name"] or members)


def _labels(trace: Trace) -> Ints:
    """Return the number of the group of each row."""
    label = pa.array(clocks.labels(trace.groups, described=True), pa.int64())
    return filled(label.take(trace.comm["group"].combine_chunks()))


def _components(ends: Ints, count: int) -> Ints:
    """Return which nodes edges join, directly or through others: a number for each."""
    from scipy.sparse import coo_array  # few runs have messages
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(ends.shape[1], np.bool_), tuple(ends)), (count, count))
    number: Ints = connected_components(edges, directed=False)[1].astype(np.int64)
    return number


def _met(waiter: Ints, awaited: Ints) -> tuple[MeetingPairs, MeetingPairs]:
    """Return meetings by who waits for whom: one for all who wait for the same."""
    needs: dict[int, set[int]] = {}
    for one, other in zip(waiter.tolist(), awaited.tolist(), strict=True):
        needs.setdefault(one, {one}).add(other)
    number: dict[tuple[int, ...], int] = {}
    waiting = [
        (one, number.setdefault(tuple(sorted(needs[one])), len(number)))
        for one in sorted(needs)
    ]
    needed = [(one, meeting) for key, meeting in number.items() for one in key]
    both = (np.array(pairs, np.int64).reshape(-1, 2).T for pairs in (needed, waiting))
    return MeetingPairs(*next(both)), MeetingPairs(*next(both))


def _numbered(needed: MeetingPairs, waiting: MeetingPairs) -> tuple[MeetingPairs, MeetingPairs]:
    """Number meetings by the first part that waits in each, and sort the pairs."""
    count = int(needed.meeting.max(initial=-1)) + 1
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, waiting.meeting, waiting.part)
    place = np.argsort(np.argsort(first, kind="stable"))
    # Numbers of collectives that have no meeting of their own are left out.
    used = np.cumsum(np.bincount(place[waiting.meeting], minlength=count) > 0) - 1
    return _sorted(needed, used[place]), _sorted(waiting, used[place])


def _sorted(pairs: MeetingPairs, place: Ints) -> MeetingPairs:
    meeting = place[pairs.meeting]
    order = np.lexsort((pairs.part, meeting))
    return MeetingPairs(pairs.part[order], meeting[order])


def _by_first(number: Ints) -> Ints:
    """Return the numbers anew, in the order of their first appearance."""
    _, first, place = np.unique(number, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[place]


def _first(number: Ints) -> Ints:
    """Return the first row of each number."""
    return np.unique(number, return_index=True)[1]
