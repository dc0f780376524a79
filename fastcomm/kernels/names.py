"""Short names and categories of device work, from the names that profilers record.

The names of kernels are those of compilers: with the return type, template arguments and the
types of parameters, a thousand letters are usual. A category is a guess from the name of a
kernel by the first pattern that matches; communication is what the reader says it is.
"""

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.trace.schema import KIND

COMMUNICATION, COPY, OTHER = "communication", "copy", "other"

# Categories of kernels by their names, the first match first. The names are those of PyTorch,
# cuBLAS and cuDNN, CUTLASS, hipBLASLt (Cijk_), MIOpen, Composable Kernel, FlashAttention,
# TensorRT-LLM, vLLM, Transformer Engine, Apex, FBGEMM and Inductor, as traces have them.
_PATTERNS = {
    "attention": r"flash_(?:fwd|bwd)|flash_attn|fmha|attention|(?<![a-z])mha_|sdpa|paged_attn"
    r"|flashattn|(?<![a-z])flash::",
    "pooling": r"(?:max|avg|average)_?pool|pooling",
    "convolution": r"^(?!.*cutlass::gemm).*(?:conv(?!ert)|wgrad(?!_gemm)|dgrad|[fp]prop"
    r"|winograd|igemm|nchwto|nhwcto|nchw2|cnhw2|batched_transpose|im2col|scudnn"
    r"|cutlass_cudnn|bwd_weight|bwd_data)",
    "GEMM": r"(?<!fb)gemm|gemv|cublas|nvjet|cijk_|matmul|(?<![a-z])[bm]mm(?:_|$)|splitkreduce"
    r"|cutlass|xmma|dot_kernel|_mma_|fc-dtype|epilogue::impl",
    "normalization": r"(?:layer|batch|group|rms|instance)_?norm|(?<![a-z])bn_[fb]w|welford"
    r"|gammabeta|rowwisemoments|norm_grad|normfwd|normbwd",
    "softmax and loss": r"softmax|nll_loss|cross_entropy|(?<![a-z])[bc]ce_|mse_loss|kl_div",
    "routing of experts": r"(?<![a-z])moe(?![a-z])|routing|expert|topkgating|permute_.*token"
    r"|token_permut|^_?(?:un)?permute_kernel",
    "embedding and indexing": r"embedding|index|gather|scatter|nonzero|(?<![a-z])tbe_"
    r"|masked_select|sparse|segment_reduce|jagged|permute_[12]d|bounds_check|reshape_and_cache"
    r"|indices|pooled_emb|bucketize|to_dense|compute_grad_weight",
    "optimizer": r"multi_tensor|adam|(?<![a-z])lamb(?![a-z])|(?<![a-z])sgd|adagrad|foreach",
    "sort and scan": r"sort|radix|topk|(?<![a-z])scan|devicescan|cumsum|unique|histogram",
    "fused": r"^triton_|(?<![a-z])fused_",
    "reduction": r"reduce|reduction|(?<![a-z])sum_|(?<![a-z])norm_",
    "elementwise": r"elementwise|functor|(?<![a-z])copy|catarray|fill|dropout|gelu|silu|relu"
    r"|sigmoid|transpose|philox|distribution|quant|cast|tensorop|pointwise|where|arange"
    r"|rotary|rope_|fp8|tanh|threshold|reciprocal|eq_kernel|^(?:add|sub|mul|div|divide|clip|neg|log|exp|aten::)",
}
_CATEGORIES = tuple((name, re.compile(text, re.IGNORECASE)) for name, text in _PATTERNS.items())
CATEGORIES = (COMMUNICATION, *_PATTERNS, COPY, OTHER)
_HOST = "host"  # of the operators of a run without an accelerator
_LONGEST = 4096  # letters of a name that are looked at

_NUMBERED = re.compile(r"(?<=#)\d+$")
# Wrappers of CUTLASS whose argument is the name of the kernel, or its type.
_WRAPPED = re.compile(r"\bcutlass\w*::Kernel2?<(\w+)>")
_WRAPPED_TYPE = re.compile(r"\bcutlass\w*::device_kernel<(?:[\w:]*enable_\w+<)?([\w:]+)")
_CUTLASS = re.compile(r"(?:void )?cutlass")
_SPECIAL = "(anonymous namespace)"
_PAIRS = {"<": ">", "(": ")"}
_DOTS = "…"


def short_name(name: str) -> str:
    """Return the name of a kernel without return type, parameters and template arguments.

    "void at::native::reduce_kernel<512, 1, ...>(...)" is "at::native::reduce_kernel<…>". Names
    that are no signatures stay as they are.
    """
    name = name[:_LONGEST]
    if not name.endswith(")") and "<" not in name:
        return name
    if wrapped := _WRAPPED.search(name) or _WRAPPED_TYPE.search(name):
        return f"{wrapped[1]}{'' if wrapped.re is _WRAPPED else f'<{_DOTS}>'}"
    folded = _folded(name.replace(_SPECIAL, "{anonymous}"))
    if folded is None:
        return name
    folded = folded.removesuffix(f"({_DOTS})").rpartition(" ")[2]
    return folded.replace("{anonymous}::", "") or name


def _folded(name: str) -> str | None:
    """Return a name with dots inside its outer brackets; None if brackets do not match."""
    parts, closing = [], [""]
    for letter in name:
        is_outside = len(closing) == 1
        if letter == closing[-1]:
            closing.pop()
            parts += [_DOTS, letter] if len(closing) == 1 else []
        elif letter in _PAIRS:
            closing.append(_PAIRS[letter])
            parts += [letter] if is_outside else []
        elif is_outside:
            parts.append(letter)
    return "".join(parts) if len(closing) == 1 else None


def short_label(name: str) -> str:
    """Return the name of an annotation without its number: "ProfilerStep#12" is "...#N"."""
    return _NUMBERED.sub("N", name)


def category(name: str) -> str:
    """Return the one of `CATEGORIES` of a compute kernel by its name; `OTHER` if unknown."""
    short = short_name(name)
    # The arguments of a template tell what a wrapper computes.
    text = name[:_LONGEST] if _CUTLASS.match(name) else short
    return next((label for label, pattern in _CATEGORIES if pattern.search(text)), OTHER)


def categories(
    kind: NDArray[np.int8], code: NDArray[np.int32], is_comm: NDArray[np.bool_], names: pa.Array
) -> tuple[NDArray[np.int32], Sequence[str]]:
    """Return the category of each row of work as an index, and the categories.

    Parameters
    ----------
    kind
        Kind of each row, as `trace.schema.KINDS` numbers it.
    code
        Index of its name in `names`.
    is_comm
        Whether it is communication.
    names
        Names of all events.

    """
    labels = (*CATEGORIES, _HOST)
    number = {label: place for place, label in enumerate(labels)}
    used = np.unique(code[(kind == KIND["kernel"]) & ~is_comm])
    by_name = np.full(len(names) + 1, number[OTHER], np.int32)
    by_name[used] = [number[category(names[k].as_py())] for k in used.tolist()]
    result = by_name[code]
    result[(kind == KIND["memcpy"]) | (kind == KIND["memset"])] = number[COPY]
    result[kind == KIND["host_work"]] = number[_HOST]
    result[is_comm] = number[COMMUNICATION]
    return result, labels
