"""The communication of several ranks in one table, matched across ranks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.exchange import clocks
from fastcomm.exchange.matching import NONE, CollectiveCalls, Matches, match
from fastcomm.exchange.messages import Messages, Sides, match_messages
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import (
    ENDS_TOGETHER,
    FROM_ROOT,
    OP,
    OPS,
    TAGS,
    TO_ROOT,
    numbers,
)
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NULL, Flags, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDescription:
    """What is said of the group that communicates."""

    label: str
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommunication:
    """One rank's part in an operation of a group; start and stop on the first rank's clock."""

    rank: int
    row: int  # of the rank's events
    op: str
    start: int
    stop: int
    group: GroupDescription
    tag: str
    root: int | None  # global rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One operation of one group, on all ranks that were read."""

    members: tuple[RankCommunication, ...]
    # By member: the members, itself among them, before whose starts it cannot end.
    waits_for: tuple[tuple[int, ...], ...]
    is_whole: bool  # no participant is missing


_COLUMNS = ("event", "op", "start", "stop", "group", "tag", "root")


def parts(rank: int, trace: Trace, rows: Ints, ahead: int) -> Iterator[RankCommunication]:
    """These rows of the rank's `comm`, all of known groups.

    `ahead` is by how many ns the rank's clock is ahead.
    """
    groups = [_about(row) for row in trace.groups.to_pylist()]
    table = trace.comm.select(_COLUMNS).take(rows)
    columns = [table[name].to_pylist() for name in _COLUMNS]
    for row, op, start, stop, group, tag, root in zip(*columns, strict=True):
        yield RankCommunication(
            rank=rank,
            row=row,
            op=OPS[op],
            start=start - ahead,
            stop=stop - ahead,
            group=groups[group],
            tag=TAGS[tag],
            root=root,
        )


def _about(row: dict[str, object]) -> GroupDescription:
    ranks = row["ranks"]
    members = tuple(ranks) if isinstance(ranks, list) else ()
    size = row["size"]
    return GroupDescription(
        label=str(row["description"] or row["name"] or members),
        size=size if isinstance(size, int) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationTable:
    """Columns of all rows; NULL for null."""

    traces: Mapping[int, Trace]
    table: pa.Table
    rank: Ints
    group: Ints  # a label that is the same on every rank; NULL where nothing tells one
    op: NDArray[np.int8]
    stop: Ints
    directed: Ints  # rows of messages of which it is known who sends and who receives
    together: Ints  # rows that are matched as collectives
    matches: Matches  # of these

    @classmethod
    def of(cls, traces: Mapping[int, Trace]) -> "CommunicationTable":
        """Put the ranks one behind the other, and match their collectives."""
        tables = [trace.comm.select(_COMMUNICATION_COLUMNS) for trace in traces.values()]
        table = pa.concat_tables(tables).combine_chunks()
        rank = np.repeat(np.array(list(traces), np.int64), [each.num_rows for each in tables])
        group = np.concatenate([_labels(trace) for trace in traces.values()])
        op, stop = table["op"].to_numpy(), table["stop"].to_numpy()
        directed = (op == OP["SendRecv"]) & table["sends_to"].is_valid().to_numpy()
        together = np.flatnonzero((group != NULL) & ~directed)
        columns = {"rank": rank, "group": group, "op": op, "stop": stop}
        columns |= {"payload": filled(table["payload_bytes"])}
        columns |= {name: filled(table[name]) for name in ("seq", "root")}
        return cls(
            traces=traces,
            table=table,
            rank=rank,
            group=group,
            op=op,
            stop=stop,
            directed=np.flatnonzero((group != NULL) & directed),
            together=together,
            matches=match(CollectiveCalls.of(columns, together)),
        )

    def ahead(self) -> dict[int, int]:
        """What each clock is ahead of its reference, where that is beyond doubt; else 0."""
        rows = self.together[self.matches.instance != NONE]
        number = self.matches.instance[self.matches.instance != NONE]
        ends = np.isin(self.op[rows], numbers(ENDS_TOGETHER))
        rows, number = rows[ends], number[ends]
        found = clocks.offsets_of(self.rank[rows], self.group[rows], number, self.stop[rows])
        known = {each.rank: each.offset_ns for each in found if each.applies}
        return {rank: known.get(rank, 0) for rank in self.traces}

    def members(
        self, counts: Flags, ahead: Mapping[int, int]
    ) -> Iterator[Sequence[RankCommunication]]:
        """The parts of each collective, of those rows that count: of two ranks or more."""
        matched = self.matches.instance != NONE
        matched &= counts[self.together]
        rows, number = self.together[matched], self.matches.instance[matched]
        several = np.bincount(number, minlength=self.matches.count) > 1
        rows, number = rows[several[number]], number[several[number]]
        found: dict[int, list[RankCommunication]] = defaultdict(list)
        for key, part in zip(number.tolist(), self.parts(rows, ahead), strict=True):
            found[key].append(part)
        yield from found.values()

    def parts(self, rows: Ints, ahead: Mapping[int, int]) -> Iterator[RankCommunication]:
        """What these rows are on their ranks; in order of the rows, which are sorted."""
        first = 0
        for rank, trace in self.traces.items():
            behind = first + trace.comm.num_rows
            own = rows[(rows >= first) & (rows < behind)] - first
            yield from parts(rank, trace, own, ahead[rank])
            first = behind

    def alone(self, counts: Flags) -> int:
        """How many collectives are on one rank alone of several of its group that were read."""
        missing = (self.matches.instance == NONE) & (self.matches.refused == NONE)
        missing &= counts[self.together] & (self.op[self.together] != OP["SendRecv"])
        group, rank = self.group[self.together], self.rank[self.together]
        known = np.unique(np.stack([group, rank]), axis=1)[0]
        several, times = np.unique(known, return_counts=True)
        return int((missing & np.isin(group, several[times > 1])).sum())

    def refused(self, counts: Flags) -> int:
        """How many collectives say another size or root on one rank than on another."""
        refused = self.matches.refused[counts[self.together]]
        return len(np.unique(refused[refused != NONE]))


_COMMUNICATION_COLUMNS = (
    "op",
    "stop",
    "seq",
    "payload_bytes",
    "root",
    "sends_to",
    "receives_from",
)


def _labels(trace: Trace) -> Ints:
    """The label of the group of each row."""
    label = pa.array(clocks.labels(trace.groups, described=True), pa.int64())
    return filled(label.take(trace.comm["group"].combine_chunks()))


def exchanges(
    comm: CommunicationTable, counts: Flags, ahead: Mapping[int, int]
) -> tuple[list[Instance], int]:
    """The exchanges among rows that count; and how many messages lack their other side."""
    row, messages = _messages(comm, ahead)
    matches = match_messages(messages)
    sender, receiver = (row[side] for side in matches.pairs(messages.is_send))
    inside = counts[sender] & counts[receiver]
    paired = matches.instance != NONE
    paired[paired] = inside[matches.instance[paired]]
    sender, receiver = sender[inside], receiver[inside]
    rows = np.unique(np.append(sender, receiver))
    found = list(comm.parts(rows, ahead))
    pairs = np.searchsorted(rows, np.stack([sender, receiver], axis=1)).tolist()
    alone = set(np.flatnonzero(np.isin(rows, row[~paired])).tolist())
    lacking = int((matches.lacking(messages) & counts[row]).sum())
    return [_instance(found, *each, alone) for each in _joined(pairs)], lacking


def _messages(comm: CommunicationTable, ahead: Mapping[int, int]) -> tuple[Ints, Messages]:
    """The messages on clocks that agree, a row a side; and the row of each in `comm`."""
    table = comm.table.take(comm.directed)
    sides = Sides.of(*(table[name].combine_chunks() for name in ("sends_to", "receives_from")))
    row = comm.directed[sides.event]
    seq, payload = (filled(table[name])[sides.event] for name in ("seq", "payload_bytes"))
    return row, Messages(
        rank=comm.rank[row],
        peer=sides.peer,
        is_send=sides.is_send,
        group=comm.group[row],
        seq=seq,
        size=np.where(sides.is_only, payload, NULL),
        stop=comm.stop[row] - clocks.by_rank(comm.rank[row], ahead),
    )


def _joined(
    pairs: Sequence[Sequence[int]],
) -> Iterator[tuple[list[int], list[Sequence[int]]]]:
    """What pairs join, directly or through others: the parts, and the pairs between them."""
    parent: dict[int, int] = {}

    def top(k: int) -> int:
        while parent.setdefault(k, k) != k:
            parent[k] = parent[parent[k]]
            k = parent[k]
        return k

    for sender, receiver in pairs:
        parent[top(sender)] = top(receiver)
    members: dict[int, list[int]] = defaultdict(list)
    for k in sorted(parent):
        members[top(k)].append(k)
    between: dict[int, list[Sequence[int]]] = defaultdict(list)
    for pair in pairs:
        between[top(pair[0])].append(pair)
    for key, found in members.items():
        yield found, between[key]


def _instance(
    parts: Sequence[RankCommunication],
    members: list[int],
    pairs: list[Sequence[int]],
    alone: set[int],
) -> Instance:
    """An exchange: a receive waits for its send, and a send for its receive.

    But a send of so little that it fits a buffer is over before anybody receives: where it
    ended first, it did not wait.
    """
    place = {k: n for n, k in enumerate(members)}
    waits = [{n} for n in range(len(members))]
    for sender, receiver in pairs:
        waits[place[receiver]].add(place[sender])
        if parts[receiver].start <= parts[sender].stop:
            waits[place[sender]].add(place[receiver])
    return Instance(
        members=tuple(parts[k] for k in members),
        waits_for=tuple(tuple(sorted(each)) for each in waits),
        is_whole=alone.isdisjoint(members),
    )


_MESSAGE, _PAIR = "SendRecv", 2


def instances(
    comm: CommunicationTable, inside: Mapping[int, Flags], ahead: Mapping[int, int]
) -> tuple[list[Instance], list[str]]:
    """The instances of several ranks, in order of time; and notes on what is none.

    `inside` says which rows of a rank's `comm` count, `ahead` by how much its clock is.
    """
    counts = np.concatenate([inside[rank] for rank in comm.traces])
    exchanged, lacking = exchanges(comm, counts, ahead)
    together, silent = _together(comm, counts, ahead)
    notes = [
        f"{count} {words}"
        for count, words in (
            (lacking, "messages lack their other side and are not joined"),
            (comm.alone(counts), "collectives are on one rank alone of those that were read"),
            (
                comm.refused(counts),
                "collectives do not match in size or root and are not joined",
            ),
            (silent, "collectives whose root or peers are unknown or not read are not joined"),
        )
        if count
    ]
    joined = [*exchanged, *together]
    return sorted(joined, key=lambda each: min(part.start for part in each.members)), notes


def _together(
    comm: CommunicationTable, counts: Flags, ahead: Mapping[int, int]
) -> tuple[list[Instance], int]:
    """The instances of whole groups; and how many say too little."""
    joined, silent = [], 0
    for members in comm.members(counts, ahead):
        waits = _waits(members)
        if waits is None:
            silent += 1
            continue
        size = members[0].group.size
        joined.append(
            Instance(
                members=tuple(members),
                waits_for=waits,
                is_whole=size is None or len(members) == size,
            )
        )
    return joined, silent


def _waits(members: Sequence[RankCommunication]) -> tuple[tuple[int, ...], ...] | None:
    """For whom each member waits; None where nobody knows."""
    op, everyone = members[0].op, tuple(range(len(members)))
    alone = tuple((n,) for n in everyone)
    if op in ENDS_TOGETHER or (op == _MESSAGE and members[0].group.size == _PAIR):
        return (everyone,) * len(members)
    roots = [n for n in everyone if members[n].rank == _root(members)]
    if op not in FROM_ROOT + TO_ROOT or not roots:
        return None
    root = roots[0]
    if op in FROM_ROOT:
        return tuple((n,) if n == root else tuple(sorted((n, root))) for n in everyone)
    return (*alone[:root], everyone, *alone[root + 1 :])


def _root(members: Sequence[RankCommunication]) -> int | None:
    return next((part.root for part in members if part.root is not None), None)
