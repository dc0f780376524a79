"""Times of collectives on a cluster, in a layer and once a step."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.hardware.cluster import Cluster, LinkFit
from fastcomm.isp.block import Block, ShardedElements, Stage
from fastcomm.isp.question import Question

Floats = NDArray[np.float64]


def factor(op: str, ranks: ArrayLike) -> Floats:
    """Bytes that a rank sends, as a share of the volume."""
    n = np.asarray(ranks, np.float64)
    if op == "p2p":
        return np.ones_like(n)
    return (2 if op == "all_reduce" else 1) * (n - 1) / n


def is_inside(cluster: Cluster, ranks: ArrayLike, stride: ArrayLike) -> NDArray[np.bool_]:
    """Whether a group lies in one node."""
    n, room = np.asarray(ranks, np.float64), cluster.gpus_per_node
    return np.asarray((n <= room) & ((n - 1) * np.asarray(stride) <= room - 1))


def collective(
    cluster: Cluster,
    op: str,
    volume: ArrayLike,
    ranks: ArrayLike,
    stride: ArrayLike = 1,
    calls: ArrayLike = 1,
) -> Floats:
    """Seconds to move `volume` in so many calls."""
    n = np.asarray(ranks, np.float64)
    inside = is_inside(cluster, n, stride)
    size, count = np.asarray(volume, np.float64), np.asarray(calls, np.float64)
    share = np.where(inside, 1.0, np.minimum(stride, cluster.gpus_per_node))
    if op == "all_to_all":
        time = count * start(cluster, n, inside) + _exchange(cluster, size, n, inside, share)
    else:
        width = bandwidth(cluster, n, inside)
        time = count * start(cluster, n, inside) + factor(op, n) * size * share / width
    if fits := cluster.fits.get(op):
        once = _fitted(cluster, fits, factor(op, n) * size * share / count, n, inside)
        time = np.where(np.isnan(once), time, once * count)
    return np.asarray(np.where(n > 1, time, 0.0))


def start(cluster: Cluster, ranks: Floats, inside: NDArray[np.bool_]) -> Floats:
    """Seconds before the first byte."""
    if cluster.comm_model != "call":
        steps = ranks - 1 if cluster.comm_model == "ring" else np.log2(np.maximum(ranks, 1))
        return np.asarray(steps * np.where(inside, cluster.alpha_intra, cluster.alpha_inter))
    beyond = cluster.alpha_rank * np.maximum(0.0, ranks - cluster.alpha_from)
    return np.asarray(np.where(inside, cluster.alpha_intra, cluster.alpha_inter + beyond))


def bandwidth(cluster: Cluster, ranks: Floats, inside: NDArray[np.bool_]) -> Floats:
    """Bytes a second that a rank in a node, or a node in a larger group, sends."""
    return np.asarray(
        np.where(inside, cluster.bw_intra, cluster.bw_node / _slow(cluster, ranks))
    )


def _slow(cluster: Cluster, ranks: Floats) -> Floats:
    steps = np.array([most for most, _ in cluster.contention])
    divisors = np.array([divisor for _, divisor in cluster.contention])
    return divisors[np.minimum(np.searchsorted(steps, ranks), len(steps) - 1)]


def _exchange(
    cluster: Cluster, volume: Floats, ranks: Floats, inside: NDArray[np.bool_], share: Floats
) -> Floats:
    """All-to-all: what leaves a node and what stays inside move at the same time."""
    room = cluster.gpus_per_node
    piece = volume / np.maximum(ranks, 1)
    away = (
        room * piece * np.maximum(ranks - room, 0) / (cluster.bw_node / _slow(cluster, ranks))
    )
    near = piece * (np.minimum(ranks, room) - 1) / cluster.bw_intra
    return np.asarray(np.where(inside, near, np.maximum(away * share, near)))


def by_node(cluster: Cluster, volume: ArrayLike, ranks: int, share: float) -> Floats:
    """All-to-all of consecutive ranks that sends `share` of its bytes to other nodes.

    What has arrived goes on inside its node, to as many ranks as without.
    """
    n, size = np.asarray(ranks, np.float64), np.asarray(volume, np.float64)
    room = cluster.gpus_per_node
    if ranks <= room:
        return collective(cluster, "all_to_all", size, n)
    away = room * share * size * (1 - room / n) * _slow(cluster, n) / cluster.bw_node
    near = size * (room - 1) / room / cluster.bw_intra
    return np.asarray(start(cluster, n, is_inside(cluster, n, 1)) + np.maximum(away, near))


def _fitted(
    cluster: Cluster,
    fits: tuple[LinkFit, ...],
    moved: Floats,
    ranks: Floats,
    inside: NDArray[np.bool_],
) -> Floats:
    """The measured lines; NaN in a node or between nodes if nothing was measured there."""
    room = cluster.gpus_per_node
    near = [fit for fit in fits if fit.ranks <= room]
    far = [fit for fit in fits if fit.ranks > room]
    return np.where(inside, _lines(near, moved, ranks), _lines(far, moved, ranks))


def _lines(fits: list[LinkFit], moved: Floats, ranks: Floats) -> Floats:
    """Between measured group sizes by the logarithm of the size."""
    if not fits:
        return np.full(np.broadcast(moved, ranks).shape, np.nan)
    at, sizes = np.log(np.maximum(ranks, 1)), np.log([fit.ranks for fit in fits])
    alpha, bus, small_alpha, small_bus = (
        np.interp(at, sizes, [getattr(fit, name) for fit in fits])
        for name in ("alpha", "bus", "small_alpha", "small_bus")
    )
    return np.asarray(np.minimum(alpha + moved / bus, small_alpha + moved / small_bus))


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
