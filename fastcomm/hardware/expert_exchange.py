"""Times of an expert all-to-all by kernel family: dispatch and combine of one layer.

`expert_exchange.toml` has the constants, which `docs/exchange_accuracy.py` fits to published
measurements. A *row* is a copy of a token that a rank receives; a *domain* is a set of ranks
with NVLink between them, a node in most clusters. Times are in seconds, sizes in bytes,
bandwidths in bytes per second, constants in microseconds and SM-nanoseconds.

A phase takes its start, and the time of the busiest resource: SMs that copy, NVLink, or NICs.
The first tokens pass one resource after the other, which fills the pipeline.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from fastcomm.errors import ConfigError
from fastcomm.files import parsed_toml
from fastcomm.hardware.expert_gate import places_of_token
from fastcomm.hardware.gpus import FloatArray, gpu, gpu_sheet
from fastcomm.units import enumeration

ShapeValue = float | FloatArray
ExchangePhase = Literal["dispatch", "combine"]
Precision = Literal["bf16", "fp8"]
PHASES: tuple[ExchangePhase, ...] = get_args(ExchangePhase)
LIMITS = ("SMs", "NVLink", "NIC")
# Exponent of the norm that joins the three limits: near a maximum, but smooth where they meet.
_SHARPNESS = 8.0
_SCALES = 128  # elements of FP8 that share a scale of 4 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFamily:
    """What a family of kernels sends, where it runs, and how unless the user says otherwise.

    `exchange_families.toml` has them, and explains the fields.
    """

    title: str
    copies: bool
    precisions: tuple[Precision, ...]
    trains: bool
    gate: Literal["nodes", "model", "none"]
    sms: int | None = None
    compute_capability: float = 0.0
    gpus: tuple[str, ...] = ()  # any if empty

    @property
    def precision(self) -> Precision:
        """Precision of dispatch by default."""
        return self.precisions[0]

    def unsupported(self, name: str, precision: Precision | None = None) -> str:
        """Return why GPU `name` cannot run the kernels in a precision; empty if it can."""
        sheet, precision = gpu(name), precision or self.precision
        if self.gpus and name not in self.gpus:
            return f"runs on {enumeration([one.upper() for one in self.gpus])} only"
        if sheet.compute_capability < self.compute_capability:
            return (
                f"needs compute capability {self.compute_capability}, and {sheet.name} has "
                f"{sheet.compute_capability}"
            )
        if precision not in self.precisions:
            return f"has no dispatch in {precision}"
        return "" if precision in sheet.peaks else f"{sheet.name} has no {precision}"


def _families() -> dict[str, ExchangeFamily]:
    """Return the shipped families by name."""
    name = "exchange_families.toml"
    source = resources.files("fastcomm.hardware") / name
    tables = parsed_toml(source.read_text("utf-8"), name)
    families = {}
    for family, table in tables.items():
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in table.items()
        }
        families[family] = ExchangeFamily(**values)
    return families


FAMILIES = _families()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeShape:
    """What is exchanged by which ranks; fields are numbers, or arrays that broadcast.

    With `groups`, experts are in as many groups, and a token goes to `top_groups` of them only,
    see `expert_gate`.
    """

    tokens: ShapeValue  # of a rank
    hidden: ShapeValue  # elements of a token
    topk: ShapeValue  # experts of a token
    experts: ShapeValue
    ranks: ShapeValue
    domain: ShapeValue  # ranks with NVLink between them
    sms: ShapeValue | None = None  # None is the default of the family
    # Rows of the fullest rank over the mean: all ranks wait for it, its SMs and its NVLink.
    fullest: ShapeValue = 1.0
    # Load of the busiest NIC over the mean; None if it is unknown: then `fullest`, as far as
    # the node of the fullest rank can receive tokens.
    busiest_nic: ShapeValue | None = None
    groups: ShapeValue = 1
    top_groups: ShapeValue = 1

    def domains(self) -> FloatArray:
        """Return the number of NVLink domains."""
        return np.ceil(_floats(self.ranks) / _floats(self.domain))

    def domains_of_token(self) -> FloatArray:
        """Return the mean number of domains with an expert of a token, its own included."""
        return self._places_of_token(self.domains())

    def ranks_of_token(self) -> FloatArray:
        """Return the mean number of ranks with an expert of a token, its own included."""
        return self._places_of_token(_floats(self.ranks))

    def far_copies(self, *, copies: bool) -> FloatArray:
        """Return the mean number of times that a token leaves its domain.

        With `copies`, it is sent once for each of its experts, else once to a domain.
        """
        sent = _floats(self.topk) if copies else self.domains_of_token()
        return sent * (1 - 1 / self.domains())

    def busiest_far_copies(self, *, copies: bool) -> FloatArray:
        """Return `far_copies` of the busiest NIC.

        Without copies, the NICs of a node receive a token of another node once at most.
        """
        far = self.far_copies(copies=copies)
        if self.busiest_nic is not None:
            return far * _floats(self.busiest_nic)
        skewed = far * _floats(self.fullest)
        return skewed if copies else np.minimum(skewed, self.domains() - 1)

    def _places_of_token(self, count: FloatArray) -> FloatArray:
        """Return the mean number of `count` equal parts with an expert of a token."""
        is_limited = _floats(self.top_groups) < _floats(self.groups)
        free = count * hit_share(self.experts, _floats(self.experts) / count, self.topk)
        if not is_limited.any():
            return free
        gate = self.experts, self.groups, self.top_groups, self.topk
        return np.where(is_limited, _GATED_PLACES(*gate, count), free)


def _gated_places(
    experts: float, groups: float, top_groups: float, topk: float, count: float
) -> float:
    return places_of_token(experts, groups, top_groups, int(topk), int(count))


_GATED_PLACES = np.vectorize(_gated_places, otypes=[np.float64])


def _floats(values: ShapeValue) -> FloatArray:
    return np.asarray(values, np.float64)


def hit_share(total: ShapeValue, own: ShapeValue, draws: ShapeValue) -> FloatArray:
    """Return the probability that `draws` distinct ones of `total` include one of `own`.

    It is 1 - C(total - own, draws) / C(total, draws), with the gamma function for numbers that
    are not whole.
    """
    total, own, draws = np.broadcast_arrays(_floats(total), _floats(own), _floats(draws))
    misses = np.maximum(total - own - draws, -1.0)  # C is 0 at -1
    gamma = np.vectorize(math.lgamma, otypes=[np.float64])
    logs = (
        gamma(np.maximum(total - own, 0.0) + 1)
        - gamma(np.maximum(misses, 0.0) + 1)
        - gamma(total + 1)
        + gamma(np.maximum(total - draws, 0.0) + 1)
    )
    return np.where(misses < 0, 1.0, 1.0 - np.exp(np.minimum(logs, 0.0)))


def token_bytes(hidden: ShapeValue, precision: Precision) -> FloatArray:
    """Return the bytes of a token on the wire: bf16, or fp8 with the scales of its blocks."""
    elements = _floats(hidden)
    return elements * (2.0 if precision == "bf16" else 1.0 + 4.0 / _SCALES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """Constants of one phase of a family on one GPU, inside or across domains."""

    start_us: float  # launch, and synchronization of ranks
    doubling_us: float = 0.0  # more start for each doubling of the ranks
    pass_ns: float = 0.0  # time of the first token to pass, per byte of it
    fill_us: float = 0.0  # the most that filling the pipeline adds
    # SM-time of a token, of a row, and per byte of each.
    token_ns: float = 0.0
    token_byte_ns: float = 0.0
    row_ns: float = 0.0
    row_byte_ns: float = 0.0
    # SMs to which low-latency kernels deal the experts, in waves; each wave adds to the start.
    expert_sms: float = 0.0
    wave_us: float = 0.0
    far_rows: float = 0.0  # rows that cost the SMs as much as a copy to another domain
    nvlink_share: float = math.inf  # of the bandwidth of the data sheet; inf never limits
    nic_share: float = math.inf
    # Wait before data move, beside the phase: start, for each doubling of the ranks, for each
    # token, and as a share of the time of the busiest resource.
    notify_us: float = 0.0
    notify_doubling_us: float = 0.0
    notify_token_ns: float = 0.0
    notify_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Times of one phase of an expert all-to-all, arrays of the shape's shape."""

    seconds: FloatArray
    notify_s: FloatArray  # wait for the counts of tokens before data move; not in `seconds`
    limit_s: FloatArray  # time of each of `LIMITS`, in a last axis

    @property
    def total_s(self) -> FloatArray:
        """Seconds with the wait for the counts."""
        return self.seconds + self.notify_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCopies:
    """Copies of a token that the busiest resources handle, arrays of the shape's shape."""

    rows: FloatArray  # received by the fullest rank
    near: FloatArray  # of them, from its domain
    far: FloatArray  # through the busiest NIC


def exchange_copies(family: str, shape: ExchangeShape) -> ExchangeCopies:
    """Return the copies of a token of a shape; `family` is a key of `FAMILIES`."""
    copies, fullest = FAMILIES[family].copies, _floats(shape.fullest)
    rows = _floats(shape.topk) * fullest if copies else shape.ranks_of_token() * fullest
    return ExchangeCopies(
        rows=rows,
        near=rows / shape.domains() if copies else rows,
        far=shape.busiest_far_copies(copies=copies),
    )


def phase_time(
    costs: ExchangeCosts,
    family: str,
    shape: ExchangeShape,
    size: ShapeValue,
    bandwidths: tuple[float, float],
    copies: ExchangeCopies | None = None,
) -> PhaseTime:
    """Return the time of one phase.

    Parameters
    ----------
    costs
        Constants of the phase.
    family
        Key of `FAMILIES`.
    shape
        What is exchanged, N times of it as arrays.
    size
        Bytes of a token.
    bandwidths
        NVLink and NIC of a GPU, bytes/s in one direction.
    copies
        `exchange_copies` of family and shape, where several costs have the same.

    """
    size = _floats(size)
    copies = copies or exchange_copies(family, shape)
    limits = _limits(costs, FAMILIES[family], shape, copies, (size, *bandwidths))
    busiest = np.sum(limits**_SHARPNESS, axis=-1) ** (1 / _SHARPNESS) * 1e6
    fill = costs.fill_us
    filling = busiest * fill / (busiest + fill) if fill else np.zeros_like(busiest)
    doublings = np.log2(np.maximum(_floats(shape.ranks), 1.0))
    start = costs.start_us + costs.doubling_us * doublings + costs.pass_ns * size / 1e3
    if costs.expert_sms:
        start = start + costs.wave_us * np.ceil(_floats(shape.experts) / costs.expert_sms)
    notify = costs.notify_us + costs.notify_doubling_us * doublings
    notify = notify + costs.notify_token_ns * _floats(shape.tokens) / 1e3
    return PhaseTime(
        seconds=(start + busiest + filling) * 1e-6,
        notify_s=(notify + costs.notify_share * busiest) * 1e-6,
        limit_s=limits,
    )


def _limits(
    costs: ExchangeCosts,
    family: ExchangeFamily,
    shape: ExchangeShape,
    copies: ExchangeCopies,
    sizes: tuple[FloatArray, float, float],
) -> FloatArray:
    """Return the seconds of SMs, NVLink and NIC for all tokens, in a last axis.

    SMs and NVLink belong to the fullest rank, and the NIC is the busiest one. `sizes` are
    the bytes of a token, and the bandwidths of NVLink and NIC.
    """
    tokens, fullest, far = _floats(shape.tokens), _floats(shape.fullest), copies.far
    size, nvlink, nic = sizes
    sms = _sms(costs, family, shape)
    row_ns = (copies.rows + costs.far_rows * far) * (costs.row_ns + costs.row_byte_ns * size)
    of_token = (costs.token_ns + costs.token_byte_ns * size) * fullest
    copying = (of_token + row_ns) * 1e-9 / sms
    near = copies.near * (1 - 1 / _floats(shape.domain))
    sending = near * size / (nvlink * costs.nvlink_share)
    leaving = far * size / (nic * costs.nic_share)
    busy = np.broadcast_arrays(tokens * copying, tokens * sending, tokens * leaving)
    return np.stack(busy, axis=-1)


def _sms(costs: ExchangeCosts, family: ExchangeFamily, shape: ExchangeShape) -> FloatArray:
    """Return the SMs that copy; 1 for kernels whose constants are of all their SMs."""
    if costs.expert_sms:
        experts = _floats(shape.experts)
        return np.ceil(experts / np.ceil(experts / costs.expert_sms))
    if family.sms is None:
        return _floats(1.0)
    return _floats(family.sms if shape.sms is None else shape.sms)


Scope = Literal["inside", "across"]  # one domain, or several
SCOPES: tuple[Scope, ...] = get_args(Scope)
CostKey = tuple[str, str, Scope, ExchangePhase]  # family, GPU, scope, phase


def domain_floor(
    time: PhaseTime,
    name: str,
    family: str,
    phase: ExchangePhase,
    shape: ExchangeShape,
    size: ShapeValue,
) -> PhaseTime:
    """Return the time of a phase across domains, at least that of its work inside of them.

    Tokens that cross domains are copied by SMs and sent over NVLink as those that do not. Some
    constants across domains do not say how fast: they are of another GPU than those inside, or
    of shapes that NICs limit. Others are unchanged.

    Parameters
    ----------
    time
        Time with the constants across domains.
    name, family, phase
        A shipped GPU, a key of `FAMILIES`, and the phase.
    shape, size
        As for `phase_time`.

    """
    across, inside = (measured_gpu(family, name, scope) for scope in ("across", "inside"))
    if across is None or inside is None:
        return time
    counts_nvlink = math.isfinite(shipped_costs()[family, across, "across", phase].nvlink_share)
    if counts_nvlink and across == inside:
        return time
    costs = shipped_costs()[family, inside, "inside", phase]
    least = phase_time(costs, family, shape, size, (gpu(name).nvlink, math.inf))
    is_longer = least.seconds > time.seconds
    return PhaseTime(
        seconds=np.maximum(least.seconds, time.seconds),
        notify_s=np.maximum(least.notify_s, time.notify_s),
        limit_s=np.where(is_longer[..., None], least.limit_s, time.limit_s),
    )


@cache
def _shipped() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return the shipped file: tables by family, GPU, scope, and phase or "measured"."""
    source = resources.files("fastcomm.hardware") / "expert_exchange.toml"
    return parsed_toml(source.read_text("utf-8"), "expert_exchange.toml")


@cache
def shipped_costs() -> dict[tuple[str, str, str, str], ExchangeCosts]:
    """Return the shipped constants by family, GPU, scope and phase."""
    return {
        (family, name, scope, phase): ExchangeCosts(**constants)
        for family, gpus in _shipped().items()
        for name, scopes in gpus.items()
        for scope, phases in scopes.items()
        for phase, constants in phases.items()
        if phase in PHASES
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRange:
    """Least and most of the measured shapes that constants predict."""

    ranks: tuple[int, int]
    domains: tuple[int, int]
    tokens: tuple[int, int]  # of a rank
    sms: tuple[int, int] | None = None  # None if the time does not depend on them

    def outside_each(self, shape: ExchangeShape) -> list[str]:
        """Return for each shape of arrays which sizes lie outside; empty if none do."""
        values = {"ranks": shape.ranks, "domains": shape.domains(), "tokens": shape.tokens}
        if self.sms is not None and shape.sms is not None:
            values["SMs"] = shape.sms
        sizes = np.stack(np.broadcast_arrays(*map(_floats, values.values())), axis=-1)
        return [self._reasons(tuple(values), row) for row in sizes.reshape(-1, len(values))]

    def _reasons(self, names: tuple[str, ...], sizes: FloatArray) -> str:
        """Return which sizes lie outside."""
        reasons = []
        for name, size in zip(names, sizes.tolist(), strict=True):
            least, most = getattr(self, name.lower())
            if not least <= size <= most:
                measured = f"{least}" if least == most else f"{least} to {most}"
                reasons.append(f"{size:.0f} {name}, measured: {measured}")
        return "; ".join(reasons)


@cache
def shipped_ranges() -> dict[tuple[str, str, str], MeasuredRange]:
    """Return the measured shapes of the shipped constants by family, GPU and scope."""
    return {
        (family, name, scope): MeasuredRange(
            **{key: tuple(ends) for key, ends in phases["measured"].items()}
        )
        for family, gpus in _shipped().items()
        for name, scopes in gpus.items()
        for scope, phases in scopes.items()
    }


def measured_gpu(
    family: str, name: str, scope: Scope, phase: ExchangePhase = "dispatch"
) -> str | None:
    """Return the GPU whose constants hold for GPU `name`; None if the family has none.

    That is itself, the GPU that it is like, or the measured one of the nearest generation.
    """
    sources = [
        key[1] for key in shipped_costs() if (key[0], *key[2:]) == (family, scope, phase)
    ]
    if relatives := [one for one in _likes(name) if one in sources]:
        return relatives[0]

    def distance(source: str) -> float:
        return abs(gpu(source).compute_capability - gpu(name).compute_capability)

    return min(sources, key=distance, default=None)


def extrapolations(
    name: str, family: str, scope: Scope, source: str, shape: ExchangeShape
) -> list[str]:
    """Return for each shape why the constants of GPU `source` were not measured for it.

    Parameters
    ----------
    name, family, scope
        The GPU that is priced, its kernels, and where they exchange.
    source
        GPU of the constants, as `measured_gpu` returns it.
    shape
        Numbers, or arrays. A text is empty if the shape was measured.

    """
    is_related = source in set(_likes(name))
    foreign = "" if is_related else f"constants of {gpu(source).name}"
    if shape.sms is None:
        shape = replace(shape, sms=FAMILIES[family].sms)
    ranges = shipped_ranges()[family, source, scope].outside_each(shape)
    return ["; ".join(filter(None, (foreign, own))) for own in ranges]


def _likes(name: str) -> Iterator[str]:
    """Yield a GPU, and the GPUs that it is like."""
    while name:
        yield name
        name = str(gpu_sheet(name).get("like", "")) if name else ""


def check_sms(sms: int | None, name: str, where: str) -> None:
    """Raise ConfigError if GPU `name` has fewer SMs; `where` begins the message."""
    if sms is not None and sms > gpu(name).sms:
        raise ConfigError(f"{where}: {sms} SMs, but {gpu(name).name} has {gpu(name).sms}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTime:
    """Dispatch and combine of an expert all-to-all."""

    dispatch: PhaseTime
    combine: PhaseTime
    measured_on: str  # GPU whose constants were used
    # Why the shape lies outside of the measurements; empty if it does not, None if the shape
    # has arrays.
    extrapolated: str | None


def exchange_time(
    name: str,
    family: str,
    shape: ExchangeShape,
    *,
    nic: float,
    precision: Precision | None = None,
    fitted: Mapping[CostKey, ExchangeCosts] = MappingProxyType({}),
) -> ExchangeTime:
    """Return the time of dispatch and combine of one layer.

    Parameters
    ----------
    name
        A shipped GPU, as in "h100".
    family
        Key of `FAMILIES`.
    shape
        What is exchanged, in one domain or in several; not a mixture of both.
    nic
        NIC bandwidth of a GPU, bytes/s in one direction.
    precision
        Of dispatch; None is the default of the family. Combine is bf16.
    fitted
        Constants in place of the shipped ones.

    Raises
    ------
    ConfigError
        If the GPU or the family is unknown, or the family has no constants for the scope.

    """
    if family not in FAMILIES:
        raise ConfigError(f"unknown kernel family {family!r}: expected {', '.join(FAMILIES)}")
    scope: Scope = "inside" if np.all(shape.domains() <= 1) else "across"
    source = measured_gpu(family, name, scope)
    if source is None:
        raise ConfigError(f"{family}: no measured constants {scope} NVLink domains")
    links = gpu(name).nvlink, nic
    times = {}
    for phase in PHASES:
        kind = precision or FAMILIES[family].precision if phase == "dispatch" else "bf16"
        shipped = shipped_costs()[family, source, scope, phase]
        costs = fitted.get((family, name, scope, phase), shipped)
        size = token_bytes(shape.hidden, kind)
        own = phase_time(costs, family, shape, size, links)
        if scope == "across":
            own = domain_floor(own, name, family, phase, shape, size)
        times[phase] = own
    is_one = times["dispatch"].seconds.ndim == 0
    reasons = extrapolations(name, family, scope, source, shape) if is_one else [None]
    return ExchangeTime(**times, measured_on=source, extrapolated=reasons[0])
