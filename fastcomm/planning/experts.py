"""Time of a layer of experts on a rank: GEMMs, element-wise work, exchange, and the host.

Sizes: `rows` are the copies of tokens that reach a rank, h the hidden size, i the width of an
expert on the rank. Times are in seconds, of the forward (0) or backward (1) pass.
"""

from functools import lru_cache
from math import log, sqrt
from statistics import NormalDist

from fastcomm.hardware import expert_exchange
from fastcomm.hardware.expert_exchange import ExchangeShape, Scope
from fastcomm.hardware.fitted_exchange import FittedCosts
from fastcomm.hardware.gpus import gpu
from fastcomm.models import Experts
from fastcomm.planning.constants import Constants
from fastcomm.planning.job import Plan
from fastcomm.planning.kernels import ELEMENT, gemm_factor, matmul, plan_collective, recipe_of

# Dispatchers that are families of kernels of their own.
_FAMILIES = ("deepep", "hybridep")
# Bytes an element of [rows, h] or [rows, i] in bf16, forward and backward, that each part moves
# if nothing fuses it with another: counted in megatron/core/transformer/moe and fusions.
_PERMUTE = (8, 8)  # into the order of experts, and back; [rows, h]
_ACTIVATE = (6, 12)  # SwiGLU times the probability; [rows, i]
_QUANTIZE = (4, 6)  # to MXFP8 by rows and columns; inputs, and gradients
_BIAS = (24, 40)  # of the second GEMM, in fp32, expert by expert; [rows, h]
_CLAMP = (22, 34)  # of the gated unit; [rows, i]


def rows_of(plan: Plan, experts: Experts) -> float:
    """Return the copies of tokens that reach the experts of the fullest rank."""
    tokens = plan.tokens / plan.tp * plan.etp
    return tokens * experts.top_k * fullest_share(plan, experts)


def fullest_share(plan: Plan, experts: Experts) -> float:
    """Return the rows of the fullest rank, over the mean of all ranks.

    1 if tokens are forced to equal shares, or dropped above them. With a router, loads of
    experts vary; a rank adds up those of its experts, and the fullest of `ep` ranks counts.
    """
    if plan.routing == "forced" or plan.is_padded or plan.ep <= 1:
        return 1.0
    own = experts.number / plan.ep
    share = 1 + _LOAD_VARIATION * sqrt(2 * log(plan.ep) / own)
    return min(share, _MOST_SHARE)


def is_measured_share(plan: Plan, experts: Experts) -> bool:
    """Whether runs with a router have as many ranks and experts a rank, or all rows are equal.

    Elsewhere the share of the fullest rank is an extrapolation, of unknown error.
    """
    return (
        fullest_share(plan, experts) == 1
        or (plan.ep, experts.number // plan.ep) == MEASURED_SHARE
    )


def fullest_range(plan: Plan, experts: Experts) -> tuple[float, float] | None:
    """Return between what the share of the fullest rank lies nine of ten times.

    Loads of ranks are taken as normal and independent; no fullest rank is below the mean. None
    if rows are equal, or runs have no such ranks.
    """
    if fullest_share(plan, experts) == 1 or not is_measured_share(plan, experts):
        return None
    spread = _LOAD_VARIATION / sqrt(experts.number / plan.ep)
    low, high = (
        1 + spread * NormalDist().inv_cdf(share ** (1 / plan.ep)) for share in (0.05, 0.95)
    )
    return max(1.0, low), high


# Standard deviation of the load of an expert over its mean, so that the fullest of 8 ranks with
# 16 experts each has 1.55 times the mean: Qwen3-235B on H100, forced and natural routing.
_LOAD_VARIATION = 1.08
_MOST_SHARE = 2.0
MEASURED_SHARE = (8, 16)  # ranks, and experts a rank, of these runs
_FEWER_CALLS = 2025.8  # year of stacks from which on Linear launches in fewer calls


def expert_gemms(plan: Plan, constants: Constants, experts: Experts) -> tuple[float, float]:
    """Return the time of the grouped GEMMs of a layer: forward and backward.

    It is that of one GEMM of all rows, longer by `expert_rows` / rows of an expert: what tiles
    and weights cost that few rows share. The backward pass also accumulates the gradients.
    """
    rows, recipe = rows_of(plan, experts), recipe_of(plan)
    own = experts.number / plan.ep
    h, i = plan.model.hidden, experts.ffn / plan.etp
    factor = gemm_factor(plan, constants) * (1 + constants.expert_rows * own / rows)
    if plan.is_mx and not plan.fused_experts:
        factor *= constants.mxfp8_slowdown
    shapes = ((2 * i, h), (h, i))
    forward = sum(matmul(plan.gpu, recipe, rows, n, k) for n, k in shapes)
    backward = sum(
        matmul(plan.gpu, recipe, rows, k, n) + matmul(plan.gpu, recipe, n, k, rows)
        for n, k in shapes
    )
    summed = 2 * plan.gradient_bytes * 3 * own * h * i / gpu(plan.gpu).hbm
    return factor * forward, factor * backward + summed


def expert_elementwise(
    plan: Plan, constants: Constants, experts: Experts
) -> tuple[float, float]:
    """Return the time of permutation, gated unit, quantization, biases and clamps.

    Fused experts do all but the permutation in their GEMMs.
    """
    rows, hbm = rows_of(plan, experts), gpu(plan.gpu).hbm
    hidden, inner = rows * plan.model.hidden, rows * experts.ffn / plan.etp
    times = []
    for way in (0, 1):
        copied = _PERMUTE[way] * hidden
        activated = 0.0
        if not plan.fused_experts:
            activated = _ACTIVATE[way] * inner
            if plan.is_mx:
                copied += _QUANTIZE[way] * (hidden + (1 + way) * inner)
            if experts.has_bias:
                copied += _BIAS[way] * hidden
                activated += _CLAMP[way] * inner
        times.append(copied / constants.copy_share + activated / constants.activation_share)
    return times[0] / hbm, times[1] / hbm


def activation_time(plan: Plan, constants: Constants, experts: Experts) -> float:
    """Return the time to recompute the gated unit of the experts."""
    if plan.fused_experts:
        return 0.0
    moved = _ACTIVATE[0] + (_CLAMP[0] if experts.has_bias else 0)
    inner = rows_of(plan, experts) * experts.ffn / plan.etp
    return moved * inner / constants.activation_share / gpu(plan.gpu).hbm


def exchange_kernels(plan: Plan) -> tuple[str, Scope]:
    """Return the kernels that exchange tokens of experts, and which constants they have."""
    family = next((name for name in _FAMILIES if name in plan.dispatch), "nccl")
    return family, "inside" if plan.ep <= _room(plan) else "across"


def _room(plan: Plan) -> int:
    """Return the ranks with experts of their own that an NVLink domain has."""
    return max(1, plan.domain // plan.etp)


def exchange_time(plan: Plan, constants: Constants, experts: Experts) -> float:
    """Return the time of dispatch and combine of a layer in one pass."""
    if plan.ep <= 1:
        return 0.0
    room = _room(plan)
    groups, top_groups = experts.gate(-(-plan.ep // room))
    tokens, fullest = plan.tokens / plan.tp, fullest_share(plan, experts)
    shape = ExchangeShape(
        tokens=tokens,
        hidden=plan.model.hidden,
        topk=experts.top_k,
        experts=experts.number,
        ranks=plan.ep,
        domain=room,
        fullest=fullest,
        groups=groups,
        top_groups=top_groups,
    )
    nic = plan.node_bytes_per_s / plan.domain
    kernels = plan.gpu, exchange_kernels(plan)[0], plan.exchange_costs
    alone = _alone(kernels, shape, nic, plan.has_fp8_dispatch)
    # Ranks that divide an expert gather the tokens of each other.
    size = tokens * experts.top_k * plan.model.hidden * ELEMENT * plan.etp
    shared = plan_collective(plan, constants, "all_gather", size, plan.etp)
    return constants.exchange_slowdown * alone + 2 * shared * fullest


@lru_cache(maxsize=1 << 14)
def _alone(
    kernels: tuple[str, str, FittedCosts | None], shape: ExchangeShape, nic: float, is_fp8: bool
) -> float:
    """Return the time of an exchange that no other work disturbs, with even ranks.

    `kernels` are the GPU, the family, and fitted constants.
    """
    name, family, fitted = kernels
    time = expert_exchange.exchange_time(
        name,
        family,
        shape,
        nic=nic,
        precision="fp8" if is_fp8 else "bf16",
        fitted=fitted.costs if fitted else {},
    )
    return float(time.dispatch.total_s + time.combine.total_s)


def launch_time(plan: Plan, constants: Constants) -> float:
    """Return the time of the host to launch a usual layer in s, both passes, without graphs."""
    once = constants.host_layer_s * plan.trainer_rules.host_factor * (1 + plan.recomputed / 3)
    is_slow = gpu(plan.gpu).cpu == "grace" and plan.year < _FEWER_CALLS
    return once * constants.host_grace if is_slow else once


def host_times(plan: Plan, constants: Constants, experts: Experts) -> tuple[float, float]:
    """Return the time of the host to launch a layer in s, both passes.

    The token counts of experts, which it waits for, divide it: attention, router and
    preprocessing come before them, dispatch, experts and combine after. Parts that CUDA graphs
    replace take none.
    """
    once = launch_time(plan, constants)
    if "overlapped" in plan.dispatch and gpu(plan.gpu).cpu == "grace":
        once *= constants.host_overlap
    if plan.is_padded:
        once *= constants.host_padded
    graphs = plan.graph_parts
    if "full" in graphs:
        return 0.0, 0.0
    usual = constants.host_experts
    # A layer of experts that is recomputed launches its forward pass once more.
    again = 4 / 3 if "moe" in plan.modules else 1.0
    shares = {"attn": usual / 2, "moe_router": again * usual / 4}
    before = sum(share for name, share in shares.items() if name not in graphs)
    after = again * (usual / 4 + constants.host_expert * experts.number / plan.ep)
    return once * before, once * after


def waiting_time(
    plan: Plan, constants: Constants, experts: Experts, work: tuple[float, float]
) -> float:
    """Return the time that the GPU waits for the host in a layer in s, both passes.

    Token counts stop the host in each layer, so that it cannot run ahead: each half takes the
    longer of host and GPU. With equal rows, or with the exchange of one micro-batch under the
    work of another, only the whole layer does.

    Parameters
    ----------
    plan, constants, experts
        The strategy, fitted constants, and the experts of its model.
    work
        Time of the GPU before and after the counts, both passes, as in `host_times`.

    """
    before, after = host_times(plan, constants, experts)
    if plan.is_padded or "overlapped" in plan.dispatch:
        return max(0.0, before + after - sum(work))
    gaps = 0.0
    if not {"attn", "full"} & plan.graph_parts:
        gaps = constants.host_gaps * constants.host_layer_s * constants.host_experts / 2
    return max(gaps, before - work[0]) + max(0.0, after - work[1])
