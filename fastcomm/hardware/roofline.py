"""Peaks of the GPU that a trace names, and how far a step is from them.

Rates are FLOPs or bytes per second, shares are fractions of 1.
"""

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from fastcomm.hardware.surfaces import Gpu, gpu
from fastcomm.units import enumeration, percent

NA = "n/a"

# The shipped GPU of a device's name, as the driver has it; the first match counts. Models for
# PCIe and NVL have other peaks, and are none of them.
_DEVICES = tuple(
    (key, re.compile(pattern))
    for key, pattern in (
        ("gb300", r"\bGB300\b"),
        ("gb200", r"\bGB200\b"),
        ("b300", r"\bB300\b"),
        ("b200", r"\bB200\b"),
        ("h200", r"\bH200\b(?! NVL)"),
        ("h800", r"\bH800\b(?! PCIe)"),
        ("h100", r"\bH100\b(?! PCIe| NVL| 9\dGB)"),
        ("a100-40", r"\bA100-SXM\d?-40GB|\bA100-PG509-200"),
        ("a100", r"\bA100-SXM\d?-80GB"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """The peaks of a GPU."""

    gpu: str  # as fastcomm names it: "H100-SXM"
    peaks: dict[str, float]  # dense, by precision
    memory: float  # bandwidth that large copies reach
    chip: Gpu

    def measured_gemm_ns(self, sizes: tuple[int, int, int], precision: str) -> float | None:
        """Return the time of a GEMM as it was measured on this GPU, in ns; None if unknown.

        `sizes` are m, n and k; those above the measured ones are extrapolated.
        """
        if precision not in ("bf16", "fp16") or "bf16" not in self.chip.gemm or 0 in sizes:
            return None
        return 1e9 * float(self.chip.matmul("bf16", *sizes))


def roof_of(device: str | None, chosen: str | None = None) -> Roof | None:
    """Return the peaks of a device by its name, or of the chosen GPU; None if unknown.

    Raises `ConfigError` if the chosen GPU is not shipped.
    """
    key = chosen or next((key for key, name in _DEVICES if name.search(device or "")), None)
    if key is None:
        return None
    chip = gpu(key)
    return Roof(gpu=chip.name, peaks=chip.peaks, memory=chip.hbm, chip=chip)


SHARES = ("gemm", "attention", "convolution", "memory_bound")
_LABELS = {"gemm": "GEMM", "memory_bound": "memory-bound"}
_VALUES = ("executed_per_step", "model_per_step", "hfu", "mfu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of the mean step of a rank, and their share of the peak; None is unknown.

    They are those of GEMMs, attention and convolutions. `shares` are shares of the time of
    compute kernels.
    """

    executed_per_step: float | None = None
    model_per_step: float | None = None  # without recomputation
    hfu: float | None = None
    mfu: float | None = None
    gpu: str | None = None  # whose peaks count
    covered: float | None = None  # share of the time of such kernels whose FLOPs are known
    shares: dict[str, float | None] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)  # why a value is None

    @classmethod
    def without(cls, reason: str) -> Self:
        """Return unknown FLOPs, with the reason."""
        return cls(unknown=dict.fromkeys(_VALUES, reason))

    @property
    def sentences(self) -> tuple[str, ...]:
        """What a step executes, its shares of the peak, and why they are unknown."""
        if self.executed_per_step is None:
            return (f"FLOPs: {NA} ({self.unknown.get('executed_per_step', 'not counted')}).",)
        parts = [f"{self.executed_per_step / 1e12:.4g} TFLOP per step and rank"]
        for name, value in (("HFU", self.hfu), ("MFU", self.mfu)):
            parts += [f"{name} {percent(value)}"] if value is not None else []
        peak = f" of the peak of {self.gpu}" if self.gpu and len(parts) > 1 else ""
        shares = [
            f"{_LABELS.get(name, name)} {percent(share)}"
            for name, share in self.shares.items()
            if share
        ]
        time = f" Of compute time: {', '.join(shares)}." if shares else ""
        missing: dict[str, list[str]] = {}
        for name in ("hfu", "mfu"):
            if name in self.unknown:
                missing.setdefault(self.unknown[name], []).append(name.upper())
        return (
            f"{'; '.join(parts)}{peak}.{time}",
            *(f"{enumeration(names)}: {NA} ({reason})." for reason, names in missing.items()),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; every value that may be unknown has its reason, or null."""
        return {
            **asdict(self),
            "shares": {name: self.shares.get(name) for name in SHARES},
            "unknown": {name: self.unknown.get(name) for name in _VALUES},
        }
