"""Times of collectives on a cluster, and the traffic of two GPUs by the ISP paper.

Sizes are in bytes, times in seconds, bandwidths in bytes per second. `alpha` is a start-up
time.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.hardware import Cluster
from fastcomm.hardware.curves import FloatArray, LinkFit, bus_factor


def is_inside(cluster: Cluster, ranks: ArrayLike, stride: ArrayLike) -> NDArray[np.bool_]:
    """Return whether each group of ranks lies in one node.

    Parameters
    ----------
    cluster
        Has the number of GPUs of a node.
    ranks
        Number of ranks of each group.
    stride
        Distance between two consecutive ranks of a group.

    """
    n, room = np.asarray(ranks, np.float64), cluster.gpus_per_node
    return np.asarray((n <= room) & ((n - 1) * np.asarray(stride) <= room - 1))


def cluster_collective(
    cluster: Cluster,
    op: str,
    volume: ArrayLike,
    ranks: ArrayLike,
    stride: ArrayLike = 1,
    calls: ArrayLike = 1,
) -> FloatArray:
    """Return the seconds of collectives, from measured lines where the cluster has them.

    Parameters
    ----------
    cluster
        Its fitted lines count before its bandwidths.
    op
        "all_gather", "reduce_scatter", "all_reduce", "broadcast" or "all_to_all".
    volume
        Bytes of all calls together, as nccl-tests counts them.
    ranks
        Size of the group; 1 takes no time.
    stride
        Distance between two consecutive ranks of the group.
    calls
        Number of calls; each has a start-up time.

    """
    n = np.asarray(ranks, np.float64)
    inside = is_inside(cluster, n, stride)
    size, count = np.asarray(volume, np.float64), np.asarray(calls, np.float64)
    share = np.where(inside, 1.0, np.minimum(stride, cluster.gpus_per_node))
    if op == "all_to_all":
        transfer = _exchange(cluster, size, n, inside, share)
    else:
        transfer = bus_factor(op, n) * size * share / bandwidth(cluster, n, inside)
    time = count * start(cluster, n, inside) + transfer
    if fits := cluster.fits.get(op):
        once = _fitted(cluster, fits, bus_factor(op, n) * size * share / count, n, inside)
        time = np.where(np.isnan(once), time, once * count)
    return np.asarray(np.where(n > 1, time, 0.0))


def start(cluster: Cluster, ranks: FloatArray, inside: NDArray[np.bool_]) -> FloatArray:
    """Return the start-up time of a collective in s.

    Parameters
    ----------
    cluster
        Has the model of start-up times: by call, by ring or by tree.
    ranks
        Number of ranks of each group.
    inside
        Whether the group lies in one node.

    """
    if cluster.comm_model != "call":
        steps = ranks - 1 if cluster.comm_model == "ring" else np.log2(np.maximum(ranks, 1))
        return np.asarray(steps * np.where(inside, cluster.alpha_intra, cluster.alpha_inter))
    beyond = cluster.alpha_rank * np.maximum(0.0, ranks - cluster.alpha_from)
    return np.asarray(np.where(inside, cluster.alpha_intra, cluster.alpha_inter + beyond))


def bandwidth(cluster: Cluster, ranks: FloatArray, inside: NDArray[np.bool_]) -> FloatArray:
    """Return the bandwidth of a collective in bytes/s.

    It is that of a rank for groups in a node, else that of a node, with its contention.

    Parameters
    ----------
    cluster
        Has the bandwidths.
    ranks
        Number of ranks of each group.
    inside
        Whether the group lies in one node.

    """
    node = cluster.bw_node / _contention(cluster, ranks)
    return np.asarray(np.where(inside, cluster.bw_intra, node))


def _contention(cluster: Cluster, ranks: FloatArray) -> FloatArray:
    """Return the divisor of a node's bandwidth in groups of `ranks` ranks."""
    steps = np.array([most for most, _ in cluster.contention])
    divisors = np.array([divisor for _, divisor in cluster.contention])
    return divisors[np.minimum(np.searchsorted(steps, ranks), len(steps) - 1)]


def _exchange(
    cluster: Cluster,
    volume: FloatArray,
    ranks: FloatArray,
    inside: NDArray[np.bool_],
    share: FloatArray,
) -> FloatArray:
    """Return the seconds of an all-to-all; links in and between nodes work at once.

    `volume` is in bytes, and `share` is the number of groups that share the links of a
    node.
    """
    room = cluster.gpus_per_node
    piece = volume / np.maximum(ranks, 1)
    node = cluster.bw_node / _contention(cluster, ranks)
    inter = room * piece * np.maximum(ranks - room, 0) / node
    intra = piece * (np.minimum(ranks, room) - 1) / cluster.bw_intra
    return np.asarray(np.where(inside, intra, np.maximum(inter * share, intra)))


def by_node(cluster: Cluster, volume: ArrayLike, ranks: int, share: float) -> FloatArray:
    """Return the seconds of an all-to-all that sends part of its bytes to other nodes.

    Ranks are consecutive. The bytes that arrive in a node are forwarded to all of its ranks
    that need them.

    Parameters
    ----------
    cluster
        Has bandwidths and start-up times.
    volume
        Bytes of a rank.
    ranks
        Number of ranks of the group; inside a node it is a plain all-to-all.
    share
        Share of the bytes that goes to other nodes, 0 to 1.

    """
    n, size = np.asarray(ranks, np.float64), np.asarray(volume, np.float64)
    room = cluster.gpus_per_node
    if ranks <= room:
        return cluster_collective(cluster, "all_to_all", size, n)
    inter = room * share * size * (1 - room / n) * _contention(cluster, n) / cluster.bw_node
    intra = size * (room - 1) / room / cluster.bw_intra
    return np.asarray(start(cluster, n, is_inside(cluster, n, 1)) + np.maximum(inter, intra))


def _fitted(
    cluster: Cluster,
    fits: tuple[LinkFit, ...],
    moved: FloatArray,
    ranks: FloatArray,
    inside: NDArray[np.bool_],
) -> FloatArray:
    """Return the seconds for `moved` bus bytes by measured lines; NaN without measurements."""
    room = cluster.gpus_per_node
    near = [fit for fit in fits if fit.ranks <= room]
    far = [fit for fit in fits if fit.ranks > room]
    return np.where(inside, _lines(near, moved, ranks), _lines(far, moved, ranks))


def _lines(fits: list[LinkFit], moved: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return the time of collectives by fits at several group sizes, in seconds.

    The parameters of the fits are interpolated linearly in the logarithm of the group size. NaN
    without fits.

    Parameters
    ----------
    fits
        Fits of one operation, by ascending group size.
    moved
        Bus bytes of each collective.
    ranks
        Ranks of the group of each collective.

    """
    if not fits:
        return np.full(np.broadcast(moved, ranks).shape, np.nan)
    at, sizes = np.log(np.maximum(ranks, 1)), np.log([fit.ranks for fit in fits])
    alpha, bus, small_alpha, small_bus = (
        np.interp(at, sizes, [getattr(fit, name) for fit in fits])
        for name in ("alpha", "bus", "small_alpha", "small_bus")
    )
    return np.asarray(np.minimum(alpha + moved / bus, small_alpha + moved / small_bus))


# By algorithm: what a rank sends, with checkpoints, and the activations that both ranks repeat.
_TWO_GPUS = {
    "mtp": (4.0, 6.0, 8),
    "msp": (4.0, 6.0, 4),
    "fsp": (5.0, 7.0, 0),
    "isp": (2.0, 3.0, 0),
}


def two_gpus(algo: str) -> dict[str, float]:
    """Return what each of two ranks sends and saves per layer.

    `algo` is "mtp", "msp", "fsp" or "isp". `sent` and `sent_with_checkpoints` are in units of
    D b S h bytes, `kept` in units of D/2 b S h bytes, where D is the bytes of an element.
    """
    sent, with_checkpoints, repeated = _TWO_GPUS[algo]
    saved = repeated + (118 / 3 - repeated) / 2
    return {"sent": sent, "sent_with_checkpoints": with_checkpoints, "kept": saved}
