"""The questions that only many ranks together answer, answered from the merged tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args, get_type_hints

import pyarrow as pa

from fastcomm.exchange.clocks import ClockOffset
from fastcomm.metrics import outliers as heat_
from fastcomm.metrics import suspects
from fastcomm.metrics.findings import Finding, in_order
from fastcomm.metrics.links import (
    GroupSummary,
    Link,
    MeanStep,
    group_of_all_ranks,
    groups_by_label,
    labels_of_rank,
    links,
    longer_exchange,
    pipeline_stages,
    slow_links,
)
from fastcomm.metrics.matching import Matching, compare_all, matching
from fastcomm.metrics.outliers import Heat, HeatArrays, Outlier, outliers
from fastcomm.metrics.pieces import Piece
from fastcomm.metrics.skew import RankWaits, Skew, Wait, over_tags, skew, waits
from fastcomm.metrics.suspects import Known
from fastcomm.metrics.ungrouped import ExpectedMembers
from fastcomm.options import ClockKind
from fastcomm.trace.columns import filled
from fastcomm.trace.run import Spread
from fastcomm.trace.schema import TAG


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """How far a rank's clock is ahead of its reference's; null where nothing joins them."""

    rank: int
    reference: int | None
    offset_ns: int | None
    spread_ns: int | None  # median deviation of the collectives, summed on the way
    matches: int  # collectives that say so, the fewest on the way


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """What is seen of ranks beside each other. Times in ns; `n a step` are means over steps."""

    clocks: ClockKind  # on which the times of ranks are compared
    offsets: tuple[Offset, ...]  # by rank
    matching: Matching
    skew: tuple[Skew, ...]
    waits: tuple[Wait, ...]  # by rank and tag
    links: tuple[Link, ...]
    heat: Heat
    outliers: tuple[Outlier, ...]
    causes: tuple[Finding, ...]  # the costliest first

    @property
    def by_rank(self) -> tuple[RankWaits, ...]:
        """Waits over all parallelisms; the rank that others wait for the longest is first."""
        return over_tags(self.waits)

    def mean_waits(self) -> dict[str, tuple[float, float]]:
        """Return the wait and the transfer of a mean rank in a step, in ns, by parallelism."""
        ranks = max(1, len(self.heat.ranks))
        sums: dict[str, tuple[float, float]] = {}
        for each in self.waits:
            wait, transfer = sums.get(each.tag, (0.0, 0.0))
            sums[each.tag] = (wait + each.wait_ns, transfer + each.transfer_ns)
        return {tag: (wait / ranks, took / ranks) for tag, (wait, took) in sums.items()}

    def by_wait_caused(self, count: int | None = None) -> tuple[RankWaits, ...]:
        """Return the ranks that others wait for, by the wait they cause; at most `count`.

        Empty where no collective is matched: then nothing tells which rank is late.
        """
        return tuple(each for each in self.by_rank if each.caused_ns > 0)[:count]

    def to_dict(self) -> dict[str, Any]:
        """The keys of the JSON object."""
        many = {name: plain(getattr(self, name)) for name in ("skew", "waits", "links")}
        return {
            "clocks": {"times": self.clocks, "offsets": plain(self.offsets)},
            "matching": asdict(self.matching),
            **many,
            "heat": self.heat.to_dict(),
            "outliers": plain(self.outliers),
        }


def plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Flat dataclasses as objects; `asdict`, which copies, takes seconds for thousands."""
    return [{name: getattr(row, name) for name in row.__slots__} for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What ranks are compared by."""

    ranks: Sequence[int]
    iterations: pa.Table
    pieces: Sequence[Piece]
    sums: pa.Table  # `traffic.sums_by_rank`
    groups: pa.Table
    members: pa.Table
    world_size: int | None = None  # of the job, as far as traces tell


def across(
    of: Material, clocks: ClockKind, spread: Spread
) -> tuple[Across, dict[str, pa.Table]]:
    """The answers, and the tables behind them."""
    grid, groups = HeatArrays.of(of.iterations), groups_by_label(of.groups, of.members)
    stage, steps = pipeline_stages(groups), max(1, len(grid.iterations))
    job = _job(of)
    seen = compare_all(of.pieces, spread, is_aligned=clocks == "aligned", job=job)
    if seen.ungrouped.matched:
        groups |= group_of_all_ranks(of.ranks)
    waited = waits(seen.waits, steps)
    by_rank = over_tags(waited)
    step = MeanStep(count=steps, ns=grid.step_ns)
    linked = links(seen.transfers, groups, step)
    known = Known(
        grid=grid,
        stage=stage,
        received=_received(of.sums, steps),
        waits={each.rank: each.wait_ns for each in by_rank},
        caused={each.rank: each.caused_ns for each in by_rank},
        caused_together=lambda ranks: _caused_together(waited, groups, ranks),
        longer=lambda rank: longer_exchange(seen, steps, labels_of_rank(of.groups, rank), rank),
    )
    causes = [*suspects.own_work(known), *slow_links(linked, seen, grid)]
    if not in_order(causes) and clocks == "aligned":
        causes = suspects.late_rank(known, by_rank)
    found = Across(
        clocks=clocks,
        offsets=_all_offsets(of.ranks, seen.offsets),
        matching=matching(seen, of.sums),
        skew=skew(seen.skews, steps),
        waits=waited,
        links=tuple(each.link for each in linked),
        heat=grid.heat(),
        outliers=outliers(grid, stage),
        causes=in_order(causes),
    )
    return found, _tables(found, grid)


def _caused_together(
    waited: Sequence[Wait], groups: Mapping[int, GroupSummary], ranks: Sequence[int]
) -> Mapping[int, float]:
    """Return how long others wait for each of some ranks alone, in groups that all are in.

    Of several parallelisms whose groups hold them all, the one with the longest waits counts:
    a delay may be waited for once in each.
    """
    asked = set(ranks)
    tags = {each.tag for each in groups.values() if asked.issubset(each.ranks or ())}
    by_tag = (
        {
            each.rank: each.wait_caused_ns
            for each in waited
            if each.tag == tag and each.rank in asked
        }
        for tag in sorted(tags)
    )
    return max(by_tag, key=lambda by_rank: sum(by_rank.values()), default={})


def _job(of: Material) -> ExpectedMembers:
    """Return who should be in collectives of no known group, as far as all ranks tell."""
    size = filled(of.groups["size"], 0)
    is_smaller = bool(((size > 1) & (size < len(of.ranks))).any())
    has_messages = bool(of.sums["messages"].to_numpy().any())
    return ExpectedMembers(
        ranks=of.ranks,
        world_size=of.world_size,
        contradiction="smaller groups" if is_smaller else "messages" if has_messages else None,
    )


def _tables(found: Across, grid: HeatArrays) -> dict[str, pa.Table]:
    """A table a question."""
    return {
        "heat": heat_.table(grid),
        **{
            name: table_of(cls, rows)
            for name, cls, rows in (
                ("skew", Skew, found.skew),
                ("waits", Wait, found.waits),
                ("links", Link, found.links),
                ("outliers", Outlier, found.outliers),
                ("clocks", Offset, found.offsets),
            )
        },
    }


def _all_offsets(ranks: Sequence[int], known: Sequence[ClockOffset]) -> tuple[Offset, ...]:
    """A row a rank."""
    by_rank = {each.rank: each for each in known}
    found = []
    for rank in ranks:
        each = by_rank.get(rank)
        found.append(
            Offset(
                rank=rank,
                reference=each.reference if each else None,
                offset_ns=each.offset_ns if each else None,
                spread_ns=each.spread_ns if each else None,
                matches=each.matches if each else 0,
            )
        )
    return tuple(found)


_TYPES: dict[object, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: pa.string(),
    tuple[int, ...]: pa.list_(pa.int64()),
}


def table_of(cls: type, rows: Sequence[Any]) -> pa.Table:
    """A table with a row each of a flat dataclass; the columns are there without rows, too."""
    fields = []
    for name, hint in get_type_hints(cls).items():
        some = [each for each in get_args(hint) if each is not type(None)]
        kind = some[0] if some and len(some) < len(get_args(hint)) else hint
        fields.append((name, _TYPES.get(kind, pa.string())))
    schema = pa.schema(fields)
    columns = {name: [getattr(each, name) for each in rows] for name in schema.names}
    return pa.table(columns, schema=schema)


def _received(sums: pa.Table, steps: int) -> dict[int, float]:
    """Bytes of each rank's all-to-alls of expert parallelism, a step."""
    exchanged = sums["exchanged_bytes"].to_numpy() > 0
    own = sums.filter(pa.array(exchanged & (sums["tag"].to_numpy() == TAG["EP"])))
    total = own["exchanged_bytes"].to_numpy() / steps
    return dict(zip(own["rank"].to_pylist(), total.tolist(), strict=True))
