"""Seconds of a layer's arithmetic, of the head and of the optimizer. One micro-batch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp.block import FULL, NONE, Block
from fastcomm.isp.question import Question
from fastcomm.isp.tables import AttentionTable

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Forward and backward, by rows of a block; what is recomputed counts."""

    # One product of each shape, forward.
    products: tuple[Array, ...]
    linear: Array
    attention: Array
    attention_backward: Array
    elementwise: Array
    head: Array


def compute(
    block: Block, question: Question, cluster: Cluster, table: AttentionTable | None = None
) -> Compute:
    """Arithmetic of a layer, and of the head."""
    model = question.model
    tokens = 2.0 * block.bsz * question.seq_len / block.sp
    products = tuple(cluster.gemm.seconds(tokens * elements) for elements, _ in model.matrices)
    again = (block.ck == FULL).astype(np.float64)
    forward = sum(
        time * count for time, (_, count) in zip(products, model.matrices, strict=True)
    )
    ahead, back = _attention(block, question, cluster, table)
    repeats = again if question.flash else (block.ck != NONE).astype(np.float64)
    unit = question.dtype_size / 2 * block.bsz * question.seq_len * model.hidden
    return Compute(
        products=products,
        linear=(3 + again) * forward,
        attention=(1 + repeats) * ahead + back,
        attention_backward=back,
        elementwise=2 * (2.5 + again) * unit * block.touched(question) / cluster.hbm,
        head=3 * cluster.gemm.seconds(tokens * model.embedding),
    )


def _attention(
    block: Block, question: Question, cluster: Cluster, table: AttentionTable | None
) -> tuple[Array, Array]:
    model, seq, sp = question.model, float(question.seq_len), block.sp
    if not question.flash:
        flops = 4.0 * block.bsz * seq**2 * model.hidden / sp
        moved = 12.0 * block.bsz * model.heads * seq**2 / sp
        forward = flops / cluster.unfused + moved / cluster.hbm
        return forward, 2 * forward
    local = model.hidden / sp
    forward = cluster.attention.forward(block.bsz, seq, local)
    backward = cluster.attention.backward(block.bsz, seq, local)
    if table:
        ahead, back = correction(table, cluster, seq, block.bsz * local)
        forward, backward = forward * ahead, backward * back
    return forward, backward


def correction(
    table: AttentionTable, cluster: Cluster, seq: float, local: ArrayLike
) -> tuple[Array, Array]:
    """Measured over formula, between measured lengths and widths by their logarithms."""
    where: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for (b, s, hidden), (forward, backward) in table.items():
        ratio = (
            forward / float(cluster.attention.forward(b, s, hidden)),
            backward / float(cluster.attention.backward(b, s, hidden)),
        )
        where.setdefault(s, {}).setdefault(b * hidden, []).append(ratio)
    lengths = sorted(where)
    at = np.log(np.asarray(local, np.float64))
    found = []
    for way in (0, 1):
        lines = []
        for length in lengths:
            widths = sorted(where[length])
            means = [np.mean([pair[way] for pair in where[length][w]]) for w in widths]
            lines.append(np.interp(at, np.log(widths), means))
        found.append(_between(np.log(lengths), lines, float(np.log(seq))))
    return found[0], found[1]


def _between(knots: Array, lines: list[Array], at: float) -> Array:
    above = int(np.clip(np.searchsorted(knots, at), 0, len(knots) - 1))
    below = max(above - 1, 0) if at < knots[above] else above
    if below == above:
        return lines[above]
    share = (at - knots[below]) / (knots[above] - knots[below])
    return np.asarray(lines[below] + share * (lines[above] - lines[below]))


def optimizer(block: Block, stage: "Stage", cluster: Cluster) -> Array:
    """Seconds of the update: fp32 states read and written, weights written and cleared."""
    states = stage.blocks / block.os + stage.rest / min(2, block.dp)
    weights = stage.blocks / block.para + stage.rest
    return np.asarray((30 * states + 4 * weights) / cluster.hbm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Elements of a pipeline stage: those that shards cut, and ISP's embedding and head."""

    blocks: float
    rest: float

    @classmethod
    def of(cls, block: Block, question: Question, layers: int, ends: int) -> "Stage":
        """A stage of so many layers, with so many of embedding and head."""
        model = question.model
        inside = layers * model.layer_parameters / block.tp
        outside = ends * model.embedding / block.sp
        return (
            cls(blocks=inside, rest=outside)
            if block.isp
            else cls(blocks=inside + outside, rest=0.0)
        )
