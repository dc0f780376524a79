"""Whether a kernel of a library that no table lists communicates, by the words of its name.

It does if the words name a collective, and something else that only communication has.
"""

import re
from collections.abc import Set
from itertools import dropwhile, takewhile

from fastcomm.formats.kernel_libraries import (
    ALONE,
    COLLECTIVE_NAMES,
    COLLECTIVES,
    EXPERTS,
    LOCAL,
    WITH_BARRIERS,
    Operation,
    operation_of,
    spaced,
    word_set,
)
from fastcomm.formats.symbols import Symbol

# Words of namespaces in which functions communicate.
_COMMUNICATING = word_set(
    "comm comms communication collective collectives distributed dist ep nccl rccl ccl xccl",
    "hccl oneccl shmem symm symmetric nvls rdma ipc internode intranode p2p nvlink",
    *COLLECTIVE_NAMES,
)
# Words of functions that speak of other devices.
_REMOTE = word_set(
    "intranode internode nvlink nvl p2p ipc nvls multimem sdma rdma lsa ibgda gin symm shmem",
    "rank ranks localrank peer peers world xgmi pcie iris nccl dda mnnvl gpus",
)
# Words of what joins devices: what is sent or dispatched there is communication.
_FABRIC = word_set("intranode internode nvlink rdma ibgda p2p xgmi mnnvl nvshmem")
# Words of functions that speak of other devices beside the name of a collective only.
_ALGORITHM = _REMOTE | word_set(
    "oneshot twoshot ring tree lamport node fullmesh mesh push pull ll ll128 ib pairs packet",
    "cross hierarchical",
)
# Words that speak of threads of one device, or of rearranging what it has.
_INSIDE = word_set(
    "block warp wave thread threads cta cluster lane tile sum max min pack transpose shared",
    "smem fused fusion fwd bwd softmax norm",
)
# Functions that are called just like a collective.
_NAMESAKES = [[name, *kernel] for name in COLLECTIVE_NAMES for kernel in ((), ("kernel",))]
# Words that leave it to the namespace what a function does.
_NAMELESS = word_set("kernel global main impl run")
# Words before the name of a collective that leave it to that name what a function does.
_PLAIN = word_set("simple basic naive hybrid")
# Words of what a kernel does beside a collective.
FUSING = word_set("fusion norm rmsnorm rms layernorm")
# Words that tell how a kernel does what it is called after, or to which numbers.
_MANNER = word_set(
    "kernel kernels impl main run inner single multi 1d 2d 3d strided chunked chunk contiguous",
    "consumer producer persistent pipelined inplace place out in async low latency simple",
    "basic naive hybrid fast small medium large big 1stage 2stage stage triton cuda hip gpu",
    "device float float16 float32 bfloat16 half bf16 fp16 fp32 fp8 f16 f32 int int8 int32",
)
# Words of what a kernel moves from device to device.
_MOVED = word_set(
    "copy memcpy transfer transfers read write load store push pull data buffer buffers tensor",
    "block blocks bandwidth latency test unidirectional bidirectional",
)
_VERSION = re.compile(r"v?[0-9]*")


def unlisted_operation(symbol: Symbol, text: str) -> str:
    """Return the operation of a kernel of no known library if the words are clear, or ALONE."""
    function = frozenset(text.split())
    op: Operation | None = None
    if function.isdisjoint(LOCAL):
        scopes = frozenset(spaced("_".join(symbol.scopes)).split())
        if function <= _NAMELESS:
            op = operation_of(spaced("".join(symbol.scopes[-1:])), COLLECTIVES)
        elif "ar" in function and not function.isdisjoint(("oneshot", "twoshot")):
            op = "AllReduce"
        elif not (scopes.isdisjoint(_COMMUNICATING) and function.isdisjoint(_FABRIC)):
            op = _among_communication(symbol, text, scopes)
        elif not function.isdisjoint(_REMOTE):
            op = operation_of(text, WITH_BARRIERS)
        elif _is_collective(symbol, text, function):
            op = operation_of(text, COLLECTIVES)
    return op if isinstance(op, str) else ALONE


def _among_communication(symbol: Symbol, text: str, scopes: frozenset[str]) -> Operation | None:
    """Return the operation of a kernel whose words or namespaces are of communication.

    "p2p" alone may be from particle to particle: it counts with words of moving data alone.
    """
    function = frozenset(text.split())
    if scopes.isdisjoint(_COMMUNICATING) and function & _FABRIC == {"p2p"}:
        op = operation_of(text.replace(" p2p ", " "), EXPERTS)
        return op or ("SendRecv" if _is_plain(function, {"p2p"} | _MOVED) else None)
    op = operation_of(text, EXPERTS)
    if op is None and not function.isdisjoint(_ALGORITHM):
        op = operation_of(spaced("".join(symbol.scopes[-1:])), COLLECTIVES)
    return op


def _is_plain(function: frozenset[str], more: Set[str]) -> bool:
    """Return whether a function has only words of its manner, and of `more`."""
    others = function - _MANNER - more
    return all(_VERSION.fullmatch(word) for word in others)


def _is_collective(symbol: Symbol, text: str, function: frozenset[str]) -> bool:
    """Return whether a function is called a collective, or several, and nothing else.

    Kernels of Triton have neither parameters nor template arguments in their names; what else
    they are called must be nothing that one device does.
    """
    parts = text.split()
    named = list(dropwhile(_PLAIN.__contains__, parts))
    if named[:2] in _NAMESAKES or len(function & COLLECTIVE_NAMES.keys()) > 1:
        return True
    first = next((part for part in parts if part != "fused"), "")
    is_fused = not function.isdisjoint(FUSING)
    if first in COLLECTIVE_NAMES and is_fused:
        return True
    # What only begins like a collective, as "allreduce_grads", may be anything.
    behind = frozenset(takewhile(lambda part: part not in COLLECTIVE_NAMES, reversed(parts)))
    if function.isdisjoint(_ALGORITHM):
        return symbol.is_bare() and function.isdisjoint(_INSIDE) and _is_plain(behind, set())
    is_clear = is_fused or not symbol.is_bare()
    return is_clear or _is_plain(behind, _ALGORITHM | _INSIDE)
