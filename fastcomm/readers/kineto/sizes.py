"""Sizes of communication in a Kineto trace, and why a size is unknown."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.patterns import Named
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.columns import alike
from fastcomm.trace.events import Events
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import ProcessGroup
from fastcomm_kernels.arrays import NULL, Flags, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorKind:
    """What an operator does, and which of its arguments are the tensors of one rank.

    `given` is the place of what the rank gives, `got` of what it gets; None: no argument shows
    it. Both are None where the sizes are known on the device alone.
    """

    op: str  # of OPS
    given: int | None
    got: int | None = None


_IN_PLACE = OperatorKind(op="AllReduce", given=0, got=0)
_OUT_FOURTH = OperatorKind(op="AllReduce", given=0, got=3)
_ON_DEVICE = OperatorKind(op="AllToAll", given=None)
# `int fa, Tensor inp, Tensor! out` and more.
_CUSTOM = OperatorKind(op="AllReduce", given=1, got=2)

OPERATORS = {
    # The output first, then the input.
    "c10d::alltoall_base_": OperatorKind(op="AllToAll", given=1, got=0),
    "c10d::_allgather_base_": OperatorKind(op="AllGather", given=1, got=0),
    "c10d::_reduce_scatter_base_": OperatorKind(op="ReduceScatter", given=1, got=0),
    # Symmetric memory of PyTorch.
    "symm_mem::multimem_all_reduce_": _IN_PLACE,
    "symm_mem::multimem_one_shot_all_reduce": _IN_PLACE,
    "symm_mem::multimem_one_shot_all_reduce_out": _OUT_FOURTH,
    "symm_mem::multimem_one_shot_reduce_out": OperatorKind(op="Reduce", given=0),
    "symm_mem::multimem_all_gather_out": OperatorKind(op="AllGather", given=0, got=2),
    "symm_mem::one_shot_all_reduce": _IN_PLACE,
    "symm_mem::one_shot_all_reduce_out": _OUT_FOURTH,
    # The first argument is a buffer that may be larger.
    "symm_mem::one_shot_all_reduce_copy": OperatorKind(op="AllReduce", given=1, got=1),
    "symm_mem::one_shot_all_reduce_copy_out": OperatorKind(op="AllReduce", given=1, got=4),
    "symm_mem::two_shot_all_reduce_": _IN_PLACE,
    "symm_mem::two_shot_all_reduce_out": _OUT_FOURTH,
    "symm_mem::reduce_scatter_out": OperatorKind(op="ReduceScatter", given=0, got=3),
    "symm_mem::nvshmem_broadcast": OperatorKind(op="Broadcast", given=0, got=0),
    "symm_mem::nvshmem_all_to_all": OperatorKind(op="AllToAll", given=0, got=1),
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
    "vllm::all_gather": OperatorKind(op="AllGather", given=0),
    "vllm::reduce_scatter": OperatorKind(op="ReduceScatter", given=0),
}

# Beginnings of the names above but c10d's, eight bytes at most, for the scanner.
PREFIXES = tuple(
    sorted({name.encode()[:8] for name in OPERATORS if not name.startswith("c10d::")})
)


# Words of the metadata that name no operation: what the kernel does stands elsewhere.
NO_OPERATION = ("", "wait", "coalesced", "startCoalescing", "endCoalescing")


class StatedSizes(Protocol):
    """What a trace says of each kind of communication event, in codes and numbers."""

    @property
    def events(self) -> Events:
        """The events, for their texts."""

    @property
    def columns(self) -> dict[str, Ints]:
        """What is said: one entry a kind of event."""

    def per_text(self, name: str, answer: Callable[[str], int]) -> Ints:
        """Return the answer to the text of each entry of a column, NULL where it has none."""


def sizes(said: StatedSizes, op: NDArray[np.int8], members: Ints) -> byte_rules.Sizes:
    """Return the sizes of each kind of event; `members` are the sizes of the groups.

    Where an all-to-all shows its input alone, that is its payload: nccl-tests counts what a
    rank sends. Whether its splits are even is unknown then, and so is the size of a message.
    """
    coalesced = said.per_text("Collective name", is_no_operation) == 1
    given, got = _of_metadata(said, coalesced)
    shown_given, shown_got = _of_operators(said, op)
    silent = (given == NULL) & (got == NULL) & ~coalesced
    given = np.where(silent, shown_given, given)
    got = np.where(silent, shown_got, got)
    copies = said.columns["kind"] != KIND["kernel"]
    given = np.where(copies, said.columns["bytes"], given)
    unknown = op == OP["OTHER"]
    given, got = np.where(unknown, NULL, given), np.where(unknown, NULL, got)
    uneven = (op == OP["AllToAll"]) & ((given == NULL) | (got == NULL))
    for name in ("In split size", "Out split size"):
        uneven |= said.per_text(name, _is_uneven) == 1
    return byte_rules.sizes(op, given, got, members, uneven)


def is_no_operation(text: str) -> int:
    """Return 1 for a `Collective name` that only begins or ends a group, or waits, else 0."""
    return int(text in NO_OPERATION)


def only_size(groups: Sequence[ProcessGroup]) -> int:
    """Return the size of all groups of several ranks, if it is the same, else NULL.

    A rank's trace lists the groups that the rank is in: whatever torch.distributed runs on
    several ranks runs in one of these.
    """
    found = {group.size for group in groups if group.size is not None and group.size > 1}
    complete = all(group.size is not None for group in groups)
    return found.pop() if complete and len(found) == 1 else NULL


def _of_metadata(said: StatedSizes, coalesced: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Bytes in and out by the counts of elements; both NULL where one overflowed."""
    element = said.per_text("dtype", lambda text: byte_rules.element_size(text) or NULL)
    # A larger count is refused with its event: it must not overflow, and be unknown instead.
    counts = [
        np.minimum(said.columns[name], 2 * byte_rules.LARGEST)
        for name in ("In msg nelems", "Out msg nelems")
    ]
    broken = coalesced | overflowed(said)
    given, got = (byte_rules.byte_counts(count, element) for count in counts)
    return np.where(broken, NULL, given), np.where(broken, NULL, got)


def overflowed(said: StatedSizes) -> NDArray[np.bool_]:
    """Return which events have a negative count: older profilers wrote 32 bits of it."""
    counts = [said.columns[name] for name in ("In msg nelems", "Out msg nelems")]
    first, second = ((count < 0) & (count != NULL) for count in counts)
    either: NDArray[np.bool_] = first | second
    return either


def _of_operators(said: StatedSizes, op: NDArray[np.int8]) -> tuple[Ints, Ints]:
    """Bytes in and out by the tensors that the host's calls and operators show.

    The library's range shows the input, and so does the first argument of the host's call. An
    operator counts if it does what the event does.
    """
    given = _per_pair(said, "mark", said.columns["mark"] != NULL, _total)
    call = _per_pair(said, "call", given == NULL, lambda tensors: _total(tensors[:1]))
    given = np.where(given == NULL, call, given)
    got = np.full(len(op), NULL, np.int64)
    for code, operator in _present(said).items():
        shows = said.columns["operator"] == code
        shows &= op == OP[operator.op]
        inner, outer = (
            _per_pair(said, "operator", shows, _argument(place))
            for place in (operator.given, operator.got)
        )
        given, got = np.where(inner == NULL, given, inner), np.where(shows, outer, got)
    return given, got


def _present(said: StatedSizes) -> dict[int, OperatorKind]:
    """The operators of the table around any launch, by the codes of their names."""
    names = {code: said.events.text(code) for code in np.unique(said.columns["operator"])}
    return {code: OPERATORS[name] for code, name in names.items() if name in OPERATORS}


def _argument(place: int | None) -> Callable[["_Tensors"], int]:
    """A function of the tensors: the bytes of the one at this place, NULL without a place."""
    return lambda tensors: NULL if place is None else _total(tensors[place : place + 1])


DIMENSIONS = ("Input Dims", "Input type")
_Tensors = Sequence[tuple[Any, str]]


def _per_pair(
    said: StatedSizes, range_: str, shows: NDArray[np.bool_], answer: Callable[[_Tensors], int]
) -> Ints:
    """The answer to the dimensions and types of a range's tensors, asked once a pair.

    NULL where the range shows none.
    """
    answers = np.full(len(shows), NULL, np.int64)
    rows = np.flatnonzero(shows)
    if not len(rows):
        return answers
    dims, types = (said.columns[f"{range_} {name}"][rows] for name in DIMENSIONS)
    first, kind = alike(dims, types)
    pairs = zip(dims[first].tolist(), types[first].tolist(), strict=True)
    asked = [NULL if NULL in pair else answer(_tensors(said.events, *pair)) for pair in pairs]
    answers[rows] = np.array(asked, np.int64)[kind]
    return answers


def _tensors(events: Events, dims: int, types: int) -> _Tensors:
    try:
        shapes, names = json.loads(events.texts[dims]), json.loads(events.texts[types])
    except (ValueError, RecursionError):
        return ()
    if not isinstance(shapes, list) or not isinstance(names, list) or len(shapes) != len(names):
        return ()
    return [(shape, str(name)) for shape, name in zip(shapes, names, strict=True)]


def _total(tensors: _Tensors) -> int:
    """Bytes of all tensors; NULL where one is of an unknown type, or there is none."""
    total, any_tensor = 0, False
    for shape, name in tensors:
        if name in ("", "Scalar"):
            continue
        size = byte_rules.element_size(name)
        if size is None or not isinstance(shape, list):
            return NULL
        any_tensor = True
        for one in shape if shape and isinstance(shape[0], list) else [shape]:
            if not all(isinstance(length, int) and length >= 0 for length in one):
                return NULL
            total += size * math.prod(one)
    return total if any_tensor and total < -NULL else NULL


@lru_cache(maxsize=1 << 12)  # ranks say the same
def _is_uneven(text: str) -> int:
    """1 where a list of splits has several values, or is cut so that nobody knows."""
    try:
        splits = json.loads(text)
    except (ValueError, RecursionError):
        return 1
    return int(not isinstance(splits, list) or len(set(map(str, splits))) > 1)


# By the time of the events, where that is absolute: PyTorch 2.4 was released in July 2024.
_SINCE_2_4 = 1_721_800_000 * 10**9
_ABSOLUTE = 1_600_000_000 * 10**9

_REASONS = {
    "graph": "a CUDA graph replays them, and its kernels are recorded without sizes: profile "
    "without graphs to have them",
    "coalesced": "they end a group of coalesced operations, whose sizes no setting records",
    "overflowed": "their counts overflowed 32 bits: record with a newer PyTorch",
    "device": "their operator takes the sizes from the device, and no setting records them",
    "group": "how many ranks took part is unknown",
    "group_old": "how many ranks took part is unknown: record with PyTorch 2.4 or newer",
    "shapes": "the trace has no shapes of their operators: record with record_shapes=True",
    "shapes_old": "the trace has no shapes of their operators: record with "
    "record_shapes=True, or with PyTorch 2.4 or newer",
    "arguments": "what the trace says of them is not understood",
    "launches": "no launches are recorded, which lead to their operators: record with "
    "ProfilerActivity.CPU, too",
    "launch": "their launch is not recorded (was it before the recording began?)",
    "old": "nothing on the host tells of them: record with PyTorch 2.4 or newer, with "
    "ProfilerActivity.CPU and record_shapes=True",
    "library": "the library that launched them tells the profiler no sizes, and no setting "
    "records them",
}


def reasons(
    said: StatedSizes,
    op: NDArray[np.int8],
    named: Sequence[Named],
    rows: Ints,
    kind: Ints,
) -> tuple[str, ...]:
    """Return why sizes are unknown, the most frequent reason first.

    Parameters
    ----------
    said, op
        What is said of each kind of event, and its operation.
    named
        What names say of communication; the column `named` of `said` leads here.
    rows
        The rows of the events of unknown size.
    kind
        The kind of each of these events.

    """
    if not len(rows):
        return ()
    by_kind = _by_kind(said, op)
    launch = said.events.launch_of(rows)
    found = _by_launch(said.events, launch, _is_nccl(said, named)[kind])
    told = np.array(by_kind, np.str_)[kind]
    words = np.where(told != "", told, found)
    words = np.where(_in_graph(said.events, launch), "graph", words)
    names, counts = np.unique(words, return_counts=True)
    order = np.lexsort((names, -counts))
    texts = [_REASONS[str(names[place])] for place in order]
    if len(texts) == 1:
        return (texts[0],)
    return tuple(f"{counts[place]}: {text}" for place, text in zip(order, texts, strict=True))


def _by_kind(said: StatedSizes, op: NDArray[np.int8]) -> list[str]:
    """The reason for each kind of event by what is said of it; "" where nothing is said."""
    columns = said.columns
    silent = said.per_text("Collective name", is_no_operation)
    is_range = (columns["call"] != NULL) | (columns["mark"] != NULL)
    is_range |= columns["operator"] != NULL
    on_device = said.per_text("operator", _is_on_device) == 1
    dims = [columns[f"{range_} Input Dims"] for range_ in ("call", "mark", "operator")]
    no_shapes = np.all([column == NULL for column in dims], axis=0)
    counted = (columns["In msg nelems"] != NULL) | (columns["Out msg nelems"] != NULL)
    needs_group = np.isin(op, [OP[name] for name in ("AllGather", "ReduceScatter")])
    age = "_old" if is_old(said.events) else ""
    return [
        str(word)
        for word in np.select(
            [
                silent == 1,
                overflowed(said),
                on_device,
                is_range & no_shapes & ~counted,
                needs_group & (is_range | counted),
                is_range | (silent == 0),
            ],
            ["coalesced", "overflowed", "device", f"shapes{age}", f"group{age}", "arguments"],
            "",
        )
    ]


def _is_on_device(name: str) -> int:
    return int(name in OPERATORS and OPERATORS[name].given is None)


def _is_nccl(said: StatedSizes, named: Sequence[Named]) -> Flags:
    return np.array([each.library == "NCCL" for each in named], np.bool_)[said.columns["named"]]


def _by_launch(events: Events, launch: Ints, is_nccl: Flags) -> NDArray[np.str_]:
    """The reason for each event around whose launch nothing is said."""
    if not len(events.rows("runtime")):
        return np.full(len(launch), "launches")
    old = is_nccl & is_old(events)
    return np.select([launch < 0, old], ["launch", "old"], "library")


def _in_graph(events: Events, launch: Ints) -> Flags:
    """Events that a graph's launch started."""
    codes = np.where(launch >= 0, events.name[launch].astype(np.int64), NULL)
    in_graph: Flags = events.by_text(codes, lambda name: int("GraphLaunch" in name)) == 1
    return in_graph


def is_old(events: Events) -> bool:
    """Return whether a trace may be of a PyTorch before 2.4, as far as its times tell."""
    start = events.start
    return not len(start) or not int(start[0]) >= _ABSOLUTE or int(start[0]) < _SINCE_2_4
