"""What communication of a Kineto trace moves, and why that may be unknown.

The sizes stand on the kernel or on the host's `record_param_comms`, as counts of elements; else
the arguments of the operators around the launch show them, if shapes were recorded.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastcomm.readers.events import Events, Ints
from fastcomm.readers.kineto_operators import OPERATORS, Operator
from fastcomm.trace import bytes as byte_rules
from fastcomm.trace.alike import alike
from fastcomm.trace.schema import KIND, OP
from fastcomm.trace.tags import Group
from fastcomm_kernels.json_numbers import NULL

# Words of the metadata that name no operation: what the kernel does stands elsewhere.
NO_OPERATION = ("", "wait", "coalesced", "startCoalescing", "endCoalescing")


class Said(Protocol):
    """What a trace says of each kind of communication event, in codes and numbers."""

    @property
    def events(self) -> Events:
        """The events, for their texts."""

    @property
    def columns(self) -> dict[str, Ints]:
        """What is said: one entry a kind of event."""

    def per_text(self, name: str, answer: Callable[[str], int]) -> Ints:
        """Return the answer to the text of each entry of a column, NULL where it has none."""


def sizes(said: Said, op: NDArray[np.int8], members: Ints) -> byte_rules.Sizes:
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


def only_size(groups: Sequence[Group]) -> int:
    """Return the size of all groups of several ranks, if it is the same, else NULL.

    A rank's trace lists the groups that the rank is in: whatever torch.distributed runs on
    several ranks runs in one of these.
    """
    found = {group.size for group in groups if group.size is not None and group.size > 1}
    complete = all(group.size is not None for group in groups)
    return found.pop() if complete and len(found) == 1 else NULL


def _of_metadata(said: Said, coalesced: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Bytes in and out by the counts of elements; both NULL where one overflowed."""
    element = said.per_text("dtype", lambda text: byte_rules.element_size(text) or NULL)
    counts = [said.columns["In msg nelems"], said.columns["Out msg nelems"]]
    broken = coalesced | overflowed(said)
    given, got = (byte_rules.byte_counts(count, element) for count in counts)
    return np.where(broken, NULL, given), np.where(broken, NULL, got)


def overflowed(said: Said) -> NDArray[np.bool_]:
    """Return which events have a negative count: older profilers wrote 32 bits of it."""
    counts = [said.columns[name] for name in ("In msg nelems", "Out msg nelems")]
    first, second = ((count < 0) & (count != NULL) for count in counts)
    either: NDArray[np.bool_] = first | second
    return either


def _of_operators(said: Said, op: NDArray[np.int8]) -> tuple[Ints, Ints]:
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


def _present(said: Said) -> dict[int, Operator]:
    """The operators of the table around any launch, by the codes of their names."""
    names = {code: said.events.text(code) for code in np.unique(said.columns["operator"])}
    return {code: OPERATORS[name] for code, name in names.items() if name in OPERATORS}


def _argument(place: int | None) -> Callable[["_Tensors"], int]:
    """A function of the tensors: the bytes of the one at this place, NULL without a place."""
    return lambda tensors: NULL if place is None else _total(tensors[place : place + 1])


DIMENSIONS = ("Input Dims", "Input type")
_Tensors = Sequence[tuple[Any, str]]


def _per_pair(
    said: Said, range_: str, shows: NDArray[np.bool_], answer: Callable[[_Tensors], int]
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
