"""Links by the bandwidth that their collectives reach once the last rank is there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from fastcomm.metrics.grouping import classes
from fastcomm.metrics.matching import Expected
from fastcomm.metrics.members import GroupSummary, Label
from fastcomm.metrics.outliers import above_peers
from fastcomm.metrics.skew import Transfers
from fastcomm.trace.schema import OP, OPS, TAGS
from fastcomm_kernels.arrays import Floats, Ints

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
