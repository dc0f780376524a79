"""Findings: the causes of lost time in a run, then its symptoms, each with evidence and cost.

The cost of a cause is the time per step that its fix saves; ranks and stages that delay the
same steps share that time (`sharing`). The cost of a symptom is the time per step that it
takes. Costs are ns, as means over steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fastcomm.units import format_ns, percent
from fastcomm_kernels.arrays import Floats, Ints

FindingKind = Literal[
    "straggler",
    "slow_link",
    "jittery_host",
    "pauses",
    "imbalanced_stage",
    "hot_expert",
    "late_rank",
    "slow_gemm",
    "exposed_communication",
    "copies",
    "idle",
]
SYMPTOMS: tuple[FindingKind, ...] = ("exposed_communication", "copies", "idle")
Confidence = Literal["high", "medium", "low"]

# Minimum share of the step of a finding, and of a cause of low confidence.
LEAST_FINDING = 0.005
LEAST_UNSURE = 0.01
_MOSTLY = 0.5  # share of the step
# From this share of the excess on, a cost is printed as the whole excess.
_WHOLE = 0.99
# Spreads between steps that a cost of medium and of high confidence exceeds: two are the usual
# limit of chance (one case in 20).
_MEDIUM, _HIGH = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The numbers behind a finding; which of them are set depends on its kind."""

    stage: int | None = None  # of the pipeline
    group: str | None = None  # description of the process group
    tag: str | None = None  # parallelisms, joined by "+"
    steps: int | None = None  # that the cost is a mean of
    spread_ns: float | None = None  # standard deviation of the cost between steps
    compute_ns: float | None = None  # of the subject, per step
    peers_compute_ns: float | None = None
    idle_ns: float | None = None
    peers_idle_ns: float | None = None
    idle_cause: str | None = None  # the largest one, or that of most of the longer idle time
    idle_cause_ns: float | None = None  # idle time of this cause
    wait_ns: float | None = None  # in collectives, for others
    peers_wait_ns: float | None = None
    expert_bytes: float | None = None  # of the all-to-alls of expert parallelism
    peers_expert_bytes: float | None = None
    longer_exchange_ns: float | None = None  # than the all-to-alls of other groups
    bus_bw: float | None = None  # bytes per second, of the slowest class of collectives
    peers_bus_bw: float | None = None
    slow_groups: int | None = None  # that have the subject's ranks in common
    exposed_wait_ns: float | None = None  # waiting for the last rank, exposed
    exposed_transfer_ns: float | None = None
    overlap: float | None = None  # share of the communication that overlaps compute
    copies_ns: float | None = None  # that overlap neither compute nor communication
    problem: str | None = None  # size of GEMMs: "4096x1024x512"
    gemm_ns: float | None = None  # their time
    reached: float | None = None  # share of their bound that they reach
    plausible: float | None = None  # and that they could reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause of lost time, or one symptom."""

    kind: FindingKind
    text: str
    ranks: tuple[int, ...]
    cost_ns: float  # of a step
    share: float  # of the mean step
    confidence: Confidence
    evidence: Evidence

    @property
    def is_symptom(self) -> bool:
        """Whether it names where time goes, without the cause."""
        return self.kind in SYMPTOMS

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings that cost enough: causes before symptoms, each by falling cost.

    If devices are mostly idle for a known cause, this counts as a cause.
    """
    enough = [finding for finding in findings if finding.share >= _least(finding)]
    return tuple(
        sorted(
            enough,
            key=lambda finding: (
                finding.is_symptom and not _is_mostly_idle(finding),
                -finding.cost_ns,
                finding.kind,
                finding.ranks,
            ),
        )
    )


def _is_mostly_idle(finding: Finding) -> bool:
    is_known = finding.evidence.idle_cause not in (None, "unknown")
    return finding.kind == "idle" and finding.share >= _MOSTLY and is_known


def _least(finding: Finding) -> float:
    is_unsure = finding.confidence == "low" and not finding.is_symptom
    return LEAST_UNSURE if is_unsure else LEAST_FINDING


def spread(costs: Floats) -> float | None:
    """Return the standard deviation of costs per step, NaN ignored; None for fewer than two."""
    values = costs[~np.isnan(costs)]
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def confidence(
    cost: float, spread_ns: float | None, *, ranks: int, is_matched: bool
) -> Confidence:
    """Return the confidence in a cost.

    Low: one rank, one step, or a cost within twice the spread between steps. High: matched
    across ranks, and above three times the spread. Medium otherwise.

    Parameters
    ----------
    cost
        Time per step, ns.
    spread_ns
        Spread of the cost between steps; None with one step.
    ranks
        Number of ranks that were measured.
    is_matched
        Whether collectives were matched across ranks.

    """
    if ranks < 2 or spread_ns is None or cost <= _MEDIUM * spread_ns:  # noqa: PLR2004 - one rank
        return "low"
    return "high" if is_matched and cost > _HIGH * spread_ns else "medium"


def median(values: Mapping[int, float], ranks: Sequence[int]) -> float | None:
    """Return the median of the values of some ranks; None where no value is known."""
    present = [values[rank] for rank in ranks if rank in values]
    return float(np.median(present)) if present else None


def per_step(
    cost: float,
    step: float,
    kind: str = "",
    excess: float | None = None,
    per_rank: float | None = None,
) -> str:
    """Return a cost as text: "2.16 ms compute per step (2.7 % of the step)".

    Parameters
    ----------
    cost, step
        Cost and mean step in ns.
    kind
        The kind of time.
    excess
        Additional time of the work in ns, if others share the cost.
    per_rank
        Additional time of each rank in ns, if several are late in turns.

    """
    total = cost if excess is None or cost >= _WHOLE * excess else excess
    unit, possessive = f"{kind and ' '}{kind} per step", "its"
    work = f"{format_ns(total)}{unit}"
    if per_rank is not None and per_rank < _WHOLE * total:
        work, possessive = (
            f"{format_ns(per_rank)}{unit} each, in turns: together {format_ns(total)}",
            "their",
        )
    if total != cost:
        work += f"; others delay the same steps, {possessive} share is {format_ns(cost)}"
    return f"{work} ({percent(cost / step)} of the step)"


def findings_table(findings: Sequence[Finding]) -> pa.Table:
    """Return a row per finding, in order; without findings it has the columns as well."""
    rows = [{**asdict(finding), **asdict(finding.evidence)} for finding in findings]
    names = [("kind", pa.string()), ("text", pa.string()), ("ranks", pa.list_(pa.int64()))]
    names += [("cost_ns", pa.float64()), ("share", pa.float64()), ("confidence", pa.string())]
    names += [("stage", pa.int64()), ("group", pa.string()), ("tag", pa.string())]
    return pa.Table.from_pylist(rows, schema=pa.schema(names))


# Takes ranks; returns the wait in ns per step that each causes in collectives of which all are
# members, without ranks of which it is unknown.
CommonWaitCaused = Callable[[Sequence[int]], Mapping[int, float]]

_TIED = 0.9  # of the largest cost: suspects with at least this cost are joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank or stage whose measure is above its peers', and the ranks that tie with it."""

    rows: Ints  # of the grid, of the rank or of the ranks of a stage
    rank: int
    others: NDArray[np.int64]  # rows of its peers
    mean: float  # ns
    middle: float  # median of its peers, ns
    excess: Floats  # ns above its peers, per step
    kind: FindingKind = "straggler"
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
    """Join suspects of one kind with nearly equal cost: to fix one of them alone gains little.

    The joint cost is the longest delay among them, per step: the delay of one of them if all
    are late at once, and the sum if they take turns, in steps or in the collectives of a step.
    """
    ties: list[list[Suspect]] = []
    for suspect in sorted(suspects, key=lambda item: (item.kind, -item.cost)):
        lead = ties[-1][0] if ties else None
        if lead and lead.kind == suspect.kind and suspect.cost >= _TIED * lead.cost:
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
        excess=excess * together / by_steps,
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
