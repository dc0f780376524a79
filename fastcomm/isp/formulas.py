"""The design note's own formulas, callable alone: bytes, seconds, bytes a second.

The design note writes `p` ranks, a start `alpha` a step, and the time of a byte.
"""

from math import log2


def ring(ranks: int, volume: float, alpha: float, bandwidth: float) -> float:
    """Seconds of a ring: a start a step, and each rank's share but its own."""
    return (ranks - 1) * alpha + (ranks - 1) / ranks * volume / bandwidth


def tree(ranks: int, volume: float, alpha: float, bandwidth: float) -> float:
    """Seconds of a tree: starts grow with the logarithm only."""
    return log2(ranks) * alpha + (ranks - 1) / ranks * volume / bandwidth


COMM_MODELS = {"ring": ring, "tree": tree}


def parameters(shard: int, volume: float, alpha: float, bandwidth: float) -> float:
    """Seconds of the two gathers of a sharded model: forward and backward."""
    return 2 * ring(shard, volume, alpha, bandwidth)


def gradients(
    shard: int, volume: float, alpha: float, bandwidth: float, micro_num: int
) -> float:
    """Seconds of the reduce-scatters of a step, one a micro-batch."""
    return micro_num * ring(shard, volume, alpha, bandwidth)


def states(
    shard: int, volume: float, alpha: float, bandwidth: float, times: float = 3
) -> float:
    """Seconds of the broadcasts after the optimizer; the search itself counts one."""
    return times * ring(shard, volume, alpha, bandwidth)


def all_to_all(
    shard: int, volume: float, alpha: float, bandwidth: float, calls: int = 4
) -> float:
    """Seconds of a layer's four forward all-to-alls in a node, which share one start."""
    return ring(shard, calls * volume, alpha, bandwidth)


def scaling_efficiency(rate: float, rate_of_one: float) -> float:
    """T_1 / (T_N N) where rates are tokens a GPU and second."""
    return rate / rate_of_one


def two_gpus(algo: str) -> dict[str, float]:
    """What each of two ranks sends a layer and keeps, in units of D b S h and of D/2 b S h."""
    sent = {"mtp": (4.0, 6.0), "msp": (4.0, 6.0), "fsp": (5.0, 7.0), "isp": (2.0, 3.0)}[algo]
    whole = {"mtp": 8, "msp": 4, "fsp": 0, "isp": 0}[algo]
    return {
        "sent": sent[0],
        "sent_with_checkpoints": sent[1],
        "kept": whole + (118 / 3 - whole) / 2,
    }
