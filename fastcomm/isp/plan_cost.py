"""Time of a step of a fixed strategy, term by term, from measured surfaces of the GPU.

Times are in seconds, sizes in bytes. A pass is the forward (0) or backward (1) pass of one
micro-batch through one layer.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

from fastcomm.hardware.curves import bus_factor
from fastcomm.hardware.gpu import Gpu, gpu
from fastcomm.isp.internevo.layer import visited_nodes
from fastcomm.isp.model import Experts
from fastcomm.isp.plan import RECIPES, Plan
from fastcomm.isp.plan_constants import Constants

ELEMENT = 2  # bytes of an activation and of a weight
OLD_ATTENTION, _FA2, _FA3 = 2022.5, 2023.6, 2024.6  # years of stacks
# FlashAttention-2 on Hopper and newer takes about 1.7 times as long as the kernels made for
# them (arXiv 2407.08608); the kernels of 2022 for unfused attention reach 0.45 of the peak.
_FA2_SLOWDOWN, _UNFUSED = 1.7, 0.45
# FlashAttention-1 takes twice as long as its successor (arXiv 2307.08691).
_FA1_SLOWDOWN = 2.0
# Bytes moved for an element of unfused scores: softmax, mask and dropout, both ways.
_SCORE_BYTES = 12
_EXPERTS_BACKWARD = 2.1  # two grouped GEMMs of the forward's FLOPs, and both permutations
# Dispatch in FP8 and combine in bf16, over both in bf16, as DeepSeek trains (arXiv 2412.19437).
_FP8_DISPATCH = 0.75
_PASSES = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of a layer's parts in the forward and in the backward pass."""

    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    exchange: tuple[float, float] = (0.0, 0.0)  # of experts, before overlap

    def total(self, way: int) -> float:
        """Return the time of all parts in s: forward (0) or backward (1)."""
        return sum(pair[way] for pair in self.parts.values())


@lru_cache(maxsize=1 << 16)
def _matmul(name: str, recipe: str, m: float, n: float, k: float) -> float:
    return float(gpu(name).matmul(recipe, m, n, k))


@lru_cache(maxsize=1 << 14)
def _flash(name: str, kernel: str, width: int, seq: float, heads: float, kv: float) -> float:
    return float(gpu(name).flash(kernel, width, seq, heads, kv))


@lru_cache(maxsize=1 << 16)
def _inside(name: str, op: str, size: float, ranks: int) -> float:
    return float(gpu(name).inside(op, size, ranks))


@lru_cache(maxsize=1 << 14)
def _grouped(name: str, recipe: str, *sizes: float) -> float:
    return float(gpu(name).grouped(recipe, *sizes))


def plan_collective(
    plan: Plan, constants: Constants, op: str, size: float, ranks: int, stride: int = 1
) -> float:
    """Return the time of a collective in s; 0 for one rank or no bytes.

    Inside an NVLink domain it is measured. Between domains it is the longer of the parts
    inside and outside; the groups of a domain share its links to others.

    Parameters
    ----------
    plan, constants
        Cluster, and fitted constants.
    op
        Such as "all_gather".
    size
        Payload in bytes, as in nccl-tests.
    ranks
        Number of ranks of the group.
    stride
        Distance between two consecutive ranks of the group.

    """
    if ranks <= 1 or size <= 0:
        return 0.0
    room = plan.domain
    if (ranks - 1) * stride < room:
        return _inside(plan.gpu, op, size, ranks)
    own = max(1, room // stride)  # ranks of a group in a domain
    domains = -(-ranks // own)
    rate = plan.node_bytes_per_s * constants.network_share
    if op == "all_to_all":
        outside = size / ranks * (ranks - own) * room / rate
    else:
        outside = float(bus_factor(op, ranks)) * size * min(stride, room) / rate
    start = constants.network_start_s + constants.network_node_s * (domains - 1)
    return start + max(outside, _inside(plan.gpu, op, size, own))


def _recipe(plan: Plan, chip: Gpu) -> str:
    recipe = RECIPES[plan.precision]
    return recipe if recipe in chip.gemm else "bf16"


def _matrices(plan: Plan) -> list[tuple[float, float]]:
    """Return n and k of the GEMMs of a layer that every token visits, on a rank."""
    model, tp = plan.model, plan.tp
    shapes = _attention_matrices(plan)
    experts = model.experts
    gates = 1 if model.mlp == "swiglu" else 0
    width = experts.shared if experts else model.ffn
    if width:
        shapes += [((1 + gates) * width / tp, model.hidden), (model.hidden, width / tp)]
    return shapes


def _attention_matrices(plan: Plan) -> list[tuple[float, float]]:
    model, tp = plan.model, plan.tp
    if latent := model.latent:
        heads = model.heads / tp
        return [
            (latent.q_rank + latent.kv_rank + latent.rope, model.hidden),
            (heads * (latent.nope + latent.rope), latent.q_rank),
            (heads * (latent.nope + latent.value), latent.kv_rank),
            (model.hidden, heads * latent.value),
        ]
    width = model.rotary
    wide = (model.heads + 2 * max(model.kv_heads, tp)) * width / tp
    return [(wide, model.hidden), (model.hidden, model.heads * width / tp)]


def _gemms(plan: Plan, constants: Constants, shapes: list[tuple[float, float]]) -> list[float]:
    """Return the times of GEMMs in the forward and in the backward pass."""
    recipe, m = _recipe(plan, gpu(plan.gpu)), plan.tokens
    times = [0.0, 0.0]
    for n, k in shapes:
        times[0] += _matmul(plan.gpu, recipe, m, n, k)
        times[1] += _matmul(plan.gpu, recipe, m, k, n) + _matmul(plan.gpu, recipe, n, k, m)
    return [time * constants.gemm_slowdown / plan.power_share for time in times]


def _attention(plan: Plan) -> tuple[float, float]:
    """Return the time of attention; context parallelism divides it evenly."""
    model, chip = plan.model, gpu(plan.gpu)
    heads = plan.micro_batch * model.heads / plan.tp
    kv = plan.micro_batch * max(1.0, model.kv_heads / plan.tp)
    width = model.rotary if not model.latent else 160
    if plan.year < OLD_ATTENTION:
        forward = _unfused(plan, chip, heads, width)
        return forward, 2 * forward
    kernel, factor = chip.attention_kernel, chip.attention_backward
    slow = 1.0
    # PyTorch's own attention stays at FlashAttention-2.
    torch = plan.trainer_rules.has_torch_attention
    if kernel == "fa3" and (plan.year < _FA3 or torch):
        slow, factor = _FA2_SLOWDOWN, 2.9
    if plan.year < _FA2:
        slow *= _FA1_SLOWDOWN
    if torch:
        # PyTorch's ring gives the last rank most of the causal work.
        slow *= 2 - 1 / plan.cp
    slow /= plan.power_share
    name = "mla" if model.latent and "mla_160" in chip.attention else kernel
    time = _flash(plan.gpu, name, width, plan.seq_len, heads, kv) * slow / plan.cp
    if model.window:
        share = min(1.0, 2 * model.window / plan.seq_len)
        time *= (1 + share) / 2
    return time, factor * time


def _unfused(plan: Plan, chip: Gpu, heads: float, width: int) -> float:
    scores = heads * plan.seq_len**2 / plan.cp
    compute = 4 * scores * width / (_UNFUSED * chip.peaks["bf16"])
    return compute + _SCORE_BYTES * scores / chip.hbm


def _elementwise(plan: Plan, constants: Constants) -> tuple[float, float]:
    """Return the time of norms, residuals, rotary embedding and activations."""
    model = plan.model
    wide = model.heads * model.rotary + 2 * model.kv_heads * model.rotary
    experts = model.experts
    ffn = experts.shared if experts else model.ffn
    moved = 20 * model.hidden + 4 * wide + (6 if model.mlp == "swiglu" else 4) * ffn
    forward = constants.elementwise * plan.tokens * moved / plan.tp / gpu(plan.gpu).hbm
    return forward, 1.6 * forward


def _experts(plan: Plan, constants: Constants, experts: Experts) -> tuple[float, float]:
    """Return the time of a layer of experts: routing, permutation, grouped GEMMs."""
    chip = gpu(plan.gpu)
    tokens = plan.tokens / plan.tp * plan.etp
    recipe = RECIPES[plan.precision]
    recipe = chip.experts_like.get(recipe, recipe)
    recipe = recipe if recipe in chip.experts else "bf16"
    own = experts.number / plan.ep
    weights = plan.model.hidden * experts.ffn / plan.etp
    time = _grouped(plan.gpu, recipe, tokens * experts.top_k, own, weights, tokens)
    time *= constants.experts_slowdown / plan.power_share
    return time, _EXPERTS_BACKWARD * time


def _exchange(plan: Plan, constants: Constants, experts: Experts) -> float:
    """Return the time of dispatch and combine of a layer in one pass."""
    if plan.ep <= 1:
        return 0.0
    tokens = plan.tokens / plan.tp
    copies = float(experts.top_k)
    room = plan.domain // max(1, plan.etp)
    nodes = -(-plan.ep // room)
    if "deepep" in plan.dispatch or "hybridep" in plan.dispatch:
        # A token crosses once to each rank of a domain, or to each domain, that needs it.
        places = nodes if nodes > 1 else plan.ep
        if places != nodes:
            experts = replace(experts, node_limit=0)  # which bounds nodes, not ranks
        if experts.number % places == 0:
            copies = min(copies, visited_nodes(experts, places))
    size = tokens * copies * plan.model.hidden * ELEMENT
    if plan.precision == "fp8_block" and "deepep" in plan.dispatch:
        size *= _FP8_DISPATCH
    # Ranks that divide an expert gather the tokens of each other.
    shared = plan_collective(plan, constants, "all_gather", size * plan.etp, plan.etp)
    own = plan_collective(plan, constants, "all_to_all", size, plan.ep, plan.etp)
    return 2 * (shared + own)


def exposed(constants: Constants, comm: float, work: float) -> float:
    """Return the exposed part of communication under work, in s.

    Parameters
    ----------
    constants
        Has `overlap_loss`, the share of the shorter of both that contention costs.
    comm, work
        Time of each alone, s.

    """
    return max(0.0, comm - work) + constants.overlap_loss * min(comm, work)


def _tensor(plan: Plan, constants: Constants) -> tuple[float, float]:
    """Return the exposed gathers and scatters of tensor and sequence parallelism."""
    size = plan.tokens * plan.model.hidden * ELEMENT
    once = plan_collective(plan, constants, "all_gather", size, plan.tp)
    once += plan_collective(plan, constants, "reduce_scatter", size, plan.tp)
    calls = 1 if plan.model.experts and not plan.model.experts.shared else 2
    return constants.tp_exposed * calls * once, constants.tp_exposed * calls * once


def _context(
    plan: Plan, constants: Constants, work: tuple[float, float]
) -> tuple[float, float]:
    """Return the exposed ring of keys and values of context parallelism."""
    model = plan.model
    width = model.latent.kv_rank + model.latent.rope if model.latent else 0
    wide = width or 2 * max(1.0, model.kv_heads / plan.tp) * model.rotary
    size = plan.cp * plan.tokens * wide * ELEMENT
    ring = plan_collective(plan, constants, "all_gather", size, plan.cp, plan.tp)
    return exposed(constants, ring, work[0]), exposed(constants, 2 * ring, work[1])


def layer_times(plan: Plan, constants: Constants, *, dense: bool = False) -> LayerTimes:
    """Return the times of a layer in s: forward and backward by part.

    Parameters
    ----------
    plan, constants
        The strategy with its job, and fitted constants.
    dense
        Whether the layer has no experts, in a model with some.

    """
    shapes = _matrices(plan)
    experts = None if dense else plan.model.experts
    if dense:
        ffn = plan.model.ffn / plan.tp
        hidden = plan.model.hidden
        shapes = [*_attention_matrices(plan), (2 * ffn, hidden), (hidden, ffn)]
    first, second = _gemms(plan, constants, shapes)
    attention = _attention(plan)
    parts = {
        "GEMM": (first, second),
        "attention": attention,
        "element-wise": _elementwise(plan, constants),
    }
    exchange = 0.0
    if experts:
        parts["experts"] = _experts(plan, constants, experts)
        exchange = _exchange(plan, constants, experts)
    work = tuple(sum(pair[way] for pair in parts.values()) for way in _PASSES)
    parts = _with_recompute(plan, parts)
    tensor = _tensor(plan, constants)
    again = plan.recomputed
    parts["tensor parallelism"] = (tensor[0], tensor[1] + again * tensor[0])
    parts["context parallelism"] = _context(plan, constants, attention)
    if exchange:
        shown = [exchange, exchange * (1 + again)]
        if "overlapped" in plan.dispatch:
            shown = [exposed(constants, t, w) for t, w in zip(shown, work, strict=True)]
        parts["expert exchange"] = (shown[0], shown[1])
    return LayerTimes(parts=parts, exchange=(exchange, exchange))


def _with_recompute(
    plan: Plan, parts: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Add what the backward pass computes again."""
    shares = dict.fromkeys(parts, plan.recomputed)
    if plan.recompute == "selective" and not plan.recomputed:
        shares["attention"] = 1.0 if plan.year < OLD_ATTENTION else 0.0
        shares["element-wise"] = 0.5
    return {
        name: (forward, backward + shares[name] * forward)
        for name, (forward, backward) in parts.items()
    }


def host_time(plan: Plan, constants: Constants) -> float:
    """Return the time of the host to launch a layer, both passes, in s."""
    host = constants.host_layer_s * plan.trainer_rules.host_factor * (1 + plan.recomputed / 3)
    if experts := plan.model.experts:
        host *= constants.host_experts + constants.host_expert * experts.number / plan.ep
    return host * (1 - plan.graphs)


def layer_weights(plan: Plan) -> tuple[float, float]:
    """Return the number of a layer's parameters on a rank before sharding: dense, experts."""
    model = plan.model
    kind = model.kinds[0]
    dense = kind.parameters / plan.tp
    experts = model.expert_parameters / (plan.ep * plan.etp)
    return dense, experts


def fsdp_gathers(plan: Plan, constants: Constants, layer: LayerTimes) -> tuple[float, float]:
    """Return the exposed collectives of FSDP for a layer in s: forward pass, backward pass.

    Both gather weights; the backward pass also reduces gradients. 0 without FSDP.
    """
    if not plan.is_fsdp:
        return 0.0, 0.0
    dense, experts = (ELEMENT * count for count in layer_weights(plan))
    ranks, stride = plan.shards[0], plan.tp
    gather = plan_collective(plan, constants, "all_gather", dense, ranks, stride)
    wide = plan.reduced_bytes / ELEMENT
    scatter = plan_collective(plan, constants, "reduce_scatter", wide * dense, ranks, stride)
    if experts:
        others = max(1, plan.dp * plan.cp * plan.tp // (plan.ep * plan.etp))
        apart = plan.ep * plan.etp
        gather += plan_collective(plan, constants, "all_gather", experts, others, apart)
        experts *= wide
        scatter += plan_collective(plan, constants, "reduce_scatter", experts, others, apart)
    comm = gather, gather + scatter
    if not plan.overlap:
        return comm
    forward, backward = (exposed(constants, comm[way], layer.total(way)) for way in _PASSES)
    return forward, backward


def head_time(plan: Plan, constants: Constants) -> float:
    """Return the time of the logits and the loss of a micro-batch in s, both passes."""
    model = plan.model
    m, n, k = plan.tokens, model.vocab / plan.tp, model.hidden
    shapes = ((m, n, k), (m, k, n), (n, k, m))
    gemms = sum(_matmul(plan.gpu, "bf16", *shape) for shape in shapes)
    return constants.gemm_slowdown * gemms + 20 * m * n / gpu(plan.gpu).hbm
