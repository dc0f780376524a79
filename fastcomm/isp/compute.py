"""Seconds of a layer's arithmetic and of the head, for one micro-batch; of the optimizer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp import experts
from fastcomm.isp.block import FULL, NONE, Block
from fastcomm.isp.correction import Correction
from fastcomm.isp.model import Layer
from fastcomm.isp.question import Question
from fastcomm.isp.stage import Stage

Array = NDArray[Any]


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
        products.append((experts.product(block, question, cluster, layer.experts), 3))
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
