"""Reproduce paths, idle times and queue lengths of HolisticTraceAnalysis, with HTA's names.

The gap before a device event is its start minus the end of the event before it on its stream,
negative if the two overlap. It is `host_wait` if the event was launched after that end, else
`kernel_wait` if it is short, else `other`; the first event of a stream has no gap. HTA 0.5
documents the limit as ns and uses it as us. `fastcomm metrics` divides the idle time of the
whole device by its cause instead.

A queue becomes longer at the start of a launching call and shorter at the start of the work
on the device. Statistics are those of the points at which it changes, and not weighted by time:
`fastcomm kernels --by stream` has means over time, and keeps the streams of two devices apart.

>>> from fastcomm.compat import hta
>>> graph, success = hta.critical_path_analysis("traces/", 0, "ProfilerStep", 1)
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from fastcomm.checks import check_path, check_type, invalid_value
from fastcomm.compat import hta_graph
from fastcomm.compat.hta_graph import RULES, SEARCHED_FROM_NS, Linked, clip, linked, longest
from fastcomm.critical_path import overlay, saved
from fastcomm.critical_path.overlay import Drawing
from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.rules import CORRECTED, TYPES, PathSource, TraceEvents
from fastcomm.critical_path.search import source_notes
from fastcomm.critical_path.window import TimeRange, WindowError, errors_of
from fastcomm.errors import FastcommError
from fastcomm.formats.opening import open_run
from fastcomm.graph.graph import EDGE_KINDS, networkx_for
from fastcomm.options import Window
from fastcomm.trace.events import EventRows
from fastcomm.trace.run_traces import RunTraces
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NONE, Ints

if TYPE_CHECKING:
    import networkx

CATEGORIES = ("host_wait", "kernel_wait", "other")
_IDLE = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("idle_category", pa.string()),
        ("idle_time", pa.float64()),  # us
        ("idle_time_ratio", pa.float64()),  # of the stream's idle time, rounded to 1 %
    ]
)
_FLOATS = ("mean", "std", "min", "25%", "50%", "75%", "max")
_SUMMARY = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("count", pa.int64()),  # of points
        *((name, pa.float64()) for name in _FLOATS),
    ]
)
_BLOCKED = pa.schema(
    [
        ("rank", pa.int64()),
        ("stream", pa.int64()),
        ("duration_at_max_queue_length", pa.float64()),  # us
        ("relative_duration_at_max_queue_length", pa.float64()),  # of the trace
    ]
)
__all__ = [
    "CPGraph",
    "Edge",
    "critical_path_analysis",
    "find_path",
    "get_idle_time_breakdown",
    "get_queue_length_summary",
    "get_time_spent_blocked_on_full_queue",
    "overlay_critical_path_analysis",
    "restore_cpgraph",
]
_LOG = logging.getLogger("fastcomm")


class ReadableRun(Protocol):
    """A run whose ranks can be read, as the `Run` that `fastcomm.open` returns."""

    def read(self, rank: int) -> Trace:
        """Read all events of one rank."""
        ...


AnyRun = ReadableRun | RunTraces | str | Path


def reader_of(run: AnyRun) -> Callable[[int], Trace]:
    """Return the function that reads all events of a rank of a run, or of a path's run."""
    if isinstance(run, str | Path):
        run = open_run(run)
    if isinstance(run, RunTraces):
        traces = run
        return lambda rank: traces.read(rank, "all")
    if not hasattr(run, "read"):
        raise invalid_value("run", run, 'a run, as in fastcomm.open("traces/"), or its path')
    return run.read


def get_idle_time_breakdown(
    run: AnyRun, rank: int = 0, *, consecutive_kernel_delay: int = 30
) -> pa.Table:
    """Return the idle time of each stream of a rank by HTA's categories.

    Parameters
    ----------
    run
        A run that `fastcomm.open` returned, or the path of its traces.
    rank
        The rank.
    consecutive_kernel_delay
        Gaps shorter than this, in us, are `kernel_wait`.

    Returns
    -------
    pyarrow.Table
        A row per stream and category: `rank`, `stream`, `idle_category`, `idle_time` (us),
        `idle_time_ratio` (null if the stream is never idle).

    Raises
    ------
    FastcommError
        If the rank cannot be read.

    """
    events = linked(reader_of(run)(rank))
    rows = events.rows
    work = np.flatnonzero(rows.of_kind("kernel", "memcpy", "memset") & (rows.stream != -1))
    launched = np.where(events.partner >= 0, rows.start[events.partner], np.iinfo(np.int64).min)
    check_type(consecutive_kernel_delay, Real, "consecutive_kernel_delay", "a number of us")
    limit = consecutive_kernel_delay * 1000
    entries = [
        {"rank": rank, "stream": stream, **entry}
        for stream in dict.fromkeys(rows.stream[work].tolist())
        for entry in _idle_times(rows, work[rows.stream[work] == stream], launched, limit)
    ]
    return pa.Table.from_pylist(entries, schema=_IDLE)


def _idle_times(
    rows: EventRows, work: Ints, launched: Ints, limit: int
) -> Iterator[dict[str, Any]]:
    """Yield the entry of each category of one stream; times are ns, `work` is sorted."""
    ends, following = rows.stop[work[:-1]], work[1:]
    gap = rows.start[following] - ends
    is_host_wait = launched[following] > ends
    category = np.where(is_host_wait, 0, np.where(gap < limit, 1, 2))
    total = int(gap.sum())
    # The first event counts as `other`, without a gap.
    for number in np.unique(np.append(category, 2)).tolist():
        time = int(gap[category == number].sum())
        yield {
            "idle_category": CATEGORIES[number],
            "idle_time": time / 1000,
            "idle_time_ratio": round(time / total, 2) if total else None,
        }


def get_queue_length_summary(run: AnyRun, ranks: Sequence[int] = (0,)) -> pa.Table:
    """Return statistics of the queue length of each stream.

    Parameters
    ----------
    run
        A run that `fastcomm.open` returned, or the path of its traces.
    ranks
        The ranks.

    Returns
    -------
    pyarrow.Table
        A row per rank and stream: `rank`, `stream`, `count` (of points), `mean`, `std` (of a
        sample; null for one point), `min`, `25%`, `50%`, `75%` and `max`.

    Raises
    ------
    FastcommError
        If a rank cannot be read.

    """
    entries = []
    for rank, stream, _, length, _ in _queues(run, ranks):
        values = (
            float(length.mean()),
            float(length.std(ddof=1)) if len(length) > 1 else None,
            *np.percentile(length, [0, 25, 50, 75, 100]).tolist(),
        )
        numbers = dict(zip(_FLOATS, values, strict=True))
        entries.append({"rank": rank, "stream": stream, "count": len(length), **numbers})
    return pa.Table.from_pylist(entries, schema=_SUMMARY)


def get_time_spent_blocked_on_full_queue(
    run: AnyRun, ranks: Sequence[int] = (0,), *, max_queue_length: int = 1024
) -> pa.Table:
    """Return how long the queue of each stream has at least some number of entries.

    HTA keeps the last such stream of a rank; here are all.

    Parameters
    ----------
    run, ranks
        As for `get_queue_length_summary`, whose errors are raised.
    max_queue_length
        Number of entries from which a queue counts as full.

    Returns
    -------
    pyarrow.Table
        A row per rank and stream that is ever full: `rank`, `stream`,
        `duration_at_max_queue_length` (us), `relative_duration_at_max_queue_length` (of the
        time from the first start of an event to the last).

    """
    check_type(max_queue_length, Real, "max_queue_length", "a number of entries")
    entries = []
    for rank, stream, time, length, whole in _queues(run, ranks):
        is_full = length >= max_queue_length
        if is_full.any():
            ns = int(np.diff(time, append=time[-1])[is_full].sum())
            values = (rank, stream, ns / 1000, ns / whole if whole else None)
            entries.append(dict(zip(_BLOCKED.names, values, strict=True)))
    return pa.Table.from_pylist(entries, schema=_BLOCKED)


def _queues(run: AnyRun, ranks: Sequence[int]) -> Iterator[tuple[int, int, Ints, Ints, int]]:
    """Yield rank, stream, times, queue lengths from each time on, and the trace's ns."""
    read = reader_of(run)
    check_type(ranks, Iterable, "ranks", "a list, as in [0, 1]")
    for rank in ranks:
        events = linked(read(rank))
        rows = events.rows
        launches = hta_graph.launch_rows(events)
        lengths = hta_graph.queue_lengths(events, launches)
        stream = rows.stream.copy()
        stream[launches] = rows.stream[events.partner[launches]]
        points = np.flatnonzero((lengths >= 0) | np.isin(np.arange(len(rows)), launches))
        # A launch precedes a start at the same time.
        is_start = rows.stream[points] != -1
        points = points[np.lexsort((is_start, rows.start[points]))]
        whole = int(rows.start.max() - rows.start.min()) if len(rows) else 0
        for number in np.unique(stream[points]).tolist():
            own = points[stream[points] == number]
            yield rank, number, rows.start[own], lengths[own].astype(np.int64), whole


class Edge(NamedTuple):
    """An edge with HTA's names of its parts."""

    begin: int  # node
    end: int  # node
    type: str
    weight: int  # ns


class CPGraph(CriticalPath):
    """A critical path with the methods of HTA's class of this name.

    The id of an event is its position in the file. Weights are ns, not us as in HTA.
    """

    def summary(self) -> dict[str, float]:
        """Return the time of each class on the path in percent of their sum, as HTA does."""
        return {name: 100 * share for name, share in super().summary().items()}

    def critical_path(self, *, strict: bool = False) -> bool:
        """Search for the path again, after an edit; return False if there is none.

        Weights of -1 us or less count as 0 in the search. With `strict`, a weight of -1 us is
        used as it is, and a lower weight makes the graph invalid.
        """
        if strict and self.about.rules.name == RULES.name:
            weight = self.graph.weight
            is_invalid = bool((weight < SEARCHED_FROM_NS).any())
            self._change(path=None if is_invalid else longest(self.graph, self.events, weight))
        else:
            search = self.about.rules.search
            path, slack = search(self.graph, self.events, self.on_device)
            self._change(path=path, slack=slack)
        return self.path is not None

    def set_weight(self, source: int, target: int, weight: int) -> None:
        """Set the weight of the edge between two nodes.

        `critical_path` then searches for the path again.

        Parameters
        ----------
        source, target
            Numbers of the nodes.
        weight
            In ns.

        Raises
        ------
        FastcommError
            There is no such edge.

        """
        at = np.flatnonzero((self.graph.source == source) & (self.graph.target == target))
        if not len(at):
            raise FastcommError(f"the graph has no edge from node {source} to node {target}")
        changed = self.graph.weight.copy()
        changed[at] = weight
        self._change(graph=replace(self.graph, weight=changed))

    def _change(self, **fields: object) -> None:
        """Set fields in place, as HTA's graph does, and drop what was computed of them."""
        for name in ("breakdown", "_bound_by"):
            self.__dict__.pop(name, None)
        self.__dict__.update(fields)

    def edges(self, at: Sequence[int] | np.ndarray[Any, Any]) -> list[Edge]:
        """Return the edges with the numbers `at` in HTA's form; weights are ns."""
        graph = self.graph
        columns = (graph.source[at], graph.target[at], graph.kind[at], graph.weight[at])
        return [
            Edge(u, v, TYPES[EDGE_KINDS[kind]], weight)
            for u, v, kind, weight in zip(*(c.tolist() for c in columns), strict=True)
        ]

    @property
    def critical_path_nodes(self) -> list[int]:
        """Nodes of the path, from first to last."""
        return [] if self.path is None else self.path.nodes.tolist()

    @property
    def critical_path_events_set(self) -> set[int]:
        """Ids of the events on the path."""
        return set(self.event_ids)

    @property
    def critical_path_edges_set(self) -> set[Edge]:
        """Edges of the path."""
        return set(self.edges(self.valid_path.edges))

    def get_critical_path_breakdown(self) -> pa.Table | None:
        """Return `breakdown`, a row per edge of the path, or None if there is no path."""
        return None if self.path is None else self.breakdown

    def get_nodes_for_event(self, event: int) -> tuple[int | None, int | None]:
        """Return the nodes of the start and the end of an event; None if it has no nodes."""
        nodes = np.flatnonzero(self.events.ids(self.graph.event) == event)
        if not len(nodes):
            return None, None
        start, end = sorted(nodes.tolist(), key=lambda node: bool(self.graph.is_end[node]))
        return start, end

    def get_events_for_edge(self, edge: Edge) -> tuple[int, int]:
        """Return the ids of the events at the begin and the end of an edge."""
        ends = self.graph.event[[edge.begin, edge.end]]
        source, target = self.events.ids(ends).tolist()
        return source, target

    def get_event_attribution_for_edge(self, edge: Edge) -> int | None:
        """Return the id of the event that an edge's time belongs to, or None."""
        graph = self.graph
        at = np.flatnonzero((graph.source == edge.begin) & (graph.target == edge.end))
        owner = graph.owner[at[:1]]
        return int(self.events.ids(owner)[0]) if len(owner) and owner[0] != NONE else None

    def get_edges_attributed_to_event(self, event: int) -> list[Edge]:
        """Return the edges whose time belongs to an event."""
        owned = np.flatnonzero(self.graph.owner != NONE)
        ids = self.events.ids(self.graph.owner[owned])
        return self.edges(owned[ids == event])

    def to_networkx(self) -> "networkx.DiGraph[int]":
        """Return the graph for networkx; raise FastcommError if it is not installed."""
        graph: networkx.DiGraph[int] = networkx_for("to_networkx").DiGraph()
        for edge in self.edges(np.arange(len(self.graph.source))):
            graph.add_edge(edge.begin, edge.end, weight=edge.weight, object=edge)
        return graph


def critical_path_analysis(
    run: AnyRun,
    rank: int,
    annotation: str,
    instance_id: int | tuple[int, int] | None = None,
    data_load_events: Sequence[str] | None = None,
    *,
    zero_weight_launches: bool = False,
    include_last_profiler_step: bool = False,
) -> tuple[CPGraph, bool] | None:
    """Find the critical path of a rank, as HTA's function of this name does.

    Parameters
    ----------
    run
        A run that `fastcomm.open` returned, or the path of its traces.
    rank
        The rank.
    annotation
        Text that the names of the annotations contain.
    instance_id
        Number of the annotation, or the first and the last number.
    data_load_events
        Regular expressions of names of events that load data.
    zero_weight_launches
        Add an edge of weight 0 for each launch.
    include_last_profiler_step
        Keep the last profiled step.

    Returns
    -------
    tuple or None
        The path, and whether it is valid. None, with an error in the log, if no name contains
        the annotation, or the instance is invalid.

    Raises
    ------
    FastcommError
        If the trace has fewer instances, or cannot be read.

    """
    check_type(annotation, str, "annotation", "a text")
    for name, flag in (
        ("zero_weight_launches", zero_weight_launches),
        ("include_last_profiler_step", include_last_profiler_step),
    ):
        check_type(flag, bool, name, "True or False")
    try:
        path = find_path(
            reader_of(run)(rank),
            Window(
                annotation=annotation,
                instance=instance_id,
                data_load_events=tuple(data_load_events or ()),
            ),
            zero_weight_launches=zero_weight_launches,
            keep_last=include_last_profiler_step,
        )
    except WindowError as error:
        if "no instance" in str(error):
            raise
        _LOG.error("%s", error)
        return None
    return path, path.path is not None


def find_path(
    trace: Trace,
    window: Window | None = None,
    *,
    zero_weight_launches: bool = False,
    keep_last: bool = False,
) -> CPGraph:
    """Find the critical path of a window by HTA's rules.

    Parameters
    ----------
    trace
        The rank, with all events.
    window
        The window; a step is the annotation ``ProfilerStep#N``. By default the first annotation
        with "ProfilerStep" in its name, in the order of HTA's table.
    zero_weight_launches
        Add an edge of weight 0 for each launch.
    keep_last
        Keep the last profiled step, which HTA leaves out if there are several.

    Returns
    -------
    CPGraph
        Its `path` is None if the graph has a cycle.

    Raises
    ------
    FastcommError
        If only the columns for metrics were read.
    WindowError
        If the trace has no such window.

    """
    window = window or Window()
    linked = hta_graph.linked(trace, keep_last=keep_last)
    annotation, exact = window.annotation, window.exact
    if annotation is None:
        exact = window.step is not None
        annotation = f"ProfilerStep#{window.step}" if exact else "ProfilerStep"
    with errors_of(trace.meta.path):
        clipped = clip(linked, annotation, window.instance, exact=exact)
    loads, times = window.data_load_events, clipped.window
    graph = hta_graph.build(clipped, loads, zero_launches=zero_weight_launches)
    trimmed = len(linked.rows) < trace.events.num_rows and linked.has_steps
    notes = ["the last profiled step is left out, as HTA does"] if trimmed else []
    about = PathSource(
        rules=RULES,
        window=TimeRange(
            start=times.start + linked.origin,
            stop=times.stop + linked.origin,
            step=None if window.annotation is not None else _step(trace, linked, times),
        ),
        path=trace.meta.path,
        rank=trace.meta.rank,
        base=trace.meta.base,
        clipped=len(clipped.rows),
        data_load=loads,
        notes=(*notes, *source_notes(trace)),
    )
    events = TraceEvents(trace)
    streams = events.describe(graph.event, ["stream"])["stream"].fill_null(-1)
    return CPGraph.search(graph, events, about, streams.to_numpy() != -1)


def _step(trace: Trace, linked: Linked, times: TimeRange) -> int | None:
    """Return the number of the step in the middle of a window; None if there is none."""
    middle = (times.start + times.stop) // 2 + linked.origin
    steps = trace.iterations.to_pylist()
    return next((s["number"] for s in steps if s["start"] <= middle < s["stop"]), None)


def overlay_critical_path_analysis(
    run: AnyRun,
    rank: int,
    critical_path_graph: CriticalPath,
    output_dir: str | Path,
    only_show_critical_events: bool = True,
    show_all_edges: bool = False,
    edge_types_to_viz: Sequence[str] | None = None,
) -> str:
    """Write a copy of a rank's trace with the critical path drawn into it.

    Parameters
    ----------
    run
        A run that `fastcomm.open` returned, or the path of its traces.
    rank
        The rank.
    critical_path_graph
        The critical path.
    output_dir
        Where the file is written.
    only_show_critical_events
        Leave out events that are not on the path.
    show_all_edges
        Draw all edges, not only those of the path.
    edge_types_to_viz
        Kinds of edges to draw.

    Returns
    -------
    str
        Path of the file.

    """
    trace = reader_of(run)(rank)
    target = Path(output_dir) / f"overlaid_critical_path_{Path(trace.meta.path).name}"
    drawing = Drawing(
        only_critical=only_show_critical_events,
        all_edges=show_all_edges,
        kinds=None if edge_types_to_viz is None else tuple(edge_types_to_viz),
    )
    overlay.write(trace, critical_path_graph, target, drawing)
    return str(target)


def restore_cpgraph(zip_filename: str | Path, t_full: object = None, rank: int = 0) -> CPGraph:
    """Load a critical path that `CriticalPath.save` wrote; it is unpacked in memory only.

    Parameters
    ----------
    zip_filename
        The file.
    t_full, rank
        Ignored; HTA has them.

    Raises
    ------
    FastcommError
        The file is no saved path.

    """
    check_path(zip_filename, "zip_filename", 'restore_cpgraph("path.zip")')
    return CPGraph.of(saved.load(zip_filename, (CORRECTED, RULES)))
