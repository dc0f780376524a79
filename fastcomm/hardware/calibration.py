"""Fit a cluster's links, GEMMs and attention to timed messages and kernels."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcomm.errors import ConfigError
from fastcomm.hardware import AttentionCurve, Cluster, GemmCurve, LinkFit, bus_factor
from fastcomm.hardware.measurements import TimedMessage

Array = NDArray[np.float64]
Line = tuple[float, float]

_ROUNDS = 30
_FLOOR = 0.02
# A second line has to explain this much more, and needs so many sizes on each side.
_GAIN = 0.8
_SIDE = 3
_FAST = 0.1
# Sizes have to be this far apart.
_SPAN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Fit of one operation in one group size, in seconds and bytes per second."""

    op: str
    ranks: int
    messages: int
    sizes: int
    alpha: float
    bus: float
    median_error: float
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeResidual:
    """Fit of work of one kind and size: FLOPs, and FLOPs per second."""

    what: str
    calls: int
    # Median of the work, and the rate measured on it, over that of the curve before.
    flops: float
    rate: float
    efficiency: float
    # After the fit.
    median_error: float
    worst_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted cluster, the errors of its lines and curves, and what was not fitted."""

    cluster: Cluster
    residuals: tuple[Residual, ...] = ()
    compute: tuple[ComputeResidual, ...] = ()
    # In words.
    skipped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return how well links and compute are described, as it stands in JSON."""
        return {
            "calibration": [
                {
                    "op": each.op,
                    "ranks": each.ranks,
                    "messages": each.messages,
                    "sizes": each.sizes,
                    "start_ns": each.alpha * 1e9,
                    "bus_bytes_per_s": each.bus,
                    "median_error": each.median_error,
                    "worst_error": each.worst_error,
                }
                for each in self.residuals
            ],
            "calibration_compute": [
                {
                    "what": each.what,
                    "calls": each.calls,
                    "flops": each.flops,
                    "flops_per_s": each.rate,
                    "efficiency": each.efficiency,
                    "median_error": each.median_error,
                    "worst_error": each.worst_error,
                }
                for each in self.compute
            ],
        }


def calibrate(
    cluster: Cluster, messages: list[TimedMessage], *, waits: bool = False
) -> Calibration:
    """Fit every operation and group size; `waits` says that times hold waiting, too."""
    grouped: dict[tuple[str, int], list[TimedMessage]] = defaultdict(list)
    for message in messages:
        if message.op != "p2p":
            grouped[message.op, message.ranks].append(message)
    if not grouped:
        raise ConfigError("calibration: no collective with a size, a group and a time")
    fits: dict[str, list[LinkFit]] = defaultdict(list)
    residuals, skipped = [], []
    for (op, ranks), group in sorted(grouped.items()):
        moved, time = _by_size(group, waits)
        moved = moved * bus_factor(op, ranks)
        usual = _usual_start(cluster, ranks)
        if len(time) == 1 and time[0] < 2 * usual:
            spent = f"{time[0] * 1e6:.0f} us"
            skipped.append(f"{op} on {ranks}: one size in {spent}, mostly its start")
            continue
        lines = _lines(moved, time, usual)
        fits[op].append(_fit(ranks, *lines))
        residuals.append(_residual(op, ranks, len(group), lines, (moved, time)))
    measured = replace(cluster, fits={op: tuple(lines) for op, lines in fits.items()})
    return Calibration(cluster=measured, residuals=tuple(residuals), skipped=tuple(skipped))


def _fit(ranks: int, small: Line, large: Line) -> LinkFit:
    return LinkFit(
        ranks=ranks, alpha=large[0], bus=large[1], small_alpha=small[0], small_bus=small[1]
    )


def _residual(
    op: str, ranks: int, messages: int, lines: tuple[Line, Line], measured: tuple[Array, Array]
) -> Residual:
    moved, time = measured
    errors = np.abs(_faster(*lines, moved) / time - 1)
    return Residual(
        op=op,
        ranks=ranks,
        messages=messages,
        sizes=len(time),
        alpha=lines[1][0],
        bus=lines[1][1],
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
    )


def _usual_start(cluster: Cluster, ranks: int) -> float:
    return cluster.alpha_intra if ranks <= cluster.gpus_per_node else cluster.alpha_inter


def _by_size(group: list[TimedMessage], waits: bool) -> tuple[Array, Array]:
    sizes: dict[float, list[float]] = defaultdict(list)
    for message in group:
        sizes[message.volume].append(message.seconds)
    volumes = sorted(sizes)
    share = _FAST if waits else 0.5
    if volumes[-1] < _SPAN * volumes[0]:
        # So close to one another they tell one number, not a start and a bandwidth.
        times = [message.seconds for message in group]
        return np.array([np.median(volumes)]), np.array([np.quantile(times, share)])
    return np.array(volumes), np.array([np.quantile(sizes[v], share) for v in volumes])


def _lines(moved: Array, time: Array, usual: float) -> tuple[Line, Line]:
    """Return the lines of small and large messages; equal if two explain little more."""
    whole = _line(moved, time, usual)
    best, pair = _GAIN * _misfit(_faster(whole, whole, moved), time), (whole, whole)
    for cut in range(_SIDE, len(time) - _SIDE + 1):
        small = _line(moved[:cut], time[:cut], usual)
        large = _line(moved[cut:], time[cut:], usual)
        misfit = _misfit(_faster(small, large, moved), time)
        if small[0] <= large[0] and small[1] <= large[1] and misfit < best:
            best, pair = misfit, (small, large)
    return pair


def _faster(small: Line, large: Line, moved: Array) -> Array:
    return np.minimum(small[0] + moved / small[1], large[0] + moved / large[1])


def _misfit(found: Array, time: Array) -> float:
    return float(np.abs(found / time - 1).mean())


def _line(moved: Array, time: Array, usual: float) -> Line:
    """Start and bandwidth with the least relative errors, each counted once, not squared."""
    if len(time) == 1:
        # One size tells one number: the start is the usual one, or all there is.
        start = min(usual, 0.5 * float(time[0]))
        return start, float(moved[0] / (time[0] - start))
    weight = 1 / time
    for _ in range(_ROUNDS):
        system = np.stack([weight, moved * weight], axis=1)
        (start, slope), *_ = np.linalg.lstsq(system, time * weight, rcond=None)
        if start < 0:
            start, slope = 0.0, float(np.median(time / moved))
        if slope <= 0:
            start, slope = 0.0, float(np.median(time / moved))
        error = np.abs((start + slope * moved) / time - 1)
        weight = 1 / time / np.sqrt(np.maximum(error, _FLOOR))
    return float(start), float(1 / slope)


_WAYS = ("attention forward", "attention backward")


class Product(NamedTuple):
    """A timed product of matrices."""

    flops: float
    seconds: float


class Attended(NamedTuple):
    """A timed causal attention; `hidden` counts all heads of the rank."""

    backward: bool
    bsz: int
    seq_len: int
    hidden: int
    seconds: float


def fit_products(
    cluster: Cluster, products: list[Product]
) -> tuple[Cluster, list[ComputeResidual]]:
    """Fit the GEMM curve to the median rate of each octave of FLOPs; keep its shape beyond."""
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
    """Scale both slopes of the attention curve by the median call, for each way."""
    curve, found = cluster.attention, []
    for way, what in enumerate(_WAYS):
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
