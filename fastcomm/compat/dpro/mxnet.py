"""Read graphs and traces of MXNet, with standard names of operations.

Operations that are not in the graph are named by their position in the trace. After the last
forward operation come outputs (OUTPUT0); after the last backward operation come the
computations of the optimizer (UPDATE_CAL) and its updates (UPDATE_0, UPDATE_1, ...), counted
anew in each step. Updates wait for UPDATE_CAL, not for each other. Events that begin after the
last update belong to an incomplete step, and are dropped.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from fastcomm.compat.dpro import job
from fastcomm.compat.dpro.job import (
    BARRIER,
    LocalGraph,
    NamePair,
    Parameter,
    ParameterDict,
    merged,
)
from fastcomm.compat.dpro.uniform import Event, ns, read_events, read_text
from fastcomm.errors import TraceFileError

_NAME = re.compile(r"name=([^;]*);")
_OUTPUT = re.compile(r"\s*output\[\d+\]=(.*)\(\d+\)")
_OP = re.compile(r"Op:.*?, Name=(.*)")
_ARG = re.compile(r"\s*arg\[\d+\]=(.*)\(\d+\)")
_UPDATE = re.compile(r"UPDATE_\d+")
_INPUTS = ("data", "label")
_CALCULATIONS = frozenset({"dot", "add_n"})


def name_of(raw: str) -> str:
    """Return the standard name of an operation of MXNet's profiler."""
    match = _NAME.search(raw)
    head, backward, _ = (match[1] if match else raw).partition("_backward")
    return ("BW." if backward else "FW.") + _plain(head)


def _plain(name: str) -> str:
    return name.partition("_fwd")[0].replace(".", "_")


def parameters_of(listed: tuple[Parameter, ...], aggregate: int = 0) -> ParameterDict:
    """Return the tensors and the updates that MXNet runs for them.

    Updates are numbered from the last tensor to the first.

    Parameters
    ----------
    listed
        All tensors, by index.
    aggregate
        Number of tensors that one update changes; 0 stands for 1.

    """
    updates = ((i, i // aggregate if aggregate > 0 else i) for i in range(len(listed)))
    return ParameterDict(
        parameters=listed,
        update_of={len(listed) - 1 - i: (f"UPDATE_{update}",) for i, update in updates},
    )


def graph_of(path: Path, parameters: ParameterDict) -> LocalGraph:
    """Read a graph of MXNet; its updates wait for all communication.

    Parameters
    ----------
    path
        A GML file, or the text that nnvm prints of a symbol.
    parameters
        The tensors and their updates.

    Raises
    ------
    TraceFileError
        If the graph has no forward operation.

    """
    if path.suffix == ".gml":
        edges = [
            (_label(a, parameters), _label(b, parameters))
            for a, b in job.read_graph(path)[1]
            if "UPDATE" not in (a, b)
        ]
    else:
        edges = list(_symbol(path, parameters))
    if not any(a.startswith("FW.") for a, _ in edges):
        raise TraceFileError(f"{path}: no forward operation with an edge in the graph")
    edges += [(f"Comm.{tensor}", BARRIER) for tensor in parameters.update_of]
    for update in dict.fromkeys(
        op for updates in parameters.update_of.values() for op in updates
    ):
        edges += [(BARRIER, update), (update, "END")]
    return LocalGraph.of((end for edge in edges for end in edge), edges)


def _label(label: str, parameters: ParameterDict) -> str:
    """Return the standard name of a node; communication is named by the id of its tensor."""
    cat, dot, name = label.partition(".")
    if cat == "Comm":
        return f"Comm.{parameters.ids.get(name, name)}"
    return f"{cat}.{_plain(name)}" if dot and cat in {"FW", "BW"} else label


def _symbol(path: Path, parameters: ParameterDict) -> Iterator[NamePair]:
    """Yield the edges in the text that nnvm prints of a symbol."""
    variables: set[str] = set()
    outputs = 0
    op = ""
    for line in read_text(path).splitlines():
        if line.startswith("Variable:"):
            variables.add(line.removeprefix("Variable:").strip())
        elif match := _OUTPUT.match(line):
            name = _plain(match[1])
            yield f"FW.{name}", f"OUTPUT{outputs}"
            yield f"OUTPUT{outputs}", f"BW.{name}"
            outputs += 1
        elif match := _OP.match(line):
            op = _plain(match[1])
        elif match := _ARG.match(line):
            yield from _argument(op, match[1], match[1] in variables, parameters)


def _argument(
    op: str, arg: str, is_variable: bool, parameters: ParameterDict
) -> Iterator[NamePair]:
    """Yield the edges that an input of an operation adds to the data-flow graph.

    `op` is the name of the operation, `arg` that of the input: a parameter, another operation,
    or (with `is_variable`) data. Other variables, such as moving means, add none.
    """
    if arg in parameters.ids:
        yield f"BW.{op}", f"Comm.{parameters.ids[arg]}"
    elif not is_variable:
        yield f"FW.{_plain(arg)}", f"FW.{op}"
        yield f"BW.{op}", f"BW.{_plain(arg)}"
    elif any(label in arg for label in _INPUTS):
        yield f"I/O_{arg}", f"FW.{op}"


class _Op(NamedTuple):
    """One operation of MXNet's profiler; times are ns."""

    raw: str
    name: str  # standard name
    start: int
    stop: int
    thread: Any


def _operations(rows: Sequence[Any]) -> list[_Op]:
    """Return complete events, and begins with their ends, of the first process, by start."""
    operations, pid = [], None
    for row, after in zip_longest(rows, rows[1:]):
        if row.get("ph") == "X" and "dur" in row:
            stop = ns(row["ts"]) + ns(row["dur"])
        elif row.get("ph") == "B" and after is not None and after.get("ph") == "E":
            stop = ns(after["ts"])
        else:
            continue
        pid = row.get("pid") if pid is None else pid
        if row.get("pid") == pid:
            raw = str(row["name"])
            operations.append(_Op(raw, name_of(raw), ns(row["ts"]), stop, row.get("tid")))
    return sorted(operations, key=lambda op: op.start)


@dataclass(slots=True)
class _Sequence:
    """Operations with standard names, and the state of the reader that names them."""

    last_forward: str  # operation of the graph
    last_backward: str
    named: list[_Op] = field(default_factory=list)
    previous: str = ""  # last operation of the graph so far
    outputs: list[_Op] = field(default_factory=list)
    sums: list[_Op] = field(default_factory=list)  # computations of the optimizer
    updates: int = 0

    def add_node(self, op: _Op) -> None:
        """Add an operation of the graph, and before it the outputs since the last one."""
        if self.outputs and op.name != self.previous:
            self.named.append(_merged("OUTPUT0", self.outputs))
        self.outputs, self.sums, self.updates, self.previous = [], [], 0, op.name
        self.named.append(op)

    def add_other(self, op: _Op) -> None:
        """Add an operation that is not in the graph, and name it by the one before it."""
        if self.previous == self.last_forward:
            self.outputs.append(op)
        elif self.previous == self.last_backward and "update" in op.raw.lower():
            if not self.updates:
                empty = [op._replace(stop=op.start)]
                self.named.append(_merged(BARRIER, self.sums or empty))
            self.named.append(op._replace(name=f"UPDATE_{self.updates}"))
            self.updates += 1
        elif self.previous == self.last_backward and op.raw in _CALCULATIONS:
            self.sums.append(op)


def _merged(name: str, ops: Sequence[_Op]) -> _Op:
    """Merge operations into one, from the first start to the last end."""
    return ops[0]._replace(name=name, stop=max(op.stop for op in ops))


def events_of(path: Path, pid: str, graph: LocalGraph, *, merge: bool = True) -> list[Event]:
    """Read the operations of one rank by start, without those of an incomplete last step.

    Parameters
    ----------
    path
        A trace of MXNet's profiler.
    pid
        Process of the rank.
    graph
        Standard names and dependencies.
    merge
        Merge consecutive events of one name.

    Raises
    ------
    TraceFileError
        If the trace has fewer than two steps.

    """
    ops = _operations(read_events(path))
    nodes = {name for name in graph.nodes if name.startswith(("FW.", "BW."))}
    sequence = _Sequence(*_last_operations([op.name for op in ops if op.name in nodes], path))
    for op in ops:
        if op.name in nodes:
            sequence.add_node(op)
        elif sequence.previous:
            sequence.add_other(op)
    lanes: dict[Any, str] = {}
    events = []
    for op in sorted(sequence.named, key=lambda op: op.start):
        lane = lanes.setdefault(op.thread, f"operator{len(lanes)}")
        times = op.start, op.stop - op.start
        events.append(graph.event(op.name, pid, times, lane))
    ends = [event.start + event.dur for event in events if _UPDATE.fullmatch(event.name)]
    events = [event for event in events if not ends or event.start < max(ends)]
    return merged(events) if merge else events


def _last_operations(names: Sequence[str], path: Path) -> tuple[str, str]:
    """Return the last forward and the last backward operation of the first step."""

    def next_(kind: str, begin: int) -> int:
        matches = (i for i in range(begin, len(names)) if names[i].startswith(kind))
        return next(matches, len(names))

    backward = next_("BW.", next_("FW.", 0))
    again = next_("FW.", backward)
    if backward == len(names):
        raise TraceFileError(f"{path}: no backward operation of the graph after a forward one")
    if again == len(names):
        raise TraceFileError(
            f"{path}: the trace has only one step, whose end is unknown. Profile two steps or "
            "more"
        )
    return names[backward - 1], names[again - 1]
