"""Find the communication of a Kineto trace, and what the host states of it.

Each call has a `record_param_comms` of its own, which ends before the group of calls does. The
kernel is launched then, and its metadata is empty or says "coalesced".

Since 2024 a kernel names its collective. Before, or if a kernel has no metadata, the host's
`record_param_comms` has it, and before that the range `nccl:all_reduce` inside of it. The
launch leads from the kernel to the host, by correlation.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.formats import kernel_names
from fastcomm.formats.communication import (
    Collectives,
    Pattern,
    find_communication,
    find_partners,
)
from fastcomm.formats.kernel_libraries import OTHER_LIBRARY
from fastcomm.formats.kernel_names import Named
from fastcomm.formats.kineto.sizes import (
    DIMENSIONS,
    OPERATORS,
    Metadata,
    is_no_operation,
    only_size,
    reasons,
    recorded_bytes,
    split_bytes,
)
from fastcomm.formats.kineto.sizes import sizes as sizes_of
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.columns import alike, lookup
from fastcomm.trace.events import Events
from fastcomm.trace.host_names import COLLECTIVE_CALL, DEVICE_ANNOTATION
from fastcomm.trace.run_traces import MOST_RANKS
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NONE, NULL, Flags, Ints

_VAGUE = (OP["OTHER"], OP["SendRecv"])  # kernels of these names do other operations, too
_GROUP = ("Process Group Name", "Process Group Description", "Process Group Ranks")
_SIDES = {"In msg nelems": ("send", "isend"), "Out msg nelems": ("recv", "irecv")}
_NUMBER = re.compile(r"[0-9]{1,20}", re.ASCII)
_MARK = re.compile(DEVICE_ANNOTATION)
# Libraries whose kernels do the collectives of PyTorch's process groups.
_OF_TORCH = ("NCCL", "RCCL", "HCCL", "oneCCL")
# Names of operations: by PyTorch, and by its plug-in for NCCL's profiler.
_OPERATIONS = ("Collective name", "func")
# Tests of names for calls, marks and operators.
_RANGES: tuple[Callable[[str], bool], ...] = (
    lambda name: name.startswith(COLLECTIVE_CALL),
    lambda name: _MARK.match(name) is not None,
    lambda name: name.startswith("c10d::") or name in OPERATORS,
)
# Metadata of bytes, operation and group: column, and its names, the newest first.
_METADATA = {
    **{
        name: (name,)
        for name in (
            *("Collective name", "dtype", "In split size", "Out split size"),
            *("Process Group Description", "Process Group Ranks", "Group size"),
        )
    },
    "In msg nelems": ("In msg nelems", "In msg size"),
    "Out msg nelems": ("Out msg nelems", "Out msg size"),
    "Process Group Name": ("Process Group Name", "Process Group ID"),
}
_GROUP_COLUMNS = (
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
    "Group size",
)


class CallBatch(NamedTuple):
    """The calls of which one kernel does the work."""

    place: int  # of the kernel among the communication
    calls: Ints  # rows of events, at least one
    is_shared: bool = False  # whether other kernels do a part of their work


def batches(
    events: Events, calls: Ints, launches: Ints, ops: Ints, lacking: Flags
) -> list[CallBatch]:
    """Return the calls of kernels that have no metadata of their own.

    They are the calls on the thread of the launch that began since the launch of communication
    before and launched none themselves, as far back as operation and group are one. Launches
    without a call between them share the calls before the first: each kernel has those of the
    operation in its name. Kernels of one name share their work in an unknown way.

    Parameters
    ----------
    events
        Events of the trace.
    calls
        Rows of all calls of collectives.
    launches
        Row of the launch of each communication event, or NONE.
    ops
        Operation that the name of each event tells, an index into OPS.
    lacking
        Whether each event lacks metadata.

    """
    chosen = np.flatnonzero(lacking & (launches >= 0))
    names = events.by_text(events.detail("Collective name", calls), _operation)
    around = events.enclosing(calls, launches)
    pending = calls[(names != NULL) & ~np.isin(calls, around)]
    if not len(chosen) or not len(pending):
        return []
    start, lane = events.start, events.lane
    pending = pending[np.lexsort((start[pending], lane[pending]))]
    lanes, begin = np.unique(lane[pending], return_index=True)
    by_lane = dict(zip(lanes.tolist(), np.split(pending, begin[1:]), strict=True))
    before = _launch_before(events, launches)
    bursts: list[tuple[list[int], Ints]] = []
    for index in chosen[np.lexsort((start[launches[chosen]], lane[launches[chosen]]))].tolist():
        launch = launches[index]
        own = by_lane.get(int(lane[launch]), pending[:0])
        first, last = np.searchsorted(start[own], np.array([before[index], start[launch]]))
        own = own[first:last]
        own = own[events.stop[own] <= start[launch]]
        previous = launches[bursts[-1][0][-1]] if bursts else NONE
        is_next = lane[previous] == lane[launch] and start[previous] + 1 == before[index]
        if not len(own) and previous != NONE and is_next:
            bursts[-1][0].append(index)
        else:
            bursts.append(([index], own))
    return [batch for burst, own in bursts for batch in _of_burst(events, burst, own, ops)]


def _of_burst(
    events: Events, indices: Sequence[int], calls: Ints, ops: Ints
) -> Iterator[CallBatch]:
    """Yield the calls of each kernel of launches that share the calls before the first."""
    call_ops = events.by_text(events.detail("Collective name", calls), _operation)
    by_op: dict[int, list[int]] = {}
    for index in indices:
        by_op.setdefault(int(ops[index]), []).append(index)
    for op, places in by_op.items():
        own = calls[~np.isin(call_ops, [other for other in by_op if other != op])]
        alike_calls = own[_alike_from_end(events, own, op)]
        if len(places) == 1 and len(alike_calls):
            yield CallBatch(places[0], alike_calls)
        elif len(alike_calls) and len(alike_calls) == len(own):
            yield from (CallBatch(place, own[:1], is_shared=True) for place in places)


def _operation(text: str) -> int:
    """Return the operation of a call; NULL for one that names none."""
    op = byte_rules.op_of_collective(text) if text else None
    return NULL if op is None else op


def _launch_before(events: Events, launches: Ints) -> Ints:
    """Return the start (ns) of the launch of communication before each, on its thread."""
    before = np.full(len(launches), NULL, np.int64)
    indices = np.flatnonzero(launches >= 0)
    rows = launches[indices]
    order = indices[np.lexsort((events.start[rows], events.lane[rows]))]
    lane, start = events.lane[launches[order]], events.start[launches[order]]
    is_first = np.append(True, lane[1:] != lane[:-1])
    before[order] = np.where(is_first, NULL, np.append(NULL, start[:-1] + 1))
    return before


def _alike_from_end(events: Events, calls: Ints, op: int) -> slice:
    """Return the last calls that do one operation in one group, the kernel's if that tells."""
    ops = events.by_text(events.detail("Collective name", calls), _operation)
    is_same = np.ones(len(calls), np.bool_)
    if op not in _VAGUE:
        is_same = ops == op
    columns = [ops, *(events.detail(name, calls) for name in _GROUP)]
    for column in columns:
        is_same &= column == column[-1:]
    others = np.flatnonzero(~is_same)
    return slice(int(others[-1]) + 1 if len(others) else 0, None)


def described(events: Events, batch: CallBatch) -> dict[str, int]:
    """Return what the calls of a batch say of it together, as the metadata of one call."""
    calls = batch.calls
    first = calls[:1]
    dtypes = events.detail("dtype", calls)
    counts = {name: NULL if batch.is_shared else _total(events, calls, name) for name in _SIDES}
    return {
        "Collective name": int(events.detail("Collective name", first)[0]),
        "dtype": int(dtypes[0]) if (dtypes == dtypes[0]).all() else NULL,
        "In split size": NULL,
        "Out split size": NULL,
        **counts,
    }


def _total(events: Events, calls: Ints, name: str) -> int:
    """Return the sum of a count of elements of calls; NULL if one is unknown.

    Of messages, what is sent goes in, and what is received comes out.
    """
    texts = [events.text(code) for code in events.detail("Collective name", calls).tolist()]
    sides = {side for names in _SIDES.values() for side in names}
    if sides.issuperset(texts):
        calls = calls[[text in _SIDES[name] for text in texts]]
    counts = events.detail(name, calls)
    return int(counts.sum()) if len(calls) and (counts >= 0).all() else NULL


def find_collectives(
    events: Events,
    listed: Sequence[ProcessGroup],
    patterns: Sequence[Pattern] = (),
) -> Collectives:
    """Return all communication of a file.

    Parameters
    ----------
    events
        Events of the trace.
    listed
        Groups that the trace lists with all their ranks (`groups_of_rank`).
    patterns
        Patterns of kernel names, which precede the built-in table.

    """
    rows, name, names = _with_described(events, *find_communication(events, patterns))
    by_name = [OP[kernel.op] if kernel.library in _OF_TORCH else NULL for kernel in names]
    host = _Host.of(events, rows, np.array(by_name, np.int64)[name])
    metadata = _metadata(host, name)
    first, kind = alike(*metadata.columns.values())
    metadata = metadata.take(first)
    group, groups = _groups(metadata, listed)
    op = _operations(metadata, names)
    members = np.array([entry.members or NULL for entry in groups] + [NULL], np.int64)[group]
    by_torch = (metadata.columns["mark"] != NULL) | (metadata.columns["operator"] != NULL)
    members = np.where((group < 0) & by_torch, only_size(listed), members)
    recorded = recorded_bytes(metadata)
    sizes = sizes_of(metadata, recorded, op, members)
    splits = split_bytes(metadata, recorded, op, members)
    unknown = np.flatnonzero((sizes.payload == NULL)[kind])
    unsized = reasons(metadata, op, names, rows[unknown], kind[unknown])
    op, group = op[kind], group[kind]
    return Collectives(
        row=rows,
        op=op,
        seq=host.metadata("Seq"),
        call_id=events.by_text(host.metadata("Comms Id"), _call_id),
        group=group,
        groups=groups,
        sizes=byte_rules.Sizes(*(counts[kind] for counts in sizes)),
        named=names,
        name=name,
        partners=find_partners(events, rows, op, group, groups),
        splits={name: column.take(pa.array(kind)) for name, column in splits.items()},
        unsized=unsized,
    )


def _with_described(
    events: Events, rows: Ints, name: Ints, names: tuple[Named, ...]
) -> tuple[Ints, Ints, tuple[Named, ...]]:
    """Add kernels of unknown names whose metadata says that they are collectives.

    Helpers that a call launches besides have its metadata, too: they are left out.
    """
    kernels = events.rows("kernel")
    kernels = kernels[events.places(kernels) != NONE]
    kernels = kernels[~np.isin(kernels, rows)]
    described = np.any([_names_operation(events, kernels, key) for key in _OPERATIONS], axis=0)
    kernels = kernels[described]
    is_helper = events.by_text(events.name[kernels], kernel_names.is_helper)
    kernels = kernels[is_helper != 1]
    if not len(kernels):
        return rows, name, names
    unknown = Named(library=OTHER_LIBRARY, op="OTHER")
    merged = np.concatenate([rows, kernels])
    order = np.argsort(merged, kind="stable")
    number = np.append(name, np.full(len(kernels), len(names), name.dtype))
    return merged[order], number[order], (*names, unknown)


def _call_id(text: str) -> int:
    """Return a number of 64 bits as a signed one; NULL for any other text."""
    if not _NUMBER.fullmatch(text) or int(text) >= 1 << 64:
        return NULL
    return int(text) - (int(text) >> 63 << 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The host side of each communication event: rows of events, NONE if unknown."""

    events: Events
    rows: Ints  # the communication event itself
    call: Ints  # record_param_comms
    mark: Ints  # the innermost range nccl:...
    operator: Ints  # the innermost c10d::... or other of OPERATORS
    batches: tuple[CallBatch, ...]
    # Rows of details of `rows`, of `call` if any exists, and of the first calls of batches.
    places: tuple[NDArray[np.int32], ...]

    @classmethod
    def of(cls, events: Events, rows: Ints, ops: Ints) -> "_Host":
        """Follow the launches of the events whose own metadata names no operation.

        `ops` are the operations that the names of the events tell; NULL for work that PyTorch's
        collectives do not launch.
        """
        coalesced: list[CallBatch] = []
        call, mark, operator = (np.full(len(rows), NONE, np.int64) for _ in range(3))
        own = events.places(rows)
        # A copy that a call makes besides is not its collective.
        is_kernel = events.kind[rows] == KIND["kernel"]
        unnamed = np.flatnonzero(is_kernel & ~_names_operation(events, rows))
        if len(unnamed):
            launches = events.launch_of(rows[unnamed])
            calls, marks, operators = (
                events.rows_named(is_match, "cpu_op", "annotation") for is_match in _RANGES
            )
            enclosing = events.enclosing(calls, launches)
            call[unnamed] = _by_external_id(events, calls, rows[unnamed], launches, enclosing)
            mark[unnamed] = events.enclosing(marks, launches)
            operator[unnamed] = events.enclosing(operators, launches)
            coalesced = _batches(events, rows, calls, call, ops)
        first = np.full(len(rows), NONE, np.int64)
        for batch in coalesced:
            first[batch.place] = batch.calls[0]
        hosts = [events.places(side) for side in (call, first) if (side >= 0).any()]
        return cls(
            events=events,
            rows=rows,
            call=call,
            mark=mark,
            operator=operator,
            batches=tuple(coalesced),
            places=(own, *hosts),
        )

    def metadata(self, *names: str) -> Ints:
        """Return a value from the event's own metadata, else the host's call.

        Of several names, the first that has a value counts.
        """
        details = self.events.details
        columns = (details[name][places] for name in names for places in self.places)
        return reduce(lambda first, other: np.where(first == NULL, other, first), columns)


def _names_operation(events: Events, rows: Ints, key: str = "Collective name") -> Flags:
    """Return whether the metadata of each of `rows` names an operation; a row may be NONE."""
    names = events.detail(key, rows)
    flags: Flags = (names != NULL) & (events.by_text(names, is_no_operation) != 1)
    return flags


def _batches(events: Events, rows: Ints, calls: Ints, call: Ints, ops: Ints) -> list[CallBatch]:
    """Return the calls of the communication that neither metadata nor a call describes."""
    is_call = _names_operation(events, calls)
    lacking = ~_names_operation(events, rows) & ~_names_operation(events, call)
    lacking &= ops != NULL
    return batches(events, calls[is_call], events.launch_of(rows), ops, lacking)


def _metadata(host: _Host, name: Ints) -> Metadata:
    """Return the metadata of each event, its host's call and ranges, and its name."""
    events = host.events
    columns = {key: host.metadata(*names) for key, names in _METADATA.items()}
    for batch in host.batches:
        for key, value in described(events, batch).items():
            columns[key][batch.place] = value
    columns["shared"] = np.zeros(len(host.rows), np.int64)
    columns["shared"][[batch.place for batch in host.batches if batch.is_shared]] = 1
    _add_plugin(host, columns)
    columns["named"] = name
    columns["bytes"] = events.more["bytes"][host.rows]
    columns["kind"] = events.kind[host.rows].astype(np.int64)
    for range_, rows in (("call", host.call), ("mark", host.mark), ("operator", host.operator)):
        columns[range_] = np.where(rows >= 0, events.name[rows].astype(np.int64), NULL)
        places = events.places(rows)
        columns |= {f"{range_} {key}": events.details[key][places] for key in DIMENSIONS}
    return Metadata(events=events, columns=columns)


def _add_plugin(host: _Host, columns: dict[str, Ints]) -> None:
    """Fill in what NCCL's profiler plug-in says of events that nothing else describes.

    Its count is of the input of an all-gather, and of the output of a reduce-scatter.
    """
    func, count = host.metadata("func"), host.metadata("count")
    is_own = (columns["Collective name"] == NULL) & (func != NULL)
    op = host.events.by_text(func, lambda text: _number(byte_rules.op_of_collective(text)))
    for key, one_sided in (
        ("In msg nelems", "ReduceScatter"),
        ("Out msg nelems", "AllGather"),
    ):
        columns[key] = np.where(is_own & (op != OP[one_sided]), count, columns[key])
    columns["Collective name"] = np.where(is_own, func, columns["Collective name"])
    columns["dtype"] = np.where(is_own, host.metadata("datatype"), columns["dtype"])


def _by_external_id(
    events: Events, calls: Ints, rows: Ints, launches: Ints, enclosing: Ints
) -> Ints:
    """Fill in the call of the same external id where no call encloses the launch on its thread.

    Before 2024-02 the id is that of the launch, which may match an unrelated call: a call
    counts only if it encloses the launch in time.
    """
    ids, start, stop = events.more["External id"], events.start, events.stop
    calls = calls[np.argsort(ids[calls], kind="stable")]
    if not len(calls):
        return enclosing
    place = lookup(ids[calls], ids[rows])
    call = calls[place]
    fits = (enclosing < 0) & (launches >= 0) & (place >= 0)
    fits &= (start[call] <= start[launches]) & (stop[launches] <= stop[call])
    return np.where(fits, call, enclosing)


def _number(op: int | None) -> int:
    return NULL if op is None else op


def _operations(metadata: Metadata, names: Sequence[Named]) -> NDArray[np.int8]:
    """Return operations: from the metadata, else the library's range, operator or name."""

    def from_metadata(text: str) -> int:
        return _number(byte_rules.op_of_collective(text) if text else None)

    def from_mark(text: str) -> int:
        return _number(byte_rules.op_of_annotation(text))

    def from_operator(text: str) -> int:
        return OP[OPERATORS[text].op] if text in OPERATORS else NULL

    op = metadata.per_text("Collective name", from_metadata)
    op = np.where(op == NULL, metadata.per_text("mark", from_mark), op)
    by_name = np.array([OP[kernel.op] for kernel in names] + [OP["OTHER"]], np.int64)
    by_name = by_name[metadata.columns["named"]]
    # A SendRecv kernel serves other operations, too. The name of a copy is exact.
    is_vague = np.isin(by_name, (OP["OTHER"], OP["SendRecv"]))
    is_vague &= metadata.columns["kind"] == KIND["kernel"]
    by_operator = metadata.per_text("operator", from_operator)
    by_name = np.where(is_vague & (by_operator != NULL), by_operator, by_name)
    return np.where(op == NULL, by_name, op).astype(np.int8)


def _groups(
    metadata: Metadata, listed: Sequence[ProcessGroup]
) -> tuple[NDArray[np.int32], tuple[ProcessGroup, ...]]:
    """Return the index of each entry's group, or NONE; and the groups of different metadata."""
    columns = [metadata.columns[name] for name in _GROUP_COLUMNS]
    first, kind = alike(*columns)
    text = metadata.events.text
    groups: dict[ProcessGroup | None, int] = {None: NONE}
    index = []
    for name, description, ranks, size in np.stack(columns, axis=1)[first].tolist():
        group = _group(text(name), text(description), text(ranks), size, listed)
        index.append(groups.setdefault(group, len(groups) - 1))
    distinct = tuple(group for group in groups if group is not None)
    return np.array(index, np.int32)[kind], distinct


def _group(
    name: str | None,
    description: str | None,
    ranks: str | None,
    size: int,
    listed: Sequence[ProcessGroup],
) -> ProcessGroup | None:
    """Return the group with this metadata; a truncated rank list is completed from `listed`."""
    if name is None and description is None and ranks is None and size == NULL:
        return None
    members = _ranks(ranks)
    matches = [group for group in listed if name is not None and group.name == name]
    if len(matches) > 1:
        matches = [group for group in matches if group.description == description]
    if len(matches) == 1:
        members = members or matches[0].ranks
        description = description or matches[0].description
        size = matches[0].size or size if size == NULL else size
    return ProcessGroup(
        name=name or None,
        description=description or None,
        ranks=members,
        size=size if 0 <= size <= MOST_RANKS else None,
    )


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """Return the ranks of a list such as "[0, 1]"; None if it is truncated or empty."""
    try:
        return _members(json.loads(text or ""))
    except (ValueError, RecursionError):
        return None


def _members(ranks: object) -> tuple[int, ...] | None:
    """Return the ranks of a list, sorted; None if it is empty or has other values."""
    if not isinstance(ranks, list) or set(map(type, ranks)) != {int}:
        return None
    return tuple(sorted(ranks)) if min(ranks) >= 0 and max(ranks) < MOST_RANKS else None


def groups_of_rank(info: Mapping[str, Any]) -> tuple[ProcessGroup, ...]:
    """Return the groups that `distributedInfo` of a trace lists, with all their ranks."""
    config = info.get("pg_config")
    world = info.get("world_size")
    groups = []
    for entry in config if isinstance(config, list) else ():
        if not isinstance(entry, dict):
            continue
        size = entry.get("pg_size")
        ranks = entry.get("ranks")
        members = _ranks(ranks) if isinstance(ranks, str) else _members(ranks)
        size = size if type(size) is int and 0 < size <= MOST_RANKS else None
        if members is None and size is not None and size == world:
            members = tuple(range(size))
        groups.append(
            ProcessGroup(
                name=str(entry["pg_name"]) if "pg_name" in entry else None,
                description=str(entry["pg_desc"]) if entry.get("pg_desc") else None,
                ranks=members,
                size=size,
            )
        )
    return tuple(groups)
