"""Time of a step and memory of a rank: pipeline, synchronization, optimizer, activations."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.hardware import Cluster
from fastcomm.isp import Question
from fastcomm.isp.block import FULL, NONE, Block, ShardedElements, Stage, experts_of, places
from fastcomm.isp.communication import collective, is_inside
from fastcomm.isp.layer import Correction, LayerCost, attend, head, layer_cost, optimizer

Array = NDArray[Any]
Costs = dict[str, Any]  # seconds and rates by name
Bytes = dict[str, Any]


def price(
    block: Block, question: Question, cluster: Cluster, measured: Correction | None = None
) -> Costs:
    """Return the times of a step in seconds, and its rates, by name."""
    attention = attend(block, question, cluster, measured)
    layers = [
        layer_cost(block, question, cluster, kind, attention) for kind in question.model.kinds
    ]
    pipe = _pipeline(block, question, layers, head(block, question, cluster))
    pipe["p2p"] = _p2p(block, question, cluster)
    last = question.model.counts(block.pp - 1, block.pp)
    stage = Stage.of(block, question, last, 2 if block.pp == 1 else 1)
    grad = _gradients(block, question, cluster, stage)
    if question.overlap_grad:
        grad = np.maximum(0.0, grad - _backward(block, layers, last))
    param = _parameters(block, question, cluster, stage)
    update = optimizer(block, stage, cluster)
    total = pipe["all_fwd_bwd_cost"] + pipe["bubble"] + pipe["p2p"] + grad + param + update
    return {
        **_layer(layers),
        **pipe,
        "pp_comm_cost": pipe["p2p"] + pipe["bubble"],
        "zp_comm_cost": param,
        "wdp_comm_cost": grad,
        "grad_sync": grad,
        "param_sync": param,
        "optimizer": update,
        **_rates(block, question, cluster, total),
    }


def _layer(layers: list[LayerCost]) -> Costs:
    """Return the costs of the usual layer, and the time of one without experts."""
    usual = layers[0]
    found: Costs = {
        "overlap_latency": usual.overlap,
        "comp_wp": usual.work.linear,
        "comp_attn": usual.work.attention,
        "elementwise": usual.work.elementwise,
        "wp_comm_cost": usual.gathers,
        "sp_comm_cost": usual.sequence,
    }
    if usual.exchange is not None:
        found |= {"ep_comm_cost": usual.exchange, "ep_exposed": usual.exposed}
    if len(layers) > 1:
        found["dense_layer"] = layers[1].seconds
    return found


def _pipeline(
    block: Block, question: Question, layers: list[LayerCost], logits: Array
) -> Costs:
    """Return the time of the slowest stage, and of the bubble."""
    model, pp = question.model, block.pp

    def stage(counts: tuple[int, ...]) -> Array:
        return np.asarray(
            sum(count * each.seconds for count, each in zip(counts, layers, strict=True))
        )

    whole = stage(model.counts(0, 1)) + logits
    slowest = stage(model.counts(pp - 1, pp)) + logits
    found: Costs = {"head": logits}
    if len(layers) > 1:
        place = np.full(np.shape(slowest), pp - 1)
        for other in places(pp, model)[:-1]:
            time = stage(model.counts(other, pp))
            place, slowest = np.where(time > slowest, other, place), np.maximum(time, slowest)
        found["slowest_stage"] = place
    return found | {
        "fwd_bwd_cost": slowest,
        "all_fwd_bwd_cost": block.num * slowest,
        "bubble": (whole - slowest) / block.interleave,
    }


def _backward(block: Block, layers: list[LayerCost], counts: tuple[int, ...]) -> Array:
    """Arithmetic of a stage's last backward, which the gradients' reduction hides behind."""
    again = block.ck == FULL
    each = [
        count * (2 * layer.work.linear / (3 + again) + layer.work.attention_backward)
        for count, layer in zip(counts, layers, strict=True)
    ]
    return np.asarray(sum(each))


def _rates(block: Block, question: Question, cluster: Cluster, total: Array) -> Costs:
    model, tokens = question.model, block.bsz * block.num * question.seq_len * block.dp
    tgs = tokens / (block.world * total)
    three, four = (model.flops(question.seq_len, passes) for passes in (3, 4))
    return {
        "tgs": tgs,
        "total_latency": total,
        "g_bsz": tokens,
        "mfu": tgs * three / cluster.peak,
        "hfu": tgs * np.where(block.ck == FULL, four, three) / cluster.peak,
    }


def _p2p(block: Block, question: Question, cluster: Cluster) -> Array | float:
    if block.pp == 1:
        return 0.0 * block.num
    stride = block.world // block.pp
    whole = 1.0 * question.dtype_size * block.bsz * question.seq_len * question.model.hidden
    scatter = block.algo == "mtp" and question.p2p == "scatter"
    volume = whole / (block.sp if scatter else block.whole)
    if is_inside(cluster, block.pp, stride):
        one = cluster.alpha_intra + volume / cluster.bw_intra
    else:
        siblings = min(stride, cluster.gpus_per_node)
        one = cluster.alpha_inter + volume * siblings / cluster.bw_node
    if scatter:
        one = one + collective(cluster, "all_gather", whole, block.sp)
    return 2 * (block.num + block.pp - 1) * block.interleave * one


_BUCKET = 512 * 2**20


def _gradients(block: Block, question: Question, cluster: Cluster, stage: Stage) -> Array:
    """Return the seconds to reduce the gradients of a stage over all ranks that hold them."""
    d = question.dtype_size
    time = _bucketed(cluster, "all_reduce", np.float64(d * stage.rest), block.dp, block.sp)
    for piece in stage.pieces:
        for part in _reduced(question, cluster, piece):
            time = time + part
    return time


def _reduced(question: Question, cluster: Cluster, piece: ShardedElements) -> tuple[Array, ...]:
    d, n = question.dtype_size, piece.replicas
    volume, stride = d * piece.elements / piece.grads, piece.stride * piece.grads
    if question.grad_sync == "all_reduce":
        return (_bucketed(cluster, "all_reduce", volume, n // piece.grads, stride),)
    left = d * piece.elements / piece.os
    return (
        _bucketed(cluster, "reduce_scatter", volume, piece.os // piece.grads, stride),
        _bucketed(cluster, "all_reduce", left, n // piece.os, piece.stride * piece.os),
    )


def _bucketed(
    cluster: Cluster,
    op: str,
    volume: Array | np.float64,
    ranks: NDArray[np.int64] | int,
    stride: NDArray[np.int64] | int,
) -> Array:
    calls = np.maximum(1, np.ceil(volume / _BUCKET))
    return collective(cluster, op, volume, ranks, stride, calls)


def _parameters(block: Block, question: Question, cluster: Cluster, stage: Stage) -> Array:
    """Return the seconds to send updated parameters to all ranks that need them."""
    d = question.dtype_size
    rest = collective(cluster, "broadcast", d * stage.rest, block.dp, block.sp)
    time = np.zeros(len(block.os))
    for piece in stage.pieces:
        parts, stride = piece.os // piece.para, piece.stride * piece.para
        volume = d * piece.elements / piece.para
        if question.param_sync == "all_gather":
            time = time + collective(cluster, "all_gather", volume, parts, stride)
        else:
            time = time + collective(cluster, "broadcast", volume, parts, stride, parts)
    return np.maximum(time, rest) if block.isp else time


# CUDA context, NCCL buffers, the allocator's waste.
_CONTEXT = 1.5e9
# Bytes a parameter that the step needs for a moment: an fp32 gradient, flat buffers.
_TRANSIENT = 16


def memory(block: Block, question: Question) -> Bytes:
    """Return the terms of the fullest stage in bytes; `total_mm_cost` has to fit."""
    found: Bytes | None = None
    for place in places(block.pp, question.model):
        terms = _stage(block, question, place)
        if found is None:
            found = terms
            continue
        more = terms["total_mm_cost"] > found["total_mm_cost"]
        found = {name: np.where(more, terms[name], found[name]) for name in terms}
    assert found is not None  # there is a first stage
    return found


def _stage(block: Block, question: Question, place: int) -> Bytes:
    pp, d = block.pp, question.dtype_size
    last = place == pp - 1
    counts = question.model.counts(place, pp)
    stage = Stage.of(block, question, counts, int(place == 0) + int(last))
    states = stage.states(block)
    weights = d * (sum(each.elements / each.para for each in stage.pieces) + stage.rest)
    grads = d * (sum(each.elements / each.grads for each in stage.pieces) + stage.rest)
    kept = _activations(block, question, np.minimum(block.num, pp - place), counts)
    kept |= _last(block, question) if last else dict.fromkeys(_LAST, 0.0)
    others = _buffers(block, question, sum(counts))
    activation, buffers = (
        sum((np.asarray(each) for each in terms.values()), np.float64(0))
        for terms in (kept, others)
    )
    fixed = weights + grads + 12 * states
    peak = fixed + _TRANSIENT * states
    return {
        "total_mm_cost": _CONTEXT + np.maximum(fixed + activation + buffers, peak),
        "os_mm_cost": 12 * states,
        "p_g_mm_cost": weights + grads,
        "step_peak": _CONTEXT + peak,
        "activation": activation,
        "stage": np.float64(place),
        **kept,
        **others,
    }


def _activations(
    block: Block, question: Question, flying: Array, counts: tuple[int, ...]
) -> Bytes:
    d, seq, model = question.dtype_size, question.seq_len, question.model
    unit = d / 2 * block.bsz * seq * model.hidden
    virtual = block.pp * block.interleave
    flying = np.where(
        block.interleave > np.int64(1), flying * (1 + (block.pp - 1) / virtual), flying
    )
    scores = 0.0 if question.flash else 5 * model.heads * seq / (model.hidden * block.sp)
    held = np.where(block.ck == NONE, scores, 0.0)
    kinds = [
        (count, block.kept(question, kind))
        for count, kind in zip(counts, model.kinds, strict=True)
        if count
    ]
    full = block.ck == FULL
    live = unit * (max(kept for _, kept in kinds) + scores)
    inputs = d * block.bsz * seq * model.hidden / block.whole
    layers = sum(flying * count * (unit * (kept + held)) for count, kept in kinds)
    return {
        "blocks_activation": np.where(full, live, layers),
        "block_output_activation": np.where(full, flying * sum(counts) * inputs, 0.0),
    }


_LAST = (
    *("norm_activation", "head_input_activation", "head_output_activation"),
    "backward_mem_peak",
)


def _last(block: Block, question: Question) -> Bytes:
    model, d, sp = question.model, question.dtype_size, block.sp
    tokens = 1.0 * block.bsz * question.seq_len
    return {
        "norm_activation": 4 * tokens * model.hidden / block.whole,
        "head_input_activation": d * tokens * model.hidden / block.whole,
        "head_output_activation": (d + 4) * tokens * model.vocab / sp,
        "backward_mem_peak": 2 * d * tokens * model.hidden * (1 + 1 / sp)
        + d * model.embedding / sp,
    }


def _buffers(block: Block, question: Question, layers: int) -> Bytes:
    model, d = question.model, question.dtype_size
    kind = model.kinds[0]
    weights = sum(elements * count for elements, count in kind.matrices)
    pool = np.where(block.para > 1, 4 * d * weights / block.tp, 0.0)
    if kind.experts:
        routed = 4 * d * model.expert_parameters / block.ep
        pool = pool + np.where(experts_of(block, routed).para > 1, routed, 0.0)
    piece = d * block.bsz * question.seq_len * model.hidden / block.whole
    return {
        "mem_pool_mm": pool,
        "rotary_emb_sincos_cache_mm": 2.0 * d * layers * question.seq_len * model.rotary / 2,
        "pp_p2p_buffer": piece if block.pp > 1 else 0.0,
    }


def evaluate(block: Block, question: Question, cluster: Cluster) -> dict[str, Any]:
    """Return every number of a single strategy, by the names of a record."""
    found = price(block, question, cluster) | memory(block, question)
    return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in found.items()}
