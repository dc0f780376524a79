"""Sizes of collectives: bytes of elements, names of operations, and three counts of bytes.

Counts are int64 arrays in which `NULL` stands for unknown. Negative inputs are unknown as well,
as older profilers wrote counts that had overflowed. All arithmetic is in integers.
"""

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.trace.host_names import DEVICE_LIBRARIES, HOST_LIBRARIES
from fastcomm.trace.schema import OP, OPS
from fastcomm_kernels.arrays import NULL, Ints

_LIMITS = np.iinfo(np.int64)

# Bytes per element by the names that profilers print; every Float8 type has one byte.
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
    # NCCL
    **dict.fromkeys(("ncclInt8", "ncclUint8", "ncclFloat8e4m3", "ncclFloat8e5m2"), 1),
    **dict.fromkeys(("ncclFloat16", "ncclBfloat16"), 2),
    **dict.fromkeys(("ncclFloat32", "ncclInt32", "ncclUint32"), 4),
    **dict.fromkeys(("ncclFloat64", "ncclInt64", "ncclUint64"), 8),
    "complex<Half>": 4, "complex<c10::Half>": 4, "complex<float>": 8, "complex<double>": 16,
}  # fmt: skip

# Operations by the start of a name without underscores; longer starts come first.
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
    "batchopissue": "SendRecv",
    "devicealltoall": "AllToAll",
    "barrier": "Barrier",
}
# Suffixes that do not change the operation.
_VARIANTS = "base|v|single|tensor|intotensor|coalesced|oop|anysource|sparse|out|pexec|quantized"
_NAME = re.compile(rf"(?:shardedrelaymultigroup)?({'|'.join(_STEMS)})({_VARIANTS})*")
# Names of waits for the end of a collective, of the ends of groups of collectives, and of what
# torchcomms does to communicators.
_NO_OPERATION = frozenset(
    {
        *("wait", "waittensor", "coalesced", "startcoalescing", "endcoalescing"),
        *("init", "reconfigure", "split", "abort"),
    }
)
_LIBRARIES = "|".join((*HOST_LIBRARIES, *DEVICE_LIBRARIES))
_ANNOTATION = re.compile(rf"(?:{_LIBRARIES}|c10d|_?c10d_functional)::?(\w+)")


def element_size(name: str) -> int | None:
    """Return the bytes of an element of a type, such as "BFloat16"; None if unknown."""
    name = name.strip().removeprefix("c10::")
    return 1 if name.startswith("Float8_") else ELEMENT_SIZES.get(name)


def op_of_collective(name: str) -> int | None:
    """Return the index into OPS of a `Collective name`; OTHER if unknown.

    None for a wait, and for the beginning or end of a group of collectives.
    """
    plain = name.replace("_", "").lower()
    if plain in _NO_OPERATION:
        return None
    match = _NAME.fullmatch(plain)
    return OP[_STEMS[match[1]] if match else "OTHER"]


def op_of_annotation(name: str) -> int | None:
    """Return the index into OPS of a range such as "nccl:all_reduce" or "c10d::allgather_".

    None where `op_of_collective` is, and for other ranges. Text after the name (" 0->1",
    ", seq = 3") is ignored.
    """
    match = _ANNOTATION.match(name)
    return op_of_collective(match[1]) if match else None


def byte_counts(elements: Ints, sizes: Ints) -> Ints:
    """Multiply numbers of elements by bytes of an element; NULL if unknown or too large."""
    return _times(_nonnegative(elements), _nonnegative(sizes))


class Sizes(NamedTuple):
    """Three counts of bytes per event."""

    msg: Ints  # as the API reports it
    payload: Ints  # S of nccl-tests
    bus: Ints  # S times the factor of nccl-tests' bus bandwidth


# More than any rank moves during a trace; sums over thousands of ranks fit 64 bits.
LARGEST = 1 << 50


def plausible(sizes: Sizes) -> tuple[Sizes, int]:
    """Replace implausible sizes by NULL: of events with more than `LARGEST` bytes.

    If the sum of the others is above `LARGEST`, all sizes become NULL.

    Returns
    -------
    tuple of Sizes and int
        The sizes, and the number of events whose sizes were replaced.

    """
    largest = np.maximum.reduce(list(sizes))
    is_large = largest > LARGEST
    if np.where(is_large, 0, np.maximum(largest, 0)).sum(dtype=np.float64) > LARGEST:
        is_large = largest != NULL
    count = int(is_large.sum())
    if not count:
        return sizes, 0
    return Sizes(*(np.where(is_large, NULL, column) for column in sizes)), count


# Side that has all of the data where the other has a part: "in" or "out".
_WHOLE = {"AllGather": "out", "Gather": "out", "ReduceScatter": "in", "Scatter": "in"}
# Factor of (n - 1) / n of the payload for bus bytes; for others all of it crosses once.
_ROUNDS = {"AllReduce": 2, **dict.fromkeys((*_WHOLE, "AllToAll"), 1)}


def sizes(
    op: NDArray[np.int8],
    in_bytes: Ints,
    out_bytes: Ints,
    group_size: Ints,
    uneven: NDArray[np.bool_] | None = None,
) -> Sizes:
    """Compute message, payload and bus bytes of events, as nccl-tests define them.

    Parameters
    ----------
    op
        Index into OPS, per event.
    in_bytes, out_bytes
        Total input and output of a rank. One may be unknown if the operation and the group size
        determine it.
    group_size
        Number of ranks.
    uneven
        Whether an all-to-all has uneven splits, per event.

    Returns
    -------
    Sizes
        References: PERFORMANCE.md of nccl-tests.

    """
    op = np.asarray(op)
    sent, received, n = (
        _nonnegative(in_bytes),
        _nonnegative(out_bytes),
        _nonnegative(group_size),
    )
    n = np.where(n == 0, NULL, n)
    payload, part = _payload(op, sent, received, n)
    split = (sent != received) & (sent != NULL) & (received != NULL)
    split |= False if uneven is None else uneven
    share = np.where(_is(op, "AllToAll") & ~split, _share(payload, n), NULL)
    part = np.where(part == NULL, _share(payload, n), part)
    msg = np.where(_is(op, *_WHOLE), part, np.where(_is(op, "AllToAll"), share, payload))
    return Sizes(np.where(_is(op, "OTHER"), NULL, msg), payload, _bus(op, payload, n))


def _payload(op: NDArray[np.int8], sent: Ints, received: Ints, n: Ints) -> tuple[Ints, Ints]:
    """Return the payload S of calls, and the bytes on the side that has a part of S.

    S is the size of nccl-tests. The part is what a rank sends in an all-gather or gather, and
    what it receives in all other calls. `sent` and `received` are bytes of this rank, `n` is
    the number of ranks in the group; NULL is unknown.
    """
    gathers = _is(op, *(name for name, side in _WHOLE.items() if side == "out"))
    scatters = _is(op, *(name for name, side in _WHOLE.items() if side == "in"))
    whole = np.where(gathers, received, sent)
    part = np.where(gathers, sent, received)
    payload = np.where(
        (gathers | scatters) & (whole == NULL), _times(part, n), np.maximum(sent, received)
    )
    return np.where(_is(op, "Barrier"), 0, payload), part


def _bus(op: NDArray[np.int8], payload: Ints, n: Ints) -> Ints:
    """Return bus bytes: payload times nccl-tests' factor for `n` ranks, halves to even."""
    times = np.zeros(len(OPS), np.int64)
    for name, count in _ROUNDS.items():
        times[OP[name]] = count
    rounds = times[op]
    # For these operations the group size matters only if it is 1.
    n = np.where((n == NULL) & (rounds == 0), 2, n)
    is_known = (
        (payload != NULL) & (n != NULL) & ~_is(op, "OTHER") & (payload <= _LIMITS.max // 2)
    )
    total, ranks = np.where(is_known, payload, 0), np.where(is_known, n, 1)
    # rounds * S * (n-1) / n = rounds * S - less - remainder / n, with 0 <= remainder < n.
    less, remainder = np.divmod(total % ranks * rounds, ranks)
    bus = rounds * (total - total // ranks) - less
    bus -= (2 * remainder > ranks) | ((2 * remainder == ranks) & (bus % 2 == 1))
    bus = np.where(rounds > 0, bus, np.where(ranks > 1, total, 0))
    return np.where(is_known | _is(op, "Barrier"), bus, NULL)


def _is(op: NDArray[np.int8], *names: str) -> NDArray[np.bool_]:
    is_named = np.zeros(len(OPS), np.bool_)
    is_named[[OP[name] for name in names]] = True
    return is_named[op]


def _nonnegative(counts: Ints) -> Ints:
    counts = np.asarray(counts, np.int64)
    return np.where(counts < 0, NULL, counts)


def _times(counts: Ints, factors: Ints) -> Ints:
    """Multiply; NULL if a factor is NULL, or the product does not fit."""
    fits = (counts != NULL) & (factors != NULL)
    fits &= counts <= _LIMITS.max // np.maximum(factors, 1)
    return np.where(fits, counts * np.where(fits, factors, 0), NULL)


def _share(counts: Ints, n: Ints) -> Ints:
    """Divide bytes by the number of ranks `n`; NULL if that is no integer."""
    whole = (counts != NULL) & (n != NULL)
    ranks = np.where(whole, n, 1)
    return np.where(whole & (counts % ranks == 0), counts // ranks, NULL)
