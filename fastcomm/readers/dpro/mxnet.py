"""MXNet: its symbol becomes the data-flow graph, its profiler's events become uniform ones.

What the trace has between the graph's operations is told by its place: behind the last forward
operation the outputs (OUTPUT0), behind the last backward one what the optimizer computes
(UPDATE_CAL) and its updates (UPDATE_0, UPDATE_1, ...), counted anew in each step. Updates wait
for UPDATE_CAL and not for each other. What begins after the last update is of a step that the
trace cuts, and does not count.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro import dataflow
from fastcomm.readers.dpro.dataflow import BARRIER, Edge, LocalGraph, merged
from fastcomm.readers.dpro.parameters import Parameter, ParameterDict
from fastcomm.readers.dpro.uniform import Event, ns, read_json

_NAME = re.compile(r"name=([^;]*);")
_OUTPUT = re.compile(r"\s*output\[\d+\]=(.*)\(\d+\)")
_OP = re.compile(r"Op:.*?, Name=(.*)")
_ARG = re.compile(r"\s*arg\[\d+\]=(.*)\(\d+\)")
_UPDATE = re.compile(r"UPDATE_\d+")
_INPUTS = ("data", "label")
_CALCULATIONS = frozenset({"dot", "add_n"})


def standard(raw: str) -> str:
    """The standard name of an operation of the profiler."""
    found = _NAME.search(raw)
    head, backward, _ = (found[1] if found else raw).partition("_backward")
    return ("BW." if backward else "FW.") + _plain(head)


def _plain(name: str) -> str:
    return name.partition("_fwd")[0].replace(".", "_")


def parameters(listed: tuple[Parameter, ...], aggregate: int = 0) -> ParameterDict:
    """Tensors are updated from the last to the first, `aggregate` at once, 0 for one by one."""
    updates = tensor2update(len(listed), aggregate)
    return ParameterDict(
        parameters=listed,
        update_of={tensor: (f"UPDATE_{i}",) for tensor, i in updates.items()},
    )


def tensor2update(count: int, aggregate: int = 0) -> dict[int, int]:
    """Which update consumes each tensor."""
    return {count - 1 - i: i // aggregate if aggregate > 0 else i for i in range(count)}


def local_graph(path: Path, known: ParameterDict) -> LocalGraph:
    """The graph in a GML file, or in the text of a symbol; updates follow all communication."""
    if path.suffix == ".gml":
        edges = [
            (_relabel(a, known), _relabel(b, known))
            for a, b in dataflow.read(path)[1]
            if "UPDATE" not in (a, b)
        ]
    else:
        edges = list(_symbol(path, known))
    if not any(a.startswith("FW.") for a, _ in edges):
        raise TraceFileError(f"{path}: no forward operation with an edge in the graph")
    edges += [(f"Comm.{tensor}", BARRIER) for tensor in known.update_of]
    for update in dict.fromkeys(each for own in known.update_of.values() for each in own):
        edges += [(BARRIER, update), (update, "END")]
    return LocalGraph.of((end for edge in edges for end in edge), edges)


def _relabel(label: str, known: ParameterDict) -> str:
    """The standard name of a node: communication by the id of its tensor."""
    cat, dot, rest = label.partition(".")
    if cat == "Comm":
        return f"Comm.{known.ids.get(rest, rest)}"
    return f"{cat}.{_plain(rest)}" if dot and cat in {"FW", "BW"} else label


def _symbol(path: Path, known: ParameterDict) -> Iterator[Edge]:
    """Edges from the text that nnvm prints of a symbol: operations, each below its inputs."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: {error}") from error
    variables: set[str] = set()
    outputs = 0
    op = ""
    for line in lines:
        if line.startswith("Variable:"):
            variables.add(line.removeprefix("Variable:").strip())
        elif found := _OUTPUT.match(line):
            name = _plain(found[1])
            yield f"FW.{name}", f"OUTPUT{outputs}"
            yield f"OUTPUT{outputs}", f"BW.{name}"
            outputs += 1
        elif found := _OP.match(line):
            op = _plain(found[1])
        elif found := _ARG.match(line):
            yield from _argument(op, found[1], found[1] in variables, known)


def _argument(op: str, arg: str, variable: bool, known: ParameterDict) -> Iterator[Edge]:
    """Edges of one input; states of the operation, such as moving means, have none."""
    if arg in known.ids:
        yield f"BW.{op}", f"Comm.{known.ids[arg]}"
    elif not variable:
        yield f"FW.{_plain(arg)}", f"FW.{op}"
        yield f"BW.{op}", f"BW.{_plain(arg)}"
    elif any(word in arg for word in _INPUTS):
        yield f"I/O_{arg}", f"FW.{op}"


class _Op(NamedTuple):
    """One operation of the profiler, under both names."""

    raw: str
    name: str
    start: int
    stop: int
    thread: Any


def _operations(rows: Sequence[Any]) -> list[_Op]:
    """Complete events, and begins that an end follows at once; of the first process alone."""
    found, pid = [], None
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
            found.append(_Op(raw, standard(raw), ns(row["ts"]), stop, row.get("tid")))
    return sorted(found, key=lambda op: op.start)


@dataclass(slots=True)
class _Walk:
    """Where the reader of a trace stands, and what it has found."""

    last_forward: str
    last_backward: str
    found: list[_Op] = field(default_factory=list)
    behind: str = ""
    outputs: list[_Op] = field(default_factory=list)
    sums: list[_Op] = field(default_factory=list)
    updates: int = 0

    def inside(self, op: _Op) -> None:
        """An operation of the graph ends what lay between it and the one before."""
        if self.outputs and op.name != self.behind:
            self.found.append(_joined("OUTPUT0", self.outputs))
        self.outputs, self.sums, self.updates, self.behind = [], [], 0, op.name
        self.found.append(op)

    def outside(self, op: _Op) -> None:
        """What the graph does not have is told by what is before it."""
        if self.behind == self.last_forward:
            self.outputs.append(op)
        elif self.behind == self.last_backward and "update" in op.raw.lower():
            if not self.updates:
                none = [op._replace(stop=op.start)]
                self.found.append(_joined(BARRIER, self.sums or none))
            self.found.append(op._replace(name=f"UPDATE_{self.updates}"))
            self.updates += 1
        elif self.behind == self.last_backward and op.raw in _CALCULATIONS:
            self.sums.append(op)


def _joined(name: str, ops: Sequence[_Op]) -> _Op:
    """Several operations as one, from the first start to the last end."""
    return ops[0]._replace(name=name, stop=max(op.stop for op in ops))


def events(path: Path, pid: str, graph: LocalGraph, *, merge: bool = True) -> list[Event]:
    """The operations of one rank in the order of their starts; `merge` joins pieces of one."""
    said = read_json(path)
    rows = said.get("traceEvents") if isinstance(said, dict) else said
    if not isinstance(rows, list):
        raise TraceFileError(f"{path}: no traceEvents")
    ops = _operations(rows)
    known = {name for name in graph.nodes if name.startswith(("FW.", "BW."))}
    walk = _Walk(*_turns([op.name for op in ops if op.name in known], path))
    for op in ops:
        if op.name in known:
            walk.inside(op)
        elif walk.behind:
            walk.outside(op)
    found = _events(sorted(walk.found, key=lambda op: op.start), pid, graph)
    ends = [each.start + each.dur for each in found if _UPDATE.fullmatch(each.name)]
    found = [each for each in found if not ends or each.start < max(ends)]
    return merged(found) if merge else found


def _turns(names: Sequence[str], path: Path) -> tuple[str, str]:
    """The last forward op before backward begins, and the last backward one of the step."""

    def next_(kind: str, begin: int) -> int:
        found = (i for i in range(begin, len(names)) if names[i].startswith(kind))
        return next(found, len(names))

    backward = next_("BW.", next_("FW.", 0))
    again = next_("FW.", backward)
    if backward == len(names):
        raise TraceFileError(f"{path}: no backward operation of the graph after a forward one")
    if again == len(names):
        raise TraceFileError(
            f"{path}: the trace ends with its first step; where a step ends is told by the "
            "begin of a second one: profile two steps or more"
        )
    return names[backward - 1], names[again - 1]


def _events(ops: Sequence[_Op], pid: str, graph: LocalGraph) -> list[Event]:
    lanes: dict[Any, str] = {}
    before: Mapping[str, tuple[str, ...]] = graph.predecessors
    return [
        Event(
            name=op.name,
            pid=pid,
            start=op.start,
            dur=op.stop - op.start,
            lane=lanes.setdefault(op.thread, f"operator{len(lanes)}"),
            cat="operator",
            extra={f"input{i}": each for i, each in enumerate(before.get(op.name, ()))},
        )
        for op in ops
    ]
