"""The critical path of a window: of one rank, or through several that collectives join.

Where all participants of an instance have arrived is a node of its own: every start leads to
it, and it leads to every end. The path so goes from an end to the last rank that arrived.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fastcomm.critical_path import CriticalPath, PathSource, corrected
from fastcomm.critical_path.across import RankJoin, collectives
from fastcomm.critical_path.rules import CORRECTED, EVENT, EventDescriptions, TraceEvents
from fastcomm.critical_path.window import TimeRange, errors_of, find
from fastcomm.errors import FastcommError
from fastcomm.exchange.arrivals import Instances
from fastcomm.exchange.instances import RunCommunication
from fastcomm.graph import EDGE_KIND, Graph, slack
from fastcomm.options import Window
from fastcomm.trace.run import expected_ranks, named_ranks
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm.units import counted
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import Ints
from fastcomm_kernels.graph import NONE, Numbers


def source_notes(trace: Trace) -> list[str]:
    """Return what a user should know of a trace before trusting its path."""
    kind = trace.events["kind"].to_numpy()
    if not np.isin(kind, [KIND[name] for name in ("kernel", "memcpy", "memset")]).any():
        return ["no device work: the path is that of the host"]
    if not (kind == KIND["sync"]).any():
        return [
            "no cuda_sync events (enable_cuda_sync_events in the profiler's experimental "
            "options): what waits for the device is guessed"
        ]
    return []


def analyse(trace: Trace, window: Window | None = None) -> CriticalPath:
    """Find the critical path of a window of one rank, by default of the second step.

    Raises `WindowError` where the trace has no such window.
    """
    window = window or Window()
    with errors_of(trace.meta.path):
        time_range = find(trace, window)
    built = corrected.build(trace, time_range, window.data_load_events)
    graph = built.graph
    notes = [
        f"{counted(count, 'constraint')} of kind {kind} left out, against the measured times"
        for kind, count in built.left_out.items()
    ]
    if len(graph.time):
        time_range = TimeRange(
            start=max(time_range.start, int(graph.time[0])),
            stop=min(time_range.stop, int(graph.time[-1])),
        )
    about = PathSource(
        rules=CORRECTED,
        window=time_range,
        path=trace.meta.path,
        rank=trace.meta.rank,
        base=trace.meta.base,
        clipped=len(graph.event) // 2,
        data_load=window.data_load_events,
        notes=(*notes, *source_notes(trace)),
    )
    return CriticalPath.search(graph, TraceEvents(trace), about, built.on_device)


@dataclass(frozen=True, slots=True)
class RunEvents:
    """The events of several ranks; a row is the rank's row behind those of the ranks before."""

    first: Ints  # row of each rank's first event, and one behind the last
    events: tuple[EventDescriptions, ...]

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Columns of `EVENT` of the events of these rows; row -1 is all null."""
        parts, places = [], []
        for k, events in enumerate(self.events):
            chosen = np.flatnonzero((rows >= self.first[k]) & (rows < self.first[k + 1]))
            parts.append(
                events.describe((rows[chosen] - self.first[k]).astype(np.int32), columns)
            )
            places.append(chosen)
        nothing = np.flatnonzero(rows < 0)
        empty = pa.table(
            {name: pa.nulls(len(nothing), EVENT.field(name).type) for name in columns}
        )
        order = np.argsort(np.concatenate([*places, nothing]), kind="stable")
        return pa.concat_tables([*parts, empty]).combine_chunks().take(order)

    def ids(self, rows: Numbers) -> Ints:
        """The ids of these rows: unique on one rank alone."""
        found = np.empty(len(rows), np.int64)
        for k, events in enumerate(self.events):
            chosen = (rows >= self.first[k]) & (rows < self.first[k + 1])
            found[chosen] = events.ids((rows[chosen] - self.first[k]).astype(np.int32))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinPoints:
    """Where some have come that others wait for: a node each, as columns of pairs."""

    starts: Numbers  # (node of a start, meeting)
    ends: Numbers  # (node of an end, meeting)
    arrived: Ints  # when the last had come
    owner: Ints  # row of the last to come


class _Joiner:
    """The graphs of all ranks on their way into one."""

    def __init__(
        self,
        found: Mapping[int, CriticalPath],
        same: Instances,
        ahead: dict[int, int],
    ) -> None:
        self.found, self.same, self.ahead = found, same, ahead
        self.index = {rank: k for k, rank in enumerate(found)}
        graphs_ = [each.graph for each in found.values()]
        self.nodes = np.cumsum([0, *(len(graph.event) for graph in graphs_)])
        largest = [int(graph.event.max(initial=-1)) + 1 for graph in graphs_]
        self.rows = np.cumsum([0, *largest])
        self.place = [graph.places for graph in graphs_]
        self.violations = 0

    def path(self, notes: Sequence[str], expected: int) -> CriticalPath:
        """Return the path through the one graph."""
        met = self._meetings()
        time, event, is_end, rank_of, on_device = self._node_columns(met)
        order = np.argsort(time, kind="stable")
        new = np.empty(len(order), np.int32)
        new[order] = np.arange(len(order), dtype=np.int32)
        graph = self._graph((event[order], time[order], is_end[order]), new, met)
        on_device = on_device[order]
        room = slack(graph, on_device)
        across = RankJoin(
            ranks=tuple(self.found),
            rank_of=rank_of[order],
            slack=room,
            offsets=self.ahead,
            collectives=collectives(self.same, room[new[self._nodes(0)]]),
            violations=self.violations,
            expected_ranks=expected,
        )
        about = self._about(graph, notes)
        return CriticalPath.search(graph, self._events(), about, on_device, across)

    def _nodes(self, side: int) -> Ints:
        """Return the node of each part's start (0) or end (1), before all are put in order."""
        nodes = np.empty(len(self.same), np.int64)
        for rank, k in self.index.items():
            own = self.same.rank == rank
            nodes[own] = self.nodes[k] + self.place[k][side][self.same.row[own]]
        return nodes

    def _events(self) -> RunEvents:
        return RunEvents(self.rows, tuple(each.events for each in self.found.values()))

    def _about(self, graph: Graph, more: Sequence[str]) -> PathSource:
        first = next(iter(self.found.values())).about
        partial = int((~self.same.is_whole).sum())
        notes = {*more, *(note for each in self.found.values() for note in each.about.notes)}
        if partial:
            count = len(self.same.is_whole)
            notes.add(f"{partial} of {count} collectives lack ranks: the path is partial")
        if self.violations:
            notes.add(f"{self.violations} ends are before the last arrival, clocks aligned")
        window = TimeRange(start=int(graph.time[0]), stop=int(graph.time[-1]))
        clipped = sum(each.about.clipped for each in self.found.values())
        return PathSource(
            rules=CORRECTED,
            window=window,
            path=first.path,
            rank=first.rank,
            clipped=clipped,
            data_load=first.data_load,
            notes=tuple(sorted(notes)),
        )

    def _meetings(self) -> _JoinPoints:
        """Where all have come that somebody waits for; an end before is a violation."""
        same = self.same
        arrived, last = same.arrived, same.last
        held = same.stop[same.waiting.part] >= arrived[same.waiting.meeting]
        self.violations = int((~held).sum())
        ends = same.waiting.part[held], same.waiting.meeting[held]
        kept = np.unique(ends[1])
        number = np.full(len(arrived), NONE)
        number[kept] = np.arange(len(kept))
        came = number[same.needed.meeting] != NONE
        starts = same.needed.part[came], same.needed.meeting[came]
        owner = last[kept]
        rank = np.array([self.index[each] for each in same.rank[owner].tolist()], np.int64)
        first, second = (
            np.stack([self._nodes(side)[part], number[meeting]], axis=1).astype(np.int32)
            for side, (part, meeting) in enumerate((starts, ends))
        )
        return _JoinPoints(
            starts=first,
            ends=second,
            arrived=arrived[kept],
            owner=self.rows[rank] + same.row[owner],
        )

    def _node_columns(
        self, meetings: _JoinPoints
    ) -> tuple[Ints, Numbers, np.ndarray, Numbers, np.ndarray]:
        """The columns of all nodes, rank behind rank, and then where all have arrived."""
        found = list(self.found.values())
        times = [each.graph.time - self.ahead[rank] for rank, each in self.found.items()]
        events = [each.graph.event + self.rows[k] for k, each in enumerate(found)]
        ranks = [np.full(len(each.graph.event), k) for k, each in enumerate(found)]
        joins, owner = len(meetings.arrived), meetings.owner
        rank_of = np.searchsorted(self.rows, owner, side="right") - 1
        return (
            np.concatenate([*times, meetings.arrived]),
            np.concatenate([*events, owner]).astype(np.int32),
            np.concatenate([*(each.graph.is_end for each in found), np.zeros(joins, np.bool_)]),
            np.concatenate([*ranks, rank_of]).astype(np.int32),
            np.concatenate([*(each.on_device for each in found), np.ones(joins, np.bool_)]),
        )

    def _graph(
        self,
        nodes: tuple[Numbers, Ints, np.ndarray],
        new: Numbers,
        meetings: _JoinPoints,
    ) -> Graph:
        """All edges between all nodes, in order of their targets."""
        starts, ends = meetings.starts, meetings.ends
        joins = int(self.nodes[-1])
        sources, targets, kinds, owners = [], [], [], []
        for k, each in enumerate(self.found.values()):
            graph = each.graph
            sources.append(graph.source + self.nodes[k])
            targets.append(graph.target + self.nodes[k])
            kinds.append(graph.kind)
            owners.append(np.where(graph.owner == NONE, NONE, graph.owner + self.rows[k]))
        source, target = np.concatenate(sources), np.concatenate(targets)
        # What ends an instance is bound by its arrivals, no more by its own start.
        own = np.searchsorted(target, ends[:, 0])
        source[own] = joins + ends[:, 1]
        alone = self.nodes[1:-1][np.diff(self.nodes)[1:] > 0]
        alone = np.append(self.nodes[:1], alone)
        alone = alone[new[alone] > 0]
        # Nobody knows what a rank's first event waits for: all that is known is its time.
        begin = np.zeros(len(alone), np.int32)
        source = np.concatenate([new[np.concatenate([source, starts[:, 0]])], begin])
        target = new[np.concatenate([target, joins + starts[:, 1], alone])]
        more = [
            np.full(len(starts), EDGE_KIND["join"], np.int8),
            np.full(len(alone), EDGE_KIND["unexplained"], np.int8),
        ]
        kind = np.concatenate([*kinds, *more])
        none = np.full(len(starts) + len(alone), NONE)
        owner = np.concatenate([*owners, none]).astype(np.int32)
        _, order = graphs.index(target, len(new))
        source, target = source[order], target[order]
        time = nodes[1]
        return Graph(
            event=nodes[0],
            time=time,
            is_end=nodes[2],
            source=source,
            target=target,
            kind=kind[order],
            weight=time[target] - time[source],
            owner=owner[order],
        )


class JoinError(FastcommError):
    """No one path goes through all of the ranks."""


def joined(
    traces: Mapping[int, Trace],
    window: Window | None = None,
    found: Mapping[int, CriticalPath] | None = None,
) -> CriticalPath:
    """Return the critical path of a window through several ranks.

    `found` are the paths of the ranks, where these are known. The number of expected ranks is
    the largest world size that a trace says. Raises `JoinError` where no communication is the
    same on two ranks.
    """
    found = found or {rank: analyse(trace, window) for rank, trace in traces.items()}
    inside = {
        rank: np.isin(traces[rank].comm["event"].to_numpy(), each.graph.event)
        for rank, each in found.items()
    }
    comm = RunCommunication.of(traces)
    ahead = comm.ahead()
    same, notes = comm.instances(inside, ahead)
    if not len(same):
        raise JoinError(
            f"{named_ranks(list(traces))}: no communication of one group is on two of these "
            "ranks; wanted process groups on the events"
        )
    sizes = [trace.meta.world_size for trace in traces.values()]
    world = max((size for size in sizes if size is not None), default=None)
    return _Joiner(found, same, ahead).path(notes, expected_ranks(tuple(found), world))
