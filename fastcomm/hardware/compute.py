"""Fit GEMM and attention speed to timed kernels."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.hardware.cluster import AttentionCurve, Cluster, GemmCurve

Array = NDArray[np.float64]

WAYS = ("attention forward", "attention backward")


class Product(NamedTuple):
    """A product of matrices as it was timed."""

    flops: float
    seconds: float


class Attended(NamedTuple):
    """A causal attention as it was timed; `hidden` is that of all heads of the rank."""

    backward: bool
    bsz: int
    seq_len: int
    hidden: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeResidual:
    """How well work of one kind and size is described."""

    what: str
    calls: int
    # Median of the work, and the rate measured on it, over that of the curve before.
    flops: float
    rate: float
    efficiency: float
    # After the fit.
    median_error: float
    worst_error: float


def fit_products(
    cluster: Cluster, products: list[Product]
) -> tuple[Cluster, list[ComputeResidual]]:
    """The curve through the median rate of each octave of FLOPs; its shape beyond them."""
    curve = cluster.gemm
    if not products or not isinstance(curve, GemmCurve):
        return cluster, []
    flops, seconds = (np.array(column) for column in zip(*products, strict=True))
    octave = np.floor(np.log2(flops))
    groups = [octave == each for each in np.unique(octave)]
    middle = np.array([np.median(flops[group]) for group in groups])
    rate = np.array([np.median(flops[group] / seconds[group]) for group in groups])
    ratio = rate * curve.seconds(middle) / middle
    fitted = _through(curve, middle, rate, ratio)
    found = [
        ComputeResidual(
            what="products",
            calls=int(group.sum()),
            flops=float(middle[place]),
            rate=float(rate[place]),
            efficiency=float(ratio[place]),
            **_off(fitted.seconds(flops[group]), seconds[group]),
        )
        for place, group in enumerate(groups)
    ]
    return replace(cluster, gemm=fitted), found


def _through(curve: GemmCurve, flops: Array, rate: Array, ratio: Array) -> GemmCurve:
    knots = dict(zip(flops.tolist(), rate.tolist(), strict=True))
    for known, usual in zip(curve.flops, curve.rates, strict=True):
        if not flops[0] <= known <= flops[-1]:
            knots[known] = usual * float(ratio[0] if known < flops[0] else ratio[-1])
    places, rates = sorted(knots), []
    slowest = np.inf
    for place in reversed(places):
        # Less work never takes more time.
        slowest = min(slowest, place / knots[place])
        rates.append(place / slowest)
    return GemmCurve(flops=tuple(places), rates=tuple(reversed(rates)))


def fit_attention(
    cluster: Cluster, calls: list[Attended]
) -> tuple[Cluster, list[ComputeResidual]]:
    """The curve with both of its slopes scaled by the median call, each way by its own."""
    curve, found = cluster.attention, []
    for way, what in enumerate(WAYS):
        mine = [call for call in calls if call.backward == bool(way)]
        if not mine:
            continue
        seconds = np.array([call.seconds for call in mine])
        before = _attention(curve, mine, way)
        start = curve.start[way]
        slower = float(np.median(np.maximum(seconds - start, 0.1 * seconds) / (before - start)))
        curve = _scaled(curve, way, slower)
        flops = np.array(
            [(5 if way else 2) * c.bsz * c.seq_len**2 * float(c.hidden) for c in mine]
        )
        found.append(
            ComputeResidual(
                what=what,
                calls=len(mine),
                flops=float(np.median(flops)),
                rate=float(np.median(flops / seconds)),
                efficiency=1 / slower,
                **_off(_attention(curve, mine, way), seconds),
            )
        )
    return replace(cluster, attention=curve), found


def _attention(curve: AttentionCurve, calls: list[Attended], way: int) -> Array:
    ask = curve.backward if way else curve.forward
    return np.array([float(ask(each.bsz, each.seq_len, each.hidden)) for each in calls])


def _scaled(curve: AttentionCurve, way: int, slower: float) -> AttentionCurve:
    element, rate = list(curve.element), list(curve.rate)
    element[way] *= slower
    rate[way] /= slower
    return AttentionCurve(
        start=curve.start, element=(element[0], element[1]), rate=(rate[0], rate[1])
    )


def _off(fitted: Array, seconds: Array) -> dict[str, float]:
    off = np.abs(fitted / seconds - 1)
    return {"median_error": float(np.median(off)), "worst_error": float(off.max())}
