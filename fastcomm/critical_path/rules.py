"""Rules for the graph of a critical path: its events, the classes of its edges, its search.

`CORRECTED` are fastcomm's own rules; `compat` has rules that reproduce other tools.
`DataDependencies` is the result of `data_dependencies`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.critical_path.window import TimeRange
from fastcomm.graph import EDGE_KINDS, Graph, LongestPath
from fastcomm.idle.causes import LOADING
from fastcomm.regexes import is_match
from fastcomm.trace.columns import filled, first_seen, text_codes
from fastcomm.trace.events import lane_streams
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.schema import KINDS, OPS
from fastcomm.trace.trace import Trace
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints, Numbers

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
        args = self.trace.args
        if args is None or "position" not in args.column_names or not args.num_rows:
            return rows.astype(np.int64)
        return filled(args["position"])[rows]

    def _stream(self, rows: Numbers) -> pa.Array:
        """Return the stream that each event runs on or acts on; null without one."""
        args = self.trace.args
        if args is None or "on_stream" not in args.column_names:
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


CLASSES = (
    "cpu_bound",
    "data_loading",
    "gpu_communication_bound",
    "gpu_compute_bound",
    "gpu_kernel_kernel_overhead",
    "gpu_kernel_launch_overhead",
    "gpu_memory_bound",  # copies and memsets
    "host_gap",  # between operators
    "sync_wait",  # from the end of work to the return of the call that waited for it
    "unexplained",  # the trace does not show what was waited for
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


# Columns of an edge's owner that determine the class of the edge.
FACTS = ("name", "kind", "stream", "is_device", "op")
EventFact = Sequence[object]
# Returns the path, or None if the graph has no valid one, and the slack of its edges, if known.
PathSearch = Callable[[Graph, EventDescriptions, Flags], tuple[LongestPath | None, Ints | None]]
# Returns the class of an edge by its kind, whether it leads to the device, its owner's facts,
# and regular expressions of events that load data.
EdgeClass = Callable[[str, bool, EventFact, Sequence[str]], str]


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
        Table of the target event of each edge, with the column `is_device`.
    loads
        Regular expressions of names of events that load data.

    """
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
    return "gpu_compute_bound" if kind == "kernel" else "gpu_memory_bound"


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
