"""FLOPs of a step and their share of a GPU's peak: MFU and HFU, for metrics and kernels."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from fastcomm.units import enumeration, percent

NA = "n/a"
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
