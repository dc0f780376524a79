"""Recognize kernels of communication by name: what libraries call them, as tables.

A profiler shows `void deep_ep::intranode::dispatch<8, true>(int4*)`, or the Itanium name
`_ZN7deep_ep9intranode8dispatchILi8ELb1EEEvP4int4`. Both denote the function `dispatch` in the
namespaces `deep_ep` and `intranode`. Template arguments and parameters may contain any name.

Every step moves forward, and no more than `LIMIT` characters are read: a name costs time linear
in its length at most.

Whether a kernel communicates depends on its function and on the namespaces around it, never on
template arguments or parameters. The name of a function is read as words in lower case, where
every spelling of a collective is one word: `twoShotAllReduceKernel` is "twoshot allreduce
kernel".

The first row of `LIBRARIES` to which a kernel belongs decides, by its namespaces or else by its
function. Kernels of other libraries communicate if the words name a collective, and something
else that only communication has.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile, pairwise, takewhile

from fastcomm.trace.host_names import HOST_LIBRARIES

LIMIT = 4096  # characters of a name that are read; the function stands near the start
_ANONYMOUS = "(anonymous namespace)"
# What may precede a name without belonging to it.
_DECORATION = re.compile(
    r"(?:void |static |typeinfo name for |non-virtual thunk to |__device_stub__)*"
)
_IDENTIFIERS = re.compile(
    r"(?:(?:\(anonymous namespace\)|\{anonymous\}|[\w$@.\-~]++)(?:::)?)++"
)
_BRACKET = re.compile(r"[<>()]")
_MANGLED = re.compile(r"_?_ZT?S?(?=[NL]?[0-9]|NK?[0-9S])")
_LENGTH = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"n?[0-9]*")
_QUALIFIER = re.compile(r"N|K|St|L(?=[0-9])")
_BOOLEANS = {
    **dict.fromkeys(("true", "(bool)1", "(bool)true", "Lb1E"), True),
    **dict.fromkeys(("false", "(bool)0", "(bool)false", "Lb0E"), False),
}
# Parts of mangled template arguments. Those that open end with an E; those that hold a length
# are followed by as many characters of a name.
_PART = re.compile(
    r"(?P<length>[0-9]+)"
    r"|(?P<value>L(?:[a-z]|S[0-9A-Z]*_)n?[0-9a-f]*E)"
    r"|(?P<skip>S[0-9A-Z]*_|S[a-z]|T[0-9]*_|DF[0-9]+[_bx]?|D[A-Za-z]|A[0-9]*_)"
    r"|(?P<open>Ul|L_Z|[FIJLNXZ])"
    r"|(?P<close>E(?:[0-9]*_)?)"
    r"|(?P<other>.)",
    re.DOTALL,
)
# What words tell of a kernel that touches one device alone, instead of an operation.
ALONE = "one device"
OTHER_LIBRARY = "other library"
# Words that have several spellings.
_SPELLINGS = {
    "allreduce": r"all ?reduce[0-9]*",
    "allgather": r"all ?gath[ea]r(?: ?v)?[0-9]*",
    "reducescatter": r"reduce ?scatter(?: ?v)?[0-9]*",
    "alltoall": r"all ?(?:to|2) ?all(?: ?vc?)?[0-9]*|a2av?",
    "sendrecv": r"send ?recv",
    "oneshot": r"one ?shot",
    "twoshot": r"two ?shot",
    "intranode": r"intra ?node",
    "internode": r"inter ?node",
    "localrank": r"local ?rank",
    "broadcast": r"b ?cast",
    "matmul": r"mat mul",
    "zerocopy": r"zero ?copy",
}
_TERMS = tuple(_SPELLINGS)
_SPELLING = re.compile(
    rf"(?<= )(?:{'|'.join(f'({spelling})' for spelling in _SPELLINGS.values())})(?= )"
)
_WORD = re.compile(r"[A-Z][A-Z0-9]*(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")
# Kernels that torch.compile makes of many operators, whose names it lists.
_INDUCTOR = re.compile(r"triton_(?:poi|red|per|tem|for)_")
_HOST = re.compile(rf"({'|'.join(HOST_LIBRARIES)}):(\w+)")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A device function: its namespaces and classes, its own name, what follows the name."""

    scopes: tuple[str, ...]
    function: str
    tail: str  # from the template arguments on
    is_mangled: bool = False

    def is_bare(self) -> bool:
        """Return whether the name has neither scopes, template arguments nor parameters."""
        return not (self.scopes or self.tail or self.is_mangled)

    def flags(self) -> list[bool | None]:
        """Return the template arguments; None for those that are not Boolean."""
        arguments = _mangled_arguments if self.is_mangled else _plain_arguments
        return [_BOOLEANS.get(argument) for argument in arguments(self.tail)]


def parse(name: str) -> Symbol:
    """Take a name apart, mangled or not."""
    text = name[:LIMIT]
    if start := _MANGLED.match(text):
        return _parse_mangled(text, start.end())
    return _parse_plain(text)


def _parse_plain(text: str) -> Symbol:
    """Take a readable name apart."""
    position = _DECORATION.match(text).end()  # type: ignore[union-attr]
    path = ""
    while match := _IDENTIFIERS.match(text, position):
        path += match[0]
        position = tail = match.end()
        if text.startswith("<", position):
            position = _closing(text, position)
        following = text[position : position + 2]
        if following == "::":  # a class with template arguments
            path += "::" if not path.endswith("::") else ""
            position += 2
        elif following[:1] == " " and _IDENTIFIERS.match(text, position + 1):
            path = ""  # that was the type of the result
            position += 1
        else:
            return _symbol(path.split("::"), text[tail:])
    return _symbol(path.split("::"), text[position:])


def _symbol(path: list[str], tail: str) -> Symbol:
    """Return the symbol of a readable path."""
    named = [part for part in path if part and part not in (_ANONYMOUS, "{anonymous}")]
    return Symbol(tuple(named[:-1]), named[-1] if named else "", tail)


def _closing(text: str, position: int) -> int:
    """Return where the bracket that opens at a position has closed, or the end of the text."""
    depth = 0
    for bracket in _BRACKET.finditer(text, position):
        # "->" and operators that compare are rare in names, and stand in parentheses.
        depth += 1 if bracket[0] in "<(" else -1
        if depth == 0:
            return bracket.end()
    return len(text)


def _plain_arguments(tail: str) -> list[str]:
    """Return the template arguments at the start of a readable tail."""
    if not tail.startswith("<"):
        return []
    inner = tail[1 : _closing(tail, 0) - 1]
    arguments, start, depth = [], 0, 0
    for mark in re.finditer(r"[<>(),]", inner):
        if mark[0] == ",":
            if depth == 0:
                arguments.append(inner[start : mark.start()].strip())
                start = mark.end()
        else:
            depth += 1 if mark[0] in "<(" else -1
    return [*arguments, inner[start:].strip()]


def _parse_mangled(text: str, position: int) -> Symbol:
    """Take an Itanium name apart, from behind `_Z`."""
    is_nested = text.startswith("N", position)
    path: list[str] = []
    tail = position
    while position < len(text):
        if match := _LENGTH.match(text, position):
            position = tail = match.end() + _length(match)
            identifier = text[match.end() : position]
            if not identifier.startswith("_GLOBAL__N_"):
                path.append(identifier.removeprefix("__device_stub__"))
            if not is_nested:
                break
        elif path and text[position] == "I":  # of a class, or of the function itself
            position = _mangled_closing(text, position)
        elif match := _QUALIFIER.match(text, position):
            position = match.end()
        else:
            break
    return Symbol(tuple(path[:-1]), path[-1] if path else "", text[tail:], is_mangled=True)


def _mangled_closing(text: str, position: int, values: list[str] | None = None) -> int:
    """Return where the template arguments at a position have ended; collect their values.

    A value is the text of a literal, or "" for any other argument.
    """
    open_parts: list[str] = []
    while part := _PART.match(text, position):
        kind, position = part.lastgroup, part.end()
        if kind == "open":
            open_parts.append(part[0])
        elif kind == "close":
            closed = open_parts.pop()
            if not open_parts or closed not in ("Ul", "Z"):
                position = part.start() + 1  # a number behind belongs to what follows
        elif kind == "length":
            position += _length(part)
        if open_parts[-1:] == ["L"] and kind in ("length", "close"):
            position = _NUMBER.match(text, position).end()  # type: ignore[union-attr]  # of an enumeration
        if values is not None and len(open_parts) == 1 and kind != "open":
            values.append(part[0] if kind == "value" else "")
        if not open_parts:
            return position
    return len(text)


def _length(digits: re.Match[str]) -> int:
    """Return the length of a name, at most `LIMIT`, however many digits it has."""
    return int(digits[0]) if len(digits[0]) <= len(str(LIMIT)) else LIMIT


def _mangled_arguments(tail: str) -> list[str]:
    """Return the literals among the template arguments of a mangled tail; "" for others."""
    values: list[str] = []
    if tail.startswith("I"):
        _mangled_closing(tail, 0, values)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a name tells of communication."""

    library: str
    op: str
    tag: str | None = None
    fused: bool = False  # whether the kernel does more than communicate


# The operation that words tell, or a function that takes it from the whole name.
Operation = str | Callable[[Symbol], str]
# Words with a space on both sides, and what they tell; the first that a name has decides.
Phrases = tuple[tuple[str, Operation], ...]


def _phrases(*tables: Mapping[str, Operation]) -> Phrases:
    """Return phrases from tables of words and operations."""
    return tuple((f" {phrase} ", op) for table in tables for phrase, op in table.items())


def _set(*lines: str) -> frozenset[str]:
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


_COLLECTIVES: Mapping[str, Operation] = {
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
_COLLECTIVE_OPS = frozenset(_COLLECTIVES.values())
COLLECTIVES = _phrases(_COLLECTIVES)
WITH_BARRIERS = _phrases(_COLLECTIVES, {"barrier": "Barrier"})
COMMUNICATION = _phrases(_COLLECTIVES, _ROOTED, _MESSAGES, _WAITS)
EXPERTS = (*_phrases({"dispatch": "AllToAll", "combine": "AllToAll"}), *COMMUNICATION)
# Words of helpers that touch one device alone.
LOCAL = _set(
    "layout permute unpermute permutation sort topk mask mapping local prepare preprocess",
    "preprocessing prologue epilogue setup init initialize reset clear clean zero memset fill",
    "convert cast index indices indice metadata count counts bincount histogram scan cumsum",
    "prefix checksum nan sanitize expected reference gemm matmul verify validate dequantize",
    "unpack",
)


def _reduces_or_scatters(symbol: Symbol) -> str:
    """Return the operation of torch's two-shot all-reduce: a first flag omits its end."""
    flag = next((flag for flag in symbol.flags() if flag is not None), False)
    return "ReduceScatter" if flag else "AllReduce"


def _sends_or_receives(symbol: Symbol) -> str:
    """Return the operation of a kernel of pplx: the flags DO_SEND and DO_RECV are neighbors."""
    flags = symbol.flags()
    has_both = any(None not in pair for pair in pairwise(flags))
    return "AllToAll" if has_both and symbol.scopes in ((), ("pplx",)) else ALONE


def _named_by_scope(symbol: Symbol) -> str:
    """Return the collective that the namespaces name; else an all-reduce."""
    op = _operation(_spaced("_".join(symbol.scopes)), COLLECTIVES)
    return op if isinstance(op, str) else "AllReduce"


# Namespaces without communication, whatever their functions are called.
_COMPUTE_SCOPES = _set(
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
        local=_set("prepare reset checksum"),
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
        prefixes=("mccl", "cncl", "bkcl", "eccl", "vccl", "topsccl", "flagcx"),
        local=_set("prepare reset checksum"),
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
        local=LOCAL | _set("memcpy copy"),
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
            _COLLECTIVES,
            {"fcollect": "AllGather", "rdxn": "AllReduce", "broadcast": "Broadcast"},
            _WAITS,
        ),
    ),
    Library(
        name="MSCCL++",
        scopes=("mscclpp",),
        prefixes=("mscclpp",),
        local=LOCAL - _set("clean"),  # it cleans between two barriers
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
        local=LOCAL - _set("cast"),
        operations=_phrases({"group cast": "AllToAll", "group reduce": "AllToAll"}, _WAITS),
        tag="CP",
    ),
    Library(
        name="DeepEP",
        prefixes=("notify_dispatch", "cached_notify", "ag_nvl"),
        local=_set("reset"),
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
        local=LOCAL | _set("copy staging"),
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
        local=LOCAL | _set("scale scales"),
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
        operations=_phrases(_COLLECTIVES, {"rs": "ReduceScatter", "ag": "AllGather"}),
        default="AllReduce",
        tag="TP",
    ),
    Library(
        name="Transformer Engine",
        prefixes=("kuserbuffers_",),
        local=_set("inc"),
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
            {"ag": "AllGather", "dis scatter": "AllToAll"}, _COLLECTIVES, _MESSAGES, _WAITS
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
        local=_set("gemm matmul"),
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
# Namespaces of libraries inside of those without communication.
_EXCEPTED = tuple(
    f"{scope}::"
    for library in LIBRARIES
    for scope in library.scopes
    if scope.partition("::")[0] in _COMPUTE_SCOPES
)
# Words of namespaces in which functions communicate.
_COMMUNICATING = _set(
    "comm comms communication collective collectives distributed dist ep nccl rccl ccl xccl",
    "hccl shmem symm symmetric nvls rdma ipc internode intranode p2p nvlink",
    *_COLLECTIVES,
)
# Words of functions that speak of other devices.
_REMOTE = _set(
    "intranode internode nvlink nvl p2p ipc nvls multimem sdma rdma lsa ibgda gin symm shmem",
    "rank ranks localrank peer peers world xgmi pcie iris nccl dda mnnvl gpus",
)
# Words of what joins devices: what is sent or dispatched there is communication.
_FABRIC = _set("intranode internode nvlink rdma ibgda p2p xgmi mnnvl nvshmem")
# Words of functions that speak of other devices beside the name of a collective only.
_ALGORITHM = _REMOTE | _set(
    "oneshot twoshot ring tree lamport node fullmesh mesh push pull ll ll128 ib pairs packet",
    "cross hierarchical",
)
# Words that speak of threads of one device, or of rearranging what it has.
_INSIDE = _set(
    "block warp wave thread threads cta cluster lane tile sum max min pack transpose shared",
    "smem fused fusion fwd bwd softmax norm",
)
# Functions that are called just like a collective.
_NAMESAKES = [[name, *kernel] for name in _COLLECTIVES for kernel in ((), ("kernel",))]
# Words that leave it to the namespace what a function does.
_NAMELESS = _set("kernel global main impl run")
# Words before the name of a collective that leave it to that name what a function does.
_PLAIN = _set("simple basic naive hybrid")
# Words of what a kernel does beside a collective.
_FUSING = _set("fusion norm rmsnorm rms layernorm")
# Words that tell how a kernel does what it is called after, or to which numbers.
_MANNER = _set(
    "kernel kernels impl main run inner single multi 1d 2d 3d strided chunked chunk contiguous",
    "consumer producer persistent pipelined inplace place out in async low latency simple",
    "basic naive hybrid fast small medium large big 1stage 2stage stage triton cuda hip gpu",
    "device float float16 float32 bfloat16 half bf16 fp16 fp32 fp8 f16 f32 int int8 int32",
)
# Words of what a kernel moves from device to device.
_MOVED = _set(
    "copy memcpy transfer transfers read write load store push pull data buffer buffers tensor",
    "block blocks bandwidth latency test unidirectional bidirectional",
)
_VERSION = re.compile(r"v?[0-9]*")


# Generated names count up or have a hash; no library is told from another by long numbers.
_LONG_NUMBER = re.compile(r"[0-9]{4,}")


def recognize(name: str) -> Named | None:
    """Return what the name of a kernel tells of communication; None: it is compute."""
    text = name[:LIMIT]
    return _recognized(text if _MANGLED.match(text) else _LONG_NUMBER.sub("0000", text))


@lru_cache(maxsize=1 << 12)
def _recognized(name: str) -> Named | None:
    """Return what a name tells whose numbers, but for lengths, are short."""
    if _INDUCTOR.match(name):
        return None
    if host := _HOST.match(name):
        op = _operation(_spaced(host[2]), COMMUNICATION)
        return Named(library=host[1], op=op if isinstance(op, str) else "OTHER")
    symbol = parse(name)
    if not symbol.function or _is_compute(symbol):
        return None
    text = _spaced(symbol.function)
    library, op = _attribute(symbol, text)
    if op == ALONE:
        return None
    is_fused = not _FUSING.isdisjoint(text.split())
    return Named(library=library.name, op=op, tag=library.tag, fused=is_fused)


def is_local(name: str) -> bool:
    """Whether a name says that a kernel touches one device alone; unknown names do not."""
    symbol = parse(name)
    if _INDUCTOR.match(name) or not symbol.function:
        return True
    text = _spaced(symbol.function)
    library, op = _attribute(symbol, text)
    is_known = library in LIBRARIES or not LOCAL.isdisjoint(text.split())
    return _is_compute(symbol) or (op == ALONE and is_known)


def _is_compute(symbol: Symbol) -> bool:
    """Return whether a kernel is in a namespace without communication."""
    is_compute = not _COMPUTE_SCOPES.isdisjoint(symbol.scopes[:1])
    return is_compute and not "::".join((*symbol.scopes, "")).startswith(_EXCEPTED)


def _spaced(identifier: str) -> str:
    """Return the words of an identifier in lower case, with a space on both sides of each."""
    text = f" {' '.join(_WORD.findall(identifier)).lower()} "
    return _SPELLING.sub(lambda match: _TERMS[(match.lastindex or 0) - 1], text)


def _attribute(symbol: Symbol, text: str) -> tuple[Library, str]:
    """Return the library of a kernel and its operation, or ALONE."""
    path = "::".join((*symbol.scopes, ""))
    function = symbol.function.lstrip("_")
    for row in sorted(set(_rows(symbol, function, text))):
        library = LIBRARIES[row]
        if (
            path.startswith(tuple(f"{scope}::" for scope in library.scopes))
            or function.startswith(library.prefixes)
            or any(f" {phrase} " in text for phrase in library.phrases)
        ):
            return library, _decide(library, symbol, text)
    name = symbol.scopes[0] if symbol.scopes else OTHER_LIBRARY
    return Library(name=name), _elsewhere(symbol, text)


def _keys(library: Library) -> Iterator[str]:
    """Yield what kernels of a library have: a namespace, first letters, or a word."""
    yield from (f"{scope.partition('::')[0]}::" for scope in library.scopes)
    yield from (f"{prefix[:3]}*" for prefix in library.prefixes)
    yield from (phrase.partition(" ")[0] for phrase in library.phrases)


def _rows_by_key(libraries: Iterable[Library]) -> dict[str, list[int]]:
    """Return the rows of libraries by each key."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, library in enumerate(libraries):
        for key in _keys(library):
            rows[key].append(row)
    return dict(rows)


_ROWS = _rows_by_key(LIBRARIES)


def _rows(symbol: Symbol, function: str, text: str) -> Iterator[int]:
    """Yield the rows of libraries to which a kernel may belong."""
    for key in (*(f"{scope}::" for scope in symbol.scopes[:1]), f"{function[:3]}*"):
        yield from _ROWS.get(key, ())
    for word in text.split():
        yield from _ROWS.get(word, ())


def _decide(library: Library, symbol: Symbol, text: str) -> str:
    """Return the operation of a kernel of a library, or ALONE."""
    op = _operation(text, library.exceptions)
    if op is None:
        is_local = not library.local.isdisjoint(text.split())
        op = ALONE if is_local else _operation(text, library.operations) or library.default
    return op if isinstance(op, str) else op(symbol)


def _operation(text: str, phrases: Phrases) -> Operation | None:
    """Return the operation of the first phrase among the words; None if they have none."""
    ops = [op for phrase, op in phrases if phrase in text]
    if len(_COLLECTIVE_OPS.intersection(ops)) > 1:  # one kernel does several
        return next((op for phrase, op in COLLECTIVES if text.startswith(phrase)), "OTHER")
    return ops[0] if ops else None


def _elsewhere(symbol: Symbol, text: str) -> str:
    """Return the operation of a kernel of no known library if the words are clear, or ALONE."""
    function = frozenset(text.split())
    op: Operation | None = None
    if function.isdisjoint(LOCAL):
        scopes = frozenset(_spaced("_".join(symbol.scopes)).split())
        if function <= _NAMELESS:
            op = _operation(_spaced("".join(symbol.scopes[-1:])), COLLECTIVES)
        elif "ar" in function and not function.isdisjoint(("oneshot", "twoshot")):
            op = "AllReduce"
        elif not (scopes.isdisjoint(_COMMUNICATING) and function.isdisjoint(_FABRIC)):
            op = _among_communication(symbol, text, scopes)
        elif not function.isdisjoint(_REMOTE):
            op = _operation(text, WITH_BARRIERS)
        elif _is_collective(symbol, text, function):
            op = _operation(text, COLLECTIVES)
    return op if isinstance(op, str) else ALONE


def _among_communication(symbol: Symbol, text: str, scopes: frozenset[str]) -> Operation | None:
    """Return the operation of a kernel whose words or namespaces are of communication.

    "p2p" alone may be from particle to particle: it counts with words of moving data alone.
    """
    function = frozenset(text.split())
    if scopes.isdisjoint(_COMMUNICATING) and function & _FABRIC == {"p2p"}:
        op = _operation(text.replace(" p2p ", " "), EXPERTS)
        return op or ("SendRecv" if _is_plain(function, {"p2p"} | _MOVED) else None)
    op = _operation(text, EXPERTS)
    if op is None and not function.isdisjoint(_ALGORITHM):
        op = _operation(_spaced("".join(symbol.scopes[-1:])), COLLECTIVES)
    return op


def _is_plain(function: frozenset[str], more: Set[str]) -> bool:
    """Return whether a function has no words but those of its manner, and more."""
    others = function - _MANNER - more
    return all(_VERSION.fullmatch(word) for word in others)


def _is_collective(symbol: Symbol, text: str, function: frozenset[str]) -> bool:
    """Return whether a function is called a collective, or several, and nothing else.

    Kernels of Triton have neither parameters nor template arguments in their names; what else
    they are called must be nothing that one device does.
    """
    parts = text.split()
    named = list(dropwhile(_PLAIN.__contains__, parts))
    if named[:2] in _NAMESAKES or len(function & _COLLECTIVES.keys()) > 1:
        return True
    first = next((part for part in parts if part != "fused"), "")
    is_fused = not function.isdisjoint(_FUSING)
    if first in _COLLECTIVES and is_fused:
        return True
    # What only begins like a collective, as "allreduce_grads", may be anything.
    behind = frozenset(takewhile(lambda part: part not in _COLLECTIVES, reversed(parts)))
    if function.isdisjoint(_ALGORITHM):
        return symbol.is_bare() and function.isdisjoint(_INSIDE) and _is_plain(behind, set())
    is_clear = is_fused or not symbol.is_bare()
    return is_clear or _is_plain(behind, _ALGORITHM | _INSIDE)
