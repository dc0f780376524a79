"""Which operator is counted by which formula, as data: `RULES`, and `cost`.

The places of arguments are those of the schemas of PyTorch (`native_functions.yaml`), of
FlashAttention and of AITER.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from fastcomm.kernels.formulas import (
    HEADS_FIRST,
    AttentionFormula,
    ConvolutionFormula,
    OperatorCost,
    convolution_backward,
    elementwise,
    embedding,
    grouped,
    in_place,
    matmul,
    normalization,
    reduction,
    transposable,
)
from fastcomm.kernels.operands import MOST, Inputs, UnknownCostError

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
