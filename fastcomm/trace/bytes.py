"""What a collective moves: element sizes, names of operations, and the three counts of bytes.

Counts are int64 arrays in which `NULL` stands for unknown; so does any negative number on the
way in, since older profilers wrote counts that had overflowed. All arithmetic is in integers.
"""

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.trace.schema import OP, OPS
from fastcomm_kernels.arrays import NULL, Ints

_LIMITS = np.iinfo(np.int64)

# Bytes of an element, by the names that profilers print; Float8 of any kind is one byte.
ELEMENT_SIZES = {
    # Kineto
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Int": 4, "Long": 8,
    "UInt16": 2, "UInt32": 4, "UInt64": 8,
    "Half": 2, "BFloat16": 2, "Float": 4, "Double": 8,
    "ComplexHalf": 4, "ComplexFloat": 8, "ComplexDouble": 16,
    # C++, on annotations; a leading "c10::" is cut
    "bool": 1, "char": 1, "signed char": 1, "unsigned char": 1,
    "short": 2, "short int": 2, "unsigned short": 2, "short unsigned int": 2,
    "int": 4, "unsigned int": 4, "float": 4, "double": 8,
    "long": 8, "long int": 8, "long long": 8, "long long int": 8,
    "unsigned long": 8, "long unsigned int": 8, "unsigned long long": 8,
    "complex<Half>": 4, "complex<c10::Half>": 4, "complex<float>": 8, "complex<double>": 16,
}  # fmt: skip

# Operations by the beginning of a name without underscores, the longer beginning first.
_STEMS = {
    "allreducebarrier": "Barrier",
    "allreduce": "AllReduce",
    "allgather": "AllGather",
    "reducescatter": "ReduceScatter",
    "alltoall": "AllToAll",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "sendrecv": "SendRecv",
    "pointtopoint": "SendRecv",
    "send": "SendRecv",
    "isend": "SendRecv",
    "recv": "SendRecv",
    "irecv": "SendRecv",
    "monitoredbarrier": "Barrier",
    "barrier": "Barrier",
}
# What a name may add to a beginning without being another operation.
_VARIANTS = "base|v|single|tensor|intotensor|coalesced|oop|anysource|sparse|out"
_NAME = re.compile(rf"({'|'.join(_STEMS)})({_VARIANTS})*")
# Rows about the end of a collective: no communication.
_WAITS = frozenset({"wait", "waittensor"})
_ANNOTATION = re.compile(
    r"(?:nccl|xccl|hccl|gloo|ucc|mpi|c10d|_c10d_functional|c10d_functional)::?(\w+)"
)


def element_size(name: str) -> int | None:
    """Bytes of one element of a type; None where the type is unknown."""
    name = name.strip().removeprefix("c10::")
    return 1 if name.startswith("Float8_") else ELEMENT_SIZES.get(name)


def op_of_collective(name: str) -> int | None:
    """Index into OPS of a profiler's `Collective name`; None for a wait, OTHER if unknown."""
    plain = name.replace("_", "").lower()
    if plain in _WAITS:
        return None
    found = _NAME.fullmatch(plain)
    return OP[_STEMS[found[1]] if found else "OTHER"]


def op_of_annotation(name: str) -> int | None:
    """Index into OPS of a range such as "nccl:all_reduce" or "c10d::allgather_".

    None for a wait and for what is no communication; what follows the name (" 0->1",
    ", seq = 3") does not matter.
    """
    found = _ANNOTATION.match(name)
    return op_of_collective(found[1]) if found else None


def byte_counts(elements: Ints, sizes: Ints) -> Ints:
    """Bytes of so many elements of these sizes; NULL where either is, or where it overflows."""
    return _times(_known(elements), _known(sizes))


class Sizes(NamedTuple):
    """The three counts of bytes of each event."""

    msg: Ints  # what the API reports
    payload: Ints  # nccl-tests' S
    bus: Ints  # S times the algorithm's factor


# No rank moves as many bytes while it is traced; the sums of thousands of ranks fit 64 bits.
LARGEST = 1 << 50


def plausible(sizes: Sizes) -> tuple[Sizes, int]:
    """Return sizes with NULL for events that move more than `LARGEST`, and how many do.

    Where the others add up to more than that, all sizes are NULL.
    """
    largest = np.maximum.reduce(list(sizes))
    is_large = largest > LARGEST
    if np.where(is_large, 0, np.maximum(largest, 0)).sum(dtype=np.float64) > LARGEST:
        is_large = largest != NULL
    count = int(is_large.sum())
    if not count:
        return sizes, 0
    return Sizes(*(np.where(is_large, NULL, column) for column in sizes)), count


# Who holds the whole of the data where one side holds a part: "in" or "out".
_WHOLE = {"AllGather": "out", "Gather": "out", "ReduceScatter": "in", "Scatter": "in"}
# How often (n - 1) / n of the payload crosses a link; absent: all of it, once.
_ROUNDS = {"AllReduce": 2, **dict.fromkeys((*_WHOLE, "AllToAll"), 1)}


def sizes(
    op: NDArray[np.int8],
    in_bytes: Ints,
    out_bytes: Ints,
    group_size: Ints,
    uneven: NDArray[np.bool_] | None = None,
) -> Sizes:
    """Message, payload and bus bytes of events whose input and output have these bytes.

    `in_bytes` is what a rank gives and `out_bytes` what it gets, in total; one may be unknown
    where the operation and the group size tell it. `uneven` marks all-to-alls whose splits
    differ.
    """
    op = np.asarray(op)
    given, got, n = _known(in_bytes), _known(out_bytes), _known(group_size)
    n = np.where(n == 0, NULL, n)
    payload, part = _payload(op, given, got, n)
    split = (given != got) & (given != NULL) & (got != NULL)
    split |= False if uneven is None else uneven
    share = np.where(_is(op, "AllToAll") & ~split, _share(payload, n), NULL)
    part = np.where(part == NULL, _share(payload, n), part)
    msg = np.where(_is(op, *_WHOLE), part, np.where(_is(op, "AllToAll"), share, payload))
    return Sizes(np.where(_is(op, "OTHER"), NULL, msg), payload, _bus(op, payload, n))


def _payload(op: NDArray[np.int8], given: Ints, got: Ints, n: Ints) -> tuple[Ints, Ints]:
    """S, and what one rank gives or gets of it where one side holds a part."""
    gathers = _is(op, *(name for name, side in _WHOLE.items() if side == "out"))
    scatters = _is(op, *(name for name, side in _WHOLE.items() if side == "in"))
    whole = np.where(gathers, got, given)
    part = np.where(gathers, given, got)
    payload = np.where(
        (gathers | scatters) & (whole == NULL), _times(part, n), np.maximum(given, got)
    )
    return np.where(_is(op, "Barrier"), 0, payload), part


def _bus(op: NDArray[np.int8], payload: Ints, n: Ints) -> Ints:
    """Payload times the factor, the half rounded to even."""
    times = np.zeros(len(OPS), np.int64)
    for name, count in _ROUNDS.items():
        times[OP[name]] = count
    rounds = times[op]
    # What crosses once crosses once in a group of any size, but that of one.
    n = np.where((n == NULL) & (rounds == 0), 2, n)
    known = (payload != NULL) & (n != NULL) & ~_is(op, "OTHER") & (payload <= _LIMITS.max // 2)
    total, ranks = np.where(known, payload, 0), np.where(known, n, 1)
    # rounds * S * (n-1) / n = rounds * S - less - rest / n, with 0 <= rest < n.
    less, rest = np.divmod(total % ranks * rounds, ranks)
    bus = rounds * (total - total // ranks) - less
    bus -= (2 * rest > ranks) | ((2 * rest == ranks) & (bus % 2 == 1))
    bus = np.where(rounds > 0, bus, np.where(ranks > 1, total, 0))
    return np.where(known | _is(op, "Barrier"), bus, NULL)


def _is(op: NDArray[np.int8], *names: str) -> NDArray[np.bool_]:
    wanted = np.zeros(len(OPS), np.bool_)
    wanted[[OP[name] for name in names]] = True
    return wanted[op]


def _known(counts: Ints) -> Ints:
    counts = np.asarray(counts, np.int64)
    return np.where(counts < 0, NULL, counts)


def _times(counts: Ints, factors: Ints) -> Ints:
    """The product; NULL where a factor is, or where it does not fit."""
    fits = (counts != NULL) & (factors != NULL)
    fits &= counts <= _LIMITS.max // np.maximum(factors, 1)
    return np.where(fits, counts * np.where(fits, factors, 0), NULL)


def _share(counts: Ints, n: Ints) -> Ints:
    """An n-th; NULL where that is no whole number."""
    whole = (counts != NULL) & (n != NULL)
    ranks = np.where(whole, n, 1)
    return np.where(whole & (counts % ranks == 0), counts // ranks, NULL)
