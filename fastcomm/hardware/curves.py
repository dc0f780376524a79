"""Curves of a cluster: times of GEMMs, attention and collectives by their sizes.

Times are in seconds, sizes in bytes, rates in FLOPs or bytes per second.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Not of `fastcomm_kernels`, which takes half a second to import.
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Rate (FLOPs/s) by FLOPs of a matrix product.

    It is log-log between the knots; the time is constant below, and the rate above.
    """

    flops: tuple[float, ...]
    rates: tuple[float, ...]

    def seconds(self, flops: ArrayLike) -> FloatArray:
        """Return the time of one matrix product of `flops` FLOPs, in s."""
        work = np.maximum(np.asarray(flops, np.float64), self.flops[0])
        rate = np.exp(np.interp(np.log(work), np.log(self.flops), np.log(self.rates)))
        return np.asarray(work / rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTable:
    """Time (s) by FLOPs of a matrix product.

    It is linear between the entries, the first one's below, and proportional above.
    """

    flops: tuple[float, ...]
    times: tuple[float, ...]

    def seconds(self, flops: ArrayLike) -> FloatArray:
        """Return the time of one matrix product of `flops` FLOPs, in s."""
        work = np.asarray(flops, np.float64)
        beyond = np.maximum(work / self.flops[-1], 1.0)
        return np.asarray(np.interp(work, self.flops, self.times) * beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Time of causal FlashAttention: a start, a time per element and a time per FLOP.

    Each field has a value for the forward and one for the backward pass.
    """

    start: tuple[float, float]
    element: tuple[float, float]  # seconds per element
    rate: tuple[float, float]  # FLOPs per second

    def forward(self, bsz: ArrayLike, seq: float, hidden: ArrayLike) -> FloatArray:
        """Return the seconds of the forward pass of attention.

        Parameters
        ----------
        bsz
            Number of sequences.
        seq
            Tokens of a sequence.
        hidden
            Hidden size on a GPU.

        """
        return self._seconds(0, 2, bsz, seq, hidden)

    def backward(self, bsz: ArrayLike, seq: float, hidden: ArrayLike) -> FloatArray:
        """Return the seconds of the backward pass, which has 2.5 times the FLOPs.

        Parameters are those of `forward`.
        """
        return self._seconds(1, 5, bsz, seq, hidden)

    def _seconds(
        self, way: int, factor: int, bsz: ArrayLike, seq: float, hidden: ArrayLike
    ) -> FloatArray:
        """Return the seconds of a pass (forward 0, backward 1); `factor` scales its FLOPs."""
        elements = np.asarray(bsz, np.float64) * seq * np.asarray(hidden, np.float64)
        compute = factor * elements * seq / self.rate[way]
        return np.asarray(self.start[way] + self.element[way] * elements + compute)


def bus_factor(op: str, ranks: ArrayLike) -> FloatArray:
    """Return the bytes that each rank sends, as a share of the volume of a collective.

    The factors are those of nccl-tests' bus bandwidth; 1 for point-to-point messages.
    """
    n = np.asarray(ranks, np.float64)
    if op == "p2p":
        return np.ones_like(n)
    return np.asarray((2 if op == "all_reduce" else 1) * (n - 1) / n)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Measured lines of one operation in one group size; the faster of the two counts.

    Small messages use another protocol, with a shorter start-up time and a lower bus bandwidth.
    """

    ranks: int
    alpha: float  # start-up time
    bus: float  # bus bandwidth
    small_alpha: float
    small_bus: float
