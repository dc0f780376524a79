"""Read runs without an accelerator: the host computes and communicates.

PyTorch writes two events for a collective of gloo, MPI or UCC: the operator (`c10d::...`) on
the calling thread, which mostly only enqueues it, and an annotation (`gloo:...`) from the time
at which a thread of the library takes it to its end, waiting included. No event names the
process group, and nothing but order, time and sizes links the two. `with_host_work` rewrites
the events as if the host were a device, so that all later code is the same for both:

- the annotation becomes a kernel, launched by the operator, with the metadata that kernels of
  NCCL have: operation, sizes, splits, peer, group;
- the time of operators outside of communication becomes rows of the kind "host_work".
"""

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.communication import member
from fastcomm.readers.kineto.chrome import Scanned
from fastcomm.readers.patterns import HOST_LIBRARIES
from fastcomm.trace.schema import KIND
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NULL, Ints

# Annotations of the libraries that work on the host.
_INTERVAL = re.compile(rf"({'|'.join(HOST_LIBRARIES)}):(\w+)")
# Annotations of libraries that work on a device: then the device's work was not recorded.
_ON_DEVICE = re.compile(r"(nccl|xccl|hccl):")
# Operators in which a thread waits for a collective, or enqueues it.
_NO_COMPUTE = re.compile(r"c10d::|_?c10d_functional(_autograd)?::")
_MOST_NESTED = 3  # lists of lists of tensors
WAIT = "wait for a collective"  # name of the time in which a thread waits for a collective


class _Signature(NamedTuple):
    """The arguments of a c10d operator; None: it has no such argument."""

    intervals: tuple[str, ...]  # names of the annotation, without the library
    operation: str  # as in the metadata of NCCL's kernels
    input: int | None = None  # index of the tensors that this rank contributes
    output: int | None = None  # index of the tensors that it receives
    splits: tuple[int, int] | None = None  # indices of the splits of input and output
    peer: int | None = None  # index of the other rank, as its place in the group
    root: int | None = None  # index of the root, as its place in the group


_REDUCE_SCATTER = ("all_reduce", "reduce_scatter", "_reduce_scatter_base")
_SIGNATURES = {
    "c10d::allreduce_": _Signature(("all_reduce", "sparse_all_reduce"), "allreduce", 0, 0),
    "c10d::allreduce_coalesced_": _Signature(("all_reduce",), "allreduce_coalesced", 0, 0),
    "c10d::broadcast_": _Signature(("broadcast",), "broadcast", 0, 0, root=2),
    "c10d::reduce_": _Signature(("reduce",), "reduce", 0, 0, root=3),
    "c10d::allgather_": _Signature(("all_gather",), "allgather", 1),
    "c10d::allgather_coalesced_": _Signature(("all_gather",), "allgather_coalesced", 1),
    "c10d::_allgather_base_": _Signature(("all_gather", "_all_gather_base"), "allgather", 1, 0),
    "c10d::allgather_into_tensor_coalesced_": _Signature(
        ("all_gather", "all_gather_into_tensor"), "allgather_coalesced", 1, 0
    ),
    "c10d::reduce_scatter_": _Signature(_REDUCE_SCATTER, "reduce_scatter", 1, 0),
    "c10d::_reduce_scatter_base_": _Signature(_REDUCE_SCATTER, "reduce_scatter", 1, 0),
    "c10d::reduce_scatter_tensor_coalesced_": _Signature(
        _REDUCE_SCATTER, "reduce_scatter_coalesced", 1, 0
    ),
    "c10d::alltoall_base_": _Signature(("all_to_all",), "all_to_allv", 1, 0, (4, 3)),
    "c10d::alltoall_": _Signature(("all_to_all",), "all_to_all", 1, 0),
    "c10d::gather_": _Signature(("gather",), "gather", 1, root=3),
    "c10d::scatter_": _Signature(("scatter",), "scatter", None, 0, root=3),
    "c10d::send": _Signature(("send",), "send", 0, peer=2),
    "c10d::recv_": _Signature(("recv",), "recv", None, 0, peer=2),
    "c10d::recv_any_source_": _Signature(("recvAnySource", "recv"), "recv", None, 0),
    "c10d::barrier": _Signature(("barrier",), "barrier"),
}


def is_host_run(scanned: Scanned) -> bool:
    """Return whether a trace has collectives of the host, and no sign of an accelerator."""
    kinds = np.unique(scanned.columns["kind"])
    if np.isin([KIND[name] for name in ("kernel", "memcpy", "memset", "runtime")], kinds).any():
        return False
    is_annotation = scanned.columns["kind"] == KIND["annotation"]
    used = np.unique(scanned.columns["name"][is_annotation]).tolist()
    names = [scanned.texts[code] for code in used if code != NULL]
    return any(map(_INTERVAL.match, names)) and not any(map(_ON_DEVICE.match, names))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCollectives:
    """The collectives of a rank that ran on the host, by start. Arrays have a row for each."""

    interval: Ints  # row of the annotation
    operator: Ints  # row of the c10d operator, or -1
    thread: Ints  # that carried it out: a number of the trace
    called: Ints  # ns, as in the file: start of the operator, or of the annotation
    stop: Ints
    key: tuple[tuple[str, str, str], ...]  # operation; dimensions and type of the input
    calls: tuple["Call", ...]

    def calling_order(self) -> Ints:
        """Return the places of the collectives in the order in which they were enqueued."""
        return np.argsort(self.called, kind="stable")

    @classmethod
    def of(cls, scanned: Scanned) -> "HostCollectives":
        """Find the collectives of a trace, with the operator that enqueued each."""
        columns = scanned.columns
        interval = _rows(scanned, "annotation", _INTERVAL.match)
        operator = _operators(scanned, interval)
        calls = tuple(
            _call(scanned, row, own)
            for row, own in zip(operator.tolist(), interval.tolist(), strict=True)
        )
        return cls(
            interval=interval,
            operator=operator,
            thread=columns["thread"][interval],
            called=columns["start"][np.where(operator >= 0, operator, interval)],
            stop=columns["stop"][interval],
            key=tuple(
                (call.operation, *_dims(scanned, row))
                for call, row in zip(calls, interval.tolist(), strict=True)
            ),
            calls=calls,
        )


def _rows(scanned: Scanned, kind: str, accept: Any) -> Ints:
    """Return rows of a kind whose name is accepted, by start."""
    columns = scanned.columns
    rows = np.flatnonzero(columns["kind"] == KIND[kind])
    codes, place = np.unique(columns["name"][rows], return_inverse=True)
    accepted = [code != NULL and bool(accept(scanned.texts[code])) for code in codes.tolist()]
    rows = rows[np.array(accepted, np.bool_)[place]]
    return rows[np.argsort(columns["start"][rows], kind="stable")]


def _detail(scanned: Scanned, name: str, row: int) -> str:
    """Return the text of a detail of a row, or ""."""
    if row < 0:
        return ""
    code = int(scanned.details[name][int(scanned.columns["detail"][row])])
    return "" if code == NULL else scanned.texts[code]


def _dims(scanned: Scanned, row: int) -> tuple[str, str]:
    return _detail(scanned, "Input Dims", row), _detail(scanned, "Input type", row)


def _operators(scanned: Scanned, intervals: Ints) -> Ints:
    """Return the row of the operator that enqueued each collective, or -1.

    Where an execution trace was recorded, the number of the annotation follows that of its
    operator. Elsewhere the first free operator of this kind and of these tensors counts that
    began before; operators and annotations have one order, but for few exceptions.
    """
    columns = scanned.columns
    rows = _rows(scanned, "cpu_op", _SIGNATURES.__contains__)
    number = columns.get("Record function id", np.full(len(columns["kind"]), NULL, np.int64))
    by_number = {int(number[row]): row for row in rows.tolist() if number[row] > 0}
    free: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for row in rows.tolist():
        signature = _SIGNATURES[scanned.texts[columns["name"][row]]]
        tensors = _flat(_argument(scanned, row, _contributed(signature)))
        for name in signature.intervals:
            free[name, tensors].append(row)
    used: set[int] = set()
    result = []
    for interval in intervals.tolist():
        row = by_number.get(int(number[interval]) - 1, -1) if number[interval] > 0 else -1
        if row < 0 or row in used:
            row = _first_free(scanned, interval, free, used)
        used.add(row)
        result.append(row)
    return np.array(result, np.int64).reshape(-1)


def _first_free(
    scanned: Scanned, interval: int, free: Mapping[tuple[str, str], deque[int]], used: set[int]
) -> int:
    """Return the first unused operator of equal tensors that began before, or -1."""
    columns = scanned.columns
    match = _INTERVAL.match(scanned.texts[columns["name"][interval]])
    name = match[2] if match else ""
    rows = free.get((name, _flat(_loads(_detail(scanned, "Input Dims", interval)))), deque())
    while rows and rows[0] in used:
        rows.popleft()
    begin = columns["start"][interval]
    return rows[0] if rows and columns["start"][rows[0]] <= begin else -1


def _contributed(signature: _Signature) -> int:
    """Return the index of the tensors that the annotation shows."""
    index = signature.output if signature.input is None else signature.input
    return 0 if index is None else index


def _loads(text: str) -> list[Any]:
    """Return a JSON list; empty if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def _argument(scanned: Scanned, row: int, index: int | None) -> list[Any]:
    """Return the dimensions of an operator's argument: of a tensor, or a list of tensors."""
    dims = _loads(_detail(scanned, "Input Dims", row))
    has_argument = index is not None and index < len(dims) and isinstance(dims[index], list)
    argument: list[Any] = dims[index] if has_argument and index is not None else []
    return argument


def _shapes(dims: Sequence[Any]) -> list[list[int]]:
    """Return the shapes in dimensions, which may be nested: [[4, 8]] is the shape [4, 8]."""
    nested = [dims]
    for _ in range(_MOST_NESTED):
        if not any(isinstance(entry, list) for dims_ in nested for entry in dims_):
            break
        nested = [
            entry
            for dims_ in nested
            for entry in (dims_ if any(isinstance(e, list) for e in dims_) else [dims_])
            if isinstance(entry, list)
        ]
    return [
        [int(length) for length in shape]
        for shape in nested
        if shape and all(isinstance(length, int) and length >= 0 for length in shape)
    ]


def _flat(dims: Sequence[Any]) -> str:
    """Return the shapes of tensors as a key."""
    return json.dumps(_shapes(dims))


class Call(NamedTuple):
    """What the operator of a collective states; NULL and "" are unknown."""

    operation: str
    elements_in: int = NULL
    elements_out: int = NULL
    dtype: str = ""
    splits: tuple[str, ...] = ()  # of input and output, as JSON lists
    peer: int = NULL  # place of the other rank in the group
    root: int = NULL  # place of the root in the group
    size: int = NULL  # ranks of the group, where the tensors tell

    @property
    def is_message(self) -> bool:
        """Whether this is one side of a message."""
        return self.operation in ("send", "recv")


def _call(scanned: Scanned, operator: int, interval: int) -> Call:
    """Return what an operator states; without one, what the annotation does."""
    # The type of a list of tensors is in the annotation alone.
    dtype = next(iter(_loads(_detail(scanned, "Input type", interval))), "")
    if operator < 0:
        match = _INTERVAL.match(scanned.texts[scanned.columns["name"][interval]])
        count = _elements(_loads(_detail(scanned, "Input Dims", interval)))
        return Call(match[2] if match else "", count, count, str(dtype))
    signature = _SIGNATURES[scanned.texts[scanned.columns["name"][operator]]]
    count_in, count_out = (
        NULL if index is None else _elements(_argument(scanned, operator, index))
        for index in (signature.input, signature.output)
    )
    values = _loads(_detail(scanned, "Concrete Inputs", operator))
    splits = tuple(_value(values, index) for index in signature.splits or ())
    return Call(
        operation=signature.operation,
        elements_in=count_in,
        elements_out=count_out,
        dtype=str(dtype),
        splits=splits,
        peer=_number(values, signature.peer),
        root=_number(values, signature.root),
        size=_group_size(signature, (count_in, count_out), splits),
    )


def _elements(dims: Sequence[Any]) -> int:
    """Return the number of elements of tensors; NULL without a shape."""
    shapes = _shapes(dims)
    count = sum(math.prod(shape) for shape in shapes)
    return count if shapes and 0 <= count < -NULL else NULL


def _value(values: Sequence[Any], index: int | None) -> str:
    return str(values[index]) if index is not None and index < len(values) else ""


def _number(values: Sequence[Any], index: int | None) -> int:
    """Return the rank of a group at an index of the arguments, or NULL."""
    text = _value(values, index)
    return int(text) if re.fullmatch(r"\d{1,6}", text) else NULL


def _group_size(signature: _Signature, counts: tuple[int, int], splits: Sequence[str]) -> int:
    """Return the number of ranks that the tensors of an operator imply, or NULL.

    `counts` are the elements of the input and the output. `splits` are JSON lists with a length
    per rank, empty if all are equal.
    """
    count_in, count_out = counts
    if lengths := [len(_loads(text)) for text in splits if text not in ("", "[]")]:
        return lengths[0]
    if min(counts) <= 0:
        return NULL
    if signature.operation.startswith("allgather"):
        return count_out // count_in if count_out % count_in == 0 else NULL
    if signature.operation.startswith("reduce_scatter"):
        return count_in // count_out if count_in % count_out == 0 else NULL
    return NULL


def with_host_work(
    scanned: Scanned,
    collectives: HostCollectives,
    groups: Sequence[ProcessGroup | None],
    numbers: Ints | None,
    *,
    with_waits: bool,
) -> Scanned:
    """Rewrite the events of a host run as those of a device.

    Parameters
    ----------
    scanned
        All operators and annotations of the trace.
    collectives
        Its collectives.
    groups
        The process group of each collective; None if unknown.
    numbers
        The number of each collective in its group; None if unknown.
    with_waits
        Whether to add events for the waits of threads, which only a critical path needs.

    """
    columns, details, texts = dict(scanned.columns), dict(scanned.details), list(scanned.texts)
    launched = np.flatnonzero(collectives.operator >= 0)
    kind, correlation = columns["kind"].copy(), columns["correlation"].copy()
    kind[collectives.interval] = KIND["kernel"]
    correlation[collectives.interval] = np.arange(1, len(collectives.interval) + 1)
    columns |= {"kind": kind, "correlation": correlation}
    columns["stream"] = _streams(columns, collectives)
    columns["detail"], details = _metadata(scanned, collectives, groups, texts)
    if numbers is not None:
        details["Seq"][-1 - len(numbers) : -1] = numbers
    launches = _copies(columns, collectives.operator[launched], KIND["runtime"])
    launches["correlation"] = correlation[collectives.interval[launched]]
    added = [launches, _compute(scanned, collectives, columns)]
    if with_waits:
        kind[_rows(scanned, "cpu_op", _WAIT.fullmatch)] = KIND["runtime"]
        added.append(_waits(scanned, collectives, columns, texts))
    columns = {
        name: np.concatenate([column, *(rows[name] for rows in added)])
        for name, column in columns.items()
    }
    return replace(scanned, columns=columns, details=details, texts=texts)


_WAIT = re.compile(r"_?c10d_functional(_autograd)?::wait_tensor")


def _streams(columns: Mapping[str, NDArray[Any]], collectives: HostCollectives) -> Ints:
    """Return the stream of each row: of a collective, the thread that carries it out."""
    stream = columns["stream"].copy()
    stream[collectives.interval] = np.maximum(collectives.thread, 0)
    return stream


def _metadata(
    scanned: Scanned,
    collectives: HostCollectives,
    groups: Sequence[ProcessGroup | None],
    texts: list[str],
) -> tuple[NDArray[np.int32], dict[str, Ints]]:
    """Return the places of details of all rows, and the details, with those of collectives."""
    codes: dict[str, int] = {}

    def code(text: str) -> int:
        if text and text not in codes:
            codes[text] = len(texts)
            texts.append(text)
        return codes.get(text, NULL)

    rows = []
    for call, group in zip(collectives.calls, groups, strict=True):
        peer = member(None if group is None else group.ranks, call.peer)
        rows.append(
            {
                "Collective name": code(call.operation),
                "dtype": code(call.dtype),
                "In msg nelems": call.elements_in,
                "Out msg nelems": call.elements_out,
                **{key: code(text) for key, text in zip(_SPLITS, call.splits, strict=False)},
                "Group size": _size(group, call),
                "Process Group Name": code((group and group.name) or ""),
                "Process Group Description": code((group and group.description) or ""),
                "Process Group Ranks": code(_ranks_text(group)),
                "Dst Rank": peer if call.operation == "send" else NULL,
                "Rank": call.root,
                "Src Rank": peer if call.operation == "recv" else NULL,
            }
        )
    details = {
        name: np.concatenate(
            [column[:-1], np.array([row.get(name, NULL) for row in rows], np.int64), [NULL]]
        )
        for name, column in scanned.details.items()
    }
    place = scanned.columns["detail"].copy()
    before = len(next(iter(scanned.details.values()))) - 1
    place[collectives.interval] = before + np.arange(len(rows))
    return place, details


_SPLITS = ("In split size", "Out split size")


def _ranks_text(group: ProcessGroup | None) -> str:
    """Return the ranks of a group as a trace has them, or ""."""
    return json.dumps(group.ranks) if group is not None and group.ranks else ""


def _size(group: ProcessGroup | None, call: Call) -> int:
    """Return the number of ranks of a collective, or NULL."""
    if group is not None and group.members is not None:
        return group.members
    return call.size


def _copies(
    columns: Mapping[str, NDArray[Any]], rows: Ints, kind: int
) -> dict[str, NDArray[Any]]:
    """Return copies of some rows as another kind, without details."""
    copies = {name: column[rows] for name, column in columns.items()}
    copies["kind"] = np.full(len(rows), kind, columns["kind"].dtype)
    copies["detail"] = np.full(len(rows), -1, columns["detail"].dtype)
    return copies


def _parts(
    columns: Mapping[str, NDArray[Any]],
    parts: tuple[Sequence[Ints], Sequence[Ints], Sequence[Ints]],
    kind: int,
) -> dict[str, NDArray[Any]]:
    """Return copies of rows with other times and no launch; `parts` are rows, starts, stops."""
    rows, start, stop = map(np.concatenate, parts)
    copies = _copies(columns, rows, kind)
    copies |= {"start": start, "stop": stop, "correlation": np.full(len(rows), NULL, np.int64)}
    return copies


def _compute(
    scanned: Scanned, collectives: HostCollectives, columns: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return rows of compute: outermost operators, without the collectives inside of them."""
    ops = _rows(scanned, "cpu_op", lambda _: True)
    others = _rows(scanned, "cpu_op", _NO_COMPUTE.match)
    rows, starts, stops = [ops[:0]], [ops[:0]], [ops[:0]]
    for thread in _training_threads(columns, collectives, ops):
        outer = _outermost(columns, ops[columns["thread"][ops] == thread])
        inner = _outermost(columns, others[columns["thread"][others] == thread])
        pieces = _without(columns, outer, inner)
        for parts, piece in zip((rows, starts, stops), pieces, strict=True):
            parts.append(piece)
    return _parts(columns, (rows, starts, stops), KIND["host_work"])


def _training_threads(
    columns: Mapping[str, NDArray[Any]], collectives: HostCollectives, ops: Ints
) -> list[int]:
    """Return the threads with operators, without those that carry out collectives alone."""
    threads = columns["thread"]
    enqueuing = set(threads[collectives.operator[collectives.operator >= 0]].tolist())
    library = set(collectives.thread.tolist()) - enqueuing
    return [thread for thread in np.unique(threads[ops]).tolist() if thread not in library]


def _outermost(columns: Mapping[str, NDArray[Any]], rows: Ints) -> Ints:
    """Return the rows of one thread that no other of them encloses, by start."""
    start, stop = columns["start"][rows], columns["stop"][rows]
    order = np.lexsort((-stop, start))
    start, stop = start[order], stop[order]
    before = np.concatenate([[np.iinfo(np.int64).min], np.maximum.accumulate(stop)[:-1]])
    return rows[order][start >= before] if len(rows) else rows


def _without(
    columns: Mapping[str, NDArray[Any]], outer: Ints, inner: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return row, start and stop of the parts of disjoint `outer` rows outside of `inner`."""
    start, stop = columns["start"], columns["stop"]
    times = np.concatenate([start[outer], stop[inner], stop[outer], start[inner]])
    step = np.repeat([1, 1, -1, -1], [len(outer), len(inner), len(outer), len(inner)])
    order = np.lexsort((step, times))
    times, level = times[order], np.cumsum(step[order])
    begin = np.flatnonzero((level[:-1] == 1) & (times[:-1] < times[1:]))
    place = np.searchsorted(start[outer], times[begin], side="right") - 1
    inside = (place >= 0) & (times[begin + 1] <= stop[outer[np.maximum(place, 0)]])
    begin, place = begin[inside], place[inside]
    return outer[place], times[begin], times[begin + 1]


def _waits(
    scanned: Scanned,
    collectives: HostCollectives,
    columns: Mapping[str, NDArray[Any]],
    texts: list[str],
) -> dict[str, NDArray[Any]]:
    """Return calls that end with a collective, for gaps of its thread in which one ends.

    `Work.wait()` leaves no event: the thread has none from its call to the end of the
    collective.
    """
    ops = _rows(scanned, "cpu_op", lambda _: True)
    rows, starts, stops = [ops[:0]], [ops[:0]], [ops[:0]]
    launched = np.flatnonzero(collectives.operator >= 0)
    caller = columns["thread"][collectives.operator[launched]]
    for thread in np.unique(caller).tolist():
        outer = _outermost(columns, ops[columns["thread"][ops] == thread])
        own = launched[caller == thread]
        begin, end = columns["stop"][outer][:-1], columns["start"][outer][1:]
        ends = np.sort(collectives.stop[own])
        last = ends[np.maximum(np.searchsorted(ends, end, side="right") - 1, 0)]
        waits = (last > begin) & (last <= end)
        rows.append(outer[:-1][waits])
        starts.append(begin[waits])
        stops.append(last[waits])
    waiting = _parts(columns, (rows, starts, stops), KIND["runtime"])
    waiting["name"] = np.full(len(waiting["start"]), len(texts), columns["name"].dtype)
    texts.append(WAIT)
    return waiting
