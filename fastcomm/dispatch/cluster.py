"""The cluster of an expert all-to-all: nodes, ports and bandwidths, from options or TOML."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Self

from fastcomm.checks import BANDWIDTH, EFFICIENCY, FACTOR, START_S, shortened
from fastcomm.dispatch.fast import Cost
from fastcomm.errors import ConfigError
from fastcomm.inputs import parsed_toml, text
from fastcomm.units import parse_bandwidth

GIB = 1 << 30
_MB = 1e6
_RANGES = {
    "bytes_per_s": BANDWIDTH,
    "efficiency": EFFICIENCY,
    "start_s": START_S,
    "incast": FACTOR,
}

# Start-up in us and us a MB, of the FAST authors' simulator; several are marked there as not
# measured. Presets, not truth.
INTER_PRESETS = {
    "100GbE": (0.7, 84.0),
    "400GbE": (0.7, 22.0),
    "InfiniBand": (1.7, 106.0),
}
INTRA_PRESETS = {
    "DGX-2": (0.1, 8.0),
    "MI300X": (0.1, 5.0),
    "H100": (0.1, 2.3),
    "B100": (0.1, 1.2),
    "NDv2": (0.1, 46.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchCluster:
    """Bandwidths, what share of them is reached, and what a message costs before its bytes."""

    inter_bytes_per_s: float = 50.0 * GIB
    intra_bytes_per_s: float = 400.0 * GIB
    inter_efficiency: float = 1.0
    intra_efficiency: float = 1.0
    inter_start_s: float = 0.0
    intra_start_s: float = 0.0
    incast: float = 0.0  # a receiver is slower by this share for each sender beyond the first

    @classmethod
    def of(cls, **words: float) -> Self:
        """Check the words and make the cluster."""
        for name, value in words.items():
            _RANGES[name.split("_", 1)[-1]].check(value, name)
        return cls(**words)

    @property
    def inter(self) -> float:
        """Bytes a second that a NIC reaches."""
        return self.inter_bytes_per_s * self.inter_efficiency

    @property
    def intra(self) -> float:
        """Bytes a second that a GPU reaches inside its node."""
        return self.intra_bytes_per_s * self.intra_efficiency

    def inter_cost(self, size: int) -> Cost:
        """Time of tokens of `size` bytes on a NIC."""
        return Cost(start_s=self.inter_start_s, unit_s=size / self.inter)

    def intra_cost(self, size: int) -> Cost:
        """Time of tokens of `size` bytes inside a node."""
        return Cost(start_s=self.intra_start_s, unit_s=size / self.intra)


def bandwidth(text: str) -> float:
    """Bytes a second of "50GB/s" or "400Gbit/s"; a bare number counts 2^30 bytes."""
    try:
        value = float(text) * GIB
    except ValueError:
        return parse_bandwidth(text)
    BANDWIDTH.check(value, f"bandwidth {shortened(text)!r}, in bytes per second")
    return value


def preset(inter: str, intra: str) -> DispatchCluster:
    """A cluster of the FAST authors' constants."""
    for name, known in ((inter, INTER_PRESETS), (intra, INTRA_PRESETS)):
        if name not in known:
            raise ConfigError(f"link {name!r}: wanted one of {', '.join(known)}")
    (inter_us, inter_per_mb), (intra_us, intra_per_mb) = (
        INTER_PRESETS[inter],
        INTRA_PRESETS[intra],
    )
    return DispatchCluster(
        inter_bytes_per_s=_MB / (inter_per_mb * 1e-6),
        intra_bytes_per_s=_MB / (intra_per_mb * 1e-6),
        inter_start_s=inter_us * 1e-6,
        intra_start_s=intra_us * 1e-6,
    )


_KEYS = ("gpus_per_node", "bw_intra", "bw_node")
_MOST_GPUS = 1 << 20  # of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a cluster file says of the links."""

    gpus_per_node: int
    inter_bytes_per_s: float  # of a GPU
    intra_bytes_per_s: float


def hardware(name: str, gpus_per_node: int) -> Hardware:
    """Read a file, or a cluster that is shipped; its nodes must have so many GPUs."""
    found = _parsed(_text(name), name)
    if found.gpus_per_node != gpus_per_node:
        raise ConfigError(
            f"{name}: gpus_per_node is {found.gpus_per_node}, that of the workload is "
            f"{gpus_per_node}"
        )
    return found


def _text(name: str) -> str:
    shipped = resources.files("fastcomm") / "cluster" / "data" / f"{name.lower()}.toml"
    if Path(name).exists():
        return text(Path(name))
    if "/" not in name and shipped.is_file():
        return shipped.read_text("utf-8")
    raise ConfigError(f"cluster {name!r}: neither a file nor a cluster that is shipped")


def _parsed(words: str, name: str) -> Hardware:
    said = parsed_toml(words, name)
    if missing := [key for key in _KEYS if key not in said]:
        raise ConfigError(f"{name}: no key {', '.join(missing)}")
    gpus = said["gpus_per_node"]
    if type(gpus) is not int or not 1 <= gpus <= _MOST_GPUS:
        raise ConfigError(
            f"{name}: gpus_per_node: found {str(gpus)[:40]}, wanted 1 to {_MOST_GPUS}"
        )
    try:
        node, intra = (parse_bandwidth(str(said[key])) for key in ("bw_node", "bw_intra"))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return Hardware(gpus_per_node=gpus, inter_bytes_per_s=node / gpus, intra_bytes_per_s=intra)
