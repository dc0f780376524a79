"""Device work by name: short names, categories, and statistics of durations.

The names of kernels are those of compilers: with the return type, template arguments and the
types of parameters, a thousand letters are usual. A category is a guess from the name of a
kernel by the first pattern that matches; communication is what the reader says it is.

Durations are kept as distributions: by key, how many are in each bucket. A bucket has the
durations that agree in their first 11 bits, so percentiles are exact up to 2 us, and above to
0.05 %. Distributions of several ranks merge into one, in any order, and their size does not
grow with the number of events. Numbers, sums and extremes are exact.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fastcomm.errors import SchemaError
from fastcomm.trace.columns import filled
from fastcomm.trace.schema import KIND, WHOLE_GRAPH
from fastcomm_kernels import grouping
from fastcomm_kernels.arrays import Floats, Ints, Numbers
from fastcomm_kernels.grouping import BITS

_MOST_NS = 1 << 62  # of all durations together
_HALF = 0.5
_BUCKETS = 1 << 16  # more than there are
_CELLS = 4  # per event: with more, most would be empty
_FEW = 1 << 16  # cells that cost next to nothing


@dataclass(frozen=True, slots=True)
class KeySums:
    """Number, sum, least and longest duration by key; times in ns."""

    count: Ints
    total: Ints
    least: Ints
    most: Ints

    @classmethod
    def of(cls, key: Numbers, duration: Ints, keys: int) -> Self:
        """Sum up the durations (ns) of events by their key, a number below `keys`."""
        return cls(*grouping.sums(key, duration, np.int64(keys)))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Buckets of durations by key, ascending within a key, and the number of events in each."""

    first: Ints  # of each key, the row of its lowest bucket; then the number of rows
    bucket: Ints
    number: Ints

    @classmethod
    def of(cls, key: Numbers, duration: Ints, sums: KeySums) -> Self:
        """Count durations (ns) by bucket; `sums` are those of the same events."""
        low, high = grouping.buckets(sums.least), grouping.buckets(sums.most)
        cells = np.where(sums.count > 0, high - low + 1, 0)
        first = np.concatenate([[0], np.cumsum(cells)])
        if first[-1] > _CELLS * len(key) + _FEW:
            pair = key.astype(np.int64) * _BUCKETS + grouping.buckets(duration)
            pair, counts = np.unique(pair, return_counts=True)
            keys = np.searchsorted(pair, np.arange(len(cells) + 1) * _BUCKETS)
            return cls(keys, pair % _BUCKETS, counts)
        number = grouping.histogram(key, duration, first, low)
        cell = np.flatnonzero(number)
        of_cell = np.repeat(low - first[:-1], cells)
        return cls(
            np.searchsorted(cell, first), cell + of_cell[cell], number[cell].astype(np.int64)
        )

    @classmethod
    def merged(cls, key: Numbers, bucket: Ints, number: Ints, keys: int) -> Self:
        """Add up distributions: `number` events of a key and a bucket per element."""
        pair, place = np.unique(key.astype(np.int64) * _BUCKETS + bucket, return_inverse=True)
        sums = np.zeros(len(pair), np.int64)
        np.add.at(sums, place, number)
        first = np.searchsorted(pair, np.arange(keys + 1) * _BUCKETS)
        return cls(first, pair % _BUCKETS, sums)

    @property
    def keys(self) -> Numbers:
        """The key of each row."""
        size = len(self.first) - 1
        return np.repeat(np.arange(size, dtype=np.int32), np.diff(self.first))

    def percentile(self, percent: float) -> Floats:
        """Return a percentile by key in ns, interpolated as NumPy does; NaN without events."""
        behind = np.concatenate([[0], np.cumsum(self.number)])
        edges = behind[self.first]
        count, before = np.diff(edges), edges[:-1]
        has = count > 0
        place = percent / 100 * (count[has] - 1)
        down = np.floor(place).astype(np.int64)
        low, high = (
            duration_of(self.bucket[np.searchsorted(behind, before[has] + at, "right") - 1])
            for at in (down, np.ceil(place).astype(np.int64))
        )
        share, gap = place - down, high - low
        values = np.full(len(count), np.nan)
        values[has] = np.where(share < _HALF, low + gap * share, high - gap * (1 - share))
        return values


def duration_of(bucket: Ints) -> Floats:
    """Return the duration in the middle of each bucket, in ns."""
    shift = np.maximum((bucket >> (BITS - 1)) - 1, 0)
    least = (bucket - (shift << (BITS - 1))) << shift
    middle: Floats = (least + ((1 << shift) >> 1)).astype(np.float64)
    return middle


def check_durations(duration: Ints) -> None:
    """Raise SchemaError if durations are negative, or their sum may exceed an int64."""
    if not len(duration):
        return
    if int(duration.min()) < 0:
        raise SchemaError("a duration is negative")
    is_large = int(duration.max()) * len(duration) > _MOST_NS
    if is_large and float(duration.sum(dtype=np.float64)) > _MOST_NS:
        raise SchemaError("durations add up to more than 146 years")


def duration_statistics(table: pa.Table) -> pa.Table:
    """Return number, sum, mean and percentiles of durations by name.

    Parameters
    ----------
    table
        Columns `name` (text, or dictionary of texts) and `duration_ns` (int64), one row per
        event, without nulls.

    Returns
    -------
    pyarrow.Table
        A row per name, the longest sum first: `name`, `count`, `total_ns`, `mean_ns`,
        `median_ns`, `p95_ns`, `min_ns` and `max_ns`. Percentiles are interpolated linearly,
        and exact to 0.05 %; the other columns are exact.

    Raises
    ------
    SchemaError
        If a column is missing or has nulls, or durations are negative or add up to more than
        an int64 holds.

    """
    for name in ("name", "duration_ns"):
        if name not in table.column_names or table[name].null_count:
            raise SchemaError(f"events need a column {name} without nulls")
    names = table["name"].combine_chunks()
    names = names if pa.types.is_dictionary(names.type) else names.dictionary_encode()
    duration = filled(table["duration_ns"])
    check_durations(duration)
    code, texts = names.indices.to_numpy(), names.dictionary
    if pc.count_distinct(texts).as_py() < len(texts):
        code, texts = same_texts(code, texts)
    sums = KeySums.of(code, duration, len(texts))
    return statistics(sums, Distribution.of(code, duration, sums), texts)


def same_texts(code: Numbers, texts: pa.Array) -> tuple[Numbers, pa.Array]:
    """Number texts so that equal ones have one code; return codes and distinct texts."""
    encoded = texts.cast(pa.string()).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int32)[code], encoded.dictionary


def statistics(sums: KeySums, durations: Distribution, names: pa.Array) -> pa.Table:
    """Return a row per key with events, the longest sum first; keys have `names`."""
    percentiles = {
        name: durations.percentile(percent)
        for name, percent in (("median_ns", 50), ("p95_ns", 95))
    }
    table = pa.table(
        {
            "name": names,
            "count": sums.count,
            "total_ns": sums.total,
            "mean_ns": sums.total / np.maximum(sums.count, 1),
            # The middle of a bucket may be outside of what is in it.
            **{name: np.clip(p, sums.least, sums.most) for name, p in percentiles.items()},
            "min_ns": sums.least,
            "max_ns": sums.most,
        }
    ).filter(pa.array(sums.count > 0))
    return table.sort_by([("total_ns", "descending"), ("name", "ascending")])


COMMUNICATION, COPY, OTHER = "communication", "copy", "other"
GRAPH = "whole graph"  # a CUDA graph without the kernels inside
# In place of lookaround, which RE2 does not have.
_BEGIN, _END = "(?:^|[^a-z])", "(?:[^a-z]|$)"
_NOT_CONVERT = "(?:[^e]|e[^r]|er[^t]|e?r?$)"
_NOT_GEMM = "(?:[^_]|_[^g]|_g[^e]|_ge[^m]|_gem[^m]|$|_$|_g$|_ge$|_gem$)"
# Categories of kernels by their names, the first match first. The names are those of PyTorch,
# cuBLAS and cuDNN, CUTLASS, hipBLASLt (Cijk_), MIOpen, Composable Kernel, FlashAttention,
# TensorRT-LLM, vLLM, Transformer Engine, Apex, FBGEMM and Inductor, as traces have them.
_PATTERNS = {
    "attention": rf"flash_(?:fwd|bwd)|flash_attn|fmha|attention|{_BEGIN}mha_|sdpa|paged_attn"
    rf"|flashattn|{_BEGIN}flash::",
    "pooling": r"(?:max|avg|average)_?pool|pooling",
    "convolution": rf"conv{_NOT_CONVERT}|wgrad{_NOT_GEMM}|dgrad|[fp]prop"
    r"|winograd|igemm|nchwto|nhwcto|nchw2|cnhw2|batched_transpose|im2col|scudnn"
    r"|cutlass_cudnn|bwd_weight|bwd_data",
    "GEMM": rf"(?:^|[^b]|^b|[^f]b)gemm|gemv|cublas|nvjet|cijk_|matmul|{_BEGIN}[bm]mm(?:_|$)"
    r"|splitkreduce|cutlass|xmma|dot_kernel|_mma_|fc-dtype|epilogue::impl",
    "normalization": rf"(?:layer|batch|group|rms|instance)_?norm|{_BEGIN}bn_[fb]w|welford"
    r"|gammabeta|rowwisemoments|norm_grad|normfwd|normbwd",
    "softmax and loss": rf"softmax|nll_loss|cross_entropy|{_BEGIN}[bc]ce_|mse_loss|kl_div",
    "routing of experts": rf"{_BEGIN}moe{_END}|routing|expert|topkgating|permute_.*token"
    r"|token_permut|^_?(?:un)?permute_kernel",
    "embedding and indexing": rf"embedding|index|gather|scatter|nonzero|{_BEGIN}tbe_"
    r"|masked_select|sparse|segment_reduce|jagged|permute_[12]d|bounds_check|reshape_and_cache"
    r"|indices|pooled_emb|bucketize|to_dense|compute_grad_weight",
    "optimizer": rf"multi_tensor|adam|{_BEGIN}lamb{_END}|{_BEGIN}sgd|adagrad|foreach",
    "sort and scan": rf"sort|radix|topk|{_BEGIN}scan|devicescan|cumsum|unique|histogram",
    "fused": rf"^triton_|{_BEGIN}fused_",
    "reduction": rf"reduce|reduction|{_BEGIN}sum_|{_BEGIN}norm_",
    "elementwise": rf"elementwise|functor|{_BEGIN}copy|catarray|fill|dropout|gelu|silu|relu"
    r"|sigmoid|transpose|philox|distribution|quant|cast|tensorop|pointwise|where|arange"
    r"|rotary|rope_|fp8|tanh|threshold|reciprocal|eq_kernel|^(?:add|sub|mul|div|divide|clip|neg|log|exp|aten::)",
}
# Names that match are of no such category.
_EXCEPTIONS = {"convolution": "cutlass::gemm"}
CATEGORIES = (COMMUNICATION, *_PATTERNS, COPY, GRAPH, OTHER)
# Categories of work that may wait for other ranks: no rank is slow at it.
WAITING = (COMMUNICATION, GRAPH)
_HOST = "host"  # of the operators of a run without an accelerator
_LONGEST = 4096  # letters of a name that are looked at
_NUMBERED = re.compile(r"(?<=#)\d+$")
# Wrappers of CUTLASS whose argument is the name of the kernel, or its type.
_WRAPPED = re.compile(r"\bcutlass\w*::Kernel2?<(\w+)>")
_WRAPPED_TYPE = re.compile(r"\bcutlass\w*::device_kernel<(?:[\w:]*enable_\w+<)?([\w:]+)")
_CUTLASS = re.compile(r"(?:void )?cutlass")
_SPECIAL = "(anonymous namespace)"
_PAIRS = {"<": ">", "(": ")"}
_BRACKETS = re.compile("([<>()])")
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
    for part in _BRACKETS.split(name):
        is_outside = len(closing) == 1
        if part == closing[-1] != "":
            closing.pop()
            parts += [_DOTS, part] if len(closing) == 1 else []
        elif part in _PAIRS:
            closing.append(_PAIRS[part])
            parts += [part] if is_outside else []
        elif is_outside:
            parts.append(part)
    return "".join(parts) if len(closing) == 1 else None


def short_label(name: str) -> str:
    """Return the name of an annotation without its number: "ProfilerStep#12" is "...#N"."""
    return _NUMBERED.sub("N", name)


@lru_cache(maxsize=4)  # the ranks of a run share names
def kernel_categories(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the one of `CATEGORIES` of kernels that are no communication, by their names."""
    # The arguments of a template tell what a wrapper computes.
    texts = [name[:_LONGEST] if _CUTLASS.match(name) else short_name(name) for name in names]
    labels = np.full(len(names), OTHER, object)
    rows, open_texts = np.arange(len(names)), pa.array(texts, pa.string())
    for label, pattern in _PATTERNS.items():
        is_own = _matches(open_texts, pattern)
        if label in _EXCEPTIONS:
            is_own &= ~_matches(open_texts, _EXCEPTIONS[label])
        labels[rows[is_own]] = label
        rows, open_texts = rows[~is_own], open_texts.filter(pa.array(~is_own))
    labels[[name == WHOLE_GRAPH for name in names]] = GRAPH
    return tuple(labels.tolist())


def _matches(texts: pa.Array, pattern: str) -> NDArray[np.bool_]:
    """Return which texts have a match, in any case; RE2 takes linear time."""
    flags = pc.match_substring_regex(texts, pattern, ignore_case=True)
    return cast("NDArray[np.bool_]", flags.to_numpy(zero_copy_only=False))


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
    by_name[used] = [
        number[label]
        for label in kernel_categories(tuple(names.take(pa.array(used)).to_pylist()))
    ]
    result = by_name[code]
    result[(kind == KIND["memcpy"]) | (kind == KIND["memset"])] = number[COPY]
    result[kind == KIND["host_work"]] = number[_HOST]
    result[is_comm] = number[COMMUNICATION]
    return result, labels
