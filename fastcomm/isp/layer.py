"""Seconds of a layer, forward and backward: arithmetic, and the communication that shows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp import experts
from fastcomm.isp.block import FULL, Block
from fastcomm.isp.communication import collective
from fastcomm.isp.compute import Attention, Compute, compute
from fastcomm.isp.model import Layer
from fastcomm.isp.question import Question
from fastcomm.isp.stage import Piece, experts_of, layers_of

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One kind of layer and one micro-batch."""

    work: Compute
    # Gathers and reductions of weights; products with what of those shows.
    gathers: Array
    overlap: Array
    sequence: Array
    # The experts' all-to-alls, and what of them shows; None without experts.
    exchange: Array | None
    exposed: Array | None
    seconds: Array


def layer_cost(
    block: Block, question: Question, cluster: Cluster, layer: Layer, attention: Attention
) -> LayerCost:
    """What one kind of layer costs."""
    work = compute(block, question, cluster, layer, attention)
    gathers, overlap = weights(block, question, cluster, layer, work)
    moved = sequence(block, question, cluster, layer)
    seconds = overlap + moved + work.attention + work.elementwise
    exchange = exposed = None
    if layer.experts:
        exchange = experts.exchange(block, question, cluster, layer.experts)
        exposed = _exposed(question, work, exchange)
        seconds = seconds + exposed
    return LayerCost(
        work=work,
        gathers=gathers,
        overlap=overlap,
        sequence=moved,
        exchange=exchange,
        exposed=exposed,
        seconds=seconds,
    )


def _exposed(question: Question, work: Compute, exchange: Array) -> Array:
    if not question.overlap_experts:
        return exchange
    arithmetic = work.linear + work.attention + work.elementwise
    contention = question.penalty * np.minimum(arithmetic, exchange)
    return np.asarray(np.maximum(0.0, exchange - arithmetic) + contention)


def weights(
    block: Block, question: Question, cluster: Cluster, layer: Layer, work: Compute
) -> tuple[Array, Array]:
    """Seconds to gather and reduce a layer's weights, and of products with them overlapped."""
    d, k, tp = question.dtype_size, question.penalty, block.tp
    volume = np.array([[d * elements / tp] for elements, _ in layer.matrices])
    each = _gathered(cluster, volume, layers_of(block, 0.0))
    if layer.experts:
        routed = np.array([[d * experts.weights(block, question, layer.experts)]])
        each = np.concatenate([each, _gathered(cluster, routed, experts_of(block, 0.0))])
    counts = np.array([[count] for _, count in work.products])
    comm = (each * counts).sum(axis=0)
    if question.overlap == "layer":
        both = np.maximum(work.linear, comm) + k * np.minimum(work.linear, comm)
        return comm, np.where(comm > 0, both, work.linear)
    passes = 3 + (block.ck == FULL)
    both = sum(
        count * (np.maximum(passes * time, moved) + k * np.minimum(passes * time, moved))
        for (time, count), moved in zip(work.products, each, strict=True)
    )
    return comm, np.where(comm > 0, both, work.linear)


def _gathered(cluster: Cluster, volume: Array, piece: Piece) -> Array:
    """Two gathers and a reduction of each volume."""
    each = 2 * collective(cluster, "all_gather", volume, piece.para, piece.stride)
    return each + collective(cluster, "reduce_scatter", volume, piece.grads, piece.stride)


def sequence(block: Block, question: Question, cluster: Cluster, layer: Layer) -> Array:
    """Seconds of a layer's all-to-alls, gathers or reductions of activations."""
    model, again = question.model, (block.ck == FULL).astype(np.float64)
    volume = 1.0 * question.dtype_size * block.bsz * question.seq_len * model.hidden
    if block.isp:
        # Keys and values are repeated up to the shards, where they are fewer.
        group = max(model.kv_heads, min(block.sp, model.heads)) / model.heads
        volume = volume * model.breadth
        once = collective(cluster, "all_to_all", volume / block.sp, block.sp)
        return np.asarray(once * (8 + 4 * again) * (2 + 2 * group) / 4)
    if block.algo == "mtp":
        return np.asarray(collective(cluster, "all_reduce", volume, block.sp) * (4 + 2 * again))
    calls = (8 if block.algo == "msp" else 10) + 4 * again
    # Routed experts take tokens as they are sharded: those around attention are left.
    calls = calls / 2 if layer.experts and not layer.experts.shared else calls
    return np.asarray(collective(cluster, "all_gather", volume, block.sp) * calls)
