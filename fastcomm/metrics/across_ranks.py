"""Compare ranks: clocks, matching, waits, links, outliers, causes of lost time and pauses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from fastcomm.idle import totals
from fastcomm.metrics import outliers as heat_
from fastcomm.metrics.findings import detection
from fastcomm.metrics.findings.finding import Finding
from fastcomm.metrics.findings.slow_links import slow_links
from fastcomm.metrics.findings.suspects import Measurements
from fastcomm.metrics.links import (
    GroupSummary,
    Link,
    MeanStep,
    group_of_all_ranks,
    groups_by_label,
    links,
    longer_exchange,
    pipeline_stages,
)
from fastcomm.metrics.matched_communication import (
    AlignedEvents,
    Matching,
    compare_all,
    matching,
)
from fastcomm.metrics.options import ClockAlignment
from fastcomm.metrics.outliers import (
    Heat,
    HeatArrays,
    Outlier,
    outliers,
)
from fastcomm.metrics.skew import RankWaits, Skew, Wait, over_tags, skew, waits
from fastcomm.metrics.spill_files import EventBatch
from fastcomm.metrics.step_counts import ComparedSteps, StepCounts
from fastcomm.metrics.ungrouped import ExpectedMembers
from fastcomm.ranks.clocks import ClockOffset
from fastcomm.trace.columns import filled, table_of
from fastcomm.trace.parallelisms import TAG
from fastcomm.trace.run_traces import ParallelMap, named_ranks, ranges
from fastcomm.trace.trace import SMALL
from fastcomm.units import plural

ClockTimes = Literal["aligned", "partly aligned", "unknown", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Clock offset of a rank from its reference rank; null if nothing tells it."""

    rank: int
    reference: int | None = None
    offset_ns: int | None = None
    spread_ns: int | None = None  # uncertainty, summed over the chain
    matches: int = 0  # number of collectives or messages, the fewest along the chain


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossRanks:
    """Results that need several ranks. Times are ns, as means over steps."""

    clock_alignment: ClockAlignment  # of the clocks on which times of ranks are compared
    offsets: tuple[Offset, ...]  # by rank
    unaligned: frozenset[tuple[int, int]]  # pairs of ranks of unknown offset
    matching: Matching
    skew: tuple[Skew, ...]
    waits: tuple[Wait, ...]  # by rank and tag
    links: tuple[Link, ...]
    heat: Heat
    outliers: tuple[Outlier, ...]
    causes: tuple[Finding, ...]  # the costliest first

    @property
    def times(self) -> ClockTimes:
        """How far the clocks on which times of ranks are compared are aligned.

        "raw" if alignment is off, "unknown" if no offset is known, "partly aligned" if that of
        some pair of ranks that communicate is unknown, otherwise "aligned".
        """
        if self.clock_alignment == "none":
            return "raw"
        if all(offset.reference is None for offset in self.offsets):
            return "unknown"
        return "partly aligned" if self.unaligned else "aligned"

    @property
    def by_rank(self) -> tuple[RankWaits, ...]:
        """Waits over all parallelisms; the rank that causes the longest wait is first."""
        return over_tags(self.waits)

    def mean_waits(self) -> dict[str, tuple[float, float]]:
        """Return wait and transfer per step and rank in ns, by parallelism."""
        ranks = max(1, len(self.heat.ranks))
        sums: dict[str, tuple[float, float]] = {}
        for row in self.waits:
            wait, transfer = sums.get(row.tag, (0.0, 0.0))
            sums[row.tag] = (wait + row.wait_ns, transfer + row.transfer_ns)
        return {tag: (wait / ranks, took / ranks) for tag, (wait, took) in sums.items()}

    def by_wait_caused(self, count: int | None = None) -> tuple[RankWaits, ...]:
        """Return the ranks that cause waits, the longest wait first; at most `count`.

        Empty if no collective is matched: then it is unknown which rank is late.
        """
        return tuple(rank for rank in self.by_rank if rank.caused_ns > 0)[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return the parts of the JSON document that need several ranks."""
        return {
            "clocks": {"times": self.times, "offsets": plain(self.offsets)},
            "matching": asdict(self.matching),
            **{name: plain(getattr(self, name)) for name in ("skew", "waits", "links")},
            "heat": self.heat.to_dict(),
            "outliers": plain(self.outliers),
        }


def plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return flat dataclasses as dicts; much faster than `asdict`, which copies."""
    return [{name: getattr(row, name) for name in row.__slots__} for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Data of all ranks by which they are compared."""

    ranks: Sequence[int]
    iterations: pa.Table
    batches: Sequence[EventBatch]
    sums: pa.Table  # `traffic.sums_by_rank`
    groups: pa.Table
    members: pa.Table
    world_size: int | None = None  # number of ranks of the job; null if unknown
    is_host_run: bool = False  # whether ranks compute and communicate without a device


def measure_across_ranks(
    material: Material, clock_alignment: ClockAlignment, parallel_map: ParallelMap
) -> tuple[AcrossRanks, dict[str, pa.Table]]:
    """Compare ranks: waits, skew, links, outliers and the causes of lost time.

    Parameters
    ----------
    material
        Tables and groups of all ranks.
    clock_alignment
        Whether the clocks of ranks are aligned first.
    parallel_map
        Runs a function on the batches of spilled tables.

    Returns
    -------
    tuple of AcrossRanks and dict
        The result, and its tables by name.

    """
    is_aligned = clock_alignment != "none"
    grid = HeatArrays.of(material.iterations)
    groups = groups_by_label(material.groups, material.members)
    stage, counts = pipeline_stages(groups), StepCounts.of(material.iterations)
    aligned = AlignedEvents.of(
        material.batches,
        parallel_map,
        is_aligned=is_aligned,
        is_host_run=material.is_host_run,
        job=expected_members(material),
        is_even=counts.is_even,
    )
    comparison = compare_all(aligned, parallel_map)
    steps = ComparedSteps.of(counts, comparison.matched_steps)
    if comparison.ungrouped.matched:
        groups |= group_of_all_ranks(material.ranks)
    waits_ = waits(comparison.waits, steps.of_rank)
    by_rank = over_tags(waits_)
    links_ = links(comparison.transfers, groups, MeanStep(compared=steps, ns=grid.step_ns))
    measurements = Measurements(
        grid=grid,
        stage=stage,
        received=_received(material.sums, counts),
        waits={row.rank: row.wait_ns for row in by_rank},
        caused={row.rank: row.caused_ns for row in by_rank},
        common_wait_caused=partial(_common_wait_caused, waits_, groups),
        longer=partial(longer_exchange, comparison, steps, material.groups),
        is_host_run=material.is_host_run,
        idle=totals.by_rank(material.iterations),
    )
    slow = slow_links(links_, comparison, grid, is_host_run=material.is_host_run)
    result = AcrossRanks(
        clock_alignment=clock_alignment,
        offsets=_all_offsets(material.ranks, comparison.offsets),
        unaligned=comparison.clocks.unaligned,
        matching=matching(comparison, material.sums),
        skew=skew(comparison.skews, steps.by_tag(comparison.waits)),
        waits=waits_,
        links=tuple(item.link for item in links_),
        heat=grid.heat(),
        outliers=outliers(grid, stage),
        causes=detection.causes(measurements, slow, by_rank if is_aligned else ()),
    )
    return result, _tables(result, grid)


def _common_wait_caused(
    waits_: Sequence[Wait], groups: Mapping[int, GroupSummary], ranks: Sequence[int]
) -> Mapping[int, float]:
    """Return the wait caused by each of some ranks, in groups of which all of them are members.

    If groups of several parallelisms have them all, the parallelism with the longest waits
    counts: one delay may cause a wait in each.
    """
    members = set(ranks)
    tags = {group.tag for group in groups.values() if members.issubset(group.ranks or ())}
    by_tag = (
        {
            row.rank: row.wait_caused_ns
            for row in waits_
            if row.tag == tag and row.rank in members
        }
        for tag in sorted(tags)
    )
    return max(by_tag, key=lambda by_rank: sum(by_rank.values()), default={})


def expected_members(material: Material) -> ExpectedMembers:
    """Return the expected members of collectives of unknown groups."""
    size = filled(material.groups["size"], 0)
    is_smaller = bool(((size > 1) & (size < len(material.ranks))).any())
    has_messages = bool(material.sums["messages"].to_numpy().any())
    return ExpectedMembers(
        ranks=material.ranks,
        world_size=material.world_size,
        contradiction="smaller groups" if is_smaller else "messages" if has_messages else None,
    )


def clock_warnings(result: AcrossRanks) -> Iterator[str]:
    """Yield a warning if clocks of ranks that communicate are unknown."""
    if result.clock_alignment == "none" or not result.unaligned:
        return
    ranks = sorted({rank for pair in result.unaligned for rank in pair})
    count = len(result.unaligned)
    yield (
        f"how the clocks of ranks {ranges(ranks)} differ is not known: what {count} "
        f"{plural(count, 'pair')} of ranks exchange goes in one direction, or contradicts "
        "itself. Waits and transfers of it are n/a, and no slow link is looked for among them; "
        "--clock-alignment none compares the clocks as recorded"
    )


def matching_warnings(matching: Matching) -> Iterator[str]:
    """Yield warnings on more than a few collectives that are left out."""
    if matching.apart > SMALL * (matching.collectives + matching.messages):
        yield (
            f"{matching.apart} of {matching.collectives + matching.messages} collectives and "
            "messages are left out of skew, waits and transfers: on aligned clocks, "
            "members end before others start. Clocks drift, events are matched wrongly, or "
            "the operations do not wait for each other"
        )
    count = matching.incomplete + matching.collectives
    if matching.incomplete <= SMALL * count:
        return
    ranks = matching.lacking_ranks
    yield (
        f"{matching.incomplete} of {count} collectives are not on all members that have events "
        f"of their group: {named_ranks(ranks)} {plural(len(ranks), 'lacks')} operations, which "
        "were lost or not recorded. They are left out of skew, waits and transfers"
    )


def _tables(result: AcrossRanks, grid: HeatArrays) -> dict[str, pa.Table]:
    """Return the tables by name."""
    return {
        "heat": heat_.table(grid),
        "skew": table_of(Skew, result.skew),
        "waits": table_of(Wait, result.waits),
        "links": table_of(Link, result.links),
        "outliers": table_of(Outlier, result.outliers),
        "clocks": table_of(Offset, result.offsets),
    }


def _all_offsets(ranks: Sequence[int], offsets: Sequence[ClockOffset]) -> tuple[Offset, ...]:
    """Return an offset for each rank, with nulls where unknown."""
    by_rank = {
        offset.rank: Offset(
            rank=offset.rank,
            reference=offset.reference,
            offset_ns=offset.offset_ns,
            spread_ns=offset.spread_ns,
            matches=offset.matches,
        )
        for offset in offsets
    }
    return tuple(by_rank.get(rank, Offset(rank=rank)) for rank in ranks)


def _received(sums: pa.Table, steps: StepCounts) -> dict[int, float]:
    """Return the bytes of each rank's all-to-alls of expert parallelism, per step."""
    exchanged = sums["exchanged_bytes"].to_numpy() > 0
    own = sums.filter(pa.array(exchanged & (sums["tag"].to_numpy() == TAG["EP"])))
    total = steps.per_step(own["rank"].to_numpy(), own["exchanged_bytes"].to_numpy())
    return dict(zip(own["rank"].to_pylist(), total.tolist(), strict=True))
