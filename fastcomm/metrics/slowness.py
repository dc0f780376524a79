"""Links that are slow, and what they and hot experts make collectives take longer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastcomm.metrics.classes import classes, members
from fastcomm.metrics.findings import Evidence, Finding, Subject
from fastcomm.metrics.links import Found, Step, alone_excess
from fastcomm.metrics.meetings import Events, Meetings
from fastcomm.metrics.outliers import LEAST_SHARE
from fastcomm.trace.schema import OP, TAG
from fastcomm.units import format_bandwidth, format_ns


@dataclass(slots=True)
class _Suspect:
    """Ranks that all of some slow groups have in common."""

    ranks: frozenset[int]
    groups: list[Found]
    cost_ns: float = 0.0


def slow_links(
    events: Events,
    meetings: Meetings,
    linked: Sequence[Found],
    step: Step,
) -> list[Finding]:
    """A finding for each set of ranks that slow groups share; it costs what nothing hides."""
    if not step.ns:
        return []
    suspects: list[_Suspect] = []
    for found in linked:
        if found.link.is_slow:
            cost = _cost(events, meetings, found) / step.count
            _add(suspects, found, cost)
    return [
        _finding(each, step.ns) for each in suspects if each.cost_ns > LEAST_SHARE * step.ns
    ]


def _cost(events: Events, meetings: Meetings, found: Found) -> float:
    by_rank = alone_excess(events, meetings, found.meetings, found.excess)
    return float(np.median(list(by_rank.values()))) if by_rank else 0.0


def _add(suspects: list[_Suspect], found: Found, cost: float) -> None:
    ranks = frozenset(found.link.ranks)
    for each in suspects:
        if each.ranks & ranks:
            each.ranks &= ranks
            each.groups.append(found)
            each.cost_ns += cost
            return
    suspects.append(_Suspect(ranks, [found], cost))


def _finding(suspect: _Suspect, step_ns: float) -> Finding:
    worst = min((each.link for each in suspect.groups), key=lambda link: link.ratio or 1.0)
    ranks = tuple(sorted(suspect.ranks))
    tags = sorted({each.link.tag for each in suspect.groups})
    rate, peers = worst.bus_bw or 0.0, worst.peers_bus_bw or 0.0
    return Finding(
        kind="slow_link",
        subject=Subject(ranks=ranks, group=worst.group, tag="+".join(tags)),
        cost_ns=suspect.cost_ns,
        cost_share=suspect.cost_ns / step_ns,
        evidence=Evidence(
            bus_bw=worst.bus_bw,
            peers_bus_bw=worst.peers_bus_bw,
            slow_groups=len({each.link.ranks for each in suspect.groups}),
        ),
        words=f"Collectives of {' and '.join(tags)} with ranks {', '.join(map(str, ranks))} "
        f"reach {format_bandwidth(rate)} where their peers reach {format_bandwidth(peers)}: a "
        f"slow link of one of them, {format_ns(suspect.cost_ns)} a step.",
    )


def longer_exchange(events: Events, meetings: Meetings, steps: int, rank: int) -> float | None:
    """What a rank's all-to-alls of experts take longer than those of other groups, a step.

    In ns, and only where nothing hides it. Null where no other group exchanges.
    """
    one = meetings.row[meetings.first]
    chosen = np.flatnonzero((events.tag[one] == TAG["EP"]) & (events.op[one] == OP["AllToAll"]))
    (labels,), place = classes(events.group[one][chosen])
    mine = np.isin(labels, events.group[events.rank == rank])
    if mine.all() or not mine.any():
        return None
    parts = [chosen[rows] for rows in members(place, len(labels))]
    means = np.array([meetings.transfer[rows].mean() for rows in parts])
    own = np.concatenate([rows for rows, is_mine in zip(parts, mine, strict=True) if is_mine])
    excess = meetings.transfer[own] - float(np.median(means[~mine]))
    return alone_excess(events, meetings, own, excess).get(rank, 0.0) / steps
