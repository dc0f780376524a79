"""Measure every rank in a worker, and compute the metrics of a run from the merged partial."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastcomm import preparation
from fastcomm.errors import ConfigError
from fastcomm.executors.executor import OpenedRun
from fastcomm.formats.opening import missing as missing_ranks
from fastcomm.formats.opening import with_world
from fastcomm.hardware.clusters import load_node
from fastcomm.idle import totals
from fastcomm.idle.totals import IdleName
from fastcomm.metrics import missing_data, outside_steps, spill_files, traffic
from fastcomm.metrics.across_ranks import (
    AcrossRanks,
    Material,
    clock_warnings,
    matching_warnings,
    measure_across_ranks,
)
from fastcomm.metrics.agreement import Agreement, gather_alike
from fastcomm.metrics.breakdown import (
    Breakdown,
    IterationTimes,
    Overlap,
    PhaseWindows,
    RankTime,
    breakdown,
    iteration_times,
    merged_windows,
    overlap,
    rank_times,
    windows_cdf,
    windows_from,
)
from fastcomm.metrics.findings.detection import symptoms
from fastcomm.metrics.findings.finding import Finding, findings_table, in_order
from fastcomm.metrics.findings.slow_gemms import slow_gemms
from fastcomm.metrics.findings.symptoms import StepTimes
from fastcomm.metrics.network import (
    FoundNodes,
    LevelUse,
    Network,
    NetworkLevel,
    NodeFacts,
    find_nodes,
    group_levels,
    joined_levels,
    network,
)
from fastcomm.metrics.options import ByteKind, ClockAlignment, MetricsOptions
from fastcomm.metrics.partial import (
    Partial,
    RankNote,
    described,
    iteration_clock,
    merge,
    note_warnings,
    ranks_with_missing_data,
    tag_warnings,
    with_steps,
)
from fastcomm.metrics.partial_files import RankPartials
from fastcomm.metrics.rank_pairs import RankPairs, rank_pairs
from fastcomm.metrics.result import Metrics
from fastcomm.metrics.spill_files import EventBatch
from fastcomm.metrics.step_counts import StepCounts
from fastcomm.metrics.traffic import Exposure, Volume, exposures
from fastcomm.ranks.group_tags import GroupTags
from fastcomm.trace.columns import table_of
from fastcomm.trace.parallelisms import TAGS
from fastcomm.trace.run_traces import (
    ParallelMap,
    RunTraces,
    SkippedRank,
    agreed_size,
    expected_ranks,
    one_by_one,
    ranges,
)
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
    parallel_map: ParallelMap = one_by_one,
    with_tables: bool = True,
    node_facts: NodeFacts | None = None,
    group_tags: GroupTags | None = None,
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
    parallel_map
        Maps a function over arguments, maybe in other processes.
    with_tables
        Whether the tables include those with a row per event or window.
    node_facts
        What is stated about nodes and their bandwidths.
    group_tags
        Tags by which the ranks were measured, instead of those of each alone.

    """
    partial = with_steps(partial)
    material, covered = material_of(partial), _Coverage.of(partial, world_size)
    tags = np.unique(material.sums["tag"].to_numpy()).tolist()
    comparison, tables = measure_across_ranks(material, clock_alignment, parallel_map)
    over_all = _over_all(partial, material.batches, tags, parallel_map)
    sent = _SentBytes.of(partial, node_facts or NodeFacts(), covered)
    times = rank_times(partial.iterations)
    summary = _Summary.of(
        partial.iterations,
        comparison,
        traffic.volume(material.sums, covered.counts),
        tags,
        is_whole=len(times) == expected_ranks(covered.ranks, covered.world_size, skipped),
        is_host_run=material.is_host_run,
        evidence=_idle_evidence(partial),
    )
    return Metrics(
        ranks=covered.ranks,
        iterations=covered.iterations,
        **_facts(partial.notes),
        bytes=byte_kind,
        link_bandwidth=link,
        **{item.name: getattr(summary, item.name) for item in fields(summary)},
        by_rank=times,
        windows=over_all.windows if covered.timed else None,
        bandwidth=traffic.bandwidth(material.sums, over_all.p95, link),
        across=comparison,
        network=sent.network,
        rank_pairs=sent.pairs,
        host_communication=traffic.host_communication(partial.iterations),
        is_host_run=material.is_host_run,
        group_tags=group_tags or {},
        warnings=(
            *warnings,
            *missing_data.fewer_steps(times, covered.ranks, covered.all_steps.steps),
            *_warnings(partial, covered, comparison),
            *sent.nodes.warnings,
        ),
        world_size=covered.world_size,
        skipped=tuple(skipped),
        missing=covered.missing,
        tables={
            **_small_tables(partial, material.sums, link, sent.nodes),
            **sent.tables,
            "ranks": table_of(RankTime, times),
            **(_large_tables(partial, material.batches) if with_tables else {}),
            "collectives": over_all.collectives,
            **tables,
            "findings": findings_table(summary.findings),
            "idle_evidence": _idle_evidence(partial),
        },
    )


def _facts(notes: Sequence[RankNote]) -> dict[str, Any]:
    """Return the fields of `Metrics` that follow from the notes of all ranks."""
    return {
        "found_by": tuple(sorted({note.found_by for note in notes if note.found_by})),
        "iteration_clock": iteration_clock(notes),
        "outside": outside_steps.outside(note.device_time for note in notes),
        "gpus": tuple(sorted({note.gpu for note in notes if note.gpu is not None})),
    }


def _warnings(partial: Partial, covered: "_Coverage", comparison: AcrossRanks) -> list[str]:
    """Return the warnings about traces, parallelisms, clocks and matching."""
    outside = outside_steps.outside(note.device_time for note in partial.notes)
    return [
        *note_warnings(partial.notes, covered.missing, outside),
        *tag_warnings(partial.groups),
        *clock_warnings(comparison),
        *matching_warnings(comparison.matching),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coverage:
    """The ranks and steps that a partial has, and what is missing."""

    ranks: tuple[int, ...]
    missing: dict[str, tuple[int, ...]]  # ranks by key of `trace.MISSING_DATA`
    all_steps: StepCounts
    world_size: int | None

    @classmethod
    def of(cls, partial: Partial, world_size: int | None) -> Self:
        """Describe a partial; by default, the size of the job is what its ranks agree on."""
        stated = agreed_size((note.rank, note.world_size) for note in partial.notes)
        return cls(
            ranks=tuple(note.rank for note in partial.notes),
            missing=ranks_with_missing_data(partial.notes),
            all_steps=StepCounts.of(partial.iterations),
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
        return self.all_steps.steps if self.timed else None

    @property
    def counts(self) -> StepCounts | None:
        """Numbers of steps of the ranks; None if there is none, or no rank has times."""
        return self.all_steps if self.iterations else None


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
        across: AcrossRanks,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentBytes:
    """What ranks send, by level of the network and by pair, and between which nodes."""

    nodes: FoundNodes
    network: Network
    pairs: RankPairs
    tables: dict[str, pa.Table]

    @classmethod
    def of(cls, partial: Partial, facts: NodeFacts, covered: _Coverage) -> Self:
        """Sum up what the ranks of a partial send."""
        assert partial.sent is not None  # of at least one rank
        assert partial.exchanged is not None
        hosts = {note.rank: note.host for note in partial.notes}
        nodes = find_nodes(hosts, facts, covered.world_size)
        by_level, node_pairs = network(
            partial.sent,
            partial.members,
            nodes,
            facts,
            counts=covered.counts,
            untimed=covered.untimed,
        )
        pairs, pair_table = rank_pairs(partial.exchanged, covered.counts)
        tables = {
            "network": table_of(LevelUse, by_level.levels),
            "node_pairs": node_pairs,
            "rank_pairs": pair_table,
        }
        return cls(nodes=nodes, network=by_level, pairs=pairs, tables=tables)


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
    windows = merged_windows(partial.all_windows())
    columns = [name for name in partial.events.column_names if name != "payload_bytes"]
    return {
        "windows": _with_names(windows, {"from": TAGS, "to": TAGS}),
        "windows_cdf": windows_cdf(windows),
        "events": _with_names(
            spill_files.all_events(batches, columns), {"tag": TAGS, "op": OPS}
        ),
    }


@dataclass(frozen=True, slots=True)
class _OverAll:
    """Percentiles over the events, and statistics of the windows, of all ranks."""

    p95: dict[int, float]  # of rates, by tag
    collectives: pa.Table  # schema `spill_files.COLLECTIVES`
    windows: tuple[PhaseWindows, ...]


def _over_all(
    partial: Partial,
    batches: Sequence[EventBatch],
    tags: Sequence[int],
    parallel_map: ParallelMap,
) -> _OverAll:
    """Compute all at once, so that no worker waits for one task to finish."""
    ops = sorted({op for batch in batches for op in batch.ops})
    tag_p95, op_rates = (
        functools.partial(spill_files.p95, batches),
        functools.partial(spill_files.collective_rates, batches),
    )
    tag_windows = functools.partial(windows_from, partial.all_windows())
    tasks = [(tag_p95, tag) for tag in tags] + [(op_rates, op) for op in ops]
    results: list[Any] = parallel_map(
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


def compute_metrics(run: OpenedRun, options: MetricsOptions | None = None) -> Metrics:
    """Measure a run: METRIC 0 to 5 of the specification, and comparisons across ranks.

    Iterations are on the device's clock if every rank with device work has its launches
    recorded, and otherwise by the host's marks, on all ranks alike.

    Parameters
    ----------
    run
        The traces.
    options
        What is measured; by default all steps.

    Raises
    ------
    FastcommError
        If a rank cannot be read; of a run that goes on, if none can.

    """
    options = options or MetricsOptions()
    run.compile(preparation.compile_kernels)
    measure = partial(
        Partial.of,
        byte_kind=options.bytes,
        only=None if options.steps is None else frozenset(options.steps),
    )
    measured = gather_alike(run, measure, _computation(run, options).finish)
    measured = replace(measured, tokens_per_step=options.tokens_per_step)
    if not options.flops:
        return measured
    # Slow imports, and most runs are measured without FLOPs.
    from fastcomm.device_work.analysis import answered
    from fastcomm.device_work.totals import WorkQuestion

    work = WorkQuestion(by=("category",), steps=options.steps, flops=True, gpu=options.gpu)
    (kernels,) = answered(run, work)
    gemms = slow_gemms(kernels.findings, kernels.read.ranks, kernels.step_ns or 0.0)
    findings = in_order([*measured.findings, *gemms])
    tables = {**measured.tables, "findings": findings_table(findings)}
    return replace(measured, flops=kernels.flops, findings=findings, tables=tables)


def of_partials(
    partials: Sequence[RankPartials],
    options: MetricsOptions | None = None,
    skipped: Sequence[SkippedRank] = (),
) -> Metrics:
    """Compute the metrics of a run from the partial results of its ranks, without traces.

    Parameters
    ----------
    partials
        Of at least one rank, each of another.
    options
        What is computed. Bytes and steps are those that the ranks were measured with; FLOPs
        are not counted.
    skipped
        Ranks without a partial result.

    Raises
    ------
    TraceFileError
        If the ranks contradict each other about the world size.

    """
    options = options or MetricsOptions()
    notes = [part.note for part in partials]
    run = RunTraces(
        sources=(),
        world_size=agreed_size((note.rank, note.world_size) for note in notes),
        skipped=tuple(skipped),
    )
    numbers = [rank.rank for rank in skipped if rank.rank is not None]
    present = sorted({*numbers, *(note.rank for note in notes)})
    run = replace(run, warnings=tuple(missing_ranks(present, run.world_size)))
    computation = replace(_computation(run, options), only=None)
    whole = merge([part.device for part in partials])
    # Without traces, operations keep the tags that their rank gave them.
    agreement = replace(Agreement.of(whole), group_tags={})
    if agreement.by_host:
        whole = merge([part.host for part in partials])
    result = computation.finish(whole, skipped, one_by_one, agreement)
    return replace(result, tokens_per_step=options.tokens_per_step)


def _computation(run: RunTraces, options: MetricsOptions) -> "_Computation":
    """Return what metrics need besides the partial results of the ranks."""
    link = options.link_bandwidth
    return _Computation(
        byte_kind=options.bytes,
        link=run.link_bandwidth if link is None else float(link),
        only=None if options.steps is None else frozenset(options.steps),
        warnings=run.warnings,
        guessed_ranks=run.guessed_ranks,
        world_size=run.world_size,
        clock_alignment=options.clock_alignment,
        with_tables=options.with_tables,
        node_facts=_node_facts(run, options),
    )


def _node_facts(run: RunTraces, options: MetricsOptions) -> NodeFacts:
    """Return what options, cluster and configuration state about nodes."""
    if options.cluster is None:
        limits: dict[NetworkLevel, float | None] = {
            "node": run.scale_up,
            "network": run.scale_out,
        }
        return NodeFacts(gpus_per_node=options.gpus_per_node, limits=limits)
    gpus, links = load_node(options.cluster)
    return NodeFacts(
        gpus_per_node=options.gpus_per_node,
        cluster_gpus=gpus,
        limits={"node": links.intra, "network": links.inter},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computation:
    """Options and facts of a run that metrics need besides the partial results of its ranks."""

    byte_kind: ByteKind
    link: float | None
    only: frozenset[int] | None
    warnings: tuple[str, ...]
    guessed_ranks: tuple[int, ...]
    world_size: int | None
    clock_alignment: ClockAlignment
    with_tables: bool
    node_facts: NodeFacts

    def finish(
        self,
        whole: Partial,
        skipped: Sequence[SkippedRank],
        parallel_map: ParallelMap,
        agreement: Agreement,
    ) -> Metrics:
        """Return the metrics from the merged partial result of all ranks, which agree."""
        if self.only is not None:
            self._check_steps(whole)
        return compute(
            whole,
            byte_kind=self.byte_kind,
            link=self.link,
            warnings=self._warnings(whole.notes, agreement.by_host),
            world_size=self.world_size,
            skipped=sorted(skipped, key=lambda skipped: skipped.path),
            clock_alignment=self.clock_alignment,
            parallel_map=parallel_map,
            with_tables=self.with_tables,
            node_facts=self.node_facts,
            group_tags=agreement.group_tags,
        )

    def _check_steps(self, whole: Partial) -> None:
        """Raise `ConfigError` if steps were chosen that no rank has, or none."""
        present = whole.iterations["iteration"].unique().to_pylist()
        missing = (self.only or frozenset()).difference(present)
        if missing or not present:
            numbers = sorted({note.steps or "no steps" for note in whole.notes})
            raise ConfigError(
                f"no step {ranges(sorted(missing))}; the run has {' or '.join(numbers)}"
            )

    def _warnings(self, notes: Sequence[RankNote], by_host: Sequence[int]) -> tuple[str, ...]:
        """Return the warnings of the run, with the world size that its ranks state."""
        # A file that is alone says its rank with its world.
        ranks = (
            [note.rank for note in notes]
            if len(self.guessed_ranks) == 1
            else self.guessed_ranks
        )
        world = agreed_size((note.rank, note.world_size) for note in notes)
        warnings = with_world(self.warnings, ranks, world)
        if not by_host:
            return warnings
        return (
            *warnings,
            "the iterations of all ranks are by the host's marks, because rank "
            f"{ranges(by_host)} cannot be on the device's clock",
        )
