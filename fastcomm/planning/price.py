"""Step time and memory of a fixed strategy, term by term, from measured surfaces of the GPU.

Times are in seconds, sizes in bytes. A pass is the forward (0) or backward (1) pass of one
micro-batch through one layer. The fullest pipeline stage counts, as on a rank.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import log2

from fastcomm.hardware.gpus import gpu
from fastcomm.isp.layer import Term
from fastcomm.planning.attention import OLD_ATTENTION, attention_times, recomputed_modules
from fastcomm.planning.constants import Constants
from fastcomm.planning.experts import (
    activation_time,
    exchange_time,
    expert_elementwise,
    expert_gemms,
    fullest_share,
    launch_time,
    waiting_time,
)
from fastcomm.planning.job import RECIPES, Plan, variant
from fastcomm.planning.kernels import (
    ELEMENT,
    gemm_factor,
    matmul,
    plan_collective,
    recipe_of,
)
from fastcomm.planning.trainers import NODE_GPUS

_PASSES = (0, 1)
# Memory of CUDA graphs over that of activations: of a whole step with experts, whose rows are
# reserved, and of parts (Hy3 on GB300: 187 GB without graphs, 225 and 193 with them).
_WHOLE_POOL, _PART_POOL = 0.5, 0.08
_NORM_SHARE = 0.3  # of the bytes of element-wise kernels: norms and their inputs
_CONTEXT = 3e9  # bytes of the CUDA context, NCCL buffers and fragmentation
# More of it with HybridEP in an NVLink domain of many nodes: its buffers, buffers of more
# groups of NCCL, and fragmentation. Hy3 on GB300 uses 187 GB without graphs (n142) and 193 with
# graphs of parts (n143), of which parameters, states and activations are 171 and 177.
_DOMAIN_CONTEXT = 15e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of a layer's parts in the forward and in the backward pass."""

    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    exchange: tuple[float, float] = (0.0, 0.0)  # of experts, before overlap

    def total(self, way: int) -> float:
        """Return the time of all parts in s: forward (0) or backward (1)."""
        return sum(pair[way] for pair in self.parts.values())


def _mlp_matrices(plan: Plan, width: float) -> list[tuple[float, float]]:
    """Return n and k of the GEMMs of an MLP of a width, on a rank."""
    hidden, gates = plan.model.hidden, 1 if plan.model.mlp == "swiglu" else 0
    width /= plan.tp
    return [((1 + gates) * width, hidden), (hidden, width)] if width else []


def _attention_matrices(plan: Plan) -> list[tuple[float, float]]:
    model, tp = plan.model, plan.tp
    if latent := model.latent:
        heads = model.heads / tp
        return [
            (latent.q_rank + latent.kv_rank + latent.rope, model.hidden),
            (heads * (latent.nope + latent.rope), latent.q_rank or model.hidden),
            (heads * (latent.nope + latent.value), latent.kv_rank),
            (model.hidden, heads * latent.value),
        ]
    width = model.rotary
    wide = (model.heads + 2 * max(model.kv_heads, tp)) * width / tp
    return [(wide, model.hidden), (model.hidden, model.heads * width / tp)]


def _gemms(
    plan: Plan, constants: Constants, shapes: list[tuple[float, float]]
) -> tuple[float, float]:
    """Return the times of GEMMs in the forward and in the backward pass, in s."""
    recipe, m = recipe_of(plan), plan.tokens
    times = [0.0, 0.0]
    for n, k in shapes:
        times[0] += matmul(plan.gpu, recipe, m, n, k)
        times[1] += matmul(plan.gpu, recipe, m, k, n) + matmul(plan.gpu, recipe, n, k, m)
    factor = gemm_factor(plan, constants)
    if plan.is_mx:
        factor *= constants.mxfp8_slowdown
    return times[0] * factor, times[1] * factor


def _elementwise(plan: Plan, constants: Constants) -> tuple[float, float]:
    """Return the time of norms, residuals, rotary embedding and activations."""
    model = plan.model
    wide = model.heads * model.rotary + 2 * model.kv_heads * model.rotary
    experts = model.experts
    ffn = experts.shared if experts else model.ffn
    moved = 20 * model.hidden + 4 * wide + (6 if model.mlp == "swiglu" else 4) * ffn
    forward = constants.elementwise * plan.tokens * moved / plan.tp / gpu(plan.gpu).hbm
    return forward, 1.6 * forward


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
    share = 1.0 if plan.has_few_queues else constants.tp_exposed
    return share * calls * once, share * calls * once


def _context(
    plan: Plan, constants: Constants, work: tuple[float, float]
) -> tuple[float, float]:
    """Return the exposed ring of keys and values of context parallelism."""
    model = plan.model
    width = model.latent.kv_rank + model.latent.rope if model.latent else 0
    wide = width or 2 * max(1.0, model.kv_heads / plan.tp) * model.rotary
    size = plan.cp * plan.tokens * wide * ELEMENT
    ring = plan_collective(plan, constants, "all_gather", size, plan.cp, plan.tp)
    if plan.has_few_queues:
        return ring, 2 * ring
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
    model, shapes = plan.model, _attention_matrices(plan)
    experts = None if dense else model.experts
    mlp = _mlp_matrices(plan, experts.shared if experts else model.ffn)
    attention = attention_times(plan)
    parts = {
        "GEMM": _gemms(plan, constants, [*shapes, *mlp]),
        "attention": attention,
        "element-wise": _elementwise(plan, constants),
    }
    exchange = 0.0
    if experts:
        parts["experts"] = expert_gemms(plan, constants, experts)
        parts["experts, element-wise"] = expert_elementwise(plan, constants, experts)
        exchange = exchange_time(plan, constants, experts)
    parts = _with_recompute(plan, constants, parts, mlp)
    tensor = _tensor(plan, constants)
    again = plan.recomputed
    parts["tensor parallelism"] = (tensor[0], tensor[1] + again * tensor[0])
    parts["context parallelism"] = _context(plan, constants, attention)
    if exchange:
        again = max(again, float("moe" in plan.modules))
        alone = exchange, exchange * (1 + again)
        parts["expert exchange"] = _exposed_exchange(plan, constants, alone, parts)
    return LayerTimes(parts=parts, exchange=(exchange, exchange))


def _exposed_exchange(
    plan: Plan,
    constants: Constants,
    alone: tuple[float, float],
    parts: dict[str, tuple[float, float]],
) -> tuple[float, float]:
    """Return the exposed time of the exchange of experts, of which other parts hide some."""
    if "overlapped" not in plan.dispatch:
        return alone
    is_inside = plan.ep * plan.etp <= plan.domain
    share = constants.exchange_exposed if is_inside else constants.exchange_exposed_nodes
    # The work of another micro-batch hides no more than its own time.
    work = [sum(pair[way] for pair in parts.values()) for way in _PASSES]
    first, second = (max(share * t, t - w) for t, w in zip(alone, work, strict=True))
    return first, second


def _with_recompute(
    plan: Plan,
    constants: Constants,
    parts: dict[str, tuple[float, float]],
    mlp: list[tuple[float, float]],
) -> dict[str, tuple[float, float]]:
    """Add what the backward pass computes again; `mlp` has the matrices of the MLP."""
    shares = dict.fromkeys(parts, plan.recomputed) | _shares_again(plan)
    extra = _products_again(plan, constants, mlp, has_experts="experts" in parts)
    experts = plan.model.experts
    if experts and "experts" in parts and {"moe", "moe_act"} & plan.modules == {"moe_act"}:
        extra["experts, element-wise"] = activation_time(plan, constants, experts)
    return {
        name: (forward, backward + shares[name] * forward + extra.get(name, 0.0))
        for name, (forward, backward) in parts.items()
    }


def _shares_again(plan: Plan) -> dict[str, float]:
    """Return the shares of parts of a layer that selective recompute runs again."""
    modules, shares = recomputed_modules(plan), {}
    if "core_attn" in modules:
        shares["attention"] = 1.0
    if "layernorm" in modules:
        shares["element-wise"] = _NORM_SHARE
    if "moe" in modules:
        shares |= {"experts": 1.0, "experts, element-wise": 1.0}
    return shares


def _products_again(
    plan: Plan, constants: Constants, mlp: list[tuple[float, float]], *, has_experts: bool
) -> dict[str, float]:
    """Return the time of GEMMs that recompute of parts of a layer adds to that of the whole."""
    modules, time = recomputed_modules(plan), 0.0
    if plan.keeps_attention:
        time -= _gemms(plan, constants, _attention_matrices(plan))[0]
    if "mla_up_proj" in modules and plan.model.latent:
        time += _gemms(plan, constants, _attention_matrices(plan)[1:3])[0]
    if ({"moe", "shared_experts"} if has_experts else {"mlp"}) & modules:
        time += _gemms(plan, constants, mlp)[0]
    return {"GEMM": time}


def host_time(plan: Plan, constants: Constants) -> float:
    """Return the time of the host to launch a layer without experts, both passes, in s."""
    return 0.0 if "full" in plan.graph_parts else launch_time(plan, constants)


def layer_waiting(plan: Plan, constants: Constants, layer: LayerTimes) -> float:
    """Return the time that the GPU waits for the host in a layer with experts, in s."""
    experts = plan.model.experts
    assert experts is not None  # of such a layer
    return waiting_time(plan, constants, experts, work_by_half(layer))


def work_by_half(layer: LayerTimes) -> tuple[float, float]:
    """Return the time of the GPU before and after the token counts of a layer, in s."""
    total = sum(layer.total(way) for way in _PASSES)
    names = "experts", "experts, element-wise", "expert exchange"
    routed = sum(sum(layer.parts.get(name, (0.0, 0.0))) for name in names)
    return total - routed, routed


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
        others, apart = plan.expert_replicas, plan.ep * plan.etp
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
    gemms = sum(matmul(plan.gpu, "bf16", *shape) for shape in shapes)
    factor = constants.gemm_slowdown * (
        constants.blackwell_slowdown if gpu(plan.gpu).has_mx else 1.0
    )
    return factor * gemms + 20 * m * n / gpu(plan.gpu).hbm


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
    time = sum(_seconds(plan, constants).values()) if memory <= limit else None
    return time, memory


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Layers of the whole model: usual ones, those without experts, and their times."""

    usual: LayerTimes
    dense: LayerTimes | None
    counts: tuple[int, int]
    gathers: tuple[float, float]  # exposed, of a layer
    waits_s: tuple[float, float]  # for the host in a layer of each kind, both passes
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
        waits = zip(self.counts, self.waits_s, strict=True)
        totals["waiting for the host"] = sum(count * wait for count, wait in waits)
        return totals

    @cached_property
    def layers_s(self) -> tuple[float, float]:
        """Time of a layer of each kind with its gathers and waits, both passes."""
        times = [
            sum(self.gathers) + wait + (layer.total(0) + layer.total(1) if layer else 0.0)
            for layer, wait in zip((self.usual, self.dense), self.waits_s, strict=True)
        ]
        return times[0], times[1]

    @cached_property
    def device_bound(self) -> tuple[float, float]:
        """Time of both passes of all layers, without gathers; a third of waiting is forward."""
        usual, dense = self.counts
        forward, backward = (
            usual * self.usual.total(way) + (dense * self.dense.total(way) if self.dense else 0)
            for way in _PASSES
        )
        waits = self.sums["waiting for the host"]
        return forward + waits / 3, backward + waits * 2 / 3


def _stack(plan: Plan, constants: Constants) -> _Stack:
    """Return the layers of a plan; plans that differ elsewhere share them in a search."""
    if plan.is_fsdp:
        return _whole_stack(plan, constants)
    pp = plan.pp if plan.recompute.isdecimal() else 1
    shared = variant(
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
    gathers, host = fsdp_gathers(plan, constants, usual), host_time(plan, constants)
    waits = [
        max(0.0, host - layer.total(0) - layer.total(1) - sum(gathers)) if layer else 0.0
        for layer in (usual, dense)
    ]
    if model.experts:
        waits[0] = max(0.0, layer_waiting(plan, constants, usual) - sum(gathers))
    return _Stack(
        usual=usual,
        dense=dense,
        counts=(model.layers - skipped + model.mtp_layers, skipped),
        gathers=gathers,
        waits_s=(waits[0], waits[1]),
        logits_s=head_time(plan, constants) * (1 + model.mtp_layers),
    )


def _time(plan: Plan, constants: Constants) -> tuple[Term, ...]:
    """Return the terms of the step time."""
    values, parts = _seconds(plan, constants), _stack(plan, constants).sums
    num, pp, ranks = plan.micro_batches, plan.pp, plan.dp * plan.cp
    count = plan.model.layers + plan.model.mtp_layers
    layers = f"{num} micro-batches x {count / pp:g} layers of "
    texts = {name: f"{layers}{t / count * 1e3:.3g} ms" for name, t in parts.items()} | {
        "output head": "mean of all stages",
        "uneven stages": "the fullest stage over the mean",
        "pipeline bubble": f"{pp} stages, {plan.vp} a rank",
        "between stages": "messages",
        "activation offload": f"{plan.offloaded} layers, to the host and back",
        "gradient reduction": f"over {ranks} ranks",
        "parameter sync": f"over {ranks} ranks",
        "optimizer step": f"states sharded by {plan.shards[2]}",
        "host of a step": "data, optimizer, logging",
        "slowest node": f"of {-(-plan.gpus // plan.domain)}",
    }
    text = f"{num} micro-batches of {plan.micro_batch} x {plan.seq_len} tokens, dp {plan.dp}"
    shown = [Term(name, value, texts[name]) for name, value in values.items()]
    return Term("step", sum(values.values()), text, level=0), *shown


def _seconds(plan: Plan, constants: Constants) -> dict[str, float]:
    """Return the terms of the step time that are above 0, in s."""
    stack = _stack(plan, constants)
    parts, logits = stack.sums, stack.logits_s
    num, pp = plan.micro_batches, plan.pp
    whole = sum(parts.values()) + logits
    stage = _slowest(plan, stack)
    values = {name: num * seconds / pp for name, seconds in parts.items()}
    values["output head"] = num * logits / pp
    values["uneven stages"] = num * (stage - whole / pp)
    # The chunks of a rank wait for the first micro-batch to pass all others.
    bubble = max(num, pp) - num + (min(num, pp) - 1) / plan.vp
    values["pipeline bubble"] = bubble * whole / pp
    values["between stages"] = _messages(plan, constants)
    values["activation offload"] = _offload(plan, constants, stack.usual)
    values |= _once(plan, constants, stack)
    values["host of a step"] = constants.step_s
    domains = -(-plan.gpus // plan.domain)
    values["slowest node"] = constants.straggling * log2(domains) * sum(values.values())
    return {name: value for name, value in values.items() if value > 0}


def _slowest(plan: Plan, stack: _Stack) -> float:
    """Return the time of the slowest rank in s, all its virtual stages together.

    The last rank has the output head, the first one the layers without experts.
    """
    (usual, skipped), pp = stack.counts, plan.pp
    layer, plain = stack.layers_s
    mean = (usual * layer + skipped * plain + stack.logits_s) / pp
    fullest, last = plan.rank_layers
    if pp == 1:
        return mean
    first = fullest * layer - min(fullest, skipped) * (layer - plain)
    middle = fullest * layer if pp > 2 else 0.0  # noqa: PLR2004
    return max(mean, first, middle, last * layer + stack.logits_s)


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


def _offload(plan: Plan, constants: Constants, layer: LayerTimes) -> float:
    """Return the exposed time to move activations to the host and back, under other layers."""
    if not plan.offloaded:
        return 0.0
    move = plan.tokens / plan.tp * _saved(plan) / gpu(plan.gpu).host_link
    once = sum(exposed(constants, move, layer.total(way)) for way in _PASSES)
    return plan.micro_batches * min(plan.offloaded, plan.stage_layers) * once


def _rank_parameters(plan: Plan) -> tuple[float, float]:
    """Return the parameters on the fullest rank before sharding: dense, and of experts."""
    model = plan.model
    dense, experts = layer_weights(plan)
    layers = plan.stage_layers
    embeddings = 1 if plan.pp > 1 or model.tied else 2
    # Layers without experts are the first ones: another stage is fuller.
    skipped = model.experts.dense_layers if model.experts and plan.pp == 1 else 0
    return layers * dense + embeddings * model.embedding / plan.tp, (layers - skipped) * experts


def _once(plan: Plan, constants: Constants, stack: _Stack) -> dict[str, float]:
    """Return the times of gradients, parameters and optimizer once a step, in s."""
    dense, experts = _rank_parameters(plan)
    reduce_s = gather_s = 0.0
    apart = plan.ep * plan.etp
    groups = (
        (dense, plan.dp * plan.cp, plan.tp),
        (experts, plan.expert_replicas, apart),
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
    # Weights, gradients, and the states read and written.
    update = (6 + 2 * plan.state_bytes) * states / gpu(plan.gpu).hbm
    return {
        "gradient reduction": reduce_s,
        "parameter sync": gather_s,
        "optimizer step": update,
    }


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
        "logits": "and their gradient; of a pipeline, what the last stage needs more",
        "CUDA graphs": "their own memory",
        "context": "driver, NCCL, fragmentation",
    }
    shown = [Term(name, value, texts[name]) for name, value in values.items() if value]
    total = sum(values.values())
    return Term("memory", total, "fullest rank", level=0), *shown


def _bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes of the fullest rank by term."""
    dense, experts = _rank_parameters(plan)
    others = plan.expert_replicas

    def sharded(size: float, shards: int) -> float:
        return size * (dense / shards + experts / min(shards, others))

    para, grads, states = plan.shards
    rules = plan.trainer_rules
    gathered = 2 * ELEMENT * sum(layer_weights(plan)) if para > 1 else 0.0
    flight, (usual, once) = _in_flight(plan), _activations(plan)
    activations = flight * usual + once
    logits = rules.logit_bytes * plan.tokens * plan.model.vocab / plan.tp
    if plan.pp > 1:
        # The last stage, which has the logits, holds fewer micro-batches than the first.
        last = max(1.0, flight - plan.pp + 1) * usual + once
        logits = max(0.0, last + logits - activations)
    return {
        "parameters": sharded(rules.weight_bytes, para),
        "gradients": sharded(plan.gradient_bytes, grads),
        "optimizer states": sharded(plan.state_bytes, states),
        "optimizer step": sharded(rules.transient, states),
        "gathered weights": gathered,
        "activations": activations,
        "logits": logits,
        "CUDA graphs": _pools(plan) * activations,
        "context": _context_bytes(plan),
    }


def _context_bytes(plan: Plan) -> float:
    """Return the bytes of the driver, buffers of exchanges, and fragmentation."""
    is_wide = plan.domain > NODE_GPUS and "hybridep" in plan.dispatch
    return _CONTEXT + (_DOMAIN_CONTEXT if is_wide else 0.0)


def _in_flight(plan: Plan) -> float:
    """Return the micro-batches whose activations the first stage holds, all virtual stages.

    A forward pass under a backward one saves each layer just before the other frees one:
    Megatron-Core warms up with one virtual stage more, and holds a layer more.
    """
    flight = float(plan.pp) if plan.vp == 1 else plan.pp + (plan.pp - 1) / plan.vp
    if "overlapped" in plan.dispatch:
        flight += 1 / plan.stage_layers
    return min(plan.micro_batches, flight)


def _pools(plan: Plan) -> float:
    """Return the memory of CUDA graphs, as a share of activations, with experts."""
    if plan.model.experts is None or not plan.graphs:
        return 0.0
    return _WHOLE_POOL if "full" in plan.graph_parts and not plan.is_padded else _PART_POOL


def _activations(plan: Plan) -> tuple[float, float]:
    """Return the bytes of the activations of a micro-batch on a rank, and of its recompute."""
    tokens, layers = plan.tokens / plan.tp, plan.stage_layers
    layer, full = _saved(plan), 2.0 * plan.model.hidden
    if plan.keeps_attention:
        full += sum(2 * n for n, _ in _attention_matrices(plan)) * plan.tp
    share = 1 - plan.recomputed
    saved = max(1, layers - plan.offloaded) * (share * layer + (1 - share) * full)
    return tokens * saved, tokens * layer if share < 1 else 0.0


def _saved(plan: Plan) -> float:
    """Return the bytes that a layer without recompute of all of it saves for a token.

    Recompute of attention saves the scores of unfused kernels: FlashAttention stores none
    (arXiv 2205.05198 for the formula).
    """
    model, modules = plan.model, recomputed_modules(plan)
    stored = 1 if RECIPES[plan.precision] != "bf16" else 2  # bytes of the input of a GEMM
    wide = 2.0 * (model.heads + 2 * model.kv_heads) * model.rotary
    if latent := model.latent:
        heads = 2.0 * model.heads * (2 * (latent.nope + latent.rope) + latent.value)
        wide = 0.0 if "mla_up_proj" in modules else heads
    factor = (4 if model.mlp == "swiglu" else 2) + stored
    norms = 0 if "layernorm" in modules else 2 * stored
    layer = (4 + norms) * model.hidden + wide + 2 * model.hidden * model.breadth
    if experts := model.experts:
        routed = factor - (stored if "moe_act" in modules else 0)
        rows = experts.top_k * fullest_share(plan, experts)
        copies = rows * (stored * model.hidden + routed * experts.ffn)
        shared = 0 if "shared_experts" in modules else factor * experts.shared
        layer += 0 if "moe" in modules else copies + shared
    elif "mlp" not in modules:
        layer += factor * model.ffn
    if plan.year < OLD_ATTENTION:
        layer += 2 * model.hidden  # masks of dropout
        layer += 0 if "core_attn" in modules else 5 * model.heads * plan.seq_len
    return layer
