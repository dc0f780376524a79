"""The result of all communication metrics; `computation` computes it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from fastcomm.hardware.gpus import FloatArray, StepFlops
from fastcomm.idle import totals
from fastcomm.idle.totals import IdleName
from fastcomm.metrics import missing_data
from fastcomm.metrics.across_ranks import AcrossRanks, plain
from fastcomm.metrics.breakdown import (
    Breakdown,
    IterationTimes,
    Overlap,
    PhaseWindows,
    RankMeans,
    RankTime,
    StepMeans,
)
from fastcomm.metrics.findings.finding import Finding
from fastcomm.metrics.headline import RunSummary, headline, health
from fastcomm.metrics.network import Network
from fastcomm.metrics.options import ByteKind
from fastcomm.metrics.outliers import Heat
from fastcomm.metrics.outside_steps import Outside
from fastcomm.metrics.rank_pairs import RankPairs, matrix
from fastcomm.metrics.traffic import Bandwidth, Exposure, HostCommunication, Volume, divided
from fastcomm.ranks.group_tags import GroupTags
from fastcomm.result import Result
from fastcomm.trace.run_traces import SkippedRank, expected_ranks
from fastcomm.units import format_ns

NO_FLOPS = "not counted, as that reads all events: pass --flops"
_NOT_COUNTED = StepFlops.without(NO_FLOPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Work per second of the mean step; None is unknown."""

    tokens_per_step: int | None = None  # of all ranks, from --tokens-per-step
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_s_per_gpu: float | None = None  # of the model, without recomputation

    @property
    def sentence(self) -> str:
        """The known numbers; empty if there is none."""
        parts = []
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s".replace(",", " "))
        if self.tokens_per_s_per_gpu is not None:
            parts.append(f"{self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU".replace(",", " "))
        if self.tflops_per_s_per_gpu is not None:
            parts.append(f"{self.tflops_per_s_per_gpu:.4g} TFLOP/s/GPU")
        return f"Throughput: {', '.join(parts)}." if parts else ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Metrics(Result):
    """The communication metrics of a run. Times in ns, ratios as fractions, null is unknown."""

    has_long_tables = True

    ranks: tuple[int, ...]
    iterations: int | None  # number of distinct iterations over all ranks; null if unknown
    found_by: tuple[str, ...]  # rules that found the iterations
    iteration_clock: Literal["device", "host"]  # clock that divides time into iterations
    outside: Outside
    bytes: ByteKind  # what `bytes` means in bandwidth and volume
    link_bandwidth: float | None  # bytes per second
    iteration: IterationTimes
    by_rank: tuple[RankTime, ...]
    breakdown: Breakdown
    windows: tuple[PhaseWindows, ...] | None  # null if times are unknown
    bandwidth: dict[str, Bandwidth]
    volume: dict[str, Volume]
    overlap: Overlap
    across: AcrossRanks
    network: Network
    rank_pairs: RankPairs
    exposure: dict[str, Exposure] = field(default_factory=dict)  # by tag
    idle: dict[str, float | None] = field(default_factory=dict)  # by cause: shares of the step
    idle_names: tuple[IdleName, ...] = ()  # the largest names behind it
    host_communication: HostCommunication | None = None  # beside a device's; null without any
    group_tags: GroupTags = field(default_factory=dict)  # where ranks alone would differ
    is_host_run: bool = False  # whether the host computes and communicates, without a device
    findings: tuple[Finding, ...] = ()  # causes, then symptoms; each the costliest first
    warnings: tuple[str, ...] = ()
    world_size: int | None = None  # number of ranks of the job; null if unknown
    gpus: tuple[str, ...] = ()  # names of the devices in the traces
    flops: StepFlops = _NOT_COUNTED
    tokens_per_step: int | None = None  # of all ranks
    skipped: tuple[SkippedRank, ...] = ()  # with --keep-going: ranks that could not be read
    missing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # ranks, by data
    tables: dict[str, pa.Table] = field(repr=False, compare=False)

    @property
    def expected_ranks(self) -> int:
        """Number of ranks of the run, read or not."""
        return expected_ranks(self.ranks, self.world_size, self.skipped)

    @property
    def throughput(self) -> Throughput:
        """Tokens and FLOPs of the model per second of the mean step."""
        step = self.iteration.mean_ns
        if not step:
            return Throughput(tokens_per_step=self.tokens_per_step)
        tokens, flops = self.tokens_per_step, self.flops.model_per_step
        rate = None if tokens is None else tokens / step * 1e9
        return Throughput(
            tokens_per_step=tokens,
            tokens_per_s=rate,
            tokens_per_s_per_gpu=None if rate is None else rate / self.expected_ranks,
            tflops_per_s_per_gpu=None if flops is None else flops / step / 1e3,
        )

    @property
    def measured_ranks(self) -> tuple[int, ...]:
        """Ranks with complete steps; all ranks if no rank has one."""
        return tuple(times.rank for times in self.by_rank) or self.ranks

    @property
    def longest(self) -> RankTime | None:
        """The rank with the longest mean iteration; the lowest of several.

        It need not be slow: a rank that waits for others has long iterations, too. See
        `across.by_wait_caused` for the ranks that others wait for.
        """
        return max(self.by_rank, key=lambda times: (times.mean_ns, -times.rank), default=None)

    @property
    def rank_means(self) -> RankMeans:
        """Mean times per iteration of each rank."""
        return RankMeans.of(self.tables["iterations"])

    def step_means(self, most: int) -> StepMeans:
        """Return mean times over all ranks in at most `most` equally long ranges of steps."""
        return StepMeans.of(self.tables["iterations"], most)

    def overlap_ns(self, tag: str) -> tuple[float, float]:
        """Return overlapped and exposed communication of a tag, mean ns per known iteration."""
        iterations = self.tables["iterations"]
        timed = iterations.filter(iterations[f"{tag}_overlapped_ns"].is_valid())
        under = timed[f"{tag}_overlapped_ns"].to_numpy()
        union = timed[f"{tag}_union_ns"].to_numpy()
        return float(np.mean(under)), float(np.mean(union - under))

    @property
    def idle_by_rank(self) -> dict[int, dict[str, float]]:
        """Mean idle time per step of each rank by cause, in ns; without unknown ranks."""
        return totals.by_rank(self.tables["iterations"])

    @property
    def pair_matrix(self) -> tuple[FloatArray, list[int]]:
        """Bytes per step from rank to rank in all-to-alls, and the ranks in order."""
        return matrix(self.tables["rank_pairs"])

    @property
    def wait_and_transfer(self) -> tuple[float, float] | None:
        """Wait and transfer per step in ns, of all parallelisms; None if unknown."""
        return divided(self.exposure)

    @property
    def busiest_rank(self) -> int:
        """The rank that computes the most, so that others wait for it; else the first rank."""
        means = self.rank_means
        return int(means.ranks[means.by_compute[-1]]) if means.is_known else self.ranks[0]

    @property
    def joins_ranks(self) -> bool:
        """Whether collectives of a process group are matched across ranks."""
        if len(self.ranks) == 1 or not self.across.matching.matched:
            return False
        groups = self.tables["groups"]
        groups = groups.filter(groups["group"].is_valid())
        pairs = np.stack([groups[name].to_numpy() for name in ("group", "rank")])
        _, ranks = np.unique(np.unique(pairs, axis=1)[0], return_counts=True)
        return bool((ranks > 1).any())

    @property
    def heat(self) -> Heat:
        """Times per rank and iteration."""
        return self.across.heat

    @property
    def headline(self) -> str:
        """The first sentence of a report: the largest part of the step."""
        return headline(self._summary())

    @property
    def health(self) -> str | None:
        """The sentence that stands in for causes; None if the findings have a cause."""
        return health(self._summary())

    def _summary(self) -> RunSummary:
        """Return the values that the summary of a run is made from."""
        return RunSummary(
            ranks=self.ranks,
            measured_ranks=self.measured_ranks,
            expected_ranks=self.expected_ranks,
            missing=self.missing,
            iteration=self.iteration,
            breakdown=self.breakdown,
            exposure=self.exposure,
            volume=self.volume,
            findings=self.findings,
            is_matched=self.across.matching.matched > 0,
            iterations=self.tables["iterations"],
            host_communication=self.host_communication,
        )

    def figures(self) -> dict[str, str]:
        """Return the ranks, the mean step, its largest part, and the number of findings."""
        step = self.iteration.mean_ns
        return {
            "ranks": f"{len(self.ranks)} of {self.expected_ranks}",
            "step": "n/a" if step is None else format_ns(step),
            "headline": self.headline,
            "findings": str(len(self.findings)),
        }

    def contents(self) -> dict[str, Any]:
        """Return the JSON document without its version."""
        names = {"source": "from", "target": "to"}
        windows = [
            {names.get(key, key): value for key, value in asdict(window).items()}
            for window in self.windows or ()
        ]
        iteration = {
            **asdict(self.iteration),
            "longest_rank": self.longest.rank if self.longest else None,
            "by_rank": plain(self.by_rank),
        }
        return {
            "headline": self.headline,
            "findings": [finding.to_dict() for finding in self.findings],
            **self._own("ranks", "world_size", "gpus", "iterations"),
            "iterations_found_by": list(self.found_by),
            **self._own("iteration_clock", "outside", "bytes", "link_bandwidth"),
            "iteration": iteration,
            **self._own("breakdown", "idle"),
            "idle_evidence": plain(self.idle_names),
            "windows": None if self.windows is None else windows,
            **self._own("bandwidth", "volume", "overlap", "exposure", "host_communication"),
            "network": self.network.to_dict(),
            "rank_pairs": self.rank_pairs.to_dict(),
            "collectives": self.tables["collectives"].to_pylist(),
            "groups": self.tables["group_tags"].to_pylist(),
            **self.across.to_dict(),
            "flops": self.flops.to_dict(),
            **self._own("throughput"),
            "unknown": missing_data.unknown(self.missing),
            "warnings": list(self.warnings),
            "failed": [asdict(rank) for rank in self.skipped],
        }

    def _own(self, *names: str) -> dict[str, Any]:
        """Return fields as the JSON document has them, under their names."""
        return {name: _as_json(getattr(self, name)) for name in names}

    def to_arrow(self) -> dict[str, pa.Table]:
        """Return all tables by name, also those with a row per event or window.

        `docs/python.md` lists the tables and their columns.
        """
        return dict(self.tables)


def _as_json(value: Any) -> Any:
    """Return dataclasses as objects and tuples as lists, also those in a mapping."""
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return list(value)
    is_record = is_dataclass(value) and not isinstance(value, type)
    return asdict(value) if is_record else value
