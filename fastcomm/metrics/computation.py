"""Compute the metrics of a run from the merged partial of all ranks."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm.idle import totals
from fastcomm.idle.totals import IdleName
from fastcomm.metrics import (
    Partial,
    described,
    gaps,
    iteration_clock,
    missing_data,
    note_warnings,
    spill_files,
    traffic,
    with_steps,
)
from fastcomm.metrics.across import (
    Across,
    Material,
    across,
    clock_warnings,
    matching_warnings,
)
from fastcomm.metrics.breakdown import (
    Breakdown,
    IterationTimes,
    Overlap,
    PhaseWindows,
    RankTime,
    breakdown,
    iteration_times,
    overlap,
    rank_times,
    whole_windows,
    windows_cdf,
    windows_from,
)
from fastcomm.metrics.findings.detection import symptoms
from fastcomm.metrics.findings.finding import Finding, findings_table, in_order
from fastcomm.metrics.findings.parts import StepTimes
from fastcomm.metrics.network import LevelUse, Network, network
from fastcomm.metrics.nodes import (
    FoundNodes,
    NodeFacts,
    find_nodes,
    group_levels,
    joined_levels,
)
from fastcomm.metrics.result import Metrics
from fastcomm.metrics.spill_files import EventBatch
from fastcomm.metrics.traffic import Exposure, Volume, exposures
from fastcomm.options import ByteKind, ClockAlignment
from fastcomm.trace.columns import table_of
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run import SkippedRank, Spread, agreed_size, expected_ranks, one_by_one
from fastcomm.trace.schema import OPS


def compute(  # noqa: PLR0913 - one keyword per choice
    partial: Partial,
    *,
    byte_kind: ByteKind,
    link: float | None,
    warnings: Sequence[str] = (),
    world_size: int | None = None,
    skipped: Sequence[SkippedRank] = (),
    clock_alignment: ClockAlignment = "collectives",
    spread: Spread = one_by_one,
    with_tables: bool = True,
    node_facts: NodeFacts | None = None,
) -> Metrics:
    """Compute the metrics from the merged partial of all ranks.

    Parameters
    ----------
    partial
        Of all ranks that were read.
    byte_kind
        The kind of bytes in bandwidth and volume.
    link
        Bandwidth of a link in bytes per second; None if unknown.
    warnings
        Warnings that come before those of the metrics.
    world_size
        Number of ranks of the job, if the caller knows it.
    skipped
        Ranks that could not be read.
    clock_alignment
        How the clocks are aligned on which times of ranks are compared.
    spread
        Maps a function over arguments, maybe in other processes.
    with_tables
        Whether the tables include those with a row per event or window.
    node_facts
        What is stated about nodes and their bandwidths.

    """
    partial = with_steps(partial)
    material, covered = material_of(partial), _Coverage.of(partial, world_size)
    tags = np.unique(material.sums["tag"].to_numpy()).tolist()
    comparison, tables = across(material, clock_alignment, spread)
    over_all = _over_all(partial, material.batches, tags, spread)
    outside = gaps.outside(note.device_time for note in partial.notes)
    times = rank_times(partial.iterations)
    facts = node_facts or NodeFacts()
    hosts = {note.rank: note.host for note in partial.notes}
    nodes = find_nodes(hosts, facts, covered.world_size)
    traffic_by_level, node_pairs = _network(partial, nodes, facts, covered)
    expected = expected_ranks(covered.ranks, covered.world_size, skipped)
    summary = _Summary.of(
        partial.iterations,
        comparison,
        traffic.volume(material.sums, covered.iterations, covered.timed),
        tags,
        is_whole=len(times) == expected,
        is_host_run=material.is_host_run,
        evidence=_idle_evidence(partial),
    )
    return Metrics(
        ranks=covered.ranks,
        iterations=covered.iterations,
        found_by=tuple(sorted({note.found_by for note in partial.notes if note.found_by})),
        iteration_clock=iteration_clock(partial.notes),
        outside=outside,
        bytes=byte_kind,
        link_bandwidth=link,
        **{item.name: getattr(summary, item.name) for item in fields(summary)},
        by_rank=times,
        windows=over_all.windows if covered.timed else None,
        bandwidth=traffic.bandwidth(material.sums, over_all.p95, link),
        across=comparison,
        network=traffic_by_level,
        host_communication=traffic.host_communication(partial.iterations),
        is_host_run=material.is_host_run,
        warnings=(
            *warnings,
            *gaps.fewer_steps(times, covered.ranks, covered.steps),
            *note_warnings(partial.notes, covered.missing, outside),
            *clock_warnings(comparison),
            *matching_warnings(comparison.matching),
            *nodes.warnings,
        ),
        world_size=covered.world_size,
        gpus=tuple(sorted({note.gpu for note in partial.notes if note.gpu is not None})),
        skipped=tuple(skipped),
        missing=covered.missing,
        tables={
            **_small_tables(partial, material.sums, link, nodes),
            "network": table_of(LevelUse, traffic_by_level.levels),
            "node_pairs": node_pairs,
            "ranks": table_of(RankTime, times),
            **(_large_tables(partial, material.batches) if with_tables else {}),
            "collectives": over_all.collectives,
            **tables,
            "findings": findings_table(summary.findings),
            "idle_evidence": _idle_evidence(partial),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coverage:
    """The ranks and steps that a partial has, and what is missing."""

    ranks: tuple[int, ...]
    missing: dict[str, tuple[int, ...]]  # ranks by key of `trace.MISSING_DATA`
    steps: int
    world_size: int | None

    @classmethod
    def of(cls, partial: Partial, world_size: int | None) -> Self:
        """Describe a partial; by default, the size of the job is what its ranks agree on."""
        stated = agreed_size((note.rank, note.world_size) for note in partial.notes)
        return cls(
            ranks=tuple(note.rank for note in partial.notes),
            missing=missing_data(partial.notes),
            steps=len(pc.unique(partial.iterations["iteration"].drop_null())),
            world_size=world_size or stated,
        )

    @property
    def untimed(self) -> tuple[int, ...]:
        """Ranks without times."""
        return self.missing.get("times", ())

    @property
    def timed(self) -> int:
        """Number of ranks with times."""
        return len(self.ranks) - len(self.untimed)

    @property
    def iterations(self) -> int | None:
        """Number of steps; None if no rank has times."""
        return self.steps if self.timed else None


def material_of(partial: Partial) -> Material:
    """Return the data by which ranks are compared."""
    return Material(
        ranks=tuple(note.rank for note in partial.notes),
        iterations=partial.iterations,
        batches=partial.batches(),
        sums=partial.all_sums(),
        groups=partial.groups,
        members=partial.members,
        world_size=max((note.world_size or 0 for note in partial.notes), default=0) or None,
        is_host_run=any(note.is_host_run for note in partial.notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """Means over all steps and ranks, and the findings."""

    iteration: IterationTimes
    breakdown: Breakdown
    volume: dict[str, Volume]
    overlap: Overlap
    exposure: dict[str, Exposure]
    idle: dict[str, float | None]
    idle_names: tuple[IdleName, ...]
    findings: tuple[Finding, ...]

    @classmethod
    def of(
        cls,
        iterations: pa.Table,
        across: Across,
        volume: dict[str, Volume],
        tags: Sequence[int],
        *,
        is_whole: bool,
        is_host_run: bool,
        evidence: pa.Table,
    ) -> Self:
        """Summarize the table of iterations: times, breakdown, overlap, exposure, and symptoms.

        `volume` is the communication by parallelism, `tags` are codes of parallelisms.
        `is_whole` says whether all ranks were measured, `is_host_run` whether they have no
        device; `evidence` is that of idle time.
        """
        causes, idle_names = totals.shares(iterations), totals.names(evidence, iterations)
        times, parts = iteration_times(iterations), breakdown(iterations)
        overlapped = overlap(iterations, [TAGS[tag] for tag in tags])
        exposure = exposures(parts.exact, times.mean_ns, across.waits, volume)
        symptoms_ = symptoms(
            StepTimes(
                iterations=iterations,
                breakdown=parts,
                step_ns=times.mean_ns or 0.0,
                exposure=exposure,
                overlap=overlapped.average_overlap_ratio,
                is_matched=across.matching.matched > 0,
                is_whole=is_whole,
                is_host_run=is_host_run,
                idle=causes,
                idle_names=idle_names,
            )
        )
        return cls(
            idle=causes,
            idle_names=idle_names,
            iteration=times,
            breakdown=parts,
            volume=volume,
            overlap=overlapped,
            exposure=exposure,
            findings=in_order([*across.causes, *symptoms_]),
        )


def _network(
    partial: Partial, nodes: FoundNodes, facts: NodeFacts, covered: _Coverage
) -> tuple[Network, pa.Table]:
    """Return the traffic by level, and by pair of nodes."""
    assert partial.sent is not None  # of at least one rank
    return network(
        partial.sent,
        partial.members,
        nodes,
        facts,
        iterations=covered.iterations,
        ranks=covered.timed,
        untimed=covered.untimed,
    )


def _small_tables(
    partial: Partial, sums: pa.Table, link: float | None, nodes: FoundNodes
) -> dict[str, pa.Table]:
    """Return the tables with a row per iteration, rank or process group."""
    levels = group_levels(partial.groups, partial.members, nodes.nodes)
    groups = partial.groups.append_column("level", levels)
    return {
        "iterations": traffic.iteration_rates(partial.iterations, link),
        "bandwidth_by_rank": traffic.by_rank(sums, link),
        "groups": groups,
        "group_members": partial.members,
        "group_tags": _group_tags(partial, groups),
    }


def _idle_evidence(partial: Partial) -> pa.Table:
    """Return the names behind the idle time of all ranks, `idle.totals.EVIDENCE`."""
    return totals.EVIDENCE.empty_table() if partial.idle is None else partial.idle


def _large_tables(partial: Partial, batches: Sequence[EventBatch]) -> dict[str, pa.Table]:
    """Return the tables with a row per event or window."""
    windows = whole_windows(partial.all_windows())
    columns = [name for name in partial.events.column_names if name != "payload_bytes"]
    return {
        "windows": _with_names(windows, {"from": TAGS, "to": TAGS}),
        "windows_cdf": windows_cdf(windows),
        "events": _with_names(spill_files.whole(batches, columns), {"tag": TAGS, "op": OPS}),
    }


@dataclass(frozen=True, slots=True)
class _OverAll:
    """Percentiles over the events, and statistics of the windows, of all ranks."""

    p95: dict[int, float]  # of rates, by tag
    collectives: pa.Table  # schema `spill_files.COLLECTIVES`
    windows: tuple[PhaseWindows, ...]


def _over_all(
    partial: Partial, batches: Sequence[EventBatch], tags: Sequence[int], spread: Spread
) -> _OverAll:
    """Compute all at once, so that no worker waits for one task to finish."""
    ops = sorted({op for batch in batches for op in batch.ops})
    tag_p95, op_rates = (
        functools.partial(spill_files.p95, batches),
        functools.partial(spill_files.collective_rates, batches),
    )
    tag_windows = functools.partial(windows_from, partial.all_windows())
    tasks = [(tag_p95, tag) for tag in tags] + [(op_rates, op) for op in ops]
    results: list[Any] = spread(
        _called, tasks + [(tag_windows, tag) for tag in range(len(TAGS))]
    )
    first, last = len(tags), len(tasks)
    return _OverAll(
        p95=dict(zip(tags, results[:first], strict=True)),
        collectives=pa.concat_tables(
            [spill_files.COLLECTIVES.empty_table(), *results[first:last]]
        ),
        windows=tuple(window for windows in results[last:] for window in windows),
    )


def _called(task: tuple[Callable[[int], Any], int]) -> Any:
    function, argument = task
    return function(argument)


def _with_names(table: pa.Table, columns: dict[str, tuple[str, ...]]) -> pa.Table:
    """Return the table with some columns of codes replaced by names.

    `columns` has the names of each column by code, from 0.
    """
    for name, values in columns.items():
        column = pa.DictionaryArray.from_arrays(
            table[name].combine_chunks().cast(pa.int32()), pa.array(values)
        )
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _group_tags(partial: Partial, groups: pa.Table) -> pa.Table:
    """Return a row per kind of group and tag: the tag's source, and how many ranks have it.

    `groups` are those of the partial with their levels.
    """
    keys = ["description", "size", "tag", "tag_source", "candidates"]
    if partial.tagged is not None:
        groups = described(partial.tagged, groups)
    rows = groups.group_by(keys, use_threads=False).aggregate(
        [
            ("rank", "count_distinct"),
            ("events", "sum"),
            ("level", "distinct", pc.CountOptions(mode="all")),
        ]
    )
    levels = [joined_levels(levels) for levels in rows["level_distinct"].to_pylist()]
    rows = rows.drop_columns("level_distinct").append_column(
        "level", pa.array(levels, pa.string())
    )
    rows = rows.rename_columns([*keys, "on_ranks", "events", "level"])
    return rows.sort_by([(key, "ascending") for key in ("tag", "description", "size")])
