"""GPUs: data sheets, peaks, measured times of kernels and collectives, and utilization.

A shipped file, `gpus/NAME.toml`, has few numbers, which `docs/hardware_accuracy.py` fits to
tables of measurements; its head names their origin and license. Times are in seconds, sizes in
bytes or elements, rates in FLOPs or bytes per second, shares are fractions of 1.
"""

import re
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import product
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastcomm.errors import ConfigError
from fastcomm.files import parsed_toml
from fastcomm.units import enumeration, parse_bandwidth, parse_quantity, percent

# Not of `fastcomm_kernels`, which takes half a second to import.
FloatArray = NDArray[np.float64]
NA = "n/a"
SHARES = ("gemm", "attention", "convolution", "memory_bound")
_LABELS = {"gemm": "GEMM", "memory_bound": "memory-bound"}
_VALUES = ("executed_per_step", "model_per_step", "hfu", "mfu")
# Exponents by which times grow above the last measured size of each axis, by kind: the work.
GROWTH = {
    "gemm": (1.0, 1.0, 1.0),  # m, n, k
    "attention": (2.0, 1.0, 0.0),  # tokens, heads, key and value heads
    "experts": (1.0, 0.0, 1.0, 0.0),  # copies, experts, weights, tokens
    "collectives": (1.0,),  # bytes
}
# Keys of a file whose values need no conversion.
_AS_WRITTEN = (
    *("name", "watts", "attention_kernel", "attention_backward", "has_mx", "experts_like"),
    *("derived", "sms", "compute_capability"),
    *("cpu", "gemm_speed", "training_attention"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Rate (FLOPs/s) by FLOPs of a matrix product.

    It is log-log between the knots; the time is constant below, and the rate above.
    """

    flops: tuple[float, ...]
    rates: tuple[float, ...]

    def seconds(self, flops: ArrayLike) -> FloatArray:
        """Return the time of one matrix product of `flops` FLOPs, in s."""
        work = np.maximum(np.asarray(flops, np.float64), self.flops[0])
        rate = np.exp(np.interp(np.log(work), np.log(self.flops), np.log(self.rates)))
        return np.asarray(work / rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTable:
    """Time (s) by FLOPs of a matrix product.

    It is linear between the entries, the first one's below, and proportional above.
    """

    flops: tuple[float, ...]
    times: tuple[float, ...]

    def seconds(self, flops: ArrayLike) -> FloatArray:
        """Return the time of one matrix product of `flops` FLOPs, in s."""
        work = np.asarray(flops, np.float64)
        beyond = np.maximum(work / self.flops[-1], 1.0)
        return np.asarray(np.interp(work, self.flops, self.times) * beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Time of causal FlashAttention: a start, a time per element and a time per FLOP.

    Each field has a value for the forward and one for the backward pass.
    """

    start: tuple[float, float]
    element: tuple[float, float]  # seconds per element
    rate: tuple[float, float]  # FLOPs per second

    def forward(self, bsz: ArrayLike, seq: float, hidden: ArrayLike) -> FloatArray:
        """Return the seconds of the forward pass of attention.

        Parameters
        ----------
        bsz
            Number of sequences.
        seq
            Tokens of a sequence.
        hidden
            Hidden size on a GPU.

        """
        return self._seconds(0, 2, bsz, seq, hidden)

    def backward(self, bsz: ArrayLike, seq: float, hidden: ArrayLike) -> FloatArray:
        """Return the seconds of the backward pass, which has 2.5 times the FLOPs.

        Parameters are those of `forward`.
        """
        return self._seconds(1, 5, bsz, seq, hidden)

    def _seconds(
        self, way: int, factor: int, bsz: ArrayLike, seq: float, hidden: ArrayLike
    ) -> FloatArray:
        """Return the seconds of a pass (forward 0, backward 1); `factor` scales its FLOPs."""
        elements = np.asarray(bsz, np.float64) * seq * np.asarray(hidden, np.float64)
        compute = factor * elements * seq / self.rate[way]
        return np.asarray(self.start[way] + self.element[way] * elements + compute)


def bus_factor(op: str, ranks: ArrayLike) -> FloatArray:
    """Return the bytes that each rank sends, as a share of the volume of a collective.

    The factors are those of nccl-tests' bus bandwidth; 1 for point-to-point messages.
    """
    n = np.asarray(ranks, np.float64)
    if op == "p2p":
        return np.ones_like(n)
    return np.asarray((2 if op == "all_reduce" else 1) * (n - 1) / n)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Measured lines of one operation in one group size; the faster of the two counts.

    Small messages use another protocol, with a shorter start-up time and a lower bus bandwidth.
    """

    ranks: int
    alpha: float  # start-up time
    bus: float  # bus bandwidth
    small_alpha: float
    small_bus: float


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


def corners(
    axes: tuple[tuple[float, ...], ...], sizes: tuple[ArrayLike, ...]
) -> tuple[NDArray[np.int64], FloatArray]:
    """Return the knots around points, and the weight of each.

    Parameters
    ----------
    axes
        Ascending knots of each axis, positive.
    sizes
        Coordinates of the points, one array per axis; they broadcast. Outside of an axis its
        first or last knot counts.

    Returns
    -------
    places : ndarray
        Positions in the flattened grid, (2 ** axes, points).
    weights : ndarray
        Weights by the logarithms of the sizes, (2 ** axes, points).

    """
    points = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in sizes))
    steps = []
    for knots, values in zip(axes, points, strict=True):
        logs, at = np.log(knots), np.log(np.clip(values, knots[0], knots[-1]))
        low = np.clip(np.searchsorted(logs, at, side="right") - 1, 0, max(len(knots) - 2, 0))
        high = np.minimum(low + 1, len(knots) - 1)
        width = np.where(high > low, logs[high] - logs[low], 1.0)
        steps.append((low, high, (at - logs[low]) / width))
    places, weights = [], []
    for corner in product((0, 1), repeat=len(axes)):
        place, weight = np.int64(0), np.float64(1)
        for knots, (low, high, share), upper in zip(axes, steps, corner, strict=True):
            place = place * len(knots) + (high if upper else low)
            weight = weight * (share if upper else 1 - share)
        places.append(place)
        weights.append(weight)
    return np.array(places), np.array(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Time over a grid of sizes: linear between the knots in logarithms.

    Times never fall with a size. Below the first knot of an axis the time is that of the knot.
    Above the last one, where nothing is measured, it grows with the work: `growth` has the
    exponent of each axis, so that rates stay what they were.
    """

    axes: tuple[tuple[float, ...], ...]
    logs: FloatArray  # logarithms of seconds, flattened
    growth: tuple[float, ...]

    def seconds(self, *sizes: ArrayLike) -> FloatArray:
        """Return the time in s at some sizes, one broadcastable array per axis.

        It is interpolated on logarithms, grows by `growth` above the last knot of an axis, and
        is constant below the first.
        """
        places, weights = corners(self.axes, sizes)
        logs = (self.logs[places] * weights).sum(axis=0)
        for knots, size, power in zip(self.axes, sizes, self.growth, strict=True):
            logs = logs + power * np.log(
                np.maximum(np.asarray(size, np.float64) / knots[-1], 1)
            )
        return np.asarray(np.exp(logs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: its data sheet, and surfaces of measured times by kind and variant.

    `gemm` is by recipe, over m, n and k; `attention` by kernel and width of a head, over tokens
    of a sequence, batch x heads, and batch x key and value heads; `experts` by recipe, over
    copies of tokens, experts of the rank, hidden x width of an expert, and all tokens.
    `collectives` is by operation and number of ranks, over bytes as nccl-tests counts them.
    """

    name: str
    memory: float
    hbm: float  # bandwidth of the memory, as reached
    peaks: dict[str, float]  # by precision, dense
    sms: int
    compute_capability: float
    nvlink: float  # one direction, data sheet
    host_link: float  # to the memory of the host: PCIe, or NVLink-C2C; as `nvlink`
    watts: float  # usual limit of power
    attention_kernel: str  # of a current stack, a prefix of the names in `attention`
    attention_backward: float  # its time over that of the forward pass
    has_mx: bool = False  # tensor cores for MX formats
    gemm: dict[str, Surface] = field(default_factory=dict)
    attention: dict[str, Surface] = field(default_factory=dict)
    experts: dict[str, Surface] = field(default_factory=dict)
    collectives: dict[str, dict[int, Surface]] = field(default_factory=dict)
    # Recipes of experts whose times are those of another one.
    experts_like: dict[str, str] = field(default_factory=dict)
    # Attention as trainers run it today, causal at 4096 tokens, by kernel: heads, key and value
    # heads, forward and backward in ms; also of FP8. Empty: the kernels of `attention`.
    training_attention: dict[str, list[float]] = field(default_factory=dict)
    # Speed of a GEMM by precision, over that of the GPU that it is like.
    gemm_speed: dict[str, float] = field(default_factory=dict)
    cpu: str = ""  # of the host: "grace", or x86
    # What is not measured on this GPU, for output.
    derived: str = ""
    # Medians of relative errors on held-out measurements by kind, for output.
    errors: dict[str, float] = field(default_factory=dict)

    def matmul(self, recipe: str, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> FloatArray:
        """Return the time in s of a product of m x k and k x n matrices; arrays broadcast."""
        flops = 2 * np.asarray(m, np.float64) * np.asarray(n) * np.asarray(k)
        return self._bound(recipe, flops, self.gemm[recipe].seconds(m, n, k))

    def grouped(
        self, recipe: str, copies: float, experts: float, weights: float, tokens: float
    ) -> FloatArray:
        """Return the forward time in s of a fused layer of gated experts.

        Parameters
        ----------
        recipe
            A name in `experts`.
        copies
            Tokens of all experts of the rank: one counts for each of its experts here.
        experts
            Experts of the rank.
        weights
            Hidden size x width of an expert on the rank.
        tokens
            Tokens that are routed.

        """
        time = self.experts[recipe].seconds(copies, experts, weights, tokens)
        return self._bound(recipe, 6 * np.asarray(copies, np.float64) * weights, time)

    def _bound(self, recipe: str, flops: ArrayLike, seconds: FloatArray) -> FloatArray:
        """Return the times, but none below that of the peak of a recipe."""
        peak = self.peaks["bf16" if recipe.startswith("bf16") else "fp8"]
        return np.maximum(seconds, np.asarray(flops, np.float64) / peak)

    def flash(self, kernel: str, width: int, seq: float, heads: float, kv: float) -> FloatArray:
        """Return the forward time of causal attention.

        Parameters
        ----------
        kernel
            "fa2", "fa3", or a prefix of the names in `attention`.
        width
            Width of a head; the nearest measured one is scaled by the ratio of the widths.
        seq
            Tokens of a sequence.
        heads, kv
            Sequences x heads, and sequences x key and value heads.

        """
        own = [name for name in self.attention if name.startswith(kernel)]
        widths = {int(name.rpartition("_")[2]): name for name in own}
        near = min(widths, key=lambda own_width: abs(np.log(own_width / width)))
        time = self.attention[widths[near]].seconds(seq, heads, kv) * width / near
        return self._bound("bf16", 2 * seq**2 * heads * width, time)

    def inside(self, op: str, size: ArrayLike, ranks: int) -> FloatArray:
        """Return the time in s of a collective inside the measured NVLink domain.

        Larger groups than measured send more and wait as long. A rank sends at least what a
        switch that adds up leaves of an all-reduce: its volume.
        """
        volume = np.asarray(size, np.float64)
        if ranks <= 1:
            return np.zeros_like(volume)
        sent = 1.0 if op == "all_reduce" else float(bus_factor(op, ranks))
        return np.maximum(self._line(op, volume, ranks), sent * volume / self.nvlink)

    def _line(self, op: str, volume: FloatArray, ranks: int) -> FloatArray:
        """Return the time of a collective from the measured numbers of ranks."""
        lines = self.collectives[op]
        if ranks in lines:
            return lines[ranks].seconds(volume)
        lower = max((n for n in lines if n < ranks), default=min(lines))
        upper = min((n for n in lines if n > ranks), default=None)
        near = lines[lower].seconds(volume)
        if upper is None or lower > ranks:
            return near * bus_factor(op, ranks) / bus_factor(op, lower)
        share = np.log(ranks / lower) / np.log(upper / lower)
        return np.asarray(near ** (1 - share) * lines[upper].seconds(volume) ** share)


def gpus() -> list[str]:
    """Return the sorted names of the GPUs that come with the package."""
    folder = resources.files("fastcomm.hardware") / "gpus"
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".toml"))


def _text(name: str) -> str:
    """Return the TOML text of a shipped GPU."""
    if name not in gpus():
        raise ConfigError(f"unknown GPU {name!r}: expected one of {', '.join(gpus())}")
    source = resources.files("fastcomm.hardware") / "gpus" / f"{name}.toml"
    return source.read_text("utf-8")


@cache
def gpu_sheet(name: str) -> dict[str, Any]:
    """Return what is known of a shipped GPU beside its surfaces, as in its file.

    The GPU that it is `like` fills in what its file lacks.

    Raises
    ------
    ConfigError
        If there is no GPU of this name.

    """
    # The rest of the text has many numbers.
    values = parsed_toml(_text(name).partition("\n[errors]")[0], name)
    return {**(gpu_sheet(values["like"]) if "like" in values else {}), **values}


@cache
def gpu(name: str) -> Gpu:
    """Return a shipped GPU; surfaces of the GPU that it is `like` fill in those that it lacks.

    Raises
    ------
    ConfigError
        If there is no GPU of this name.

    """
    sheet, values = gpu_sheet(name), parsed_toml(_text(name), name)
    base = gpu(values["like"]) if "like" in values else None
    nvlink = parse_bandwidth(sheet["nvlink"], "nvlink")
    kinds: dict[str, Any] = {
        kind: {key: _surface(kind, table) for key, table in values.get(kind, {}).items()}
        for kind in ("gemm", "attention", "experts")
    }
    lines = {
        op: {int(ranks): _surface("collectives", table) for ranks, table in tables.items()}
        for op, tables in values.get("collectives", {}).items()
    }
    if base:
        kinds = {kind: own or getattr(base, kind) for kind, own in kinds.items()}
        lines = lines or _slower(base, nvlink / base.nvlink)
    return Gpu(
        memory=parse_quantity(sheet["memory"], "memory"),
        hbm=parse_bandwidth(sheet["hbm"], "hbm"),
        peaks={precision: tflops * 1e12 for precision, tflops in sheet["peak_tflops"].items()},
        nvlink=nvlink,
        host_link=parse_bandwidth(sheet["host_link"], "host_link"),
        collectives=lines,
        errors=values.get("errors", base.errors if base else {}),
        **{key: sheet[key] for key in _AS_WRITTEN if key in sheet},
        **kinds,
    )


def _surface(kind: str, table: dict[str, Any]) -> Surface:
    *axes, times = table.values()
    logs = np.log(np.asarray(times, np.float64) * 1e-6)
    return Surface(axes=tuple(map(tuple, axes)), logs=logs, growth=GROWTH[kind])


def _slower(base: Gpu, links: float) -> dict[str, dict[int, Surface]]:
    """Return the collectives of a GPU whose links have `links` times the bandwidth.

    The time of the smallest message is kept: it is the start.
    """
    scaled: dict[str, dict[int, Surface]] = {}
    for op, lines in base.collectives.items():
        for ranks, line in lines.items():
            seconds = np.exp(line.logs)
            start = seconds[0]
            logs = np.log(start + (seconds - start) / links)
            scaled.setdefault(op, {})[ranks] = replace(line, logs=logs)
    return scaled


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
    """Return the peaks of a device by the driver's name, or of the chosen GPU; None if unknown.

    Models for PCIe and NVL have other peaks than those of servers, and are unknown.

    Raises `ConfigError` if the chosen GPU is not shipped.
    """
    key = chosen or next(
        (name for name in gpus() if re.search(gpu_sheet(name)["device"], device or "")), None
    )
    if key is None:
        return None
    chip = gpu(key)
    return Roof(gpu=chip.name, peaks=chip.peaks, memory=chip.hbm, chip=chip)
