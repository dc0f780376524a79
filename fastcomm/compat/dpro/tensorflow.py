"""Read graphs and traces of TensorFlow, with standard names of operations.

Traces of version 2 have `args.long_name` and threads "TensorFlow Ops"; timelines of version 1
have `args.name` and threads without names.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastcomm.compat.dpro import job
from fastcomm.compat.dpro.job import (
    LocalGraph,
    Parameter,
    ParameterDict,
    adjacent,
    descendants,
    merged,
)
from fastcomm.compat.dpro.uniform import Event, integer, ns, read_events

_LABELLED = re.compile(r"(FW|BW|Comm|UPDATE_)\.|UPDATE_(CAL|\d+)$|OUTPUT\d*$|END$|I/O")
_PUSH_PULL = re.compile(r"BytePSPushPull[_.](\d+(?:_\d+)*)$")
_PREFIX = "StatefulPartitionedCall/"


def graph_of(path: Path) -> LocalGraph:
    """Read a graph of TensorFlow with standard names; nodes without edges are left out.

    Raises TraceFileError if the file is no graph.
    """
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


def parameters_of(
    listed: Iterable[Parameter], metadata: Mapping[str, Any], graph: LocalGraph
) -> ParameterDict:
    """Add shapes, types and updates to tensors.

    The shape of a tensor is that of the output of its name in the metadata of the backward
    operations before its communication.

    Parameters
    ----------
    listed
        Names of the tensors.
    metadata
        ``metadata.json``, by raw name of an operation.
    graph
        Standard names and dependencies.

    """
    raw = {label: name for name, label in graph.label.items()}
    parameters = []
    for tensor in listed:
        befores = graph.predecessors.get(f"Comm.{tensor.index}", ())
        outputs = (
            output
            for before in befores
            for output in metadata.get(raw[before], {}).get("output", ())
        )
        own = next((output for output in outputs if output["name"] == tensor.name), None)
        facts = {} if own is None else {"shape": tuple(own["shape"]), "dtype": own["dtype"]}
        parameters.append(replace(tensor, **facts))
    comm = (name for name in graph.nodes if name.startswith("Comm."))
    return ParameterDict(
        parameters=tuple(parameters),
        update_of={
            int(index): graph.successors[name]
            for name in comm
            for index in name.removeprefix("Comm.").split("+")
            if index.isdecimal()
        },
    )


def _is_update(name: str) -> bool:
    """Return whether an operator's name is that of a weight update."""
    return (
        name == "GradientDescent"
        or ("GradientDescent" in name and "update" in name)
        or "SGD" in name
        or "Assign" in name
    )


def relabel(  # noqa: PLR0911
    raw: str, updates: Iterable[str] = frozenset(), backward: Iterable[str] = frozenset()
) -> str:
    """Return the standard name of an operation of TensorFlow.

    Parameters
    ----------
    raw
        Name in the graph or in the trace.
    updates
        Raw names of operations that are updates.
    backward
        Raw names of operations that are backward although their names do not tell.

    """
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
        _, dot, label = name.partition(".")
        if dot:
            tensor = label.partition("_")[0]
            return f"BW.{tensor}_Switch" if "Switch" in name else f"Comm.{tensor}"
        return f"UPDATE_.{plain}" if raw in updates else f"BW.{plain}"
    if raw in updates:
        return f"UPDATE_.{plain}"
    return f"BW.{plain}" if raw in backward or _is_backward(name) else f"FW.{plain}"


def _is_backward(name: str) -> bool:
    tape = name.startswith("gradient_tape") and not name.endswith("ShapeN")
    return name.startswith("gradients") or (tape and "LayoutOptimizer" not in name)


def events_of(path: Path, pid: str, graph: LocalGraph, *, merge: bool = False) -> list[Event]:
    """Read the operations of one rank that are in the graph, by start.

    Parameters
    ----------
    path
        A trace of TensorFlow.
    pid
        Process of the rank.
    graph
        Standard names and dependencies.
    merge
        Merge consecutive events of one name, into which older profilers split operations.

    Raises
    ------
    TraceFileError
        If the file has no events.

    """
    lanes: dict[Any, str] = {}
    events = []
    for row in _device_operations(read_events(path)):
        name = _name_in_graph(row, graph)
        if name is None:
            continue
        group = row["args"].get("group_id")
        lane = lanes.setdefault(row.get("tid"), f"operator{len(lanes)}")
        event = graph.event(name, pid, (ns(row["ts"]), ns(row["dur"])), lane)
        events.append(replace(event, step=None if group is None else integer(int(group))))
    events.sort(key=lambda event: event.start)
    return merged(events) if merge else events


def _device_operations(rows: list[Any]) -> list[Any]:
    """Return the events of a TensorFlow timeline that are operations of a device.

    `rows` are the events of the JSON file.
    """
    names = {
        (row.get("pid"), row.get("tid") if row["name"] == "thread_name" else None): str(
            (row.get("args") or {}).get("name", "")
        )
        for row in rows
        if row.get("ph") == "M" and row.get("name") in {"process_name", "thread_name"}
    }
    counts = _thread_counts(names)
    return [
        row
        for row in rows
        if row.get("ph") == "X"
        and isinstance(row.get("args"), dict)
        and {"ts", "dur"} <= row.keys()
        and counts(row.get("pid"), row.get("tid"))
    ]


def _thread_counts(names: Mapping[tuple[Any, Any], str]) -> Callable[[Any, Any], bool]:
    """Return a function of pid and tid that tells whether a thread has device operations.

    `names` are the names of processes (tid None) and threads. A timeline of TensorFlow 1 names
    no threads. One of its processes has the launches of the host, another one, "…/stream:all
    Compute", the work of the device: only the latter counts.
    """
    devices = {
        pid for (pid, tid), name in names.items() if tid is None and "/device:GPU" in name
    }
    threads = {key: name for key, name in names.items() if key[1] is not None}
    if threads:
        return lambda pid, tid: (
            pid in devices and "TensorFlow Ops" in threads.get((pid, tid), "")
        )
    streams = {pid for pid in devices if "/stream:all" in names[pid, None]}
    return lambda pid, tid: pid in (streams or devices)


def _name_in_graph(row: Any, graph: LocalGraph) -> str | None:
    """Return the standard name of an event; None if it communicates or is not in the graph."""
    args = row["args"]
    raw = str(args["long_name"]).partition(":")[0] if "long_name" in args else args.get("name")
    if raw is None:
        return None
    name = graph.label.get(str(raw).removeprefix(_PREFIX)) or relabel(str(raw))
    is_computation = name in graph.predecessors and not name.startswith("Comm.")
    return name if is_computation else None
