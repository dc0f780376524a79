"""Edit the graph of a critical path: events, constraints, weights, times; then replay it.

An event is named by its id, of several ranks by (rank, id), and a new one by its name. It has a
start and an end node. Weights are ns. Every method changes the edit and returns it.

The constraints stay: those that the new times contradict are left out. Times are ns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import pyarrow as pa

from fastcomm.critical_path.path import FoundPath
from fastcomm.critical_path.rules import EVENT, SavedEvents
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.graph.graph import (
    EDGE_KIND,
    EDGE_KINDS,
    Graph,
    LongestPath,
    acyclic_order,
    measured_delays,
)
from fastcomm.graph.graph import slack as slack_of
from fastcomm.trace.trace import validate
from fastcomm.units import counted
from fastcomm_kernels import graph as kernels
from fastcomm_kernels.arrays import NONE, Flags, Ints

if TYPE_CHECKING:
    import networkx

P = TypeVar("P")
EventName = int | tuple[int, int] | str
_MOST_NS = 1 << 60
_STREAM = EDGE_KIND["kernel_kernel"]
_ON_STREAM = (_STREAM, EDGE_KIND["inferred"])  # between neighbors on a stream
_OWN = EDGE_KIND["operator"]
_DEPENDENCY = EDGE_KIND["dependency"]
TIMES = pa.schema(
    [
        pa.field(name, pa.int64(), nullable=False)
        for name in ("event", "start_ns", "duration_ns")
    ]
)
TIMES_BY_RANK = pa.schema([pa.field("rank", pa.int64(), nullable=False), *TIMES])
_LATEST_NS = 1 << 61  # of a start, and of a duration: sums of two fit into int64
_MOST_LISTED = 5


@dataclass(frozen=True, slots=True)
class EventNode:
    """The start or the end of an event."""

    event: EventName
    is_end: bool


class GraphEdit(Generic[P]):
    """A graph that is being edited; `recompute` replays it and finds its path."""

    def __init__(self, path: FoundPath, finish: Callable[[FoundPath], P]) -> None:
        """Copy the graph of a path; `finish` converts the new path."""
        path.check_exact("edit")
        self._path, self._finish = path, finish
        used, graph = path.graph.compact()
        self._rows: list[dict[str, Any]] = path.events.describe(used).to_pylist()
        rank = np.array(path.ranks)[path.across.rank_of]
        # Columns of nodes, and of edges.
        self._event, self._source, self._target, self._owner = (
            column.astype(np.int64)
            for column in (graph.event, graph.source, graph.target, graph.owner)
        )
        self._is_end, self._on_device, self._rank = graph.is_end, path.on_device, rank
        self._time, self._is_used = graph.time, np.ones(len(graph.event), np.bool_)
        self._kind, self._weight = graph.kind, measured_delays(graph, path.on_device)
        self._nodes: dict[tuple[EventName, bool], int] = {}
        for node, (event, is_end) in enumerate(
            zip(self._event.tolist(), self._is_end.tolist(), strict=True)
        ):
            own = self._rows[event]["id"]
            key = (int(rank[node]), own) if path.is_joined else own
            self._nodes[key, is_end] = node

    def node(self, event: EventName, *, is_end: bool) -> int:
        """Return the number of a node; raise ConfigError if the graph does not have it."""
        node = self._nodes.get((event, is_end))
        if node is None or not self._is_used[node]:
            side = "end" if is_end else "start"
            raise ConfigError(f"edit: the graph has no {side} of an event {event!r}")
        return node

    def _both(self, event: EventName) -> tuple[int, int]:
        return self.node(event, is_end=False), self.node(event, is_end=True)

    def remove(self, *events: EventName) -> Self:
        """Remove events: what waited for one waits for what it waited for, without its time."""
        for event in events:
            nodes = self._both(event)
            self._weight = np.where(self._owned(nodes[0]), 0, self._weight)
            for node in nodes:
                self._bridge(node)
        return self

    def _owned(self, node: int) -> Flags:
        """Return which edges are time of the event of a node."""
        owned: Flags = (self._owner == self._event[node]) & (self._kind == _OWN)
        return owned

    def _bridge(self, node: int) -> None:
        """Remove a node; each pair of edges through it becomes one edge."""
        before, after = (np.flatnonzero(side == node) for side in (self._target, self._source))
        pairs = [(a, b) for a in before.tolist() for b in after.tolist()]
        first, second = np.array(pairs, np.int64).reshape(-1, 2).T
        new = (
            self._source[first],
            self._target[second],
            # A gap on a stream stays one: a stage of its own would be a constraint anew.
            np.where(self._kind[first] == self._kind[second], self._kind[first], _DEPENDENCY),
            self._weight[first] + self._weight[second],
        )
        self._keep((self._source != node) & (self._target != node))
        self._is_used[node] = False
        self._append(*new)

    def _keep(self, rows: Flags) -> None:
        for name in ("_source", "_target", "_kind", "_weight", "_owner"):
            setattr(self, name, getattr(self, name)[rows])

    def _append(
        self, source: Ints, target: Ints, kind: Any, weight: Ints, owner: int = NONE
    ) -> None:
        """Append edges. Raises ConfigError for weights that are negative or too large."""
        _check(weight)
        added = {
            "_source": source,
            "_target": target,
            "_kind": np.broadcast_to(kind, len(source)),
            "_weight": weight,
            "_owner": np.full(len(source), owner),
        }
        for name, values in added.items():
            old = getattr(self, name)
            setattr(self, name, np.append(old, values).astype(old.dtype))

    def _edge(self, source: int, target: int) -> Ints:
        """Return the edges between two nodes; raise ConfigError if there is none."""
        edges = np.flatnonzero((self._source == source) & (self._target == target))
        if not len(edges):
            ends = (self._rows[self._event[node]]["name"] for node in (source, target))
            raise ConfigError(f"edit: no edge from {' to '.join(map(repr, ends))}")
        return edges

    def _ends(
        self, source: EventName | EventNode, target: EventName | EventNode
    ) -> tuple[int, int]:
        """Return two nodes: the end of the first event, and the start of the second."""
        nodes = [
            end if isinstance(end, EventNode) else EventNode(end, is_end)
            for end, is_end in ((source, True), (target, False))
        ]
        first, second = (self.node(node.event, is_end=node.is_end) for node in nodes)
        return first, second

    def add_edge(
        self,
        source: EventName | EventNode,
        target: EventName | EventNode,
        weight_ns: int = 0,
        kind: str = "dependency",
    ) -> Self:
        """Let `target` begin `weight_ns` after the end of `source` at the earliest.

        An `EventNode` names the start or the end of an event. `kind` is one of `EDGE_KINDS`.
        """
        if kind not in EDGE_KIND:
            raise ConfigError(f"edit: unknown kind {kind!r}; one of {', '.join(EDGE_KINDS)}")
        first, second = self._ends(source, target)
        self._append(
            np.array([first]), np.array([second]), EDGE_KIND[kind], np.array([weight_ns])
        )
        return self

    def remove_edge(self, source: EventName | EventNode, target: EventName | EventNode) -> Self:
        """Remove the edges between two nodes, which are named as in `add_edge`."""
        gone = self._edge(*self._ends(source, target))
        self._keep(~np.isin(np.arange(len(self._source)), gone))
        return self

    def set_weight(
        self, source: EventName | EventNode, target: EventName | EventNode, weight_ns: int
    ) -> Self:
        """Set the weight of the edges between two nodes, which are named as in `add_edge`."""
        edges = self._edge(*self._ends(source, target))
        self._set(edges, np.full(len(edges), weight_ns))
        return self

    def set_duration(self, event: EventName, duration_ns: int) -> Self:
        """Set the own time of an event: without calls inside it, and without waits."""
        owned = np.flatnonzero(self._owned(self.node(event, is_end=False)))
        if not len(owned):
            raise ConfigError(f"edit: event {event!r} has no time of its own")
        old = self._weight[owned]
        # Pieces between the calls inside an event change alike.
        ends = np.cumsum(old) if old.any() else np.arange(1, len(old) + 1)
        shares = np.diff(ends * duration_ns // ends[-1], prepend=0)
        self._set(owned, shares)
        return self

    def _set(self, edges: Ints, weight: Ints) -> None:
        _check(weight)
        self._weight = self._weight.copy()
        self._weight[edges] = weight

    def delay(self, event: EventName, delay_ns: int) -> Self:
        """Insert a delay before an event, which begins that much later than it could."""
        edges = np.flatnonzero(self._target == self.node(event, is_end=False))
        if not len(edges):
            raise ConfigError(f"edit: event {event!r} waits for nothing; add_event before it")
        self._set(edges, self._weight[edges] + delay_ns)
        return self

    def add_event(
        self,
        name: str,
        duration_ns: int,
        *,
        after: Sequence[EventName] = (),
        before: Sequence[EventName] = (),
        like: EventName | None = None,
    ) -> Self:
        """Add an event that takes `duration_ns`.

        It begins when all events `after` which it comes have ended, and those `before` which it
        comes wait for it. It is on the rank, process and stream of the event `like`, by default
        of the first of these.
        """
        if (name, False) in self._nodes:
            raise ConfigError(f"edit: there is an event {name!r} already")
        model = next(iter([*([] if like is None else [like]), *after, *before]), None)
        if model is None:
            raise ConfigError(f"edit: {name!r} comes neither after nor before an event")
        other = self.node(model, is_end=False)
        row = dict(self._rows[self._event[other]])
        self._rows.append({**row, "id": None, "name": name, "op": None, "tag": None})
        first = len(self._event)
        self._event = np.append(self._event, [len(self._rows) - 1] * 2)
        self._is_end = np.append(self._is_end, [False, True])
        self._is_used = np.append(self._is_used, [True, True])
        for column in ("_on_device", "_rank", "_time"):
            old = getattr(self, column)
            setattr(self, column, np.append(old, [old[other]] * 2))
        self._nodes |= {(name, False): first, (name, True): first + 1}
        ends = np.array([first]), np.array([first + 1])
        self._append(*ends, _OWN, np.array([duration_ns]), len(self._rows) - 1)
        for event in after:
            self.add_edge(event, name)
        for event in before:
            self.add_edge(name, event)
        return self

    def move(self, event: EventName, stream: int) -> Self:
        """Move work of a device to another stream, between the work that began around it.

        The work behind it on its old stream follows the work before it.
        """
        start, end = self._both(event)
        row = self._rows[self._event[start]]
        if not row["is_device"]:
            raise ConfigError(f"edit: event {event!r} is not on a device")
        if row["stream"] == stream:
            return self
        self._leave_stream(start, end)
        previous, following, thread = self._around(start, stream)
        gap = 0
        if previous is not None and following is not None:
            gap = self._cut(previous, following)
        for source, target in ((previous, start), (end, following)):
            if source is not None and target is not None:
                pair = np.array([source]), np.array([target])
                self._append(*pair, _STREAM, np.array([gap]))
        self._rows[self._event[start]] = {**row, "stream": stream, "thread": thread}
        return self

    def _around(self, start: int, stream: int) -> tuple[int | None, int | None, str]:
        """Return the end before a node on a stream, the start after it, and the thread."""
        nodes = np.flatnonzero(
            self._is_used
            & ~self._is_end
            & self._on_device
            & (self._rank == self._rank[start])
            & (np.arange(len(self._event)) != start)
        ).tolist()
        own = [n for n in nodes if self._rows[self._event[n]]["stream"] == stream]
        own.sort(key=lambda node: int(self._time[node]))
        earlier = [node for node in own if self._time[node] <= self._time[start]]
        later = own[len(earlier) :]
        previous = None
        if earlier:
            is_end = self._is_end & (self._event == self._event[earlier[-1]])
            previous = int(np.flatnonzero(is_end)[0])
        thread = self._rows[self._event[own[0]]]["thread"] if own else str(stream)
        return previous, later[0] if later else None, thread

    def _leave_stream(self, start: int, end: int) -> None:
        """Let the neighbors of an event on its stream follow each other, and not the event."""
        is_stream = self._kind == _STREAM
        before = np.flatnonzero(is_stream & (self._target == start))
        after = np.flatnonzero(is_stream & (self._source == end))
        sources, targets = self._source[before], self._target[after]
        weight = self._weight[after]
        is_gone = (self._target == start) & np.isin(self._source, sources)
        is_gone |= (self._source == end) & np.isin(self._target, targets)
        self._keep(~(is_gone & np.isin(self._kind, _ON_STREAM)))
        if len(sources) and len(targets):
            self._append(sources[:1], targets[:1], _STREAM, weight[:1])

    def _cut(self, source: int, target: int) -> int:
        """Remove the gap between two nodes on a stream; return its weight, 0 without one."""
        is_gap = (self._source == source) & (self._target == target)
        is_gap &= np.isin(self._kind, _ON_STREAM)
        gap = int(self._weight[is_gap].max(initial=0))
        self._keep(~is_gap)
        return gap

    def to_networkx(self) -> "networkx.DiGraph[int]":
        """Return the graph for networkx; raise FastcommError if it is not installed.

        Nodes have `name`, `event`, `rank` and `is_end`, edges `weight` (ns) and `kind`.
        """
        graph: networkx.DiGraph[int] = _networkx().DiGraph()
        for node in np.flatnonzero(self._is_used).tolist():
            row = self._rows[self._event[node]]
            graph.add_node(
                node,
                name=row["name"],
                event=row["id"],
                rank=int(self._rank[node]),
                is_end=bool(self._is_end[node]),
            )
        columns = (self._source, self._target, self._weight, self._kind)
        for source, target, weight, kind in zip(*(c.tolist() for c in columns), strict=True):
            if weight >= graph.get_edge_data(source, target, {"weight": -1})["weight"]:
                graph.add_edge(source, target, weight=weight, kind=EDGE_KINDS[kind])
        return graph

    def from_networkx(self, graph: "networkx.DiGraph[int]") -> Self:
        """Take nodes, edges and weights of a graph of `to_networkx` that was changed.

        Nodes that it lacks are removed with their edges. Events are added by `add_event`.
        """
        nodes = np.array(list(graph.nodes), np.int64)
        if not np.isin(nodes, np.flatnonzero(self._is_used)).all():
            raise ConfigError("edit: the graph has new nodes; add events with add_event")
        owner = {
            (source, target): own
            for source, target, own in zip(
                *(c.tolist() for c in (self._source, self._target, self._owner)), strict=True
            )
        }
        edges = list(graph.edges(data=True))
        self._keep(np.zeros(len(self._source), np.bool_))
        self._is_used = np.isin(np.arange(len(self._event)), nodes)
        if edges:
            source, target = (np.array([edge[k] for edge in edges], np.int64) for k in (0, 1))
            kinds = np.array([EDGE_KIND[edge[2].get("kind", "dependency")] for edge in edges])
            self._append(source, target, kinds, np.array([e[2]["weight"] for e in edges]))
            self._owner = np.array([owner.get(edge[:2], NONE) for edge in edges], np.int64)
        return self

    def recompute(self) -> P:
        """Replay the edited graph, and return its path.

        Raises
        ------
        FastcommError
            If the edges have a cycle.

        """
        names = [str(self._rows[event]["name"]) for event in self._event.tolist()]
        order = acyclic_order(self._source, self._target, names)
        order = order[self._is_used[order]]
        place = np.full(len(self._event), NONE, np.int64)
        place[order] = np.arange(len(order))
        source, target = place[self._source], place[self._target]
        # Of several edges between two nodes the longest one binds.
        rows = np.lexsort((-self._weight, source, target))
        pairs = np.stack([source[rows], target[rows]])
        rows = rows[np.append(True, (pairs[:, 1:] != pairs[:, :-1]).any(axis=0))[: len(rows)]]
        edited = Graph(
            event=self._event[order].astype(np.int32),
            time=np.zeros(len(order), np.int64),
            is_end=self._is_end[order],
            source=source[rows].astype(np.int32),
            target=target[rows].astype(np.int32),
            kind=self._kind[rows],
            weight=self._weight[rows],
            owner=self._owner[rows].astype(np.int32),
        )
        time, through = kernels.replay(edited.incoming[0], edited.source, edited.weight, 0)
        begin = int(self._time.min()) if len(self._time) else 0
        path, across = self._path, self._path.across.unmeasured()
        rank_of = np.searchsorted(np.array(path.ranks), self._rank[order]).astype(np.int32)
        slack = np.full(len(order), across.slack.max(initial=0))
        return self._finish(
            FoundPath(
                graph=replace(edited, time=time + begin),
                events=SavedEvents(pa.Table.from_pylist(self._rows, schema=EVENT)),
                about=path.about.noting("the graph was edited: times are those of a replay"),
                on_device=self._on_device[order],
                path=LongestPath.to_latest(time, through, edited.source),
                join=replace(across, rank_of=rank_of, slack=slack) if path.is_joined else None,
            )
        )


def _check(weight: Ints) -> None:
    """Raise ConfigError for weights that are negative or too large."""
    if len(weight) and (int(weight.min()) < 0 or int(weight.max()) > _MOST_NS):
        raise ConfigError("edit: a weight is negative, or no time fits it")


def _networkx() -> Any:
    """Return networkx; raise FastcommError if it is not installed."""
    try:
        import networkx
    except ImportError as error:
        raise FastcommError(
            f'edit: networkx is not installed: pip install "fastcomm[graph]" ({error})'
        ) from error
    return networkx


def times_of(path: FoundPath) -> pa.Table:
    """Return the times of a path's events: see `CriticalPath.times`."""
    nodes = _EventNodes.of(path)
    graph = path.graph
    start = graph.time[nodes.start]
    name = path.events.describe(graph.event[nodes.start], ["name"])["name"]
    columns = [nodes.rank, nodes.event, name, start, graph.time[nodes.end] - start]
    return pa.table(columns, names=["rank", "event", "name", "start_ns", "duration_ns"])


def with_times(path: FoundPath, times: pa.Table) -> FoundPath:
    """Return the path through a graph whose events have the times of a table.

    See `CriticalPath.with_times`.
    """
    path.check_exact("with_times")
    nodes = _EventNodes.of(path)
    schema = TIMES_BY_RANK if path.is_joined else TIMES
    start, duration = _matched(nodes, validate(times, schema, "times"), path.about.rank)
    time = path.graph.time.copy()
    time[nodes.start], time[nodes.end] = start, start + duration
    _set_join_points(path.graph, time)
    order = np.argsort(time, kind="stable")  # of nodes at one time, sources stay first
    graph, contradicted = _retimed(path.graph, time, order)
    events, graph = _described(path, graph)
    on_device, across = path.on_device[order], path.across.unmeasured()
    longest, slack = path.about.rules.search(graph, events, on_device)
    join = None
    if path.is_joined:
        join = replace(across, rank_of=across.rank_of[order], slack=slack_of(graph, on_device))
    about = path.about.noting(f"times are those of a table of {counted(len(start), 'event')}")
    if contradicted:
        about = about.noting(
            f"{counted(contradicted, 'constraint')} ignored, which the times of the table "
            "contradict"
        )
    if len(time):
        ends = {"start": int(graph.time[0]), "stop": int(graph.time[-1])}
        about = replace(about, window=replace(about.window, **ends))
    return FoundPath(
        graph=graph,
        events=events,
        about=about,
        on_device=on_device,
        path=longest,
        slack=slack,
        join=join,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventNodes:
    """The nodes of the events of a graph, one value per event, by rank and id."""

    rank: Ints
    event: Ints  # id
    start: Ints  # node
    end: Ints  # node

    @classmethod
    def of(cls, path: FoundPath) -> "_EventNodes":
        graph, is_join = path.graph, path.graph.is_join
        rank = np.array(path.ranks, np.int64)[path.across.rank_of]
        ids = path.events.ids(graph.event)
        starts, ends = (
            own[np.lexsort((ids[own], rank[own]))]
            for own in map(np.flatnonzero, (~graph.is_end & ~is_join, graph.is_end))
        )
        return cls(rank=rank[starts], event=ids[starts], start=starts, end=ends)


def _matched(nodes: _EventNodes, times: pa.Table, only: int) -> tuple[Ints, Ints]:
    """Return the start and the duration of each event; raise ConfigError if one lacks them.

    `only` is the rank of a table without that column.
    """
    event, start, duration = (times[name].to_numpy() for name in TIMES.names)
    rank = (
        [only] * len(event) if "rank" not in times.column_names else times["rank"].to_pylist()
    )
    table_keys = list(zip(rank, event.tolist(), strict=True))
    graph_keys = list(zip(nodes.rank.tolist(), nodes.event.tolist(), strict=True))
    place = {key: row for row, key in enumerate(table_keys)}
    if len(place) < len(table_keys):
        twice = [key for row, key in enumerate(table_keys) if place[key] != row]
        raise ConfigError(f"times: {_listed(twice)} more than once in the table")
    if unknown := sorted(place.keys() - set(graph_keys)):
        raise ConfigError(f"times: {_listed(unknown)} not in the graph")
    if missing := [key for key in graph_keys if key not in place]:
        raise ConfigError(
            f"times: {_listed(missing)} not in the table; `times()` of the path has all events"
        )
    is_wrong = (np.abs(start) > _LATEST_NS) | (duration < 0) | (duration > _LATEST_NS)
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise ConfigError(
            f"times: row {row}: start {start[row]} or duration {duration[row]} is no time in ns"
        )
    rows = np.array([place[key] for key in graph_keys], np.int64)
    return start[rows], duration[rows]


def _listed(keys: list[tuple[int, int]]) -> str:
    """Return the first few of some events as a text."""
    shown = ", ".join(f"{event} of rank {rank}" for rank, event in keys[:_MOST_LISTED])
    more = ", ..." if len(keys) > _MOST_LISTED else ""
    return f"{counted(len(keys), 'event')} ({shown}{more})"


def _set_join_points(graph: Graph, time: Ints) -> None:
    """Write into `time` when the last participant arrives, for each join point."""
    time[graph.is_join] = np.iinfo(np.int64).min
    edges = np.flatnonzero(graph.kind == EDGE_KIND["join"])
    np.maximum.at(time, graph.target[edges], time[graph.source[edges]])


def _retimed(graph: Graph, time: Ints, order: Ints) -> tuple[Graph, int]:
    """Return a graph with the nodes in a new order, and the number of contradicted edges.

    A node that no constraint explains any more follows the latest node before it.
    """
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    is_met = time[graph.source] <= time[graph.target]
    met_edges = np.flatnonzero(is_met)
    source, target = place[graph.source[met_edges]], place[graph.target[met_edges]]
    is_explained = np.zeros(len(order), np.bool_)
    is_explained[:1] = is_explained[target] = True
    alone = np.flatnonzero(~is_explained)
    ends = np.append(source, alone - 1), np.append(target, alone)
    kind = np.append(
        graph.kind[met_edges], np.full(len(alone), EDGE_KIND["unexplained"], np.int8)
    )
    owner = np.append(graph.owner[met_edges], np.full(len(alone), NONE, np.int32))
    nodes = graph.event[order], time[order], graph.is_end[order]
    retimed = Graph.measured(nodes, ends, kind, owner)
    return retimed, int((~is_met & (graph.kind != EDGE_KIND["unexplained"])).sum())


def _described(path: FoundPath, graph: Graph) -> tuple[SavedEvents, Graph]:
    """Return the events of a graph with its times, and the graph that refers to them."""
    used, renumbered = graph.compact()
    table = path.events.describe(used)
    limits = np.iinfo(np.int64)
    start, end = (np.full(len(used), limit) for limit in (limits.max, limits.min))
    np.minimum.at(start, renumbered.event, graph.time)
    np.maximum.at(end, renumbered.event, graph.time)
    for name, values in (("start", start), ("stop", end)):
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    return SavedEvents(table), renumbered
