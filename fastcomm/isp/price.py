"""Time of a step and memory of a rank: pipeline, synchronization, optimizer, activations.

Times are in seconds. The names of the terms are the fields of a record, see `SearchResult`. An
array broadcasts to the shape of the grid of strategies.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.hardware.clusters import Cluster
from fastcomm.isp.layer import (
    Array,
    Correction,
    LayerCost,
    attention_time,
    cluster_collective,
    head,
    is_inside,
    layer_cost,
    optimizer,
)
from fastcomm.isp.problem import SearchProblem
from fastcomm.isp.space import (
    FULL,
    NONE,
    ShardedElements,
    Stage,
    StrategyGrid,
    candidate_stages,
    experts_of,
)

Costs = dict[str, Array | float]  # seconds and rates by name
BytesByName = dict[str, Array | float]  # bytes by name


def price(
    grid: StrategyGrid,
    problem: SearchProblem,
    cluster: Cluster,
    correction: Correction | None = None,
) -> Costs:
    """Return the times of a step in s, and its rates, by name of the field.

    Parameters
    ----------
    grid, problem, cluster
        Strategies of one layout, the job, the hardware.
    correction
        Scales the time of attention to measurements; None without any.

    Returns
    -------
    dict
        Values broadcast to the shape of the grid.

    """
    attention = attention_time(grid, problem, cluster, correction)
    layers = [
        layer_cost(grid, problem, cluster, kind, attention) for kind in problem.model.kinds
    ]
    pipeline = _pipeline(grid, problem, layers, head(grid, problem, cluster))
    pipeline["p2p"] = _p2p(grid, problem, cluster)
    last_counts = problem.model.counts(grid.pp - 1, grid.pp)
    stage = Stage.of(grid, problem, last_counts, 2 if grid.pp == 1 else 1)
    grad = _gradients(grid, problem, cluster, stage)
    if problem.overlap_grad:
        grad = np.maximum(0.0, grad - _backward(grid, layers, last_counts))
    param = _parameters(grid, problem, cluster, stage)
    update = optimizer(grid, stage, cluster)
    stages = pipeline["all_fwd_bwd_cost"] + pipeline["bubble"] + pipeline["p2p"]
    total = stages + grad + param + update
    return {
        **_layer(layers),
        **pipeline,
        "pp_comm_cost": pipeline["p2p"] + pipeline["bubble"],
        "zp_comm_cost": param,
        "wdp_comm_cost": grad,
        "grad_sync": grad,
        "param_sync": param,
        "optimizer": update,
        **_rates(grid, problem, cluster, total),
    }


def _layer(layers: list[LayerCost]) -> Costs:
    """Return the seconds of the usual layer by term, and of a layer without experts."""
    usual = layers[0]
    costs: Costs = {
        "overlap_latency": usual.overlap,
        "comp_wp": usual.work.linear,
        "comp_attn": usual.work.attention,
        "elementwise": usual.work.elementwise,
        "wp_comm_cost": usual.gathers,
        "sp_comm_cost": usual.sequence,
    }
    if usual.exchange is not None and usual.exposed is not None:
        costs |= {"ep_comm_cost": usual.exchange, "ep_exposed": usual.exposed}
    if len(layers) > 1:
        costs["dense_layer"] = layers[1].seconds
    return costs


def _pipeline(
    grid: StrategyGrid, problem: SearchProblem, layers: list[LayerCost], logits: Array
) -> Costs:
    """Return the time of the slowest stage, and of the bubble."""
    model, pp = problem.model, grid.pp

    def stage(counts: tuple[int, ...]) -> Array:
        pairs = zip(counts, layers, strict=True)
        return np.asarray(sum(count * layer.seconds for count, layer in pairs))

    whole = stage(model.counts(0, 1)) + logits
    slowest = stage(model.counts(pp - 1, pp)) + logits
    costs: Costs = {"head": logits}
    if len(layers) > 1:
        place = np.full(np.shape(slowest), pp - 1)
        for other in candidate_stages(pp, model)[:-1]:
            time = stage(model.counts(other, pp))
            place, slowest = np.where(time > slowest, other, place), np.maximum(time, slowest)
        costs["slowest_stage"] = place
    return costs | {
        "fwd_bwd_cost": slowest,
        "all_fwd_bwd_cost": grid.num * slowest,
        "bubble": (whole - slowest) / grid.interleave,
    }


def _backward(grid: StrategyGrid, layers: list[LayerCost], counts: tuple[int, ...]) -> Array:
    """Return the compute seconds of a stage's last backward; `counts` has layers per kind."""
    recompute = grid.recompute == FULL
    times = [
        count * (2 * layer.work.linear / (3 + recompute) + layer.work.attention_backward)
        for count, layer in zip(counts, layers, strict=True)
    ]
    return np.asarray(sum(times))


def _rates(grid: StrategyGrid, problem: SearchProblem, cluster: Cluster, total: Array) -> Costs:
    """Return tokens/s/GPU, duration, batch in tokens, MFU and HFU of a step."""
    model, tokens = problem.model, grid.bsz * grid.num * problem.seq_len * grid.dp
    tgs = tokens / (grid.world * total)
    model_flops, hardware_flops = (model.flops(problem.seq_len, passes) for passes in (3, 4))
    flops = np.where(grid.recompute == FULL, hardware_flops, model_flops)
    return {
        "tgs": tgs,
        "total_latency": total,
        "g_bsz": tokens,
        "mfu": tgs * model_flops / cluster.peak,
        "hfu": tgs * flops / cluster.peak,
    }


def _p2p(grid: StrategyGrid, problem: SearchProblem, cluster: Cluster) -> Array | float:
    """Return the seconds of all messages between pipeline stages."""
    if grid.pp == 1:
        return 0.0 * grid.num
    stride = grid.world // grid.pp
    whole = 1.0 * problem.dtype_size * grid.bsz * problem.seq_len * problem.model.hidden
    scatter = grid.algo == "mtp" and problem.p2p == "scatter"
    volume = whole / (grid.sp if scatter else grid.whole)
    if is_inside(cluster, grid.pp, stride):
        message = cluster.alpha_intra + volume / cluster.bw_intra
    else:
        siblings = min(stride, cluster.gpus_per_node)
        message = cluster.alpha_inter + volume * siblings / cluster.bw_node
    if scatter:
        message = message + cluster_collective(cluster, "all_gather", whole, grid.sp)
    return 2 * (grid.num + grid.pp - 1) * grid.interleave * message


_BUCKET = 512 * 2**20  # bytes of a gradient bucket, which is one call


def _gradients(
    grid: StrategyGrid, problem: SearchProblem, cluster: Cluster, stage: Stage
) -> Array:
    """Return the seconds to reduce a stage's gradients over all ranks that hold them."""
    d = problem.dtype_size
    time = _bucketed(cluster, "all_reduce", np.float64(d * stage.unsharded), grid.dp, grid.sp)
    for piece in stage.pieces:
        for part in _reductions(problem, cluster, piece):
            time = time + part
    return time


def _reductions(
    problem: SearchProblem, cluster: Cluster, piece: ShardedElements
) -> tuple[Array, ...]:
    """Return the seconds of the collectives that reduce the gradients of a piece."""
    d, n = problem.dtype_size, piece.replicas
    volume, stride = d * piece.elements / piece.grads, piece.stride * piece.grads
    if problem.grad_sync == "all_reduce":
        return (_bucketed(cluster, "all_reduce", volume, n // piece.grads, stride),)
    scattered = d * piece.elements / piece.os
    return (
        _bucketed(cluster, "reduce_scatter", volume, piece.os // piece.grads, stride),
        _bucketed(cluster, "all_reduce", scattered, n // piece.os, piece.stride * piece.os),
    )


def _bucketed(
    cluster: Cluster,
    op: str,
    volume: Array | np.float64,
    ranks: NDArray[np.int64] | int,
    stride: NDArray[np.int64] | int,
) -> Array:
    """Return the seconds of a collective of `volume` bytes, with one call per bucket."""
    calls = np.maximum(1, np.ceil(volume / _BUCKET))
    return cluster_collective(cluster, op, volume, ranks, stride, calls)


def _parameters(
    grid: StrategyGrid, problem: SearchProblem, cluster: Cluster, stage: Stage
) -> Array:
    """Return the seconds to send updated parameters to all ranks that need them."""
    d = problem.dtype_size
    unsharded = cluster_collective(cluster, "broadcast", d * stage.unsharded, grid.dp, grid.sp)
    time = np.zeros(len(grid.os))
    for piece in stage.pieces:
        parts, stride = piece.os // piece.para, piece.stride * piece.para
        volume = d * piece.elements / piece.para
        if problem.param_sync == "all_gather":
            time = time + cluster_collective(cluster, "all_gather", volume, parts, stride)
        else:
            time = time + cluster_collective(cluster, "broadcast", volume, parts, stride, parts)
    return np.maximum(time, unsharded) if grid.isp else time


# Bytes of the CUDA context, NCCL buffers and fragmentation.
CONTEXT_BYTES = 1.5e9
# Bytes a parameter that the optimizer's step needs besides its states: an fp32 gradient and
# flat buffers (InternEvo's own table of memory).
_STEP_BYTES = 16


def memory(grid: StrategyGrid, problem: SearchProblem) -> BytesByName:
    """Return the bytes of the fullest stage by name; `total_mm_cost` is their total."""
    fullest: BytesByName | None = None
    for stage in candidate_stages(grid.pp, problem.model):
        terms = _stage(grid, problem, stage)
        if fullest is None:
            fullest = terms
            continue
        is_fuller = terms["total_mm_cost"] > fullest["total_mm_cost"]
        fullest = {name: np.where(is_fuller, terms[name], fullest[name]) for name in terms}
    assert fullest is not None  # there is a first stage
    return fullest


def _stage(grid: StrategyGrid, problem: SearchProblem, place: int) -> BytesByName:
    """Return the terms of the memory of pipeline stage `place`."""
    pp, d = grid.pp, problem.dtype_size
    last = place == pp - 1
    counts = problem.model.counts(place, pp)
    stage = Stage.of(grid, problem, counts, int(place == 0) + int(last))
    pieces, states = stage.pieces, stage.states(grid)
    weights = d * (sum(piece.elements / piece.para for piece in pieces) + stage.unsharded)
    grads = d * (sum(piece.elements / piece.grads for piece in pieces) + stage.unsharded)
    in_flight = np.minimum(grid.num, pp - place)
    activations = _activations(grid, problem, in_flight, counts)
    activations |= _last(grid, problem) if last else dict.fromkeys(_LAST, 0.0)
    others = _buffers(grid, problem, sum(counts))
    activation, buffers = (
        sum((np.asarray(term) for term in terms.values()), np.float64(0))
        for terms in (activations, others)
    )
    fixed = weights + grads + 12 * states
    peak = fixed + _STEP_BYTES * states
    return {
        "total_mm_cost": CONTEXT_BYTES + np.maximum(fixed + activation + buffers, peak),
        "os_mm_cost": 12 * states,
        "p_g_mm_cost": weights + grads,
        "step_peak": CONTEXT_BYTES + peak,
        "activation": activation,
        "stage": np.float64(place),
        **activations,
        **others,
    }


def _activations(
    grid: StrategyGrid, problem: SearchProblem, in_flight: Array, counts: tuple[int, ...]
) -> BytesByName:
    """Return the bytes of activations of a stage with `in_flight` micro-batches."""
    d, seq, model = problem.dtype_size, problem.seq_len, problem.model
    unit = d / 2 * grid.bsz * seq * model.hidden
    virtual = grid.pp * grid.interleave
    in_flight = np.where(
        grid.interleave > np.int64(1), in_flight * (1 + (grid.pp - 1) / virtual), in_flight
    )
    scores = 0.0 if problem.flash else 5 * model.heads * seq / (model.hidden * grid.sp)
    saved_scores = np.where(grid.recompute == NONE, scores, 0.0)
    kinds = [
        (count, grid.activations(problem, kind))
        for count, kind in zip(counts, model.kinds, strict=True)
        if count
    ]
    full = grid.recompute == FULL
    recomputed = unit * (max(saved for _, saved in kinds) + scores)
    inputs = d * grid.bsz * seq * model.hidden / grid.whole
    layers = sum(in_flight * count * (unit * (saved + saved_scores)) for count, saved in kinds)
    return {
        "blocks_activation": np.where(full, recomputed, layers),
        "block_output_activation": np.where(full, in_flight * sum(counts) * inputs, 0.0),
    }


_LAST = (
    *("norm_activation", "head_input_activation", "head_output_activation"),
    "backward_mem_peak",
)


def _last(grid: StrategyGrid, problem: SearchProblem) -> BytesByName:
    """Return the activations around the head, on the last stage."""
    model, d, sp = problem.model, problem.dtype_size, grid.sp
    tokens = 1.0 * grid.bsz * problem.seq_len
    peak = 2 * d * tokens * model.hidden * (1 + 1 / sp) + d * model.embedding / sp
    return {
        "norm_activation": 4 * tokens * model.hidden / grid.whole,
        "head_input_activation": d * tokens * model.hidden / grid.whole,
        "head_output_activation": (d + 4) * tokens * model.vocab / sp,
        "backward_mem_peak": peak,
    }


def _buffers(grid: StrategyGrid, problem: SearchProblem, layers: int) -> BytesByName:
    """Return gathered weights, rotary tables and the pipeline buffer of a stage."""
    model, d = problem.model, problem.dtype_size
    kind = model.kinds[0]
    weights = sum(elements * count for elements, count in kind.matrices)
    pool = np.where(grid.para > 1, 4 * d * weights / grid.tp, 0.0)
    if kind.experts:
        routed = 4 * d * model.expert_parameters / grid.ep
        pool = pool + np.where(experts_of(grid, routed).para > 1, routed, 0.0)
    piece = d * grid.bsz * problem.seq_len * model.hidden / grid.whole
    return {
        "mem_pool_mm": pool,
        "rotary_emb_sincos_cache_mm": 2.0 * d * layers * problem.seq_len * model.rotary / 2,
        "pp_p2p_buffer": piece if grid.pp > 1 else 0.0,
    }


def evaluate(grid: StrategyGrid, problem: SearchProblem, cluster: Cluster) -> dict[str, Any]:
    """Return every field of a grid's only strategy: seconds, bytes and rates by name.

    Parameters
    ----------
    grid, problem, cluster
        A grid with one strategy, see `StrategyGrid.one`; the job; the hardware.

    """
    fields = price(grid, problem, cluster) | memory(grid, problem)
    return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in fields.items()}
