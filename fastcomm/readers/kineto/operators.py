"""Read what the operators of a Kineto trace state: shapes, types and values of their inputs.

The profiler records shapes only with `record_shapes=True`. `calls` has the time of GEMMs and
attention: their kernels are those launched while the operator ran on its thread. `Call` has
what an operator of c10d states of its collective, for runs without an accelerator.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.kineto.categories import scan
from fastcomm.readers.kineto.chrome import Scanned
from fastcomm.readers.kineto.selection import METRICS
from fastcomm.readers.patterns import HOST_LIBRARIES
from fastcomm.trace.columns import lookup
from fastcomm.trace.schema import KIND
from fastcomm_kernels.arrays import NULL, Ints

# The first eight bytes of names of GEMMs and attention.
_NAMES = (b"aten::mm", b"aten::ad", b"aten::bm", b"aten::_f", b"aten::_s", b"flash_at")
_ARGS = ("Input Dims", "Input type", "Concrete Inputs")
_SHAPES = replace(METRICS, prefixes=_NAMES, detail_args=(), detail_texts=_ARGS)
# Annotations of the libraries that work on the host.
ANNOTATION = re.compile(rf"({'|'.join(HOST_LIBRARIES)}):(\w+)")
_MOST_NESTED = 3  # lists of lists of tensors


class ShapedCall(NamedTuple):
    """One operator: shapes and types of its inputs, and the values of scalars."""

    name: str
    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...]
    seconds: float  # of the kernels that it launched


def calls(path: Path, names: tuple[str, ...]) -> list[ShapedCall]:
    """Return the operators with the given names that have shapes and launched kernels.

    Raises `TraceFileError` if the file is not a trace.
    """
    scanned, _ = scan(path, _SHAPES)
    columns = scanned.columns
    name_codes = [code for code, text in enumerate(scanned.texts) if text in names]
    ops = np.flatnonzero(
        (columns["kind"] == KIND["cpu_op"]) & np.isin(columns["name"], name_codes)
    )
    ops = ops[np.argsort(columns["start"][ops], kind="stable")]
    spent = _spent(columns, ops)
    shaped = (
        _shaped_call(scanned, int(row), float(time) * 1e-9)
        for row, time in zip(ops[spent > 0], spent[spent > 0], strict=True)
    )
    return [call for call in shaped if call]


def _spent(columns: dict[str, NDArray[Any]], ops: Ints) -> Ints:
    """Return the ns of the kernels of each operator; operators are sorted by start."""
    works, launches = (np.flatnonzero(columns["kind"] == KIND[name]) for name in _LINKED)
    launches = launches[np.argsort(columns["correlation"][launches], kind="stable")]
    place = lookup(columns["correlation"][launches], columns["correlation"][works])
    works, launches = works[place >= 0], launches[place[place >= 0]]
    op = _around(columns, ops, launches)
    inside = op >= 0
    duration = columns["stop"][works[inside]] - columns["start"][works[inside]]
    spent = np.zeros(len(ops), np.int64)
    np.add.at(spent, op[inside], duration)
    return spent


_LINKED = ("kernel", "runtime")


def _around(columns: dict[str, NDArray[Any]], ops: Ints, launches: Ints) -> Ints:
    """Return the innermost operator around each launch on its thread, or -1.

    If a launch's thread has no operators, as with ids of another kind, all threads count.
    """
    result = np.full(len(launches), -1, np.int64)
    threads, start = columns["thread"], columns["start"]
    for thread in np.unique(threads[launches]):
        rows = np.flatnonzero(threads[launches] == thread)
        places = np.flatnonzero(threads[ops] == thread)
        places = places if len(places) else np.arange(len(ops))
        if not len(places):
            continue
        when = start[launches[rows]]
        last = np.searchsorted(start[ops[places]], when, side="right") - 1
        place = places[np.maximum(last, 0)]
        inside = (last >= 0) & (when < columns["stop"][ops[place]])
        result[rows[inside]] = place[inside]
    return result


def _shaped_call(scanned: Scanned, row: int, seconds: float) -> ShapedCall | None:
    """Return the call of an event with its input shapes; None if they are not recorded.

    `seconds` is the time of the kernels that it launched.
    """
    args = [_list(scanned, name, row) for name in _ARGS]
    if args[0] is None or args[1] is None:
        return None
    dims = tuple(tuple(shape) if _is_shape(shape) else () for shape in args[0])
    types, values = (tuple(str(value) for value in arg or ()) for arg in args[1:])
    return ShapedCall(_name(scanned, row), dims, types, values, seconds)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(length, int) for length in value)


def _name(scanned: Scanned, row: int) -> str:
    return scanned.texts[int(scanned.columns["name"][row])]


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


def detail(scanned: Scanned, name: str, row: int) -> str:
    """Return the text of the argument `name` of the event in a row; "" without one.

    A `row` of -1 is no event.
    """
    if row < 0:
        return ""
    code = int(scanned.details[name][int(scanned.columns["detail"][row])])
    return "" if code == NULL else scanned.texts[code]


def _list(scanned: Scanned, name: str, row: int) -> list[Any] | None:
    """Return a detail that is a JSON list; None if it is none."""
    return _parsed(detail(scanned, name, row))


def _parsed(text: str) -> list[Any] | None:
    """Parse a JSON list; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def enqueued(scanned: Scanned, operator: int) -> list[tuple[str, str]]:
    """Return the keys of the annotations that an operator of c10d may lead to.

    `operator` is its row; keys are those of `annotation_key`.
    """
    signature = SIGNATURES[_name(scanned, operator)]
    index = signature.output if signature.input is None else signature.input
    shapes = _shapes(_argument(scanned, operator, index or 0))
    return [(name, json.dumps(shapes)) for name in signature.annotations]


def annotation_key(scanned: Scanned, row: int) -> tuple[str, str]:
    """Return the operation of an annotation (a row), and its tensors' shapes as JSON."""
    shapes = _shapes(_list(scanned, "Input Dims", row) or [])
    return _operation(scanned, row), json.dumps(shapes)


def _operation(scanned: Scanned, annotation: int) -> str:
    """Return the name of an annotation without that of the library."""
    match = ANNOTATION.match(_name(scanned, annotation))
    return match[2] if match else ""


def _argument(scanned: Scanned, row: int, index: int | None) -> list[Any]:
    """Return the dimensions of an operator's argument: of a tensor, or a list of tensors."""
    dims = _list(scanned, "Input Dims", row) or []
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
        Rows of the two events; -1 for no operator.

    Returns
    -------
    Call
        Sizes in elements; unknown ones are NULL.

    """
    # The type of a list of tensors is in the annotation alone.
    dtype = next(iter(_list(scanned, "Input type", annotation) or []), "")
    if operator < 0:
        count = _elements(_list(scanned, "Input Dims", annotation) or [])
        return Call(_operation(scanned, annotation), count, count, str(dtype))
    signature = SIGNATURES[_name(scanned, operator)]
    count_in, count_out = (
        NULL if index is None else _elements(_argument(scanned, operator, index))
        for index in (signature.input, signature.output)
    )
    values = _list(scanned, "Concrete Inputs", operator) or []
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
    if lengths := [len(_parsed(text) or []) for text in splits if text not in ("", "[]")]:
        return lengths[0]
    if min(counts) <= 0:
        return NULL
    if signature.operation.startswith("allgather"):
        return count_out // count_in if count_out % count_in == 0 else NULL
    if signature.operation.startswith("reduce_scatter"):
        return count_in // count_out if count_in % count_out == 0 else NULL
    return NULL
