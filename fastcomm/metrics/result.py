"""The answer to all questions, typed; it draws nothing and prints nothing."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa

from fastcomm.metrics import (
    Partial,
    described,
    gaps,
    iteration_clock,
    lacking,
    note_warnings,
    traffic,
)
from fastcomm.metrics import pieces as pieces_
from fastcomm.metrics.across import Across, Material, across, plain, table_of
from fastcomm.metrics.breakdown import (
    Breakdown,
    IterationTimes,
    Overlap,
    PhaseWindows,
    RankMeans,
    RankTime,
    breakdown,
    iteration_times,
    overlap,
    rank_times,
    whole_windows,
    windows_cdf,
    windows_from,
)
from fastcomm.metrics.findings import Finding, findings_table, in_order
from fastcomm.metrics.gaps import Outside
from fastcomm.metrics.headline import StepTimes, headline, health, symptoms
from fastcomm.metrics.outliers import Heat
from fastcomm.metrics.pieces import Piece
from fastcomm.metrics.traffic import Bandwidth, Exposure, Volume, exposures
from fastcomm.options import ByteKind, ClockKind
from fastcomm.result import Result
from fastcomm.trace.run import SkippedRank, Spread, agreed_size, expected_ranks, one_by_one
from fastcomm.trace.schema import OPS, TAGS
from fastcomm.units import format_ns


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Metrics(Result):
    """The communication metrics of a run. Times in ns, ratios as fractions, null is unknown."""

    ranks: tuple[int, ...]
    iterations: int | None  # distinct numbers over all ranks; null where none tells
    found_by: tuple[str, ...]  # the rules that found the iterations
    iteration_clock: Literal["device", "host"]  # by which clock iterations are cut
    outside: Outside
    bytes: ByteKind  # what `bytes` means in bandwidth and volume
    link_bandwidth: float | None  # bytes per second
    iteration: IterationTimes
    by_rank: tuple[RankTime, ...]
    breakdown: Breakdown
    windows: tuple[PhaseWindows, ...] | None  # null where no rank tells
    bandwidth: dict[str, Bandwidth]
    volume: dict[str, Volume]
    overlap: Overlap
    across: Across
    exposure: dict[str, Exposure] = field(default_factory=dict)  # by tag
    findings: tuple[Finding, ...] = ()  # causes, then symptoms; each the costliest first
    warnings: tuple[str, ...] = ()
    world_size: int | None = None  # the job's number of ranks; null where nothing says it
    failed: tuple[SkippedRank, ...] = ()  # with --keep-going: ranks that could not be read
    lacks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # ranks, by word
    tables: dict[str, pa.Table] = field(repr=False, compare=False)

    @property
    def expected_ranks(self) -> int:
        """The number of ranks that the run should have, read or not."""
        return expected_ranks(self.ranks, self.world_size, self.failed)

    @property
    def measured_ranks(self) -> tuple[int, ...]:
        """The ranks in the numbers: not those of which no step is whole, where others' are."""
        return tuple(each.rank for each in self.by_rank) or self.ranks

    @property
    def longest(self) -> RankTime | None:
        """The rank with the longest mean iteration; the lowest such rank.

        It need not be slow: a rank that waits for others has long iterations, too. Which rank
        others wait for is in `across.by_wait_caused`.
        """
        return max(self.by_rank, key=lambda each: (each.mean_ns, -each.rank), default=None)

    @property
    def busiest_rank(self) -> int:
        """The rank that computes the most, and so keeps others waiting; else the first rank."""
        means = RankMeans.of(self.tables["iterations"])
        return int(means.ranks[means.by_compute[-1]]) if means.is_known else self.ranks[0]

    @property
    def joins_ranks(self) -> bool:
        """Whether a process group is matched across ranks."""
        if len(self.ranks) == 1 or not self.across.matching.matched:
            return False
        groups = self.tables["groups"]
        groups = groups.filter(groups["group"].is_valid())
        pairs = np.stack([groups[name].to_numpy() for name in ("group", "rank")])
        _, ranks = np.unique(np.unique(pairs, axis=1)[0], return_counts=True)
        return bool((ranks > 1).any())

    @property
    def heat(self) -> Heat:
        """Times of each (rank, iteration)."""
        return self.across.heat

    @property
    def headline(self) -> str:
        """The first sentence of a report: the largest part of the step."""
        return headline(self)

    @property
    def health(self) -> str | None:
        """The sentence that stands in for findings; None where there are findings."""
        return health(self)

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
            "findings": [each.to_dict() for each in self.findings],
            "ranks": list(self.ranks),
            "world_size": self.world_size,
            "iterations": self.iterations,
            "iterations_found_by": list(self.found_by),
            "iteration_clock": self.iteration_clock,
            "outside": asdict(self.outside),
            "bytes": self.bytes,
            "link_bandwidth": self.link_bandwidth,
            "iteration": iteration,
            "breakdown": asdict(self.breakdown),
            "windows": None if self.windows is None else windows,
            "bandwidth": {tag: asdict(found) for tag, found in self.bandwidth.items()},
            "volume": {tag: asdict(found) for tag, found in self.volume.items()},
            "overlap": asdict(self.overlap),
            "exposure": {tag: asdict(each) for tag, each in self.exposure.items()},
            "collectives": self.tables["collectives"].to_pylist(),
            "groups": self.tables["group_tags"].to_pylist(),
            **self.across.to_dict(),
            "unknown": gaps.unknown(self.lacks),
            "warnings": list(self.warnings),
            "failed": [asdict(each) for each in self.failed],
        }

    def to_arrow(self) -> dict[str, pa.Table]:
        """All tables by name, those with a row a rank, an iteration or an event included."""
        return dict(self.tables)


def answer(  # noqa: PLR0913 - one word a choice
    partial: Partial,
    *,
    byte_kind: ByteKind,
    link: float | None,
    warnings: Sequence[str] = (),
    world_size: int | None = None,
    failed: Sequence[SkippedRank] = (),
    clocks: ClockKind = "aligned",
    spread: Spread = one_by_one,
    with_tables: bool = True,
) -> Metrics:
    """Answer every question from the merged partial of all ranks.

    `with_tables`: whether the tables with a row an event or a window are among the tables.
    """
    ranks = tuple(note.rank for note in partial.notes)
    lacks = lacking(partial.notes)
    timed = len(ranks) - len(lacks.get("times", ()))
    numbers = np.unique(partial.iterations["iteration"].drop_null().to_numpy())
    count = len(numbers) if timed else None
    agreed = agreed_size((note.rank, note.world_size) for note in partial.notes)
    material = _material(partial)
    tags = np.unique(material.sums["tag"].to_numpy()).tolist()
    seen, tables = across(material, clocks, spread)
    over_all = _over_all(partial, material.pieces, tags, spread)
    beyond = gaps.outside(note.device_time for note in partial.notes)
    times = rank_times(partial.iterations)
    volume = traffic.volume(material.sums, count, timed)
    size = world_size or agreed
    expected = expected_ranks(ranks, size, failed)
    summary = _Summary.of(
        partial.iterations, seen, volume, tags, is_whole=len(times) == expected
    )
    return Metrics(
        ranks=ranks,
        iterations=count,
        found_by=tuple(sorted({note.found_by for note in partial.notes})),
        iteration_clock=iteration_clock(partial.notes),
        outside=beyond,
        bytes=byte_kind,
        link_bandwidth=link,
        **{each.name: getattr(summary, each.name) for each in fields(summary)},
        by_rank=times,
        windows=over_all.windows if timed else None,
        bandwidth=traffic.bandwidth(material.sums, over_all.p95, link),
        across=seen,
        warnings=(
            *warnings,
            *gaps.fewer_steps(times, ranks, len(numbers)),
            *note_warnings(partial.notes, lacks, beyond),
        ),
        world_size=size,
        failed=tuple(failed),
        lacks=lacks,
        tables={
            **_small_tables(partial, material.sums, link),
            "ranks": table_of(RankTime, times),
            **(_large_tables(partial, material.pieces) if with_tables else {}),
            "collectives": over_all.collectives,
            **tables,
            "findings": findings_table(summary.findings),
        },
    )


def _material(partial: Partial) -> Material:
    """Return what ranks are compared by."""
    return Material(
        ranks=tuple(note.rank for note in partial.notes),
        iterations=partial.iterations,
        pieces=partial.pieces(),
        sums=partial.all_sums(),
        groups=partial.groups,
        members=partial.members,
        world_size=max((note.world_size or 0 for note in partial.notes), default=0) or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """Means over all steps and ranks, and the findings in them."""

    iteration: IterationTimes
    breakdown: Breakdown
    volume: dict[str, Volume]
    overlap: Overlap
    exposure: dict[str, Exposure]
    findings: tuple[Finding, ...]

    @classmethod
    def of(
        cls,
        iterations: pa.Table,
        seen: Across,
        volume: dict[str, Volume],
        tags: Sequence[int],
        *,
        is_whole: bool,
    ) -> Self:
        """Summarize the table of iterations; `is_whole`: of all ranks of the run."""
        times, parts = iteration_times(iterations), breakdown(iterations)
        hidden = overlap(iterations, [TAGS[tag] for tag in tags])
        exposure = exposures(parts.exact, times.mean_ns, seen.waits, volume)
        found = symptoms(
            StepTimes(
                iterations=iterations,
                breakdown=parts,
                step_ns=times.mean_ns,
                exposure=exposure,
                overlap=hidden.average_overlap_ratio,
                is_matched=seen.matching.matched > 0,
                is_whole=is_whole,
            )
        )
        return cls(
            iteration=times,
            breakdown=parts,
            volume=volume,
            overlap=hidden,
            exposure=exposure,
            findings=in_order([*seen.causes, *found]),
        )


def _small_tables(partial: Partial, sums: pa.Table, link: float | None) -> dict[str, pa.Table]:
    """Those with a row an iteration, a rank, or a process group."""
    return {
        "iterations": traffic.iteration_rates(partial.iterations, link),
        "bandwidth_by_rank": traffic.by_rank(sums, link),
        "groups": partial.groups,
        "group_members": partial.members,
        "group_tags": _group_tags(partial),
    }


def _large_tables(partial: Partial, pieces: Sequence[Piece]) -> dict[str, pa.Table]:
    """Those with a row an event or a window."""
    windows = whole_windows(partial.all_windows())
    columns = [name for name in partial.events.column_names if name != "payload_bytes"]
    return {
        "windows": _in_words(windows, {"from": TAGS, "to": TAGS}),
        "windows_cdf": windows_cdf(windows),
        "events": _in_words(pieces_.whole(pieces, columns), {"tag": TAGS, "op": OPS}),
    }


@dataclass(frozen=True, slots=True)
class _OverAll:
    """Percentiles over the events, or windows, of all ranks."""

    p95: dict[int, float]  # of the rates of each tag
    collectives: pa.Table  # a row an operation, group size and power of two of the size
    windows: tuple[PhaseWindows, ...]


def _over_all(
    partial: Partial, pieces: Sequence[Piece], tags: Sequence[int], spread: Spread
) -> _OverAll:
    """All at once, so that no worker waits for one question to be answered."""
    ops = sorted({op for piece in pieces for op in piece.ops})
    of_tag, of_op = (
        functools.partial(pieces_.p95, pieces),
        functools.partial(pieces_.of_op, pieces),
    )
    behind = functools.partial(windows_from, partial.all_windows())
    asked = [(of_tag, tag) for tag in tags] + [(of_op, op) for op in ops]
    found: list[Any] = spread(_asked, asked + [(behind, tag) for tag in range(len(TAGS))])
    first, last = len(tags), len(asked)
    return _OverAll(
        p95=dict(zip(tags, found[:first], strict=True)),
        collectives=pa.concat_tables([pieces_.COLLECTIVES.empty_table(), *found[first:last]]),
        windows=tuple(window for each in found[last:] for window in each),
    )


def _asked(question: tuple[Callable[[int], Any], int]) -> Any:
    return question[0](question[1])


def _in_words(table: pa.Table, columns: dict[str, tuple[str, ...]]) -> pa.Table:
    """The table with names in place of their numbers."""
    for name, words in columns.items():
        column = pa.DictionaryArray.from_arrays(
            table[name].combine_chunks().cast(pa.int32()), pa.array(words)
        )
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _group_tags(partial: Partial) -> pa.Table:
    """Return a row for each kind of group and tag: where the tag comes from, how many ranks."""
    keys = ["description", "size", "tag", "tag_source", "candidates"]
    groups = partial.groups
    if partial.tagged is not None:
        groups = described(partial.tagged, groups)
    found = groups.group_by(keys, use_threads=False).aggregate(
        [("rank", "count_distinct"), ("events", "sum")]
    )
    found = found.rename_columns([*keys, "on_ranks", "events"])
    return found.sort_by([(key, "ascending") for key in ("tag", "description", "size")])
