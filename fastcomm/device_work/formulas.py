"""FLOPs and bytes of operators, by the shapes of their inputs: formulas, and which applies.

The texts of inputs are JSON lists from strangers: they are parsed within limits, and what does
not fit is an `UnknownCostError` with the reason.

A multiplication and an addition are two FLOPs. Bytes are those that an operator has to read
and write at least: every input and every output once. `RULES` says which operator is counted by
which formula.

The places of arguments are those of the schemas of PyTorch (`native_functions.yaml`), of
FlashAttention and of AITER.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

Shape = tuple[int, ...]
_LONGEST = 1 << 16  # letters of a list
_MOST_INPUTS = 256
_MOST_TENSORS = 4096  # in one list of tensors
_MOST_DIMENSIONS = 16
_LARGEST = 1 << 40  # of one dimension
# More FLOPs or bytes than this, of one operator, are damage.
MOST = 1 << 62
# Precision and bytes of an element by the name of the type, as PyTorch records it.
_TYPES = {
    "double": ("fp64", 8),
    "float": ("fp32", 4),
    "c10::Half": ("fp16", 2),
    "c10::BFloat16": ("bf16", 2),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "int": ("int32", 4),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    **dict.fromkeys(
        [f"c10::Float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")],
        ("fp8", 1),
    ),
}
NO_VALUES = (
    "values of arguments, such as strides and whether attention is causal, are not recorded "
    "(PyTorch records them from 2.1 on)"
)
CostKind = Literal["GEMM", "attention", "convolution", "memory"]
KINDS: tuple[CostKind, ...] = ("GEMM", "attention", "convolution", "memory")
MATRIX = KINDS[:3]  # whose FLOPs are those of a step
_NO_SHAPE = "the shape of an input is not recorded"
_NO_FIT = "the shapes do not fit each other"
# Places of batch, heads, tokens and width.
HEADS_FIRST, TOKENS_FIRST = (0, 1, 2, 3), (0, 2, 1, 3)
_PACKED = 3  # dimensions of tensors whose sequences follow each other
_ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "div", "pow", "neg", "abs", "exp", "log", "sqrt", "rsqrt"),
    *("reciprocal", "sigmoid", "tanh", "relu", "gelu", "silu", "leaky_relu", "hardtanh", "cos"),
    *("sin", "erf", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "lerp"),
    *("addcmul", "addcdiv", "masked_fill", "floor", "round", "sign", "square", "bitwise_not"),
    *("bitwise_and", "bitwise_or", "logical_and", "logical_or", "logical_not"),
)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite")
_BACKWARD = (
    *("threshold_backward", "sigmoid_backward", "tanh_backward", "gelu_backward"),
    *("silu_backward", "leaky_relu_backward", "hardtanh_backward", "native_dropout_backward"),
)
_REDUCTIONS = ("sum", "mean", "max", "min", "amax", "amin", "norm", "linalg_vector_norm", "var")
_NORMALIZATIONS = (
    *("native_layer_norm", "native_batch_norm", "native_group_norm", "cudnn_batch_norm"),
    *("miopen_batch_norm", "_fused_rms_norm"),
)
# FLOPs per element, forward and backward: sums, differences, squares, scales. Approximate.
_NORMALIZED = 5, 9


class UnknownCostError(Exception):
    """The FLOPs of an operator do not follow from what was recorded; the text says why."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and type of a tensor."""

    shape: Shape
    precision: str
    element_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of all elements."""
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one operator: shapes, types, and values of those that are no tensors."""

    shapes: tuple[Any, ...]  # of a tensor: lengths; of a list of tensors: their shapes
    types: tuple[str, ...]
    values: tuple[str, ...] | None  # None: not recorded

    @classmethod
    def of(cls, shapes: str, types: str | None, values: str | None) -> Self:
        """Parse the recorded lists. Raises `UnknownCostError` if they are damaged."""
        dims, names = _list(shapes), _list(types or "")
        if dims is None or names is None or len(dims) != len(names):
            raise UnknownCostError("the recorded shapes are damaged")
        texts = None if values is None else _list(values)
        return cls(
            shapes=tuple(map(_shape, dims)),
            types=tuple(map(str, names)),
            values=None if texts is None else tuple(map(str, texts)),
        )

    def has_tensor(self, place: int) -> bool:
        """Return whether an input is a tensor of known type."""
        return place < len(self.types) and self.types[place] in _TYPES

    def tensor(self, place: int) -> Tensor:
        """Return an input that is a tensor; UnknownCostError if it is none."""
        shape = self.shapes[place] if place < len(self.shapes) else None
        if shape is None or not self.has_tensor(place) or not _is_flat(shape):
            raise UnknownCostError("an input is no tensor of known shape and type")
        return Tensor(shape, *_TYPES[self.types[place]])

    def optional(self, place: int | None) -> Tensor | None:
        """Return an input that may be a tensor; None if it is none."""
        return None if place is None or not self.has_tensor(place) else self.tensor(place)

    def tensors(self) -> list[Tensor]:
        """Return all inputs that are tensors; UnknownCostError without any."""
        tensors = [
            self.tensor(place) for place in range(len(self.types)) if self.has_tensor(place)
        ]
        if not tensors:
            raise UnknownCostError("no input is a tensor of known type")
        return tensors

    def value(self, place: int) -> str:
        """Return the text of a value; UnknownCostError if values were not recorded."""
        if self.values is None:
            raise UnknownCostError(NO_VALUES)
        if place >= len(self.values):
            raise UnknownCostError("fewer values are recorded than the operator has")
        return self.values[place]

    def flag(self, place: int) -> bool:
        """Return a value that is true or false."""
        text = self.value(place).lower()
        if text not in ("true", "false", "0", "1", ""):
            raise UnknownCostError("a value is neither true nor false")
        return text in ("true", "1")

    def numbers(self, place: int | None, count: int, default: int) -> Shape:
        """Return `count` whole numbers; a single one stands for all, none for `default`."""
        text = "" if place is None else self.value(place)
        if text in ("", "[]"):
            return (default,) * count
        numbers = _shape(_parsed(text if text.startswith("[") else f"[{text}]"))
        if numbers is None or not _is_flat(numbers) or len(numbers) not in (1, count):
            raise UnknownCostError("a value is no list of whole numbers")
        return tuple(numbers) * count if len(numbers) == 1 else tuple(numbers)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an element-wise result; UnknownCostError if the shapes do not fit."""
    size = max(map(len, shapes), default=0)
    columns = zip(*((1,) * (size - len(shape)) + shape for shape in shapes), strict=True)
    result = []
    for lengths in columns:
        others = {length for length in lengths if length != 1}
        if len(others) > 1:
            raise UnknownCostError("the shapes do not fit each other")
        result.append(others.pop() if others else 1)
    return tuple(result)


def _is_flat(shape: Sequence[Any]) -> bool:
    return all(isinstance(length, int) for length in shape)


def _shape(value: object) -> Any:
    """Return a shape, or the shapes of a list of tensors; None if it is damaged."""
    if not isinstance(value, list):
        return None
    if all(type(length) is int and 0 <= length <= _LARGEST for length in value):
        return tuple(value) if len(value) <= _MOST_DIMENSIONS else None
    if len(value) > _MOST_TENSORS or not all(isinstance(entry, list) for entry in value):
        return None
    shapes = tuple(map(_shape, value))
    is_valid = all(shape is not None and _is_flat(shape) for shape in shapes)
    return shapes if is_valid else None


def _list(text: str) -> list[Any] | None:
    """Parse a JSON list of at most `_MOST_INPUTS` entries; None if it is none."""
    value = _parsed(text)
    return value if isinstance(value, list) and len(value) <= _MOST_INPUTS else None


def _parsed(text: str) -> Any:
    """Parse a JSON text; None if it is none, or too long."""
    if len(text) > _LONGEST:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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


Formula = Callable[[Inputs], OperatorCost]


def cost(name: str, inputs: Inputs) -> OperatorCost:
    """Return the cost of an operator.

    Raises
    ------
    UnknownCostError
        If the operator has no rule, or its inputs do not tell its cost.

    """
    if name not in RULES:
        raise UnknownCostError("no formula for this operator")
    result = RULES[name](inputs)
    if max(result.flops, result.bytes) > MOST:
        raise UnknownCostError("more FLOPs or bytes than one operator can have")
    return result


_forward = partial(AttentionFormula, order=HEADS_FIRST)  # of scaled_dot_product_attention
_backward = partial(AttentionFormula, q=1, is_backward=True)
_backward_heads_first = partial(_backward, order=HEADS_FIRST)
_normalize = partial(normalization, per_element=_NORMALIZED[0])
_denormalize = partial(normalization, per_element=_NORMALIZED[1], passes=3)


def _aten(names: Iterable[str], formula: Formula) -> dict[str, Formula]:
    """Return a formula by the names of operators of PyTorch."""
    return {f"aten::{name}": formula for name in names}


RULES: Mapping[str, Formula] = {
    **_aten(("mm", "bmm", "matmul", "mv", "dot", "_int_mm", "_scaled_mm"), matmul),
    "trtllm::cublas_scaled_mm": matmul,
    "aten::linear": partial(matmul, bias=2, is_linear=True),
    **_aten(
        ("addmm", "baddbmm", "addmv", "_addmm_activation"), partial(matmul, a=1, b=2, bias=0)
    ),
    "_C::cutlass_scaled_mm": partial(matmul, a=1, b=2),
    "fbgemm::f8f8bf16_rowwise": partial(matmul, is_linear=True),
    "vllm::gemm_with_dynamic_quant": partial(matmul, is_linear=True),
    "tex_ts::te_gemm_ts": transposable,
    "aten::_grouped_mm": grouped,
    "aten::_scaled_grouped_mm": partial(grouped, groups=4),
    "fbgemm::bf16bf16bf16_grouped_stacked": grouped,
    "primus_turbo::grouped_gemm": grouped,
    "primus_turbo::grouped_gemm_impl": grouped,
    "primus_turbo_cpp_extension::grouped_gemm": grouped,
    "primus_turbo_cpp_extension::ck_grouped_gemm": grouped,
    # Attention: scaled_dot_product_attention calls one of these.
    "aten::_scaled_dot_product_flash_attention": _forward(causal=4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _forward(causal=4),
    "aten::_scaled_dot_product_efficient_attention": _forward(causal=6),
    "aten::_scaled_dot_product_cudnn_attention": _forward(causal=6),
    "aten::_scaled_dot_product_fused_attention_overrideable": _forward(causal=5),
    "aten::_flash_attention_forward": AttentionFormula(causal=8, starts=3),
    "aten::_efficient_attention_forward": AttentionFormula(causal=9, starts=4, top_left=True),
    "aten::_cudnn_attention_forward": _forward(causal=10, starts=4),
    "aten::_scaled_dot_product_flash_attention_backward": _backward_heads_first(causal=11),
    "aten::_flash_attention_backward": _backward(causal=11, starts=6),
    "aten::_scaled_dot_product_efficient_attention_backward": _backward_heads_first(causal=11),
    "aten::_efficient_attention_backward": _backward(causal=14, starts=6, top_left=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _backward_heads_first(causal=14),
    "aten::_cudnn_attention_backward": _backward_heads_first(causal=14),
    "FlashAttnFunc": AttentionFormula(causal=5),
    "flash_attn::_flash_attn_forward": AttentionFormula(causal=5),
    "flash_attn::_flash_attn_backward": _backward(causal=11),
    "flash_attn::_flash_attn_varlen_forward": AttentionFormula(causal=9, starts=3),
    "flash_attn::_flash_attn_varlen_backward": _backward(causal=15, starts=9),
    "flash_attn_3::fwd": AttentionFormula(causal=24),
    "flash_attn_3::bwd": _backward(causal=16),
    "aiter::_flash_attn_forward": AttentionFormula(causal=5),
    "aiter::_flash_attn_backward": _backward(causal=12),
    "aiter::wrapper_fmha_v3_fwd": AttentionFormula(q=1, causal=6),
    "aiter::wrapper_fmha_v3_bwd": _backward(causal=9),
    "aiter::mha_fwd": AttentionFormula(causal=5),
    "aiter::fmha_v3_fwd": AttentionFormula(causal=5),
    "aiter::mha_bwd": _backward(causal=8),
    **_aten(
        ("convolution", "_convolution"),
        ConvolutionFormula(
            bias=2, stride=3, padding=4, dilation=5, transposed=6, output_padding=7
        ),
    ),
    "aten::cudnn_convolution": ConvolutionFormula(padding=2, stride=3, dilation=4),
    **_aten(
        ("miopen_convolution", "miopen_depthwise_convolution", "mkldnn_convolution"),
        ConvolutionFormula(bias=2, padding=3, stride=4, dilation=5),
    ),
    "aten::cudnn_convolution_relu": ConvolutionFormula(bias=2, stride=3, padding=4, dilation=5),
    "aten::cudnn_convolution_add_relu": ConvolutionFormula(
        bias=4, stride=5, padding=6, dilation=7
    ),
    "aten::cudnn_convolution_transpose": ConvolutionFormula(
        padding=2, output_padding=3, stride=4, dilation=5, is_transposed=True
    ),
    "aten::miopen_convolution_transpose": ConvolutionFormula(
        bias=2, padding=3, output_padding=4, stride=5, dilation=6, is_transposed=True
    ),
    **_aten(
        ("_conv_depthwise2d", "conv_depthwise3d"),
        ConvolutionFormula(bias=3, stride=4, padding=5, dilation=6),
    ),
    **_aten(
        ("_slow_conv2d_forward", "slow_conv3d_forward"),
        ConvolutionFormula(bias=3, stride=4, padding=5),
    ),
    "aten::convolution_backward": convolution_backward,
    # Operators that memory bounds.
    **_aten((*_ELEMENTWISE, *_BACKWARD, "native_dropout"), elementwise),
    **_aten((f"{name}_" for name in _ELEMENTWISE), in_place),
    **_aten(_COMPARISONS, partial(elementwise, result=1)),
    **_aten(_REDUCTIONS, reduction),
    **_aten(("copy_", "fill_", "zero_"), partial(in_place, per_element=0, reads=False)),
    "aten::embedding": embedding,
    **_aten(("_softmax", "_log_softmax", *_NORMALIZATIONS), _normalize),
    **_aten(
        ("_softmax_backward_data", "_log_softmax_backward_data"),
        partial(normalization, per_element=4, passes=3),
    ),
    **_aten(
        ("cudnn_batch_norm_backward", "miopen_batch_norm_backward"),
        _denormalize,
    ),
    **_aten(
        (
            *("native_layer_norm_backward", "native_batch_norm_backward"),
            *("native_group_norm_backward", "_fused_rms_norm_backward"),
        ),
        partial(_denormalize, x=1),
    ),
}
