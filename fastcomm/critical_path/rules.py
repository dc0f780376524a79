"""What the graph of a critical path means: its events, the classes of its edges, its search.

An analysis makes a graph and says here how to read it. `CORRECTED` are the rules of this
package; whoever reproduces another tool brings rules of its own. `DataDependencies` is what
operators of a step wait for if only data counts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.graph import EDGE_KINDS, Graph, LongestPath
from fastcomm.trace.columns import filled
from fastcomm.trace.events import lane_streams
from fastcomm.trace.schema import KINDS, OPS, TAGS
from fastcomm.trace.trace import Trace
from fastcomm_kernels import graph as graphs
from fastcomm_kernels.arrays import NULL, Flags, Ints
from fastcomm_kernels.graph import Numbers

# The columns of descriptions of events.
EVENT = pa.schema(
    [
        pa.field("id", pa.int64()),  # its place in the file
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
    ]
)


class EventDescriptions(Protocol):
    """What describes the events of a graph: a trace, several, or a saved table."""

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Return columns of `EVENT` of the events of these rows; row -1 is all null."""
        ...

    def ids(self, rows: Numbers) -> Ints:
        """Return the ids of the events of these rows."""
        ...


@dataclass(frozen=True, slots=True)
class TraceEvents:
    """The events of a trace."""

    trace: Trace

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Return columns of `EVENT` of the events of these rows; row -1 is all null."""
        at = pa.array(rows, mask=rows < 0)
        wanted = pa.schema([EVENT.field(name) for name in columns])
        return pa.table({name: self._column(name, rows, at) for name in columns}).cast(wanted)

    def _column(self, name: str, rows: Numbers, at: pa.Array) -> pa.Array | pa.ChunkedArray:
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
            case "op" | "tag":
                return self._communication(name, rows)
            case _:
                return events[name].take(at)

    def ids(self, rows: Numbers) -> Ints:
        """The places of these rows in the file; of an unknown place the row itself."""
        args = self.trace.args
        if args is None or "position" not in args.column_names or not args.num_rows:
            return rows.astype(np.int64)
        return filled(args["position"])[rows]

    def _stream(self, rows: Numbers) -> pa.Array:
        args = self.trace.args
        if args is None or "on_stream" not in args.column_names:
            stream = np.append(lane_streams(self.trace), NULL)[rows]
            return pa.array(stream, mask=stream == NULL)
        return args["on_stream"].take(pa.array(rows, mask=rows < 0))

    def _communication(self, name: str, rows: Numbers) -> pa.Array | pa.ChunkedArray:
        """The operation or the tag of each row; null where it does not communicate."""
        comm = self.trace.comm
        place = np.full(self.trace.events.num_rows + 1, -1, np.int32)
        place[comm["event"].to_numpy()] = np.arange(comm.num_rows)
        at = place[rows]
        words = pa.array(OPS if name == "op" else TAGS)
        return words.take(comm[name].take(pa.array(at, mask=at < 0)).cast(pa.int32()))


@dataclass(frozen=True, slots=True)
class SavedEvents:
    """Events that were saved: a table of `EVENT`, by row."""

    table: pa.Table

    def describe(self, rows: Numbers, columns: Sequence[str] = EVENT.names) -> pa.Table:
        """Return columns of `EVENT` of the events of these rows; row -1 is all null."""
        return self.table.select(columns).take(pa.array(rows, mask=rows < 0))

    def ids(self, rows: Numbers) -> Ints:
        """Return the ids of the events of these rows."""
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
    "unexplained",  # nothing in the trace says what was waited for
)

# What an event does itself; the rest is between events.
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
    kept: list[str] = []
    for letter in name.replace("->", ""):
        opening = {">": "<", ")": "("}.get(letter)
        if opening is None:
            kept.append(letter)
        else:
            while kept and kept.pop() != opening:
                pass
    return "".join(kept).rpartition(" ")[2]


def short_names(names: pa.ChunkedArray) -> pa.Array:
    """Return the short names of a column; each name is shortened once."""
    encoded = names.combine_chunks().dictionary_encode()
    short = pa.array([short_name(name) for name in encoded.dictionary.to_pylist()], pa.string())
    return short.take(encoded.indices)


# What is asked of the owner of an edge.
FACTS = ("name", "kind", "stream", "is_device", "op")
Fact = Sequence[object]
# The path, or None where the graph has no valid one; the slack of its edges, if it is known.
Search = Callable[[Graph, EventDescriptions, Flags], tuple[LongestPath | None, Ints | None]]
# The class of an edge: from its kind, whether it leads to the device, its owner, and what
# loads data.
EdgeClass = Callable[[str, bool, Fact, Sequence[str]], str]


def classes(
    edge_class: EdgeClass,
    kinds: NDArray[np.int8],
    owners: pa.Table,
    targets: pa.Table,
    loads: Sequence[str],
) -> pa.Array:
    """Return the class of each edge, asking `edge_class` once for edges that are equal."""
    facts = [owners[name].combine_chunks() for name in FACTS]
    to_device = targets["is_device"].combine_chunks()
    # Equal edges are asked about once.
    number = kinds.astype(np.int64)
    for column in (to_device, *facts):
        encoded = column.dictionary_encode()
        code = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy()
        number = _numbered(number * (len(encoded.dictionary) + 1) + code)
    first = np.empty(int(number.max(initial=-1)) + 1, np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]
    found = [
        edge_class(
            EDGE_KINDS[kinds[k]],
            bool(to_device[k].as_py()),
            [column[k].as_py() for column in facts],
            loads,
        )
        for k in first.tolist()
    ]
    return pa.array(found, pa.string()).take(pa.array(number))


def _numbered(key: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number keys from 0 on, in order of their first appearance."""
    found: NDArray[np.int64] = pa.array(key).dictionary_encode().indices.to_numpy()
    return found.astype(np.int64)


def _corrected_class(kind: str, on_device: bool, owner: Fact, loads: Sequence[str]) -> str:
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


def _owner_class(owner: Fact, loads: Sequence[str]) -> str:
    name, kind, _, is_device, op = owner
    if not is_device:
        is_load = any(re.search(text, str(name)) for text in loads)
        return "data_loading" if is_load else "cpu_bound"
    if op is not None:
        return "gpu_communication_bound"
    return "gpu_compute_bound" if kind == "kernel" else "gpu_memory_bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """How a graph is searched and read."""

    name: str  # in JSON and on the terminal
    search: Search
    edge_class: EdgeClass
    edge_kinds: tuple[str, ...]  # that a graph may have, as JSON lists them
    # Each edge is a constraint that the times confirm: the path tiles the window, edges are in
    # order of time, and the graph can be replayed.
    is_exact: bool


def _bound_path(
    graph: Graph, _: EventDescriptions, on_device: Flags
) -> tuple[LongestPath, Ints]:
    """Follow from the last node backwards the constraint that was met last; with its slack."""
    if not len(graph.event):
        return LongestPath(nodes=graph.event, edges=graph.source), np.empty(0, np.int64)
    last = len(graph.event) - 1
    edges, slack = graphs.binding(last, graph.into[0], graph.source, graph.time, on_device)
    nodes = np.append(graph.source[edges], np.int32(last))
    return LongestPath(nodes=nodes, edges=edges), slack


CORRECTED = PathRules(
    name="corrected",
    search=_bound_path,
    edge_class=_corrected_class,
    edge_kinds=EDGE_KINDS,
    is_exact=True,
)


@dataclass(frozen=True, kw_only=True)
class DataDependencies:
    """What a step's operators really wait for."""

    operators: pa.Table  # of OPERATORS: the leaves of the window
    subgraphs: pa.Table  # of SUBGRAPHS: calls that hold several
    known: int  # operators that the window and the execution trace have in common
    asked: int  # operators of the window
    traced: int  # operators of the execution trace
    joined_by: str
    span_ns: int  # of these operators, as measured
    bound_ns: int  # the same with unlimited threads and streams

    def movable(self, count: int = 10) -> pa.Table:
        """The operators on the path, those first that could start earliest."""
        table = self.operators
        readers = pc.and_(table["on_path"], pc.greater(table["producers"], 0))
        order = [("earlier_ns", "descending"), ("event", "ascending")]
        return table.filter(readers).sort_by(order).slice(0, count)

    def shortening(self, count: int = 10) -> pa.Table:
        """The operators whose reordering shortens the step, those first that do so most."""
        table = self.operators.filter(pc.greater(self.operators["shortens_ns"], 0))
        order = [("shortens_ns", "descending"), ("event", "ascending")]
        return table.sort_by(order).slice(0, count)

    def movable_subgraphs(self, count: int = 10) -> pa.Table:
        """The calls that hold operators on the path, those first that shorten the step most."""
        return self.subgraphs.slice(0, count)

    def to_dict(self) -> dict[str, Any]:
        """Return the dependencies as they stand under `data` in the JSON of a critical path."""
        return {
            "joined": {
                "by": self.joined_by,
                "operators": self.known,
                "of_window": self.asked,
                "of_execution_trace": self.traced,
            },
            "span_ns": self.span_ns,
            "bound_ns": self.bound_ns,
            "operators": self.movable().to_pylist(),
            "shortening": self.shortening().to_pylist(),
            "subgraphs": self.movable_subgraphs().to_pylist(),
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return the operators, and the calls that hold them."""
        return {"operators": self.operators, "subgraphs": self.subgraphs}
