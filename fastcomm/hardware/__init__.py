"""Clusters: GPU, links and measured curves, from shipped files or a user's TOML.

`docs/isp.md` has a table of the keys. All of them describe a `Cluster`; `GpuLinks`, which is
all that an expert all-to-all needs, takes three.
"""

from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.checks import BANDWIDTH, EFFICIENCY, FACTOR, RANKS, START_S, Range, shortened
from fastcomm.errors import ConfigError
from fastcomm.files import parsed_toml, text
from fastcomm.units import GIB, parse_bandwidth, parse_quantity

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Rates at some sizes: log-log between, constant time below, constant rate above."""

    flops: tuple[float, ...]
    rates: tuple[float, ...]

    def seconds(self, flops: ArrayLike) -> Array:
        """Return the time of one product of `flops` FLOPs."""
        work = np.maximum(np.asarray(flops, np.float64), self.flops[0])
        rate = np.exp(np.interp(np.log(work), np.log(self.flops), np.log(self.rates)))
        return np.asarray(work / rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTable:
    """Measured times: linear between, the first time below, proportional above."""

    flops: tuple[float, ...]
    times: tuple[float, ...]

    def seconds(self, flops: ArrayLike) -> Array:
        """Return the time of one product of `flops` FLOPs."""
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
        """Return the time of `bsz` sequences of `seq` tokens of `hidden` local elements."""
        return self._seconds(0, 2, bsz, seq, hidden)

    def backward(self, bsz: ArrayLike, seq: float, hidden: ArrayLike) -> Array:
        """Return the time of the backward pass, which has five halves of the FLOPs."""
        return self._seconds(1, 5, bsz, seq, hidden)

    def _seconds(
        self, way: int, factor: int, bsz: ArrayLike, seq: float, hidden: ArrayLike
    ) -> Array:
        elements = np.asarray(bsz, np.float64) * seq * np.asarray(hidden, np.float64)
        flops = factor * elements * seq
        return np.asarray(
            self.start[way] + self.element[way] * elements + flops / self.rate[way]
        )


def bus_factor(op: str, ranks: ArrayLike) -> Array:
    """Return the bytes that a rank sends, as a share of the volume."""
    n = np.asarray(ranks, np.float64)
    if op == "p2p":
        return np.ones_like(n)
    return np.asarray((2 if op == "all_reduce" else 1) * (n - 1) / n)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of a message: a start-up, and a time a unit."""

    start_s: float = 0.0
    unit_s: float

    @property
    def pair(self) -> tuple[float, float]:
        """As the kernels take it."""
        return float(self.start_s), float(self.unit_s)


_LINK_RANGES = {
    "bytes_per_s": BANDWIDTH,
    "efficiency": EFFICIENCY,
    "start_s": START_S,
    "incast": FACTOR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """Links of one GPU: "inter" to other nodes, by its NIC, and "intra" inside its node.

    An efficiency is the share of a bandwidth that is reached, a start what a message costs
    before its bytes. A receiver is slower by `incast` for each sender beyond the first.
    `ConfigError` for a number out of its range.
    """

    inter_bytes_per_s: float = 50.0 * GIB
    intra_bytes_per_s: float = 400.0 * GIB
    inter_efficiency: float = 1.0
    intra_efficiency: float = 1.0
    inter_start_s: float = 0.0
    intra_start_s: float = 0.0
    incast: float = 0.0

    def __post_init__(self) -> None:
        """Check that every number is in its range."""
        for each in fields(self):
            within = _LINK_RANGES[each.name.split("_", 1)[-1]]
            within.check(getattr(self, each.name), each.name)

    @property
    def inter(self) -> float:
        """Bytes per second that a NIC reaches."""
        return self.inter_bytes_per_s * self.inter_efficiency

    @property
    def intra(self) -> float:
        """Bytes per second that a GPU reaches inside its node."""
        return self.intra_bytes_per_s * self.intra_efficiency

    def inter_cost(self, size: int) -> Cost:
        """Return the time of tokens of `size` bytes on a NIC."""
        return Cost(start_s=self.inter_start_s, unit_s=size / self.inter)

    def intra_cost(self, size: int) -> Cost:
        """Return the time of tokens of `size` bytes inside a node."""
        return Cost(start_s=self.intra_start_s, unit_s=size / self.intra)


_LINK_KEYS = ("gpus_per_node", "bw_intra", "bw_node")
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
    """Return the shipped cluster of that name, or the one that a TOML file describes.

    Raises
    ------
    ConfigError
        If there is no such cluster, or a key is unknown, missing or wrong.

    """
    return parse(_text(name), str(name))


def load_links(name: str | Path, gpus_per_node: int) -> GpuLinks:
    """Return the links of a GPU in a shipped cluster, or in one that a TOML file describes.

    The GPUs of a node share its bandwidth to other nodes evenly. The file needs no keys but
    those of links.

    Raises
    ------
    ConfigError
        If there is no such cluster, a key is unknown, missing or wrong, or its nodes have
        another number of GPUs.

    """
    where = str(name)
    said = _checked_keys(_text(name), where, _LINK_KEYS)
    node, intra = _bandwidths(said, where, ("bw_node", "bw_intra"))
    if (gpus := _gpus(said, where)) != gpus_per_node:
        raise ConfigError(
            f"{where}: gpus_per_node is {gpus}, that of the workload is {gpus_per_node}"
        )
    return GpuLinks(inter_bytes_per_s=node / gpus, intra_bytes_per_s=intra)


def _text(name: str | Path) -> str:
    """Return the TOML text of a shipped cluster, or of a file."""
    if str(name).lower() in shipped():
        source = resources.files("fastcomm.hardware") / "data" / f"{str(name).lower()}.toml"
        return source.read_text("utf-8")
    if not Path(name).exists():
        raise ConfigError(
            f"cluster {str(name)!r}: neither a file nor one of {', '.join(shipped())}"
        )
    return text(Path(name))


def _checked_keys(toml: str, where: str, needed: tuple[str, ...]) -> dict[str, Any]:
    """Parse a TOML text; ConfigError for a key that is unknown or missing."""
    said = parsed_toml(toml, where)
    if unknown := said.keys() - set(_KEYS):
        raise ConfigError(
            f"{where}: unknown key {min(unknown)!r}, known are {', '.join(_KEYS)}"
        )
    if missing := [key for key in needed if key not in said]:
        raise ConfigError(f"{where}: no key {', '.join(missing)}")
    return said


def _bandwidths(said: dict[str, Any], where: str, keys: tuple[str, ...]) -> list[float]:
    return [parse_bandwidth(said[key], f"{where}: {key}") for key in keys]


def _gpus(said: dict[str, Any], where: str) -> int:
    """Return the GPUs of a node, a whole number."""
    gpus = said["gpus_per_node"]
    if type(gpus) is not int or not RANKS.holds(gpus):
        raise ConfigError(f"{where}: gpus_per_node: found {shortened(gpus)}, wanted {RANKS}")
    return gpus


def parse(toml: str, where: str) -> Cluster:
    """Return the cluster that a TOML text describes; `ConfigError` says which key is wrong."""
    said = _checked_keys(toml, where, _KEYS[:-1])
    try:
        return _cluster(said, where)
    except (TypeError, LookupError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {type(error).__name__}: {error}; a shipped file shows the form"
        ) from error


def _cluster(said: dict[str, Any], where: str) -> Cluster:
    _check_ranges(said, where)
    hbm, intra, node = _bandwidths(said, where, ("hbm", "bw_intra", "bw_node"))
    alpha = [float(said["alpha_us"][key]) for key in _ALPHA]
    cluster = Cluster(
        name=str(said["name"]),
        gpus_per_node=_gpus(said, where),
        memory=parse_quantity(said["memory"], f"{where}: memory"),
        peak=float(said["peak_tflops"]) * 1e12,
        hbm=hbm,
        bw_intra=intra,
        bw_node=node,
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
