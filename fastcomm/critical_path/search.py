"""Find the critical path of a window, of one rank or through several ranks.

Ranks are joined at collectives and messages: the arrival of all participants is a node of its
own, with an edge from every start and to every end. From an end, the path thus continues on
the rank that arrived last.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from fastcomm.checks import shortened
from fastcomm.critical_path import rules
from fastcomm.critical_path.path import RankJoin, collectives
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.rules import (
    CORRECTED,
    EVENT,
    EventDescriptions,
    PathSource,
    TraceEvents,
)
from fastcomm.critical_path.window import errors_of, find
from fastcomm.errors import FastcommError
from fastcomm.graph.graph import EDGE_KIND, Graph, slack
from fastcomm.options import Window
from fastcomm.ranks.instances import Instances, RunCommunication
from fastcomm.trace.events import EventRows
from fastcomm.trace.run_traces import expected_ranks, named_ranks
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm.units import counted
from fastcomm_kernels.arrays import NONE, Ints, Numbers

_IGNORED = {
    "launch": "work starts after its launch",
    "kernel_kernel": "work of a stream runs one after the other",
    "sync": "a wait ends after the work that it waits for",
    "inferred": "a call that seems to wait for the device ends after the work",
}


def source_notes(trace: Trace) -> list[str]:
    """Return notes on what a trace lacks, which makes its path less reliable."""
    kind = trace.events["kind"].to_numpy()
    if not np.isin(kind, [KIND[name] for name in ("kernel", "memcpy", "memset")]).any():
        return ["no device work: the path is that of the host"]
    if trace.meta.is_host_run:
        return [
            "waits of threads for collectives are not recorded: a thread without an operator "
            "until a collective ends is assumed to wait for it"
        ]
    if not (kind == KIND["sync"]).any():
        return [
            "no cuda_sync events (enable_cuda_sync_events in the profiler's experimental "
            "options): waits for the device are guessed"
        ]
    return []


def _without_match(trace: Trace, data_load: Sequence[str]) -> list[str]:
    """Return notes on regular expressions of data loading that no name of a trace matches."""
    events = EventRows.whole(trace) if data_load else None
    return [
        f"a rank has no event whose name matches {shortened(regex)!r}, to load data"
        for regex in data_load
        if events is not None and not events.matching(regex).any()
    ]


def analyze(trace: Trace, window: Window | None = None) -> CriticalPath:
    """Find the critical path of a window of one rank by the corrected rules.

    Parameters
    ----------
    trace
        The rank, with all events.
    window
        By default the second step.

    Raises
    ------
    WindowError
        If the trace has no such window.

    """
    window = window or Window()
    with errors_of(trace.meta.path):
        time_range = find(trace, window)
    built = rules.build(trace, time_range, window.data_load_events)
    graph = built.graph
    notes = [
        f"{counted(count, 'constraint')} ignored, which the measured times contradict: "
        f"{_IGNORED.get(kind, kind)}"
        for kind, count in built.left_out.items()
    ]
    if len(graph.time):
        time_range = replace(
            time_range,
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
        rest=built.rest,
        data_load=window.data_load_events,
        notes=(*notes, *source_notes(trace), *_without_match(trace, window.data_load_events)),
        is_host_run=trace.meta.is_host_run,
    )
    return CriticalPath.search(graph, TraceEvents(trace), about, built.on_device)


@dataclass(frozen=True, slots=True)
class RunEvents:
    """The events of several ranks, numbered one rank after the other."""

    first: Ints  # row of each rank's first event, and the end
    events: tuple[EventDescriptions, ...]

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Return columns of `EVENT` of the events of these rows; row NONE is all null.

        `rows` count the events of all ranks, rank after rank.
        """
        parts, places = [], []
        for k, events in enumerate(self.events):
            own = np.flatnonzero((rows >= self.first[k]) & (rows < self.first[k + 1]))
            parts.append(events.describe((rows[own] - self.first[k]).astype(np.int32), columns))
            places.append(own)
        missing = np.flatnonzero(rows < 0)
        empty = pa.table(
            {name: pa.nulls(len(missing), EVENT.field(name).type) for name in columns}
        )
        order = np.argsort(np.concatenate([*places, missing]), kind="stable")
        return pa.concat_tables([*parts, empty]).combine_chunks().take(order)

    def ids(self, rows: Numbers) -> Ints:
        """Return the ids of the events of these rows, which are unique within a rank.

        `rows` count the events of all ranks, rank after rank.
        """
        ids = np.empty(len(rows), np.int64)
        for k, events in enumerate(self.events):
            own = (rows >= self.first[k]) & (rows < self.first[k + 1])
            ids[own] = events.ids((rows[own] - self.first[k]).astype(np.int32))
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinPoints:
    """Nodes at which all participants have arrived that others wait for, and their edges."""

    starts: Numbers  # (node of a start, join point), edges x 2
    ends: Numbers  # (node of an end, join point), edges x 2
    # one value per join point
    arrived: Ints  # last arrival, ns
    owner: Ints  # row of the event that arrived last


class _Joiner:
    """Joins the graphs of all ranks into one."""

    def __init__(
        self,
        paths: Mapping[int, CriticalPath],
        instances: Instances,
        ahead: dict[int, int],
    ) -> None:
        """Number nodes and events of all ranks; `ahead`: how far each clock is ahead, ns."""
        self.paths, self.instances, self.ahead = paths, instances, ahead
        self.index = {rank: k for k, rank in enumerate(paths)}
        graphs_ = [path.graph for path in paths.values()]
        self.nodes = np.cumsum([0, *(len(graph.event) for graph in graphs_)])
        largest = [int(graph.event.max(initial=-1)) + 1 for graph in graphs_]
        self.rows = np.cumsum([0, *largest])
        self.place = [graph.places for graph in graphs_]
        self.violations = 0

    def path(self, notes: Sequence[str], expected: int) -> CriticalPath:
        """Return the path through the joined graph.

        `notes` are shown with those of all ranks; `expected` is the number of ranks of the run,
        also of ranks that were not read.
        """
        points = self._join_points()
        time, event, is_end, rank_of, on_device = self._node_columns(points)
        rests = self._rests(time)
        order = np.argsort(time, kind="stable")
        new = np.empty(len(order), np.int32)
        new[order] = np.arange(len(order), dtype=np.int32)
        graph = self._graph((event[order], time[order], is_end[order]), new, points, rests)
        on_device = on_device[order]
        slack_ns = slack(graph, on_device)
        join = RankJoin(
            ranks=tuple(self.paths),
            rank_of=rank_of[order],
            slack=slack_ns,
            offsets=self.ahead,
            collectives=collectives(self.instances, slack_ns[new[self._nodes(0)]]),
            violations=self.violations,
            expected_ranks=expected,
        )
        about = self._about(graph, notes)
        return CriticalPath.search(graph, self._events(), about, on_device, join)

    def _nodes(self, side: int) -> Ints:
        """Return the node of each participant's start (0) or end (1), numbered by rank."""
        nodes = np.empty(len(self.instances), np.int64)
        for rank, k in self.index.items():
            own = self.instances.rank == rank
            nodes[own] = self.nodes[k] + self.place[k][side][self.instances.row[own]]
        return nodes

    def _events(self) -> RunEvents:
        return RunEvents(self.rows, tuple(path.events for path in self.paths.values()))

    def _about(self, graph: Graph, more: Sequence[str]) -> PathSource:
        """Describe the joined path; its notes are those of all ranks, and `more`."""
        first = next(iter(self.paths.values())).about
        partial = int((~self.instances.is_whole).sum())
        notes = {*more, *(note for path in self.paths.values() for note in path.about.notes)}
        if partial:
            count = len(self.instances.is_whole)
            notes.add(f"{partial} of {count} collectives lack ranks: the path is partial")
        if self.violations:
            notes.add(
                f"{self.violations} collective events end before the last arrival, although "
                "clocks are aligned"
            )
        window = replace(first.window, start=int(graph.time[0]), stop=int(graph.time[-1]))
        clipped = sum(path.about.clipped for path in self.paths.values())
        return replace(
            first, window=window, base=0, clipped=clipped, notes=tuple(sorted(notes))
        )

    def _join_points(self) -> _JoinPoints:
        """Return the join points; ends before the last arrival are violations, and ignored."""
        instances = self.instances
        arrived, last = instances.arrived, instances.last
        waiting, needed = instances.waiting, instances.needed
        is_valid = instances.stop[waiting.part] >= arrived[waiting.sync_point]
        self.violations = int((~is_valid).sum())
        ends = waiting.part[is_valid], waiting.sync_point[is_valid]
        used = np.unique(ends[1])
        number = np.full(len(arrived), NONE)
        number[used] = np.arange(len(used))
        is_used = number[needed.sync_point] != NONE
        starts = needed.part[is_used], needed.sync_point[is_used]
        owner = last[used]
        ranks = instances.rank[owner].tolist()
        rank = np.array([self.index[number] for number in ranks], np.int64)
        first, second = (
            np.stack([self._nodes(side)[part], number[sync_point]], axis=1).astype(np.int32)
            for side, (part, sync_point) in enumerate((starts, ends))
        )
        return _JoinPoints(
            starts=first,
            ends=second,
            arrived=arrived[used],
            owner=self.rows[rank] + instances.row[owner],
        )

    def _node_columns(
        self, points: _JoinPoints
    ) -> tuple[Ints, Numbers, np.ndarray, Numbers, np.ndarray]:
        """Return time, event, is_end, rank and on_device of all nodes, join points last."""
        paths = list(self.paths.values())
        times = [path.graph.time - self.ahead[rank] for rank, path in self.paths.items()]
        events = [path.graph.event + self.rows[k] for k, path in enumerate(paths)]
        ranks = [np.full(len(path.graph.event), k) for k, path in enumerate(paths)]
        is_end = [path.graph.is_end for path in paths]
        joins, owner = len(points.arrived), points.owner
        rank_of = np.searchsorted(self.rows, owner, side="right") - 1
        return (
            np.concatenate([*times, points.arrived]),
            np.concatenate([*events, owner]).astype(np.int32),
            np.concatenate([*is_end, np.zeros(joins, np.bool_)]),
            np.concatenate([*ranks, rank_of]).astype(np.int32),
            np.concatenate([*(path.on_device for path in paths), np.ones(joins, np.bool_)]),
        )

    def _graph(
        self,
        nodes: tuple[Numbers, Ints, np.ndarray],
        new: Numbers,
        points: _JoinPoints,
        rests: tuple[int, Ints],
    ) -> Graph:
        """Build the joined graph, with edges by target.

        `nodes` are event, time and is_end in the new order; `new` is the new number of a node.
        `rests` are from `_rests`.
        """
        starts, ends = points.starts, points.ends
        joins = int(self.nodes[-1])
        source, target, kind, owner = self._edges()
        # The end of a collective waits for the last arrival instead of its own start.
        own = np.searchsorted(target, ends[:, 0])
        source[own] = joins + ends[:, 1]
        last, marks = rests
        source[np.isin(target, marks) & (kind == EDGE_KIND["dependency"])] = last
        begins = self._first_nodes(new)
        # What the first event of a rank waits for is unknown: it waits for the first node.
        origin = np.zeros(len(begins), np.int32)
        source = np.concatenate([new[np.concatenate([source, starts[:, 0]])], origin])
        target = new[np.concatenate([target, joins + starts[:, 1], begins])]
        added = np.repeat(
            np.array([EDGE_KIND["join"], EDGE_KIND["unexplained"]], np.int8),
            [len(starts), len(begins)],
        )
        owner = np.append(owner, np.full(len(added), NONE))
        return Graph.measured(nodes, (source, target), np.append(kind, added), owner)

    def _rests(self, time: Ints) -> tuple[int, Ints]:
        """Return the last event's node of all ranks, and the ends of steps that wait for it.

        `time` is by node. After its last event a rank may wait for the others, unrecorded: the
        marks that end after all events end together.
        """
        rests = np.array(
            [
                path.about.rest + first
                for path, first in zip(self.paths.values(), self.nodes[:-1], strict=True)
                if path.about.rest is not None
            ],
            np.int64,
        )
        is_event = np.ones(len(time), np.bool_)
        is_event[rests] = False
        last = int(np.argmax(np.where(is_event, time, np.iinfo(np.int64).min)))
        return last, rests[time[rests] > time[last]]

    def _edges(self) -> tuple[Ints, Ints, Numbers, Ints]:
        """Return source, target, kind and owner of the edges of all ranks."""
        sources, targets, kinds, owners = [], [], [], []
        for k, path in enumerate(self.paths.values()):
            graph = path.graph
            sources.append(graph.source + self.nodes[k])
            targets.append(graph.target + self.nodes[k])
            kinds.append(graph.kind)
            owners.append(np.where(graph.owner == NONE, NONE, graph.owner + self.rows[k]))
        source, target, kind, owner = map(np.concatenate, (sources, targets, kinds, owners))
        return source, target, kind, owner

    def _first_nodes(self, new: Numbers) -> Ints:
        """Return the first node of each rank, without that of the whole graph."""
        later = self.nodes[1:-1][np.diff(self.nodes)[1:] > 0]
        begins: Ints = np.append(self.nodes[:1], later)
        return begins[new[begins] > 0]


class JoinError(FastcommError):
    """The ranks cannot be joined, because they have no communication in common."""


def joined(
    traces: Mapping[int, Trace],
    window: Window | None = None,
    paths: Mapping[int, CriticalPath] | None = None,
    expected: int | None = None,
) -> CriticalPath:
    """Find the critical path of a window through several ranks.

    Parameters
    ----------
    traces
        The ranks, with all events.
    window
        By default the second step.
    paths
        Critical paths of the ranks, if they are known.
    expected
        Number of ranks of the run. By default it is the largest world size in the traces.

    Raises
    ------
    JoinError
        If no two ranks have communication in common.
    WindowError
        If a trace has no such window.

    """
    paths = paths or {rank: analyze(trace, window) for rank, trace in traces.items()}
    inside = {
        rank: np.isin(traces[rank].comm["event"].to_numpy(), path.graph.event)
        for rank, path in paths.items()
    }
    comm = RunCommunication.of(traces)
    ahead = comm.ahead()
    instances, notes = comm.instances(inside, ahead)
    if not len(instances):
        raise JoinError(
            f"{named_ranks(list(traces))}: no two of these ranks have communication of one "
            "group; record process groups with the events"
        )
    if expected is None:
        sizes = [trace.meta.world_size for trace in traces.values()]
        world = max((size for size in sizes if size is not None), default=None)
        expected = expected_ranks(tuple(paths), world)
    return _Joiner(paths, instances, ahead).path(notes, expected)
