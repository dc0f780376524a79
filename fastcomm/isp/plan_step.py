"""Step time and memory of a fixed strategy, term by term.

Times are in seconds, sizes in bytes. The fullest pipeline stage counts, as on a rank.
"""

from dataclasses import dataclass

from fastcomm.hardware.surfaces import gpu
from fastcomm.isp.plan import RECIPES, Plan
from fastcomm.isp.plan_cost import (
    ELEMENT,
    OLD_ATTENTION,
    Constants,
    LayerTimes,
    collective,
    exposed,
    fsdp_gathers,
    head_time,
    layer_times,
    layer_weights,
)
from fastcomm.isp.strategy import Term
from fastcomm.units import format_s


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
        return self.memory_bytes <= (self.plan.memory or gpu(self.plan.gpu).memory)


def causal_flops(plan: Plan) -> float:
    """Return the model FLOPs of a token, forward and backward, with causal attention."""
    model = plan.model
    attention = 6.0 * model.layers * plan.seq_len * model.hidden * model.breadth
    return model.flops(plan.seq_len) - attention


def price_plan(plan: Plan, constants: Constants) -> PlanPrice:
    """Return the time and the memory of a plan, whether it fits or not."""
    return PlanPrice(plan=plan, time=_time(plan, constants), memory=_memory(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """Layers of the whole model: usual ones, those without experts, and their times."""

    usual: LayerTimes
    dense: LayerTimes | None
    counts: tuple[int, int]
    gathers: tuple[float, float]  # exposed, of a layer
    host_s: float  # least time of a layer, both passes

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

    def device_bound(self, way: int) -> float:
        """Return the time of a pass of all layers, without gathers and waiting."""
        usual, dense = self.counts
        other = dense * self.dense.total(way) if self.dense else 0.0
        return usual * self.usual.total(way) + other


def _stack(plan: Plan, constants: Constants) -> _Stack:
    model = plan.model
    usual = layer_times(plan, constants)
    skipped = model.experts.dense_layers if model.experts else 0
    dense = layer_times(plan, constants, dense=True) if skipped else None
    again = {"full": 1.0, "partial": 0.5}.get(plan.recompute, 0.0)
    host = (1 - plan.graphs) * constants.host_layer_s * (1 + again / 3)
    return _Stack(
        usual=usual,
        dense=dense,
        counts=(model.layers - skipped + model.mtp_layers, skipped),
        gathers=fsdp_gathers(plan, constants, usual),
        host_s=host * (constants.host_experts if model.experts else 1),
    )


def _time(plan: Plan, constants: Constants) -> tuple[Term, ...]:
    """Return the terms of the step time."""
    stack = _stack(plan, constants)
    parts = stack.sums()
    num, pp, model = plan.micro_batches, plan.pp, plan.model
    logits = head_time(plan, constants) * (1 + model.mtp_layers)
    whole = sum(parts.values()) + logits
    stage = _slowest(plan, sum(parts.values()), logits)
    count = sum(stack.counts)
    runs = f"{num} micro-batches x {count / pp:g} layers of "
    terms = [
        Term(name=name, value=num * seconds / pp, text=f"{runs}{format_s(seconds / count)}")
        for name, seconds in parts.items()
        if seconds
    ]
    terms.append(Term(name="output head", value=num * logits / pp, text="mean of all stages"))
    extra = num * (stage - whole / pp)
    bubble = (pp - 1) / plan.vp * whole / pp
    terms += [
        Term(name="uneven stages", value=extra, text="the fullest stage over the mean"),
        Term(name="pipeline bubble", value=bubble, text=f"{pp} stages, {plan.vp} a rank"),
        Term(name="between stages", value=_messages(plan, constants), text="messages"),
        *_once(plan, constants, stack),
        Term(name="host of a step", value=constants.step_s, text="data, optimizer, logging"),
    ]
    terms = [term for term in terms if term.value > 0]
    total = sum(term.value for term in terms)
    text = f"{num} micro-batches of {plan.micro_batch} x {plan.seq_len} tokens, dp {plan.dp}"
    return Term(name="step", value=total, text=text, level=0), *terms


def _slowest(plan: Plan, layers: float, logits: float) -> float:
    """Return the time of the slowest stage; `layers` is that of all layers."""
    count, pp = plan.model.layers, plan.pp
    chunks = pp * plan.vp
    mean = (layers + logits) / pp
    if pp == 1 or (count + 2) % chunks == 0 or (count + 1) % chunks == 0:
        return mean  # embedding and head count as layers
    per_stage = -(-count // chunks) * plan.vp * layers / count
    return max(mean, per_stage + (logits if count % chunks == 0 else 0.0))


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
    layers = -(-(model.layers + model.mtp_layers) // plan.pp)
    embeddings = 1 if plan.pp > 1 or model.tied else 2
    skipped = min(model.experts.dense_layers, layers) if model.experts else 0
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
        if plan.sharding.startswith("hsdp"):
            shards = plan.shards[0]
            parts = size / shards, ranks // shards, stride * shards
            reduce_s += collective(plan, constants, "all_reduce", *parts)
        elif plan.sharding == "ddp":
            reduce_s += collective(plan, constants, "all_reduce", size, ranks, stride)
        elif not plan.is_fsdp:
            reduce_s += collective(plan, constants, "reduce_scatter", size, ranks, stride)
            gather_s += collective(plan, constants, "all_gather", size, ranks, stride)
    if plan.overlap:
        forward, backward = (stack.device_bound(way) / plan.pp for way in (0, 1))
        reduce_s = exposed(constants, reduce_s, backward)
        gather_s = exposed(constants, gather_s, forward)
    shards = plan.shards[2]
    states = dense / shards + experts / max(1, min(shards, groups[1][1]))
    update = 30 * states / gpu(plan.gpu).hbm
    return [
        Term(name="gradient reduction", value=reduce_s, text=f"over {groups[0][1]} ranks"),
        Term(name="parameter sync", value=gather_s, text=f"over {groups[0][1]} ranks"),
        Term(name="optimizer step", value=update, text=f"states sharded by {shards}"),
    ]


_BF16_GRADIENTS = 2023.9  # year of the stack
_CONTEXT = 3e9  # bytes of the CUDA context, NCCL buffers and fragmentation


def _memory(plan: Plan) -> tuple[Term, ...]:
    """Return the terms of the memory of the fullest rank."""
    dense, experts = _rank_parameters(plan)
    others = max(1, plan.dp * plan.cp * plan.tp // (plan.ep * plan.etp))

    def sharded(size: float, shards: int) -> float:
        return size * (dense / shards + experts / min(shards, others))

    para, grads, states = plan.shards
    # Stacks before 2024 accumulate gradients in fp32, as do the shards of FSDP.
    width = 4 if plan.is_fsdp or plan.year < _BF16_GRADIENTS else 2
    terms = {
        "parameters": (sharded(ELEMENT, para), f"sharded by {para}"),
        "gradients": (sharded(width, grads), f"{width} bytes each, sharded by {grads}"),
        "optimizer states": (sharded(12, states), f"sharded by {states}"),
        "gathered weights": (2 * ELEMENT * sum(layer_weights(plan)) * plan.is_fsdp, "2 layers"),
        "activations": _activations(plan),
        "logits": (8 * plan.tokens * plan.model.vocab / plan.tp, "and their gradient"),
        "context": (_CONTEXT, "driver, NCCL, fragmentation"),
    }
    shown = [
        Term(name=n, value=value, text=text) for n, (value, text) in terms.items() if value
    ]
    total = sum(term.value for term in shown)
    return Term(name="memory", value=total, text="fullest rank", level=0), *shown


def _activations(plan: Plan) -> tuple[float, str]:
    """Return the bytes of saved activations, and how they come about."""
    model, tokens = plan.model, plan.tokens / plan.tp
    layers = -(-(model.layers + model.mtp_layers) // plan.pp)
    stored = 1 if RECIPES[plan.precision] != "bf16" else 2  # bytes of the input of a GEMM
    wide = 2 * (model.heads + 2 * model.kv_heads) * model.rotary
    if latent := model.latent:
        wide = 2 * model.heads * (2 * (latent.nope + latent.rope) + latent.value)
    factor = (4 if model.mlp == "swiglu" else 2) + stored
    layer = (4 + 2 * stored) * model.hidden + wide + 2 * model.hidden * model.breadth
    if experts := model.experts:
        copies = experts.top_k * (stored * model.hidden + factor * experts.ffn)
        layer += copies + factor * experts.shared
    else:
        layer += factor * model.ffn
    if plan.year < OLD_ATTENTION and plan.recompute == "none":
        layer += 5 * model.heads * plan.seq_len
    full = 2 * model.hidden
    share = {"full": 0.0, "partial": 0.5, "selective": 0.6}.get(plan.recompute, 1.0)
    flight = float(min(plan.micro_batches, plan.pp))
    if plan.vp > 1:
        flight = min(plan.micro_batches, plan.pp * (1 + (plan.pp - 1) / (plan.pp * plan.vp)))
    saved = max(1, layers - plan.offloaded) * (share * layer + (1 - share) * full)
    again = layer if share < 1 else 0.0
    text = f"{layers} layers of {flight:.3g} micro-batches, recompute {plan.recompute}"
    return tokens * (flight * saved + again), text
