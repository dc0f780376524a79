"""Matched collectives, and exchanges of point-to-point messages, of several ranks as columns.

An *instance* is one of them; a *part* is the event of one rank in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.ranks import clocks
from fastcomm.ranks.matching import (
    CollectiveCalls,
    Matches,
    Messages,
    Sides,
    match,
    match_messages,
)
from fastcomm.trace.columns import block_starts, filled
from fastcomm.trace.iterations import are_numbered
from fastcomm.trace.schema import ENDS_TOGETHER, FROM_ROOT, OP, ROOTED
from fastcomm.trace.trace import Trace
from fastcomm_kernels import intervals
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

_COLUMNS = ("op", "tag", "start", "stop", "seq", "call_id", "payload_bytes", "root", "event")
_PARTNERS = ("sends_to", "receives_from")
_PAIR = 2


class SyncPairs(NamedTuple):
    """Pairs of a part and a synchronization point, sorted by point, then by part."""

    part: Ints
    sync_point: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Matched collectives, and exchanges of messages, of several ranks, in order of time.

    A *part* is one rank's event in an instance, a row; parts of an instance are adjacent. Times
    are ns on the first rank's clock.
    """

    instance: Ints
    rank: Ints
    row: Ints  # of the rank's events
    op: NDArray[np.int8]
    tag: NDArray[np.int8]
    group: tuple[str, ...]
    start: Ints
    stop: Ints
    is_whole: Flags  # by instance: no participant is missing
    needed: SyncPairs  # parts that have to start, two or more per synchronization point
    waiting: SyncPairs  # parts that can end only then; a part waits at one point at most

    def __len__(self) -> int:
        return len(self.row)

    @property
    def arrived(self) -> Ints:
        """Start of the last part of each synchronization point, in ns as `start`."""
        begin = block_starts(self.needed.sync_point)
        latest: Ints = np.maximum.reduceat(self.start[self.needed.part], begin)
        return latest

    @property
    def last(self) -> Ints:
        """Part that arrives last at each synchronization point; the first of several."""
        part, sync_point = self.needed
        order = np.lexsort((-part, self.start[part], sync_point))
        last: Ints = part[order[_ends(sync_point)]]
        return last

    @property
    def until(self) -> Ints:
        """Time in ns until which each part waits; its own start where it waits for nobody.

        It precedes the part's start if the others arrive earlier.
        """
        until = self.start.copy()
        until[self.waiting.part] = self.arrived[self.waiting.sync_point]
        return until

    def wait_caused(self) -> tuple[Ints, Flags]:
        """Return the time in ns that others wait for each part, and whether the part is last.

        A part is last if it arrives last (others may tie) at every synchronization point where
        another part waits for it. It then causes the time since the second last arrival, the
        smallest over its points. Other parts cause 0.

        Returns
        -------
        tuple of Ints and Flags
            A value per part each.

        """
        part, sync_point = self.needed
        start = self.start[part]
        ordered = start[np.lexsort((start, sync_point))]
        ends = _ends(sync_point)
        late = ordered[ends] - ordered[ends - 1]
        # Nobody waits for a part that is the only one to wait.
        alone = np.full(len(late), NONE)
        sole = np.flatnonzero(np.bincount(self.waiting.sync_point) == 1)
        alone[sole] = self.waiting.part[block_starts(self.waiting.sync_point)[sole]]
        counts = alone[sync_point] != part
        is_late = counts & (start == ordered[ends][sync_point])
        caused = np.full(len(self), np.iinfo(np.int64).max)
        np.minimum.at(caused, part[is_late], late[sync_point[is_late]])
        is_last = np.zeros(len(self), np.bool_)
        is_last[part[is_late]] = True
        is_last[part[counts & ~is_late]] = False
        return np.where(is_last, caused, 0), is_last


def _ends(sorted_: Ints) -> Ints:
    """Return the last row of each run of equal numbers."""
    return np.append(block_starts(sorted_)[1:], len(sorted_)) - 1


class _InstanceRows(NamedTuple):
    """Instances as rows of the communication; pairs hold rows as well."""

    row: Ints  # ascending
    instance: Ints
    is_whole: Flags
    needed: SyncPairs
    waiting: SyncPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommunication:
    """Communication of several ranks, concatenated, and its matches; NULL stands for null."""

    ranks: tuple[int, ...]
    columns: Mapping[str, Ints]  # of `schema.COMM`; `rank`; `place` of the group in `labels`
    partners: pa.Table
    group: Ints  # per row: label, equal on all ranks; NULL if its members are unknown
    steps: Ints  # per row: number of the step, the same on all ranks; NULL if unknown
    labels: tuple[str, ...]
    sizes: Ints  # number of ranks per group, as `labels`
    directed: Ints  # rows of messages with known sender and receiver
    synchronous: Ints  # rows that are matched as collectives
    matches: Matches  # a value per element of `synchronous`
    is_host_run: bool  # whether the host communicates, where collectives do not end at once

    @classmethod
    def of(cls, traces: Mapping[int, Trace]) -> Self:
        """Concatenate the communication of ranks, and match their collectives.

        `traces` are by rank.
        """
        comm = [trace.comm for trace in traces.values()]
        table = pa.concat_tables([part.select((*_COLUMNS, *_PARTNERS)) for part in comm])
        groups = [trace.groups for trace in traces.values()]
        first = np.cumsum([0, *(part.num_rows for part in groups)])
        columns = {name: filled(table[name]) for name in _COLUMNS}
        columns["rank"] = np.repeat(list(traces), [part.num_rows for part in comm])
        columns["place"] = np.concatenate(
            [filled(part["group"], 0) + at for part, at in zip(comm, first, strict=False)]
        )
        group = np.concatenate([_labels(trace) for trace in traces.values()])
        directed = table["sends_to"].is_valid().to_numpy() & (columns["op"] == OP["SendRecv"])
        synchronous = np.flatnonzero((group != NULL) & ~directed)
        names = ("rank", "op", "seq", "call_id", "stop", "root")
        calls = {name: columns[name] for name in names}
        steps = np.concatenate([_steps(trace) for trace in traces.values()])
        calls |= {"group": group, "payload": columns["payload_bytes"], "step": steps}
        rows = [row for part in groups for row in part.to_pylist()]
        sizes = np.concatenate([filled(part["size"]) for part in groups])
        is_host_run = any(trace.meta.is_host_run for trace in traces.values())
        calls["start"] = np.full_like(columns["start"], NULL)
        if not is_host_run:
            checked = synchronous[sizes[columns["place"][synchronous]] == NULL]
            calls["start"][checked] = columns["start"][checked]
        return cls(
            ranks=tuple(traces),
            columns=columns,
            partners=table.select(_PARTNERS).combine_chunks(),
            group=group,
            steps=steps,
            labels=tuple(
                str(row["description"] or row["name"] or tuple(row["ranks"] or ()))
                for row in rows
            ),
            sizes=sizes,
            directed=np.flatnonzero((group != NULL) & directed),
            synchronous=synchronous,
            matches=match(CollectiveCalls.of(calls, synchronous)),
            is_host_run=is_host_run,
        )

    def ahead(self) -> dict[int, int]:
        """Return the clock offset of each rank in ns; 0 without a significant offset."""
        is_matched = self.matches.instance != NONE
        is_matched &= np.isin(self.columns["op"][self.synchronous], ENDS_TOGETHER)
        rows, number = self.synchronous[is_matched], self.matches.instance[is_matched]
        rank, start, stop = (self.columns[name][rows] for name in ("rank", "start", "stop"))
        began = start if self.is_host_run else None
        ends = clocks.matched_end_offsets(rank, self.group[rows], number, stop, began)
        offsets, _ = clocks.offsets_with_limits(ends, (self._message_limits,), self.ranks)
        applied = {offset.rank: offset.offset_ns for offset in offsets if offset.applies}
        return {number: applied.get(number, 0) for number in self.ranks}

    def _message_limits(self, offsets: Mapping[int, int]) -> clocks.EndOffsets:
        """Limit clock offsets by messages; `offsets` has the known ones, in ns by rank."""
        row, messages = self._messages(offsets)
        pairs = match_messages(messages).pairs(messages.is_send)
        sender, receiver = (row[side] for side in pairs)
        rank, start, stop = (self.columns[name] for name in ("rank", "start", "stop"))
        return clocks.EndOffsets.of_messages(
            rank[sender], start[sender], rank[receiver], stop[receiver]
        )

    def instances(
        self, inside: Mapping[int, Flags], ahead: Mapping[int, int]
    ) -> tuple[Instances, list[str]]:
        """Return the instances of several ranks, and notes on communication that is in none.

        Parameters
        ----------
        inside
            By rank: a Boolean per row of its `comm`, whether the event counts.
        ahead
            By rank: offset of its clock in ns.

        Returns
        -------
        tuple of Instances and list of str
            Notes have the count and the reason, such as "3 messages lack their other side and
            are not joined".

        """
        counts = np.concatenate([inside[rank] for rank in self.ranks])
        exchanged, unmatched = self._exchanges(counts, ahead)
        collectives, unknown = self._collectives(counts)
        # Their size or root differs between ranks.
        numbers_ = self.matches.refused[counts[self.synchronous]]
        refused = len(np.unique(numbers_[numbers_ != NONE]))
        notes = {
            "messages lack their other side and are not joined": unmatched,
            "collectives are on one rank alone of those that were read": self._alone(counts),
            "collectives do not match in size, root or `Comms Id` and are not joined": refused,
            "collectives whose root or peers are unknown or not read are not joined": unknown,
        }
        return self._in_order(exchanged, collectives, ahead), [
            f"{count} {reason}" for reason, count in notes.items() if count
        ]

    def _collectives(self, counts: Flags) -> tuple[_InstanceRows, int]:
        """Return the matched collectives that several ranks have, and the number left out.

        `counts` tells which events to consider. Left out are collectives whose root is unknown,
        since then it is unknown who waits for whom.
        """
        own = (self.matches.instance != NONE) & counts[self.synchronous]
        row, number = self.synchronous[own], self.matches.instance[own]
        several = np.bincount(number, minlength=self.matches.count)[number] > 1
        row, number = row[several], _by_first(number[several])
        root, is_known = self._roots(row, number)
        unknown = int((~is_known).sum())
        is_chosen = is_known[number]
        row, number = row[is_chosen], _by_first(number[is_chosen])
        root = root[is_known]
        count = np.bincount(number, minlength=len(root))
        size = self.sizes[self.columns["place"][row[_first(number)]]]
        return _InstanceRows(
            row, number, (size == NULL) | (count == size), *self._sync_points(row, number, root)
        ), unknown

    def _roots(self, row: Ints, number: Ints) -> tuple[Ints, Flags]:
        """Return the row of each collective's root or NONE, and whether its waits are known."""
        op, first = self.columns["op"][row], _first(number)
        root_rank = np.full(len(first), NULL)
        has_root = np.flatnonzero(self.columns["root"][row] != NULL)[::-1]
        root_rank[number[has_root]] = self.columns["root"][row[has_root]]
        root = np.full(len(first), NONE)
        is_root = np.flatnonzero(self.columns["rank"][row] == root_rank[number])[::-1]
        root[number[is_root]] = row[is_root]
        is_pair = self.sizes[self.columns["place"][row[first]]] == _PAIR
        of_all = np.isin(op[first], ENDS_TOGETHER)
        of_all |= (op[first] == OP["SendRecv"]) & is_pair
        is_rooted = np.isin(op[first], ROOTED) & (root != NONE)
        return np.where(of_all, NONE, root), of_all | is_rooted

    def _sync_points(self, row: Ints, number: Ints, root: Ints) -> tuple[SyncPairs, SyncPairs]:
        """Return which rows must start at each synchronization point, and which rows wait."""
        own_root, op = root[number], self.columns["op"][row]
        from_root = (own_root != NONE) & np.isin(op, FROM_ROOT)
        to_root = (own_root != NONE) & ~from_root
        # One point per collective; then one per member that waits for its root alone.
        other = from_root & (row != own_root)
        single = len(root) + np.arange(int(other.sum()))
        needed = (row[~from_root], row[other], own_root[other])
        waits = ~from_root & ~(to_root & (row != own_root))
        points = (number[~from_root], single, single)
        return (
            SyncPairs(np.concatenate(needed), np.concatenate(points)),
            SyncPairs(np.append(row[waits], row[other]), np.append(number[waits], single)),
        )

    def _exchanges(self, counts: Flags, ahead: Mapping[int, int]) -> tuple[_InstanceRows, int]:
        """Return exchanges, joined by messages, and the number of messages without other side.

        A receive waits for its send, and a send for its receive. But a send that fits a buffer
        is over before anybody receives: if it ends first, it did not wait.
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
        offset = clocks.offset_by_row(self.columns["rank"], ahead)
        received = self.columns["start"][receiver] - offset[receiver]
        waits = received <= self.columns["stop"][sender] - offset[sender]
        pairs = _pairwise_sync_points(
            np.append(receiver, sender[waits]), np.append(sender, receiver[waits])
        )
        unmatched = int((matches.unmatched(messages) & counts[side_row]).sum())
        return _InstanceRows(row, number, is_whole, *pairs), unmatched

    def _messages(self, ahead: Mapping[int, int]) -> tuple[Ints, Messages]:
        """Return the row of each side of a message, and the messages on aligned clocks."""
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
            stop=stop - clocks.offset_by_row(rank, ahead),
            step=self.steps[row],
        )

    def _in_order(
        self, exchanged: _InstanceRows, collectives: _InstanceRows, ahead: Mapping[int, int]
    ) -> Instances:
        """Sort instances by their first start, and number their parts and points."""
        row = np.append(exchanged.row, collectives.row)
        instance = np.append(exchanged.instance, collectives.instance + len(exchanged.is_whole))
        is_whole = np.append(exchanged.is_whole, collectives.is_whole)
        offset = clocks.offset_by_row(self.columns["rank"][row], ahead)
        start = self.columns["start"][row] - offset
        begin = np.full(len(is_whole), np.iinfo(np.int64).max)
        np.minimum.at(begin, instance, start)
        by_time = np.argsort(begin, kind="stable")
        place = np.argsort(by_time)
        order = np.lexsort((row, place[instance]))
        part = np.full(len(self.group), NONE)
        part[row[order]] = np.arange(len(order))
        sync_points = int(exchanged.needed.sync_point.max(initial=-1)) + 1
        needed, waiting = (
            SyncPairs(
                part[np.append(a.part, b.part)],
                np.append(a.sync_point, b.sync_point + sync_points),
            )
            for a, b in zip(exchanged[3:], collectives[3:], strict=True)
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
            stop=columns["stop"] - offset[order],
            is_whole=is_whole[by_time],
            needed=needed,
            waiting=waiting,
        )

    def _alone(self, counts: Flags) -> int:
        """Count flagged collectives on only one rank, of groups that several ranks have."""
        op, rank = self.columns["op"][self.synchronous], self.columns["rank"][self.synchronous]
        missing = (self.matches.instance == NONE) & (self.matches.refused == NONE)
        missing &= counts[self.synchronous] & (op != OP["SendRecv"])
        group = self.group[self.synchronous]
        groups = np.unique(np.stack([group, rank]), axis=1)[0]
        several, times = np.unique(groups, return_counts=True)
        return int((missing & np.isin(group, several[times > 1])).sum())


def _labels(trace: Trace) -> Ints:
    """Return the label of the group of each row of `trace.comm`; NULL where unknown."""
    label = pa.array(clocks.labels(trace.groups, by_description=True), pa.int64())
    return filled(label.take(trace.comm["group"].combine_chunks()))


def _steps(trace: Trace) -> Ints:
    """Return the job's number of the step of each row of `trace.comm`; NULL if unknown."""
    steps = trace.iterations if trace.device_iterations is None else trace.device_iterations
    start, stop, number = (steps[name].to_numpy() for name in ("start", "stop", "number"))
    place = intervals.segment_of(trace.comm["start"].to_numpy(), start, stop)
    is_known = (place >= 0) & are_numbered(trace.meta.found_by)
    return np.where(is_known, np.append(number, 0)[place], NULL)


def _components(ends: Ints, count: int) -> Ints:
    """Return the number of the connected component of each node."""
    if not count:
        return np.empty(0, np.int64)
    from scipy.sparse import coo_array  # a slow import, and few runs have messages
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(ends.shape[1], np.bool_), tuple(ends)), (count, count))
    number: Ints = connected_components(graph, directed=False)[1].astype(np.int64)
    return number


def _pairwise_sync_points(waiter: Ints, awaited: Ints) -> tuple[SyncPairs, SyncPairs]:
    """Return synchronization points from pairs of rows: one that waits, one that it waits for.

    Rows that wait for equal sets of rows share a point. The results are the rows that have to
    start, and the rows that wait.
    """
    needs: dict[int, set[int]] = {}
    for row, needed_row in zip(waiter.tolist(), awaited.tolist(), strict=True):
        needs.setdefault(row, {row}).add(needed_row)
    number: dict[tuple[int, ...], int] = {}
    waiting = [
        (row, number.setdefault(tuple(sorted(needs[row])), len(number)))
        for row in sorted(needs)
    ]
    needed = [(row, sync_point) for key, sync_point in number.items() for row in key]
    columns = (np.array(pairs, np.int64).reshape(-1, 2).T for pairs in (needed, waiting))
    return SyncPairs(*next(columns)), SyncPairs(*next(columns))


def _numbered(needed: SyncPairs, waiting: SyncPairs) -> tuple[SyncPairs, SyncPairs]:
    """Number synchronization points by the first part that waits in each; sort the pairs."""
    count = int(needed.sync_point.max(initial=-1)) + 1
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, waiting.sync_point, waiting.part)
    place = np.argsort(np.argsort(first, kind="stable"))
    # Numbers of collectives that have no synchronization point of their own are left out.
    used = np.cumsum(np.bincount(place[waiting.sync_point], minlength=count) > 0) - 1
    return _sorted(needed, used[place]), _sorted(waiting, used[place])


def _sorted(pairs: SyncPairs, place: Ints) -> SyncPairs:
    sync_point = place[pairs.sync_point]
    order = np.lexsort((pairs.part, sync_point))
    return SyncPairs(pairs.part[order], sync_point[order])


def _by_first(number: Ints) -> Ints:
    """Return the numbers, renumbered in order of first appearance."""
    _, first, place = np.unique(number, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[place]


def _first(number: Ints) -> Ints:
    """Return the first row of each number."""
    return np.unique(number, return_index=True)[1]
