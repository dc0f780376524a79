"""Process groups of a run as links: their ranks, bandwidths of their collectives, slow links.

The bandwidth of a collective counts from its last arrival on. A link is compared with its
peers: groups with collectives of the same class (tag, operation, size, number of ranks).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from fastcomm.metrics import ungrouped
from fastcomm.metrics.matched_communication import ExpectedTransfer, RankComparison
from fastcomm.metrics.outliers import above_peers
from fastcomm.metrics.skew import LABEL, Transfers
from fastcomm.metrics.step_counts import ComparedSteps
from fastcomm.trace.columns import alike, block_starts, members, sums
from fastcomm.trace.parallelisms import TAG, TAGS
from fastcomm.trace.schema import OP, OPS
from fastcomm_kernels.arrays import Floats, Ints

Label = int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """One process group, as its first rank describes it."""

    label: Label
    description: str | None
    tag: str
    size: int | None
    ranks: tuple[int, ...] | None  # null if no trace names them
    present: tuple[int, ...]  # ranks that were read and have it


def groups_by_label(groups: pa.Table, group_members: pa.Table) -> dict[Label, GroupSummary]:
    """Return the groups of known label; `group_members` is the table `Partial.members`."""
    ranks = dict(
        zip(group_members["group"].to_pylist(), group_members["ranks"].to_pylist(), strict=True)
    )
    table = groups.filter(groups["group"].is_valid())
    labels, order = np.unique(table["group"].to_numpy(), return_inverse=True)
    rows = members(order, len(labels))
    rank, by_label = table["rank"].to_numpy(), {}
    chosen = table.take(pa.array([own[0] for own in rows], pa.int64()))
    for row, own in zip(chosen.to_pylist(), rows, strict=True):
        by_label[row["group"]] = GroupSummary(
            label=row["group"],
            description=row["description"],
            tag=row["tag"],
            size=row["size"],
            ranks=tuple(ranks[row["group"]] or ()) or None,
            present=tuple(np.unique(rank[own]).tolist()),
        )
    return by_label


def group_of_all_ranks(ranks: Sequence[int]) -> dict[Label, GroupSummary]:
    """Return a group of all `ranks` by its label, for collectives that name no group."""
    group = GroupSummary(
        label=ungrouped.GROUP,
        description=None,
        tag="OTHER",
        size=len(ranks),
        ranks=tuple(ranks),
        present=tuple(ranks),
    )
    return {group.label: group}


def pipeline_stages(groups: dict[Label, GroupSummary]) -> dict[int, int]:
    """Return the pipeline stage of each rank in a group of tag PP: its index in the group.

    Only the largest groups count, as pipelines can have groups of their two ends, too.
    """
    pipelines = [group for group in groups.values() if group.tag == "PP" and group.ranks]
    longest = max((len(group.ranks or ()) for group in pipelines), default=0)
    return {
        rank: place
        for group in pipelines
        if group.ranks and len(group.ranks) == longest
        for place, rank in enumerate(group.ranks)
    }


NS = 1e9  # of a second
# A link is slow if it stands apart from its peers, reaches less than SLOW of their bandwidth,
# and its transfers take longer by more than LEAST_EXCESS of the step.
SLOW = 0.8
LEAST_EXCESS = 0.001
_PEERS = 4  # number of rows of `Transfers.keys` that are equal among peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One group, or pair of ranks, in collectives of one class, compared with its peers."""

    group: str | None  # description
    ranks: tuple[int, ...]
    tag: str
    op: str
    size_from: int  # a power of two, in bytes
    count: int  # number of collectives
    bus_bw: float | None  # sum of bus bytes / sum of transfer times, bytes per second
    peers_bus_bw: float | None  # median of the other groups; null without any
    ratio: float | None  # bus_bw / peers_bus_bw
    excess_ns: float | None  # transfer time per step above that at the peers' rate
    is_slow: bool


@dataclass(frozen=True, slots=True)
class MeanStep:
    """Numbers of steps, and their mean time."""

    compared: ComparedSteps
    ns: float | None


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link, slow or not, and the time its transfers would take at its peers' rate."""

    link: Link
    expected: ExpectedTransfer
    steps: float  # to which costs refer


@dataclass(frozen=True, slots=True)
class _Rates:
    """Transfers of known sizes by class and group: arrays with a value per class and group."""

    keys: Ints  # columns of `Transfers.keys`
    counts: Ints
    moved: Ints  # bus bytes
    took: Ints  # ns
    per_byte: Floats  # ns; NaN if unknown

    @classmethod
    def of(cls, transfers: Transfers) -> Self:
        """Select the transfers of known sizes."""
        own = np.flatnonzero(transfers.rated)
        moved, took = transfers.rated_moved[own], transfers.rated_took[own]
        return cls(
            keys=transfers.keys[:, own],
            counts=transfers.rated[own],
            moved=moved,
            took=took,
            per_byte=np.where(took > 0, took / np.maximum(moved, 1), np.nan),
        )

    def peers(self) -> list[Ints]:
        """Return the indices of each class; they differ only in the group, and are adjacent."""
        _, kind = alike(*self.keys[:_PEERS])
        return np.split(np.arange(len(kind)), block_starts(kind)[1:]) if len(kind) else []


def links(
    transfers: Transfers, groups: Mapping[Label, GroupSummary], step: MeanStep
) -> tuple[MeasuredLink, ...]:
    """Measure the bandwidth of each group, by class of equal operations and sizes, sorted.

    `transfers` are those of matched collectives, `groups` their groups by label; `step` is the
    mean step, to which costs refer.
    """
    by_class, measured = _Rates.of(transfers), []
    for columns in by_class.peers():
        rates = by_class.per_byte[columns]
        apart = {index for index, _, _ in above_peers(rates, 0.0)}
        measured += [
            _link(by_class, column, peers, index in apart, groups, step)
            for index, (column, peers) in enumerate(
                zip(columns.tolist(), medians_of_others(rates).tolist(), strict=True)
            )
        ]
    return tuple(sorted(measured, key=_order))


def _link(
    by_class: _Rates,
    column: int,
    peers: float,
    is_apart: bool,
    groups: Mapping[Label, GroupSummary],
    step: MeanStep,
) -> MeasuredLink:
    """Return the link of a group and class, and the transfer expected at its peers' rate.

    `column` is the position in `by_class`, `peers` the median ns per byte of the other
    groups (NaN without any), and `is_apart` whether the rate stands apart from theirs.
    """
    tag, op, power, _, label, *pair = by_class.keys[:, column].tolist()
    moved, took = int(by_class.moved[column]), int(by_class.took[column])
    own = float(by_class.per_byte[column])
    group = groups[label]
    ranks = tuple(pair) if op == OP["SendRecv"] else group.ranks or group.present
    steps = step.compared.of_ranks(ranks, tag)
    excess = (took - moved * peers) / steps
    link = Link(
        group=group.description,
        ranks=ranks,
        tag=TAGS[tag],
        op=OPS[op],
        size_from=1 << power,
        count=int(by_class.counts[column]),
        bus_bw=_nullable(NS / own),
        peers_bus_bw=_nullable(NS / peers),
        ratio=_nullable(peers / own),
        excess_ns=_nullable(excess),
        is_slow=is_apart and peers / own < SLOW and excess > LEAST_EXCESS * (step.ns or 0.0),
    )
    expected = ExpectedTransfer(
        group=label, tag=tag, op=op, power=power, pair=(pair[0], pair[1]), ns_per_byte=peers
    )
    return MeasuredLink(link=link, expected=expected, steps=steps)


def _order(measured: MeasuredLink) -> tuple[int, str, int, tuple[int, ...]]:
    link = measured.link
    return TAGS.index(link.tag), link.op, link.size_from, link.ranks


def _nullable(value: float) -> float | None:
    """Return None for NaN."""
    return None if np.isnan(value) else value


def medians_of_others(values: Floats) -> Floats:
    """Return, for each value, the median of all others without NaN; NaN where there is none."""
    present = np.flatnonzero(~np.isnan(values))
    medians = np.full(len(values), np.median(values[present]) if len(present) else np.nan)
    if len(present) == 1:
        medians[present] = np.nan
    elif len(present):
        order = present[np.argsort(values[present], kind="stable")]
        ordered, place = values[order], np.arange(len(present))
        # Leaving one out moves the values behind it up.
        low, high = (len(present) - 2) // 2, (len(present) - 1) // 2
        medians[order] = (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
    return medians


def longer_exchange(
    comparison: RankComparison, steps: ComparedSteps, groups: pa.Table, rank: int
) -> float | None:
    """Return by how much a rank's exposed expert all-to-alls are longer than in other groups.

    Parameters
    ----------
    comparison
        Of all ranks.
    steps
        Numbers of steps.
    groups
        Table `Partial.groups` of all ranks.
    rank
        The rank.

    Returns
    -------
    float or None
        ns per step; None if no other group has all-to-alls of experts.

    """
    transfers = comparison.transfers
    chosen = transfers.of_kind(TAG["EP"], OP["AllToAll"])
    labels, place = np.unique(transfers.keys[LABEL, chosen], return_inverse=True)
    own = groups.filter(pa.array(groups["rank"].to_numpy() == rank))
    is_own = np.isin(labels, own["group"].drop_null().to_numpy())
    if is_own.all() or not is_own.any():
        return None
    count, took = (
        sums(place, values[chosen], len(labels))
        for values in (transfers.counts, transfers.took)
    )
    means = took / count
    peers_ns = float(np.median(means[~is_own]))
    expected = [
        ExpectedTransfer(group=label, tag=TAG["EP"], op=OP["AllToAll"], ns=peers_ns)
        for label in labels[is_own].tolist()
    ]
    excess = sum(by_rank.get(rank, 0.0) for by_rank in comparison.excess(expected))
    return excess / steps.of_rank(rank, TAG["EP"])
