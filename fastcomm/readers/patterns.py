"""Recognize communication by the names of kernels and copies: a table that users can extend.

The first pattern that matches decides. The host's name of the operation takes precedence where
it is known, since an all-to-all runs as `ncclDevKernel_SendRecv`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

# Operations by the names that libraries use, in lower case and without "_".
_SPELLINGS = {
    "allreduce": "AllReduce",
    "allgather": "AllGather",
    "allgatherv": "AllGather",
    "reducescatter": "ReduceScatter",
    "reducescatterv": "ReduceScatter",
    "alltoall": "AllToAll",
    "alltoallv": "AllToAll",
    "alltoallvc": "AllToAll",
    "sendrecv": "SendRecv",
    "batchsendrecv": "SendRecv",
    "send": "SendRecv",
    "recv": "SendRecv",
    "receive": "SendRecv",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "barrier": "Barrier",
}

_BOOL = r"(?:true|false|\(bool\)[01])"
# From the start of a name to its function: result type, namespaces and classes. The template
# arguments and parameters that follow may contain any name.
_START = r"^(?:void |static )*(?:(?:\(anonymous namespace\)|\w+)::)*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A regular expression on names of kernels or copies, and what a match tells."""

    regex: str
    library: str
    op: str | None = None  # None: the first group of the expression, else OTHER
    tag: str | None = None  # for events whose group is unknown
    fused: bool = False  # whether the kernel does more than communicate


# Libraries of the host, by the beginning of the names of their annotations.
HOST_LIBRARIES = ("gloo", "mpi", "ucc")

PATTERNS = (
    *(Pattern(regex=rf"^{name}:(\w+)", library=name) for name in HOST_LIBRARIES),
    Pattern(regex=r"^ncclKernel_([A-Za-z]+)", library="NCCL"),  # up to 2.18
    Pattern(regex=r"^ncclDevKernel_([A-Za-z]+)", library="NCCL"),  # from 2.19, and RCCL
    Pattern(regex=r"^ncclSymk?DevKernel_([A-Za-z]+)", library="NCCL"),  # symmetric memory
    # NCCLX (torchcomms): ncclKernelAllGatherCtranDirect
    Pattern(
        regex=_START + r"ncclKernel(AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|Send"
        r"|Recv)",
        library="NCCL",
    ),
    Pattern(regex=r"^nccl([A-Za-z]+?)(?:Ring|Tree|LL|Coll|Kernel)", library="NCCL"),  # to 2.7
    Pattern(regex=_START + r"ncclDevKernel\w*_([A-Za-z]+)", library="NCCL"),
    # One kernel of RCCL does every operation.
    Pattern(regex=_START + r"rcclGenericKernel", library="RCCL", op="OTHER"),
    Pattern(regex=_START + r"mscclKernel_", library="RCCL", op="OTHER"),
    Pattern(
        regex=r"^oneccl_(allreduce|allgatherv?|reduce_scatter|alltoallv?|broadcast|barrier"
        r"|reduce|send|recv)(?![a-z])",
        library="oneCCL",
    ),
    Pattern(
        regex=r"^hcom_(allReduce|allGatherV?|reduceScatterV?|alltoallvc?|alltoallv?|broadcast"
        r"|batchSendRecv|reduce|scatter|send|receive|barrier)(?![a-z])",
        library="HCCL",
    ),
    Pattern(
        regex=r"(?:deep_ep|dpsk::ep)::(?!.*get_dispatch_layout).*(?:dispatch|combine)"
        r"|notify_dispatch|cached_notify",
        library="DeepEP",
        op="AllToAll",
        tag="EP",
    ),
    Pattern(
        regex=_START + r"hybrid_ep::(?:dispatch|combine)_kernel",
        library="DeepEP",
        op="AllToAll",
        tag="EP",
    ),
    Pattern(
        regex=_START + r"hybrid_ep::device_sync_kernel",
        library="DeepEP",
        op="Barrier",
        tag="EP",
    ),
    Pattern(
        regex=rf"(?:{_START}|^_ZN4mori3moe\d+)Ep(?:Dispatch|Combine)[A-Z]",
        library="MORI",
        op="AllToAll",
        tag="EP",
    ),
    # The kernels that prepare these work on one device alone.
    Pattern(
        regex=_START + r"moe(?:A2A(?:Dispatch|Combine)|AllToAll)Kernel",
        library="TensorRT-LLM",
        op="AllToAll",
        tag="EP",
    ),
    Pattern(
        regex=_START + r"a2a_(?:dispatch|combine)_(?:send|recv)_kernel",
        library="pplx",
        op="AllToAll",
        tag="EP",
    ),
    # The names are ambiguous; DO_SEND and DO_RECV among the template arguments decide.
    Pattern(
        regex=r"^(?:void )?(?:(?:\(anonymous namespace\)|pplx)::)*(?:dispatch|combine)Kernel"
        rf"<(?:[^<>]*, )?{_BOOL}, {_BOOL}[,>]"
        r"|^_Z\w*\d(?:dispatch|combine)KernelI\w*Lb[01]ELb[01]E",
        library="pplx",
        op="AllToAll",
        tag="EP",
    ),
    Pattern(
        regex=r"allreduce_fusion_kernel|"
        + _START
        + r"(?i:(?:one|two)shotallreducefusionkernel)"
        r"|(?:one|two)_shot_all_reduce_norm_kernel",
        library="custom all-reduce",
        op="AllReduce",
        tag="TP",
        fused=True,
    ),
    Pattern(
        regex=r"cross_device_reduce_[12]stage|quickreduce::|"
        + _START
        + r"(?:allreduce_prototype_(?:one|two)shot|hybridCubeMeshAllReduceKernel"
        r"|(?i:(?:lowprecision)?(?:one|two)shotallreducekernel))",
        library="custom all-reduce",
        op="AllReduce",
        tag="TP",
    ),
    Pattern(  # AITER: the first half of an all-reduce
        regex=_START + r"reduce_scatter_cross_device_store|^_ZN5aiter33reduce_scatter_cross_",
        library="custom all-reduce",
        op="ReduceScatter",
        tag="TP",
    ),
    Pattern(
        regex=_START + r"cross_device_all_gather",
        library="custom all-reduce",
        op="AllGather",
        tag="TP",
    ),
    Pattern(
        regex=r"multimem_(?:all_reduce|one_shot)|(?:one|two)_shot_all_reduce",
        library="torch symmetric memory",
        op="AllReduce",
        tag="TP",
    ),
    Pattern(  # of async TP, and of FSDP over symmetric memory
        regex=_START + r"_?multimem_(all_gather|reduce_scatter|broadcast)_kernel",
        library="torch symmetric memory",
    ),
    Pattern(
        regex=_START + r"(?:one|two)_shot_reduce_scatter",
        library="torch symmetric memory",
        op="ReduceScatter",
    ),
    Pattern(
        regex=_START + r"allToAllV(?:_2d)?(?:_offset)?(?![A-Za-z])",
        library="torch symmetric memory",
        op="AllToAll",
    ),
    Pattern(
        regex=_START + r"symmetric_memory::(?:\(anonymous namespace\)::)?barrier_kernel",
        library="torch symmetric memory",
        op="Barrier",
    ),
    Pattern(
        regex=_START
        + r"symmetric_memory::(?:\(anonymous namespace\)::)?(?:put|wait)_signal_kernel",
        library="torch symmetric memory",
        op="OTHER",
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
    # Collectives on a stream, whose kernels do not have the name of the library.
    Pattern(
        regex=_START + r"(barrier|alltoall|broadcast|reducescatter)\w*_on_stream_kernel",
        library="NVSHMEM",
    ),
    Pattern(regex=_START + r"sync\w*_on_stream_kernel", library="NVSHMEM", op="Barrier"),
    Pattern(regex=_START + r"fcollect\w*_on_stream_kernel", library="NVSHMEM", op="AllGather"),
    Pattern(regex=_START + r"rdxn\w*_on_stream_kernel", library="NVSHMEM", op="AllReduce"),
    Pattern(regex=r"nvshmem", library="NVSHMEM", op="OTHER"),
    Pattern(
        regex=r"mscclpp::(?:\w+::)*((?i:allreduce|allgather|alltoallv?|reduce_?scatter))",
        library="MSCCL++",
    ),
    Pattern(regex=r"mscclpp", library="MSCCL++", op="OTHER"),
)

# Libraries that serve every parallelism; the others serve one, or a few.
COLLECTIVE_LIBRARIES = (*HOST_LIBRARIES, "NCCL", "RCCL", "oneCCL", "HCCL", "MSCCL++")

# Copies from one device to another.
PEER_COPIES = (Pattern(regex=r"^Memcpy PtoP", library="peer copy", op="SendRecv"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a name tells of communication."""

    library: str
    op: str
    tag: str | None
    fused: bool


def match_name(name: str, patterns: tuple[Pattern, ...]) -> Named | None:
    """Return what the first matching pattern tells of a name; None: not communication."""
    return matcher(patterns)(name)


@lru_cache(maxsize=16)  # the ranks of a run share names and patterns
def matcher(patterns: tuple[Pattern, ...]) -> Callable[[str], Named | None]:
    """Return `match_name` for these patterns, with a cache of names."""

    @lru_cache(maxsize=1 << 14)
    def match(name: str) -> Named | None:
        for pattern in patterns:
            if result := re.search(pattern.regex, name):
                op = pattern.op or _op(result[1])
                return Named(
                    library=pattern.library, op=op, tag=pattern.tag, fused=pattern.fused
                )
        return None

    return match


def _op(name: str) -> str:
    """Return the operation with a library's name, or OTHER."""
    return _SPELLINGS.get(name.lower().replace("_", ""), "OTHER")
