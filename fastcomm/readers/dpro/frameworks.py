"""TensorFlow and MXNet: graphs get standard names, events of their profilers become uniform.

Of TensorFlow the traces of version 2 (`args.long_name`, threads "TensorFlow Ops") and the
timelines of version 1 (`args.name`, threads without names) are read. What a trace of MXNet has
between the graph's operations is told by its place: behind the last forward operation the
outputs (OUTPUT0), behind the last backward one what the optimizer computes (UPDATE_CAL) and
its updates (UPDATE_0, UPDATE_1, ...), counted anew in each step. Updates wait for UPDATE_CAL,
not for each other. What begins after the last update is of a step that the trace cuts.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro import Event, job
from fastcomm.readers.dpro.job import (
    BARRIER,
    Edge,
    LocalGraph,
    Parameter,
    ParameterDict,
    adjacent,
    descendants,
    merged,
)
from fastcomm.readers.dpro.json_files import ns, read_events, read_text

_LABELLED = re.compile(r"(FW|BW|Comm|UPDATE_)\.|UPDATE_(CAL|\d+)$|OUTPUT\d*$|END$|I/O")
_PUSH_PULL = re.compile(r"BytePSPushPull[_.](\d+(?:_\d+)*)$")
_PREFIX = "StatefulPartitionedCall/"


def tensorflow_graph(path: Path) -> LocalGraph:
    """Read and relabel a graph; a node without edges vanishes."""
    names, edges = job.read_graph(path)
    after = adjacent(names, edges)
    comm = [name for name in names if relabel(name).startswith("Comm.")]
    updates = descendants(after, comm)
    updates |= {name for name in names if _is_update(name)}
    first = {name: relabel(name, updates) for name in names}
    backward = [name for name in names if first[name].startswith("BW.")]
    stops = descendants(
        after, backward, lambda name: first[name].startswith(("Comm.", "UPDATE_"))
    )
    late = {name for name in stops if first[name].startswith("FW.")}
    label = {name: relabel(name, updates, late) for name in names}
    linked = {end for edge in edges for end in edge}
    return LocalGraph.of(
        (label[name] for name in names if name in linked),
        ((label[a], label[b]) for a in names for b in after[a]),
        label,
    )


def tensorflow_parameters(
    listed: Iterable[Parameter], metadata: Mapping[str, Any], graph: LocalGraph
) -> ParameterDict:
    """Tensors are outputs, of their names, of the backward ops before their communication."""
    raw = {label: name for name, label in graph.label.items()}
    parameters = []
    for each in listed:
        befores = graph.predecessors.get(f"Comm.{each.index}", ())
        outputs = (
            output
            for before in befores
            for output in metadata.get(raw[before], {}).get("output", ())
        )
        own = next((output for output in outputs if output["name"] == each.name), None)
        facts = {} if own is None else {"shape": tuple(own["shape"]), "dtype": own["dtype"]}
        parameters.append(replace(each, **facts))
    comm = (name for name in graph.nodes if name.startswith("Comm."))
    return ParameterDict(
        parameters=tuple(parameters),
        update_of={
            int(tensor): graph.successors[name]
            for name in comm
            for tensor in name.removeprefix("Comm.").split("+")
            if tensor.isdecimal()
        },
    )


def _is_update(name: str) -> bool:
    return (
        name == "GradientDescent"
        or ("GradientDescent" in name and "update" in name)
        or "SGD" in name
        or "Assign" in name
    )


def relabel(  # noqa: PLR0911
    raw: str, updates: Iterable[str] = frozenset(), backward: Iterable[str] = frozenset()
) -> str:
    """The standard name of an operation of the graph."""
    if _LABELLED.match(raw):
        return raw
    name = raw.removeprefix("^")
    head, slash, last = name.rpartition("/")
    name = head if slash and last.startswith("_") else name
    if match := _PUSH_PULL.search(name):
        return f"Comm.{match[1].replace('_', '+')}"
    plain = name.replace(".", "_")
    if "input_barrier" in name:
        return f"FW.{plain}"
    if "allreduce" in name.lower():
        _, dot, rest = name.partition(".")
        if dot:
            tensor = rest.partition("_")[0]
            return f"BW.{tensor}_Switch" if "Switch" in name else f"Comm.{tensor}"
        return f"UPDATE_.{plain}" if raw in updates else f"BW.{plain}"
    if raw in updates:
        return f"UPDATE_.{plain}"
    return f"BW.{plain}" if raw in backward or _is_backward(name) else f"FW.{plain}"


def _is_backward(name: str) -> bool:
    tape = name.startswith("gradient_tape") and not name.endswith("ShapeN")
    return name.startswith("gradients") or (tape and "LayoutOptimizer" not in name)


def tensorflow_events(
    path: Path, pid: str, graph: LocalGraph, *, merge: bool = False
) -> list[Event]:
    """The operations of one rank that are in the graph, in the order of their starts.

    `merge` joins consecutive events of one name, which older profilers write as pieces.
    """
    lanes: dict[Any, str] = {}
    events = []
    for row in _device_operations(read_events(path)):
        name = _name_in_graph(row, graph)
        if name is None:
            continue
        group = row["args"].get("group_id")
        lane = lanes.setdefault(row.get("tid"), f"operator{len(lanes)}")
        event = _operator(name, pid, (ns(row["ts"]), ns(row["dur"])), lane, graph)
        events.append(replace(event, step=None if group is None else int(group)))
    events.sort(key=lambda event: event.start)
    return merged(events) if merge else events


def _operator(
    name: str, pid: str, times: tuple[int, int], lane: str, graph: LocalGraph
) -> Event:
    """One operation with its inputs; `times` are start and duration."""
    return Event(
        name=name,
        pid=pid,
        start=times[0],
        dur=times[1],
        lane=lane,
        cat="operator",
        extra={f"input{i}": each for i, each in enumerate(graph.predecessors.get(name, ()))},
    )


def _device_operations(rows: list[Any]) -> list[Any]:
    """Complete tensorflow_events of the threads of operations on devices."""
    named = {
        (row.get("pid"), row.get("tid") if row["name"] == "thread_name" else None): str(
            (row.get("args") or {}).get("name", "")
        )
        for row in rows
        if row.get("ph") == "M" and row.get("name") in {"process_name", "thread_name"}
    }
    counts = _thread_counts(named)
    return [
        row
        for row in rows
        if row.get("ph") == "X"
        and isinstance(row.get("args"), dict)
        and {"ts", "dur"} <= row.keys()
        and counts(row.get("pid"), row.get("tid"))
    ]


def _thread_counts(named: Mapping[tuple[Any, Any], str]) -> Callable[[Any, Any], bool]:
    """Whether a thread has operations of a device.

    A timeline of TensorFlow 1 names no threads. It has what the host launches on a device in
    one process, and what the device does in another, "…/stream:all Compute": that one counts.
    """
    devices = {
        pid for (pid, tid), name in named.items() if tid is None and "/device:GPU" in name
    }
    threads = {key: name for key, name in named.items() if key[1] is not None}
    if threads:
        return lambda pid, tid: (
            pid in devices and "TensorFlow Ops" in threads.get((pid, tid), "")
        )
    streams = {pid for pid in devices if "/stream:all" in named[pid, None]}
    return lambda pid, tid: pid in (streams or devices)


def _name_in_graph(row: Any, graph: LocalGraph) -> str | None:
    """The standard name of an event; None of what is not in the graph, or communicates."""
    args = row["args"]
    raw = str(args["long_name"]).partition(":")[0] if "long_name" in args else args.get("name")
    if raw is None:
        return None
    name = graph.label.get(str(raw).removeprefix(_PREFIX)) or relabel(str(raw))
    known = name in graph.predecessors and not name.startswith("Comm.")
    return name if known else None


_NAME = re.compile(r"name=([^;]*);")
_OUTPUT = re.compile(r"\s*output\[\d+\]=(.*)\(\d+\)")
_OP = re.compile(r"Op:.*?, Name=(.*)")
_ARG = re.compile(r"\s*arg\[\d+\]=(.*)\(\d+\)")
_UPDATE = re.compile(r"UPDATE_\d+")
_INPUTS = ("data", "label")
_CALCULATIONS = frozenset({"dot", "add_n"})


def standard(raw: str) -> str:
    """The standard name of an operation of the profiler."""
    match = _NAME.search(raw)
    head, backward, _ = (match[1] if match else raw).partition("_backward")
    return ("BW." if backward else "FW.") + _plain(head)


def _plain(name: str) -> str:
    return name.partition("_fwd")[0].replace(".", "_")


def mxnet_parameters(listed: tuple[Parameter, ...], aggregate: int = 0) -> ParameterDict:
    """Tensors are updated from the last to the first, `aggregate` at once, 0 for one by one."""
    updates = ((i, i // aggregate if aggregate > 0 else i) for i in range(len(listed)))
    return ParameterDict(
        parameters=listed,
        update_of={len(listed) - 1 - i: (f"UPDATE_{update}",) for i, update in updates},
    )


def mxnet_graph(path: Path, known: ParameterDict) -> LocalGraph:
    """The graph in a GML file, or in the text of a symbol; updates follow all communication."""
    if path.suffix == ".gml":
        edges = [
            (_mxnet_label(a, known), _mxnet_label(b, known))
            for a, b in job.read_graph(path)[1]
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


def _mxnet_label(label: str, known: ParameterDict) -> str:
    """The standard name of a node: communication by the id of its tensor."""
    cat, dot, rest = label.partition(".")
    if cat == "Comm":
        return f"Comm.{known.ids.get(rest, rest)}"
    return f"{cat}.{_plain(rest)}" if dot and cat in {"FW", "BW"} else label


def _symbol(path: Path, known: ParameterDict) -> Iterator[Edge]:
    """Edges from the text that nnvm prints of a symbol: operations, each below its inputs."""
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
            yield from _argument(op, match[1], match[1] in variables, known)


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


def _mxnet_operations(rows: Sequence[Any]) -> list[_Op]:
    """Complete events, and begins that an end follows at once; of the first process alone."""
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
            operations.append(_Op(raw, standard(raw), ns(row["ts"]), stop, row.get("tid")))
    return sorted(operations, key=lambda op: op.start)


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


def mxnet_events(path: Path, pid: str, graph: LocalGraph, *, merge: bool = True) -> list[Event]:
    """The operations of one rank in the order of their starts; `merge` joins pieces of one."""
    ops = _mxnet_operations(read_events(path))
    known = {name for name in graph.nodes if name.startswith(("FW.", "BW."))}
    walk = _Walk(*_turns([op.name for op in ops if op.name in known], path))
    for op in ops:
        if op.name in known:
            walk.inside(op)
        elif walk.behind:
            walk.outside(op)
    lanes: dict[Any, str] = {}
    events = []
    for op in sorted(walk.found, key=lambda op: op.start):
        lane = lanes.setdefault(op.thread, f"operator{len(lanes)}")
        times = op.start, op.stop - op.start
        events.append(_operator(op.name, pid, times, lane, graph))
    ends = [each.start + each.dur for each in events if _UPDATE.fullmatch(each.name)]
    events = [each for each in events if not ends or each.start < max(ends)]
    return merged(events) if merge else events


def _turns(names: Sequence[str], path: Path) -> tuple[str, str]:
    """The last forward op before backward begins, and the last backward one of the step."""

    def next_(kind: str, begin: int) -> int:
        matches = (i for i in range(begin, len(names)) if names[i].startswith(kind))
        return next(matches, len(names))

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
