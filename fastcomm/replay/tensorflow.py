"""TensorFlow: operations get standard names, its profiler's events become uniform ones."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastcomm.errors import TraceFileError
from fastcomm.replay import gml
from fastcomm.replay.uniform import Event, ns, read_json

_LABELLED = re.compile(r"(FW|BW|Comm|UPDATE_)\.|UPDATE_(CAL|\d+)$|OUTPUT\d*$|END$|I/O")
_PUSH_PULL = re.compile(r"BytePSPushPull[_.](\d+(?:_\d+)*)$")
_PREFIX = "StatefulPartitionedCall/"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGraph:
    """The data-flow graph of one rank under standard names; the same serves every rank."""

    nodes: tuple[str, ...]
    successors: Mapping[str, tuple[str, ...]]
    predecessors: Mapping[str, tuple[str, ...]]
    label: Mapping[str, str]

    @property
    def edges(self) -> list[tuple[str, str]]:
        """All edges, by their sources in the order of the nodes."""
        return [(a, b) for a in self.nodes for b in self.successors[a]]


def local_graph(path: Path) -> LocalGraph:
    """Read and relabel a graph; a node without edges vanishes."""
    names, edges = gml.read(path)
    after = _adjacent(names, edges)
    comm = [name for name in names if relabel(name).startswith("Comm.")]
    updates = _descendants(after, comm, lambda _: False)
    updates |= {name for name in names if _is_update(name)}
    first = {name: relabel(name, updates) for name in names}
    backward = [name for name in names if first[name].startswith("BW.")]
    stops = _descendants(
        after, backward, lambda name: first[name].startswith(("Comm.", "UPDATE_"))
    )
    late = {name for name in stops if first[name].startswith("FW.")}
    label = {name: relabel(name, updates, late) for name in names}
    linked = {end for edge in edges for end in edge}
    nodes = tuple(dict.fromkeys(label[name] for name in names if name in linked))
    ordered = [(label[a], label[b]) for a in names for b in after[a]]
    return LocalGraph(
        nodes=nodes,
        successors=_tuples(nodes, ordered),
        predecessors=_tuples(nodes, [(b, a) for a, b in ordered]),
        label=label,
    )


def _adjacent(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in names}
    for a, b in edges:
        found[a].append(b)
    return found


def _tuples(
    names: Iterable[str], edges: Iterable[tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
    found = _adjacent(names, dict.fromkeys(edge for edge in edges if edge[0] != edge[1]))
    return {name: tuple(each) for name, each in found.items()}


def _descendants(
    after: Mapping[str, list[str]], roots: Iterable[str], stops: Callable[[str], bool]
) -> set[str]:
    """All that can be reached, not through nodes where `stops` holds."""
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        for name in after[waiting.pop()]:
            if name not in seen and not stops(name):
                seen.add(name)
                waiting.append(name)
    return seen


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
    return [
        row
        for row in rows
        if row.get("ph") == "X"
        and "/device:GPU" in named.get((row.get("pid"), None), "")
        and "TensorFlow Ops" in named.get((row.get("pid"), row.get("tid")), "")
        and isinstance(row.get("args"), dict)
        and {"ts", "dur"} <= row.keys()
    ]


def _name(row: Any, graph: LocalGraph) -> str | None:
    """The standard name of an event; None of what is not in the graph, or communicates."""
    args = row["args"]
    raw = str(args["long_name"]).partition(":")[0] if "long_name" in args else args.get("name")
    if raw is None:
        return None
    name = graph.label.get(str(raw).removeprefix(_PREFIX)) or relabel(str(raw))
    known = name in graph.predecessors and not name.startswith("Comm.")
    return name if known else None


def merged(events_: list[Event]) -> list[Event]:
    """Consecutive events of one name as one, from the first start to the last end."""
    found: list[Event] = []
    for each in events_:
        last = found[-1] if found else None
        if last is not None and last.name == each.name and last.step == each.step:
            found[-1] = replace(last, dur=each.start + each.dur - last.start)
        else:
            found.append(each)
    return found
