"""Which device work is communication, by its name: a table that a user can extend.

The first pattern that matches decides. The operation is what the host calls it, where the host
is known; the name's is the second best: an all-to-all runs as `ncclDevKernel_SendRecv`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

_CAMEL = {
    "AllReduce": "AllReduce",
    "AllGather": "AllGather",
    "ReduceScatter": "ReduceScatter",
    "AlltoAll": "AllToAll",
    "AllToAll": "AllToAll",
    "SendRecv": "SendRecv",
    "Broadcast": "Broadcast",
    "Reduce": "Reduce",
    "Gather": "Gather",
    "Scatter": "Scatter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A regular expression on names of kernels or copies, and what it says of them."""

    regex: str
    library: str
    op: str | None = None  # None: the first group of the expression, else OTHER
    tag: str | None = None  # for events whose group is unknown; counts as heuristic
    fused: bool = False  # does more than communicate


PATTERNS = (
    Pattern(regex=r"^ncclKernel_([A-Za-z]+)", library="NCCL"),  # up to 2.18
    Pattern(regex=r"^ncclDevKernel_([A-Za-z]+)", library="NCCL"),  # from 2.19, and RCCL
    Pattern(regex=r"^ncclSymk?DevKernel_([A-Za-z]+)", library="NCCL"),  # symmetric memory
    Pattern(regex=r"^nccl([A-Za-z]+?)(?:Ring|Tree|LL|Coll|Kernel)", library="NCCL"),  # to 2.7
    Pattern(
        regex=r"(?:deep_ep|dpsk::ep)::(?!.*get_dispatch_layout).*(?:dispatch|combine)"
        r"|notify_dispatch|cached_notify",
        library="DeepEP",
        op="AllToAll",
        tag="EP",
    ),
    Pattern(
        regex=r"allreduce_fusion_kernel",
        library="custom all-reduce",
        op="AllReduce",
        tag="TP",
        fused=True,
    ),
    Pattern(
        regex=r"cross_device_reduce_[12]stage|quickreduce::",
        library="custom all-reduce",
        op="AllReduce",
        tag="TP",
    ),
    Pattern(
        regex=r"multimem_(?:all_reduce|one_shot)|(?:one|two)_shot_all_reduce",
        library="torch symmetric memory",
        op="AllReduce",
        tag="TP",
    ),
    Pattern(
        regex=r"(?:userbuffers_fp16_sum_inplace|kuserbuffers_).*(?:_rs(?![a-z])|reducescatter)",
        library="Transformer Engine",
        op="ReduceScatter",
        tag="TP",
    ),
    Pattern(
        regex=r"(?:userbuffers_fp16_sum_inplace|kuserbuffers_).*(?:_ag(?![a-z])|allgather)",
        library="Transformer Engine",
        op="AllGather",
        tag="TP",
    ),
    Pattern(
        regex=r"kuserbuffers_.*(?:send|recv)",
        library="Transformer Engine",
        op="SendRecv",
        tag="TP",
    ),
    Pattern(
        regex=r"userbuffers_fp16_sum_inplace|kuserbuffers_",
        library="Transformer Engine",
        op="OTHER",
        tag="TP",
    ),
    Pattern(regex=r"nvshmem", library="NVSHMEM", op="OTHER"),
    Pattern(regex=r"mscclpp", library="MSCCL++", op="OTHER"),
)

# Copies from one device to another.
PEER_COPIES = (Pattern(regex=r"^Memcpy PtoP", library="peer copy", op="SendRecv"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a name says of communication."""

    library: str
    op: str
    tag: str | None
    fused: bool


def named(name: str, patterns: tuple[Pattern, ...]) -> Named | None:
    """What the first pattern that matches says of `name`; None: it is no communication."""
    return namer(patterns)(name)


@lru_cache(maxsize=16)  # every rank of a run has the same names, and asks by the same patterns
def namer(patterns: tuple[Pattern, ...]) -> Callable[[str], Named | None]:
    """What `named` says by these patterns, each name searched once."""

    @lru_cache(maxsize=1 << 14)
    def ask(name: str) -> Named | None:
        for pattern in patterns:
            if found := re.search(pattern.regex, name):
                op = pattern.op or _CAMEL.get(found[1], "OTHER")
                return Named(
                    library=pattern.library, op=op, tag=pattern.tag, fused=pattern.fused
                )
        return None

    return ask
