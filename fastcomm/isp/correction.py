"""Measured attention over its formula, between what was measured."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.cluster.cluster import Cluster
from fastcomm.isp.tables import AttentionTable

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
