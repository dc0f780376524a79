"""Ranks and pipeline stages whose own work is longer than their peers', and what that costs.

Own work is compute time, and time in which the device is idle. Both are durations on one clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcomm.metrics.findings.finding import (
    Evidence,
    Finding,
    as_peers,
    confidence,
    median,
    spread,
    steps_and_spread,
)
from fastcomm.metrics.outliers import HeatArrays, above_peers, lower_median, peers_of
from fastcomm.trace.run_traces import named_ranks
from fastcomm_kernels.arrays import Floats, Ints

# Minimum share of a cost that remains where another stage computes longer.
_LEAST_OF_SLACK = 0.5
# Minimum share of a cost that others wait in collectives; else messages pass the delay on.
_LEAST_CAUSED = 0.25


# Takes ranks; returns the wait in ns per step that each causes in collectives of which all are
# members, without ranks of which it is unknown.
CommonWaitCaused = Callable[[Sequence[int]], Mapping[int, float]]

_TIED = 0.9  # of the largest cost: suspects with at least this cost are joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements by which ranks are judged."""

    grid: HeatArrays
    stage: Mapping[int, int]  # pipeline stage by rank
    received: Mapping[int, float]  # by rank: bytes of expert parallelism received per step
    waits: Mapping[int, float]  # by rank: wait time, ns per step
    caused: Mapping[int, float]  # by rank: wait caused, ns per step
    common_wait_caused: CommonWaitCaused
    # by rank: ns per step that its expert all-to-alls are longer than in other groups
    longer: Callable[[int], float | None]
    is_host_run: bool = False  # whether ranks compute and communicate without a device
    idle: Mapping[int, Mapping[str, float]] = field(
        default_factory=dict
    )  # `idle.totals.by_rank`

    @property
    def step_ns(self) -> float:
        """Mean iteration time in ns; 0 without any."""
        return self.grid.step_ns or 0.0

    def ranks_of(self, rows: NDArray[np.int64]) -> list[int]:
        """Return the ranks of some rows of the grid."""
        ranks: list[int] = self.grid.ranks[rows].tolist()
        return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """A kind of longer own work: what is said of it, and what limits its cost."""

    name: str
    describe: "Callable[[Measurements, Suspect], Finding]"
    is_limited_to_wait: bool = True  # by the wait that a rank causes
    is_limited_by_slack: bool = True  # by what its stage computes less than another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank or stage whose measure is above its peers', and the ranks that tie with it."""

    rows: Ints  # of the grid, of the rank or of the ranks of a stage
    rank: int
    others: NDArray[np.int64]  # rows of its peers
    mean: float  # ns
    middle: float  # median of its peers, ns
    excess: Floats  # ns above its peers, per step
    work: OwnWork
    tied: tuple[int, ...] = ()  # other ranks
    together: float = 1.0  # delay with the tied ranks, as a multiple of its own
    share: float = 1.0  # its share of the cost, if other suspects delay the same steps

    @property
    def longer(self) -> float:
        """Time by which its own work is longer than that of its peers, in ns."""
        return self.mean - self.middle

    @property
    def cost(self) -> float:
        """Delay of a step in ns, before it is shared with other suspects."""
        return self.longer * self.together

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its rank and the tied ranks, sorted."""
        return tuple(sorted((self.rank, *self.tied)))

    @property
    def its(self) -> str:
        """The possessive pronoun of its ranks."""
        return "their" if self.tied else "its"


def joined_ties(suspects: Sequence[Suspect], caused: CommonWaitCaused) -> list[Suspect]:
    """Join suspects of equal work and nearly equal cost: to fix one alone gains little.

    The joint cost is the longest delay among them, per step: the delay of one of them if all
    are late at once, and the sum if they take turns, in steps or in the collectives of a step.
    """
    ties: list[list[Suspect]] = []
    for suspect in sorted(suspects, key=lambda item: (item.work.name, -item.cost)):
        lead = ties[-1][0] if ties else None
        if lead and lead.work == suspect.work and suspect.cost >= _TIED * lead.cost:
            ties[-1].append(suspect)
        else:
            ties.append([suspect])
    return [_joint(tied, caused) if len(tied) > 1 else tied[0] for tied in ties]


def _joint(tied: Sequence[Suspect], caused: CommonWaitCaused) -> Suspect:
    """Join tied suspects, the most expensive first, with their joint excess and cost."""
    lead, *others = tied
    excess = np.max([suspect.excess for suspect in tied], axis=0)
    by_steps = float(excess.sum() / (lead.excess.sum() or 1.0))
    alone = _alone(tied, caused)
    # One of them delays the step by its cost, every other by the wait for it alone.
    longest = max(suspect.cost - own for suspect, own in zip(tied, alone, strict=True))
    longest += sum(alone)
    together = max(by_steps, longest / lead.cost)
    return replace(
        lead,
        tied=tuple(suspect.rank for suspect in others),
        excess=(excess * together / by_steps).astype(np.float64),
        together=together,
    )


def sharing(suspects: Sequence[Suspect], caused: CommonWaitCaused) -> list[Suspect]:
    """Divide the delays that several suspects cause at once, so that costs add up to the delay.

    Suspects that delay the same time share it equally; the delay beyond all others is a
    suspect's own. This is the Shapley value: the mean gain of its fix over all orders of fixing
    them. Steps alone underestimate suspects that are late at different collectives of a step.
    So a suspect gets at least the mean of two gains: its whole cost, if it is fixed last, and
    the wait for it alone, if it is fixed sooner. Delays of one rank add up, and count as one
    suspect. Costs are ns: a suspect of less than 1 ns, such as 0, shares what its steps share.

    Returns
    -------
    list of Suspect
        In the given order, with `share` set.

    """
    if not suspects:
        return []
    place = _places(suspects)
    count = max(place) + 1
    excess = np.zeros((count, len(suspects[0].excess)))
    cost, alone = np.zeros((2, count))
    for row, suspect, awaited in zip(place, suspects, _alone(suspects, caused), strict=True):
        excess[row] += suspect.excess
        cost[row] += suspect.cost
        alone[row] = max(alone[row], awaited)
    least = (cost + (count - 1) * np.minimum(alone, cost)) / np.maximum(count * cost, 1.0)
    own = _shapley(excess)
    own_share = np.divide(own, excess, out=np.ones_like(own), where=excess > 0)
    return [
        replace(
            suspect,
            share=max(
                float((suspect.excess * own_share[row]).sum() / suspect.excess.sum()),
                float(least[row]),
            ),
        )
        if suspect.excess.any()
        else suspect
        for row, suspect in zip(place, suspects, strict=True)
    ]


def _alone(suspects: Sequence[Suspect], caused: CommonWaitCaused) -> list[float]:
    """Return the wait in ns for each suspect alone, at most its cost; 0 if unknown."""
    by_rank = caused(sorted({rank for suspect in suspects for rank in suspect.ranks}))
    return [
        min(suspect.cost, sum(by_rank.get(rank, 0.0) for rank in suspect.ranks))
        for suspect in suspects
    ]


def _places(suspects: Sequence[Suspect]) -> list[int]:
    """Return a number per suspect, equal for suspects that share a rank."""
    places: list[int] = []
    for number, suspect in enumerate(suspects):
        same = (
            place
            for place, other in zip(places, suspects, strict=False)
            if not set(other.ranks).isdisjoint(suspect.ranks)
        )
        places.append(next(same, number))
    return places


def _shapley(excess: Floats) -> Floats:
    """Return each row's part (Shapley value, ns) of the longest delay of each step (column)."""
    falling = -np.sort(-excess, axis=0)
    beyond = falling - np.vstack([falling[1:], np.zeros_like(falling[:1])])
    parts = beyond / np.arange(1, len(excess) + 1)[:, np.newaxis]
    of_place = parts[::-1].cumsum(axis=0)[::-1]
    place = np.argsort(np.argsort(-excess, axis=0, kind="stable"), axis=0)
    return np.take_along_axis(of_place, place, axis=0)


def limited_to_wait(measured: Measurements, of: Suspect) -> Suspect:
    """Limit the cost of a single suspect to the wait that it causes.

    If all ranks vary, the next one is nearly as late, so that a fix gains little more than that
    wait. Delays that are passed on by messages cause no wait in collectives; they keep their
    cost.
    """
    caused = measured.caused.get(of.rank, 0.0)
    is_alone = of.work.is_limited_to_wait and not of.tied and of.share == 1
    if not is_alone or not _LEAST_CAUSED * of.cost < caused < of.cost:
        return of
    return replace(of, share=caused / of.cost)


def without_slack(measured: Measurements, of: Suspect) -> Suspect:
    """Reduce the cost of a single suspect by what its stage computes less than another one.

    Without the fault, the stage that computes the longest would limit the step. At least half
    of the cost remains: the first and the last passes of a step wait for every stage.
    """
    if not of.work.is_limited_by_slack or of.tied or of.share < 1 or not of.cost:
        return of
    means = measured.grid.mean_by_rank("compute_ns")
    others = [
        lower_median(means[rows])
        for rows in peers_of(measured.grid, measured.stage)
        if not np.isin(of.rows, rows).any() and not np.isnan(means[rows]).all()
    ]
    own = lower_median(means[of.others])
    slack = max([float(stage - own) for stage in others], default=0.0)
    return replace(of, share=min(1.0, max(_LEAST_OF_SLACK, 1 - slack / of.cost)))


def awaited(measured: Measurements, measure: str, least: float, work: OwnWork) -> list[Suspect]:
    """Return the ranks that exceed their stage by a share `least` of the step, if others wait.

    `measure` is a column of the grid, in ns.
    """
    means, suspects = measured.grid.mean_by_rank(measure), []
    for rows in peers_of(measured.grid, measured.stage):
        for index, middle, _ in above_peers(means[rows], least * measured.step_ns):
            own, others = rows[[index]], np.delete(rows, index)
            suspect = Suspect(
                work=work,
                rows=own,
                rank=int(measured.grid.ranks[rows[index]]),
                others=others,
                mean=float(means[rows[index]]),
                middle=middle,
                excess=excess(measured.grid, measure, own, others),
            )
            if _is_awaited(measured, suspect):
                suspects.append(suspect)
    return suspects


def _is_awaited(measured: Measurements, of: Suspect) -> bool:
    """Whether the others wait for the rank, for at least half of its cost."""
    own = measured.waits.get(of.rank)
    peers = median(measured.waits, measured.ranks_of(of.others))
    return own is not None and peers is not None and peers - own >= of.cost / 2


def excess(grid: HeatArrays, measure: str, rows: Ints, others: Ints) -> Floats:
    """Return the ns per step of some ranks' median above others'; 0 if below or unknown."""
    difference = grid.middle(measure, rows) - grid.middle(measure, others)
    return np.maximum(np.nan_to_num(difference), 0)


def named(of: Suspect) -> str:
    """Return "Rank 5", or "Ranks 3, 5", to begin a sentence."""
    return named_ranks(of.ranks).capitalize()


def stage_fact(measured: Measurements, of: Suspect) -> Evidence:
    """Return the stage of a suspect's ranks as evidence; None if they are of several."""
    stages = {measured.stage.get(rank) for rank in of.ranks}
    return Evidence(key="stage", value=stages.pop() if len(stages) == 1 else None)


def compute_evidence(of: Suspect) -> tuple[Evidence, ...]:
    """Return the compute of a suspect and of its peers as evidence."""
    return (
        Evidence(key="compute_ns", value=of.mean, label="compute per step", unit="ns"),
        Evidence(
            key="peers_compute_ns", value=of.middle, label="compute of its peers", unit="ns"
        ),
    )


def wait_evidence(
    measured: Measurements, rank: int, others: Sequence[int]
) -> tuple[Evidence, ...]:
    """Return the wait of a rank and the median wait of others as evidence."""
    own, peers = measured.waits.get(rank), median(measured.waits, others)
    return (
        Evidence(key="wait_ns", value=own, label="waits for others", unit="ns"),
        Evidence(key="peers_wait_ns", value=peers, label="its peers wait", unit="ns"),
    )


def expert_evidence(
    measured: Measurements, rank: int, others: Sequence[int]
) -> tuple[Evidence, ...]:
    """Return what a rank and its peers receive for experts per step, as evidence."""
    own, peers = measured.received.get(rank), median(measured.received, others)
    label = "expert traffic of its peers"
    return (
        Evidence(key="expert_bytes", value=own, label="expert traffic per step", unit="bytes"),
        Evidence(key="peers_expert_bytes", value=peers, label=label, unit="bytes"),
    )


def step_evidence(measured: Measurements, measure: str, of: Suspect) -> tuple[Evidence, ...]:
    """Return the number of steps of a suspect, and the spread of its cost, as evidence.

    These are the steps where `measure` is known of the suspect and its peers, and the standard
    deviation over steps of the difference, or of the excess of ranks found together.
    """
    grid = measured.grid
    difference = grid.middle(measure, of.rows) - grid.middle(measure, of.others)
    spread_ns = spread(of.excess if of.together != 1 else difference)
    return steps_and_spread(int((~np.isnan(difference)).sum()), spread_ns)


def finding_of(
    measured: Measurements,
    ranks: tuple[int, ...],
    cost: float,
    evidence: Sequence[Evidence],
    **more: Any,
) -> Finding:
    """Return a finding on ranks; `cost` is in ns per step, `more` as in `Finding`."""
    finding = Finding(
        ranks=ranks,
        cost_ns=cost,
        share=cost / measured.step_ns,
        confidence="low",
        evidence=tuple(evidence),
        **{"fix": as_peers(ranks), **more},
    )
    return replace(
        finding,
        confidence=confidence(
            cost,
            finding.value("spread_ns"),
            ranks=len(measured.grid.ranks),
            is_matched=bool(measured.waits),
        ),
    )
