"""Clusters: GPU, links and measured curves, from shipped files or a user's TOML."""

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.checks import RANKS, Range
from fastcomm.errors import ConfigError
from fastcomm.inputs import parsed_toml, text
from fastcomm.units import parse_bandwidth, parse_quantity

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


COMM_MODELS = ("call", "ring", "tree")
OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "p2p")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """One operation in one group size: the faster of two lines, seconds over bus bytes.

    Small messages have a protocol of their own: a shorter start and a lower bandwidth.
    """

    ranks: int
    alpha: float
    bus: float
    small_alpha: float
    small_bus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hardware, all that a strategy's time and memory depend on."""

    name: str
    gpus_per_node: int
    memory: float
    peak: float
    hbm: float
    bw_intra: float
    bw_node: float
    # What is left of a node's bandwidth in a group of up to so many ranks: divisors.
    contention: tuple[tuple[int, float], ...]
    alpha_intra: float
    alpha_inter: float
    # Each rank beyond `alpha_from` adds this to the start of a collective over nodes.
    alpha_rank: float
    alpha_from: int
    gemm: GemmCurve | GemmTable
    attention: AttentionCurve
    unfused: float
    fits: dict[str, tuple[LinkFit, ...]] = field(default_factory=dict)
    # A start a call, a step of a ring, or a level of a tree.
    comm_model: str = "call"
    # What of this was not measured.
    note: str = ""


_KEYS = (
    *("name", "gpus_per_node", "memory", "peak_tflops", "hbm", "bw_intra", "bw_node"),
    *("contention", "alpha_us", "gemm", "attention", "unfused_tflops", "note"),
)
_ALPHA = ("intra", "inter", "rank", "from")
_ATTENTION = ("start_us", "element_ps", "tflops")
_TFLOPS = Range(1e-6, 1e9)
_FLOPS = Range(1, 1e24)
_COUNT = Range(1, 1 << 31)
_DIVISOR = Range(1e-3, 1e6)
_SMALL = Range(0, 1e9)  # us, ps, and the ranks of alpha_us.from


def shipped() -> list[str]:
    """Names of the clusters that come with the package."""
    folder = resources.files("fastcomm.hardware") / "data"
    return sorted(each.name[:-5] for each in folder.iterdir() if each.name.endswith(".toml"))


def load(name: str | Path) -> Cluster:
    """The shipped cluster of that name, or the one that a TOML file describes."""
    if str(name).lower() in shipped():
        source = resources.files("fastcomm.hardware") / "data" / f"{str(name).lower()}.toml"
        return parse(source.read_text("utf-8"), str(name))
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"cluster {str(name)!r}: neither a file nor one of {', '.join(shipped())}"
        )
    return parse(text(path), str(path))


def parse(words: str, where: str) -> Cluster:
    """The cluster that a TOML text describes; `ConfigError` says which key is wrong."""
    said = parsed_toml(words, where)
    if unknown := said.keys() - set(_KEYS):
        raise ConfigError(
            f"{where}: unknown key {min(unknown)!r}, known are {', '.join(_KEYS)}"
        )
    if missing := [key for key in _KEYS[:-1] if key not in said]:
        raise ConfigError(f"{where}: no key {', '.join(missing)}")
    try:
        return _cluster(said, where)
    except (TypeError, LookupError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {type(error).__name__}: {error}; a shipped file shows the form"
        ) from error


def _cluster(said: dict[str, Any], where: str) -> Cluster:
    _check_ranges(said, where)
    alpha = [float(said["alpha_us"][key]) for key in _ALPHA]
    cluster = Cluster(
        name=str(said["name"]),
        gpus_per_node=int(said["gpus_per_node"]),
        memory=parse_quantity(said["memory"], f"{where}: memory"),
        peak=float(said["peak_tflops"]) * 1e12,
        hbm=parse_bandwidth(said["hbm"]),
        bw_intra=parse_bandwidth(said["bw_intra"]),
        bw_node=parse_bandwidth(said["bw_node"]),
        contention=tuple((int(n), float(factor)) for n, factor in said["contention"]),
        alpha_intra=alpha[0] * 1e-6,
        alpha_inter=alpha[1] * 1e-6,
        alpha_rank=alpha[2] * 1e-6,
        alpha_from=int(alpha[3]),
        gemm=_gemm(said["gemm"]),
        attention=_attention(said["attention"]),
        unfused=float(said["unfused_tflops"]) * 1e12,
        note=str(said.get("note", "")),
    )
    _check(cluster, where)
    return cluster


def _gemm(knots: list[list[float]]) -> GemmCurve:
    return GemmCurve(
        flops=tuple(float(flops) for flops, _ in knots),
        rates=tuple(float(tflops) * 1e12 for _, tflops in knots),
    )


def _attention(said: dict[str, list[float]]) -> AttentionCurve:
    start, element, rate = (said[key] for key in _ATTENTION)
    return AttentionCurve(
        start=(start[0] * 1e-6, start[1] * 1e-6),
        element=(element[0] * 1e-12, element[1] * 1e-12),
        rate=(rate[0] * 1e12, rate[1] * 1e12),
    )


def _check(cluster: Cluster, where: str) -> None:
    steps = [n for n, _ in cluster.contention]
    if not steps or steps != sorted(set(steps)):
        raise ConfigError(f"{where}: contention has to rise in ranks, found {steps}")
    if not cluster.gemm.flops or list(cluster.gemm.flops) != sorted(set(cluster.gemm.flops)):
        raise ConfigError(f"{where}: gemm has to rise in FLOPs, found {cluster.gemm.flops}")


def _check_ranges(said: dict[str, Any], where: str) -> None:
    """Raise `ConfigError` for the first number out of its range, with its key."""
    checks = {
        "gpus_per_node": ([said["gpus_per_node"]], RANKS),
        "peak_tflops": ([said["peak_tflops"]], _TFLOPS),
        "unfused_tflops": ([said["unfused_tflops"]], _TFLOPS),
        "contention, ranks": ([ranks for ranks, _ in said["contention"]], _COUNT),
        "contention, divisors": ([divisor for _, divisor in said["contention"]], _DIVISOR),
        "gemm, FLOPs": ([flops for flops, _ in said["gemm"]], _FLOPS),
        "gemm, TFLOPS": ([tflops for _, tflops in said["gemm"]], _TFLOPS),
        "attention.tflops": (said["attention"]["tflops"], _TFLOPS),
        "attention.start_us": (said["attention"]["start_us"], _SMALL),
        "attention.element_ps": (said["attention"]["element_ps"], _SMALL),
        **{f"alpha_us.{key}": ([said["alpha_us"][key]], _SMALL) for key in _ALPHA},
    }
    for key, (values, within) in checks.items():
        for value in values:
            within.check(value, f"{where}: {key}")
