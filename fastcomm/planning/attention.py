"""Time of attention by the kernel that runs there: fused, or its products and softmax apart.

Which kernel runs depends on the GPU, the date of the stack, the width of heads, and whether the
model has sinks, and so does what selective recompute runs again. Times are in seconds.
"""

from fastcomm.hardware.gpus import Gpu, gpu
from fastcomm.planning.job import Plan
from fastcomm.planning.kernels import flash

OLD_ATTENTION, _FA2, _FA3 = 2022.5, 2023.6, 2024.6  # years of stacks
# cuDNN trains 192 and 128 wide heads on Blackwell from 9.11 on, and is today's kernel there.
_CUDNN_BLACKWELL = 2025.5
# Sinks are fused on Hopper from cuDNN 9.13 on. On Blackwell a stack of 2025-11 took 16 ms a
# layer more than one of 2026-03: what un-fused attention takes (GPT-OSS 120B).
_SINKS_HOPPER, _SINKS_BLACKWELL = 2025.75, 2026.0
# FlashAttention-2 on Hopper and newer takes about 1.7 times as long as the kernels made for
# them (arXiv 2407.08608); the kernels of 2022 for unfused attention reach 0.45 of the peak.
_FA2_SLOWDOWN, _UNFUSED = 1.7, 0.45
# FlashAttention-1 takes twice as long as its successor (arXiv 2307.08691).
_FA1_SLOWDOWN = 2.0
# Bytes moved for an element of unfused scores in the forward pass, half of what the backward
# pass moves: softmax, mask and dropout of 2022; without dropout 22 to 30 in both passes.
_DROPOUT_BYTES, _SCORE_BYTES = 12, 26 / 3
_LATENT_WIDTH = 160  # mean of queries and values
_MEASURED_SEQ = 4096  # tokens of `Gpu.training_attention`


def attention_times(plan: Plan) -> tuple[float, float]:
    """Return the time of attention of a layer in s: forward and backward pass.

    Context parallelism divides it evenly. A window holds on every second layer.
    """
    model, chip = plan.model, gpu(plan.gpu)
    heads = plan.micro_batch * model.heads / plan.tp
    if plan.year < OLD_ATTENTION:
        return _unfused(plan, chip, heads, _DROPOUT_BYTES)
    if not is_fused(plan):
        return _unfused(plan, chip, heads, _SCORE_BYTES)
    kv = plan.micro_batch * max(1.0, model.kv_heads / plan.tp)
    forward, backward = _fused(plan, chip, heads, kv)
    if model.window:
        share = min(1.0, 2 * model.window / plan.seq_len)
        forward *= (1 + share) / 2
        # The backward pass in FP8 ignores the window.
        backward *= 1 if plan.fp8_attention else (1 + share) / 2
    return forward, backward


def is_fused(plan: Plan) -> bool:
    """Whether the stack has a fused kernel for the heads of the model on this GPU."""
    is_blackwell = gpu(plan.gpu).has_mx
    if plan.year < OLD_ATTENTION:
        return False
    if plan.model.has_sinks:
        return plan.year >= (_SINKS_BLACKWELL if is_blackwell else _SINKS_HOPPER)
    return not (plan.model.latent and is_blackwell and plan.year < _CUDNN_BLACKWELL)


def recomputed_modules(plan: Plan) -> frozenset[str]:
    """Return the parts of each layer that Megatron-Core recomputes: named, or selective ones.

    Selective recompute is that of attention without a fused kernel; with one, of what is large
    and takes little time: norms, and the up-projections of latent attention.
    """
    if plan.recompute != "selective" or plan.recomputed:
        return plan.modules
    if not is_fused(plan):
        return frozenset({"core_attn"})
    return frozenset({"layernorm", "mla_up_proj"} if plan.model.latent else {"layernorm"})


def _unfused(plan: Plan, chip: Gpu, heads: float, moved: float) -> tuple[float, float]:
    """Return the times without a fused kernel; no half of the causal scores is saved."""
    model = plan.model
    width = _LATENT_WIDTH if model.latent else model.rotary
    scores = heads * plan.seq_len**2 / plan.cp
    compute = 4 * scores * width / (_UNFUSED * chip.peaks["bf16"])
    forward = compute + moved * scores / chip.hbm
    return forward, 2 * forward


def _fused(plan: Plan, chip: Gpu, heads: float, kv: float) -> tuple[float, float]:
    model = plan.model
    width = _LATENT_WIDTH if model.latent else model.rotary
    is_latent = bool(model.latent) and "mla_160" in chip.attention
    kernel, factor, slow = chip.attention_kernel, chip.attention_backward, 1.0
    # PyTorch's own attention stays at FlashAttention-2.
    torch = plan.trainer_rules.has_torch_attention
    if chip.training_attention and plan.year >= _CUDNN_BLACKWELL and not torch:
        slow, factor = _today(plan, chip)
    if kernel == "fa3" and (plan.year < _FA3 or torch):
        slow, factor = _FA2_SLOWDOWN, 2.9
    if plan.year < _FA2:
        slow *= _FA1_SLOWDOWN
    if torch:
        # PyTorch's ring gives the last rank most of the causal work.
        slow *= 2 - 1 / plan.cp
    slow /= plan.power_share
    name = "mla" if is_latent else kernel
    forward = flash(plan.gpu, name, width, plan.seq_len, heads, kv) * slow / plan.cp
    return forward, factor * forward


def _today(plan: Plan, chip: Gpu) -> tuple[float, float]:
    """Return the time of today's forward kernel over that of the surface, and backward's."""
    name = "mla" if plan.model.latent else "128"
    if plan.fp8_attention and f"{name}_fp8" in chip.training_attention:
        name += "_fp8"
    heads, kv, forward, backward = chip.training_attention[name]
    kernel, width = ("mla", _LATENT_WIDTH) if name[0] == "m" else (chip.attention_kernel, 128)
    surface = flash(plan.gpu, kernel, width, _MEASURED_SEQ, heads, kv)
    return forward * 1e-3 / surface, backward / forward
