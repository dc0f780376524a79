"""Find the collectives of runs without an accelerator: the host computes and communicates.

PyTorch writes two events for a collective of gloo, MPI or UCC: the operator (`c10d::...`) on
the calling thread, which mostly only enqueues it, and an annotation (`gloo:...`) from the time
at which a thread of the library takes it to its end, waiting included. No event names the
process group, and nothing but order, time and sizes links the two. Of a message, the annotation
begins inside of the operator, on its thread; `torch.distributed.record_comm` gives it any name.
"""

import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fastcomm.formats.kineto.chrome import Scanned
from fastcomm.trace.events import enclosing
from fastcomm.trace.host_names import DEVICE_ANNOTATION, DEVICE_LIBRARIES, HOST_ANNOTATION
from fastcomm.trace.schema import KIND
from fastcomm_kernels.arrays import NONE, NULL, Ints

# Annotations of the libraries that work on the host.
ANNOTATION = re.compile(HOST_ANNOTATION + "$")
_MESSAGES = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
_MOST_NESTED = 3  # lists of lists of tensors
# Annotations of libraries that work on a device: then the device's work was not recorded.
_ON_DEVICE = re.compile(DEVICE_ANNOTATION)


class _Signature(NamedTuple):
    """The arguments of a c10d operator; None: it has no such argument."""

    annotations: tuple[str, ...]  # their names, without the library
    operation: str  # as in the metadata of NCCL's kernels
    input: int | None = None  # index of the tensors that this rank contributes
    output: int | None = None  # index of the tensors that it receives
    splits: tuple[int, int] | None = None  # indices of the splits of input and output
    peer: int | None = None  # index of the other rank, as its place in the group
    root: int | None = None  # index of the root, as its place in the group


_REDUCE_SCATTER = ("all_reduce", "reduce_scatter", "_reduce_scatter_base")
SIGNATURES = {
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


def json_list(text: str) -> list[Any] | None:
    """Parse a JSON list; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _list(scanned: Scanned, name: str, row: int) -> list[Any]:
    """Return the list in the arg `name` of an event; empty if there is none."""
    return json_list(scanned.detail(name, row)) or []


def enqueued(scanned: Scanned, operator: int) -> list[tuple[str, str]]:
    """Return the keys of the annotations that an operator of c10d may lead to.

    `operator` is its row; keys are those of `annotation_key`.
    """
    signature = SIGNATURES[scanned.name(operator)]
    index = signature.output if signature.input is None else signature.input
    shapes = _shapes(_argument(scanned, operator, index or 0))
    return [(name, json.dumps(shapes)) for name in signature.annotations]


def annotation_key(scanned: Scanned, row: int) -> tuple[str, str]:
    """Return the operation of an annotation (a row), and its tensors' shapes as JSON."""
    shapes = _shapes(_list(scanned, "Input Dims", row))
    return _operation(scanned, row), json.dumps(shapes)


def _operation(scanned: Scanned, annotation: int) -> str:
    """Return the name of an annotation without that of the library."""
    match = ANNOTATION.match(scanned.name(annotation))
    return match[1] if match else ""


def _argument(scanned: Scanned, row: int, index: int | None) -> list[Any]:
    """Return the dimensions of an operator's argument: of a tensor, or a list of tensors."""
    dims = _list(scanned, "Input Dims", row)
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


class Call(NamedTuple):
    """What the operator of a collective states, sizes in elements; NULL and "" are unknown."""

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


def call_of(scanned: Scanned, operator: int, annotation: int) -> Call:
    """Return kind, sizes and type of a collective, from the operator that started it.

    Without an operator they are those that its annotation states.

    Parameters
    ----------
    scanned
        Events of one file.
    operator, annotation
        Rows of the two events; NONE for no operator.

    Returns
    -------
    Call
        Sizes in elements; unknown ones are NULL.

    """
    # The type of a list of tensors is in the annotation alone.
    dtype = next(iter(_list(scanned, "Input type", annotation)), "")
    if operator < 0:
        count = _elements(_list(scanned, "Input Dims", annotation))
        return Call(_operation(scanned, annotation), count, count, str(dtype))
    signature = SIGNATURES[scanned.name(operator)]
    count_in, count_out = (
        NULL if index is None else _elements(_argument(scanned, operator, index))
        for index in (signature.input, signature.output)
    )
    values = _list(scanned, "Concrete Inputs", operator)
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
    if lengths := [len(json_list(text) or []) for text in splits if text not in ("", "[]")]:
        return lengths[0]
    if min(counts) <= 0:
        return NULL
    if signature.operation.startswith("allgather"):
        return count_out // count_in if count_out % count_in == 0 else NULL
    if signature.operation.startswith("reduce_scatter"):
        return count_in // count_out if count_in % count_out == 0 else NULL
    return NULL


def is_host_run(scanned: Scanned) -> bool:
    """Return whether a trace has collectives of the host, and no sign of an accelerator."""
    kinds = np.unique(scanned.columns["kind"])
    if np.isin([KIND[name] for name in ("kernel", "memcpy", "memset", "runtime")], kinds).any():
        return False
    rows = np.flatnonzero(scanned.columns["kind"] == KIND["annotation"])
    is_on_device = scanned.are_named(rows, _ON_DEVICE.match)
    info = scanned.envelope.get("distributedInfo")
    backend = str(info.get("backend", "")) if isinstance(info, dict) else ""
    if is_on_device.any() or any(library in backend for library in DEVICE_LIBRARIES):
        return False
    return bool(scanned.are_named(rows, ANNOTATION.match).any() or _messages(scanned))


def _messages(scanned: Scanned) -> dict[int, int]:
    """Return the annotations that begin inside of an operator of a message, and its row."""
    operators = named_rows(scanned, "cpu_op", _MESSAGES.__contains__)
    annotations = named_rows(scanned, "annotation", lambda _: True)
    columns = scanned.columns
    lanes = np.unique(columns["thread"], return_inverse=True)[1].astype(np.int32)
    start = columns["start"]
    place = enclosing(
        (lanes[operators], start[operators], columns["stop"][operators]),
        (lanes[annotations], start[annotations], start[annotations]),
    )
    pairs = zip(annotations.tolist(), place.tolist(), strict=True)
    return {row: int(operators[n]) for row, n in pairs if n >= 0}


def with_host_collectives(scanned: Scanned) -> Scanned:
    """Give the host's collectives of a run with an accelerator a kind of their own.

    They are annotations in the file, and run beside those of the device.
    """
    kind = scanned.columns["kind"].copy()
    kind[named_rows(scanned, "annotation", ANNOTATION.match)] = KIND["host_comm"]
    return replace(scanned, columns={**scanned.columns, "kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCollectives:
    """The collectives of a rank that ran on the host, by start. Arrays have a row for each."""

    annotation: Ints  # row of the annotation
    operator: Ints  # row of the c10d operator, or NONE
    thread: Ints  # that carried it out: a number of the trace
    called: Ints  # ns, as in the file: start of the operator, or of the annotation
    stop: Ints
    key: tuple[tuple[str, str, str], ...]  # operation; dimensions and type of the input
    calls: tuple[Call, ...]

    def calling_order(self) -> Ints:
        """Return the indices of the collectives in the order in which they were enqueued."""
        return np.argsort(self.called, kind="stable")

    @classmethod
    def of(cls, scanned: Scanned) -> "HostCollectives":
        """Find the collectives of a trace, with the operator that enqueued each."""
        columns, messages = scanned.columns, _messages(scanned)
        annotation = np.union1d(
            named_rows(scanned, "annotation", ANNOTATION.match), np.array([*messages], np.int64)
        )
        annotation = annotation[np.argsort(columns["start"][annotation], kind="stable")]
        operator = _operators(scanned, annotation, messages)
        calls = tuple(
            call_of(scanned, row, own)
            for row, own in zip(operator.tolist(), annotation.tolist(), strict=True)
        )
        return cls(
            annotation=annotation,
            operator=operator,
            thread=columns["thread"][annotation],
            called=columns["start"][np.where(operator >= 0, operator, annotation)],
            stop=columns["stop"][annotation],
            key=tuple(
                (
                    call.operation,
                    scanned.detail("Input Dims", row),
                    scanned.detail("Input type", row),
                )
                for call, row in zip(calls, annotation.tolist(), strict=True)
            ),
            calls=calls,
        )


def named_rows(scanned: Scanned, kind: str, accept: Any) -> Ints:
    """Return the rows of the events of a kind whose name is accepted, by start.

    Parameters
    ----------
    scanned
        Events of one file.
    kind
        Key of `KIND`.
    accept
        Function of a name that returns whether to accept it; called once per name.

    """
    rows = np.flatnonzero(scanned.columns["kind"] == KIND[kind])
    rows = rows[scanned.are_named(rows, accept)]
    return rows[np.argsort(scanned.columns["start"][rows], kind="stable")]


def _operators(scanned: Scanned, annotations: Ints, messages: Mapping[int, int]) -> Ints:
    """Return the row of the operator that enqueued each collective, or NONE.

    `annotations` are the rows of the collectives' annotations, `messages` is of `_messages`.
    Where an execution trace was recorded, the number of an annotation is one above that of its
    operator. Elsewhere it is the first operator with this kind and these tensors that began
    before and that no earlier collective took, since operators and annotations have one order,
    but for few exceptions.
    """
    columns = scanned.columns
    rows = named_rows(scanned, "cpu_op", SIGNATURES.__contains__)
    number = columns.get("Record function id", np.full(len(columns["kind"]), NULL, np.int64))
    by_number = {int(number[row]): row for row in rows.tolist() if number[row] > 0}
    free: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for row in rows.tolist():
        for key in enqueued(scanned, row):
            free[key].append(row)
    used: set[int] = set(messages.values())
    result = []
    for annotation in annotations.tolist():
        if annotation in messages:
            result.append(messages[annotation])
            continue
        row = (
            by_number.get(int(number[annotation]) - 1, NONE) if number[annotation] > 0 else NONE
        )
        if row < 0 or row in used:
            row = _first_free(scanned, annotation, free, used)
        used.add(row)
        result.append(row)
    return np.array(result, np.int64).reshape(-1)


def _first_free(
    scanned: Scanned,
    annotation: int,
    free: Mapping[tuple[str, str], deque[int]],
    used: set[int],
) -> int:
    """Return the first unused operator of equal tensors that began before, or NONE."""
    columns = scanned.columns
    rows = free.get(annotation_key(scanned, annotation), deque())
    while rows and rows[0] in used:
        rows.popleft()
    begin = columns["start"][annotation]
    return rows[0] if rows and columns["start"][rows[0]] <= begin else NONE
