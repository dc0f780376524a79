"""Seconds of a collective on a cluster; a group is its size and the stride of its ranks.

Volume is the whole gathered, reduced or per-rank all-to-all buffer, in bytes. A group of one
costs nothing. Every call pays its start.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.cluster.cluster import Cluster, LinkFit

Array = NDArray[np.float64]


def factor(op: str, ranks: ArrayLike) -> Array:
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
) -> Array:
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


def start(cluster: Cluster, ranks: Array, inside: NDArray[np.bool_]) -> Array:
    """Seconds before the first byte."""
    if cluster.comm_model != "call":
        steps = ranks - 1 if cluster.comm_model == "ring" else np.log2(np.maximum(ranks, 1))
        return np.asarray(steps * np.where(inside, cluster.alpha_intra, cluster.alpha_inter))
    beyond = cluster.alpha_rank * np.maximum(0.0, ranks - cluster.alpha_from)
    return np.asarray(np.where(inside, cluster.alpha_intra, cluster.alpha_inter + beyond))


def bandwidth(cluster: Cluster, ranks: Array, inside: NDArray[np.bool_]) -> Array:
    """Bytes a second that a rank in a node, or a node in a larger group, sends."""
    return np.asarray(
        np.where(inside, cluster.bw_intra, cluster.bw_node / _slow(cluster, ranks))
    )


def _slow(cluster: Cluster, ranks: Array) -> Array:
    steps = np.array([most for most, _ in cluster.contention])
    divisors = np.array([divisor for _, divisor in cluster.contention])
    return divisors[np.minimum(np.searchsorted(steps, ranks), len(steps) - 1)]


def _exchange(
    cluster: Cluster, volume: Array, ranks: Array, inside: NDArray[np.bool_], share: Array
) -> Array:
    """All-to-all: what leaves a node and what stays inside move at the same time."""
    room = cluster.gpus_per_node
    piece = volume / np.maximum(ranks, 1)
    away = (
        room * piece * np.maximum(ranks - room, 0) / (cluster.bw_node / _slow(cluster, ranks))
    )
    near = piece * (np.minimum(ranks, room) - 1) / cluster.bw_intra
    return np.asarray(np.where(inside, near, np.maximum(away * share, near)))


def by_node(cluster: Cluster, volume: ArrayLike, ranks: int, share: float) -> Array:
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
    moved: Array,
    ranks: Array,
    inside: NDArray[np.bool_],
) -> Array:
    """The measured lines; NaN in a node or between nodes if nothing was measured there."""
    room = cluster.gpus_per_node
    near = [fit for fit in fits if fit.ranks <= room]
    far = [fit for fit in fits if fit.ranks > room]
    return np.where(inside, _lines(near, moved, ranks), _lines(far, moved, ranks))


def _lines(fits: list[LinkFit], moved: Array, ranks: Array) -> Array:
    """Between measured group sizes by the logarithm of the size."""
    if not fits:
        return np.full(np.broadcast(moved, ranks).shape, np.nan)
    at, sizes = np.log(np.maximum(ranks, 1)), np.log([fit.ranks for fit in fits])
    alpha, bus, small_alpha, small_bus = (
        np.interp(at, sizes, [getattr(fit, name) for fit in fits])
        for name in ("alpha", "bus", "small_alpha", "small_bus")
    )
    return np.asarray(np.minimum(alpha + moved / bus, small_alpha + moved / small_bus))
