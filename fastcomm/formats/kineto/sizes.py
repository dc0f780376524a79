"""Compute the sizes of communication in a Kineto trace, and explain which are unknown.

Sizes are bytes; NULL is unknown.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.formats.kernel_names import Named
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.columns import alike
from fastcomm.trace.events import Events
from fastcomm.trace.host_names import GRAPH_LAUNCH
from fastcomm.trace.schema import COMM, KIND, OP, SPLITS
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NULL, Flags, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorKind:
    """What an operator does, and which of its arguments are the tensors of one rank.

    Both arguments are None if only the device knows the sizes.
    """

    op: str  # of OPS
    input: int | None  # index of the argument that the rank contributes; None: not visible
    output: int | None = None  # index of the argument that the rank receives


_IN_PLACE = OperatorKind(op="AllReduce", input=0, output=0)
_OUT_FOURTH = OperatorKind(op="AllReduce", input=0, output=3)
_ON_DEVICE = OperatorKind(op="AllToAll", input=None)
# `int fa, Tensor inp, Tensor! out` and more.
_CUSTOM = OperatorKind(op="AllReduce", input=1, output=2)
OPERATORS = {
    # The output first, then the input.
    "c10d::alltoall_base_": OperatorKind(op="AllToAll", input=1, output=0),
    "c10d::_allgather_base_": OperatorKind(op="AllGather", input=1, output=0),
    "c10d::_reduce_scatter_base_": OperatorKind(op="ReduceScatter", input=1, output=0),
    # Symmetric memory of PyTorch.
    "symm_mem::multimem_all_reduce_": _IN_PLACE,
    "symm_mem::multimem_one_shot_all_reduce": _IN_PLACE,
    "symm_mem::multimem_one_shot_all_reduce_out": _OUT_FOURTH,
    "symm_mem::multimem_one_shot_reduce_out": OperatorKind(op="Reduce", input=0),
    "symm_mem::multimem_all_gather_out": OperatorKind(op="AllGather", input=0, output=2),
    "symm_mem::one_shot_all_reduce": _IN_PLACE,
    "symm_mem::one_shot_all_reduce_out": _OUT_FOURTH,
    # The first argument is a buffer that may be larger.
    "symm_mem::one_shot_all_reduce_copy": OperatorKind(op="AllReduce", input=1, output=1),
    "symm_mem::one_shot_all_reduce_copy_out": OperatorKind(op="AllReduce", input=1, output=4),
    "symm_mem::two_shot_all_reduce_": _IN_PLACE,
    "symm_mem::two_shot_all_reduce_out": _OUT_FOURTH,
    "symm_mem::reduce_scatter_out": OperatorKind(op="ReduceScatter", input=0, output=3),
    "symm_mem::nvshmem_broadcast": OperatorKind(op="Broadcast", input=0, output=0),
    "symm_mem::nvshmem_all_to_all": OperatorKind(op="AllToAll", input=0, output=1),
    "symm_mem::all_to_all_vdev": _ON_DEVICE,
    "symm_mem::all_to_all_vdev_2d": _ON_DEVICE,
    "symm_mem::all_to_all_vdev_2d_offset": _ON_DEVICE,
    # Custom all-reduces of vLLM, SGLang and AITER.
    "_C_custom_ar::all_reduce": _CUSTOM,
    "_C_custom_ar::qr_all_reduce": _CUSTOM,
    "sgl_kernel::all_reduce": _CUSTOM,
    "sgl_kernel::qr_all_reduce": _CUSTOM,
    # vLLM's own operators, around whatever carries them out.
    "vllm::all_reduce": _IN_PLACE,
    "vllm::all_gather": OperatorKind(op="AllGather", input=0),
    "vllm::reduce_scatter": OperatorKind(op="ReduceScatter", input=0),
}
# The first eight bytes of the names above, except c10d's, for the scanner.
PREFIXES = tuple(
    sorted({name.encode()[:8] for name in OPERATORS if not name.startswith("c10d::")})
)
_COUNTS = ("In msg nelems", "Out msg nelems")
_RANGES = ("call", "mark", "operator")  # of the host around the launch of an event


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Metadata of communication, an entry per event or per kind of event."""

    events: Events  # for their texts
    columns: dict[str, Ints]  # codes of texts, and numbers; NULL is unknown

    def take(self, rows: Ints) -> "Metadata":
        """Return the metadata of some entries."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Metadata(events=self.events, columns=columns)

    def per_text(self, name: str, function: Callable[[str], int]) -> Ints:
        """Apply a function to the text of each entry of a column; NULL without a text."""
        return self.events.by_text(self.columns[name], function)


class RecordedBytes(NamedTuple):
    """What the calls of each kind of communication record; sizes in bytes, NULL if unknown."""

    coalesced: Flags  # whether a call only begins or ends a group of calls
    input: Ints
    output: Ints


def recorded_bytes(metadata: Metadata) -> RecordedBytes:
    """Return the sizes that the calls of each kind of event record."""
    coalesced = metadata.per_text("Collective name", is_no_operation) == 1
    return RecordedBytes(coalesced, *_from_metadata(metadata, coalesced))


def sizes(
    metadata: Metadata, recorded: RecordedBytes, op: NDArray[np.int8], members: Ints
) -> byte_rules.Sizes:
    """Return the sizes of each kind of communication event, in bytes.

    The payload of an all-to-all that shows only its input is the input, since nccl-tests counts
    what a rank sends. Whether its splits are even is unknown then, and so is the message size.

    Parameters
    ----------
    metadata, recorded
        Metadata of each kind of event, and its sizes (`recorded_bytes`).
    op
        Operation of each kind, an index into OPS.
    members
        Number of ranks of its group, or NULL.

    """
    coalesced, bytes_in, bytes_out = recorded
    operator_in, operator_out = _from_operators(metadata, op)
    has_no_counts = (bytes_in == NULL) & (bytes_out == NULL) & ~coalesced
    bytes_in = np.where(has_no_counts, operator_in, bytes_in)
    bytes_out = np.where(has_no_counts, operator_out, bytes_out)
    copies = metadata.columns["kind"] != KIND["kernel"]
    bytes_in = np.where(copies, metadata.columns["bytes"], bytes_in)
    unknown = (op == OP["OTHER"]) | (metadata.per_text("Collective name", _takes_sizes) == 1)
    bytes_in, bytes_out = (np.where(unknown, NULL, k) for k in (bytes_in, bytes_out))
    uneven = (op == OP["AllToAll"]) & ((bytes_in == NULL) | (bytes_out == NULL))
    for name in ("In split size", "Out split size"):
        uneven |= metadata.per_text(name, _is_uneven) == 1
    return byte_rules.sizes(op, bytes_in, bytes_out, members, uneven)


_SPLITS = dict(zip(SPLITS, ("In split size", "Out split size"), strict=True))


def split_bytes(
    metadata: Metadata, recorded: RecordedBytes, op: NDArray[np.int8], members: Ints
) -> dict[str, pa.Array]:
    """Return the bytes of each kind of all-to-all to and from each rank of its group.

    Splits count rows of the tensor, or none where all are equal. They are null where a trace
    cuts their list, has no sizes, or has sizes that do not fit.

    Parameters
    ----------
    metadata, recorded, op, members
        As of `sizes`.

    Returns
    -------
    dict of str to pyarrow.Array
        The columns `schema.SPLITS`; none without an all-to-all.

    """
    rows = np.flatnonzero((op == OP["AllToAll"]) & (members > 1))
    columns = {}
    for (column, name), total in zip(_SPLITS.items(), recorded[1:], strict=True):
        splits: list[list[int] | None] = [None] * len(op)
        usable = rows[(total[rows] != NULL) & (metadata.columns[name][rows] != NULL)]
        numbers = (k[usable].tolist() for k in (metadata.columns[name], total, members))
        for row, code, whole, size in zip(usable.tolist(), *numbers, strict=True):
            splits[row] = _divided(metadata.events.texts[code], whole, size)
        if len(rows):
            columns[column] = pa.array(splits, COMM.field(column).type)
    return columns


def _divided(text: str, total: int, members: int) -> list[int] | None:
    """Return the bytes of each of `members` from the text of a list of rows; None: unknown."""
    try:
        rows = orjson.loads(text) if text else []
    except ValueError:  # cut after some items, or nested without end
        return None
    if not isinstance(rows, list):
        return None
    rows = rows or [1] * members
    if len(rows) != members or set(map(type, rows)) != {int} or min(rows) < 0:
        return None
    whole = sum(rows)
    if whole == 0:
        return [0] * members if total == 0 else None
    share, rest = divmod(total, whole)
    return None if rest else [count * share for count in rows]


def is_no_operation(text: str) -> int:
    """Return 1 for a `Collective name` that only begins or ends a group, or waits; else 0."""
    return int(not text or byte_rules.op_of_collective(text) is None)


def _takes_sizes(text: str) -> int:
    """Return 1 for a collective of torchcomms that takes its sizes from the device; else 0."""
    return int(text.startswith("device_"))


def only_size(groups: Sequence[ProcessGroup]) -> int:
    """Return the size that all groups of several ranks share, else NULL.

    A rank's trace lists the groups of the rank, and whatever torch.distributed runs on several
    ranks runs in one of them.
    """
    sizes = {group.size for group in groups if group.size is not None and group.size > 1}
    has_all_sizes = all(group.size is not None for group in groups)
    return sizes.pop() if has_all_sizes and len(sizes) == 1 else NULL


def _from_metadata(metadata: Metadata, coalesced: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return bytes in and out from element counts; both NULL if a count overflowed."""
    element = metadata.per_text("dtype", lambda text: byte_rules.element_size(text) or NULL)
    is_unknown = coalesced | overflowed(metadata)
    # Larger counts would overflow here; limited, they still exceed the sizes that are accepted.
    counts = (np.minimum(metadata.columns[name], 2 * byte_rules.LARGEST) for name in _COUNTS)
    bytes_in, bytes_out = (
        np.where(is_unknown, NULL, byte_rules.byte_counts(count, element)) for count in counts
    )
    return bytes_in, bytes_out


def overflowed(metadata: Metadata) -> NDArray[np.bool_]:
    """Return, per row of `metadata`, whether an element count (in or out) is negative.

    Older profilers wrote counts in 32 bits, which overflow.
    """
    counts = np.stack([metadata.columns[name] for name in _COUNTS])
    result: NDArray[np.bool_] = ((counts < 0) & (counts != NULL)).any(axis=0)
    return result


def _from_operators(metadata: Metadata, op: NDArray[np.int8]) -> tuple[Ints, Ints]:
    """Return bytes in and out from the tensors that the host's calls and operators show.

    The library's range and the first argument of the host's call show the input. An operator
    counts if it does what the event does.
    """
    bytes_in = _per_pair(metadata, "mark", metadata.columns["mark"] != NULL, _total)
    call = _per_pair(metadata, "call", bytes_in == NULL, lambda tensors: _total(tensors[:1]))
    bytes_in = np.where(bytes_in == NULL, call, bytes_in)
    bytes_out = np.full(len(op), NULL, np.int64)
    for code, operator in _operators_in(metadata).items():
        is_match = metadata.columns["operator"] == code
        is_match &= op == OP[operator.op]
        operator_in, operator_out = (
            _per_pair(metadata, "operator", is_match, _argument_bytes(place))
            for place in (operator.input, operator.output)
        )
        bytes_in, bytes_out = (
            np.where(operator_in == NULL, bytes_in, operator_in),
            np.where(is_match, operator_out, bytes_out),
        )
    return bytes_in, bytes_out


def _operators_in(metadata: Metadata) -> dict[int, OperatorKind]:
    """Return the operators of `OPERATORS` that enclose a launch, by the code of their name."""
    names = {
        code: metadata.events.text(code) for code in np.unique(metadata.columns["operator"])
    }
    return {code: OPERATORS[name] for code, name in names.items() if name in OPERATORS}


def _argument_bytes(index: int | None) -> Callable[["_Tensors"], int]:
    """Return a function from tensors to the bytes of the one at an index; NULL for None."""
    return lambda tensors: NULL if index is None else _total(tensors[index : index + 1])


DIMENSIONS = ("Input Dims", "Input type")
_Tensors = Sequence[tuple[Any, str]]


def _per_pair(
    metadata: Metadata,
    range_: str,
    mask: NDArray[np.bool_],
    function: Callable[[_Tensors], int],
) -> Ints:
    """Apply a function to the tensors of a range of each entry; NULL if it shows none.

    The function is called once per different pair of dimensions and types.
    """
    result = np.full(len(mask), NULL, np.int64)
    rows = np.flatnonzero(mask)
    if not len(rows):
        return result
    dims, types = (metadata.columns[f"{range_} {name}"][rows] for name in DIMENSIONS)
    first, kind = alike(dims, types)
    pairs = zip(dims[first].tolist(), types[first].tolist(), strict=True)
    values = [
        NULL if NULL in pair else function(_tensors(metadata.events, *pair)) for pair in pairs
    ]
    result[rows] = np.array(values, np.int64)[kind]
    return result


def _tensors(events: Events, dims: int, types: int) -> _Tensors:
    """Return dimensions and type of each tensor from two JSON texts; none if invalid."""
    try:
        shapes, names = json.loads(events.texts[dims]), json.loads(events.texts[types])
    except (ValueError, RecursionError):
        return ()
    if not isinstance(shapes, list) or not isinstance(names, list) or len(shapes) != len(names):
        return ()
    return [(shape, str(name)) for shape, name in zip(shapes, names, strict=True)]


def _total(tensors: _Tensors) -> int:
    """Return the bytes of all tensors; NULL if there is none, or one has an unknown type."""
    total, has_tensor = 0, False
    for shape, name in tensors:
        if name in ("", "Scalar"):
            continue
        size = byte_rules.element_size(name)
        if size is None or not isinstance(shape, list):
            return NULL
        has_tensor = True
        for dims in shape if shape and isinstance(shape[0], list) else [shape]:
            if not all(isinstance(length, int) and length >= 0 for length in dims):
                return NULL
            total += size * math.prod(dims)
    return total if has_tensor and total < -NULL else NULL


@lru_cache(maxsize=1 << 12)  # ranks share these texts
def _is_uneven(text: str) -> int:
    """Return 1 for a list of splits with different values, or a truncated one; else 0."""
    try:
        splits = json.loads(text)
    except (ValueError, RecursionError):
        return 1
    return int(not isinstance(splits, list) or len(set(map(str, splits))) > 1)


# Absolute times tell the version: PyTorch 2.4 was released in July 2024.
_SINCE_2_4 = 1_721_800_000 * 10**9
_ABSOLUTE = 1_600_000_000 * 10**9
_REASONS = {
    "graph": "a CUDA graph replays them: capture it with torch.cuda.graph(..., "
    "enable_annotations=True) of a PyTorch that annotates collectives, or profile without "
    "graphs",
    "coalesced": "they end a group of coalesced operations, whose calls are not recorded",
    "shared": "several kernels do the work of their calls, and which did what is not recorded",
    "overflowed": "their counts overflowed 32 bits: record with a newer PyTorch",
    "device": "their operator takes the sizes from the device, and no setting records them",
    "group": "how many ranks took part is unknown",
    "group_old": "how many ranks took part is unknown: record with PyTorch 2.4 or newer",
    "shapes": "the trace has no shapes of their operators: record with record_shapes=True",
    "shapes_old": "the trace has no shapes of their operators: record with "
    "record_shapes=True, or with PyTorch 2.4 or newer",
    "arguments": "the metadata of their operators is not understood",
    "launches": "the launches that lead to their operators are not recorded: record with "
    "ProfilerActivity.CPU, too",
    "unjoined": "launches are recorded, but no correlation joins them with kernels",
    "launch": "their launch is not recorded (was it before the recording began?)",
    "old": "the host's events have no metadata of them: record with PyTorch 2.4 or newer, with "
    "ProfilerActivity.CPU and record_shapes=True",
    "library": "the library that launched them reports no sizes to the profiler, and no "
    "setting records them",
}


def reasons(
    metadata: Metadata,
    op: NDArray[np.int8],
    named: Sequence[Named],
    rows: Ints,
    kind: Ints,
) -> tuple[str, ...]:
    """Return why sizes are unknown, the most frequent reason first.

    Parameters
    ----------
    metadata, op
        Metadata of each kind of event, and its operation.
    named
        Kernel names, indexed by the column "named" of the metadata.
    rows
        Rows of the events of unknown size.
    kind
        The kind of each of these events.

    Returns
    -------
    tuple of str
        Sentences; several begin with the number of their events.

    """
    if not len(rows):
        return ()
    by_kind = _by_kind(metadata, op)
    launch = metadata.events.launch_of(rows)
    by_launch = _by_launch(metadata.events, launch, _is_nccl(metadata, named)[kind])
    key = np.array(by_kind, np.str_)[kind]
    key = np.where(key != "", key, by_launch)
    key = np.where(_in_graph(metadata.events, launch), "graph", key)
    names, counts = np.unique(key, return_counts=True)
    order = np.lexsort((names, -counts))
    texts = [_REASONS[str(names[place])] for place in order]
    if len(texts) == 1:
        return (texts[0],)
    return tuple(f"{counts[place]}: {text}" for place, text in zip(order, texts, strict=True))


def _by_kind(metadata: Metadata, op: NDArray[np.int8]) -> list[str]:
    """Return the key of `_REASONS` for each kind of event; "" without any metadata."""
    columns = metadata.columns
    is_unnamed = metadata.per_text("Collective name", is_no_operation)
    is_coalesced = columns["Collective name"] == NULL
    is_coalesced &= metadata.per_text("mark", _ends_group) == 1
    is_range = np.any([columns[name] != NULL for name in _RANGES], axis=0)
    on_device = metadata.per_text("operator", _is_on_device) == 1
    on_device |= metadata.per_text("Collective name", _takes_sizes) == 1
    no_shapes = np.all([columns[f"{name} Input Dims"] == NULL for name in _RANGES], axis=0)
    counted = np.any([columns[name] != NULL for name in _COUNTS], axis=0)
    needs_group = np.isin(op, [OP[name] for name in ("AllGather", "ReduceScatter")])
    age = "_old" if is_old(metadata.events) else ""
    conditions = [
        columns["shared"] == 1,
        (is_unnamed == 1) | is_coalesced,
        overflowed(metadata),
        on_device,
        # A collective of the host has no range, and its counts are those of the shapes.
        (is_range | (is_unnamed == 0)) & no_shapes & ~counted,
        needs_group & (is_range | counted),
        is_range | (is_unnamed == 0),
    ]
    sized = [f"shapes{age}", f"group{age}"]
    keys = ["shared", "coalesced", "overflowed", "device", *sized, "arguments"]
    return list(np.select(conditions, keys, "").tolist())


def _ends_group(name: str) -> int:
    """Return 1 for the range in which the kernels of coalesced calls are launched; else 0."""
    return int(name == "nccl:coalesced")


def _is_on_device(name: str) -> int:
    return int(name in OPERATORS and OPERATORS[name].input is None)


def _is_nccl(metadata: Metadata, named: Sequence[Named]) -> Flags:
    is_nccl = np.array([kernel.library == "NCCL" for kernel in named], np.bool_)
    return is_nccl[metadata.columns["named"]]


def _by_launch(events: Events, launch: Ints, is_nccl: Flags) -> NDArray[np.str_]:
    """Return why the size of each event is unknown, as a key of `_REASONS`, by its launch.

    `launch` is the row of the launch of each event, or NONE, and `is_nccl` tells which events
    are kernels of NCCL.
    """
    if not len(events.rows("runtime")):
        return np.full(len(launch), "launches")
    old = is_nccl & is_old(events)
    absent = "unjoined" if (launch < 0).all() and _is_unjoined(events) else "launch"
    return np.select([launch < 0, old], [absent, "old"], "library")


def _is_unjoined(events: Events) -> bool:
    """Return whether launches are recorded, but none of them is joined with device work."""
    work = events.rows("kernel", "memcpy", "memset")
    return bool((events.launch_of(work) < 0).all()) and len(events.unanswered()) > 0


def _in_graph(events: Events, launch: Ints) -> Flags:
    """Return which events a graph's launch started."""
    codes = np.where(launch >= 0, events.name[launch].astype(np.int64), NULL)
    in_graph: Flags = events.by_text(codes, lambda name: int(GRAPH_LAUNCH in name)) == 1
    return in_graph


def is_old(events: Events) -> bool:
    """Return whether a trace may be of a PyTorch before 2.4, by the time of its first event."""
    start = events.start
    return not len(start) or not int(start[0]) >= _ABSOLUTE or int(start[0]) < _SINCE_2_4
