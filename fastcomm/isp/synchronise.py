"""Seconds that ranks take once a step: gradients reduced, parameters sent."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp.block import Block
from fastcomm.isp.communication import collective
from fastcomm.isp.question import Question
from fastcomm.isp.stage import Piece, Stage

Array = NDArray[Any]

_BUCKET = 512 * 2**20


def gradients(block: Block, question: Question, cluster: Cluster, stage: Stage) -> Array:
    """Reduction of a stage's gradients over all that hold them."""
    d = question.dtype_size
    time = _bucketed(cluster, "all_reduce", np.float64(d * stage.rest), block.dp, block.sp)
    for piece in stage.pieces:
        for part in _reduced(question, cluster, piece):
            time = time + part
    return time


def _reduced(question: Question, cluster: Cluster, piece: Piece) -> tuple[Array, ...]:
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


def parameters(block: Block, question: Question, cluster: Cluster, stage: Stage) -> Array:
    """What the optimizer updated, sent to all that need it."""
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
