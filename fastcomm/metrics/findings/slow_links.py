"""Links whose collectives are slower than those of their peers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastcomm.metrics.findings.finding import (
    Evidence,
    Finding,
    Fix,
    Next,
    ShownEvents,
    Sketch,
    confidence,
    spread,
    steps_and_spread,
)
from fastcomm.metrics.links import Link, MeasuredLink
from fastcomm.metrics.matched_communication import RankComparison
from fastcomm.metrics.outliers import LEAST_SHARE, HeatArrays
from fastcomm.options import EditOptions
from fastcomm.trace.run_traces import ranges
from fastcomm.units import enumeration, format_bandwidth, format_ns, percent

KIND = "slow_link"
_LEAST_SPREADS = 2.0  # between steps: minimum cost of a slow link on the host
_PAIR = 2


@dataclass(slots=True)
class _Suspect:
    """Slow groups, and the ranks that all of them have in common."""

    ranks: frozenset[int]
    groups: list[MeasuredLink]
    cost_ns: float = 0.0

    @property
    def collectives(self) -> int:
        """Number of slow collectives: a single one may be delayed by contention."""
        return sum(group.link.count for group in self.groups)


def slow_links(
    links_: Sequence[MeasuredLink],
    comparison: RankComparison,
    grid: HeatArrays,
    *,
    is_host_run: bool = False,
) -> list[Finding]:
    """Return a finding per set of ranks that slow groups share; costs are exposed ns per step.

    `comparison` has the waits of all ranks, and `grid` the steps. On the host, where transfers
    wait for a core, a link is slow only by twice the spread between steps.
    """
    step = grid.step_ns
    if not step:
        return []
    suspects: list[_Suspect] = []
    slow = [measured for measured in links_ if measured.link.is_slow]
    by_link = comparison.excess([measured.expected for measured in slow])
    for measured, by_rank in zip(slow, by_link, strict=True):
        cost = float(np.median(list(by_rank.values()))) if by_rank else 0.0
        _add(suspects, measured, cost / measured.steps)
    findings = [
        _finding(suspect, grid, step, comparison)
        for suspect in suspects
        if suspect.cost_ns > LEAST_SHARE * step and suspect.collectives > 1
    ]
    return _on_host(findings) if is_host_run else findings


def _on_host(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings on links that cost more than steps differ by, with another reason."""
    return [
        replace(
            finding,
            text=f"{finding.text} On the host, a busy core has the same effect.",
            confidence="low",
        )
        for finding in findings
        if finding.cost_ns > _LEAST_SPREADS * (finding.value("spread_ns") or 0.0)
    ]


def _add(suspects: list[_Suspect], measured: MeasuredLink, cost: float) -> None:
    """Add a slow link to a suspect with common ranks, or as a new one; `cost` is in ns."""
    ranks = frozenset(measured.link.ranks)
    for suspect in suspects:
        if suspect.ranks & ranks:
            suspect.ranks &= ranks
            suspect.groups.append(measured)
            suspect.cost_ns += cost
            return
    suspects.append(_Suspect(ranks, [measured], cost))


def _is_by_clocks(suspect: _Suspect, comparison: RankComparison) -> bool:
    """Whether clocks may be wrong by all that transfers are longer than at the peers' rate."""
    return all(
        (group.link.excess_ns or 0.0) * group.steps / group.link.count
        <= comparison.clock_error(group.link.ranks)
        for group in suspect.groups
    )


def _finding(
    suspect: _Suspect, grid: HeatArrays, step_ns: float, comparison: RankComparison
) -> Finding:
    """Return the finding on ranks that share slow groups; `step_ns` is a mean step."""
    worst = min((group.link for group in suspect.groups), key=lambda link: link.ratio or 1.0)
    ranks, cost = tuple(sorted(suspect.ranks)), suspect.cost_ns
    tags = sorted({group.link.tag for group in suspect.groups})
    exposed = grid.middle("exposed_ns", np.flatnonzero(np.isin(grid.ranks, ranks)))
    spread_ns = spread(exposed)
    by_clocks = _is_by_clocks(suspect, comparison)
    error = format_ns(comparison.clock_error(worst.ranks))
    doubt = f" Clocks may be wrong by as much: {error} per collective." if by_clocks else ""
    return Finding(
        kind=KIND,
        text=f"{_link_of(ranks)} slow: {enumeration(tags)} collectives {_reached(worst)}, "
        f"+{format_ns(cost)} exposed communication per step ({percent(cost / step_ns)} of the "
        f"step).{doubt}",
        ranks=ranks,
        cost_ns=cost,
        share=cost / step_ns,
        confidence="low"
        if by_clocks
        else confidence(cost, spread_ns, ranks=len(grid.ranks), is_matched=True),
        evidence=(
            Evidence(key="group", value=worst.group),
            Evidence(key="tag", value="+".join(tags)),
            *_rates(worst),
            Evidence(
                key="slow_groups", value=len({group.link.ranks for group in suspect.groups})
            ),
            *steps_and_spread(int((~np.isnan(exposed)).sum()), spread_ns),
        ),
        next=Next(
            command="critical-path",
            purpose="whether the link is on the path that sets the step",
        ),
        fix=_fix(ranks),
        moment=ShownEvents(events="transfers", tags=tuple(tags)),
        picture=Sketch(
            of="rates", rates=(("this link", "bus_bw"), ("its peers", "peers_bus_bw"))
        ),
    )


def _reached(link: Link) -> str:
    """Return what collectives of a link reach, and those of its peers."""
    rates = (format_bandwidth(rate or 0.0) for rate in (link.bus_bw, link.peers_bus_bw))
    return "reach {}, those of their peers {}".format(*rates)


def _rates(link: Link) -> tuple[Evidence, ...]:
    """Return the bandwidth of a link and of its peers, bytes per second, as evidence."""
    return (
        Evidence(key="bus_bw", value=link.bus_bw, label="bus bandwidth", unit="bytes/s"),
        Evidence(
            key="peers_bus_bw",
            value=link.peers_bus_bw,
            label="bus bandwidth of its peers",
            unit="bytes/s",
        ),
    )


def _fix(ranks: Sequence[int]) -> Fix | None:
    """Return the fix of the link between two ranks; None among more."""
    if len(ranks) != _PAIR:
        return None
    edit = EditOptions(heal=(f"link:{ranks[0]}-{ranks[1]}",))
    return Fix(edit=edit, text="This link as fast as its peers")


def _link_of(ranks: Sequence[int]) -> str:
    """Return the subject and verb of a sentence on a slow link."""
    if len(ranks) == 1:
        return f"The link of rank {ranks[0]} is"
    return f"A link among ranks {ranges(ranks)} is"
