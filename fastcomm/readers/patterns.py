"""Recognize communication by the names of kernels and copies: a table that users can extend.

The first pattern that matches decides. The host's name of the operation takes precedence where
it is known, since an all-to-all runs as `ncclDevKernel_SendRecv`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from fastcomm.trace.host_names import HOST_LIBRARIES

# The names of operations that libraries use, in lower case and without "_".
_SPELLINGS = {
    "AllReduce": "allreduce",
    "AllGather": "allgather allgatherv",
    "ReduceScatter": "reducescatter reducescatterv",
    "AllToAll": "alltoall alltoallv alltoallvc",
    "SendRecv": "sendrecv batchsendrecv send recv receive",
    **{name: name.lower() for name in ("Broadcast", "Reduce", "Gather", "Scatter", "Barrier")},
}
_OPERATIONS = {spelling: op for op, names in _SPELLINGS.items() for spelling in names.split()}

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


_NCCL = partial(Pattern, library="NCCL")
_EXPERTS = partial(Pattern, op="AllToAll", tag="EP")
_TENSOR_PARALLEL = partial(Pattern, library="custom all-reduce", tag="TP")
_SYMMETRIC_MEMORY = partial(Pattern, library="torch symmetric memory")
_USER_BUFFERS = partial(Pattern, library="Transformer Engine", tag="TP")
_NVSHMEM = partial(Pattern, library="NVSHMEM")

PATTERNS = (
    *(Pattern(regex=rf"^{name}:(\w+)", library=name) for name in HOST_LIBRARIES),
    _NCCL(regex=r"^ncclKernel_([A-Za-z]+)"),  # up to 2.18
    _NCCL(regex=r"^ncclDevKernel_([A-Za-z]+)"),  # from 2.19, and RCCL
    _NCCL(regex=r"^ncclSymk?DevKernel_([A-Za-z]+)"),  # symmetric memory
    # NCCLX (torchcomms): ncclKernelAllGatherCtranDirect
    _NCCL(
        regex=_START + r"ncclKernel(AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|Send"
        r"|Recv)"
    ),
    _NCCL(regex=r"^nccl([A-Za-z]+?)(?:Ring|Tree|LL|Coll|Kernel)"),  # to 2.7
    _NCCL(regex=_START + r"ncclDevKernel\w*_([A-Za-z]+)"),
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
    _EXPERTS(
        regex=r"(?:deep_ep|dpsk::ep)::(?!.*get_dispatch_layout).*(?:dispatch|combine)"
        r"|notify_dispatch|cached_notify",
        library="DeepEP",
    ),
    _EXPERTS(regex=_START + r"hybrid_ep::(?:dispatch|combine)_kernel", library="DeepEP"),
    _EXPERTS(regex=_START + r"hybrid_ep::device_sync_kernel", library="DeepEP", op="Barrier"),
    _EXPERTS(
        regex=rf"(?:{_START}|^_ZN4mori3moe\d+)Ep(?:Dispatch|Combine)[A-Z]", library="MORI"
    ),
    # The kernels that prepare these work on one device alone.
    _EXPERTS(
        regex=_START + r"moe(?:A2A(?:Dispatch|Combine)|AllToAll)Kernel", library="TensorRT-LLM"
    ),
    _EXPERTS(regex=_START + r"a2a_(?:dispatch|combine)_(?:send|recv)_kernel", library="pplx"),
    # The names are ambiguous; DO_SEND and DO_RECV among the template arguments decide.
    _EXPERTS(
        regex=r"^(?:void )?(?:(?:\(anonymous namespace\)|pplx)::)*(?:dispatch|combine)Kernel"
        rf"<(?:[^<>]*, )?{_BOOL}, {_BOOL}[,>]"
        r"|^_Z\w*\d(?:dispatch|combine)KernelI\w*Lb[01]ELb[01]E",
        library="pplx",
    ),
    _TENSOR_PARALLEL(
        regex=r"allreduce_fusion_kernel|"
        + _START
        + r"(?i:(?:one|two)shotallreducefusionkernel)"
        r"|(?:one|two)_shot_all_reduce_norm_kernel",
        op="AllReduce",
        fused=True,
    ),
    _TENSOR_PARALLEL(
        regex=r"cross_device_reduce_[12]stage|quickreduce::|"
        + _START
        + r"(?:allreduce_prototype_(?:one|two)shot|hybridCubeMeshAllReduceKernel"
        r"|(?i:(?:lowprecision)?(?:one|two)shotallreducekernel))",
        op="AllReduce",
    ),
    _TENSOR_PARALLEL(  # AITER: the first half of an all-reduce
        regex=_START + r"reduce_scatter_cross_device_store|^_ZN5aiter33reduce_scatter_cross_",
        op="ReduceScatter",
    ),
    _TENSOR_PARALLEL(regex=_START + r"cross_device_all_gather", op="AllGather"),
    _SYMMETRIC_MEMORY(
        regex=r"multimem_(?:all_reduce|one_shot)|(?:one|two)_shot_all_reduce",
        op="AllReduce",
        tag="TP",
    ),
    # Of async TP, and of FSDP over symmetric memory.
    _SYMMETRIC_MEMORY(
        regex=_START + r"_?multimem_(all_gather|reduce_scatter|broadcast)_kernel"
    ),
    _SYMMETRIC_MEMORY(regex=_START + r"(?:one|two)_shot_reduce_scatter", op="ReduceScatter"),
    _SYMMETRIC_MEMORY(
        regex=_START + r"allToAllV(?:_2d)?(?:_offset)?(?![A-Za-z])", op="AllToAll"
    ),
    _SYMMETRIC_MEMORY(
        regex=_START + r"symmetric_memory::(?:\(anonymous namespace\)::)?barrier_kernel",
        op="Barrier",
    ),
    _SYMMETRIC_MEMORY(
        regex=_START
        + r"symmetric_memory::(?:\(anonymous namespace\)::)?(?:put|wait)_signal_kernel",
        op="OTHER",
    ),
    _USER_BUFFERS(
        regex=r"(?:userbuffers_fp16_sum_inplace|kuserbuffers_).*(?:_rs(?![a-z])|reducescatter)",
        op="ReduceScatter",
    ),
    _USER_BUFFERS(
        regex=r"(?:userbuffers_fp16_sum_inplace|kuserbuffers_).*(?:_ag(?![a-z])|allgather)",
        op="AllGather",
    ),
    _USER_BUFFERS(regex=r"kuserbuffers_.*(?:send|recv)", op="SendRecv"),
    _USER_BUFFERS(regex=r"userbuffers_fp16_sum_inplace|kuserbuffers_", op="OTHER"),
    # Collectives on a stream, whose kernels do not have the name of the library.
    _NVSHMEM(regex=_START + r"(barrier|alltoall|broadcast|reducescatter)\w*_on_stream_kernel"),
    _NVSHMEM(regex=_START + r"sync\w*_on_stream_kernel", op="Barrier"),
    _NVSHMEM(regex=_START + r"fcollect\w*_on_stream_kernel", op="AllGather"),
    _NVSHMEM(regex=_START + r"rdxn\w*_on_stream_kernel", op="AllReduce"),
    _NVSHMEM(regex=r"nvshmem", op="OTHER"),
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
    tag: str | None = None
    fused: bool = False


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
    return _OPERATIONS.get(name.lower().replace("_", ""), "OTHER")
