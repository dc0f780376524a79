"""TensorFlow: operations get standard names, its profiler's events become uniform ones.

Read are the traces of the profiler of TensorFlow 2 (`args.long_name`, threads "TensorFlow Ops")
and the timelines of TensorFlow 1 (`args.name`, threads without names).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastcomm.errors import TraceFileError
from fastcomm.readers.dpro import dataflow
from fastcomm.readers.dpro.dataflow import LocalGraph, adjacent, descendants, merged
from fastcomm.readers.dpro.parameters import Parameter, ParameterDict
from fastcomm.readers.dpro.uniform import Event, ns, read_json

_LABELLED = re.compile(r"(FW|BW|Comm|UPDATE_)\.|UPDATE_(CAL|\d+)$|OUTPUT\d*$|END$|I/O")
_PUSH_PULL = re.compile(r"BytePSPushPull[_.](\d+(?:_\d+)*)$")
_PREFIX = "StatefulPartitionedCall/"


def local_graph(path: Path) -> LocalGraph:
    """Read and relabel a graph; a node without edges vanishes."""
    names, edges = dataflow.read(path)
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


def parameters(
    listed: Iterable[Parameter], metadata: Mapping[str, Any], graph: LocalGraph
) -> ParameterDict:
    """Tensors are outputs, of their names, of the backward ops before their communication."""
    raw = {label: name for name, label in graph.label.items()}
    found = []
    for each in listed:
        befores = graph.predecessors.get(f"Comm.{each.index}", ())
        outputs = (
            output
            for before in befores
            for output in metadata.get(raw[before], {}).get("output", ())
        )
        own = next((output for output in outputs if output["name"] == each.name), None)
        facts = {} if own is None else {"shape": tuple(own["shape"]), "dtype": own["dtype"]}
        found.append(replace(each, **facts))
    comm = (name for name in graph.nodes if name.startswith("Comm."))
    return ParameterDict(
        parameters=tuple(found),
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
        or name.startswith("Assign_")
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
    if found := _PUSH_PULL.search(name):
        return f"Comm.{found[1].replace('_', '+')}"
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


def events(path: Path, pid: str, graph: LocalGraph, *, merge: bool = False) -> list[Event]:
    """The operations of one rank that are in the graph, in the order of their starts.

    `merge` joins consecutive events of one name, which older profilers write as pieces.
    """
    said = read_json(path)
    rows = said.get("traceEvents") if isinstance(said, dict) else said
    if not isinstance(rows, list):
        raise TraceFileError(f"{path}: no traceEvents")
    lanes: dict[Any, str] = {}
    found: list[Event] = []
    for row in _operations(rows):
        name = _name(row, graph)
        if name is None:
            continue
        lane = lanes.setdefault(row.get("tid"), f"operator{len(lanes)}")
        start, dur = ns(row["ts"]), ns(row["dur"])
        group = row["args"].get("group_id")
        inputs = {f"input{i}": each for i, each in enumerate(graph.predecessors[name])}
        found.append(
            Event(
                name=name,
                pid=pid,
                start=start,
                dur=dur,
                lane=lane,
                cat="operator",
                step=None if group is None else int(group),
                extra=inputs,
            )
        )
    found.sort(key=lambda each: each.start)
    return merged(found) if merge else found


def _operations(rows: list[Any]) -> list[Any]:
    """Complete events of the threads of operations on devices."""
    named = {
        (row.get("pid"), row.get("tid") if row["name"] == "thread_name" else None): str(
            (row.get("args") or {}).get("name", "")
        )
        for row in rows
        if row.get("ph") == "M" and row.get("name") in {"process_name", "thread_name"}
    }
    counts = _counts(named)
    return [
        row
        for row in rows
        if row.get("ph") == "X"
        and isinstance(row.get("args"), dict)
        and {"ts", "dur"} <= row.keys()
        and counts(row.get("pid"), row.get("tid"))
    ]


def _counts(named: Mapping[tuple[Any, Any], str]) -> Callable[[Any, Any], bool]:
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


def _name(row: Any, graph: LocalGraph) -> str | None:
    """The standard name of an event; None of what is not in the graph, or communicates."""
    args = row["args"]
    raw = str(args["long_name"]).partition(":")[0] if "long_name" in args else args.get("name")
    if raw is None:
        return None
    name = graph.label.get(str(raw).removeprefix(_PREFIX)) or relabel(str(raw))
    known = name in graph.predecessors and not name.startswith("Comm.")
    return name if known else None
