"""Step time and memory of a fixed strategy, term by term.

Times are in seconds, sizes in bytes. The fullest pipeline stage counts, as on a rank.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import log2

from fastcomm.hardware.gpu import gpu
from fastcomm.isp import Term
from fastcomm.isp.plan import RECIPES, Plan
from fastcomm.isp.plan_constants import Constants
from fastcomm.isp.plan_cost import (
    ELEMENT,
    OLD_ATTENTION,
    LayerTimes,
    exposed,
    fsdp_gathers,
    head_time,
    host_time,
    layer_times,
    layer_weights,
    plan_collective,
)


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


_CONTEXT = 3e9  # bytes of the CUDA context, NCCL buffers and fragmentation


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
