"""Links of a cluster as the schedules see them: one NIC and one port inside the node per GPU.

A bandwidth is bytes a second of one direction. The original simulator's bare numbers are units
of 2^30 bytes a second; the published ones and those with a unit are what they say.
"""

from dataclasses import dataclass
from typing import Self

from fastcomm.dispatch.compat import Links
from fastcomm.dispatch.fast import Cost
from fastcomm.errors import ConfigError
from fastcomm.ranges import BANDWIDTH, EFFICIENCY, FACTOR, START_S, shortened
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
class Cluster:
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

    def links(self, size: int) -> Links:
        """The same in the original's units, efficiencies left out: it has none."""
        return Links(
            token_kb=size / 1024,
            inter_kb_per_s=self.inter_bytes_per_s / 1024,
            intra_kb_per_s=self.intra_bytes_per_s / 1024,
        )


def bandwidth(text: str) -> float:
    """Bytes a second of "50GB/s" or "400Gbit/s"; a bare number counts 2^30 bytes."""
    try:
        value = float(text) * GIB
    except ValueError:
        return parse_bandwidth(text)
    BANDWIDTH.check(value, f"bandwidth {shortened(text)!r}, in bytes per second")
    return value


def preset(inter: str, intra: str) -> Cluster:
    """A cluster of the FAST authors' constants."""
    for name, known in ((inter, INTER_PRESETS), (intra, INTRA_PRESETS)):
        if name not in known:
            raise ConfigError(f"link {name!r}: wanted one of {', '.join(known)}")
    (inter_us, inter_per_mb), (intra_us, intra_per_mb) = (
        INTER_PRESETS[inter],
        INTRA_PRESETS[intra],
    )
    return Cluster(
        inter_bytes_per_s=_MB / (inter_per_mb * 1e-6),
        intra_bytes_per_s=_MB / (intra_per_mb * 1e-6),
        inter_start_s=inter_us * 1e-6,
        intra_start_s=intra_us * 1e-6,
    )
