"""Time of a layer, forward and backward: matrix products, attention, experts, communication."""

from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.hardware import Cluster
from fastcomm.hardware.measurements import AttentionTable
from fastcomm.isp import Question
from fastcomm.isp.block import FULL, NONE, Block, ShardedElements, Stage, experts_of, layers_of
from fastcomm.isp.communication import by_node, collective
from fastcomm.isp.model import Experts, Layer

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Correction:
    """For each measured length, logarithms of widths, and the ratios forward and backward."""

    lengths: Array
    widths: tuple[Array, ...]
    ratios: tuple[Array, ...]

    @classmethod
    def of(cls, table: AttentionTable, cluster: Cluster) -> "Correction":
        """Equal widths, however they come about, count by their mean."""
        where: dict[int, dict[int, list[tuple[float, float]]]] = {}
        for (b, s, hidden), (forward, backward) in table.items():
            ratio = (
                forward / float(cluster.attention.forward(b, s, hidden)),
                backward / float(cluster.attention.backward(b, s, hidden)),
            )
            where.setdefault(s, {}).setdefault(b * hidden, []).append(ratio)
        lengths = sorted(where)
        widths = [sorted(where[length]) for length in lengths]
        ratios = [
            np.array([np.mean(where[length][width], axis=0) for width in each]).T
            for length, each in zip(lengths, widths, strict=True)
        ]
        logs = tuple(np.log(each) for each in widths)
        return cls(np.log(lengths), logs, tuple(ratios))

    def at(self, seq: float, local: ArrayLike) -> tuple[Array, Array]:
        """Both ratios of a length and batch x hidden elements, clamped, by logarithms."""
        length, width = float(np.log(seq)), np.log(np.asarray(local, np.float64))
        above = int(np.clip(np.searchsorted(self.lengths, length), 0, len(self.lengths) - 1))
        below = max(above - 1, 0) if length < self.lengths[above] else above
        if below == above:
            return self._line(above, 0, width), self._line(above, 1, width)
        share = (length - self.lengths[below]) / (self.lengths[above] - self.lengths[below])
        ends = [[self._line(k, way, width) for way in (0, 1)] for k in (below, above)]
        forward, backward = (
            low + share * (high - low) for low, high in zip(*ends, strict=True)
        )
        return forward, backward

    def _line(self, place: int, way: int, width: Array) -> Array:
        return np.asarray(np.interp(width, self.widths[place], self.ratios[place][way]))


def copies(block: Block, question: Question, experts: Experts) -> Array:
    """Copies of tokens that the fullest rank sends, and works on, in a micro-batch."""
    tokens = 1.0 * block.bsz * question.seq_len / block.sp
    return np.asarray(tokens * experts.top_k * question.imbalance)


def product(block: Block, question: Question, cluster: Cluster, experts: Experts) -> Array:
    """One of the three products of all experts of a rank, forward, as one grouped kernel.

    Few tokens do not make it faster than reading the weights.
    """
    work = 2.0 * copies(block, question, experts) * question.model.hidden * experts.ffn
    read = question.dtype_size * _expert_weights(block, question, experts) / cluster.hbm
    return np.maximum(cluster.gemm.seconds(work), read)


def _expert_weights(block: Block, question: Question, experts: Experts) -> float:
    """Elements of one matrix, of all experts of a rank."""
    return experts.number / block.ep * question.model.hidden * experts.ffn


def _expert_exchange(
    block: Block, question: Question, cluster: Cluster, experts: Experts
) -> Array:
    """Seconds of a layer's dispatches and combines, forward and backward."""
    volume = question.dtype_size * question.model.hidden * copies(block, question, experts)
    calls = 4 + 2 * (block.ck == FULL).astype(np.float64)
    if question.dispatch == "copies":
        return np.asarray(calls * collective(cluster, "all_to_all", volume, block.ep))
    nodes = -(-block.ep // cluster.gpus_per_node)
    once = by_node(cluster, volume, block.ep, visited(experts, nodes) / experts.top_k)
    return np.asarray(calls * once)


def visited(experts: Experts, nodes: int) -> float:
    """Nodes that a token's experts lie on, on average, if all are as likely."""
    near = min(nodes, experts.node_limit or nodes)
    # Of the experts on so many nodes, none of the token's is on a given one.
    number = experts.number * near // nodes
    missed = comb(number - number // near, experts.top_k) / comb(number, experts.top_k)
    return near * (1 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A layer's attention, once each way; what is recomputed does not count."""

    forward: Array
    backward: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A layer, forward and backward, by rows of a block; what is recomputed counts."""

    # One product of each shape, forward, and how many there are.
    products: tuple[tuple[Array, int], ...]
    linear: Array
    attention: Array
    attention_backward: Array
    elementwise: Array


def compute(
    block: Block, question: Question, cluster: Cluster, layer: Layer, attention: Attention
) -> Compute:
    """Arithmetic of one kind of layer."""
    tokens = 2.0 * block.bsz * question.seq_len / block.sp
    products = [
        (cluster.gemm.seconds(tokens * elements), count) for elements, count in layer.matrices
    ]
    if layer.experts:
        products.append((product(block, question, cluster, layer.experts), 3))
    again = (block.ck == FULL).astype(np.float64)
    forward = sum(time * count for time, count in products)
    repeats = again if question.flash else (block.ck != NONE).astype(np.float64)
    unit = question.dtype_size / 2 * block.bsz * question.seq_len * question.model.hidden
    return Compute(
        products=tuple(products),
        linear=(3 + again) * forward,
        attention=(1 + repeats) * attention.forward + attention.backward,
        attention_backward=attention.backward,
        elementwise=2 * (2.5 + again) * unit * block.touched(question, layer) / cluster.hbm,
    )


def head(block: Block, question: Question, cluster: Cluster) -> Array:
    """Logits of a micro-batch, forward and backward."""
    tokens = 2.0 * block.bsz * question.seq_len / block.sp
    return np.asarray(3 * cluster.gemm.seconds(tokens * question.model.embedding))


def attend(
    block: Block, question: Question, cluster: Cluster, measured: Correction | None = None
) -> Attention:
    """A layer's attention."""
    model, seq, sp = question.model, float(question.seq_len), block.sp
    if not question.flash:
        flops = 4.0 * block.bsz * seq**2 * model.hidden * model.breadth / sp
        moved = 12.0 * block.bsz * model.heads * seq**2 / sp
        forward = flops / cluster.unfused + moved / cluster.hbm
        return Attention(forward=forward, backward=2 * forward)
    local = model.hidden * model.breadth / sp
    forward = cluster.attention.forward(block.bsz, seq, local)
    backward = cluster.attention.backward(block.bsz, seq, local)
    if measured:
        ahead, back = measured.at(seq, block.bsz * local)
        forward, backward = forward * ahead, backward * back
    return Attention(forward=forward, backward=backward)


def optimizer(block: Block, stage: Stage, cluster: Cluster) -> Array:
    """Seconds of the update: fp32 states read and written, weights written and cleared."""
    states = stage.states(block)
    weights = sum(piece.elements / piece.para for piece in stage.pieces) + stage.rest
    return np.asarray((30 * states + 4 * weights) / cluster.hbm)


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
        exchange = _expert_exchange(block, question, cluster, layer.experts)
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
        routed = np.array([[d * _expert_weights(block, question, layer.experts)]])
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


def _gathered(cluster: Cluster, volume: Array, piece: ShardedElements) -> Array:
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
