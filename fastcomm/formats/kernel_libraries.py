"""Libraries whose kernels communicate, as tables: where their kernels are, what words tell.

The name of a function is read as words in lower case, where every spelling of a collective is
one word: `twoShotAllReduceKernel` is "twoshot allreduce kernel". The first row of `LIBRARIES`
to which a kernel belongs decides.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from fastcomm.formats.symbols import Symbol

# What words tell of a kernel that touches one device alone, instead of an operation.
ALONE = "one device"
OTHER_LIBRARY = "other library"
# Words that have several spellings.
_SPELLINGS = {
    "allreduce": r"all ?reduce[0-9]*",
    "allgather": r"all ?gath[ea]r(?: ?v)?[0-9]*",
    "reducescatter": r"reduce ?scatter(?: ?v)?[0-9]*",
    "alltoall": r"all ?(?:to|2) ?all(?:mem| ?vc?)?[0-9]*|a2av?",
    "sendrecv": r"send ?recv",
    "oneshot": r"one ?shot",
    "twoshot": r"two ?shot",
    "intranode": r"intra ?node",
    "internode": r"inter ?node",
    "localrank": r"local ?rank",
    "broadcast": r"b ?cast|broadcastmem",
    "fcollect": r"fcollectmem",
    "matmul": r"mat mul",
    "zerocopy": r"zero ?copy",
}
_TERMS = tuple(_SPELLINGS)
_SPELLING = re.compile(
    rf"(?<= )(?:{'|'.join(f'({spelling})' for spelling in _SPELLINGS.values())})(?= )"
)
_WORD = re.compile(r"[A-Z][A-Z0-9]*(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")

# The operation that words tell, or a function that takes it from the whole name.
Operation = str | Callable[[Symbol], str]
# Words with a space on both sides, and what they tell; the first that a name has decides.
Phrases = tuple[tuple[str, Operation], ...]


def _phrases(*tables: Mapping[str, Operation]) -> Phrases:
    """Return phrases from tables of words and operations."""
    return tuple((f" {phrase} ", op) for table in tables for phrase, op in table.items())


def word_set(*lines: str) -> frozenset[str]:
    """Return the words of lines."""
    return frozenset(word for line in lines for word in line.split())


def _joined(first: str, second: str) -> tuple[str, ...]:
    """Return each word of the first text with each of the second behind it."""
    return tuple(f"{start}{end}" for start in first.split() for end in second.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Kernels of a library: where they are, and which operation the words of each tell.

    A kernel belongs to it by a namespace, a prefix or a phrase. `exceptions` come first, then
    words of `local`, then `operations`, then `default`.
    """

    name: str
    scopes: tuple[str, ...] = ()  # namespaces, outermost first: "c10d::symmetric_memory"
    prefixes: tuple[str, ...] = ()  # beginnings of functions, in any namespace
    phrases: tuple[str, ...] = ()  # words of functions, in any namespace
    exceptions: Phrases = ()
    local: frozenset[str] = frozenset()
    operations: Phrases = ()
    default: str = ALONE
    tag: str | None = None  # for kernels whose group is unknown


COLLECTIVE_NAMES: Mapping[str, Operation] = {
    "allreduce": "AllReduce",
    "allgather": "AllGather",
    "reducescatter": "ReduceScatter",
    "alltoall": "AllToAll",
}
_ROOTED: Mapping[str, Operation] = {
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
}
_MESSAGES: Mapping[str, Operation] = dict.fromkeys(
    ("sendrecv", "send", "recv", "receive", "put", "get", "fetch", "p2p", "rma"), "SendRecv"
)
_WAITS: Mapping[str, Operation] = {
    "barrier": "Barrier",
    "sync": "Barrier",
    **dict.fromkeys(("wait", "poll", "signal", "notify", "quiet", "fence"), "OTHER"),
}
_COLLECTIVE_OPS = frozenset(COLLECTIVE_NAMES.values())
COLLECTIVES = _phrases(COLLECTIVE_NAMES)
WITH_BARRIERS = _phrases(COLLECTIVE_NAMES, {"barrier": "Barrier"})
COMMUNICATION = _phrases(COLLECTIVE_NAMES, _ROOTED, _MESSAGES, _WAITS)
EXPERTS = (*_phrases({"dispatch": "AllToAll", "combine": "AllToAll"}), *COMMUNICATION)
# Words of helpers that touch one device alone.
LOCAL = word_set(
    "layout permute unpermute permutation sort topk mask mapping local prepare preprocess",
    "preprocessing prologue epilogue setup init initialize reset clear clean zero memset fill",
    "convert cast index indices indice metadata count counts bincount histogram scan cumsum",
    "prefix checksum nan sanitize expected reference gemm matmul verify validate dequantize",
    "unpack",
)


def spaced(identifier: str) -> str:
    """Return the words of an identifier in lower case, with a space on both sides of each."""
    text = f" {' '.join(_WORD.findall(identifier)).lower()} "
    return _SPELLING.sub(lambda match: _TERMS[(match.lastindex or 0) - 1], text)


def operation_of(text: str, phrases: Phrases) -> Operation | None:
    """Return the operation of the first phrase among the words; None if they have none."""
    ops = [op for phrase, op in phrases if phrase in text]
    if len(_COLLECTIVE_OPS.intersection(ops)) > 1:  # one kernel does several
        return next((op for phrase, op in COLLECTIVES if text.startswith(phrase)), "OTHER")
    return ops[0] if ops else None


def _reduces_or_scatters(symbol: Symbol) -> str:
    """Return the operation of torch's two-shot all-reduce: a first flag omits its end."""
    flag = next((flag for flag in symbol.flags() if flag is not None), False)
    return "ReduceScatter" if flag else "AllReduce"


def _sends_or_receives(symbol: Symbol) -> str:
    """Return the operation of a kernel of pplx: the flags DO_SEND and DO_RECV are neighbors.

    Its namespace tells as much, whatever the template arguments are.
    """
    if symbol.scopes == ("pplx",):
        return "AllToAll"
    has_both = any(None not in pair for pair in pairwise(symbol.flags()))
    return "AllToAll" if has_both and not symbol.scopes else ALONE


def _named_by_scope(symbol: Symbol) -> str:
    """Return the collective that the namespaces name; else an all-reduce."""
    op = operation_of(spaced("_".join(symbol.scopes)), COLLECTIVES)
    return op if isinstance(op, str) else "AllReduce"


# Namespaces without communication, whatever their functions are called.
COMPUTE_SCOPES = word_set(
    "at at_cuda_detail cub hipcub rocprim thrust cutlass cute flash ck ck_tile cudnn xformers",
    "std",
)
LIBRARIES = (
    # NCCL and what replaces it
    Library(
        name="NCCL",
        # Up to 2.7: ncclAllReduceRingLLKernel. NCCLX: ncclKernelAllGatherCtranDirect.
        prefixes=(
            *("ncclKernel", "ncclDevKernel", "ncclSymDevKernel", "ncclSymkDevKernel"),
            *_joined(
                "ncclAllReduce ncclAllGather ncclReduceScatter ncclBroadcast ncclReduce",
                "Ring Tree CollNet LL Kernel",
            ),
        ),
        local=word_set("prepare reset checksum"),
        operations=COMMUNICATION,
        default="OTHER",
    ),
    # Of a communicator with one rank.
    Library(name="NCCL", prefixes=("oneRankReduce",)),
    # One kernel of RCCL does every operation; others name theirs.
    Library(
        name="RCCL",
        prefixes=("rcclGenericKernel", "mscclKernel", "rccl_"),
        operations=COMMUNICATION,
        default="OTHER",
    ),
    # Relatives of NCCL, whose kernels are called like its own
    Library(
        name="other CCL",
        prefixes=("ncclx", "mccl", "cncl", "bkcl", "eccl", "vccl", "topsccl", "flagcx"),
        local=word_set("prepare reset checksum"),
        operations=COMMUNICATION,
        default="OTHER",
    ),
    Library(
        name="oneCCL",
        prefixes=(
            "oneccl_",
            *_joined(
                "Allreduce Allgatherv Allgather ReduceScatter Alltoall Broadcast",
                "_small _medium _large _pcie SmallKernel MediumKernel LargeKernel",
            ),
        ),
        exceptions=_phrases({"write output": ALONE, "load input": ALONE}),
        local=LOCAL | word_set("memcpy copy"),
        operations=COMMUNICATION,
    ),
    # Steps of a collective, which only the class around them names.
    Library(
        name="oneCCL",
        scopes=_joined(
            "sycl_allreduce_ sycl_allgatherv_ sycl_reduce_scatter_ sycl_alltoall_",
            "small medium large",
        ),
        phrases=("remote ranks", "from remote"),
        exceptions=_phrases({"remote": _named_by_scope, "write output": ALONE}),
        local=LOCAL,
        operations=_phrases(
            dict.fromkeys(("sync", "reduce", "gather", "scatter"), _named_by_scope)
        ),
    ),
    Library(
        name="oneCCL",
        phrases=("monolithic kernel",),
        operations=_phrases({"write": "AllReduce", "read": "AllReduce"}, _ROOTED),
    ),
    Library(name="oneCCL", phrases=("reduce local inplace", "reduce local outofplace")),
    Library(name="HCCL", prefixes=("hcom_", "aiv_"), operations=COMMUNICATION),
    Library(
        name="HCCL",
        phrases=("moe distribute dispatch", "moe distribute combine"),
        default="AllToAll",
        tag="EP",
    ),
    Library(name="HCCL", phrases=("distribute barrier",), default="Barrier"),
    # Tasks of a collective on the timeline of torch_npu.
    Library(name="HCCL", prefixes=("Notify_Wait", "Notify_Record"), default="OTHER"),
    Library(
        name="NVSHMEM",
        scopes=("nvshmem", "rocshmem"),
        prefixes=("nvshmem", "rocshmem"),
        exceptions=_phrases({"rma": "SendRecv", "reduce": "AllReduce", "init": ALONE}),
        operations=EXPERTS,
        default="OTHER",
    ),
    # Collectives on a stream, whose kernels do not have the name of the library.
    Library(
        name="NVSHMEM",
        phrases=("on stream kernel",),
        operations=_phrases(
            COLLECTIVE_NAMES,
            {"fcollect": "AllGather", "rdxn": "AllReduce", "broadcast": "Broadcast"},
            _WAITS,
        ),
    ),
    Library(
        name="MSCCL++",
        scopes=("mscclpp",),
        prefixes=("mscclpp",),
        local=LOCAL - word_set("clean"),  # it cleans between two barriers
        operations=EXPERTS,
        default="OTHER",
    ),
    # Experts: dispatch and combine
    Library(
        name="DeepEP",
        prefixes=("pp_send_impl", "pp_recv_impl"),
        default="SendRecv",
        tag="PP",
    ),
    Library(
        name="DeepEP",
        scopes=("deep_ep", "dpsk::ep"),
        exceptions=_phrases(
            {
                "clean low latency": "Barrier",  # it cleans between two
                "fetch wait": "OTHER",
            }
        ),
        local=LOCAL,
        operations=EXPERTS,
        tag="EP",
    ),
    *(
        Library(name=name, scopes=(scope,), local=LOCAL, operations=EXPERTS, tag="EP")
        for name, scope in (
            ("DeepEP", "hybrid_ep"),
            ("UCCL-EP", "uccl"),
            ("NIXL EP", "nixl_ep"),
        )
    ),
    Library(
        name="Mooncake",
        scopes=("mooncake",),
        exceptions=_phrases({"enqueue task": "OTHER", "reduce kernel": ALONE}),
        local=LOCAL,
        operations=EXPERTS,
        tag="EP",
    ),
    # Any collective, while the host carries it out
    Library(name="Mooncake", prefixes=("enqueueTaskKernel",), default="OTHER"),
    Library(
        name="MagiAttention",
        scopes=("magi_attn_comm",),
        local=LOCAL - word_set("cast"),
        operations=_phrases({"group cast": "AllToAll", "group reduce": "AllToAll"}, _WAITS),
        tag="CP",
    ),
    Library(
        name="DeepEP",
        prefixes=("notify_dispatch", "cached_notify", "ag_nvl"),
        local=word_set("reset"),
        operations=_phrases({"ag": "AllGather", "notify": "AllToAll"}),
        tag="EP",
    ),
    Library(
        name="NCCL EP",
        scopes=("nccl_ep",),
        prefixes=("nccl_ep_", "ncclep_", "ncclEp"),
        exceptions=_phrases({"ll clean": "Barrier"}),  # it cleans between two
        local=LOCAL,
        operations=EXPERTS,
        tag="EP",
    ),
    Library(
        name="NCCL M2N",
        prefixes=("reshardKernel", "ReshardKernel", "StagingReshardKernel"),
        default="SendRecv",
    ),
    Library(
        name="MORI",
        prefixes=("EpDispatch", "EpCombine"),
        # Those called "all" add up, and those called "sync" copy, what others bring and take.
        exceptions=_phrases({"sync barrier": "Barrier", "sync": ALONE, "all": ALONE}),
        local=LOCAL | word_set("copy staging"),
        operations=EXPERTS,
        tag="EP",
    ),
    Library(
        name="MORI",
        scopes=("mori",),
        prefixes=("mori_shmem",),
        local=LOCAL,
        operations=COMMUNICATION,
    ),
    Library(
        name="pplx",
        prefixes=("a2a_dispatch", "a2a_combine"),
        default="AllToAll",
        tag="EP",
    ),
    Library(
        name="TensorRT-LLM",
        phrases=("moe alltoall", "moe comm"),
        local=LOCAL,
        default="AllToAll",
        tag="EP",
    ),
    # They exchange what they then count.
    Library(
        name="TensorRT-LLM",
        phrases=("alltoall metadata device", "compute count and indice"),
        default="AllToAll",
        tag="EP",
    ),
    # Symmetric memory
    Library(
        name="torch symmetric memory",
        prefixes=(
            *("multimem_all_reduce", "multimem_one_shot_all_reduce"),
            *("one_shot_all_reduce", "two_shot_all_reduce"),
        ),
        exceptions=_phrases(
            {
                "twoshot allreduce kernel inplace": "AllReduce",
                "twoshot allreduce kernel": _reduces_or_scatters,
            }
        ),
        default="AllReduce",
        tag="TP",
    ),
    Library(
        name="torch symmetric memory",
        scopes=("c10d::symmetric_memory", "c10d::nccl_extension", "c10d::nvshmem_extension"),
        prefixes=("multimem_", "one_shot_", "two_shot_", "allToAllV", "exchangeSplitAndOffset"),
        exceptions=_phrases(
            {"lsa put": "SendRecv", "put signal": "OTHER", "exchange split": "AllToAll"},
            {"ar": "AllReduce"},
        ),
        operations=COMMUNICATION + _phrases(dict.fromkeys(("push", "pull"), _named_by_scope)),
    ),
    # All-reduces of tensor parallel layers
    Library(
        name="custom all-reduce",
        phrases=(
            *("cross device reduce", "allreduce prototype", "allreduce fusion kernel"),
            *("oneshot allreduce", "twoshot allreduce", "hybrid cube mesh allreduce", "rsag"),
            *("minimax reduce rms", "custom allreduce"),
        ),
        local=LOCAL | word_set("scale scales"),
        default="AllReduce",
        tag="TP",
    ),
    Library(
        name="custom all-reduce",
        scopes=("aiter",),
        exceptions=_phrases(
            {"local device load": ALONE, "start sync": "Barrier", "end sync": "Barrier"},
            {"rs": "ReduceScatter", "ag": "AllGather", "ar": "AllReduce"},
        ),
        local=LOCAL,
        operations=COLLECTIVES,
        tag="TP",
    ),
    Library(name="custom all-reduce", scopes=("quickreduce",), default="AllReduce", tag="TP"),
    Library(
        name="custom all-reduce",
        scopes=("c10d::intra_node_comm",),
        operations=COMMUNICATION,
        tag="TP",
    ),
    Library(name="c10d", scopes=("c10d",), local=LOCAL, operations=COMMUNICATION),
    Library(
        name=OTHER_LIBRARY,
        phrases=("custom allgather", "custom reducescatter", "custom alltoall"),
        local=LOCAL,
        operations=COLLECTIVES,
    ),
    Library(
        name="Transformer Engine",
        prefixes=("userbuffers_fp16_sum_inplace",),
        operations=_phrases(COLLECTIVE_NAMES, {"rs": "ReduceScatter", "ag": "AllGather"}),
        default="AllReduce",
        tag="TP",
    ),
    Library(
        name="Transformer Engine",
        prefixes=("kuserbuffers_",),
        local=word_set("inc"),
        operations=_phrases(
            dict.fromkeys(("pushsend", "pushrecv", "pushsendrecv", "pullsend"), "SendRecv"),
            dict.fromkeys(("pullrecv", "proxysend"), "SendRecv"),
        )
        + COMMUNICATION,
        default="OTHER",
        tag="TP",
    ),
    Library(
        name="Transformer Engine", prefixes=("wait_until_on_stream_and_reset",), default="OTHER"
    ),
    # Others, by namespace
    Library(
        name="CUTLASS",
        scopes=("cutlass::distributed",),
        local=LOCAL,
        operations=COMMUNICATION,
    ),
    Library(
        name="torchcomms",
        scopes=("comms", "meta::comms", "ctran", "ncclx"),
        local=LOCAL,
        operations=EXPERTS,
    ),
    Library(
        name="FlashInfer",
        scopes=("flashinfer::comm",),
        exceptions=_phrases({"publish": "OTHER", "lse reduce": "AllReduce"}),
        local=LOCAL,
        operations=EXPERTS
        + _phrases(
            dict.fromkeys(("push", "pull", "oneshot", "twoshot", "ring"), _named_by_scope)
        ),
    ),
    Library(
        name="FLUX",
        scopes=("bytedance::flux",),
        exceptions=_phrases({"ag alltoall": "AllGather"}),
        local=LOCAL,
        operations=_phrases(
            {"ag": "AllGather", "dis scatter": "AllToAll"}, COLLECTIVE_NAMES, _MESSAGES, _WAITS
        ),
    ),
    Library(
        name="TensorRT-LLM",
        scopes=("tensorrt_llm",),
        exceptions=_phrases({"kimi k3 moe tail": "AllReduce", "gpu barrier": "Barrier"}),
        local=LOCAL,
        operations=COLLECTIVES
        + _phrases(dict.fromkeys(("oneshot", "twoshot"), _named_by_scope)),
    ),
    Library(
        name="XLA",
        scopes=("stream_executor", "xla"),
        exceptions=_phrases({"collective permute": "SendRecv"}),
        local=LOCAL,
        operations=WITH_BARRIERS,
    ),
    Library(name="XLA", phrases=("collective permute",), default="SendRecv"),
    # Behind those whose namespaces have such functions, too
    Library(
        name="pplx",
        prefixes=("dispatchKernel", "combineKernel"),
        operations=_phrases({"kernel": _sends_or_receives}),
        tag="EP",
    ),
    # Others, by words that only they have
    Library(
        name="Triton-distributed",
        phrases=("dispatch token", "combine token"),
        local=LOCAL,
        default="AllToAll",
        tag="EP",
    ),
    Library(
        name="Triton-distributed",
        phrases=(
            *("ag splits", "forward push 2d", "forward push 3d", "forward push numa"),
            "forward pull kernel",
        ),
        default="AllGather",
    ),
    Library(
        name="Triton-distributed",
        phrases=(
            *("p2p copy", "p2p put", "p2p get", "p2p send", "p2p recv", "internode p2p"),
            *("p2p set signal", "p2p wait signal"),
        ),
        exceptions=_phrases({"signal": "OTHER"}),
        local=word_set("gemm matmul"),
        default="SendRecv",
    ),
    Library(name="APEX", phrases=("push pull halos",), default="SendRecv"),
    Library(
        name=OTHER_LIBRARY,
        phrases=("barrier all", "gpu barrier", "cross device barrier"),
        default="Barrier",
    ),
    Library(
        name=OTHER_LIBRARY,
        phrases=(
            *("ulysses pull", "ulysses push", "ulysses alltoall", "attn alltoall"),
            "qkv pack alltoall",
        ),
        local=LOCAL,
        default="AllToAll",
    ),
)
