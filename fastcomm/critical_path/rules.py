"""Rules for the graph of a critical path: its events, the classes of its edges, its search.

`CORRECTED` are fastcomm's own rules; `compat` has rules that reproduce other tools.
`DataDependencies` is the result of `data_dependencies`.

A constraint that the measured times contradict is left out. Where the trace does not record
waits of streams for each other, they are guessed: work that starts right after the end of work
on another stream may wait for it. In other instances the same work starts later for another
reason, and the wait does not show. It matters for a replay: after an edit, the wait may be what
determines the start.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.critical_path.window import Selected, TimeRange, are_known, waits_of
from fastcomm.graph.graph import EDGE_KIND, EDGE_KINDS, Graph, LongestPath
from fastcomm.idle.causes import LOADING
from fastcomm.regexes import is_match
from fastcomm.trace.columns import alike, filled, first_seen, lookup, text_codes
from fastcomm.trace.events import lane_streams
from fastcomm.trace.host_names import LOCKING_CALL
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import KIND, KINDS, OPS, WHOLE_GRAPH
from fastcomm.trace.trace import Trace
from fastcomm_kernels import constraints as kernels
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints, Numbers
from fastcomm_kernels.constraints import LAUNCH_NS

# Columns that describe events.
EVENT = pa.schema(
    [
        pa.field("id", pa.int64()),  # position in the file
        pa.field("name", pa.string()),
        pa.field("kind", pa.string()),
        pa.field("process", pa.string()),
        pa.field("thread", pa.string()),
        pa.field("stream", pa.int64()),  # null on the host
        pa.field("start", pa.int64()),  # ns
        pa.field("stop", pa.int64()),
        pa.field("is_device", pa.bool_()),
        pa.field("op", pa.string()),  # of communication
        pa.field("tag", pa.string()),
        pa.field("bus_bytes", pa.int64()),  # null where the trace does not record sizes
    ]
)
CLASSES = (
    "cpu_bound",
    "data_loading",
    "gpu_communication_bound",
    "gpu_compute_bound",
    "gpu_graph_bound",  # CUDA graphs without the kernels inside
    "gpu_kernel_kernel_overhead",
    "gpu_kernel_launch_overhead",
    "gpu_memory_bound",  # copies and memsets
    "host_gap",  # between operators
    "sync_wait",  # from the end of work to the return of the call that waited for it
    "unexplained",  # the trace does not show what was waited for, as at the end of a step
)
# Classes of time within an event; the others are between events.
OWN = tuple(name for name in CLASSES if name.endswith("_bound") or name == "data_loading")
TYPES = {
    "operator": "critical_path_operator",
    "dependency": "critical_path_dependency",
    "launch": "critical_path_kernel_launch_delay",
    "kernel_kernel": "critical_path_kernel_kernel_delay",
    "sync": "critical_path_sync_dependency",
    "inferred": "critical_path_inferred_dependency",
    "unexplained": "critical_path_unexplained",
    "join": "critical_path_join",
}
_PLAIN = re.compile(r"(hip)?Mem(cpy|set)|dma")
# Columns of an edge's owner that determine the class of the edge.
FACTS = ("name", "kind", "stream", "is_device", "op")
TARGET_FACTS = ("is_device", "kind")
EventFact = Sequence[object]
# Returns the class of an edge by its kind, whether it leads to the device, its owner's facts,
# and regular expressions of events that load data.
EdgeClass = Callable[[str, bool, EventFact, Sequence[str]], str]
_MOST_STREAMS = 16  # with work on them; all pairs are compared
_NEAR = 4  # works of a stream that are candidates to wait for work launched before them
_PROMPT_NS = 10_000  # a start within this time after an end follows the end


class EventDescriptions(Protocol):
    """Describes the events of a graph: from one trace, several traces, or a saved table."""

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Return a row of the columns of `EVENT` for each of `rows`; row NONE is all null."""
        ...

    def ids(self, rows: Numbers) -> Ints:
        """Return the id of the event of each row: its position in the trace's file."""
        ...


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """The events of a trace."""

    trace: Trace

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Return a row of the columns of `EVENT` for each of `rows`; row NONE is all null."""
        at = pa.array(rows, mask=rows < 0)
        schema = pa.schema([EVENT.field(name) for name in columns])
        return pa.table({name: self._column(name, rows, at) for name in columns}).cast(schema)

    def _column(self, name: str, rows: Numbers, at: pa.Array) -> pa.Array | pa.ChunkedArray:
        """Return one column; `at` are the rows, null for NONE."""
        events, lanes = self.trace.events, self.trace.lanes
        match name:
            case "id":
                return pa.array(self.ids(rows), mask=rows < 0)
            case "kind":
                return pa.array(KINDS).take(events["kind"].take(at).cast(pa.int32()))
            case "process" | "thread" | "is_device":
                return lanes[name].take(events["lane"].take(at))
            case "stream":
                return self._stream(rows)
            case "op" | "tag" | "bus_bytes":
                return self._communication(name, rows)
            case _:
                return events[name].take(at)

    def ids(self, rows: Numbers) -> Ints:
        """Return the positions of these rows in the file, or the rows if they are unknown."""
        args = self.trace.arguments
        if "position" not in args.column_names or not args.num_rows:
            return rows.astype(np.int64)
        return filled(args["position"])[rows]

    def _stream(self, rows: Numbers) -> pa.Array:
        """Return the stream that each event runs on or acts on; null without one."""
        args = self.trace.arguments
        if "on_stream" not in args.column_names:
            stream = np.append(lane_streams(self.trace), NULL)[rows]
            return pa.array(stream, mask=stream == NULL)
        return args["on_stream"].take(pa.array(rows, mask=rows < 0))

    def _communication(self, name: str, rows: Numbers) -> pa.Array | pa.ChunkedArray:
        """Return a column of the communication of each row; null for rows without any."""
        comm = self.trace.comm
        place = np.full(self.trace.events.num_rows + 1, NONE, np.int32)
        place[comm["event"].to_numpy()] = np.arange(comm.num_rows)
        at = place[rows]
        if name == "bus_bytes":
            return comm[name].take(pa.array(at, mask=at < 0))
        labels = pa.array(OPS if name == "op" else TAGS)
        return labels.take(comm[name].take(pa.array(at, mask=at < 0)).cast(pa.int32()))


@dataclass(frozen=True, slots=True)
class SavedEvents:
    """Events that were saved: a table of `EVENT`, by row."""

    table: pa.Table

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Return a row of the columns of `EVENT` for each of `rows`; row NONE is all null."""
        return self.table.select(columns).take(pa.array(rows, mask=rows < 0))

    def ids(self, rows: Numbers) -> Ints:
        """Return the id of the event of each row, as it was saved."""
        return filled(self.table["id"])[rows]


def short_name(name: str) -> str:
    """Return a kernel's name without templates, arguments and return type, as HTA does."""
    if _PLAIN.match(name) or not ("<" in name or "(" in name):
        return name
    letters: list[str] = []
    for letter in name.replace("->", ""):
        opening = {">": "<", ")": "("}.get(letter)
        if opening is None:
            letters.append(letter)
        else:
            while letters and letters.pop() != opening:
                pass
    return "".join(letters).rpartition(" ")[2]


def short_names(names: pa.ChunkedArray) -> pa.Array:
    """Return the short name of each name of a column, see `short_name`."""
    encoded = names.combine_chunks().dictionary_encode()
    short = pa.array([short_name(name) for name in encoded.dictionary.to_pylist()], pa.string())
    return short.take(encoded.indices)


# Returns the path, or None if the graph has no valid one, and the slack of its edges, if known.
PathSearch = Callable[[Graph, EventDescriptions, Flags], tuple[LongestPath | None, Ints | None]]


def classes(
    edge_class: EdgeClass,
    kinds: NDArray[np.int8],
    owners: pa.Table,
    targets: pa.Table,
    loads: Sequence[str],
) -> pa.Array:
    """Return the class of each edge.

    Parameters
    ----------
    edge_class
        Classifies an edge; called once for edges with equal facts.
    kinds
        Kind of each edge.
    owners
        Table of the owner of each edge, with the columns `FACTS`.
    targets
        Table of the target event of each edge, with the columns `TARGET_FACTS`.
    loads
        Regular expressions of names of events that load data.

    """
    # No call is known that waited until the end of a step: what happens there is unknown.
    is_mark = pc.fill_null(pc.equal(targets["kind"], "annotation"), False).to_numpy()
    is_guess = is_mark & (kinds == EDGE_KIND["inferred"])
    kinds = np.where(is_guess, EDGE_KIND["unexplained"], kinds)
    facts = [owners[name] for name in FACTS]
    to_device = targets["is_device"]
    first, number = first_seen(kinds, *map(text_codes, (to_device, *facts)))
    names = [
        edge_class(
            EDGE_KINDS[kinds[k]],
            bool(to_device[k].as_py()),
            [column[k].as_py() for column in facts],
            loads,
        )
        for k in first.tolist()
    ]
    return pa.array(names, pa.string()).take(pa.array(number))


def _corrected_class(kind: str, on_device: bool, owner: EventFact, loads: Sequence[str]) -> str:
    """Return the class of an edge of the corrected rules: one of `CLASSES`."""
    if kind == "operator" or (kind == "dependency" and owner[0] is not None):
        return _owner_class(owner, loads)
    if kind == "join":
        return "gpu_communication_bound"
    if kind in ("sync", "inferred"):
        return "gpu_kernel_kernel_overhead" if on_device else "sync_wait"
    return {
        "dependency": "host_gap",
        "kernel_kernel": "gpu_kernel_kernel_overhead",
        "launch": "gpu_kernel_launch_overhead",
    }.get(kind, "unexplained")


def _owner_class(owner: EventFact, loads: Sequence[str]) -> str:
    """Return the class of an event, one of `CLASSES`.

    `owner` is (name, kind, stream, whether on the device, operation of a collective or None).
    `loads` are regular expressions for names of host events that load data; without any, the
    usual names count.
    """
    name, kind, _, is_device, op = owner
    if not is_device:
        is_load = any(is_match(text, str(name)) for text in loads or (LOADING.pattern,))
        return "data_loading" if is_load else "cpu_bound"
    if kind == "host_node":
        return "cpu_bound"
    if op is not None:
        return "gpu_communication_bound"
    if kind != "kernel":
        return "gpu_memory_bound"
    return "gpu_graph_bound" if name == WHOLE_GRAPH else "gpu_compute_bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """Search for the path in a graph, and meaning of its edges."""

    name: str  # in JSON and on the terminal
    search: PathSearch
    edge_class: EdgeClass
    edge_kinds: tuple[str, ...]  # that a graph may have, in the order of JSON
    # Whether each edge is a constraint that the measured times satisfy: then the path covers
    # the window, edges are in order of time, and the graph can be replayed.
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSource:
    """Rules, window and trace of a path."""

    rules: PathRules
    window: TimeRange
    path: str  # of the trace
    rank: int
    base: int = 0  # ns to add to the times in the file
    clipped: int = 0  # events of the window
    rest: int | None = None  # node of the end of its mark
    data_load: tuple[str, ...] = ()  # regular expressions of events that load data
    notes: tuple[str, ...] = ()
    is_host_run: bool = False  # whether the host computes and communicates, without a device
    is_replay: bool = False  # whether times are those of the dependencies of execution traces

    def noting(self, note: str) -> Self:
        """Return a copy with one more note, before all others."""
        return replace(self, notes=(note, *self.notes))


def _bound_path(
    graph: Graph, _: EventDescriptions, on_device: Flags
) -> tuple[LongestPath, Ints]:
    """Return the path that follows, backward from the last node, the last satisfied constraint.

    Also returns the slack of each edge of the path, in ns.
    """
    if not len(graph.event):
        return LongestPath(nodes=graph.event, edges=graph.source), np.empty(0, np.int64)
    last = len(graph.event) - 1
    edges, slack = graphs.binding(last, graph.incoming[0], graph.source, graph.time, on_device)
    return LongestPath.of(edges, graph.source, last), slack


CORRECTED = PathRules(
    name="corrected",
    search=_bound_path,
    edge_class=_corrected_class,
    edge_kinds=EDGE_KINDS,
    is_exact=True,
)


@dataclass(frozen=True, kw_only=True)
class DataDependencies:
    """Data dependencies between the operators of a step."""

    operators: pa.Table  # of OPERATORS: operators that call no other
    subgraphs: pa.Table  # of SUBGRAPHS: outermost operators that call several
    matched: int  # operators of both the window and the execution trace
    in_window: int  # operators of the window
    traced: int  # operators of the execution trace
    joined_by: str  # how they were matched
    span_ns: int  # measured time from the first start to the last end
    bound_ns: int  # this time with unlimited threads and streams

    def movable(self, count: int = 10) -> pa.Table:
        """Return operators on the path that could start earlier, largest difference first.

        `count` is the largest number of rows; times are ns.
        """
        table = self.operators
        readers = pc.and_(table["on_path"], pc.greater(table["producers"], 0))
        order = [("earlier_ns", "descending"), ("event", "ascending")]
        return table.filter(readers).sort_by(order).slice(0, count)

    def shortening(self, count: int = 10) -> pa.Table:
        """Return the `count` operators whose reordering shortens the step most, as rows.

        The rows of the table `operators` are sorted by `shortens_ns`, longest first; operators
        that shorten nothing are left out.
        """
        table = self.operators.filter(pc.greater(self.operators["shortens_ns"], 0))
        order = [("shortens_ns", "descending"), ("event", "ascending")]
        return table.sort_by(order).slice(0, count)

    def movable_subgraphs(self, count: int = 10) -> pa.Table:
        """Return outermost operators with leaves on the path, largest effect first.

        `count` is the largest number of rows; times are ns.
        """
        return self.subgraphs.slice(0, count)

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `data` in the JSON document of a critical path."""
        return {
            "joined": {
                "by": self.joined_by,
                "operators": self.matched,
                "of_window": self.in_window,
                "of_execution_trace": self.traced,
            },
            "span_ns": self.span_ns,
            "bound_ns": self.bound_ns,
            "operators": self.movable().to_pylist(),
            "shortening": self.shortening().to_pylist(),
            "subgraphs": self.movable_subgraphs().to_pylist(),
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the tables `operators` and `subgraphs`; times in ns."""
        return {"operators": self.operators, "subgraphs": self.subgraphs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """A graph whose edges are constraints that the measured times satisfy."""

    graph: Graph
    on_device: Flags  # by node
    left_out: dict[str, int]  # number of contradicted constraints by kind
    rest: int | None  # node of the end of the step's mark


def build(trace: Trace, window: TimeRange, data_load: Sequence[str] = ()) -> Constrained:
    """Build the graph of a window; its events are rows of the trace.

    Parameters
    ----------
    trace
        The rank, with all events.
    window
        The window.
    data_load
        Regular expressions of names of events that load data, see `Selected`.

    """
    selected = Selected.of(trace, window, data_load)
    rows = selected.rows
    nodes = _nodes(selected)
    lanes = _lanes(selected, trace)
    guessed = () if are_known(selected.syncs) else stream_waits(selected)
    waits, role, goal = waits_of(selected, guessed)
    locked = rows.matching(LOCKING_CALL) & (rows.kind == KIND["runtime"])
    packed = kernels.ConstraintRows(
        rows.start,
        rows.stop,
        rows.lane,
        selected.is_device,
        locked,
        selected.call,
        role,
        goal,
        selected.nodes.is_known,
        selected.nodes.is_unordered,
    )
    edges = graphs.room(_most_edges(nodes, packed, lanes, waits))
    count, left_out = kernels.constrain(nodes, packed, lanes, waits, edges)
    on_device = selected.is_device[nodes.event]
    # Convert rows of the window to rows of the trace, in place; NONE stays NONE.
    number = np.append(rows.row, NONE).astype(np.int32)
    for column in (nodes.event, edges.owner[:count]):
        np.take(number, column, out=column, mode="wrap")
    used = graphs.selected(edges, slice(count))._asdict()
    return Constrained(
        graph=Graph(event=nodes.event, time=nodes.time, is_end=nodes.is_end, **used),
        on_device=on_device,
        rest=None if selected.mark is None else int(nodes.last[selected.mark]),
        left_out={name: int(k) for name, k in zip(EDGE_KINDS, left_out, strict=True) if k},
    )


def _nodes(selected: Selected) -> kernels.Nodes:
    """Return the nodes of a window in the order of their times."""
    rows, n = selected.rows, len(selected.rows)
    # Order of ends at the same time: work first, then the call that began last.
    tie = np.arange(2 * n, n, -1)
    tie[selected.is_device] = np.flatnonzero(selected.is_device)
    ends = np.argsort(rows.stop, kind="stable")
    graphs.settle(ends, rows.stop, tie)
    return kernels.nodes_of(rows.start, rows.stop, ends)


def _most_edges(
    nodes: kernels.Nodes,
    rows: kernels.ConstraintRows,
    lanes: kernels.Lanes,
    waits: kernels.Waits,
) -> int:
    """Return a close upper bound of the number of edges, which need most of the memory.

    A node of the host has an edge on its thread, and perhaps one from another thread. Work has
    an edge for its time, and others from the work before, its launch, other streams, and the
    other work of its CUDA graph.
    """
    work = int(rows.is_device.sum())
    host = len(rows.start) - work
    handed = int(kernels.switches(nodes.event, rows.lane, lanes))
    launched = np.bincount(rows.call[rows.is_device] + 1)[1:]
    of_graphs = int(launched[launched > 1].sum())
    streams = int((lanes.device >= 0).sum())
    for_device = int((rows.role == kernels.FOR_DEVICE).sum()) * streams
    calls = int(rows.is_locked.sum() + (rows.role != kernels.NO_ROLE).sum())
    guessed = 0 if waits.are_known else work
    of_work = 3 * work + guessed + of_graphs
    return 2 * host + handed + calls + for_device + of_work + len(waits.source)


def _lanes(selected: Selected, trace: Trace) -> kernels.Lanes:
    """Return process, device, and forward and backward thread of each lane."""
    table = trace.lanes
    process = text_codes(table["process"]).astype(np.int32)
    device = filled(table["device"], NONE).astype(np.int32)
    is_device = table["is_device"].to_numpy()
    device = np.where(is_device, np.maximum(device, 0), NONE).astype(np.int32)
    forward = np.full(len(process), NONE, np.int32)
    backward = np.full(len(process), NONE, np.int32)
    for behind, before in _forward_threads(selected, trace).items():
        forward[behind], backward[before] = before, behind
    return kernels.Lanes(process, device, forward, backward)


def _forward_threads(selected: Selected, trace: Trace) -> dict[int, int]:
    """Return the forward lane of each backward lane, by names or by sequence numbers."""
    rows = selected.rows
    is_op = rows.kind == KIND["cpu_op"]
    backward, forward = (
        np.unique(rows.lane[is_op & rows.containing(text)]).tolist()
        for text in ("autograd", "forward")
    )
    if len(backward) == len(forward) == 1 and backward != forward:
        return {backward[0]: forward[0]}
    args = trace.arguments
    if not {"sequence", "forward_thread"} <= set(args.column_names):
        return {}
    ops = np.flatnonzero(is_op)
    sequence = filled(args["sequence"])[rows.row[ops]]
    has_number = sequence != NULL
    ops, sequence = ops[has_number], sequence[has_number]
    thread, lane = filled(args["forward_thread"], 0)[rows.row[ops]], rows.lane[ops]
    first, again = np.flatnonzero(thread == 0), np.flatnonzero(thread > 0)
    if not len(first) or not len(again):
        return {}
    first = first[np.argsort(sequence[first], kind="stable")]
    at = lookup(sequence[first], sequence[again])
    joined = at >= 0
    lanes = rows.lanes.num_rows
    key = lane[again[joined]].astype(np.int64) * lanes + lane[first[at[joined]]]
    counts = np.bincount(key, minlength=lanes * lanes)
    often = np.argsort(counts, kind="stable")
    pairs = [divmod(k, lanes) for k in often[counts[often] > 0].tolist()]
    return {behind: before for behind, before in pairs if behind != before}


@dataclass(frozen=True, slots=True)
class _Stream:
    """The work on a stream in the order of its launches, with one value per work."""

    row: Ints
    launch: Ints  # row of the call
    start: Ints  # ns
    stop: Ints
    before: Ints  # end of the work before on the stream
    name: Ints  # code

    @classmethod
    def of(cls, selected: Selected, work: Ints) -> Self:
        """Return the columns of `work`, rows of one stream."""
        rows, launch = selected.rows, selected.call[work].astype(np.int64)
        order = np.argsort(launch, kind="stable")
        row = work[order]
        stop = rows.stop[row]
        before = np.concatenate([np.full(1, np.iinfo(np.int64).min), stop])[:-1]
        return cls(
            row, launch[order], rows.start[row], stop, before, rows.name[row].astype(np.int64)
        )


def stream_waits(selected: Selected) -> tuple[Ints, Ints]:
    """Return pairs of rows: work, and work on another stream that it seems to wait for.

    A stream waits for another one if it continues right after most of the other's work. Then
    the first work on it that never begins before that end, in any of its instances, waits for
    it. Pairs are left out if the measured times already show the wait: there the end is what
    determines the start.
    """
    work = np.flatnonzero(selected.is_device & (selected.call >= 0))
    lanes = np.unique(selected.rows.lane[work])
    if len(lanes) > _MOST_STREAMS:
        return work[:0], work[:0]
    device = filled(selected.rows.lanes["device"], NONE)
    streams = {
        lane: _Stream.of(selected, work[selected.rows.lane[work] == lane])
        for lane in lanes.tolist()
    }
    pairs = [
        _pairs(streams[a], streams[b])
        for a, b in permutations(streams, 2)
        if device[a] == device[b]
    ]
    waiting, source, before = (
        (np.concatenate([work[:0], *columns]) for columns in zip(*pairs, strict=True))
        if pairs
        else (work[:0],) * 3
    )
    keep = _is_hidden(selected, waiting, source, before)
    return waiting[keep], source[keep]


def _is_hidden(selected: Selected, waiting: Ints, source: Ints, before: Ints) -> Flags:
    """Return which waits cannot have determined the start of the work that waited.

    `waiting` and `source` are the rows of each pair, `before` the end of the work before on the
    stream, ns.
    """
    rows = selected.rows
    stop = rows.stop[source]
    latest = np.zeros(len(rows), np.int64)
    np.maximum.at(latest, waiting, stop)
    delay = rows.start[waiting] - rows.start[selected.call[waiting]]
    hidden: Flags = (stop < before) | ((stop < latest[waiting]) & (delay >= LAUNCH_NS))
    return hidden


def _pairs(stream: _Stream, other: _Stream) -> tuple[Ints, Ints, Ints]:
    """Return the waits of a stream for another one, and the ends of the work before."""
    last = np.searchsorted(other.launch, stream.launch) - 1
    first = np.searchsorted(stream.launch, other.launch, "right")
    distance = np.arange(len(last)) - first[last]
    at = np.flatnonzero((last >= 0) & (distance < _NEAR))
    source, distance = last[at], distance[at]
    end, start = other.stop[source], stream.start[at]
    is_after = end <= start
    prompt = is_after & (end > stream.before[at]) & (start - end <= _PROMPT_NS)
    empty = at[:0]
    if not len(at) or 2 * len(np.unique(source[prompt])) < len(np.unique(source)):
        return empty, empty, empty
    _, kind = alike(stream.name[at], other.name[source], distance)
    is_regular = np.bincount(kind[~is_after], minlength=len(kind)) == 0
    at, source = at[is_regular[kind]], source[is_regular[kind]]
    # The first one that waits is enough: later work follows it.
    source, where = np.unique(source, return_index=True)
    at = at[where]
    return stream.row[at], other.row[source], stream.before[at]
