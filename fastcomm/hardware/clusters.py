"""Clusters: GPU, links and measured curves, from shipped files or a user's TOML.

`docs/isp.md` has a table of the keys. A `Cluster` needs all of them, some of which its GPU may
have; `GpuLinks`, for expert all-to-alls, needs three. Times are in seconds, sizes in bytes,
bandwidths in bytes per second, and rates in FLOPs per second.
"""

from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fastcomm.checks import BANDWIDTH, EFFICIENCY, FACTOR, RANKS, START_S, Range, shortened
from fastcomm.errors import ConfigError
from fastcomm.files import parsed_toml, text
from fastcomm.hardware.gpus import AttentionCurve, GemmCurve, GemmTable, LinkFit, gpu_sheet
from fastcomm.units import GIB, parse_bandwidth, parse_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hardware that the time and memory of a strategy depend on."""

    name: str
    gpus_per_node: int
    memory: float  # of a GPU
    peak: float  # FLOPs per second of a GPU
    hbm: float  # memory bandwidth of a GPU
    bw_intra: float  # of a GPU inside its node
    bw_node: float  # of a node to other nodes
    # (ranks, divisor): divides `bw_node` in groups of up to `ranks` ranks.
    contention: tuple[tuple[int, float], ...]
    alpha_intra: float  # start-up time inside a node
    alpha_inter: float  # start-up time between nodes
    # Added to `alpha_inter` for each rank beyond `alpha_from`.
    alpha_rank: float
    alpha_from: int
    gemm: GemmCurve | GemmTable
    attention: AttentionCurve
    unfused: float  # FLOPs per second of the matrix products of unfused attention
    fits: dict[str, tuple[LinkFit, ...]] = field(default_factory=dict)  # by operation
    # Start-up time per call ("call"), step of a ring ("ring") or level of a tree ("tree").
    comm_model: str = "call"
    note: str = ""  # which values were not measured
    gpu: str = ""  # name of the shipped GPU, see `gpu.Gpu`


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of a message: a start-up time, and a time per unit of its size."""

    start_s: float = 0.0
    unit_s: float

    @property
    def pair(self) -> tuple[float, float]:
        """Start-up time in s, and seconds per unit of the size, as kernels take them."""
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

    An efficiency is the reached share of a bandwidth. `incast` slows a receiver down for each
    sender beyond the first. Raises `ConfigError` for a number out of its range.
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
        for option in fields(self):
            valid_range = _LINK_RANGES[option.name.split("_", 1)[-1]]
            valid_range.check(getattr(self, option.name), option.name)

    @property
    def inter(self) -> float:
        """Reached bandwidth of a NIC, bytes/s."""
        return self.inter_bytes_per_s * self.inter_efficiency

    @property
    def intra(self) -> float:
        """Reached bandwidth of a GPU inside its node, bytes/s."""
        return self.intra_bytes_per_s * self.intra_efficiency

    def costs(self, size: int) -> tuple[Cost, Cost]:
        """Return the costs of tokens of `size` bytes: through a NIC, and inside a node."""
        return (
            Cost(start_s=self.inter_start_s, unit_s=size / self.inter),
            Cost(start_s=self.intra_start_s, unit_s=size / self.intra),
        )


_LINK_KEYS = ("gpus_per_node", "bw_intra", "bw_node")
_KEYS = (
    *("name", "gpus_per_node", "memory", "peak_tflops", "hbm", "bw_intra", "bw_node"),
    *("contention", "alpha_us", "gemm", "attention", "unfused_tflops", "note", "gpu"),
)
_ALPHA = ("intra", "inter", "rank", "from")
_ATTENTION = ("start_us", "element_ps", "tflops")
_TFLOPS = Range(1e-6, 1e9)
_FLOPS = Range(1, 1e24)
_COUNT = Range(1, 1 << 31)
_DIVISOR = Range(1e-3, 1e6)
_SMALL = Range(0, 1e9)  # us, ps, and the ranks of alpha_us.from


def shipped() -> list[str]:
    """Return the sorted names of the clusters that come with the package."""
    folder = resources.files("fastcomm.hardware") / "data"
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".toml"))


def load(name: str | Path) -> Cluster:
    """Return the shipped cluster of that name, or the one that a TOML file describes.

    The name of a GPU is that of its usual cluster: "h100" is "dgx-h100".

    Raises
    ------
    ConfigError
        If there is no such cluster, or a key is unknown, missing or invalid.

    """
    return parse(_text(name), str(name))


def check_gpu(cluster: Cluster, where: str | Path) -> None:
    """Raise ConfigError if a cluster does not say which GPU it has; `where` begins it."""
    if not cluster.gpu:
        others = [name for name in shipped() if load(name).gpu]
        raise ConfigError(
            f"{where}: no key gpu, whose kernels would be priced; clusters that have it: "
            f"{', '.join(others)}"
        )


def load_links(name: str | Path, gpus_per_node: int) -> GpuLinks:
    """Return the links of a GPU in a shipped cluster, or in one that a TOML file describes.

    The GPUs of a node share its bandwidth to other nodes evenly. The file needs only the keys
    of links.

    Raises
    ------
    ConfigError
        If there is no such cluster, a key is unknown, missing or invalid, or its nodes do not
        have `gpus_per_node` GPUs.

    """
    gpus, links = load_node(name)
    if gpus != gpus_per_node:
        raise ConfigError(
            f"{name}: gpus_per_node is {gpus}, but the workload has {gpus_per_node}"
        )
    return links


def load_node(name: str | Path) -> tuple[int, GpuLinks]:
    """Return the number of GPUs of a cluster's node, and their links, as `load_links` does.

    Raises
    ------
    ConfigError
        If there is no such cluster, or a key is unknown, missing or invalid.

    """
    where = str(name)
    values = _checked_keys(_text(name), where, _LINK_KEYS)
    node, intra = _bandwidths(values, where, ("bw_node", "bw_intra"))
    gpus = _gpus(values, where)
    return gpus, GpuLinks(inter_bytes_per_s=node / gpus, intra_bytes_per_s=intra)


def rated_links(name: str | Path, links: GpuLinks) -> GpuLinks:
    """Return links of a cluster with the NVLink of its GPU's data sheet.

    `bw_intra` of shipped clusters is what collectives reach; a bound needs what links have. A
    file that is not shipped has its own links, and shipped ones without a GPU have theirs.
    """
    if _shipped_file(name) is None:
        return links
    own = parsed_toml(_text(name), str(name)).get("gpu")
    if own is None:
        return links
    nvlink = parse_bandwidth(gpu_sheet(own)["nvlink"], "nvlink")
    return replace(links, intra_bytes_per_s=nvlink)


def _shipped_file(name: str | Path) -> str | None:
    """Return the name of a shipped cluster, also by the name of its GPU; None for others."""
    key, names = str(name).lower(), shipped()
    usual = (key, f"dgx-{key}", f"{key}-nvl72")
    return next((file for file in usual if file in names), None)


def _text(name: str | Path) -> str:
    """Return the TOML text of a shipped cluster or of a file."""
    if file := _shipped_file(name):
        source = resources.files("fastcomm.hardware") / "data" / f"{file}.toml"
        return source.read_text("utf-8")
    if not Path(name).exists():
        raise ConfigError(
            f"cluster {str(name)!r}: no such file, and not one of {', '.join(shipped())}"
        )
    return text(Path(name))


def _checked_keys(toml: str, where: str, required: tuple[str, ...]) -> dict[str, Any]:
    """Parse a TOML text; raise ConfigError if a key is unknown or missing."""
    values = parsed_toml(toml, where)
    if unknown := values.keys() - set(_KEYS):
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}; expected {', '.join(_KEYS)}")
    if "gpu" in values:
        values = {**_gpu_values(values["gpu"], where), **values}
    if missing := [key for key in required if key not in values]:
        raise ConfigError(f"{where}: missing key {', '.join(missing)}")
    return values


def _gpu_values(name: object, where: str) -> dict[str, Any]:
    """Return the values that a cluster takes from its GPU, by its own keys."""
    try:
        sheet = gpu_sheet(str(name))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    values = {key: sheet[key] for key in ("name", "memory", "hbm")}
    return {**values, "peak_tflops": sheet["peak_tflops"]["bf16"], **sheet["curves"]}


def _bandwidths(values: dict[str, Any], where: str, keys: tuple[str, ...]) -> list[float]:
    return [parse_bandwidth(values[key], f"{where}: {key}") for key in keys]


def _gpus(values: dict[str, Any], where: str) -> int:
    """Return the GPUs of a node; raise ConfigError unless it is a whole number in range."""
    gpus = values["gpus_per_node"]
    if type(gpus) is not int or not RANKS.holds(gpus):
        raise ConfigError(f"{where}: invalid gpus_per_node {shortened(gpus)}: expected {RANKS}")
    return gpus


def parse(toml: str, where: str) -> Cluster:
    """Return the cluster that a TOML text describes.

    Raises
    ------
    ConfigError
        If a key is unknown, missing or invalid; the message starts with `where`.

    """
    values = _checked_keys(toml, where, _KEYS[:-2])
    try:
        return _cluster(values, where)
    except (TypeError, LookupError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {type(error).__name__}: {error}; docs/isp.md describes the keys"
        ) from error


def _cluster(values: dict[str, Any], where: str) -> Cluster:
    """Return the cluster of checked keys, in the units of this module."""
    _check_ranges(values, where)
    hbm, intra, node = _bandwidths(values, where, ("hbm", "bw_intra", "bw_node"))
    alpha = [float(values["alpha_us"][key]) for key in _ALPHA]
    cluster = Cluster(
        name=str(values["name"]),
        gpus_per_node=_gpus(values, where),
        memory=parse_quantity(values["memory"], f"{where}: memory"),
        peak=float(values["peak_tflops"]) * 1e12,
        hbm=hbm,
        bw_intra=intra,
        bw_node=node,
        contention=tuple((int(n), float(factor)) for n, factor in values["contention"]),
        alpha_intra=alpha[0] * 1e-6,
        alpha_inter=alpha[1] * 1e-6,
        alpha_rank=alpha[2] * 1e-6,
        alpha_from=int(alpha[3]),
        gemm=_gemm(values["gemm"]),
        attention=_attention(values["attention"]),
        unfused=float(values["unfused_tflops"]) * 1e12,
        note=str(values.get("note", "")),
        gpu=str(values.get("gpu", "")),
    )
    _check(cluster, where)
    return cluster


def _gemm(knots: list[list[float]]) -> GemmCurve:
    """Return the curve through points (FLOPs, TFLOP/s)."""
    return GemmCurve(
        flops=tuple(float(flops) for flops, _ in knots),
        rates=tuple(float(tflops) * 1e12 for _, tflops in knots),
    )


def _attention(values: dict[str, list[float]]) -> AttentionCurve:
    """Return the curve; values are in µs, ps per element and TFLOP/s, (forward, backward)."""
    start, element, rate = (values[key] for key in _ATTENTION)
    return AttentionCurve(
        start=(start[0] * 1e-6, start[1] * 1e-6),
        element=(element[0] * 1e-12, element[1] * 1e-12),
        rate=(rate[0] * 1e12, rate[1] * 1e12),
    )


def _check(cluster: Cluster, where: str) -> None:
    """Raise ConfigError unless the knots of contention and GEMM are sorted."""
    steps = [n for n, _ in cluster.contention]
    if not steps or steps != sorted(set(steps)):
        raise ConfigError(f"{where}: contention must be sorted by ranks, not {steps}")
    if not cluster.gemm.flops or list(cluster.gemm.flops) != sorted(set(cluster.gemm.flops)):
        raise ConfigError(f"{where}: gemm must be sorted by FLOPs, not {cluster.gemm.flops}")


def _check_ranges(values: dict[str, Any], where: str) -> None:
    """Raise ConfigError for the first number out of its range."""
    checks = {
        "peak_tflops": ([values["peak_tflops"]], _TFLOPS),
        "unfused_tflops": ([values["unfused_tflops"]], _TFLOPS),
        "contention, ranks": ([ranks for ranks, _ in values["contention"]], _COUNT),
        "contention, divisors": ([divisor for _, divisor in values["contention"]], _DIVISOR),
        "gemm, FLOPs": ([flops for flops, _ in values["gemm"]], _FLOPS),
        "gemm, TFLOPS": ([tflops for _, tflops in values["gemm"]], _TFLOPS),
        "attention.tflops": (values["attention"]["tflops"], _TFLOPS),
        "attention.start_us": (values["attention"]["start_us"], _SMALL),
        "attention.element_ps": (values["attention"]["element_ps"], _SMALL),
        **{f"alpha_us.{key}": ([values["alpha_us"][key]], _SMALL) for key in _ALPHA},
    }
    for key, (numbers, valid_range) in checks.items():
        for number in numbers:
            valid_range.check(number, f"{where}: {key}")
