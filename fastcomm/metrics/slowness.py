"""Links that are slow, and what they and hot experts make collectives take longer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.metrics.findings import Evidence, Finding, confidence, spread
from fastcomm.metrics.grouping import classes, sums
from fastcomm.metrics.links import SlowLink
from fastcomm.metrics.matching import Compared, Expected
from fastcomm.metrics.members import Label
from fastcomm.metrics.outliers import LEAST_SHARE, HeatArrays
from fastcomm.metrics.skew import LABEL, NO_PAIR
from fastcomm.trace.run import ranges
from fastcomm.trace.schema import OP, TAG
from fastcomm.units import format_bandwidth, format_ns, percent


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
