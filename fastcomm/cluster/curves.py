"""How fast a GPU multiplies matrices and attends, by the size of the work.

Times are seconds; work is FLOPs of bf16. A curve is continuous.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Rates at some sizes: log-log between, constant time below, constant rate above."""

    flops: tuple[float, ...]
    rates: tuple[float, ...]

    def seconds(self, flops: ArrayLike) -> Array:
        """Time of one product of `flops` FLOPs."""
        work = np.maximum(np.asarray(flops, np.float64), self.flops[0])
        rate = np.exp(np.interp(np.log(work), np.log(self.flops), np.log(self.rates)))
        return np.asarray(work / rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTable:
    """Measured times: linear between, the first time below, proportional above."""

    flops: tuple[float, ...]
    times: tuple[float, ...]

    def seconds(self, flops: ArrayLike) -> Array:
        """Time of one product of `flops` FLOPs."""
        work = np.asarray(flops, np.float64)
        beyond = np.maximum(work / self.flops[-1], 1.0)
        return np.asarray(np.interp(work, self.flops, self.times) * beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Causal FlashAttention: a start, a share by element, a share by FLOP; each way."""

    start: tuple[float, float]
    element: tuple[float, float]
    rate: tuple[float, float]

    def forward(self, bsz: ArrayLike, seq: float, hidden: ArrayLike) -> Array:
        """Time of b sequences of `seq` tokens and `hidden` local elements a token."""
        return self._seconds(0, 2, bsz, seq, hidden)

    def backward(self, bsz: ArrayLike, seq: float, hidden: ArrayLike) -> Array:
        """The same, backward: five halves of the FLOPs."""
        return self._seconds(1, 5, bsz, seq, hidden)

    def _seconds(
        self, way: int, factor: int, bsz: ArrayLike, seq: float, hidden: ArrayLike
    ) -> Array:
        elements = np.asarray(bsz, np.float64) * seq * np.asarray(hidden, np.float64)
        flops = factor * elements * seq
        return np.asarray(
            self.start[way] + self.element[way] * elements + flops / self.rate[way]
        )
