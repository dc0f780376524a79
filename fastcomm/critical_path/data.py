"""What a step waits for if only data counts: operators behind the writers of what they read.

The critical path takes a thread's operators in the order in which they ran. Here an operator
waits for the last writers of the storages that it reads, and its device work for their device
work; threads and streams are without limit. Leaf operators count, those that call no other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.critical_path import CriticalPath
from fastcomm.critical_path.corrected import Selected
from fastcomm.critical_path.rules import DataDependencies
from fastcomm.critical_path.what_if import Reordering, pieces_of
from fastcomm.critical_path.window import TimeRange
from fastcomm.errors import FastcommError
from fastcomm.readers.execution_trace import Storage, TracedOperator
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import KIND
from fastcomm.trace.trace import Trace
from fastcomm_kernels.arrays import NULL, Ints
from fastcomm_kernels.graph import NONE

OPERATORS = pa.schema(
    [
        pa.field("event", pa.int64()),  # its place in the file
        pa.field("name", pa.string()),
        pa.field("part_of", pa.string()),  # the outermost operator that called it
        pa.field("start_ns", pa.int64()),
        pa.field("stop_ns", pa.int64()),
        pa.field("earliest_ns", pa.int64()),  # when what it reads was written
        pa.field("earlier_ns", pa.int64()),  # by how much it could have started earlier
        pa.field("device_ns", pa.int64()),  # of the work that it launched
        pa.field("producers", pa.int64()),
        pa.field("on_path", pa.bool_()),
        # By how much the step is shorter if it runs as soon as its data is there, beside its
        # thread; null of what is not on the path, or too short to be asked.
        pa.field("shortens_ns", pa.int64()),
    ]
)

SUBGRAPHS = pa.schema(
    [
        pa.field("part_of", pa.string()),  # the outermost operator that called them
        pa.field("operators", pa.int64()),
        pa.field("earlier_ns", pa.int64()),  # by how much all could have started earlier
        pa.field("shortens_ns", pa.int64()),  # the step, if all of them move
    ]
)
# So many operators, and so many calls, are asked how much shorter the step is without them.
_ASKED = 100


@dataclass(slots=True)
class _LeafOperator:
    """An operator that calls no other, with its event and the work that it launched."""

    operator: TracedOperator
    row: int
    start: int
    stop: int
    works: list[int] = field(default_factory=list)  # rows
    work_ns: int = 0
    work_stop: int = 0
    producers: tuple[int, ...] = ()
    host_done: int = 0  # with unlimited threads and streams
    work_done: int = 0


def data_dependencies(
    trace: Trace, found: CriticalPath, operators: Sequence[TracedOperator]
) -> DataDependencies:
    """Join an execution trace to the events of a critical path's window.

    Raises `FastcommError` where no operator of the one is in the other.
    """
    rows = np.unique(found.graph.event)
    kind = trace.events["kind"].to_numpy()
    ops = rows[kind[rows] == KIND["cpu_op"]]
    joined, joined_by = _join(trace, ops, operators)
    if not joined:
        raise FastcommError(
            f"{trace.meta.path}: no operator of the execution trace is in the window: neither "
            "`Record function id` nor names and their order agree"
        )
    by_id = {each.id: each for each in operators}
    leaves = _leaves(trace, joined, by_id)
    _launch(trace, leaves)
    _produce(leaves)
    origin = min(leaf.start for leaf in leaves)
    _unlimited(leaves)
    table = _table(found, leaves, by_id, origin)
    reordering = _reordering(trace, found, leaves)
    return DataDependencies(
        operators=_with_shortening(table, reordering),
        subgraphs=_subgraphs(table, reordering),
        known=len(joined),
        asked=len(ops),
        traced=len(operators),
        joined_by=joined_by,
        span_ns=max(max(leaf.stop, leaf.work_stop) for leaf in leaves) - origin,
        bound_ns=max(max(leaf.host_done, leaf.work_done) for leaf in leaves),
    )


def _join(
    trace: Trace, ops: Ints, operators: Sequence[TracedOperator]
) -> tuple[dict[int, int], str]:
    """The row of each operator, by id; and what joined them."""
    args = trace.args
    if args is not None and "record_function" in args.column_names:
        number = filled(args["record_function"])[ops]
        known = (number != NULL) & (number != 0)
        if known.any():
            row_of = dict(zip(number[known].tolist(), ops[known].tolist(), strict=True))
            found = {each.id: row_of[each.order] for each in operators if each.order in row_of}
            if found:
                return found, "record function ids"
    return _join_by_order(trace, ops, operators), "names and their order on each thread"


def _join_by_order(
    trace: Trace, ops: Ints, operators: Sequence[TracedOperator]
) -> dict[int, int]:
    """The same where no id is common: thread by thread, the how many-eth of a name."""
    lane = trace.events["lane"].to_numpy()[ops]
    names = trace.events["name"].take(pa.array(ops)).cast(pa.string()).to_pylist()
    theirs = _numbered((each.thread, each.name, each.id) for each in operators)
    ours = _numbered(zip(lane.tolist(), names, ops.tolist(), strict=True))
    pairs = sorted(
        ((len(a.keys() & b.keys()), x, y) for x, a in theirs.items() for y, b in ours.items()),
        key=lambda pair: (-pair[0], pair[1:]),
    )
    found: dict[int, int] = {}
    taken: set[tuple[str, int]] = set()
    for common, thread, place in pairs:
        if common and ("theirs", thread) not in taken and ("ours", place) not in taken:
            taken |= {("theirs", thread), ("ours", place)}
            found |= {
                theirs[thread][key]: ours[place][key]
                for key in theirs[thread].keys() & ours[place].keys()
            }
    return found


def _numbered(
    calls: Iterable[tuple[int, str, int]],
) -> dict[int, dict[tuple[str, int], int]]:
    """By thread: the value of the how many-eth call of a name."""
    found: dict[int, dict[tuple[str, int], int]] = defaultdict(dict)
    counts: Counter[tuple[int, str]] = Counter()
    for thread, name, value in calls:
        found[thread][name, counts[thread, name]] = value
        counts[thread, name] += 1
    return found


def _leaves(
    trace: Trace, joined: Mapping[int, int], by_id: Mapping[int, TracedOperator]
) -> list[_LeafOperator]:
    """The joined operators that touch storages and call no other that does."""
    active = {each.id for each in by_id.values() if each.reads or each.writes}
    calling = {by_id[id_].parent for id_ in active}
    start, stop = (trace.events[name].to_numpy() for name in ("start", "stop"))
    found = [
        _LeafOperator(operator=by_id[id_], row=row, start=int(start[row]), stop=int(stop[row]))
        for id_, row in joined.items()
        if id_ in active and id_ not in calling
    ]
    if not found:
        raise FastcommError(f"{trace.meta.path}: the execution trace has no tensors")
    return sorted(found, key=lambda leaf: (leaf.start, leaf.operator.order))


def _launch(trace: Trace, leaves: Sequence[_LeafOperator]) -> None:
    """Give each leaf the device work that was launched inside of it."""
    everything = TimeRange(start=-(1 << 62), stop=1 << 62)
    chosen = Selected.of(trace, everything, ())
    rows = chosen.rows
    work = np.flatnonzero(chosen.is_device & (chosen.call != NONE))
    lanes = trace.events["lane"].to_numpy()
    by_lane: dict[int, list[_LeafOperator]] = defaultdict(list)
    for leaf in leaves:
        by_lane[int(lanes[leaf.row])].append(leaf)
    starts = {lane: np.array([leaf.start for leaf in each]) for lane, each in by_lane.items()}
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
    """Find the last writers of what each leaf reads, in the order of their calls."""
    writer: dict[Storage, int] = {}
    for number, leaf in enumerate(leaves):
        operator = leaf.operator
        leaf.producers = tuple(
            sorted({writer[storage] for storage in operator.reads if storage in writer})
        )
        writer |= dict.fromkeys(operator.writes, number)


def _unlimited(leaves: Sequence[_LeafOperator]) -> None:
    """When each leaf would be done if it waited for its producers alone.

    Host work waits for the host part of its producers, and for their device part where it reads
    a device's storage without work of its own there, as a copy to the host does.
    """
    for leaf in leaves:
        producers = [leaves[number] for number in leaf.producers]
        begin = max((each.host_done for each in producers), default=0)
        if not leaf.work_ns:
            begin = max(begin, max((each.work_done for each in producers), default=0))
        leaf.host_done = begin + leaf.stop - leaf.start
        if leaf.work_ns:
            ready = max((each.work_done for each in producers), default=0)
            leaf.work_done = max(begin, ready) + leaf.work_ns


def _table(
    found: CriticalPath,
    leaves: Sequence[_LeafOperator],
    by_id: Mapping[int, TracedOperator],
    origin: int,
) -> pa.Table:
    critical = set(np.unique(found.graph.event[found.found.nodes]).tolist())
    ids = found.events.ids(np.array([leaf.row for leaf in leaves], np.int32)).tolist()
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
    trace: Trace, found: CriticalPath, leaves: Sequence[_LeafOperator]
) -> Reordering | None:
    """The step with its leaves, any of which may move; None where it cannot be replayed."""
    if not found.about.rules.is_exact:
        return None
    pieces = pieces_of(found.graph, [(leaf.row, leaf.works, leaf.producers) for leaf in leaves])
    return Reordering(found, trace.events["lane"].to_numpy(), pieces)


def _with_shortening(table: pa.Table, reordering: Reordering | None) -> pa.Table:
    """The operators on the path that take longest, with what it brings to move each."""
    length = pc.subtract(table["stop_ns"], table["start_ns"])
    length = pc.add(length, table["device_ns"]).to_numpy()
    longest = np.argsort(-length, kind="stable")
    asked = longest[table["on_path"].to_numpy()[longest]][:_ASKED]
    shorter: list[int | None] = [None] * table.num_rows
    if reordering is not None:
        for place in asked.tolist():
            shorter[place] = reordering.shorter_by([place])
    column = pa.array(shorter, pa.int64())
    return table.set_column(table.num_columns - 1, OPERATORS.field("shortens_ns"), column)


def _subgraphs(table: pa.Table, reordering: Reordering | None) -> pa.Table:
    """The calls that hold operators on the path, with what it brings to move all they hold."""
    members: dict[str, list[int]] = defaultdict(list)
    for place, name in enumerate(table["part_of"].to_pylist()):
        members[name].append(place)
    on_path, earlier = table["on_path"].to_pylist(), table["earlier_ns"].to_numpy()
    length = pc.subtract(table["stop_ns"], table["start_ns"]).to_numpy()
    found = [
        (name, places)
        for name, places in members.items()
        if any(on_path[place] for place in places)
    ]
    found.sort(key=lambda each: (-int(length[each[1]].sum()), each[0]))
    rows = [
        {
            "part_of": name,
            "operators": len(places),
            "earlier_ns": int(earlier[places].min()),
            "shortens_ns": None if reordering is None else reordering.shorter_by(places),
        }
        for name, places in found[:_ASKED]
    ]
    order = [(name, "descending") for name in ("shortens_ns", "earlier_ns")]
    return pa.Table.from_pylist(rows, SUBGRAPHS).sort_by([*order, ("part_of", "ascending")])


def _outermost(operator: TracedOperator, by_id: Mapping[int, TracedOperator]) -> str:
    """The name of the outermost operator around one, with its number; no profiler's root."""
    seen = {operator.id}
    while (parent := by_id.get(operator.parent)) is not None and parent.id not in seen:
        if parent.name.startswith("[pytorch|profiler"):
            break
        seen.add(parent.id)
        operator = parent
    return f"{operator.name} ({operator.order})"
