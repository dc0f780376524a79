"""Step time and memory of a fixed strategy, term by term, from measured surfaces of the GPU.

Times are in seconds, sizes in bytes. A pass is the forward (0) or backward (1) pass of one
micro-batch through one layer. The fullest pipeline stage counts, as on a rank.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import log2

from fastcomm.hardware.gpus import Gpu, bus_factor, gpu
from fastcomm.isp.layer import Term, visited_nodes
from fastcomm.models import Experts
from fastcomm.planning.job import RECIPES, Plan

CALIBRATED = (
    *("network_share", "overlap_loss", "tp_exposed", "elementwise", "gemm_slowdown"),
    *("host_layer_s", "host_experts", "host_expert", "experts_slowdown"),
    *("straggling", "step_s"),
)
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
_CONTEXT = 3e9  # bytes of the CUDA context, NCCL buffers and fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What no data sheet and no kernel tells; `CALIBRATED` names those that are fitted.

    Each has one meaning. The values of `CALIBRATED` are fitted to published runs, see
    docs/plan-runs.md; the start of collectives between nodes is an assumption.
    """

    # Share of the bandwidth between nodes that collectives reach.
    network_share: float = 0.95
    # Start of a collective between nodes, and what each further node adds, s.
    network_start_s: float = 40e-6
    network_node_s: float = 2e-6
    # Share of the shorter of two overlapped parts that is lost.
    overlap_loss: float = 0.27
    # Share of tensor parallel communication that no GEMM overlaps.
    tp_exposed: float = 0.69
    # Bytes that element-wise kernels move over those that fused ones would.
    elementwise: float = 1.2
    # Time of a GEMM of a training step over that of the kernel alone.
    gemm_slowdown: float = 1.1
    # Time of the host to launch a layer's kernels, both passes, s.
    host_layer_s: float = 1.5e-3
    # Time of the host for a layer with experts over that of a usual one, and what each expert
    # of a rank adds.
    host_experts: float = 4
    host_expert: float = 0.3
    # Time of experts' routing, permutation and synchronization over the layer's own.
    experts_slowdown: float = 2.1
    # Share of the step that is lost to the slowest node, for each doubling of their number.
    straggling: float = 0.003
    # Host time of a step besides its layers: data, optimizer, logging, s.
    step_s: float = 34e-3


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """Step time and memory of a plan, and the terms of both; the first term is the sum."""

    plan: Plan
    time: tuple[Term, ...]  # seconds
    memory: tuple[Term, ...]  # bytes

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return self.time[0].value

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest rank."""
        return self.memory[0].value

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput of a GPU."""
        plan = self.plan
        return plan.global_batch * plan.seq_len / (plan.gpus * self.step_s)

    @property
    def mfu(self) -> float:
        """Model FLOPs over the bf16 peak, with causal attention."""
        plan = self.plan
        peak = gpu(plan.gpu).peaks["bf16"]
        return self.tokens_per_s_per_gpu * causal_flops(plan) / peak

    @property
    def fits(self) -> bool:
        """Whether the memory is at most that of the GPU."""
        return self.memory_bytes <= self.plan.memory_limit


def causal_flops(plan: Plan) -> float:
    """Return the model FLOPs of a token, forward and backward, with causal attention."""
    model = plan.model
    attention = 6.0 * model.layers * plan.seq_len * model.hidden * model.breadth
    return model.flops(plan.seq_len) - attention


def price_plan(plan: Plan, constants: Constants) -> PlanPrice:
    """Return the time and the memory of a plan, whether it fits or not."""
    return PlanPrice(plan=plan, time=_time(plan, constants), memory=_memory(plan))


def priced(plan: Plan, constants: Constants, limit: float) -> tuple[float | None, float]:
    """Return the step time (s) and the memory (bytes) of a plan; no time above the limit."""
    memory = sum(_bytes(plan).values())
    return (_time(plan, constants)[0].value if memory <= limit else None), memory


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Layers of the whole model: usual ones, those without experts, and their times."""

    usual: LayerTimes
    dense: LayerTimes | None
    counts: tuple[int, int]
    gathers: tuple[float, float]  # exposed, of a layer
    host_s: float  # least time of a layer, both passes
    logits_s: float  # of a micro-batch

    @cached_property
    def sums(self) -> dict[str, float]:
        """Return the time of each part of all layers of a micro-batch, both passes."""
        totals = dict.fromkeys(self.usual.parts, 0.0)
        for count, layer in zip(self.counts, (self.usual, self.dense), strict=True):
            for name, pair in layer.parts.items() if layer else ():
                totals[name] = totals.get(name, 0.0) + count * sum(pair)
        layers = sum(self.counts)
        totals["weight gathers"] = layers * sum(self.gathers)
        device = sum(totals.values())
        totals["waiting for the host"] = max(0.0, layers * self.host_s - device)
        return totals

    @cached_property
    def device_bound(self) -> tuple[float, float]:
        """Time of both passes of all layers, without gathers and waiting."""
        usual, dense = self.counts
        forward, backward = (
            usual * self.usual.total(way) + (dense * self.dense.total(way) if self.dense else 0)
            for way in (0, 1)
        )
        return forward, backward


def _stack(plan: Plan, constants: Constants) -> _Stack:
    """Return the layers of a plan; plans that differ elsewhere share them in a search."""
    if plan.is_fsdp:
        return _whole_stack(plan, constants)
    pp = plan.pp if plan.recompute.isdecimal() else 1
    shared = replace(
        plan,
        gpus=plan.tp * plan.cp * pp,
        pp=pp,
        vp=1,
        global_batch=plan.micro_batch,
        sharding="ddp",
        offloaded=0,
        memory=None,
    )
    return _whole_stack(shared, constants)


@lru_cache(maxsize=1 << 13)
def _whole_stack(plan: Plan, constants: Constants) -> _Stack:
    model = plan.model
    usual = layer_times(plan, constants)
    skipped = model.experts.dense_layers if model.experts else 0
    dense = layer_times(plan, constants, dense=True) if skipped else None
    return _Stack(
        usual=usual,
        dense=dense,
        counts=(model.layers - skipped + model.mtp_layers, skipped),
        gathers=fsdp_gathers(plan, constants, usual),
        host_s=host_time(plan, constants),
        logits_s=head_time(plan, constants) * (1 + model.mtp_layers),
    )


def _time(plan: Plan, constants: Constants) -> tuple[Term, ...]:
    """Return the terms of the step time."""
    stack = _stack(plan, constants)
    parts, logits = stack.sums, stack.logits_s
    num, pp = plan.micro_batches, plan.pp
    whole = sum(parts.values()) + logits
    count = sum(stack.counts)
    stage = _slowest(plan.pp, count, sum(parts.values()) / count, logits)
    runs = f"{num} micro-batches x {count / pp:g} layers of "
    terms = [
        Term(name, num * seconds / pp, f"{runs}{seconds / count * 1e3:.3g} ms")
        for name, seconds in parts.items()
        if seconds
    ]
    terms.append(Term("output head", num * logits / pp, "mean of all stages"))
    extra = num * (stage - whole / pp)
    # The chunks of a rank wait for the first micro-batch to pass all others.
    bubble = (max(num, pp) - num + (min(num, pp) - 1) / plan.vp) * whole / pp
    terms += [
        Term("uneven stages", extra, "the fullest stage over the mean"),
        Term("pipeline bubble", bubble, f"{pp} stages, {plan.vp} a rank"),
        Term("between stages", _messages(plan, constants), "messages"),
        *_once(plan, constants, stack),
        Term("host of a step", constants.step_s, "data, optimizer, logging"),
    ]
    domains = -(-plan.gpus // plan.domain)
    extra = constants.straggling * log2(domains) * sum(term.value for term in terms)
    terms.append(Term("slowest node", extra, f"of {domains}"))
    terms = [term for term in terms if term.value > 0]
    total = sum(term.value for term in terms)
    text = f"{num} micro-batches of {plan.micro_batch} x {plan.seq_len} tokens, dp {plan.dp}"
    return Term("step", total, text, level=0), *terms


def _slowest(pp: int, count: int, layer: float, logits: float) -> float:
    """Return the time of the slowest stage in s, all virtual stages of a rank together.

    `count` is the number of layers; `layer` and `logits` are the mean time of one and the time
    of the output head, in s. The stages have equal layers as far as `pp` divides them.
    Otherwise trainers give the last stage, which has the logits, what the others leave. Virtual
    stages change nothing.
    """
    fullest = -(-count // pp)
    last = max(0, count - (pp - 1) * fullest)
    mean = (count * layer + logits) / pp
    return max(mean, fullest * layer, last * layer + logits)


def _messages(plan: Plan, constants: Constants) -> float:
    """Return the time of exposed messages between stages."""
    if plan.pp == 1:
        return 0.0
    size = plan.tokens * plan.model.hidden * ELEMENT / plan.tp
    chip = gpu(plan.gpu)
    if plan.gpus // plan.pp < plan.domain:
        message = 10e-6 + size / (0.7 * chip.nvlink)
    else:
        rate = plan.node_bytes_per_s * constants.network_share / plan.domain
        message = constants.network_start_s + size / rate
    share = constants.overlap_loss if plan.overlap and plan.vp > 1 else 1.0
    return 2 * (plan.pp - 1 + share * plan.micro_batches * plan.vp) * message


def _rank_parameters(plan: Plan) -> tuple[float, float]:
    """Return the parameters on the fullest rank before sharding: dense, and of experts."""
    model = plan.model
    dense, experts = layer_weights(plan)
    layers = plan.stage_layers
    embeddings = 1 if plan.pp > 1 or model.tied else 2
    # Layers without experts are the first ones: another stage is fuller.
    skipped = model.experts.dense_layers if model.experts and plan.pp == 1 else 0
    return layers * dense + embeddings * model.embedding / plan.tp, (layers - skipped) * experts


def _once(plan: Plan, constants: Constants, stack: _Stack) -> list[Term]:
    """Return the terms of gradients, parameters and optimizer, once a step."""
    dense, experts = _rank_parameters(plan)
    reduce_s = gather_s = 0.0
    apart = plan.ep * plan.etp
    groups = (
        (dense, plan.dp * plan.cp, plan.tp),
        (experts, max(1, plan.dp * plan.cp * plan.tp // apart), apart),
    )
    for count, ranks, stride in groups:
        size = ELEMENT * count
        gradients = plan.reduced_bytes * count
        if plan.is_hybrid:
            shards = plan.shards[0]
            parts = gradients / shards, ranks // shards, stride * shards
            reduce_s += plan_collective(plan, constants, "all_reduce", *parts)
        elif plan.sharding == "ddp":
            reduce_s += plan_collective(plan, constants, "all_reduce", gradients, ranks, stride)
        elif not plan.is_fsdp:
            parts = gradients, ranks, stride
            reduce_s += plan_collective(plan, constants, "reduce_scatter", *parts)
            gather_s += plan_collective(plan, constants, "all_gather", size, ranks, stride)
    if plan.overlap:
        forward, backward = (time / plan.pp for time in stack.device_bound)
        reduce_s = exposed(constants, reduce_s, backward)
        gather_s = exposed(constants, gather_s, forward)
    shards = plan.shards[2]
    states = dense / shards + experts / max(1, min(shards, groups[1][1]))
    update = 30 * states / gpu(plan.gpu).hbm
    return [
        Term("gradient reduction", reduce_s, f"over {groups[0][1]} ranks"),
        Term("parameter sync", gather_s, f"over {groups[0][1]} ranks"),
        Term("optimizer step", update, f"states sharded by {shards}"),
    ]


def _memory(plan: Plan) -> tuple[Term, ...]:
    """Return the terms of the memory of the fullest rank."""
    values = _bytes(plan)
    (para, grads, states), width = plan.shards, plan.gradient_bytes
    texts = {
        "parameters": f"sharded by {para}",
        "gradients": f"{width} bytes each, sharded by {grads}",
        "optimizer states": f"sharded by {states}",
        "optimizer step": f"{plan.trainer_rules.transient} bytes each",
        "gathered weights": "2 layers",
        "activations": f"{plan.stage_layers} layers of {_in_flight(plan):.3g} micro-batches, "
        f"recompute {plan.recompute}",
        "logits": "and their gradient",
        "context": "driver, NCCL, fragmentation",
    }
    shown = [Term(name, value, texts[name]) for name, value in values.items() if value]
    total = sum(values.values())
    return Term("memory", total, "fullest rank", level=0), *shown


def _bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes of the fullest rank by term."""
    dense, experts = _rank_parameters(plan)
    others = max(1, plan.dp * plan.cp * plan.tp // (plan.ep * plan.etp))

    def sharded(size: float, shards: int) -> float:
        return size * (dense / shards + experts / min(shards, others))

    para, grads, states = plan.shards
    rules = plan.trainer_rules
    gathered = 2 * ELEMENT * sum(layer_weights(plan)) if para > 1 else 0.0
    return {
        "parameters": sharded(rules.weight_bytes, para),
        "gradients": sharded(plan.gradient_bytes, grads),
        "optimizer states": sharded(12, states),
        "optimizer step": sharded(rules.transient, states),
        "gathered weights": gathered,
        "activations": _activations(plan),
        "logits": rules.logit_bytes * plan.tokens * plan.model.vocab / plan.tp,
        "context": _CONTEXT,
    }


def _in_flight(plan: Plan) -> float:
    """Return the micro-batches whose activations the first stage holds, all virtual stages."""
    if plan.vp == 1:
        return float(min(plan.micro_batches, plan.pp))
    return min(plan.micro_batches, plan.pp * (1 + (plan.pp - 1) / (plan.pp * plan.vp)))


def _activations(plan: Plan) -> float:
    """Return the bytes of saved activations."""
    tokens, layers = plan.tokens / plan.tp, plan.stage_layers
    layer, full = _saved(plan), 2 * plan.model.hidden
    share = 1 - plan.recomputed
    saved = max(1, layers - plan.offloaded) * (share * layer + (1 - share) * full)
    again = layer if share < 1 else 0.0
    return tokens * (_in_flight(plan) * saved + again)


def _saved(plan: Plan) -> float:
    """Return the bytes that a layer without recompute of all of it saves for a token.

    Selective recompute saves the scores of unfused attention, and else only the up-projections
    of latent attention: FlashAttention saves no scores (arXiv 2205.05198 for the formula).
    """
    model, is_selective = plan.model, plan.recompute == "selective"
    stored = 1 if RECIPES[plan.precision] != "bf16" else 2  # bytes of the input of a GEMM
    wide = 2.0 * (model.heads + 2 * model.kv_heads) * model.rotary
    if latent := model.latent:
        heads = 2.0 * model.heads * (2 * (latent.nope + latent.rope) + latent.value)
        wide = 0.0 if is_selective else heads
    factor = (4 if model.mlp == "swiglu" else 2) + stored
    layer = (4 + 2 * stored) * model.hidden + wide + 2 * model.hidden * model.breadth
    if experts := model.experts:
        copies = experts.top_k * (stored * model.hidden + factor * experts.ffn)
        layer += copies + factor * experts.shared
    else:
        layer += factor * model.ffn
    if plan.year < OLD_ATTENTION:
        layer += 2 * model.hidden  # masks of dropout
        layer += 0 if is_selective else 5 * model.heads * plan.seq_len
    return layer
