"""Seconds of a step: layers, pipeline, synchronisation, optimizer; and its rates."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp.block import FULL, Block
from fastcomm.isp.communication import collective, is_inside
from fastcomm.isp.compute import Compute, Stage, compute, optimizer
from fastcomm.isp.question import Question
from fastcomm.isp.tables import AttentionTable

Array = NDArray[Any]
Costs = dict[str, Any]

_BUCKET = 512 * 2**20


def price(
    block: Block, question: Question, cluster: Cluster, table: AttentionTable | None = None
) -> Costs:
    """Every time of a step, in seconds, and its rates."""
    work = compute(block, question, cluster, table)
    comm_wp, overlap = weights(block, question, cluster, work)
    sp_comm = sequence(block, question, cluster)
    layer = overlap + sp_comm + work.attention + work.elementwise
    layers, pp, num = question.model.layers, block.pp, block.num
    longest = -(-layers // pp)
    all_stages = layers * layer + work.head
    slowest = longest * layer + work.head
    # With v virtual stages a rank waits for 1/v of the other stages.
    bubble = (all_stages - slowest) / question.interleave
    p2p = _p2p(block, question, cluster)
    stage = Stage.of(block, question, longest, 2 if pp == 1 else 1)
    grad = _gradients(block, question, cluster, stage)
    hidden = longest * (2 * work.linear / (3 + (block.ck == FULL)) + work.attention_backward)
    grad = np.maximum(0.0, grad - hidden) if question.overlap_grad else grad
    param = _parameters(block, question, cluster, stage)
    update = optimizer(block, stage, cluster)
    total = num * slowest + bubble + p2p + grad + param + update
    tokens = block.bsz * num * question.seq_len * block.dp
    tgs = tokens / (block.world * total)
    model = question.model
    three, four = (model.flops(question.seq_len, passes) for passes in (3, 4))
    return {
        "tgs": tgs,
        "total_latency": total,
        "fwd_bwd_cost": slowest,
        "all_fwd_bwd_cost": num * slowest,
        "overlap_latency": overlap,
        "comp_wp": work.linear,
        "comp_attn": work.attention,
        "pp_comm_cost": p2p + bubble,
        "zp_comm_cost": param,
        "wp_comm_cost": comm_wp,
        "sp_comm_cost": sp_comm,
        "wdp_comm_cost": grad,
        "g_bsz": tokens,
        "head": work.head,
        "elementwise": work.elementwise,
        "optimizer": update,
        "grad_sync": grad,
        "param_sync": param,
        "bubble": bubble,
        "p2p": p2p,
        "mfu": tgs * three / cluster.peak,
        "hfu": tgs * np.where(block.ck == FULL, four, three) / cluster.peak,
    }


def weights(
    block: Block, question: Question, cluster: Cluster, work: Compute
) -> tuple[Array, Array]:
    """Seconds to gather and reduce a layer's weights, and of products with them overlapped."""
    d, k, tp = question.dtype_size, question.penalty, block.tp
    counts = np.array([[count] for _, count in question.model.matrices])
    volume = np.array([[d * elements / tp] for elements, _ in question.model.matrices])
    each = 2 * collective(cluster, "all_gather", volume, block.para, tp)
    each += collective(cluster, "reduce_scatter", volume, block.grads, tp)
    comm = (each * counts).sum(axis=0)
    if question.overlap == "layer":
        both = np.maximum(work.linear, comm) + k * np.minimum(work.linear, comm)
        return comm, np.where(comm > 0, both, work.linear)
    passes = 3 + (block.ck == FULL)
    both = sum(
        count * (np.maximum(passes * time, moved) + k * np.minimum(passes * time, moved))
        for time, moved, count in zip(work.products, each, counts, strict=True)
    )
    return comm, np.where(comm > 0, both, work.linear)


def sequence(block: Block, question: Question, cluster: Cluster) -> Array:
    """Seconds of a layer's all-to-alls, gathers or reductions of activations."""
    model, again = question.model, (block.ck == FULL).astype(np.float64)
    volume = 1.0 * question.dtype_size * block.bsz * question.seq_len * model.hidden
    if block.isp:
        # Keys and values are repeated up to the shards, where they are fewer.
        group = max(model.kv_heads, min(block.sp, model.heads)) / model.heads
        once = collective(cluster, "all_to_all", volume / block.sp, block.sp)
        return np.asarray(once * (8 + 4 * again) * (2 + 2 * group) / 4)
    if block.algo == "mtp":
        return np.asarray(collective(cluster, "all_reduce", volume, block.sp) * (4 + 2 * again))
    calls = (8 if block.algo == "msp" else 10) + 4 * again
    return np.asarray(collective(cluster, "all_gather", volume, block.sp) * calls)


def _p2p(block: Block, question: Question, cluster: Cluster) -> Array | float:
    if block.pp == 1:
        return 0.0 * block.num
    stride = block.world // block.pp
    volume = 1.0 * question.dtype_size * block.bsz * question.seq_len * question.model.hidden
    volume = volume / block.whole
    if is_inside(cluster, block.pp, stride):
        one = cluster.alpha_intra + volume / cluster.bw_intra
    else:
        siblings = min(stride, cluster.gpus_per_node)
        one = cluster.alpha_inter + volume * siblings / cluster.bw_node
    return 2 * (block.num + block.pp - 1) * question.interleave * one


def _gradients(block: Block, question: Question, cluster: Cluster, stage: Stage) -> Array:
    d, n, tp = question.dtype_size, block.replicas, block.tp
    rest = _bucketed(cluster, "all_reduce", np.float64(d * stage.rest), block.dp, block.sp)
    if question.grad_sync == "all_reduce":
        volume = d * stage.blocks / block.grads
        return rest + _bucketed(
            cluster, "all_reduce", volume, n // block.grads, tp * block.grads
        )
    halves = block.os // block.grads
    volume = d * stage.blocks / block.grads
    scattered = _bucketed(cluster, "reduce_scatter", volume, halves, tp * block.grads)
    reduced = _bucketed(
        cluster, "all_reduce", d * stage.blocks / block.os, n // block.os, tp * block.os
    )
    return rest + scattered + reduced


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
    d = question.dtype_size
    parts, stride = block.os // block.para, block.tp * block.para
    rest = collective(cluster, "broadcast", d * stage.rest, block.dp, block.sp)
    volume = d * stage.blocks / block.para
    if question.param_sync == "all_gather":
        sent = collective(cluster, "all_gather", volume, parts, stride)
    else:
        sent = collective(cluster, "broadcast", volume, parts, stride, parts)
    return np.maximum(sent, rest) if block.isp else sent
