"""Replace the times of a path's graph by those of a table, such as the results of a simulator.

The constraints stay: those that the new times contradict are left out. Times are ns.
"""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from fastcomm.critical_path.path import FoundPath
from fastcomm.critical_path.rules import SavedEvents
from fastcomm.errors import ConfigError
from fastcomm.graph import EDGE_KIND, Graph
from fastcomm.graph import slack as slack_of
from fastcomm.trace.trace import validate
from fastcomm.units import counted
from fastcomm_kernels.arrays import NONE, Ints

TIMES = pa.schema(
    [
        pa.field(name, pa.int64(), nullable=False)
        for name in ("event", "start_ns", "duration_ns")
    ]
)
TIMES_BY_RANK = pa.schema([pa.field("rank", pa.int64(), nullable=False), *TIMES])
_LATEST_NS = 1 << 61  # of a start, and of a duration: sums of two fit into int64
_MOST_LISTED = 5


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
