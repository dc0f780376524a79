"""FLOPs and bytes of classes of operators, by the shapes of their inputs.

A multiplication and an addition are two FLOPs. Bytes are those that an operator has to read
and write at least: every input and every output once. `rules.py` says which operator is counted
by which formula.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from fastcomm.kernels.operands import Inputs, Shape, Tensor, UnknownCostError, broadcast

CostKind = Literal["GEMM", "attention", "convolution", "memory"]
KINDS: tuple[CostKind, ...] = ("GEMM", "attention", "convolution", "memory")
MATRIX = KINDS[:3]  # whose FLOPs are those of a step
_NO_SHAPE = "the shape of an input is not recorded"
_NO_FIT = "the shapes do not fit each other"


def _check_fit(fits: bool) -> None:
    """Raise UnknownCostError if shapes do not fit each other."""
    if not fits:
        raise UnknownCostError(_NO_FIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """What an operator computes and moves."""

    flops: int
    bytes: int
    precision: str  # of its first tensor: bf16, fp32, ...
    kind: CostKind = "memory"
    model_flops: int = 0  # those that the model needs: a backward pass may recompute scores
    problem: str = ""  # size of a matrix product: "4096x1024x512"


def _product(
    factor: Tensor, other: Tensor, sizes: tuple[int, int, int, int], bias: Tensor | None
) -> OperatorCost:
    """Return the cost of matrix products; `sizes` are their number, m, n and k."""
    count, m, n, k = sizes
    elements = count * m * n
    flops = 2 * elements * k + (elements if bias else 0)
    # Products of one-byte numbers are written in two bytes, those of integers in four.
    wide = {"fp8": 2, "int8": 4}.get(factor.precision, factor.element_bytes)
    return OperatorCost(
        flops=flops,
        model_flops=flops,
        bytes=factor.bytes + other.bytes + elements * wide + (bias.bytes if bias else 0),
        precision=factor.precision,
        kind="GEMM",
        problem=f"{f'{count}x' if count > 1 else ''}{m}x{n}x{k}",
    )


def matmul(
    inputs: Inputs, a: int = 0, b: int = 1, *, bias: int | None = None, is_linear: bool = False
) -> OperatorCost:
    """Count a product of tensors; a linear layer's weight has the outputs first."""
    factor, other = inputs.tensor(a), inputs.tensor(b)
    if not factor.shape or not other.shape:
        raise UnknownCostError(_NO_SHAPE)
    first = factor.shape if len(factor.shape) > 1 else (1, *factor.shape)
    second = other.shape if len(other.shape) > 1 else (*other.shape, 1)
    if is_linear:
        first, second = (math.prod(first[:-1]), first[-1]), second[::-1]
    _check_fit(first[-1] == second[-2])
    count = math.prod(broadcast([first[:-2], second[:-2]]))
    added = inputs.optional(bias)
    return _product(factor, other, (count, first[-2], second[-1], first[-1]), added)


def grouped(inputs: Inputs, a: int = 0, b: int = 1, groups: int = 2) -> OperatorCost:
    """Count products of groups of rows, such as those of experts; all rows are in a group."""
    factor, other = inputs.tensor(a), inputs.tensor(b)
    dimensions = len(factor.shape), len(other.shape)
    if dimensions == (3, 3):
        return matmul(inputs, a, b)
    if dimensions == (2, 3):
        m, k = factor.shape
        count, *matrix = other.shape
    elif dimensions == (3, 2):
        m, k = other.shape[1], other.shape[0]
        count, *matrix = factor.shape
    elif dimensions == (2, 2):
        (m, k), n = factor.shape, other.shape[1]
        count = inputs.tensor(groups).elements if inputs.has_tensor(groups) else 1
        whole = _product(factor, other, (1, m, n, k), None)
        written = (count - 1) * m * n * factor.element_bytes
        return replace(whole, bytes=whole.bytes + written, problem=f"{m}x{n}x{k}/{count}")
    else:
        raise UnknownCostError(_NO_FIT)
    _check_fit(k in matrix and k > 0)
    n = matrix[0] * matrix[1] // k
    return replace(
        _product(factor, other, (1, m, n, k), None), problem=f"{m}x{n}x{k} in {count} groups"
    )


def transposable(inputs: Inputs) -> OperatorCost:
    """Count `te_gemm_ts` of Transformer Engine, whose operands have flags."""
    factor, other = inputs.tensor(0), inputs.tensor(5)
    _check_fit(len(factor.shape) == len(other.shape) == 2)  # noqa: PLR2004 - matrices
    m, k = factor.shape if inputs.flag(4) else factor.shape[::-1]
    n = other.shape[1] if inputs.flag(9) else other.shape[0]
    return _product(factor, other, (1, m, n, k), None)


# Places of batch, heads, tokens and width.
HEADS_FIRST, TOKENS_FIRST = (0, 1, 2, 3), (0, 2, 1, 3)
_PACKED = 3  # dimensions of tensors whose sequences follow each other


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFormula:
    """Where an attention operator has its arguments."""

    q: int = 0  # then k and v
    causal: int
    order: tuple[int, int, int, int] = TOKENS_FIRST
    starts: int | None = None  # of sequences of queries, then keys; then their longest lengths
    is_backward: bool = False
    top_left: bool = False  # the mask is 1: aligned at the first key, 2: at the last

    def __call__(self, inputs: Inputs) -> OperatorCost:
        """Count QK and PV; causal masks leave half. Backward, QK is computed again."""
        q, k, v = (inputs.tensor(self.q + place) for place in range(3))
        _check_fit(len(q.shape) == len(k.shape) == len(v.shape))
        is_packed = self.starts is not None and inputs.has_tensor(self.starts)
        if is_packed:
            count, pairs = 1, self._packed_pairs(inputs, q, k)
            heads, width, value_width = _packed_heads(q, k, v)
        else:
            count, heads, queries, width = _ordered(q.shape, self.order)
            keys_count, _, keys, key_width = _ordered(k.shape, self.order)
            value_width = _ordered(v.shape, self.order)[3]
            _check_fit((keys_count, key_width) == (count, width))
            pairs = self._pairs(inputs, queries, keys)
        forward = count * heads * pairs * (width + value_width)
        again = count * heads * pairs * width
        output = q.elements // max(width, 1) * value_width * q.element_bytes
        moved = q.bytes + k.bytes + v.bytes
        return OperatorCost(
            flops=2 * forward + again if self.is_backward else forward,
            model_flops=2 * forward if self.is_backward else forward,
            # Backward: also the output and its gradient, and a gradient for each input.
            bytes=2 * (moved + output) if self.is_backward else moved + output,
            precision=q.precision,
            kind="attention",
        )

    def _pairs(self, inputs: Inputs, queries: int, keys: int) -> int:
        """Return twice the number of pairs of a query and a key that count."""
        if self.top_left:
            mask = inputs.numbers(self.causal, 1, 0)[0]
            if mask == 1 and queries != keys:
                return queries**2 if queries < keys else 2 * queries * keys - keys**2
            is_causal = mask > 0
        else:
            is_causal = inputs.flag(self.causal)
        if not is_causal:
            return 2 * queries * keys
        return 2 * queries * keys - queries**2 if queries <= keys else keys**2

    def _packed_pairs(self, inputs: Inputs, q: Tensor, k: Tensor) -> int:
        """Return twice the pairs of packed sequences: the longest, and others of equal length.

        Their lengths are not recorded, but their number, their sum and the longest are.
        """
        assert self.starts is not None
        count = inputs.tensor(self.starts).elements - 1
        longest = [inputs.numbers(self.starts + 2 + place, 1, 0)[0] for place in range(2)]
        tokens = [max(tensor.shape[:-2], default=0) for tensor in (q, k)]
        rest = [total - longest_ for total, longest_ in zip(tokens, longest, strict=True)]
        if count < 1 or min(longest) < 1 or min(rest) < 0:
            raise UnknownCostError("the lengths of packed sequences do not fit the shapes")
        pairs, others = self._pairs(inputs, *longest), count - 1
        if others:
            pairs += others * self._pairs(inputs, *(total // others for total in rest))
        return pairs


def _packed_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return heads, width of a head, and that of a value."""
    _check_fit(len(q.shape) >= _PACKED and k.shape[-1] == q.shape[-1])
    return q.shape[-2], q.shape[-1], v.shape[-1]


def _ordered(shape: Shape, order: tuple[int, int, int, int]) -> Shape:
    if not shape:
        raise UnknownCostError(_NO_SHAPE)
    _check_fit(len(shape) == len(order))
    return tuple(shape[place] for place in order)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionFormula:
    """Where a convolution has its arguments, after input and weight; None: it has none."""

    bias: int | None = None
    stride: int
    padding: int
    dilation: int | None = None
    transposed: int | None = None
    output_padding: int | None = None
    is_transposed: bool = False

    def __call__(self, inputs: Inputs) -> OperatorCost:
        """Count the forward pass; its output follows from stride, padding and dilation."""
        x, weight = inputs.tensor(0), inputs.tensor(1)
        spatial = len(x.shape) - 2
        _check_fit(spatial >= 1 and len(weight.shape) == len(x.shape))
        stride, dilation = (
            inputs.numbers(place, spatial, 1) for place in (self.stride, self.dilation)
        )
        padding, extra = (
            inputs.numbers(place, spatial, 0) for place in (self.padding, self.output_padding)
        )
        if min(stride) < 1:
            raise UnknownCostError("a stride is 0")
        is_transposed = self.is_transposed or (
            self.transposed is not None and inputs.flag(self.transposed)
        )
        lengths = []
        for place, (length, kernel) in enumerate(
            zip(x.shape[2:], weight.shape[2:], strict=True)
        ):
            reach = dilation[place] * (kernel - 1)
            if is_transposed:
                steps = (length - 1) * stride[place] + reach + extra[place] + 1
                lengths.append(steps - 2 * padding[place])
            else:
                steps = length + 2 * padding[place] - reach - 1
                lengths.append(steps // stride[place] + 1)
        _check_fit(min(lengths) >= 0)
        # A transposed convolution with groups has the outputs of one group in its weight.
        channels = weight.shape[1] if is_transposed else weight.shape[0]
        output = x.shape[0] * channels * math.prod(lengths)
        added = inputs.optional(self.bias)
        flops = _convolved(x.elements if is_transposed else output, weight)
        flops += output if added else 0
        return OperatorCost(
            flops=flops,
            model_flops=flops,
            bytes=x.bytes
            + weight.bytes
            + output * x.element_bytes
            + (added.bytes if added else 0),
            precision=x.precision,
            kind="convolution",
        )


def _convolved(positions: int, weight: Tensor) -> int:
    """Return the FLOPs at a number of outputs (or inputs, transposed) of all channels."""
    return 2 * positions * math.prod(weight.shape[1:])


def convolution_backward(inputs: Inputs) -> OperatorCost:
    """Count the gradients that the mask requests: of the input, the weight and the bias."""
    gradient, x, weight = (inputs.tensor(place) for place in range(3))
    mask = [flag.strip() == "True" for flag in inputs.value(10).strip("[]").split(",")]
    positions = x.elements if inputs.flag(7) else gradient.elements
    if len(mask) != 3 or len(weight.shape) < 2:  # noqa: PLR2004 - input, weight, bias
        raise UnknownCostError("the gradients of a convolution are not recorded")
    parts = sum(mask[:2])
    flops = parts * _convolved(positions, weight) + (gradient.elements if mask[2] else 0)
    moved = parts * (gradient.bytes + x.bytes + weight.bytes)
    return OperatorCost(
        flops=flops,
        model_flops=flops,
        bytes=moved + (gradient.bytes if mask[2] and not parts else 0),
        precision=gradient.precision,
        kind="convolution",
    )


def elementwise(
    inputs: Inputs, *, per_element: int = 1, result: int | None = None
) -> OperatorCost:
    """Count an operator that reads all tensors and writes one of their common shape.

    `result` are the bytes of an element of the output, by default those of the widest input.
    """
    tensors = inputs.tensors()
    elements = math.prod(broadcast([tensor.shape for tensor in tensors]))
    own = [tensor for tensor in tensors if tensor.shape] or tensors
    width = result or max(tensor.element_bytes for tensor in own)
    return OperatorCost(
        flops=per_element * elements,
        bytes=sum(tensor.bytes for tensor in tensors) + elements * width,
        precision=own[0].precision,
    )


def in_place(inputs: Inputs, *, per_element: int = 1, reads: bool = True) -> OperatorCost:
    """Count an operator that overwrites its first tensor, which it may read before."""
    first, *others = inputs.tensors()
    return OperatorCost(
        flops=per_element * first.elements,
        bytes=first.bytes * (2 if reads else 1) + sum(tensor.bytes for tensor in others),
        precision=first.precision,
    )


def normalization(
    inputs: Inputs, *, per_element: int, x: int = 0, passes: int = 2
) -> OperatorCost:
    """Count a normalization: `passes` tensors like its input `x`, and its small parameters."""
    tensor = inputs.tensor(x)
    small = [other.bytes for other in inputs.tensors() if other.elements < tensor.elements]
    return OperatorCost(
        flops=per_element * tensor.elements,
        bytes=passes * tensor.bytes + sum(small),
        precision=tensor.precision,
    )


def reduction(inputs: Inputs) -> OperatorCost:
    """Count one FLOP for each element of the first tensor; the output is small."""
    tensor = inputs.tensor(0)
    return OperatorCost(flops=tensor.elements, bytes=tensor.bytes, precision=tensor.precision)


def embedding(inputs: Inputs) -> OperatorCost:
    """Count rows of a table that are read and written, and their indices."""
    table, indices = inputs.tensor(0), inputs.tensor(1)
    moved = 2 * indices.elements * math.prod(table.shape[1:]) * table.element_bytes
    return OperatorCost(flops=0, bytes=moved + indices.bytes, precision=table.precision)
