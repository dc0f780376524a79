"""Inputs of the operators of a synthetic job: shapes that fit the times of their kernels."""

import json

from fastcomm.synthetic.catalog import Kernel
from fastcomm.synthetic.job import Job

# Widths of a rank's layers, in heads of 128, with which the GEMMs of a default job reach 50 to
# 75 % of the peak.
_HEAD = 128
_WIDTHS = {
    "heads": 32,
    "key_heads": 4,
    "fc": 88,
    "shared": 48,
    "experts": 60,
    "vocabulary": 36,
}
_DEFAULT_NS, _DEFAULT_ROWS = 900_000, 2048
_EXPERTS = 2  # of a rank
_HALF, _LONG = "c10::BFloat16", "long int"


def widths(job: Job) -> dict[str, int]:
    """Return the widths of a rank's layers in heads; they grow with the time of a layer."""
    usual = _DEFAULT_NS * job.tokens * job.hidden / _DEFAULT_ROWS**2
    return {name: max(1, round(size * job.layer_ns / usual)) for name, size in _WIDTHS.items()}


def weights(job: Job) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the weights of a rank's layers, by their names.

    "attention", "fc" and "experts" are all weights of such a layer, whose gradients one kernel
    computes.
    """
    heads, keys, fc, shared, experts, vocabulary = (
        size * _HEAD for size in widths(job).values()
    )
    return {
        "qkv": (job.hidden, heads + 2 * keys),
        "proj": (heads, job.hidden),
        "attention": (job.hidden, 2 * (heads + keys)),
        "fc1": (job.hidden, 2 * fc),
        "fc2": (fc, job.hidden),
        "fc": (job.hidden, 3 * fc),
        "shared": (job.hidden, shared),
        "experts1": (job.hidden, 2 * experts),
        "experts2": (experts, job.hidden),
        "experts": (job.hidden, 3 * experts),
        "router": (job.hidden, _EXPERTS * job.ep),
        "vocabulary": (job.hidden, vocabulary),
    }


def host_args(job: Job, kernel: Kernel, rank: int = 0) -> str:
    """Return the inputs of a kernel's operator on a rank, as the inside of a JSON object."""
    dims, types, values = _inputs(job, kernel, rank)
    strides = [[*size[1:], 1] for size in dims]
    args = {
        "Concrete Inputs": values or [""] * len(dims),
        "Input type": types,
        "Input Strides": strides,
        "Input Dims": dims,
    }
    return json.dumps(args)[1:-1]


_Inputs = tuple[list[list[int]], list[str], list[str]]  # shapes, types; values, or empty


def _inputs(job: Job, kernel: Kernel, rank: int) -> _Inputs:
    """Return the inputs of a kernel's operator on a rank."""
    rows, width, bucket = job.tokens, job.hidden, job.bucket
    direction, _, weight = kernel.inputs.partition(" ")
    if weight:
        is_grouped = kernel.host == "aten::_grouped_mm"
        if is_grouped and job.fault == "hot_expert" and job.straggler == rank:
            rows += rows * job.slowdown // 100
        return _product(rows, weights(job)[weight], direction, _EXPERTS if is_grouped else 0)
    if direction.startswith("attention"):
        return _attention(job, is_backward=direction.endswith("back"))
    dims, types = {
        "rows": ([[rows, width]], [_HALF]),
        "tokens": ([[rows, width], [rows]], [_HALF, _LONG]),
        "bucket": ([[bucket], [bucket], [bucket], []], ["float"] * 3 + ["Scalar"]),
    }[direction]
    return dims, types, []


def _product(rows: int, weight: tuple[int, int], direction: str, groups: int) -> _Inputs:
    """Return the inputs of a GEMM: a pass, or the gradient of its input or its weight."""
    k, n = weight
    of_weight = [groups] if groups else []
    dims = {
        "forward": [[rows, k], [*of_weight, k, n]],
        "dgrad": [[rows, n], [*of_weight, n, k]],
        "wgrad": [[k, rows], [rows, n]],
        "linear": [[rows, k], [n, k], []],
    }[direction]
    types = [_HALF, _HALF, *([""] if direction == "linear" else [])]
    return ([*dims, [groups]], [*types, "int"], []) if groups else (dims, types, [])


_LONGEST_SEQUENCE = 2048


def _attention(job: Job, *, is_backward: bool) -> _Inputs:
    """Return the inputs of causal attention, with fewer heads of keys than of queries."""
    sequences = -(-job.tokens // _LONGEST_SEQUENCE)
    length, size = job.tokens // sequences, widths(job)
    q = [sequences, length, size["heads"], _HEAD]
    k = [sequences, length, size["key_heads"], _HEAD]
    sums = [sequences, size["heads"], length]
    tensors = [q, q, k, k, q, sums, q, k, k] if is_backward else [q, k, k]
    types = ["float" if shape is sums else _HALF for shape in tensors]
    scalars = ["0.", f"{_HEAD**-0.5:.6f}", "True"]
    return (
        [*tensors, [], [], []],
        [*types, *["Scalar"] * 3],
        [*[""] * len(tensors), *scalars],
    )
