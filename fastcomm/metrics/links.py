"""Process groups of a run as links: who is in them, and how fast their collectives are.

The bandwidth counts from the last arrival on; links that stand apart from their peers are
findings.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa

from fastcomm.metrics import ungrouped
from fastcomm.metrics.findings import Evidence, Finding, confidence, spread
from fastcomm.metrics.matching import Compared, Expected
from fastcomm.metrics.outliers import LEAST_SHARE, HeatArrays, above_peers
from fastcomm.metrics.skew import LABEL, NO_PAIR, Transfers
from fastcomm.trace.columns import classes, members, sums
from fastcomm.trace.run import ranges
from fastcomm.trace.schema import OP, OPS, TAG, TAGS
from fastcomm.units import format_bandwidth, format_ns, percent
from fastcomm_kernels.arrays import Floats, Ints

Label = int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """One process group, as its first rank describes it."""

    label: Label
    description: str | None
    tag: str
    size: int | None
    ranks: tuple[int, ...] | None  # null where no trace names them
    seen: tuple[int, ...]  # ranks that have it


def groups_by_label(groups: pa.Table, who: pa.Table) -> dict[Label, GroupSummary]:
    """The groups that more than one rank can be in; `who` is `Partial.members`."""
    ranks = dict(zip(who["group"].to_pylist(), who["ranks"].to_pylist(), strict=True))
    table = groups.filter(groups["group"].is_valid())
    labels, order = np.unique(table["group"].to_numpy(), return_inverse=True)
    rows = members(order, len(labels))
    rank, found = table["rank"].to_numpy(), {}
    chosen = table.take(pa.array([own[0] for own in rows], pa.int64()))
    for row, own in zip(chosen.to_pylist(), rows, strict=True):
        found[row["group"]] = GroupSummary(
            label=row["group"],
            description=row["description"],
            tag=row["tag"],
            size=row["size"],
            ranks=tuple(ranks[row["group"]] or ()) or None,
            seen=tuple(np.unique(rank[own]).tolist()),
        )
    return found


def group_of_all_ranks(ranks: Sequence[int]) -> dict[Label, GroupSummary]:
    """Return the group that stands for all ranks, of collectives matched without a group."""
    group = GroupSummary(
        label=ungrouped.GROUP,
        description=None,
        tag="OTHER",
        size=len(ranks),
        ranks=tuple(ranks),
        seen=tuple(ranks),
    )
    return {group.label: group}


def labels_of_rank(groups: pa.Table, rank: int) -> set[Label]:
    """The labels of a rank's groups that more than one rank can be in."""
    own = groups.filter(pa.array(groups["rank"].to_numpy() == rank))
    return set(own["group"].drop_null().to_pylist())


def pipeline_stages(groups: dict[Label, GroupSummary]) -> dict[int, int]:
    """The pipeline stage of each rank that is in a group of tag PP: its place there.

    Of groups of several sizes the largest count: a pipeline has groups of its two ends, too.
    """
    pipelines = [each for each in groups.values() if each.tag == "PP" and each.ranks]
    longest = max((len(each.ranks or ()) for each in pipelines), default=0)
    return {
        rank: place
        for each in pipelines
        if each.ranks and len(each.ranks) == longest
        for place, rank in enumerate(each.ranks)
    }


NS = 1e9  # of a second
# A link is slow that reaches less of its peers' bandwidth and stands apart from them, if its
# transfers take longer by more of a step.
SLOW = 0.8
LEAST_EXCESS = 0.001
_PEERS = 4  # so many columns of the classes are the same for peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One group, or pair, in the collectives of one class, beside the others of that class."""

    group: str | None  # description
    ranks: tuple[int, ...]
    tag: str
    op: str
    size_from: int  # a power of two, in bytes
    count: int
    bus_bw: float | None  # sum of bus bytes / sum of transfers, bytes per second
    peers_bus_bw: float | None  # median of the other groups; null where there is none
    ratio: float | None  # bus_bw / peers_bus_bw
    excess_ns: float | None  # what its transfers take longer than at the peers' rate, a step
    is_slow: bool


@dataclass(frozen=True, slots=True)
class MeanStep:
    """What everything is a share of."""

    count: int
    ns: float | None  # mean


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A link, and how long its transfers would take at its peers' rate."""

    link: Link
    expected: Expected


@dataclass(frozen=True, slots=True)
class _Rates:
    """Transfers of known sizes by class and group; columns go together."""

    keys: Ints  # of `Transfers`
    counts: Ints
    moved: Ints  # bytes
    took: Ints  # ns
    per_byte: Floats  # ns; NaN where it cannot be told

    @classmethod
    def of(cls, all_: Transfers) -> Self:
        """Take them."""
        own = np.flatnonzero(all_.rated)
        moved, took = all_.rated_moved[own], all_.rated_took[own]
        return cls(
            keys=all_.keys[:, own],
            counts=all_.rated[own],
            moved=moved,
            took=took,
            per_byte=np.where(took > 0, took / np.maximum(moved, 1), np.nan),
        )

    def peers(self) -> list[Ints]:
        """Columns of the same class, which differ in the group alone; they lie together."""
        _, kind = classes(*self.keys[:_PEERS])
        edges = np.flatnonzero(np.diff(kind)) + 1
        return np.split(np.arange(len(kind)), edges) if len(kind) else []


def links(
    transfers: Transfers, groups: Mapping[Label, GroupSummary], step: MeanStep
) -> tuple[SlowLink, ...]:
    """A row a group and class of collectives, by tag, operation, size and ranks."""
    by_class = _Rates.of(transfers)
    found = [
        _link(by_class, column, middle, is_apart, groups, step)
        for columns in by_class.peers()
        for column, middle, is_apart in _beside(columns, by_class.per_byte[columns])
    ]
    return tuple(sorted(found, key=_order))


def _beside(columns: Ints, rates: Floats) -> Iterator[tuple[int, float, bool]]:
    """Each column with the median of the others, and whether it stands apart."""
    apart = {index for index, _, _ in above_peers(rates, 0.0)}
    others = medians_of_others(rates)
    for index, column in enumerate(columns.tolist()):
        yield column, float(others[index]), index in apart


def _link(
    by_class: _Rates,
    column: int,
    peers: float,
    is_apart: bool,
    groups: Mapping[Label, GroupSummary],
    step: MeanStep,
) -> SlowLink:
    tag, op, power, _, label, *pair = by_class.keys[:, column].tolist()
    moved, took = int(by_class.moved[column]), int(by_class.took[column])
    own = float(by_class.per_byte[column])
    excess = (took - moved * peers) / step.count
    group = groups[label]
    link = Link(
        group=group.description,
        ranks=tuple(pair) if op == OP["SendRecv"] else group.ranks or group.seen,
        tag=TAGS[tag],
        op=OPS[op],
        size_from=1 << power,
        count=int(by_class.counts[column]),
        **_rates(own, peers),
        excess_ns=None if np.isnan(peers) else excess,
        is_slow=is_apart and _is_slow(own, peers, excess, step),
    )
    expected = Expected(
        group=label,
        tag=tag,
        op=op,
        power=power,
        pair=(pair[0], pair[1]),
        ns=0.0,
        ns_per_byte=peers,
    )
    return SlowLink(link=link, expected=expected)


def _is_slow(rate: float, peers: float, excess: float, step: MeanStep) -> bool:
    return peers / rate < SLOW and excess > LEAST_EXCESS * (step.ns or 0.0)


def _order(found: SlowLink) -> tuple[int, str, int, tuple[int, ...]]:
    link = found.link
    return TAGS.index(link.tag), link.op, link.size_from, link.ranks


def _rates(own: float, peers: float) -> dict[str, Any]:
    """Of ns a byte; null where one is not known."""
    return {
        "bus_bw": None if np.isnan(own) else NS / own,
        "peers_bus_bw": None if np.isnan(peers) else NS / peers,
        "ratio": None if np.isnan(peers) or np.isnan(own) else peers / own,
    }


def medians_of_others(values: Floats) -> Floats:
    """Of each value the median of all others but NaN; NaN where there is none."""
    known = np.flatnonzero(~np.isnan(values))
    found = np.full(len(values), np.median(values[known]) if len(known) else np.nan)
    if len(known) == 1:
        found[known] = np.nan
    elif len(known):
        order = known[np.argsort(values[known], kind="stable")]
        ordered, place = values[order], np.arange(len(known))
        # Without one of them, those behind it move up.
        low, high = (len(known) - 2) // 2, (len(known) - 1) // 2
        found[order] = (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
    return found


@dataclass(slots=True)
class _Suspect:
    """Ranks that all of some slow groups have in common."""

    ranks: frozenset[int]
    groups: list[SlowLink]
    cost_ns: float = 0.0

    @property
    def collectives(self) -> int:
        """How many are slow: one alone may have met another on its way."""
        return sum(each.link.count for each in self.groups)


def slow_links(linked: Sequence[SlowLink], seen: Compared, grid: HeatArrays) -> list[Finding]:
    """Return a finding for each set of ranks that slow groups share; it costs exposed time."""
    step, count = grid.step_ns, max(1, len(grid.iterations))
    if not step:
        return []
    slow, suspects = [found for found in linked if found.link.is_slow], list[_Suspect]()
    by_link = seen.excess([found.expected for found in slow])
    for found, by_rank in zip(slow, by_link, strict=True):
        cost = float(np.median(list(by_rank.values()))) if by_rank else 0.0
        _add(suspects, found, cost / count)
    return [
        _finding(each, grid, step)
        for each in suspects
        if each.cost_ns > LEAST_SHARE * step and each.collectives > 1
    ]


def _add(suspects: list[_Suspect], found: SlowLink, cost: float) -> None:
    ranks = frozenset(found.link.ranks)
    for each in suspects:
        if each.ranks & ranks:
            each.ranks &= ranks
            each.groups.append(found)
            each.cost_ns += cost
            return
    suspects.append(_Suspect(ranks, [found], cost))


def _finding(suspect: _Suspect, grid: HeatArrays, step_ns: float) -> Finding:
    worst = min((each.link for each in suspect.groups), key=lambda link: link.ratio or 1.0)
    ranks, cost = tuple(sorted(suspect.ranks)), suspect.cost_ns
    tags = sorted({each.link.tag for each in suspect.groups})
    exposed = grid.middle("exposed_ns", np.flatnonzero(np.isin(grid.ranks, ranks)))
    evidence = Evidence(
        group=worst.group,
        tag="+".join(tags),
        steps=int((~np.isnan(exposed)).sum()),
        spread_ns=spread(exposed),
        bus_bw=worst.bus_bw,
        peers_bus_bw=worst.peers_bus_bw,
        slow_groups=len({each.link.ranks for each in suspect.groups}),
    )
    rate, peers = worst.bus_bw or 0.0, worst.peers_bus_bw or 0.0
    return Finding(
        kind="slow_link",
        text=f"{_whose(ranks)} slow: {' and '.join(tags)} collectives reach "
        f"{format_bandwidth(rate)}, those of their peers {format_bandwidth(peers)}, "
        f"+{format_ns(cost)} exposed communication per step ({percent(cost / step_ns)} of the "
        "step).",
        ranks=ranks,
        cost_ns=cost,
        share=cost / step_ns,
        confidence=confidence(cost, evidence.spread_ns, ranks=len(grid.ranks), is_matched=True),
        evidence=evidence,
    )


def _whose(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"The link of rank {ranks[0]} is"
    return f"A link among ranks {ranges(ranks)} is"


def longer_exchange(
    seen: Compared, steps: int, own: Collection[Label], rank: int
) -> float | None:
    """What a rank's all-to-alls of experts take longer than those of other groups, a step.

    In ns, and only where nothing hides it; `own` are the groups of the rank. Null where no
    other group exchanges.
    """
    transfers = seen.transfers
    chosen = transfers.of_kind(TAG["EP"], OP["AllToAll"])
    (labels,), place = classes(transfers.keys[LABEL, chosen])
    mine = np.isin(labels, list(own))
    if mine.all() or not mine.any():
        return None
    count, took = (
        sums(place, each[chosen], len(labels)) for each in (transfers.counts, transfers.took)
    )
    means = took / count
    usual = float(np.median(means[~mine]))
    expected = [
        Expected(
            group=label,
            tag=TAG["EP"],
            op=OP["AllToAll"],
            power=None,
            pair=NO_PAIR,
            ns=usual,
            ns_per_byte=0.0,
        )
        for label in labels[mine].tolist()
    ]
    return sum(by_rank.get(rank, 0.0) for by_rank in seen.excess(expected)) / steps
