"""The kernels of the made-up job, as a trace calls them, and the operators that launch them."""

import json
from dataclasses import dataclass

from fastcomm.synthetic.job import Job


@dataclass(frozen=True, slots=True)
class Kernel:
    """What runs on the device, and the operator that asked for it."""

    name: str
    host: str
    inputs: str  # key of `_dims`
    grid: tuple[int, int, int] = (132, 1, 1)
    registers: int = 168


def _gemm(tile: str, host: str = "aten::mm") -> Kernel:
    return Kernel(f"nvjet_hsh_{tile}_v_bz_coopA_NTT", host, "gemm")


def _elementwise(functor: str, host: str) -> Kernel:
    name = (
        f"void at::native::vectorized_elementwise_kernel<4, at::native::{functor}, "
        "std::array<char*, 3ul> >(int, at::native::"
        f"{functor}, std::array<char*, 3ul>)"
    )
    return Kernel(name, host, "rows", (4096, 1, 1), 32)


def _triton(name: str, host: str) -> Kernel:
    return Kernel(name, host, "rows", (2048, 1, 1), 40)


_BACK = "autograd::engine::evaluate_function: "
_NORM = "void transformer_engine::normalization::rmsnorm_{}_tuned_kernel<Kernel_traits>(Params)"
_FLASH = (
    "void cutlass::device_kernel<flash::FlashAttn{}Sm90<flash::CollectiveMainloop> >(Params)"
)
_GROUPED = "void cutlass::device_kernel<cutlass::gemm::GemmGroupedUniversal<{}> >(Params)"

KERNELS = {
    "norm": Kernel(_NORM.format("fwd"), "_RMSNorm", "rows"),
    "norm_back": Kernel(_NORM.format("bwd"), _BACK + "_RMSNormBackward", "rows"),
    "qkv": _gemm("128x256_64x4_1x2_h"),
    "rope": _triton("triton_poi_fused_rotary_embedding_0", "_RotaryEmbedding"),
    "flash": Kernel(_FLASH.format("Fwd"), "flash_attn::_flash_attn_forward", "heads"),
    "proj": _gemm("192x192_64x4_2x1_h"),
    "fc1": _gemm("256x128_64x4_2x1_h"),
    "fc2": _gemm("128x192_64x5_1x2_h"),
    "swiglu": _triton("triton_poi_fused_mul_silu_1", "_SwiGLU"),
    "proj_dgrad": _gemm("192x192_64x4_2x1_v"),
    "flash_back": Kernel(_FLASH.format("Bwd"), "flash_attn::_flash_attn_backward", "heads"),
    "rope_back": _triton("triton_poi_fused_rotary_embedding_2", _BACK + "_RotaryEmbedding"),
    "qkv_dgrad": _gemm("128x256_64x4_1x2_v"),
    "qkv_wgrad": _gemm("256x128_64x4_2x1_t"),
    "fc2_dgrad": _gemm("128x192_64x5_1x2_v"),
    "fc1_dgrad": _gemm("256x128_64x4_2x1_v"),
    "fc_wgrad": _gemm("256x192_64x4_2x1_t"),
    "router": _gemm("64x64_64x8_1x1_h", "aten::linear"),
    "router_back": _gemm("64x64_64x8_1x1_v", _BACK + "AddmmBackward0"),
    "topk": Kernel("fused_topk_with_score_function_forward_kernel", "FusedTopk", "rows"),
    "permute": _triton("_permute_kernel", "moe::permute"),
    "unpermute": _triton("_unpermute_kernel", "moe::unpermute"),
    "shared": _gemm("128x128_64x6_1x1_h"),
    "shared_dgrad": _gemm("128x128_64x6_1x1_v"),
    "shared_wgrad": _gemm("128x128_64x6_1x1_t"),
    "experts1": Kernel(_GROUPED.format("fc1"), "GroupedLinear", "experts"),
    "experts2": Kernel(_GROUPED.format("fc2"), "GroupedLinear", "experts"),
    "experts_dgrad": Kernel(
        _GROUPED.format("dgrad"), _BACK + "GroupedLinearBackward", "experts"
    ),
    "experts_wgrad": Kernel(
        _GROUPED.format("wgrad"), _BACK + "GroupedLinearBackward", "experts"
    ),
    "logits": _gemm("256x256_64x3_2x1_h", "aten::linear"),
    "embed": Kernel(
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long>()",
        "aten::embedding",
        "tokens",
    ),
    "embed_back": Kernel(
        "void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>()",
        "aten::embedding_dense_backward",
        "tokens",
    ),
    "arange": _elementwise("FillFunctor<long>", "aten::arange"),
    "empty": _elementwise("FillFunctor<float>", "aten::fill_"),
    "unscale": _elementwise("MulFunctor<float>", "aten::_foreach_mul_"),
    "adam": Kernel(
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float> >()",
        "aten::_fused_adamw_",
        "bucket",
        (320, 1, 1),
        64,
    ),
}


def host_args(job: Job, kernel: Kernel) -> str:
    """What the operator says of its inputs, as the inside of a JSON object."""
    dims, types = _dims(job)[kernel.inputs]
    strides = [[*size[1:], 1] for size in dims]
    found = {
        "Concrete Inputs": [""] * len(dims),
        "Input type": types,
        "Input Strides": strides,
        "Input Dims": dims,
    }
    return json.dumps(found)[1:-1]


def _dims(job: Job) -> dict[str, tuple[list[list[int]], list[str]]]:
    half = "c10::BFloat16"
    rows, width = job.tokens, job.hidden
    return {
        "gemm": ([[rows, width], [width, width]], [half, half]),
        "rows": ([[rows, width]], [half]),
        "heads": ([[rows, width // 128 + 1, 128]] * 3, [half] * 3),
        "experts": (
            [[rows, width], [job.ep, width, width], [job.ep]],
            [half, half, "long int"],
        ),
        "tokens": ([[rows, width], [rows]], [half, "long int"]),
        "bucket": ([[job.bucket], [job.bucket], [job.bucket], []], ["float"] * 3 + ["Scalar"]),
    }
