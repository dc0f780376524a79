"""Find the critical path of Chakra execution traces: a replay of their dependencies.

An operation starts when what it depends on has ended. A collective ends on every rank the
shortest of its durations after the last rank has started it, since the others waited; a message
is received the shorter of its two durations after both sides have started it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from fastcomm.critical_path.path import RankJoin, collectives
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.rules import CORRECTED, EVENT, PathSource, SavedEvents
from fastcomm.critical_path.window import TimeRange
from fastcomm.errors import FastcommError
from fastcomm.formats.execution_traces import (
    COMPUTE,
    LOAD,
    RECEIVE,
    SEND,
    STORE,
    ChakraNode,
    ChakraTrace,
)
from fastcomm.graph.graph import EDGE_KIND, Graph, acyclic_order, slack
from fastcomm.ranks.instances import Instances, SyncPairs
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.schema import OP
from fastcomm.units import counted, format_ns
from fastcomm_kernels import graph as kernels
from fastcomm_kernels.arrays import NONE, Flags, Ints

_MOST_NS = 1 << 61
_PAIR = 2
_MOST_NAMED = 8  # ranks of a group
_COPIES = (LOAD, STORE)
# Kind of an edge by whether its source and its target are on the device.
_KINDS = {
    (False, False): EDGE_KIND["dependency"],
    (False, True): EDGE_KIND["launch"],
    (True, False): EDGE_KIND["sync"],
    (True, True): EDGE_KIND["kernel_kernel"],
}
_REPLAYED = (
    "times are those of a replay: an operation starts when all that it depends on has ended, "
    "whatever else its thread or stream does"
)


def find_path(
    traces: Sequence[ChakraTrace], groups: Mapping[str, tuple[int, ...]]
) -> CriticalPath:
    """Find the critical path through the execution traces of one or several ranks.

    Parameters
    ----------
    traces
        One trace per rank, by rank.
    groups
        Ranks of each process group by its name; of other groups every rank that calls their
        collectives is a member.

    Raises
    ------
    FastcommError
        If the dependencies have a cycle, or the durations are too long for 64 bits of ns.

    """
    whole = _ExecutionGraph(traces, groups)
    if len(traces) == 1 or whole.matches:
        return whole.path()
    first = _ExecutionGraph(traces[:1], groups)
    first.notes.insert(
        0,
        f"this is the path of rank {traces[0].rank} alone: ranks cannot be joined (no two of "
        "them have communication of one group)",
    )
    return first.path()


@dataclass(frozen=True, slots=True)
class _Match:
    """A collective or a message, with its operations of all ranks."""

    rows: list[int]  # of the operations; of a message the send, then the receive
    expected: int  # number of operations if no rank is missing
    transfer: int  # from the last start to the ends, ns


@dataclass(slots=True)
class _EdgeColumns:
    """Edges of the graph, to append to."""

    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    weight: list[int] = field(default_factory=list)  # ns
    owner: list[int] = field(default_factory=list)

    def add(self, source: int, target: int, kind: int, weight: int, owner: int = NONE) -> None:
        self.source.append(source)
        self.target.append(target)
        self.kind.append(kind)
        self.weight.append(weight)
        self.owner.append(owner)


class _ExecutionGraph:
    """Builds the graph: operation k starts at node 2k and ends at 2k + 1; then all matches."""

    def __init__(
        self, traces: Sequence[ChakraTrace], groups: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.traces, self.groups = traces, groups
        self.operations: list[ChakraNode] = [node for one in traces for node in one.nodes]
        self.rank = np.repeat(
            np.array([one.rank for one in traces]), [len(one.nodes) for one in traces]
        )
        self.notes: list[str] = [_REPLAYED]
        if sum(node.start + node.duration for node in self.operations) > _MOST_NS:
            raise FastcommError(f"{traces[0].path}: durations are too long for 64 bits of ns")

    def path(self) -> CriticalPath:
        """Return the path."""
        columns, order, time = self._replayed()
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        time = time[order]
        event, is_end = self._nodes
        graph = Graph.measured(
            (event[order].astype(np.int32), time, is_end[order]),
            (place[columns.source], place[columns.target]),
            np.array(columns.kind, np.int8),
            np.array(columns.owner, np.int64),
        )
        on_device = ~np.array([node.is_host for node in self.operations])[graph.event]
        join = (
            self._join(graph, on_device, place, time[place]) if len(self.traces) > 1 else None
        )
        about = PathSource(
            rules=CORRECTED,
            window=TimeRange(start=0, stop=int(time[-1])),
            path=str(self.traces[0].path),
            rank=self.traces[0].rank,
            clipped=len(self.operations),
            notes=tuple(self._all_notes(int(time[-1]))),
            is_host_run=any(trace.is_host_run for trace in self.traces),
            is_replay=True,
        )
        return CriticalPath.search(graph, self._events(time[place]), about, on_device, join)

    @cached_property
    def _nodes(self) -> tuple[Ints, Flags]:
        """Event of each node, and whether it is its end; of a match, its last to start."""
        count = len(self.operations)
        matches = np.array([match.rows[0] for match in self.matches], np.int64)
        event = np.append(np.repeat(np.arange(count), 2), matches)
        is_end = np.append(np.tile([False, True], count), np.zeros(len(matches), np.bool_))
        return event, is_end

    def _replayed(self) -> tuple[_EdgeColumns, Ints, Ints]:
        """Return the edges, the nodes in order of time, and the time of each node in ns."""
        columns = self._edges()
        event, _ = self._nodes
        nodes = len(event)
        has_source = np.zeros(nodes, np.bool_)
        has_source[columns.target] = True
        roots = np.flatnonzero(~has_source)
        start = np.array([node.start for node in self.operations])
        begin = start[event[roots]]
        for node, at in zip(
            roots.tolist(), (begin - begin.min(initial=_MOST_NS)).tolist(), strict=True
        ):
            if node != roots[0]:
                columns.add(int(roots[0]), node, EDGE_KIND["unexplained"], at)
        source, target = np.array(columns.source), np.array(columns.target)
        names = [self.operations[k].name for k in event.tolist()]
        try:
            topological = acyclic_order(source, target, names).astype(np.int64)
        except FastcommError as error:
            raise FastcommError(f"{self.traces[0].path}: {error}") from error
        place = np.empty(nodes, np.int64)
        place[topological] = np.arange(nodes)
        rows = np.argsort(place[target], kind="stable")
        first = np.searchsorted(place[target][rows], np.arange(nodes + 1)).astype(np.int32)
        weight = np.array(columns.weight, np.int64)[rows]
        reached, _ = kernels.replay(first, place[source][rows].astype(np.int32), weight, 0)
        time = reached[place]
        return columns, np.lexsort((place, time)), time

    def _edges(self) -> _EdgeColumns:
        """Return all edges but those to nodes that wait for nothing."""
        columns, begin = _EdgeColumns(), 0
        missing = 0
        match_of = {
            row: number
            for number, match in enumerate(self.matches)
            for row in (match.rows[1:] if self._is_message(match) else match.rows)
        }
        for trace in self.traces:
            row_of = {node.id: begin + k for k, node in enumerate(trace.nodes)}
            for row, node in enumerate(trace.nodes, begin):
                before = [row_of[id_] for id_ in node.before if id_ in row_of]
                missing += len(node.before) - len(before)
                self._add_operation(columns, row, before, match_of.get(row))
                for id_ in node.begun:
                    columns.add(2 * row_of[id_], 2 * row, EDGE_KIND["launch"], 0)
            begin += len(trace.nodes)
        for number, match in enumerate(self.matches, 2 * len(self.operations)):
            for row in match.rows:
                columns.add(2 * row, number, EDGE_KIND["join"], 0)
        if missing:
            self.notes.append(
                f"ignored: dependencies on operations not in the file ({missing})"
            )
        if any(node.callers for node in self.operations):
            self.notes.append("ignored: control dependencies, which name the caller")
        return columns

    def _add_operation(
        self, columns: _EdgeColumns, row: int, before: Sequence[int], match: int | None
    ) -> None:
        """Add the edges to the start and to the end of an operation."""
        node = self.operations[row]
        ends = [self.operations[k].start + self.operations[k].duration for k in before]
        # What no dependency explains is kept as a delay.
        delay = max(0, node.start - max(ends, default=node.start))
        for other in before:
            kind = _KINDS[not self.operations[other].is_host, not node.is_host]
            columns.add(2 * other + 1, 2 * row, kind, delay)
        source, weight = 2 * row, node.duration
        if match is not None:
            source = 2 * len(self.operations) + match
            weight = self.matches[match].transfer
        columns.add(source, 2 * row + 1, EDGE_KIND["operator"], weight, row)

    def _is_message(self, match: _Match) -> bool:
        return self.operations[match.rows[0]].kind == SEND

    @cached_property
    def matches(self) -> list[_Match]:
        """Collectives and messages of which two operations or more are known."""
        calls: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for row, (node, rank) in enumerate(
            zip(self.operations, self.rank.tolist(), strict=True)
        ):
            if (key := _key(node, rank)) is not None and self._is_member(node.group, rank):
                side = rank if node.kind not in (SEND, RECEIVE) else node.kind
                calls[key][side].append(row)
        matches, different = [], 0
        for key, by_side in calls.items():
            # Ids count the calls of a rank.
            sides = [
                sorted(by_side[side], key=lambda row: self.operations[row].id)
                for side in sorted(by_side)
            ]
            expected = self._expected(key)
            for k in range(max(map(len, sides))):
                rows = [side[k] for side in sides if k < len(side)]
                if len({self.operations[row].op for row in rows}) > 1:
                    different += 1
                elif len(rows) >= _PAIR:
                    transfer = min(self.operations[row].duration for row in rows)
                    matches.append(_Match(rows, expected, transfer))
        if different:
            self.notes.append(
                f"{counted(different, 'collective')} not joined: ranks call different ones"
            )
        return matches

    def _label(self, group: str) -> str:
        """Return the name of a group with its ranks, if there are few."""
        ranks = self.groups.get(group, ())
        shown = f": ranks {', '.join(map(str, ranks))}" if 0 < len(ranks) <= _MOST_NAMED else ""
        return f"{group}{shown}"

    def _is_member(self, group: str, rank: int) -> bool:
        return group not in self.groups or rank in self.groups[group]

    def _expected(self, key: Any) -> int:
        """Return how many operations a match has if no rank is missing."""
        if key[0] == "message":
            return _PAIR
        return len(self.groups.get(key[1], self.traces))

    def _events(self, time: Ints) -> SavedEvents:
        """Return the descriptions of all operations; `time` is that of each node in ns."""
        count = len(self.operations)
        is_device = [not node.is_host for node in self.operations]
        columns: dict[str, Any] = {
            "id": [node.id for node in self.operations],
            "name": [node.name for node in self.operations],
            "kind": [_kind_of(node) for node in self.operations],
            "process": [f"rank {rank}" for rank in self.rank.tolist()],
            "thread": [str(node.thread) for node in self.operations],
            "stream": [None if node.is_host else node.thread for node in self.operations],
            "start": time[: 2 * count : 2],
            "stop": time[1 : 2 * count : 2],
            "is_device": is_device,
            "op": [node.op for node in self.operations],
            "tag": [None] * count,
            "bus_bytes": [None] * count,
        }
        return SavedEvents(pa.table(columns, EVENT))

    def _all_notes(self, span: int) -> list[str]:
        """Return all notes; `span` is the length of the path in ns."""
        busy = Counter[int]()
        for node, rank in zip(self.operations, self.rank.tolist(), strict=True):
            busy[rank] += node.duration if node.kind == COMPUTE and not node.is_host else 0
        rank, most = busy.most_common(1)[0]
        if most > span:
            self.notes.append(
                f"device compute of rank {rank} adds up to {format_ns(most)}, more than the "
                "path: no dependency keeps it in one order, as a stream would"
            )
        without = Counter(
            "communication" if node.op else "others"
            for node in self.operations
            if node.kind > 1 and not node.duration
        )
        if without:
            kinds = ", ".join(f"{count} of {name}" for name, count in sorted(without.items()))
            self.notes.append(f"operations whose recorded duration is 0: {kinds}")
        return self.notes

    def _join(self, graph: Graph, on_device: Flags, place: Ints, time: Ints) -> RankJoin:
        """Return what is known of each rank, and of the matches.

        `place` is the position of each node in the graph, `time` its time in ns.
        """
        ranks = tuple(trace.rank for trace in self.traces)
        slack_ns = slack(graph, on_device)
        matches = self.matches
        firsts = np.argsort([time[2 * match.rows[0]] for match in matches], kind="stable")
        ordered = [matches[k] for k in firsts.tolist()]
        rows = np.array([row for match in ordered for row in match.rows], np.int64)
        number = np.repeat(np.arange(len(ordered)), [len(one.rows) for one in ordered])
        is_send = np.array([self.operations[row].kind == SEND for row in rows.tolist()], bool)
        parts = np.arange(len(rows))
        joined = Instances(
            instance=number,
            rank=self.rank[rows],
            row=rows,
            op=np.array([OP[self.operations[row].op or ""] for row in rows.tolist()], np.int8),
            tag=np.full(len(rows), TAG["OTHER"], np.int8),
            group=tuple(self._label(self.operations[row].group) for row in rows.tolist()),
            start=time[2 * rows],
            stop=time[2 * rows + 1],
            is_whole=np.array([len(one.rows) == one.expected for one in ordered], np.bool_),
            needed=SyncPairs(parts, number),
            waiting=SyncPairs(parts[~is_send], number[~is_send]),
        )
        partial = int((~joined.is_whole).sum())
        if partial:
            self.notes.append(f"{counted(partial, 'collective')} without all ranks")
        return RankJoin(
            ranks=ranks,
            rank_of=np.searchsorted(np.array(ranks), self.rank[graph.event]).astype(np.int32),
            slack=slack_ns,
            offsets=dict.fromkeys(ranks, 0),
            collectives=collectives(joined, slack_ns[place[2 * rows]]),
            violations=0,
            expected_ranks=len(ranks),
        )


def _key(node: ChakraNode, rank: int) -> tuple[Any, ...] | None:
    """Return what equal collectives or messages of all ranks have in common, or None."""
    if node.op is None or node.is_host:
        return None
    if node.kind == SEND:
        source = rank if node.source is None else node.source
        return None if node.target is None else ("message", source, node.target, node.tag)
    if node.kind == RECEIVE:
        target = rank if node.target is None else node.target
        return None if node.source is None else ("message", node.source, target, node.tag)
    return ("collective", node.group)


def _kind_of(node: ChakraNode) -> str:
    if node.kind in _COPIES:
        return "memcpy"
    return "cpu_op" if node.is_host else "kernel"
