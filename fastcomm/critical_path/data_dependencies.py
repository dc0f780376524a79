"""Find the data dependencies between the operators of a step, from an execution trace.

The critical path keeps the operators of a thread in their order. Here an operator waits only
for the last writers of the storages that it reads, and its device work only for their device
work, with unlimited threads and streams. Only leaf operators are used, which call no other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.critical_path.result import CriticalPath
from fastcomm.critical_path.rules import DataDependencies
from fastcomm.critical_path.what_if import Reordering, pieces_of
from fastcomm.critical_path.window import Selected, TimeRange
from fastcomm.errors import FastcommError
from fastcomm.formats.execution_traces import (
    COLLECTIVE,
    COMPUTE,
    ChakraNode,
    Storage,
    TracedOperator,
)
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import KIND, OPS
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NONE, NULL, Ints

OPERATORS = pa.schema(
    [
        pa.field("event", pa.int64()),  # position in the file
        pa.field("name", pa.string()),
        pa.field("part_of", pa.string()),  # the outermost operator that called it
        pa.field("start_ns", pa.int64()),
        pa.field("stop_ns", pa.int64()),
        pa.field("earliest_ns", pa.int64()),  # when its inputs were written
        pa.field("earlier_ns", pa.int64()),  # by how much it could have started earlier
        pa.field("device_ns", pa.int64()),  # duration of the work that it launched
        pa.field("producers", pa.int64()),  # number of operators that write its inputs
        pa.field("on_path", pa.bool_()),
        # By how much the step is shorter if it runs as soon as its inputs are written, off its
        # thread; null for operators that are not on the path, or not among the longest.
        pa.field("shortens_ns", pa.int64()),
    ]
)

SUBGRAPHS = pa.schema(
    [
        pa.field("part_of", pa.string()),  # the outermost operator that called them
        pa.field("operators", pa.int64()),  # number of leaf operators
        pa.field("earlier_ns", pa.int64()),  # by how much all could have started earlier
        pa.field("shortens_ns", pa.int64()),  # shortening of the step if all of them move
    ]
)
_MAX_REPLAYED = 100  # longest operators, and subgraphs, that are moved in a replay


@dataclass(slots=True)
class _LeafOperator:
    """An operator that calls no other, with its event and the work that it launched."""

    operator: TracedOperator
    row: int  # of its event
    start: int
    stop: int
    works: list[int] = field(default_factory=list)  # rows of the work that it launched
    work_ns: int = 0  # duration of the work
    work_stop: int = 0
    producers: tuple[int, ...] = ()  # positions of the operators that write its inputs
    host_done: int = 0  # end on the host with unlimited threads and streams
    work_done: int = 0  # end of its work with unlimited threads and streams


def data_dependencies(
    trace: Trace, path: CriticalPath, operators: Sequence[TracedOperator]
) -> DataDependencies:
    """Find the data dependencies between the operators of a critical path's window.

    Parameters
    ----------
    trace
        The rank, with all events.
    path
        Its critical path.
    operators
        Operators of the execution trace.

    Raises
    ------
    FastcommError
        If no operator of the execution trace is in the window.

    """
    rows = np.unique(path.graph.event)
    kind = trace.events["kind"].to_numpy()
    ops = rows[kind[rows] == KIND["cpu_op"]]
    joined, joined_by = _join(trace, ops, operators)
    if not joined:
        raise FastcommError(
            f"{trace.meta.path}: no operator of the execution trace is in the window, neither "
            "by `Record function id` nor by names and their order. Use traces of one run"
        )
    by_id = {operator.id: operator for operator in operators}
    leaves = _connected_leaves(trace, joined, by_id)
    origin = min(leaf.start for leaf in leaves)
    _unlimited(leaves)
    table = _table(path, leaves, by_id, origin)
    reordering = _reordering(trace, path, leaves)
    return DataDependencies(
        operators=_with_shortening(table, reordering),
        subgraphs=_subgraphs(table, reordering),
        matched=len(joined),
        in_window=len(ops),
        traced=len(operators),
        joined_by=joined_by,
        span_ns=max(max(leaf.stop, leaf.work_stop) for leaf in leaves) - origin,
        bound_ns=max(max(leaf.host_done, leaf.work_done) for leaf in leaves),
    )


def operations(trace: Trace, operators: Sequence[TracedOperator]) -> Sequence[ChakraNode]:
    """Return the leaf operators of an execution trace with their data dependencies and times.

    Operator k is node 2k, and its device work, if any, node 2k + 1. They wait for their
    producers as in `data_dependencies`. Raises FastcommError if `trace`, which must have all
    events, has no operator of the execution trace.

    """
    rows = np.flatnonzero(trace.events["kind"].to_numpy() == KIND["cpu_op"])
    joined, _ = _join(trace, rows, operators)
    if not joined:
        raise FastcommError(f"{trace.meta.path}: no operator of the execution trace is in it")
    leaves = _connected_leaves(trace, joined, {operator.id: operator for operator in operators})
    comm = (trace.comm[name].to_pylist() for name in ("event", "op"))
    op_of = {row: OPS[op] for row, op in zip(*comm, strict=True)}
    nodes: list[ChakraNode] = []
    for k, leaf in enumerate(leaves):
        hosts = tuple(2 * place for place in leaf.producers)
        works = tuple(2 * place + 1 for place in leaf.producers if leaves[place].work_ns)
        host = ChakraNode(
            id=2 * k,
            name=leaf.operator.name,
            kind=COMPUTE,
            before=hosts if leaf.work_ns else (*hosts, *works),
            duration=leaf.stop - leaf.start,
            is_host=True,
            thread=leaf.operator.thread,
        )
        nodes.append(host)
        if leaf.work_ns:
            op = next((op_of[row] for row in leaf.works if row in op_of), None)
            work = replace(
                host,
                id=2 * k + 1,
                kind=COMPUTE if op is None else COLLECTIVE,
                before=works,
                begun=(2 * k,),
                duration=leaf.work_ns,
                is_host=False,
                op=op,
            )
            nodes.append(work)
    return nodes


def _join(
    trace: Trace, ops: Ints, operators: Sequence[TracedOperator]
) -> tuple[dict[int, int], str]:
    """Return the event's row of each operator by its id, and how they were matched."""
    args = trace.arguments
    if "record_function" in args.column_names:
        number = filled(args["record_function"])[ops]
        has_id = (number != NULL) & (number != 0)
        if has_id.any():
            row_of = dict(zip(number[has_id].tolist(), ops[has_id].tolist(), strict=True))
            rows = {op.id: row_of[op.order] for op in operators if op.order in row_of}
            if rows:
                return rows, "record function ids"
    return _join_by_order(trace, ops, operators), "names and their order on each thread"


def _join_by_order(
    trace: Trace, ops: Ints, operators: Sequence[TracedOperator]
) -> dict[int, int]:
    """Match operators and events thread by thread, by their names and the order of calls.

    Threads are paired by the number of calls that they have in common. Returns the event's row
    of each operator by its id.
    """
    lane = trace.events["lane"].to_numpy()[ops]
    names = trace.events["name"].take(pa.array(ops)).cast(pa.string()).to_pylist()
    traced = _numbered((op.thread, op.name, op.id) for op in operators)
    profiled = _numbered(zip(lane.tolist(), names, ops.tolist(), strict=True))
    pairs = sorted(
        (
            (len(a.keys() & b.keys()), x, y)
            for x, a in traced.items()
            for y, b in profiled.items()
        ),
        key=lambda pair: (-pair[0], pair[1:]),
    )
    rows: dict[int, int] = {}
    paired: set[tuple[str, int]] = set()
    for common, thread, place in pairs:
        threads = {("traced", thread), ("profiled", place)}
        if common and not threads & paired:
            paired |= threads
            rows |= {
                traced[thread][key]: profiled[place][key]
                for key in traced[thread].keys() & profiled[place].keys()
            }
    return rows


def _numbered(
    calls: Iterable[tuple[int, str, int]],
) -> dict[int, dict[tuple[str, int], int]]:
    """Return the values of calls by thread, and by name and number among its calls."""
    numbered: dict[int, dict[tuple[str, int], int]] = defaultdict(dict)
    counts: Counter[tuple[int, str]] = Counter()
    for thread, name, value in calls:
        numbered[thread][name, counts[thread, name]] = value
        counts[thread, name] += 1
    return numbered


def _leaves(
    trace: Trace, joined: Mapping[int, int], by_id: Mapping[int, TracedOperator]
) -> list[_LeafOperator]:
    """Return the matched operators that use storages and call no other that does, by start."""
    active = {operator.id for operator in by_id.values() if operator.reads or operator.writes}
    calling = {by_id[id_].parent for id_ in active}
    start, stop = (trace.events[name].to_numpy() for name in ("start", "stop"))
    leaves = [
        _LeafOperator(operator=by_id[id_], row=row, start=int(start[row]), stop=int(stop[row]))
        for id_, row in joined.items()
        if id_ in active and id_ not in calling
    ]
    if not leaves:
        raise FastcommError(f"{trace.meta.path}: the execution trace has no tensors")
    return sorted(leaves, key=lambda leaf: (leaf.start, leaf.operator.order))


def _connected_leaves(
    trace: Trace, joined: Mapping[int, int], by_id: Mapping[int, TracedOperator]
) -> list[_LeafOperator]:
    """Return the leaf operators with their device work and their producers.

    `joined` is the event's row of each operator by its id.
    """
    leaves = _leaves(trace, joined, by_id)
    _launch(trace, leaves)
    _produce(leaves)
    return leaves


def _launch(trace: Trace, leaves: Sequence[_LeafOperator]) -> None:
    """Add to each leaf the device work that was launched inside it."""
    everything = TimeRange(start=-(1 << 62), stop=1 << 62)
    chosen = Selected.of(trace, everything)
    rows = chosen.rows
    work = np.flatnonzero(chosen.is_device & (chosen.call != NONE))
    lanes = trace.events["lane"].to_numpy()
    by_lane: dict[int, list[_LeafOperator]] = defaultdict(list)
    for leaf in leaves:
        by_lane[int(lanes[leaf.row])].append(leaf)
    starts = {lane: np.array([leaf.start for leaf in own]) for lane, own in by_lane.items()}
    for k in work.tolist():
        call = chosen.call[k]
        lane, at = int(rows.lane[call]), rows.start[call]
        if lane not in starts:
            continue
        place = int(np.searchsorted(starts[lane], at, side="right")) - 1
        if place >= 0 and at < by_lane[lane][place].stop:
            leaf = by_lane[lane][place]
            leaf.works.append(int(rows.row[k]))
            leaf.work_ns += int(rows.stop[k] - rows.start[k])
            leaf.work_stop = max(leaf.work_stop, int(rows.stop[k]))


def _produce(leaves: Sequence[_LeafOperator]) -> None:
    """Set the producers of each leaf: the last writers of its inputs, by start."""
    writer: dict[Storage, int] = {}
    for number, leaf in enumerate(leaves):
        operator = leaf.operator
        leaf.producers = tuple(
            sorted({writer[storage] for storage in operator.reads if storage in writer})
        )
        writer |= dict.fromkeys(operator.writes, number)


def _unlimited(leaves: Sequence[_LeafOperator]) -> None:
    """Compute when each leaf would end if it waited only for its producers.

    The host part waits for the host part of its producers. If the leaf has no device work, as
    a copy to the host, it also waits for their device part.
    """
    for leaf in leaves:
        producers = [leaves[number] for number in leaf.producers]
        begin = max((producer.host_done for producer in producers), default=0)
        ready = max((producer.work_done for producer in producers), default=0)
        if not leaf.work_ns:
            begin = max(begin, ready)
        leaf.host_done = begin + leaf.stop - leaf.start
        if leaf.work_ns:
            leaf.work_done = max(begin, ready) + leaf.work_ns


def _table(
    path: CriticalPath,
    leaves: Sequence[_LeafOperator],
    by_id: Mapping[int, TracedOperator],
    origin: int,
) -> pa.Table:
    """Return the table `OPERATORS` of all leaves, without the shortening of the step."""
    critical = set(np.unique(path.graph.event[path.valid_path.nodes]).tolist())
    ids = path.events.ids(np.array([leaf.row for leaf in leaves], np.int32)).tolist()
    rows = []
    for leaf, event in zip(leaves, ids, strict=True):
        earliest = max((leaves[number].stop for number in leaf.producers), default=origin)
        rows.append(
            {
                "event": event,
                "name": leaf.operator.name,
                "part_of": _outermost(leaf.operator, by_id),
                "start_ns": leaf.start,
                "stop_ns": leaf.stop,
                "earliest_ns": min(earliest, leaf.start),
                "earlier_ns": max(0, leaf.start - earliest),
                "device_ns": leaf.work_ns,
                "producers": len(leaf.producers),
                "on_path": not critical.isdisjoint((leaf.row, *leaf.works)),
                "shortens_ns": None,
            }
        )
    return pa.Table.from_pylist(rows, OPERATORS)


def _reordering(
    trace: Trace, path: CriticalPath, leaves: Sequence[_LeafOperator]
) -> Reordering | None:
    """Return the step with its leaves as operators to move; None if it cannot be replayed."""
    if not path.about.rules.is_exact:
        return None
    pieces = pieces_of(path.graph, [(leaf.row, leaf.works, leaf.producers) for leaf in leaves])
    return Reordering(path, trace.events["lane"].to_numpy(), pieces)


def _with_shortening(table: pa.Table, reordering: Reordering | None) -> pa.Table:
    """Set the shortening of the step for the longest operators on the path."""
    length = pc.subtract(table["stop_ns"], table["start_ns"])
    length = pc.add(length, table["device_ns"]).to_numpy()
    longest = np.argsort(-length, kind="stable")
    candidates = longest[table["on_path"].to_numpy()[longest]][:_MAX_REPLAYED]
    shorter: list[int | None] = [None] * table.num_rows
    if reordering is not None:
        for place in candidates.tolist():
            shorter[place] = reordering.shorter_by([place])
    column = pa.array(shorter, pa.int64())
    return table.set_column(table.num_columns - 1, OPERATORS.field("shortens_ns"), column)


def _subgraphs(table: pa.Table, reordering: Reordering | None) -> pa.Table:
    """Return the table `SUBGRAPHS` of outermost operators with leaves on the path."""
    members: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(table["part_of"].to_pylist()):
        members[name].append(place)
    on_path, earlier = table["on_path"].to_pylist(), table["earlier_ns"].to_numpy()
    length = pc.subtract(table["stop_ns"], table["start_ns"]).to_numpy()
    subgraphs = [
        (name, places)
        for name, places in members.items()
        if any(on_path[place] for place in places)
    ]
    subgraphs.sort(key=lambda pair: (-int(length[pair[1]].sum()), pair[0]))
    rows = [
        {
            "part_of": name,
            "operators": len(places),
            "earlier_ns": int(earlier[places].min()),
            "shortens_ns": None if reordering is None else reordering.shorter_by(places),
        }
        for name, places in subgraphs[:_MAX_REPLAYED]
    ]
    order = [(name, "descending") for name in ("shortens_ns", "earlier_ns")]
    return pa.Table.from_pylist(rows, SUBGRAPHS).sort_by([*order, ("part_of", "ascending")])


def _outermost(operator: TracedOperator, by_id: Mapping[int, TracedOperator]) -> str:
    """Return name and number of the outermost operator around one, without profiler roots."""
    visited = {operator.id}
    while (parent := by_id.get(operator.parent)) is not None and parent.id not in visited:
        if parent.name.startswith("[pytorch|profiler"):
            break
        visited.add(parent.id)
        operator = parent
    return f"{operator.name} ({operator.order})"
