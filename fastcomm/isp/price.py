"""Time of a step: layers, pipeline, gradient synchronization, optimizer."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.hardware.cluster import Cluster
from fastcomm.isp.block import FULL, Block, Stage, places
from fastcomm.isp.communication import collective, gradients, is_inside, parameters
from fastcomm.isp.layer import Correction, LayerCost, attend, head, layer_cost, optimizer
from fastcomm.isp.memory import memory
from fastcomm.isp.question import Question

Array = NDArray[Any]
Costs = dict[str, Any]


def price(
    block: Block, question: Question, cluster: Cluster, measured: Correction | None = None
) -> Costs:
    """Every time of a step, in seconds, and its rates."""
    attention = attend(block, question, cluster, measured)
    layers = [
        layer_cost(block, question, cluster, kind, attention) for kind in question.model.kinds
    ]
    pipe = _pipeline(block, question, layers, head(block, question, cluster))
    pipe["p2p"] = _p2p(block, question, cluster)
    last = question.model.counts(block.pp - 1, block.pp)
    stage = Stage.of(block, question, last, 2 if block.pp == 1 else 1)
    grad = gradients(block, question, cluster, stage)
    if question.overlap_grad:
        grad = np.maximum(0.0, grad - _backward(block, layers, last))
    param = parameters(block, question, cluster, stage)
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
    """The record of the usual layer; of that without experts its time alone."""
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
    """The slowest stage, and the wait for the others: with v virtual stages 1/v of them."""
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


def evaluate(block: Block, question: Question, cluster: Cluster) -> dict[str, Any]:
    """Every number of a single strategy, by the names of a record."""
    found = price(block, question, cluster) | memory(block, question)
    return {name: float(np.asarray(value).reshape(-1)[0]) for name, value in found.items()}
